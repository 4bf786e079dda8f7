//! Coordinate descent (report section 10.2, its Algorithm 8).
//!
//! For hard layers, then easy ones, then what belongs to the whole step: every axis is swept while the others hold
//! still, until a round changes nothing. Then each alternative is measured once more, and taken if it gains more than 2
//! %. A challenger is taken if the median of its paired gains exceeds both 0.5 % and three times their median
//! deviation. A point that was left is never taken again, so the search ends; and the result is compared with the start
//! at last, so that it is never worse.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use super::{
    journal::{Journal, JournalError},
    space::{Point, Profile, Space},
};

/// Steps of two points, measured in turns.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Paired {
    /// Microseconds of the incumbent, by round.
    pub incumbent_us: Vec<f64>,
    /// Microseconds of the challenger, by round.
    pub challenger_us: Vec<f64>,
}

/// The middle of some numbers, 0 of none.
fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    match of.len() {
        0 => 0.0,
        len if len % 2 == 1 => of[len / 2],
        len => (of[len / 2 - 1] + of[len / 2]) / 2.0,
    }
}

impl Paired {
    /// The median of what the challenger gains in a round, as a share of the incumbent's time, and the median deviation
    /// from it. A round whose times are no positive numbers does not count.
    pub fn gain(&self) -> (f64, f64) {
        let rounds = self.incumbent_us.iter().zip(&self.challenger_us);
        let sound = rounds.filter(|(incumbent, challenger)| {
            incumbent.is_finite() && challenger.is_finite() && **incumbent > 0.0 && **challenger > 0.0
        });
        let gains: Vec<f64> = sound.map(|(incumbent, challenger)| (incumbent - challenger) / incumbent).collect();
        let middle = median(gains.clone());
        (middle, median(gains.iter().map(|gain| (gain - middle).abs()).collect()))
    }

    /// Whether the challenger gains more than `least`, and more than three median deviations.
    pub fn is_gain(&self, least: f64) -> bool {
        let (gain, deviation) = self.gain();
        gain > least.max(3.0 * deviation)
    }
}

/// What an objective says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// Times.
    Measured(Paired),
    /// The challenger cannot run, or computes something else: why.
    AdmissionError(String),
}

impl Answer {
    /// Times that are no numbers measure nothing.
    fn sound(self) -> Self {
        match self {
            Self::Measured(paired)
                if !paired.incumbent_us.iter().chain(&paired.challenger_us).all(|us| us.is_finite()) =>
            {
                Self::AdmissionError("a time that is no number".to_owned())
            }
            answer => answer,
        }
    }
}

/// Why an objective cannot go on. What was measured is in the journal.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ObjectiveError(pub Box<dyn std::error::Error + Send + Sync>);

/// Who measures.
pub trait Objective {
    /// Steps of both points, in turns.
    ///
    /// # Errors
    /// It cannot go on: the device is lost, or the user interrupts. A challenger that cannot run is no error
    /// ([`Answer::AdmissionError`]).
    fn compare(&mut self, incumbent: &Point, challenger: &Point) -> Result<Answer, ObjectiveError>;
}

/// Which part of the search asks. The same two points are measured again in another phase, and not in the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Sweeps.
    Sweep,
    /// Alternatives once more.
    Revisit,
    /// The result beside the start.
    Confirm,
}

/// What a search may cost, and what counts as a gain.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Rounds of sweeps over the axes of one profile.
    pub rounds: u32,
    /// The least gain of a sweep, as a share.
    pub gain: f64,
    /// The least gain of a revisit.
    pub revisit_gain: f64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { rounds: 8, gain: 0.005, revisit_gain: 0.02 }
    }
}

/// How far a search is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress<'a> {
    /// Comparisons so far, those of the journal included.
    pub compared: u32,
    /// How many it will have been at the end of the search, if nothing more is gained; points that were left already
    /// may make it a few less.
    pub expected: u32,
    /// Whether the last one was measured now.
    pub measured: bool,
    /// The best so far.
    pub incumbent: &'a Point,
}

/// What a search found.
#[derive(Clone, Debug, PartialEq)]
pub struct Tuned {
    /// The best point: the start, if nothing was better.
    pub best: Point,
    /// What it gains over the start, as a share of the start's time.
    pub gain: f64,
    /// Comparisons that were measured now.
    pub measured: u32,
    /// Comparisons that the journal had.
    pub replayed: u32,
    /// Challengers that could not run.
    pub rejected: u32,
    /// Challengers that were taken, in order.
    pub taken: Vec<Point>,
}

/// Why a search did not end. It goes on from its journal.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TuneError {
    /// The journal.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The objective.
    #[error("the measurement failed: {0}; the journal has all before it")]
    Objective(#[from] ObjectiveError),
}

impl TuneError {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Journal(error) => error.code(),
            Self::Objective(_) => "measurement-failed",
        }
    }
}

