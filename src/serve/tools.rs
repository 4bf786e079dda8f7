//! Parses tool definitions and the tool choice, and builds the grammar of answers that must call a tool.

use std::sync::Arc;

use serde::de::IgnoredAny;
use serde_json::{Map, Value, json, value::RawValue};

use super::{
    error::ApiError,
    fields::{Fields, each, text},
    tool_calls::{ARGS, CLOSE, LIST, OPEN, is_plain_text},
};
use crate::text::{Grammar, ToolFormat};

/// The maximum number of tools of a request, and the maximum size of their JSON in bytes.
const TOOLS_MAX: usize = 128;
const TOOLS_BYTES_MAX: usize = 256 << 10;
/// The maximum length of a function name, characters.
const NAME_MAX: usize = 64;

/// The fields that this module reads.
pub(super) const FIELDS: &[&str] = &["tools", "tool_choice", "parallel_tool_calls"];

/// Which tools an answer must call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ToolChoice {
    /// The model chooses whether and what to call.
    Auto,
    /// The answer calls at least one of the functions with these indices.
    Required(Vec<usize>),
}

/// The tools of a request.
#[derive(Clone, Debug)]
pub(super) struct Tools {
    /// The definitions, as the chat template gets them.
    pub definitions: Value,
    /// The functions: name and JSON schema of the arguments.
    pub functions: Arc<[(String, Value)]>,
    pub choice: ToolChoice,
    /// Whether the request names a function. The finish reason is then `stop`.
    pub named: bool,
    /// Whether an answer may have several calls.
    pub parallel: bool,
}

impl Tools {
    /// Parses the fields; `None` if the model may not call tools.
    pub fn read(fields: &mut Fields) -> Result<Option<Self>, ApiError> {
        let parallel = !fields.is_false("parallel_tool_calls");
        fields.flag("parallel_tool_calls")?;
        let (definitions, functions) = match fields.take("tools") {
            None => (Vec::new(), Vec::new()),
            Some(raw) => definitions(raw)?,
        };
        let choice = fields.value("tool_choice")?;
        let wrong = |message: &str| Err(ApiError::of("tool_choice", format!("tool_choice {message}")));
        let named = choice.as_ref().filter(|choice| choice.is_object());
        let (choice, named) = match (choice.as_ref().and_then(Value::as_str), named) {
            (_, Some(choice)) => {
                let Some(name) = choice["function"]["name"].as_str() else { return wrong("has no function.name") };
                let Some(at) = functions.iter().position(|(own, _)| own == name) else {
                    return wrong("names a function that is not in tools");
                };
                (ToolChoice::Required(vec![at]), true)
            }
            (Some("none"), _) => return Ok(None),
            (Some("required"), _) if functions.is_empty() => return wrong("is required, and there are no tools"),
            (Some("required"), _) => (ToolChoice::Required((0..functions.len()).collect()), false),
            (Some("auto"), _) => (ToolChoice::Auto, false),
            (None, _) if choice.is_none() => (ToolChoice::Auto, false),
            _ => return wrong("is none of auto, none, required and a named function"),
        };
        if functions.is_empty() {
            return Ok(None);
        }
        Ok(Some(Self { definitions: Value::Array(definitions), functions: functions.into(), choice, named, parallel }))
    }

