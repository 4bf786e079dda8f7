//! Content digests: XXH3-128 over leaves of 1 MiB, which threads digest independently while the bytes are in their
//! caches.
//!
//! `digest(x) = XXH3-128(x)` for up to 1 MiB. Above, it is the XXH3-128 of the leaves' digests in order, each as 16
//! big-endian bytes, the canonical form of xxHash. It detects accidents (flipped bits, truncation, swapped shards), not
//! forgery: a program that can rewrite a bundle can rewrite its digests.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;

use crate::parallel;

/// Bytes of a leaf, which one XXH3-128 covers.
pub const LEAF_BYTES: usize = 1 << 20;

/// A 128-bit content digest. Its text form is 32 lowercase hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Digest([u8; 16]);

impl Digest {
    /// The digest of `bytes`, computed on the current rayon pool if there is more than one leaf.
    pub fn of(bytes: &[u8]) -> Self {
        if bytes.len() <= LEAF_BYTES {
            return Self::leaf(bytes);
        }
        Self::of_leaves(&Self::leaves(bytes))
    }

    /// The digests of all leaves, computed on the current rayon pool.
    fn leaves(bytes: &[u8]) -> Vec<Self> {
        parallel::map(bytes.chunks(LEAF_BYTES), Self::leaf)
    }

    /// The digest of one leaf of at most [`LEAF_BYTES`].
    pub(crate) fn leaf(bytes: &[u8]) -> Self {
        debug_assert!(bytes.len() <= LEAF_BYTES);
        Self(XxHash3_128::oneshot(bytes).to_be_bytes())
    }

    /// The digest of the whole from the digests of its leaves. All leaves but the last must be full.
    pub(crate) fn of_leaves(leaves: &[Self]) -> Self {
        match leaves {
            [] => Self::leaf(&[]),
            [only] => *only,
            many => Self(XxHash3_128::oneshot(&many.iter().flat_map(|d| d.0).collect::<Vec<u8>>()).to_be_bytes()),
        }
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

impl TryFrom<String> for Digest {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl FromStr for Digest {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let fail = || {
            format!("a digest is 32 lowercase hexadecimal digits, got '{}'", text.chars().take(64).collect::<String>())
        };
        if text.len() != 32 || !text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
            return Err(fail());
        }
        Ok(Self(u128::from_str_radix(text, 16).map_err(|_| fail())?.to_be_bytes()))
    }
}

/// Digests a stream whose pieces arrive in order.
#[derive(Debug, Default)]
pub struct Digester {
    leaves: Vec<Digest>,
    partial: Vec<u8>,
}

impl Digester {
    /// Appends bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        let (full, rest) = self.complete_leaf(bytes);
        self.leaves.extend(full.chunks_exact(LEAF_BYTES).map(Digest::leaf));
        self.partial.extend_from_slice(rest);
    }

    /// Like [`Digester::update`], on the current rayon pool.
    pub(crate) fn update_together(&mut self, bytes: &[u8]) {
        let (full, rest) = self.complete_leaf(bytes);
        self.leaves.extend(Digest::leaves(full));
        self.partial.extend_from_slice(rest);
    }

    /// Completes a begun leaf. Returns the whole leaves of the remaining bytes, and the bytes after these.
    fn complete_leaf<'a>(&mut self, mut bytes: &'a [u8]) -> (&'a [u8], &'a [u8]) {
        if !self.partial.is_empty() {
            let take = bytes.len().min(LEAF_BYTES - self.partial.len());
            self.partial.extend_from_slice(&bytes[..take]);
            bytes = &bytes[take..];
            if self.partial.len() == LEAF_BYTES {
                self.leaves.push(Digest::leaf(&self.partial));
                self.partial.clear();
            }
        }
        bytes.split_at(bytes.len() / LEAF_BYTES * LEAF_BYTES)
    }

    /// Returns the digest of all appended bytes.
    pub fn finish(mut self) -> Digest {
        if !self.partial.is_empty() {
            self.leaves.push(Digest::leaf(&self.partial));
        }
        Digest::of_leaves(&self.leaves)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_value() {
        // XXH3-128 of the empty input with seed 0, from the xxHash specification's test vectors.
        assert_eq!(Digest::of(b"").to_string(), "99aa06d3014798d86001c324468d497f");
    }

    #[test]
    fn streams_and_slices_agree() {
        let bytes: Vec<u8> = (0..3 * LEAF_BYTES + 5).map(|i| ((i * i) >> 3) as u8).collect();
        for len in [0, 1, LEAF_BYTES - 1, LEAF_BYTES, LEAF_BYTES + 1, bytes.len()] {
            for step in [700_001, LEAF_BYTES, bytes.len() + 1] {
                let (mut digester, mut together) = (Digester::default(), Digester::default());
                bytes[..len].chunks(step).for_each(|chunk| {
                    digester.update(chunk);
                    together.update_together(chunk);
                });
                assert_eq!(digester.finish(), Digest::of(&bytes[..len]));
                assert_eq!(together.finish(), Digest::of(&bytes[..len]));
            }
        }
    }

    #[test]
    fn text_form_round_trips() {
        let digest = Digest::of(b"weights");
        assert_eq!(digest.to_string().parse(), Ok(digest));
        assert!("zz".parse::<Digest>().is_err());
        assert!(
            digest.to_string().to_uppercase().parse::<Digest>().is_err()
                || !digest.to_string().contains(char::is_alphabetic)
        );
    }
}
