//! Prompts, the limits of encoding them, and the result.

use serde::Serialize;

/// A message of a conversation: its role and its text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Message {
    // In the order that `tojson` shows.
    pub(super) role: String,
    pub(super) content: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) name: Option<String>,
}

impl Message {
    /// A turn of any role.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into(), name: None }
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
}

/// A text to be encoded.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Prompt {
    /// Text, behind the special tokens that the model begins with.
    Text(String),
    /// Text without special tokens in front.
    Plain(String),
    /// A conversation whose next turn is the assistant's.
    Chat(Vec<Message>),
}

impl Prompt {
    /// Bytes of the text.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Text(text) | Self::Plain(text) => text.len(),
            Self::Chat(messages) => messages.iter().map(|message| message.role.len() + message.content.len()).sum(),
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
