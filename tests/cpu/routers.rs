//! Routers of mixtures of experts in the simulator: choices and weights against the definition, and planted bugs that
//! must be caught.

use unweight_codegen::{VariantSpec, abi::RouteArgs, plan::GemmShape};
use unweight_format::testing::Random;

use crate::{
    harness::{Buffer, CpuKernel, Edit, bf16, spec},
    moe::launch,
};

/// Logits of a router, with gaps between rows.
struct Router {
    tokens: usize,
    experts: usize,
    top_k: usize,
    normalized: bool,
    rounded: bool,
    /// Experts that every token has in addition.
    shared: usize,
    gated: bool,
    scale: f32,
    /// For scores by sigmoids: the correction bias of each expert, and the factor of the weights of chosen experts.
    sigmoid: Option<(Vec<f32>, f32)>,
    /// For a SparseMixer: its cutoff.
    cutoff: Option<f32>,
    logits: Vec<u16>,
}

const GAP: usize = 8;

impl Router {
    fn new(tokens: usize, experts: usize, top_k: usize, (normalized, rounded): (bool, bool)) -> Self {
        let mut random = Random::new((tokens * experts + top_k) as u64);
        let pitch = experts + GAP;
        // Few distinct values, so that many are equal.
        let mut logits: Vec<u16> = (0..tokens * pitch)
            .map(|_| (random.bits() as u16 & 0x8060) | (124 + random.below(6) as u16) << 7)
            .collect();
        if tokens > 2 {
            logits[..experts].fill(0x3f80);
            // NaN sorts below everything else, -inf is among the other values.
            logits[pitch..][..experts].fill(0xff80);
            logits[pitch] = 0x7fc0;
            logits[pitch + experts - 1] = 0xc000;
            // Zeros of both signs are equal.
            logits[2 * pitch..][..experts].iter_mut().enumerate().for_each(|(i, x)| *x = (i as u16 & 1 ^ 1) << 15);
        }
        let (shared, gated, scale, sigmoid, cutoff) = (0, false, 1.0, None, None);
        Self { tokens, experts, top_k, normalized, rounded, shared, gated, scale, sigmoid, cutoff, logits }
    }

    /// Chooses experts one after the other. Logits have few distinct quotients, none of which is the cutoff.
    fn with_cutoff(self, cutoff: f32) -> Self {
        Self { cutoff: Some(cutoff), ..self }
    }

    /// Adds a small number to every logit of the last row, so that many are near the largest.
    fn with_near_logits(mut self) -> Self {
        let row = (self.tokens - 1) * (self.experts + GAP);
        self.logits[row..][..self.experts].iter_mut().enumerate().for_each(|(i, x)| *x = 0x4000 + (i * 5 % 37) as u16);
        self
    }

    /// The sum of which the weight of the expert in `place` is a share, relative to its own addend.
    fn near_sum(&self, order: &[usize], place: usize, value: impl Fn(usize) -> f64, cutoff: f32) -> f64 {
        let largest = value(order[place]);
        // 0 / 0 is not far.
        let is_far = |x: &f64| (largest - x) / x.abs().max(largest) > f64::from(cutoff);
        order[place..].iter().map(|expert| value(*expert)).filter(|x| !is_far(x)).map(|x| (x - largest).exp()).sum()
    }

    /// Scores by sigmoids. Sums of scores and biases differ, or are those of equal logits and biases.
    fn with_sigmoids(self, routed_scale: f32) -> Self {
        let bias = (0..self.experts).map(|expert| ((expert * 7 + 12) % 13) as f32 / 16.0 - 0.25);
        Self { sigmoid: Some((bias.collect(), routed_scale)), ..self }
    }

    fn with_shared(self, shared: usize, gated: bool, scale: f32) -> Self {
        Self { shared, gated, scale, ..self }
    }

    fn places(&self) -> usize {
        self.top_k + self.shared
    }

