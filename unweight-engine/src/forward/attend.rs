//! Attention of steps and of prompt chunks.
//!
//! Rows of a step that verifies drafts may be consecutive tokens of one sequence. Attention then runs twice: the first
//! launch stores the keys and values of all rows, the second attends to them.

use unweight_model::QkNorm;
use unweight_rt::{
    DeviceBuffer, DeviceError, LaunchError,
    raw::{
        device::LaunchMode,
        ops::{
            attention::{AttentionOptions, ChunkRows, TokenRows},
            rope::HeadOptions,
        },
    },
};

use super::{ChunkPlace, Forward, Shape, view, view_mut};
use crate::weights::Layer;

impl Forward {
    /// The norm weights of queries and keys, if heads are normed separately.
    fn head_norms(layer: &Layer, qk_norm: QkNorm) -> [Option<&DeviceBuffer<u16>>; 2] {
        if qk_norm == QkNorm::Head { [layer.q_norm.as_ref(), layer.k_norm.as_ref()] } else { [None; 2] }
    }

    /// The bias of queries, keys and values, unless it was added before the norm of all heads together.
    fn heads_bias(layer: &Layer, qk_norm: QkNorm) -> Option<&DeviceBuffer<u16>> {
        layer.qkv_bias.as_ref().filter(|_| qk_norm != QkNorm::Whole)
    }

    /// Enqueues the attention of a step in layer `index`.
    pub(crate) fn enqueue_attention(&mut self, layer: &Layer, index: usize, rows: u32) -> Result<(), DeviceError> {
        let Shape { qkv_cols, attended_cols, table_pages, eps, layers, qk_norm, ref windows, ref rotated, .. } =
            self.shape;
        let attention = self.kernels.decode_attention(rows);
        let attention = attention.ok_or(LaunchError::Batch { m: rows, max_batch: self.ids.len() as u32 })?;
        let rotary = self.angles.of(index).rotary();
        let [q_norm, k_norm] = Self::head_norms(layer, qk_norm);
        let mut options = AttentionOptions::new(rotary)
            .rotated(rotated.get(index).is_none_or(|rotated| *rotated))
            .window(windows.get(index).copied().flatten())
            .softcap(self.shape.soft_caps.attention)
            .bias(Self::heads_bias(layer, qk_norm))
            .norms(q_norm, k_norm, eps)
            .parts(attention.splits);
        if let Some(factor) = self.shape.factors.attention {
            options = options.scale(factor);
        }
        let tokens = TokenRows { positions: &self.positions, page_table: &self.tables, table_pages };
        let x = view(&self.qkv, rows, qkv_cols)?;
        let mut out = view_mut(&mut self.attended, rows, attended_cols)?;
        let mode = self.ctx.stream().mode();
        if self.verifies {
            // Stores the keys and values of all rows: with a window of one token, each row attends only to itself. The
            // next launch starts after this one has ended, and stores the same bits again.
            let (cache, self_only) = (self.cache.decode(index as u32)?, options.window(Some(1)));
            attention.kernel.decode(&mut self.ctx, x, cache, tokens, self_only, out.reborrow())?;
            self.ctx.set_mode(LaunchMode { serialized: true, ..mode });
        }
        let cache = self.cache.decode(index as u32)?;
        let launched = attention.kernel.decode(&mut self.ctx, x, cache, tokens, options, out);
        self.ctx.set_mode(mode);
        launched?;
        match self.cache.packed() {
            Some(cache) if index + 1 == layers as usize => cache.pack_step(&mut self.ctx, tokens, rows),
            _ => Ok(()),
        }
    }

    /// Enqueues the rotation of a chunk's queries and keys in layer `index`, and stores its keys and values.
    pub(crate) fn enqueue_rope_and_store(
        &mut self,
        layer: &Layer,
        index: usize,
        chunk: ChunkPlace,
    ) -> Result<(), DeviceError> {
        let Shape { qkv_cols, heads, eps, qk_norm, ref rotated, .. } = self.shape;
        let table = self.angles.of(index).table()?;
        let [q_norm, k_norm] = Self::head_norms(layer, qk_norm);
        let options = HeadOptions::new(heads, table)
            .rotated(rotated.get(index).is_none_or(|rotated| *rotated))
            .bias(Self::heads_bias(layer, qk_norm))
            .norms(q_norm, k_norm, eps);
        let (cache, pages) = self.cache.chunk(index as u32, &self.prompt_pages)?;
        let mut whole = view_mut(&mut self.qkv, chunk.rows().end, qkv_cols)?;
        let x = whole.part(chunk.rows(), 0..qkv_cols)?;
        self.kernels.rope.enqueue(&mut self.ctx, x, &options, cache, pages, chunk.start)
    }

    /// Enqueues the attention of a chunk in layer `index`.
    pub(crate) fn enqueue_chunk_attention(&mut self, index: usize, chunk: ChunkPlace) -> Result<(), DeviceError> {
        let Shape { qkv_cols, attended_cols, table_pages, ref windows, .. } = self.shape;
        let (window, layer) = (windows.get(index).copied().flatten(), index as u32);
        if let Some(cache) = self.cache.packed() {
            cache.unpack(&mut self.ctx, layer, (&self.prompt_pages, chunk.start))?;
        }
        let rows = chunk.rows();
        let x = view(&self.qkv, rows.end, qkv_cols)?.part(rows.clone(), 0..qkv_cols)?;
        let (cache, pages) = self.cache.chunk(layer, &self.prompt_pages)?;
        let mut tokens =
            ChunkRows::new(chunk.start, pages, table_pages).window(window).softcap(self.shape.soft_caps.attention);
        if let Some(factor) = self.shape.factors.attention {
            tokens = tokens.scale(factor);
        }
        let mut whole = view_mut(&mut self.attended, rows.end, attended_cols)?;
        let out = whole.part(rows, 0..attended_cols)?;
        self.kernels.prefill.prefill(&mut self.ctx, x, cache, tokens, out)?;
        match self.cache.packed() {
            Some(cache) => cache.pack_chunk(&mut self.ctx, layer, &self.prompt_pages, chunk.positions()),
            None => Ok(()),
        }
    }
}
