//! Attention of tokens to the pages of a KV cache.
//!
//! ```text
//! QKV [m, (h + 2g) * hd] --decode--> A [m, h * hd]     row r: the newest token of a sequence of its own;
//!                                                      its K and V are stored into its pages on the way
//!                           --prefill-> A [m, h * hd]  row r: token start + r of one sequence, K and V in its pages
//! ```
//! A row reads only what its position and page table select, so its result depends neither on other rows nor on the
//! batch. It depends on the kernel: blocks of a cluster share a row's tokens, and sums are added in block order. A
//! kernel with `split` has no clusters: [`AttentionOptions::parts`] blocks share a row's tokens through the context's
//! memory, and their number determines the order.

use std::sync::Arc;

pub use unweight_codegen::family::attention::PARTS_MAX;
use unweight_codegen::{
    abi::AttentionArgs,
    kv::PAGE_TOKENS,
    plan::GemmShape,
    spec::{AttentionSpec, AttentionStep, KvCache, Op},
};

use crate::{
    device::{
        ContextSize, DeviceBuffer, DeviceError, LaunchError, MatrixMut, MatrixRef, RowFault,
        module::LoadedKernel,
        view::{MatrixDesc, check_apart, check_buffer, check_device},
    },
    exec::{ExecContext, context::ContextParts},
    ops::{kv::KvLayer, kv_packed::DecodeCache},
};

/// The maximum number of query heads per KV head: they share the rows of a tensor-core fragment.
pub const GROUP_MAX: u32 = 16;

/// The tokens of a batch: the position of each in its sequence, and the pages of the sequence.
#[derive(Clone, Copy, Debug)]
pub struct TokenRows<'a> {
    /// `[m]` or more: the position of each row's token in its sequence, from 0, or
    /// [`PAD_POSITION`](crate::ops::kv::PAD_POSITION).
    pub positions: &'a DeviceBuffer<u32>,
    /// `[m, table_pages]` or more: the pages of each row's sequence.
    pub page_table: &'a DeviceBuffer<u32>,
    /// The number of entries in each row of the table.
    pub table_pages: u32,
}

/// Cosines and sines of rotary angles, contiguous bf16 `[positions, rope_dim / 2]` each. Elements `i` and `i + rope_dim
/// / 2` of a head are rotated together; those from `rope_dim` on are not rotated. A kernel with `adjacent` rotates
/// elements `2 * i` and `2 * i + 1` together, and stores angles `i` and `i + rope_dim / 4` next to each other.
#[derive(Clone, Copy, Debug)]
pub struct RotaryTable<'a> {
    /// The cosines of all positions.
    pub cosines: MatrixRef<'a>,
    /// The sines of all positions.
    pub sines: MatrixRef<'a>,
}

/// The tokens of a chunk of one sequence: its start, and the pages of the sequence.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ChunkRows<'a> {
    start: u32,
    page_table: &'a DeviceBuffer<u32>,
    table_row: u32,
    table_pages: u32,
    window: u32,
    scale: Option<f32>,
    softcap: Option<f32>,
}

impl<'a> ChunkRows<'a> {
    /// Creates a chunk that starts at position `start` of a sequence. The sequence's pages are row 0 of a table whose
    /// rows have `table_pages` entries.
    pub fn new(start: u32, page_table: &'a DeviceBuffer<u32>, table_pages: u32) -> Self {
        Self { start, page_table, table_row: 0, table_pages, window: 0, scale: None, softcap: None }
    }

    /// Sets the row of the page table that belongs to the sequence.
    #[must_use]
    pub fn table_row(mut self, row: u32) -> Self {
        self.table_row = row;
        self
    }

    /// Sets the number of tokens that a token attends to ([`AttentionOptions::window`]).
    #[must_use]
    pub fn window(mut self, tokens: Option<u32>) -> Self {
        self.window = tokens.unwrap_or(0);
        self
    }

