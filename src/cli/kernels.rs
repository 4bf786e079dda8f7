//! `unweight kernels`.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
};

use clap::{Args, Subcommand};
use clap_complete::engine::ArgValueCompleter;
use serde::Serialize;
use unweight::{
    codegen::{
        self,
        plan::Plan,
        spec::{Arch, VariantSpec, catalog},
    },
    engine::{Engine, EngineOptions, raw::options},
    format::{
        Placement, bundle as format,
        bundle::{ATTACHED_NAME, Attached, Bundle, BundleError},
        raw::glob::matches,
    },
    model::{Activation, ModelConfig},
    rt::{
        Device, KernelSet, LoadOptions,
        cache::{CacheState, Progress},
        env::{Env, JitMode},
        raw::{
            choose::{cost::gpu_model::GpuModel, policy::PackedChooser},
            jit::{
                cache::{Kept, KernelCache, attachable},
                compiler::{CompileRequest, Compiler, NvrtcCompiler},
                cubin::{self, KernelResources, Opcode},
            },
            layer::loader::{reachable, reachable_on_any},
        },
    },
};

use super::{
    arch::{ArchArg, arch_in, arch_parser, local_arch},
    common, completions,
    failure::{Failure, Result},
    output::{self, Console, Table},
    pipelines::{KvCacheArg, PlacementArg},
    trust::note_table,
};

/// Subcommands of `kernels`.
#[derive(Subcommand)]
pub enum Kernels {
    /// List the kernels that ship, and the resources of a block
    List(Names),
    /// Print a kernel's CUDA source, or write sources, headers and plans to a directory
    Emit(Emit),
    /// Compile kernels into the cache
    Compile(Compile),
    /// Attach compiled kernels to a bundle, for machines without a compiler
    Attach(Attach),
    /// Remove the kernels that were attached to a bundle
    Detach(Detach),
    /// Compile kernels and check their machine code; exit status 1 if one spills registers or serializes wgmma
    Check(Names),
}

/// The kernels that a command selects.
#[derive(Args)]
pub struct Names {
    /// Kernel names, such as '*gemm_compact*'; * and ? are wildcards [default: all that ship]
    #[arg(value_name = "NAME", add = ArgValueCompleter::new(completions::kernels))]
    names: Vec<String>,
    #[command(flatten)]
    arch: ArchArg,
}

/// Arguments of `kernels emit`.
#[derive(Args)]
pub struct Emit {
    #[command(flatten)]
    names: Names,
    /// Directory for NAME.cu, NAME.plan.txt and headers, instead of stdout
    #[arg(short, long, value_name = "DIR")]
    output: Option<PathBuf>,
}

/// How the kernels of a bundle will be used.
#[derive(Args)]
struct Usage {
    /// Maximum rows of a product: --chunk and --max-batch of `generate` and `serve` together
    #[arg(long, value_name = "M", default_value_t = LoadOptions::default().max_batch, requires = "bundle",
          value_parser = clap::value_parser!(u32).range(1..=65536))]
    max_batch: u32,
    /// Compile the bundle's kernels for ordinary instead of programmatic dependent launches
    #[arg(long, requires = "bundle")]
    no_pdl: bool,
    /// Placement that `generate` and `serve` will use for the bundle; auto includes packed and compact
    #[arg(long, value_name = "PLACEMENT", default_value = "auto", requires = "bundle")]
    placement: PlacementArg,
    /// KV cache that `generate` and `serve` will use for the bundle; auto includes both
    #[arg(long, value_name = "CACHE", default_value = "auto", requires = "bundle")]
    kv_cache: KvCacheArg,
}

/// The number of concurrent compilations.
#[derive(Args)]
struct Jobs {
    /// Kernels to compile at the same time [default: UNWEIGHT_JIT_THREADS, or all processors]
    #[arg(long, value_name = "N", value_parser = common::threads)]
    threads: Option<usize>,
}

/// Arguments of `kernels compile`.
#[derive(Args)]
pub struct Compile {
    #[command(flatten)]
    names: Names,
    /// Compile only kernels that this bundle can use, on this machine's GPU or any GPU of --arch
    #[arg(long, value_name = "BUNDLE", conflicts_with = "names")]
    bundle: Option<PathBuf>,
    #[command(flatten)]
    usage: Usage,
    #[command(flatten)]
    jobs: Jobs,
}

