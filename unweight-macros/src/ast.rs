//! A declared variant: words are resolved, numbers are not judged.

use syn::{Ident, LitInt, Path};

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
}

pub(crate) enum Source {
    Exponent,
    Palette { verbatim: LitInt },
}

/// A value of an enum of `unweight_codegen::spec`, such as `Epilogue::StoreAdd`, with the span of the user's word.
pub(crate) struct Word(pub Ident);
