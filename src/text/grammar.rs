//! Grammars of answers, based on `llguidance`: they compute which tokens may follow.
//!
//! Grammars come from clients, and compiling one may exceed any memory. So a text process compiles it first, within the
//! limits of a call; a grammar that passes is compiled again in the process that samples tokens. There, the work per
//! token is limited, and so is the memory of an answer.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
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
    watch,
};

/// Limits of a grammar. A state of the lexer takes 1 to 2 KiB. A schema of 100 optional properties needs rows of 270
/// items and masks of 43,000; a mask of the other schemas tried needs up to 18,000 items and 6,600 units of fuel. With
/// `minProperties`, `n` optional properties need rows of `n (n + 1)` items.
const LIMITS: ParserLimits = ParserLimits {
    max_items_in_row: 10_000,
    initial_lexer_fuel: 1_000_000,
    step_lexer_fuel: 50_000,
    step_max_items: 200_000,
    max_lexer_states: 10_000,
    max_grammar_size: 200_000,
    precompute_large_lexemes: false,
    verbose_errors: false,
};
/// The number of tokens that are generated to try a grammar out: one opens an object or a list.
#[cfg(unix)]
const TRIED_TOKENS: usize = 3;
/// The maximum number of parser items of an answer, with about 16 bytes each.
const ITEMS_MAX: usize = 4 << 20;
/// The processor time of a mask, and how far it may exceed it. The masks of schemas took 1 ms and at most 6.5 ms. An
/// ambiguous grammar takes time cubic in the items of a row, so a limit on items does not bound it.
const MASK_TIME: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(33)];
/// The same for appending a token, which answers do one after the other. 99.9 % of them took 0.2 ms. The time grows
/// with the square of the items of a row, of which 2,000 take 4 ms.
const TOKEN_TIME: [Duration; 2] = [Duration::from_micros(500), Duration::from_micros(19_500)];
/// How far an answer may exceed these times, where later tokens catch up.
const EXTRA_TIME_MAX: Duration = Duration::from_millis(100);
/// How far all answers together may exceed them within [`SHARED_INTERVAL`], which is longer than a step: a quarter of
/// the time of the thread that appends tokens, and of each thread that computes masks.
const SHARED_EXTRA_TIME_MAX: Duration = Duration::from_millis(25);
const SHARED_INTERVAL: Duration = Duration::from_millis(100);
/// The maximum length of a parser error's text, characters.
const ERROR_CHARS_MAX: usize = 300;

/// Compiles grammars for one vocabulary.
pub(super) struct Grammars {
    factory: ParserFactory,
    shared: Arc<Shared>,
}

/// The time that answers have spent beyond their targets for masks and tokens.
struct Shared {
    masks: Mutex<SharedTime>,
    tokens: Mutex<SharedTime>,
}

/// The time that answers have spent beyond their target since the start of an interval, and its maximum.
struct SharedTime {
    start: Instant,
    spent: Duration,
    max: Duration,
}

impl SharedTime {
    fn new(max: Duration) -> Mutex<Self> {
        Mutex::new(Self { start: Instant::now(), spent: Duration::ZERO, max })
    }

    /// Adds time that was spent.
    fn spend(&mut self, time: Duration) {
        if self.start.elapsed() > SHARED_INTERVAL {
            (self.start, self.spent) = (Instant::now(), Duration::ZERO);
        }
        self.spent += time;
    }

    /// Returns the time that is left.
    fn left(&mut self) -> Duration {
        self.spend(Duration::ZERO);
        self.max.saturating_sub(self.spent)
    }
}

impl Grammars {
    /// Creates a compiler for the sampled tokens of a vocabulary.
    ///
    /// # Errors
    /// [`TextError::Grammar`] for a vocabulary whose tokens cannot be decoded separately.
    pub fn new(vocabulary: &Vocabulary, sampled: &Sampled) -> Result<Self, TextError> {
        let unsupported = |why: String| TextError::Grammar(format!("{why}; this model cannot give structured answers"));
        let tokens = vocabulary.token_bytes(sampled.vocab).map_err(unsupported)?;
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
        // The schedule computes masks on rayon's threads.
        let threads = rayon::current_num_threads().max(2) as u32;
        let masks = SharedTime::new(SHARED_EXTRA_TIME_MAX * threads);
        let shared = Arc::new(Shared { masks, tokens: SharedTime::new(SHARED_EXTRA_TIME_MAX) });
        let with = |factory| Self { factory, shared };
        built.map(with).map_err(|why| unsupported(short(&why)))
    }

