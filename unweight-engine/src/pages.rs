//! The pages of the KV cache and their allocation.

pub use unweight_codegen::kv::PAGE_TOKENS;

use crate::options::KvCache;

/// The number of pages that `tokens` tokens need.
pub fn pages_for(tokens: u32) -> u32 {
    tokens.div_ceil(PAGE_TOKENS)
}

/// The number of pages of a cache that a sequence of `tokens` tokens takes from the pool. The last page of a sequence
/// is never packed: it stays the hot page of its row.
pub fn sequence_pages(cache: KvCache, tokens: u32) -> u32 {
    match cache {
        KvCache::Bf16 => pages_for(tokens),
        KvCache::Packed => pages_for(tokens).saturating_sub(1),
    }
}

/// The number of pages of a cache that a sequence must have before a step reads its token at `position`. In a packed
/// cache, a page is taken when the step fills the hot page.
pub fn step_pages(cache: KvCache, position: u32) -> u32 {
    match cache {
        KvCache::Bf16 => position / PAGE_TOKENS + 1,
        KvCache::Packed => (position + 1) / PAGE_TOKENS,
    }
}

/// The free ones of a fixed number of indices: of pages of the KV cache, of hot pages, or of state slots.
#[derive(Debug)]
pub struct IndexPool {
    total: u32,
    /// Taken from the end, so that a fresh pool hands out its lowest indices first.
    free: Vec<u32>,
}

impl IndexPool {
    /// A pool of the indices `0..total`, all free.
    pub fn new(total: u32) -> Self {
        Self { total, free: (0..total).rev().collect() }
    }

    /// The number of indices, free or taken.
    pub fn total(&self) -> u32 {
        self.total
    }

    /// The number of free indices.
    pub fn free(&self) -> u32 {
        // At most `total`.
        self.free.len() as u32
    }

    /// Takes `count` indices. Returns `None`, and takes none, if fewer are free.
    pub fn take(&mut self, count: u32) -> Option<Vec<u32>> {
        let remaining = self.free.len().checked_sub(count as usize)?;
        Some(self.free.split_off(remaining))
    }

    /// Returns indices to the pool.
    pub fn give(&mut self, indices: Vec<u32>) {
        debug_assert!(indices.iter().all(|index| *index < self.total && !self.free.contains(index)), "{indices:?}");
        self.free.extend(indices);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_are_handed_out_once_and_returned() {
        let mut pool = IndexPool::new(5);
        let one = pool.take(3).unwrap();
        assert_eq!((pool.take(3), pool.free()), (None, 2), "all or none");
        let two = pool.take(2).unwrap();
        let mut all = [one.clone(), two.clone()].concat();
        all.sort_unstable();
        assert_eq!(all, [0, 1, 2, 3, 4]);
        pool.give(two);
        pool.give(one);
        assert_eq!((pool.free(), pool.total()), (5, 5));
        assert_eq!([0, 1, 64, 65].map(pages_for), [0, 1, 1, 2]);
        assert_eq!([0, 1, 64, 65, 129].map(|tokens| sequence_pages(KvCache::Packed, tokens)), [0, 0, 0, 1, 2]);
        assert_eq!([0, 63, 64, 127].map(|position| step_pages(KvCache::Bf16, position)), [1, 1, 2, 2]);
        assert_eq!([0, 62, 63, 127].map(|position| step_pages(KvCache::Packed, position)), [0, 0, 1, 2]);
    }
}
