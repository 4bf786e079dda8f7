//! cuBLAS: the BF16 baseline of every benchmark, and the matmul of weights held as BF16.
//!
//! By default, cuBLAS picks the algorithm of each product with its own heuristic. [`Cublas::tune`] instead times the
//! candidates of cuBLASLt on the given weights and keeps the fastest.

use std::{collections::HashMap, ffi::c_void, fmt, mem::MaybeUninit, ptr};

use cudarc::{
    cublas::{result, sys},
    cublaslt,
};

use crate::{
    device::{
        DeviceBuffer, DeviceError, LaunchError, MatrixMut, MatrixRef, Stream, context_size::CUBLAS_BYTES,
        view::MatrixDesc,
    },
    exec::operands::check_product,
    jit::{process, toolchain::Library},
};

/// The alignment that cuBLASLt assumes for operands by default, in bytes. Tuned plans apply only to operands so
/// aligned.
const TUNED_ALIGN: u64 = 256;
/// The number of proposals to time.
const PROPOSALS: usize = 16;
/// The number of timed rounds per proposal.
const ROUNDS: usize = 5;
/// The minimum number of products per timing: the shortest take a few microseconds.
const PASS: usize = 8;

/// A cuBLAS handle on one stream.
pub struct Cublas {
    handle: sys::cublasHandle_t,
    /// Created when something is tuned.
    lt: Option<LtHandle>,
    /// The fastest plan per product; `None` means the library's own choice.
    tuned: HashMap<Extents, Option<Plan>>,
    stream: Stream,
    /// The workspace of enqueued products.
    workspace: DeviceBuffer<u8>,
}

/// A product without its addresses: `Y[m, n] = X[m, k] * W[n, k]^T`, plus `Y` if `add`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Extents {
    m: i32,
    n: i32,
    k: i32,
    x_pitch: i32,
    w_pitch: i32,
    y_pitch: i32,
    add: bool,
}

/// The device addresses of a product's operands.
#[derive(Clone, Copy)]
struct Addresses {
    x: u64,
    w: u64,
    y: u64,
}

/// A product `Y[m, n] = X[m, k] * W[n, k]^T`, plus `Y` if `add`, in cuBLAS's integer types.
#[derive(Clone, Copy)]
pub(crate) struct Product {
    extents: Extents,
    addresses: Addresses,
}

impl Product {
    /// Creates the product of matrices whose shapes agree. Checks that extents and pitches fit cuBLAS's 32-bit
    /// integers.
    pub(crate) fn new(x: &MatrixDesc, w: &MatrixDesc, y: &MatrixDesc, add: bool) -> Result<Self, LaunchError> {
        let int = |what, value: u64| {
            let limit = i32::MAX as u64;
            i32::try_from(value).map_err(|_| LaunchError::TooLarge { what, value, limit })
        };
        let pitch = |desc: &MatrixDesc| int("a pitch", desc.pitch.max(1));
        let extents = Extents {
            m: int("m", y.rows.into())?,
            n: int("n", y.cols.into())?,
            k: int("k", x.cols.into())?,
            x_pitch: pitch(x)?,
            w_pitch: pitch(w)?,
            y_pitch: pitch(y)?,
            add,
        };
        Ok(Self { extents, addresses: Addresses { x: x.address, w: w.address, y: y.address } })
    }
}

impl Addresses {
    fn are_aligned(self) -> bool {
        [self.x, self.w, self.y].iter().all(|address| address.is_multiple_of(TUNED_ALIGN))
    }
}

/// The result of [`Cublas::tune`].
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct CublasTuning {
    /// The number of timed proposals, excluding the library's own choice.
    pub proposals: usize,
    /// Time of one product with the library's own choice, in microseconds.
    pub own_us: f64,
    /// Time of one product with the fastest proposal, in microseconds.
    pub best_us: f64,
}

// SAFETY: a handle may move between threads; it must not be used by two at a time, which `&mut self` of `matmul` rules
// out.
unsafe impl Send for Cublas {}