/// Arguments of `kernels attach`.
#[derive(Args)]
pub struct Attach {
    /// Bundle directory
    bundle: PathBuf,
    /// Compile for every GPU of this architecture; repeatable [default: this machine's GPU, or an H200]
    #[arg(long, value_name = "ARCH", value_parser = arch_parser())]
    arch: Vec<Arch>,
    #[command(flatten)]
    usage: Usage,
    #[command(flatten)]
    jobs: Jobs,
    /// Replace attached kernels; a saved plan of `tune` stays unless the file is damaged
    #[arg(long)]
    force: bool,
}

/// Arguments of `kernels detach`.
#[derive(Args)]
pub struct Detach {
    /// Bundle directory
    bundle: PathBuf,
}

#[derive(Serialize)]
struct Listed {
    /// Canonical name.
    name: String,
    /// Kernel family.
    family: &'static str,
    /// Dynamic shared memory per block.
    smem_bytes: u32,
    /// Threads per block.
    threads: u32,
    /// Pipeline stages.
    stages: Option<u32>,
}

#[derive(Serialize)]
struct Emitted {
    /// Canonical name.
    name: String,
    /// CUDA source.
    text: String,
    /// Compiler options.
    options: Vec<String>,
    /// Names of included headers.
    headers: Vec<&'static str>,
}

#[derive(Serialize)]
struct Compiled {
    /// Canonical name.
    name: String,
    /// `hit` or `compiled`.
    state: &'static str,
    /// Why not cached (exit status 2).
    not_kept: Option<String>,
    /// Time until ready, ms.
    compile_ms: f64,
    /// Size of the binary.
    cubin_bytes: usize,
    /// Compiler and version.
    compiler: String,
    /// Resources of the kernel.
    resources: KernelResources,
}

#[derive(Serialize)]
struct WasAttached {
    /// The attached kernels.
    kernels: Vec<OneAttached>,
    /// Size of `unweight.kernels`.
    bytes: u64,
}

#[derive(Serialize)]
struct OneAttached {
    /// Canonical name.
    name: String,
    /// Architecture of the kernel.
    arch: String,
    /// `hit` or `compiled`.
    state: &'static str,
    /// Size of the binary.
    cubin_bytes: usize,
    /// Compiler and version.
    compiler: String,
}

#[derive(Serialize)]
struct Detached {
    /// Whether kernels or a plan were attached.
    detached: bool,
    /// Whether a plan was removed.
    plan: bool,
    /// Bytes removed.
    bytes: u64,
}

#[derive(Serialize)]
struct Checked {
    /// Canonical name.
    name: String,
    /// Resources of the kernel.
    resources: KernelResources,
    /// Wgmma instructions.
    wgmma_instructions: u64,
    /// Tensor-map loads.
    tma_loads: u64,
    /// Spills, and performance warnings of the compiler.
    problems: Vec<String>,
}

/// A report with one entry per kernel, because JSON output is an object.
#[derive(Serialize)]
struct Of<T> {
    /// One entry per kernel.
    kernels: Vec<T>,
}

impl Kernels {
    /// The name of the command in the JSON output.
    pub fn name(&self) -> &'static str {
        match self {
            Self::List(_) => "kernels list",
            Self::Emit(_) => "kernels emit",
            Self::Compile(_) => "kernels compile",
            Self::Attach(_) => "kernels attach",
            Self::Detach(_) => "kernels detach",
            Self::Check(_) => "kernels check",
        }
    }

    /// Runs the command.
    pub fn run(&self, console: Console) -> Result<()> {
        match self {
            Self::List(names) => list(names, console),
            Self::Emit(arguments) => emit(arguments, console),
            Self::Compile(arguments) => compile(arguments, console),
            Self::Attach(arguments) => attach(arguments, console),
            Self::Detach(arguments) => detach(arguments, console),
            Self::Check(names) => check(names, console),
        }
    }
}

