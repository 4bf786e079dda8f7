//! The protocol between a program and its text process. A frame is a 4-byte little-endian length and a payload.

#[cfg(feature = "serve")]
use std::time::Duration;

use serde_json::Value;

#[cfg(feature = "serve")]
use super::prompt::{Grammar, Sampled};
use super::{
    CHAT_TEMPLATE, TOKENIZER, TOKENIZER_CONFIG,
    error::TextError,
    prompt::{Chat, Conversation, EncodeLimits, Encoded, Message, Prompt, ToolFormat},
};

/// The files of a tokenizer; errors refer to them by index.
const FILES: [&str; 3] = [TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE];
/// The maximum size of an error's text, bytes.
const ERROR_BYTES_MAX: usize = 4 << 10;
/// The first byte of a successful reply.
const DONE: u8 = 0;

/// Writes values into a payload.
#[derive(Default)]
pub(super) struct Writer(pub Vec<u8>);

impl Writer {
    pub fn byte(&mut self, value: u8) {
        self.0.push(value);
    }

    pub fn word(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    pub fn long(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    /// Writes a length and the bytes. A payload is always smaller than 4 GiB.
    pub fn bytes(&mut self, value: &[u8]) {
        self.word(value.len() as u32);
        self.0.extend(value);
    }

    /// Writes optional bytes.
    pub fn option(&mut self, value: Option<&[u8]>) {
        self.byte(value.is_some().into());
        self.bytes(value.unwrap_or_default());
    }
}

/// Reads values from a payload; returns `None` if it ends too early or is invalid.
pub(super) struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    pub fn byte(&mut self) -> Option<u8> {
        self.take(1).map(|bytes| bytes[0])
    }

    pub fn word(&mut self) -> Option<u32> {
        self.take(4)?.try_into().ok().map(u32::from_le_bytes)
    }

    pub fn long(&mut self) -> Option<u64> {
        self.take(8)?.try_into().ok().map(u64::from_le_bytes)
    }

    pub fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(bytes)
    }

    pub fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = self.word()? as usize;
        self.take(length)
    }

    pub fn text(&mut self) -> Option<&'a str> {
        std::str::from_utf8(self.bytes()?).ok()
    }

    pub fn option(&mut self) -> Option<Option<&'a [u8]>> {
        let is_there = self.byte()? == 1;
        self.bytes().map(|bytes| is_there.then_some(bytes))
    }

    /// Returns the value if the payload ends here.
    pub fn end<T>(self, value: T) -> Option<T> {
        self.0.is_empty().then_some(value)
    }
}

/// A request to a text process.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ProcessRequest {
    /// Encode prompts.
    Encode(Vec<Prompt>, EncodeLimits),
    /// Prepare for grammars of these tokens.
    #[cfg(feature = "serve")]
    Sampled(Sampled),
    /// Check that a grammar compiles within this time of a processor.
    #[cfg(feature = "serve")]
    Grammar(Grammar, Duration),
}

/// Formats of tool calls, by their number in a frame, from 1.
const TOOL_FORMATS: [ToolFormat; 5] =
    [ToolFormat::Hermes, ToolFormat::Llama, ToolFormat::Mistral, ToolFormat::MistralArgs, ToolFormat::QwenCoder];

/// Writes the properties of a chat template.
pub(super) fn write_chat(out: &mut Writer, chat: Option<Chat>) {
    out.byte(chat.is_some().into());
    let format = chat.and_then(|chat| chat.tools);
    let number = format.and_then(|format| TOOL_FORMATS.iter().position(|own| *own == format));
    out.byte(number.map_or(0, |number| 1 + number as u8));
}

/// Reads the output of [`write_chat`].
pub(super) fn read_chat(reader: &mut Reader<'_>) -> Option<Option<Chat>> {
    let (has_chat, number) = (reader.byte()? == 1, reader.byte()?);
    let tools = number.checked_sub(1).and_then(|number| TOOL_FORMATS.get(usize::from(number)).copied());
    Some(has_chat.then_some(Chat { tools }))
}

/// Returns the payload of a request to prepare for grammars.
#[cfg(feature = "serve")]
pub(super) fn sampled_request(sampled: &Sampled) -> Vec<u8> {
    let mut out = Writer(vec![2]);
    out.word(sampled.vocab);
    out.word(sampled.eos.len() as u32);
    sampled.eos.iter().for_each(|id| out.word(*id));
    out.0
}

