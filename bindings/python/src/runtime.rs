//! Packed weights on a GPU, in memory that torch owns.
//!
//! [`Runtime`] packs, registers, multiplies and unpacks arenas by device address. The caller's obligations are in
//! `_native.pyi`: addresses belong to tensors on the runtime's device, streams to its primary context.

use std::{
    collections::{HashMap, hash_map::Entry},
    error::Error,
    ffi::{CString, c_void},
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
};

use pyo3::{
    exceptions::{PyUserWarning, PyValueError},
    prelude::*,
};
use unweight_codegen::spec::{Arch, Epilogue};
use unweight_format::{Digest, TileGrid, raw::packed::Window};
use unweight_rt::{
    Device, DeviceError, Expand, KernelSet, Linear, LoadOptions,
    env::Env,
    experts::{Experts, ExpertsShape, RoutedAt},
    interop::{ElementsAt, Interop, PackedAt, Scratch, Updated},
    raw::ops::pack::{PackError, Packer},
};

use crate::{
    bundle::Bundle,
    decode::{self, Failure},
    error::{plain, raised as raised_by_bundle},
    packed::{ALIGN, Head, Layout, value_error, write_head},
    pool::on_pool,
};

/// Device address and size in bytes.
type Memory = (u64, usize);

type Registered<T> = Vec<(u64, Arc<T>)>;

/// Values registered under the address of an arena, the active one last. An arena registered twice stays known until
/// both are forgotten.
struct Registry<T> {
    /// Per address, pairs of registration id and value. The allocator may reuse an address, so `forget` needs the id.
    by_address: RwLock<HashMap<u64, Registered<T>>>,
    next: AtomicU64,
}

impl<T> Default for Registry<T> {
    fn default() -> Self {
        Self { by_address: RwLock::default(), next: AtomicU64::new(1) }
    }
}

impl<T> Registry<T> {
    /// Registers a value and returns the id for `forget`. The value becomes the active one, unless it is `pending`.
    fn add(&self, address: u64, value: T, pending: bool) -> u64 {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let mut entries = self.by_address.write().unwrap_or_else(PoisonError::into_inner);
        let values = entries.entry(address).or_default();
        values.insert(if pending { 0 } else { values.len() }, (id, Arc::new(value)));
        id
    }

    fn forget(&self, address: u64, id: u64) {
        let mut entries = self.by_address.write().unwrap_or_else(PoisonError::into_inner);
        if let Entry::Occupied(mut values) = entries.entry(address) {
            values.get_mut().retain(|(value_id, _)| *value_id != id);
            if values.get().is_empty() {
                values.remove();
            }
        }
    }

    /// Makes `get` return the value with this id. Returns whether it is registered.
    fn activate(&self, address: u64, id: u64) -> bool {
        let mut entries = self.by_address.write().unwrap_or_else(PoisonError::into_inner);
        let Some(values) = entries.get_mut(&address) else { return false };
        let Some(at) = values.iter().position(|(value_id, _)| *value_id == id) else { return false };
        let last = values.len() - 1;
        values.swap(at, last);
        true
    }

    fn get(&self, address: u64) -> Option<Arc<T>> {
        let entries = self.by_address.read().unwrap_or_else(PoisonError::into_inner);
        Some(entries.get(&address)?.last()?.1.clone())
    }

    /// Returns the value with this id, active or not.
    fn find(&self, address: u64, id: u64) -> Option<Arc<T>> {
        let entries = self.by_address.read().unwrap_or_else(PoisonError::into_inner);
        Some(entries.get(&address)?.iter().find(|(value_id, _)| *value_id == id)?.1.clone())
    }

    fn is_active(&self, address: u64, id: u64) -> bool {
        let entries = self.by_address.read().unwrap_or_else(PoisonError::into_inner);
        entries.get(&address).and_then(|values| values.last()).is_some_and(|(value_id, _)| *value_id == id)
    }
}

/// Returns whether there are kernels for GPUs of a compute capability.
#[pyfunction]
pub fn has_kernels(major: i32, minor: i32) -> bool {
    Arch::of_capability(major, minor).is_some()
}

