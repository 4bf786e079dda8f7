//! The fast encoder: two passes over the weights, parallel by bands of tile rows.
//!
//! 1. [`Survey`](crate::Survey): histogram and content digest.
//! 2. [`bands`]: split, classify and code each tile.
//!
//! Tiles start on words (`docs/format.md` A.5), so bands are coded independently and then joined by copying. The bytes
//! do not depend on the number of threads. `row_avx512` and `row_avx2` look up a row of 64 elements and merge their
//! codes to eight 64-bit values in vector registers, so that only four appends per row are serial.

use crate::{
    Code, CodecError, Float, FloatMatrix, TileMetadata, bf16,
    bits::zeroed,
    layout::{PALETTE_TILE_BYTES, ROW_BITS_MAX, ROW_BITS_MIN, TILE, TILE_WORDS_MAX, WORDS_ALIGN},
    parallel,
};

/// Lookup tables of one code.
struct Tables {
    code: Code,
    /// Low byte of each exponent's code: the whole code if a vector function uses it.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code))]
    codes: [u8; 256],
    lengths: [u8; 256],
    wide: [(u16, u8); 256],
    nibbles: [u8; 256],
    /// The upper four bits of the exponents that have codes.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code))]
    sixteenths: Vec<u8>,
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code))]
    vectors: Vectors,
}

/// The vector function that encodes a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code))]
enum Vectors {
    /// Codes are too long, or the processor lacks the instructions.
    None,
    /// Codes have at most 7 bits, so that eight fit an append.
    Avx2,
    /// Codes have at most 8 bits.
    Avx512,
}

