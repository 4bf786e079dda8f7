//! What the runtime refuses, and why: every error before a launch is one of these, with the numbers that do not agree.

use unweight_codegen::{
    CodegenError,
    plan::GemmShape,
    spec::{DecodeElement, DecodeOutput, Epilogue, RouteSpec},
};
use unweight_format::{CodecError, Float};

use crate::{device::workspace::LaneSize, remedy::Remedy};

/// Why something on the device did not happen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// A library is missing, or a kernel could not be compiled or found.
    #[error(transparent)]
    Toolchain(#[from] crate::Error),
    /// A variant cannot exist or be rendered.
    #[error(transparent)]
    Codegen(#[from] CodegenError),
    /// What came back from the device, or was to go there, is no valid tensor.
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// The driver refused a call.
    #[error("{call}: {text}")]
    Driver {
        /// What was asked for.
        call: &'static str,
        /// The driver's status.
        code: u32,
        /// The driver's words for it.
        text: String,
    },
    /// The device has no room.
    #[error(
        "{bytes} bytes do not fit on the device, where {free} are free; stop what else runs there, or ask for less: a \
         smaller batch, a shorter context, or a smaller model"
    )]
    Room {
        /// What was asked for.
        bytes: u64,
        /// What is free, in pieces maybe.
        free: u64,
    },
    /// The host has no room that can be locked.
    #[error("{bytes} bytes of page-locked memory are not to be had; free some of the host's memory, or ask for less")]
    HostRoom {
        /// What was asked for.
        bytes: u64,
    },
    /// cuBLAS refused a call.
    #[error("{call}: cuBLAS status {status}")]
    Cublas {
        /// What was asked for.
        call: &'static str,
        /// cuBLAS's status.
        status: String,
    },
    /// No kernel is made for such a device.
    #[error(
        "{name} has compute capability {major}.{minor}; kernels exist for 8.0, 8.6, 8.9, 9.0, 10.0, 10.3 and 12.0 (Ampere to Blackwell)"
    )]
    Arch {
        /// The device's name.
        name: String,
        /// Major number of its compute capability.
        major: i32,
        /// Minor number.
        minor: i32,
    },
    /// There is no device of this number.
    #[error("device {ordinal} does not exist; this machine has {count} (CUDA_VISIBLE_DEVICES hides some)")]
    Ordinal {
        /// What was asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// A kernel does not take what it was given. Nothing was enqueued.
    #[error("{kernel}: {refusal}")]
    Kernel {
        /// The variant.
        kernel: String,
        /// Why.
        refusal: Refusal,
    },
    /// An operation does not take what it was given. Nothing was enqueued.
    #[error(transparent)]
    Operand(#[from] Refusal),
    /// A decoder met metadata that lead out of their sections and left the tile out.
    #[error("tile {tile} of a decoded tensor has metadata that leave their section; its output is not valid")]
    Fault {
        /// The last such tile to be reported.
        tile: u32,
    },
    /// A row of a batch asked for what is not there, and was left out. Its output is zeros.
    #[error("row {row} of a batch: {what}")]
    Row {
        /// The last such row to be reported.
        row: u32,
        /// What it asked for.
        what: RowFault,
    },
}

/// What a kernel met in a row of its batch, among numbers that only the device knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RowFault {
    /// An id outside of the vocabulary.
    #[error("its token id is not below the rows of the embedding; its embedding was set to zeros")]
    Token,
    /// An entry of a list of rows.
    #[error("the list of rows names a row that the matrix does not have; its output was set to zeros")]
    Source,
    /// An entry of a page table.
    #[error("its page table names a page that the KV cache does not have, or is too short; the page was left out")]
    Page,
    /// Logits that are no numbers.
    #[error("its logits are all NaN; token 0 was chosen")]
    Logits,
}

impl RowFault {
    /// All of them, in the order in which a lane keeps them.
    pub(crate) const ALL: [Self; 4] = [Self::Token, Self::Source, Self::Page, Self::Logits];
}

/// What the driver says of an allocation that has no room.
const OUT_OF_MEMORY: u32 = cudarc::driver::sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32;

