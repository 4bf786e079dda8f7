//! Logits of whole texts.

use half::bf16;
use unweight_model::SampleParams;
use unweight_rt::{DeviceError, raw::ops::kv::PAD_POSITION};

use super::{Engine, Stepper, wait_for_steps};
use crate::{
    error::EngineError,
    forward::{Forward, RowState},
    options::bucket,
    request::{AdmissionError, Request},
    sampling::RowSampling,
    weights::Weights,
};

impl Engine {
    /// The logits after every token of a text, bf16 `[tokens, vocab]`, row-major: row `i` scores the token that follows
    /// the first `i + 1` tokens. Running sequences are not affected.
    ///
    /// # Errors
    /// [`EngineError::AdmissionError`] if the text is empty, has unknown tokens or does not fit the context or the free
    /// pages; [`EngineError::Device`] if the device fails.
    pub fn logits(&mut self, tokens: &[u32]) -> Result<Vec<bf16>, EngineError> {
        self.check_alive()?;
        self.schedule.check(&Request::new(tokens.to_vec()).max_new_tokens(0))?;
        self.end_prefill()?;
        // The length of a text that was checked fits in 32 bits.
        let count = self.schedule.pages_of(tokens.len() as u32);
        let bits = self.with_pages(&[count], |Self { forward, weights, stepper, .. }, pages| {
            text_logits(forward, weights, stepper, tokens, pages.first().map_or(&[][..], Vec::as_slice))
        })?;
        Ok(bits.into_iter().map(bf16::from_bits).collect())
    }

    /// Computes [`Engine::logits`] of several texts at once by steps of one token each. Slow; tests compare the two. No
    /// sequence may run. Returns one matrix `[tokens, vocab]` per text.
    ///
    /// # Errors
    /// [`AdmissionError::Busy`] if a sequence runs or there are more texts than rows; else as for [`Engine::logits`].
    pub fn logits_by_steps(&mut self, texts: &[&[u32]]) -> Result<Vec<Vec<bf16>>, EngineError> {
        self.check_alive()?;
        if !self.is_idle() || texts.len() as u64 > u64::from(self.options.max_batch) {
            return Err(AdmissionError::Busy { waiting: self.running().max(texts.len()) }.into());
        }
        for text in texts {
            self.schedule.check(&Request::new(text.to_vec()).max_new_tokens(0))?;
        }
        let counts: Vec<u32> = texts.iter().map(|text| self.schedule.pages_of(text.len() as u32)).collect();
        self.with_pages(&counts, |engine, pages| engine.stepwise_logits(texts, pages))
    }

    /// Returns the result of a computation on lent pages. If a page is lost (`None`), evicts prompt prefixes that no
    /// sequence reads, for their BF16 units, and computes again.
    fn with_pages<T>(
        &mut self,
        counts: &[u32],
        compute: impl Fn(&mut Self, &[Vec<u32>]) -> Result<Option<T>, DeviceError>,
    ) -> Result<T, EngineError> {
        loop {
            let pages = self.lend(counts)?;
            let computed = compute(self, &pages);
            let computed = self.fail_on_error(computed)?;
            self.schedule.give(pages);
            self.release_freed()?;
            if let Some(result) = computed {
                return Ok(result);
            }
            if !self.schedule.drop_idle() {
                return Err(AdmissionError::NoUnits { units: self.memory.units }.into());
            }
        }
    }

    /// Takes pages. Releases the BF16 units of all returned pages, including those that the prefix cache evicts here,
    /// before any of them is packed again. No page is released twice.
    pub(super) fn lend(&mut self, counts: &[u32]) -> Result<Vec<Vec<u32>>, EngineError> {
        let pages = self.schedule.lend(counts)?;
        self.release_freed()?;
        Ok(pages)
    }

    /// Returns the logits of each text; `None` if a page is lost.
    fn stepwise_logits(&mut self, texts: &[&[u32]], pages: &[Vec<u32>]) -> Result<Option<Vec<Vec<bf16>>>, DeviceError> {
        let stream = self.forward.stream().clone();
        let (count, vocab) = (texts.len() as u32, self.config.vocab as usize);
        let mut logits = vec![Vec::new(); texts.len()];
        let longest = texts.iter().map(|text| text.len()).max().unwrap_or(0);
        for at in 0..longest {
            // Nothing else runs, so every row may use the hot page of its index.
            let states = texts.iter().zip(pages).zip(0..).map(|((text, pages), hot)| {
                let sampling = RowSampling::new(&SampleParams::default());
                let (id, position) = text.get(at).map_or((0, PAD_POSITION), |id| (*id, at as u32));
                RowState { id, position, pages, hot, sampling }
            });
            self.forward.set_rows(&states.collect::<Vec<_>>(), bucket(count))?;
            self.launch(count, false)?;
            let bits = self.forward.read_logits(count)?;
            wait_for_steps(&mut self.forward, &mut self.stepper)?;
            if let Some(cache) = self.forward.packed_cache()
                && cache.page_losses().to_host(&stream)?.iter().any(|flag| *flag != 0)
            {
                return Ok(None);
            }
            for ((row, text), logits) in bits.chunks_exact(vocab).zip(texts).zip(&mut logits) {
                if at < text.len() {
                    logits.extend(row.iter().map(|bits| bf16::from_bits(*bits)));
                }
            }
        }
        Ok(Some(logits))
    }
}

/// Computes the logits of all tokens of a text, bf16 bits `[tokens, vocab]`; `None` if a page is lost. Waits.
fn text_logits(
    forward: &mut Forward,
    weights: &Weights,
    stepper: &mut Stepper,
    tokens: &[u32],
    pages: &[u32],
) -> Result<Option<Vec<u16>>, DeviceError> {
    let (mut start, mut all) = (0, Vec::new());
    forward.set_pages(pages, None)?;
    for chunk in tokens.chunks(forward.chunk_rows() as usize) {
        stepper.enqueue_chunk(forward, weights, chunk, start)?;
        let rows = chunk.len() as u32;
        let mut first = 0;
        while first < rows {
            let count = (rows - first).min(forward.logit_rows());
            forward.enqueue_logits(weights, first, count)?;
            all.extend(forward.read_logits(count)?);
            first += count;
        }
        start += rows;
    }
    wait_for_steps(forward, stepper)?;
    Ok((!forward.prompt_is_lost()?).then_some(all))
}
