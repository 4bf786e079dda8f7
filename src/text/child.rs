//! The main loop of a text process: it encodes text for a parent program, within limits on its own memory.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    os::fd::AsFd,
    process::{self, ExitCode},
    sync::mpsc::{self, Receiver},
    thread,
};
#[cfg(feature = "serve")]
use std::{os::unix::net::UnixStream, time::Duration};

#[cfg(feature = "serve")]
use rustix::process::{Pid, Signal, WaitOptions, waitpid};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use unweight_format::raw::return_freed_memory;

use super::{
    STACK_BYTES,
    frame::{self, ProcessRequest, Reader, Writer},
    local::Local,
};
#[cfg(feature = "serve")]
use super::{catch_panic, error::TextError, grammar::Grammars, prompt::Grammar};

/// The memory limit of a call beyond the loaded tokenizer, stack and heap together; bytes.
pub(super) const CALL_BYTES: u64 = 256 << 20;
/// The memory limit of loading: a factor of the file sizes plus a constant, up to a maximum. A BPE of 260,000 tokens
/// needs about 11 times the size of its file, a unigram model of the same size about 94 times.
const LOAD_FACTOR: u64 = 128;
const LOAD_BYTES: u64 = 64 << 20;
const LOAD_BYTES_MAX: u64 = 2 << 30;
/// The maximum size of a request, which holds all prompts of a body and their lengths; bytes.
pub(super) const REQUEST_BYTES_MAX: u32 = 256 << 20;

/// Encodes text for [`Text::isolated`](super::Text::isolated) until stdin ends. The command of `isolated` must call
/// this.
///
/// The process serves one program over stdin and stdout. Its memory is limited (`RLIMIT_AS`) on Linux, and it writes no
/// core file, which would contain prompts.
pub fn run_text_process() -> ExitCode {
    match serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Returns the memory limit of loading files of this total size, bytes.
pub(super) fn load_bytes_max(files: u64) -> u64 {
    LOAD_FACTOR.saturating_mul(files).saturating_add(LOAD_BYTES).min(LOAD_BYTES_MAX)
}

fn serve() -> io::Result<()> {
    return_freed_memory();
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) });
    let mut input = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let output = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    let (sender, payloads) = mpsc::channel();
    // Start the thread before memory is limited, because the stack counts as memory in use.
    thread::Builder::new().stack_size(STACK_BYTES as usize).spawn(move || {
        // A request that cannot be answered ends the process.
        let code = i32::from(answer_requests(&payloads, output).is_err());
        process::exit(code)
    })?;
    let length = read_length(&mut input)?;
    limit_memory(load_bytes_max(length.into()));
    let mut payload = read_payload(&mut input, length)?;
    while sender.send(payload).is_ok() {
        // This thread reads while the other works, so that the end of stdin ends the process at once.
        let next = read_length(&mut input)?;
        if next > REQUEST_BYTES_MAX {
            break;
        }
        payload = read_payload(&mut input, next)?;
    }
    Ok(())
}

/// Answers payloads: the first one has the files, the others have prompts or grammars.
fn answer_requests(payloads: &Receiver<Vec<u8>>, mut output: File) -> io::Result<()> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidData);
    let mut reply = |payload: &[u8]| {
        output.write_all(&(payload.len() as u32).to_le_bytes())?;
        output.write_all(payload)
    };
    let Ok(files) = payloads.recv() else { return Ok(()) };
    let [tokenizer, config, template] = read_files(&files).ok_or_else(invalid)?;
    let (local, vocabulary) = match Local::load(tokenizer.unwrap_or_default(), config, template) {
        Ok(loaded) => loaded,
        Err(error) => return reply(&frame::failure(&error)),
    };
    drop(files);
    let mut loaded = frame::done();
    frame::write_chat(&mut loaded, local.chat());
    vocabulary.write(&mut loaded);
    drop(vocabulary);
    reply(&loaded.0)?;
    drop(loaded);
    return_freed_memory();
    limit_memory(CALL_BYTES - STACK_BYTES);
    #[cfg(feature = "serve")]
    let mut grammars = None;
    while let Ok(payload) = payloads.recv() {
        let request = frame::read_request(&payload).ok_or_else(invalid)?;
        let large = payload.len() > 1 << 20;
        drop(payload);
        match &request {
            ProcessRequest::Encode(prompts, limits) => reply(&frame::reply(local.encode(prompts, *limits)))?,
            #[cfg(feature = "serve")]
            ProcessRequest::Sampled(sampled) => {
                let prepared = local.grammars(sampled).map(|prepared| {
                    // What the first grammar adds for all others does not count as the memory of each.
                    let _ = prepared.compile(&Grammar::Regex("a".to_owned()));
                    grammars = Some(prepared);
                });
                reply(&prepared.map_or_else(|error| frame::failure(&error), |()| frame::grammar_reply(None)))?;
                // The vocabulary is kept, so it does not count for the limit of a call.
                limit_memory(CALL_BYTES - STACK_BYTES);
            }
            #[cfg(feature = "serve")]
            ProcessRequest::Grammar(grammar, time) => {
                reply(&check_grammar(grammars.as_ref().ok_or_else(invalid)?, grammar, *time)?)?;
            }
        }
        if large {
            drop(request);
            return_freed_memory();
        }
    }
    Ok(())
}

