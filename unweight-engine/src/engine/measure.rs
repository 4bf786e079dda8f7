//! Measurements of an engine's steps. The caller enqueues steps between its own events; no function here reads a clock.

use unweight_format::testing::Weights as Kind;
use unweight_model::SampleParams;
use unweight_rt::{DeviceError, DeviceMatrix, Graph, MatrixMut, Stream};

use super::{Engine, routing::Routing};
use crate::{
    error::EngineError,
    forward::{Forward, RowState, StepPhase},
    options::bucket,
    request::AdmissionError,
    sampling::RowSampling,
};

impl Engine {
    /// Borrows the engine to measure its steps.
    pub fn measure(&mut self) -> Measure<'_> {
        Measure { engine: self }
    }
}

/// An engine that is measured: its steps run on prepared sequences, and their tokens are not read.
pub struct Measure<'e> {
    pub(super) engine: &'e mut Engine,
}

impl Measure<'_> {
    /// Prepares `batch` sequences of `context` tokens each with random keys and values, for at most `steps` calls of
    /// [`Measure::enqueue_step`]. The engine must be idle.
    ///
    /// # Errors
    /// [`EngineError::AdmissionError`] if a sequence runs or waits, `batch` exceeds
    /// [`EngineOptions::max_batch`](crate::EngineOptions::max_batch), `context + steps` exceeds the context of the
    /// engine, or the KV cache has too few free pages; [`EngineError::Device`] if the device fails.
    pub fn prepare(&mut self, batch: u32, context: u32, steps: u32) -> Result<(), EngineError> {
        let pages = self.lend_filled(batch, context, steps)?;
        self.engine.schedule.give(pages);
        Ok(())
    }

    /// Like [`Measure::prepare`], but returns the lent pages.
    pub(super) fn lend_filled(&mut self, batch: u32, context: u32, steps: u32) -> Result<Vec<Vec<u32>>, EngineError> {
        let engine = &mut *self.engine;
        engine.check_alive()?;
        if !engine.is_idle() || batch > engine.options.max_batch {
            return Err(AdmissionError::Busy { waiting: engine.running() }.into());
        }
        let tokens = context.saturating_add(steps);
        if tokens > engine.memory.context {
            let (prompt, context) = (context as usize, engine.memory.context);
            return Err(AdmissionError::TooLong { prompt, max_new_tokens: steps, context }.into());
        }
        let each = engine.schedule.pages_of(tokens);
        let pages = engine.lend(&vec![each; batch as usize])?;
        let filled = fill(&mut engine.forward, batch, context, &pages);
        engine.fail_on_error(filled)?;
        Ok(pages)
    }

    /// Sets the routing decisions of all later steps, if some experts are in host memory; otherwise the model's own are
    /// used. Experts are not prefetched unless the routing is that of the model.
    pub fn set_routing(&mut self, routing: Routing) {
        let config = &self.engine.config;
        let decisions = config.mixture.and_then(|of| routing.decisions(config.mixture_layers(), of.experts, of.top_k));
        self.engine.forward.replace_routing(decisions);
    }

    /// Enqueues one step of the batch that [`Measure::prepare`] prepared last.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the device fails.
    pub fn enqueue_step(&mut self, batch: u32) -> Result<(), EngineError> {
        let launched = self.engine.launch(batch, false);
        self.engine.fail_on_error(launched)
    }

    /// Waits for the enqueued steps. A row that a kernel skipped is an error
    /// ([`DeviceError::Row`](unweight_rt::DeviceError::Row)).
    ///
    /// # Errors
    /// [`EngineError::Device`] if the device fails.
    pub fn synchronize(&mut self) -> Result<(), EngineError> {
        let kernel_result = self.engine.forward.context().synchronize();
        let stepper_result = self.engine.stepper.synchronize();
        self.engine.fail_on_error(kernel_result.and(stepper_result))
    }

    /// Records one phase of a step, over all layers, as a CUDA graph.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the device fails.
    pub fn record_phase(&mut self, batch: u32, phase: StepPhase) -> Result<Graph, EngineError> {
        let engine = &mut *self.engine;
        engine.check_alive()?;
        let rows = bucket(batch);
        let stream = engine.forward.stream().clone();
        let recorded = stream.capture(|| engine.forward.enqueue_phase(&engine.weights, rows, phase));
        engine.fail_on_error(recorded)
    }

    /// Measures the algorithms of cuBLAS for every product of a step of `batch` rows, keeps the fastest, and records
    /// these steps again.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the device or cuBLAS fails.
    pub fn tune_cublas(&mut self, batch: u32) -> Result<(), EngineError> {
        let engine = &mut *self.engine;
        engine.check_alive()?;
        let rows = bucket(batch);
        let tuned = engine.forward.tune(&engine.weights, rows).and_then(|()| record_step(engine, rows));
        engine.fail_on_error(tuned)
    }

    /// The CUDA stream that steps run on.
    pub fn stream(&self) -> &Stream {
        self.engine.stream()
    }
}

/// Records the steps of `rows` rows again, if steps are recorded.
pub(super) fn record_step(engine: &mut Engine, rows: u32) -> Result<(), DeviceError> {
    let Engine { forward, stepper, weights, graphs, .. } = engine;
    for (shape, graph) in graphs.iter_mut().filter(|(shape, _)| shape.rows == rows) {
        *graph = forward.stream().clone().capture(|| stepper.enqueue_step(forward, weights, *shape))?;
    }
    Ok(())
}

/// Sets the rows of a step to sequences of `context` tokens.
pub(super) fn set_rows(forward: &mut Forward, batch: u32, context: u32, pages: &[Vec<u32>]) -> Result<(), DeviceError> {
    let sampling = RowSampling::new(&SampleParams::default());
    let states =
        pages.iter().zip(1..).map(|(pages, id)| RowState { id, position: context, pages, hot: id - 1, sampling });
    forward.set_rows(&states.collect::<Vec<_>>(), bucket(batch))
}

/// Fills the cache with random keys and values, and sets `batch` rows with a token after `context` others.
fn fill(forward: &mut Forward, batch: u32, context: u32, pages: &[Vec<u32>]) -> Result<(), DeviceError> {
    const DRAWN: u32 = 1 << 20;
    let stream = forward.stream().clone();
    let drawn: Vec<u16> = Kind::Gaussian { sigma: 1.0 }.iter(2).take(DRAWN as usize).collect();
    let drawn = DeviceMatrix::from_host(&stream, 1, DRAWN, &drawn)?;
    let cache = forward.cache().chunk_elements();
    // The remainder after the last whole row is less than one page of one layer of any model worth measuring.
    let len = u32::try_from(cache.len()).unwrap_or(u32::MAX).min(DRAWN);
    let rows = u32::try_from(cache.len() / len.max(1) as usize).unwrap_or(u32::MAX);
    let mut all = MatrixMut::new(cache, rows, len, len.into())?;
    for row in 0..rows {
        let from = drawn.view().part(0..1, 0..len)?;
        all.part(row..row + 1, 0..len)?.copy_from(&stream, from)?;
    }
    if forward.packed_cache().is_some() {
        for (pages, hot) in pages.iter().zip(0..) {
            forward.pack_staging(pages, hot, context)?;
        }
    }
    stream.synchronize()?;
    set_rows(forward, batch, context, pages)
}