impl Vectors {
    #[cfg(target_arch = "x86_64")]
    fn of(longest: u32) -> Self {
        let avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vbmi");
        let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("bmi2");
        match longest {
            ..=8 if avx512 => Self::Avx512,
            ..=7 if avx2 => Self::Avx2,
            _ => Self::None,
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn of(_: u32) -> Self {
        Self::None
    }
}

impl Tables {
    fn new(code: &Code) -> Self {
        let wide = code.encode_table();
        let mut nibbles = [0; 256];
        for (i, &exponent) in code.palette().exponents().iter().enumerate() {
            nibbles[usize::from(exponent)] = i as u8;
        }
        Self {
            code: *code,
            codes: wide.map(|(code, _)| code as u8),
            lengths: wide.map(|(_, length)| length),
            wide,
            nibbles,
            sixteenths: (0..16)
                .filter(|&upper| wide[16 * upper..][..16].iter().any(|c| c.1 > 0))
                .map(|u| u as u8)
                .collect(),
            vectors: Vectors::of(code.max_length()),
        }
    }
}

/// The variable-size output of one band of tile rows.
struct Band {
    /// Bytes in use of the band's slice of the words.
    word_bytes: usize,
    verbatim: Vec<u8>,
}

/// Tiles of a band: enough to make a task worth scheduling, few enough to balance (256 tiles are 2 MiB of weights).
pub(crate) const BAND_TILES: usize = 256;

/// Encodes band by band, for the encodings whose tiles have verbatim rows. With `HUFFMAN`, coded rows go to the word
/// stream and their lengths to `out` (64 bytes per tile); otherwise their packed indices go to `out` (2048 bytes per
/// tile). Returns `sign_mantissa` (empty for types other than BF16), `out`, metadata, words, verbatim rows.
pub(crate) fn bands<const HUFFMAN: bool>(
    matrix: FloatMatrix<'_>,
    code: &Code,
    tile_bytes: usize,
) -> Result<[Vec<u8>; 5], CodecError> {
    let tables = &Tables::new(code);
    let grid = matrix.grid();
    let band_rows = (BAND_TILES / grid.tile_cols()).max(1);
    let band_tiles = band_rows * grid.tile_cols();
    // The encoding itself stores sign and fraction of other types. One byte per band stands for the unused output.
    let is_bf16 = matrix.float() == Float::Bf16;
    let band_count = grid.tile_rows().div_ceil(band_rows);
    let (mut sign_mantissa, band_bytes) =
        if is_bf16 { (zeroed(grid.elements()), band_rows * TILE * grid.cols()) } else { (zeroed(band_count), 1) };
    let mut out = zeroed(grid.tiles() * tile_bytes);
    let mut metadata = zeroed(grid.tiles() * TileMetadata::BYTES);
    // Room for the longest tiles. Only the used part is ever touched; the pieces are moved together at the end.
    let mut words = zeroed(if HUFFMAN { grid.tiles() * TILE_WORDS_MAX * 4 + WORDS_ALIGN * 4 } else { 0 });
    let arena = if HUFFMAN { band_tiles * TILE_WORDS_MAX * 4 } else { 1 };
    let nothing: &mut [u8] = &mut vec![0; if HUFFMAN { 0 } else { band_count }];
    let arenas = if HUFFMAN { words.as_mut_slice() } else { nothing };
    let jobs = sign_mantissa
        .chunks_mut(band_bytes)
        .zip(out.chunks_mut(band_tiles * tile_bytes))
        .zip(metadata.chunks_mut(band_tiles * TileMetadata::BYTES))
        .zip(arenas.chunks_mut(arena))
        .enumerate()
        .map(|(band, (((sign_mantissa, out), metadata), words))| Job {
            matrix,
            tables,
            first_tile_row: band * band_rows,
            sign_mantissa,
            out,
            metadata,
            words,
        });
    let bands: Vec<Band> = parallel::map(jobs, |mut job| {
        #[cfg(target_arch = "x86_64")]
        match tables.vectors {
            // SAFETY: `Vectors::of` found that the processor has the instructions and codes are short enough.
            Vectors::Avx512 => return unsafe { job.run_avx512::<HUFFMAN>() },
            // SAFETY: the same.
            Vectors::Avx2 => return unsafe { job.run_avx2::<HUFFMAN>() },
            Vectors::None => {}
        }
        job.run_portable::<HUFFMAN>()
    });
    let word_bytes: u64 = bands.iter().map(|b| b.word_bytes as u64).sum();
    if word_bytes / 4 > 1 << 32 {
        return Err(CodecError::TooManyWords { words: word_bytes / 4 });
    }
    // The bands' offsets count from their own start; make them count from the tensor's.
    let (mut start_word, mut start_row) = (0u32, 0u32);
    let starts: Vec<(u32, u32)> = bands
        .iter()
        .map(|band| {
            let start = (start_word, start_row);
            // Wraps only after the last band of exactly 2^32 words, where the value is not used.
            start_word = start_word.wrapping_add((band.word_bytes / 4) as u32);
            start_row += (band.verbatim.len() / TILE) as u32;
            start
        })
        .collect();
    parallel::for_each_chunk(&mut metadata, band_tiles * TileMetadata::BYTES, &|band, records| {
        let (words, rows) = starts[band];
        for record in records.chunks_exact_mut(TileMetadata::BYTES) {
            let mut tile = TileMetadata::read(record, 0);
            tile.start_word = tile.start_word.wrapping_add(words);
            tile.verbatim_row_offset += rows;
            record.copy_from_slice(&tile.to_bytes());
        }
    });
    if HUFFMAN {
        let mut end = 0;
        for (i, band) in bands.iter().enumerate() {
            words.copy_within(i * arena..i * arena + band.word_bytes, end);
            end += band.word_bytes;
        }
        let padded = end.next_multiple_of(4 * WORDS_ALIGN);
        words[end..padded].fill(0);
        words.truncate(padded);
        words.shrink_to_fit();
    }
    let verbatim = bands.iter().flat_map(|b| b.verbatim.iter().copied()).collect();
    if !is_bf16 {
        sign_mantissa = Vec::new();
    }
    Ok([sign_mantissa, out, metadata, words, verbatim])
}

/// The work on one band: inputs, and the slices of the outputs that belong to it.
struct Job<'a> {
    matrix: FloatMatrix<'a>,
    tables: &'a Tables,
    first_tile_row: usize,
    sign_mantissa: &'a mut [u8],
    out: &'a mut [u8],
    metadata: &'a mut [u8],
    /// Receives the band's coded words, from the start.
    words: &'a mut [u8],
}

/// Defines a whole-band function around a row function, so that the row function is inlined with its instruction set.
macro_rules! band {
    ($(#[$attribute:meta])* $name:ident, $row:path) => {
        $(#[$attribute])*
        fn $name<const HUFFMAN: bool>(&mut self) -> Band {
            let grid = self.matrix.grid();
            let cols = grid.cols();
            let tiles = self.metadata.len() / TileMetadata::BYTES;
            let mut band = Band { word_bytes: 0, verbatim: Vec::new() };
            let mut writer = TileWriter::new();
            let float = self.matrix.float();
            let (mut halves, mut unused) = ([0u8; TILE * 2], [0u8; TILE]);
            for tile in 0..tiles {
                let (tile_row, tile_col) = (self.first_tile_row + tile / grid.tile_cols(), tile % grid.tile_cols());
                let width = grid.cols_in(tile_col);
                let mut bitmask = 0u64;
                let offset = (band.verbatim.len() / TILE) as u32;
                writer.reset();
                for row in 0..grid.rows_in(tile_row) {
                    let at = (tile_row * TILE + row) * cols + tile_col * TILE;
                    let source = &self.matrix.bytes()[at * float.bytes()..(at + width) * float.bytes()];
                    let target = at - self.first_tile_row * TILE * cols;
                    let (source, target) = if float == Float::Bf16 {
                        (source, &mut self.sign_mantissa[target..target + width])
                    } else {
                        exponents_as_bf16(float, source, &mut halves);
                        (&halves[..width * 2], &mut unused[..width])
                    };
                    let mut exponents = [0u8; TILE];
                    let bits = if width == TILE {
                        let source = source.try_into().expect("64 elements");
                        let target = target.try_into().expect("64 elements");
                        $row(source, target, &mut exponents, self.tables, HUFFMAN.then_some(&mut writer))
                    } else {
                        let (mut padded, mut split) = ([0u8; TILE * 2], [0u8; TILE]);
                        padded[..width * 2].copy_from_slice(source);
                        let pad = bf16::join(0, self.tables.code.palette().exponents()[0]).to_le_bytes();
                        padded[width * 2..].chunks_exact_mut(2).for_each(|p| p.copy_from_slice(&pad));
                        let writer = HUFFMAN.then_some(&mut writer);
                        let bits = $row(&padded, &mut split, &mut exponents, self.tables, writer);
                        target.copy_from_slice(&split[..width]);
                        if bits == 0 {
                            exponents[width..].fill(0);
                        }
                        bits
                    };
                    if bits == 0 {
                        bitmask |= 1 << row;
                        band.verbatim.extend_from_slice(&exponents);
                    } else if HUFFMAN {
                        self.out[tile * TILE + row] = (bits - ROW_BITS_MIN) as u8;
                    } else {
                        let packed = &mut self.out[tile * PALETTE_TILE_BYTES + row * (TILE / 2)..][..TILE / 2];
                        for (byte, pair) in packed.iter_mut().zip(exponents.chunks_exact(2)) {
                            let nibble = |exponent: u8| self.tables.nibbles[usize::from(exponent)];
                            *byte = nibble(pair[0]) | nibble(pair[1]) << 4;
                        }
                    }
                }
                let record = TileMetadata::new((band.word_bytes / 4) as u32, offset, bitmask);
                self.metadata[tile * TileMetadata::BYTES..][..TileMetadata::BYTES].copy_from_slice(&record.to_bytes());
                if HUFFMAN {
                    let words = writer.words();
                    self.words[band.word_bytes..band.word_bytes + words.len()].copy_from_slice(words);
                    band.word_bytes += words.len();
                }
            }
            band
        }
    };
}

impl Job<'_> {
    band!(run_portable, row_portable);
    band!(
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,bmi1,bmi2,lzcnt,popcnt")]
        run_avx512,
        row_avx512
    );
    band!(
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
        run_avx2,
        row_avx2
    );
}

/// Converts up to 64 elements of another type to BF16 elements with the same exponents.
#[inline(always)]
fn exponents_as_bf16(float: Float, source: &[u8], out: &mut [u8; TILE * 2]) {
    #[inline(always)]
    fn each<const BYTES: usize>(source: &[u8], out: &mut [u8; TILE * 2], exponent: impl Fn(&[u8; BYTES]) -> u8) {
        for (element, out) in source.as_chunks::<BYTES>().0.iter().zip(out.as_chunks_mut::<2>().0) {
            *out = bf16::join(0, exponent(element)).to_le_bytes();
        }
    }
    match float {
        Float::E4M3 => each(source, out, |&[byte]| Float::E4M3.exponent(byte.into())),
        Float::E5M2 => each(source, out, |&[byte]| Float::E5M2.exponent(byte.into())),
        Float::F16 => each(source, out, |&half| Float::F16.exponent(u16::from_le_bytes(half).into())),
        Float::Bf16 => each(source, out, |&half| bf16::exponent(u16::from_le_bytes(half))),
        Float::F32 => each(source, out, |&single| Float::F32.exponent(u32::from_le_bytes(single))),
    }
}

/// Splits 64 elements and codes their exponents. Returns the number of coded bits, or 0 if the row is verbatim.
fn row_portable(
    source: &[u8; TILE * 2],
    sign_mantissa: &mut [u8; TILE],
    exponents: &mut [u8; TILE],
    tables: &Tables,
    writer: Option<&mut TileWriter>,
) -> u32 {
    let mut bits = 0;
    let mut coded = true;
    for i in 0..TILE {
        let element = u16::from_le_bytes([source[2 * i], source[2 * i + 1]]);
        sign_mantissa[i] = bf16::sign_mantissa(element);
        exponents[i] = bf16::exponent(element);
        let length = tables.lengths[usize::from(exponents[i])];
        coded &= length != 0;
        bits += u32::from(length);
    }
    if !coded || bits > ROW_BITS_MAX {
        return 0;
    }
    if let Some(writer) = writer {
        // Three codes of at most 15 bits per store.
        for triple in exponents.chunks(3) {
            let (mut value, mut length) = (0u64, 0u32);
            for &exponent in triple {
                let (code, bits) = tables.wide[usize::from(exponent)];
                value |= u64::from(code) << length;
                length += u32::from(bits);
            }
            writer.append(value, length);
        }
    }
    bits
}

/// Like [`row_portable`], for codes of at most 8 bits.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,bmi1,bmi2,lzcnt,popcnt")]
#[inline]
fn row_avx512(
    source: &[u8; TILE * 2],
    sign_mantissa: &mut [u8; TILE],
    exponents: &mut [u8; TILE],
    tables: &Tables,
    writer: Option<&mut TileWriter>,
) -> u32 {
    use std::arch::x86_64::*;

    /// Returns `table[byte]` for 64 bytes: two 128-entry permutes, selected by the top bit.
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    #[inline]
    fn look_up(table: &[u8; 256], index: __m512i) -> __m512i {
        let quarter = |i: usize| {
            // SAFETY: four quarters of 64 bytes; the load needs no alignment.
            unsafe { _mm512_loadu_si512(table.as_ptr().add(64 * i).cast()) }
        };
        let low = _mm512_permutex2var_epi8(quarter(0), index, quarter(1));
        let high = _mm512_permutex2var_epi8(quarter(2), index, quarter(3));
        _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), low, high)
    }

