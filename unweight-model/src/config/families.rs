//! The table of families: what each computes, and the defaults of its configuration.

use super::{Family, NormKind, QkNorm, Scoring};
use crate::rope::RopePairs;

/// What a family computes: a row of [`FAMILIES`].
#[derive(Debug)]
pub(crate) struct Features {
    pub family: Family,
    /// `model_type`.
    pub name: &'static str,
    /// How rows are normed.
    pub norm: NormKind,
    /// The names of the norms.
    pub norms: NormNames,
    /// Whether attention and MLP read the same normed rows, and both are added to the residual stream.
    pub parallel: bool,
    pub qk_norm: QkNorm,
    /// The key that decides if there is this norm, false by default; `None` if there always is.
    pub qk_norm_key: Option<&'static str>,
    pub bias: BiasKeys,
    /// The key that decides if the head has a bias, false by default; `None` if it has none.
    pub head_bias_key: Option<&'static str>,
    pub windows: Windows,
    pub rope: RopeKeys,
    /// Whether one tensor `qkv_proj` replaces three.
    pub merged_qkv: bool,
    /// Whether one tensor `gate_up_proj` replaces two.
    pub merged_gate_up: bool,
    pub factors: FactorKeys,
    pub soft_caps: CapKeys,
    pub experts: Option<ExpertKeys>,
    /// The default of `num_nextn_predict_layers`: layers after the last that are not run; `None` without such a key.
    pub mtp_layers: Option<u32>,
    /// The `model_type` of models whose `text_config` is of this family.
    pub part_of: Option<&'static str>,
    pub defaults: Defaults,
}

/// The names of a layer's norms, without `.weight`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NormNames {
    /// The norm of what attention reads.
    pub attention: Option<&'static str>,
    /// The norm of what attention adds to the residual stream.
    pub after_attention: Option<&'static str>,
    /// The norm of what the MLP reads.
    pub mlp: Option<&'static str>,
    /// The norm of what the MLP adds to the residual stream.
    pub after_mlp: Option<&'static str>,
}

/// The meaning of the keys of biases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BiasKeys {
    /// No keys, and no biases.
    None,
    /// No keys; queries, keys and values have a bias.
    Always,
    /// A key decides if queries, keys and values have a bias; the value is its default.
    Qkv(&'static str, bool),
    /// `attention_bias`, false by default: queries, keys, values and the output projection have a bias.
    WithOutput,
    /// Like `WithOutput`; `mlp_bias`: the MLP has biases, too, which is not supported.
    WithOutputAndMlp,
}

/// Which layers have an attention window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Windows {
    /// None, whatever the configuration contains.
    Never,
    /// None; `use_sliding_window` is rejected.
    Rejected,
    /// All if `sliding_window` is set; the value is the key's default.
    Every(Option<u32>),
    /// If `use_sliding_window` is set: those from `max_window_layers` on (`from_key`), or all.
    Switched { from_key: bool },
    /// If `use_sliding_window` is set: those without rotary embedding.
    WithoutRope,
    /// All but every `every`-th layer; with `from_key`, `sliding_window_pattern` may set another number.
    AllBut { every: u32, from_key: bool },
}

/// The keys and defaults of the rotary embedding.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RopeKeys {
    pub pairs: RopePairs,
    /// The default of `partial_rotary_factor`; `None` if all elements are rotated and the key is rejected.
    pub partial: Option<f64>,
    pub longrope: LongRopeKeys,
    /// Whether `no_rope_layers` may name layers without rotary embedding.
    pub no_rope_layers: bool,
    /// The default base of layers with a window, if these have another rotary embedding.
    pub local: Option<f64>,
}

/// The keys of `longrope`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LongRopeKeys {
    /// Not supported.
    Rejected,
    /// `original_max_position_embeddings` is next to the object; the value is its default.
    Original(u32),
    /// `short_mscale` and `long_mscale` are the factors of cos and sin.
    Mscales,
}

