//! Which tensor has which role: every weight of a model by name, with the shape that its configuration asks for.
//!
//! Names are those of Hugging Face checkpoints, matched whole. Names of other conventions are not bound by likeness:
//! the original Llama files, for one, hold queries and keys in another order of rows for another kind of rotation.

use std::collections::BTreeMap;

use unweight_format::{
    bundle::{Bundle, manifest::TensorEntry},
    safetensors::{Dtype, TensorInfo},
};

use crate::config::{Family, Mixture, ModelConfig};

/// Name, dtype and shape of a tensor, as the header of its file states them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorHeader<'a> {
    /// Name.
    pub name: &'a str,
    /// Element type.
    pub dtype: Dtype,
    /// Shape, rows first.
    pub shape: &'a [usize],
}

impl<'a> From<&'a TensorInfo> for TensorHeader<'a> {
    /// Of a safetensors file.
    fn from(tensor: &'a TensorInfo) -> Self {
        Self { name: &tensor.name, dtype: tensor.dtype, shape: &tensor.shape }
    }
}

impl<'a> From<&'a TensorEntry> for TensorHeader<'a> {
    /// Of a bundle.
    fn from(tensor: &'a TensorEntry) -> Self {
        Self { name: &tensor.name, dtype: tensor.dtype, shape: &tensor.shape }
    }
}

/// Names of a model's weights by role. All are BF16; a linear's weight is `[outputs, inputs]`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ModelWeights {
    /// Token embedding `[vocab, hidden]`.
    pub embed: String,
    /// The layers, in the order they run.
    pub layers: Vec<LayerWeights>,
    /// Norm before the head `[hidden]`.
    pub final_norm: String,
    /// Head `[vocab, hidden]`. Of a tied model the same name as [`ModelWeights::embed`].
    pub lm_head: String,
}

/// Names of a layer's weights by role.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LayerWeights {
    /// Norm before the attention `[hidden]`.
    pub input_norm: String,
    /// Queries `[heads * head_dim, hidden]`.
    pub q: String,
    /// Keys `[kv_heads * head_dim, hidden]`.
    pub k: String,
    /// Values `[kv_heads * head_dim, hidden]`.
    pub v: String,
    /// Output of the attention `[hidden, heads * head_dim]`.
    pub o: String,
    /// Norm before the MLP `[hidden]`.
    pub post_norm: String,
    /// The MLP, or experts in its place.
    pub mlp: MlpWeights,
    /// Bias of the queries `[heads * head_dim]`.
    pub q_bias: Option<String>,
    /// Bias of the keys `[kv_heads * head_dim]`.
    pub k_bias: Option<String>,
    /// Bias of the values `[kv_heads * head_dim]`.
    pub v_bias: Option<String>,
    /// Norm of each head of the queries `[head_dim]`.
    pub q_norm: Option<String>,
    /// Norm of each head of the keys `[head_dim]`.
    pub k_norm: Option<String>,
}

/// Names of what stands behind a layer's second norm.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MlpWeights {
    /// One gated MLP.
    Dense(GatedWeights),
    /// Experts, of which a router chooses.
    Mixture {
        /// The router `[experts, hidden]`.
        router: String,
        /// The experts.
        experts: ExpertWeights,
    },
}

/// Names of a gated MLP's weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatedWeights {
    /// Gate `[intermediate, hidden]`.
    pub gate: String,
    /// Up `[intermediate, hidden]`.
    pub up: String,
    /// Down `[hidden, intermediate]`.
    pub down: String,
}

/// Names of the weights of experts, in either way that checkpoints hold them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExpertWeights {
    /// Three tensors for each.
    Each(Vec<GatedWeights>),
    /// Two of all.
    Stacked {
        /// Gate and up of each, one below the other `[experts, 2 * intermediate, hidden]`.
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
}