    /// Returns the choice by definition: among equal logits the lower expert is first.
    fn expected(&self, token: usize) -> Vec<(u32, f64)> {
        let row = &self.logits[token * (self.experts + GAP)..];
        let logits = &row[..self.experts];
        let value = |bits: u16| if bf16(bits).is_nan() { f64::NEG_INFINITY } else { bf16(bits) + 0.0 };
        let mut order: Vec<usize> = (0..self.experts).collect();
        let largest = logits.iter().map(|bits| value(*bits)).fold(f64::NEG_INFINITY, f64::max);
        let share = |expert: usize| match self.sigmoid {
            None => (value(logits[expert]) - largest).exp(),
            Some(_) => 1.0 / (1.0 + (-value(logits[expert])).exp()),
        };
        let rank = |expert: usize| match &self.sigmoid {
            Some((bias, _)) if !bf16(logits[expert]).is_nan() => share(expert) + f64::from(bias[expert]),
            _ => value(logits[expert]),
        };
        order.sort_by(|a, b| rank(*b).total_cmp(&rank(*a)).then(a.cmp(b)));
        let chosen = &order[..self.top_k];
        if let Some(cutoff) = self.cutoff {
            let logit = |expert: usize| value(logits[expert]);
            let weight = |place: usize| match logit(order[place]) {
                f64::NEG_INFINITY => 0.0,
                _ => f64::from(self.scale) / self.near_sum(&order, place, logit, cutoff),
            };
            return chosen.iter().enumerate().map(|(place, expert)| (*expert as u32, weight(place))).collect();
        }
        let of: f64 = match (self.normalized, &self.sigmoid) {
            (true, None) => chosen.iter().map(|expert| share(*expert)).sum(),
            (true, Some(_)) => chosen.iter().map(|expert| share(*expert)).sum::<f64>() + 1e-20,
            (false, None) => (0..self.experts).map(share).sum(),
            (false, Some(_)) => 1.0,
        };
        let routed = self.sigmoid.as_ref().map_or(1.0, |(_, scale)| f64::from(*scale));
        let weight = if self.gated { 1.0 / (1.0 + (-bf16(row[self.experts])).exp()) } else { 1.0 };
        let chosen = chosen.iter().map(|expert| (*expert as u32, share(*expert) / of * routed));
        let shared = (self.experts..self.experts + self.shared).map(|expert| (expert as u32, weight));
        chosen.chain(shared).map(|(expert, weight)| (expert, weight * f64::from(self.scale))).collect()
    }

    fn check(&self, kernel: &mut CpuKernel, spec: &VariantSpec) -> Result<(), String> {
        let (logits, pairs) = (Buffer::of(bytemuck::cast_slice(&self.logits)), self.tokens * self.places());
        let (ids, weights) = (Buffer::new(pairs * 4), Buffer::new(pairs * 4));
        let (bias, routed_scale) = self.sigmoid.clone().unwrap_or((vec![0.0], 0.0));
        let bias = Buffer::of(bytemuck::cast_slice(&bias));
        let args = RouteArgs {
            logits: logits.address(),
            products: bias.address(),
            routed_scale: self.cutoff.unwrap_or(routed_scale),
            ids: ids.address(),
            weights: weights.address(),
            logits_pitch: (self.experts + GAP) as u64,
            tokens: self.tokens as u32,
            experts: self.experts as u32,
            top_k: self.top_k as u32,
            normalized: self.normalized.into(),
            rounded: self.rounded.into(),
            shared: self.shared as u32,
            gated: self.gated.into(),
            scale: self.scale,
            ..RouteArgs::default()
        };
        let buffers = [("logits", &logits), ("ids", &ids), ("weights", &weights), ("bias", &bias)];
        launch(kernel, spec, GemmShape::rows(self.tokens as u32), &args, &buffers, 1)?;
        let (ids, weights) = (ids.u32s(), weights.u32s());
        for token in 0..self.tokens {
            for (rank, (id, weight)) in self.expected(token).into_iter().enumerate() {
                let at = token * self.places() + rank;
                let got = f32::from_bits(weights[at]);
                let bound = if self.rounded { weight / 255.0 } else { weight * 1e-5 };
                let bits = if self.rounded && self.scale == 1.0 { weights[at] & 0xffff } else { 0 };
                if ids[at] != id || (f64::from(got) - weight).abs() > bound || got.is_nan() || bits != 0 {
                    return Err(format!(
                        "token {token}, choice {rank}: expert {} of weight {got} instead of {id} of {weight}",
                        ids[at]
                    ));
                }
            }
        }
        Ok(())
    }
}

