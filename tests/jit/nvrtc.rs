//! Compiles shipped kernels with NVRTC, on a machine without a GPU: one of each sixteenth, or all of them
//! (`UNWEIGHT_TEST_ALL=1`).
//!
//! Checks what a compile alone can prove: the kernel compiles for sm_90a and does not spill; the assembler did not
//! serialize a wgmma or ignore a setmaxnreg ("Potential Performance Loss"); registers, threads, shared memory and
//! parameters match the plan; the instructions that the kernel is built around are present. The first tests check the
//! checks: each violation is detected.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use unweight_codegen::{
    family::{FAMILIES, Instruction},
    plan::Plan,
    spec::{
        Arch, AttentionSpec, CodeLimit, DecodeHuffmanSpec, DecodeWarps, EmbedSpec, Epilogue, GemmCompactSpec,
        GemmJoinSpec, GemmMmaSpec, GemmReconSpec, GemmWgmmaSpec, KvPackSpec, KvUnpackSpec, LogprobsSpec, NormSpec, Op,
        RopeSpec, SampleSpec, ScaleSpec, SiluMulSpec, VariantSpec, catalog,
    },
};
use unweight_rt::{
    Error,
    cache::CacheState,
    env::{Env, JitMode},
    raw::jit::{
        cache::{CachePolicy, KernelCache},
        compiler::{CompileRequest, Compiler, NvrtcCompiler},
        cubin::{self, KernelInfo, Opcode},
    },
};

/// Returns the compiler. Fails with instructions if it is missing, because these tests would be meaningless without it.
fn compiler() -> NvrtcCompiler {
    let env = Env::process().unwrap_or_else(|error| panic!("{error}"));
    let compiler = NvrtcCompiler::new(env);
    if let Err(error) = compiler.nvrtc() {
        panic!(
            "these tests need NVRTC (no GPU): run `cargo xtask test`, which installs the Python wheel nvidia-cuda-nvrtc into \
             target/nvrtc, or set UNWEIGHT_NVRTC to a libnvrtc.so or a directory that holds it\n{error}"
        );
    }
    compiler
}

fn inline(name: &str, source: &str) -> CompileRequest {
    CompileRequest {
        name: name.to_owned(),
        source: source.to_owned(),
        headers: Vec::new(),
        options: Vec::new(),
        arch: "sm_90a".to_owned(),
    }
}

/// Compiles a kernel. Returns its properties and the log.
fn examine(compiler: &NvrtcCompiler, request: &CompileRequest) -> (KernelInfo, String) {
    let compiled = compiler.compile(request).unwrap_or_else(|error| panic!("{error}"));
    let info = cubin::read(&compiled.cubin).unwrap();
    let kernel = info.kernel(&request.name).unwrap().clone();
    assert_eq!(kernel.resources, compiled.resources);
    (kernel, compiled.log)
}

/// Returns faults that no shipped kernel may have.
fn faults(kernel: &KernelInfo, log: &str) -> Vec<String> {
    let mut faults = Vec::new();
    if kernel.spills() {
        let resources = &kernel.resources;
        faults.push(format!(
            "{} accesses to local memory, {} stack bytes",
            resources.local_accesses, resources.stack_bytes
        ));
    }
    if log.contains("spill") {
        faults.push("the log speaks of spills".to_owned());
    }
    if log.contains("Potential Performance Loss") {
        faults.push("Potential Performance Loss".to_owned());
    }
    if !faults.is_empty() && !log.is_empty() {
        faults.push(log.to_owned());
    }
    faults
}

/// Returns the source of a kernel with one line of inline assembly or CUDA.
fn around(body: &str) -> String {
    format!(
        "struct alignas(64) Map {{ unsigned long long opaque[16]; }};\n\
         extern \"C\" __global__ void __launch_bounds__(128, 4)\n\
         k(float* x, unsigned a, unsigned b, unsigned long long g, const __grid_constant__ Map m) {{\n{body}\n}}\n"
    )
}

