//! Layers in the memory and on the streams of another framework, such as torch.
//!
//! ```text
//! the framework's   weights bf16 --pack_at--> sections --layer--> Linear          x, y, scratch, stream
//! the guest's       kernels, packer, cuBLAS, the counters of each stream               |
//!                                                          enqueue <-------------------+
//! ```
//! A [`Guest`] owns what no framework has. Operands and scratch come as addresses, streams as raw handles, and whoever
//! gives them answers for them: these calls are unsafe, and each says what it trusts. [`Guest::enqueue`] allocates
//! nothing, waits for nothing and may be captured; every kernel that it can ask for is compiled and loaded by
//! [`Guest::layer`].
//!
//! Where weights are expanded to BF16 ahead of cuBLAS (on architectures without `wgmma`, at batches where that is
//! faster), they lie in the scratch: it is larger by the BF16 matrix, and by cuBLAS's workspace.

use std::{
    collections::BTreeMap,
    ffi::c_void,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use cudarc::driver::{result, sys};
use unweight_codegen::spec::Epilogue;
use unweight_format::{
    FormId, TileGrid,
    packed::{self, Window},
};

use crate::{
    choose::reachable::{Wanted, Way, Ways, Weight},
    device::{
        Call, Device, DeviceBuffer, DeviceError, KernelSet, LaneSize, MatrixMut, MatrixRef, Refusal, Stream,
        buffer::copy_to_device,
        module::LoadedKernel,
        stream::Captured,
        workspace::{CUBLAS_BYTES, Workspace, length},
    },
    layer::{
        build::{expanding, has_cublas},
        experts::{Experts, ExpertsShape, RoutedAt},
        linear::Linear,
        loader::LoadOptions,
    },
    ops::{
        cublas::Cublas,
        lane::Lane,
        repack::{PackError, Packer},
    },
    weight::{DevicePacked, room},
};

/// Parts of a scratch begin at multiples of this, and as much is readable behind each.
const ALIGN: u64 = 256;

/// Where the sections of a packed tensor are, or are to be: device addresses, multiples of 256.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedAt {
    /// u8 `[tiles, 6144]`.
    pub packed: u64,
    /// u32 `[tiles, 4]`.
    pub escape_heads: u64,
    /// u32 `[escape_words]`; any address if there are none.
    pub escapes: u64,
    /// Words of lists of escapes, or the room for them.
    pub escape_words: usize,
}

/// A piece of device memory: address, a multiple of 256, and bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scratch {
    /// Where.
    pub address: u64,
    /// How much.
    pub bytes: u64,
}

/// Kernels, a packer and counters for layers whose memory is another framework's. May be used from several threads at
/// once.
pub struct Guest {
    kernels: KernelSet,
    /// Packing is one after the other.
    packer: Mutex<Packer>,
    stream: Stream,
    wanted: Wanted,
    counters: Counters,
    /// Made for the first layer that asks for it; of one launch after the other.
    cublas: Mutex<Option<Cublas>>,
}

impl Guest {
    /// A guest on the device of these kernels.
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

    /// Its kernels.
    pub fn kernels(&self) -> &KernelSet {
        &self.kernels
    }

    /// The device.
    pub fn device(&self) -> &Device {
        self.kernels.device()
    }

    /// Packs BF16 `[n, k]` without gaps into memory that is there; `to.escape_words` is the room for lists, at least
    /// [`Packer::escape_words_max`]. Returns the window, and how many words there are. Runs on a stream of its own, and
    /// waits for it.
    ///
    /// # Safety
    /// `weights` is the address of these BF16, and `to` names sections of the sizes that the shape asks for, all on
    /// this device. What other streams do with this memory is done before the call, and nobody else touches it during
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