impl Names {
    fn specs(&self, console: Console) -> Result<Vec<VariantSpec>> {
        let is_pattern = |name: &str| name.contains(['*', '?']);
        let by_arch = self.names.is_empty() || self.names.iter().any(|name| is_pattern(name));
        // Query the GPU only if the architecture matters.
        let arch = self.arch.arch.or_else(|| if by_arch { local_arch() } else { None });
        // No note if every pattern names its architecture.
        let names_arch =
            !self.names.is_empty() && self.names.iter().all(|name| !is_pattern(name) || arch_in(name).is_some());
        if by_arch && arch.is_none() && !names_arch {
            console.note("no GPU found: using kernels for sm_90a; --arch selects another architecture");
        }
        let arch = arch.unwrap_or(Arch::Sm90a);
        let shipped = catalog::all(arch);
        if self.names.is_empty() {
            return Ok(shipped);
        }
        let mut specs = Vec::new();
        for name in &self.names {
            let before = specs.len();
            if is_pattern(name) {
                specs.extend(shipped.iter().filter(|spec| matches(name, &spec.to_string())));
            } else {
                // A full name defines a kernel, also one that does not ship.
                specs.push(name.parse().map_err(Failure::other)?);
            }
            if specs.len() == before {
                let arch_name = arch.compiler_name();
                let help = match arch_in(name).filter(|other| *other != arch) {
                    Some(other) => format!("these are kernels for {arch_name}: add `--arch {}`", other.compiler_name()),
                    None => format!("`unweight kernels list --arch {arch_name}` shows the names"),
                };
                return Err(Failure::new("kernel-not-found", format!("no kernel matches '{name}'"), help));
            }
        }
        Ok(specs)
    }
}

fn plan(spec: &VariantSpec) -> Result<Plan> {
    Plan::new(spec).map_err(Failure::other)
}

fn list(names: &Names, console: Console) -> Result<()> {
    let listed = |spec: VariantSpec| {
        let plan = plan(&spec)?;
        Ok(Listed {
            name: spec.to_string(),
            family: spec.op.family(),
            smem_bytes: plan.smem.bytes(),
            threads: plan.launch.threads,
            stages: plan.pipeline.map(|pipeline| pipeline.stages),
        })
    };
    let report = Of { kernels: names.specs(console)?.into_iter().map(listed).collect::<Result<Vec<_>>>()? };
    console.result("kernels list", &report, |out| {
        let mut table = Table::new(&["kernel", "family", ">shared memory, B", ">threads", ">stages"]);
        for kernel in &report.kernels {
            table.row([
                kernel.name.clone(),
                kernel.family.to_owned(),
                kernel.smem_bytes.to_string(),
                kernel.threads.to_string(),
                kernel.stages.map_or_else(String::new, |stages| stages.to_string()),
            ]);
        }
        table.write(out)
    })
}

fn emit(arguments: &Emit, console: Console) -> Result<()> {
    let specs = arguments.names.specs(console)?;
    if arguments.output.is_none() && specs.len() != 1 && !console.json {
        return Err(Failure::new(
            "usage",
            format!("{} kernels match, but stdout is for a single one", specs.len()),
            "name one (`unweight kernels list`), or write all of them with -o DIR",
        ));
    }
    let mut kernels = Vec::new();
    for spec in &specs {
        let source = codegen::render(spec).map_err(|error| Failure::from(unweight::rt::Error::from(error)))?;
        if let Some(folder) = &arguments.output {
            write(&folder.join(format!("{}.cu", source.name)), &source.text)?;
            write(&folder.join(format!("{}.plan.txt", source.name)), &plan(spec)?.to_string())?;
            for (name, text) in &source.headers {
                write(&folder.join("include").join(name), text)?;
            }
        }
        let headers = source.headers.iter().map(|(name, _)| *name).collect();
        kernels.push(Emitted { name: source.name, text: source.text, options: source.options, headers });
    }
    match &arguments.output {
        None => console
            .result("kernels emit", &Of { kernels }, |_| Ok(()))
            .and_then(|()| if console.json { Ok(()) } else { print_one(&specs) }),
        Some(folder) => console.summary("kernels emit", &Of { kernels }, |out| {
            writeln!(
                out,
                "{}: {} kernels; compile with -I {}",
                folder.display(),
                specs.len(),
                folder.join("include").display()
            )
        }),
    }
}

