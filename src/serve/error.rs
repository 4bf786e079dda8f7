//! HTTP errors in the format of OpenAI's API.

use std::fmt;

use hyper::StatusCode;
use serde_json::{Value, json};
use unweight_engine::AdmissionError;

use super::worker::{SubmitError, Unavailable};
use crate::text::TextError;

/// An error in the format of OpenAI's API.
#[derive(Debug)]
pub(super) struct ApiError {
    pub status: StatusCode,
    /// Seconds after which the client should retry.
    pub retry_after: Option<u32>,
    kind: &'static str,
    code: Option<&'static str>,
    pub param: Option<String>,
    pub message: String,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl fmt::Display) -> Self {
        Self { status, kind, message: message.to_string(), code: None, param: None, retry_after: None }
    }

    /// An invalid request, status 400.
    pub fn bad(message: impl fmt::Display) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// An invalid field, status 400.
    pub fn of(param: &str, message: impl fmt::Display) -> Self {
        Self { param: Some(param.to_owned()), ..Self::bad(message) }
    }

    /// Sets the field that the error is about.
    pub fn param(self, param: &str) -> Self {
        Self { param: Some(param.to_owned()), ..self }
    }

    /// Whether the request itself is wrong.
    pub fn is_rejection(&self) -> bool {
        self.status == StatusCode::BAD_REQUEST
    }

    /// Sets the stable code.
    pub fn code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    /// The answer for an unknown route or model, status 404.
    pub fn not_found(message: impl fmt::Display) -> Self {
        Self { status: StatusCode::NOT_FOUND, ..Self::bad(message) }
    }

    /// A model that is not served, status 404.
    pub fn model(message: impl fmt::Display) -> Self {
        Self { param: Some("model".to_owned()), ..Self::not_found(message) }.code("model_not_found")
    }

    /// A method that the route does not support, status 405.
    pub fn method() -> Self {
        Self { status: StatusCode::METHOD_NOT_ALLOWED, ..Self::bad("this route does not support this method") }
    }

    /// A missing or wrong API key, status 401.
    pub fn key() -> Self {
        let message = "the API key is missing or wrong; send the key of the server as `Authorization: Bearer KEY`";
        Self { status: StatusCode::UNAUTHORIZED, ..Self::bad(message) }.code("invalid_api_key")
    }

    /// A body above the size limit, status 413.
    pub fn body(limit: usize) -> Self {
        let message = format!("the body exceeds the limit of {limit} bytes; send a smaller request");
        Self { status: StatusCode::PAYLOAD_TOO_LARGE, ..Self::bad(message) }
    }

    /// All small or all large bodies together reached their memory limit, status 503.
    pub fn bodies(limit: usize) -> Self {
        let what = format!("request bodies of this size reached the limit of {} MiB together", limit >> 20);
        Self::full(StatusCode::SERVICE_UNAVAILABLE, "bodies_full", what)
    }

    /// Answers that clients have not read reached their memory limit, status 503.
    pub fn answers(limit: usize) -> Self {
        let what = format!("answers that clients have not read reached the limit of {} MiB", limit >> 20);
        Self::full(StatusCode::SERVICE_UNAVAILABLE, "answers_full", what)
    }

    /// The maximum number of large texts waits to be decoded, status 503.
    pub fn decodings(limit: usize) -> Self {
        let what = format!("{limit} large texts wait to be decoded, the limit");
        Self::full(StatusCode::SERVICE_UNAVAILABLE, "answers_full", what)
    }

    /// A grammar cannot be compiled soon, because of others; status 429.
    pub fn grammars(what: impl fmt::Display) -> Self {
        Self::full(StatusCode::TOO_MANY_REQUESTS, "grammars_full", what)
    }

    /// A limit of all requests together was reached, status 429 or 503: the client may try again after a second.
    fn full(status: StatusCode, code: &'static str, what: impl fmt::Display) -> Self {
        let kind = if status == StatusCode::TOO_MANY_REQUESTS { "rate_limit_error" } else { "server_error" };
        let error = Self::new(status, kind, format!("{what}; try again later"));
        Self { retry_after: Some(1), ..error.code(code) }
    }

    /// A request that exceeds a limit, status 400.
    pub fn limit(message: impl fmt::Display) -> Self {
        Self::bad(message).code("text_limit_exceeded")
    }

    /// The answer for a request that took too long, status 408.
    pub fn timeout(what: &str, seconds: u64) -> Self {
        let message = format!("{what} took longer than the limit of {seconds} s; send a smaller request");
        Self::new(StatusCode::REQUEST_TIMEOUT, "timeout_error", message).code("timeout")
    }

    /// An internal error, status 500.
    pub fn server(message: impl fmt::Display) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// Returns the JSON of the error.
    pub fn json(&self) -> Value {
        let Self { message, kind, param, code, .. } = self;
        json!({ "error": { "message": message, "type": kind, "param": param, "code": code } })
    }
}

impl From<Unavailable> for ApiError {
    fn from(reason: Unavailable) -> Self {
        let (code, message) = match reason {
            Unavailable::Failed => ("engine_failed", "the engine has failed; restart the server"),
            Unavailable::Stopping => ("shutting_down", "the server is shutting down"),
        };
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message).code(code)
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> Self {
        match error {
            SubmitError::Admission(rejected @ (AdmissionError::TooLong { .. } | AdmissionError::NoRoom { .. })) => {
                Self::bad(rejected).code("context_length_exceeded")
            }
            SubmitError::Admission(rejected @ (AdmissionError::Empty | AdmissionError::UnknownToken { .. })) => {
                Self::of("prompt", rejected)
            }
            SubmitError::Admission(rejected) => Self::bad(rejected),
            SubmitError::Full => {
                Self::full(StatusCode::TOO_MANY_REQUESTS, "queue_full", "the queue of waiting requests is full")
            }
            SubmitError::TooMany { requested, capacity } => Self::bad(format!(
                "the request needs {requested} texts; at most {capacity} can run and wait here; split the request"
            )),
            SubmitError::Unavailable(reason) => reason.into(),
        }
    }
}

impl From<TextError> for ApiError {
    fn from(error: TextError) -> Self {
        match error {
            TextError::NoTemplate => Self::of("messages", error).code("no_chat_template"),
            TextError::Template(_) => Self::of("messages", error),
            TextError::Grammar(_) => Self::bad(error).code("grammar_invalid"),
            TextError::Limit { .. } => Self::limit(error),
            TextError::Busy { .. } => Self::new(StatusCode::REQUEST_TIMEOUT, "timeout_error", error).code("timeout"),
            TextError::TooLong { .. } => Self::bad(error).code("context_length_exceeded"),
            TextError::Stopping => Unavailable::Stopping.into(),
            _ => Self::server(error),
        }
    }
}
