//! Packing and unpacking on the CPU, in memory that torch owns.
//!
//! An arena is one buffer: `packed | escape heads | zeros to a multiple of 256 | head of 256 bytes`. Its size depends
//! on the shape alone. The escape lists vary in size, so they are a second buffer; the head contains their digest.

use std::{ops::Range, slice};

use pyo3::{exceptions::PyValueError, prelude::*};
use unweight_format::{
    Digest, Histogram, Matrix, TileGrid,
    raw::{
        PackedTensor,
        layout::{PACKED_WINDOW_BYTES, ROW_BLOCKS},
        packed::{self, TILE_BYTES, Window},
    },
};

use crate::pool::on_pool;

/// Alignment of the head and of the arena's size, in bytes.
pub const ALIGN: usize = 256;
const MAGIC: &[u8; 8] = b"UWARENA1";
const ROWS: Range<usize> = 8..16;
const COLS: Range<usize> = 16..24;
const ESCAPE_BYTES: Range<usize> = 24..32;
const DIGEST: Range<usize> = 32..64;
const WINDOW: Range<usize> = 64..64 + PACKED_WINDOW_BYTES;

/// Byte ranges of the sections of an arena; the packed tiles begin at 0.
pub struct Layout {
    pub heads: Range<usize>,
    pub head: Range<usize>,
}

impl Layout {
    pub fn new(grid: TileGrid) -> PyResult<Self> {
        packed::packable_shape(grid).map_err(value_error)?;
        let packed = grid.tiles() * TILE_BYTES;
        let heads = packed..packed + grid.tiles() * ROW_BLOCKS * 4;
        let at = heads.end.next_multiple_of(ALIGN);
        Ok(Self { heads, head: at..at + ALIGN })
    }

    pub fn bytes(&self) -> usize {
        self.head.end
    }
}

pub fn value_error(error: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}

fn not_an_arena() -> PyErr {
    value_error("not an arena of packed weights; unweight.ops.pack makes one")
}

/// The last [`ALIGN`] bytes of an arena: magic, shape, window, and the size and digest of the escape lists.
pub struct Head<'a>(&'a [u8]);

impl<'a> Head<'a> {
    /// Reads the head of a whole arena, whose size must match the shape in the head.
    fn of(arena: &'a [u8]) -> PyResult<(Self, TileGrid, Layout)> {
        let at = arena.len().checked_sub(ALIGN).ok_or_else(not_an_arena)?;
        Self::of_bytes(&arena[at..], arena.len())
    }

    /// Reads the head from its [`ALIGN`] bytes; `arena_bytes` is the size of the whole arena.
    pub fn of_bytes(head: &'a [u8], arena_bytes: usize) -> PyResult<(Self, TileGrid, Layout)> {
        let head = Self(head);
        if head.0.len() != ALIGN || &head.0[..8] != MAGIC {
            return Err(not_an_arena());
        }
        let grid = TileGrid::new(head.number(ROWS), head.number(COLS)).map_err(value_error)?;
        let layout = Layout::new(grid)?;
        if layout.bytes() != arena_bytes {
            return Err(not_an_arena());
        }
        Ok((head, grid, layout))
    }

    /// The size of the escape lists in bytes.
    pub fn escapes(&self) -> usize {
        self.number(ESCAPE_BYTES)
    }

    fn number(&self, at: Range<usize>) -> usize {
        u64::from_le_bytes(self.0[at].try_into().expect("8 bytes")) as usize
    }

    /// The digest of the escape lists.
    pub fn digest(&self) -> String {
        String::from_utf8_lossy(&self.0[DIGEST]).into_owned()
    }

    pub fn window(&self) -> PyResult<Window> {
        Window::from_stored(self.0[WINDOW].try_into().expect("a window's bytes")).map_err(value_error)
    }
}

/// Writes the head of an arena to `head`, which must be zeroed.
pub fn write_head(head: &mut [u8], grid: TileGrid, window: Window, lists: &[u8]) {
    head[..8].copy_from_slice(MAGIC);
    head[ROWS].copy_from_slice(&(grid.rows() as u64).to_le_bytes());
    head[COLS].copy_from_slice(&(grid.cols() as u64).to_le_bytes());
    head[ESCAPE_BYTES].copy_from_slice(&(lists.len() as u64).to_le_bytes());
    head[DIGEST].copy_from_slice(Digest::of(lists).to_string().as_bytes());
    head[WINDOW].copy_from_slice(&window.stored());
}

/// Returns the memory at an address as a slice.
///
/// # Safety
/// `bytes` bytes at `address` are readable for `'a`, and nothing writes them meanwhile.
unsafe fn at<'a>(address: usize, bytes: usize) -> &'a [u8] {
    if bytes == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { slice::from_raw_parts(address as *const u8, bytes) }
}

/// Returns the memory at an address as a mutable slice.
///
/// # Safety
/// `bytes` bytes at `address` are writable for `'a`, and nothing else reads or writes them meanwhile.
pub unsafe fn at_mut<'a>(address: usize, bytes: usize) -> &'a mut [u8] {
    if bytes == 0 {
        return &mut [];
    }
    // SAFETY: the caller's promise.
    unsafe { slice::from_raw_parts_mut(address as *mut u8, bytes) }
}

