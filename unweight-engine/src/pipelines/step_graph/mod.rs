//! A step as data: what runs on which stream, which event orders what, which slot holds which decoded weights. Pure: no
//! device is named.
//!
//! ```text
//! layers --build--> StepGraph --check--> nothing races, nothing stale
//! ```
//! A hard layer has projections that are decoded before they are multiplied with (report section 9). A slot has a
//! buffer for each projection of one hard layer; while one slot is read, the others are filled. Hard layers are
//! counted: that of rank r uses slot r mod S, entering it launches the decoders of rank r + S - 1 behind the last
//! reader of their buffers, and the first S - 1 are launched when the step begins.
//!
//! | stream | runs |
//! |---|---|
//! | 0 | everything that is not below |
//! | 1 | the product of up, in hard layers |
//! | 2 + 3s, 3 + 3s, 4 + 3s | the decoders of gate, up and down of slot s |
//!
//! Without hard layers there is one stream and no event. [`check()`] proves a step graph from its steps alone: it knows
//! nothing of how it was built.

mod build;
mod check;
mod clock;
#[cfg(test)]
mod simulate;
#[cfg(test)]
mod tests;

pub use build::{BuildError, Layout, SlotRule, build};
pub use check::{CheckedGraph, Violation, check};
use unweight_codegen::spec::DecodeOutput;

pub use crate::options::{Pipeline, Projection};

/// How the three projections of a layer are multiplied with, gate, up, down.
pub type Mlp = [Pipeline; 3];

/// Whether something of it must be decoded first.
pub fn is_hard(mlp: &Mlp) -> bool {
    mlp.iter().any(|pipeline| pipeline.decodes().is_some())
}

/// Where a layer's norm stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// Before attention.
    Attention,
    /// Before the MLP.
    Mlp,
}

/// What a step of a step graph does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Job {
    /// Looks ids up.
    Embed,
    /// Norms, of a layer; `None` for the one before the head.
    Norm(Option<(u32, Place)>),
    /// Queries, keys and values.
    Qkv {
        /// The layer.
        layer: u32,
    },
    /// Attention, with what is done to the heads before it.
    Attention {
        /// The layer.
        layer: u32,
    },
    /// The projection behind attention, added to the residual.
    Output {
        /// The layer.
        layer: u32,
    },
    /// Gate and up as one product that is activated on its way out.
    GateUp {
        /// The layer.
        layer: u32,
    },
    /// The product with one projection; down is added to the residual.
    Linear {
        /// The layer.
        layer: u32,
        /// Which.
        projection: Projection,
        /// How.
        pipeline: Pipeline,
        /// The slot that its decoded weights lie in.
        slot: Option<u8>,
    },
    /// The activation where it is a kernel of its own.
    Activate {
        /// The layer.
        layer: u32,
    },
    /// Decodes a projection into a slot.
    Decode {
        /// The layer.
        layer: u32,
        /// Which.
        projection: Projection,
        /// To what.
        output: DecodeOutput,
        /// Where it lies then.
        slot: u8,
    },
    /// The head.
    Head,
    /// The choice of tokens.
    Sample,
}

