//! Chat templates of Hugging Face models: Jinja, with the settings and functions of `transformers`.

use std::{error, fmt, io, sync::OnceLock};

use minijinja::{AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior, Value, value::Kwargs};
use serde::Serialize;
use serde_json::{
    Serializer, Value as Json,
    ser::{Formatter, PrettyFormatter},
};

use super::{
    CHAT_TEMPLATE, TOKENIZER_CONFIG, catch_panic, clock,
    error::TextError,
    prompt::{Chat, Conversation, ToolFormat},
};

/// A chat template, compiled on first use, so that a broken template does not affect text without conversations.
pub(super) struct Template {
    /// The file that contains the template.
    file: &'static str,
    source: String,
    /// Names and texts of the special tokens.
    tokens: Vec<(&'static str, String)>,
    compiled: OnceLock<Result<Environment<'static>, String>>,
}

impl Template {
    /// The maximum size of a template, bytes; published ones have some ten thousand.
    pub(super) const LIMIT: usize = 256 << 10;
    /// The maximum number of instructions per rendering. A published template needs about 100 per message.
    const FUEL: u64 = 20_000_000;
    /// The name of the template in its environment.
    const NAME: &'static str = "chat";

    /// Loads the template of a model, if it has one. [`CHAT_TEMPLATE`] takes precedence.
    pub(super) fn of(config: Option<&[u8]>, template: Option<&[u8]>) -> Result<Option<Self>, TextError> {
        let wrong = |why: &str| TextError::File { file: TOKENIZER_CONFIG, why: why.to_owned() };
        let config: Json = match config {
            Some(bytes) => serde_json::from_slice(bytes).map_err(|error| wrong(&error.to_string()))?,
            None => Json::Object(serde_json::Map::new()),
        };
        if !config.is_object() {
            return Err(wrong("not a JSON object"));
        }
        let (file, source) = match (template, &config["chat_template"]) {
            (Some(bytes), _) => {
                let text = String::from_utf8(bytes.to_vec());
                let text = text.map_err(|error| TextError::File { file: CHAT_TEMPLATE, why: error.to_string() })?;
                (CHAT_TEMPLATE, text)
            }
            (None, Json::Null) => return Ok(None),
            (None, Json::String(text)) => (TOKENIZER_CONFIG, text.clone()),
            (None, Json::Array(named)) => {
                (TOKENIZER_CONFIG, default_template(named).map_err(|why| wrong(&why))?.to_owned())
            }
            (None, _) => return Err(wrong("chat_template is neither text nor a list of named templates")),
        };
        let text = |name| {
            let token = &config[name];
            Some((name, token.as_str().or_else(|| token["content"].as_str())?.to_owned()))
        };
        let tokens = ["bos_token", "eos_token", "pad_token", "unk_token"].into_iter().filter_map(text).collect();
        Ok(Some(Self { file, source, tokens, compiled: OnceLock::new() }))
    }

    /// Returns what the source shows without running it: the format of tool calls.
    pub(super) fn chat(&self) -> Chat {
        let has = |text: &str| self.source.contains(text);
        let tools = if !has("tools") {
            None
        } else if has("[TOOL_CALLS]") {
            Some(if has("[ARGS]") { ToolFormat::MistralArgs } else { ToolFormat::Mistral })
        } else if has("<tool_call>") && has("<function=") {
            has("<parameter=").then_some(ToolFormat::QwenCoder)
        } else if has("<tool_call>") {
            (!has("<arg_key>")).then_some(ToolFormat::Hermes)
        } else {
            has("\"parameters\": ").then_some(ToolFormat::Llama)
        };
        Chat { tools }
    }

    /// Renders a conversation whose next turn is the assistant's. The parser and the interpreter recurse at each level
    /// of an expression, and a level can be a single byte, so the caller must provide a large stack.
    pub(super) fn render(&self, conversation: &Conversation) -> Result<String, TextError> {
        let compiled = self.compiled.get_or_init(|| catch_panic(|| self.compile()).unwrap_or_else(Err));
        let environment = compiled.as_ref().map_err(|why| TextError::File { file: self.file, why: why.clone() })?;
        let tokens = self.tokens.iter().map(|(name, text)| (*name, Value::from(text.as_str())));
        let Conversation { messages, tools } = conversation;
        let context = [("messages", Value::from_serialize(messages)), ("add_generation_prompt", Value::from(true))];
        let tools = tools.as_ref().map(|tools| ("tools", Value::from_serialize(tools)));
        let context: Value = tokens.chain(context).chain(tools).collect();
        let rendered = catch_panic(|| environment.get_template(Self::NAME)?.render(context));
        rendered.map_err(TextError::Template)?.map_err(|error| TextError::Template(error_message(&error)))
    }

