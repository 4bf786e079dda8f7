//! The thread that runs the engine: it accepts requests between steps, and sends tokens to their tasks.
//!
//! It never waits for a client. The channel of a request has room for all its tokens, and the worker checks between
//! steps whether the client has disconnected.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Instant,
};

use tokio::sync::{mpsc, oneshot, watch};
use unweight_engine::{AdmissionError, Event, Finish, Logprobs, Request, SeqId};

use super::{
    backend::{Backend, Limits},
    metrics::Metrics,
};

/// The maximum number of requests that wait for the engine to accept them between two steps.
const QUEUED_JOBS_MAX: usize = 1024;

/// The state that the server and the worker share.
#[derive(Debug)]
pub(super) struct Shared {
    /// The limits of the backend.
    pub limits: Limits,
    /// The maximum number of waiting sequences.
    pub max_waiting: usize,
    /// The metrics of the server.
    pub metrics: Metrics,
    /// Whether the engine has failed.
    pub failed: AtomicBool,
    /// Whether the server rejects new requests.
    pub stopping: AtomicBool,
    /// True when unanswered requests and running sequences end now.
    pub abort: watch::Sender<bool>,
}

impl Shared {
    /// Returns the maximum number of running and waiting sequences.
    pub fn capacity(&self) -> usize {
        self.max_waiting.saturating_add(self.limits.max_batch as usize)
    }

    /// Returns an error if the server accepts no requests.
    pub fn check_available(&self) -> Result<(), Unavailable> {
        match (self.failed.load(Relaxed), self.stopping.load(Relaxed)) {
            (true, _) => Err(Unavailable::Failed),
            (_, true) => Err(Unavailable::Stopping),
            _ => Ok(()),
        }
    }
}

/// Why a request is rejected.
#[derive(Debug)]
pub(super) enum SubmitError {
    /// The engine rejected the request.
    Admission(AdmissionError),
    /// The maximum number of sequences is waiting.
    Full,
    /// The request has more sequences than may ever run and wait.
    TooMany { requested: usize, capacity: usize },
    /// The engine has failed or the server stops.
    Unavailable(Unavailable),
}

/// Why a sequence cannot continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unavailable {
    /// The engine has failed.
    Failed,
    /// The server stops.
    Stopping,
}

/// An event of a sequence.
#[derive(Debug)]
pub(super) enum SequenceEvent {
    /// A token, the finish reason if it is the last one, and its log probabilities.
    Token(u32, Option<Finish>, Option<Box<Logprobs>>),
    /// The sequence was lost; no event follows.
    Lost(Unavailable),
}

/// A request of one or more sequences, which are accepted together or not at all.
struct Job {
    requests: Vec<Request>,
    /// One flag per sequence, set when no more tokens are needed.
    cancel_flags: Vec<Arc<AtomicBool>>,
    events: mpsc::Sender<(usize, SequenceEvent)>,
    reply: oneshot::Sender<Result<(), SubmitError>>,
    arrived: Instant,
}

/// The accepted sequences of a request. Dropping it ends them.
#[derive(Debug)]
pub(super) struct Sequences {
    /// The index of the sequence in the request, and its event.
    pub events: mpsc::Receiver<(usize, SequenceEvent)>,
    /// One flag per sequence: set it to end the sequence.
    pub cancel_flags: Vec<Arc<AtomicBool>>,
}

/// The sender of requests to the worker. The worker ends when all handles are dropped.
#[derive(Clone, Debug)]
pub(super) struct Handle {
    jobs: mpsc::Sender<Job>,
    pub shared: Arc<Shared>,
}

impl Handle {
    /// Submits the sequences of a request and waits until the engine accepts or rejects them.
    pub async fn submit(&self, requests: Vec<Request>, arrived: Instant) -> Result<Sequences, SubmitError> {
        self.shared.check_available().map_err(SubmitError::Unavailable)?;
        let (requested, capacity) = (requests.len(), self.shared.capacity());
        if requested > capacity {
            return Err(SubmitError::TooMany { requested, capacity });
        }
        // The channel holds every message, so that the engine never waits; messages use memory only when sent.
        let messages_max: usize = requests.iter().map(|request| request.max_new_tokens as usize + 1).sum();
        let (events, receiver) = mpsc::channel(messages_max.clamp(1, tokio::sync::Semaphore::MAX_PERMITS));
        let (reply, answer) = oneshot::channel();
        let cancel_flags: Vec<Arc<AtomicBool>> = requests.iter().map(|_| Arc::default()).collect();
        let job = Job { requests, cancel_flags: cancel_flags.clone(), events, reply, arrived };
        self.jobs.try_send(job).map_err(|_| SubmitError::Full)?;
        // The worker outlives the last handle.
        answer.await.unwrap_or(Err(SubmitError::Unavailable(Unavailable::Stopping)))?;
        Ok(Sequences { events: receiver, cancel_flags })
    }
}

