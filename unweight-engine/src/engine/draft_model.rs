//! A second, smaller model that drafts tokens. It follows the sequences of its target with a KV cache and graphs of its
//! own, on the target's stream.

use unweight_model::{ModelConfig, ModelWeights};
use unweight_rt::{DeviceError, LaunchError, raw::choose::policy::PackedChooser};

use super::{Engine, Sampled, wait_for_steps};
use crate::{
    draft::{DraftCache, DraftRequest, Proposal, Round},
    error::EngineError,
    forward::RowState,
    memory::{self, Memory, Shared},
    options::{DRAFTING_MAX, EngineOptions, KvCache, OptionError, Placement, bucket},
    request::SeqId,
    sampling::RowSampling,
    schedule::{Speculation, draft_step_time},
};

/// Checks that a model can draft for a target with these options.
///
/// # Errors
/// [`EngineError::Option`], [`EngineError::DraftVocabulary`] and [`EngineError::DraftMixture`] if it cannot.
pub fn check(target: &ModelConfig, draft: &ModelConfig, options: &EngineOptions) -> Result<(), EngineError> {
    if options.speculate == 0 {
        let range = "1 to 15, which a draft model requires";
        return Err(OptionError { name: "speculate", value: 0, range }.into());
    }
    if draft.vocab != target.vocab {
        return Err(EngineError::DraftVocabulary { draft: draft.vocab, target: target.vocab });
    }
    match draft.mixture {
        Some(mixture) => Err(EngineError::DraftMixture { experts: mixture.experts }),
        None => Ok(()),
    }
}

/// A draft model that is not loaded yet.
pub struct DraftPlan {
    pub config: ModelConfig,
    pub names: ModelWeights,
    pub options: EngineOptions,
}

impl DraftPlan {
    /// Plans a draft model for a target with these options.
    ///
    /// # Errors
    /// As for [`check`].
    pub fn new(
        (mut config, names): (ModelConfig, ModelWeights),
        target: &ModelConfig,
        options: &EngineOptions,
    ) -> Result<Self, EngineError> {
        check(target, &config, options)?;
        // Positions that the target does not have need no memory.
        let context = options.context.unwrap_or(target.max_positions).max(1);
        config.max_positions = config.max_positions.min(context);
        let options = EngineOptions::default()
            .max_batch(options.max_batch.min(DRAFTING_MAX))
            .chunk(options.chunk)
            .mixed_passes(false)
            .graphs(options.graphs)
            .placement(Placement::Packed)
            .kv_cache(KvCache::Bf16)
            .prefix_cache(false)
            // The first step takes two tokens of a sequence whose last draft was right throughout.
            .speculate(1);
        Ok(Self { config, names, options })
    }

    /// Bytes of the model without its KV cache: as many as it will need, or more.
    pub fn fixed_bytes(&self, chooser: &PackedChooser) -> u64 {
        let Self { config, options, .. } = self;
        let ctx = memory::context_size(config, options, chooser, |_| false);
        // Some weights may not be packable.
        let shared = Shared::planned(config, options, ctx.with_cublas());
        memory::fixed_bytes(config, options, (config.weight_bytes(Placement::Packed), shared))
    }

    /// Bytes of the model's KV cache, if both models' caches share what is left of `have` bytes. `target` is the memory
    /// of the target alone; a sequence of `context` tokens must fit in its cache.
    pub fn cache_bytes(&self, target: &Memory, context: Option<u32>, have: u64) -> u64 {
        let left = have.saturating_sub(target.weights).saturating_sub(target.working);
        memory::draft_cache_bytes(&self.config, &self.options, (target.token, context.unwrap_or(0)), left)
    }
}

/// A draft model on a device. The schedule of its engine is not used.
pub struct DraftModel {
    engine: Box<Engine>,
    cache: DraftCache,
}

impl DraftModel {
    /// Drafts with this engine, which runs nothing else.
    pub fn new(engine: Engine) -> Self {
        let memory = engine.memory();
        let cache = DraftCache::new(memory.pages, memory.context, engine.forward.chunk_rows());
        Self { engine: engine.into(), cache }
    }

    /// Bytes of the model and its KV cache on the device.
    pub fn bytes(&self) -> u64 {
        self.engine.memory().total()
    }

