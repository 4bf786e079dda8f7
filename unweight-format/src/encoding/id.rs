//! Names of encodings.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

use super::{ENCODINGS, Encoding};
use crate::{Float, named::UnknownName};

/// The name of an encoding: the key of [`ENCODINGS`]. Each encoding's module defines its constant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EncodingId(&'static str);

impl EncodingId {
    /// The id of the encoding with this lowercase name.
    pub const fn new(name: &'static str) -> Self {
        Self(name)
    }

    /// The encoding's name in manifests, plan files and reports.
    pub const fn name(self) -> &'static str {
        self.0
    }

    /// The encoding with this id.
    ///
    /// # Panics
    /// The id is not in [`ENCODINGS`]. Constants and parsed ids are.
    pub fn encoding(self) -> &'static dyn Encoding {
        self.find().unwrap_or_else(|| panic!("the encoding '{self}' is not in ENCODINGS"))
    }

    /// Returns this encoding if it supports the type; otherwise the first one that does, raw last.
    ///
    /// # Panics
    /// As [`EncodingId::encoding`].
    pub(crate) fn for_float(self, float: Float) -> Self {
        let supports_float =
            |encoding: &&dyn Encoding| encoding.id() != Self::RAW && encoding.floats().contains(&float);
        if self.encoding().floats().contains(&float) {
            return self;
        }
        ENCODINGS.iter().copied().find(supports_float).map_or(Self::RAW, |encoding| encoding.id())
    }

    fn find(self) -> Option<&'static dyn Encoding> {
        ENCODINGS.iter().copied().find(|encoding| encoding.id() == self)
    }
}

impl fmt::Display for EncodingId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.0)
    }
}

impl FromStr for EncodingId {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        ENCODINGS.iter().map(|encoding| encoding.id()).find(|id| id.0 == text).ok_or_else(|| UnknownName {
            what: "encoding",
            got: text.chars().take(64).collect(),
            known: ENCODINGS.iter().map(|encoding| encoding.id().0).collect::<Vec<_>>().join(", "),
        })
    }
}

impl Serialize for EncodingId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0)
    }
}

impl<'de> Deserialize<'de> for EncodingId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        <std::borrow::Cow<'_, str>>::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}
