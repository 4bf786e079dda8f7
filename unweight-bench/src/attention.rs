//! Attention problems over paged KV caches with their expected results in double precision, for tests and for
//! `unweight-bench stress`.
//!
//! Everything that must not be read is NaN: unused pages, and lines after a row's newest token or before its window.

use std::f64::consts::LOG2_E;

use rayon::prelude::*;
use unweight_codegen::kv::{self, PAGE_TOKENS};
use unweight_format::testing::Random;
use unweight_rt::{
    DeviceBuffer, DeviceError, ExecContext, MatrixMut, MatrixRef, Stream,
    raw::ops::{
        attention::{Attention, AttentionOptions, ChunkRows, RotaryTable, TokenRows},
        kv::{KvLayer, KvShape},
        kv_packed::DecodeCache,
    },
};

use crate::oracle;

/// The position of a row without a token.
pub const PAD: u32 = u32::MAX;
/// A NaN, which fills every element that must not be read.
pub const POISON: u16 = 0x7fc1;
/// Pages that belong to no row.
const SPARE_PAGES: usize = 3;

/// A decode batch: the newest token of each row.
#[derive(Clone, Debug)]
pub struct Decode {
    /// Elements per head.
    pub head_dim: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Query heads per KV head.
    pub group: usize,
    /// The position of each row's token, or [`PAD`].
    pub positions: Vec<u32>,
    /// Tokens that a token attends to; 0: all before it.
    pub window: u32,
    /// Whether the projection has a bias.
    pub bias: bool,
    /// Whether queries and keys are normalized.
    pub norm: bool,
    /// Rotated elements of a head.
    pub rope_dim: usize,
    /// Whether pairs of adjacent elements are rotated.
    pub adjacent: bool,
    /// The soft cap of scores; excludes norms.
    pub softcap: Option<f32>,
    /// Whether norms multiply by one plus the weight, and round once.
    pub plus_one: bool,
    /// Epsilon that norms add to the mean square.
    pub eps: f32,
    /// The seed of all values.
    pub seed: u64,
}

impl Decode {
    /// Returns a case with two KV heads and full rotation, without any other feature.
    pub fn new(head_dim: usize, group: usize, positions: &[u32]) -> Self {
        Self {
            head_dim,
            kv_heads: 2,
            group,
            positions: positions.to_vec(),
            window: 0,
            bias: false,
            norm: false,
            rope_dim: head_dim,
            adjacent: false,
            softcap: None,
            plus_one: false,
            eps: 1e-5,
            seed: 1,
        }
    }

    /// Returns the first token that the token at a position attends to.
    pub fn first_token(&self, position: u32) -> u32 {
        if self.window == 0 { 0 } else { (position + 1).saturating_sub(self.window) }
    }

    /// Returns the number of columns of QKV.
    pub fn columns(&self) -> usize {
        self.kv_heads * (self.group + 2) * self.head_dim
    }

    /// Returns the number of columns of A.
    pub fn out_columns(&self) -> usize {
        self.kv_heads * self.group * self.head_dim
    }
}

/// The inputs of a launch over a decode batch; rows have no gaps.
#[derive(Clone, Debug)]
pub struct Problem {
    /// The decode batch.
    pub case: Decode,
    /// bf16 `[m, (h + 2 * kv_heads) * head_dim]`.
    pub qkv: Vec<u16>,
    /// The pages of the layer: bf16 `[pages]`, each of [`kv`].
    pub layer: Vec<u16>,
    /// The number of pages of the layer.
    pub pages: u32,
    /// Page table, u32 `[m, table_pages]`.
    pub table: Vec<u32>,
    /// Table entries per row.
    pub table_pages: usize,
    /// bf16 `[max_positions, rope_dim / 2]`.
    pub cosines: Vec<u16>,
    /// bf16, shaped as `cosines`.
    pub sines: Vec<u16>,
    /// Rows of `cosines` and `sines`.
    pub max_positions: u32,
    /// bf16 `[(h + 2 * kv_heads) * head_dim]`, or empty.
    pub bias: Vec<u16>,
    /// Norm weights of queries and of keys: bf16 `[head_dim]` each, or empty.
    pub norms: [Vec<u16>; 2],
}

