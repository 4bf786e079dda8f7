//! An HTTP server with OpenAI's API on top of the engine (docs/reference/http.md).
//!
//! ```text
//! connection --read, encode--> requests --> worker: Backend::add, step, cancel --tokens--> decode --> answer
//! ```
//! The thread that calls [`serve`] runs the engine; everything else runs as tasks of a small async runtime. The engine
//! never waits for a client, because the channel of a sequence has room for all of its messages.

mod answer;
mod api;
mod backend;
mod bodies;
mod calls;
mod cpu;
mod error;
mod fields;
mod frame;
mod metrics;
mod prepare;
mod sampling;
mod structure;
mod tokenize;
mod tools;
mod worker;

use std::{
    fmt,
    net::TcpListener,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use axum::{
    Router,
    body::Body,
    extract::{Path, Request as HttpRequest, State, rejection::PathRejection},
    http::{HeaderMap, HeaderValue, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use hyper::{StatusCode, server::conn::http1};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use serde_json::{Value, json};
use subtle::ConstantTimeEq;
use tokio::{
    net::TcpStream,
    sync::{Semaphore, mpsc, watch},
    task::JoinSet,
    time::{sleep, timeout, timeout_at},
};
use unweight_format::bundle::io_code;

use crate::text::Text;
use answer::{Pieces, Texts};
use error::ApiError;
use frame::{Endpoint, Frame};
use metrics::Metrics;
use prepare::{Accepted, Preparer, SEND_TIMEOUT};
use tokenize::Tokenize;
use worker::{Handle, Shared, Unavailable, Worker};

pub use backend::{Backend, Limits, Load};
pub use bodies::BODY_LIMIT;
pub use cpu::{CpuError, CpuReference};

/// The maximum number of open connections; further ones wait to be accepted.
const CONNECTIONS_MAX: usize = 2048;
/// How long a client may leave sent data unread.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// The maximum number of pieces of a stream that wait for the connection.
const QUEUED_PIECES_MAX: usize = 32;
/// The number of threads that parse large bodies and wait for text processes. They use the processor time that the
/// engine and the connections leave.
const BLOCKING_THREADS: usize = 4;
/// The maximum receive buffer of a connection, bytes; also the maximum size of a request head.
const CONNECTION_BUFFER_BYTES_MAX: usize = 64 << 10;
/// How often the server checks whether to stop.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How long connections may flush their data after all sequences have ended.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

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

/// Serves a model until `stop` is set and the running requests have ended. The calling thread runs the engine.
///
/// With [`Text::isolated`], no prompt, tokenizer or template can end this process or exhaust its memory. With
/// [`Text::new`] the model's files are trusted: the server cannot end the encoding of a prompt that runs forever.
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
        abort: AtomicBool::new(false),
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
    runtime.shutdown_timeout(FLUSH_TIMEOUT);
    run_result.map_err(ServeError::Backend)?;
    Ok(listen_result.unwrap_or_else(|error| Err(std::io::Error::other(error)))?)
}

/// The state that all handlers share.
#[derive(Clone)]
struct Server {
    preparer: Preparer,
    options: Arc<ServeOptions>,
    started: u64,
    /// True when unanswered requests are to be cut off.
    abort: watch::Receiver<bool>,
}

impl Server {
    fn shared(&self) -> &Shared {
        &self.preparer.handle.shared
    }

    /// Returns why the server accepts no requests, if so.
    fn unavailable(&self) -> Option<Unavailable> {
        let shared = self.shared();
        match (shared.failed.load(Relaxed), shared.stopping.load(Relaxed)) {
            (true, _) => Some(Unavailable::Failed),
            (_, true) => Some(Unavailable::Stopping),
            _ => None,
        }
    }
}

/// Accepts connections until `stop` is set, then waits for them.
async fn listen(
    listener: TcpListener,
    handle: Handle,
    text: Text,
    options: ServeOptions,
    stop: Arc<AtomicBool>,
) -> std::io::Result<Ended> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let shared = Arc::clone(&handle.shared);
    let grace = options.grace;
    let (abort_sender, abort) = watch::channel(false);
    let preparer = Preparer::new(text.clone(), handle, &options.model);
    let app = router(Server { preparer, options: Arc::new(options), started: now(), abort });
    let (closing, closed) = watch::channel(false);
    let connection_permits = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut connections = JoinSet::new();
    let stopped = async {
        while !stop.load(Relaxed) {
            sleep(POLL_INTERVAL).await;
        }
    };
    let mut stopped = pin!(stopped);
    loop {
        let accept = async {
            let permit = Arc::clone(&connection_permits).acquire_owned().await;
            (permit, listener.accept().await)
        };
        let (permit, accepted) = tokio::select! {
            accepted = accept => accepted,
            () = &mut stopped => break,
        };
        match accepted {
            Ok((stream, _)) => {
                let (app, closed) = (app.clone(), closed.clone());
                connections.spawn(async move {
                    connection(stream, app, closed).await;
                    drop(permit);
                });
            }
            // Out of file descriptors, or a client that has already disconnected: continue with others.
            Err(_) => sleep(POLL_INTERVAL).await,
        }
        while connections.try_join_next().is_some() {}
    }
    drop((listener, app));
    shared.stopping.store(true, Relaxed);
    // Fails if there are no connections, and therefore no receiver.
    let _ = closing.send(true);
    let mut ended = Ended::Done;
    // Connections without a request need a moment, too.
    if timeout(grace.max(POLL_INTERVAL), join_all(&mut connections)).await.is_err() {
        ended = Ended::Cut;
        shared.abort.store(true, Relaxed);
        // Requests in preparation are answered now, and the text processes end.
        let _ = abort_sender.send(true);
        text.stop();
        let _ = timeout(FLUSH_TIMEOUT, join_all(&mut connections)).await;
    }
    // Drops clients that still do not read, together with their handles.
    connections.shutdown().await;
    text.stop();
    Ok(ended)
}

async fn join_all(connections: &mut JoinSet<()>) {
    while connections.join_next().await.is_some() {}
}

async fn connection(stream: TcpStream, app: Router, mut closed: watch::Receiver<bool>) {
    // Send tokens at once, because they are small. If the socket refuses the option, it is only slower.
    let _ = stream.set_nodelay(true);
    #[cfg(target_os = "linux")]
    let _ = rustix::net::sockopt::set_tcp_user_timeout(&stream, READ_TIMEOUT.as_millis() as u32);
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(SEND_TIMEOUT).max_buf_size(CONNECTION_BUFFER_BYTES_MAX);
    let mut connection = pin!(http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(app)));
    let closing = async {
        // The sender exists as long as there are connections.
        let _ = closed.wait_for(|closed| *closed).await;
    };
    // Connection errors concern only the client.
    tokio::select! {
        _ = connection.as_mut() => {}
        () = closing => {
            connection.as_mut().graceful_shutdown();
            let _ = connection.await;
        }
    }
}

