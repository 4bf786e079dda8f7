//! The device memory of a model: its weights, and the keys and values of a token.

use unweight_format::{Placement, raw::layout};

use crate::config::{Mixture, ModelConfig, NormKind, QkNorm, families::NormNames};

/// Bytes of a BF16 value.
const BF16_BYTES: u64 = 2;

impl ModelConfig {
    /// The linear layers of one transformer layer as they run, `[outputs, inputs]`: queries, keys and values as one;
    /// output; gate and up as one; down. In a mixture it is a layer with experts, which are concatenated by rows.
    pub fn linears(&self) -> [[u32; 2]; 4] {
        let q = self.heads * self.head_dim;
        let experts = self.mixture.map_or(1, Mixture::all_experts);
        // An intermediate size is at most 2^24, and so are the rows of all experts.
        let (gate_up, down) = (experts * 2 * self.intermediate, experts * self.hidden);
        [[self.qkv_rows(), self.hidden], [self.hidden, q], [gate_up, self.hidden], [down, self.intermediate]]
    }

    /// Shapes `[n, k]` of qkv, o, gate-up and down in a layer without experts; `None` if every layer has experts.
    pub fn dense_linears(&self) -> Option<[[u32; 2]; 4]> {
        let width = self.dense_intermediate();
        let [qkv, o, ..] = self.linears();
        (width > 0).then_some([qkv, o, [2 * width, self.hidden], [self.hidden, width]])
    }

    /// The sum of `linear` over the linear layers of all transformer layers, and of `vectors` over the elements of each
    /// layer's norms, biases and router (saturating).
    fn all_layers(&self, linear: impl Fn([u32; 2]) -> u64, vectors: impl Fn(u64) -> u64) -> u64 {
        let of =
            |linears: [[u32; 2]; 4], router| linears.map(&linear).iter().sum::<u64>() + vectors(self.vectors(router));
        let (all, mixture) = (u64::from(self.layers), u64::from(self.mixture_layers()));
        match self.dense_linears() {
            Some(dense) if self.mixture.is_some() => {
                let dense = (all - mixture).saturating_mul(of(dense, false));
                mixture.saturating_mul(of(self.linears(), true)).saturating_add(dense)
            }
            _ => all.saturating_mul(of(self.linears(), true)),
        }
    }

    /// Bytes of one expert of a mixture, BF16 or compact if that is the placement, else packed; 0 for dense models.
    /// Compact experts have the size of trained weights.
    pub fn expert_bytes(&self, placement: Placement) -> u64 {
        let linear = |[outputs, inputs]: [u32; 2]| match placement {
            Placement::Bf16 => u64::from(outputs) * u64::from(inputs) * BF16_BYTES,
            Placement::Compact => compact_bytes(outputs, inputs),
            _ => tiles_bytes(outputs, inputs),
        };
        let one = [[2 * self.intermediate, self.hidden], [self.hidden, self.intermediate]];
        self.mixture.map_or(0, |_| one.map(linear).iter().sum())
    }

    /// The number of weights of the model, each counted once: the head of a tied model is its embedding (saturating).
    pub fn parameters(&self) -> u64 {
        let tables = if self.tied { 1 } else { 2 } * u64::from(self.vocab) * u64::from(self.hidden);
        let layers = self.all_layers(|[outputs, inputs]| u64::from(outputs) * u64::from(inputs), |elements| elements);
        layers.saturating_add(tables).saturating_add(self.final_vectors())
    }

    /// Elements of a norm: a weight and, if norms have biases, a bias of each column.
    fn norm_elements(&self) -> u64 {
        u64::from(self.hidden) * if self.norm == NormKind::LayerBias { 2 } else { 1 }
    }

    /// Elements of the last norm and of the bias of the head.
    fn final_vectors(&self) -> u64 {
        self.norm_elements() + if self.bias.head { u64::from(self.vocab) } else { 0 }
    }

    /// Elements of norms, biases and the router, if it has one, of one layer, which stay BF16. Correction biases, at
    /// most 2 KB per layer, are not counted.
    fn vectors(&self, has_router: bool) -> u64 {
        let mixture = self.mixture.filter(|_| has_router);
        let router = mixture.map_or(0, |mixture| u64::from(mixture.router_rows()) * u64::from(self.hidden));
        let bias = if self.bias.qkv { self.qkv_rows() } else { 0 } + if self.bias.o { self.hidden } else { 0 };
        let qk_norm = match self.qk_norm {
            QkNorm::None => 0,
            QkNorm::Head => 2 * self.head_dim,
            QkNorm::Whole => (self.heads + self.kv_heads) * self.head_dim,
        };
        let NormNames { attention, after_attention, mlp, after_mlp } = self.family.features().norms;
        let norms = [attention, after_attention, mlp, after_mlp].into_iter().flatten().count() as u64;
        norms * self.norm_elements() + u64::from(bias) + u64::from(qk_norm) + router
    }

