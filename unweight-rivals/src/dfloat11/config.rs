//! Reads, adds and removes the key `dfloat11_config` of `config.json`. All other bytes stay unchanged.

use std::{ops::Range, path::Path};

use regex::{Regex, RegexBuilder};
use serde::Deserialize;

use super::{ConvertError, THREADS, THREADS_MAX, WINDOW_BYTES};

/// Name of the file.
pub(super) const FILE_NAME: &str = "config.json";
/// The maximum size of the file, in bytes.
pub(super) const BYTES_MAX: u64 = 16 << 20;
/// The key that the package writes.
const KEY: &str = "dfloat11_config";
/// The maximum number of patterns, and the maximum bytes of a compiled one. The package writes one pattern for decoder
/// layers, and one for each other module.
const PATTERNS_MAX: usize = 256;
const PATTERN_BYTES_MAX: usize = 256 << 10;
/// The maximum depth of nesting.
const DEPTH_MAX: usize = 128;

/// The modules whose weights are in a unit, and the number of threads per block.
#[derive(Debug)]
pub(super) struct Config {
    /// Threads per block, 1 to [`THREADS_MAX`].
    pub(super) threads: usize,
    /// Patterns of module names, each with the submodules whose weights are in the unit; empty for the module's own
    /// weight.
    pub(super) patterns: Vec<(Regex, Vec<String>)>,
}

/// The value of the key, as the package writes it.
#[derive(Deserialize)]
struct Stored {
    threads_per_block: OneOrMany,
    bytes_per_thread: u64,
    pattern_dict: Patterns,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "threads_per_block is neither a number nor a list of numbers")]
enum OneOrMany {
    One(u64),
    Many(Vec<u64>),
}

/// Patterns in stored order; the first match applies.
struct Patterns(Vec<(String, Vec<String>)>);

impl<'de> Deserialize<'de> for Patterns {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> serde::de::Visitor<'de> for Pairs {
            type Value = Patterns;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object of patterns")
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Patterns, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Patterns(pairs))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}

impl Config {
    /// Parses the key; `None` if the object does not contain it.
    pub(super) fn parse(path: &Path, text: &[u8]) -> Result<Option<Self>, ConvertError> {
        let fail = |reason: String| ConvertError::Config { path: path.into(), reason };
        let members = members(text).map_err(|at| fail(format!("{}; fetch the model again", object_error(text, at))))?;
        let Some(range) = value_range(members, KEY) else { return Ok(None) };
        let value = &text[range.clone()];
        let stored: Stored = serde_json::from_slice(value).map_err(|error| {
            let at = range.start + offset(value, &error);
            let what = error.to_string();
            let what = what.rsplit_once(" at line ").map_or(what.as_str(), |(what, _)| what);
            fail(format!("{KEY}, byte {at}: {what}; fetch the model again"))
        })?;
        let threads = match stored.threads_per_block {
            OneOrMany::One(threads) => threads,
            OneOrMany::Many(threads) => match threads[..] {
                [threads] => threads,
                _ => {
                    return Err(fail(format!(
                        "{KEY}: threads_per_block has {} extents; 1 is supported",
                        threads.len()
                    )));
                }
            },
        };
        let valid = usize::try_from(threads).ok().filter(|threads| (1..=THREADS_MAX).contains(threads));
        let threads = valid.ok_or_else(|| {
            fail(format!(
                "{KEY}: threads_per_block is {threads}; 1 to {THREADS_MAX} are supported; fetch the model again"
            ))
        })?;
        if stored.bytes_per_thread != WINDOW_BYTES as u64 {
            let got = stored.bytes_per_thread;
            return Err(fail(format!("{KEY}: bytes_per_thread is {got}; only {WINDOW_BYTES} is supported")));
        }
        let count = stored.pattern_dict.0.len();
        if count > PATTERNS_MAX {
            return Err(fail(format!(
                "{KEY}: {count} patterns, above the limit of {PATTERNS_MAX}; fetch the model again"
            )));
        }
        let patterns = stored.pattern_dict.0.into_iter().map(|(pattern, modules)| {
            let mut whole = RegexBuilder::new(&format!(r"\A(?:{pattern})\z"));
            let whole = whole.size_limit(PATTERN_BYTES_MAX).build();
            let whole = whole.map_err(|error| {
                fail(format!("{KEY}: the pattern '{pattern}' is not a valid regular expression: {error}"))
            });
            whole.map(|whole| (whole, modules))
        });
        Ok(Some(Self { threads, patterns: patterns.collect::<Result<_, _>>()? }))
    }

