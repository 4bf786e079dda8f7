//! Decodes token ids, and keeps the prompts that texts of an answer start with.

use std::{borrow::Cow, io, ops::Range, sync::Arc};

use axum::body::Bytes;
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{
    bodies::{BODY_LIMIT, BodyPermit, Data, PIECE_BYTES, SMALL_BYTES, Taking, Waiting, dropped, on_thread_for},
    error::ApiError,
    frame::{AnswerChoice, Frame},
};
use crate::text::{DecodeError, Text};

/// The maximum number of large texts that wait to be decoded.
const DECODINGS_WAITING_MAX: usize = 64;

/// The number of tokens up to which texts are decoded at once if they are small.
const FEW_TOKENS: usize = 1 << 16;

/// The place for work with a large result: one result at a time is made, until it counts in a memory budget.
#[derive(Clone)]
pub(super) struct LargeWork {
    place: Arc<Semaphore>,
    waiting_max: usize,
    queue: Arc<Semaphore>,
}

impl LargeWork {
    /// Creates a place for which at most `waiting_max` results wait.
    pub fn new(waiting_max: usize) -> Self {
        Self { place: Arc::new(Semaphore::new(1)), waiting_max, queue: Arc::new(Semaphore::new(waiting_max)) }
    }

    async fn place(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        let _queued = self.queue.try_acquire().map_err(|_| ApiError::decodings(self.waiting_max))?;
        Arc::clone(&self.place).acquire_owned().await.map_err(ApiError::server)
    }

    /// Does work whose result has at most `bytes` bytes, in the place if they are many. The caller holds the returned
    /// place until the result counts.
    pub async fn run<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<(T, Option<OwnedSemaphorePermit>), ApiError> {
        let place = if bytes > SMALL_BYTES { Some(self.place().await?) } else { None };
        // The work owns the place: a client that disconnects does not end it.
        on_thread_for(bytes, move || (work(), place)).await
    }
}

/// Decodes token ids of requests.
#[derive(Clone)]
pub(super) struct Decoder {
    text: Text,
    /// The maximum number of tokens of a field.
    context: u32,
    work: LargeWork,
}

impl Decoder {
    pub fn new(text: Text, context: u32) -> Self {
        Self { text, context, work: LargeWork::new(DECODINGS_WAITING_MAX) }
    }

    /// Detokenizes a request's field to at most `bytes_max` bytes and prints the text. Returns the place of the work,
    /// too.
    pub async fn detokenize<T: Send + 'static>(
        &self,
        ids: Vec<u32>,
        bytes_max: u64,
        field: &'static str,
        print: impl FnOnce(String) -> T + Send + 'static,
    ) -> Result<(T, Option<OwnedSemaphorePermit>), ApiError> {
        let (tokens, context) = (ids.len(), self.context);
        if tokens > context as usize {
            let message = format!("{field} has {tokens} tokens; the limit is {context}");
            return Err(ApiError::of(field, message).code("context_length_exceeded"));
        }
        let text = self.text.clone();
        // Adding up the bytes of many tokens takes time, too.
        let bytes = if tokens <= FEW_TOKENS { text.bytes(&ids) } else { u64::MAX };
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let decode = move || text.decode_all(&ids, bytes_max).map(print);
        let (printed, place) = self.work.run(bytes, decode).await?;
        let printed = printed.map_err(|error| match error {
            DecodeError::UnknownToken(id) => {
                ApiError::of(field, format!("{field} has the unknown token {id}; send ids of the model's vocabulary"))
            }
            DecodeError::TooLong { bytes } => ApiError::of(
                field,
                format!(
                    "the tokens of {field} have {bytes} bytes of text; the limit is {bytes_max}; send fewer tokens"
                ),
            ),
            DecodeError::Text(error) => error.into(),
        })?;
        Ok((printed, place))
    }

    /// Returns the texts of prompts, each for `n` texts of the answer. Prompts of token ids are detokenized. `permit`
    /// is the memory of the request's body.
    pub async fn echo(
        &self,
        texts: Vec<Option<String>>,
        prompts: &[Vec<u32>],
        n: u32,
        mut permit: BodyPermit,
    ) -> Result<Echo, ApiError> {
        let (mut all, mut ends) = (Vec::new(), Vec::with_capacity(texts.len()));
        let mut bytes_left = BODY_LIMIT as u64;
        for (text, ids) in texts.into_iter().zip(prompts) {
            match text {
                // A part of the body.
                Some(text) => all.extend(text.into_bytes()),
                None => {
                    // The decoder may make the text up to four times as long.
                    let (text, _place) = self.detokenize(ids.clone(), bytes_left / 4, "prompt", |text| text).await?;
                    bytes_left = bytes_left.saturating_sub(text.len() as u64);
                    all.extend(text.into_bytes());
                    permit.grow_to(all.len())?;
                }
            }
            ends.push(all.len());
        }
        Ok(Echo { texts: Data::new(all, permit), prompts: Prompts { ends, n: n as usize } })
    }
}

