//! Who published a bundle: a minisign signature of its manifest (`docs/format.md` B.8).

use std::{error::Error, fmt, path::Path, sync::Arc};

use minisign_verify::{PublicKey, Signature};

use super::{
    BundleError, files,
    manifest::{self, FileEntry, Manifest},
};

/// Largest signature that is read, bytes.
const SIGNATURE_MAX: u64 = 16 << 10;

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

/// Parses a public key: the text of a minisign.pub, or its second line.
pub(crate) fn public_key(text: &str) -> Result<PublicKey, BundleError> {
    let text = text.trim();
    let key = if text.contains('\n') { PublicKey::decode(text) } else { PublicKey::from_base64(text) };
    key.map_err(|error| BundleError::PublicKey { reason: error.to_string() })
}

/// Checks that the manifest with these bytes was signed with this key, and that what it says cannot be forged. Returns
/// the signature's trusted comment.
pub(crate) fn check(dir: &Path, key: &PublicKey, bytes: &[u8], manifest: &Manifest) -> Result<String, BundleError> {
    let path = dir.join(manifest::SIGNATURE_NAME);
    if path.symlink_metadata().is_err() {
        return Err(BundleError::Signature { reason: "missing; the bundle was not signed, or lost it" });
    }
    let text = files::read_small(&path, SIGNATURE_MAX)?;
    let signature = std::str::from_utf8(&text).ok().and_then(|text| Signature::decode(text).ok());
    let signature = signature.ok_or(BundleError::Signature { reason: "not a minisign signature" })?;
    key.verify(bytes, &signature, false).map_err(|error| BundleError::Signature {
        reason: match error {
            minisign_verify::Error::UnexpectedKeyId => "made with another key; ask its publisher for the key",
            _ => "not of this manifest; the bundle is not what was signed",
        },
    })?;
    // The other digests detect accidents: other bytes could be made to have them.
    if let Some(file) = manifest.files.iter().find(|file| file.sha256().is_none()) {
        return Err(BundleError::Unproven { file: FileEntry::name(file).into() });
    }
    Ok(signature.trusted_comment().to_owned())
}
