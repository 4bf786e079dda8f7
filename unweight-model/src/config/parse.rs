//! Maps keys to fields, with the defaults of transformers.

use std::sync::Arc;

use half::bf16;
use serde_json::Value;

use super::{
    Activation, Bias, CONFIG_FILE, ConfigError, Factors, Family, GENERATION_FILE, GenerationDefaults, Mixture,
    ModelConfig, QkNorm, Scoring, SharedExpert, SoftCaps,
    families::{
        BiasKeys, CapKeys, ExpertKeys, ExpertLayers, FAMILIES, FactorKeys, Features, LongRopeKeys, RopeKeys,
        SharedKeys, Windows,
    },
    fields::{EXTENT_MAX, Fields, excerpt},
};
use crate::rope::{Rope, RopeKind};

/// The maximum number of layers: a list of windows has an entry for each.
const LAYERS_MAX: u32 = 65_536;
/// The default of `sliding_window` for Qwen and Gemma.
const WINDOW: u32 = 4096;
/// The default of `max_window_layers` for Qwen: layers from this one on have the window.
const WINDOW_FROM: u32 = 28;
/// The number of experts that a SparseMixer chooses.
const SPARSE_MIXER_TOP_K: u32 = 2;
/// The default of `router_jitter_noise`.
const ROUTER_JITTER_NOISE: f64 = 0.01;
/// The maximum number of experts.
const EXPERTS_MAX: u32 = 65_536;

pub(super) fn model(config: &Value, generation_config: Option<&Value>) -> Result<ModelConfig, ConfigError> {
    let root = Fields::new(CONFIG_FILE, config)?;
    let (features, fields) = family(root)?;
    let family = features.family;
    reject_unsupported(root, family)?;
    reject_unsupported(fields, family)?;
    let defaults = &features.defaults;
    let vocab = fields.extent("vocab_size", defaults.vocab)?;
    let hidden = fields.extent("hidden_size", defaults.hidden)?;
    let layers = fields.extent("num_hidden_layers", defaults.layers)?;
    if layers > LAYERS_MAX {
        return Err(fields.out_of_range("num_hidden_layers", format!("at most {LAYERS_MAX}")));
    }
    let heads = fields.extent("num_attention_heads", defaults.heads)?;
    // A null differs from an absent key: in every family it means as many as query heads.
    let kv_heads = match fields.get("num_key_value_heads") {
        None => defaults.kv_heads.unwrap_or(heads),
        Some(_) => fields.optional_extent("num_key_value_heads")?.unwrap_or(heads),
    };
    if !heads.is_multiple_of(kv_heads) {
        let limit = format!("a multiple of num_key_value_heads ({kv_heads})");
        return Err(fields.out_of_range("num_attention_heads", limit));
    }
    let head_dim = head_dim(fields, hidden, heads, defaults.head_dim)?;
    let max_positions = fields.extent("max_position_embeddings", defaults.max_positions)?;
    let eps = fields.positive(defaults.eps_key)?.unwrap_or(defaults.eps) as f32;
    let generation = generation_config.map(|value| Fields::new(GENERATION_FILE, value)).transpose()?;
    let eos_of = |fields: Fields| fields.tokens("eos_token_id", vocab);
    let known_ids = |key| generation.map(|fields| fields.known_tokens(key, vocab)).transpose().map(Option::flatten);
    // The generation configuration takes precedence. A null or an absent key there leaves the value of the model, and
    // so do ids outside the vocabulary: a model runs without these.
    let eos = match known_ids("eos_token_id")? {
        Some(eos) => eos,
        None if root.get("eos_token_id").is_some() => eos_of(root)?.unwrap_or_default(),
        None if fields.get("eos_token_id").is_some() => eos_of(fields)?.unwrap_or_default(),
        None => defaults.eos.iter().copied().filter(|&token| token < vocab).collect(),
    };
    let bos_of = |fields: Fields| {
        let tokens = fields.tokens("bos_token_id", vocab);
        tokens.map(|list| list.and_then(|list| list.first().copied()))
    };
    let bos = match known_ids("bos_token_id")? {
        Some(bos) => bos.first().copied(),
        None if fields.get("bos_token_id").is_some() => bos_of(fields)?,
        None => defaults.bos.filter(|&token| token < vocab),
    };
    let intermediate = match features.experts {
        None => fields.extent("intermediate_size", defaults.intermediate)?,
        Some(ExpertKeys { intermediate: key, layers: ExpertLayers::All, .. }) => {
            fields.extent(key, defaults.intermediate)?
        }
        Some(ExpertKeys { intermediate: key, layers: ExpertLayers::AfterDense { intermediate, .. }, .. }) => {
            fields.extent(key, intermediate)?
        }
    };
    let rotated = rotated(fields, features, layers)?;
    let (rope, local_rope) = ropes(fields, features, head_dim, max_positions)?;
    Ok(ModelConfig {
        family,
        vocab,
        hidden,
        layers,
        mtp_layers: match features.mtp_layers {
            Some(default) => count(fields, "num_nextn_predict_layers", default)?,
            None => 0,
        },
        heads,
        kv_heads,
        head_dim,
        intermediate,
        mixture: mixture(fields, features, (layers, hidden), intermediate)?,
        norm: features.norm,
        eps,
        parallel: features.parallel,
        factors: factors(fields, features.factors, hidden)?,
        soft_caps: soft_caps(fields, features.soft_caps)?,
        rope,
        local_rope,
        window: windows(fields, features, &rotated)?,
        rotated,
        max_positions,
        tied: fields.flag("tie_word_embeddings", defaults.tied)?,
        bias: bias(fields, features)?,
        qk_norm: match features.qk_norm_key {
            Some(key) if !fields.flag(key, false)? => QkNorm::None,
            _ => features.qk_norm,
        },
        act: act(fields, features)?,
        eos,
        bos,
        generation: generation.map(|fields| sampling(fields, vocab)).transpose()?.unwrap_or_default(),
    })
}

