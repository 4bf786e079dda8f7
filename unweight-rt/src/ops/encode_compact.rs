//! Encodes compact tensors on the GPU (`docs/format.md` A.11), with the same bytes as on the CPU.
//!
//! ```text
//! DeviceMatrix --stats--> counts --host: window--> quads --host: book--> sizes --offsets--> write --> DeviceCompact
//! ```
//! The kernels read the weights four times. In between, the host reads results three times: the code that also runs on
//! the CPU then chooses parameters or rejects the matrix. Sections are allocated at their exact size.

use std::sync::Arc;

use unweight_codegen::{
    VariantSpec,
    abi::EncodeCompactArgs,
    plan::GemmShape,
    spec::{EncodeCompactStage, catalog},
};
use unweight_format::{
    EncodingId, Histogram, StoredTensor, TileGrid,
    bundle::SectionBytes,
    raw::{
        CompactTensor,
        compact::{self, ClassBook, Classes, QUADS, Uncompact},
        layout::{DENSE_TILE_BYTES, SECTION_ALIGN},
    },
};

use crate::{
    device::{
        Copier, DeviceBuffer, DeviceError, KernelSet, MatrixRef, Stream, copies::Part, module::LoadedKernel,
        pinned_pool::HostMemory,
    },
    ops::pack::Packer,
    weight::{self, DeviceCompact},
};

/// Why a matrix was not encoded as a compact tensor.
#[derive(Debug, thiserror::Error)]
pub enum EncodeCompactError {
    /// The matrix stays in another encoding.
    #[error(transparent)]
    Uncompact(#[from] Uncompact),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl EncodeCompactError {
    /// Returns the stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Uncompact(why) => why.code(),
            Self::Device(error) => error.code(),
        }
    }
}

/// The encoder's kernels. They run on the stream of a [`Packer`], which counts exponents for them.
#[derive(Clone, Debug)]
pub struct EncodeCompact {
    quads: Arc<LoadedKernel>,
    sizes: Arc<LoadedKernel>,
    write: Arc<LoadedKernel>,
}

/// A compact tensor on the device, with the data that determined its encoding.
#[derive(Debug)]
pub struct EncodedCompact {
    /// The encoded tensor.
    pub tensor: DeviceCompact,
    /// The code of its exponent classes.
    pub book: ClassBook,
    /// The exponents of the matrix.
    pub histogram: Histogram,
}

impl EncodedCompact {
    /// Copies the tensor to the host as it is stored in a bundle. Waits for the stream.
    ///
    /// # Errors
    /// A driver error, or the data on the device are not a compact tensor.
    pub fn download(&self, stream: &Stream) -> Result<CompactTensor<Vec<u8>>, DeviceError> {
        let tensor = StoredTensor::<Vec<u8>>::from(self.download_to(None, &mut Copier::new(stream))?);
        Ok(CompactTensor::of(tensor).unwrap_or_else(|| unreachable!("`download_to` returns this encoding")))
    }

    /// Like [`EncodedCompact::download`], as a stored tensor whose sections stay in memory that `memory` lends.
    pub(crate) fn download_to(
        &self,
        memory: Option<&HostMemory>,
        copier: &mut Copier,
    ) -> Result<StoredTensor<SectionBytes>, DeviceError> {
        let tensor = &self.tensor;
        let (tiles, escapes) = (Part::all(tensor.tiles())?, Part::all(tensor.escapes())?);
        let parts = [tiles, escapes, Part::all(tensor.streams())?, Part::all(tensor.dense())?];
        // In stored order.
        let mut sections: Vec<SectionBytes> = vec![tensor.window().stored().to_vec().into(), self.book.stored().into()];
        sections.extend(HostMemory::download(memory, copier, &parts)?);
        Ok(StoredTensor::new(EncodingId::COMPACT, tensor.grid(), sections)?)
    }
}

impl EncodeCompact {
    /// Compiles or finds the kernels.
    ///
    /// # Errors
    /// The device or the compiler is missing, or failed.
    pub fn of(kernels: &KernelSet) -> Result<Self, DeviceError> {
        let arch = kernels.device().info().arch;
        kernels.prepare(&catalog::encode_compact(arch).collect::<Vec<_>>(), &|_| {})?;
        let stage = |stage| kernels.get(&VariantSpec::encode_compact(arch, stage));
        Ok(Self {
            quads: stage(EncodeCompactStage::Quads)?,
            sizes: stage(EncodeCompactStage::Sizes)?,
            write: stage(EncodeCompactStage::Write)?,
        })
    }

