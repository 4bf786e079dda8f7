//! A tensor of an open bundle.

use std::{fmt, ops::Range};

use super::{BundleError, TensorPart, TensorReport, manifest::TensorEntry, pipeline::on_threads, shard::Shard};
use crate::{CodecError, EncodingId, StoredTensor, safetensors::Dtype};

/// A tensor of an open [`Bundle`](super::Bundle). Its bytes are read when a method asks for them, and compared with
/// their digests.
///
/// ```no_run
/// use unweight_format::bundle::Bundle;
/// let bundle = Bundle::open("llama-unweight".as_ref())?;
/// let tensor = bundle.tensor("model.layers.0.mlp.up_proj.weight")?;
/// println!("{} {:?} as {}", tensor.dtype(), tensor.shape(), tensor.encoding());
/// let weights = tensor.decode()?;
/// assert_eq!(weights.len() as u64, tensor.original_bytes());
/// # Ok::<(), unweight_format::bundle::BundleError>(())
/// ```
#[derive(Clone, Copy)]
pub struct TensorHandle<'a> {
    shard: &'a Shard,
    index: usize,
}

impl<'a> TensorHandle<'a> {
    pub(crate) fn new(shard: &'a Shard, index: usize) -> Self {
        Self { shard, index }
    }

    /// Name of the file of the source that has the tensor.
    pub fn file(&self) -> &'a str {
        &self.shard.file.name
    }

    /// The entry of the tensor in the manifest.
    pub fn entry(&self) -> &'a TensorEntry {
        &self.shard.file.tensors[self.index]
    }

    /// Name in the source.
    pub fn name(&self) -> &'a str {
        &self.entry().name
    }

    /// Element type in the source.
    pub fn dtype(&self) -> Dtype {
        self.entry().dtype
    }

    /// Shape in the source.
    pub fn shape(&self) -> &'a [usize] {
        &self.entry().shape
    }

    /// The encoding of the tensor.
    pub fn encoding(&self) -> EncodingId {
        self.entry().encoding
    }

    /// The row of `inspect` for this tensor, with sizes.
    pub fn report(&self) -> TensorReport {
        TensorReport::of(self.file(), self.entry())
    }

    /// Bytes of the original, which [`TensorHandle::decode_into`] fills.
    pub fn original_bytes(&self) -> u64 {
        self.shard.original_bytes(self.index)
    }

    /// The tensor as it is stored: every section has its digest, and its offsets may be trusted (invariants 1-3 of
    /// `docs/format.md` A.6).
    ///
    /// # Errors
    /// It cannot be read, or its sections are damaged.
    pub fn stored(&self) -> Result<StoredTensor<Vec<u8>>, BundleError> {
        on_threads(None, || self.shard.tensor(self.index))
    }

    /// The original little-endian bytes, compared with their digest.
    ///
    /// # Errors
    /// As [`TensorHandle::stored`], or the weights are damaged.
    pub fn decode(&self) -> Result<Vec<u8>, BundleError> {
        let mut out = self.shard.buffer(self.original_bytes())?;
        self.decode_into(&mut out)?;
        Ok(out)
    }

    /// Decodes into `out`, which has [`TensorHandle::original_bytes`] bytes. After an error its contents are
    /// unspecified.
    ///
    /// # Errors
    /// As [`TensorHandle::decode`], or `out` has another size.
    pub fn decode_into(&self, out: &mut [u8]) -> Result<(), BundleError> {
        let (expected, got) = (self.original_bytes(), out.len());
        if expected != got as u64 {
            return Err(self.shard.codec_error(self.index, CodecError::TensorBytes { expected, got }));
        }
        on_threads(None, || self.shard.decode(self.index, out, false))
    }

    /// Rows of a matrix, all columns: see [`TensorHandle::decode_part`].
    ///
    /// # Errors
    /// As [`TensorHandle::decode_part`].
    pub fn decode_rows(&self, rows: Range<usize>) -> Result<TensorPart, BundleError> {
        self.decode_part(rows, 0..self.shape().last().copied().unwrap_or(0))
    }

    /// Rows and columns of a matrix, as a rank of tensor parallelism takes them. Of a packed tensor of more than 512 x
    /// 512 only the blocks that hold them are read and decoded; of every other tensor, all.
    ///
    /// What is read is compared with its digests. The decoded part has no digest of its own: `verify` decodes the whole
    /// and compares it.
    ///
    /// # Errors
    /// As [`TensorHandle::decode`], or the tensor is not a matrix, or a range is empty or reaches past it.
    pub fn decode_part(&self, rows: Range<usize>, cols: Range<usize>) -> Result<TensorPart, BundleError> {
        on_threads(None, || self.shard.decode_part(self.index, rows, cols))
    }
}

impl fmt::Debug for TensorHandle<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorHandle").field("file", &self.file()).field("entry", self.entry()).finish()
    }
}
