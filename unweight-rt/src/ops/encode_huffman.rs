//! Encodes BF16 as Huffman or palette tensors on the GPU, with the same bytes as the CPU encoder (report section 4).
//!
//! ```text
//! weights --stats--> sign_mantissa, histogram --table--> palette, code --rows--> row lengths, verbatim rows
//!         --scan--> offsets --write--> bits, verbatim exponents
//! ```
//! All inputs of a stage from earlier stages are on the device; the host reads the totals once, at the end. Buffers
//! have the worst-case size (319 bits per row, every row verbatim), so that no size needs to be measured before it is
//! written.
//!
//! A stage trusts the output of the previous stage: `write` stores as many bits into shared memory as the row lengths
//! state. So safe calls enqueue a whole pipeline, and enqueuing a single stage is unsafe:
//! ```compile_fail,E0133
//! # use unweight_codegen::spec::EncodeHuffmanStage;
//! # use unweight_rt::{DeviceError, raw::ops::encode_huffman::{EncodeBuffers, GpuEncoder}};
//! fn lengths_of_nothing(encoder: &GpuEncoder, buffers: &mut EncodeBuffers) -> Result<(), DeviceError> {
//!     encoder.enqueue_stage(buffers, EncodeHuffmanStage::Write)
//! }
//! ```
//! ```compile_fail,E0133
//! # use unweight_rt::{DeviceError, raw::ops::encode_huffman::EncodeBuffers};
//! fn lengths_of_255(buffers: &mut EncodeBuffers) -> Result<(), DeviceError> {
//!     buffers.poison(0xff)
//! }
//! ```
//! ```
//! # use unweight_codegen::spec::EncodeHuffmanStage;
//! # use unweight_rt::{DeviceError, raw::ops::encode_huffman::{EncodeBuffers, GpuEncoder}};
//! fn a_tensor_and_its_palette_indices(encoder: &GpuEncoder, buffers: &mut EncodeBuffers) -> Result<(), DeviceError> {
//!     encoder.enqueue_huffman(buffers)?;
//!     // SAFETY: every stage before it has just been enqueued, by the same encoder.
//!     unsafe { encoder.enqueue_stage(buffers, EncodeHuffmanStage::Palette) }
//! }
//! ```

mod pinned;

use std::sync::Arc;

use bytemuck::Pod;

use unweight_codegen::{
    abi::EncodeHuffmanArgs,
    plan::GemmShape,
    spec::{EncodeHuffmanStage, VariantSpec},
};
use unweight_format::{
    CodeLimit, Matrix, TileGrid,
    raw::{
        HuffmanTensor, PaletteTensor, Section, StageTime, TileMetadata, Trace,
        layout::{TILE_WORDS_MAX, WORDS_ALIGN},
    },
};

use crate::{
    device::{
        Copier, DeviceBuffer, DeviceError, KernelSet, LaunchError, Stream, copies::Part, module::LoadedKernel,
        pinned_pool::HostMemory, view::check_device,
    },
    weight::{self, DeviceMatrix},
};

use pinned::CopyStreams;

/// The stages of a Huffman tensor, in order.
pub const HUFFMAN_STAGES: [EncodeHuffmanStage; 5] = [
    EncodeHuffmanStage::Stats,
    EncodeHuffmanStage::Table,
    EncodeHuffmanStage::Rows,
    EncodeHuffmanStage::Scan,
    EncodeHuffmanStage::Write,
];
/// The stages of a palette tensor, in order.
pub const PALETTE_STAGES: [EncodeHuffmanStage; 5] = [
    EncodeHuffmanStage::Stats,
    EncodeHuffmanStage::Table,
    EncodeHuffmanStage::Rows,
    EncodeHuffmanStage::Scan,
    EncodeHuffmanStage::Palette,
];

/// The fixed u32 words: 256 of the histogram, 8 of the four totals. 8 words for each block of `scan` follow.
const SCRATCH_FIXED_WORDS: usize = 256 + 8;
/// The number of tiles for which the scratch has the 8 words of one block of `scan`. The kernel's blocks process more
/// tiles (`SCAN_TILES_PER_BLOCK` of `unweight_codegen`), so they need fewer words than the scratch has.
const SCAN_TILES_MIN: usize = 256;

