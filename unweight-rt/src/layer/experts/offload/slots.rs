//! Tracks which experts of a layer are in the device's slots, and chooses which to evict. Pure host logic, without a
//! device or clock.
//!
//! A step requests experts. Experts in a slot are hits; a miss replaces the least recently used expert. A step with
//! more experts than slots is split into waves. The first wave processes the hits, so that no expert is evicted before
//! use. Later waves process the misses, half of the slots at a time, so that the copies of a wave do not overwrite
//! slots that the previous wave's products read.

/// The experts that are multiplied at once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wave {
    /// Experts and their slots.
    pub experts: Vec<(u32, u32)>,
    /// The experts that must be copied first, and their slots.
    pub copies: Vec<(u32, u32)>,
    /// The last wave of this step that reads a slot which these copies overwrite.
    pub behind: Option<usize>,
}

/// Slots of equal size, each with one expert or none; the least recently used expert is evicted.
#[derive(Clone, Debug)]
pub struct Slots {
    /// Indexed by slot.
    slots: Vec<Slot>,
    /// Indexed by expert.
    slot_of: Vec<Option<u32>>,
    /// The number of waves so far.
    clock: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    expert: Option<u32>,
    /// The last wave that used it; 0 if none.
    used: u64,
}

impl Slots {
    /// Creates empty slots, at least one, for this number of experts.
    pub fn new(experts: u32, slots: u32) -> Self {
        let slots = vec![Slot::default(); slots.max(1) as usize];
        Self { slots, slot_of: vec![None; experts as usize], clock: 0 }
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

    /// Assigns slots to the experts of a step, each listed once; skips ids that are not experts. In each wave, hits
    /// come first.
    pub fn step(&mut self, requested: &[u32]) -> Vec<Wave> {
        let requested = requested.iter().copied().filter(|expert| (*expert as usize) < self.slot_of.len());
        let (hits, misses): (Vec<u32>, Vec<u32>) = requested.partition(|expert| self.slot_of(*expert).is_some());
        let first = self.clock;
        if hits.len() + misses.len() <= self.slots.len() {
            let empty = hits.is_empty() && misses.is_empty();
            return if empty { Vec::new() } else { vec![self.wave(first, &hits, &misses)] };
        }
        let mut waves = Vec::new();
        if !hits.is_empty() {
            waves.push(self.wave(first, &hits, &[]));
        }
        for some in misses.chunks((self.slots.len() / 2).max(1)) {
            waves.push(self.wave(first, &[], some));
        }
        waves
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
            // Of equally old slots the first. Never a slot of this wave: those were used last.
            let Some((at, slot)) = self.slots.iter_mut().enumerate().min_by_key(|(_, slot)| slot.used) else {
                continue;
            };
            if slot.used > first {
                // The first wave of the step has the clock `first + 1`.
                wave.behind = wave.behind.max(Some((slot.used - first - 1) as usize));
            }
            slot.used = self.clock;
            if let Some(before) = slot.expert.replace(expert) {
                self.slot_of[before as usize] = None;
            }
            // The number of slots fits 32 bits.
            self.slot_of[expert as usize] = Some(at as u32);
            wave.experts.push((expert, at as u32));
            wave.copies.push((expert, at as u32));
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
        Wave { experts: experts.to_vec(), copies: copies.to_vec(), behind }
    }

    #[test]
    fn least_recently_used_expert_is_evicted() {
        let mut slots = Slots::new(8, 3);
        assert!(slots.is_empty() && slots.step(&[]).is_empty());
        assert_eq!(slots.step(&[5, 2]), [wave(&[(5, 0), (2, 1)], &[(5, 0), (2, 1)], None)]);
        assert_eq!(slots.step(&[7]), [wave(&[(7, 2)], &[(7, 2)], None)]);
        assert_eq!(slots.step(&[5]), [wave(&[(5, 0)], &[], None)]);
        // Expert 2 is the oldest, then 7; an id that is not an expert is skipped.
        assert_eq!(slots.step(&[1, 5, 8, u32::MAX]), [wave(&[(5, 0), (1, 1)], &[(1, 1)], None)]);
        assert_eq!(slots.step(&[2]), [wave(&[(2, 2)], &[(2, 2)], None)]);
        assert_eq!([1, 2, 5, 7].map(|expert| slots.slot_of(expert)), [Some(1), Some(2), Some(0), None]);
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
            let mut last = vec![0u64; experts as usize];
            for step in 1..600 {
                let requested: BTreeSet<u32> = (0..1 + random.below(u64::from(experts) * 2))
                    .map(|_| random.below(u64::from(experts) + 1).min(random.below(u64::from(experts) + 1)) as u32)
                    .take(1 + step as usize % 40)
                    .collect();
                let requested: Vec<u32> = requested.into_iter().collect();
                let valid: BTreeSet<u32> = requested.iter().copied().filter(|expert| *expert < experts).collect();
                let before: BTreeSet<u32> = device.iter().flatten().copied().collect();
                assert_eq!(
                    before,
                    (0..experts).filter(|e| slots.slot_of(*e).is_some()).collect(),
                    "experts on the device"
                );
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
                    if waves.len() == 1 {
                        // No remaining expert was used longer ago than an evicted one.
                        let idle = before.difference(&valid).map(|e| (device.contains(&Some(*e)), last[*e as usize]));
                        let (kept, evicted): (Vec<_>, Vec<_>) = idle.partition(|(is_there, _)| *is_there);
                        let (kept, evicted) = (kept.iter().map(|at| at.1), evicted.iter().map(|at| at.1));
                        assert!(
                            evicted.max().unwrap_or(0) <= kept.min().unwrap_or(u64::MAX),
                            "evicts the least recently used experts"
                        );
                    } else if count > 1 && at > 1 {
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
                done.iter().for_each(|expert| last[*expert as usize] = step);
            }
        }
    }
}