fn print_one(specs: &[VariantSpec]) -> Result<()> {
    for spec in specs {
        let source = codegen::render(spec).map_err(|error| Failure::from(unweight::rt::Error::from(error)))?;
        std::io::stdout().lock().write_all(source.text.as_bytes())?;
    }
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder).map_err(Failure::io(folder.display()))?;
    fs::write(path, text).map_err(Failure::io(path.display()))
}

/// The GPUs that kernels are compiled for.
enum TargetGpus {
    /// Every GPU of an architecture: all kernels that dispatch can choose for any number of SMs and any memory size.
    All(Arch),
    /// A single GPU.
    One(PackedChooser),
}

impl TargetGpus {
    /// Returns all GPUs of a given architecture. Without one: this machine's GPU, with the kernels that it would
    /// choose, or an H200 if there is no GPU, as in an image build.
    fn of(arch: Option<Arch>, env: &Env, console: Console) -> Self {
        match (arch, Device::open(0)) {
            (Some(arch), _) => Self::All(arch),
            (None, Ok(device)) => {
                let kernels = KernelSet::open(&device, env);
                note_table(&kernels, console);
                Self::One(kernels.chooser().clone())
            }
            (None, Err(_)) => {
                console.note(
                    "no GPU found: using kernels for an H200; --arch selects those for all GPUs of an architecture",
                );
                Self::One(PackedChooser::h200())
            }
        }
    }
}

impl Usage {
    /// Returns the loader's options. If the device chooses the placement, compact tensors stay compact: such a loader
    /// can request all kernels that a loader with packed tensors requests.
    fn load_options(&self) -> LoadOptions {
        let placement = self.placement.0.unwrap_or(Placement::Compact);
        LoadOptions::default().max_batch(self.max_batch).pdl(!self.no_pdl).placement(placement)
    }
}

/// Returns the kernels that loading a bundle and running its model can request.
fn bundle_kernels(bundle: &Bundle, usage: &Usage, targets: TargetGpus, console: Console) -> Result<Vec<VariantSpec>> {
    // A model that the engine cannot run is reported below.
    let fused_gate = ModelConfig::of_bundle(bundle).map_or(true, |config| config.act == Activation::Silu);
    let options = usage.load_options().fused_gate(fused_gate);
    let (gpu_models, mut specs) = match targets {
        TargetGpus::All(arch) => {
            // SM counts are even. The shapes of attention depend on them.
            let any = (2..=256).step_by(2).map(|sms| GpuModel { sms, ..GpuModel::usual(arch) });
            (any.collect(), reachable_on_any(bundle, options, arch))
        }
        TargetGpus::One(chooser) => (vec![*chooser.gpu_model()], reachable(bundle, options, chooser)),
    };
    // The other kernels of `generate`, for all batch sizes.
    let mut engine = EngineOptions::default().max_batch(options::MAX_BATCH);
    engine.placement = usage.placement.0;
    engine.kv_cache = usage.kv_cache.0;
    match Engine::kernels(bundle, &engine, &gpu_models) {
        Ok(more) => specs.extend(more),
        // Linear layers of any bundle can be loaded; pipelines need a model.
        Err(error) if !usage.placement.has_pipelines() => {
            console.note(format_args!("only kernels of linear layers: {error}"))
        }
        Err(error) => return Err(error.into()),
    }
    Ok(specs)
}

fn render(specs: &[VariantSpec]) -> Result<Vec<CompileRequest>> {
    specs.iter().map(CompileRequest::render).collect::<std::result::Result<Vec<_>, _>>().map_err(Failure::other)
}

/// Prints a note that a kernel is ready.
fn note_ready(console: Console, progress: &Progress<'_>) {
    let artifact = progress.artifact;
    console.note(format_args!(
        "[{:>3}/{}] {} {:.0} ms{}",
        progress.done,
        progress.total,
        artifact.name,
        artifact.elapsed.as_secs_f64() * 1e3,
        if artifact.state.is_hit() { " (cached)" } else { "" },
    ));
}

fn state_name(state: &CacheState) -> &'static str {
    if state.is_hit() { "hit" } else { "compiled" }
}

