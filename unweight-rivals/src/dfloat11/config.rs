//! `config.json`: the key `dfloat11_config` read, put in, and taken out again. Every other byte stays as it is.

use std::{ops::Range, path::Path};

use regex::Regex;
use serde::Deserialize;

use super::{ConvertError, THREADS, WINDOW_BYTES};

/// Name of the file.
pub(super) const FILE_NAME: &str = "config.json";
/// Largest one, bytes.
pub(super) const BYTES_MAX: u64 = 16 << 20;
/// The package's key.
const KEY: &str = "dfloat11_config";
/// Most nesting that is followed.
const DEPTH_MAX: usize = 128;

/// Which modules have their weights in a unit, and how units are cut.
#[derive(Debug)]
pub(super) struct Config {
    /// Threads a block.
    pub(super) threads: u64,
    /// Names of modules, and the modules below them whose weights are in the unit; none for the module's own.
    pub(super) patterns: Vec<(Regex, Vec<String>)>,
}

/// The key's value as the package writes it.
#[derive(Deserialize)]
struct Stored {
    threads_per_block: OneOrMore,
    bytes_per_thread: u64,
    pattern_dict: Patterns,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "threads_per_block is no number, and no list of numbers")]
enum OneOrMore {
    One(u64),
    More(Vec<u64>),
}

/// Patterns in their order, which decides.
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
    /// Reads the key; `None` if the object does not have it.
    pub(super) fn parse(path: &Path, text: &[u8]) -> Result<Option<Self>, ConvertError> {
        let fail = |reason: String| ConvertError::Config { path: path.into(), reason };
        let Some(value) = member(text, KEY) else { return Ok(None) };
        let stored: Stored =
            serde_json::from_slice(value).map_err(|error| fail(format!("{KEY}: {error}; fetch the model again")))?;
        let threads = match stored.threads_per_block {
            OneOrMore::One(threads) => threads,
            OneOrMore::More(threads) => match threads[..] {
                [threads] => threads,
                _ => return Err(fail(format!("{KEY}: threads_per_block has {} extents; one is known", threads.len()))),
            },
        };
        if stored.bytes_per_thread != WINDOW_BYTES as u64 {
            let got = stored.bytes_per_thread;
            return Err(fail(format!("{KEY}: bytes_per_thread is {got}; only {WINDOW_BYTES} is known")));
        }
        let patterns = stored.pattern_dict.0.into_iter().map(|(pattern, modules)| {
            let whole = Regex::new(&format!(r"\A(?:{pattern})\z"));
            let whole =
                whole.map_err(|error| fail(format!("{KEY}: the pattern '{pattern}' is not understood: {error}")));
            whole.map(|whole| (whole, modules))
        });
        Ok(Some(Self { threads, patterns: patterns.collect::<Result<_, _>>()? }))
    }

    /// The names of the weights of a unit; `None` if no pattern has it.
    pub(super) fn weights(&self, unit: &str) -> Option<Vec<String>> {
        let (_, modules) = self.patterns.iter().find(|(pattern, _)| pattern.is_match(unit))?;
        Some(match modules[..] {
            [] => vec![format!("{unit}.weight")],
            _ => modules.iter().map(|module| format!("{unit}.{module}.weight")).collect(),
        })
    }
}

/// A number of the object, or of the object of its language model.
pub(super) fn number(text: &[u8], keys: &[&str]) -> Option<u64> {
    let of = |text: &[u8]| {
        keys.iter().find_map(|key| serde_json::from_slice::<u64>(member(text, key)?).ok()).filter(|&number| number > 0)
    };
    of(text).or_else(|| of(member(text, "text_config")?))
}

/// Whether the object has the key.
pub(super) fn has_key(text: &[u8]) -> bool {
    member(text, KEY).is_some()
}

/// The text with the key at its end.
pub(super) fn with_key(text: &[u8], patterns: &[(String, Vec<String>)]) -> Option<Vec<u8>> {
    let members = members(text)?;
    let close = text.iter().rposition(|&byte| byte == b'}')?;
    let end = members
        .last()
        .map_or_else(|| text.iter().position(|&byte| byte == b'{').map(|at| at + 1), |m| Some(m.2.end))?;
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
    // Where the object ended on the line of its last value, or of its brace.
    let gap = if text[end..close].is_empty() { &b"\n"[..] } else { b"" };
    Some([&text[..end], value.as_bytes(), gap, &text[end..]].concat())
}

/// The text without the key.
pub(super) fn without_key(text: &[u8]) -> Option<Vec<u8>> {
    let all = members(text)?;
    let mut kept = Vec::new();
    let mut from = 0;
    for (index, (name, key, value)) in all.iter().enumerate() {
        if name != KEY {
            continue;
        }
        // With the comma before it; of the first ones, with that behind it.
        let (start, end) = match all[..index].iter().rfind(|(before, ..)| before != KEY) {
            Some((_, _, before)) => (before.end, value.end),
            None => (key.start, all.get(index + 1).map_or(value.end, |(_, next, _)| next.start)),
        };
        kept.extend_from_slice(&text[from.min(start)..start]);
        from = end;
    }
    kept.extend_from_slice(&text[from..]);
    Some(kept)
}

/// The value of a key of an object; of a key that is there twice, readers take the last.
fn member<'a>(text: &'a [u8], key: &str) -> Option<&'a [u8]> {
    let members = members(text)?;
    members.into_iter().rfind(|(name, ..)| name == key).map(|(.., value)| &text[value])
}

/// Name, place of the name and place of the value.
type Member = (String, Range<usize>, Range<usize>);