fn routers() -> Vec<Router> {
    vec![
        Router::new(1, 8, 2, (true, false)),
        Router::new(9, 8, 8, (true, true)),
        Router::new(17, 60, 4, (false, true)),
        Router::new(5, 128, 8, (true, true)),
        Router::new(3, 512, 32, (false, false)),
        Router::new(4, 33, 1, (false, false)),
        Router::new(9, 60, 4, (false, true)).with_shared(4, true, 1.0),
        Router::new(2, 8, 2, (true, true)).with_shared(2, false, 0.22),
        Router::new(3, 40, 8, (true, false)).with_shared(24, true, 2.5),
    ]
}

/// Checks the choices of all routers by kernels with these names.
fn check_routers(names: [&str; 2], routers: &[Router]) {
    let specs = names.map(spec);
    let mut kernel = CpuKernel::all(&specs, &[]);
    for spec in &specs {
        for (i, router) in routers.iter().enumerate() {
            router.check(&mut kernel, spec).unwrap_or_else(|wrong| panic!("{spec}, router {i}: {wrong}"));
        }
    }
}

/// Plants each bug, a text of the header and its replacement, and expects that a router catches it.
fn check_planted_bugs(name: &str, bugs: &[(&'static str, &'static str)], routers: &[Router]) {
    let spec = spec(name);
    for (from, to) in bugs {
        let Some(edit) = Edit::planted("unweight/kernels/route.cuh", from, to) else { continue };
        let mut kernel = CpuKernel::of(&spec, &[edit]);
        let caught = routers.iter().any(|router| router.check(&mut kernel, &spec).is_err());
        assert!(caught, "the planted bug was not caught: `{to}` for `{from}`");
    }
}

#[test]
fn tokens_choose_their_largest_logits() {
    check_routers(["route_topk", "route_topk_pdl"], &routers());
}

fn sigmoid_routers() -> Vec<Router> {
    vec![
        Router::new(1, 8, 2, (true, false)).with_sigmoids(1.0),
        Router::new(17, 60, 4, (false, true)).with_sigmoids(1.0),
        Router::new(5, 128, 8, (true, false)).with_shared(1, false, 1.0).with_sigmoids(2.5),
        Router::new(3, 512, 31, (false, false)).with_shared(1, true, 0.5).with_sigmoids(1.25),
        Router::new(9, 33, 1, (true, true)).with_sigmoids(1.0),
    ]
}

#[test]
fn sigmoids_with_a_correction_choose_experts() {
    check_routers(["route_topk_sigmoid", "route_topk_sigmoid_pdl"], &sigmoid_routers());
}

fn sparse_mixers() -> Vec<Router> {
    vec![
        Router::new(1, 16, 2, (false, true)).with_cutoff(0.02),
        Router::new(17, 16, 2, (false, false)).with_cutoff(0.0201).with_near_logits(),
        Router::new(4, 2, 2, (false, false)).with_cutoff(0.3),
        Router::new(9, 60, 2, (false, false)).with_cutoff(0.3),
        Router::new(5, 512, 4, (false, true)).with_cutoff(0.0).with_near_logits(),
        Router { scale: 0.5, ..Router::new(3, 33, 2, (false, false)).with_cutoff(1.9).with_near_logits() },
    ]
}

