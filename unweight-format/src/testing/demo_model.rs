//! A small Llama-shaped model for experiments, with weights that look trained.
//!
//! Trained weights are not one Gaussian: scales differ by tensor and by row, attention outputs and down projections
//! have heavy tails, embeddings have rows that were hardly trained, and there are a few exact zeros and subnormals. A
//! row is a function of seed, tensor and row alone, so the bytes do not depend on the number of threads.

use std::{collections::BTreeMap, fs, io::Write, path::Path, sync::LazyLock};

use serde_json::json;

use super::{Random, bf16};
use crate::{
    bundle::{BundleError, pipeline::on_threads},
    parallel,
    roles::{self, Role},
    safetensors::{Dtype, header_to_bytes},
};

/// Shape of a demo model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DemoOptions {
    /// Transformer layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the MLP.
    pub intermediate: usize,
    /// Query heads; must divide `hidden`.
    pub heads: usize,
    /// Key and value heads; must divide `heads`.
    pub kv_heads: usize,
    /// The number of tokens in the vocabulary.
    pub vocab: usize,
    /// Experts per layer; 0 for a dense MLP.
    pub experts: usize,
    /// The number of safetensors files; with one file there is no index.
    pub shards: usize,
    /// Random seed. Seed and shape determine the weights.
    pub seed: u64,
}

impl Default for DemoOptions {
    /// About 100 million parameters, 200 MB.
    fn default() -> Self {
        Self {
            layers: 8,
            hidden: 1024,
            intermediate: 2816,
            heads: 16,
            kv_heads: 4,
            vocab: 8192,
            experts: 0,
            shards: 2,
            seed: 1,
        }
    }
}

/// The report of [`write()`].
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct DemoReport {
    /// The number of elements of all tensors.
    pub parameters: u64,
    /// The number of tensors.
    pub tensors: u64,
    /// The number of files.
    pub files: u64,
    /// Bytes of all files together.
    pub bytes: u64,
}

/// Bytes generated at once.
const CHUNK_BYTES: usize = 32 << 20;

struct Tensor {
    name: String,
    shape: Vec<usize>,
}

impl Tensor {
    fn rows(&self) -> usize {
        if self.shape.len() < 2 { 1 } else { self.shape[0] }
    }

    fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    fn bytes(&self) -> u64 {
        self.rows() as u64 * self.cols() as u64 * 2
    }
}

impl DemoOptions {
    fn check(&self) -> Result<(), BundleError> {
        let fail = |reason: String| Err(BundleError::DemoShape { reason });
        let positive = [
            ("layers", self.layers),
            ("hidden", self.hidden),
            ("intermediate", self.intermediate),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("vocab", self.vocab),
            ("shards", self.shards),
        ];
        if let Some((name, value)) = positive.iter().find(|(_, value)| !(1..=1 << 24).contains(value)) {
            return fail(format!("{name} is {value}, it must be from 1 to 16777216"));
        }
        if !self.hidden.is_multiple_of(self.heads) {
            return fail(format!("{} heads do not divide hidden {}", self.heads, self.hidden));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return fail(format!("{} kv_heads do not divide {} heads", self.kv_heads, self.heads));
        }
        if self.layers > 1000 || self.experts > 1000 || self.shards > 1000 {
            return fail("layers, experts and shards are at most 1000".into());
        }
        Ok(())
    }

