//! Options of an engine, and the batches that steps are recorded for.

mod pipeline;

pub use unweight_codegen::spec::KvCache;
pub use unweight_rt::Placement;

pub(crate) use self::pipeline::runs_pipelines;
pub use self::pipeline::{Measured, Pipeline, PipelineVariant, Plan, Projection, Ring, Setting, UnknownVariant};

/// How pipelines hold a projection of an MLP on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LoadedAs {
    /// BF16 weights.
    Bf16,
    /// Palette indices.
    Palette,
    /// Huffman-coded weights.
    Huffman,
    /// A linear layer of the loader: packed, or BF16 if it cannot be packed.
    Linear,
}

/// The options of an [`Engine`](crate::Engine): limits, memory and placement of weights.
///
/// ```
/// # use unweight_engine::{EngineOptions, Placement};
/// let options = EngineOptions::default().max_batch(64).context(8192).placement(Placement::Packed);
/// assert_eq!((options.max_batch, options.context), (64, Some(8192)));
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct EngineOptions {
    /// The maximum number of sequences in a step, 1 to 1024; 16 by default.
    pub max_batch: u32,
    /// The maximum number of tokens of a sequence, the prompt included; `None` for the model's limit, or less if the KV
    /// cache is too small.
    pub context: Option<u32>,
    /// Bytes of device memory for weights, KV cache and working memory together; `None` for nine tenths of the free
    /// memory.
    pub memory: Option<u64>,
    /// How weights are held in device memory; `None` chooses [`Placement::Packed`] where that leaves enough memory,
    /// else [`Placement::Compact`] ([`memory::placement`](crate::raw::memory::placement)).
    pub placement: Option<Placement>,
    /// How keys and values of earlier tokens are held in device memory: in BF16, or losslessly at 12 bits per element.
    /// The results are equal bit for bit. `None` is BF16.
    pub kv_cache: Option<KvCache>,
    /// The maximum number of prompt tokens per prefill pass and between two steps, a multiple of 64 from 64 to 8192;
    /// 2048 by default.
    pub chunk: u32,
    /// Whether a prompt chunk may run in one pass with a step of the running sequences; true by default. Otherwise they
    /// run one after the other, as they always do with weights in stored encodings.
    #[doc(hidden)]
    pub mixed_passes: bool,
    /// The maximum number of waiting sequences; 1024 by default.
    pub waiting: usize,
    /// Whether sequences share the pages of equal prompt prefixes, in chunks and halves of chunks; true by default. The
    /// results are equal bit for bit if all of these prompts run alone.
    pub prefix_cache: bool,
    /// Measured settings of pipelines; batches without one use estimated settings.
    pub plan: Plan,
    /// Whether steps are recorded as CUDA graphs; true by default. False is slower and shows each kernel to a profiler
    /// by itself.
    pub graphs: bool,
    /// The number of experts per layer that the device holds, for mixture-of-experts models; `None` for all. The others
    /// stay in host memory, compact if they can be, and are copied when a token chooses them. Steps are then not
    /// recorded as graphs.
    pub resident_experts: Option<u32>,
    /// Whether packed experts are compact in host memory; true by default. For measurements of packed ones.
    #[doc(hidden)]
    pub compact_experts: bool,
    /// The maximum number of tokens per sequence and step that are drafted and verified, 0 to 15; 0, the default,
    /// disables drafts. They are drafted by n-gram lookup, or by the draft model of
    /// [`Engine::load_with_draft`](crate::Engine::load_with_draft). Sequences with adjusted logits have no drafts. The
    /// tokens are those that steps of more rows sample without drafts.
    pub speculate: u32,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            max_batch: 16,
            context: None,
            memory: None,
            placement: None,
            kv_cache: None,
            chunk: 2048,
            mixed_passes: true,
            waiting: 1024,
            prefix_cache: true,
            plan: Plan::default(),
            graphs: true,
            resident_experts: None,
            compact_experts: true,
            speculate: 0,
        }
    }
}

impl EngineOptions {
    /// Sets [`Self::max_batch`].
    #[must_use]
    pub fn max_batch(self, max_batch: u32) -> Self {
        Self { max_batch, ..self }
    }

    /// Sets [`Self::context`].
    #[must_use]
    pub fn context(self, context: u32) -> Self {
        Self { context: Some(context), ..self }
    }

    /// Sets [`Self::memory`].
    #[must_use]
    pub fn memory(self, memory: u64) -> Self {
        Self { memory: Some(memory), ..self }
    }

    /// Sets how weights are held in device memory.
    #[must_use]
    pub fn placement(self, placement: Placement) -> Self {
        Self { placement: Some(placement), ..self }
    }

    /// Sets [`Self::kv_cache`].
    #[must_use]
    pub fn kv_cache(self, kv_cache: KvCache) -> Self {
        Self { kv_cache: Some(kv_cache), ..self }
    }

    /// The KV cache of an engine with these options.
    pub(crate) fn chosen_kv_cache(&self) -> KvCache {
        self.kv_cache.unwrap_or(KvCache::Bf16)
    }

    /// Sets [`Self::chunk`].
    #[must_use]
    pub fn chunk(self, chunk: u32) -> Self {
        Self { chunk, ..self }
    }

    /// Sets [`Self::mixed_passes`].
    #[doc(hidden)]
    #[must_use]
    pub fn mixed_passes(self, mixed_passes: bool) -> Self {
        Self { mixed_passes, ..self }
    }

    /// Whether chunks run in one pass with steps.
    pub(crate) fn mixes(&self) -> bool {
        self.mixed_passes && !self.placement.unwrap_or_default().has_pipelines()
    }

