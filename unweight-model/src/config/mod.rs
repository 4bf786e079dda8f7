//! Parses `config.json` and `generation_config.json` to a [`ModelConfig`].
//!
//! Keys, spellings and defaults are those of transformers 5.17, and of 4 where it spelled them differently
//! (`rope_theta` and `rope_scaling` for `rope_parameters`, `type` for `rope_type`).

mod error;
pub(crate) mod families;
mod fields;
mod parse;

use std::fmt;

use unweight_format::bundle::Bundle;

pub use error::ConfigError;

use crate::rope::Rope;

/// The file with a model's configuration.
pub const CONFIG_FILE: &str = "config.json";
/// The file with the sampling defaults of a model's publisher.
pub const GENERATION_FILE: &str = "generation_config.json";
/// The maximum size of either file in a bundle, in bytes.
pub const CONFIG_BYTES_MAX: u64 = 16 << 20;

/// A family of models, which `model_type` in the configuration names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Family {
    /// Llama 2, 3, 3.1 and later dense ones, and models that use its architecture.
    Llama,
    /// Mistral (`mistral`).
    Mistral,
    /// Qwen2 and Qwen2.5.
    Qwen2,
    /// Qwen3 (`qwen3`).
    Qwen3,
    /// Mixtral: a mixture of experts.
    Mixtral,
    /// Qwen3-MoE: a mixture of experts.
    Qwen3Moe,
    /// Phi-3 and Phi-4.
    Phi3,
    /// SmolLM3 (`smollm3`).
    SmolLm3,
    /// Granite 3 and later dense ones.
    Granite,
    /// OLMo 2.
    Olmo2,
    /// GLM-4-0414 (`glm4`).
    Glm4,
    /// Cohere Command R.
    Cohere,
    /// Gemma 2.
    Gemma2,
    /// Gemma 3, the text model.
    Gemma3,
    /// Qwen1.5-MoE and Qwen2-MoE: a mixture of experts with a shared expert.
    Qwen2Moe,
    /// OLMoE: a mixture of experts.
    Olmoe,
    /// Granite 3 mixtures of experts.
    GraniteMoe,
    /// Granite mixtures with a shared expert.
    GraniteMoeShared,
    /// DeepSeek-MoE (`deepseek`): a mixture of experts with shared experts; the first layers have none.
    Deepseek,
    /// GLM-4.5 and GLM-4.6 (`glm4_moe`): mixtures whose routers score by sigmoids; the first layers have no experts.
    Glm4Moe,
    /// Phi-3.5-MoE (`phimoe`): a mixture with a SparseMixer as router, and biases of norms, attention and head.
    Phimoe,
}

impl Family {
    /// Every family.
    pub const ALL: &[Self] = &[
        Self::Llama,
        Self::Mistral,
        Self::Qwen2,
        Self::Qwen3,
        Self::Mixtral,
        Self::Qwen3Moe,
        Self::Phi3,
        Self::SmolLm3,
        Self::Granite,
        Self::Olmo2,
        Self::Glm4,
        Self::Cohere,
        Self::Gemma2,
        Self::Gemma3,
        Self::Qwen2Moe,
        Self::Olmoe,
        Self::GraniteMoe,
        Self::GraniteMoeShared,
        Self::Deepseek,
        Self::Glm4Moe,
        Self::Phimoe,
    ];

    /// `model_type` in the configuration.
    pub fn name(self) -> &'static str {
        self.features().name
    }

    /// Every `model_type` that runs: those of families, and those of models whose `text_config` is of a family.
    pub fn model_types() -> impl Iterator<Item = &'static str> {
        Self::ALL.iter().flat_map(|family| [Some(family.name()), family.features().part_of]).flatten()
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The linear layers that add a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Bias {
    /// Queries, keys and values.
    pub qkv: bool,
    /// The output projection of attention.
    pub o: bool,
    /// The three projections of the MLP. Not supported yet: always false.
    pub mlp: bool,
    /// The head of the model.
    pub head: bool,
}