    // SAFETY: `source` has 128 bytes; the loads need no alignment. The next tile's row is prefetched: a prefetch may
    // take any address.
    let (low, high) = unsafe {
        _mm_prefetch::<_MM_HINT_T0>(source.as_ptr().wrapping_add(256).cast());
        _mm_prefetch::<_MM_HINT_T0>(source.as_ptr().wrapping_add(320).cast());
        (_mm512_loadu_si512(source.as_ptr().cast()), _mm512_loadu_si512(source.as_ptr().add(64).cast()))
    };
    let join_halves = |low: __m512i, high: __m512i| {
        let (low, high) = (_mm512_cvtepi16_epi8(low), _mm512_cvtepi16_epi8(high));
        _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
    };
    let exponent = join_halves(_mm512_srli_epi16::<7>(low), _mm512_srli_epi16::<7>(high));
    let split = |x: __m512i| {
        let mantissa = _mm512_and_si512(x, _mm512_set1_epi16(0x7f));
        // mantissa | (x >> 8 & 0x80)
        _mm512_ternarylogic_epi32::<0xf8>(mantissa, _mm512_srli_epi16::<8>(x), _mm512_set1_epi16(0x80))
    };
    // SAFETY: both targets have 64 bytes; the stores need no alignment.
    unsafe {
        _mm512_storeu_si512(sign_mantissa.as_mut_ptr().cast(), join_halves(split(low), split(high)));
        _mm512_storeu_si512(exponents.as_mut_ptr().cast(), exponent);
    }

