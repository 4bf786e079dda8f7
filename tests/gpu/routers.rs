//! Routers of mixtures on the GPU: which experts they choose, and the weights of these, against double precision.

use unweight_rt::{DeviceBuffer, DeviceMatrix, LaunchError, experts::RouterConfig};

use crate::{
    harness::{Random, bf16, gpu, guard_is_intact, poison, refused, stream, value},
    moe::Case,
};

#[test]
#[ignore = "needs a GPU"]
fn a_router_chooses_the_largest_logits() {
    let kernels = gpu();
    let stream = stream(kernels);
    let mut rng = Random::new(7);
    for (experts, top_k) in [(8_u32, 2_u32), (60, 4), (128, 8), (512, 32), (1, 1)] {
        // Only the number of experts matters.
        let layer = Case::new(experts, 64, 64, 2).load(kernels, &stream);
        for (tokens, normalized, rounded) in [(1_u32, true, true), (9, false, false), (300, true, false)] {
            // Few distinct values, so that many are equal.
            let logits: Vec<u16> = (0..tokens * experts).map(|_| bf16(rng.below(40) as f64 / 4.0 - 3.0)).collect();
            let x = DeviceMatrix::from_host(&stream, tokens, experts, &logits).unwrap();
            let pairs = (tokens * top_k) as usize;
            let (mut ids, mut weights) =
                (DeviceBuffer::zeroed(&stream, pairs).unwrap(), DeviceBuffer::zeroed(&stream, pairs).unwrap());
            poison(&stream, &mut ids);
            poison(&stream, &mut weights);
            let choice = RouterConfig { top_k, normalized, rounded, ..RouterConfig::default() };
            layer.choose(&stream, x.view(), choice, &mut ids, &mut weights).unwrap();
            let (got, shares) = (ids.to_host(&stream).unwrap(), weights.to_host(&stream).unwrap());
            guard_is_intact(&stream, &ids, "topk");
            guard_is_intact(&stream, &weights, "topk");
            for (token, row) in logits.chunks_exact(experts as usize).enumerate() {
                let mut order: Vec<u32> = (0..experts).collect();
                order.sort_by(|a, b| value(row[*b as usize]).total_cmp(&value(row[*a as usize])).then(a.cmp(b)));
                let choices = token * top_k as usize..(token + 1) * top_k as usize;
                order.truncate(if normalized { top_k as usize } else { experts as usize });
                let all: f64 = order.iter().map(|id| value(row[*id as usize]).exp()).sum();
                assert_eq!(got[choices.clone()], order[..top_k as usize], "{experts} experts, token {token}");
                for (share, id) in shares[choices].iter().zip(&order) {
                    let expected = value(row[*id as usize]).exp() / all;
                    let bound = if rounded { expected / 250.0 } else { expected * 1e-5 };
                    assert!(
                        (f64::from(*share) - expected).abs() <= bound,
                        "token {token}: {share} instead of {expected}"
                    );
                }
            }
        }
    }
}

