use super::*;
use std::path::Path;
/// Checks every byte of a bundle, and optionally compares it with the source.
pub fn verify(bundle: &Path, _against: Option<&Path>, _progress: &dyn Progress) -> Result<VerifyReport, BundleError> {
    Err(BundleError::NotADirectory { path: bundle.into() })
}