    let length = look_up(&tables.lengths, exponent);
    if _mm512_cmpeq_epi8_mask(length, _mm512_setzero_si512()) != 0 {
        return 0;
    }
    let bits = _mm512_reduce_add_epi64(_mm512_sad_epu8(length, _mm512_setzero_si512())) as u32;
    if bits > ROW_BITS_MAX {
        return 0;
    }
    let Some(writer) = writer else { return bits };
    let code = look_up(&tables.codes, exponent);
    // Merge neighbours three times: 64 codes of <= 8 bits -> 32 of <= 16 -> 16 of <= 32 -> 8 of <= 64.
    let (even, lengths) = (_mm512_set1_epi16(0xff), length);
    let first = _mm512_and_si512(lengths, even);
    let code = _mm512_or_si512(_mm512_and_si512(code, even), _mm512_sllv_epi16(_mm512_srli_epi16::<8>(code), first));
    let lengths = _mm512_add_epi16(first, _mm512_srli_epi16::<8>(lengths));
    let even = _mm512_set1_epi32(0xffff);
    let first = _mm512_and_si512(lengths, even);
    let code = _mm512_or_si512(_mm512_and_si512(code, even), _mm512_sllv_epi32(_mm512_srli_epi32::<16>(code), first));
    let lengths = _mm512_add_epi32(first, _mm512_srli_epi32::<16>(lengths));
    let even = _mm512_set1_epi64(0xffff_ffff);
    let first = _mm512_and_si512(lengths, even);
    let code = _mm512_or_si512(_mm512_and_si512(code, even), _mm512_sllv_epi64(_mm512_srli_epi64::<32>(code), first));
    let lengths = _mm512_add_epi64(first, _mm512_srli_epi64::<32>(lengths));
    let (mut values, mut counts) = ([0u64; 8], [0u64; 8]);
    // SAFETY: both arrays have 64 bytes; the stores need no alignment.
    unsafe {
        _mm512_storeu_si512(values.as_mut_ptr().cast(), code);
        _mm512_storeu_si512(counts.as_mut_ptr().cast(), lengths);
    }
    writer.append_all(&values, &counts);
    bits
}