/// The prompts that the texts of an answer start with.
pub(super) struct Echo {
    /// The prompts, one after another.
    texts: Data,
    prompts: Prompts,
}

/// Where the prompts of an answer's texts are.
struct Prompts {
    /// Where each ends.
    ends: Vec<usize>,
    /// The number of texts of each prompt.
    n: usize,
}

impl Prompts {
    /// Returns where the prompt of a text is; `None` after the last text.
    fn of(&self, index: usize) -> Option<Range<usize>> {
        let prompt = index.checked_div(self.n)?;
        let end = *self.ends.get(prompt)?;
        Some(prompt.checked_sub(1).map_or(0, |before| self.ends[before])..end)
    }
}

impl Echo {
    /// Returns the size of the prompts of all texts, bytes.
    pub fn bytes(&self) -> usize {
        self.texts.bytes.len().saturating_mul(self.prompts.n)
    }

    /// Returns the prompt of a text.
    pub fn text(&self, index: usize) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.texts.bytes[self.prompts.of(index).unwrap_or_default()])
    }

    /// Sends the prompts as the begin of a stream.
    pub fn stream(self, frame: Frame) -> EchoStream {
        let Self { texts, prompts } = self;
        let taking = Taking::new();
        EchoStream { texts: Some(texts.wait(taking.since())), taking, prompts, frame, index: 0, sent: 0 }
    }
}

/// The prompts at the begin of a stream, which are printed in pieces when the connection takes them.
pub(super) struct EchoStream {
    /// `None` at the end.
    texts: Option<Waiting>,
    taking: Taking,
    prompts: Prompts,
    frame: Frame,
    /// The text whose prompt is sent, and how many of the prompt's bytes were sent.
    index: usize,
    sent: usize,
}

impl EchoStream {
    /// Returns the next piece.
    pub fn next(&mut self) -> Option<io::Result<Bytes>> {
        let Some(texts) = self.texts.take()?.end() else { return Some(Err(dropped())) };
        let Range { start, end } = self.prompts.of(self.index)?;
        let begin = start + self.sent;
        let mut piece_end = end.min(begin + PIECE_BYTES);
        // The bytes of a character stay together.
        while piece_end < end && texts.bytes[piece_end] & 0xc0 == 0x80 {
            piece_end -= 1;
        }
        let text = String::from_utf8_lossy(&texts.bytes[begin..piece_end]).into_owned();
        let piece = event(&self.frame.piece(self.index, &AnswerChoice { text, ..AnswerChoice::default() }));
        (self.index, self.sent) = if piece_end == end { (self.index + 1, 0) } else { (self.index, piece_end - start) };
        self.taking.bytes += piece.len();
        if self.prompts.of(self.index).is_some() {
            self.texts = Some(texts.wait(self.taking.since()));
        }
        // Without the spare capacity of the string.
        Some(Ok(piece.into_bytes().into_boxed_slice().into()))
    }
}

/// Returns an event of a stream.
pub(super) fn event(value: &Value) -> String {
    format!("data: {value}\n\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::{bodies::Bodies, frame::Endpoint};

    #[test]
    fn echoes_are_streamed_in_pieces() {
        let bodies = Bodies::new();
        let prompts = ["é".repeat(PIECE_BYTES), String::new(), "b".to_owned()];
        let ends = prompts.iter().scan(0, |end, prompt| {
            *end += prompt.len();
            Some(*end)
        });
        let ends = ends.collect();
        let mut permit = bodies.empty_permit();
        permit.grow_to(2 * PIECE_BYTES + 1).unwrap();
        let echo = Echo { texts: Data::new(prompts.concat().into_bytes(), permit), prompts: Prompts { ends, n: 2 } };
        assert_eq!(echo.bytes(), 2 * (2 * PIECE_BYTES + 1));
        assert_eq!((echo.text(1).len(), &*echo.text(2), &*echo.text(5)), (2 * PIECE_BYTES, "", "b"));
        let mut stream = echo.stream(Frame::new(Endpoint::Completions, 1, 2, "m"));
        let mut found = vec![String::new(); 6];
        while let Some(piece) = stream.next() {
            let piece = piece.unwrap();
            let json = std::str::from_utf8(&piece).unwrap().trim_start_matches("data: ");
            let json: Value = serde_json::from_str(json).unwrap();
            let text = json["choices"][0]["text"].as_str().unwrap();
            assert!(text.len() <= PIECE_BYTES);
            found[json["choices"][0]["index"].as_u64().unwrap() as usize] += text;
        }
        assert!((0..6).all(|index| found[index] == prompts[index / 2]));
        assert_eq!(bodies.held(), 0);
    }
}
