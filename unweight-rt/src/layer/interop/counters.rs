//! Counters that are zero between launches, for the streams and captures of a framework.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use cudarc::driver::sys;

use crate::device::{DeviceBuffer, DeviceError, Stream, stream::Captured};

/// Words per slot: a grid that fits a device has fewer warpgroups.
const SLOT_WORDS: usize = 1024;
/// The number of slots; together they occupy 8 MiB. vLLM captures 51 sizes in 34 graphs each.
const SLOTS: usize = 2048;

/// Launches that run one after another: those of a stream (by handle), or of a stream in a capture (by capture id).
type Order = (Option<u64>, usize);

/// Counters that are zero between launches; each order of launches has a slot.
pub(super) struct Counters {
    memory: DeviceBuffer<u32>,
    slots: Mutex<BTreeMap<Order, usize>>,
}

impl Counters {
    pub(super) fn new(stream: &Stream) -> Result<Self, DeviceError> {
        let memory = DeviceBuffer::zeroed(stream, SLOTS * SLOT_WORDS)?;
        // Launches run on other streams.
        stream.synchronize()?;
        Ok(Self { memory, slots: Mutex::default() })
    }

    /// Returns the counters of a stream, or of the capture on it: its graph may run concurrently with the stream, but
    /// not with itself. `None` means that the caller provides counters and clears them before each launch, which costs
    /// as much as another kernel launch. This is the case on per-thread default streams, which all share one handle; in
    /// captures that the driver does not distinguish; and for more counters or more orders than the slots hold.
    pub(super) fn of(&self, stream: &Stream, words: usize) -> Result<Option<DeviceBuffer<u32>>, DeviceError> {
        let handle = stream.raw();
        if words > SLOT_WORDS || handle == PER_THREAD {
            return Ok(None);
        }
        let capture = match stream.capture_of()? {
            Captured::No => None,
            Captured::By(number) => Some(number),
            Captured::Unknown => return Ok(None),
        };
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(slot) = slot(&mut slots, (capture, handle as usize)) else { return Ok(None) };
        let address = self.memory.address() + (slot * SLOT_WORDS * 4) as u64;
        // SAFETY: a slot of `memory`, which the interop keeps, followed by at least the padding of `memory`; only
        // launches of this order, one after another, use it.
        Ok(Some(unsafe { DeviceBuffer::borrow(stream.device(), address, words) }?))
    }
}

/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: sys::CUstream = std::ptr::without_provenance_mut(2);

/// Returns the slot of an order. A slot is never reused, because the driver does not report when a graph is destroyed.
fn slot(slots: &mut BTreeMap<Order, usize>, order: Order) -> Option<usize> {
    let next = slots.len();
    match slots.get(&order) {
        Some(&slot) => Some(slot),
        None if next < SLOTS => {
            slots.insert(order, next);
            Some(next)
        }
        None => None,
    }
}

#[cfg(test)]
mod tests {
    use unweight_codegen::{
        plan::Plan,
        spec::{Arch, GemmWgmmaSpec, catalog},
    };

    use super::*;

    #[test]
    fn each_stream_has_its_own_counters() {
        let mut slots = BTreeMap::new();
        for order in 0..SLOTS {
            // Two streams: each outside and inside captures.
            let capture = order.checked_sub(2).map(|rest| rest as u64 / 2);
            assert_eq!(slot(&mut slots, (capture, order % 2 * 7)), Some(order));
        }
        assert_eq!(slot(&mut slots, (None, 7)), Some(1));
        assert_eq!(slot(&mut slots, (Some(0), 7)), Some(3));
        assert_eq!(slot(&mut slots, (None, 1)), None);
        assert_eq!(slot(&mut slots, (Some(u64::MAX), 7)), None);
        assert_eq!(slots.len(), SLOTS);
    }

    /// With more counters than a slot holds, every launch would clear its counters first.
    #[test]
    fn the_counters_of_every_variant_fit_a_slot_of_an_h200() {
        let problem = unweight_codegen::plan::GemmShape { m: 4096, n: 28672, k: 8192 };
        let counters = |spec| Plan::new(&spec).map_or(0, |plan| plan.workspace(problem, 132).counters);
        let max = catalog::of::<GemmWgmmaSpec>().filter(|spec| spec.arch == Arch::Sm90a).map(counters).max();
        assert!(max.is_some_and(|max| (1..=SLOT_WORDS as u64).contains(&max)), "{max:?}");
    }
}
