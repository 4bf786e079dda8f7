//! A step as data: the stream of each job, the events between streams, and the slots of decoded weights. Needs no
//! device.
//!
//! ```text
//! layers --build--> StepGraph --check--> nothing races, nothing stale
//! ```
//! A hard layer has projections that are decoded before their product (report section 9). A slot has a buffer for each
//! projection of one hard layer; while one slot is read, the others are filled. Hard layers are ranked by their order.
//! The layer of rank r uses slot r mod S. At its start, the decoders of rank r + S - 1 are launched after the last
//! reader of their buffers. The first S - 1 layers are decoded from the start of the step.
//!
//! | stream | runs |
//! |---|---|
//! | 0 | everything else |
//! | 1 | the product of up, in hard layers |
//! | 2 + 3s, 3 + 3s, 4 + 3s | the decoders of gate, up and down of slot s |
//!
//! Without hard layers there is one stream and no event. [`check()`] proves a step graph from its steps alone; it does
//! not use how the graph was built.

mod build;
mod check;
mod clock;
#[cfg(test)]
mod tests;

pub use build::{BuildError, Layout, SlotRule, build};
pub use check::{CheckedGraph, Violation, check};
use unweight_codegen::spec::DecodeOutput;

pub use crate::options::{Pipeline, Projection};

/// The pipelines of a layer's projections: gate, up, down.
pub type Mlp = [Pipeline; 3];

/// Whether any projection of a layer must be decoded before its product.
pub fn is_hard(mlp: &Mlp) -> bool {
    mlp.iter().any(|pipeline| pipeline.decodes().is_some())
}

/// The position of a norm in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// Before attention.
    Attention,
    /// Before the MLP.
    Mlp,
}

/// The work of one entry of a step graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Job {
    /// Looks up token embeddings.
    Embed,
    /// An RMS norm of a layer; `None` for the norm before the head.
    Norm(Option<(u32, Place)>),
    /// The product of queries, keys and values.
    Qkv {
        /// The layer.
        layer: u32,
    },
    /// Attention, with bias, norm and RoPE of the heads.
    Attention {
        /// The layer.
        layer: u32,
    },
    /// The output projection of attention, added to the residual.
    Output {
        /// The layer.
        layer: u32,
    },
    /// Gate and up as one product with the activation in its epilogue.
    GateUp {
        /// The layer.
        layer: u32,
    },
    /// The product with one projection; down is added to the residual.
    Linear {
        /// The layer.
        layer: u32,
        /// The projection.
        projection: Projection,
        /// The pipeline of the product.
        pipeline: Pipeline,
        /// The slot that holds its decoded weights; `None` if the product reads stored weights.
        slot: Option<u8>,
    },
    /// The activation as a separate kernel.
    Activate {
        /// The layer.
        layer: u32,
    },
    /// Decodes a projection into a slot.
    Decode {
        /// The layer.
        layer: u32,
        /// The projection.
        projection: Projection,
        /// The encoding that the weights are decoded to.
        output: DecodeOutput,
        /// The slot that receives the decoded weights.
        slot: u8,
    },
    /// The product of the language-model head.
    Head,
    /// Sampling of tokens.
    Sample,
}

impl Job {
    /// The buffers that the job reads and writes on a stream. A step graph may name more, but not fewer.
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

    /// The slot that the job fills or reads.
    fn slot(&self) -> Option<u8> {
        match *self {
            Self::Decode { slot, .. } => Some(slot),
            Self::Linear { slot, .. } => slot,
            _ => None,
        }
    }

    /// Whether its kernel does not support programmatic dependent launch.
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

/// A resource that jobs share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Buffer {
    /// The residual stream.
    Hidden,
    /// The output of a norm.
    Normed,
    /// Queries, keys and values.
    Qkv,
    /// The output of attention.
    Attended,
    /// The product with gate; after the activation, its result.
    Gate,
    /// The product with up.
    Up,
    /// The KV cache of a layer.
    Cache(u32),
    /// The logits of all rows.
    Logits,
    /// The token ids.
    Ids,
    /// Decoded weights of a projection in a slot.
    Slot(u8, Projection),
    /// The workspace of the matmuls of a stream.
    Workspace(u8),
    /// The multiprocessors of a projection's decoders. Two decoders at once would take those of the matmuls.
    Share(Projection),
}

/// One entry of a step graph. Streams are numbered from 0, on which a step begins and ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Enqueues a job.
    Run {
        /// The stream.
        stream: u8,
        /// The job.
        job: Job,
        /// The buffers that the job reads.
        reads: Vec<Buffer>,
        /// The buffers that the job writes, including those that it also reads.
        writes: Vec<Buffer>,
        /// The number of multiprocessors that the job may use: the size of persistent grids, and of a decoder's grid.
        sms: u32,
        /// Whether the job is a programmatic dependent of the job before it on its stream.
        dependent: bool,
    },
    /// Records an event after all work enqueued on a stream.
    Record {
        /// The stream.
        stream: u8,
        /// The event.
        event: u32,
    },
    /// Makes all later work of a stream wait for an event.
    Wait {
        /// The stream.
        stream: u8,
        /// The event.
        event: u32,
    },
}

impl Step {
    /// The stream of the entry.
    pub fn stream(&self) -> u8 {
        match self {
            Self::Run { stream, .. } | Self::Record { stream, .. } | Self::Wait { stream, .. } => *stream,
        }
    }
}

/// A step of a model, in the order in which the host enqueues it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepGraph {
    /// The entries, in the order in which the host enqueues them.
    pub steps: Vec<Step>,
    /// The number of streams.
    pub streams: u8,
    /// The number of events.
    pub events: u32,
    /// The number of slots for decoded weights.
    pub slots: u8,
    /// The number of multiprocessors of the device.
    pub sms: u32,
    /// The decoded encoding of each projection by layer: gate, up, down; `None` for projections that are not decoded.
    pub hard: Vec<[Option<DecodeOutput>; 3]>,
}
