//! Layers in the memory and on the streams of another framework, such as torch.
//!
//! ```text
//! the framework's   weights bf16 --pack_at--> sections --layer--> Linear          x, y, scratch, stream
//! the interop's     kernels, packer, cuBLAS, the counters of each stream               |
//!                                                          enqueue <-------------------+
//! ```
//! An [`Interop`] owns what the framework does not provide. Operands and scratch are passed as addresses, streams as
//! raw handles. The caller keeps them valid: these calls are unsafe, and each states its requirements.
//! [`Interop::enqueue`] neither allocates nor waits, and may be captured. [`Interop::layer`] compiles and loads every
//! kernel that a batch can need.
//!
//! Where weights are expanded to BF16 for cuBLAS (by default on architectures without `wgmma`, at batches where that is
//! faster), the scratch also holds the BF16 matrix and cuBLAS's workspace.

mod counters;
mod scratch;

use std::{
    collections::HashMap,
    ffi::c_void,
    fmt,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use cudarc::driver::result;
use unweight_codegen::{
    VariantSpec,
    spec::{EmbedSource, EmbedSpec, Epilogue},
};
use unweight_format::{
    EncodingId, TileGrid,
    raw::packed::{self, Window},
};

use self::{counters::Counters, scratch::Parts};
use crate::{
    choose::route::{Route, RoutePolicy, Routes, Weight},
    device::{
        Call, Device, DeviceBuffer, DeviceError, KernelSet, LaunchError, MatrixMut, MatrixRef, Stream,
        buffer::{copy_on_device, copy_to_device, length},
        context_size::CUBLAS_BYTES,
        module::LoadedKernel,
    },
    exec::{ExecContext, cublas::Cublas, workspace::Workspace},
    layer::{
        build::{expanding, has_cublas},
        experts::{Experts, ExpertsShape, RoutedAt},
        linear::{Linear, PackedLinear},
        options::LoadOptions,
    },
    ops::{
        embed::Embed,
        pack::{PackError, Packer},
        update::{SparseUpdate, Updated, Updater},
    },
    weight::{DevicePacked, check_capacity},
};

/// Device addresses of the sections of a packed tensor; all are multiples of 256.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedAt {
    /// u8 `[tiles, 6144]`.
    pub packed: u64,
    /// u32 `[tiles, 4]`.
    pub escape_heads: u64,
    /// u32 `[escape_words]`; any address if there are none.
    pub escapes: u64,
    /// The number of u32 words of escape lists, or the capacity for them.
    pub escape_words: usize,
}

/// New values for some elements of a layer's weight.
#[derive(Clone, Copy, Debug)]
pub struct ElementsAt<'a> {
    /// The layer, which must be packed.
    pub layer: &'a Linear,
    /// Address of i64 `[len]`: `row * k + column`, ascending.
    pub index: u64,
    /// Address of bf16 `[len]`.
    pub values: u64,
    /// The number of elements.
    pub len: u32,
}

/// A range of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scratch {
    /// Device address, a multiple of 256.
    pub address: u64,
    /// The number of bytes.
    pub bytes: u64,
}

/// Routes by `(n, k, escapes)`.
type RoutesByShape = HashMap<(u32, u32, bool), Routes<Arc<LoadedKernel>>>;

/// The operands of a launch, borrowed from a framework.
struct Borrowed<'a> {
    stream: Stream,
    workspace: Workspace,
    x: MatrixRef<'a>,
    y: MatrixMut<'a>,
}

/// Kernels, a packer and counters for layers in another framework's memory. May be used from several threads at once.
pub struct Interop {
    kernels: KernelSet,
    /// One tensor is packed at a time.
    packer: Mutex<Packer>,
    /// Created for the first update.
    updater: Mutex<Option<Updater>>,
    /// Loaded for the first lookup.
    embed: OnceLock<Embed>,
    stream: Stream,
    policy: RoutePolicy,
    /// The loaded routes: models have many layers of few shapes.
    routes: Mutex<RoutesByShape>,
    counters: Counters,
    /// Created for the first layer that needs it; used by one launch at a time.
    cublas: Mutex<Option<Cublas>>,
}

