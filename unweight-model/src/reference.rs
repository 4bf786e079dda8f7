//! The forward pass of a model in f32, slow and simple: the reference for every faster one.
//!
//! Weights are widened from BF16. Everything between is f32; sums are f64, rounded once. There is no KV cache and no
//! batch: the result is the logits of every position of a list of tokens, and each position attends to those before it.
//! A layer's weights are read when it runs, so the largest tensor must fit in memory, but not the model.

use std::{error::Error, f32::consts::PI};

use rayon::prelude::*;
use unweight_format::{
    bundle::{Bundle, BundleError},
    safetensors::Dtype,
};

use crate::{
    bind::{ExpertWeights, GatedWeights, LayerWeights, MlpWeights, ModelWeights, NormWeights, SharedWeights},
    config::{Activation, Mixture, ModelConfig, NormKind, QkNorm, Scoring},
    rope::RopePairs,
};

/// The reason why a tensor could not be read.
type Cause = Box<dyn Error + Send + Sync>;

/// The reason why the reference cannot compute logits.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReferenceError {
    /// A token is outside the vocabulary.
    #[error(
        "token {token} at position {position} is outside the vocabulary of {vocab} tokens; use this model's tokenizer"
    )]
    Token {
        /// The position of the token.
        position: usize,
        /// The token.
        token: u32,
        /// The vocabulary size of the model.
        vocab: u32,
    },
    /// A tensor could not be read.
    #[error("tensor '{name}' cannot be read")]
    Tensor {
        /// The tensor.
        name: String,
        /// The cause.
        source: Cause,
    },
    /// A tensor has another number of elements than the configuration requires.
    #[error(
        "tensor '{name}' has {got} elements, but the configuration requires {expected}; bind the weights to it first"
    )]
    Elements {
        /// The tensor.
        name: String,
        /// The number of elements of the tensor.
        got: usize,
        /// The number of elements that the configuration requires.
        expected: usize,
    },
}

impl ReferenceError {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Token { .. } => "token-out-of-vocabulary",
            Self::Tensor { .. } => "model-tensor-unreadable",
            Self::Elements { .. } => "model-tensor-shape",
        }
    }
}

/// Returns a function that reads the values of a bundle's tensors, which are F32 or widened from BF16.
///
/// # Errors
/// The returned function fails if the bundle does not contain the tensor, or if it is damaged.
pub fn bundle_values(bundle: &Bundle) -> impl Fn(&str) -> Result<Vec<f32>, BundleError> {
    move |name| {
        let tensor = bundle.tensor(name)?;
        Ok(widen(tensor.entry().dtype, &tensor.decode()?))
    }
}

/// The values of a tensor, as little-endian bytes of F32 or else of BF16, in f32.
pub fn widen(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    if dtype != Dtype::F32 {
        return widen_bf16(bytes);
    }
    let (words, _) = bytes.as_chunks();
    words.iter().map(|&word| f32::from_le_bytes(word)).collect()
}

/// Widens BF16 values, as little-endian bytes, to f32.
pub fn widen_bf16(bytes: &[u8]) -> Vec<f32> {
    let (pairs, _) = bytes.as_chunks();
    pairs.iter().map(|&pair| f32::from_bits(u32::from(u16::from_le_bytes(pair)) << 16)).collect()
}

/// Returns the values of a tensor by its name.
type Values<'a> = dyn Fn(&str) -> Result<Vec<f32>, Cause> + 'a;

/// A model to compute with. A function returns its weights by their names.
///
/// ```
/// # use unweight_format::{bundle::{self, Bundle, CompressOptions, Silent}, testing::demo_model::{self, DemoOptions}};
/// use unweight_model::{ModelConfig, ModelWeights, reference::{Reference, bundle_values}};
/// # let home = tempfile::tempdir()?;
/// # let small = DemoOptions { layers: 2, hidden: 64, intermediate: 96, heads: 4, kv_heads: 2, vocab: 128,
/// ..DemoOptions::default() };
/// # demo_model::write(&home.path().join("model"), &small)?;
/// # bundle::compress(&home.path().join("model"), &home.path().join("bundle"), &CompressOptions::default(), &Silent)?;
/// let bundle = Bundle::open(&home.path().join("bundle"))?;
/// let config = ModelConfig::of_bundle(&bundle)?;
/// let weights = ModelWeights::of_bundle(&config, &bundle)?;
/// let logits = Reference::new(&config, &weights, bundle_values(&bundle)).logits(&[1, 2, 3])?;
/// assert_eq!(logits.len(), 3 * config.vocab as usize);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Reference<'a> {
    config: &'a ModelConfig,
    weights: &'a ModelWeights,
    // Not generic: the passes are compiled, and optimised, once.
    values: Box<Values<'a>>,
}