/// Attaches kernels from the user's own cache and compiler, never those that were attached before.
fn attach(arguments: &Attach, console: Console) -> Result<()> {
    let env = Env::process().map_err(|error| Failure::other(error.clone()))?;
    let bundle = Bundle::open(&arguments.bundle)?;
    // Checked before compiling takes minutes. A saved plan stays.
    let path = arguments.bundle.join(ATTACHED_NAME);
    let has_kernels = bundle.attached().map_or(true, |attached| attached.is_some_and(|old| !old.kernels().is_empty()));
    if !arguments.force && has_kernels {
        return Err(BundleError::OutputExists { path }.into());
    }
    format::may_attach(&arguments.bundle)?;
    let targets = match arguments.arch.as_slice() {
        [] => vec![TargetGpus::of(None, env, console)],
        archs => archs.iter().map(|arch| TargetGpus::of(Some(*arch), env, console)).collect(),
    };
    let mut specs: Vec<VariantSpec> = Vec::new();
    for targets in targets {
        let more = bundle_kernels(&bundle, &arguments.usage, targets, console)?;
        specs.extend(more);
    }
    specs.sort();
    specs.dedup();
    let requests = render(&specs)?;
    let cache = KernelCache::open(env);
    let threads = arguments.jobs.threads.unwrap_or(env.jit_threads);
    let artifacts = cache.compile_all(&requests, threads, &|progress| note_ready(console, progress))?;
    let entries: Vec<_> = requests
        .iter()
        .zip(&artifacts)
        .map(|(request, artifact)| (attachable(request, artifact), &*artifact.cubin))
        .collect();
    let damaged = bundle.attached().err();
    let bytes = format::attach(&arguments.bundle, &entries, arguments.force)?;
    if let Some(error) = damaged {
        let plan = match Attached::open(&path)?.is_some_and(|now| now.plan().is_some()) {
            true => "the plan of `tune` was undamaged and is kept",
            false => "a plan of `tune`, if there was one, is lost; `unweight tune --save` measures a new one",
        };
        console.note(format_args!("the damaged attached kernels are replaced ({error}); {plan}"));
    }
    let kernels = entries.iter().zip(&artifacts).map(|((entry, _), artifact)| OneAttached {
        name: entry.name.clone(),
        arch: entry.arch.clone(),
        state: state_name(&artifact.state),
        cubin_bytes: artifact.cubin.len(),
        compiler: artifact.compiler.to_string(),
    });
    let report = WasAttached { kernels: kernels.collect(), bytes };
    console.summary("kernels attach", &report, |out| {
        let (count, bytes) = (report.kernels.len(), output::bytes(report.bytes));
        writeln!(out, "{}: {count} kernels, {bytes}; --trust-attached-kernels runs them", path.display())
    })
}

fn detach(arguments: &Detach, console: Console) -> Result<()> {
    let removed = format::detach(&arguments.bundle)?;
    let report = Detached {
        detached: removed.is_some(),
        plan: removed.is_some_and(|removed| removed.had_plan),
        bytes: removed.map_or(0, |removed| removed.bytes),
    };
    console.summary("kernels detach", &report, |out| {
        let path = arguments.bundle.join(ATTACHED_NAME);
        match report.detached {
            true => {
                let plan = if report.plan { " with the plan of `tune`" } else { "" };
                writeln!(out, "{}: removed{plan}, {}", path.display(), output::bytes(report.bytes))
            }
            false => writeln!(out, "{}: not found; the bundle has no attached kernels", path.display()),
        }
    })
}

