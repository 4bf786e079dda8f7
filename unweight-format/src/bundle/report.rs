//! What was done or found, for people and for `--json`.

use serde::Serialize;

use super::{BundleError, Profile, Scope, manifest::TensorEntry};
use crate::{Digest, EncodingId, encoding::ENCODINGS, roles::Role, safetensors};

/// One tensor of a plan or a bundle.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TensorReport {
    /// Source file, relative.
    pub file: String,
    /// Tensor name.
    pub name: String,
    /// What the tensor is for, by its name.
    pub role: Role,
    /// Layer, by its name.
    pub layer: Option<u32>,
    /// safetensors dtype.
    pub dtype: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// The form it is stored in.
    #[serde(rename = "encoding")]
    pub encoding: EncodingId,
    /// Why it is stored raw, or in another form than was asked for.
    pub reason: Option<String>,
    /// Elements.
    pub elements: u64,
    /// Bytes in the source.
    pub original_bytes: u64,
    /// Bytes in the bundle (predicted in a plan).
    pub stored_bytes: u64,
    /// Stored bits per element; 0 for a tensor without elements.
    pub bits_per_element: f64,
}

impl TensorReport {
    /// What a manifest says about a tensor of the file `file`.
    pub(crate) fn of(file: &str, entry: &TensorEntry) -> Self {
        let elements = safetensors::elements(&entry.shape);
        Self {
            file: file.into(),
            name: entry.name.clone(),
            role: entry.role,
            layer: entry.layer,
            dtype: entry.dtype.to_string(),
            shape: entry.shape.clone(),
            encoding: entry.encoding,
            reason: entry.reason.clone(),
            elements,
            // Known: the manifest was checked.
            original_bytes: entry.original_bytes().unwrap_or(0),
            stored_bytes: entry.stored_bytes(),
            bits_per_element: bits_per_element(entry.stored_bytes(), elements),
        }
    }
}

/// Bits of each element; 0 if there are no elements.
pub(crate) fn bits_per_element(bytes: u64, elements: u64) -> f64 {
    if elements == 0 { 0.0 } else { bytes as f64 * 8.0 / elements as f64 }
}

/// Sums over the tensors of one form.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[non_exhaustive]
pub struct EncodingTotal {
    /// The form.
    #[serde(rename = "encoding")]
    pub encoding: EncodingId,
    /// Tensors.
    pub tensors: u64,
    /// Elements.
    pub elements: u64,
    /// Bytes in the source.
    pub original_bytes: u64,
    /// Bytes in the bundle.
    pub stored_bytes: u64,
}

/// A file that is copied as it is although it is large, or the folder of a version control system.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct LargeCopy {
    /// Name, relative.
    pub name: String,
    /// Bytes.
    pub bytes: u64,
}

/// A `config.json` in a folder with weights that could not get the keys of `docs/format.md` B.9 and is copied as it is.
/// Readers that do not know bundles may then load something else without an error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct UnmarkedConfig {
    /// Name, relative.
    pub name: String,
    /// Why it has no keys.
    pub reason: &'static str,
}

/// Sums over the tensors of one role.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[non_exhaustive]
pub struct RoleTotal {
    /// The role.
    pub role: Role,
    /// Tensors.
    pub tensors: u64,
    /// Elements.
    pub elements: u64,
    /// Bytes in the source.
    pub original_bytes: u64,
    /// Bytes in the bundle (predicted).
    pub stored_bytes: u64,
}

/// Sizes of the bundle that one set of options would make of a model (predicted).
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CompareRow {
    /// Profile.
    pub profile: Profile,
    /// Scope.
    pub scope: Scope,
    /// Longest Huffman code, bits; `None` where nothing is Huffman-coded.
    pub code_limit: Option<u32>,
    /// Sums by role.
    pub roles: Vec<RoleTotal>,
    /// Bytes of all files of the bundle (predicted).
    pub stored_bytes: u64,
    /// `original_bytes - stored_bytes`.
    pub saved_bytes: i64,
    /// `stored_bytes / original_bytes`.
    pub ratio: f64,
}

