//! MatVANS' matrix-vector products, and one from uncoded int8: `kernels/matvans.cuh`.

use unweight_codegen::{ExternalSource, abi::ArgsInfo, args, plan::SmemPlan, spec::Arch};
use unweight_rt::{DeviceBuffer, DeviceError, KernelSet, LaunchError, Stream, raw::device::ExternalKernel};

use super::HEADERS;
use crate::matvans::{Encoded, Layout, Tables};

const WARPS: u32 = 4;
const PARTS: u32 = Layout::Rows.parts() as u32;
const THREADS: u32 = 32 * WARPS;
const RING_WORDS: u32 = 256;

args! {
    /// Arguments of all kernels of this format.
    pub struct MatvansArgs {
        /// u32 `[word_count]`, 16-byte aligned.
        pub words: u64,
        /// u32 `[streams]`: where each stream begins, in units of 16 bytes.
        pub offsets: u64,
        /// u32 `[128]`, for lanes `[256]`: the output of [`parts`].
        pub parts: u64,
        /// int8 `[rows, cols]`: read by `dense` only.
        pub dense: u64,
        /// int8 `[cols]`, 16-byte aligned.
        pub x: u64,
        /// int8 `[rows]`, written.
        pub y: u64,
        /// u32: incremented for each stream that ran out of words.
        pub faults: u64,
        /// Words of all streams.
        pub word_count: u64,
        /// Number of streams, each of one row or of 32.
        pub streams: u32,
        /// The number of rows.
        pub rows: u32,
        /// Columns, a multiple of 128 for rows, of 4 for stripes, of 512 for lanes, and of 16 for `dense`.
        pub cols: u32,
        /// The factor of all sums.
        pub scale: f32,
    }
}

fn coded(arch: Arch, function: &'static str, summary: &'static str) -> ExternalSource {
    ExternalSource {
        family: "matvans",
        variant: function.to_owned(),
        arch,
        summary,
        grid: "a warp a stream",
        function,
        header: "rivals/matvans.cuh",
        headers: HEADERS,
        constants: vec![("kParts", PARTS), ("kRing", RING_WORDS)],
        args: ArgsInfo::of::<MatvansArgs>(),
        smem: SmemPlan::new().section("table", PARTS, 4, 16).section("rings", WARPS, 4 * RING_WORDS, 16),
        threads: THREADS,
        blocks_per_sm: 8,
    }
}

/// Returns the kernel for streams of one row.
pub fn rows(arch: Arch) -> ExternalSource {
    coded(arch, "rows", "int8 [cols] x rANS rows -> int8 [rows].")
}

/// Returns the kernel for streams of 32 rows.
pub fn stripes(arch: Arch) -> ExternalSource {
    coded(arch, "stripes", "int8 [cols] x rANS stripes -> int8 [rows].")
}

/// Returns the kernel for streams of one row in which each coder has its own words: MatVANS' WarpPerRow.
pub fn lanes(arch: Arch) -> ExternalSource {
    let parts = Layout::Lanes.parts() as u32;
    ExternalSource {
        constants: vec![("kParts", parts), ("kRing", 0)],
        smem: SmemPlan::new().section("table", parts, 4, 16),
        ..coded(arch, "lanes", "int8 [cols] x rANS lanes -> int8 [rows].")
    }
}

/// Returns the kernel for uncoded int8 weights. It is not part of MatVANS, but the baseline of its kernels.
pub fn dense(arch: Arch) -> ExternalSource {
    ExternalSource {
        constants: vec![("kParts", 0), ("kRing", 0)],
        smem: SmemPlan::new(),
        grid: "a warp a row",
        ..coded(arch, "dense", "int8 [cols] x int8 [rows, cols] -> int8 [rows].")
    }
}

/// Returns the tables in the kernels' layout. Each entry is the value of a part, and that value's first part and count.
pub fn parts(tables: &Tables) -> Vec<u32> {
    let part = |part: usize| {
        let value = u32::from(tables.symbols[part] as u8);
        value | u32::from(tables.firsts[part]) << 8 | u32::from(tables.counts[part]) << 16
    };
    (0..tables.symbols.len()).map(part).collect()
}

/// Scales and rounds a sum to an element of the product, as the kernels do.
pub fn round(sum: i32, scale: f32) -> i8 {
    (sum as f32 * scale).round_ties_even().clamp(-128.0, 127.0) as i8
}

/// A matrix on a device, in the layout of its file.
#[derive(Debug)]
pub struct DeviceMatvans {
    words: DeviceBuffer<u32>,
    offsets: DeviceBuffer<u32>,
    parts: DeviceBuffer<u32>,
    layout: Layout,
    rows: u32,
    cols: u32,
}

impl DeviceMatvans {
    /// Copies a matrix to the device. Damaged streams are found by the kernel.
    ///
    /// # Errors
    /// Tables or offsets do not match the shape, or the device has too little memory.
    pub fn upload(stream: &Stream, matrix: &Encoded) -> Result<Self, DeviceError> {
        let (step, col_step) = matrix.layout.steps();
        let tables = &matrix.tables;
        let expected = matrix.layout.parts() as u64;
        for got in [tables.symbols.len(), tables.firsts.len(), tables.counts.len()].map(|len| len as u64) {
            if got != expected {
                return Err(LaunchError::Elements { buffer: "tables", got, expected }.into());
            }
        }
        let expected = (matrix.rows / step) as u64;
        let got = matrix.offsets.len() as u64;
        if got != expected || !matrix.rows.is_multiple_of(step) || !matrix.cols.is_multiple_of(col_step) {
            return Err(LaunchError::Elements { buffer: "offsets", got, expected }.into());
        }
        let extent = |what, value: usize| {
            u32::try_from(value).map_err(|_| LaunchError::TooLarge {
                what,
                value: value as u64,
                limit: u32::MAX.into(),
            })
        };
        Ok(Self {
            words: DeviceBuffer::from_host(stream, &matrix.words)?,
            offsets: DeviceBuffer::from_host(stream, &matrix.offsets)?,
            parts: DeviceBuffer::from_host(stream, &parts(&matrix.tables))?,
            layout: matrix.layout,
            rows: extent("rows", matrix.rows)?,
            cols: extent("columns", matrix.cols)?,
        })
    }

