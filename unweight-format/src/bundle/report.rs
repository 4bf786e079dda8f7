//! What was done or found, for people and for `--json`.

use serde::Serialize;

use super::{BundleError, Profile, Scope, manifest::TensorEntry};
use crate::{Digest, EncodingId, encoding::ENCODINGS, roles::Role, safetensors};

/// One tensor of a plan or a bundle.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TensorReport {
    /// Source file.
    pub file: String,
    /// Tensor name.
    pub name: String,
    /// Role in the model, by name.
    pub role: Role,
    /// Layer, by name.
    pub layer: Option<u32>,
    /// Safetensors dtype.
    pub dtype: String,
    /// Shape of the tensor.
    pub shape: Vec<usize>,
    /// `raw`, `huffman`, `palette`, `packed`, `compact` or `exponents`.
    #[serde(rename = "encoding")]
    pub encoding: EncodingId,
    /// Why it is raw or not as asked for.
    pub reason: Option<String>,
    /// Number of elements.
    pub elements: u64,
    /// Bytes in the source.
    pub original_bytes: u64,
    /// Bytes in the bundle.
    pub stored_bytes: u64,
    /// Stored bits per element.
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

/// Sums over the tensors of one encoding.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[non_exhaustive]
pub struct EncodingTotal {
    /// `raw`, `huffman`, `palette`, `packed`, `compact` or `exponents`.
    #[serde(rename = "encoding")]
    pub encoding: EncodingId,
    /// Number of tensors.
    pub tensors: u64,
    /// Number of elements.
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
    /// File, or directory of a version control system.
    pub name: String,
    /// File size, bytes.
    pub bytes: u64,
}

/// A `config.json` in a folder with weights that could not get the keys of `docs/format.md` B.9 and is copied as it is.
/// Readers that do not know bundles may then load something else without an error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct UnmarkedConfig {
    /// Path of the `config.json` (format, B.9).
    pub name: String,
    /// Reason for leaving it.
    pub reason: &'static str,
}

/// Sums over the tensors of one role.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[non_exhaustive]
pub struct RoleTotal {
    /// Role in the model, by name.
    pub role: Role,
    /// Number of tensors.
    pub tensors: u64,
    /// Number of elements.
    pub elements: u64,
    /// Bytes in the source.
    pub original_bytes: u64,
    /// Predicted bytes in the bundle.
    pub stored_bytes: u64,
}

/// Sizes of the bundle that one set of options would make of a model (predicted).
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CompareRow {
    /// Profile compared.
    pub profile: Profile,
    /// `--scope`, or the profile's default.
    pub scope: Scope,
    /// Longest Huffman code, bits.
    pub code_limit: Option<u32>,
    /// Sums by role.
    pub roles: Vec<RoleTotal>,
    /// Bundle, predicted.
    pub stored_bytes: u64,
    /// `original_bytes - stored_bytes`.
    pub saved_bytes: i64,
    /// `stored_bytes / original_bytes`.
    pub ratio: f64,
}

/// The report of [`compare`](super::compare).
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CompareReport {
    /// Profiles and code limits.
    pub rows: Vec<CompareRow>,
    /// Source files.
    pub files: u64,
    /// All source files.
    pub original_bytes: u64,
    /// Duration in seconds.
    pub seconds: f64,
}

/// The report of [`plan`](super::plan).
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PlanReport {
    /// Every tensor, with predicted sizes.
    pub tensors: Vec<TensorReport>,
    /// Sums by encoding.
    #[serde(rename = "encodings")]
    pub encodings: Vec<EncodingTotal>,
    /// Source files.
    pub files: u64,
    /// Large files copied unchanged, largest first.
    pub large_copies: Vec<LargeCopy>,
    /// Files `config.json` that cannot be marked as a bundle's.
    pub unmarked_configs: Vec<UnmarkedConfig>,
    /// All source files.
    pub original_bytes: u64,
    /// Bundle, predicted.
    pub stored_bytes: u64,
    /// Tensors that are not raw.
    pub coded_tensors: u64,
    /// `original_bytes - stored_bytes`; may be negative.
    pub saved_bytes: i64,
    /// `stored_bytes / original_bytes`.
    pub ratio: f64,
    /// Duration in seconds.
    pub seconds: f64,
}

