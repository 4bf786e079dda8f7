use super::*;
use std::path::Path;
/// Compresses a model directory to a bundle.
pub fn compress(
    source: &Path,
    _output: &Path,
    _options: &CompressOptions,
    _progress: &dyn Progress,
) -> Result<CompressReport, BundleError> {
    Err(BundleError::NotADirectory { path: source.into() })
}
/// Predicts what [`compress`] would do.
pub fn plan(source: &Path, _options: &CompressOptions) -> Result<PlanReport, BundleError> {
    Err(BundleError::NotADirectory { path: source.into() })
}
