//! The rANS encoding: exponents and upper mantissa bits are entropy-coded with an asymmetric numeral system, by tables
//! that depend on row and column (`docs/format.md` A.13). It is the smallest encoding; only CPUs decode it.
//!
//! ```text
//! magnitude (exponent, four mantissa bits) -> symbol and up to four bits -> rans_streams, 32 states per chunk
//! sign, lower three mantissa bits          -> a nibble                   -> sign_mantissa_low
//! classes of rows and columns              -> context -> table           -> rans_model
//! ```

mod choose;
mod coder;
mod model;
mod numbers;
pub(crate) mod planes;
mod streams;

use std::borrow::Cow;

pub(crate) use self::model::{Model, Symbols};
use self::{
    coder::{DecodeTables, EncodeTables, STATE_MIN, STATES},
    model::TableIds,
    streams::Streams,
};
use super::{
    Encoding, EncodingId, Extent, NotEncodable, Sample, Section, Sections, StoredTensor, Survey,
    tiles::{check_out, debug_sizes},
};
use crate::{
    CodeLimit, CodecError, FloatMatrix, Histogram, Matrix, TileGrid, bits::zeroed, layout::SECTION_ALIGN, parallel,
    safetensors::Dtype,
};

/// The rANS encoding.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rans;

impl EncodingId {
    /// Exponents and upper mantissa bits, coded by rANS.
    pub const RANS: Self = Self::new("rans");
}

impl Section {
    /// u8 `[bytes]`: symbols, classes and frequencies.
    pub const RANS_MODEL: Self = Self::new("rans_model", Dtype::U8, &[Extent::Open]).padded_to(SECTION_ALIGN);
    /// u32 `[words]`: the chunks, each with its size, its states and its words of 16 bits.
    pub const RANS_STREAMS: Self = Self::new("rans_streams", Dtype::U32, &[Extent::Open]).padded_to(SECTION_ALIGN);
    /// u8 `[bytes]`: sign and lower three mantissa bits, two elements per byte.
    pub const SIGN_MANTISSA_LOW: Self =
        Self::new("sign_mantissa_low", Dtype::U8, &[Extent::Open]).padded_to(SECTION_ALIGN);
}

impl Rans {
    /// The sections in stored order.
    const SECTIONS: &'static [Section] = &[Section::RANS_MODEL, Section::RANS_STREAMS, Section::SIGN_MANTISSA_LOW];
}

/// Elements of a chunk, consecutive in the matrix. Chunks are decoded independently.
pub(crate) const CHUNK: usize = 1 << 19;
/// Elements that are split and coded at once, so that their codes stay in the L1 cache.
const BLOCK: usize = 4096;
/// Bytes of a chunk ahead of its words: their number, and the states.
const CHUNK_HEAD: usize = 4 + 4 * STATES;

impl Encoding for Rans {
    fn id(&self) -> EncodingId {
        EncodingId::RANS
    }

    fn sections(&self) -> &'static [Section] {
        Self::SECTIONS
    }

    fn fits(&self, _: TileGrid) -> Result<(), NotEncodable> {
        Ok(())
    }

    /// Predicts a single table: that tables differ by row and column, a sample does not show.
    fn predict(&self, grid: TileGrid, sample: &Sample) -> Result<u64, NotEncodable> {
        let magnitudes = sample.magnitudes();
        let sampled = u128::from(magnitudes.iter().sum::<u64>().max(1));
        let bits = choose::predict_bits(sample.histogram(), magnitudes);
        let symbols = (u128::from(bits) * grid.elements() as u128 / sampled / 8) as u64;
        let heads = grid.elements().div_ceil(CHUNK) * CHUNK_HEAD;
        Ok(symbols + (heads + nibble_bytes(grid) + 64) as u64)
    }

    fn check(&self, grid: TileGrid, sections: &Sections<'_>) -> Result<(), CodecError> {
        RansTensor::from_sections(grid, |section| sections.get(section)).map(|_| ())
    }

    fn encode(&self, matrix: FloatMatrix<'_>, survey: &Survey, _: CodeLimit) -> Result<Vec<Vec<u8>>, NotEncodable> {
        Ok(encode(matrix.bf16()?, &survey.histogram).into_sections())
    }

    fn decode(&self, grid: TileGrid, sections: &Sections<'_>, out: &mut [u8]) -> Result<(), CodecError> {
        decode_into(&RansTensor::from_sections(grid, |section| sections.get(section))?, out)
    }
}

/// Bytes of `sign_mantissa_low`.
fn nibble_bytes(grid: TileGrid) -> usize {
    grid.elements().div_ceil(2).next_multiple_of(SECTION_ALIGN)
}

/// Encodes a matrix whose exponents have this histogram, on the current rayon pool.
pub fn encode(matrix: Matrix<'_>, histogram: &Histogram) -> RansTensor<Vec<u8>> {
    encode_with(matrix, choose::choose(matrix, histogram))
}

