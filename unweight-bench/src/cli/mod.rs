//! Defines the arguments of `unweight-bench` and runs its commands.

mod plot;
#[cfg(test)]
mod reference;

use std::{fs, path::PathBuf};

use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};
use unweight::cli::{
    GlobalOptions, Program,
    common::Gpu,
    failure::{Coded, Failure, Result},
    output::Console,
    pipelines::{PlacementArgs, note_unused, saved_plan},
    plot::{check_can_save, save},
    profile,
    trust::{Trust, note_table},
};
use unweight_bench::{
    self as bench, BenchError, BenchOptions, DecodeModel, DecodeOptions, MatmulOptions, Plant, RivalsOptions,
    StressOptions, Timing,
};
use unweight_codegen::VariantSpec;
use unweight_engine::{EngineOptions, raw::measure::Routing};
use unweight_format::bundle::{Bundle, Profile};
use unweight_model::Geometry;
use unweight_rt::{Device, KernelSet, Remedy, env::Env, raw::choose::table::MeasuredTable};

/// Measures kernels and whole decode steps on this machine's GPU.
#[derive(Parser)]
#[command(name = "unweight-bench", version, propagate_version = true, max_term_width = 120)]
pub struct Cli {
    #[command(flatten)]
    global: GlobalOptions,
    #[command(subcommand)]
    bench: Bench,
}

impl Program for Cli {
    fn console(&self) -> Console {
        self.global.console()
    }

    fn command(&self) -> &'static str {
        self.bench.name()
    }

    fn run(&self, console: Console) -> Result<()> {
        self.bench.run(console)
    }
}

/// A [`BenchError`] as an error of the command line.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
struct BenchFailure(BenchError);

impl Coded for BenchFailure {
    fn code(&self) -> &'static str {
        self.0.code()
    }
}

/// Converts an error, with its remedy if it has one.
fn failed(error: BenchError) -> Failure {
    match error.remedy() {
        Some(remedy) => Failure::remedied(BenchFailure(error), remedy),
        None => Failure::other(BenchFailure(error)),
    }
}

fn usage(message: &'static str, help: &'static str) -> Failure {
    Failure::new("usage", message, help)
}

/// What to measure.
#[derive(Subcommand)]
enum Bench {
    /// Time all kernel families next to cuBLAS, and attention over packed KV pages next to BF16 attention
    Kernels(KernelsBench),
    /// Time matrix products from packed weights next to cuBLAS
    Matmul(MatmulBench),
    /// Time other systems' formats next to Unweight's encodings and cuBLAS
    Rivals(RivalsBench),
    /// Time decode steps of whole models next to the BF16 baseline
    Decode(DecodeBench),
    /// Time whole sequences with drafts next to the same ones without
    Speculate(SpeculateBench),
    /// Measure tables 8 to 12 of the Unweight report
    Report(ReportBench),
    /// Launch every kernel thousands of times under load and check every result
    Stress(StressBench),
}

/// The number of measured rounds of a command that times kernels.
#[derive(Args)]
struct Rounds {
    /// Measured rounds [default: 60]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    rounds: Option<u16>,
}

/// Arguments of `kernels`. Defaults are those of docs/benchmarks.md.
#[derive(Args)]
struct KernelsBench {
    /// Shape of the weights; repeatable [default: 14336,4096; 4096,14336; 4096,4096]
    #[arg(long, value_name = "N,K", value_parser = shape)]
    shape: Vec<(u32, u32)>,
    /// Batch of the products; repeatable [default: powers of 2 up to 1024]
    #[arg(long, value_name = "M", value_parser = clap::value_parser!(u32).range(1..=65536))]
    batch: Vec<u32>,
    /// Families to measure; repeatable [default: all]
    #[arg(long, value_name = "FAMILY")]
    only: Vec<Family>,
    /// Time every product variant instead of the one that dispatch selects
    #[arg(long)]
    all_variants: bool,
    #[command(flatten)]
    timing: Rounds,
    #[command(flatten)]
    gpu: Gpu,
}

