//! The fast decoder: several symbols per lookup, four streams at a time, parallel over tile rows.
//!
//! ```text
//! for each tile                                   oracle: one bit at a time
//!   divide its coded rows into four streams       (row lengths give every start)
//!   until a stream is nearly done:
//!     for each stream: load 57+ bits, then look up `window` bits 3..5 times: up to 6 exponents each time
//!   finish each stream symbol by symbol           (so that no bit of a neighbour is consumed)
//! join exponents with sign_mantissa row by row    (vectorised by the compiler)
//! ```
//! Optimisations, most effective first: multi-symbol entries; four independent chains; decoding a strip of tiles before
//! joining, so that whole rows are read and written sequentially; code for several instruction sets, selected at run
//! time.

use std::sync::{Mutex, PoisonError};

use crate::{
    Code, CodecError, HuffmanTensor, PaletteTensor,
    bits::zeroed,
    encoding::{
        TileRows,
        huffman::CodedExponents,
        tiles::{check_out, join, low_bits},
    },
    layout::{CODE_LENGTH_MAX, PALETTE_TILE_BYTES, ROW_BITS_MAX, TILE},
    parallel,
};

/// Decodes to little-endian BF16 bytes.
///
/// Row lengths are checked per quarter of a tile, the decoder's unit; the oracle checks every row.
///
/// # Errors
/// The codes of coded rows do not use exactly their stored bits.
pub fn decode<B: AsRef<[u8]> + Sync>(tensor: &HuffmanTensor<B>) -> Result<Vec<u8>, CodecError> {
    let mut out = zeroed(tensor.grid().elements() * 2);
    decode_into(tensor, &mut out)?;
    Ok(out)
}

/// Decodes into `out` on the current rayon pool.
///
/// # Errors
/// `out` is not `n * k * 2` bytes long, or the errors of [`decode`].
pub fn decode_into<B: AsRef<[u8]> + Sync>(tensor: &HuffmanTensor<B>, out: &mut [u8]) -> Result<(), CodecError> {
    check_out(tensor.grid(), out)?;
    decode_rows(tensor.exponents(), &SignMantissa(tensor.sign_mantissa()), out)
}

/// The parts of the elements that exponents are joined with.
pub(crate) trait Join: Sync {
    /// Bytes of an element.
    fn bytes(&self) -> usize;

    /// Writes the elements from index `first` on that have these exponents; `out` has their size.
    fn join(&self, first: usize, exponents: &[u8], out: &mut [u8]);
}

/// Sign and mantissa of all weights.
pub(super) struct SignMantissa<'a>(pub(super) &'a [u8]);

impl Join for SignMantissa<'_> {
    fn bytes(&self) -> usize {
        2
    }

    #[inline(always)]
    fn join(&self, first: usize, exponents: &[u8], out: &mut [u8]) {
        join(&self.0[first..][..exponents.len()], exponents, out);
    }
}

/// Decodes exponents and joins them with the rest of the elements. `out` has the size of the matrix.
///
/// # Errors
/// As [`decode`].
pub(crate) fn decode_rows<B: AsRef<[u8]> + Sync, J: Join>(
    tensor: &CodedExponents<B>,
    rest: &J,
    out: &mut [u8],
) -> Result<(), CodecError> {
    decode_tile_rows(tensor, &Table::new(tensor.code()), rest, 0, out)
}

/// A function that decodes tile rows like [`decode_rows`].
pub(crate) fn tile_rows<'a, B: AsRef<[u8]> + Sync + 'a, J: Join + 'a>(
    tensor: CodedExponents<B>,
    rest: J,
) -> TileRows<'a> {
    let table = Table::new(tensor.code());
    Box::new(move |first, out| decode_tile_rows(&tensor, &table, &rest, first, out))
}

/// Decodes the tile rows from index `first` on that fill `out`.
fn decode_tile_rows<B: AsRef<[u8]> + Sync, J: Join>(
    tensor: &CodedExponents<B>,
    table: &Table,
    rest: &J,
    first: usize,
    out: &mut [u8],
) -> Result<(), CodecError> {
    let scratches = Scratches::default();
    parallel::try_for_each_chunk(out, TILE * tensor.grid().cols() * rest.bytes(), |tile_row, out| {
        scratches.lend(|scratch| tile_row_into(tensor, table, rest, scratch, first + tile_row, out))
    })
}

