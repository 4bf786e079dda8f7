//! Decodes token ids to text with the vocabulary and the decoder of a tokenizer.
//!
//! Decoding runs in the serving process, for each token. So the text that a token can add is limited when a tokenizer
//! is loaded: tokens have at most [`TOKEN_BYTES_MAX`] bytes, and a decoder makes text at most [`GROWTH_MAX`] times as
//! long.

#[cfg(any(feature = "serve", test))]
use std::{collections::HashMap, sync::LazyLock};

use serde_json::Value;
use tokenizers::{Decoder, DecoderWrapper, Tokenizer};

use super::{
    TOKENIZER, catch_panic,
    error::TextError,
    frame::{Reader, Writer},
};

/// The maximum size of a token, bytes.
const TOKEN_BYTES_MAX: usize = 1024;
/// The maximum ratio of a decoded text's length to that of its tokens.
const GROWTH_MAX: usize = 4;
/// The maximum number of decoders of a tokenizer, including those inside of sequences.
const DECODERS_MAX: usize = 16;
/// The maximum size of a decoder, bytes of JSON; those of published models have a few hundred.
const DECODER_BYTES_MAX: usize = 16 << 10;

/// A token of a vocabulary.
#[derive(Debug)]
struct Token {
    id: u32,
    /// End of the token's text in [`Vocabulary::text`]; it starts where the previous token ends.
    end: u32,
    /// Whether shown text omits the token.
    special: bool,
}

/// The tokens of a model, and the decoder that turns them into text.
pub(super) struct Vocabulary {
    /// The texts of all tokens, concatenated.
    text: String,
    /// The tokens, by ascending id.
    tokens: Vec<Token>,
    decoder: Option<DecoderWrapper>,
    /// The decoder as JSON.
    source: Value,
}

impl Vocabulary {
    /// Reads the vocabulary of a tokenizer.
    ///
    /// # Errors
    /// [`TextError::File`] for a decoder or token that could lengthen a text beyond bounds.
    pub fn of(tokenizer: &Tokenizer) -> Result<Self, TextError> {
        let source = serde_json::to_value(tokenizer.get_decoder()).map_err(|error| file_error(&error))?;
        let mut ids: Vec<u32> = tokenizer.get_vocab(true).into_values().collect();
        ids.sort_unstable();
        ids.dedup();
        let added = tokenizer.get_added_vocabulary();
        let tokens = ids.into_iter().filter_map(|id| {
            let text = tokenizer.id_to_token(id)?;
            let special = added.is_special_token(&text);
            Some((id, text, special))
        });
        Self::new(tokens, source)
    }

    /// Creates a vocabulary from tokens by ascending id (id, text, whether special) and a decoder as JSON.
    fn new(entries: impl Iterator<Item = (u32, impl AsRef<str>, bool)>, source: Value) -> Result<Self, TextError> {
        let (mut text, mut tokens) = (String::new(), Vec::new());
        for (id, token, special) in entries {
            let bytes = token.as_ref().len();
            if bytes > TOKEN_BYTES_MAX {
                return Err(file_error(&format!(
                    "model.vocab or added_tokens: token {id} has {bytes} bytes, above the limit of {TOKEN_BYTES_MAX}"
                )));
            }
            text += token.as_ref();
            let end =
                u32::try_from(text.len()).map_err(|_| file_error(&"model.vocab: the tokens have 4 GiB or more"))?;
            tokens.push(Token { id, end, special });
        }
        let bytes = source.to_string().len();
        if bytes > DECODER_BYTES_MAX {
            return Err(file_error(&format!("decoder: it has {bytes} bytes, above the limit of {DECODER_BYTES_MAX}")));
        }
        let mut decoders = 0;
        let growth = growth(&source, "decoder", &mut decoders).map_err(|why| file_error(&why))?;
        if growth > GROWTH_MAX {
            return Err(file_error(&format!(
                "decoder: it may make text {growth} times as long, above the limit of {GROWTH_MAX} times"
            )));
        }
        let decoder = catch_panic(|| serde_json::from_value(source.clone()));
        let decoder = decoder.map_err(|why| file_error(&why))?.map_err(|error| file_error(&error))?;
        Ok(Self { text, tokens, decoder, source })
    }

