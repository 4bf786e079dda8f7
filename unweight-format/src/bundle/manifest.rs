//! The manifest `unweight.json`: describes every file of the source and of the bundle (`docs/format.md` B.3).
//!
//! It contains no time, path or machine name: the same model and options result in the same bytes.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::{
    CodeLimit, Digest, EncodingId, Float, Section, TileGrid,
    bundle::{
        BundleError, Profile, Scope,
        blocks::{self, Blocks},
    },
    digest::Digester,
    layout::ELEMENTS_MAX,
    roles::Role,
    safetensors::{Dtype, TensorInfo},
};

pub use super::version::{VERSION, Version};

/// File name of the manifest.
pub const FILE_NAME: &str = "unweight.json";
/// File name of the manifest's signature.
pub const SIGNATURE_NAME: &str = "unweight.json.minisig";
/// The value of `format` in every manifest.
pub(crate) const MANIFEST_FORMAT: &str = "unweight-bundle";
/// The value of `format` in the metadata of every shard, and of `quant_method` in `config.json`. Manifests of
/// development versions had it as `format`, too.
pub(crate) const FORMAT: &str = "unweight";
/// Program and version of this crate, which a bundle records.
pub(crate) const CREATOR: &str = concat!("unweight ", env!("CARGO_PKG_VERSION"));
/// Maximum size of a manifest in bytes: about 100,000 tensors.
pub(crate) const BYTES_MAX: u64 = 128 << 20;
/// Maximum number of extents of a shape.
pub(crate) const RANK_MAX: usize = 64;
/// Name of the U8 tensor in every shard that contains length and header of the source file.
pub(crate) const SOURCE_HEADER: &str = "unweight.source_header";
/// Separates a tensor's name from its section's.
pub(crate) const SECTION_INFIX: &str = ".unweight.";
/// The suffix of the copy of a source file that the bundle stores with other contents.
pub(crate) const SOURCE_SUFFIX: &str = ".source";

const DIGEST_KEY: &[u8] = b"\"manifest_digest\":\"";
const DIGEST_DIGITS: usize = 32;

/// `unweight.json`: every file of the source, and how the bundle stores it (`docs/format.md` B.3).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Manifest {
    /// Name of the format: `unweight-bundle`.
    pub format: String,
    /// Format version.
    pub version: Version,
    /// Program and version that wrote the bundle.
    pub creator: String,
    /// Options that the bundle was compressed with.
    pub options: Options,
    /// The model from whose tensors some tensors are stored as differences; `None` for a bundle of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<BaseEntry>,
    /// Every file of the source, sorted by name.
    pub files: Vec<FileEntry>,
    /// Digest of the manifest's bytes with zeros in place of these 32 digits.
    pub manifest_digest: Digest,
}

/// The base of a bundle (`docs/format.md` B.11).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct BaseEntry {
    /// Name of its directory.
    pub name: String,
    /// Digest of its tensors' digests.
    pub digest: Digest,
}

/// The options that a bundle was made with; its tensors record their own encodings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Options {
    /// The profile that the bundle was compressed with.
    pub profile: Profile,
    /// The scope that the bundle was compressed with.
    pub scope: Scope,
    /// Longest Huffman code in bits.
    pub code_limit: u32,
}

/// A file of the source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", try_from = "FlatEntry")]
#[non_exhaustive]
pub enum FileEntry {
    /// A safetensors file.
    Weights(WeightsFile),
    /// A safetensors index. The bundle contains an index of the stored tensors under the same name, and the source's as
    /// `<name>.source`.
    Index(ChangedFile),
    /// A `config.json`. The bundle's identifies the weights; the source's is in the bundle as `<name>.source`.
    Config(ChangedFile),
    /// Any other file, copied.
    Copied(CopiedFile),
}

/// The fields of every kind of file. Deserialising [`FileEntry`] by serde's tags would first build a tree of an entry's
/// values, of sixteen times its size.
#[derive(Deserialize)]
struct FlatEntry {
    kind: String,
    name: String,
    size: u64,
    digest: Digest,
    sha256: Option<String>,
    stored_size: Option<u64>,
    stored_digest: Option<Digest>,
    header_bytes: Option<u64>,
    header_digest: Option<Digest>,
    shard_size: Option<u64>,
    shard_header_bytes: Option<u64>,
    shard_header_digest: Option<Digest>,
    tensors: Option<Vec<TensorEntry>>,
}