impl<'a> Reference<'a> {
    /// A reference on weights that were bound to this configuration; `values` returns the row-major values of a tensor
    /// by its name.
    pub fn new<E: Into<Cause>>(
        config: &'a ModelConfig,
        weights: &'a ModelWeights,
        values: impl Fn(&str) -> Result<Vec<f32>, E> + 'a,
    ) -> Self {
        Self { config, weights, values: Box::new(move |name| values(name).map_err(Into::into)) }
    }

    /// The logits of every position, `[tokens, vocab]`.
    ///
    /// # Errors
    /// [`ReferenceError`] if a token is outside the vocabulary, or if a tensor cannot be read or has another size.
    pub fn logits(&self, tokens: &[u32]) -> Result<Vec<f32>, ReferenceError> {
        self.logits_of(&self.residual_stream(tokens, |_, _| ())?)
    }

    /// The logits of the last position, `[vocab]`, or none without tokens.
    ///
    /// # Errors
    /// As for [`Reference::logits`].
    pub fn last_logits(&self, tokens: &[u32]) -> Result<Vec<f32>, ReferenceError> {
        let stream = self.residual_stream(tokens, |_, _| ())?;
        self.logits_of(&stream[stream.len().saturating_sub(self.config.hidden as usize)..])
    }

    /// The logits of rows of the residual stream.
    fn logits_of(&self, stream: &[f32]) -> Result<Vec<f32>, ReferenceError> {
        let normed = self.normed(stream, Some(&self.weights.final_norm))?;
        let (head, bias) = (&self.weights.lm_head, self.weights.lm_head_bias.as_deref());
        let mut logits = self.linear(&normed, head, bias, [self.config.vocab, self.config.hidden])?;
        scale(&mut logits, self.config.factors.logits);
        logits.iter_mut().for_each(|logit| *logit = capped(*logit, self.config.soft_caps.logits));
        Ok(logits)
    }

    /// The residual stream after the last layer, `[tokens, hidden]`. `each` receives the stream after every layer, with
    /// the index of the layer.
    ///
    /// # Errors
    /// As for [`Reference::logits`].
    pub fn residual_stream(
        &self,
        tokens: &[u32],
        mut each: impl FnMut(usize, &[f32]),
    ) -> Result<Vec<f32>, ReferenceError> {
        let (vocab, hidden) = (self.config.vocab, self.config.hidden);
        let embed = self.values(&self.weights.embed, &[vocab, hidden])?;
        let mut stream = Vec::new();
        for (position, &token) in tokens.iter().enumerate() {
            let row = embed.chunks(hidden as usize).nth(token as usize);
            stream.extend(row.ok_or(ReferenceError::Token { position, token, vocab })?);
        }
        scale(&mut stream, self.config.factors.embedding);
        for (number, layer) in self.weights.layers.iter().enumerate() {
            let x = self.normed(&stream, layer.input_norm.as_ref())?;
            let attended = self.attention(layer, &x, number)?;
            self.add(&mut stream, attended, layer.attention_norm.as_ref())?;
            let x = if self.config.parallel { x } else { self.normed(&stream, layer.post_norm.as_ref())? };
            let mlp = match (&layer.mlp, self.config.mixture) {
                (MlpWeights::Dense(weights), _) => self.mlp(weights, self.config.dense_intermediate(), &x)?,
                (MlpWeights::Mixture { router, correction, experts, shared }, mixture) => {
                    let router = (router.as_str(), correction.as_deref());
                    let mut sums = self.mixture(router, experts, mixture.unwrap_or(NO_EXPERTS), &x)?;
                    if let Some(shared) = shared {
                        add(&mut sums, &self.shared_expert(shared, &x)?);
                    }
                    sums
                }
            };
            self.add(&mut stream, mlp, layer.mlp_norm.as_ref())?;
            each(number, &stream);
        }
        Ok(stream)
    }

