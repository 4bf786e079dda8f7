//! Names of files that say what is in them.

/// The file of attached kernels.
pub const ATTACHED_NAME: &str = "unweight.kernels";
/// Where it grows.
pub(crate) const PARTIAL_NAME: &str = "unweight.kernels.partial";

/// True for names of safetensors files.
pub(crate) fn is_weights(name: &str) -> bool {
    name.ends_with(".safetensors")
}

/// True for names of safetensors indexes.
pub(crate) fn is_index(name: &str) -> bool {
    name.ends_with(".safetensors.index.json")
}