/// Returns the family, and the object that contains its keys.
fn family(fields: Fields<'_>) -> Result<(&'static Features, Fields<'_>), ConfigError> {
    let supported = || Family::model_types().collect::<Vec<_>>().join(", ");
    let name =
        fields.text("model_type")?.ok_or_else(|| fields.missing("model_type", format!("one of {}", supported())))?;
    if let Some(features) = FAMILIES.iter().find(|features| features.name == name) {
        return Ok((features, fields));
    }
    let Some(features) = FAMILIES.iter().find(|features| features.part_of == Some(name)) else {
        return Err(fields.unsupported("model_type", format!("supported values are {}", supported())));
    };
    let text = fields.object("text_config", "text_config.")?;
    let text = text.ok_or_else(|| fields.missing("text_config", "the configuration of the text model"))?;
    Ok((features, text))
}

/// Rejects settings that change what a model computes and are not supported.
fn reject_unsupported(fields: Fields, family: Family) -> Result<(), ConfigError> {
    let reasons = [
        ("quantization_config", "use the BF16 model without quantization"),
        ("per_layer_config", "every layer must have the same shape"),
        ("clip_qkv", "queries, keys and values must not be clipped (null)"),
    ];
    // The configuration of a bundle: its weights are BF16, bit for bit.
    let is_bundle = |value: &Value| value["quant_method"] == "unweight";
    for (key, instead) in reasons {
        if fields.non_null(key).is_some_and(|value| !is_bundle(value)) {
            return Err(fields.unsupported(key, instead));
        }
    }
    // Mixtures of experts are recognized by the keys with the number of experts.
    let is_mixture = family.features().experts.is_some();
    for key in ["num_local_experts", "num_experts", "n_routed_experts"] {
        if !is_mixture && fields.non_null(key).is_some_and(|value| value.as_u64() != Some(0)) {
            let mixtures = FAMILIES.iter().filter(|features| features.experts.is_some());
            let mixtures = mixtures.map(|features| features.name).collect::<Vec<_>>().join(", ");
            return Err(fields.unsupported(key, format!("the supported mixtures of experts are {mixtures}")));
        }
    }
    if fields.flag("use_bidirectional_attention", false)? {
        return Err(fields.unsupported("use_bidirectional_attention", "attention must be causal (false)"));
    }
    if fields.flag("is_encoder_decoder", false)? {
        return Err(fields.unsupported("is_encoder_decoder", "use a decoder-only model"));
    }
    Ok(())
}

/// Returns a number that may be 0. A null means 0.
fn count(fields: Fields, key: &'static str, default: u32) -> Result<u32, ConfigError> {
    let Some(value) = fields.get(key) else { return Ok(default) };
    let number = if value.is_null() { Some(0) } else { value.as_u64() };
    let number = number.and_then(|number| u32::try_from(number).ok()).filter(|number| *number <= EXTENT_MAX);
    number.ok_or_else(|| fields.wrong_type(key, "an integer of at least 0"))
}