/// The members of an object; `None` if it is none. Values are only passed over: Python
/// writes some that are no JSON.
fn members(text: &[u8]) -> Option<Vec<Member>> {
    let skip = |mut at: usize| {
        while text.get(at).is_some_and(u8::is_ascii_whitespace) {
            at += 1;
        }
        at
    };
    let string = |at: usize| {
        let mut end = at + 1;
        loop {
            match text.get(end)? {
                b'"' => return Some(end + 1),
                b'\\' => end += 2,
                _ => end += 1,
            }
        }
    };
    let mut at = skip(0);
    if text.get(at) != Some(&b'{') {
        return None;
    }
    let mut found = Vec::new();
    at = skip(at + 1);
    if text.get(at) == Some(&b'}') {
        return (skip(at + 1) == text.len()).then_some(found);
    }
    loop {
        if text.get(at) != Some(&b'"') {
            return None;
        }
        let key = at..string(at)?;
        let name: String = serde_json::from_slice(text.get(key.clone())?).ok()?;
        at = skip(key.end);
        if text.get(at) != Some(&b':') {
            return None;
        }
        let start = skip(at + 1);
        let (mut open, mut end) = (0usize, start);
        at = start;
        loop {
            match text.get(at)? {
                b'"' => at = string(at)? - 1,
                b'{' | b'[' => open += 1,
                b'}' | b',' if open == 0 => break,
                b'}' | b']' => open = open.checked_sub(1)?,
                _ => {}
            }
            if open > DEPTH_MAX {
                return None;
            }
            if !text[at].is_ascii_whitespace() {
                end = at + 1;
            }
            at += 1;
        }
        if end == start {
            return None;
        }
        found.push((name, key, start..end));
        if text[at] == b'}' {
            return (skip(at + 1) == text.len()).then_some(found);
        }
        at = skip(at + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_comes_and_goes_and_every_other_byte_stays() {
        let patterns = [("lm_head".to_owned(), vec![]), (r"model\.layers\.\d+".to_owned(), vec!["mlp.up_proj".into()])];
        for text in [
            "{}",
            "{\n}\n",
            r#"{"a": 1}"#,
            "{\n  \"a\": \"}\\\"{\",\n  \"b\": [1, {\"c\": NaN}]\n}\n",
            " {\"limit\": -Infinity , \"a\": {} } ",
        ] {
            let with = with_key(text.as_bytes(), &patterns).unwrap();
            let config = Config::parse(Path::new("c"), &with).unwrap().unwrap();
            assert_eq!(config.threads, 512);
            assert_eq!(config.weights("model.layers.12").unwrap(), ["model.layers.12.mlp.up_proj.weight"]);
            assert_eq!(config.weights("lm_head").unwrap(), ["lm_head.weight"]);
            assert_eq!(config.weights("model.layers.x"), None);
            assert_eq!(config.weights("xlm_head"), None);
            let without = String::from_utf8(without_key(&with).unwrap()).unwrap();
            assert_eq!(
                without.trim_end().trim_end_matches('}').trim_end(),
                text.trim_end().trim_end_matches('}').trim_end()
            );
            if !text.contains("NaN") && !text.contains("Infinity") {
                let value = |text: &[u8]| serde_json::from_slice::<serde_json::Value>(text).unwrap();
                assert_eq!(value(&with)["dfloat11_config"]["pattern_dict"]["lm_head"], serde_json::json!([]));
                assert_eq!(value(without.as_bytes()), value(text.as_bytes()));
            }
        }
        let first = br#"{"dfloat11_config": {"a": [1, 2]}, "b": 2}"#;
        assert_eq!(without_key(first).unwrap(), br#"{"b": 2}"#);
        assert_eq!(without_key(br#"{"dfloat11_config": 1}"#).unwrap(), b"{}");
        // More than once, which readers of JSON take.
        for (text, without) in [
            (r#"{"K": 1, "K": 2, "b": 3}"#, r#"{"b": 3}"#),
            (r#"{"a": 0, "K": 1, "K": 2, "b": 3}"#, r#"{"a": 0, "b": 3}"#),
            (r#"{"K": 1, "a": 0, "K": 2}"#, r#"{"a": 0}"#),
            (r#"{"K": 1, "K": 2}"#, "{}"),
        ] {
            assert_eq!(without_key(text.replace('K', KEY).as_bytes()).unwrap(), without.as_bytes());
        }
    }

    #[test]
    fn what_is_no_object_has_no_members() {
        for text in [
            "",
            "[]",
            "{",
            "{\"a\"",
            "{\"a\":}",
            "{\"a\":1",
            "{\"a\":1}}",
            "{\"a\":1,}",
            "{a:1}",
            "{\"a\\",
            "{\"a\":]}",
        ] {
            assert_eq!(members(text.as_bytes()), None, "{text}");
        }
        let deep = format!("{{\"a\":{}", "[".repeat(1000));
        assert_eq!(members(deep.as_bytes()), None);
    }

    #[test]
    fn a_configuration_that_is_not_understood_says_why() {
        for (value, word) in [
            ("1", "invalid type"),
            (r#"{"threads_per_block": [512], "bytes_per_thread": 4, "pattern_dict": {}}"#, "bytes_per_thread is 4"),
            (r#"{"threads_per_block": "512", "bytes_per_thread": 8, "pattern_dict": {}}"#, "is no number"),
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
    fn numbers_may_be_those_of_the_language_model() {
        let text = br#"{"x": NaN, "text_config": {"hidden_size": 64}, "vocab_size": 0}"#;
        assert_eq!(number(text, &["hidden_size", "d_model"]), Some(64));
        assert_eq!(number(text, &["vocab_size"]), None);
    }
}