/// A registration. Dropping it forgets the arena, also where an interrupt comes before Python has stored it.
#[pyclass(frozen, module = "unweight._native")]
pub struct Registration {
    /// For `activate`, `is_active` and `replace`.
    #[pyo3(get)]
    id: u64,
    /// The digest of the escape lists; empty for experts.
    #[pyo3(get)]
    digest: String,
    address: u64,
    registry: AnyRegistry,
}

enum AnyRegistry {
    Linear(Arc<Registry<Linear>>),
    Mixture(Arc<Registry<(Experts, u64)>>),
}

impl Drop for Registration {
    fn drop(&mut self) {
        match &self.registry {
            AnyRegistry::Linear(registry) => registry.forget(self.address, self.id),
            AnyRegistry::Mixture(registry) => registry.forget(self.address, self.id),
        }
    }
}

/// The kernels and registered arenas of one GPU.
#[pyclass(frozen, module = "unweight._native")]
pub struct Runtime {
    interop: Interop,
    linears: Arc<Registry<Linear>>,
    /// Keyed by the address of the gate-up arena; the value includes the address of the down arena.
    experts: Arc<Registry<(Experts, u64)>>,
}

#[pymethods]
impl Runtime {
    /// Opens a GPU and loads the kernels that pack; NVRTC is needed only to compile them. Batches above `expand_above`
    /// expand weights to BF16 for cuBLAS; by default, batches for which the GPU model predicts that this is faster.
    #[new]
    #[pyo3(signature = (ordinal, max_batch, expand_above=None))]
    fn new(py: Python<'_>, ordinal: usize, max_batch: u32, expand_above: Option<u32>) -> PyResult<Self> {
        let expand = expand_above.map_or(Expand::Model, Expand::Above);
        let interop = py.detach(|| -> Result<Interop, Box<dyn Error + Send + Sync>> {
            let device = Device::open(ordinal)?;
            let kernels = KernelSet::open(&device, Env::process()?);
            Ok(Interop::new(kernels, LoadOptions::default().max_batch(max_batch).expand(expand))?)
        });
        let interop = interop.map_err(|error| raised(py, &*error))?;
        if let Some(error) = interop.kernels().table_error() {
            let text =
                CString::new(format!("unweight: kernel measurements are ignored: {error}")).map_err(value_error)?;
            PyErr::warn(py, &py.get_type::<PyUserWarning>(), &text, 1)?;
        }
        Ok(Self { interop, linears: Arc::default(), experts: Arc::default() })
    }

    /// Returns the bytes of an arena of this shape and the bytes of `escapes` that `pack` needs; `None` if the shape
    /// cannot be packed.
    #[staticmethod]
    fn buffer_nbytes(rows: usize, cols: usize) -> Option<(usize, usize)> {
        let grid = TileGrid::new(rows, cols).ok()?;
        let layout = Layout::new(grid).ok()?;
        Some((layout.bytes(), Packer::escape_words_max(grid) * 4))
    }

    /// Packs BF16 `[rows, cols]` into `arena` and `escapes`. Returns the used bytes of `escapes`, or why the matrix
    /// cannot be packed.
    fn pack(
        &self,
        py: Python<'_>,
        weights: u64,
        rows: u32,
        cols: u32,
        arena: Memory,
        escapes: Memory,
    ) -> PyResult<(Option<usize>, Option<String>)> {
        let grid = TileGrid::new(rows as usize, cols as usize).map_err(value_error)?;
        let layout = Layout::new(grid)?;
        if weights == 0 {
            return Err(PyValueError::new_err("the address of the weights is 0; pass a tensor with memory"));
        }
        if arena.1 != layout.bytes() {
            let expected = layout.bytes();
            return Err(PyValueError::new_err(format!(
                "the arena needs {expected} bytes, but the buffer has {}",
                arena.1
            )));
        }
        let to = packed_at(&layout, arena.0, escapes);
        py.detach(|| {
            // SAFETY: the caller's tensors have these sizes, and nothing else uses them meanwhile (`_native.pyi`).
            let (window, words) = match unsafe { self.interop.pack_at(weights, (rows, cols), to) } {
                Ok(packed) => packed,
                Err(PackError::Unpackable(why)) => return Ok((None, Some(why.to_string()))),
                Err(error) => return Err(error),
            };
            // SAFETY: as above; the packer has written `words` words.
            let lists = unsafe { self.interop.read(escapes.0, words * 4) }?;
            let mut rest = vec![0; layout.head.end - layout.heads.end];
            let head = rest.len() - ALIGN;
            write_head(&mut rest[head..], grid, window, &lists);
            // SAFETY: as above; this is the rest of the arena, after the escape heads.
            unsafe { self.interop.write(arena.0 + layout.heads.end as u64, &rest) }?;
            Ok((Some(lists.len()), None))
        })
        .map_err(|error| raised(py, &error))
    }

