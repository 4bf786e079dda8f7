//! Errors of encoding and decoding text.

use super::{CHAT_TEMPLATE, TOKENIZER, TOKENIZER_CONFIG};

/// An error of a tokenizer or chat template.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// A file is invalid.
    #[error("{file}: {why}; download the file again")]
    File {
        /// The name of the file.
        file: &'static str,
        /// The message of its parser.
        why: String,
    },
    /// The model has no chat template.
    #[error(
        "the model has no chat template ({CHAT_TEMPLATE}, or chat_template in {TOKENIZER_CONFIG}); send plain text, or use an instruction-tuned model"
    )]
    NoTemplate,
    /// The template rejected the messages.
    #[error("the chat template rejects these messages: {0}; change the messages")]
    Template(String),
    /// The text cannot be encoded, or the tokens cannot be decoded.
    #[error("{TOKENIZER}: the tokenizer failed: {0}")]
    Tokenizer(String),
    /// The text is not a list of token ids.
    #[error("{0}; write ids as 1,450,4996")]
    Ids(String),
    /// The work reached a limit of time, memory or tokens.
    #[error("{work} takes more than {limit}; send less text, or check the bundle's tokenizer and chat template")]
    Limit {
        /// The work, such as preparing the prompt.
        work: &'static str,
        /// The limit, such as `2 s`.
        limit: String,
    },
    /// The machine is so busy that the work took too long.
    #[error("{work} took more than {seconds} s on a busy machine; try again")]
    Busy {
        /// The work, such as preparing the prompt.
        work: &'static str,
        /// The time, seconds.
        seconds: u64,
    },
    /// The text is longer than any text that fits in the context.
    #[error("the prompt has {bytes} bytes of text; the context holds at most {limit} bytes; send less text")]
    TooLong {
        /// Size of the text, bytes.
        bytes: u64,
        /// The number of tokens of the context times the size of the longest token, bytes.
        limit: u64,
    },
    /// The grammar cannot be used.
    #[error("the grammar cannot be used: {0}")]
    Grammar(String),
    /// The text process could not be started, or has ended.
    #[error("the text process failed: {0}")]
    Process(String),
    /// The program is stopping and has ended the text process.
    #[error("the text process has ended: the program is stopping")]
    Stopping,
}

impl TextError {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        match self {
            Self::File { .. } => "tokenizer-file-invalid",
            Self::NoTemplate => "no-chat-template",
            Self::Template(_) => "chat-template-failed",
            Self::Tokenizer(_) => "tokenizer-failed",
            Self::Ids(_) => "token-ids-invalid",
            Self::Limit { .. } => "text-limit-exceeded",
            Self::Busy { .. } => "machine-busy",
            Self::TooLong { .. } => "text-too-long",
            Self::Grammar(_) => "grammar-invalid",
            Self::Process(_) | Self::Stopping => "text-process-failed",
        }
    }
}

/// Why the tokens of a request have no text.
#[cfg(feature = "serve")]
#[derive(Debug)]
pub(crate) enum DecodeError {
    /// The vocabulary does not have this token.
    UnknownToken(u32),
    /// The tokens have more bytes of text than the limit.
    TooLong { bytes: u64 },
    /// The decoder of the tokenizer failed.
    Text(TextError),
}