/// The encoder kernels of one device, for one code limit.
#[derive(Debug)]
pub struct GpuEncoder {
    kernels: Vec<Arc<LoadedKernel>>,
    limit: CodeLimit,
}

/// Totals that the encoder counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodeTotals {
    /// The number of words of coded bits, before padding.
    pub words: u64,
    /// The number of verbatim rows.
    pub verbatim_rows: u64,
    /// The maximum number of verbatim rows in a tile.
    pub max_verbatim_rows: u64,
}

/// Memory on host and device for encoding one tensor at a time. It grows with the largest tensor and is kept, because
/// allocating takes longer than encoding.
#[derive(Debug)]
pub struct EncodeWorkspace {
    stream: Stream,
    copier: Copier,
    buffers: Option<EncodeBuffers>,
    /// Streams for copies of pinned memory, created on first use.
    copies: Option<CopyStreams>,
    trace: Arc<Trace>,
}

impl EncodeWorkspace {
    /// Creates a workspace whose work runs on `stream`; allocates nothing yet.
    pub fn new(stream: &Stream) -> Self {
        Self::traced(stream, Arc::default())
    }

    /// Like [`EncodeWorkspace::new`], with a trace that several workspaces share.
    pub(crate) fn traced(stream: &Stream, trace: Arc<Trace>) -> Self {
        Self { stream: stream.clone(), copier: Copier::new(stream), buffers: None, copies: None, trace }
    }

    /// Returns the times of allocating, of copies and of kernels so far.
    pub fn stages(&self) -> Vec<StageTime> {
        self.trace.stages()
    }

    /// Returns the copier of the workspace's stream.
    pub(crate) fn copier(&mut self) -> &mut Copier {
        &mut self.copier
    }

    /// Copies a matrix, which may be in memory that `memory` lent, to new device memory.
    pub(crate) fn matrix(
        &mut self,
        matrix: Matrix<'_>,
        memory: Option<&HostMemory>,
    ) -> Result<DeviceMatrix, DeviceError> {
        let grid = matrix.grid();
        let (bytes, copier) = (matrix.bytes().len() as u64, &mut self.copier);
        // A grid's dimensions fit 32 bits.
        let new = || DeviceMatrix::zeroed(&self.stream, grid.rows() as u32, grid.cols() as u32);
        let mut weights = self.trace.time("allocate", bytes, new)?;
        let is_pinned = memory.is_some_and(|memory| memory.contains(matrix.bytes()));
        self.trace.time("upload", bytes, || match is_pinned {
            true => weights.overwrite_pinned(&self.stream, matrix.bytes()),
            false => weights.overwrite_by(copier, matrix.bytes()),
        })?;
        Ok(weights)
    }

    /// Makes the buffers large enough for a matrix of this shape.
    fn fit(&mut self, grid: TileGrid) -> Result<(), DeviceError> {
        let fitted = match self.buffers.take() {
            Some(mut kept) => kept.fit(grid).map(|()| kept),
            None => EncodeBuffers::new(&self.stream, grid),
        };
        self.buffers = Some(fitted?);
        Ok(())
    }

    /// Encodes a matrix by `enqueue` and reads the tensor by `read`.
    fn encode<T>(
        &mut self,
        matrix: Matrix<'_>,
        enqueue: impl FnOnce(&mut EncodeBuffers) -> Result<(), DeviceError>,
        read: impl FnOnce(&EncodeBuffers, EncodeTotals, &mut Copier) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let (bytes, trace) = (matrix.bytes().len() as u64, self.trace.clone());
        trace.time("allocate", bytes, || self.fit(matrix.grid()))?;
        let Self { copier, buffers: Some(buffers), .. } = self else { unreachable!("`fit` has made the buffers") };
        trace.time("upload", bytes, || copier.upload(&mut buffers.weights, matrix.bytes()))?;
        let kernels = || enqueue(buffers).and_then(|()| buffers.totals());
        let totals = trace.time("kernels", bytes, kernels)?;
        trace.time("download", bytes, || read(buffers, totals, copier))
    }
}

