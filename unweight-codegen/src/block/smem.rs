//! Dynamic shared memory as a list of named sections.

use std::fmt;

/// The maximum number of sections of a plan.
const MAX_SECTIONS: usize = 16;

/// A named section of shared memory: `count` pieces of `bytes_each`, starting at `offset`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmemSection {
    /// Name of the contents.
    pub name: &'static str,
    /// First byte, from the (aligned) start of dynamic shared memory.
    pub offset: u32,
    /// Number of pieces: stages, warps or buffers.
    pub count: u32,
    /// Bytes of one piece.
    pub bytes_each: u32,
}

impl SmemSection {
    /// Bytes of all pieces.
    pub const fn bytes(&self) -> u32 {
        self.count * self.bytes_each
    }
}

/// The dynamic shared memory of a kernel, section by section in address order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmemPlan {
    sections: [SmemSection; MAX_SECTIONS],
    len: usize,
    end: u32,
}

impl SmemPlan {
    /// No shared memory.
    pub const fn new() -> Self {
        let none = SmemSection { name: "", offset: 0, count: 0, bytes_each: 0 };
        Self { sections: [none; MAX_SECTIONS], len: 0, end: 0 }
    }

    /// Returns this plan with a section appended at the next multiple of `align` (a power of two). A section of 0 bytes
    /// is left out.
    #[must_use]
    pub const fn section(mut self, name: &'static str, count: u32, bytes_each: u32, align: u32) -> Self {
        if count * bytes_each == 0 {
            return self;
        }
        let offset = self.end.next_multiple_of(align);
        self.sections[self.len] = SmemSection { name, offset, count, bytes_each };
        self.len += 1;
        self.end = offset + count * bytes_each;
        self
    }

    /// The sections, in address order.
    pub fn sections(&self) -> &[SmemSection] {
        &self.sections[..self.len]
    }

    /// Returns the bytes of dynamic shared memory to request at launch.
    pub const fn bytes(&self) -> u32 {
        self.end
    }
}

impl Default for SmemPlan {
    fn default() -> Self {
        Self::new()
    }
}

/// One line per section and one for the sum.
impl fmt::Display for SmemPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for s in self.sections() {
            writeln!(
                f,
                "  {:<20} at {:>6}  {:>2} x {:>6} = {:>6} B",
                s.name,
                s.offset,
                s.count,
                s.bytes_each,
                s.bytes()
            )?;
        }
        writeln!(f, "  {:<20}                       = {:>6} B", "sum", self.bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_follow_each_other_aligned() {
        const PLAN: SmemPlan =
            SmemPlan::new().section("a", 2, 24, 16).section("nothing", 0, 99, 1024).section("b", 1, 128, 128);
        assert_eq!(PLAN.bytes(), 256);
        let offsets: Vec<_> = PLAN.sections().iter().map(|s| (s.name, s.offset, s.bytes())).collect();
        assert_eq!(offsets, [("a", 0, 48), ("b", 128, 128)]);
    }
}