    /// Sets the factor of scores ([`AttentionOptions::scale`]).
    #[must_use]
    pub fn scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Sets the soft cap of scores ([`AttentionOptions::softcap`]).
    #[must_use]
    pub fn softcap(mut self, cap: Option<f32>) -> Self {
        self.softcap = cap;
        self
    }

    /// Checks that the table has the row, and that the row has pages for the last of `m` tokens.
    fn check(&self, m: u32) -> Result<(), LaunchError> {
        let (pages, got) = (u64::from(self.table_pages), self.page_table.len() as u64);
        let expected = (u64::from(self.table_row) + 1) * pages;
        if got < expected {
            return Err(LaunchError::Elements { buffer: "the page table", got, expected });
        }
        let tokens = u64::from(self.start) + u64::from(m);
        if tokens > pages * u64::from(PAGE_TOKENS) || tokens > u64::from(u32::MAX) {
            return Err(LaunchError::Pages { tokens, pages: self.table_pages });
        }
        Ok(())
    }
}

/// Attention options that depend on the model.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct AttentionOptions<'a> {
    rotary: RotaryTable<'a>,
    rotated: bool,
    window: u32,
    scale: Option<f32>,
    softcap: Option<f32>,
    bias: Option<&'a DeviceBuffer<u16>>,
    q_norm: Option<&'a DeviceBuffer<u16>>,
    k_norm: Option<&'a DeviceBuffer<u16>>,
    eps: f32,
    parts: u32,
}

impl<'a> AttentionOptions<'a> {
    /// Rotates queries and keys by these angles; tokens attend to all earlier tokens. All other options are off.
    pub fn new(rotary: RotaryTable<'a>) -> Self {
        let (bias, q_norm, k_norm) = (None, None, None);
        let (scale, softcap) = (None, None);
        Self { rotary, rotated: true, window: 0, scale, softcap, bias, q_norm, k_norm, eps: 0.0, parts: 1 }
    }

    /// Sets whether queries and keys are rotated; otherwise the table only limits the positions.
    #[must_use]
    pub fn rotated(mut self, rotated: bool) -> Self {
        self.rotated = rotated;
        self
    }

    /// Sets the number of blocks that share the tokens of a row and KV head, 1 to [`PARTS_MAX`], for kernels with
    /// `split`. Blocks without tokens exit at once. The context must have room for them ([`Attention::context_size`]).
    #[must_use]
    pub fn parts(mut self, parts: u32) -> Self {
        self.parts = parts;
        self
    }

    /// Sets the number of tokens that a token attends to, including itself; `None` or 0: all earlier tokens.
    #[must_use]
    pub fn window(mut self, tokens: Option<u32>) -> Self {
        self.window = tokens.unwrap_or(0);
        self
    }

    /// Sets the factor of scores; `1 / sqrt(head_dim)` by default.
    #[must_use]
    pub fn scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Sets the soft cap of scores, `cap * tanh(score / cap)`, for kernels with `softcap`. Such kernels do not support
    /// norms.
    #[must_use]
    pub fn softcap(mut self, cap: Option<f32>) -> Self {
        self.softcap = cap;
        self
    }

    /// Sets the bias of the projection, bf16 `[(h + 2g) * head_dim]`.
    #[must_use]
    pub fn bias(mut self, bias: Option<&'a DeviceBuffer<u16>>) -> Self {
        self.bias = bias;
        self
    }

    /// Sets the weights of the norms of queries and of keys, bf16 `[head_dim]` each, which precede the rotation; `eps`
    /// is added to the mean square.
    #[must_use]
    pub fn norms(
        mut self,
        queries: Option<&'a DeviceBuffer<u16>>,
        keys: Option<&'a DeviceBuffer<u16>>,
        eps: f32,
    ) -> Self {
        (self.q_norm, self.k_norm, self.eps) = (queries, keys, eps);
        self
    }

    fn vectors(&self, columns: u32, head_dim: u32) -> [(&'static str, Option<&'a DeviceBuffer<u16>>, u32); 3] {
        [
            ("the bias", self.bias, columns),
            ("the norm of queries", self.q_norm, head_dim),
            ("the norm of keys", self.k_norm, head_dim),
        ]
    }
}

