//! `unweight generate`.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read, Write},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use clap::Args;
use serde::Serialize;
use unweight::{
    engine::{
        AdmissionError, Engine, EngineError, EngineOptions, ExpertTraffic, Finish, LoadProgress, NO_TOKEN, Request,
        SampleParams, SeqId,
    },
    format::{Placement, bundle::Bundle},
    model::ModelConfig,
    text::{self, Message, StopStrings, Text, TextStream},
};

use super::{
    failure::{Failure, Result},
    hub,
    output::Console,
    pipelines::{EngineArgs, note_bf16_experts, note_load, note_packed_experts, note_unused, saved_plan, sequences},
    printable::printable,
    progress, scratch, text_process,
    trust::Trust,
};

/// Arguments of `generate`.
#[derive(Args)]
pub struct Generate {
    /// Bundle directory, or org/name on the Hugging Face Hub
    bundle: PathBuf,
    /// Prompt; repeatable, to run several prompts together
    #[arg(long, value_name = "TEXT", help_heading = "Prompt")]
    prompt: Vec<String>,
    /// File with a prompt; - is stdin
    #[arg(long, value_name = "FILE", help_heading = "Prompt")]
    prompt_file: Option<PathBuf>,
    /// Prompt as token ids, such as 1,450,4996; repeatable
    #[arg(long, value_name = "IDS", value_parser = parse_ids, help_heading = "Prompt", conflicts_with_all = ["prompt", "prompt_file", "chat"])]
    tokens: Vec<Ids>,
    /// Apply the model's chat template; each prompt is a user message
    #[arg(long, help_heading = "Prompt")]
    chat: bool,
    /// System message
    #[arg(long, value_name = "TEXT", requires = "chat", help_heading = "Prompt")]
    system: Option<String>,
    /// Maximum new tokens [default: 256, or 0 with --dump-logits]
    #[arg(short = 'n', long, value_name = "N", help_heading = "Sampling")]
    max_new_tokens: Option<u32>,
    /// Sampling temperature, 0.001 to 100, or 0 for greedy [default: 0, or 1 with --top-k, --top-p or --min-p]
    #[arg(long, value_name = "T", allow_negative_numbers = true, help_heading = "Sampling")]
    temperature: Option<f32>,
    /// Sample from the K likeliest tokens; 0 is all [default: 0]
    #[arg(long, value_name = "K", help_heading = "Sampling")]
    top_k: Option<u32>,
    /// Sample from the likeliest tokens with this cumulative probability, above 0, at most 1 [default: 1]
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = "Sampling")]
    top_p: Option<f32>,
    /// Sample from tokens with at least this share of the highest probability, 0 to 1 [default: 0]
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = "Sampling")]
    min_p: Option<f32>,
    /// Random seed for sampling
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Sampling")]
    seed: u64,
    /// Take sampling defaults from generation_config.json
    #[arg(long, help_heading = "Sampling")]
    model_defaults: bool,
    /// String that ends the text and is not printed; repeatable
    #[arg(long, value_name = "TEXT", help_heading = "Sampling")]
    stop: Vec<String>,
    /// Ignore the end-of-sequence token
    #[arg(long, help_heading = "Sampling")]
    ignore_eos: bool,
    /// Maximum concurrent sequences, 1 to 1024 [default: the number of prompts, at most 16]
    #[arg(long, value_name = "N", value_parser = sequences(), help_heading = "Engine")]
    max_batch: Option<u32>,
    /// Maximum prompt tokens per pass, a multiple of 64 up to 8192
    #[arg(long, value_name = "N", default_value_t = 2048, help_heading = "Engine")]
    chunk: u32,
    #[command(flatten, next_help_heading = "Engine")]
    engine: EngineArgs,
    #[command(flatten)]
    trust: Trust,
    /// Write logits of all prompt tokens to this safetensors file: BF16 `logits.I` [tokens, vocabulary]; replaces only
    /// a file of logits
    #[arg(long, value_name = "FILE", help_heading = "Logits")]
    dump_logits: Option<PathBuf>,
    /// Compute logits one token at a time, as generation does
    #[arg(long, requires = "dump_logits", help_heading = "Logits")]
    by_steps: bool,
}