#[test]
fn each_opcode_is_that_of_its_instruction() {
    let compiler = compiler();
    let mma = |operand: &str, inputs: &str| {
        format!(
            "float d0 = 0, d1 = 0, d2 = 0, d3 = 0;\n\
             asm volatile(\"wgmma.fence.sync.aligned;\");\n\
             asm volatile(\"{{.reg .pred p; setp.ne.b32 p, %5, 0;\"\n\
             \"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%0,%1,%2,%3}}, {operand}, 0;}}\"\n\
             : \"+f\"(d0), \"+f\"(d1), \"+f\"(d2), \"+f\"(d3) : \"l\"(g), \"r\"(b){inputs});\n\
             asm volatile(\"wgmma.commit_group.sync.aligned;\");\n\
             asm volatile(\"wgmma.wait_group.sync.aligned 0;\");\n\
             x[1] = d0 + d1 + d2 + d3;"
        )
    };
    let bulk = "cp.async.bulk";
    let table: Vec<(Opcode, u64, String)> = vec![
        (Opcode::HGMMA, 1, mma("%4, %4, p, 1, 1, 0", "")),
        (Opcode::HGMMA, 1, mma("{%6,%6,%6,%6}, %4, p, 1, 1", ", \"r\"(a)")),
        (
            Opcode::HMMA,
            1,
            "float d0 = 0, d1 = 0, d2 = 0, d3 = 0;\n\
             asm volatile(\"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%4,%4,%4},{%4,%4},{%0,%1,%2,%3};\"\n\
             : \"+f\"(d0), \"+f\"(d1), \"+f\"(d2), \"+f\"(d3) : \"r\"(b));\nx[1] = d0 + d1 + d2 + d3;"
                .to_owned(),
        ),
        (
            Opcode::UBLKCP,
            1,
            format!(
                "asm volatile(\"{bulk}.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];\"\n\
                 :: \"r\"(a), \"l\"(g), \"r\"(b), \"r\"(a + 64) : \"memory\");"
            ),
        ),
        (
            Opcode::UBLKCP,
            1,
            format!(
                "asm volatile(\"{bulk}.global.shared::cta.bulk_group [%0],[%1],%2;\" :: \"l\"(g), \"r\"(a), \"r\"(b) : \"memory\");"
            ),
        ),
        (
            Opcode::UTMALDG,
            1,
            format!(
                "asm volatile(\"{bulk}.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0],[%1,{{%2,%2}}],[%3];\"\n\
                 :: \"r\"(a), \"l\"(&m), \"r\"(b), \"r\"(a + 64) : \"memory\");"
            ),
        ),
        (
            Opcode::UTMASTG,
            1,
            format!(
                "asm volatile(\"{bulk}.tensor.2d.global.shared::cta.tile.bulk_group [%0,{{%2,%2}}],[%1];\"\n\
                 :: \"l\"(&m), \"r\"(a), \"r\"(b) : \"memory\");"
            ),
        ),
        (Opcode::USETMAXREG, 1, "asm volatile(\"setmaxnreg.dec.sync.aligned.u32 40;\"); x[threadIdx.x] = 1;".to_owned()),
        (
            Opcode::LDSM,
            1,
            "unsigned r, s, u, v;\n\
             asm volatile(\"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];\"\n\
             : \"=r\"(r), \"=r\"(s), \"=r\"(u), \"=r\"(v) : \"r\"(a));\nx[3] = r + s + u + v;"
                .to_owned(),
        ),
        (
            Opcode::STSM,
            1,
            "asm volatile(\"stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0],{%1,%1,%1,%1};\" :: \"r\"(a), \"r\"(b) : \"memory\");"
                .to_owned(),
        ),
        (Opcode::LDL, 1, "volatile float y[64]; for (int i = 0; i < 64; i++) y[(i * b) & 63] = x[i]; x[2] = y[a & 63];".to_owned()),
    ];
    let every = [
        Opcode::HGMMA,
        Opcode::HMMA,
        Opcode::UBLKCP,
        Opcode::UTMALDG,
        Opcode::UTMASTG,
        Opcode::USETMAXREG,
        Opcode::LDSM,
        Opcode::STSM,
        Opcode::LDL,
        Opcode::STL,
    ];
    let (plain, _) = examine(&compiler, &inline("k", &around("x[threadIdx.x] = 1;")));
    assert_eq!(plain.count(&every), 0, "{:?}", plain.opcodes);
    for (opcode, count, body) in table {
        let (kernel, _) = examine(&compiler, &inline("k", &around(&body)));
        assert_eq!(kernel.count(&[opcode]), count, "{opcode:?} in\n{body}\n{:?}", kernel.opcodes);
        // The opcode is not mistaken for any other in the list. An array in local memory is both stored to and loaded
        // from.
        let others: Vec<Opcode> = every
            .into_iter()
            .filter(|other| *other != opcode && !(opcode == Opcode::LDL && *other == Opcode::STL))
            .collect();
        assert_eq!(kernel.count(&others), 0, "{opcode:?} in\n{body}\n{:?}", kernel.opcodes);
    }
}

