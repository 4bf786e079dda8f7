//! Encodes text in this process, with the tokenizer and the chat template of a model.

use std::thread;

use tokenizers::Tokenizer;

use super::{
    PREPARING, TOKENIZER, catch_panic,
    chat::Template,
    error::TextError,
    panic_message,
    prompt::{Chat, Conversation, EncodeLimits, Encoded, Prompt},
    vocabulary::Vocabulary,
};
#[cfg(all(feature = "serve", unix))]
use super::{grammar::Grammars, prompt::Sampled};

/// A tokenizer and a chat template.
pub(super) struct Local {
    tokenizer: Tokenizer,
    template: Option<Template>,
}

impl Local {
    /// Reads the files of a model. Returns the vocabulary, too.
    ///
    /// Padding and truncation are disabled, as by default in `transformers`, so that a prompt has exactly the tokens of
    /// its text.
    ///
    /// # Errors
    /// [`TextError::File`].
    pub fn load(
        tokenizer: &[u8],
        config: Option<&[u8]>,
        template: Option<&[u8]>,
    ) -> Result<(Self, Vocabulary), TextError> {
        let file = |why: &dyn ToString| TextError::File { file: TOKENIZER, why: why.to_string() };
        let load = || -> tokenizers::Result<_> {
            let mut tokenizer = Tokenizer::from_bytes(tokenizer)?;
            tokenizer.with_padding(None).with_truncation(None)?;
            let vocabulary = Vocabulary::of(&tokenizer);
            Ok((tokenizer, vocabulary))
        };
        let (tokenizer, vocabulary) = catch_panic(load).map_err(|why| file(&why))?.map_err(|error| file(&error))?;
        Ok((Self { tokenizer, template: Template::of(config, template)? }, vocabulary?))
    }

    /// Returns the properties of the chat template; `None` if there is no template.
    pub fn chat(&self) -> Option<Chat> {
        self.template.as_ref().map(Template::chat)
    }

    /// Creates a compiler of grammars over the tokens of this tokenizer.
    ///
    /// # Errors
    /// [`TextError`].
    #[cfg(all(feature = "serve", unix))]
    pub fn grammars(&self, sampled: &Sampled) -> Result<Grammars, TextError> {
        Grammars::new(&Vocabulary::of(&self.tokenizer)?, sampled)
    }

    /// Encodes prompts. The caller's stack limits the depth of a template's expressions.
    ///
    /// # Errors
    /// [`TextError`], for the first prompt that fails.
    pub fn encode(&self, prompts: &[Prompt], limits: EncodeLimits) -> Result<Vec<Encoded>, TextError> {
        let mut tokens_left = limits.all_tokens;
        let encode_one = |prompt: &Prompt| {
            let ids = match prompt {
                Prompt::Text(text) => self.ids(text, true, limits)?,
                Prompt::Plain(text) => self.ids(text, false, limits)?,
                // The template has written the special tokens.
                Prompt::Chat(conversation) => self.ids(&self.render(conversation)?, false, limits)?,
            };
            let tokens = ids.len() as u64;
            if tokens > limits.tokens {
                return Ok(Encoded::TooMany(tokens));
            }
            let all = format!("{} tokens", limits.all_tokens);
            tokens_left = tokens_left.checked_sub(tokens).ok_or(TextError::Limit { work: PREPARING, limit: all })?;
            Ok(Encoded::Ids(ids))
        };
        prompts.iter().map(encode_one).collect()
    }

    /// Encodes prompts as [`Local::encode`] does, on a stack that is large enough for any template.
    ///
    /// # Errors
    /// [`TextError`].
    pub fn encode_on_large_stack(&self, prompts: &[Prompt], limits: EncodeLimits) -> Result<Vec<Encoded>, TextError> {
        /// The stack size. A level of an expression takes a few KiB, and a template has at most 256 Ki levels.
        const STACK: usize = 1 << 30;
        if prompts.iter().all(|prompt| !matches!(prompt, Prompt::Chat(_))) {
            return self.encode(prompts, limits);
        }
        thread::scope(|scope| {
            let thread = thread::Builder::new().stack_size(STACK).spawn_scoped(scope, || self.encode(prompts, limits));
            let thread = thread.map_err(|error| TextError::Template(format!("cannot start a thread: {error}")))?;
            thread.join().unwrap_or_else(|why| Err(TextError::Template(panic_message(&*why))))
        })
    }

    fn render(&self, conversation: &Conversation) -> Result<String, TextError> {
        self.template.as_ref().ok_or(TextError::NoTemplate)?.render(conversation)
    }

    fn ids(&self, text: &str, special: bool, limits: EncodeLimits) -> Result<Vec<u32>, TextError> {
        let bytes = text.len() as u64;
        if bytes > limits.bytes {
            return Err(TextError::TooLong { bytes, limit: limits.bytes });
        }
        let encoding = catch_panic(|| self.tokenizer.encode(text, special)).map_err(TextError::Tokenizer)?;
        let encoding = encoding.map_err(|error| TextError::Tokenizer(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }
}
