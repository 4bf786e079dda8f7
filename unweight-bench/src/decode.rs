//! Measures whole decode steps of an engine next to its BF16 baseline: the same engine with BF16 weights and cuBLAS.
//!
//! Both engines are loaded at once and run in interleaved rounds of a few recorded steps, on KV caches of random
//! values. The BF16 baseline's cuBLAS is tuned for steps: each product uses the fastest algorithm that cuBLASLt
//! proposes. Its first token uses cuBLAS's default choice. Times include the gap between two steps. They exclude the
//! copy of the tokens to the host, which overlaps the next step.

use std::{fmt, time::Instant};

use serde::Serialize;
use unweight_engine::{
    Engine, EngineError, EngineOptions, ExpertTraffic, KvCache, LoadProgress, Memory, Placement, Plan, Request,
    raw::{
        RandomStored,
        measure::{Routing, StepPhase},
        options::MAX_BATCH,
    },
};
use unweight_format::bundle::{Bundle, Profile};
use unweight_model::ModelConfig;
use unweight_rt::{DeviceError, DeviceInfo, Graph, KernelSet, Stream};

use crate::{
    BenchError,
    options::options,
    timing::Timing,
    tuned::{self, TunedRow},
};

/// The model whose steps are timed.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum DecodeModel<'a> {
    /// A bundle with its weights.
    Bundle(&'a Bundle),
    /// The shapes of a model, with random weights.
    Geometry(&'a ModelConfig),
}

options! {
    /// Options of [`bench_decode`](crate::bench_decode()).
    DecodeOptions {
        /// Concurrent sequences.
        batches: Vec<u32> = vec![1, 8, 16, 32, 64, 128, 256],
        /// Tokens in the KV cache per sequence.
        context: u32 = 1024,
        /// Tokens of the prompt whose first token is timed; 0 disables it.
        prefill: u32 = 0,
        /// Also time each part of a step alone.
        breakdown: bool = false,
        /// Also run the BF16 baseline.
        baseline: bool = true,
        /// The placement of weights; null: chosen by available memory. An engine with stored or alternate weights is
        /// also compared with a packed one.
        placement: Option<Placement> = None,
        /// The encoding of the KV cache; null: chosen by the engine. The BF16 baseline has a BF16 cache.
        #[serde(serialize_with = "cache_name")]
        kv_cache: Option<KvCache> = None,
        /// Maximum number of experts per layer in device memory; null: all.
        resident_experts: Option<u32> = None,
        /// Keep experts packed in host memory instead of compact.
        packed_link: bool = false,
        /// Which experts tokens choose, if not all experts are in device memory.
        routing: Routing = Routing::Model,
        /// Measured settings of pipelines.
        #[serde(skip)]
        plan: Plan = Plan::default(),
        /// For a geometry with pipelines: the placement of the linear layers outside of MLPs.
        #[serde(skip)]
        linears: Placement = Placement::Packed,
        /// For a geometry: also search for settings at every batch and time steps with them.
        tune: bool = false,
        /// For a geometry: the profile of the stored MLPs.
        profile: Option<Profile> = None,
    }
}

/// The result of [`bench_decode`](crate::bench_decode()).
#[derive(Clone, Debug, Serialize)]
pub struct DecodeReport {
    /// The GPU that was measured.
    pub device: DeviceInfo,
    /// Identifies the bundle; `None` for random weights.
    pub manifest_digest: Option<String>,
    /// Rounds of each figure.
    pub rounds: usize,
    /// The options of the run.
    pub options: DecodeOptions,
    /// The engines; the BF16 baseline is last.
    pub engines: Vec<EngineRow>,
    /// The tuned settings.
    pub tuned: Vec<TunedRow>,
    /// Steps, by batch and engine.
    pub rows: Vec<StepRow>,
    /// Parts of steps.
    pub parts: Vec<PartRow>,
}

/// An engine with its memory and load time.
#[derive(Clone, Debug, Serialize)]
pub struct EngineRow {
    /// The placement of weights.
    pub placement: Placement,
    /// The encoding of the KV cache: `packed` or `bf16`.
    pub kv_cache: &'static str,
    /// Bytes of the KV cache per token.
    pub cache_token_bytes: u64,
    /// Bytes of the weights on the device.
    pub weight_bytes: u64,
    /// Bytes of the KV cache.
    pub cache_bytes: u64,
    /// Bytes of everything else, the slot included.
    pub working_bytes: u64,
    /// Bytes of experts in host memory.
    pub host_bytes: u64,
    /// Load time until the engine can run its first step, s.
    pub load_s: f64,
    /// Median time from a prompt of [`DecodeOptions::prefill`] tokens to the first token, ms.
    pub first_token_ms: Option<f64>,
}

/// The times of one engine at one batch.
#[derive(Clone, Debug, Serialize)]
pub struct StepRow {
    /// Sequences per step.
    pub batch: u32,
    /// The placement of the engine, or `tuned` if it runs with tuned settings.
    pub placement: &'static str,
    /// The KV cache of the engine.
    pub kv_cache: &'static str,
    /// Median time of a step, us.
    pub median_us: f64,
    /// 10th percentile, us.
    pub p10_us: f64,
    /// 90th percentile, us.
    pub p90_us: f64,
    /// Tokens per second of all sequences together.
    pub tokens_per_s: f64,
    /// The BF16 baseline's median over this row's median.
    pub over_baseline: Option<f64>,
    /// Traffic of the timed rounds, four steps each, if not all experts are on the device.
    pub experts: Option<ExpertTraffic>,
}

/// The time of one part of a step, over all layers, measured alone.
#[derive(Clone, Debug, Serialize)]
pub struct PartRow {
    /// Sequences per step.
    pub batch: u32,
    /// The placement of the engine.
    pub placement: &'static str,
    /// The KV cache of the engine.
    pub kv_cache: &'static str,
    /// The part of a step, such as `attention`.
    pub part: &'static str,
    /// Median, us.
    pub median_us: f64,
}

/// Steps of one engine between two events.
const STEPS: u32 = 4;

/// The name of steps with tuned settings.
const TUNED: &str = "tuned";

/// Maximum rounds of a part.
const PART_ROUNDS: usize = 15;

/// Rounds that fill the slots of experts, and count which are chosen often, before steps are timed.
const EXPERT_ROUNDS: usize = 32;

/// Returns the number of rounds of a batch before steps are timed.
fn warmup_rounds(options: &DecodeOptions, timing: &Timing) -> usize {
    timing.warmup_rounds.saturating_add(if options.resident_experts.is_some() { EXPERT_ROUNDS } else { 0 })
}

/// Returns the number of steps in all rounds of a batch.
fn steps_of(options: &DecodeOptions, timing: &Timing) -> u32 {
    let rounds = timing.rounds.max(1).saturating_add(warmup_rounds(options, timing));
    u32::try_from(rounds).unwrap_or(u32::MAX).saturating_mul(STEPS)
}

/// Serializes the KV cache by its name.
fn cache_name<S: serde::Serializer>(kv_cache: &Option<KvCache>, serializer: S) -> Result<S::Ok, S::Error> {
    kv_cache.map(KvCache::tag).serialize(serializer)
}

struct Contender {
    /// The name of the engine's steps in the report.
    name: &'static str,
    engine: Engine,
}

impl Contender {
    fn kv_cache(&self) -> &'static str {
        self.engine.memory().kv_cache.tag()
    }
}