/// Device memory for encoding matrices of one shape. All stages run on one stream, in order.
#[derive(Debug)]
pub struct EncodeBuffers {
    stream: Stream,
    grid: TileGrid,
    weights: DeviceBuffer<u8>,
    sign_mantissa: DeviceBuffer<u8>,
    scratch: DeviceBuffer<u32>,
    palette: DeviceBuffer<u8>,
    code_lengths: DeviceBuffer<u8>,
    encode_table: DeviceBuffer<u32>,
    row_lengths: DeviceBuffer<u8>,
    tile_metadata: DeviceBuffer<TileMetadata>,
    encoded_exp: DeviceBuffer<u32>,
    verbatim_exponents: DeviceBuffer<u8>,
    palette_index: DeviceBuffer<u8>,
}

impl GpuEncoder {
    /// Returns the variants of which an encoder consists.
    pub fn variants(device_arch: unweight_codegen::spec::Arch) -> Vec<VariantSpec> {
        EncodeHuffmanStage::ALL.iter().map(|stage| VariantSpec::encode_huffman(device_arch, *stage)).collect()
    }

    /// Compiles or finds the encoder's kernels.
    pub fn new(kernels: &KernelSet, limit: CodeLimit) -> Result<Self, DeviceError> {
        let variants = Self::variants(kernels.device().info().arch);
        kernels.prepare(&variants, &|_| {})?;
        Ok(Self { kernels: variants.iter().map(|spec| kernels.get(spec)).collect::<Result<_, _>>()?, limit })
    }

    /// Encodes a matrix as a Huffman tensor, with the same bytes as [`unweight_format::raw::huffman::encode`].
    ///
    /// # Errors
    /// More than 2^32 words (store such a tensor raw), or the device failed.
    pub fn encode(&self, stream: &Stream, matrix: Matrix<'_>) -> Result<HuffmanTensor<Vec<u8>>, DeviceError> {
        self.encode_in(&mut EncodeWorkspace::new(stream), matrix)
    }

    /// Like [`GpuEncoder::encode`], in memory that is kept.
    ///
    /// # Errors
    /// As for [`GpuEncoder::encode`].
    pub fn encode_in(
        &self,
        workspace: &mut EncodeWorkspace,
        matrix: Matrix<'_>,
    ) -> Result<HuffmanTensor<Vec<u8>>, DeviceError> {
        workspace.encode(matrix, |buffers| self.enqueue_huffman(buffers), EncodeBuffers::read_huffman)
    }

    /// Encodes a matrix as a palette tensor, with the same bytes as [`unweight_format::raw::palette::encode`].
    ///
    /// # Errors
    /// The device failed.
    pub fn encode_palette(&self, stream: &Stream, matrix: Matrix<'_>) -> Result<PaletteTensor<Vec<u8>>, DeviceError> {
        self.encode_palette_in(&mut EncodeWorkspace::new(stream), matrix)
    }

    /// Like [`GpuEncoder::encode_palette`], in memory that is kept.
    ///
    /// # Errors
    /// As for [`GpuEncoder::encode_palette`].
    pub fn encode_palette_in(
        &self,
        workspace: &mut EncodeWorkspace,
        matrix: Matrix<'_>,
    ) -> Result<PaletteTensor<Vec<u8>>, DeviceError> {
        workspace.encode(matrix, |buffers| self.enqueue_palette(buffers), EncodeBuffers::read_palette)
    }

    /// Enqueues the stages of a Huffman tensor for buffers whose weights are set. Allocates nothing, so it can be
    /// captured.
    ///
    /// # Errors
    /// The buffers are on another device, or a driver error.
    pub fn enqueue_huffman(&self, buffers: &mut EncodeBuffers) -> Result<(), DeviceError> {
        self.enqueue(buffers, &HUFFMAN_STAGES)
    }

    /// Enqueues the stages of a palette tensor for buffers whose weights are set. Allocates nothing, so it can be
    /// captured.
    ///
    /// # Errors
    /// As for [`GpuEncoder::enqueue_huffman`].
    pub fn enqueue_palette(&self, buffers: &mut EncodeBuffers) -> Result<(), DeviceError> {
        self.enqueue(buffers, &PALETTE_STAGES)
    }

