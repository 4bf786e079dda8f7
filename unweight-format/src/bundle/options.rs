//! Options of compressing, merging, decompressing and verifying.

use std::path::{Path, PathBuf};

use super::{Part, Signer, names};
use crate::{CodeLimit, bits::named::named, glob::matches};

named! {
    /// The purpose of a bundle; it determines the encoding of each tensor.
    Profile, "profile" {
        /// Small: every eligible tensor in scope is Huffman-coded; a runtime may transcode it when loading.
        Distribution = "distribution",
        /// For the report's kernels (HHR-PPR): gate and up of hard layers Huffman, of easy layers palette, the rest
        /// raw.
        Inference = "inference",
        /// Every eligible tensor in scope as packed palette indices.
        Palette = "palette",
        /// Ready for kernels: every eligible tensor in scope packed, or palette where it cannot be packed.
        Packed = "packed",
        /// Every eligible tensor in scope compact, or Huffman-coded where it cannot be compact or Huffman is smaller:
        /// as small as `distribution`, and in the layout of kernels.
        Compact = "compact",
        /// Smallest, for storage and transfer: every eligible tensor in scope coded by rANS, which only CPUs decode.
        Archive = "archive",
    }
}

impl Profile {
    /// The scope of a profile unless another is requested.
    pub const fn default_scope(self) -> Scope {
        match self {
            Self::Inference => Scope::Mlp,
            Self::Distribution | Self::Palette | Self::Packed | Self::Compact | Self::Archive => Scope::All,
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
        /// Every eligible tensor of any role.
        All = "all",
    }
}

named! {
    /// How much of a new bundle is decoded and compared before it gets its final name.
    VerifyAfter, "verification" {
        /// Nothing is decoded again.
        None = "none",
        /// In each file the first and the last tensor, the largest of each encoding, and every sixteenth.
        Sample = "sample",
        /// Every tensor.
        Full = "full",
    }
}

/// Defines a struct of options, with a setter per field.
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
        /// Names relative to the directory: only these files.
        only: Option<Vec<String>>,
        /// Patterns (`*`, `?`) for names: a matching file or directory is left out. Weights and their indexes are left
        /// out only with their directory.
        skip: Vec<String>,
    }
}

impl Selection {
    /// Whether a file or directory is left out.
    pub(crate) fn skips(&self, name: &str) -> bool {
        !(names::is_weights(name) || names::is_index(name)) && self.skip.iter().any(|pattern| matches(pattern, name))
    }

    /// The paths that must not be written to while a model in this directory is read.
    pub(crate) fn inputs(&self, root: &Path) -> Vec<PathBuf> {
        self.only.as_ref().map_or_else(|| vec![root.into()], |names| names.iter().map(|name| root.join(name)).collect())
    }
}

options! {
    /// How to compress a model: `CompressOptions::new(Profile::Palette).threads(4).resume(true)`.
    CompressOptions {
        /// The purpose of the bundle, which determines the encoding of each tensor.
        profile: Profile,
        /// The roles of tensors that may be compressed.
        scope: Scope,
        /// The maximum length of a Huffman code.
        code_limit: CodeLimit,
        /// Patterns (`*`, `?`) for tensor names; if there are any, a tensor must match one to be compressed.
        include: Vec<String>,
        /// Patterns for tensor names; a tensor that matches one stays raw.
        exclude: Vec<String>,
        /// The files of the source that belong to the model.
        selection: Selection,
        /// A JSON file that overrides profile, scope and patterns: see [`PlanFile`](super::PlanFile).
        plan_file: Option<PathBuf>,
        /// Number of threads for encoding; `None` means all.
        threads: Option<usize>,
        /// Maximum bytes of encoded tensors and buffers; `None` means 768 MiB. A tensor that needs more is encoded
        /// alone.
        ram_bytes: Option<u64>,
        /// Reuse the finished files of an interrupted run with the same options.
        resume: bool,
        /// Replace an existing bundle (or an empty directory), once the new one is complete.
        force: bool,
        /// What to decode and compare before the bundle gets its name; everything by default.
        verify: VerifyAfter,
        /// Whether to record the SHA-256 of every source file.
        sha256: bool,
        /// Signs the manifest; SHA-256 is then recorded as well. A part has no manifest: [`MergeOptions::sign`] signs
        /// the manifest of the merged bundle.
        sign: Option<Signer>,
        /// Compress only this part of the model, for [`merge`](super::merge).
        part: Option<Part>,
        /// A model or bundle, from whose tensors those of the same name, type and shape are stored as differences where
        /// that is smaller. A part has no base.
        base: Option<PathBuf>,
    }
}

impl CompressOptions {
    /// The default options of a profile.
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
            base: None,
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
        /// Number of threads for decoding; `None` means all.
        threads: Option<usize>,
        /// Maximum bytes of tensors in memory; see [`CompressOptions::ram_bytes`].
        ram_bytes: Option<u64>,
        /// Replace an existing bundle (or an empty directory), once the new one is complete.
        force: bool,
        /// What to decode and compare before the bundle gets its name; everything by default.
        verify: VerifyAfter,
        /// Signs the manifest; the parts must contain SHA-256.
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
        /// Number of threads for decoding; `None` means all.
        threads: Option<usize>,
        /// Maximum bytes of tensors in memory; see [`CompressOptions::ram_bytes`].
        ram_bytes: Option<u64>,
        /// Reuse the finished files of an interrupted run, after checking their digests.
        resume: bool,
        /// Replace an existing output, once the new one is complete. It must be an empty directory, or contain only
        /// files that the bundle restores byte for byte, which are read and compared.
        force: bool,
        /// The base of a bundle with one; by default it is looked for next to the bundle.
        base: Option<PathBuf>,
    }
}

options! {
    /// Options of [`verify_with`](super::verify_with).
    #[derive(Default)]
    VerifyOptions {
        /// A source directory to compare every file with.
        against: Option<PathBuf>,
        /// The files of that source that the bundle was made from.
        selection: Selection,
        /// Check only the manifest, and names, sizes and headers of all files, without reading weights.
        quick: bool,
        /// Number of threads for decoding; `None` means all.
        threads: Option<usize>,
        /// Maximum bytes of tensors in memory; see [`CompressOptions::ram_bytes`].
        ram_bytes: Option<u64>,
        /// A minisign public key (the text of a minisign.pub, or its second line) that must have signed the manifest.
        key: Option<String>,
        /// The base of a bundle with one; by default it is looked for next to the bundle.
        base: Option<PathBuf>,
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
        assert_eq!(
            error,
            "unknown encoding 'zip'; known: raw, huffman, palette, packed, compact, exponents, rans, planes"
        );
    }
}
