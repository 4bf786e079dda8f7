//! Phases of a step.

/// A phase of a step: the kernels of one kind in all layers, for a breakdown of the step's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StepPhase {
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
    /// The product of gate and up, with the activation if the layer fuses it. In a mixture, the router and all products
    /// of the experts.
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

impl StepPhase {
    /// All phases, in the order of a step.
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

/// Selects the phases that a pass enqueues.
pub(crate) trait PhaseFilter: Copy {
    /// Whether the pass enqueues this phase.
    fn has(self, phase: StepPhase) -> bool;
}

/// Every phase: a pass whose results are used.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AllPhases;

impl PhaseFilter for AllPhases {
    fn has(self, _: StepPhase) -> bool {
        true
    }
}

/// Only these phases, which other launches complete, or whose results are not used.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Only<'a>(pub &'a [StepPhase]);

impl PhaseFilter for Only<'_> {
    fn has(self, phase: StepPhase) -> bool {
        self.0.contains(&phase)
    }
}
