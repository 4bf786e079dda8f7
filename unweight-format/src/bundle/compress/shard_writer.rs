//! Writes a shard, and determines the order of its bytes.
//!
//! First come all parts whose size is a multiple of 16 bytes, in source order. Then come the others (raw tensors of odd
//! sizes, and sign_mantissa sections of such tensors), by descending element size; last the source's header. So every
//! section that a kernel or a stock reader needs aligned is aligned, without padding.

use std::{borrow::Cow, collections::BTreeMap, fs::File, path::PathBuf};

use super::{
    Job,
    journal::{Record, journal_line},
    tensor::{Encoded, Stored},
};
use crate::{
    Digest, EncodingId, Section, bf16,
    bundle::{
        BundleError,
        files::{self, Input},
        manifest::{self, SOURCE_HEADER, TensorEntry, VERSION, section_name},
        plan::Decision,
        source::SourceFile,
        stage::Stage,
    },
    failpoint::failpoint,
    safetensors::{Dtype, HEADER_MAX, Header, header_to_bytes},
};

/// Sections start on multiples of this number of bytes, except those after parts of other sizes.
pub(super) const ALIGN: u64 = 16;

/// The layout of a shard, as far as the source's header determines it.
pub(super) struct Layout {
    pub(super) decisions: Vec<Decision>,
    pub(super) metadata: BTreeMap<String, String>,
    /// Bytes reserved for the header.
    pub(super) reserved: u64,
}

/// A shard that is written but may not be synced to disk yet.
pub(super) struct Written {
    pub(super) file: File,
    pub(super) work: PathBuf,
    pub(super) journal: PathBuf,
    pub(super) record: Record,
}

impl Job<'_> {
    /// Determines the encodings, the metadata and the size of the header of a shard.
    pub(super) fn layout(
        &self,
        file: &SourceFile,
        header: &Header,
        header_bytes: &[u8],
    ) -> Result<Layout, BundleError> {
        let decisions: Vec<Decision> =
            header.tensors.iter().map(|t| self.planner.decide(&t.name, t.dtype, &t.shape)).collect();
        let mut metadata: BTreeMap<String, String> = header.metadata.iter().cloned().collect();
        for (key, value) in [("format", manifest::FORMAT.to_string()), ("unweight_version", VERSION.to_string())] {
            if let Some(source_value) = metadata.insert(key.into(), value) {
                metadata.insert(format!("unweight.source.{key}"), source_value);
            }
        }
        let reserved = header_bound(&metadata, header, &decisions, file.bytes, header_bytes.len() as u64);
        if reserved > HEADER_MAX {
            return Err(BundleError::HeaderTooLarge { file: file.name.clone(), got: reserved, limit: HEADER_MAX });
        }
        Ok(Layout { decisions, metadata, reserved })
    }

    /// Syncs a shard to disk, gives it its name, and records that for a later run.
    pub(super) fn commit_shard(&self, shard: Written) -> Result<(), BundleError> {
        shard.file.sync_all().map_err(self.stage.write_error(&shard.work))?;
        self.stage.accept(&shard.work, &shard.record.file.name)?;
        self.stage.put_record(&shard.record.file.name, &shard.record.to_bytes())?;
        std::fs::remove_file(&shard.journal).map_err(BundleError::io("remove the file", &shard.journal))
    }
}

/// A part of a shard, as its header describes it.
pub(super) struct Part {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: u64,
}

impl Part {
    pub(super) fn new(name: String, dtype: Dtype, shape: Vec<usize>, bytes: u64) -> Self {
        Self { name, dtype, shape, bytes }
    }
}

/// A part that is written at the end of the shard, because it would misalign the following parts.
pub(super) struct Deferred {
    pub(super) part: Part,
    pub(super) contents: Pending,
}

