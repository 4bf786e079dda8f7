//! HTTP errors in the format of OpenAI's API.

use std::fmt;

use hyper::StatusCode;
use serde_json::{Value, json};
use unweight_engine::AdmissionError;

use super::worker::{Lost, SubmitError};
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
        Self { status: StatusCode::METHOD_NOT_ALLOWED, ..Self::bad("this route does not take this method") }
    }

    /// A missing or wrong API key, status 401.
    pub fn key() -> Self {
        let message = "the API key is missing or wrong; send the server's as `Authorization: Bearer KEY`";
        Self { status: StatusCode::UNAUTHORIZED, ..Self::bad(message) }.code("invalid_api_key")
    }

    /// A body above the size limit, status 413.
    pub fn body(limit: usize) -> Self {
        let message = format!("the body exceeds {limit} bytes; send less at a time");
        Self { status: StatusCode::PAYLOAD_TOO_LARGE, ..Self::bad(message) }
    }

    /// All bodies together reached their memory limit, status 503.
    pub fn bodies(limit: usize) -> Self {
        let message = format!("the requests being read hold {} MiB, the limit; try again later", limit >> 20);
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message);
        Self { retry_after: Some(1), ..error.code("bodies_full") }
    }

    /// A request that exceeds a limit, status 400.
    pub fn limit(message: impl fmt::Display) -> Self {
        Self::bad(message).code("text_limit_exceeded")
    }

    /// The answer for a request that took too long, status 408.
    pub fn timeout(what: &str, seconds: u64) -> Self {
        let message = format!("{what} took more than the {seconds} s that it may; ask for less at a time");
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

impl From<Lost> for ApiError {
    fn from(lost: Lost) -> Self {
        let (code, message) = match lost {
            Lost::Failed => ("engine_failed", "the engine has failed; the server must be started again"),
            Lost::Stopping => ("shutting_down", "the server is shutting down"),
        };
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message).code(code)
    }
}

impl From<SubmitError> for ApiError {
    fn from(refused: SubmitError) -> Self {
        match refused {
            SubmitError::Admission(rejected @ (AdmissionError::TooLong { .. } | AdmissionError::NoRoom { .. })) => {
                Self::bad(rejected).code("context_length_exceeded")
            }
            SubmitError::Admission(rejected @ (AdmissionError::Empty | AdmissionError::UnknownToken { .. })) => {
                Self::of("prompt", rejected)
            }
            SubmitError::Admission(rejected) => Self::bad(rejected),
            SubmitError::Full => {
                let message = "as many requests wait as may; try again later";
                let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message);
                Self { retry_after: Some(1), ..error.code("queue_full") }
            }
            SubmitError::TooMany { asked, capacity } => Self::bad(format!(
                "the request is for {asked} texts, and at most {capacity} may run and wait here; split it"
            )),
            SubmitError::Lost(lost) => lost.into(),
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
            TextError::TooLong { .. } => Self::bad(error).code("context_length_exceeded"),
            _ => Self::server(error),
        }
    }
}
