//! The version of the format.

use serde::{Deserialize, Serialize};

/// The version that this crate writes, and the only major version that it reads.
pub const VERSION: Version = Version { major: 1, minor: 0 };

/// A format version. A reader reads every `minor` of its own `major`, as far as it knows the encodings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Version {
    /// Changes when old readers cannot read new bundles.
    pub major: u32,
    /// Changes when they can, but miss something.
    pub minor: u32,
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}
