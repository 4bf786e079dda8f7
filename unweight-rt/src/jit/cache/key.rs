//! Identifies a cached kernel by what it was compiled from.
//!
//! A [`Key`] has two parts. The [`SourceKey`] is a digest over all inputs of the compiler; the [`CompilerId`]
//! identifies the compiler. They are separate so that a machine without a compiler can still find a kernel that another
//! machine compiled. Paths, times and host names are not part of the key. docs/cache.md lists all fields.

use std::fmt;

use sha2::{Digest as _, Sha256};

use crate::jit::request::{CompileRequest, CompilerId};

/// Incremented whenever the meaning of an entry changes; older entries are then never found.
pub const SCHEMA: u32 = 2;

/// The compiler's output. There is only one kind today; it is part of the digest so that a second kind cannot collide.
const OUTPUT_KIND: &str = "cubin";

/// The domain of the digest, which separates it from digests of other data.
const DOMAIN: &str = "unweight kernel cache: source key";

/// SHA-256 over a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SourceKey([u8; 32]);

impl SourceKey {
    /// Digests domain, schema, output kind, arch, name, source, headers and canonical options, in this order.
    ///
    /// Every string is preceded by its length and every list by its count, so that different requests hash different
    /// bytes. Headers are sorted by name, because their order in the request does not affect the compiler.
    pub fn of(request: &CompileRequest) -> Self {
        let mut hasher = Sha256::new();
        add(&mut hasher, DOMAIN);
        hasher.update(SCHEMA.to_le_bytes());
        for text in [OUTPUT_KIND, &request.arch, &request.name, &request.source] {
            add(&mut hasher, text);
        }
        let mut headers: Vec<&(String, String)> = request.headers.iter().collect();
        headers.sort();
        hasher.update((headers.len() as u64).to_le_bytes());
        for (name, text) in headers {
            add(&mut hasher, name);
            add(&mut hasher, text);
        }
        let options = request.canonical_options();
        hasher.update((options.len() as u64).to_le_bytes());
        for option in &options {
            add(&mut hasher, option);
        }
        SourceKey(hasher.finalize().into())
    }
}

fn add(hasher: &mut Sha256, text: &str) {
    hasher.update((text.len() as u64).to_le_bytes());
    hasher.update(text.as_bytes());
}

impl fmt::Display for SourceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for SourceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SourceKey({self})")
    }
}

/// A cached kernel's identity.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// The variant's canonical name, checked to be a valid directory name.
    pub name: String,
    /// The digest of the compiled source.
    pub source: SourceKey,
    /// The compiler and its version.
    pub compiler: CompilerId,
}

impl Key {
    /// Returns the entry's directory: `<name>.<32 digits of the source key>.<compiler>`. It is readable and unique: the
    /// digest includes the name, 128 bits rule out accidental collisions, and `meta.json` contains all 256.
    pub fn directory(&self) -> String {
        let compiler: String = self
            .compiler
            .to_string()
            .chars()
            .map(
                |character| if character.is_ascii_alphanumeric() || ".-".contains(character) { character } else { '_' },
            )
            .take(60)
            .collect();
        format!("{}{compiler}", folder_prefix(&self.name, &self.source))
    }
}

/// Returns the prefix of all directories of one source, for any compiler.
pub(crate) fn folder_prefix(name: &str, source: &SourceKey) -> String {
    let digits = source.to_string();
    format!("{name}.{}.", &digits[..32])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> CompileRequest {
        CompileRequest {
            name: "uw_k".to_owned(),
            source: "source".to_owned(),
            headers: vec![("a".to_owned(), "text a".to_owned()), ("b".to_owned(), "text b".to_owned())],
            options: vec!["-DX".to_owned()],
            arch: "sm_90a".to_owned(),
        }
    }

    #[test]
    fn every_field_takes_part_and_order_of_headers_does_not() {
        let base = SourceKey::of(&request());
        let changed = |change: fn(&mut CompileRequest)| {
            let mut request = request();
            change(&mut request);
            SourceKey::of(&request)
        };
        let keys = [
            changed(|request| request.name.push('x')),
            changed(|request| request.source.push('x')),
            changed(|request| request.arch = "sm_90".to_owned()),
            changed(|request| request.headers[0].0.push('x')),
            changed(|request| request.headers[0].1.push('x')),
            changed(|request| drop(request.headers.pop())),
            changed(|request| request.options.push("-DY".to_owned())),
            changed(|request| request.options.clear()),
            // The same letters, split differently.
            changed(|request| request.headers[0] = ("at".to_owned(), "ext a".to_owned())),
        ];
        for (index, key) in keys.iter().enumerate() {
            assert_ne!(*key, base, "change {index} must change the key");
            assert!(!keys[..index].contains(key), "change {index} collides");
        }
        assert_eq!(changed(|request| request.headers.reverse()), base);
        assert_eq!(SourceKey::of(&request()), base);
    }

    #[test]
    fn the_folder_is_readable_and_depends_on_the_compiler() {
        let key = |version: &str| Key {
            name: "uw_k".to_owned(),
            source: SourceKey::of(&request()),
            compiler: CompilerId { name: "nvrtc".to_owned(), version: version.to_owned(), build: "65be/..".to_owned() },
        };
        let directory = key("13.0").directory();
        assert!(directory.starts_with("uw_k.") && directory.ends_with(".nvrtc13.0-65be_.."), "{directory}");
        assert_ne!(directory, key("12.9").directory());
    }
}
