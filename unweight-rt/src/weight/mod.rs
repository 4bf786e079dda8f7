//! The device side of a compressed tensor: its sections as buffers, in the layouts of `docs/format.md` part A.
//!
//! Sections lie in buffers of their own, 256-byte aligned and readable past their end ([`DeviceBuffer::PAD_BYTES`]). Uploading takes a
//! validated tensor; [`DeviceHuffman::from_sections`] takes anything, because decoders check what they follow.

use bytemuck::Pod;
use unweight_format::{
    HuffmanTensor, Matrix, PaletteTensor, TileGrid, TileMetadata,
    packed::{self, PackedTensor, Window},
};

use crate::device::{DeviceBuffer, DeviceError, Stream};

/// A BF16 matrix `[rows, cols]`, row-major.
#[derive(Debug)]
pub struct DeviceMatrix {
    rows: u32,
    cols: u32,
    data: DeviceBuffer<u16>,
}

impl DeviceMatrix {
    /// A matrix of zeros.
    pub fn zeroed(stream: &Stream, rows: u32, cols: u32) -> Result<Self, DeviceError> {
        let data = DeviceBuffer::zeroed(stream, rows as usize * cols as usize)?;
        Ok(Self { rows, cols, data })
    }

    /// A copy of `elements`, bit patterns of bf16.
    pub fn from_host(stream: &Stream, rows: u32, cols: u32, elements: &[u16]) -> Result<Self, DeviceError> {
        if rows as usize * cols as usize != elements.len() {
            return Err(DeviceError::Shape(format!("[{rows}, {cols}] does not have {} elements", elements.len())));
        }
        Ok(Self { rows, cols, data: DeviceBuffer::from_host(stream, elements)? })
    }

    /// A copy on the device.
    pub fn duplicate(&self, stream: &Stream) -> Result<Self, DeviceError> {
        Ok(Self { data: self.data.duplicate(stream)?, ..*self })
    }

    /// A copy of a matrix.
    pub fn upload(stream: &Stream, matrix: Matrix<'_>) -> Result<Self, DeviceError> {
        // A grid's dimensions fit 32 bits.
        let (rows, cols) = (matrix.grid().rows() as u32, matrix.grid().cols() as u32);
        // Matrices of a file are almost always aligned; others are copied once more.
        match bytemuck::try_cast_slice(matrix.bytes()) {
            Ok(elements) => Self::from_host(stream, rows, cols, elements),
            Err(_) => Self::from_host(stream, rows, cols, &pods(matrix.bytes())?),
        }
    }

    /// Rows.
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// Columns.
    pub fn cols(&self) -> u32 {
        self.cols
    }

    /// The elements.
    pub fn data(&self) -> &DeviceBuffer<u16> {
        &self.data
    }

    /// The elements, to be written.
    pub fn data_mut(&mut self) -> &mut DeviceBuffer<u16> {
        &mut self.data
    }
}

/// The sections of a Huffman tensor as host slices, checked by nobody.
#[derive(Clone, Copy, Debug)]
pub struct HuffmanSections<'a> {
    /// u8 `[n, k]`.
    pub sign_mantissa: &'a [u8],
    /// u32 `[words]`, as bytes.
    pub encoded_exp: &'a [u8],
    /// u8 `[tiles, 64]`.
    pub row_lengths: &'a [u8],
    /// `[tiles]` of 16 bytes.
    pub tile_metadata: &'a [u8],
    /// u8 `[rows, 64]`.
    pub verbatim_exponents: &'a [u8],
    /// Exponents.
    pub palette: [u8; 16],
    /// Bits.
    pub code_lengths: [u8; 16],
}