/// An attention kernel.
#[derive(Clone, Debug)]
pub struct Attention {
    kernel: Arc<LoadedKernel>,
    spec: AttentionSpec,
}

impl Attention {
    /// Wraps a kernel of family `attention`.
    ///
    /// # Errors
    /// The kernel belongs to another family.
    pub fn new(kernel: Arc<LoadedKernel>) -> Result<Self, DeviceError> {
        match kernel.spec().op {
            Op::Attention(spec) => Ok(Self { kernel, spec }),
            _ => kernel.refuse(LaunchError::Family { wanted: "an attention kernel" }),
        }
    }

    /// Returns the loaded kernel.
    pub fn kernel(&self) -> &LoadedKernel {
        &self.kernel
    }

    /// Returns the context size for [`Attention::decode`] with this many rows.
    ///
    /// # Errors
    /// The kernel does not support `parts`, or there are more blocks than a grid may have.
    pub fn context_size(&self, rows: u32, kv_heads: u32, parts: u32) -> Result<ContextSize, DeviceError> {
        let heads = Heads { rows, kv_heads, group: 1 };
        let need = self.check_parts(parts).and_then(|()| self.shared(heads.problem(parts)?, parts));
        need.or_else(|refusal| self.kernel.refuse(refusal))
    }

    fn shared(&self, problem: GemmShape, parts: u32) -> Result<ContextSize, LaunchError> {
        match parts {
            // A single block sums all tokens and needs no workspace.
            1 => Ok(ContextSize::default()),
            _ => Ok(self.kernel.plan().workspace(problem, self.kernel.device().info().sms).into()),
        }
    }

    fn check_parts(&self, parts: u32) -> Result<(), LaunchError> {
        let limit = if self.spec.split { PARTS_MAX } else { 1 };
        if (1..=limit).contains(&parts) { Ok(()) } else { Err(LaunchError::Parts { parts, limit }) }
    }

    fn check_step(&self, requested: AttentionStep) -> Result<(), LaunchError> {
        let supported = self.spec.step;
        if supported == requested {
            Ok(())
        } else {
            Err(LaunchError::Step { takes: supported.tag(), asked: requested.tag() })
        }
    }

    /// Checks that the kernel has a soft cap if and only if scores need one.
    fn check_softcap(&self, requested: Option<f32>, has_norms: bool) -> Result<(), LaunchError> {
        match (self.spec.softcap, requested) {
            (false, None) => Ok(()),
            (true, Some(_)) if !has_norms => Ok(()),
            (true, Some(_)) => Err(LaunchError::Family { wanted: "an attention kernel with head norms" }),
            (true, None) => Err(LaunchError::Family { wanted: "an attention kernel without a soft cap" }),
            (false, Some(_)) => Err(LaunchError::Family { wanted: "an attention kernel with a soft cap" }),
        }
    }

    /// Returns `scale` and `eps` of the arguments for this factor of scores.
    fn scales(&self, factor: Option<f32>, softcap: Option<f32>, eps: f32) -> (f32, f32) {
        let factor = factor.unwrap_or(1.0 / (self.spec.head_dim.get() as f32).sqrt());
        match softcap {
            Some(cap) => (cap * std::f32::consts::LOG2_E, factor / cap),
            None => (factor * std::f32::consts::LOG2_E, eps),
        }
    }