impl Job {
    /// What it touches on a stream: what it reads, and what it writes. A step graph may name more, and no less.
    pub(crate) fn touches(&self, stream: u8) -> (Vec<Buffer>, Vec<Buffer>) {
        use Buffer as B;
        let workspace = B::Workspace(stream);
        match *self {
            Self::Embed => (vec![B::Ids], vec![B::Hidden]),
            Self::Norm(_) => (vec![B::Hidden], vec![B::Normed]),
            Self::Qkv { .. } => (vec![B::Normed], vec![B::Qkv, workspace]),
            Self::Attention { layer } => (vec![B::Qkv], vec![B::Cache(layer), B::Attended]),
            Self::Output { .. } => (vec![B::Attended], vec![B::Hidden, workspace]),
            Self::GateUp { .. } => (vec![B::Normed], vec![B::Gate, workspace]),
            Self::Linear { projection, slot, .. } => {
                let (x, y) = match projection {
                    Projection::Gate => (B::Normed, B::Gate),
                    Projection::Up => (B::Normed, B::Up),
                    Projection::Down => (B::Gate, B::Hidden),
                };
                let weights = slot.map(|slot| B::Slot(slot, projection));
                ([x].into_iter().chain(weights).collect(), vec![y, workspace])
            }
            Self::Activate { .. } => (vec![B::Up], vec![B::Gate]),
            Self::Decode { projection, slot, .. } => {
                (Vec::new(), vec![B::Slot(slot, projection), B::Share(projection)])
            }
            Self::Head => (vec![B::Normed], vec![B::Logits, workspace]),
            Self::Sample => (vec![B::Logits], vec![B::Ids]),
        }
    }

    /// The slot that it fills or reads.
    fn slot(&self) -> Option<u8> {
        match *self {
            Self::Decode { slot, .. } => Some(slot),
            Self::Linear { slot, .. } => slot,
            _ => None,
        }
    }

    /// Whether its kernel knows no programmatic dependence.
    pub(crate) fn is_ordinary(&self) -> bool {
        matches!(self, Self::Linear { pipeline, .. } if pipeline.is_cublas()) || matches!(self, Self::Decode { .. })
    }

    /// Whether its blocks may wait for each other.
    fn waits_for_own_blocks(&self) -> bool {
        match self {
            Self::Linear { pipeline, .. } => pipeline.waits_for_own_blocks(),
            Self::Qkv { .. } | Self::Output { .. } | Self::GateUp { .. } | Self::Head => true,
            _ => false,
        }
    }
}

/// Memory that steps share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Buffer {
    /// The residual.
    Hidden,
    /// What was normed.
    Normed,
    /// Queries, keys and values.
    Qkv,
    /// The heads' results.
    Attended,
    /// The product with gate, then what activation made of it.
    Gate,
    /// The product with up.
    Up,
    /// Keys and values of a layer.
    Cache(u32),
    /// Logits.
    Logits,
    /// Tokens.
    Ids,
    /// Decoded weights.
    Slot(u8, Projection),
    /// What matmuls of a stream keep sums in.
    Workspace(u8),
    /// The multiprocessors of a projection's decoders: two of them at once would take those of the matmuls.
    Share(Projection),
}

/// One entry of a step graph. Streams are numbered from 0, on which a step begins and ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Enqueues a job.
    Run {
        /// On this stream.
        stream: u8,
        /// What.
        job: Job,
        /// What it reads.
        reads: Vec<Buffer>,
        /// What it writes; with what it also reads.
        writes: Vec<Buffer>,
        /// Multiprocessors that it may have: persistent grids are made for so many, decoders have a block on each.
        sms: u32,
        /// As a programmatic dependent of the job before it on its stream.
        dependent: bool,
    },
    /// Records an event behind all that is enqueued on a stream.
    Record {
        /// On this stream.
        stream: u8,
        /// Which.
        event: u32,
    },
    /// Has all that follows on a stream wait for an event.
    Wait {
        /// On this stream.
        stream: u8,
        /// Which.
        event: u32,
    },
}

impl Step {
    /// Its stream.
    pub fn stream(&self) -> u8 {
        match self {
            Self::Run { stream, .. } | Self::Record { stream, .. } | Self::Wait { stream, .. } => *stream,
        }
    }
}

/// A step of a model, in the order in which the host enqueues it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepGraph {
    /// In the host's order.
    pub steps: Vec<Step>,
    /// Streams.
    pub streams: u8,
    /// Events.
    pub events: u32,
    /// Slots for decoded weights.
    pub slots: u8,
    /// Multiprocessors of the device.
    pub sms: u32,
    /// For every layer, the projections that have to be decoded.
    pub hard: Vec<[Option<DecodeOutput>; 3]>,
}
