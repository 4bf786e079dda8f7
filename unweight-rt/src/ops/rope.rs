//! Prepares the heads of a chunk of one sequence for attention: bias, QK-norm and rotation. Stores keys and values to
//! their pages of the KV cache.

use std::sync::Arc;

use unweight_codegen::{
    abi::RopeArgs,
    kv::PAGE_TOKENS,
    plan::GemmShape,
    spec::{Op, RopeSpec},
};

use crate::{
    device::{
        DeviceBuffer, DeviceError, LaunchError, MatrixMut, RowFault,
        module::LoadedKernel,
        view::{MatrixDesc, check_apart, check_device},
    },
    exec::{ExecContext, operands::check_len},
    ops::kv::{KvLayer, KvShape},
};

/// Cosines and sines of every position, bf16 `[positions, rope_dim / 2]` each.
#[derive(Clone, Copy, Debug)]
pub struct RopeTable<'a> {
    cosines: &'a DeviceBuffer<u16>,
    sines: &'a DeviceBuffer<u16>,
    rope_dim: u32,
    positions: u32,
}

impl<'a> RopeTable<'a> {
    /// Creates a table for the first `rope_dim` elements of a head, a multiple of 4: elements `i` and `i + rope_dim /
    /// 2` are rotated together. A kernel with `adjacent` rotates elements `2 * i` and `2 * i + 1` together, and stores
    /// angles `i` and `i + rope_dim / 4` next to each other.
    ///
    /// # Errors
    /// [`LaunchError::RopeDim`]; [`LaunchError::Elements`] if the buffers differ in length, or do not contain a whole
    /// number of positions.
    pub fn new(
        cosines: &'a DeviceBuffer<u16>,
        sines: &'a DeviceBuffer<u16>,
        rope_dim: u32,
    ) -> Result<Self, LaunchError> {
        let positions = check_table(cosines.len() as u64, sines.len() as u64, rope_dim)?;
        Ok(Self { cosines, sines, rope_dim, positions })
    }

    /// Returns the number of positions in the table.
    pub fn positions(&self) -> u32 {
        self.positions
    }

    /// Returns the number of rotated elements in a head.
    pub fn rope_dim(&self) -> u32 {
        self.rope_dim
    }
}

/// Returns the number of positions in a table with this many cosines and sines.
fn check_table(cosines: u64, sines: u64, rope_dim: u32) -> Result<u32, LaunchError> {
    if !rope_dim.is_multiple_of(4) || rope_dim == 0 {
        return Err(LaunchError::RopeDim { rope_dim, head_dim: 256 });
    }
    if sines != cosines {
        return Err(LaunchError::Elements { buffer: "the table of sines", got: sines, expected: cosines });
    }
    let half = u64::from(rope_dim / 2);
    if !cosines.is_multiple_of(half) {
        let expected = cosines.next_multiple_of(half);
        return Err(LaunchError::Elements { buffer: "the table of cosines", got: cosines, expected });
    }
    // A table with more positions than fit u32 counts as unlimited.
    Ok(u32::try_from(cosines / half).unwrap_or(u32::MAX))
}

/// The operations on the heads of one layer.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct HeadOptions<'a> {
    /// The number of Q heads.
    pub heads: u32,
    /// Cosines and sines.
    pub table: RopeTable<'a>,
    /// Whether heads are rotated; otherwise the table only limits the positions.
    pub rotated: bool,
    /// The bias of all heads, bf16 `[(heads + 2 * kv_heads) * head_dim]`.
    pub bias: Option<&'a DeviceBuffer<u16>>,
    /// The weights of an RMSNorm of each Q head, bf16 `[head_dim]`.
    pub q_norm: Option<&'a DeviceBuffer<u16>>,
    /// The weights of an RMSNorm of each K head, bf16 `[head_dim]`.
    pub k_norm: Option<&'a DeviceBuffer<u16>>,
    /// The value that both norms add to the mean square.
    pub eps: f32,
}

impl<'a> HeadOptions<'a> {
    /// Creates options with only a rotation.
    pub fn new(heads: u32, table: RopeTable<'a>) -> Self {
        Self { heads, table, rotated: true, bias: None, q_norm: None, k_norm: None, eps: 1e-6 }
    }

    /// Sets whether heads are rotated.
    #[must_use]
    pub fn rotated(mut self, rotated: bool) -> Self {
        self.rotated = rotated;
        self
    }

    /// Sets the bias of all heads.
    #[must_use]
    pub fn bias(mut self, bias: Option<&'a DeviceBuffer<u16>>) -> Self {
        self.bias = bias;
        self
    }

