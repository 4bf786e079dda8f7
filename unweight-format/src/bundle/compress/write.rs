//! The writer thread of a shard.

use std::{
    collections::HashMap,
    ops::Range,
    sync::{
        Arc,
        mpsc::{Receiver, Sender},
    },
};

use sha2::Sha256;

use super::{
    Job,
    check::Check,
    journal::{Record, ShardState, stored_contents},
    run::Run,
    shard_writer::{Place, ShardWriter, place},
    tensor::{Encoded, Stored},
    unit::ShardPlan,
};
use crate::{
    Digest, EncodingId,
    bundle::{
        BundleError, VerifyAfter,
        files::{self, Input},
        manifest::{TensorEntry, WeightsFile},
        pipeline::{RAW_WHOLE_MAX, ReadUnit, batch_bytes_max},
        shard::Shard,
    },
    failpoint::{failpoint, fault, panic_fault},
};

/// What a writer receives.
pub(super) enum Message<'s> {
    /// The next tensor of the file.
    Tensor(Encoded<'s>),
    /// All tensors are sent; with the hash of the file, if requested. Without this message, the run ends early.
    Finish(Option<Sha256>),
}

/// A shard that is being written.
pub(super) struct Writing<'s> {
    job: &'s Job<'s>,
    plan: &'s ShardPlan<'s>,
    input: Arc<Input>,
    writer: ShardWriter<'s>,
    /// The written tensors.
    entries: Vec<TensorEntry>,
    unchecked: Option<Unchecked>,
}

impl<'s> Writing<'s> {
    /// Opens shard and journal, after the prefix that an interrupted run left if there is one. Also returns the hash of
    /// that prefix.
    pub(super) fn open(
        job: &'s Job<'s>,
        plan: &'s ShardPlan<'s>,
        input: &Arc<Input>,
        resumed: Option<ShardState>,
        checks: Option<Sender<Check>>,
    ) -> Result<(Self, Option<Sha256>), BundleError> {
        let &ShardPlan { file, header, header_bytes, ref layout } = plan;
        let (temp_path, journal_path) = (job.stage.growing(&file.name), job.stage.journal(&file.name));
        let is_new = resumed.is_none();
        let state = resumed.unwrap_or_else(|| ShardState::new(header_bytes, job.options.sha256));
        let written = state.entries.iter().zip(&header.tensors).flat_map(|(entry, info)| stored_contents(entry, info));
        let in_order = written.map(|(bytes, _)| bytes).filter(|&bytes| place(bytes) == Place::InOrder);
        let end = layout.reserved + in_order.sum::<u64>();
        let shard = if is_new { files::create(&temp_path) } else { files::reopen(&temp_path, end) };
        let shard = shard.map_err(job.stage.write_error(&temp_path))?;
        let checks = checks.map(|checks| Unchecked::new(job, plan, checks)).transpose()?;
        let journal = job.begin_journal(&journal_path, &job.journal_head(file, header_bytes), &state.entries)?;
        let writer = ShardWriter::new(shard, temp_path, job.stage, layout.reserved, journal);
        let mut writing = Self { job, plan, input: input.clone(), writer, entries: Vec::new(), unchecked: checks };
        for ((entry, info), decision) in state.entries.into_iter().zip(&header.tensors).zip(&layout.decisions) {
            let take_over = |writer: &mut ShardWriter<'_>| job.take_over(writer, file, (&entry, info, decision), input);
            let ranges = writing.writer.ranges_of(take_over)?;
            writing.add(entry, ranges);
        }
        job.progress.advance(state.resumed_bytes);
        Ok((writing, state.sha))
    }

    /// Adds a written tensor. `ranges` are its parts, if all are written.
    fn add(&mut self, entry: TensorEntry, ranges: Option<Vec<Range<u64>>>) {
        if let (Some(unchecked), Some(ranges)) = (&mut self.unchecked, ranges) {
            unchecked.add(self.entries.len(), &entry, ranges);
        }
        self.entries.push(entry);
    }

    /// The writer thread: writes and journals tensors in the order in which they arrive. Returns the entry of the shard
    /// when it has its name.
    pub(super) fn write_all(mut self, messages: Receiver<Message<'_>>, shard: usize, run: &Run) -> Option<WeightsFile> {
        let _stops = run.stop_on_panic();
        let place = (shard, usize::MAX);
        let mut is_sound = true;
        // After a failure the rest is still received; otherwise the reader would wait for the budget forever.
        for message in messages {
            match message {
                Message::Tensor(encoded) => {
                    panic_fault("writer");
                    let held_bytes = encoded.held_bytes;
                    if is_sound && let Err(error) = self.write(encoded) {
                        is_sound = false;
                        run.fail(place, error);
                    }
                    run.budget.release(held_bytes);
                }
                Message::Finish(sha) if is_sound => {
                    return self.finish(sha).map_err(|error| run.fail(place, error)).ok();
                }
                Message::Finish(_) => {}
            }
        }
        None
    }

