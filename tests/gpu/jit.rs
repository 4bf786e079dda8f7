//! Time to load kernels: a whole bundle with a cold cache, and a new process with a warm one.

use std::{collections::BTreeSet, path::Path, process::Command, sync::Arc, time::Instant};

use crate::harness::gpu;
use unweight_codegen::{
    VariantSpec,
    plan::GemmShape,
    spec::{Arch, DecodeOutput, Epilogue, catalog},
};
use unweight_format::bundle::Attached;
use unweight_rt::{
    Device, KernelSet,
    cache::Artifact,
    env::{Env, JitMode},
    raw::{
        choose::{
            graph::decoder,
            recon::{Source, candidates},
        },
        device::module::LoadedKernel,
        jit::{
            cache::{CachePolicy, KernelCache, attachable},
            compiler::{CompileRequest, NvrtcCompiler},
        },
    },
};

/// The environment variable with the warm child's cache.
const CHILD: &str = "UNWEIGHT_TEST_WARM_CACHE";

/// Returns the kernels for an 8 B Llama-shaped bundle in the report's encodings, at batches up to 1024 with stored
/// placement: a decoder and the matmuls of each shape.
fn specs() -> Vec<VariantSpec> {
    let mut specs: BTreeSet<VariantSpec> = [DecodeOutput::Exponent, DecodeOutput::Full]
        .into_iter()
        .filter_map(|output| decoder(Arch::Sm90a, output, 7))
        .collect();
    let palette = |max_verbatim_rows| Source::Palette { max_verbatim_rows };
    for (n, k, source) in [
        (14336, 4096, Source::Exponent),
        (4096, 14336, Source::Exponent),
        (4096, 4096, Source::Exponent),
        (1024, 4096, Source::Exponent),
        (14336, 4096, palette(4)),
        (4096, 14336, palette(20)),
    ] {
        for m in [1, 128, 129, 256, 257, 512, 1024] {
            specs.extend(candidates(Arch::Sm90a, source, GemmShape { m, n, k }, 132, Epilogue::Store).first());
        }
    }
    specs.into_iter().collect()
}

pub(crate) fn cache(env: &Env, dir: &Path) -> KernelCache {
    let policy = CachePolicy { mode: JitMode::Auto, lock_timeout: env.lock_timeout };
    KernelCache::new(policy, Some(dir), Arc::new(NvrtcCompiler::new(env)))
}

#[test]
#[ignore = "needs a GPU"]
fn a_cold_bundle_takes_seconds_and_a_warm_one_milliseconds() {
    let kernels = gpu();
    let env = Env::process().unwrap();
    let device = kernels.device();
    let specs = specs();
    let home = tempfile::tempdir().unwrap();

    let start = Instant::now();
    let mut requests = specs.iter().map(CompileRequest::render).collect::<Result<Vec<_>, _>>().unwrap();
    // NVRTC has its own cache where a driver is installed; a cold start must not use it.
    requests.iter_mut().for_each(|request| request.options.push("--no-cache".to_owned()));
    let line = |progress: &unweight_rt::cache::Progress<'_>| {
        let ms = progress.artifact.elapsed.as_secs_f64() * 1e3;
        let registers = progress.artifact.resources.registers;
        println!("  {}/{} {} {ms:.0} ms, {registers} registers", progress.done, progress.total, progress.artifact.name);
    };
    let cold = cache(env, &home.path().join("cold"));
    let artifacts = cold.compile_all(&requests, env.jit_threads, &line).unwrap_or_else(|error| panic!("{error}"));
    let loaded: Vec<_> = specs
        .iter()
        .zip(&artifacts)
        .map(|(spec, artifact)| LoadedKernel::load(device, spec, artifact).unwrap_or_else(|error| panic!("{error}")))
        .collect();
    let cold_ms = start.elapsed().as_secs_f64() * 1e3;
    println!("cold: {} kernels in {cold_ms:.0} ms on {} threads", loaded.len(), env.jit_threads);

    let dir = home.path().join("warm");
    let first = KernelSet::new(device, cache(env, &dir), env.jit_threads).prepare(&specs, &|_| {}).unwrap();
    assert_eq!((first.loaded, first.compiled), (specs.len(), specs.len()));
    let again = KernelSet::new(device, cache(env, &dir), env.jit_threads).prepare(&specs, &|_| {}).unwrap();
    assert_eq!((again.loaded, again.compiled), (specs.len(), 0), "a second start compiles nothing");
    println!("warm, same process: {:.1} ms", again.elapsed.as_secs_f64() * 1e3);

    let child = Command::new(std::env::current_exe().unwrap())
        .args(["jit::warm_child", "--exact", "--ignored", "--nocapture", "--test-threads=1"])
        .env(CHILD, &dir)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&child.stdout).into_owned();
    assert!(child.status.success(), "{text}\n{}", String::from_utf8_lossy(&child.stderr));
    let warm_ms: f64 = text
        .lines()
        .find_map(|line| line.split_once("warm_ms="))
        .and_then(|(_, rest)| rest.trim().parse().ok())
        .unwrap_or_else(|| panic!("no time in {text}"));
    println!("warm, new process: {warm_ms:.1} ms");

    assert!(cold_ms < 3000.0, "cold: {cold_ms:.0} ms, target 3000");
    assert!(warm_ms < 50.0, "warm: {warm_ms:.1} ms, target 50");
}