/// Shared experts come after the chosen ones, with the sigmoid of their gate or 1; all weights have a factor.
#[test]
#[ignore = "needs a GPU"]
fn shared_experts_come_last() {
    let kernels = gpu();
    let stream = stream(kernels);
    let mut rng = Random::new(8);
    // The last three of twelve experts are shared.
    let layer = Case::new(12, 64, 64, 2).load(kernels, &stream);
    for gated in [true, false] {
        let (tokens, cols) = (20_u32, 9 + u32::from(gated));
        let logits: Vec<u16> = (0..tokens * cols).map(|_| bf16(rng.normal())).collect();
        let x = DeviceMatrix::from_host(&stream, tokens, cols, &logits).unwrap();
        let (mut ids, mut weights) =
            (DeviceBuffer::zeroed(&stream, 100).unwrap(), DeviceBuffer::zeroed(&stream, 100).unwrap());
        poison(&stream, &mut ids);
        poison(&stream, &mut weights);
        let choice =
            RouterConfig { top_k: 2, normalized: true, shared: 3, gated, scale: 0.25, ..RouterConfig::default() };
        layer.choose(&stream, x.view(), choice, &mut ids, &mut weights).unwrap();
        let (got, shares) = (ids.to_host(&stream).unwrap(), weights.to_host(&stream).unwrap());
        guard_is_intact(&stream, &ids, "topk");
        guard_is_intact(&stream, &weights, "topk");
        let places = got.chunks_exact(5).zip(shares.chunks_exact(5));
        for ((ids, shares), row) in places.zip(logits.chunks_exact(cols as usize)) {
            assert!(ids[0] < 9 && ids[1] < 9 && ids[2..] == [9, 10, 11], "{ids:?}");
            assert!((shares[0] + shares[1] - 0.25).abs() < 1e-5, "{shares:?}");
            let expected = if gated { 0.25 / (1.0 + (-value(row[9])).exp()) } else { 0.25 };
            assert!(shares[2..].iter().all(|share| (f64::from(*share) - expected).abs() < 1e-5), "{shares:?}");
        }
        let wrong =
            refused(layer.choose(&stream, x.view(), RouterConfig { gated: !gated, ..choice }, &mut ids, &mut weights));
        assert!(matches!(wrong, LaunchError::Experts { .. }), "{wrong}");
    }
}

/// With a correction bias, sums of sigmoids and biases decide, and sigmoids times a factor are the weights.
#[test]
#[ignore = "needs a GPU"]
fn sigmoids_with_a_correction_choose_experts() {
    let kernels = gpu();
    let stream = stream(kernels);
    let mut rng = Random::new(9);
    for (experts, top_k, shared) in [(8_u32, 2_u32, 0_u32), (129, 8, 1), (512, 31, 1)] {
        let mut layer = Case::new(experts, 64, 64, 2).load(kernels, &stream);
        let routed = experts - shared;
        let bias: Vec<f32> = (0..routed).map(|expert| (expert * 7 % 13) as f32 / 16.0 - 0.25).collect();
        layer.set_correction(DeviceBuffer::from_host(&stream, &bias).unwrap());
        for (tokens, normalized) in [(1_u32, true), (9, false), (300, true)] {
            // Few distinct values, so that many sums are equal.
            let logits: Vec<u16> = (0..tokens * routed).map(|_| bf16(rng.below(40) as f64 / 4.0 - 3.0)).collect();
            let x = DeviceMatrix::from_host(&stream, tokens, routed, &logits).unwrap();
            let pairs = (tokens * (top_k + shared)) as usize;
            let (mut ids, mut weights) =
                (DeviceBuffer::zeroed(&stream, pairs).unwrap(), DeviceBuffer::zeroed(&stream, pairs).unwrap());
            poison(&stream, &mut ids);
            poison(&stream, &mut weights);
            let choice = RouterConfig { top_k, normalized, shared, routed_scale: 2.5, ..RouterConfig::default() };
            layer.choose(&stream, x.view(), choice, &mut ids, &mut weights).unwrap();
            let (got, shares) = (ids.to_host(&stream).unwrap(), weights.to_host(&stream).unwrap());
            guard_is_intact(&stream, &ids, "topk_sigmoid");
            guard_is_intact(&stream, &weights, "topk_sigmoid");
            for (token, row) in logits.chunks_exact(routed as usize).enumerate() {
                let score = |id: u32| 1.0 / (1.0 + (-value(row[id as usize])).exp());
                let rank = |id: u32| score(id) + f64::from(bias[id as usize]);
                let mut order: Vec<u32> = (0..routed).collect();
                order.sort_by(|a, b| rank(*b).total_cmp(&rank(*a)).then(a.cmp(b)));
                order.truncate(top_k as usize);
                let sum = if normalized { order.iter().map(|id| score(*id)).sum() } else { 1.0 };
                let expected = order.iter().map(|id| (*id, score(*id) / sum * 2.5));
                let expected = expected.chain((routed..experts).map(|id| (id, 1.0)));
                let places = token * (top_k + shared) as usize..;
                for ((id, share), (want, weight)) in got[places.clone()].iter().zip(&shares[places]).zip(expected) {
                    assert_eq!(*id, want, "{experts} experts, token {token}");
                    assert!((f64::from(*share) - weight).abs() <= weight * 1e-5, "{share} instead of {weight}");
                }
            }
            let plain = Case::new(experts, 64, 64, 2).load(kernels, &stream);
            let wrong = refused(plain.choose(&stream, x.view(), choice, &mut ids, &mut weights));
            assert!(matches!(wrong, LaunchError::RoutedScale(_)), "{wrong}");
        }
    }
}