    /// Enqueues the causal attention of a chunk of tokens of one sequence.
    ///
    /// `qkv` is `[m, (h + 2g) * head_dim]`; its queries are already normed and rotated, and the keys and values of all
    /// tokens up to the chunk's last are in the pages. `out` is `[m, h * head_dim]`. A page that the layer does not
    /// have is skipped, and [`ExecContext::synchronize`] reports a row that attends to it. A row's bits do not depend
    /// on how a sequence is split into chunks.
    ///
    /// # Errors
    /// Operands whose shapes do not match, that overlap or are on another device, whose address or pitch the kernel
    /// does not support; a table too short for the chunk; or a driver error.
    pub fn prefill(
        &self,
        ctx: &mut ExecContext,
        qkv: MatrixRef<'_>,
        layer: KvLayer<'_>,
        rows: ChunkRows<'_>,
        out: MatrixMut<'_>,
    ) -> Result<(), DeviceError> {
        let (qkv, out) = (qkv.desc(), out.desc());
        let ordinal = self.kernel.device().ordinal();
        let head_dim = self.spec.head_dim.get();
        let check = || {
            self.check_step(AttentionStep::Prefill)?;
            self.check_softcap(rows.softcap, false)?;
            if layer.shape().head_dim() != head_dim {
                return Err(LaunchError::HeadDimOf { takes: head_dim, cache: layer.shape().head_dim() });
            }
            let heads = Heads::of(qkv, out, layer.shape().kv_heads(), head_dim)?;
            rows.check(qkv.rows)?;
            check_device("the page table", rows.page_table.device().ordinal(), ordinal)?;
            qkv.check_device("QKV", ordinal)?;
            out.check_device("A", ordinal)?;
            layer.check_device(ordinal)?;
            let read =
                [("QKV", qkv.span()), ("the page table", rows.page_table.span()), ("the KV cache", layer.span())];
            check_apart(("A", out.span()), read)?;
            let problem = heads.chunk(self.spec.warps.get() * GROUP_MAX)?;
            self.kernel.check_grid(problem)?;
            Ok((heads, problem))
        };
        let (heads, problem) = check().or_else(|refusal| self.kernel.refuse(refusal))?;
        let (scale, eps) = self.scales(rows.scale, rows.softcap, 0.0);
        let table = u64::from(rows.table_row) * u64::from(rows.table_pages) * size_of::<u32>() as u64;
        let args = AttentionArgs {
            qkv: qkv.address,
            out: out.address,
            layer: layer.address(),
            page_table: rows.page_table.address() + table,
            fault: ctx.row_fault_address(RowFault::Page),
            qkv_pitch: qkv.pitch,
            out_pitch: out.pitch,
            m: heads.rows,
            kv_heads: heads.kv_heads,
            group: heads.group,
            pages: layer.shape().pages(),
            table_pages: rows.table_pages,
            window: rows.window,
            start: rows.start,
            scale,
            eps,
            ..AttentionArgs::default()
        };
        // SAFETY: as in `decode`; the table was checked against the last token, and the kernel bounds-checks pages.
        unsafe { self.kernel.launch(ctx.stream(), problem, &args) }
    }

