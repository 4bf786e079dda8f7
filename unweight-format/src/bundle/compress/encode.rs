//! Encodes the tensors of a file, while the previous batch is written and the next one is read.
//!
//! ```text
//! reader thread --units, two buffers--> this thread: rayon encodes --tensors, in order--> writer thread --> shard
//! ```
//! A [`ByteBudget`] bounds the bytes between reading and writing to `ram_bytes`.

use std::{
    path::Path,
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver, Sender, SyncSender},
    },
    thread,
};

use rayon::prelude::*;
use sha2::{Digest as _, Sha256};

use super::{
    Job,
    journal::{Record, ShardState, stored_contents},
    shard_writer::{Layout, Place, ShardWriter, Written, place},
    tensor::{Encoded, Stored, encode_tensor},
};
use crate::{
    Digest, EncodingId, Float, FloatMatrix, Histogram, NotEncodable, Section, StoredTensor, Survey,
    bits::delta,
    bundle::{
        BundleError,
        base::Base,
        blocks::Blocks,
        files::{self, Input},
        manifest::{SectionEntry, TensorEntry, WeightsFile},
        pipeline::{ByteBudget, ReadUnit, join, read_units_from, spawn},
        plan::{Decision, EncodingChoice},
        source::SourceFile,
    },
    failpoint::{failpoint, panic_fault},
    safetensors::{Header, TensorInfo},
};

/// An open safetensors file of the source.
struct ShardSource<'a> {
    file: &'a SourceFile,
    header: &'a Header,
    /// The bytes of length and header.
    header_bytes: &'a [u8],
    input: Input,
}

/// A unit on its way from the reader: its tensors in memory, or a tensor that the encoding thread reads in pieces.
struct LoadedUnit {
    unit: ReadUnit,
    /// Bytes of the tensors, at the start of `buffer`; 0 for a tensor in pieces.
    bytes: u64,
    buffer: Vec<u8>,
}

/// The encoding thread's ends of the channels to reader and writer.
struct Queues<'a, 's> {
    loaded: Receiver<Result<LoadedUnit, BundleError>>,
    /// Returns buffers to the reader.
    free: &'a Sender<Vec<u8>>,
    encoded: &'a Sender<Encoded<'s>>,
    budget: &'a ByteBudget,
    /// Set by the writer after a failed write.
    failed: &'a AtomicBool,
}