    /// Compiles the template with the settings and functions of `transformers`.
    fn compile(&self) -> Result<Environment<'static>, String> {
        let length = self.source.len();
        if length > Self::LIMIT {
            return Err(format!("the chat template has {length} bytes, above the limit of {}", Self::LIMIT));
        }
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_fuel(Some(Self::FUEL));
        environment.add_function("raise_exception", |message: Value| -> Result<Value, Error> {
            let refusal = Raised(message.to_string());
            Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(refusal))
        });
        environment.add_function("strftime_now", |format: &str| clock::now().format(format));
        environment.add_filter("tojson", to_json);
        let added = environment.add_template_owned(Self::NAME, without_generation_blocks(&self.source));
        added.map(|()| environment).map_err(|error| error.to_string())
    }
}

/// Returns the template named `default`, or the only one.
fn default_template(named: &[Json]) -> Result<&str, String> {
    let field = |one: &'_ Json, key: &str| one[key].as_str().map(str::to_owned);
    let names: Option<Vec<String>> = named.iter().map(|one| field(one, "name")).collect();
    let names = names.ok_or("a chat_template of the list has no name")?;
    let at = match names.iter().position(|name| name == "default") {
        Some(at) => at,
        None if names.len() == 1 => 0,
        None => return Err(format!("none of the chat templates is named default: {}", names.join(", "))),
    };
    named[at]["template"].as_str().ok_or_else(|| format!("the chat_template '{}' has no text", names[at]))
}

/// The message that a template passes to `raise_exception`.
#[derive(Debug)]
struct Raised(String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl error::Error for Raised {}

/// Returns the message of the template, or that of the interpreter.
fn error_message(error: &Error) -> String {
    let mut cause: Option<&(dyn error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(Raised(message)) = error.downcast_ref() {
            return message.clone();
        }
        cause = error.source();
    }
    match error.kind() {
        ErrorKind::OutOfFuel => format!("rendering takes more than {} instructions", Template::FUEL),
        _ => error.to_string(),
    }
}

/// Replaces `{% generation %}`, which marks the assistant's text for training, by `{% if true %}`, which renders its
/// body, too.
fn without_generation_blocks(source: &str) -> String {
    let mut tags = source.split("{%");
    let mut out = tags.next().unwrap_or_default().to_owned();
    for tag in tags {
        out += "{%";
        let word = tag.trim_start_matches(['-', '+']).trim_start();
        let replaced = [("endgeneration", "endif"), ("generation", "if true")].into_iter().find_map(|(name, by)| {
            let rest = word.strip_prefix(name)?;
            let ends = rest.trim_start().trim_start_matches(['-', '+']).starts_with("%}");
            ends.then(|| [&tag[..tag.len() - word.len()], by, rest].concat())
        });
        out += replaced.as_deref().unwrap_or(tag);
    }
    out
}

/// Writes JSON as Python does: keys in their order, spaces after separators, nothing escaped for HTML.
fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    const INDENT_MAX: usize = 64;
    let mut out = Vec::new();
    let written = match options.get::<Option<usize>>("indent")? {
        None => value.serialize(&mut Serializer::with_formatter(&mut out, Spaced)),
        Some(indent) if indent <= INDENT_MAX => {
            let indent = " ".repeat(indent);
            value.serialize(&mut Serializer::with_formatter(&mut out, PrettyFormatter::with_indent(indent.as_bytes())))
        }
        Some(indent) => {
            let message = format!("tojson: indent = {indent}, above the limit of {INDENT_MAX}");
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        }
    };
    let failed = |error: &dyn error::Error| Error::new(ErrorKind::BadSerialization, format!("tojson: {error}"));
    written.map_err(|error| failed(&error))?;
    String::from_utf8(out).map_err(|error| failed(&error))
}

/// Writes a space after each comma and each colon.
struct Spaced;