#[test]
fn resources_are_read_from_the_cubin() {
    let source = "extern \"C\" __global__ void __launch_bounds__(192) k(double* x, int a) {\n\
                  __shared__ double s[100]; s[threadIdx.x % 100] = x[threadIdx.x]; __syncthreads();\n\
                  x[threadIdx.x] = s[a]; }";
    let (kernel, log) = examine(&compiler(), &inline("k", source));
    let resources = &kernel.resources;
    assert_eq!((resources.max_threads, resources.static_smem_bytes, resources.param_bytes), (192, 800, 12));
    assert!((4..=64).contains(&resources.registers), "{resources:?}");
    assert_eq!(faults(&kernel, &log), [""; 0]);
}

#[test]
fn register_spill_is_detected() {
    // 64 values that live across a barrier, in 32 registers.
    let source = "extern \"C\" __global__ void k(float* x) {\n\
                  float v[64];\n\
                  #pragma unroll\n\
                  for (int i = 0; i < 64; i++) v[i] = x[i * 1024 + threadIdx.x];\n\
                  __syncthreads();\n\
                  #pragma unroll\n\
                  for (int i = 0; i < 64; i++) x[i * 1024 + threadIdx.x] = v[i] * v[(i + 1) % 64] + v[(i + 17) % 64];\n\
                  }";
    let compiler = compiler();
    let (kernel, log) = examine(&compiler, &inline("k", source));
    assert_eq!(faults(&kernel, &log), [""; 0]);
    let narrow = CompileRequest { options: vec!["--maxrregcount=32".to_owned()], ..inline("k", source) };
    let (kernel, log) = examine(&compiler, &narrow);
    let found = faults(&kernel, &log).join("\n");
    assert!(found.contains("accesses to local memory") && found.contains("the log speaks of spills"), "{found}");
}

#[test]
fn serialised_wgmma_is_detected() {
    // The accumulators are read while the product is still running.
    let body = "float d0 = 0, d1 = 0, d2 = 0, d3 = 0;\n\
        asm volatile(\"wgmma.fence.sync.aligned;\");\n\
        for (int i = 0; i < 4; i++) {\n\
        asm volatile(\"{.reg .pred p; setp.ne.b32 p, %5, 0;\"\n\
        \"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, %4, %4, p, 1, 1, 0, 0;}\"\n\
        : \"+f\"(d0), \"+f\"(d1), \"+f\"(d2), \"+f\"(d3) : \"l\"(g), \"r\"(b));\n\
        asm volatile(\"wgmma.commit_group.sync.aligned;\");\n\
        d0 += 1.0f; x[threadIdx.x] = d1;\n\
        }\n\
        asm volatile(\"wgmma.wait_group.sync.aligned 0;\");\n\
        x[1] = d0 + d1 + d2 + d3;";
    let (kernel, log) = examine(&compiler(), &inline("k", &around(body)));
    let found = faults(&kernel, &log).join("\n");
    assert!(found.contains("Potential Performance Loss"), "{found}\n{log}");
}

#[test]
fn ignored_setmaxnreg_is_detected() {
    // Without a bound on the registers at entry, there is nothing to trade.
    let source = "extern \"C\" __global__ void k(float* x) {\n\
                  asm volatile(\"setmaxnreg.dec.sync.aligned.u32 40;\"); x[threadIdx.x] = 1; }";
    let (kernel, log) = examine(&compiler(), &inline("k", source));
    assert_eq!(kernel.count(&[Opcode::USETMAXREG]), 0);
    let found = faults(&kernel, &log).join("\n");
    assert!(found.contains("Potential Performance Loss") && found.contains("setmaxnreg"), "{found}\n{log}");
}

