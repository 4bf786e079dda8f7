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

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use unweight_codegen::{
    abi::EncodeHuffmanArgs,
    plan::GemmShape,
    spec::{EncodeHuffmanStage, VariantSpec},
};
use unweight_format::{
    CodeLimit, Digest, EncodingId, FloatMatrix, Matrix, NotEncodable, StoredTensor, TileGrid,
    bundle::{CpuEncoder, Encoder, EncoderError},
    raw::{
        HuffmanTensor, PackedTensor, PaletteTensor, Section, TileMetadata, compact,
        layout::{TILE_WORDS_MAX, WORDS_ALIGN},
    },
};

use crate::{
    device::{DeviceBuffer, DeviceError, KernelSet, LaunchError, Stream, module::LoadedKernel, view::check_device},
    ops::{
        encode_compact::{EncodeCompact, EncodeCompactError},
        pack::{PackError, Packer},
    },
    weight::{self, DeviceMatrix},
};

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

/// The GPU encoder for [`bundle::compress_with`](unweight_format::bundle::compress_with): computes digests on the CPU
/// and the rest on the GPU. It processes a few tensors at a time, so that one is copied while another is encoded.
#[derive(Debug)]
pub struct BundleEncoder {
    encoder: GpuEncoder,
    compressor: EncodeCompact,
    /// Idle packers, each with its own stream.
    idle: Mutex<Vec<Packer>>,
    packer_returned: Condvar,
}

/// The number of tensors on the device at once: one is uploaded, one encoded, one downloaded. Each needs three times
/// its size in BF16.
const IN_FLIGHT: usize = 3;

impl BundleEncoder {
    /// Compiles or finds the encoder's kernels.
    ///
    /// # Errors
    /// The device or the compiler is missing, or failed.
    pub fn new(kernels: &KernelSet, limit: CodeLimit) -> Result<Self, DeviceError> {
        let packers = (0..IN_FLIGHT).map(|_| Packer::new(&kernels.device().stream()?, kernels));
        let packers = packers.collect::<Result<_, DeviceError>>()?;
        let (encoder, compressor) = (GpuEncoder::new(kernels, limit)?, EncodeCompact::of(kernels)?);
        Ok(Self { encoder, compressor, idle: Mutex::new(packers), packer_returned: Condvar::new() })
    }

    /// Returns a packer for exclusive use; waits until one is idle.
    fn packer(&self) -> PackerGuard<'_> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let mut idle =
            self.packer_returned.wait_while(idle, |idle| idle.is_empty()).unwrap_or_else(PoisonError::into_inner);
        PackerGuard { encoder: self, packer: idle.pop() }
    }
}

/// A packer that is returned when the tensor is done. After a panic its stream is still usable, and its memory is
/// written before it is read.
struct PackerGuard<'a> {
    encoder: &'a BundleEncoder,
    /// `None` only during drop.
    packer: Option<Packer>,
}

impl Drop for PackerGuard<'_> {
    fn drop(&mut self) {
        self.encoder.idle.lock().unwrap_or_else(PoisonError::into_inner).extend(self.packer.take());
        self.encoder.packer_returned.notify_one();
    }
}

