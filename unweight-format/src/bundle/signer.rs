//! What signs the manifest of a bundle.

use std::{error::Error, fmt, sync::Arc};

use super::BundleError;

type Sign = dyn Fn(&[u8]) -> Result<String, Box<dyn Error + Send + Sync>> + Send + Sync;

/// Signs manifests. It holds a function, not the secret key.
#[derive(Clone)]
pub struct Signer(Arc<Sign>);

impl Signer {
    /// A signer whose `sign` returns, for the bytes of a manifest, the text of their minisign signature (prehashed, as
    /// minisign makes them).
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

/// The same signer, not one of the same key.
impl PartialEq for Signer {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Signer {}
