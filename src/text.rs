//! Text to token ids and back: a model's tokenizer (`tokenizer.json`) and chat template, by the crates of the field.
//!
//! ```
//! # const TOKENIZER: &str = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
//! #   "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
//! #   "model": {"type": "WordLevel", "vocab": {"to": 0, "be": 1, "or": 2, "not": 3, "?": 4}, "unk_token": "?"}}"#;
//! use unweight::text::Text;
//! let text = Text::new(TOKENIZER.as_bytes(), None, None)?;
//! let ids = text.encode("to be or not to be")?;
//! assert_eq!(ids, [0, 1, 2, 3, 0, 1]);
//! let mut stream = text.stream();
//! let mut shown = String::new();
//! for id in ids {
//!     shown += &stream.push(id)?;
//! }
//! shown += &stream.finish()?;
//! assert_eq!(shown, "to be or not to be");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::sync::Arc;

use hf_chat_template::{ChatTemplate, RenderInput, TokenizerConfig};
use tokenizers::Tokenizer;

pub use hf_chat_template::Message;

/// The file of the tokenizer.
pub const TOKENIZER: &str = "tokenizer.json";
/// The file of the special tokens, and in older models of the chat template.
pub const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// The file of the chat template, in newer models.
pub const CHAT_TEMPLATE: &str = "chat_template.jinja";

/// What failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// A file that is not what it should be.
    #[error("{file}: {why}")]
    File {
        /// The file.
        file: &'static str,
        /// What its reader says.
        why: String,
    },
    /// The model has no chat template.
    #[error(
        "the model has no chat template ({CHAT_TEMPLATE}, or chat_template in {TOKENIZER_CONFIG}); is it a base model?"
    )]
    NoTemplate,
    /// The template refused the messages.
    #[error("the chat template refuses these messages: {0}")]
    Template(String),
    /// Text that cannot be encoded, or tokens that cannot be decoded.
    #[error("the tokenizer failed: {0}")]
    Tokenizer(String),
}

/// A model's tokenizer and chat template. Cheap to clone.
#[derive(Clone)]
pub struct Text {
    tokenizer: Arc<Tokenizer>,
    template: Option<Arc<ChatTemplate>>,
}

impl Text {
    /// From the contents of [`TOKENIZER`], [`TOKENIZER_CONFIG`] and [`CHAT_TEMPLATE`].
    ///
    /// # Errors
    /// [`TextError::File`].
    pub fn new(tokenizer: &[u8], config: Option<&[u8]>, template: Option<&[u8]>) -> Result<Self, TextError> {
        let file = |file, why: &dyn ToString| TextError::File { file, why: why.to_string() };
        let tokenizer = Tokenizer::from_bytes(tokenizer).map_err(|error| file(TOKENIZER, &error))?;
        let config = match config {
            Some(bytes) => {
                serde_json::from_slice::<TokenizerConfig>(bytes).map_err(|error| file(TOKENIZER_CONFIG, &error))?
            }
            None => TokenizerConfig::default(),
        };
        let template = match template {
            Some(bytes) => {
                let source = std::str::from_utf8(bytes).map_err(|error| file(CHAT_TEMPLATE, &error))?;
                let compiled = ChatTemplate::from_template_and_config(source, &config);
                Some(compiled.map_err(|error| file(CHAT_TEMPLATE, &error))?)
            }
            None if config.chat_template.is_some() => {
                let compiled = ChatTemplate::from_tokenizer_config(&config);
                Some(compiled.map_err(|error| file(TOKENIZER_CONFIG, &error))?)
            }
            None => None,
        };
        Ok(Self { tokenizer: Arc::new(tokenizer), template: template.map(Arc::new) })
    }

