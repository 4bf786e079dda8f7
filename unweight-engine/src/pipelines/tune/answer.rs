//! The result of a comparison of two points, and the phase of the search that requests it.

use serde::{Deserialize, Serialize};

/// Step times of two points, measured in interleaved rounds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Paired {
    /// Microseconds of the incumbent, by round.
    pub incumbent_us: Vec<f64>,
    /// Microseconds of the challenger, by round.
    pub challenger_us: Vec<f64>,
}

/// The median of `values`; 0 if it is empty.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        len if len % 2 == 1 => values[len / 2],
        len => (values[len / 2 - 1] + values[len / 2]) / 2.0,
    }
}

impl Paired {
    /// The median gain of the challenger per round, as a share of the incumbent's time, and the median deviation from
    /// it. A round whose times are not positive numbers does not count.
    pub fn gain(&self) -> (f64, f64) {
        let rounds = self.incumbent_us.iter().zip(&self.challenger_us);
        let valid = rounds.filter(|(incumbent, challenger)| {
            incumbent.is_finite() && challenger.is_finite() && **incumbent > 0.0 && **challenger > 0.0
        });
        let gains: Vec<f64> = valid.map(|(incumbent, challenger)| (incumbent - challenger) / incumbent).collect();
        let middle = median(gains.clone());
        (middle, median(gains.iter().map(|gain| (gain - middle).abs()).collect()))
    }

    /// Whether the challenger gains more than `least`, and more than three median deviations.
    pub fn is_gain(&self, least: f64) -> bool {
        let (gain, deviation) = self.gain();
        gain > least.max(3.0 * deviation)
    }
}

/// The answer of an objective to a setting.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// The setting ran in these times.
    Measured(Paired),
    /// The challenger cannot run or computes another result, for this reason.
    Unusable(String),
}

impl Answer {
    /// Replaces measurements with a time that is not finite by an unusable answer.
    pub(super) fn reject_infinite(self) -> Self {
        match self {
            Self::Measured(paired)
                if !paired.incumbent_us.iter().chain(&paired.challenger_us).all(|us| us.is_finite()) =>
            {
                Self::Unusable("a time is not a finite number".to_owned())
            }
            answer => answer,
        }
    }
}

/// The phase of a comparison. The same two points are measured again in another phase, but not in the same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Sweeps over all axes.
    Sweep,
    /// Measures alternatives once more.
    Revisit,
    /// Compares the result with the start.
    Confirm,
}
