//! Finds tool calls in the text of an answer while it is generated.

use serde_json::Value;

use crate::text::ToolFormat;

/// The texts that mark tool calls.
pub(super) const OPEN: &str = "<tool_call>";
pub(super) const CLOSE: &str = "</tool_call>";
pub(super) const LIST: &str = "[TOOL_CALLS]";
const PYTHON: &str = "<|python_tag|>";
/// Special tokens with these texts are read as text.
pub(super) const MARKS: [&str; 4] = [OPEN, CLOSE, LIST, PYTHON];

/// A tool call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ToolCall {
    /// Index of the call in the answer.
    pub index: usize,
    pub id: String,
    pub name: String,
    /// A JSON object.
    pub arguments: String,
}

/// An incremental parser for tool calls.
#[derive(Debug)]
pub(super) struct Calls {
    format: ToolFormat,
    /// Names of the functions that may be called.
    names: Vec<String>,
    /// Prefix of the calls' identifiers.
    id: String,
    /// Text that may be a call, or the start of its mark.
    held: String,
    /// Whether `held` follows the opening mark of a call.
    inside: bool,
    /// Length of the prefix of `held` in which no closing mark starts, bytes.
    searched: usize,
    /// Whether the text has started with something other than a call.
    is_text: bool,
    /// Whether only white space has followed the last call.
    behind_call: bool,
    /// The number of calls so far.
    pub count: usize,
}

impl Calls {
    /// Creates a parser for a format. `id` is the prefix of the calls' identifiers.
    pub fn new(format: ToolFormat, names: Vec<String>, id: String) -> Self {
        Self {
            format,
            names,
            id,
            held: String::new(),
            inside: false,
            searched: 0,
            is_text: false,
            behind_call: false,
            count: 0,
        }
    }

    /// Adds a piece of the text. Returns the text outside of calls, and complete calls.
    pub fn push(&mut self, piece: &str) -> (String, Vec<ToolCall>) {
        self.held += piece;
        match self.format {
            ToolFormat::Hermes => self.hermes(),
            ToolFormat::Mistral => (self.before(LIST), Vec::new()),
            ToolFormat::Llama => (self.llama(), Vec::new()),
        }
    }

    /// Ends the text. Returns the remaining text and calls.
    pub fn finish(&mut self) -> (String, Vec<ToolCall>) {
        let held = std::mem::take(&mut self.held);
        let found = match self.format {
            ToolFormat::Hermes | ToolFormat::Mistral if !self.inside => None,
            ToolFormat::Hermes => one(&held).map(|call| vec![call]),
            ToolFormat::Mistral => {
                let list: Option<Vec<Value>> = serde_json::from_str(held.trim()).ok();
                list.and_then(|list| list.iter().map(call).collect())
            }
            ToolFormat::Llama if self.is_text => None,
            ToolFormat::Llama => self.objects(&held),
        };
        let mark = match (self.inside, self.format) {
            (true, ToolFormat::Hermes) => OPEN,
            (true, ToolFormat::Mistral) => LIST,
            _ => "",
        };
        match found.filter(|found| !found.is_empty()) {
            Some(found) => (String::new(), found.into_iter().map(|found| self.numbered(found)).collect()),
            None => (format!("{mark}{held}"), Vec::new()),
        }
    }

    fn hermes(&mut self) -> (String, Vec<ToolCall>) {
        let (mut shown, mut calls) = (String::new(), Vec::new());
        loop {
            let before = self.before(OPEN);
            // White space after a call is dropped.
            let before = if self.behind_call { before.trim_start() } else { &before };
            self.behind_call &= before.is_empty();
            shown += before;
            let Some(end) = self.end() else { return (shown, calls) };
            let body = self.held[..end].to_owned();
            self.held.drain(..end + CLOSE.len());
            self.inside = false;
            match one(&body) {
                Some(found) => {
                    calls.push(self.numbered(found));
                    self.behind_call = true;
                }
                None => shown += &format!("{OPEN}{body}{CLOSE}"),
            }
        }
    }

    /// Returns the position of the closing mark in `held`.
    fn end(&mut self) -> Option<usize> {
        if !self.inside {
            return None;
        }
        let found = self.held[self.searched..].find(CLOSE).map(|at| self.searched + at);
        // Each byte is searched once, however long a call is.
        let searched = self.held.len().saturating_sub(CLOSE.len());
        let rest = (0..=searched).rev().find(|at| self.held.is_char_boundary(*at)).unwrap_or(0);
        self.searched = if found.is_some() { 0 } else { rest };
        found
    }

    /// Returns the text before a mark, and holds what follows the mark.
    fn before(&mut self, mark: &str) -> String {
        if self.inside {
            return String::new();
        }
        if let Some(at) = self.held.find(mark) {
            let rest = self.held.split_off(at + mark.len());
            self.held.truncate(at);
            self.inside = true;
            return std::mem::replace(&mut self.held, rest);
        }
        // Hold back text that may be the start of the mark.
        let open =
            (0..self.held.len()).find(|&at| self.held.is_char_boundary(at) && mark.starts_with(&self.held[at..]));
        let rest = self.held.split_off(open.unwrap_or(self.held.len()));
        std::mem::replace(&mut self.held, rest)
    }

