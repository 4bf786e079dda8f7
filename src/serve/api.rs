//! Requests and answers in the form of OpenAI's API. Nothing here knows of connections or threads.

use std::fmt;

use hyper::StatusCode;
use serde_json::{Map, Value, json};
use unweight_engine::{AdmissionError, SampleParams};

use super::worker::{Lost, SubmitError};
use crate::text::{Message, TextError};

/// Texts of a request for one prompt.
const MOST_CHOICES: u64 = 8;
/// Stop strings of a request.
const MOST_STOPS: usize = 4;
/// Tokens that `/v1/completions` makes where nobody says otherwise, as OpenAI's does.
const COMPLETION_TOKENS: u32 = 16;

/// Whether a value of a field asks for nothing.
type Neutral = fn(&Value) -> bool;

/// Fields that would change the answer and are not done here, with what may stand there all the same. `null` always
/// may.
const NOT_DONE: &[(&str, Neutral)] = &[
    ("logit_bias", empty),
    ("frequency_penalty", zero),
    ("presence_penalty", zero),
    ("repetition_penalty", |value| value.as_f64() == Some(1.0)),
    ("logprobs", |value| *value == Value::Bool(false)),
    ("top_logprobs", never),
    ("tools", empty),
    ("tool_choice", |value| matches!(value.as_str(), Some("none" | "auto"))),
    ("functions", empty),
    ("function_call", |value| matches!(value.as_str(), Some("none" | "auto"))),
    ("response_format", |value| value.get("type").and_then(Value::as_str) == Some("text")),
    ("modalities", |value| *value == json!(["text"])),
    ("audio", never),
    ("echo", |value| *value == Value::Bool(false)),
    ("suffix", |value| value.as_str() == Some("")),
    ("ignore_eos", |value| *value == Value::Bool(false)),
    ("min_tokens", zero),
    ("stop_token_ids", empty),
];

fn zero(value: &Value) -> bool {
    value.as_f64() == Some(0.0)
}

fn empty(value: &Value) -> bool {
    value.as_array().is_some_and(Vec::is_empty) || value.as_object().is_some_and(Map::is_empty)
}

fn never(_: &Value) -> bool {
    false
}

/// An error as OpenAI's API writes it.
#[derive(Debug)]
pub(super) struct ApiError {
    pub status: StatusCode,
    /// Seconds after which it is worth trying again.
    pub retry_after: Option<u32>,
    kind: &'static str,
    code: Option<&'static str>,
    param: Option<String>,
    message: String,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl fmt::Display) -> Self {
        Self { status, kind, message: message.to_string(), code: None, param: None, retry_after: None }
    }

    /// A request that is not what it should be.
    pub fn bad(message: impl fmt::Display) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    fn of(param: &str, message: impl fmt::Display) -> Self {
        Self { param: Some(param.to_owned()), ..Self::bad(message) }
    }

    fn code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    /// The answer for an unknown route or model, status 404.
    pub fn not_found(message: impl fmt::Display) -> Self {
        Self { status: StatusCode::NOT_FOUND, ..Self::bad(message) }
    }

    /// A route does not take this method.
    pub fn method() -> Self {
        Self { status: StatusCode::METHOD_NOT_ALLOWED, ..Self::bad("this route does not take this method") }
    }

    /// The key is missing, or another one.
    pub fn key() -> Self {
        let message = "the API key is missing or wrong; send the server's as `Authorization: Bearer KEY`";
        Self { status: StatusCode::UNAUTHORIZED, ..Self::bad(message) }.code("invalid_api_key")
    }

    /// A body beyond the limit.
    pub fn body(limit: usize) -> Self {
        let message = format!("the body exceeds {limit} bytes; send less at a time");
        Self { status: StatusCode::PAYLOAD_TOO_LARGE, ..Self::bad(message) }
    }

    /// The answer for a request that took too long, status 408.
    pub fn timeout(what: &str, seconds: u64) -> Self {
        let message = format!("{what} took more than the {seconds} s that it may; ask for less at a time");
        Self::new(StatusCode::REQUEST_TIMEOUT, "timeout_error", message).code("timeout")
    }

    /// The fault is this server's.
    pub fn server(message: impl fmt::Display) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// The error as JSON.
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
            _ => Self::server(error),
        }
    }
}

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Endpoint {
    Completions,
    Chat,
}

/// What is to be continued.
#[derive(Debug)]
pub(super) enum Prompt {
    Text(String),
    Ids(Vec<u32>),
    Chat(Vec<Message>),
}

