//! Compresses several shards at the same time: a file accepts bytes from one thread only, more slowly than they are
//! encoded.
//!
//! ```text
//! reader thread --units of some files, alternating--> this thread --rayon tasks: encode--> in order of each file
//!   --tensors--> a writer thread per shard --written tensors--> verifying thread --rayon tasks: read back, decode
//! ```
//! As many units are in flight as the [`ByteBudget`](crate::bundle::pipeline::ByteBudget) admits: it bounds the bytes
//! between reading and writing, and those of the verification, to `ram_bytes`.

use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender, TryRecvError},
    },
    thread::{self, ScopedJoinHandle},
    time::Duration,
};

use sha2::{Digest as _, Sha256};

use super::{
    Job,
    check::Check,
    journal::ShardState,
    run::Run,
    tensor::Encoded,
    unit::{LoadedUnit, ReadBuffer, ShardPlan},
    write::{Message, Writing},
};
use crate::bundle::{
    BundleError, EncoderMemory, VerifyAfter,
    files::{self, CHUNK, Input},
    manifest::WeightsFile,
    pipeline::{ReadUnit, alternate, help_until, join, ram_bytes, spawn},
};

/// The number of shards that are written at the same time.
const AT_ONCE: usize = 4;

/// Passes the tensors of units to the writer in the order of the file, whichever unit is encoded first.
struct InOrder<'s> {
    /// The index of the next unit to pass on, and the number of units.
    next: usize,
    total: usize,
    /// Later units that are encoded.
    waiting: BTreeMap<usize, Vec<Encoded<'s>>>,
    /// The hash of the file, if requested, once all of it is read.
    read: Option<Option<Sha256>>,
    writer: Sender<Message<'s>>,
}

impl<'s> InOrder<'s> {
    fn add(&mut self, index: usize, tensors: Vec<Encoded<'s>>) {
        self.waiting.insert(index, tensors);
        while let Some(tensors) = self.waiting.remove(&self.next) {
            self.next += 1;
            // Without a receiver, the writer has panicked, which resumes where it is joined.
            tensors.into_iter().for_each(|encoded| _ = self.writer.send(Message::Tensor(encoded)));
        }
        self.finish();
    }

    fn end(&mut self, sha: Option<Sha256>) {
        self.read = Some(sha);
        self.finish();
    }

    fn finish(&mut self) {
        if self.next == self.total
            && let Some(sha) = self.read.take()
        {
            _ = self.writer.send(Message::Finish(sha));
        }
    }
}

/// A shard whose units are being read.
struct OpenShard<'s> {
    order: Arc<Mutex<InOrder<'s>>>,
    sha: Option<Sha256>,
    /// Units that are not read yet.
    left: usize,
}

/// The shards of a run: those that are being read, and their writers.
struct Shards<'t, 'e, 's> {
    job: &'s Job<'s>,
    plans: &'s [ShardPlan<'s>],
    run: &'s Run,
    threads: &'t thread::Scope<'t, 'e>,
    /// What interrupted runs left of each shard.
    resumed: Vec<Option<ShardState>>,
    totals: Vec<usize>,
    checks: Option<Sender<Check>>,
    open: HashMap<usize, OpenShard<'s>>,
    writers: Vec<(usize, ScopedJoinHandle<'t, Option<WeightsFile>>)>,
}