fn compile(arguments: &Compile, console: Console) -> Result<()> {
    let env = Env::process().map_err(|error| Failure::other(error.clone()))?;
    if env.jit == JitMode::Off {
        return Err(Failure::new(
            "jit-off",
            "UNWEIGHT_JIT=off disables the kernel cache",
            "unset it, or use `unweight kernels check`",
        ));
    }
    let specs = match &arguments.bundle {
        None => arguments.names.specs(console)?,
        Some(folder) => {
            let targets = TargetGpus::of(arguments.names.arch.arch, env, console);
            bundle_kernels(&Bundle::open(folder)?, &arguments.usage, targets, console)?
        }
    };
    let requests = render(&specs)?;
    let cache = KernelCache::open(env);
    cache.store().map_err(|unusable| Failure::other(unusable.clone()))?;
    let threads = arguments.jobs.threads.unwrap_or(env.jit_threads);
    let artifacts = cache.compile_all(&requests, threads, &|progress| note_ready(console, progress))?;
    let kernels: Vec<_> = artifacts
        .into_iter()
        .map(|artifact| Compiled {
            name: artifact.name,
            not_kept: match &artifact.state {
                CacheState::Compiled { kept: Kept::NotStored(why), .. } => Some(why.clone()),
                _ => None,
            },
            state: state_name(&artifact.state),
            compile_ms: artifact.elapsed.as_secs_f64() * 1e3,
            cubin_bytes: artifact.cubin.len(),
            compiler: artifact.compiler.to_string(),
            resources: artifact.resources,
        })
        .collect();
    let hits = kernels.iter().filter(|kernel| kernel.state == "hit").count();
    let bytes: usize = kernels.iter().map(|kernel| kernel.cubin_bytes).sum();
    let not_kept: Vec<String> = kernels.iter().filter_map(|kernel: &Compiled| kernel.not_kept.clone()).collect();
    let report = Of { kernels };
    console.summary("kernels compile", &report, |out| {
        let (total, bytes) = (report.kernels.len(), output::bytes(bytes as u64));
        writeln!(
            out,
            "{} kernels kept, {} compiled, {hits} from the cache, {bytes}",
            total - not_kept.len(),
            total - hits
        )
    })?;
    // The command promises that kernels are in the cache.
    match not_kept.first() {
        None => Ok(()),
        Some(why) => Err(Failure::new(
            "kernels-not-kept",
            format!("{} of {} kernels were compiled but not cached: {why}", not_kept.len(), report.kernels.len()),
            "free some space, or set UNWEIGHT_CACHE_DIR to a writable directory",
        )
        .reported()),
    }
}

fn check(names: &Names, console: Console) -> Result<()> {
    let env = Env::process().map_err(|error| Failure::other(error.clone()))?;
    let compiler = NvrtcCompiler::new(env);
    compiler.identity()?;
    let mut kernels = Vec::new();
    for spec in names.specs(console)? {
        let request = CompileRequest::render(&spec).map_err(Failure::other)?;
        let compiled = compiler.compile(&request)?;
        let info = cubin::read(&compiled.cubin).map_err(Failure::other)?;
        let kernel = info.kernel(&request.name).map_err(Failure::other)?;
        let mut problems = Vec::new();
        if kernel.spills() {
            problems.push(format!("spills registers: {} B of stack", compiled.resources.stack_bytes));
        }
        // ptxas reports where it serializes wgmma or ignores setmaxnreg.
        problems
            .extend(compiled.log.lines().filter(|line| line.contains("Potential Performance Loss")).map(str::to_owned));
        let checked = Checked {
            wgmma_instructions: kernel.count(&[Opcode::HGMMA]),
            tma_loads: kernel.count(&[Opcode::UTMALDG]),
            name: request.name,
            resources: compiled.resources,
            problems,
        };
        for problem in &checked.problems {
            console.note(format_args!("{}: {problem}", checked.name));
        }
        kernels.push(checked);
    }
    let report = Of { kernels };
    console.summary("kernels check", &report, |out| {
        let mut table =
            Table::new(&["kernel", ">registers", ">stack, B", ">instructions", ">wgmma", ">TMA loads", "result"]);
        for kernel in &report.kernels {
            table.row([
                kernel.name.clone(),
                kernel.resources.registers.to_string(),
                kernel.resources.stack_bytes.to_string(),
                kernel.resources.instructions.to_string(),
                kernel.wgmma_instructions.to_string(),
                kernel.tma_loads.to_string(),
                if kernel.problems.is_empty() { "good" } else { "bad" }.to_owned(),
            ]);
        }
        table.write(out)
    })?;
    match report.kernels.iter().filter(|kernel| !kernel.problems.is_empty()).count() {
        0 => Ok(()),
        bad => Err(Failure::mismatch(
            "kernels-defective",
            format!("{bad} of {} kernels are defective", report.kernels.len()),
            "`unweight kernels emit NAME` prints the source",
        )
        .reported()),
    }
}