/// How rows are normed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NormKind {
    /// `x / sqrt(mean(x^2) + eps)`, rounded, times the weight.
    Rms,
    /// Like [`NormKind::Rms`], but rounded once, after the product with the weight.
    RmsOnce,
    /// Like [`NormKind::RmsOnce`], but times one plus the weight.
    RmsPlusOne,
    /// `(x - mean(x)) / sqrt(variance(x) + eps)` times the weight, rounded once.
    Layer,
    /// Like [`NormKind::Layer`], plus a bias before the rounding.
    LayerBias,
}

/// How queries and keys are normed before they are rotated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum QkNorm {
    /// Queries and keys are not normed.
    None,
    /// Each head is normed separately.
    Head,
    /// All query heads of a token are normed together, and so are all key heads.
    Whole,
}

/// Factors of a model's activations; 1 in most families.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Factors {
    /// The factor of token embeddings.
    pub embedding: f32,
    /// The factor of attention scores; `None` for `1 / sqrt(head_dim)`.
    pub attention: Option<f32>,
    /// The factor of what attention and MLP add to the residual stream.
    pub residual: f32,
    /// The factor of logits.
    pub logits: f32,
}

impl Factors {
    /// No factors.
    pub const NONE: Self = Self { embedding: 1.0, attention: None, residual: 1.0, logits: 1.0 };
}

/// Soft caps: `x` is replaced by `cap * tanh(x / cap)`.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct SoftCaps {
    /// The cap of attention scores, after their factor and before the mask.
    pub attention: Option<f32>,
    /// The cap of logits.
    pub logits: Option<f32>,
}

/// The activation function of an MLP's gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// GELU by its tanh approximation: `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))`.
    GeluTanh,
}

/// How a router's logits become the scores of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Scoring {
    /// Shares of the softmax over all experts.
    Softmax,
    /// The sigmoid of each logit. Experts are chosen by the sum of score and a correction bias of each expert, which
    /// the weights do not contain.
    Sigmoid,
    /// Two experts, one after the other: that with the largest logit, and the largest of the rest. The weight of each
    /// is its share of the softmax over itself and those of the rest whose logits are near ([`Mixture::cutoff`]).
    SparseMixer,
}

/// The experts of a mixture, the same in every layer that has some: each is a gated MLP of width
/// [`ModelConfig::intermediate`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mixture {
    /// The number of experts.
    pub experts: u32,
    /// The number of experts per token: those with the largest scores, of equal ones the lower indices.
    pub top_k: u32,
    /// How logits become scores, which are the weights of experts.
    pub scoring: Scoring,
    /// Whether a token's weights are divided by their sum.
    pub normalized: bool,
    /// Whether weights are rounded to the type of the activations.
    pub rounded: bool,
    /// The factor of the weights, except that of a shared expert.
    pub factor: f32,
    /// For [`Scoring::SparseMixer`]: an expert with logit `x` is not near one with logit `y` if `(y - x) / max(|x|, y)`
    /// is larger. Otherwise 0.
    pub cutoff: f32,
    /// The number of first layers without experts.
    pub dense_layers: u32,
    /// The width of the MLP of these layers; 0 if there are none.
    pub dense_intermediate: u32,
    /// The expert that every token has in addition, if the model has one.
    pub shared: Option<SharedExpert>,
}

/// The shared expert of a mixture.
///
/// It is a gated MLP whose width is a multiple of an expert's, so it equals the sum of `parts` experts: rows of its
/// gate and up, and columns of its down, are divided among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedExpert {
    /// The width of the shared expert, as a multiple of [`ModelConfig::intermediate`].
    pub parts: u32,
    /// Whether its output is multiplied by the sigmoid of a gate: the product of the token's row with a row of weights.
    pub gated: bool,
}

impl Mixture {
    /// Whether a layer has experts.
    pub fn has_experts(self, layer: u32) -> bool {
        layer >= self.dense_layers
    }

