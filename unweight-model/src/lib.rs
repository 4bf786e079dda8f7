//! Describes language models, apart from how they are run: their configuration, and the role of each tensor.
//!
//! ```text
//! config.json, generation_config.json --parse--> ModelConfig --+--> Rope::table    cos and sin, as transformers does
//! names, dtypes, shapes of all tensors ----------- bind -------+--> ModelWeights   a tensor's name for every role
//!                                                              +--> Reference      logits in f32, slow and obvious
//! ```
//! This crate needs no device and links no native library. It supports the families of [`Family`], with the defaults of
//! transformers. Anything else that a configuration requests is an error that names file and key.
//!
//! ```
//! use unweight_model::{Family, ModelConfig};
//! let json = r#"{"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
//!     "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
//!     "max_position_embeddings": 131072, "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3",
//!     "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}"#;
//! let config = ModelConfig::parse(json, None)?;
//! assert_eq!((config.family, config.head_dim), (Family::Llama, 128));
//! let table = config.rope.table(4096);
//! assert_eq!(table.cos.len(), 4096 * 64);
//! # Ok::<(), unweight_model::ConfigError>(())
//! ```

pub mod bind;
mod capacity;
pub mod config;
pub mod geometry;
pub mod reference;
pub mod rope;
pub mod sampling;

#[doc(inline)]
pub use bind::{
    BindError, ExpertWeights, GatedWeights, LayerWeights, MlpWeights, ModelWeights, NormWeights, SharedWeights,
    TensorHeader, bind,
};
#[doc(inline)]
pub use config::{
    Activation, Bias, ConfigError, Factors, Family, GenerationDefaults, Mixture, ModelConfig, NormKind, QkNorm,
    Scoring, SharedExpert, SoftCaps,
};
#[doc(inline)]
pub use geometry::Geometry;
#[doc(inline)]
pub use rope::{Rope, RopeKind, RopePairs, RopeTable};
#[doc(inline)]
pub use sampling::SampleParams;
