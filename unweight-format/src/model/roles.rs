//! The role of a tensor, by its name.
//!
//! One table of name endings covers the common families, without per-model files. A name that matches no entry has
//! [`Role::Other`], which is compressed as well unless the scope is narrower than everything.

use crate::bits::named::named;

named! {
    /// The role of a tensor in a model, by its name.
    Role, "role" {
        /// Token, position or type embedding.
        Embedding = "embedding",
        /// Output head.
        LmHead = "lm_head",
        /// Attention query.
        Q = "q",
        /// Attention key.
        K = "k",
        /// Attention value.
        V = "v",
        /// Two or three of query, key and value in one matrix.
        Qkv = "qkv",
        /// Attention output.
        O = "o",
        /// MLP gate.
        Gate = "gate",
        /// MLP up.
        Up = "up",
        /// Gate and up in one matrix.
        GateUp = "gate_up",
        /// MLP down.
        Down = "down",
        /// Expert router.
        Router = "router",
        /// Weight or bias of a normalisation.
        Norm = "norm",
        /// Anything else.
        Other = "other",
    }
}

impl Role {
    /// Whether the role is an MLP projection: gate, up or down.
    pub const fn is_mlp(self) -> bool {
        matches!(self, Self::Gate | Self::Up | Self::GateUp | Self::Down)
    }

    /// Whether the role is an attention projection: q, k, v or o.
    pub const fn is_attention(self) -> bool {
        matches!(self, Self::Q | Self::K | Self::V | Self::Qkv | Self::O)
    }
}

/// Name endings, most specific first; the first match wins. They are compared with a name without [`TAILS`].
///
/// `*` stands for one part.
#[rustfmt::skip]
const TABLE: &[(&str, Role)] = {
    use Role::*;
    &[
        // Routers of mixtures of experts: `gate` alone is the router; the experts' gates are `gate_proj` or `w1`.
        ("block_sparse_moe.gate", Router), ("mlp.gate", Router), ("mlp.gate.wg", Router), ("feed_forward.router", Router), ("moe.gate", Router),
        ("mlp.router", Router), ("router.layer", Router), ("router.classifier", Router), ("router", Router), ("shared_expert_gate", Router),
        ("block_sparse_moe.router.layer", Router), ("ffn.router.layer", Router), ("ffn.gate", Router),
        ("gate.e_score_correction_bias", Router),
        // Embeddings.
        ("embed_tokens", Embedding), ("embed_tokens_per_layer", Embedding), ("tok_embeddings", Embedding), ("word_embeddings", Embedding),
        ("position_embeddings", Embedding), ("token_type_embeddings", Embedding), ("embed_positions", Embedding), ("embed_in", Embedding),
        ("wte", Embedding), ("wpe", Embedding), ("shared", Embedding), ("token_embedding", Embedding), ("position_embedding", Embedding),
        ("relative_attention_bias", Embedding), ("embeddings.*", Embedding), ("tok_embed", Embedding),
        // Heads.
        ("lm_head", LmHead), ("embed_out", LmHead), ("output_layer", LmHead), ("cls.predictions.decoder", LmHead), ("score", LmHead),
        // Attention: Llama, Qwen, Mistral, Gemma, OPT, BERT, T5, the original Llama, GPT-2, GPT-NeoX, Falcon, Bloom,
        // MPT, DeepSeek.
        ("q_proj", Q), ("k_proj", K), ("v_proj", V), ("self.query", Q), ("self.key", K), ("self.value", V), ("query", Q), ("key", K), ("value", V),
        ("wq", Q), ("wk", K), ("wv", V), ("SelfAttention.q", Q), ("SelfAttention.k", K), ("SelfAttention.v", V), ("EncDecAttention.q", Q),
        ("EncDecAttention.k", K), ("EncDecAttention.v", V), ("q_lin", Q), ("k_lin", K), ("v_lin", V), ("to_q", Q), ("to_k", K), ("to_v", V),
        ("q_a_proj", Q), ("q_b_proj", Q), ("kv_a_proj_with_mqa", Qkv), ("kv_b_proj", Qkv), ("kv_proj", Qkv),
        ("qkv_proj", Qkv), ("query_key_value", Qkv), ("attn.c_attn", Qkv), ("c_attn", Qkv), ("Wqkv", Qkv), ("W_pack", Qkv), ("in_proj", Qkv),
        ("in_proj_weight", Qkv), ("qkv", Qkv), ("wqkv", Qkv),
        ("o_proj", O), ("attention.output.dense", O), ("self_attn.out_proj", O), ("attn.out_proj", O), ("attention.out_proj", O),
        ("encoder_attn.out_proj", O), ("out_proj", O), ("attention.dense", O), ("self_attention.dense", O), ("self_attn.dense", O), ("attn.c_proj", O),
        ("attention.wo", O), ("SelfAttention.o", O), ("EncDecAttention.o", O), ("out_lin", O), ("to_out.0", O), ("attn.proj", O),
        // MLP, including experts: `mlp.experts.3.up_proj`, `block_sparse_moe.experts.3.w1`, and stacks
        // `mlp.experts.down_proj`.
        ("gate_up_proj", GateUp), ("gate_up_proj_blocks", GateUp), ("experts.w13", GateUp), ("mlp.Wi", GateUp),
        ("input_linear", GateUp), ("output_linear", Down),
        ("gate_proj", Gate), ("w1", Gate), ("wi_0", Gate),
        ("up_proj", Up), ("w3", Up), ("wi_1", Up), ("wi", Up), ("fc1", Up), ("fc_in", Up), ("c_fc", Up), ("dense_h_to_4h", Up), ("lin1", Up),
        ("intermediate.dense", Up), ("experts.mlp.v1", Up), ("mlp.linear_fc1", Up), ("mlp.experts.mlp.v1", Up),
        ("down_proj", Down), ("down_proj_blocks", Down), ("w2", Down), ("mlp.c_proj", Down), ("fc2", Down), ("fc_out", Down), ("dense_4h_to_h", Down), ("lin2", Down),
        ("DenseReluDense.wo", Down), ("mlp.wo", Down), ("mlp.Wo", Down), ("output.dense", Down), ("mlp.linear_fc2", Down), ("wo", Down),
    ]
};