/// The report of [`compress`](super::compress) and [`merge`](super::merge).
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CompressReport {
    /// Part of `--shard`, such as `2/5`, that all fields describe.
    pub part: Option<String>,
    /// Every tensor.
    pub tensors: Vec<TensorReport>,
    /// Sums by encoding.
    #[serde(rename = "encodings")]
    pub encodings: Vec<EncodingTotal>,
    /// Source files.
    pub files: u64,
    /// Large files copied unchanged, largest first.
    pub large_copies: Vec<LargeCopy>,
    /// Files `config.json` that cannot be marked as a bundle's.
    pub unmarked_configs: Vec<UnmarkedConfig>,
    /// Files taken over from an interrupted run.
    pub resumed_files: Vec<String>,
    /// Tensors taken over from unfinished files.
    pub resumed_tensors: u64,
    /// All source files.
    pub original_bytes: u64,
    /// All files of the bundle.
    pub stored_bytes: u64,
    /// Tensors that are not raw.
    pub coded_tensors: u64,
    /// `original_bytes - stored_bytes`; may be negative.
    pub saved_bytes: i64,
    /// `stored_bytes / original_bytes`.
    pub ratio: f64,
    /// Tensors decoded and compared after writing.
    pub verified_tensors: u64,
    /// Duration in seconds.
    pub seconds: f64,
    /// Peak resident memory, if known.
    pub peak_rss_bytes: Option<u64>,
    /// Digest of the manifest, or of a part's `unweight.part`.
    pub manifest_digest: Digest,
}

/// A file that [`decompress`](super::decompress) rebuilt.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct FileReport {
    /// Relative path.
    pub name: String,
    /// Size of the file.
    pub bytes: u64,
    /// XXH3-128 digest, checked.
    pub digest: Digest,
    /// SHA-256 digest, checked.
    pub sha256: Option<String>,
    /// Whether an interrupted run had finished it.
    pub resumed: bool,
    /// Bytes taken over.
    pub resumed_bytes: u64,
}

/// The report of [`decompress`](super::decompress).
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct DecompressReport {
    /// Every file of the source.
    pub files: Vec<FileReport>,
    /// Tensors decoded or copied.
    pub tensors: u64,
    /// All files written.
    pub bytes: u64,
    /// Bytes of the bundle read.
    pub stored_bytes: u64,
    /// Duration in seconds.
    pub seconds: f64,
    /// Peak resident memory, if known.
    pub peak_rss_bytes: Option<u64>,
}

/// A part of a bundle that is damaged or missing, or a file that does not belong to the bundle.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Problem {
    /// Damaged file.
    pub file: String,
    /// Damaged tensor.
    pub tensor: Option<String>,
    /// Error code.
    pub code: &'static str,
    /// Difference, expected and found.
    pub message: String,
    /// Whether the problem is about a file that the bundle does not list, so that every listed file may be sound.
    #[serde(skip)]
    pub is_extra: bool,
    /// Whether only the source of `--against` differs.
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

/// The report of [`verify`](super::verify).
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct VerifyReport {
    /// What is wrong; empty for a sound bundle.
    pub problems: Vec<Problem>,
    /// Source files checked.
    pub files: u64,
    /// Tensors decoded and compared.
    pub tensors: u64,
    /// Bytes of the bundle read.
    pub stored_bytes: u64,
    /// Bytes decoded.
    pub original_bytes: u64,
    /// Attached kernels checked.
    pub attached_kernels: u64,
    /// Whether the source was compared.
    pub against_source: bool,
    /// Trusted comment of a valid signature.
    pub signature: Option<String>,
    /// Whether no weights were read.
    pub quick: bool,
    /// Duration in seconds.
    pub seconds: f64,
    /// Peak resident memory, if known.
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