/// Arguments of `matmul`. Defaults are those of docs/benchmarks.md.
#[derive(Args)]
struct MatmulBench {
    /// Shape of the weights, multiples of 64; repeatable [default: 11 shapes of published models]
    #[arg(long, value_name = "N,K", value_parser = shape)]
    shape: Vec<(u32, u32)>,
    /// Batch; repeatable [default: powers of 2 up to 4096]
    #[arg(long, value_name = "M", value_parser = clap::value_parser!(u32).range(1..=65536))]
    batch: Vec<u32>,
    /// Share of 64-element row segments with an escape, 0.005 to 0.2
    #[arg(long, value_name = "SHARE", default_value_t = 0.005, value_parser = share)]
    escapes: f64,
    /// Kind of launch [default: both]
    #[arg(long, value_name = "KIND")]
    launch: Option<Launch>,
    /// Also time the N variants that the cost model predicts fastest [default: 0, or 8 with --save-table]
    #[arg(long, value_name = "N")]
    candidates: Option<usize>,
    /// Copies to shared memory; async adds the variants without a copy engine, as on Ampere and Ada
    #[arg(long, value_name = "HOW", default_value = "bulk")]
    copy: CopyKind,
    /// Also time products from compact weights, at batches of 1 to 32
    #[arg(long)]
    compact: bool,
    /// Also time this variant; repeatable. --save-table keeps only variants that ship
    #[arg(long, value_name = "NAME")]
    variant: Vec<VariantSpec>,
    /// What to measure
    #[arg(long, value_name = "WHAT", default_value = "all")]
    measure: Measure,
    /// Dispatch table that --save-table wrote
    #[arg(long, value_name = "FILE")]
    table: Option<PathBuf>,
    #[command(flatten)]
    timing: Rounds,
    /// Plot the speedup over cuBLAS by batch to this SVG file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Save the fastest variant of each problem to FILE, or without FILE to the kernel cache for every start on this
    /// GPU model
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    save_table: Option<Option<PathBuf>>,
    #[command(flatten)]
    gpu: Gpu,
}

/// Arguments of `rivals`. Defaults are those of docs/rivals.md.
#[derive(Args)]
struct RivalsBench {
    /// Shape of the weights, multiples of 64; repeatable [default: 14336,4096]
    #[arg(long, value_name = "N,K", value_parser = shape)]
    shape: Vec<(u32, u32)>,
    /// Batch of the products; repeatable [default: 1, 8, 32 and 128]
    #[arg(long, value_name = "M", value_parser = clap::value_parser!(u32).range(1..=65536))]
    batch: Vec<u32>,
    /// What to measure; repeatable [default: all]
    #[arg(long, value_name = "WHAT")]
    only: Vec<RivalsPart>,
    #[command(flatten)]
    timing: Rounds,
    /// Plot sums of coded against plain FP8 vectors to this SVG file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    gpu: Gpu,
}

/// Arguments of `decode`. A geometry uses random weights.
#[derive(Args)]
#[command(group(ArgGroup::new("model").required(true)))]
struct DecodeBench {
    /// Bundle directory
    #[arg(group = "model")]
    bundle: Option<PathBuf>,
    /// Shapes of a published model, such as llama-3.1-8b
    #[arg(long, value_name = "NAME", group = "model", value_parser = geometry)]
    geometry: Option<Geometry>,
    /// Concurrent sequences, such as 1,8; repeatable [default: 1,8,16,32,64,128,256]
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1024))]
    batch: Vec<u32>,
    /// Tokens in the KV cache per sequence
    #[arg(long, value_name = "N", default_value_t = 1024)]
    context: u32,
    /// Also time the first token of a prompt of N tokens
    #[arg(long, value_name = "N", default_value_t = 0)]
    prefill: u32,
    /// Also time each part of a step alone
    #[arg(long)]
    breakdown: bool,
    #[command(flatten)]
    engine: PlacementArgs,
    /// Leave out the BF16 baseline on cuBLAS
    #[arg(long)]
    no_baseline: bool,
    /// Which experts tokens choose, with --resident-experts: model, or random: uniform or zipf, not prefetched
    #[arg(long, value_name = "ROUTING", default_value = "model", value_parser = routing)]
    routing: Routing,
    /// Fetch packed experts instead of compact ones, with --resident-experts
    #[arg(long, requires = "resident_experts")]
    packed_link: bool,
    /// Profile of the MLPs of --geometry, with --placement stored or alternate
    #[arg(long, value_name = "PROFILE", default_value = "inference", requires = "geometry", value_parser = profile)]
    profile: Profile,
    /// Also time steps with settings searched as by `tune`; needs --geometry and --placement stored or alternate
    #[arg(long, requires_all = ["geometry", "placement"])]
    tune: bool,
    /// Measured rounds [default: 20]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    rounds: Option<u16>,
    /// Plot the speedup over the BF16 baseline by batch to this SVG file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    gpu: Gpu,
    #[command(flatten)]
    trust: Trust,
}

