//! Keys of minisign: who publishes a bundle signs its manifest, who fetches it checks that.

use std::{fs, path::Path};

use minisign::{SecretKey, SecretKeyBox};
use unweight::format::bundle::Signer;

use super::failure::{Failure, Result};

/// Largest key file, bytes.
const KEY_MAX: u64 = 16 << 10;

/// A signer with the secret key of a file; its password, if it has one, is the first line of another.
pub fn signer(key: &Path, password: Option<&Path>) -> Result<Signer> {
    let key_box = SecretKeyBox::from_string(&read(key)?);
    let refused = |key_box: std::result::Result<_, Box<minisign::PError>>| -> Result<SecretKey> {
        key_box.map_err(|error| {
            let message = format!("{}: {error}", key.display());
            Failure::new(
                "signing-key-invalid",
                message,
                "give a secret key of minisign; one with a password needs --password-file FILE",
            )
        })
    };
    let secret = match password {
        None => refused(key_box.and_then(SecretKeyBox::into_unencrypted_secret_key).map_err(Box::new))?,
        Some(file) => {
            let password = read(file)?.lines().next().unwrap_or_default().to_owned();
            refused(key_box.and_then(|key| key.into_secret_key(Some(password))).map_err(Box::new))?
        }
    };
    Ok(Signer::new(move |manifest| {
        // No time: what a bundle is, is in its manifest.
        let signature = minisign::sign(None, &secret, manifest, Some("unweight.json"), Some("signature of a bundle"))?;
        Ok(signature.to_string())
    }))
}

/// The text of a public key: that of a file, or the key itself.
pub fn public_key(given: &str) -> Result<String> {
    let path = Path::new(given);
    if path.is_file() { read(path) } else { Ok(given.to_owned()) }
}

fn read(path: &Path) -> Result<String> {
    let metadata = path.metadata().map_err(Failure::io(path.display()))?;
    if !metadata.is_file() || metadata.len() > KEY_MAX {
        return Err(Failure::new(
            "signing-key-invalid",
            format!("{}: not a key file", path.display()),
            "give a file that minisign has made",
        ));
    }
    fs::read_to_string(path).map_err(Failure::io(path.display()))
}