/// Checks a grammar in a process of its own, so that one that exceeds its time or memory ends that process only.
/// Returns the payload of the reply.
#[cfg(feature = "serve")]
fn check_grammar(grammars: &Grammars, grammar: &Grammar, time: Duration) -> io::Result<Vec<u8>> {
    let (mut ours, mut theirs) = UnixStream::pair()?;
    // SAFETY: the other thread of this process only reads stdin, so it holds no lock but the allocator's, which `fork`
    // itself takes. The copy never returns from this block.
    let copy = match unsafe { libc::fork() } {
        0 => {
            let checked = catch_panic(|| {
                limit_time(time)?;
                let size = size_of_compiled(grammars, grammar).map(Some);
                theirs.write_all(&size.map_or_else(|error| frame::failure(&error), frame::grammar_reply))
            });
            // SAFETY: it ends the process, without the functions that its other copy will run at its end.
            unsafe { libc::_exit(i32::from(!matches!(checked, Ok(Ok(()))))) }
        }
        pid => Pid::from_raw(pid.max(0)).ok_or_else(io::Error::last_os_error)?,
    };
    drop(theirs);
    let mut reply = Vec::new();
    let read = ours.read_to_end(&mut reply);
    let ended = waitpid(Some(copy), WaitOptions::empty())?;
    read?;
    Ok(match ended.and_then(|(_, status)| status.terminating_signal()) {
        None => reply,
        Some(signal) if signal == Signal::PROF.as_raw() => frame::grammar_reply(None),
        // An allocation beyond the memory limit aborts the process, and so does a stack overflow.
        Some(_) => {
            let why = format!("compiling it takes more than {} MiB of memory; simplify it", CALL_BYTES >> 20);
            frame::failure(&TextError::Grammar(why))
        }
    })
}

/// Ends this process when it has taken this time of a processor, and together with its parent.
#[cfg(feature = "serve")]
fn limit_time(time: Duration) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    let value =
        libc::timeval { tv_sec: time.as_secs() as libc::time_t, tv_usec: time.subsec_micros() as libc::suseconds_t };
    let timer = libc::itimerval { it_interval: libc::timeval { tv_sec: 0, tv_usec: 0 }, it_value: value };
    // SAFETY: the timer is valid for reads, and the old one is not requested.
    let status = unsafe { libc::setitimer(libc::ITIMER_PROF, &timer, std::ptr::null_mut()) };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Compiles a grammar and tries it out. Returns the memory that it takes, bytes.
#[cfg(feature = "serve")]
fn size_of_compiled(grammars: &Grammars, grammar: &Grammar) -> Result<u64, TextError> {
    let before = allocated();
    let compiled = grammars.compile(grammar)?;
    let after = allocated();
    grammars.try_out(&compiled)?;
    Ok(after.saturating_sub(before))
}

/// Returns the memory that is allocated, bytes: what a new copy of a process has in memory depends on what it uses.
#[cfg(feature = "serve")]
fn allocated() -> u64 {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: the call has no preconditions.
        let info = unsafe { libc::mallinfo2() };
        (info.uordblks + info.hblkhd) as u64
    }
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    {
        memory(1).unwrap_or(0)
    }
}

/// Returns the payload with the files of a tokenizer.
pub(super) fn files(tokenizer: &[u8], config: Option<&[u8]>, template: Option<&[u8]>) -> Vec<u8> {
    let mut out = Writer::default();
    for file in [Some(tokenizer), config, template] {
        out.option(file);
    }
    out.0
}

fn read_files(payload: &[u8]) -> Option<[Option<&[u8]>; 3]> {
    let mut reader = Reader(payload);
    let files = [reader.option()?, reader.option()?, reader.option()?];
    reader.end(files)
}

fn read_length(input: &mut File) -> io::Result<u32> {
    let mut length = [0; 4];
    input.read_exact(&mut length)?;
    Ok(u32::from_le_bytes(length))
}

fn read_payload(input: &mut File, length: u32) -> io::Result<Vec<u8>> {
    let mut payload = vec![0; length as usize];
    input.read_exact(&mut payload)?;
    Ok(payload)
}

/// Returns the size of the process (0), or what of it is in memory (1); bytes.
fn memory(which: usize) -> Option<u64> {
    let pages: u64 = fs::read_to_string("/proc/self/statm").ok()?.split(' ').nth(which)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

/// Limits the process to `more` bytes beyond its present size. A lower system limit stays.
fn limit_memory(more: u64) {
    let Some(size) = memory(0) else { return };
    let maximum = getrlimit(Resource::As).maximum;
    let current = Some((size + more).min(maximum.unwrap_or(u64::MAX)));
    // If the system does not support the limit, the time limit and the parent's end still apply.
    let _ = setrlimit(Resource::As, Rlimit { current, maximum });
}
