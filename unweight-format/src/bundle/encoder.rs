//! Who codes the tensors of a bundle.

use std::error::Error;

use super::Encoding;
use crate::{
    Code, CodeLimit, CodecError, CompressedTensor, Digest, Matrix, PackedTensor, encode,
    packed::{self, Unpackable},
};

/// Turns matrices into their coded forms. All encoders give the same bytes, so a bundle does not tell which one made it.
pub trait Encoder: Sync {
    /// The digest of the matrix' bytes and the form asked for; the packed form is [`Encoder::pack`]'s. Called from several threads at once.
    ///
    /// # Errors
    /// The tensor is too large for the coded form (it is then stored raw), or the encoder failed.
    fn encode(
        &self,
        matrix: Matrix<'_>,
        encoding: Encoding,
        limit: CodeLimit,
    ) -> Result<(Digest, CompressedTensor<Vec<u8>>), EncoderError>;

    /// The digest of the matrix' bytes and its packed form; on the CPU, unless an encoder does better. Called from several threads at once.
    ///
    /// # Errors
    /// The matrix cannot be packed (another form is then tried), or the encoder failed.
    fn pack(&self, matrix: Matrix<'_>) -> Result<(Digest, PackedTensor<Vec<u8>>), EncoderError> {
        packed::packable_shape(matrix.grid())?;
        let survey = encode::survey(matrix.bytes());
        Ok((survey.digest, packed::pack(matrix, &survey.histogram)?))
    }
}

/// Why there is no coded form.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EncoderError {
    /// More words than a tile's start can name.
    #[error("the tensor is too large for the coded form")]
    TooLarge,
    /// The matrix cannot be packed.
    #[error("the tensor cannot be packed")]
    Unpackable(#[from] Unpackable),
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
        let code = || Code::from_histogram(&survey.histogram, limit).expect("a matrix has elements");
        let tensor = match encoding {
            Encoding::Raw => CompressedTensor::Raw(matrix.bytes().to_vec()),
            Encoding::Huffman => CompressedTensor::Huffman(encode::huffman_with(matrix, &code())?),
            Encoding::Palette => CompressedTensor::Palette(encode::palette_with(matrix, &code())?),
            Encoding::Packed => CompressedTensor::Packed(packed::pack(matrix, &survey.histogram)?),
        };
        Ok((survey.digest, tensor))
    }
}
