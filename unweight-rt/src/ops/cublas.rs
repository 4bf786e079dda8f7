//! cuBLAS: the BF16 baseline of every benchmark, and the matmul of weights that are stored raw or decoded whole.

use std::{ffi::c_void, fmt, ptr};

use cudarc::cublas::{result, sys};

use crate::{
    device::{DeviceBuffer, DeviceError, MatrixMut, MatrixRef, Refusal, Stream},
    jit::toolchain::{self, Library},
    ops::check_product,
};

/// What NVIDIA recommends for Hopper. Given explicitly, so that a captured graph does not name memory of the library's own.
const WORKSPACE_BYTES: usize = 32 << 20;

/// A cuBLAS handle on one stream.
pub struct Cublas {
    handle: sys::cublasHandle_t,
    stream: Stream,
    /// In use by whatever is enqueued.
    _workspace: DeviceBuffer<u8>,
}

// SAFETY: a handle may move between threads; it must not be used by two at a time, which `&mut self` of `matmul` rules out.
unsafe impl Send for Cublas {}

impl Cublas {
    /// A handle with its workspace.
    ///
    /// # Errors
    /// There is no usable cuBLAS.
    pub fn new(stream: &Stream) -> Result<Self, DeviceError> {
        toolchain::require(Library::Cublas)?;
        stream.device().bind()?;
        let workspace = DeviceBuffer::zeroed(stream, WORKSPACE_BYTES)?;
        let handle = result::create_handle().map_err(|error| refuse("cublasCreate", error))?;
        let cublas = Self { handle, stream: stream.clone(), _workspace: workspace };
        // SAFETY: handle and stream are alive; both belong to the context that is current.
        unsafe { result::set_stream(handle, stream.raw().cast()) }.map_err(|error| refuse("cublasSetStream", error))?;
        // After the stream: setting a stream resets the workspace.
        // SAFETY: the workspace has this many bytes, is 256-byte aligned and lives as long as the handle.
        unsafe { sys::cublasSetWorkspace_v2(handle, cublas._workspace.address() as *mut c_void, WORKSPACE_BYTES) }
            .result()
            .map_err(|error| refuse("cublasSetWorkspace", error))?;
        Ok(cublas)
    }

    /// Enqueues `Y[m, n] = X[m, k] * W[n, k]^T`, plus `Y` where `add`, on the handle's stream; fp32 accumulation. Any pitches.
    ///
    /// # Errors
    /// Operands that do not agree, overlap or lie on another device, an extent above 2^31 - 1, or cuBLAS's refusal.
    pub fn matmul(
        &mut self,
        x: MatrixRef<'_>,
        w: MatrixRef<'_>,
        y: MatrixMut<'_>,
        add: bool,
    ) -> Result<(), DeviceError> {
        let own = self.stream.device().ordinal();
        let (x, w, y) = (x.place(), w.place(), y.place());
        check_product(own, x, w.shape(), w.rows.into(), y, [("the weights", w.span())])?;
        w.check_device("the weights", own)?;
        if y.rows == 0 || y.cols == 0 {
            return Ok(());
        }
        let int = |what, value: u64| {
            let limit = i32::MAX as u64;
            i32::try_from(value).map_err(|_| Refusal::TooLarge { what, value, limit })
        };
        let (m, n, k) = (int("m", y.rows.into())?, int("n", y.cols.into())?, int("k", x.cols.into())?);
        let pitch = |place: &crate::device::view::Place| int("a pitch", place.pitch.max(1));
        let (x_pitch, w_pitch, y_pitch) = (pitch(x)?, pitch(w)?, pitch(y)?);
        self.stream.device().bind()?;
        let (alpha, beta) = (1.0f32, if add { 1.0f32 } else { 0.0 });
        let bf16 = sys::cudaDataType::CUDA_R_16BF;
        // cuBLAS is column-major: Y^T [n, m] = W [n, k] * X^T [k, m], where W as stored is its own transpose.
        // SAFETY: the views were held against their memory when they were made and have these shapes and pitches; alpha and beta are host memory, the handle's pointer mode.
        unsafe {
            result::gemm_ex(
                self.handle,
                sys::cublasOperation_t::CUBLAS_OP_T,
                sys::cublasOperation_t::CUBLAS_OP_N,
                n,
                m,
                k,
                ptr::from_ref(&alpha).cast(),
                w.address as *const c_void,
                bf16,
                w_pitch,
                x.address as *const c_void,
                bf16,
                x_pitch,
                ptr::from_ref(&beta).cast(),
                y.address as *mut c_void,
                bf16,
                y_pitch,
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cublasGemmAlgo_t::CUBLAS_GEMM_DFALT,
            )
        }
        .map_err(|error| refuse("cublasGemmEx", error))
    }
}

impl Drop for Cublas {
    fn drop(&mut self) {
        // A failure would be a leak and nothing to act on.
        let _ = self.stream.device().bind();
        // SAFETY: created by `new`, destroyed once.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

impl fmt::Debug for Cublas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cublas on {:?}", self.stream)
    }
}

fn refuse(call: &'static str, error: result::CublasError) -> DeviceError {
    DeviceError::Cublas { call, status: format!("{:?}", error.0) }
}
