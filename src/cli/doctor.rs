//! `unweight doctor`.

use std::{
    io::{self, Write},
    path::Path,
};

use clap::Args;
use serde::Serialize;
use unweight::{
    engine::{
        KvCache,
        raw::{memory, pages::PAGE_TOKENS},
    },
    format::{Placement, TileGrid},
    model::Geometry,
    rt::{
        Device, DeviceInfo, Library,
        env::Env,
        raw::{
            choose::route::SlotPlan,
            jit::{
                cache::Store,
                process,
                toolchain::{self, OldNvrtc, Version},
            },
        },
    },
};

use super::{
    API_KEY,
    failure::{Failure, Result},
    output::{self, Console},
};

/// Arguments of `doctor`.
#[derive(Args)]
pub struct Doctor {}

#[derive(Serialize)]
struct Report {
    /// Processor.
    cpu: Cpu,
    /// Libraries of GPU commands.
    libraries: Vec<LibraryReport>,
    /// The GPUs; empty without a driver.
    devices: Vec<DeviceReport>,
    /// Memory of published models per GPU.
    models: Vec<ModelReport>,
    /// The kernel cache.
    cache: CacheReport,
    /// Value of `UNWEIGHT_JIT` in effect.
    jit: &'static str,
    /// Contradicting settings, old compilers, misspelt variables.
    warnings: Vec<String>,
}

#[derive(Serialize)]
struct Cpu {
    /// Processor architecture.
    arch: &'static str,
    /// Threads.
    threads: usize,
    /// Memory.
    memory_bytes: Option<u64>,
    /// Whether the fast encoder can run.
    avx512: bool,
}

/// A GPU, or why it cannot be used.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum DeviceReport {
    /// Usable GPU.
    Usable(DeviceInfo),
    /// Why a GPU cannot be used.
    Unusable(String),
}

/// The KV cache capacity that a published model leaves on a GPU, per placement of its weights. Capacities are for a
/// BF16 cache; `packed_cache_tokens` is for a packed cache next to packed weights.
#[derive(Serialize)]
struct ModelReport {
    /// Ordinal of the GPU.
    device: usize,
    /// Name of the published model.
    geometry: &'static str,
    /// Packed weights.
    packed_bytes: u64,
    /// KV tokens next to packed weights in nine tenths of the memory.
    packed_tokens: u64,
    /// The same with a packed KV cache.
    packed_cache_tokens: u64,
    /// KV cache per token.
    cache_token_bytes: u64,
    /// Packed KV cache per token.
    packed_cache_token_bytes: u64,
    /// Compact weights.
    compact_bytes: u64,
    /// KV tokens next to compact weights and their slot.
    compact_tokens: u64,
    /// BF16 weights.
    bf16_bytes: u64,
    /// KV tokens next to BF16 weights.
    bf16_tokens: u64,
}

#[derive(Serialize)]
struct LibraryReport {
    /// `libcuda`, `libnvrtc`, `libcublasLt` or `libcublas`.
    name: &'static str,
    /// Whether usable.
    found: bool,
    /// Version.
    version: Option<String>,
    /// File.
    path: Option<String>,
    /// Search rule that found it.
    origin: Option<String>,
    /// What is unavailable without it.
    disables: Option<&'static str>,
    /// How to get it.
    remedy: Option<&'static str>,
    /// Files and names that were tried, if not found.
    tried: Vec<Tried>,
}

#[derive(Serialize)]
struct Tried {
    /// File or name.
    what: String,
    /// Why not used.
    why: String,
}

#[derive(Serialize)]
struct CacheReport {
    /// Directory.
    dir: Option<String>,
    /// Kernels in it.
    kernels: usize,
    /// Size of the kernels.
    bytes: u64,
    /// Why it cannot be used.
    unusable: Option<String>,
}

impl Doctor {
    /// Reports drivers and libraries. A missing library is not a failure.
    pub fn run(&self, console: Console) -> Result<()> {
        let env = Env::process().map_err(|error| Failure::other(error.clone()))?;
        let probed = toolchain::report(env);
        let mut warnings = probed.warnings;
        // The API key of `serve` is not a variable of the runtime.
        let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        let names = names.filter(|name| name != API_KEY);
        warnings.extend(
            Env::unknown(names).into_iter().map(|name| format!("{name}: unknown variable; check the spelling")),
        );
        let devices = devices();
        if let Ok(nvrtc) = &probed.libraries[Library::Nvrtc as usize] {
            warnings.extend(devices.iter().filter_map(|device| old_nvrtc(device, nvrtc.version, &nvrtc.path)));
        }
        let report = Report {
            cpu: cpu(),
            libraries: Library::ALL
                .into_iter()
                .zip(probed.libraries)
                .map(|(which, found)| library(which, found))
                .collect(),
            models: devices.iter().flat_map(models).collect(),
            devices,
            cache: cache(env),
            jit: env.jit.name(),
            warnings,
        };
        console.result("doctor", &report, |out| report.write(out, console.verbose > 0))
    }
}

