//! Errors of device operations. Invalid operands are rejected before anything is enqueued, by an error that names the
//! operand, its value, the limit and what to do next.

use unweight_codegen::{
    CodegenError,
    plan::GemmShape,
    spec::{DecodeElement, DecodeOutput, Epilogue, RouteSpec},
};
use unweight_format::{CodecError, Float};

use crate::{device::context_size::ContextSize, jit::remedy::Remedy};

/// Why an operation on the device failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// A library is missing, or a kernel could not be compiled or found.
    #[error(transparent)]
    Toolchain(#[from] crate::Error),
    /// A variant cannot exist or be rendered.
    #[error(transparent)]
    Codegen(#[from] CodegenError),
    /// Data read from or written to the device are not a valid tensor.
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// A driver call failed.
    #[error("{call}: {text}")]
    Driver {
        /// The purpose of the call.
        call: &'static str,
        /// The driver's status (`CUresult`).
        code: u32,
        /// The driver's name and description of the status.
        text: String,
    },
    /// The device has too little free memory.
    #[error(
        "cannot allocate {bytes} bytes on the device, {free} bytes are free; stop other programs on this GPU, or use a \
         smaller batch, a shorter context or a smaller model"
    )]
    Room {
        /// Bytes of the allocation.
        bytes: u64,
        /// Free bytes, possibly not contiguous.
        free: u64,
    },
    /// The host has too little memory that can be pinned.
    #[error("cannot allocate {bytes} bytes of pinned host memory; free host memory and try again")]
    HostRoom {
        /// Bytes of the allocation.
        bytes: u64,
    },
    /// A cuBLAS call failed.
    #[error("{call}: cuBLAS status {status}")]
    Cublas {
        /// The function.
        call: &'static str,
        /// cuBLAS's status.
        status: String,
    },
    /// The device has a compute capability without kernels.
    #[error(
        "{name} has compute capability {major}.{minor}; kernels exist for 8.0, 8.6, 8.9, 9.0, 10.0, 10.3 and 12.0 \
         (Ampere to Blackwell)"
    )]
    Arch {
        /// The device's name.
        name: String,
        /// Major number of its compute capability.
        major: i32,
        /// Minor number.
        minor: i32,
    },
    /// The device ordinal does not exist.
    #[error("device {ordinal} does not exist: {count} devices are visible; check CUDA_VISIBLE_DEVICES")]
    Ordinal {
        /// The ordinal, from 0.
        ordinal: usize,
        /// Visible devices.
        count: usize,
    },
    /// A kernel does not support its operands. Nothing was enqueued.
    #[error("{kernel}: {refusal}")]
    Kernel {
        /// The name of the kernel variant.
        kernel: String,
        /// The operand and the violated limit.
        refusal: LaunchError,
    },
    /// An operation does not support its operands. Nothing was enqueued.
    #[error(transparent)]
    Operand(#[from] LaunchError),
    /// Metadata of a tile point outside their section. The decoder skipped the tile.
    #[error(
        "tile {tile} of a tensor has metadata that points outside its section, so its output is invalid; verify \
         the bundle"
    )]
    Fault {
        /// The last reported tile.
        tile: u32,
    },
    /// A row of a batch names a token, a row or a page that does not exist. The kernel skipped it.
    #[error("row {row} of a batch: {what}")]
    Row {
        /// The last reported row.
        row: u32,
        /// The kind of fault.
        what: RowFault,
    },
}

/// A fault that a kernel found in a row of its batch, in values that only the device reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RowFault {
    /// An entry of a list of rows that is not a row of the matrix.
    #[error("the list of rows names a row that the matrix does not have; its output was set to zeros")]
    Source,
    /// An entry of a page table that is not a page of the KV cache, or a table that ends too early.
    #[error("its page table names a page that the KV cache does not have, or is too short; the page was skipped")]
    Page,
    /// A token id outside the vocabulary.
    #[error("its token id is not below the rows of the embedding; its embedding was set to zeros")]
    Token,
    /// Logits that are all NaN.
    #[error("its logits are all NaN; token 0 was chosen")]
    Logits,
}