fn has_pipelines(options: &DecodeOptions) -> bool {
    options.placement.is_some_and(Placement::has_pipelines)
}

/// Returns placement and KV cache of the engines to compare; `None` is chosen at load time.
fn engines_of(options: &DecodeOptions) -> Vec<(Option<Placement>, Option<KvCache>)> {
    let kv_cache = options.kv_cache;
    let packed = has_pipelines(options).then_some((Some(Placement::Packed), kv_cache));
    let bf16 = Some(Placement::Bf16);
    let is_baseline = options.placement == bf16 && kv_cache != Some(KvCache::Packed);
    let baseline = (options.baseline && !is_baseline).then_some((bf16, Some(KvCache::Bf16)));
    packed.into_iter().chain([(options.placement, kv_cache)]).chain(baseline).collect()
}

/// Measures decode steps.
///
/// # Errors
/// Fails if both engines do not fit in memory, or if a step fails.
pub fn bench_decode(
    kernels: &KernelSet,
    model: DecodeModel<'_>,
    options: &DecodeOptions,
    timing: &Timing,
    progress: &(dyn Fn(&str) + Sync),
) -> Result<DecodeReport, BenchError> {
    let rounds = timing.rounds.max(1);
    let largest = options.batches.iter().copied().max().unwrap_or(1).clamp(1, MAX_BATCH);
    let reserve = steps_of(options, timing).max(PART_ROUNDS as u32 * 3);
    let context = options.context.saturating_add(reserve).max(options.prefill.saturating_add(64));
    let engine_options = |(placement, kv_cache): (Option<Placement>, Option<KvCache>)| {
        let chunk = if options.prefill > 0 { 2048 } else { 256 };
        let engine = EngineOptions::default().max_batch(largest).context(context).chunk(chunk);
        let mut engine = engine.plan(options.plan.clone());
        engine.placement = placement;
        engine.kv_cache = kv_cache;
        engine.resident_experts = options.resident_experts;
        engine.compact_experts = !options.packed_link;
        engine
    };
    let stored = RandomStored { profile: options.profile, linears: options.linears };
    // Search before the timed engines are loaded, so that the search has all memory, and they have it afterwards.
    let tuned = match model {
        DecodeModel::Geometry(config) if options.tune && has_pipelines(options) => {
            let searched = (engine_options((options.placement, options.kv_cache)), stored);
            tuned::search(kernels, config, searched, (&options.batches, options.context), progress)?
        }
        _ => Vec::new(),
    };
    let (mut engines, mut contenders) = (Vec::new(), Vec::new());
    for placement_and_cache in engines_of(options) {
        let start = Instant::now();
        let engine_options = engine_options(placement_and_cache);
        let on_progress = |loaded: &LoadProgress<'_>| {
            if let LoadProgress::Kernel(kernel) = loaded {
                progress(&format!("[{}/{}] {}", kernel.done, kernel.total, kernel.artifact.name));
            }
        };
        let mut engine = match model {
            DecodeModel::Bundle(bundle) => Engine::load(kernels, bundle, engine_options, &on_progress)?,
            DecodeModel::Geometry(config) => {
                Engine::random_stored(kernels, config.clone(), engine_options, stored, &on_progress)?
            }
        };
        let load_s = start.elapsed().as_secs_f64();
        let first_token_ms = match options.prefill {
            0 => None,
            tokens => Some(first_token(&mut engine, tokens, rounds.min(10))?),
        };
        let Memory { weights, cache, working, host: host_bytes, kv_cache, token, .. } = *engine.memory();
        let placement = engine.options().placement.unwrap_or_default();
        engine.measure().set_routing(options.routing);
        progress(&format!("{placement}: loaded in {load_s:.1} s, {}", engine.memory()));
        let (weight_bytes, cache_bytes, working_bytes) = (weights, cache, working);
        engines.push(EngineRow {
            placement,
            kv_cache: kv_cache.tag(),
            cache_token_bytes: token,
            weight_bytes,
            cache_bytes,
            working_bytes,
            host_bytes,
            load_s,
            first_token_ms,
        });
        contenders.push(Contender { name: placement.name(), engine });
    }
    let (mut rows, mut parts) = (Vec::new(), Vec::new());
    for &batch in &options.batches {
        for contender in &mut contenders {
            if contender.name == Placement::Bf16.name() {
                contender.engine.measure().tune_cublas(batch)?;
            }
        }
        rows.extend(steps(&mut contenders, batch, options, timing, progress)?);
        if let Some(found) = tuned.iter().find(|found| found.batch == batch) {
            let untuned = options.placement.unwrap_or_default().name();
            for contender in contenders.iter_mut().filter(|contender| contender.name == untuned) {
                contender.engine.tune_pipelines()?.set(batch, &found.setting)?;
                contender.name = TUNED;
            }
            let again = steps(&mut contenders, batch, options, timing, progress)?;
            rows.extend(again.into_iter().filter(|row| row.placement == TUNED));
            for contender in contenders.iter_mut().filter(|contender| contender.name == TUNED) {
                // A setting may apply to another batch with as many rows per step, whose initial guess must be timed as
                // such.
                let guess = contender.engine.tune_pipelines()?.guess(batch)?;
                contender.engine.tune_pipelines()?.set(batch, &guess)?;
                contender.name = untuned;
            }
        }
        if options.breakdown {
            for contender in &mut contenders {
                parts.extend(breakdown(contender, batch, options.context, rounds)?);
            }
        }
    }
    let device = kernels.device().info().clone();
    let manifest_digest = match model {
        DecodeModel::Bundle(bundle) => Some(bundle.manifest().manifest_digest.to_string()),
        DecodeModel::Geometry(_) => None,
    };
    Ok(DecodeReport { device, manifest_digest, rounds, options: options.clone(), engines, tuned, rows, parts })
}

