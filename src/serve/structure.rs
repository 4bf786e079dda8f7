//! Parses the fields for structured output, in the formats of OpenAI's and vLLM's APIs, and adapts the compiled grammar
//! to the engine.

use std::sync::Arc;

use serde_json::{Value, json, value::RawValue};
use tokio::sync::OwnedSemaphorePermit;
use unweight_engine::{Constraint, ConstraintState};

use super::{
    error::ApiError,
    fields::{Fields, text},
};
use crate::text::{Answer, Grammar};

/// The maximum size of a grammar, bytes of JSON.
const GRAMMAR_BYTES_MAX: usize = 64 << 10;
/// The maximum number of texts of a choice.
const CHOICES_MAX: usize = 1024;

/// The fields that this module reads.
pub(super) const FIELDS: &[&str] =
    &["response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"];
/// The fields of vLLM's `structured_outputs`, each with its older name.
const KINDS: [(&str, &str); 4] =
    [("json", "guided_json"), ("regex", "guided_regex"), ("choice", "guided_choice"), ("grammar", "guided_grammar")];

/// Parses the grammar of a request, if any. Returns the field that contains it, too.
pub(super) fn read(fields: &mut Fields) -> Result<Option<(&'static str, Grammar)>, ApiError> {
    let mut found = Vec::new();
    if let Some(raw) = fields.take("response_format") {
        found.extend(response_format(raw)?.map(|grammar| ("response_format", grammar)));
    }
    if let Some(raw) = fields.take("structured_outputs") {
        let names = &["json", "regex", "choice", "grammar", "json_object", "structural_tag"];
        let outputs = Fields::read(raw.get().as_bytes(), names);
        let mut outputs =
            outputs.map_err(|_| ApiError::of("structured_outputs", "structured_outputs is not an object"))?;
        for (kind, _) in KINDS {
            let grammar = outputs.take(kind).map(|raw| parse_grammar("structured_outputs", kind, raw)).transpose()?;
            found.extend(grammar.map(|grammar| ("structured_outputs", grammar)));
        }
        if outputs.flag("json_object")? {
            found.push(("structured_outputs", any_object()));
        }
        if outputs.take("structural_tag").is_some() {
            let message = "structural_tag is not supported; use json, regex, choice or grammar";
            return Err(ApiError::of("structured_outputs", message).code("unsupported_parameter"));
        }
    }
    for (kind, name) in KINDS {
        let grammar = fields.take(name).map(|raw| parse_grammar(name, kind, raw)).transpose()?;
        found.extend(grammar.map(|grammar| (name, grammar)));
    }
    match found.len() {
        0 | 1 => Ok(found.pop()),
        _ => {
            let (first, second) = (found[0].0, found[1].0);
            Err(ApiError::of(second, format!("{first} and {second} both specify a grammar; leave one out")))
        }
    }
}

/// Returns the schema of any JSON object.
fn any_object() -> Grammar {
    Grammar::Schema(json!({ "type": "object" }).to_string())
}

fn response_format(raw: &RawValue) -> Result<Option<Grammar>, ApiError> {
    const NAME: &str = "response_format";
    let wrong = |message: &str| ApiError::of(NAME, format!("response_format: {message}"));
    let fields = Fields::read(raw.get().as_bytes(), &["type", "json_schema"]);
    let mut fields = fields.map_err(|_| wrong("it is not an object"))?;
    let kind = fields.take("type").and_then(text).ok_or_else(|| wrong("it has no type"))?;
    match kind.as_str() {
        "text" => Ok(None),
        "json_object" => Ok(Some(any_object())),
        "json_schema" => {
            let format = fields.take("json_schema").ok_or_else(|| wrong("it has no json_schema"))?;
            let format = Fields::read(format.get().as_bytes(), &["schema", "name", "strict", "description"]);
            let mut format = format.map_err(|_| wrong("json_schema is not an object"))?;
            // An answer always matches, as with `strict`.
            match format.take("schema") {
                Some(schema) => parse_grammar(NAME, "json", schema).map(Some),
                None => Ok(Some(any_object())),
            }
        }
        _ => Err(wrong("the type is not text, json_object or json_schema")),
    }
}