/// Returns the payload of a request to check a grammar.
#[cfg(feature = "serve")]
pub(super) fn grammar_request(grammar: &Grammar, time: Duration) -> Vec<u8> {
    let mut out = Writer(vec![1]);
    out.long(time.as_millis() as u64);
    let (kind, text) = grammar.parts();
    out.byte(kind);
    out.bytes(text.as_bytes());
    out.0
}

#[cfg(feature = "serve")]
fn read_sampled(reader: &mut Reader<'_>) -> Option<ProcessRequest> {
    let vocab = reader.word()?;
    let eos = (0..reader.word()?).map(|_| reader.word()).collect::<Option<_>>()?;
    Some(ProcessRequest::Sampled(Sampled { vocab, eos }))
}

#[cfg(feature = "serve")]
fn read_grammar(reader: &mut Reader<'_>) -> Option<ProcessRequest> {
    let time = Duration::from_millis(reader.long()?);
    Some(ProcessRequest::Grammar(Grammar::of((reader.byte()?, reader.text()?)), time))
}

/// Returns the bytes of a JSON value.
fn json(value: Option<&Value>) -> Option<Vec<u8>> {
    value.map(|value| value.to_string().into_bytes())
}

/// Parses an optional JSON value.
fn read_json(bytes: Option<&[u8]>) -> Option<Option<Value>> {
    bytes.map(|bytes| serde_json::from_slice(bytes).ok()).map_or(Some(None), |value| value.map(Some))
}

fn read_text(bytes: Option<&[u8]>) -> Option<Option<String>> {
    bytes.map(|bytes| String::from_utf8(bytes.to_vec()).ok()).map_or(Some(None), |text| text.map(Some))
}

/// Returns the payload of a request to encode prompts.
pub(super) fn request(prompts: &[Prompt], limits: EncodeLimits) -> Vec<u8> {
    let bytes: usize = prompts.iter().map(Prompt::bytes).sum();
    let mut out = Writer(Vec::with_capacity(bytes + 32 * (prompts.len() + 1)));
    out.byte(0);
    out.long(limits.bytes);
    out.long(limits.tokens);
    out.long(limits.all_tokens);
    out.word(prompts.len() as u32);
    for prompt in prompts {
        match prompt {
            Prompt::Text(text) => {
                out.byte(0);
                out.bytes(text.as_bytes());
            }
            Prompt::Plain(text) => {
                out.byte(2);
                out.bytes(text.as_bytes());
            }
            Prompt::Chat(Conversation { messages, tools }) => {
                out.byte(1);
                out.option(json(tools.as_ref()).as_deref());
                out.word(messages.len() as u32);
                for Message { role, content, name, tool_calls, tool_call_id } in messages {
                    out.bytes(role.as_bytes());
                    out.bytes(content.as_bytes());
                    out.option(name.as_deref().map(str::as_bytes));
                    out.option(tool_calls.as_deref().map(str::as_bytes));
                    out.option(tool_call_id.as_deref().map(str::as_bytes));
                }
            }
        }
    }
    out.0
}

/// Reads the output of [`request`], [`sampled_request`] or [`grammar_request`].
pub(super) fn read_request(payload: &[u8]) -> Option<ProcessRequest> {
    let mut reader = Reader(payload);
    match reader.byte()? {
        0 => {}
        #[cfg(feature = "serve")]
        1 => return read_grammar(&mut reader).and_then(|request| reader.end(request)),
        #[cfg(feature = "serve")]
        2 => return read_sampled(&mut reader).and_then(|request| reader.end(request)),
        _ => return None,
    }
    let limits = EncodeLimits { bytes: reader.long()?, tokens: reader.long()?, all_tokens: reader.long()? };
    let mut prompts = Vec::new();
    for _ in 0..reader.word()? {
        prompts.push(match reader.byte()? {
            0 => Prompt::Text(reader.text()?.to_owned()),
            2 => Prompt::Plain(reader.text()?.to_owned()),
            _ => {
                let tools = read_json(reader.option()?)?;
                let mut messages = Vec::new();
                for _ in 0..reader.word()? {
                    messages.push(Message {
                        role: reader.text()?.to_owned(),
                        content: reader.text()?.to_owned(),
                        name: read_text(reader.option()?)?,
                        tool_calls: read_text(reader.option()?)?,
                        tool_call_id: read_text(reader.option()?)?,
                    });
                }
                Prompt::Chat(Conversation { messages, tools })
            }
        });
    }
    reader.end(ProcessRequest::Encode(prompts, limits))
}