/// Last parts of names that do not determine the role.
const TAILS: &[&str] = &["weight", "bias", "weight_scale", "weight_scale_inv", "lora_A", "lora_B"];

/// The role and layer of a tensor, by its name.
///
/// The layer is the first number in the name that is not the index of an expert.
pub fn of(name: &str) -> (Role, Option<u32>) {
    let mut parts: Vec<&str> = name.split('.').collect();
    let layer = parts.iter().enumerate().find_map(|(i, part)| {
        let number = part.bytes().all(|b| b.is_ascii_digit()).then(|| part.parse().ok()).flatten();
        number.filter(|_| i > 0 && parts[i - 1] != "experts")
    });
    while parts.len() > 1 && TAILS.contains(&parts[parts.len() - 1]) {
        parts.pop();
    }
    let last = parts[parts.len() - 1];
    let is_norm = |part: &str| {
        let part = part.to_ascii_lowercase();
        part.contains("norm")
            || part.starts_with("ln_")
            || part.ends_with("_ln")
            || part.starts_with("ln") && part.len() <= 3
    };
    if is_norm(last) {
        return (Role::Norm, layer);
    }
    // `output` is the head only at the top level (the original Llama); inside a block it is part of a longer ending.
    if parts.len() == 1 && last == "output" || parts == ["model", "output"] {
        return (Role::LmHead, layer);
    }
    let ends_with = |ending: &str| {
        let mut name = parts.iter().rev();
        ending.split('.').rev().all(|want| name.next().is_some_and(|got| want == "*" || want == *got))
    };
    let role = TABLE.iter().find(|(ending, _)| ends_with(ending)).map_or(Role::Other, |&(_, role)| role);
    (role, layer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_common_families() {
        #[rustfmt::skip]
        let cases: &[(&str, Role, Option<u32>)] = &[
            // Granite's mixtures
            ("model.layers.3.block_sparse_moe.input_linear.weight", Role::GateUp, Some(3)),
            ("model.layers.3.block_sparse_moe.output_linear.weight", Role::Down, Some(3)),
            ("model.layers.3.block_sparse_moe.router.layer.weight", Role::Router, Some(3)),
            ("model.layers.3.shared_mlp.output_linear.weight", Role::Down, Some(3)),
            // Llama, Qwen, Mistral, Gemma
            ("model.embed_tokens.weight", Role::Embedding, None),
            ("model.layers.0.self_attn.q_proj.weight", Role::Q, Some(0)),
            ("model.layers.31.self_attn.k_proj.bias", Role::K, Some(31)),
            ("model.layers.7.self_attn.o_proj.weight", Role::O, Some(7)),
            ("model.layers.7.mlp.gate_proj.weight", Role::Gate, Some(7)),
            ("model.layers.7.mlp.up_proj.weight", Role::Up, Some(7)),
            ("model.layers.7.mlp.down_proj.weight", Role::Down, Some(7)),
            ("model.layers.7.input_layernorm.weight", Role::Norm, Some(7)),
            ("model.layers.7.self_attn.q_norm.weight", Role::Norm, Some(7)),
            ("model.norm.weight", Role::Norm, None),
            ("lm_head.weight", Role::LmHead, None),
            ("language_model.model.layers.3.mlp.up_proj.weight", Role::Up, Some(3)),
            // The original Llama
            ("tok_embeddings.weight", Role::Embedding, None),
            ("layers.2.attention.wo.weight", Role::O, Some(2)),
            ("layers.2.feed_forward.w1.weight", Role::Gate, Some(2)),
            ("layers.2.feed_forward.w2.weight", Role::Down, Some(2)),
            ("layers.2.feed_forward.w3.weight", Role::Up, Some(2)),
            ("output.weight", Role::LmHead, None),
            // Phi
            ("model.layers.1.self_attn.qkv_proj.weight", Role::Qkv, Some(1)),
            ("model.layers.1.mlp.gate_up_proj.weight", Role::GateUp, Some(1)),
            ("model.layers.1.self_attn.dense.weight", Role::O, Some(1)),
            ("model.layers.1.mlp.fc2.weight", Role::Down, Some(1)),
            // Mixtral, Qwen MoE, stacked experts, DeepSeek
            ("model.layers.4.block_sparse_moe.experts.7.w1.weight", Role::Gate, Some(4)),
            ("model.layers.4.block_sparse_moe.experts.7.w2.weight", Role::Down, Some(4)),
            ("model.layers.4.block_sparse_moe.gate.weight", Role::Router, Some(4)),
            ("model.layers.4.mlp.experts.63.gate_proj.weight", Role::Gate, Some(4)),
            ("model.layers.4.mlp.gate.weight", Role::Router, Some(4)),
            ("model.layers.4.mlp.shared_expert.up_proj.weight", Role::Up, Some(4)),
            ("model.layers.4.mlp.shared_experts.down_proj.weight", Role::Down, Some(4)),
            ("model.layers.4.mlp.gate.e_score_correction_bias", Role::Router, Some(4)),
            ("model.layers.46.shared_head.norm.weight", Role::Norm, Some(46)),
            ("model.layers.46.eh_proj.weight", Role::Other, Some(46)),
            ("model.layers.4.mlp.shared_expert_gate.weight", Role::Router, Some(4)),
            ("model.layers.4.mlp.experts.gate_up_proj", Role::GateUp, Some(4)),
            ("model.layers.4.feed_forward.experts.down_proj", Role::Down, Some(4)),
            ("experts.3.w1.weight", Role::Gate, None),
            ("model.layers.4.self_attn.kv_b_proj.weight", Role::Qkv, Some(4)),
            // GPT-NeoX, GPT-2, Falcon, OPT, MPT
            ("gpt_neox.embed_in.weight", Role::Embedding, None),
            ("gpt_neox.layers.5.attention.query_key_value.weight", Role::Qkv, Some(5)),
            ("gpt_neox.layers.5.attention.dense.weight", Role::O, Some(5)),
            ("gpt_neox.layers.5.mlp.dense_4h_to_h.weight", Role::Down, Some(5)),
            ("embed_out.weight", Role::LmHead, None),
            ("transformer.wte.weight", Role::Embedding, None),
            ("transformer.h.9.attn.c_attn.weight", Role::Qkv, Some(9)),
            ("transformer.h.9.attn.c_proj.weight", Role::O, Some(9)),
            ("transformer.h.9.mlp.c_fc.weight", Role::Up, Some(9)),
            ("h.9.mlp.c_proj.weight", Role::Down, Some(9)),
            ("transformer.h.9.ln_1.weight", Role::Norm, Some(9)),
            ("transformer.h.9.self_attention.dense.weight", Role::O, Some(9)),
            ("model.decoder.layers.1.fc1.weight", Role::Up, Some(1)),
            ("model.decoder.layers.1.self_attn.out_proj.weight", Role::O, Some(1)),
            ("transformer.blocks.3.attn.Wqkv.weight", Role::Qkv, Some(3)),
            // BERT, T5
            ("embeddings.word_embeddings.weight", Role::Embedding, None),
            ("embeddings.LayerNorm.weight", Role::Norm, None),
            ("encoder.layer.0.attention.self.query.weight", Role::Q, Some(0)),
            ("encoder.layer.0.attention.output.dense.weight", Role::O, Some(0)),
            ("encoder.layer.0.intermediate.dense.weight", Role::Up, Some(0)),
            ("encoder.layer.0.output.dense.weight", Role::Down, Some(0)),
            ("encoder.layer.0.output.LayerNorm.bias", Role::Norm, Some(0)),
            ("shared.weight", Role::Embedding, None),
            ("decoder.block.2.layer.0.SelfAttention.o.weight", Role::O, Some(2)),
            ("decoder.block.2.layer.2.DenseReluDense.wi_0.weight", Role::Gate, Some(2)),
            ("decoder.block.2.layer.2.DenseReluDense.wo.weight", Role::Down, Some(2)),
            // Unknown
            ("vision.patch.conv", Role::Other, None),
            ("", Role::Other, None),
            ("a..b.99999999999999999999", Role::Other, None),
        ];
        for &(name, role, layer) in cases {
            assert_eq!(of(name), (role, layer), "{name}");
        }
    }
}