#[test]
fn compile_error_shows_its_line_and_keeps_the_source() {
    let dir = tempfile::tempdir().unwrap();
    let cache = KernelCache::new(policy(JitMode::Auto), Some(&dir.path().join("cache")), Arc::new(compiler()));
    let request = CompileRequest {
        headers: vec![(
            "unweight/wrong.cuh".to_owned(),
            "#pragma once\n// two\n__device__ int f() { return missing; }\n// four\n".to_owned(),
        )],
        ..inline(
            "uw_wrong",
            "#include \"unweight/wrong.cuh\"\n// a comment\nextern \"C\" __global__ void uw_wrong() { undefined(); }\n",
        )
    };
    let error = cache.get(&request).unwrap_err();
    let text = error.to_string();
    let Error::Compile(failure) = &error else { panic!("{text}") };
    let locations: Vec<_> = failure.excerpts.iter().map(|excerpt| (excerpt.file.as_str(), excerpt.line)).collect();
    assert_eq!(locations, [("unweight/wrong.cuh", 3), ("uw_wrong.cu", 3)], "{text}");
    assert!(text.contains(">    3 | __device__ int f() { return missing; }"), "{text}");
    assert!(text.contains("identifier \"undefined\" is undefined"), "{text}");
    let kept = failure.kept.as_ref().unwrap();
    assert_eq!(std::fs::read_to_string(kept.join("kernel.cu")).unwrap(), request.source);
    assert_eq!(std::fs::read_to_string(kept.join("log.txt")).unwrap(), failure.log());
    // An unknown option and an unsupported architecture are reported as such.
    let good = inline("k", &around(""));
    let error =
        cache.get(&CompileRequest { options: vec!["--no-such-option".to_owned()], ..good.clone() }).unwrap_err();
    assert!(error.to_string().contains("no-such-option"), "{error}");
    let error = cache.get(&CompileRequest { arch: "compute_90a".to_owned(), ..good }).unwrap_err();
    assert!(error.to_string().contains("sm_90a"), "{error}");
}

fn policy(mode: JitMode) -> CachePolicy {
    CachePolicy { mode, lock_timeout: Duration::from_secs(60) }
}

/// Returns a kernel of each fourth family ([`sampled`]).
fn a_few() -> Vec<CompileRequest> {
    let first = sampled(FAMILIES).filter_map(|family| (family.catalogue)(Arch::Sm90a).first().copied());
    let few: Vec<_> = first.map(|spec| CompileRequest::render(&spec).unwrap()).collect();
    assert_eq!(few.len(), sampled(FAMILIES).count());
    few
}

#[test]
fn a_warm_cache_gives_the_same_bytes_without_a_compile() {
    let dir = tempfile::tempdir().unwrap();
    let requests = a_few();
    let cold = KernelCache::new(policy(JitMode::Auto), Some(dir.path()), Arc::new(compiler()));
    let cold = cold.compile_all(&requests, 2, &|_| {}).unwrap();
    assert!(cold.iter().all(|artifact| !artifact.state.is_hit()));
    // A new compiler, so that the time includes finding the library, which is loaded already.
    let start = Instant::now();
    let warm = KernelCache::new(policy(JitMode::Auto), Some(dir.path()), Arc::new(compiler()));
    let warm = warm.compile_all(&requests, 2, &|_| {}).unwrap();
    let elapsed = start.elapsed();
    println!("warm start of {} kernels: {elapsed:?}", warm.len());
    for (cold, warm) in cold.iter().zip(&warm) {
        assert_eq!(warm.state, CacheState::Hit);
        assert_eq!((&warm.cubin, &warm.resources, &warm.log), (&cold.cubin, &cold.resources, &cold.log));
    }
    // Below 1 ms on two idle x86-64 cores; the margin is for a busy machine.
    assert!(elapsed < Duration::from_millis(500), "a warm start took {elapsed:?}");
    // Another compile, by an earlier run or this one, gave the same bytes. This is why the content can be the key.
    let other = shared_cache().compile_all(&requests, 2, &|_| {}).unwrap();
    for (cold, other) in cold.iter().zip(&other) {
        assert_eq!(cold.cubin, other.cubin, "{}", cold.name);
    }
}

/// Returns the cache of kernels from earlier runs, keyed by source, options and compiler.
pub fn shared_cache() -> KernelCache {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cubins");
    KernelCache::new(policy(JitMode::Auto), Some(&folder), Arc::new(compiler()))
}

