//! Text to token ids and back, with a model's tokenizer (`tokenizer.json`) and chat template. The crates `tokenizers`,
//! `minijinja` and `llguidance` do the work.
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

mod chat;
#[cfg(unix)]
mod child;
mod clock;
#[cfg(feature = "serve")]
mod compiled;
mod error;
mod frame;
#[cfg(feature = "serve")]
mod grammar;
mod local;
#[cfg(unix)]
mod process;
mod prompt;
mod vocabulary;
#[cfg(feature = "serve")]
mod watch;

#[cfg(unix)]
use std::process::Command;
use std::{
    any::Any,
    cell::Cell,
    fmt,
    panic::{self, AssertUnwindSafe},
    sync::{Arc, Once},
};
#[cfg(feature = "serve")]
use std::{sync::OnceLock, time::Duration};

#[cfg(feature = "serve")]
use compiled::Kept;
#[cfg(feature = "serve")]
use grammar::Grammars;
use local::Local;
#[cfg(unix)]
use process::Pool;
use prompt::Chat;
use vocabulary::Vocabulary;

#[cfg(unix)]
pub use child::run_text_process;
#[cfg(feature = "serve")]
pub(crate) use error::DecodeError;
pub use error::TextError;
#[cfg(feature = "serve")]
pub(crate) use grammar::Answer;
#[cfg(all(test, feature = "serve"))]
pub(crate) use grammar::accepts;
pub use prompt::Message;
pub(crate) use prompt::{Conversation, EncodeLimits, Encoded, Prompt};
#[cfg(feature = "serve")]
pub(crate) use prompt::{Grammar, Sampled, ToolFormat};

/// The name of the tokenizer file.
pub const TOKENIZER: &str = "tokenizer.json";
/// The name of the file with the special tokens and, in older models, the chat template.
pub const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// The name of the chat template file in newer models.
pub const CHAT_TEMPLATE: &str = "chat_template.jinja";

/// The work that most [`TextError::Limit`] errors name.
const PREPARING: &str = "preparing the prompt";
/// The stack size of a text process. Templates with deep expressions need a large one.
const STACK_BYTES: u64 = 64 << 20;
/// The maximum number of text processes of a [`Text`].
pub(crate) const PROCESSES: usize = 4;
/// The maximum of processor time for compiling a grammar, in a text process and then in this program.
#[cfg(feature = "serve")]
const GRAMMAR_TIME_MAX: Duration = Duration::from_secs(1);
/// The maximum number of tokens that a stream holds back while they complete no character.
const HELD_TOKENS_MAX: usize = 64;

/// A model's tokenizer and chat template. Cheap to clone.
#[derive(Clone)]
pub struct Text {
    vocabulary: Arc<Vocabulary>,
    encoder: Encoder,
    chat: Option<Chat>,
    /// The compiler of grammars.
    #[cfg(feature = "serve")]
    grammars: Arc<OnceLock<Grammars>>,
    /// What it has compiled or rejected.
    #[cfg(feature = "serve")]
    kept: Arc<Kept>,
}

/// Where prompts are encoded.
#[derive(Clone)]
enum Encoder {
    /// In this process.
    Local(Arc<Local>),
    /// In text processes.
    #[cfg(unix)]
    Pool(Arc<Pool>),
}

impl Text {
    /// Loads the contents of [`TOKENIZER`], [`TOKENIZER_CONFIG`] and [`CHAT_TEMPLATE`]. The template is compiled when
    /// [`Text::encode_chat`] first needs it.
    ///
    /// Prompts are encoded in this process, which trusts the files: a hostile template or tokenizer can run forever, or
    /// exhaust the memory and abort the process. Use [`Text::isolated`] for untrusted files. A panic while reading them
    /// is returned as an error. To keep it silent, a panic hook is installed, which passes all other panics to the
    /// previous hook.
    ///
    /// # Errors
    /// [`TextError::File`].
    pub fn new(tokenizer: &[u8], config: Option<&[u8]>, template: Option<&[u8]>) -> Result<Self, TextError> {
        let (local, vocabulary) = Local::load(tokenizer, config, template)?;
        let chat = local.chat();
        Ok(Self::of(vocabulary, Encoder::Local(Arc::new(local)), chat))
    }

