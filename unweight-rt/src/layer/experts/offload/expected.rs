//! The experts that the next layer is expected to choose, and how often this was right.

use super::slots::Wave;
use crate::device::{DeviceBuffer, DeviceError, LaunchError, Pinned, Stream, Transfer};

/// The maximum number of tokens with a prediction: larger batches choose most experts.
const TOKENS_MAX: u32 = 64;
/// The share of right guesses below which guesses cost more than they save: a wrong one occupies the link for the time
/// of a copy, a right one hides about half of it.
const RATE_MIN: f64 = 0.5;
/// The weight of a guess in the rate.
const RATE_WEIGHT: f64 = 1.0 / 32.0;
/// While the rate is too low, one prediction in this many is still made.
const PROBE_EVERY: u32 = 16;

/// A prediction on its way to the host.
#[derive(Debug)]
pub(super) struct Expected {
    /// The routing decision on the device; its weights are not used.
    pub(super) ids: DeviceBuffer<u32>,
    pub(super) weights: DeviceBuffer<f32>,
    host: Option<Pinned<u32>>,
    /// The copy to the host, and the number of ids.
    reading: Option<(Transfer<u32>, usize)>,
    /// The experts that were prefetched for the next call.
    prefetched: Vec<u32>,
    guesses: Guesses,
}

/// How often guesses were right.
#[derive(Debug)]
struct Guesses {
    /// The share of right ones, recent ones first.
    rate: f64,
    /// Predictions that were not made since the rate fell.
    skipped: u32,
}

impl Guesses {
    fn note(&mut self, right: bool) {
        self.rate += (f64::from(u8::from(right)) - self.rate) * RATE_WEIGHT;
    }

    fn next_is_wanted(&mut self) -> bool {
        if self.rate >= RATE_MIN {
            return true;
        }
        self.skipped = (self.skipped + 1) % PROBE_EVERY;
        self.skipped == 0
    }
}

impl Expected {
    pub(super) fn new(stream: &Stream, tokens: u32, top_k: u32) -> Result<Self, DeviceError> {
        let pairs = tokens.min(TOKENS_MAX) as usize * top_k as usize;
        Ok(Self {
            ids: DeviceBuffer::zeroed(stream, pairs)?,
            weights: DeviceBuffer::zeroed(stream, pairs)?,
            host: None,
            reading: None,
            prefetched: Vec::new(),
            // A few wrong guesses at the start do not end them.
            guesses: Guesses { rate: 0.75, skipped: 0 },
        })
    }

    /// Returns the bytes of device memory.
    pub(super) fn bytes(tokens: u32, top_k: u32) -> u64 {
        u64::from(tokens.min(TOKENS_MAX)) * u64::from(top_k) * 8
    }

    pub(super) fn is_wanted(&mut self, tokens: u32) -> bool {
        (1..=TOKENS_MAX).contains(&tokens) && self.guesses.next_is_wanted()
    }

    /// Starts to copy the first `count` ids to the host.
    pub(super) fn begin(&mut self, stream: &Stream, count: usize) -> Result<(), DeviceError> {
        // Waits for the copy before, if it was not used.
        self.reading = None;
        let pinned = match self.host.take() {
            Some(pinned) => pinned,
            None => Pinned::zeroed(stream.device(), self.ids.len())?,
        };
        if count > pinned.len() {
            let (need, have) = (count as u64, pinned.len() as u64);
            return Err(LaunchError::Room { buffer: "the pairs of a prediction", need, have }.into());
        }
        self.reading = Some((self.ids.read_front_later(stream, 0, pinned, count)?, count));
        Ok(())
    }

    /// Waits for the prediction. Returns its experts, those of most tokens first; `None` without one.
    pub(super) fn wait(&mut self, experts: u32) -> Result<Option<Vec<u32>>, DeviceError> {
        let Some((transfer, count)) = self.reading.take() else { return Ok(None) };
        let pinned = transfer.wait()?;
        let ranked = ranked(pinned.get(..count).unwrap_or_default(), experts);
        self.host = Some(pinned);
        Ok(Some(ranked))
    }

    /// Records the experts that were prefetched for the next call.
    pub(super) fn note_prefetched(&mut self, experts: impl Iterator<Item = u32>) {
        self.prefetched.extend(experts);
    }

    /// Compares the experts that were prefetched with those of a call. Returns the number of right guesses.
    pub(super) fn check(&mut self, waves: &[Wave]) -> u64 {
        let is_chosen = |expert: u32| waves.iter().any(|wave| wave.experts.iter().any(|(chosen, _)| *chosen == expert));
        let mut right = 0;
        for expert in self.prefetched.drain(..) {
            let is_right = is_chosen(expert);
            self.guesses.note(is_right);
            right += u64::from(is_right);
        }
        right
    }
}

/// Returns the experts of a routing decision: those of most tokens first, of equally many in the order of their first
/// places. Skips ids that are not experts.
fn ranked(ids: &[u32], experts: u32) -> Vec<u32> {
    let mut counts = vec![0u32; experts as usize];
    let mut order = Vec::new();
    for id in ids {
        if let Some(count) = counts.get_mut(*id as usize) {
            if *count == 0 {
                order.push(*id);
            }
            *count += 1;
        }
    }
    order.sort_by_key(|id| u32::MAX - counts[*id as usize]);
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_of_most_tokens_come_first() {
        assert_eq!(ranked(&[5, 2, 7, 2, 9, u32::MAX, 3, 7, 2], 8), [2, 7, 5, 3]);
        assert_eq!(ranked(&[], 8), [0u32; 0]);
    }

    #[test]
    fn wrong_guesses_end_predictions_and_right_ones_resume_them() {
        let mut guesses = Guesses { rate: 0.75, skipped: 0 };
        let mut wrong = 0;
        while guesses.next_is_wanted() {
            guesses.note(false);
            wrong += 1;
        }
        assert!((10..20).contains(&wrong), "{wrong}");
        let tried = (0..160).filter(|_| guesses.next_is_wanted()).count();
        assert_eq!(tried, 10, "one in {PROBE_EVERY}");
        while guesses.rate < RATE_MIN {
            guesses.note(true);
        }
        assert!((0..100).all(|_| guesses.next_is_wanted()));
    }
}
