//! Encoders of the tensors of a bundle: the CPU encoder, or another that produces the same bytes.

use std::error::Error;

use crate::{
    CodeLimit, CodecError, Digest, EncodingId, FloatMatrix, StoredTensor, Survey,
    bundle::{EncoderBuffer, SectionBytes, StageTime},
    encoding::NotEncodable,
    packed::Unpackable,
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

    /// The encoder's own memory, if it reads tensors from there faster than from other memory.
    #[doc(hidden)]
    fn memory(&self) -> Option<&dyn EncoderMemory> {
        None
    }
}

/// An encoder that reads tensors from memory of its own and leaves their sections there, such as pinned memory for the
/// copy engine of a GPU. Where none is free, tensors and sections are in other memory.
#[doc(hidden)]
pub trait EncoderMemory: Sync {
    /// Bounds the memory of the next run, which encodes `tensor_bytes` bytes and may hold `ram_bytes` bytes in all.
    /// Returns the bytes of them that this memory takes up at most.
    fn reserve(&self, ram_bytes: u64, tensor_bytes: u64) -> u64;

    /// Returns a buffer of `bytes` bytes with any contents; `None` if none is free. Never waits.
    fn buffer(&self, bytes: usize) -> Option<EncoderBuffer>;

    /// Like [`Encoder::encode`]; the matrix may be in such a buffer.
    ///
    /// # Errors
    /// As for [`Encoder::encode`].
    fn encode_here(
        &self,
        matrix: FloatMatrix<'_>,
        encoding: EncodingId,
        limit: CodeLimit,
    ) -> Result<(Digest, StoredTensor<SectionBytes>), EncoderError>;
}

impl dyn Encoder + '_ {
    /// Encodes in the encoder's own memory, if it has some.
    pub(crate) fn encode_anywhere(
        &self,
        matrix: FloatMatrix<'_>,
        encoding: EncodingId,
        limit: CodeLimit,
    ) -> Result<(Digest, StoredTensor<SectionBytes>), EncoderError> {
        match self.memory() {
            Some(memory) => memory.encode_here(matrix, encoding, limit),
            None => self.encode(matrix, encoding, limit).map(|(digest, tensor)| (digest, tensor.into())),
        }
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
        let survey = Survey::of(matrix.float(), matrix.bytes());
        Ok((survey.digest, StoredTensor::encode(encoding, matrix, &survey, limit)?))
    }
}