    /// Loads untrusted files: at most three child processes read them and encode prompts. Otherwise like [`Text::new`].
    ///
    /// `command` starts a program that calls [`run_text_process`]; its stdin, stdout and stderr are set here. Loading
    /// may take 10 s and 64 MiB plus 128 times the size of the files, at most 2 GiB. A call may take 2 s and 256 MiB. A
    /// process that exceeds a limit is ended, and the call returns [`TextError::Limit`]; the next call starts a new
    /// process. Memory is limited only on Linux. The processes end with the last clone of this value, and with this
    /// program.
    ///
    /// # Errors
    /// [`TextError::File`], [`TextError::Limit`], [`TextError::Process`], [`TextError::Stopping`].
    #[cfg(unix)]
    pub fn isolated(
        command: Command,
        tokenizer: &[u8],
        config: Option<&[u8]>,
        template: Option<&[u8]>,
    ) -> Result<Self, TextError> {
        let (pool, vocabulary, chat) = Pool::start(command, tokenizer, config, template)?;
        Ok(Self::of(vocabulary, Encoder::Pool(Arc::new(pool)), chat))
    }

    fn of(vocabulary: Vocabulary, encoder: Encoder, chat: Option<Chat>) -> Self {
        Self {
            vocabulary: Arc::new(vocabulary),
            encoder,
            chat,
            #[cfg(feature = "serve")]
            grammars: Arc::default(),
            #[cfg(feature = "serve")]
            kept: Arc::default(),
        }
    }