impl Cublas {
    /// Creates a handle with its workspace.
    ///
    /// # Errors
    /// cuBLAS cannot be used.
    pub fn new(stream: &Stream) -> Result<Self, DeviceError> {
        let mut cublas = Self::without_workspace(stream)?;
        cublas.set_workspace(stream, DeviceBuffer::zeroed(stream, CUBLAS_BYTES)?)?;
        Ok(cublas)
    }

    /// Creates a handle that must be placed on a stream before each use.
    pub(crate) fn without_workspace(stream: &Stream) -> Result<Self, DeviceError> {
        process::require(Library::Cublas)?;
        stream.device().bind()?;
        let workspace = DeviceBuffer::empty(stream.device());
        let handle = result::create_handle().map_err(|error| refuse("cublasCreate", error))?;
        Ok(Self { handle, lt: None, tuned: HashMap::new(), stream: stream.clone(), workspace })
    }

    /// Moves the handle to another stream of the same device, with a workspace of [`CUBLAS_BYTES`]. Products enqueued
    /// earlier keep their stream and workspace. Allowed during a capture.
    pub(crate) fn set_workspace(&mut self, stream: &Stream, workspace: DeviceBuffer<u8>) -> Result<(), DeviceError> {
        let (need, have) = (CUBLAS_BYTES as u64, workspace.len() as u64);
        if have < need {
            return Err(LaunchError::Room { buffer: "bytes of cuBLAS's workspace", need, have }.into());
        }
        stream.device().bind()?;
        // SAFETY: handle and stream are alive; both belong to the context that is current.
        unsafe { result::set_stream(self.handle, stream.raw().cast()) }
            .map_err(|error| refuse("cublasSetStream", error))?;
        // After the stream: setting a stream resets the workspace.
        // SAFETY: the workspace has this many bytes, is 256-byte aligned and lives as long as it is this handle's.
        unsafe { sys::cublasSetWorkspace_v2(self.handle, workspace.address() as *mut c_void, CUBLAS_BYTES) }
            .result()
            .map_err(|error| refuse("cublasSetWorkspace", error))?;
        (self.stream, self.workspace) = (stream.clone(), workspace);
        Ok(())
    }

    /// Enqueues `Y[m, n] = X[m, k] * W[n, k]^T`, plus `Y` if `add`, on the handle's stream, with fp32 accumulation and
    /// any pitches. Uses the algorithm that [`Cublas::tune`] found for such a product, if any.
    ///
    /// # Errors
    /// Operands whose shapes do not match, that overlap or are on another device, an extent above 2^31 - 1, or a cuBLAS
    /// error.
    pub fn matmul(
        &mut self,
        x: MatrixRef<'_>,
        w: MatrixRef<'_>,
        y: MatrixMut<'_>,
        add: bool,
    ) -> Result<(), DeviceError> {
        let Some(product) = self.check(x, w, &y, add)? else { return Ok(()) };
        // SAFETY: the operands were checked, and are views of memory with these shapes and pitches.
        unsafe { self.enqueue(&product) }
    }

    /// Enqueues a product with the algorithm that [`Cublas::tune`] found for it, or with the library's own choice.
    ///
    /// # Safety
    /// The operands are on the handle's device, `y` overlaps none of the others, and all live until the product is
    /// done.
    pub(crate) unsafe fn enqueue(&self, product: &Product) -> Result<(), DeviceError> {
        let Product { extents, addresses } = product;
        let plan = self.tuned.get(extents).filter(|_| addresses.are_aligned()).and_then(Option::as_ref);
        // SAFETY: the caller's promise; a plan is kept with the extents that it was made for.
        unsafe { self.enqueue_by(plan, extents, *addresses) }
    }