impl Interop {
    /// Prepares packing and launches on the device of these kernels.
    ///
    /// # Errors
    /// A kernel of the packer cannot be compiled or loaded, or the device failed.
    pub fn new(kernels: KernelSet, options: LoadOptions) -> Result<Self, DeviceError> {
        let chooser = kernels.chooser().clone();
        let stream = kernels.device().stream()?;
        Ok(Self {
            packer: Mutex::new(Packer::new(&stream, &kernels)?),
            updater: Mutex::default(),
            embed: OnceLock::new(),
            // No tensor is decoded, hence no code limit.
            policy: expanding(options.wanted(chooser, 0), has_cublas),
            counters: Counters::new(&stream)?,
            routes: Mutex::default(),
            cublas: Mutex::default(),
            stream,
            kernels,
        })
    }

    /// Returns the kernels of the device.
    pub fn kernels(&self) -> &KernelSet {
        &self.kernels
    }

    /// Returns the device of the kernels.
    fn device(&self) -> &Device {
        self.kernels.device()
    }

    /// Packs contiguous BF16 `[n, k]` into allocated memory. `to.escape_words` is the capacity for escape lists, at
    /// least [`Packer::escape_words_max`]. Returns the window and the number of words used. Runs on a stream of its own
    /// and waits for it.
    ///
    /// # Safety
    /// `weights` is the address of `n * k` BF16, and `to` names sections of the sizes that the shape requires, all on
    /// this device. Work of other streams on this memory is done before the call, and nothing else accesses it during
    /// the call.
    ///
    /// # Errors
    /// [`PackError`], which states why the weights cannot be packed.
    pub unsafe fn pack_at(&self, weights: u64, (n, k): (u32, u32), to: PackedAt) -> Result<(Window, usize), PackError> {
        let device = self.device();
        let grid = TileGrid::new(n as usize, k as usize).map_err(DeviceError::from)?;
        packed::packable_shape(grid)?;
        // SAFETY: the caller's promise.
        let weights = unsafe { MatrixRef::from_raw(device, weights, n, k, k.into()) }.map_err(DeviceError::from)?;
        // SAFETY: the caller's promise. The packing kernels read nothing past the end of a section.
        let (mut packed, mut heads, mut escapes) = unsafe { sections(device, grid, to) }.map_err(DeviceError::from)?;
        self.packer().pack_at(weights, &mut packed, &mut heads, &mut escapes)
    }

    /// Creates a layer from packed weights in borrowed memory. Compiles and loads the kernels of every batch. `n` and
    /// `k` must be multiples of 64: layers are not padded.
    ///
    /// # Safety
    /// `at` names sections of the sizes that the shape requires on this device, each followed by 256 readable bytes.
    /// They stay allocated and unmodified until the layer is dropped and its work is done, including every replay of a
    /// graph that captured it. Their contents need not be trusted.
    ///
    /// # Errors
    /// A shape that cannot be packed, addresses that are not multiples of 256, a kernel that cannot be compiled or
    /// loaded, or a driver error.
    pub unsafe fn layer(&self, (n, k): (u32, u32), window: Window, at: PackedAt) -> Result<Linear, DeviceError> {
        let grid = TileGrid::new(n as usize, k as usize)?;
        // SAFETY: the caller's promise.
        let (packed, heads, escapes) = unsafe { sections(self.device(), grid, at) }?;
        let packed = DevicePacked::new(grid, window, packed, heads, escapes)?;
        let routes = self.routes((n, k), packed.has_escapes())?;
        Ok(Linear::Packed(PackedLinear::new((n, k), packed, routes)?))
    }

