//! Parts of a step.

/// A part of a step, for a breakdown of its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// The lookup of token embeddings.
    Embed,
    /// All RMS norms.
    Norm,
    /// The product of queries, keys and values.
    Qkv,
    /// Attention, with bias, norm and RoPE of the heads.
    Attention,
    /// The output projection of attention.
    Output,
    /// The product of gate and up, with the activation if the layer fuses it.
    GateUp,
    /// The activation, if it is a separate kernel.
    Activation,
    /// The product of down.
    Down,
    /// The product of the language-model head.
    Head,
    /// Sampling of tokens.
    Sample,
}

impl Part {
    /// All parts, in the order of a step.
    pub const ALL: [Self; 10] = [
        Self::Embed,
        Self::Norm,
        Self::Qkv,
        Self::Attention,
        Self::Output,
        Self::GateUp,
        Self::Activation,
        Self::Down,
        Self::Head,
        Self::Sample,
    ];

    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Embed => "embed",
            Self::Norm => "norms",
            Self::Qkv => "qkv",
            Self::Attention => "attention",
            Self::Output => "o",
            Self::GateUp => "gate_up",
            Self::Activation => "silu_mul",
            Self::Down => "down",
            Self::Head => "lm_head",
            Self::Sample => "sample",
        }
    }
}
