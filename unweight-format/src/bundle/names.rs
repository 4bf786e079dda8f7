//! File names, and what they say about the contents.

/// The file of attached kernels.
pub const ATTACHED_NAME: &str = "unweight.kernels";
/// The model card of a repository.
pub const CARD_NAME: &str = "README.md";
/// The source's model card, where the bundle has its own.
pub const CARD_SOURCE_NAME: &str = "README.md.source";
/// Files that repositories have, and bundles need not list.
pub(crate) const OF_REPOSITORY: [&str; 2] = [CARD_NAME, ".gitattributes"];
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