    /// Compiles and loads the kernels that [`Interop::layer`] needs for a shape with escapes, and those of
    /// [`Interop::update_at`]. This is the slow part of a first layer and does not need its weights.
    ///
    /// # Errors
    /// A kernel that cannot be compiled, or a driver error.
    pub fn prepare(&self, shape: (u32, u32)) -> Result<(), DeviceError> {
        self.routes(shape, true)?;
        let mut guard = self.updater.lock().unwrap_or_else(PoisonError::into_inner);
        self.updater_in(&mut guard).map(drop)
    }

    /// Loads every kernel that any batch needs for a shape.
    fn routes(&self, (n, k): (u32, u32), escapes: bool) -> Result<Routes<Arc<LoadedKernel>>, DeviceError> {
        let cached = || self.routes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(routes) = cached().get(&(n, k, escapes)) {
            return Ok(routes.clone());
        }
        let routes = self.policy.packed_routes(&Weight::stored(n, k, EncodingId::PACKED), escapes);
        if routes.iter().any(|choice| matches!(choice.kernel, Route::ExpandToBf16 { .. })) {
            self.cublas_of(&mut self.cublas())?;
        }
        let routes = RoutePolicy::take_routes(&self.kernels, &routes)?;
        cached().insert((n, k, escapes), routes.clone());
        Ok(routes)
    }

    /// Writes the weights of a layer as contiguous BF16 `[n, k]`. Runs on a stream of its own and waits for it.
    ///
    /// # Safety
    /// `output` is the address of `n * k` BF16 on this device. Work of other streams on them is done before the call,
    /// and nothing else accesses them during the call.
    ///
    /// # Errors
    /// A layer that is not packed or overlaps the output, or a driver error.
    pub unsafe fn unpack_at(&self, layer: &Linear, output: u64) -> Result<(), DeviceError> {
        let (n, k) = (layer.n(), layer.k());
        let packed = layer.packed_weights().ok_or(LaunchError::NotPacked)?;
        // SAFETY: the caller's promise.
        let output = unsafe { MatrixMut::from_raw(self.device(), output, n, k, k.into()) }?;
        let packer = self.packer();
        packer.unpack(packed, output)?;
        packer.stream().synchronize()
    }

    /// Returns the bytes of scratch that [`Interop::update_at`] needs for these updates.
    ///
    /// # Errors
    /// A layer that is not packed.
    pub fn update_scratch_bytes(&self, updates: &[ElementsAt<'_>]) -> Result<u64, DeviceError> {
        let jobs = jobs(updates)?;
        Ok(4 * Updater::scratch_words(jobs.iter().map(|job| job.tensor)) as u64 + DeviceBuffer::<u32>::PAD_BYTES as u64)
    }

    /// Replaces elements of layers in place, and leaves a layer unchanged where that is not possible ([`Updated`]). The
    /// first call compiles kernels ([`Interop::prepare`]). Runs on a stream of its own and waits for it.
    ///
    /// # Safety
    /// Addresses of updates and scratch are on this device, and have the lengths that they state. No layer is listed
    /// twice. Work of other streams on this memory and on the layers is done before the call, and nothing else accesses
    /// them during the call.
    ///
    /// # Errors
    /// A layer that is not packed, a scratch smaller than [`Interop::update_scratch_bytes`], a kernel that cannot be
    /// compiled, or a driver error, after which layers may be updated in part.
    pub unsafe fn update_at(&self, updates: &[ElementsAt<'_>], scratch: Scratch) -> Result<Vec<Updated>, DeviceError> {
        let (jobs, need) = (jobs(updates)?, self.update_scratch_bytes(updates)?);
        check_capacity(
            "bytes of scratch",
            length("bytes of scratch", scratch.bytes)?,
            length("bytes of scratch", need)?,
        )?;
        let words = length("words", need)? / 4 - DeviceBuffer::<u32>::PAD_BYTES / 4;
        // SAFETY: the scratch has room for the words and their padding.
        let mut scratch = unsafe { DeviceBuffer::<u32>::borrow(self.device(), scratch.address, words) }?;
        let mut guard = self.updater.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the caller's promises.
        unsafe { self.updater_in(&mut guard)?.update(&jobs, &mut scratch) }
    }

    fn updater_in<'u>(&self, guard: &'u mut Option<Updater>) -> Result<&'u Updater, DeviceError> {
        Ok(match guard {
            Some(updater) => updater,
            none => none.insert(Updater::new(&self.stream, &self.kernels)?),
        })
    }

