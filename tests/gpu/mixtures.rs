//! Mixtures of experts of families that have shared experts, factors or norms of queries: compared with the f32
//! reference, with all experts on the device and with some in host memory.

use std::{fs, path::Path};

use serde_json::{Map, Value, json};
use unweight::engine::{KvCache, Placement};
use unweight_format::{
    bundle::{self, Bundle, CompressOptions, Profile, Silent},
    testing::Weights as Kind,
};
use unweight_model::{
    ExpertWeights, MlpWeights, ModelConfig, ModelWeights, NormWeights, QkNorm, Scoring,
    reference::{self, Reference},
};

use crate::{
    engine::{load, options, tokens},
    harness::error,
};

/// Relative RMS error of logits whose experts are those of the reference.
const BOUND: f64 = 0.03;
const VOCAB: usize = 512;

/// Configurations of each family.
fn configs() -> Vec<(&'static str, Value)> {
    let common = json!({"vocab_size": VOCAB, "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 1024, "eos_token_id": 2, "rms_norm_eps": 1e-5});
    let factors = json!({"embedding_multiplier": 6.0, "attention_multiplier": 0.1, "residual_multiplier": 0.5,
        "logits_scaling": 2.0, "intermediate_size": 128, "num_local_experts": 10, "num_experts_per_tok": 4});
    let all = [
        (
            "qwen2_moe",
            vec![json!({"num_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 64,
                "shared_expert_intermediate_size": 256})],
        ),
        ("olmoe", vec![json!({"num_experts": 16, "num_experts_per_tok": 8, "intermediate_size": 64})]),
        ("granitemoe", vec![factors.clone()]),
        ("granitemoeshared", vec![factors.clone(), json!({"shared_intermediate_size": 256})]),
        (
            "deepseek",
            vec![json!({"n_routed_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 64,
                "n_shared_experts": 2, "first_k_dense_replace": 1, "intermediate_size": 320, "moe_layer_freq": 1})],
        ),
        // All that GLM-4.5 and GLM-4.5-Air have.
        (
            "glm4_moe",
            vec![json!({"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64,
                "first_k_dense_replace": 1, "intermediate_size": 448, "routed_scaling_factor": 2.5,
                "attention_bias": true, "use_qk_norm": true})],
        ),
        // Biases of norms, attention and head. One layer: its router weighs two experts with equal logits unequally, so
        // rounding that swaps them would change many positions of further layers.
        (
            "phimoe",
            vec![json!({"num_local_experts": 6, "intermediate_size": 128, "router_jitter_noise": 0.1,
                "attention_bias": true, "lm_head_bias": true, "num_hidden_layers": 1, "rope_scaling": {
                    "type": "longrope", "short_mscale": 1.25, "long_mscale": 1.1, "short_factor": vec![1.0; 32],
                    "long_factor": vec![1.5; 32], "original_max_position_embeddings": 1}})],
        ),
        // Biases before the norms of all heads together.
        (
            "olmoe",
            vec![json!({"num_experts": 16, "num_experts_per_tok": 8, "intermediate_size": 64, "attention_bias": true})],
        ),
        // What is added has a factor, as its bias.
        ("granitemoe", vec![factors, json!({"attention_bias": true})]),
    ];
    let whole = |(family, more): (&'static str, Vec<Value>)| {
        let mut config = common.as_object().unwrap().clone();
        config.insert("model_type".into(), family.into());
        more.iter().for_each(|more| config.extend(more.as_object().unwrap().clone()));
        (family, Value::Object(config))
    };
    all.into_iter().map(whole).collect()
}

/// The names and shapes of the tensors of a model.
fn listing(config: &ModelConfig) -> Vec<(String, Vec<u32>)> {
    let names = ModelWeights::named(config);
    let (hidden, wide, vocab) = (config.hidden, config.intermediate, config.vocab);
    let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
    let mixture = config.mixture.unwrap();
    let mut all = vec![(names.embed, vec![vocab, hidden]), (names.lm_head, vec![vocab, hidden])];
    let norm = |names: NormWeights| {
        [Some(names.weight), names.bias].into_iter().flatten().map(move |name| (name, vec![hidden]))
    };
    all.extend(norm(names.final_norm));
    all.extend(names.lm_head_bias.map(|name| (name, vec![vocab])));
    // What a layer that predicts a further token has, among others.
    all.extend(
        (0..config.mtp_layers).map(|of| (format!("model.layers.{}.eh_proj.weight", config.layers + of), vec![64, 64])),
    );
    for layer in names.layers {
        all.extend([(layer.q, vec![q, hidden]), (layer.k, vec![kv, hidden]), (layer.v, vec![kv, hidden])]);
        all.push((layer.o, vec![hidden, q]));
        let of = |names: [Option<String>; 2], width| names.into_iter().flatten().map(move |name| (name, vec![width]));
        all.extend([layer.input_norm, layer.post_norm].into_iter().flatten().flat_map(norm));
        all.extend(of([layer.o_bias, None], hidden));
        all.extend(of([layer.q_bias, None], q).chain(of([layer.k_bias, layer.v_bias], kv)));
        let [q_width, k_width] = if config.qk_norm == QkNorm::Head { [config.head_dim; 2] } else { [q, kv] };
        all.extend(of([layer.q_norm, None], q_width).chain(of([layer.k_norm, None], k_width)));
        let (router, correction, experts, shared) = match layer.mlp {
            MlpWeights::Mixture { router, correction, experts, shared } => (router, correction, experts, shared),
            MlpWeights::Dense(names) => {
                let wide = config.dense_intermediate();
                all.extend([(names.gate, vec![wide, hidden]), (names.up, vec![wide, hidden])]);
                all.push((names.down, vec![hidden, wide]));
                continue;
            }
            other => panic!("{other:?}"),
        };
        all.push((router, vec![mixture.experts, hidden]));
        all.extend(correction.map(|name| (name, vec![mixture.experts])));
        match experts {
            ExpertWeights::Each(each) => all.extend(each.into_iter().flat_map(|names| {
                let down = (names.down, vec![hidden, wide]);
                [(names.gate, vec![wide, hidden]), (names.up, vec![wide, hidden]), down]
            })),
            ExpertWeights::Stacked { gate_up, down } => all.extend([
                (gate_up, vec![mixture.experts, 2 * wide, hidden]),
                (down, vec![mixture.experts, hidden, wide]),
            ]),
        }
        let Some(shared) = shared else { continue };
        all.extend(shared.gate.map(|gate| (gate, vec![1, hidden])));
        let wide = config.shared_intermediate();
        match shared.mlp.gate == shared.mlp.up {
            true => all.push((shared.mlp.gate, vec![2 * wide, hidden])),
            false => all.extend([(shared.mlp.gate, vec![wide, hidden]), (shared.mlp.up, vec![wide, hidden])]),
        }
        all.push((shared.mlp.down, vec![hidden, wide]));
    }
    all
}

/// Writes a model with random weights.
fn write(folder: &Path, json: &Value) {
    let config = ModelConfig::from_json(json, None).unwrap();
    let has_sigmoids = config.mixture.unwrap().scoring == Scoring::Sigmoid;
    let (mut header, mut data) = (Map::new(), Vec::<u8>::new());
    for (seed, (name, shape)) in listing(&config).into_iter().enumerate() {
        let begin = data.len();
        let count = shape.iter().product::<u32>() as usize;
        // Products are about as large as their inputs; a router's choices are mostly clear of rounding.
        let sigma = match name.contains("gate.weight") || name.contains("router") {
            // Sigmoids of large logits hardly differ.
            true if has_sigmoids => 0.1,
            true => 0.3,
            false => 1.0 / 16.0,
        };
        let values = Kind::Gaussian { sigma }.iter(seed as u64).take(count);
        // Corrections as different as scores.
        let is_f32 = name.ends_with("e_score_correction_bias");
        match shape.len() {
            1 if is_f32 => data.extend((0..count).flat_map(|at| (0.1 * (at % 5) as f32 + 1e-6).to_le_bytes())),
            1 if name.ends_with("norm.weight") => {
                data.extend((0..count).flat_map(|at| half::bf16::from_f64(0.75 + (at % 7) as f64 / 12.0).to_le_bytes()))
            }
            _ => data.extend(values.flat_map(u16::to_le_bytes)),
        }
        let dtype = if is_f32 { "F32" } else { "BF16" };
        header.insert(name, json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, data.len()]}));
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let file = [&(header.len() as u64).to_le_bytes(), &header[..], &data].concat();
    fs::create_dir(folder).unwrap();
    fs::write(folder.join("model.safetensors"), file).unwrap();
    fs::write(folder.join("config.json"), json.to_string()).unwrap();
}

