//! Binds tensors to roles: every weight of a model by name, with the shape that its configuration requires.
//!
//! Names are those of Hugging Face checkpoints, and must match exactly. Similar names of other conventions are not
//! bound: the original Llama files, for example, have queries and keys in another order of rows, for another kind of
//! rotation.

use std::collections::BTreeMap;

use unweight_format::{
    bundle::{Bundle, manifest::TensorEntry},
    safetensors::{Dtype, TensorInfo},
};

use crate::config::{Family, ModelConfig, NormKind, QkNorm, Scoring, families::SharedKeys};

/// Name, dtype and shape of a tensor, as the header of its file states them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorHeader<'a> {
    /// The name of the tensor.
    pub name: &'a str,
    /// The element type.
    pub dtype: Dtype,
    /// The shape, rows first.
    pub shape: &'a [usize],
}

impl<'a> From<&'a TensorInfo> for TensorHeader<'a> {
    /// The header of a tensor of a safetensors file.
    fn from(tensor: &'a TensorInfo) -> Self {
        Self { name: &tensor.name, dtype: tensor.dtype, shape: &tensor.shape }
    }
}

impl<'a> From<&'a TensorEntry> for TensorHeader<'a> {
    /// The header of a tensor of a bundle.
    fn from(tensor: &'a TensorEntry) -> Self {
        Self { name: &tensor.name, dtype: tensor.dtype, shape: &tensor.shape }
    }
}

/// The names of a model's weights by role. All are BF16; the weight of a linear layer is `[outputs, inputs]`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ModelWeights {
    /// Token embedding `[vocab, hidden]`.
    pub embed: String,
    /// The layers, in the order in which they run.
    pub layers: Vec<LayerWeights>,
    /// Norm before the head.
    pub final_norm: NormWeights,
    /// Head `[vocab, hidden]`; the same name as [`ModelWeights::embed`] if a tied model has one table only.
    pub lm_head: String,
    /// Bias of the head `[vocab]`.
    pub lm_head_bias: Option<String>,
}

/// The names of a norm's weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NormWeights {
    /// The factor of each column `[hidden]`.
    pub weight: String,
    /// What is added to each column `[hidden]`, if the norm has biases ([`NormKind::LayerBias`]).
    pub bias: Option<String>,
}

/// The names of a layer's weights by role.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LayerWeights {
    /// Norm of what attention reads.
    pub input_norm: Option<NormWeights>,
    /// Queries `[heads * head_dim, hidden]`. If queries, keys and values are one tensor, concatenated by rows, all
    /// three have its name.
    pub q: String,
    /// Keys `[kv_heads * head_dim, hidden]`.
    pub k: String,
    /// Values `[kv_heads * head_dim, hidden]`.
    pub v: String,
    /// Output projection of attention `[hidden, heads * head_dim]`.
    pub o: String,
    /// Norm of what attention adds to the residual stream.
    pub attention_norm: Option<NormWeights>,
    /// Norm of what the MLP reads.
    pub post_norm: Option<NormWeights>,
    /// Norm of what the MLP adds to the residual stream.
    pub mlp_norm: Option<NormWeights>,
    /// The MLP, or the experts that replace it.
    pub mlp: MlpWeights,
    /// Bias of the queries `[heads * head_dim]`.
    pub q_bias: Option<String>,
    /// Bias of the keys `[kv_heads * head_dim]`.
    pub k_bias: Option<String>,
    /// Bias of the values `[kv_heads * head_dim]`.
    pub v_bias: Option<String>,
    /// Bias of the output projection `[hidden]`.
    pub o_bias: Option<String>,
    /// Norm of the queries: of each head `[head_dim]`, or of all together `[heads * head_dim]`.
    pub q_norm: Option<String>,
    /// Norm of the keys: of each head `[head_dim]`, or of all together `[kv_heads * head_dim]`.
    pub k_norm: Option<String>,
}

/// The names of the weights after a layer's second norm.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum MlpWeights {
    /// A gated MLP that processes every token.
    Dense(GatedWeights),
    /// Experts, and the router that chooses among them.
    Mixture {
        /// The router `[experts, hidden]`.
        router: String,
        /// The correction bias of the router's scores `[experts]`, BF16 or F32, if scores have one
        /// ([`Scoring::Sigmoid`]).
        correction: Option<String>,
        /// The experts.
        experts: ExpertWeights,
        /// The expert that every token has in addition.
        shared: Option<SharedWeights>,
    },
}

