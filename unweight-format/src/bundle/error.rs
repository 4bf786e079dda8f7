//! All errors of models and bundles, with file, tensor, offset, expected and actual value, and next step.

use std::{error::Error, io, path::PathBuf};

use crate::{
    CodecError, Digest,
    bundle::{ATTACHED_NAME, Holder, Part, manifest::Version},
    safetensors::HeaderError,
};

/// The class of an error; it determines the exit status of the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorClass {
    /// The bundle is damaged or inconsistent: its bytes are not those that were written.
    Mismatch,
    /// The work could not be done; no damage was found.
    Failed,
    /// The work was cancelled.
    Interrupted,
}

/// A next step that is an option of this library. The command line words it for its users.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Remedy {
    /// Choose another output, or allow this one to be replaced
    /// ([`CompressOptions::force`](super::CompressOptions::force)).
    Overwrite,
    /// Finished files are kept: resume ([`CompressOptions::resume`](super::CompressOptions::resume)).
    Resume,
    /// Resume with the program that makes this output.
    ResumeMaking,
    /// Free some space, then resume.
    FreeAndResume,
    /// Free some space, then run again from the start: no finished work is kept.
    FreeAndRepeat,
    /// Use [`CpuEncoder`](super::CpuEncoder): all encoders produce the same bytes.
    CpuEncoder,
    /// Pass the base ([`Bundle::open_with_base`](super::Bundle::open_with_base),
    /// [`DecompressOptions::base`](super::DecompressOptions::base)), or decompress the bundle with it first.
    PassBase,
    /// Use fewer threads ([`CompressOptions::threads`](super::CompressOptions::threads)), or raise the user's limit of
    /// processes.
    FewerThreads,
}

