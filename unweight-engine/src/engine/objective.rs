//! Changes the pipeline settings of an engine, and measures its step times as the objective of a search
//! ([`tune`](crate::pipelines::tune)).

use std::collections::HashMap;

use half::bf16;
use unweight_codegen::kv::PAGE_TOKENS;
use unweight_rt::{DeviceError, Graph};

use super::{
    Engine, StepShape, Stepper,
    measure::{record_step, set_rows},
};
use crate::{
    error::EngineError,
    options::{Setting, bucket},
    pipelines::{
        self, BoundGraph, Choices, Pipelines, SettingSpace, Work,
        tune::{Answer, Objective, ObjectiveError, Paired, Point},
    },
};

impl Engine {
    /// Borrows an engine that runs pipelines to change their settings.
    ///
    /// # Errors
    /// [`EngineError::NotStored`] if the engine was loaded without pipelines.
    pub fn tune_pipelines(&mut self) -> Result<PipelineTuner<'_>, EngineError> {
        match self.stepper {
            Stepper::Pipelines(_) => Ok(PipelineTuner { engine: self }),
            Stepper::Chain => Err(EngineError::NotStored),
        }
    }

    fn pipelines(&mut self) -> Result<&mut Pipelines, EngineError> {
        match &mut self.stepper {
            Stepper::Pipelines(pipelines) => Ok(pipelines),
            Stepper::Chain => Err(EngineError::NotStored),
        }
    }
}

/// An engine whose pipeline settings can be changed.
pub struct PipelineTuner<'e> {
    engine: &'e mut Engine,
}

impl PipelineTuner<'_> {
    /// Returns the variants of every projection for steps of `batch` rows, the best guess first. Hard layers, which
    /// have Huffman-coded weights, come before easy layers. Empty for a kind of layer that the model does not have.
    ///
    /// # Errors
    /// [`EngineError::NotStored`] if the engine was loaded without pipelines.
    pub fn choices(&mut self, batch: u32) -> Result<Choices, EngineError> {
        let (arch, sms) = self.device();
        Ok(pipelines::choices(self.engine.pipelines()?.layers(), arch, bucket(batch), sms))
    }

    /// The unmeasured default setting for steps of `batch` rows.
    ///
    /// # Errors
    /// [`EngineError::NotStored`] if the engine was loaded without pipelines.
    pub fn guess(&mut self, batch: u32) -> Result<Setting, EngineError> {
        let (arch, sms) = self.device();
        Ok(Setting::guess(self.engine.pipelines()?.layers(), arch, bucket(batch), sms))
    }

    /// All settings for steps of `batch` rows, as a search space that begins with the default setting.
    ///
    /// # Errors
    /// [`EngineError::NotStored`] if the engine was loaded without pipelines.
    pub fn space(&mut self, batch: u32) -> Result<SettingSpace, EngineError> {
        let (_, sms) = self.device();
        Ok(SettingSpace::new(&self.choices(batch)?, &self.guess(batch)?, sms))
    }

    /// Uses a setting for all later steps of the bucket of `batch`, the next size that steps are recorded for. Waits
    /// for steps in flight.
    ///
    /// # Errors
    /// [`EngineError::Setting`] if the device cannot run the setting; the old one stays in use. [`EngineError::Device`]
    /// if the device fails.
    pub fn set(&mut self, batch: u32, setting: &Setting) -> Result<(), EngineError> {
        self.engine.check_alive()?;
        let rows = bucket(batch);
        let bound = self.bind(rows, setting)?;
        let replaced = self.replace(rows, bound);
        self.engine.fail_on_error(replaced)
    }

    /// The architecture and the number of multiprocessors.
    fn device(&self) -> (unweight_codegen::spec::Arch, u32) {
        let info = self.engine.stream().device().info();
        (info.arch, info.sms)
    }

    /// Returns the step graph of a setting, with the events that it needs.
    fn bind(&mut self, rows: u32, setting: &Setting) -> Result<BoundGraph, EngineError> {
        let device = self.engine.stream().device().clone();
        self.engine.pipelines()?.bind(setting, rows, &device)
    }

    /// Uses a step graph from now on, and records its steps again.
    fn replace(&mut self, rows: u32, bound: BoundGraph) -> Result<(), DeviceError> {
        let Engine { forward, stepper, weights, options, .. } = &mut *self.engine;
        forward.stream().synchronize()?;
        if let Stepper::Pipelines(pipelines) = stepper {
            pipelines.replace(rows, bound);
        }
        if options.graphs {
            forward.set_rows(&[], rows)?;
            stepper.enqueue_step(forward, weights, StepShape::plain(rows))?;
            forward.stream().synchronize()?;
        }
        record_step(self.engine, rows)
    }

    /// Records a step with a setting that no other step uses, after running it once. Its rows must be set.
    fn record(&mut self, batch: u32, setting: &Setting) -> Result<Graph, EngineError> {
        self.engine.check_alive()?;
        let rows = bucket(batch);
        let bound = self.bind(rows, setting)?;
        let Engine { forward, stepper, weights, .. } = &mut *self.engine;
        let Stepper::Pipelines(pipelines) = stepper else { return Err(EngineError::NotStored) };
        let work = Work::Step { rows };
        let recorded = pipelines
            .run(&bound, forward, weights, work)
            .and_then(|()| forward.stream().synchronize())
            .and_then(|()| forward.stream().clone().capture(|| pipelines.run(&bound, forward, weights, work)));
        self.engine.fail_on_error(recorded)
    }

    /// Like [`Measure::prepare`](super::measure::Measure::prepare), for steps that start at the same position
    /// repeatedly ([`PipelineTuner::rewind`]). Returns the lent pages.
    fn begin(&mut self, batch: u32, context: u32, steps: u32) -> Result<Vec<Vec<u32>>, EngineError> {
        self.engine.measure().lend_filled(batch, context, steps)
    }

    /// Sets the rows to their first position, and releases the BF16 units of the pages that steps pack. Waits for the
    /// copies.
    fn rewind(&mut self, batch: u32, context: u32, pages: &[Vec<u32>]) -> Result<(), EngineError> {
        let first = (context / PAGE_TOKENS) as usize;
        let packed: Vec<u32> = pages.iter().flat_map(|pages| pages.iter().skip(first)).copied().collect();
        let forward = &mut self.engine.forward;
        let set = forward.release(&packed).and_then(|()| set_rows(forward, batch, context, pages));
        self.engine.fail_on_error(set)
    }

    /// Logits of the first rows of the last step. Waits for the device.
    fn logits(&mut self, rows: u32) -> Result<Vec<bf16>, EngineError> {
        let bits = self.engine.forward.read_logits(rows);
        Ok(self.engine.fail_on_error(bits)?.into_iter().map(bf16::from_bits).collect())
    }
}

