//! What is compiled: a [`VariantSpec`] is the whole identity of a kernel.
//!
//! The spec knows the axes and the name. It refuses to know shared memory, threads or files: those follow from it in
//! [`plan`](crate::plan) and [`render`](crate::render()).
//!
//! ```text
//! VariantSpec ── arch
//!             └─ op ── Decode { output, code_limit }
//!                   ├─ GemmRecon { source, n_tiles, stages, epilogue }
//!                   ├─ Encode { stage }
//!                   ├─ GemmMma { batch_tile, row_blocks, warps, stages, cluster, persistent, escapes, pdl, epilogue, dump }
//!                   ├─ GemmWgmma { batch_tile, warpgroups, stages, cluster, stream_k, escapes, pdl, epilogue, dump }
//!                   └─ Repack { stage }
//! ```
//!
//! A further consumer family is a further [`Op`]: its own spec struct, a plan function, a template and a context.

mod axes;
pub mod catalog;
mod name;

pub use axes::{
    Arch, AxisError, ClusterSize, CodeLimit, DecodeOutput, EncodeStage, Epilogue, NTiles, RepackStage, RowBlocks,
    SmallBatchTile, SmallStages, Stages, VerbatimRows, Warpgroups, Warps, WeightSource, WideBatchTile, WideStages,
};
pub use name::ParseNameError;

/// One kernel: architecture and operation. Its name is `Display`, `FromStr` and the serde form.
///
/// ```
/// # use unweight_codegen::spec::VariantSpec;
/// let spec: VariantSpec = "uw_sm90a_gemm_recon_palette_n2p4_v8_store".parse()?;
/// assert_eq!(spec.name().as_str(), "uw_sm90a_gemm_recon_palette_n2p4_v8_store");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VariantSpec {
    /// What it is compiled for.
    pub arch: Arch,
    /// What it does.
    pub op: Op,
}

/// The operation of a kernel, with the axes of its family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Op {
    /// Huffman tensor to a form that a consumer reads (report section 7).
    Decode(DecodeSpec),
    /// Reconstructive matmul `Y[m,n] = X[m,k] * W[n,k]^T` (report section 8).
    GemmRecon(GemmReconSpec),
    /// BF16 to a Huffman or palette tensor (report section 4).
    Encode(EncodeSpec),
    /// Register-sourced matmul for small batches, from a packed tensor.
    GemmMma(GemmMmaSpec),
    /// Register-sourced matmul for large batches, from a packed tensor.
    GemmWgmma(GemmWgmmaSpec),
    /// BF16 to a packed tensor and back.
    Repack(RepackSpec),
}

/// A decoder of the preprocess family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DecodeSpec {
    /// What is written.
    pub output: DecodeOutput,
    /// The longest code accepted.
    pub code_limit: CodeLimit,
}

/// A variant of the report's matmul family: 128 batch rows by `64 * n_tiles` output features per CTA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GemmReconSpec {
    /// Where the exponents come from.
    pub source: WeightSource,
    /// Tiles of `W` side by side.
    pub n_tiles: NTiles,
    /// Stages of the ring.
    pub stages: Stages,
    /// Overwrite or add.
    pub epilogue: Epilogue,
}

/// One encoder kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EncodeSpec {
    /// Which one.
    pub stage: EncodeStage,
}

/// A variant of the register-sourced family for small batches (`mma.m16n8k16`): every warp multiplies `row_blocks` blocks of 16 output
/// features by `batch_tile` batch rows, and the warps of a cluster share k.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GemmMmaSpec {
    /// Batch rows of a cluster.
    pub batch_tile: SmallBatchTile,
    /// Row blocks of a task.
    pub row_blocks: RowBlocks,
    /// Warps of a block.
    pub warps: Warps,
    /// Stages of each warp's ring.
    pub stages: SmallStages,
    /// Blocks that share k.
    pub cluster: ClusterSize,
    /// A cluster works off several tasks, its rings running on across them; otherwise one.
    pub persistent: bool,
    /// Elements outside the window are replaced by their exact operands; otherwise the tensor must have none.
    pub escapes: bool,
    /// Programmatic dependent launch: starts while the stream's previous kernel still runs, and waits for it before it reads X.
    pub pdl: bool,
    /// Overwrite or add.
    pub epilogue: Epilogue,
    /// For tests: what enters the tensor cores is written to the workspace.
    pub dump: bool,
}