/// The keys of factors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum FactorKeys {
    /// No factors.
    None,
    /// `embedding_multiplier`, `attention_multiplier`, `residual_multiplier`, `logits_scaling`, 1 by default.
    Multipliers,
    /// `logit_scale`; the value is the key's default.
    LogitScale(f64),
    /// Embeddings are multiplied by the root of `hidden_size`, rounded to BF16; scores are divided by the root of
    /// `query_pre_attn_scalar`, whose default is the value.
    Roots(f64),
}

/// The keys of soft caps; a null means no cap.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum CapKeys {
    /// No caps.
    None,
    /// `attn_logit_softcapping` and `final_logit_softcapping`; the values are the keys' defaults.
    Both(f64, f64),
    /// `final_logit_softcapping`, without a cap by default.
    Logits,
}

/// The keys and defaults of experts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExpertKeys {
    /// The keys with the number of experts; the first that is present counts.
    pub count: [&'static str; 2],
    /// The default number of experts.
    pub experts: u32,
    /// The default number of experts per token.
    pub top_k: u32,
    /// The default of `norm_topk_prob`, which decides if the weights of a token add up to 1; `None` if they always do.
    pub normalized_key: Option<bool>,
    pub scoring: Scoring,
    /// Whether weights are rounded to the type of the activations.
    pub rounded: bool,
    /// The key of the experts' width.
    pub intermediate: &'static str,
    /// Which layers have experts.
    pub layers: ExpertLayers,
    /// Whether `routed_scaling_factor` is the factor of weights, 1 by default.
    pub factor_key: bool,
    /// The prefix of the block's names, if each expert has its own tensors.
    pub block: &'static str,
    /// The names of an expert's gate, up and down.
    pub names: [&'static str; 3],
    /// The names of the tensors of all experts: router, gates and ups, downs.
    pub stacked: [&'static str; 3],
    pub shared: SharedKeys,
}

/// The keys of the layers that have experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExpertLayers {
    /// All; `mlp_only_layers` and `decoder_sparse_step` must not name others.
    All,
    /// All but the first `first_k_dense_replace`, whose MLP has the width `intermediate_size`; `moe_layer_freq` is 1.
    AfterDense {
        /// The default of `first_k_dense_replace`.
        first: u32,
        /// The default width of an expert; that of the other MLPs is [`Defaults::intermediate`].
        intermediate: u32,
    },
}

/// The keys and names of a shared expert, which every token has in addition to those of the router.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SharedKeys {
    /// No shared expert.
    None,
    /// `shared_expert_intermediate_size`, whose default is the value; the output has the sigmoid of a gate as a factor.
    Gated(u32),
    /// `shared_intermediate_size`; no shared expert by default. Gate and up are one tensor.
    Merged,
    /// `n_shared_experts`, whose default is the value: the number of experts that it is as wide as.
    Parts(u32),
}

/// The defaults of a family's configuration (transformers 5.17).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Defaults {
    pub vocab: u32,
    pub hidden: u32,
    pub layers: u32,
    pub intermediate: u32,
    pub heads: u32,
    /// `None` for as many as query heads.
    pub kv_heads: Option<u32>,
    /// `None` for `hidden / heads`.
    pub head_dim: Option<u32>,
    pub max_positions: u32,
    /// The key of the number that norms add to the mean square.
    pub eps_key: &'static str,
    pub eps: f64,
    /// The key of the activation function of the MLP's gate.
    pub act_key: &'static str,
    pub act: &'static str,
    pub theta: f64,
    pub tied: bool,
    pub bos: Option<u32>,
    pub eos: &'static [u32],
}

impl Family {
    /// The features of the family.
    pub(crate) fn features(self) -> &'static Features {
        // A test checks that the order is that of the families.
        &FAMILIES[self as usize]
    }
}

