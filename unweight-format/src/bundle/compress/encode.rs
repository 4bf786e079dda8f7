//! Encodes the tensors of a file, while the previous batch is written and the next one is read.
//!
//! ```text
//! reader thread --batches, two buffers--> this thread: rayon encodes --tensors, in order--> writer thread --> shard
//! ```
//! A [`Gate`] bounds the bytes between reading and writing to `ram_bytes`.

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
    journal::{Kept, Record, stored_parts},
    shard_writer::{ALIGN, Deferred, Layout, Part, ShardWriter, Written},
    tensor::{Encoded, Stored, encode_tensor},
};
use crate::{
    Digest, Section,
    bundle::{
        BundleError,
        blocks::Blocks,
        files::{self, Input},
        manifest::{SOURCE_HEADER, SectionEntry, TensorEntry, WeightsFile},
        pipeline::{Gate, Work, batches_from, join, spawn},
        plan::{Decision, EncodingChoice},
        source::SourceFile,
    },
    failpoint::failpoint,
    safetensors::{Dtype, Header, TensorInfo},
};

/// An open safetensors file of the source.
struct ShardSource<'a> {
    file: &'a SourceFile,
    header: &'a Header,
    /// The bytes of length and header.
    header_bytes: &'a [u8],
    input: Input,
}

/// Consecutive tensors that were read together, or a tensor that will be read in pieces.
struct Batch {
    work: Work,
    /// Bytes of the tensors, at the start of `buffer`; 0 for a tensor in pieces.
    bytes: u64,
    buffer: Vec<u8>,
}

/// The encoding thread's ends of the channels to reader and writer.
struct Queues<'a, 's> {
    batches: Receiver<Result<Batch, BundleError>>,
    /// Returns buffers to the reader.
    free: &'a Sender<Vec<u8>>,
    encoded: &'a Sender<Encoded<'s>>,
    gate: &'a Gate,
    /// Set by the writer after a failed write.
    failed: &'a AtomicBool,
}