/// A running or waiting sequence.
struct ActiveSequence {
    events: mpsc::Sender<(usize, SequenceEvent)>,
    /// Index of the sequence in its request.
    index: usize,
    cancel_flag: Arc<AtomicBool>,
    /// When the request arrived; `None` after the first token.
    arrived: Option<Instant>,
}

/// The worker of a server, which owns the backend's sequences.
pub(super) struct Worker {
    jobs: mpsc::Receiver<Job>,
    shared: Arc<Shared>,
    sequences: HashMap<SeqId, ActiveSequence>,
}

impl Worker {
    /// Creates a worker and its handle.
    pub fn new(shared: Shared) -> (Self, Handle) {
        let (sender, jobs) = mpsc::channel(QUEUED_JOBS_MAX);
        let shared = Arc::new(shared);
        (Self { jobs, shared: Arc::clone(&shared), sequences: HashMap::new() }, Handle { jobs: sender, shared })
    }

    /// Runs the backend until the last [`Handle`] is dropped.
    ///
    /// # Errors
    /// The backend's error. After an error, requests are rejected until the last handle is dropped.
    pub fn run<B: Backend>(mut self, backend: &mut B) -> Result<(), B::Error> {
        loop {
            if self.sequences.is_empty() && backend.is_idle() {
                self.shared.metrics.load(backend.load());
                match self.jobs.blocking_recv() {
                    Some(job) => self.accept(backend, job),
                    None => return Ok(()),
                }
            }
            while let Ok(job) = self.jobs.try_recv() {
                self.accept(backend, job);
            }
            self.cancel_unneeded(backend);
            if *self.shared.abort.borrow() {
                self.end_all(backend, Unavailable::Stopping);
            }
            self.shared.metrics.load(backend.load());
            let start = Instant::now();
            match backend.step() {
                Ok(events) => {
                    if !events.is_empty() {
                        self.shared.metrics.step.observe(start.elapsed());
                    }
                    events.into_iter().for_each(|event| self.send_event(event));
                }
                Err(error) => {
                    self.shared.failed.store(true, Relaxed);
                    self.end_all(backend, Unavailable::Failed);
                    while let Some(job) = self.jobs.blocking_recv() {
                        let _ = job.reply.send(Err(SubmitError::Unavailable(Unavailable::Failed)));
                    }
                    return Err(error);
                }
            }
        }
    }

    /// Adds all sequences of a request, or none.
    fn accept<B: Backend>(&mut self, backend: &mut B, job: Job) {
        let Job { requests, cancel_flags, events, reply, arrived } = job;
        if reply.is_closed() {
            return;
        }
        if self.sequences.len() + requests.len() > self.shared.capacity() {
            let _ = reply.send(Err(SubmitError::Full));
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
                    // The client may have disconnected.
                    let _ = reply.send(Err(if busy { SubmitError::Full } else { SubmitError::Admission(rejected) }));
                    return;
                }
            }
            tokens += prompt;
        }
        self.shared.metrics.prompt_tokens.fetch_add(tokens, Relaxed);
        for (index, (id, cancel_flag)) in added.into_iter().zip(cancel_flags).enumerate() {
            self.sequences
                .insert(id, ActiveSequence { events: events.clone(), index, cancel_flag, arrived: Some(arrived) });
        }
        // If the client has disconnected, the channel of tokens is closed.
        let _ = reply.send(Ok(()));
    }

    /// Ends the sequences that need no more tokens.
    fn cancel_unneeded<B: Backend>(&mut self, backend: &mut B) {
        self.sequences.retain(|id, sequence| {
            let is_unneeded = sequence.events.is_closed() || sequence.cancel_flag.load(Relaxed);
            if is_unneeded && backend.cancel(*id) {
                self.shared.metrics.cancelled.fetch_add(1, Relaxed);
            }
            !is_unneeded
        });
    }

    fn end_all<B: Backend>(&mut self, backend: &mut B, why: Unavailable) {
        for (id, sequence) in self.sequences.drain() {
            backend.cancel(id);
            // The client may have disconnected.
            let _ = sequence.events.try_send((sequence.index, SequenceEvent::Lost(why)));
        }
    }

    fn send_event(&mut self, event: Event) {
        let Some(sequence) = self.sequences.get_mut(&event.seq) else { return };
        if let Some(arrived) = sequence.arrived.take() {
            self.shared.metrics.first_token.observe(arrived.elapsed());
        }
        self.shared.metrics.generated_tokens.fetch_add(1, Relaxed);
        // The channel has room. If the client has disconnected, `cancel_unneeded` notices before the next step.
        let _ =
            sequence.events.try_send((sequence.index, SequenceEvent::Token(event.token, event.finish, event.logprobs)));
        if event.finish.is_some() {
            self.sequences.remove(&event.seq);
        }
    }
}
