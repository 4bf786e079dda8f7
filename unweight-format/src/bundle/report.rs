//! Reports of what was done or found, for people and for `--json`.

use serde::Serialize;

use super::{BundleError, Profile, Scope, StageTime, manifest::TensorEntry};
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
    /// `raw`, `huffman`, `palette`, `packed`, `compact`, `exponents`, `rans` or `planes`.
    #[serde(rename = "encoding")]
    pub encoding: EncodingId,
    /// Why it is raw, or has another encoding than requested.
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
    /// The report of a tensor of the file `file`, from its manifest entry.
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
            // The manifest was checked, so the size is known.
            original_bytes: entry.original_bytes().unwrap_or(0),
            stored_bytes: entry.stored_bytes(),
            bits_per_element: bits_per_element(entry.stored_bytes(), elements),
        }
    }
}

/// Bits per element; 0 if there are no elements.
pub(crate) fn bits_per_element(bytes: u64, elements: u64) -> f64 {
    if elements == 0 { 0.0 } else { bytes as f64 * 8.0 / elements as f64 }
}

/// Sums over the tensors of one encoding.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[non_exhaustive]
pub struct EncodingTotal {
    /// `raw`, `huffman`, `palette`, `packed`, `compact`, `exponents`, `rans` or `planes`.
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

/// A large file that is copied unchanged, or the directory of a version control system.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct LargeCopy {
    /// File, or directory of a version control system.
    pub name: String,
    /// File size, bytes.
    pub bytes: u64,
}

/// A `config.json` in a directory with weights that could not get the keys of `docs/format.md` B.9 and is copied
/// unchanged. Readers that do not know bundles may then load wrong weights without an error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct UnmarkedConfig {
    /// Path of the `config.json` (format, B.9).
    pub name: String,
    /// Why it is copied unchanged.
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

/// Predicted sizes of the bundle that one set of options would make of a model.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CompareRow {
    /// Profile compared.
    pub profile: Profile,
    /// `--scope`, or the profile's default.
    pub scope: Scope,
    /// Maximum length of a Huffman code in bits.
    pub code_limit: Option<u32>,
    /// Sums by role.
    pub roles: Vec<RoleTotal>,
    /// Predicted size of the bundle in bytes.
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
    /// A row per profile and code limit.
    pub rows: Vec<CompareRow>,
    /// Number of source files.
    pub files: u64,
    /// Bytes of all source files.
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
    /// Number of source files.
    pub files: u64,
    /// Large files copied unchanged, largest first.
    pub large_copies: Vec<LargeCopy>,
    /// Each `config.json` that cannot be marked as a bundle's.
    pub unmarked_configs: Vec<UnmarkedConfig>,
    /// Bytes of all source files.
    pub original_bytes: u64,
    /// Predicted size of the bundle in bytes.
    pub stored_bytes: u64,
    /// Number of tensors that are not raw.
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
    /// Part of `--part`, such as `2/5`, that all fields describe.
    pub part: Option<String>,
    /// Every tensor.
    pub tensors: Vec<TensorReport>,
    /// Sums by encoding.
    #[serde(rename = "encodings")]
    pub encodings: Vec<EncodingTotal>,
    /// Number of source files.
    pub files: u64,
    /// Large files copied unchanged, largest first.
    pub large_copies: Vec<LargeCopy>,
    /// Each `config.json` that cannot be marked as a bundle's.
    pub unmarked_configs: Vec<UnmarkedConfig>,
    /// Files taken over from an interrupted run.
    pub resumed_files: Vec<String>,
    /// Number of tensors taken over from unfinished files.
    pub resumed_tensors: u64,
    /// Bytes of all source files.
    pub original_bytes: u64,
    /// Bytes of all files of the bundle.
    pub stored_bytes: u64,
    /// Number of tensors that are not raw.
    pub coded_tensors: u64,
    /// `original_bytes - stored_bytes`; may be negative.
    pub saved_bytes: i64,
    /// `stored_bytes / original_bytes`.
    pub ratio: f64,
    /// Number of tensors decoded and compared after writing.
    pub verified_tensors: u64,
    /// Number of tensors stored as differences from the base.
    pub base_tensors: u64,
    /// Duration in seconds.
    pub seconds: f64,
    /// Time of each stage.
    pub stages: Vec<StageTime>,
    /// Peak resident memory in bytes, if known.
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
    /// Size of the file in bytes.
    pub bytes: u64,
    /// XXH3-128 digest, verified.
    pub digest: Digest,
    /// SHA-256, verified.
    pub sha256: Option<String>,
    /// Whether an interrupted run had completed the file.
    pub resumed: bool,
    /// Bytes taken over from an interrupted run.
    pub resumed_bytes: u64,
}

/// The report of [`decompress`](super::decompress).
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct DecompressReport {
    /// Every file of the source.
    pub files: Vec<FileReport>,
    /// Number of tensors decoded or copied.
    pub tensors: u64,
    /// Bytes of all files written.
    pub bytes: u64,
    /// Bytes of the bundle read.
    pub stored_bytes: u64,
    /// Duration in seconds.
    pub seconds: f64,
    /// Peak resident memory in bytes, if known.
    pub peak_rss_bytes: Option<u64>,
}

/// A part of a bundle that is damaged or missing, or a file that does not belong to the bundle.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Problem {
    /// The file with the problem.
    pub file: String,
    /// The tensor with the problem.
    pub tensor: Option<String>,
    /// Error code.
    pub code: &'static str,
    /// Error message, with expected and actual value.
    pub message: String,
    /// Whether the file is not listed in the bundle, so that all listed files may be sound.
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

    /// A file of the source that differs from the one that the bundle was made from.
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
    /// All problems found; empty for a sound bundle.
    pub problems: Vec<Problem>,
    /// Number of source files checked.
    pub files: u64,
    /// Number of tensors decoded and compared.
    pub tensors: u64,
    /// Bytes of the bundle read.
    pub stored_bytes: u64,
    /// Bytes decoded.
    pub original_bytes: u64,
    /// Number of attached kernels checked.
    pub attached_kernels: u64,
    /// Whether the source was compared.
    pub against_source: bool,
    /// Trusted comment of a valid signature.
    pub signature: Option<String>,
    /// Whether no weights were read.
    pub quick: bool,
    /// Duration in seconds.
    pub seconds: f64,
    /// Peak resident memory in bytes, if known.
    pub peak_rss_bytes: Option<u64>,
}

impl VerifyReport {
    /// Whether no problem was found.
    pub fn is_ok(&self) -> bool {
        self.problems.is_empty()
    }
}

/// Returns the totals of the encodings that these tensors have, in the order of the format.
pub fn encoding_totals(tensors: &[TensorReport]) -> Vec<EncodingTotal> {
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

/// The bytes saved; sizes are below 2^63, so they fit.
pub(crate) fn saved(original: u64, stored: u64) -> i64 {
    original as i64 - stored as i64
}

pub(crate) fn ratio(stored: u64, original: u64) -> f64 {
    if original == 0 { 1.0 } else { stored as f64 / original as f64 }
}

/// The peak resident memory in bytes, from `/proc/self/status`.
pub(crate) fn peak_rss_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}
