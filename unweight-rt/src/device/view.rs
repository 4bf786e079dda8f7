//! Views of matrices in device memory: the operands of launches.
//!
//! A view is a descriptor (device, address, rows, columns, pitch) that was checked against a buffer and borrows it.
//! [`MatrixRef::from_raw`] views memory that something else owns; its caller keeps that memory valid.
//!
//! The borrow ends when the call that enqueues work returns, not when the work is done. On one stream that is enough:
//! work runs in order, and dropping a buffer waits for it. The caller must order work of other streams on the same
//! buffers, with [`Stream::synchronize`] or [`Stream::wait_for`]. Unordered work computes wrong numbers, but never
//! accesses memory out of bounds.
//!
//! No safe function accepts an address:
//! ```compile_fail,E0133
//! # use unweight_rt::{Device, MatrixRef};
//! fn anywhere(device: &Device) -> MatrixRef<'_> {
//!     MatrixRef::from_raw(device, 0x7f00_0000_0000, 8, 4096, 4096).unwrap()
//! }
//! ```
//! ```
//! # use unweight_rt::{Device, MatrixRef};
//! fn of_a_tensor(device: &Device, address: u64) -> MatrixRef<'_> {
//!     // SAFETY: the tensor is contiguous bf16 [8, 4096] on this device and outlives the work that reads it.
//!     unsafe { MatrixRef::from_raw(device, address, 8, 4096, 4096) }.unwrap()
//! }
//! ```

use std::{marker::PhantomData, ops::Range, ptr};

use cudarc::driver::sys;

use crate::device::{
    Call, Device, DeviceBuffer, DeviceError, LaunchError, Stream,
    buffer::{copy_to_device, length},
    error::PitchRule,
};

/// Bytes of a BF16 element.
const ELEMENT: u64 = 2;
/// Bytes that a thread or the copy engine moves at a time.
const COPY: u64 = 16;

/// The device, address and shape of a matrix. Its end is inside the address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MatrixDesc {
    pub device: usize,
    pub address: u64,
    pub rows: u32,
    pub cols: u32,
    /// The pitch in elements; the number of columns if there is at most one row.
    pub pitch: u64,
}

impl MatrixDesc {
    /// Creates a descriptor after checking that it fits in `have` elements of memory.
    ///
    /// The pitch of a single row has no meaning and may exceed the limit of a copy or tensor map, so it is replaced by
    /// the number of columns.
    pub fn new(device: usize, address: u64, rows: u32, cols: u32, pitch: u64, have: u64) -> Result<Self, LaunchError> {
        let desc = Self { device, address, rows, cols, pitch: if rows <= 1 { cols.into() } else { pitch } };
        if pitch < u64::from(cols) {
            return Err(LaunchError::PitchBelowColumns { cols, pitch });
        }
        let need = desc
            .elements()
            .filter(|elements| elements.checked_mul(ELEMENT).and_then(|bytes| bytes.checked_add(address)).is_some());
        match need {
            Some(need) if need <= have => Ok(desc),
            _ => Err(LaunchError::Extent { rows, cols, pitch, need: need.unwrap_or(u64::MAX), have }),
        }
    }

    /// Returns a contiguous matrix at the start of a buffer.
    pub fn of(buffer: &DeviceBuffer<u16>, rows: u32, cols: u32) -> Result<Self, LaunchError> {
        Self::new(buffer.device().ordinal(), buffer.address(), rows, cols, cols.into(), buffer.len() as u64)
    }

    /// Returns the number of elements from the first to the last, including gaps.
    fn elements(&self) -> Option<u64> {
        if self.rows == 0 || self.cols == 0 {
            return Some(0);
        }
        self.pitch.checked_mul(u64::from(self.rows) - 1)?.checked_add(self.cols.into())
    }

    /// Returns the address range from the first element to the last, including gaps between rows.
    pub fn span(&self) -> Range<u64> {
        // Checked on creation.
        self.address..self.address + self.elements().unwrap_or(0) * ELEMENT
    }