fn value(bits: u16) -> f64 {
    f64::from(f32::from_bits(u32::from(bits) << 16))
}

/// Rounds to the nearest bf16.
fn bits(x: f64) -> u16 {
    let bits = (x as f32).to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

fn round(x: f64) -> f64 {
    value(bits(x))
}

/// Returns uniform values from -size to size.
fn values(random: &mut Random, count: usize, size: f64) -> Vec<u16> {
    (0..count).map(|_| bits((random.uniform() * 2.0 - 1.0) * size)).collect()
}

impl Problem {
    /// Makes a problem with random values, on pages in a random order.
    pub fn new(case: &Decode) -> Self {
        let random = &mut Random::new(case.seed);
        let m = case.positions.len();
        let longest = case.positions.iter().filter(|position| **position != PAD).max().map_or(0, |last| last + 1);
        let max_positions = longest.max(1);
        let table_pages = max_positions.div_ceil(PAGE_TOKENS) as usize;
        let pages = m * table_pages + SPARE_PAGES;
        let mut order: Vec<u32> = (0..pages as u32).collect();
        for i in (1..pages).rev() {
            order.swap(i, random.below(i as u64 + 1) as usize);
        }
        order.truncate(m * table_pages);
        let angles = max_positions as usize * case.rope_dim / 2;
        let page_elements = case.kv_heads * 2 * PAGE_TOKENS as usize * case.head_dim;
        let mut problem = Self {
            qkv: values(random, m * case.columns(), 2.0),
            layer: vec![POISON; pages * page_elements],
            pages: pages as u32,
            table: order,
            table_pages,
            cosines: values(random, angles, 1.0),
            sines: values(random, angles, 1.0),
            max_positions,
            bias: values(random, if case.bias { case.columns() } else { 0 }, 0.5),
            norms: [0, 1].map(|_| values(random, if case.norm { case.head_dim } else { 0 }, 1.5)),
            case: case.clone(),
        };
        for (row, &position) in case.positions.iter().enumerate().filter(|(_, position)| **position != PAD) {
            // Lines before a window may already belong to another row.
            for token in case.first_token(position)..position {
                for head in 0..case.kv_heads * 2 {
                    let line = values(random, case.head_dim, if head % 2 == 0 { 2.0 } else { 1.0 });
                    for (i, value) in line.into_iter().enumerate() {
                        let at = problem.element(row, token, head, i);
                        problem.layer[at] = value;
                    }
                }
            }
        }
        problem
    }

    /// Returns one row alone, on the same pages.
    #[must_use]
    pub fn row(&self, row: usize) -> Self {
        let columns = self.case.columns();
        Self {
            case: Decode { positions: vec![self.case.positions[row]], ..self.case.clone() },
            table: self.table[row * self.table_pages..][..self.table_pages].to_vec(),
            qkv: self.qkv[row * columns..][..columns].to_vec(),
            ..self.clone()
        }
    }

    /// Returns the offset of element `index` of head `head` of `[kv_heads][K | V]`, for a row's token.
    pub fn element(&self, row: usize, token: u32, head: usize, index: usize) -> usize {
        let page = self.table[row * self.table_pages + (token / PAGE_TOKENS) as usize] as usize;
        let (head_dim, tile) = (self.case.head_dim, page * self.case.kv_heads * 2 + head);
        let inside = kv::element(head_dim as u32, token % PAGE_TOKENS, index as u32);
        tile * PAGE_TOKENS as usize * head_dim + inside as usize
    }

    /// Returns the kernel arguments `scale` and `eps`. Without a soft cap: the scale of scores times log2(e), and the
    /// epsilon of norms. With one: the cap times log2(e), and the scale of scores over the cap.
    pub fn scales(&self) -> (f32, f32) {
        let factor = 1.0 / (self.case.head_dim as f64).sqrt();
        match self.case.softcap.map(f64::from) {
            None => ((LOG2_E * factor) as f32, self.case.eps),
            Some(cap) => ((LOG2_E * cap) as f32, (factor / cap) as f32),
        }
    }

    /// Returns cosines and sines in the layout that the kernel reads.
    pub fn tables(&self) -> [Vec<u16>; 2] {
        let half = self.case.rope_dim / 2;
        let of = |table: &[u16]| if self.case.adjacent { oracle::adjacent_table(table, half) } else { table.to_vec() };
        [of(&self.cosines), of(&self.sines)]
    }

    /// Returns a head of a row after bias, norm and rotation, each rounded.
    fn head(&self, row: usize, head: usize, gamma: &[u16], rotated: bool) -> Vec<f64> {
        let Decode { head_dim, rope_dim, adjacent, plus_one, eps, .. } = self.case;
        let at = head * head_dim;
        let mut x: Vec<f64> =
            self.qkv[row * self.case.columns() + at..][..head_dim].iter().map(|&b| value(b)).collect();
        if !self.bias.is_empty() {
            x.iter_mut().zip(&self.bias[at..]).for_each(|(x, bias)| *x = round(*x + value(*bias)));
        }
        if !gamma.is_empty() {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / head_dim as f64;
            let scale = 1.0 / (mean + f64::from(eps)).sqrt();
            x.iter_mut().zip(gamma).for_each(|(x, gamma)| {
                *x = match plus_one {
                    true => round((1.0 + value(*gamma)) * (*x * scale)),
                    false => round(value(*gamma) * round(*x * scale)),
                }
            });
        }
        let half = if rotated { rope_dim / 2 } else { 0 };
        for i in 0..half {
            let angle = self.case.positions[row] as usize * half + i;
            let (cos, sin) = (value(self.cosines[angle]), value(self.sines[angle]));
            let (first, second) = oracle::pair_of(adjacent, half, i);
            let (a, b) = (x[first], x[second]);
            x[first] = round(a * cos - b * sin);
            x[second] = round(b * cos + a * sin);
        }
        x
    }

    /// Describes what is wrong with A `[m, h * head_dim]` and with the layer after a launch: elements further from
    /// double precision than rounding explains, and elements of the layer that must not change but did.
    pub fn mismatch(&self, out: &[u16], layer: &[u16]) -> Option<String> {
        let Decode { head_dim, kv_heads, group, .. } = self.case;
        let mut expected = self.layer.clone();
        for (row, &position) in self.case.positions.iter().enumerate().filter(|(_, position)| **position != PAD) {
            for kv_head in 0..kv_heads {
                let first = kv_heads * group;
                let key = self.head(row, first + kv_head, &self.norms[1], true);
                let value_of = self.head(row, first + kv_heads + kv_head, &[], false);
                for (half, new) in [key, value_of].into_iter().enumerate() {
                    for (i, new) in new.into_iter().enumerate() {
                        let at = self.element(row, position, kv_head * 2 + half, i);
                        let got = value(layer[at]);
                        // fp32 and fp64 may round differently at each step, by one unit.
                        let error = (got - new).abs();
                        if error.is_nan() || error > new.abs() / 64.0 + 1e-2 {
                            return Some(format!(
                                "row {row}, kv head {kv_head}, element {i} of the new token: {got} instead of {new}"
                            ));
                        }
                        expected[at] = layer[at];
                    }
                }
            }
        }
        if let Some(at) = expected.iter().zip(layer).position(|(a, b)| a != b) {
            return Some(format!("element {at} of the layer changed to {:#06x}", layer[at]));
        }
        (0..self.case.positions.len() * kv_heads).into_par_iter().find_map_first(|unit| {
            let (row, kv_head) = (unit / kv_heads, unit % kv_heads);
            let out = &out[row * self.case.out_columns() + kv_head * group * head_dim..][..group * head_dim];
            let position = self.case.positions[row];
            if position == PAD {
                return out
                    .iter()
                    .any(|v| *v != 0)
                    .then(|| format!("row {row} has no token, but its output is not zero"));
            }
            let line = |token: u32, half: usize| -> Vec<f64> {
                (0..head_dim).map(|i| value(layer[self.element(row, token, kv_head * 2 + half, i)])).collect()
            };
            let tokens: Vec<_> =
                (self.case.first_token(position)..=position).map(|token| (line(token, 0), line(token, 1))).collect();
            out.chunks_exact(head_dim).enumerate().find_map(|(j, out)| {
                let q = self.head(row, kv_head * group + j, &self.norms[0], true);
                let wrong = mismatch_of_query(&q, &tokens, self.case.softcap, out)?;
                Some(format!("row {row} at {position}, kv head {kv_head}, query {j}, {wrong}"))
            })
        })
    }
}

/// A chunk of one sequence's prompt.
#[derive(Clone, Debug)]
pub struct Chunk {
    /// Elements per head.
    pub head_dim: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Query heads per KV head.
    pub group: usize,
    /// The position of the first token.
    pub start: u32,
    /// The number of tokens.
    pub tokens: u32,
    /// Tokens that a token attends to; 0: all before it.
    pub window: u32,
    /// The soft cap of scores.
    pub softcap: Option<f32>,
    /// The seed of all values.
    pub seed: u64,
}

/// The inputs of a launch over a chunk; rows have no gaps.
#[derive(Clone, Debug)]
pub struct ChunkProblem {
    /// The chunk of a prompt.
    pub chunk: Chunk,
    /// Pages and rows as of a decode batch whose rows share one sequence. All positions are that of the chunk's last
    /// token.
    pub sequence: Problem,
}

impl ChunkProblem {
    /// Makes a problem with random values. The pages contain the chunk's keys and values.
    pub fn new(chunk: &Chunk) -> Self {
        let last = chunk.start + chunk.tokens - 1;
        let first = if chunk.window == 0 { 0 } else { (chunk.start + 1).saturating_sub(chunk.window) };
        let case = Decode {
            kv_heads: chunk.kv_heads,
            // All tokens from the first one that the chunk attends to, up to the last of the chunk.
            window: last + 1 - first,
            softcap: chunk.softcap,
            seed: chunk.seed,
            ..Decode::new(chunk.head_dim, chunk.group, &[last])
        };
        let mut sequence = Problem::new(&case);
        let random = &mut Random::new(chunk.seed ^ 0xc4);
        sequence.qkv = values(random, chunk.tokens as usize * case.columns(), 2.0);
        for head in 0..chunk.kv_heads * 2 {
            for (i, value) in values(random, chunk.head_dim, 1.0).into_iter().enumerate() {
                let at = sequence.element(0, last, head, i);
                sequence.layer[at] = value;
            }
        }
        Self { chunk: chunk.clone(), sequence }
    }

    /// Describes what is wrong with A `[tokens, h * head_dim]`, or with the layer, which must be unchanged.
    pub fn mismatch(&self, out: &[u16], layer: &[u16]) -> Option<String> {
        if self.sequence.layer != layer {
            return Some("the layer was changed".to_owned());
        }
        let Chunk { head_dim, kv_heads, group, start, tokens, window, .. } = self.chunk;
        let (columns, out_columns) = (self.sequence.case.columns(), self.sequence.case.out_columns());
        let first = self.sequence.case.first_token(start + tokens - 1);
        (0..kv_heads).into_par_iter().find_map_first(|kv_head| {
            let line = |token: u32, half: usize| -> Vec<f64> {
                let at = |i| self.sequence.element(0, token, kv_head * 2 + half, i);
                (0..head_dim).map(|i| value(layer[at(i)])).collect()
            };
            let keys_and_values: Vec<_> =
                (first..start + tokens).map(|token| (line(token, 0), line(token, 1))).collect();
            (0..tokens).into_par_iter().find_map_first(|row| {
                let position = start + row;
                let window_start = if window == 0 { 0 } else { (position + 1).saturating_sub(window) };
                let tokens = &keys_and_values[(window_start - first) as usize..=(position - first) as usize];
                (0..group).find_map(|j| {
                    let (row, at) = (row as usize, (kv_head * group + j) * head_dim);
                    let q: Vec<f64> =
                        self.sequence.qkv[row * columns + at..][..head_dim].iter().map(|&bits| value(bits)).collect();
                    let wrong = mismatch_of_query(
                        &q,
                        tokens,
                        self.sequence.case.softcap,
                        &out[row * out_columns + at..][..head_dim],
                    )?;
                    Some(format!("token {row} at {position}, kv head {kv_head}, query {j}, {wrong}"))
                })
            })
        })
    }
}

/// Describes what is wrong with the attention of one query over these keys and values.
fn mismatch_of_query(q: &[f64], tokens: &[(Vec<f64>, Vec<f64>)], softcap: Option<f32>, out: &[u16]) -> Option<String> {
    let score = |k: &[f64]| q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>() / (q.len() as f64).sqrt();
    let capped = |x: f64| softcap.map(f64::from).map_or(x, |cap| cap * (x / cap).tanh());
    let scores: Vec<f64> = tokens.iter().map(|(k, _)| capped(score(k))).collect();
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - top).exp()).collect();
    let sum: f64 = weights.iter().sum();
    out.iter().enumerate().find_map(|(i, &got)| {
        let terms = weights.iter().zip(tokens).map(|(w, (_, v))| w / sum * v[i]);
        let (expected, size) = terms.fold((0.0, 0.0), |(a, b): (f64, f64), term| (a + term, b + term.abs()));
        let error = (value(got) - expected).abs();
        // Slack: the rounding of A, of each weight, and a unit in the last place of query elements.
        let slack = expected.abs() / 256.0 + size / 128.0 + 1e-6;
        (error.is_nan() || error > slack).then(|| format!("element {i}: {} instead of {expected}", value(got)))
    })
}