    /// Encodes a text, after the special tokens that the model starts with. Padding and truncation of [`TOKENIZER`] are
    /// ignored, as by default in `transformers`.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`], [`TextError::Limit`], [`TextError::Process`], [`TextError::Stopping`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.encode_one(Prompt::Text(text.to_owned()))
    }

    /// Encodes a conversation whose next turn is the assistant's.
    ///
    /// # Errors
    /// [`TextError::NoTemplate`], [`TextError::File`], [`TextError::Template`], and as [`Text::encode`].
    pub fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>, TextError> {
        self.encode_one(Prompt::Chat(Conversation { messages: messages.to_vec(), tools: None }))
    }

    /// Whether conversations can be encoded.
    pub fn can_chat(&self) -> bool {
        self.chat.is_some()
    }

    /// Returns the lowest token id that both vocabularies have, with different texts.
    pub fn first_difference(&self, other: &Self) -> Option<u32> {
        self.vocabulary.first_difference(&other.vocabulary)
    }

    /// Creates a stream that decodes tokens one by one.
    pub fn stream(&self) -> TextStream {
        TextStream { vocabulary: Arc::clone(&self.vocabulary), ids: Vec::new(), prefix: String::new(), prefix_ids: 0 }
    }

    /// Encodes prompts in one call, within the limits of a call. Blocks until a text process is free.
    ///
    /// # Errors
    /// [`TextError`].
    pub(crate) fn encode_all(&self, prompts: &[Prompt], limits: EncodeLimits) -> Result<Vec<Encoded>, TextError> {
        match &self.encoder {
            Encoder::Local(local) => local.encode_on_large_stack(prompts, limits),
            #[cfg(unix)]
            Encoder::Pool(pool) => pool.encode(prompts, limits),
        }
    }

    /// Returns the model's format of tool calls, if its chat template shows a known one.
    #[cfg(feature = "serve")]
    pub(crate) fn tool_format(&self) -> Option<ToolFormat> {
        self.chat.and_then(|chat| chat.tools)
    }

    /// Returns the special token with this text.
    #[cfg(feature = "serve")]
    pub(crate) fn special(&self, text: &str) -> Option<u32> {
        self.vocabulary.special(text)
    }

    /// Returns what [`Text::compile`] has returned for this grammar, if that is kept.
    #[cfg(feature = "serve")]
    pub(crate) fn compiled(&self, grammar: &Grammar) -> Option<Result<Arc<Answer>, TextError>> {
        self.kept.get(grammar)
    }

    /// Compiles a grammar, unless it is kept. With text processes, one of them compiles it first, within the limits of
    /// a call; this blocks until one is free. Returns `None` if that takes more than `time` of a processor. The sampled
    /// tokens are those of all grammars.
    ///
    /// # Errors
    /// [`TextError`].
    #[cfg(feature = "serve")]
    pub(crate) fn compile_within(
        &self,
        time: Duration,
        grammar: &Grammar,
        sampled: &Sampled,
    ) -> Result<Option<Arc<Answer>>, TextError> {
        if let Some(known) = self.compiled(grammar) {
            return known.map(Some);
        }
        let compiled = self.compile_new(time, grammar, sampled);
        if let Err(TextError::Grammar(why)) = &compiled {
            self.kept.reject(grammar, why);
        }
        compiled
    }

    /// Compiles a grammar as [`Text::compile_within`] does, within the time limit of all grammars.
    ///
    /// # Errors
    /// [`TextError`].
    #[cfg(feature = "serve")]
    pub(crate) fn compile(&self, grammar: &Grammar, sampled: &Sampled) -> Result<Arc<Answer>, TextError> {
        self.compile_within(GRAMMAR_TIME_MAX, grammar, sampled)?.ok_or_else(|| {
            let why = format!("compiling it takes more than {} s; simplify it", GRAMMAR_TIME_MAX.as_secs());
            self.kept.reject(grammar, &why);
            TextError::Grammar(why)
        })
    }

    #[cfg(feature = "serve")]
    fn compile_new(
        &self,
        time: Duration,
        grammar: &Grammar,
        sampled: &Sampled,
    ) -> Result<Option<Arc<Answer>>, TextError> {
        let bytes = match &self.encoder {
            Encoder::Local(_) => Some(0),
            #[cfg(unix)]
            Encoder::Pool(pool) => pool.check_grammar(grammar, sampled, time)?,
        };
        let Some(bytes) = bytes else { return Ok(None) };
        let answer = Arc::new(self.grammars(sampled)?.compile_on_large_stack(grammar)?.with_bytes(bytes));
        self.kept.insert(grammar, &answer, bytes);
        Ok(Some(answer))
    }

    #[cfg(feature = "serve")]
    fn grammars(&self, sampled: &Sampled) -> Result<&Grammars, TextError> {
        if let Some(grammars) = self.grammars.get() {
            return Ok(grammars);
        }
        let grammars = Grammars::new(&self.vocabulary, sampled)?;
        // The first of two threads sets it.
        Ok(self.grammars.get_or_init(|| grammars))
    }

    /// Prepares for grammars, so that the first one does not wait for it: with a large vocabulary, it takes a second
    /// here and in a text process.
    ///
    /// # Errors
    /// [`TextError`].
    #[cfg(feature = "serve")]
    pub(crate) fn prepare_for_grammars(&self, sampled: &Sampled) -> Result<(), TextError> {
        self.grammars(sampled)?;
        match &self.encoder {
            Encoder::Local(_) => Ok(()),
            #[cfg(unix)]
            Encoder::Pool(pool) => pool.prepare(sampled),
        }
    }

    /// Returns the size of the longest token, bytes.
    #[cfg(feature = "serve")]
    pub(crate) fn longest_token(&self) -> usize {
        self.vocabulary.longest()
    }

    /// Returns the size of the texts of tokens, bytes.
    #[cfg(feature = "serve")]
    pub(crate) fn bytes(&self, ids: &[u32]) -> u64 {
        self.vocabulary.bytes(ids)
    }

    /// Decodes tokens, including special ones.
    ///
    /// # Errors
    /// [`DecodeError`].
    #[cfg(feature = "serve")]
    pub(crate) fn decode_all(&self, ids: &[u32], bytes_max: u64) -> Result<String, DecodeError> {
        if let Some(id) = ids.iter().find(|id| !self.vocabulary.has(**id)) {
            return Err(DecodeError::UnknownToken(*id));
        }
        let bytes = self.vocabulary.bytes(ids);
        if bytes > bytes_max {
            return Err(DecodeError::TooLong { bytes });
        }
        self.vocabulary.decode_all(ids).map_err(DecodeError::Text)
    }

    /// Decodes a single token to its text and its bytes.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`].
    #[cfg(feature = "serve")]
    pub(crate) fn token(&self, id: u32) -> Result<(String, Vec<u8>), TextError> {
        self.vocabulary.token(id)
    }

    /// Ends the text processes and their running calls.
    #[cfg(feature = "serve")]
    pub(crate) fn stop(&self) {
        #[cfg(unix)]
        if let Encoder::Pool(pool) = &self.encoder {
            pool.stop();
        }
    }

    fn encode_one(&self, prompt: Prompt) -> Result<Vec<u32>, TextError> {
        let limits = EncodeLimits::none();
        let mut encoded = self.encode_all(&[prompt], limits)?;
        match encoded.pop() {
            Some(Encoded::Ids(ids)) => Ok(ids),
            _ => Err(TextError::Limit { work: PREPARING, limit: format!("{} tokens", limits.all_tokens) }),
        }
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Text({} tokens, chat: {})", self.vocabulary.len(), self.can_chat())
    }
}