    /// Returns the names of the weights of a unit; `None` if no pattern matches.
    pub(super) fn weights(&self, unit: &str) -> Option<Vec<String>> {
        let (_, modules) = self.patterns.iter().find(|(pattern, _)| pattern.is_match(unit))?;
        Some(match modules[..] {
            [] => vec![format!("{unit}.weight")],
            _ => modules.iter().map(|module| format!("{unit}.{module}.weight")).collect(),
        })
    }
}

/// Returns a positive number of the object, or of the object of its language model.
pub(super) fn number(text: &[u8], keys: &[&str]) -> Option<u64> {
    let of = |text: &[u8]| {
        keys.iter().find_map(|key| serde_json::from_slice::<u64>(member(text, key)?).ok()).filter(|&number| number > 0)
    };
    of(text).or_else(|| of(member(text, "text_config")?))
}

/// Returns whether the object contains the key; if the text is not an object, the offset of the error.
pub(super) fn has_key(text: &[u8]) -> Result<bool, usize> {
    Ok(value_range(members(text)?, KEY).is_some())
}

/// Returns the message for a text that stops being a valid object at this byte.
pub(super) fn object_error(text: &[u8], at: usize) -> String {
    match text.get(at) {
        Some(_) => format!("byte {at}: not valid in a JSON object"),
        None => format!("byte {at}: the JSON object ends too early"),
    }
}

/// Returns the text with the key appended; if the text is not an object, the offset of the error.
pub(super) fn with_key(text: &[u8], patterns: &[(String, Vec<String>)]) -> Result<Vec<u8>, usize> {
    let members = members(text)?;
    // `members` has found both braces.
    let close = text.iter().rposition(|&byte| byte == b'}').ok_or(0usize)?;
    let open = text.iter().position(|&byte| byte == b'{').ok_or(0usize)?;
    let end = members.last().map_or(open + 1, |(.., value)| value.end);
    let comma = if members.is_empty() { "" } else { "," };
    let string = |text: &str| serde_json::Value::from(text).to_string();
    let patterns: Vec<String> = patterns
        .iter()
        .map(|(pattern, modules)| {
            let modules: Vec<String> = modules.iter().map(|module| string(module)).collect();
            format!("\n      {}: [{}]", string(pattern), modules.join(", "))
        })
        .collect();
    let value = format!(
        "{comma}\n  \"{KEY}\": {{\n    \"version\": \"0.5.0\",\n    \"threads_per_block\": [{THREADS}],\n    \
         \"bytes_per_thread\": {WINDOW_BYTES},\n    \"pattern_dict\": {{{}\n    }}\n  }}",
        patterns.join(",")
    );
    // If the object ended on the line of its last value or of its opening brace, the closing brace moves to a new line.
    let gap = if text[end..close].is_empty() { &b"\n"[..] } else { b"" };
    Ok([&text[..end], value.as_bytes(), gap, &text[end..]].concat())
}

/// Returns the text without the key; unchanged if it is not an object.
pub(super) fn without_key(text: &[u8]) -> Vec<u8> {
    let all = members(text).unwrap_or_default();
    let mut kept = Vec::new();
    let mut from = 0;
    for (index, (name, key, value)) in all.iter().enumerate() {
        if name != KEY {
            continue;
        }
        // With the comma before it; for the first member, with the comma after it.
        let (start, end) = match all[..index].iter().rfind(|(before, ..)| before != KEY) {
            Some((_, _, before)) => (before.end, value.end),
            None => (key.start, all.get(index + 1).map_or(value.end, |(_, next, _)| next.start)),
        };
        kept.extend_from_slice(&text[from.min(start)..start]);
        from = end;
    }
    kept.extend_from_slice(&text[from..]);
    kept
}

/// Returns the value of a key of an object.
fn member<'a>(text: &'a [u8], key: &str) -> Option<&'a [u8]> {
    value_range(members(text).ok()?, key).map(|value| &text[value])
}

/// Returns the range of the value of a key; of repeated keys the last, as JSON readers do.
fn value_range(members: Vec<Member>, key: &str) -> Option<Range<usize>> {
    members.into_iter().rfind(|(name, ..)| name == key).map(|(.., value)| value)
}

/// Returns the offset at which the JSON reader stopped.
fn offset(text: &[u8], error: &serde_json::Error) -> usize {
    let lines = text.split_inclusive(|&byte| byte == b'\n').take(error.line().saturating_sub(1));
    (lines.map(<[u8]>::len).sum::<usize>() + error.column().saturating_sub(1)).min(text.len())
}