/// Returns the experts of families that have some, next to this number of layers and this width of the residual stream.
fn mixture(
    fields: Fields,
    features: &Features,
    (layers, hidden): (u32, u32),
    intermediate: u32,
) -> Result<Option<Mixture>, ConfigError> {
    let Some(keys) = &features.experts else { return Ok(None) };
    let [first, other] = keys.count;
    let key = if fields.get(first).is_some() { first } else { other };
    let experts = fields.extent(key, keys.experts)?;
    let shared = shared_expert(fields, keys, intermediate)?;
    // The matrices of all experts are concatenated by rows.
    let widest = hidden.max(intermediate.saturating_mul(2));
    let all = experts.saturating_add(shared.map_or(0, |shared| shared.parts));
    if experts > EXPERTS_MAX || all.checked_mul(widest).is_none_or(|rows| rows > EXTENT_MAX) {
        let limit =
            format!("at most {EXPERTS_MAX}, and {EXTENT_MAX} when multiplied by the rows of an expert ({widest})");
        return Err(fields.out_of_range(key, limit));
    }
    let top_k = fields.extent("num_experts_per_tok", keys.top_k)?;
    if top_k > experts {
        return Err(fields.out_of_range("num_experts_per_tok", format!("at most {key} ({experts})")));
    }
    if keys.scoring == Scoring::SparseMixer && top_k != SPARSE_MIXER_TOP_K {
        let reason = format!("the router of {} chooses {SPARSE_MIXER_TOP_K} experts", features.name);
        return Err(fields.unsupported("num_experts_per_tok", reason));
    }
    let dense_layers = dense_layers(fields, keys, layers)?;
    let dense_intermediate =
        if dense_layers > 0 { fields.extent("intermediate_size", features.defaults.intermediate)? } else { 0 };
    let (normalized, cutoff) = match (keys.scoring, keys.normalized_key) {
        (Scoring::SparseMixer, _) => (false, cutoff(fields)?),
        (_, None) => (true, 0.0),
        (_, Some(default)) => (fields.flag("norm_topk_prob", default)?, 0.0),
    };
    let factor = if keys.factor_key { fields.ratio("routed_scaling_factor")?.unwrap_or(1.0) as f32 } else { 1.0 };
    let (scoring, rounded) = (keys.scoring, keys.rounded);
    Ok(Some(Mixture {
        experts,
        top_k,
        scoring,
        normalized,
        rounded,
        factor,
        cutoff,
        dense_layers,
        dense_intermediate,
        shared,
    }))
}

/// Returns the cutoff of a SparseMixer: twice the noise that its logits had in training.
fn cutoff(fields: Fields) -> Result<f32, ConfigError> {
    let noise = fields.number_where("router_jitter_noise", "from 0 to 1", |noise| (0.0..=1.0).contains(&noise))?;
    Ok((2.0 * noise.unwrap_or(ROUTER_JITTER_NOISE)) as f32)
}

/// Returns the number of first layers without experts. Rejects other layers without, and groups of experts.
fn dense_layers(fields: Fields, keys: &ExpertKeys, layers: u32) -> Result<u32, ConfigError> {
    let ExpertLayers::AfterDense { first, .. } = keys.layers else {
        let reason = "every layer must have experts";
        if fields.non_null("mlp_only_layers").is_some_and(|list| list.as_array().is_none_or(|list| !list.is_empty())) {
            return Err(fields.unsupported("mlp_only_layers", reason));
        }
        if fields.extent("decoder_sparse_step", 1)? != 1 {
            return Err(fields.unsupported("decoder_sparse_step", reason));
        }
        return Ok(0);
    };
    if fields.extent("moe_layer_freq", 1)? != 1 {
        return Err(fields.unsupported("moe_layer_freq", "every layer after the dense ones must have experts (1)"));
    }
    for key in ["n_group", "topk_group"] {
        if count(fields, key, 1)? > 1 {
            return Err(fields.unsupported(key, "experts must be chosen among all (1)"));
        }
    }
    let scoring = match keys.scoring {
        Scoring::Softmax => "softmax",
        Scoring::Sigmoid => "sigmoid",
        Scoring::SparseMixer => "sparsemixer",
    };
    if fields.text("scoring_func")?.is_some_and(|name| name != scoring) {
        return Err(fields.unsupported("scoring_func", format!("the only supported value is {scoring}")));
    }
    let dense = count(fields, "first_k_dense_replace", first)?;
    if dense >= layers {
        let limit = format!("below num_hidden_layers ({layers})");
        return Err(fields.out_of_range("first_k_dense_replace", limit));
    }
    Ok(dense)
}