/// A request, read.
#[derive(Debug)]
pub(super) struct Call {
    pub prompts: Vec<Prompt>,
    /// Texts for each prompt.
    pub n: u32,
    /// Without a seed.
    pub params: SampleParams,
    pub seed: Option<u64>,
    /// `None`: as many as the context holds.
    pub max_tokens: Option<u32>,
    pub stop: Vec<String>,
    pub stream: bool,
    pub include_usage: bool,
}

impl Call {
    /// Reads a body. `model` is the one that is served.
    pub fn read(endpoint: Endpoint, body: &[u8], model: &str) -> Result<Self, ApiError> {
        let body: Value = serde_json::from_slice(body)
            .map_err(|error| ApiError::bad(format!("the body is no JSON: {error}; send an object")))?;
        let Value::Object(fields) = body else { return Err(ApiError::bad("the body is JSON, but no object")) };
        let mut fields = Fields(fields);
        match fields.take("model") {
            None => {}
            Some(Value::String(name)) if name == model => {}
            Some(other) => {
                let message = format!("the model {other} is not served here; ask for \"{model}\"");
                let error = ApiError { param: Some("model".to_owned()), ..ApiError::not_found(message) };
                return Err(error.code("model_not_found"));
            }
        }
        let prompts = match endpoint {
            Endpoint::Completions => prompts(fields.take("prompt"))?,
            Endpoint::Chat => vec![Prompt::Chat(messages(fields.take("messages"))?)],
        };
        let n = fields.whole("n", 1, MOST_CHOICES)?.unwrap_or(1) as u32;
        if let Some(best_of) = fields.whole("best_of", 1, u64::MAX)?
            && best_of != u64::from(n)
        {
            return Err(ApiError::of("best_of", "best_of other than n is not supported; leave it out"));
        }
        let defaults = SampleParams::default().temperature(1.0);
        let params = defaults
            .temperature(fields.number("temperature")?.unwrap_or(defaults.temperature))
            .top_p(fields.number("top_p")?.unwrap_or(defaults.top_p))
            .top_k(top_k(&mut fields)?)
            .min_p(fields.number("min_p")?.unwrap_or(defaults.min_p));
        params.check().map_err(|error| ApiError::of(error.name, error))?;
        let most = u64::from(u32::MAX);
        let (older, newer) = (fields.whole("max_tokens", 1, most)?, fields.whole("max_completion_tokens", 1, most)?);
        let default = (endpoint == Endpoint::Completions).then_some(COMPLETION_TOKENS);
        let call = Self {
            prompts,
            n,
            params,
            seed: seed(&mut fields)?,
            max_tokens: newer.or(older).map(|tokens| tokens as u32).or(default),
            stop: stop(fields.take("stop"))?,
            stream: fields.flag("stream")?,
            include_usage: match fields.take("stream_options") {
                None => false,
                Some(Value::Object(options)) => Fields(options).flag("include_usage")?,
                Some(_) => return Err(ApiError::of("stream_options", "stream_options is no object")),
            },
        };
        for (name, neutral) in NOT_DONE {
            if let Some(value) = fields.take(name)
                && !neutral(&value)
            {
                let message = format!("{name} is not supported here; leave it out");
                return Err(ApiError::of(name, message).code("unsupported_parameter"));
            }
        }
        Ok(call)
    }
}

/// The fields of an object. `null` is as good as nothing.
struct Fields(Map<String, Value>);

impl Fields {
    fn take(&mut self, name: &str) -> Option<Value> {
        self.0.remove(name).filter(|value| !value.is_null())
    }

    fn number(&mut self, name: &str) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let number = value.as_f64().ok_or_else(|| ApiError::of(name, format!("{name} is no number")))?;
        Ok(Some(number as f32))
    }

    fn whole(&mut self, name: &str, least: u64, most: u64) -> Result<Option<u64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let number = value.as_u64().filter(|number| (least..=most).contains(number));
        let upper = if most == u64::MAX { String::new() } else { format!(" to {most}") };
        number.map(Some).ok_or_else(|| ApiError::of(name, format!("{name} is no whole number from {least}{upper}")))
    }

    fn flag(&mut self, name: &str) -> Result<bool, ApiError> {
        match self.take(name) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(flag),
            Some(_) => Err(ApiError::of(name, format!("{name} is neither true nor false"))),
        }
    }
}

/// Others write -1 for all tokens.
fn top_k(fields: &mut Fields) -> Result<u32, ApiError> {
    if fields.0.get("top_k").is_some_and(|value| value.as_i64() == Some(-1)) {
        return Ok(0);
    }
    Ok(fields.whole("top_k", 0, u32::MAX.into())?.unwrap_or(0) as u32)
}

