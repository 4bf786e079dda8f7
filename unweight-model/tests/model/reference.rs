//! Compares the reference with logits that transformers computed in f32 from the same weights (`fixtures/make.py`).

use std::{collections::BTreeMap, fs, path::Path};

use serde_json::{Value, json};
use unweight_format::{
    bundle::{self, Bundle, CompressOptions, Profile, Silent},
    safetensors::{Dtype, Header, SOURCE_HEADER_MAX},
};
use unweight_model::{
    Activation, ExpertWeights, Family, LayerWeights, MlpWeights, ModelConfig, ModelWeights, NormKind, QkNorm, RopeKind,
    RopePairs, Scoring, SharedWeights,
    bind::{BindError, TensorHeader, bind},
    reference::{Reference, ReferenceError, bundle_values, widen},
};

const MODELS: [&str; 28] = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "yarn",
    "linear",
    "odd",
    "mixtral",
    "qwen3_moe",
    "phi3",
    "phi3-short",
    "smollm3",
    "granite",
    "olmo2",
    "glm4",
    "cohere",
    "gemma2",
    "gemma3",
    "qwen2_moe",
    "olmoe",
    "granitemoe",
    "granitemoeshared",
    "deepseek",
    "glm4_moe",
    "llama-bias",
    "olmo2-bias",
    "phimoe",
    "phimoe-short",
];

fn folder(model: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(model)
}

/// Reads a file of tensors: its header and the bytes of every tensor.
fn tensors(path: &Path) -> (Header, BTreeMap<String, Vec<u8>>) {
    let bytes = fs::read(path).unwrap();
    let header = Header::parse(&bytes, bytes.len() as u64, SOURCE_HEADER_MAX).unwrap();
    let data = header.tensors.iter().map(|tensor| {
        let begin = tensor.offset as usize;
        (tensor.name.clone(), bytes[begin..begin + tensor.bytes as usize].to_vec())
    });
    let data = data.collect();
    (header, data)
}

struct Fixture {
    config: ModelConfig,
    weights: ModelWeights,
    values: BTreeMap<String, Vec<f32>>,
    tokens: Vec<u32>,
    expected: Vec<f32>,
}

impl Fixture {
    fn load(model: &str) -> Self {
        let folder = folder(model);
        let config = fs::read_to_string(folder.join("config.json")).unwrap();
        let config = ModelConfig::parse(&config, None).unwrap();
        let (header, data) = tensors(&folder.join("model.safetensors"));
        let weights = bind(&config, header.tensors.iter().map(Into::into)).unwrap();
        let (_, expected) = tensors(&folder.join("expected.safetensors"));
        let tokens = expected["tokens"].chunks(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect();
        let logits = expected["logits"].chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        let dtypes: BTreeMap<_, _> = header.tensors.iter().map(|tensor| (&tensor.name, tensor.dtype)).collect();
        let values = data.into_iter().map(|(name, bytes)| {
            let values = widen(dtypes[&name], &bytes);
            (name, values)
        });
        let values = values.collect();
        Self { config, weights, values, tokens, expected: logits }
    }

    /// The RMS of the difference, relative to the RMS of the logits.
    fn error(&self, config: &ModelConfig, weights: &ModelWeights) -> f64 {
        let values = |name: &str| self.values.get(name).cloned().ok_or(format!("no {name}"));
        relative_rms(&Reference::new(config, weights, values).logits(&self.tokens).unwrap(), &self.expected)
    }
}

fn relative_rms(got: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(got.len(), expected.len());
    let square = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v) * f64::from(v)).sum::<f64>();
    let difference = square(&mut got.iter().zip(expected).map(|(got, expected)| got - expected));
    (difference / square(&mut expected.iter().copied())).sqrt()
}

/// The maximum relative error of two f32 computations that add in different orders; 1e-6 at most was measured.
const CLOSE: f64 = 1e-5;
/// The minimum relative error of a wrong model.
const WRONG: f64 = 1e-2;

#[test]
fn logits_match_transformers() {
    for model in MODELS {
        let fixture = Fixture::load(model);
        let error = fixture.error(&fixture.config, &fixture.weights);
        println!("{model}: {error:.2e}");
        assert!(error < CLOSE, "{model}: {error}");
    }
}