    /// Returns a range of rows and columns.
    pub fn part(&self, rows: Range<u32>, cols: Range<u32>) -> Result<Self, LaunchError> {
        for (range, have) in [(&rows, self.rows), (&cols, self.cols)] {
            if range.start > range.end || range.end > have {
                let (at, len) = (range.start.into(), range.len() as u64);
                return Err(LaunchError::Range { at, len, have: have.into() });
            }
        }
        let part = Self { rows: rows.end - rows.start, cols: cols.end - cols.start, ..*self };
        if part.rows == 0 || part.cols == 0 {
            // An empty part; the sum below might leave the address space.
            return Ok(part);
        }
        // The first element is inside the matrix, whose end is inside the address space.
        let first = u64::from(rows.start) * self.pitch + u64::from(cols.start);
        let pitch = if part.rows == 1 { part.cols.into() } else { self.pitch };
        Ok(Self { address: self.address + first * ELEMENT, pitch, ..part })
    }

    /// Returns `[rows, columns]`.
    pub fn shape(&self) -> [u64; 2] {
        [self.rows.into(), self.cols.into()]
    }

    /// Checks that the first element is aligned for copies of 16 bytes.
    pub fn check_aligned(&self, operand: &'static str) -> Result<(), LaunchError> {
        if self.address.is_multiple_of(COPY) {
            Ok(())
        } else {
            Err(LaunchError::Alignment { operand, address: self.address, bytes: COPY })
        }
    }

    /// Checks that every row is aligned for copies of 16 bytes.
    pub fn check_rows_aligned(&self, operand: &'static str) -> Result<(), LaunchError> {
        self.check_aligned(operand)?;
        const OF: u64 = COPY / ELEMENT;
        if self.pitch.is_multiple_of(OF) {
            Ok(())
        } else {
            Err(LaunchError::Pitch { operand, pitch: self.pitch, wanted: PitchRule::MultipleOf(OF) })
        }
    }

    /// Checks that the rows are contiguous.
    pub fn check_dense(&self, operand: &'static str) -> Result<(), LaunchError> {
        if self.rows <= 1 || self.pitch == u64::from(self.cols) {
            Ok(())
        } else {
            Err(LaunchError::Pitch { operand, pitch: self.pitch, wanted: PitchRule::Columns(self.cols) })
        }
    }

    /// Checks that the matrix is on device `ordinal`.
    pub fn check_device(&self, operand: &'static str, ordinal: usize) -> Result<(), LaunchError> {
        check_device(operand, self.device, ordinal)
    }
}

/// Checks that an operand is on device `ordinal`.
pub(crate) fn check_device(operand: &'static str, other: usize, ordinal: usize) -> Result<(), LaunchError> {
    if other == ordinal { Ok(()) } else { Err(LaunchError::OtherDevice { operand, own: ordinal, other }) }
}

/// Checks that a buffer is on device `ordinal` and has at least `expected` elements.
pub(crate) fn check_buffer<T>(
    what: &'static str,
    buffer: &DeviceBuffer<T>,
    expected: u64,
    ordinal: usize,
) -> Result<(), LaunchError> {
    let got = buffer.len() as u64;
    if got < expected {
        return Err(LaunchError::Elements { buffer: what, got, expected });
    }
    check_device(what, buffer.device().ordinal(), ordinal)
}

/// Checks that `written` overlaps none of the read ranges. Conservative: gaps between the rows of a view count as read.
pub(crate) fn check_apart(
    (written, to): (&'static str, Range<u64>),
    read: impl IntoIterator<Item = (&'static str, Range<u64>)>,
) -> Result<(), LaunchError> {
    for (other, from) in read {
        let empty = to.is_empty() || from.is_empty();
        if !empty && to.start < from.end && from.start < to.end {
            return Err(LaunchError::Overlap { written, other });
        }
    }
    Ok(())
}

/// A read-only view of a row-major BF16 matrix `[rows, cols]`; rows are `pitch` elements apart.
#[derive(Clone, Copy, Debug)]
pub struct MatrixRef<'a> {
    desc: MatrixDesc,
    memory: PhantomData<&'a [u16]>,
}

/// A writable view of a row-major BF16 matrix `[rows, cols]`; rows are `pitch` elements apart.
#[derive(Debug)]
pub struct MatrixMut<'a> {
    desc: MatrixDesc,
    memory: PhantomData<&'a mut [u16]>,
}

impl<'a> MatrixRef<'a> {
    /// Returns a view of `[rows, cols]` at the start of a buffer; rows are `pitch` elements apart.
    ///
    /// # Errors
    /// [`LaunchError::Extent`] if the buffer is too short, [`LaunchError::PitchBelowColumns`].
    pub fn new(buffer: &'a DeviceBuffer<u16>, rows: u32, cols: u32, pitch: u64) -> Result<Self, LaunchError> {
        let desc =
            MatrixDesc::new(buffer.device().ordinal(), buffer.address(), rows, cols, pitch, buffer.len() as u64)?;
        Ok(Self { desc, memory: PhantomData })
    }