/// Arguments of `speculate`. Weights are random.
#[derive(Args)]
struct SpeculateBench {
    /// Shapes of a published model
    #[arg(long, value_name = "NAME", default_value = "llama-3.1-8b", value_parser = geometry)]
    geometry: Geometry,
    /// Concurrent sequences; repeatable
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,2,4,8",
          value_parser = clap::value_parser!(u32).range(1..=64))]
    batch: Vec<u32>,
    /// Draft by a model of these shapes with random weights [default: n-gram lookup]
    #[arg(long, value_name = "NAME", value_parser = geometry)]
    draft_geometry: Option<Geometry>,
    /// Maximum drafted tokens per sequence and step
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=15))]
    speculate: u32,
    /// Prompt tokens, and as many new tokens
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(16..=8192))]
    tokens: u32,
    #[command(flatten)]
    engine: PlacementArgs,
    /// Measured rounds
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    #[command(flatten)]
    gpu: Gpu,
}

/// Arguments of `report`.
#[derive(Args)]
struct ReportBench {
    /// Shapes of a published model
    #[arg(long, value_name = "NAME", default_value = "llama-3.1-8b", value_parser = geometry)]
    geometry: Geometry,
    /// Concurrent sequences, or rows of a product; repeatable
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,64,256,512,1024",
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    batch: Vec<u32>,
    /// Tokens in the KV cache per sequence
    #[arg(long, value_name = "N", default_value_t = 64)]
    context: u32,
    /// Measured rounds
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    /// Also measure HHR-PPR with settings searched as by `tune`
    #[arg(long)]
    tune: bool,
    /// Only table 12: encoders
    #[arg(long, conflicts_with = "tune")]
    encoders: bool,
    #[command(flatten)]
    gpu: Gpu,
}