    /// The tokens of a text, with the special tokens that the model begins with.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.ids(text, true)
    }

    /// The tokens of a conversation whose next turn is the assistant's.
    ///
    /// # Errors
    /// [`TextError::NoTemplate`], [`TextError::Template`], [`TextError::Tokenizer`].
    pub fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>, TextError> {
        let template = self.template.as_deref().ok_or(TextError::NoTemplate)?;
        let input = RenderInput { messages: messages.to_vec(), add_generation_prompt: true, ..RenderInput::default() };
        let text = template.render(&input).map_err(|error| TextError::Template(error.to_string()))?;
        // The template has written the special tokens already.
        self.ids(&text, false)
    }

    /// Whether conversations can be encoded.
    pub fn can_chat(&self) -> bool {
        self.template.is_some()
    }

    /// Text of tokens as they come.
    pub fn stream(&self) -> TextStream {
        TextStream { text: self.clone(), ids: Vec::new(), prefix: String::new(), prefix_ids: 0 }
    }

    fn ids(&self, text: &str, special: bool) -> Result<Vec<u32>, TextError> {
        let encoding = self.tokenizer.encode(text, special).map_err(failed)?;
        Ok(encoding.get_ids().to_vec())
    }
}

impl std::fmt::Debug for Text {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Text({} tokens, chat: {})", self.tokenizer.get_vocab_size(true), self.can_chat())
    }
}

fn failed(error: tokenizers::Error) -> TextError {
    TextError::Tokenizer(error.to_string())
}

/// Text of tokens as they come: a character of several tokens comes with its last one. Special tokens are left out.
#[derive(Debug)]
pub struct TextStream {
    text: Text,
    ids: Vec<u32>,
    prefix: String,
    prefix_ids: usize,
}

impl TextStream {
    /// The text that this token completes; often a word, empty in the middle of a character.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`].
    pub fn push(&mut self, id: u32) -> Result<String, TextError> {
        let tokenizer = &self.text.tokenizer;
        let (ids, prefix) = (&mut self.ids, &mut self.prefix);
        let text = tokenizers::step_decode_stream(tokenizer, vec![id], true, ids, prefix, &mut self.prefix_ids);
        Ok(text.map_err(failed)?.unwrap_or_default())
    }

    /// What is left: a character that no token completed, as U+FFFD.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`].
    pub fn finish(self) -> Result<String, TextError> {
        let whole = self.text.tokenizer.decode(&self.ids, true).map_err(failed)?;
        Ok(whole.strip_prefix(self.prefix.as_str()).unwrap_or_default().to_owned())
    }
}

/// Ends a text at the first of some strings, wherever the pieces of it are cut.
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    stops: Vec<String>,
    /// What may be the beginning of one.
    held: String,
}

impl StopStrings {
    /// Ends at any of these; empty ones are left out.
    pub fn new(stops: Vec<String>) -> Self {
        Self { stops: stops.into_iter().filter(|stop| !stop.is_empty()).collect(), held: String::new() }
    }

    /// What may be shown after another piece of the text, and whether the text ends with that.
    pub fn push(&mut self, piece: &str) -> (String, bool) {
        self.held += piece;
        if let Some(at) = self.stops.iter().filter_map(|stop| self.held.find(stop)).min() {
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), true);
        }
        // The longest end that one of them begins with stays back.
        let keep = (0..self.held.len()).find(|&at| {
            self.held.is_char_boundary(at) && self.stops.iter().any(|stop| stop.starts_with(&self.held[at..]))
        });
        let rest = self.held.split_off(keep.unwrap_or(self.held.len()));
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// What was held back.
    pub fn finish(self) -> String {
        self.held
    }
}