/// The median over rows of the error: where rounding chooses another expert, a row is far off.
fn median_error(got: &[half::bf16], expected: &[f32]) -> f64 {
    let rows = got.chunks_exact(VOCAB).zip(expected.chunks_exact(VOCAB));
    let mut errors: Vec<f64> = rows.map(|(got, expected)| error(got, expected)).collect();
    errors.sort_by(f64::total_cmp);
    errors[errors.len() / 2]
}

#[test]
#[ignore = "needs a GPU"]
fn mixtures_of_every_family_follow_the_reference() {
    let home = tempfile::tempdir().unwrap();
    for (number, (family, json)) in configs().into_iter().enumerate() {
        let source = home.path().join(format!("{number}"));
        write(&source, &json);
        let target = home.path().join(format!("{number}-bundle"));
        bundle::compress(&source, &target, &CompressOptions::new(Profile::Packed), &Silent).unwrap();
        let bundle = Bundle::open(&target).unwrap();
        let config = ModelConfig::of_bundle(&bundle).unwrap();
        let weights = ModelWeights::of_bundle(&config, &bundle).unwrap();
        let reference = Reference::new(&config, &weights, reference::bundle_values(&bundle));
        for placement in [Placement::Packed, Placement::Bf16] {
            let of = || options().placement(placement).kv_cache(KvCache::Bf16);
            let mut engine = load(&bundle, of());
            assert_eq!(engine.bf16_experts(), None, "{family}");
            let slots = [1, 5, config.mixture.unwrap().all_experts() - 1];
            let mut offloaded = slots.map(|slots| load(&bundle, of().resident_experts(slots)));
            offloaded.iter_mut().for_each(|engine| engine.poison_experts(0xa5).unwrap());
            // At least three: rounding may choose another expert for one row. Steps have one row each.
            for count in [3, 65, 300] {
                let text = tokens(count, VOCAB, count as u64);
                let (expected, whole) = (reference.logits(&text).unwrap(), engine.logits(&text).unwrap());
                let what = format!("{family}, {placement}, {count} tokens");
                let difference = median_error(&whole, &expected);
                println!("{what}: {difference:.4}");
                assert!(difference < BOUND, "{what}: {difference}");
                let steps = engine.logits_by_steps(&[&text[..count.min(65)]]).unwrap();
                let difference = median_error(&steps[0], &expected[..count.min(65) * VOCAB]);
                assert!(difference < BOUND, "{what} by steps: {difference}");
                for (engine, slots) in offloaded.iter_mut().zip(slots) {
                    assert!(engine.logits(&text).unwrap() == whole, "{what}: {slots} slots give other bits");
                    let same = engine.logits_by_steps(&[&text[..count.min(65)]]).unwrap() == steps;
                    assert!(same, "{what}: {slots} slots give other bits by steps");
                }
            }
        }
    }
}
