//! Prompts, the limits of encoding them, and the result; grammars of answers.

use serde::Serialize;
use serde_json::Value;

/// A message of a conversation: its role and its text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Message {
    // In the order that `tojson` shows.
    pub(super) role: String,
    pub(super) content: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tool_calls: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tool_call_id: Option<String>,
}

impl Message {
    /// A turn of any role.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into(), name: None, tool_calls: None, tool_call_id: None }
    }

    /// A turn of the role `system`.
    pub fn system(content: impl Into<String>) -> Self {
        Self::new("system", content)
    }

    /// A turn of the role `user`.
    pub fn user(content: impl Into<String>) -> Self {
        Self::new("user", content)
    }

    /// With the name of its author, which some templates show.
    pub fn name(self, name: impl Into<String>) -> Self {
        Self { name: Some(name.into()), ..self }
    }

    /// With the calls of tools that the assistant made, whose arguments are objects.
    #[cfg(feature = "serve")]
    pub(crate) fn tool_calls(self, calls: Value) -> Self {
        Self { tool_calls: Some(calls), ..self }
    }

    /// With the call of a tool whose result it is.
    #[cfg(feature = "serve")]
    pub(crate) fn tool_call_id(self, id: String) -> Self {
        Self { tool_call_id: Some(id), ..self }
    }

    /// Bytes of its text.
    fn bytes(&self) -> usize {
        let calls = self.tool_calls.as_ref().map_or(0, |calls| calls.to_string().len());
        self.role.len() + self.content.len() + calls
    }
}

/// A conversation whose next turn is the assistant's.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Conversation {
    pub messages: Vec<Message>,
    /// Definitions of tools, as the chat template shows them.
    pub tools: Option<Value>,
}

/// What is known of a chat template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chat {
    /// How the model writes calls of tools, if the template shows it.
    pub tools: Option<ToolFormat>,
}

/// How a model writes calls of tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ToolFormat {
    /// `<tool_call>{"name": .., "arguments": ..}</tool_call>` for each call, as Hermes and Qwen.
    Hermes,
    /// `{"name": .., "parameters": ..}` alone, as Llama 3.1 and 3.2.
    Llama,
    /// `[TOOL_CALLS] [{"name": .., "arguments": ..}, ..]`, as Mistral.
    Mistral,
}

/// A text to be encoded.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Prompt {
    /// Text, behind the special tokens that the model begins with.
    Text(String),
    /// Text without special tokens in front.
    Plain(String),
    /// A conversation.
    Chat(Conversation),
}

impl Prompt {
    /// Bytes of the text.
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

/// Limits of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EncodeLimits {
    /// Bytes of a prompt's text, after the chat template.
    pub bytes: u64,
    /// Tokens of a prompt. Of a longer one only the number of tokens is returned.
    pub tokens: u64,
    /// Tokens that are returned for all prompts together.
    pub all_tokens: u64,
}

impl EncodeLimits {
    /// Tokens of a call that states no limit.
    pub(super) const MOST_TOKENS: u64 = 16 << 20;

    /// For a call that states no limit.
    pub(super) fn none() -> Self {
        Self { bytes: u64::MAX, tokens: u64::MAX, all_tokens: Self::MOST_TOKENS }
    }
}

/// An encoded prompt.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Encoded {
    /// Its tokens.
    Ids(Vec<u32>),
    /// How many tokens it has, where that is more than [`EncodeLimits::tokens`].
    TooMany(u64),
}

/// What an answer must match.
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
    /// Its kind as a number, and its text.
    pub(super) fn parts(&self) -> (u8, &str) {
        match self {
            Self::Schema(text) => (0, text),
            Self::Regex(text) => (1, text),
            Self::Lark(text) => (2, text),
        }
    }

    /// The reverse of [`Grammar::parts`].
    pub(super) fn of((kind, text): (u8, &str)) -> Self {
        let text = text.to_owned();
        match kind {
            0 => Self::Schema(text),
            1 => Self::Regex(text),
            _ => Self::Lark(text),
        }
    }
}

/// The tokens that a model samples.
#[cfg(feature = "serve")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sampled {
    /// Logits of a row.
    pub vocab: u32,
    /// Tokens that end an answer, where the grammar may end.
    pub eos: Vec<u32>,
}