impl Job<'_> {
    /// Compresses a safetensors file or its rest. The shard is written, but may not be synced to disk before
    /// [`Job::commit_shard`].
    pub(super) fn compress_weights(
        &self,
        file: &SourceFile,
        header: &Header,
        header_bytes: &[u8],
        resumed: Option<ShardState>,
    ) -> Result<Written, BundleError> {
        let source = ShardSource { file, header, header_bytes, input: Input::open_same(&file.path, &file.stamp)? };
        let layout = self.layout(file, header, header_bytes)?;
        let (mut writer, mut state) = self.open_shard(&source, &layout, resumed)?;
        self.progress.advance(state.resumed_bytes);
        self.encode_rest(&source, &layout.decisions, &mut state, &mut writer)?;
        let ShardState { entries, sha, .. } = state;
        let sha256 = sha.map(files::hex);
        writer.put_rest(header_bytes, &source.input)?;
        let shard_header = writer.write_header(&layout.metadata, layout.reserved)?;
        source.input.check_unchanged()?;
        source.input.pass_attributes(&writer.file);

        let header_digest = Digest::of(header_bytes);
        let entry = WeightsFile {
            name: file.name.clone(),
            size: file.bytes,
            digest: WeightsFile::digest_of(header_digest, &entries),
            sha256,
            header_bytes: header_bytes.len() as u64,
            header_digest,
            shard_size: writer.at,
            shard_header_bytes: shard_header.len() as u64,
            shard_header_digest: Digest::of(&shard_header),
            tensors: entries,
        };
        let record = Record { options: self.fingerprint(), file: entry };
        self.progress.advance(header_bytes.len() as u64);
        let journal_path = self.stage.journal(&file.name);
        Ok(Written { file: writer.file, temp_path: writer.path, journal_path, record })
    }

    /// Opens shard and journal, after the prefix that an interrupted run left if there is one.
    fn open_shard(
        &self,
        source: &ShardSource<'_>,
        layout: &Layout,
        resumed: Option<ShardState>,
    ) -> Result<(ShardWriter<'_>, ShardState), BundleError> {
        let &ShardSource { file, header, header_bytes, ref input } = source;
        let (temp_path, journal_path) = (self.stage.growing(&file.name), self.stage.journal(&file.name));
        let is_new = resumed.is_none();
        let state = resumed.unwrap_or_else(|| ShardState::new(header_bytes, self.options.sha256));
        let written = state.entries.iter().zip(&header.tensors).flat_map(|(entry, info)| stored_contents(entry, info));
        let in_order = written.map(|(bytes, _)| bytes).filter(|&bytes| place(bytes) == Place::InOrder);
        let end = layout.reserved + in_order.sum::<u64>();
        let shard = if is_new { files::create(&temp_path) } else { files::reopen(&temp_path, end) };
        let shard = shard.map_err(self.stage.write_error(&temp_path))?;
        let journal = self.begin_journal(&journal_path, &self.journal_head(file, header_bytes), &state.entries)?;
        let mut writer = ShardWriter::new(shard, temp_path, self.stage, layout.reserved, journal);
        for ((entry, info), decision) in state.entries.iter().zip(&header.tensors).zip(&layout.decisions) {
            self.take_over(&mut writer, file, (entry, info, decision), input)?;
        }
        Ok((writer, state))
    }

    /// Encodes the tensors after those of `state` and adds them to it, and writes them except for the deferred entries.
    fn encode_rest(
        &self,
        source: &ShardSource<'_>,
        decisions: &[Decision],
        state: &mut ShardState,
        writer: &mut ShardWriter<'_>,
    ) -> Result<(), BundleError> {
        let budget = ByteBudget::new(self.options.ram_bytes);
        let held_per_byte = self.held_per_byte();
        let failed = AtomicBool::new(false);
        let (encoded, to_write) = mpsc::channel::<Encoded<'_>>();
        let tensors = source.header.tensors.iter().zip(decisions);
        let tensors = tensors.map(|(t, d)| (t.bytes, d.choice.grid().is_none()));
        let remaining = read_units_from(state.entries.len(), tensors, self.options.ram_bytes);
        thread::scope(|scope| {
            let (budget, failed) = (&budget, &failed);
            let writing = spawn(scope, move || write_all(to_write, writer, &source.input, budget, failed))?;
            // The next unit is read while this one is encoded; each has one of two buffers.
            let (free, buffers) = mpsc::channel::<Vec<u8>>();
            for _ in 0..2 {
                // The receiver still exists.
                _ = free.send(Vec::new());
            }
            let (filled, loaded) = mpsc::sync_channel(0);
            let reading = spawn(scope, move || read_all(source, remaining, (budget, held_per_byte), buffers, filled))?;
            let queues = Queues { loaded, free: &free, encoded: &encoded, budget, failed };
            let result = self.encode_all(source, decisions, state, queues);
            // Ends the writer, which then releases the budget for a reader that waits.
            drop(encoded);
            let written = join(writing);
            // Wakes a reader that waits for a buffer.
            drop(free);
            join(reading);
            result?;
            written
        })
    }

    /// Encodes what the reader reads, until all is read or the writer has failed or panicked.
    fn encode_all<'s>(
        &self,
        source: &ShardSource<'s>,
        decisions: &[Decision],
        state: &mut ShardState,
        queues: Queues<'_, 's>,
    ) -> Result<(), BundleError> {
        for loaded in queues.loaded {
            let loaded = loaded?;
            self.check_cancelled()?;
            if queues.failed.load(Ordering::Relaxed) {
                break;
            }
            let encoded = self.encode_unit(source, decisions, &loaded, state.sha.as_mut())?;
            // The reader may have ended, because nothing is left to read.
            _ = queues.free.send(loaded.buffer);
            let held_bytes: u64 = encoded.iter().map(|e| e.held_bytes).sum();
            queues.budget.release(loaded.bytes.saturating_mul(self.held_per_byte()).saturating_sub(held_bytes));
            for encoded in encoded {
                state.entries.push(encoded.entry.clone());
                if queues.encoded.send(encoded).is_err() {
                    // The writer has panicked, which resumes where it is joined.
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Encodes the tensors of a unit in parallel, and at the same time hashes them in the file's order.
    ///
    /// The SHA-256 is computed from the buffers that are encoded, not by a second read, so a file that changes
    /// meanwhile cannot get a digest of other bytes.
    fn encode_unit<'s>(
        &self,
        source: &ShardSource<'s>,
        decisions: &[Decision],
        loaded: &LoadedUnit,
        sha: Option<&mut Sha256>,
    ) -> Result<Vec<Encoded<'s>>, BundleError> {
        let range = match &loaded.unit {
            &ReadUnit::Pieces(index) => {
                let (info, decision) = (&source.header.tensors[index], &decisions[index]);
                return Ok(vec![self.stream_raw_tensor(&source.input, info, decision, sha)?]);
            }
            ReadUnit::Batch(range) => range.clone(),
        };
        let infos = &source.header.tensors[range.clone()];
        let first = infos[0].offset;
        let encode = || {
            let tensors = infos.par_iter().zip(&decisions[range]);
            tensors
                .map(|(info, decision)| {
                    let at = (info.offset - first) as usize;
                    self.encode(source.file, &loaded.buffer[at..at + info.bytes as usize], info, decision)
                })
                .collect::<Result<Vec<_>, _>>()
        };
        let hash = || sha.map(|sha| sha.update(&loaded.buffer[..loaded.bytes as usize]));
        rayon::join(encode, hash).0
    }

    /// Prepares a large raw tensor: its digest is computed now, its bytes are read again when it is written.
    fn stream_raw_tensor<'a>(
        &self,
        input: &Input,
        info: &'a TensorInfo,
        decision: &Decision,
        sha: Option<&mut Sha256>,
    ) -> Result<Encoded<'a>, BundleError> {
        self.progress.tensor(&info.name);
        let digest = self.hash_tensor(input, info, sha)?;
        let entry = entry(info, decision, &decision.choice, digest, Vec::new());
        Ok(Encoded { info, entry, stored: Stored::Later, held_bytes: 0 })
    }

    fn encode<'a>(
        &self,
        file: &SourceFile,
        bytes: &[u8],
        info: &'a TensorInfo,
        decision: &Decision,
    ) -> Result<Encoded<'a>, BundleError> {
        self.progress.tensor(&info.name);
        let (digest, choice, stored) =
            encode_tensor(bytes, info.dtype, decision.choice.clone(), self.options, self.encoder).map_err(
                |source| BundleError::Encoder { file: file.name.clone(), tensor: info.name.clone(), source },
            )?;
        let (choice, stored, base) = self.or_delta(&file.name, bytes, (info, decision), (choice, stored))?;
        let (grid, coded): (_, Vec<(Section, &[u8])>) = match &stored {
            Stored::Coded(tensor) => (tensor.grid(), tensor.sections().collect()),
            _ => (None, Vec::new()),
        };
        let sections: Vec<SectionEntry> = coded
            .into_par_iter()
            .map(|(name, bytes)| {
                let blocks = grid.filter(|_| name == Section::PACKED).and_then(Blocks::of);
                let blocks = blocks.map_or_else(Vec::new, |blocks| blocks.digests(bytes));
                SectionEntry { name, bytes: bytes.len() as u64, digest: Digest::of(bytes), blocks }
            })
            .collect();
        let held_bytes = if sections.is_empty() { info.bytes } else { sections.iter().map(|s| s.bytes).sum::<u64>() };
        let entry = TensorEntry { base, ..entry(info, decision, &choice, digest, sections) };
        self.progress.advance(info.bytes);
        Ok(Encoded { info, entry, stored, held_bytes })
    }

    /// Bytes held per byte of a tensor: the source and its encoding, which is not larger; with a base, also the
    /// differences and their encoding.
    fn held_per_byte(&self) -> u64 {
        if self.base.is_some() { 4 } else { 2 }
    }

    /// Stores a tensor as differences from the base's tensor if that is smaller than `own`. Returns the digest of the
    /// base's tensor in that case.
    fn or_delta(
        &self,
        file: &str,
        bytes: &[u8],
        (info, decision): (&TensorInfo, &Decision),
        own: (EncodingChoice, Stored),
    ) -> Result<(EncodingChoice, Stored, Option<Digest>), BundleError> {
        let find = |base: &Base| base.find(file, &info.name, info.dtype, &info.shape);
        let (choice, stored) = own;
        // What is raw by request, by type or by shape stays raw.
        let floats = Float::of(info.dtype).zip(decision.choice.grid());
        let Some(((float, grid), (base, found))) = floats.zip(self.base.and_then(|base| Some((base, find(base)?))))
        else {
            return Ok((choice, stored, None));
        };
        let mut differences = files::buffer(info.bytes, base.path())?;
        let digest = base.read(found, &mut differences)?;
        delta::subtract(float, bytes, &mut differences);
        let survey = Survey { histogram: Histogram::default(), digest };
        let delta = FloatMatrix::new(float, &differences, grid.rows(), grid.cols())
            .map_err(NotEncodable::from)
            .and_then(|matrix| StoredTensor::encode(EncodingId::PLANES, matrix, &survey, self.options.code_limit));
        let own_bytes = match &stored {
            Stored::Coded(tensor) => tensor.stored_bytes(),
            _ => info.bytes,
        };
        match delta {
            Ok(tensor) if tensor.stored_bytes() < own_bytes => {
                Ok((EncodingChoice::of(EncodingId::PLANES, grid), Stored::Coded(tensor), Some(digest)))
            }
            _ => Ok((choice, stored, None)),
        }
    }
}

