//! What each template sees: one typed struct per template, filled from the plan alone.
//!
//! | template | context |
//! |---|---|
//! | `kernels/decode.cu.tera` | [`DecodeContext`] |
//! | `kernels/gemm_recon.cu.tera` | [`GemmReconContext`] |
//! | `kernels/encode.cu.tera` | [`EncodeContext`] |
//! | `kernels/gemm_mma.cu.tera` | [`GemmMmaContext`] |
//! | `kernels/gemm_wgmma.cu.tera` | [`GemmWgmmaContext`] |
//! | `kernels/repack.cu.tera` | [`RepackContext`] |
//!
//! `partials/head.tera` sees the [`Head`] that all of them carry. A field that no template reads is dead; a field that a template
//! reads and the struct lacks is a render error.

use crate::{
    abi::{DecodeArgs, EncodeArgs, GemmPackedArgs, GemmReconArgs, RepackArgs},
    plan::{Plan, SmemSection},
    spec::{
        DecodeOutput, DecodeSpec, EncodeSpec, EncodeStage, Epilogue, GemmMmaSpec, GemmReconSpec, GemmWgmmaSpec,
        RepackSpec, RepackStage, WeightSource,
    },
};
use serde::Serialize;

/// What every kernel says about itself and asserts.
#[derive(Debug, Serialize)]
pub struct Head {
    /// Canonical name and entry point.
    pub name: String,
    /// What the kernel does, one line.
    pub summary: String,
    /// The grid rule, in words.
    pub grid: String,
    /// Threads of a block.
    pub threads: u32,
    /// Blocks that must fit one SM: the second number of `__launch_bounds__`.
    pub blocks_per_sm: u32,
    /// Dynamic shared memory of a block.
    pub smem_bytes: u32,
    /// The sections of shared memory, in address order.
    pub sections: Vec<Section>,
    /// `sizeof` the argument struct on the host.
    pub args_bytes: usize,
}

/// Where the kernel must have put a section of shared memory.
#[derive(Debug, Serialize)]
pub struct Section {
    /// The constant of the kernel's `Smem` that holds the offset: `kSourceBarriers` for `source_barriers`.
    pub constant: String,
    /// Bytes from the start.
    pub offset: u32,
}

impl Section {
    fn new(section: &SmemSection) -> Self {
        let camel = section.name.split('_').map(|word| match word.split_at_checked(1) {
            Some((first, rest)) => first.to_ascii_uppercase() + rest,
            None => String::new(),
        });
        Self { constant: format!("k{}", camel.collect::<String>()), offset: section.offset }
    }
}

impl Head {
    fn new<Args>(plan: &Plan, summary: String) -> Self {
        Self {
            name: plan.spec.to_string(),
            summary,
            grid: plan.launch.grid.to_string(),
            threads: plan.launch.threads,
            blocks_per_sm: plan.launch.blocks_per_sm,
            smem_bytes: plan.smem.bytes(),
            sections: plan.smem.sections().iter().map(Section::new).collect(),
            args_bytes: size_of::<Args>(),
        }
    }
}

/// Context of `decode.cu.tera`.
#[derive(Debug, Serialize)]
pub struct DecodeContext {
    /// See [`Head`].
    pub head: Head,
    /// `Config::kOutput`: 0 full, 1 exponent, 2 palette.
    pub output: u32,
    /// `Config::kCodeLimit`, bits.
    pub code_limit: u32,
    /// `Config::kWarps`.
    pub warps: u32,
}

impl DecodeContext {
    /// The context of a decoder.
    pub fn new(plan: &Plan, spec: &DecodeSpec) -> Self {
        let (output, written) = match spec.output {
            DecodeOutput::Full => (0, "bf16 [n, k], row-major"),
            DecodeOutput::Exponent => (1, "u8 exponents [tiles, 64, 64]"),
            DecodeOutput::Palette => (2, "packed 4-bit palette indices [tiles, 64, 32]"),
        };
        let code_limit = spec.code_limit.get();
        let summary = format!("Huffman tensor with codes of at most {code_limit} bits -> {written}.");
        Self { head: Head::new::<DecodeArgs>(plan, summary), output, code_limit, warps: plan.roles.warps() }
    }
}

/// What a matmul computes.
fn product(epilogue: Epilogue) -> &'static str {
    match epilogue {
        Epilogue::Store => "Y[m,n] = X[m,k] * W[n,k]^T",
        Epilogue::StoreAdd => "Y[m,n] += X[m,k] * W[n,k]^T",
        Epilogue::SiluMul => "Y[m,n/2] = silu(G) * U, G and U blocks of 16 columns in turn of X[m,k] * W[n,k]^T",
    }
}