/// A Huffman tensor on the device.
#[derive(Debug)]
pub struct DeviceHuffman {
    grid: TileGrid,
    code_bits: u32,
    max_verbatim_rows: u32,
    pub(crate) sign_mantissa: DeviceBuffer<u8>,
    pub(crate) encoded_exp: DeviceBuffer<u32>,
    pub(crate) row_lengths: DeviceBuffer<u8>,
    pub(crate) tile_metadata: DeviceBuffer<TileMetadata>,
    pub(crate) verbatim_exponents: DeviceBuffer<u8>,
    pub(crate) palette: DeviceBuffer<u8>,
    pub(crate) code_lengths: DeviceBuffer<u8>,
}

impl DeviceHuffman {
    /// Copies a tensor to the device.
    pub fn upload<B: AsRef<[u8]>>(stream: &Stream, tensor: &HuffmanTensor<B>) -> Result<Self, DeviceError> {
        let sections = HuffmanSections {
            sign_mantissa: tensor.sign_mantissa(),
            encoded_exp: tensor.encoded_exp(),
            row_lengths: tensor.row_lengths(),
            tile_metadata: tensor.tile_metadata(),
            verbatim_exponents: tensor.verbatim_exponents(),
            palette: tensor.code().palette().stored(),
            code_lengths: tensor.code().lengths(),
        };
        Self::from_sections(stream, tensor.grid(), &sections)
    }

    /// Copies sections that nobody has checked. Only their sizes are held against the grid; decoders bound the rest.
    pub fn from_sections(stream: &Stream, grid: TileGrid, sections: &HuffmanSections<'_>) -> Result<Self, DeviceError> {
        device_shape(grid)?;
        section("sign_mantissa", sections.sign_mantissa, grid.elements())?;
        section("row_lengths", sections.row_lengths, grid.tiles() * 64)?;
        section("tile_metadata", sections.tile_metadata, grid.tiles() * TileMetadata::BYTES)?;
        verbatim_rows(sections.verbatim_exponents)?;
        let metadata: Vec<TileMetadata> = pods(sections.tile_metadata)?;
        Ok(Self {
            grid,
            code_bits: sections.code_lengths.iter().copied().max().unwrap_or(0).into(),
            max_verbatim_rows: most_verbatim(&metadata),
            sign_mantissa: DeviceBuffer::from_host(stream, sections.sign_mantissa)?,
            encoded_exp: DeviceBuffer::from_host(stream, &pods::<u32>(sections.encoded_exp)?)?,
            row_lengths: DeviceBuffer::from_host(stream, sections.row_lengths)?,
            tile_metadata: DeviceBuffer::from_host(stream, &metadata)?,
            verbatim_exponents: DeviceBuffer::from_host(stream, sections.verbatim_exponents)?,
            palette: DeviceBuffer::from_host(stream, &sections.palette)?,
            code_lengths: DeviceBuffer::from_host(stream, &sections.code_lengths)?,
        })
    }

    /// Shape and tiling.
    pub fn grid(&self) -> TileGrid {
        self.grid
    }

    /// Longest code, bits.
    pub fn code_bits(&self) -> u32 {
        self.code_bits
    }

    /// Most verbatim rows in one tile.
    pub fn max_verbatim_rows(&self) -> u32 {
        self.max_verbatim_rows
    }

    /// Bytes of the buffers' elements: what a decoder reads at most, `sign_mantissa` included.
    pub fn bytes(&self) -> u64 {
        (self.sign_mantissa.bytes() + self.coded_exponent_bytes()) as u64
    }

    /// Bytes of everything but `sign_mantissa`.
    pub fn coded_exponent_bytes(&self) -> usize {
        self.encoded_exp.bytes()
            + self.row_lengths.bytes()
            + self.tile_metadata.bytes()
            + self.verbatim_exponents.bytes()
            + self.palette.bytes()
            + self.code_lengths.bytes()
    }