fn check_addresses(addresses: &[(usize, usize)]) -> PyResult<()> {
    match addresses.iter().any(|&(address, bytes)| address == 0 && bytes > 0) {
        true => Err(PyValueError::new_err("an address is 0; pass addresses of CPU memory")),
        false => Ok(()),
    }
}

/// A packed matrix in Rust's memory, before `store` copies it to the caller's buffers.
#[pyclass(frozen, module = "unweight._native")]
pub struct Packed(PackedTensor<Vec<u8>>);

#[pymethods]
impl Packed {
    #[getter]
    fn arena_nbytes(&self) -> PyResult<usize> {
        Ok(Layout::new(self.0.grid())?.bytes())
    }

    #[getter]
    fn escapes_nbytes(&self) -> usize {
        self.0.escapes().len()
    }

    /// Writes the arena and the escape lists to buffers of exactly `arena_nbytes` and `escapes_nbytes` bytes.
    fn store(&self, py: Python<'_>, arena: (usize, usize), escapes: (usize, usize)) -> PyResult<()> {
        let layout = Layout::new(self.0.grid())?;
        if (arena.1, escapes.1) != (layout.bytes(), self.0.escapes().len()) {
            return Err(PyValueError::new_err(format!(
                "arena and escapes have {} and {} bytes, but the buffers have {} and {}",
                layout.bytes(),
                self.0.escapes().len(),
                arena.1,
                escapes.1
            )));
        }
        check_addresses(&[arena, escapes])?;
        // SAFETY: the caller's tensors have these sizes and live during the call (contract in `_native.pyi`).
        let (out, lists) = unsafe { (at_mut(arena.0, arena.1), at_mut(escapes.0, escapes.1)) };
        py.detach(|| {
            out[..layout.heads.start].copy_from_slice(self.0.packed());
            out[layout.heads.clone()].copy_from_slice(self.0.escape_heads());
            out[layout.heads.end..].fill(0);
            lists.copy_from_slice(self.0.escapes());
            write_head(&mut out[layout.head], self.0.grid(), self.0.window(), lists);
        });
        Ok(())
    }
}

/// Packs a contiguous BF16 matrix `[rows, cols]`. Returns it, or why it cannot be packed.
#[pyfunction]
pub fn pack(py: Python<'_>, address: usize, rows: usize, cols: usize) -> PyResult<(Option<Packed>, Option<String>)> {
    let grid = match TileGrid::new(rows, cols) {
        Ok(grid) => grid,
        Err(error) => return Ok((None, Some(error.to_string()))),
    };
    if let Err(why) = packed::packable_shape(grid) {
        return Ok((None, Some(why.to_string())));
    }
    let bytes = grid.elements().checked_mul(2).ok_or_else(|| PyValueError::new_err("the matrix is too large"))?;
    check_addresses(&[(address, bytes)])?;
    // SAFETY: the caller's tensor has this shape and lives during the call (contract in `_native.pyi`).
    let weights = unsafe { at(address, bytes) };
    on_pool(py, || {
        let matrix = Matrix::new(weights, rows, cols).map_err(value_error)?;
        Ok(match packed::pack(matrix, &Histogram::of(weights)) {
            Ok(packed) => (Some(Packed(packed)), None),
            Err(why) => (None, Some(why.to_string())),
        })
    })?
}

/// Returns rows, columns, the size of the escape lists in bytes, and their digest, from the head of an arena.
#[pyfunction]
pub fn arena_head(address: usize, nbytes: usize) -> PyResult<(usize, usize, usize, String)> {
    check_addresses(&[(address, nbytes)])?;
    // SAFETY: the caller's tensor has this size and lives during the call (contract in `_native.pyi`).
    let (head, grid, _) = Head::of(unsafe { at(address, nbytes) })?;
    Ok((grid.rows(), grid.cols(), head.escapes(), head.digest()))
}

/// Returns the digest of escape lists.
#[pyfunction]
pub fn escapes_digest(address: usize, nbytes: usize) -> PyResult<String> {
    check_addresses(&[(address, nbytes)])?;
    // SAFETY: the caller's tensor has this size and lives during the call (contract in `_native.pyi`).
    Ok(Digest::of(unsafe { at(address, nbytes) }).to_string())
}

/// Unpacks an arena bit for bit into BF16 `[rows, cols]`. Checks all sizes before it reads or writes. The packed
/// weights have no digest, so damage to them is not found.
#[pyfunction]
pub fn unpack(py: Python<'_>, arena: (usize, usize), escapes: (usize, usize), out: (usize, usize)) -> PyResult<()> {
    check_addresses(&[arena, escapes, out])?;
    // SAFETY: the caller's tensors have these sizes and live during the call (contract in `_native.pyi`).
    let (arena, escapes, out) = unsafe { (at(arena.0, arena.1), at(escapes.0, escapes.1), at_mut(out.0, out.1)) };
    on_pool(py, || {
        let (head, grid, layout) = Head::of(arena)?;
        let sections = (&arena[..layout.heads.start], &arena[layout.heads]);
        let tensor = PackedTensor::from_parts(grid, head.window()?, sections.0, sections.1, escapes);
        packed::decode_into(&tensor.map_err(value_error)?, out).map_err(value_error)
    })?
}