/// Encodes a matrix with a model that has a frequency for each of its symbols.
///
/// # Panics
/// A symbol of the matrix has no frequency.
fn encode_with(matrix: Matrix<'_>, model: Model) -> RansTensor<Vec<u8>> {
    let grid = matrix.grid();
    let (tables, ids) = (EncodeTables::new(&model), TableIds::new(&model.contexts, grid.cols()));
    let mut nibbles = zeroed(nibble_bytes(grid));
    let streams = Streams::of_symbols(grid.elements(), matrix.bytes().len());
    let chunks = matrix.bytes().chunks(2 * CHUNK).zip(nibbles.chunks_mut(CHUNK / 2)).enumerate();
    parallel::for_each(chunks, |(chunk, (elements, nibbles))| {
        streams.add(chunk, elements.len() / 2, |states, words, at| {
            let with = (&tables, &ids, model.symbols);
            encode_chunk(with, (chunk * CHUNK, elements, nibbles), states, (words, at));
        });
    });
    let streams = streams.finish();
    let starts = chunk_starts(grid.elements(), &streams).expect("the encoder's own chunks");
    RansTensor { grid, model, streams, nibbles, starts }
}

/// Encodes the elements of a chunk, of which `first` is the index of the first: words in front of `at`, and nibbles.
fn encode_chunk(
    (tables, ids, symbols): (&EncodeTables, &TableIds<'_>, Symbols),
    (first, elements, nibbles): (usize, &[u8], &mut [u8]),
    states: &mut [u32; STATES],
    (words, at): (&mut [u8], &mut usize),
) {
    let (mut of, mut codes) = ([0; BLOCK], [0; BLOCK]);
    let (chunk, blocks) = (elements, elements.chunks(2 * BLOCK).zip(nibbles.chunks_mut(BLOCK / 2)).enumerate());
    for (block, (elements, nibbles)) in blocks.rev() {
        let len = elements.len() / 2;
        coder::split(symbols, elements, &mut codes[..len], nibbles);
        // The processor does not foresee that the earlier block is the next.
        coder::prefetch(&chunk[2 * BLOCK * block.saturating_sub(1)..2 * BLOCK * block]);
        if !ids.is_single() {
            ids.fill(first + block * BLOCK, &mut of[..len]);
        }
        coder::encode(tables, states, (words, at), &of[..len], &codes[..len]);
    }
}

/// Decodes to little-endian BF16 bytes, on the current rayon pool.
///
/// # Errors
/// The words of a chunk are not those of any elements.
pub fn decode<B: AsRef<[u8]> + Sync>(tensor: &RansTensor<B>) -> Result<Vec<u8>, CodecError> {
    let mut out = zeroed(tensor.grid.elements() * 2);
    decode_into(tensor, &mut out)?;
    Ok(out)
}

/// Decodes into `out` on the current rayon pool.
///
/// # Errors
/// `out` is not `n * k * 2` bytes long, or the words of a chunk are not those of any elements.
fn decode_into<B: AsRef<[u8]> + Sync>(tensor: &RansTensor<B>, out: &mut [u8]) -> Result<(), CodecError> {
    check_out(tensor.grid, out)?;
    let (tables, ids) = (DecodeTables::new(&tensor.model), TableIds::new(&tensor.model.contexts, tensor.grid.cols()));
    parallel::try_for_each_chunk(out, 2 * CHUNK, |chunk, out| {
        let nibbles = &tensor.nibbles.as_ref()[chunk * (CHUNK / 2)..];
        let (mut states, words) = tensor.chunk(chunk);
        let (mut of, mut codes, mut at) = ([0; BLOCK], [0; BLOCK], 0);
        for (block, (out, nibbles)) in out.chunks_mut(2 * BLOCK).zip(nibbles.chunks(BLOCK / 2)).enumerate() {
            let (of, codes) = (&mut of[..out.len() / 2], &mut codes[..out.len() / 2]);
            if !ids.is_single() {
                ids.fill(chunk * CHUNK + block * BLOCK, of);
            }
            if !coder::decode(&tables, &mut states, (words, &mut at), of, codes) {
                return Err(streams_error(MISSING_WORDS));
            }
            coder::join(tensor.model.symbols, codes, nibbles, out);
        }
        if at == words.len() && states == [STATE_MIN; STATES] { Ok(()) } else { Err(streams_error(UNEQUAL_END)) }
    })
}

/// Message for a chunk with too few words.
pub(crate) const MISSING_WORDS: &str = "the words of a chunk end before its elements";
/// Message for a chunk with too many words, or wrong ones.
pub(crate) const UNEQUAL_END: &str = "after a chunk's elements, words are left or a state is not 65536";

fn streams_error(reason: &'static str) -> CodecError {
    CodecError::Code { section: Section::RANS_STREAMS.name(), reason }
}

/// A tensor in this encoding. `B` owns (`Vec<u8>`) or borrows (`&[u8]`) the section bytes.
///
/// Construction validates the sections (`docs/format.md` A.13), so every offset in them can be trusted.
#[derive(Clone, PartialEq, Eq)]
pub struct RansTensor<B> {
    grid: TileGrid,
    model: Model,
    streams: B,
    nibbles: B,
    /// First byte of each chunk in `streams`.
    starts: Vec<usize>,
}

impl<B: AsRef<[u8]>> RansTensor<B> {
    /// Reads and validates stored sections.
    ///
    /// # Errors
    /// A section has the wrong size, or does not satisfy an invariant that a reader must check.
    pub fn from_sections(grid: TileGrid, mut section: impl FnMut(Section) -> B) -> Result<Self, CodecError> {
        let model = Model::from_bytes(grid, section(Section::RANS_MODEL).as_ref())?;
        let (streams, nibbles) = (section(Section::RANS_STREAMS), section(Section::SIGN_MANTISSA_LOW));
        let (expected, got) = (nibble_bytes(grid), nibbles.as_ref().len());
        let name = Section::SIGN_MANTISSA_LOW.name();
        if expected != got {
            return Err(CodecError::SectionBytes { section: name, expected: expected as u64, got: got as u64 });
        }
        let used = grid.elements() / 2;
        let half = grid.elements() % 2;
        if nibbles.as_ref()[used..].iter().enumerate().any(|(i, &byte)| byte >> if i < half { 4 } else { 0 } != 0) {
            return Err(CodecError::Code { section: name, reason: "its padding must be 0" });
        }
        let starts = chunk_starts(grid.elements(), streams.as_ref())?;
        Ok(Self { grid, model, streams, nibbles, starts })
    }

    /// The matrix's shape.
    pub fn grid(&self) -> TileGrid {
        self.grid
    }

    /// The section `rans_model`.
    pub(crate) fn model(&self) -> &Model {
        &self.model
    }

    /// The section `sign_mantissa_low`.
    pub(crate) fn sign_mantissa_low(&self) -> &[u8] {
        self.nibbles.as_ref()
    }

    /// The states of a chunk before its first element, and its words.
    pub(crate) fn chunk(&self, chunk: usize) -> ([u32; STATES], &[u8]) {
        let (count, states, rest) = chunk_head(&self.streams.as_ref()[self.starts[chunk]..]).expect("it was checked");
        (states, &rest[..2 * count])
    }

    /// The bytes of one section.
    pub fn section(&self, section: Section) -> Option<Cow<'_, [u8]>> {
        match section {
            Section::RANS_MODEL => Some(Cow::Owned(self.model.to_bytes())),
            Section::RANS_STREAMS => Some(Cow::Borrowed(self.streams.as_ref())),
            Section::SIGN_MANTISSA_LOW => Some(Cow::Borrowed(self.nibbles.as_ref())),
            _ => None,
        }
    }

    /// The typed view of a stored tensor; `None` if it has another encoding. To keep the tensor, pass
    /// [`StoredTensor::borrowed`].
    pub fn of(tensor: StoredTensor<B>) -> Option<Self> {
        let (grid, section) = tensor.take(EncodingId::RANS)?;
        Some(Self::from_sections(grid, section).expect("a stored tensor was checked"))
    }
}

