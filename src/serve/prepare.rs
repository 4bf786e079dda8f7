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
    api::{ApiRequest, Prompt},
    bodies::{Bodies, BodyPermit, on_thread_for},
    echo::{Decoder, Echo, LargeWork},
    error::ApiError,
    frame::Endpoint,
    places::{FIRST_TRY_TIME, Place, Places},
    structure::Compiled,
    tool_calls::MARKS,
    worker::{Handle, Sequences, SubmitError},
};
use crate::text::{self, Answer, EncodeLimits, Encoded, Grammar, Sampled, Text, TextError};

/// How long a client may take to send the head of a request after the first, or a body.
pub(super) const SEND_TIMEOUT: Duration = Duration::from_secs(60);
/// The maximum number of prompt tokens of a request, over all its texts.
const PROMPT_TOKENS_MAX: u64 = 8 << 20;
/// The maximum number of prompt tokens of all requests in preparation.
const PENDING_TOKENS_MAX: u64 = 16 << 20;
/// The maximum number of tokens of a `/tokenize` request.
const TOKENIZE_TOKENS_MAX: u64 = 1 << 20;
/// How often the grammar of a request is compiled, because other grammars replace it before the engine has room.
const COMPILED_MAX: usize = 4;
/// Tokens per permit.
const TOKENS_PER_PERMIT: u64 = 256;

