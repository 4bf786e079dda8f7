//! A tensor of an open bundle.

use std::{fmt, ops::Range};

use super::{BundleError, TensorPart, TensorReport, manifest::TensorEntry, pipeline::on_threads, shard::Shard};
use crate::{CodecError, EncodingId, StoredTensor, safetensors::Dtype};

/// A tensor of an open [`Bundle`](super::Bundle). Methods that need its bytes read them and compare them with their
/// digests.
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

    /// The name of the source file that contains the tensor.
    pub fn file(&self) -> &'a str {
        &self.shard.file.name
    }

    /// The tensor's entry in the manifest.
    pub fn entry(&self) -> &'a TensorEntry {
        &self.shard.file.tensors[self.index]
    }

    /// The tensor's name in the source.
    pub fn name(&self) -> &'a str {
        &self.entry().name
    }

    /// The element type in the source.
    pub fn dtype(&self) -> Dtype {
        self.entry().dtype
    }

    /// The shape in the source.
    pub fn shape(&self) -> &'a [usize] {
        &self.entry().shape
    }

    /// The tensor's encoding.
    pub fn encoding(&self) -> EncodingId {
        self.entry().encoding
    }

    /// The tensor's row of `inspect`, with sizes.
    pub fn report(&self) -> TensorReport {
        TensorReport::of(self.file(), self.entry())
    }

    /// The size of the original tensor in bytes.
    pub fn original_bytes(&self) -> u64 {
        self.shard.original_bytes(self.index)
    }

    /// Reads the stored tensor. Every section is compared with its digest, and its offsets can be trusted (invariants
    /// 1-3 of `docs/format.md` A.6).
    ///
    /// # Errors
    /// The tensor cannot be read, its sections are damaged, or they contain differences from a base.
    pub fn stored(&self) -> Result<StoredTensor<Vec<u8>>, BundleError> {
        on_threads(None, || self.shard.stored(self.index))
    }

    /// Decodes the original little-endian bytes and compares them with their digest.
    ///
    /// # Errors
    /// The errors of [`TensorHandle::stored`], or the weights are damaged.
    pub fn decode(&self) -> Result<Vec<u8>, BundleError> {
        let mut out = self.shard.buffer(self.original_bytes())?;
        self.decode_into(&mut out)?;
        Ok(out)
    }

    /// Decodes into `out`, which must have [`TensorHandle::original_bytes`] bytes. After an error its contents are
    /// unspecified.
    ///
    /// # Errors
    /// The errors of [`TensorHandle::decode`], or `out` has another size.
    pub fn decode_into(&self, out: &mut [u8]) -> Result<(), BundleError> {
        let (expected, got) = (self.original_bytes(), out.len());
        if expected != got as u64 {
            return Err(self.shard.codec_error(self.index, CodecError::TensorBytes { expected, got }));
        }
        on_threads(None, || self.shard.decode(self.index, out, false))
    }

    /// Decodes rows and columns of a matrix, such as the shard of a tensor-parallel rank. Of a packed tensor larger
    /// than 512 x 512, only the blocks that contain them are read and decoded; of any other tensor, everything.
    ///
    /// All bytes read are compared with their digests. The decoded part has no digest: `verify` decodes the whole
    /// tensor and compares it.
    ///
    /// # Errors
    /// The errors of [`TensorHandle::decode`], or the tensor is not a matrix, or a range is empty or exceeds it.
    pub fn decode_part(&self, rows: Range<usize>, cols: Range<usize>) -> Result<TensorPart, BundleError> {
        on_threads(None, || self.shard.decode_part(self.index, rows, cols))
    }
}

impl fmt::Debug for TensorHandle<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorHandle").field("file", &self.file()).field("entry", self.entry()).finish()
    }
}