/// Returns the payload of a reply.
pub(super) fn reply(result: Result<Vec<Encoded>, TextError>) -> Vec<u8> {
    let encoded = match result {
        Ok(encoded) => encoded,
        Err(error) => return failure(&error),
    };
    let mut out = done();
    for prompt in encoded {
        match prompt {
            Encoded::Ids(ids) => {
                out.byte(0);
                out.word(ids.len() as u32);
                out.0.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
            }
            Encoded::TooMany(tokens) => {
                out.byte(1);
                out.long(tokens);
            }
        }
    }
    out.0
}

/// Returns the maximum size of a reply to this number of prompts, bytes.
pub(super) fn reply_bytes_max(prompts: usize, limits: EncodeLimits) -> u64 {
    16 + 16 * prompts as u64 + limits.all_tokens.saturating_mul(4) + ERROR_BYTES_MAX as u64
}

/// Parses a reply to this number of prompts; `None` if it is invalid.
pub(super) fn read_reply(payload: &[u8], prompts: usize) -> Option<Result<Vec<Encoded>, TextError>> {
    let mut reader = match opened(payload)? {
        Ok(reader) => reader,
        Err(error) => return Some(Err(error)),
    };
    let mut encoded = Vec::with_capacity(prompts);
    for _ in 0..prompts {
        encoded.push(match reader.byte()? {
            0 => {
                let length = reader.word()? as usize;
                let (ids, _) = reader.take(length.checked_mul(4)?)?.as_chunks::<4>();
                Encoded::Ids(ids.iter().map(|id| u32::from_le_bytes(*id)).collect())
            }
            _ => Encoded::TooMany(reader.long()?),
        });
    }
    reader.end(Ok(encoded))
}

/// Returns the reply to a grammar, which takes these bytes of memory or exceeds its time, or to the sampled tokens.
#[cfg(feature = "serve")]
pub(super) fn grammar_reply(bytes: Option<u64>) -> Vec<u8> {
    let mut out = done();
    out.byte(bytes.is_some().into());
    out.long(bytes.unwrap_or(0));
    out.0
}

/// Parses the output of [`grammar_reply`]; `None` if it is invalid.
#[cfg(feature = "serve")]
pub(super) fn read_grammar_reply(payload: &[u8]) -> Option<Result<Option<u64>, TextError>> {
    let mut reader = match opened(payload)? {
        Ok(reader) => reader,
        Err(error) => return Some(Err(error)),
    };
    let bytes = (reader.byte()? == 1, reader.long()?);
    reader.end(Ok(bytes.0.then_some(bytes.1)))
}

/// Starts the payload of a successful reply.
pub(super) fn done() -> Writer {
    Writer(vec![DONE])
}

/// Returns a reader for a successful reply, or the error in it; `None` if it is invalid.
pub(super) fn opened(payload: &[u8]) -> Option<Result<Reader<'_>, TextError>> {
    let mut reader = Reader(payload);
    let error = match reader.byte()? {
        DONE => return Some(Ok(reader)),
        1 => {
            let file = FILES.get(usize::from(reader.byte()?)).copied()?;
            TextError::File { file, why: reader.text()?.to_owned() }
        }
        2 => TextError::NoTemplate,
        3 => TextError::Template(reader.text()?.to_owned()),
        4 => TextError::Tokenizer(reader.text()?.to_owned()),
        5 => TextError::TooLong { bytes: reader.long()?, limit: reader.long()? },
        6 => TextError::Limit { work: super::PREPARING, limit: reader.text()?.to_owned() },
        7 => TextError::Grammar(reader.text()?.to_owned()),
        _ => return None,
    };
    reader.end(Err(error))
}

