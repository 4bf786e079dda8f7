//! Models for tests.

use std::{
    collections::BTreeMap,
    error::Error,
    fs,
    path::{Path, PathBuf},
};

use unweight_format::{
    bundle::BundleError,
    testing::{
        Random, Weights,
        demo_model::{self, DemoOptions},
    },
};

/// A directory that is removed after the test.
pub struct Scratch(tempfile::TempDir);

impl Scratch {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn dir(&self) -> &Path {
        self.0.path()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

/// Relative names and contents of all files below a directory.
pub fn read_tree(root: &Path) -> BTreeMap<String, Vec<u8>> {
    fn walk(dir: &Path, prefix: &str, found: &mut BTreeMap<String, Vec<u8>>) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            let name = format!("{prefix}{}", path.file_name().unwrap().to_str().unwrap());
            if path.is_dir() {
                walk(&path, &format!("{name}/"), found);
            } else {
                found.insert(name, fs::read(&path).unwrap());
            }
        }
    }
    let mut found = BTreeMap::new();
    walk(root, "", &mut found);
    found
}

/// Real trained weights if available, else a demo model of the same size.
pub fn real_model(scratch: &Scratch) -> PathBuf {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let data = std::env::var_os("UNWEIGHT_TEST_DATA").map_or_else(|| workspace.join("../shared/data"), PathBuf::from);
    let real = data.join("minilm-l01");
    if real.is_dir() {
        return real;
    }
    let model = scratch.path("model");
    let demo = DemoOptions {
        layers: 2,
        hidden: 384,
        intermediate: 1536,
        heads: 12,
        kv_heads: 12,
        vocab: 2050,
        ..DemoOptions::default()
    };
    demo_model::write(&model, &demo).unwrap();
    model
}

/// Writes a model of a few hundred kilobytes in two shards with an index.
pub fn small_model(dir: &Path) {
    let demo = DemoOptions {
        layers: 2,
        hidden: 64,
        intermediate: 192,
        heads: 4,
        kv_heads: 2,
        vocab: 300,
        ..DemoOptions::default()
    };
    demo_model::write(dir, &demo).unwrap();
}

/// Shape of a model of a few megabytes per layer, with as many tensors as the default demo model's.
pub fn narrow(layers: usize, vocab: usize, shards: usize) -> DemoOptions {
    DemoOptions { layers, hidden: 256, intermediate: 704, vocab, shards, ..DemoOptions::default() }
}

/// BF16 weights that look trained.
pub fn weights(elements: usize, seed: u64) -> Vec<u8> {
    Weights::TRAINED.bytes(elements, seed)
}

/// Bytes that do not compress.
pub fn noise(bytes: usize) -> Vec<u8> {
    Random::new(9).bytes(bytes)
}

pub struct Tensor {
    name: String,
    dtype: String,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

pub fn tensor(name: &str, dtype: &str, shape: &[usize], bytes: &[u8]) -> Tensor {
    Tensor { name: name.into(), dtype: dtype.into(), shape: shape.into(), bytes: bytes.into() }
}

/// A safetensors file with the tensors in this order, and a header with unusual white space.
pub fn safetensors_file(metadata: &[(&str, &str)], tensors: &[Tensor]) -> Vec<u8> {
    let mut entries = Vec::new();
    if !metadata.is_empty() {
        let metadata: BTreeMap<_, _> = metadata.iter().copied().collect();
        entries.push(format!("\"__metadata__\" : {}", serde_json::to_string(&metadata).unwrap()));
    }
    let mut begin = 0;
    for t in tensors {
        let end = begin + t.bytes.len();
        let entry = serde_json::json!({ "dtype": t.dtype, "shape": t.shape, "data_offsets": [begin, end] });
        entries.push(format!("{}:{entry}", serde_json::to_string(&t.name).unwrap()));
        begin = end;
    }
    let json = format!("{{{}}}  ", entries.join(" ,\n"));
    let mut file = (json.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(json.as_bytes());
    tensors.iter().for_each(|t| file.extend_from_slice(&t.bytes));
    file
}

/// The JSON header of a safetensors file.
pub fn header(file: &[u8]) -> serde_json::Value {
    let bytes = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    serde_json::from_slice(&file[8..8 + bytes]).unwrap()
}

/// An error's message with its causes.
pub fn chain(error: &BundleError) -> String {
    let (mut text, mut cause) = (error.to_string(), error.source());
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
