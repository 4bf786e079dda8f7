//! How often a draft model is right.

/// The estimate of a draft model's share of right guesses before any is verified: enough to try a few.
const INITIAL_CHANCE: f32 = 0.6;
/// The number of verified guesses that this estimate counts as. Four wrong ones end drafts that cost what those of a
/// model of a fifth of the target's size do.
const INITIAL_GUESSES: f32 = 4.0;
/// The number of guesses over which the share is averaged, for a sequence and for all.
const AVERAGED_GUESSES: f32 = 16.0;
const AVERAGED_GUESSES_OF_ALL: f32 = 32.0;

/// An estimate of a share of right guesses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Acceptance {
    chance: f32,
    /// The number of guesses behind the estimate.
    guesses: f32,
}

impl Default for Acceptance {
    fn default() -> Self {
        Self { chance: INITIAL_CHANCE, guesses: INITIAL_GUESSES }
    }
}

impl Acceptance {
    /// Learns from a verified guess of any sequence.
    pub fn observe(&mut self, is_right: bool) {
        self.average(is_right, AVERAGED_GUESSES_OF_ALL);
    }

    fn average(&mut self, is_right: bool, guesses_max: f32) {
        self.guesses = (self.guesses + 1.0).min(guesses_max);
        self.chance += (f32::from(u8::from(is_right)) - self.chance) / self.guesses;
    }
}

/// What a schedule knows of a draft model's work for one sequence.
#[derive(Debug)]
pub struct ModelDrafter {
    acceptance: Acceptance,
    /// The number of the sequence's tokens that the draft model has seen.
    seen: u32,
}

impl ModelDrafter {
    /// The drafter of a sequence that the draft model has not seen; `all` is the share of right guesses of all
    /// sequences.
    pub fn new(all: Acceptance) -> Self {
        Self { acceptance: Acceptance { guesses: INITIAL_GUESSES, ..all }, seen: 0 }
    }

    /// The chance that a guess is right if all guesses before it are.
    pub fn chance(&self) -> f32 {
        self.acceptance.chance
    }

    /// Learns from a verified guess.
    pub fn observe(&mut self, is_right: bool) {
        self.acceptance.average(is_right, AVERAGED_GUESSES);
    }

    /// Sets the number of tokens that the draft model has seen.
    pub fn set_seen(&mut self, seen: u32) {
        self.seen = seen;
    }

    /// The number of tokens of a sequence of `tokens` tokens that the draft model has not seen.
    pub fn unseen(&self, tokens: u32) -> u32 {
        tokens.saturating_sub(self.seen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chances_follow_verified_guesses() {
        let mut all = Acceptance::default();
        let mut drafter = ModelDrafter::new(all);
        (0..4).for_each(|_| drafter.observe(false));
        assert!(drafter.chance() < 0.31, "{drafter:?}");
        (0..100).for_each(|nth| drafter.observe(nth % 10 > 0));
        assert!((0.8..0.97).contains(&drafter.chance()), "{drafter:?}");
        (0..300).for_each(|_| all.observe(false));
        let mut next = ModelDrafter::new(all);
        assert!(next.chance() < 0.01, "a new sequence begins with the chance of all: {next:?}");
        (0..4).for_each(|_| next.observe(true));
        assert!((0.45..0.55).contains(&next.chance()), "{next:?}");
    }
}
