//! Encodes the tensors of a file, while earlier ones are written and later ones are read.
//!
//! ```text
//! reader thread --units--> this thread --rayon tasks: encode--> put in order --tensors--> writer thread --> shard
//! ```
//! As many units are in flight as the [`ByteBudget`] admits: it bounds the bytes between reading and writing to
//! `ram_bytes`.

use std::{
    collections::BTreeMap,
    mem,
    ops::Range,
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender, TryRecvError},
    },
    thread,
    time::Duration,
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
        BundleError, Trace,
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

/// A unit on its way from the reader: its tensors in memory, or a tensor that is read in pieces. Its buffer returns to
/// the budget.
struct LoadedUnit<'a> {
    unit: ReadUnit,
    /// Bytes of the tensors, at the start of `buffer`; 0 for a tensor in pieces.
    bytes: u64,
    buffer: Vec<u8>,
    budget: &'a ByteBudget,
}

impl LoadedUnit<'_> {
    fn tensors(&self) -> &[u8] {
        &self.buffer[..self.bytes as usize]
    }
}

impl Drop for LoadedUnit<'_> {
    fn drop(&mut self) {
        if !self.buffer.is_empty() {
            self.budget.give_back(mem::take(&mut self.buffer));
        }
    }
}

/// The encoding thread's ends of the channels to reader and writer.
struct Queues<'a, 'b, 's> {
    loaded: Receiver<Result<LoadedUnit<'b>, BundleError>>,
    encoded: &'a Sender<Encoded<'s>>,
    budget: &'b ByteBudget,
    /// Set by the writer after a failed write.
    failed: &'a AtomicBool,
}

/// Passes the tensors of units to the writer in the order of the file, whichever unit is encoded first.
struct InOrder<'a, 's> {
    /// The index of the next unit to pass on.
    next: usize,
    /// Later units that are encoded.
    waiting: BTreeMap<usize, Vec<Encoded<'s>>>,
    entries: &'a mut Vec<TensorEntry>,
    encoded: &'a Sender<Encoded<'s>>,
    /// The first unit in the file that failed.
    failed: Option<(usize, BundleError)>,
}

impl<'s> InOrder<'_, 's> {
    /// Adds a unit. Returns whether more units are useful.
    fn add(&mut self, index: usize, result: Result<Vec<Encoded<'s>>, BundleError>) -> bool {
        match result {
            Ok(tensors) => _ = self.waiting.insert(index, tensors),
            Err(error) if self.failed.as_ref().is_none_or(|(first, _)| index < *first) => {
                self.failed = Some((index, error));
            }
            Err(_) => {}
        }
        while let Some(tensors) = self.waiting.remove(&self.next) {
            self.next += 1;
            for encoded in tensors {
                self.entries.push(encoded.entry.clone());
                if self.encoded.send(encoded).is_err() {
                    // The writer has panicked, which resumes where it is joined.
                    return false;
                }
            }
        }
        self.failed.is_none()
    }
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
            let writing =
                spawn(scope, move || write_all(to_write, writer, &source.input, (budget, failed, self.trace)))?;
            // One unit waits while the next is read, as far as the budget admits.
            let (filled, loaded) = mpsc::sync_channel(1);
            let reading =
                spawn(scope, move || read_all(source, remaining, (budget, held_per_byte, self.trace), filled))?;
            let queues = Queues { loaded, encoded: &encoded, budget, failed };
            let result = self.encode_all(source, decisions, state, queues);
            // Ends the writer, which then releases the budget for a reader that waits.
            drop(encoded);
            let written = join(writing);
            join(reading);
            result?;
            written
        })
    }

    /// Encodes what the reader reads, until all is read or a unit, the writer or `progress` ends the work.
    fn encode_all<'s>(
        &self,
        source: &ShardSource<'s>,
        decisions: &[Decision],
        state: &mut ShardState,
        queues: Queues<'_, '_, 's>,
    ) -> Result<(), BundleError> {
        let Queues { loaded, encoded, budget, failed } = queues;
        let ShardState { entries, sha, .. } = state;
        let order = Mutex::new(InOrder { next: 0, waiting: BTreeMap::new(), entries, encoded, failed: None });
        let stop = AtomicBool::new(false);
        let add = |index, result: Result<Vec<Encoded<'s>>, BundleError>| {
            let more = order.lock().unwrap_or_else(PoisonError::into_inner).add(index, result);
            stop.fetch_or(!more, Ordering::Relaxed);
        };
        let received = rayon::in_place_scope(|tasks| {
            let (mut index, add, stop) = (0, &add, &stop);
            while let Some(loaded) = next_unit(&loaded, stop) {
                let unit = Arc::new(loaded?);
                self.check_cancelled()?;
                if failed.load(Ordering::Relaxed) {
                    break;
                }
                match unit.unit.clone() {
                    ReadUnit::Pieces(at) => {
                        let (info, decision) = (&source.header.tensors[at], &decisions[at]);
                        let tensor = self.stream_raw_tensor(&source.input, info, decision, sha.as_mut())?;
                        add(index, Ok(vec![tensor]));
                    }
                    ReadUnit::Batch(range) => {
                        let encoding = unit.clone();
                        tasks.spawn(move |_| {
                            let _stops = StopOnPanic(stop);
                            let result = self.encode_batch(source, decisions, range, encoding.tensors());
                            let held_bytes = result.iter().flatten().map(|encoded| encoded.held_bytes).sum();
                            let reserved = encoding.bytes.saturating_mul(self.held_per_byte() - 1);
                            drop(encoding);
                            budget.release(reserved.saturating_sub(held_bytes));
                            add(index, result);
                        });
                        // From the bytes that are encoded, not by a second read, so a file that changes meanwhile
                        // cannot get a digest of other bytes.
                        if let Some(sha) = sha.as_mut() {
                            sha.update(unit.tensors());
                        }
                    }
                }
                index += 1;
            }
            Ok(())
        });
        let InOrder { failed, .. } = order.into_inner().unwrap_or_else(PoisonError::into_inner);
        failed.map_or(received, |(_, error)| Err(error))
    }

    /// Encodes consecutive tensors in parallel.
    fn encode_batch<'s>(
        &self,
        source: &ShardSource<'s>,
        decisions: &[Decision],
        range: Range<usize>,
        bytes: &[u8],
    ) -> Result<Vec<Encoded<'s>>, BundleError> {
        let infos = &source.header.tensors[range.clone()];
        let first = infos[0].offset;
        let tensors = infos.par_iter().zip(&decisions[range]);
        tensors
            .map(|(info, decision)| {
                let at = (info.offset - first) as usize;
                self.encode(source.file, &bytes[at..at + info.bytes as usize], info, decision)
            })
            .collect()
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
        let encode = || encode_tensor(bytes, info.dtype, decision.choice.clone(), self.options, self.encoder);
        let (digest, choice, stored) = self
            .trace
            .time("encode", info.bytes, encode)
            .map_err(|source| BundleError::Encoder { file: file.name.clone(), tensor: info.name.clone(), source })?;
        let (choice, stored, base) = self.or_delta(&file.name, bytes, (info, decision), (choice, stored))?;
        let (grid, coded): (_, Vec<(Section, &[u8])>) = match &stored {
            Stored::Coded(tensor) => (tensor.grid(), tensor.sections().collect()),
            _ => (None, Vec::new()),
        };
        let section_bytes = coded.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        let digests = || {
            let sections = coded.into_par_iter().map(|(name, bytes)| {
                let blocks = grid.filter(|_| name == Section::PACKED).and_then(Blocks::of);
                let blocks = blocks.map_or_else(Vec::new, |blocks| blocks.digests(bytes));
                SectionEntry { name, bytes: bytes.len() as u64, digest: Digest::of(bytes), blocks }
            });
            sections.collect()
        };
        let sections: Vec<SectionEntry> = self.trace.time("digest", section_bytes, digests);
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