/// Like [`row_portable`], for codes of at most 7 bits.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
#[inline]
fn row_avx2(
    source: &[u8; TILE * 2],
    sign_mantissa: &mut [u8; TILE],
    exponents: &mut [u8; TILE],
    tables: &Tables,
    writer: Option<&mut TileWriter>,
) -> u32 {
    use std::arch::x86_64::*;

    const HALF: usize = TILE / 2;
    let low_nibble = _mm256_set1_epi8(0x0f);
    let broadcast = |table: &[u8; 256], upper: u8| {
        // SAFETY: `upper` is below 16; the load needs no alignment.
        _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(table.as_ptr().add(16 * usize::from(upper)).cast()) })
    };
    let (mut sum, mut missing) = (_mm256_setzero_si256(), _mm256_setzero_si256());
    let (mut codes, mut lengths) = ([_mm256_setzero_si256(); 2], [_mm256_setzero_si256(); 2]);
    for half in 0..2 {
        // SAFETY: 64 of the 128 bytes of `source`; the loads need no alignment. The next tile's row is prefetched: a
        // prefetch may take any address.
        let (a, b) = unsafe {
            let at = source.as_ptr().add(2 * HALF * half);
            _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(256).cast());
            (_mm256_loadu_si256(at.cast()), _mm256_loadu_si256(at.add(HALF).cast()))
        };
        // `pack` interleaves 64-bit quarters.
        let join_halves = |a, b| _mm256_permute4x64_epi64::<0xd8>(_mm256_packus_epi16(a, b));
        let byte = _mm256_set1_epi16(0xff);
        let exponent = |x| _mm256_and_si256(_mm256_srli_epi16::<7>(x), byte);
        let split = |x| {
            let sign = _mm256_and_si256(_mm256_srli_epi16::<8>(x), _mm256_set1_epi16(0x80));
            _mm256_or_si256(_mm256_and_si256(x, _mm256_set1_epi16(0x7f)), sign)
        };
        let exponent = join_halves(exponent(a), exponent(b));
        // SAFETY: 32 of the 64 bytes of both targets; the stores need no alignment.
        unsafe {
            _mm256_storeu_si256(sign_mantissa.as_mut_ptr().add(HALF * half).cast(), join_halves(split(a), split(b)));
            _mm256_storeu_si256(exponents.as_mut_ptr().add(HALF * half).cast(), exponent);
        }
        let (lower, upper) =
            (_mm256_and_si256(exponent, low_nibble), _mm256_and_si256(_mm256_srli_epi16::<4>(exponent), low_nibble));
        for &sixteenth in &tables.sixteenths {
            let here = _mm256_cmpeq_epi8(upper, _mm256_set1_epi8(sixteenth as i8));
            let look_up = |table, sum| {
                let found = _mm256_shuffle_epi8(broadcast(table, sixteenth), lower);
                _mm256_or_si256(sum, _mm256_and_si256(found, here))
            };
            lengths[half] = look_up(&tables.lengths, lengths[half]);
            codes[half] = look_up(&tables.codes, codes[half]);
        }
        missing = _mm256_or_si256(missing, _mm256_cmpeq_epi8(lengths[half], _mm256_setzero_si256()));
        sum = _mm256_add_epi64(sum, _mm256_sad_epu8(lengths[half], _mm256_setzero_si256()));
    }
    if _mm256_movemask_epi8(missing) != 0 {
        return 0;
    }
    let sum = _mm_add_epi64(_mm256_castsi256_si128(sum), _mm256_extracti128_si256::<1>(sum));
    let bits = (_mm_cvtsi128_si64(sum) + _mm_extract_epi64::<1>(sum)) as u32;
    if bits > ROW_BITS_MAX {
        return 0;
    }
    let Some(writer) = writer else { return bits };
    let (mut values, mut counts) = ([0u64; 8], [0u64; 8]);
    for half in 0..2 {
        // As in `row_avx512`. There is no shift of 16-bit elements by vectors: multiply by powers of two, at most 2^7.
        let even = _mm256_set1_epi16(0xff);
        let first = _mm256_and_si256(lengths[half], even);
        // Upper bytes have index 0x80, so that they become 0.
        let index = _mm256_or_si256(first, _mm256_set1_epi16(0x8000u16 as i16));
        let powers = _mm256_broadcastsi128_si256(_mm_setr_epi8(1, 2, 4, 8, 16, 32, 64, -128, 0, 0, 0, 0, 0, 0, 0, 0));
        let power = _mm256_shuffle_epi8(powers, index);
        let second = _mm256_mullo_epi16(_mm256_srli_epi16::<8>(codes[half]), power);
        let code = _mm256_or_si256(_mm256_and_si256(codes[half], even), second);
        let length = _mm256_add_epi16(first, _mm256_srli_epi16::<8>(lengths[half]));
        let even = _mm256_set1_epi32(0xffff);
        let first = _mm256_and_si256(length, even);
        let second = _mm256_sllv_epi32(_mm256_srli_epi32::<16>(code), first);
        let code = _mm256_or_si256(_mm256_and_si256(code, even), second);
        let length = _mm256_add_epi32(first, _mm256_srli_epi32::<16>(length));
        let even = _mm256_set1_epi64x(0xffff_ffff);
        let first = _mm256_and_si256(length, even);
        let second = _mm256_sllv_epi64(_mm256_srli_epi64::<32>(code), first);
        let code = _mm256_or_si256(_mm256_and_si256(code, even), second);
        let length = _mm256_add_epi64(first, _mm256_srli_epi64::<32>(length));
        // SAFETY: four of the eight values of both arrays; the stores need no alignment.
        unsafe {
            _mm256_storeu_si256(values.as_mut_ptr().add(4 * half).cast(), code);
            _mm256_storeu_si256(counts.as_mut_ptr().add(4 * half).cast(), length);
        }
    }
    writer.append_all(&values, &counts);
    bits
}

