//! Decompresses ZipServ's matrices on a device, or multiplies from them: `kernels/zipserv.cuh`.

use unweight_codegen::{ExternalSource, abi::ArgsInfo, args, plan::SmemPlan, spec::Arch};
use unweight_rt::{
    DeviceBuffer, DeviceError, DeviceMatrix, ExecContext, KernelSet, LaunchError, Stream, raw::device::ExternalKernel,
};

use super::{Error, HEADERS};
use crate::zipserv::{BLOCK, Encoded};

const WARPS: u32 = 4;
const THREADS: u32 = 32 * WARPS;
/// Shared memory for the coded data of a block, including reads past its end.
const CODED_ROOM: u32 = 16 + 2 * (BLOCK * BLOCK) as u32 + 48;
/// Batch rows of a tile of the fused product.
pub const BATCH_TILES: [u32; 5] = [8, 16, 32, 64, 128];
/// The largest batch of the fused product.
pub const FUSED_MAX: u32 = 128;
/// The largest batch for which [`ZipKernels::multiply`] uses the fused product. On an H200 with 14336x4096, it takes 96
/// us at 32 rows, where decompression and cuBLAS take 101 us, and 155 us at 128 rows, where they take 103 us. Batches
/// in between were not measured (docs/rivals.md). ZipServ uses it up to 128.
pub const FUSED_BEST: u32 = 32;
/// The maximum number of splits of k.
const SPLITS_MAX: u32 = 8;

args! {
    /// Arguments of all kernels of this format.
    pub struct ZipservArgs {
        /// u64 `[64 * blocks]`: bit 0 of the codes.
        pub map0: u64,
        /// Bit 1 of the codes, in the layout of `map0`.
        pub map1: u64,
        /// Bit 2 of the codes, in the layout of `map0`.
        pub map2: u64,
        /// u8 `[high_bytes]`.
        pub sign_mantissa: u64,
        /// bf16 `[full_elements]`.
        pub full: u64,
        /// u32 `[blocks + 1, 2]`.
        pub blocks: u64,
        /// u32 `[4 * blocks, 2]`.
        pub strips: u64,
        /// bf16 `[rows, cols]`: written by `decompress`.
        pub weights: u64,
        /// bf16 `[batch, cols]`: read by `gemm`.
        pub x: u64,
        /// bf16 `[batch, rows]`: written by `gemm` with one split, and by `reduce`.
        pub y: u64,
        /// f32 `[splits, batch, rows]`: written by `gemm`, read by `reduce`.
        pub sums: u64,
        /// u32: incremented for each block or strip that was skipped.
        pub faults: u64,
        /// Bytes of `sign_mantissa`.
        pub high_bytes: u32,
        /// Elements of `full`.
        pub full_elements: u32,
        /// First exponent of the window.
        pub first: u32,
        /// Output features, a multiple of 64.
        pub rows: u32,
        /// Input features, a multiple of 64.
        pub cols: u32,
        /// Batch rows.
        pub batch: u32,
        /// Splits of k.
        pub splits: u32,
        /// Must be 0.
        pub reserved: u32,
    }
}

fn base(arch: Arch, function: &'static str, summary: &'static str, grid: &'static str) -> ExternalSource {
    ExternalSource {
        family: "zipserv",
        variant: function.to_owned(),
        arch,
        summary,
        grid,
        function,
        header: "rivals/zipserv.cuh",
        headers: HEADERS,
        constants: vec![("kBatchTile", 0), ("kStages", 2)],
        args: ArgsInfo::of::<ZipservArgs>(),
        smem: SmemPlan::new(),
        threads: THREADS,
        blocks_per_sm: 8,
    }
}

/// Returns the kernel that writes the weights.
pub fn decompress(arch: Arch) -> ExternalSource {
    let smem = SmemPlan::new().section("stages", 2, CODED_ROOM, 16);
    ExternalSource { smem, ..base(arch, "decompress", "TCA-TBE -> bf16 [n, k], row-major.", "what fits the machine") }
}

/// Returns the kernel that multiplies up to `batch_tile` batch rows.
pub fn gemm(arch: Arch, batch_tile: u32) -> ExternalSource {
    let stage = CODED_ROOM + batch_tile * BLOCK as u32 * 2;
    ExternalSource {
        variant: format!("gemm_b{batch_tile}"),
        constants: vec![("kBatchTile", batch_tile), ("kStages", 2)],
        smem: SmemPlan::new().section("stages", 2, stage, 16),
        // The number that compiles without spills.
        blocks_per_sm: match batch_tile {
            8 | 16 => 6,
            32 => 4,
            64 => 3,
            _ => 2,
        },
        ..base(arch, "gemm", "bf16 x TCA-TBE -> bf16, or fp32 sums.", "n / 64 * splits")
    }
}