impl RowFault {
    /// All faults, in the order of an execution context's fault words, of which the first is reported. A row of NaN,
    /// which an engine accepts, faults as `Token` and `Logits`: they must not hide another fault.
    pub(crate) const ALL: [Self; 4] = [Self::Source, Self::Page, Self::Token, Self::Logits];
}

/// The driver's status for an allocation that does not fit.
const OUT_OF_MEMORY: u32 = cudarc::driver::sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32;

impl DeviceError {
    /// Returns the stable code of this error; docs/reference/errors.md lists all.
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

    /// Turns the out-of-memory status of an allocation into the error that `describe` returns.
    pub(super) fn or_out_of_memory(self, describe: impl FnOnce() -> Self) -> Self {
        match self {
            Self::Driver { code: OUT_OF_MEMORY, .. } => describe(),
            error => error,
        }
    }

    /// Returns the rejected operand, if the operation failed because of one.
    pub fn launch_error(&self) -> Option<&LaunchError> {
        match self {
            Self::Kernel { refusal, .. } | Self::Operand(refusal) => Some(refusal),
            _ => None,
        }
    }

    /// Returns the next step, if one action resolves the error.
    pub fn remedy(&self) -> Option<Remedy> {
        match self {
            Self::Toolchain(error) => error.remedy(),
            Self::Kernel { refusal: LaunchError::ArgumentBytes { .. } | LaunchError::Artifact { .. }, .. } => {
                Some(Remedy::ClearKernelCache)
            }
            Self::Fault { .. } => Some(Remedy::VerifyBundle),
            _ => None,
        }
    }
}