    /// Compiles a grammar, and computes its first mask.
    ///
    /// # Errors
    /// [`TextError::Grammar`].
    pub fn compile(&self, grammar: &Grammar) -> Result<Answer, TextError> {
        let compile = || {
            let parser = top_level(grammar)
                .and_then(|grammar| self.factory.create_parser(grammar).map_err(|error| error.to_string()))
                .map_err(|why| unusable(&why))?;
            let mut matcher = Matcher::new(Ok(parser)).into_cancellable();
            let accepts_empty = matcher.is_accepting().unwrap_or(false);
            // The matcher keeps the mask for the first token.
            matcher.compute_mask().map_err(|error| {
                let why = error.to_string();
                // The reason of `llguidance` why a first mask is empty.
                match (why.contains("NoExtensionBias"), accepts_empty) {
                    (true, true) => "only the empty text matches it, and the model has no end token".to_owned(),
                    (true, false) => "no text matches it, as if a schema referred only to itself".to_owned(),
                    _ => unusable(&why),
                }
            })?;
            Ok(matcher)
        };
        let compiled = catch_panic(compile).unwrap_or_else(|why| Err(unusable(&why))).map_err(TextError::Grammar);
        let (extra_time, shared) = (Duration::ZERO, Arc::clone(&self.shared));
        compiled.map(|matcher| Answer { matcher, bytes: 0, items: 0, extra_time, shared })
    }

    /// Generates a few tokens, because some grammars exceed a limit only after the first.
    ///
    /// # Errors
    /// [`TextError::Grammar`].
    #[cfg(unix)]
    pub fn try_out(&self, answer: &Answer) -> Result<(), TextError> {
        let run = || {
            let (mut answer, eos) = (answer.separate(), self.factory.tok_env().tok_trie().eos_tokens());
            let mut mask = vec![0; self.factory.tok_env().tok_trie().vocab_size().div_ceil(32)];
            for _ in 0..TRIED_TOKENS {
                answer.allow(&mut mask);
                let mut allowed = (0..).zip(&mask).flat_map(|(at, bits)| {
                    (0..32).filter(move |bit| bits >> bit & 1 == 1).map(move |bit| 32 * at + bit)
                });
                let token = allowed.find(|token| !eos.contains(token));
                let is_complete = token.is_none_or(|token| answer.take(token));
                answer.check()?;
                if is_complete {
                    break;
                }
            }
            Ok(())
        };
        catch_panic(run).unwrap_or_else(|why| Err(unusable(&why))).map_err(TextError::Grammar)
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

/// Returns why a grammar cannot be used, from the message of `llguidance`.
fn unusable(why: &str) -> String {
    format!("{}; correct or simplify it", short(why))
}

/// Cuts a parser's message, which may quote the whole grammar: keeps its first line and the cause, which errors of
/// regular expressions have in a later line.
fn short(why: &str) -> String {
    let mut lines = why.lines();
    let first = lines.next().unwrap_or_default().chars().take(ERROR_CHARS_MAX).collect();
    match lines.filter_map(|line| line.trim().strip_prefix("error: ")).next_back() {
        Some(cause) => [first, cause.chars().take(ERROR_CHARS_MAX).collect()].join(" "),
        None => first,
    }
}

/// The maximum memory of a compiled grammar that is copied for each answer, bytes. A copy of this size takes 1 ms.
const COPIED_BYTES_MAX: u64 = 2 << 20;

/// The state of an answer that must match a grammar.
pub(crate) struct Answer {
    matcher: Matcher,
    /// The memory of the compiled grammar, as far as it is known.
    bytes: u64,
    /// The number of parser items so far.
    items: usize,
    /// The time spent beyond [`MASK_TIME`] and [`TOKEN_TIME`], which faster tokens reduce.
    extra_time: Duration,
    shared: Arc<Shared>,
}

impl Answer {
    /// Sets the memory that the compiled grammar takes, bytes.
    pub fn with_bytes(self, bytes: u64) -> Self {
        Self { bytes, ..self }
    }

    /// Whether the compiled grammar takes so much memory that the answers of a request share one copy.
    pub fn is_large(&self) -> bool {
        self.bytes > COPIED_BYTES_MAX
    }

    /// Returns a copy that shares no lexer with this state, so that masks of both are computed at the same time. It
    /// takes as much memory as the compiled grammar, and time: 1 ms per MiB.
    pub fn separate(&self) -> Self {
        Self { matcher: self.matcher.deep_clone(), shared: Arc::clone(&self.shared), ..*self }
    }

    /// Returns a copy that shares the lexer, so that masks of both are computed one after the other.
    pub fn sharing(&self) -> Self {
        Self { matcher: self.matcher.clone(), shared: Arc::clone(&self.shared), ..*self }
    }

    /// Sets the mask to the tokens that may follow. Leaves it unchanged after an error, or if the answer has reached
    /// its limit of items or time.
    pub fn allow(&mut self, mask: &mut [u32]) {
        if self.is_over_limit() {
            return;
        }
        let Ok(allowed) = self.timed(MASK_TIME, |shared| &shared.masks, Matcher::compute_mask) else { return };
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
        let taken = self.timed(TOKEN_TIME, |shared| &shared.tokens, |matcher| matcher.consume_token(token));
        taken.is_ok() && self.matcher.is_stopped()
    }

    /// Returns why the answer cannot continue, if it cannot.
    #[cfg(unix)]
    fn check(&self) -> Result<(), String> {
        if self.matcher.is_cancelled() || self.is_over_limit() {
            return Err(unusable("its tokens take too long"));
        }
        self.matcher.get_error().map_or(Ok(()), |why| Err(unusable(&why)))
    }

    fn is_over_limit(&self) -> bool {
        self.items > ITEMS_MAX || self.extra_time > EXTRA_TIME_MAX
    }

    /// Runs work on the matcher, which fails from then on if it takes too long.
    fn timed<T>(
        &mut self,
        [time, extra_max]: [Duration; 2],
        shared: impl Fn(&Shared) -> &Mutex<SharedTime>,
        work: impl FnOnce(&mut Matcher) -> T,
    ) -> T {
        let shared = || shared(&self.shared).lock().unwrap_or_else(PoisonError::into_inner);
        let left = EXTRA_TIME_MAX.saturating_sub(self.extra_time).min(shared().left());
        let handle = self.matcher.cancellation_handle();
        let (done, spent) = watch::limited(handle, time + left.min(extra_max), || work(&mut self.matcher));
        shared().spend(spent.saturating_sub(time));
        self.extra_time = (self.extra_time + spent).saturating_sub(time);
        done
    }
}

impl fmt::Debug for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Answer({} items)", self.items)
    }
}