    /// Enqueues the attention of the newest token of each row.
    ///
    /// `qkv` is `[m, (h + 2g) * head_dim]` as the projection returns it: query heads, key heads, value heads. `out` is
    /// `[m, h * head_dim]`. The key and value of each row's token are stored into its page, or into its hot page if the
    /// cache is packed; those of earlier tokens must be in the cache. A row without a token
    /// ([`PAD_POSITION`](crate::ops::kv::PAD_POSITION)) becomes zeros and accesses no page. A page that the layer does
    /// not have is skipped, and a row whose position exceeds the page table or the angles becomes zeros;
    /// [`ExecContext::synchronize`] reports both.
    ///
    /// # Errors
    /// Operands whose shapes do not match, that overlap or are on another device, whose address or pitch the kernel
    /// does not support; `parts` that the kernel does not support, or an execution context without room for them; or a
    /// driver error.
    pub fn decode<'c>(
        &self,
        ctx: &mut ExecContext,
        qkv: MatrixRef<'_>,
        cache: impl Into<DecodeCache<'c>>,
        rows: TokenRows<'_>,
        options: AttentionOptions<'_>,
        out: MatrixMut<'_>,
    ) -> Result<(), DeviceError> {
        let (qkv, out, cache) = (qkv.desc(), out.desc(), cache.into());
        let (cosines, sines) = (options.rotary.cosines.desc(), options.rotary.sines.desc());
        let ordinal = self.kernel.device().ordinal();
        let (head_dim, parts) = (self.spec.head_dim.get(), options.parts);
        let have = ctx.size();
        let check = || {
            self.check_step(AttentionStep::Decode)?;
            self.check_softcap(options.softcap, options.q_norm.or(options.k_norm).is_some())?;
            self.check_parts(parts)?;
            let written = self.check_cache(&cache, qkv.rows)?;
            let heads = Heads::of(qkv, out, written.shape().kv_heads(), head_dim)?;
            check_rotary(cosines, sines, head_dim)?;
            let tables = [
                ("the positions", rows.positions, u64::from(qkv.rows)),
                ("the page table", rows.page_table, u64::from(qkv.rows) * u64::from(rows.table_pages)),
            ];
            let mut read = vec![("QKV", qkv.span()), ("the cosines", cosines.span()), ("the sines", sines.span())];
            for (what, buffer, expected) in tables {
                if (buffer.len() as u64) < expected || rows.table_pages == 0 {
                    return Err(LaunchError::Elements { buffer: what, got: buffer.len() as u64, expected });
                }
                check_device(what, buffer.device().ordinal(), ordinal)?;
                read.push((what, buffer.span()));
            }
            for (what, vector, expected) in options.vectors(qkv.cols, head_dim) {
                let Some(vector) = vector else { continue };
                if vector.len() as u64 != u64::from(expected) {
                    let (got, expected) = (vector.len() as u64, expected.into());
                    return Err(LaunchError::Elements { buffer: what, got, expected });
                }
                check_device(what, vector.device().ordinal(), ordinal)?;
                read.push((what, vector.span()));
            }
            for (what, desc) in [("QKV", qkv), ("A", out), ("the cosines", cosines), ("the sines", sines)] {
                desc.check_device(what, ordinal)?;
            }
            if let DecodeCache::Packed { pages, hot_table, .. } = &cache {
                read.extend(pages.spans());
                read.push(("the table of hot pages", hot_table.span()));
            }
            check_apart(("the KV cache", written.span()), read.iter().cloned())?;
            check_apart(("A", out.span()), read.into_iter().chain([("the KV cache", written.span())]))?;
            let problem = heads.problem(parts)?;
            self.kernel.check_grid(problem)?;
            have.check(self.shared(problem, parts)?)?;
            Ok((heads, problem))
        };
        let (heads, problem) = check().or_else(|refusal| self.kernel.refuse(refusal))?;
        let fault = ctx.row_fault_address(RowFault::Page);
        let ContextParts { workspace, .. } = ctx.parts();
        let address = |vector: Option<&DeviceBuffer<u16>>| vector.map_or(0, DeviceBuffer::address);
        let (scale, eps) = self.scales(options.scale, options.softcap, options.eps);
        let args = AttentionArgs {
            qkv: qkv.address,
            out: out.address,
            positions: rows.positions.address(),
            page_table: rows.page_table.address(),
            cosines: cosines.address,
            sines: sines.address,
            bias: address(options.bias),
            q_norm: address(options.q_norm),
            k_norm: address(options.k_norm),
            fault,
            partials: workspace.partials.address(),
            counters: workspace.counters.address(),
            qkv_pitch: qkv.pitch,
            out_pitch: out.pitch,
            m: heads.rows,
            kv_heads: heads.kv_heads,
            group: heads.group,
            table_pages: rows.table_pages,
            max_positions: cosines.rows,
            window: options.window,
            rope_dim: if options.rotated { cosines.cols * 2 } else { 0 },
            start: 0,
            scale,
            eps,
            parts,
            ..cache_args(&cache)
        };
        // SAFETY: shapes, pitches, places and lengths were checked above, views against their memory when they were
        // created; the kernel bounds-checks positions and pages. The fault word and the workspace live as long as the
        // context, on whose stream this runs. The workspace is large enough, and every launch leaves its counters at
        // zero. Dropping a buffer waits for the kernel.
        unsafe { self.kernel.launch(ctx.stream(), problem, &args) }
    }

    /// Checks that the kernel supports this cache for `m` rows; returns the BF16 pages into which new tokens are
    /// stored.
    fn check_cache<'a, 'c>(&self, cache: &'a DecodeCache<'c>, m: u32) -> Result<&'a KvLayer<'c>, LaunchError> {
        let (ordinal, head_dim) = (self.kernel.device().ordinal(), self.spec.head_dim.get());
        let (got, written) = match cache {
            DecodeCache::Bf16(layer) => (KvCache::Bf16, layer),
            DecodeCache::Packed { hot, .. } => (KvCache::Packed, hot),
        };
        if got != self.spec.cache {
            return Err(LaunchError::Source { takes: cache_name(self.spec.cache), got: cache_name(got) });
        }
        let cache_dim = written.shape().head_dim();
        if cache_dim != head_dim {
            return Err(LaunchError::HeadDimOf { takes: head_dim, cache: cache_dim });
        }
        written.check_device(ordinal)?;
        if let DecodeCache::Packed { pages, hot, hot_table } = cache {
            pages.check(ordinal, head_dim)?;
            pages.check_heads(&hot.shape())?;
            check_buffer("the table of hot pages", hot_table, m.into(), ordinal)?;
        }
        Ok(written)
    }
}