/// The tokens of a prompt, written as numbers with anything but digits between them.
pub fn parse_ids(text: &str) -> Result<Vec<u32>, std::num::ParseIntError> {
    let parts = text.split(|c: char| !c.is_ascii_digit()).filter(|part| !part.is_empty());
    parts.map(str::parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes as tokens: a character of three bytes is three tokens.
    fn bytes() -> String {
        let alphabet: Vec<String> =
            ('!'..='~').chain('¡'..='¬').chain('®'..='ÿ').chain('Ā'..='Ń').map(String::from).collect();
        let vocab: serde_json::Map<_, _> =
            alphabet.iter().enumerate().map(|(id, c)| (c.clone(), serde_json::json!(id))).collect();
        serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": [{"id": 256, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
            "normalizer": null,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
            "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}}},
            "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
            "model": {"type": "BPE", "vocab": vocab, "merges": []}
        })
        .to_string()
    }

    #[test]
    fn a_character_comes_when_it_is_whole() {
        let text = Text::new(bytes().as_bytes(), None, None).unwrap();
        let sentence = "naïve 東京 🦀!";
        let ids = text.encode(sentence).unwrap();
        assert_eq!((ids[0], ids.len()), (256, sentence.len() + 1), "a token a byte, behind the special one");
        let mut stream = text.stream();
        let pieces: Vec<String> = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
        assert_eq!(pieces.concat() + &stream.finish().unwrap(), sentence);
        assert!(pieces.iter().all(|piece| !piece.contains('\u{fffd}')));
        let mut cut = text.stream();
        let crab = &ids[ids.len() - 5..ids.len() - 2];
        let shown: String = crab.iter().map(|id| cut.push(*id).unwrap()).collect();
        assert_eq!((shown.as_str(), cut.finish().unwrap().contains('\u{fffd}')), ("", true));
    }

    #[test]
    fn a_conversation_is_written_by_the_template() {
        let config = br#"{"bos_token": "<s>", "chat_template": "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"}"#;
        let text = Text::new(bytes().as_bytes(), Some(config), None).unwrap();
        let messages = [Message::system("be brief"), Message::user("hi")];
        let ids = text.encode_chat(&messages).unwrap();
        assert_eq!(ids, text.encode("[system]be brief[user]hi[assistant]").unwrap(), "one bos, not two");
        let newer = Text::new(bytes().as_bytes(), Some(config), Some(b"{{ raise_exception('no') }}")).unwrap();
        assert!(matches!(newer.encode_chat(&messages), Err(TextError::Template(why)) if why.contains("no")));
        let base = Text::new(bytes().as_bytes(), None, None).unwrap();
        assert!(matches!(base.encode_chat(&messages), Err(TextError::NoTemplate)));
    }

    #[test]
    fn what_is_no_tokenizer_is_refused_by_its_file() {
        assert!(matches!(Text::new(b"{}", None, None), Err(TextError::File { file: TOKENIZER, .. })));
        let broken = Text::new(bytes().as_bytes(), Some(b"["), None);
        assert!(matches!(broken, Err(TextError::File { file: TOKENIZER_CONFIG, .. })));
        let broken = Text::new(bytes().as_bytes(), None, Some(b"{% for"));
        assert!(matches!(broken, Err(TextError::File { file: CHAT_TEMPLATE, .. })));
    }

    #[test]
    fn a_text_ends_at_a_stop_wherever_it_is_cut() {
        let whole = "one two\n\nUser: three é four";
        for stops in [vec!["\n\nUser:", "four"], vec!["é "], vec!["never"], vec![""], vec!["o", "one"]] {
            let end = stops.iter().filter(|stop| !stop.is_empty()).filter_map(|stop| whole.find(stop)).min();
            for size in 1..8 {
                let mut stop = StopStrings::new(stops.iter().map(|stop| (*stop).to_owned()).collect());
                let (mut shown, mut ended) = (String::new(), false);
                let chars: Vec<char> = whole.chars().collect();
                for piece in chars.chunks(size) {
                    let (more, end) = stop.push(&piece.iter().collect::<String>());
                    shown += &more;
                    if end {
                        ended = true;
                        break;
                    }
                }
                if !ended {
                    shown += &stop.finish();
                }
                assert_eq!(
                    (shown.as_str(), ended),
                    (&whole[..end.unwrap_or(whole.len())], end.is_some()),
                    "{stops:?} by {size}"
                );
            }
        }
    }

    #[test]
    fn ids_are_numbers_with_anything_between() {
        assert_eq!(parse_ids("[1, 2 3\n40]"), Ok(vec![1, 2, 3, 40]));
        assert!(parse_ids("99999999999").is_err());
    }
}