    /// Writes the vocabulary into a frame.
    pub fn write(&self, out: &mut Writer) {
        out.bytes(self.source.to_string().as_bytes());
        out.word(self.tokens.len() as u32);
        for (at, token) in self.tokens.iter().enumerate() {
            out.word(token.id);
            out.byte(token.special.into());
            out.bytes(self.text_at(at).as_bytes());
        }
    }

    /// Reads the output of [`Vocabulary::write`]; `None` if it is invalid. Checks the limits again.
    pub fn read(reader: &mut Reader<'_>) -> Option<Result<Self, TextError>> {
        let source = serde_json::from_slice(reader.bytes()?).ok()?;
        let count = reader.word()?;
        // Invalid input ends the list early.
        let mut is_complete = true;
        let tokens = (0..count).map_while(|_| {
            let token = (|| Some((reader.word()?, reader.byte()? == 1, reader.text()?)))();
            is_complete &= token.is_some();
            token.map(|(id, special, text)| (id, text, special))
        });
        let vocabulary = Self::new(tokens, source);
        let is_sorted = |vocabulary: &Self| vocabulary.tokens.is_sorted_by(|token, next| token.id < next.id);
        (is_complete && vocabulary.as_ref().map_or(true, is_sorted)).then_some(vocabulary)
    }

    /// Returns the lowest id that has different texts in both vocabularies. Ids of one vocabulary alone do not count.
    pub fn first_difference(&self, other: &Self) -> Option<u32> {
        let differs = |(at, token): (usize, &Token)| {
            let same_id = other.index_of(token.id)?;
            (self.text_at(at) != other.text_at(same_id)).then_some(token.id)
        };
        self.tokens.iter().enumerate().find_map(differs)
    }

    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Returns the size of the longest token, bytes.
    #[cfg(any(feature = "serve", test))]
    pub fn longest(&self) -> usize {
        (0..self.tokens.len()).map(|at| self.text_at(at).len()).max().unwrap_or(0)
    }

    /// Whether the vocabulary has this token.
    #[cfg(any(feature = "serve", test))]
    pub fn has(&self, id: u32) -> bool {
        self.index_of(id).is_some()
    }

    /// Returns the size of the tokens' text before the decoder, which makes it at most [`GROWTH_MAX`] times as long;
    /// bytes.
    #[cfg(any(feature = "serve", test))]
    pub fn bytes(&self, ids: &[u32]) -> u64 {
        ids.iter().filter_map(|id| self.index_of(*id)).map(|at| self.text_at(at).len() as u64).sum()
    }

    /// Decodes tokens, including special ones.
    #[cfg(any(feature = "serve", test))]
    pub fn decode_all(&self, ids: &[u32]) -> Result<String, TextError> {
        self.decoded(ids.iter().filter_map(|id| self.index_of(*id)).map(|at| self.text_at(at).to_owned()).collect())
    }

    /// Decodes a single token to its text and its bytes, possibly a part of a character.
    #[cfg(any(feature = "serve", test))]
    pub fn token(&self, id: u32) -> Result<(String, Vec<u8>), TextError> {
        let Some(at) = self.index_of(id) else { return Ok((String::new(), Vec::new())) };
        let text = self.decode_all(&[id])?;
        let token_text = self.text_at(at);
        let bytes = if has_decoder(&self.source, "ByteLevel") {
            token_text.chars().map(|char| BYTE_OF_CHAR.get(&char).copied()).collect::<Option<Vec<u8>>>()
        } else {
            self.fallback(token_text).map(|byte| vec![byte])
        };
        let bytes = bytes.unwrap_or_else(|| text.clone().into_bytes());
        Ok((text, bytes))
    }

    /// Returns the special token with this text.
    #[cfg(any(feature = "serve", test))]
    pub fn special(&self, text: &str) -> Option<u32> {
        let at = (0..self.tokens.len()).find(|at| self.tokens[*at].special && self.text_at(*at) == text)?;
        Some(self.tokens[at].id)
    }