/// Decodes one tile row (up to 64 rows of the matrix) into `out`.
fn tile_row_into<B: AsRef<[u8]>, J: Join>(
    tensor: &CodedExponents<B>,
    table: &Table,
    rest: &J,
    scratch: &mut Scratch,
    tile_row: usize,
    out: &mut [u8],
) -> Result<(), CodecError> {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("bmi2")
        {
            // SAFETY: the processor has the instructions.
            return unsafe { tile_row_avx512(tensor, table, rest, scratch, tile_row, out) };
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("bmi2") {
            // SAFETY: the processor has the instructions.
            return unsafe { tile_row_avx2(tensor, table, rest, scratch, tile_row, out) };
        }
    }
    tile_row_any(tensor, table, rest, scratch, tile_row, out)
}

/// Compiles the same code for another instruction set.
macro_rules! compile_for {
    ($name:ident, $features:literal) => {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = $features)]
        fn $name<B: AsRef<[u8]>, J: Join>(
            tensor: &CodedExponents<B>,
            table: &Table,
            rest: &J,
            scratch: &mut Scratch,
            tile_row: usize,
            out: &mut [u8],
        ) -> Result<(), CodecError> {
            tile_row_any(tensor, table, rest, scratch, tile_row, out)
        }
    };
}
compile_for!(tile_row_avx512, "avx512f,avx512bw,avx512vl,bmi1,bmi2,lzcnt,popcnt");
compile_for!(tile_row_avx2, "avx2,bmi1,bmi2,lzcnt,popcnt");

/// Tiles decoded before they are joined: 64 rows of 1024 exponents are 64 KiB, which fit the L2 cache.
const STRIP: usize = 16;
const STREAMS: usize = 4;
/// Twice the range of indices, a power of two: the symbols of a run and the overhang of its last store.
const STREAM_BYTES: usize = 2 * (TILE * TILE / STREAMS + TILE).next_power_of_two();
/// Likewise, for a tile's words and the distance that a damaged run can read past them (16 rows of 64 codes of 15
/// bits).
const TILE_BYTES: usize = 2
    * ((TILE * ROW_BITS_MAX as usize).div_ceil(8) + TILE * TILE / STREAMS * CODE_LENGTH_MAX as usize / 8 + 16)
        .next_power_of_two();

struct Scratch {
    words: Box<[u8; TILE_BYTES]>,
    streams: Box<[[u8; STREAM_BYTES]; STREAMS]>,
    /// Exponents of the strip, `[64][STRIP * 64]`.
    strip: Vec<[u8; STRIP * TILE]>,
}

impl Default for Scratch {
    fn default() -> Self {
        Self {
            words: Box::new([0; TILE_BYTES]),
            streams: Box::new([[0; STREAM_BYTES]; STREAMS]),
            strip: vec![[0; STRIP * TILE]; TILE],
        }
    }
}

/// Scratch memory that tasks borrow one after the other, so that there is only as much as tasks run at once.
#[derive(Default)]
struct Scratches(Mutex<Vec<Scratch>>);

impl Scratches {
    fn lend<R>(&self, work: impl FnOnce(&mut Scratch) -> R) -> R {
        let free = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut scratch = free().pop().unwrap_or_default();
        let result = work(&mut scratch);
        free().push(scratch);
        result
    }
}

#[inline(always)]
fn tile_row_any<B: AsRef<[u8]>, J: Join>(
    tensor: &CodedExponents<B>,
    table: &Table,
    rest: &J,
    scratch: &mut Scratch,
    tile_row: usize,
    out: &mut [u8],
) -> Result<(), CodecError> {
    let grid = tensor.grid();
    let (rows, cols) = (grid.rows_in(tile_row), grid.cols());
    for strip in (0..grid.tile_cols()).step_by(STRIP) {
        for tile_col in strip..grid.tile_cols().min(strip + STRIP) {
            decode_tile(tensor, table, scratch, tile_row * grid.tile_cols() + tile_col, (tile_col - strip) * TILE)?;
        }
        let (first, last) = (strip * TILE, cols.min((strip + STRIP) * TILE));
        for row in 0..rows {
            let target = &mut out[row * cols * rest.bytes()..][first * rest.bytes()..last * rest.bytes()];
            rest.join((tile_row * TILE + row) * cols + first, &scratch.strip[row][..last - first], target);
        }
    }
    Ok(())
}