    /// Compiles and loads the kernels that `register` needs for a shape, and those of `update`.
    fn prepare(&self, py: Python<'_>, rows: u32, cols: u32) -> PyResult<()> {
        py.detach(|| self.interop.prepare((rows, cols))).map_err(|error| raised(py, &error))
    }

    /// Registers an arena, and compiles the kernels of its shape. `room` is the number of bytes for lists at their
    /// address, so that others can replace them later. With the address of another arena of this size in `pending`,
    /// registers what `replace` will copy from there.
    #[pyo3(signature = (arena, escapes, room=0, pending=None))]
    fn register(
        &self,
        py: Python<'_>,
        arena: Memory,
        escapes: Memory,
        room: usize,
        pending: Option<u64>,
    ) -> PyResult<Registration> {
        let PackedState { shape, window, at, digest } =
            self.stored(py, (pending.unwrap_or(arena.0), arena.1), escapes)?;
        // The sections are at the same offsets in both arenas.
        let moved = |address: u64| address - pending.unwrap_or(arena.0) + arena.0;
        let at = PackedAt {
            packed: moved(at.packed),
            escape_heads: moved(at.escape_heads),
            escape_words: at.escape_words.max(room / 4),
            ..at
        };
        // SAFETY: the caller holds its tensors until it drops the registration and all work is done (`_native.pyi`).
        // The 256 readable bytes after a section are the next section or the head; after the lists, the caller's
        // padding.
        let linear = py.detach(|| unsafe { self.interop.layer(shape, window, at) });
        let id = self.linears.add(arena.0, linear.map_err(|error| raised(py, &error))?, pending.is_some());
        Ok(Registration { id, digest, address: arena.0, registry: AnyRegistry::Linear(self.linears.clone()) })
    }

    /// Copies a packed matrix into a registered arena, from (address of another arena, address of its escape lists,
    /// their bytes), and makes launches use the registration `id`. The lists go to the memory of that registration.
    fn replace(&self, py: Python<'_>, arena: Memory, id: u64, from: (u64, u64, usize)) -> PyResult<()> {
        let linear = self.linears.find(arena.0, id).ok_or_else(|| no_registration(arena.0, id))?;
        let lists = linear.packed_weights().expect("registered layers are packed").escapes();
        if from.2 > lists.len() * 4 {
            let message = format!("the escape lists have {} bytes, but there is room for {}", from.2, lists.len() * 4);
            return Err(PyValueError::new_err(message));
        }
        let copies = [(arena.0, from.0, arena.1), (lists.address(), from.1, from.2)];
        // SAFETY: the caller's tensors have these sizes, and nothing else uses them meanwhile (`_native.pyi`).
        py.detach(|| unsafe { self.interop.copy(&copies) }).map_err(|error| raised(py, &error))?;
        self.activate(arena.0, id)
    }