/// Returns the shared expert of a mixture whose experts have this width.
fn shared_expert(fields: Fields, keys: &ExpertKeys, width: u32) -> Result<Option<SharedExpert>, ConfigError> {
    let (key, default) = match keys.shared {
        SharedKeys::None => return Ok(None),
        SharedKeys::Gated(default) => ("shared_expert_intermediate_size", default),
        SharedKeys::Merged => ("shared_intermediate_size", 0),
        SharedKeys::Parts(default) => {
            let (key, limit) = ("n_shared_experts", EXTENT_MAX / width);
            return match count(fields, key, default)? {
                0 => Ok(None),
                parts if parts > limit => Err(fields.out_of_range(key, format!("at most {limit}"))),
                parts => Ok(Some(SharedExpert { parts, gated: false })),
            };
        }
    };
    // A width of 0 means that there is none.
    if default == 0 && fields.get(key).is_none_or(|value| value.as_u64() == Some(0)) {
        return Ok(None);
    }
    let shared = fields.extent(key, default)?;
    if !shared.is_multiple_of(width) {
        let limit = format!("a multiple of {} ({width})", keys.intermediate);
        return Err(fields.out_of_range(key, limit));
    }
    Ok(Some(SharedExpert { parts: shared / width, gated: matches!(keys.shared, SharedKeys::Gated(_)) }))
}

fn head_dim(fields: Fields, hidden: u32, heads: u32, default: Option<u32>) -> Result<u32, ConfigError> {
    let configured = match (fields.get("head_dim"), default) {
        (None, default) => default,
        // For Qwen3 a null has no defined meaning here.
        (Some(_), Some(_)) => Some(fields.extent("head_dim", 0)?),
        (Some(_), None) => fields.optional_extent("head_dim")?,
    };
    let head_dim = match configured {
        Some(head_dim) => head_dim,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            return Err(fields.out_of_range("hidden_size", format!("a multiple of num_attention_heads ({heads})")));
        }
    };
    if head_dim % 2 != 0 {
        let limit = "even, because the elements of a head are rotated in pairs".to_owned();
        return Err(fields.out_of_range("head_dim", limit));
    }
    if heads.checked_mul(head_dim).is_none_or(|width| width > EXTENT_MAX) {
        let limit = format!("at most {EXTENT_MAX} when multiplied by head_dim ({head_dim})");
        return Err(fields.out_of_range("num_attention_heads", limit));
    }
    Ok(head_dim)
}

fn bias(fields: Fields, features: &Features) -> Result<Bias, ConfigError> {
    if features.bias == BiasKeys::WithOutputAndMlp && fields.flag("mlp_bias", false)? {
        return Err(fields.unsupported("mlp_bias", "the MLP cannot have a bias"));
    }
    let (qkv, o) = match features.bias {
        BiasKeys::None => (false, false),
        BiasKeys::Always => (true, false),
        BiasKeys::Qkv(key, default) => (fields.flag(key, default)?, false),
        BiasKeys::WithOutput | BiasKeys::WithOutputAndMlp => {
            let all = fields.flag("attention_bias", false)?;
            (all, all)
        }
    };
    let head = features.head_bias_key.map_or(Ok(false), |key| fields.flag(key, false))?;
    Ok(Bias { qkv, o, mlp: false, head })
}

fn factors(fields: Fields, keys: FactorKeys, hidden: u32) -> Result<Factors, ConfigError> {
    // transformers also accepts factors of 0, with which the logits do not depend on the text.
    let factor = |key| fields.ratio(key).map(|factor| factor.unwrap_or(1.0));
    match keys {
        FactorKeys::None => Ok(Factors::NONE),
        FactorKeys::Multipliers => Ok(Factors {
            embedding: factor("embedding_multiplier")? as f32,
            attention: Some(factor("attention_multiplier")? as f32),
            residual: factor("residual_multiplier")? as f32,
            logits: factor("logits_scaling")?.recip() as f32,
        }),
        FactorKeys::LogitScale(default) => {
            if fields.flag("use_qk_norm", false)? {
                return Err(fields.unsupported("use_qk_norm", "queries and keys must not be normed"));
            }
            Ok(Factors { logits: fields.ratio("logit_scale")?.unwrap_or(default) as f32, ..Factors::NONE })
        }
        FactorKeys::Roots(default) => {
            let scalar = fields.ratio("query_pre_attn_scalar")?.unwrap_or(default);
            let embedding = bf16::from_f64(f64::from(hidden).sqrt()).to_f32();
            Ok(Factors { embedding, attention: Some(scalar.sqrt().recip() as f32), ..Factors::NONE })
        }
    }
}