/// Parses a grammar of one of the [`KINDS`] from `field`.
fn parse_grammar(field: &str, kind: &str, raw: &RawValue) -> Result<Grammar, ApiError> {
    let bytes = raw.get().len();
    if bytes > GRAMMAR_BYTES_MAX {
        let message = format!("{field}: the {kind} has {bytes} bytes; the limit is {GRAMMAR_BYTES_MAX}");
        return Err(ApiError::of(field, message));
    }
    let wrong = |what: &str| ApiError::of(field, format!("{field}: the {kind} is not {what}"));
    match kind {
        // Some clients send the schema as a string.
        "json" => schema(&text(raw).unwrap_or_else(|| raw.get().to_owned())).map_err(|why| wrong(&why)),
        "regex" => text(raw).map(Grammar::Regex).ok_or_else(|| wrong("a text")),
        "grammar" => text(raw).map(Grammar::Lark).ok_or_else(|| wrong("a text")),
        _ => {
            let texts: Option<Vec<String>> = serde_json::from_str(raw.get()).ok();
            let texts = texts.filter(|texts| (1..=CHOICES_MAX).contains(&texts.len()));
            let texts = texts.ok_or_else(|| wrong(&format!("a list of 1 to {CHOICES_MAX} texts")))?;
            let quoted: Vec<String> = texts.iter().map(|text| json!(text).to_string()).collect();
            Ok(Grammar::Lark(format!("start: {}", quoted.join(" | "))))
        }
    }
}

/// Parses a JSON schema.
fn schema(text: &str) -> Result<Grammar, String> {
    let value: Value = serde_json::from_str(text).map_err(|error| format!("a JSON schema: {error}"))?;
    match value {
        Value::Object(_) => Ok(Grammar::Schema(value.to_string())),
        Value::Bool(true) => Ok(Grammar::Schema("{}".to_owned())),
        _ => Err("a JSON schema, which is an object".to_owned()),
    }
}

/// A compiled grammar, as a constraint of the engine.
#[derive(Clone, Debug)]
pub(super) struct Compiled {
    /// The state before the first token.
    start: Arc<Answer>,
    /// A permit for a compiled grammar, held until the last answer under it has ended.
    _permit: Arc<OwnedSemaphorePermit>,
}

/// An answer under a compiled grammar. Its state exists from the first mask on. It shares nothing with other answers,
/// unless the grammar is large.
#[derive(Debug)]
struct Started {
    compiled: Compiled,
    answer: Option<Answer>,
}

impl Started {
    fn answer(&mut self) -> &mut Answer {
        let start = &self.compiled.start;
        self.answer.get_or_insert_with(|| if start.is_large() { start.sharing() } else { start.separate() })
    }
}

impl Compiled {
    /// Creates the constraint of a request. Copies a large grammar, which takes time.
    pub fn constraint(start: Arc<Answer>, permit: OwnedSemaphorePermit) -> Arc<dyn Constraint> {
        let start = if start.is_large() { Arc::new(start.separate()) } else { start };
        Arc::new(Self { start, _permit: Arc::new(permit) })
    }
}

impl Constraint for Compiled {
    fn start(&self) -> Box<dyn ConstraintState> {
        Box::new(Started { compiled: self.clone(), answer: None })
    }
}

impl ConstraintState for Started {
    fn allow(&mut self, mask: &mut [u32]) {
        self.answer().allow(mask);
    }

