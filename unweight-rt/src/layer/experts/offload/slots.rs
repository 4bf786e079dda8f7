//! Tracks which experts of a layer are in the device's slots, and chooses which to evict. Pure host logic, without a
//! device or clock.
//!
//! A step requests experts. Experts in a slot are hits; a miss replaces the expert that was requested least often,
//! where the weight of a request halves every [`HALF_LIFE`] steps. Trained routers prefer some experts: with half of
//! 128 experts in slots and Zipf routing, one sequence misses 16 % of its experts, and 22 % if the least recently used
//! were replaced (the test of this module computes both). With uniform routing, all choices are equal.
//!
//! A step is split into waves. The first multiplies the experts in slots, while the others are copied; if there are
//! more experts than slots, it also keeps experts from being evicted before use. The second multiplies the rest. If
//! these do not fit, more waves take half of the slots each, so that the copies of a wave do not overwrite slots that
//! the previous wave's products read.
//!
//! Between two steps, [`Slots::prefetch`] replaces experts by others that are likely to be requested next.

/// The experts that are multiplied at once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wave {
    /// Experts and their slots.
    pub experts: Vec<(u32, u32)>,
    /// The experts that must be copied first, and their slots.
    pub copies: Vec<(u32, u32)>,
    /// Whether some of the experts were prefetched, and their copies may still run.
    pub arriving: bool,
    /// The last wave of this step that reads a slot which these copies overwrite.
    pub behind: Option<usize>,
}

/// The number of steps after which a request counts half. Long enough to estimate the shares of hot experts, and short
/// enough to follow another text.
pub const HALF_LIFE: u32 = 128;
/// The weight of a request at which all frequencies are scaled down.
const WEIGHT_MAX: f64 = 1e100;

/// Slots of equal size, each with one expert or none; the least frequently requested expert is evicted.
#[derive(Clone, Debug)]
pub struct Slots {
    /// Indexed by slot.
    slots: Vec<Slot>,
    /// Indexed by expert.
    slot_of: Vec<Option<u32>>,
    /// How often each expert was requested, in a slot or not: the sum of the weights of its requests.
    frequency: Vec<f64>,
    /// The weight of a request in this step. It grows, instead of all frequencies shrinking.
    weight: f64,
    /// The number of waves so far.
    clock: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    expert: Option<u32>,
    /// The last wave that used it; 0 if none.
    used: u64,
    /// Whether the expert was prefetched, and no wave has waited for its copy yet.
    arriving: bool,
}

impl Slots {
    /// Creates empty slots, at least one, for this number of experts.
    pub fn new(experts: u32, slots: u32) -> Self {
        let slots = vec![Slot::default(); slots.max(1) as usize];
        let experts = experts as usize;
        Self { slots, slot_of: vec![None; experts], frequency: vec![0.0; experts], weight: 1.0, clock: 0 }
    }

    /// Returns the number of slots.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Returns whether all slots are empty.
    pub fn is_empty(&self) -> bool {
        self.slots.iter().all(|slot| slot.expert.is_none())
    }

    /// Returns the slot that holds an expert.
    pub fn slot_of(&self, expert: u32) -> Option<u32> {
        self.slot_of.get(expert as usize).copied().flatten()
    }

    /// Empties all slots, for when it is unknown which copies were enqueued.
    pub fn clear(&mut self) {
        self.slots.fill(Slot::default());
        self.slot_of.fill(None);
    }

    /// Assigns slots to the experts of a step, each listed once; skips ids that are not experts. The products of a wave
    /// with copies or arriving experts wait for all copies so far.
    pub fn step(&mut self, requested: &[u32]) -> Vec<Wave> {
        self.count(requested);
        let (mut present, mut arriving, mut misses) = (Vec::new(), Vec::new(), Vec::new());
        for &expert in requested.iter().filter(|expert| (**expert as usize) < self.slot_of.len()) {
            match self.slot_of(expert) {
                None => misses.push(expert),
                Some(slot) if self.slots[slot as usize].arriving => arriving.push(expert),
                Some(_) => present.push(expert),
            }
        }
        let first = self.clock;
        let mut waves = Vec::new();
        if !present.is_empty() {
            waves.push(self.wave(first, &present, &[]));
        }
        let fits = present.len() + arriving.len() + misses.len() <= self.slots.len();
        // Experts in slots come before copies that may evict them.
        let (with, each) = if fits { (misses.len(), misses.len()) } else { (0, self.slots.len() / 2) };
        if with > 0 || !arriving.is_empty() {
            let wave = self.wave(first, &arriving, &misses[..with]);
            waves.push(Wave { arriving: !arriving.is_empty(), ..wave });
        }
        for some in misses[with..].chunks(each.max(1)) {
            waves.push(self.wave(first, &[], some));
        }
        if waves.iter().any(|wave| wave.arriving || !wave.copies.is_empty()) {
            self.slots.iter_mut().for_each(|slot| slot.arriving = false);
        }
        waves
    }