#[test]
fn the_catalogue_compiles_to_its_plans() {
    let env = Env::process().unwrap();
    let all = catalog::all(Arch::Sm90a);
    let mut specs = all.clone();
    if !whole_catalogue() {
        let mut blocks = BTreeSet::new();
        specs.reverse();
        specs.retain(|spec| is_worst(spec) && blocks.insert(block(spec)));
        let left_out = all.iter().find(|spec| !blocks.contains(&block(spec)));
        assert_eq!(left_out, None, "no variant with the most registers was compiled for this block size");
        // The first of each family, and each sixteenth after it.
        let mut blocks_of = BTreeMap::new();
        specs.retain(|spec| {
            let count = blocks_of.entry(spec.op.family()).or_insert(0);
            *count += 1;
            *count % 16 == 1
        });
        assert_eq!(blocks_of.len(), FAMILIES.len());
    }
    assert!(specs.len() > 30, "{} variants", specs.len());
    let requests: Vec<CompileRequest> = specs
        .iter()
        .map(|spec| CompileRequest::render(spec).unwrap_or_else(|error| panic!("{spec}: {error}")))
        .collect();
    let cache = shared_cache();
    let start = Instant::now();
    let artifacts = cache.compile_all(&requests, env.jit_threads, &|_| {}).unwrap_or_else(|error| panic!("{error}"));
    println!(
        "{} variants compiled in {:.1} s on {} threads",
        specs.len(),
        start.elapsed().as_secs_f64(),
        env.jit_threads
    );
    let mut wrong: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (spec, artifact) in specs.iter().zip(&artifacts) {
        let info = cubin::read(&artifact.cubin).unwrap();
        assert_eq!(info.kernels.len(), 1, "{spec}: one entry per translation unit");
        let kernel = info.kernel(&artifact.name).unwrap();
        let mut found = faults(kernel, &artifact.log);
        found.extend(differences(&Plan::new(spec).unwrap(), kernel));
        if !found.is_empty() {
            wrong.insert(artifact.name.clone(), found);
        }
    }
    let report: String = wrong.iter().map(|(name, found)| format!("\n{name}:\n  {}", found.join("\n  "))).collect();
    assert!(wrong.is_empty(), "{} of {} variants:{report}", wrong.len(), specs.len());
}

/// Whether to compile every variant (ten minutes on two cores) or only the most demanding one of each sixteenth block.
/// Set `UNWEIGHT_TEST_ALL` after a change of a kernel, the generator or NVRTC.
fn whole_catalogue() -> bool {
    std::env::var_os("UNWEIGHT_TEST_ALL").is_some()
}

/// Returns each fourth element, or all of them ([`whole_catalogue`]).
fn sampled<T>(all: &[T]) -> impl Iterator<Item = &T> {
    all.iter().step_by(if whole_catalogue() { 1 } else { 4 })
}

/// Returns the block of a variant: the variant without the axes that change neither its tiles nor its rings. For
/// decoders, a block also includes the form of the table: pairs of codes, single codes, or half the size.
fn block(spec: &VariantSpec) -> VariantSpec {
    let op = match spec.op {
        Op::GemmMma(op) => Op::GemmMma(GemmMmaSpec { escapes: true, pdl: false, epilogue: Epilogue::Store, ..op }),
        Op::GemmCompact(op) => Op::GemmCompact(GemmCompactSpec { pdl: false, epilogue: Epilogue::Store, ..op }),
        Op::GemmWgmma(op) => {
            Op::GemmWgmma(GemmWgmmaSpec { escapes: true, pdl: false, epilogue: Epilogue::Store, ..op })
        }
        Op::GemmRecon(op) => Op::GemmRecon(GemmReconSpec { epilogue: Epilogue::Store, ..op }),
        Op::GemmJoin(op) => Op::GemmJoin(GemmJoinSpec { epilogue: Epilogue::Store, ..op }),
        Op::Attention(op) => Op::Attention(AttentionSpec { pdl: false, ..op }),
        Op::DecodeHuffman(op) => {
            let limit = match op.code_limit.get() {
                ..=7 => 7,
                15 => 15,
                _ => 9,
            };
            let code_limit = CodeLimit::new(limit).unwrap();
            let warps = DecodeWarps::new(Plan::new(spec).unwrap().roles.warps()).unwrap();
            Op::DecodeHuffman(DecodeHuffmanSpec { code_limit, warps, ..op })
        }
        Op::Embed(op) => Op::Embed(EmbedSpec { pdl: false, ..op }),
        Op::Norm(op) => Op::Norm(NormSpec { pdl: false, ..op }),
        Op::Rope(op) => Op::Rope(RopeSpec { pdl: false, ..op }),
        Op::Scale(op) => Op::Scale(ScaleSpec { pdl: false, ..op }),
        Op::SiluMul(op) => Op::SiluMul(SiluMulSpec { pdl: false, ..op }),
        Op::KvPack(op) => Op::KvPack(KvPackSpec { pdl: false, ..op }),
        Op::KvUnpack(op) => Op::KvUnpack(KvUnpackSpec { pdl: false, ..op }),
        Op::Sample(op) => Op::Sample(SampleSpec { pdl: false, ..op }),
        Op::Logprobs(op) => Op::Logprobs(LogprobsSpec { pdl: false, ..op }),
        op => op,
    };
    VariantSpec { op, ..*spec }
}

