//! Parses requests of OpenAI's API. Nothing here depends on connections or threads.

use std::sync::LazyLock;

use serde_json::{Map, Value, json, value::RawValue};

use super::{
    error::ApiError,
    fields::{Fields, each, ids, text},
    frame::Endpoint,
    sampling::{self, Sampling},
    structure,
    tools::{self, Tools},
};
use crate::text::{self, Conversation, Grammar, Message};

/// The maximum number of texts per prompt (`n`).
const CHOICES_MAX: u64 = 8;
/// The maximum number of stop strings of a request.
const STOPS_MAX: usize = 4;
/// The maximum size of a stop string, bytes, because every token searches the text for it.
const STOP_BYTES_MAX: usize = 1024;
/// The default of `max_tokens` for `/v1/completions`, as in OpenAI's API.
const COMPLETION_TOKENS_DEFAULT: u32 = 16;

/// Supported fields of requests.
const SUPPORTED: &[&str] = &[
    "model",
    "prompt",
    "messages",
    "n",
    "best_of",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "echo",
    "stream",
    "stream_options",
];
/// All fields that are parsed; other fields are skipped.
static FIELDS: LazyLock<Vec<&str>> = LazyLock::new(|| {
    let supported = SUPPORTED.iter().chain(sampling::FIELDS).chain(structure::FIELDS).chain(tools::FIELDS).copied();
    supported.chain(UNSUPPORTED.iter().map(|(name, _)| *name)).collect()
});
/// The fields of a message that are parsed.
const MESSAGE_FIELDS: &[&str] = &["role", "content", "name", "tool_calls", "tool_call_id", "function_call"];

/// A predicate: whether a field's value has no effect.
type Neutral = fn(&Value) -> bool;

/// Unsupported fields that would change the answer, with the values that have no effect. `null` never has an effect.
const UNSUPPORTED: &[(&str, Neutral)] = &[
    ("functions", empty),
    ("function_call", |value| matches!(value.as_str(), Some("none" | "auto"))),
    ("modalities", |value| *value == json!(["text"])),
    ("audio", never),
    ("suffix", |value| value.as_str() == Some("")),
];

fn empty(value: &Value) -> bool {
    value.as_array().is_some_and(Vec::is_empty) || value.as_object().is_some_and(Map::is_empty)
}

fn never(_: &Value) -> bool {
    false
}

/// A prompt of a request.
#[derive(Debug)]
pub(super) enum Prompt {
    Text(text::Prompt),
    Ids(Vec<u32>),
}

