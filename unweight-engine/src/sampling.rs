//! Samples the rows of a step: parameters, adjustments and log probabilities on the device.
//!
//! A step samples every row from its logits. Two more kernels may follow it, outside of its CUDA graph: one samples
//! rows with adjusted logits again, the other computes log probabilities. Each is launched only if a row requests it.
//! Other rows keep their tokens, and steps without such rows launch nothing more. The device counts sampled tokens, so
//! that penalties include the token of the previous step, which the host has not read. Masks of rows with constraints
//! depend on that token: the host reads it and computes them while the step runs, before these kernels are enqueued.

use unweight_model::{
    SampleParams,
    sampling::{Logprobs, TOP_LOGPROBS_MAX},
};
use unweight_rt::{
    DeviceBuffer, DeviceError, ExecContext, MatrixRef, Stream,
    raw::ops::{
        logprobs::ROW_WORDS,
        sample::{AdjustRow, RowAdjustments, SampleRow, TokenState},
    },
};

use crate::{kernels::Kernels, schedule::Running};

/// How the next token of a row is sampled, and what its event reports.
#[derive(Clone, Copy, Debug)]
pub struct RowSampling {
    /// The sampling parameters.
    pub sample: SampleRow,
    /// The adjustments of logits.
    pub adjust: AdjustRow,
    /// 0 without log probabilities, else 1 plus the number of most likely tokens.
    pub logprobs: u32,
    /// Whether the row has a mask.
    pub constrained: bool,
}

impl RowSampling {
    /// Samples with these parameters, without adjustments, mask and log probabilities.
    pub fn new(params: &SampleParams) -> Self {
        let SampleParams { temperature, top_k, top_p, min_p, seed, .. } = *params;
        let sample = SampleRow { seed, temperature, top_k, top_p, min_p };
        Self { sample, adjust: AdjustRow::NONE, logprobs: 0, constrained: false }
    }

    /// The sampling of a running sequence.
    pub fn of(running: &Running) -> Self {
        let base = Self::new(&running.params);
        let adjustments = &running.adjustments;
        let adjust = running.state_slot.map_or(AdjustRow::NONE, |slot| AdjustRow {
            slot,
            repetition: adjustments.repetition_penalty,
            frequency: adjustments.frequency_penalty,
            presence: adjustments.presence_penalty,
            // A context fits 32 bits.
            end_from: (running.history().prompt.len() as u32).saturating_add(adjustments.min_new_tokens),
            mask: 0,
        });
        let logprobs = running.logprobs.map_or(0, |top| 1 + top);
        Self { adjust, logprobs, constrained: running.is_constrained(), ..base }
    }

    /// Returns which kernels the rows request in addition.
    fn extras(rows: &[Self]) -> Extras {
        let adjusted = rows.iter().any(|row| row.adjust.slot != AdjustRow::NO_SLOT);
        Extras { rows: rows.len() as u32, adjusted, logprobs: rows.iter().any(|row| row.logprobs != 0) }
    }
}

/// The kernels that are launched after a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Extras {
    /// The number of rows that were set.
    rows: u32,
    adjusted: bool,
    logprobs: bool,
}

/// Returns the states of all tokens of the vocabulary for a sequence that is about to sample.
pub fn token_states(running: &Running, vocab: u32) -> Vec<TokenState> {
    let mut states = vec![TokenState::default(); vocab as usize];
    let mut state = |token: u32, change: &dyn Fn(&mut TokenState)| {
        // The stop tokens of a request may be outside of the vocabulary.
        states.get_mut(token as usize).into_iter().for_each(change);
    };
    let history = running.history();
    running.adjustments.bias.iter().for_each(|(token, bias)| state(*token, &|state| state.bias = *bias));
    history.prompt.iter().for_each(|token| state(*token, &|state| state.marks |= TokenState::IN_PROMPT));
    history.ends.iter().for_each(|token| state(*token, &|state| state.marks |= TokenState::ENDS));
    history.answer.iter().for_each(|token| state(*token, &|state| state.marks += 1));
    states
}

/// Device buffers of sampling.
#[derive(Debug)]
pub struct Sampling {
    samples: DeviceBuffer<SampleRow>,
    adjusts: DeviceBuffer<AdjustRow>,
    tokens: DeviceBuffer<TokenState>,
    token_pitch: u32,
    /// The masks of the rows with constraints, in the order of the rows.
    masks: DeviceBuffer<u32>,
    logprob_counts: DeviceBuffer<u32>,
    logprobs: DeviceBuffer<u32>,
    extras: Extras,
}

impl Sampling {
    /// Allocates buffers for `rows` rows, of which up to `state_slots` have adjustments.
    ///
    /// # Errors
    /// [`DeviceError`] if the allocation fails.
    pub fn new(stream: &Stream, rows: u32, state_slots: u32, vocab: u32) -> Result<Self, DeviceError> {
        let (rows, token_pitch) = (rows as usize, vocab.next_multiple_of(2));
        Ok(Self {
            samples: DeviceBuffer::zeroed(stream, rows)?,
            adjusts: DeviceBuffer::zeroed(stream, rows)?,
            tokens: DeviceBuffer::zeroed(stream, state_slots as usize * token_pitch as usize)?,
            token_pitch,
            masks: DeviceBuffer::zeroed(stream, state_slots as usize * vocab.div_ceil(32) as usize)?,
            logprob_counts: DeviceBuffer::zeroed(stream, rows)?,
            logprobs: DeviceBuffer::zeroed(stream, rows * ROW_WORDS)?,
            extras: Extras::default(),
        })
    }

