//! Tests of routes and of reachable kernels, which share shapes and cards.

use std::{cell::RefCell, collections::BTreeSet};

use unweight_codegen::{
    VariantSpec,
    plan::{GemmShape, Plan},
    spec::{Arch, DecodeOutput, Epilogue, Op, catalog},
};
use unweight_format::{ENCODINGS, EncodingId, Placement, TileGrid};

use super::{
    candidates::{COMPACT_BATCH, PackedUse, has_compact_gemms},
    cost::gpu_model::GpuModel,
    graph::{Node, Step, packing},
    policy::PackedChooser,
    route::{Expand, KernelSource, Route, RoutePolicy, Routes, SlotPlan, Weight},
};

/// Records what a loader requests.
#[derive(Default)]
struct Recorder(RefCell<BTreeSet<VariantSpec>>);

impl KernelSource for Recorder {
    type Kernel = VariantSpec;
    type Error = std::convert::Infallible;

    fn take(&self, specs: &[VariantSpec]) -> Result<Vec<VariantSpec>, Self::Error> {
        self.0.borrow_mut().extend(specs);
        Ok(specs.to_vec())
    }
}

fn policy(max_batch: u32, pdl: bool, code_limit: u32) -> RoutePolicy {
    let chooser = PackedChooser::h200();
    RoutePolicy { placement: Placement::Packed, chooser, max_batch, pdl, code_limit, expand: Expand::Model }
}

const SHAPES: [(u32, u32); 9] = [
    (64, 64),
    (192, 320),
    (100, 72),
    (1024, 4096),
    (4096, 4096),
    (6144, 4096),
    (28672, 4096),
    (4096, 14336),
    (128256, 4096),
];

fn all_weights() -> Vec<Weight> {
    let stored =
        SHAPES.into_iter().flat_map(|(n, k)| ENCODINGS.iter().map(move |encoding| Weight::stored(n, k, encoding.id())));
    let merged = SHAPES.into_iter().map(|(n, k)| Weight::merged(n, k, false));
    let gated = SHAPES.into_iter().filter(|(n, k)| n % 64 == 0 && k % 64 == 0);
    stored.chain(merged).chain(gated.map(|(n, k)| Weight::merged(n, k, true))).collect()
}

/// Makes a loader's calls for a weight, with a recorder in place of the device.
fn load(policy: &RoutePolicy, weight: &Weight, escapes: bool, recorder: &Recorder) -> Routes<VariantSpec> {
    recorder.take(&packing(policy.chooser.arch())).unwrap();
    if weight.conversion().iter().any(|edge| edge.step == Step::Decode(DecodeOutput::Full)) {
        recorder.take(&[policy.decoder().unwrap()]).unwrap();
    }
    if weight.conversion().iter().any(|edge| edge.step == Step::DecodeCompact) {
        recorder.take(&[policy.decode_compact()]).unwrap();
    }
    RoutePolicy::take_routes(recorder, &policy.packed_routes(weight, escapes)).unwrap()
}

#[test]
fn reachable_kernels_are_exactly_those_a_loader_requests() {
    for (max_batch, pdl, code_limit) in [(1, true, 7), (64, false, 6), (300, true, 15), (4096, true, 7)] {
        let policy = policy(max_batch, pdl, code_limit);
        for weight in all_weights() {
            let recorder = Recorder::default();
            for &escapes in weight.escapes() {
                let choices = load(&policy, &weight, escapes, &recorder);
                // Every batch and epilogue has a route.
                for &epilogue in weight.epilogues() {
                    for m in [1, 8, 9, 63, 64, 65, max_batch].into_iter().filter(|m| *m <= max_batch) {
                        assert!(
                            choices.iter().any(|choice| choice.epilogue == epilogue && m <= choice.last),
                            "{weight:?} m = {m} {epilogue:?}"
                        );
                    }
                }
            }
            let requested: Vec<VariantSpec> = recorder.0.into_inner().into_iter().collect();
            assert_eq!(policy.reachable([weight]), requested, "{weight:?}, batches to {max_batch}");
        }
    }
}