    /// Sets the norms of Q and K heads.
    #[must_use]
    pub fn norms(mut self, q: Option<&'a DeviceBuffer<u16>>, k: Option<&'a DeviceBuffer<u16>>, eps: f32) -> Self {
        (self.q_norm, self.k_norm, self.eps) = (q, k, eps);
        self
    }

    /// Returns the vectors and tables to be read, with the required length of each.
    fn read(&self, kv: KvShape) -> impl Iterator<Item = (&'static str, &'a DeviceBuffer<u16>, Option<u32>)> {
        let columns = columns(self.heads, kv).and_then(|columns| u32::try_from(columns).ok());
        [
            ("bias", self.bias, columns),
            ("q_norm", self.q_norm, Some(kv.head_dim())),
            ("k_norm", self.k_norm, Some(kv.head_dim())),
            ("the table of cosines", Some(self.table.cosines), None),
            ("the table of sines", Some(self.table.sines), None),
        ]
        .into_iter()
        .filter_map(|(name, buffer, len)| Some((name, buffer?, len)))
    }
}

/// Returns the number of columns of Q, K and V together.
fn columns(heads: u32, kv: KvShape) -> Option<u64> {
    (u64::from(heads) + 2 * u64::from(kv.kv_heads())).checked_mul(kv.head_dim().into())
}

/// A kernel of `rope`.
#[derive(Clone, Debug)]
pub struct Rope {
    kernel: Arc<LoadedKernel>,
    spec: RopeSpec,
}

impl Rope {
    /// Wraps a kernel of family `rope`.
    ///
    /// # Errors
    /// The kernel belongs to another family.
    pub fn new(kernel: Arc<LoadedKernel>) -> Result<Self, DeviceError> {
        let Op::Rope(spec) = kernel.spec().op else {
            return kernel.refuse(LaunchError::Family { wanted: "a rotary embedding kernel" });
        };
        Ok(Self { kernel, spec })
    }

    /// Returns the loaded kernel.
    pub fn kernel(&self) -> &LoadedKernel {
        &self.kernel
    }

    /// Enqueues bias, norms and rotation of `qkv` `[m, (heads + 2 * kv_heads) * head_dim]` for tokens at positions
    /// `start`, `start + 1`, ... of one sequence. Q heads are rewritten in place. Keys and values are stored to the
    /// pages of `kv` that `pages` lists, entry `i` for positions `64 * i` to `64 * i + 63`; their columns of `qkv` do
    /// not change. A page that the cache does not have is skipped, and [`ExecContext::synchronize`] reports it.
    ///
    /// # Errors
    /// Heads of another size than the kernel's, positions beyond the table or the pages; operands that do not match,
    /// overlap, are on another device, or have an unsupported address or pitch; or a driver error.
    pub fn enqueue(
        &self,
        ctx: &mut ExecContext,
        qkv: MatrixMut<'_>,
        options: &HeadOptions<'_>,
        kv: KvLayer<'_>,
        pages: &DeviceBuffer<u32>,
        start: u32,
    ) -> Result<(), DeviceError> {
        let (qkv, ordinal, shape) = (qkv.desc(), self.kernel.device().ordinal(), kv.shape());
        let check = || {
            check_shapes(self.spec.head_dim.get(), qkv, options.heads, options.table.rope_dim, shape)?;
            check_positions(start, qkv.rows, options.table.positions, pages.len())?;
            qkv.check_device("qkv", ordinal)?;
            kv.check_device(ordinal)?;
            check_device("pages", pages.device().ordinal(), ordinal)?;
            for (name, buffer, len) in options.read(shape) {
                len.map_or(Ok(()), |len| check_len(name, buffer.len(), len))?;
                check_device(name, buffer.device().ordinal(), ordinal)?;
            }
            let read = || options.read(shape).map(|(name, buffer, _)| (name, buffer.span()));
            let read = || read().chain([("pages", pages.span())]);
            check_apart(("the KV cache", kv.span()), read())?;
            check_apart(("qkv", qkv.span()), read().chain([("the KV cache", kv.span())]))
        };
        check().or_else(|refusal| self.kernel.refuse(refusal))?;
        let address = |buffer: Option<&DeviceBuffer<u16>>| buffer.map_or(0, DeviceBuffer::address);
        let args = RopeArgs {
            qkv: qkv.address,
            bias: address(options.bias),
            q_norm: address(options.q_norm),
            k_norm: address(options.k_norm),
            cosines: options.table.cosines.address(),
            sines: options.table.sines.address(),
            cache: kv.address(),
            pages: pages.address(),
            fault: ctx.row_fault_address(RowFault::Page),
            pitch: qkv.pitch,
            eps: options.eps,
            start,
            heads: options.heads,
            kv_heads: shape.kv_heads(),
            rope_dim: if options.rotated { options.table.rope_dim } else { 0 },
            cache_pages: shape.pages(),
        };
        // SAFETY: shapes, pitches, places and positions were checked above, views against their memory when they were
        // created; the kernel bounds-checks the pages. The fault word lives as long as the context, on whose stream
        // this runs. Dropping a buffer waits for the kernel.
        unsafe { self.kernel.launch(ctx.stream(), GemmShape::rows(qkv.rows), &args) }
    }
}