#[derive(Clone)]
struct Ids(Vec<u32>);

fn parse_ids(text: &str) -> std::result::Result<Ids, String> {
    text::parse_ids(text).map(Ids).map_err(|error| error.to_string())
}

#[derive(Serialize)]
struct Report {
    /// One entry per prompt.
    sequences: Vec<Sequence>,
    /// Load time, ms.
    load_ms: f64,
    /// Time to the first token, ms.
    prefill_ms: f64,
    /// Later tokens per second, all sequences.
    tokens_per_s: Option<f64>,
    /// Weights in GPU memory.
    weight_bytes: u64,
    /// KV cache.
    cache_bytes: u64,
    /// KV cache capacity, tokens.
    cache_tokens: u64,
    /// KV cache per token.
    cache_token_bytes: u64,
    /// Activations, tables, workspaces.
    working_bytes: u64,
    /// Buffer for expanded weights.
    slot_bytes: u64,
    /// `packed`, `compact`, `bf16`, `stored` or `alternate`.
    placement: Placement,
    /// `bf16` or `packed`.
    kv_cache: &'static str,
    /// Experts in host memory (`--resident-experts`).
    host_bytes: u64,
    /// Compact experts among them; the others are packed or BF16.
    host_compact_bytes: u64,
    /// Experts fetched from host memory.
    experts: Option<ExpertTraffic>,
    /// Draft model, its KV cache included.
    draft_model_bytes: u64,
    /// Drafted tokens that steps verified (`--speculate`).
    drafted_tokens: u64,
    /// Drafted tokens that were right.
    accepted_tokens: u64,
}

#[derive(Serialize)]
struct Sequence {
    /// Tokens of the prompt.
    prompt_tokens: usize,
    /// Generated token ids, end token included.
    tokens: Vec<u32>,
    /// Text without special tokens and `--stop` text; null without a tokenizer.
    text: Option<String>,
    /// `stop` (end token or `--stop`), `length`, `nan` (all logits NaN) or `kv-cache-units-full` (no BF16 unit in a
    /// packed KV cache).
    finish: Option<&'static str>,
}

/// A sequence while it is generated.
struct SequenceState {
    report: Sequence,
    stream: Option<TextStream>,
    stops: StopStrings,
    /// Whether a stop string ended the sequence.
    stopped: bool,
}

impl SequenceState {
    /// Appends a token and returns the text to show.
    fn push(&mut self, token: u32) -> Result<String> {
        self.report.tokens.push(token);
        let Some(stream) = &mut self.stream else { return Ok(String::new()) };
        let piece = stream.push(token).map_err(Failure::other)?;
        let (shown, ended) = self.stops.push(&piece);
        self.stopped |= ended;
        self.report.text.get_or_insert_default().push_str(&shown);
        Ok(shown)
    }

    /// Ends the sequence and returns the text that was held back.
    fn finish(&mut self, reason: &'static str) -> Result<String> {
        self.report.finish = Some(reason);
        let Some(stream) = self.stream.take() else { return Ok(String::new()) };
        if self.stopped {
            return Ok(String::new());
        }
        let (mut shown, mut stopped) = self.stops.push(&stream.finish().map_err(Failure::other)?);
        if !stopped {
            let (rest, stopped_in_rest) = std::mem::take(&mut self.stops).finish();
            shown += &rest;
            stopped = stopped_in_rest;
        }
        if stopped {
            self.report.finish = Some("stop");
        }
        self.report.text.get_or_insert_default().push_str(&shown);
        Ok(shown)
    }
}