/// Returns whether a variant is the one of its block that needs most registers, judging by its name.
fn is_worst(spec: &VariantSpec) -> bool {
    match spec.op {
        Op::GemmMma(op) => op.dump || op.escapes && op.epilogue == Epilogue::SiluMul,
        Op::GemmWgmma(op) => op.dump || op.escapes && op.epilogue == Epilogue::SiluMul,
        Op::GemmRecon(op) => op.epilogue == Epilogue::StoreAdd,
        Op::GemmJoin(op) => op.epilogue == Epilogue::StoreAdd,
        Op::GemmCompact(op) => op.epilogue == Epilogue::SiluMul,
        _ => true,
    }
}

/// Returns the block that represents a variant. Matmuls and routing use all registers, which the assembler of each
/// generation allocates differently: every block is compiled for the first architecture of a generation. Blocks that
/// need fewer are compiled for the first architecture that has them.
fn stands_for(spec: &VariantSpec) -> VariantSpec {
    let arch = match (spec.arch, spec.op) {
        (Arch::Sm89, Op::GemmMma(_)) => Arch::Sm86,
        (Arch::Sm103a, Op::GemmMma(_) | Op::GemmCompact(_)) => Arch::Sm100a,
        (arch, Op::GemmMma(_) | Op::GemmCompact(_) | Op::Route(_)) => arch,
        _ => Arch::Sm90a,
    };
    VariantSpec { arch, ..block(spec) }
}

/// Variants for other architectures compile to their plans without spills: each block as its most demanding variant
/// (without `UNWEIGHT_TEST_ALL` an eighth of them, and none of large families), and on the oldest and the newest
/// data-center architecture one of each family (with `UNWEIGHT_TEST_ALL`: and batch tile, output format and KV cache).
/// No such device was available, so this is their only test.
#[test]
fn other_architectures_compile_to_their_plans() {
    let others = || Arch::ALL.iter().copied().filter(|arch| *arch != Arch::Sm90a);
    let (mut specs, mut blocks, mut kinds) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
    for spec in others().flat_map(|arch| catalog::all(arch).into_iter().rev()).filter(is_worst) {
        let kind = match spec.op {
            _ if !whole_catalogue() => 0,
            Op::GemmMma(op) => op.batch_tile.get(),
            Op::DecodeHuffman(op) => op.output as u32,
            Op::Attention(op) => 2 * op.step as u32 + op.cache as u32,
            _ => 0,
        };
        let is_new = blocks.insert(stands_for(&spec));
        // These families have most blocks. All blocks are compiled every night, otherwise an eighth of the others.
        let is_large = matches!(
            spec.op,
            Op::GemmMma(_) | Op::GemmCompact(_) | Op::Attention(_) | Op::DecodeHuffman(_) | Op::KvPack(_)
        );
        let is_new = is_new && (whole_catalogue() || !is_large && blocks.len() % 8 == 0);
        let is_compiled = whole_catalogue() || matches!(spec.arch, Arch::Sm80 | Arch::Sm100a);
        if is_compiled && kinds.insert((spec.arch, spec.op.family(), kind)) || is_new {
            specs.push(spec);
        }
    }
    let left_out = others().flat_map(catalog::all).find(|spec| !blocks.contains(&stands_for(spec)));
    assert_eq!(left_out, None, "no variant with the most registers was compiled for this block size");
    let requests: Vec<_> = specs.iter().map(|spec| CompileRequest::render(spec).unwrap()).collect();
    let cache = shared_cache();
    let threads = Env::process().unwrap().jit_threads;
    let start = Instant::now();
    let artifacts = cache.compile_all(&requests, threads, &|_| {}).unwrap_or_else(|error| panic!("{error}"));
    println!("{} variants compiled in {:.1} s on {threads} threads", specs.len(), start.elapsed().as_secs_f64());
    let mut report = String::new();
    for (spec, artifact) in specs.iter().zip(&artifacts) {
        let info = cubin::read(&artifact.cubin).unwrap();
        let kernel = info.kernel(&artifact.name).unwrap();
        let mut found = faults(kernel, &artifact.log);
        found.extend(differences(&Plan::new(spec).unwrap(), kernel));
        if !found.is_empty() {
            report.push_str(&format!("\n{spec}:\n  {}", found.join("\n  ")));
        }
    }
    assert!(report.is_empty(), "{report}");
}

