//! Prints a digest of the machine code of every kernel: `cargo xtask kernel-digests` runs it.
//!
//! ```text
//! <kernel> <arch> sha256=<digest> registers=<per thread> shared=<static bytes>+<dynamic bytes>
//! ```
//! The digest covers code, constants and tables in memory. It does not cover symbol names and line numbers, so a change
//! that only renames or moves source text leaves every digest as it is.
//!
//! Options: `--all-archs` adds the first variant of each family for the other architectures, `--only PART` selects the
//! kernels with PART in their names, `--sample N` selects every Nth kernel. Needs NVRTC, but no GPU. Uses cached
//! cubins.

use std::{error::Error, fmt::Write as _, process::ExitCode};

use sha2::{Digest as _, Sha256};
use unweight_codegen::{
    family::FAMILIES,
    plan::Plan,
    spec::{Arch, catalog},
};
use unweight_rivals::cuda::kernels;
use unweight_rt::{
    env::Env,
    raw::jit::{cache::KernelCache, compiler::CompileRequest, cubin},
};

/// A kernel to compile, with its dynamic shared memory.
struct Kernel {
    request: CompileRequest,
    dynamic_smem_bytes: u32,
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kernel_digests: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let (mut all_archs, mut part, mut every) = (false, String::new(), 1);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--all-archs" => all_archs = true,
            "--only" => part = arguments.next().ok_or("--only needs a part of a name")?,
            "--sample" => {
                let value = arguments.next().ok_or("--sample needs a number")?;
                every = value.parse().ok().filter(|every| *every > 0).ok_or("--sample needs a number of at least 1")?;
            }
            other => return Err(format!("unexpected argument '{other}'").into()),
        }
    }
    let kernels: Vec<Kernel> =
        list(all_archs)?.into_iter().filter(|kernel| kernel.request.name.contains(&part)).step_by(every).collect();
    let env = Env::process().map_err(|error| error.to_string())?;
    let requests: Vec<_> = kernels.iter().map(|kernel| kernel.request.clone()).collect();
    let artifacts = KernelCache::open(env).compile_all(&requests, env.jit_threads, &|_| {})?;
    for (kernel, artifact) in kernels.iter().zip(&artifacts) {
        let mut hash = Sha256::new();
        for part in cubin::program(&artifact.cubin)? {
            hash.update((part.name.len() as u64).to_le_bytes());
            hash.update(part.name.as_bytes());
            hash.update((part.bytes.len() as u64).to_le_bytes());
            hash.update(&part.bytes);
        }
        let mut digest = String::new();
        for byte in hash.finalize() {
            write!(digest, "{byte:02x}")?;
        }
        let (resources, dynamic) = (&artifact.resources, kernel.dynamic_smem_bytes);
        let (registers, fixed) = (resources.registers, resources.static_smem_bytes);
        let CompileRequest { name, arch, .. } = &kernel.request;
        println!("{name} {arch} sha256={digest} registers={registers} shared={fixed}+{dynamic}");
    }
    Ok(())
}

/// Returns Hopper's catalogue and the kernels of other formats; with `all_archs` also a variant of each family for the
/// other architectures.
fn list(all_archs: bool) -> Result<Vec<Kernel>, Box<dyn Error>> {
    let mut specs = catalog::all(Arch::Sm90a);
    if all_archs {
        for arch in Arch::ALL.iter().filter(|arch| **arch != Arch::Sm90a) {
            specs.extend(FAMILIES.iter().filter_map(|family| (family.catalogue)(*arch).into_iter().next()));
        }
    }
    let mut all = Vec::new();
    for spec in &specs {
        let dynamic_smem_bytes = Plan::new(spec).map_err(|error| error.to_string())?.smem.bytes();
        all.push(Kernel { request: CompileRequest::render(spec)?, dynamic_smem_bytes });
    }
    for kernel in kernels(Arch::Sm90a) {
        all.push(Kernel { request: CompileRequest::external(&kernel)?, dynamic_smem_bytes: kernel.smem.bytes() });
    }
    Ok(all)
}
