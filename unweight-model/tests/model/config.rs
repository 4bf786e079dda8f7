//! Configurations: defaults, spellings, rejections, and no panic on any JSON.

use proptest::prelude::*;
use serde_json::{Value, json};
use unweight_model::{
    Activation, Bias, ConfigError, Factors, Family, Mixture, ModelConfig, QkNorm, RopeKind, RopePairs, Scoring,
    SharedExpert, SoftCaps,
};

/// Parses a configuration with one change.
fn parse(family: &str, change: Value) -> Result<ModelConfig, ConfigError> {
    let mut config = json!({"model_type": family, "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16});
    config.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
    ModelConfig::from_json(&config, None)
}

fn accepted(family: &str, change: Value) -> ModelConfig {
    parse(family, change.clone()).unwrap_or_else(|error| panic!("{family} {change}: {error}"))
}

#[test]
fn defaults_match_transformers() {
    let defaults: Value = serde_json::from_str(include_str!("../fixtures/defaults.json")).unwrap();
    let defaults = defaults.as_object().unwrap();
    // transformers has no deepseek.
    assert_eq!(defaults.len() + 1, Family::ALL.len());
    for (family, spelled_out) in defaults {
        let (mut spelled_out, mut short) = (spelled_out.clone(), json!({"model_type": family}));
        if family == "glm4_moe" {
            // The default number of heads does not divide the default width, so every checkpoint has this key.
            spelled_out["head_dim"] = json!(128);
            short["head_dim"] = json!(128);
        }
        let config = ModelConfig::from_json(&short, None).unwrap();
        assert_eq!(config, ModelConfig::from_json(&spelled_out, None).unwrap(), "{family}");
        // The script's keys are read: each of these changes the result.
        let has_own_key = ["qwen2_moe", "qwen3_moe", "glm4_moe"].contains(&family.as_str());
        let intermediate = if has_own_key { "moe_intermediate_size" } else { "intermediate_size" };
        for key in ["vocab_size", intermediate, "max_position_embeddings", "num_key_value_heads"] {
            let mut other = spelled_out.clone();
            other[key] = json!(match key {
                "vocab_size" => 300_000,
                "num_key_value_heads" => 1,
                _ => 16,
            });
            assert_ne!(config, ModelConfig::from_json(&other, None).unwrap(), "{family} {key}");
        }
    }
}

#[test]
fn absent_and_null_differ() {
    let of = |family, change| {
        ModelConfig::from_json(
            &{
                let mut config = json!({"model_type": family, "num_attention_heads": 64});
                config.as_object_mut().unwrap().extend(Value::as_object(&change).unwrap().clone());
                config
            },
            None,
        )
    };
    assert_eq!(of("mistral", json!({})).unwrap().kv_heads, 8);
    assert_eq!(of("mistral", json!({"num_key_value_heads": null})).unwrap().kv_heads, 64);
    assert_eq!(of("llama", json!({})).unwrap().kv_heads, 64);
    assert_eq!(of("qwen2", json!({})).unwrap().kv_heads, 32);
    assert_eq!(of("mistral", json!({})).unwrap().window[0], Some(4096));
    assert_eq!(of("mistral", json!({"sliding_window": null})).unwrap().window, [None; 32]);
    assert_eq!(of("qwen3", json!({})).unwrap().head_dim, 128);
    assert_eq!(of("qwen2", json!({"head_dim": null})).unwrap().head_dim, 64);
    assert!(matches!(of("qwen3", json!({"head_dim": null})), Err(ConfigError::Type { .. })));
    assert_eq!(of("llama", json!({"eos_token_id": null})).unwrap().eos, [0; 0]);
    assert_eq!(of("llama", json!({"bos_token_id": null})).unwrap().bos, None);
    assert_eq!(of("llama", json!({})).unwrap().bos, Some(1));
}

#[test]
fn attention_windows_by_layer() {
    let window = |family, change| accepted(family, change).window;
    assert_eq!(window("llama", json!({"sliding_window": 7})), [None; 4], "llama has no windows");
    assert_eq!(window("mistral", json!({"sliding_window": 7})), [Some(7); 4]);
    assert_eq!(window("qwen2", json!({"sliding_window": 7, "max_window_layers": 0})), [None; 4], "not switched on");
    let on = |more: Value| {
        let mut change = json!({"use_sliding_window": true, "sliding_window": 7});
        change.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        change
    };
    assert_eq!(window("qwen2", on(json!({}))), [None; 4], "from layer 28 on");
    assert_eq!(window("qwen3", on(json!({"max_window_layers": 3}))), [None, None, None, Some(7)]);
    assert_eq!(window("qwen3", on(json!({"max_window_layers": 0}))), [Some(7); 4]);
    let types = json!(["sliding_attention", "full_attention", "sliding_attention", "full_attention"]);
    assert_eq!(window("qwen2", on(json!({"layer_types": types}))), [Some(7), None, Some(7), None]);
}

#[test]
fn rotary_embedding_in_every_spelling() {
    let rope = |change| accepted("llama", change).rope;
    assert_eq!(rope(json!({})).theta, 10_000.0);
    assert_eq!(rope(json!({"rope_theta": 5e5})).theta, 5e5);
    let inside = json!({"rope_type": "default", "rope_theta": 3e5});
    assert_eq!(
        rope(json!({"rope_parameters": inside, "rope_theta": 5e5})).theta,
        3e5,
        "the inner key takes precedence"
    );
    assert_eq!(rope(json!({"rope_scaling": null, "rope_parameters": inside})).theta, 3e5);
    assert_eq!(rope(json!({"rope_scaling": {}, "rope_parameters": inside})).theta, 3e5);
    let linear = json!({"type": "linear", "factor": 2});
    let both = rope(json!({"rope_scaling": linear, "rope_parameters": inside, "rope_theta": 5e5}));
    assert_eq!((both.theta, both.kind), (5e5, RopeKind::Linear { factor: 2.0 }), "rope_scaling takes precedence");
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0});
    let kind = |original| RopeKind::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original };
    assert_eq!(rope(json!({"rope_scaling": llama3, "max_position_embeddings": 999})).kind, kind(999));
    let outer = json!({"rope_scaling": llama3, "original_max_position_embeddings": 77});
    assert_eq!(rope(outer).kind, kind(77));
    let yarn = |change: Value| {
        let mut yarn = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100});
        yarn.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        match rope(json!({"rope_scaling": yarn, "max_position_embeddings": 800})).kind {
            RopeKind::Yarn { factor, attention_factor, beta_fast, beta_slow, truncate, .. } => {
                (factor, attention_factor, beta_fast, beta_slow, truncate)
            }
            kind => panic!("{kind:?}"),
        }
    };
    let default_factor = 0.1 * 4f64.ln() + 1.0;
    assert_eq!(yarn(json!({})), (4.0, default_factor, 32.0, 1.0, true));
    assert_eq!(yarn(json!({"factor": null})), (8.0, 0.1 * 8f64.ln() + 1.0, 32.0, 1.0, true));
    assert_eq!(yarn(json!({"attention_factor": 0.5, "mscale": 2.0, "mscale_all_dim": 1.0})).1, 0.5);
    assert_eq!(yarn(json!({"mscale": 1.0, "mscale_all_dim": 1.0})).1, 1.0);
    assert_eq!(yarn(json!({"mscale": 1.0})).1, default_factor, "mscale has no effect alone");
    assert_eq!(
        yarn(json!({"beta_fast": 0, "beta_slow": 2, "truncate": false})),
        (4.0, default_factor, 32.0, 2.0, false)
    );
}