/// Why the tensors are not those of the configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// A weight that the configuration asks for is not there.
    #[error("no tensor '{name}' {shape:?}, which a {family} of this configuration has; fetch the missing files")]
    Missing {
        /// The tensor.
        name: String,
        /// Its shape, by the configuration.
        shape: Vec<usize>,
        /// The family.
        family: Family,
    },
    /// Another shape than the configuration says.
    #[error("tensor '{name}' is {got:?}, by config.json it is {expected:?}; weights and config.json are of two models")]
    Shape {
        /// The tensor.
        name: String,
        /// Its shape.
        got: Vec<usize>,
        /// Its shape, by the configuration.
        expected: Vec<usize>,
    },
    /// Not BF16.
    #[error("tensor '{name}' is {got}, weights must be BF16; take the model in BF16")]
    Dtype {
        /// The tensor.
        name: String,
        /// Its type.
        got: Dtype,
    },
    /// Two tensors of one name.
    #[error("tensor '{name}' is there twice; remove one of the files that hold it")]
    Twice {
        /// The tensor.
        name: String,
    },
    /// Tensors that the model would not use: it would not be the model that these weights were made for.
    #[error(
        "{count} tensors that a {family} of this configuration does not have, first '{first}'; config.json is of \
         another model, or leaves out what these are for"
    )]
    LeftOver {
        /// How many.
        count: usize,
        /// The first by name.
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
/// Names begin with `model.`, or without it if the checkpoint is of the model without its head. A tied model's head is
/// its embedding, unless it brings a head of its own. Frequencies of the rotary embedding, which old checkpoints hold,
/// are passed over.
///
/// # Errors
/// A tensor is missing, there twice, of another shape or type, or left over.
pub fn bind<'a>(
    config: &ModelConfig,
    tensors: impl IntoIterator<Item = TensorHeader<'a>>,
) -> Result<ModelWeights, BindError> {
    let mut left = BTreeMap::new();
    for tensor in tensors {
        if left.insert(tensor.name, tensor).is_some() {
            return Err(BindError::Twice { name: tensor.name.into() });
        }
    }
    left.retain(|name, _| !name.ends_with(".rotary_emb.inv_freq"));
    let prefix = if left.keys().any(|name| name.starts_with("model.")) { "model." } else { "" };
    let mut binder = Binder { family: config.family, left };
    let [vocab, hidden] = [config.vocab, config.hidden];
    let (embed, head) = (format!("{prefix}embed_tokens.weight"), "lm_head.weight".to_owned());
    // A tied model may have either, or both: then they need not be equal, and transformers keeps both.
    let (has_embed, has_head) = (binder.has(&embed), binder.has(&head));
    let (embed, lm_head) = match (config.tied, has_embed, has_head) {
        (true, false, true) => (head.clone(), head),
        (true, _, false) => (embed.clone(), embed),
        _ => (embed, head),
    };
    let embed = binder.take(embed, &[vocab, hidden])?;
    let lm_head = if lm_head == embed { lm_head } else { binder.take(lm_head, &[vocab, hidden])? };
    let final_norm = binder.take(format!("{prefix}norm.weight"), &[hidden])?;
    let layers = (0..config.layers).map(|layer| binder.layer(config, &format!("{prefix}layers.{layer}.")));
    let layers = layers.collect::<Result<_, _>>()?;
    if let Some(first) = binder.left.keys().next() {
        let (count, first) = (binder.left.len(), (*first).to_owned());
        return Err(BindError::LeftOver { count, first, family: config.family });
    }
    Ok(ModelWeights { embed, layers, final_norm, lm_head })
}

