//! Layers in the memory and on the streams of another framework, such as torch.
//!
//! ```text
//! the framework's   weights bf16 --pack_at--> sections --layer--> Linear          x, y, scratch, stream
//! the interop's       kernels, packer, cuBLAS, the counters of each stream               |
//!                                                          enqueue <-------------------+
//! ```
//! A [`Interop`] owns what no framework has. Operands and scratch are passed as addresses, streams as raw handles. The
//! caller keeps them valid: these calls are unsafe, and each states what it relies on. [`Interop::enqueue`] allocates
//! nothing, waits for nothing and may be captured. [`Interop::layer`] compiles and loads every kernel that it can need.
//!
//! Where weights are expanded to BF16 ahead of cuBLAS (on architectures without `wgmma`, at batches where that is
//! faster), they are in the scratch, which is larger by the BF16 matrix and cuBLAS's workspace.

mod counters;
mod scratch;

use std::{
    ffi::c_void,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use cudarc::driver::result;
use unweight_codegen::spec::Epilogue;
use unweight_format::{
    EncodingId, TileGrid,
    raw::packed::{self, Window},
};

use self::{counters::Counters, scratch::Parts};
use crate::{
    choose::route::{Route, RoutePolicy, Routes, Weight},
    device::{
        Call, Device, DeviceBuffer, DeviceError, KernelSet, LaunchError, MatrixMut, MatrixRef, Stream,
        buffer::{copy_to_device, length},
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
    ops::pack::{PackError, Packer},
    weight::{DevicePacked, room},
};

/// Device addresses of the sections of a packed tensor, multiples of 256.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedAt {
    /// u8 `[tiles, 6144]`.
    pub packed: u64,
    /// u32 `[tiles, 4]`.
    pub escape_heads: u64,
    /// u32 `[escape_words]`; any address if there are none.
    pub escapes: u64,
    /// u32 words of escape lists, or the room for them.
    pub escape_words: usize,
}

/// A piece of device memory: address, a multiple of 256, and bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scratch {
    /// Device address.
    pub address: u64,
    /// The number of bytes.
    pub bytes: u64,
}

/// Kernels, a packer and counters for layers in the memory of another framework. May be used from several threads at
/// once.
pub struct Interop {
    kernels: KernelSet,
    /// One tensor is packed at a time.
    packer: Mutex<Packer>,
    stream: Stream,
    wanted: RoutePolicy,
    counters: Counters,
    /// Created for the first layer that needs it; used by one launch at a time.
    cublas: Mutex<Option<Cublas>>,
}

impl Interop {
    /// Prepares packing and launches on the device of these kernels.
    ///
    /// # Errors
    /// A kernel of the packer cannot be made, or the device failed.
    pub fn new(kernels: KernelSet, options: LoadOptions) -> Result<Self, DeviceError> {
        let chooser = kernels.chooser().clone();
        let stream = kernels.device().stream()?;
        Ok(Self {
            packer: Mutex::new(Packer::new(&stream, &kernels)?),
            // Nothing is decoded.
            wanted: expanding(options.wanted(chooser, 0), has_cublas),
            counters: Counters::new(&stream)?,
            cublas: Mutex::default(),
            stream,
            kernels,
        })
    }

    /// The kernels of the device.
    pub fn kernels(&self) -> &KernelSet {
        &self.kernels
    }

    /// The device of the kernels.
    pub fn device(&self) -> &Device {
        self.kernels.device()
    }

