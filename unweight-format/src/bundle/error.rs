//! Everything that can go wrong with a model or a bundle, with file, tensor, offset, expected, got and next step.

use std::{error::Error, io, path::PathBuf};

use crate::{
    CodecError, Digest,
    bundle::{ATTACHED_NAME, Holder, Part, manifest::Version},
    safetensors::HeaderError,
};

/// The class of an error; it decides the exit status of the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorClass {
    /// The bundle is damaged or does not match: its bytes are not those that were written.
    Mismatch,
    /// The work could not be done; nothing is known to be damaged.
    Failed,
    /// The work was asked to stop.
    Interrupted,
}

/// A next step that is an option of this library. The command line words it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Remedy {
    /// Choose another output, or allow this one to be replaced
    /// ([`CompressOptions::force`](super::CompressOptions::force)).
    Overwrite,
    /// Finished files are kept: resume ([`CompressOptions::resume`](super::CompressOptions::resume)).
    Resume,
    /// The program that makes this output can resume.
    ResumeMaking,
    /// Free some space, then resume.
    FreeAndResume,
    /// Free some space, then run again from the start: no finished work is kept.
    FreeAndRepeat,
    /// Use [`CpuEncoder`](super::CpuEncoder): every encoder gives the same bytes.
    CpuEncoder,
    /// Use fewer threads ([`CompressOptions::threads`](super::CompressOptions::threads)), or allow this user more
    /// processes.
    FewerThreads,
}

