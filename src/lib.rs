//! Facade.
pub use unweight_format as format;
