//! What is compiled: a [`VariantSpec`] is the whole identity of a kernel.
//!
//! The spec knows the axes and the name. It refuses to know shared memory, threads or files: those follow from it in
//! [`plan`](crate::plan) and [`render`](crate::render()).
//!
//! ```text
//! VariantSpec ── arch
//!             └─ op ── Decode { output, code_limit }
//!                   ├─ Matmul { source, n_tiles, stages, epilogue }
//!                   └─ Encode { stage }
//! ```
//!
//! A further consumer family is a further [`Op`]: its own spec struct, a plan function, a template and a context.

mod axes;
pub mod catalog;
mod name;

pub use axes::{
    Arch, AxisError, CodeLimit, DecodeOutput, EncodeStage, Epilogue, NTiles, Stages, VerbatimRows, WeightSource,
};
pub use name::ParseNameError;

/// One kernel: architecture and operation. Its name is `Display`, `FromStr` and the serde form.
///
/// ```
/// # use unweight_codegen::spec::VariantSpec;
/// let spec: VariantSpec = "uw_sm90a_matmul_palette_n2p4_v8_store".parse()?;
/// assert_eq!(spec.name().as_str(), "uw_sm90a_matmul_palette_n2p4_v8_store");
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
    Matmul(MatmulSpec),
    /// BF16 to a Huffman or palette tensor (report section 4).
    Encode(EncodeSpec),
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
pub struct MatmulSpec {
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

impl VariantSpec {
    /// A decoder.
    pub const fn decode(arch: Arch, output: DecodeOutput, code_limit: CodeLimit) -> Self {
        Self { arch, op: Op::Decode(DecodeSpec { output, code_limit }) }
    }

    /// A matmul.
    pub const fn matmul(arch: Arch, source: WeightSource, n_tiles: NTiles, stages: Stages, epilogue: Epilogue) -> Self {
        Self { arch, op: Op::Matmul(MatmulSpec { source, n_tiles, stages, epilogue }) }
    }

    /// An encoder stage.
    pub const fn encode(arch: Arch, stage: EncodeStage) -> Self {
        Self { arch, op: Op::Encode(EncodeSpec { stage }) }
    }
}

impl MatmulSpec {
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
