//! Encoders of the tensors of a bundle: the CPU encoder, or another that produces the same bytes.

use std::error::Error;

use crate::{
    CodeLimit, CodecError, Digest, EncodingId, FloatMatrix, StoredTensor, Survey, bundle::StageTime,
    encoding::NotEncodable, packed::Unpackable,
};

/// Encodes matrices. All encoders produce the same bytes, so a bundle does not depend on the encoder.
pub trait Encoder: Sync {
    /// Returns the digest of the matrix's bytes, and the matrix in the requested encoding. Called from several threads
    /// at once.
    ///
    /// # Errors
    /// The matrix cannot have the encoding (its fallback is tried next), or the encoder failed.
    fn encode(
        &self,
        matrix: FloatMatrix<'_>,
        encoding: EncodingId,
        limit: CodeLimit,
    ) -> Result<(Digest, StoredTensor<Vec<u8>>), EncoderError>;

    /// The encoder's own stages so far, as parts of the stage `encode`.
    fn stages(&self) -> Vec<StageTime> {
        Vec::new()
    }
}

/// Why a matrix was not encoded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EncoderError {
    /// The matrix cannot have the encoding.
    #[error("the tensor does not fit the encoding")]
    NotEncodable(#[from] NotEncodable),
    /// The encoder itself failed.
    #[error(transparent)]
    Failed(Box<dyn Error + Send + Sync>),
}

impl From<Unpackable> for EncoderError {
    fn from(why: Unpackable) -> Self {
        Self::NotEncodable(why.into())
    }
}

impl From<CodecError> for EncoderError {
    fn from(error: CodecError) -> Self {
        match error {
            CodecError::TooManyWords { .. } => Self::NotEncodable(error.into()),
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
        matrix: FloatMatrix<'_>,
        encoding: EncodingId,
        limit: CodeLimit,
    ) -> Result<(Digest, StoredTensor<Vec<u8>>), EncoderError> {
        encoding.encoding().fits(matrix.grid())?;
        let survey = Survey::of_float(matrix.float(), matrix.bytes());
        Ok((survey.digest, StoredTensor::encode(encoding, matrix, &survey, limit)?))
    }
}
