//! The `config.json` of a bundle: the source's file with two more keys, so that a program that loads weights by it
//! either finds a reader of bundles or fails (`docs/format.md` B.9).
//!
//! Stock readers look up weights by name. A bundle contains none of these names, and some readers initialise missing
//! weights randomly.

use std::{borrow::Cow, collections::HashMap, fs::File, io::Read, ops::Range, path::Path};

use serde::de::IgnoredAny;

use crate::{
    Digest,
    bundle::{BundleError, manifest},
};

/// The name of the file, in any directory with weights.
pub(crate) const FILE_NAME: &str = "config.json";
/// Maximum size of a file that gets the keys, in bytes.
const BYTES_MAX: u64 = 16 << 20;
/// The key by which readers choose a decoder.
const METHOD_KEY: &str = "quantization_config";
/// The key for the file with the weights. Readers that do not know bundles refuse one that is not a safetensors file.
const WEIGHTS_KEY: &str = "transformers_weights";

/// Whether this is the name of a `config.json`.
pub(crate) fn is_config(name: &str) -> bool {
    name.rsplit('/').next() == Some(FILE_NAME)
}

/// Checks the size of a `config.json`. The error is the reason why it does not get the keys.
pub(crate) fn check_bytes(bytes: u64) -> Result<(), &'static str> {
    if bytes > BYTES_MAX { Err("it is larger than 16 MiB") } else { Ok(()) }
}

/// Checks whether a `config.json` can get the keys. The error is the reason why it cannot.
pub(crate) fn check(text: &[u8]) -> Result<(), &'static str> {
    let object_error = "it is not a JSON object";
    std::str::from_utf8(text).map_err(|_| object_error)?;
    let _: HashMap<String, IgnoredAny> = serde_json::from_slice(&strict(text)).map_err(|_| object_error)?;
    if matches!(last(text, WEIGHTS_KEY), Some((_, false))) {
        return Err("it already has the key transformers_weights");
    }
    Ok(())
}

/// Refuses a `config.json` that names the weights of another bundle: with the files of two downloads in one directory,
/// a model would be built from one and filled from the other. Accepts a file that is missing, unreadable or names no
/// weights, because weights do not need it.
pub(crate) fn check_names(path: &Path, weights: Digest) -> Result<(), BundleError> {
    // Opening a pipe would block.
    if !path.is_file() {
        return Ok(());
    }
    let mut text = Vec::new();
    let read = File::open(path).and_then(|file| file.take(BYTES_MAX + 1).read_to_end(&mut text));
    if read.is_err() || check_bytes(text.len() as u64).is_err() {
        return Ok(());
    }
    match last(&text, METHOD_KEY).and_then(|(range, _)| named(&text[range])) {
        Some(Some(got)) if got != weights.to_string() => {
            Err(BundleError::OtherConfig { path: path.into(), expected: weights, got })
        }
        _ => Ok(()),
    }
}

/// The weights that a `quantization_config` of ours names; the outer `None` if it is not ours.
fn named(method: &[u8]) -> Option<Option<String>> {
    let method: serde_json::Value = serde_json::from_slice(&strict(method)).ok()?;
    (method["quant_method"] == manifest::FORMAT).then(|| method["weights_digest"].as_str().map(str::to_owned))
}