    /// Returns a view of memory that something else owns, such as a tensor of another framework.
    ///
    /// # Safety
    /// `address` is the device address of `rows` rows of `cols` BF16 on `device`, `pitch` elements apart. They stay
    /// allocated, and nothing writes them, until all work that uses this view is done, including every replay of a
    /// graph that captured it. No lifetime enforces this, because enqueued work outlives the borrow.
    ///
    /// # Errors
    /// [`LaunchError::PitchBelowColumns`], or [`LaunchError::Extent`] if the matrix ends beyond the address space.
    pub unsafe fn from_raw(
        device: &'a Device,
        address: u64,
        rows: u32,
        cols: u32,
        pitch: u64,
    ) -> Result<Self, LaunchError> {
        let desc = MatrixDesc::new(device.ordinal(), address, rows, cols, pitch, u64::MAX)?;
        Ok(Self { desc, memory: PhantomData })
    }

    /// Returns a view of a buffer that has exactly these rows and columns.
    pub(crate) fn whole(buffer: &'a DeviceBuffer<u16>, rows: u32, cols: u32) -> Self {
        let desc =
            MatrixDesc { device: buffer.device().ordinal(), address: buffer.address(), rows, cols, pitch: cols.into() };
        Self { desc, memory: PhantomData }
    }

    pub(crate) fn desc(&self) -> &MatrixDesc {
        &self.desc
    }

    /// Returns a view of a range of rows and columns.
    ///
    /// # Errors
    /// [`LaunchError::Range`] if the range exceeds the matrix.
    pub fn part(&self, rows: Range<u32>, cols: Range<u32>) -> Result<Self, LaunchError> {
        Ok(Self { desc: self.desc.part(rows, cols)?, memory: PhantomData })
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> u32 {
        self.desc.rows
    }

    /// Returns the number of columns.
    pub fn cols(&self) -> u32 {
        self.desc.cols
    }

    /// Returns the elements from one row to the next; the number of columns if there is at most one row.
    pub fn pitch(&self) -> u64 {
        self.desc.pitch
    }
}

impl<'a> MatrixMut<'a> {
    /// Returns a view of `[rows, cols]` at the start of a buffer; rows are `pitch` elements apart.
    ///
    /// # Errors
    /// [`LaunchError::Extent`] if the buffer is too short, [`LaunchError::PitchBelowColumns`].
    pub fn new(buffer: &'a mut DeviceBuffer<u16>, rows: u32, cols: u32, pitch: u64) -> Result<Self, LaunchError> {
        let MatrixRef { desc, .. } = MatrixRef::new(buffer, rows, cols, pitch)?;
        Ok(Self { desc, memory: PhantomData })
    }

    /// Returns a view of memory that something else owns, such as a tensor of another framework.
    ///
    /// # Safety
    /// As for [`MatrixRef::from_raw`], and nothing else reads or writes the memory.
    ///
    /// # Errors
    /// As for [`MatrixRef::from_raw`].
    pub unsafe fn from_raw(
        device: &'a Device,
        address: u64,
        rows: u32,
        cols: u32,
        pitch: u64,
    ) -> Result<Self, LaunchError> {
        let desc = MatrixDesc::new(device.ordinal(), address, rows, cols, pitch, u64::MAX)?;
        Ok(Self { desc, memory: PhantomData })
    }

    /// Returns a view of a buffer that has exactly these rows and columns.
    pub(crate) fn whole(buffer: &'a mut DeviceBuffer<u16>, rows: u32, cols: u32) -> Self {
        let MatrixRef { desc, .. } = MatrixRef::whole(buffer, rows, cols);
        Self { desc, memory: PhantomData }
    }

    pub(crate) fn desc(&self) -> &MatrixDesc {
        &self.desc
    }

    /// Returns a read-only view.
    pub fn as_ref(&self) -> MatrixRef<'_> {
        MatrixRef { desc: self.desc, memory: PhantomData }
    }