#[test]
fn unsupported_values_are_rejected_by_file_and_key() {
    let cases = [
        (
            "gpt2",
            json!({}),
            "config.json: model_type is \"gpt2\", which is not supported; supported values are llama, mistral,",
        ),
        (
            "llama",
            json!({"quantization_config": {"bits": 4}}),
            "config.json: quantization_config is {\"bits\":4}, which is not supported; use",
        ),
        ("llama", json!({"mlp_bias": true}), "config.json: mlp_bias is true, which is not supported; the MLP"),
        (
            "llama",
            json!({"hidden_act": "gelu"}),
            "config.json: hidden_act is \"gelu\", which is not supported; supported values are silu,",
        ),
        ("llama", json!({"num_local_experts": 8}), "config.json: num_local_experts is 8"),
        ("qwen2", json!({"num_experts": 8}), "config.json: num_experts is 8"),
        ("qwen3_moe", json!({"mlp_only_layers": [0]}), "config.json: mlp_only_layers is [0]"),
        ("qwen3_moe", json!({"decoder_sparse_step": 2}), "config.json: decoder_sparse_step is 2"),
        ("llama", json!({"partial_rotary_factor": 0.5}), "config.json: partial_rotary_factor is 0.5"),
        (
            "llama",
            json!({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
            "config.json: rope_parameters.partial_rotary_factor is 0.5",
        ),
        (
            "llama",
            json!({"rope_scaling": {"type": "dynamic", "factor": 2}}),
            "config.json: rope_scaling.type is \"dynamic\", which is not supported; supported values are default,",
        ),
        (
            "llama",
            json!({"rope_parameters": {"rope_type": "longrope"}}),
            "config.json: rope_parameters.rope_type is \"longrope\"",
        ),
        (
            "llama",
            json!({"rope_parameters": {"full_attention": {}, "sliding_attention": {}}}),
            "config.json: rope_parameters.full_attention is {}",
        ),
        (
            "qwen2",
            json!({"layer_types": ["linear_attention", "full_attention", "full_attention", "full_attention"]}),
            "config.json: layer_types is",
        ),
        (
            "qwen2",
            json!({"layer_types": ["sliding_attention", "full_attention", "full_attention", "full_attention"]}),
            "config.json: layer_types is",
        ),
        (
            "mistral",
            json!({"layer_types": ["sliding_attention", "full_attention", "full_attention", "full_attention"]}),
            "config.json: layer_types is",
        ),
        ("llama", json!({"per_layer_config": {"0": {}}}), "config.json: per_layer_config is"),
        ("granite", json!({"mlp_bias": true}), "config.json: mlp_bias is true"),
        ("cohere", json!({"use_qk_norm": true}), "config.json: use_qk_norm is true"),
        ("glm4", json!({"hidden_act": "gelu"}), "config.json: hidden_act is \"gelu\""),
        (
            "phi3",
            json!({"rope_scaling": {"type": "linear", "factor": 2}}),
            "config.json: rope_scaling.type is \"linear\", which is not supported; supported values are default,",
        ),
        ("llama", json!({"is_encoder_decoder": true}), "config.json: is_encoder_decoder is true"),
    ];
    for (family, change, expected) in cases {
        let error = parse(family, change.clone()).expect_err(&change.to_string());
        assert!(matches!(error, ConfigError::Unsupported { .. }), "{change}: {error}");
        assert!(error.to_string().starts_with(expected), "{change}: {error}");
    }
}

#[test]
fn keys_without_effect_are_accepted() {
    accepted(
        "llama",
        json!({"quantization_config": null, "num_experts": 0, "attention_bias": false, "mlp_bias": null}),
    );
    accepted("llama", json!({"partial_rotary_factor": 1.0, "hidden_act": "swish", "an_unknown_key": [1, {"a": 2}]}));
    accepted("qwen2", json!({"attention_bias": true, "mlp_bias": true}));
    accepted(
        "mistral",
        json!({"layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention"]}),
    );
    assert!(accepted("qwen2", json!({})).bias.qkv);
    let biases = |family, change| {
        let Bias { qkv, o, mlp, head } = accepted(family, change).bias;
        [qkv, o, mlp, head]
    };
    for family in ["llama", "qwen3", "granite", "olmo2", "olmoe", "cohere", "gemma2", "deepseek"] {
        let all = json!({"attention_bias": true, "lm_head_bias": true});
        assert_eq!(biases(family, all), [true, true, false, false], "{family}");
    }
    assert_eq!(biases("glm4", json!({})), [true, false, false, false]);
    assert_eq!(biases("phimoe", json!({"lm_head_bias": true})), [false, false, false, true]);
    assert!(!accepted("qwen3", json!({})).bias.qkv && accepted("qwen3", json!({})).qk_norm == QkNorm::Head);
}

#[test]
fn expert_keys_in_both_spellings() {
    let mixture = |family, change| accepted(family, change).mixture.unwrap();
    let of = |experts, top_k, normalized, rounded| Mixture {
        experts,
        top_k,
        scoring: Scoring::Softmax,
        normalized,
        rounded,
        factor: 1.0,
        cutoff: 0.0,
        dense_layers: 0,
        dense_intermediate: 0,
        shared: None,
    };
    assert_eq!(mixture("mixtral", json!({})), of(8, 2, true, false));
    assert_eq!(mixture("mixtral", json!({"num_local_experts": 4, "num_experts_per_tok": 1})), of(4, 1, true, false));
    assert_eq!(mixture("qwen3_moe", json!({})), of(128, 8, false, true));
    let named = json!({"num_experts": 60, "num_experts_per_tok": 4, "norm_topk_prob": true});
    assert_eq!(mixture("qwen3_moe", named), of(60, 4, true, true));
    assert_eq!(accepted("qwen3_moe", json!({"moe_intermediate_size": 24})).intermediate, 24);
    assert_eq!(accepted("llama", json!({})).mixture, None);
    assert_eq!(mixture("olmoe", json!({})), of(64, 8, false, true));
    assert_eq!(
        mixture("granitemoe", json!({"num_local_experts": 40, "num_experts_per_tok": 8})),
        of(40, 8, true, true)
    );
    let shared = |parts, gated| Some(SharedExpert { parts, gated });
    let qwen2 = Mixture { shared: shared(4, true), ..of(60, 4, false, true) };
    assert_eq!(mixture("qwen2_moe", json!({})), qwen2);
    assert_eq!((qwen2.all_experts(), qwen2.places(), qwen2.router_rows()), (64, 8, 61));
    let granite = mixture("granitemoeshared", json!({"shared_intermediate_size": 192}));
    assert_eq!(granite, Mixture { shared: shared(2, false), ..of(8, 2, true, true) });
    assert_eq!((granite.all_experts(), granite.places(), granite.router_rows()), (10, 4, 8));
    assert_eq!(mixture("granitemoeshared", json!({"shared_intermediate_size": 0})).shared, None);
    for (family, change, expected) in [
        (
            "qwen2_moe",
            json!({"shared_expert_intermediate_size": 1500}),
            "config.json: shared_expert_intermediate_size is 1500; it must be a multiple of moe_intermediate_size (1408)",
        ),
        ("qwen2_moe", json!({"use_sliding_window": true}), "config.json: use_sliding_window is true"),
        ("qwen2_moe", json!({"mlp_only_layers": [0]}), "config.json: mlp_only_layers is [0]"),
        ("olmoe", json!({"clip_qkv": 8.0}), "config.json: clip_qkv is 8.0"),
        ("llama", json!({"num_experts": 4}), "config.json: num_experts is 4"),
    ] {
        let error = parse(family, change.clone()).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{family} {change}: {error}");
    }
    let glm = accepted("glm4_moe", json!({"first_k_dense_replace": 3, "routed_scaling_factor": 2.5}));
    let of_glm = Mixture {
        scoring: Scoring::Sigmoid,
        factor: 2.5,
        dense_layers: 3,
        dense_intermediate: 96,
        shared: shared(1, false),
        ..of(128, 8, true, false)
    };
    assert_eq!((glm.mixture, glm.mtp_layers, glm.mixture_layers()), (Some(of_glm), 1, 1));
    assert_eq!((glm.intermediate, glm.dense_intermediate()), (1408, 96));
    let null = json!({"n_shared_experts": null, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0});
    let bare = accepted("glm4_moe", null);
    assert_eq!((bare.mixture.unwrap().shared, bare.dense_intermediate(), bare.mtp_layers), (None, 0, 0));
    for (family, change, expected) in [
        ("glm4_moe", json!({"n_group": 8}), "config.json: n_group is 8, which is not supported; experts"),
        ("glm4_moe", json!({"first_k_dense_replace": 4}), "config.json: first_k_dense_replace is 4; it must be below"),
        ("glm4_moe", json!({"n_shared_experts": -1}), "config.json: n_shared_experts is -1"),
        ("deepseek", json!({"scoring_func": "sigmoid"}), "config.json: scoring_func is \"sigmoid\""),
        ("deepseek", json!({"moe_layer_freq": 2}), "config.json: moe_layer_freq is 2"),
    ] {
        let error = parse(family, change.clone()).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{family} {change}: {error}");
    }
    let sparse = Mixture { scoring: Scoring::SparseMixer, cutoff: 0.02, ..of(16, 2, false, true) };
    assert_eq!(mixture("phimoe", json!({"norm_topk_prob": true})), sparse);
    assert_eq!(mixture("phimoe", json!({"router_jitter_noise": 0.25})), Mixture { cutoff: 0.5, ..sparse });
    let long = |key: &str, value: Value| {
        let mut long = json!({"rope_type": "longrope", "short_factor": [1, 1, 1, 1, 1, 1, 1, 1], "long_mscale": 1.25,
            "long_factor": [1, 1, 1, 1, 1, 1, 1, 1], "short_mscale": 1.5, "original_max_position_embeddings": 7});
        long[key] = value;
        json!({"rope_scaling": long})
    };
    let RopeKind::Long { attention_factors, original, .. } = accepted("phimoe", long("factor", json!(9))).rope.kind
    else {
        panic!("a longrope")
    };
    assert_eq!((attention_factors, original), ([1.5, 1.25], 7));
    for (change, expected) in [
        (
            json!({"num_experts_per_tok": 1}),
            "config.json: num_experts_per_tok is 1, which is not supported; the router",
        ),
        (json!({"num_local_experts": 1}), "config.json: num_experts_per_tok is absent; it must be at most"),
        (json!({"router_jitter_noise": -0.1}), "config.json: router_jitter_noise is -0.1; it must be from 0 to 1"),
        (long("long_mscale", Value::Null), "config.json: rope_scaling.long_mscale is missing; add it (a number above"),
        (long("short_mscale", json!(0)), "config.json: rope_scaling.short_mscale is 0; it must be"),
        (long("short_factor", json!([1])), "config.json: rope_scaling.short_factor is [1]; it must be a list of 8"),
        (long("rope_type", json!("yarn")), "config.json: rope_scaling.rope_type is \"yarn\", which is not supported"),
    ] {
        let error = parse("phimoe", change.clone()).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{change}: {error}");
    }
    for (change, expected) in [
        (json!({"num_local_experts": 0}), "config.json: num_local_experts is 0; it must be 1 to"),
        (json!({"num_local_experts": 1 << 20}), "config.json: num_local_experts is 1048576; it must be at most 65536"),
        (json!({"num_experts_per_tok": 9}), "config.json: num_experts_per_tok is 9; it must be at most"),
    ] {
        let error = parse("mixtral", change.clone()).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{change}: {error}");
    }
}

#[test]
fn out_of_range_values_are_rejected_with_their_limit() {
    let cases = [
        (json!({"vocab_size": 0}), "config.json: vocab_size is 0; it must be 1 to 16777216"),
        (json!({"hidden_size": 1u64 << 40}), "config.json: hidden_size is 1099511627776; it must be 1 to 16777216"),
        (json!({"hidden_size": -64}), "config.json: hidden_size is -64; it must be a positive integer"),
        (json!({"hidden_size": 64.0}), "config.json: hidden_size is 64.0; it must be a positive integer"),
        (json!({"hidden_size": null}), "config.json: hidden_size is null; it must be a positive integer"),
        (json!({"num_hidden_layers": 70_000}), "config.json: num_hidden_layers is 70000; it must be at most 65536"),
        (
            json!({"num_key_value_heads": 3}),
            "config.json: num_attention_heads is 4; it must be a multiple of num_key_value_heads (3)",
        ),
        (json!({"head_dim": 15}), "config.json: head_dim is 15; it must be even"),
        (
            json!({"head_dim": null, "hidden_size": 66}),
            "config.json: hidden_size is 66; it must be a multiple of num_attention_heads (4)",
        ),
        (
            json!({"head_dim": 1 << 24}),
            "config.json: num_attention_heads is 4; it must be at most 16777216 when multiplied by head_dim",
        ),
        (json!({"rms_norm_eps": 0}), "config.json: rms_norm_eps is 0; it must be above 0"),
        (json!({"rms_norm_eps": 1e-60}), "config.json: rms_norm_eps is 1e-60; it must be above 0"),
        (json!({"rope_theta": 1}), "config.json: rope_theta is 1; it must be above 1"),
        (json!({"rope_theta": 1e300}), "config.json: rope_theta is 1e+300; it must be above 1"),
        (json!({"rope_scaling": 5}), "config.json: rope_scaling is 5; it must be an object"),
        (
            json!({"rope_scaling": {"type": "linear"}}),
            "config.json: rope_scaling.factor is missing; add it (a number above 0)",
        ),
        (
            json!({"rope_scaling": {"type": "yarn"}}),
            "config.json: rope_scaling.factor is missing; add it (a number above 0)",
        ),
        (
            json!({"rope_scaling": {"type": "linear", "factor": -1}}),
            "config.json: rope_scaling.factor is -1; it must be 0.000001 to 1000000",
        ),
        (
            json!({"rope_scaling": {"type": "yarn", "factor": 2, "beta_slow": 1e-300}}),
            "config.json: rope_scaling.beta_slow is 1e-300; it must be 0.000001 to 1000000",
        ),
        (json!({"rope_scaling": {"type": 3}}), "config.json: rope_scaling.type is 3; it must be a string"),
        (
            json!({"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}}),
            "config.json: rope_scaling.high_freq_factor is 4; it must be above low_freq_factor (4)",
        ),
        (
            json!({"partial_rotary_factor": 1.5}),
            "config.json: partial_rotary_factor is 1.5; it must be above 0 and at most",
        ),
        (json!({"tie_word_embeddings": 1}), "config.json: tie_word_embeddings is 1; it must be true or false"),
        (json!({"eos_token_id": 1000}), "config.json: eos_token_id is 1000; it must be below vocab_size (1000)"),
        (
            json!({"eos_token_id": ["</s>"]}),
            "config.json: eos_token_id is [\"</s>\"]; it must be a token id or a list of token ids",
        ),
        (
            json!({"layer_types": ["full_attention"]}),
            "config.json: layer_types is [\"full_attention\"]; it must be a list of num_hidden_layers (4) entries",
        ),
        (
            json!({"model_type": null}),
            "config.json: model_type is missing; add it (one of llama, mistral, qwen2, qwen3, mixtral, qwen3_moe,",
        ),
    ];
    for (change, expected) in cases {
        let error = parse("llama", change.clone()).expect_err(&change.to_string()).to_string();
        assert!(error.starts_with(expected), "{change}: {error}");
    }
    let error = parse("mistral", json!({"sliding_window": 0})).unwrap_err().to_string();
    assert_eq!(error, "config.json: sliding_window is 0; it must be 1 to 16777216");
    let error = ModelConfig::parse("[1, 2", None).unwrap_err().to_string();
    assert!(error.starts_with("config.json: not a JSON object: EOF"), "{error}");
    let error = ModelConfig::parse("[1, 2]", None).unwrap_err().to_string();
    assert_eq!(error, "config.json: not a JSON object: it is [1,2]; fetch the file again");
    let error = ModelConfig::parse(r#"{"model_type": "llama"}"#, Some("7")).unwrap_err().to_string();
    assert_eq!(error, "generation_config.json: not a JSON object: it is 7; fetch the file again");
}

#[test]
fn values_of_single_families_are_checked() {
    let long = |change: Value| {
        let mut rope = json!({"type": "longrope", "short_factor": [1, 1, 1, 1], "long_factor": [2, 2, 2, 2]});
        rope.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        json!({"rope_scaling": rope, "partial_rotary_factor": 0.5})
    };
    assert_eq!(accepted("phi3", long(json!({}))).rope.dim, 8);
    for (family, change, expected) in [
        (
            "phi3",
            long(json!({"short_factor": [1, 1]})),
            "config.json: rope_scaling.short_factor is [1,1]; it must be a list of 4 numbers from 0.000001 to 1000000",
        ),
        ("phi3", long(json!({"long_factor": [1, 0, 1, 1]})), "config.json: rope_scaling.long_factor is [1,0,1,1]; it"),
        ("phi3", long(json!({"long_factor": 3})), "config.json: rope_scaling.long_factor is 3; it must be a list"),
        (
            "phi3",
            long(json!({"long_factor": null})),
            "config.json: rope_scaling.long_factor is missing; add it (a list of 4",
        ),
        (
            "phi3",
            json!({"partial_rotary_factor": 0.2}),
            "config.json: partial_rotary_factor is 0.2; it must be a share",
        ),
        ("smollm3", json!({"no_rope_layers": [1, 0]}), "config.json: no_rope_layers is [1,0]; it must be a list of"),
        ("smollm3", json!({"no_rope_layers": [1, 0, 2, 1]}), "config.json: no_rope_layers is [1,0,2,1]; it must be"),
        ("smollm3", json!({"no_rope_layer_interval": 0}), "config.json: no_rope_layer_interval is 0; it must be 1 to"),
        ("granite", json!({"residual_multiplier": 0}), "config.json: residual_multiplier is 0; it must be 0.000001 to"),
        ("granite", json!({"logits_scaling": "x"}), "config.json: logits_scaling is \"x\"; it must be a number"),
        ("cohere", json!({"logit_scale": -1}), "config.json: logit_scale is -1; it must be 0.000001 to"),
        ("cohere", json!({"layer_norm_eps": 0}), "config.json: layer_norm_eps is 0; it must be above 0"),
        ("gemma2", json!({"sliding_window": null}), "config.json: sliding_window is null; it must be a positive"),
        ("gemma2", json!({"hidden_activation": "gelu"}), "config.json: hidden_activation is \"gelu\", which is not"),
        ("gemma2", json!({"final_logit_softcapping": 0}), "config.json: final_logit_softcapping is 0; it must be"),
        ("gemma2", json!({"query_pre_attn_scalar": -1}), "config.json: query_pre_attn_scalar is -1; it must be"),
        ("gemma3_text", json!({"attn_logit_softcapping": 50}), "config.json: attn_logit_softcapping is 50, which is"),
        ("gemma3_text", json!({"sliding_window_pattern": 0}), "config.json: sliding_window_pattern is 0; it must be 1"),
        ("gemma3_text", json!({"rope_local_base_freq": 1}), "config.json: rope_local_base_freq is 1; it must be above"),
        ("gemma3_text", json!({"use_bidirectional_attention": true}), "config.json: use_bidirectional_attention is"),
        (
            "gemma3_text",
            json!({"rope_parameters": {"full_attention": {"rope_type": "linear"}}}),
            "config.json: rope_parameters.full_attention.factor is missing; add it",
        ),
        ("gemma3", json!({}), "config.json: text_config is missing; add it (the configuration of the text model)"),
        ("mixtral", json!({"hidden_act": "gelu_pytorch_tanh"}), "config.json: hidden_act is \"gelu_pytorch_tanh\", wh"),
    ] {
        let error = parse(family, change.clone()).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{change}: {error}");
    }
}

/// Keys of published configurations, and their meaning; the numbers of parameters are those of the weights.
#[test]
fn published_configurations_of_families() {
    let read = |text: &str| ModelConfig::parse(text, None).unwrap_or_else(|error| panic!("{text}: {error}"));
    let phi4 = read(
        r#"{"architectures": ["Phi3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 100257, "embd_pdrop": 0.0, "eos_token_id": 100265, "hidden_act": "silu", "hidden_size": 5120,
        "initializer_range": 0.02, "intermediate_size": 17920, "max_position_embeddings": 16384, "model_type": "phi3",
        "num_attention_heads": 40, "num_hidden_layers": 40, "num_key_value_heads": 10,
        "original_max_position_embeddings": 16384, "pad_token_id": 100349, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
        "rope_scaling": null, "rope_theta": 250000, "sliding_window": null, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 100352}"#,
    );
    assert_eq!((phi4.parameters(), phi4.rope.dim), (14_659_507_200, 128));
    let phi3 = read(
        r#"{"model_type": "phi3", "bos_token_id": 1, "eos_token_id": 32000, "hidden_size": 3072,
        "intermediate_size": 8192, "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05,
        "rope_scaling": null, "rope_theta": 10000.0, "sliding_window": 2047, "vocab_size": 32064}"#,
    );
    assert_eq!((phi3.parameters(), phi3.head_dim, phi3.window[31]), (3_821_079_552, 96, Some(2047)));
    let factors = vec!["1.25"; 48].join(", ");
    let mini = read(&format!(
        r#"{{"model_type": "phi3", "bos_token_id": 199999, "eos_token_id": 199999, "full_attn_mod": 1,
        "hidden_size": 3072, "intermediate_size": 8192, "interpolate_factor": 1, "lm_head_bias": false,
        "max_position_embeddings": 131072, "mlp_bias": false, "num_attention_heads": 24, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
        "rms_norm_eps": 1e-05, "rope_scaling": {{"long_factor": [{factors}], "short_factor": [{factors}],
        "type": "longrope"}}, "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": true,
        "vocab_size": 200064}}"#
    ));
    assert_eq!((mini.parameters(), mini.rope.dim), (3_836_021_760, 96));
    let RopeKind::Long { attention_factors, original, .. } = mini.rope.kind else { panic!("{:?}", mini.rope) };
    assert_eq!((attention_factors, original), ([(1.0 + 32f64.ln() / 4096f64.ln()).sqrt(); 2], 4096));
    let factors = vec!["1.25"; 64].join(", ");
    let phimoe = read(&format!(
        r#"{{"model_type": "phimoe", "attention_bias": true, "bos_token_id": 1, "eos_token_id": 32000,
        "hidden_size": 4096, "input_jitter_noise": 0.01, "intermediate_size": 6400, "lm_head_bias": true,
        "max_position_embeddings": 131072, "num_attention_heads": 32, "num_experts_per_tok": 2,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 16,
        "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "rope_scaling": {{"long_factor": [{factors}],
        "long_mscale": 1.25, "original_max_position_embeddings": 4096, "short_factor": [{factors}],
        "short_mscale": 1.5, "type": "longrope"}}, "rope_theta": 10000.0, "router_jitter_noise": 0.01,
        "sliding_window": 131072, "tie_word_embeddings": false, "vocab_size": 32064}}"#
    ));
    assert_eq!((phimoe.parameters(), phimoe.window[31]), (41_873_153_344, Some(131_072)));
    assert_eq!(phimoe.bias, Bias { qkv: true, o: true, mlp: false, head: true });
    assert_eq!([4096, 4097].map(|context| phimoe.rope.attention_factor(context)), [1.5, 1.25]);
    let smollm3 = read(
        r#"{"model_type": "smollm3", "attention_bias": false, "bos_token_id": null, "eos_token_id": 128012,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 11008, "max_position_embeddings": 65536,
        "max_window_layers": 28, "mlp_bias": false, "num_attention_heads": 16, "num_hidden_layers": 36,
        "num_key_value_heads": 4, "no_rope_layer_interval": 4, "pretraining_tp": 2, "rms_norm_eps": 1e-06,
        "rope_scaling": null, "rope_theta": 5000000.0, "sliding_window": null, "use_sliding_window": false,
        "vocab_size": 128256}"#,
    );
    assert_eq!((smollm3.parameters(), smollm3.tied), (3_075_098_624, true));
    assert_eq!(smollm3.rotated[..5], [true, true, true, false, true]);
    let granite = read(
        r#"{"model_type": "granite", "attention_bias": false, "attention_multiplier": 0.0078125, "bos_token_id": 0,
        "embedding_multiplier": 12.0, "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 12800, "logits_scaling": 16.0, "max_position_embeddings": 131072, "mlp_bias": false,
        "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000000.0, "tie_word_embeddings": true,
        "vocab_size": 49155}"#,
    );
    assert_eq!(granite.parameters(), 8_170_848_256);
    let factors = Factors { embedding: 12.0, attention: Some(0.007_812_5), residual: 0.22, logits: 0.0625 };
    assert_eq!(granite.factors, factors);
    let olmo2 = read(
        r#"{"model_type": "olmo2", "attention_bias": false, "eos_token_id": 100257, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06,
        "rope_scaling": null, "rope_theta": 500000, "tie_word_embeddings": false, "vocab_size": 100352}"#,
    );
    assert_eq!((olmo2.parameters(), olmo2.qk_norm), (7_298_617_344, QkNorm::Whole));
    let glm4 = read(
        r#"{"model_type": "glm4", "attention_bias": true, "eos_token_id": [151329, 151336, 151338], "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 13696, "max_position_embeddings": 32768,
        "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": false, "vocab_size": 151552}"#,
    );
    assert_eq!((glm4.parameters(), glm4.rope.dim, glm4.rope.pairs), (9_400_279_040, 64, RopePairs::Adjacent));
    let command_r = read(
        r#"{"model_type": "cohere", "attention_bias": false, "bos_token_id": 5, "eos_token_id": 255001,
        "hidden_act": "silu", "hidden_size": 8192, "intermediate_size": 22528, "layer_norm_eps": 1e-05,
        "logit_scale": 0.0625, "max_position_embeddings": 8192, "model_max_length": 131072, "num_attention_heads": 64,
        "num_hidden_layers": 40, "num_key_value_heads": 64, "pad_token_id": 0, "rope_theta": 8000000.0,
        "use_qk_norm": false, "vocab_size": 256000}"#,
    );
    assert_eq!((command_r.parameters(), command_r.parallel), (34_980_831_232, true));
    // Models that declare the architecture of Llama or Qwen2.
    let falcon3 = read(
        r#"{"model_type": "llama", "attention_bias": false, "eos_token_id": 11, "head_dim": 256, "hidden_act": "silu",
        "hidden_size": 3072, "intermediate_size": 23040, "max_position_embeddings": 32768, "mlp_bias": false,
        "num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 4, "pretraining_tp": 1,
        "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000042, "tie_word_embeddings": false,
        "vocab_size": 131072}"#,
    );
    assert_eq!((falcon3.parameters(), falcon3.rope.theta, falcon3.head_dim), (7_455_550_464, 1_000_042.0, 256));
    let gemma2 = read(
        r#"{"model_type": "gemma2", "attention_bias": false, "attn_logit_softcapping": 50.0, "bos_token_id": 2,
        "cache_implementation": "hybrid", "eos_token_id": 1, "final_logit_softcapping": 30.0, "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584,
        "intermediate_size": 14336, "max_position_embeddings": 8192, "num_attention_heads": 16,
        "num_hidden_layers": 42, "num_key_value_heads": 8, "pad_token_id": 0, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_size": 4096,
        "vocab_size": 256000}"#,
    );
    assert_eq!((gemma2.parameters(), gemma2.tied), (9_241_705_984, true));
    assert_eq!(gemma2.soft_caps, SoftCaps { attention: Some(50.0), logits: Some(30.0) });
    // The root of 3584 is 59.87, which is 59.75 in BF16.
    let factors = Factors { embedding: 59.75, attention: Some(0.0625), ..Factors::NONE };
    assert_eq!((gemma2.factors, &gemma2.window[..3]), (factors, &[Some(4096), None, Some(4096)][..]));
    let gemma3 = read(
        r#"{"model_type": "gemma3_text", "attn_logit_softcapping": null, "bos_token_id": 2, "eos_token_id": 1,
        "final_logit_softcapping": null, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152, "intermediate_size": 6912, "max_position_embeddings": 32768, "num_attention_heads": 4,
        "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": 512,
        "sliding_window_pattern": 6, "vocab_size": 262144}"#,
    );
    assert_eq!((gemma3.parameters(), gemma3.act), (999_885_952, Activation::GeluTanh));
    let whole: Vec<_> = (0..26).filter(|layer| gemma3.window[*layer].is_none()).collect();
    assert_eq!((whole, gemma3.window[0]), (vec![5, 11, 17, 23], Some(512)));
    assert_eq!((gemma3.rope.theta, gemma3.local_rope.map(|rope| rope.theta)), (1e6, Some(1e4)));
    // A model of text and images, whose text model contains only values that differ from the defaults.
    let four = read(
        r#"{"architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999,
        "eos_token_id": [1, 106], "image_token_index": 262144, "model_type": "gemma3", "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}, "vision_config": {
        "hidden_size": 1152, "model_type": "siglip_vision_model"}}"#,
    );
    assert_eq!((four.parameters(), &four.eos[..], four.family), (3_880_263_168, &[1, 106][..], Family::Gemma3));
    assert_eq!(four.rope.kind, RopeKind::Linear { factor: 8.0 });
    assert_eq!(four.local_rope.map(|rope| (rope.theta, rope.kind)), Some((1e4, RopeKind::Default)));
    let yi = read(
        r#"{"model_type": "llama", "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 11008, "max_position_embeddings": 4096, "num_attention_heads": 32,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "pad_token_id": 0, "rms_norm_eps": 1e-06,
        "rope_scaling": null, "rope_theta": 5000000.0, "tie_word_embeddings": false, "vocab_size": 64000}"#,
    );
    assert_eq!(yi.parameters(), 8_829_407_232);
    let distilled = read(
        r#"{"model_type": "qwen2", "bos_token_id": 151643, "eos_token_id": 151643, "hidden_act": "silu",
        "hidden_size": 1536, "intermediate_size": 8960, "max_position_embeddings": 131072, "max_window_layers": 21,
        "num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 10000, "sliding_window": 4096, "tie_word_embeddings": false, "use_mrope": false,
        "use_sliding_window": false, "vocab_size": 151936}"#,
    );
    assert_eq!((distilled.parameters(), distilled.window[27]), (1_777_088_000, None));
}