    /// Registers the experts of a mixture: one arena with its escapes for all gates and ups, one for all downs. Experts
    /// are stacked by rows; 8 rows of a gate alternate with 8 of its up.
    fn register_experts(
        &self,
        py: Python<'_>,
        gate_up: (Memory, Memory),
        down: (Memory, Memory),
        experts: u32,
    ) -> PyResult<Registration> {
        let (upper, lower) = (self.stored(py, gate_up.0, gate_up.1)?, self.stored(py, down.0, down.1)?);
        let shape = ExpertsShape { experts, hidden: upper.shape.1, intermediate: lower.shape.1 };
        let operand = |stored: PackedState| (stored.window, stored.at);
        // SAFETY: as for `register`.
        let made = py.detach(|| unsafe { self.interop.experts(shape, operand(upper), operand(lower)) });
        let experts = made.map_err(|error| raised(py, &error))?;
        let (address, registry) = (gate_up.0.0, self.experts.clone());
        let id = registry.add(address, (experts, down.0.0), false);
        Ok(Registration { id, digest: String::new(), address, registry: AnyRegistry::Mixture(registry) })
    }

    /// Returns the scratch bytes that registered experts need for `m` tokens `[m, hidden]` with `top_k` experts each.
    fn experts_scratch_nbytes(
        &self,
        py: Python<'_>,
        arenas: (u64, u64),
        m: u32,
        hidden: u32,
        top_k: u32,
        experts: u32,
    ) -> PyResult<u64> {
        let registered = self.experts_of(py, arenas)?;
        let shape = registered.0.shape();
        if (shape.hidden, shape.experts) != (hidden, experts) {
            let message = format!(
                "the arenas hold {} experts of {} columns, but x has {hidden} columns and experts is {experts}",
                shape.experts, shape.hidden
            );
            return Err(PyValueError::new_err(message));
        }
        Ok(shape.scratch_bytes(m, top_k))
    }

    /// Enqueues the products of tokens with their experts. `rows` is (address of x, rows of x, address of y), `routed`
    /// is (address of ids, address of weights, `top_k`).
    fn experts(
        &self,
        py: Python<'_>,
        arenas: (u64, u64),
        rows: (u64, u32, u64),
        routed: (u64, u64, u32),
        scratch: (u64, u64),
        stream: usize,
    ) -> PyResult<()> {
        let registered = self.experts_of(py, arenas)?;
        let stream = std::ptr::with_exposed_provenance_mut::<c_void>(stream);
        let scratch = Scratch { address: scratch.0, bytes: scratch.1 };
        let routed = RoutedAt { ids: routed.0, weights: routed.1, top_k: routed.2 };
        // SAFETY: the caller answers for its tensors and stream (`_native.pyi`).
        unsafe { self.interop.enqueue_experts(&registered.0, stream, rows, routed, scratch, false) }
            .map_err(|error| raised(py, &error))
    }

    /// Returns whether an arena is registered under this address.
    fn is_registered(&self, arena: u64) -> bool {
        self.linears.get(arena).is_some()
    }

    /// Returns the bytes of the escape lists and their digest, from the head of an arena; it need not be registered.
    fn escapes(&self, py: Python<'_>, arena: Memory) -> PyResult<(usize, String)> {
        let bytes = self.head(py, arena)?;
        let head = Head::of_bytes(&bytes, arena.1)?.0;
        Ok((head.escapes(), head.digest()))
    }

    /// Returns whether launches use the registration `id` of an arena.
    fn is_active(&self, arena: u64, id: u64) -> bool {
        self.linears.is_active(arena, id)
    }

    /// Makes launches use the registration `id` of an arena. Several arenas may be at one address one after another;
    /// each is registered while it is there.
    fn activate(&self, arena: u64, id: u64) -> PyResult<()> {
        match self.linears.activate(arena, id) {
            true => Ok(()),
            false => Err(no_registration(arena, id)),
        }
    }

    /// Returns the rows and columns of a registered arena.
    fn shape(&self, py: Python<'_>, arena: u64) -> PyResult<(u32, u32)> {
        let linear = self.of(py, arena)?;
        Ok((linear.n(), linear.k()))
    }

