//! Finds tool calls in the text of an answer while it is generated.

use std::sync::Arc;

use serde_json::Value;

use crate::text::ToolFormat;

/// The texts that mark tool calls.
pub(super) const OPEN: &str = "<tool_call>";
pub(super) const CLOSE: &str = "</tool_call>";
pub(super) const LIST: &str = "[TOOL_CALLS]";
pub(super) const ARGS: &str = "[ARGS]";
const CALL_ID: &str = "[CALL_ID]";
const PYTHON: &str = "<|python_tag|>";
/// Special tokens with these texts are decoded as text.
pub(super) const MARKS: [&str; 6] = [OPEN, CLOSE, LIST, ARGS, CALL_ID, PYTHON];

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

/// A parser of tool calls in a text that arrives in pieces.
#[derive(Debug)]
pub(super) struct ToolCalls {
    format: ToolFormat,
    /// The functions that may be called: name and JSON schema of the arguments.
    functions: Arc<[(String, Value)]>,
    /// The prefix of the ids of calls.
    id: String,
    /// Text that is part of a call, or may turn out to be.
    held: String,
    /// Whether `held` follows the mark that opens a call.
    inside: bool,
    /// The number of bytes of `held` that were searched for the mark that closes a call.
    searched: usize,
    /// Whether `held[..searched]` ends within a JSON string.
    quoted: bool,
    /// Whether a mark closes a call even within a JSON string, because the quotes of a call do not match.
    ignores_quotes: bool,
    /// Whether the text has begun with something other than a call.
    is_text: bool,
    /// Whether only white space has followed the last call.
    after_call: bool,
    /// The number of calls so far.
    pub count: usize,
}

impl ToolCalls {
    /// A parser for calls of these functions. The id of a call is `id` and its index.
    pub fn new(format: ToolFormat, functions: Arc<[(String, Value)]>, id: String) -> Self {
        Self {
            format,
            functions,
            id,
            held: String::new(),
            inside: false,
            searched: 0,
            quoted: false,
            ignores_quotes: false,
            is_text: false,
            after_call: false,
            count: 0,
        }
    }

    /// Adds a piece of the text. Returns the text outside of calls, and the calls that are complete.
    pub fn push(&mut self, piece: &str) -> (String, Vec<ToolCall>) {
        self.held += piece;
        match self.format {
            ToolFormat::Hermes | ToolFormat::QwenCoder => self.tagged(),
            ToolFormat::Mistral | ToolFormat::MistralArgs => (self.before(LIST), Vec::new()),
            ToolFormat::Llama => (self.llama(), Vec::new()),
        }
    }

    /// Ends the text. Returns the rest of the text outside of calls, and the rest of the calls.
    pub fn finish(&mut self) -> (String, Vec<ToolCall>) {
        let is_tagged = matches!(self.format, ToolFormat::Hermes | ToolFormat::QwenCoder);
        if is_tagged && self.inside && !self.ignores_quotes && self.one(&self.held).is_none() {
            // A call without matching quotes may hide the calls after it.
            (self.ignores_quotes, self.quoted, self.searched) = (true, false, 0);
            let (shown, calls) = self.tagged();
            let (more, rest) = self.finish();
            return (shown + &more, calls.into_iter().chain(rest).collect());
        }
        let held = std::mem::take(&mut self.held);
        let found = match self.format {
            ToolFormat::Llama if self.is_text => None,
            ToolFormat::Llama => self.objects(&held),
            _ if !self.inside => None,
            ToolFormat::Hermes | ToolFormat::QwenCoder => self.one(&held).map(|call| vec![call]),
            ToolFormat::Mistral => {
                let list: Option<Vec<Value>> = serde_json::from_str(held.trim()).ok();
                list.and_then(|list| list.iter().map(call).collect())
            }
            ToolFormat::MistralArgs => held.split(LIST).map(with_args).collect(),
        };
        let found = found.filter(|found| found.iter().all(|found| self.is_known(found)));
        let mark = match (self.inside, is_tagged) {
            (true, true) => OPEN,
            (true, false) => LIST,
            (false, _) => "",
        };
        match found.filter(|found| !found.is_empty()) {
            Some(found) => (String::new(), found.into_iter().map(|found| self.numbered(found)).collect()),
            None => (format!("{mark}{held}"), Vec::new()),
        }
    }