    /// A layer of packed weights that are there, with every kernel that some batch asks for, loaded. Padded layers
    /// there are none: n and k are multiples of 64.
    ///
    /// # Safety
    /// `at` names sections of the sizes that the shape asks for on this device, with 256 more bytes behind each that
    /// may be read. They stay allocated, and nobody writes them, until the layer is gone and the work that was given it
    /// is done; in a capture, as often as the graph runs. What is in them need not be trusted.
    ///
    /// # Errors
    /// A shape that is not packed, addresses that are no multiples of 256, a kernel that cannot be made, or the
    /// driver's refusal.
    pub unsafe fn layer(&self, (n, k): (u32, u32), window: Window, at: PackedAt) -> Result<Linear, DeviceError> {
        let grid = TileGrid::new(n as usize, k as usize)?;
        // SAFETY: the caller's promise.
        let (packed, heads, escapes) = unsafe { sections(self.device(), grid, at) }?;
        let packed = DevicePacked::new(grid, window, packed, heads, escapes)?;
        let ways = self.ways((n, k), packed.has_escapes())?;
        Linear::packed((n, k), packed, ways)
    }

    /// Makes the kernels that [`Guest::layer`] asks for of this shape, as tensors with escapes do: what takes long of a
    /// first layer, before its weights are there.
    ///
    /// # Errors
    /// A kernel that cannot be made, or the driver's refusal.
    pub fn prepare(&self, shape: (u32, u32)) -> Result<(), DeviceError> {
        self.ways(shape, true).map(drop)
    }

    /// Every kernel that some batch asks for of a shape, loaded.
    fn ways(&self, (n, k): (u32, u32), escapes: bool) -> Result<Ways<Arc<LoadedKernel>>, DeviceError> {
        let ways = self.wanted.packed_ways(&Weight::stored(n, k, FormId::PACKED), escapes);
        if ways.iter().any(|choice| matches!(choice.kernel, Way::Cublas { .. })) {
            self.cublas_of(&mut self.cublas())?;
        }
        Wanted::take_ways(&self.kernels, &ways)
    }

    /// Writes the weights of a layer as BF16 `[n, k]` without gaps. Runs on a stream of its own, and waits for it.
    ///
    /// # Safety
    /// `output` is the address of so many BF16 on this device. What other streams do with them is done before the call,
    /// and nobody else touches them during the call.
    ///
    /// # Errors
    /// A layer that is not packed or overlaps the output, or the driver's refusal.
    pub unsafe fn unpack_at(&self, layer: &Linear, output: u64) -> Result<(), DeviceError> {
        let (n, k) = (layer.n(), layer.k());
        let packed = layer.packed_weights().ok_or(Refusal::Family { wanted: "a packed layer" })?;
        // SAFETY: the caller's promise.
        let output = unsafe { MatrixMut::from_raw(self.device(), output, n, k, k.into()) }?;
        let packer = self.packer();
        packer.unpack(packed, output)?;
        packer.stream().synchronize()
    }

    /// Bytes of the scratch that [`Guest::enqueue`] takes for this batch; often 0, and where weights are expanded 2 for
    /// each weight and 32 MiB.
    ///
    /// # Errors
    /// [`Refusal::Epilogue`]: not what a packed layer is loaded for.
    pub fn scratch_bytes(&self, layer: &Linear, m: u32, epilogue: Epilogue) -> Result<u64, DeviceError> {
        Ok(Parts::of(layer.lane_size_at(m, epilogue)?).bytes())
    }