    /// Returns the bytes of scratch that [`Interop::enqueue`] needs for this batch. Often 0; if weights are expanded, 2
    /// bytes per weight and 32 MiB.
    ///
    /// # Errors
    /// [`LaunchError::Epilogue`] if the packed layer was not loaded for this epilogue.
    pub fn scratch_bytes(&self, layer: &Linear, m: u32, epilogue: Epilogue) -> Result<u64, DeviceError> {
        Ok(Parts::of(layer.context_size_at(m, epilogue)?).bytes())
    }

    /// Enqueues `y[m, n] = x[m, k] * W^T` (or `+=` with [`Epilogue::StoreAdd`]) on a stream of the framework. Rows are
    /// contiguous; `x` and `y` begin at multiples of 16 bytes. May be called during a capture; the graph may then run
    /// concurrently with the stream and with graphs of other captures.
    ///
    /// # Safety
    /// - `stream` is a stream of this device's primary context. If a stream was destroyed, its work is done before
    ///   another stream with the same handle is passed.
    /// - The work recorded by one capture never runs twice at the same time, for example as two executables of a
    ///   graph, or as two child nodes of a graph. Its calls on one stream run in the order of the calls, as CUDA orders
    ///   them by default.
    /// - `x` is the address of `m * k` BF16, `y` of `m * n`, and `scratch` of `scratch.bytes` bytes, all on this device
    ///   and without overlap. They stay allocated until the work is done, including every replay of a graph that
    ///   captured it.
    /// - The caller orders work of other streams on this memory with this call. The contents of the scratch do not
    ///   matter before or after.
    ///
    /// # Errors
    /// Everything is checked before anything is enqueued. [`LaunchError::Room`] if the scratch is smaller than
    /// [`Interop::scratch_bytes`].
    pub unsafe fn enqueue(
        &self,
        layer: &Linear,
        stream: *mut c_void,
        (x, m, y): (u64, u32, u64),
        scratch: Scratch,
        epilogue: Epilogue,
    ) -> Result<(), DeviceError> {
        if m == 0 {
            return Ok(());
        }
        let (device, parts) = (self.device(), Parts::of(layer.context_size_at(m, epilogue)?));
        // SAFETY: the caller's promises.
        let Borrowed { stream, workspace, x, y } =
            unsafe { self.borrowed(layer, stream, (x, m, y), (scratch, parts), epilogue) }?;
        if !parts.cublas {
            let slot = DeviceBuffer::empty(device);
            return layer.enqueue(&mut ExecContext::of_parts(stream, workspace, slot, None), x, y, epilogue);
        }
        // SAFETY: as above.
        let (slot, cublas_workspace) = unsafe {
            (
                DeviceBuffer::borrow(
                    device,
                    scratch.address + parts.slot_at(),
                    length("bytes of a slot", parts.slot)?,
                )?,
                DeviceBuffer::borrow(device, scratch.address + parts.cublas_at(), CUBLAS_BYTES)?,
            )
        };
        // The handle stays placed on this stream until the product is enqueued; earlier products keep their stream and
        // workspace.
        let mut guard = self.cublas();
        self.cublas_of(&mut guard)?.set_workspace(&stream, cublas_workspace)?;
        let mut ctx = ExecContext::of_parts(stream, workspace, slot, guard.take());
        let enqueued = layer.enqueue(&mut ctx, x, y, epilogue);
        *guard = ctx.into_cublas();
        enqueued
    }

    /// Returns whether [`Interop::enqueue_with_bias`] can multiply a batch: not if weights are expanded to BF16.
    pub fn takes_bias(&self, layer: &Linear, m: u32) -> bool {
        matches!(layer, Linear::Packed(layer) if layer.takes_bias(m))
    }

