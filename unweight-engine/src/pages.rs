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

/// The free pages of the KV cache.
#[derive(Debug)]
pub struct PagePool {
    total: u32,
    /// Taken from the end, so that a fresh pool hands out its lowest pages first.
    free: Vec<u32>,
}

impl PagePool {
    /// A pool of pages `0..total`, all free.
    pub fn new(total: u32) -> Self {
        Self { total, free: (0..total).rev().collect() }
    }

    /// The number of pages, free or taken.
    pub fn total(&self) -> u32 {
        self.total
    }

    /// The number of free pages.
    pub fn free(&self) -> u32 {
        // At most `total`.
        self.free.len() as u32
    }

    /// Takes `count` pages. Returns `None`, and takes no page, if fewer are free.
    pub fn take(&mut self, count: u32) -> Option<Vec<u32>> {
        let remaining = self.free.len().checked_sub(count as usize)?;
        Some(self.free.split_off(remaining))
    }

    /// Returns pages to the pool.
    pub fn give(&mut self, pages: Vec<u32>) {
        debug_assert!(pages.iter().all(|page| *page < self.total && !self.free.contains(page)), "{pages:?}");
        self.free.extend(pages);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_handed_out_once_and_returned() {
        let mut pool = PagePool::new(5);
        let one = pool.take(3).unwrap();
        assert_eq!((pool.take(3), pool.free()), (None, 2), "all pages or none");
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