thread_local! {
    /// Whether a panic of this thread is caught and returned as an error.
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Returns the result of `work`, or the message of its panic, which is not printed.
fn catch_panic<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let previous_hook = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !QUIET.get() {
                previous_hook(info);
            }
        }));
    });
    let before = QUIET.replace(true);
    // After a panic, only a tokenizer's cache may be used again; it has a lock.
    let result = panic::catch_unwind(AssertUnwindSafe(work));
    QUIET.set(before);
    result.map_err(|why| panic_message(&*why))
}

/// Returns an error text with the message of a panic.
fn panic_message(why: &(dyn Any + Send)) -> String {
    let text = why.downcast_ref::<&str>().copied().or_else(|| why.downcast_ref::<String>().map(String::as_str));
    format!("panic: {}", text.unwrap_or("without a message"))
}

/// A stream that decodes tokens one by one. A character of several tokens appears with its last one; special tokens are
/// left out.
pub struct TextStream {
    vocabulary: Arc<Vocabulary>,
    /// The tokens that affect the next text: the decoding of a token may depend on earlier ones.
    ids: Vec<u32>,
    /// The text of the first `prefix_ids` tokens, which was returned already.
    prefix: String,
    prefix_ids: usize,
}

impl TextStream {
    /// Adds a token and returns the text that it completes: often a word, empty in the middle of a character.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`].
    pub fn push(&mut self, id: u32) -> Result<String, TextError> {
        if !self.vocabulary.is_shown(id) {
            return Ok(String::new());
        }
        self.ids.push(id);
        let whole = self.vocabulary.decode(&self.ids)?;
        // A character never has so many tokens. The limit bounds the cost per token.
        let holds = self.ids.len() - self.prefix_ids < HELD_TOKENS_MAX;
        if holds && (whole.len() <= self.prefix.len() || whole.ends_with('\u{fffd}')) {
            return Ok(String::new());
        }
        let new = self.after_prefix(&whole)?;
        self.ids.drain(..self.prefix_ids);
        self.prefix = self.vocabulary.decode(&self.ids)?;
        self.prefix_ids = self.ids.len();
        Ok(new)
    }

    /// Ends the text and returns the rest: U+FFFD for an incomplete character.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`].
    pub fn finish(self) -> Result<String, TextError> {
        let whole = self.vocabulary.decode(&self.ids)?;
        self.after_prefix(&whole)
    }

    /// Returns the text that was not returned yet. An invalid byte can change how earlier bytes decode (all become
    /// U+FFFD). The new tokens are then decoded alone.
    fn after_prefix(&self, whole: &str) -> Result<String, TextError> {
        match whole.strip_prefix(self.prefix.as_str()) {
            Some(new) => Ok(new.to_owned()),
            None => self.vocabulary.decode(&self.ids[self.prefix_ids..]),
        }
    }
}

impl fmt::Debug for TextStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TextStream({} tokens held)", self.ids.len() - self.prefix_ids)
    }
}

/// Ends a text at the first of several stop strings, however the text is split into pieces.
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    stops: Vec<String>,
    /// Text that may be the start of a stop string.
    held: String,
}