/// The names of a shared expert's weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedWeights {
    /// The gate of its output `[1, hidden]`.
    pub gate: Option<String>,
    /// The gated MLP, whose width is a multiple of an expert's.
    pub mlp: GatedWeights,
}

/// The names of a gated MLP's weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatedWeights {
    /// Gate `[intermediate, hidden]`. If gate and up are one tensor, concatenated by rows, both have its name.
    pub gate: String,
    /// Up `[intermediate, hidden]`.
    pub up: String,
    /// Down `[hidden, intermediate]`.
    pub down: String,
}

/// The names of the weights of experts, in either layout of checkpoints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExpertWeights {
    /// Three tensors per expert.
    Each(Vec<GatedWeights>),
    /// Two tensors for all experts.
    Stacked {
        /// Gate and up of each expert, concatenated by rows `[experts, 2 * intermediate, hidden]`.
        gate_up: String,
        /// Down `[experts, hidden, intermediate]`.
        down: String,
    },
}

impl MlpWeights {
    /// The MLP of a layer without experts.
    pub fn dense(&self) -> Option<&GatedWeights> {
        match self {
            Self::Dense(weights) => Some(weights),
            Self::Mixture { .. } => None,
        }
    }

    /// Returns the tensors of the experts, the shared one included; none of a dense layer.
    #[doc(hidden)]
    pub fn expert_tensors(&self) -> Vec<&str> {
        let Self::Mixture { experts, shared, .. } = self else { return Vec::new() };
        let mut names: Vec<&str> = match experts {
            ExpertWeights::Each(experts) => experts.iter().flat_map(GatedWeights::tensors).collect(),
            ExpertWeights::Stacked { gate_up, down } => vec![gate_up, down],
        };
        names.extend(shared.iter().flat_map(|shared| shared.mlp.tensors()));
        names
    }
}

impl GatedWeights {
    fn tensors(&self) -> [&str; 3] {
        [&self.gate, &self.up, &self.down]
    }
}

/// The reason why the tensors do not match the configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// A weight that the configuration requires is missing.
    #[error(
        "tensor '{name}' {shape:?} is missing, which this {family} configuration requires; fetch the missing files"
    )]
    Missing {
        /// The tensor.
        name: String,
        /// Its shape according to the configuration.
        shape: Vec<usize>,
        /// The family.
        family: Family,
    },
    /// A tensor has another shape than the configuration requires.
    #[error(
        "tensor '{name}' is {got:?}, but config.json requires {expected:?}; use weights and config.json of one model"
    )]
    Shape {
        /// The tensor.
        name: String,
        /// Its shape.
        got: Vec<usize>,
        /// Its shape according to the configuration.
        expected: Vec<usize>,
    },
    /// A tensor is not BF16.
    #[error("tensor '{name}' is {got}, but weights must be BF16; use the BF16 model")]
    Dtype {
        /// The tensor.
        name: String,
        /// Its type.
        got: Dtype,
    },
    /// Two tensors have the same name.
    #[error("tensor '{name}' occurs twice; remove one of the files that contain it")]
    Twice {
        /// The tensor.
        name: String,
    },
    /// The model would not use some tensors, so the weights were made for another model.
    #[error(
        "this {family} configuration does not use {count} of the tensors, such as '{first}'; config.json belongs to \
         another model or lacks their keys"
    )]
    LeftOver {
        /// The number of these tensors.
        count: usize,
        /// The first of their names in order.
        first: String,
        /// The family.
        family: Family,
    },
}

impl BindError {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Missing { .. } => "model-tensor-missing",
            Self::Shape { .. } => "model-tensor-shape",
            Self::Dtype { .. } => "model-tensor-dtype",
            Self::Twice { .. } => "model-tensor-duplicate",
            Self::LeftOver { .. } => "model-tensors-unused",
        }
    }
}