/// Compact layers are multiplied directly at small batches; at others they are expanded for the packed layer's product,
/// which is launched afterwards.
#[test]
fn compact_weights_are_expanded_above_batch_32() {
    let policy = RoutePolicy { placement: Placement::Compact, ..policy(700, true, 7) };
    let fast = RoutePolicy { placement: Placement::Packed, ..policy.clone() };
    for weight in all_weights().into_iter().chain([Weight::merged(6144, 4096, true).all_compact(true)]) {
        let compact = weight.node == Node::Compact && weight.is_tiled();
        assert_eq!((policy.stays_compact(&weight), fast.stays_compact(&weight)), (compact, false), "{weight:?}");
        if !compact {
            assert_eq!(policy.reachable([weight]), fast.reachable([weight]), "{weight:?}");
            continue;
        }
        let recorder = Recorder::default();
        let routes = RoutePolicy::take_routes(&recorder, &policy.compact_routes(&weight)).unwrap();
        assert_eq!(routes, policy.compact_routes(&weight), "the source returns the requested kernels");
        let packed = policy.gemms(&weight, true);
        for &epilogue in weight.epilogues() {
            for m in [1, 8, 9, 16, 17, 31, 32, 33, 64, 65, 300, 700] {
                let first = |last: u32, of: Epilogue| of == epilogue && m <= last;
                let route = routes.iter().find(|choice| first(choice.last, choice.epilogue)).unwrap().kernel;
                let packed = packed.iter().find(|choice| first(choice.last, choice.epilogue)).unwrap().kernel;
                match route {
                    Route::Direct(kernel) => {
                        let Op::GemmCompact(op) = kernel.op else { panic!("{kernel}") };
                        assert!(m <= COMPACT_BATCH && op.pdl && op.epilogue == epilogue, "{kernel} at {m}");
                    }
                    Route::ExpandToPacked { expand, product } => {
                        assert_eq!(expand.to_string(), "uw_sm90a_decode_compact_packed");
                        // It reads the previous kernel's output, so it must not start early.
                        let ordinary = PackedUse { escapes: true, pdl: false, epilogue }.of(packed);
                        assert!(m > COMPACT_BATCH && Some(product) == ordinary, "{product} at {m}, packed {packed}");
                    }
                    Route::ExpandToBf16 { .. } => panic!("cuBLAS on Hopper at {m}"),
                }
            }
        }
        // All routes are compiled ahead, including those for a weight that is packed after all.
        let reachable = policy.reachable([weight]);
        assert!(recorder.0.borrow().iter().all(|spec| reachable.contains(spec)), "{weight:?}");
        assert!(fast.reachable([weight]).iter().all(|spec| reachable.contains(spec)), "{weight:?}");
        assert!(reachable.iter().all(|spec| Plan::new(spec).is_ok()), "{weight:?}");
    }
}

#[test]
fn compact_placement_needs_compact_kernels() {
    let weight = Weight::stored(4096, 4096, EncodingId::COMPACT);
    for arch in Arch::ALL.iter().copied() {
        let chooser = PackedChooser::model(GpuModel::usual(arch));
        let policy = RoutePolicy { placement: Placement::Compact, chooser, ..policy(64, true, 7) };
        let has = matches!(arch, Arch::Sm90a | Arch::Sm100a | Arch::Sm103a);
        assert_eq!((has_compact_gemms(arch), policy.stays_compact(&weight)), (has, has), "{arch:?}");
        assert_eq!(policy.compact_routes(&weight).iter().any(|choice| choice.last <= 32), has, "{arch:?}");
    }
    let bf16 = RoutePolicy { placement: Placement::Bf16, ..policy(64, true, 7) };
    assert!(!bf16.stays_compact(&weight));
}