/// Arguments of `stress`.
#[derive(Args)]
struct StressBench {
    /// Launches per variant and problem
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..))]
    launches: u32,
    /// Only variants whose names contain this; repeatable
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// Leave out the load from another stream
    #[arg(long)]
    no_load: bool,
    /// Copies to shared memory; async runs only the variants without a copy engine
    #[arg(long, value_name = "HOW", default_value = "bulk")]
    copy: CopyKind,
    /// Plant a fault in the kernels that the run must find
    #[arg(long, value_name = "FAULT")]
    plant: Option<Fault>,
    #[command(flatten)]
    gpu: Gpu,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum CopyKind {
    /// Copy engine
    Bulk,
    /// Threads
    Async,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Fault {
    /// Slots are refilled without a fence, while loads may be in flight
    UnfencedRefill,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Measure {
    /// Each shape, and a layer
    All,
    /// Each shape
    Shapes,
    /// The linears of one Llama-3.1-8B layer in one graph
    Layer,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum RivalsPart {
    /// BF16 of each shape: decoded, copied from the host, multiplied
    Weights,
    /// FP8, F16 and F32 of each shape, decoded
    Elements,
    /// The linears of one Llama-3.1-8B layer
    Layer,
    /// Chained products of int8 matrices and a vector
    Int8,
    /// Sums of FP8 vectors
    Fp8,
}

/// Variants to time per problem for a dispatch table.
const TABLE_CANDIDATES: usize = 8;

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Launch {
    Ordinary,
    Dependent,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Family {
    Decode,
    Encode,
    Packed,
    Matmul,
    KvCache,
}

impl Bench {
    /// Returns the command's name, as in the JSON.
    fn name(&self) -> &'static str {
        match self {
            Self::Kernels(_) => "kernels",
            Self::Matmul(_) => "matmul",
            Self::Rivals(_) => "rivals",
            Self::Decode(_) => "decode",
            Self::Speculate(_) => "speculate",
            Self::Report(_) => "report",
            Self::Stress(_) => "stress",
        }
    }

    fn run(&self, console: Console) -> Result<()> {
        let note = |line: &str| console.note(line);
        match self {
            Self::Kernels(arguments) => {
                let kernels = open(arguments.gpu.device)?;
                let report = bench::bench_kernels(&kernels, &arguments.options(), &arguments.timing.timing(), &note)
                    .map_err(failed)?;
                console.result(self.name(), &report, |out| write!(out, "{report}"))
            }
            Self::Rivals(arguments) => {
                check_can_save(arguments.svg.as_deref())?;
                let kernels = open(arguments.gpu.device)?;
                let report = bench::bench_rivals(&kernels, &arguments.options(), &arguments.timing.timing(), &note)
                    .map_err(failed)?;
                if let Some(file) = &arguments.svg {
                    save(file, &plot::amplification(&report.rows))?;
                    console.note(format_args!("wrote {}", file.display()));
                }
                console.result(self.name(), &report, |out| write!(out, "{report}"))
            }
            Self::Matmul(arguments) => arguments.run(self.name(), console, &note),
            Self::Decode(arguments) => {
                let has_pipelines = arguments.engine.placement.has_pipelines();
                if arguments.tune && !has_pipelines {
                    let message = "--tune needs MLPs in their stored encoding, which this --placement does not keep";
                    return Err(usage(message, "pass --placement stored or alternate, or leave out --tune"));
                }
                check_can_save(arguments.svg.as_deref())?;
                let bundle = arguments.bundle.as_deref().map(Bundle::open).transpose()?;
                let config = arguments.geometry.map(Geometry::config);
                let model = match (&bundle, &config) {
                    (Some(bundle), _) => DecodeModel::Bundle(bundle),
                    (None, Some(config)) => DecodeModel::Geometry(config),
                    (None, None) => return Err(usage("no model given", "pass a bundle or --geometry NAME")),
                };
                let kernels = arguments.trust.kernels(arguments.gpu.device, bundle.as_ref(), console)?;
                let mut options = DecodeOptions::default()
                    .context(arguments.context)
                    .prefill(arguments.prefill)
                    .breakdown(arguments.breakdown)
                    .baseline(!arguments.no_baseline)
                    .resident_experts(arguments.engine.resident_experts)
                    .packed_link(arguments.packed_link)
                    .routing(arguments.routing)
                    .placement(arguments.engine.placement.0)
                    .kv_cache(arguments.engine.kv_cache.0);
                if !arguments.batch.is_empty() {
                    options.batches.clone_from(&arguments.batch);
                }
                if has_pipelines {
                    let plan = bundle.as_ref().map_or_else(Default::default, |bundle| saved_plan(bundle, console));
                    let profile = Some(arguments.profile);
                    options = options.plan(plan).profile(profile).tune(arguments.tune);
                }
                if let Some(bundle) = &bundle {
                    note_unused(&options.plan, arguments.engine.placement, bundle, kernels.device().info(), console);
                }
                let timing = Timing::default().rounds(arguments.rounds.unwrap_or(20).into()).warmup_rounds(5);
                let report = bench::bench_decode(&kernels, model, &options, &timing, &note).map_err(failed)?;
                if let Some(file) = &arguments.svg {
                    save(file, &plot::decode_steps(&report))?;
                    console.note(format_args!("wrote {}", file.display()));
                }
                console.result(self.name(), &report, |out| write!(out, "{report}"))
            }
            Self::Speculate(arguments) => arguments.run(self.name(), console, &note),
            Self::Report(arguments) => arguments.run(self.name(), console, &note),
            Self::Stress(arguments) => {
                let env = Env::process().map_err(|error| Failure::other(error.clone()))?;
                let kernels = open(arguments.gpu.device)?;
                let plant = arguments.plant.map(|Fault::UnfencedRefill| Plant::UnfencedRefill);
                let options = StressOptions::default()
                    .launches(arguments.launches)
                    .only(arguments.only.clone())
                    .load(!arguments.no_load)
                    .asynchronous(arguments.copy == CopyKind::Async)
                    .plant(plant);
                let report = bench::stress(&kernels, env, &options, &note).map_err(failed)?;
                console.result(self.name(), &report, |out| write!(out, "{report}"))?;
                if report.is_clean() {
                    return Ok(());
                }
                let (differing, wrong) = (report.differing, report.wrong);
                Err(Failure::mismatch(
                    "kernel-results-differ",
                    format!("{differing} launches differ from the first, {wrong} first outputs are wrong"),
                    "do not use these kernels on this card; report this with the output of `unweight doctor --json`",
                )
                .reported())
            }
        }
    }
}

fn open(device: usize) -> Result<KernelSet> {
    let env = Env::process().map_err(|error| Failure::other(error.clone()))?;
    let device = Device::open(device)?;
    Ok(KernelSet::open(&device, env))
}

impl Rounds {
    fn timing(&self) -> Timing {
        let timing = Timing::default();
        match self.rounds {
            Some(rounds) => timing.rounds(rounds.into()),
            None => timing,
        }
    }
}

impl MatmulBench {
    fn run(&self, command: &str, console: Console, note: &dyn Fn(&str)) -> Result<()> {
        check_can_save(self.svg.as_deref())?;
        let kernels = open(self.gpu.device)?;
        note_table(&kernels, console);
        let options = self.options(&kernels)?;
        // Fail before minutes of measuring if the table cannot be saved.
        let store = match (&self.save_table, kernels.cache().store()) {
            (Some(None), Err(why)) => {
                return Err(Failure::new(why.code(), why.to_string(), "pass a file: --save-table FILE"));
            }
            (Some(None), Ok(store)) => Some(store),
            _ => None,
        };
        let report = bench::bench_matmul(&kernels, &options, &self.timing.timing(), note).map_err(failed)?;
        if let Some(file) = &self.svg {
            save(file, &plot::speedups(&report.rows))?;
            console.note(format_args!("wrote {}", file.display()));
        }
        let registered = kernels.chooser().registered();
        if let Some(Some(file)) = &self.save_table {
            fs::write(file, report.table(registered).to_json()).map_err(Failure::io(file.display()))?;
            console.note(format_args!("wrote {}", file.display()));
        }
        if let Some(store) = store {
            let info = kernels.device().info();
            let path = store.table_path(&info.name);
            // A table that cannot be read or followed is replaced.
            let existing = MeasuredTable::read(&path, &info.name, info.arch, registered).unwrap_or_default();
            let table = report.table(registered).over(&existing).to_json();
            let path = store.keep_table(&info.name, table.as_bytes()).map_err(Failure::io(path.display()))?;
            console.note(format_args!("saved {}; every start on this GPU model uses it", path.display()));
        }
        console.result(command, &report, |out| write!(out, "{report}"))
    }

    fn options(&self, kernels: &KernelSet) -> Result<MatmulOptions> {
        let (info, registered) = (kernels.device().info(), kernels.chooser().registered());
        let read = |path| MeasuredTable::read(path, &info.name, info.arch, registered);
        let table = self.table.as_deref().map(read).transpose();
        let mut options = MatmulOptions::default()
            .escapes(self.escapes)
            .ordinary(self.launch != Some(Launch::Dependent))
            .pdl(self.launch != Some(Launch::Ordinary))
            // Without candidates, a table would only repeat what dispatch selects anyway.
            .candidates(self.candidates.unwrap_or(if self.save_table.is_some() { TABLE_CANDIDATES } else { 0 }))
            .asynchronous(self.copy == CopyKind::Async)
            .compact(self.compact)
            .variants(self.variant.clone())
            .layer(self.measure != Measure::Shapes)
            .table(table.map_err(|error| Failure::remedied(error, Remedy::MeasureTable))?);
        if self.measure == Measure::Layer {
            options.shapes.clear();
        } else if !self.shape.is_empty() {
            options.shapes.clone_from(&self.shape);
        }
        if !self.batch.is_empty() {
            options.batches.clone_from(&self.batch);
        }
        Ok(options)
    }
}

impl ReportBench {
    fn run(&self, command: &str, console: Console, note: &(dyn Fn(&str) + Sync)) -> Result<()> {
        let kernels = open(self.gpu.device)?;
        let timing = Timing::default().rounds(self.rounds.into()).warmup_rounds(5);
        let tables = if self.encoders {
            bench::bench_encoders(&kernels, &timing)
        } else {
            let selection = (self.batch.as_slice(), self.context, self.tune);
            bench::bench_tables(&kernels, &self.geometry.config(), selection, &timing, note)
        };
        let tables = tables.map_err(failed)?;
        console.result(command, &tables, |out| write!(out, "{tables}"))
    }
}

impl SpeculateBench {
    fn run(&self, command: &str, console: Console, note: &(dyn Fn(&str) + Sync)) -> Result<()> {
        let kernels = open(self.gpu.device)?;
        let mut options = EngineOptions::default().speculate(self.speculate);
        (options.placement, options.kv_cache) = (self.engine.placement.0, self.engine.kv_cache.0);
        options.resident_experts = self.engine.resident_experts;
        let selection = (self.batch.as_slice(), self.tokens, self.rounds.into());
        let models = (self.geometry, self.draft_geometry);
        let report = bench::bench_speculate(&kernels, models, &options, selection, note);
        let report = report.map_err(failed)?;
        console.result(command, &report, |out| write!(out, "{report}"))
    }
}

impl RivalsBench {
    fn options(&self) -> RivalsOptions {
        let selects = |part| self.only.is_empty() || self.only.contains(&part);
        let mut options = RivalsOptions::default()
            .weights(selects(RivalsPart::Weights))
            .elements(selects(RivalsPart::Elements))
            .layer(selects(RivalsPart::Layer));
        if !self.shape.is_empty() {
            options.shapes.clone_from(&self.shape);
        }
        if !self.batch.is_empty() {
            options.batches.clone_from(&self.batch);
        }
        if !selects(RivalsPart::Int8) {
            options.int8 = 0;
        }
        if !selects(RivalsPart::Fp8) {
            options.fp8_mib.clear();
        }
        options
    }
}

impl KernelsBench {
    fn options(&self) -> BenchOptions {
        let mut options = BenchOptions::default().all_variants(self.all_variants);
        if !self.shape.is_empty() {
            options.shapes.clone_from(&self.shape);
        }
        if !self.batch.is_empty() {
            options.batches.clone_from(&self.batch);
        }
        if !self.only.is_empty() {
            options.decode = self.only.contains(&Family::Decode);
            options.encode = self.only.contains(&Family::Encode);
            options.packed = self.only.contains(&Family::Packed);
            options.matmul = self.only.contains(&Family::Matmul);
            options.kv_cache = self.only.contains(&Family::KvCache);
        }
        options
    }
}

fn geometry(text: &str) -> std::result::Result<Geometry, String> {
    Geometry::named(text).map_err(|error| error.to_string())
}

fn routing(text: &str) -> std::result::Result<Routing, String> {
    let named = Routing::ALL.iter().find(|routing| routing.name() == text);
    named.copied().ok_or_else(|| format!("'{text}': expected model, uniform or zipf"))
}

fn shape(text: &str) -> std::result::Result<(u32, u32), String> {
    let extent = |text: &str| text.trim().parse().ok().filter(|&extent: &u32| extent > 0);
    let (n, k) = text.split_once(',').ok_or("expected N,K, such as 14336,4096")?;
    extent(n).zip(extent(k)).ok_or_else(|| format!("'{text}': N and K must be positive integers"))
}

fn share(text: &str) -> std::result::Result<f64, String> {
    text.parse()
        .ok()
        .filter(|share| (0.005..=0.2).contains(share))
        .ok_or_else(|| format!("'{text}' is not a number from 0.005 to 0.2"))
}
