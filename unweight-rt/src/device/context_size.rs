//! The memory that launches of one stream need from their execution context.

use std::fmt;

use unweight_codegen::plan::WorkspacePlan;

/// Bytes of cuBLAS's workspace, as NVIDIA recommends for Hopper. The workspace is set explicitly, so that a captured
/// graph does not use memory that the library owns.
pub(crate) const CUBLAS_BYTES: usize = 32 << 20;

/// The memory and handles that launches need in addition to their operands. Launches on one stream share them, so a
/// context needs the maximum of each field.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ContextSize {
    /// Bytes of partial sums, or of the dump of a debugging variant.
    pub workspace_bytes: u64,
    /// The number of u32 counters that blocks synchronise with.
    pub counters: u64,
    /// Elements of an input, padded to whole tiles.
    pub padded_x: u64,
    /// Elements of an output, padded to whole tiles; or of the product of a gate and an up before its activation.
    pub padded_y: u64,
    /// Bytes of the slot into which weights are expanded before they are multiplied.
    pub slot_bytes: u64,
    /// Whether a product needs cuBLAS.
    pub cublas: bool,
}

impl ContextSize {
    /// Returns the maximum of each field: enough for either.
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

    /// Returns the bytes on the device, including cuBLAS's workspace.
    pub fn bytes(self) -> u64 {
        let cublas = if self.cublas { CUBLAS_BYTES as u64 } else { 0 };
        let elements = self.padded_x.saturating_add(self.padded_y);
        let shared = self.workspace_bytes.saturating_add(self.counters.saturating_mul(4));
        shared.saturating_add(elements.saturating_mul(2)).saturating_add(self.slot_bytes).saturating_add(cublas)
    }

    /// Returns this size with cuBLAS's workspace.
    #[must_use]
    pub fn with_cublas(self) -> Self {
        Self { cublas: true, ..self }
    }
}

impl From<WorkspacePlan> for ContextSize {
    fn from(plan: WorkspacePlan) -> Self {
        Self { workspace_bytes: plan.bytes, counters: plan.counters, ..Self::default() }
    }
}

impl fmt::Display for ContextSize {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::LaunchError;

    #[test]
    fn too_small_workspace_is_rejected_with_its_size() {
        let have = ContextSize {
            workspace_bytes: 100,
            counters: 4,
            padded_x: 10,
            padded_y: 20,
            slot_bytes: 30,
            cublas: false,
        };
        assert_eq!(have.check(have), Ok(()));
        assert_eq!(have.check(ContextSize::default()), Ok(()));
        for need in [
            ContextSize { workspace_bytes: 101, ..ContextSize::default() },
            ContextSize { counters: 5, ..ContextSize::default() },
            ContextSize { padded_x: 11, ..ContextSize::default() },
            ContextSize { padded_y: 21, ..ContextSize::default() },
            ContextSize { slot_bytes: 31, ..ContextSize::default() },
            ContextSize { cublas: true, ..ContextSize::default() },
        ] {
            assert_eq!(have.check(need), Err(LaunchError::ContextTooSmall { need, have }));
            assert_eq!(have.max(need).check(need), Ok(()));
            assert_eq!(have.max(need).check(have), Ok(()));
        }
        let text = have.check(ContextSize { counters: 5, ..ContextSize::default() }).unwrap_err().to_string();
        assert!(
            text.contains("needs an execution context of 0 B, 5 counters, but this one has 100 B, 4 counters, 10 + 20"),
            "{text}"
        );
    }

    #[test]
    fn slot_bytes_are_counted() {
        let size = ContextSize { workspace_bytes: 8, slot_bytes: 6160, ..ContextSize::default() };
        assert_eq!((size.bytes(), ContextSize::default().bytes()), (6168, 0));
        assert_eq!(size.with_cublas().bytes(), 6168 + CUBLAS_BYTES as u64);
        assert_eq!(size.to_string(), "8 B, 0 counters, a slot of 6160 B");
    }

    #[test]
    fn huge_sizes_do_not_overflow() {
        let large = ContextSize { padded_x: u64::MAX, padded_y: u64::MAX, ..ContextSize::default() };
        assert_eq!(large.to_string(), format!("0 B, 0 counters, {0} + {0} padded elements", u64::MAX));
    }
}