    /// Packs BF16 `[n, k]` without gaps into allocated memory; `to.escape_words` is the room for lists, at least
    /// [`Packer::escape_words_max`]. Returns the window, and how many words there are. Runs on a stream of its own, and
    /// waits for it.
    ///
    /// # Safety
    /// `weights` is the address of these BF16, and `to` names sections of the sizes that the shape asks for, all on
    /// this device. What other streams do with this memory is done before the call, and nothing else touches it during
    /// the call.
    ///
    /// # Errors
    /// [`PackError`]: what is not packed and why is said there.
    pub unsafe fn pack_at(&self, weights: u64, (n, k): (u32, u32), to: PackedAt) -> Result<(Window, usize), PackError> {
        let device = self.device();
        let grid = TileGrid::new(n as usize, k as usize).map_err(DeviceError::from)?;
        packed::packable_shape(grid)?;
        // SAFETY: the caller's promise.
        let weights = unsafe { MatrixRef::from_raw(device, weights, n, k, k.into()) }.map_err(DeviceError::from)?;
        // SAFETY: the caller's promise. What packs reads nothing behind a section.
        let (mut packed, mut heads, mut escapes) = unsafe { sections(device, grid, to) }.map_err(DeviceError::from)?;
        self.packer().pack_at(weights, &mut packed, &mut heads, &mut escapes)
    }

    /// A layer of packed weights in borrowed memory. Compiles and loads the kernels of every batch. n and k are
    /// multiples of 64: layers are not padded.
    ///
    /// # Safety
    /// `at` names sections of the sizes that the shape asks for on this device, with 256 more bytes behind each that
    /// may be read. They stay allocated, and nothing writes them, until the layer is gone and the work that was given
    /// it is done; in a capture, as often as the graph runs. What is in them need not be trusted.
    ///
    /// # Errors
    /// A shape that is not packed, addresses that are not multiples of 256, a kernel that cannot be made, or the
    /// driver's refusal.
    pub unsafe fn layer(&self, (n, k): (u32, u32), window: Window, at: PackedAt) -> Result<Linear, DeviceError> {
        let grid = TileGrid::new(n as usize, k as usize)?;
        // SAFETY: the caller's promise.
        let (packed, heads, escapes) = unsafe { sections(self.device(), grid, at) }?;
        let packed = DevicePacked::new(grid, window, packed, heads, escapes)?;
        let routes = self.routes((n, k), packed.has_escapes())?;
        Ok(Linear::Packed(PackedLinear::new((n, k), packed, routes)?))
    }

    /// Compiles and loads the kernels that [`Interop::layer`] needs for a shape with escapes: the slow part of a first
    /// layer, before its weights exist.
    ///
    /// # Errors
    /// A kernel that cannot be made, or an error of the driver.
    pub fn prepare(&self, shape: (u32, u32)) -> Result<(), DeviceError> {
        self.routes(shape, true).map(drop)
    }

    /// Every kernel that some batch asks for of a shape, loaded.
    fn routes(&self, (n, k): (u32, u32), escapes: bool) -> Result<Routes<Arc<LoadedKernel>>, DeviceError> {
        let routes = self.wanted.packed_routes(&Weight::stored(n, k, EncodingId::PACKED), escapes);
        if routes.iter().any(|choice| matches!(choice.kernel, Route::ExpandToBf16 { .. })) {
            self.cublas_of(&mut self.cublas())?;
        }
        RoutePolicy::take_routes(&self.kernels, &routes)
    }

    /// Writes the weights of a layer as BF16 `[n, k]` without gaps. Runs on a stream of its own, and waits for it.
    ///
    /// # Safety
    /// `output` is the address of so many BF16 on this device. What other streams do with them is done before the call,
    /// and nothing else touches them during the call.
    ///
    /// # Errors
    /// A layer that is not packed or overlaps the output, or an error of the driver.
    pub unsafe fn unpack_at(&self, layer: &Linear, output: u64) -> Result<(), DeviceError> {
        let (n, k) = (layer.n(), layer.k());
        let packed = layer.packed_weights().ok_or(LaunchError::NotPacked)?;
        // SAFETY: the caller's promise.
        let output = unsafe { MatrixMut::from_raw(self.device(), output, n, k, k.into()) }?;
        let packer = self.packer();
        packer.unpack(packed, output)?;
        packer.stream().synchronize()
    }