    /// The number of experts of a layer, the parts of a shared expert included; these come last.
    pub fn all_experts(self) -> u32 {
        // At most 2^24, because the rows of all are.
        self.experts + self.shared.map_or(0, |shared| shared.parts)
    }

    /// The number of experts that each token has, the parts of a shared expert included.
    pub fn places(self) -> u32 {
        self.top_k + self.shared.map_or(0, |shared| shared.parts)
    }

    /// The number of logits per token: one for each expert among which the router chooses, and one of the gate of a
    /// shared expert.
    pub fn router_rows(self) -> u32 {
        self.experts + u32::from(self.shared.is_some_and(|shared| shared.gated))
    }
}

/// Sampling defaults that the model's publisher recommends. Values that `generation_config.json` omits are those of
/// transformers.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct GenerationDefaults {
    /// Whether tokens are drawn; otherwise the most likely token is taken.
    pub do_sample: bool,
    /// The divisor of logits; 0 takes the most likely token.
    pub temperature: f32,
    /// Keeps only this number of most likely tokens; `None` keeps all.
    pub top_k: Option<u32>,
    /// Keeps only the most likely tokens that together have this probability, `0..=1`.
    pub top_p: f32,
    /// Keeps only tokens with at least this share of the most likely token's probability, `0..=1`.
    pub min_p: f32,
    /// Settings of `generation_config.json` that this program does not support, such as `repetition_penalty 1.05`, or
    /// whose value is out of range. They are warnings, not errors.
    pub ignored: Vec<String>,
}

impl Default for GenerationDefaults {
    fn default() -> Self {
        Self { do_sample: false, temperature: 1.0, top_k: Some(50), top_p: 1.0, min_p: 0.0, ignored: Vec::new() }
    }
}

/// The configuration of a decoder-only transformer: norms, grouped-query attention with rotary embedding, gated MLP.
///
/// Sizes are at least 1 and at most 2^24; `heads` is a multiple of `kv_heads`, `head_dim` even.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ModelConfig {
    /// The family, which `model_type` names.
    pub family: Family,
    /// The vocabulary size: rows of the embedding and of the head.
    pub vocab: u32,
    /// The width of the residual stream.
    pub hidden: u32,
    /// The number of transformer layers.
    pub layers: u32,
    /// The number of layers after these that predict further tokens. They are not run, and their weights not loaded.
    pub mtp_layers: u32,
    /// The number of query heads.
    pub heads: u32,
    /// The number of key and value heads.
    pub kv_heads: u32,
    /// The number of elements of a head. `heads * head_dim` may differ from `hidden`.
    pub head_dim: u32,
    /// The width of the MLP, or of an expert of a mixture.
    pub intermediate: u32,
    /// The experts that replace the MLP of all layers, or of all but the first ones, if the model is a mixture.
    pub mixture: Option<Mixture>,
    /// How rows are normed.
    pub norm: NormKind,
    /// The number that norms add to the mean square.
    pub eps: f32,
    /// Whether attention and MLP read the same normed rows, and both are added to the residual stream.
    pub parallel: bool,
    /// Factors of activations.
    pub factors: Factors,
    /// Soft caps of scores and logits.
    pub soft_caps: SoftCaps,
    /// The rotary position embedding.
    pub rope: Rope,
    /// The rotary position embedding of layers with a window, if it differs.
    pub local_rope: Option<Rope>,
    /// Whether each layer has rotary position embedding.
    pub rotated: Vec<bool>,
    /// The number of positions that the model was made for.
    pub max_positions: u32,
    /// Whether the head is the embedding.
    pub tied: bool,
    /// The linear layers that add a bias.
    pub bias: Bias,
    /// How queries and keys are normed before they are rotated.
    pub qk_norm: QkNorm,
    /// The attention window of each layer: a query at position `p` attends to keys at `p - window + 1..=p`; `None` for
    /// all keys up to `p`.
    pub window: Vec<Option<u32>>,
    /// The activation function of the MLP's gate.
    pub act: Activation,
    /// The tokens that end a text; empty if neither file names any.
    pub eos: Vec<u32>,
    /// The token before every text, if the model has one.
    pub bos: Option<u32>,
    /// Sampling defaults.
    pub generation: GenerationDefaults,
}

