//! BF16 matrices on the device: activations and raw weights.

use unweight_format::Matrix;

use super::{elements, pods};
use crate::device::{
    Copier, DeviceBuffer, DeviceError, MatrixMut, MatrixRef, Stream, buffer::length, pinned_pool::Upload,
};

/// A BF16 matrix `[rows, cols]`, row-major, in its own buffer.
///
/// The buffer always has exactly the elements of the matrix's shape, so no safe call can replace it:
/// ```compile_fail,E0599
/// # use unweight_rt::{DeviceBuffer, DeviceMatrix};
/// fn shrink(matrix: &mut DeviceMatrix, short: DeviceBuffer<u16>) {
///     *matrix.data_mut() = short;
/// }
/// ```
/// ```compile_fail,E0308
/// # use unweight_rt::{DeviceBuffer, DeviceMatrix};
/// fn shrink(matrix: &mut DeviceMatrix, mut short: DeviceBuffer<u16>) {
///     std::mem::swap(matrix.data(), &mut short);
/// }
/// ```
/// Elements can be overwritten:
/// ```
/// # use unweight_rt::{DeviceError, DeviceMatrix, Stream};
/// fn fill(stream: &Stream, matrix: &mut DeviceMatrix, elements: &[u16]) -> Result<(), DeviceError> {
///     matrix.write(stream, 0, elements)
/// }
/// ```
#[derive(Debug)]
pub struct DeviceMatrix {
    rows: u32,
    cols: u32,
    data: DeviceBuffer<u16>,
}

impl DeviceMatrix {
    /// Creates a matrix of zeros. Waits for the stream.
    pub fn zeroed(stream: &Stream, rows: u32, cols: u32) -> Result<Self, DeviceError> {
        let data = DeviceBuffer::zeroed(stream, length("elements", u64::from(rows) * u64::from(cols))?)?;
        Ok(Self { rows, cols, data })
    }

    /// Copies `bits`, BF16 bit patterns, to the device.
    pub fn from_host(stream: &Stream, rows: u32, cols: u32, bits: &[u16]) -> Result<Self, DeviceError> {
        elements("a matrix", bits.len(), length("elements", u64::from(rows) * u64::from(cols))?)?;
        Ok(Self { rows, cols, data: DeviceBuffer::from_host(stream, bits)? })
    }

    /// Copies the matrix on the device. Waits for the stream.
    pub fn duplicate(&self, stream: &Stream) -> Result<Self, DeviceError> {
        Ok(Self { data: self.data.duplicate(stream)?, ..*self })
    }

    /// Copies a host matrix to the device.
    pub fn upload(stream: &Stream, matrix: Matrix<'_>) -> Result<Self, DeviceError> {
        // A grid's dimensions fit 32 bits.
        let (rows, cols) = (matrix.grid().rows() as u32, matrix.grid().cols() as u32);
        // Matrices of a file are almost always aligned; others need one more copy.
        match bytemuck::try_cast_slice(matrix.bytes()) {
            Ok(bits) => Self::from_host(stream, rows, cols, bits),
            Err(_) => Self::from_host(stream, rows, cols, &pods(matrix.bytes())?),
        }
    }

    /// Overwrites all elements from their little-endian bytes, in stream order.
    pub(crate) fn overwrite_by(&mut self, copier: &mut Copier, bytes: &[u8]) -> Result<(), DeviceError> {
        elements("the bytes of a matrix", bytes.len(), self.data.bytes())?;
        copier.upload(&mut self.data, bytes)
    }

    /// Overwrites all elements from their little-endian bytes in pinned memory. Waits for the copy.
    pub(crate) fn overwrite_pinned(&mut self, stream: &Stream, bytes: &[u8]) -> Result<(), DeviceError> {
        elements("the bytes of a matrix", bytes.len(), self.data.bytes())?;
        let mut upload = Upload::new(stream, bytes);
        upload.add(0..bytes.len(), &mut self.data, 0)?;
        upload.finish()
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// Returns the number of columns.
    pub fn cols(&self) -> u32 {
        self.cols
    }

    /// Returns the size of the elements in bytes.
    pub fn bytes(&self) -> usize {
        self.data.bytes()
    }

    /// Returns the buffer of the elements, row-major.
    pub fn data(&self) -> &DeviceBuffer<u16> {
        &self.data
    }

    /// Returns a view from which launches read.
    pub fn view(&self) -> MatrixRef<'_> {
        MatrixRef::whole(&self.data, self.rows, self.cols)
    }

    /// Returns a view to which launches write.
    pub fn view_mut(&mut self) -> MatrixMut<'_> {
        MatrixMut::whole(&mut self.data, self.rows, self.cols)
    }

    /// Copies the elements to the host, after earlier work on `stream`. Waits for the copy.
    pub fn to_host(&self, stream: &Stream) -> Result<Vec<u16>, DeviceError> {
        self.data.to_host(stream)
    }

    /// Overwrites elements from index `at`, in row-major order. Waits for the copy.
    pub fn write(&mut self, stream: &Stream, at: usize, bits: &[u16]) -> Result<(), DeviceError> {
        self.data.write(stream, at, bits)
    }

    /// Sets every byte of the elements, in stream order.
    pub fn fill_bytes(&mut self, stream: &Stream, byte: u8) -> Result<(), DeviceError> {
        self.data.fill_bytes(stream, byte)
    }

    /// Fills the padding after the elements with a byte, as [`DeviceBuffer::fill_padding`] does.
    pub fn fill_padding(&mut self, stream: &Stream, byte: u8) -> Result<(), DeviceError> {
        self.data.fill_padding(stream, byte)
    }
}