fn router(server: Server) -> Router {
    Router::new()
        .route("/v1/completions", post(|server, request| answer(Endpoint::Completions, server, request)))
        .route("/v1/chat/completions", post(|server, request| answer(Endpoint::Chat, server, request)))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/health", get(health))
        .route("/metrics", get(metrics_text))
        .fallback(|| async { ApiError::not_found("no such route; the routes of the API start with /v1") })
        .method_not_allowed_fallback(|| async { ApiError::method() })
        .layer(middleware::from_fn_with_state(server.clone(), gate))
        .with_state(server)
}

/// Checks the API key and counts the request.
async fn gate(State(server): State<Server>, request: HttpRequest, next: Next) -> Response {
    let route = match request.uri().path() {
        "/v1/completions" => "/v1/completions",
        "/v1/chat/completions" => "/v1/chat/completions",
        "/tokenize" => "/tokenize",
        "/detokenize" => "/detokenize",
        "/health" => "/health",
        "/metrics" => "/metrics",
        path if path.starts_with("/v1/models") => "/v1/models",
        // Clients must not be able to create metric labels.
        _ => "other",
    };
    let guarded = request.uri().path().starts_with("/v1/") || matches!(route, "/tokenize" | "/detokenize");
    let response = match &server.options.api_key {
        Some(key) if guarded && !has_key(request.headers(), key) => ApiError::key().into_response(),
        _ => next.run(request).await,
    };
    server.shared().metrics.request(route, response.status().as_u16());
    response
}

/// Compares the key in constant time.
fn has_key(headers: &HeaderMap, key: &str) -> bool {
    let sent = headers.get(header::AUTHORIZATION).map_or(&b""[..], HeaderValue::as_bytes);
    // The scheme is case-insensitive (RFC 9110, 11.1).
    let sent = match sent.split_at_checked(b"Bearer ".len()) {
        Some((scheme, key)) if scheme.eq_ignore_ascii_case(b"Bearer ") => key,
        _ => b"",
    };
    sent.ct_eq(key.as_bytes()).into()
}

async fn health(State(server): State<Server>) -> Response {
    match server.unavailable() {
        None => json_response(StatusCode::OK, &json!({ "status": "ok" })),
        Some(unavailable) => ApiError::from(unavailable).into_response(),
    }
}