impl Job<'_> {
    /// Compresses a safetensors file or its rest. The shard is written, but may not be synced to disk before
    /// [`Job::commit_shard`].
    pub(super) fn weights(
        &self,
        file: &SourceFile,
        header: &Header,
        header_bytes: &[u8],
        kept: Option<Kept>,
    ) -> Result<Written, BundleError> {
        let source = ShardSource { file, header, header_bytes, input: Input::open_same(&file.path, &file.stamp)? };
        let layout = self.layout(file, header, header_bytes)?;
        let (mut writer, mut kept, begun) = self.begin(&source, &layout, kept)?;
        self.progress.advance(kept.source_bytes);
        let deferred = self.encode_rest(&source, &layout.decisions, &mut kept, &mut writer, begun)?;
        let Kept { entries, sha, .. } = kept;
        let sha256 = sha.map(files::hex);
        writer.put_deferred(deferred, &source.input)?;
        writer.write(header_bytes)?;
        let header_len = header_bytes.len();
        writer.parts.push(Part::new(SOURCE_HEADER.into(), Dtype::U8, vec![header_len], header_len as u64));
        let shard_header = writer.finish(&layout.metadata, layout.reserved)?;
        source.input.check_unchanged()?;
        source.input.pass_attributes(&writer.file);

        let header_digest = Digest::of(header_bytes);
        let entry = WeightsFile {
            name: file.name.clone(),
            size: file.bytes,
            digest: WeightsFile::digest_of(header_digest, &entries),
            sha256,
            header_bytes: header_len as u64,
            header_digest,
            shard_size: writer.at,
            shard_header_bytes: shard_header.len() as u64,
            shard_header_digest: Digest::of(&shard_header),
            tensors: entries,
        };
        let record = Record { options: self.fingerprint(), file: entry };
        self.progress.advance(header_len as u64);
        Ok(Written { file: writer.file, work: writer.path, journal: self.stage.journal(&file.name), record })
    }

    /// Opens shard and journal after the part that an interrupted run wrote. Returns the writer, what is kept, and the
    /// kept parts that must be written at the shard's end.
    fn begin(
        &self,
        source: &ShardSource<'_>,
        layout: &Layout,
        kept: Option<Kept>,
    ) -> Result<(ShardWriter<'_>, Kept, Vec<Deferred>), BundleError> {
        let &ShardSource { file, header, header_bytes, ref input } = source;
        let (work, journal) = (self.stage.growing(&file.name), self.stage.journal(&file.name));
        let is_new = kept.is_none();
        // A single hash over the bytes that are encoded, in the order of the file, so it cannot cover other bytes.
        let kept = kept.unwrap_or_else(|| {
            let sha = self.options.sha256.then(|| Sha256::new_with_prefix(header_bytes));
            Kept { entries: Vec::new(), sha, source_bytes: 0 }
        });
        let stored: u64 = kept
            .entries
            .iter()
            .zip(&header.tensors)
            .flat_map(|(entry, info)| stored_parts(entry, info))
            .fold(layout.reserved, |sum, (bytes, _)| sum + if bytes.is_multiple_of(ALIGN) { bytes } else { 0 });
        let shard = if is_new { files::create(&work) } else { files::reopen(&work, stored) };
        let shard = shard.map_err(self.stage.write_error(&work))?;
        let mut writer = ShardWriter {
            file: shard,
            path: work,
            stage: self.stage,
            at: layout.reserved,
            parts: Vec::new(),
            journal: self.begin_journal(&journal, &self.journal_head(file, header_bytes), &kept.entries)?,
        };
        let mut deferred = Vec::new();
        for ((entry, info), decision) in kept.entries.iter().zip(&header.tensors).zip(&layout.decisions) {
            self.take_over(&mut writer, file, (entry, info, decision), input, &mut deferred)?;
        }
        Ok((writer, kept, deferred))
    }

    /// Encodes and writes the tensors after those of `kept`, and adds their entries to it. Returns the parts that must
    /// be written at the shard's end.
    fn encode_rest(
        &self,
        source: &ShardSource<'_>,
        decisions: &[Decision],
        kept: &mut Kept,
        writer: &mut ShardWriter<'_>,
        begun: Vec<Deferred>,
    ) -> Result<Vec<Deferred>, BundleError> {
        let gate = Gate::new(self.options.ram_bytes);
        let failed = AtomicBool::new(false);
        let (encoded, to_write) = mpsc::channel::<Encoded<'_>>();
        let tensors = source.header.tensors.iter().zip(decisions);
        let tensors = tensors.map(|(t, d)| (t.bytes, d.choice.grid().is_none()));
        let all = batches_from(kept.entries.len(), tensors, self.options.ram_bytes);
        thread::scope(|scope| {
            let (gate, failed) = (&gate, &failed);
            let writing = spawn(scope, move || write_all(to_write, writer, begun, &source.input, gate, failed))?;
            // The next batch is read while this one is encoded; each has one of two buffers.
            let (free, buffers) = mpsc::channel::<Vec<u8>>();
            for _ in 0..2 {
                // The receiver still exists.
                _ = free.send(Vec::new());
            }
            let (read, batches) = mpsc::sync_channel(0);
            let reading = spawn(scope, move || read_all(source, all, gate, buffers, read))?;
            let queues = Queues { batches, free: &free, encoded: &encoded, gate, failed };
            let result = self.encode_all(source, decisions, kept, queues);
            // Wakes a reader that waits at the gate or for a buffer; it then finds its channels closed.
            drop(encoded);
            let deferred = join(writing);
            gate.open();
            drop(free);
            join(reading);
            result?;
            deferred
        })
    }

    /// Encodes what the reader reads, until all is read or the writer has failed.
    fn encode_all<'s>(
        &self,
        source: &ShardSource<'s>,
        decisions: &[Decision],
        kept: &mut Kept,
        queues: Queues<'_, 's>,
    ) -> Result<(), BundleError> {
        for batch in queues.batches {
            let batch = batch?;
            self.check_cancelled()?;
            if queues.failed.load(Ordering::Relaxed) {
                break;
            }
            let encoded = self.encode_batch(source, decisions, &batch, kept.sha.as_mut())?;
            // The reader may have ended, because nothing is left to read.
            _ = queues.free.send(batch.buffer);
            let held_bytes: u64 = encoded.iter().map(|e| e.held_bytes).sum();
            queues.gate.leave(batch.bytes.saturating_mul(2).saturating_sub(held_bytes));
            for encoded in encoded {
                kept.entries.push(encoded.entry.clone());
                if queues.encoded.send(encoded).is_err() {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Encodes the tensors of a batch in parallel, and at the same time hashes them in the file's order.
    fn encode_batch<'s>(
        &self,
        source: &ShardSource<'s>,
        decisions: &[Decision],
        batch: &Batch,
        sha: Option<&mut Sha256>,
    ) -> Result<Vec<Encoded<'s>>, BundleError> {
        let range = match &batch.work {
            &Work::Pieces(index) => {
                let (info, decision) = (&source.header.tensors[index], &decisions[index]);
                return Ok(vec![self.pieces(&source.input, info, decision, sha)?]);
            }
            Work::Batch(range) => range.clone(),
        };
        let infos = &source.header.tensors[range.clone()];
        let first = infos[0].offset;
        let encode = || {
            let tensors = infos.par_iter().zip(&decisions[range]);
            tensors
                .map(|(info, decision)| {
                    let at = (info.offset - first) as usize;
                    self.encode(source.file, &batch.buffer[at..at + info.bytes as usize], info, decision)
                })
                .collect::<Result<Vec<_>, _>>()
        };
        let hash = || sha.map(|sha| sha.update(&batch.buffer[..batch.bytes as usize]));
        rayon::join(encode, hash).0
    }

    /// Prepares a large raw tensor: its digest is computed now, its bytes are read again when it is written.
    fn pieces<'a>(
        &self,
        input: &Input,
        info: &'a TensorInfo,
        decision: &Decision,
        mut sha: Option<&mut Sha256>,
    ) -> Result<Encoded<'a>, BundleError> {
        self.progress.tensor(&info.name);
        let digest = input.stream(info.offset, info.bytes, |piece| {
            if let Some(sha) = &mut sha {
                sha.update(piece);
            }
            self.progress.advance(piece.len() as u64);
            self.check_cancelled()
        })?;
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
        let entry = entry(info, decision, &choice, digest, sections);
        self.progress.advance(info.bytes);
        Ok(Encoded { info, entry, stored, held_bytes })
    }
}