    /// Returns the grammar of an answer that must call a tool, or match `schema` if it calls none. `None` if any answer
    /// is valid. `marks` lists the marks that are special tokens.
    pub fn grammar(&self, format: ToolFormat, marks: &[(u32, &str)], schema: Option<&str>) -> Option<Grammar> {
        let (of, answer) = match (&self.choice, schema) {
            (ToolChoice::Auto, None) => return None,
            (ToolChoice::Auto, Some(schema)) => ((0..self.functions.len()).collect(), Some(schema)),
            (ToolChoice::Required(of), _) => (of.clone(), None),
        };
        let quoted = |text: &str| json!(text).to_string();
        let special = |text: &str| marks.iter().find(|(_, own)| *own == text);
        let mark = |text: &str| special(text).map_or_else(|| quoted(text), |(id, _)| format!("<[{id}]>"));
        let several = self.parallel && !self.named;
        let more = |text: String| if several { format!(" ({text})*") } else { String::new() };
        let start = match format {
            ToolFormat::Hermes | ToolFormat::QwenCoder => {
                let one = format!("{} \"\\n\" call \"\\n\" {}", mark(OPEN), mark(CLOSE));
                format!("{one}{}", more(format!("\"\\n\" {one}")))
            }
            // Llama's template supports one call per turn.
            ToolFormat::Llama => "call".to_owned(),
            ToolFormat::Mistral => {
                format!("{} \" [\" call{} \"]\"", mark(LIST), more("\", \" call".to_owned()))
            }
            ToolFormat::MistralArgs => format!("{0} call{1}", mark(LIST), more(format!("{} call", mark(LIST)))),
        };
        let calls: Vec<String> = of.iter().map(|at| format!("call{at}")).collect();
        let mut lark = format!("tools: {start}\ncall: {}\n", calls.join(" | "));
        lark += &match answer {
            Some(schema) => format!("start: tools | answer\nanswer: %json {schema}\n"),
            None => "start: tools\n".to_owned(),
        };
        if format == ToolFormat::QwenCoder {
            lark += "text[suffix=\"\\n</parameter>\\n\"]: /(?s:.*)/\n";
        }
        for at in of {
            let (name, schema) = &self.functions[at];
            let object = |key: &str| {
                let head = quoted(&format!("{{\"name\": \"{name}\", \"{key}\": "));
                format!("call{at}: {head} arguments{at} \"}}\"\narguments{at}: %json {schema}\n")
            };
            lark += &match format {
                ToolFormat::Hermes | ToolFormat::Mistral => object("arguments"),
                ToolFormat::Llama => object("parameters"),
                ToolFormat::MistralArgs => {
                    format!("call{at}: {} {} arguments{at}\narguments{at}: %json {schema}\n", quoted(name), mark(ARGS))
                }
                ToolFormat::QwenCoder => function_rules(at, name, schema),
            };
        }
        Some(Grammar::Lark(lark))
    }
}

/// Returns the grammar rules of a call in Qwen3-Coder's format, with parameters in the order of the schema.
fn function_rules(at: usize, name: &str, schema: &Value) -> String {
    let quoted = |text: &str| json!(text).to_string();
    let none = Map::new();
    let properties = schema["properties"].as_object().unwrap_or(&none);
    let required = |key: &str| schema["required"].as_array().is_some_and(|keys| keys.iter().any(|own| own == key));
    let (mut call, mut rules) = (quoted(&format!("<function={name}>\n")), String::new());
    // The syntax has no escape of the character that ends a key.
    for (nth, (key, schema)) in properties.iter().filter(|(key, _)| !key.contains(['>', '\n'])).enumerate() {
        let parameter = format!("parameter{at}_{nth}");
        call += &format!(" {parameter}{}", if required(key) { "" } else { "?" });
        let head = quoted(&format!("<parameter={key}>\n"));
        // A `$ref` is relative to the function's schema, of which this is a part.
        rules += &if is_plain_text(schema) || schema.to_string().contains("\"$ref\"") {
            format!("{parameter}: {head} text\n")
        } else {
            format!("{parameter}: {head} value{at}_{nth} \"\\n</parameter>\\n\"\nvalue{at}_{nth}: %json {schema}\n")
        };
    }
    format!("call{at}: {call} \"</function>\"\n{rules}")
}

