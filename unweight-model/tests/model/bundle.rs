//! Configuration and weights of a bundle, and the files that a bundle keeps next to its weights.

use std::{fs, path::Path};

use unweight_format::{
    bundle::{self, Bundle, BundleError, CompressOptions, Silent},
    testing::demo_model::{self, DemoOptions},
};
use unweight_model::{BindError, ConfigError, Family, ModelConfig, ModelWeights};

fn compressed(home: &Path, change: impl Fn(&Path)) -> Bundle {
    let small = DemoOptions { layers: 2, hidden: 64, intermediate: 192, heads: 4, kv_heads: 2, ..Default::default() };
    let small = DemoOptions { vocab: 256, ..small };
    let (model, out) = (home.join("model"), home.join("bundle"));
    demo_model::write(&model, &small).unwrap();
    change(&model);
    bundle::compress(&model, &out, &CompressOptions::default(), &Silent).unwrap();
    Bundle::open(&out).unwrap()
}

#[test]
fn bundle_names_its_model_and_tensors() {
    let home = tempfile::tempdir().unwrap();
    let bundle = compressed(home.path(), |model| {
        fs::write(model.join("generation_config.json"), r#"{"eos_token_id": [7, 9], "do_sample": true}"#).unwrap();
    });
    let config = ModelConfig::of_bundle(&bundle).unwrap();
    assert_eq!((config.family, config.hidden, config.layers, config.head_dim), (Family::Llama, 64, 2, 16));
    assert_eq!((&config.eos[..], config.generation.do_sample), (&[7, 9][..], true));
    // The bundle's own file declares packed weights, which is not another model.
    let bundle_config = fs::read_to_string(home.path().join("bundle/config.json")).unwrap();
    assert!(bundle_config.contains("\"quant_method\": \"unweight\""), "{bundle_config}");
    let generation = fs::read_to_string(home.path().join("bundle/generation_config.json")).unwrap();
    assert_eq!(ModelConfig::parse(&bundle_config, Some(&generation)).unwrap(), config);
    let weights = ModelWeights::of_bundle(&config, &bundle).unwrap();
    assert_eq!(weights.layers[1].mlp.dense().unwrap().down, "model.layers.1.mlp.down_proj.weight");
    let named = 3 + weights.layers.len() * 9;
    assert_eq!(bundle.tensors().count(), named, "each tensor has one role");
    for layer in &weights.layers {
        assert_eq!(bundle.tensor(&layer.q).unwrap().entry().shape, [64, 64]);
        assert_eq!(bundle.tensor(&layer.v).unwrap().entry().shape, [32, 64]);
    }
}

/// A safetensors file with one BF16 tensor of zeros.
fn file_of(name: &str, rows: usize, cols: usize) -> Vec<u8> {
    let bytes = rows * cols * 2;
    let header = format!(r#"{{"{name}":{{"dtype":"BF16","shape":[{rows},{cols}],"data_offsets":[0,{bytes}]}}}}"#);
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.resize(file.len() + bytes, 0);
    file
}

#[test]
fn duplicate_weights_in_other_files_are_ignored() {
    let home = tempfile::tempdir().unwrap();
    let more = file_of("layers.0.attention.wq.weight", 64, 64);
    let bundle = compressed(home.path(), |model| fs::write(model.join("consolidated.safetensors"), &more).unwrap());
    let config = ModelConfig::of_bundle(&bundle).unwrap();
    assert!(ModelWeights::of_bundle(&config, &bundle).is_ok());
    // The copy may have the same names, too; tensors that are loaded by name are the model's.
    let home = tempfile::tempdir().unwrap();
    let zeros = file_of("model.layers.0.self_attn.q_proj.weight", 64, 64);
    let bundle = compressed(home.path(), |model| fs::write(model.join("adapter.safetensors"), &zeros).unwrap());
    let weights = ModelWeights::of_bundle(&config, &bundle).unwrap();
    assert!(bundle.tensor(&weights.layers[0].q).unwrap().decode().unwrap().iter().any(|&byte| byte != 0));
    assert!(
        bundle
            .tensor_in("adapter.safetensors", &weights.layers[0].q)
            .unwrap()
            .decode()
            .unwrap()
            .iter()
            .all(|&byte| byte == 0)
    );
    // A file that the model's naming covers is not such a copy.
    let home = tempfile::tempdir().unwrap();
    let bundle =
        compressed(home.path(), |model| fs::write(model.join("model-00003-of-00003.safetensors"), &more).unwrap());
    let error = ModelWeights::of_bundle(&config, &bundle).unwrap_err();
    assert!(matches!(&error, BindError::LeftOver { first, .. } if first == "layers.0.attention.wq.weight"), "{error}");
}

#[test]
fn other_files_of_the_bundle_are_checked() {
    let home = tempfile::tempdir().unwrap();
    let bundle = compressed(home.path(), |_| ());
    assert_eq!(bundle.copied("no.such", 100).unwrap(), None);
    assert_eq!(bundle.copied("unweight.json", 1 << 20).unwrap(), None, "not a file of the model");
    assert!(matches!(bundle.copied("config.json", 10), Err(BundleError::TooLarge { limit: 10, .. })));
    let path = home.path().join("bundle/config.json.source");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replacen("256", "257", 1)).unwrap();
    let error = ModelConfig::of_bundle(&bundle).unwrap_err();
    assert!(matches!(error, ConfigError::Bundle(BundleError::Mismatch { .. })), "{error}");
    assert!(error.to_string().starts_with("config.json.source: "), "{error}");
}

#[test]
fn bundle_without_config_is_rejected() {
    let home = tempfile::tempdir().unwrap();
    let bundle = compressed(home.path(), |model| fs::remove_file(model.join("config.json")).unwrap());
    let error = ModelConfig::of_bundle(&bundle).unwrap_err();
    assert!(matches!(error, ConfigError::NoFile { file: "config.json" }), "{error}");
}
