use super::*;
use std::path::Path;
/// Rebuilds the source files of a bundle byte for byte.
pub fn decompress(
    bundle: &Path,
    _output: &Path,
    _options: &DecompressOptions,
    _progress: &dyn Progress,
) -> Result<DecompressReport, BundleError> {
    Err(BundleError::NotADirectory { path: bundle.into() })
}
