//! File names, and what they say about the contents.

/// The file of attached kernels.
pub const ATTACHED_NAME: &str = "unweight.kernels";
/// The file of attached kernels while it is written.
pub(crate) const PARTIAL_NAME: &str = "unweight.kernels.partial";

/// Whether this is the name of a safetensors file.
pub(crate) fn is_weights(name: &str) -> bool {
    name.ends_with(".safetensors")
}

/// Whether this is the name of a safetensors index.
pub(crate) fn is_index(name: &str) -> bool {
    name.ends_with(".safetensors.index.json")
}
