//! What lies on the device, to the byte before anything is allocated: an engine never allocates after it is loaded.

use std::fmt;

use unweight_model::ModelConfig;

use crate::{
    options::{EngineOptions, bucket},
    pages::{PAGE_TOKENS, pages_for},
};

/// Bytes of a bf16, and of an id.
const BF16: u64 = 2;
const ID: u64 = 4;

/// Bytes on the device, by what they are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Memory {
    /// Weights, in the form that they are run from.
    pub weights: u64,
    /// The KV cache.
    pub cache: u64,
    /// Activations, cos and sin, and what the kernels share.
    pub working: u64,
    /// Pages of the cache, 64 tokens each.
    pub pages: u32,
    /// Bytes of the cache for one token.
    pub token: u64,
    /// Tokens of one sequence.
    pub context: u32,
}

impl Memory {
    /// Everything together.
    pub fn total(&self) -> u64 {
        self.weights.saturating_add(self.cache).saturating_add(self.working)
    }

    /// Tokens that the cache holds.
    pub fn tokens(&self) -> u64 {
        u64::from(self.pages) * u64::from(PAGE_TOKENS)
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gb = |bytes: u64| bytes as f64 / 1e9;
        let (weights, cache, working) = (gb(self.weights), gb(self.cache), gb(self.working));
        write!(
            f,
            "weights {weights:.2} GB, KV cache {cache:.2} GB ({} tokens of {} B), working memory {working:.2} GB",
            self.tokens(),
            self.token
        )
    }
}

/// The weights leave no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{need} bytes are needed (weights {weights}, working memory {working}, and a KV cache of {cache} for {context} tokens) and {have} \
     may be used; shorten the context, or free memory of the device"
)]
pub struct NoMemory {
    /// Bytes of the least that runs.
    pub need: u64,
    /// Bytes that may be used.
    pub have: u64,
    /// Bytes of the weights.
    pub weights: u64,
    /// Bytes of the working memory.
    pub working: u64,
    /// Bytes of the cache of one sequence.
    pub cache: u64,
    /// Tokens of that sequence.
    pub context: u32,
}

/// Rows of the activations: of a chunk of a prompt, or of a step.
pub fn rows(options: &EngineOptions) -> u32 {
    options.chunk.max(bucket(options.max_batch))
}

/// Rows of logits: of a step, or of a part of a prompt whose logits are asked for.
pub fn logit_rows(options: &EngineOptions) -> u32 {
    bucket(options.max_batch).max(64)
}

/// What an engine will have, given the bytes of its weights and of what its kernels share, and what it may use in all.
///
/// # Errors
/// [`NoMemory`]: not even one sequence of the context fits; of a context that was not asked for, not one page.
pub fn plan(
    config: &ModelConfig,
    options: &EngineOptions,
    (weights, shared): (u64, u64),
    have: u64,
) -> Result<Memory, NoMemory> {
    let asked = options.context.unwrap_or(config.max_positions).min(config.max_positions).max(1);
    let page = config.kv_bytes_per_token() * u64::from(PAGE_TOKENS);
    let of = |context: u32| {
        let working = working(config, options, context).saturating_add(shared);
        (working, have.saturating_sub(weights).saturating_sub(working) / page.max(1))
    };
    let least = if options.context.is_some() { asked } else { PAGE_TOKENS.min(asked) };
    let (working_least, fit) = of(least);
    if fit < u64::from(pages_for(least)) {
        let cache = page * u64::from(pages_for(least));
        let need = weights.saturating_add(working_least).saturating_add(cache);
        return Err(NoMemory { need, have, weights, working: working_least, cache, context: least });
    }
    // A shorter context needs a smaller table of angles, so what fits the longer one fits it, too.
    let (working_asked, fit) = of(asked);
    let fit = u32::try_from(fit).unwrap_or(u32::MAX);
    let (context, working, pages) = if fit >= pages_for(asked) {
        (asked, working_asked, fit)
    } else {
        let (_, fit) = of(least);
        let context = u32::try_from(fit).unwrap_or(u32::MAX).saturating_mul(PAGE_TOKENS).min(asked);
        let (working, fit) = of(context);
        // With the table of this context a few pages less may fit.
        let pages = u32::try_from(fit).unwrap_or(u32::MAX).max(pages_for(least));
        (context.min(pages.saturating_mul(PAGE_TOKENS)), working, pages)
    };
    // More than all rows can have is of no use.
    let pages = u64::from(pages).min(u64::from(pages_for(context)) * u64::from(options.max_batch)) as u32;
    Ok(Memory { weights, cache: page * u64::from(pages), working, pages, token: config.kv_bytes_per_token(), context })
}

/// Bytes of activations, tables and state.
fn working(config: &ModelConfig, options: &EngineOptions, context: u32) -> u64 {
    let (rows, batch) = (u64::from(rows(options)), u64::from(bucket(options.max_batch)));
    let attention = u64::from(config.heads) * u64::from(config.head_dim);
    // Gate and up side by side, where no linear multiplies them, and what becomes of them.
    let mlp = 3 * u64::from(config.intermediate);
    let row = 2 * u64::from(config.hidden) + u64::from(config.qkv_rows()) + attention + mlp;
    let logits = u64::from(logit_rows(options)) * u64::from(config.vocab);
    let angles = u64::from(context) * u64::from(config.rope.dim);
    let state = (rows + batch * (16 + u64::from(pages_for(context)))) * ID;
    (rows * row + logits + angles) * BF16 + state
}

#[cfg(test)]
mod tests {
    use super::*;
    use unweight_model::Geometry;

    fn llama_8b() -> ModelConfig {
        Geometry::named("llama-3.1-8b").unwrap().config()
    }

    #[test]
    fn a_cache_takes_what_is_left_and_no_more_than_is_of_use() {
        let (config, weights, gb) = (llama_8b(), (12_000_000_000, 0), 1_000_000_000);
        assert_eq!(config.kv_bytes_per_token(), 131_072);
        let options = EngineOptions::default().max_batch(16).context(4096);
        let plenty = plan(&config, &options, weights, 140 * gb).unwrap();
        assert_eq!((plenty.pages, plenty.context), (16 * 64, 4096));
        assert_eq!(plenty.cache, 16 * 4096 * 131_072);
        let tight = plan(&config, &options, weights, 16 * gb).unwrap();
        assert!(tight.pages < 1024 && tight.pages >= 64 && tight.total() <= 16 * gb, "{tight}");
        let none = plan(&config, &options, weights, 12 * gb).unwrap_err();
        assert!(none.need > none.have && none.context == 4096, "{none}");
        assert!(none.to_string().contains("shorten the context"));
    }

    #[test]
    fn a_context_that_nobody_asked_for_shrinks_to_what_fits() {
        let (config, gb) = (llama_8b(), 1_000_000_000);
        for have in [13, 14, 16, 20, 24, 40, 80, 140] {
            let memory = plan(&config, &EngineOptions::default(), (12 * gb, 0), have * gb).unwrap();
            assert!(memory.total() <= have * gb, "{have}: {memory}");
            assert!(memory.context <= config.max_positions && memory.context > 0);
            assert!(
                u64::from(memory.context) <= memory.tokens(),
                "{have}: one sequence of the context fits: {memory:?}"
            );
        }
        assert!(plan(&config, &EngineOptions::default(), (12 * gb, 0), 12 * gb).is_err());
        assert!(plan(&config, &EngineOptions::default(), (u64::MAX, 0), 12 * gb).is_err());
    }
}