    /// Like [`Interop::enqueue`], but `y[m, n] = x[m, k] * W^T + bias[n]`, added in fp32 and rounded once. The scratch
    /// is that of [`Epilogue::StoreAdd`].
    ///
    /// # Safety
    /// As for [`Interop::enqueue`]; `bias` is the address of `n` BF16, a multiple of 16, with the duties of `x`.
    ///
    /// # Errors
    /// As for [`Interop::enqueue`], and for a batch that [`Interop::takes_bias`] excludes.
    pub unsafe fn enqueue_with_bias(
        &self,
        layer: &Linear,
        stream: *mut c_void,
        (x, m, y): (u64, u32, u64),
        scratch: Scratch,
        bias: u64,
    ) -> Result<(), DeviceError> {
        if m == 0 {
            return Ok(());
        }
        let Linear::Packed(packed) = layer else { return Err(LaunchError::NotPacked.into()) };
        let (device, parts) = (self.device(), Parts::of(layer.context_size_at(m, Epilogue::StoreAdd)?));
        // SAFETY: the caller's promises.
        let (Borrowed { stream, workspace, x, y }, bias) = unsafe {
            (
                self.borrowed(layer, stream, (x, m, y), (scratch, parts), Epilogue::StoreAdd)?,
                MatrixRef::from_raw(device, bias, 1, layer.n(), layer.n().into())?,
            )
        };
        let mut ctx = ExecContext::of_parts(stream, workspace, DeviceBuffer::empty(device), None);
        packed.enqueue_with_bias(&mut ctx, x, bias, y)
    }