/// Finds the weights of a model among its tensors: every role has one tensor, of the right shape and type, and no
/// tensor is left over.
///
/// Names start with `model.`, or without it if the checkpoint is of the model without its head. The head of a tied
/// model is its embedding, unless the checkpoint has a separate head. Frequencies of the rotary embedding, which old
/// checkpoints contain, are ignored, and so are layers that predict further tokens ([`ModelConfig::mtp_layers`]) and
/// the image encoder of a model of text and images.
///
/// # Errors
/// [`BindError`] if a tensor is missing, duplicated or unused, or has another shape or type.
pub fn bind<'a>(
    config: &ModelConfig,
    tensors: impl IntoIterator<Item = TensorHeader<'a>>,
) -> Result<ModelWeights, BindError> {
    let mut unbound = BTreeMap::new();
    for tensor in tensors {
        if unbound.insert(tensor.name, tensor).is_some() {
            return Err(BindError::Twice { name: tensor.name.into() });
        }
    }
    unbound.retain(|name, _| !name.ends_with(".rotary_emb.inv_freq"));
    let has = |prefix: &str| unbound.keys().any(|name| name.starts_with(prefix));
    let is_wrapped = config.family.features().part_of.is_some();
    let prefix = match WRAPPED_PREFIXES.into_iter().find(|prefix| is_wrapped && has(prefix)) {
        Some(prefix) => prefix,
        None if has("model.") => "model.",
        None => "",
    };
    if WRAPPED_PREFIXES.contains(&prefix) {
        unbound
            .retain(|name, _| !IMAGE_PREFIXES.iter().any(|part| name.trim_start_matches("model.").starts_with(part)));
    }
    for layer in (config.layers..).take(config.mtp_layers as usize) {
        let layer = format!("{prefix}layers.{layer}.");
        unbound.retain(|name, _| !name.starts_with(&layer));
    }
    let mut binder = Binder { family: config.family, unbound };
    let [vocab, hidden] = [config.vocab, config.hidden];
    let before_head = if prefix == WRAPPED_PREFIXES[0] { "language_model." } else { "" };
    let (embed, head) = (format!("{prefix}embed_tokens.weight"), format!("{before_head}lm_head.weight"));
    // A tied model may have either, or both. They need not be equal, and transformers keeps both.
    let (has_embed, has_head) = (binder.has(&embed), binder.has(&head));
    let (embed, lm_head) = match (config.tied, has_embed, has_head) {
        (true, false, true) => (head.clone(), head),
        (true, _, false) => (embed.clone(), embed),
        _ => (embed, head),
    };
    let embed = binder.bind(embed, &[vocab, hidden])?;
    let lm_head = if lm_head == embed { lm_head } else { binder.bind(lm_head, &[vocab, hidden])? };
    let lm_head_bias = config.bias.head.then(|| binder.bind(format!("{before_head}lm_head.bias"), &[vocab]));
    let lm_head_bias = lm_head_bias.transpose()?;
    let final_norm = norm_weights(config, &format!("{prefix}norm"));
    binder.norm(&final_norm, hidden)?;
    let layers = (0..config.layers).map(|layer| binder.layer(config, layer, &format!("{prefix}layers.{layer}.")));
    let layers = layers.collect::<Result<_, _>>()?;
    if let Some(first) = binder.unbound.keys().next() {
        let (count, first) = (binder.unbound.len(), (*first).to_owned());
        return Err(BindError::LeftOver { count, first, family: config.family });
    }
    Ok(ModelWeights { embed, layers, final_norm, lm_head, lm_head_bias })
}

impl ModelWeights {
    /// The names that [`bind`] looks for, without any tensors.
    pub fn named(config: &ModelConfig) -> Self {
        let layout = expert_layout(config, false);
        let layer = |layer: u32| layer_names(config, layer, &format!("model.layers.{layer}."), layout);
        let embed = "model.embed_tokens.weight".to_owned();
        let lm_head = if config.tied { embed.clone() } else { "lm_head.weight".to_owned() };
        let layers = (0..config.layers).map(layer).collect();
        let lm_head_bias = config.bias.head.then(|| "lm_head.bias".to_owned());
        Self { embed, layers, final_norm: norm_weights(config, "model.norm"), lm_head, lm_head_bias }
    }

    /// The weights of a bundle, as [`bind`] finds them.
    ///
    /// Uses only the files that [`Bundle::is_of_model`] accepts: some models contain the same weights once more.
    ///
    /// # Errors
    /// As for [`bind`].
    pub fn of_bundle(config: &ModelConfig, bundle: &Bundle) -> Result<Self, BindError> {
        let tensors = bundle.tensors().filter(|tensor| bundle.is_of_model(tensor.file()));
        bind(config, tensors.map(|tensor| tensor.entry().into()))
    }
}

/// The prefixes of the text model's names in a model of text and images, in transformers 4 and 5.
const WRAPPED_PREFIXES: [&str; 2] = ["language_model.model.", "model.language_model."];
/// The prefixes of the other names, with or without `model.` in front.
const IMAGE_PREFIXES: [&str; 2] = ["vision_tower.", "multi_modal_projector."];

/// The layout of experts in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExpertLayout {
    /// Separate tensors for each expert.
    Separate,
    /// Tensors of all experts, as transformers 5 holds them in memory.
    Stacked,
}