/// Any whole number of 64 bits, of either sign.
fn seed(fields: &mut Fields) -> Result<Option<u64>, ApiError> {
    let Some(value) = fields.take("seed") else { return Ok(None) };
    let bits = value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned));
    bits.map(Some).ok_or_else(|| ApiError::of("seed", "seed is no whole number of 64 bits"))
}

fn stop(value: Option<Value>) -> Result<Vec<String>, ApiError> {
    let wrong = || ApiError::of("stop", format!("stop is neither text nor a list of up to {MOST_STOPS} texts"));
    match value {
        None => Ok(Vec::new()),
        Some(Value::String(text)) => Ok(vec![text]),
        Some(Value::Array(texts)) if texts.len() <= MOST_STOPS => {
            texts.iter().map(|text| text.as_str().map(str::to_owned).ok_or_else(wrong)).collect()
        }
        Some(_) => Err(wrong()),
    }
}

/// A text, texts, ids, or lists of ids.
fn prompts(value: Option<Value>) -> Result<Vec<Prompt>, ApiError> {
    let wrong = || ApiError::of("prompt", "prompt is neither text, texts, token ids nor lists of them; give one");
    let ids = |values: &[Value]| {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(wrong);
        values.iter().map(id).collect::<Result<Vec<u32>, _>>()
    };
    match value {
        Some(Value::String(text)) => Ok(vec![Prompt::Text(text)]),
        Some(Value::Array(values)) if values.is_empty() => Err(wrong()),
        Some(Value::Array(values)) if values[0].is_number() => Ok(vec![Prompt::Ids(ids(&values)?)]),
        Some(Value::Array(values)) => {
            let one = |value| match value {
                Value::String(text) => Ok(Prompt::Text(text)),
                Value::Array(values) => Ok(Prompt::Ids(ids(&values)?)),
                _ => Err(wrong()),
            };
            values.into_iter().map(one).collect()
        }
        _ => Err(wrong()),
    }
}

fn messages(value: Option<Value>) -> Result<Vec<Message>, ApiError> {
    let Some(Value::Array(values)) = value else {
        return Err(ApiError::of("messages", "messages is no list; give one message at least"));
    };
    if values.is_empty() {
        return Err(ApiError::of("messages", "messages is empty; give one message at least"));
    }
    values.into_iter().enumerate().map(|(index, value)| message(index, value)).collect()
}

fn message(index: usize, value: Value) -> Result<Message, ApiError> {
    let wrong = |what: &str| ApiError::of(&format!("messages[{index}]"), format!("messages[{index}]: {what}"));
    let Value::Object(fields) = value else { return Err(wrong("no object")) };
    let mut fields = Fields(fields);
    let role = match fields.take("role") {
        Some(Value::String(role)) => role,
        _ => return Err(wrong("it has no role")),
    };
    let role = match role.as_str() {
        // The newer name; templates know the older one.
        "developer" => "system",
        "system" | "user" | "assistant" => role.as_str(),
        other => return Err(wrong(&format!("the role '{other}' is not supported; take system, user or assistant"))),
    };
    for calls in ["tool_calls", "function_call"] {
        if fields.take(calls).is_some_and(|value| !empty(&value)) {
            return Err(wrong(&format!("{calls} is not supported")));
        }
    }
    let content = match fields.take("content") {
        Some(Value::String(text)) => text,
        Some(Value::Array(parts)) => {
            let text = |part: &Value| {
                let is_text = part.get("type").and_then(Value::as_str) == Some("text");
                part.get("text").and_then(Value::as_str).filter(|_| is_text).map(str::to_owned)
            };
            let texts = parts.iter().map(|part| text(part).ok_or_else(|| wrong("a part of the content is no text")));
            texts.collect::<Result<Vec<_>, _>>()?.join("\n")
        }
        _ => return Err(wrong("the content is neither text nor parts of text")),
    };
    let message = Message::new(role, content);
    Ok(match fields.take("name") {
        Some(Value::String(name)) => message.name(name),
        _ => message,
    })
}

/// What all answers to a request have in common.
#[derive(Clone, Debug)]
pub(super) struct Frame {
    pub endpoint: Endpoint,
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    pub model: String,
}

/// Tokens of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Usage {
    pub prompt: u64,
    pub completion: u64,
}