    /// Enqueues `y[m, n] = x[m, k] * W^T` (or `+=`, [`Epilogue::StoreAdd`]) on a stream of the framework. Rows have no
    /// gaps; x and y begin at multiples of 16 bytes. May be called during a capture, and then the graph may run beside
    /// the stream and beside graphs of other captures.
    ///
    /// # Safety
    /// - `stream` is a stream of this device's primary context. If a stream was destroyed, its work is done before
    ///   another of the same handle is given.
    /// - What one capture recorded never runs twice at the same time, as it would by two executables of one graph, or
    ///   by two places of a graph that has it as a child; and of one stream it runs in the order of these calls. So
    ///   CUDA orders it, unless it is told otherwise.
    /// - `x` is the address of `m * k` BF16, `y` of `m * n`, `scratch` of so many bytes, all on this device and apart
    ///   from each other. They stay allocated until the work is done; in a capture, as often as the graph runs.
    /// - Work of other streams on them is ordered with this by the caller. What is in the scratch does not matter,
    ///   before or after.
    ///
    /// # Errors
    /// Everything is checked before anything is enqueued. [`Refusal::Room`]: a scratch of less than
    /// [`Guest::scratch_bytes`].
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
        let parts = Parts::of(layer.lane_size_at(m, epilogue)?);
        if !layer.is_packed() {
            return Err(Refusal::Family { wanted: "a packed layer" }.into());
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
            return layer.enqueue(&mut Lane::of_parts(stream, workspace, slot, None), x, y, epilogue);
        }
        // SAFETY: as above.
        let (slot, beside) = unsafe {
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
        self.cublas_of(&mut held)?.place(&stream, beside)?;
        let mut lane = Lane::of_parts(stream, workspace, slot, held.take());
        let enqueued = layer.enqueue(&mut lane, x, y, epilogue);
        *held = lane.into_cublas();
        enqueued
    }

    /// The experts of a mixture, of packed weights that are there ([`Experts::new`] says of which shapes, and how rows
    /// of a gate and its up take turns), with every kernel that some batch asks for, loaded.
    ///
    /// # Safety
    /// As for [`Guest::layer`], of both tensors.
    ///
    /// # Errors
    /// Sizes that no kernel takes, addresses that are no multiples of 256, a kernel that cannot be made, or the
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
    /// Everything is checked before anything is enqueued. [`Refusal::Room`]: too small a scratch.
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
        // A handle is placed anew before each use; a thread that died with it has left none.
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

    /// Bytes at a device address. Waits for the copy.
    ///
    /// # Safety
    /// So many bytes are there on this device. What other streams do with them is done.
    ///
    /// # Errors
    /// The driver's.
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
    /// As for [`Guest::read`], and nobody else touches them during the call.
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn write(&self, address: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { copy_to_device(&self.stream, address, bytes) }
    }

    fn packer(&self) -> MutexGuard<'_, Packer> {
        // A thread that died while it packed has left nothing that the next call trusts.
        self.packer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Guest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Guest({:?})", self.kernels)
    }
}

/// u8 `[tiles, 6144]`, u32 `[tiles, 4]`, u32 `[words]`.
type Sections = (DeviceBuffer<u8>, DeviceBuffer<u32>, DeviceBuffer<u32>);

/// The sections of a packed tensor, borrowed.
///
/// # Safety
/// They are there, as [`Guest::layer`] says.
unsafe fn sections(device: &Device, grid: TileGrid, at: PackedAt) -> Result<Sections, Refusal> {
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

/// What lies where in a scratch: `partial sums | 256 | counters | 256`, if there are any, then, where cuBLAS
/// multiplies, `weights as BF16 | 256 | its workspace | 256`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Parts {
    /// Bytes.
    partials: u64,
    /// u32.
    counters: u64,
    /// Bytes.
    slot: u64,
    cublas: bool,
}

impl Parts {
    fn of(need: LaneSize) -> Self {
        let LaneSize { workspace_bytes, counters, slot_bytes, cublas, .. } = need;
        Self { partials: workspace_bytes, counters, slot: slot_bytes, cublas }
    }

    fn counters_at(self) -> u64 {
        padded(self.partials)
    }

    fn slot_at(self) -> u64 {
        match self {
            Self { partials: 0, counters: 0, .. } => 0,
            _ => self.counters_at().saturating_add(padded(self.counters.saturating_mul(4))),
        }
    }

    fn cublas_at(self) -> u64 {
        self.slot_at().saturating_add(padded(self.slot))
    }

    fn bytes(self) -> u64 {
        match self.cublas {
            false => self.slot_at(),
            true => self.cublas_at().saturating_add(padded(CUBLAS_BYTES as u64)),
        }
    }
}

