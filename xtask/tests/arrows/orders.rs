//! Declares the order of the crates, and of the modules in each crate, from the bottom up.

/// A crate of the repository.
pub struct Crate {
    /// The directory, relative to the root.
    pub folder: &'static str,
    /// The name of the package.
    pub name: &'static str,
    /// A few words on its content.
    pub holds: &'static str,
    /// Packages of the workspace that it may depend on.
    pub above: &'static [&'static str],
    /// The modules of its root. A module may refer to modules of lower levels only.
    pub levels: &'static [Level],
}

/// Names of modules, separated by spaces, and a few words on their content.
pub type Level = (&'static str, &'static str);

impl Crate {
    /// Returns the directory of its sources.
    pub fn source(&self) -> String {
        if self.folder == "." { "src".to_owned() } else { format!("{}/src", self.folder) }
    }
}

/// Every package of the workspace, from the bottom up. The bindings are separate workspaces.
pub const CRATES: [Crate; 11] = [
    Crate {
        folder: "unweight-format",
        name: "unweight-format",
        holds: "bytes of the format, CPU codec, bundles",
        above: &[],
        levels: &[
            ("bits failpoint", "bytes, tiles, histograms, digests, codec errors; crashes for tests"),
            ("placement", "how weights are held in device memory"),
            ("encoding", "a file per encoding, one list; the oracle"),
            ("model", "safetensors, names to roles"),
            ("bundle", "plan, compress, decompress, verify, read; attached kernels"),
            ("raw testing", "unstable internals for other crates; random weights, a demo model"),
        ],
    },
    Crate {
        folder: "templates",
        name: "unweight-templates",
        holds: "the directory templates/, embedded",
        above: &[],
        levels: &[],
    },
    Crate {
        folder: "unweight-macros",
        name: "unweight-macros",
        holds: "#[unweight_variant(...)]; knows no kernel family",
        above: &[],
        levels: &[
            ("attr fallback", "tokens of the attribute; output next to errors"),
            ("valid", "checks of the attribute"),
            ("expand", "the impl, with const assertions"),
        ],
    },
    Crate {
        folder: "unweight-model",
        name: "unweight-model",
        holds: "configuration, names by role, RoPE, reference",
        above: &["unweight-format"],
        levels: &[
            ("rope sampling", "frequencies and tables; how a token is chosen"),
            ("config", "config.json, generation_config.json, transformers' defaults"),
            ("bind capacity geometry", "names by role; bytes of weights and KV cache; published models"),
            ("reference", "the forward pass in f32, slow and obvious"),
        ],
    },
    Crate {
        folder: "unweight-codegen",
        name: "unweight-codegen",
        holds: "VariantSpec -> plan -> CUDA source",
        above: &["unweight-format", "unweight-macros", "unweight-templates"],
        levels: &[
            ("args kv text", "argument structs; KV pages; text in const functions"),
            ("axes", "axes of a variant and their values"),
            ("limits", "what an architecture allows"),
            ("block", "shared memory, roles and rings of one thread block"),
            ("family external", "a file per kernel family, one list; external kernels"),
            ("abi plan", "argument structs by kernel; launch plans"),
            ("error spec", "errors; names, attributes, the catalog"),
            ("source", "a rendered kernel with its headers"),
            ("lint", "what must hold of a source"),
            ("render", "spec to source: the only module that names tera"),
        ],
    },
    Crate {
        folder: "unweight-rt",
        name: "unweight-rt",
        holds: "compile, cache, load, choose, launch",
        above: &["unweight-format", "unweight-codegen"],
        levels: &[
            ("env", "variables of the environment"),
            ("choose jit", "dispatch; NVRTC, cubins, the cache: neither names a device"),
            ("device", "devices, streams, buffers, views, launches"),
            ("exec weight", "execution contexts, cuBLAS; stored tensors on a device"),
            ("ops", "launches, a file per kernel family"),
            ("launcher layer", "declared variants to ops; linear layers, experts, interop"),
            ("cache experts interop raw", "public parts; raw: unstable internals"),
        ],
    },
    Crate {
        folder: "unweight-engine",
        name: "unweight-engine",
        holds: "whole models: schedule, KV cache, graphs",
        above: &["unweight-format", "unweight-model", "unweight-codegen", "unweight-rt"],
        levels: &[
            ("attention constraint options pages", "splits of attention; grammars; engine options; KV pages"),
            ("prefix request", "shared beginnings of prompts; requests and events"),
            ("draft", "drafts by n-gram or by a model"),
            ("schedule", "rows of sequences, and what is next: pure"),
            ("error", "errors"),
            ("memory", "bytes, before anything is allocated"),
            ("kv_cache", "the KV cache on the device"),
            ("budget", "an encoding per tensor within a memory: pure"),
            ("kernels", "other kernels"),
            ("sampling weights", "how rows are sampled; weights of a bundle, or random ones, to the device"),
            ("forward", "launches of one pass"),
            ("pipelines", "the report's runtime, feature `pipelines`"),
            ("engine", "load, steps, logits; measure and objective time them"),
            ("raw", "unstable internals, for benchmarks"),
        ],
    },
    Crate {
        folder: "unweight-rivals",
        name: "unweight-rivals",
        holds: "other systems' formats, read and written",
        above: &["unweight-format", "unweight-codegen", "unweight-rt"],
        levels: &[
            ("dfloat11 matvans tans zipserv", "a format each, with an oracle"),
            ("cuda", "their kernels (adr/0008), feature `gpu`; headers in kernels/"),
        ],
    },
    Crate {
        folder: ".",
        name: "unweight",
        holds: "facade library and the `unweight` binary",
        above: &[
            "unweight-format",
            "unweight-model",
            "unweight-codegen",
            "unweight-macros",
            "unweight-rt",
            "unweight-engine",
            "unweight-rivals",
        ],
        levels: &[
            ("hub", "a client of the Hugging Face Hub"),
            ("text", "text to token ids and back, chat templates"),
            ("serve", "an HTTP server over an engine"),
            ("cli", "the command line"),
        ],
    },
    Crate {
        folder: "unweight-bench",
        name: "unweight-bench",
        holds: "timing, contenders, reports; its own binary",
        above: &[
            "unweight",
            "unweight-format",
            "unweight-model",
            "unweight-codegen",
            "unweight-rt",
            "unweight-engine",
            "unweight-rivals",
        ],
        levels: &[
            ("data error options oracle", "problems, expected results, options"),
            ("attention", "problems of attention in double precision"),
            ("kv timing tuned", "packed KV pages; graphs on the clock; settings of step graphs"),
            ("decode kernels matmul rivals", "a measurement each"),
            ("speculate stress tables", "drafts; every kernel under load; the report's tables"),
            ("cli", "the command line of the binary"),
        ],
    },
    Crate {
        folder: "xtask",
        name: "xtask",
        holds: "tasks of this repository; not published",
        above: &[],
        levels: &[
            ("run", "programs and their output"),
            ("kernel_digests rustc setup", "digests of machine code; a compiler without places; what `target/` holds"),
            (
                "gpu_pack lint notices peers records sbom",
                "a test for a GPU machine; linters; licences; other systems; tables; SBOMs",
            ),
            ("wheel", "the Python package"),
            ("dist test", "the files of a release; all tests"),
            ("release", "tests of those files"),
        ],
    },
];

