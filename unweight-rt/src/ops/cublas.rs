//! cuBLAS: the BF16 baseline of every benchmark, and the matmul of weights that are stored raw or decoded whole.

use std::{ffi::c_void, fmt, ptr};

use cudarc::cublas::{result, sys};

use crate::{
    device::{DeviceBuffer, DeviceError, Stream},
    jit::toolchain::{self, Library},
    weight::DeviceMatrix,
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

    /// Enqueues `Y[m, n] = X[m, k] * W[n, k]^T`, plus `Y` where `add`; fp32 accumulation.
    pub fn matmul(
        &mut self,
        x: &DeviceMatrix,
        w: &DeviceMatrix,
        y: &mut DeviceMatrix,
        add: bool,
    ) -> Result<(), DeviceError> {
        let (m, n, k) = (x.rows(), w.rows(), x.cols());
        if w.cols() != k || (y.rows(), y.cols()) != (m, n) {
            let (yr, yc, wc) = (y.rows(), y.cols(), w.cols());
            return Err(DeviceError::Shape(format!(
                "Y[{yr}, {yc}] = X[{m}, {k}] * W[{n}, {wc}]^T does not go together"
            )));
        }
        let int = |value: u32| {
            i32::try_from(value).map_err(|_| DeviceError::Shape(format!("dimension {value} exceeds cuBLAS's 2^31 - 1")))
        };
        let (m, n, k) = (int(m)?, int(n)?, int(k)?);
        if m == 0 || n == 0 || k == 0 {
            return Err(DeviceError::Shape(format!("a matmul of m = {m}, n = {n}, k = {k} has nothing to do")));
        }
        self.stream.device().bind()?;
        let (alpha, beta) = (1.0f32, if add { 1.0f32 } else { 0.0 });
        let bf16 = sys::cudaDataType::CUDA_R_16BF;
        // cuBLAS is column-major: Y^T [n, m] = W [n, k] * X^T [k, m], where W as stored is its own transpose.
        // SAFETY: the matrices have these shapes (checked above); alpha and beta are host memory, the handle's pointer mode.
        unsafe {
            result::gemm_ex(
                self.handle,
                sys::cublasOperation_t::CUBLAS_OP_T,
                sys::cublasOperation_t::CUBLAS_OP_N,
                n,
                m,
                k,
                ptr::from_ref(&alpha).cast(),
                w.data().address() as *const c_void,
                bf16,
                k,
                x.data().address() as *const c_void,
                bf16,
                k,
                ptr::from_ref(&beta).cast(),
                y.data_mut().address() as *mut c_void,
                bf16,
                n,
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
