//! Raw: the tensor's bytes (`docs/format.md` A.8), for tensors that no other encoding supports or shrinks.

use super::{Encoding, EncodingId, Extent, NotEncodable, Sample, Section, Sections, Survey};
use crate::{CodeLimit, CodecError, Float, FloatMatrix, TileGrid, parallel, safetensors::Dtype};

/// The raw encoding.
#[derive(Debug, Clone, Copy)]
pub struct Raw;

impl EncodingId {
    /// The original bytes.
    pub const RAW: Self = Self::new("raw");
}

impl Section {
    /// BF16 `[n, k]`: a raw tensor, which a shard stores under its own name.
    pub const RAW: Self = Self::new("", Dtype::Bf16, &[Extent::Rows, Extent::Cols]);
}

impl Raw {
    /// The sections in stored order.
    const SECTIONS: &'static [Section] = &[Section::RAW];
}

impl Encoding for Raw {
    fn id(&self) -> EncodingId {
        EncodingId::RAW
    }

    fn sections(&self) -> &'static [Section] {
        Self::SECTIONS
    }

    fn floats(&self) -> &'static [Float] {
        &Float::ALL
    }

    fn fits(&self, _: TileGrid) -> Result<(), NotEncodable> {
        Ok(())
    }

    fn predict(&self, grid: TileGrid, sample: &Sample) -> Result<u64, NotEncodable> {
        Ok((grid.elements() * sample.float().bytes()) as u64)
    }

    fn check(&self, _: TileGrid, _: &Sections<'_>) -> Result<(), CodecError> {
        Ok(())
    }

    fn encode(&self, matrix: FloatMatrix<'_>, _: &Survey, _: CodeLimit) -> Result<Vec<Vec<u8>>, NotEncodable> {
        Ok(vec![matrix.bytes().to_vec()])
    }

    fn decode(&self, _: TileGrid, sections: &Sections<'_>, out: &mut [u8]) -> Result<(), CodecError> {
        copy(sections.get(Section::RAW), out)
    }
}

/// Copies bytes in parallel.
pub(crate) fn copy(from: &[u8], out: &mut [u8]) -> Result<(), CodecError> {
    const PIECE: usize = 1 << 20;
    if from.len() != out.len() {
        return Err(CodecError::TensorBytes { expected: from.len() as u64, got: out.len() });
    }
    parallel::for_each_chunk(out, PIECE, &|piece, to| to.copy_from_slice(&from[piece * PIECE..][..to.len()]));
    Ok(())
}
