//! Writes answers in the format of OpenAI's API.

use serde_json::{Map, Value, json};

use super::tool_calls::ToolCall;

/// An endpoint that generates text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Endpoint {
    Completions,
    Chat,
}

/// The smallest log probability in an answer, because JSON has no infinity.
const LOGPROB_MIN: f32 = -9999.0;

/// A token with its log probability.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TokenLogprob {
    pub text: String,
    /// The bytes of the token, possibly a part of a character.
    pub bytes: Vec<u8>,
    pub logprob: f32,
}

impl TokenLogprob {
    fn value(&self) -> f32 {
        if self.logprob >= LOGPROB_MIN { self.logprob } else { LOGPROB_MIN }
    }

    fn json(&self) -> Value {
        json!({ "token": self.text, "logprob": self.value(), "bytes": self.bytes })
    }
}

/// A generated token with log probabilities.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SampledLogprobs {
    pub token: TokenLogprob,
    /// The most likely tokens.
    pub top: Vec<TokenLogprob>,
    /// The number of characters of all tokens before this one.
    pub offset: usize,
}

impl SampledLogprobs {
    /// Returns the approximate size in an answer, bytes.
    pub fn bytes(&self) -> usize {
        let of = |token: &TokenLogprob| 64 + token.text.len() + 4 * token.bytes.len();
        of(&self.token) + self.top.iter().map(of).sum::<usize>()
    }
}

/// A choice of an answer, or a piece of one.
#[derive(Clone, Debug, Default)]
pub(super) struct AnswerChoice {
    pub text: String,
    /// Tool calls, which are not part of the text.
    pub tool_calls: Vec<ToolCall>,
    /// Why the text ended; `None` if it continues.
    pub finish: Option<&'static str>,
    /// Log probabilities of the tokens, if requested.
    pub logprobs: Option<Vec<SampledLogprobs>>,
}

impl AnswerChoice {
    /// Whether the choice has neither text nor calls.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty() && self.tool_calls.is_empty()
    }

    /// Returns the JSON of the calls; in a stream, with their indices.
    fn tool_calls_json(&self, numbered: bool) -> Value {
        let to_json = |call: &ToolCall| {
            let ToolCall { index, id, name, arguments } = call;
            let function = json!({ "name": name, "arguments": arguments });
            let mut json = json!({ "id": id, "type": "function", "function": function });
            if numbered {
                json["index"] = json!(index);
            }
            json
        };
        self.tool_calls.iter().map(to_json).collect()
    }
}

/// The values that all messages of an answer share.
#[derive(Clone, Debug)]
pub(super) struct Frame {
    pub endpoint: Endpoint,
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    pub model: String,
}