/// Why a model or a bundle could not be read, written or verified.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BundleError {
    /// The encoder failed on a tensor.
    #[error("{file}, tensor '{tensor}': the encoder failed")]
    Encoder {
        /// Name of the source file.
        file: String,
        /// Name of the tensor.
        tensor: String,
        /// The encoder's error.
        source: super::EncoderError,
    },
    /// An operation of the file system failed.
    #[error("{}: cannot {action}", path.display())]
    Io {
        /// The operation that failed.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The disk has too little room for the output.
    #[error("{}: about {needed_bytes} bytes are needed and {free_bytes} are free; free some space, or choose another disk", path.display())]
    NoRoom {
        /// A path on the disk.
        path: PathBuf,
        /// Bytes needed.
        needed_bytes: u64,
        /// Bytes free.
        free_bytes: u64,
    },
    /// The disk became full while a file was written.
    #[error("{}: no space left to write{}", path.display(), space_note(*needed_bytes, *free_bytes))]
    DiskFull {
        /// The file that was written.
        path: PathBuf,
        /// Bytes still to be written.
        needed_bytes: u64,
        /// Bytes free.
        free_bytes: u64,
        /// The system's error.
        source: io::Error,
    },
    /// The original bytes of a file could not be written to the given output.
    #[error("{file}: cannot write its bytes")]
    Output {
        /// The file of the source.
        file: String,
        /// The system's error.
        source: io::Error,
    },
    /// The path is not a directory.
    #[error("{}: not a directory; pass the directory of the model or bundle", path.display())]
    NotADirectory {
        /// The path given.
        path: PathBuf,
    },
    /// The model contains no `*.safetensors`.
    #[error(
        "{}: no *.safetensors file inside; pass a model with .safetensors files (convert .bin or .gguf weights first)",
        path.display()
    )]
    NoWeights {
        /// Path of the source.
        path: PathBuf,
    },
    /// The output already exists.
    #[error("{}: output exists", path.display())]
    OutputExists {
        /// Path of the output.
        path: PathBuf,
    },
    /// Source and output overlap.
    #[error("{}: the output is the source, or one is inside the other ({}); choose an output elsewhere", output.display(), input.display())]
    OutputOverlaps {
        /// Path of the output.
        output: PathBuf,
        /// Path of the source.
        input: PathBuf,
    },
    /// The output is inside a bundle, which has no other files than its own.
    #[error("{}: the output is inside the bundle {}; choose an output elsewhere", output.display(), bundle.display())]
    OutputInBundle {
        /// Path of the output.
        output: PathBuf,
        /// Path of the bundle.
        bundle: PathBuf,
    },
    /// `<output>.partial` was not created by an interrupted run of this user.
    #[error("{}: not left by an interrupted run of this user ({reason}); move it away", path.display())]
    ForeignPartial {
        /// The directory, or an entry in it.
        path: PathBuf,
        /// Why it is not ours.
        reason: &'static str,
    },
    /// The output to replace is a bundle of another version, whose files this program does not know.
    #[error("{}: holds a bundle of format version {version} of {age} version of the program, which is not replaced; move it away, or choose another output", path.display())]
    OtherOutput {
        /// Path of the output.
        path: PathBuf,
        /// Version of that bundle.
        version: Version,
        /// Kind of that version: `a development` or `a newer`.
        age: &'static str,
    },
    /// The output to replace contains a file that would be lost.
    #[error("{}: holds '{}', which would be lost; move it away, or choose another output", path.display(), file.escape_debug())]
    NotReplaceable {
        /// Path of the output.
        path: PathBuf,
        /// The first such file or directory.
        file: String,
    },
    /// Neither could the finished output get its name, nor could the old one get its name back.
    #[error("{}: cannot rename the finished output to its final name; the old output is in {}: move it to a safe place, or run again to replace it", output.display(), old.display())]
    SetAside {
        /// The output, which does not exist now.
        output: PathBuf,
        /// The path of the old output.
        old: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Another process is writing the same output, or is attaching to the same bundle.
    #[error("{}: {by} is writing here; wait for it, or stop it", path.display())]
    Locked {
        /// The partial directory, or the bundle.
        path: PathBuf,
        /// The process that holds the lock.
        by: Holder,
    },
    /// The run was cancelled; its finished files are kept for `--resume`.
    #[error("interrupted; finished files are kept in {}", partial.display())]
    Interrupted {
        /// The directory of the finished files.
        partial: PathBuf,
    },
    /// A run that only reads was cancelled.
    #[error("interrupted")]
    Cancelled,
    /// The path is neither a file nor a directory, or its name cannot be stored.
    #[error("{}: {reason}", path.display())]
    Unstorable {
        /// The refused path.
        path: PathBuf,
        /// Reason of the error.
        reason: &'static str,
    },
    /// A safetensors header is invalid.
    #[error("{}: not a valid safetensors file", path.display())]
    Header {
        /// Path of the file.
        path: PathBuf,
        /// The header's error.
        source: HeaderError,
    },
    /// A safetensors index cannot be parsed.
    #[error("{}: not a valid safetensors index: {reason}", path.display())]
    Index {
        /// Path of the index.
        path: PathBuf,
        /// Reason of the error.
        reason: String,
    },
    /// An index and its shards disagree.
    #[error("{}: {reason}; fetch the model again, or correct the index", path.display())]
    IndexDisagrees {
        /// Path of the index.
        path: PathBuf,
        /// How they disagree.
        reason: String,
    },
    /// The name of a source tensor is reserved for bundles.
    #[error("{}: tensor '{tensor}': names with '.unweight.' or 'unweight.source_header' are reserved for bundles; is this already a bundle?", path.display())]
    ReservedTensor {
        /// Path of the file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
    },
    /// The name of a source file is reserved for bundles.
    #[error("{}: the name is reserved for bundles; is this already a bundle? (decompress it, or move the file away)", path.display())]
    ReservedFile {
        /// Path of the file.
        path: PathBuf,
    },
    /// The model contains a file with a name that attaching needs.
    #[error(
        "{}: the model has a file of this name, which is needed to attach anything; rename it in the model and \
         compress again",
        path.display()
    )]
    NameTaken {
        /// Path of the file.
        path: PathBuf,
    },
    /// A source file changed while it was read.
    #[error("{}: changed while it was read ({change}); run again when nothing writes to it", path.display())]
    SourceChanged {
        /// Path of the file.
        path: PathBuf,
        /// How the file changed.
        change: &'static str,
    },
    /// Reading a file failed.
    #[error("{}: cannot read at byte {offset}; check the disk, or fetch the file again", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// First byte of the piece that could not be read.
        offset: u64,
        /// The system's error.
        source: io::Error,
    },
    /// A file exceeds a limit of the format.
    #[error("{}: {got} bytes, above the limit of {limit}; check that this is the right file", path.display())]
    TooLarge {
        /// Path of the file.
        path: PathBuf,
        /// Maximum size in bytes.
        limit: u64,
        /// Actual size in bytes.
        got: u64,
    },
    /// A tensor does not fit in memory.
    #[error("{}: {needed_bytes} bytes of memory are needed at once, but this machine has {memory_bytes}; use a larger machine", path.display())]
    Memory {
        /// Path of the file.
        path: PathBuf,
        /// Bytes needed.
        needed_bytes: u64,
        /// Bytes of memory of this machine.
        memory_bytes: u64,
    },
    /// A shard's header would exceed the limit of safetensors readers.
    #[error(
        "{file}: the bundle's header would have {got} bytes, above the {limit} that safetensors readers accept; split the file into more shards"
    )]
    HeaderTooLarge {
        /// Name of the file.
        file: String,
        /// Bytes of the header.
        got: u64,
        /// Maximum number of bytes.
        limit: u64,
    },
    /// The manifest would exceed the limit of readers.
    #[error(
        "the bundle's unweight.json would have {got} bytes or more, above the limit of {limit}; compress fewer files at a time"
    )]
    ManifestTooLarge {
        /// Minimum size of the manifest in bytes.
        got: u64,
        /// Maximum number of bytes.
        limit: u64,
    },
    /// A tensor's shape has too many extents.
    #[error("{}: tensor '{tensor}': {got} dimensions, above the limit of {limit}; reshape it", path.display())]
    Rank {
        /// Path of the file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Extents of the shape.
        got: usize,
        /// Maximum number of extents.
        limit: usize,
    },
    /// A plan file is invalid.
    #[error("{}: {reason}", path.display())]
    PlanFile {
        /// Path of the plan file.
        path: PathBuf,
        /// Reason of the error.
        reason: String,
    },
    /// The options of a demo model are invalid.
    #[error("demo model: {reason}")]
    DemoShape {
        /// Reason of the error.
        reason: String,
    },
    /// Threads could not be started.
    #[error("cannot start {threads} threads: {reason}")]
    Threads {
        /// Number of threads requested.
        threads: usize,
        /// Reason of the error.
        reason: String,
    },
    /// The directory is not a bundle.
    #[error("{}: no unweight.json inside, so this is not a bundle; make one: unweight compress MODEL -o BUNDLE", path.display())]
    NotABundle {
        /// Path of the directory.
        path: PathBuf,
    },
    /// The bundle is not complete: a run is writing it or was interrupted.
    #[error("{}: not finished: a running or interrupted process keeps its progress in {}", path.display(), partial.display())]
    Unfinished {
        /// Path of the directory.
        path: PathBuf,
        /// The directory of the finished files.
        partial: PathBuf,
    },
    /// The directory is a part of a bundle, not a bundle.
    #[error("{}: part {part} of a bundle; merge all parts first", path.display())]
    NotMerged {
        /// Path of the directory.
        path: PathBuf,
        /// Index and number of parts.
        part: Part,
    },
    /// The directory is not a part of a bundle.
    #[error("{}: no unweight.part inside; pass the directories of all parts that `compress --part` wrote", path.display())]
    NotAPart {
        /// Path of the directory.
        path: PathBuf,
    },
    /// No parts were given to merge.
    #[error("no parts to merge; pass the directories of all parts")]
    NoParts,
    /// A file of a part does not match the part's description.
    #[error("{}: not a whole part", path.display())]
    Part {
        /// The part's directory.
        path: PathBuf,
        /// The file's error.
        source: Box<BundleError>,
    },
    /// Parts were made from different sources, or by different programs or options.
    #[error("{}: made with {what} than {}; make all parts of one source, with one program and the same options", path.display(), other.display())]
    PartsDiffer {
        /// The part's directory.
        path: PathBuf,
        /// The directory of the first part.
        other: PathBuf,
        /// `other options`, `another source`.
        what: &'static str,
    },
    /// The parts were made by another version of the program.
    #[error("{}: made by {creator}, whose bundles this program does not write; merge with the program that made the parts", path.display())]
    PartCreator {
        /// The part's directory.
        path: PathBuf,
        /// Program and version.
        creator: String,
    },
    /// A part was given twice.
    #[error("{}: part {part}, and so is {}; pass each part once", path.display(), other.display())]
    PartTwice {
        /// Index and number of parts.
        part: Part,
        /// One of the directories.
        path: PathBuf,
        /// The other directory.
        other: PathBuf,
    },
    /// A part is missing.
    #[error("part {part} is missing; make it with --part {part}, or pass its directory")]
    PartMissing {
        /// Index and number of parts.
        part: Part,
    },
    /// Parts without SHA-256 cannot be signed.
    #[error("{file}: its part has no SHA-256, and other digests can be forged; make the parts with SHA-256")]
    UnsignableParts {
        /// Name of the file.
        file: String,
    },
    /// The bundle has a development version, or an older major version.
    #[error("{}: format version {version} of a development version of the program, a different format; this program reads {supported}: compress the model again with this program", path.display())]
    OldVersion {
        /// Path of the manifest.
        path: PathBuf,
        /// Version of the bundle.
        version: Version,
        /// Version that this program reads.
        supported: Version,
    },
    /// The bundle has a newer major version, or a newer minor version with an unknown encoding.
    #[error("{}: format version {version} is newer than this program's {supported}; update the program", path.display())]
    NewerVersion {
        /// Path of the manifest.
        path: PathBuf,
        /// Version of the bundle.
        version: Version,
        /// Version that this program reads.
        supported: Version,
    },
    /// The manifest is damaged.
    #[error("{}: manifest: {reason}", path.display())]
    Manifest {
        /// Path of the manifest.
        path: PathBuf,
        /// Reason of the error.
        reason: String,
    },
    /// The manifest could not be signed.
    #[error("cannot sign the manifest")]
    Sign(#[source] Box<dyn Error + Send + Sync>),
    /// The text is not a minisign public key.
    #[error("not a minisign public key ({reason}); pass the text or the second line of a minisign.pub")]
    PublicKey {
        /// Reason of the error.
        reason: String,
    },
    /// The signature is missing or invalid.
    #[error("unweight.json.minisig: {reason}")]
    Signature {
        /// Reason of the error.
        reason: &'static str,
    },
    /// The signed manifest contains no SHA-256 of a file, which could therefore be forged.
    #[error(
        "{file}: the signed manifest has no SHA-256 of this file, and other digests can be forged; sign when compressing"
    )]
    Unproven {
        /// Name of the file.
        file: String,
    },
    /// The attached kernels are invalid.
    #[error("unweight.kernels: {reason}; detach the kernels, or attach them again")]
    Attached {
        /// Reason of the error.
        reason: String,
    },
    /// A part of a bundle file does not match the manifest.
    #[error(
        "{file}: {what} at byte {offset}: expected {}{expected}, got {got}; the file is damaged: fetch or compress it again",
        kind_of(expected)
    )]
    Mismatch {
        /// The file, relative to the bundle.
        file: String,
        /// The tensor, if the part belongs to one.
        tensor: Option<Box<str>>,
        /// The part, such as tensor and section.
        what: Box<str>,
        /// First byte of the part in the file.
        offset: u64,
        /// The value in the manifest.
        expected: String,
        /// The actual value.
        got: String,
    },
    /// A `config.json` belongs to another bundle.
    #[error(
        "{}: it belongs to another bundle: it names the weights {got}, but those of unweight.json are {expected}; fetch \
         all files of the bundle again from one place, or remove quantization_config from this file",
        path.display()
    )]
    OtherConfig {
        /// Path of the file.
        path: PathBuf,
        /// The digest of this bundle's weights.
        expected: Digest,
        /// The digest in the `config.json`.
        got: String,
    },
    /// Some tensors of the bundle are differences from those of another model, which was not given.
    #[error("{}: it is stored as differences from the base '{name}' (digest {digest}), and cannot be read without it", path.display())]
    NeedsBase {
        /// Path of the bundle.
        path: PathBuf,
        /// Name of the base's directory.
        name: String,
        /// Digest of the base.
        digest: Digest,
    },
    /// The base given is not the one that the bundle was made with.
    #[error(
        "{}: not the base of this bundle: tensor '{tensor}' must have digest {expected}, but here it is {got}; pass the \
         base that the bundle was compressed with", path.display()
    )]
    WrongBase {
        /// Path of the base.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Digest of the tensor in the right base.
        expected: Digest,
        /// Digest in this one, or that there is none.
        got: String,
    },
    /// A base is a bundle with a base.
    #[error(
        "{}: it is itself stored as differences from the base '{name}' (digest {digest}); decompress it, and pass the \
         result as base", path.display()
    )]
    BaseHasBase {
        /// Path of the base.
        path: PathBuf,
        /// Name of its base's directory.
        name: String,
        /// Digest of its base.
        digest: Digest,
    },
    /// A bundle file has a different size than in the manifest.
    #[error("{file}: expected {expected} bytes, got {got}; the file is {}", if got < expected { "truncated" } else { "too long" })]
    FileSize {
        /// Name of the file.
        file: String,
        /// Bytes in the manifest.
        expected: u64,
        /// Actual bytes.
        got: u64,
    },
    /// A file of the manifest is missing.
    #[error("{file}: missing, but listed in unweight.json")]
    MissingFile {
        /// Name of the file.
        file: String,
    },
    /// A file that the manifest does not list.
    #[error("{file}: not listed in unweight.json; it does not belong to the bundle: move it away")]
    ExtraFile {
        /// Name of the file.
        file: String,
    },
    /// An interrupted run left a file that it was about to attach.
    #[error(
        "{file}: left by an interrupted run that attached it; it does not belong to the bundle, and the next run that \
             attaches or detaches removes it"
    )]
    HalfAttached {
        /// Name of the file.
        file: String,
    },
    /// Stored sections violate the tensor format.
    #[error("{file}: tensor '{tensor}' at byte {offset}")]
    Codec {
        /// Name of the file.
        file: String,
        /// Name of the tensor.
        tensor: String,
        /// The tensor's first byte in the file.
        offset: u64,
        /// The codec's error.
        source: CodecError,
    },
    /// The bundle contains no tensor of this name.
    #[error("no tensor '{name}' in the bundle")]
    UnknownTensor {
        /// The requested name.
        name: String,
    },
    /// The source contained no file of this name.
    #[error("no file '{name}' in the bundle; unweight.json lists its files")]
    UnknownFile {
        /// The requested name.
        name: String,
    },
    /// Several files of the bundle contain a tensor of this name.
    #[error("tensor '{name}' is in {} files ({}); pass the file, too", files.len(), files.join(", "))]
    AmbiguousTensor {
        /// The requested name.
        name: String,
        /// Names of these files.
        files: Vec<String>,
    },
    /// A part was requested of a tensor that is not a matrix, or whose elements are not whole bytes.
    #[error("{file}: tensor '{tensor}' of shape {shape:?} is not a matrix of whole bytes; read the whole tensor")]
    PartOfNoMatrix {
        /// Relative path.
        file: String,
        /// Name of the tensor.
        tensor: String,
        /// Shape of the tensor.
        shape: Vec<usize>,
    },
    /// The requested part of a tensor is empty or exceeds the tensor.
    #[error("{file}: tensor '{tensor}' has {of} {axis}, and no part {start}..{end}; request at least one of them")]
    PartOutside {
        /// Relative path.
        file: String,
        /// Name of the tensor.
        tensor: String,
        /// `rows` or `columns`.
        axis: &'static str,
        /// First row or column requested.
        start: usize,
        /// End of the request, exclusive.
        end: usize,
        /// Rows or columns of the tensor.
        of: usize,
    },
}