    /// Norms rows of the residual stream, if there is a norm.
    fn normed(&self, x: &[f32], names: Option<&NormWeights>) -> Result<Vec<f32>, ReferenceError> {
        let Some(NormWeights { weight, bias }) = names else { return Ok(x.to_vec()) };
        let mut rows = self.norm(x, weight, self.config.hidden)?;
        if let Some(bias) = bias {
            let bias = self.values(bias, &[self.config.hidden])?;
            rows.chunks_mut(bias.len()).for_each(|row| add(row, &bias));
        }
        Ok(rows)
    }

    /// Adds rows to the residual stream, normed first if there is a norm.
    fn add(&self, stream: &mut [f32], mut what: Vec<f32>, norm: Option<&NormWeights>) -> Result<(), ReferenceError> {
        what = self.normed(&what, norm)?;
        scale(&mut what, self.config.factors.residual);
        add(stream, &what);
        Ok(())
    }

    /// Causal attention of one layer with its output projection, `[tokens, hidden]`.
    fn attention(&self, layer: &LayerWeights, x: &[f32], number: usize) -> Result<Vec<f32>, ReferenceError> {
        let ModelConfig { hidden, head_dim, .. } = *self.config;
        let (q_rows, kv_rows) = (self.config.heads * head_dim, self.config.kv_heads * head_dim);
        let [mut q, mut k, v] = self.heads(layer, x, [q_rows, kv_rows, kv_rows])?;
        if let (Some(q_norm), Some(k_norm)) = (&layer.q_norm, &layer.k_norm) {
            (q, k) = match self.config.qk_norm {
                QkNorm::None => (q, k),
                QkNorm::Head => (self.norm(&q, q_norm, head_dim)?, self.norm(&k, k_norm, head_dim)?),
                QkNorm::Whole => (self.norm(&q, q_norm, q_rows)?, self.norm(&k, k_norm, kv_rows)?),
            };
        }
        let context = (x.len() / hidden as usize) as u32;
        if let Some(rope) = self.config.rope_of(number) {
            for (heads, width) in [(&mut q, q_rows), (&mut k, kv_rows)] {
                for (position, row) in heads.chunks_mut(width as usize).enumerate() {
                    let (cos, sin) = rope.cos_sin(position as u32, context);
                    row.chunks_mut(head_dim as usize).for_each(|head| rotate(head, rope.pairs, &cos, &sin));
                }
            }
        }
        let window = self.config.window.get(number).copied().flatten();
        let factor = self.config.factors.attention.unwrap_or_else(|| (head_dim as f32).sqrt().recip());
        let (heads, kv_heads) = (self.config.heads as usize, self.config.kv_heads as usize);
        let (group, head_dim) = (heads / kv_heads, head_dim as usize);
        // Query head `head` attends to key/value head `head / group` of its own and earlier positions.
        let one = |(i, query): (usize, &[f32])| {
            let (position, head) = (i / heads, i % heads);
            let at = |other: usize| (other * kv_heads + head / group) * head_dim;
            let first = window.map_or(0, |window| (position + 1).saturating_sub(window as usize));
            let scores = (first..=position).map(|other| dot(query, &k[at(other)..][..head_dim]));
            let cap = self.config.soft_caps.attention;
            let scores: Vec<f32> = scores.map(|score| capped(score * factor, cap)).collect();
            let max_score = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let shares: Vec<f32> = scores.iter().map(|score| (score - max_score).exp()).collect();
            let sum: f64 = shares.iter().copied().map(f64::from).sum();
            let element = |d: usize| {
                let products = (first..).zip(&shares).map(|(other, &s)| f64::from(s) * f64::from(v[at(other) + d]));
                (products.sum::<f64>() / sum) as f32
            };
            (0..head_dim).map(element).collect::<Vec<_>>()
        };
        let attended: Vec<_> = q.par_chunks(head_dim).enumerate().map(one).collect();
        self.linear(&attended.concat(), &layer.o, layer.o_bias.as_deref(), [hidden, q_rows])
    }