/// The bits of one tile, LSB-first.
struct TileWriter {
    bytes: Box<[u8; Self::BYTES]>,
    /// Bits that do not fill a byte yet; `filled` is their number.
    partial: u64,
    filled: u32,
    at: usize,
}

impl TileWriter {
    /// Maximum bits of a single append: a store has 64 bits, of which up to 7 are already in use.
    const APPEND_MAX: u32 = 56;
    /// The longest tile and the overhang of the last store.
    const BYTES: usize = (TILE * ROW_BITS_MAX as usize).div_ceil(8) + 8;

    fn new() -> Self {
        Self { bytes: Box::new([0; Self::BYTES]), partial: 0, filled: 0, at: 0 }
    }

    fn reset(&mut self) {
        (self.partial, self.filled, self.at) = (0, 0, 0);
    }

    /// Appends the lowest `length` bits of `value`, whose other bits are 0. A tile has at most 64 * 319 bits.
    #[inline(always)]
    fn append(&mut self, value: u64, length: u32) {
        debug_assert!(length <= Self::APPEND_MAX && (length == 64 || value >> length == 0));
        self.partial |= value << self.filled;
        self.bytes[self.at..self.at + 8].copy_from_slice(&self.partial.to_le_bytes());
        let filled = self.filled + length;
        self.at += (filled / 8) as usize;
        self.partial >>= filled / 8 * 8;
        self.filled = filled % 8;
    }