    /// Returns this view with a shorter borrow.
    pub fn reborrow(&mut self) -> MatrixMut<'_> {
        MatrixMut { desc: self.desc, memory: PhantomData }
    }

    /// Returns a view of a range of rows and columns.
    ///
    /// # Errors
    /// [`LaunchError::Range`] if the range exceeds the matrix.
    pub fn part(&mut self, rows: Range<u32>, cols: Range<u32>) -> Result<MatrixMut<'_>, LaunchError> {
        Ok(MatrixMut { desc: self.desc.part(rows, cols)?, memory: PhantomData })
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> u32 {
        self.desc.rows
    }

    /// Returns the number of columns.
    pub fn cols(&self) -> u32 {
        self.desc.cols
    }

    /// Returns the elements from one row to the next; the number of columns if there is at most one row.
    pub fn pitch(&self) -> u64 {
        self.desc.pitch
    }

    /// Writes the rows from contiguous little-endian BF16. Waits for the copy.
    ///
    /// # Errors
    /// The rows have gaps, `bytes` has a wrong length, another device, or a driver error.
    pub fn write(&mut self, stream: &Stream, bytes: &[u8]) -> Result<(), DeviceError> {
        let to = self.check_bytes(stream, bytes.len())?;
        // SAFETY: the view was checked against its memory when it was created, is contiguous and has this many bytes.
        unsafe { copy_to_device(stream, to, bytes) }
    }

    /// Returns the address if the rows are contiguous and have this many bytes.
    pub(super) fn check_bytes(&self, stream: &Stream, bytes: usize) -> Result<u64, LaunchError> {
        let to = &self.desc;
        to.check_dense("the target of a copy")?;
        to.check_device("the target of a copy", stream.device().ordinal())?;
        let (got, expected) = (bytes as u64, u64::from(to.rows) * u64::from(to.cols) * ELEMENT);
        if got == expected {
            Ok(to.address)
        } else {
            Err(LaunchError::Elements { buffer: "the bytes of a matrix", got, expected })
        }
    }

    /// Enqueues a copy of a matrix of the same shape.
    ///
    /// # Errors
    /// Another shape or device, matrices that overlap, or a driver error.
    pub fn copy_from(&mut self, stream: &Stream, source: MatrixRef<'_>) -> Result<(), DeviceError> {
        let (to, from) = (&self.desc, &source.desc);
        if to.shape() != from.shape() {
            return Err(LaunchError::Output { output: to.shape(), tensor: from.shape() }.into());
        }
        let ordinal = stream.device().ordinal();
        to.check_device("the target of a copy", ordinal)?;
        from.check_device("the source of a copy", ordinal)?;
        check_apart(("the target of a copy", to.span()), [("its source", from.span())])?;
        if to.rows == 0 || to.cols == 0 {
            return Ok(());
        }
        stream.device().bind()?;
        let bytes = |elements: u64| length("bytes of a row", elements.saturating_mul(ELEMENT));
        let copy = sys::CUDA_MEMCPY2D_st {
            srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            srcDevice: from.address,
            srcPitch: bytes(from.pitch)?,
            dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstDevice: to.address,
            dstPitch: bytes(to.pitch)?,
            WidthInBytes: bytes(to.cols.into())?,
            Height: to.rows as usize,
            srcXInBytes: 0,
            srcY: 0,
            srcHost: ptr::null(),
            srcArray: ptr::null_mut(),
            dstXInBytes: 0,
            dstY: 0,
            dstHost: ptr::null_mut(),
            dstArray: ptr::null_mut(),
        };
        // SAFETY: both are matrices of this shape and pitch, checked against their memory when the views were created.
        unsafe { sys::cuMemcpy2DAsync_v2(&copy, stream.raw()) }.result().call("copying rows on the device")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADDRESS: u64 = 0x7f00_0000_0000;

    fn desc(rows: u32, cols: u32, pitch: u64, have: u64) -> Result<MatrixDesc, LaunchError> {
        MatrixDesc::new(0, ADDRESS, rows, cols, pitch, have)
    }

    #[test]
    fn views_fit_their_memory() {
        assert_eq!(desc(3, 64, 64, 192).unwrap().span(), ADDRESS..ADDRESS + 384);
        // The last row may end where the memory does.
        assert_eq!(desc(3, 64, 100, 264).unwrap().span(), ADDRESS..ADDRESS + 528);
        assert_eq!(
            desc(3, 64, 100, 263),
            Err(LaunchError::Extent { rows: 3, cols: 64, pitch: 100, need: 264, have: 263 })
        );
        assert_eq!(desc(3, 64, 63, 1 << 20), Err(LaunchError::PitchBelowColumns { cols: 64, pitch: 63 }));
        assert!(desc(0, 64, 64, 0).unwrap().span().is_empty() && desc(5, 0, 0, 0).unwrap().span().is_empty());
        // A need above 64 bits is not truncated.
        assert!(matches!(desc(u32::MAX, 1, u64::MAX, u64::MAX), Err(LaunchError::Extent { need: u64::MAX, .. })));
        assert!(matches!(
            MatrixDesc::new(0, u64::MAX - 10, 1, 64, 64, u64::MAX),
            Err(LaunchError::Extent { need: u64::MAX, .. })
        ));
    }

    #[test]
    fn parts_lie_inside_their_matrix() {
        let whole = desc(4, 64, 80, 304).unwrap();
        assert_eq!(whole.part(0..4, 0..64), Ok(whole));
        let corner = whole.part(1..3, 16..48).unwrap();
        assert_eq!((corner.address, corner.shape(), corner.pitch), (ADDRESS + (80 + 16) * 2, [2, 32], 80));
        let last = whole.part(3..4, 60..64).unwrap();
        assert_eq!((last.span().end, last.pitch), (whole.span().end, 4), "the pitch of one row has no meaning");
        for empty in [whole.part(4..4, 0..64).unwrap(), whole.part(0..4, 64..64).unwrap()] {
            assert!(empty.span().is_empty(), "{empty:?}");
        }
        assert_eq!(whole.part(0..5, 0..64), Err(LaunchError::Range { at: 0, len: 5, have: 4 }));
        assert_eq!(whole.part(0..4, 1..65), Err(LaunchError::Range { at: 1, len: 64, have: 64 }));
        #[expect(clippy::reversed_empty_ranges, reason = "the test checks that it is rejected")]
        let reversed = whole.part(3..1, 0..64);
        assert_eq!(reversed, Err(LaunchError::Range { at: 3, len: 0, have: 4 }));
    }

    #[test]
    fn pitch_of_a_single_row_is_its_columns() {
        for rows in [0, 1] {
            for pitch in [64, 65, 1 << 40, u64::MAX] {
                let only = desc(rows, 64, pitch, 64).unwrap();
                assert_eq!((only.pitch, only.check_rows_aligned("x"), only.check_dense("y")), (64, Ok(()), Ok(())));
            }
            assert_eq!(desc(rows, 64, 63, 64), Err(LaunchError::PitchBelowColumns { cols: 64, pitch: 63 }));
        }
        assert_eq!(desc(2, 64, 65, 1 << 20).unwrap().pitch, 65);
    }

    #[test]
    fn rows_are_aligned_to_16_bytes() {
        assert_eq!(desc(3, 60, 64, 1 << 20).unwrap().check_rows_aligned("x"), Ok(()));
        let odd = desc(3, 60, 60, 1 << 20).unwrap().check_rows_aligned("x").unwrap_err();
        assert_eq!(
            odd.to_string(),
            "x has pitch 60, which must be a multiple of 8 elements; copy it to a separate matrix"
        );
        let odd = MatrixDesc { address: ADDRESS + 2, ..desc(3, 64, 64, 1 << 20).unwrap() };
        assert!(matches!(odd.check_rows_aligned("x"), Err(LaunchError::Alignment { operand: "x", bytes: 16, .. })));
        assert_eq!(desc(1, 64, 72, 64).unwrap().check_dense("y"), Ok(()), "one row has no gap");
        let gap = desc(2, 64, 72, 136).unwrap().check_dense("y").unwrap_err();
        assert!(gap.to_string().contains("y has pitch 72, which must be its 64 columns"), "{gap}");
    }

    #[test]
    fn outputs_must_not_overlap_inputs() {
        let apart = |a: Range<u64>, b: Range<u64>| check_apart(("y", a), [("x", b)]);
        assert_eq!(apart(0..10, 10..20), Ok(()));
        assert_eq!(apart(10..20, 0..10), Ok(()));
        assert_eq!(apart(5..5, 0..10), Ok(()), "nothing is written");
        for (a, b) in [(0..10, 9..20), (9..20, 0..10), (0..10, 3..4), (3..4, 0..10), (0..10, 0..10)] {
            assert_eq!(apart(a, b), Err(LaunchError::Overlap { written: "y", other: "x" }));
        }
    }

    #[test]
    fn an_operand_of_another_device_is_named() {
        let desc = desc(1, 1, 1, 1).unwrap();
        assert_eq!(desc.check_device("x", 0), Ok(()));
        assert_eq!(desc.check_device("x", 1), Err(LaunchError::OtherDevice { operand: "x", own: 1, other: 0 }));
    }
}
