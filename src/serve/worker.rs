//! The thread that has the engine: it takes requests between steps, and hands out tokens.
//!
//! It never waits for a client. A request's channel holds all the tokens that it can be given, and a client that has
//! gone is noticed between steps.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Instant,
};

use tokio::sync::{mpsc, oneshot};
use unweight_engine::{AdmissionError, Event, Finish, Logprobs, Request, SeqId};

use super::{
    backend::{Backend, Limits},
    metrics::Metrics,
};

/// Requests that are on their way to the engine, which takes them between two steps.
const ON_THE_WAY: usize = 1024;

/// What server and worker both see.
#[derive(Debug)]
pub(super) struct Shared {
    /// What the engine was made for.
    pub limits: Limits,
    /// The maximum number of waiting sequences.
    pub max_waiting: usize,
    /// What is counted.
    pub metrics: Metrics,
    /// The engine has failed.
    pub failed: AtomicBool,
    /// No request is taken any more.
    pub stopping: AtomicBool,
    /// Whatever still runs is to end now.
    pub cut: AtomicBool,
}

impl Shared {
    /// Sequences that may be here at the same time.
    pub fn capacity(&self) -> usize {
        self.max_waiting.saturating_add(self.limits.max_batch as usize)
    }
}

/// Why a request is not taken.
#[derive(Debug)]
pub(super) enum SubmitError {
    /// By the engine.
    Admission(AdmissionError),
    /// As many sequences wait as may.
    Full,
    /// More sequences than ever may be here at the same time.
    TooMany { asked: usize, capacity: usize },
    /// See [`Lost`].
    Lost(Lost),
}

/// Why a sequence goes no further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lost {
    /// The engine has failed.
    Failed,
    /// The server ends.
    Stopping,
}

/// What is told of a sequence.
#[derive(Debug)]
pub(super) enum Told {
    /// A token, whether it was the last one, and its log probabilities.
    Token(u32, Option<Finish>, Option<Box<Logprobs>>),
    /// There will be no more.
    Lost(Lost),
}

/// A request of one or more sequences, which are taken together or not at all.
struct Job {
    requests: Vec<Request>,
    /// Of each sequence, set when no more tokens of it are needed.
    enough: Vec<Arc<AtomicBool>>,
    told: mpsc::Sender<(usize, Told)>,
    taken: oneshot::Sender<Result<(), SubmitError>>,
    arrived: Instant,
}

/// Sequences that were taken, as their owner sees them. Dropping it ends them.
#[derive(Debug)]
pub(super) struct Sequences {
    /// The index of the sequence in the request, and its event.
    pub told: mpsc::Receiver<(usize, Told)>,
    /// One flag per sequence: set it to end the sequence.
    pub enough: Vec<Arc<AtomicBool>>,
}

/// The way to the worker. It ends when the last one is gone.
#[derive(Clone, Debug)]
pub(super) struct Handle {
    jobs: mpsc::Sender<Job>,
    pub shared: Arc<Shared>,
}

impl Handle {
    /// Hands in the sequences of a request and waits until the engine has taken or refused them.
    pub async fn submit(&self, requests: Vec<Request>, arrived: Instant) -> Result<Sequences, SubmitError> {
        self.check_alive()?;
        let (asked, capacity) = (requests.len(), self.shared.capacity());
        if asked > capacity {
            return Err(SubmitError::TooMany { asked, capacity });
        }
        // Room for every message of the sequence, so that the engine never waits; messages take memory only when sent.
        let room: usize = requests.iter().map(|request| request.max_new_tokens as usize + 1).sum();
        let (told, receiver) = mpsc::channel(room.clamp(1, tokio::sync::Semaphore::MAX_PERMITS));
        let (taken, answer) = oneshot::channel();
        let enough: Vec<Arc<AtomicBool>> = requests.iter().map(|_| Arc::default()).collect();
        let job = Job { requests, enough: enough.clone(), told, taken, arrived };
        self.jobs.try_send(job).map_err(|_| SubmitError::Full)?;
        // The worker goes only after the last handle.
        answer.await.unwrap_or(Err(SubmitError::Lost(Lost::Stopping)))?;
        Ok(Sequences { told: receiver, enough })
    }

    fn check_alive(&self) -> Result<(), SubmitError> {
        if self.shared.failed.load(Relaxed) {
            return Err(SubmitError::Lost(Lost::Failed));
        }
        if self.shared.stopping.load(Relaxed) {
            return Err(SubmitError::Lost(Lost::Stopping));
        }
        Ok(())
    }
}