/// The names of the weights of layer `number`, which start with `prefix`.
fn layer_names(config: &ModelConfig, number: u32, prefix: &str, layout: ExpertLayout) -> LayerWeights {
    let features = config.family.features();
    let name = |name: &str| format!("{prefix}{name}");
    let optional = |has: bool, of: &str| has.then(|| name(of));
    let norm = |of: Option<&str>| of.map(|of| norm_weights(config, &format!("{prefix}{of}")));
    let [q, k, v] = match features.merged_qkv {
        true => ["qkv_proj"; 3],
        false => ["q_proj", "k_proj", "v_proj"],
    }
    .map(|of| format!("{prefix}self_attn.{of}"));
    let bias = |of: &str| config.bias.qkv.then(|| format!("{of}.bias"));
    let has_qk_norm = config.qk_norm != QkNorm::None;
    LayerWeights {
        input_norm: norm(features.norms.attention),
        q_bias: bias(&q),
        k_bias: bias(&k),
        v_bias: bias(&v),
        q: q + ".weight",
        k: k + ".weight",
        v: v + ".weight",
        o: name("self_attn.o_proj.weight"),
        o_bias: optional(config.bias.o, "self_attn.o_proj.bias"),
        attention_norm: norm(features.norms.after_attention),
        post_norm: norm(features.norms.mlp),
        mlp_norm: norm(features.norms.after_mlp),
        mlp: mlp_names(config, number, prefix, layout),
        q_norm: optional(has_qk_norm, "self_attn.q_norm.weight"),
        k_norm: optional(has_qk_norm, "self_attn.k_norm.weight"),
    }
}

/// The names of the weights of the norm `name`.
fn norm_weights(config: &ModelConfig, name: &str) -> NormWeights {
    let has_bias = config.norm == NormKind::LayerBias;
    NormWeights { weight: format!("{name}.weight"), bias: has_bias.then(|| format!("{name}.bias")) }
}

fn mlp_names(config: &ModelConfig, layer: u32, prefix: &str, layout: ExpertLayout) -> MlpWeights {
    let features = config.family.features();
    let mixture = config.mixture.filter(|mixture| mixture.has_experts(layer));
    let (Some(mixture), Some(keys)) = (mixture, &features.experts) else {
        let gate_up = if features.merged_gate_up { ["gate_up_proj"; 2] } else { ["gate_proj", "up_proj"] };
        return MlpWeights::Dense(gated(format!("{prefix}mlp."), [gate_up[0], gate_up[1], "down_proj"]));
    };
    let [router, gate_up, down] = keys.stacked.map(|name| format!("{prefix}{name}"));
    let (router, experts) = match layout {
        ExpertLayout::Stacked => (router, ExpertWeights::Stacked { gate_up, down }),
        ExpertLayout::Separate => {
            let one = |expert| gated(format!("{prefix}{}experts.{expert}.", keys.block), keys.names);
            let experts = ExpertWeights::Each((0..mixture.experts).map(one).collect());
            (format!("{prefix}{}gate.weight", keys.block), experts)
        }
    };
    let shared = mixture.shared.map(|_| match keys.shared {
        SharedKeys::None | SharedKeys::Gated(_) => SharedWeights {
            gate: Some(format!("{prefix}mlp.shared_expert_gate.weight")),
            mlp: gated(format!("{prefix}mlp.shared_expert."), ["gate_proj", "up_proj", "down_proj"]),
        },
        SharedKeys::Merged => SharedWeights {
            gate: None,
            mlp: gated(format!("{prefix}shared_mlp."), ["input_linear", "input_linear", "output_linear"]),
        },
        SharedKeys::Parts(_) => {
            SharedWeights { gate: None, mlp: gated(format!("{prefix}mlp.shared_experts."), keys.names) }
        }
    });
    let correction =
        (mixture.scoring == Scoring::Sigmoid).then(|| format!("{prefix}{}gate.e_score_correction_bias", keys.block));
    MlpWeights::Mixture { router, correction, experts, shared }
}

/// The layout of experts in a checkpoint, in which a tensor of all experts may have been found.
fn expert_layout(config: &ModelConfig, has_stacked: bool) -> ExpertLayout {
    let always = matches!(config.family, Family::GraniteMoe | Family::GraniteMoeShared);
    if always || has_stacked { ExpertLayout::Stacked } else { ExpertLayout::Separate }
}

