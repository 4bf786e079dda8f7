//! The version of the format.

use serde::{Deserialize, Serialize};

/// The version that this crate writes, and the only major version that it reads.
pub const VERSION: Version = Version { major: 1, minor: 0 };

/// A format version. A reader can read every `minor` of its `major`, unless a bundle uses an unknown encoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Version {
    /// Raised when old readers cannot read new bundles.
    pub major: u32,
    /// Raised for additions; old readers can read bundles that do not use them.
    pub minor: u32,
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}
