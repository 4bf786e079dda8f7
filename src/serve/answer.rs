//! Collects the generated texts of an answer, and sends them as a whole or as a stream.

use std::{
    io,
    pin::Pin,
    sync::{Arc, atomic::Ordering::Relaxed},
    task::{Context, Poll},
    time::{Duration, Instant},
};

use axum::body::Bytes;
use hyper::body::Frame as BodyFrame;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    time::{timeout, timeout_at},
};
use unweight_engine::{Finish, Logprobs, NO_TOKEN};

use super::{
    api::ApiRequest,
    echo::{Echo, EchoStream, LargeWork, event},
    error::ApiError,
    frame::{AnswerChoice, Frame, SampledLogprobs, TokenLogprob, Usage},
    prepare::Preparer,
    tool_calls::ToolCalls,
    worker::{SequenceEvent, Sequences, Unavailable},
};
use crate::text::{StopStrings, Text, TextError, TextStream};

/// The maximum silence of a stream, because proxies close silent connections.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(15);
/// The maximum size of an answer that is sent as a whole, bytes of text.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// The maximum size of the pieces of a stream that wait for the connection, bytes. A larger piece waits alone.
const QUEUED_BYTES_MAX: usize = 32 << 10;

/// A text of an answer while it is generated.
struct ChoiceState {
    stream: Option<TextStream>,
    stops: StopStrings,
    /// The number of tokens before which no stop string ends the text.
    min_tokens: u32,
    tokens: u32,
    /// Log probabilities of tokens whose text is not shown yet, if requested.
    logprobs: Option<Vec<SampledLogprobs>>,
    /// The number of characters of all tokens so far.
    offset: usize,
    /// Finds tool calls in the text, if the request has tools.
    tool_calls: Option<ToolCalls>,
    /// The finish reason of an answer with tool calls.
    call_finish_reason: &'static str,
    /// Special tokens that mark tool calls, with their texts.
    marks: Arc<[(u32, &'static str)]>,
}

impl ChoiceState {
    fn new(text: &Text, request: &ApiRequest, marks: &Arc<[(u32, &'static str)]>) -> Self {
        Self {
            stream: Some(text.stream()),
            stops: StopStrings::new(request.stop.clone()),
            min_tokens: request.sampling.adjustments.min_new_tokens,
            tokens: 0,
            logprobs: request.sampling.logprobs.map(|_| Vec::new()),
            offset: 0,
            tool_calls: None,
            // OpenAI's API returns `tool_calls` only if the model chose to call.
            call_finish_reason: if request.tools.as_ref().is_some_and(|tools| tools.named) {
                "stop"
            } else {
                "tool_calls"
            },
            marks: Arc::clone(marks),
        }
    }

    /// Adds a token and returns the new text, tool calls, and the finish reason if the text ends.
    fn push(&mut self, token: u32, finish: Option<Finish>) -> Result<AnswerChoice, TextError> {
        let (text, finish) = self.push_text(token, finish)?;
        let Some(tool_calls) = &mut self.tool_calls else {
            return Ok(AnswerChoice { text, finish, ..AnswerChoice::default() });
        };
        let (mut text, mut found) = tool_calls.push(&text);
        if finish.is_some() {
            let (rest, more) = tool_calls.finish();
            text += &rest;
            found.extend(more);
        }
        let call_finish_reason = self.call_finish_reason;
        let finish =
            finish.map(|reason| if reason == "stop" && tool_calls.count > 0 { call_finish_reason } else { reason });
        Ok(AnswerChoice { text, finish, tool_calls: found, ..AnswerChoice::default() })
    }

    /// Adds a token and returns the new text, and the finish reason if the text ends.
    fn push_text(&mut self, token: u32, finish: Option<Finish>) -> Result<(String, Option<&'static str>), TextError> {
        let Some(stream) = &mut self.stream else { return Ok((String::new(), None)) };
        self.tokens += u32::from(token != NO_TOKEN);
        let mark = self.marks.iter().find(|(id, _)| self.tool_calls.is_some() && *id == token);
        let mut piece = || mark.map_or_else(|| stream.push(token), |(_, text)| Ok((*text).to_owned()));
        // The token that ends a text is not part of the text.
        let (mut shown, stopped) = match finish {
            Some(Finish::Stop) => (String::new(), false),
            _ if token == NO_TOKEN => (String::new(), false),
            _ if self.tokens <= self.min_tokens => (piece()?, false),
            _ => self.stops.push(&piece()?),
        };
        if stopped {
            self.stream = None;
            return Ok((shown, Some("stop")));
        }
        let Some(finish) = finish else { return Ok((shown, None)) };
        let mut reason = match finish {
            Finish::Stop | Finish::Complete => "stop",
            Finish::Length => "length",
            // OpenAI's API has no finish reason for NaN logits, a full cache or a grammar that becomes too complex, nor
            // for reasons that a later engine adds.
            _ => "error",
        };
        if let Some(stream) = self.stream.take() {
            let (more, stopped) = self.stops.push(&stream.finish()?);
            shown += &more;
            let (rest, stopped_in_rest) =
                if stopped { (String::new(), true) } else { std::mem::take(&mut self.stops).finish() };
            shown += &rest;
            if stopped_in_rest {
                reason = "stop";
            }
        }
        Ok((shown, Some(reason)))
    }

    /// Stores the log probabilities of a token until its text is shown.
    fn add_logprobs(&mut self, text: &Text, token: u32, logprobs: &Logprobs) -> Result<(), TextError> {
        let Some(held) = self.logprobs.as_mut().filter(|_| token != NO_TOKEN) else { return Ok(()) };
        let token_logprob = |token: u32, logprob: f32| -> Result<TokenLogprob, TextError> {
            let (text, bytes) = text.token(token)?;
            Ok(TokenLogprob { text, bytes, logprob })
        };
        let sampled = token_logprob(token, logprobs.sampled)?;
        let top =
            logprobs.top.iter().map(|(token, logprob)| token_logprob(*token, *logprob)).collect::<Result<_, _>>()?;
        let offset = self.offset;
        self.offset += sampled.text.chars().count();
        held.push(SampledLogprobs { token: sampled, top, offset });
        Ok(())
    }
}

/// A piece of one of the texts.
struct Piece {
    index: usize,
    choice: AnswerChoice,
}

/// The texts of an answer while they are generated. Dropping it ends their sequences.
pub(super) struct Texts {
    sequences: Sequences,
    text: Text,
    choices: Vec<ChoiceState>,
    printing: LargeWork,
    /// The number of texts that have not ended.
    unfinished: usize,
    usage: Usage,
    deadline: Instant,
    timeout_s: u64,
}

impl Texts {
    /// Creates the texts for the sequences of a request with `prompt_tokens` tokens in total. It has `timeout_s`
    /// seconds, until `deadline`.
    pub fn new(
        preparer: &Preparer,
        request: &ApiRequest,
        sequences: Sequences,
        prompt_tokens: u64,
        (deadline, timeout_s): (Instant, u64),
    ) -> Self {
        let Preparer { text, marks, printing, .. } = preparer;
        let choices = sequences.cancel_flags.iter().map(|_| ChoiceState::new(text, request, marks)).collect();
        Self {
            unfinished: sequences.cancel_flags.len(),
            sequences,
            text: text.clone(),
            choices,
            printing: printing.clone(),
            usage: Usage { prompt: prompt_tokens, completion: 0 },
            deadline,
            timeout_s,
        }
    }

    /// Finds tool calls in the texts. The identifiers of calls contain that of the answer.
    pub fn find_tool_calls(mut self, request: &ApiRequest, id: &str) -> Self {
        if let (Some(tools), Some(format)) = (&request.tools, self.text.tool_format()) {
            for (index, choice) in self.choices.iter_mut().enumerate() {
                choice.tool_calls =
                    Some(ToolCalls::new(format, Arc::clone(&tools.functions), format!("call-{id}-{index}-")));
            }
        }
        self
    }

    /// Returns the next piece with content; `None` when all texts have ended. Cancel-safe.
    async fn next(&mut self) -> Result<Option<Piece>, ApiError> {
        while self.unfinished > 0 {
            let event = match timeout_at(self.deadline.into(), self.sequences.events.recv()).await {
                Err(_) => return Err(ApiError::timeout("the request", self.timeout_s)),
                Ok(event) => event,
            };
            let (index, token, finish, logprobs) = match event {
                Some((index, SequenceEvent::Token(token, finish, logprobs))) => (index, token, finish, logprobs),
                Some((_, SequenceEvent::Lost(reason))) => return Err(reason.into()),
                None => return Err(Unavailable::Failed.into()),
            };
            let Some(state) = self.choices.get_mut(index).filter(|state| state.stream.is_some()) else {
                // Generated after a stop string.
                continue;
            };
            let mut choice = state.push(token, finish)?;
            if let Some(logprobs) = logprobs {
                state.add_logprobs(&self.text, token, &logprobs)?;
            }
            self.usage.completion += u64::from(token != NO_TOKEN);
            if choice.finish.is_some() {
                self.unfinished -= 1;
                if let Some(cancel_flag) = self.sequences.cancel_flags.get(index) {
                    cancel_flag.store(true, Relaxed);
                }
            }
            if !choice.is_empty() || choice.finish.is_some() {
                choice.logprobs = state.logprobs.as_mut().map(std::mem::take);
                return Ok(Some(Piece { index, choice }));
            }
        }
        Ok(None)
    }

    /// Waits for all texts and returns the JSON of the whole answer, whose texts start with `echo`. Returns the place
    /// of the printing, too.
    pub async fn complete(
        mut self,
        frame: Frame,
        echo: Option<Echo>,
    ) -> Result<(Vec<u8>, Option<OwnedSemaphorePermit>), ApiError> {
        let mut choices = vec![AnswerChoice::default(); self.choices.len()];
        let mut bytes = echo.as_ref().map_or(0, Echo::bytes);
        while let Some(Piece { index, choice }) = self.next().await? {
            bytes += choice.text.len() + choice.tool_calls.iter().map(|call| call.arguments.len()).sum::<usize>();
            bytes += choice.logprobs.iter().flatten().map(SampledLogprobs::bytes).sum::<usize>();
            if bytes > ANSWER_BYTES_MAX {
                let message =
                    format!("the answer has more than {ANSWER_BYTES_MAX} bytes; request a stream or fewer tokens");
                return Err(ApiError::limit(message));
            }
            if let Some(collected) = choices.get_mut(index) {
                collected.text.push_str(&choice.text);
                collected.tool_calls.extend(choice.tool_calls);
                collected.finish = choice.finish.or(collected.finish);
                if let Some(logprobs) = choice.logprobs {
                    collected.logprobs.get_or_insert_default().extend(logprobs);
                }
            }
        }
        let usage = self.usage;
        let print = move || {
            if let Some(echo) = echo {
                for (index, choice) in choices.iter_mut().enumerate() {
                    choice.text.insert_str(0, &echo.text(index));
                }
            }
            frame.complete(&choices, usage).to_string().into_bytes()
        };
        self.printing.run(bytes, print).await
    }

    /// Sends pieces as they are generated, until all texts have ended or the client has disconnected.
    pub async fn stream(mut self, frame: Frame, include_usage: bool, pieces: mpsc::Sender<Queued>) {
        let (deadline, room) = (self.deadline, Arc::new(Semaphore::new(QUEUED_BYTES_MAX)));
        let send = async |data: String| {
            let queue = async {
                let permits = data.capacity().min(QUEUED_BYTES_MAX) as u32;
                let permit = Arc::clone(&room).acquire_many_owned(permits).await.ok()?;
                pieces.send((data.into(), permit)).await.ok()
            };
            // A client that does not read in time counts as disconnected.
            matches!(timeout_at(deadline.into(), queue).await, Ok(Some(())))
        };
        let role: String =
            (0..self.choices.len()).filter_map(|index| frame.role(index)).map(|role| event(&role)).collect();
        if !role.is_empty() && !send(role).await {
            return;
        }
        let end = loop {
            let next = tokio::select! {
                next = timeout(KEEP_ALIVE_INTERVAL, self.next()) => next,
                () = pieces.closed() => return,
            };
            let data = match next {
                // A comment of the event stream.
                Err(_) => ": keep-alive\n\n".to_owned(),
                Ok(Ok(Some(Piece { index, choice }))) => {
                    let mut data = String::new();
                    let mut last = AnswerChoice { finish: choice.finish, ..AnswerChoice::default() };
                    // OpenAI's API sends the finish reason in an empty piece.
                    if choice.finish.is_none() || !choice.is_empty() {
                        data += &event(&frame.piece(index, &AnswerChoice { finish: None, ..choice }));
                    } else {
                        last = choice;
                    }
                    if last.finish.is_some() {
                        data += &event(&frame.piece(index, &last));
                    }
                    data
                }
                Ok(Ok(None)) => {
                    let usage = if include_usage { event(&frame.usage(self.usage)) } else { String::new() };
                    break usage + "data: [DONE]\n\n";
                }
                Ok(Err(error)) => break event(&error.json()),
            };
            if !send(data).await {
                return;
            }
        };
        // The last message: a failure to send it changes nothing.
        let _ = send(end).await;
    }
}

/// A piece of a stream that waits for the connection, and its part of [`QUEUED_BYTES_MAX`].
pub(super) type Queued = (Bytes, OwnedSemaphorePermit);

/// The body of a streamed response.
pub(super) struct Pieces {
    /// The prompts before all pieces.
    pub echo: Option<EchoStream>,
    pub pieces: mpsc::Receiver<Queued>,
}

impl hyper::body::Body for Pieces {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<BodyFrame<Bytes>, io::Error>>> {
        if let Some(piece) = self.echo.as_mut().and_then(EchoStream::next) {
            return Poll::Ready(Some(piece.map(BodyFrame::data)));
        }
        self.echo = None;
        self.pieces.poll_recv(context).map(|piece| piece.map(|(bytes, _)| Ok(BodyFrame::data(bytes))))
    }
}