/// Context of `matmul.cu.tera`.
#[derive(Debug, Serialize)]
pub struct GemmReconContext {
    /// See [`Head`].
    pub head: Head,
    /// `Config::kPaletteSource`.
    pub palette_source: bool,
    /// `Config::kNTiles`.
    pub n_tiles: u32,
    /// `Config::kStages`.
    pub stages: u32,
    /// `Config::kVerbatimRows`.
    pub verbatim_rows: u32,
    /// `Config::kStoreAdd`.
    pub store_add: bool,
    /// Registers per thread of the loading warpgroup.
    pub producer_registers: u32,
    /// Registers per thread of the multiplying warpgroups.
    pub consumer_registers: u32,
}

impl GemmReconContext {
    /// The context of a matmul.
    pub fn new(plan: &Plan, spec: &GemmReconSpec) -> Self {
        let product = product(spec.epilogue);
        let source = match spec.source {
            WeightSource::Exponent => "decoded exponents".to_owned(),
            WeightSource::Palette { verbatim } => {
                format!("palette indices with room for {} verbatim rows per tile", verbatim.get())
            }
        };
        let columns = 64 * spec.n_tiles.get();
        let rows = if spec.n_tiles.get() == 2 { 256 } else { 128 };
        let mut registers = plan.roles.roles().filter_map(|role| role.registers);
        let summary = format!(
            "{product}, W from {source}; up to {rows} x {columns} of Y per block, {} stages.",
            spec.stages.get()
        );
        Self {
            head: Head::new::<GemmReconArgs>(plan, summary),
            palette_source: matches!(spec.source, WeightSource::Palette { .. }),
            n_tiles: spec.n_tiles.get(),
            stages: spec.stages.get(),
            verbatim_rows: spec.verbatim_rows(),
            store_add: matches!(spec.epilogue, Epilogue::StoreAdd),
            producer_registers: registers.next().unwrap_or_default(),
            consumer_registers: registers.next().unwrap_or_default(),
        }
    }
}

/// Context of `encode.cu.tera`.
#[derive(Debug, Serialize)]
pub struct EncodeContext {
    /// See [`Head`].
    pub head: Head,
    /// The function of `uw::encode`.
    pub function: &'static str,
    /// The constant of `uw::encode` that holds the threads of a block.
    pub threads_constant: &'static str,
    /// The constant of `uw::encode` that holds the bytes of shared memory, where there are any.
    pub smem_constant: Option<&'static str>,
}

impl EncodeContext {
    /// The context of an encoder stage.
    pub fn new(plan: &Plan, spec: &EncodeSpec) -> Self {
        let summary = match spec.stage {
            EncodeStage::Stats => "Elements -> sign_mantissa and the histogram of exponents.",
            EncodeStage::Table => "Histogram -> palette, code lengths and encode table.",
            EncodeStage::DecodeTable => "Palette and code lengths -> flat decode table.",
            EncodeStage::Rows => "Elements -> row lengths, verbatim rows, and words and rows of each tile.",
            EncodeStage::Scan => "Words and rows of each tile -> offsets and totals.",
            EncodeStage::Write => "Elements and offsets -> bitstream and verbatim rows.",
            EncodeStage::Palette => "Elements and offsets -> packed palette indices and verbatim rows.",
        };
        let (threads_constant, smem_constant) = match spec.stage {
            EncodeStage::Stats => ("kStatsThreads", Some("kStatsSmemBytes")),
            EncodeStage::Table => ("kTableThreads", Some("kTableSmemBytes")),
            EncodeStage::DecodeTable => ("kDecodeTableThreads", None),
            EncodeStage::Rows => ("kTileThreads", Some("kRowsSmemBytes")),
            EncodeStage::Scan => ("kScanThreads", Some("kScanSmemBytes")),
            EncodeStage::Write => ("kTileThreads", Some("kWriteSmemBytes")),
            EncodeStage::Palette => ("kTileThreads", Some("kPaletteSmemBytes")),
        };
        Self {
            head: Head::new::<EncodeArgs>(plan, summary.to_owned()),
            function: spec.stage.tag(),
            threads_constant,
            smem_constant,
        }
    }
}

/// What both kernels of the register-sourced family have in their `Config`.
#[derive(Debug, Serialize)]
pub struct GemmPackedContext {
    /// `Config::kBatchTile`.
    pub batch_tile: u32,
    /// `Config::kStages`.
    pub stages: u32,
    /// `Config::kEscapes`.
    pub escapes: bool,
    /// `Config::kStoreAdd`.
    pub store_add: bool,
    /// `Config::kPdl`.
    pub pdl: bool,
    /// `Config::kDumpOperands`.
    pub dump: bool,
}

impl GemmPackedContext {
    /// How the weights are read and what is left out, in words.
    fn summary(&self, epilogue: Epilogue, block: &str) -> String {
        let escapes = if self.escapes { "exact escapes" } else { "no escapes" };
        let pdl = if self.pdl { ", dependent launch" } else { "" };
        let dump = if self.dump { ", operands dumped" } else { "" };
        format!("{}, W packed to 12 bits, {escapes}; {block}{pdl}{dump}.", product(epilogue))
    }
}