    /// Parses calls between [`OPEN`] and [`CLOSE`].
    fn tagged(&mut self) -> (String, Vec<ToolCall>) {
        let (mut shown, mut calls) = (String::new(), Vec::new());
        loop {
            let before = self.before(OPEN);
            // White space after a call is dropped.
            let before = if self.after_call { before.trim_start() } else { &before };
            self.after_call &= before.is_empty();
            shown += before;
            let Some(end) = self.end() else { return (shown, calls) };
            let body = self.held[..end].to_owned();
            self.held.drain(..end + CLOSE.len());
            (self.inside, self.quoted, self.searched) = (false, false, 0);
            match self.one(&body) {
                Some(found) => {
                    calls.push(self.numbered(found));
                    self.after_call = true;
                }
                None => shown += &format!("{OPEN}{body}{CLOSE}"),
            }
        }
    }

    /// The offset of the mark that closes the call, if it has arrived. Within a JSON string, or before the end of a
    /// function, the mark is part of an argument. Each byte is visited once, however long a call is.
    fn end(&mut self) -> Option<usize> {
        if !self.inside {
            return None;
        }
        let bytes = self.held.as_bytes();
        let has_quotes = self.format == ToolFormat::Hermes && !self.ignores_quotes;
        while self.searched + CLOSE.len() <= bytes.len() {
            let at = self.searched;
            let closes = bytes[at..].starts_with(CLOSE.as_bytes());
            let is_whole = || self.ignores_quotes || self.held[..at].trim_ascii_end().ends_with(END_OF_FUNCTION);
            match bytes[at] {
                b'\\' if self.quoted => self.searched += 1,
                b'"' if has_quotes => self.quoted = !self.quoted,
                _ if closes && !self.quoted && (self.format == ToolFormat::Hermes || is_whole()) => return Some(at),
                _ => {}
            }
            self.searched += 1;
        }
        None
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
            let own = call(&values.next()?.ok()?).filter(|found| self.is_known(found))?;
            found.push(own);
            rest = rest[values.byte_offset()..].trim_start();
            rest = rest.strip_prefix(';').unwrap_or(rest).trim_start();
        }
        Some(found)
    }

    /// The schema of the arguments of a function that may be called.
    fn schema(&self, name: &str) -> Option<&Value> {
        self.functions.iter().find(|(own, _)| own == name).map(|(_, schema)| schema)
    }

    /// The name and the JSON arguments of the call between two marks.
    fn one(&self, text: &str) -> Option<(String, String)> {
        match self.format {
            ToolFormat::QwenCoder => function(text, |name| self.schema(name)),
            _ => call(&serde_json::from_str(text.trim()).ok()?),
        }
        .filter(|found| self.is_known(found))
    }

    /// Whether a call is one of a function that may be called.
    fn is_known(&self, (name, _): &(String, String)) -> bool {
        self.schema(name).is_some()
    }

    fn numbered(&mut self, (name, arguments): (String, String)) -> ToolCall {
        let index = self.count;
        self.count += 1;
        ToolCall { index, id: format!("{}{index}", self.id), name, arguments }
    }
}

/// The name and the JSON arguments of `name[ARGS]arguments`, where an id may follow the name.
fn with_args(text: &str) -> Option<(String, String)> {
    let (name, arguments) = text.split_once(ARGS)?;
    let name = name.split_once(CALL_ID).map_or(name, |(name, _)| name).trim();
    let arguments: serde_json::Map<String, Value> = serde_json::from_str(arguments.trim()).ok()?;
    Some((name.to_owned(), Value::Object(arguments).to_string()))
}

const END_OF_FUNCTION: &str = "</function>";

/// The name and the JSON arguments of `<function=NAME>`, `<parameter=KEY>value</parameter>` ..., `</function>`.
/// `schema_of` returns the schema of a function's arguments, which decides the types of values.
fn function<'a>(text: &str, schema_of: impl Fn(&str) -> Option<&'a Value>) -> Option<(String, String)> {
    const END_OF_PARAMETER: &str = "</parameter>";
    let body = text.trim().strip_prefix("<function=")?.strip_suffix(END_OF_FUNCTION)?;
    let (name, mut rest) = body.split_once('>')?;
    let schema = schema_of(name);
    let mut arguments = serde_json::Map::new();
    while !rest.trim_start().is_empty() {
        let (key, value) = rest.trim_start().strip_prefix("<parameter=")?.split_once('>')?;
        let (value, after) = value.split_once(END_OF_PARAMETER)?;
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        let schema = schema.map_or(&Value::Null, |schema| &schema["properties"][key]);
        arguments.insert(key.to_owned(), typed(value, schema));
        rest = after;
    }
    Some((name.to_owned(), Value::Object(arguments).to_string()))
}