impl ModelWeights {
    /// The names that [`bind`] would look for, where no tensors are at hand.
    pub fn named(config: &ModelConfig) -> Self {
        let layer = |layer: u32| {
            let name = |name: &str| format!("model.layers.{layer}.{name}");
            let some = |has: bool, of: &str| has.then(|| name(of));
            LayerWeights {
                input_norm: name("input_layernorm.weight"),
                q: name("self_attn.q_proj.weight"),
                k: name("self_attn.k_proj.weight"),
                v: name("self_attn.v_proj.weight"),
                o: name("self_attn.o_proj.weight"),
                post_norm: name("post_attention_layernorm.weight"),
                mlp: match config.mixture {
                    None => MlpWeights::Dense(gated(config.family, name("mlp."))),
                    Some(mixture) => {
                        let block = name(block_of(config.family));
                        let one = |expert| gated(config.family, format!("{block}experts.{expert}."));
                        MlpWeights::Mixture {
                            router: format!("{block}gate.weight"),
                            experts: ExpertWeights::Each((0..mixture.experts).map(one).collect()),
                        }
                    }
                },
                q_bias: some(config.bias.qkv, "self_attn.q_proj.bias"),
                k_bias: some(config.bias.qkv, "self_attn.k_proj.bias"),
                v_bias: some(config.bias.qkv, "self_attn.v_proj.bias"),
                q_norm: some(config.qk_norm, "self_attn.q_norm.weight"),
                k_norm: some(config.qk_norm, "self_attn.k_norm.weight"),
            }
        };
        let embed = "model.embed_tokens.weight".to_owned();
        let lm_head = if config.tied { embed.clone() } else { "lm_head.weight".to_owned() };
        let layers = (0..config.layers).map(layer).collect();
        Self { embed, layers, final_norm: "model.norm.weight".to_owned(), lm_head }
    }

    /// The weights of a bundle, as [`bind`] finds them.
    ///
    /// Of the files that [`Bundle::is_of_model`] names: some models bring the same weights once more.
    ///
    /// # Errors
    /// As [`bind`].
    pub fn of_bundle(config: &ModelConfig, bundle: &Bundle) -> Result<Self, BindError> {
        let tensors = bundle.tensors().filter(|tensor| bundle.is_of_model(tensor.file()));
        bind(config, tensors.map(|tensor| tensor.entry().into()))
    }
}

/// Where a family's checkpoints have router and experts of a layer.
fn block_of(family: Family) -> &'static str {
    if family == Family::Mixtral { "block_sparse_moe." } else { "mlp." }
}

/// The names of a gated MLP that begin so.
fn gated(family: Family, prefix: String) -> GatedWeights {
    let [gate, up, down] =
        if family == Family::Mixtral { ["w1", "w3", "w2"] } else { ["gate_proj", "up_proj", "down_proj"] };
    let name = |name: &str| format!("{prefix}{name}.weight");
    GatedWeights { gate: name(gate), up: name(up), down: name(down) }
}

/// What was not used yet.
struct Binder<'a> {
    family: Family,
    left: BTreeMap<&'a str, TensorHeader<'a>>,
}