    /// Replaces the least frequently requested experts by at most `count` experts that `expected` lists and no slot
    /// holds, in this order. Keeps all expected experts. Returns the experts to copy, and their slots.
    pub fn prefetch(&mut self, expected: &[u32], count: usize) -> Vec<(u32, u32)> {
        let mut copies = Vec::new();
        for &expert in expected {
            let exists = (expert as usize) < self.slot_of.len();
            if copies.len() >= count || !exists || self.slot_of(expert).is_some() {
                continue;
            }
            let may_go = |slot: &Slot| !slot.arriving && slot.expert.is_none_or(|expert| !expected.contains(&expert));
            let Some(at) = self.victim(self.clock, may_go) else { break };
            self.slots[at].arriving = true;
            copies.push(self.place(expert, at));
        }
        copies
    }

    /// Puts an expert into a slot; returns both.
    fn place(&mut self, expert: u32, at: usize) -> (u32, u32) {
        if let Some(before) = self.slots[at].expert.replace(expert) {
            self.slot_of[before as usize] = None;
        }
        // The number of slots fits 32 bits.
        self.slot_of[expert as usize] = Some(at as u32);
        (expert, at as u32)
    }

    /// Counts the requests of a step.
    fn count(&mut self, requested: &[u32]) {
        self.weight *= 2f64.powf(f64::from(HALF_LIFE).recip());
        if self.weight > WEIGHT_MAX {
            self.frequency.iter_mut().for_each(|frequency| *frequency /= WEIGHT_MAX);
            self.weight /= WEIGHT_MAX;
        }
        for expert in requested {
            if let Some(frequency) = self.frequency.get_mut(*expert as usize) {
                *frequency += self.weight;
            }
        }
    }

    /// Returns the slot whose expert is to be evicted in a step that began when the clock was `first`, among those that
    /// `may_go`: of the slots that no wave of this step used, an empty one or the one with the least frequently
    /// requested expert; otherwise one of the earliest wave.
    fn victim(&self, first: u64, may_go: impl Fn(&Slot) -> bool) -> Option<usize> {
        let key = |slot: &Slot| {
            let wave = if slot.used > first { slot.used } else { 0 };
            let frequency = slot.expert.and_then(|expert| self.frequency.get(expert as usize));
            (wave, frequency.copied().unwrap_or(-1.0), slot.used)
        };
        let order = |a: &Slot, b: &Slot| {
            let ((a_wave, a_frequency, a_used), (b_wave, b_frequency, b_used)) = (key(a), key(b));
            a_wave.cmp(&b_wave).then(a_frequency.total_cmp(&b_frequency)).then(a_used.cmp(&b_used))
        };
        let slots = (0..self.slots.len()).filter(|at| may_go(&self.slots[*at]));
        slots.min_by(|a, b| order(&self.slots[*a], &self.slots[*b]))
    }

