//! What a run leaves for a later one: records of finished shards, and journals of growing ones.
//!
//! ```text
//! work/<shard>.journal   head, then a line per tensor that is written: a later run takes over the sound beginning
//! work/<shard>.record    after the shard got its name: a later run takes the whole shard over
//! ```
//! Both hold digests of the source's bytes, never its path or time: a later run reads the source and compares.

use serde::{Deserialize, Serialize};
use sha2::Sha256;

use crate::{
    Digest, EncodingId,
    bundle::manifest::{self, TensorEntry, WeightsFile},
    safetensors::TensorInfo,
};

/// What is kept of a finished shard until the bundle is complete. It names no time and no path of the source: a later
/// run compares the source's bytes with the digests.
#[derive(Serialize, Deserialize)]
pub(crate) struct Record {
    /// Everything but the source that decides the shard's bytes.
    pub(super) options: String,
    pub(super) file: WeightsFile,
}

impl Record {
    /// The digest of the JSON text, then that text.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let json = serde_json::to_vec(self).expect("a record is strings, numbers and lists");
        [Digest::of(&json).to_string().as_bytes(), b"\n", &json].concat()
    }

    /// `None` for anything that [`Record::to_bytes`] did not write, or a damaged one: the shard is then made again.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let (digest, json) = bytes.split_at_checked(33)?;
        let (digest, end) = digest.split_at(32);
        if end != b"\n" || Digest::of(json).to_string().as_bytes() != digest {
            return None;
        }
        let record: Self = serde_json::from_slice(json).ok()?;
        manifest::check_weights(&record.file).ok()?;
        Some(record)
    }
}

/// What a journal begins with: it is of this very source file, as far as its header tells, and of these options.
#[derive(PartialEq, Serialize, Deserialize)]
pub(super) struct JournalHead {
    pub(super) options: String,
    pub(super) name: String,
    pub(super) size: u64,
    pub(super) header_digest: Digest,
}

/// A line of a journal: the digest of the JSON text, then that text.
pub(super) fn journal_line(value: &impl Serialize) -> Vec<u8> {
    let json = serde_json::to_vec(value).expect("a line is strings, numbers and lists");
    [Digest::of(&json).to_string().as_bytes(), b" ", &json, b"\n"].concat()
}

/// The lines of a journal up to the first that is not whole.
pub(super) fn journal_lines(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    bytes.split(|byte| *byte == b'\n').map_while(|line| {
        let (digest, json) = line.split_at_checked(33)?;
        (digest[32] == b' ' && Digest::of(json).to_string().as_bytes() == &digest[..32]).then_some(json)
    })
}

/// The beginning of a shard that an interrupted run wrote, as far as it is sound and of this source.
pub(super) struct Kept {
    pub(super) entries: Vec<TensorEntry>,
    /// Of the source, up to here.
    pub(super) sha: Option<Sha256>,
    /// Bytes of the tensors in the source.
    pub(super) source_bytes: u64,
}

/// Bytes and digests of the parts that a tensor is stored in, in stored order.
pub(super) fn stored_parts<'a>(entry: &'a TensorEntry, info: &TensorInfo) -> impl Iterator<Item = (u64, Digest)> + 'a {
    let raw = (entry.encoding == EncodingId::RAW).then_some((info.bytes, entry.digest));
    raw.into_iter().chain(entry.sections.iter().map(|section| (section.bytes, section.digest)))
}