    fn take(&mut self, token: u32) -> bool {
        self.answer().take(token)
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::Semaphore;

    use super::*;
    use crate::text::{Sampled, Text};

    fn of(body: &Value) -> Result<Option<(&'static str, Grammar)>, ApiError> {
        let body = body.to_string();
        read(&mut Fields::read(body.as_bytes(), FIELDS).unwrap())
    }

    #[test]
    fn grammars_have_the_forms_of_both_apis() {
        let schema = json!({ "type": "object", "properties": { "z": {}, "a": {} } });
        let schema_grammar = Grammar::Schema(schema.to_string());
        for (name, value, expected) in [
            ("response_format", json!({ "type": "json_object" }), any_object()),
            (
                "response_format",
                json!({ "type": "json_schema", "json_schema": { "name": "n", "schema": schema, "strict": true } }),
                schema_grammar.clone(),
            ),
            ("structured_outputs", json!({ "json": schema }), schema_grammar.clone()),
            ("structured_outputs", json!({ "json": schema.to_string() }), schema_grammar.clone()),
            ("structured_outputs", json!({ "json_object": true }), any_object()),
            ("structured_outputs", json!({ "regex": "a+", "choice": null }), Grammar::Regex("a+".into())),
            ("guided_json", schema.clone(), schema_grammar),
            ("guided_regex", json!("[0-9]"), Grammar::Regex("[0-9]".into())),
            ("guided_choice", json!(["a", "b\"\n"]), Grammar::Lark("start: \"a\" | \"b\\\"\\n\"".into())),
            ("guided_grammar", json!("start: \"x\""), Grammar::Lark("start: \"x\"".into())),
        ] {
            assert_eq!(of(&json!({ name: value })).unwrap(), Some((name, expected)), "{value}");
        }
        for none in [json!({}), json!({ "response_format": null }), json!({ "response_format": { "type": "text" } })] {
            assert_eq!(of(&none).unwrap(), None);
        }
    }

    #[test]
    fn wrong_grammars_are_rejected_by_field() {
        for (name, value) in [
            ("response_format", json!("json")),
            ("response_format", json!({})),
            ("response_format", json!({ "type": "yaml" })),
            ("response_format", json!({ "type": "json_schema" })),
            ("response_format", json!({ "type": "json_schema", "json_schema": { "schema": [] } })),
            ("response_format", json!({ "type": "json_schema", "json_schema": { "schema": "{" } })),
            ("structured_outputs", json!([])),
            ("structured_outputs", json!({ "regex": 5 })),
            ("structured_outputs", json!({ "structural_tag": {} })),
            ("structured_outputs", json!({ "regex": "a", "choice": ["a"] })),
            ("guided_json", json!(7)),
            ("guided_regex", json!({})),
            ("guided_regex", json!("x".repeat(GRAMMAR_BYTES_MAX))),
            ("guided_choice", json!([])),
            ("guided_choice", json!([1])),
            ("guided_choice", json!(vec![""; CHOICES_MAX + 1])),
            ("guided_grammar", json!(true)),
        ] {
            let error = of(&json!({ name: value })).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(name), "{error:?}");
        }
        let both = of(&json!({ "response_format": { "type": "json_object" }, "guided_regex": "a" })).unwrap_err();
        assert!(both.message.contains("leave one out"), "{both:?}");
    }

    #[test]
    fn answers_share_only_large_grammars() {
        let text = Text::new(include_bytes!("../../tests/serve/tokenizer.json"), None, None).unwrap();
        let sampled = Sampled { vocab: 264, eos: vec![1] };
        // Most tokens add a state to the lexer, up to its limit.
        let start = text.compile(&Grammar::Regex("(a|b)*a(a|b){20}".into()), &sampled).unwrap();
        let constraint = |start| {
            let permit = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
            Compiled::constraint(start, permit)
        };
        let ids = text.encode("ab").unwrap();
        // Returns the number of tokens until an answer ends, at most `tokens`.
        let generate = |constraint: &Arc<dyn Constraint>, mut random: u32, tokens: usize| {
            let mut state = constraint.start();
            (0..tokens)
                .take_while(|_| {
                    let mut mask = [0; 9];
                    state.allow(&mut mask);
                    random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    state.take(ids[1 + (random >> 31) as usize]);
                    mask != [0; 9]
                })
                .count()
        };
        let small = constraint(Arc::clone(&start));
        let tokens = generate(&small, 1, 30_000);
        assert!((1000..30_000).contains(&tokens), "{tokens}");
        assert_eq!(generate(&small, 2, 500), 500);
        // The answers of a request share a large grammar, those of several requests do not.
        let start = Arc::new(start.separate().with_bytes(100 << 20));
        let (large, other) = (constraint(Arc::clone(&start)), constraint(start));
        assert!(generate(&large, 1, 30_000) < 30_000 && generate(&large, 2, 500) < 500);
        assert_eq!(generate(&other, 2, 500), 500);
    }
}
