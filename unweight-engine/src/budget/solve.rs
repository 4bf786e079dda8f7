//! Makes one choice per unit with the least total time or bytes: a multiple-choice knapsack problem, solved by its
//! Pareto frontier.
//!
//! A state is a choice for each of the units so far. It is dominated if another state takes no more bytes and no more
//! time. The frontier contains the other states, ordered by bytes. It is exact as long as it has at most `STATES_MAX`
//! states. Beyond, states close to others are dropped, and swaps spend the bytes that a plan leaves.

/// One way to store a unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// Bytes of the unit.
    pub bytes: u64,
    /// Microseconds of the unit's product.
    pub us: f64,
}

/// A choice for every unit.
#[derive(Clone, Debug, PartialEq)]
pub struct Solution {
    /// Per unit, the index of its choice.
    pub choices: Vec<usize>,
    /// Bytes of all units.
    pub bytes: u64,
    /// Microseconds of all units.
    pub us: f64,
}

/// The maximum number of states that are kept.
const STATES_MAX: usize = 8192;

#[derive(Clone, Copy)]
struct State {
    bytes: u64,
    us: f64,
    /// The index of the state of the units before, and the choice of this unit.
    from: u32,
    choice: u32,
}

/// All states that are not dominated, ordered by bytes.
pub struct Frontier<'a> {
    units: &'a [Vec<Candidate>],
    /// The states after each unit.
    levels: Vec<Vec<State>>,
    exact: bool,
}

impl<'a> Frontier<'a> {
    /// Solves a problem of these units, each with at least one choice.
    pub fn new(units: &'a [Vec<Candidate>]) -> Self {
        let mut levels: Vec<Vec<State>> = Vec::with_capacity(units.len());
        let mut exact = true;
        let start = [State { bytes: 0, us: 0.0, from: 0, choice: 0 }];
        for choices in units {
            let before: &[State] = levels.last().map_or(&start, |level| level);
            let mut states: Vec<State> = (0..)
                .zip(before)
                .flat_map(|(from, state)| {
                    (0..).zip(choices).map(move |(choice, of)| State {
                        bytes: state.bytes.saturating_add(of.bytes),
                        us: state.us + of.us,
                        from,
                        choice,
                    })
                })
                .collect();
            states.sort_by(|a, b| a.bytes.cmp(&b.bytes).then(a.us.total_cmp(&b.us)));
            let mut min_us = f64::INFINITY;
            states.retain(|state| {
                state.us < min_us && {
                    min_us = state.us;
                    true
                }
            });
            if states.len() > STATES_MAX {
                exact = false;
                thin(&mut states);
            }
            levels.push(states);
        }
        Self { units, levels, exact }
    }

    /// Whether no state was dropped.
    pub fn is_exact(&self) -> bool {
        self.exact
    }

    /// Returns the choices with the least time within `bytes` bytes.
    pub fn fastest(&self, bytes: u64) -> Option<Solution> {
        let at = self.last().iter().rposition(|state| state.bytes <= bytes)?;
        Some(self.swapped(self.solution(at), bytes))
    }

    /// Returns the choices with the fewest bytes within `us` microseconds.
    pub fn smallest(&self, us: f64) -> Option<Solution> {
        let at = self.last().iter().position(|state| state.us <= us)?;
        Some(self.solution(at))
    }

    fn last(&self) -> &[State] {
        self.levels.last().map_or(&[State { bytes: 0, us: 0.0, from: 0, choice: 0 }], |level| level)
    }

    fn solution(&self, at: usize) -> Solution {
        let State { bytes, us, .. } = self.last()[at];
        let mut choices = vec![0; self.units.len()];
        let mut at = at;
        for (unit, level) in self.levels.iter().enumerate().rev() {
            choices[unit] = level[at].choice as usize;
            at = level[at].from as usize;
        }
        Solution { choices, bytes, us }
    }

    /// Spends the bytes that are left, if the frontier was thinned.
    fn swapped(&self, mut solution: Solution, bytes: u64) -> Solution {
        if self.exact {
            return solution;
        }
        loop {
            let unspent = bytes - solution.bytes;
            let swaps = self.units.iter().zip(&solution.choices).enumerate().flat_map(|(unit, (choices, current))| {
                let current = choices[*current];
                choices.iter().enumerate().filter_map(move |(choice, other)| {
                    let fits = other.bytes.saturating_sub(current.bytes) <= unspent;
                    (fits && other.us < current.us).then_some((current.us - other.us, unit, choice))
                })
            });
            let Some((_, unit, choice)) = swaps.max_by(|a, b| a.0.total_cmp(&b.0)) else { return solution };
            let (current, other) = (self.units[unit][solution.choices[unit]], self.units[unit][choice]);
            solution.bytes = solution.bytes - current.bytes + other.bytes;
            solution.us = solution.us - current.us + other.us;
            solution.choices[unit] = choice;
        }
    }
}