    /// Borrows the operands of a launch, and checks that they are those of a packed layer.
    ///
    /// # Safety
    /// As for [`Interop::enqueue`].
    unsafe fn borrowed<'a>(
        &'a self,
        layer: &Linear,
        stream: *mut c_void,
        (x, m, y): (u64, u32, u64),
        (scratch, parts): (Scratch, Parts),
        epilogue: Epilogue,
    ) -> Result<Borrowed<'a>, DeviceError> {
        let device = self.device();
        if !layer.is_packed() {
            return Err(LaunchError::NotPacked.into());
        }
        check_capacity(
            "bytes of scratch",
            length("bytes of scratch", scratch.bytes)?,
            length("bytes", parts.bytes())?,
        )?;
        let columns = if epilogue == Epilogue::SiluMul { layer.n() / 2 } else { layer.n() };
        // SAFETY: the caller's promises.
        let (stream, x, y) = unsafe {
            (
                device.borrow_stream(stream),
                MatrixRef::from_raw(device, x, m, layer.k(), layer.k().into())?,
                MatrixMut::from_raw(device, y, m, columns, columns.into())?,
            )
        };
        let workspace = if parts.slot_at() == 0 {
            Workspace { partials: DeviceBuffer::empty(device), counters: DeviceBuffer::empty(device) }
        } else {
            // SAFETY: the scratch has room for both and their readable padding, by the caller's promise.
            unsafe { self.workspace(&stream, scratch.address, parts) }?
        };
        Ok(Borrowed { stream, workspace, x, y })
    }

    /// Creates the experts of a mixture from packed weights in borrowed memory, and loads every kernel that any batch
    /// needs. [`Experts::new`] states the required shapes and how the rows of a gate and its up are interleaved.
    ///
    /// # Safety
    /// As for [`Interop::layer`], for both tensors.
    ///
    /// # Errors
    /// Sizes that no kernel supports, addresses that are not multiples of 256, a kernel that cannot be compiled or
    /// loaded, or a driver error.
    pub unsafe fn experts(
        &self,
        shape: ExpertsShape,
        gate_up: (Window, PackedAt),
        down: (Window, PackedAt),
    ) -> Result<Experts, DeviceError> {
        let tensor = |[n, k]: [u64; 2], (window, at): (Window, PackedAt)| {
            let grid = TileGrid::new(length("output features", n)?, length("input features", k)?)?;
            // SAFETY: the caller's promise.
            let (packed, heads, escapes) = unsafe { sections(self.device(), grid, at) }?;
            DevicePacked::new(grid, window, packed, heads, escapes)
        };
        Experts::new(&self.kernels, shape, tensor(shape.gate_up(), gate_up)?, tensor(shape.down(), down)?)
    }

    /// Enqueues `y[m, hidden] = sum of weight * expert(x)` over the experts of each row (or `+=`, with `adds`) on a
    /// stream of the framework. Rows are contiguous; `x` and `y` begin at multiples of 16 bytes, ids and weights at
    /// multiples of 4. May be called during a capture; a replay reads ids and weights when it runs.
    ///
    /// # Safety
    /// - `stream` is a stream of this device's primary context.
    /// - `x` and `y` are addresses of `m * hidden` BF16, `routed` of `m * top_k` ids and weights, `scratch` of at least
    ///   [`ExpertsShape::scratch_bytes`] bytes, all on this device and without overlap. They stay allocated until the
    ///   work is done, including every replay of a graph that captured it.
    /// - The caller orders work of other streams on this memory with this call. The contents of the scratch do not
    ///   matter before or after.
    ///
    /// # Errors
    /// Everything is checked before anything is enqueued. [`LaunchError::Room`] if the scratch is too small.
    pub unsafe fn enqueue_experts(
        &self,
        experts: &Experts,
        stream: *mut c_void,
        (x, m, y): (u64, u32, u64),
        routed: RoutedAt,
        scratch: Scratch,
        adds: bool,
    ) -> Result<(), DeviceError> {
        if m == 0 {
            return Ok(());
        }
        let (device, hidden) = (self.device(), experts.shape().hidden);
        // SAFETY: the caller's promises.
        unsafe {
            let stream = device.borrow_stream(stream);
            let x = MatrixRef::from_raw(device, x, m, hidden, hidden.into())?;
            let y = MatrixMut::from_raw(device, y, m, hidden, hidden.into())?;
            experts.enqueue_at(&stream, x, routed, y, (scratch.address, scratch.bytes), adds)
        }
    }

    /// Compiles and loads the kernel of [`Interop::enqueue_embed`], which otherwise its first call does, outside of
    /// captures.
    ///
    /// # Errors
    /// A kernel that cannot be compiled, or a driver error.
    pub fn prepare_embed(&self) -> Result<(), DeviceError> {
        self.embed_kernel().map(drop)
    }

    fn embed_kernel(&self) -> Result<&Embed, DeviceError> {
        if let Some(embed) = self.embed.get() {
            return Ok(embed);
        }
        let spec = EmbedSpec { source: EmbedSource::Packed, pdl: false };
        let embed = Embed::new(self.kernels.get(&VariantSpec::embed(self.device().info().arch, spec))?)?;
        Ok(self.embed.get_or_init(|| embed))
    }

    /// Enqueues `y[r] = W[ids[r]]` for `m` rows on a stream of the framework: lookups in an embedding, which may be the
    /// weight of the head. `rows` is (address of ids, `m`, address of y). An id that is not a row of the weight results
    /// in zeros, and in `1 + r` in the word at `fault`. May be called during a capture.
    ///
    /// # Safety
    /// - `stream` is a stream of this device's primary context.
    /// - The addresses are of u32 `[m]`, of BF16 `[m, k]` at a multiple of 16, and of a u32, all on this device and
    ///   without overlap. They stay allocated until the work is done, including every replay of a graph that
    ///   captured it.
    /// - The caller orders work of other streams on this memory with this call.
    ///
    /// # Errors
    /// A layer that is not packed, a kernel that cannot be compiled, or a driver error.
    pub unsafe fn enqueue_embed(
        &self,
        layer: &Linear,
        stream: *mut c_void,
        rows: (u64, u32, u64),
        fault: u64,
    ) -> Result<(), DeviceError> {
        if rows.1 == 0 {
            return Ok(());
        }
        let weights = layer.packed_weights().ok_or(LaunchError::NotPacked)?;
        // SAFETY: the caller's promises.
        unsafe { self.embed_kernel()?.enqueue_at(&self.device().borrow_stream(stream), weights, rows, fault) }
    }

    fn cublas(&self) -> MutexGuard<'_, Option<Cublas>> {
        // A handle is placed before each use, so a lock poisoned by a panic does no harm; the handle may be lost.
        self.cublas.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the handle; creates it if there is none.
    fn cublas_of<'a>(&self, guard: &'a mut Option<Cublas>) -> Result<&'a mut Cublas, DeviceError> {
        match guard {
            Some(cublas) => Ok(cublas),
            none => Ok(none.insert(Cublas::without_workspace(&self.stream)?)),
        }
    }

    /// Returns a workspace: partial sums in the scratch, and counters set to zero.
    ///
    /// # Safety
    /// The scratch at `address` has room for these parts.
    unsafe fn workspace(&self, stream: &Stream, address: u64, parts: Parts) -> Result<Workspace, DeviceError> {
        let device = self.device();
        let (bytes, words) = (length("bytes", parts.partials)?, length("counters", parts.counters)?);
        // SAFETY: the caller's promise.
        let partials = unsafe { DeviceBuffer::borrow(device, address, bytes) }?;
        if let Some(counters) = self.counters.of(stream, words)? {
            return Ok(Workspace { partials, counters });
        }
        // SAFETY: as above; the counters follow the partial sums.
        let mut counters = unsafe { DeviceBuffer::<u32>::borrow(device, address + parts.counters_at(), words) }?;
        counters.fill_bytes(stream, 0)?;
        Ok(Workspace { partials, counters })
    }

    /// Copies `bytes` bytes from a device address to the host. Waits for the copy.
    ///
    /// # Safety
    /// `bytes` bytes at this address are allocated on this device. Work of other streams on them is done.
    ///
    /// # Errors
    /// A driver error.
    pub unsafe fn read(&self, address: u64, bytes: usize) -> Result<Vec<u8>, DeviceError> {
        let mut host = vec![0; bytes];
        if bytes > 0 {
            self.device().bind()?;
            // SAFETY: the caller's promise; `host` lives until the wait below.
            unsafe { result::memcpy_dtoh_async(&mut host, address, self.stream.raw()) }
                .call("copying from the device")?;
            self.stream.synchronize()?;
        }
        Ok(host)
    }

    /// Writes bytes at a device address. Waits for the copy.
    ///
    /// # Safety
    /// As for [`Interop::read`], and nothing else accesses them during the call.
    ///
    /// # Errors
    /// A driver error.
    pub unsafe fn write(&self, address: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { copy_to_device(&self.stream, address, bytes) }
    }

    /// Copies bytes between device addresses: pairs of (to, from, bytes). Waits for the copies.
    ///
    /// # Safety
    /// As for [`Interop::read`], nothing else accesses them during the call, and none overlap.
    ///
    /// # Errors
    /// A driver error.
    pub unsafe fn copy(&self, copies: &[(u64, u64, usize)]) -> Result<(), DeviceError> {
        let enqueue = |&(to, from, bytes): &(u64, u64, usize)| {
            // SAFETY: the caller's promise.
            unsafe { copy_on_device(&self.stream, to, from, bytes) }
        };
        let enqueued = copies.iter().try_for_each(enqueue);
        // Also after an error: the caller may free what an earlier copy still reads.
        self.stream.synchronize().and(enqueued)
    }

    fn packer(&self) -> MutexGuard<'_, Packer> {
        // A panic while packing leaves no state that the next call relies on.
        self.packer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Interop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Interop({:?})", self.kernels)
    }
}