/// With what is readable behind it, to the next multiple.
fn padded(bytes: u64) -> u64 {
    bytes.saturating_add(2 * ALIGN - 1) / ALIGN * ALIGN
}

/// Words of a slot: a grid that fits a device has fewer warpgroups.
const SLOT_WORDS: usize = 1024;
/// Slots, 8 MiB of them: vLLM captures 51 sizes in 34 graphs each.
const SLOTS: usize = 2048;

/// The launches that come one after the other: those of a stream (its handle), or of a stream in a capture (its
/// number).
type Order = (Option<u64>, usize);

/// Counters that are zero between launches, a slot for each order of launches.
struct Counters {
    memory: DeviceBuffer<u32>,
    slots: Mutex<BTreeMap<Order, usize>>,
}

impl Counters {
    fn new(stream: &Stream) -> Result<Self, DeviceError> {
        let memory = DeviceBuffer::zeroed(stream, SLOTS * SLOT_WORDS)?;
        // Launches are on other streams.
        stream.synchronize()?;
        Ok(Self { memory, slots: Mutex::default() })
    }

    /// The counters of a stream, or of what is captured on it: its graph may run beside the stream, but not beside
    /// itself. `None`: the caller's own, cleared before each launch, which costs a launch as much as another kernel. So
    /// it is on each thread's own default stream, which all have one handle; in captures that the driver does not tell
    /// apart; and for more counters or more orders than there are slots for.
    fn of(&self, stream: &Stream, words: usize) -> Result<Option<DeviceBuffer<u32>>, DeviceError> {
        let handle = stream.raw();
        if words > SLOT_WORDS || handle == PER_THREAD {
            return Ok(None);
        }
        let capture = match stream.capture_of()? {
            Captured::No => None,
            Captured::By(number) => Some(number),
            Captured::Unknown => return Ok(None),
        };
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(slot) = slot(&mut slots, (capture, handle as usize)) else { return Ok(None) };
        let address = self.memory.address() + (slot * SLOT_WORDS * 4) as u64;
        // SAFETY: a slot of `memory`, which a guest keeps, with at least the padding of `memory` behind it; only
        // launches of this order, one after the other, are given it.
        Ok(Some(unsafe { DeviceBuffer::borrow(stream.device(), address, words) }?))
    }
}

/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: sys::CUstream = std::ptr::without_provenance_mut(2);

/// The slot of an order, which is its for ever: nobody says when a graph is gone.
fn slot(slots: &mut BTreeMap<Order, usize>, order: Order) -> Option<usize> {
    let next = slots.len();
    match slots.get(&order) {
        Some(&slot) => Some(slot),
        None if next < SLOTS => {
            slots.insert(order, next);
            Some(next)
        }
        None => None,
    }
}

#[cfg(test)]
mod tests {
    use unweight_codegen::{
        plan::Plan,
        spec::{Arch, GemmWgmmaSpec, Op, catalog},
    };

    use super::*;
    use crate::choose::{
        model::{Machine, PackedChooser},
        reachable::Expand,
    };

