//! Writes a shard, and determines the order of its bytes.
//!
//! First come all entries whose size is a multiple of 16 bytes, in source order. Then come the others (raw tensors of
//! odd sizes, and sign_mantissa sections of such tensors), by descending element size; last the source's header. So
//! every section that a kernel or a stock reader needs aligned is aligned, without padding.

use std::{borrow::Cow, collections::BTreeMap, fs::File, ops::Range, os::unix::fs::FileExt, path::PathBuf};

use super::{
    Job,
    journal::{Record, journal_line},
    tensor::{Encoded, Stored},
};
use crate::{
    Digest, EncodingId, Section, TileGrid, bf16,
    bundle::{
        BundleError,
        files::{self, Input},
        manifest::{self, SOURCE_HEADER, TensorEntry, VERSION, section_name},
        plan::Decision,
        source::SourceFile,
        stage::Stage,
    },
    failpoint::{failpoint, fault},
    safetensors::{Dtype, HEADER_MAX, Header, TensorInfo, header_to_bytes},
};

/// Entries in source order start on multiples of this number of bytes.
const ALIGN: u64 = 16;

/// Where an entry is in its shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// Among the entries in source order.
    InOrder,
    /// After all of those, because it would misalign the next one.
    AtEnd,
}

/// The place of an entry of this size.
pub(super) fn place(bytes: u64) -> Place {
    if bytes.is_multiple_of(ALIGN) { Place::InOrder } else { Place::AtEnd }
}

/// The layout of a shard, as far as the source's header determines it.
pub(super) struct Layout {
    pub(super) decisions: Vec<Decision>,
    pub(super) metadata: BTreeMap<String, String>,
    /// Bytes reserved for the header.
    pub(super) reserved: u64,
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
        let reserved =
            header_bound(&metadata, header, &decisions, (file.bytes, header_bytes.len() as u64), self.base.is_some());
        if reserved > HEADER_MAX {
            return Err(BundleError::HeaderTooLarge { file: file.name.clone(), got: reserved, limit: HEADER_MAX });
        }
        Ok(Layout { decisions, metadata, reserved })
    }

    /// Syncs a shard to disk, gives it its name, and records that for a later run.
    pub(super) fn commit_shard(&self, writer: &ShardWriter<'_>, record: &Record) -> Result<(), BundleError> {
        let name = &record.file.name;
        let synced = self.trace.time("sync", record.file.shard_size, || writer.file.sync_all());
        synced.map_err(self.stage.write_error(&writer.path))?;
        if fault("flip-finished") {
            writer.flip(record.file.shard_size - 1);
        }
        self.stage.accept(&writer.path, name)?;
        self.stage.put_record(name, &record.to_bytes())?;
        let journal = self.stage.journal(name);
        std::fs::remove_file(&journal).map_err(BundleError::io("remove the file", &journal))
    }
}

/// An entry of a shard's header: a raw tensor, a section, or the source's header.
pub(super) struct ShardEntry {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: u64,
}

impl ShardEntry {
    /// The entry of a raw tensor.
    pub(super) fn raw(info: &TensorInfo) -> Self {
        Self { name: info.name.clone(), dtype: info.dtype, shape: info.shape.clone(), bytes: info.bytes }
    }

    /// The entry of a section of `bytes` bytes.
    pub(super) fn section(info: &TensorInfo, section: Section, grid: TileGrid, bytes: u64) -> Self {
        let shape = section.shape(grid, bytes as usize);
        Self { name: section_name(&info.name, section), dtype: section.dtype(), shape, bytes }
    }

    /// The entry of the source's header.
    pub(super) fn source_header(bytes: &[u8]) -> Self {
        let (dtype, shape) = (Dtype::U8, vec![bytes.len()]);
        Self { name: SOURCE_HEADER.into(), dtype, shape, bytes: bytes.len() as u64 }
    }
}

/// An entry whose bytes are written at the end of the shard.
struct Deferred {
    entry: ShardEntry,
    contents: Pending,
}

/// Where the bytes of a deferred entry come from.
pub(super) enum Pending {
    /// A raw tensor with this digest, at `offset` in the source.
    Raw { offset: u64, digest: Digest },
    /// The sign_mantissa of the `bytes` bytes at `offset` in the source, which have this digest. It is not held in
    /// memory, because it is half of the tensor.
    SignMantissa { offset: u64, bytes: u64, digest: Digest },
    /// Sections of other kinds, which are small enough to hold.
    InMemory(Vec<u8>),
}