impl Generate {
    /// Runs the command.
    pub fn run(&self, console: Console) -> Result<()> {
        let dir = hub::bundle(&self.bundle, console)?;
        let bundle = Bundle::open(&dir)?;
        let config = ModelConfig::of_bundle(&bundle).map_err(Failure::other)?;
        let texts = self.texts()?;
        let text = match load_text(&bundle, &self.bundle) {
            Ok(text) => Some(text),
            Err(failure) if self.needs_text() => return Err(failure),
            Err(_) => None,
        };
        let prompts = self.prompts(&texts, text.as_ref())?;
        let params = self.params(&config, console);
        params.check().map_err(Failure::other)?;
        let mut options = self.options(prompts.len());
        if self.engine.placement_args.placement.has_pipelines() {
            options = options.plan(saved_plan(&bundle, console));
        }
        options.check().map_err(Failure::other)?;
        self.check(&config, &prompts)?;
        if let Some(file) = &self.dump_logits {
            check_replaceable(file)?;
        }
        let draft_model = self.engine.draft_model.as_deref();
        let draft = draft_model.map(|dir| load_draft(dir, (&config, text.as_ref()), &options)).transpose()?;

        let start = Instant::now();
        let kernels = self.trust.kernels(self.engine.gpu.device, Some(&bundle), console)?;
        note_unused(&options.plan, self.engine.placement_args.placement, &bundle, kernels.device().info(), console);
        let note = |loaded: &LoadProgress<'_>| note_load(console, loaded);
        let mut engine = match &draft {
            Some(draft) => Engine::load_with_draft(&kernels, &bundle, draft, options, &note)?,
            None => Engine::load(&kernels, &bundle, options, &note)?,
        };
        note_bf16_experts(console, &engine);
        // Until here a signal ends the process by default, because loading does not check the flag.
        let cancelled = progress::cancel_flag()?;
        let load_ms = start.elapsed().as_secs_f64() * 1e3;
        if console.verbose > 0 {
            console.note(format_args!("loaded in {:.1} s: {}", load_ms / 1e3, engine.memory()));
            note_packed_experts(console, &engine);
        }
        if let Some(file) = &self.dump_logits {
            self.dump(&mut engine, &prompts, file)?;
            console.note(format_args!("wrote {}", file.display()));
        }
        let mut report = self.generate(&mut engine, &prompts, params, text.as_ref(), console, &cancelled)?;
        report.load_ms = load_ms;
        if console.verbose > 0
            && let Some(rate) = report.tokens_per_s
        {
            console.note(format_args!("prompt {:.1} ms, then {rate:.1} tokens/s", report.prefill_ms));
        }
        if console.verbose > 0 && report.drafted_tokens > 0 {
            let (drafted, accepted) = (report.drafted_tokens, report.accepted_tokens);
            console.note(format_args!("{accepted} of {drafted} drafted tokens accepted"));
        }
        if console.verbose > 0
            && let Some(traffic) = &report.experts
        {
            console.note(traffic);
        }
        if console.json { console.result("generate", &report, |_| Ok(())) } else { Ok(()) }
    }

    /// Whether the arguments need a tokenizer.
    fn needs_text(&self) -> bool {
        self.tokens.is_empty() || !self.stop.is_empty()
    }

    fn texts(&self) -> Result<Vec<String>> {
        let mut texts = self.prompt.clone();
        match self.prompt_file.as_deref() {
            None => {}
            Some(file) if file.as_os_str() == "-" => {
                texts.push(io::read_to_string(io::stdin()).map_err(Failure::io("stdin"))?);
            }
            Some(file) => texts.push(fs::read_to_string(file).map_err(Failure::io(file.display()))?),
        }
        if texts.is_empty() && self.tokens.is_empty() {
            return Err(Failure::new(
                "no-prompt",
                "no prompt was given",
                "give one with --prompt, --prompt-file or --tokens",
            ));
        }
        Ok(texts)
    }

    fn prompts(&self, texts: &[String], text: Option<&Text>) -> Result<Vec<Vec<u32>>> {
        let mut prompts: Vec<_> = self.tokens.iter().map(|ids| ids.0.clone()).collect();
        for prompt in texts {
            let Some(text) = text else { break };
            let ids = if self.chat {
                let system = self.system.as_deref().map(Message::system);
                text.encode_chat(&system.into_iter().chain([Message::user(prompt)]).collect::<Vec<_>>())
            } else {
                text.encode(prompt)
            };
            prompts.push(ids.map_err(Failure::other)?);
        }
        Ok(prompts)
    }

