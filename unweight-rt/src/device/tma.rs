//! Tensor maps: descriptors of matrices for the tensor memory accelerator (TMA).
//!
//! [`TensorMapParams`] describes a matrix, and is checked against the limits of the hardware.
//! [`TensorMapParams::encode`] requests the 128 opaque bytes from the driver. The descriptions are plain data, so they
//! are tested without a GPU.

use std::{ffi::c_void, ptr};

use cudarc::driver::sys;
use unweight_codegen::abi::TensorMap;

use crate::device::{Call, Device, DeviceError, LaunchError, error::MapRule, view::MatrixDesc};

/// Element type of a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// Unsigned bytes.
    U8,
    /// BF16; out-of-bounds elements read as +0.
    Bf16,
}

impl Element {
    /// Returns the size of an element in bytes.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::U8 => 1,
            Self::Bf16 => 2,
        }
    }
}

/// The arrangement of a box in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swizzle {
    /// Row after row.
    None,
    /// 16-byte pieces of each 64-byte row are permuted by half of the row's index modulo 4.
    Bytes64,
    /// 16-byte pieces of each 128-byte row are permuted by the row's index modulo 8, as WGMMA reads them.
    Bytes128,
}

/// A row-major matrix `[rows, cols]` that is copied box by box. Elements of a box outside the matrix are filled with
/// zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMapParams {
    /// Element type.
    pub element: Element,
    /// Device address, 16-byte aligned.
    pub address: u64,
    /// Rows of the matrix.
    pub rows: u64,
    /// The number of columns.
    pub cols: u64,
    /// Elements from one row to the next (the pitch); a multiple of 16 bytes.
    pub pitch: u64,
    /// Rows of a box.
    pub box_rows: u32,
    /// Columns of a box.
    pub box_cols: u32,
    /// Arrangement of a box in shared memory.
    pub swizzle: Swizzle,
}

impl TensorMapParams {
    /// Describes activations: BF16 `[m, k]` in boxes of `box_rows` x 64 with the 128-byte swizzle. Rows past `m` read
    /// as zeros.
    pub(crate) fn activations(x: &MatrixDesc, box_rows: u32) -> Self {
        Self {
            element: Element::Bf16,
            address: x.address,
            rows: x.rows.into(),
            cols: x.cols.into(),
            pitch: x.pitch,
            box_rows,
            box_cols: 64,
            swizzle: Swizzle::Bytes128,
        }
    }

    /// Describes a product: BF16 `[m, n]` in boxes of 32 x 64 with the 128-byte swizzle. Rows past `m` are not written.
    pub(crate) fn product(y: &MatrixDesc) -> Self {
        Self::activations(y, 32)
    }

    /// Describes the product of a gate and an up: BF16 `[m, n / 2]` in boxes of 32 x 32 with the 64-byte swizzle.
    pub(crate) fn gated_product(y: &MatrixDesc) -> Self {
        Self { box_cols: 32, swizzle: Swizzle::Bytes64, ..Self::product(y) }
    }

    /// Describes `sign_mantissa`: u8 `[n, k]` in boxes of `box_rows` x 64, row after row.
    pub fn sign_mantissa(address: u64, [n, k]: [u32; 2], box_rows: u32) -> Self {
        Self {
            element: Element::U8,
            address,
            rows: n.into(),
            cols: k.into(),
            pitch: k.into(),
            box_rows,
            box_cols: 64,
            swizzle: Swizzle::None,
        }
    }

    /// Checks the description against the limits of the hardware.
    ///
    /// Source: CUDA driver API 13.0, `cuTensorMapEncodeTiled`.
    pub fn check(&self) -> Result<(), LaunchError> {
        let check = |is_valid: bool, value: u64, rule| {
            if is_valid {
                Ok(())
            } else {
                Err(LaunchError::TensorMap { rows: self.rows, cols: self.cols, value, rule })
            }
        };
        check(self.address != 0 && self.address.is_multiple_of(16), self.address, MapRule::Aligned)?;
        for extent in [self.rows, self.cols] {
            check((1..=1 << 32).contains(&extent), extent, MapRule::Extent)?;
        }
        let pitch = self.pitch.saturating_mul(self.element.bytes());
        check(self.pitch >= self.cols && pitch.is_multiple_of(16) && pitch < 1 << 40, pitch, MapRule::Pitch)?;
        for side in [self.box_rows, self.box_cols] {
            check((1..=256).contains(&side), side.into(), MapRule::BoxSide)?;
        }
        let inner = u64::from(self.box_cols) * self.element.bytes();
        let max = match self.swizzle {
            Swizzle::None => u64::MAX,
            Swizzle::Bytes64 => 64,
            Swizzle::Bytes128 => 128,
        };
        check(inner.is_multiple_of(16) && inner <= max, inner, MapRule::BoxRow)
    }

