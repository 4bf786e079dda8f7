//! Looks up rows of an embedding by token ids on the device, from BF16 or directly from packed weights.

use std::sync::Arc;

use unweight_codegen::{
    abi::EmbedArgs,
    plan::GemmShape,
    spec::{EmbedSource, EmbedSpec, Op},
};

use crate::{
    device::{
        DeviceBuffer, DeviceError, LaunchError, MatrixMut, MatrixRef, RowFault, Stream,
        module::LoadedKernel,
        view::{MatrixDesc, check_apart, check_device},
    },
    exec::{
        ExecContext,
        operands::{check_activations, check_len},
    },
    weight::{self, DevicePacked},
};

/// The table of an embedding.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum EmbedTable<'a> {
    /// BF16 `[vocabulary, d]`.
    Bf16(MatrixRef<'a>),
    /// Packed weights, both sides padded to multiples of 64.
    Packed {
        /// `[n, k]`, `n >= vocabulary`, `k >= d`.
        weights: &'a DevicePacked,
        /// The number of rows that are token ids.
        vocabulary: u32,
    },
}

impl EmbedTable<'_> {
    fn source(&self) -> EmbedSource {
        match self {
            Self::Bf16(_) => EmbedSource::Bf16,
            Self::Packed { .. } => EmbedSource::Packed,
        }
    }
}

/// A kernel that looks up rows.
#[derive(Clone, Debug)]
pub struct Embed {
    kernel: Arc<LoadedKernel>,
    spec: EmbedSpec,
}

impl Embed {
    /// Wraps a kernel of family `embed`.
    ///
    /// # Errors
    /// The kernel belongs to another family.
    pub fn new(kernel: Arc<LoadedKernel>) -> Result<Self, DeviceError> {
        let Op::Embed(spec) = kernel.spec().op else {
            return kernel.refuse(LaunchError::Family { wanted: "an embedding kernel" });
        };
        Ok(Self { kernel, spec })
    }

    /// Returns the loaded kernel.
    pub fn kernel(&self) -> &LoadedKernel {
        &self.kernel
    }

    /// Enqueues `y[r] = table[ids[r]]` for each row of `y` `[m, d]`; `ids` has at least `m` entries, `d` is a multiple
    /// of 8. An id that is not a row of the table results in zeros, and [`ExecContext::synchronize`] reports it.
    ///
    /// # Errors
    /// A table in an encoding that the kernel does not support; operands that do not match, overlap, are on another
    /// device, or have an unsupported address or pitch; or a driver error.
    pub fn enqueue(
        &self,
        ctx: &mut ExecContext,
        ids: &DeviceBuffer<u32>,
        table: EmbedTable<'_>,
        y: MatrixMut<'_>,
    ) -> Result<(), DeviceError> {
        let (y, ordinal) = (y.desc(), self.kernel.device().ordinal());
        let check = || {
            let (supported, got) = (self.spec.source, table.source());
            if supported != got {
                return Err(LaunchError::Source { takes: supported.tag(), got: got.tag() });
            }
            check_activations("y", y, u32::MAX)?;
            check_len("ids", ids.len().min(y.rows as usize), y.rows)?;
            check_device("ids", ids.device().ordinal(), ordinal)?;
            y.check_device("y", ordinal)?;
            check_apart(("y", y.span()), [("ids", ids.span())])?;
            match table {
                EmbedTable::Bf16(table) => check_bf16(table.desc(), y, ordinal),
                EmbedTable::Packed { weights, vocabulary } => {
                    check_device("the table", weights.device().ordinal(), ordinal)?;
                    check_apart(("y", y.span()), weights.spans())?;
                    check_packed(weight::shape(weights.grid()), vocabulary, y)
                }
            }
        };
        check().or_else(|refusal| self.kernel.refuse(refusal))?;
        let args = EmbedArgs {
            ids: ids.address(),
            y: y.address,
            fault: ctx.row_fault_address(RowFault::Token),
            y_pitch: y.pitch,
            d: y.cols,
            ..args(&table)
        };
        // SAFETY: shapes, pitches and places were checked above, views against their memory when they were created; the
        // kernel bounds-checks ids, escape heads and escape lists. The fault word lives as long as the context, on
        // whose stream this runs. Dropping a buffer waits for the kernel.
        unsafe { self.kernel.launch(ctx.stream(), GemmShape::rows(y.rows), &args) }
    }
}