    /// Encodes a contiguous matrix as a compact tensor, with the same bytes as [`compact::encode`]. Waits for the
    /// packer's stream. Does not check whether another encoding would be smaller.
    ///
    /// # Errors
    /// [`EncodeCompactError`], which states why the matrix has no compact encoding.
    pub fn encode(&self, packer: &mut Packer, weights: MatrixRef<'_>) -> Result<EncodedCompact, EncodeCompactError> {
        let (address, [n, k]) = (weights.desc().address, [weights.rows(), weights.cols()]);
        let grid = TileGrid::new(n as usize, k as usize).map_err(DeviceError::from)?;
        compact::whole_tiles(grid)?;
        // `histogram` also checks the operand.
        let histogram = packer.histogram(weights)?;
        let classes = Classes::of(grid, &histogram)?;
        let stream = packer.stream();
        let found = DeviceBuffer::<u32>::zeroed(stream, QUADS + 2)?;
        let args = EncodeCompactArgs {
            weights: address,
            quads: found.address(),
            inexact: found.address() + QUADS as u64 * 4,
            base: classes.window().base().into(),
            filler: classes.filler().into(),
            n,
            k,
            // A grid's dimensions fit 32 bits.
            tile_rows: grid.tile_rows() as u32,
            tile_cols: grid.tile_cols() as u32,
            ..EncodeCompactArgs::default()
        };
        let problem = GemmShape { m: 0, n, k };
        // SAFETY: the weights have the shape in `args` (checked above), and there is a counter for each quad.
        unsafe { self.quads.launch(stream, problem, &args) }?;
        let quads: Vec<u64> = found.read(stream, 0, QUADS)?.into_iter().map(u64::from).collect();
        let coding = classes.coding(&quads)?;

        let table = DeviceBuffer::from_host(stream, &coding.kernel_table())?;
        let sizes = DeviceBuffer::<u32>::zeroed(stream, 2 * grid.tiles())?;
        let args = EncodeCompactArgs { table: table.address(), sizes: sizes.address(), ..args };
        // SAFETY: as above; the table has a code for each quad, and `sizes` two words for each tile.
        unsafe { self.sizes.launch(stream, problem, &args) }?;
        let inexact = found.read(stream, QUADS, 2)?;
        let inexact = u64::from(inexact[0]) | u64::from(inexact[1]) << 32;
        if inexact != 0 {
            let index = !inexact as usize;
            return Err(Uncompact::Operand { row: index / grid.cols(), col: index % grid.cols() }.into());
        }
        let offsets = TileOffsets::of(&sizes.to_host(stream)?).map_err(DeviceError::from)?;

        let tensor = DeviceCompact::new(
            grid,
            classes.window(),
            DeviceBuffer::zeroed(stream, grid.tiles() * DENSE_TILE_BYTES)?,
            DeviceBuffer::from_host(stream, &offsets.tiles)?,
            DeviceBuffer::zeroed(stream, offsets.stream_words.next_multiple_of(SECTION_ALIGN / 4))?,
            DeviceBuffer::zeroed(stream, offsets.list_words.next_multiple_of(SECTION_ALIGN / 4))?,
            DeviceBuffer::from_host(stream, &coding.book().kernel_table())?,
        )?;
        let args = EncodeCompactArgs {
            tiles: tensor.tiles().address(),
            dense: tensor.dense().address(),
            streams: tensor.streams().address(),
            records: tensor.escapes().address(),
            // Below 2^32: the tensor's words were counted.
            record_words: tensor.escapes().len() as u32,
            ..args
        };
        // SAFETY: as above; the sections have the sizes that the tiles need, which bounds all writes even if the
        // weights change.
        unsafe { self.write.launch(stream, problem, &args) }?;
        stream.synchronize()?;
        Ok(EncodedCompact { tensor, book: coding.book().clone(), histogram })
    }
}

/// The offsets of the tiles' streams and lists.
#[derive(Debug, PartialEq, Eq)]
struct TileOffsets {
    /// `class_tiles`; the head of a single escape lacks its record.
    tiles: Vec<u32>,
    /// The number of words of all streams.
    stream_words: usize,
    /// The number of words of all lists.
    list_words: usize,
}

impl TileOffsets {
    /// Computes the offsets from `[tiles, 2]`: words of streams, and numbers of escapes.
    fn of(sizes: &[u32]) -> Result<Self, crate::device::LaunchError> {
        let mut tiles = Vec::with_capacity(sizes.len() + 4);
        let (mut stream_words, mut list_words) = (0usize, 0usize);
        for size in sizes.chunks_exact(2) {
            let (words, escapes) = (size[0] as usize, size[1] as usize);
            // The offset fits: checked below, before anything reads it.
            let head = match escapes {
                0 => 0,
                1 => 1 << 30,
                _ => 1 << 31 | list_words as u32,
            };
            tiles.extend([stream_words as u32, head]);
            stream_words += words;
            list_words += if escapes > 1 { 1 + escapes } else { 0 };
        }
        weight::count("words of streams", stream_words)?;
        // A head has 30 bits for the offset of a list.
        weight::count("words of escapes", list_words.saturating_mul(4))?;
        tiles.extend([stream_words as u32, 0]);
        tiles.resize(tiles.len().next_multiple_of(SECTION_ALIGN / 4), 0);
        Ok(Self { tiles, stream_words, list_words })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compact_tiles_are_contiguous() {
        let offsets = TileOffsets::of(&[100, 0, 90, 1, 80, 2, 70, 5]).unwrap();
        let tiles = [0, 0, 100, 1 << 30, 190, 1 << 31, 270, 1 << 31 | 3, 340, 0, 0, 0];
        assert_eq!(offsets, TileOffsets { tiles: tiles.to_vec(), stream_words: 340, list_words: 9 });
        // 2^32 words are too many.
        assert!(TileOffsets::of(&[1 << 31, 0, 1 << 31, 0]).is_err());
        assert!(TileOffsets::of(&[1, 1 << 31]).is_err());
    }
}