impl TryFrom<FlatEntry> for FileEntry {
    type Error = String;

    fn try_from(flat: FlatEntry) -> Result<Self, String> {
        let FlatEntry { kind, name, size, digest, sha256, .. } = flat;
        let missing = |field: &str| format!("file '{}' has no {field}", name.escape_default());
        Ok(match kind.as_str() {
            "weights" => Self::Weights(WeightsFile {
                header_bytes: flat.header_bytes.ok_or_else(|| missing("header_bytes"))?,
                header_digest: flat.header_digest.ok_or_else(|| missing("header_digest"))?,
                shard_size: flat.shard_size.ok_or_else(|| missing("shard_size"))?,
                shard_header_bytes: flat.shard_header_bytes.ok_or_else(|| missing("shard_header_bytes"))?,
                shard_header_digest: flat.shard_header_digest.ok_or_else(|| missing("shard_header_digest"))?,
                tensors: flat.tensors.ok_or_else(|| missing("tensors"))?,
                name,
                size,
                digest,
                sha256,
            }),
            "index" | "config" => {
                let changed = ChangedFile {
                    stored_size: flat.stored_size.ok_or_else(|| missing("stored_size"))?,
                    stored_digest: flat.stored_digest.ok_or_else(|| missing("stored_digest"))?,
                    name,
                    size,
                    digest,
                    sha256,
                };
                if kind == "index" { Self::Index(changed) } else { Self::Config(changed) }
            }
            "copied" => Self::Copied(CopiedFile { name, size, digest, sha256 }),
            other => return Err(format!("unknown kind '{}'", other.escape_default())),
        })
    }
}

/// Parses a shape of at most [`RANK_MAX`] extents. The limit bounds memory: an extent needs eight bytes for two of
/// text.
fn shape_of<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<usize>, D::Error> {
    struct Extents;
    impl<'de> serde::de::Visitor<'de> for Extents {
        type Value = Vec<usize>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(f, "a shape of at most {RANK_MAX} extents")
        }

        fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut list: A) -> Result<Vec<usize>, A::Error> {
            let mut shape = Vec::new();
            while let Some(extent) = list.next_element()? {
                if shape.len() == RANK_MAX {
                    return Err(serde::de::Error::invalid_length(RANK_MAX + 1, &self));
                }
                shape.push(extent);
            }
            Ok(shape)
        }
    }
    deserializer.deserialize_seq(Extents)
}

/// A safetensors file and the bundle shard of the same name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct WeightsFile {
    /// Relative path, `/` between parts.
    pub name: String,
    /// Bytes of the source file.
    pub size: u64,
    /// Digest of the digests (as text, 32 digits each) of the source's header and tensors, in order.
    pub digest: Digest,
    /// SHA-256 of the source file, if requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// Bytes of the source's length and header.
    pub header_bytes: u64,
    /// Digest of the source's length and header.
    pub header_digest: Digest,
    /// Bytes of the bundle shard.
    pub shard_size: u64,
    /// Bytes of the shard's length and header.
    pub shard_header_bytes: u64,
    /// Digest of the shard's length and header.
    pub shard_header_digest: Digest,
    /// Tensors in the order of the source's data.
    pub tensors: Vec<TensorEntry>,
}

/// A file that the bundle stores with other contents; the source's file is `<name>.source`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ChangedFile {
    /// Relative path.
    pub name: String,
    /// Bytes of the source file.
    pub size: u64,
    /// Digest of the source file.
    pub digest: Digest,
    /// SHA-256 of the source file, if requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// Bytes of the bundle's file.
    pub stored_size: u64,
    /// Digest of the bundle's file.
    pub stored_digest: Digest,
}

/// A copied file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CopiedFile {
    /// Relative path.
    pub name: String,
    /// The size of the file in bytes.
    pub size: u64,
    /// Digest of the contents.
    pub digest: Digest,
    /// SHA-256, if requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
}

