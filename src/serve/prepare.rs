//! Turns a request body into sequences that the engine has accepted, within limits of memory and time.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::extract::Request as HttpRequest;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};
use unweight_engine::{Constraint, Request};

use super::{
    api::{Call, Prompt},
    bodies::{BODY_LIMIT, Bodies, BodyPermit, SMALL_BYTES},
    calls::MARKS,
    error::ApiError,
    frame::Endpoint,
    structure::Compiled,
    worker::{Handle, Sequences, SubmitError},
};
use crate::text::{self, EncodeLimits, Encoded, Grammar, PROCESSES, Sampled, Text, TextError};

/// How long a client may take to send the head of a request, or its body.
pub(super) const SEND_TIMEOUT: Duration = Duration::from_secs(60);
/// Requests with more than this many bytes of text need an additional permit, so that they never occupy all text
/// processes.
const LARGE_BYTES: usize = SMALL_BYTES;
/// The maximum number of compiled grammars of waiting and running requests, with about 100 MiB each at most.
const GRAMMARS_MAX: usize = 64;
/// The maximum number of prompt tokens of a request, over all its texts.
const PROMPT_TOKENS_MAX: u64 = 8 << 20;
/// The maximum number of prompt tokens of all requests in preparation.
const PENDING_TOKENS_MAX: u64 = 16 << 20;
/// The maximum number of tokens of a `/tokenize` request.
const TOKENIZE_TOKENS_MAX: u64 = 1 << 20;
/// Tokens per permit.
const TOKENS_PER_PERMIT: u64 = 256;