fn soft_caps(fields: Fields, keys: CapKeys) -> Result<SoftCaps, ConfigError> {
    let cap = |key, default: Option<f64>| match fields.get(key) {
        None => Ok(default.map(|cap| cap as f32)),
        Some(_) => fields.ratio(key).map(|cap| cap.map(|cap| cap as f32)),
    };
    let (scores_key, logits_key) = ("attn_logit_softcapping", "final_logit_softcapping");
    match keys {
        CapKeys::None => Ok(SoftCaps::default()),
        CapKeys::Both(scores, logits) => {
            Ok(SoftCaps { attention: cap(scores_key, Some(scores))?, logits: cap(logits_key, Some(logits))? })
        }
        CapKeys::Logits if fields.non_null(scores_key).is_some() => {
            Err(fields.unsupported(scores_key, "scores must not be capped (null)"))
        }
        CapKeys::Logits => Ok(SoftCaps { attention: None, logits: cap(logits_key, None)? }),
    }
}

fn act(fields: Fields, features: &Features) -> Result<Activation, ConfigError> {
    let key = features.defaults.act_key;
    match fields.text(key)?.unwrap_or(features.defaults.act) {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu_pytorch_tanh" if features.experts.is_none() => Ok(Activation::GeluTanh),
        _ if features.experts.is_some() => Err(fields.unsupported(key, "the only supported value is silu")),
        _ => Err(fields.unsupported(key, "supported values are silu, gelu_pytorch_tanh")),
    }
}

/// Returns which layers have rotary embedding.
fn rotated(fields: Fields, features: &Features, layers: u32) -> Result<Vec<bool>, ConfigError> {
    const KEY: &str = "no_rope_layers";
    if !features.rope.no_rope_layers {
        return Ok(vec![true; layers as usize]);
    }
    let Some(list) = fields.non_null(KEY) else {
        let interval = fields.extent("no_rope_layer_interval", 4)?;
        return Ok((1..=layers).map(|layer| !layer.is_multiple_of(interval)).collect());
    };
    let list = list.as_array().filter(|list| list.iter().all(|value| matches!(value.as_u64(), Some(0 | 1))));
    let list = list.ok_or_else(|| fields.wrong_type(KEY, "a list of 0 (without) and 1 (with rotary embedding)"))?;
    if (list.len() as u64) < u64::from(layers) {
        return Err(fields.out_of_range(KEY, format!("a list of num_hidden_layers ({layers}) entries")));
    }
    Ok(list.iter().take(layers as usize).map(|value| value.as_u64() == Some(1)).collect())
}