/// Whether the values of a schema are written as plain text and not as JSON.
pub(super) fn is_plain_text(schema: &Value) -> bool {
    match &schema["type"] {
        Value::String(of) => of == "string",
        Value::Array(of) => of.iter().any(|of| of == "string"),
        // A reference cannot be resolved here.
        _ => !["enum", "const", "anyOf", "oneOf", "allOf"].iter().any(|key| schema.get(key).is_some()),
    }
}

/// A value of this schema: JSON if it is valid JSON, unless the schema is one of strings.
fn typed(text: &str, schema: &Value) -> Value {
    let text_value = || Value::String(text.to_owned());
    if is_plain_text(schema) {
        return text_value();
    }
    // Some models write the constants of Python.
    let json = match text {
        "True" => "true",
        "False" => "false",
        "None" => "null",
        text => text,
    };
    serde_json::from_str(json).unwrap_or_else(|_| text_value())
}

/// The name and the JSON arguments of a call that is an object.
fn call(value: &Value) -> Option<(String, String)> {
    let name = value["name"].as_str()?.to_owned();
    let arguments = match (&value["arguments"], &value["parameters"]) {
        (Value::Null, Value::Null) => "{}".to_owned(),
        (Value::Object(_), _) => value["arguments"].to_string(),
        // Some models write the arguments as a JSON string.
        (Value::String(text), _) => {
            let arguments: serde_json::Map<String, Value> = serde_json::from_str(text).ok()?;
            Value::Object(arguments).to_string()
        }
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
        let schema = serde_json::json!({"properties": {
            "a": {"type": "integer"}, "s": {"type": "string"}, "list": {"type": "array"}, "on": {"type": "boolean"}
        }});
        let functions = [("f".to_owned(), schema), ("g".to_owned(), Value::Null)];
        let mut own = ToolCalls::new(format, Arc::new(functions), "call_".into());
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
        use ToolFormat::{Hermes, Llama, Mistral, MistralArgs, QwenCoder};
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
                Hermes,
                "<tool_call>{\"name\": \"other\"}</tool_call>",
                "<tool_call>{\"name\": \"other\"}</tool_call>",
                vec![],
            ),
            (Hermes, r#"<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>"#, "", vec![f(0)]),
            (
                Hermes,
                r#"<tool_call>{"name": "f", "arguments": "a"}</tool_call>"#,
                r#"<tool_call>{"name": "f", "arguments": "a"}</tool_call>"#,
                vec![],
            ),
            (MistralArgs, "[TOOL_CALLS]other[ARGS]{}", "[TOOL_CALLS]other[ARGS]{}", vec![]),
            (
                Hermes,
                r#"<tool_call>{"name": "f", "arguments": {"s": "\" </tool_call>"}}</tool_call>!"#,
                "!",
                vec![(0, "f".to_owned(), r#"{"s":"\" </tool_call>"}"#.to_owned())],
            ),
            (
                Hermes,
                r#"<tool_call>{"name": "f</tool_call> <tool_call>{"name": "g"}</tool_call>"#,
                r#"<tool_call>{"name": "f</tool_call> "#,
                vec![g(0)],
            ),
            (
                QwenCoder,
                "x <tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
                "x ",
                vec![f(0), g(1)],
            ),
            (
                QwenCoder,
                "<tool_call><function=f><parameter=s>\n\n1 </tool_call>\n</parameter><parameter=list>[1, \"b\"]</parameter>\n<parameter=on>\nTrue\n</parameter><parameter=a>x</parameter><parameter=new>7</parameter></function></tool_call>",
                "",
                vec![(
                    0,
                    "f".to_owned(),
                    r#"{"s":"\n1 </tool_call>","list":[1,"b"],"on":true,"a":"x","new":"7"}"#.to_owned(),
                )],
            ),
            (QwenCoder, "<tool_call>no</tool_call>!", "<tool_call>no</tool_call>!", vec![]),
            (QwenCoder, "<tool_call>\n<function=g>", "<tool_call>\n<function=g>", vec![]),
            (MistralArgs, "so [TOOL_CALLS]f[ARGS]{\"a\": 1}[TOOL_CALLS]g[CALL_ID]x12[ARGS]{}", "so ", vec![f(0), g(1)]),
            (MistralArgs, "[TOOL_CALLS]f[ARGS]{\"a\"", "[TOOL_CALLS]f[ARGS]{\"a\"", vec![]),
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