/// Prepares requests: parses and tokenizes them, and submits them to the engine.
#[derive(Clone)]
pub(super) struct Preparer {
    pub bodies: Bodies,
    /// The memory of large whole answers until connections have taken them.
    pub answers: Bodies,
    pub decoder: Decoder,
    /// Prints large answers of generated text.
    pub printing: LargeWork,
    pub text: Text,
    pub handle: Handle,
    pub model: Arc<str>,
    /// Special tokens that mark tool calls, and their texts.
    pub marks: Arc<[(u32, &'static str)]>,
    /// The maximum size of a prompt's text, bytes.
    text_bytes: u64,
    pub places: Places,
    token_permits: Arc<Semaphore>,
}

/// A grammar, after the field that contains it.
type FieldGrammar = (&'static str, Grammar);

/// A request that the engine has accepted.
pub(super) struct Accepted {
    pub request: ApiRequest,
    pub sequences: Sequences,
    pub prompt_tokens: u64,
    /// The prompts that the texts start with, if requested.
    pub echo: Option<Echo>,
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
            answers: Bodies::of_answers(),
            decoder: Decoder::new(text.clone(), handle.shared.limits.context),
            printing: LargeWork::new(Semaphore::MAX_PERMITS),
            text_bytes,
            text,
            handle,
            model: model.into(),
            places: Places::new(),
            token_permits: Arc::new(Semaphore::new((PENDING_TOKENS_MAX / TOKENS_PER_PERMIT) as usize)),
        }
    }

    /// Prepares for grammars on a thread of its own.
    pub fn prepare_for_grammars(&self) {
        let (text, sampled) = (self.text.clone(), self.sampled());
        // If this fails, the first grammar has the error.
        let prepare = move || _ = text.prepare_for_grammars(&sampled);
        let _ = std::thread::Builder::new().name("unweight-grammars".into()).spawn(prepare);
    }

    /// Returns the tokens that the engine can sample.
    fn sampled(&self) -> Sampled {
        let limits = &self.handle.shared.limits;
        Sampled { vocab: limits.vocab, eos: limits.eos.clone() }
    }

    /// Parses, tokenizes and submits a request. Dropping the future leaves at most one call of a text process running,
    /// which ends by its own limit.
    pub async fn accept(
        &self,
        endpoint: Endpoint,
        http_request: HttpRequest,
        arrived: Instant,
    ) -> Result<Accepted, ApiError> {
        // The body's memory counts for its prompts, too, until the engine has them.
        let (body, body_permit) = self.body(http_request).await?;
        let capacity = self.handle.shared.capacity();
        let parse = move |body: &[u8], model: &str| ApiRequest::read(endpoint, body, model, capacity);
        let mut request = self.parse(body, parse).await?;
        let requested = request.prompts.len().saturating_mul(request.n as usize);
        if requested > capacity {
            return Err(SubmitError::TooMany { requested, capacity }.into());
        }
        request.sampling.check(self.handle.shared.limits.vocab)?;
        let seed = match request.sampling.seed {
            Some(seed) => seed,
            None => random()?,
        };
        let echoed = request.echo.then(|| request.prompts.iter().map(plain_text).collect::<Vec<_>>());
        let grammar = self.grammar(&request)?;
        // Before the prompts, so that they take no memory while the grammar waits.
        let large = match &grammar {
            Some(grammar) => self.compile(grammar).await?,
            None => None,
        };
        let (prompts, tokens, _token_permit) = self.tokenize_prompts(&mut request).await?;
        let echo = match echoed {
            Some(texts) => Some(self.decoder.echo(texts, &prompts, request.n, body_permit).await?),
            None => None,
        };
        let constraint = match grammar {
            Some(grammar) if large.is_none() => Some(self.small(&grammar).await?),
            _ => large,
        };
        let limits = &self.handle.shared.limits;
        let ends = request.sampling.ends(&limits.eos);
        let mut requests = Vec::with_capacity(requested);
        for ids in prompts {
            // Without `max_tokens`, the rest of the context; at least one token, so that the engine reports a full
            // context.
            let context_left = u64::from(limits.context).saturating_sub(ids.len() as u64).max(1);
            let max_new_tokens = request.max_tokens.unwrap_or(u32::try_from(context_left).unwrap_or(u32::MAX));
            let sequence = Request::new(ids)
                .max_new_tokens(max_new_tokens)
                .stop(ends.clone())
                .adjustments(request.sampling.adjustments.clone())
                .logprobs(request.sampling.logprobs)
                .constraint(constraint.clone());
            // Each text of a prompt has its own random numbers; the first has those of a request with `n` = 1.
            let seeds = (0..u64::from(request.n)).map(|choice| seed.wrapping_add(choice));
            requests.extend(seeds.map(|seed| sequence.clone().params(request.sampling.params.seed(seed))));
        }
        let sequences = self.handle.submit(requests, arrived).await?;
        Ok(Accepted { request, sequences, prompt_tokens: tokens, echo })
    }

    /// Returns the grammar that the answer must match, if any, and the field that contains it.
    fn grammar(&self, request: &ApiRequest) -> Result<Option<FieldGrammar>, ApiError> {
        let ApiRequest { grammar, tools, .. } = request;
        let Some(tools) = tools else { return Ok(grammar.clone()) };
        let format = self.text.tool_format().ok_or_else(|| {
            let message = "the chat template of the model has no supported format of tool calls";
            ApiError::of("tools", format!("{message}; leave tools out")).code("unsupported_parameter")
        })?;
        let schema = grammar.as_ref().and_then(|(_, grammar)| match grammar {
            Grammar::Schema(schema) => Some(schema.as_str()),
            Grammar::Regex(_) | Grammar::Lark(_) => None,
        });
        Ok(tools.grammar(format, &self.marks, schema).map(|grammar| ("tools", grammar)))
    }

    /// Compiles a grammar unless it is kept. Returns the constraint if it is large.
    async fn compile(&self, (field, grammar): &FieldGrammar) -> Result<Option<Arc<dyn Constraint>>, ApiError> {
        let rejected = |error| ApiError::from(error).param(field);
        // The field is not the cause of other errors.
        let of_field = |error: ApiError| if error.is_rejection() { error.param(field) } else { error };
        let kept = self.text.compiled(grammar).transpose().map_err(rejected)?;
        if kept.as_ref().is_some_and(|compiled| !compiled.is_large()) {
            return Ok(None);
        }
        let compiled = match kept {
            Some(compiled) => compiled,
            None => self.compile_new(grammar).await.map_err(of_field)?,
        };
        if !compiled.is_large() {
            return Ok(None);
        }
        let permit = self.places.large_compiled()?;
        let constraint = move || Compiled::constraint(compiled, permit);
        tokio::task::spawn_blocking(constraint).await.map(Some).map_err(ApiError::server)
    }

    /// Compiles a grammar. One that takes long waits once more, for the other slow ones.
    async fn compile_new(&self, grammar: &Grammar) -> Result<Arc<Answer>, ApiError> {
        let place = self.places.grammar(grammar.text().len()).await?;
        let first = self
            .compile_in(place, grammar, |text, grammar, sampled| text.compile_within(FIRST_TRY_TIME, grammar, sampled));
        if let Some(compiled) = first.await? {
            return Ok(compiled);
        }
        let place = self.places.slow_grammar().await?;
        self.compile_in(place, grammar, |text, grammar, sampled| text.compile(grammar, sampled)).await
    }

    /// Compiles a grammar on a thread, which owns the place until it ends.
    async fn compile_in<T: Send + 'static>(
        &self,
        place: Place,
        grammar: &Grammar,
        compile: impl FnOnce(&Text, &Grammar, &Sampled) -> Result<T, TextError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let (text, grammar, sampled) = (self.text.clone(), grammar.clone(), self.sampled());
        let compile = move || {
            let _place = place;
            compile(&text, &grammar, &sampled)
        };
        Ok(tokio::task::spawn_blocking(compile).await.map_err(ApiError::server)??)
    }