/// Returns the attention window of each layer.
fn windows(fields: Fields, features: &Features, rotated: &[bool]) -> Result<Vec<Option<u32>>, ConfigError> {
    let layers = rotated.len();
    let (default, used) = match features.windows {
        Windows::Never => (None, false),
        Windows::Rejected if fields.flag("use_sliding_window", false)? => {
            return Err(fields.unsupported("use_sliding_window", "layers of this family must not have windows (false)"));
        }
        Windows::Rejected => (None, false),
        Windows::Every(default) => (default, true),
        Windows::Switched { .. } => (Some(WINDOW), fields.flag("use_sliding_window", false)?),
        Windows::WithoutRope => (None, fields.flag("use_sliding_window", false)?),
        Windows::AllBut { .. } => (Some(WINDOW), true),
    };
    let window = match (fields.get("sliding_window"), features.windows) {
        (None, _) | (_, Windows::Rejected) => default,
        (Some(_), Windows::AllBut { .. }) => Some(fields.extent("sliding_window", WINDOW)?),
        (Some(_), _) => fields.optional_extent("sliding_window")?,
    };
    let window = window.filter(|_| used);
    // The first layer with the window. Unlike other sizes it may be 0, which means every layer.
    let from = match fields.get("max_window_layers") {
        _ if features.windows != (Windows::Switched { from_key: true }) => 0,
        None => u64::from(WINDOW_FROM),
        Some(value) => {
            value.as_u64().ok_or_else(|| fields.wrong_type("max_window_layers", "an integer of at least 0"))?
        }
    };
    let every = match features.windows {
        Windows::AllBut { every, from_key: true } => fields.extent("sliding_window_pattern", every)?,
        Windows::AllBut { every, from_key: false } => every,
        _ => 1,
    };
    let Some(types) = fields.non_null("layer_types") else {
        let has_window = |(layer, rotated): (u64, &bool)| match features.windows {
            Windows::WithoutRope => !rotated,
            Windows::AllBut { .. } => !(layer + 1).is_multiple_of(every.into()),
            _ => layer >= from,
        };
        return Ok((0..).zip(rotated).map(|layer| window.filter(|_| has_window(layer))).collect());
    };
    let types = types.as_array().ok_or_else(|| fields.wrong_type("layer_types", "a list of strings"))?;
    if types.len() != layers {
        return Err(fields.out_of_range("layer_types", format!("a list of num_hidden_layers ({layers}) entries")));
    }
    let all_windowed = matches!(features.windows, Windows::Every(_) | Windows::Switched { from_key: false });
    let name = features.name;
    let window_of = |value: &Value| match value.as_str() {
        Some("full_attention") if all_windowed && window.is_some() => Err(fields.unsupported(
            "layer_types",
            format!("with sliding_window, every layer of {name} must be sliding_attention"),
        )),
        Some("full_attention") => Ok(None),
        Some("sliding_attention") if matches!(features.windows, Windows::Never | Windows::Rejected) => {
            Err(fields.unsupported("layer_types", format!("{name} supports only full_attention")))
        }
        Some("sliding_attention") if window.is_none() => {
            Err(fields.unsupported("layer_types", "sliding_attention requires sliding_window and use_sliding_window"))
        }
        Some("sliding_attention") => Ok(window),
        _ => {
            let which = excerpt(value);
            Err(fields.unsupported("layer_types", format!("{which} is neither full_attention nor sliding_attention")))
        }
    };
    types.iter().map(window_of).collect()
}

/// Returns the rotary embedding, and that of layers with a window if it differs; `rope_parameters` then contains both.
///
/// `rope_scaling` takes precedence over `rope_parameters`, as in transformers; `rope_theta` and `partial_rotary_factor`
/// may be in either object or next to them.
fn ropes(
    top: Fields,
    features: &Features,
    head_dim: u32,
    max_positions: u32,
) -> Result<(Rope, Option<Rope>), ConfigError> {
    let scaling = top.object("rope_scaling", "rope_scaling.")?;
    let parameters = top.object("rope_parameters", "rope_parameters.")?;
    let of = |object, theta| rope((top, object), features.rope, theta, (head_dim, max_positions));
    let theta = ("rope_theta", features.defaults.theta);
    let Some(local) = features.rope.local else { return Ok((of(scaling.or(parameters), theta)?, None)) };
    let nested = |key, prefix| parameters.map_or(Ok(None), |both| both.object(key, prefix));
    let full = nested("full_attention", "rope_parameters.full_attention.")?;
    let windowed = nested("sliding_attention", "rope_parameters.sliding_attention.")?;
    Ok((of(scaling.or(full), theta)?, Some(of(windowed, ("rope_local_base_freq", local))?)))
}

