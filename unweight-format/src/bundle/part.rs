//! Parts of a model, each made by one of several machines.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// Maximum number of parts.
pub const PARTS_MAX: u32 = 65536;

/// One of several parts of a model: `2/5` is the second of five.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Part {
    pub(super) index: u32,
    pub(super) of: u32,
}

impl Part {
    /// Part `index` of `of`, counted from 1; `None` if the index is out of range or there are more than [`PARTS_MAX`]
    /// parts.
    pub fn new(index: u32, of: u32) -> Option<Self> {
        (1..=PARTS_MAX).contains(&of).then_some(Self { index, of }).filter(|part| (1..=part.of).contains(&part.index))
    }

    /// The index of the part, from 1.
    pub fn index(self) -> u32 {
        self.index
    }

    /// The number of parts.
    pub fn of(self) -> u32 {
        self.of
    }

    /// Whether the part contains the files that are not weights.
    pub(crate) fn has_copies(self) -> bool {
        self.index == 1
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index, self.of)
    }
}

impl FromStr for Part {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = text.split_once('/').and_then(|(index, of)| Some((index.parse().ok()?, of.parse().ok()?)));
        let part = numbers.and_then(|(index, of)| Self::new(index, of));
        part.ok_or_else(|| format!("expected I/N, such as 2/5, with I from 1 to N and N at most {PARTS_MAX}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_written_as_fractions() {
        for (text, part) in [("1/1", Part { index: 1, of: 1 }), ("65536/65536", Part { index: 65536, of: 65536 })] {
            assert_eq!(text.parse(), Ok(part));
            assert_eq!(part.to_string(), text);
        }
        for text in ["", "1", "0/3", "4/3", "1/0", "1/65537", "-1/3", "1/3/5", "a/b", "1 / 3", "5000000000/5000000000"]
        {
            assert!(text.parse::<Part>().unwrap_err().starts_with("expected I/N"), "{text}");
        }
    }
}