impl Encoder for BundleEncoder {
    fn encode(
        &self,
        matrix: FloatMatrix<'_>,
        encoding: EncodingId,
        limit: CodeLimit,
    ) -> Result<(Digest, StoredTensor<Vec<u8>>), EncoderError> {
        encoding.encoding().fits(matrix.grid())?;
        if limit != self.encoder.limit {
            let reason = format!(
                "the encoder was created for code limit {}, but {} was requested",
                self.encoder.limit.bits(),
                limit.bits()
            );
            return Err(EncoderError::Failed(reason.into()));
        }
        let failed = |error: DeviceError| EncoderError::Failed(Box::new(error));
        // The CPU handles encodings without a kernel. It must not hold a packer: its rayon may run the encoding of
        // another tensor on this thread, which would wait for that packer.
        if !matches!(encoding, EncodingId::HUFFMAN | EncodingId::PALETTE | EncodingId::PACKED | EncodingId::COMPACT) {
            return CpuEncoder.encode(matrix, encoding, limit);
        }
        let digest = Digest::of(matrix.bytes());
        let matrix = matrix.bf16().map_err(NotEncodable::from)?;
        let mut guard = self.packer();
        let packer = guard.packer.as_mut().expect("the packer is present until the guard is dropped");
        let tensor = match encoding {
            EncodingId::HUFFMAN => self.encoder.encode(packer.stream(), matrix).map_err(failed)?.into(),
            EncodingId::PALETTE => self.encoder.encode_palette(packer.stream(), matrix).map_err(failed)?.into(),
            EncodingId::PACKED => {
                let mut packed = || -> Result<PackedTensor<Vec<u8>>, PackError> {
                    let weights = DeviceMatrix::upload(packer.stream(), matrix)?;
                    Ok(packer.pack(weights.view())?.download(packer.stream())?)
                };
                match packed() {
                    Ok(tensor) => tensor.into(),
                    Err(PackError::Unpackable(why)) => return Err(why.into()),
                    Err(PackError::Device(error)) => return Err(failed(error)),
                }
            }
            EncodingId::COMPACT => {
                let stream = packer.stream().clone();
                let mut encoded = || -> Result<_, EncodeCompactError> {
                    let weights = DeviceMatrix::upload(&stream, matrix)?;
                    let compressed = self.compressor.encode(packer, weights.view())?;
                    let tensor = compressed.download(&stream)?;
                    compact::worth_it(matrix.grid(), &compressed.histogram, limit, tensor.stored_bytes())?;
                    Ok(tensor)
                };
                match encoded() {
                    Ok(tensor) => tensor.into(),
                    Err(EncodeCompactError::Uncompact(why)) => return Err(NotEncodable::from(why).into()),
                    Err(EncodeCompactError::Device(error)) => return Err(failed(error)),
                }
            }
            _ => return Err(EncoderError::Failed("a encoding without a kernel is the CPU's".into())),
        };
        Ok((digest, tensor))
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
        let mut buffers = EncodeBuffers::new(stream, matrix.grid())?;
        buffers.set_weights(matrix)?;
        self.enqueue_huffman(&mut buffers)?;
        buffers.huffman()
    }

    /// Encodes a matrix as a palette tensor, with the same bytes as [`unweight_format::raw::palette::encode`].
    pub fn encode_palette(&self, stream: &Stream, matrix: Matrix<'_>) -> Result<PaletteTensor<Vec<u8>>, DeviceError> {
        let mut buffers = EncodeBuffers::new(stream, matrix.grid())?;
        buffers.set_weights(matrix)?;
        self.enqueue_palette(&mut buffers)?;
        buffers.palette()
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

    /// Returns the kernel of a stage.
    pub fn kernel(&self, stage: EncodeHuffmanStage) -> &LoadedKernel {
        // The kernels are in the order of `EncodeHuffmanStage::ALL`; see `variants`.
        &self.kernels[EncodeHuffmanStage::ALL.iter().position(|other| *other == stage).unwrap_or_default()]
    }
}

impl EncodeBuffers {
    /// Allocates buffers for matrices of this shape.
    pub fn new(stream: &Stream, grid: TileGrid) -> Result<Self, DeviceError> {
        let tiles = grid.tiles();
        // Kernels count rows in 32 bits, words in 64.
        if u32::try_from(tiles * 64).is_err() {
            let (value, limit) = (tiles as u64 * 64, u32::MAX.into());
            return Err(LaunchError::TooLarge { what: "tile rows", value, limit }.into());
        }
        Ok(Self {
            stream: stream.clone(),
            grid,
            weights: DeviceBuffer::zeroed(stream, grid.elements() * 2)?,
            sign_mantissa: DeviceBuffer::zeroed(stream, grid.elements())?,
            scratch: DeviceBuffer::zeroed(stream, SCRATCH_FIXED_WORDS + 8 * tiles.div_ceil(SCAN_TILES_MIN))?,
            palette: DeviceBuffer::zeroed(stream, 16)?,
            code_lengths: DeviceBuffer::zeroed(stream, 16)?,
            encode_table: DeviceBuffer::zeroed(stream, 256)?,
            row_lengths: DeviceBuffer::zeroed(stream, tiles * 64)?,
            tile_metadata: DeviceBuffer::zeroed(stream, tiles)?,
            encoded_exp: DeviceBuffer::zeroed(stream, tiles * TILE_WORDS_MAX)?,
            verbatim_exponents: DeviceBuffer::zeroed(stream, tiles * 64 * 64)?,
            palette_index: DeviceBuffer::zeroed(stream, tiles * 64 * 32)?,
        })
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
        let totals = self.totals()?;
        // `write` stores every word of a tile; the host adds the padding after the last.
        let mut words = self.encoded_exp.read(&self.stream, 0, totals.words as usize)?;
        words.resize(words.len().next_multiple_of(WORDS_ALIGN), 0);
        let mut sections = self.common(totals)?;
        let mut failed = None;
        let tensor = HuffmanTensor::from_sections(self.grid, |section| match section {
            Section::ENCODED_EXP => bytemuck::cast_slice(&words).to_vec(),
            Section::ROW_LENGTHS => value_or_record(&mut failed, self.row_lengths.to_host(&self.stream)),
            Section::CODE_LENGTHS => value_or_record(&mut failed, self.code_lengths.to_host(&self.stream)),
            other => sections.take(other),
        });
        finish(failed, tensor)
    }