/// The numbers of parameters are those of the checkpoints.
#[test]
fn published_configurations_of_mixtures() {
    let read = |text: &str| ModelConfig::parse(text, None).unwrap_or_else(|error| panic!("{text}: {error}"));
    let olmoe = read(
        r#"{"model_type": "olmoe", "attention_bias": false, "clip_qkv": null, "eos_token_id": 50279,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 1024, "max_position_embeddings": 4096,
        "norm_topk_prob": false, "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
        "num_hidden_layers": 16, "num_key_value_heads": 16, "pad_token_id": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": null, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "tie_word_embeddings": false,
        "vocab_size": 50304}"#,
    );
    assert_eq!((olmoe.parameters(), olmoe.qk_norm), (6_919_161_856, QkNorm::Whole));
    let qwen = read(
        r#"{"model_type": "qwen2_moe", "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151643,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 8192,
        "max_window_layers": 21, "moe_intermediate_size": 1408, "norm_topk_prob": false, "num_attention_heads": 16,
        "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16,
        "output_router_logits": false, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "tie_word_embeddings": false,
        "use_sliding_window": false, "vocab_size": 151936}"#,
    );
    assert_eq!((qwen.parameters(), qwen.bias.qkv, qwen.window[0]), (14_315_784_192, true, None));
    assert_eq!(qwen.mixture.map(|mixture| (mixture.all_experts(), mixture.places())), Some((64, 8)));
    let granite = read(
        r#"{"model_type": "granitemoe", "attention_bias": false, "attention_multiplier": 0.015625, "bos_token_id": 0,
        "embedding_multiplier": 12.0, "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 1024,
        "intermediate_size": 512, "logits_scaling": 6.0, "max_position_embeddings": 131072,
        "num_attention_heads": 16, "num_experts_per_tok": 8, "num_hidden_layers": 24, "num_key_value_heads": 8,
        "num_local_experts": 32, "residual_multiplier": 0.22, "rms_norm_eps": 1e-06, "rope_scaling": null,
        "rope_theta": 1500000, "tie_word_embeddings": true, "vocab_size": 49155}"#,
    );
    assert_eq!((granite.parameters(), granite.factors.residual, granite.head_dim), (1_334_628_352, 0.22, 64));
    let deepseek = read(
        r#"{"model_type": "deepseek", "attention_bias": false, "aux_loss_alpha": 0.001, "bos_token_id": 100000,
        "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 10944, "max_position_embeddings": 4096, "moe_intermediate_size": 1408,
        "moe_layer_freq": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": false,
        "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 28, "num_key_value_heads": 16,
        "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 10000, "scoring_func": "softmax",
        "tie_word_embeddings": false, "vocab_size": 102400}"#,
    );
    assert_eq!((deepseek.parameters(), deepseek.mixture_layers()), (16_375_728_128, 27));
    // Without the correction biases, 128 elements in each of 45 layers.
    let air = read(
        r#"{"model_type": "glm4_moe", "attention_bias": true, "eos_token_id": [151329, 151336, 151338], "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "partial_rotary_factor": 0.5, "intermediate_size": 10944,
        "max_position_embeddings": 131072, "moe_intermediate_size": 1408, "norm_topk_prob": true,
        "num_attention_heads": 96, "n_group": 1, "topk_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
        "routed_scaling_factor": 1.0, "num_experts_per_tok": 8, "first_k_dense_replace": 1, "num_hidden_layers": 46,
        "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-05, "rope_scaling": null,
        "rope_theta": 1000000, "tie_word_embeddings": false, "use_qk_norm": false, "vocab_size": 151552}"#,
    );
    assert_eq!((air.parameters(), air.bias.qkv, air.qk_norm), (106_852_245_504, true, QkNorm::None));
    assert_eq!((air.rope.dim, air.mtp_layers, air.dense_intermediate()), (64, 1, 10_944));
}