/// A bundle's kernels load without a compiler. Those that the driver rejects are compiled without a message.
#[test]
#[ignore = "needs a GPU"]
fn attached_kernels_are_loaded_and_refused_ones_compiled() {
    let kernels = gpu();
    let env = Env::process().unwrap();
    let arch = kernels.device().info().arch;
    let specs: Vec<VariantSpec> =
        catalog::all(arch).into_iter().filter(|spec| spec.op.family() == "encode_huffman").collect();
    assert!(specs.len() > 1);
    let home = tempfile::tempdir().unwrap();
    let requests = specs.iter().map(CompileRequest::render).collect::<Result<Vec<_>, _>>().unwrap();
    let compiled = cache(env, &home.path().join("own")).compile_all(&requests, env.jit_threads, &|_| {}).unwrap();
    let attached = |foreign: Option<&Artifact>| {
        let artifacts = std::iter::once(foreign.unwrap_or(&compiled[0])).chain(&compiled[1..]);
        let entries: Vec<_> = requests
            .iter()
            .zip(artifacts)
            .map(|(request, kernel)| (attachable(request, kernel), &*kernel.cubin))
            .collect();
        let path = home.path().join("kernels");
        std::fs::write(&path, Attached::encode(&entries).unwrap()).unwrap();
        Attached::open(&path).unwrap().unwrap()
    };
    // An environment with only the driver.
    let mut bare = env.clone();
    bare.nvrtc = Some(home.path().join("nowhere.so"));
    let trusting = cache(&bare, &home.path().join("bare")).trust(attached(None));
    let prepared = KernelSet::new(kernels.device(), trusting, 1).prepare(&specs, &|_| {}).unwrap();
    assert_eq!((prepared.loaded, prepared.compiled), (specs.len(), 0));
    // The first kernel is for another generation, under this generation's key.
    let other = if arch == Arch::Sm80 { Arch::Sm90a } else { Arch::Sm80 };
    let foreign = CompileRequest::render(&VariantSpec { arch: other, ..specs[0] }).unwrap();
    let foreign = cache(env, &home.path().join("foreign")).get(&foreign).unwrap();
    assert_ne!(foreign.cubin, compiled[0].cubin);
    let set = KernelSet::new(
        kernels.device(),
        cache(env, &home.path().join("empty")).trust(attached(Some(&foreign))),
        env.jit_threads,
    );
    let prepared = set.prepare(&specs, &|_| {}).unwrap();
    assert_eq!((prepared.loaded, prepared.compiled), (specs.len(), 1));
    assert!(specs.iter().all(|spec| set.try_get(spec).is_some()));
    let set =
        KernelSet::new(kernels.device(), cache(&bare, &home.path().join("bare")).trust(attached(Some(&foreign))), 1);
    assert!(set.get(&specs[0]).is_err(), "the driver refuses the kernel, and no compiler is available");
    assert!(set.get(&specs[1]).is_ok());
}

/// Not a separate test: the test above starts it as a new process.
#[test]
#[ignore = "started by the test above"]
fn warm_child() {
    let Some(dir) = std::env::var_os(CHILD) else { return };
    let env = Env::process().unwrap();
    // The application creates the context in any case, so its time does not count.
    let device = Device::open(0).unwrap();
    let specs = specs();
    let start = Instant::now();
    let prepared =
        KernelSet::new(&device, cache(env, Path::new(&dir)), env.jit_threads).prepare(&specs, &|_| {}).unwrap();
    let elapsed = start.elapsed();
    assert_eq!(prepared.compiled, 0);
    println!("warm_ms={:.3}", elapsed.as_secs_f64() * 1e3);
}