impl ModelConfig {
    /// Parses `config.json`, and `generation_config.json` if the model has one.
    ///
    /// # Errors
    /// [`ConfigError`] if a file is not JSON, a value is invalid, or the model is not supported. It names file, key,
    /// value and remedy.
    pub fn parse(config: &str, generation_config: Option<&str>) -> Result<Self, ConfigError> {
        let json = |file, text: &str| {
            serde_json::from_str(text).map_err(|error| ConfigError::Json { file, reason: error.to_string() })
        };
        let generation_config = generation_config.map(|text| json(GENERATION_FILE, text)).transpose()?;
        Self::from_json(&json(CONFIG_FILE, config)?, generation_config.as_ref())
    }

    /// Like [`ModelConfig::parse`], from JSON that is already parsed.
    ///
    /// # Errors
    /// As for [`ModelConfig::parse`].
    pub fn from_json(
        config: &serde_json::Value,
        generation_config: Option<&serde_json::Value>,
    ) -> Result<Self, ConfigError> {
        parse::model(config, generation_config)
    }

    /// Like [`ModelConfig::parse`], from the files of a bundle.
    ///
    /// # Errors
    /// [`ConfigError`] if the bundle has no `config.json` or the files are damaged, or as for [`ModelConfig::parse`].
    pub fn of_bundle(bundle: &Bundle) -> Result<Self, ConfigError> {
        let text = |file| {
            let Some(bytes) = bundle.copied(file, CONFIG_BYTES_MAX)? else { return Ok(None) };
            let text = String::from_utf8(bytes).map_err(|error| error.utf8_error());
            text.map(Some).map_err(|error| ConfigError::Json { file, reason: error.to_string() })
        };
        let config = text(CONFIG_FILE)?.ok_or(ConfigError::NoFile { file: CONFIG_FILE })?;
        Self::parse(&config, text(GENERATION_FILE)?.as_deref())
    }

    /// Whether what attention and MLP add to the residual stream is normed.
    pub fn norms_what_is_added(&self) -> bool {
        let norms = &self.family.features().norms;
        norms.after_attention.is_some() || norms.after_mlp.is_some()
    }

    /// The rotary embedding of a layer, if it has one.
    pub(crate) fn rope_of(&self, layer: usize) -> Option<&Rope> {
        let is_local = self.window.get(layer).is_some_and(Option::is_some);
        let rope = self.local_rope.as_ref().filter(|_| is_local).unwrap_or(&self.rope);
        self.rotated.get(layer).is_none_or(|rotated| *rotated).then_some(rope)
    }

    /// Whether gate and up of an MLP are one tensor.
    pub fn merges_gate_up(&self) -> bool {
        self.family.features().merged_gate_up
    }

    /// The width of the MLP of layers without experts; 0 if all layers have experts.
    pub fn dense_intermediate(&self) -> u32 {
        self.mixture.map_or(self.intermediate, |mixture| mixture.dense_intermediate)
    }

    /// The number of layers with experts; 0 if the model is not a mixture.
    pub fn mixture_layers(&self) -> u32 {
        self.mixture.map_or(0, |mixture| self.layers.saturating_sub(mixture.dense_layers))
    }

    /// The width of the shared expert of a mixture; 0 without one.
    pub fn shared_intermediate(&self) -> u32 {
        let shared = self.mixture.and_then(|mixture| mixture.shared);
        // At most 2^24, because it was read from the configuration.
        shared.map_or(0, |shared| shared.parts * self.intermediate)
    }

    /// The number of rows of the merged weight of queries, keys and values: `(heads + 2 * kv_heads) * head_dim`.
    pub fn qkv_rows(&self) -> u32 {
        // Every product of heads and head_dim was checked to be at most 2^24.
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }
}