/// The rows of a problem on a device.
#[derive(Debug)]
struct Rows {
    case: Decode,
    qkv: DeviceBuffer<u16>,
    positions: DeviceBuffer<u32>,
    table_pages: u32,
    cosines: DeviceBuffer<u16>,
    sines: DeviceBuffer<u16>,
    max_positions: u32,
    bias: Option<DeviceBuffer<u16>>,
    norms: [Option<DeviceBuffer<u16>>; 2],
    parts: u32,
}

impl Rows {
    fn decode(
        &self,
        attention: &Attention,
        ctx: &mut ExecContext,
        cache: (DecodeCache<'_>, &DeviceBuffer<u32>),
        out: MatrixMut<'_>,
    ) -> Result<(), DeviceError> {
        let m = self.case.positions.len() as u32;
        let columns = self.case.columns() as u32;
        let half = self.case.rope_dim as u32 / 2;
        let qkv = MatrixRef::new(&self.qkv, m, columns, columns.into())?;
        let rotary = RotaryTable {
            cosines: MatrixRef::new(&self.cosines, self.max_positions, half, half.into())?,
            sines: MatrixRef::new(&self.sines, self.max_positions, half, half.into())?,
        };
        let [q_norm, k_norm] = &self.norms;
        let options = AttentionOptions::new(rotary)
            .window(Some(self.case.window))
            .softcap(self.case.softcap)
            .bias(self.bias.as_ref())
            .norms(q_norm.as_ref(), k_norm.as_ref(), self.case.eps)
            .parts(self.parts);
        let (cache, page_table) = cache;
        let rows = TokenRows { positions: &self.positions, page_table, table_pages: self.table_pages };
        attention.decode(ctx, qkv, cache, rows, options, out)
    }
}

/// A problem on a device.
#[derive(Debug)]
pub struct DeviceProblem {
    rows: Rows,
    layer: DeviceBuffer<u16>,
    shape: KvShape,
    table: DeviceBuffer<u32>,
}

impl DeviceProblem {
    /// Uploads a problem.
    ///
    /// # Errors
    /// Fails without enough memory, or if no kernel supports the size of the heads.
    pub fn new(stream: &Stream, problem: &Problem) -> Result<Self, DeviceError> {
        let of = |values: &[u16]| DeviceBuffer::from_host(stream, values);
        let optional = |values: &[u16]| if values.is_empty() { Ok(None) } else { of(values).map(Some) };
        let Decode { head_dim, kv_heads, .. } = problem.case;
        let ([q_norm, k_norm], [cosines, sines]) = (&problem.norms, problem.tables());
        let rows = Rows {
            qkv: of(&problem.qkv)?,
            positions: DeviceBuffer::from_host(stream, &problem.case.positions)?,
            table_pages: problem.table_pages as u32,
            cosines: of(&cosines)?,
            sines: of(&sines)?,
            max_positions: problem.max_positions,
            bias: optional(&problem.bias)?,
            norms: [optional(q_norm)?, optional(k_norm)?],
            parts: 1,
            case: problem.case.clone(),
        };
        Ok(Self {
            rows,
            layer: of(&problem.layer)?,
            shape: KvShape::new(problem.pages, kv_heads as u32, head_dim as u32)?,
            table: DeviceBuffer::from_host(stream, &problem.table)?,
        })
    }