    /// Bytes of the scratch that [`Interop::enqueue`] takes for this batch; often 0; where weights are expanded, 2 for
    /// each weight and 32 MiB.
    ///
    /// # Errors
    /// [`LaunchError::Epilogue`]: not what a packed layer is loaded for.
    pub fn scratch_bytes(&self, layer: &Linear, m: u32, epilogue: Epilogue) -> Result<u64, DeviceError> {
        Ok(Parts::of(layer.context_size_at(m, epilogue)?).bytes())
    }

    /// Enqueues `y[m, n] = x[m, k] * W^T` (or `+=`, [`Epilogue::StoreAdd`]) on a stream of the framework. Rows have no
    /// gaps; x and y begin at multiples of 16 bytes. May be called during a capture; the graph may then run
    /// concurrently with the stream and with graphs of other captures.
    ///
    /// # Safety
    /// - `stream` is a stream of this device's primary context. If a stream was destroyed, its work is done before
    ///   another of the same handle is given.
    /// - What one capture recorded never runs twice at the same time, as it would by two executables of one graph, or
    ///   by two places of a graph that has it as a child; and of one stream it runs in the order of these calls. CUDA
    ///   orders it so by default.
    /// - `x` is the address of `m * k` BF16, `y` of `m * n`, `scratch` of so many bytes, all on this device and apart
    ///   from each other. They stay allocated until the work is done; in a capture, as often as the graph runs.
    /// - Work of other streams on them is ordered with this by the caller. What is in the scratch does not matter,
    ///   before or after.
    ///
    /// # Errors
    /// Everything is checked before anything is enqueued. [`LaunchError::Room`]: a scratch of less than
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
        let device = self.device();
        let parts = Parts::of(layer.context_size_at(m, epilogue)?);
        if !layer.is_packed() {
            return Err(LaunchError::NotPacked.into());
        }
        room("bytes of scratch", length("bytes of scratch", scratch.bytes)?, length("bytes", parts.bytes())?)?;
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
            Workspace { partials: DeviceBuffer::nothing(device), counters: DeviceBuffer::nothing(device) }
        } else {
            // SAFETY: the scratch has room for both and what is readable behind them, and is the caller's promise.
            unsafe { self.workspace(&stream, scratch.address, parts) }?
        };
        if !parts.cublas {
            let slot = DeviceBuffer::nothing(device);
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
        // Until this product is enqueued; what was before keeps its own stream and workspace.
        let mut held = self.cublas();
        self.cublas_of(&mut held)?.place(&stream, cublas_workspace)?;
        let mut ctx = ExecContext::of_parts(stream, workspace, slot, held.take());
        let enqueued = layer.enqueue(&mut ctx, x, y, epilogue);
        *held = ctx.into_cublas();
        enqueued
    }

    /// The experts of a mixture, of packed weights in borrowed memory ([`Experts::new`] says of which shapes, and how
    /// rows of a gate and its up are interleaved), with every kernel that some batch asks for, loaded.
    ///
    /// # Safety
    /// As for [`Interop::layer`], of both tensors.
    ///
    /// # Errors
    /// Sizes that no kernel takes, addresses that are not multiples of 256, a kernel that cannot be made, or the
    /// driver's refusal.
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
    /// stream of the framework. Rows have no gaps; x and y begin at multiples of 16 bytes, ids and weights at multiples
    /// of 4. May be called during a capture; a replay goes by the ids and weights that are there then.
    ///
    /// # Safety
    /// - `stream` is a stream of this device's primary context.
    /// - `x` and `y` are addresses of `m * hidden` BF16, `routed` of `m * top_k` ids and weights, `scratch` of so many
    ///   bytes, at least [`ExpertsShape::scratch_bytes`], all on this device and apart from each other. They stay
    ///   allocated until the work is done; in a capture, as often as the graph runs.
    /// - Work of other streams on them is ordered with this by the caller. What is in the scratch does not matter,
    ///   before or after.
    ///
    /// # Errors
    /// Everything is checked before anything is enqueued. [`LaunchError::Room`]: too small a scratch.
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

    fn cublas(&self) -> MutexGuard<'_, Option<Cublas>> {
        // A handle is placed again before each use; a thread that panicked with it has left none.
        self.cublas.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The handle, made now if there is none.
    fn cublas_of<'a>(&self, held: &'a mut Option<Cublas>) -> Result<&'a mut Cublas, DeviceError> {
        match held {
            Some(cublas) => Ok(cublas),
            none => Ok(none.insert(Cublas::unplaced(&self.stream)?)),
        }
    }

    /// Partial sums in the scratch, and counters that are zero.
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
        // SAFETY: as above; they are behind the partial sums.
        let mut counters = unsafe { DeviceBuffer::<u32>::borrow(device, address + parts.counters_at(), words) }?;
        counters.fill_bytes(stream, 0)?;
        Ok(Workspace { partials, counters })
    }

    /// Copies `bytes` bytes from a device address to the host. Waits for the copy.
    ///
    /// # Safety
    /// So many bytes are there on this device. What other streams do with them is done.
    ///
    /// # Errors
    /// An error of the driver.
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
    /// As for [`Interop::read`], and nothing else touches them during the call.
    ///
    /// # Errors
    /// An error of the driver.
    pub unsafe fn write(&self, address: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { copy_to_device(&self.stream, address, bytes) }
    }

    fn packer(&self) -> MutexGuard<'_, Packer> {
        // A thread that panicked while it packed has left nothing that the next call relies on.
        self.packer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Interop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Interop({:?})", self.kernels)
    }
}