/// Measures each phase of a step alone.
fn breakdown(contender: &mut Contender, batch: u32, context: u32, rounds: usize) -> Result<Vec<PartRow>, BenchError> {
    // A phase that samples advances to the next position in each launch.
    contender.engine.measure().prepare(batch, context, PART_ROUNDS as u32 * 3)?;
    let kv_cache = contender.kv_cache();
    // Steps that fetch experts cannot be recorded.
    let offloaded = contender.engine.options().resident_experts.is_some();
    let phases = StepPhase::ALL.into_iter().filter(|phase| !(offloaded && *phase == StepPhase::GateUp));
    let row = |phase: StepPhase| {
        let graph = contender.engine.measure().record_phase(batch, phase)?;
        let median_us = median_alone(contender.engine.stream(), &graph, rounds.min(PART_ROUNDS))?;
        Ok(PartRow { batch, placement: contender.name, kv_cache, part: phase.name(), median_us })
    };
    phases.map(row).collect()
}

fn steps(
    contenders: &mut [Contender],
    batch: u32,
    options: &DecodeOptions,
    timing: &Timing,
    progress: &(dyn Fn(&str) + Sync),
) -> Result<Vec<StepRow>, BenchError> {
    // The middle round has the requested context.
    let (warmup, step_count) = (warmup_rounds(options, timing), steps_of(options, timing));
    for contender in contenders.iter_mut() {
        contender.engine.measure().prepare(batch, options.context.saturating_sub(step_count / 2), step_count)?;
    }
    let mut times = vec![Vec::new(); contenders.len()];
    let traffic = |contenders: &mut [Contender]| -> Result<Vec<Option<ExpertTraffic>>, EngineError> {
        contenders.iter_mut().map(|contender| contender.engine.expert_traffic()).collect()
    };
    let mut before = traffic(contenders)?;
    for round in 0..warmup + timing.rounds.max(1) {
        if round == warmup {
            before = traffic(contenders)?;
        }
        for (contender, times) in contenders.iter_mut().zip(&mut times) {
            let stream = contender.engine.stream().clone();
            // Keep the device busy while the host enqueues the timed steps.
            contender.engine.measure().enqueue_step(batch)?;
            let start = stream.event()?;
            for _ in 0..STEPS - 1 {
                contender.engine.measure().enqueue_step(batch)?;
            }
            let end = stream.event()?;
            stream.synchronize()?;
            if round >= warmup {
                times.push(start.elapsed_us(&end)? / f64::from(STEPS - 1));
            }
        }
    }
    for contender in contenders.iter_mut() {
        contender.engine.measure().synchronize()?;
    }
    let after = traffic(contenders)?;
    let experts = after.into_iter().zip(before).map(|(after, before)| Some(after?.since(before?)));
    let mut rows = Vec::new();
    for ((contender, times), experts) in contenders.iter().zip(&mut times).zip(experts) {
        let [p10_us, median_us, p90_us] = quantiles(times);
        let tokens_per_s = f64::from(batch) / median_us * 1e6;
        let (placement, kv_cache, over_baseline) = (contender.name, contender.kv_cache(), None);
        rows.push(StepRow {
            batch,
            placement,
            kv_cache,
            median_us,
            p10_us,
            p90_us,
            tokens_per_s,
            over_baseline,
            experts,
        });
    }
    let is_baseline = |row: &&StepRow| row.placement == Placement::Bf16.name() && row.kv_cache == KvCache::Bf16.tag();
    if let Some(baseline) = rows.iter().find(is_baseline).map(|row| row.median_us) {
        rows.iter_mut().for_each(|row| row.over_baseline = Some(baseline / row.median_us));
    }
    for row in &rows {
        progress(&row.to_string());
    }
    Ok(rows)
}