impl<'e, 's: 'e> Shards<'_, 'e, 's> {
    /// Starts to encode a unit. The first one of a shard opens it.
    fn dispatch(&mut self, loaded: LoadedUnit<'s>, tasks: &rayon::Scope<'s>) -> Result<(), BundleError> {
        let (job, plans, run) = (self.job, self.plans, self.run);
        job.check_cancelled()?;
        let (shard, index) = (loaded.shard, loaded.index);
        if index == 0 {
            self.open(shard, &loaded.input)?;
        }
        let Some(opened) = self.open.get_mut(&shard) else { return Ok(()) };
        let order = opened.order.clone();
        let loaded = Arc::new(loaded);
        let encoding = loaded.clone();
        let encode = move |sha: Option<&mut Sha256>| {
            let _stops = run.stop_on_panic();
            let result = job.encode_unit(&plans[shard], &encoding, sha);
            let held_bytes = result.iter().flatten().map(|encoded| encoded.held_bytes).sum();
            let reserved = encoding.reserved;
            drop(encoding);
            run.budget.release(reserved.saturating_sub(held_bytes));
            match result {
                Ok(tensors) => order.lock().unwrap_or_else(PoisonError::into_inner).add(index, tensors),
                Err(error) => run.fail((shard, index), error),
            }
        };
        // The hash needs the bytes of a file in their order. They are those that are encoded, not read again, so a file
        // that changes meanwhile cannot get a hash of other bytes.
        match (&loaded.unit, &mut opened.sha) {
            (ReadUnit::Pieces(_), Some(sha)) => encode(Some(sha)),
            (_, sha) => {
                tasks.spawn(move |_| encode(None));
                if let Some(sha) = sha {
                    sha.update(loaded.tensors());
                }
            }
        }
        opened.left -= 1;
        if opened.left == 0
            && let Some(OpenShard { order, sha, .. }) = self.open.remove(&shard)
        {
            order.lock().unwrap_or_else(PoisonError::into_inner).end(sha);
        }
        Ok(())
    }

    /// Opens a shard and starts its writer.
    fn open(&mut self, shard: usize, input: &Arc<Input>) -> Result<(), BundleError> {
        let (job, run, plan) = (self.job, self.run, &self.plans[shard]);
        job.progress.file(&plan.file.name);
        let (writing, sha) = Writing::open(job, plan, input, self.resumed[shard].take(), self.checks.clone())?;
        let (writer, messages) = mpsc::channel();
        let thread = spawn(self.threads, move || writing.write_all(messages, shard, run))?;
        self.writers.push((shard, thread));
        let total = self.totals[shard];
        let order = InOrder { next: 0, total, waiting: BTreeMap::new(), read: None, writer };
        self.open.insert(shard, OpenShard { order: Arc::new(Mutex::new(order)), sha, left: total });
        Ok(())
    }
}

