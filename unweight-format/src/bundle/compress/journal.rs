//! The state that a run leaves for a later one: records of finished shards, and journals of unfinished ones.
//!
//! ```text
//! work/journal-<digest of name>     head, then a line per written tensor: a later run takes over the sound prefix
//! records/<digest of name>.json     written after the shard got its name: a later run takes over the whole shard
//! ```
//! Both contain digests of the source's bytes, not its path or time: a later run reads the source and compares.

use serde::{Deserialize, Serialize};
use sha2::Sha256;

use crate::{
    Digest, EncodingId,
    bundle::manifest::{self, TensorEntry, WeightsFile},
    safetensors::TensorInfo,
};

/// The record of a finished shard, kept until the bundle is complete. It contains no time and no path of the source: a
/// later run compares the source's bytes with the digests.
#[derive(Serialize, Deserialize)]
pub(crate) struct Record {
    /// Everything other than the source that determines the shard's bytes.
    pub(super) options: String,
    pub(super) file: WeightsFile,
}

impl Record {
    /// Returns the digest of the JSON text, and the text.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let json = serde_json::to_vec(self).expect("a record is strings, numbers and lists");
        [Digest::of(&json).to_string().as_bytes(), b"\n", &json].concat()
    }

    /// Parses what [`Record::to_bytes`] wrote. `None` for damaged or other bytes; the shard is then made again.
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

/// The head of a journal, which identifies the source file, by its header, and the options.
#[derive(PartialEq, Serialize, Deserialize)]
pub(super) struct JournalHead {
    pub(super) options: String,
    pub(super) name: String,
    pub(super) size: u64,
    pub(super) header_digest: Digest,
}

/// A line of a journal: the digest of a JSON text, and the text.
pub(super) fn journal_line(value: &impl Serialize) -> Vec<u8> {
    let json = serde_json::to_vec(value).expect("a line is strings, numbers and lists");
    [Digest::of(&json).to_string().as_bytes(), b" ", &json, b"\n"].concat()
}

/// The lines of a journal up to the first incomplete one.
pub(super) fn journal_lines(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    bytes.split(|byte| *byte == b'\n').map_while(|line| {
        let (digest, json) = line.split_at_checked(33)?;
        (digest[32] == b' ' && Digest::of(json).to_string().as_bytes() == &digest[..32]).then_some(json)
    })
}

/// The prefix of a shard that an interrupted run wrote, as far as it is sound and matches the source.
pub(super) struct Kept {
    pub(super) entries: Vec<TensorEntry>,
    /// SHA-256 of the source file up to the end of these tensors.
    pub(super) sha: Option<Sha256>,
    /// Bytes of these tensors in the source.
    pub(super) source_bytes: u64,
}

/// Bytes and digests of a tensor's stored parts, in stored order.
pub(super) fn stored_parts<'a>(entry: &'a TensorEntry, info: &TensorInfo) -> impl Iterator<Item = (u64, Digest)> + 'a {
    let raw = (entry.encoding == EncodingId::RAW).then_some((info.bytes, entry.digest));
    raw.into_iter().chain(entry.sections.iter().map(|section| (section.bytes, section.digest)))
}
