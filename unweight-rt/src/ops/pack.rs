//! Packs weights on the GPU (`docs/format.md` A.9), with the same bytes as on the CPU.
//!
//! ```text
//! DeviceMatrix --stats--> 256 counts --host: window-->
//!                 tiles --> containers, heads --host: words of the lists-->
//!                 lists --> DevicePacked
//! DeviceHuffman --full----> DeviceMatrix
//! DevicePacked --unpack---> DeviceMatrix
//! ```
//! Packing reads the weights twice, and a third time if a row block has a list. The host reads results twice: the
//! counts, from which the code that also runs on the CPU chooses the window or rejects the matrix, and the sizes of the
//! lists. So sections are allocated at their exact size.

use std::sync::Arc;

use unweight_codegen::{
    VariantSpec,
    abi::{EncodeHuffmanArgs, PackArgs},
    spec::{EncodeHuffmanStage, PackStage, catalog},
};
use unweight_format::{
    Histogram, TileGrid,
    raw::packed::{self, Unpackable, Window},
};

use crate::{
    device::{
        ContextSize, DeviceBuffer, DeviceError, KernelSet, LaunchError, MatrixMut, MatrixRef, Stream,
        module::LoadedKernel,
        view::{MatrixDesc, check_apart, check_device},
    },
    exec::ExecContext,
    ops::{
        decode_huffman::Decoder,
        unpack::{Unpacker, problem, shape, with_sections},
    },
    weight::{self, DeviceHuffman, DevicePacked},
};

/// The u32 words of the scratch before the words of each group of row blocks: 256 counts, and a u64, the index of an
/// element without an exact operand.
const SCRATCH_FIXED_WORDS: usize = 256 + 2;

/// Why a matrix was not packed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PackError {
    /// The matrix cannot be packed.
    #[error(transparent)]
    Unpackable(#[from] Unpackable),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl PackError {
    /// Returns the stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Unpackable(why) => why.code(),
            Self::Device(error) => error.code(),
        }
    }
}

/// The kernels that pack and unpack on one device, with their memory and execution context.
#[derive(Debug)]
pub struct Packer {
    ctx: ExecContext,
    stats: Arc<LoadedKernel>,
    tiles: Arc<LoadedKernel>,
    lists: Arc<LoadedKernel>,
    unpack: Unpacker,
    scratch: DeviceBuffer<u32>,
}

/// Weights on the device, row-major.
#[derive(Clone, Copy)]
struct Source {
    grid: TileGrid,
    address: u64,
}

impl Packer {
    /// Compiles or finds the kernels. All work runs on `stream`. Memory grows with the largest packed tensor.
    ///
    /// # Errors
    /// The device or the compiler is missing, or failed.
    pub fn new(stream: &Stream, kernels: &KernelSet) -> Result<Self, DeviceError> {
        let arch = kernels.device().info().arch;
        kernels.prepare(&catalog::packing(arch).collect::<Vec<_>>(), &|_| {})?;
        let stage = |stage| kernels.get(&VariantSpec::pack(arch, stage));
        Ok(Self {
            ctx: ExecContext::new(stream, ContextSize::default())?,
            stats: kernels.get(&VariantSpec::encode_huffman(arch, EncodeHuffmanStage::Stats))?,
            tiles: stage(PackStage::Tiles)?,
            lists: stage(PackStage::Lists)?,
            unpack: Unpacker::new(kernels.get(&VariantSpec::unpack(arch))?)?,
            scratch: DeviceBuffer::zeroed(stream, SCRATCH_FIXED_WORDS)?,
        })
    }

    /// Returns the stream of all its work.
    pub fn stream(&self) -> &Stream {
        self.ctx.stream()
    }

    /// Packs a contiguous matrix, with the same bytes as [`unweight_format::raw::packed::pack`]. Waits for the stream.
    ///
    /// # Errors
    /// [`PackError`], which states why the matrix cannot be packed.
    pub fn pack(&mut self, weights: MatrixRef<'_>) -> Result<DevicePacked, PackError> {
        let source = self.source("weights", weights.desc())?;
        self.pack_source(source)
    }