impl DeviceError {
    /// The stable code of this error; docs/cli.md lists all.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Toolchain(error) => error.code(),
            Self::Codegen(error) => error.code(),
            Self::Codec(error) => error.code(),
            Self::Driver { .. } => "cuda-driver-failed",
            Self::Room { .. } => "device-memory-insufficient",
            Self::HostRoom { .. } => "pinned-memory-insufficient",
            Self::Cublas { .. } => "cublas-failed",
            Self::Arch { .. } => "unsupported-gpu",
            Self::Ordinal { .. } => "device-not-found",
            Self::Kernel { refusal, .. } => refusal.code(),
            Self::Operand(refusal) => refusal.code(),
            Self::Fault { .. } => "device-tile-invalid",
            Self::Row { .. } => "device-row-invalid",
        }
    }

    /// Of an allocation: what there was no room for, if that is why it failed.
    pub(super) fn of_room(self, room: impl FnOnce() -> Self) -> Self {
        match self {
            Self::Driver { code: OUT_OF_MEMORY, .. } => room(),
            error => error,
        }
    }

    /// Why operands were refused, if that is what this is.
    pub fn refusal(&self) -> Option<&Refusal> {
        match self {
            Self::Kernel { refusal, .. } | Self::Operand(refusal) => Some(refusal),
            _ => None,
        }
    }

    /// What to do about it, where one thing is to be done.
    pub fn remedy(&self) -> Option<Remedy> {
        match self {
            Self::Toolchain(error) => error.remedy(),
            Self::Kernel { refusal: Refusal::ArgumentBytes { .. } | Refusal::Artifact { .. }, .. } => {
                Some(Remedy::ClearKernelCache)
            }
            Self::Fault { .. } => Some(Remedy::VerifyBundle),
            _ => None,
        }
    }
}