/// Token counts of a request.
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

    fn logprobs(&self, tokens: Option<&[SampledLogprobs]>) -> Value {
        let Some(tokens) = tokens else { return Value::Null };
        match self.endpoint {
            Endpoint::Completions => {
                let top = |sampled: &SampledLogprobs| -> Map<String, Value> {
                    // If tokens have equal texts, the sampled one counts, else the likeliest.
                    let all = sampled.top.iter().rev().chain([&sampled.token]);
                    all.map(|token| (token.text.clone(), json!(token.value()))).collect()
                };
                let all = |of: &dyn Fn(&SampledLogprobs) -> Value| tokens.iter().map(of).collect::<Value>();
                json!({
                    "tokens": all(&|sampled| json!(sampled.token.text)),
                    "token_logprobs": all(&|sampled| json!(sampled.token.value())),
                    "top_logprobs": all(&|sampled| Value::Object(top(sampled))),
                    "text_offset": all(&|sampled| json!(sampled.offset)),
                })
            }
            Endpoint::Chat => {
                let entry = |sampled: &SampledLogprobs| {
                    let mut token = sampled.token.json();
                    token["top_logprobs"] = sampled.top.iter().map(TokenLogprob::json).collect();
                    token
                };
                json!({ "content": tokens.iter().map(entry).collect::<Value>(), "refusal": null })
            }
        }
    }

    /// Returns a whole answer.
    pub fn complete(&self, choices: &[AnswerChoice], usage: Usage) -> Value {
        let choice = |(index, choice): (usize, &AnswerChoice)| {
            let AnswerChoice { text, finish, logprobs, .. } = choice;
            let logprobs = self.logprobs(logprobs.as_deref());
            match self.endpoint {
                Endpoint::Completions => {
                    json!({ "index": index, "text": text, "logprobs": logprobs, "finish_reason": finish })
                }
                Endpoint::Chat => {
                    let mut message = json!({ "role": "assistant", "content": text, "refusal": null });
                    if !choice.tool_calls.is_empty() {
                        message["tool_calls"] = choice.tool_calls_json(false);
                        if text.trim().is_empty() {
                            message["content"] = Value::Null;
                        }
                    }
                    json!({ "index": index, "message": message, "logprobs": logprobs, "finish_reason": finish })
                }
            }
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

    /// Returns the message before the first token of a chat choice; `None` for completions.
    pub fn role(&self, index: usize) -> Option<Value> {
        let delta = json!({ "role": "assistant", "content": "", "refusal": null });
        (self.endpoint == Endpoint::Chat).then(|| self.delta(index, delta, Value::Null, None))
    }

    /// Returns a piece of a choice, as a message of a stream.
    pub fn piece(&self, index: usize, piece: &AnswerChoice) -> Value {
        let AnswerChoice { text, finish, logprobs, .. } = piece;
        let logprobs = self.logprobs(logprobs.as_deref());
        match self.endpoint {
            Endpoint::Completions => {
                let choice = json!({ "index": index, "text": text, "logprobs": logprobs, "finish_reason": finish });
                self.json("text_completion", json!([choice]))
            }
            Endpoint::Chat => {
                let mut delta = if text.is_empty() { json!({}) } else { json!({ "content": text }) };
                if !piece.tool_calls.is_empty() {
                    delta["tool_calls"] = piece.tool_calls_json(true);
                }
                self.delta(index, delta, logprobs, *finish)
            }
        }
    }

    fn delta(&self, index: usize, delta: Value, logprobs: Value, finish: Option<&str>) -> Value {
        let choice = json!({ "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish });
        self.json("chat.completion.chunk", json!([choice]))
    }

    /// Returns the last message of a stream with usage.
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

    #[test]
    fn logprobs_have_the_form_of_each_endpoint() {
        let token = |text: &str, logprob| TokenLogprob { text: text.into(), bytes: text.into(), logprob };
        let sampled =
            SampledLogprobs { token: token("b", -1.5), top: vec![token("a", -0.5), token("c", f32::NAN)], offset: 3 };
        let choice = AnswerChoice {
            text: "b".into(),
            finish: Some("length"),
            logprobs: Some(vec![sampled]),
            ..AnswerChoice::default()
        };
        let of = |endpoint| Frame::new(endpoint, 1, 2, "m").complete(std::slice::from_ref(&choice), Usage::default());
        let logprobs = &of(Endpoint::Completions)["choices"][0]["logprobs"];
        let expected = json!({ "tokens": ["b"], "token_logprobs": [-1.5], "text_offset": [3],
            "top_logprobs": [{ "a": -0.5, "b": -1.5, "c": -9999.0 }] });
        assert_eq!(*logprobs, expected);
        let logprobs = &of(Endpoint::Chat)["choices"][0]["logprobs"]["content"][0];
        let expected = json!({ "token": "b", "logprob": -1.5, "bytes": [98], "top_logprobs": [
            { "token": "a", "logprob": -0.5, "bytes": [97] }, { "token": "c", "logprob": -9999.0, "bytes": [99] }] });
        assert_eq!(*logprobs, expected);
        let piece = Frame::new(Endpoint::Chat, 1, 2, "m").piece(0, &AnswerChoice::default());
        assert_eq!((&piece["choices"][0]["logprobs"], &piece["choices"][0]["delta"]), (&Value::Null, &json!({})));
    }
}