    /// Returns the bytes that each token below `vocab` adds to a text, by id. Ids without a token have no bytes;
    /// special tokens have 0xff before their text.
    ///
    /// # Errors
    /// A decoder whose output for a token depends on its neighbours.
    #[cfg(any(feature = "serve", test))]
    pub fn token_bytes(&self, vocab: u32) -> Result<Vec<Vec<u8>>, String> {
        let has = |name| has_decoder(&self.source, name);
        let byte_level = has("ByteLevel");
        if self.decoder.is_none() || !byte_level && !has("ByteFallback") && !has("Metaspace") && !has("Fuse") {
            return Err("the tokenizer's decoder does not give each token bytes of its own".to_owned());
        }
        let mut replaced = Vec::new();
        replacements(&self.source, &mut replaced);
        let mut all = vec![Vec::new(); vocab as usize];
        for (at, token) in self.tokens.iter().enumerate() {
            let Some(bytes) = all.get_mut(token.id as usize) else { continue };
            let text = self.text_at(at);
            *bytes = if token.special {
                [&[0xff], text.as_bytes()].concat()
            } else if byte_level {
                let bytes = text.chars().map(|char| BYTE_OF_CHAR.get(&char).copied()).collect::<Option<Vec<u8>>>();
                bytes.unwrap_or_else(|| text.as_bytes().to_vec())
            } else if let Some(byte) = self.fallback(text) {
                vec![byte]
            } else {
                replaced.iter().fold(text.to_owned(), |text, (from, to)| text.replace(from, to)).into_bytes()
            };
        }
        Ok(all)
    }

    /// Returns the byte of a byte-fallback token such as `<0x0A>`.
    #[cfg(any(feature = "serve", test))]
    fn fallback(&self, text: &str) -> Option<u8> {
        let digits = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'))?;
        let byte = u8::from_str_radix(digits, 16).ok();
        byte.filter(|_| has_decoder(&self.source, "ByteFallback"))
    }

    /// Whether a token is part of shown text: it is in the vocabulary and not special.
    pub fn is_shown(&self, id: u32) -> bool {
        self.shown(id).is_some()
    }

    /// Decodes tokens, without special ones.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TextError> {
        self.decoded(ids.iter().filter_map(|id| self.shown(*id)).map(str::to_owned).collect())
    }

    fn decoded(&self, tokens: Vec<String>) -> Result<String, TextError> {
        match &self.decoder {
            None => Ok(tokens.join(" ")),
            // Some decoders need at least one token.
            Some(_) if tokens.is_empty() => Ok(String::new()),
            Some(decoder) => catch_panic(|| decoder.decode(tokens))
                .map_err(TextError::Tokenizer)?
                .map_err(|error| TextError::Tokenizer(error.to_string())),
        }
    }

    fn shown(&self, id: u32) -> Option<&str> {
        let at = self.index_of(id)?;
        (!self.tokens[at].special).then(|| self.text_at(at))
    }

    fn index_of(&self, id: u32) -> Option<usize> {
        self.tokens.binary_search_by_key(&id, |token| token.id).ok()
    }

    fn text_at(&self, at: usize) -> &str {
        let start = at.checked_sub(1).map_or(0, |before| self.tokens[before].end);
        &self.text[start as usize..self.tokens[at].end as usize]
    }
}

/// The byte of each character in a byte-level vocabulary: printable characters of Latin-1 stand for themselves, and
/// characters from U+0100 for the other bytes, in order.
#[cfg(any(feature = "serve", test))]
static BYTE_OF_CHAR: LazyLock<HashMap<char, u8>> = LazyLock::new(|| {
    let prints = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let others = (0..=u8::MAX).filter(|byte| !prints(*byte)).zip('\u{100}'..);
    let printable = (0..=u8::MAX).filter(|byte| prints(*byte)).map(|byte| (byte, char::from(byte)));
    printable.chain(others).map(|(byte, char)| (char, byte)).collect()
});