/// Decodes the exponents of one tile into columns `column..column + 64` of the strip.
#[inline(always)]
fn decode_tile<B: AsRef<[u8]>>(
    tensor: &CodedExponents<B>,
    table: &Table,
    scratch: &mut Scratch,
    tile: usize,
    column: usize,
) -> Result<(), CodecError> {
    let grid = tensor.grid();
    let metadata = tensor.metadata(tile);
    let rows = grid.rows_in(tile / grid.tile_cols());
    let bitmask = metadata.bitmask();
    let coded_rows = (low_bits(rows) & !bitmask).count_ones() as usize;
    let ends = tensor.row_end_offsets(tile);

    // The metadata was validated: the tile's words are inside the section.
    let bytes = (u32::from(ends[TILE - 1]).div_ceil(32) * 4) as usize;
    let source = &tensor.encoded_exp()[metadata.start_word as usize * 4..][..bytes];
    scratch.words[..bytes].copy_from_slice(source);

    // Stream s contains the coded rows [s * coded_rows / 4, (s + 1) * coded_rows / 4).
    let first_row = |s: usize| s * coded_rows / STREAMS;
    let mut streams = [Stream::default(); STREAMS];
    let mut coded = 0;
    for (row, &end) in ends.iter().enumerate().take(rows) {
        if bitmask >> row & 1 == 0 {
            coded += 1;
            for (s, stream) in streams.iter_mut().enumerate() {
                if coded == first_row(s) {
                    stream.bit = end.into();
                }
                if coded == first_row(s + 1) {
                    stream.end_bit = end.into();
                }
            }
        }
    }
    for (s, stream) in streams.iter_mut().enumerate() {
        stream.symbols = (first_row(s + 1) - first_row(s)) * TILE;
        if first_row(s) == 0 {
            stream.bit = 0;
        }
        if first_row(s + 1) == 0 {
            stream.end_bit = 0;
        }
    }
    let (words, out) = (&scratch.words, &mut scratch.streams);
    match table.entries.len() {
        0x800 => decode_streams::<0x800, 5>(words, table, &mut streams, out),
        0x1000 => decode_streams::<0x1000, 4>(words, table, &mut streams, out),
        _ => decode_streams::<0x8000, 3>(words, table, &mut streams, out),
    }
    if streams.iter().any(|s| s.bit != s.end_bit) {
        return Err(blame(tensor, tile));
    }

    let (mut stream, mut at) = (0, 0);
    let mut verbatim = metadata.verbatim_row_offset as usize;
    for row in 0..rows {
        let target = &mut scratch.strip[row][column..column + TILE];
        if bitmask >> row & 1 == 1 {
            target.copy_from_slice(&tensor.verbatim_exponents()[verbatim * TILE..][..TILE]);
            verbatim += 1;
        } else {
            while at == streams[stream].symbols {
                (stream, at) = (stream + 1, 0);
            }
            target.copy_from_slice(&scratch.streams[stream][at..at + TILE]);
            at += TILE;
        }
    }
    Ok(())
}

/// A run of coded rows of one tile.
#[derive(Clone, Copy, Default)]
struct Stream {
    /// Next bit, counted from the tile's start.
    bit: u32,
    /// The bit where the run must end.
    end_bit: u32,
    /// Symbols in the run.
    symbols: usize,
    /// Symbols decoded.
    done: usize,
}