/// Returns the kernel that adds the partial sums of the splits.
pub fn reduce(arch: Arch) -> ExternalSource {
    ExternalSource {
        constants: vec![("kBatchTile", 0), ("kStages", 0)],
        ..base(arch, "reduce", "fp32 sums -> bf16.", "ceil(batch * n / 128)")
    }
}

/// A matrix on a device, in the layout of its file.
#[derive(Debug)]
pub struct DeviceZip {
    maps: [DeviceBuffer<u64>; 3],
    sign_mantissa: DeviceBuffer<u8>,
    full: DeviceBuffer<u16>,
    blocks: DeviceBuffer<u32>,
    strips: DeviceBuffer<u32>,
    first: u32,
    rows: u32,
    cols: u32,
}

impl DeviceZip {
    /// Checks a matrix and copies it to the device.
    ///
    /// # Errors
    /// The matrix is damaged, or the device has too little memory.
    pub fn upload(stream: &Stream, matrix: &Encoded) -> Result<Self, Error> {
        matrix.check()?;
        Ok(Self::upload_any(stream, matrix)?)
    }

    /// Copies parts of the right sizes with any contents, to test how the kernels handle them.
    #[doc(hidden)]
    pub fn upload_any(stream: &Stream, matrix: &Encoded) -> Result<Self, DeviceError> {
        let maps = [0, 1, 2].map(|map| DeviceBuffer::from_host(stream, &matrix.bitmaps[map]));
        let [map0, map1, map2] = maps;
        Ok(Self {
            maps: [map0?, map1?, map2?],
            sign_mantissa: DeviceBuffer::from_host(stream, &matrix.sign_mantissa)?,
            full: DeviceBuffer::from_host(stream, &matrix.full)?,
            blocks: DeviceBuffer::from_host(stream, matrix.blocks.as_flattened())?,
            strips: DeviceBuffer::from_host(stream, matrix.strips.as_flattened())?,
            first: matrix.first.into(),
            // The encoder checked that the product is below 2^31.
            rows: matrix.rows as u32,
            cols: matrix.cols as u32,
        })
    }

    /// Returns rows and columns.
    pub fn shape(&self) -> [u32; 2] {
        [self.rows, self.cols]
    }

    /// Returns the bytes of the matrix's parts.
    pub fn bytes(&self) -> u64 {
        let maps: usize = self.maps.iter().map(DeviceBuffer::bytes).sum();
        (maps + self.sign_mantissa.bytes() + self.full.bytes() + self.blocks.bytes() + self.strips.bytes()) as u64
    }

    fn args(&self) -> ZipservArgs {
        ZipservArgs {
            map0: self.maps[0].address(),
            map1: self.maps[1].address(),
            map2: self.maps[2].address(),
            sign_mantissa: self.sign_mantissa.address(),
            full: self.full.address(),
            blocks: self.blocks.address(),
            strips: self.strips.address(),
            high_bytes: self.sign_mantissa.len() as u32,
            full_elements: self.full.len() as u32,
            first: self.first,
            rows: self.rows,
            cols: self.cols,
            ..ZipservArgs::default()
        }
    }
}

/// The kernels of this format on a device, with shared buffers. All launches of one value must use the same stream.
#[derive(Debug)]
pub struct ZipKernels {
    decompress: ExternalKernel,
    gemms: Vec<(u32, ExternalKernel)>,
    reduce: ExternalKernel,
    sums: DeviceBuffer<u32>,
    faults: DeviceBuffer<u32>,
}

impl ZipKernels {
    /// Compiles the kernels, or loads them from the cache. Allocates sums for products of up to `rows` output features
    /// and [`FUSED_MAX`] batch rows.
    ///
    /// # Errors
    /// The device or the compiler is unavailable or failed.
    pub fn of(stream: &Stream, kernels: &KernelSet, rows: u32) -> Result<Self, DeviceError> {
        let arch = kernels.device().info().arch;
        let gemms = BATCH_TILES.map(|tile| Ok((tile, ExternalKernel::of(kernels, gemm(arch, tile))?)));
        Ok(Self {
            decompress: ExternalKernel::of(kernels, decompress(arch))?,
            gemms: gemms.into_iter().collect::<Result<_, DeviceError>>()?,
            reduce: ExternalKernel::of(kernels, reduce(arch))?,
            sums: DeviceBuffer::zeroed(stream, (SPLITS_MAX * FUSED_MAX) as usize * rows as usize)?,
            faults: DeviceBuffer::zeroed(stream, 1)?,
        })
    }