/// The number of words of the chunk that begins here, its states, and the bytes after them.
fn chunk_head(bytes: &[u8]) -> Option<(usize, [u32; STATES], &[u8])> {
    let (numbers, rest) = bytes.as_chunks::<4>().0.split_at_checked(1 + STATES)?;
    let states = std::array::from_fn(|i| u32::from_le_bytes(numbers[1 + i]));
    Some((u32::from_le_bytes(numbers[0]) as usize, states, rest.as_flattened()))
}

/// Checks the chunks of this number of symbols and returns where each begins.
fn chunk_starts(symbols: usize, streams: &[u8]) -> Result<Vec<usize>, CodecError> {
    let mut starts = Vec::new();
    let mut at = 0;
    for first in (0..symbols).step_by(CHUNK) {
        let elements = CHUNK.min(symbols - first);
        let (count, states, rest) = chunk_head(&streams[at..]).ok_or(streams_error("it ends before the last chunk"))?;
        let bytes = (2 * count).next_multiple_of(4);
        if count > elements || bytes > rest.len() {
            return Err(streams_error("a chunk has more words than elements, or than are stored"));
        }
        if states.iter().any(|&state| state < STATE_MIN) {
            return Err(streams_error("a state is below 65536"));
        }
        if rest[2 * count..bytes] != [0; 2][..bytes - 2 * count] {
            return Err(streams_error("its padding must be 0"));
        }
        starts.push(at);
        at += CHUNK_HEAD + bytes;
    }
    if streams.len() - at >= SECTION_ALIGN || streams[at..].iter().any(|&byte| byte != 0) {
        return Err(streams_error("after the last chunk, only zeros up to a multiple of 16 bytes may follow"));
    }
    Ok(starts)
}

impl RansTensor<Vec<u8>> {
    /// The sections in stored order.
    fn into_sections(self) -> Vec<Vec<u8>> {
        vec![self.model.to_bytes(), self.streams, self.nibbles]
    }
}

impl From<RansTensor<Vec<u8>>> for StoredTensor<Vec<u8>> {
    fn from(tensor: RansTensor<Vec<u8>>) -> Self {
        Self::trusted(EncodingId::RANS, tensor.grid, tensor.into_sections())
    }
}

debug_sizes!(RansTensor, Rans::SECTIONS);
