//! Starts text processes, sends them requests, and ends those that exceed a limit.

use std::{
    io::{self, Read, Write},
    os::{
        fd::OwnedFd,
        unix::{
            net::UnixStream,
            process::{CommandExt, ExitStatusExt},
        },
    },
    process::{Child, Command, Stdio},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

#[cfg(feature = "serve")]
use super::prompt::{Grammar, Sampled};
use super::{
    PREPARING, PROCESSES, child,
    error::TextError,
    frame,
    prompt::{Chat, EncodeLimits, Encoded, Prompt},
    vocabulary::Vocabulary,
};

/// The time limit of a call.
const CALL_TIME_MAX: Duration = Duration::from_secs(2);
/// The time limit of loading a tokenizer, or of preparing it for grammars.
const LOAD_TIME_MAX: Duration = Duration::from_secs(10);
/// The maximum size of the reply to the files of a tokenizer, which contains its vocabulary; bytes.
const VOCABULARY_BYTES_MAX: u64 = 128 << 20;
/// The time limit of checking a grammar. It allows for a busy machine: the process limits its processor time.
#[cfg(feature = "serve")]
const GRAMMAR_TIME_MAX: Duration = Duration::from_secs(2);
/// The maximum size of the reply to a grammar, bytes.
#[cfg(feature = "serve")]
const REPLY_BYTES_MAX: u64 = 8 << 10;
/// The name of the work on a grammar, for errors.
#[cfg(feature = "serve")]
const COMPILING: &str = "compiling it";
/// The name of the work on the sampled tokens, for errors.
#[cfg(feature = "serve")]
const PREPARING_GRAMMARS: &str = "preparing the vocabulary for structured answers";
/// The name of the work on the files, for errors.
const LOADING: &str = "loading the tokenizer";

/// The text processes of a tokenizer.
pub(super) struct Pool {
    /// The first payload of every process.
    files: Vec<u8>,
    command: Mutex<Command>,
    state: Mutex<State>,
    freed: Condvar,
}

#[derive(Default)]
struct State {
    idle: Vec<Process>,
    /// The sockets of all processes, by process number.
    streams: Vec<(u64, UnixStream)>,
    /// The number of processes that work or are being started.
    busy: usize,
    /// The number of the next process.
    next: u64,
    closed: bool,
}

/// A text process. Dropping it ends the process.
struct Process {
    number: u64,
    child: Child,
    stream: UnixStream,
    /// Whether it is prepared for grammars.
    #[cfg(feature = "serve")]
    is_prepared: bool,
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Why a process returned no valid reply.
enum CallError {
    /// The time limit was reached.
    TimedOut,
    /// The process has ended, or its reply is invalid.
    Ended,
}

impl From<io::Error> for CallError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Self::TimedOut,
            _ => Self::Ended,
        }
    }
}

impl Pool {
    /// Starts the first process. Returns the vocabulary and the properties of the chat template, too.
    ///
    /// # Errors
    /// [`TextError`] of the files or of the process.
    pub fn start(
        command: Command,
        tokenizer: &[u8],
        config: Option<&[u8]>,
        template: Option<&[u8]>,
    ) -> Result<(Self, Vocabulary, Option<Chat>), TextError> {
        let pool = Self {
            files: child::files(tokenizer, config, template),
            command: Mutex::new(command),
            state: Mutex::default(),
            freed: Condvar::new(),
        };
        let slot = pool.slot()?;
        let (process, answer) = pool.load()?;
        let read = || {
            let mut reader = match frame::opened(&answer)? {
                Ok(reader) => reader,
                Err(error) => return Some(Err(error)),
            };
            let chat = frame::read_chat(&mut reader)?;
            let vocabulary = Vocabulary::read(&mut reader)?;
            reader.end(vocabulary.map(|vocabulary| (vocabulary, chat)))
        };
        let (vocabulary, chat) =
            read().unwrap_or_else(|| Err(TextError::Process("its reply is not a vocabulary".into())))?;
        slot.return_process(process);
        Ok((pool, vocabulary, chat))
    }

    /// Encodes prompts in a free process; waits until there is one.
    ///
    /// # Errors
    /// [`TextError`]. A process that exceeds a limit of time or memory is ended; the next call starts a new one.
    pub fn encode(&self, prompts: &[Prompt], limits: EncodeLimits) -> Result<Vec<Encoded>, TextError> {
        let payload = frame::request(prompts, limits);
        let bytes_max = frame::reply_bytes_max(prompts.len(), limits);
        let read = |answer: &[u8]| frame::read_reply(answer, prompts.len());
        let (encoded, taken) = self.take()?.call(payload, bytes_max, (PREPARING, CALL_TIME_MAX), read)?;
        taken.give_back();
        encoded
    }