#[test]
fn generation_config_gives_sampling_defaults() {
    let of = |generation: Value| {
        let config = json!({"model_type": "llama", "eos_token_id": 5, "bos_token_id": 6});
        ModelConfig::from_json(&config, Some(&generation))
    };
    let none = of(json!({})).unwrap();
    assert_eq!((&none.eos[..], none.bos, none.generation.top_k), (&[5][..], Some(6), Some(50)));
    assert_eq!(none.generation, accepted("llama", json!({})).generation);
    let all = of(json!({"do_sample": true, "temperature": 0.6, "top_p": 0.9, "top_k": 0, "min_p": 0.05,
        "eos_token_id": [7, 8], "bos_token_id": 9, "repetition_penalty": 1.05, "num_beams": 1,
        "suppress_tokens": [4]}));
    let all = all.unwrap();
    assert_eq!((&all.eos[..], all.bos), (&[7, 8][..], Some(9)));
    let generation = all.generation;
    assert_eq!((generation.do_sample, generation.temperature, generation.top_p), (true, 0.6, 0.9));
    assert_eq!((generation.top_k, generation.min_p), (None, 0.05));
    assert_eq!(generation.ignored, ["repetition_penalty 1.05", "suppress_tokens [4]"]);
    let odd = of(json!({"temperature": -1, "top_p": 1.5, "top_k": -1, "eos_token_id": -1, "bos_token_id": 32000}));
    let odd = odd.unwrap();
    assert_eq!((&odd.eos[..], odd.bos), (&[5][..], Some(6)), "the model's own tokens");
    assert_eq!((odd.generation.temperature, odd.generation.top_p, odd.generation.top_k), (1.0, 1.0, None));
    let ignored = ["eos_token_id -1", "bos_token_id 32000", "temperature -1", "top_p 1.5", "top_k -1"];
    assert_eq!(odd.generation.ignored, ignored);
    assert_eq!(of(json!({"eos_token_id": [7, 40000]})).unwrap().eos, [7]);
    let error = of(json!({"eos_token_id": [7, "</s>"]})).unwrap_err().to_string();
    assert!(error.starts_with("generation_config.json: eos_token_id is"), "{error}");
    let error = of(json!({"temperature": "hot"})).unwrap_err().to_string();
    assert_eq!(error, "generation_config.json: temperature is \"hot\"; it must be a number");
}

