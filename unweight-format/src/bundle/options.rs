//! Options of compressing, merging, decompressing and verifying.

use std::path::{Path, PathBuf};

use super::{Part, Signer, names};
use crate::{CodeLimit, bits::named::named, glob::matches};

named! {
    /// The purpose of a bundle; it decides the encoding of each tensor.
    Profile, "profile" {
        /// Smallest: every eligible tensor in scope is Huffman-coded; may be transcoded when loaded.
        Distribution = "distribution",
        /// As the kernels run it (HHR-PPR): gate and up of hard layers Huffman, of easy layers palette, the rest raw.
        Inference = "inference",
        /// Every eligible tensor in scope as packed palette indices.
        Palette = "palette",
        /// Ready for kernels: every eligible tensor in scope packed, or palette where that cannot be.
        Packed = "packed",
        /// Every eligible tensor in scope compact, or Huffman-coded where that cannot be or is smaller: as small as
        /// `distribution`, and laid out for kernels.
        Compact = "compact",
    }
}

impl Profile {
    /// The scope that a profile has unless another is asked for.
    pub const fn default_scope(self) -> Scope {
        match self {
            Self::Inference => Scope::Mlp,
            Self::Distribution | Self::Palette | Self::Packed | Self::Compact => Scope::All,
        }
    }
}

named! {
    /// The roles of tensors that may be compressed.
    Scope, "scope" {
        /// MLP projections: gate, up and down in all their spellings.
        Mlp = "mlp",
        /// MLP and attention projections.
        Linear = "linear",
        /// Every eligible tensor, of known role or not.
        All = "all",
    }
}

named! {
    /// How much of a new bundle is decoded again before it gets its final name.
    VerifyAfter, "verification" {
        /// Nothing: what was written is trusted.
        None = "none",
        /// In each file the first and the last tensor, the largest of each encoding, and every sixteenth.
        Sample = "sample",
        /// Every tensor.
        Full = "full",
    }
}

/// Fields of options, each with a method of its name that sets it.
macro_rules! options {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)+ }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)+
        }

        impl $name {
            $(
                $(#[$field_doc])*
                #[must_use]
                pub fn $field(self, $field: impl Into<$type>) -> Self {
                    Self { $field: $field.into(), ..self }
                }
            )+
        }
    };
}

options! {
    /// The files below a directory that belong to the model; all files by default.
    #[derive(Default)]
    Selection {
        /// Names, relative to the directory: these files and no others.
        only: Option<Vec<String>>,
        /// Patterns (`*`, `?`) over names: a file or a directory that matches is left out. Weights and their indexes
        /// are left out only with their directory.
        skip: Vec<String>,
    }
}

impl Selection {
    /// Whether a file or a directory is left out.
    pub(crate) fn skips(&self, name: &str) -> bool {
        !(names::is_weights(name) || names::is_index(name)) && self.skip.iter().any(|pattern| matches(pattern, name))
    }

    /// What must not be written to while a model in this directory is read.
    pub(crate) fn inputs(&self, root: &Path) -> Vec<PathBuf> {
        self.only.as_ref().map_or_else(|| vec![root.into()], |names| names.iter().map(|name| root.join(name)).collect())
    }
}