/// Keeps one state, the fastest, in each of equal ranges of bytes, and the smallest state of all.
fn thin(states: &mut Vec<State>) {
    let (first, last) = (states[0].bytes, states[states.len() - 1].bytes);
    let width = (last - first) / (STATES_MAX as u64 - 2) + 1;
    let range = |state: &State| (state.bytes - first) / width;
    let retained: Vec<State> = states
        .iter()
        .enumerate()
        .filter(|(at, state)| *at == 0 || states.get(at + 1).is_none_or(|next| range(next) != range(state)))
        .map(|(_, state)| *state)
        .collect();
    *states = retained;
}

/// Chooses `count` of `len` equal units, evenly spread; the first one only if more than half are chosen.
pub fn spread(len: usize, count: usize) -> Vec<bool> {
    let (mut chosen, count) = (vec![false; len], count.min(len));
    for at in 0..count {
        chosen[(2 * at + 1) * len / (2 * count)] = true;
    }
    chosen
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The sums of all combinations of choices.
    fn all_sums(units: &[Vec<Candidate>]) -> Vec<(u64, f64)> {
        units.iter().fold(vec![(0, 0.0)], |sums, choices| {
            sums.iter().flat_map(|(bytes, us)| choices.iter().map(move |of| (bytes + of.bytes, us + of.us))).collect()
        })
    }

    fn sum(units: &[Vec<Candidate>], solution: &Solution) -> (u64, f64) {
        let chosen: Vec<Candidate> = units.iter().zip(&solution.choices).map(|(unit, at)| unit[*at]).collect();
        (chosen.iter().map(|of| of.bytes).sum(), chosen.iter().map(|of| of.us).sum())
    }

    prop_compose! {
        fn units()(
            units in prop::collection::vec(prop::collection::vec((0..60u64, 0..40u32), 1..4), 0..7),
        ) -> Vec<Vec<Candidate>> {
            let choice = |(bytes, us): &(u64, u32)| Candidate { bytes: *bytes, us: f64::from(*us) };
            units.iter().map(|unit| unit.iter().map(choice).collect()).collect()
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn small_cases_equal_brute_force(units in units(), budget in 0..300u64, limit in 0..200u32) {
            let (frontier, all) = (Frontier::new(&units), all_sums(&units));
            prop_assert!(frontier.is_exact());
            let min_bytes = frontier.smallest(f64::INFINITY).map(|solution| solution.bytes);
            prop_assert_eq!(min_bytes, all.iter().map(|sum| sum.0).min());
            let fastest = all.iter().filter(|sum| sum.0 <= budget).map(|sum| sum.1).min_by(f64::total_cmp);
            let solution = frontier.fastest(budget);
            prop_assert_eq!(solution.as_ref().map(|solution| solution.us), fastest);
            let smallest = all.iter().filter(|sum| sum.1 <= f64::from(limit)).map(|sum| sum.0).min();
            let small = frontier.smallest(f64::from(limit));
            prop_assert_eq!(small.as_ref().map(|solution| solution.bytes), smallest);
            for solution in solution.iter().chain(&small) {
                prop_assert_eq!(sum(&units, solution), (solution.bytes, solution.us));
            }
        }

        #[test]
        fn spread_keeps_every_item(len in 0..200usize, count in 0..200usize) {
            let chosen = spread(len, count);
            prop_assert_eq!(chosen.iter().filter(|chosen| **chosen).count(), count.min(len));
            // No gap is longer than another by more than one.
            let at: Vec<usize> = (0..len).filter(|at| chosen[*at]).collect();
            let gaps: Vec<usize> = at.windows(2).map(|pair| pair[1] - pair[0]).collect();
            if let (Some(min), Some(max)) = (gaps.iter().min(), gaps.iter().max()) {
                prop_assert!(max - min <= 1, "{:?}", at);
            }
        }
    }

    /// 160 units of slightly different sizes have more states than are kept. No solution exceeds the budget, and the
    /// loss is small.
    #[test]
    fn large_cases_are_close_to_the_bound() {
        // Sizes without a common divisor, and times that differ by little.
        let units: Vec<Vec<Candidate>> = (0..160u64)
            .map(|at| {
                let choice = |mega: u64, us: f64| Candidate {
                    bytes: mega * 1_000_003 + at * mega * 7919 % 400_009,
                    us: us + (at * mega % 97) as f64 * 1e-4,
                };
                vec![choice(160, 30.0), choice(120, 20.0), choice(109, 76.0)]
            })
            .collect();
        let frontier = Frontier::new(&units);
        assert!(!frontier.is_exact());
        for coded in [0, 1, 40, 79, 160] {
            // The bytes of this many hard units, and a little more.
            let budget = 1_000_003 * (120 * (160 - coded) + 109 * coded) + 160 * 400_009;
            let solution = frontier.fastest(budget).unwrap();
            assert!(solution.bytes <= budget && sum(&units, &solution).0 == solution.bytes);
            let bound = 20.0 * (160 - coded) as f64 + 76.0 * coded as f64;
            assert!(solution.us <= bound + 2.0 && solution.us > bound - 500.0, "{coded}: {} for {bound}", solution.us);
        }
        let min_bytes = frontier.smallest(f64::INFINITY).unwrap().bytes;
        assert!(frontier.fastest(min_bytes).is_some() && frontier.fastest(min_bytes - 1).is_none());
        assert!(frontier.smallest(160.0 * 20.0 - 1.0).is_none());
    }
}