/// The names of a gated MLP's weights, which start with `prefix`.
fn gated(prefix: String, [gate, up, down]: [&str; 3]) -> GatedWeights {
    let name = |name: &str| format!("{prefix}{name}.weight");
    GatedWeights { gate: name(gate), up: name(up), down: name(down) }
}

/// The tensors that are not used yet.
struct Binder<'a> {
    family: Family,
    unbound: BTreeMap<&'a str, TensorHeader<'a>>,
}

impl Binder<'_> {
    fn has(&self, name: &str) -> bool {
        self.unbound.contains_key(name)
    }

    fn bind(&mut self, name: String, shape: &[u32]) -> Result<String, BindError> {
        self.check(&name, shape)?;
        Ok(name)
    }

    fn check(&mut self, name: &str, shape: &[u32]) -> Result<(), BindError> {
        self.check_dtype(name, shape, false)
    }

    /// Checks a tensor that is BF16 or, if it may be, F32.
    fn check_dtype(&mut self, name: &str, shape: &[u32], may_be_f32: bool) -> Result<(), BindError> {
        let expected: Vec<usize> = shape.iter().map(|&extent| extent as usize).collect();
        let Some(tensor) = self.unbound.remove(name) else {
            return Err(BindError::Missing { name: name.into(), shape: expected, family: self.family });
        };
        if tensor.shape != expected {
            return Err(BindError::Shape { name: name.into(), got: tensor.shape.into(), expected });
        }
        let accepts = |dtype| dtype == Dtype::Bf16 || may_be_f32 && dtype == Dtype::F32;
        if !accepts(tensor.dtype) {
            return Err(BindError::Dtype { name: name.into(), got: tensor.dtype });
        }
        Ok(())
    }

    /// Checks weights with these rows: separate tensors, or one tensor if all have the same name.
    fn check_rows<const N: usize>(
        &mut self,
        names: [&str; N],
        rows: [u32; N],
        columns: &[u32],
    ) -> Result<(), BindError> {
        let shape = |rows| [&[rows], columns].concat();
        if names.iter().all(|name| *name == names[0]) {
            return self.check(names[0], &shape(rows.iter().sum()));
        }
        names.into_iter().zip(rows).try_for_each(|(name, rows)| self.check(name, &shape(rows)))
    }

    fn norm(&mut self, names: &NormWeights, hidden: u32) -> Result<(), BindError> {
        self.check(&names.weight, &[hidden])?;
        names.bias.as_ref().map_or(Ok(()), |name| self.check(name, &[hidden]))
    }

    fn gated(&mut self, hidden: u32, intermediate: u32, names: &GatedWeights) -> Result<(), BindError> {
        self.check_rows([&names.gate, &names.up], [intermediate; 2], &[hidden])?;
        self.check(&names.down, &[hidden, intermediate])
    }

    /// Checks a gated MLP, or a router with experts, stacked or separate.
    fn mlp(&mut self, config: &ModelConfig, names: &MlpWeights) -> Result<(), BindError> {
        let (hidden, intermediate) = (config.hidden, config.intermediate);
        let experts = config.mixture.map_or(0, |mixture| mixture.experts);
        match names {
            MlpWeights::Dense(names) => self.gated(hidden, config.dense_intermediate(), names),
            MlpWeights::Mixture { router, correction, experts: names, shared } => {
                self.check(router, &[experts, hidden])?;
                correction.as_ref().map_or(Ok(()), |name| self.check_dtype(name, &[experts], true))?;
                if let Some(SharedWeights { gate, mlp }) = shared {
                    gate.as_ref().map_or(Ok(()), |gate| self.check(gate, &[1, hidden]))?;
                    self.gated(hidden, config.shared_intermediate(), mlp)?;
                }
                match names {
                    ExpertWeights::Each(each) => {
                        each.iter().try_for_each(|names| self.gated(hidden, intermediate, names))
                    }
                    ExpertWeights::Stacked { gate_up, down } => {
                        self.check(gate_up, &[experts, 2 * intermediate, hidden])?;
                        self.check(down, &[experts, hidden, intermediate])
                    }
                }
            }
        }
    }

    fn layer(&mut self, config: &ModelConfig, number: u32, prefix: &str) -> Result<LayerWeights, BindError> {
        let (hidden, head_dim) = (config.hidden, config.head_dim);
        // Both products are at most 2^24, because the configuration was checked.
        let (q, kv) = (config.heads * head_dim, config.kv_heads * head_dim);
        let stacked = self.has(&format!("{prefix}mlp.experts.gate_up_proj"));
        let names = layer_names(config, number, prefix, expert_layout(config, stacked));
        self.mlp(config, &names.mlp)?;
        for norm in [&names.input_norm, &names.attention_norm, &names.post_norm, &names.mlp_norm] {
            norm.as_ref().map_or(Ok(()), |norm| self.norm(norm, hidden))?;
        }
        self.check_rows([&names.q, &names.k, &names.v], [q, kv, kv], &[hidden])?;
        self.check(&names.o, &[hidden, q])?;
        names.o_bias.as_ref().map_or(Ok(()), |name| self.check(name, &[hidden]))?;
        if let (Some(of_q), Some(of_k), Some(of_v)) = (&names.q_bias, &names.k_bias, &names.v_bias) {
            self.check_rows([of_q, of_k, of_v], [q, kv, kv], &[])?;
        }
        let whole = config.qk_norm == QkNorm::Whole;
        for (norm, rows) in [(&names.q_norm, q), (&names.k_norm, kv)] {
            let rows = if whole { rows } else { head_dim };
            norm.as_ref().map_or(Ok(()), |name| self.check(name, &[rows]))?;
        }
        Ok(names)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Listing = Vec<(String, Dtype, Vec<usize>)>;

    fn config(family: &str, more: &str) -> ModelConfig {
        let json = format!(
            r#"{{"model_type": "{family}", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48,
                "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16{more}}}"#
        );
        ModelConfig::parse(&json, None).unwrap()
    }

    /// The tensors of a checkpoint with this configuration.
    fn listing(config: &ModelConfig) -> Listing {
        let mut all: Vec<(String, Vec<usize>)> =
            vec![("model.embed_tokens.weight".into(), vec![96, 32]), ("model.norm.weight".into(), vec![32])];
        if !config.tied {
            all.push(("lm_head.weight".into(), vec![96, 32]));
        }
        for layer in 0..2 {
            let mut push =
                |name: &str, shape: &[usize]| all.push((format!("model.layers.{layer}.{name}"), shape.into()));
            for (name, rows) in [("q", 64), ("k", 32), ("v", 32)] {
                push(&format!("self_attn.{name}_proj.weight"), &[rows, 32]);
                if config.bias.qkv {
                    push(&format!("self_attn.{name}_proj.bias"), &[rows]);
                }
                if config.qk_norm == QkNorm::Head && name != "v" {
                    push(&format!("self_attn.{name}_norm.weight"), &[16]);
                }
            }
            push("self_attn.o_proj.weight", &[32, 64]);
            push("input_layernorm.weight", &[32]);
            push("post_attention_layernorm.weight", &[32]);
            push("mlp.gate_proj.weight", &[48, 32]);
            push("mlp.up_proj.weight", &[48, 32]);
            push("mlp.down_proj.weight", &[32, 48]);
        }
        all.into_iter().map(|(name, shape)| (name, Dtype::Bf16, shape)).collect()
    }

    fn bound(config: &ModelConfig, listing: &Listing) -> Result<ModelWeights, BindError> {
        bind(config, listing.iter().map(|(name, dtype, shape)| TensorHeader { name, dtype: *dtype, shape }))
    }

    #[test]
    fn every_tensor_has_its_role() {
        for (family, more) in
            [("llama", ""), ("mistral", ""), ("qwen2", ""), ("qwen3", r#", "tie_word_embeddings": true"#)]
        {
            let config = config(family, more);
            let weights = bound(&config, &listing(&config)).unwrap();
            assert_eq!(weights.lm_head == weights.embed, config.tied);
            assert_eq!(weights.final_norm, NormWeights { weight: "model.norm.weight".into(), bias: None });
            let last = &weights.layers[1];
            let norms = [&last.input_norm, &last.post_norm].map(|norm| norm.as_ref().unwrap().weight.as_str());
            assert_eq!(
                norms,
                ["model.layers.1.input_layernorm.weight", "model.layers.1.post_attention_layernorm.weight"]
            );
            assert_eq!(
                (last.q.as_str(), last.o.as_str()),
                ("model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.o_proj.weight")
            );
            let mlp = last.mlp.dense().unwrap();
            assert_eq!(
                (mlp.gate.as_str(), mlp.up.as_str(), mlp.down.as_str()),
                (
                    "model.layers.1.mlp.gate_proj.weight",
                    "model.layers.1.mlp.up_proj.weight",
                    "model.layers.1.mlp.down_proj.weight"
                )
            );
            let biases = [&last.q_bias, &last.k_bias, &last.v_bias].map(Option::is_some);
            assert_eq!(biases, [family == "qwen2"; 3]);
            assert_eq!([&last.q_norm, &last.k_norm].map(Option::is_some), [family == "qwen3"; 2]);
        }
    }

    /// The tensor names of each family, compared with Llama's in layer 1.
    #[test]
    fn tensors_of_each_family() {
        let of = |family: &str, more: &str| {
            let config = config(family, more);
            let names = ModelWeights::named(&config);
            let rows = |shape: &[usize]| shape.to_vec();
            let mut all: Vec<(String, Vec<usize>)> =
                vec![(names.embed.clone(), rows(&[96, 32])), (names.lm_head.clone(), rows(&[96, 32]))];
            let norm = |norm: &NormWeights| -> Vec<_> {
                let names = [Some(&norm.weight), norm.bias.as_ref()].into_iter().flatten();
                names.map(|name| (name.clone(), rows(&[32]))).collect()
            };
            all.extend(norm(&names.final_norm));
            for layer in &names.layers {
                let norms = [&layer.input_norm, &layer.attention_norm, &layer.post_norm, &layer.mlp_norm];
                all.extend(norms.into_iter().flatten().flat_map(norm));
                all.extend(layer.o_bias.iter().map(|name| (name.clone(), rows(&[32]))));
                all.push((layer.o.clone(), rows(&[32, 64])));
                let whole = config.qk_norm == QkNorm::Whole;
                let width = |width| rows(&[if whole { width } else { 16 }]);
                all.extend(layer.q_norm.iter().map(|name| (name.clone(), width(64))));
                all.extend(layer.k_norm.iter().map(|name| (name.clone(), width(32))));
                let mlp = layer.mlp.dense().unwrap();
                all.push((mlp.down.clone(), rows(&[32, 48])));
                if mlp.gate == mlp.up {
                    all.push((mlp.gate.clone(), rows(&[96, 32])));
                } else {
                    all.extend([&mlp.gate, &mlp.up].map(|name| (name.clone(), rows(&[48, 32]))));
                }
                if layer.q == layer.k {
                    all.push((layer.q.clone(), rows(&[128, 32])));
                } else {
                    all.extend([(&layer.q, 64), (&layer.k, 32), (&layer.v, 32)].map(|(n, m)| (n.clone(), vec![m, 32])));
                }
                let biases = [(&layer.q_bias, 64), (&layer.k_bias, 32), (&layer.v_bias, 32)];
                all.extend(biases.into_iter().filter_map(|(name, width)| Some((name.clone()?, rows(&[width])))));
            }
            all.sort();
            all.dedup();
            let listing: Listing = all.into_iter().map(|(name, shape)| (name, Dtype::Bf16, shape)).collect();
            assert_eq!(bound(&config, &listing).unwrap(), names, "{family}");
            for i in 0..listing.len() {
                let mut wrong = listing.clone();
                wrong[i].2[0] += 1;
                let error = bound(&config, &wrong).unwrap_err();
                assert!(matches!(&error, BindError::Shape { name, .. } if *name == listing[i].0), "{error}");
            }
            let layer = listing.iter().filter_map(|(name, ..)| name.strip_prefix("model.layers.1."));
            layer.map(|name| name.trim_end_matches(".weight").to_owned()).collect::<Vec<_>>()
        };
        let llama = of("llama", "");
        let differ = |family: &str, more: &str| {
            let names = of(family, more);
            let added: Vec<_> = names.iter().filter(|name| !llama.contains(name)).cloned().collect();
            let lacks: Vec<_> = llama.iter().filter(|name| !names.contains(name)).cloned().collect();
            (added.join(" "), lacks.join(" "))
        };
        let pair = |added: &str, lacks: &str| (added.to_owned(), lacks.to_owned());
        assert_eq!(differ("granite", ""), pair("", ""));
        assert_eq!(differ("smollm3", ""), pair("", ""));
        assert_eq!(
            differ("phi3", ""),
            pair(
                "mlp.gate_up_proj self_attn.qkv_proj",
                "mlp.gate_proj mlp.up_proj self_attn.k_proj self_attn.q_proj self_attn.v_proj"
            )
        );
        assert_eq!(
            differ("olmo2", ""),
            pair("post_feedforward_layernorm self_attn.k_norm self_attn.q_norm", "input_layernorm")
        );
        assert_eq!(
            differ("glm4", ""),
            pair(
                "mlp.gate_up_proj post_mlp_layernorm post_self_attn_layernorm self_attn.k_proj.bias \
                 self_attn.q_proj.bias self_attn.v_proj.bias",
                "mlp.gate_proj mlp.up_proj"
            )
        );
        assert!(!differ("glm4", r#", "attention_bias": false"#).0.contains("bias"));
        assert_eq!(differ("cohere", ""), pair("", "post_attention_layernorm"));
        for family in ["llama", "qwen3", "granite", "cohere"] {
            let added = differ(family, r#", "attention_bias": true"#).0;
            let has = |of| added.contains(&format!("self_attn.{of}_proj.bias"));
            assert!(["q", "k", "v", "o"].into_iter().all(has), "{family}: {added}");
            assert!(!differ(family, "").0.contains("bias"), "{family}");
        }
        let norms = "post_feedforward_layernorm pre_feedforward_layernorm";
        let untied = r#", "tie_word_embeddings": false"#;
        assert_eq!(differ("gemma2", untied), pair(norms, ""));
        assert_eq!(differ("gemma3_text", untied), pair(&format!("{norms} self_attn.k_norm self_attn.q_norm"), ""));
    }

    /// The error names any single tensor that is missing, renamed, duplicated, or has another shape or type.
    #[test]
    fn each_fault_of_each_tensor_is_named() {
        for family in ["llama", "qwen2", "qwen3"] {
            let config = config(family, "");
            let all = listing(&config);
            for i in 0..all.len() {
                let name = all[i].0.clone();
                let with = |change: &dyn Fn(&mut Listing)| {
                    let mut listing = all.clone();
                    change(&mut listing);
                    bound(&config, &listing).unwrap_err()
                };
                // Without any layer, names would have no prefix; the listing is long enough to prevent that.
                let missing = with(&|listing| drop(listing.remove(i)));
                assert!(matches!(&missing, BindError::Missing { name: n, .. } if *n == name), "{missing}");
                let shape = with(&|listing| listing[i].2[0] += 1);
                assert!(matches!(&shape, BindError::Shape { name: n, .. } if *n == name), "{shape}");
                let rank = with(&|listing| listing[i].2.push(1));
                assert!(matches!(&rank, BindError::Shape { name: n, .. } if *n == name), "{rank}");
                let dtype = with(&|listing| listing[i].1 = Dtype::F16);
                assert!(matches!(&dtype, BindError::Dtype { name: n, got: Dtype::F16 } if *n == name), "{dtype}");
                let twice = with(&|listing| listing.push(all[i].clone()));
                assert!(matches!(&twice, BindError::Twice { name: n } if *n == name), "{twice}");
                let more = with(&|listing| listing.push((format!("{name}.more"), Dtype::Bf16, vec![1])));
                assert!(
                    matches!(&more, BindError::LeftOver { count: 1, first, .. } if *first == format!("{name}.more")),
                    "{more}"
                );
            }
        }
    }

    #[test]
    fn unused_layers_and_biases_are_reported() {
        let two = config("llama", "");
        let mut one = two.clone();
        one.layers = 1;
        let error = bound(&one, &listing(&two)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "this llama configuration does not use 9 of the tensors, such as \
             'model.layers.1.input_layernorm.weight'; config.json belongs to another model or lacks their keys"
        );
        let error = bound(&two, &listing(&config("qwen2", ""))).unwrap_err();
        assert!(matches!(error, BindError::LeftOver { count: 6, .. }), "{error}");
    }

    #[test]
    fn tensor_name_variants_of_checkpoints() {
        let untied = config("llama", "");
        let mut old = listing(&untied);
        old.push(("model.layers.0.self_attn.rotary_emb.inv_freq".into(), Dtype::F32, vec![8]));
        assert!(bound(&untied, &old).is_ok(), "frequencies are computed, not read");
        let tied = config("llama", r#", "tie_word_embeddings": true"#);
        let both = bound(&tied, &listing(&untied)).unwrap();
        assert_eq!(both.lm_head, "lm_head.weight", "the separate head is used");
        let mut head = listing(&untied);
        head.retain(|(name, ..)| !name.contains("embed"));
        let head = bound(&tied, &head).unwrap();
        assert_eq!((head.embed.as_str(), head.lm_head.as_str()), ("lm_head.weight", "lm_head.weight"));
        let headless =
            listing(&tied).into_iter().map(|(name, dtype, shape)| (name.replacen("model.", "", 1), dtype, shape));
        assert_eq!(bound(&tied, &headless.collect()).unwrap().embed, "embed_tokens.weight");
        let error = bound(&untied, &listing(&tied)).unwrap_err();
        assert!(matches!(error, BindError::Missing { ref name, .. } if name == "lm_head.weight"), "{error}");
    }
}