#[test]
fn sparse_mixers_choose_experts_in_turn() {
    check_routers(["route_topk_sparse_mixer", "route_topk_sparse_mixer_pdl"], &sparse_mixers());
}

#[test]
fn planted_bugs_of_sparse_mixers_are_caught() {
    let bugs = [
        ("if (keys[i] != 0 && !far)", "if (!far)"),
        ("if (keys[i] != 0 && !far)", "if (keys[i] != 0)"),
        ("ptx::add(logit, -x), scale) > cutoff;", "ptx::add(logit, -x), scale) >= cutoff;"),
        ("ptx::add(logit, -x), scale) > cutoff;", "ptx::add(logit, -x), logit) > cutoff;"),
        ("ptx::bits_from_float(x) & 0x7fffffffu)", "ptx::bits_from_float(x))"),
        ("ptx::ex2_approx((x - logit) * 1.44269504f));", "ptx::ex2_approx(x * 1.44269504f));"),
        ("logit == none ? 0.0f : ptx::div", "ptx::div"),
    ];
    check_planted_bugs("route_topk_sparse_mixer_pdl", &bugs, &sparse_mixers());
}

#[test]
fn planted_bugs_of_sigmoid_choices_are_caught() {
    let bugs = [
        ("ptx::add(score_of(logits + expert), bias)", "score_of(logits + expert)"),
        ("ptx::ld_global(correction + expert)", "ptx::ld_global(correction)"),
        ("weight = score_of(logits + id);", "weight = value_of(key);"),
        ("x * -1.44269504f", "x * 1.44269504f"),
        ("value = is_number ?", "value = true ?"),
        ("if constexpr (kSigmoid) weight = ptx::mul(weight, args.routed_scale);", ""),
        ("if constexpr (kSigmoid) chosen = ptx::add(chosen, 1e-20f);", ""),
    ];
    check_planted_bugs("route_topk_sigmoid_pdl", &bugs, &sigmoid_routers());
}

#[test]
fn planted_bugs_of_choices_are_caught() {
    let bugs = [
        ("for (u32 i = kPerLane; i-- > 0;) expert", "for (u32 i = 0; i < kPerLane; ++i) expert"),
        ("ptx::redux_sync_min(expert);", "ptx::redux_sync_max(expert + 1) - 1;"),
        ("keys[i] = expert == i * 32 + lane ? 0", "keys[i] = i == 0 && expert % 32 == lane ? 0"),
        ("ptx::shfl_sync_idx(ptx::bits_from_float(weight), place)", "ptx::bits_from_float(weight)"),
        ("ptx::bits_from_float(ptx::add(value, 0.0f));", "ptx::bits_from_float(value);"),
        ("~bits : bits | 0x80000000u;", "bits : bits | 0x80000000u;"),
        ("if (args.experts <= kFewExperts)", "if (true)"),
        ("if (args.rounded != 0)", "if (args.rounded == 0)"),
        ("if (token >= args.tokens) return;", ""),
        ("args.logits + token * args.logits_pitch;", "args.logits + token * args.experts;"),
        ("ptx::float_from_bits(ptx::ld_global_u16(logits + expert) << 16), none)", "none, none)"),
        ("if (place == lane) {", "if (place >= lane) {"),
        ("args.experts + lane - args.top_k;", "args.experts + lane;"),
        ("u64(token) * places + lane;", "u64(token) * args.top_k + lane;"),
        ("ld_global_u16(logits + args.experts)", "ld_global_u16(logits + args.experts - 1)"),
        ("gate * -1.44269504f", "gate * 1.44269504f"),
        ("if (args.gated != 0) {", "if (args.gated == 0) {"),
        ("ptx::mul(weight, args.scale);", "weight;"),
    ];
    check_planted_bugs("route_topk_pdl", &bugs, &routers());
}
