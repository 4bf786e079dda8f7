//! Configurations of well-known models by name, for benchmarks and estimates that need shapes but no weights.

use unweight_format::UnknownName;

use crate::config::ModelConfig;

/// The configuration of a published model.
///
/// ```
/// use unweight_model::Geometry;
/// let config = Geometry::named("llama-3.1-8b")?.config();
/// assert_eq!((config.layers, config.qkv_rows(), config.intermediate), (32, 6144, 14336));
/// # Ok::<(), unweight_format::UnknownName>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    name: &'static str,
    /// The keys of its `config.json` that determine what the model computes.
    json: &'static str,
}

impl Geometry {
    /// All known models.
    pub const ALL: &[Self] = &[
        Self {
            name: "llama-3.2-1b",
            json: r#"{"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
                "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
                "rms_norm_eps": 1e-05, "max_position_embeddings": 131072, "tie_word_embeddings": true,
                "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
                "bos_token_id": 128000, "eos_token_id": 128001}"#,
        },
        Self {
            name: "llama-3.1-8b",
            json: r#"{"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
                "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                "rms_norm_eps": 1e-05, "max_position_embeddings": 131072,
                "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
                "bos_token_id": 128000, "eos_token_id": 128001}"#,
        },
        Self {
            name: "llama-3.1-70b",
            json: r#"{"model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
                "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
                "rms_norm_eps": 1e-05, "max_position_embeddings": 131072,
                "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
                "bos_token_id": 128000, "eos_token_id": 128001}"#,
        },
        Self {
            name: "mistral-7b-v0.3",
            json: r#"{"model_type": "mistral", "vocab_size": 32768, "hidden_size": 4096, "intermediate_size": 14336,
                "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                "rms_norm_eps": 1e-05, "max_position_embeddings": 32768, "sliding_window": null,
                "rope_theta": 1000000.0, "bos_token_id": 1, "eos_token_id": 2}"#,
        },
        Self {
            name: "qwen2.5-7b",
            json: r#"{"model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
                "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
                "rms_norm_eps": 1e-06, "max_position_embeddings": 131072, "use_sliding_window": false,
                "rope_theta": 1000000.0, "bos_token_id": 151643, "eos_token_id": 151643}"#,
        },
        Self {
            name: "qwen3-8b",
            json: r#"{"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
                "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                "rms_norm_eps": 1e-06, "max_position_embeddings": 40960, "use_sliding_window": false,
                "rope_theta": 1000000, "bos_token_id": 151643, "eos_token_id": 151645}"#,
        },
        Self {
            name: "mixtral-8x7b",
            json: r#"{"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
                "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                "rms_norm_eps": 1e-05, "max_position_embeddings": 32768, "sliding_window": null,
                "num_local_experts": 8, "num_experts_per_tok": 2,
                "rope_theta": 1000000.0, "bos_token_id": 1, "eos_token_id": 2}"#,
        },
        Self {
            name: "qwen3-30b-a3b",
            json: r#"{"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
                "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
                "rms_norm_eps": 1e-06, "max_position_embeddings": 40960, "use_sliding_window": false,
                "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": true,
                "decoder_sparse_step": 1, "mlp_only_layers": [],
                "rope_theta": 1000000.0, "bos_token_id": 151643, "eos_token_id": 151645}"#,
        },
    ];

    /// Returns the model with a name.
    ///
    /// # Errors
    /// [`UnknownName`] for an unknown name; it lists the known names.
    pub fn named(name: &str) -> Result<Self, UnknownName> {
        Self::ALL.iter().copied().find(|geometry| geometry.name == name).ok_or_else(|| UnknownName {
            what: "geometry",
            got: name.chars().take(64).collect(),
            known: Self::ALL.iter().map(|geometry| geometry.name).collect::<Vec<_>>().join(", "),
        })
    }

    /// The name of the model.
    pub fn name(self) -> &'static str {
        self.name
    }

    /// The configuration of the model.
    pub fn config(self) -> ModelConfig {
        ModelConfig::parse(self.json, None).expect("a test parses every one")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers of parameters that publishers state with the weights.
    #[test]
    fn parameter_counts_match_published_numbers() {
        let published = [
            ("llama-3.2-1b", 1_235_814_400),
            ("llama-3.1-8b", 8_030_261_248),
            ("llama-3.1-70b", 70_553_706_496),
            ("mistral-7b-v0.3", 7_248_023_552),
            ("qwen2.5-7b", 7_615_616_512),
            ("qwen3-8b", 8_190_735_360),
            ("mixtral-8x7b", 46_702_792_704),
            ("qwen3-30b-a3b", 30_532_122_624),
        ];
        assert_eq!(
            published.map(|(name, _)| name).as_slice(),
            Geometry::ALL.iter().map(|g| g.name).collect::<Vec<_>>()
        );
        for (name, parameters) in published {
            assert_eq!(Geometry::named(name).unwrap().config().parameters(), parameters, "{name}");
        }
    }

    #[test]
    fn unknown_names_are_rejected_with_the_known_ones() {
        let error = Geometry::named("gpt-5").unwrap_err().to_string();
        assert_eq!(
            error,
            "unknown geometry 'gpt-5'; known: llama-3.2-1b, llama-3.1-8b, llama-3.1-70b, mistral-7b-v0.3, qwen2.5-7b, \
             qwen3-8b, mixtral-8x7b, qwen3-30b-a3b"
        );
    }
}
