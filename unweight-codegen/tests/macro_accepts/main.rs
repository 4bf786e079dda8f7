//! What `#[unweight_variant]` accepts.

mod crate_path;
mod every_word;
mod family;
/// Public, so that the compiler would reject undocumented items.
pub mod public_and_documented;