    /// Times cuBLASLt's proposals for this product and uses the fastest for every later product with the same extents,
    /// pitches and `add`. All `ws` have one shape; pass several, so that weights are read from memory and not from a
    /// cache. Overwrites `y`. Waits for the stream; must not run inside a capture.
    ///
    /// Later results may differ in their last bits, because another algorithm sums in another order.
    ///
    /// # Errors
    /// As for [`Cublas::matmul`]; or `ws` is empty or has different shapes.
    pub fn tune(
        &mut self,
        x: MatrixRef<'_>,
        ws: &[MatrixRef<'_>],
        y: MatrixMut<'_>,
        add: bool,
    ) -> Result<CublasTuning, DeviceError> {
        if self.stream.is_capturing()? {
            return Err(LaunchError::Capturing.into());
        }
        let mut problem = None;
        let mut products = Vec::with_capacity(ws.len());
        for w in ws {
            let Some(Product { extents, addresses }) = self.check(x, *w, &y, add)? else { continue };
            let first = *problem.get_or_insert(extents);
            if extents != first {
                let w = w.desc().shape();
                return Err(LaunchError::Output { output: w, tensor: [first.n as u64, first.k as u64] }.into());
            }
            products.push(addresses);
        }
        let none = CublasTuning { proposals: 0, own_us: 0.0, best_us: 0.0 };
        let Some(extents) = problem else { return Ok(none) };
        self.stream.device().bind()?;
        let mut plans: Vec<Option<Plan>> = vec![None];
        if products.iter().all(|product| product.are_aligned()) {
            let lt = match self.lt.take() {
                Some(lt) => lt,
                None => LtHandle::new()?,
            };
            plans.extend(lt.proposals(&extents)?.into_iter().map(Some));
            self.lt = Some(lt);
        }
        let mut times = vec![Vec::with_capacity(ROUNDS); plans.len()];
        for round in 0..=ROUNDS {
            // Rounds interleave the plans, so that a changing clock affects all alike. The first round warms up.
            for (plan, times) in plans.iter().zip(&mut times) {
                match self.time(plan.as_ref(), &extents, &products) {
                    Ok(us) if round > 0 => times.push(us),
                    Ok(_) => {}
                    // A proposal that does not run is skipped; the library's own choice must run.
                    Err(_) if plan.is_some() => times.push(f64::INFINITY),
                    Err(error) => return Err(error),
                }
            }
        }
        let medians: Vec<f64> = times.into_iter().map(median).collect();
        let best = (0..plans.len()).min_by(|a, b| medians[*a].total_cmp(&medians[*b])).unwrap_or_default();
        let found = CublasTuning { proposals: plans.len() - 1, own_us: medians[0], best_us: medians[best] };
        self.tuned.insert(extents, plans.swap_remove(best));
        Ok(found)
    }

    /// Returns the time of one product in microseconds.
    fn time(&self, plan: Option<&Plan>, extents: &Extents, products: &[Addresses]) -> Result<f64, DeviceError> {
        let count = PASS.max(products.len());
        let start = self.stream.event()?;
        for product in products.iter().cycle().take(count) {
            // SAFETY: `tune` has checked these operands, which it borrows.
            unsafe { self.enqueue_by(plan, extents, *product) }?;
        }
        Ok(start.elapsed_us(&self.stream.event()?)? / count as f64)
    }

    /// Checks the operands and returns the product; `None` if there is nothing to compute.
    fn check(
        &self,
        x: MatrixRef<'_>,
        w: MatrixRef<'_>,
        y: &MatrixMut<'_>,
        add: bool,
    ) -> Result<Option<Product>, DeviceError> {
        let ordinal = self.stream.device().ordinal();
        let (x, w, y) = (x.desc(), w.desc(), y.desc());
        check_product(ordinal, x, w.shape(), w.rows.into(), y, [("the weights", w.span())])?;
        w.check_device("the weights", ordinal)?;
        if y.rows == 0 || y.cols == 0 {
            return Ok(None);
        }
        Ok(Some(Product::new(x, w, y, add)?))
    }

    /// # Safety
    /// The addresses point to matrices of these extents and pitches that live until the product is done; `y` overlaps
    /// none of the others. `plan` was made for these extents, and the addresses have the alignment it requires.
    unsafe fn enqueue_by(
        &self,
        plan: Option<&Plan>,
        extents: &Extents,
        Addresses { x, w, y }: Addresses,
    ) -> Result<(), DeviceError> {
        self.stream.device().bind()?;
        let (alpha, beta) = (1.0f32, if extents.add { 1.0f32 } else { 0.0 });
        let (alpha, beta) = (ptr::from_ref(&alpha).cast::<c_void>(), ptr::from_ref(&beta).cast::<c_void>());
        if let (Some(plan), Some(lt)) = (plan, &self.lt) {
            let Descriptors { product, w: w_layout, x: x_layout, y: y_layout, .. } = plan.descriptors;
            // SAFETY: the caller's promise; the plan's descriptors live as long as the plan, and its algorithm was
            // proposed for them with this much workspace.
            return unsafe {
                cublaslt::result::matmul(
                    lt.0,
                    product,
                    alpha,
                    beta,
                    w as *const c_void,
                    w_layout,
                    x as *const c_void,
                    x_layout,
                    y as *const c_void,
                    y_layout,
                    y as *mut c_void,
                    y_layout,
                    &plan.algorithm,
                    self.workspace.address() as *mut c_void,
                    CUBLAS_BYTES,
                    self.stream.raw().cast(),
                )
            }
            .map_err(|error| refuse_lt("cublasLtMatmul", error));
        }
        let bf16 = sys::cudaDataType::CUDA_R_16BF;
        // cuBLAS is column-major: Y^T [n, m] = W [n, k] * X^T [k, m], where W as stored is its own transpose.
        // SAFETY: the caller's promise; alpha and beta are host memory, the handle's pointer mode.
        unsafe {
            result::gemm_ex(
                self.handle,
                sys::cublasOperation_t::CUBLAS_OP_T,
                sys::cublasOperation_t::CUBLAS_OP_N,
                extents.n,
                extents.m,
                extents.k,
                alpha,
                w as *const c_void,
                bf16,
                extents.w_pitch,
                x as *const c_void,
                bf16,
                extents.x_pitch,
                beta,
                y as *mut c_void,
                bf16,
                extents.y_pitch,
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cublasGemmAlgo_t::CUBLAS_GEMM_DFALT,
            )
        }
        .map_err(|error| refuse("cublasGemmEx", error))
    }
}

/// Returns the median of times; infinity if there are none.
fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::INFINITY)
}