    /// The sampling parameters of the rows.
    pub fn samples(&self) -> &DeviceBuffer<SampleRow> {
        &self.samples
    }

    /// Sets the first rows of the following steps. Waits for the copies.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails.
    pub fn set_rows(&mut self, stream: &Stream, rows: &[RowSampling]) -> Result<(), DeviceError> {
        self.extras = RowSampling::extras(rows);
        if rows.is_empty() {
            return Ok(());
        }
        let samples: Vec<SampleRow> = rows.iter().map(|row| row.sample).collect();
        self.samples.write(stream, 0, &samples)?;
        if self.extras.adjusted {
            let mut masks = 0;
            let adjust = |row: &RowSampling| {
                masks += u32::from(row.constrained);
                AdjustRow { mask: if row.constrained { masks } else { 0 }, ..row.adjust }
            };
            let adjusts: Vec<AdjustRow> = rows.iter().map(adjust).collect();
            self.adjusts.write(stream, 0, &adjusts)?;
        }
        if self.extras.logprobs {
            let logprob_counts: Vec<u32> = rows.iter().map(|row| row.logprobs).collect();
            self.logprob_counts.write(stream, 0, &logprob_counts)?;
        }
        Ok(())
    }

    /// Sets the token states of a state slot. Waits for the copy.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails.
    pub fn set_state_slot(&mut self, stream: &Stream, slot: u32, states: &[TokenState]) -> Result<(), DeviceError> {
        self.tokens.write(stream, slot as usize * self.token_pitch as usize, states)
    }

    /// Sets the masks of the rows with constraints, in the order of the rows. Waits for the copy.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails.
    pub fn set_masks(&mut self, stream: &Stream, masks: &[u32]) -> Result<(), DeviceError> {
        self.masks.write(stream, 0, masks)
    }

    /// Enqueues the kernels that rows request in addition, after the sampling of all rows.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails.
    pub fn enqueue_extras(
        &mut self,
        ctx: &mut ExecContext,
        kernels: &Kernels,
        logits: MatrixRef<'_>,
        positions: &DeviceBuffer<u32>,
        ids: &mut DeviceBuffer<u32>,
    ) -> Result<(), DeviceError> {
        if self.extras.adjusted {
            let Self { adjusts, tokens, token_pitch, masks, .. } = self;
            let adjustments = RowAdjustments { rows: adjusts, tokens, token_pitch: *token_pitch, masks };
            kernels.adjusted.enqueue(ctx, logits, &self.samples, adjustments, positions, ids)?;
        }
        if self.extras.logprobs {
            kernels.logprobs.enqueue(ctx, logits, &self.logprob_counts, ids, &mut self.logprobs)?;
        }
        Ok(())
    }

    /// The number of rows for which kernels run in addition; 0 if none does.
    pub fn extra_rows(&self) -> u32 {
        if self.extras.adjusted || self.extras.logprobs { self.extras.rows } else { 0 }
    }

    /// The log probabilities of the rows on the device, if a row requests them.
    pub fn logprobs(&self) -> Option<&DeviceBuffer<u32>> {
        self.extras.logprobs.then_some(&self.logprobs)
    }
}

/// Reads the log probabilities of a row from its words on the device.
pub fn read_logprobs(words: &[u32], top: u32) -> Logprobs {
    let pairs = words.as_chunks::<2>().0.iter().map(|[token, bits]| (*token, f32::from_bits(*bits)));
    let mut pairs = pairs.take(1 + top.min(TOP_LOGPROBS_MAX) as usize);
    let sampled = pairs.next().map_or(f32::NAN, |(_, value)| value);
    Logprobs::new(sampled, pairs.filter(|(token, _)| *token != u32::MAX).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extra_kernels_run_only_on_request() {
        let plain = RowSampling::new(&SampleParams::default());
        let adjusted = RowSampling { adjust: AdjustRow { slot: 3, ..AdjustRow::NONE }, ..plain };
        let likely = RowSampling { logprobs: 1, ..plain };
        assert_eq!(RowSampling::extras(&[plain, plain]), Extras { rows: 2, adjusted: false, logprobs: false });
        assert_eq!(RowSampling::extras(&[plain, adjusted]), Extras { rows: 2, adjusted: true, logprobs: false });
        assert_eq!(RowSampling::extras(&[likely]), Extras { rows: 1, adjusted: false, logprobs: true });
    }

    #[test]
    fn missing_tokens_are_left_out() {
        let mut words = vec![5, (-1.5f32).to_bits(), 7, (-0.5f32).to_bits(), u32::MAX, f32::NAN.to_bits()];
        words.resize(ROW_WORDS, 0);
        assert_eq!(read_logprobs(&words, 2), Logprobs::new(-1.5, vec![(7, -0.5)]));
        assert_eq!(read_logprobs(&words, 0), Logprobs::new(-1.5, Vec::new()));
    }
}