/// Finds the best point from `start` on. `watch` is told of every comparison.
///
/// # Errors
/// [`TuneError`]: called again with the same journal, it goes on where it stood.
pub fn descend(
    space: &Space,
    start: &Point,
    objective: &mut dyn Objective,
    journal: &mut Journal,
    limits: &Limits,
    watch: &mut dyn FnMut(Progress<'_>),
) -> Result<Tuned, TuneError> {
    let left = HashSet::from([start.clone()]);
    let tuned = Tuned { best: start.clone(), gain: 0.0, measured: 0, replayed: 0, rejected: 0, taken: Vec::new() };
    let of = |group| (0..space.axes().len()).filter(move |axis| space.axes()[*axis].coordinate.profile() == group);
    let groups = [Some(Profile::Hard), Some(Profile::Easy), None].map(|group| of(group).collect::<Vec<usize>>());
    let mut search = Search { space, objective, journal, watch, left, tuned, ahead: 0, behind: 0 };
    for (at, axes) in groups.iter().enumerate() {
        // Of those behind, every alternative twice: a sweep and a revisit.
        search.behind = 2 * groups[at + 1..].iter().map(|axes| search.alternatives(axes)).sum::<u32>();
        for _ in 0..limits.rounds {
            while search.sweep(axes, Phase::Sweep, limits.gain)? {}
            // The last sweep and this found nothing: another round would ask the same.
            if !search.sweep(axes, Phase::Revisit, limits.revisit_gain)? {
                break;
            }
        }
    }
    search.confirm(start)?;
    Ok(search.tuned)
}

struct Search<'a> {
    space: &'a Space,
    objective: &'a mut dyn Objective,
    journal: &'a mut Journal,
    watch: &'a mut dyn FnMut(Progress<'_>),
    /// Points that were the best once; none comes back.
    left: HashSet<Point>,
    tuned: Tuned,
    /// Comparisons of the present sweep that are left, and of those that follow it in its group if nothing is gained.
    ahead: u32,
    /// Those of the groups behind.
    behind: u32,
}

impl Search<'_> {
    /// How many choices these axes have beside their own ones.
    fn alternatives(&self, axes: &[usize]) -> u32 {
        axes.iter().map(|axis| self.space.axes()[*axis].choices.len() as u32 - 1).sum()
    }

    /// Every alternative of every axis beside the best so far. Whether one was taken.
    fn sweep(&mut self, axes: &[usize], phase: Phase, least: f64) -> Result<bool, TuneError> {
        let mut gained = false;
        // Behind a sweep a revisit; once something is gained, another sweep before it, or both behind a revisit.
        let all = self.alternatives(axes);
        self.ahead = if phase == Phase::Sweep { 2 * all } else { all };
        let again = if phase == Phase::Sweep { all } else { 2 * all };
        for &axis in axes {
            // Where the sweep of this axis began: the one choice that it need not try.
            let from = self.tuned.best.choice(axis);
            for choice in (0..self.space.axes()[axis].choices.len()).filter(|choice| *choice != from) {
                let challenger = self.tuned.best.with(axis, choice);
                self.ahead = self.ahead.saturating_sub(1);
                if self.left.contains(&challenger) {
                    continue;
                }
                let incumbent = self.tuned.best.clone();
                match self.ask(phase, &incumbent, &challenger)? {
                    Answer::Measured(paired) if paired.is_gain(least) => {
                        self.ahead += if gained { 0 } else { again };
                        gained = true;
                        self.left.insert(challenger.clone());
                        self.tuned.taken.push(challenger.clone());
                        self.tuned.best = challenger;
                    }
                    Answer::Measured(_) => {}
                    Answer::AdmissionError(_) => self.tuned.rejected += 1,
                }
            }
        }
        Ok(gained)
    }

    /// The best beside the start; what does not hold is given up.
    fn confirm(&mut self, start: &Point) -> Result<(), TuneError> {
        if self.tuned.best == *start {
            return Ok(());
        }
        self.ahead = 0;
        let best = self.tuned.best.clone();
        let gain = match self.ask(Phase::Confirm, start, &best)? {
            Answer::Measured(paired) => paired.gain().0,
            Answer::AdmissionError(_) => 0.0,
        };
        if gain > 0.0 {
            self.tuned.gain = gain;
        } else {
            self.tuned.best = start.clone();
        }
        Ok(())
    }

    /// From the journal, else from the objective, and then into the journal.
    fn ask(&mut self, phase: Phase, incumbent: &Point, challenger: &Point) -> Result<Answer, TuneError> {
        let (answer, measured) = match self.journal.answer(phase, incumbent, challenger) {
            Some(answer) => (answer.clone(), false),
            None => {
                let answer = self.objective.compare(incumbent, challenger)?.sound();
                (self.journal.append(self.space, phase, incumbent, challenger, answer)?, true)
            }
        };
        *(if measured { &mut self.tuned.measured } else { &mut self.tuned.replayed }) += 1;
        let compared = self.tuned.measured + self.tuned.replayed;
        let confirm = u32::from(phase != Phase::Confirm && !self.tuned.taken.is_empty());
        let expected = compared + self.ahead + self.behind + confirm;
        (self.watch)(Progress { compared, expected, measured, incumbent });
        Ok(answer)
    }
}
