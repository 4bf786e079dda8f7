//! Tensor maps: how the tensor memory accelerator sees a matrix.
//!
//! [`TensorMapParams`] is the description, checked against what the hardware takes; [`TensorMapParams::encode`] asks the driver for the
//! 128 opaque bytes. The descriptions are pure, so they are tested without a GPU.

use std::{ffi::c_void, ptr};

use cudarc::driver::sys;
use unweight_codegen::abi::TensorMap;

use crate::device::{Call, Device, DeviceError};

/// Element type of a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// One byte.
    U8,
    /// Two bytes; out-of-bounds elements read as +0.
    Bf16,
}

impl Element {
    /// Bytes of an element.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::U8 => 1,
            Self::Bf16 => 2,
        }
    }
}

/// How a box lies in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swizzle {
    /// Row after row.
    None,
    /// 16-byte pieces of each 128-byte row permuted by the row's number modulo 8, as WGMMA reads it.
    Bytes128,
}

/// A row-major matrix `[rows, cols]` that is copied box by box; what a box has outside of the matrix is filled with zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMapParams {
    /// Element type.
    pub element: Element,
    /// Device address, 16-byte aligned.
    pub address: u64,
    /// Rows of the matrix.
    pub rows: u64,
    /// Columns; a row must be a multiple of 16 bytes.
    pub cols: u64,
    /// Rows of a box.
    pub box_rows: u32,
    /// Columns of a box.
    pub box_cols: u32,
    /// How a box lies in shared memory.
    pub swizzle: Swizzle,
}

impl TensorMapParams {
    /// The activations: bf16 `[m, k]` in boxes of `box_rows` x 64 with the 128-byte swizzle. Rows past `m` read as zeros.
    pub fn activations(address: u64, m: u32, k: u32, box_rows: u32) -> Self {
        Self {
            element: Element::Bf16,
            address,
            rows: m.into(),
            cols: k.into(),
            box_rows,
            box_cols: 64,
            swizzle: Swizzle::Bytes128,
        }
    }

    /// The product: bf16 `[m, n]` in boxes of 32 x 64 with the 128-byte swizzle. Rows past `m` are not written.
    pub fn product(address: u64, m: u32, n: u32) -> Self {
        Self::activations(address, m, n, 32)
    }

    /// `sign_mantissa`: u8 `[n, k]` in boxes of 64 x 64, row after row.
    pub fn sign_mantissa(address: u64, n: u32, k: u32) -> Self {
        Self {
            element: Element::U8,
            address,
            rows: n.into(),
            cols: k.into(),
            box_rows: 64,
            box_cols: 64,
            swizzle: Swizzle::None,
        }
    }

    /// What the hardware would not take.
    ///
    /// Source: CUDA driver API 13.0, `cuTensorMapEncodeTiled`.
    pub fn check(&self) -> Result<(), DeviceError> {
        let refuse =
            |what: String| Err(DeviceError::Shape(format!("tensor map [{}, {}]: {what}", self.rows, self.cols)));
        if self.address == 0 || !self.address.is_multiple_of(16) {
            return refuse(format!("address {:#x} is not 16-byte aligned", self.address));
        }
        if self.rows == 0 || self.cols == 0 || self.rows > 1 << 32 || self.cols > 1 << 32 {
            return refuse("each dimension must be 1..=2^32".to_owned());
        }
        let pitch = self.cols * self.element.bytes();
        if !pitch.is_multiple_of(16) || pitch >= 1 << 40 {
            return refuse(format!("a row of {pitch} bytes is not a multiple of 16 below 2^40; pad the columns"));
        }
        if !(1..=256).contains(&self.box_rows) || !(1..=256).contains(&self.box_cols) {
            return refuse(format!("a box of {} x {}: each side must be 1..=256", self.box_rows, self.box_cols));
        }
        let inner = u64::from(self.box_cols) * self.element.bytes();
        if !inner.is_multiple_of(16) || self.swizzle == Swizzle::Bytes128 && inner > 128 {
            return refuse(format!("a box row of {inner} bytes: a multiple of 16, at most 128 with the swizzle"));
        }
        Ok(())
    }

    /// The map, as kernels take it.
    pub fn encode(&self, device: &Device) -> Result<TensorMap, DeviceError> {
        self.check()?;
        device.bind()?;
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let dims = [self.cols, self.rows];
        // Of the dimensions but the innermost.
        let strides = [self.cols * self.element.bytes()];
        let boxes = [self.box_cols, self.box_rows];
        let steps = [1u32, 1];
        // SAFETY: the arrays have rank 2 (strides: rank - 1) and live through the call. The address is only recorded.
        unsafe {
            sys::cuTensorMapEncodeTiled(
                ptr::from_mut(&mut map),
                match self.element {
                    Element::U8 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
                    Element::Bf16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                },
                2,
                self.address as *mut c_void,
                dims.as_ptr(),
                strides.as_ptr(),
                boxes.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                match self.swizzle {
                    Swizzle::None => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
                    Swizzle::Bytes128 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                },
                // Whole 64-byte tile rows are wanted at once; the next tile of the same rows follows soon.
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        }
        .result()
        .call("encoding a tensor map")?;
        Ok(TensorMap(map.opaque))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_of_the_matmul_are_within_the_limits() {
        for m in [1, 2, 17, 64, 65, 1024] {
            TensorMapParams::activations(0x7f00_0000_0100, m, 4096, 64).check().unwrap();
        }
        TensorMapParams::sign_mantissa(256, 14336, 4096).check().unwrap();
        let x = TensorMapParams::activations(256, 3, 512, 64);
        assert_eq!((x.rows, x.cols, x.box_rows, x.box_cols), (3, 512, 64, 64));
        assert_eq!(x.element.bytes() * u64::from(x.box_cols), 128, "one swizzle row");
    }

    #[test]
    fn what_the_hardware_refuses_is_refused_in_words() {
        let good = TensorMapParams::sign_mantissa(256, 64, 64);
        let message = |params: TensorMapParams| params.check().unwrap_err().to_string();
        assert!(message(TensorMapParams { address: 8, ..good }).contains("16-byte aligned"));
        assert!(message(TensorMapParams { cols: 72, ..good }).contains("72 bytes"));
        assert!(message(TensorMapParams { rows: 0, ..good }).contains("1..=2^32"));
        assert!(message(TensorMapParams { box_rows: 257, ..good }).contains("257"));
        let wide = TensorMapParams { element: Element::Bf16, box_cols: 128, swizzle: Swizzle::Bytes128, ..good };
        assert!(message(wide).contains("at most 128"));
    }
}