/// What [`compare`](super::compare) predicts.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CompareReport {
    /// In the order of the options given.
    pub rows: Vec<CompareRow>,
    /// Source files: weights, indexes and others.
    pub files: u64,
    /// Bytes of all source files.
    pub original_bytes: u64,
    /// Wall-clock seconds.
    pub seconds: f64,
}

/// What [`plan`](super::plan) predicts.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PlanReport {
    /// Every tensor.
    pub tensors: Vec<TensorReport>,
    /// Totals by form.
    #[serde(rename = "encodings")]
    pub encodings: Vec<EncodingTotal>,
    /// Source files: weights, indexes and others.
    pub files: u64,
    /// Copied files that are large for what they are, largest first.
    pub large_copies: Vec<LargeCopy>,
    /// Files `config.json` that are copied as they are.
    pub unmarked_configs: Vec<UnmarkedConfig>,
    /// Bytes of all source files.
    pub original_bytes: u64,
    /// Bytes of all files of the bundle (predicted).
    pub stored_bytes: u64,
    /// Tensors that are not raw.
    pub coded_tensors: u64,
    /// `original_bytes - stored_bytes`; below 0 where headers and manifest cost more than coding saves.
    pub saved_bytes: i64,
    /// `stored_bytes / original_bytes`.
    pub ratio: f64,
    /// Wall-clock seconds.
    pub seconds: f64,
}

/// What [`compress`](super::compress) or [`merge`](super::merge) did.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CompressReport {
    /// Which part of a model was made (`2/5`), if it was not all of it; the other fields are about this part.
    pub part: Option<String>,
    /// Every tensor.
    pub tensors: Vec<TensorReport>,
    /// Totals by form.
    #[serde(rename = "encodings")]
    pub encodings: Vec<EncodingTotal>,
    /// Source files: weights, indexes and others.
    pub files: u64,
    /// Copied files that are large for what they are, largest first.
    pub large_copies: Vec<LargeCopy>,
    /// Files `config.json` that are copied as they are.
    pub unmarked_configs: Vec<UnmarkedConfig>,
    /// Files taken over from an interrupted run.
    pub resumed_files: Vec<String>,
    /// Tensors taken over of files that it did not finish.
    pub resumed_tensors: u64,
    /// Bytes of all source files.
    pub original_bytes: u64,
    /// Bytes of all files of the bundle.
    pub stored_bytes: u64,
    /// Tensors that are not raw.
    pub coded_tensors: u64,
    /// `original_bytes - stored_bytes`; below 0 where headers and manifest cost more than coding saves.
    pub saved_bytes: i64,
    /// `stored_bytes / original_bytes`.
    pub ratio: f64,
    /// Tensors decoded again and compared ([`VerifyAfter`](super::VerifyAfter)).
    pub verified_tensors: u64,
    /// Wall-clock seconds.
    pub seconds: f64,
    /// Most resident memory of the process so far, bytes; `None` where the system does not tell.
    pub peak_rss_bytes: Option<u64>,
    /// Digest of the manifest: it names the bundle. Of a part, of what it says about itself.
    pub manifest_digest: Digest,
}

/// A file that [`decompress`](super::decompress) rebuilt.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct FileReport {
    /// Name, relative.
    pub name: String,
    /// Bytes.
    pub bytes: u64,
    /// Digest of its contents (`docs/format.md` B.4), as checked.
    pub digest: Digest,
    /// SHA-256, checked, if the bundle holds one.
    pub sha256: Option<String>,
    /// Taken over from an interrupted run.
    pub resumed: bool,
    /// Bytes taken over from it, of a finished or an unfinished file.
    pub resumed_bytes: u64,
}

/// What [`decompress`](super::decompress) did.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct DecompressReport {
    /// Every file of the source, rebuilt.
    pub files: Vec<FileReport>,
    /// Tensors decoded or copied.
    pub tensors: u64,
    /// Bytes of all files.
    pub bytes: u64,
    /// Bytes of the bundle that were read.
    pub stored_bytes: u64,
    /// Wall-clock seconds.
    pub seconds: f64,
    /// Most resident memory of the process so far, bytes; `None` where the system does not tell.
    pub peak_rss_bytes: Option<u64>,
}

