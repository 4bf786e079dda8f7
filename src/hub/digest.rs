//! The digests by which the Hub names contents.

use sha1::Sha1;
use sha2::{Digest as _, Sha256};

/// Computes an etag: the SHA-256 of a file in large-file storage, or git's digest of any other.
pub(super) enum Etag {
    Large(Sha256),
    Git(Sha1),
}

impl Etag {
    /// Starts with no bytes, for an etag of this form; `size` is that of the whole file.
    pub(super) fn like(etag: &str, size: u64) -> Self {
        if etag.len() == 64 { Self::large() } else { Self::git(size) }
    }

    /// Starts a SHA-256.
    pub(super) fn large() -> Self {
        Self::Large(Sha256::new())
    }

    /// Starts git's digest of a file of `size` bytes.
    pub(super) fn git(size: u64) -> Self {
        Self::Git(Sha1::new().chain_update(format!("blob {size}\0")))
    }

    pub(super) fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Large(sha) => sha.update(bytes),
            Self::Git(sha) => sha.update(bytes),
        }
    }

    pub(super) fn finish(self) -> String {
        match self {
            Self::Large(sha) => hex(&sha.finalize()),
            Self::Git(sha) => hex(&sha.finalize()),
        }
    }

    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Large(_) => "SHA-256",
            Self::Git(_) => "git digest",
        }
    }
}

/// Whether a text is a SHA-256 or a digest of git, in lower case.
pub(super) fn is_etag(text: &str) -> bool {
    matches!(text.len(), 40 | 64) && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn etags_are_those_of_git_and_sha256sum() {
        // `printf hello | git hash-object --stdin`, `printf hello | sha256sum`.
        let git = "b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0";
        let large = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";
        for etag in [git, large] {
            let mut digest = Etag::like(etag, 5);
            digest.update(b"hel");
            digest.update(b"lo");
            assert_eq!(digest.finish(), etag);
            assert!(is_etag(etag) && !is_etag(&etag.to_uppercase()) && !is_etag(&etag[1..]));
        }
        assert!(!is_etag(&"/".repeat(40)));
    }
}
