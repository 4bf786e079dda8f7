//! Passes with prompt tokens.
//!
//! A pass computes the next tokens of one prompt, a chunk, and may also compute a step. The step's rows come first.
//! Products, norms and activations take all rows at once, because the rows of a step then cost little: weights are read
//! once for both. Attention runs for the step and for the chunk separately. Neither reads what the other writes.

use std::ops::Range;

use unweight_rt::DeviceError;

use super::{AllPhases, Forward, Ids};
use crate::{sampling::RowSampling, weights::Weights};

/// Products take less time for a multiple of this many rows than for fewer rows: their loads are in boxes of 32 rows,
/// and filling rows past the batch with zeros takes longer than reading them.
const BOX_ROWS: u32 = 32;

/// The rows of a chunk in a pass, and the tokens that they hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChunkPlace {
    /// The number of rows before the chunk.
    pub first: u32,
    /// The number of tokens of the chunk.
    pub len: u32,
    /// The position of the first token in its sequence.
    pub start: u32,
}

impl ChunkPlace {
    /// The rows of the chunk.
    pub fn rows(self) -> Range<u32> {
        self.first..self.first + self.len
    }

    /// The positions of the tokens.
    pub fn positions(self) -> (u32, u32) {
        (self.start, self.start + self.len)
    }
}

impl Forward {
    /// Sets the pages of the sequence whose prompt runs next, and its hot page in a packed cache if steps follow. Waits
    /// for the copy.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails.
    pub fn set_pages(&mut self, pages: &[u32], hot: Option<u32>) -> Result<(), DeviceError> {
        let mut table = vec![self.cache.padding(); self.shape.table_pages as usize];
        table[..pages.len()].copy_from_slice(pages);
        if let Some(cache) = self.cache.packed() {
            cache.set_prompt(self.ctx.stream(), hot)?;
        }
        self.prompt_pages.write(self.ctx.stream(), 0, &table)
    }

    /// Enqueues the packing of `context` tokens of staging into the pages of a sequence, in every layer.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails.
    pub(crate) fn pack_staging(&mut self, pages: &[u32], hot: u32, context: u32) -> Result<(), DeviceError> {
        self.set_pages(pages, Some(hot))?;
        let Some(cache) = self.cache.packed() else { return Ok(()) };
        (0..self.shape.layers)
            .try_for_each(|layer| cache.pack_chunk(&mut self.ctx, layer, &self.prompt_pages, (0, context)))
    }

    /// Sets the tokens of a chunk and returns their number. Waits for the copy.
    ///
    /// # Errors
    /// [`DeviceError`] if there are more tokens than [`Forward::chunk_rows`], or if the driver fails.
    pub(crate) fn set_prompt(&mut self, ids: &[u32]) -> Result<u32, DeviceError> {
        self.prompt.write(self.ctx.stream(), 0, ids)?;
        // At most the length of the buffer.
        Ok(ids.len() as u32)
    }

    /// Enqueues the next tokens of the sequence whose pages were set, from position `start` on. Waits only for the copy
    /// of the ids.
    ///
    /// # Errors
    /// [`DeviceError`] if there are more tokens than [`Forward::chunk_rows`], or if the driver fails.
    pub fn enqueue_chunk(&mut self, weights: &Weights, ids: &[u32], start: u32) -> Result<(), DeviceError> {
        self.enqueue_mixed(weights, 0, ids, start)
    }

    /// Enqueues a step of the first `step_rows` rows and a chunk in one pass; the chunk as for
    /// [`Forward::enqueue_chunk`]. All rows of the step must have a token. No earlier step may run.
    ///
    /// # Errors
    /// [`DeviceError`] if there are more tokens than [`Forward::chunk_rows`] or more rows than a step can have, or if
    /// the driver fails.
    pub fn enqueue_mixed(
        &mut self,
        weights: &Weights,
        step_rows: u32,
        ids: &[u32],
        start: u32,
    ) -> Result<(), DeviceError> {
        let chunk = ChunkPlace { first: step_rows, len: self.set_prompt(ids)?, start };
        self.pass_rows = chunk.rows().end;
        // Rows without a token have the values of earlier passes, which no other row reads. Experts would compute them.
        let rows = match self.shape.mixture {
            None => self.pass_rows.next_multiple_of(BOX_ROWS).min(self.shape.rows),
            Some(_) => self.pass_rows,
        };
        if step_rows > 0 {
            self.enqueue_embed(weights, 0..step_rows, Ids::Step)?;
        }
        self.enqueue_embed(weights, chunk.rows(), Ids::Prompt)?;
        for (index, layer) in weights.layers.iter().enumerate() {
            self.enqueue_input_norm(&layer.input_norm, rows)?;
            self.enqueue_qkv(layer, rows)?;
            if step_rows > 0 {
                self.enqueue_attention(layer, index, step_rows)?;
            }
            self.enqueue_rope_and_store(layer, index, chunk)?;
            self.enqueue_chunk_attention(index, chunk)?;
            self.enqueue_after_attention((layer, weights.layers.get(index + 1)), rows, AllPhases)?;
        }
        if step_rows == 0 {
            return Ok(());
        }
        self.enqueue_head(weights, 0, step_rows, AllPhases)?;
        self.enqueue_sample(step_rows)
    }

    /// Enqueues the logits of `rows` rows of the last pass, from `first` on.
    ///
    /// # Errors
    /// [`DeviceError`] if there are more rows than [`Forward::logit_rows`], or if the driver fails.
    pub fn enqueue_logits(&mut self, weights: &Weights, first: u32, rows: u32) -> Result<(), DeviceError> {
        self.enqueue_head(weights, first, rows, AllPhases)
    }

    /// Enqueues the sampling of a token from the first row of logits. Overwrites the first row of the steps.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails.
    pub fn enqueue_first_token(&mut self, position: u32, row: RowSampling) -> Result<(), DeviceError> {
        let stream = self.ctx.stream().clone();
        self.positions.write(&stream, 0, &[position])?;
        self.sampling.set_rows(&stream, &[row])?;
        self.enqueue_sample(1)?;
        self.enqueue_sampling_extras()
    }
}
