//! `unweight serve`.

use std::{
    net::{IpAddr, TcpListener},
    path::PathBuf,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use clap::Args;
use serde::Serialize;
use unweight::{
    engine::{Engine, EngineOptions, LoadProgress},
    format::{bundle::Bundle, raw::return_freed_memory},
    model::ModelConfig,
    serve::{Backend, CpuError, CpuReference, Ended, ServeError, ServeOptions, serve},
    text::Text,
};

use super::{
    API_KEY,
    failure::{Failure, Result},
    generate::{load_draft, load_text},
    hub,
    output::Console,
    pipelines::{EngineArgs, note_bf16_experts, note_load, note_packed_experts, note_unused, saved_plan, sequences},
    progress,
    trust::Trust,
};

/// Arguments of `serve`.
#[derive(Args)]
pub struct Serve {
    /// Bundle directory, or org/name on the Hugging Face Hub
    bundle: PathBuf,
    /// Address to listen on; 0.0.0.0 is every address
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", help_heading = "Server")]
    host: IpAddr,
    /// Port to listen on; 0 is a free port, which is printed
    #[arg(long, value_name = "PORT", default_value_t = 8000, help_heading = "Server")]
    port: u16,
    /// Model name for clients [default: name of the bundle directory]
    #[arg(long, value_name = "NAME", help_heading = "Server")]
    model_name: Option<String>,
    /// API key that clients must send; visible in the process list, unlike UNWEIGHT_API_KEY
    #[arg(long, value_name = "KEY", help_heading = "Server")]
    api_key: Option<String>,
    /// Maximum waiting sequences; further requests get status 429
    #[arg(long, value_name = "N", default_value_t = 256, help_heading = "Server")]
    max_waiting: u32,
    /// Time limit per request in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=604_800), help_heading = "Server")]
    timeout: u64,
    /// Seconds for running requests to finish after a signal
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(0..=604_800), help_heading = "Server")]
    grace: u64,
    /// Maximum concurrent sequences, 1 to 1024
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = sequences(), help_heading = "Engine")]
    max_batch: u32,
    /// Maximum prompt tokens per pass, a multiple of 64 up to 8192
    #[arg(long, value_name = "N", default_value_t = 1024, help_heading = "Engine")]
    chunk: u32,
    #[command(flatten, next_help_heading = "Engine")]
    engine: EngineArgs,
    #[command(flatten)]
    trust: Trust,
    /// Run a tiny model on the CPU in f32, for tests
    #[arg(long, hide = true)]
    cpu_reference: bool,
}

impl From<CpuError> for Failure {
    fn from(error: CpuError) -> Self {
        Self::other(error)
    }
}

#[derive(Serialize)]
struct Report {
    /// Base URL of the API, such as `http://127.0.0.1:8000/v1`.
    url: String,
    /// Name that clients use.
    model: String,
    /// Tokens per sequence.
    context: u32,
    /// Concurrent sequences.
    max_batch: u32,
    /// `bf16` or `packed`.
    kv_cache: &'static str,
    /// KV cache capacity, tokens.
    cache_tokens: u64,
    /// KV cache per token.
    cache_token_bytes: u64,
    /// Load time, ms.
    load_ms: f64,
}

