//! Packed weights on a GPU, in memory that torch owns.
//!
//! What this trusts is said in `_native.pyi`: addresses are those of tensors on the runtime's device, and of streams of
//! its primary context.

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
    Device, Expand, KernelSet, Linear, LoadOptions,
    env::Env,
    experts::{Experts, ExpertsShape, RoutedAt},
    interop::{Interop, PackedAt, Scratch},
    raw::ops::pack::{PackError, Packer},
};

use crate::{
    error::plain,
    packed::{ALIGN, Head, Layout, value_error, write_head},
};

/// Address and bytes.
type Memory = (u64, usize);

type Registered<T> = Vec<(u64, Arc<T>)>;

/// What is known by the address of an arena. One that is made known twice is so until both are forgotten.
struct Known<T> {
    /// By the number of each registration: an address may be another arena's later.
    by_address: RwLock<HashMap<u64, Registered<T>>>,
    next: AtomicU64,
}

impl<T> Default for Known<T> {
    fn default() -> Self {
        Self { by_address: RwLock::default(), next: AtomicU64::new(1) }
    }
}

impl<T> Known<T> {
    /// Returns what `forget` takes.
    fn add(&self, address: u64, one: T) -> u64 {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let mut known = self.by_address.write().unwrap_or_else(PoisonError::into_inner);
        known.entry(address).or_default().push((id, Arc::new(one)));
        id
    }

    fn forget(&self, address: u64, id: u64) {
        let mut known = self.by_address.write().unwrap_or_else(PoisonError::into_inner);
        if let Entry::Occupied(mut all) = known.entry(address) {
            all.get_mut().retain(|one| one.0 != id);
            if all.get().is_empty() {
                all.remove();
            }
        }
    }

    fn get(&self, address: u64) -> Option<Arc<T>> {
        let known = self.by_address.read().unwrap_or_else(PoisonError::into_inner);
        Some(known.get(&address)?.last()?.1.clone())
    }
}

/// Whether there are kernels for GPUs of a compute capability.
#[pyfunction]
pub fn has_kernels(major: i32, minor: i32) -> bool {
    Arch::of_capability(major, minor).is_some()
}

/// Kernels and known arenas of one GPU.
#[pyclass(frozen, module = "unweight._native")]
pub struct Runtime {
    interop: Interop,
    linears: Known<Linear>,
    /// By the address of the gate and up, with that of the down.
    experts: Known<(Experts, u64)>,
}

