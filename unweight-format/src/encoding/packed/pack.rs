//! Packs a matrix: chooses the window, packs bands of tiles in parallel, and joins their lists of escapes.

use super::{
    PackedTensor, Unpackable, Window,
    container::{NO_OPERAND, pack_tile, sort_key},
    packable_shape,
    tensor::{HEAD_LIST, HEAD_ONE},
};
use crate::{
    Histogram, Matrix, bf16,
    bits::zeroed,
    encoding::bands::BAND_TILES,
    layout::{PACKED_TILE_BYTES as TILE_BYTES, ROW_BLOCKS, WORDS_ALIGN},
    parallel,
};

/// Packs a matrix, or returns why it cannot be packed. `histogram` is the histogram of this matrix.
///
/// # Errors
/// [`Unpackable`], which states the rules.
pub fn pack(matrix: Matrix<'_>, histogram: &Histogram) -> Result<PackedTensor<Vec<u8>>, Unpackable> {
    let grid = matrix.grid();
    packable_shape(grid)?;
    let window = Window::covering(histogram)?;
    let mut packed = zeroed(grid.tiles() * TILE_BYTES);
    let mut heads = vec![0; grid.tiles() * ROW_BLOCKS * 4];
    let bands = packed.chunks_mut(BAND_TILES * TILE_BYTES).zip(heads.chunks_mut(BAND_TILES * ROW_BLOCKS * 4));
    let bands: Vec<Option<Vec<u32>>> = parallel::map(bands.enumerate(), |(band, (packed, heads))| {
        pack_band(matrix, window, band * BAND_TILES, packed, heads)
    });
    let Some(bands) = bands.into_iter().collect::<Option<Vec<Vec<u32>>>>() else {
        return Err(first_without_operand(matrix, window));
    };
    // The bands' offsets count from their own start; make them count from the tensor's.
    let (mut words, mut starts) = (0usize, Vec::with_capacity(bands.len()));
    for band in &bands {
        starts.push(words as u32);
        words += band.len();
    }
    if words > HEAD_LIST as usize {
        let (_, outside) = Window::best(histogram);
        return Err(Unpackable::Escapes { outside, elements: histogram.total() });
    }
    parallel::for_each_chunk(&mut heads, BAND_TILES * ROW_BLOCKS * 4, &|band, heads| {
        let start = starts[band];
        if start == 0 {
            return;
        }
        for head in heads.chunks_exact_mut(4) {
            let value = u32::from_le_bytes((&*head).try_into().expect("4 bytes"));
            if value & HEAD_LIST != 0 {
                head.copy_from_slice(&(value + start).to_le_bytes());
            }
        }
    });
    let mut escapes: Vec<u8> = bands.iter().flatten().flat_map(|word| word.to_le_bytes()).collect();
    escapes.resize(escapes.len().next_multiple_of(4 * WORDS_ALIGN), 0);
    Ok(PackedTensor { grid, window, packed, escape_heads: heads, escapes, escape_words: words })
}

/// Finds the first element, in row-major order, that prevents packing the matrix with this window.
#[cold]
fn first_without_operand(matrix: Matrix<'_>, window: Window) -> Unpackable {
    let cols = matrix.grid().cols();
    let lacks_operand = |bits: u16| window.nibble(bf16::exponent(bits)).is_none() && window.operand(bits).is_none();
    let elements = matrix.bytes().chunks_exact(2).map(|e| u16::from_le_bytes([e[0], e[1]]));
    let at = elements.enumerate().find(|&(_, bits)| lacks_operand(bits)).map_or(0, |(at, _)| at);
    Unpackable::Operand { row: at / cols, col: at % cols }
}

/// Packs consecutive tiles. Writes heads whose indices count from the band's start, and returns the band's lists;
/// `None` if an escape has no operand.
fn pack_band(
    matrix: Matrix<'_>,
    window: Window,
    first: usize,
    packed: &mut [u8],
    heads: &mut [u8],
) -> Option<Vec<u32>> {
    let mut lists = Vec::new();
    let mut records = [const { Vec::new() }; ROW_BLOCKS];
    for (i, bytes) in packed.chunks_exact_mut(TILE_BYTES).enumerate() {
        let bytes = bytes.try_into().expect("a tile");
        if !pack_tile(matrix, window, first + i, bytes, &mut records) {
            continue;
        }
        for (records, head) in records.iter_mut().zip(heads[i * ROW_BLOCKS * 4..].chunks_exact_mut(4)) {
            if records.contains(&NO_OPERAND) {
                return None;
            }
            let value = match records.as_slice() {
                [] => 0,
                [one] => HEAD_ONE | one,
                _ => {
                    records.sort_unstable_by_key(|&record| sort_key(record));
                    let at = lists.len() as u32;
                    lists.push(records.len() as u32);
                    lists.extend_from_slice(records);
                    HEAD_LIST | at
                }
            };
            head.copy_from_slice(&value.to_le_bytes());
            records.clear();
        }
    }
    Some(lists)
}
