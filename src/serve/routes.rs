//! The routes of the API: authorization, counting and handlers.

use std::{
    sync::Arc,
    time::{Instant, SystemTime, UNIX_EPOCH},
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
use hyper::StatusCode;
use serde::Serialize;
use serde_json::{Value, json};
use subtle::ConstantTimeEq;
use tokio::{
    sync::mpsc,
    time::{timeout, timeout_at},
};

use super::{
    answer::{Pieces, Texts},
    bodies::{BODY_LIMIT, on_thread_for},
    error::ApiError,
    frame::{Endpoint, Frame},
    metrics::Held,
    options::ServeOptions,
    prepare::{Accepted, Preparer, random},
    tokenize::{self, Tokenize},
    worker::{Shared, Unavailable},
};

/// The maximum number of pieces of a stream that wait for the connection.
const QUEUED_PIECES_MAX: usize = 32;

/// The state that all handlers share.
#[derive(Clone)]
pub(super) struct Server {
    pub preparer: Preparer,
    pub options: Arc<ServeOptions>,
    /// When the server started, in seconds since 1970.
    pub started: u64,
}

impl Server {
    fn shared(&self) -> &Shared {
        &self.preparer.handle.shared
    }
}

/// Returns the routes of the API.
pub(super) fn router(server: Server) -> Router {
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
        .layer(middleware::from_fn_with_state(server.clone(), authorize_and_count))
        .with_state(server)
}

/// Checks the API key and counts the request.
async fn authorize_and_count(State(server): State<Server>, request: HttpRequest, next: Next) -> Response {
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
    match server.shared().check_available() {
        Ok(()) => json_response(StatusCode::OK, &json!({ "status": "ok" })),
        Err(unavailable) => ApiError::from(unavailable).into_response(),
    }
}

async fn metrics_text(State(server): State<Server>) -> Response {
    let Shared { metrics, limits, .. } = server.shared();
    let Preparer { bodies, answers, places, .. } = &server.preparer;
    let held = Held { body_bytes: bodies.held(), answer_bytes: answers.held(), texts_waiting: places.waiting() };
    let text = metrics.text(limits, held);
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
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Handles `/v1/completions` and `/v1/chat/completions`.
async fn answer(
    endpoint: Endpoint,
    State(server): State<Server>,
    http_request: HttpRequest,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    server.shared().check_available()?;
    let deadline = arrived + server.options.timeout;
    let mut abort = server.shared().abort.subscribe();
    let accepted = tokio::select! {
        accepted = timeout_at(deadline.into(), server.preparer.accept(endpoint, http_request, arrived)) => accepted,
        // `Server` keeps the sender.
        _ = abort.wait_for(|abort| *abort) => return Err(Unavailable::Stopping.into()),
    };
    let timeout_s = server.options.timeout.as_secs();
    let Accepted { request, sequences, prompt_tokens, echo } =
        accepted.map_err(|_| ApiError::timeout("the request", timeout_s))??;
    let frame = Frame::new(endpoint, random()?, now(), &server.options.model);
    let texts = Texts::new(&server.preparer, &request, sequences, prompt_tokens, (deadline, timeout_s));
    let texts = texts.find_tool_calls(&request, &frame.id);
    if request.stream {
        let (pieces, receiver) = mpsc::channel(QUEUED_PIECES_MAX);
        let echo = echo.map(|echo| echo.stream(frame.clone()));
        tokio::spawn(texts.stream(frame, request.include_usage, pieces));
        let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
        return Ok((headers, Body::new(Pieces { echo, pieces: receiver })).into_response());
    }
    let (answer, _place) = texts.complete(frame, echo).await?;
    whole(&server, answer)
}

/// Returns the response of a whole answer.
fn whole(server: &Server, answer: Vec<u8>) -> Result<Response, ApiError> {
    let body = server.preparer.answers.hold(answer)?;
    Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
}

/// The answer of `/tokenize`.
#[derive(Serialize)]
struct Tokenized {
    count: usize,
    max_model_len: u32,
    tokens: Vec<u32>,
    token_strs: Option<Vec<String>>,
}

/// Handles `/tokenize`: returns the token ids of a text or a conversation.
async fn tokenize(State(server): State<Server>, request: HttpRequest) -> Result<Response, ApiError> {
    bounded(&server, async {
        let (body, _permit) = server.preparer.body(request).await?;
        let Tokenize { prompt, strings } = server.preparer.parse(body, Tokenize::read).await?;
        let (tokens, token_strs) = server.preparer.tokenize(prompt, strings).await?;
        let (count, max_model_len) = (tokens.len(), server.shared().limits.context);
        let answer = Tokenized { count, max_model_len, tokens, token_strs };
        let print = move || serde_json::to_vec(&answer);
        whole(&server, on_thread_for(count * size_of::<u32>(), print).await?.map_err(ApiError::server)?)
    })
    .await
}

/// Handles `/detokenize`: returns the text of token ids.
async fn detokenize(State(server): State<Server>, request: HttpRequest) -> Result<Response, ApiError> {
    bounded(&server, async {
        let (body, _permit) = server.preparer.body(request).await?;
        let tokens = server.preparer.parse(body, tokenize::read_tokens).await?;
        let print = |text: String| json!({ "prompt": text }).to_string().into_bytes();
        let (answer, _place) = server.preparer.decoder.detokenize(tokens, BODY_LIMIT as u64, "tokens", print).await?;
        whole(&server, answer)
    })
    .await
}

/// Returns the result of `work`, or an error if it takes too long or the server stops.
async fn bounded(
    server: &Server,
    work: impl Future<Output = Result<Response, ApiError>>,
) -> Result<Response, ApiError> {
    server.shared().check_available()?;
    let mut abort = server.shared().abort.subscribe();
    let answer = tokio::select! {
        answer = timeout(server.options.timeout, work) => answer,
        // `Server` keeps the sender.
        _ = abort.wait_for(|abort| *abort) => return Err(Unavailable::Stopping.into()),
    };
    answer.map_err(|_| ApiError::timeout("the request", server.options.timeout.as_secs()))?
}