/// A card by its data sheet: architecture, name, multiprocessors, boost clock in MHz, GB/s, and TFLOPS of dense BF16
/// with fp32 accumulation, by `mma.sync` and by cuBLAS.
type Card = (Arch, &'static str, u32, f64, f64, [f64; 2]);

const CARDS: [Card; 13] = [
    (Arch::Sm80, "NVIDIA A100-SXM4-80GB", 108, 1410.0, 2039.0, [312.0; 2]),
    (Arch::Sm80, "NVIDIA A30", 56, 1440.0, 933.0, [165.0; 2]),
    (Arch::Sm86, "NVIDIA GeForce RTX 3090", 82, 1695.0, 936.0, [71.0; 2]),
    (Arch::Sm86, "NVIDIA A40", 84, 1740.0, 696.0, [149.7; 2]),
    (Arch::Sm86, "NVIDIA A10", 72, 1695.0, 600.0, [125.0; 2]),
    (Arch::Sm89, "NVIDIA GeForce RTX 4090", 128, 2520.0, 1008.0, [165.2; 2]),
    (Arch::Sm89, "NVIDIA GeForce RTX 4080", 76, 2505.0, 717.0, [97.5; 2]),
    (Arch::Sm89, "NVIDIA L4", 58, 2040.0, 300.0, [121.0; 2]),
    (Arch::Sm89, "NVIDIA L40", 142, 2490.0, 864.0, [181.05; 2]),
    (Arch::Sm89, "NVIDIA L40S", 142, 2520.0, 864.0, [362.05; 2]),
    (Arch::Sm120a, "NVIDIA GeForce RTX 5090", 170, 2407.0, 1792.0, [209.5; 2]),
    (Arch::Sm120a, "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 188, 2617.0, 1792.0, [503.8; 2]),
    // Its data sheet states only `tcgen05`; `mma.sync` is assumed to reach a quarter of it.
    (Arch::Sm100a, "NVIDIA B200", 148, 1850.0, 8000.0, [562.0, 2250.0]),
];

/// Returns the time of the product by `gemm_mma` over that of expansion and cuBLAS, by data sheets alone: an H200
/// reached 94 % of its bus and 65 % of its tensor cores.
fn gain_by_data_sheet(card: &Card, (n, k): (u32, u32), m: u32) -> f64 {
    let &(_, _, _, _, gb_per_s, [mma, cublas]) = card;
    let (weights, read) = (f64::from(n) * f64::from(k), 0.936 * gb_per_s * 1e3);
    let multiplied = |tflops: f64| 2.0 * weights * f64::from(m) / (0.654 * tflops * 1e6);
    let gemm_us = (f64::from(m.div_ceil(64)) * 1.5 * weights / read).max(multiplied(mma));
    gemm_us / (3.5 * weights / read + (2.0 * weights / read).max(multiplied(cublas)))
}

/// If one route is clearly faster by a card's data sheet, the layer uses it; if they are close, either is fine.
#[test]
fn large_batches_on_mma_gpus_expand_for_cublas() {
    let mut clear = 0;
    for card @ (arch, name, sms, boost_mhz, gb_per_s, _) in CARDS {
        let (memory, tensor) = (gb_per_s * 1e3, GpuModel::tensor_rate(arch, name));
        let chooser = PackedChooser::model(GpuModel { arch, sms, memory, clock_mhz: boost_mhz, tensor });
        let policy = RoutePolicy { chooser, ..policy(4096, true, 7) };
        for weight in [
            Weight::stored(14336, 4096, EncodingId::PACKED),
            Weight::stored(4096, 14336, EncodingId::PACKED),
            Weight::merged(28672, 4096, true),
        ] {
            let routes = policy.packed_routes(&weight, true);
            for &epilogue in weight.epilogues() {
                let routes: Vec<_> = routes.iter().filter(|choice| choice.epilogue == epilogue).collect();
                assert!(routes.windows(2).all(|pair| pair[0].last < pair[1].last), "{name}: routes must be ascending");
                assert_eq!(routes.last().unwrap().last, 4096);
                let at = |m: u32| routes.iter().find(|choice| m <= choice.last).unwrap().kernel;
                for m in [1, 16, 32, 64] {
                    assert!(!matches!(at(m), Route::ExpandToBf16 { .. }), "{name} {weight:?} at {m}");
                }
                for m in [128, 192, 256, 384, 512, 768, 1024, 2048, 4096] {
                    let gain = gain_by_data_sheet(&card, (weight.n, weight.k), m);
                    let route = at(m);
                    if let Route::ExpandToBf16 { expand, activate } = route {
                        assert!(expand.to_string().ends_with("_unpack") && expand.arch == arch, "{expand}");
                        assert_eq!(activate.is_some(), epilogue == Epilogue::SiluMul);
                    }
                    if !(0.8..1.25).contains(&gain) {
                        let expanded = matches!(route, Route::ExpandToBf16 { .. });
                        assert_eq!(expanded, gain > 1.0, "{name} {weight:?} at {m}: {gain:.2} by its data sheet");
                        clear += 1;
                    }
                }
            }
            let reachable = policy.reachable([weight]);
            let requested = routes.iter().flat_map(|choice| choice.kernel.kernels());
            assert!(requested.into_iter().all(|spec| reachable.contains(spec)), "{name} {weight:?}");
        }
    }
    assert!(clear > 300, "{clear} problems have a clearly faster route");
}

/// The smallest batch at which a product of 14336x4096 is expanded (docs/adr/0014-gpu-model.md has the table).
#[test]
fn batches_from_which_weights_are_expanded() {
    let weight = Weight::stored(14336, 4096, EncodingId::PACKED);
    let from = |(arch, name, sms, clock_mhz, gb_per_s, _): Card| {
        let (memory, tensor) = (gb_per_s * 1e3, GpuModel::tensor_rate(arch, name));
        let chooser = PackedChooser::model(GpuModel { arch, sms, memory, clock_mhz, tensor });
        let routes = RoutePolicy { chooser, ..policy(4096, true, 7) }.packed_routes(&weight, true);
        let plain: Vec<_> = routes.iter().filter(|choice| choice.epilogue == Epilogue::Store).collect();
        let first = plain.iter().position(|choice| matches!(choice.kernel, Route::ExpandToBf16 { .. }))?;
        Some(plain[first - 1].last + 1)
    };
    // 0: never expanded.
    let expected = [193, 193, 0, 193, 193, 257, 449, 193, 193, 193, 1217, 193, 97];
    assert_eq!(CARDS.map(|card| from(card).unwrap_or(0)), expected);
}

/// Compact layers are expanded from the same batch on, and none of those batches is multiplied directly.
#[test]
fn compact_weights_are_expanded_for_cublas_without_wgmma() {
    let weight = Weight::stored(14336, 4096, EncodingId::COMPACT);
    let chooser = PackedChooser::model(GpuModel::usual(Arch::Sm100a));
    let policy = RoutePolicy { placement: Placement::Compact, chooser, ..policy(4096, true, 7) };
    assert!(policy.stays_compact(&weight));
    let routes = policy.compact_routes(&weight);
    for &epilogue in weight.epilogues() {
        let routes: Vec<_> = routes.iter().filter(|choice| choice.epilogue == epilogue).collect();
        let at = |m: u32| routes.iter().find(|choice| m <= choice.last).unwrap().kernel;
        assert!([1, 16, 32].iter().all(|m| matches!(at(*m), Route::Direct(_))), "{routes:?}");
        assert!(!matches!(at(64), Route::ExpandToBf16 { .. }), "{routes:?}");
        let Route::ExpandToBf16 { expand, activate: None } = at(2048) else { panic!("{routes:?}") };
        assert!(expand.to_string().ends_with("decode_compact_full"), "{expand}");
    }
    let reachable = policy.reachable([weight]);
    assert!(routes.iter().flat_map(|choice| choice.kernel.kernels()).all(|spec| reachable.contains(spec)));
}

/// The kernels compiled for all cards of an architecture cover what dispatch requests on each card, for common models;
/// the kernels of one card do not.
#[test]
fn kernels_for_any_gpu_cover_every_gpu() {
    type CardSpec = (u32, f64, f64);
    // Multiprocessors, GB/s and MHz, as vendors describe them: GeForce RTX 3060, 3070, 3080, 3090, A2, A10, A40;
    // RTX 4060 Ti, 4070, 4090, L4, L40S; A30, A100 of 40 and of 80 GB; B200; RTX 5070, 5090, RTX PRO 6000; H100
    // (PCIe), H20, H200.
    let cards: [(Arch, &[CardSpec]); 6] = [
        (
            Arch::Sm86,
            &[
                (28, 360.0, 1777.0),
                (46, 448.0, 1725.0),
                (68, 760.0, 1710.0),
                (82, 936.0, 1695.0),
                (10, 200.0, 1770.0),
                (72, 600.0, 1695.0),
                (84, 696.0, 1740.0),
            ],
        ),
        (
            Arch::Sm89,
            &[
                (34, 288.0, 2535.0),
                (46, 504.0, 2475.0),
                (128, 1008.0, 2520.0),
                (58, 300.0, 2040.0),
                (142, 864.0, 2520.0),
            ],
        ),
        (Arch::Sm80, &[(56, 933.0, 1440.0), (108, 1555.0, 1410.0), (108, 2039.0, 1410.0)]),
        (Arch::Sm100a, &[(148, 8000.0, 1965.0)]),
        (Arch::Sm120a, &[(48, 672.0, 2512.0), (170, 1792.0, 2407.0), (188, 1792.0, 2617.0)]),
        (Arch::Sm90a, &[(114, 2039.0, 1755.0), (78, 4000.0, 1980.0), (132, 4814.0, 1980.0)]),
    ];
    // Hidden and intermediate size, key/value columns, vocabulary: Llama-3.2-1B and 3B, Qwen2.5-7B.
    let models = [(2048, 8192, 512, 128_256), (3072, 8192, 1024, 128_256), (3584, 18944, 512, 152_064)];
    let weights = |(hidden, intermediate, kv, vocab): (u32, u32, u32, u32), encoding: EncodingId| {
        let compact = encoding == EncodingId::COMPACT;
        let stored = [(hidden, hidden), (kv, hidden), (intermediate, hidden), (hidden, intermediate), (vocab, hidden)];
        let merged = [(hidden + 2 * kv, false), (2 * intermediate, true)];
        let merged = merged.map(|(n, gated)| Weight::merged(n, hidden, gated).all_compact(compact));
        stored.map(|(n, k)| Weight::stored(n, k, encoding)).into_iter().chain(merged).collect::<Vec<_>>()
    };
    let mut beyond_typical = 0;
    for (arch, specs) in cards {
        for (max_batch, pdl, encoding) in
            [(8, false, EncodingId::PACKED), (256, true, EncodingId::PACKED), (256, true, EncodingId::COMPACT)]
        {
            let on = |gpu| RoutePolicy {
                placement: Placement::Compact,
                chooser: PackedChooser::model(gpu),
                ..policy(max_batch, pdl, 7)
            };
            let typical = on(GpuModel::usual(arch));
            for model in models {
                let any = typical.reachable_on_any_card(weights(model, encoding));
                assert!(any.iter().all(|spec| spec.arch == arch && Plan::new(spec).is_ok()), "{arch:?}");
                let typical = typical.reachable(weights(model, encoding));
                for (&(sms, gb, clock_mhz), name) in
                    specs.iter().flat_map(|card| ["GeForce", ""].map(|name| (card, name)))
                {
                    let tensor = GpuModel::tensor_rate(arch, name);
                    let card = on(GpuModel { arch, sms, memory: gb * 1e3, clock_mhz, tensor });
                    let requested = card.reachable(weights(model, encoding));
                    let missing: Vec<_> = requested.iter().filter(|spec| !any.contains(spec)).collect();
                    assert!(missing.is_empty(), "{arch:?}, {sms} multiprocessors, {gb} GB/s: {missing:?}");
                    beyond_typical += requested.iter().filter(|spec| !typical.contains(spec)).count();
                }
            }
        }
    }
    assert!(beyond_typical > 100, "{beyond_typical}: cards of one architecture must request different kernels");
}

/// On Hopper, only tests request expansion; without cuBLAS, nothing is expanded on any GPU.
#[test]
fn expansion_of_packed_weights_by_gpu() {
    let weight = Weight::merged(4096, 4096, true);
    let cublas = |policy: &RoutePolicy| {
        let routes = policy.packed_routes(&weight, true).into_iter();
        let first = routes.scan(1, |first, choice| Some((std::mem::replace(first, choice.last + 1), choice.kernel)));
        first.filter(|(_, route)| matches!(route, Route::ExpandToBf16 { .. })).map(|(m, _)| m).collect::<Vec<u32>>()
    };
    let hopper = policy(4096, true, 7);
    assert_eq!(cublas(&hopper), [] as [u32; 0]);
    assert_eq!(cublas(&RoutePolicy { expand: Expand::Above(64), ..hopper.clone() }), [65]);
    assert_eq!(cublas(&RoutePolicy { expand: Expand::Above(0), max_batch: 8, ..hopper }), [1]);
    let ada = RoutePolicy { chooser: PackedChooser::model(GpuModel::usual(Arch::Sm89)), ..policy(4096, true, 7) };
    assert!(cublas(&ada)[0] > 64, "{:?}", cublas(&ada));
    assert_eq!(cublas(&RoutePolicy { expand: Expand::Never, ..ada }), [] as [u32; 0]);
}

#[test]
fn slot_holds_everything_the_kernel_writes() {
    for (n, k, tiles) in [(64, 64, 1), (64, 64 * 16, 16), (64, 64 * 17, 17), (14336, 4096, 14336)] {
        let plan = SlotPlan::of(TileGrid::new(n, k).unwrap());
        assert_eq!((plan.heads, plan.inexact), (tiles * 6144, tiles * (6144 + 16)));
        assert!(plan.heads.is_multiple_of(16) && plan.inexact.is_multiple_of(8), "heads and counter must be aligned");
        assert_eq!(plan.bytes - plan.group_words, tiles.div_ceil(16) * 4);
        assert!(plan.group_words >= plan.inexact + 8);
    }
}

/// Layers for cuBLAS need decoders and the packing kernels, but no matmul.
#[test]
fn layers_for_cublas_request_no_matmul() {
    let policy = RoutePolicy { placement: Placement::Bf16, ..policy(4096, true, 7) };
    let mut expected = packing(Arch::Sm90a);
    expected.extend(policy.decoder());
    expected.push(policy.decode_compact());
    expected.sort_unstable();
    assert_eq!(policy.reachable(all_weights()), expected);
}

#[test]
fn weights_are_decoded_through_packed() {
    let steps = |weight: Weight| weight.conversion().iter().map(|edge| edge.step).collect::<Vec<_>>();
    let full = Step::Decode(DecodeOutput::Full);
    assert_eq!(steps(Weight::stored(64, 64, EncodingId::PACKED)), [Step::GemmPacked]);
    assert_eq!(steps(Weight::stored(64, 64, EncodingId::HUFFMAN)), [full, Step::Pack, Step::GemmPacked]);
    assert_eq!(steps(Weight::stored(65, 64, EncodingId::HUFFMAN)), [Step::Host, Step::Pack, Step::GemmPacked]);
    assert_eq!(steps(Weight::stored(64, 64, EncodingId::COMPACT)), [Step::DecodeCompact, Step::Pack, Step::GemmPacked]);
    assert_eq!(steps(Weight::stored(64, 64, EncodingId::PALETTE)), [Step::Host, Step::Pack, Step::GemmPacked]);
    assert_eq!(steps(Weight::stored(64, 64, EncodingId::RAW)), [Step::Pack, Step::GemmPacked]);
    assert_eq!(Weight::stored(u32::MAX, 64, EncodingId::RAW).padded(), None);
}

/// An execution context sized for the largest batch of each range is large enough for every batch.
#[test]
fn largest_batch_of_a_range_needs_the_most_workspace() {
    let policy = policy(700, true, 7);
    for (n, k) in SHAPES {
        let weight = Weight::merged(n, k, false);
        let (n, k) = weight.padded().unwrap();
        let mut first = 1;
        for choice in policy.gemms(&weight, true) {
            let plan = Plan::new(&choice.kernel).unwrap();
            let need = |m| plan.workspace(GemmShape { m, n, k }, 132);
            let max_need = need(choice.last);
            for m in first..=choice.last {
                let smaller_need = need(m);
                assert!(
                    smaller_need.bytes <= max_need.bytes && smaller_need.counters <= max_need.counters,
                    "{} m = {m}",
                    choice.kernel
                );
            }
            first = if choice.last == 700 { 1 } else { choice.last + 1 };
        }
    }
}

#[test]
fn every_shipped_kernel_is_reachable() {
    let shipped = catalog::all(Arch::Sm90a);
    for spec in policy(4096, true, 7).reachable(all_weights()) {
        let has_use = matches!(spec.op, Op::GemmMma(_) | Op::GemmWgmma(_));
        assert!(has_use || shipped.contains(&spec), "{spec}");
        assert!(Plan::new(&spec).is_ok() && spec.arch == Arch::Sm90a, "{spec}");
    }
}

/// A layer uses a registered variant, which is compiled ahead with the others, for this card and for any card.
#[test]
fn registered_variants_are_reachable_from_layers_that_choose_them() {
    let declared: VariantSpec = "uw_sm90a_gemm_mma_b16_r1w16p4c1_esc_store".parse().unwrap();
    let used: VariantSpec = "uw_sm90a_gemm_mma_b16_r1w16p4c1_esc_pdl_store_add".parse().unwrap();
    let mut policy = policy(64, true, 7);
    let weight = Weight::merged(2048, 2048, false);
    let kernels = |policy: &RoutePolicy| {
        let routes = policy.packed_routes(&weight, true).into_iter();
        routes.flat_map(|choice| choice.kernel.kernels().copied().collect::<Vec<_>>()).collect::<Vec<_>>()
    };
    for found in [kernels(&policy), policy.reachable([weight]), policy.reachable_on_any_card([weight])] {
        assert!(!found.contains(&used));
    }
    policy.chooser.register(declared).unwrap();
    for found in [kernels(&policy), policy.reachable([weight]), policy.reachable_on_any_card([weight])] {
        assert!(found.contains(&used));
    }
}

/// A record of measured products: per problem, the time of each variant that was measured.
fn measured_products() -> Vec<(GemmShape, Vec<(VariantSpec, f64)>)> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/records/2026-11-27/matmul-wgmma.csv");
    let text = std::fs::read_to_string(path).unwrap();
    let mut lines = text.lines().filter(|line| !line.starts_with('#')).map(|line| line.split(',').collect::<Vec<_>>());
    let header = lines.next().unwrap();
    let of_line = |line: Vec<&str>| {
        let [n, k, m] = [0, 1, 2].map(|i| line[i].parse().unwrap());
        let times = header.iter().zip(&line).skip(4).filter(|(_, us)| !us.is_empty());
        let spec = |name: &str| format!("uw_sm90a_{name}_esc_pdl_store").parse().unwrap();
        (GemmShape { m, n, k }, times.map(|(name, us)| (spec(name), us.parse().unwrap())).collect())
    };
    lines.map(of_line).collect()
}

/// Over all batches of 64 and more rows that were measured, dispatch is as close to the fastest measured variant as
/// docs/benchmarks.md states.
#[test]
fn wide_choices_are_near_the_fastest() {
    let packed_use = PackedUse { escapes: true, pdl: true, epilogue: Epilogue::Store };
    let chooser = PackedChooser::h200();
    let (mut losses, mut problems) = (Vec::new(), 0);
    for (problem, times) in measured_products() {
        problems += 1;
        let fastest = times.iter().map(|(_, us)| *us).fold(f64::INFINITY, f64::min);
        // Three choices were not measured at their problem.
        let candidates = chooser.candidates(problem, packed_use).into_iter().map(|(spec, _)| spec);
        let ranked = chooser.choose(problem, packed_use).into_iter().chain(candidates);
        let us_of = |spec| times.iter().find(|(measured, _)| *measured == spec).map(|(_, us)| *us);
        let us = ranked.into_iter().find_map(us_of).unwrap();
        losses.push((us / fastest - 1.0, problem));
    }
    losses.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mean = losses.iter().map(|(loss, _)| loss).sum::<f64>() / f64::from(problems);
    let worst = &losses[..12];
    assert!(mean < 0.006 && worst[0].0 < 0.18, "{mean:.4} of {problems}: {worst:?}");
}