/// Returns what a value of [`BundleError::Mismatch`] is, if it does not say so itself.
fn kind_of(value: &str) -> &'static str {
    if value.parse::<Digest>().is_ok() { "digest " } else { "" }
}

impl BundleError {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Encoder { .. } => "encoder-failed",
            Self::Io { source, .. } => io_code(source),
            Self::NoRoom { .. } | Self::DiskFull { .. } => "disk-full",
            Self::Output { .. } => "output-write-failed",
            Self::NotADirectory { .. } => "not-a-directory",
            Self::NoWeights { .. } => "no-weights",
            Self::OutputExists { .. } => "output-exists",
            Self::OutputOverlaps { .. } | Self::OutputInBundle { .. } => "output-overlaps-source",
            Self::ForeignPartial { .. } => "partial-output-foreign",
            Self::OtherOutput { .. } | Self::NotReplaceable { .. } => "output-not-replaceable",
            Self::SetAside { .. } => "output-not-renamed",
            Self::Locked { .. } => "output-locked",
            Self::Interrupted { .. } | Self::Cancelled => "interrupted",
            Self::Unstorable { .. } => "file-not-storable",
            Self::Header { source, .. } => source.code(),
            Self::Index { .. } => "index-invalid",
            Self::IndexDisagrees { .. } => "index-disagrees",
            Self::ReservedTensor { .. } => "tensor-name-reserved",
            Self::ReservedFile { .. } => "file-name-reserved",
            Self::NameTaken { .. } => "attached-name-taken",
            Self::SourceChanged { .. } => "source-changed",
            Self::Read { .. } => "read-failed",
            Self::TooLarge { .. } => "file-too-large",
            Self::Memory { .. } => "memory-insufficient",
            Self::HeaderTooLarge { .. } => "bundle-header-too-large",
            Self::ManifestTooLarge { .. } => "manifest-too-large",
            Self::Rank { .. } => "too-many-dimensions",
            Self::PlanFile { .. } => "plan-file-invalid",
            Self::DemoShape { .. } => "demo-model-invalid",
            Self::Threads { .. } => "threads-unavailable",
            Self::NotABundle { .. } => "not-a-bundle",
            Self::Unfinished { .. } => "bundle-unfinished",
            Self::NotMerged { .. } => "bundle-not-merged",
            Self::NotAPart { .. } => "not-a-part",
            Self::NoParts => "no-parts",
            Self::Part { source, .. } => source.code(),
            Self::PartsDiffer { .. } => "parts-differ",
            Self::PartCreator { .. } => "part-creator-unsupported",
            Self::PartTwice { .. } => "part-given-twice",
            Self::PartMissing { .. } => "part-missing",
            Self::UnsignableParts { .. } => "parts-without-sha256",
            Self::NewerVersion { .. } => "unsupported-format-version",
            Self::OldVersion { .. } => "bundle-too-old",
            Self::Manifest { .. } => "manifest-invalid",
            Self::Sign(_) => "signing-failed",
            Self::PublicKey { .. } => "public-key-invalid",
            Self::Signature { .. } => "signature-invalid",
            Self::Unproven { .. } => "signature-without-sha256",
            Self::Attached { .. } => "attached-invalid",
            Self::Mismatch { .. } => "bundle-content-mismatch",
            Self::OtherConfig { .. } => "config-of-another-bundle",
            Self::NeedsBase { .. } => "base-needed",
            Self::WrongBase { .. } => "base-wrong",
            Self::BaseHasBase { .. } => "base-has-base",
            Self::FileSize { .. } => "bundle-file-size-mismatch",
            Self::MissingFile { .. } => "bundle-file-missing",
            Self::ExtraFile { .. } => "bundle-file-unlisted",
            Self::HalfAttached { .. } => "attach-unfinished",
            Self::Codec { source, .. } => source.code(),
            Self::UnknownTensor { .. } => "tensor-not-found",
            Self::UnknownFile { .. } => "file-not-found",
            Self::AmbiguousTensor { .. } => "tensor-ambiguous",
            Self::PartOfNoMatrix { .. } => "tensor-not-sliceable",
            Self::PartOutside { .. } => "slice-out-of-range",
        }
    }

    /// The next step, if it is an option of this library.
    pub fn remedy(&self) -> Option<Remedy> {
        match self {
            Self::OutputExists { .. } => Some(Remedy::Overwrite),
            Self::Interrupted { .. } => Some(Remedy::Resume),
            Self::Unfinished { .. } => Some(Remedy::ResumeMaking),
            // Attached files are always written as a whole, so there is nothing to resume.
            Self::DiskFull { path, .. } if path.ends_with(ATTACHED_NAME) => Some(Remedy::FreeAndRepeat),
            Self::DiskFull { .. } => Some(Remedy::FreeAndResume),
            Self::Encoder { .. } => Some(Remedy::CpuEncoder),
            Self::Threads { .. } => Some(Remedy::FewerThreads),
            Self::NeedsBase { .. } => Some(Remedy::PassBase),
            _ => None,
        }
    }

    /// The class of the error.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Manifest { .. }
            | Self::Mismatch { .. }
            | Self::OtherConfig { .. }
            | Self::FileSize { .. }
            | Self::MissingFile { .. }
            | Self::ExtraFile { .. }
            | Self::HalfAttached { .. }
            | Self::Signature { .. }
            | Self::Unproven { .. }
            | Self::Attached { .. }
            | Self::Codec { .. } => ErrorClass::Mismatch,
            Self::Part { source, .. } => source.class(),
            Self::Interrupted { .. } | Self::Cancelled => ErrorClass::Interrupted,
            _ => ErrorClass::Failed,
        }
    }

    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }
}

/// The stable code of an error of the operating system.
pub fn io_code(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => "path-not-found",
        io::ErrorKind::AlreadyExists => "output-exists",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => "permission-denied",
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "disk-full",
        io::ErrorKind::FileTooLarge => "file-size-limit",
        io::ErrorKind::NotADirectory => "not-a-directory",
        _ => "io-failed",
    }
}

/// The bytes needed and free, as far as they are known.
fn space_note(needed_bytes: u64, free_bytes: u64) -> String {
    match needed_bytes {
        0 => format!(", {free_bytes} bytes are free"),
        _ => format!(", about {needed_bytes} more bytes are needed and {free_bytes} are free"),
    }
}

/// The message followed by the messages of all causes.
pub(crate) fn chain(error: &BundleError) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
