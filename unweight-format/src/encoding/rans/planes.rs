//! The encoding `planes`: rANS of the bytes of elements, with a table for each byte of an element (`docs/format.md`
//! A.14). It codes elements whose upper bytes are mostly 0, such as differences from a base.
//!
//! ```text
//! elements of w bytes --> bytes, little-endian: byte i has table i mod w --> plane_streams, chunks of 2^19 bytes
//! ```

use super::{
    BLOCK, CHUNK, MISSING_WORDS, UNEQUAL_END, choose, chunk_head, chunk_starts,
    coder::{self, DecodeTables, EncodeTables, STATE_MIN},
    model::{self, Contexts, Model, SYMBOLS_MAX, Symbols},
    numbers::{NumberReader, NumberWriter},
    streams::Streams,
};
use crate::{
    CodeLimit, CodecError, Float, FloatMatrix, TileGrid,
    encoding::{Encoding, EncodingId, Extent, NotEncodable, Sample, Section, Sections, Survey},
    layout::SECTION_ALIGN,
    parallel,
    safetensors::Dtype,
};

/// The encoding of bytes by rANS.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Planes;

impl EncodingId {
    /// Bytes of elements, coded by rANS.
    pub const PLANES: Self = Self::new("planes");
}

impl Section {
    /// u8 `[bytes]`: the bytes of an element, and the frequencies of each.
    pub const PLANE_TABLES: Self = Self::new("plane_tables", Dtype::U8, &[Extent::Open]).padded_to(SECTION_ALIGN);
    /// u32 `[words]`: chunks as in [`Section::RANS_STREAMS`].
    pub const PLANE_STREAMS: Self = Self::new("plane_streams", Dtype::U32, &[Extent::Open]).padded_to(SECTION_ALIGN);
}

/// Bytes of `plane_tables` before the numbers.
const FIXED_BYTES: usize = 16;

impl Encoding for Planes {
    fn id(&self) -> EncodingId {
        EncodingId::PLANES
    }

    fn sections(&self) -> &'static [Section] {
        &[Section::PLANE_TABLES, Section::PLANE_STREAMS]
    }

    fn floats(&self) -> &'static [Float] {
        &Float::ALL
    }

    fn fits(&self, _: TileGrid) -> Result<(), NotEncodable> {
        Ok(())
    }

    /// Predicts the uncompressed size: a sample has no counts of bytes.
    fn predict(&self, grid: TileGrid, sample: &Sample) -> Result<u64, NotEncodable> {
        Ok((grid.elements() * sample.float().bytes()) as u64)
    }

    fn check(&self, grid: TileGrid, sections: &Sections<'_>) -> Result<(), CodecError> {
        Stored::new(grid, sections).map(|_| ())
    }

    fn encode(&self, matrix: FloatMatrix<'_>, _: &Survey, _: CodeLimit) -> Result<Vec<Vec<u8>>, NotEncodable> {
        Ok(encode(matrix.float().bytes(), matrix.bytes()))
    }

    fn decode(&self, grid: TileGrid, sections: &Sections<'_>, out: &mut [u8]) -> Result<(), CodecError> {
        Stored::new(grid, sections)?.decode(out)
    }
}

/// The sections of elements of `width` bytes.
fn encode(width: usize, bytes: &[u8]) -> Vec<Vec<u8>> {
    let chunks: Vec<&[u8]> = bytes.chunks(CHUNK).collect();
    let counts =
        parallel::count(chunks.len(), width * SYMBOLS_MAX, &|chunk, counts| count(width, chunks[chunk], counts));
    let counts = counts.as_chunks::<SYMBOLS_MAX>().0;
    let frequencies: Vec<Vec<u16>> = counts.iter().map(|counts| choose::frequencies(counts)).collect();
    let mut section = vec![width as u8];
    section.resize(FIXED_BYTES, 0);
    let mut numbers = NumberWriter::default();
    frequencies.iter().for_each(|table| model::put_table(&mut numbers, table));
    section.extend(numbers.finish());
    section.resize(section.len().next_multiple_of(SECTION_ALIGN), 0);
    let (tables, ids) = (EncodeTables::new(&model_of(frequencies)), ids(width));
    let streams = Streams::of_symbols(bytes.len(), bytes.len());
    parallel::run(chunks.len(), &|number| {
        let chunk = chunks[number];
        streams.add(number, chunk.len(), |states, words, at| {
            let mut codes = [0; BLOCK];
            for block in chunk.chunks(BLOCK).rev() {
                codes.iter_mut().zip(block).for_each(|(code, &byte)| *code = byte.into());
                coder::encode(&tables, states, (words, at), &ids[..block.len()], &codes[..block.len()]);
            }
        });
    });
    vec![section, streams.finish()]
}

