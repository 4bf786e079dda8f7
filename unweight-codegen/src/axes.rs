//! The axes of a variant. Each is a small type that holds legal values only.
//!
//! A value outside an axis is an [`AxisError`]. [`Plan::new`](crate::plan::Plan::new) decides whether a *combination*
//! of legal values can exist.
//!
//! A family lists its axes once, with `axes!` or by hand, as a table of [`Axis`]. Names (`family/name.rs`) and
//! attributes (`spec/pairs.rs`) are parsed and written from that table, so both are independent of families.

use crate::text::Message;
use std::fmt;

/// A value that is not on its axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AxisError {
    /// The name of the axis in attributes and messages.
    pub axis: &'static str,
    /// The requested value.
    pub value: u32,
    /// The valid values, in words.
    pub allowed: &'static str,
}

impl AxisError {
    /// The message of [`fmt::Display`], available in const context.
    pub const fn message(&self) -> Message {
        Message::new().str(self.axis).str(" = ").num(self.value).str(" is not supported; it must be ").str(self.allowed)
    }
}

impl fmt::Display for AxisError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message())
    }
}

impl std::error::Error for AxisError {}

/// The values of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Values {
    /// Every number from the first to the second, inclusive.
    Range(u32, u32),
    /// Each number of a list.
    Set(&'static [u32]),
    /// One of these words; a value is an index into the list.
    Words(&'static [&'static str]),
    /// Off or on, 0 or 1.
    Flag,
}

/// One axis of a family, and its spelling in attributes and names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Axis {
    /// Key of the axis in attributes.
    pub key: &'static str,
    /// Field of the axis in the spec of its family. The kernel's `Config` holds its value as `kField`.
    pub field: &'static str,
    /// The type of its values in `unweight/axes.cuh`; empty for numbers and flags.
    pub words_type: &'static str,
    /// Text before the value in a kernel's name; the whole text for a flag.
    pub mark: &'static str,
    /// Valid values of the axis.
    pub values: Values,
    /// Allowed values in words; empty for words and flags.
    pub allowed: &'static str,
    /// Value of an attribute that does not name the axis; `None` if every attribute must name it.
    pub default: Option<u32>,
    /// The value that names leave out.
    pub unnamed: Option<u32>,
    /// The condition under which the axis exists; `None` if it always exists.
    pub only: Option<Only>,
}

/// The condition of an axis that exists only with one value of an earlier axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Only {
    /// Index of the earlier axis in its family's list.
    pub axis: usize,
    /// Value of the earlier axis.
    pub value: u32,
    /// The reason why the axis does not exist otherwise.
    pub why: &'static str,
}

/// The maximum number of axes of a family.
pub(crate) const AXES_MAX: usize = 12;

/// The values of a variant, in the order of its family's axes; 0 where an axis does not exist, and after the last axis.
pub(crate) type Raw = [u32; AXES_MAX];

/// Returns the values of all axes of a family, in their order, padded with zeros.
pub(crate) const fn raw_of(values: &[u32]) -> Raw {
    let (mut raw, mut i) = ([0; AXES_MAX], 0);
    while i < values.len() {
        raw[i] = values[i];
        i += 1;
    }
    raw
}

impl Axis {
    /// A switch. The axis table adds its mark.
    pub(crate) const fn flag(key: &'static str) -> Self {
        let (field, words_type) = (key, "");
        Self {
            key,
            field,
            words_type,
            mark: "",
            values: Values::Flag,
            allowed: "",
            default: None,
            unnamed: None,
            only: None,
        }
    }

    /// A numeric axis. The axis table adds its mark.
    pub(crate) const fn number(key: &'static str, values: Values, allowed: &'static str) -> Self {
        Self { values, allowed, ..Self::flag(key) }
    }

    /// An axis of words, which are enumerators of the C++ type `words_type`. The axis table adds its mark.
    pub(crate) const fn words(key: &'static str, words_type: &'static str, words: &'static [&'static str]) -> Self {
        Self { values: Values::Words(words), words_type, ..Self::flag(key) }
    }

    /// Whether the axis exists with these values.
    pub(crate) const fn exists(&self, raw: &Raw) -> bool {
        match self.only {
            Some(only) => raw[only.axis] == only.value,
            None => true,
        }
    }

    /// Returns the value if it is on the axis.
    pub(crate) const fn check(&self, value: u32) -> Result<u32, AxisError> {
        let is_valid = match self.values {
            Values::Range(min, max) => value >= min && value <= max,
            Values::Set(all) => {
                let mut i = 0;
                while i < all.len() && all[i] != value {
                    i += 1;
                }
                i < all.len()
            }
            Values::Words(words) => (value as usize) < words.len(),
            Values::Flag => value <= 1,
        };
        if is_valid { Ok(value) } else { Err(AxisError { axis: self.key, value, allowed: self.allowed }) }
    }
}