    fn params(&self, config: &ModelConfig, console: Console) -> SampleParams {
        let mut params = SampleParams::default().seed(self.seed);
        if self.model_defaults {
            let defaults = &config.generation;
            if defaults.do_sample {
                params = params.temperature(defaults.temperature).top_k(defaults.top_k.unwrap_or(0));
                params = params.top_p(defaults.top_p).min_p(defaults.min_p);
            }
            for ignored in &defaults.ignored {
                console.note(format_args!("generation_config.json: {ignored} is not supported and is ignored"));
            }
        }
        let samples = self.top_k.is_some() || self.top_p.is_some() || self.min_p.is_some();
        // Sampling options imply sampling.
        let temperature = if samples && params.temperature == 0.0 { 1.0 } else { params.temperature };
        params.temperature = self.temperature.unwrap_or(temperature);
        params.top_k = self.top_k.unwrap_or(params.top_k);
        params.top_p = self.top_p.unwrap_or(params.top_p);
        params.min_p = self.min_p.unwrap_or(params.min_p);
        params
    }

    fn max_new_tokens(&self) -> u32 {
        self.max_new_tokens.unwrap_or(if self.dump_logits.is_some() { 0 } else { 256 })
    }

    /// Checks what the engine would reject, as far as possible before the model is loaded.
    fn check(&self, config: &ModelConfig, prompts: &[Vec<u32>]) -> Result<()> {
        let (vocab, max_new_tokens) = (config.vocab, self.max_new_tokens());
        let context = self.engine.context.unwrap_or(config.max_positions).min(config.max_positions);
        if let (Some(resident), None) = (self.engine.placement_args.resident_experts, config.mixture) {
            return Err(Failure::other(EngineError::NoExperts(resident)));
        }
        for prompt in prompts {
            if prompt.is_empty() {
                return Err(Failure::other(AdmissionError::Empty));
            }
            if let Some((at, &id)) = prompt.iter().enumerate().find(|(_, id)| **id >= vocab) {
                return Err(Failure::other(AdmissionError::UnknownToken { id, at, vocab }));
            }
            let prompt = prompt.len();
            if prompt as u64 + u64::from(max_new_tokens) > context.into() {
                return Err(Failure::other(AdmissionError::TooLong { prompt, max_new_tokens, context }));
            }
        }
        Ok(())
    }

    fn options(&self, prompts: usize) -> EngineOptions {
        let batch = self.max_batch.unwrap_or_else(|| u32::try_from(prompts).unwrap_or(u32::MAX).clamp(1, 16));
        let mut options = EngineOptions::default().max_batch(batch).chunk(self.chunk);
        options.waiting = options.waiting.max(prompts);
        self.engine.set(&mut options);
        options
    }

    fn dump(&self, engine: &mut Engine, prompts: &[Vec<u32>], file: &Path) -> Result<()> {
        let vocab = engine.config().vocab as usize;
        let mut all = Vec::with_capacity(prompts.len());
        if self.by_steps {
            let batch_size = engine.options().max_batch as usize;
            for batch_prompts in prompts.chunks(batch_size) {
                let texts: Vec<&[u32]> = batch_prompts.iter().map(Vec::as_slice).collect();
                all.extend(engine.logits_by_steps(&texts)?);
            }
        } else {
            for prompt in prompts {
                all.push(engine.logits(prompt)?);
            }
        }
        let mut header = BTreeMap::new();
        let mut offset = 0;
        for (index, logits) in all.iter().enumerate() {
            let end = offset + 2 * logits.len();
            let entry = serde_json::json!({
                "dtype": "BF16", "shape": [logits.len() / vocab, vocab], "data_offsets": [offset, end],
            });
            header.insert(format!("logits.{index}"), entry);
            offset = end;
        }
        let header = serde_json::to_vec(&header).map_err(io::Error::from).map_err(Failure::io(file.display()))?;
        let write = || -> io::Result<()> {
            let mut unfinished = scratch::unfinished(file)?;
            let mut out = io::BufWriter::new(unfinished.as_file_mut());
            out.write_all(&(header.len() as u64).to_le_bytes())?;
            out.write_all(&header)?;
            for logit in all.iter().flatten() {
                out.write_all(&logit.to_bits().to_le_bytes())?;
            }
            out.flush()?;
            drop(out);
            unfinished.persist(file).map(|_| ()).map_err(|error| error.error)
        };
        // The file may have been created meanwhile.
        check_replaceable(file)?;
        write().map_err(Failure::io(file.display()))
    }