impl StopStrings {
    /// Creates a matcher for these stop strings; empty ones are ignored.
    pub fn new(stops: Vec<String>) -> Self {
        Self { stops: stops.into_iter().filter(|stop| !stop.is_empty()).collect(), held: String::new() }
    }

    /// Adds a piece of the text. Returns the text that may be shown, and whether a stop string ended it. The stop
    /// string that starts first ends the text, independently of the pieces.
    pub fn push(&mut self, piece: &str) -> (String, bool) {
        self.held += piece;
        let found = self.found();
        // Hold back text that may be the start of a stop string.
        let open = (0..self.held.len()).find(|&at| {
            self.held.is_char_boundary(at) && self.stops.iter().any(|stop| stop.starts_with(&self.held[at..]))
        });
        if let Some(at) = found
            && open.is_none_or(|open| at <= open)
        {
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), true);
        }
        let rest = self.held.split_off(open.unwrap_or(self.held.len()));
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// Returns the text that was held back, and whether a stop string ended it.
    pub fn finish(mut self) -> (String, bool) {
        let found = self.found();
        self.held.truncate(found.unwrap_or(self.held.len()));
        (self.held, found.is_some())
    }

    /// Returns the position of the first stop string.
    fn found(&self) -> Option<usize> {
        self.stops.iter().filter_map(|stop| self.held.find(stop)).min()
    }
}

/// Parses the token ids of a prompt: numbers separated by commas, white space or brackets.
///
/// # Errors
/// [`TextError::Ids`] for any other text, and if there are no ids.
pub fn parse_ids(text: &str) -> Result<Vec<u32>, TextError> {
    let parts = text.split(|c: char| c.is_whitespace() || ",[]".contains(c)).filter(|part| !part.is_empty());
    let number = |part: &str| {
        // `parse` accepts a plus sign, too.
        let digits = part.bytes().all(|byte| byte.is_ascii_digit());
        let id = part.parse().ok().filter(|_| digits);
        id.ok_or_else(|| TextError::Ids(format!("'{part}' is not a token id from 0 to {}", u32::MAX)))
    };
    let ids = parts.map(number).collect::<Result<Vec<u32>, _>>()?;
    if ids.is_empty() { Err(TextError::Ids("the prompt has no tokens".into())) } else { Ok(ids) }
}

#[cfg(test)]
mod tests {
    use super::{chat::Template, *};

    /// Returns a tokenizer whose tokens are bytes: a character of three bytes has three tokens.
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
    fn characters_are_streamed_whole() {
        let text = Text::new(bytes().as_bytes(), None, None).unwrap();
        let sentence = "naïve 東京 🦀!";
        let ids = text.encode(sentence).unwrap();
        assert_eq!((ids[0], ids.len()), (256, sentence.len() + 1), "one token per byte after the special token");
        let mut stream = text.stream();
        let pieces: Vec<String> = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
        assert_eq!(pieces.concat() + &stream.finish().unwrap(), sentence);
        assert!(pieces.iter().all(|piece| !piece.contains('\u{fffd}')));
        let mut cut = text.stream();
        let crab = &ids[ids.len() - 5..ids.len() - 2];
        let shown: String = crab.iter().map(|id| cut.push(*id).unwrap()).collect();
        assert_eq!((shown.as_str(), cut.finish().unwrap().contains('\u{fffd}')), ("", true));
    }

    #[cfg(feature = "serve")]
    #[test]
    fn tokens_without_text_are_told_apart() {
        let text = Text::new(bytes().as_bytes(), None, None).unwrap();
        let ids = text.encode("ab").unwrap();
        // The special token has three bytes.
        assert_eq!(text.decode_all(&ids, 5).unwrap(), "<s>ab");
        assert!(matches!(text.decode_all(&ids, 4), Err(DecodeError::TooLong { bytes: 5 })));
        assert!(matches!(text.decode_all(&[0, 999], 0), Err(DecodeError::UnknownToken(999))));
    }

