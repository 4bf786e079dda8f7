//! Types of prompts, limits and results of encoding, and grammars.

use serde::{Serialize, Serializer, ser::Error as _};
use serde_json::Value;

/// A message of a conversation: its role and its text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Message {
    // The order of fields is that in which `tojson` shows them.
    pub(super) role: String,
    pub(super) content: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) name: Option<String>,
    /// JSON, which as a tree of values would take many times the memory.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "serialize_json")]
    pub(super) tool_calls: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tool_call_id: Option<String>,
}

impl Message {
    /// Creates a message of any role.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into(), name: None, tool_calls: None, tool_call_id: None }
    }

    /// Creates a message of the role `system`.
    pub fn system(content: impl Into<String>) -> Self {
        Self::new("system", content)
    }

    /// Creates a message of the role `user`.
    pub fn user(content: impl Into<String>) -> Self {
        Self::new("user", content)
    }

    /// Sets the name of the author, which some templates show.
    pub fn name(self, name: impl Into<String>) -> Self {
        Self { name: Some(name.into()), ..self }
    }

    /// Sets the tool calls of the assistant: JSON whose arguments are objects.
    #[cfg(feature = "serve")]
    pub(crate) fn tool_calls(self, calls: String) -> Self {
        Self { tool_calls: Some(calls), ..self }
    }

    /// Sets the identifier of the tool call that this message answers.
    #[cfg(feature = "serve")]
    pub(crate) fn tool_call_id(self, id: String) -> Self {
        Self { tool_call_id: Some(id), ..self }
    }

    /// Returns the size of role, content and tool calls, bytes.
    fn bytes(&self) -> usize {
        self.role.len() + self.content.len() + self.tool_calls.as_ref().map_or(0, String::len)
    }
}

/// Serializes JSON as the value that it represents.
fn serialize_json<S: Serializer>(json: &Option<String>, serializer: S) -> Result<S::Ok, S::Error> {
    let json = json.as_deref().unwrap_or("null");
    serde_json::from_str::<Value>(json).map_err(S::Error::custom)?.serialize(serializer)
}

/// A conversation whose next turn is the assistant's.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Conversation {
    pub messages: Vec<Message>,
    /// Definitions of tools, as the chat template shows them.
    pub tools: Option<Value>,
}

/// Properties of a chat template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chat {
    /// The model's format of tool calls, if the template shows a known one.
    pub tools: Option<ToolFormat>,
}

/// A model's format of tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ToolFormat {
    /// `<tool_call>{"name": .., "arguments": ..}</tool_call>` for each call, as in Hermes and Qwen.
    Hermes,
    /// `{"name": .., "parameters": ..}` alone, as in Llama 3.1 and 3.2.
    Llama,
    /// `[TOOL_CALLS] [{"name": .., "arguments": ..}, ..]`, as in Mistral's models until 2024.
    Mistral,
    /// `[TOOL_CALLS]name[ARGS]{..}` for each call, as in Mistral's models since 2025.
    MistralArgs,
    /// `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, as in Qwen3-Coder.
    QwenCoder,
}

/// A text to encode.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Prompt {
    /// Text that is encoded after the special tokens that the model starts with.
    Text(String),
    /// Text that is encoded without special tokens.
    Plain(String),
    /// A conversation.
    Chat(Conversation),
}

impl Prompt {
    /// Returns the size of the text, bytes.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Text(text) | Self::Plain(text) => text.len(),
            Self::Chat(Conversation { messages, tools }) => {
                let tools = tools.as_ref().map_or(0, |tools| tools.to_string().len());
                tools + messages.iter().map(Message::bytes).sum::<usize>()
            }
        }
    }
}

/// Limits of an encoding call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EncodeLimits {
    /// Maximum size of a prompt's text after the chat template, bytes.
    pub bytes: u64,
    /// Maximum tokens of a prompt. For a longer prompt only the number of tokens is returned.
    pub tokens: u64,
    /// Maximum tokens of all prompts together.
    pub all_tokens: u64,
}

impl EncodeLimits {
    /// The maximum number of tokens of a call without limits of its own.
    pub(super) const TOKENS_MAX: u64 = 16 << 20;

    /// The limits of a call without limits of its own.
    pub(super) fn none() -> Self {
        Self { bytes: u64::MAX, tokens: u64::MAX, all_tokens: Self::TOKENS_MAX }
    }
}

/// An encoded prompt.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Encoded {
    /// The tokens of the prompt.
    Ids(Vec<u32>),
    /// The number of tokens of a prompt with more than [`EncodeLimits::tokens`].
    TooMany(u64),
}

/// A grammar that an answer must match.
#[cfg(feature = "serve")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Grammar {
    /// A JSON schema.
    Schema(String),
    /// A regular expression.
    Regex(String),
    /// A grammar in the syntax of Lark.
    Lark(String),
}

#[cfg(feature = "serve")]
impl Grammar {
    /// Returns the kind as a number, and the text.
    pub(super) fn parts(&self) -> (u8, &str) {
        match self {
            Self::Schema(text) => (0, text),
            Self::Regex(text) => (1, text),
            Self::Lark(text) => (2, text),
        }
    }

    /// Returns the text.
    pub(crate) fn text(&self) -> &str {
        self.parts().1
    }

    /// Creates a grammar from its [`Grammar::parts`].
    pub(super) fn of((kind, text): (u8, &str)) -> Self {
        let text = text.to_owned();
        match kind {
            0 => Self::Schema(text),
            1 => Self::Regex(text),
            _ => Self::Lark(text),
        }
    }
}

/// The tokens that a model can sample.
#[cfg(feature = "serve")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sampled {
    /// The number of logits per row.
    pub vocab: u32,
    /// End-of-sequence tokens, allowed where the grammar may end.
    pub eos: Vec<u32>,
}
