//! Mixture-of-experts kernels under load: each row of tiles of a shape is an expert with 64 output features.

use std::sync::Arc;

use unweight_codegen::{
    abi::{GemmGroupedArgs, RouteArgs},
    plan::GemmShape,
    spec::{Epilogue, GemmGroupedSpec, RouteSpec, RouteStage},
};
use unweight_format::testing::Random;
use unweight_rt::{DeviceBuffer, raw::device::module::LoadedKernel};

use super::{Launch, RUNS, Run, Subject, Weights, differs};
use crate::{data::halves, error::BenchError, oracle::value};

/// Output features of an expert.
const FEATURES: u32 = 64;
/// Tokens of the routing kernels: one, a few, and as many as X has rows for.
const TOKENS: [u32; 3] = [1, 7, 82];
const TOP_K: u32 = 8;
const ITEM_ROWS: u32 = 8;
/// Not a quotient of logits.
const CUTOFF: f32 = 0.3001;

/// Chooses distinct experts for each token.
fn choose(random: &mut Random, tokens: u32, experts: u32, top_k: u32) -> Vec<u32> {
    (0..tokens)
        .flat_map(|_| {
            let first = random.below(experts.into()) as u32;
            let step = 1 + random.below(u64::from(experts / top_k).max(1)) as u32;
            (0..top_k).map(move |place| (first + place * step.min(experts / top_k)) % experts)
        })
        .collect()
}

/// Returns pairs sorted by expert, and the items of at most `rows` pairs each, padded to the maximum number of items.
fn lists(ids: &[u32], experts: u32, rows: u32) -> (Vec<u32>, Vec<[u32; 4]>) {
    let (mut pairs, mut items) = (Vec::new(), Vec::new());
    for expert in 0..experts {
        let first = pairs.len();
        pairs.extend((0..ids.len() as u32).filter(|pair| ids[*pair as usize] == expert));
        for at in (first..pairs.len()).step_by(rows as usize) {
            items.push([expert, at as u32, rows.min((pairs.len() - at) as u32), 0]);
        }
    }
    items.resize(RouteSpec::items_max(ids.len() as u32, experts, rows) as usize, [0; 4]);
    (pairs, items)
}