fn cache_name(cache: KvCache) -> &'static str {
    match cache {
        KvCache::Bf16 => "a BF16 KV cache",
        KvCache::Packed => "a packed KV cache",
    }
}

/// Returns arguments with the addresses and sizes of a cache.
fn cache_args(cache: &DecodeCache<'_>) -> AttentionArgs {
    match cache {
        DecodeCache::Bf16(layer) => {
            AttentionArgs { layer: layer.address(), pages: layer.shape().pages(), ..AttentionArgs::default() }
        }
        DecodeCache::Packed { pages, hot, hot_table } => AttentionArgs {
            layer: pages.packed(),
            pages: pages.shape().kv.pages(),
            records: pages.records(),
            unit_pages: pages.units(),
            hot: hot.address(),
            hot_table: hot_table.address(),
            hot_pages: hot.shape().pages(),
            units: pages.shape().units,
            ..AttentionArgs::default()
        },
    }
}

/// How a batch divides into heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Heads {
    rows: u32,
    kv_heads: u32,
    group: u32,
}

impl Heads {
    /// Checks that the shapes match: `qkv` `[m, (h + 2g) * head_dim]` and `out` `[m, h * head_dim]`.
    fn of(qkv: &MatrixDesc, out: &MatrixDesc, kv_heads: u32, head_dim: u32) -> Result<Self, LaunchError> {
        let refusal = LaunchError::AttentionHeads { qkv: qkv.shape(), out: out.shape(), kv_heads, head_dim };
        let all = u64::from(kv_heads) * u64::from(head_dim);
        let group = u64::from(out.cols).checked_div(all).unwrap_or(0);
        let fits = qkv.rows == out.rows
            && (1..=u64::from(GROUP_MAX)).contains(&group)
            && u64::from(out.cols) == group * all
            && u64::from(qkv.cols) == (group + 2) * all;
        if !fits {
            return Err(refusal);
        }
        qkv.check_rows_aligned("QKV")?;
        out.check_rows_aligned("A")?;
        // At most 16.
        Ok(Self { rows: qkv.rows, kv_heads, group: group as u32 })
    }

    /// Returns one unit per KV head and group of tokens; the tokens' query heads of a group together fill at most
    /// `rows` rows of a block.
    fn chunk(&self, rows: u32) -> Result<GemmShape, LaunchError> {
        // A group has at most as many heads as a fragment has rows.
        Self { rows: self.rows.div_ceil(rows / self.group), ..*self }.problem(1)
    }