    /// Computes queries, keys and values of these numbers of rows, with their biases.
    fn heads(&self, layer: &LayerWeights, x: &[f32], rows: [u32; 3]) -> Result<[Vec<f32>; 3], ReferenceError> {
        let hidden = self.config.hidden;
        let weights = self.stacked([&layer.q, &layer.k, &layer.v], rows, hidden)?;
        let mut heads = weights.map(|weight| multiply(x, &weight, hidden as usize));
        if let (Some(q), Some(k), Some(v)) = (&layer.q_bias, &layer.k_bias, &layer.v_bias) {
            for (heads, bias) in heads.iter_mut().zip(self.stacked([q, k, v], rows, 1)?) {
                heads.chunks_mut(bias.len()).for_each(|row| add(row, &bias));
            }
        }
        Ok(heads)
    }

    /// Reads matrices with these rows, which are concatenated in one tensor if all have the same name.
    fn stacked<const N: usize>(
        &self,
        names: [&String; N],
        rows: [u32; N],
        columns: u32,
    ) -> Result<[Vec<f32>; N], ReferenceError> {
        let mut parts = [const { Vec::new() }; N];
        if names.iter().all(|name| *name == names[0]) {
            let mut rest = self.values(names[0], &[rows.iter().sum(), columns])?;
            for (part, rows) in parts.iter_mut().zip(rows) {
                let tail = rest.split_off(rows as usize * columns as usize);
                *part = std::mem::replace(&mut rest, tail);
            }
            return Ok(parts);
        }
        for ((part, name), rows) in parts.iter_mut().zip(names).zip(rows) {
            *part = self.values(name, &[rows, columns])?;
        }
        Ok(parts)
    }

    /// Computes a gated MLP of this width.
    fn mlp(&self, names: &GatedWeights, intermediate: u32, x: &[f32]) -> Result<Vec<f32>, ReferenceError> {
        let hidden = self.config.hidden;
        let [gate, up] = self.stacked([&names.gate, &names.up], [intermediate; 2], hidden)?;
        let down = self.values(&names.down, &[hidden, intermediate])?;
        Ok(self.gated(x, [&gate, &up, &down]))
    }

    /// Computes the shared expert of a mixture, times the sigmoid of its gate if it has one.
    fn shared_expert(&self, names: &SharedWeights, x: &[f32]) -> Result<Vec<f32>, ReferenceError> {
        let mut rows = self.mlp(&names.mlp, self.config.shared_intermediate(), x)?;
        if let Some(gate) = &names.gate {
            let logits = self.linear(x, gate, None, [1, self.config.hidden])?;
            for (row, logit) in rows.chunks_mut(self.config.hidden as usize).zip(logits) {
                scale(row, 1.0 / (1.0 + (-logit).exp()));
            }
        }
        Ok(rows)
    }

    /// Computes a gated MLP with these weights.
    fn gated(&self, x: &[f32], [gate, up, down]: [&[f32]; 3]) -> Vec<f32> {
        let inputs = self.config.hidden as usize;
        let (mut gate, up) = (multiply(x, gate, inputs), multiply(x, up, inputs));
        for (gate, up) in gate.iter_mut().zip(up) {
            *gate = up
                * match self.config.act {
                    Activation::Silu => *gate / (1.0 + (-*gate).exp()),
                    Activation::GeluTanh => {
                        let inner = (2.0 / PI).sqrt() * (*gate + 0.044_715 * *gate * *gate * *gate);
                        0.5 * *gate * (1.0 + inner.tanh())
                    }
                };
        }
        multiply(&gate, down, down.len() / inputs)
    }