    /// The weights as a palette source, with the indices that a transcoder wrote to `palette_index`.
    pub fn as_palette<'a>(&'a self, palette_index: &'a DeviceBuffer<u8>) -> PaletteView<'a> {
        PaletteView {
            grid: self.grid,
            max_verbatim_rows: self.max_verbatim_rows,
            sign_mantissa: &self.sign_mantissa,
            palette_index,
            tile_metadata: &self.tile_metadata,
            verbatim_exponents: &self.verbatim_exponents,
            palette: &self.palette,
        }
    }

    /// The weights as an exponent source, with the exponents that a decoder wrote to `exponents`.
    pub fn as_exponent<'a>(&'a self, exponents: &'a DeviceBuffer<u8>) -> ExponentView<'a> {
        ExponentView { grid: self.grid, sign_mantissa: &self.sign_mantissa, exponents }
    }
}

/// A palette tensor on the device.
#[derive(Debug)]
pub struct DevicePalette {
    grid: TileGrid,
    max_verbatim_rows: u32,
    sign_mantissa: DeviceBuffer<u8>,
    palette_index: DeviceBuffer<u8>,
    tile_metadata: DeviceBuffer<TileMetadata>,
    verbatim_exponents: DeviceBuffer<u8>,
    palette: DeviceBuffer<u8>,
}

impl DevicePalette {
    /// Copies a tensor to the device.
    pub fn upload<B: AsRef<[u8]>>(stream: &Stream, tensor: &PaletteTensor<B>) -> Result<Self, DeviceError> {
        let sections = PaletteSections {
            sign_mantissa: tensor.sign_mantissa(),
            palette_index: tensor.palette_index(),
            tile_metadata: tensor.tile_metadata(),
            verbatim_exponents: tensor.verbatim_exponents(),
            palette: tensor.palette(),
        };
        Self::from_sections(stream, tensor.grid(), &sections)
    }

    /// Copies sections that nobody has checked. Only their sizes are held against the grid; the matmul bounds the rest.
    pub fn from_sections(stream: &Stream, grid: TileGrid, sections: &PaletteSections<'_>) -> Result<Self, DeviceError> {
        device_shape(grid)?;
        section("sign_mantissa", sections.sign_mantissa, grid.elements())?;
        section("palette_index", sections.palette_index, grid.tiles() * 2048)?;
        section("tile_metadata", sections.tile_metadata, grid.tiles() * TileMetadata::BYTES)?;
        verbatim_rows(sections.verbatim_exponents)?;
        let metadata: Vec<TileMetadata> = pods(sections.tile_metadata)?;
        Ok(Self {
            grid,
            max_verbatim_rows: most_verbatim(&metadata),
            sign_mantissa: DeviceBuffer::from_host(stream, sections.sign_mantissa)?,
            palette_index: DeviceBuffer::from_host(stream, sections.palette_index)?,
            tile_metadata: DeviceBuffer::from_host(stream, &metadata)?,
            verbatim_exponents: DeviceBuffer::from_host(stream, sections.verbatim_exponents)?,
            palette: DeviceBuffer::from_host(stream, &sections.palette)?,
        })
    }

    /// What a matmul reads.
    pub fn view(&self) -> PaletteView<'_> {
        PaletteView {
            grid: self.grid,
            max_verbatim_rows: self.max_verbatim_rows,
            sign_mantissa: &self.sign_mantissa,
            palette_index: &self.palette_index,
            tile_metadata: &self.tile_metadata,
            verbatim_exponents: &self.verbatim_exponents,
            palette: &self.palette,
        }
    }
}

/// The sections of a palette tensor as host slices, checked by nobody.
#[derive(Clone, Copy, Debug)]
pub struct PaletteSections<'a> {
    /// u8 `[n, k]`.
    pub sign_mantissa: &'a [u8],
    /// u8 `[tiles, 64, 32]`.
    pub palette_index: &'a [u8],
    /// `[tiles]` of 16 bytes.
    pub tile_metadata: &'a [u8],
    /// u8 `[rows, 64]`.
    pub verbatim_exponents: &'a [u8],
    /// Exponents.
    pub palette: [u8; 16],
}