/// Prepares requests: parses and encodes them, and submits them to the engine.
#[derive(Clone)]
pub(super) struct Preparer {
    pub bodies: Bodies,
    pub text: Text,
    pub handle: Handle,
    pub model: Arc<str>,
    /// Special tokens that mark tool calls, and their texts.
    pub marks: Arc<[(u32, &'static str)]>,
    /// The maximum size of a prompt's text, bytes.
    text_bytes: u64,
    calls: Arc<Semaphore>,
    large_calls: Arc<Semaphore>,
    grammars: Arc<Semaphore>,
    tokens: Arc<Semaphore>,
}

/// A request that the engine has accepted.
pub(super) struct Accepted {
    pub call: Call,
    pub sequences: Sequences,
    pub prompt_tokens: u64,
    /// The prompt to echo for each sequence, and the memory that the prompts hold.
    pub echo: Option<(Vec<Arc<str>>, BodyPermit)>,
}

impl Preparer {
    pub fn new(text: Text, handle: Handle, model: &str) -> Self {
        let text_bytes = u64::from(handle.shared.limits.context).saturating_mul(text.longest_token().max(1) as u64);
        let has_tools = text.tool_format().is_some();
        let mark = |mark: &&'static str| text.special(mark).filter(|_| has_tools).map(|id| (id, *mark));
        let marks = MARKS.iter().filter_map(mark).collect();
        Self {
            marks,
            bodies: Bodies::new(),
            text_bytes,
            text,
            handle,
            model: model.into(),
            calls: Arc::new(Semaphore::new(PROCESSES)),
            large_calls: Arc::new(Semaphore::new(PROCESSES - 1)),
            grammars: Arc::new(Semaphore::new(GRAMMARS_MAX)),
            tokens: Arc::new(Semaphore::new((PENDING_TOKENS_MAX / TOKENS_PER_PERMIT) as usize)),
        }
    }

    /// Parses, encodes and submits a request. Dropping the future leaves at most one call of a text process running,
    /// which ends by its own limit.
    pub async fn accept(
        &self,
        endpoint: Endpoint,
        request: HttpRequest,
        arrived: Instant,
    ) -> Result<Accepted, ApiError> {
        // The body's memory counts for its prompts, too, until the engine has them.
        let (body, body_permit) = self.body(request).await?;
        let mut call = self.read(endpoint, body).await?;
        let capacity = self.handle.shared.capacity();
        let requested = call.prompts.len().saturating_mul(call.n as usize);
        if requested > capacity {
            return Err(SubmitError::TooMany { requested, capacity }.into());
        }
        call.sampling.check(self.handle.shared.limits.vocab)?;
        let seed = match call.sampling.seed {
            Some(seed) => seed,
            None => super::random()?,
        };
        let echoed = call.echo.then(|| call.prompts.iter().map(plain_text).collect::<Vec<_>>());
        let constraint = self.constraint(&call).await?;
        let (prompts, tokens, _token_permit) = self.encode(&mut call).await?;
        let echo = match echoed {
            Some(texts) => Some(self.echo(texts, &prompts, call.n).await?),
            None => None,
        };
        let limits = &self.handle.shared.limits;
        let ends = call.sampling.ends(&limits.eos);
        let mut requests = Vec::with_capacity(requested);
        for ids in prompts {
            // Without `max_tokens`, the rest of the context; at least one token, so that the engine reports a full
            // context.
            let context_left = u64::from(limits.context).saturating_sub(ids.len() as u64).max(1);
            let max_new_tokens = call.max_tokens.unwrap_or(u32::try_from(context_left).unwrap_or(u32::MAX));
            let request = Request::new(ids)
                .max_new_tokens(max_new_tokens)
                .stop(ends.clone())
                .adjustments(call.sampling.adjustments.clone())
                .logprobs(call.sampling.logprobs)
                .constraint(constraint.clone());
            // Each text of a prompt has its own random numbers; the first has those of a request with `n` = 1.
            let seeds = (0..u64::from(call.n)).map(|choice| seed.wrapping_add(choice));
            requests.extend(seeds.map(|seed| request.clone().params(call.sampling.params.seed(seed))));
        }
        let sequences = self.handle.submit(requests, arrived).await?;
        Ok(Accepted { call, sequences, prompt_tokens: tokens, echo: echo.map(|texts| (texts, body_permit)) })
    }

    /// Compiles the grammar that the answer must match, if any.
    async fn constraint(&self, call: &Call) -> Result<Option<Arc<dyn Constraint>>, ApiError> {
        let Call { grammar, tools, .. } = call;
        let (field, grammar) = match (tools, grammar) {
            (None, None) => return Ok(None),
            (None, Some((field, grammar))) => (*field, grammar.clone()),
            (Some(tools), grammar) => {
                let format = self.text.tool_format().ok_or_else(|| {
                    let message = "the chat template of the model has no supported format of tool calls";
                    ApiError::of("tools", format!("{message}; leave tools out")).code("unsupported_parameter")
                })?;
                let schema = grammar.as_ref().and_then(|(_, grammar)| match grammar {
                    Grammar::Schema(schema) => Some(schema.as_str()),
                    Grammar::Regex(_) | Grammar::Lark(_) => None,
                });
                let Some(grammar) = tools.grammar(format, &self.marks, schema) else { return Ok(None) };
                ("tools", grammar)
            }
        };
        let limits = &self.handle.shared.limits;
        let sampled = Sampled { vocab: limits.vocab, eos: limits.eos.clone() };
        // A grammar needs the permit of large prompts, because it may take as long as one.
        let permit = |of: &Arc<Semaphore>| Arc::clone(of).acquire_owned();
        let grammar_permit = permit(&self.grammars).await.map_err(ApiError::server)?;
        let large = permit(&self.large_calls).await.map_err(ApiError::server)?;
        let call = permit(&self.calls).await.map_err(ApiError::server)?;
        let text = self.text.clone();
        // The task owns the permits, so they are released when it ends.
        let compile = move || (text.compile(&grammar, &sampled), call, large);
        let (compiled, ..) = tokio::task::spawn_blocking(compile).await.map_err(ApiError::server)?;
        let answer = compiled.map_err(|error| ApiError::from(error).param(field))?;
        Ok(Some(Compiled::constraint(answer, grammar_permit)))
    }

    /// Returns the texts of prompts, each `n` times. Prompts of token ids are decoded.
    async fn echo(
        &self,
        texts: Vec<Option<Arc<str>>>,
        prompts: &[Vec<u32>],
        n: u32,
    ) -> Result<Vec<Arc<str>>, ApiError> {
        let mut all = Vec::with_capacity(texts.len() * n as usize);
        let mut bytes_left = BODY_LIMIT as u64;
        for (text, ids) in texts.into_iter().zip(prompts) {
            let text = match text {
                Some(text) => text,
                None => {
                    // The decoder may make the text up to four times as long.
                    let text = self.decode(ids.clone(), bytes_left / 4, "prompt").await?;
                    bytes_left = bytes_left.saturating_sub(text.len() as u64);
                    text.into()
                }
            };
            all.extend((0..n).map(|_| Arc::clone(&text)));
        }
        Ok(all)
    }

    /// Decodes the tokens in a request's field on a blocking thread, to at most `bytes_max` bytes.
    pub async fn decode(&self, ids: Vec<u32>, bytes_max: u64, field: &'static str) -> Result<String, ApiError> {
        let (tokens, context) = (ids.len(), self.handle.shared.limits.context);
        if tokens > context as usize {
            let message = format!("{field} has {tokens} tokens; the limit is {context}");
            return Err(ApiError::of(field, message).code("context_length_exceeded"));
        }
        let text = self.text.clone();
        let decoded =
            tokio::task::spawn_blocking(move || text.decode_all(&ids, bytes_max)).await.map_err(ApiError::server)?;
        let message =
            || format!("{field} has an unknown token, or decodes to more than {bytes_max} bytes; send fewer tokens");
        decoded?.ok_or_else(|| ApiError::of(field, message()))
    }

    /// Encodes a text or a conversation; with `strings`, also returns the text of each token.
    pub async fn tokens(
        &self,
        prompt: text::Prompt,
        strings: bool,
    ) -> Result<(Vec<u32>, Option<Vec<String>>), ApiError> {
        let limits =
            EncodeLimits { bytes: self.text_bytes, tokens: TOKENIZE_TOKENS_MAX, all_tokens: TOKENIZE_TOKENS_MAX };
        let (encoded, _call_permit) = self.encode_texts(vec![prompt], limits).await?;
        let ids = match encoded.into_iter().next() {
            Some(Encoded::Ids(ids)) => ids,
            Some(Encoded::TooMany(tokens)) => {
                let message =
                    format!("the text has {tokens} tokens; the limit is {TOKENIZE_TOKENS_MAX}; split the text");
                return Err(ApiError::limit(message));
            }
            None => return Err(ApiError::server("the text process returned too few prompts")),
        };
        if !strings {
            return Ok((ids, None));
        }
        let text = self.text.clone();
        let strings = move || {
            let all = ids.iter().map(|id| text.token(*id).map(|(text, _)| text)).collect::<Result<Vec<_>, _>>();
            all.map(|all| (ids, Some(all)))
        };
        Ok(tokio::task::spawn_blocking(strings).await.map_err(ApiError::server)??)
    }

    /// Reads a body, and returns the memory that it holds, too.
    pub async fn body(&self, request: HttpRequest) -> Result<(Vec<u8>, BodyPermit), ApiError> {
        let read = timeout(SEND_TIMEOUT, self.bodies.read(request)).await;
        read.map_err(|_| ApiError::timeout("sending the body", SEND_TIMEOUT.as_secs()))?
    }

    /// Parses a body: here if it is small, else on a blocking thread.
    async fn read(&self, endpoint: Endpoint, body: Vec<u8>) -> Result<Call, ApiError> {
        let (model, prompts_max) = (Arc::clone(&self.model), self.handle.shared.capacity());
        if body.len() <= SMALL_BYTES {
            return Call::read(endpoint, &body, &model, prompts_max);
        }
        let read = tokio::task::spawn_blocking(move || Call::read(endpoint, &body, &model, prompts_max));
        read.await.map_err(ApiError::server)?
    }

    /// Encodes the prompts of a call. Returns their tokens, the number of tokens, and the permit for their memory.
    async fn encode(&self, call: &mut Call) -> Result<(Vec<Vec<u32>>, u64, OwnedSemaphorePermit), ApiError> {
        let limits = &self.handle.shared.limits;
        let context = u64::from(limits.context);
        let limits_of_call = EncodeLimits {
            bytes: self.text_bytes,
            tokens: context,
            all_tokens: PROMPT_TOKENS_MAX / u64::from(call.n.max(1)),
        };
        let (mut prompts, mut texts) = (Vec::with_capacity(call.prompts.len()), Vec::new());
        for prompt in std::mem::take(&mut call.prompts) {
            prompts.push(match prompt {
                Prompt::Ids(ids) => Some(ids),
                // The length of a conversation is known after its template has run.
                Prompt::Text(text::Prompt::Text(text)) if text.len() as u64 > self.text_bytes => {
                    return Err(TextError::TooLong { bytes: text.len() as u64, limit: self.text_bytes }.into());
                }
                Prompt::Text(text) => {
                    texts.push(text);
                    None
                }
            });
        }
        // Until the tokens are counted, only as many requests as calls run at once can hold them.
        let (encoded, _call_permit) = self.encode_texts(texts, limits_of_call).await?;
        let mut encoded = encoded.into_iter();
        let mut all = Vec::with_capacity(prompts.len());
        for prompt in prompts {
            all.push(match prompt {
                Some(ids) => ids,
                None => match encoded.next() {
                    Some(Encoded::Ids(ids)) => ids,
                    Some(Encoded::TooMany(tokens)) => return Err(self.too_long(tokens, call)),
                    None => return Err(ApiError::server("the text process returned too few prompts")),
                },
            });
        }
        let tokens: u64 = all.iter().map(|ids| ids.len() as u64).sum();
        let total_tokens = tokens.saturating_mul(call.n.into());
        if total_tokens > PROMPT_TOKENS_MAX {
            let message =
                format!("the texts of the request have {total_tokens} prompt tokens; the limit is {PROMPT_TOKENS_MAX}");
            return Err(ApiError::limit(format!("{message}; split the request")));
        }
        let units = total_tokens.div_ceil(TOKENS_PER_PERMIT) as u32;
        let permit = Arc::clone(&self.tokens).acquire_many_owned(units).await.map_err(ApiError::server)?;
        Ok((all, tokens, permit))
    }

    /// Encodes texts in a text process. Returns the permit of the call, too.
    async fn encode_texts(
        &self,
        texts: Vec<text::Prompt>,
        limits: EncodeLimits,
    ) -> Result<(Vec<Encoded>, Option<OwnedSemaphorePermit>), ApiError> {
        if texts.is_empty() {
            return Ok((Vec::new(), None));
        }
        let bytes: usize = texts.iter().map(text::Prompt::bytes).sum();
        let permit = |of: &Arc<Semaphore>| Arc::clone(of).acquire_owned();
        let large =
            if bytes > LARGE_BYTES { Some(permit(&self.large_calls).await.map_err(ApiError::server)?) } else { None };
        let call = permit(&self.calls).await.map_err(ApiError::server)?;
        let text = self.text.clone();
        // Runs as its own task, which owns the permits: a client that disconnects does not wait for it.
        let encode = move || (text.encode_all(&texts, limits), call, large);
        let (encoded, call, _large) = tokio::task::spawn_blocking(encode).await.map_err(ApiError::server)?;
        Ok((encoded?, Some(call)))
    }

    fn too_long(&self, tokens: u64, call: &Call) -> ApiError {
        let prompt = usize::try_from(tokens).unwrap_or(usize::MAX);
        let (max_new_tokens, context) = (call.max_tokens.unwrap_or(1), self.handle.shared.limits.context);
        SubmitError::Admission(unweight_engine::AdmissionError::TooLong { prompt, max_new_tokens, context }).into()
    }
}

/// Returns the text of a prompt, unless it is token ids or a conversation.
fn plain_text(prompt: &Prompt) -> Option<Arc<str>> {
    match prompt {
        Prompt::Text(text::Prompt::Text(text)) => Some(text.as_str().into()),
        _ => None,
    }
}
