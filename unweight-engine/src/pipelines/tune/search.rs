//! Coordinate descent (report section 10.2, its Algorithm 8).
//!
//! The axes of hard layers are swept first, then those of easy layers, then those of the whole step. One axis is swept
//! at a time while the others are fixed, until a round changes nothing. Then each alternative is measured once more,
//! and taken if it gains more than 2 %. A challenger is taken if the median of its paired gains exceeds both 0.5 % and
//! three times their median deviation. A point that was left is never taken again, so the search ends. Finally the
//! result is compared with the start, so that it is never worse.

use std::collections::HashSet;

use super::{
    answer::{Answer, Phase},
    journal::{Journal, JournalError},
    space::{Point, Profile, Space},
};

/// The error that stops a search. Finished measurements are in the journal.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ObjectiveError(
    /// The error of the objective.
    pub Box<dyn std::error::Error + Send + Sync>,
);

/// Measures points for a search.
pub trait Objective {
    /// Measures steps of both points in interleaved rounds.
    ///
    /// # Errors
    /// [`ObjectiveError`] if no further point can be measured: the device failed or the user interrupts. A challenger
    /// that cannot run is an [`Answer`], not an error.
    fn compare(&mut self, incumbent: &Point, challenger: &Point) -> Result<Answer, ObjectiveError>;
}

/// The limits of a search: the number of rounds, and the smallest gains that count.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// The maximum number of rounds of sweeps per profile.
    pub rounds: u32,
    /// The smallest gain of a sweep, as a share of the incumbent's time.
    pub gain: f64,
    /// The smallest gain of a revisit, as a share of the incumbent's time.
    pub revisit_gain: f64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { rounds: 8, gain: 0.005, revisit_gain: 0.02 }
    }
}

/// The progress of a search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress<'a> {
    /// The number of comparisons so far, including those of the journal.
    pub compared: u32,
    /// The estimated number of comparisons of the whole search, if no further challenger is taken.
    pub expected: u32,
    /// Whether the last comparison was measured now, not read from the journal.
    pub measured: bool,
    /// The best point so far.
    pub incumbent: &'a Point,
}

/// The result of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct Tuned {
    /// The best point: the start, if nothing was better.
    pub best: Point,
    /// The gain over the start, as a share of the start's time.
    pub gain: f64,
    /// The number of comparisons that were measured now.
    pub measured: u32,
    /// The number of comparisons that were read from the journal.
    pub replayed: u32,
    /// The number of challengers that could not run.
    pub rejected: u32,
    /// The challengers that were taken, in order.
    pub taken: Vec<Point>,
}

/// The reason why a search stopped early. It resumes from its journal.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TuneError {
    /// The journal cannot be used.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The objective failed.
    #[error("the measurement failed: {0}; the journal keeps all earlier measurements")]
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