    /// Returns the scratch bytes that a registered arena of shape `[n, k]` needs for a batch of `m`.
    fn scratch_nbytes(&self, py: Python<'_>, arena: u64, m: u32, shape: (u32, u32), add: bool) -> PyResult<u64> {
        let linear = self.of(py, arena)?;
        let (rows, cols) = (linear.n(), linear.k());
        if (rows, cols) != shape {
            let (n, k) = shape;
            let message = format!("weights are [{rows}, {cols}], but n is {n} and x has {k} columns");
            return Err(PyValueError::new_err(message));
        }
        self.interop.scratch_bytes(&linear, m, epilogue(add)).map_err(|error| raised(py, &error))
    }

    /// Returns whether `linear` can add a bias to a batch of `m`.
    fn takes_bias(&self, py: Python<'_>, arena: u64, m: u32) -> PyResult<bool> {
        Ok(self.interop.takes_bias(&*self.of(py, arena)?, m))
    }

    /// Enqueues `y = x * weight^T`, or with the address of a bias, `y = bias +`; if that is 0, `y +=`. `rows` is
    /// (address of x, rows of x, address of y).
    #[pyo3(signature = (arena, rows, scratch, stream, bias=None))]
    fn linear(
        &self,
        py: Python<'_>,
        arena: u64,
        rows: (u64, u32, u64),
        scratch: (u64, u64),
        stream: usize,
        bias: Option<u64>,
    ) -> PyResult<()> {
        let linear = self.of(py, arena)?;
        let stream = std::ptr::with_exposed_provenance_mut::<c_void>(stream);
        let scratch = Scratch { address: scratch.0, bytes: scratch.1 };
        // SAFETY: the caller answers for its tensors and stream (`_native.pyi`).
        let enqueued = unsafe {
            match bias {
                None => self.interop.enqueue(&linear, stream, rows, scratch, Epilogue::Store),
                Some(0) => self.interop.enqueue(&linear, stream, rows, scratch, Epilogue::StoreAdd),
                Some(bias) => self.interop.enqueue_with_bias(&linear, stream, rows, scratch, bias),
            }
        };
        enqueued.map_err(|error| raised(py, &error))
    }