impl Pending {
    /// The contents of a section that is made from the source again; `None` for a section of another kind.
    pub(super) fn from_source(section: Section, info: &TensorInfo, digest: Digest) -> Option<Self> {
        let contents = Self::SignMantissa { offset: info.offset, bytes: info.bytes, digest };
        (section == Section::SIGN_MANTISSA).then_some(contents)
    }
}

/// The shard being written.
pub(super) struct ShardWriter<'a> {
    pub(super) file: File,
    pub(super) path: PathBuf,
    pub(super) stage: &'a Stage,
    /// Offset of the next byte.
    pub(super) at: u64,
    /// The entries up to there, in stored order.
    pub(super) entries: Vec<ShardEntry>,
    deferred: Vec<Deferred>,
    /// Records what has been written, for a run that resumes.
    pub(super) journal: File,
}

impl<'a> ShardWriter<'a> {
    /// A writer of the bytes after a header of `reserved` bytes.
    pub(super) fn new(file: File, path: PathBuf, stage: &'a Stage, reserved: u64, journal: File) -> Self {
        Self { file, path, stage, at: reserved, entries: Vec::new(), deferred: Vec::new(), journal }
    }

    /// Adds a written tensor to the journal.
    pub(super) fn journal_entry(&mut self, entry: &TensorEntry) -> Result<(), BundleError> {
        files::append(&mut self.journal, &journal_line(entry)).map_err(self.stage.write_error(&self.path))?;
        failpoint("journalled");
        Ok(())
    }

    /// Adds an entry: `write` writes its bytes now, or they are written from `contents` at the end.
    pub(super) fn add(
        &mut self,
        entry: ShardEntry,
        write: impl FnOnce(&mut Self) -> Result<(), BundleError>,
        contents: impl FnOnce() -> Result<Pending, BundleError>,
    ) -> Result<(), BundleError> {
        match place(entry.bytes) {
            Place::InOrder => {
                write(self)?;
                self.entries.push(entry);
            }
            Place::AtEnd => self.deferred.push(Deferred { entry, contents: contents()? }),
        }
        Ok(())
    }

    /// Skips bytes that are already written.
    pub(super) fn skip(&mut self, bytes: u64) {
        self.at += bytes;
    }

    /// Runs `put` for a tensor. Returns where its parts are; `None` if one follows at the end of the shard.
    pub(super) fn ranges_of(
        &mut self,
        put: impl FnOnce(&mut Self) -> Result<(), BundleError>,
    ) -> Result<Option<Vec<Range<u64>>>, BundleError> {
        let (mut at, first, deferred) = (self.at, self.entries.len(), self.deferred.len());
        put(self)?;
        let range = |entry: &ShardEntry| {
            at += entry.bytes;
            at - entry.bytes..at
        };
        let ranges = self.entries[first..].iter().map(range).collect();
        Ok((self.deferred.len() == deferred).then_some(ranges))
    }

    /// Damages a written byte, for a test.
    pub(super) fn flip(&self, at: u64) {
        let mut byte = [0];
        let read = File::open(&self.path).and_then(|file| file.read_exact_at(&mut byte, at));
        read.and_then(|()| self.file.write_all_at(&[!byte[0]], at)).expect("the test has written this byte");
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), BundleError> {
        files::write_at(&self.file, bytes, self.at).map_err(self.stage.write_error(&self.path))?;
        self.at += bytes.len() as u64;
        self.stage.count_written(bytes.len() as u64);
        Ok(())
    }

    /// Adds a tensor, itself or its sections.
    pub(super) fn put(&mut self, encoded: &Encoded<'_>, input: &Input) -> Result<(), BundleError> {
        let (info, digest) = (encoded.info, encoded.entry.digest);
        let raw = || Ok(Pending::Raw { offset: info.offset, digest });
        match (&encoded.stored, encoded.entry.grid()) {
            (Stored::Raw(bytes), _) => self.add(ShardEntry::raw(info), |writer| writer.write(bytes), raw),
            (Stored::Later, _) => {
                let copy = |writer: &mut Self| {
                    writer.write_again(input, info.offset, info.bytes, digest, |piece| Cow::Borrowed(piece))
                };
                self.add(ShardEntry::raw(info), copy, raw)
            }
            (Stored::Coded(tensor), Some(grid)) => tensor.sections().try_for_each(|(section, bytes)| {
                let entry = ShardEntry::section(info, section, grid, bytes.len() as u64);
                let contents = || {
                    let again = Pending::from_source(section, info, digest);
                    Ok(again.unwrap_or_else(|| Pending::InMemory(bytes.to_vec())))
                };
                self.add(entry, |writer| writer.write(bytes), contents)
            }),
            (Stored::Coded(_), None) => unreachable!("a coded tensor has a grid"),
        }
    }

