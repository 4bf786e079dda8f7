//! Memory that the launches of one stream share.

use std::fmt;

use unweight_codegen::plan::WorkspacePlan;

use crate::device::{DeviceBuffer, DeviceError, Refusal, Stream};

/// Bytes of cuBLAS's workspace, as NVIDIA recommends for Hopper. Given explicitly, so that a captured graph does not name
/// memory of the library's own.
pub(crate) const CUBLAS_BYTES: usize = 32 << 20;

/// What launches need beside their operands: of several launches on one stream the largest of each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LaneSize {
    /// Bytes of partial sums, or of what a debugging variant dumps.
    pub workspace_bytes: u64,
    /// u32 counters by which blocks wait for each other.
    pub counters: u64,
    /// Elements of an input, padded to whole tiles.
    pub padded_x: u64,
    /// Elements of an output, padded to whole tiles; or of a gate's and an up's product before it is activated.
    pub padded_y: u64,
    /// Bytes of the slot that weights are expanded into ahead of their product.
    pub slot_bytes: u64,
    /// Whether cuBLAS multiplies.
    pub cublas: bool,
}

impl LaneSize {
    /// Enough for either.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self {
            workspace_bytes: self.workspace_bytes.max(other.workspace_bytes),
            counters: self.counters.max(other.counters),
            padded_x: self.padded_x.max(other.padded_x),
            padded_y: self.padded_y.max(other.padded_y),
            slot_bytes: self.slot_bytes.max(other.slot_bytes),
            cublas: self.cublas || other.cublas,
        }
    }

    /// Bytes on the device, of cuBLAS its workspace.
    pub fn bytes(self) -> u64 {
        let cublas = if self.cublas { CUBLAS_BYTES as u64 } else { 0 };
        let elements = self.padded_x.saturating_add(self.padded_y);
        let shared = self.workspace_bytes.saturating_add(self.counters.saturating_mul(4));
        shared.saturating_add(elements.saturating_mul(2)).saturating_add(self.slot_bytes).saturating_add(cublas)
    }

    /// And cuBLAS.
    #[must_use]
    pub fn with_cublas(self) -> Self {
        Self { cublas: true, ..self }
    }

    /// Refuses what needs more.
    ///
    /// # Errors
    /// [`Refusal::LaneTooSmall`].
    pub fn check(self, need: Self) -> Result<(), Refusal> {
        if self.max(need) == self { Ok(()) } else { Err(Refusal::LaneTooSmall { need, have: self }) }
    }
}

impl From<WorkspacePlan> for LaneSize {
    fn from(plan: WorkspacePlan) -> Self {
        Self { workspace_bytes: plan.bytes, counters: plan.counters, ..Self::default() }
    }
}

impl fmt::Display for LaneSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { workspace_bytes, counters, padded_x, padded_y, slot_bytes, cublas } = self;
        write!(f, "{workspace_bytes} B, {counters} counters")?;
        if padded_x.saturating_add(*padded_y) > 0 {
            write!(f, ", {padded_x} + {padded_y} padded elements")?;
        }
        if *slot_bytes > 0 {
            write!(f, ", a slot of {slot_bytes} B")?;
        }
        if *cublas { f.write_str(", cuBLAS") } else { Ok(()) }
    }
}

/// Partial sums and counters. Every launch leaves the counters zero, so the next one, behind it on the same stream,
/// finds them so.
#[derive(Debug)]
pub(crate) struct Workspace {
    pub(crate) partials: DeviceBuffer<u8>,
    pub(crate) counters: DeviceBuffer<u32>,
}

impl Workspace {
    pub(crate) fn new(stream: &Stream, size: LaneSize) -> Result<Self, DeviceError> {
        Ok(Self {
            partials: DeviceBuffer::zeroed(stream, length("bytes of a workspace", size.workspace_bytes)?)?,
            counters: DeviceBuffer::zeroed(stream, length("counters of a workspace", size.counters)?)?,
        })
    }

    pub(crate) fn size(&self) -> LaneSize {
        LaneSize {
            workspace_bytes: self.partials.len() as u64,
            counters: self.counters.len() as u64,
            ..LaneSize::default()
        }
    }
}

pub(crate) fn length(what: &'static str, value: u64) -> Result<usize, Refusal> {
    usize::try_from(value).map_err(|_| Refusal::TooLarge { what, value, limit: usize::MAX as u64 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_small_workspace_is_rejected_with_its_size() {
        let have =
            LaneSize { workspace_bytes: 100, counters: 4, padded_x: 10, padded_y: 20, slot_bytes: 30, cublas: false };
        assert_eq!(have.check(have), Ok(()));
        assert_eq!(have.check(LaneSize::default()), Ok(()));
        for need in [
            LaneSize { workspace_bytes: 101, ..LaneSize::default() },
            LaneSize { counters: 5, ..LaneSize::default() },
            LaneSize { padded_x: 11, ..LaneSize::default() },
            LaneSize { padded_y: 21, ..LaneSize::default() },
            LaneSize { slot_bytes: 31, ..LaneSize::default() },
            LaneSize { cublas: true, ..LaneSize::default() },
        ] {
            assert_eq!(have.check(need), Err(Refusal::LaneTooSmall { need, have }));
            assert_eq!(have.max(need).check(need), Ok(()));
            assert_eq!(have.max(need).check(have), Ok(()));
        }
        let text = have.check(LaneSize { counters: 5, ..LaneSize::default() }).unwrap_err().to_string();
        assert!(text.contains("needs a lane of 0 B, 5 counters, this one has 100 B, 4 counters, 10 + 20"), "{text}");
    }

    #[test]
    fn slot_bytes_are_counted() {
        let size = LaneSize { workspace_bytes: 8, slot_bytes: 6160, ..LaneSize::default() };
        assert_eq!((size.bytes(), LaneSize::default().bytes()), (6168, 0));
        assert_eq!(size.with_cublas().bytes(), 6168 + CUBLAS_BYTES as u64);
        assert_eq!(size.to_string(), "8 B, 0 counters, a slot of 6160 B");
    }

    #[test]
    fn huge_sizes_do_not_overflow() {
        let most = LaneSize { padded_x: u64::MAX, padded_y: u64::MAX, ..LaneSize::default() };
        assert_eq!(most.to_string(), format!("0 B, 0 counters, {0} + {0} padded elements", u64::MAX));
    }
}