/// A variant of the register-sourced family for large batches (`wgmma`): `64 * warpgroups` output features by `batch_tile` batch rows
/// per output tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GemmWgmmaSpec {
    /// Batch rows of an output tile.
    pub batch_tile: WideBatchTile,
    /// Warpgroups that multiply.
    pub warpgroups: Warpgroups,
    /// Stages of the ring.
    pub stages: WideStages,
    /// Blocks that share the k of an output tile and each sum a part of it.
    pub cluster: ClusterSize,
    /// The k steps of all output tiles are cut evenly among the blocks; otherwise a block takes whole output tiles.
    pub stream_k: bool,
    /// As in [`GemmMmaSpec::escapes`].
    pub escapes: bool,
    /// As in [`GemmMmaSpec::dependent`].
    pub pdl: bool,
    /// Overwrite or add.
    pub epilogue: Epilogue,
    /// As in [`GemmMmaSpec::dump`].
    pub dump: bool,
}

/// One kernel of the conversions between BF16 and the packed form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RepackSpec {
    /// Which one.
    pub stage: RepackStage,
}

impl VariantSpec {
    /// A decoder.
    pub const fn decode(arch: Arch, output: DecodeOutput, code_limit: CodeLimit) -> Self {
        Self { arch, op: Op::Decode(DecodeSpec { output, code_limit }) }
    }

    /// A matmul.
    pub const fn gemm_recon(
        arch: Arch,
        source: WeightSource,
        n_tiles: NTiles,
        stages: Stages,
        epilogue: Epilogue,
    ) -> Self {
        Self { arch, op: Op::GemmRecon(GemmReconSpec { source, n_tiles, stages, epilogue }) }
    }

    /// An encoder stage.
    pub const fn encode(arch: Arch, stage: EncodeStage) -> Self {
        Self { arch, op: Op::Encode(EncodeSpec { stage }) }
    }

    /// A register-sourced matmul for small batches.
    pub const fn gemm_mma(arch: Arch, spec: GemmMmaSpec) -> Self {
        Self { arch, op: Op::GemmMma(spec) }
    }

    /// A register-sourced matmul for large batches.
    pub const fn gemm_wgmma(arch: Arch, spec: GemmWgmmaSpec) -> Self {
        Self { arch, op: Op::GemmWgmma(spec) }
    }

    /// A step of the conversions to and from the packed form.
    pub const fn repack(arch: Arch, stage: RepackStage) -> Self {
        Self { arch, op: Op::Repack(RepackSpec { stage }) }
    }
}

impl Op {
    /// The family as names spell it.
    pub const fn family(&self) -> &'static str {
        match self {
            Self::Decode(_) => "decode",
            Self::GemmRecon(_) => "gemm_recon",
            Self::Encode(_) => "encode",
            Self::GemmMma(_) => "gemm_mma",
            Self::GemmWgmma(_) => "gemm_wgmma",
            Self::Repack(_) => "repack",
        }
    }
}

impl GemmReconSpec {
    /// Verbatim rows for which a stage has room: 0 for the exponent source, which has none.
    pub const fn verbatim_rows(&self) -> u32 {
        match self.source {
            WeightSource::Exponent => 0,
            WeightSource::Palette { verbatim } => verbatim.get(),
        }
    }
}

/// A kernel that is known when the program is compiled: what `#[unweight_variant]` implements.
///
/// ```
/// use unweight_codegen::{Variant, spec::{Arch, EncodeStage, VariantSpec}};
/// struct Histogram;
/// impl Variant for Histogram {
///     const SPEC: VariantSpec = VariantSpec::encode(Arch::Sm90a, EncodeStage::Stats);
/// }
/// assert_eq!(Histogram::SPEC.name().as_str(), "uw_sm90a_encode_stats");
/// ```
pub trait Variant {
    /// The spec.
    const SPEC: VariantSpec;
}