/// Parses tool definitions. Returns them, and the name and schema of each function.
#[allow(clippy::type_complexity)]
fn definitions(raw: &RawValue) -> Result<(Vec<Value>, Vec<(String, Value)>), ApiError> {
    let wrong = |message: String| ApiError::of("tools", format!("tools {message}"));
    let bytes = raw.get().len();
    if bytes > TOOLS_BYTES_MAX {
        return Err(wrong(format!("has {bytes} bytes; the limit is {TOOLS_BYTES_MAX}")));
    }
    let (mut definitions, mut functions) = (Vec::new(), Vec::<(String, Value)>::new());
    let listed = each(raw, |at, raw| {
        let wrong = |message: &str| wrong(format!("[{at}]: {message}"));
        if at >= TOOLS_MAX {
            return Err(wrong(&format!("the limit is {TOOLS_MAX} tools")));
        }
        let tool: Value = serde_json::from_str(raw.get()).map_err(|error| wrong(&error.to_string()))?;
        if tool["type"].as_str() != Some("function") {
            return Err(wrong("the type is not function"));
        }
        let name = tool["function"]["name"].as_str().filter(|name| is_name(name));
        let name = name.ok_or_else(|| {
            wrong(&format!("function.name is not a name of 1 to {NAME_MAX} letters, digits, underscores and dashes"))
        })?;
        if functions.iter().any(|(own, _)| own == name) {
            return Err(wrong("another tool has this function.name"));
        }
        let schema = match &tool["function"]["parameters"] {
            Value::Null => json!({ "type": "object", "properties": {}, "additionalProperties": false }),
            Value::Object(schema) => arguments(schema),
            _ => return Err(wrong("function.parameters is not a JSON schema, which is an object")),
        };
        functions.push((name.to_owned(), schema));
        definitions.push(tool);
        Ok(())
    });
    listed.ok_or_else(|| wrong("is not a list".to_owned()))??;
    Ok((definitions, functions))
}

/// Returns a schema of arguments, whose type is always object.
fn arguments(schema: &Map<String, Value>) -> Value {
    let mut schema = schema.clone();
    schema.entry("type").or_insert_with(|| json!("object"));
    Value::Object(schema)
}

fn is_name(name: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    (1..=NAME_MAX).contains(&name.len()) && name.chars().all(fits)
}

