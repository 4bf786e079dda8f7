//! What `#[unweight_variant]` accepts.

mod crate_path;
mod every_word;
mod family;
/// Public, so that undocumented items would be refused.
pub mod public_and_documented;
