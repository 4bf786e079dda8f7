//! Parses `/tokenize` and `/detokenize` requests, in the format of vLLM's API.

use serde_json::{Value, json, value::RawValue};

use super::{
    api,
    error::ApiError,
    fields::{Fields, ids, text},
    tools::Tools,
};
use crate::text::{Conversation, Prompt};

/// Supported fields, and unsupported ones that are rejected.
const FIELDS: &[&str] = &[
    "model",
    "prompt",
    "messages",
    "add_special_tokens",
    "return_token_strs",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tools",
];

/// A parsed `/tokenize` request.
#[derive(Debug)]
pub(super) struct Tokenize {
    pub prompt: Prompt,
    /// Whether to return the text of each token, too.
    pub strings: bool,
}

impl Tokenize {
    /// Parses a body.
    pub fn read(body: &[u8], model: &str) -> Result<Self, ApiError> {
        let mut fields = read(body, FIELDS)?;
        api::check_model(&mut fields, model)?;
        let special = fields.value("add_special_tokens")?;
        let special = match special {
            None => None,
            Some(Value::Bool(flag)) => Some(flag),
            Some(_) => return Err(ApiError::of("add_special_tokens", "add_special_tokens is neither true nor false")),
        };
        let prompt = match (fields.take("prompt"), fields.take("messages")) {
            (Some(raw), None) => {
                let text = text(raw).ok_or_else(|| ApiError::of("prompt", "prompt is not a text"))?;
                if special.unwrap_or(true) { Prompt::Text(text) } else { Prompt::Plain(text) }
            }
            (None, Some(raw)) => {
                let tools = Tools::read(&mut fields)?.map(|tools| tools.definitions);
                Prompt::Chat(Conversation { messages: api::messages(Some(raw))?, tools })
            }
            _ => return Err(ApiError::of("prompt", "give either prompt or messages")),
        };
        let is_chat = matches!(prompt, Prompt::Chat(_));
        let unsupported = [
            ("add_special_tokens", is_chat && special == Some(true)),
            ("add_generation_prompt", !fields.is_neutral("add_generation_prompt", |value| *value == json!(true))),
            ("continue_final_message", !fields.is_neutral("continue_final_message", |value| *value == json!(false))),
            ("chat_template", fields.take("chat_template").is_some()),
            ("tools", !fields.is_neutral("tools", |value| *value == json!([]))),
        ];
        if let Some((name, _)) = unsupported.iter().find(|(_, unsupported)| *unsupported) {
            let message = format!("this value of {name} is not supported here; leave it out");
            return Err(ApiError::of(name, message).code("unsupported_parameter"));
        }
        Ok(Self { prompt, strings: fields.flag("return_token_strs")? })
    }
}

/// Parses the tokens of a `/detokenize` request.
pub(super) fn read_tokens(body: &[u8], model: &str) -> Result<Vec<u32>, ApiError> {
    let mut fields = read(body, &["model", "tokens"])?;
    api::check_model(&mut fields, model)?;
    let tokens = fields.take("tokens").and_then(|raw: &RawValue| ids(raw));
    tokens.ok_or_else(|| ApiError::of("tokens", "tokens is not a list of token ids"))
}

fn read<'a>(body: &'a [u8], names: &'static [&'static str]) -> Result<Fields<'a>, ApiError> {
    Fields::read(body, names).map_err(|error| ApiError::bad(format!("the body is not a JSON object: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_are_read() {
        let of = |body: Value| {
            Tokenize::read(body.to_string().as_bytes(), "m").map(|parsed| (parsed.prompt, parsed.strings))
        };
        assert_eq!(of(json!({ "prompt": "a" })).unwrap(), (Prompt::Text("a".into()), false));
        let plain = json!({ "model": "m", "prompt": "a", "add_special_tokens": false, "return_token_strs": true });
        assert_eq!(of(plain).unwrap(), (Prompt::Plain("a".into()), true));
        let messages = json!([{ "role": "user", "content": "hi" }]);
        assert!(matches!(of(json!({ "messages": messages })).unwrap().0, Prompt::Chat(_)));
        for (name, wrong) in [
            ("prompt", json!({})),
            ("prompt", json!({ "prompt": 5 })),
            ("prompt", json!({ "prompt": "a", "messages": messages })),
            ("model", json!({ "model": "other", "prompt": "a" })),
            ("add_special_tokens", json!({ "prompt": "a", "add_special_tokens": 1 })),
            ("add_special_tokens", json!({ "messages": messages, "add_special_tokens": true })),
            ("add_generation_prompt", json!({ "messages": messages, "add_generation_prompt": false })),
            ("return_token_strs", json!({ "prompt": "a", "return_token_strs": "yes" })),
            ("chat_template", json!({ "messages": messages, "chat_template": "x" })),
            ("tools", json!({ "messages": messages, "tools": [{}] })),
        ] {
            assert_eq!(of(wrong.clone()).unwrap_err().param.as_deref(), Some(name), "{wrong}");
        }
        let tokens = |body: Value| read_tokens(body.to_string().as_bytes(), "m");
        assert_eq!(tokens(json!({ "tokens": [1, 2] })).unwrap(), [1, 2]);
        for wrong in [json!({}), json!({ "tokens": "1" }), json!({ "tokens": [-1] }), json!({ "tokens": [1.5] })] {
            assert_eq!(tokens(wrong).unwrap_err().param.as_deref(), Some("tokens"));
        }
    }
}
