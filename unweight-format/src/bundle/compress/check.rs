//! Verifies the weights of a new bundle: reads written bytes back, decodes them, and compares digests.
//!
//! What is verified when, if every tensor is:
//!
//! 1. As soon as the parts of a tensor are written, and while others are encoded: its stored bytes are read from the
//!    file and compared with their digests, decoded, and compared with the digest of the source.
//! 2. When the shard has its name: its header is read and must agree with the manifest's entry, and so must the
//!    source's header. Tensors that the header places elsewhere than where 1 read them, or whose parts end the shard,
//!    follow.
//!
//! A shard is only written forwards, and its header in front, so nothing overwrites what 1 has read. Everything is read
//! through the page cache: a disk that loses bytes later is found by `unweight verify`.

use std::{
    collections::{HashMap, HashSet},
    ops::Range,
    sync::{Arc, atomic::Ordering, mpsc::Receiver},
    thread,
};

use super::run::Run;
use crate::{
    bundle::{
        BundleError, Progress, Trace, VerifyAfter,
        base::Base,
        files::CHUNK,
        manifest::{FileEntry, WeightsFile},
        pipeline::{ReadUnit, help_until, join, ram_bytes, spawn},
        shard::Shard,
        stage::Stage,
    },
    encoding::ENCODINGS,
};

/// How the weights of a stage are verified.
#[derive(Clone, Copy)]
pub(crate) struct Checker<'a> {
    pub(crate) stage: &'a Stage,
    pub(crate) verify: VerifyAfter,
    pub(crate) base: Option<&'a Arc<Base>>,
    pub(crate) ram_bytes: Option<u64>,
    pub(crate) progress: &'a dyn Progress,
    pub(crate) trace: &'a Trace,
}

/// What can be verified now.
pub(super) enum Check {
    /// Written tensors of a shard that may be unfinished, which are read at once.
    Written(Shard, ReadUnit),
    /// A shard that has its name. The tensors listed with their ranges are verified.
    Finished(WeightsFile, HashMap<usize, Vec<Range<u64>>>),
}

impl Check {
    /// A finished shard of which nothing is verified.
    pub(super) fn whole(file: &WeightsFile) -> Self {
        Self::Finished(file.clone(), HashMap::new())
    }
}