/// Weights as the palette source of a matmul.
#[derive(Clone, Copy, Debug)]
pub struct PaletteView<'a> {
    pub(crate) grid: TileGrid,
    pub(crate) max_verbatim_rows: u32,
    pub(crate) sign_mantissa: &'a DeviceBuffer<u8>,
    pub(crate) palette_index: &'a DeviceBuffer<u8>,
    pub(crate) tile_metadata: &'a DeviceBuffer<TileMetadata>,
    pub(crate) verbatim_exponents: &'a DeviceBuffer<u8>,
    pub(crate) palette: &'a DeviceBuffer<u8>,
}

/// Weights as the exponent source of a matmul.
#[derive(Clone, Copy, Debug)]
pub struct ExponentView<'a> {
    pub(crate) grid: TileGrid,
    pub(crate) sign_mantissa: &'a DeviceBuffer<u8>,
    pub(crate) exponents: &'a DeviceBuffer<u8>,
}

impl PaletteView<'_> {
    /// Bytes that a matmul reads at least.
    pub fn bytes(&self) -> usize {
        self.sign_mantissa.bytes()
            + self.palette_index.bytes()
            + self.tile_metadata.bytes()
            + self.verbatim_exponents.bytes()
    }
}

impl ExponentView<'_> {
    /// Bytes that a matmul reads at least.
    pub fn bytes(&self) -> usize {
        self.sign_mantissa.bytes() + self.exponents.bytes()
    }
}

/// A packed tensor on the device (`docs/format.md` A.9): what the register-sourced matmuls multiply with.
#[derive(Debug)]
pub struct DevicePacked {
    grid: TileGrid,
    window: Window,
    has_escapes: bool,
    packed: DeviceBuffer<u8>,
    escape_heads: DeviceBuffer<u32>,
    escapes: DeviceBuffer<u32>,
}

impl DevicePacked {
    /// Copies a tensor to the device.
    pub fn upload<B: AsRef<[u8]>>(stream: &Stream, tensor: &PackedTensor<B>) -> Result<Self, DeviceError> {
        let heads = pods::<u32>(tensor.escape_heads())?;
        let device = Self::new(
            tensor.grid(),
            tensor.window(),
            DeviceBuffer::from_host(stream, tensor.packed())?,
            DeviceBuffer::from_host(stream, &heads)?,
            DeviceBuffer::from_host(stream, &pods::<u32>(tensor.escapes())?)?,
        )?;
        Ok(Self { has_escapes: heads.iter().any(|head| *head != 0), ..device })
    }

    /// A copy on the device.
    pub fn duplicate(&self, stream: &Stream) -> Result<Self, DeviceError> {
        Ok(Self {
            packed: self.packed.duplicate(stream)?,
            escape_heads: self.escape_heads.duplicate(stream)?,
            escapes: self.escapes.duplicate(stream)?,
            ..*self
        })
    }

    /// Sections that are on the device, checked by nobody: u8 `[tiles, 6144]`, u32 `[tiles, 4]`, u32 `[words]`. Only their sizes are held
    /// against the grid; kernels bound what a head or a list leads to. Taken to have escapes.
    pub fn new(
        grid: TileGrid,
        window: Window,
        packed: DeviceBuffer<u8>,
        escape_heads: DeviceBuffer<u32>,
        escapes: DeviceBuffer<u32>,
    ) -> Result<Self, DeviceError> {
        device_shape(grid)?;
        if !grid.rows().is_multiple_of(64) || !grid.cols().is_multiple_of(64) {
            let (rows, cols) = (grid.rows(), grid.cols());
            return Err(DeviceError::Shape(format!("[{rows}, {cols}] cannot be packed: both must be multiples of 64")));
        }
        elements("packed", packed.len(), grid.tiles() * packed::TILE_BYTES)?;
        elements("escape_heads", escape_heads.len(), grid.tiles() * packed::ROW_BLOCKS)?;
        if u32::try_from(escapes.len()).is_err() {
            return Err(DeviceError::Shape(format!(
                "section escapes: {} words, kernels count in 32 bits",
                escapes.len()
            )));
        }
        Ok(Self { grid, window, has_escapes: true, packed, escape_heads, escapes })
    }