/// An operand or compiled kernel that prevents a launch. Shapes are `[rows, columns]` in elements.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    // ---- products ----
    /// The shapes of a product do not match.
    #[error("Y{y:?} = X{x:?} * W{w:?}^T: the shapes do not match; Y is [m, n], X is [m, k], W is [n, k]")]
    Shape {
        /// The output.
        y: [u64; 2],
        /// The input.
        x: [u64; 2],
        /// The weights, `[n, k]`.
        w: [u64; 2],
    },
    /// An extent is not a multiple of the kernel's tile.
    #[error("{extent} = {value} must be a multiple of {of}; pad the weights")]
    Multiple {
        /// The extent, such as `n` or `k`.
        extent: &'static str,
        /// The value.
        value: u32,
        /// The tile: the extent must be a multiple.
        of: u32,
    },
    /// A batch larger than the layer was loaded for.
    #[error("the batch has {m} rows, but the layer was loaded for at most {max_batch}; raise LoadOptions::max_batch")]
    Batch {
        /// Batch rows.
        m: u32,
        /// The maximum batch of the layer.
        max_batch: u32,
    },
    /// An epilogue that a layer was not loaded for.
    #[error("the layer was not loaded for epilogue {}; use {}", .asked.tag(), .loaded.tag())]
    Epilogue {
        /// The epilogue of the call.
        asked: Epilogue,
        /// An epilogue that the layer was loaded for.
        loaded: Epilogue,
    },
    /// The weights have escapes, and the kernel does not read escapes.
    #[error("the kernel does not read escapes, but the tensor has some; use a variant with _esc")]
    Escapes,
    /// A tile has more verbatim rows than the kernel supports.
    #[error(
        "the kernel supports {room} verbatim rows per tile, but the weights have up to {rows}; use a variant with more"
    )]
    VerbatimRows {
        /// The maximum number of verbatim rows per tile of the kernel.
        room: u32,
        /// The maximum number of verbatim rows in a tile of the weights.
        rows: u32,
    },
    /// The weights have another source than the kernel reads.
    #[error("the kernel reads weights from {takes}, got {got}; use a variant for {got}")]
    Source {
        /// The kernel's source: `exponent` or `palette`.
        takes: &'static str,
        /// The source of the weights.
        got: &'static str,
    },

    // ---- activations ----
    /// The head size differs from the kernel's.
    #[error("the kernel supports heads of {takes} elements, got {got}; use the variant for heads of {got}")]
    HeadSize {
        /// Elements per head of the kernel.
        takes: u32,
        /// Elements per head of the KV cache.
        got: u32,
    },
    /// A QKV matrix whose columns do not match its heads.
    #[error(
        "QKV has {cols} columns; {heads} query heads, {kv_heads} key heads and {kv_heads} value heads of {head_dim} \
         elements need {}", (u64::from(*.heads) + 2 * u64::from(*.kv_heads)) * u64::from(*.head_dim)
    )]
    Heads {
        /// Columns of QKV.
        cols: u32,
        /// Query heads.
        heads: u32,
        /// Key heads, and as many value heads.
        kv_heads: u32,
        /// Elements of a head.
        head_dim: u32,
    },
    /// Kernels do not support the rotated part of a head.
    #[error("rope_dim = {rope_dim} must be a multiple of 4 from 4 to {head_dim}, the elements of a head")]
    RopeDim {
        /// Rotated elements of a head.
        rope_dim: u32,
        /// Elements of a head.
        head_dim: u32,
    },
    /// Rows are past the last position of a table.
    #[error("{what} ends at position {limit}, but the rows end at {end}; extend {what}")]
    Positions {
        /// One past the last row's position.
        end: u64,
        /// The table that is too short.
        what: &'static str,
        /// The number of positions in the table.
        limit: u64,
    },
    /// Routing does not support this number of experts, or of experts per token.
    #[error(
        "routing supports 1 to {} experts and 1 to {} per token, got {experts} with {top_k} per token",
        RouteSpec::EXPERTS_MAX,
        RouteSpec::TOP_K_MAX
    )]
    Experts {
        /// The number of experts.
        experts: u32,
        /// Experts per token.
        top_k: u32,
    },
    /// A factor of chosen experts for a router without a correction bias.
    #[error("the factor of chosen experts is {0}, which needs a router with a correction bias; use 1")]
    RoutedScale(f32),
    /// A kernel does not support this number of columns.
    #[error("{operand} has {cols} columns; the kernel supports multiples of {of} up to {max}; pad {operand}")]
    Columns {
        /// The matrix.
        operand: &'static str,
        /// Columns of the matrix.
        cols: u32,
        /// The columns must be a multiple of this.
        of: u32,
        /// The maximum number of columns.
        max: u32,
    },
    /// A gate and an up projection whose shape does not match the activated output.
    #[error("x{x:?} must have as many rows as y{y:?} and twice as many columns: first the gate, then the up")]
    Gated {
        /// Gate and up, next to each other.
        x: [u64; 2],
        /// The activated output.
        y: [u64; 2],
    },
    /// A vocabulary larger than the embedding table.
    #[error("the vocabulary has {vocabulary} ids, but the embedding has {rows} rows; use the model's vocabulary")]
    Vocabulary {
        /// Token ids.
        vocabulary: u32,
        /// Rows of the table.
        rows: u64,
    },
    /// The sampling kernel does not support the vocabulary.
    #[error("the logits have {cols} columns; the sampling kernel supports 1 to {max}")]
    Logits {
        /// Columns of the logits.
        cols: u32,
        /// The maximum number of columns.
        max: u32,
    },
    /// No kernel supports the head size.
    #[error("head_dim = {head_dim} must be a multiple of 16 from 16 to 256")]
    HeadDim {
        /// Elements of a head.
        head_dim: u32,
    },

    /// The kernel is for another head size than that of the KV cache.
    #[error(
        "the kernel supports heads of {takes} elements, but the KV cache has heads of {cache}; use the variant for \
         heads of {cache}"
    )]
    HeadDimOf {
        /// Elements per head of the kernel.
        takes: u32,
        /// Elements per head of the KV cache.
        cache: u32,
    },
    /// Two KV caches have different heads.
    #[error(
        "the packed KV cache has {} KV heads of {} elements, but the BF16 pages have {} of {}; create both for the \
         same model",
        packed[0],
        packed[1],
        bf16[0],
        bf16[1]
    )]
    KvHeads {
        /// KV heads and elements per head of the packed cache.
        packed: [u32; 2],
        /// KV heads and elements per head of the BF16 pages.
        bf16: [u32; 2],
    },
    /// The kernel is for another kind of step.
    #[error("the kernel supports step = {takes}, not {asked}; use a variant for step = {asked}")]
    Step {
        /// The kernel's step.
        takes: &'static str,
        /// The step of the call.
        asked: &'static str,
    },
    /// The kernel does not support this split of the KV cache.
    #[error(
        "the kernel supports 1 to {limit} parts per row, got {parts}; more than one part needs a variant with split"
    )]
    Parts {
        /// Parts per row.
        parts: u32,
        /// The maximum number of parts of the kernel.
        limit: u32,
    },
    /// A page table that ends before the last token.
    #[error(
        "{tokens} tokens of a sequence need more than the {pages} pages of 64 tokens in its page table; extend \
         the table"
    )]
    Pages {
        /// Tokens of the sequence, up to the last of the chunk.
        tokens: u64,
        /// Entries of the page table.
        pages: u32,
    },
    /// A QKV matrix and an output whose columns do not match the KV heads.
    #[error(
        "QKV{qkv:?} and output{out:?} do not fit {kv_heads} KV heads of {head_dim} elements: the output must have 1 to \
         16 heads per KV head, and QKV two more heads per KV head than the output"
    )]
    AttentionHeads {
        /// Shape of QKV.
        qkv: [u64; 2],
        /// Shape of the output.
        out: [u64; 2],
        /// Key heads, and as many value heads.
        kv_heads: u32,
        /// Elements of a head.
        head_dim: u32,
    },
    /// A rotary table whose columns do not fit a head.
    #[error(
        "the rotary table has {cols} columns for heads of {head_dim} elements; the columns must be even and at most \
         half of a head"
    )]
    Rotary {
        /// Columns of the cosines.
        cols: u32,
        /// Elements of a head.
        head_dim: u32,
    },

    // ---- views ----
    /// A matrix is larger than its memory.
    #[error(
        "a matrix [{rows}, {cols}] with pitch {pitch} needs {need} elements, but the buffer has {have}; use a larger \
         buffer"
    )]
    Extent {
        /// Rows.
        rows: u32,
        /// The number of columns.
        cols: u32,
        /// The pitch: elements from one row to the next.
        pitch: u64,
        /// Elements that the matrix needs; `u64::MAX` if that does not fit 64 bits.
        need: u64,
        /// Elements of the buffer.
        have: u64,
    },
    /// The pitch is smaller than a row.
    #[error("rows of {cols} elements overlap at pitch {pitch}; the pitch must be at least {cols}")]
    PitchBelowColumns {
        /// The number of columns.
        cols: u32,
        /// The pitch: elements from one row to the next.
        pitch: u64,
    },
    /// The operation does not support the pitch.
    #[error("{operand} has pitch {pitch}, which must be {wanted}; copy it to a separate matrix")]
    Pitch {
        /// The operand, such as `x`.
        operand: &'static str,
        /// The pitch: elements from one row to the next.
        pitch: u64,
        /// The violated rule.
        wanted: PitchRule,
    },
    /// An address that is not aligned for the kernel's copies.
    #[error("{operand} begins at {address:#x}, which is not {bytes}-byte aligned; copy it to an aligned buffer")]
    Alignment {
        /// The operand, such as `x`.
        operand: &'static str,
        /// Device address.
        address: u64,
        /// The alignment in bytes.
        bytes: u64,
    },
    /// An output that overlaps an input.
    #[error("{written} overlaps {other}, so the kernel would read what it writes; use a separate buffer for {written}")]
    Overlap {
        /// The output.
        written: &'static str,
        /// The input that it overlaps.
        other: &'static str,
    },
    /// An operand on another device than the kernel.
    #[error("{operand} is on device {other}, but the kernel is on device {own}; copy it to device {own}")]
    OtherDevice {
        /// The operand.
        operand: &'static str,
        /// The device of the kernel.
        own: usize,
        /// The device of the operand.
        other: usize,
    },
    /// An output whose shape is not that of its source.
    #[error("the output has shape {output:?}, but its source has shape {tensor:?}; the shapes must be equal")]
    Output {
        /// Shape of the output.
        output: [u64; 2],
        /// Shape of the source.
        tensor: [u64; 2],
    },
    /// A buffer of the caller is too small.
    #[error("{buffer}: {need} needed, {have} provided; provide a larger buffer")]
    Room {
        /// The buffer, with its unit.
        buffer: &'static str,
        /// What the operation needs.
        need: u64,
        /// What the buffer has.
        have: u64,
    },
    /// A buffer whose length does not match a shape.
    #[error("{buffer} has {got} elements, but the shape needs {expected}")]
    Elements {
        /// The buffer or section.
        buffer: &'static str,
        /// Elements of the buffer.
        got: u64,
        /// Elements of the shape.
        expected: u64,
    },
    /// A section ends inside a value.
    #[error("{section} has {bytes} B, which is not a multiple of {unit} B; the bundle is damaged")]
    Partial {
        /// The section.
        section: &'static str,
        /// Bytes of the section.
        bytes: u64,
        /// Bytes of one value.
        unit: u64,
    },
    /// A range outside a buffer or a matrix.
    #[error("the range of {len} elements from {at} is outside 0..{have}")]
    Range {
        /// The first element, row or column.
        at: u64,
        /// Length of the range.
        len: u64,
        /// Elements, rows or columns that exist.
        have: u64,
    },
    /// A count does not fit a kernel's counters or the address space.
    #[error("{what} = {value} exceeds the limit of {limit}; split the matrix")]
    TooLarge {
        /// The counted quantity.
        what: &'static str,
        /// The count.
        value: u64,
        /// The maximum.
        limit: u64,
    },

    // ---- contexts and launches ----
    /// The execution context has too little memory for the launch.
    #[error(
        "needs an execution context of {need}, but this one has {have}; call ExecContext::reserve with the layer's \
         size first"
    )]
    ContextTooSmall {
        /// The size that the launch needs.
        need: ContextSize,
        /// The size of the context.
        have: ContextSize,
    },
    /// An allocation or a measurement during a capture.
    #[error("an execution context cannot grow or be tuned while its stream is captured; do it before the capture")]
    Capturing,
    /// Experts in host memory cannot be fetched during a capture.
    #[error(
        "experts in host memory cannot be captured, because the host copies the experts that a router chose; enqueue \
         them outside a capture, or keep all experts on the device"
    )]
    Fetching,
    /// A grid that cannot be launched.
    #[error(
        "m = {}, n = {}, k = {} needs more than 2^31 - 1 blocks, or has fewer than {cluster} steps of 64 in k, one per \
         block of a cluster; split the matrix or use a variant with a smaller cluster",
        .problem.m, .problem.n, .problem.k
    )]
    Grid {
        /// The problem.
        problem: GemmShape,
        /// Blocks per cluster.
        cluster: u32,
    },
    /// A cooperative grid has more blocks than can be resident on the device.
    #[error(
        "{blocks} blocks wait for each other, but the device runs only {resident} at once; use a variant without \
         stream-K"
    )]
    CooperativeGrid {
        /// Blocks of the grid.
        blocks: u32,
        /// The maximum number of resident blocks.
        resident: u32,
    },
    /// Arguments of another kernel family.
    #[error("the kernel does not accept {given}; pass the argument struct of its family")]
    Arguments {
        /// The argument struct of the call.
        given: &'static str,
    },
    /// The layer in borrowed memory is not packed.
    #[error("the layer is not packed; only packed layers run in the memory of another framework")]
    NotPacked,
    /// The kernel belongs to another family.
    #[error("the kernel is not {wanted}; load a variant that is")]
    Family {
        /// The kernels that the operation launches.
        wanted: &'static str,
    },
    /// The decoder writes another output.
    #[error("the decoder writes {}, not {}; use a decoder of {}", .writes.tag(), .asked.tag(), .asked.tag())]
    Decodes {
        /// The kernel's output.
        writes: DecodeOutput,
        /// The output of the call.
        asked: DecodeOutput,
    },
    /// The decoder writes another element type.
    #[error(
        "the decoder writes {}, but the tensor holds {}; use a decoder of {}",
        .writes.tag(), .tensor.tag(), .tensor.tag()
    )]
    DecodesElement {
        /// The kernel's element type.
        writes: DecodeElement,
        /// The tensor's element type.
        tensor: DecodeElement,
    },
    /// `exponents` cannot store the element type.
    #[error("`exponents` cannot store {}; compress the tensor as BF16", .float.name())]
    NotExponents {
        /// The element type.
        float: Float,
    },
    /// The tensor has longer codes than the decoder supports.
    #[error(
        "the kernel decodes codes of up to {limit} bits, but the tensor has codes of {bits}; use a variant for longer \
         codes"
    )]
    CodeBits {
        /// The maximum code length of the kernel in bits.
        limit: u32,
        /// The maximum code length of the tensor in bits.
        bits: u32,
    },

    // ---- artifacts ----
    /// The artifact is of another variant or architecture.
    #[error("the compiled kernel is {found}, not {wanted}; clear the kernel cache")]
    Artifact {
        /// The artifact's variant or architecture.
        found: String,
        /// The variant or architecture of the request.
        wanted: String,
    },
    /// The artifact has the arguments of another version.
    #[error(
        "the compiled kernel expects {takes} B of arguments, but this version passes {passes} B; clear the kernel cache"
    )]
    ArgumentBytes {
        /// Bytes of arguments that the artifact expects.
        takes: u64,
        /// Bytes of arguments that this version passes.
        passes: u64,
    },
    /// The kernel needs more shared memory per block than the device has.
    #[error("a block needs {need} B of shared memory, but the device has {limit} B; use a variant with fewer stages")]
    SharedMemory {
        /// Bytes per block that the kernel needs.
        need: u64,
        /// Bytes per block that the device has.
        limit: u64,
    },
    /// The plan has more threads per block than the compiled kernel supports.
    #[error(
        "the plan has {planned} threads per block, but the compiled kernel runs with at most {runs}; use a smaller \
         variant"
    )]
    Threads {
        /// Threads per block of the plan.
        planned: u32,
        /// The driver's limit for the kernel.
        runs: u32,
    },

    // ---- tensor maps ----
    /// A tensor map cannot describe the matrix.
    #[error("tensor map [{rows}, {cols}]: {value} must be {rule}")]
    TensorMap {
        /// Rows of the matrix.
        rows: u64,
        /// The number of columns.
        cols: u64,
        /// The invalid value.
        value: u64,
        /// The violated rule.
        rule: MapRule,
    },
}