    /// Compiles a grammar in a free process; waits until there is one. Returns the memory that it takes, bytes; `None`
    /// if it takes more than `time` of a processor.
    ///
    /// # Errors
    /// [`TextError`], as [`Pool::encode`].
    #[cfg(feature = "serve")]
    pub fn check_grammar(
        &self,
        grammar: &Grammar,
        sampled: &Sampled,
        time: Duration,
    ) -> Result<Option<u64>, TextError> {
        let (payload, work) = (frame::grammar_request(grammar, time), (COMPILING, GRAMMAR_TIME_MAX));
        let checked = self.take_prepared(sampled)?.call(payload, REPLY_BYTES_MAX, work, frame::read_grammar_reply);
        let (checked, taken) = checked.map_err(|error| match error {
            TextError::Limit { work, .. } => TextError::Busy { work, seconds: GRAMMAR_TIME_MAX.as_secs() },
            error => error,
        })?;
        taken.give_back();
        checked
    }

    /// Prepares a process for grammars.
    ///
    /// # Errors
    /// [`TextError`], as [`Pool::encode`].
    #[cfg(feature = "serve")]
    pub fn prepare(&self, sampled: &Sampled) -> Result<(), TextError> {
        self.take_prepared(sampled).map(Taken::give_back)
    }

    /// Takes a process that is prepared for grammars, which takes more than a second for a large vocabulary.
    #[cfg(feature = "serve")]
    fn take_prepared(&self, sampled: &Sampled) -> Result<Taken<'_>, TextError> {
        let taken = self.take()?;
        if taken.process.is_prepared {
            return Ok(taken);
        }
        let (payload, work) = (frame::sampled_request(sampled), (PREPARING_GRAMMARS, LOAD_TIME_MAX));
        let (prepared, mut taken) = taken.call(payload, REPLY_BYTES_MAX, work, frame::read_grammar_reply)?;
        if let Err(error) = prepared {
            taken.give_back();
            return Err(error);
        }
        taken.process.is_prepared = true;
        Ok(taken)
    }

    /// Waits for the right to use a process, and takes one.
    fn take(&self) -> Result<Taken<'_>, TextError> {
        let slot = self.slot()?;
        let idle = self.state().idle.pop();
        if let Some(process) = idle {
            return Ok(Taken { slot, process });
        }
        let (process, answer) = self.load()?;
        // The files were valid when the first process read them.
        if !matches!(frame::opened(&answer), Some(Ok(_))) {
            return Err(self.end(process, &CallError::Ended, LOADING, LOAD_TIME_MAX, child::CALL_BYTES));
        }
        Ok(Taken { slot, process })
    }

    /// Ends all processes, including busy ones. Waiting calls return an error.
    #[cfg(feature = "serve")]
    pub fn stop(&self) {
        let mut state = self.state();
        state.closed = true;
        for (_, stream) in &state.streams {
            // The socket of a process that has ended is already closed.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        state.idle.clear();
        self.freed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the right to use a process.
    fn slot(&self) -> Result<Slot<'_>, TextError> {
        let mut state = self.state();
        while state.busy >= PROCESSES && !state.closed {
            state = self.freed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.closed {
            return Err(TextError::Stopping);
        }
        state.busy += 1;
        Ok(Slot(self))
    }

    /// Starts a process and sends it the files. Returns the process and its reply.
    fn load(&self) -> Result<(Process, Vec<u8>), TextError> {
        let mut process = self.spawn()?;
        match process.exchange(&self.files, VOCABULARY_BYTES_MAX, LOAD_TIME_MAX) {
            Ok(answer) => Ok((process, answer)),
            Err(error) => {
                let memory_max = child::load_bytes_max(self.files.len() as u64);
                Err(self.end(process, &error, LOADING, LOAD_TIME_MAX, memory_max))
            }
        }
    }

    fn spawn(&self) -> Result<Process, TextError> {
        let failed = |error: io::Error| TextError::Process(format!("cannot start it: {error}"));
        let (stream, theirs) = UnixStream::pair().map_err(failed)?;
        let stream_copy = stream.try_clone().map_err(failed)?;
        let child = {
            let mut command = self.command.lock().unwrap_or_else(PoisonError::into_inner);
            let input = OwnedFd::from(theirs.try_clone().map_err(failed)?);
            command.stdin(input).stdout(OwnedFd::from(theirs)).stderr(Stdio::null());
            // Ctrl-C on a terminal signals only this program, which ends its processes.
            command.process_group(0);
            command.env("TOKENIZERS_PARALLELISM", "false").env("RAYON_NUM_THREADS", "1").env("MALLOC_ARENA_MAX", "1");
            let child = command.spawn();
            // Release the command's copy of the child's socket end; otherwise the end of the process would not be
            // noticed.
            command.stdin(Stdio::null()).stdout(Stdio::null());
            child.map_err(failed)?
        };
        let mut state = self.state();
        let number = state.next;
        state.next += 1;
        state.streams.push((number, stream_copy));
        let process = Process {
            number,
            child,
            stream,
            #[cfg(feature = "serve")]
            is_prepared: false,
        };
        if state.closed { Err(TextError::Stopping) } else { Ok(process) }
    }

    /// Ends a process without a valid reply, and returns the error.
    fn end(
        &self,
        mut process: Process,
        error: &CallError,
        work: &'static str,
        time: Duration,
        memory: u64,
    ) -> TextError {
        // A process that has ended by itself keeps its status.
        let _ = process.child.kill();
        let status = process.child.wait();
        let mut state = self.state();
        state.streams.retain(|(number, _)| *number != process.number);
        if state.closed {
            return TextError::Stopping;
        }
        match (error, status) {
            (CallError::TimedOut, _) => TextError::Limit { work, limit: format!("{} s", time.as_secs()) },
            // An allocation beyond the memory limit aborts the process, and so does a stack overflow.
            (CallError::Ended, Ok(status)) if status.signal().is_some() => {
                TextError::Limit { work, limit: format!("{} MiB of memory", memory >> 20) }
            }
            (CallError::Ended, Ok(status)) => TextError::Process(format!("it ended: {status}")),
            (CallError::Ended, Err(error)) => TextError::Process(format!("it ended: {error}")),
        }
    }
}

/// The right to use a process. Dropping it releases the right.
struct Slot<'a>(&'a Pool);