/// Context of `gemm_mma.cu.tera`.
#[derive(Debug, Serialize)]
pub struct GemmMmaContext {
    /// See [`Head`].
    pub head: Head,
    /// See [`GemmPackedContext`].
    pub packed: GemmPackedContext,
    /// `Config::kRowBlocks`.
    pub row_blocks: u32,
    /// `Config::kWarps`.
    pub warps: u32,
    /// `Config::kCluster`.
    pub cluster: u32,
    /// `Config::kPersistent`.
    pub persistent: bool,
    /// `Config::kSiluMul`.
    pub silu_mul: bool,
}

impl GemmMmaContext {
    /// The context of a matmul for small batches.
    pub fn new(plan: &Plan, spec: &GemmMmaSpec) -> Self {
        let packed = GemmPackedContext {
            batch_tile: spec.batch_tile.get(),
            stages: spec.stages.get(),
            escapes: spec.escapes,
            store_add: matches!(spec.epilogue, Epilogue::StoreAdd),
            pdl: spec.pdl,
            dump: spec.dump,
        };
        let (row_blocks, cluster) = (spec.row_blocks.get(), spec.cluster.get());
        let group = if cluster == 1 { "block".to_owned() } else { format!("cluster of {cluster}") };
        let tasks = if spec.persistent { "task after task" } else { "one task" };
        let block = format!(
            "{} batch rows x {} of n per {group}, {tasks}, a ring of {} per warp",
            packed.batch_tile,
            16 * row_blocks,
            packed.stages
        );
        let summary = packed.summary(spec.epilogue, &block);
        Self {
            head: Head::new::<GemmPackedArgs>(plan, summary),
            packed,
            row_blocks,
            warps: spec.warps.get(),
            cluster,
            persistent: spec.persistent,
            silu_mul: matches!(spec.epilogue, Epilogue::SiluMul),
        }
    }
}

/// Context of `gemm_wgmma.cu.tera`.
#[derive(Debug, Serialize)]
pub struct GemmWgmmaContext {
    /// See [`Head`].
    pub head: Head,
    /// See [`GemmPackedContext`].
    pub packed: GemmPackedContext,
    /// `Config::kWarpgroups`.
    pub warpgroups: u32,
    /// `Config::kCluster`.
    pub cluster: u32,
    /// `Config::kStreamK`.
    pub stream_k: bool,
    /// Registers per thread of the loading warpgroup, if it gives some up.
    pub producer_registers: Option<u32>,
    /// Registers per thread of the multiplying warpgroups, if they ask for more.
    pub consumer_registers: Option<u32>,
}

impl GemmWgmmaContext {
    /// The context of a matmul for large batches.
    pub fn new(plan: &Plan, spec: &GemmWgmmaSpec) -> Self {
        let packed = GemmPackedContext {
            batch_tile: spec.batch_tile.get(),
            stages: spec.stages.get(),
            escapes: spec.escapes,
            store_add: matches!(spec.epilogue, Epilogue::StoreAdd),
            pdl: spec.pdl,
            dump: spec.dump,
        };
        let warpgroups = spec.warpgroups.get();
        let cluster = spec.cluster.get();
        let cut = match (cluster, spec.stream_k) {
            (1, false) => "whole output tiles".to_owned(),
            (1, true) => "k cut evenly".to_owned(),
            _ => format!("by a cluster of {cluster} that shares k"),
        };
        let block =
            format!("{} x {} of Y at a time, {cut}, a ring of {}", packed.batch_tile, 64 * warpgroups, packed.stages);
        let summary = packed.summary(spec.epilogue, &block);
        let mut registers = plan.roles.roles().filter_map(|role| role.registers);
        Self {
            head: Head::new::<GemmPackedArgs>(plan, summary),
            packed,
            warpgroups,
            cluster,
            stream_k: spec.stream_k,
            producer_registers: registers.next(),
            consumer_registers: registers.next(),
        }
    }
}

/// Context of `repack.cu.tera`.
#[derive(Debug, Serialize)]
pub struct RepackContext {
    /// See [`Head`].
    pub head: Head,
    /// The function of `uw::packed`.
    pub function: &'static str,
    /// `Stage` in the constants of `uw::packed` that hold the threads of a block and its bytes of shared memory: `kStageThreads`.
    pub constant: &'static str,
}

impl RepackContext {
    /// The context of a conversion.
    pub fn new(plan: &Plan, spec: &RepackSpec) -> Self {
        let (constant, summary) = match spec.stage {
            RepackStage::Pack => ("Pack", "bf16 [n, k] -> packed tiles, escape heads and sizes of the lists."),
            RepackStage::Lists => ("Lists", "bf16 [n, k] and sizes of the lists -> lists of escapes and their places."),
            RepackStage::Unpack => ("Unpack", "Packed tiles and escapes -> bf16 [n, k], row-major."),
        };
        Self { head: Head::new::<RepackArgs>(plan, summary.to_owned()), function: spec.stage.tag(), constant }
    }
}