    /// Sets [`Self::waiting`].
    #[must_use]
    pub fn waiting(self, waiting: usize) -> Self {
        Self { waiting, ..self }
    }

    /// Sets [`Self::prefix_cache`].
    #[must_use]
    pub fn prefix_cache(self, prefix_cache: bool) -> Self {
        Self { prefix_cache, ..self }
    }

    /// Sets [`Self::plan`].
    #[must_use]
    pub fn plan(self, plan: Plan) -> Self {
        Self { plan, ..self }
    }

    /// Sets [`Self::graphs`].
    #[must_use]
    pub fn graphs(self, graphs: bool) -> Self {
        Self { graphs, ..self }
    }

    /// Sets [`Self::resident_experts`].
    #[must_use]
    pub fn resident_experts(self, resident_experts: u32) -> Self {
        Self { resident_experts: Some(resident_experts), ..self }
    }

    /// Sets [`Self::speculate`].
    #[must_use]
    pub fn speculate(self, speculate: u32) -> Self {
        Self { speculate, ..self }
    }

    /// The maximum number of rows of a step that verifies drafts; 0 without drafts.
    pub(crate) fn verified_rows(&self) -> u32 {
        if self.speculate == 0 { 0 } else { self.max_batch.saturating_mul(1 + self.speculate).min(VERIFIED_ROWS_MAX) }
    }

    /// The number of rows of the largest step: one of [`BUCKETS`].
    pub(crate) fn step_rows(&self) -> u32 {
        bucket(self.max_batch.max(self.verified_rows()))
    }

    /// Checks that every option is in its range.
    ///
    /// # Errors
    /// [`OptionError`] for the first option that is not.
    pub fn check(&self) -> Result<(), OptionError> {
        let check = |name, value: u64, ok, range| if ok { Ok(()) } else { Err(OptionError { name, value, range }) };
        let (max_batch, chunk) = (self.max_batch, self.chunk);
        check("max_batch", max_batch.into(), (1..=MAX_BATCH).contains(&max_batch), "1 to 1024")?;
        let whole = chunk.is_multiple_of(64) && (64..=8192).contains(&chunk);
        check("chunk", chunk.into(), whole, "a multiple of 64 from 64 to 8192")?;
        check("context", self.context.unwrap_or(1).into(), self.context != Some(0), "at least 1")?;
        let experts = self.resident_experts.unwrap_or(1);
        check("resident_experts", experts.into(), experts > 0, "at least 1")?;
        let speculate = u64::from(self.speculate);
        check("speculate", speculate, speculate <= DRAFTED_MAX.into(), "0 to 15")?;
        // Verification would have to fetch the experts of more rows.
        let offloads = self.resident_experts.is_some();
        check(
            "speculate",
            speculate,
            speculate == 0 || !offloads,
            "0, although resident_experts is set; leave out one of the two",
        )
    }
}

/// An option is out of range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name} = {value} is not {range}")]
#[non_exhaustive]
pub struct OptionError {
    /// The name of the option.
    pub name: &'static str,
    /// The value of the option.
    pub value: u64,
    /// The allowed values, as text.
    pub range: &'static str,
}

impl OptionError {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        "option-out-of-range"
    }
}

/// The largest number of drafted tokens per sequence and step.
const DRAFTED_MAX: u32 = 15;

/// The largest number of rows of a step that verifies drafts: with more, a step takes longer than drafts save.
const VERIFIED_ROWS_MAX: u32 = 64;

/// The largest number of sequences that a step verifies drafts of: each has two rows or more.
pub(crate) const DRAFTING_MAX: u32 = VERIFIED_ROWS_MAX / 2;

/// The largest number of rows of a step.
pub const MAX_BATCH: u32 = 1024;

/// The numbers of rows that steps are recorded for, ascending. There is none between 1 and 8, because packed products
/// take the same time for all numbers of rows in between.
pub const BUCKETS: [u32; 10] = [1, 8, 16, 32, 64, 128, 192, 256, 512, 1024];

/// The smallest of [`BUCKETS`] that is at least `rows`; `rows` is at most [`MAX_BATCH`].
pub fn bucket(rows: u32) -> u32 {
    BUCKETS.into_iter().find(|bucket| *bucket >= rows).unwrap_or(MAX_BATCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_out_of_range_are_named() {
        let named = |options: EngineOptions| options.check().map_err(|error| error.name);
        assert_eq!(named(EngineOptions::default()), Ok(()));
        assert_eq!(named(EngineOptions::default().max_batch(0)), Err("max_batch"));
        assert_eq!(named(EngineOptions::default().max_batch(1025)), Err("max_batch"));
        assert_eq!(named(EngineOptions::default().chunk(100)), Err("chunk"));
        assert_eq!(named(EngineOptions::default().chunk(0)), Err("chunk"));
        assert_eq!(named(EngineOptions::default().context(0)), Err("context"));
        assert_eq!(named(EngineOptions::default().speculate(16)), Err("speculate"));
        assert_eq!(named(EngineOptions::default().speculate(1).resident_experts(2)), Err("speculate"));
        assert_eq!(named(EngineOptions::default().resident_experts(0)), Err("resident_experts"));
        let rows = |max_batch: u32, speculate: u32| {
            let options = EngineOptions::default().max_batch(max_batch).speculate(speculate);
            (options.verified_rows(), options.step_rows())
        };
        assert_eq!([rows(1, 0), rows(1, 7), rows(3, 7), rows(100, 15)], [(0, 1), (8, 8), (24, 32), (64, 128)]);
        assert_eq!([1, 2, 8, 9, 129, 256, 257, 1024].map(bucket), [1, 8, 8, 16, 192, 256, 512, 1024]);
    }
}