    fn tensors(&self) -> Vec<Tensor> {
        let (hidden, wide) = (self.hidden, self.intermediate);
        let kv = hidden / self.heads * self.kv_heads;
        let mut tensors = Vec::new();
        let mut add = |name: String, shape: &[usize]| tensors.push(Tensor { name, shape: shape.to_vec() });
        add("model.embed_tokens.weight".into(), &[self.vocab, hidden]);
        for layer in 0..self.layers {
            let mut add = |name: &str, shape: &[usize]| add(format!("model.layers.{layer}.{name}.weight"), shape);
            add("input_layernorm", &[hidden]);
            add("self_attn.q_proj", &[hidden, hidden]);
            add("self_attn.k_proj", &[kv, hidden]);
            add("self_attn.v_proj", &[kv, hidden]);
            add("self_attn.o_proj", &[hidden, hidden]);
            add("post_attention_layernorm", &[hidden]);
            if self.experts == 0 {
                add("mlp.gate_proj", &[wide, hidden]);
                add("mlp.up_proj", &[wide, hidden]);
                add("mlp.down_proj", &[hidden, wide]);
            } else {
                add("block_sparse_moe.gate", &[self.experts, hidden]);
            }
            for expert in 0..self.experts {
                add(&format!("block_sparse_moe.experts.{expert}.w1"), &[wide, hidden]);
                add(&format!("block_sparse_moe.experts.{expert}.w2"), &[hidden, wide]);
                add(&format!("block_sparse_moe.experts.{expert}.w3"), &[wide, hidden]);
            }
        }
        add("model.norm.weight".into(), &[hidden]);
        add("lm_head.weight".into(), &[self.vocab, hidden]);
        tensors
    }

    fn config(&self) -> serde_json::Value {
        let dense = self.experts == 0;
        let mut config = json!({
            "architectures": [if dense { "LlamaForCausalLM" } else { "MixtralForCausalLM" }],
            "model_type": if dense { "llama" } else { "mixtral" },
            "torch_dtype": "bfloat16",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden / self.heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": false,
            "bos_token_id": 0,
            "eos_token_id": 1,
        });
        if let Some(config) = config.as_object_mut().filter(|_| !dense) {
            config.insert("num_local_experts".into(), self.experts.into());
            config.insert("num_experts_per_tok".into(), self.experts.min(2).into());
        }
        config
    }
}

/// Writes the model into a directory that does not exist or is empty.
///
/// # Errors
/// The options do not describe a model, the directory is not empty, or writing fails.
pub fn write(dir: &Path, options: &DemoOptions) -> Result<DemoReport, BundleError> {
    options.check()?;
    // Not rayon's global pool, which panics if threads cannot be created.
    on_threads(None, || write_on(dir, options))
}

fn write_on(dir: &Path, options: &DemoOptions) -> Result<DemoReport, BundleError> {
    fs::create_dir_all(dir).map_err(BundleError::io("create the directory", dir))?;
    if fs::read_dir(dir).map_err(BundleError::io("list the directory", dir))?.next().is_some() {
        return Err(BundleError::OutputExists { path: dir.into() });
    }
    let tensors = options.tensors();
    let total: u64 = tensors.iter().map(Tensor::bytes).sum();
    let mut report = DemoReport { parameters: total / 2, tensors: tensors.len() as u64, files: 0, bytes: 0 };
    let mut put = |name: &str, bytes: &[u8]| {
        let path = dir.join(name);
        report.files += 1;
        report.bytes += bytes.len() as u64;
        fs::write(&path, bytes).map_err(BundleError::io("write the file", path))
    };
    let pretty = |value: serde_json::Value| {
        let mut text = serde_json::to_vec_pretty(&value).expect("JSON values serialise");
        text.push(b'\n');
        text
    };
    put("config.json", &pretty(options.config()))?;
    put("generation_config.json", &pretty(json!({ "bos_token_id": 0, "eos_token_id": 1, "do_sample": false })))?;
    put(
        "tokenizer_config.json",
        &pretty(json!({ "bos_token": "<s>", "eos_token": "</s>", "model_max_length": 8192 })),
    )?;
    let vocab: BTreeMap<String, usize> = (0..options.vocab.min(4096)).map(|id| (format!("<{id}>"), id)).collect();
    // Each word is a token: `<5> <17>`.
    let words = json!({ "type": "WordLevel", "vocab": vocab, "unk_token": "<0>" });
    let split = json!({ "type": "WhitespaceSplit" });
    put(
        "tokenizer.json",
        &pretty(json!({ "version": "1.0", "added_tokens": [], "pre_tokenizer": split, "model": words })),
    )?;

    // A shard contains consecutive tensors and ends as soon as its share is full.
    let shards = options.shards.min(tensors.len());
    let mut weight_map = BTreeMap::new();
    let (mut first, mut sum) = (0, 0);
    for shard in 0..shards {
        let name = match shards {
            1 => "model.safetensors".to_string(),
            _ => format!("model-{:05}-of-{shards:05}.safetensors", shard + 1),
        };
        let share = total / shards as u64 * (shard as u64 + 1);
        let mut end = first + 1;
        sum += tensors[first].bytes();
        // Every later shard needs at least one tensor.
        while tensors.len() - end > shards - shard - 1 && (shard + 1 == shards || sum + tensors[end].bytes() <= share) {
            sum += tensors[end].bytes();
            end += 1;
        }
        weight_map.extend(tensors[first..end].iter().map(|t| (t.name.clone(), name.clone())));
        report.bytes += write_shard(&dir.join(&name), &tensors, first..end, options.seed)?;
        report.files += 1;
        first = end;
    }
    if shards > 1 {
        let index = pretty(json!({ "metadata": { "total_size": total }, "weight_map": weight_map }));
        let path = dir.join("model.safetensors.index.json");
        report.files += 1;
        report.bytes += index.len() as u64;
        fs::write(&path, index).map_err(BundleError::io("write the file", path))?;
    }
    Ok(report)
}

