//! The signer of a bundle's manifest.

use std::{error::Error, fmt, sync::Arc};

use super::BundleError;

type Sign = dyn Fn(&[u8]) -> Result<String, Box<dyn Error + Send + Sync>> + Send + Sync;

/// Signs manifests. It contains a function, not the secret key.
#[derive(Clone)]
pub struct Signer(Arc<Sign>);

impl Signer {
    /// A signer that calls `sign` with the bytes of a manifest. `sign` returns the text of their minisign signature
    /// (prehashed, as minisign makes them).
    pub fn new(sign: impl Fn(&[u8]) -> Result<String, Box<dyn Error + Send + Sync>> + Send + Sync + 'static) -> Self {
        Self(Arc::new(sign))
    }

    pub(crate) fn sign(&self, manifest: &[u8]) -> Result<String, BundleError> {
        (self.0)(manifest).map_err(BundleError::Sign)
    }
}

impl fmt::Debug for Signer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Signer")
    }
}

/// Compares signers by identity, not by key.
impl PartialEq for Signer {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Signer {}