    /// Returns the constraint of a small grammar that was compiled. Its permit is the last that a request waits for.
    async fn small(&self, field_grammar: &FieldGrammar) -> Result<Arc<dyn Constraint>, ApiError> {
        let (field, grammar) = field_grammar;
        for _ in 0..COMPILED_MAX {
            let permit = self.places.small_compiled().await?;
            if let Some(compiled) = self.text.compiled(grammar) {
                let compiled = compiled.map_err(|error| ApiError::from(error).param(field))?;
                return Ok(Compiled::constraint(compiled, permit));
            }
            // Other grammars have replaced it.
            drop(permit);
            if let Some(large) = self.compile(field_grammar).await? {
                return Ok(large);
            }
        }
        Err(ApiError::grammars(format!("other grammars have replaced the compiled one {COMPILED_MAX} times")))
    }

    /// Tokenizes a text or a conversation; with `strings`, also returns the text of each token.
    pub async fn tokenize(
        &self,
        prompt: text::Prompt,
        strings: bool,
    ) -> Result<(Vec<u32>, Option<Vec<String>>), ApiError> {
        let context = u64::from(self.handle.shared.limits.context);
        let tokens = if strings { context.min(TOKENIZE_TOKENS_MAX) } else { TOKENIZE_TOKENS_MAX };
        let limits = EncodeLimits { bytes: self.text_bytes, tokens, all_tokens: TOKENIZE_TOKENS_MAX };
        let (encoded, _place) = self.tokenize_texts(vec![prompt], limits).await?;
        let ids = match encoded.into_iter().next() {
            Some(Encoded::Ids(ids)) => ids,
            Some(Encoded::TooMany(found)) => {
                let message = format!("the text has {found} tokens; the limit is {tokens}; split the text");
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
    pub async fn body(&self, http_request: HttpRequest) -> Result<(Vec<u8>, BodyPermit), ApiError> {
        let read = timeout(SEND_TIMEOUT, self.bodies.read(http_request)).await;
        read.map_err(|_| ApiError::timeout("sending the body", SEND_TIMEOUT.as_secs()))?
    }

    /// Parses a body with the name of the model.
    pub async fn parse<T: Send + 'static>(
        &self,
        body: Vec<u8>,
        parse: impl FnOnce(&[u8], &str) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let model = Arc::clone(&self.model);
        on_thread_for(body.len(), move || parse(&body, &model)).await?
    }

    /// Tokenizes the prompts of a request. Returns their tokens, the number of tokens, and the permit for their memory.
    async fn tokenize_prompts(
        &self,
        request: &mut ApiRequest,
    ) -> Result<(Vec<Vec<u32>>, u64, OwnedSemaphorePermit), ApiError> {
        let limits = &self.handle.shared.limits;
        let context = u64::from(limits.context);
        let encode_limits = EncodeLimits {
            bytes: self.text_bytes,
            tokens: context,
            all_tokens: PROMPT_TOKENS_MAX / u64::from(request.n.max(1)),
        };
        let (mut prompts, mut texts) = (Vec::with_capacity(request.prompts.len()), Vec::new());
        for prompt in std::mem::take(&mut request.prompts) {
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
        // Keeps the place until the tokens have permits of their own.
        let (encoded, _place) = self.tokenize_texts(texts, encode_limits).await?;
        let mut encoded = encoded.into_iter();
        let mut all = Vec::with_capacity(prompts.len());
        for prompt in prompts {
            all.push(match prompt {
                Some(ids) => ids,
                None => match encoded.next() {
                    Some(Encoded::Ids(ids)) => ids,
                    Some(Encoded::TooMany(tokens)) => return Err(self.too_long(tokens, request)),
                    None => return Err(ApiError::server("the text process returned too few prompts")),
                },
            });
        }
        let tokens: u64 = all.iter().map(|ids| ids.len() as u64).sum();
        let total_tokens = tokens.saturating_mul(request.n.into());
        if total_tokens > PROMPT_TOKENS_MAX {
            let message =
                format!("the texts of the request have {total_tokens} prompt tokens; the limit is {PROMPT_TOKENS_MAX}");
            return Err(ApiError::limit(format!("{message}; split the request")));
        }
        let permits = total_tokens.div_ceil(TOKENS_PER_PERMIT) as u32;
        let permit = Arc::clone(&self.token_permits).acquire_many_owned(permits).await.map_err(ApiError::server)?;
        Ok((all, tokens, permit))
    }

    /// Tokenizes texts in a text process. Returns its place, too.
    async fn tokenize_texts(
        &self,
        texts: Vec<text::Prompt>,
        limits: EncodeLimits,
    ) -> Result<(Vec<Encoded>, Place), ApiError> {
        if texts.is_empty() {
            return Ok((Vec::new(), Vec::new()));
        }
        let place = self.places.text(texts.iter().map(text::Prompt::bytes).sum()).await?;
        let text = self.text.clone();
        // Runs as its own task, which owns the place: a client that disconnects does not wait for it.
        let encode = move || (text.encode_all(&texts, limits), place);
        let (encoded, place) = tokio::task::spawn_blocking(encode).await.map_err(ApiError::server)?;
        Ok((encoded?, place))
    }

    fn too_long(&self, tokens: u64, request: &ApiRequest) -> ApiError {
        let prompt = usize::try_from(tokens).unwrap_or(usize::MAX);
        let (max_new_tokens, context) = (request.max_tokens.unwrap_or(1), self.handle.shared.limits.context);
        SubmitError::Admission(unweight_engine::AdmissionError::TooLong { prompt, max_new_tokens, context }).into()
    }
}

/// Returns a random number of the system.
pub(super) fn random() -> Result<u64, ApiError> {
    getrandom::u64().map_err(|error| ApiError::server(format!("cannot get random numbers from the system: {error}")))
}

/// Returns the text of a prompt, unless it is token ids or a conversation.
fn plain_text(prompt: &Prompt) -> Option<String> {
    match prompt {
        Prompt::Text(text::Prompt::Text(text)) => Some(text.clone()),
        _ => None,
    }
}