/// A newtype over a range of integers.
macro_rules! range_axis {
    ($(#[$doc:meta])* $name:ident, $axis:literal, $min:literal..=$max:literal, $allowed:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(u8);

        impl $name {
            pub(crate) const AXIS: $crate::axes::Axis =
                $crate::axes::Axis::number($axis, $crate::axes::Values::Range($min, $max), $allowed);
            /// The smallest value.
            pub const MIN: Self = Self($min);
            /// The largest value.
            pub const MAX: Self = Self($max);

            /// Creates the value, or fails if it is not on the axis.
            pub const fn new(value: u32) -> Result<Self, $crate::axes::AxisError> {
                match Self::AXIS.check(value) {
                    Ok(value) => Ok(Self(value as u8)),
                    Err(error) => Err(error),
                }
            }

            pub(crate) const fn of_raw(raw: u32) -> Self {
                Self(raw as u8)
            }

            pub(crate) const fn raw(self) -> u32 {
                self.get()
            }

            /// The value as a number.
            pub const fn get(self) -> u32 {
                self.0 as u32
            }

            /// All values, ascending.
            pub fn all() -> impl DoubleEndedIterator<Item = Self> + Clone {
                ($min..=$max).map(Self)
            }
        }
    };
}

/// A newtype over a short list of integers.
macro_rules! set_axis {
    ($(#[$doc:meta])* $name:ident, $axis:literal, [$($value:literal),+], $allowed:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(u16);

        impl $name {
            pub(crate) const AXIS: $crate::axes::Axis =
                $crate::axes::Axis::number($axis, $crate::axes::Values::Set(&[$($value),+]), $allowed);
            /// All valid values, ascending.
            pub const ALL: [Self; [$($value),+].len()] = [$(Self($value)),+];

            /// Creates the value, or fails if it is not on the axis.
            pub const fn new(value: u32) -> Result<Self, $crate::axes::AxisError> {
                match Self::AXIS.check(value) {
                    Ok(value) => Ok(Self(value as u16)),
                    Err(error) => Err(error),
                }
            }

            pub(crate) const fn of_raw(raw: u32) -> Self {
                Self(raw as u16)
            }

            pub(crate) const fn raw(self) -> u32 {
                self.get()
            }

            /// Returns the smallest value of at least `least`; `None` if there is none.
            pub fn at_least(least: u32) -> Option<Self> {
                Self::ALL.into_iter().find(|value| value.get() >= least)
            }

            /// The value as a number.
            pub const fn get(self) -> u32 {
                self.0 as u32
            }
        }
    };
}

/// An enum whose values have words in names and attributes.
macro_rules! word_axis {
    ($(#[$doc:meta])* $name:ident, $axis:literal { $($(#[$value_doc:meta])* $value:ident = $tag:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $name { $($(#[$value_doc])* $value),+ }

        impl $name {
            pub(crate) const AXIS: $crate::axes::Axis =
                $crate::axes::Axis::words($axis, stringify!($name), &[$($tag),+]);
            /// All values, in the order of their declaration.
            pub const ALL: &'static [Self] = &[$(Self::$value),+];

            /// The value as canonical names spell it.
            pub const fn tag(self) -> &'static str {
                match self { $(Self::$value => $tag),+ }
            }

            /// Returns the value with this spelling in canonical names.
            pub fn from_tag(tag: &str) -> Option<Self> {
                match tag { $($tag => Some(Self::$value),)+ _ => None }
            }

            pub(crate) const fn of_raw(raw: u32) -> Self {
                Self::ALL[raw as usize]
            }

            #[allow(dead_code, reason = "the architecture is an axis of no family")]
            pub(crate) const fn raw(self) -> u32 {
                self as u32
            }
        }
    };
}

/// The spec of a family, field by field in the order of names: `field: Type "mark" [= default [unnamed]]`.
///
/// A type is one of the axes, or `flag`. With `unnamed`, names leave the default out. The macro writes the struct, its
/// table of [`Axis`], and the conversions to and from [`Raw`].
macro_rules! axes {
    (
        $(#[$doc:meta])*
        pub struct $name:ident {
            $($(#[$field_doc:meta])* $field:ident: $kind:tt $mark:literal $(= $default:tt $($unnamed:ident)?)?),* $(,)?
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name { $($(#[$field_doc])* pub $field: axes!(@type $kind)),* }

        impl $name {
            pub(crate) const AXES: &'static [$crate::axes::Axis] = &[$($crate::axes::Axis {
                mark: $mark,
                field: stringify!($field),
                $(default: Some(axes!(@default $kind $default)), $(unnamed: axes!(@$unnamed $kind $default),)?)?
                ..axes!(@axis $kind $field)
            }),*];

            pub(crate) const fn values(&self) -> $crate::axes::Raw {
                $crate::axes::raw_of(&[$(axes!(@raw $kind (self.$field))),*])
            }

            pub(crate) const fn of(raw: &$crate::axes::Raw) -> Self {
                let [$($field,)* ..] = *raw;
                Self { $($field: axes!(@of $kind ($field))),* }
            }
        }
    };
    (@type flag) => { bool };
    (@type $axis:ident) => { $axis };
    (@axis flag $field:ident) => { $crate::axes::Axis::flag(stringify!($field)) };
    (@axis $axis:ident $field:ident) => { $axis::AXIS };
    (@default flag $value:tt) => { $value as u32 };
    (@default $axis:ident $value:literal) => { $value };
    (@default $axis:ident $value:ident) => { $axis::$value.raw() };
    (@unnamed $kind:tt $default:tt) => { Some(axes!(@default $kind $default)) };
    (@raw flag ($value:expr)) => { $value as u32 };
    (@raw $axis:ident ($value:expr)) => { $value.raw() };
    (@of flag ($raw:expr)) => { $raw != 0 };
    (@of $axis:ident ($raw:expr)) => { $axis::of_raw($raw) };
}

pub(crate) use {axes, range_axis, set_axis, word_axis};

word_axis! {
    /// The architecture that a variant is compiled for.
    Arch, "arch" {
        /// NVIDIA Ampere for servers: A100, A30 (compute capability 8.0).
        Sm80 = "sm80",
        /// NVIDIA Ampere: GeForce RTX 30, A10, A40 (8.6).
        Sm86 = "sm86",
        /// NVIDIA Ada: GeForce RTX 40, L4, L40S (8.9).
        Sm89 = "sm89",
        /// NVIDIA Hopper (H100, H200) with its architecture-specific instructions (WGMMA, `setmaxnreg`).
        Sm90a = "sm90a",
        /// NVIDIA Blackwell for servers: B100, B200 (10.0).
        Sm100a = "sm100a",
        /// NVIDIA Blackwell Ultra: B300 (10.3).
        Sm103a = "sm103a",
        /// NVIDIA Blackwell: GeForce RTX 50, RTX PRO Blackwell (12.0).
        Sm120a = "sm120a",
    }
}

impl Arch {
    /// Returns the name for NVRTC's `--gpu-architecture`.
    pub const fn compiler_name(self) -> &'static str {
        match self {
            Self::Sm80 => "sm_80",
            Self::Sm86 => "sm_86",
            Self::Sm89 => "sm_89",
            Self::Sm90a => "sm_90a",
            Self::Sm100a => "sm_100a",
            Self::Sm103a => "sm_103a",
            Self::Sm120a => "sm_120a",
        }
    }

    /// Returns the architecture with this name in the compiler.
    pub fn of_compiler_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|arch| arch.compiler_name() == name)
    }

    /// Returns the architecture of devices of this compute capability.
    pub const fn of_capability(major: i32, minor: i32) -> Option<Self> {
        Some(match (major, minor) {
            (8, 0) => Self::Sm80,
            (8, 6) => Self::Sm86,
            (8, 9) => Self::Sm89,
            (9, 0) => Self::Sm90a,
            (10, 0) => Self::Sm100a,
            (10, 3) => Self::Sm103a,
            (12, 0) => Self::Sm120a,
            _ => return None,
        })
    }
}