    /// Returns the next wave of a step that began when the clock was `first`; it has at most as many experts as slots.
    fn wave(&mut self, first: u64, hits: &[u32], misses: &[u32]) -> Wave {
        self.clock += 1;
        let mut wave = Wave::default();
        for &expert in hits {
            let Some(slot) = self.slot_of(expert) else { continue };
            self.slots[slot as usize].used = self.clock;
            wave.experts.push((expert, slot));
        }
        for &expert in misses {
            // Of equal slots the first. Never a slot of this wave: those were used last.
            let Some(at) = self.victim(first, |_| true) else { continue };
            let slot = &mut self.slots[at];
            if slot.used > first {
                // The first wave of the step has the clock `first + 1`.
                wave.behind = wave.behind.max(Some((slot.used - first - 1) as usize));
            }
            slot.used = self.clock;
            let placed = self.place(expert, at);
            wave.experts.push(placed);
            wave.copies.push(placed);
        }
        wave
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use unweight_format::testing::Random;

    use super::*;

    fn wave(experts: &[(u32, u32)], copies: &[(u32, u32)], behind: Option<usize>) -> Wave {
        Wave { experts: experts.to_vec(), copies: copies.to_vec(), arriving: false, behind }
    }

    #[test]
    fn least_frequently_used_expert_is_evicted() {
        let mut slots = Slots::new(8, 3);
        assert!(slots.is_empty() && slots.step(&[]).is_empty());
        assert_eq!(slots.step(&[5, 2]), [wave(&[(5, 0), (2, 1)], &[(5, 0), (2, 1)], None)]);
        assert_eq!(slots.step(&[7]), [wave(&[(7, 2)], &[(7, 2)], None)]);
        assert_eq!(slots.step(&[5]), [wave(&[(5, 0)], &[], None)]);
        // Expert 2 was requested first, then 7; an id that is not an expert is skipped.
        let expected = [wave(&[(5, 0)], &[], None), wave(&[(1, 1)], &[(1, 1)], None)];
        assert_eq!(slots.step(&[1, 5, 8, u32::MAX]), expected);
        assert_eq!(slots.step(&[2]), [wave(&[(2, 2)], &[(2, 2)], None)]);
        assert_eq!([1, 2, 5, 7].map(|expert| slots.slot_of(expert)), [Some(1), Some(2), Some(0), None]);
        // Expert 5 stays, although others were requested after it; an evicted expert keeps its frequency.
        for expert in [3, 4, 6, 3, 4, 6] {
            slots.step(&[expert]);
            assert_eq!(slots.slot_of(5), Some(0), "after {expert}");
        }
        // Long after its last request it counts less than a newer expert.
        (0..20 * HALF_LIFE).for_each(|step| drop(slots.step(&[6 + step % 2])));
        slots.step(&[0]);
        assert!(slots.slot_of(5).is_none() && slots.slot_of(6).is_some(), "{slots:?}");
    }

    /// The shares of misses, in per mille, of these slots and of slots that evict the least recently used expert, for
    /// one sequence with 8 of 128 experts whose shares are those of a Zipf distribution.
    fn misses(exponent: f64, count: u32, steps: u32) -> [u64; 2] {
        const EXPERTS: u32 = 128;
        let mut random = Random::new(5);
        let (mut slots, mut recent) = (Slots::new(EXPERTS, count), Vec::<u32>::new());
        let (mut requests, mut missed, mut missed_recent) = (0, 0, 0);
        for step in 0..steps {
            // The largest of a weight's logarithm plus Gumbel noise: draws without replacement.
            let mut keys: Vec<(f64, u32)> = (0..EXPERTS)
                .map(|expert| {
                    let uniform = (random.below(1 << 30) as f64 + 0.5) / f64::from(1 << 30);
                    (-exponent * f64::from(expert + 1).ln() - (-uniform.ln()).ln(), (expert * 37) % EXPERTS)
                })
                .collect();
            keys.sort_by(|a, b| b.0.total_cmp(&a.0));
            let chosen: Vec<u32> = keys[..8].iter().map(|(_, expert)| *expert).collect();
            let copies: usize = slots.step(&chosen).iter().map(|wave| wave.copies.len()).sum();
            let before = recent.len();
            recent.retain(|expert| !chosen.contains(expert));
            let fetched = 8 - (before - recent.len());
            recent.extend(&chosen);
            recent.drain(..recent.len().saturating_sub(count as usize));
            if step >= steps / 3 {
                (requests, missed, missed_recent) = (requests + 8, missed + copies, missed_recent + fetched);
            }
        }
        [missed, missed_recent].map(|missed| missed as u64 * 1000 / requests)
    }

    #[test]
    fn hot_experts_stay() {
        let [uniform, uniform_recent] = misses(0.0, 64, 1500);
        assert!(uniform.abs_diff(uniform_recent) < 25, "{uniform}, {uniform_recent}");
        let [zipf, zipf_recent] = misses(1.0, 64, 1500);
        assert!((150..175).contains(&zipf) && (205..230).contains(&zipf_recent), "{zipf}, {zipf_recent}");
        assert!(misses(1.0, 16, 1500)[0] < misses(1.0, 16, 1500)[1]);
    }

    /// Frequencies are scaled down before they overflow.
    #[test]
    fn frequencies_stay_finite() {
        let mut slots = Slots::new(4, 2);
        (0..400 * HALF_LIFE).for_each(|step| drop(slots.step(&[step % 3])));
        assert!(slots.frequency.iter().all(|frequency| frequency.is_finite()) && slots.weight <= WEIGHT_MAX);
        assert!(slots.frequency[0] > 0.0 && slots.frequency[3] == 0.0);
    }

    #[test]
    fn more_experts_than_slots_run_in_waves() {
        let mut slots = Slots::new(8, 4);
        slots.step(&[6, 7]);
        let waves = slots.step(&[0, 1, 2, 3, 6]);
        assert_eq!(
            waves,
            [
                wave(&[(6, 0)], &[], None),
                // First the empty slots, then the least recently used; none of the previous wave.
                wave(&[(0, 2), (1, 3)], &[(0, 2), (1, 3)], None),
                wave(&[(2, 1), (3, 0)], &[(2, 1), (3, 0)], Some(0)),
            ]
        );
        // One slot: each wave overwrites what the previous wave reads.
        let waves = Slots::new(8, 1).step(&[3, 4, 5]);
        let behind: Vec<_> = waves.iter().map(|wave| wave.behind).collect();
        assert_eq!((waves.len(), behind), (3, vec![None, Some(0), Some(1)]));
    }

    #[test]
    fn expected_experts_are_prefetched() {
        let mut slots = Slots::new(8, 3);
        slots.step(&[0, 1, 2]);
        slots.step(&[0, 2]);
        // Expert 1 was requested least often; 0 is expected; 9 is not an expert.
        assert_eq!(slots.prefetch(&[9, 0, 5, 6], 1), [(5, 1)]);
        // The copy of 5 may still run, so its slot is kept; 0 is expected.
        assert_eq!(slots.prefetch(&[0, 6, 7], 8), [(6, 2)]);
        assert_eq!(slots.prefetch(&[0, 7], 8), []);
        // A wave with what is there, and one that waits.
        let arriving = Wave { arriving: true, ..wave(&[(5, 1)], &[], None) };
        assert_eq!(slots.step(&[0, 5]), [wave(&[(0, 0)], &[], None), arriving]);
        // That wave has waited for all copies.
        assert_eq!(slots.step(&[6]), [wave(&[(6, 2)], &[], None)]);
        // A miss in the wave of an expert that arrives, whose slot is not overwritten.
        assert_eq!(slots.prefetch(&[3, 0], 8), [(3, 1)]);
        let waits = Wave { arriving: true, ..wave(&[(3, 1), (4, 2)], &[(4, 2)], None) };
        assert_eq!(slots.step(&[3, 4, 0]), [wave(&[(0, 0)], &[], None), waits]);
        // With one slot: copied behind the expert that arrives.
        let mut one = Slots::new(8, 1);
        assert_eq!((one.prefetch(&[2, 3], 8), one.prefetch(&[2], 8)), (vec![(2, 0)], vec![]));
        let waits = Wave { arriving: true, ..wave(&[(2, 0)], &[], None) };
        assert_eq!(one.step(&[1, 2]), [waits, wave(&[(1, 0)], &[(1, 0)], Some(0))]);
        one.clear();
        assert_eq!(one.step(&[1]), [wave(&[(1, 0)], &[(1, 0)], None)]);
    }

    #[test]
    fn evicted_experts_are_copied_again() {
        let mut slots = Slots::new(4, 2);
        slots.step(&[0, 1]);
        slots.clear();
        assert!(slots.is_empty());
        assert_eq!(slots.step(&[1]).iter().map(|wave| wave.copies.len()).sum::<usize>(), 1);
    }

    /// Simulates a device that copies and multiplies in wave order, for random requests: every product finds its
    /// expert, no slot is overwritten that a wave still reads, and no request is counted twice or lost.
    #[test]
    fn every_wave_has_its_experts() {
        let mut random = Random::new(12);
        for (experts, count) in [(8, 1), (8, 2), (8, 3), (8, 7), (60, 9), (128, 2), (128, 33), (4, 4), (3, 9)] {
            let mut slots = Slots::new(experts, count);
            let mut device: Vec<Option<u32>> = vec![None; count as usize];
            let mut frequency = vec![0f64; experts as usize];
            // Copies that were enqueued, and that no products have waited for.
            let mut running: BTreeSet<u32> = BTreeSet::new();
            for step in 1..600 {
                let requested: BTreeSet<u32> = (0..1 + random.below(u64::from(experts) * 2))
                    .map(|_| random.below(u64::from(experts) + 1).min(random.below(u64::from(experts) + 1)) as u32)
                    .take(1 + step as usize % 40)
                    .collect();
                let requested: Vec<u32> = requested.into_iter().collect();
                let valid: BTreeSet<u32> = requested.iter().copied().filter(|expert| *expert < experts).collect();
                let before: BTreeSet<u32> = device.iter().flatten().copied().collect();
                frequency.iter_mut().for_each(|frequency| *frequency *= 0.5f64.powf(1.0 / f64::from(HALF_LIFE)));
                valid.iter().for_each(|expert| frequency[*expert as usize] += 1.0);
                assert_eq!(
                    before,
                    (0..experts).filter(|e| slots.slot_of(*e).is_some()).collect(),
                    "experts on the device"
                );
                if step % 3 == 0 {
                    let expected: Vec<u32> = (0..3).map(|_| random.below(u64::from(experts) + 1) as u32).collect();
                    for (expert, slot) in slots.prefetch(&expected, 2) {
                        assert!(!before.contains(&expert) && expected.contains(&expert));
                        let out = device[slot as usize].replace(expert);
                        assert!(out.is_none_or(|out| !expected.contains(&out)), "{out:?} is expected");
                        running.insert(expert);
                    }
                }
                let before: BTreeSet<u32> = device.iter().flatten().copied().collect();
                let waves = slots.step(&requested);

                let mut done = BTreeSet::new();
                let mut read_by: Vec<Option<usize>> = vec![None; count as usize];
                let mut misses = 0;
                for (at, wave) in waves.iter().enumerate() {
                    assert!(
                        !wave.experts.is_empty() && wave.experts.len() <= count as usize,
                        "at most as many experts as slots"
                    );
                    let used: BTreeSet<u32> = wave.experts.iter().map(|(_, slot)| *slot).collect();
                    assert_eq!(used.len(), wave.experts.len(), "one slot per expert");
                    let overwritten = wave.copies.iter().map(|(_, slot)| read_by[*slot as usize]).max().flatten();
                    assert_eq!(wave.behind, overwritten, "the wave that reads what is overwritten");
                    for &(expert, slot) in &wave.copies {
                        let out = device[slot as usize].replace(expert);
                        if let Some(out) = out {
                            assert!(!valid.contains(&out) || done.contains(&out), "{out} is still to be used");
                        }
                        misses += 1;
                    }
                    if wave.arriving || !wave.copies.is_empty() {
                        running.clear();
                    }
                    let waits = wave.experts.iter().any(|(expert, _)| running.contains(expert));
                    assert!(!waits, "products do not wait for a copy that runs");
                    if valid.len() <= count as usize && at + 1 == waves.len() {
                        // No remaining expert was requested less often than an evicted one, up to rounding.
                        let idle = before.difference(&valid);
                        let (kept, evicted): (Vec<u32>, Vec<u32>) = idle.partition(|e| device.contains(&Some(**e)));
                        let of = |experts: Vec<u32>| experts.into_iter().map(|expert| frequency[expert as usize]);
                        let most = of(evicted).fold(0.0, f64::max);
                        assert!(
                            of(kept).all(|kept| most <= kept * (1.0 + 1e-9)),
                            "evicts the least frequently requested experts"
                        );
                        assert_eq!(wave.behind, None, "copies overlap the products of the wave before");
                    } else if count > 1 && at > 2 {
                        assert_ne!(wave.behind, Some(at - 1), "copies overlap the products of the wave before");
                    }
                    for &(expert, slot) in &wave.experts {
                        assert_eq!(device[slot as usize], Some(expert), "a product of another expert");
                        read_by[slot as usize] = Some(at);
                        assert!(done.insert(expert), "twice");
                    }
                }
                assert_eq!(done, valid);
                assert_eq!(misses, valid.difference(&before).count(), "hits and misses are all requests");
            }
        }
    }
}