impl Embed {
    /// Enqueues `y[r] = weights[ids[r]]` for `m` rows at addresses, for all rows and columns of packed weights. An id
    /// that is not a row results in zeros, and `1 + r` in the word at `fault`.
    ///
    /// # Safety
    /// `ids` is the address of u32 `[m]`, `y` of bf16 `[m, k]` at a multiple of 16, `fault` of a u32, all on this
    /// device, without overlap, until the work is done. The caller orders other accesses to them.
    ///
    /// # Errors
    /// A kernel for BF16 tables, weights on another device, or a driver error.
    pub(crate) unsafe fn enqueue_at(
        &self,
        stream: &Stream,
        weights: &DevicePacked,
        (ids, m, y): (u64, u32, u64),
        fault: u64,
    ) -> Result<(), DeviceError> {
        // A grid's dimensions fit 32 bits.
        let (vocabulary, d) = (weights.grid().rows() as u32, weights.grid().cols() as u32);
        let table = EmbedTable::Packed { weights, vocabulary };
        let check = || {
            let (supported, got) = (self.spec.source, table.source());
            if supported != got {
                return Err(LaunchError::Source { takes: supported.tag(), got: got.tag() });
            }
            check_device("the table", weights.device().ordinal(), self.kernel.device().ordinal())
        };
        check().or_else(|refusal| self.kernel.refuse(refusal))?;
        let args = EmbedArgs { ids, y, fault, y_pitch: d.into(), d, ..args(&table) };
        // SAFETY: the caller's promises; the kernel bounds-checks ids, escape heads and escape lists.
        unsafe { self.kernel.launch(stream, GemmShape::rows(m), &args) }
    }
}

/// Returns the arguments that describe a table.
fn args(table: &EmbedTable<'_>) -> EmbedArgs {
    match table {
        EmbedTable::Bf16(table) => {
            let MatrixDesc { address, rows, pitch, .. } = *table.desc();
            EmbedArgs { table: address, table_pitch: pitch, vocabulary: rows, ..EmbedArgs::default() }
        }
        EmbedTable::Packed { weights, vocabulary } => EmbedArgs {
            packed: weights.packed().address(),
            escape_heads: weights.escape_heads().address(),
            escapes: weights.escapes().address(),
            vocabulary: *vocabulary,
            // A grid's dimensions and the words of its escapes fit 32 bits: checked when the tensor was created.
            tile_cols: weights.grid().tile_cols() as u32,
            escape_words: weights.escapes().len() as u32,
            base: weights.window().base().into(),
            ..EmbedArgs::default()
        },
    }
}

fn check_bf16(table: &MatrixDesc, y: &MatrixDesc, ordinal: usize) -> Result<(), LaunchError> {
    table.check_rows_aligned("the table")?;
    table.check_device("the table", ordinal)?;
    if table.cols != y.cols {
        return Err(LaunchError::Output { output: y.shape(), tensor: table.shape() });
    }
    check_apart(("y", y.span()), [("the table", table.span())])
}

/// Checks that `y` can be rows of packed weights `[n, k]`.
fn check_packed([n, k]: [u64; 2], vocabulary: u32, y: &MatrixDesc) -> Result<(), LaunchError> {
    if u64::from(vocabulary) > n {
        return Err(LaunchError::Vocabulary { vocabulary, rows: n });
    }
    // Only the padding of columns may differ.
    if u64::from(y.cols).next_multiple_of(64) == k {
        Ok(())
    } else {
        Err(LaunchError::Output { output: y.shape(), tensor: [n, k] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn desc(rows: u32, cols: u32) -> MatrixDesc {
        MatrixDesc::new(0, 0x1000, rows, cols, cols.into(), u64::MAX).unwrap()
    }

    #[test]
    fn a_table_has_the_columns_of_its_rows() {
        let far = MatrixDesc::new(0, 0x10_0000, 100, 72, 80, u64::MAX).unwrap();
        assert_eq!(check_bf16(&far, &desc(3, 72), 0), Ok(()));
        assert!(matches!(check_bf16(&far, &desc(3, 64), 0), Err(LaunchError::Output { .. })));
        assert!(matches!(check_bf16(&desc(100, 72), &desc(3, 72), 0), Err(LaunchError::Overlap { .. })));
        // Packed tables are padded to whole tiles in both dimensions.
        assert_eq!(check_packed([128, 128], 100, &desc(3, 72)), Ok(()));
        assert_eq!(check_packed([128, 128], 128, &desc(3, 128)), Ok(()));
        for cols in [64, 136] {
            let shape = LaunchError::Output { output: [3, cols.into()], tensor: [128, 128] };
            assert_eq!(check_packed([128, 128], 100, &desc(3, cols)), Err(shape));
        }
        let more = LaunchError::Vocabulary { vocabulary: 129, rows: 128 };
        assert_eq!(check_packed([128, 128], 129, &desc(3, 128)), Err(more));
    }
}