    /// Returns the bytes of words, offsets and tables.
    pub fn bytes(&self) -> u64 {
        (self.words.bytes() + self.offsets.bytes() + self.parts.bytes()) as u64
    }
}

/// The kernels on a device.
#[derive(Debug)]
pub struct MatvansKernels {
    rows: ExternalKernel,
    stripes: ExternalKernel,
    lanes: ExternalKernel,
    dense: ExternalKernel,
    faults: DeviceBuffer<u32>,
}

impl MatvansKernels {
    /// Compiles the kernels, or loads them from the cache.
    ///
    /// # Errors
    /// The device or the compiler is unavailable or failed.
    pub fn of(stream: &Stream, kernels: &KernelSet) -> Result<Self, DeviceError> {
        let arch = kernels.device().info().arch;
        Ok(Self {
            rows: ExternalKernel::of(kernels, rows(arch))?,
            stripes: ExternalKernel::of(kernels, stripes(arch))?,
            lanes: ExternalKernel::of(kernels, lanes(arch))?,
            dense: ExternalKernel::of(kernels, dense(arch))?,
            faults: DeviceBuffer::zeroed(stream, 1)?,
        })
    }

    /// Enqueues `y = clamp(round(scale * W x))` from a coded matrix.
    ///
    /// # Errors
    /// A vector does not have the matrix's extents, or an operand is on another device.
    pub fn multiply(
        &self,
        stream: &Stream,
        matrix: &DeviceMatvans,
        x: &DeviceBuffer<i8>,
        scale: f32,
        y: &mut DeviceBuffer<i8>,
    ) -> Result<(), DeviceError> {
        let kernel = match matrix.layout {
            Layout::Rows => &self.rows,
            Layout::Stripes => &self.stripes,
            Layout::Lanes => &self.lanes,
        };
        check(kernel, (matrix.rows, matrix.cols), x, y)?;
        check_device(kernel, &matrix.words)?;
        let streams = matrix.offsets.len() as u32;
        let args = MatvansArgs {
            words: matrix.words.address(),
            offsets: matrix.offsets.address(),
            parts: matrix.parts.address(),
            x: x.address(),
            y: y.address(),
            faults: self.faults.address(),
            word_count: matrix.words.len() as u64,
            streams,
            rows: matrix.rows,
            cols: matrix.cols,
            scale,
            ..MatvansArgs::default()
        };
        // SAFETY: words and offsets are passed with the counts that bound them, and the vectors have the matrix's
        // extents. Dropping a buffer waits for the kernel.
        unsafe { kernel.launch(stream, streams.div_ceil(WARPS), &args) }
    }

    /// Enqueues the same product from uncoded int8 `[rows, cols]`, with a multiple of 16 columns.
    ///
    /// # Errors
    /// Those of [`MatvansKernels::multiply`].
    pub fn multiply_dense(
        &self,
        stream: &Stream,
        matrix: &DeviceBuffer<i8>,
        x: &DeviceBuffer<i8>,
        scale: f32,
        y: &mut DeviceBuffer<i8>,
    ) -> Result<(), DeviceError> {
        // The check below compares both with the matrix.
        let (rows, cols) = (y.len() as u32, x.len() as u32);
        let (got, expected) = (matrix.len() as u64, y.len() as u64 * x.len() as u64);
        if got != expected {
            return self.dense.refuse(LaunchError::Elements { buffer: "the matrix", got, expected });
        }
        if !cols.is_multiple_of(16) {
            return self.dense.refuse(LaunchError::Columns { operand: "the matrix", cols, of: 16, max: u32::MAX });
        }
        check(&self.dense, (rows, cols), x, y)?;
        check_device(&self.dense, matrix)?;
        let (dense, x, y) = (matrix.address(), x.address(), y.address());
        let args = MatvansArgs { dense, x, y, rows, cols, scale, ..MatvansArgs::default() };
        // SAFETY: as above.
        unsafe { self.dense.launch(stream, rows.div_ceil(WARPS), &args) }
    }

    /// Returns how many streams ran out of words so far. Waits for the stream.
    ///
    /// # Errors
    /// The driver failed.
    pub fn faults(&self, stream: &Stream) -> Result<u32, DeviceError> {
        Ok(self.faults.to_host(stream)?.first().copied().unwrap_or(0))
    }
}

fn check(
    kernel: &ExternalKernel,
    (rows, cols): (u32, u32),
    x: &DeviceBuffer<i8>,
    y: &DeviceBuffer<i8>,
) -> Result<(), DeviceError> {
    for (buffer, vector, expected) in [("x", x, cols), ("y", y, rows)] {
        let (got, expected) = (vector.len() as u64, u64::from(expected));
        if got != expected {
            return kernel.refuse(LaunchError::Elements { buffer, got, expected });
        }
        check_device(kernel, vector)?;
    }
    Ok(())
}

fn check_device<T>(kernel: &ExternalKernel, buffer: &DeviceBuffer<T>) -> Result<(), DeviceError> {
    let (own, other) = (kernel.device().ordinal(), buffer.device().ordinal());
    if own == other { Ok(()) } else { kernel.refuse(LaunchError::OtherDevice { operand: "an operand", own, other }) }
}
