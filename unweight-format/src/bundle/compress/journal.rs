//! The state that a run leaves for a later one: records of finished shards, and journals of unfinished ones.
//!
//! ```text
//! work/journal-<digest of name>     head, then a line per written tensor: a later run takes over the sound prefix
//! records/<digest of name>.json     written after the shard got its name: a later run takes over the whole shard
//! ```
//! Both contain digests of the source's bytes, not its path or time: a later run reads the source and compares. Every
//! JSON text in them follows its own digest, so that damage is found.

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::{
    Digest, EncodingId,
    bundle::manifest::{self, TensorEntry, WeightsFile},
    safetensors::TensorInfo,
};

/// Characters of a digest in hexadecimal.
const DIGEST_CHARS: usize = 32;
/// The byte between the digest and the JSON text of a record, and of a journal's line.
const RECORD_SEPARATOR: u8 = b'\n';
const LINE_SEPARATOR: u8 = b' ';

/// Returns the value as JSON after the digest of the JSON text.
fn with_digest(value: &impl Serialize, separator: u8) -> Vec<u8> {
    let json = serde_json::to_vec(value).expect("records and lines are strings, numbers and lists");
    [Digest::of(&json).to_string().as_bytes(), &[separator], &json].concat()
}

/// Returns the JSON text of what [`with_digest`] wrote; `None` if the bytes are incomplete or damaged.
fn checked(bytes: &[u8], separator: u8) -> Option<&[u8]> {
    let (digest, rest) = bytes.split_at_checked(DIGEST_CHARS)?;
    let json = rest.strip_prefix(&[separator])?;
    (Digest::of(json).to_string().as_bytes() == digest).then_some(json)
}

/// The record of a finished shard, kept until the bundle is complete.
#[derive(Serialize, Deserialize)]
pub(crate) struct Record {
    /// Everything other than the source that determines the shard's bytes.
    pub(super) options: String,
    pub(super) file: WeightsFile,
}

impl Record {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        with_digest(self, RECORD_SEPARATOR)
    }

    /// Parses what [`Record::to_bytes`] wrote. `None` for damaged or other bytes; the shard is then made again.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let record: Self = serde_json::from_slice(checked(bytes, RECORD_SEPARATOR)?).ok()?;
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

/// A line of a journal.
pub(super) fn journal_line(value: &impl Serialize) -> Vec<u8> {
    let mut line = with_digest(value, LINE_SEPARATOR);
    line.push(b'\n');
    line
}

/// The JSON texts of a journal's lines, up to the first line that is incomplete or damaged.
pub(super) fn journal_texts(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    bytes.split(|byte| *byte == b'\n').map_while(|line| checked(line, LINE_SEPARATOR))
}

/// How far a shard is written: first the prefix that an interrupted run left, as far as it is sound and matches the
/// source; then also what this run adds.
pub(super) struct ShardState {
    /// The tensors that are encoded.
    pub(super) entries: Vec<TensorEntry>,
    /// SHA-256 of the source file up to the end of these tensors.
    pub(super) sha: Option<Sha256>,
    /// Bytes in the source of the tensors that an interrupted run left.
    pub(super) resumed_bytes: u64,
}

impl ShardState {
    /// The state before the first tensor. `sha256`: whether to hash the source file.
    pub(super) fn new(header_bytes: &[u8], sha256: bool) -> Self {
        let sha = sha256.then(|| Sha256::new_with_prefix(header_bytes));
        Self { entries: Vec::new(), sha, resumed_bytes: 0 }
    }
}

/// Sizes and digests of what a shard contains of a tensor (itself or its sections), in stored order.
pub(super) fn stored_contents<'a>(
    entry: &'a TensorEntry,
    info: &TensorInfo,
) -> impl Iterator<Item = (u64, Digest)> + 'a {
    let raw = (entry.encoding == EncodingId::RAW).then_some((info.bytes, entry.digest));
    raw.into_iter().chain(entry.sections.iter().map(|section| (section.bytes, section.digest)))
}