const COUNT: [&str; 2] = ["num_local_experts", "num_experts"];
/// As transformers 5 holds experts in memory.
const STACKED: [&str; 3] = ["mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"];
const PRE_NORMS: NormNames = NormNames {
    attention: Some("input_layernorm"),
    after_attention: None,
    mlp: Some("post_attention_layernorm"),
    after_mlp: None,
};
const ALL_NORMS: NormNames = NormNames {
    attention: Some("input_layernorm"),
    after_attention: Some("post_attention_layernorm"),
    mlp: Some("pre_feedforward_layernorm"),
    after_mlp: Some("post_feedforward_layernorm"),
};
const ROPE: RopeKeys = RopeKeys {
    pairs: RopePairs::Halves,
    partial: None,
    longrope: LongRopeKeys::Rejected,
    no_rope_layers: false,
    local: None,
};
const LLAMA: Features = Features {
    family: Family::Llama,
    name: "llama",
    norm: NormKind::Rms,
    norms: PRE_NORMS,
    parallel: false,
    qk_norm: QkNorm::None,
    qk_norm_key: None,
    bias: BiasKeys::WithOutputAndMlp,
    head_bias_key: None,
    windows: Windows::Never,
    rope: ROPE,
    merged_qkv: false,
    merged_gate_up: false,
    factors: FactorKeys::None,
    soft_caps: CapKeys::None,
    experts: None,
    mtp_layers: None,
    part_of: None,
    defaults: Defaults {
        vocab: 32_000,
        hidden: 4096,
        layers: 32,
        intermediate: 11_008,
        heads: 32,
        kv_heads: None,
        head_dim: None,
        max_positions: 2048,
        eps_key: "rms_norm_eps",
        eps: 1e-6,
        act_key: "hidden_act",
        act: "silu",
        theta: 10_000.0,
        tied: false,
        bos: Some(1),
        eos: &[2],
    },
};
const MISTRAL: Features = Features {
    family: Family::Mistral,
    name: "mistral",
    bias: BiasKeys::None,
    windows: Windows::Every(Some(4096)),
    defaults: Defaults { intermediate: 14_336, kv_heads: Some(8), max_positions: 131_072, ..LLAMA.defaults },
    ..LLAMA
};
const QWEN2: Features = Features {
    family: Family::Qwen2,
    name: "qwen2",
    bias: BiasKeys::Always,
    windows: Windows::Switched { from_key: true },
    defaults: Defaults {
        vocab: 151_936,
        intermediate: 22_016,
        kv_heads: Some(32),
        max_positions: 32_768,
        bos: None,
        eos: &[],
        ..LLAMA.defaults
    },
    ..LLAMA
};
const QWEN3: Features = Features {
    family: Family::Qwen3,
    name: "qwen3",
    qk_norm: QkNorm::Head,
    bias: BiasKeys::WithOutput,
    defaults: Defaults { head_dim: Some(128), ..QWEN2.defaults },
    ..QWEN2
};
const QWEN3_EXPERTS: ExpertKeys = ExpertKeys {
    count: COUNT,
    experts: 128,
    top_k: 8,
    normalized_key: Some(false),
    scoring: Scoring::Softmax,
    rounded: true,
    // `intermediate_size` is that of layers without experts, which are rejected.
    intermediate: "moe_intermediate_size",
    layers: ExpertLayers::All,
    factor_key: false,
    block: "mlp.",
    names: ["gate_proj", "up_proj", "down_proj"],
    stacked: STACKED,
    shared: SharedKeys::None,
};
const GRANITE_MOE: Features = Features {
    family: Family::GraniteMoe,
    name: "granitemoe",
    bias: BiasKeys::WithOutput,
    factors: FactorKeys::Multipliers,
    experts: Some(ExpertKeys {
        experts: 8,
        top_k: 2,
        normalized_key: None,
        intermediate: "intermediate_size",
        // Checkpoints hold all experts in one tensor.
        block: "block_sparse_moe.",
        stacked: [
            "block_sparse_moe.router.layer.weight",
            "block_sparse_moe.input_linear.weight",
            "block_sparse_moe.output_linear.weight",
        ],
        ..QWEN3_EXPERTS
    }),
    ..LLAMA
};
const GEMMA2: Features = Features {
    family: Family::Gemma2,
    name: "gemma2",
    norm: NormKind::RmsPlusOne,
    norms: ALL_NORMS,
    bias: BiasKeys::WithOutput,
    windows: Windows::AllBut { every: 2, from_key: false },
    factors: FactorKeys::Roots(256.0),
    soft_caps: CapKeys::Both(50.0, 30.0),
    defaults: Defaults {
        vocab: 256_000,
        hidden: 2304,
        layers: 26,
        intermediate: 9216,
        heads: 8,
        kv_heads: Some(4),
        head_dim: Some(256),
        max_positions: 8192,
        act_key: "hidden_activation",
        act: "gelu_pytorch_tanh",
        tied: true,
        bos: Some(2),
        eos: &[1],
        ..LLAMA.defaults
    },
    ..LLAMA
};

