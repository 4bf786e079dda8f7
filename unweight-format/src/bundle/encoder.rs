//! Who codes the tensors of a bundle.

use std::error::Error;

use super::Encoding;
use crate::{Code, CodeLimit, CodecError, CompressedTensor, Digest, Matrix, encode};

/// Turns matrices into their coded forms. All encoders give the same bytes, so a bundle does not tell which one made it.
pub trait Encoder: Sync {
    /// The digest of the matrix' bytes and the form asked for. Called from several threads at once.
    ///
    /// # Errors
    /// The tensor is too large for the coded form (it is then stored raw), or the encoder failed.
    fn encode(
        &self,
        matrix: Matrix<'_>,
        encoding: Encoding,
        limit: CodeLimit,
    ) -> Result<(Digest, CompressedTensor<Vec<u8>>), EncoderError>;
}

/// Why there is no coded form.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EncoderError {
    /// More words than a tile's start can name.
    #[error("the tensor is too large for the coded form")]
    TooLarge,
    /// The encoder itself failed.
    #[error(transparent)]
    Failed(Box<dyn Error + Send + Sync>),
}

impl From<CodecError> for EncoderError {
    fn from(error: CodecError) -> Self {
        match error {
            CodecError::TooManyWords { .. } => Self::TooLarge,
            other => Self::Failed(Box::new(other)),
        }
    }
}

/// The encoder of this crate, on the current rayon pool.
#[derive(Debug, Clone, Copy, Default)]
pub struct CpuEncoder;

impl Encoder for CpuEncoder {
    fn encode(
        &self,
        matrix: Matrix<'_>,
        encoding: Encoding,
        limit: CodeLimit,
    ) -> Result<(Digest, CompressedTensor<Vec<u8>>), EncoderError> {
        let survey = encode::survey(matrix.bytes());
        let code = Code::from_histogram(&survey.histogram, limit).expect("a matrix has elements");
        let tensor = match encoding {
            Encoding::Raw => CompressedTensor::Raw(matrix.bytes().to_vec()),
            Encoding::Huffman => CompressedTensor::Huffman(encode::huffman_with(matrix, &code)?),
            Encoding::Palette => CompressedTensor::Palette(encode::palette_with(matrix, &code)?),
        };
        Ok((survey.digest, tensor))
    }
}
