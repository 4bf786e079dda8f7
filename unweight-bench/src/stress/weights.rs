//! Weights and inputs of one shape, in every encoding, with exact products.

use rayon::prelude::*;
use unweight_codegen::abi::DecodeHuffmanArgs;
use unweight_format::{
    CodeLimit, Float, Histogram, Matrix, TileGrid,
    raw::{
        PackedTensor, PaletteTensor, TileMetadata, compact,
        huffman::{self, CodedExponents},
        packed, palette,
    },
    testing::{Random, float_weights},
};
use unweight_rt::{
    DeviceBuffer, DevicePacked, Stream,
    raw::weight::{DeviceCompact, DeviceHuffman, DevicePalette},
};

use crate::{
    data::{halves, normal_bf16},
    error::BenchError,
};

/// The maximum batch.
pub(super) const ROWS: u32 = 656;

/// Weights of one shape in every encoding, inputs, and products in double precision.
pub(super) struct Weights {
    pub(super) shape: (u32, u32),
    pub(super) bytes: Vec<u8>,
    pub(super) x: DeviceBuffer<u16>,
    /// bf16 contents of outputs before a launch adds to them.
    pub(super) old: Vec<u8>,
    /// bf16, the first row of `old`.
    pub(super) bias: DeviceBuffer<u16>,
    /// The bias in each row.
    pub(super) bias_rows: Vec<u8>,
    pub(super) with_escapes: PackedOnDevice,
    pub(super) without_escapes: PackedOnDevice,
    /// `None` for a matrix that is too small for a codebook or happens to have too many escapes.
    pub(super) compact: Option<DeviceCompact>,
    pub(super) few_rows: ReconOnDevice,
    pub(super) no_rows: ReconOnDevice,
    /// For each element of Y, the product and the sum of the magnitudes of its terms.
    pub(super) exact: Vec<(f64, f64)>,
    pub(super) exact_without_escapes: Vec<(f64, f64)>,
    pub(super) exact_few_rows: Vec<(f64, f64)>,
}

pub(super) struct PackedOnDevice {
    pub(super) host: PackedTensor<Vec<u8>>,
    pub(super) device: DevicePacked,
}

impl PackedOnDevice {
    pub(super) fn new(stream: &Stream, bytes: &[u8], (n, k): (u32, u32)) -> Result<Self, BenchError> {
        let matrix = Matrix::new(bytes, n as usize, k as usize)?;
        let host = packed::pack(matrix, &Histogram::of(bytes)).map_err(|why| BenchError::Unpackable { n, k, why })?;
        Ok(Self { device: DevicePacked::upload(stream, &host)?, host })
    }
}

fn compact_on_device(stream: &Stream, bytes: &[u8], (n, k): (u32, u32)) -> Result<Option<DeviceCompact>, BenchError> {
    let host = compact::encode(Matrix::new(bytes, n as usize, k as usize)?, &Histogram::of(bytes)).ok();
    Ok(host.map(|host| DeviceCompact::upload(stream, &host)).transpose()?)
}

/// A tensor in the palette and Huffman encodings, and its exponents.
pub(super) struct ReconOnDevice {
    pub(super) max_verbatim_rows: u32,
    pub(super) palette: DevicePalette,
    pub(super) huffman: DeviceHuffman,
    pub(super) exponents: DeviceBuffer<u8>,
}

impl ReconOnDevice {
    pub(super) fn new(stream: &Stream, bytes: &[u8], (n, k): (u32, u32)) -> Result<Self, BenchError> {
        let matrix = Matrix::new(bytes, n as usize, k as usize)?;
        let palette: PaletteTensor<Vec<u8>> = palette::encode(matrix, CodeLimit::DEFAULT)?;
        Ok(Self {
            max_verbatim_rows: palette.max_verbatim_rows(),
            palette: DevicePalette::upload(stream, &palette)?,
            huffman: DeviceHuffman::upload(stream, &huffman::encode(matrix, CodeLimit::DEFAULT)?)?,
            exponents: DeviceBuffer::from_host(stream, &exponents_by_tile(matrix))?,
        })
    }
}

/// Returns weights of a float type; one in 700 has random bits.
pub(super) fn with_any_bits(float: Float, elements: usize) -> Vec<u8> {
    let seed = elements as u64;
    let (mut bytes, mut random) = (float_weights(float, elements, seed), Random::new(seed ^ 0x77));
    for element in bytes.chunks_exact_mut(float.bytes()) {
        if random.below(700) == 0 {
            element.copy_from_slice(&(random.bits() as u32).to_le_bytes()[..float.bytes()]);
        }
    }
    bytes
}

pub(super) struct CodedOnDevice {
    sign_mantissa: DeviceBuffer<u8>,
    encoded_exp: DeviceBuffer<u32>,
    row_lengths: DeviceBuffer<u8>,
    tile_metadata: DeviceBuffer<TileMetadata>,
    verbatim: DeviceBuffer<u8>,
    palette: DeviceBuffer<u8>,
    code_lengths: DeviceBuffer<u8>,
}

impl CodedOnDevice {
    pub(super) fn upload(
        stream: &Stream,
        sign_mantissa: &[u8],
        tensor: &CodedExponents<Vec<u8>>,
    ) -> Result<Self, BenchError> {
        Ok(Self {
            sign_mantissa: DeviceBuffer::from_host(stream, sign_mantissa)?,
            encoded_exp: DeviceBuffer::from_host(stream, &pods::<u32>(tensor.encoded_exp()))?,
            row_lengths: DeviceBuffer::from_host(stream, tensor.row_lengths())?,
            tile_metadata: DeviceBuffer::from_host(stream, &pods::<TileMetadata>(tensor.tile_metadata()))?,
            verbatim: DeviceBuffer::from_host(stream, tensor.verbatim_exponents())?,
            palette: DeviceBuffer::from_host(stream, &tensor.code().palette().stored())?,
            code_lengths: DeviceBuffer::from_host(stream, &tensor.code().lengths())?,
        })
    }