    /// Enqueues a whole pipeline.
    fn enqueue(&self, buffers: &mut EncodeBuffers, stages: &[EncodeHuffmanStage; 5]) -> Result<(), DeviceError> {
        for stage in stages {
            // SAFETY: both lists begin with `stats` and contain every stage that a later one reads, in order; `buffers`
            // is borrowed mutably meanwhile, so nothing else writes to them. After a failure the next pipeline begins
            // with `stats` again.
            unsafe { self.enqueue_stage(buffers, *stage)? };
        }
        Ok(())
    }

    /// Enqueues one stage; before `stats`, clears the scratch. For measuring and testing stages.
    ///
    /// # Safety
    /// Every stage except `stats` follows the earlier stages of [`HUFFMAN_STAGES`] or [`PALETTE_STAGES`] on these
    /// buffers, from `stats` on, each enqueued without an error by an encoder with this code limit. Since that `stats`,
    /// nothing else has written to the buffers: neither [`EncodeBuffers::set_weights`] nor [`EncodeBuffers::poison`]
    /// was called. For a captured stage, this holds each time that the graph runs.
    #[doc(hidden)]
    pub unsafe fn enqueue_stage(
        &self,
        buffers: &mut EncodeBuffers,
        stage: EncodeHuffmanStage,
    ) -> Result<(), DeviceError> {
        let kernel = self.kernel(stage);
        let (ordinal, other) = (kernel.device().ordinal(), buffers.stream.device().ordinal());
        check_device("the buffers", other, ordinal).or_else(|refusal| kernel.refuse(refusal))?;
        if matches!(stage, EncodeHuffmanStage::Stats) {
            // Histogram, totals and the scan's state are one buffer, so that clearing them is one node of a graph.
            buffers.scratch.fill_bytes(&buffers.stream, 0)?;
        }
        let args = buffers.args(self.limit);
        let problem = GemmShape { m: 0, n: args.n, k: args.k };
        // SAFETY: the buffers have the sizes that the grid and the capacities in `args` require; the caller promises
        // that their contents come from earlier stages for these weights. Dropping a buffer waits for the kernel.
        unsafe { kernel.launch(&buffers.stream, problem, &args) }
    }

    /// Returns the maximum length of codes.
    pub(crate) fn limit(&self) -> CodeLimit {
        self.limit
    }

    /// Returns the kernel of a stage.
    pub fn kernel(&self, stage: EncodeHuffmanStage) -> &LoadedKernel {
        // The kernels are in the order of `EncodeHuffmanStage::ALL`; see `variants`.
        &self.kernels[EncodeHuffmanStage::ALL.iter().position(|other| *other == stage).unwrap_or_default()]
    }
}

impl EncodeBuffers {
    /// Allocates buffers for matrices of this shape.
    pub fn new(stream: &Stream, grid: TileGrid) -> Result<Self, DeviceError> {
        let device = stream.device();
        let mut buffers = Self {
            stream: stream.clone(),
            grid,
            weights: DeviceBuffer::empty(device),
            sign_mantissa: DeviceBuffer::empty(device),
            scratch: DeviceBuffer::empty(device),
            palette: DeviceBuffer::empty(device),
            code_lengths: DeviceBuffer::empty(device),
            encode_table: DeviceBuffer::empty(device),
            row_lengths: DeviceBuffer::empty(device),
            tile_metadata: DeviceBuffer::empty(device),
            encoded_exp: DeviceBuffer::empty(device),
            verbatim_exponents: DeviceBuffer::empty(device),
            palette_index: DeviceBuffer::empty(device),
        };
        buffers.fit(grid)?;
        Ok(buffers)
    }

    /// Changes the shape; allocates the buffers that are too small for it. Their contents are undefined afterwards.
    fn fit(&mut self, grid: TileGrid) -> Result<(), DeviceError> {
        let tiles = grid.tiles();
        // Kernels count rows in 32 bits, words in 64.
        if u32::try_from(tiles * 64).is_err() {
            let (value, limit) = (tiles as u64 * 64, u32::MAX.into());
            return Err(LaunchError::TooLarge { what: "tile rows", value, limit }.into());
        }
        let stream = self.stream.clone();
        grow(&mut self.weights, &stream, grid.elements() * 2)?;
        grow(&mut self.sign_mantissa, &stream, grid.elements())?;
        grow(&mut self.scratch, &stream, SCRATCH_FIXED_WORDS + 8 * tiles.div_ceil(SCAN_TILES_MIN))?;
        grow(&mut self.palette, &stream, 16)?;
        grow(&mut self.code_lengths, &stream, 16)?;
        grow(&mut self.encode_table, &stream, 256)?;
        grow(&mut self.row_lengths, &stream, tiles * 64)?;
        grow(&mut self.tile_metadata, &stream, tiles)?;
        grow(&mut self.encoded_exp, &stream, tiles * TILE_WORDS_MAX)?;
        grow(&mut self.verbatim_exponents, &stream, tiles * 64 * 64)?;
        grow(&mut self.palette_index, &stream, tiles * 64 * 32)?;
        self.grid = grid;
        Ok(())
    }