/// A cuBLASLt handle.
struct LtHandle(cublaslt::sys::cublasLtHandle_t);

// SAFETY: any thread may use a handle.
unsafe impl Send for LtHandle {}

impl LtHandle {
    fn new() -> Result<Self, DeviceError> {
        process::require(Library::CublasLt)?;
        cublaslt::result::create_handle().map(Self).map_err(|error| refuse_lt("cublasLtCreate", error))
    }

    /// Returns the library's proposals for a product, best first by its own heuristic.
    fn proposals(&self, extents: &Extents) -> Result<Vec<Plan>, DeviceError> {
        use cublaslt::{result, sys};
        let descriptors = Descriptors::new(extents)?;
        let preference = Preference::new()?;
        let mut results = [const { MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::uninit() }; PROPOSALS];
        let mut count = 0;
        // SAFETY: handle, descriptors and preference are alive; the array has room for the requested number of results,
        // of which the library fills the first `count`.
        unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.0,
                descriptors.product,
                descriptors.w,
                descriptors.x,
                descriptors.y,
                descriptors.y,
                preference.0,
                PROPOSALS as i32,
                results.as_mut_ptr().cast(),
                &mut count,
            )
        }
        .result()
        .map_err(|error: result::CublasError| refuse_lt("cublasLtMatmulAlgoGetHeuristic", error))?;
        let count = usize::try_from(count).unwrap_or_default().min(PROPOSALS);
        let mut plans = Vec::with_capacity(count);
        for result in &results[..count] {
            // SAFETY: one of the first `count`.
            let result = unsafe { result.assume_init_ref() };
            let usable = result.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS;
            if usable && result.workspaceSize <= CUBLAS_BYTES {
                plans.push(Plan { descriptors: Descriptors::new(extents)?, algorithm: result.algo });
            }
        }
        Ok(plans)
    }
}

impl Drop for LtHandle {
    fn drop(&mut self) {
        // SAFETY: created by `new`, destroyed once.
        let _ = unsafe { cublaslt::result::destroy_handle(self.0) };
    }
}