/// Counts the bytes at each position of an element.
fn count(width: usize, bytes: &[u8], counts: &mut [u64]) {
    let counts = counts.as_chunks_mut::<SYMBOLS_MAX>().0;
    for element in bytes.chunks_exact(width) {
        element.iter().zip(&mut *counts).for_each(|(&byte, counts)| counts[usize::from(byte)] += 1);
    }
}

/// The model of these frequencies: 256 symbols, none of which stands for several.
fn model_of(frequencies: Vec<Vec<u16>>) -> Model {
    let contexts = Contexts { starts: (1 << frequencies.len()) - 1, rows: None, cols: None };
    Model { symbols: Symbols { first: 0, below: 0, head: 16, above: 0 }, contexts, tables: frequencies }
}

/// The tables of the bytes of a block.
fn ids(width: usize) -> [u8; BLOCK] {
    std::array::from_fn(|i| (i % width) as u8)
}

/// Checked sections.
struct Stored<'a> {
    width: usize,
    /// Bytes of the elements.
    bytes: usize,
    tables: DecodeTables,
    streams: &'a [u8],
    /// First byte of each chunk in `streams`.
    starts: Vec<usize>,
}

impl<'a> Stored<'a> {
    fn new(grid: TileGrid, sections: &Sections<'a>) -> Result<Self, CodecError> {
        let (model, streams) = (sections.get(Section::PLANE_TABLES), sections.get(Section::PLANE_STREAMS));
        let invalid = |reason| CodecError::Code { section: Section::PLANE_TABLES.name(), reason };
        let Some((&[width @ (1 | 2 | 4), ref zeros @ ..], rest)) = model.split_first_chunk::<FIXED_BYTES>() else {
            return Err(invalid("elements must have 1, 2 or 4 bytes"));
        };
        if zeros.iter().any(|&byte| byte != 0) {
            return Err(invalid("zeros must follow its first byte"));
        }
        let mut numbers = NumberReader::new(rest);
        let frequencies = (0..width)
            .map(|_| model::table(&mut numbers, SYMBOLS_MAX))
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| match error {
                CodecError::Code { reason, .. } => invalid(reason),
                other => other,
            })?;
        if !numbers.rest_is_zero() || numbers.used_bytes().next_multiple_of(SECTION_ALIGN) != rest.len() {
            return Err(invalid("after the numbers, only zeros up to a multiple of 16 bytes may follow"));
        }
        let width = usize::from(width);
        let bytes = grid.elements() * width;
        let starts = chunk_starts(bytes, streams).map_err(of_streams)?;
        Ok(Self { width, bytes, tables: DecodeTables::new(&model_of(frequencies)), streams, starts })
    }

    fn decode(&self, out: &mut [u8]) -> Result<(), CodecError> {
        if out.len() != self.bytes {
            return Err(CodecError::TensorBytes { expected: self.bytes as u64, got: out.len() });
        }
        let ids = ids(self.width);
        parallel::try_for_each_chunk(out, CHUNK, |chunk, out| {
            let (count, mut states, rest) = chunk_head(&self.streams[self.starts[chunk]..]).expect("it was checked");
            let (words, mut at, mut codes) = (&rest[..2 * count], 0, [0; BLOCK]);
            for block in out.chunks_mut(BLOCK) {
                let codes = &mut codes[..block.len()];
                if !coder::decode(&self.tables, &mut states, (words, &mut at), &ids[..block.len()], codes) {
                    return Err(streams_error(MISSING_WORDS));
                }
                block.iter_mut().zip(codes).for_each(|(byte, code)| *byte = *code as u8);
            }
            let ended = at == words.len() && states.iter().all(|&state| state == STATE_MIN);
            if ended { Ok(()) } else { Err(streams_error(UNEQUAL_END)) }
        })
    }
}

fn streams_error(reason: &'static str) -> CodecError {
    CodecError::Code { section: Section::PLANE_STREAMS.name(), reason }
}

/// The same error, of this encoding's section.
fn of_streams(error: CodecError) -> CodecError {
    match error {
        CodecError::Code { reason, .. } => streams_error(reason),
        other => other,
    }
}