/// A tensor of a weights file, and how it is stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TensorEntry {
    /// Name in the source.
    pub name: String,
    /// Type in the source.
    pub dtype: Dtype,
    /// Shape in the source.
    #[serde(deserialize_with = "shape_of")]
    pub shape: Vec<usize>,
    /// Role of the tensor, by its name.
    pub role: Role,
    /// Layer, by its name.
    pub layer: Option<u32>,
    /// The encoding of the tensor.
    #[serde(rename = "encoding")]
    pub encoding: EncodingId,
    /// Why it is raw, or has another encoding than requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Rows of the coded matrix; absent if raw.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<usize>,
    /// Columns of the coded matrix; absent if raw.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cols: Option<usize>,
    /// Digest of the original bytes.
    pub digest: Digest,
    /// Digest of the base's tensor of this name, if the sections contain differences from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<Digest>,
    /// Stored sections in stored order; empty if raw (the original bytes are stored).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sections: Vec<SectionEntry>,
}

/// A stored section of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SectionEntry {
    /// The name of the section.
    #[serde(with = "section_names")]
    pub name: Section,
    /// The number of bytes of the section.
    pub bytes: u64,
    /// Digest of the stored bytes.
    pub digest: Digest,
    /// Digests of the blocks of a packed matrix with several blocks, in row-major order, so that a part of the section
    /// can be read and verified.
    #[serde(default, skip_serializing_if = "Vec::is_empty", with = "blocks::digits")]
    pub blocks: Vec<Digest>,
}

/// Serialises sections by their names in the specification.
mod section_names {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    use crate::{Section, encoding::ENCODINGS};

    pub(super) fn serialize<S: Serializer>(section: &Section, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(section.name())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Section, D::Error> {
        let name = String::deserialize(deserializer)?;
        let mut sections = ENCODINGS.iter().flat_map(|encoding| encoding.sections()).copied();
        sections.find(|s| s.name() == name && !name.is_empty()).ok_or_else(|| D::Error::custom("unknown section name"))
    }
}

impl FileEntry {
    /// Relative path.
    pub fn name(&self) -> &str {
        match self {
            Self::Weights(file) => &file.name,
            Self::Index(file) | Self::Config(file) => &file.name,
            Self::Copied(file) => &file.name,
        }
    }

    /// Bytes of the source file.
    pub fn size(&self) -> u64 {
        match self {
            Self::Weights(file) => file.size,
            Self::Index(file) | Self::Config(file) => file.size,
            Self::Copied(file) => file.size,
        }
    }

    /// Digest of the source file.
    pub fn digest(&self) -> Digest {
        match self {
            Self::Weights(file) => file.digest,
            Self::Index(file) | Self::Config(file) => file.digest,
            Self::Copied(file) => file.digest,
        }
    }

    /// SHA-256 of the source file.
    pub fn sha256(&self) -> Option<&str> {
        match self {
            Self::Weights(file) => file.sha256.as_deref(),
            Self::Index(file) | Self::Config(file) => file.sha256.as_deref(),
            Self::Copied(file) => file.sha256.as_deref(),
        }
    }

    /// The weights, if this is a safetensors file.
    pub fn weights(&self) -> Option<&WeightsFile> {
        if let Self::Weights(file) = self { Some(file) } else { None }
    }

    /// The file, if the bundle stores it with other contents.
    pub fn changed(&self) -> Option<&ChangedFile> {
        if let Self::Index(file) | Self::Config(file) = self { Some(file) } else { None }
    }

    /// Name of the bundle's file with the source's bytes; `None` for weights, which are decoded.
    pub fn original(&self) -> Option<String> {
        match self {
            Self::Weights(_) => None,
            Self::Index(file) | Self::Config(file) => Some(format!("{}{SOURCE_SUFFIX}", file.name)),
            Self::Copied(file) => Some(file.name.clone()),
        }
    }

    /// Names and sizes in bytes of the files that the bundle stores for this entry.
    pub fn stored(&self) -> Vec<(String, u64)> {
        match self {
            Self::Weights(file) => vec![(file.name.clone(), file.shard_size)],
            Self::Index(file) | Self::Config(file) => {
                vec![(file.name.clone(), file.stored_size), (format!("{}{SOURCE_SUFFIX}", file.name), file.size)]
            }
            Self::Copied(file) => vec![(file.name.clone(), file.size)],
        }
    }
}

impl WeightsFile {
    /// The digest of a whole source file, computed from those of its header and tensors.
    pub(crate) fn digest_of(header: Digest, tensors: &[TensorEntry]) -> Digest {
        let mut bytes = header.to_string().into_bytes();
        tensors.iter().for_each(|t| bytes.extend_from_slice(t.digest.to_string().as_bytes()));
        Digest::of(&bytes)
    }
}

impl TensorEntry {
    /// The size of the original tensor in bytes; `None` if it overflows.
    pub fn original_bytes(&self) -> Option<u64> {
        self.dtype.tensor_bytes(&self.shape)
    }