impl Run<'_> {
    /// Returns the subject of the grouped product at a batch of tokens.
    pub(super) fn grouped<'a>(
        &'a self,
        kernel: &Arc<LoadedKernel>,
        spec: GemmGroupedSpec,
        weights: &'a Weights,
        tokens: u32,
    ) -> Result<Subject<'a>, BenchError> {
        let (stream, (n, k)) = (self.stream, weights.shape);
        let experts = n / FEATURES;
        let top_k = experts.min(2);
        let ids = choose(&mut Random::new(u64::from(n + tokens)), tokens, experts, top_k);
        // As in layers: the experts of one token are not sorted.
        let is_pairs = tokens == 1;
        let (pairs, items) = lists(&ids, experts, spec.batch_tile.get());
        let count = if is_pairs { ids.len() } else { items.len() };
        let problem = GemmShape { m: count as u32, n: FEATURES, k };
        let pairs = DeviceBuffer::from_host(stream, &pairs)?;
        let items = DeviceBuffer::from_host(stream, if is_pairs { &ids } else { items.as_flattened() })?;
        let columns = if spec.epilogue == Epilogue::SiluMul { FEATURES / 2 } else { FEATURES };
        let bf16 = spec.bf16.then(|| DeviceBuffer::from_host(stream, &halves(&weights.bytes))).transpose()?;
        let of_launch = kernel.clone();
        let launch: Launch<'a> = Box::new(move |y| {
            let tensor = &weights.with_escapes.device;
            let args = GemmGroupedArgs {
                packed: bf16.as_ref().map_or(tensor.packed().address(), DeviceBuffer::address),
                escape_heads: tensor.escape_heads().address(),
                escapes: tensor.escapes().address(),
                y,
                x_data: weights.x.address(),
                x_row_bytes: 2 * u64::from(k),
                pairs: pairs.address(),
                items: items.address(),
                scale: if spec.bf16 { 1.0 } else { tensor.window().scale() },
                escape_words: tensor.escapes().len() as u32,
                n: FEATURES,
                k,
                tile_cols: k / 64,
                pairs_per_row: top_k,
                is_pairs: is_pairs.into(),
                experts,
            };
            // SAFETY: `y` has a row for each pair, the lists refer to existing rows of X and experts, and all buffers
            // live as long as the subject.
            unsafe { of_launch.launch(self.stream, problem, &args) }
        });
        let check = move |y: &[u8]| {
            let wrong = halves(y).into_iter().enumerate().position(|(at, got)| {
                let (pair, column) = (at / columns as usize, at % columns as usize);
                let row = pair / top_k as usize * n as usize + (ids[pair] * FEATURES) as usize;
                let (sum, slack) = match spec.epilogue {
                    Epilogue::SiluMul => {
                        let gate_rows = Epilogue::GATE_ROWS as usize;
                        let at = row + column / gate_rows * 2 * gate_rows + column % gate_rows;
                        let ((gate, gate_size), (up, up_size)) = (weights.exact[at], weights.exact[at + gate_rows]);
                        let sum = gate / (1.0 + (-gate).exp()) * up;
                        (sum, (gate_size * up.abs() * 1.1 + up_size * gate.abs()) * 1e-6 + sum.abs() * 1e-5)
                    }
                    Epilogue::Store | Epilogue::StoreAdd => {
                        let (sum, size) = weights.exact[row + column];
                        (sum, size * 1e-6)
                    }
                };
                let error = (value(got) - sum).abs();
                error.is_nan() || error > sum.abs() / 256.0 + slack
            });
            wrong.map(|at| format!("element {at} of the output of {tokens} tokens is wrong"))
        };
        self.rows(kernel, (tokens * top_k, columns), launch, check)
    }

    /// Returns the subjects of the routing kernels.
    pub(super) fn route<'a>(
        &'a self,
        kernel: &Arc<LoadedKernel>,
        spec: RouteSpec,
        weights: &'a Weights,
    ) -> Result<Vec<Subject<'a>>, BenchError> {
        TOKENS
            .into_iter()
            .map(|tokens| match spec.stage {
                RouteStage::Topk | RouteStage::TopkSigmoid | RouteStage::TopkSparseMixer => {
                    self.topk(kernel, spec.stage, weights, tokens)
                }
                RouteStage::Sort => self.sort(kernel, tokens),
                RouteStage::Combine => self.combine(kernel, weights, tokens),
            })
            .collect()
    }

    fn topk<'a>(
        &'a self,
        kernel: &Arc<LoadedKernel>,
        stage: RouteStage,
        weights: &'a Weights,
        tokens: u32,
    ) -> Result<Subject<'a>, BenchError> {
        let (pitch, experts) = (weights.shape.1, weights.shape.1.min(128));
        let logits = weights.x.read(self.stream, 0, (tokens * pitch) as usize)?;
        let (of_launch, pairs) = (kernel.clone(), tokens * TOP_K);
        let has_sigmoids = stage == RouteStage::TopkSigmoid;
        let is_sparse = stage == RouteStage::TopkSparseMixer;
        // Multiples of 1/64, so that hardly any two sums are equal up to rounding.
        let bias: Vec<f32> = (0..experts).map(|expert| (expert * 7 % 32) as f32 / 64.0).collect();
        let correction = DeviceBuffer::from_host(self.stream, &bias)?;
        let launch: Launch<'a> = Box::new(move |y| {
            let args = RouteArgs {
                logits: weights.x.address(),
                products: if has_sigmoids { correction.address() } else { 0 },
                routed_scale: if is_sparse { CUTOFF } else { 1.0 },
                ids: y,
                weights: y + u64::from(pairs) * 4,
                logits_pitch: pitch.into(),
                tokens,
                experts,
                top_k: TOP_K,
                normalized: (!is_sparse).into(),
                scale: 1.0,
                ..RouteArgs::default()
            };
            // SAFETY: `y` has 4 bytes for each id and each weight; X has more rows.
            unsafe { of_launch.launch(self.stream, GemmShape::rows(tokens), &args) }
        });
        let check = move |y: &[u8]| {
            let words: Vec<u32> =
                y.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect();
            let (ids, shares) = words.split_at(pairs as usize);
            logits.chunks_exact(pitch as usize).enumerate().find_map(|(token, row)| {
                let mut order: Vec<u32> = (0..experts).collect();
                let share = |expert: u32| {
                    let logit = value(row[expert as usize]);
                    if has_sigmoids { 1.0 / (1.0 + (-logit).exp()) } else { logit.exp() }
                };
                let rank = |expert: u32| match has_sigmoids {
                    true => share(expert) + f64::from(bias[expert as usize]),
                    false => value(row[expert as usize]),
                };
                order.sort_by(|a, b| rank(*b).total_cmp(&rank(*a)).then(a.cmp(b)));
                order.truncate(TOP_K as usize);
                let sum: f64 = order.iter().map(|expert| share(*expert)).sum();
                let pairs = token * TOP_K as usize..(token + 1) * TOP_K as usize;
                // Of a sparse mixer: the share among the experts that come later or are near.
                let near_sum = |place: usize| {
                    let rest = (0..experts).filter(|expert| !order[..place].contains(expert));
                    let largest = value(row[order[place] as usize]);
                    let is_near = |x: f64| (largest - x) / x.abs().max(largest) <= f64::from(CUTOFF);
                    let near = rest.filter(|expert| is_near(value(row[*expert as usize])));
                    near.map(share).sum::<f64>()
                };
                let near = |(place, (got, expert)): (usize, (&u32, &u32))| {
                    let expected = share(*expert) / if is_sparse { near_sum(place) } else { sum };
                    (f64::from(f32::from_bits(*got)) - expected).abs() <= expected * 1e-5
                };
                let right = ids[pairs.clone()] == order && shares[pairs].iter().zip(&order).enumerate().all(near);
                (!right).then(|| format!("wrong experts or weights for token {token} of {tokens}"))
            })
        };
        // Two words per pair are as long as four bf16 columns.
        self.rows(kernel, (tokens, 4 * TOP_K), launch, check)
    }

    fn sort<'a>(&'a self, kernel: &Arc<LoadedKernel>, tokens: u32) -> Result<Subject<'a>, BenchError> {
        let experts = 128;
        let ids = choose(&mut Random::new(tokens.into()), tokens, experts, TOP_K);
        let (pairs, items) = lists(&ids, experts, ITEM_ROWS);
        let items_max = items.len() as u32;
        let expected: Vec<u8> = pairs.iter().chain(items.as_flattened()).flat_map(|word| word.to_le_bytes()).collect();
        let (ids, of_launch) = (DeviceBuffer::from_host(self.stream, &ids)?, kernel.clone());
        let launch: Launch<'a> = Box::new(move |y| {
            let args = RouteArgs {
                ids: ids.address(),
                pairs: y,
                items: y + u64::from(tokens * TOP_K) * 4,
                tokens,
                experts,
                top_k: TOP_K,
                item_rows: ITEM_ROWS,
                items_max,
                ..RouteArgs::default()
            };
            // SAFETY: `y` holds both lists.
            unsafe { of_launch.launch(self.stream, GemmShape::rows(1), &args) }
        });
        let bytes = expected.len();
        Ok(Subject {
            name: kernel.spec().to_string(),
            shape: GemmShape { m: tokens, n: experts, k: 0 },
            outputs: DeviceBuffer::zeroed(self.stream, bytes * RUNS as usize)?,
            bytes,
            before: None,
            launch,
            check: Box::new(move |y| differs(y, &expected)),
        })
    }

    /// Makes a subject that combines the rows of X, one per pair.
    fn combine<'a>(
        &'a self,
        kernel: &Arc<LoadedKernel>,
        weights: &'a Weights,
        tokens: u32,
    ) -> Result<Subject<'a>, BenchError> {
        let (columns, experts) = (weights.shape.1, 128);
        let mut random = Random::new(tokens.into());
        let mut ids = choose(&mut random, tokens, experts, TOP_K);
        ids.iter_mut().step_by(5).for_each(|id| *id = u32::MAX);
        let shares: Vec<f32> = ids.iter().map(|_| random.below(1000) as f32 / 999.0).collect();
        let rows = weights.x.read(self.stream, 0, ids.len() * columns as usize)?;
        let (ids_at, shares_at) =
            (DeviceBuffer::from_host(self.stream, &ids)?, DeviceBuffer::from_host(self.stream, &shares)?);
        let of_launch = kernel.clone();
        let launch: Launch<'a> = Box::new(move |y| {
            let args = RouteArgs {
                ids: ids_at.address(),
                weights: shares_at.address(),
                products: weights.x.address(),
                y,
                y_pitch: columns.into(),
                tokens,
                experts,
                top_k: TOP_K,
                columns,
                row_blocks: columns.div_ceil(RouteSpec::BLOCK_COLUMNS),
                ..RouteArgs::default()
            };
            // SAFETY: X has a row for each pair, `y` one for each token.
            unsafe { of_launch.launch(self.stream, GemmShape { m: tokens, n: columns, k: 0 }, &args) }
        });
        let check = move |y: &[u8]| {
            let wrong = halves(y).into_iter().enumerate().position(|(at, got)| {
                let (token, column) = (at / columns as usize, at % columns as usize);
                let pairs = (token * TOP_K as usize..(token + 1) * TOP_K as usize).filter(|pair| ids[*pair] < experts);
                let (sum, size) = pairs.fold((0.0, 0.0), |(sum, size): (f64, f64), pair| {
                    let term = f64::from(shares[pair]) * value(rows[pair * columns as usize + column]);
                    (sum + term, size + term.abs())
                });
                let error = (value(got) - sum).abs();
                error.is_nan() || error > sum.abs() / 256.0 + size * 1e-6
            });
            wrong.map(|at| format!("element {at} of the output of {tokens} tokens is wrong"))
        };
        self.rows(kernel, (tokens, columns), launch, check)
    }
}