    /// Returns the tensor map, as passed to kernels.
    pub fn encode(&self, device: &Device) -> Result<TensorMap, DeviceError> {
        self.check()?;
        device.bind()?;
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let dims = [self.cols, self.rows];
        // Strides of all dimensions except the innermost.
        let strides = [self.pitch * self.element.bytes()];
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
                    Swizzle::Bytes64 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
                    Swizzle::Bytes128 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                },
                // Whole 64-byte tile rows are read at once; the next tile of the same rows follows soon.
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

    fn activations(rows: u32, cols: u32, pitch: u64) -> TensorMapParams {
        TensorMapParams::activations(&MatrixDesc::new(0, 0x7f00_0000_0100, rows, cols, pitch, u64::MAX).unwrap(), 64)
    }

    #[test]
    fn maps_of_the_matmul_are_within_the_limits() {
        for m in [1, 2, 17, 64, 65, 1024] {
            assert_eq!(activations(m, 4096, 4096).check(), Ok(()));
            assert_eq!(activations(m, 4096, 6144).check(), Ok(()), "columns of a wider matrix");
        }
        assert_eq!(TensorMapParams::sign_mantissa(256, [14336, 4096], 64).check(), Ok(()));
        let y = MatrixDesc::new(0, 0x7f00_0000_0100, 3, 96, 96, u64::MAX).unwrap();
        let gated = TensorMapParams::gated_product(&y);
        assert_eq!((gated.check(), gated.element.bytes() * u64::from(gated.box_cols)), (Ok(()), 64));
        let x = activations(3, 512, 512);
        assert_eq!((x.rows, x.cols, x.box_rows, x.box_cols), (3, 512, 64, 64));
        assert_eq!(x.element.bytes() * u64::from(x.box_cols), 128, "one swizzle row");
    }

    #[test]
    fn invalid_tma_maps_are_rejected_with_the_rule() {
        let good = TensorMapParams::sign_mantissa(256, [64, 64], 64);
        let broken = |params: TensorMapParams| match params.check() {
            Err(LaunchError::TensorMap { value, rule, .. }) => (value, rule),
            other => panic!("{other:?}"),
        };
        assert_eq!(broken(TensorMapParams { address: 8, ..good }), (8, MapRule::Aligned));
        assert_eq!(broken(TensorMapParams { address: 0, ..good }), (0, MapRule::Aligned));
        assert_eq!(broken(TensorMapParams { cols: 72, pitch: 72, ..good }), (72, MapRule::Pitch));
        assert_eq!(broken(TensorMapParams { pitch: 48, ..good }), (48, MapRule::Pitch), "rows that overlap");
        assert_eq!(broken(TensorMapParams { rows: 0, ..good }), (0, MapRule::Extent));
        assert_eq!(broken(TensorMapParams { box_rows: 257, ..good }), (257, MapRule::BoxSide));
        let wide = TensorMapParams { element: Element::Bf16, box_cols: 128, swizzle: Swizzle::Bytes128, ..good };
        assert_eq!(broken(wide), (256, MapRule::BoxRow));
        let wide = TensorMapParams { swizzle: Swizzle::Bytes64, box_cols: 64, ..wide };
        assert_eq!(broken(wide), (128, MapRule::BoxRow));
        let text = TensorMapParams { cols: 72, pitch: 72, ..good }.check().unwrap_err().to_string();
        assert!(text.contains("[64, 72]: 72 must be a pitch in bytes that is a multiple of 16"), "{text}");
    }
}
