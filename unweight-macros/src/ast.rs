//! A declared variant: words are resolved, numbers are not judged.

use syn::{Ident, LitBool, LitInt, Path};

/// What the attribute says.
pub(crate) struct Variant {
    /// Where `spec` and `plan` are found.
    pub codegen: Path,
    /// The struct.
    pub name: Ident,
    pub arch: Word,
    pub op: Op,
}

pub(crate) enum Op {
    Matmul { n: LitInt, stages: LitInt, source: Source, epilogue: Word },
    Decode { output: Word, code_limit: LitInt },
    Encode { stage: Word },
    FusedSmall { batch_tile: LitInt, row_blocks: LitInt, warps: LitInt, cluster: LitInt, stream: LitBool, fused: Fused },
    FusedWide { batch_tile: LitInt, warpgroups: LitInt, cluster: LitInt, stream_k: LitBool, fused: Fused },
    Packed { stage: Word },
}

/// What both register-sourced matmuls have.
pub(crate) struct Fused {
    pub stages: LitInt,
    pub escapes: LitBool,
    pub dependent: LitBool,
    pub dump: LitBool,
    pub epilogue: Word,
}

pub(crate) enum Source {
    Exponent,
    Palette { verbatim: LitInt },
}

/// A value of an enum of `unweight_codegen::spec`, such as `Epilogue::StoreAdd`, with the span of the user's word.
pub(crate) struct Word(pub Ident);