/// The reader thread: fills free buffers, as far as the budget admits.
fn read_all(
    source: &ShardSource<'_>,
    remaining: Vec<ReadUnit>,
    (budget, held_per_byte): (&ByteBudget, u64),
    buffers: Receiver<Vec<u8>>,
    filled: SyncSender<Result<LoadedUnit, BundleError>>,
) {
    let tensors = &source.header.tensors;
    for unit in remaining {
        let bytes = match &unit {
            ReadUnit::Batch(batch) => tensors[batch.clone()].iter().map(|t| t.bytes).sum::<u64>(),
            ReadUnit::Pieces(_) => 0,
        };
        budget.acquire(bytes.saturating_mul(held_per_byte));
        let Ok(mut buffer) = buffers.recv() else { break };
        let result = match &unit {
            ReadUnit::Batch(batch) => fill(&mut buffer, &source.input, &tensors[batch.start], bytes, &source.file.path),
            ReadUnit::Pieces(_) => Ok(()),
        };
        if filled.send(result.map(|()| LoadedUnit { unit, bytes, buffer })).is_err() {
            break;
        }
    }
}

/// The writer thread: writes and journals tensors in the order in which they arrive.
fn write_all(
    to_write: Receiver<Encoded<'_>>,
    writer: &mut ShardWriter<'_>,
    input: &Input,
    budget: &ByteBudget,
    failed: &AtomicBool,
) -> Result<(), BundleError> {
    // Also if this thread panics: the bytes that it has not released would keep the reader waiting.
    let _releases_all = budget.release_all_on_drop();
    let mut result = Ok(());
    // After a failure the rest is still received; otherwise the reader would wait for the budget forever.
    for encoded in to_write {
        panic_fault("writer");
        if result.is_ok() {
            result = writer.put(&encoded, input).and_then(|()| {
                failpoint("part-written");
                writer.journal_entry(&encoded.entry)
            });
            failed.store(result.is_err(), Ordering::Relaxed);
        }
        let held_bytes = encoded.held_bytes;
        drop(encoded);
        budget.release(held_bytes);
    }
    result
}

/// Reads consecutive tensors of `bytes` bytes in all into the start of a buffer.
fn fill(buffer: &mut Vec<u8>, input: &Input, first: &TensorInfo, bytes: u64, path: &Path) -> Result<(), BundleError> {
    if (buffer.len() as u64) < bytes {
        // Drop the old buffer first: both together could exceed the memory limit.
        drop(std::mem::take(buffer));
        *buffer = files::buffer(bytes, path)?;
    }
    input.read_at(first.offset, &mut buffer[..bytes as usize])
}

fn entry(
    info: &TensorInfo,
    decision: &Decision,
    choice: &EncodingChoice,
    digest: Digest,
    sections: Vec<SectionEntry>,
) -> TensorEntry {
    TensorEntry {
        name: info.name.clone(),
        dtype: info.dtype,
        shape: info.shape.clone(),
        role: decision.role,
        layer: decision.layer,
        encoding: choice.encoding(),
        reason: choice.reason(),
        rows: choice.grid().map(|grid| grid.rows()),
        cols: choice.grid().map(|grid| grid.cols()),
        digest,
        base: None,
        sections,
    }
}
