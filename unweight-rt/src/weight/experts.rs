//! The weights of a mixture's experts for one product: packed, or BF16 if they cannot be packed.

use unweight_format::raw::packed::Unpackable;

use super::{DeviceMatrix, DevicePacked, shape};
use crate::device::{Device, DeviceError, Stream};

/// The weights of all experts of a mixture for one product, with the experts concatenated by rows.
#[derive(Debug)]
#[non_exhaustive]
pub enum ExpertWeights {
    /// Packed, 12 bits per weight.
    Packed(DevicePacked),
    /// BF16, row-major.
    Bf16 {
        /// The weights.
        weights: DeviceMatrix,
        /// Why they are not packed; `None` if BF16 was requested.
        why: Option<Unpackable>,
    },
}

impl From<DevicePacked> for ExpertWeights {
    fn from(packed: DevicePacked) -> Self {
        Self::Packed(packed)
    }
}

impl From<DeviceMatrix> for ExpertWeights {
    fn from(weights: DeviceMatrix) -> Self {
        Self::Bf16 { weights, why: None }
    }
}

impl ExpertWeights {
    /// Returns whether the weights are BF16.
    pub(crate) fn is_bf16(&self) -> bool {
        matches!(self, Self::Bf16 { .. })
    }

    /// Returns why the weights are not packed; `None` if they are, or if BF16 was requested.
    pub(crate) fn unpackable(&self) -> Option<Unpackable> {
        match self {
            Self::Packed(_) => None,
            Self::Bf16 { why, .. } => *why,
        }
    }

    /// Returns the rows of all experts, and the columns.
    pub(crate) fn shape(&self) -> [u64; 2] {
        match self {
            Self::Packed(packed) => shape(packed.grid()),
            Self::Bf16 { weights, .. } => [weights.rows().into(), weights.cols().into()],
        }
    }

    /// Returns the device of the weights.
    pub(crate) fn device(&self) -> &Device {
        match self {
            Self::Packed(packed) => packed.device(),
            Self::Bf16 { weights, .. } => weights.data().device(),
        }
    }

    /// Returns the size of the weights in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Packed(packed) => packed.bytes(),
            Self::Bf16 { weights, .. } => weights.bytes() as u64,
        }
    }

    /// Sets every byte of the weights except lists of escapes, in stream order.
    pub(crate) fn fill(&mut self, stream: &Stream, byte: u8) -> Result<(), DeviceError> {
        match self {
            Self::Packed(packed) => packed.fill(stream, byte),
            Self::Bf16 { weights, .. } => weights.fill_bytes(stream, byte),
        }
    }
}