    /// Compiles and loads the kernel of `embed`.
    fn prepare_embed(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.interop.prepare_embed()).map_err(|error| raised(py, &error))
    }

    /// Enqueues `y[r] = weight[ids[r]]` for a registered arena of shape `[n, k]`. `rows` is (address of u32 ids, rows
    /// of y, address of y); an id that is not a row gives zeros, and a number in the u32 at `fault`.
    fn embed(
        &self,
        py: Python<'_>,
        arena: u64,
        shape: (u32, u32),
        rows: (u64, u32, u64),
        fault: u64,
        stream: usize,
    ) -> PyResult<()> {
        let linear = self.of(py, arena)?;
        let (n, k) = (linear.n(), linear.k());
        if (n, k) != shape {
            let message = format!("weights are [{n}, {k}], but the operator was called for {shape:?}");
            return Err(PyValueError::new_err(message));
        }
        let stream = std::ptr::with_exposed_provenance_mut::<c_void>(stream);
        // SAFETY: the caller answers for its tensors and stream (`_native.pyi`).
        unsafe { self.interop.enqueue_embed(&linear, stream, rows, fault) }.map_err(|error| raised(py, &error))
    }

    /// Decodes a tensor of a bundle to `out`, its original bytes. Returns false, without writing, if there is no decoder
    /// for GPUs.
    #[pyo3(signature = (bundle, name, out, *, file=None))]
    fn decode(&self, py: Python<'_>, bundle: &Bundle, name: &str, out: Memory, file: Option<&str>) -> PyResult<bool> {
        let tensor = bundle.tensor(py, name, file)?;
        let expected = tensor.original_bytes();
        if expected != out.1 as u64 {
            let message = format!("tensor '{name}' has {expected} bytes, but the buffer has {}", out.1);
            return Err(PyValueError::new_err(message));
        }
        // SAFETY: the caller's tensor has this size and padding, and nothing else uses it meanwhile (`_native.pyi`).
        on_pool(py, || unsafe { decode::decode(self.interop.kernels(), tensor, out.0) })?.map_err(|error| match error {
            Failure::Bundle(error) => raised_by_bundle(py, &error),
            Failure::Device(error) => raised(py, &error),
        })
    }

    /// Returns the scratch bytes that `update` needs for registered arenas.
    fn update_scratch_nbytes(&self, py: Python<'_>, arenas: Vec<u64>) -> PyResult<u64> {
        let layers = arenas.into_iter().map(|arena| self.of(py, arena)).collect::<PyResult<Vec<_>>>()?;
        let updates: Vec<_> = layers.iter().map(|layer| ElementsAt { layer, index: 0, values: 0, len: 0 }).collect();
        self.interop.update_scratch_bytes(&updates).map_err(|error| raised(py, &error))
    }

    /// Replaces elements of registered arenas in place. An update is (address of the arena, of the index, of the
    /// values, number of elements). Returns for each what was done, the bytes of its escape lists, and their digest.
    fn update(&self, py: Python<'_>, updates: Vec<Update>, scratch: (u64, u64)) -> PyResult<Vec<UpdateResult>> {
        // As lazy tensors have it. The kernel would end the context.
        if updates.iter().any(|&(_, index, values, len)| len > 0 && (index == 0 || values == 0)) {
            let message =
                "positions and values need memory on the GPU, but one begins at address 0; pass plain tensors";
            return Err(PyValueError::new_err(message));
        }
        let layers = updates.iter().map(|&(arena, ..)| self.of(py, arena)).collect::<PyResult<Vec<Arc<Linear>>>>()?;
        let scratch = Scratch { address: scratch.0, bytes: scratch.1 };
        let work = || -> Result<Vec<UpdateResult>, Failed> {
            let elements: Vec<_> = updates
                .iter()
                .zip(&layers)
                .map(|(&(_, index, values, len), layer)| ElementsAt { layer, index, values, len })
                .collect();
            // SAFETY: the caller's tensors have these sizes, and nothing else uses them meanwhile (`_native.pyi`).
            let updated = unsafe { self.interop.update_at(&elements, scratch) }?;
            let results = updated.into_iter().zip(&layers).zip(&updates);
            results.map(|((updated, layer), update)| self.finish_update(updated, layer, update.0)).collect()
        };
        py.detach(work).map_err(|failed| match failed {
            Failed::Device(error) => raised(py, &error),
            Failed::Python(error) => error,
        })
    }

    /// Unpacks a registered arena to `out` as BF16 `[n, k]`.
    fn unpack(&self, py: Python<'_>, arena: u64, out: Memory) -> PyResult<()> {
        let linear = self.of(py, arena)?;
        let expected = linear.n() as usize * linear.k() as usize * 2;
        if out.1 != expected {
            return Err(PyValueError::new_err(format!(
                "the weights need {expected} bytes, but the buffer has {}",
                out.1
            )));
        }
        // SAFETY: the caller's tensor has this size, and nothing else uses it meanwhile (`_native.pyi`).
        py.detach(|| unsafe { self.interop.unpack_at(&linear, out.0) }).map_err(|error| raised(py, &error))
    }
}

/// Addresses of arena, index and values, and the number of elements.
type Update = (u64, u64, u64, u32);