    /// Writes the deferred entries by descending element size, so that each is aligned to its element size, and then
    /// the source's header.
    pub(super) fn put_rest(&mut self, header_bytes: &[u8], input: &Input) -> Result<(), BundleError> {
        let mut deferred = std::mem::take(&mut self.deferred);
        deferred.sort_by_key(|d| std::cmp::Reverse(d.entry.dtype.bits()));
        for Deferred { entry, contents } in deferred {
            match contents {
                Pending::InMemory(bytes) => self.write(&bytes)?,
                Pending::Raw { offset, digest } => {
                    self.write_again(input, offset, entry.bytes, digest, |piece| Cow::Borrowed(piece))?;
                }
                Pending::SignMantissa { offset, bytes, digest } => {
                    let split = |e: &[u8]| bf16::sign_mantissa(u16::from_le_bytes([e[0], e[1]]));
                    // A piece has an even number of bytes, like the tensor.
                    self.write_again(input, offset, bytes, digest, |piece| {
                        Cow::Owned(piece.chunks_exact(2).map(split).collect())
                    })?;
                }
            }
            self.entries.push(entry);
        }
        self.write(header_bytes)?;
        self.entries.push(ShardEntry::source_header(header_bytes));
        Ok(())
    }

    /// Reads bytes of the source again and writes what `transform` makes of them. Fails if the bytes have changed.
    fn write_again(
        &mut self,
        input: &Input,
        offset: u64,
        bytes: u64,
        expected: Digest,
        transform: impl Fn(&[u8]) -> Cow<'_, [u8]>,
    ) -> Result<(), BundleError> {
        let got = input.stream(offset, bytes, |piece| self.write(&transform(piece)))?;
        if got == expected { Ok(()) } else { Err(input.changed()) }
    }

    /// Writes the header in front of the data.
    pub(super) fn write_header(
        &mut self,
        metadata: &BTreeMap<String, String>,
        reserved: u64,
    ) -> Result<Vec<u8>, BundleError> {
        let mut begin = 0;
        let entries = self.entries.iter().map(|entry| {
            let offsets = [begin, begin + entry.bytes];
            begin = offsets[1];
            (entry.name.as_str(), entry.dtype, entry.shape.as_slice(), offsets)
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
    (file_bytes, header_bytes): (u64, u64),
    has_base: bool,
) -> u64 {
    // A coded tensor is not larger than its source, and the copy of the header is as large as the original, so no
    // offset exceeds this.
    let offset_max = file_bytes;
    let mut entries = Vec::new();
    for (info, decision) in header.tensors.iter().zip(decisions) {
        let raw = || (info.name.clone(), info.dtype, info.shape.clone());
        let Some(grid) = decision.choice.grid() else {
            entries.push(raw());
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
        let delta = has_base.then(|| named(EncodingId::PLANES));
        let longest = coded.chain(delta).max_by_key(|entries| header_bytes_of(&BTreeMap::new(), entries, offset_max));
        entries.extend(longest.unwrap_or_default());
        // Raw is the last fallback of every encoding, and a shape of many dimensions may be longer than the names of
        // all sections.
        if info.shape.len() > 8 {
            entries.push(raw());
        }
    }
    entries.push((SOURCE_HEADER.into(), Dtype::U8, vec![header_bytes as usize]));
    header_bytes_of(metadata, &entries, offset_max)
}

/// Bytes of a header with these entries, all at offset `offset_max`.
fn header_bytes_of(
    metadata: &BTreeMap<String, String>,
    entries: &[(String, Dtype, Vec<usize>)],
    offset_max: u64,
) -> u64 {
    let entries =
        entries.iter().map(|(name, dtype, shape)| (name.as_str(), *dtype, shape.as_slice(), [offset_max, offset_max]));
    header_to_bytes(metadata, entries, 0).len() as u64
}