    /// Sums, for each token, the experts with the largest scores, each times its weight, in the order of the experts.
    fn mixture(
        &self,
        (router, correction): (&str, Option<&str>),
        names: &ExpertWeights,
        mixture: Mixture,
        x: &[f32],
    ) -> Result<Vec<f32>, ReferenceError> {
        let ModelConfig { hidden, intermediate, .. } = *self.config;
        let experts = mixture.experts;
        let logits = self.linear(x, router, None, [experts, hidden])?;
        let correction = correction.map(|name| self.values(name, &[experts])).transpose()?;
        // For each expert, the tokens that it processes and its weight for each.
        let mut chosen = vec![Vec::new(); experts as usize];
        for (token, logits) in logits.chunks(experts as usize).enumerate() {
            for (expert, weight) in choose(logits, correction.as_deref().unwrap_or_default(), mixture) {
                chosen[expert].push((token, weight));
            }
        }
        let width = hidden as usize;
        let matrix = width * intermediate as usize;
        let stacks = match names {
            ExpertWeights::Each(_) => None,
            ExpertWeights::Stacked { gate_up, down } => Some((
                self.values(gate_up, &[experts, 2 * intermediate, hidden])?,
                self.values(down, &[experts, hidden, intermediate])?,
            )),
        };
        let mut sums = vec![0.0; x.len()];
        for (expert, tokens) in chosen.iter().enumerate().filter(|(_, tokens)| !tokens.is_empty()) {
            let inputs: Vec<f32> = tokens.iter().flat_map(|(token, _)| &x[token * width..][..width]).copied().collect();
            let rows = match (names, &stacks) {
                (ExpertWeights::Each(names), _) => self.mlp(&names[expert], intermediate, &inputs)?,
                (ExpertWeights::Stacked { .. }, Some((gate_up, down))) => {
                    let (gate, up) = gate_up[2 * expert * matrix..][..2 * matrix].split_at(matrix);
                    self.gated(&inputs, [gate, up, &down[expert * matrix..][..matrix]])
                }
                (ExpertWeights::Stacked { .. }, None) => continue,
            };
            for ((token, weight), row) in tokens.iter().zip(rows.chunks(width)) {
                let sums = &mut sums[token * width..][..width];
                sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += weight * value);
            }
        }
        Ok(sums)
    }

    /// Norms every row of `width` elements: `x / sqrt(mean(x^2) + eps) * weight`, or the configured norm, without a
    /// bias.
    fn norm(&self, x: &[f32], weight: &str, width: u32) -> Result<Vec<f32>, ReferenceError> {
        let weight = self.values(weight, &[width])?;
        let added = if self.config.norm == NormKind::RmsPlusOne { 1.0 } else { 0.0 };
        let rows = x.chunks(weight.len()).flat_map(|row| {
            let mean = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>() / row.len() as f64;
            let center = match self.config.norm {
                NormKind::Layer | NormKind::LayerBias => mean(&mut row.iter().map(|&x| f64::from(x))) as f32,
                NormKind::Rms | NormKind::RmsOnce | NormKind::RmsPlusOne => 0.0,
            };
            let square = mean(&mut row.iter().map(|&x| f64::from(x - center) * f64::from(x - center)));
            let scale = (square as f32 + self.config.eps).sqrt().recip();
            row.iter().zip(&weight).map(move |(x, weight)| (added + weight) * ((x - center) * scale))
        });
        Ok(rows.collect())
    }

    /// `x weight^T + bias`: `x` is `[rows, inputs]`, the weight `[outputs, inputs]`.
    fn linear(
        &self,
        x: &[f32],
        weight: &str,
        bias: Option<&str>,
        [outputs, inputs]: [u32; 2],
    ) -> Result<Vec<f32>, ReferenceError> {
        let weight = self.values(weight, &[outputs, inputs])?;
        let mut y = multiply(x, &weight, inputs as usize);
        if let Some(bias) = bias {
            let bias = self.values(bias, &[outputs])?;
            y.chunks_mut(outputs as usize).for_each(|row| add(row, &bias));
        }
        Ok(y)
    }

    /// Reads a tensor, and checks that it has as many elements as its shape.
    fn values(&self, name: &str, shape: &[u32]) -> Result<Vec<f32>, ReferenceError> {
        let values = (self.values)(name);
        let values = values.map_err(|source| ReferenceError::Tensor { name: name.into(), source })?;
        let expected = shape.iter().map(|&extent| extent as usize).product();
        if values.len() != expected {
            return Err(ReferenceError::Elements { name: name.into(), got: values.len(), expected });
        }
        Ok(values)
    }
}

/// Used if the weights are those of a mixture, but the configuration is not.
const NO_EXPERTS: Mixture = Mixture {
    experts: 1,
    top_k: 1,
    scoring: Scoring::Softmax,
    normalized: true,
    rounded: false,
    factor: 1.0,
    cutoff: 0.0,
    dense_layers: 0,
    dense_intermediate: 0,
    shared: None,
};

