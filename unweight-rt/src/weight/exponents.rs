//! Weights of other types than BF16 with coded exponents (`docs/format.md` A.12).

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

/// The sections of a tensor of exponents as host slices; they are not checked.
#[derive(Clone, Copy, Debug)]
pub struct ExponentsSections<'a> {
    /// The type that section `float_format` names.
    pub float: Float,
    /// u8 `[bytes]`.
    pub fraction_bytes: &'a [u8],
    /// u8 `[bytes]`.
    pub fraction_bits: &'a [u8],
    /// The sections that a decoder reads the exponents from.
    pub exponents: CodedSections<'a>,
}

/// A tensor of exponents on the device: FP8, F16 or F32 weights that a decoder writes as they were
/// ([`Decoder::elements`](crate::ops::decode_huffman::Decoder::elements)).
#[derive(Debug)]
pub struct DeviceExponents {
    float: Float,
    pub(crate) coded: DeviceCoded,
    /// `fraction_bytes`, and `fraction_bits` behind them.
    pub(crate) fractions: DeviceBuffer<u8>,
}

impl DeviceExponents {
    /// Copies a tensor to the device. Waits for the copy.
    ///
    /// # Errors
    /// Not enough memory, more tiles than kernels count, or an error of the driver.
    pub fn upload<B: AsRef<[u8]>>(to: impl Upload, tensor: &ExponentsTensor<B>) -> Result<Self, DeviceError> {
        let sections = ExponentsSections {
            float: tensor.float(),
            fraction_bytes: tensor.fraction_bytes(),
            fraction_bits: tensor.fraction_bits(),
            exponents: tensor.exponents().into(),
        };
        Self::from_sections(to, tensor.grid(), &sections)
    }

    /// Copies sections that were not checked. Only their sizes are held against the grid; decoders bound the rest.
    /// Waits for the copy.
    ///
    /// # Errors
    /// BF16, which has encodings of its own, a section of another size, or as [`DeviceExponents::upload`].
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

    /// Type of the weights.
    pub fn float(&self) -> Float {
        self.float
    }

    /// Shape and tiling.
    pub fn grid(&self) -> TileGrid {
        self.coded.grid
    }

    /// Longest code, bits.
    pub fn code_bits(&self) -> u32 {
        self.coded.code_bits
    }

    /// The device that holds it.
    pub fn device(&self) -> &Device {
        self.fractions.device()
    }

    /// Bytes of the buffers' elements: what a decoder reads at most.
    pub fn bytes(&self) -> u64 {
        (self.fractions.bytes() + self.coded.bytes()) as u64
    }

    /// Bytes of the weights themselves.
    pub fn decoded_bytes(&self) -> usize {
        self.grid().elements() * self.float.bytes()
    }

    /// The addresses of its sections, but for palette and code.
    pub(crate) fn spans(&self) -> [(&'static str, Range<u64>); 5] {
        let [encoded, lengths, metadata, verbatim] = self.coded.spans();
        [("fractions", self.fractions.span()), encoded, lengths, metadata, verbatim]
    }
}