impl Spaced {
    fn separate<W: ?Sized + io::Write>(writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }
}

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        Self::separate(writer, first)
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        Self::separate(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::Message;

    fn conversation(messages: Vec<Message>) -> Conversation {
        Conversation { messages, tools: None }
    }

    fn rendered(template: &str) -> Result<String, String> {
        let config = br#"{"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": null}"#;
        let template = Template::of(Some(config), Some(template.as_bytes())).unwrap().unwrap();
        template
            .render(&conversation(vec![Message::system("be <brief>"), Message::user("hi").name("a")]))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn templates_render_as_in_transformers() {
        for (template, expected) in [
            ("{{ bos_token }}{{ eos_token }}[{{ pad_token }}]", "<s></s>[]"),
            ("{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}\n", "system\nuser\n"),
            (
                "{{ messages | tojson }}",
                r#"[{"role": "system", "content": "be <brief>"}, {"role": "user", "content": "hi", "name": "a"}]"#,
            ),
            (
                "{{ {'b': [1, 2.5, none], 'a': '\u{e9}'} | tojson(indent=1) }}",
                "{\n \"b\": [\n  1,\n  2.5,\n  null\n ],\n \"a\": \"\u{e9}\"\n}",
            ),
            ("{{ ' a b '.strip().split(' ')[1] }}{{ messages[0].get('x', '-') }}", "b-"),
            ("{{ messages[0]['content'].replace('<', '&') }}", "be &brief>"),
            ("{% if tools is defined %}tools{% endif %}{{ missing }}{{ add_generation_prompt }}", "True"),
            ("{%- generation -%} a {%- endgeneration %}{%generation%}b{%endgeneration%}", "ab"),
            ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
            (
                "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
                "2",
            ),
        ] {
            assert_eq!(rendered(template).as_deref(), Ok(expected), "{template}");
        }
        let year = rendered("{{ strftime_now('%Y') }}").unwrap();
        assert!(year.len() == 4 && year.parse::<u32>().is_ok_and(|year| year >= 2024), "{year}");
    }

    #[test]
    fn errors_have_the_message_of_the_template() {
        let refused = rendered("{{ raise_exception('roles must alternate') }}").unwrap_err();
        assert!(refused.contains(": roles must alternate;"), "{refused}");
        assert!(rendered("{{ 1 | tojson(indent=1000000000000) }}").unwrap_err().contains("limit of 64"));
    }

    #[test]
    fn an_endless_template_ends() {
        let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
        let refused = rendered(endless).unwrap_err();
        assert!(refused.contains("more than 20000000 instructions"), "{refused}");
    }

    #[test]
    fn default_template_is_chosen() {
        let of = |list: &str| {
            let config = format!(r#"{{"chat_template": {list}}}"#);
            let template = Template::of(Some(config.as_bytes()), None).map_err(|error| error.to_string())?;
            template.unwrap().render(&conversation(Vec::new())).map_err(|error| error.to_string())
        };
        let (tools, default) = (r#"{"name": "tool_use", "template": "t"}"#, r#"{"name": "default", "template": "d"}"#);
        assert_eq!(of(&format!("[{tools}, {default}]")).as_deref(), Ok("d"));
        assert_eq!(of(&format!("[{tools}]")).as_deref(), Ok("t"));
        for (list, why) in [
            (format!("[{tools}, {tools}]"), "tool_use, tool_use"),
            ("[]".to_owned(), "named default"),
            ("7".to_owned(), "neither text"),
            (r#"[{"name": "default"}]"#.to_owned(), "has no text"),
            (r#"[{"template": "d"}]"#.to_owned(), "has no name"),
        ] {
            let refused = of(&list).unwrap_err();
            assert!(refused.starts_with(TOKENIZER_CONFIG) && refused.contains(why), "{list}: {refused}");
        }
        assert!(Template::of(None, None).unwrap().is_none());
    }

    #[test]
    fn tool_formats_are_known_by_their_marks() {
        let of = |template: &str| Template::of(None, Some(template.as_bytes())).unwrap().unwrap().chat().tools;
        for (template, expected) in [
            ("{{ messages }}", None),
            ("{{ tools }}", None),
            ("{% if tools %}<tool_call>\n{\"name\": ..}\n</tool_call>", Some(ToolFormat::Hermes)),
            ("{% if tools %}<tool_call>\n<function=example>", None),
            ("{% if tools %}<tool_call>{name}\n<arg_key>", None),
            ("{{ tools }}{{ '[TOOL_CALLS] [' }}", Some(ToolFormat::Mistral)),
            ("{{ tools }}[TOOL_CALLS]name[ARGS]{}", Some(ToolFormat::MistralArgs)),
            ("{{ tools }}<tool_call>\n<function=f>\n<parameter=p>", Some(ToolFormat::QwenCoder)),
            (r#"{% if tools is not none %}{"name": function name, "parameters": dictionary"#, Some(ToolFormat::Llama)),
        ] {
            assert_eq!(of(template), expected, "{template}");
        }
        let template =
            Template::of(None, Some(b"{{ tools | tojson }}{{ messages[0].tool_calls[0].x }}")).unwrap().unwrap();
        let tools = serde_json::json!([{"type": "function", "a": 1}]);
        let message = Message { tool_calls: Some(r#"[{"x": 7}]"#.to_owned()), ..Message::new("assistant", "") };
        let shown = template.render(&Conversation { messages: vec![message], tools: Some(tools) }).unwrap();
        assert_eq!(shown, r#"[{"type": "function", "a": 1}]7"#, "keys in their order");
    }
}