    /// The stored size in bytes (saturating).
    pub fn stored_bytes(&self) -> u64 {
        match self.encoding {
            EncodingId::RAW => self.original_bytes().unwrap_or(u64::MAX),
            _ => self.sections.iter().fold(0u64, |sum, s| sum.saturating_add(s.bytes)),
        }
    }

    /// The coded matrix; `None` if the tensor is raw or its rows and columns are not valid.
    pub fn grid(&self) -> Option<TileGrid> {
        TileGrid::new(self.rows?, self.cols?).ok()
    }

    /// Returns how the fields contradict each other, if they do.
    pub(crate) fn contradiction(&self) -> Option<String> {
        let Some(original) = self.original_bytes() else {
            return Some(format!("the size of {} {:?} overflows", self.dtype, self.shape));
        };
        if self.base.is_some() && self.encoding != EncodingId::PLANES {
            return Some(format!("{} cannot have a base", self.encoding));
        }
        if self.encoding == EncodingId::RAW {
            let coded = self.rows.is_some() || self.cols.is_some() || !self.sections.is_empty();
            return coded.then(|| "a raw tensor has rows, cols or sections".into());
        }
        let supports_float = |float: &Float| self.encoding.encoding().floats().contains(float);
        let Some(float) = Float::of(self.dtype).filter(supports_float) else {
            return Some(format!("{} cannot be {}", self.dtype, self.encoding));
        };
        let (rows, cols) = (self.rows.unwrap_or(0), self.cols.unwrap_or(0));
        let Some(grid) = self.grid() else { return Some(format!("[{rows}, {cols}] is not a matrix")) };
        if (grid.elements() * float.bytes()) as u64 != original {
            return Some(format!("[{rows}, {cols}] does not have the elements of {:?}", self.shape));
        }
        if grid.elements() as u64 > ELEMENTS_MAX {
            return Some(format!(
                "[{rows}, {cols}] has more than {ELEMENTS_MAX} elements: only a raw tensor may have more"
            ));
        }
        if let Err(why) = self.encoding.encoding().fits(grid) {
            return Some(format!("[{rows}, {cols}] cannot be {}: {why}", self.encoding));
        }
        if !self.sections.iter().map(|s| &s.name).eq(self.encoding.encoding().sections()) {
            return Some("its sections are not those of its encoding, or not in order".into());
        }
        self.sections.iter().find_map(|section| {
            // A larger section would make the tensor larger than raw.
            if section.bytes > original {
                return Some(format!("section {} is larger than the tensor", section.name.name()));
            }
            let size = section.name.check_bytes(grid, section.bytes);
            if let Err(error) = size {
                return Some(format!("[{rows}, {cols}]: {error}"));
            }
            let expected =
                (section.name == Section::PACKED).then(|| Blocks::of(grid)).flatten().map_or(0, Blocks::count);
            let got = section.blocks.len();
            (got != expected).then(|| {
                let name = section.name.name();
                format!("section {name} of [{rows}, {cols}] has {expected} blocks with digests, but lists {got}")
            })
        })
    }
}

/// The digest by which `config.json` names a bundle (`docs/format.md` B.9). It is the digest of the digests (as text,
/// 32 digits each) of every source file with weights, its shard's header, and the sections of its tensors, in order. It
/// covers no other file, so a `config.json` can contain it.
pub(crate) fn weights_digest(files: &[FileEntry]) -> Digest {
    let mut digester = Digester::default();
    let mut put = |digest: Digest| digester.update(digest.to_string().as_bytes());
    for file in files.iter().filter_map(FileEntry::weights) {
        put(file.digest);
        put(file.shard_header_digest);
        file.tensors.iter().flat_map(|tensor| &tensor.sections).for_each(|section| put(section.digest));
    }
    digester.finish()
}

/// The digests of the base's tensors, in the order of files and tensors.
pub(crate) fn base_digests(files: &[FileEntry]) -> impl Iterator<Item = Digest> {
    files.iter().filter_map(FileEntry::weights).flat_map(|file| &file.tensors).filter_map(|tensor| tensor.base)
}

/// The name of a tensor's section in a shard.
pub(crate) fn section_name(tensor: &str, section: Section) -> String {
    format!("{tensor}{SECTION_INFIX}{}", section.name())
}

impl Manifest {
    /// A manifest of the current version whose digest is not yet set.
    pub(crate) fn new(options: Options, base: Option<BaseEntry>, files: Vec<FileEntry>) -> Self {
        Self {
            format: MANIFEST_FORMAT.into(),
            version: VERSION,
            creator: CREATOR.into(),
            options,
            base,
            files,
            manifest_digest: Digest::leaf(&[]),
        }
    }