/// Returns the experts with the largest scores, lower indices first among equal ones, with their weights. `correction`
/// has a bias for each expert, or none.
fn choose(logits: &[f32], correction: &[f32], mixture: Mixture) -> Vec<(usize, f32)> {
    if mixture.scoring == Scoring::SparseMixer {
        return choose_in_turn(logits, mixture);
    }
    let max_logit = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    // Without the factor that makes the sum of all of a softmax 1.
    let score = |expert: usize| match mixture.scoring {
        Scoring::Softmax | Scoring::SparseMixer => (logits[expert] - max_logit).exp(),
        Scoring::Sigmoid => 1.0 / (1.0 + (-logits[expert]).exp()),
    };
    // A softmax has the order of its logits, which are more exact.
    let rank = |expert: usize| match mixture.scoring {
        Scoring::Softmax | Scoring::SparseMixer => logits[expert],
        Scoring::Sigmoid => score(expert) + correction.get(expert).copied().unwrap_or(0.0),
    };
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| rank(b).total_cmp(&rank(a)).then(a.cmp(&b)));
    let chosen = &order[..mixture.top_k as usize];
    let sum_of = |experts: &[usize]| experts.iter().map(|&expert| f64::from(score(expert))).sum::<f64>() as f32;
    let sum = match (mixture.normalized, mixture.scoring) {
        (true, _) => sum_of(chosen),
        (false, Scoring::Softmax | Scoring::SparseMixer) => sum_of(&order),
        (false, Scoring::Sigmoid) => 1.0,
    };
    chosen.iter().map(|&expert| (expert, score(expert) / sum * mixture.factor)).collect()
}

/// Returns the experts that a SparseMixer chooses, one after the other, with their weights.
fn choose_in_turn(logits: &[f32], mixture: Mixture) -> Vec<(usize, f32)> {
    let mut rest: Vec<usize> = (0..logits.len()).collect();
    let choose = |_| {
        let larger = |a: usize, b: usize| if logits[b] > logits[a] { b } else { a };
        let best = rest.iter().copied().reduce(larger)?;
        let largest = logits[best];
        // A NaN, of two zeros, is not far.
        let is_far = |x: f32| (largest - x) / x.abs().max(largest) > mixture.cutoff;
        let near = rest.iter().map(|&expert| logits[expert]).filter(|&x| !is_far(x));
        let sum: f64 = near.map(|x| f64::from((x - largest).exp())).sum();
        rest.retain(|&expert| expert != best);
        let weight = if largest == f32::NEG_INFINITY { 0.0 } else { (1.0 / sum) as f32 };
        Some((best, weight * mixture.factor))
    };
    (0..mixture.top_k).filter_map(choose).collect()
}

/// Outputs that are summed beside each other: the sum of one waits for each of its additions.
const TOGETHER: usize = 8;

/// `x weight^T`, where the rows of both have `inputs` elements.
fn multiply(x: &[f32], weight: &[f32], inputs: usize) -> Vec<f32> {
    let (rows, outputs) = (x.len() / inputs, weight.len() / inputs);
    let blocks = outputs.div_ceil(TOGETHER);
    let block = |i: usize| {
        let (row, first) = (i / blocks, i % blocks * TOGETHER);
        let last = outputs.min(first + TOGETHER);
        dots(&x[row * inputs..][..inputs], &weight[first * inputs..last * inputs])
    };
    (0..rows * blocks).into_par_iter().flat_map_iter(block).collect()
}

/// The products of `a` with each row, at most `TOGETHER`, as [`dot`] computes them.
fn dots(a: &[f32], rows: &[f32]) -> Vec<f32> {
    if rows.len() < TOGETHER * a.len() {
        return rows.chunks_exact(a.len()).map(|row| dot(a, row)).collect();
    }
    let rows: [&[f32]; TOGETHER] = std::array::from_fn(|row| &rows[row * a.len()..][..a.len()]);
    let mut sums = [EMPTY_SUM; TOGETHER];
    for (i, &a) in a.iter().enumerate() {
        for (sum, row) in sums.iter_mut().zip(rows) {
            *sum += f64::from(a) * f64::from(row[i]);
        }
    }
    sums.map(|sum| sum as f32).to_vec()
}

/// What changes no addend, also not -0.
const EMPTY_SUM: f64 = -0.0;

/// The sum of the products, in f64, rounded once.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).fold(EMPTY_SUM, |sum, (&a, &b)| sum + f64::from(a) * f64::from(b)) as f32
}