/// Any JSON, with a preference for values of configurations.
fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (0u64..70_000).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (-4.0..64.0f64).prop_map(Value::from),
        prop::sample::select(vec![1e-308, 1e-40, 1e-6, 1.0, 1e6, 3.4e38, 1e300]).prop_map(Value::from),
        prop::sample::select(vec![
            "silu",
            "yarn",
            "llama3",
            "linear",
            "default",
            "dynamic",
            "full_attention",
            "sliding_attention",
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            ""
        ])
        .prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 24, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::btree_map(any_key(), inner, 0..6).prop_map(|map| map.into_iter().collect()),
        ]
    })
}

/// Keys that are read, and one that is not.
fn any_key() -> impl Strategy<Value = String> {
    prop::sample::select(vec![
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "rope_type",
        "type",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "truncate",
        "original_max_position_embeddings",
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "layer_types",
        "eos_token_id",
        "bos_token_id",
        "tie_word_embeddings",
        "hidden_act",
        "attention_bias",
        "partial_rotary_factor",
        "short_factor",
        "long_factor",
        "no_rope_layers",
        "no_rope_layer_interval",
        "embedding_multiplier",
        "attention_multiplier",
        "residual_multiplier",
        "logits_scaling",
        "logit_scale",
        "layer_norm_eps",
        "use_qk_norm",
        "hidden_activation",
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "sliding_window_pattern",
        "rope_local_base_freq",
        "full_attention",
        "sliding_attention",
        "text_config",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "do_sample",
        "quantization_config",
        "other",
    ])
    .prop_map(str::to_owned)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    /// Whatever the files contain, the result is an error or a valid model.
    #[test]
    fn any_json_never_panics(
        family in prop::sample::select(Family::ALL),
        changes in prop::collection::vec((any_key(), any_value()), 0..4),
        generation in prop::option::of(any_value()),
    ) {
        let mut config = json!({"model_type": family.name(), "vocab_size": 1000, "hidden_size": 64,
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "eos_token_id": 2, "bos_token_id": 1});
        config.as_object_mut().unwrap().extend(changes);
        if let Ok(model) = ModelConfig::from_json(&config, generation.as_ref()) {
            prop_assert_eq!(model.window.len(), model.layers as usize);
            prop_assert_eq!(model.heads % model.kv_heads, 0);
            prop_assert!(model.head_dim >= 2 && model.head_dim % 2 == 0 && model.eps > 0.0);
            prop_assert!(model.window.iter().all(|window| *window != Some(0)));
            prop_assert!(model.eos.iter().chain(&model.bos).all(|&token| token < model.vocab));
            prop_assert!(model.rope.dim >= 2 && model.rope.dim % 2 == 0 && model.rope.dim <= model.head_dim);
            prop_assert_eq!(model.rotated.len(), model.layers as usize);
            if model.head_dim <= 1024 {
                let (cos, sin) = model.rope.cos_sin(model.max_positions - 1, model.max_positions);
                prop_assert_eq!(cos.len() * 2, model.rope.dim as usize);
                prop_assert!(cos.iter().chain(&sin).all(|value| value.is_finite()), "{:?}", model.rope);
            }
        }
    }

    /// The same for rotary embeddings, which have the most keys.
    #[test]
    fn any_rotary_embedding_never_panics(
        kind in prop::sample::select(vec!["linear", "llama3", "yarn", "longrope"]),
        keys in prop::collection::vec((any_key(), any_value()), 0..3),
        numbers in prop::collection::vec((any_key(), -0.5..5.0f64), 0..6),
        heads in 1u32..64,
    ) {
        let mut rope = json!({"rope_type": kind, "factor": 4, "low_freq_factor": 1, "high_freq_factor": 4});
        rope.as_object_mut().unwrap().extend(keys);
        rope.as_object_mut().unwrap().extend(numbers.into_iter().map(|(key, number)| (key, number.into())));
        let family = if kind == "longrope" { "phi3" } else { "llama" };
        for key in ["short_factor", "long_factor"].into_iter().filter(|_| kind == "longrope") {
            rope[key] = json!(vec![1.5; heads as usize]);
        }
        if let Ok(model) = parse(family, json!({"rope_scaling": rope, "head_dim": heads * 2})) {
            let (cos, sin) = model.rope.cos_sin(131_071, 131_072);
            prop_assert!(cos.iter().chain(&sin).all(|value| value.is_finite()), "{:?}", model.rope);
        }
    }

    #[test]
    fn any_text_never_panics(text in ".{0,80}") {
        prop_assert!(ModelConfig::parse(&text, Some(&text)).is_err());
    }
}