    #[test]
    fn scratch_parts_do_not_overlap_and_are_padded() {
        let parts = |partials, counters| Parts { partials, counters, ..Parts::default() };
        assert_eq!(parts(0, 0).bytes(), 0);
        assert_eq!((parts(0, 1).counters_at(), parts(0, 1).bytes()), (256, 256 + 512));
        assert_eq!((parts(1, 0).counters_at(), parts(1, 0).bytes()), (512, 512 + 256));
        assert_eq!((parts(256, 64).counters_at(), parts(256, 64).bytes()), (512, 512 + 512));
        assert_eq!(parts(257, 65).counters_at(), 768);
        for (partials, counters) in [(17 << 20, 528), (0, 3), (300, 0), (255, 1024)] {
            let parts = parts(partials, counters);
            assert!(parts.counters_at() >= partials + ALIGN && parts.counters_at().is_multiple_of(ALIGN));
            assert!(parts.bytes() >= parts.counters_at() + counters * 4 + ALIGN);
        }
        assert_eq!(parts(u64::MAX, u64::MAX).bytes(), u64::MAX);
        for (before, slot) in [(parts(0, 0), 2 << 12), (parts(300, 3), 100), (parts(17 << 20, 528), 448 << 20)] {
            let whole = Parts { slot, cublas: true, ..before };
            assert_eq!(whole.slot_at(), before.bytes(), "where nothing of ours is, weights come first");
            assert!(whole.cublas_at() >= whole.slot_at() + slot + ALIGN && whole.cublas_at().is_multiple_of(ALIGN));
            assert!(whole.bytes() >= whole.cublas_at() + CUBLAS_BYTES as u64 + ALIGN);
        }
        let most = Parts { slot: u64::MAX, cublas: true, ..parts(u64::MAX, u64::MAX) };
        assert_eq!(most.bytes(), u64::MAX);
    }

    /// A prompt's chunk would read the weights once for each 64 rows where there is no `wgmma`.
    #[test]
    fn borrowed_layers_expand_at_the_same_batches_as_the_engine() {
        let weight = Weight::stored(14336, 4096, FormId::PACKED);
        let expands = |arch, options: LoadOptions, has_cublas: bool| {
            let chooser = PackedChooser::of(Machine::usual(arch), "a GPU");
            let ways = expanding(options.wanted(chooser, 0), || has_cublas).packed_ways(&weight, true);
            let at = |m| ways.iter().find(|choice| m <= choice.last).map(|choice| choice.kernel);
            [64, 2048].map(|m| matches!(at(m), Some(Way::Cublas { .. })))
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

    #[test]
    fn each_stream_has_its_own_counters() {
        let mut slots = BTreeMap::new();
        for order in 0..SLOTS {
            // Two streams; each by itself, and in captures.
            let capture = order.checked_sub(2).map(|rest| rest as u64 / 2);
            assert_eq!(slot(&mut slots, (capture, order % 2 * 7)), Some(order));
        }
        assert_eq!(slot(&mut slots, (None, 7)), Some(1));
        assert_eq!(slot(&mut slots, (Some(0), 7)), Some(3));
        assert_eq!(slot(&mut slots, (None, 1)), None);
        assert_eq!(slot(&mut slots, (Some(u64::MAX), 7)), None);
        assert_eq!(slots.len(), SLOTS);
    }

    /// What [`Guest::new`] and [`Guest::layer`] ask for, on each kind of GPU that a [`Device`] opens.
    #[test]
    fn every_architecture_has_the_kernels_of_a_guest() {
        for &arch in Arch::ALL {
            let chooser = PackedChooser::of(Machine::usual(arch), "a GPU");
            let wanted = LoadOptions::default().max_batch(4096).wanted(chooser, 0);
            for (n, k) in [(64, 64), (4096, 14336), (128256, 4096)] {
                let weight = Weight::stored(n, k, FormId::PACKED);
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
                assert!(all.iter().any(|spec| matches!(spec.op, Op::Encode(_))), "{arch:?}");
                for spec in all {
                    assert!(spec.arch == arch && Plan::new(&spec).is_ok(), "{spec}");
                }
            }
        }
    }

    /// Otherwise every launch would clear its counters first.
    #[test]
    fn the_counters_of_every_variant_fit_a_slot_of_an_h200() {
        let problem = unweight_codegen::plan::GemmShape { m: 4096, n: 28672, k: 8192 };
        let counters = |spec| Plan::new(&spec).map_or(0, |plan| plan.workspace(problem, 132).counters);
        let most = catalog::of::<GemmWgmmaSpec>().filter(|spec| spec.arch == Arch::Sm90a).map(counters).max();
        assert!(most.is_some_and(|most| (1..=SLOT_WORDS as u64).contains(&most)), "{most:?}");
    }
}
