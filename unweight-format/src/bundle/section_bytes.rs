//! The bytes of a section, in memory of their own or of the encoder.

use std::{
    fmt,
    ops::{Deref, DerefMut, Range},
    sync::Arc,
};

use crate::StoredTensor;

/// Memory of an encoder for the bytes of tensors. Dropping it returns it to the encoder.
#[doc(hidden)]
pub type EncoderBuffer = Box<dyn DerefMut<Target = [u8]> + Send + Sync>;

/// The bytes of a section: owned, or a part of memory of the encoder. That memory returns to the encoder when the last
/// of its parts is dropped.
#[doc(hidden)]
#[derive(Clone)]
pub struct SectionBytes(Bytes);

#[derive(Clone)]
enum Bytes {
    Owned(Vec<u8>),
    Part(Arc<dyn Deref<Target = [u8]> + Send + Sync>, Range<usize>),
}

impl SectionBytes {
    /// Returns a part of memory of the encoder; `None` if the memory is smaller.
    pub fn part(memory: Arc<dyn Deref<Target = [u8]> + Send + Sync>, range: Range<usize>) -> Option<Self> {
        memory.get(range.clone())?;
        Some(Self(Bytes::Part(memory, range)))
    }

    /// The bytes that are not memory of the encoder.
    pub(crate) fn owned_bytes(&self) -> u64 {
        match &self.0 {
            Bytes::Owned(bytes) => bytes.len() as u64,
            Bytes::Part(..) => 0,
        }
    }
}

impl AsRef<[u8]> for SectionBytes {
    fn as_ref(&self) -> &[u8] {
        match &self.0 {
            Bytes::Owned(bytes) => bytes,
            Bytes::Part(memory, range) => &memory[range.clone()],
        }
    }
}

impl From<Vec<u8>> for SectionBytes {
    fn from(bytes: Vec<u8>) -> Self {
        Self(Bytes::Owned(bytes))
    }
}

impl From<SectionBytes> for Vec<u8> {
    fn from(bytes: SectionBytes) -> Self {
        match bytes.0 {
            Bytes::Owned(bytes) => bytes,
            Bytes::Part(memory, range) => memory[range].to_vec(),
        }
    }
}

impl From<StoredTensor<SectionBytes>> for StoredTensor<Vec<u8>> {
    fn from(tensor: StoredTensor<SectionBytes>) -> Self {
        tensor.map(Vec::from)
    }
}

impl From<StoredTensor<Vec<u8>>> for StoredTensor<SectionBytes> {
    fn from(tensor: StoredTensor<Vec<u8>>) -> Self {
        tensor.map(SectionBytes::from)
    }
}

impl fmt::Debug for SectionBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SectionBytes[{}]", self.as_ref().len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_share_memory_until_the_last_is_dropped() {
        let memory: Arc<Box<[u8]>> = Arc::new((0..10).collect());
        let part = |range| SectionBytes::part(memory.clone(), range);
        let (front, back) = (part(0..3).unwrap(), part(3..10).unwrap());
        assert_eq!((front.as_ref(), back.as_ref()), (&[0, 1, 2][..], &[3, 4, 5, 6, 7, 8, 9][..]));
        assert_eq!((front.owned_bytes(), SectionBytes::from(vec![1, 2]).owned_bytes()), (0, 2));
        assert!(part(4..11).is_none());
        assert!(part(11..12).is_none());
        assert_eq!(Arc::strong_count(&memory), 3);
        drop(front);
        assert_eq!(Vec::from(back.clone()), [3, 4, 5, 6, 7, 8, 9]);
        drop(back);
        assert_eq!(Arc::strong_count(&memory), 1);
    }
}