/// Each expert is weighed against itself and the later ones whose logits are near.
#[test]
#[ignore = "needs a GPU"]
fn sparse_mixers_choose_experts_in_turn() {
    let kernels = gpu();
    let stream = stream(kernels);
    let mut rng = Random::new(10);
    for (experts, cutoff, rounded) in [(16_u32, 0.0201_f32, true), (2, 0.3, false), (129, 1.9, false)] {
        let mut layer = Case::new(experts, 64, 64, 2).load(kernels, &stream);
        for tokens in [1_u32, 9, 300] {
            // Many are equal or near.
            let logits: Vec<u16> = (0..tokens * experts).map(|_| bf16(rng.below(40) as f64 / 32.0 + 1.0)).collect();
            let x = DeviceMatrix::from_host(&stream, tokens, experts, &logits).unwrap();
            let pairs = 2 * tokens as usize;
            let (mut ids, mut weights) =
                (DeviceBuffer::zeroed(&stream, pairs).unwrap(), DeviceBuffer::zeroed(&stream, pairs).unwrap());
            poison(&stream, &mut ids);
            poison(&stream, &mut weights);
            let choice = RouterConfig { top_k: 2, rounded, cutoff: Some(cutoff), ..RouterConfig::default() };
            layer.choose(&stream, x.view(), choice, &mut ids, &mut weights).unwrap();
            let (got, shares) = (ids.to_host(&stream).unwrap(), weights.to_host(&stream).unwrap());
            guard_is_intact(&stream, &ids, "topk_sparse_mixer");
            guard_is_intact(&stream, &weights, "topk_sparse_mixer");
            for (token, row) in logits.chunks_exact(experts as usize).enumerate() {
                let logit = |id: u32| value(row[id as usize]);
                let mut order: Vec<u32> = (0..experts).collect();
                order.sort_by(|a, b| logit(*b).total_cmp(&logit(*a)).then(a.cmp(b)));
                for place in 0..2 {
                    let largest = logit(order[place]);
                    let is_near = |x: &f64| (largest - x) / x.abs().max(largest) <= f64::from(cutoff);
                    let near = order[place..].iter().map(|id| logit(*id)).filter(is_near);
                    let expected = 1.0 / near.map(|x| (x - largest).exp()).sum::<f64>();
                    let (id, share) = (got[2 * token + place], f64::from(shares[2 * token + place]));
                    assert_eq!(id, order[place], "{experts} experts, token {token}");
                    let bound = if rounded { expected / 250.0 } else { expected * 1e-5 };
                    assert!((share - expected).abs() <= bound, "token {token}: {share} instead of {expected}");
                }
            }
        }
        layer.set_correction(DeviceBuffer::zeroed(&stream, experts as usize).unwrap());
        let x = DeviceMatrix::zeroed(&stream, 1, experts).unwrap();
        let (mut ids, mut weights) =
            (DeviceBuffer::zeroed(&stream, 2).unwrap(), DeviceBuffer::zeroed(&stream, 2).unwrap());
        let choice = RouterConfig { top_k: 2, cutoff: Some(cutoff), ..RouterConfig::default() };
        let wrong = refused(layer.choose(&stream, x.view(), choice, &mut ids, &mut weights));
        assert!(matches!(wrong, LaunchError::Family { .. }), "{wrong}");
    }
}
