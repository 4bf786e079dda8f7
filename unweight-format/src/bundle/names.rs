//! File names, and what they say about the contents.

/// The file of attached kernels.
pub const ATTACHED_NAME: &str = "unweight.kernels";
/// The model card of a repository.
pub const CARD_NAME: &str = "README.md";
/// The source's model card, where the bundle has its own.
pub const CARD_SOURCE_NAME: &str = "README.md.source";
/// Files that repositories have, and bundles need not list.
pub(crate) const OF_REPOSITORY: [&str; 2] = [CARD_NAME, ".gitattributes"];
/// The history in a clone of a repository, which bundles need not list either.
pub(crate) const CLONE_PREFIX: &str = ".git/";
/// What `hf download --local-dir` records about a download; never part of a model or bundle.
pub(crate) const DOWNLOAD_RECORDS: &str = ".cache/huggingface";
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