    #[test]
    fn a_stream_holds_few_tokens() {
        let text = Text::new(bytes().as_bytes(), None, None).unwrap();
        let crab = text.encode("\u{1f980}").unwrap();
        let (special, half) = (crab[0], crab[1]);
        let (mut stream, mut shown) = (text.stream(), String::new());
        for _ in 0..1000 {
            shown += &stream.push(half).unwrap();
            shown += &stream.push(special).unwrap();
            assert!(stream.ids.len() < 2 * HELD_TOKENS_MAX, "{stream:?}");
        }
        shown += &stream.finish().unwrap();
        assert_eq!(shown, "\u{fffd}".repeat(1000));
    }

    #[test]
    fn chat_template_renders_messages() {
        let config = br#"{"bos_token": "<s>", "chat_template": "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"}"#;
        let text = Text::new(bytes().as_bytes(), Some(config), None).unwrap();
        let messages = [Message::system("be brief"), Message::user("hi")];
        let ids = text.encode_chat(&messages).unwrap();
        assert_eq!(ids, text.encode("[system]be brief[user]hi[assistant]").unwrap(), "the text has one bos token");
        let newer = Text::new(bytes().as_bytes(), Some(config), Some(b"{{ raise_exception('no') }}")).unwrap();
        assert!(matches!(newer.encode_chat(&messages), Err(TextError::Template(why)) if why.contains("no")));
        let base = Text::new(bytes().as_bytes(), None, None).unwrap();
        assert!(matches!(base.encode_chat(&messages), Err(TextError::NoTemplate)));
    }

    #[test]
    fn invalid_tokenizers_are_rejected_by_file() {
        assert!(matches!(Text::new(b"{}", None, None), Err(TextError::File { file: TOKENIZER, .. })));
        let broken = Text::new(bytes().as_bytes(), Some(b"["), None);
        assert!(matches!(broken, Err(TextError::File { file: TOKENIZER_CONFIG, .. })));
        let broken = Text::new(bytes().as_bytes(), None, Some(b"{% for")).unwrap();
        assert!(broken.can_chat() && broken.encode("text").is_ok());
        for _ in 0..2 {
            let refused = broken.encode_chat(&[Message::user("hi")]);
            assert!(matches!(refused, Err(TextError::File { file: CHAT_TEMPLATE, .. })));
        }
    }

    #[test]
    fn deeply_nested_template_does_not_overflow() {
        let limit = Template::LIMIT;
        let of = |start: &str, level: &str, end: &str| {
            let levels = (limit - start.len() - end.len()) / level.len();
            [start, &level.repeat(levels), end].concat()
        };
        for template in [
            of("{{ ", "not ", "1 }}"),
            of("{{ ", "-", "1 }}"),
            of("{{ ", "(", "1 }}"),
            of("{{ messages", ".a", " }}"),
            of("{{ 1", "+1", " }}"),
            of("{{ 1", "|e", " }}"),
            of("", "{% if 1 %}", ""),
            "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}".to_owned(),
        ] {
            let text = Text::new(bytes().as_bytes(), None, Some(template.as_bytes())).unwrap();
            // The template engine decides whether it is valid.
            let _ = text.encode_chat(&[Message::user("hi")]);
        }
        let deep = Text::new(bytes().as_bytes(), None, Some("{{ 1 }}".repeat(limit).as_bytes())).unwrap();
        let refused = deep.encode_chat(&[Message::user("hi")]).unwrap_err().to_string();
        assert!(refused.starts_with(CHAT_TEMPLATE) && refused.contains("limit of 262144"), "{refused}");
        let inside = serde_json::json!({"chat_template": " ".repeat(limit + 1)}).to_string();
        let inside = Text::new(bytes().as_bytes(), Some(inside.as_bytes()), None).unwrap();
        assert!(matches!(inside.encode_chat(&[]), Err(TextError::File { file: TOKENIZER_CONFIG, .. })));
    }