    /// Bytes of all weights on a device (saturating). Norms and biases stay BF16; the head of a tied model is its
    /// embedding. Packed weights are counted without the 4 bytes of each escape, compact ones at the size of trained
    /// weights, and stored MLPs as packed, because their exact sizes depend on the weights. On a device, experts are
    /// never compact, but packed.
    pub fn weight_bytes(&self, placement: Placement) -> u64 {
        let of = |placement, [outputs, inputs]: [u32; 2]| match placement {
            Placement::Bf16 => u64::from(outputs) * u64::from(inputs) * BF16_BYTES,
            Placement::Compact => compact_bytes(outputs, inputs),
            _ => packed_bytes(outputs, inputs),
        };
        let linear = |shape| of(placement, shape);
        let head = linear([self.vocab, self.hidden]);
        let looked_up = of(placement.lookup(), [self.vocab, self.hidden]);
        let (head, embed) = if self.tied { (looked_up, 0) } else { (head, looked_up) };
        let mut layers = self.all_layers(linear, |elements| elements * BF16_BYTES);
        if let (Placement::Compact, Some(mixture)) = (placement, self.mixture) {
            let more = self.expert_bytes(Placement::Packed).saturating_sub(self.expert_bytes(Placement::Compact));
            let experts = u64::from(mixture.all_experts()) * u64::from(self.mixture_layers());
            layers = layers.saturating_add(experts.saturating_mul(more));
        }
        layers.saturating_add(head + embed + self.final_vectors() * BF16_BYTES)
    }

    /// Bytes that the keys and values of one token take in all layers, BF16.
    pub fn kv_bytes_per_token(&self) -> u64 {
        2 * u64::from(self.layers) * u64::from(self.kv_heads) * u64::from(self.head_dim) * BF16_BYTES
    }

    /// The number of tokens whose keys and values fit in `budget_bytes`, in whole pages of `page_tokens` (0: 1).
    ///
    /// ```
    /// # use unweight_model::Geometry;
    /// let config = Geometry::named("llama-3.1-8b")?.config();
    /// assert_eq!(config.kv_bytes_per_token(), 131_072);
    /// assert_eq!(config.kv_tokens(80 << 30, 64), 655_360);
    /// # Ok::<(), unweight_format::UnknownName>(())
    /// ```
    pub fn kv_tokens(&self, budget_bytes: u64, page_tokens: u32) -> u64 {
        let tokens = budget_bytes / self.kv_bytes_per_token();
        tokens - tokens % u64::from(page_tokens.max(1))
    }
}

/// Bytes of a packed matrix without escapes, padded to whole tiles (`docs/format.md` A.9).
fn packed_bytes(rows: u32, cols: u32) -> u64 {
    tiles_bytes(rows, cols) + layout::PACKED_WINDOW_BYTES as u64
}

/// Bytes of a packed matrix without escapes and without the window.
fn tiles_bytes(rows: u32, cols: u32) -> u64 {
    let tiles = |extent: u32| u64::from(extent).div_ceil(layout::TILE as u64);
    let tile_bytes = layout::PACKED_TILE_BYTES + layout::ROW_BLOCKS * size_of::<u32>();
    tiles(rows) * tiles(cols) * tile_bytes as u64
}

/// Bytes of a compact matrix of trained weights in device memory (`docs/format.md` A.11), with the heads of its packed
/// encoding; those of a packed matrix if it does not consist of whole tiles.
fn compact_bytes(rows: u32, cols: u32) -> u64 {
    if !rows.is_multiple_of(layout::TILE as u32) || !cols.is_multiple_of(layout::TILE as u32) {
        return packed_bytes(rows, cols);
    }
    // 10.9 bits in thousandths of a byte: weights of N(0, 0.02^2) take 10.83, embeddings 10.9 (docs/adr/0013).
    let elements = u64::from(rows) * u64::from(cols);
    let heads = elements / (layout::TILE * layout::TILE) as u64 * (layout::ROW_BLOCKS * size_of::<u32>()) as u64;
    // Below 2^50 elements: sizes of the configuration are at most 2^24, and rows are at most a few of these.
    elements.saturating_mul(1363) / 1000 + heads
}

#[cfg(test)]
mod tests {
    use unweight_format::{Histogram, Matrix, raw::packed};

    use super::*;
    use crate::Geometry;

    fn config(name: &str) -> ModelConfig {
        Geometry::named(name).unwrap().config()
    }