    /// Replaces the rows by those of another problem with the same shape and pages. Recorded graphs read the new rows.
    /// Synchronizes.
    ///
    /// # Errors
    /// Returns an error of the driver.
    pub fn set(&mut self, stream: &Stream, problem: &Problem) -> Result<(), DeviceError> {
        self.rows.qkv.write(stream, 0, &problem.qkv)?;
        self.rows.positions.write(stream, 0, &problem.case.positions)?;
        self.table.write(stream, 0, &problem.table)
    }

    /// Splits rows into `parts`, for kernels that support it, and reserves space in the context.
    ///
    /// # Errors
    /// See [`Attention::context_size`] and [`ExecContext::reserve`].
    pub fn in_parts(mut self, attention: &Attention, ctx: &mut ExecContext, parts: u32) -> Result<Self, DeviceError> {
        let m = self.rows.case.positions.len() as u32;
        ctx.reserve(attention.context_size(m, self.rows.case.kv_heads as u32, parts)?)?;
        self.rows.parts = parts;
        Ok(self)
    }

    /// Enqueues the attention of the rows into `out` `[m, h * head_dim]`.
    ///
    /// # Errors
    /// See [`Attention::decode`].
    pub fn decode(
        &mut self,
        attention: &Attention,
        ctx: &mut ExecContext,
        out: MatrixMut<'_>,
    ) -> Result<(), DeviceError> {
        let layer = KvLayer::new(&mut self.layer, self.shape, 0)?;
        self.rows.decode(attention, ctx, (layer.into(), &self.table), out)
    }