/// The codec of the tests, and the tokens that it has.
#[cfg(test)]
fn codec() -> (super::Text, Sampled) {
    let tokenizer = include_str!("../../tests/serve/tokenizer.json");
    (super::Text::new(tokenizer.as_bytes(), None, None).unwrap(), Sampled { vocab: 264, eos: vec![1] })
}

/// The state before the first token of an answer.
#[cfg(test)]
pub(super) fn compiled(grammar: &Grammar) -> Answer {
    let (text_codec, sampled) = codec();
    text_codec.compile(grammar, &sampled).unwrap().separate()
}

/// Whether a text matches: each token is allowed, and the answer is complete or may end.
#[cfg(test)]
pub(crate) fn accepts(grammar: &Grammar, text: &str) -> bool {
    let (text_codec, sampled) = codec();
    let mut answer = text_codec.compile(grammar, &sampled).unwrap().separate();
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

    /// Generates up to `tokens` tokens, each the first that is allowed but the end. Returns their number, and the
    /// processor time of the longest mask or token, and of all.
    fn generated(answer: &mut Answer, tokens: usize) -> (usize, Duration, Duration) {
        let (mut longest, mut all) = (Duration::ZERO, Duration::ZERO);
        let clock = watch::ThreadClock::of_this_thread();
        let mut start = clock.now();
        let mut passed = || {
            let time = clock.now().saturating_sub(start);
            (longest, all) = (longest.max(time), all + time);
            start = clock.now();
        };
        let mut at = 0;
        while at < tokens {
            let mut mask = [0; 9];
            answer.allow(&mut mask);
            passed();
            let Some(token) = (2..264).find(|token| mask[token / 32] >> (token % 32) & 1 == 1) else { break };
            let is_complete = answer.take(token as u32);
            passed();
            at += 1;
            if is_complete {
                break;
            }
        }
        (at, longest, all)
    }

    #[test]
    fn masks_have_a_time_limit() {
        // The watching thread may wait for a processor.
        let slack = Duration::from_millis(100);
        for text in ["start: start start | start start start | \"a\" | \"\"", "start: \"a\" start | \"b\""] {
            let mut answer = compiled(&Grammar::Lark(text.into()));
            let (tokens, longest, all) = generated(&mut answer, 10_000);
            println!("{text}: {tokens} tokens, at most {longest:?}, {all:?} in total");
            assert!((10..10_000).contains(&tokens), "{tokens}");
            assert!(longest < MASK_TIME[0] + MASK_TIME[1] + slack, "{longest:?}");
            let targets = (MASK_TIME[0] + TOKEN_TIME[0]) * tokens as u32;
            assert!(all < targets + EXTRA_TIME_MAX + MASK_TIME[1] + slack, "{all:?}");
            let mut mask = [0; 9];
            answer.allow(&mut mask);
            assert_eq!(mask, [0; 9], "it has ended");
        }
    }

    #[test]
    fn answers_together_have_a_time_limit() {
        let start = compiled(&Grammar::Regex("a*".into()));
        let spin = |answer: &mut Answer, most: Duration| {
            let handle = answer.matcher.cancellation_handle().unwrap();
            let clock = watch::ThreadClock::of_this_thread();
            let from = clock.now();
            let passed = || clock.now().saturating_sub(from);
            answer.timed(MASK_TIME, |shared| &shared.masks, |_| while !handle.is_cancelled() && passed() < most {});
            passed()
        };
        let [time, extra] = MASK_TIME;
        let (mut one, mut fast, mut other) = (start.separate(), start.separate(), start.separate());
        start.shared.tokens.lock().unwrap().spend(SHARED_EXTRA_TIME_MAX);
        assert!(spin(&mut one, 10 * extra) >= time + extra, "an answer may exceed its time");
        // The watching thread may wait for a processor, but not always.
        let shortest = (0..5).map(|_| {
            let mut shared = one.shared.masks.lock().unwrap();
            let all = shared.max;
            shared.spend(all);
            drop(shared);
            other = start.separate();
            spin(&mut other, 10 * extra)
        });
        assert!(shortest.min().unwrap() < extra, "unless the others have");
        spin(&mut fast, time / 2);
        assert!(!fast.matcher.is_cancelled() && one.matcher.is_cancelled() && other.matcher.is_cancelled());
        thread::sleep(2 * SHARED_INTERVAL);
        assert!(spin(&mut start.separate(), 10 * extra) >= time + extra);
    }

    #[test]
    fn honest_schemas_stay_within_the_limits() {
        let properties = |count: usize| -> serde_json::Value {
            (0..count).map(|at| (format!("p{at}"), serde_json::json!({"type": ["string", "null"]}))).collect()
        };
        let wide = serde_json::json!({"type": "object", "properties": properties(300)});
        let list =
            serde_json::json!({"type": "array", "minItems": 100, "items": {"anyOf": [{"type": "integer"}, wide]}});
        let some = serde_json::json!(
            {"type": "object", "properties": properties(50), "minProperties": 1, "additionalProperties": false}
        );
        let wider = serde_json::json!({"type": "object", "properties": properties(800)});
        for schema in [wide, list, some, wider] {
            let mut answer = compiled(&Grammar::Schema(schema.to_string()));
            let (tokens, longest, all) = generated(&mut answer, 400);
            println!("{tokens} tokens, at most {longest:?}, {all:?} in total");
            assert!(tokens == 400 || answer.matcher.is_stopped() && !answer.matcher.is_error(), "{tokens}");
        }
    }

    #[test]
    fn errors_name_the_cause() {
        let (text, sampled) = codec();
        let error = |grammar: Grammar| text.compile(&grammar, &sampled).unwrap_err().to_string();
        let no_text = error(Grammar::Schema(r##"{"$ref": "#"}"##.into()));
        assert!(no_text.contains("no text matches") && !no_text.contains("NoExtension"), "{no_text}");
        let (open, pattern) =
            (Grammar::Regex("(".into()), Grammar::Schema(r#"{"pattern": "(", "type": "string"}"#.into()));
        for unclosed in [error(open), error(pattern)] {
            assert!(unclosed.contains("unclosed group") && !unclosed.contains('\n'), "{unclosed}");
        }
    }

    #[test]
    fn the_empty_text_may_match() {
        for grammar in [Grammar::Regex(String::new()), Grammar::Lark("start: \"\"".into())] {
            assert!(accepts(&grammar, "") && !accepts(&grammar, "a"));
        }
        let (text, sampled) = codec();
        let endless = Sampled { eos: Vec::new(), ..sampled };
        let error = text.compile(&Grammar::Regex(String::new()), &endless).unwrap_err().to_string();
        assert!(error.contains("only the empty text"), "{error}");
    }

    #[test]
    fn grammars_are_tried_out() {
        let (text, sampled) = codec();
        let grammars = Grammars::new(&text.vocabulary, &sampled).unwrap();
        let tried = |grammar| grammars.try_out(&grammars.compile(&grammar).unwrap());
        let error = tried(Grammar::Regex(format!("{}c", "(a*)*".repeat(500)))).unwrap_err().to_string();
        assert!(error.contains("too many expressions"), "{error}");
        let properties: serde_json::Value = (0..98).map(|at| (at.to_string(), serde_json::json!({}))).collect();
        let slow = serde_json::json!(
            {"type": "object", "properties": properties, "minProperties": 1, "additionalProperties": false}
        );
        let error = tried(Grammar::Schema(slow.to_string())).unwrap_err().to_string();
        assert!(error.contains("too long"), "{error}");
        for works in [Grammar::Regex(String::new()), Grammar::Regex("a".into()), Grammar::Schema("{}".into())] {
            tried(works).unwrap();
        }
    }

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
