//! minisign keys: the publisher of a bundle signs its manifest, and readers verify the signature.

use std::{fs, path::Path};

#[cfg(feature = "sign")]
use minisign::{SecretKey, SecretKeyBox};
use unweight::format::bundle::Signer;

use super::failure::{Failure, Result};

/// The maximum size of a key file, bytes.
const KEY_MAX: u64 = 16 << 10;

/// Length of a public key in base64, characters.
const PUBLIC_KEY_CHARACTERS: usize = 56;

/// A secret key.
#[cfg(feature = "sign")]
pub struct Secret(SecretKey);

#[cfg(feature = "sign")]
impl Secret {
    /// Signs `text` with a trusted comment, and returns the signature's file.
    pub fn sign(&self, text: &[u8], trusted_comment: &str) -> Result<String> {
        let comment = Some("signature by unweight");
        let signature = minisign::sign(None, &self.0, text, Some(trusted_comment), comment);
        let signature = signature.map_err(|error| {
            Failure::new("signing-failed", format!("minisign cannot sign: {error}"), "try another key")
        })?;
        Ok(signature.to_string())
    }

    /// Reads the secret key of file `key`. The first line of file `password` is the key's password, if it has one.
    pub fn read(key: &Path, password: Option<&Path>) -> Result<Self> {
        secret(key, password).map(Self)
    }
}

/// Checks that a text was signed with a public key, given as a file or as the key itself.
#[cfg(feature = "sign")]
pub fn check(key: &str, text: &[u8], signature: &[u8], file: &Path) -> Result<()> {
    use minisign::{PublicKey, PublicKeyBox, SignatureBox};

    let key = public_key(key)?;
    let parsed = match key.trim() {
        key if key.contains('\n') => PublicKeyBox::from_string(key).and_then(PublicKey::from_box),
        key => PublicKey::from_base64(key),
    };
    let parsed = parsed.map_err(|error| {
        Failure::new(
            "public-key-invalid",
            format!("not a minisign public key: {error}"),
            "give the file of a public key",
        )
    })?;
    let signature = std::str::from_utf8(signature).ok().and_then(|text| SignatureBox::from_string(text).ok());
    let verified = signature.is_some_and(|signature| {
        minisign::verify(&parsed, &signature, std::io::Cursor::new(text), true, false, false).is_ok()
    });
    if verified {
        return Ok(());
    }
    let message = format!("{}: not a signature of this file by this key", file.display());
    Err(Failure::mismatch("signature-invalid", message, "check --key, or fetch file and signature again"))
}

/// Returns a signer with the secret key of file `key`. The first line of file `password` is the key's password, if it
/// has one.
#[cfg(feature = "sign")]
pub fn signer(key: &Path, password: Option<&Path>) -> Result<Signer> {
    let secret = secret(key, password)?;
    Ok(Signer::new(move |manifest| {
        // The trusted comment has no time: the manifest alone identifies the bundle.
        let signature = minisign::sign(None, &secret, manifest, Some("unweight.json"), Some("signature of a bundle"))?;
        Ok(signature.to_string())
    }))
}

#[cfg(feature = "sign")]
fn secret(key: &Path, password: Option<&Path>) -> Result<SecretKey> {
    let text = read(key)?;
    if text.lines().any(|line| line.trim().len() == PUBLIC_KEY_CHARACTERS && !line.contains(' ')) {
        return Err(Failure::new(
            "signing-key-invalid",
            format!("{}: a public key", key.display()),
            "give the secret key that belongs to it, often minisign.key",
        ));
    }
    let key_box = SecretKeyBox::from_string(&text);
    let decode = |key_box: std::result::Result<_, Box<minisign::PError>>| -> Result<SecretKey> {
        key_box.map_err(|error| {
            let message = format!("{}: not a usable minisign secret key ({error})", key.display());
            Failure::new(
                "signing-key-invalid",
                message,
                "give a secret key of minisign; one with a password needs --password-file FILE, one without needs a \
                 password (minisign -C -s KEY)",
            )
        })
    };
    match password {
        None => decode(key_box.and_then(SecretKeyBox::into_unencrypted_secret_key).map_err(Box::new)),
        Some(file) => {
            let password = read(file)?.lines().next().unwrap_or_default().to_owned();
            decode(key_box.and_then(|key| key.into_secret_key(Some(password))).map_err(Box::new))
        }
    }
}

/// Fails: signing needs feature `sign`.
#[cfg(not(feature = "sign"))]
pub fn signer(_: &Path, _: Option<&Path>) -> Result<Signer> {
    Err(super::absent::option("--sign", "sign"))
}

/// Returns the text of a public key, given as a file or as the key itself.
pub fn public_key(given: &str) -> Result<String> {
    let path = Path::new(given);
    // A key is 56 characters of base64, which may contain slashes.
    let is_key = given.contains('\n') || given.trim().len() == PUBLIC_KEY_CHARACTERS;
    match path.is_file() {
        true => read(path),
        false if is_key => Ok(given.to_owned()),
        false => Err(Failure::new(
            "path-not-found",
            format!("{given}: no such file, and not a minisign public key"),
            "give the file of a public key, or its second line",
        )),
    }
}

fn read(path: &Path) -> Result<String> {
    let metadata = path.metadata().map_err(Failure::io(path.display()))?;
    if !metadata.is_file() || metadata.len() > KEY_MAX {
        return Err(Failure::new(
            "signing-key-invalid",
            format!("{}: not a key file", path.display()),
            "give a key file made by minisign",
        ));
    }
    fs::read_to_string(path).map_err(Failure::io(path.display()))
}
