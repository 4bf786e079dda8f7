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
    GemmRecon {
        n: LitInt,
        stages: LitInt,
        source: Source,
        epilogue: Word,
    },
    Decode {
        output: Word,
        code_limit: LitInt,
    },
    Encode {
        stage: Word,
    },
    GemmMma {
        batch_tile: LitInt,
        row_blocks: LitInt,
        warps: LitInt,
        cluster: LitInt,
        persistent: LitBool,
        packed: PackedKeys,
    },
    GemmWgmma {
        batch_tile: LitInt,
        warpgroups: LitInt,
        cluster: LitInt,
        stream_k: LitBool,
        packed: PackedKeys,
    },
    Repack {
        stage: Word,
    },
}

/// What both register-sourced matmuls have.
pub(crate) struct PackedKeys {
    pub stages: LitInt,
    pub escapes: LitBool,
    pub pdl: LitBool,
    pub dump: LitBool,
    pub epilogue: Word,
}

pub(crate) enum Source {
    Exponent,
    Palette { verbatim: LitInt },
}

/// A value of an enum of `unweight_codegen::spec`, such as `Epilogue::StoreAdd`, with the span of the user's word.
pub(crate) struct Word(pub Ident);