impl Serve {
    /// Runs the command.
    pub fn run(&self, console: Console) -> Result<()> {
        let dir = hub::bundle(&self.bundle, console)?;
        let bundle = Bundle::open(&dir)?;
        let text = load_text(&bundle, &self.bundle)?;
        let options = self.serve_options()?;
        // Fail before the model is loaded if the port is in use.
        let listener = TcpListener::bind((self.host, self.port)).map_err(|error| {
            let message = format!("cannot listen on {}:{}: {error}", self.host, self.port);
            Failure::new(
                "address-unavailable",
                message,
                "choose another --port, or 0 for a free one, or another --host",
            )
        })?;
        let start = Instant::now();
        let draft = match &self.engine.draft_model {
            Some(dir) => {
                let config = ModelConfig::of_bundle(&bundle).map_err(Failure::other)?;
                Some(load_draft(dir, (&config, Some(&text)), &self.engine_options())?)
            }
            None => None,
        };
        if self.cpu_reference {
            let model = CpuReference::load_with_draft(&bundle, draft.as_ref(), &self.engine_options());
            let mut model = model.map_err(Failure::other)?;
            return self.serve(&mut model, text, listener, options, start, console);
        }
        let kernels = self.trust.kernels(self.engine.gpu.device, Some(&bundle), console)?;
        let mut engine_options = self.engine_options();
        if self.engine.placement_args.placement.has_pipelines() {
            engine_options = engine_options.plan(saved_plan(&bundle, console));
        }
        note_unused(
            &engine_options.plan,
            self.engine.placement_args.placement,
            &bundle,
            kernels.device().info(),
            console,
        );
        let note = |loaded: &LoadProgress<'_>| note_load(console, loaded);
        let mut engine = match &draft {
            Some(draft) => Engine::load_with_draft(&kernels, &bundle, draft, engine_options, &note)?,
            None => Engine::load(&kernels, &bundle, engine_options, &note)?,
        };
        note_bf16_experts(console, &engine);
        if console.verbose > 0 {
            console.note(format_args!("loaded in {:.1} s: {}", start.elapsed().as_secs_f64(), engine.memory()));
            note_packed_experts(console, &engine);
        }
        let served = self.serve(&mut engine, text, listener, options, start, console);
        // A failed engine has reported its error.
        if console.verbose > 0
            && let Ok(Some(traffic)) = engine.expert_traffic()
        {
            console.note(traffic);
        }
        served
    }

    fn serve_options(&self) -> Result<ServeOptions> {
        let name = self.model_name.clone().or_else(|| {
            let dir = std::path::absolute(&self.bundle).ok()?;
            Some(dir.file_name()?.to_string_lossy().into_owned())
        });
        let name = name.filter(|name| !name.is_empty()).unwrap_or_else(|| "model".to_owned());
        let key = match &self.api_key {
            Some(key) => Some(key.clone()),
            // An empty value counts as unset.
            None => std::env::var_os(API_KEY)
                .filter(|key| !key.is_empty())
                .map(|key| {
                    key.into_string().map_err(|_| {
                        Failure::new(
                            "api-key-invalid",
                            format!("{API_KEY} is not UTF-8 text"),
                            "choose a key of letters and digits",
                        )
                    })
                })
                .transpose()?,
        };
        if key.as_deref().is_some_and(|key| key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_graphic())) {
            return Err(Failure::new(
                "api-key-invalid",
                "the API key is not printable ASCII without spaces, or is empty",
                "choose a key of letters and digits",
            ));
        }
        let options = ServeOptions::new(name).max_waiting(self.max_waiting as usize).api_key(key);
        Ok(options.timeout(Duration::from_secs(self.timeout)).grace(Duration::from_secs(self.grace)))
    }

    fn engine_options(&self) -> EngineOptions {
        let mut options = EngineOptions::default().max_batch(self.max_batch).chunk(self.chunk);
        // The server limits the waiting sequences; the engine queues all of them until a row is free.
        options.waiting = self.max_batch as usize + self.max_waiting as usize;
        self.engine.set(&mut options);
        options
    }

    fn serve<B: Backend>(
        &self,
        backend: &mut B,
        text: Text,
        listener: TcpListener,
        options: ServeOptions,
        start: Instant,
        console: Console,
    ) -> Result<()>
    where
        B::Error: Into<Failure> + Send + Sync + 'static,
    {
        let limits = backend.limits();
        let report = Report {
            url: format!("http://{}/v1", listener.local_addr().map_err(Failure::io("the socket has no address"))?),
            model: options.model.clone(),
            context: limits.context,
            max_batch: limits.max_batch,
            kv_cache: limits.kv_cache.tag(),
            cache_tokens: limits.cache_tokens,
            cache_token_bytes: limits.cache_token_bytes,
            load_ms: start.elapsed().as_secs_f64() * 1e3,
        };
        if !text.can_chat() {
            console.note("the model has no chat template: /v1/chat/completions is not available");
        }
        let stop = progress::cancel_flag()?;
        // Loading is over: return its freed memory to the system. From here on freed memory is returned at once.
        return_freed_memory();
        console.result("serve", &report, |out| writeln!(out, "{} at {}", report.model, report.url))?;
        match serve(backend, text, listener, options, stop.clone()) {
            Ok(Ended::Done) => {
                debug_assert!(stop.load(Ordering::Relaxed));
                Ok(())
            }
            Ok(Ended::Cut) => Err(Failure::interrupted("requests that did not finish within --grace were cut off")),
            Err(ServeError::Backend(error)) => Err(error.into()),
            Err(error) => Err(Failure::other(error)),
        }
    }
}