/// Modules inside a module that have an order: directory, and levels from the bottom up, separated by `<`. Directories
/// that are not listed contain peers (families, rivals) or parts of one algorithm.
pub const INNER: &[(&str, &str)] = &[
    (
        "unweight-format/src/bits",
        "bf16 bitstream buffer layout named parallel < digest dtype < float < delta error histogram < tile",
    ),
    (
        "unweight-format/src/encoding",
        "code id section survey < bands sample tiles < raw < stored < packed palette rans < huffman \
         < compact exponents < oracle",
    ),
    (
        "unweight-format/src/bundle/compress",
        "journal predict run seal < check tensor < shard_writer < resume unit < encode write < shards",
    ),
    (
        "unweight-format/src/bundle",
        "trace < blocks section_bytes < encoder holder names part progress version < error < pipeline signer < options \
         < manifest < config files report < plan shard sign source < handle part_file < stage < manifest_file < base \
         < compress output < attached decompress < merge read verify < stream",
    ),
    ("unweight-model/src/config", "error families < fields < parse"),
    ("unweight-rt/src/choose", "candidates graph recon < cost table < policy < route < reachable"),
    (
        "unweight-rt/src/device",
        "context_size ranges < error < device graph < stream < buffer module raw < kernels launch pinned view < copies \
         external staging tma < pinned_pool",
    ),
    ("unweight-rt/src/jit", "cubin miss request toolchain < nvrtc remedy < failure < error < compiler process < cache"),
    ("unweight-rt/src/exec", "operands workspace < cublas < context"),
    (
        "unweight-rt/src/ops",
        "decode_compact decode_huffman embed gemm_compact gemm_grouped gemm_packed gemm_recon kv logprobs norm route \
         sample scale silu_mul < kv_packed rope unpack < attention kv_unpack pack update < encode_compact kv_pack < \
         encode_huffman < bundle_encoder",
    ),
    ("unweight-rt/src/weight", "coded compact matrix packed palette < experts exponents huffman"),
    ("unweight-rt/src/layer", "error experts linear options < build < interop loader"),
    ("unweight-rt/src/layer/linear", "bf16 routes < expanded < compact packed"),
    ("unweight-engine/src/pipelines", "step_graph tune weights < runner space tuned"),
    ("unweight-engine/src/pipelines/step_graph", "clock < build check"),
    ("unweight-engine/src/pipelines/tune", "answer key space < journal < search"),
    ("unweight-engine/src/engine", "draft_model routing stepper < measure < load logits objective"),
    ("unweight-rivals/src/dfloat11", "error < code config tensors < unit < oracle restore < model"),
    (
        "unweight-bench/src/stress",
        "load report weights < results < activations attention experts kv products rivals updates",
    ),
    ("src/hub", "digest error url < settings < client < repository < cache push < fetch"),
    ("src/text", "clock error prompt watch < chat frame < vocabulary < grammar < compiled local < child < process"),
    (
        "src/serve",
        "backend options tool_calls < cpu metrics < worker < error < bodies fields < frame places structure tools < echo sampling < \
         api < prepare tokenize < answer < routes < listen",
    ),
    (
        "src/cli",
        "arch printable signals size < common failure < absent archive output scratch < completions pipelines plot \
         program progress report sign text_process trust < hub reference < source < select < budget cache card compress \
         convert decompress demo doctor extract generate inspect kernels man plan prove push tune verify < merge serve",
    ),
];