/// Inserts the two keys into a [`check`]ed text; all other bytes stay. A key whose value is `null` gets the value;
/// missing keys follow the opening brace. A `quantization_config` of another method stays, because only one method can
/// be named. One of ours, saved from another bundle, gets the value, too.
pub(crate) fn with_keys(text: &[u8], weights: Digest) -> Vec<u8> {
    let method = format!(r#"{{"quant_method": "{}", "weights_digest": "{weights}"}}"#, manifest::FORMAT);
    let file = format!(r#""{}""#, manifest::FILE_NAME);
    let (mut replaced, mut missing) = (Vec::new(), Vec::new());
    for (key, value) in [(METHOD_KEY, method), (WEIGHTS_KEY, file)] {
        match last(text, key) {
            None => missing.push(format!(r#""{key}": {value}"#)),
            Some((range, is_null)) if is_null || key == METHOD_KEY && named(&text[range.clone()]).is_some() => {
                replaced.push((range, value));
            }
            Some(_) => {}
        }
    }
    replaced.sort_by_key(|(range, _)| range.start);
    let at = text.iter().position(|&byte| byte == b'{').map_or(0, |brace| brace + 1);
    let gap = text[at..].iter().position(|byte| !byte.is_ascii_whitespace()).unwrap_or(text.len() - at);
    // An empty object needs no comma, and no whitespace of following keys to copy.
    let is_empty = text.get(at + gap) == Some(&b'}');
    let gap = if is_empty { &b""[..] } else { &text[at..at + gap] };
    let mut marked = text[..at].to_vec();
    for (index, key) in missing.iter().enumerate() {
        let comma = if is_empty && index + 1 == missing.len() { "" } else { "," };
        marked.extend([gap, key.as_bytes(), comma.as_bytes()].concat());
    }
    let mut from = at;
    for (range, value) in replaced {
        marked.extend([&text[from..range.start], value.as_bytes()].concat());
        from = range.end;
    }
    marked.extend(&text[from..]);
    marked
}

/// The range of the value of a top-level key, and whether it is `null`. Of duplicate keys the last counts, as in
/// readers.
fn last(text: &[u8], key: &str) -> Option<(Range<usize>, bool)> {
    let plain = strict(text);
    let mut found = None;
    let mut at = plain.iter().position(|&byte| byte == b'{')? + 1;
    while let Some(quote) = plain[at..].iter().position(|&byte| byte == b'"') {
        let name = at + quote..string_end(&plain, at + quote);
        let colon = name.end + plain[name.end..].iter().position(|&byte| byte == b':')?;
        let start = colon + 1 + plain[colon + 1..].iter().position(|byte| !byte.is_ascii_whitespace())?;
        at = value_end(&plain, start);
        if serde_json::from_slice::<String>(&plain[name]).is_ok_and(|name| name == key) {
            let is_null = plain[start..at].trim_ascii_end() == b"null";
            found = Some((start..start + plain[start..at].trim_ascii_end().len(), is_null));
        }
    }
    found
}

/// The position after the closing quote of the string that starts at `start`.
fn string_end(text: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while at < text.len() {
        match text[at] {
            b'"' => return at + 1,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
    text.len()
}

/// The position of the comma or brace after the value that starts at `start`.
fn value_end(text: &[u8], start: usize) -> usize {
    let (mut at, mut depth) = (start, 0_usize);
    while at < text.len() {
        match text[at] {
            b'"' => {
                at = string_end(text, at);
                continue;
            }
            b'{' | b'[' => depth += 1,
            b',' | b'}' | b']' if depth == 0 => return at,
            b'}' | b']' => depth -= 1,
            _ => {}
        }
        at += 1;
    }
    text.len()
}

/// Replaces `NaN` and `Infinity`, which Python writes but which are not JSON, by plain numbers of the same length.
fn strict(text: &[u8]) -> Cow<'_, [u8]> {
    let mut plain = Cow::Borrowed(text);
    let (mut at, mut in_string) = (0, false);
    while at < text.len() {
        // The start of a value, not the end of another.
        let begins =
            !in_string && (at == 0 || !matches!(text[at - 1], b'0'..=b'9' | b'A'..=b'Z' | b'a'..=b'z' | b'.' | b'+'));
        let word = [&b"NaN"[..], b"Infinity"].into_iter().find(|word| begins && text[at..].starts_with(word));
        match (text[at], word) {
            (_, Some(word)) => {
                plain.to_mut()[at..at + word.len()].fill(b' ');
                plain.to_mut()[at] = b'0';
                at += word.len();
                continue;
            }
            (b'\\', _) if in_string => at += 1,
            (b'"', _) => in_string = !in_string,
            _ => {}
        }
        at += 1;
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: &str = r#""quantization_config": {"quant_method": "unweight", "weights_digest": "D"},"#;

    fn marked(text: &str) -> String {
        assert_eq!(check(text.as_bytes()), Ok(()), "{text}");
        let digest = Digest::of(b"weights");
        let marked = String::from_utf8(with_keys(text.as_bytes(), digest)).unwrap();
        marked.replace(&digest.to_string(), "D")
    }

    #[test]
    fn keys_stand_first_and_the_rest_stays() {
        let file = r#""transformers_weights": "unweight.json""#;
        for (text, expected) in [
            ("{}", format!("{{{OWN}{file}}}")),
            (" {\n }\n", format!(" {{{OWN}{file}\n }}\n")),
            (r#"{"b": 1.0e5, "a": 1}"#, format!(r#"{{{OWN}{file},"b": 1.0e5, "a": 1}}"#)),
            ("{\n  \"a\": 1\n}\n", format!("{{\n  {OWN}\n  {file},\n  \"a\": 1\n}}\n")),
            ("\r\n{\r\n\t\"a\": {}}", format!("\r\n{{\r\n\t{OWN}\r\n\t{file},\r\n\t\"a\": {{}}}}")),
        ] {
            assert_eq!(marked(text), expected);
            let value: serde_json::Value = serde_json::from_str(&marked(text)).unwrap();
            assert_eq!(
                (&value["quantization_config"]["weights_digest"], &value["transformers_weights"]),
                (&"D".into(), &"unweight.json".into())
            );
            let mut rest = value.as_object().unwrap().clone();
            rest.retain(|key, _| key != METHOD_KEY && key != WEIGHTS_KEY);
            assert_eq!(serde_json::Value::from(rest), serde_json::from_str::<serde_json::Value>(text).unwrap());
        }
        // What Python writes for numbers that JSON cannot represent.
        let text = r#"{"limit": [0.0, Infinity, -Infinity], "NaN": "a \" NaN \\", "x": NaN}"#;
        assert!(marked(text).ends_with(&text[1..]));
        assert_eq!(strict(text.as_bytes()).len(), text.len());
        let plain: serde_json::Value = serde_json::from_slice(&strict(text.as_bytes())).unwrap();
        assert_eq!(plain, serde_json::json!({ "limit": [0.0, 0, -0.0], "NaN": "a \" NaN \\", "x": 0 }));
    }

    #[test]
    fn a_key_without_a_value_gets_one_and_a_method_of_its_own_stays() {
        let (method, file) =
            (r#"{"quant_method": "unweight", "weights_digest": "D"}"#, r#""transformers_weights": "unweight.json""#);
        for (text, expected) in [
            (
                "{\n  \"a\": [1, {\"quantization_config\": null}],\n  \"quantization_config\" : null\n}",
                format!(
                    "{{\n  {file},\n  \"a\": [1, {{\"quantization_config\": null}}],\n  \
                     \"quantization_config\" : {method}\n}}"
                ),
            ),
            (r#"{"quantization\u005fconfig":null}"#, format!(r#"{{{file},"quantization\u005fconfig":{method}}}"#)),
            (
                r#"{"b": "}\",null", "transformers_weights": null, "quantization_config": null, "c": NaN}"#,
                format!(r#"{{"b": "}}\",null", {file}, "quantization_config": {method}, "c": NaN}}"#),
            ),
            (
                r#"{"quantization_config": {"quant_method": "fp8"}, "quantization_config": null}"#,
                format!(
                    r#"{{{file},"quantization_config": {{"quant_method": "fp8"}}, "quantization_config": {method}}}"#
                ),
            ),
            (
                r#"{"quantization_config": {"weights_digest": "of another", "quant_method": "unweight"}, "c": NaN}"#,
                format!(r#"{{{file},"quantization_config": {method}, "c": NaN}}"#),
            ),
            (
                r#"{"quantization_config": null, "quantization_config": {"quant_method": "fp8"}}"#,
                format!(r#"{{{file},"quantization_config": null, "quantization_config": {{"quant_method": "fp8"}}}}"#),
            ),
        ] {
            assert_eq!(marked(text), expected);
            let value: serde_json::Value = serde_json::from_str(&expected.replace("NaN", "0")).unwrap();
            assert_eq!(value["transformers_weights"], "unweight.json");
            let is_fp8 = text.ends_with("\"fp8\"}}");
            assert_eq!(value["quantization_config"]["quant_method"], if is_fp8 { "fp8" } else { "unweight" });
        }
    }

    #[test]
    fn unmarked_configs_have_a_reason() {
        let object_error = "it is not a JSON object";
        for (text, reason) in [
            ("", object_error),
            ("[]", object_error),
            ("{\"a\": 1", object_error),
            ("{\"a\": 1} {}", object_error),
            ("\u{feff}{}", object_error),
            ("\"{\"", object_error),
            ("{\"a\": NaN NaN}", object_error),
            ("{\"a\": 1NaN}", object_error),
            ("{\"a\": 1.Infinity}", object_error),
            ("{\"a\": \"\\", object_error),
            (r#"{"transformers_weights": "x"}"#, "it already has the key transformers_weights"),
            (
                r#"{"transformers_weights": null, "transformers\u005fweights": ""}"#,
                "it already has the key transformers_weights",
            ),
        ] {
            assert_eq!(check(text.as_bytes()), Err(reason), "{text}");
        }
        assert_eq!(check(b"{\"\xff\": 1}"), Err(object_error));
        assert_eq!(check(b"{\"a\": \"\xff\"}"), Err(object_error));
        assert_eq!(
            check(br#"{"text_config": {"quantization_config": {}}}"#),
            Ok(()),
            "only the object's own keys count"
        );
        assert!(check_bytes(16 << 20).is_ok() && check_bytes((16 << 20) + 1).is_err());
        assert!(is_config("config.json") && is_config("a/config.json"));
        assert!(!is_config("generation_config.json") && !is_config("config.json/a"));
    }
}