/// Parses a rotary embedding from an object and the keys next to it; the base is `(key next to the object, default)`.
fn rope(
    (top, object): (Fields, Option<Fields>),
    RopeKeys { pairs, partial, longrope, .. }: RopeKeys,
    (theta_key, theta): (&str, f64),
    (head_dim, max_positions): (u32, u32),
) -> Result<Rope, ConfigError> {
    let [mut theta, mut share] = [theta, partial.unwrap_or(1.0)];
    // Keys inside the object take precedence.
    for (fields, key) in [Some((top, theta_key)), object.map(|object| (object, "rope_theta"))].into_iter().flatten() {
        let base = fields.number_where(key, "above 1 and within the range of f32", |t| t > 1.0)?;
        theta = base.unwrap_or(theta);
        let rotary_factor =
            fields.number_where("partial_rotary_factor", "above 0 and at most 1", |share| share > 0.0 && share <= 1.0);
        share = rotary_factor?.unwrap_or(share);
        if partial.is_none() && share != 1.0 {
            return Err(fields.unsupported("partial_rotary_factor", "every element of a head must be rotated (1.0)"));
        }
    }
    // Rounded as in transformers.
    let dim = (f64::from(head_dim) * share) as u32;
    if dim == 0 || !dim.is_multiple_of(2) {
        let limit = format!("a share of head_dim ({head_dim}) with an even number of elements, not {dim}");
        let nested = object.filter(|fields| fields.non_null("partial_rotary_factor").is_some());
        return Err(nested.unwrap_or(top).out_of_range("partial_rotary_factor", limit));
    }
    let Some(fields) = object else { return Ok(Rope { theta, dim, pairs, kind: RopeKind::Default }) };
    if let Some(key) = fields.keys().find(|key| key.ends_with("_attention")) {
        return Err(fields.unsupported(key, "every layer must have the same rotary embedding"));
    }
    let key = if fields.non_null("rope_type").is_some() { "rope_type" } else { "type" };
    let required = |key| fields.ratio(key)?.ok_or_else(|| fields.missing(key, "a number above 0"));
    // The model's own key takes precedence over the one inside the object (Phi's spelling, which transformers honours
    // for all families). Phi has a default for it.
    let original = || match (top.optional_extent("original_max_position_embeddings")?, longrope) {
        (Some(original), _) | (None, LongRopeKeys::Original(original)) => Ok(original),
        (None, _) => fields.extent("original_max_position_embeddings", max_positions),
    };
    let kind = match (fields.text(key)?.unwrap_or("default"), longrope) {
        ("default", _) => RopeKind::Default,
        // The first Phi-3 files contain these names.
        ("longrope" | "su" | "yarn", LongRopeKeys::Original(_)) | ("longrope", LongRopeKeys::Mscales) => {
            long_rope(fields, longrope, dim, original()?, max_positions)?
        }
        (_, LongRopeKeys::Original(_) | LongRopeKeys::Mscales) => {
            return Err(fields.unsupported(key, "supported values are default, longrope"));
        }
        ("linear", _) => RopeKind::Linear { factor: required("factor")? },
        ("llama3", _) => {
            let (low, high) = (required("low_freq_factor")?, required("high_freq_factor")?);
            if high as f32 <= low as f32 {
                return Err(fields.out_of_range("high_freq_factor", format!("above low_freq_factor ({low})")));
            }
            RopeKind::Llama3 { factor: required("factor")?, low, high, original: original()? }
        }
        ("yarn", _) => yarn(fields, original()?, max_positions)?,
        _ => return Err(fields.unsupported(key, "supported values are default, linear, llama3, yarn")),
    };
    Ok(Rope { theta, dim, pairs, kind })
}

/// Parses LongRoPE: a factor for each pair of elements, for short contexts and for long ones.
fn long_rope(
    fields: Fields,
    keys: LongRopeKeys,
    dim: u32,
    original: u32,
    max_positions: u32,
) -> Result<RopeKind, ConfigError> {
    let factors = |key| {
        let limit = format!("a list of {} numbers from 0.000001 to 1000000", dim / 2);
        let list = fields.non_null(key).ok_or_else(|| fields.missing(key, limit.clone()))?;
        let list = list.as_array().ok_or_else(|| fields.wrong_type(key, "a list of numbers"))?;
        let number =
            |value: &Value| value.as_f64().filter(|number| (1e-6..=1e6).contains(number)).map(|number| number as f32);
        let numbers = list.iter().map(number).collect::<Option<Arc<[f32]>>>();
        numbers.filter(|list| list.len() == dim as usize / 2).ok_or_else(|| fields.out_of_range(key, limit))
    };
    let attention_factors = match keys {
        LongRopeKeys::Mscales => {
            let mscale = |key| fields.ratio(key)?.ok_or_else(|| fields.missing(key, "a number above 0"));
            [mscale("short_mscale")?, mscale("long_mscale")?]
        }
        _ => [attention_factor(fields, original, max_positions)?; 2],
    };
    Ok(RopeKind::Long { short: factors("short_factor")?, long: factors("long_factor")?, attention_factors, original })
}

