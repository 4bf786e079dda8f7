//! Checks the sizes of a model, without a device.

use unweight_codegen::{
    family::{norm::COLUMNS_MAX, sample::VOCABULARY_MAX},
    spec::RouteSpec,
};
use unweight_model::{ModelConfig, QkNorm};

use crate::error::UnsupportedSize;

/// The maximum number of query heads per KV head, as in `unweight_rt`, whose constant is in a module with launches.
pub const GROUP_MAX: u32 = 16;

/// Returns the error for heads of a size that no kernel supports.
pub fn unsupported_head_dim(config: &ModelConfig) -> UnsupportedSize {
    UnsupportedSize { key: "head_dim", value: config.head_dim, takes: "multiples of 16 up to 128, and 256" }
}

/// Rejects sizes that no kernel supports.
pub fn check(config: &ModelConfig) -> Result<(), UnsupportedSize> {
    let check = |key, value, ok, takes| if ok { Ok(()) } else { Err(UnsupportedSize { key, value, takes }) };
    let ModelConfig { hidden, intermediate, heads, kv_heads, .. } = *config;
    let whole = hidden.is_multiple_of(8) && hidden <= COLUMNS_MAX;
    check("hidden_size", hidden, whole, "multiples of 8 up to 16384")?;
    check("vocab_size", config.vocab, config.vocab <= VOCABULARY_MAX, "up to 1048576")?;
    let dense = config.dense_intermediate();
    check("intermediate_size", dense, dense.is_multiple_of(8), "multiples of 8")?;
    check("num_attention_heads", heads, heads / kv_heads.max(1) <= GROUP_MAX, "at most 16 heads per KV head")?;
    if config.qk_norm == QkNorm::Whole {
        let width = heads * config.head_dim;
        check("num_attention_heads", heads, width <= COLUMNS_MAX, "at most 16384 elements of all heads")?;
    }
    if let Some(mixture) = config.mixture {
        let (experts, places) = (mixture.all_experts(), mixture.places());
        check(
            "the number of experts",
            experts,
            experts <= RouteSpec::EXPERTS_MAX,
            "up to 512, the shared expert's parts included",
        )?;
        let takes = "up to 32, the shared expert's parts included";
        check("num_experts_per_tok", places, places <= RouteSpec::TOP_K_MAX, takes)?;
        let whole = |size: u32| size.is_multiple_of(64);
        check("hidden_size", hidden, whole(hidden), "multiples of 64 for mixtures of experts")?;
        check("the width of an expert", intermediate, whole(intermediate), "multiples of 64")?;
    }
    let has_rope_kernel = config.rope.dim.is_multiple_of(4) && config.rope.dim <= config.head_dim;
    if has_rope_kernel && config.head_dim.is_multiple_of(16) { Ok(()) } else { Err(unsupported_head_dim(config)) }
}
