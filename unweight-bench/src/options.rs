//! Defines option structs: fields, defaults, and a builder method for each field.

/// Defines a struct of options.
macro_rules! options {
    ($(#[$doc:meta])* $name:ident {
        $($(#[doc = $field_doc:literal])+ $(#[serde($($how:tt)+)])? $field:ident: $type:ty = $default:expr,)+
    }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, serde::Serialize)]
        #[non_exhaustive]
        pub struct $name {
            $($(#[doc = $field_doc])+ $(#[serde($($how)+)])? pub $field: $type,)+
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)+ }
            }
        }

        impl $name {
            $(
                $(#[doc = $field_doc])+
                #[must_use]
                pub fn $field(self, $field: $type) -> Self {
                    Self { $field, ..self }
                }
            )+
        }
    };
}

pub(crate) use options;