/// All families, in the order of [`Family::ALL`].
pub(crate) const FAMILIES: [Features; 21] = [
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    Features {
        family: Family::Mixtral,
        name: "mixtral",
        windows: Windows::Every(None),
        experts: Some(ExpertKeys {
            experts: 8,
            top_k: 2,
            normalized_key: None,
            rounded: false,
            intermediate: "intermediate_size",
            block: "block_sparse_moe.",
            names: ["w1", "w3", "w2"],
            ..QWEN3_EXPERTS
        }),
        defaults: Defaults { eps: 1e-5, theta: 1e6, ..MISTRAL.defaults },
        ..MISTRAL
    },
    Features {
        family: Family::Qwen3Moe,
        name: "qwen3_moe",
        windows: Windows::Switched { from_key: false },
        experts: Some(QWEN3_EXPERTS),
        defaults: Defaults {
            hidden: 2048,
            layers: 24,
            intermediate: 768,
            kv_heads: Some(4),
            head_dim: None,
            ..QWEN3.defaults
        },
        ..QWEN3
    },
    Features {
        family: Family::Phi3,
        name: "phi3",
        bias: BiasKeys::None,
        windows: Windows::Every(None),
        rope: RopeKeys { partial: Some(1.0), longrope: LongRopeKeys::Original(4096), ..ROPE },
        merged_qkv: true,
        merged_gate_up: true,
        defaults: Defaults {
            vocab: 32_064,
            hidden: 3072,
            intermediate: 8192,
            max_positions: 4096,
            eps: 1e-5,
            eos: &[32_000],
            ..LLAMA.defaults
        },
        ..LLAMA
    },
    Features {
        family: Family::SmolLm3,
        name: "smollm3",
        windows: Windows::WithoutRope,
        rope: RopeKeys { no_rope_layers: true, ..ROPE },
        defaults: Defaults {
            vocab: 128_256,
            hidden: 2048,
            layers: 36,
            heads: 16,
            kv_heads: Some(4),
            max_positions: 32_768,
            theta: 2e6,
            tied: true,
            bos: Some(128_000),
            eos: &[128_001],
            ..LLAMA.defaults
        },
        ..LLAMA
    },
    Features { family: Family::Granite, name: "granite", factors: FactorKeys::Multipliers, ..LLAMA },
    Features {
        family: Family::Olmo2,
        name: "olmo2",
        norm: NormKind::RmsOnce,
        norms: NormNames {
            attention: None,
            after_attention: Some("post_attention_layernorm"),
            mlp: None,
            after_mlp: Some("post_feedforward_layernorm"),
        },
        qk_norm: QkNorm::Whole,
        bias: BiasKeys::WithOutput,
        defaults: Defaults { vocab: 50_304, eps: 1e-5, bos: None, eos: &[50_279], ..LLAMA.defaults },
        ..LLAMA
    },
    Features {
        family: Family::Glm4,
        name: "glm4",
        norms: NormNames {
            attention: Some("input_layernorm"),
            after_attention: Some("post_self_attn_layernorm"),
            mlp: Some("post_attention_layernorm"),
            after_mlp: Some("post_mlp_layernorm"),
        },
        bias: BiasKeys::Qkv("attention_bias", true),
        rope: RopeKeys { pairs: RopePairs::Adjacent, partial: Some(0.5), ..ROPE },
        merged_gate_up: true,
        defaults: Defaults {
            vocab: 151_552,
            layers: 40,
            intermediate: 13_696,
            kv_heads: Some(2),
            head_dim: Some(128),
            max_positions: 131_072,
            eps: 1.5625e-7,
            bos: None,
            eos: &[151_329, 151_336, 151_338],
            ..LLAMA.defaults
        },
        ..LLAMA
    },
    Features {
        family: Family::Cohere,
        name: "cohere",
        norm: NormKind::Layer,
        norms: NormNames { attention: Some("input_layernorm"), after_attention: None, mlp: None, after_mlp: None },
        parallel: true,
        bias: BiasKeys::WithOutput,
        rope: RopeKeys { pairs: RopePairs::Adjacent, ..ROPE },
        factors: FactorKeys::LogitScale(0.0625),
        defaults: Defaults {
            vocab: 256_000,
            hidden: 8192,
            layers: 40,
            intermediate: 22_528,
            heads: 64,
            max_positions: 8192,
            eps_key: "layer_norm_eps",
            eps: 1e-5,
            theta: 500_000.0,
            tied: true,
            bos: Some(5),
            eos: &[255_001],
            ..LLAMA.defaults
        },
        ..LLAMA
    },
    GEMMA2,
    Features {
        family: Family::Gemma3,
        name: "gemma3_text",
        qk_norm: QkNorm::Head,
        windows: Windows::AllBut { every: 6, from_key: true },
        rope: RopeKeys { local: Some(10_000.0), ..ROPE },
        soft_caps: CapKeys::Logits,
        part_of: Some("gemma3"),
        defaults: Defaults { vocab: 262_208, max_positions: 131_072, theta: 1e6, ..GEMMA2.defaults },
        ..GEMMA2
    },
    Features {
        family: Family::Qwen2Moe,
        name: "qwen2_moe",
        bias: BiasKeys::Qkv("qkv_bias", true),
        windows: Windows::Rejected,
        experts: Some(ExpertKeys { experts: 60, top_k: 4, shared: SharedKeys::Gated(5632), ..QWEN3_EXPERTS }),
        defaults: Defaults {
            hidden: 2048,
            layers: 24,
            intermediate: 1408,
            heads: 16,
            kv_heads: Some(16),
            ..QWEN2.defaults
        },
        ..QWEN2
    },
    Features {
        family: Family::Olmoe,
        name: "olmoe",
        qk_norm: QkNorm::Whole,
        bias: BiasKeys::WithOutput,
        experts: Some(ExpertKeys { experts: 64, intermediate: "intermediate_size", ..QWEN3_EXPERTS }),
        defaults: Defaults {
            vocab: 50_304,
            hidden: 2048,
            layers: 16,
            intermediate: 2048,
            heads: 16,
            max_positions: 4096,
            eps: 1e-5,
            bos: None,
            eos: &[50_279],
            ..LLAMA.defaults
        },
        ..LLAMA
    },
    GRANITE_MOE,
    Features {
        family: Family::GraniteMoeShared,
        name: "granitemoeshared",
        experts: match GRANITE_MOE.experts {
            Some(experts) => Some(ExpertKeys { shared: SharedKeys::Merged, ..experts }),
            None => None,
        },
        ..GRANITE_MOE
    },
    // Not in transformers: the keys, defaults and computation are those of the code that its checkpoints contain
    // (deepseek-ai/deepseek-moe-16b-base). It has no defaults for the numbers of experts; those here are that model's.
    Features {
        family: Family::Deepseek,
        name: "deepseek",
        bias: BiasKeys::WithOutput,
        experts: Some(ExpertKeys {
            count: ["n_routed_experts"; 2],
            experts: 64,
            top_k: 6,
            layers: ExpertLayers::AfterDense { first: 0, intermediate: 1407 },
            shared: SharedKeys::Parts(0),
            ..QWEN3_EXPERTS
        }),
        defaults: Defaults { vocab: 102_400, layers: 30, bos: Some(100_000), eos: &[100_001], ..LLAMA.defaults },
        ..LLAMA
    },
    Features {
        family: Family::Glm4Moe,
        name: "glm4_moe",
        qk_norm: QkNorm::Head,
        qk_norm_key: Some("use_qk_norm"),
        bias: BiasKeys::Qkv("attention_bias", false),
        rope: RopeKeys { partial: Some(0.5), ..ROPE },
        experts: Some(ExpertKeys {
            count: ["n_routed_experts", "num_local_experts"],
            normalized_key: Some(true),
            scoring: Scoring::Sigmoid,
            rounded: false,
            layers: ExpertLayers::AfterDense { first: 1, intermediate: 1408 },
            factor_key: true,
            shared: SharedKeys::Parts(1),
            ..QWEN3_EXPERTS
        }),
        mtp_layers: Some(1),
        defaults: Defaults {
            vocab: 151_552,
            layers: 46,
            intermediate: 10_944,
            heads: 96,
            kv_heads: Some(8),
            max_positions: 131_072,
            eps: 1e-5,
            bos: None,
            eos: &[],
            ..LLAMA.defaults
        },
        ..LLAMA
    },
    Features {
        family: Family::Phimoe,
        name: "phimoe",
        norm: NormKind::LayerBias,
        bias: BiasKeys::WithOutput,
        head_bias_key: Some("lm_head_bias"),
        windows: Windows::Every(None),
        rope: RopeKeys { longrope: LongRopeKeys::Mscales, ..ROPE },
        experts: Some(ExpertKeys {
            experts: 16,
            top_k: 2,
            scoring: Scoring::SparseMixer,
            intermediate: "intermediate_size",
            block: "block_sparse_moe.",
            names: ["w1", "w3", "w2"],
            stacked: ["mlp.router.weight", STACKED[1], STACKED[2]],
            ..QWEN3_EXPERTS
        }),
        defaults: Defaults {
            vocab: 32_064,
            intermediate: 6400,
            kv_heads: Some(8),
            max_positions: 131_072,
            eps: 1e-5,
            theta: 1e6,
            ..LLAMA.defaults
        },
        ..LLAMA
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_rows_are_in_the_order_of_families() {
        assert_eq!(FAMILIES.map(|features| features.family).as_slice(), Family::ALL);
        assert!(Family::ALL.iter().all(|family| family.features().family == *family));
    }

    /// The engine relies on this (`forward/mod.rs` of unweight-engine).
    #[test]
    fn features_that_exclude_each_other() {
        for features in &FAMILIES {
            let NormNames { attention, after_attention, mlp, after_mlp } = features.norms;
            let adds_normed = after_attention.is_some() || after_mlp.is_some();
            let adds_scaled = features.factors == FactorKeys::Multipliers;
            assert!(!(adds_normed && adds_scaled), "{}: normed and scaled", features.name);
            let keeps_normed_rows = !adds_normed && !adds_scaled && attention.is_some() && mlp.is_none();
            assert!(!features.parallel || keeps_normed_rows, "{}: the normed rows are overwritten", features.name);
            let caps_scores = matches!(features.soft_caps, CapKeys::Both(..));
            assert!(!caps_scores || features.qk_norm == QkNorm::None, "{}: one argument serves both", features.name);
        }
    }
}