    /// Copies a matrix of the buffers' shape to the device.
    pub fn set_weights(&mut self, matrix: Matrix<'_>) -> Result<(), DeviceError> {
        if matrix.grid() != self.grid {
            let (output, tensor) = (weight::shape(self.grid), weight::shape(matrix.grid()));
            return Err(LaunchError::Output { output, tensor }.into());
        }
        self.weights.write(&self.stream, 0, matrix.bytes())
    }

    /// Fills every output with a byte, which reveals what a stage does not write. For tests.
    ///
    /// # Safety
    /// The next stage enqueued on these buffers is `stats`, as in [`GpuEncoder::enqueue_huffman`] and
    /// [`GpuEncoder::enqueue_palette`]: any other stage would read the bytes as lengths and offsets.
    #[doc(hidden)]
    pub unsafe fn poison(&mut self, byte: u8) -> Result<(), DeviceError> {
        let stream = &self.stream;
        for buffer in [
            &mut self.sign_mantissa,
            &mut self.palette,
            &mut self.code_lengths,
            &mut self.row_lengths,
            &mut self.verbatim_exponents,
            &mut self.palette_index,
        ] {
            buffer.fill_bytes(stream, byte)?;
        }
        for buffer in [&mut self.scratch, &mut self.encode_table, &mut self.encoded_exp] {
            buffer.fill_bytes(stream, byte)?;
        }
        self.tile_metadata.fill_bytes(stream, byte)
    }

    /// Waits for the stages and returns their totals.
    ///
    /// # Errors
    /// The coded words exceed the format's 2^32.
    pub fn totals(&self) -> Result<EncodeTotals, DeviceError> {
        let words = self.scratch.read(&self.stream, 256, 8)?;
        let total = |i: usize| u64::from(words[2 * i]) | u64::from(words[2 * i + 1]) << 32;
        let totals = EncodeTotals { words: total(0), verbatim_rows: total(1), max_verbatim_rows: total(2) };
        let rows = self.grid.tiles() as u64 * 64;
        // Capacities cover the worst case, so a fault can only be the format's own limit or a faulty kernel.
        if total(3) != 0 || totals.words > self.encoded_exp.len() as u64 || totals.verbatim_rows > rows {
            return Err(unweight_format::CodecError::TooManyWords { words: totals.words }.into());
        }
        Ok(totals)
    }

    /// Waits for the stages of a Huffman tensor and reads it back. The sections are validated.
    pub fn huffman(&self) -> Result<HuffmanTensor<Vec<u8>>, DeviceError> {
        self.read_huffman(self.totals()?, &mut Copier::new(&self.stream))
    }

    /// Waits for the stages of a palette tensor and reads it back. The sections are validated.
    pub fn palette(&self) -> Result<PaletteTensor<Vec<u8>>, DeviceError> {
        self.read_palette(self.totals()?, &mut Copier::new(&self.stream))
    }

    fn read_huffman(&self, totals: EncodeTotals, copier: &mut Copier) -> Result<HuffmanTensor<Vec<u8>>, DeviceError> {
        let mut sections = read(self.huffman_parts(totals)?, copier)?;
        Ok(HuffmanTensor::from_sections(self.grid, |section| take(&mut sections, section))?)
    }

    fn read_palette(&self, totals: EncodeTotals, copier: &mut Copier) -> Result<PaletteTensor<Vec<u8>>, DeviceError> {
        let mut sections = read(self.palette_parts(totals)?, copier)?;
        Ok(PaletteTensor::from_sections(self.grid, |section| take(&mut sections, section))?)
    }