/// Why operands, or a kernel's artifact, are refused. Sizes are of the operands: `[rows, columns]` in elements unless
/// said otherwise.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    // ---- products ----
    /// The operands of a product.
    #[error("Y{y:?} = X{x:?} * W{w:?}^T: the shapes do not agree")]
    Shape {
        /// The output.
        y: [u64; 2],
        /// The input.
        x: [u64; 2],
        /// The weights, `[n, k]`.
        w: [u64; 2],
    },
    /// An extent that is not a multiple of what the kernel works in.
    #[error("{extent} = {value} must be a multiple of {of}; pad the weights")]
    Multiple {
        /// `n` or `k`.
        extent: &'static str,
        /// Its value.
        value: u32,
        /// What it must be a multiple of.
        of: u32,
    },
    /// A batch above the one that a layer was loaded for.
    #[error("a batch of {m}: this layer was loaded for {max_batch} at most; raise LoadOptions::max_batch")]
    Batch {
        /// Batch rows.
        m: u32,
        /// The most that was loaded for.
        max_batch: u32,
    },
    /// An epilogue that a layer was not loaded for.
    #[error("the weights were not loaded for the epilogue {}; ask for {}", .asked.tag(), .loaded.tag())]
    Epilogue {
        /// What was asked for.
        asked: Epilogue,
        /// One that was loaded.
        loaded: Epilogue,
    },
    /// Weights with escapes, for a kernel without.
    #[error("has no escapes, the tensor has; take a variant with _esc")]
    Escapes,
    /// More verbatim rows in a tile than the kernel has room for.
    #[error("has room for {room} verbatim rows per tile, the weights have {rows}; take a variant with more")]
    VerbatimRows {
        /// Of the kernel.
        room: u32,
        /// Of the weights.
        rows: u32,
    },
    /// A kernel for another source of weights.
    #[error("takes weights as {takes}, got {got}")]
    Source {
        /// `exponent` or `palette`.
        takes: &'static str,
        /// The other.
        got: &'static str,
    },

    // ---- activations ----
    /// Heads of another size than a kernel's.
    #[error("takes heads of {takes} elements, got {got}; take the variant for them")]
    HeadSize {
        /// Of the kernel.
        takes: u32,
        /// Of the cache.
        got: u32,
    },
    /// Columns that are not those of the heads.
    #[error("{cols} columns are not those of {heads} q heads and twice {kv_heads} k and v heads of {head_dim}")]
    Heads {
        /// Columns.
        cols: u32,
        /// Q heads.
        heads: u32,
        /// K heads, and V heads.
        kv_heads: u32,
        /// Elements of a head.
        head_dim: u32,
    },
    /// A part of a head that cannot be rotated.
    #[error("rope_dim = {rope_dim} must be a multiple of 4 in 4..={head_dim}, the elements of a head")]
    RopeDim {
        /// Elements that are to be rotated.
        rope_dim: u32,
        /// Elements of a head.
        head_dim: u32,
    },
    /// More positions than there are angles or pages for.
    #[error("{what} ends at position {limit}, the rows at {end}; give it more")]
    Positions {
        /// One past the last row's position.
        end: u64,
        /// What is too short.
        what: &'static str,
        /// How many positions it has.
        limit: u64,
    },
    /// Experts, or experts of a token, that routing does not take.
    #[error(
        "{experts} experts, {top_k} of a token; routing takes 1 to {} experts and 1 to {} of a token",
        RouteSpec::EXPERTS_MAX,
        RouteSpec::TOP_K_MAX
    )]
    Experts {
        /// Experts.
        experts: u32,
        /// Of a token.
        top_k: u32,
    },
    /// Columns that a kernel does not take.
    #[error("{operand} has {cols} columns; the kernel takes multiples of {of} up to {max}")]
    Columns {
        /// The matrix.
        operand: &'static str,
        /// Its columns.
        cols: u32,
        /// What they must be a multiple of.
        of: u32,
        /// The most there may be.
        max: u32,
    },
    /// A gate and an up beside their product.
    #[error("x{x:?} must have the rows of y{y:?} and twice its columns: a gate's, then an up's")]
    Gated {
        /// Gate and up.
        x: [u64; 2],
        /// Their product.
        y: [u64; 2],
    },
    /// More ids than a table has rows.
    #[error("a vocabulary of {vocabulary}, the table has {rows} rows")]
    Vocabulary {
        /// Ids.
        vocabulary: u32,
        /// Of the table.
        rows: u64,
    },
    /// Logits of more tokens than a kernel takes, or of none.
    #[error("logits of {cols} tokens; the kernel takes 1 to {max}")]
    Logits {
        /// Tokens.
        cols: u32,
        /// The most there may be.
        max: u32,
    },
    /// A size of heads that no kernel takes.
    #[error("head_dim = {head_dim} must be a multiple of 16 in 16..=256; no kernel takes other heads")]
    HeadDim {
        /// Elements of a head.
        head_dim: u32,
    },

    /// A kernel for heads of another size than the cache has.
    #[error("takes heads of {takes}, the KV cache has heads of {cache}; take the variant for these")]
    HeadDimOf {
        /// Of the kernel.
        takes: u32,
        /// Of the cache.
        cache: u32,
    },
    /// A kernel for other tokens of a sequence.
    #[error("is for step = {takes}, not {asked}; take a variant for this step")]
    Step {
        /// What it is for.
        takes: &'static str,
        /// What was asked for.
        asked: &'static str,
    },
    /// Parts of a row that the kernel does not take.
    #[error(
        "{parts} parts of a row; this kernel takes 1 to {limit}, others of more than one need a variant with split"
    )]
    Parts {
        /// What was asked for.
        parts: u32,
        /// What it takes at most.
        limit: u32,
    },
    /// A page table that ends before the last token.
    #[error("{tokens} tokens of a sequence need more than the {pages} pages of 64 that its table has; give it more")]
    Pages {
        /// Up to the last token of the chunk.
        tokens: u64,
        /// Entries of the table.
        pages: u32,
    },
    /// Heads that do not divide the columns.
    #[error(
        "QKV{qkv:?} and A{out:?} for {kv_heads} KV heads of {head_dim}: A must have 1 to 16 times as many heads, and QKV \
         two more for each KV head"
    )]
    AttentionHeads {
        /// Of the projection.
        qkv: [u64; 2],
        /// Of the result.
        out: [u64; 2],
        /// Heads of keys and values.
        kv_heads: u32,
        /// Elements of a head.
        head_dim: u32,
    },
    /// Angles that are not for pairs of elements of a head.
    #[error(
        "angles [positions, {cols}] for heads of {head_dim}: their columns must be even, and half of a head at most"
    )]
    Rotary {
        /// Columns of the cosines.
        cols: u32,
        /// Elements of a head.
        head_dim: u32,
    },

    // ---- views ----
    /// A matrix that its memory cannot hold.
    #[error("a matrix [{rows}, {cols}] of pitch {pitch} needs {need} elements, the memory has {have}")]
    Extent {
        /// Rows.
        rows: u32,
        /// Columns.
        cols: u32,
        /// Elements from one row to the next.
        pitch: u64,
        /// What it needs; `u64::MAX` where that does not fit 64 bits.
        need: u64,
        /// What there is.
        have: u64,
    },
    /// Rows that overlap each other.
    #[error("rows of {cols} elements overlap at pitch {pitch}; the pitch must be at least the columns")]
    PitchBelowColumns {
        /// Columns.
        cols: u32,
        /// Elements from one row to the next.
        pitch: u64,
    },
    /// A pitch that the operation does not take.
    #[error("{operand} has pitch {pitch}, which must be {wanted}; copy it to a matrix of its own")]
    Pitch {
        /// `x` or `y`.
        operand: &'static str,
        /// Elements from one row to the next.
        pitch: u64,
        /// What it must be.
        wanted: PitchRule,
    },
    /// An address that copies of 16 bytes cannot begin at.
    #[error("{operand} lies at {address:#x}, which is not {bytes}-byte aligned")]
    Alignment {
        /// `x` or `y`.
        operand: &'static str,
        /// Device address.
        address: u64,
        /// What it must be a multiple of.
        bytes: u64,
    },
    /// Something that is written overlaps something that is read.
    #[error("{written} overlaps {other}: a kernel would read what it writes; give {written} memory of its own")]
    Overlap {
        /// What is written.
        written: &'static str,
        /// What it overlaps.
        other: &'static str,
    },
    /// Operands on another device than the kernel.
    #[error("{operand} is on device {other}, the kernel on device {own}")]
    OtherDevice {
        /// What is elsewhere.
        operand: &'static str,
        /// Where the kernel is.
        own: usize,
        /// Where the operand is.
        other: usize,
    },
    /// The output of a conversion has another shape than its tensor.
    #[error("output {output:?} for a tensor {tensor:?}")]
    Output {
        /// Of the output.
        output: [u64; 2],
        /// Of the tensor.
        tensor: [u64; 2],
    },
    /// Memory of the caller that is too small.
    #[error("{buffer} need room for {need}, there is room for {have}; give more")]
    Room {
        /// What needs it, in its own units.
        buffer: &'static str,
        /// How much.
        need: u64,
        /// What there is.
        have: u64,
    },
    /// A buffer that does not have the size that a tensor asks for.
    #[error("{buffer} has {got} elements, the shape asks for {expected}")]
    Elements {
        /// The buffer or section.
        buffer: &'static str,
        /// What it has.
        got: u64,
        /// What it must have.
        expected: u64,
    },
    /// Bytes that are no whole number of values.
    #[error("{section} has {bytes} B, which is no whole number of {unit} B")]
    Partial {
        /// The section.
        section: &'static str,
        /// Its bytes.
        bytes: u64,
        /// Bytes of one value.
        unit: u64,
    },
    /// A part of a buffer that it does not have.
    #[error("elements {at}..{at}+{len} of a buffer of {have}")]
    Range {
        /// The first element.
        at: u64,
        /// How many.
        len: u64,
        /// Of the buffer.
        have: u64,
    },
    /// A count that kernels or the address space cannot hold.
    #[error("{what} = {value} exceeds the limit of {limit}; split the matrix")]
    TooLarge {
        /// What is counted.
        what: &'static str,
        /// How many there are.
        value: u64,
        /// How many there may be.
        limit: u64,
    },

    // ---- lanes and launches ----
    /// A lane that was made for smaller launches.
    #[error("needs a lane of {need}, this one has {have}; reserve it for the layer first")]
    LaneTooSmall {
        /// What the launch needs.
        need: LaneSize,
        /// What the lane has.
        have: LaneSize,
    },
    /// Memory cannot be had, and nothing timed, while work is recorded.
    #[error("a lane cannot grow or be tuned while its stream is captured; do it before the capture")]
    Capturing,
    /// Who has to know what was chosen cannot be recorded.
    #[error(
        "experts in host memory are fetched by a host that knows the choice, which no capture has; enqueue them outside of \
         a capture, or keep all experts on the device"
    )]
    Fetching,
    /// A grid that cannot be launched.
    #[error(
        "m = {}, n = {}, k = {} needs more than 2^31 - 1 blocks, or has fewer than the {cluster} steps of 64 of k that a \
         cluster shares; split the matrix or take a smaller cluster",
        .problem.m, .problem.n, .problem.k
    )]
    Grid {
        /// The problem.
        problem: GemmShape,
        /// Blocks of a cluster.
        cluster: u32,
    },
    /// Blocks that wait for each other, more than run at once.
    #[error(
        "{blocks} blocks that wait for each other, of which {resident} run at once; take a variant without stream-K"
    )]
    Residency {
        /// Of the grid.
        blocks: u32,
        /// What the device holds.
        resident: u32,
    },
    /// Arguments of another family.
    #[error("takes no {given}")]
    Arguments {
        /// The argument struct.
        given: &'static str,
    },
    /// A kernel of another family.
    #[error("is not {wanted}")]
    Family {
        /// What was asked for.
        wanted: &'static str,
    },
    /// A decoder of another output.
    #[error("writes {}, asked for {}", .writes.tag(), .asked.tag())]
    Decodes {
        /// What the kernel writes.
        writes: DecodeOutput,
        /// What was asked for.
        asked: DecodeOutput,
    },
    /// A decoder to weights of another type.
    #[error("writes {}, the tensor holds {}; take the decoder of its type", .writes.tag(), .tensor.tag())]
    DecodesElement {
        /// What the kernel writes.
        writes: DecodeElement,
        /// What the tensor holds.
        tensor: DecodeElement,
    },
    /// A type that the form `exponents` does not hold.
    #[error("no tensor of exponents holds {}; take a form of BF16", .float.name())]
    NotExponents {
        /// The type.
        float: Float,
    },
    /// Longer codes than a decoder takes.
    #[error("decodes codes of up to {limit} bits, the tensor has {bits}")]
    CodeBits {
        /// Of the kernel.
        limit: u32,
        /// Of the tensor.
        bits: u32,
    },

    // ---- artifacts ----
    /// An artifact of another variant, or for another architecture.
    #[error("the artifact is {found}, wanted {wanted}")]
    Artifact {
        /// What it is.
        found: String,
        /// What was asked for.
        wanted: String,
    },
    /// An artifact whose arguments are not those of this version.
    #[error("takes {takes} B of arguments, this version passes {passes} B")]
    ArgumentBytes {
        /// By the artifact.
        takes: u64,
        /// By this version.
        passes: u64,
    },
    /// More shared memory than the device has for a block.
    #[error("shared memory {need} B exceeds the device's limit {limit} B")]
    SharedMemory {
        /// What a block needs.
        need: u64,
        /// What it may have.
        limit: u64,
    },
    /// More threads than the kernel can run with.
    #[error("{planned} threads per block planned, the kernel runs with {runs}")]
    Threads {
        /// By the plan.
        planned: u32,
        /// By the driver.
        runs: u32,
    },

    // ---- tensor maps ----
    /// A matrix that the copy engine cannot see.
    #[error("tensor map [{rows}, {cols}]: {value} is not {rule}")]
    TensorMap {
        /// Rows of the matrix.
        rows: u64,
        /// Columns.
        cols: u64,
        /// What does not fit.
        value: u64,
        /// What it must be.
        rule: MapRule,
    },
}