/// u8 `[tiles, 6144]`, u32 `[tiles, 4]`, u32 `[words]`.
type Sections = (DeviceBuffer<u8>, DeviceBuffer<u32>, DeviceBuffer<u32>);

/// The sections of a packed tensor, borrowed.
///
/// # Safety
/// They are there, as [`Interop::layer`] says.
unsafe fn sections(device: &Device, grid: TileGrid, at: PackedAt) -> Result<Sections, LaunchError> {
    let (packed, heads) = (grid.tiles() * packed::TILE_BYTES, grid.tiles() * packed::ROW_BLOCKS);
    // SAFETY: the caller's promise.
    unsafe {
        let escapes = match at.escape_words {
            0 => DeviceBuffer::nothing(device),
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

    /// A prompt's chunk would read the weights once for each 64 rows where there is no `wgmma`.
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
        // Asked for, it is not given up in silence.
        assert_eq!(expands(Arch::Sm90a, options.expand(Expand::Above(0)), false), [true, true]);
    }

    /// What [`Interop::new`] and [`Interop::layer`] ask for, on each kind of GPU that a [`Device`] opens.
    #[test]
    fn every_architecture_has_the_kernels_of_a_borrowed_layer() {
        for &arch in Arch::ALL {
            let chooser = PackedChooser::of(GpuModel::usual(arch), "a GPU");
            let wanted = LoadOptions::default().max_batch(4096).wanted(chooser, 0);
            for (n, k) in [(64, 64), (4096, 14336), (128256, 4096)] {
                let weight = Weight::stored(n, k, EncodingId::PACKED);
                for epilogue in [Epilogue::Store, Epilogue::StoreAdd] {
                    for escapes in [true, false] {
                        let mut choices = wanted.gemms(&weight, escapes).into_iter();
                        assert!(
                            choices.any(|choice| choice.epilogue == epilogue && choice.last == 4096),
                            "{arch:?} {n} {k}"
                        );
                    }
                }
                // Its packer among them.
                let all = wanted.reachable([weight]);
                assert!(all.iter().any(|spec| matches!(spec.op, Op::EncodeHuffman(_))), "{arch:?}");
                for spec in all {
                    assert!(spec.arch == arch && Plan::new(&spec).is_ok(), "{spec}");
                }
            }
        }
    }
}
