//! Verifies the minisign signature of a manifest, which proves who published a bundle (`docs/format.md` B.8).

use std::path::Path;

use minisign_verify::{PublicKey, Signature};

use super::{
    BundleError, files,
    manifest::{self, FileEntry, Manifest},
};

/// Maximum size of a signature in bytes.
const SIGNATURE_MAX: u64 = 16 << 10;

/// Parses a public key: the text of a minisign.pub, or its second line.
pub(crate) fn public_key(text: &str) -> Result<PublicKey, BundleError> {
    let text = text.trim();
    let key = if text.contains('\n') { PublicKey::decode(text) } else { PublicKey::from_base64(text) };
    key.map_err(|error| BundleError::PublicKey { reason: error.to_string() })
}

/// Checks that the manifest with these bytes was signed with this key, and that it contains no digest that could be
/// forged. Returns the signature's trusted comment.
pub(crate) fn check(dir: &Path, key: &PublicKey, bytes: &[u8], manifest: &Manifest) -> Result<String, BundleError> {
    let path = dir.join(manifest::SIGNATURE_NAME);
    if path.symlink_metadata().is_err() {
        return Err(BundleError::Signature {
            reason: "missing; the bundle was not signed, or its signature was removed",
        });
    }
    let text = files::read_small(&path, SIGNATURE_MAX)?;
    let signature = std::str::from_utf8(&text).ok().and_then(|text| Signature::decode(text).ok());
    let signature = signature.ok_or(BundleError::Signature { reason: "not a minisign signature" })?;
    key.verify(bytes, &signature, false).map_err(|error| BundleError::Signature {
        reason: match error {
            minisign_verify::Error::UnexpectedKeyId => "made with another key; ask its publisher for the key",
            _ => "does not match the manifest; the bundle is not the signed one",
        },
    })?;
    // The other digests only detect accidents: files with the same digests can be forged.
    if let Some(file) = manifest.files.iter().find(|file| file.sha256().is_none()) {
        return Err(BundleError::Unproven { file: FileEntry::name(file).into() });
    }
    Ok(signature.trusted_comment().to_owned())
}