impl Refusal {
    /// The stable code of this error; docs/cli.md lists all.
    pub fn code(&self) -> &'static str {
        match self {
            Self::ArgumentBytes { .. } | Self::Artifact { .. } => "kernel-artifact-mismatch",
            _ => "invalid-operand",
        }
    }
}

/// What a pitch must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PitchRule {
    /// The rows follow each other without a gap.
    Columns(u32),
    /// A multiple of this many elements.
    MultipleOf(u64),
}

impl std::fmt::Display for PitchRule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Columns(cols) => write!(f, "its {cols} columns"),
            Self::MultipleOf(of) => write!(f, "a multiple of {of} elements"),
        }
    }
}

/// A rule of `cuTensorMapEncodeTiled`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MapRule {
    /// The address.
    Aligned,
    /// Rows and columns.
    Extent,
    /// Bytes from one row to the next.
    Pitch,
    /// A side of a box.
    BoxSide,
    /// Bytes of a row of a box.
    BoxRow,
}

impl std::fmt::Display for MapRule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Aligned => "an address that is 16-byte aligned",
            Self::Extent => "an extent of 1..=2^32",
            Self::Pitch => "a pitch in bytes that is a multiple of 16 below 2^40; pad the columns",
            Self::BoxSide => "a side of a box, 1..=256",
            Self::BoxRow => "bytes of a box row: a multiple of 16, at most 128 with the swizzle",
        })
    }
}