/// Whether a decoder, or a part of a sequence, has this type.
#[cfg(any(feature = "serve", test))]
fn has_decoder(decoder: &Value, name: &str) -> bool {
    let parts = decoder["decoders"].as_array().map_or(&[][..], Vec::as_slice);
    decoder["type"].as_str() == Some(name) || parts.iter().any(|part| has_decoder(part, name))
}

/// Collects the replacements of a decoder: pairs of pattern and content.
#[cfg(any(feature = "serve", test))]
fn replacements(decoder: &Value, found: &mut Vec<(String, String)>) {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let pair = match decoder["type"].as_str() {
        Some("Replace") => text(&decoder["pattern"]["String"]).zip(text(&decoder["content"])),
        Some("Metaspace") => text(&decoder["replacement"]).map(|from| (from, " ".to_owned())),
        _ => None,
    };
    found.extend(pair);
    decoder["decoders"].as_array().into_iter().flatten().for_each(|part| replacements(part, found));
}

fn file_error(why: &dyn ToString) -> TextError {
    TextError::File { file: TOKENIZER, why: why.to_string() }
}

/// Returns by which factor a decoder can lengthen text. `field` is its path in the file, for errors.
fn growth(decoder: &Value, field: &str, decoders: &mut usize) -> Result<usize, String> {
    *decoders += 1;
    if *decoders > DECODERS_MAX {
        return Err(format!("decoder has more than {DECODERS_MAX} parts"));
    }
    Ok(match decoder["type"].as_str() {
        None => 1,
        Some("ByteFallback" | "Fuse" | "Metaspace" | "Strip") => 1,
        // Adds a space per token.
        Some("WordPiece") => 2,
        // An invalid byte becomes U+FFFD (3 bytes); an empty pattern adds a space per character.
        Some("ByteLevel" | "BPEDecoder" | "CTC") => 3,
        Some("Replace") => {
            let content = decoder["content"].as_str().map_or(usize::MAX, str::len);
            match decoder["pattern"]["String"].as_str() {
                None => {
                    return Err(format!(
                        "{field}.pattern is a regular expression, which may lengthen text without bound; use a String"
                    ));
                }
                Some("") => return Err(format!("{field}.pattern is empty, which may lengthen text without bound")),
                Some(pattern) if content.div_ceil(pattern.len()) > GROWTH_MAX => {
                    return Err(format!(
                        "{field}.content has {content} bytes for {} of the pattern, above the limit of {GROWTH_MAX} to 1",
                        pattern.len()
                    ));
                }
                Some(pattern) => content.div_ceil(pattern.len()).max(1),
            }
        }
        Some("Sequence") => {
            let parts = decoder["decoders"].as_array().map_or(&[][..], Vec::as_slice);
            let mut product: usize = 1;
            for (at, part) in parts.iter().enumerate() {
                product = product.saturating_mul(growth(part, &format!("{field}.decoders[{at}]"), decoders)?);
            }
            product
        }
        Some(other) => return Err(format!("{field} has the unknown type {other}")),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn with(decoder: Value) -> Result<Vocabulary, TextError> {
        Vocabulary::new([(0, "a", false), (2, "\u{2581}b", false), (7, "</s>", true)].into_iter(), decoder)
    }

    /// Decoders of published models.
    #[test]
    fn decoders_of_well_known_models_are_accepted() {
        let space = json!({"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "});
        let strip = json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
        let (bytes, fuse) = (json!({"type": "ByteFallback"}), json!({"type": "Fuse"}));
        for (model, decoder, expected) in [
            ("Llama 2, Mistral 7B, Phi 3", json!({"type": "Sequence", "decoders": [space, bytes, fuse, strip]}), "a b"),
            ("Gemma", json!({"type": "Sequence", "decoders": [space, bytes, fuse]}), "a b"),
            (
                "Llama 3, Qwen, Mistral NeMo, Phi 4",
                json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
                "a\u{2581}b",
            ),
            (
                "T5",
                json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true}),
                "a b",
            ),
            ("BERT", json!({"type": "WordPiece", "prefix": "##", "cleanup": true}), "a \u{2581}b"),
            ("GPT", json!({"type": "BPEDecoder", "suffix": "\u{2581}"}), "ab"),
            ("none", Value::Null, "a \u{2581}b"),
        ] {
            let vocabulary = with(decoder).unwrap_or_else(|error| panic!("{model}: {error}"));
            assert_eq!(vocabulary.decode(&[0, 7, 1, 2]).unwrap(), expected, "{model}");
            assert_eq!(vocabulary.decode(&[7]).unwrap(), "", "{model}");
            let mut out = Writer::default();
            vocabulary.write(&mut out);
            let read = Vocabulary::read(&mut Reader(&out.0)).unwrap().unwrap();
            assert_eq!(read.decode(&[0, 2]).unwrap(), expected, "{model}");
            assert_eq!((read.len(), read.longest()), (3, 4));
            assert!((0..out.0.len()).all(|cut| Vocabulary::read(&mut Reader(&out.0[..cut])).is_none()), "{model}");
        }
    }

    #[test]
    fn tokens_by_themselves_have_text_and_bytes() {
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
        let crab = ["\u{f0}\u{141}", "\u{a6}\u{122}", "\u{120}a", "<|end|>"];
        let tokens = || (0..).zip(crab).map(|(id, text)| (id, text, id == 3));
        let vocabulary = Vocabulary::new(tokens(), bytes).unwrap();
        assert_eq!(vocabulary.token(0).unwrap().1, [0xf0, 0x9f]);
        assert_eq!(vocabulary.token(2).unwrap(), (" a".to_owned(), b" a".to_vec()));
        assert_eq!(vocabulary.token(3).unwrap().0, "<|end|>", "special tokens are shown");
        assert_eq!(vocabulary.decode_all(&[2, 3, 9]).unwrap(), " a<|end|>");
        assert_eq!((vocabulary.bytes(&[2, 3, 9]), vocabulary.has(3), vocabulary.has(9)), (10, true, false));
        let fallback = json!({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]});
        let vocabulary = Vocabulary::new([(5, "<0xE6>", false), (6, "b", false)].into_iter(), fallback).unwrap();
        assert_eq!((vocabulary.token(5).unwrap().1, vocabulary.token(6).unwrap().1), (vec![0xe6], b"b".to_vec()));
        assert_eq!(vocabulary.token(7).unwrap(), (String::new(), Vec::new()));
    }

    #[test]
    fn decoders_that_lengthen_text_are_rejected_by_field() {
        let replace =
            |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
        let sequence = |parts: &[Value]| json!({"type": "Sequence", "decoders": parts});
        let double = replace(json!({"String": "a"}), "aa");
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
        for (decoder, says) in [
            (replace(json!({"Regex": "a*"}), "b"), "decoder.pattern is a regular expression"),
            (replace(json!({"String": ""}), "b"), "decoder.pattern is empty"),
            (replace(json!({"String": "a"}), &"b".repeat(5)), "decoder.content has 5 bytes for 1"),
            (sequence(&[bytes.clone(), replace(json!({"Regex": "a"}), "")]), "decoder.decoders[1].pattern"),
            (sequence(&[double.clone(), double.clone(), double.clone()]), "8 times"),
            (sequence(&[bytes, double.clone()]), "6 times"),
            (sequence(&vec![json!({"type": "Fuse"}); 16]), "more than 16 parts"),
            (sequence(&[sequence(&[sequence(&[replace(json!({"String": ""}), "")])])]), "decoders[0].decoders[0]"),
        ] {
            let error = with(decoder.clone()).map(|_| ()).unwrap_err().to_string();
            assert!(error.starts_with(TOKENIZER) && error.contains(says), "{decoder}: {error}");
        }
        assert_eq!(with(sequence(&[double.clone(), double])).unwrap().decode(&[0]).unwrap(), "aaaa");
        let long = Vocabulary::new([(3, "x".repeat(1025), false)].into_iter(), Value::Null);
        let error = long.map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("token 3 has 1025 bytes, above the limit of 1024"), "{error}");
        assert!(Vocabulary::new([(3, "x".repeat(1024), false)].into_iter(), Value::Null).is_ok());
    }
}