impl Usage {
    fn json(self) -> Value {
        let Self { prompt, completion } = self;
        json!({ "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion })
    }
}

impl Frame {
    pub fn new(endpoint: Endpoint, number: u64, created: u64, model: &str) -> Self {
        let prefix = match endpoint {
            Endpoint::Completions => "cmpl",
            Endpoint::Chat => "chatcmpl",
        };
        Self { endpoint, id: format!("{prefix}-{number:016x}"), created, model: model.to_owned() }
    }

    fn json(&self, object: &str, choices: Value) -> Value {
        let Self { id, created, model, .. } = self;
        json!({ "id": id, "object": object, "created": created, "model": model, "choices": choices })
    }

    /// The whole answer; of each choice its text and why it ended.
    pub fn whole(&self, choices: &[(String, &str)], usage: Usage) -> Value {
        let choice = |(index, (text, finish)): (usize, &(String, &str))| match self.endpoint {
            Endpoint::Completions => {
                json!({ "index": index, "text": text, "logprobs": null, "finish_reason": finish })
            }
            Endpoint::Chat => json!({
                "index": index,
                "message": { "role": "assistant", "content": text, "refusal": null },
                "logprobs": null,
                "finish_reason": finish,
            }),
        };
        let object = match self.endpoint {
            Endpoint::Completions => "text_completion",
            Endpoint::Chat => "chat.completion",
        };
        let choices = choices.iter().enumerate().map(choice).collect();
        let mut answer = self.json(object, choices);
        answer["usage"] = usage.json();
        answer
    }

    /// What comes before the first token of a choice of a conversation.
    pub fn role(&self, index: usize) -> Option<Value> {
        let delta = json!({ "role": "assistant", "content": "", "refusal": null });
        (self.endpoint == Endpoint::Chat).then(|| self.delta(index, delta, None))
    }

    /// A piece of a choice.
    pub fn piece(&self, index: usize, text: &str, finish: Option<&str>) -> Value {
        match self.endpoint {
            Endpoint::Completions => {
                let choice = json!({ "index": index, "text": text, "logprobs": null, "finish_reason": finish });
                self.json("text_completion", json!([choice]))
            }
            Endpoint::Chat => {
                let delta = if text.is_empty() { json!({}) } else { json!({ "content": text }) };
                self.delta(index, delta, finish)
            }
        }
    }

    fn delta(&self, index: usize, delta: Value, finish: Option<&str>) -> Value {
        let choice = json!({ "index": index, "delta": delta, "logprobs": null, "finish_reason": finish });
        self.json("chat.completion.chunk", json!([choice]))
    }

    /// The last piece of a stream whose usage is asked for.
    pub fn usage(&self, usage: Usage) -> Value {
        let object = match self.endpoint {
            Endpoint::Completions => "text_completion",
            Endpoint::Chat => "chat.completion.chunk",
        };
        let mut last = self.json(object, json!([]));
        last["usage"] = usage.json();
        last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(endpoint: Endpoint, body: &Value) -> Result<Call, ApiError> {
        Call::read(endpoint, body.to_string().as_bytes(), "m")
    }

    fn with(fields: Value) -> Value {
        let mut body = json!({ "model": "m", "prompt": "x" });
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        body
    }

    #[test]
    fn defaults_match_openai() {
        let call = read(Endpoint::Completions, &with(json!({}))).unwrap();
        assert_eq!((call.n, call.max_tokens, call.seed, call.stream), (1, Some(16), None, false));
        assert_eq!(call.params, SampleParams::default().temperature(1.0));
        let chat = json!({ "messages": [{ "role": "user", "content": "hi" }], "temperature": null });
        let call = read(Endpoint::Chat, &chat).unwrap();
        assert_eq!((call.max_tokens, call.params.temperature), (None, 1.0));
    }

    #[test]
    fn prompts_have_four_forms() {
        let of = |prompt: Value| {
            let call = read(Endpoint::Completions, &with(json!({ "prompt": prompt })))?;
            Ok::<_, ApiError>(call.prompts.iter().map(|prompt| format!("{prompt:?}")).collect::<Vec<_>>())
        };
        assert_eq!(of(json!("a")).unwrap(), ["Text(\"a\")"]);
        assert_eq!(of(json!(["a", "b"])).unwrap(), ["Text(\"a\")", "Text(\"b\")"]);
        assert_eq!(of(json!([1, 2])).unwrap(), ["Ids([1, 2])"]);
        assert_eq!(of(json!([[1, 2], [3]])).unwrap(), ["Ids([1, 2])", "Ids([3])"]);
        for wrong in
            [json!([]), json!(7), json!({}), json!([1, "a"]), json!([-1]), json!([[1.5]]), json!([4294967296u64])]
        {
            assert_eq!(of(wrong.clone()).unwrap_err().param.as_deref(), Some("prompt"), "{wrong}");
        }
    }

    #[test]
    fn unsupported_parameters_are_rejected_by_name() {
        for (name, value) in [
            ("logit_bias", json!({ "5": 1 })),
            ("frequency_penalty", json!(0.5)),
            ("presence_penalty", json!(-1)),
            ("logprobs", json!(1)),
            ("logprobs", json!(0)),
            ("logprobs", json!(true)),
            ("tools", json!([{ "type": "function" }])),
            ("tool_choice", json!("required")),
            ("response_format", json!({ "type": "json_object" })),
            ("echo", json!(true)),
            ("suffix", json!("x")),
            ("best_of", json!(2)),
            ("n", json!(9)),
            ("n", json!(0)),
            ("max_tokens", json!(0)),
            ("max_completion_tokens", json!("5")),
            ("temperature", json!(-1)),
            ("temperature", json!("hot")),
            ("top_p", json!(0)),
            ("min_p", json!(2)),
            ("top_k", json!(-2)),
            ("seed", json!(1.5)),
            ("stop", json!(["a", "b", "c", "d", "e"])),
            ("stop", json!([1])),
            ("stream", json!("yes")),
            ("stream_options", json!(true)),
        ] {
            let error = read(Endpoint::Completions, &with(json!({ name: value }))).unwrap_err();
            assert_eq!((error.status, error.param.as_deref()), (StatusCode::BAD_REQUEST, Some(name)), "{value}");
        }
        let neutral = json!({
            "logit_bias": {}, "frequency_penalty": 0, "presence_penalty": 0.0, "logprobs": null, "tools": [], "echo": false,
            "response_format": { "type": "text" }, "best_of": 1, "user": "me", "unheard_of": [1], "stop": null, "top_k": -1,
        });
        assert_eq!(read(Endpoint::Completions, &with(neutral)).unwrap().params.top_k, 0);
    }

    #[test]
    fn floats_keep_their_bits() {
        let call = |fields: Value| read(Endpoint::Completions, &with(fields)).unwrap();
        assert_eq!(call(json!({ "seed": -1 })).seed, Some(u64::MAX));
        assert_eq!(call(json!({ "seed": u64::MAX })).seed, Some(u64::MAX));
        assert_eq!(call(json!({ "max_tokens": 3, "max_completion_tokens": 4 })).max_tokens, Some(4));
        assert_eq!(call(json!({ "temperature": 0 })).params.temperature, 0.0);
    }

    #[test]
    fn messages_are_text() {
        let of = |message: Value| {
            let call = read(Endpoint::Chat, &json!({ "messages": [message] }))?;
            let Prompt::Chat(messages) = &call.prompts[0] else { panic!("no conversation") };
            Ok::<_, ApiError>(serde_json::to_value(&messages[0]).unwrap())
        };
        let parts = json!([{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }]);
        assert_eq!(of(json!({ "role": "user", "content": parts })).unwrap()["content"], "a\nb");
        assert_eq!(of(json!({ "role": "developer", "content": "x" })).unwrap()["role"], "system");
        for (wrong, says) in [
            (json!({ "role": "tool", "content": "x" }), "tool"),
            (json!({ "content": "x" }), "no role"),
            (json!({ "role": "user" }), "content"),
            (json!({ "role": "user", "content": [{ "type": "image_url", "image_url": {} }] }), "no text"),
            (json!({ "role": "assistant", "content": "", "tool_calls": [{}] }), "tool_calls"),
            (json!("hi"), "no object"),
        ] {
            let error = of(wrong).unwrap_err();
            assert!(error.message.contains(says) && error.param.as_deref() == Some("messages[0]"), "{error:?}");
        }
        for wrong in [json!({}), json!({ "messages": [] }), json!({ "messages": "hi" })] {
            assert_eq!(read(Endpoint::Chat, &wrong).unwrap_err().param.as_deref(), Some("messages"));
        }
    }

    #[test]
    fn errors_have_the_form_of_openai() {
        let error = Call::read(Endpoint::Chat, br#"{"model": "other"}"#, "m").unwrap_err();
        assert_eq!(error.status, StatusCode::NOT_FOUND);
        let json = error.json();
        assert_eq!((&json["error"]["code"], &json["error"]["param"]), (&json!("model_not_found"), &json!("model")));
        assert_eq!(json["error"]["type"], "invalid_request_error");
        assert!(Call::read(Endpoint::Chat, b"{", "m").unwrap_err().message.contains("no JSON"));
        assert_eq!(ApiError::from(SubmitError::Full).retry_after, Some(1));
        let long = AdmissionError::TooLong { prompt: 9, max_new_tokens: 9, context: 10 };
        assert_eq!(ApiError::from(SubmitError::Admission(long)).json()["error"]["code"], "context_length_exceeded");
    }
}