    /// Sets `manifest_digest` and returns the bytes of `unweight.json`.
    pub(crate) fn set_digest(&mut self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec(self).expect("a manifest is strings, numbers and lists");
        let at = digest_digits(&bytes).expect("the manifest has the key");
        bytes[at.clone()].fill(b'0');
        self.manifest_digest = Digest::of(&bytes);
        bytes[at].copy_from_slice(self.manifest_digest.to_string().as_bytes());
        bytes
    }

    /// Parses and checks the bytes of `unweight.json`. Errors contain `path`.
    ///
    /// # Errors
    /// The digest does not match the bytes; the version has another major number, or a newer minor number and an
    /// unknown encoding; or the fields contradict each other.
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self, BundleError> {
        let fail = |reason: String| BundleError::Manifest { path: path.into(), reason };
        let at = digest_digits(bytes).ok_or_else(|| fail("it has no manifest_digest; the file is damaged".into()))?;
        let stored = String::from_utf8_lossy(&bytes[at.clone()]).into_owned();
        // Hash zeros in place of the digits without copying the manifest.
        let mut digester = Digester::default();
        [&bytes[..at.start], &[b'0'; DIGEST_DIGITS], &bytes[at.end..]].iter().for_each(|part| digester.update(part));
        let digest = digester.finish();
        if digest.to_string() != stored {
            return Err(fail(format!("its digest is {digest}, but it states {stored}; the file is damaged")));
        }
        // Parse format and version first: a manifest of another version may have fields of another type.
        #[derive(Deserialize)]
        struct Head {
            format: String,
            version: Version,
        }
        let parse_error =
            |error: serde_json::Error| fail(format!("at line {}, column {}: {error}", error.line(), error.column()));
        let head: Head = serde_json::from_slice(bytes).map_err(parse_error)?;
        let (version, supported) = (head.version, VERSION);
        if head.format == FORMAT || head.format == MANIFEST_FORMAT && version.major < supported.major {
            return Err(BundleError::OldVersion { path: path.into(), version, supported });
        }
        if head.format != MANIFEST_FORMAT {
            return Err(fail(format!("its format is '{}', not '{MANIFEST_FORMAT}'", head.format.escape_default())));
        }
        let newer = || BundleError::NewerVersion { path: path.into(), version, supported };
        if version.major > supported.major {
            return Err(newer());
        }
        // The digest matches: whatever a newer minor version contains that cannot be parsed is a new encoding.
        let known = version <= supported;
        let manifest: Self =
            serde_json::from_slice(bytes).map_err(|error| if known { parse_error(error) } else { newer() })?;
        manifest.check().map_err(fail)?;
        Ok(manifest)
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        CodeLimit::new(self.options.code_limit).map_err(|e| e.to_string())?;
        if let Some(base) = &self.base {
            check_name(&base.name).map_err(|reason| format!("base '{}': {reason}", base.name.escape_default()))?;
            if base.name.contains('/') {
                return Err(format!("base '{}': it is a path, not a name", base.name.escape_default()));
            }
        }
        let name = self.base.as_ref().map_or_else(String::new, |base| base.name.clone());
        if self.base != BaseEntry::of(name, &self.files) {
            return Err("its base does not match the digests of its tensors' bases".into());
        }
        let mut names = std::collections::BTreeSet::new();
        // The sums of all sizes are checked, so that later sums cannot overflow.
        let (mut source, mut stored_bytes) = (0u64, 0u64);
        for file in &self.files {
            let name = file.name();
            check_name(name).map_err(|reason| format!("file '{}': {reason}", name.escape_default()))?;
            for (stored, _) in file.stored() {
                if stored == FILE_NAME || stored == SIGNATURE_NAME || !names.insert(stored.clone()) {
                    return Err(format!("file '{}' is listed twice", stored.escape_default()));
                }
            }
            if let Some(weights) = file.weights() {
                check_weights(weights).map_err(|reason| format!("file '{}': {reason}", name.escape_default()))?;
            }
            let sum = |sum: u64, bytes: u64| sum.checked_add(bytes).filter(|&sum| sum <= i64::MAX as u64);
            let stored = file.stored().iter().try_fold(stored_bytes, |all, (_, bytes)| sum(all, *bytes));
            let Some((all, stored)) = sum(source, file.size()).zip(stored) else {
                return Err(format!(
                    "file '{}': the sizes up to this file sum to more than 2^63",
                    name.escape_default()
                ));
            };
            (source, stored_bytes) = (all, stored);
        }
        // A name cannot be both a file and a directory.
        for name in &names {
            for (slash, _) in name.match_indices('/') {
                if names.contains(&name[..slash]) {
                    let (file, name) = (name[..slash].escape_default(), name.escape_default());
                    return Err(format!("file '{file}' is also the directory of '{name}'"));
                }
            }
        }
        Ok(())
    }
}

pub(crate) fn check_weights(file: &WeightsFile) -> Result<(), String> {
    let mut names = std::collections::HashSet::new();
    let (mut source, mut shard) = (file.header_bytes, file.shard_header_bytes.checked_add(file.header_bytes));
    for tensor in &file.tensors {
        let fail = |reason: String| format!("tensor '{}': {reason}", tensor.name.escape_default());
        if !names.insert(tensor.name.as_str()) || is_reserved(&tensor.name) {
            return Err(fail("its name is reserved or listed twice".into()));
        }
        if let Some(reason) = tensor.contradiction() {
            return Err(fail(reason));
        }
        let original = tensor.original_bytes().unwrap_or(u64::MAX);
        source = source.checked_add(original).ok_or_else(|| fail("the file's size overflows".into()))?;
        shard = shard.and_then(|sum| sum.checked_add(tensor.stored_bytes()));
    }
    if source != file.size {
        return Err(format!("its header and tensors have {source} bytes, but its size is {}", file.size));
    }
    if shard != Some(file.shard_size) {
        return Err(format!("its stored parts do not add up to its shard_size {}", file.shard_size));
    }
    if WeightsFile::digest_of(file.header_digest, &file.tensors) != file.digest {
        return Err("its digest does not match its parts".into());
    }
    Ok(())
}

/// Whether a tensor name is reserved for bundles.
pub(crate) fn is_reserved(tensor: &str) -> bool {
    tensor.contains(SECTION_INFIX) || tensor.contains(SOURCE_HEADER)
}

/// Fails if readers would refuse a manifest of this size.
pub(crate) fn check_bytes(bytes: u64) -> Result<(), BundleError> {
    if bytes <= BYTES_MAX {
        return Ok(());
    }
    Err(BundleError::ManifestTooLarge { got: bytes, limit: BYTES_MAX })
}

/// Minimum size of a tensor's entry in bytes, in any encoding.
pub(crate) fn min_entry_bytes(tensor: &TensorInfo) -> u64 {
    // Keys, punctuation and the digest of a raw tensor; each extent is a digit and a comma.
    100 + (tensor.name.len() + 2 * tensor.shape.len()) as u64
}

/// Checks that a file name is a relative path of plain names.
pub(crate) fn check_name(name: &str) -> Result<(), &'static str> {
    if name.is_empty() || name.len() > 4096 {
        return Err("a file name has 1 to 4096 bytes");
    }
    if name.split('/').any(|part| part.len() > 255) {
        return Err("a part of a file name has at most 255 bytes");
    }
    if name.split('/').any(|part| matches!(part, "" | "." | "..")) {
        return Err("a file name is relative, without '.', '..' and empty parts");
    }
    if name.contains(['\\', '\0']) || name.chars().any(char::is_control) || name.as_bytes().get(1) == Some(&b':') {
        return Err("a file name has no backslash, drive letter or control character");
    }
    Ok(())
}

/// Finds the 32 digits of `manifest_digest`: they follow the last such key, which is at the end.
fn digest_digits(bytes: &[u8]) -> Option<std::ops::Range<usize>> {
    let start = bytes.windows(DIGEST_KEY.len()).rposition(|window| window == DIGEST_KEY)? + DIGEST_KEY.len();
    let digits = start..start + DIGEST_DIGITS;
    bytes.get(digits.clone())?;
    Some(digits)
}
