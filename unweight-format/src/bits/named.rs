//! Enums whose values have one name each in options, manifests and reports.

/// Defines an enum whose values have one name each in options, manifests and reports.
macro_rules! named {
    ($(#[$doc:meta])* $enum:ident, $what:literal { $($(#[$variant_doc:meta])* $variant:ident = $name:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, ::serde::Serialize, ::serde::Deserialize)]
        #[non_exhaustive]
        pub enum $enum {
            $($(#[$variant_doc])* #[serde(rename = $name)] $variant,)+
        }

        impl $enum {
            /// Every value.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// The name used in options, manifests and reports.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),+ }
            }
        }

        impl ::std::fmt::Display for $enum {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.pad(self.name())
            }
        }

        impl ::std::str::FromStr for $enum {
            type Err = $crate::named::UnknownName;

            fn from_str(text: &str) -> Result<Self, $crate::named::UnknownName> {
                Self::ALL.iter().copied().find(|value| value.name() == text).ok_or_else(|| $crate::named::UnknownName {
                    what: $what,
                    got: text.chars().take(64).collect(),
                    known: [$($name),+].join(", "),
                })
            }
        }
    };
}
pub(crate) use named;

/// A name that is not one of the known names.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what} '{got}'; known: {known}")]
pub struct UnknownName {
    /// What the name is of: `profile`, `scope`, ...
    pub what: &'static str,
    /// The name given.
    pub got: String,
    /// The known names, separated by commas.
    pub known: String,
}

impl UnknownName {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        "unknown-name"
    }
}