/// The source of the bytes of a part that is written later.
pub(super) enum Pending {
    /// A raw tensor with this digest, at `offset` in the source.
    Raw { offset: u64, digest: Digest },
    /// The sign_mantissa of the `bytes` bytes at `offset` in the source, which have this digest. It is not held in
    /// memory, because it is half of the tensor.
    SignMantissa { offset: u64, bytes: u64, digest: Digest },
    /// Sections of other kinds, which are small enough to hold.
    InMemory(Vec<u8>),
}

/// The shard being written.
pub(super) struct ShardWriter<'a> {
    pub(super) file: File,
    pub(super) path: PathBuf,
    pub(super) stage: &'a Stage,
    /// Offset of the next byte.
    pub(super) at: u64,
    pub(super) parts: Vec<Part>,
    /// Records what has been written, for a run that resumes.
    pub(super) journal: File,
}

impl ShardWriter<'_> {
    /// Skips a part that is already written.
    pub(super) fn skip_written(&mut self, part: Part) {
        self.at += part.bytes;
        self.parts.push(part);
    }

    /// Adds a written tensor to the journal.
    pub(super) fn journal_entry(&mut self, entry: &TensorEntry) -> Result<(), BundleError> {
        files::append(&mut self.journal, &journal_line(entry)).map_err(self.stage.write_error(&self.path))?;
        failpoint("journalled");
        Ok(())
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), BundleError> {
        files::write_at(&self.file, bytes, self.at).map_err(self.stage.write_error(&self.path))?;
        self.at += bytes.len() as u64;
        self.stage.count_written(bytes.len() as u64);
        Ok(())
    }

    pub(super) fn put(
        &mut self,
        encoded: &Encoded<'_>,
        deferred: &mut Vec<Deferred>,
        input: &Input,
    ) -> Result<(), BundleError> {
        let (info, digest, offset) = (encoded.info, encoded.entry.digest, encoded.info.offset);
        let (tensor, grid) = match (&encoded.stored, encoded.entry.grid()) {
            (Stored::Coded(tensor), Some(grid)) => (tensor, grid),
            (stored, _) => {
                let part = Part::new(info.name.clone(), info.dtype, info.shape.clone(), info.bytes);
                match stored {
                    _ if !part.bytes.is_multiple_of(ALIGN) => {
                        deferred.push(Deferred { part, contents: Pending::Raw { offset, digest } });
                        return Ok(());
                    }
                    Stored::Raw(bytes) => self.write(bytes)?,
                    _ => self.write_again(input, offset, info.bytes, digest, |piece| Cow::Borrowed(piece))?,
                }
                self.parts.push(part);
                return Ok(());
            }
        };
        for (section, bytes) in tensor.sections() {
            let shape = section.shape(grid, bytes.len());
            let part = Part::new(section_name(&info.name, section), section.dtype(), shape, bytes.len() as u64);
            if part.bytes.is_multiple_of(ALIGN) {
                self.write(bytes)?;
                self.parts.push(part);
            } else {
                let contents = match section {
                    Section::SIGN_MANTISSA => Pending::SignMantissa { offset, bytes: info.bytes, digest },
                    _ => Pending::InMemory(bytes.to_vec()),
                };
                deferred.push(Deferred { part, contents });
            }
        }
        Ok(())
    }

    /// Writes the deferred parts by descending element size, so that each is aligned to its element size.
    pub(super) fn put_deferred(&mut self, mut deferred: Vec<Deferred>, input: &Input) -> Result<(), BundleError> {
        deferred.sort_by_key(|d| std::cmp::Reverse(d.part.dtype.bits()));
        for item in deferred {
            match item.contents {
                Pending::InMemory(bytes) => self.write(&bytes)?,
                Pending::Raw { offset, digest } => {
                    self.write_again(input, offset, item.part.bytes, digest, |piece| Cow::Borrowed(piece))?;
                }
                Pending::SignMantissa { offset, bytes, digest } => {
                    let split = |e: &[u8]| bf16::sign_mantissa(u16::from_le_bytes([e[0], e[1]]));
                    // A piece has an even number of bytes, like the tensor.
                    self.write_again(input, offset, bytes, digest, |piece| {
                        Cow::Owned(piece.chunks_exact(2).map(split).collect())
                    })?;
                }
            }
            self.parts.push(item.part);
        }
        Ok(())
    }

    /// Reads bytes of the source again and writes what `encoding` makes of them. Fails if the bytes have changed.
    pub(super) fn write_again(
        &mut self,
        input: &Input,
        offset: u64,
        bytes: u64,
        expected: Digest,
        encoding: impl Fn(&[u8]) -> Cow<'_, [u8]>,
    ) -> Result<(), BundleError> {
        let got = input.stream(offset, bytes, |piece| self.write(&encoding(piece)))?;
        if got == expected { Ok(()) } else { Err(input.changed()) }
    }

    /// Writes the header in front of the data.
    pub(super) fn finish(
        &mut self,
        metadata: &BTreeMap<String, String>,
        reserved: u64,
    ) -> Result<Vec<u8>, BundleError> {
        let mut begin = 0;
        let entries = self.parts.iter().map(|part| {
            let offsets = [begin, begin + part.bytes];
            begin = offsets[1];
            (part.name.as_str(), part.dtype, part.shape.as_slice(), offsets)
        });
        let header = header_to_bytes(metadata, entries, reserved);
        assert_eq!(header.len() as u64, reserved, "the reserved header bounds the real one");
        files::write_at(&self.file, &header, 0).map_err(self.stage.write_error(&self.path))?;
        Ok(header)
    }
}