/// The number of rounds and steps of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rounds {
    /// Rounds of a comparison; both settings run once per round.
    pub rounds: u32,
    /// Measured steps of each setting in a round, after one step of warm-up.
    pub steps: u32,
}

impl Default for Rounds {
    fn default() -> Self {
        Self { rounds: 7, steps: 4 }
    }
}

/// The number of rows whose logits are compared.
const COMPARED_ROWS: u32 = 8;
/// A distance from the logits of the start that rounding does not explain, RMS over RMS.
const DEVIATION_MAX: f64 = 0.05;
/// The maximum number of recorded steps that are kept.
const GRAPHS_MAX: usize = 16;

/// Measures an engine's steps as the objective of a search.
pub struct StepObjective<'a> {
    tuner: PipelineTuner<'a>,
    space: &'a SettingSpace,
    batch: u32,
    context: u32,
    pages: Vec<Vec<u32>>,
    rounds: Rounds,
    graphs: HashMap<Point, Graph>,
    start: Point,
    /// The logits of the start.
    reference: Option<Vec<bf16>>,
    stop: &'a dyn Fn() -> bool,
}

/// The error of a search that the `stop` function of a [`StepObjective`] ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("interrupted")]
pub struct Interrupted;

impl<'a> StepObjective<'a> {
    /// Measures steps of `batch` sequences of `context` tokens each; `batch` is one of
    /// [`BUCKETS`](crate::options::BUCKETS). `stop` is called between measurements and ends the search by returning
    /// true. The logits of every challenger are compared with those of `start`, also in a search that resumes from a
    /// journal.
    ///
    /// # Errors
    /// [`EngineError::NotStored`] if the engine was loaded without pipelines; else as for
    /// [`Measure::prepare`](super::measure::Measure::prepare).
    pub fn new(
        engine: &'a mut Engine,
        space: &'a SettingSpace,
        (batch, context): (u32, u32),
        rounds: Rounds,
        start: &Point,
        stop: &'a dyn Fn() -> bool,
    ) -> Result<Self, EngineError> {
        let mut tuner = engine.tune_pipelines()?;
        let pages = tuner.begin(batch, context, rounds.steps + 1)?;
        let (graphs, start, reference) = (HashMap::new(), start.clone(), None);
        Ok(Self { tuner, space, batch, context, pages, rounds, graphs, start, reference, stop })
    }

    /// The median time of a step in microseconds.
    ///
    /// # Errors
    /// [`EngineError::Setting`] if the device cannot run the point, [`EngineError::Device`] if it fails.
    pub fn step_us(&mut self, point: &Point) -> Result<f64, EngineError> {
        self.prepare(point)?;
        let mut times = Vec::new();
        for _ in 0..self.rounds.rounds {
            times.push(self.time(point)?);
        }
        times.sort_by(f64::total_cmp);
        Ok(times.get(times.len() / 2).copied().unwrap_or(f64::NAN))
    }