    /// Enqueues the decompression of a matrix.
    ///
    /// # Errors
    /// `weights` has another shape, or is on another device.
    pub fn decompress(
        &self,
        stream: &Stream,
        matrix: &DeviceZip,
        weights: &mut DeviceMatrix,
    ) -> Result<(), DeviceError> {
        self.check(&self.decompress, matrix, weights)?;
        let output = [weights.rows().into(), weights.cols().into()];
        if output != matrix.shape().map(u64::from) {
            return self.decompress.refuse(LaunchError::Output { output, tensor: matrix.shape().map(u64::from) });
        }
        let args = ZipservArgs { weights: weights.data().address(), faults: self.faults.address(), ..matrix.args() };
        let blocks = matrix.rows / BLOCK as u32 * (matrix.cols / BLOCK as u32);
        // SAFETY: each part is passed with the count that bounds it, and `weights` has the shape of the matrix.
        // Dropping a buffer waits for the kernel.
        unsafe { self.decompress.launch(stream, self.decompress.resident_blocks().min(blocks), &args) }
    }

    /// Enqueues `y = x * W^T` for up to [`FUSED_MAX`] batch rows, directly from the coded matrix.
    ///
    /// # Errors
    /// Shapes do not match, the product exceeds the buffer of sums, or an operand is on another device.
    pub fn gemm(
        &self,
        stream: &Stream,
        x: &DeviceMatrix,
        matrix: &DeviceZip,
        y: &mut DeviceMatrix,
    ) -> Result<(), DeviceError> {
        let batch = x.rows();
        let Some((_, kernel)) = self.gemms.iter().find(|(tile, _)| *tile >= batch) else {
            let (value, limit) = (batch.into(), FUSED_MAX.into());
            return self.decompress.refuse(LaunchError::TooLarge { what: "a batch", value, limit });
        };
        self.check(kernel, matrix, y)?;
        self.check(kernel, matrix, x)?;
        let shape = |m: &DeviceMatrix| [u64::from(m.rows()), u64::from(m.cols())];
        let w = matrix.shape().map(u64::from);
        if shape(x)[1] != w[1] || shape(y) != [batch.into(), w[0]] {
            return kernel.refuse(LaunchError::Shape { y: shape(y), x: shape(x), w });
        }
        let splits = splits(matrix, kernel.resident_blocks());
        let need = u64::from(splits) * u64::from(batch) * u64::from(matrix.rows);
        if splits > 1 && need > self.sums.len() as u64 {
            let have = self.sums.len() as u64;
            return kernel.refuse(LaunchError::Room { buffer: "sums", need, have });
        }
        let args = ZipservArgs {
            x: x.data().address(),
            y: y.data().address(),
            sums: self.sums.address(),
            faults: self.faults.address(),
            batch,
            splits,
            ..matrix.args()
        };
        // SAFETY: as above; x and y have the shapes of the product, and the sums fit their buffer.
        unsafe { kernel.launch(stream, matrix.rows / BLOCK as u32 * splits, &args)? };
        if splits == 1 || batch == 0 {
            return Ok(());
        }
        let elements = u64::from(batch) * u64::from(matrix.rows);
        // SAFETY: the previous launch on the same stream wrote the sums. The grid is below 2^31 / 128 blocks.
        unsafe { self.reduce.launch(stream, elements.div_ceil(THREADS.into()) as u32, &args) }
    }

    /// Enqueues a product the faster way: batches of up to [`FUSED_BEST`] rows directly from the coded matrix, others
    /// with cuBLAS after decompressing the matrix into `weights`.
    ///
    /// # Errors
    /// Those of [`ZipKernels::gemm`] and [`ZipKernels::decompress`], or the context has no cuBLAS.
    pub fn multiply(
        &self,
        ctx: &mut ExecContext,
        x: &DeviceMatrix,
        matrix: &DeviceZip,
        weights: &mut DeviceMatrix,
        y: &mut DeviceMatrix,
    ) -> Result<(), DeviceError> {
        if x.rows() <= FUSED_BEST {
            return self.gemm(ctx.stream(), x, matrix, y);
        }
        self.decompress(ctx.stream(), matrix, weights)?;
        ctx.cublas()?.matmul(x.view(), weights.view(), y.view_mut(), false)
    }

    /// Returns how many blocks and strips were skipped so far. Waits for the stream.
    ///
    /// # Errors
    /// The driver failed.
    pub fn faults(&self, stream: &Stream) -> Result<u32, DeviceError> {
        Ok(self.faults.to_host(stream)?.first().copied().unwrap_or(0))
    }

    fn check(&self, kernel: &ExternalKernel, matrix: &DeviceZip, other: &DeviceMatrix) -> Result<(), DeviceError> {
        let own = kernel.device().ordinal();
        for (operand, device) in [("the matrix", matrix.full.device()), ("an operand", other.data().device())] {
            if device.ordinal() != own {
                return kernel.refuse(LaunchError::OtherDevice { operand, own, other: device.ordinal() });
            }
        }
        Ok(())
    }
}

/// Returns the number of splits of k that fills the GPU, with at least four blocks of k per split.
fn splits(matrix: &DeviceZip, resident_blocks: u32) -> u32 {
    let (down, across) = (matrix.rows / BLOCK as u32, matrix.cols / BLOCK as u32);
    (resident_blocks / down.max(1)).clamp(1, SPLITS_MAX).min((across / 4).max(1))
}