    pub(super) fn args(&self, grid: TileGrid, fault: u64) -> DecodeHuffmanArgs {
        DecodeHuffmanArgs {
            sign_mantissa: self.sign_mantissa.address(),
            encoded_exp: self.encoded_exp.address(),
            row_lengths: self.row_lengths.address(),
            tile_metadata: self.tile_metadata.address(),
            verbatim_exponents: self.verbatim.address(),
            palette: self.palette.address(),
            code_lengths: self.code_lengths.address(),
            fault,
            encoded_words: self.encoded_exp.len() as u64,
            verbatim_rows: self.verbatim.len() as u32 / 64,
            n: grid.rows() as u32,
            k: grid.cols() as u32,
            tile_rows: grid.tile_rows() as u32,
            tile_cols: grid.tile_cols() as u32,
            ..DecodeHuffmanArgs::default()
        }
    }
}

impl Weights {
    pub(super) fn new(stream: &Stream, (n, k): (u32, u32)) -> Result<Self, BenchError> {
        let elements = n as usize * k as usize;
        let seed = u64::from(n) << 32 | u64::from(k);
        let few_rows = normal_bf16(elements, 0.02, seed);
        let bytes = with_outliers(&few_rows, k);
        let mut inside = halves(&few_rows);
        for element in &mut inside {
            let exponent = (*element >> 7 & 0xff).clamp(108, 123);
            *element = *element & 0x807f | exponent << 7;
        }
        let without: Vec<u8> = inside.iter().flat_map(|bits| bits.to_le_bytes()).collect();
        let x = normal_bf16(ROWS as usize * k as usize, 1.0, seed ^ 0x55);
        let old = normal_bf16(ROWS as usize * n as usize, 1.0, seed ^ 0xaa);
        Ok(Self {
            shape: (n, k),
            exact: products(&x, &bytes, (n, k)),
            exact_without_escapes: products(&x, &without, (n, k)),
            exact_few_rows: products(&x, &few_rows, (n, k)),
            with_escapes: PackedOnDevice::new(stream, &bytes, (n, k))?,
            without_escapes: PackedOnDevice::new(stream, &without, (n, k))?,
            compact: compact_on_device(stream, &bytes, (n, k))?,
            few_rows: ReconOnDevice::new(stream, &few_rows, (n, k))?,
            no_rows: ReconOnDevice::new(stream, &without, (n, k))?,
            x: DeviceBuffer::from_host(stream, &halves(&x))?,
            bias: DeviceBuffer::from_host(stream, &halves(&old[..n as usize * 2]))?,
            bias_rows: old[..n as usize * 2].repeat(ROWS as usize),
            old,
            bytes,
        })
    }

    pub(super) fn matrix(&self) -> Result<Matrix<'_>, BenchError> {
        Ok(Matrix::new(&self.bytes, self.shape.0 as usize, self.shape.1 as usize)?)
    }
}

/// Returns the weights with every 499th element far outside any window: zeros, subnormals and large values. Row 5
/// begins with a run of them, longer than a warp in all but the smallest matrices.
pub(super) fn with_outliers(weights: &[u8], k: u32) -> Vec<u8> {
    let (mut bytes, elements) = (weights.to_vec(), weights.len() / 2);
    for (at, element) in bytes.chunks_exact_mut(2).enumerate() {
        let dense = at / k as usize == 5 && at % (k as usize) < (elements / 1000).min(40);
        if dense || at % 499 == 7 {
            let bits = u16::from_le_bytes([element[0], element[1]]);
            let exponent = [0u16, 90, 100, 130][(bits & 3) as usize];
            let mantissa = if bits & 4 == 0 { 0x7f } else { 0 };
            element.copy_from_slice(&((bits & (0x8000 | mantissa)) | exponent << 7).to_le_bytes());
        }
    }
    bytes
}

/// Reads the values of a section of any alignment.
fn pods<T: bytemuck::AnyBitPattern>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

pub(super) fn value(bits: u16) -> f64 {
    f64::from(f32::from_bits(u32::from(bits) << 16))
}

fn products(x: &[u8], w: &[u8], (n, k): (u32, u32)) -> Vec<(f64, f64)> {
    let values = |bytes: &[u8]| halves(bytes).into_iter().map(value).collect::<Vec<f64>>();
    let (x, w, n, k) = (values(x), values(w), n as usize, k as usize);
    (0..ROWS as usize * n)
        .into_par_iter()
        .map(|at| {
            let terms = x[at / n * k..][..k].iter().zip(&w[at % n * k..][..k]).map(|(x, w)| x * w);
            terms.fold((0.0, 0.0), |(sum, magnitude), term| (sum + term, magnitude + term.abs()))
        })
        .collect()
}

/// Returns the exponents of a matrix of whole tiles, u8 `[tiles, 64, 64]`.
pub(super) fn exponents_by_tile(matrix: Matrix<'_>) -> Vec<u8> {
    let (grid, bytes) = (matrix.grid(), matrix.bytes());
    let (rows, cols) = (grid.rows(), grid.cols());
    let mut exponents = Vec::with_capacity(rows * cols);
    for tile in 0..grid.tiles() {
        let (row, col) = (tile / grid.tile_cols() * 64, tile % grid.tile_cols() * 64);
        for at in (row..row + 64).flat_map(|row| (col..col + 64).map(move |col| row * cols + col)) {
            exponents.push((u16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]]) >> 7) as u8);
        }
    }
    exponents
}