    /// Waits for the stages of a palette tensor and reads it back. The sections are validated.
    pub fn palette(&self) -> Result<PaletteTensor<Vec<u8>>, DeviceError> {
        let totals = self.totals()?;
        let mut sections = self.common(totals)?;
        // The scan counted the words of a Huffman tensor, but a palette tensor has none.
        for record in sections.tile_metadata.chunks_exact_mut(TileMetadata::BYTES) {
            record[..4].fill(0);
        }
        let mut failed = None;
        let tensor = PaletteTensor::from_sections(self.grid, |section| match section {
            Section::PALETTE_INDEX => value_or_record(&mut failed, self.palette_index.to_host(&self.stream)),
            other => sections.take(other),
        });
        finish(failed, tensor)
    }

    fn common(&self, totals: EncodeTotals) -> Result<Common, DeviceError> {
        Ok(Common {
            sign_mantissa: self.sign_mantissa.to_host(&self.stream)?,
            tile_metadata: bytemuck::cast_slice(&self.tile_metadata.to_host(&self.stream)?).to_vec(),
            verbatim_exponents: self.verbatim_exponents.read(&self.stream, 0, totals.verbatim_rows as usize * 64)?,
            palette: self.palette.to_host(&self.stream)?,
        })
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

/// The sections common to both encodings.
struct Common {
    sign_mantissa: Vec<u8>,
    tile_metadata: Vec<u8>,
    verbatim_exponents: Vec<u8>,
    palette: Vec<u8>,
}

impl Common {
    fn take(&mut self, section: Section) -> Vec<u8> {
        match section {
            Section::SIGN_MANTISSA => std::mem::take(&mut self.sign_mantissa),
            Section::TILE_METADATA => std::mem::take(&mut self.tile_metadata),
            Section::VERBATIM_EXPONENTS => std::mem::take(&mut self.verbatim_exponents),
            Section::PALETTE => std::mem::take(&mut self.palette),
            // The callers provide the sections of only one encoding.
            _ => Vec::new(),
        }
    }
}

/// Returns the value, or an empty one after recording the error: section callbacks cannot return errors.
fn value_or_record(failed: &mut Option<DeviceError>, read: Result<Vec<u8>, DeviceError>) -> Vec<u8> {
    read.unwrap_or_else(|error| {
        failed.get_or_insert(error);
        Vec::new()
    })
}

fn finish<T>(failed: Option<DeviceError>, tensor: Result<T, unweight_format::CodecError>) -> Result<T, DeviceError> {
    match failed {
        Some(error) => Err(error),
        None => Ok(tensor?),
    }
}