#[test]
fn both_key_spellings_give_the_same_model() {
    for model in MODELS {
        let read = |file| ModelConfig::parse(&fs::read_to_string(folder(model).join(file)).unwrap(), None).unwrap();
        assert_eq!(read("config.json"), read("config.v4.json"), "{model}");
    }
}

#[test]
fn logits_from_a_bundle_are_equal() {
    for (model, profile) in [
        ("llama", Profile::Packed),
        ("qwen2", Profile::Distribution),
        ("odd", Profile::Palette),
        ("mixtral", Profile::Packed),
        ("qwen3_moe", Profile::Distribution),
        ("phi3", Profile::Packed),
        ("smollm3", Profile::Compact),
        ("granite", Profile::Distribution),
        ("olmo2", Profile::Inference),
        ("glm4", Profile::Palette),
        ("cohere", Profile::Archive),
        ("gemma2", Profile::Compact),
        ("gemma3", Profile::Packed),
        ("qwen2_moe", Profile::Packed),
        ("granitemoeshared", Profile::Distribution),
        ("deepseek", Profile::Compact),
        ("glm4_moe", Profile::Packed),
        ("phimoe", Profile::Compact),
        ("phimoe-short", Profile::Packed),
    ] {
        let (fixture, home) = (Fixture::load(model), tempfile::tempdir().unwrap());
        let (source, out) = (home.path().join("model"), home.path().join("bundle"));
        fs::create_dir(&source).unwrap();
        for file in ["config.json", "model.safetensors"] {
            fs::copy(folder(model).join(file), source.join(file)).unwrap();
        }
        bundle::compress(&source, &out, &CompressOptions::new(profile), &Silent).unwrap();
        let bundle = Bundle::open(&out).unwrap();
        let config = ModelConfig::of_bundle(&bundle).unwrap();
        assert_eq!(config, fixture.config, "{model}");
        let weights = ModelWeights::of_bundle(&config, &bundle).unwrap();
        assert_eq!(weights, fixture.weights, "{model}");
        let logits = Reference::new(&config, &weights, bundle_values(&bundle)).logits(&fixture.tokens).unwrap();
        assert!(relative_rms(&logits, &fixture.expected) < CLOSE, "{model}");
    }
}

/// Checkpoints have a tensor for each expert's gate, up and down, or stacks of all.
#[test]
fn stacked_experts_equal_separate_experts() {
    let fixture = Fixture::load("qwen3_moe");
    let separate = ModelWeights::named(&fixture.config);
    assert_ne!(separate, fixture.weights, "the fixture has stacks");
    let part = |name: &str| -> Option<Vec<f32>> {
        let (layer, rest) = name.split_once("mlp.experts.")?;
        let (expert, kind) = rest.split_once('.')?;
        let (stack, at) = match kind {
            "gate_proj.weight" => ("gate_up_proj", 0),
            "up_proj.weight" => ("gate_up_proj", 1),
            _ => ("down_proj", 0),
        };
        let elements = (fixture.config.hidden * fixture.config.intermediate) as usize;
        let expert: usize = expert.parse().ok()?;
        let first = if stack == "down_proj" { expert } else { 2 * expert + at } * elements;
        Some(fixture.values.get(&format!("{layer}mlp.experts.{stack}"))?[first..first + elements].to_vec())
    };
    let values = |name: &str| part(name).or_else(|| fixture.values.get(name).cloned()).ok_or(format!("no {name}"));
    let logits = |weights, values: &dyn Fn(&str) -> Result<Vec<f32>, String>| {
        Reference::new(&fixture.config, weights, values).logits(&fixture.tokens).unwrap()
    };
    assert_eq!(logits(&separate, &values), logits(&fixture.weights, &values));
}