/// The name of a member, and the ranges of name and value.
type Member = (String, Range<usize>, Range<usize>);

/// Returns the members of an object; if the text is not one, the offset of the error. Inside values, checks only
/// strings and brackets, because Python writes some values that are not JSON.
fn members(text: &[u8]) -> Result<Vec<Member>, usize> {
    let skip = |mut at: usize| {
        while text.get(at).is_some_and(u8::is_ascii_whitespace) {
            at += 1;
        }
        at
    };
    let expect = |at: usize, byte: u8| if text.get(at) == Some(&byte) { Ok(at + 1) } else { Err(at) };
    let string = |at: usize| {
        let mut end = expect(at, b'"')?;
        loop {
            match text.get(end) {
                None => return Err(text.len()),
                Some(b'"') => return Ok(end + 1),
                Some(b'\\') => end += 2,
                Some(_) => end += 1,
            }
        }
    };
    // Returns the end of a value: a string, a bracketed value, or a word.
    let value = |start: usize| {
        let (mut at, mut open) = (start, Vec::new());
        loop {
            match text.get(at) {
                None => return Err(text.len()),
                Some(b'"') => at = string(at)?,
                Some(b'{') => (at, _) = (at + 1, open.push(b'}')),
                Some(b'[') => (at, _) = (at + 1, open.push(b']')),
                Some(&byte @ (b'}' | b']')) if open.last() == Some(&byte) => (at, _) = (at + 1, open.pop()),
                Some(b'}' | b']') => return Err(at),
                Some(_) if !open.is_empty() => at += 1,
                Some(_) => {
                    let word = |byte: &u8| byte.is_ascii_alphanumeric() || b"+-.".contains(byte);
                    at += text[at..].iter().take_while(|byte| word(byte)).count();
                    return if at > start { Ok(at) } else { Err(at) };
                }
            }
            if open.is_empty() {
                return Ok(at);
            }
            if open.len() > DEPTH_MAX {
                return Err(at);
            }
        }
    };
    let mut found = Vec::new();
    let mut at = skip(expect(skip(0), b'{')?);
    if text.get(at) != Some(&b'}') {
        loop {
            let key = at..string(at)?;
            let name: String = serde_json::from_slice(&text[key.clone()]).map_err(|_| at)?;
            let start = skip(expect(skip(key.end), b':')?);
            let end = value(start)?;
            found.push((name, key, start..end));
            at = skip(end);
            if text.get(at) == Some(&b'}') {
                break;
            }
            at = skip(expect(at, b',')?);
        }
    }
    match skip(at + 1) {
        end if end == text.len() => Ok(found),
        more => Err(more),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn config_key_is_added_and_removed_without_other_changes() {
        let patterns = [("lm_head".to_owned(), vec![]), (r"model\.layers\.\d+".to_owned(), vec!["mlp.up_proj".into()])];
        for text in [
            "{}",
            "{\n}\n",
            r#"{"a": 1}"#,
            "{\n  \"a\": \"}\\\"{\",\n  \"b\": [1, {\"c\": NaN}]\n}\n",
            " {\"limit\": -Infinity , \"a\": {} } ",
        ] {
            let added = with_key(text.as_bytes(), &patterns).unwrap();
            let config = Config::parse(Path::new("c"), &added).unwrap().unwrap();
            assert_eq!(config.threads, 512);
            assert_eq!(config.weights("model.layers.12").unwrap(), ["model.layers.12.mlp.up_proj.weight"]);
            assert_eq!(config.weights("lm_head").unwrap(), ["lm_head.weight"]);
            assert_eq!(config.weights("model.layers.x"), None);
            assert_eq!(config.weights("xlm_head"), None);
            let removed = String::from_utf8(without_key(&added)).unwrap();
            assert_eq!(
                removed.trim_end().trim_end_matches('}').trim_end(),
                text.trim_end().trim_end_matches('}').trim_end()
            );
            if !text.contains("NaN") && !text.contains("Infinity") {
                let value = |text: &[u8]| serde_json::from_slice::<serde_json::Value>(text).unwrap();
                assert_eq!(value(&added)["dfloat11_config"]["pattern_dict"]["lm_head"], serde_json::json!([]));
                assert_eq!(value(removed.as_bytes()), value(text.as_bytes()));
            }
        }
        let first = br#"{"dfloat11_config": {"a": [1, 2]}, "b": 2}"#;
        assert_eq!(without_key(first), br#"{"b": 2}"#);
        assert_eq!(without_key(br#"{"dfloat11_config": 1}"#), b"{}");
        // Repeated keys, which JSON readers accept.
        for (text, removed) in [
            (r#"{"K": 1, "K": 2, "b": 3}"#, r#"{"b": 3}"#),
            (r#"{"a": 0, "K": 1, "K": 2, "b": 3}"#, r#"{"a": 0, "b": 3}"#),
            (r#"{"K": 1, "a": 0, "K": 2}"#, r#"{"a": 0}"#),
            (r#"{"K": 1, "K": 2}"#, "{}"),
        ] {
            assert_eq!(without_key(text.replace('K', KEY).as_bytes()), removed.as_bytes());
        }
    }

    #[test]
    fn malformed_objects_are_rejected_at_the_right_byte() {
        for (text, at) in [
            ("", 0),
            ("[]", 0),
            ("\u{feff}{}", 0),
            ("{", 1),
            ("{\"a\"", 4),
            ("{\"a\":}", 5),
            ("{\"a\":1", 6),
            ("{\"a\":1}}", 7),
            ("{\"a\":1,}", 7),
            ("{a:1}", 1),
            ("{\"a\\", 4),
            ("{\"a\":]}", 5),
            ("{\"a\": 1 \"b\": 2}", 8),
            ("{\"a\": 1\"b\": 2}", 7),
            ("{\"a\": {} []}", 9),
            ("{\"a\": [1, 2}, \"b\": 2}", 11),
            ("{\"a\": 1:2}", 7),
            ("{\"a\": \"b}", 9),
            ("{} {", 3),
        ] {
            assert_eq!(members(text.as_bytes()), Err(at), "{text}");
        }
        let deep = format!("{{\"a\":{}", "[".repeat(1000));
        assert_eq!(members(deep.as_bytes()), Err(6 + DEPTH_MAX));
    }

    #[test]
    fn invalid_configs_are_explained() {
        let many: Vec<String> = (0..=PATTERNS_MAX).map(|i| format!("\"{i}\": []")).collect();
        let with_patterns = |patterns: &str| {
            format!(r#"{{"threads_per_block": 512, "bytes_per_thread": 8, "pattern_dict": {{{patterns}}}}}"#)
        };
        for (value, word) in [
            (with_patterns(&many.join(",")).as_str(), "257 patterns, above the limit of 256"),
            // The compiled pattern has megabytes.
            (with_patterns(r#""\\w{100}x": []"#).as_str(), "size limit"),
            ("1", "dfloat11_config, byte 20: invalid type"),
            ("{\"threads_per_block\": [512],\n \"bytes_per_thread\" 8}", "dfloat11_config, byte 69: expected `:`"),
            (r#"{"threads_per_block": 0, "bytes_per_thread": 8, "pattern_dict": {}}"#, "threads_per_block is 0; 1 to"),
            (r#"{"threads_per_block": [5000], "bytes_per_thread": 8, "pattern_dict": {}}"#, "is 5000; 1 to 1024"),
            (r#"{"threads_per_block": [512], "bytes_per_thread": 4, "pattern_dict": {}}"#, "bytes_per_thread is 4"),
            (r#"{"threads_per_block": "512", "bytes_per_thread": 8, "pattern_dict": {}}"#, "is neither a number"),
            (r#"{"threads_per_block": [16, 32], "bytes_per_thread": 8, "pattern_dict": {}}"#, "2 extents"),
            (r#"{"threads_per_block": 512, "bytes_per_thread": 8, "pattern_dict": {"(": []}}"#, "pattern '('"),
        ] {
            let text = format!("{{\"dfloat11_config\": {value}}}");
            let error = Config::parse(Path::new("config.json"), text.as_bytes()).unwrap_err().to_string();
            assert!(error.starts_with("config.json: ") && error.contains(word), "{error}");
        }
        assert!(Config::parse(Path::new("c"), b"{\"hidden_size\": 4}").unwrap().is_none());
    }

    #[test]
    fn numbers_are_read_from_the_language_model_config() {
        let text = br#"{"x": NaN, "text_config": {"hidden_size": 64}, "vocab_size": 0}"#;
        assert_eq!(number(text, &["hidden_size", "d_model"]), Some(64));
        assert_eq!(number(text, &["vocab_size"]), None);
    }
}
