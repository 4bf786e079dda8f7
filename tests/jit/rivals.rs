//! Compiles the kernels of `unweight-rivals` with NVRTC, and compares them with snapshots as `snapshots.rs` does.

use std::{collections::BTreeSet, fmt::Write as _};

use crate::snapshots::{digest, with_settings};
use unweight_codegen::{ExternalSource, spec::Arch};
use unweight_rivals::cuda::kernels;
use unweight_rt::raw::jit::{compiler::CompileRequest, cubin};

use crate::nvrtc::shared_cache;

/// Compiles for an architecture. Returns the faults of each kernel.
fn faults(arch: Arch) -> Vec<String> {
    let kernels = kernels(arch);
    let requests: Vec<_> = kernels.iter().map(|kernel| CompileRequest::external(kernel).unwrap()).collect();
    let artifacts = shared_cache().compile_all(&requests, 2, &|_| {}).unwrap_or_else(|error| panic!("{error}"));
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

/// Returns a line for each kernel.
fn plans<'a>(kernels: impl Iterator<Item = &'a ExternalSource>) -> String {
    let mut table = "# sources          threads blocks/SM shared, B kernel, grid, shared memory\n".to_owned();
    for kernel in kernels {
        let ExternalSource { threads, blocks_per_sm, grid, smem, .. } = kernel;
        let digest = digest(&kernel.render().unwrap());
        _ = write!(table, "{digest} {threads:>9} {blocks_per_sm:>9} {:>9} {kernel}: {grid}", smem.bytes());
        for section in smem.sections() {
            _ = write!(table, "; {} {}x{}", section.name, section.count, section.bytes_each);
        }
        table.push('\n');
    }
    table
}

#[test]
fn compiled_sources_match_the_snapshots() {
    let other_archs = Arch::ALL.iter().filter(|arch| **arch != Arch::Sm90a).flat_map(|arch| kernels(*arch));
    let kernels: Vec<_> = kernels(Arch::Sm90a).into_iter().chain(other_archs).collect();
    let families: BTreeSet<_> = kernels.iter().map(|kernel| kernel.family).collect();
    with_settings(|| {
        for family in families {
            let family_kernels = || kernels.iter().filter(|kernel| kernel.family == family);
            insta::assert_snapshot!(format!("{family}_plans"), plans(family_kernels()));
            let text = family_kernels().next().expect("a family has a kernel").render().unwrap().text;
            insta::assert_binary_snapshot!(&format!("{family}.cu"), text.into_bytes());
        }
    });
}