fn write_shard(path: &Path, all: &[Tensor], range: std::ops::Range<usize>, seed: u64) -> Result<u64, BundleError> {
    let metadata = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    let mut begin = 0;
    let entries = all[range.clone()].iter().map(|tensor| {
        let offsets = [begin, begin + tensor.bytes()];
        begin = offsets[1];
        (tensor.name.as_str(), Dtype::Bf16, tensor.shape.as_slice(), offsets)
    });
    let header = header_to_bytes(&metadata, entries, 0);
    let mut file = fs::File::create(path).map_err(BundleError::io("create the file", path))?;
    let mut write = |bytes: &[u8]| file.write_all(bytes).map_err(BundleError::io("write the file", path));
    write(&header)?;
    let mut buffer = Vec::new();
    for (index, tensor) in range.clone().zip(&all[range]) {
        let rows_at_once = (CHUNK_BYTES / (tensor.cols() * 2)).max(1);
        for first in (0..tensor.rows()).step_by(rows_at_once) {
            let rows = rows_at_once.min(tensor.rows() - first);
            buffer.resize(rows * tensor.cols() * 2, 0);
            parallel::for_each_chunk(&mut buffer, tensor.cols() * 2, &|row, out| {
                fill_row(
                    out,
                    tensor,
                    Random::at(&[seed, index as u64, (first + row) as u64]),
                    Random::at(&[seed, index as u64]),
                );
            });
            write(&buffer)?;
        }
    }
    Ok(header.len() as u64 + begin)
}

/// 2^16 equally likely values of a distribution: a sample costs 16 random bits and a load.
type Quantiles = Box<[f32]>;

/// Random draws, so that the table has the tails of a sample of its size.
static NORMAL: LazyLock<Quantiles> = LazyLock::new(|| {
    let mut random = Random::at(&[1]);
    (0..1 << 16).map(|_| random.normal() as f32).collect()
});

/// Student's t distribution with 4 degrees of freedom, scaled to variance 1, by its quantile function.
static HEAVY: LazyLock<Quantiles> = LazyLock::new(|| {
    (0..1 << 16)
        .map(|i| {
            let p = (f64::from(i) + 0.5) / 65536.0;
            let alpha = (4.0 * p * (1.0 - p)).sqrt();
            let q = (alpha.acos() / 3.0).cos() / alpha;
            let t = 2.0 * (q - 1.0).max(0.0).sqrt() * (p - 0.5).signum();
            (t / std::f64::consts::SQRT_2) as f32
        })
        .collect()
});