/// What was done (`_native.pyi`), the bytes of the escape lists, and their digest.
type UpdateResult = (&'static str, usize, String);

enum Failed {
    Device(DeviceError),
    Python(PyErr),
}

impl From<DeviceError> for Failed {
    fn from(error: DeviceError) -> Self {
        Self::Device(error)
    }
}

/// A packed matrix in an arena, whose escape lists match their digest.
struct PackedState {
    shape: (u32, u32),
    window: Window,
    at: PackedAt,
    digest: String,
}

impl Runtime {
    /// Writes the head of an arena that was updated in place.
    fn finish_update(&self, updated: Updated, layer: &Linear, arena: u64) -> Result<UpdateResult, Failed> {
        let Updated::InPlace { escape_words } = updated else {
            let name = match updated {
                Updated::Outside => "outside",
                Updated::NotAscending => "unsorted",
                Updated::Differs => "differs",
                Updated::Skipped => "skipped",
                _ => "whole",
            };
            return Ok((name, 0, String::new()));
        };
        let tensor = layer.packed_weights().expect("registered layers are packed");
        let layout = Layout::new(tensor.grid()).map_err(Failed::Python)?;
        // SAFETY: the update has written so many words of the lists, and waited.
        let lists = unsafe { self.interop.read(tensor.escapes().address(), escape_words * 4) }?;
        let mut head = [0; ALIGN];
        write_head(&mut head, tensor.grid(), tensor.window(), &lists);
        // SAFETY: the head is a part of the caller's tensor, which nothing else uses meanwhile.
        unsafe { self.interop.write(arena + layout.head.start as u64, &head) }?;
        Ok(("updated", lists.len(), Digest::of(&lists).to_string()))
    }

    fn stored(&self, py: Python<'_>, arena: Memory, escapes: Memory) -> PyResult<PackedState> {
        let bytes = self.head(py, arena)?;
        let (head, grid, layout) = Head::of_bytes(&bytes, arena.1)?;
        if escapes.1 != head.escapes() {
            return Err(PyValueError::new_err(format!(
                "the arena needs {} bytes of escapes, but the buffer has {}",
                head.escapes(),
                escapes.1
            )));
        }
        // SAFETY: the caller's tensor has this size, and nothing writes it (`_native.pyi`).
        let lists = py.detach(|| unsafe { self.interop.read(escapes.0, escapes.1) });
        let digest = head.digest();
        if Digest::of(&lists.map_err(|error| raised(py, &error))?).to_string() != digest {
            return Err(PyValueError::new_err(
                "these escapes do not belong to this arena; pass those that were packed with it",
            ));
        }
        // The dimensions of a packed grid fit in 32 bits.
        let shape = (grid.rows() as u32, grid.cols() as u32);
        Ok(PackedState { shape, window: head.window()?, at: packed_at(&layout, arena.0, escapes), digest })
    }

    fn experts_of(&self, py: Python<'_>, (gate_up, down): (u64, u64)) -> PyResult<Arc<(Experts, u64)>> {
        self.experts.get(gate_up).filter(|registered| registered.1 == down).ok_or_else(|| {
            let message = "these arenas of experts are not registered on their device; pack them there \
                           (unweight.ops.pack_experts), and keep what it returns";
            plain(py, "UnweightError", message)
        })
    }

    fn of(&self, py: Python<'_>, arena: u64) -> PyResult<Arc<Linear>> {
        self.linears.get(arena).ok_or_else(|| {
            let message = "this arena is not registered on its device, and cannot be: its escapes were freed, or a \
                           CUDA graph capture is running; move the module (unweight.ops.Linear), or pass arena and \
                           escapes to unweight.ops.place";
            plain(py, "UnweightError", message)
        })
    }

    fn head(&self, py: Python<'_>, arena: Memory) -> PyResult<Vec<u8>> {
        let at = arena
            .1
            .checked_sub(ALIGN)
            .ok_or_else(|| value_error("the arena is smaller than its head; unweight.ops.pack makes arenas"))?;
        // SAFETY: the caller's tensor has this size (`_native.pyi`).
        py.detach(|| unsafe { self.interop.read(arena.0 + at as u64, ALIGN) }).map_err(|error| raised(py, &error))
    }
}

fn no_registration(arena: u64, id: u64) -> PyErr {
    PyValueError::new_err(format!("no registration {id} of an arena at {arena:#x}"))
}

fn packed_at(layout: &Layout, arena: u64, escapes: Memory) -> PackedAt {
    PackedAt {
        packed: arena,
        escape_heads: arena + layout.heads.start as u64,
        escapes: escapes.0,
        escape_words: escapes.1 / 4,
    }
}

fn epilogue(add: bool) -> Epilogue {
    if add { Epilogue::StoreAdd } else { Epilogue::Store }
}

/// Converts a runtime error and its chain of causes to a `DeviceError`.
fn raised(py: Python<'_>, error: &(dyn Error + Send + Sync + 'static)) -> PyErr {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        if !message.contains(&text) {
            message.push_str(": ");
            message.push_str(&text);
        }
        cause = error.source();
    }
    plain(py, "DeviceError", &message)
}