impl LaunchError {
    /// Returns the stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        match self {
            Self::ArgumentBytes { .. } | Self::Artifact { .. } => "kernel-artifact-mismatch",
            _ => "invalid-operand",
        }
    }
}

/// The pitch that an operation requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PitchRule {
    /// Exactly the number of columns: rows are contiguous.
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
    /// Alignment of the address.
    Aligned,
    /// The number of rows and columns.
    Extent,
    /// The pitch in bytes.
    Pitch,
    /// The side of a box.
    BoxSide,
    /// The bytes in a row of a box.
    BoxRow,
}

impl std::fmt::Display for MapRule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Aligned => "an address that is 16-byte aligned",
            Self::Extent => "an extent of 1..=2^32",
            Self::Pitch => "a pitch in bytes that is a multiple of 16 below 2^40; pad the columns",
            Self::BoxSide => "the side of a box, 1..=256",
            Self::BoxRow => "the bytes of a box row: a multiple of 16, at most 128 with the swizzle",
        })
    }
}

impl ContextSize {
    /// Checks that this is enough for `need`.
    ///
    /// # Errors
    /// [`LaunchError::ContextTooSmall`] if a field of `need` is larger.
    pub fn check(self, need: Self) -> Result<(), LaunchError> {
        if self.max(need) == self { Ok(()) } else { Err(LaunchError::ContextTooSmall { need, have: self }) }
    }
}