/// Decodes four runs. `LOOKUPS` windows of `log2(ENTRIES)` bits fit the at least 57 bits of a refill.
#[inline(always)]
fn decode_streams<const ENTRIES: usize, const LOOKUPS: usize>(
    words: &[u8; TILE_BYTES],
    table: &Table,
    streams: &mut [Stream; STREAMS],
    out: &mut [[u8; STREAM_BYTES]; STREAMS],
) {
    const { assert!(ENTRIES.is_power_of_two() && ENTRIES.ilog2() as usize * LOOKUPS <= 57) };
    const { assert!(3 <= LOOKUPS && LOOKUPS <= 5, "as many as are written out below") };
    let entries: &[Entry; ENTRIES] = table.entries.as_slice().try_into().expect("the table of this window");
    let look_up = |bits: u64| entries[bits as usize & (ENTRIES - 1)];
    // These masks never change an index: a run reads at most 16 rows of 64 codes of 15 bits past the longest tile, and
    // stores at most 8 bytes past its symbols. They let the compiler omit bounds checks.
    let refill = |bit: u32| {
        let at = (bit / 8) as usize & (TILE_BYTES / 2 - 1);
        u64::from_le_bytes(words[at..at + 8].try_into().expect("8 bytes")) >> (bit % 8)
    };
    let store = |out: &mut [u8; STREAM_BYTES], at: usize, entry: Entry| {
        let at = at & (STREAM_BYTES / 2 - 1);
        out[at..at + 8].copy_from_slice(&entry.symbols().to_le_bytes());
    };
    // Local variables stay in registers.
    let mut bit = streams.map(|s| s.bit);
    let mut done = streams.map(|s| s.done);
    let symbols = streams.map(|s| s.symbols);
    loop {
        let left = (0..STREAMS).map(|s| symbols[s] - done[s]).min().unwrap_or(0);
        // No step can overshoot: a lookup yields at most MULTI_MAX symbols.
        let steps = left / (LOOKUPS * MULTI_MAX);
        if steps == 0 {
            break;
        }
        for _ in 0..steps {
            let mut bits = bit.map(refill);
            let mut used = [0u64; STREAMS];
            // Written out: without link-time optimisation a loop over LOOKUPS is not unrolled, and keeps `bits`, `used`
            // and `done` in memory, which halves the speed.
            macro_rules! look_up_all {
                () => {
                    for s in 0..STREAMS {
                        let entry = look_up(bits[s]);
                        store(&mut out[s], done[s], entry);
                        bits[s] = bits[s].wrapping_shr(entry.0 as u32);
                        // Whole entries are summed: their lowest bytes, the bits used, add up to at most 57.
                        used[s] = used[s].wrapping_add(entry.0);
                        done[s] += entry.count();
                    }
                };
            }
            look_up_all!();
            look_up_all!();
            look_up_all!();
            if LOOKUPS > 3 {
                look_up_all!();
            }
            if LOOKUPS > 4 {
                look_up_all!();
            }
            for s in 0..STREAMS {
                bit[s] += used[s] as u32 & 0xff;
            }
        }
    }
    // Continue in parallel while all streams have symbols for another lookup.
    while (0..STREAMS).all(|s| symbols[s] - done[s] >= MULTI_MAX) {
        for s in 0..STREAMS {
            let entry = look_up(refill(bit[s]));
            store(&mut out[s], done[s], entry);
            bit[s] += entry.bits();
            done[s] += entry.count();
        }
    }
    for s in 0..STREAMS {
        while symbols[s] - done[s] >= MULTI_MAX {
            let entry = look_up(refill(bit[s]));
            store(&mut out[s], done[s], entry);
            bit[s] += entry.bits();
            done[s] += entry.count();
        }
        // At most five symbols are left: decode them one by one, so that no bit after the run is consumed.
        while done[s] < symbols[s] {
            let symbol = look_up(refill(bit[s])).symbols() as u8;
            out[s][done[s]] = symbol;
            bit[s] += u32::from(table.lengths[usize::from(symbol)]);
            done[s] += 1;
        }
    }
    for (s, stream) in streams.iter_mut().enumerate() {
        (stream.bit, stream.done) = (bit[s], done[s]);
    }
}

/// Maximum number of symbols of one table entry.
const MULTI_MAX: usize = 6;

/// An entry of the multi-symbol table: the bits used in byte 0, the exponents in bytes 1..=6, their number in byte 7.
/// The bits are lowest because a shift uses them as its amount without extracting them.
#[derive(Clone, Copy, Default)]
struct Entry(u64);

impl Entry {
    #[inline(always)]
    fn bits(self) -> u32 {
        self.0 as u32 & 0xff
    }

    /// The exponents, first one lowest; unused bytes are arbitrary.
    #[inline(always)]
    fn symbols(self) -> u64 {
        self.0 >> 8
    }

    #[inline(always)]
    fn count(self) -> usize {
        (self.0 >> 56) as usize
    }
}

/// The multi-symbol decode table: up to six symbols per lookup.
struct Table {
    entries: Vec<Entry>,
    /// Code lengths by exponent.
    lengths: [u8; 256],
}