/// Ends the work if it is dropped by a panic: units after the one that panicked would wait for it.
struct StopOnPanic<'a>(&'a AtomicBool);

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        self.0.fetch_or(thread::panicking(), Ordering::Relaxed);
    }
}

/// Waits for the next unit, and encodes others meanwhile. `None` at the end, or after a failure.
fn next_unit<T>(loaded: &Receiver<T>, stop: &AtomicBool) -> Option<T> {
    /// How long this thread waits before it looks for work again.
    const PAUSE: Duration = Duration::from_millis(1);
    while !stop.load(Ordering::Relaxed) {
        match loaded.try_recv() {
            Ok(unit) => return Some(unit),
            Err(TryRecvError::Disconnected) => return None,
            Err(TryRecvError::Empty) => {}
        }
        if matches!(rayon::yield_now(), Some(rayon::Yield::Executed)) {
            continue;
        }
        match loaded.recv_timeout(PAUSE) {
            Ok(unit) => return Some(unit),
            Err(RecvTimeoutError::Disconnected) => return None,
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
    None
}

/// The reader thread: fills buffers, as far as the budget admits.
fn read_all<'a>(
    source: &ShardSource<'_>,
    remaining: Vec<ReadUnit>,
    (budget, held_per_byte, trace): (&'a ByteBudget, u64, &Trace),
    filled: SyncSender<Result<LoadedUnit<'a>, BundleError>>,
) {
    let tensors = &source.header.tensors;
    for unit in remaining {
        let loaded = match &unit {
            ReadUnit::Pieces(_) => Ok(LoadedUnit { unit, bytes: 0, buffer: Vec::new(), budget }),
            ReadUnit::Batch(batch) => {
                let (first, bytes) = (&tensors[batch.start], tensors[batch.clone()].iter().map(|t| t.bytes).sum());
                let mut buffer = budget.acquire_buffer(bytes, bytes.saturating_mul(held_per_byte - 1));
                let fill = || fill(&mut buffer, &source.input, first, bytes, &source.file.path);
                let read = trace.time("read", bytes, fill);
                read.map(|()| LoadedUnit { unit, bytes, buffer, budget })
            }
        };
        if filled.send(loaded).is_err() {
            break;
        }
    }
}

/// The writer thread: writes and journals tensors in the order in which they arrive.
fn write_all(
    to_write: Receiver<Encoded<'_>>,
    writer: &mut ShardWriter<'_>,
    input: &Input,
    (budget, failed, trace): (&ByteBudget, &AtomicBool, &Trace),
) -> Result<(), BundleError> {
    // Also if this thread panics: the bytes that it has not released would keep the reader waiting.
    let _releases_all = budget.release_all_on_drop();
    let mut result = Ok(());
    // After a failure the rest is still received; otherwise the reader would wait for the budget forever.
    for encoded in to_write {
        panic_fault("writer");
        if result.is_ok() {
            let write = || writer.put(&encoded, input);
            result = trace.time("write", encoded.held_bytes, write).and_then(|()| {
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

/// Reads consecutive tensors of `bytes` bytes in all into the start of a buffer, which is replaced if it is too small.
fn fill(buffer: &mut Vec<u8>, input: &Input, first: &TensorInfo, bytes: u64, path: &Path) -> Result<(), BundleError> {
    if (buffer.len() as u64) < bytes {
        *buffer = files::buffer(bytes, path)?;
    }
    input.read_at_by_threads(first.offset, &mut buffer[..bytes as usize])
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