/// Returns the factor of cos and sin of LongRoPE, by default from the ratio of the contexts.
fn attention_factor(fields: Fields, original: u32, max_positions: u32) -> Result<f64, ConfigError> {
    let factor = fields.ratio("factor")?.unwrap_or(f64::from(max_positions) / f64::from(original));
    match fields.ratio("attention_factor")? {
        Some(factor) => Ok(factor),
        None if factor <= 1.0 => Ok(1.0),
        None if original < 2 => {
            let limit = "at least 2, or attention_factor must be set".into();
            Err(fields.out_of_range("original_max_position_embeddings", limit))
        }
        None => Ok((1.0 + factor.ln() / f64::from(original).ln()).sqrt()),
    }
}

fn yarn(fields: Fields, original: u32, max_positions: u32) -> Result<RopeKind, ConfigError> {
    // A null means the ratio of the two contexts; an absent key is an error in transformers, too.
    let factor = match fields.ratio("factor")? {
        Some(factor) => factor,
        None if fields.get("factor").is_some() => f64::from(max_positions) / f64::from(original),
        None => return Err(fields.missing("factor", "a number above 0")),
    };
    // Python's `or` treats zero as absent.
    let number = |key| if fields.number(key)? == Some(0.0) { Ok(None) } else { fields.ratio(key) };
    let mscale = |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
    let attention_factor = match (fields.ratio("attention_factor")?, number("mscale")?, number("mscale_all_dim")?) {
        (Some(factor), ..) => factor,
        (None, Some(numerator), Some(denominator)) => mscale(numerator) / mscale(denominator),
        _ => mscale(1.0),
    };
    Ok(RopeKind::Yarn {
        factor,
        beta_fast: number("beta_fast")?.unwrap_or(32.0),
        beta_slow: number("beta_slow")?.unwrap_or(1.0),
        attention_factor,
        original,
        truncate: fields.flag("truncate", true)?,
    })
}

fn sampling(fields: Fields, vocab: u32) -> Result<GenerationDefaults, ConfigError> {
    let defaults = GenerationDefaults::default();
    let mut ignored = ignored(fields);
    let mut ignore = |key: &str| ignored.extend(fields.get(key).map(|value| format!("{key} {}", excerpt(value))));
    for key in ["eos_token_id", "bos_token_id"] {
        let listed = fields.non_null(key).map_or(0, |value| value.as_array().map_or(1, Vec::len));
        if fields.known_tokens(key, vocab)?.map_or(0, |valid| valid.len()) < listed {
            ignore(key);
        }
    }
    // A default out of range is ignored, because the model runs without it.
    let mut number = |key, default, is_valid: fn(f64) -> bool| match fields.number_where(key, "in its range", is_valid)
    {
        Err(ConfigError::Range { .. }) => {
            ignore(key);
            Ok(default)
        }
        number => number.map(|number| number.map_or(default, |number| number as f32)),
    };
    let temperature = number("temperature", 1.0, |t| t >= 0.0)?;
    let top_p = number("top_p", defaults.top_p, |share| (0.0..=1.0).contains(&share))?;
    let min_p = number("min_p", defaults.min_p, |share| (0.0..=1.0).contains(&share))?;
    let top_k = match fields.non_null("top_k") {
        None => defaults.top_k,
        Some(value) if value.as_i64().is_some_and(|k| k <= 0) => {
            if value.as_i64() != Some(0) {
                ignore("top_k");
            }
            None
        }
        Some(_) => fields.optional_extent("top_k")?,
    };
    let do_sample = fields.flag("do_sample", defaults.do_sample)?;
    Ok(GenerationDefaults { do_sample, temperature, top_k, top_p, min_p, ignored })
}

/// Returns the unsupported settings of transformers' generation that are not neutral, as `key value`.
fn ignored(fields: Fields) -> Vec<String> {
    let neutral = [
        ("repetition_penalty", 1.0),
        ("encoder_repetition_penalty", 1.0),
        ("typical_p", 1.0),
        ("num_beams", 1.0),
        ("no_repeat_ngram_size", 0.0),
        ("epsilon_cutoff", 0.0),
        ("eta_cutoff", 0.0),
        ("penalty_alpha", 0.0),
        ("guidance_scale", 1.0),
        ("min_length", 0.0),
        ("min_new_tokens", 0.0),
    ];
    let numbers = neutral
        .into_iter()
        .filter(|&(key, neutral)| fields.non_null(key).is_some_and(|value| value.as_f64() != Some(neutral)));
    let lists =
        ["suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id"];
    let set = numbers.map(|(key, _)| key).chain(lists.into_iter().filter(|key| fields.non_null(key).is_some()));
    set.filter_map(|key| fields.get(key).map(|value| format!("{key} {}", excerpt(value)))).collect()
}
