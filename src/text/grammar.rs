//! Grammars of answers, based on `llguidance`: they compute which tokens may follow.
//!
//! Grammars come from clients, and compiling one may exceed any memory. So a text process compiles it first, within the
//! limits of a call; a grammar that passes is compiled again in the process that samples tokens. There, the work per
//! token is limited, and so is the memory of an answer.

use std::{
    fmt,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use llguidance::{
    Matcher, ParserFactory,
    api::{ParserLimits, TopLevelGrammar},
    earley::SlicedBiasComputer,
    toktrie::{ApproximateTokEnv, INVALID_TOKEN, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie},
};

use super::{
    STACK_BYTES, catch_panic,
    error::TextError,
    panic_message,
    prompt::{Grammar, Sampled},
    vocabulary::Vocabulary,
};

/// Limits of a grammar. About 14,000 units of fuel, or 20,000 items in short rows, take a millisecond. A state of the
/// lexer takes 1 to 2 KiB.
const LIMITS: ParserLimits = ParserLimits {
    max_items_in_row: 1000,
    initial_lexer_fuel: 1_000_000,
    step_lexer_fuel: 50_000,
    step_max_items: 20_000,
    max_lexer_states: 10_000,
    max_grammar_size: 200_000,
    precompute_large_lexemes: false,
    verbose_errors: false,
};
/// The maximum number of parser items of an answer, with about 16 bytes each.
const ITEMS_MAX: usize = 4 << 20;
/// The time for a token; all tokens of an answer together may exceed it by [`EXTRA_TIME_MAX`]. An ambiguous grammar
/// takes time quadratic in its items, so a limit on items alone does not bound it.
const TOKEN_TIME_TARGET: Duration = Duration::from_millis(5);
const EXTRA_TIME_MAX: Duration = Duration::from_secs(1);
/// The maximum length of a parser error's text, characters.
const ERROR_CHARS_MAX: usize = 300;

/// Compiles grammars for one vocabulary.
pub(super) struct Grammars {
    factory: ParserFactory,
}

impl Grammars {
    /// Creates a compiler for the sampled tokens of a vocabulary.
    ///
    /// # Errors
    /// [`TextError::Grammar`] for a vocabulary whose tokens cannot be decoded separately.
    pub fn new(vocabulary: &Vocabulary, sampled: &Sampled) -> Result<Self, TextError> {
        let unusable = |why: String| TextError::Grammar(format!("{why}; this model cannot give structured answers"));
        let tokens = vocabulary.token_bytes(sampled.vocab).map_err(unusable)?;
        let eos: Vec<u32> = sampled.eos.iter().copied().filter(|id| *id < sampled.vocab).collect();
        let build = || {
            let first = eos.first().copied().unwrap_or(INVALID_TOKEN);
            let mut trie = TokTrie::from(&TokRxInfo::new(sampled.vocab, first), &tokens);
            if !eos.is_empty() {
                trie = trie.with_eos_tokens(&eos);
            }
            let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
            let slices = SlicedBiasComputer::general_slices();
            let factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices);
            let mut factory = factory.map_err(|error| error.to_string())?;
            factory.quiet();
            *factory.limits_mut() = LIMITS;
            Ok(factory)
        };
        let built = catch_panic(build).unwrap_or_else(Err);
        built.map(|factory| Self { factory }).map_err(|why| unusable(short(&why)))
    }

    /// Compiles a grammar, and computes its first mask.
    ///
    /// # Errors
    /// [`TextError::Grammar`].
    pub fn compile(&self, grammar: &Grammar) -> Result<Answer, TextError> {
        let compile = || {
            let parser = self.factory.create_parser(top_level(grammar)?).map_err(|error| error.to_string())?;
            let mut matcher = Matcher::new(Ok(parser));
            // The matcher keeps the mask for the first token.
            matcher.compute_mask().map_err(|error| error.to_string())?;
            Ok(matcher)
        };
        let compiled = catch_panic(compile).unwrap_or_else(Err);
        let extra_time = Duration::ZERO;
        let too_complex = |why: String| TextError::Grammar(format!("{}; simplify it", short(&why)));
        compiled.map(|matcher| Answer { matcher, items: 0, extra_time }).map_err(too_complex)
    }

    /// Compiles a grammar as [`Grammars::compile`] does, on a stack as large as that of a text process.
    ///
    /// # Errors
    /// [`TextError::Grammar`].
    pub fn compile_on_large_stack(&self, grammar: &Grammar) -> Result<Answer, TextError> {
        thread::scope(|scope| {
            let thread =
                thread::Builder::new().stack_size(STACK_BYTES as usize).spawn_scoped(scope, || self.compile(grammar));
            let thread = thread.map_err(|error| TextError::Grammar(format!("cannot start a thread: {error}")))?;
            thread.join().unwrap_or_else(|why| Err(TextError::Grammar(panic_message(&*why))))
        })
    }
}

