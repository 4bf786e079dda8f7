//! The options of a server, and how it ends.

use std::{fmt, time::Duration};

use unweight_format::bundle::io_code;

/// The options of a server.
///
/// ```
/// # use std::time::Duration;
/// # use unweight::serve::ServeOptions;
/// let options = ServeOptions::new("llama").max_waiting(64).grace(Duration::from_secs(10));
/// assert_eq!((options.model.as_str(), options.api_key), ("llama", None));
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct ServeOptions {
    /// The model name that clients send.
    pub model: String,
    /// The maximum number of waiting sequences; 256 by default.
    pub max_waiting: usize,
    /// Key that clients must send as `Authorization: Bearer`; `None`, the default, accepts every client.
    pub api_key: Option<String>,
    /// Time that running requests get to end when the server stops; 30 s by default.
    pub grace: Duration,
    /// Time limit of a request; 600 s by default.
    pub timeout: Duration,
}

impl ServeOptions {
    /// Creates options with defaults for everything but the model name.
    pub fn new(model: impl Into<String>) -> Self {
        Self {
            model: model.into(),
            max_waiting: 256,
            api_key: None,
            grace: Duration::from_secs(30),
            timeout: Duration::from_secs(600),
        }
    }

    /// Sets the maximum number of waiting sequences.
    #[must_use]
    pub fn max_waiting(self, max_waiting: usize) -> Self {
        Self { max_waiting, ..self }
    }

    /// Sets the key that clients must send.
    #[must_use]
    pub fn api_key(self, api_key: Option<String>) -> Self {
        Self { api_key, ..self }
    }

    /// Sets the time that running requests get to end.
    #[must_use]
    pub fn grace(self, grace: Duration) -> Self {
        Self { grace, ..self }
    }

    /// Sets the time limit of a request.
    #[must_use]
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }
}

impl fmt::Debug for ServeOptions {
    /// Formats the options without the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, max_waiting, api_key, grace, timeout } = self;
        let key = if api_key.is_some() { "with a key" } else { "without a key" };
        write!(f, "ServeOptions({model}, {max_waiting} waiting, {key}, grace {grace:?}, timeout {timeout:?})")
    }
}

/// Why a server ended before it was stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError<E: std::error::Error + 'static> {
    /// The engine failed. The server answered requests with an error until it was stopped.
    #[error("the engine failed while it served")]
    Backend(#[source] E),
    /// The system refused to create threads or to use the socket.
    #[error("the server cannot run")]
    Io(#[from] std::io::Error),
}

impl<E: std::error::Error + 'static> ServeError<E> {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Backend(_) => "engine-failed",
            Self::Io(error) => io_code(error),
        }
    }
}

/// How a server ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ended {
    /// All requests were answered.
    Done,
    /// Some requests ran longer than [`ServeOptions::grace`] and were cut off.
    Cut,
}