async fn metrics_text(State(server): State<Server>) -> Response {
    let Shared { metrics, limits, .. } = server.shared();
    let text = metrics.text(limits, server.preparer.bodies.held());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

fn model_json(server: &Server) -> Value {
    json!({
        "id": server.options.model,
        "object": "model",
        "created": server.started,
        "owned_by": "unweight",
        "max_model_len": server.shared().limits.context,
    })
}

async fn models(State(server): State<Server>) -> Response {
    json_response(StatusCode::OK, &json!({ "object": "list", "data": [model_json(&server)] }))
}

async fn model(State(server): State<Server>, name: Result<Path<String>, PathRejection>) -> Response {
    let Ok(Path(name)) = name else {
        return ApiError::not_found("the name of the model is not UTF-8; GET /v1/models lists the models")
            .into_response();
    };
    if name == server.options.model {
        return json_response(StatusCode::OK, &model_json(&server));
    }
    ApiError::not_found(format!("the model '{name}' is not served here; GET /v1/models lists the models"))
        .into_response()
}

fn json_response(status: StatusCode, value: &Value) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = json_response(self.status, &self.json());
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
        }
        response
    }
}

/// Returns the seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn random() -> Result<u64, ApiError> {
    getrandom::u64().map_err(|error| ApiError::server(format!("cannot get random numbers from the system: {error}")))
}

/// Handles `/v1/completions` and `/v1/chat/completions`.
async fn answer(endpoint: Endpoint, State(server): State<Server>, request: HttpRequest) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    if let Some(unavailable) = server.unavailable() {
        return Err(unavailable.into());
    }
    let deadline = arrived + server.options.timeout;
    let mut abort = server.abort.clone();
    let accepted = tokio::select! {
        accepted = timeout_at(deadline.into(), server.preparer.accept(endpoint, request, arrived)) => accepted,
        // The sender exists as long as there are connections.
        _ = abort.wait_for(|abort| *abort) => return Err(Unavailable::Stopping.into()),
    };
    let timeout_s = server.options.timeout.as_secs();
    let Accepted { call, sequences, prompt_tokens, echo } =
        accepted.map_err(|_| ApiError::timeout("the request", timeout_s))??;
    let frame = Frame::new(endpoint, random()?, now(), &server.options.model);
    let texts = Texts::new(&server.preparer, &call, sequences, prompt_tokens, (deadline, timeout_s));
    let texts = texts.calls(&call, &frame.id).echo(echo);
    if call.stream {
        let (pieces, receiver) = mpsc::channel(QUEUED_PIECES_MAX);
        tokio::spawn(texts.stream(frame, call.include_usage, pieces));
        let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
        return Ok((headers, Body::new(Pieces(receiver))).into_response());
    }
    let answer = texts.complete(&frame).await?;
    Ok(json_response(StatusCode::OK, &answer))
}

/// Handles `/tokenize`: returns the token ids of a text or a conversation.
async fn tokenize(State(server): State<Server>, request: HttpRequest) -> Result<Response, ApiError> {
    bounded(&server, async {
        let (body, _permit) = server.preparer.body(request).await?;
        let Tokenize { prompt, strings } = Tokenize::read(&body, &server.options.model)?;
        drop(body);
        let (tokens, strings) = server.preparer.tokens(prompt, strings).await?;
        Ok(json!({
            "count": tokens.len(),
            "max_model_len": server.shared().limits.context,
            "tokens": tokens,
            "token_strs": strings,
        }))
    })
    .await
}

/// Handles `/detokenize`: returns the text of token ids.
async fn detokenize(State(server): State<Server>, request: HttpRequest) -> Result<Response, ApiError> {
    bounded(&server, async {
        let (body, _permit) = server.preparer.body(request).await?;
        let tokens = tokenize::read_tokens(&body, &server.options.model)?;
        let text = server.preparer.decode(tokens, BODY_LIMIT as u64, "tokens").await?;
        Ok(json!({ "prompt": text }))
    })
    .await
}

/// Returns the result of `work`, or an error if it takes too long or the server stops.
async fn bounded(server: &Server, work: impl Future<Output = Result<Value, ApiError>>) -> Result<Response, ApiError> {
    if let Some(unavailable) = server.unavailable() {
        return Err(unavailable.into());
    }
    let mut abort = server.abort.clone();
    let answer = tokio::select! {
        answer = timeout(server.options.timeout, work) => answer,
        // The sender exists as long as there are connections.
        _ = abort.wait_for(|abort| *abort) => return Err(Unavailable::Stopping.into()),
    };
    let answer = answer.map_err(|_| ApiError::timeout("the request", server.options.timeout.as_secs()))??;
    Ok(json_response(StatusCode::OK, &answer))
}