impl Slot<'_> {
    /// Keeps the process for later calls.
    fn return_process(self, process: Process) {
        let mut state = self.0.state();
        if !state.closed {
            state.idle.push(process);
        }
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        self.0.state().busy -= 1;
        self.0.freed.notify_one();
    }
}

/// A process and the right to use it.
struct Taken<'a> {
    slot: Slot<'a>,
    process: Process,
}

impl Taken<'_> {
    /// Sends a payload to the process, which may `work` for `time`, and parses its reply of at most `bytes_max` bytes.
    /// Ends a process without a valid reply.
    fn call<T>(
        mut self,
        payload: Vec<u8>,
        bytes_max: u64,
        (work, time): (&'static str, Duration),
        read: impl FnOnce(&[u8]) -> Option<Result<T, TextError>>,
    ) -> Result<(Result<T, TextError>, Self), TextError> {
        if payload.len() > child::REQUEST_BYTES_MAX as usize {
            self.give_back();
            return Err(TextError::Limit { work, limit: format!("{} bytes of text", child::REQUEST_BYTES_MAX) });
        }
        let answer = self.process.exchange(&payload, bytes_max, time);
        drop(payload);
        match answer.and_then(|answer| read(&answer).ok_or(CallError::Ended)) {
            Ok(answered) => Ok((answered, self)),
            Err(error) => {
                let Self { slot, process } = self;
                Err(slot.0.end(process, &error, work, time, child::CALL_BYTES))
            }
        }
    }

    /// Keeps the process for later calls.
    fn give_back(self) {
        self.slot.return_process(self.process);
    }
}

impl Process {
    /// Sends a payload and receives one of at most `bytes_max` bytes.
    fn exchange(&mut self, payload: &[u8], bytes_max: u64, time: Duration) -> Result<Vec<u8>, CallError> {
        let deadline = Instant::now() + time;
        let left = || {
            deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()).ok_or(CallError::TimedOut)
        };
        let length = u32::try_from(payload.len()).map_err(|_| CallError::Ended)?;
        for mut rest in [&length.to_le_bytes()[..], payload] {
            while !rest.is_empty() {
                self.stream.set_write_timeout(Some(left()?))?;
                match self.stream.write(rest)? {
                    0 => return Err(CallError::Ended),
                    written => rest = &rest[written..],
                }
            }
        }
        let mut receive = |buffer: &mut [u8]| {
            let mut filled = 0;
            while filled < buffer.len() {
                self.stream.set_read_timeout(Some(left()?))?;
                match self.stream.read(&mut buffer[filled..])? {
                    0 => return Err(CallError::Ended),
                    read => filled += read,
                }
            }
            Ok(())
        };
        let mut length = [0; 4];
        receive(&mut length)?;
        let length = u32::from_le_bytes(length);
        if u64::from(length) > bytes_max {
            return Err(CallError::Ended);
        }
        let mut answer = vec![0; length as usize];
        receive(&mut answer)?;
        Ok(answer)
    }
}