impl Table {
    /// A window of 11 bits contains four symbols of trained weights on average, and its table fills half of the L1
    /// cache. Codes above 11 bits need 12 or 15.
    fn new(code: &Code) -> Self {
        let flat = code.decode_table();
        let window = match code.max_length() {
            ..=11 => 11,
            12 => 12,
            _ => CODE_LENGTH_MAX,
        };
        let entries = (0..1usize << window)
            .map(|bits| {
                let (mut entry, mut count, mut used) = ([0u8; 8], 0, 0);
                while count < MULTI_MAX {
                    // Bits above the window are unknown: the next lookup decodes a code that extends into them.
                    let next = flat[bits >> used & (flat.len() - 1)];
                    if used + u32::from(next.length) > window {
                        break;
                    }
                    count += 1;
                    entry[count] = next.symbol;
                    used += u32::from(next.length);
                }
                (entry[0], entry[7]) = (used as u8, count as u8);
                Entry(u64::from_le_bytes(entry))
            })
            .collect();
        let mut lengths = [0; 256];
        flat.iter().for_each(|e| lengths[usize::from(e.symbol)] = e.length);
        Self { entries, lengths }
    }
}

/// Finds the first damaged row of a tile, with the flat table.
#[cold]
fn blame<B: AsRef<[u8]>>(tensor: &CodedExponents<B>, tile: usize) -> CodecError {
    let flat = tensor.code().decode_table();
    let start = u64::from(tensor.metadata(tile).start_word) * 32;
    let (bytes, bits) = (tensor.encoded_exp(), tensor.row_bits(tile));
    let bit = |at: u64| bytes.get((at / 8) as usize).map_or(0, |b| usize::from(b >> (at % 8) & 1));
    let mut at = start;
    let mut end = start;
    for (row, &row_bits) in bits.iter().enumerate().filter(|&(_, &bits)| bits > 0) {
        end += u64::from(row_bits);
        for _ in 0..TILE {
            let window = (0..tensor.code().max_length()).fold(0, |w, i| w | bit(at + u64::from(i)) << i);
            at += u64::from(flat[window].length);
        }
        if at != end {
            return CodecError::Row { tile, row, reason: "its codes do not use its stored bits" };
        }
    }
    CodecError::Row { tile, row: TILE - 1, reason: "its codes do not use its stored bits" }
}

/// Transcodes Huffman rows to packed palette indices, and copies sign_mantissa and verbatim rows (report section 5.3).
///
/// # Errors
/// As [`decode`].
pub fn transcode<B: AsRef<[u8]> + Sync>(tensor: &HuffmanTensor<B>) -> Result<PaletteTensor<Vec<u8>>, CodecError> {
    let grid = tensor.grid();
    let table = Table::new(tensor.code());
    let index = tensor.code().palette().index();
    let mut packed = zeroed(grid.tiles() * PALETTE_TILE_BYTES);
    let transcode_tile = |scratch: &mut Scratch, tile: usize, packed: &mut [u8]| {
        decode_tile(tensor.exponents(), &table, scratch, tile, 0)?;
        let bits = tensor.row_bits(tile);
        for (row, packed) in packed.chunks_exact_mut(TILE / 2).enumerate().filter(|&(row, _)| bits[row] > 0) {
            for (byte, pair) in packed.iter_mut().zip(scratch.strip[row][..TILE].chunks_exact(2)) {
                // A decoded symbol is in the palette; pad columns have palette index 0.
                let nibble = |exponent: u8| index[usize::from(exponent)].unwrap_or(0);
                *byte = nibble(pair[0]) | nibble(pair[1]) << 4;
            }
        }
        Ok(())
    };
    let scratches = Scratches::default();
    parallel::try_for_each_chunk(&mut packed, STRIP * PALETTE_TILE_BYTES, |strip, packed| {
        scratches.lend(|scratch| {
            let mut tiles = packed.chunks_exact_mut(PALETTE_TILE_BYTES).enumerate();
            tiles.try_for_each(|(tile, packed)| transcode_tile(scratch, strip * STRIP + tile, packed))
        })
    })?;
    let mut metadata = tensor.tile_metadata().to_vec();
    metadata.chunks_exact_mut(crate::TileMetadata::BYTES).for_each(|record| record[..4].fill(0));
    let sections = [tensor.sign_mantissa().to_vec(), packed, metadata, tensor.verbatim_exponents().to_vec()];
    Ok(PaletteTensor::from_encoder(grid, *tensor.code().palette(), sections))
}