/// An algorithm for a product, with the product's descriptors.
struct Plan {
    descriptors: Descriptors,
    algorithm: cublaslt::sys::cublasLtMatmulAlgo_t,
}

/// cuBLASLt's descriptors of a product; null until created.
struct Descriptors {
    product: cublaslt::sys::cublasLtMatmulDesc_t,
    w: cublaslt::sys::cublasLtMatrixLayout_t,
    x: cublaslt::sys::cublasLtMatrixLayout_t,
    y: cublaslt::sys::cublasLtMatrixLayout_t,
}

// SAFETY: descriptors are host memory that no thread owns.
unsafe impl Send for Descriptors {}

impl Descriptors {
    fn new(extents: &Extents) -> Result<Self, DeviceError> {
        use cublaslt::{result, sys};
        let mut all = Self { product: ptr::null_mut(), w: ptr::null_mut(), x: ptr::null_mut(), y: ptr::null_mut() };
        let (fp32, bf16) = (sys::cudaDataType::CUDA_R_32F, sys::cudaDataType::CUDA_R_16BF);
        all.product = result::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, fp32)
            .map_err(|error| refuse_lt("cublasLtMatmulDescCreate", error))?;
        let transposed = cudarc::cublas::sys::cublasOperation_t::CUBLAS_OP_T;
        let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        // SAFETY: the descriptor was just created; the attribute has this type.
        unsafe {
            result::set_matmul_desc_attribute(
                all.product,
                attribute,
                ptr::from_ref(&transposed).cast(),
                size_of_val(&transposed),
            )
        }
        .map_err(|error| refuse_lt("cublasLtMatmulDescSetAttribute", error))?;
        // cuBLASLt is column-major: our rows are its columns. Extents are not negative.
        let layout = |rows: i32, cols: i32, pitch: i32| {
            result::create_matrix_layout(bf16, cols.unsigned_abs().into(), rows.unsigned_abs().into(), pitch.into())
                .map_err(|error| refuse_lt("cublasLtMatrixLayoutCreate", error))
        };
        all.w = layout(extents.n, extents.k, extents.w_pitch)?;
        all.x = layout(extents.m, extents.k, extents.x_pitch)?;
        all.y = layout(extents.m, extents.n, extents.y_pitch)?;
        Ok(all)
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        use cublaslt::result;
        for layout in [self.w, self.x, self.y] {
            if !layout.is_null() {
                // SAFETY: created by `new`, destroyed once.
                let _ = unsafe { result::destroy_matrix_layout(layout) };
            }
        }
        if !self.product.is_null() {
            // SAFETY: as above.
            let _ = unsafe { result::destroy_matmul_desc(self.product) };
        }
    }
}

/// Limits on proposals: the workspace size.
struct Preference(cublaslt::sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new() -> Result<Self, DeviceError> {
        use cublaslt::{result, sys};
        let preference =
            Self(result::create_matmul_pref().map_err(|error| refuse_lt("cublasLtMatmulPreferenceCreate", error))?);
        let bytes = CUBLAS_BYTES as u64;
        let attribute = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        // SAFETY: the preference was just created; the attribute has this type.
        unsafe {
            result::set_matmul_pref_attribute(
                preference.0,
                attribute,
                ptr::from_ref(&bytes).cast(),
                size_of_val(&bytes),
            )
        }
        .map_err(|error| refuse_lt("cublasLtMatmulPreferenceSetAttribute", error))?;
        Ok(preference)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created by `new`, destroyed once.
        let _ = unsafe { cublaslt::result::destroy_matmul_pref(self.0) };
    }
}

impl Drop for Cublas {
    fn drop(&mut self) {
        // A failure could only leak the handle; there is nothing to act on.
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

fn refuse_lt(call: &'static str, error: cublaslt::result::CublasError) -> DeviceError {
    DeviceError::Cublas { call, status: format!("{:?}", error.0) }
}

fn refuse(call: &'static str, error: result::CublasError) -> DeviceError {
    DeviceError::Cublas { call, status: format!("{:?}", error.0) }
}