/// Checks that a kernel for heads of this size supports these shapes.
fn check_shapes(kernel_dim: u32, qkv: &MatrixDesc, heads: u32, rope_dim: u32, kv: KvShape) -> Result<(), LaunchError> {
    let head_dim = kv.head_dim();
    if head_dim != kernel_dim {
        return Err(LaunchError::HeadSize { takes: kernel_dim, got: head_dim });
    }
    if columns(heads, kv) != Some(qkv.cols.into()) {
        return Err(LaunchError::Heads { cols: qkv.cols, heads, kv_heads: kv.kv_heads(), head_dim });
    }
    if rope_dim > head_dim {
        return Err(LaunchError::RopeDim { rope_dim, head_dim });
    }
    qkv.check_rows_aligned("qkv")
}

/// Checks that there are angles and pages for positions `start..start + m`.
fn check_positions(start: u32, m: u32, positions: u32, pages: usize) -> Result<(), LaunchError> {
    let end = u64::from(start) + u64::from(m);
    let paged = (pages as u64).saturating_mul(PAGE_TOKENS.into());
    for (what, limit) in [("the table of angles", positions.into()), ("the list of pages", paged)] {
        if m > 0 && end > limit {
            return Err(LaunchError::Positions { end, what, limit });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn desc(rows: u32, cols: u32, pitch: u64) -> MatrixDesc {
        MatrixDesc::new(0, 0x1000, rows, cols, pitch, u64::MAX).unwrap()
    }

    #[test]
    fn heads_fill_their_columns() {
        let kv = KvShape::new(4, 2, 64).unwrap();
        let check = |kernel_dim, cols, heads, rope_dim| {
            check_shapes(kernel_dim, &desc(3, cols, cols.into()), heads, rope_dim, kv)
        };
        assert_eq!(check(64, 64 * 12, 8, 64), Ok(()));
        assert_eq!(check(64, 64 * 12, 8, 32), Ok(()), "a part of each head is turned");
        assert_eq!(check(128, 64 * 12, 8, 64), Err(LaunchError::HeadSize { takes: 128, got: 64 }));
        let heads = LaunchError::Heads { cols: 768, heads: 7, kv_heads: 2, head_dim: 64 };
        assert_eq!(check(64, 768, 7, 64), Err(heads));
        assert!(matches!(check(64, 768, u32::MAX, 64), Err(LaunchError::Heads { .. })));
        assert_eq!(check(64, 768, 8, 68), Err(LaunchError::RopeDim { rope_dim: 68, head_dim: 64 }));
        let odd = check_shapes(64, &desc(3, 768, 772), 8, 64, kv);
        assert!(matches!(odd, Err(LaunchError::Pitch { operand: "qkv", .. })), "{odd:?}");
    }

    #[test]
    fn positions_have_angles_and_pages() {
        assert_eq!(check_positions(100, 28, 128, 2), Ok(()));
        let angles = LaunchError::Positions { end: 129, what: "the table of angles", limit: 128 };
        assert_eq!(check_positions(100, 29, 128, 3), Err(angles));
        let pages = LaunchError::Positions { end: 129, what: "the list of pages", limit: 128 };
        assert_eq!(check_positions(100, 29, 4096, 2), Err(pages));
        assert!(check_positions(u32::MAX, 2, u32::MAX, usize::MAX).is_err());
        assert_eq!(check_positions(u32::MAX, 0, 1, 0), Ok(()), "no rows need nothing");
    }

    #[test]
    fn a_table_holds_whole_positions() {
        assert_eq!(check_table(320, 320, 64), Ok(10));
        for rope_dim in [0, 2, 66] {
            assert!(matches!(check_table(320, 320, rope_dim), Err(LaunchError::RopeDim { .. })), "{rope_dim}");
        }
        assert!(matches!(check_table(320, 288, 64), Err(LaunchError::Elements { buffer: "the table of sines", .. })));
        assert!(matches!(check_table(321, 321, 64), Err(LaunchError::Elements { expected: 352, .. })));
    }
}