    /// Returns the sections of a Huffman tensor on the device.
    fn huffman_parts(&self, totals: EncodeTotals) -> Result<Vec<(Section, Part<'_>)>, DeviceError> {
        let mut parts = self.common_parts(totals)?;
        // `write` stores every word of a tile; the host adds the padding after the last.
        let words = Part::front(&self.encoded_exp, totals.words as usize)?.padded(WORDS_ALIGN * 4);
        parts.push((Section::ENCODED_EXP, words));
        parts.push((Section::ROW_LENGTHS, Part::front(&self.row_lengths, self.grid.tiles() * 64)?));
        parts.push((Section::CODE_LENGTHS, Part::front(&self.code_lengths, 16)?));
        Ok(parts)
    }

    /// Returns the sections of a palette tensor on the device.
    fn palette_parts(&self, totals: EncodeTotals) -> Result<Vec<(Section, Part<'_>)>, DeviceError> {
        let mut parts = self.common_parts(totals)?;
        parts.push((Section::PALETTE_INDEX, Part::front(&self.palette_index, self.grid.tiles() * 64 * 32)?));
        Ok(parts)
    }

    /// Returns the sections of both encodings on the device.
    fn common_parts(&self, totals: EncodeTotals) -> Result<Vec<(Section, Part<'_>)>, DeviceError> {
        let grid = self.grid;
        let verbatim = Part::front(&self.verbatim_exponents, totals.verbatim_rows as usize * 64)?;
        Ok(vec![
            (Section::SIGN_MANTISSA, Part::front(&self.sign_mantissa, grid.elements())?),
            (Section::TILE_METADATA, Part::front(&self.tile_metadata, grid.tiles())?),
            (Section::VERBATIM_EXPONENTS, verbatim),
            (Section::PALETTE, Part::front(&self.palette, 16)?),
        ])
    }

    fn args(&mut self, limit: CodeLimit) -> EncodeHuffmanArgs {
        EncodeHuffmanArgs {
            weights: self.weights.address(),
            sign_mantissa: self.sign_mantissa.address(),
            histogram: self.scratch.address(),
            palette: self.palette.address(),
            code_lengths: self.code_lengths.address(),
            encode_table: self.encode_table.address(),
            reserved: 0,
            row_lengths: self.row_lengths.address(),
            tile_metadata: self.tile_metadata.address(),
            encoded_exp: self.encoded_exp.address(),
            verbatim_exponents: self.verbatim_exponents.address(),
            palette_index: self.palette_index.address(),
            totals: self.scratch.address() + 256 * 4,
            scan_state: self.scratch.address() + SCRATCH_FIXED_WORDS as u64 * 4,
            capacity_words: self.encoded_exp.len() as u64,
            // Fits, like the dimensions of any grid: checked when the buffers were created.
            capacity_rows: (self.grid.tiles() * 64) as u32,
            code_limit: limit.bits(),
            n: self.grid.rows() as u32,
            k: self.grid.cols() as u32,
            tile_rows: self.grid.tile_rows() as u32,
            tile_cols: self.grid.tile_cols() as u32,
        }
    }
}

/// Allocates a larger buffer if this one has fewer than `len` elements.
fn grow<T: Pod>(buffer: &mut DeviceBuffer<T>, stream: &Stream, len: usize) -> Result<(), DeviceError> {
    if buffer.len() < len {
        // Freed first, so that both need not fit in memory.
        *buffer = DeviceBuffer::empty(stream.device());
        *buffer = DeviceBuffer::zeroed(stream, len)?;
    }
    Ok(())
}

/// Copies sections to the host.
fn read(parts: Vec<(Section, Part<'_>)>, copier: &mut Copier) -> Result<Vec<(Section, Vec<u8>)>, DeviceError> {
    let (sections, parts): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
    Ok(sections.into_iter().zip(copier.download(&parts)?).collect())
}

/// Takes the bytes of a section; empty if it was not read.
fn take<B: From<Vec<u8>>>(sections: &mut Vec<(Section, B)>, section: Section) -> B {
    let at = sections.iter().position(|(other, _)| *other == section);
    at.map_or_else(|| Vec::new().into(), |at| sections.swap_remove(at).1)
}