options! {
    /// How to compress a model: `CompressOptions::new(Profile::Palette).threads(4).resume(true)`.
    CompressOptions {
        /// The purpose of the bundle, which decides the encoding of each tensor.
        profile: Profile,
        /// The roles of tensors that may be compressed.
        scope: Scope,
        /// Longest Huffman code.
        code_limit: CodeLimit,
        /// Patterns (`*`, `?`) over tensor names; if there are any, a tensor must match one to be compressed.
        include: Vec<String>,
        /// Patterns over tensor names; a tensor that matches one stays raw.
        exclude: Vec<String>,
        /// Which files of the source are taken.
        selection: Selection,
        /// A JSON file that overrides profile, scope and patterns: see [`PlanFile`](super::PlanFile).
        plan_file: Option<PathBuf>,
        /// Threads to encode with; `None` is all.
        threads: Option<usize>,
        /// Bytes that encoded tensors and buffers may occupy; `None` is 1 GiB. A tensor that needs more is encoded
        /// alone.
        ram_bytes: Option<u64>,
        /// Reuse the finished files of an interrupted run with the same options.
        resume: bool,
        /// Replace an existing bundle (or an empty directory), once the new one is complete.
        force: bool,
        /// What to read back and decode before the bundle gets its name; everything, unless said otherwise.
        verify: VerifyAfter,
        /// Also record the SHA-256 of every source file.
        sha256: bool,
        /// Signs the manifest; SHA-256 is then recorded as well. A part has no manifest: [`MergeOptions::sign`] signs
        /// that of the whole.
        sign: Option<Signer>,
        /// Only this part of the model, for [`merge`](super::merge).
        part: Option<Part>,
    }
}

impl CompressOptions {
    /// The defaults of a profile.
    pub fn new(profile: Profile) -> Self {
        Self {
            profile,
            scope: profile.default_scope(),
            code_limit: CodeLimit::DEFAULT,
            include: Vec::new(),
            exclude: Vec::new(),
            selection: Selection::default(),
            plan_file: None,
            threads: None,
            ram_bytes: None,
            resume: false,
            force: false,
            verify: VerifyAfter::Full,
            sha256: false,
            sign: None,
            part: None,
        }
    }
}

impl Default for CompressOptions {
    fn default() -> Self {
        Self::new(Profile::Distribution)
    }
}

options! {
    /// Options of [`merge`](super::merge).
    MergeOptions {
        /// Threads to decode with; `None` is all.
        threads: Option<usize>,
        /// The limit of memory for tensors that are being processed, bytes; see [`CompressOptions::ram_bytes`].
        ram_bytes: Option<u64>,
        /// Replace an existing bundle (or an empty directory), once the new one is complete.
        force: bool,
        /// What to decode before the bundle gets its name; everything, unless said otherwise.
        verify: VerifyAfter,
        /// Signs the manifest; the parts must have SHA-256.
        sign: Option<Signer>,
    }
}

impl Default for MergeOptions {
    fn default() -> Self {
        Self { threads: None, ram_bytes: None, force: false, verify: VerifyAfter::Full, sign: None }
    }
}

options! {
    /// Options of [`decompress`](super::decompress).
    #[derive(Default)]
    DecompressOptions {
        /// Threads to decode with; `None` is all.
        threads: Option<usize>,
        /// The limit of memory for tensors that are being processed, bytes; see [`CompressOptions::ram_bytes`].
        ram_bytes: Option<u64>,
        /// Reuse the finished files of an interrupted run; each is checked against its digests first.
        resume: bool,
        /// Replace an existing output, once the new one is complete: one whose every file the bundle gives back byte
        /// for byte (it is read for that), or an empty directory.
        force: bool,
    }
}

options! {
    /// Options of [`verify_with`](super::verify_with).
    #[derive(Default)]
    VerifyOptions {
        /// A source directory to compare every file with.
        against: Option<PathBuf>,
        /// Which files of that source the bundle was made from.
        selection: Selection,
        /// Only the manifest, and names, sizes and headers of all files: no weights are read.
        quick: bool,
        /// Threads to decode with; `None` is all.
        threads: Option<usize>,
        /// The limit of memory for tensors that are being processed, bytes; see [`CompressOptions::ram_bytes`].
        ram_bytes: Option<u64>,
        /// A minisign public key (the text of a minisign.pub, or its second line) that must have signed the manifest.
        key: Option<String>,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for profile in Profile::ALL {
            assert_eq!(profile.to_string().parse(), Ok(*profile));
            assert_eq!(serde_json::to_string(profile).unwrap(), format!("\"{profile}\""));
        }
        let error = "zip".parse::<crate::EncodingId>().unwrap_err().to_string();
        assert_eq!(error, "unknown encoding 'zip'; known: raw, huffman, palette, packed, compact, exponents");
    }
}