/// Something in a bundle that is damaged, missing or not part of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Problem {
    /// File, relative.
    pub file: String,
    /// Tensor, if it is about one.
    pub tensor: Option<String>,
    /// The stable code of the error ([`BundleError::code`]).
    pub code: &'static str,
    /// The whole message.
    pub message: String,
    /// It is about a file that the bundle does not list: nothing is wrong with what it does list.
    #[serde(skip)]
    pub is_extra: bool,
    /// The source of [`VerifyOptions::against`](super::VerifyOptions::against) differs; the bundle itself may be sound.
    pub in_source: bool,
}

impl Problem {
    pub(crate) fn new(error: &BundleError, file: &str, tensor: Option<&str>) -> Self {
        Self {
            file: file.into(),
            tensor: tensor.map(Into::into),
            code: error.code(),
            message: super::error::chain(error),
            is_extra: false,
            in_source: false,
        }
    }

    /// A file of the source that is not what the bundle was made from.
    pub(crate) fn of_source(file: &str, difference: &str) -> Self {
        Self {
            file: file.into(),
            tensor: None,
            code: "source-differs",
            message: format!("{file}: the source differs from the bundle: {difference}"),
            is_extra: false,
            in_source: true,
        }
    }
}

/// What [`verify`](super::verify) found.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct VerifyReport {
    /// Everything found wrong; empty for a sound bundle.
    pub problems: Vec<Problem>,
    /// Source files whose stored bytes were checked.
    pub files: u64,
    /// Tensors decoded and compared with their digests.
    pub tensors: u64,
    /// Bytes of the bundle read.
    pub stored_bytes: u64,
    /// Bytes decoded.
    pub original_bytes: u64,
    /// Kernels attached to the bundle that were checked.
    pub attached_kernels: u64,
    /// The source directory was compared as well.
    pub against_source: bool,
    /// Trusted comment of the signature, if a key was given and it is right.
    pub signature: Option<String>,
    /// Only the manifest, names, sizes and headers were looked at.
    pub quick: bool,
    /// Wall-clock seconds.
    pub seconds: f64,
    /// Most resident memory of the process so far, bytes; `None` where the system does not tell.
    pub peak_rss_bytes: Option<u64>,
}

impl VerifyReport {
    /// Nothing was found wrong.
    pub fn is_ok(&self) -> bool {
        self.problems.is_empty()
    }
}

pub(crate) fn totals(tensors: &[TensorReport]) -> Vec<EncodingTotal> {
    ENCODINGS
        .iter()
        .map(|encoding| {
            let encoding = encoding.id();
            let zero = EncodingTotal { encoding, tensors: 0, elements: 0, original_bytes: 0, stored_bytes: 0 };
            tensors.iter().filter(|t| t.encoding == encoding).fold(zero, |sum, t| EncodingTotal {
                encoding,
                tensors: sum.tensors + 1,
                elements: sum.elements + t.elements,
                original_bytes: sum.original_bytes + t.original_bytes,
                stored_bytes: sum.stored_bytes + t.stored_bytes,
            })
        })
        .filter(|total| total.tensors > 0)
        .collect()
}

pub(crate) fn by_role(tensors: &[TensorReport]) -> Vec<RoleTotal> {
    let total = |&role: &Role| {
        let zero = RoleTotal { role, tensors: 0, elements: 0, original_bytes: 0, stored_bytes: 0 };
        tensors.iter().filter(|t| t.role == role).fold(zero, |sum, t| RoleTotal {
            role,
            tensors: sum.tensors + 1,
            elements: sum.elements + t.elements,
            original_bytes: sum.original_bytes + t.original_bytes,
            stored_bytes: sum.stored_bytes + t.stored_bytes,
        })
    };
    Role::ALL.iter().map(total).filter(|total| total.tensors > 0).collect()
}

pub(crate) fn coded(tensors: &[TensorReport]) -> u64 {
    tensors.iter().filter(|t| t.encoding != EncodingId::RAW).count() as u64
}

/// What is saved; sizes are below 2^63.
pub(crate) fn saved(original: u64, stored: u64) -> i64 {
    original as i64 - stored as i64
}

pub(crate) fn ratio(stored: u64, original: u64) -> f64 {
    if original == 0 { 1.0 } else { stored as f64 / original as f64 }
}

/// High-water mark of resident memory, from `/proc/self/status`.
pub(crate) fn peak_rss_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}