/// Converts a grammar to the type of `llguidance`.
fn top_level(grammar: &Grammar) -> Result<TopLevelGrammar, String> {
    Ok(match grammar {
        Grammar::Schema(text) => {
            TopLevelGrammar::from_json_schema(serde_json::from_str(text).map_err(|error| error.to_string())?)
        }
        Grammar::Regex(text) => TopLevelGrammar::from_regex(text),
        Grammar::Lark(text) => TopLevelGrammar::from_lark(text.clone()),
    })
}

/// Cuts a parser's message, which may quote the whole grammar.
fn short(why: &str) -> String {
    let line = why.lines().next().unwrap_or_default();
    line.chars().take(ERROR_CHARS_MAX).collect()
}

/// The state of an answer that must match a grammar.
#[derive(Clone)]
pub(crate) struct Answer {
    matcher: Matcher,
    /// The number of parser items so far.
    items: usize,
    /// The time spent beyond [`TOKEN_TIME_TARGET`] so far.
    extra_time: Duration,
}

impl Answer {
    /// Sets the mask to the tokens that may follow. Leaves it unchanged after an error, or if the answer has reached
    /// its limit of items or time.
    pub fn allow(&mut self, mask: &mut [u32]) {
        if self.is_over_limit() {
            return;
        }
        let Ok(allowed) = self.timed(Matcher::compute_mask) else { return };
        self.items += self.matcher.last_step_stats().map_or(0, |stats| stats.all_items);
        if !self.is_over_limit() {
            mask.iter_mut().zip(allowed.as_slice()).for_each(|(bits, allowed)| *bits = *allowed);
        }
    }

    /// Appends a token. Returns whether the answer is complete, so that no token may follow.
    pub fn take(&mut self, token: u32) -> bool {
        if self.is_over_limit() {
            return false;
        }
        self.timed(|matcher| matcher.consume_token(token)).is_ok() && self.matcher.is_stopped()
    }

    fn is_over_limit(&self) -> bool {
        self.items > ITEMS_MAX || self.extra_time > EXTRA_TIME_MAX
    }

    fn timed<T>(&mut self, work: impl FnOnce(&mut Matcher) -> T) -> T {
        let started = Instant::now();
        let done = work(&mut self.matcher);
        self.extra_time += started.elapsed().saturating_sub(TOKEN_TIME_TARGET);
        done
    }
}

impl fmt::Debug for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Answer({} items)", self.items)
    }
}

/// Whether a text matches: each token is allowed, and the answer is complete or may end.
#[cfg(test)]
pub(crate) fn accepts(grammar: &Grammar, text: &str) -> bool {
    let tokenizer = include_str!("../../tests/serve/tokenizer.json");
    let text_codec = super::Text::new(tokenizer.as_bytes(), None, None).unwrap();
    let sampled = Sampled { vocab: 264, eos: vec![1] };
    let mut answer = text_codec.compile(grammar, &sampled).unwrap();
    let allowed = |token: u32, answer: &mut Answer| {
        let mut mask = [0; 9];
        answer.allow(&mut mask);
        mask[token as usize / 32] >> (token % 32) & 1 == 1
    };
    let ids = text_codec.encode(text).unwrap();
    for (at, id) in ids[1..].iter().enumerate() {
        if !allowed(*id, &mut answer) {
            return false;
        }
        if answer.take(*id) {
            return at + 2 == ids.len();
        }
    }
    allowed(1, &mut answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_match_their_grammar() {
        let schema = |text: &str| Grammar::Schema(text.to_owned());
        let object = schema(
            r#"{"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["\u00e9", null]}},
            "required": ["b", "a"], "additionalProperties": false}"#,
        );
        let refers = schema(
            r##"{"$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}"##,
        );
        let regex = Grammar::Regex("a{2,3}|\u{e9}".into());
        let lark = Grammar::Lark("start: \"x\" start | \"y\"".into());
        for (grammar, text, expected) in [
            (&object, "{\"b\": 12, \"a\": \"\u{e9}\"}", true),
            (&object, "{\"b\":1,\n\"a\":null}", true),
            (&object, "{\"a\": null, \"b\": 1}", false),
            (&object, "{\"b\": 12}", false),
            (&object, "{\"b\": 12", false),
            (&refers, "{\"next\": {\"next\": {}}}", true),
            (&refers, "{\"next\": 1}", false),
            (&regex, "aa", true),
            (&regex, "aaa", true),
            (&regex, "\u{e9}", true),
            (&regex, "a", false),
            (&regex, "aaaa", false),
            (&lark, "xxy", true),
            (&lark, "xx", false),
        ] {
            assert_eq!(accepts(grammar, text), expected, "{text} by {grammar:?}");
        }
    }
}