/// Returns the 10th, 50th and 90th percentile.
fn quantiles(times: &mut [f64]) -> [f64; 3] {
    times.sort_by(f64::total_cmp);
    [0.1, 0.5, 0.9].map(|q| {
        let at = (times.len().saturating_sub(1) as f64 * q).round() as usize;
        times.get(at).copied().unwrap_or(f64::NAN)
    })
}

/// Returns the median time of a graph launched alone, us.
fn median_alone(stream: &Stream, graph: &Graph, rounds: usize) -> Result<f64, DeviceError> {
    // SAFETY: the caller borrows the engine that the graph uses until this function returns, after the last launch.
    let launch = || unsafe { graph.launch() };
    let mut times = Vec::new();
    for _ in 0..rounds + 2 {
        launch()?;
        let start = stream.event()?;
        launch()?;
        let end = stream.event()?;
        stream.synchronize()?;
        times.push(start.elapsed_us(&end)?);
    }
    Ok(quantiles(&mut times[2..])[1])
}

/// Returns the time from a prompt to its first token, as a caller of the engine measures it.
fn first_token(engine: &mut Engine, tokens: u32, rounds: usize) -> Result<f64, EngineError> {
    let vocab = engine.config().vocab;
    let mut times = Vec::new();
    for round in 0..rounds as u32 + 2 {
        let prompt = (0..tokens).map(|at| (at * 7919 + round * 31 + 5) % vocab).collect();
        engine.add(Request::new(prompt).max_new_tokens(1))?;
        let start = Instant::now();
        while !engine.is_idle() {
            engine.step()?;
        }
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(quantiles(&mut times[2..])[1])
}

impl fmt::Display for StepRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { batch, placement, kv_cache, median_us, p10_us, p90_us, tokens_per_s, over_baseline, experts } = self;
        write!(
            f,
            "batch {batch} {placement}, {kv_cache} KV cache: {median_us:.0} us ({p10_us:.0}..{p90_us:.0}), {tokens_per_s:.0} tokens/s"
        )?;
        if let Some(ratio) = over_baseline {
            write!(f, ", {ratio:.2}x the BF16 baseline")?;
        }
        match experts {
            Some(experts) => write!(f, "; {experts}"),
            None => Ok(()),
        }
    }
}