/// Why a model or a bundle could not be read, written or trusted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BundleError {
    /// The encoder failed on a tensor.
    #[error("{file}, tensor '{tensor}': the encoder failed")]
    Encoder {
        /// The source file.
        file: String,
        /// The tensor.
        tensor: String,
        /// What the encoder says.
        source: super::EncoderError,
    },
    /// The system refused.
    #[error("{}: cannot {action}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// Where.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The disk has no room for the output.
    #[error("{}: about {needed_bytes} bytes are needed and {free_bytes} are free; free some space, or choose another disk", path.display())]
    NoRoom {
        /// Where.
        path: PathBuf,
        /// Bytes needed.
        needed_bytes: u64,
        /// Bytes free.
        free_bytes: u64,
    },
    /// The disk became full.
    #[error("{}: no room to write{}", path.display(), room(*needed_bytes, *free_bytes))]
    DiskFull {
        /// The file that was written.
        path: PathBuf,
        /// Bytes needed from now on.
        needed_bytes: u64,
        /// Bytes free.
        free_bytes: u64,
        /// The system's answer.
        source: io::Error,
    },
    /// The original bytes of a file could not be written to the output given.
    #[error("{file}: cannot write its bytes")]
    Output {
        /// The file of the source.
        file: String,
        /// The system's answer.
        source: io::Error,
    },
    /// A directory was expected.
    #[error("{}: not a directory; give the directory that holds the model", path.display())]
    NotADirectory {
        /// The path given.
        path: PathBuf,
    },
    /// The model has no `*.safetensors`.
    #[error("{}: no *.safetensors file inside; nothing to compress", path.display())]
    NoWeights {
        /// The source.
        path: PathBuf,
    },
    /// The output is there already.
    #[error("{}: output exists", path.display())]
    OutputExists {
        /// The output.
        path: PathBuf,
    },
    /// Source and output overlap.
    #[error("{}: the output is the source, or one is inside the other ({}); choose an output elsewhere", output.display(), input.display())]
    OutputOverlaps {
        /// The output.
        output: PathBuf,
        /// The source.
        input: PathBuf,
    },
    /// `<output>.partial` is something else.
    #[error("{}: not left by an interrupted run of this user ({reason}); move it away", path.display())]
    ForeignPartial {
        /// The directory, or what is in it.
        path: PathBuf,
        /// What tells.
        reason: &'static str,
    },
    /// The output may be replaced, and holds a bundle whose files this program does not know.
    #[error("{}: holds a bundle of format version {version} of {age} version of the program, which is not replaced; move it away, or choose another output", path.display())]
    OtherOutput {
        /// The output.
        path: PathBuf,
        /// Version found.
        version: Version,
        /// Of which kind: `a development` or `a newer`.
        age: &'static str,
    },
    /// The output may be replaced, and holds a file that would be lost.
    #[error("{}: holds '{}', which would be lost; move it away, or choose another output", path.display(), file.escape_debug())]
    NotReplaceable {
        /// The output.
        path: PathBuf,
        /// The first such file or folder.
        file: String,
    },
    /// The finished output did not get its name, and the old one not its own back.
    #[error("{}: cannot rename the finished output to its name; the old one is in {}: move it where it is safe, or run again to replace it", output.display(), old.display())]
    SetAside {
        /// The output; nothing is there.
        output: PathBuf,
        /// Where the old one is.
        old: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// Another process is writing the same output, or attaches to the same bundle.
    #[error("{}: {by} is writing here; wait for it, or end it", path.display())]
    Locked {
        /// The partial directory, or the bundle.
        path: PathBuf,
        /// Who.
        by: Holder,
    },
    /// The run was cancelled, and its output is kept for `--resume`.
    #[error("interrupted; finished files are kept in {}", partial.display())]
    Interrupted {
        /// What is kept.
        partial: PathBuf,
    },
    /// Cancelled while only reading.
    #[error("interrupted")]
    Cancelled,
    /// A file that is neither a file nor a directory, or whose name cannot be stored.
    #[error("{}: {reason}", path.display())]
    Unstorable {
        /// The path.
        path: PathBuf,
        /// Why.
        reason: &'static str,
    },
    /// A safetensors header that cannot be trusted.
    #[error("{}: not a valid safetensors file", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        source: HeaderError,
    },
    /// An index that cannot be read.
    #[error("{}: not a valid safetensors index: {reason}", path.display())]
    Index {
        /// The index.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// Index and shards disagree.
    #[error("{}: {reason}; fetch the model again, or correct the index", path.display())]
    IndexDisagrees {
        /// The index.
        path: PathBuf,
        /// How.
        reason: String,
    },
    /// A source tensor has a name that the bundle needs.
    #[error("{}: tensor '{tensor}': names with '.unweight.' or 'unweight.source_header' are reserved for bundles; is this a bundle already?", path.display())]
    ReservedTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A source file has a name that the bundle needs.
    #[error("{}: the name is reserved for bundles; is this a bundle already? (decompress it, or move the file away)", path.display())]
    ReservedFile {
        /// The file.
        path: PathBuf,
    },
    /// A file of the model has a name that attaching needs.
    #[error(
        "{}: the model has a file of this name, which is needed to attach anything; rename it in the model and \
         compress again",
        path.display()
    )]
    NameTaken {
        /// The file.
        path: PathBuf,
    },
    /// A source file changed while it was read.
    #[error("{}: changed while it was read ({change}); run again when nothing writes to it", path.display())]
    SourceChanged {
        /// The file.
        path: PathBuf,
        /// How it differs.
        change: &'static str,
    },
    /// The system could not read on.
    #[error("{}: cannot read at byte {offset}; look at the disk, or fetch the file again", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// First byte of the piece that could not be read.
        offset: u64,
        /// The system's answer.
        source: io::Error,
    },
    /// A file above a limit of the format.
    #[error("{}: {got} bytes, above the limit of {limit}; it is not what its name says", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Most bytes.
        limit: u64,
        /// Its bytes.
        got: u64,
    },
    /// A tensor that does not fit in memory.
    #[error("{}: {needed_bytes} bytes of memory are needed at once, this machine has {memory_bytes}; work on it on a larger machine", path.display())]
    Memory {
        /// The file.
        path: PathBuf,
        /// Bytes needed.
        needed_bytes: u64,
        /// Bytes of memory.
        memory_bytes: u64,
    },
    /// A header would exceed what safetensors readers accept.
    #[error(
        "{file}: the bundle's header would have {got} bytes, above the {limit} that safetensors readers accept; split the file into more shards"
    )]
    HeaderTooLarge {
        /// The file.
        file: String,
        /// Bytes it would have.
        got: u64,
        /// Most bytes allowed.
        limit: u64,
    },
    /// The manifest would exceed what is read of one.
    #[error(
        "the bundle's unweight.json would have {got} bytes or more, above the {limit} that are read of one; compress fewer files at a time"
    )]
    ManifestTooLarge {
        /// Bytes it would have at least.
        got: u64,
        /// Most bytes allowed.
        limit: u64,
    },
    /// A shape that a manifest cannot hold.
    #[error("{}: tensor '{tensor}': a shape of {got} extents, above the limit of {limit}; store it with fewer", path.display())]
    Rank {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Extents it has.
        got: usize,
        /// Most extents allowed.
        limit: usize,
    },
    /// A plan file that cannot be followed.
    #[error("{}: {reason}", path.display())]
    PlanFile {
        /// The plan file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A demo model that cannot be.
    #[error("demo model: {reason}")]
    DemoShape {
        /// Why.
        reason: String,
    },
    /// The thread pool could not be started.
    #[error("cannot start {threads} threads: {reason}")]
    Threads {
        /// Threads asked for.
        threads: usize,
        /// Why.
        reason: String,
    },
    /// Not a bundle at all.
    #[error("{}: no unweight.json inside; this is not a bundle (compress makes one)", path.display())]
    NotABundle {
        /// The directory.
        path: PathBuf,
    },
    /// Not there yet: a run has begun it.
    #[error("{}: not finished: an interrupted run, or one that still works, keeps what is done in {}", path.display(), partial.display())]
    Unfinished {
        /// The directory.
        path: PathBuf,
        /// What is kept.
        partial: PathBuf,
    },
    /// A part of a bundle.
    #[error("{}: part {part} of a bundle; merge all parts first", path.display())]
    NotMerged {
        /// The directory.
        path: PathBuf,
        /// Which part.
        part: Part,
    },
    /// Not a part of a bundle.
    #[error("{}: no unweight.part inside; pass the directories of all parts that `compress --shard` wrote", path.display())]
    NotAPart {
        /// The directory.
        path: PathBuf,
    },
    /// Nothing to merge.
    #[error("no parts to merge; pass the directories of all parts")]
    NoParts,
    /// A file of a part is not what the part says.
    #[error("{}: not a whole part", path.display())]
    Part {
        /// The part's folder.
        path: PathBuf,
        /// What is wrong.
        source: Box<BundleError>,
    },
    /// Parts that do not belong together.
    #[error("{}: made with {what} than {}; make all parts of one source, with one program and the same options", path.display(), other.display())]
    PartsDiffer {
        /// The part's folder.
        path: PathBuf,
        /// The folder of the first one.
        other: PathBuf,
        /// `other options`, `another source`.
        what: &'static str,
    },
    /// Parts of another program.
    #[error("{}: made by {creator}, whose bundles this program does not make; merge with the program that made the parts", path.display())]
    PartCreator {
        /// The part's folder.
        path: PathBuf,
        /// Program and version.
        creator: String,
    },
    /// A part that is there twice.
    #[error("{}: part {part}, as {} is; give each part once", path.display(), other.display())]
    PartTwice {
        /// Which part.
        part: Part,
        /// One folder.
        path: PathBuf,
        /// The other.
        other: PathBuf,
    },
    /// A part that is not there.
    #[error("part {part} is missing; make it, or name its folder, too")]
    PartMissing {
        /// Which part.
        part: Part,
    },
    /// Parts that cannot be signed.
    #[error(
        "{file}: its part has no SHA-256, and a signature of other digests proves nothing; make the parts with SHA-256"
    )]
    UnsignableParts {
        /// The file.
        file: String,
    },
    /// A bundle of a development version, or of an older major version.
    #[error("{}: format version {version} of a development version of the program, this one reads {supported}; compress the model again with this program", path.display())]
    OldVersion {
        /// The manifest.
        path: PathBuf,
        /// Version found.
        version: Version,
        /// Version that this program reads.
        supported: Version,
    },
    /// A bundle of a newer major version, or of a newer minor version with an encoding that this one does not know.
    #[error("{}: format version {version} is newer than this program's {supported}; update the program", path.display())]
    NewerVersion {
        /// The manifest.
        path: PathBuf,
        /// Version found.
        version: Version,
        /// Version understood.
        supported: Version,
    },
    /// The manifest is damaged.
    #[error("{}: manifest: {reason}", path.display())]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The manifest could not be signed.
    #[error("the manifest could not be signed")]
    Sign(#[source] Box<dyn Error + Send + Sync>),
    /// Not a public key.
    #[error("not a minisign public key ({reason}); give the text or the second line of a minisign.pub")]
    PublicKey {
        /// Why.
        reason: String,
    },
    /// The signature does not prove who published the bundle.
    #[error("unweight.json.minisig: {reason}")]
    Signature {
        /// Why.
        reason: &'static str,
    },
    /// A signature covers digests of a file that could be forged.
    #[error(
        "{file}: the signed manifest has no SHA-256 of this file, and other digests can be forged; sign when compressing"
    )]
    Unproven {
        /// The file.
        file: String,
    },
    /// Attached kernels that cannot be used.
    #[error("unweight.kernels: {reason}; detach the kernels, or attach them again")]
    Attached {
        /// Why.
        reason: String,
    },
    /// A part of a bundle file is not what the manifest says.
    #[error(
        "{file}: {what} at byte {offset}: expected {expected}, got {got}; the file is damaged: fetch or compress it again"
    )]
    Mismatch {
        /// The file, relative to the bundle.
        file: String,
        /// The tensor, if the part belongs to one.
        tensor: Option<Box<str>>,
        /// Tensor and section, or another part.
        what: Box<str>,
        /// First byte of the part in the file.
        offset: u64,
        /// What the manifest says.
        expected: String,
        /// What was found.
        got: String,
    },
    /// A `config.json` of another bundle.
    #[error(
        "{}: it is of another bundle: it names the weights {got}, and those of unweight.json are {expected}; fetch the \
         bundle again, all files from one place, or take quantization_config out of this file",
        path.display()
    )]
    OtherConfig {
        /// The file.
        path: PathBuf,
        /// What the weights here are called.
        expected: Digest,
        /// What it calls them.
        got: String,
    },
    /// A bundle file has another size.
    #[error("{file}: expected {expected} bytes, got {got}; the file is {}", if got < expected { "truncated" } else { "too long" })]
    FileSize {
        /// The file.
        file: String,
        /// Bytes by the manifest.
        expected: u64,
        /// Bytes found.
        got: u64,
    },
    /// A bundle file is not there.
    #[error("{file}: missing, but listed in unweight.json")]
    MissingFile {
        /// The file.
        file: String,
    },
    /// A file that the manifest does not list.
    #[error("{file}: not listed in unweight.json; it does not belong to the bundle: move it away")]
    ExtraFile {
        /// The file.
        file: String,
    },
    /// What a run that ended too early left of what it was about to attach.
    #[error(
        "{file}: an interrupted run was about to attach this; it does not belong to the bundle, and the next run that \
             attaches or detaches removes it"
    )]
    HalfAttached {
        /// The file.
        file: String,
    },
    /// Stored sections that break the tensor format.
    #[error("{file}: tensor '{tensor}' at byte {offset}")]
    Codec {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// Its first byte in the file.
        offset: u64,
        /// What is wrong.
        source: CodecError,
    },
    /// The bundle has no tensor of this name.
    #[error("no tensor '{name}' in the bundle")]
    UnknownTensor {
        /// The name.
        name: String,
    },
    /// The source had no file of this name.
    #[error("no file '{name}' in the bundle")]
    UnknownFile {
        /// The name.
        name: String,
    },
    /// Several files of the bundle have a tensor of this name.
    #[error("tensor '{name}' is in {} files ({}); name the file, too", files.len(), files.join(", "))]
    AmbiguousTensor {
        /// The name.
        name: String,
        /// The files.
        files: Vec<String>,
    },
    /// A part of a tensor was requested that is not a matrix or whose elements are not whole bytes.
    #[error("{file}: tensor '{tensor}' of shape {shape:?} is not a matrix of whole bytes; read the whole tensor")]
    PartOfNoMatrix {
        /// Relative path.
        file: String,
        /// Tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// A part was asked for that is empty, or not inside the tensor.
    #[error("{file}: tensor '{tensor}' has {of} {axis}, and no part {start}..{end}; ask for at least one of them")]
    PartOutside {
        /// Relative path.
        file: String,
        /// Tensor.
        tensor: String,
        /// `rows` or `columns`.
        axis: &'static str,
        /// First one asked for.
        start: usize,
        /// The one after the last.
        end: usize,
        /// How many the tensor has.
        of: usize,
    },
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
            Self::OutputOverlaps { .. } => "output-overlaps-source",
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
            // What is attached is written at once.
            Self::DiskFull { path, .. } if path.ends_with(ATTACHED_NAME) => Some(Remedy::FreeAndRepeat),
            Self::DiskFull { .. } => Some(Remedy::FreeAndResume),
            Self::Encoder { .. } => Some(Remedy::CpuEncoder),
            Self::Threads { .. } => Some(Remedy::FewerThreads),
            _ => None,
        }
    }

    /// Damage, failure or interruption.
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

/// How much is needed and free, as far as both are known.
fn room(needed_bytes: u64, free_bytes: u64) -> String {
    match needed_bytes {
        0 => format!(", {free_bytes} bytes are free"),
        _ => format!(", about {needed_bytes} more bytes are needed and {free_bytes} are free"),
    }
}

/// The message with its causes.
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