    /// The speculation with this model for a target whose steps read `read_bytes` bytes of weights in `layers` layers.
    pub fn speculate(&self, speculation: Speculation, read_bytes: u64, layers: u32) -> Speculation {
        let (memory, draft_layers) = (self.engine.memory(), self.engine.config().layers);
        let step_time = draft_step_time((memory.weights, draft_layers), (read_bytes, layers));
        speculation.with_model(memory.context, step_time)
    }

    /// Answers requests. The sequences of `running` may have requests later; others are forgotten. Waits.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails.
    pub fn draft(
        &mut self,
        running: impl Iterator<Item = SeqId>,
        requests: &[DraftRequest<'_>],
    ) -> Result<Vec<Proposal>, DeviceError> {
        self.cache.keep(running);
        let (round, answers) = self.cache.begin(requests);
        for &(request, start, end) in &round.chunks {
            let Some(DraftRequest { id, tokens, .. }) = requests.get(request) else { continue };
            let Engine { forward, stepper, weights, .. } = &mut *self.engine;
            forward.set_pages(self.cache.pages(*id), None)?;
            stepper.enqueue_chunk(forward, weights, &tokens[start as usize..end as usize], start)?;
        }
        let sampled = self.sample(requests, &round)?;
        wait_for_steps(&mut self.engine.forward, &mut self.engine.stepper)?;
        let vocab = self.engine.config.vocab;
        Ok(self.cache.end(requests, (&round, answers), sampled, vocab))
    }

    /// Runs the steps of a round. Returns the tokens of each of its rows.
    fn sample(&mut self, requests: &[DraftRequest<'_>], round: &Round) -> Result<Vec<Vec<u32>>, DeviceError> {
        let mut sampled = vec![Vec::new(); round.rows.len()];
        let mut steps_left = round.steps;
        if sampled.is_empty() || steps_left == 0 {
            return Ok(sampled);
        }
        // The tokens that the first step takes, with the index of their row.
        let inputs = round.rows.iter().zip(0..).flat_map(|(row, index)| {
            let request = &requests[row.request];
            let new = request.tokens.get(row.first as usize..).unwrap_or_default();
            new.iter().zip(row.first..).map(move |(id, position)| (index, request, *id, position))
        });
        let inputs: Vec<(usize, &DraftRequest<'_>, u32, u32)> = inputs.collect();
        let mut rows = self.set_rows(&inputs)?;
        let mut in_flight = Vec::new();
        if inputs.len() > sampled.len() {
            // Rows are then consecutive tokens of a sequence, and the next step takes the last of each.
            self.engine.launch(rows, true)?;
            let Sampled { ids, .. } = self.engine.read_later()?;
            let ids = ids.wait()?;
            let mut next = Vec::with_capacity(sampled.len());
            for (&(index, request, _, position), id) in inputs.iter().zip(ids.iter()) {
                if position as usize + 1 == request.tokens.len() {
                    sampled[index].push(*id);
                    next.push((index, request, *id, position + 1));
                }
            }
            self.engine.spare.push(ids);
            steps_left -= 1;
            rows = if steps_left > 0 { self.set_rows(&next)? } else { rows };
        }
        for _ in 0..steps_left {
            self.engine.launch(rows, false)?;
            in_flight.push(self.engine.read_later()?);
        }
        for Sampled { ids, .. } in in_flight {
            let ids = ids.wait()?;
            sampled.iter_mut().zip(ids.iter()).for_each(|(tokens, id)| tokens.push(*id));
            self.engine.spare.push(ids);
        }
        Ok(sampled)
    }

    /// Sets the rows of the next steps, and returns their number.
    fn set_rows(&mut self, inputs: &[(usize, &DraftRequest<'_>, u32, u32)]) -> Result<u32, DeviceError> {
        let Self { engine, cache } = self;
        let rows = inputs.len() as u32;
        let max_batch = engine.options.step_rows();
        if rows > max_batch {
            return Err(LaunchError::Batch { m: rows, max_batch }.into());
        }
        let states = inputs.iter().map(|&(_, request, id, position)| RowState {
            id,
            position,
            pages: cache.pages(request.id),
            hot: 0,
            sampling: RowSampling::new(&request.params),
        });
        engine.forward.set_rows(&states.collect::<Vec<_>>(), bucket(rows))?;
        Ok(rows)
    }
}