/// The text model in a model of text and images, with the names of transformers 4 and 5.
#[test]
fn text_models_are_found_in_models_of_text_and_images() {
    let text_model = Fixture::load("gemma3");
    let text: Value = serde_json::from_str(&fs::read_to_string(folder("gemma3").join("config.json")).unwrap()).unwrap();
    let whole = json!({"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 8}});
    let config = ModelConfig::from_json(&whole, None).unwrap();
    assert_eq!(config, text_model.config);
    for (prefix, images) in [("language_model.model.", ""), ("model.language_model.", "model.")] {
        let (header, _) = tensors(&folder("gemma3").join("model.safetensors"));
        let rest = ["vision_tower.encoder.layers.0.fc1.weight", "multi_modal_projector.mm_soft_emb_norm.weight"];
        let text_names = header.tensors.iter().map(|tensor| tensor.name.replacen("model.", prefix, 1));
        let names: Vec<String> = text_names.chain(rest.iter().map(|name| format!("{images}{name}"))).collect();
        let shapes = header.tensors.iter().map(|tensor| &tensor.shape[..]).chain([&[8, 8][..], &[8]]);
        let headers = names.iter().zip(shapes).map(|(name, shape)| TensorHeader { name, dtype: Dtype::Bf16, shape });
        let headers: Vec<_> = headers.collect();
        let weights = bind(&config, headers.iter().copied()).unwrap();
        assert_eq!(weights.embed, format!("{prefix}embed_tokens.weight"));
        let values = |name: &str| {
            let text_name = name.replacen(prefix, "model.", 1);
            text_model.values.get(&text_name).cloned().ok_or(format!("no {name}"))
        };
        let logits = Reference::new(&config, &weights, values).logits(&text_model.tokens).unwrap();
        assert!(relative_rms(&logits, &text_model.expected) < CLOSE, "{prefix}");
        // A text model alone has no image encoder.
        let text =
            headers.iter().map(|header| TensorHeader { name: header.name.trim_start_matches(prefix), ..*header });
        let error = bind(&config, text).unwrap_err();
        assert!(matches!(error, BindError::LeftOver { count: 2, .. } | BindError::Missing { .. }), "{error}");
    }
}

/// The shared expert of a layer.
fn shared(layer: &mut LayerWeights) -> &mut Option<SharedWeights> {
    match &mut layer.mlp {
        MlpWeights::Mixture { shared, .. } => shared,
        mlp => panic!("{mlp:?}"),
    }
}

/// Mistakes in reading a configuration or in computing must be visible in the logits.
#[test]
fn another_model_has_other_logits() {
    type Fault = fn(&mut ModelConfig, &mut ModelWeights);
    let faults: [(&str, &str, Fault); 73] = [
        ("llama", "no llama3 scaling", |config, _| config.rope.kind = RopeKind::Default),
        ("llama", "another theta", |config, _| config.rope.theta = 9000.0),
        ("llama", "a ramp of another context", |config, _| {
            config.rope.kind = RopeKind::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192 };
        }),
        ("linear", "no linear scaling", |config, _| config.rope.kind = RopeKind::Default),
        ("yarn", "no yarn scaling", |config, _| config.rope.kind = RopeKind::Default),
        ("yarn", "no attention factor", |config, _| {
            let RopeKind::Yarn { attention_factor, .. } = &mut config.rope.kind else { panic!("a yarn") };
            *attention_factor = 1.0;
        }),
        ("mistral", "no window", |config, _| config.window.fill(None)),
        ("mistral", "a window of one more", |config, _| config.window.fill(Some(9))),
        ("qwen2", "a window on every layer", |config, _| config.window.fill(Some(8))),
        ("qwen2", "no bias of the keys", |_, weights| weights.layers.iter_mut().for_each(|layer| layer.k_bias = None)),
        ("qwen3", "no norm of queries and keys", |config, _| config.qk_norm = QkNorm::None),
        ("odd", "another epsilon", |config, _| config.eps = 0.1),
        ("mixtral", "one expert per token", |config, _| config.mixture.as_mut().unwrap().top_k = 1),
        ("mixtral", "weights of all experts", |config, _| config.mixture.as_mut().unwrap().normalized = false),
        ("mixtral", "experts in another order", |_, weights| {
            weights.layers.iter_mut().for_each(|layer| match &mut layer.mlp {
                MlpWeights::Mixture { experts: ExpertWeights::Each(each), .. } => each.reverse(),
                mlp => panic!("{mlp:?}"),
            });
        }),
        ("qwen3_moe", "weights that add up to 1", |config, _| config.mixture.as_mut().unwrap().normalized = true),
        ("phi3", "factors of short contexts", |config, _| {
            let RopeKind::Long { original, .. } = &mut config.rope.kind else { panic!("a longrope") };
            *original = 32;
        }),
        ("phi3-short", "factors of long contexts", |config, _| {
            let RopeKind::Long { original, .. } = &mut config.rope.kind else { panic!("a longrope") };
            *original = 16;
        }),
        ("phi3-short", "no window", |config, _| config.window.fill(None)),
        ("smollm3", "rotation in every layer", |config, _| config.rotated.fill(true)),
        ("smollm3", "no window", |config, _| config.window.fill(None)),
        ("granite", "no factor of embeddings", |config, _| config.factors.embedding = 1.0),
        ("granite", "no factor of scores", |config, _| config.factors.attention = None),
        ("granite", "no factor of the residual stream", |config, _| config.factors.residual = 1.0),
        ("granite", "no factor of logits", |config, _| config.factors.logits = 1.0),
        ("olmo2", "norms of heads", |config, _| config.qk_norm = QkNorm::None),
        ("olmo2", "no norm after the MLP", |_, weights| weights.layers[1].mlp_norm = None),
        ("glm4", "pairs of halves", |config, _| config.rope.pairs = RopePairs::Halves),
        ("glm4", "no norm after attention", |_, weights| weights.layers[0].attention_norm = None),
        ("cohere", "a root mean square", |config, _| config.norm = NormKind::Rms),
        ("cohere", "one after the other", |config, weights| {
            config.parallel = false;
            weights.layers.iter_mut().for_each(|layer| layer.post_norm = layer.input_norm.clone());
        }),
        ("gemma2", "norms without the one", |config, _| config.norm = NormKind::RmsOnce),
        ("gemma2", "no cap of scores", |config, _| config.soft_caps.attention = None),
        ("gemma2", "no cap of logits", |config, _| config.soft_caps.logits = None),
        ("gemma2", "no factor of embeddings", |config, _| config.factors.embedding = 1.0),
        ("gemma2", "scores by the size of heads", |config, _| config.factors.attention = None),
        ("gemma2", "windows in the other layers", |config, _| config.window.reverse()),
        ("gemma2", "another activation", |config, _| config.act = Activation::Silu),
        ("gemma2", "no norm before the MLP", |_, weights| weights.layers[1].post_norm = None),
        ("gemma3", "no norm of queries and keys", |config, _| config.qk_norm = QkNorm::None),
        ("gemma3", "one rotary embedding", |config, _| config.local_rope = None),
        ("gemma3", "no linear scaling", |config, _| config.rope.kind = RopeKind::Default),
        ("gemma3", "no windows", |config, _| config.window.fill(None)),
        ("qwen2_moe", "no gate of the shared expert", |_, weights| {
            weights.layers.iter_mut().for_each(|layer| shared(layer).as_mut().unwrap().gate = None);
        }),
        ("qwen2_moe", "no shared expert", |_, weights| {
            weights.layers.iter_mut().for_each(|layer| *shared(layer) = None)
        }),
        ("qwen2_moe", "weights that add up to 1", |config, _| config.mixture.as_mut().unwrap().normalized = true),
        ("olmoe", "no norm of queries and keys", |config, _| config.qk_norm = QkNorm::None),
        ("olmoe", "weights that add up to 1", |config, _| config.mixture.as_mut().unwrap().normalized = true),
        ("granitemoe", "no factor of the residual stream", |config, _| config.factors.residual = 1.0),
        ("granitemoe", "weights of all experts", |config, _| config.mixture.as_mut().unwrap().normalized = false),
        ("granitemoeshared", "no shared expert", |_, weights| {
            weights.layers.iter_mut().for_each(|layer| *shared(layer) = None);
        }),
        ("deepseek", "no shared expert", |_, weights| *shared(&mut weights.layers[1]) = None),
        ("deepseek", "weights that add up to 1", |config, _| config.mixture.as_mut().unwrap().normalized = true),
        ("glm4_moe", "no correction of scores", |_, weights| {
            let MlpWeights::Mixture { correction, .. } = &mut weights.layers[1].mlp else { panic!("a mixture") };
            *correction = None;
        }),
        ("glm4_moe", "no factor of experts", |config, _| config.mixture.as_mut().unwrap().factor = 1.0),
        ("glm4_moe", "scores of a softmax", |config, _| config.mixture.as_mut().unwrap().scoring = Scoring::Softmax),
        ("glm4_moe", "weights of any sum", |config, _| config.mixture.as_mut().unwrap().normalized = false),
        ("glm4_moe", "no shared expert", |_, weights| *shared(&mut weights.layers[1]) = None),
        ("glm4_moe", "no norm of queries and keys", |config, _| config.qk_norm = QkNorm::None),
        ("glm4_moe", "adjacent pairs", |config, _| config.rope.pairs = RopePairs::Adjacent),
        ("llama-bias", "no bias of the output projection", |_, weights| weights.layers[0].o_bias = None),
        ("llama-bias", "no bias of the values", |_, weights| weights.layers[0].v_bias = None),
        ("olmo2-bias", "no bias before norms", |_, weights| weights.layers[0].q_bias = None),
        ("phimoe", "no bias of the output projection", |_, weights| weights.layers[1].o_bias = None),
        ("phimoe", "no bias of the head", |_, weights| weights.lm_head_bias = None),
        ("phimoe", "no bias of the last norm", |_, weights| weights.final_norm.bias = None),
        ("phimoe", "no bias of a norm", |_, weights| weights.layers[1].post_norm.as_mut().unwrap().bias = None),
        ("phimoe", "weights of a softmax", |config, _| config.mixture.as_mut().unwrap().scoring = Scoring::Softmax),
        ("phimoe", "no other expert is near", |config, _| config.mixture.as_mut().unwrap().cutoff = 0.0),
        ("phimoe", "a root mean square", |config, _| config.norm = NormKind::RmsOnce),
        ("phimoe", "factors of short contexts", |config, _| {
            let RopeKind::Long { original, .. } = &mut config.rope.kind else { panic!("a longrope") };
            *original = 32;
        }),
        ("phimoe-short", "the factor of long contexts", |config, _| {
            let RopeKind::Long { attention_factors, .. } = &mut config.rope.kind else { panic!("a longrope") };
            attention_factors.reverse();
        }),
        ("phimoe-short", "no window", |config, _| config.window.fill(None)),
    ];
    for (model, what, inject) in faults {
        let fixture = Fixture::load(model);
        let (mut config, mut weights) = (fixture.config.clone(), fixture.weights.clone());
        inject(&mut config, &mut weights);
        let error = fixture.error(&config, &weights);
        println!("{model}, {what}: {error:.2e}");
        assert!(error > WRONG, "{model}, {what}: {error}");
    }
}

#[test]
fn reference_reports_layers_and_names_errors() {
    let fixture = Fixture::load("qwen3");
    let values = |name: &str| fixture.values.get(name).cloned().ok_or(format!("no {name}"));
    let reference = Reference::new(&fixture.config, &fixture.weights, values);
    let mut streams = Vec::new();
    let last = reference.residual_stream(&[5, 6, 7], |layer, stream| streams.push((layer, stream.to_vec()))).unwrap();
    assert_eq!(fixture.config.family, Family::Qwen3);
    assert_eq!(streams.len(), 2);
    assert_eq!(streams[1], (1, last.clone()));
    assert_eq!(last.len(), 3 * 32);
    assert!(reference.logits(&[]).unwrap().is_empty() && reference.last_logits(&[]).unwrap().is_empty());
    let (all, last) = (reference.logits(&[1, 2, 3]).unwrap(), reference.last_logits(&[1, 2, 3]).unwrap());
    assert_eq!(all[2 * all.len() / 3..], last);
    let error = reference.logits(&[0, 95, 96]).unwrap_err();
    assert!(matches!(error, ReferenceError::Token { position: 2, token: 96, vocab: 96 }), "{error}");
    let missing = |name: &str| if name.contains("o_proj") { Err("missing") } else { values(name).map_err(|_| "none") };
    let error = Reference::new(&fixture.config, &fixture.weights, missing).logits(&[1]).unwrap_err();
    assert_eq!(error.to_string(), "tensor 'model.layers.0.self_attn.o_proj.weight' cannot be read");
    let short = |name: &str| values(name).map(|mut all| all.split_off(1));
    let error = Reference::new(&fixture.config, &fixture.weights, short).logits(&[1]).unwrap_err();
    assert!(matches!(error, ReferenceError::Elements { got: 3071, expected: 3072, .. }), "{error}");
}
