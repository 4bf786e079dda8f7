//! Encodes one tensor for a shard.

use crate::{
    Digest, Float, FloatMatrix, StoredTensor,
    bundle::{
        CompressOptions, Encoder, EncoderError, SectionBytes,
        manifest::TensorEntry,
        plan::{EncodingChoice, saves_enough},
    },
    safetensors::{Dtype, TensorInfo},
};

/// How a tensor is stored.
pub(super) enum Stored {
    Raw(Vec<u8>),
    /// A raw tensor that is too large to hold: it is read again when it is written, and compared with its digest.
    Later,
    Coded(StoredTensor<SectionBytes>),
}

impl Stored {
    /// The bytes of a tensor of `bytes` bytes that are stored, except those in memory of the encoder.
    pub(super) fn held_bytes(&self, bytes: u64) -> u64 {
        match self {
            Self::Coded(tensor) => tensor.held().iter().map(SectionBytes::owned_bytes).sum(),
            Self::Raw(_) => bytes,
            Self::Later => 0,
        }
    }
}

/// A tensor on its way to the writer.
pub(super) struct Encoded<'a> {
    pub(super) info: &'a TensorInfo,
    pub(super) entry: TensorEntry,
    pub(super) stored: Stored,
    /// Bytes that are held until the tensor is written, without those in memory of the encoder.
    pub(super) held_bytes: u64,
}

/// Computes the digest of a tensor and encodes it: in the chosen encoding, in a fallback if it does not support the
/// matrix, or raw if it would not shrink.
pub(super) fn encode_tensor(
    bytes: &[u8],
    dtype: Dtype,
    mut choice: EncodingChoice,
    options: &CompressOptions,
    encoder: &dyn Encoder,
) -> Result<(Digest, EncodingChoice, Stored), EncoderError> {
    while let Some((float, grid)) = Float::of(dtype).zip(choice.grid()) {
        let matrix = FloatMatrix::new(float, bytes, grid.rows(), grid.cols())?;
        match encoder.encode_anywhere(matrix, choice.encoding(), options.code_limit) {
            Ok((digest, tensor)) if saves_enough(choice.encoding(), tensor.stored_bytes(), bytes.len() as u64) => {
                return Ok((digest, choice, Stored::Coded(tensor)));
            }
            Ok((digest, _)) => return Ok((digest, choice.not_smaller(), Stored::Raw(bytes.to_vec()))),
            Err(EncoderError::NotEncodable(why)) => choice = choice.unfit(why),
            Err(error) => return Err(error),
        }
    }
    Ok((Digest::of(bytes), choice, Stored::Raw(bytes.to_vec())))
}