impl Report {
    fn write(&self, out: &mut dyn Write, verbose: bool) -> io::Result<()> {
        let memory = self.cpu.memory_bytes.map_or_else(|| "unknown memory".to_owned(), output::bytes);
        let simd = if self.cpu.avx512 { "AVX-512" } else { "no AVX-512: encoding is slower" };
        writeln!(out, "[ok] CPU: {}, {} threads, {memory}, {simd}", self.cpu.arch, self.cpu.threads)?;
        for library in &self.libraries {
            match (&library.version, &library.path) {
                (Some(version), Some(path)) => {
                    let origin = library.origin.as_deref().unwrap_or_default();
                    writeln!(out, "[ok] {} {version}: {path} ({origin})", library.name)?;
                }
                _ => {
                    writeln!(out, "[--] {}: not found", library.name)?;
                    writeln!(out, "     disables: {}", library.disables.unwrap_or_default())?;
                    writeln!(out, "     remedy: {}", library.remedy.unwrap_or_default())?;
                }
            }
            // Report a library that exists but cannot be used, and a variable; skip names that do not exist.
            for tried in &library.tried {
                let is_chosen = tried.what.starts_with('/') || tried.what.starts_with("UNWEIGHT_");
                if verbose || (!library.found && is_chosen) {
                    writeln!(out, "     tried {}: {}", tried.what, tried.why)?;
                }
            }
        }
        for device in &self.devices {
            match device {
                DeviceReport::Usable(DeviceInfo { ordinal, name, arch, sms, memory_bytes, driver, .. }) => {
                    let (arch, memory) = (arch.compiler_name(), output::bytes(*memory_bytes));
                    writeln!(out, "[ok] GPU {ordinal}: {name}, {arch}, {sms} SMs, {memory}, CUDA {driver}")?;
                    for model in self.models.iter().filter(|model| model.device == *ordinal) {
                        model.write(out)?;
                    }
                }
                DeviceReport::Unusable(why) => writeln!(out, "[--] {why}")?,
            }
        }
        match (&self.cache.dir, &self.cache.unusable) {
            (Some(dir), None) => {
                let size = output::bytes(self.cache.bytes);
                writeln!(out, "[ok] cache: {dir}, {} kernels, {size}, UNWEIGHT_JIT={}", self.cache.kernels, self.jit)?;
            }
            (_, why) => writeln!(out, "[--] cache: {}", why.as_deref().unwrap_or("none"))?,
        }
        self.warnings.iter().try_for_each(|warning| writeln!(out, "[!!] {warning}"))
    }
}

impl ModelReport {
    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let Self { geometry, packed_bytes, compact_bytes, bf16_bytes, .. } = self;
        let Self { packed_tokens, packed_cache_tokens, compact_tokens, bf16_tokens, .. } = self;
        let [packed, compact, bf16] = [packed_bytes, compact_bytes, bf16_bytes].map(|bytes| *bytes as f64 / 1e9);
        let tokens = format!("{packed_tokens} tokens of KV cache, {packed_cache_tokens} with --kv-cache packed");
        let others =
            format!("compact {compact:.1} GB, {compact_tokens} tokens; as BF16 {bf16:.1} GB, {bf16_tokens} tokens");
        writeln!(out, "     {geometry}: {packed:.1} GB, {tokens} ({others})")
    }
}

/// Returns model reports for nine tenths of the memory, the default share of an engine that has the GPU to itself.
fn models(device: &DeviceReport) -> Vec<ModelReport> {
    let DeviceReport::Usable(info) = device else { return Vec::new() };
    let usable_bytes = memory::usual_share(info.memory_bytes);
    let model = |geometry: &Geometry| {
        let config = geometry.config();
        let of = |placement| {
            let bytes = config.weight_bytes(placement);
            (bytes, config.kv_tokens(usable_bytes.saturating_sub(bytes), PAGE_TOKENS))
        };
        let ((packed_bytes, packed_tokens), (bf16_bytes, bf16_tokens)) = (of(Placement::Packed), of(Placement::Bf16));
        // Compact weights, plus the slot that holds the largest compact layer when expanded.
        let head = (!config.tied).then_some([config.vocab, config.hidden]);
        let slot = |[n, k]: [u32; 2]| TileGrid::new(n as usize, k as usize).map_or(0, |grid| SlotPlan::of(grid).bytes);
        let slot = config.linears().into_iter().chain(head).map(slot).max().unwrap_or(0);
        let compact_bytes = config.weight_bytes(Placement::Compact);
        let compact_tokens =
            config.kv_tokens(usable_bytes.saturating_sub(compact_bytes).saturating_sub(slot), PAGE_TOKENS);
        let left = usable_bytes.saturating_sub(packed_bytes);
        let (packed_cache_tokens, packed_cache_token_bytes) = memory::tokens_of(&config, KvCache::Packed, left);
        let (_, cache_token_bytes) = memory::tokens_of(&config, KvCache::Bf16, left);
        let (device, geometry) = (info.ordinal, geometry.name());
        ModelReport {
            device,
            geometry,
            packed_bytes,
            packed_tokens,
            packed_cache_tokens,
            cache_token_bytes,
            packed_cache_token_bytes,
            compact_bytes,
            compact_tokens,
            bf16_bytes,
            bf16_tokens,
        }
    };
    Geometry::ALL.iter().map(model).collect()
}