impl Job<'_> {
    /// Compresses these files, or their rest, and verifies them and the `finished` shards of an interrupted run.
    /// Returns the entries of the files, and the number of verified tensors.
    pub(super) fn compress_shards(
        &self,
        plans: &[ShardPlan<'_>],
        resumed: Vec<Option<ShardState>>,
        finished: &[WeightsFile],
    ) -> Result<(Vec<WeightsFile>, u64), BundleError> {
        let ram_bytes = ram_bytes(self.options.ram_bytes);
        let tensor_bytes = plans.iter().flat_map(|plan| &plan.header.tensors).map(|tensor| tensor.bytes).sum();
        let reserve = |memory: &dyn EncoderMemory| memory.reserve(ram_bytes, tensor_bytes);
        let run = Run::new(ram_bytes, self.encoder.memory().map_or(0, reserve));
        let begun = resumed.iter().map(|state| state.as_ref().map_or(0, |state| state.entries.len()));
        let units: Vec<_> =
            plans.iter().zip(begun).map(|(plan, begun)| plan.units(begun, self.options.ram_bytes)).collect();
        let totals = units.iter().map(Vec::len).collect();
        let order = alternate(units, AT_ONCE);
        let checker = self.checker();
        let (checks, to_check) = mpsc::channel();
        let mut made = rayon::in_place_scope(|tasks| {
            thread::scope(|threads| {
                let _stops = run.stop_on_panic();
                let (run, checker) = (&run, &checker);
                let (filled, loaded) = mpsc::sync_channel(1);
                let mut shards = Shards {
                    job: self,
                    plans,
                    run,
                    threads,
                    resumed,
                    totals,
                    checks: None,
                    open: HashMap::new(),
                    writers: Vec::new(),
                };
                let mut others = Vec::new();
                let encode = || -> Result<(), BundleError> {
                    if self.options.verify != VerifyAfter::None {
                        others.push(spawn(threads, move || checker.check_all(run, to_check, tasks))?);
                        // The receiver lives as long as a sender.
                        finished.iter().for_each(|file| _ = checks.send(Check::whole(file)));
                        shards.checks = Some(checks);
                    }
                    others.push(spawn(threads, move || self.read_all(plans, order, run, filled))?);
                    while let Some(unit) = next_unit(&loaded, run) {
                        shards.dispatch(unit, tasks)?;
                    }
                    Ok(())
                };
                if let Err(error) = encode() {
                    run.fail(Run::LAST, error);
                }
                drop(loaded);
                let Shards { writers, checks, open, .. } = shards;
                // Ends the writers, and after them the verification.
                drop((checks, open));
                let is_finished = || {
                    others.iter().all(ScopedJoinHandle::is_finished)
                        && writers.iter().all(|(_, writer)| writer.is_finished())
                };
                help_until(|| run.has_ended(is_finished()));
                others.into_iter().for_each(join);
                writers.into_iter().filter_map(|(shard, writer)| Some((shard, join(writer)?))).collect::<Vec<_>>()
            })
        });
        let verified_tensors = run.end()?;
        made.sort_by_key(|(shard, _)| *shard);
        Ok((made.into_iter().map(|(_, file)| file).collect(), verified_tensors))
    }

    /// The reader thread: fills buffers, as far as the budget admits.
    fn read_all<'s>(
        &self,
        plans: &[ShardPlan<'_>],
        order: Vec<(usize, ReadUnit)>,
        run: &'s Run,
        filled: SyncSender<LoadedUnit<'s>>,
    ) {
        let _stops = run.stop_on_panic();
        let mut left: HashMap<usize, usize> = HashMap::new();
        order.iter().for_each(|(shard, _)| *left.entry(*shard).or_default() += 1);
        // The open files, with the number of units read.
        let mut inputs: HashMap<usize, (Arc<Input>, usize)> = HashMap::new();
        for (shard, unit) in order {
            let plan = &plans[shard];
            let opened = match inputs.remove(&shard) {
                Some(opened) => Ok(opened),
                None => Input::open_same(&plan.file.path, &plan.file.stamp).map(|input| (Arc::new(input), 0)),
            };
            let loaded = opened.and_then(|(input, index)| {
                if index + 1 < left[&shard] {
                    inputs.insert(shard, (input.clone(), index + 1));
                }
                let mut loaded =
                    LoadedUnit { shard, index, input, unit, bytes: 0, buffer: ReadBuffer::EMPTY, reserved: 0, run };
                self.fill(plan, &mut loaded)?;
                Ok(loaded)
            });
            match loaded.map(|loaded| filled.send(loaded).is_ok()) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    run.fail((shard, usize::MAX), error);
                    break;
                }
            }
        }
    }

    /// Reads the tensors of a unit when there is memory for them and their encodings.
    fn fill(&self, plan: &ShardPlan<'_>, loaded: &mut LoadedUnit<'_>) -> Result<(), BundleError> {
        let ReadUnit::Batch(batch) = &loaded.unit else {
            loaded.reserved = CHUNK as u64;
            loaded.run.budget.acquire(loaded.reserved);
            return Ok(());
        };
        let tensors = &plan.header.tensors[batch.clone()];
        let Some(first) = tensors.first() else { return Ok(()) };
        let bytes = tensors.iter().map(|t| t.bytes).sum::<u64>();
        loaded.reserved = bytes.saturating_mul(self.held_per_byte() - 1);
        let budget = &loaded.run.budget;
        loaded.buffer = match self.encoder.memory().and_then(|memory| memory.buffer(bytes as usize)) {
            Some(buffer) => {
                budget.acquire(loaded.reserved);
                ReadBuffer::Encoder(buffer)
            }
            None => ReadBuffer::Run(budget.acquire_buffer(bytes, loaded.reserved)),
        };
        loaded.bytes = bytes;
        let path: &Path = &plan.file.path;
        self.trace.time("read", bytes, || {
            let to: &mut [u8] = match &mut loaded.buffer {
                ReadBuffer::Run(buffer) => {
                    if (buffer.len() as u64) < bytes {
                        *buffer = files::buffer(bytes, path)?;
                    }
                    buffer
                }
                ReadBuffer::Encoder(buffer) => buffer,
            };
            loaded.input.read_at_by_threads(first.offset, &mut to[..bytes as usize])
        })
    }
}

/// Waits for the next unit, and encodes others meanwhile. `None` at the end, or after a failure.
fn next_unit<T>(loaded: &Receiver<T>, run: &Run) -> Option<T> {
    /// How long this thread waits before it looks for work again.
    const PAUSE: Duration = Duration::from_millis(1);
    while !run.is_stopped() {
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
