//! Steps of an engine whose MLPs lie as they are stored, measured: what a search ([`tune`](crate::tune)) asks.

use std::collections::HashMap;

use half::bf16;
use unweight_rt::Graph;

use super::{Choices, Setting};
use crate::{
    engine::Engine,
    error::EngineError,
    program::Projection,
    tune::{Answer, Axis, Coordinate, Oracle, OracleError, Paired, Point, Profile, Space},
};

/// Multiprocessors that decode, as a search tries them, after the report's sixth.
const DECODE_SMS: [u32; 8] = [22, 3, 8, 16, 32, 48, 64, 96];

/// Everything that can be chosen of a step, best guesses first.
#[derive(Clone, Debug)]
pub struct PathSpace {
    space: Space,
    guess: Setting,
}

impl PathSpace {
    /// The space of these ways on a device of `sms` multiprocessors; `guess` stands for what has no choice.
    pub fn new(choices: &Choices, guess: &Setting, sms: u32) -> Self {
        let mut axes = Vec::new();
        for (profile, ways) in Profile::ALL.into_iter().zip(choices) {
            for (projection, ways) in Projection::ALL.into_iter().zip(ways) {
                if !ways.is_empty() {
                    let choices = ways.iter().map(ToString::to_string).collect();
                    axes.push(Axis { coordinate: Coordinate::Path(profile, projection), choices });
                }
            }
        }
        if choices[0].iter().any(|ways| !ways.is_empty()) {
            let mut counts = vec![guess.decode_sms];
            counts.extend(DECODE_SMS.into_iter().filter(|count| *count < sms && *count != guess.decode_sms));
            let choices = counts.iter().map(ToString::to_string).collect();
            axes.push(Axis { coordinate: Coordinate::DecodeSms, choices });
            let choices = ["2", "1"].map(str::to_owned).to_vec();
            axes.push(Axis { coordinate: Coordinate::Consumers, choices });
        }
        // Ways of one weight are different, and no coordinate is there twice.
        let space = Space::new(axes).unwrap_or_default();
        Self { space, guess: guess.clone() }
    }

    /// The space.
    pub fn space(&self) -> &Space {
        &self.space
    }

    /// Whether there is nothing to choose.
    pub fn is_trivial(&self) -> bool {
        self.space.axes().iter().all(|axis| axis.choices.len() == 1)
    }

    /// What a point says.
    pub fn setting(&self, point: &Point) -> Setting {
        let mut setting = self.guess.clone();
        for (axis, name) in self.space.axes().iter().zip(self.space.names(point)) {
            match axis.coordinate {
                Coordinate::Path(profile, projection) => {
                    let ways = if profile == Profile::Hard { &mut setting.hard } else { &mut setting.easy };
                    let way = &mut ways[projection as usize];
                    *way = name.parse().unwrap_or(*way);
                }
                Coordinate::DecodeSms => setting.decode_sms = name.parse().unwrap_or(setting.decode_sms),
                Coordinate::Consumers => setting.consumers = name.parse().unwrap_or(setting.consumers),
            }
        }
        setting
    }

    /// The point of a setting; where it says what cannot be chosen, the best guess.
    pub fn point(&self, setting: &Setting) -> Point {
        let names = self.space.axes().iter().map(|axis| {
            let wanted = match axis.coordinate {
                Coordinate::Path(profile, projection) => {
                    let ways = if profile == Profile::Hard { &setting.hard } else { &setting.easy };
                    ways[projection as usize].to_string()
                }
                Coordinate::DecodeSms => setting.decode_sms.to_string(),
                Coordinate::Consumers => setting.consumers.to_string(),
            };
            let known = axis.choices.iter().find(|choice| **choice == wanted).or(axis.choices.first());
            known.cloned().unwrap_or_default()
        });
        self.space.point(&names.collect::<Vec<_>>()).unwrap_or_else(|_| self.space.first())
    }
}

/// How steps are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rounds {
    /// Rounds of a comparison.
    pub rounds: u32,
    /// Steps of each point in a round that count; one before them does not.
    pub steps: u32,
}

impl Default for Rounds {
    fn default() -> Self {
        Self { rounds: 7, steps: 4 }
    }
}

/// Rows whose logits are compared.
const COMPARED: u32 = 8;
/// Logits that are farther from those of the start than rounding explains, RMS over RMS.
const FAR: f64 = 0.05;
/// Recorded steps that are kept.
const KEPT: usize = 16;

/// The engine's own steps as an oracle.
pub struct StepOracle<'a> {
    engine: &'a mut Engine,
    space: &'a PathSpace,
    batch: u32,
    context: u32,
    pages: Vec<Vec<u32>>,
    rounds: Rounds,
    graphs: HashMap<Point, Graph>,
    start: Point,
    /// The start's logits.
    truth: Option<Vec<bf16>>,
    stop: &'a dyn Fn() -> bool,
}

/// The user wants no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("interrupted")]
pub struct Interrupted;