/// Maximum size of the shard's header in bytes: every coded tensor with all its sections, every number with its maximum
/// length.
fn header_bound(
    metadata: &BTreeMap<String, String>,
    header: &Header,
    decisions: &[Decision],
    file_bytes: u64,
    header_bytes: u64,
) -> u64 {
    // A coded tensor is not larger than its source, and the copy of the header is as large as the original, so no
    // offset exceeds this.
    let offset_max = file_bytes;
    let mut parts = Vec::new();
    for (info, decision) in header.tensors.iter().zip(decisions) {
        let raw = || (info.name.clone(), info.dtype, info.shape.clone());
        let Some(grid) = decision.choice.grid() else {
            parts.push(raw());
            continue;
        };
        // Use the longest description among the encoding and its fallbacks.
        let named = |encoding: EncodingId| -> Vec<(String, Dtype, Vec<usize>)> {
            let sections = encoding.encoding().sections().iter().map(|&section| {
                let bytes = section.fixed_bytes(grid).unwrap_or(info.bytes as usize);
                (section_name(&info.name, section), section.dtype(), section.shape(grid, bytes))
            });
            sections.collect()
        };
        let chain =
            std::iter::successors(Some(decision.choice.encoding()), |encoding| Some(encoding.encoding().fallback()));
        let coded = chain.take_while(|encoding| *encoding != EncodingId::RAW).map(named);
        parts
            .extend(coded.max_by_key(|parts| header_bytes_of(&BTreeMap::new(), parts, offset_max)).unwrap_or_default());
        // Raw is the last fallback of every encoding, and a shape of many dimensions may be longer than the names of
        // all sections.
        if info.shape.len() > 8 {
            parts.push(raw());
        }
    }
    parts.push((SOURCE_HEADER.into(), Dtype::U8, vec![header_bytes as usize]));
    header_bytes_of(metadata, &parts, offset_max)
}

/// Bytes of a header with these parts, all at offset `offset_max`.
fn header_bytes_of(metadata: &BTreeMap<String, String>, parts: &[(String, Dtype, Vec<usize>)], offset_max: u64) -> u64 {
    let entries =
        parts.iter().map(|(name, dtype, shape)| (name.as_str(), *dtype, shape.as_slice(), [offset_max, offset_max]));
    header_to_bytes(metadata, entries, 0).len() as u64
}