fn fill_row(out: &mut [u8], tensor: &Tensor, mut random: Random, mut of_tensor: Random) {
    let (role, layer) = roles::of(&tensor.name);
    if role == Role::Norm {
        for element in out.chunks_exact_mut(2) {
            element.copy_from_slice(&bf16((1.0 + 0.1 * random.normal()) as f32).to_le_bytes());
        }
        return;
    }
    let fan_in = tensor.cols() as f64;
    let scale = match role {
        Role::Embedding | Role::LmHead => 0.02,
        _ => 0.8 / fan_in.sqrt(),
    };
    let tensor_scale = scale * (0.25 * of_tensor.normal()).exp();
    // Tokens that hardly occur keep the scale of their initialisation.
    let untrained = role == Role::Embedding && random.uniform() < 0.02;
    let row_scale = if untrained { 1e-3 } else { (0.15 * random.normal()).exp() };
    let scale = (tensor_scale * row_scale) as f32;
    let heavy = matches!(role, Role::O | Role::Down) || role == Role::Gate && layer.is_some_and(|l| l % 4 == 3);
    let quantiles = if heavy { &*HEAVY } else { &*NORMAL };
    for group in out.chunks_mut(8) {
        let bits = random.bits();
        for (i, element) in group.chunks_exact_mut(2).enumerate() {
            let value = quantiles[usize::from((bits >> (16 * i)) as u16)] * scale;
            element.copy_from_slice(&bf16(value).to_le_bytes());
        }
    }
    // One element in 4096 is an exact zero (usually) or a subnormal.
    let elements = out.len() / 2;
    let rest = (elements % 4096) as f64 / 4096.0;
    for _ in 0..elements / 4096 + usize::from(random.uniform() < rest) {
        let at = (random.bits() % elements as u64) as usize * 2;
        let bits =
            if random.uniform() < 0.9 { (random.bits() as u16) & 0x8000 } else { (random.bits() as u16) & 0x807f };
        out[at..at + 2].copy_from_slice(&bits.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_is_a_function_of_its_options() {
        let options = DemoOptions {
            layers: 2,
            hidden: 64,
            intermediate: 96,
            heads: 4,
            kv_heads: 2,
            vocab: 100,
            experts: 3,
            shards: 3,
            seed: 7,
        };
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, options: &DemoOptions| {
            let report = write(&dir.path().join(name), options).unwrap();
            let mut files: Vec<_> = fs::read_dir(dir.path().join(name)).unwrap().map(|e| e.unwrap().path()).collect();
            files.sort();
            assert_eq!(files.len() as u64, report.files);
            let contents: Vec<Vec<u8>> = files.iter().map(|f| fs::read(f).unwrap()).collect();
            assert_eq!(contents.iter().map(|c| c.len() as u64).sum::<u64>(), report.bytes);
            contents
        };
        assert!(write("a", &options) == write("b", &options));
        assert!(write("c", &DemoOptions { seed: 8, ..options.clone() }) != write("d", &options));
    }

    #[test]
    fn impossible_shapes_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let error = |options: DemoOptions| write(&dir.path().join("x"), &options).unwrap_err().to_string();
        assert!(
            error(DemoOptions { heads: 3, ..DemoOptions::default() }).contains("3 heads do not divide hidden 1024")
        );
        assert!(error(DemoOptions { layers: 0, ..DemoOptions::default() }).contains("layers is 0"));
    }

    #[test]
    fn rounding_agrees_with_the_reference_library() {
        let mut random = Random::at(&[3]);
        for _ in 0..100_000 {
            let value = (random.normal() * (10.0 * random.normal()).exp2()) as f32;
            assert_eq!(bf16(value), half::bf16::from_f32(value).to_bits(), "{value}");
        }
    }
}