fn add(to: &mut [f32], what: &[f32]) {
    to.iter_mut().zip(what).for_each(|(to, what)| *to += what);
}

/// `cap * tanh(x / cap)`, if there is a cap.
fn capped(x: f32, cap: Option<f32>) -> f32 {
    cap.map_or(x, |cap| cap * (x / cap).tanh())
}

fn scale(values: &mut [f32], factor: f32) {
    values.iter_mut().for_each(|value| *value *= factor);
}

/// Rotates the pairs of the first elements of a head.
fn rotate(head: &mut [f32], pairs: RopePairs, cos: &[f32], sin: &[f32]) {
    let half = cos.len();
    for (i, (cos, sin)) in cos.iter().zip(sin).enumerate() {
        let (first, second) = match pairs {
            RopePairs::Halves => (i, i + half),
            RopePairs::Adjacent => (2 * i, 2 * i + 1),
        };
        let (a, b) = (head[first], head[second]);
        (head[first], head[second]) = (a * cos - b * sin, b * cos + a * sin);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `sparsemixer` of transformers 5.17 returns for a noise of 0.01, in f32.
    #[test]
    fn sparse_mixer_chooses_as_in_transformers() {
        let mixture = Mixture { top_k: 2, scoring: Scoring::SparseMixer, cutoff: 0.02, ..NO_EXPERTS };
        for (logits, experts, weights) in [
            ([1.0, 1.0, 1.0, 1.0], [0, 1], [0.25, 0.333_333_3]),
            ([0.0, 0.0, 0.0, 0.0], [0, 1], [0.25, 0.333_333_3]),
            ([-2.0, -2.0, -2.0, -2.0], [0, 1], [0.25, 0.333_333_3]),
            ([0.5, 2.0, 2.0, 1.0], [1, 2], [0.5, 1.0]),
            ([1.0, 0.99, 0.97, 0.985], [0, 1], [0.336_116_2, 0.50125]),
            ([-1.0, -1.01, -1.03, -5.0], [0, 1], [0.5025, 0.504_999_9]),
            ([0.0, -0.5, 0.0, -1e-30], [0, 2], [0.5, 1.0]),
            ([3.0, 2.95, 2.9, -3.0], [0, 1], [0.512_497_4, 0.512_497_4]),
            ([-0.0, 0.0, 1e-3, -1e-3], [2, 0], [1.0, 0.5]),
            ([1e30, -1e30, 1e30, 0.99e30], [0, 2], [0.5, 1.0]),
        ] {
            let (got, of): (Vec<_>, Vec<_>) = choose(&logits, &[], mixture).into_iter().unzip();
            assert_eq!(got, experts, "{logits:?}");
            assert!(
                of.iter().zip(weights).all(|(got, want): (&f32, f32)| (got - want).abs() < 1e-6),
                "{logits:?}: {of:?}"
            );
        }
        // Nothing is near an expert without a logit.
        let none = choose(&[f32::NEG_INFINITY, 2.0, f32::NEG_INFINITY], &[], mixture);
        assert_eq!(none, [(1, 1.0), (0, 0.0)]);
    }

    #[test]
    fn outputs_beside_each_other_have_the_bits_of_one() {
        let mut state = 1u32;
        let mut values = |count: usize| -> Vec<f32> {
            let next = |state: &mut u32| {
                *state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                // Also zeros of both signs.
                if *state >> 30 == 0 { -0.0 } else { (*state >> 8) as f32 / 1e6 - 8.0 }
            };
            (0..count).map(|_| next(&mut state)).collect()
        };
        for (rows, outputs, inputs) in [(1, 1, 1), (2, 7, 3), (1, 8, 64), (3, 9, 5), (2, 40, 17)] {
            let (x, weight) = (values(rows * inputs), values(outputs * inputs));
            let pairs = x.chunks(inputs).flat_map(|x| weight.chunks(inputs).map(move |row| dot(x, row).to_bits()));
            let products = multiply(&x, &weight, inputs);
            assert!(products.iter().map(|product| product.to_bits()).eq(pairs), "{rows} {outputs} {inputs}");
        }
        let zeros = multiply(&[-0.0; 2], &[1.0; 16], 2);
        assert!(zeros.iter().all(|zero| zero.to_bits() == (-0.0f32).to_bits()));
    }
}