    /// Writes and journals a tensor.
    fn write(&mut self, encoded: Encoded<'_>) -> Result<(), BundleError> {
        let put = |writer: &mut ShardWriter<'_>| writer.put(&encoded, &self.input);
        let bytes = match &encoded.stored {
            Stored::Coded(tensor) => tensor.stored_bytes(),
            Stored::Raw(_) => encoded.info.bytes,
            Stored::Later => 0,
        };
        let ranges = self.job.trace.time("write", bytes, || self.writer.ranges_of(put))?;
        failpoint("part-written");
        self.writer.journal_entry(&encoded.entry)?;
        if fault("flip-written") {
            ranges.iter().flatten().for_each(|range| self.writer.flip(range.end - 1));
        }
        self.add(encoded.entry, ranges);
        Ok(())
    }

    /// Writes the end and the header of the shard, and gives it its name.
    fn finish(self, sha: Option<Sha256>) -> Result<WeightsFile, BundleError> {
        let Self { job, plan, input, mut writer, entries, unchecked } = self;
        let &ShardPlan { file, header_bytes, ref layout, .. } = plan;
        writer.put_rest(header_bytes, &input)?;
        let shard_header = writer.write_header(&layout.metadata, layout.reserved)?;
        input.check_unchanged()?;
        input.pass_attributes(&writer.file);
        let header_digest = Digest::of(header_bytes);
        let entry = WeightsFile {
            name: file.name.clone(),
            size: file.bytes,
            digest: WeightsFile::digest_of(header_digest, &entries),
            sha256: sha.map(files::hex),
            header_bytes: header_bytes.len() as u64,
            header_digest,
            shard_size: writer.at,
            shard_header_bytes: shard_header.len() as u64,
            shard_header_digest: Digest::of(&shard_header),
            tensors: entries,
        };
        job.progress.advance(header_bytes.len() as u64);
        let record = Record { options: job.fingerprint(), file: entry };
        job.commit_shard(&writer, &record)?;
        Ok(match unchecked {
            Some(unchecked) => unchecked.finish(record.file),
            None => record.file,
        })
    }
}

/// Written tensors on their way to the verification.
struct Unchecked {
    name: String,
    /// The shard, open for reading.
    input: Arc<Input>,
    checks: Sender<Check>,
    /// Tensors that are not passed on yet, and their original bytes.
    entries: Vec<TensorEntry>,
    ranges: Vec<Vec<Range<u64>>>,
    bytes: u64,
    bytes_max: u64,
    /// Whether tensors are passed on before the shard is finished: all, since a sample depends on the whole shard.
    at_once: bool,
    /// Where the tensors are that are or will be passed on, by index.
    passed: HashMap<usize, Vec<Range<u64>>>,
}

impl Unchecked {
    fn new(job: &Job<'_>, plan: &ShardPlan<'_>, checks: Sender<Check>) -> Result<Self, BundleError> {
        Ok(Self {
            name: plan.file.name.clone(),
            input: Arc::new(Input::open(&job.stage.growing(&plan.file.name))?),
            checks,
            entries: Vec::new(),
            ranges: Vec::new(),
            bytes: 0,
            bytes_max: batch_bytes_max(job.options.ram_bytes),
            at_once: job.options.verify == VerifyAfter::Full,
            passed: HashMap::new(),
        })
    }

    /// Adds a tensor. Several small ones are passed on together.
    fn add(&mut self, index: usize, entry: &TensorEntry, ranges: Vec<Range<u64>>) {
        if !self.at_once {
            return;
        }
        // Tensors of unknown size do not exist: the entry was made from a header that was checked.
        let bytes = entry.original_bytes().unwrap_or(0);
        let in_pieces = entry.encoding == EncodingId::RAW && bytes > RAW_WHOLE_MAX;
        if in_pieces || self.bytes.saturating_add(bytes) > self.bytes_max {
            self.pass_on();
        }
        self.passed.insert(index, ranges.clone());
        self.entries.push(entry.clone());
        self.ranges.push(ranges);
        self.bytes = self.bytes.saturating_add(bytes);
        if in_pieces {
            self.pass(ReadUnit::Pieces(0));
        }
    }

    fn pass_on(&mut self) {
        if !self.entries.is_empty() {
            self.pass(ReadUnit::Batch(0..self.entries.len()));
        }
    }

    fn pass(&mut self, unit: ReadUnit) {
        let (entries, ranges) = (std::mem::take(&mut self.entries), std::mem::take(&mut self.ranges));
        self.bytes = 0;
        let shard = Shard::of_written(&self.name, self.input.clone(), entries, ranges);
        // Without a receiver, the verification has panicked, which resumes where it is joined.
        _ = self.checks.send(Check::Written(shard, unit));
    }

    /// Passes on the rest and the finished shard.
    fn finish(mut self, file: WeightsFile) -> WeightsFile {
        self.pass_on();
        _ = self.checks.send(Check::Finished(file.clone(), self.passed));
        file
    }
}