    fn generate(
        &self,
        engine: &mut Engine,
        prompts: &[Vec<u32>],
        params: SampleParams,
        text: Option<&Text>,
        console: Console,
        cancelled: &Arc<AtomicBool>,
    ) -> Result<Report> {
        let stop = if self.ignore_eos { Vec::new() } else { engine.config().eos.clone() };
        let mut states = BTreeMap::<SeqId, SequenceState>::new();
        for prompt in prompts {
            let request = Request::new(prompt.clone()).max_new_tokens(self.max_new_tokens()).stop(stop.clone());
            let sequence = engine.add(request.params(params)).map_err(Failure::other)?;
            let report = Sequence {
                prompt_tokens: prompt.len(),
                tokens: Vec::new(),
                text: text.map(|_| String::new()),
                finish: (self.max_new_tokens() == 0).then_some("length"),
            };
            let (stream, stops) = (text.map(Text::stream), StopStrings::new(self.stop.clone()));
            states.insert(sequence, SequenceState { report, stream, stops, stopped: false });
        }
        // A single sequence is shown while it grows; several are shown at the end.
        let is_streamed = states.len() == 1 && !console.json;
        let as_ids = !self.tokens.is_empty();
        let show = |piece: &str| -> Result<()> {
            let mut out = io::stdout().lock();
            out.write_all(printable(piece).as_bytes())?;
            Ok(out.flush()?)
        };
        let (start, mut first, mut later_tokens) = (Instant::now(), None, 0u64);
        while !engine.is_idle() {
            if cancelled.load(Ordering::Relaxed) {
                return Err(Failure::interrupted("interrupted before the text was complete"));
            }
            let events = engine.step()?;
            let is_later = first.is_some();
            if !events.is_empty() {
                first.get_or_insert_with(|| start.elapsed());
            }
            for event in events {
                let Some(sequence) = states.get_mut(&event.seq) else { continue };
                if sequence.stopped {
                    continue;
                }
                let is_first = sequence.report.tokens.is_empty();
                let mut shown = match event.finish {
                    // The token that ends a text is not part of the text.
                    Some(Finish::Stop) => {
                        sequence.report.tokens.push(event.token);
                        String::new()
                    }
                    _ if event.token == NO_TOKEN => String::new(),
                    _ => sequence.push(event.token)?,
                };
                if sequence.stopped {
                    engine.cancel(event.seq);
                    shown += &sequence.finish("stop")?;
                } else if let Some(finish) = event.finish {
                    note_end(finish, &sequence.report, console);
                    shown += &sequence.finish(finish.name())?;
                }
                if is_streamed {
                    if as_ids && event.token != NO_TOKEN {
                        shown = format!("{}{}", if is_first { "" } else { "," }, event.token);
                    }
                    show(&shown)?;
                }
                later_tokens += u64::from(is_later);
            }
        }
        let total = start.elapsed();
        if is_streamed {
            show("\n")?;
        }
        let sequences: Vec<Sequence> = states.into_values().map(|sequence| sequence.report).collect();
        if !is_streamed && !console.json {
            for sequence in &sequences {
                let ids = || sequence.tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
                let text = sequence.text.clone().filter(|_| !as_ids);
                show(&format!("{}\n", text.unwrap_or_else(ids)))?;
            }
        }
        let first = first.unwrap_or(total);
        let (memory, drafts) = (*engine.memory(), engine.draft_counts());
        let seconds = (total - first.min(total)).as_secs_f64();
        Ok(Report {
            sequences,
            load_ms: 0.0,
            prefill_ms: first.as_secs_f64() * 1e3,
            tokens_per_s: (later_tokens > 0 && seconds > 0.0).then(|| later_tokens as f64 / seconds),
            weight_bytes: memory.weights,
            cache_bytes: memory.cache,
            cache_tokens: memory.tokens(),
            cache_token_bytes: memory.token,
            // A part of `working`; its own key here.
            working_bytes: memory.working.saturating_sub(memory.slot),
            slot_bytes: memory.slot,
            placement: engine.options().placement.unwrap_or_default(),
            kv_cache: memory.kv_cache.tag(),
            host_bytes: memory.host,
            host_compact_bytes: memory.host_compact,
            experts: engine.expert_traffic()?,
            draft_model_bytes: memory.draft,
            drafted_tokens: drafts.drafted,
            accepted_tokens: drafts.accepted,
        })
    }
}