/// A parsed request.
#[derive(Debug)]
pub(super) struct ApiRequest {
    pub prompts: Vec<Prompt>,
    /// The number of texts for each prompt.
    pub n: u32,
    pub sampling: Sampling,
    /// The grammar that the answer must match, and the field that contains it.
    pub grammar: Option<(&'static str, Grammar)>,
    /// The tools that the model may call.
    pub tools: Option<Tools>,
    /// `None` means as many as the context holds.
    pub max_tokens: Option<u32>,
    pub stop: Vec<String>,
    /// Whether each text starts with its prompt.
    pub echo: bool,
    pub stream: bool,
    pub include_usage: bool,
}

impl ApiRequest {
    /// Parses a body. `model` is the served model, and `prompts_max` the maximum number of prompts that can run and
    /// wait.
    pub fn read(endpoint: Endpoint, body: &[u8], model: &str, prompts_max: usize) -> Result<Self, ApiError> {
        let fields = Fields::read(body, &FIELDS);
        let mut fields = fields.map_err(|error| ApiError::bad(format!("the body is not a JSON object: {error}")))?;
        check_model(&mut fields, model)?;
        let tools = match endpoint {
            Endpoint::Completions => no_tools(&mut fields)?,
            Endpoint::Chat => Tools::read(&mut fields)?,
        };
        let prompts = match endpoint {
            Endpoint::Completions => prompts(fields.take("prompt"), prompts_max)?,
            Endpoint::Chat => {
                let messages = messages(fields.take("messages"))?;
                let tools = tools.as_ref().map(|tools| tools.definitions.clone());
                vec![Prompt::Text(text::Prompt::Chat(Conversation { messages, tools }))]
            }
        };
        let n = fields.integer("n", 1, CHOICES_MAX)?.unwrap_or(1) as u32;
        if let Some(best_of) = fields.integer("best_of", 1, u64::MAX)?
            && best_of != u64::from(n)
        {
            return Err(ApiError::of("best_of", "best_of other than n is not supported; leave it out"));
        }
        let sampling = Sampling::read(&mut fields, endpoint)?;
        let max = u64::from(u32::MAX);
        let (older, newer) = (fields.integer("max_tokens", 1, max)?, fields.integer("max_completion_tokens", 1, max)?);
        let default = (endpoint == Endpoint::Completions).then_some(COMPLETION_TOKENS_DEFAULT);
        let max_tokens = newer.or(older).map(|tokens| tokens as u32).or(default);
        let min_tokens = sampling.adjustments.min_new_tokens;
        if let Some(max_tokens) = max_tokens.filter(|max_tokens| min_tokens > *max_tokens) {
            let message = format!("min_tokens = {min_tokens} exceeds max_tokens = {max_tokens}");
            return Err(ApiError::of("min_tokens", message));
        }
        let grammar = structure::read(&mut fields)?;
        check_grammar(grammar.as_ref(), tools.as_ref(), min_tokens)?;
        let call = Self {
            prompts,
            n,
            echo: echo(&mut fields, endpoint, &sampling)?,
            sampling,
            grammar,
            tools,
            max_tokens,
            stop: stop(fields.value("stop")?)?,
            stream: fields.flag("stream")?,
            include_usage: match fields.take("stream_options") {
                None => false,
                Some(options) => match Fields::read(options.get().as_bytes(), &["include_usage"]) {
                    Ok(mut options) => options.flag("include_usage")?,
                    Err(_) => return Err(ApiError::of("stream_options", "stream_options is not an object")),
                },
            },
        };
        for (name, neutral) in UNSUPPORTED {
            if !fields.is_neutral(name, neutral) {
                let message = format!("{name} is not supported here; leave it out");
                return Err(ApiError::of(name, message).code("unsupported_parameter"));
            }
        }
        Ok(call)
    }
}

/// Rejects tools in a completion, which does not support them.
fn no_tools(fields: &mut Fields) -> Result<Option<Tools>, ApiError> {
    for name in ["tools", "tool_choice"] {
        if !fields.is_neutral(name, |value| empty(value) || matches!(value.as_str(), Some("none" | "auto"))) {
            let message = format!("{name} is a field of conversations; use /v1/chat/completions");
            return Err(ApiError::of(name, message).code("unsupported_parameter"));
        }
    }
    Ok(None)
}

/// Rejects fields that contradict a grammar.
fn check_grammar(
    grammar: Option<&(&'static str, Grammar)>,
    tools: Option<&Tools>,
    min_tokens: u32,
) -> Result<(), ApiError> {
    let forced = tools.is_some_and(|tools| tools.choice != tools::ToolChoice::Auto);
    if min_tokens > 0 && (grammar.is_some() || forced) {
        let message = "min_tokens is not supported where the answer must match a grammar; leave it out";
        return Err(ApiError::of("min_tokens", message).code("unsupported_parameter"));
    }
    match grammar {
        Some((name, _)) if forced => {
            let message = format!("{name} contradicts tool_choice, which requires a tool call; leave one out");
            Err(ApiError::of("tool_choice", message))
        }
        Some((name, Grammar::Regex(_) | Grammar::Lark(_))) if tools.is_some() => {
            let message = format!("{name} with tools must be a JSON schema; leave one out");
            Err(ApiError::of(name, message).code("unsupported_parameter"))
        }
        _ => Ok(()),
    }
}

/// Rejects a model name other than the served one.
pub(super) fn check_model(fields: &mut Fields, model: &str) -> Result<(), ApiError> {
    match fields.value("model")? {
        None => Ok(()),
        Some(Value::String(name)) if name == model => Ok(()),
        Some(other) => Err(ApiError::model(format!("the model {other} is not served here; use \"{model}\""))),
    }
}

fn echo(fields: &mut Fields, endpoint: Endpoint, sampling: &Sampling) -> Result<bool, ApiError> {
    let unsupported = |message: &str| Err(ApiError::of("echo", message).code("unsupported_parameter"));
    match fields.flag("echo")? {
        true if endpoint == Endpoint::Chat => unsupported("echo is not supported for conversations; leave it out"),
        true if sampling.logprobs.is_some() => {
            unsupported("echo with logprobs is not supported: prompts have no log probabilities here; leave one out")
        }
        echo => Ok(echo),
    }
}

fn stop(value: Option<Value>) -> Result<Vec<String>, ApiError> {
    let wrong = || ApiError::of("stop", format!("stop is neither text nor a list of up to {STOPS_MAX} texts"));
    let stops = match value {
        None => Vec::new(),
        Some(Value::String(text)) => vec![text],
        Some(Value::Array(texts)) if texts.len() <= STOPS_MAX => {
            let text = |text: &Value| text.as_str().map(str::to_owned).ok_or_else(wrong);
            texts.iter().map(text).collect::<Result<Vec<_>, _>>()?
        }
        Some(_) => return Err(wrong()),
    };
    match stops.iter().map(String::len).find(|length| *length > STOP_BYTES_MAX) {
        None => Ok(stops),
        Some(length) => {
            Err(ApiError::of("stop", format!("a text of stop has {length} bytes; the limit is {STOP_BYTES_MAX}")))
        }
    }
}

/// Parses one text, several texts, the ids of one prompt, or a list of id lists.
fn prompts(raw: Option<&RawValue>, prompts_max: usize) -> Result<Vec<Prompt>, ApiError> {
    let wrong = || ApiError::of("prompt", "prompt is neither text, texts, token ids nor lists of them; give one");
    let raw = raw.ok_or_else(wrong)?;
    let parse_one = |raw: &RawValue| {
        let of_text = || text(raw).map(|text| Prompt::Text(text::Prompt::Text(text)));
        of_text().or_else(|| ids(raw).map(Prompt::Ids)).ok_or_else(wrong)
    };
    // A list of numbers is one prompt.
    let first = raw.get().strip_prefix('[').map(str::trim_start);
    if first.is_none_or(|rest| rest.starts_with(|c: char| c.is_ascii_digit() || c == '-')) {
        return Ok(vec![parse_one(raw)?]);
    }
    let mut prompts = Vec::new();
    let listed = each(raw, |at, raw| {
        if at >= prompts_max {
            let message =
                format!("the request has more than {prompts_max} prompts, the limit of running and waiting ones");
            return Err(ApiError::of("prompt", format!("{message}; split the request")));
        }
        prompts.push(parse_one(raw)?);
        Ok(())
    });
    listed.unwrap_or_else(|| Err(wrong()))?;
    if prompts.is_empty() { Err(wrong()) } else { Ok(prompts) }
}

pub(super) fn messages(raw: Option<&RawValue>) -> Result<Vec<Message>, ApiError> {
    let wrong = |what: &str| ApiError::of("messages", format!("messages {what}; send at least one message"));
    let mut messages = Vec::new();
    let listed = raw.and_then(|raw| {
        each(raw, |index, raw| {
            messages.push(message(index, raw)?);
            Ok(())
        })
    });
    listed.ok_or_else(|| wrong("is not a list"))??;
    if messages.is_empty() { Err(wrong("is empty")) } else { Ok(messages) }
}

fn message(index: usize, raw: &RawValue) -> Result<Message, ApiError> {
    let wrong = |what: &str| ApiError::of(&format!("messages[{index}]"), format!("messages[{index}]: {what}"));
    let mut fields = Fields::read(raw.get().as_bytes(), MESSAGE_FIELDS).map_err(|_| wrong("it is not an object"))?;
    let role = fields.take("role").and_then(text).ok_or_else(|| wrong("it has no role"))?;
    let role = match role.as_str() {
        // `developer` is the newer name; templates know only `system`.
        "developer" => "system",
        "system" | "user" | "assistant" | "tool" => role.as_str(),
        other => {
            return Err(wrong(&format!(
                "the role '{other}' is not supported; use system, developer, user, assistant or tool"
            )));
        }
    };
    if !fields.is_neutral("function_call", empty) {
        return Err(wrong("function_call is not supported; use tool_calls"));
    }
    let calls = fields.take("tool_calls").map(|raw| tools::earlier_calls(raw, &wrong)).transpose()?.flatten();
    if calls.is_some() && role != "assistant" {
        return Err(wrong("tool_calls is for the role assistant"));
    }
    let content = match fields.take("content") {
        // A message with tool calls needs no content.
        None if calls.is_some() => Some(Ok(String::new())),
        None => None,
        Some(raw) => text(raw).map(Ok).or_else(|| parts(raw, &wrong)),
    };
    let content = content.unwrap_or_else(|| Err(wrong("the content is neither text nor parts of text")))?;
    let mut message = Message::new(role, content);
    if let Some(name) = fields.take("name").and_then(text) {
        message = message.name(name);
    }
    if let Some(calls) = calls {
        message = message.tool_calls(calls);
    }
    if let Some(id) = fields.take("tool_call_id").and_then(text) {
        message = message.tool_call_id(id);
    }
    Ok(message)
}

/// Joins the texts of content parts with line breaks; `None` if the content is not a list.
fn parts(raw: &RawValue, wrong: &dyn Fn(&str) -> ApiError) -> Option<Result<String, ApiError>> {
    let mut content = String::new();
    let listed = each(raw, |at, raw| {
        let part = || -> Option<String> {
            let mut part = Fields::read(raw.get().as_bytes(), &["type", "text"]).ok()?;
            let is_text = part.take("type").and_then(text)? == "text";
            part.take("text").and_then(text).filter(|_| is_text)
        };
        let part = part().ok_or_else(|| wrong("a part of the content is not text"))?;
        if at > 0 {
            content.push('\n');
        }
        content += &part;
        Ok(())
    });
    listed.map(|listed| listed.map(|()| content))
}

#[cfg(test)]
mod tests {
    use hyper::StatusCode;
    use unweight_engine::{AdmissionError, SampleParams};

    use super::*;
    use crate::serve::worker::SubmitError;

    fn read(endpoint: Endpoint, body: &Value) -> Result<ApiRequest, ApiError> {
        ApiRequest::read(endpoint, body.to_string().as_bytes(), "m", 8)
    }

    fn with(fields: Value) -> Value {
        let mut body = json!({ "model": "m", "prompt": "x" });
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        body
    }

    #[test]
    fn defaults_match_openai() {
        let call = read(Endpoint::Completions, &with(json!({}))).unwrap();
        assert_eq!((call.n, call.max_tokens, call.sampling.seed, call.stream), (1, Some(16), None, false));
        assert_eq!(call.sampling.params, SampleParams::default().temperature(1.0));
        let chat = json!({ "messages": [{ "role": "user", "content": "hi" }], "temperature": null });
        let call = read(Endpoint::Chat, &chat).unwrap();
        assert_eq!((call.max_tokens, call.sampling.params.temperature), (None, 1.0));
    }

    #[test]
    fn prompts_have_four_forms() {
        let of = |prompt: Value| {
            let call = read(Endpoint::Completions, &with(json!({ "prompt": prompt })))?;
            Ok::<_, ApiError>(call.prompts.iter().map(|prompt| format!("{prompt:?}")).collect::<Vec<_>>())
        };
        assert_eq!(of(json!("a")).unwrap(), ["Text(Text(\"a\"))"]);
        assert_eq!(of(json!(["a", "b"])).unwrap(), ["Text(Text(\"a\"))", "Text(Text(\"b\"))"]);
        assert_eq!(of(json!([1, 2])).unwrap(), ["Ids([1, 2])"]);
        assert_eq!(of(json!([[1, 2], [3]])).unwrap(), ["Ids([1, 2])", "Ids([3])"]);
        for wrong in [
            json!([]),
            json!(7),
            json!({}),
            json!([1, "a"]),
            json!([-1]),
            json!([[1.5]]),
            json!([4294967296u64]),
            json!(vec!["a"; 9]),
        ] {
            assert_eq!(of(wrong.clone()).unwrap_err().param.as_deref(), Some("prompt"), "{wrong}");
        }
    }

    #[test]
    fn unsupported_parameters_are_rejected_by_name() {
        for (name, value) in [
            ("min_tokens", json!(17)),
            ("tools", json!([{ "type": "function" }])),
            ("tool_choice", json!("required")),
            ("response_format", json!({ "type": "yaml" })),
            ("echo", json!(1)),
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
            ("stop", json!("x".repeat(1025))),
            ("logit_bias", json!({ "x": "y".repeat(100_000) })),
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
        assert_eq!(read(Endpoint::Completions, &with(neutral)).unwrap().sampling.params.top_k, 0);
        let echo = with(json!({ "echo": true, "max_tokens": 17, "min_tokens": 17 }));
        assert!(read(Endpoint::Completions, &echo).unwrap().echo);
        let both = read(Endpoint::Completions, &with(json!({ "echo": true, "logprobs": 0 }))).unwrap_err();
        assert!(both.param.as_deref() == Some("echo") && both.message.contains("leave one out"), "{both:?}");
        let chat = json!({ "messages": [{ "role": "user", "content": "hi" }], "echo": true });
        assert_eq!(read(Endpoint::Chat, &chat).unwrap_err().param.as_deref(), Some("echo"));
    }

    #[test]
    fn integers_are_read() {
        let call = |fields: Value| read(Endpoint::Completions, &with(fields)).unwrap();
        assert_eq!(call(json!({ "seed": -1 })).sampling.seed, Some(u64::MAX));
        assert_eq!(call(json!({ "seed": u64::MAX })).sampling.seed, Some(u64::MAX));
        assert_eq!(call(json!({ "max_tokens": 3, "max_completion_tokens": 4 })).max_tokens, Some(4));
        assert_eq!(call(json!({ "temperature": 0 })).sampling.params.temperature, 0.0);
    }

    #[test]
    fn messages_are_text() {
        let of = |message: Value| {
            let call = read(Endpoint::Chat, &json!({ "messages": [message] }))?;
            let Prompt::Text(text::Prompt::Chat(chat)) = &call.prompts[0] else { panic!("no conversation") };
            Ok::<_, ApiError>(serde_json::to_value(&chat.messages[0]).unwrap())
        };
        let parts = json!([{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }]);
        assert_eq!(of(json!({ "role": "user", "content": parts })).unwrap()["content"], "a\nb");
        assert_eq!(of(json!({ "role": "developer", "content": "x" })).unwrap()["role"], "system");
        let calls = json!([{ "id": "c", "type": "function", "function": { "name": "f", "arguments": "{\"a\": 1}" } }]);
        let called = of(json!({ "role": "assistant", "content": null, "tool_calls": calls })).unwrap();
        assert_eq!(called["tool_calls"][0]["function"]["arguments"], json!({ "a": 1 }), "templates show objects");
        assert_eq!((&called["content"], &called["tool_calls"][0]["id"]), (&json!(""), &json!("c")));
        let result = of(json!({ "role": "tool", "content": "7", "tool_call_id": "c" })).unwrap();
        assert_eq!(result, json!({ "role": "tool", "content": "7", "tool_call_id": "c" }));
        for (wrong, says) in [
            (json!({ "role": "function", "content": "x" }), "function"),
            (
                json!({ "role": "user", "content": "", "tool_calls": [{ "function": { "name": "f" } }] }),
                "role assistant",
            ),
            (
                json!({ "role": "assistant", "tool_calls": [{ "function": { "name": "f", "arguments": "[]" } }] }),
                "JSON of an object",
            ),
            (json!({ "content": "x" }), "no role"),
            (json!({ "role": "user" }), "content"),
            (json!({ "role": "user", "content": [{ "type": "image_url", "image_url": {} }] }), "not text"),
            (json!({ "role": "assistant", "content": "", "tool_calls": [{}] }), "no function"),
            (json!("hi"), "not an object"),
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
        let error = ApiRequest::read(Endpoint::Chat, br#"{"model": "other"}"#, "m", 8).unwrap_err();
        assert_eq!(error.status, StatusCode::NOT_FOUND);
        let json = error.json();
        assert_eq!((&json["error"]["code"], &json["error"]["param"]), (&json!("model_not_found"), &json!("model")));
        assert_eq!(json["error"]["type"], "invalid_request_error");
        assert!(ApiRequest::read(Endpoint::Chat, b"{", "m", 8).unwrap_err().message.contains("not a JSON object"));
        assert_eq!(ApiError::from(SubmitError::Full).retry_after, Some(1));
        let long = AdmissionError::TooLong { prompt: 9, max_new_tokens: 9, context: 10 };
        assert_eq!(ApiError::from(SubmitError::Admission(long)).json()["error"]["code"], "context_length_exceeded");
    }
}
