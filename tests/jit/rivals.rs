//! The kernels of `unweight-rivals`: through the real compiler, and as files that a reviewer reads
//! (`unweight-rivals/kernels/snapshot.txt`; `INSTA_UPDATE=always cargo test --test jit rivals` writes it anew).

use std::{fmt::Write as _, fs, path::Path, sync::Arc};

use unweight_codegen::{Outside, spec::Arch};
use unweight_rivals::cuda::kernels;
use unweight_rt::{
    env::{Env, JitMode},
    jit::{
        cache::{KernelCache, Policy},
        compiler::{CompileRequest, Compiler, NvrtcCompiler},
        cubin,
    },
};

/// Compiles for an architecture; what is wrong with each.
fn faults(arch: Arch) -> Vec<String> {
    let env = Env::process().unwrap_or_else(|error| panic!("{error}"));
    let compiler = NvrtcCompiler::new(env);
    compiler.identity().unwrap_or_else(|error| panic!("these tests need NVRTC: run `cargo xtask test`\n{error}"));
    let kernels = kernels(arch);
    let requests: Vec<_> = kernels.iter().map(|kernel| CompileRequest::outside(kernel).unwrap()).collect();
    let policy = Policy { mode: JitMode::Off, lock_timeout: std::time::Duration::from_secs(60) };
    let cache = KernelCache::new(policy, None, Arc::new(compiler));
    let artifacts = cache.compile_all(&requests, 2, &|_| {}).unwrap_or_else(|error| panic!("{error}"));
    let mut faults = Vec::new();
    for (kernel, artifact) in kernels.iter().zip(&artifacts) {
        let info = cubin::read(&artifact.cubin).unwrap();
        let found = info.kernel(&artifact.name).unwrap();
        let resources = &found.resources;
        let mut check = |holds: bool, what: String| {
            if !holds {
                faults.push(format!("{kernel}: {what}"));
            }
        };
        check(!found.spills(), format!("{} accesses to local memory", resources.local_accesses));
        check(!artifact.log.contains("warning"), artifact.log.clone());
        check(resources.max_threads == kernel.threads, format!("compiled for {} threads", resources.max_threads));
        let fitting = arch.limits().registers_for(kernel.threads, kernel.blocks_per_sm);
        check(resources.registers <= fitting, format!("{} registers, {fitting} fit", resources.registers));
        check(resources.static_smem_bytes == 0, format!("{} B of static memory", resources.static_smem_bytes));
        check(resources.param_bytes as usize == kernel.args.bytes, format!("{} B of arguments", resources.param_bytes));
    }
    faults
}

#[test]
fn every_kernel_compiles_to_its_plan() {
    assert_eq!(faults(Arch::Sm90a), [""; 0]);
}

/// A line for each kernel, with a digest of its text and of its headers; then the text of each.
fn listing(kernels: &[Outside]) -> String {
    let mut text =
        "# text             headers          threads blocks/SM shared, B variant, grid, shared memory\n".to_owned();
    let digest = |bytes: &[u8]| blake3::hash(bytes).to_hex()[..16].to_owned();
    for kernel in kernels {
        let source = kernel.render().unwrap();
        let own = kernel.headers.iter().filter(|(name, _)| source.headers.iter().any(|(other, _)| other == name));
        let headers: String = own.map(|(_, text)| *text).collect();
        let Outside { threads, blocks_per_sm, grid, smem, .. } = kernel;
        let (body, headers) = (digest(source.text.as_bytes()), digest(headers.as_bytes()));
        _ = write!(text, "{body} {headers} {threads:>9} {blocks_per_sm:>9} {:>9} {kernel}: {grid}", smem.bytes());
        for section in smem.sections() {
            _ = write!(text, "; {} {}x{}", section.name, section.count, section.bytes_each);
        }
        text.push('\n');
    }
    for kernel in kernels {
        _ = write!(text, "\n{}", kernel.render().unwrap().text);
    }
    text
}

#[test]
fn compiled_sources_match_the_snapshots() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("unweight-rivals/kernels/snapshot.txt");
    let now = listing(&kernels(Arch::Sm90a));
    if std::env::var("INSTA_UPDATE").is_ok_and(|value| value == "always") {
        fs::write(&path, &now).unwrap();
    }
    let kept = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        kept == now,
        "unweight-rivals/kernels/snapshot.txt differs: `INSTA_UPDATE=always cargo test --test jit rivals` accepts"
    );
}