/// Prints a note if a text ended for a reason other than the model's or the limit's.
fn note_end(finish: Finish, report: &Sequence, console: Console) {
    let tokens = report.prompt_tokens + report.tokens.len();
    match finish {
        Finish::NotANumber => {
            console.note(format_args!("all logits are NaN after {tokens} tokens: the text ends there"));
        }
        Finish::UnitsFull => {
            console.note(format_args!(
                "the packed KV cache has no free BF16 unit after {tokens} tokens: the text ends there; use --kv-cache \
                 bf16"
            ));
        }
        _ => {}
    }
}

/// Rejects an existing file unless it contains only logits, so that a typing error does not overwrite a shard.
fn check_replaceable(file: &Path) -> Result<()> {
    if file.symlink_metadata().is_err() {
        return Ok(());
    }
    let holds_logits = || -> io::Result<bool> {
        if !file.metadata()?.is_file() {
            return Ok(false);
        }
        let (mut open, mut length) = (fs::File::open(file)?, [0; 8]);
        if open.read_exact(&mut length).is_err() {
            return Ok(false);
        }
        // The header for a thousand prompts has about a hundred thousand bytes.
        let length = u64::from_le_bytes(length).min(16 << 20);
        let mut header = Vec::new();
        open.take(length).read_to_end(&mut header)?;
        let names = serde_json::from_slice::<BTreeMap<String, serde_json::Value>>(&header).unwrap_or_default();
        let is_logits = |name: &String| name.strip_prefix("logits.").is_some_and(|index| index.parse::<u32>().is_ok());
        Ok(!names.is_empty() && names.keys().all(is_logits))
    };
    if holds_logits().map_err(Failure::io(file.display()))? {
        return Ok(());
    }
    let message = format!("{}: exists and is not a file of logits", file.display());
    Err(Failure::new("output-not-replaceable", message, "choose another name for --dump-logits, or remove the file"))
}

/// Opens the bundle of a draft model, and checks that it can draft for a model: the vocabularies are equal, if both
/// bundles have a tokenizer.
pub fn load_draft(
    dir: &Path,
    (target, text): (&ModelConfig, Option<&Text>),
    options: &EngineOptions,
) -> Result<Bundle> {
    let draft = Bundle::open(dir)?;
    let config = ModelConfig::of_bundle(&draft).map_err(|error| EngineError::Draft(Box::new(error.into())))?;
    Engine::check_draft(target, &config, options)?;
    let has_tokenizer = draft.manifest().files.iter().any(|file| file.name() == text::TOKENIZER);
    let Some(text) = text.filter(|_| has_tokenizer) else { return Ok(draft) };
    match load_text(&draft, dir)?.first_difference(text) {
        None => Ok(draft),
        Some(id) => Err(Failure::new(
            "draft-vocabulary-differs",
            format!("{}: token {id} of the draft model differs from that of the model", dir.display()),
            "use a draft model with the tokenizer of the model",
        )),
    }
}

/// Loads the tokenizer of a bundle. Its files are not trusted: text processes read them.
pub fn load_text(bundle: &Bundle, dir: &Path) -> Result<Text> {
    /// The maximum file size, bytes. Tokenizers of published models have up to 34 MB.
    const LIMIT: u64 = 128 << 20;
    let tokenizer = bundle.copied(text::TOKENIZER, LIMIT)?.ok_or_else(|| {
        Failure::new(
            "tokenizer-missing",
            format!("{}: the bundle has no {}", dir.display(), text::TOKENIZER),
            "compress a model directory that has its tokenizer; `unweight generate --tokens` needs no tokenizer",
        )
    })?;
    let (config, template) =
        (bundle.copied(text::TOKENIZER_CONFIG, LIMIT)?, bundle.copied(text::CHAT_TEMPLATE, LIMIT)?);
    let command = text_process::command().map_err(Failure::io("the path of this program"))?;
    Text::isolated(command, &tokenizer, config.as_deref(), template.as_deref()).map_err(Failure::other)
}