    /// The tensor on the host, checked.
    ///
    /// # Errors
    /// What is on the device is no packed tensor.
    pub fn download(&self, stream: &Stream) -> Result<PackedTensor<Vec<u8>>, DeviceError> {
        let words = |buffer: &DeviceBuffer<u32>| -> Result<Vec<u8>, DeviceError> {
            Ok(buffer.to_host(stream)?.iter().flat_map(|word| word.to_le_bytes()).collect())
        };
        let (heads, escapes) = (words(&self.escape_heads)?, words(&self.escapes)?);
        Ok(PackedTensor::from_parts(self.grid, self.window, self.packed.to_host(stream)?, heads, escapes)?)
    }

    /// Shape and tiling.
    pub fn grid(&self) -> TileGrid {
        self.grid
    }

    /// The window.
    pub fn window(&self) -> Window {
        self.window
    }

    /// Whether an element may lie outside the window.
    pub fn has_escapes(&self) -> bool {
        self.has_escapes
    }

    /// u8 `[tiles, 6144]`.
    pub fn packed(&self) -> &DeviceBuffer<u8> {
        &self.packed
    }

    /// u32 `[tiles, 4]`.
    pub fn escape_heads(&self) -> &DeviceBuffer<u32> {
        &self.escape_heads
    }

    /// u32 `[words]`: lists of escapes.
    pub fn escapes(&self) -> &DeviceBuffer<u32> {
        &self.escapes
    }

    /// Bytes of all sections.
    pub fn bytes(&self) -> u64 {
        (self.packed.bytes() + self.escape_heads.bytes() + self.escapes.bytes()) as u64
    }
}

/// Kernels count tiles in 32 bits.
fn device_shape(grid: TileGrid) -> Result<(), DeviceError> {
    if grid.tiles() < 1 << 31 {
        Ok(())
    } else {
        let (rows, cols) = (grid.rows(), grid.cols());
        Err(DeviceError::Shape(format!(
            "[{rows}, {cols}] has {} tiles, above the kernels' 2^31 - 1; split it",
            grid.tiles()
        )))
    }
}

fn section(name: &str, bytes: &[u8], expected: usize) -> Result<(), DeviceError> {
    elements(name, bytes.len(), expected)
}

fn elements(name: &str, got: usize, expected: usize) -> Result<(), DeviceError> {
    if got == expected {
        Ok(())
    } else {
        Err(DeviceError::Shape(format!("section {name}: {got} elements, the shape asks for {expected}")))
    }
}

fn verbatim_rows(bytes: &[u8]) -> Result<(), DeviceError> {
    if bytes.len().is_multiple_of(64) && u32::try_from(bytes.len() / 64).is_ok() {
        Ok(())
    } else {
        Err(DeviceError::Shape(format!("section verbatim_exponents: {} bytes are no rows of 64", bytes.len())))
    }
}

/// The values in a section of any alignment.
pub(crate) fn pods<T: Pod>(bytes: &[u8]) -> Result<Vec<T>, DeviceError> {
    if !bytes.len().is_multiple_of(size_of::<T>()) {
        return Err(DeviceError::Shape(format!(
            "a section of {} bytes holds no whole number of {}-byte values",
            bytes.len(),
            size_of::<T>()
        )));
    }
    Ok(bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect())
}

fn most_verbatim(metadata: &[TileMetadata]) -> u32 {
    metadata.iter().map(|tile| tile.bitmask().count_ones()).max().unwrap_or(0)
}