/// Variants outside the catalogue also compile to their plans. They may spill, which is why they are not shipped.
#[test]
fn extreme_axis_values_compile_to_their_plans() {
    let names = [
        "uw_sm90a_gemm_mma_b8_r8w4p2c1_esc_store",
        "uw_sm90a_gemm_mma_b8_r1w32p2c1_esc_store",
        "uw_sm90a_gemm_mma_b16_r2w4p2c8_pdl_silu_mul",
        "uw_sm90a_gemm_mma_b8_r1w2p2c8_esc_silu_mul",
        "uw_sm90a_gemm_mma_b64_r1w1p16c4_persistent_store_add",
        "uw_sm90a_gemm_wgmma_b32_g1p3_esc_store",
        "uw_sm90a_gemm_wgmma_b32_g1p16_store_add",
        "uw_sm90a_gemm_wgmma_b256_g1p4_streamk_esc_pdl_store_add",
        "uw_sm90a_gemm_wgmma_b128_g3p4_esc_store_dump",
        "uw_sm90a_gemm_wgmma_b192_g2p4_streamk_store",
        "uw_sm90a_gemm_wgmma_b256_g2p4c8_esc_store_add",
        "uw_sm90a_gemm_wgmma_b32_g1p3c2_pdl_store",
        "uw_sm90a_gemm_wgmma_b32_g3p4_streamk_esc_silu_mul",
        "uw_sm90a_norm_t1024_layer_add_pdl",
        "uw_sm90a_rope_d96_adjacent_pdl",
        "uw_sm90a_attention_decode_d64_w4p4c8_adjacent_pdl",
        "uw_sm90a_attention_decode_d128_w8p2c1_adjacent_pdl",
        "uw_sm90a_attention_decode_d128_w4p3c8_packed_adjacent_pdl",
        "uw_sm80_attention_decode_d128_w4p2c1_split_async_adjacent",
    ];
    let specs: Vec<VariantSpec> = sampled(&names).map(|name| name.parse().unwrap()).collect();
    let requests: Vec<_> = specs.iter().map(|spec| CompileRequest::render(spec).unwrap()).collect();
    let cache = shared_cache();
    let artifacts = cache.compile_all(&requests, 2, &|_| {}).unwrap_or_else(|error| panic!("{error}"));
    for (spec, artifact) in specs.iter().zip(&artifacts) {
        let info = cubin::read(&artifact.cubin).unwrap();
        assert_eq!(differences(&Plan::new(spec).unwrap(), info.kernel(&artifact.name).unwrap()), [""; 0], "{spec}");
    }
}

