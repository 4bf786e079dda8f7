//! The certificate: what was compared, with SHA-256 digests, and a digest of itself.

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::super::{
    failure::{Failure, Result},
    printable::one_line,
};

/// The value of `format`.
pub const FORMAT: &str = "unweight-certificate";
/// The value of `version`.
pub const VERSION: u32 = 1;
/// Maximum number of tokens of a prompt.
pub const PROMPT_TOKENS: usize = 16;
/// Maximum number of prompts.
pub const PROMPTS_MAX: u16 = 1024;
/// Maximum size of a certificate, bytes.
pub const BYTES_MAX: u64 = 256 << 20;
/// Precedes the certificate's own digest, the last field.
const OWN: &str = "\"certificate_sha256\": \"";
/// Digits of a SHA-256.
const DIGITS: usize = 64;

/// What is proven.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Certificate {
    /// `unweight-certificate`.
    pub format: String,
    /// 1.
    pub version: u32,
    /// Program and version that compared.
    pub creator: String,
    /// Identifies the bundle.
    pub manifest_digest: String,
    /// Files of the source, each equal to the file that the bundle restores.
    pub source_files: Vec<FileDigest>,
    /// Files of the bundle.
    pub bundle_files: Vec<FileDigest>,
    /// Tensors, each with equal bits in source and bundle.
    pub tensors: Vec<TensorDigest>,
    /// Logits of the bundle; null if they were not computed.
    pub logits: Option<Logits>,
    /// SHA-256 of this file with zeros in place of these digits.
    pub certificate_sha256: String,
}

/// A file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileDigest {
    /// Relative path.
    pub name: String,
    /// Size in bytes.
    pub bytes: u64,
    /// SHA-256.
    pub sha256: String,
}

/// A tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorDigest {
    /// Source file.
    pub file: String,
    /// Tensor.
    pub name: String,
    /// Type in safetensors.
    pub dtype: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// Encoding in the bundle.
    pub encoding: String,
    /// SHA-256 of the tensor's bytes.
    pub sha256: String,
}

/// Logits of all positions of some prompts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Logits {
    /// `cpu-reference`, which gave the same logits from the source, or the name of a GPU.
    pub device: String,
    /// Placement of weights on a GPU; null on the CPU.
    pub placement: Option<String>,
    /// `f32` or `bf16`.
    pub dtype: String,
    /// The prompts.
    pub prompts: Vec<PromptLogits>,
}

/// Logits of one prompt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PromptLogits {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// SHA-256 of the logits, little-endian `[tokens, vocab]`.
    pub sha256: String,
}

/// What certificates of all versions have.
#[derive(Deserialize)]
struct Head {
    format: String,
    version: u64,
}

impl Logits {
    /// Refuses what no program of this version writes: no logits, or so many that computing them takes hours.
    fn check(&self) -> std::result::Result<(), String> {
        let count = self.prompts.len();
        if !(1..=usize::from(PROMPTS_MAX)).contains(&count) {
            return Err(format!("logits of {count} prompts, but there are 1 to {PROMPTS_MAX}"));
        }
        for (number, prompt) in self.prompts.iter().enumerate() {
            let tokens = prompt.tokens.len();
            if !(1..=PROMPT_TOKENS).contains(&tokens) {
                return Err(format!("prompt {number} has {tokens} tokens, but prompts have 1 to {PROMPT_TOKENS}"));
            }
        }
        Ok(())
    }
}