#[pymethods]
impl Runtime {
    /// Opens a GPU; finds libcuda and the compiler first. Above a batch of `expand_above` weights are expanded to BF16
    /// for cuBLAS; by default where the model of the machine says that this is faster.
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
                CString::new(format!("unweight: measurements are not followed: {error}")).map_err(value_error)?;
            PyErr::warn(py, &py.get_type::<PyUserWarning>(), &text, 1)?;
        }
        Ok(Self { interop, linears: Known::default(), experts: Known::default() })
    }

    /// Bytes of an arena for a shape, and the room for lists that packing takes; `None` for a shape that is not packed.
    #[staticmethod]
    fn room(rows: usize, cols: usize) -> Option<(usize, usize)> {
        let grid = TileGrid::new(rows, cols).ok()?;
        let layout = Layout::new(grid).ok()?;
        Some((layout.bytes(), Packer::escape_words_max(grid) * 4))
    }

    /// Packs BF16 `[rows, cols]`, and writes the arena; returns the bytes of `escapes` that count. `None`: they cannot
    /// be packed.
    fn pack(
        &self,
        py: Python<'_>,
        weights: u64,
        rows: u32,
        cols: u32,
        arena: Memory,
        escapes: Memory,
    ) -> PyResult<Option<usize>> {
        let grid = TileGrid::new(rows as usize, cols as usize).map_err(value_error)?;
        let layout = Layout::new(grid)?;
        if arena.1 != layout.bytes() {
            let wanted = layout.bytes();
            return Err(PyValueError::new_err(format!("the arena has {wanted} bytes, the buffer {}", arena.1)));
        }
        let to = place(&layout, arena.0, escapes);
        py.detach(|| {
            // SAFETY: the caller's tensors, of these sizes, that nobody uses meanwhile (`_native.pyi`).
            let (window, words) = match unsafe { self.interop.pack_at(weights, (rows, cols), to) } {
                Ok(packed) => packed,
                Err(PackError::Unpackable(_)) => return Ok(None),
                Err(error) => return Err(error),
            };
            // SAFETY: as above; so many words have been written.
            let lists = unsafe { self.interop.read(escapes.0, words * 4) }?;
            let mut rest = vec![0; layout.head.end - layout.heads.end];
            let head = rest.len() - ALIGN;
            write_head(&mut rest[head..], grid, window, &lists);
            // SAFETY: as above; what is behind the heads of escapes.
            unsafe { self.interop.write(arena.0 + layout.heads.end as u64, &rest) }?;
            Ok(Some(lists.len()))
        })
        .map_err(|error| raised(py, &error))
    }

    /// Compiles what `register` asks for of a shape.
    fn prepare(&self, py: Python<'_>, rows: u32, cols: u32) -> PyResult<()> {
        py.detach(|| self.interop.prepare((rows, cols))).map_err(|error| raised(py, &error))
    }

    /// Makes an arena known, and returns what `forget` takes, and the digest of its lists. Compiles what its shape asks
    /// for.
    fn register(&self, py: Python<'_>, arena: Memory, escapes: Memory) -> PyResult<(u64, String)> {
        let PackedState { shape, window, at, digest } = self.stored(py, arena, escapes)?;
        // SAFETY: the caller's tensors, which it holds until `forget` and longer than the work (`_native.pyi`). Behind
        // each section of an arena is another or its head, behind the lists what the caller allocated for it.
        let linear = py.detach(|| unsafe { self.interop.layer(shape, window, at) });
        let id = self.linears.add(arena.0, linear.map_err(|error| raised(py, &error))?);
        Ok((id, digest))
    }

    /// Makes the experts of a mixture known by their two arenas, each with its escapes: of the gates and ups, 8 rows in
    /// turns, and of the downs, of all experts one below the other. Returns what `forget_experts` takes.
    fn register_experts(
        &self,
        py: Python<'_>,
        gate_up: (Memory, Memory),
        down: (Memory, Memory),
        experts: u32,
    ) -> PyResult<u64> {
        let (upper, lower) = (self.stored(py, gate_up.0, gate_up.1)?, self.stored(py, down.0, down.1)?);
        let shape = ExpertsShape { experts, hidden: upper.shape.1, intermediate: lower.shape.1 };
        let known = |stored: PackedState| (stored.window, stored.at);
        // SAFETY: as for `register`.
        let made = py.detach(|| unsafe { self.interop.experts(shape, known(upper), known(lower)) });
        let experts = made.map_err(|error| raised(py, &error))?;
        Ok(self.experts.add(gate_up.0.0, (experts, down.0.0)))
    }

    /// Forgets experts that were registered so.
    fn forget_experts(&self, gate_up: u64, id: u64) {
        self.experts.forget(gate_up, id);
    }

    /// Bytes of scratch of known experts for so many tokens `[m, hidden]` that chose `top_k` each.
    fn experts_scratch_nbytes(
        &self,
        py: Python<'_>,
        arenas: (u64, u64),
        m: u32,
        hidden: u32,
        top_k: u32,
        experts: u32,
    ) -> PyResult<u64> {
        let known = self.experts_of(py, arenas)?;
        let shape = known.0.shape();
        if (shape.hidden, shape.experts) != (hidden, experts) {
            let message = format!(
                "there are {} experts of {} columns, but x has {hidden} and {experts} are named",
                shape.experts, shape.hidden
            );
            return Err(PyValueError::new_err(message));
        }
        Ok(shape.scratch_bytes(m, top_k))
    }

    /// Enqueues the experts of tokens: `rows` is x, its rows and y; `routed` is ids, weights and how many of them a
    /// token has.
    fn experts(
        &self,
        py: Python<'_>,
        arenas: (u64, u64),
        rows: (u64, u32, u64),
        routed: (u64, u64, u32),
        scratch: (u64, u64),
        stream: usize,
    ) -> PyResult<()> {
        let known = self.experts_of(py, arenas)?;
        let stream = std::ptr::with_exposed_provenance_mut::<c_void>(stream);
        let scratch = Scratch { address: scratch.0, bytes: scratch.1 };
        let routed = RoutedAt { ids: routed.0, weights: routed.1, top_k: routed.2 };
        // SAFETY: the caller's tensors and its stream (`_native.pyi`).
        unsafe { self.interop.enqueue_experts(&known.0, stream, rows, routed, scratch, false) }
            .map_err(|error| raised(py, &error))
    }

    /// Whether an arena is known by this address.
    fn knows(&self, arena: u64) -> bool {
        self.linears.get(arena).is_some()
    }

    /// The digest of the lists of an arena, known or not.
    fn digest(&self, py: Python<'_>, arena: Memory) -> PyResult<String> {
        let bytes = self.head(py, arena)?;
        Ok(Head::of_bytes(&bytes, arena.1)?.0.digest())
    }

    /// Forgets an arena that was registered so.
    fn forget(&self, arena: u64, id: u64) {
        self.linears.forget(arena, id);
    }

    /// Rows and columns of a known arena.
    fn shape(&self, py: Python<'_>, arena: u64) -> PyResult<(u32, u32)> {
        let linear = self.of(py, arena)?;
        Ok((linear.n(), linear.k()))
    }

    /// Bytes of scratch for a batch of a known arena `[n, k]`.
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

    /// Enqueues the product; `rows` is x, its rows and y; `add`: to what is in y.
    fn linear(
        &self,
        py: Python<'_>,
        arena: u64,
        rows: (u64, u32, u64),
        scratch: (u64, u64),
        stream: usize,
        add: bool,
    ) -> PyResult<()> {
        let linear = self.of(py, arena)?;
        let stream = std::ptr::with_exposed_provenance_mut::<c_void>(stream);
        let scratch = Scratch { address: scratch.0, bytes: scratch.1 };
        // SAFETY: the caller's tensors and its stream (`_native.pyi`).
        unsafe { self.interop.enqueue(&linear, stream, rows, scratch, epilogue(add)) }
            .map_err(|error| raised(py, &error))
    }

    /// Writes the weights of a known arena as BF16.
    fn unpack(&self, py: Python<'_>, arena: u64, out: Memory) -> PyResult<()> {
        let linear = self.of(py, arena)?;
        let wanted = linear.n() as usize * linear.k() as usize * 2;
        if out.1 != wanted {
            return Err(PyValueError::new_err(format!("the weights have {wanted} bytes, the buffer {}", out.1)));
        }
        // SAFETY: the caller's tensor, of this size, that nobody uses meanwhile (`_native.pyi`).
        py.detach(|| unsafe { self.interop.unpack_at(&linear, out.0) }).map_err(|error| raised(py, &error))
    }
}

