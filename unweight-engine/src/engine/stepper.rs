//! Enqueues the steps and prompt chunks of an engine.

use unweight_rt::DeviceError;

#[cfg(feature = "pipelines")]
use crate::pipelines::Pipelines;
use crate::{forward::Forward, weights::Weights};

/// The shape that a step is recorded for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepShape {
    /// One of [`BUCKETS`](crate::options::BUCKETS).
    pub rows: u32,
    /// Whether rows may be consecutive tokens of one sequence.
    pub verifies: bool,
}

impl StepShape {
    /// A step in which each row is another sequence.
    pub fn plain(rows: u32) -> Self {
        Self { rows, verifies: false }
    }
}

/// How an engine enqueues a step or a chunk of a prompt.
pub enum Stepper {
    /// All linear layers in one chain on one stream.
    Chain,
    /// Step graphs of MLPs that are loaded in their stored encodings.
    #[cfg(feature = "pipelines")]
    Pipelines(Box<Pipelines>),
}

impl Stepper {
    /// Enqueues a step.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails.
    pub fn enqueue_step(
        &mut self,
        forward: &mut Forward,
        weights: &Weights,
        shape: StepShape,
    ) -> Result<(), DeviceError> {
        let rows = shape.rows;
        forward.set_verifies(shape.verifies);
        let enqueued = match self {
            Self::Chain => forward.enqueue_step(weights, rows),
            #[cfg(feature = "pipelines")]
            Self::Pipelines(pipelines) => pipelines.enqueue_step(forward, weights, rows),
        };
        forward.set_verifies(false);
        enqueued
    }

    /// Enqueues the next tokens of a prompt, from position `start` on.
    ///
    /// # Errors
    /// As for [`Forward::enqueue_chunk`].
    pub fn enqueue_chunk(
        &mut self,
        forward: &mut Forward,
        weights: &Weights,
        ids: &[u32],
        start: u32,
    ) -> Result<(), DeviceError> {
        match self {
            Self::Chain => forward.enqueue_chunk(weights, ids, start),
            #[cfg(feature = "pipelines")]
            Self::Pipelines(pipelines) => pipelines.enqueue_chunk(forward, weights, ids, start),
        }
    }

    /// Waits for streams other than the engine's, and reports rows that a kernel skipped.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails or a row was skipped.
    pub fn synchronize(&mut self) -> Result<(), DeviceError> {
        match self {
            Self::Chain => Ok(()),
            #[cfg(feature = "pipelines")]
            Self::Pipelines(pipelines) => pipelines.synchronize(),
        }
    }

    /// Waits for streams other than the engine's, and ignores what they report.
    pub fn wait(&self) {
        match self {
            Self::Chain => {}
            #[cfg(feature = "pipelines")]
            Self::Pipelines(pipelines) => pipelines.wait(),
        }
    }
}