/// Variants for the heads of Gemma 2, Gemma 3 and Falcon3 are not all shipped, and do not spill either.
#[test]
fn large_heads_and_soft_caps_compile_without_spills() {
    let of = |arch: Arch, name: &str| format!("uw_{}_attention_{name}", arch.tag());
    let bulk = ["decode_d256_w4p1c1", "decode_d256_w4p1c8", "prefill_d256_w4p2c1"];
    let copied = ["decode_d256_w4p1c1_split_async", "prefill_d256_w4p2c1_async"];
    let mut names = Vec::new();
    let archs = [Arch::Sm80, Arch::Sm90a, Arch::Sm86, Arch::Sm100a, Arch::Sm120a];
    for arch in archs.into_iter().take(if whole_catalogue() { archs.len() } else { 2 }) {
        let (shapes, pdl) = if arch.has(Instruction::Cluster) { (&bulk[..], "_pdl") } else { (&copied[..], "") };
        for shape in shapes {
            names.extend(["", "_softcap"].map(|more| of(arch, &format!("{shape}{more}{pdl}"))));
            if shape.starts_with("decode") {
                names.push(of(arch, &format!("{shape}_plus_one{pdl}")));
            }
        }
    }
    let large = ["decode_d128_w8p2c1", "decode_d128_w4p2c8", "decode_d128_w8p3c1_packed", "prefill_d128_w4p2c1"];
    names.extend(large.map(|shape| of(Arch::Sm90a, &format!("{shape}_softcap_pdl"))));
    names.push("uw_sm90a_rope_d256_plus_one_pdl".to_owned());
    let specs: Vec<VariantSpec> = sampled(&names).map(|name| name.parse().unwrap()).collect();
    let requests: Vec<_> = specs.iter().map(|spec| CompileRequest::render(spec).unwrap()).collect();
    let artifacts = shared_cache().compile_all(&requests, 2, &|_| {}).unwrap_or_else(|error| panic!("{error}"));
    for (spec, artifact) in specs.iter().zip(&artifacts) {
        let info = cubin::read(&artifact.cubin).unwrap();
        let kernel = info.kernel(&artifact.name).unwrap();
        assert_eq!(faults(kernel, &artifact.log), [""; 0], "{spec}");
        assert_eq!(differences(&Plan::new(spec).unwrap(), kernel), [""; 0], "{spec}");
    }
}

/// Returns how a kernel differs from its plan.
fn differences(plan: &Plan, kernel: &KernelInfo) -> Vec<String> {
    let resources = &kernel.resources;
    let limits = plan.spec.arch.limits();
    let mut found = Vec::new();
    let mut check = |holds: bool, text: String| {
        if !holds {
            found.push(text);
        }
    };
    check(
        resources.max_threads == plan.launch.threads,
        format!("compiled for {} threads, plan {}", resources.max_threads, plan.launch.threads),
    );
    let fitting = limits.registers_for(plan.launch.threads, plan.launch.blocks_per_sm);
    check(
        resources.registers <= fitting,
        format!(
            "{} registers, {fitting} fit for {} blocks of {} threads per SM",
            resources.registers, plan.launch.blocks_per_sm, plan.launch.threads
        ),
    );
    // Roles exchange registers within the launch's allocation. If they request more, setmaxnreg waits forever.
    let raised = plan.roles.roles().any(|role| role.registers.is_some());
    let traded: u32 = plan
        .roles
        .roles()
        .map(|role| role.registers.unwrap_or(resources.registers) * role.warps * limits.warp_threads)
        .sum();
    let allocated = resources.registers * plan.launch.threads;
    check(traded <= allocated, format!("roles ask for {traded} registers, the launch allocates {allocated}"));
    // All shared memory is dynamic, in the plan's sections.
    check(resources.static_smem_bytes == 0, format!("{} bytes of static shared memory", resources.static_smem_bytes));
    check(
        plan.smem.bytes() <= limits.smem_bytes_per_block,
        format!("{} bytes of shared memory, limit {}", plan.smem.bytes(), limits.smem_bytes_per_block),
    );
    let family = plan.spec.op.info();
    let args_bytes = family.args.bytes;
    check(
        resources.param_bytes as usize == args_bytes,
        format!("{} bytes of parameters, abi {args_bytes}", resources.param_bytes),
    );
    // Instructions that the family is built around, and instructions that must be absent.
    let has = |instruction| plan.spec.op.instructions().has(instruction);
    let expected = [
        ("HGMMA", Opcode::HGMMA, has(Instruction::Wgmma)),
        ("HMMA", Opcode::HMMA, has(Instruction::Mma)),
        ("LDGSTS", Opcode::LDGSTS, has(Instruction::AsyncCopy)),
        ("UBLKCP", Opcode::UBLKCP, has(Instruction::BulkCopy)),
        ("UTMALDG", Opcode::UTMALDG, has(Instruction::TensorCopy)),
        ("USETMAXREG", Opcode::USETMAXREG, raised),
    ];
    for (name, opcode, meant) in expected {
        let count = kernel.count(&[opcode]);
        check((count > 0) == meant, format!("{count} {name}, {} expected", if meant { "some" } else { "none" }));
    }
    found
}