/// Searches for the best point from `start` on. `watch` receives the progress after every comparison.
///
/// # Errors
/// [`TuneError`] if the objective or the journal fails. A later call with the same journal resumes the search.
pub fn descend(
    space: &Space,
    start: &Point,
    objective: &mut dyn Objective,
    journal: &mut Journal,
    limits: &Limits,
    watch: &mut dyn FnMut(Progress<'_>),
) -> Result<Tuned, TuneError> {
    let visited = HashSet::from([start.clone()]);
    let tuned = Tuned { best: start.clone(), gain: 0.0, measured: 0, replayed: 0, rejected: 0, taken: Vec::new() };
    let of = |group| (0..space.axes().len()).filter(move |axis| space.axes()[*axis].coordinate.profile() == group);
    let groups = [Some(Profile::Hard), Some(Profile::Easy), None].map(|group| of(group).collect::<Vec<usize>>());
    let mut search = Search { space, objective, journal, watch, visited, tuned, group_remaining: 0, later_groups: 0 };
    for (at, axes) in groups.iter().enumerate() {
        // In the following groups every alternative is compared twice: in a sweep and in a revisit.
        search.later_groups = 2 * groups[at + 1..].iter().map(|axes| search.alternatives(axes)).sum::<u32>();
        for _ in 0..limits.rounds {
            while search.sweep(axes, Phase::Sweep, limits.gain)? {}
            // The last sweep and this revisit found nothing, so another round would repeat the same comparisons.
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
    /// Points that were the best at some time; none is tried again.
    visited: HashSet<Point>,
    tuned: Tuned,
    /// Comparisons left in the current sweep, and in those that follow it in its group if nothing is gained.
    group_remaining: u32,
    /// Comparisons of the following groups.
    later_groups: u32,
}

impl Search<'_> {
    /// The number of choices of these axes other than the current ones.
    fn alternatives(&self, axes: &[usize]) -> u32 {
        axes.iter().map(|axis| self.space.axes()[*axis].choices.len() as u32 - 1).sum()
    }

    /// Compares every alternative of every axis with the best point so far. Returns whether one was taken.
    fn sweep(&mut self, axes: &[usize], phase: Phase, min_gain: f64) -> Result<bool, TuneError> {
        let mut gained = false;
        // A sweep is followed by a revisit. After a gain, one more sweep follows, and after a revisit with a gain both.
        let all = self.alternatives(axes);
        self.group_remaining = if phase == Phase::Sweep { 2 * all } else { all };
        let repeat = if phase == Phase::Sweep { all } else { 2 * all };
        for &axis in axes {
            // The choice at which the sweep of this axis began need not be tried.
            let from = self.tuned.best.choice(axis);
            for choice in (0..self.space.axes()[axis].choices.len()).filter(|choice| *choice != from) {
                let challenger = self.tuned.best.with(axis, choice);
                self.group_remaining = self.group_remaining.saturating_sub(1);
                if self.visited.contains(&challenger) {
                    continue;
                }
                let incumbent = self.tuned.best.clone();
                match self.compare(phase, &incumbent, &challenger)? {
                    Answer::Measured(paired) if paired.is_gain(min_gain) => {
                        self.group_remaining += if gained { 0 } else { repeat };
                        gained = true;
                        self.visited.insert(challenger.clone());
                        self.tuned.taken.push(challenger.clone());
                        self.tuned.best = challenger;
                    }
                    Answer::Measured(_) => {}
                    Answer::Unusable(_) => self.tuned.rejected += 1,
                }
            }
        }
        Ok(gained)
    }

    /// Compares the best point with the start, and returns to the start if the gain does not hold.
    fn confirm(&mut self, start: &Point) -> Result<(), TuneError> {
        if self.tuned.best == *start {
            return Ok(());
        }
        self.group_remaining = 0;
        let best = self.tuned.best.clone();
        let gain = match self.compare(Phase::Confirm, start, &best)? {
            Answer::Measured(paired) => paired.gain().0,
            Answer::Unusable(_) => 0.0,
        };
        if gain > 0.0 {
            self.tuned.gain = gain;
        } else {
            self.tuned.best = start.clone();
        }
        Ok(())
    }

    /// Returns the answer from the journal, or measures it and appends it to the journal.
    fn compare(&mut self, phase: Phase, incumbent: &Point, challenger: &Point) -> Result<Answer, TuneError> {
        let (answer, measured) = match self.journal.answer(phase, incumbent, challenger) {
            Some(answer) => (answer.clone(), false),
            None => {
                let answer = self.objective.compare(incumbent, challenger)?.reject_infinite();
                (self.journal.append(self.space, phase, incumbent, challenger, answer)?, true)
            }
        };
        *(if measured { &mut self.tuned.measured } else { &mut self.tuned.replayed }) += 1;
        let compared = self.tuned.measured + self.tuned.replayed;
        let confirm = u32::from(phase != Phase::Confirm && !self.tuned.taken.is_empty());
        let expected = compared + self.group_remaining + self.later_groups + confirm;
        (self.watch)(Progress { compared, expected, measured, incumbent });
        Ok(answer)
    }
}