    /// Enqueues [`DeviceProblem::decode`] with another cache and its page table, which must have as many pages.
    ///
    /// # Errors
    /// See [`Attention::decode`].
    pub fn decode_from(
        &self,
        attention: &Attention,
        ctx: &mut ExecContext,
        cache: (DecodeCache<'_>, &DeviceBuffer<u32>),
        out: MatrixMut<'_>,
    ) -> Result<(), DeviceError> {
        self.rows.decode(attention, ctx, cache, out)
    }

    /// Enqueues the attention of the tokens of an uploaded chunk into `out` `[tokens, h * head_dim]`.
    ///
    /// # Errors
    /// See [`Attention::prefill`].
    pub fn prefill(
        &mut self,
        attention: &Attention,
        ctx: &mut ExecContext,
        chunk: &Chunk,
        out: MatrixMut<'_>,
    ) -> Result<(), DeviceError> {
        let columns = self.rows.case.columns() as u32;
        let qkv = MatrixRef::new(&self.rows.qkv, chunk.tokens, columns, columns.into())?;
        let rows = ChunkRows::new(chunk.start, &self.table, self.rows.table_pages)
            .window(Some(chunk.window))
            .softcap(chunk.softcap);
        attention.prefill(ctx, qkv, KvLayer::new(&mut self.layer, self.shape, 0)?, rows, out)
    }

    /// Reads the layer after all work on `stream`. Synchronizes.
    ///
    /// # Errors
    /// Returns an error of earlier work on the stream.
    pub fn layer(&self, stream: &Stream) -> Result<Vec<u16>, DeviceError> {
        self.layer.to_host(stream)
    }

    /// Returns the page table.
    pub fn table(&mut self) -> &mut DeviceBuffer<u32> {
        &mut self.table
    }
}