    /// Appends eight values of at most 64 bits.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn append_all(&mut self, values: &[u64; 8], counts: &[u64; 8]) {
        for i in (0..8).step_by(2) {
            let (a, b) = (counts[i] as u32, counts[i + 1] as u32);
            if a + b <= Self::APPEND_MAX {
                self.append(values[i] | values[i + 1] << a, a + b);
            } else {
                for (value, length) in [(values[i], a), (values[i + 1], b)] {
                    let low = length.min(32);
                    self.append(value & 0xffff_ffff, low);
                    if length > 32 {
                        self.append(value >> 32, length - 32);
                    }
                }
            }
        }
    }

    /// Returns the bits so far, filled with zeros to a word.
    fn words(&mut self) -> &[u8] {
        // The last store may end inside the last word, which then still has bits of an earlier tile.
        self.bytes[self.at..self.at + 8].copy_from_slice(&self.partial.to_le_bytes());
        let bits = self.at * 8 + self.filled as usize;
        &self.bytes[..bits.div_ceil(32) * 4]
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use crate::{CodeLimit, Histogram, testing::Random};

    /// Encodes a row: sign and mantissa, exponents, writer.
    type Row<'a> = &'a dyn Fn(&mut [u8; TILE], &mut [u8; TILE], Option<&mut TileWriter>) -> u32;

    /// The bits, outputs and words of a row that each vector function of this processor makes are those of
    /// [`row_portable`], for rows with and without exponents that have no code.
    #[test]
    fn vectors_and_portable_rows_agree() {
        let mut random = Random::new(5);
        let (mut coded, mut verbatim) = (0, 0);
        for base in [0, 9, 100, 118, 239] {
            // Frequent and rare exponents, in two or three sixteenths.
            let mut row = |rare: bool| {
                let elements: [u16; TILE] = std::array::from_fn(|_| {
                    let bits = random.bits();
                    let common = (bits >> 32 & 0xfff | 1 << 12).trailing_zeros() as u16;
                    let exponent = base + if rare && bits >> 60 == 0 { 13 + (bits >> 50) as u16 % 32 } else { common };
                    bits as u16 & 0x807f | exponent.min(255) << 7
                });
                <[u8; TILE * 2]>::try_from(elements.map(u16::to_le_bytes).as_flattened()).unwrap()
            };
            let rows: Vec<_> = (0..400).map(|i| row(i % 20 == 0)).collect();
            for limit in [6, 7] {
                let limit = CodeLimit::new(limit).unwrap();
                let code = Code::from_histogram(&Histogram::of(rows.as_flattened()), limit).unwrap();
                let tables = Tables::new(&code);
                for source in &rows {
                    let run = |row: Row<'_>| {
                        let (mut split, mut exponents, mut writer) = ([0; TILE], [0; TILE], TileWriter::new());
                        let bits = row(&mut split, &mut exponents, Some(&mut writer));
                        assert_eq!(row(&mut split, &mut exponents, None), bits);
                        (bits, split, exponents, writer.words().to_vec())
                    };
                    let expected =
                        run(&|split, exponents, writer| row_portable(source, split, exponents, &tables, writer));
                    if expected.0 > 0 {
                        coded += 1
                    } else {
                        verbatim += 1
                    }
                    if tables.vectors != Vectors::None {
                        // SAFETY: every processor with AVX-512 has AVX2 and BMI2, too; codes have at most 7 bits.
                        assert!(run(&|s, e, writer| unsafe { row_avx2(source, s, e, &tables, writer) }) == expected);
                    }
                    if tables.vectors == Vectors::Avx512 {
                        // SAFETY: the processor has the instructions; codes have at most 7 bits.
                        assert!(run(&|s, e, writer| unsafe { row_avx512(source, s, e, &tables, writer) }) == expected);
                    }
                }
            }
        }
        assert!(coded > 1000 && verbatim > 10, "{coded} {verbatim}");
    }
}