/// Returns a finished SHA-256 as hexadecimal digits.
pub fn hex(sha: Sha256) -> String {
    sha.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Certificate {
    /// Returns the text of the file, and sets the digest.
    pub fn seal(&mut self) -> Result<String> {
        self.certificate_sha256 = "0".repeat(DIGITS);
        let text = serde_json::to_string_pretty(self).map_err(|error| Failure::io("certificate")(error.into()))? + "\n";
        let digest = hex(Sha256::new().chain_update(&text));
        self.certificate_sha256.clone_from(&digest);
        Ok(text.replacen(&format!("{OWN}{}", "0".repeat(DIGITS)), &format!("{OWN}{digest}"), 1))
    }

    /// Parses a certificate and compares its digest.
    pub fn parse(name: &str, bytes: &[u8]) -> Result<Self> {
        let damaged = |reason: String| {
            let help = "fetch the certificate again, or make it again with `unweight prove MODEL BUNDLE`";
            Failure::mismatch("certificate-invalid", format!("{name}: {reason}"), help)
        };
        let text = std::str::from_utf8(bytes).map_err(|error| damaged(error.to_string()))?;
        // Another version may have other fields.
        let head: Head = serde_json::from_str(text).map_err(|error| damaged(error.to_string()))?;
        if head.format != FORMAT || head.version != u64::from(VERSION) {
            let found = format!("'{}' version {}", one_line(&head.format), head.version);
            let message = format!("{name}: {found}, but this program reads {FORMAT} version {VERSION}");
            let help = "update unweight, or make it again with `unweight prove MODEL BUNDLE`";
            return Err(Failure::mismatch("certificate-invalid", message, help));
        }
        let certificate: Self = serde_json::from_str(text).map_err(|error| damaged(error.to_string()))?;
        // No string of JSON contains this text: quotes in strings are escaped.
        let (before, after) =
            text.rsplit_once(OWN).ok_or_else(|| damaged("its digest is not the last field".into()))?;
        let own = after.get(..DIGITS).unwrap_or_default();
        let rest = after.get(DIGITS..).unwrap_or_default();
        let zeros = "0".repeat(DIGITS);
        let sha = [before, OWN, &zeros, rest].iter().fold(Sha256::new(), |sha, part| sha.chain_update(part));
        let digest = hex(sha);
        if own != digest || certificate.certificate_sha256 != digest {
            return Err(damaged(format!("its SHA-256 is {digest}, but it states {own}")));
        }
        certificate.logits.as_ref().map_or(Ok(()), |logits| logits.check().map_err(damaged))?;
        Ok(certificate)
    }

    /// Returns the first difference to what a bundle has now, `found`. Logits are compared if both have them.
    pub fn difference(&self, found: &Self, with_source: bool) -> Option<String> {
        if self.manifest_digest != found.manifest_digest {
            return Some(format!(
                "the bundle's manifest digest is {}, but the certificate is for {}",
                found.manifest_digest, self.manifest_digest
            ));
        }
        let of = |this: &[FileDigest], other: &[FileDigest], what: &str| {
            let differs = this.iter().zip(other).find(|(this, other)| this != other).map(|(this, _)| this.name.clone());
            let differs = differs.or_else(|| (this.len() != other.len()).then(|| "the list of files".to_owned()));
            differs.map(|name| format!("{name} of the {what} differs from the certificate"))
        };
        let source = if with_source { "source" } else { "restored model" };
        of(&self.bundle_files, &found.bundle_files, "bundle")
            .or_else(|| of(&self.source_files, &found.source_files, source))
            .or_else(|| {
                let mut pairs = self.tensors.iter().zip(&found.tensors);
                let differs = pairs.find(|(this, other)| this != other).map(|(this, _)| this.name.clone());
                let lengths = || self.tensors.len() != found.tensors.len();
                let differs = differs.map(|name| format!("tensor '{name}'"));
                let differs = differs.or_else(|| lengths().then(|| "the list of tensors".to_owned()));
                differs.map(|what| format!("{what} differs from the certificate"))
            })
            .or_else(|| match (&self.logits, &found.logits) {
                (Some(this), Some(other)) if this != other => {
                    Some(format!("the logits on {} differ from those of the certificate", other.device))
                }
                _ => None,
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Certificate {
        let file = |name: &str| FileDigest { name: name.into(), bytes: 3, sha256: "ab".repeat(32) };
        Certificate {
            format: FORMAT.into(),
            version: VERSION,
            creator: "unweight 0.1.0".into(),
            manifest_digest: "12".repeat(16),
            source_files: vec![file("a")],
            // A name that imitates the field.
            bundle_files: vec![file(&format!("{OWN}x"))],
            tensors: Vec::new(),
            logits: None,
            certificate_sha256: String::new(),
        }
    }

    #[test]
    fn every_changed_bit_of_a_certificate_is_refused() {
        let mut certificate = sample();
        let text = certificate.seal().unwrap();
        assert_eq!(Certificate::parse("c", text.as_bytes()).unwrap(), certificate);
        for at in 0..text.len() {
            for bit in 0..8 {
                let mut bytes = text.clone().into_bytes();
                bytes[at] ^= 1 << bit;
                assert!(Certificate::parse("c", &bytes).is_err(), "bit {bit} of byte {at}");
            }
        }
        for changed in [text[1..].to_owned(), text.clone() + " ", text.replace('\n', "\r\n")] {
            assert!(Certificate::parse("c", changed.as_bytes()).is_err());
        }
    }
}