    /// Holds a text that starts like a call until its end.
    fn llama(&mut self) -> String {
        let begun = self.held.trim_start();
        let may_be =
            begun.is_empty() || begun.starts_with('{') || begun.starts_with(PYTHON) || PYTHON.starts_with(begun);
        self.is_text |= !may_be;
        if self.is_text { std::mem::take(&mut self.held) } else { String::new() }
    }

    /// Parses calls of known functions, separated by semicolons.
    fn objects(&self, text: &str) -> Option<Vec<(String, String)>> {
        let text = text.trim_start();
        let mut rest = text.strip_prefix(PYTHON).unwrap_or(text).trim();
        let mut found = Vec::new();
        while !rest.is_empty() {
            let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
            let own = call(&values.next()?.ok()?).filter(|(name, _)| self.names.contains(name))?;
            found.push(own);
            rest = rest[values.byte_offset()..].trim_start();
            rest = rest.strip_prefix(';').unwrap_or(rest).trim_start();
        }
        Some(found)
    }

    fn numbered(&mut self, (name, arguments): (String, String)) -> ToolCall {
        let index = self.count;
        self.count += 1;
        ToolCall { index, id: format!("{}{index}", self.id), name, arguments }
    }
}

/// Parses the name and arguments of a call.
fn one(text: &str) -> Option<(String, String)> {
    call(&serde_json::from_str(text.trim()).ok()?)
}

fn call(value: &Value) -> Option<(String, String)> {
    let name = value["name"].as_str()?.to_owned();
    let arguments = match (&value["arguments"], &value["parameters"]) {
        (Value::Null, Value::Null) => "{}".to_owned(),
        (Value::Object(_), _) => value["arguments"].to_string(),
        // Some models write the arguments as a JSON string.
        (Value::String(text), _) => text.clone(),
        (Value::Null, Value::Object(_)) => value["parameters"].to_string(),
        _ => return None,
    };
    Some((name, arguments))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parses a text in pieces of `size` characters. Returns the text and the calls.
    fn parsed(format: ToolFormat, text: &str, size: usize) -> (String, Vec<(usize, String, String)>) {
        let mut own = Calls::new(format, vec!["f".into(), "g".into()], "call_".into());
        let chars: Vec<char> = text.chars().collect();
        let (mut shown, mut calls) = (String::new(), Vec::new());
        for piece in chars.chunks(size) {
            let (more, found) = own.push(&piece.iter().collect::<String>());
            shown += &more;
            calls.extend(found);
        }
        let (more, found) = own.finish();
        calls.extend(found);
        assert_eq!(own.count, calls.len());
        let calls = calls.into_iter().map(|call| (call.index, call.name, call.arguments));
        (shown + &more, calls.collect())
    }

    #[test]
    fn calls_are_found_however_the_text_is_cut() {
        use ToolFormat::{Hermes, Llama, Mistral};
        let f = |index| (index, "f".to_owned(), r#"{"a":1}"#.to_owned());
        let g = |index| (index, "g".to_owned(), "{}".to_owned());
        for (format, text, shown, calls) in [
            (Hermes, "a < b <tool", "a < b <tool", vec![]),
            (Hermes, "hi\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>", "hi\n", vec![f(0)]),
            (
                Hermes,
                "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}</tool_call>\n<tool_call>{\"name\": \"g\"}</tool_call>",
                "",
                vec![f(0), g(1)],
            ),
            (Hermes, "<tool_call>{\"name\": \"g\", \"arguments\": {}}", "", vec![g(0)]),
            (Hermes, "<tool_call>{\"name\": \"g\", ", "<tool_call>{\"name\": \"g\", ", vec![]),
            (Hermes, "<tool_call>{\"name\": \"g\"}</tool_call>\n\n a b ", "a b ", vec![g(0)]),
            (Hermes, "<tool_call>no</tool_call>!", "<tool_call>no</tool_call>!", vec![]),
            (
                Mistral,
                "well [TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\": 1}}, {\"name\": \"g\"}]",
                "well ",
                vec![f(0), g(1)],
            ),
            (Mistral, "[TOOL_CALLS] [{\"name\"", "[TOOL_CALLS] [{\"name\"", vec![]),
            (Mistral, "[TOOL \u{e9}", "[TOOL \u{e9}", vec![]),
            (Llama, "{\"name\": \"f\", \"parameters\": {\"a\": 1}}", "", vec![f(0)]),
            (
                Llama,
                "<|python_tag|>{\"name\": \"f\", \"parameters\": {\"a\": 1}}; {\"name\": \"g\"}",
                "",
                vec![f(0), g(1)],
            ),
            (Llama, "{\"name\": \"other\", \"parameters\": {}}", "{\"name\": \"other\", \"parameters\": {}}", vec![]),
            (Llama, "{\"answer\": 1}", "{\"answer\": 1}", vec![]),
            (Llama, " plain {\"name\": \"f\"}", " plain {\"name\": \"f\"}", vec![]),
        ] {
            for size in [1, 2, 3, 7, 1000] {
                assert_eq!(parsed(format, text, size), (shown.to_owned(), calls.clone()), "{text} by {size}");
            }
        }
    }
}