impl Binder<'_> {
    fn has(&self, name: &str) -> bool {
        self.left.contains_key(name)
    }

    fn take(&mut self, name: String, shape: &[u32]) -> Result<String, BindError> {
        let expected: Vec<usize> = shape.iter().map(|&extent| extent as usize).collect();
        let Some(tensor) = self.left.remove(name.as_str()) else {
            return Err(BindError::Missing { name, shape: expected, family: self.family });
        };
        if tensor.shape != expected {
            return Err(BindError::Shape { name, got: tensor.shape.into(), expected });
        }
        if tensor.dtype != Dtype::Bf16 {
            return Err(BindError::Dtype { name, got: tensor.dtype });
        }
        Ok(name)
    }

    fn gated(&mut self, config: &ModelConfig, names: GatedWeights) -> Result<GatedWeights, BindError> {
        let (wide, narrow) = ([config.intermediate, config.hidden], [config.hidden, config.intermediate]);
        Ok(GatedWeights {
            gate: self.take(names.gate, &wide)?,
            up: self.take(names.up, &wide)?,
            down: self.take(names.down, &narrow)?,
        })
    }

    /// Router and experts: stacks, as transformers 5 holds them in memory, or tensors of each, as checkpoints do.
    fn mixture(&mut self, config: &ModelConfig, mixture: Mixture, prefix: &str) -> Result<MlpWeights, BindError> {
        let (hidden, intermediate, experts) = (config.hidden, config.intermediate, mixture.experts);
        let stack = format!("{prefix}mlp.experts.gate_up_proj");
        let block = if self.has(&stack) { "mlp." } else { block_of(config.family) };
        let router = self.take(format!("{prefix}{block}gate.weight"), &[experts, hidden])?;
        let experts = if self.has(&stack) {
            let down = format!("{prefix}mlp.experts.down_proj");
            ExpertWeights::Stacked {
                gate_up: self.take(stack, &[experts, 2 * intermediate, hidden])?,
                down: self.take(down, &[experts, hidden, intermediate])?,
            }
        } else {
            let one = |expert| gated(config.family, format!("{prefix}{block}experts.{expert}."));
            ExpertWeights::Each((0..experts).map(|expert| self.gated(config, one(expert))).collect::<Result<_, _>>()?)
        };
        Ok(MlpWeights::Mixture { router, experts })
    }

    fn layer(&mut self, config: &ModelConfig, prefix: &str) -> Result<LayerWeights, BindError> {
        let (hidden, head_dim) = (config.hidden, config.head_dim);
        // Both products are at most 2^24: the configuration was checked.
        let (q, kv) = (config.heads * head_dim, config.kv_heads * head_dim);
        let mlp = match config.mixture {
            None => MlpWeights::Dense(self.gated(config, gated(config.family, format!("{prefix}mlp.")))?),
            Some(mixture) => self.mixture(config, mixture, prefix)?,
        };
        let mut take = |name: &str, shape: &[u32]| self.take(format!("{prefix}{name}"), shape);
        let mut layer = LayerWeights {
            input_norm: take("input_layernorm.weight", &[hidden])?,
            q: take("self_attn.q_proj.weight", &[q, hidden])?,
            k: take("self_attn.k_proj.weight", &[kv, hidden])?,
            v: take("self_attn.v_proj.weight", &[kv, hidden])?,
            o: take("self_attn.o_proj.weight", &[hidden, q])?,
            post_norm: take("post_attention_layernorm.weight", &[hidden])?,
            mlp,
            q_bias: None,
            k_bias: None,
            v_bias: None,
            q_norm: None,
            k_norm: None,
        };
        if config.bias.qkv {
            layer.q_bias = Some(take("self_attn.q_proj.bias", &[q])?);
            layer.k_bias = Some(take("self_attn.k_proj.bias", &[kv])?);
            layer.v_bias = Some(take("self_attn.v_proj.bias", &[kv])?);
        }
        if config.qk_norm {
            layer.q_norm = Some(take("self_attn.q_norm.weight", &[head_dim])?);
            layer.k_norm = Some(take("self_attn.k_norm.weight", &[head_dim])?);
        }
        Ok(layer)
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

    /// What a checkpoint of this configuration holds.
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
                if config.qk_norm && name != "v" {
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
            assert_eq!(weights.final_norm, "model.norm.weight");
            let last = &weights.layers[1];
            assert_eq!(last.input_norm, "model.layers.1.input_layernorm.weight");
            assert_eq!(last.post_norm, "model.layers.1.post_attention_layernorm.weight");
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

    /// Whatever single tensor is taken away, renamed, or of another shape or type: it is named.
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
                // Without any layer of the prefix the names are others; the listing is long enough for that not to
                // happen.
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
            "9 tensors that a llama of this configuration does not have, first \
             'model.layers.1.input_layernorm.weight'; config.json is of another model, or leaves out what these are for"
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
        assert_eq!(both.lm_head, "lm_head.weight", "a head of its own is used");
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