/// Returns the payload of an error.
pub(super) fn failure(error: &TextError) -> Vec<u8> {
    let mut out = Writer::default();
    let mut text = |kind: u8, file: Option<usize>, text: &str| {
        out.byte(kind);
        file.into_iter().for_each(|file| out.byte(file as u8));
        out.bytes(shortened(text).as_bytes());
    };
    match error {
        TextError::File { file, why } => text(1, Some(FILES.iter().position(|own| own == file).unwrap_or(0)), why),
        TextError::Template(why) => text(3, None, why),
        TextError::Limit { limit, .. } => text(6, None, limit),
        TextError::Grammar(why) => text(7, None, why),
        TextError::NoTemplate => out.byte(2),
        TextError::TooLong { bytes, limit } => {
            out.byte(5);
            out.long(*bytes);
            out.long(*limit);
        }
        TextError::Tokenizer(why) | TextError::Ids(why) | TextError::Process(why) => text(4, None, why),
        // Only the program that waits for a process finds that the machine is busy, or that it stops.
        TextError::Busy { .. } | TextError::Stopping => text(4, None, &error.to_string()),
    }
    out.0
}

/// Cuts an error's text to its maximum size, because a template can raise a text of any length.
pub(super) fn shortened(text: &str) -> &str {
    let end = (0..=text.len().min(ERROR_BYTES_MAX)).rev().find(|&end| text.is_char_boundary(end));
    &text[..end.unwrap_or(0)]
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn frames_are_read_as_they_were_written() {
        let calls = Message { tool_calls: Some(r#"[{"function": {}}]"#.to_owned()), ..Message::new("assistant", "") };
        let result = Message { tool_call_id: Some("c".into()), ..Message::new("tool", "1") };
        let messages = vec![Message::system("a\n"), Message::user("\u{e9}").name("b"), calls, result];
        let chat = Prompt::Chat(Conversation { messages, tools: Some(json!([{"type": "function"}])) });
        let prompts = [Prompt::Text("text".into()), chat, Prompt::Plain("p".into())];
        let limits = EncodeLimits { bytes: 1, tokens: 2, all_tokens: u64::MAX };
        let payload = request(&prompts, limits);
        assert_eq!(read_request(&payload).unwrap(), ProcessRequest::Encode(prompts.into(), limits));
        let replies = || vec![Encoded::Ids(vec![1, u32::MAX]), Encoded::TooMany(1 << 40), Encoded::Ids(Vec::new())];
        let payload_of_reply = reply(Ok(replies()));
        assert_eq!(read_reply(&payload_of_reply, 3).unwrap().unwrap(), replies());
        // A truncated payload is not a frame, and neither is one with extra bytes.
        for cut in 0..payload.len() {
            assert!(read_request(&payload[..cut]).is_none(), "{cut}");
        }
        for cut in 0..payload_of_reply.len() {
            assert!(read_reply(&payload_of_reply[..cut], 3).is_none(), "{cut}");
        }
        assert!(read_request(&[&payload[..], &[0]].concat()).is_none());
        #[cfg(feature = "serve")]
        {
            let (grammar, sampled) = (Grammar::Regex("a".into()), Sampled { vocab: 9, eos: vec![1, 2] });
            let time = Duration::from_millis(7);
            let payloads = [grammar_request(&grammar, time), sampled_request(&sampled)];
            let read = payloads.each_ref().map(|payload| read_request(payload).unwrap());
            assert_eq!(read, [ProcessRequest::Grammar(grammar, time), ProcessRequest::Sampled(sampled)]);
            assert!(payloads.iter().all(|payload| read_request(&payload[..payload.len() - 1]).is_none()));
        }
        assert!(read_reply(&[&payload_of_reply[..], &[0]].concat(), 3).is_none());
        assert!(read_reply(&[9], 0).is_none() && read_reply(&[], 0).is_none());
    }

    #[test]
    fn errors_keep_code_and_text() {
        for error in [
            TextError::File { file: CHAT_TEMPLATE, why: "no".into() },
            TextError::NoTemplate,
            TextError::Template("t".into()),
            TextError::Tokenizer("t".into()),
            TextError::Grammar("g".into()),
            TextError::TooLong { bytes: 9, limit: 8 },
            TextError::Limit { work: super::super::PREPARING, limit: "8 tokens".into() },
        ] {
            let read = read_reply(&failure(&error), 1).unwrap().unwrap_err();
            assert_eq!((read.code(), read.to_string()), (error.code(), error.to_string()));
        }
        let long = TextError::Template("\u{e9}".repeat(ERROR_BYTES_MAX));
        assert!(read_reply(&failure(&long), 1).unwrap().unwrap_err().to_string().len() < ERROR_BYTES_MAX + 100);
    }
}