    /// Like [`Packer::pack`], but into allocated memory: `packed` and `escape_heads` have the sizes that the shape
    /// requires, `escapes` has at least [`Packer::escape_words_max`] words. Returns the window and the number of used
    /// words of `escapes`. Waits for the stream.
    ///
    /// # Errors
    /// As [`Packer::pack`]; or sections of other sizes, on another device, or overlapping the weights.
    pub fn pack_at(
        &mut self,
        weights: MatrixRef<'_>,
        packed: &mut DeviceBuffer<u8>,
        escape_heads: &mut DeviceBuffer<u32>,
        escapes: &mut DeviceBuffer<u32>,
    ) -> Result<(Window, usize), PackError> {
        let source = self.source("weights", weights.desc())?;
        let grid = source.grid;
        packed::packable_shape(grid)?;
        let check = || {
            weight::elements("packed", packed.len(), grid.tiles() * packed::TILE_BYTES)?;
            weight::elements("escape_heads", escape_heads.len(), grid.tiles() * packed::ROW_BLOCKS)?;
            weight::check_capacity("escapes", escapes.len(), Self::escape_words_max(grid))?;
            for (section, device) in
                [("packed", packed.device()), ("escape_heads", escape_heads.device()), ("escapes", escapes.device())]
            {
                check_device(section, device.ordinal(), self.ordinal())?;
            }
            let read = [("the weights", weights.desc().span())];
            check_apart(("packed", packed.span()), read.clone())?;
            check_apart(("escape_heads", escape_heads.span()), read.clone())?;
            check_apart(("escapes", escapes.span()), read)
        };
        check().or_else(|refusal| self.tiles.refuse(refusal))?;
        let window = self.window(source)?;
        let (args, words) = self.pack_tiles(source, window, packed, escape_heads)?;
        self.pack_lists(grid, args, escapes, words)?;
        Ok((window, words))
    }

    /// Returns the maximum number of escape words in a packed tensor of this shape.
    pub fn escape_words_max(grid: TileGrid) -> usize {
        // At most one element in 256 is an escape, with 1.5 words each.
        (grid.elements() / 256).saturating_mul(3).div_ceil(2)
    }

    /// Counts how often each exponent occurs in a contiguous matrix of any shape. Waits for the stream.
    ///
    /// # Errors
    /// A matrix that is too large, whose device or address the kernels do not support, or a driver error.
    pub fn histogram(&mut self, weights: MatrixRef<'_>) -> Result<Histogram, DeviceError> {
        let source = self.source("weights", weights.desc())?;
        self.count_exponents(source)
    }

    /// Decodes the weights of a Huffman tensor. Waits for the stream.
    ///
    /// # Errors
    /// `decoder` does not support the tensor or the output, or the tensor's metadata point outside their sections.
    pub fn decode(
        &mut self,
        decoder: &Decoder,
        tensor: &DeviceHuffman,
        output: MatrixMut<'_>,
    ) -> Result<(), DeviceError> {
        decoder.full(&mut self.ctx, tensor, output)?;
        self.ctx.synchronize()
    }

    /// Enqueues the unpacking of a tensor to a contiguous matrix.
    ///
    /// # Errors
    /// `output` has another shape, overlaps the tensor, or is on another device.
    pub fn unpack(&self, tensor: &DevicePacked, output: MatrixMut<'_>) -> Result<(), DeviceError> {
        self.unpack.enqueue(self.ctx.stream(), tensor, output)
    }

    /// Enqueues the first `steps` of stats, tiles and lists again on this packer's results for these weights, to
    /// measure them. Allocates nothing if an earlier tensor was as large, so it can be captured.
    ///
    /// # Errors
    /// Weights and tensor do not match or are on another device.
    #[doc(hidden)]
    pub fn again(
        &mut self,
        weights: MatrixRef<'_>,
        tensor: &mut DevicePacked,
        steps: usize,
    ) -> Result<(), DeviceError> {
        let source = self.source("weights", weights.desc())?;
        let grid = tensor.grid();
        if source.grid != grid {
            let (output, tensor) = (weights.desc().shape(), weight::shape(grid));
            return self.tiles.refuse(LaunchError::Output { output, tensor });
        }
        check_device("the tensor", tensor.device().ordinal(), self.ordinal())?;
        self.reserve(grid)?;
        self.enqueue_stats(source)?;
        let args = with_sections(self.args(source, tensor.window()), tensor);
        for kernel in [&self.tiles, &self.lists].into_iter().take(steps.saturating_sub(1)) {
            // SAFETY: source and sections have the grid's sizes, the scratch has a word for each group; `lists` writes
            // no word past `escape_words`.
            unsafe { kernel.launch(self.ctx.stream(), problem(grid), &args) }?;
        }
        Ok(())
    }

    fn ordinal(&self) -> usize {
        self.tiles.device().ordinal()
    }

    fn check_desc(&self, operand: &'static str, desc: &MatrixDesc) -> Result<(), LaunchError> {
        desc.check_dense(operand)?;
        desc.check_aligned(operand)?;
        desc.check_device(operand, self.ordinal())
    }

    fn source(&self, operand: &'static str, desc: &MatrixDesc) -> Result<Source, DeviceError> {
        self.check_desc(operand, desc).or_else(|refusal| self.tiles.refuse(refusal))?;
        let grid = TileGrid::new(desc.rows as usize, desc.cols as usize)?;
        Ok(Source { grid, address: desc.address })
    }

    fn pack_source(&mut self, source: Source) -> Result<DevicePacked, PackError> {
        let grid = source.grid;
        let window = self.window(source)?;
        let stream = self.ctx.stream().clone();
        let packed = DeviceBuffer::zeroed(&stream, grid.tiles() * packed::TILE_BYTES)?;
        let heads = DeviceBuffer::zeroed(&stream, grid.tiles() * packed::ROW_BLOCKS)?;
        let (args, words) = self.pack_tiles(source, window, &packed, &heads)?;
        let escapes = DeviceBuffer::zeroed(&stream, words)?;
        self.pack_lists(grid, args, &escapes, words)?;
        Ok(DevicePacked::new(grid, window, packed, heads, escapes)?)
    }