    #[test]
    fn a_tokenizer_that_panics_is_an_error() {
        let with = |key: &str, value: serde_json::Value| {
            let mut tokenizer: serde_json::Value = serde_json::from_str(&bytes()).unwrap();
            tokenizer[key] = value;
            Text::new(tokenizer.to_string().as_bytes(), None, None)
        };
        let cut = with("pre_tokenizer", serde_json::json!({"type": "FixedLength", "length": 0})).unwrap();
        for _ in 0..2 {
            let refused = cut.encode("text").unwrap_err().to_string();
            assert!(refused.starts_with(TOKENIZER) && refused.contains("panic: "), "{refused}");
        }
        assert!(panic::catch_unwind(|| catch_panic(|| ())).is_ok() && !QUIET.get());
        let map = with("normalizer", serde_json::json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"}));
        assert!(matches!(map, Err(TextError::File { file: TOKENIZER, .. })) || map.unwrap().encode("text").is_err());
        // Such files may be valid; the test is that the process survives them.
        let empty = serde_json::json!({"type": "Replace", "pattern": {"String": ""}, "content": "x"});
        for key in ["normalizer", "decoder"] {
            if let Ok(text) = with(key, empty.clone()) {
                let _ = text.encode("text");
                let _ = text.stream().push(40);
            }
        }
    }

    #[test]
    fn incomplete_utf8_does_not_end_a_text() {
        let vocab =
            serde_json::json!({"<0x0A>": 0, "<0xE6>": 1, "<0x9D>": 2, "<0xB1>": 3, "a": 4, "\u{2581}b": 5, "<unk>": 6});
        let tokenizer = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": null, "post_processor": null,
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
            "model": {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<unk>", "byte_fallback": true}
        });
        let text = Text::new(tokenizer.to_string().as_bytes(), None, None).unwrap();
        let shown = |ids: &[u32]| {
            let mut stream = text.stream();
            let pieces: String = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
            pieces + &stream.finish().unwrap()
        };
        assert_eq!(shown(&[0, 1, 4, 5]), "\n\u{fffd}a b");
        assert_eq!(shown(&[4, 0, 1, 5, 5, 0, 1, 2, 4, 4]), "a\n\u{fffd} b b\n\u{fffd}\u{fffd}aa");
        assert_eq!(shown(&[0, 1]), "\n\u{fffd}");
        assert_eq!(shown(&[0, 1, 2, 3, 5]), "\n\u{6771} b", "complete characters are decoded");
    }

    #[test]
    fn earliest_stop_string_wins() {
        let cases: [(&str, &[&str], &str, bool); 6] = [
            ("abcd", &["abcd", "bc"], "", true),
            ("abce", &["abcd", "bc"], "a", true),
            ("abc", &["abcd", "bc"], "a", true),
            ("aabcabcd", &["abcabcd", "bca"], "a", true),
            ("xaba", &["abab"], "xaba", false),
            ("aab\u{e9}", &["ab\u{e9}", "aabc"], "a", true),
        ];
        for (whole, stops, expected, ends) in cases {
            let chars: Vec<char> = whole.chars().collect();
            // One bit per position between two characters: whether the text is split there.
            for cuts in 0..1 << (chars.len() - 1) {
                let mut stop = StopStrings::new(stops.iter().map(|stop| (*stop).to_owned()).collect());
                let (mut shown, mut ended, mut piece) = (String::new(), false, String::new());
                for (at, c) in chars.iter().enumerate() {
                    piece.push(*c);
                    if !ended && (cuts >> at & 1 == 1 || at + 1 == chars.len()) {
                        let (more, end) = stop.push(&std::mem::take(&mut piece));
                        shown += &more;
                        ended = end;
                    }
                }
                if !ended {
                    let (more, end) = stop.finish();
                    shown += &more;
                    ended = end;
                }
                assert_eq!((shown.as_str(), ended), (expected, ends), "{whole} {stops:?} {cuts:b}");
            }
        }
    }

    #[test]
    fn stop_strings_are_found_across_pieces() {
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
                    let (more, end) = stop.finish();
                    shown += &more;
                    ended = end;
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
    fn token_ids_must_be_numbers() {
        assert_eq!(parse_ids("[1, 2 3\n40]").unwrap(), [1, 2, 3, 40]);
        for wrong in ["99999999999", "-5", "+5", "1.5", "0x10", "abc", "1,b", "1;2", "", "[]", " , "] {
            let error = parse_ids(wrong).unwrap_err().to_string();
            assert!(error.contains("1,450,4996"), "{wrong:?}: {error}");
        }
    }
}