/// Prints Markdown tables.
impl fmt::Display for DecodeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DeviceInfo { name, sms, driver, .. } = &self.device;
        writeln!(
            f,
            "{name}, {sms} SMs, CUDA {driver}; context {}, median of {} rounds\n",
            self.options.context, self.rounds
        )?;
        writeln!(
            f,
            "| placement | KV cache | weights GB | KV cache GB | working GB | load s | first token ms |\n|---|---|---|---|---|---|---|"
        )?;
        for EngineRow {
            placement, kv_cache, weight_bytes, cache_bytes, working_bytes, load_s, first_token_ms, ..
        } in &self.engines
        {
            let [weights, cache, working] = [weight_bytes, cache_bytes, working_bytes].map(|bytes| *bytes as f64 / 1e9);
            let first = first_token_ms.map_or_else(String::new, |ms| format!("{ms:.1}"));
            writeln!(
                f,
                "| {placement} | {kv_cache} | {weights:.2} | {cache:.2} | {working:.2} | {load_s:.1} | {first} |"
            )?;
        }
        writeln!(
            f,
            "\n| batch | placement | KV cache | step us | p10 | p90 | tokens/s | over baseline |\n|---|---|---|---|---|---|---|---|"
        )?;
        for row in &self.rows {
            let StepRow { batch, placement, kv_cache, median_us, p10_us, p90_us, tokens_per_s, over_baseline, .. } =
                row;
            let over = over_baseline.map_or_else(String::new, |ratio| format!("{ratio:.2}"));
            writeln!(
                f,
                "| {batch} | {placement} | {kv_cache} | {median_us:.0} | {p10_us:.0} | {p90_us:.0} | {tokens_per_s:.0} | {over} |"
            )?;
        }
        if self.rows.iter().any(|row| row.experts.is_some()) {
            writeln!(
                f,
                "\n| batch | placement | hits | misses | prefetched | of these used | GB fetched | waits | ms waited |\n|---|---|---|---|---|---|---|---|---|"
            )?;
            for StepRow { batch, placement, experts, .. } in &self.rows {
                let Some(traffic) = experts else { continue };
                let ExpertTraffic { hits, misses, prefetched, prefetch_hits, bytes, stalls, stalled_us, .. } = traffic;
                let (gb, ms) = (*bytes as f64 / 1e9, stalled_us / 1e3);
                writeln!(
                    f,
                    "| {batch} | {placement} | {hits} | {misses} | {prefetched} | {prefetch_hits} | {gb:.2} | {stalls} | {ms:.1} |"
                )?;
            }
        }
        if self.parts.is_empty() {
            return Ok(());
        }
        writeln!(f, "\n| batch | placement | KV cache | part | us per step |\n|---|---|---|---|---|")?;
        for PartRow { batch, placement, kv_cache, part, median_us } in &self.parts {
            writeln!(f, "| {batch} | {placement} | {kv_cache} | {part} | {median_us:.1} |")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_of_sorted_times() {
        let mut times: Vec<f64> = (0..=100).rev().map(f64::from).collect();
        assert_eq!(quantiles(&mut times), [10.0, 50.0, 90.0]);
        assert_eq!(quantiles(&mut [3.0]), [3.0; 3]);
    }

    #[test]
    fn every_placement_is_compared_with_the_baseline() {
        let of = |placement, baseline| {
            let all = engines_of(&DecodeOptions::default().placement(placement).baseline(baseline));
            assert!(all.iter().all(|(placement, cache)| match placement {
                Some(Placement::Bf16) if baseline => cache.is_none_or(|cache| cache == KvCache::Bf16),
                _ => cache.is_none(),
            }));
            all.into_iter().map(|(placement, _)| placement.map_or("auto", Placement::name)).collect::<Vec<_>>()
        };
        assert_eq!(of(None, true), ["auto", "bf16"]);
        assert_eq!(of(Some(Placement::Compact), true), ["compact", "bf16"]);
        assert_eq!(of(Some(Placement::Bf16), true), ["bf16"]);
        assert_eq!(of(Some(Placement::Stored), true), ["packed", "stored", "bf16"]);
        assert_eq!(of(Some(Placement::Alternate), false), ["packed", "alternate"]);
        // The baseline has a BF16 cache, also next to BF16 weights with a packed cache.
        let (bf16, packed) = (Some(Placement::Bf16), Some(KvCache::Packed));
        for placement in [None, bf16, Some(Placement::Packed)] {
            let all = engines_of(&DecodeOptions::default().placement(placement).kv_cache(packed));
            assert_eq!(all, [(placement, packed), (bf16, Some(KvCache::Bf16))]);
        }
        let all = engines_of(&DecodeOptions::default().placement(bf16).kv_cache(Some(KvCache::Bf16)));
        assert_eq!(all, [(bf16, Some(KvCache::Bf16))]);
    }
}