/// The reader thread: fills free buffers, as far as the gate admits.
fn read_all(
    source: &ShardSource<'_>,
    all: Vec<Work>,
    gate: &Gate,
    buffers: Receiver<Vec<u8>>,
    read: SyncSender<Result<Batch, BundleError>>,
) {
    let tensors = &source.header.tensors;
    for work in all {
        let bytes = match &work {
            Work::Batch(batch) => tensors[batch.clone()].iter().map(|t| t.bytes).sum::<u64>(),
            Work::Pieces(_) => 0,
        };
        // The source and its encoding, which is not larger.
        gate.enter(bytes.saturating_mul(2));
        let Ok(mut buffer) = buffers.recv() else { break };
        let filled = match &work {
            Work::Batch(batch) => fill(&mut buffer, &source.input, &tensors[batch.start], bytes, &source.file.path),
            Work::Pieces(_) => Ok(()),
        };
        if read.send(filled.map(|()| Batch { work, bytes, buffer })).is_err() {
            break;
        }
    }
}

/// The writer thread: writes and journals tensors in the order in which they arrive. Returns the parts that must be
/// written at the shard's end.
fn write_all(
    to_write: Receiver<Encoded<'_>>,
    writer: &mut ShardWriter<'_>,
    mut deferred: Vec<Deferred>,
    input: &Input,
    gate: &Gate,
    failed: &AtomicBool,
) -> Result<Vec<Deferred>, BundleError> {
    let mut result = Ok(());
    // After a failure the rest is still received; otherwise the reader would wait at the gate forever.
    for encoded in to_write {
        if result.is_ok() {
            result = writer.put(&encoded, &mut deferred, input).and_then(|()| {
                failpoint("part-written");
                writer.journal_entry(&encoded.entry)
            });
            failed.store(result.is_err(), Ordering::Relaxed);
        }
        let held_bytes = encoded.held_bytes;
        drop(encoded);
        gate.leave(held_bytes);
    }
    result.map(|()| deferred)
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
        sections,
    }
}