    /// Returns one unit per part, row and KV head.
    fn problem(&self, parts: u32) -> Result<GemmShape, LaunchError> {
        let (pairs, limit) = (u64::from(self.rows) * u64::from(self.kv_heads), u64::from(u32::MAX));
        let units = pairs.saturating_mul(parts.into());
        match u32::try_from(units) {
            Ok(units) => Ok(GemmShape::rows(units)),
            Err(_) if pairs > limit => Err(LaunchError::TooLarge { what: "rows times KV heads", value: pairs, limit }),
            Err(_) => Err(LaunchError::TooLarge { what: "rows times KV heads times parts", value: units, limit }),
        }
    }
}

/// Checks that these can be the angles of heads of this size.
fn check_rotary(cosines: &MatrixDesc, sines: &MatrixDesc, head_dim: u32) -> Result<(), LaunchError> {
    if cosines.shape() != sines.shape() {
        return Err(LaunchError::Output { output: sines.shape(), tensor: cosines.shape() });
    }
    if !cosines.cols.is_multiple_of(2) || cosines.cols > head_dim / 2 {
        return Err(LaunchError::Rotary { cols: cosines.cols, head_dim });
    }
    for (what, desc) in [("the cosines", cosines), ("the sines", sines)] {
        desc.check_dense(what)?;
        desc.check_aligned(what)?;
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
    fn heads_must_divide_the_columns() {
        let of = |q: (u32, u32), o: (u32, u32), kv_heads, head_dim| {
            Heads::of(&desc(q.0, q.1, q.1.into()), &desc(o.0, o.1, o.1.into()), kv_heads, head_dim)
        };
        assert_eq!(of((3, 6144), (3, 4096), 8, 128), Ok(Heads { rows: 3, kv_heads: 8, group: 4 }));
        assert_eq!(of((1, 18 * 64), (1, 16 * 64), 1, 64), Ok(Heads { rows: 1, kv_heads: 1, group: 16 }));
        for (q, o, kv_heads, head_dim) in [
            ((3, 6144), (2, 4096), 8, 128),
            ((3, 6144), (3, 4096), 4, 128),
            ((3, 6144), (3, 4096), 0, 128),
            ((3, 6152), (3, 4096), 8, 128),
            ((3, 19 * 64), (3, 17 * 64), 1, 64),
            ((3, 128), (3, 0), 1, 64),
            ((3, 6144), (3, 4096), u32::MAX, u32::MAX),
        ] {
            assert!(
                matches!(of(q, o, kv_heads, head_dim), Err(LaunchError::AttentionHeads { .. })),
                "{q:?} {o:?} {kv_heads}"
            );
        }
        let apart = Heads::of(&desc(3, 384, 388), &desc(3, 256, 256), 1, 64);
        assert!(matches!(apart, Err(LaunchError::Pitch { operand: "QKV", .. })), "{apart:?}");
        let many = Heads { rows: u32::MAX, kv_heads: 8, group: 1 };
        assert!(matches!(many.problem(1), Err(LaunchError::TooLarge { what: "rows times KV heads", .. })));
        let split = Heads { rows: 1 << 26, kv_heads: 8, group: 1 };
        assert_eq!(split.problem(2), Ok(GemmShape::rows(1 << 30)));
        assert!(matches!(split.problem(8), Err(LaunchError::TooLarge { .. })));
    }

    #[test]
    fn angles_are_for_pairs_of_a_head() {
        let check = |rows: u32, cols: u32, pitch: u64, head_dim| {
            let table = desc(rows, cols, pitch);
            check_rotary(&table, &table, head_dim)
        };
        assert_eq!(check(100, 64, 64, 128), Ok(()));
        assert_eq!(check(100, 16, 16, 128), Ok(()), "a part of a head");
        assert_eq!(check(100, 66, 66, 128), Err(LaunchError::Rotary { cols: 66, head_dim: 128 }));
        assert_eq!(check(100, 7, 7, 128), Err(LaunchError::Rotary { cols: 7, head_dim: 128 }));
        assert!(matches!(check(100, 64, 72, 128), Err(LaunchError::Pitch { .. })));
        let other = check_rotary(&desc(100, 64, 64), &desc(99, 64, 64), 128);
        assert!(matches!(other, Err(LaunchError::Output { .. })));
    }
}
