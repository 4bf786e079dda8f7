//! Operand checks that operations run before they enqueue anything.

use std::ops::Range;

use unweight_codegen::family::sample::VOCABULARY_MAX;

use crate::device::{
    LaunchError,
    view::{MatrixDesc, check_apart},
};

/// Checks the operands of a product `y[m, columns] = x[m, k] * w[n, k]^T` on device `ordinal`; `y` must not overlap
/// anything that is read. `columns` is `n`, or fewer if the epilogue combines several columns into one.
pub(crate) fn check_product(
    ordinal: usize,
    x: &MatrixDesc,
    w: [u64; 2],
    columns: u64,
    y: &MatrixDesc,
    read: impl IntoIterator<Item = (&'static str, Range<u64>)>,
) -> Result<(), LaunchError> {
    if u64::from(x.cols) != w[1] || [u64::from(x.rows), columns] != y.shape() {
        return Err(LaunchError::Shape { y: y.shape(), x: x.shape(), w });
    }
    x.check_device("x", ordinal)?;
    y.check_device("y", ordinal)?;
    check_apart(("y", y.span()), [("x", x.span())].into_iter().chain(read))
}

/// The number of elements that a thread of an activation kernel moves at once: 16 bytes.
pub(crate) const CHUNK: u32 = 8;

/// Checks a matrix of activations: its rows are aligned whole chunks, and it has at most `max` columns.
pub(crate) fn check_activations(operand: &'static str, desc: &MatrixDesc, max: u32) -> Result<(), LaunchError> {
    let cols = desc.cols;
    if !cols.is_multiple_of(CHUNK) || cols > max {
        return Err(LaunchError::Columns { operand, cols, of: CHUNK, max });
    }
    desc.check_rows_aligned(operand)
}

/// Checks that a vector has `expected` elements.
pub(crate) fn check_len(buffer: &'static str, got: usize, expected: u32) -> Result<(), LaunchError> {
    let (got, expected) = (got as u64, u64::from(expected));
    if got == expected { Ok(()) } else { Err(LaunchError::Elements { buffer, got, expected }) }
}

/// Checks logits, and the lengths of buffers with one entry per row of logits.
pub(crate) fn check_logits(logits: &MatrixDesc, lengths: [(&'static str, usize); 3]) -> Result<(), LaunchError> {
    if !(1..=VOCABULARY_MAX).contains(&logits.cols) {
        return Err(LaunchError::Logits { cols: logits.cols, max: VOCABULARY_MAX });
    }
    if logits.rows > 1 {
        logits.check_rows_aligned("logits")?;
    }
    logits.check_aligned("logits")?;
    for (buffer, len) in lengths {
        if (len as u64) < u64::from(logits.rows) {
            return Err(LaunchError::Elements { buffer, got: len as u64, expected: logits.rows.into() });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn desc(address: u64, rows: u32, cols: u32) -> MatrixDesc {
        MatrixDesc::new(0, address, rows, cols, cols.into(), u64::MAX).unwrap()
    }

    #[test]
    fn operands_of_a_product_must_agree_and_not_overlap() {
        let (x, y) = (desc(0x1000, 3, 64), desc(0x2000, 3, 128));
        let w = || [("the weights", 0x8000..0x9000)];
        assert_eq!(check_product(0, &x, [128, 64], 128, &y, w()), Ok(()));
        // A fused gate and up projection has half as many output columns.
        assert_eq!(check_product(0, &x, [256, 64], 128, &y, w()), Ok(()));
        for (n, k, columns) in [(128, 65, 128), (127, 64, 127)] {
            let shape = LaunchError::Shape { y: [3, 128], x: [3, 64], w: [n, k] };
            assert_eq!(check_product(0, &x, [n, k], columns, &y, w()), Err(shape));
        }
        let fewer = desc(0x2000, 2, 128);
        assert!(matches!(check_product(0, &x, [128, 64], 128, &fewer, w()), Err(LaunchError::Shape { .. })));
        let same = desc(0x1000, 3, 128);
        let overlap = |other| Err(LaunchError::Overlap { written: "y", other });
        assert_eq!(check_product(0, &x, [128, 64], 128, &same, w()), overlap("x"));
        let inside = desc(0x8800, 3, 128);
        assert_eq!(check_product(0, &x, [128, 64], 128, &inside, w()), overlap("the weights"));
        assert!(matches!(
            check_product(1, &x, [128, 64], 128, &y, w()),
            Err(LaunchError::OtherDevice { operand: "x", own: 1, other: 0 })
        ));
    }
}