fn jobs<'a>(updates: &[ElementsAt<'a>]) -> Result<Vec<SparseUpdate<'a>>, DeviceError> {
    let job = |update: &ElementsAt<'a>| {
        let tensor = update.layer.packed_weights().ok_or(LaunchError::NotPacked)?;
        Ok(SparseUpdate { tensor, index: update.index, values: update.values, updates: update.len })
    };
    updates.iter().map(job).collect()
}

/// The sections of a packed tensor: u8 `[tiles, 6144]`, u32 `[tiles, 4]`, u32 `[words]`.
type Sections = (DeviceBuffer<u8>, DeviceBuffer<u32>, DeviceBuffer<u32>);

/// Borrows the sections of a packed tensor.
///
/// # Safety
/// The sections exist, as [`Interop::layer`] requires.
unsafe fn sections(device: &Device, grid: TileGrid, at: PackedAt) -> Result<Sections, LaunchError> {
    let (packed, heads) = (grid.tiles() * packed::TILE_BYTES, grid.tiles() * packed::ROW_BLOCKS);
    // SAFETY: the caller's promise.
    unsafe {
        let escapes = match at.escape_words {
            0 => DeviceBuffer::empty(device),
            words => DeviceBuffer::borrow(device, at.escapes, words)?,
        };
        Ok((
            DeviceBuffer::borrow(device, at.packed, packed)?,
            DeviceBuffer::borrow(device, at.escape_heads, heads)?,
            escapes,
        ))
    }
}

