//! Names of encodings.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

use super::{Encoding, FORMS};
use crate::{Float, named::UnknownName};

/// The name of an encoding: the key of [`FORMS`]. Each encoding's module defines its constant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FormId(&'static str);

impl FormId {
    /// The id of an encoding with this name, lowercase.
    pub const fn new(name: &'static str) -> Self {
        Self(name)
    }

    /// The name in manifests, plan files and reports.
    pub const fn name(self) -> &'static str {
        self.0
    }

    /// The encoding of this name.
    ///
    /// # Panics
    /// It is not in [`FORMS`]. An id that was parsed, and every constant, is.
    pub fn form(self) -> &'static dyn Encoding {
        self.find().unwrap_or_else(|| panic!("the form '{self}' is not in FORMS"))
    }

    /// This encoding if it takes the type, else the first coded one that does.
    ///
    /// # Panics
    /// As [`FormId::form`].
    pub(crate) fn for_float(self, float: Float) -> Self {
        let takes = |form: &&dyn Encoding| form.id() != Self::RAW && form.floats().contains(&float);
        if self.form().floats().contains(&float) {
            return self;
        }
        FORMS.iter().copied().find(takes).map_or(Self::RAW, |form| form.id())
    }

    fn find(self) -> Option<&'static dyn Encoding> {
        FORMS.iter().copied().find(|form| form.id() == self)
    }
}

impl fmt::Display for FormId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.0)
    }
}

impl FromStr for FormId {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        FORMS.iter().map(|form| form.id()).find(|id| id.0 == text).ok_or_else(|| UnknownName {
            what: "encoding",
            got: text.chars().take(64).collect(),
            known: FORMS.iter().map(|form| form.id().0).collect::<Vec<_>>().join(", "),
        })
    }
}

impl Serialize for FormId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0)
    }
}

impl<'de> Deserialize<'de> for FormId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        <std::borrow::Cow<'_, str>>::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}