/// Reads the tool calls of an earlier turn as JSON for chat templates, with arguments as objects; `None` if there are
/// none. `wrong` creates an error from a message. Calls stay text, because a tree of values takes up to 70 times its
/// memory.
pub(super) fn earlier_calls(raw: &RawValue, wrong: &dyn Fn(&str) -> ApiError) -> Result<Option<String>, ApiError> {
    let mut calls = String::new();
    let listed = each(raw, |_, raw| {
        let known = &["id", "type", "function"];
        let mut call = Fields::read(raw.get().as_bytes(), known).map_err(|_| wrong("a tool call is not an object"))?;
        let function = call.take("function").ok_or_else(|| wrong("a tool call has no function"))?;
        let function = Fields::read(function.get().as_bytes(), &["name", "arguments"]);
        let mut function = function.map_err(|_| wrong("a tool call has no function"))?;
        let name = function.take("name").and_then(text).ok_or_else(|| wrong("a tool call has no function.name"))?;
        let arguments = function.take("arguments").map_or(Some("{}".to_owned()), text);
        let arguments = arguments.map(|text| if text.trim().is_empty() { "{}".to_owned() } else { text });
        let is_object =
            |text: &String| text.trim_start().starts_with('{') && serde_json::from_str::<IgnoredAny>(text).is_ok();
        let arguments = arguments
            .filter(is_object)
            .ok_or_else(|| wrong("function.arguments of a tool call is not JSON of an object"))?;
        calls += if calls.is_empty() { "[" } else { "," };
        calls += &format!(r#"{{"type":"function","function":{{"name":{},"arguments":"#, json!(name));
        calls += &arguments;
        calls += "}";
        if let Some(id) = call.take("id").and_then(text) {
            calls += &format!(r#","id":{}"#, json!(id));
        }
        calls += "}";
        Ok(())
    });
    listed.ok_or_else(|| wrong("tool_calls is not a list"))??;
    calls += "]";
    Ok((calls != "]").then_some(calls))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::accepts;

    #[test]
    fn calls_match_their_grammar() {
        use crate::text::ToolFormat::{Hermes, Llama, Mistral, MistralArgs, QwenCoder};
        let tools = |more: &str| {
            let body = format!(
                r#"{{"tools": [{{"type": "function", "function": {{"name": "f", "parameters": {{"properties": {{"a": {{"type": "integer"}}}},
                "additionalProperties": false}}}}}}, {{"type": "function", "function": {{"name": "g"}}}},
                {{"type": "function", "function": {{"name": "s", "parameters": {{"properties": {{"t": {{"type": "string"}}}},
                "required": ["t"]}}}}}}], {more}}}"#
            );
            Tools::read(&mut Fields::read(body.as_bytes(), FIELDS).unwrap()).unwrap().unwrap()
        };
        let (many, one) = (
            tools(r#""tool_choice": "required""#),
            tools(r#""tool_choice": "required", "parallel_tool_calls": false"#),
        );
        let named = tools(r#""tool_choice": {"type": "function", "function": {"name": "g"}}"#);
        let f = "{\"name\": \"f\", \"arguments\": {\"a\": 1}}";
        let g = "{\"name\": \"g\", \"arguments\": {}}";
        let coder = |name: &str, key: &str, value: &str| {
            let parameter = format!("<parameter={key}>\n{value}\n</parameter>\n");
            format!("<tool_call>\n<function={name}>\n{parameter}</function>\n</tool_call>")
        };
        for (tools, format, text, expected) in [
            (&many, Hermes, format!("<tool_call>\n{f}\n</tool_call>"), true),
            (&many, Hermes, format!("<tool_call>\n{f}\n</tool_call>\n<tool_call>\n{g}\n</tool_call>"), true),
            (&one, Hermes, format!("<tool_call>\n{f}\n</tool_call>\n<tool_call>\n{g}\n</tool_call>"), false),
            (&named, Hermes, format!("<tool_call>\n{g}\n</tool_call>"), true),
            (&named, Hermes, format!("<tool_call>\n{f}\n</tool_call>"), false),
            (&many, Hermes, f.to_owned(), false),
            (&many, Llama, "{\"name\": \"f\", \"parameters\": {\"a\": 1}}".to_owned(), true),
            (&many, Llama, "{\"name\": \"f\", \"parameters\": {\"b\": 1}}".to_owned(), false),
            (&many, Mistral, format!("[TOOL_CALLS] [{f}, {g}]"), true),
            (&one, Mistral, format!("[TOOL_CALLS] [{f}, {g}]"), false),
            (&many, MistralArgs, "[TOOL_CALLS]f[ARGS]{\"a\": 1}[TOOL_CALLS]g[ARGS]{}".to_owned(), true),
            (&many, MistralArgs, "[TOOL_CALLS]f[ARGS]{\"a\": \"1\"}".to_owned(), false),
            (&named, MistralArgs, "[TOOL_CALLS]f[ARGS]{\"a\": 1}".to_owned(), false),
            (&many, QwenCoder, format!("{}\n{}", coder("f", "a", "1"), coder("s", "t", "any </par> \n\n")), true),
            // No function has a parameter of plain text.
            (&named, QwenCoder, "<tool_call>\n<function=g>\n</function>\n</tool_call>".to_owned(), true),
            (&many, QwenCoder, coder("f", "a", "x"), false),
            (&many, QwenCoder, coder("f", "b", "1"), false),
            // A required parameter.
            (&many, QwenCoder, "<tool_call>\n<function=s>\n</function>\n</tool_call>".to_owned(), false),
            (&many, QwenCoder, "<tool_call>\n<function=f>\n</function>\n</tool_call>".to_owned(), true),
            (&one, QwenCoder, format!("{0}\n{0}", coder("f", "a", "1")), false),
        ] {
            let grammar = tools.grammar(format, &[], None).unwrap();
            assert_eq!(accepts(&grammar, &text), expected, "{text} by {grammar:?}");
        }
    }
}