#[cfg(test)]
mod tests {
    use unweight_codegen::{
        plan::Plan,
        spec::{Arch, Op},
    };

    use super::*;
    use crate::choose::{cost::gpu_model::GpuModel, policy::PackedChooser, route::Expand};

    /// Without `wgmma`, a chunk of a prompt would otherwise read the weights once per 64 rows.
    #[test]
    fn borrowed_layers_expand_at_the_same_batches_as_the_engine() {
        let weight = Weight::stored(14336, 4096, EncodingId::PACKED);
        let expands = |arch, options: LoadOptions, has_cublas: bool| {
            let chooser = PackedChooser::of(GpuModel::usual(arch), "a GPU");
            let routes = expanding(options.wanted(chooser, 0), || has_cublas).packed_routes(&weight, true);
            let at = |m| routes.iter().find(|choice| m <= choice.last).map(|choice| choice.kernel);
            [64, 2048].map(|m| matches!(at(m), Some(Route::ExpandToBf16 { .. })))
        };
        let options = LoadOptions::default();
        for arch in [Arch::Sm80, Arch::Sm89, Arch::Sm100a] {
            assert_eq!(expands(arch, options, true), [false, true], "{arch:?}");
            assert_eq!(expands(arch, options, false), [false, false], "{arch:?}");
        }
        assert_eq!(expands(Arch::Sm90a, options, true), [false, false]);
        // An explicit request for expansion is kept even without cuBLAS.
        assert_eq!(expands(Arch::Sm90a, options.expand(Expand::Above(0)), false), [true, true]);
    }

    /// The kernels that [`Interop::new`] and [`Interop::layer`] need exist on each kind of GPU that a [`Device`] opens.
    #[test]
    fn every_architecture_has_the_kernels_of_a_borrowed_layer() {
        for &arch in Arch::ALL {
            let chooser = PackedChooser::of(GpuModel::usual(arch), "a GPU");
            let policy = LoadOptions::default().max_batch(16384).wanted(chooser, 0);
            for (n, k) in [(64, 64), (4096, 14336), (128256, 4096)] {
                let weight = Weight::stored(n, k, EncodingId::PACKED);
                for epilogue in [Epilogue::Store, Epilogue::StoreAdd] {
                    for escapes in [true, false] {
                        let mut choices = policy.gemms(&weight, escapes).into_iter();
                        assert!(
                            choices.any(|choice| choice.epilogue == epilogue && choice.last == 16384),
                            "{arch:?} {n} {k}"
                        );
                    }
                }
                // The packer's kernels are included.
                let all = policy.reachable([weight]);
                assert!(all.iter().any(|spec| matches!(spec.op, Op::EncodeHuffman(_))), "{arch:?}");
                for spec in all {
                    assert!(spec.arch == arch && Plan::new(&spec).is_ok(), "{spec}");
                }
            }
        }
    }
}