fn cpu() -> Cpu {
    #[cfg(target_arch = "x86_64")]
    let avx512 = is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vbmi");
    #[cfg(not(target_arch = "x86_64"))]
    let avx512 = false;
    Cpu {
        arch: std::env::consts::ARCH,
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        memory_bytes: memory_bytes(),
        avx512,
    }
}

fn memory_bytes() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

fn library(which: Library, found: std::result::Result<toolchain::Found, toolchain::MissingLibrary>) -> LibraryReport {
    let absent = LibraryReport {
        name: which.stem(),
        found: false,
        version: None,
        path: None,
        origin: None,
        disables: None,
        remedy: None,
        tried: Vec::new(),
    };
    match found {
        Ok(found) => LibraryReport {
            found: true,
            version: Some(found.version.to_string()),
            path: Some(found.path.display().to_string()),
            origin: Some(found.origin.to_string()),
            ..absent
        },
        Err(missing) => LibraryReport {
            disables: Some(which.disables()),
            remedy: Some(which.remedy()),
            tried: missing.tried.into_iter().map(|tried| Tried { what: tried.what, why: tried.why }).collect(),
            ..absent
        },
    }
}

fn devices() -> Vec<DeviceReport> {
    // Without a driver, the report on the library says everything.
    if process::require(Library::Driver).is_err() {
        return Vec::new();
    }
    match Device::count() {
        Ok(0) => vec![DeviceReport::Unusable("no GPU: the driver finds no device".to_owned())],
        Ok(count) => (0..count)
            .map(|ordinal| match Device::open(ordinal) {
                Ok(device) => DeviceReport::Usable(device.info().clone()),
                Err(error) => DeviceReport::Unusable(format!("GPU {ordinal}: {error}")),
            })
            .collect(),
        Err(error) => vec![DeviceReport::Unusable(format!("no GPU: {error}"))],
    }
}

/// Returns a warning if the compiler is older than the GPU's architecture.
fn old_nvrtc(device: &DeviceReport, version: Version, path: &Path) -> Option<String> {
    let DeviceReport::Usable(DeviceInfo { ordinal, name, arch, .. }) = device else { return None };
    let old = OldNvrtc::check(*arch, version, path).err()?;
    Some(format!("GPU {ordinal} ({name}): {old}"))
}

fn cache(env: &Env) -> CacheReport {
    let mut report = CacheReport { dir: None, kernels: 0, bytes: 0, unusable: None };
    let Some(dir) = &env.cache_dir else {
        report.unusable = Some("set UNWEIGHT_CACHE_DIR, XDG_CACHE_HOME or HOME".to_owned());
        return report;
    };
    report.dir = Some(dir.display().to_string());
    // A read-only command must not create the directory. A missing directory counts as an empty cache.
    if dir.exists() {
        match Store::open(dir).map_err(|error| error.to_string()).and_then(|s| s.ls().map_err(|e| e.to_string())) {
            Ok(listed) => {
                report.kernels = listed.len();
                report.bytes = listed.iter().map(|entry| entry.bytes).sum();
            }
            Err(why) => report.unusable = Some(why),
        }
    }
    report
}

#[cfg(test)]
mod tests {
    use super::*;
    use unweight::codegen::spec::Arch;

    #[test]
    fn compiler_older_than_the_gpu_is_a_warning() {
        let device = |arch| {
            let (name, driver) = ("NVIDIA GeForce RTX 5090".to_owned(), "13.0".to_owned());
            let (sms, clock_mhz, memory_mb_per_s, l2_bytes) = (170, 2407, 1_792_000, 96 << 20);
            let (smem_bytes_per_block, memory_bytes) = (101_376, 32 << 30);
            DeviceReport::Usable(DeviceInfo {
                ordinal: 1,
                name,
                arch,
                sms,
                clock_mhz,
                memory_mb_per_s,
                l2_bytes,
                smem_bytes_per_block,
                memory_bytes,
                driver,
            })
        };
        let (old, path) = (Version { major: 12, minor: 4 }, Path::new("/lib/libnvrtc.so"));
        let warning = old_nvrtc(&device(Arch::Sm120a), old, path).unwrap();
        assert!(warning.starts_with("GPU 1 (NVIDIA GeForce RTX 5090): NVRTC 12.4 (/lib/libnvrtc.so)"), "{warning}");
        assert!(warning.contains("12.8") && warning.contains("pip install -U"), "{warning}");
        assert_eq!(old_nvrtc(&device(Arch::Sm89), old, path), None);
        assert_eq!(old_nvrtc(&device(Arch::Sm120a), Version { major: 12, minor: 8 }, path), None);
        assert_eq!(old_nvrtc(&DeviceReport::Unusable("no GPU".to_owned()), old, path), None);
    }
}
