//! Weights of types other than BF16 with coded exponents (`docs/format.md` A.12).

use std::{borrow::Cow, ops::Range};

use unweight_format::{
    Float, TileGrid,
    raw::{ExponentsTensor, exponents},
};

use super::{
    coded::{CodedSections, DeviceCoded},
    elements,
};
use crate::device::{Device, DeviceBuffer, DeviceError, LaunchError, Upload};

/// The sections of an exponents tensor as unchecked host slices.
#[derive(Clone, Copy, Debug)]
pub struct ExponentsSections<'a> {
    /// The type named by section `float_format`.
    pub float: Float,
    /// u8 `[bytes]`.
    pub fraction_bytes: &'a [u8],
    /// u8 `[bytes]`.
    pub fraction_bits: &'a [u8],
    /// The sections from which a decoder reads the exponents.
    pub exponents: CodedSections<'a>,
}

/// An exponents tensor on the device: FP8, F16 or F32 weights that a decoder restores bit for bit
/// ([`Decoder::elements`](crate::ops::decode_huffman::Decoder::elements)).
#[derive(Debug)]
pub struct DeviceExponents {
    float: Float,
    pub(crate) coded: DeviceCoded,
    /// `fraction_bytes`, followed by `fraction_bits`.
    pub(crate) fractions: DeviceBuffer<u8>,
}

impl DeviceExponents {
    /// Copies a tensor to the device. Waits for the copy.
    ///
    /// # Errors
    /// Not enough memory, more tiles than kernels can count, or a driver error.
    pub fn upload<B: AsRef<[u8]>>(to: impl Upload, tensor: &ExponentsTensor<B>) -> Result<Self, DeviceError> {
        let sections = ExponentsSections {
            float: tensor.float(),
            fraction_bytes: tensor.fraction_bytes(),
            fraction_bits: tensor.fraction_bits(),
            exponents: tensor.exponents().into(),
        };
        Self::from_sections(to, tensor.grid(), &sections)
    }

    /// Copies unchecked sections to the device. Checks only their sizes against the grid; decoders bounds-check the
    /// rest. Waits for the copy.
    ///
    /// # Errors
    /// `float` is BF16, which has other encodings, a section has a wrong size, or as [`DeviceExponents::upload`].
    pub fn from_sections(
        mut to: impl Upload,
        grid: TileGrid,
        sections: &ExponentsSections<'_>,
    ) -> Result<Self, DeviceError> {
        let float = sections.float;
        let [bytes, bits] = exponents::fraction_sections(float, grid).ok_or(LaunchError::NotExponents { float })?;
        elements("fraction_bytes", sections.fraction_bytes.len(), bytes)?;
        elements("fraction_bits", sections.fraction_bits.len(), bits)?;
        // Only F16 has both.
        let fractions = match (sections.fraction_bytes, sections.fraction_bits) {
            (bytes, []) => Cow::Borrowed(bytes),
            ([], bits) => Cow::Borrowed(bits),
            both => Cow::Owned([both.0, both.1].concat()),
        };
        let coded = DeviceCoded::from_sections(&mut to, grid, sections.exponents)?;
        let tensor = Self { float, coded, fractions: to.section(&fractions)? };
        to.finish()?;
        Ok(tensor)
    }

    /// Returns the type of the weights.
    pub fn float(&self) -> Float {
        self.float
    }

    /// Returns shape and tiling.
    pub fn grid(&self) -> TileGrid {
        self.coded.grid
    }

    /// Returns the length of the longest code in bits.
    pub fn code_bits(&self) -> u32 {
        self.coded.code_bits
    }

    /// Returns the device of the tensor.
    pub fn device(&self) -> &Device {
        self.fractions.device()
    }

    /// Returns the size of the buffers' elements in bytes: the most that a decoder reads.
    pub fn bytes(&self) -> u64 {
        (self.fractions.bytes() + self.coded.bytes()) as u64
    }

    /// Returns the size of the decoded weights in bytes.
    pub fn decoded_bytes(&self) -> usize {
        self.grid().elements() * self.float.bytes()
    }

    /// Returns the address ranges of the sections, except palette and code.
    pub(crate) fn spans(&self) -> [(&'static str, Range<u64>); 5] {
        let [encoded, lengths, metadata, verbatim] = self.coded.spans();
        [("fractions", self.fractions.span()), encoded, lengths, metadata, verbatim]
    }
}