    /// Records a step of a point, unless one is recorded.
    fn prepare(&mut self, point: &Point) -> Result<(), EngineError> {
        if !self.graphs.contains_key(point) {
            if self.graphs.len() >= GRAPHS_MAX {
                self.graphs.clear();
            }
            self.tuner.rewind(self.batch, self.context, &self.pages)?;
            let graph = self.tuner.record(self.batch, &self.space.setting(point))?;
            self.graphs.insert(point.clone(), graph);
        }
        Ok(())
    }

    fn time(&mut self, point: &Point) -> Result<f64, EngineError> {
        self.tuner.rewind(self.batch, self.context, &self.pages)?;
        let Some(graph) = self.graphs.get(point) else { return Ok(f64::NAN) };
        let stream = self.tuner.engine.stream().clone();
        // SAFETY: the graph references memory of the engine, which this borrows for as long as the graphs live. All of
        // it is ordered on the stream, which is synchronized below.
        let launch = || unsafe { graph.launch() };
        launch()?;
        let start = stream.event()?;
        for _ in 0..self.rounds.steps {
            launch()?;
        }
        let end = stream.event()?;
        stream.synchronize()?;
        Ok(start.elapsed_us(&end)? / f64::from(self.rounds.steps.max(1)))
    }

    /// Logits of the first rows of one step.
    fn logits(&mut self, point: &Point) -> Result<Vec<bf16>, EngineError> {
        self.tuner.rewind(self.batch, self.context, &self.pages)?;
        if let Some(graph) = self.graphs.get(point) {
            // SAFETY: as in `time`; reading the logits waits.
            unsafe { graph.launch() }?;
        }
        let logits = self.tuner.logits(self.batch.min(COMPARED_ROWS))?;
        self.tuner.engine.measure().synchronize()?;
        Ok(logits)
    }

    fn measured(&mut self, incumbent: &Point, challenger: &Point) -> Result<Answer, EngineError> {
        if self.reference.is_none() {
            let start = self.start.clone();
            self.prepare(&start)?;
            self.reference = Some(self.logits(&start)?);
        }
        self.prepare(incumbent)?;
        match self.prepare(challenger) {
            Err(error @ EngineError::Setting(_)) => return Ok(Answer::Unusable(error.to_string())),
            prepared => prepared?,
        }
        // `GRAPHS_MAX` may have dropped its graph.
        self.prepare(incumbent)?;
        let got = self.logits(challenger)?;
        let deviation = self.reference.as_ref().map_or(0.0, |reference| distance(&got, reference));
        if deviation.is_nan() || deviation > DEVIATION_MAX {
            let reason = format!("its logits differ from the start's by {deviation:.3}, more than {DEVIATION_MAX}");
            return Ok(Answer::Unusable(reason));
        }
        let mut paired = Paired::default();
        for round in 0..self.rounds.rounds {
            // The first measurement of a round starts on an idle device, so both settings take that place alternately.
            let (first, second) = if round % 2 == 0 { (incumbent, challenger) } else { (challenger, incumbent) };
            let (first, second) = (self.time(first)?, self.time(second)?);
            let (incumbent_us, challenger_us) = if round % 2 == 0 { (first, second) } else { (second, first) };
            paired.incumbent_us.push(incumbent_us);
            paired.challenger_us.push(challenger_us);
        }
        Ok(Answer::Measured(paired))
    }
}

impl Drop for StepObjective<'_> {
    fn drop(&mut self) {
        self.tuner.engine.schedule.give(std::mem::take(&mut self.pages));
    }
}

impl Objective for StepObjective<'_> {
    fn compare(&mut self, incumbent: &Point, challenger: &Point) -> Result<Answer, ObjectiveError> {
        if (self.stop)() {
            return Err(ObjectiveError(Box::new(Interrupted)));
        }
        self.measured(incumbent, challenger).map_err(|error| ObjectiveError(Box::new(error)))
    }
}

/// RMS of the difference over the RMS of the reference; 0 if both are equal.
fn distance(got: &[bf16], reference: &[bf16]) -> f64 {
    let square = |value: f32| f64::from(value).powi(2);
    let difference: f64 =
        got.iter().zip(reference).map(|(got, reference)| square(got.to_f32() - reference.to_f32())).sum();
    let total: f64 = reference.iter().map(|reference| square(reference.to_f32())).sum();
    if difference == 0.0 { 0.0 } else { (difference / total.max(f64::MIN_POSITIVE)).sqrt() }
}