/// A packed matrix in an arena, whose escapes were compared with their digest.
struct PackedState {
    shape: (u32, u32),
    window: Window,
    at: PackedAt,
    digest: String,
}

impl Runtime {
    fn stored(&self, py: Python<'_>, arena: Memory, escapes: Memory) -> PyResult<PackedState> {
        let bytes = self.head(py, arena)?;
        let (head, grid, layout) = Head::of_bytes(&bytes, arena.1)?;
        if escapes.1 != head.escapes() {
            return Err(PyValueError::new_err(format!(
                "the arena has {} bytes of escapes, the buffer {}",
                head.escapes(),
                escapes.1
            )));
        }
        // SAFETY: the caller's tensor, which nobody writes (`_native.pyi`).
        let lists = py.detach(|| unsafe { self.interop.read(escapes.0, escapes.1) });
        let digest = head.digest();
        if Digest::of(&lists.map_err(|error| raised(py, &error))?).to_string() != digest {
            return Err(PyValueError::new_err("these are not the escapes of this arena"));
        }
        // The dimensions of a packed grid fit 32 bits.
        let shape = (grid.rows() as u32, grid.cols() as u32);
        Ok(PackedState { shape, window: head.window()?, at: place(&layout, arena.0, escapes), digest })
    }

    fn experts_of(&self, py: Python<'_>, (gate_up, down): (u64, u64)) -> PyResult<Arc<(Experts, u64)>> {
        self.experts.get(gate_up).filter(|known| known.1 == down).ok_or_else(|| {
            let message = "these arenas of experts are not known on their device; pack them there \
                           (unweight.ops.pack_experts), and hold what it returns";
            plain(py, "UnweightError", message)
        })
    }

    fn of(&self, py: Python<'_>, arena: u64) -> PyResult<Arc<Linear>> {
        self.linears.get(arena).ok_or_else(|| {
            let message = "this arena is not known on its device, and neither are its escapes, or the copy is met in a \
                           capture; move the module (unweight.ops.Linear), or give both to unweight.ops.place";
            plain(py, "UnweightError", message)
        })
    }

    fn head(&self, py: Python<'_>, arena: Memory) -> PyResult<Vec<u8>> {
        let at = arena.1.checked_sub(ALIGN).ok_or_else(|| value_error("an arena of less than its head"))?;
        // SAFETY: the caller's tensor, of this size (`_native.pyi`).
        py.detach(|| unsafe { self.interop.read(arena.0 + at as u64, ALIGN) }).map_err(|error| raised(py, &error))
    }
}

fn place(layout: &Layout, arena: u64, escapes: Memory) -> PackedAt {
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

/// An error of the runtime, with all that led to it.
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