/// A sequence that runs or waits.
struct Member {
    told: mpsc::Sender<(usize, Told)>,
    /// Its number in the request.
    index: usize,
    enough: Arc<AtomicBool>,
    /// When its request arrived, until its first token is told.
    arrived: Option<Instant>,
}

/// The worker of a server.
pub(super) struct Worker {
    jobs: mpsc::Receiver<Job>,
    shared: Arc<Shared>,
    members: HashMap<SeqId, Member>,
}

impl Worker {
    /// A worker and the way to it.
    pub fn new(shared: Shared) -> (Self, Handle) {
        let (sender, jobs) = mpsc::channel(ON_THE_WAY);
        let shared = Arc::new(shared);
        (Self { jobs, shared: Arc::clone(&shared), members: HashMap::new() }, Handle { jobs: sender, shared })
    }

    /// Works until the last [`Handle`] is gone.
    ///
    /// # Errors
    /// The backend's handle. When the last handle is dropped, the backend ends; until then new requests are refused.
    pub fn run<B: Backend>(mut self, backend: &mut B) -> Result<(), B::Error> {
        loop {
            if self.members.is_empty() && backend.is_idle() {
                self.shared.metrics.load(backend.load());
                match self.jobs.blocking_recv() {
                    Some(job) => self.take(backend, job),
                    None => return Ok(()),
                }
            }
            while let Ok(job) = self.jobs.try_recv() {
                self.take(backend, job);
            }
            self.let_go(backend);
            if self.shared.cut.load(Relaxed) {
                self.end_all(backend, Lost::Stopping);
            }
            self.shared.metrics.load(backend.load());
            let start = Instant::now();
            match backend.step() {
                Ok(events) => {
                    if !events.is_empty() {
                        self.shared.metrics.step.note(start.elapsed());
                    }
                    events.into_iter().for_each(|event| self.tell(event));
                }
                Err(error) => {
                    self.shared.failed.store(true, Relaxed);
                    self.end_all(backend, Lost::Failed);
                    while let Some(job) = self.jobs.blocking_recv() {
                        let _ = job.taken.send(Err(SubmitError::Lost(Lost::Failed)));
                    }
                    return Err(error);
                }
            }
        }
    }

    /// Takes all sequences of a request, or none.
    fn take<B: Backend>(&mut self, backend: &mut B, job: Job) {
        let Job { requests, enough, told, taken, arrived } = job;
        if taken.is_closed() {
            return;
        }
        if self.members.len() + requests.len() > self.shared.capacity() {
            let _ = taken.send(Err(SubmitError::Full));
            return;
        }
        let (mut added, mut tokens) = (Vec::with_capacity(requests.len()), 0);
        for request in requests {
            let prompt = request.prompt.len() as u64;
            match backend.add(request) {
                Ok(id) => added.push(id),
                Err(rejected) => {
                    for id in added {
                        backend.cancel(id);
                    }
                    let busy = matches!(rejected, AdmissionError::Busy { .. });
                    // Whoever asked may have gone.
                    let _ = taken.send(Err(if busy { SubmitError::Full } else { SubmitError::Admission(rejected) }));
                    return;
                }
            }
            tokens += prompt;
        }
        self.shared.metrics.prompt_tokens.fetch_add(tokens, Relaxed);
        for (index, (id, enough)) in added.into_iter().zip(enough).enumerate() {
            self.members.insert(id, Member { told: told.clone(), index, enough, arrived: Some(arrived) });
        }
        // Whoever has gone is noticed by the channel of tokens.
        let _ = taken.send(Ok(()));
    }

    /// Ends the sequences of which no more tokens are needed.
    fn let_go<B: Backend>(&mut self, backend: &mut B) {
        self.members.retain(|id, member| {
            let go = member.told.is_closed() || member.enough.load(Relaxed);
            if go && backend.cancel(*id) {
                self.shared.metrics.cancelled.fetch_add(1, Relaxed);
            }
            !go
        });
    }

    fn end_all<B: Backend>(&mut self, backend: &mut B, why: Lost) {
        for (id, member) in self.members.drain() {
            backend.cancel(id);
            // Its owner may have gone.
            let _ = member.told.try_send((member.index, Told::Lost(why)));
        }
    }

    fn tell(&mut self, event: Event) {
        let Some(member) = self.members.get_mut(&event.seq) else { return };
        if let Some(arrived) = member.arrived.take() {
            self.shared.metrics.first_token.note(arrived.elapsed());
        }
        self.shared.metrics.generated_tokens.fetch_add(1, Relaxed);
        // There is room for all; if its owner has gone, that is noticed before the next step.
        let _ = member.told.try_send((member.index, Told::Token(event.token, event.finish, event.logprobs)));
        if event.finish.is_some() {
            self.members.remove(&event.seq);
        }
    }
}