impl<'a> Checker<'a> {
    /// The thread that starts the verification of what it receives, as far as memory permits, until all senders are
    /// dropped or the run ends early.
    pub(super) fn check_all<'s>(&'s self, run: &'s Run, checks: Receiver<Check>, tasks: &rayon::Scope<'s>)
    where
        'a: 's,
    {
        let _stops = run.stop_on_panic();
        for check in checks {
            if run.is_stopped() {
                continue;
            }
            let checked = match check {
                Check::Written(shard, unit) => {
                    let shard = Arc::new(shard.with_base(self.base.cloned()));
                    self.start(run, tasks, &shard, unit, &|_| true)
                }
                Check::Finished(file, verified) => self.check_shard(run, tasks, file, &verified),
            };
            if let Err(error) = checked {
                run.fail(Run::LAST, error);
            }
        }
    }

    /// Verifies what is left of a finished shard.
    fn check_shard<'s>(
        &'s self,
        run: &'s Run,
        tasks: &rayon::Scope<'s>,
        file: WeightsFile,
        verified: &HashMap<usize, Vec<Range<u64>>>,
    ) -> Result<(), BundleError> {
        let shard = Arc::new(Shard::open(&self.stage.tree(), file)?.with_base(self.base.cloned()));
        shard.source_header()?;
        let sample = (self.verify == VerifyAfter::Sample).then(|| sampled(&shard.file));
        let is_left = |index: usize| {
            sample.as_ref().is_none_or(|sample| sample.contains(&index))
                && verified.get(&index).is_none_or(|ranges| ranges != shard.ranges(index))
        };
        for unit in shard.read_units(self.ram_bytes) {
            if sample.is_some() {
                let skipped = unit.tensors().filter(|&index| !is_left(index));
                self.progress.advance(skipped.map(|index| shard.original_bytes(index)).sum());
            }
            self.start(run, tasks, &shard, unit, &is_left)?;
        }
        Ok(())
    }

    /// Starts a task that verifies the tensors of a unit that `is_left` selects, when memory for them is free.
    fn start<'s>(
        &'s self,
        run: &'s Run,
        tasks: &rayon::Scope<'s>,
        shard: &Arc<Shard>,
        unit: ReadUnit,
        is_left: &dyn Fn(usize) -> bool,
    ) -> Result<(), BundleError> {
        self.stage.check_cancelled(self.progress)?;
        let indices: Vec<usize> = unit.tensors().filter(|&index| is_left(index)).collect();
        if indices.is_empty() {
            return Ok(());
        }
        let shard = shard.clone();
        if let ReadUnit::Pieces(index) = unit {
            run.budget.acquire(CHUNK as u64);
            tasks.spawn(move |_| {
                let _stops = run.stop_on_panic();
                let checked = shard.stream(index, |piece| {
                    self.progress.advance(piece.len() as u64);
                    self.stage.check_cancelled(self.progress)
                });
                run.budget.release(CHUNK as u64);
                self.finish(run, checked, 1);
            });
            return Ok(());
        }
        let bytes: u64 = indices.iter().map(|&index| shard.original_bytes(index)).sum();
        let more = bytes.saturating_mul(shard.held_per_byte() - 1);
        let mut buffer = run.budget.acquire_buffer(bytes, more);
        tasks.spawn(move |_| {
            let _stops = run.stop_on_panic();
            let mut decode = || {
                shard.grow(&mut buffer, bytes)?;
                let out = &mut buffer[..bytes as usize];
                let decoded = shard.decode_batch(indices.iter().copied(), out, true, |_| ());
                decoded.into_iter().collect::<Result<(), _>>()
            };
            // After a failure the rest does not matter.
            let checked = if run.is_stopped() { Ok(()) } else { self.trace.time("verify", bytes, &mut decode) };
            run.budget.give_back(buffer);
            run.budget.release(more);
            self.progress.advance(bytes);
            self.finish(run, checked, indices.len() as u64);
        });
        Ok(())
    }

    fn finish(&self, run: &Run, checked: Result<(), BundleError>, tensors: u64) {
        match checked {
            Ok(()) => _ = run.verified_tensors.fetch_add(tensors, Ordering::Relaxed),
            Err(error) => run.fail(Run::LAST, error),
        }
    }

    /// Verifies the finished shards of these files, and returns the number of tensors that were decoded.
    pub(crate) fn check_finished(&self, files: &[FileEntry]) -> Result<u64, BundleError> {
        let run = Run::new(ram_bytes(self.ram_bytes), 0);
        if self.verify != VerifyAfter::None {
            let (sender, checks) = std::sync::mpsc::channel();
            for file in files.iter().filter_map(FileEntry::weights) {
                // The receiver still exists.
                _ = sender.send(Check::whole(file));
            }
            drop(sender);
            rayon::in_place_scope(|tasks| {
                thread::scope(|threads| {
                    let checking = spawn(threads, || self.check_all(&run, checks, tasks))?;
                    help_until(|| run.has_ended(checking.is_finished()));
                    join(checking);
                    Ok(())
                })
            })?;
        }
        run.end()
    }
}

/// The first and last tensor, the largest of each encoding, and every sixteenth.
fn sampled(file: &WeightsFile) -> HashSet<usize> {
    let mut chosen: HashSet<usize> = (0..file.tensors.len()).step_by(16).collect();
    chosen.extend(file.tensors.len().checked_sub(1));
    for encoding in ENCODINGS {
        let encoded = file.tensors.iter().enumerate().filter(|(_, t)| t.encoding == encoding.id());
        chosen.extend(encoded.max_by_key(|(_, t)| t.original_bytes()).map(|(index, _)| index));
    }
    chosen
}
