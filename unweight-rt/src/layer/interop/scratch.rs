//! The layout of the scratch that a framework lends to a launch.

use crate::device::{ContextSize, context_size::CUBLAS_BYTES};

/// Parts of a scratch begin at multiples of this; as many bytes are readable after each part.
const ALIGN: u64 = 256;

/// The layout of a scratch: `partial sums | 256 | counters | 256`, if there are any, followed, if cuBLAS multiplies, by
/// `weights as BF16 | 256 | its workspace | 256`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Parts {
    /// Bytes of partial sums.
    pub(super) partials: u64,
    /// The number of u32 counters.
    pub(super) counters: u64,
    /// Bytes of expanded weights.
    pub(super) slot: u64,
    pub(super) cublas: bool,
}

impl Parts {
    pub(super) fn of(need: ContextSize) -> Self {
        let ContextSize { workspace_bytes, counters, slot_bytes, cublas, .. } = need;
        Self { partials: workspace_bytes, counters, slot: slot_bytes, cublas }
    }

    pub(super) fn counters_at(self) -> u64 {
        padded(self.partials)
    }

    pub(super) fn slot_at(self) -> u64 {
        match self {
            Self { partials: 0, counters: 0, .. } => 0,
            _ => self.counters_at().saturating_add(padded(self.counters.saturating_mul(4))),
        }
    }

    pub(super) fn cublas_at(self) -> u64 {
        self.slot_at().saturating_add(padded(self.slot))
    }

    pub(super) fn bytes(self) -> u64 {
        match self.cublas {
            false => self.slot_at(),
            true => self.cublas_at().saturating_add(padded(CUBLAS_BYTES as u64)),
        }
    }
}

/// Rounds up to the alignment, with readable bytes after the part.
fn padded(bytes: u64) -> u64 {
    bytes.saturating_add(2 * ALIGN - 1) / ALIGN * ALIGN
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_scratch_do_not_overlap_and_are_readable_past_their_ends() {
        let parts = |partials, counters| Parts { partials, counters, ..Parts::default() };
        assert_eq!(parts(0, 0).bytes(), 0);
        assert_eq!((parts(0, 1).counters_at(), parts(0, 1).bytes()), (256, 256 + 512));
        assert_eq!((parts(1, 0).counters_at(), parts(1, 0).bytes()), (512, 512 + 256));
        assert_eq!((parts(256, 64).counters_at(), parts(256, 64).bytes()), (512, 512 + 512));
        assert_eq!(parts(257, 65).counters_at(), 768);
        for (partials, counters) in [(17 << 20, 528), (0, 3), (300, 0), (255, 1024)] {
            let parts = parts(partials, counters);
            assert!(parts.counters_at() >= partials + ALIGN && parts.counters_at().is_multiple_of(ALIGN));
            assert!(parts.bytes() >= parts.counters_at() + counters * 4 + ALIGN);
        }
        assert_eq!(parts(u64::MAX, u64::MAX).bytes(), u64::MAX);
        for (before, slot) in [(parts(0, 0), 2 << 12), (parts(300, 3), 100), (parts(17 << 20, 528), 448 << 20)] {
            let whole = Parts { slot, cublas: true, ..before };
            assert_eq!(whole.slot_at(), before.bytes(), "where nothing of ours is, weights come first");
            assert!(whole.cublas_at() >= whole.slot_at() + slot + ALIGN && whole.cublas_at().is_multiple_of(ALIGN));
            assert!(whole.bytes() >= whole.cublas_at() + CUBLAS_BYTES as u64 + ALIGN);
        }
        let max = Parts { slot: u64::MAX, cublas: true, ..parts(u64::MAX, u64::MAX) };
        assert_eq!(max.bytes(), u64::MAX);
    }
}
