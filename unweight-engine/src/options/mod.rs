//! The options of an engine.

mod pipeline;

pub use unweight_rt::Placement;

pub use self::pipeline::{Measured, Pipeline, PipelineVariant, Plan, Projection, Ring, Setting, UnknownVariant};

/// How a projection of an MLP is held on the device, where pipelines multiply by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LoadedAs {
    /// BF16.
    Bf16,
    /// Palette indices.
    Palette,
    /// Huffman-coded.
    Huffman,
    /// A linear layer of the loader: packed, or BF16 where it cannot be packed.
    Linear,
}

/// The options of an engine.
///
/// ```
/// # use unweight_engine::{EngineOptions, Placement};
/// let options = EngineOptions::default().max_batch(64).context(8192).placement(Placement::Packed);
/// assert_eq!((options.max_batch, options.context), (64, Some(8192)));
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct EngineOptions {
    /// The most sequences of a step, 1 to 1024; 16 by default.
    pub max_batch: u32,
    /// The most tokens of a sequence, the prompt included; `None` for the model's limit, or fewer if the KV cache holds
    /// fewer.
    pub context: Option<u32>,
    /// Device memory for weights, KV cache and activations together, bytes; `None` for nine tenths of what is free.
    pub memory: Option<u64>,
    /// How weights are held in device memory; `None` chooses [`Placement::Packed`] where that leaves enough memory,
    /// else [`Placement::Compact`] ([`memory::placement`](crate::memory::placement)).
    pub placement: Option<Placement>,
    /// Tokens of a prompt that go through the model at once, a multiple of 64; 2048 by default.
    pub chunk: u32,
    /// The most sequences that wait until a step has a row for them; 1024 by default.
    pub waiting: usize,
    /// Measured settings of pipelines; a batch without one runs by the best guess.
    pub plan: Plan,
    /// Whether each step is recorded as a CUDA graph. On by default; without, steps are slower and a profiler shows
    /// each kernel.
    pub graphs: bool,
    /// Experts per layer of a mixture that device memory holds; `None` for all. The others stay packed in host memory
    /// and are fetched when the router chooses them; then steps are not recorded.
    pub resident_experts: Option<u32>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            max_batch: 16,
            context: None,
            memory: None,
            placement: None,
            chunk: 2048,
            waiting: 1024,
            plan: Plan::default(),
            graphs: true,
            resident_experts: None,
        }
    }
}

impl EngineOptions {
    /// Sets the most sequences of a step.
    #[must_use]
    pub fn max_batch(self, max_batch: u32) -> Self {
        Self { max_batch, ..self }
    }

    /// Sets the most tokens of a sequence, the prompt included.
    #[must_use]
    pub fn context(self, context: u32) -> Self {
        Self { context: Some(context), ..self }
    }

    /// Sets the device memory for weights, KV cache and activations together, bytes.
    #[must_use]
    pub fn memory(self, memory: u64) -> Self {
        Self { memory: Some(memory), ..self }
    }

    /// Sets how weights are held in device memory.
    #[must_use]
    pub fn placement(self, placement: Placement) -> Self {
        Self { placement: Some(placement), ..self }
    }

    /// Sets how many tokens of a prompt go through the model at once.
    #[must_use]
    pub fn chunk(self, chunk: u32) -> Self {
        Self { chunk, ..self }
    }

    /// Sets the most sequences that wait.
    #[must_use]
    pub fn waiting(self, waiting: usize) -> Self {
        Self { waiting, ..self }
    }

    /// Sets the measured settings of pipelines.
    #[must_use]
    pub fn plan(self, plan: Plan) -> Self {
        Self { plan, ..self }
    }

    /// Sets whether each step is recorded as a CUDA graph.
    #[must_use]
    pub fn graphs(self, graphs: bool) -> Self {
        Self { graphs, ..self }
    }

    /// Sets how many experts per layer device memory holds.
    #[must_use]
    pub fn resident_experts(self, resident_experts: u32) -> Self {
        Self { resident_experts: Some(resident_experts), ..self }
    }

    /// Whether every option is in its range.
    ///
    /// # Errors
    /// [`OptionError`], of the first that is not.
    pub fn check(&self) -> Result<(), OptionError> {
        let check = |name, value: u64, ok, range| if ok { Ok(()) } else { Err(OptionError { name, value, range }) };
        let (max_batch, chunk) = (self.max_batch, self.chunk);
        check("max_batch", max_batch.into(), (1..=MAX_BATCH).contains(&max_batch), "1 to 1024")?;
        let whole = chunk.is_multiple_of(64) && (64..=8192).contains(&chunk);
        check("chunk", chunk.into(), whole, "a multiple of 64 from 64 to 8192")?;
        check("context", self.context.unwrap_or(1).into(), self.context != Some(0), "1 at least")?;
        let experts = self.resident_experts.unwrap_or(1);
        check("resident_experts", experts.into(), experts > 0, "1 at least")
    }
}

/// An option out of range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name} = {value} is not {range}")]
pub struct OptionError {
    /// The option.
    pub name: &'static str,
    /// Its value.
    pub value: u64,
    /// What it may be.
    pub range: &'static str,
}

impl OptionError {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        "option-out-of-range"
    }
}

/// The largest batch of a step.
pub const MAX_BATCH: u32 = 1024;

/// Batches that steps are recorded for. A batch of 1 to 8 costs the packed linears the same, so there is nothing
/// between.
pub const BUCKETS: [u32; 10] = [1, 8, 16, 32, 64, 128, 192, 256, 512, 1024];

/// The smallest bucket that holds `rows`, which are at most [`MAX_BATCH`].
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
        assert_eq!(named(EngineOptions::default().resident_experts(0)), Err("resident_experts"));
        assert_eq!([1, 2, 8, 9, 129, 256, 257, 1024].map(bucket), [1, 8, 8, 16, 192, 256, 512, 1024]);
    }
}
