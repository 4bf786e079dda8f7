//! An HTTP server with OpenAI's API on top of the engine (docs/reference/http.md).
//!
//! ```text
//! connection --read, tokenize--> requests --> worker: Backend::add, step, cancel --tokens--> detokenize --> answer
//! ```
//! The thread that calls [`serve`] runs the engine; everything else runs as tasks of a small async runtime. The engine
//! never waits for a client, because the channel of a sequence has room for all of its messages.

mod answer;
mod api;
mod backend;
mod bodies;
mod cpu;
mod echo;
mod error;
mod fields;
mod frame;
mod listen;
mod metrics;
mod options;
mod places;
mod prepare;
mod routes;
mod sampling;
mod structure;
mod tokenize;
mod tool_calls;
mod tools;
mod worker;

use std::{
    net::TcpListener,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use tokio::sync::watch;

use crate::text::Text;
use listen::{FLUSH_TIMEOUT, listen};
use metrics::Metrics;
use worker::{Shared, Worker};

pub use backend::{Backend, Limits, Load};
pub use bodies::BODY_LIMIT;
pub use cpu::{CpuError, CpuReference};
pub use options::{Ended, ServeError, ServeOptions};

/// The number of threads that parse and print large JSON and wait for text processes. They use the processor time that
/// the engine and the connections leave.
const BLOCKING_THREADS: usize = 6;

/// Serves a model until `stop` is set and the running requests have ended. The calling thread runs the engine.
///
/// With [`Text::isolated`], no prompt, tokenizer or template can end this process or exhaust its memory. With
/// [`Text::new`] the model's files are trusted: the server cannot end the tokenization of a prompt that runs forever.
///
/// # Errors
/// [`ServeError`].
pub fn serve<B: Backend>(
    backend: &mut B,
    text: Text,
    listener: TcpListener,
    options: ServeOptions,
    stop: Arc<AtomicBool>,
) -> Result<Ended, ServeError<B::Error>>
where
    B::Error: 'static,
{
    listener.set_nonblocking(true)?;
    let (worker, handle) = Worker::new(Shared {
        limits: backend.limits(),
        max_waiting: options.max_waiting,
        metrics: Metrics::new(),
        failed: AtomicBool::new(false),
        stopping: AtomicBool::new(false),
        abort: watch::Sender::new(false),
    });
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_name("unweight-serve")
        .enable_all()
        .build()?;
    let server = runtime.spawn(listen(listener, handle, text, options, stop));
    let run_result = worker.run(backend);
    // The worker ends when all handles are gone, so `listen` ends as well.
    let listen_result = runtime.block_on(server);
    let was_cut = matches!(listen_result, Ok(Ok(Ended::Cut)));
    // After a cut, the time to flush is over.
    runtime.shutdown_timeout(if was_cut { Duration::ZERO } else { FLUSH_TIMEOUT });
    run_result.map_err(ServeError::Backend)?;
    Ok(listen_result.unwrap_or_else(|error| Err(std::io::Error::other(error)))?)
}