    fn window(&mut self, source: Source) -> Result<Window, PackError> {
        packed::packable_shape(source.grid)?;
        Ok(Window::covering(&self.count_exponents(source)?)?)
    }

    /// Writes containers and heads, after the exponents were counted; returns the number of words of the lists.
    fn pack_tiles(
        &mut self,
        source: Source,
        window: Window,
        packed: &DeviceBuffer<u8>,
        heads: &DeviceBuffer<u32>,
    ) -> Result<(PackArgs, usize), PackError> {
        let (grid, stream) = (source.grid, self.ctx.stream());
        let args = PackArgs { packed: packed.address(), escape_heads: heads.address(), ..self.args(source, window) };
        // SAFETY: `source` and both sections have the sizes that the grid requires (checked by the callers), the
        // scratch has a word for each group.
        unsafe { self.tiles.launch(stream, problem(grid), &args) }?;
        let counted = self.scratch.read(stream, 256, 2 + self.groups(grid)?)?;
        let inexact = u64::from(counted[0]) | u64::from(counted[1]) << 32;
        if inexact != 0 {
            let index = !inexact as usize;
            return Err(Unpackable::Operand { row: index / grid.cols(), col: index % grid.cols() }.into());
        }
        Ok((args, counted[2..].iter().map(|&words| words as usize).sum()))
    }

    /// Writes the lists; directly follows [`Packer::pack_tiles`]. Waits.
    fn pack_lists(
        &self,
        grid: TileGrid,
        args: PackArgs,
        escapes: &DeviceBuffer<u32>,
        words: usize,
    ) -> Result<(), DeviceError> {
        weight::check_capacity("escapes", escapes.len(), words)?;
        if words == 0 {
            return Ok(());
        }
        // Below 2^27: a list has at most 1.5 words per escape, and at most one in 256 of fewer than 2^32 elements is an
        // escape.
        let args = PackArgs { escapes: escapes.address(), escape_words: words as u32, ..args };
        // SAFETY: as for the containers; the kernel writes no word past `escape_words`.
        unsafe { self.lists.launch(self.ctx.stream(), problem(grid), &args) }?;
        self.ctx.stream().synchronize()
    }

    fn count_exponents(&mut self, source: Source) -> Result<Histogram, DeviceError> {
        self.reserve(source.grid)?;
        self.enqueue_stats(source)?;
        let mut histogram = Histogram::default();
        for (exponent, count) in self.scratch.read(self.ctx.stream(), 0, 256)?.into_iter().enumerate() {
            histogram.add(exponent as u8, count.into());
        }
        Ok(histogram)
    }

    /// Allocates the scratch for a matrix.
    fn reserve(&mut self, grid: TileGrid) -> Result<(), DeviceError> {
        // Kernels count row blocks and elements of one exponent in 32 bits.
        if u32::try_from(grid.elements()).is_err() {
            let (value, limit) = (grid.elements() as u64, u32::MAX.into());
            return Err(LaunchError::TooLarge { what: "elements", value, limit }.into());
        }
        let words = SCRATCH_FIXED_WORDS + self.groups(grid)?;
        if self.scratch.len() < words {
            self.scratch = DeviceBuffer::zeroed(self.ctx.stream(), words)?;
        }
        Ok(())
    }

    /// Returns the number of groups of row blocks: blocks of `lists`, each of which has its own sum of list words.
    fn groups(&self, grid: TileGrid) -> Result<usize, DeviceError> {
        Ok(self.lists.blocks(problem(grid))? as usize)
    }

    /// Clears the scratch and counts exponents.
    fn enqueue_stats(&mut self, source: Source) -> Result<(), DeviceError> {
        let stream = self.ctx.stream();
        self.scratch.fill_bytes(stream, 0)?;
        let PackArgs { n, k, tile_rows, tile_cols, .. } = shape(source.grid);
        let (weights, histogram) = (source.address, self.scratch.address());
        let args = EncodeHuffmanArgs { weights, histogram, n, k, tile_rows, tile_cols, ..EncodeHuffmanArgs::default() };
        // SAFETY: `source` has the grid's elements, the histogram has 256 counts; without sign_mantissa, nothing else
        // is accessed.
        unsafe { self.stats.launch(stream, problem(source.grid), &args) }
    }

    fn args(&self, weights: Source, window: Window) -> PackArgs {
        PackArgs {
            weights: weights.address,
            inexact: self.scratch.address() + 256 * 4,
            group_words: self.scratch.address() + SCRATCH_FIXED_WORDS as u64 * 4,
            base: window.base().into(),
            ..shape(weights.grid)
        }
    }
}