impl<'a> StepOracle<'a> {
    /// Measures steps of `batch` sequences, a size that steps are recorded for, with `context` tokens each. Between
    /// measurements `stop` is asked. Every challenger is to compute what `start` does: of a search that goes on from a
    /// journal, too, whose best so far came to it by other roundings.
    ///
    /// # Errors
    /// No room for so many sequences, or a busy engine.
    pub fn new(
        engine: &'a mut Engine,
        space: &'a PathSpace,
        (batch, context): (u32, u32),
        rounds: Rounds,
        start: &Point,
        stop: &'a dyn Fn() -> bool,
    ) -> Result<Self, EngineError> {
        let pages = engine.begin_rehearsal(batch, context, rounds.steps + 1)?;
        let (graphs, start, truth) = (HashMap::new(), start.clone(), None);
        Ok(Self { engine, space, batch, context, pages, rounds, graphs, start, truth, stop })
    }

    /// The median time of a step, us.
    ///
    /// # Errors
    /// The point cannot run, or the device failed.
    pub fn step_us(&mut self, point: &Point) -> Result<f64, EngineError> {
        self.prepare(point)?;
        let mut times = Vec::new();
        for _ in 0..self.rounds.rounds {
            times.push(self.time(point)?);
        }
        times.sort_by(f64::total_cmp);
        Ok(times.get(times.len() / 2).copied().unwrap_or(f64::NAN))
    }

    /// Records a step, once.
    fn prepare(&mut self, point: &Point) -> Result<(), EngineError> {
        if !self.graphs.contains_key(point) {
            if self.graphs.len() >= KEPT {
                self.graphs.clear();
            }
            self.engine.rewind(self.batch, self.context, &self.pages)?;
            let graph = self.engine.record_paths(self.batch, &self.space.setting(point))?;
            self.graphs.insert(point.clone(), graph);
        }
        Ok(())
    }

    fn time(&mut self, point: &Point) -> Result<f64, EngineError> {
        self.engine.rewind(self.batch, self.context, &self.pages)?;
        let Some(graph) = self.graphs.get(point) else { return Ok(f64::NAN) };
        let stream = self.engine.stream().clone();
        // SAFETY: the graph names memory of the engine, which this borrows for as long as the graphs live; all of it is
        // ordered behind the stream, which is waited for below.
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

    /// Logits of some rows of one step.
    fn logits(&mut self, point: &Point) -> Result<Vec<bf16>, EngineError> {
        self.engine.rewind(self.batch, self.context, &self.pages)?;
        if let Some(graph) = self.graphs.get(point) {
            // SAFETY: as above; reading the logits waits.
            unsafe { graph.launch() }?;
        }
        let logits = self.engine.rehearsed_logits(self.batch.min(COMPARED))?;
        self.engine.rehearsed()?;
        Ok(logits)
    }

    fn measured(&mut self, incumbent: &Point, challenger: &Point) -> Result<Answer, EngineError> {
        if self.truth.is_none() {
            let start = self.start.clone();
            self.prepare(&start)?;
            self.truth = Some(self.logits(&start)?);
        }
        self.prepare(incumbent)?;
        match self.prepare(challenger) {
            Err(error @ EngineError::Program(_)) => return Ok(Answer::Rejected(error.to_string())),
            prepared => prepared?,
        }
        // `KEPT` may have thrown it away.
        self.prepare(incumbent)?;
        let got = self.logits(challenger)?;
        let apart = self.truth.as_ref().map_or(0.0, |truth| distance(&got, truth));
        if apart.is_nan() || apart > FAR {
            return Ok(Answer::Rejected(format!("its logits are {apart:.3} from those of the start")));
        }
        let mut paired = Paired::default();
        for round in 0..self.rounds.rounds {
            // The first of a round finds a device that rests; each is it in turn.
            let (first, second) = if round % 2 == 0 { (incumbent, challenger) } else { (challenger, incumbent) };
            let (first, second) = (self.time(first)?, self.time(second)?);
            let (own, other) = if round % 2 == 0 { (first, second) } else { (second, first) };
            paired.incumbent_us.push(own);
            paired.challenger_us.push(other);
        }
        Ok(Answer::Measured(paired))
    }
}

impl Drop for StepOracle<'_> {
    fn drop(&mut self) {
        self.engine.end_rehearsal(std::mem::take(&mut self.pages));
    }
}

impl Oracle for StepOracle<'_> {
    fn compare(&mut self, incumbent: &Point, challenger: &Point) -> Result<Answer, OracleError> {
        if (self.stop)() {
            return Err(OracleError(Box::new(Interrupted)));
        }
        self.measured(incumbent, challenger).map_err(|error| OracleError(Box::new(error)))
    }
}

/// RMS of the difference over the RMS of the truth. Of logits that are all zero, none.
fn distance(got: &[bf16], truth: &[bf16]) -> f64 {
    let square = |value: f32| f64::from(value).powi(2);
    let apart: f64 = got.iter().zip(truth).map(|(got, truth)| square(got.to_f32() - truth.to_f32())).sum();
    let whole: f64 = truth.iter().map(|truth| square(truth.to_f32())).sum();
    if apart == 0.0 { 0.0 } else { (apart / whole.max(f64::MIN_POSITIVE)).sqrt() }
}