    #[test]
    fn keys_and_values_of_llama_3_1() {
        let config = config("llama-3.1-8b");
        assert_eq!(config.kv_bytes_per_token(), 131_072);
        assert_eq!(config.kv_tokens(131_072 * 1000, 64), 960, "whole pages");
        assert_eq!(config.kv_tokens(131_072 * 1000, 0), 1000);
        assert_eq!(config.kv_tokens(131_071, 1), 0);
    }

    #[test]
    fn expert_bytes_of_dense_models_and_mixtures() {
        let (mixtral, dense) = (config("mixtral-8x7b"), config("llama-3.1-8b"));
        assert_eq!(dense.expert_bytes(Placement::Packed), 0);
        // 12 bits per weight, and 16 bytes per tile of 4096 weights.
        let weights = 3 * 14_336 * 4096u64;
        assert_eq!(mixtral.expert_bytes(Placement::Packed), weights * 3 / 2 + weights / 256);
        assert_eq!(mixtral.expert_bytes(Placement::Bf16), weights * 2);
        // Gate and up are one matrix, down is another.
        let compact = |weights: u64| weights * 1363 / 1000 + weights / 256;
        assert_eq!(mixtral.expert_bytes(Placement::Compact), compact(weights / 3 * 2) + compact(weights / 3));
        let all = 32 * 8 * mixtral.expert_bytes(Placement::Packed);
        // On a device, only the other weights are compact.
        let without_experts = |placement| mixtral.weight_bytes(placement) - all;
        let [packed, compact] = [Placement::Packed, Placement::Compact].map(without_experts);
        assert!(compact < packed && compact > packed / 10 * 9, "{compact} of {packed}");
        assert!(
            all < mixtral.weight_bytes(Placement::Packed) && all > mixtral.weight_bytes(Placement::Packed) / 10 * 9
        );
    }

    #[test]
    fn weight_bytes_of_bf16_and_packed() {
        for geometry in Geometry::ALL {
            let config = geometry.config();
            assert_eq!(config.weight_bytes(Placement::Bf16), config.parameters() * 2, "{}", geometry.name());
        }
        let config = config("llama-3.1-8b");
        let linear = 4096 * (6144 + 4096 + 28_672) + 14_336 * 4096;
        // 12 bits per weight, and 16 bytes per tile of 4096 weights; a window of 16 bytes for each of 4 * 32 + 2
        // matrices.
        let packed = |weights: u64| weights * 3 / 2 + weights / 256;
        let expected = packed(32 * linear + 2 * 128_256 * 4096) + 130 * 16 + 2 * 65 * 4096;
        assert_eq!(config.weight_bytes(Placement::Packed), expected);
        // 10.9 bits per weight, and 16 bytes per tile; the embedding is packed.
        let compact = |weights: u64| weights * 1363 / 1000 + weights / 256;
        let table = 128_256 * 4096;
        let expected = 32 * [6144, 4096, 28_672, 14_336].map(|rows| compact(rows * 4096)).iter().sum::<u64>();
        let expected = expected + compact(table) + packed(table) + 16 + 2 * 65 * 4096;
        assert_eq!(config.weight_bytes(Placement::Compact), expected);
    }

    /// The formula results in the size of a tensor that was packed.
    #[test]
    fn packed_size_matches_the_formula() {
        // All exponents are in one window, so there are no escapes.
        let bytes: Vec<u8> = (0..128 * 192u32).flat_map(|i| (0x3c00 + (i * 37 % 512) as u16).to_le_bytes()).collect();
        let matrix = Matrix::new(&bytes, 128, 192).unwrap();
        let packed = packed::pack(matrix, &Histogram::of(&bytes)).unwrap();
        assert_eq!(packed.escape_count(), 0);
        assert_eq!(packed.stored_bytes(), packed_bytes(128, 192));
        assert_eq!(packed_bytes(65, 129), packed_bytes(128, 192), "padded to tiles");
    }

    #[test]
    fn the_largest_configuration_is_counted() {
        let json = r#"{"model_type": "llama", "vocab_size": 16777216, "hidden_size": 16777216,
            "num_hidden_layers": 65536, "intermediate_size": 16777216, "num_attention_heads": 8388608, "head_dim": 2}"#;
        let config = ModelConfig::parse(json, None).unwrap();
        assert_eq!(config.parameters(), u64::MAX);
        assert_eq!(
            (config.weight_bytes(Placement::Bf16), config.weight_bytes(Placement::Packed)),
            (u64::MAX, u64::MAX)
        );
        assert_eq!(config.kv_bytes_per_token(), 1 << 42);
    }
}
