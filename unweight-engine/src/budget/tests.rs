//! Plans of a real geometry, and plans of small models compared with all possible plans.

use unweight_format::{bundle::PlanFile, raw::layout};
use unweight_model::Geometry;

use super::*;

const GB: u64 = 1_000_000_000;

fn request(memory: impl Into<Option<u64>>) -> BudgetRequest {
    BudgetRequest {
        memory: memory.into(),
        max_slowdown: None,
        batch: 1,
        context: 1024,
        arch: Arch::Sm90a,
        kv_cache: Some(KvCache::Bf16),
    }
}

/// The tensors of a configuration: packed at 12.03 bits, Huffman-coded at 10.9, norms raw.
fn tensors(config: &ModelConfig) -> Vec<Tensor> {
    let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
    let d = config.hidden;
    let matrix = |role: Role, layer: Option<u32>, rows: u32, cols: u32| {
        let elements = u64::from(rows) * u64::from(cols);
        let tiles = elements / 4096;
        let packed = tiles * (layout::PACKED_TILE_BYTES + 16) as u64;
        let encodings = vec![
            (EncodingId::RAW, 2 * elements),
            (EncodingId::PACKED, packed),
            // Layers differ slightly.
            (EncodingId::HUFFMAN, elements * 109 / 80 + u64::from(layer.unwrap_or(0)) * 64),
        ];
        let name = format!("{}.{role}", layer.map_or(String::new(), |layer| layer.to_string()));
        Tensor { name, role, layer, rows: rows.into(), cols: cols.into(), encodings }
    };
    let mut all = vec![matrix(Role::Embedding, None, config.vocab, d)];
    if !config.tied {
        all.push(matrix(Role::LmHead, None, config.vocab, d));
    }
    for layer in 0..config.layers {
        let of = [(Role::Q, q, d), (Role::K, kv, d), (Role::V, kv, d), (Role::O, d, q)];
        all.extend(of.map(|(role, rows, cols)| matrix(role, Some(layer), rows, cols)));
        let experts = config.mixture.filter(|mixture| mixture.has_experts(layer));
        let ff = if experts.is_some() { config.intermediate } else { config.dense_intermediate() };
        for _ in 0..experts.map_or(1, |mixture| mixture.all_experts()) {
            let of = [(Role::Gate, ff, d), (Role::Up, ff, d), (Role::Down, d, ff)];
            all.extend(of.map(|(role, rows, cols)| matrix(role, Some(layer), rows, cols)));
        }
        let encodings = vec![(EncodingId::RAW, 2 * u64::from(d))];
        all.push(Tensor {
            name: format!("{layer}.norm"),
            role: Role::Norm,
            layer: Some(layer),
            rows: d.into(),
            cols: 1,
            encodings,
        });
    }
    all
}

fn llama() -> (ModelConfig, Vec<Tensor>) {
    let config = Geometry::named("llama-3.1-8b").unwrap().config();
    let tensors = tensors(&config);
    (config, tensors)
}

/// The same model with twice the layers: slots have the size of a layer, so the same slots save twice as much.
fn deep() -> (ModelConfig, Vec<Tensor>) {
    let (mut config, _) = llama();
    config.layers *= 2;
    let tensors = tensors(&config);
    (config, tensors)
}

fn encoding_of(plan: &PlanFile, name: &str) -> EncodingId {
    plan.rules.iter().rfind(|rule| rule.pattern == name || rule.pattern == "*").map(|rule| rule.encoding).unwrap()
}

/// Bytes of a plan's weights, counted from its rules.
fn weights(plan: &PlanFile, tensors: &[Tensor]) -> u64 {
    tensors.iter().map(|tensor| tensor.bytes(encoding_of(plan, &tensor.name)).unwrap()).sum()
}

#[test]
fn ample_memory_gives_the_fastest_plan() {
    let (config, tensors) = llama();
    let fit = fit(&config, &tensors, &request(80 * GB)).unwrap();
    assert_eq!((fit.slots, fit.slowdown()), (0, 1.0));
    assert!(fit.groups.iter().all(|group| group.encoding == EncodingId::PACKED), "{:?}", fit.groups);
    assert_eq!(weights(&fit.plan, &tensors), fit.weights);
    // The plan reserves as much as the engine.
    let memory = reserved(&config, &fit, Placement::Packed);
    assert_eq!((fit.total(), fit.cache, fit.working), (memory.total(), memory.cache, memory.working));
    // cuBLAS is faster on some shapes at large batches, but an engine packs raw tensors all the same. Only tensors that
    // cannot be packed are raw.
    let large = BudgetRequest { batch: 256, ..request(80 * GB) };
    let packed = super::fit(&config, &tensors, &large).unwrap();
    assert!(packed.groups.iter().all(|group| group.encoding == EncodingId::PACKED), "{:?}", packed.groups);
    let mut tensors = tensors;
    tensors.iter_mut().filter(|tensor| tensor.role == Role::O).for_each(|o| o.encodings.truncate(1));
    let fit = super::fit(&config, &tensors, &large).unwrap();
    assert!(
        fit.groups.iter().all(|group| (group.encoding == EncodingId::RAW) == (group.name == "o")),
        "{:?}",
        fit.groups
    );
    assert_eq!(fit.working, packed.working + (32 << 20), "the workspace of cuBLAS is included");
}

/// The memory that an engine reserves for a plan, at batch 1 and 1024 tokens.
fn reserved(config: &ModelConfig, fit: &BudgetPlan, placement: Placement) -> Memory {
    let options = EngineOptions::default().max_batch(1).context(1024).placement(placement);
    let chooser = PackedChooser::usual(Arch::Sm90a);
    let compact = |role: Role| {
        let compact_groups = fit.groups.iter().filter(|group| group.encoding == EncodingId::COMPACT);
        compact_groups
            .into_iter()
            .any(|group| KINDS.iter().any(|(name, roles)| *name == group.name && roles.contains(&role)))
    };
    // Some units of a compact kind may be packed.
    let [packed, compact] = [false, true]
        .map(|is_compact| memory::context_size(config, &options, &chooser, |role| is_compact && compact(role)));
    let mut shared = Shared::planned(config, &options, packed.max(compact));
    if placement == Placement::Stored {
        // Step graphs decode to these slots.
        shared.bytes += fit.slots;
    }
    memory::plan(config, &options, (fit.weights, shared), u64::MAX).unwrap()
}

/// For every kind of plan, all memory that an engine reserves is counted, including what its kernels share.
#[test]
fn shared_kernel_memory_is_counted_like_the_engine() {
    let (config, weights) = llama();
    let ample = fit(&config, &weights, &request(80 * GB)).unwrap();
    let none = EngineOptions::default().max_batch(1).context(1024);
    let bare = memory::plan(&config, &none, (ample.weights, Shared::default()), u64::MAX).unwrap();
    assert!(ample.working > bare.working, "{} {}", ample.working, bare.working);
    let (many, layers) = deep();
    let all = fit(&many, &layers, &request(80 * GB)).unwrap();
    let coded = fit(&many, &layers, &request(all.total() - 100_000_000)).unwrap();
    assert!(coded.groups.iter().any(|group| group.encoding == EncodingId::HUFFMAN), "{:?}", coded.groups);
    assert_eq!(coded.total(), reserved(&many, &coded, Placement::Stored).total());
    // cuBLAS has a workspace on each of two streams.
    assert!(coded.working > ample.working + (64 << 20));
    let compact = with_compact(&weights);
    let small = fit(&config, &compact, &BudgetRequest { max_slowdown: Some(9.0), ..request(None) }).unwrap();
    let memory = reserved(&config, &small, Placement::Compact);
    assert_eq!(
        (small.total(), small.working + small.slots, small.slots),
        (memory.total(), memory.working, memory.slot)
    );
    // Experts exchange the activations that a whole prompt chunk chooses.
    let config = Geometry::named("qwen3-30b-a3b").unwrap().config();
    let experts = fit(&config, &tensors(&config), &request(80 * GB)).unwrap();
    let memory = reserved(&config, &experts, Placement::Packed);
    assert_eq!((experts.total(), experts.working), (memory.total(), memory.working));
    let chosen = 2048 * 8 * 2 * u64::from(config.intermediate + config.hidden);
    assert!(experts.working > chosen, "{} {chosen}", experts.working);
}

#[test]
fn short_memory_keeps_layers_coded_evenly() {
    let (config, tensors) = deep();
    let ample = fit(&config, &tensors, &request(80 * GB)).unwrap();
    let short = ample.total() - 50_000_000;
    let fit = fit(&config, &tensors, &request(short)).unwrap();
    assert!(fit.total() <= short && fit.slots > 0 && fit.slowdown() > 1.0);
    assert_eq!(weights(&fit.plan, &tensors), fit.weights);
    let coded: Vec<_> = fit.groups.iter().filter(|group| group.encoding == EncodingId::HUFFMAN).collect();
    assert!(!coded.is_empty());
    // Two slots for gate and up, for down, or for both, as an engine reserves them (docs/engine.md).
    let slot = 2 * 2 * 4096 * 14336;
    assert!([slot, 2 * slot, 3 * slot].contains(&fit.slots), "{}", fit.slots);
    for group in coded {
        let gaps: Vec<u32> = group.layers.windows(2).map(|pair| pair[1] - pair[0]).collect();
        if let (Some(min), Some(max)) = (gaps.iter().min(), gaps.iter().max()) {
            assert!(max - min <= 1, "{} {:?}", group.name, group.layers);
        }
    }
}

/// The same tensors; matrices of layers and the head can also be compact, at 10.9 bits.
fn with_compact(tensors: &[Tensor]) -> Vec<Tensor> {
    let mut tensors = tensors.to_vec();
    for tensor in tensors.iter_mut().filter(|tensor| tensor.cols > 1) {
        tensor.encodings.push((EncodingId::COMPACT, tensor.rows * tensor.cols * 109 / 80));
    }
    tensors
}

#[test]
fn short_memory_keeps_weights_compact_with_a_slot() {
    let (config, tensors) = llama();
    let tensors = with_compact(&tensors);
    // At batch 1 the largest products are as fast compact as packed.
    let request = |memory: u64| BudgetRequest { batch: 16, ..request(memory) };
    let ample = fit(&config, &tensors, &request(80 * GB)).unwrap();
    assert!(
        ample.groups.iter().all(|group| group.encoding == EncodingId::PACKED) && ample.slots == 0,
        "{:?}",
        ample.groups
    );
    let has = |fit: &BudgetPlan, encoding: EncodingId| fit.groups.iter().any(|group| group.encoding == encoding);
    let short = ample.total() - 500_000_000;
    let constrained = fit(&config, &tensors, &request(short)).unwrap();
    // Compact weights are a little slower than packed ones, Huffman codes several times as slow.
    assert!(
        has(&constrained, EncodingId::COMPACT) && !has(&constrained, EncodingId::HUFFMAN),
        "{:?}",
        constrained.groups
    );
    assert!(constrained.total() <= short && constrained.slowdown() < 1.3, "{}", constrained.slowdown());
    let gate_up = SlotPlan::of(TileGrid::new(28_672, 4096).unwrap()).bytes;
    let head = SlotPlan::of(TileGrid::new(128_256, 4096).unwrap()).bytes;
    let with_head =
        constrained.groups.iter().any(|group| (group.name, group.encoding) == ("lm_head", EncodingId::COMPACT));
    assert!(
        constrained.slots > 0 && constrained.slots <= if with_head { head } else { gate_up },
        "{}",
        constrained.slots
    );
    let bytes = |encoding| {
        constrained.groups.iter().filter(|group| group.encoding == encoding).map(|group| group.bytes).sum::<u64>()
    };
    assert_eq!(
        bytes(EncodingId::COMPACT) + bytes(EncodingId::PACKED) + bytes(EncodingId::RAW) + norms(&tensors),
        constrained.weights
    );
    // Compact weights are never looked up in, and no plan has both compact and Huffman-coded weights.
    assert!(!constrained.groups.iter().any(|group| (group.name, group.encoding) == ("embed", EncodingId::COMPACT)));
    for have in (short - 1_000_000_000..short).step_by(250_000_000) {
        if let Ok(fit) = fit(&config, &tensors, &request(have)) {
            assert!(fit.total() <= have && !(has(&fit, EncodingId::COMPACT) && has(&fit, EncodingId::HUFFMAN)));
        }
    }
}

/// The first layer has an MLP, which is never Huffman-coded next to experts, and tensors after the last layer are not
/// counted.
#[test]
fn dense_layers_of_a_mixture_and_layers_that_are_not_run() {
    let json = r#"{"model_type": "glm4_moe", "vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1536,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 256,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 1024}"#;
    let config = ModelConfig::parse(json, None).unwrap();
    let all = with_compact(&tensors(&config));
    let plain = fit(&config, &all, &request(GB)).unwrap();
    let mlp = |plan: &BudgetPlan| -> u32 {
        plan.groups.iter().filter(|group| group.name == "gate_up").map(|group| group.units).sum()
    };
    assert_eq!(mlp(&plain), 3);
    let (units, _) = units(&config, &all, 1).unwrap();
    for unit in units.iter().filter(|unit| is_mlp(unit.kind)) {
        let has = |encoding| unit.encodings.contains(&encoding);
        let encodings = [EncodingId::PACKED, EncodingId::COMPACT, EncodingId::HUFFMAN].map(has);
        assert_eq!(encodings, [true, unit.layer == Some(0), false], "{:?}", unit.layer);
    }
    let mut with_prediction = all.clone();
    with_prediction.extend(all.iter().filter(|tensor| tensor.layer == Some(2)).cloned().map(|tensor| Tensor {
        name: format!("3{}", &tensor.name[1..]),
        layer: Some(3),
        ..tensor
    }));
    let same = fit(&config, &with_prediction, &request(GB)).unwrap();
    assert_eq!((same.weights, same.total()), (plain.weights, plain.total()));
}

/// What no kernel runs has no plan.
#[test]
fn sizes_without_kernels_are_refused() {
    let mut narrow = Geometry::named("qwen3-30b-a3b").unwrap().config();
    narrow.intermediate = 120;
    let error = fit(&narrow, &tensors(&narrow), &request(80 * GB)).unwrap_err();
    assert_eq!(error.code(), "unsupported-geometry");
    assert!(error.to_string().starts_with("the width of an expert = 120 in config.json"), "{error}");
}

/// Experts are packed, or BF16 if one of the product's tensors cannot be packed. Other linear layers may have any
/// encoding.
#[test]
fn experts_of_a_mixture_are_packed_or_bf16() {
    let config = Geometry::named("qwen3-30b-a3b").unwrap().config();
    let all = with_compact(&tensors(&config));
    let ample = fit(&config, &all, &request(80 * GB)).unwrap();
    // The engine loaded 45.9 GB for this geometry, its router and norms in BF16 included.
    assert!((45 * GB..46 * GB).contains(&ample.weights), "{}", ample.weights);
    assert_eq!(ample.weights, weights(&ample.plan, &all));
    let short = fit(&config, &all, &request(ample.total() - 100_000_000)).unwrap();
    assert!(short.groups.iter().any(|group| group.encoding == EncodingId::COMPACT), "{:?}", short.groups);
    for fit in [&ample, &short] {
        let mlp = fit.groups.iter().filter(|group| ["gate_up", "down"].contains(&group.name)).collect::<Vec<_>>();
        assert_eq!(
            mlp.iter().map(|group| (group.encoding, group.units)).collect::<Vec<_>>(),
            [(EncodingId::PACKED, 48); 2]
        );
    }
    // One token reads 8 of 128 experts, many tokens read all of them.
    let many = fit(&config, &all, &BudgetRequest { batch: 64, ..request(80 * GB) }).unwrap();
    let us = |fit: &BudgetPlan| fit.groups.iter().find(|group| group.name == "down").unwrap().us;
    assert!((7.0..16.0).contains(&(us(&many) / us(&ample))), "{} {}", us(&many), us(&ample));

    // Stacked experts: one tensor for gates and ups, one for downs.
    let stack = |tensors: &[Tensor], role: Role| {
        let encodings = |encoding| (encoding, tensors.iter().map(|tensor| tensor.bytes(encoding).unwrap()).sum());
        let rows = tensors.iter().map(|tensor| tensor.rows).sum();
        let name = format!("{}.{role}.stack", tensors[0].layer.unwrap());
        Tensor {
            name,
            role,
            rows,
            encodings: [EncodingId::RAW, EncodingId::PACKED].map(encodings).into(),
            ..tensors[0].clone()
        }
    };
    let (mlp, mut stacked): (Vec<_>, Vec<_>) = all.iter().cloned().partition(|tensor| tensor.role.is_mlp());
    for layer in 0..config.layers {
        let of = |roles: &[Role]| -> Vec<Tensor> {
            mlp.iter().filter(|t| t.layer == Some(layer) && roles.contains(&t.role)).cloned().collect()
        };
        stacked.push(stack(&of(&[Role::Gate, Role::Up]), Role::GateUp));
        stacked.push(stack(&of(&[Role::Down]), Role::Down));
    }
    let of_stacks = fit(&config, &stacked, &request(80 * GB)).unwrap();
    assert_eq!((of_stacks.weights, of_stacks.us), (ample.weights, ample.us));

    let mut odd = all.clone();
    let expert = odd.iter_mut().find(|tensor| tensor.role == Role::Up).unwrap();
    expert.encodings.retain(|(encoding, _)| *encoding != EncodingId::PACKED);
    let layer = expert.layer.unwrap();
    let partly = fit(&config, &odd, &request(80 * GB)).unwrap();
    let of =
        |encoding| partly.groups.iter().find(|group| group.name == "gate_up" && group.encoding == encoding).unwrap();
    let (bf16, packed) = (of(EncodingId::RAW), of(EncodingId::PACKED));
    assert_eq!((&bf16.layers[..], packed.units), (&[layer][..], 47));
    assert_eq!(bf16.bytes, 128 * 2 * 768 * 2048 * 2);
    assert!((1.3..1.6).contains(&(bf16.us * 47.0 / packed.us)), "{} {}", bf16.us, packed.us);
    assert_eq!(partly.weights, weights(&partly.plan, &odd));
    assert_eq!((partly.working, partly.slots), (ample.working, ample.slots), "no cuBLAS");
    let down = partly.groups.iter().find(|group| group.name == "down").unwrap();
    assert_eq!((down.encoding, down.units), (EncodingId::PACKED, 48));
}

/// Bytes of the tensors that are not matrices.
fn norms(tensors: &[Tensor]) -> u64 {
    tensors.iter().filter(|tensor| tensor.cols == 1).map(|tensor| tensor.bytes(EncodingId::RAW).unwrap()).sum()
}

#[test]
fn reported_minimum_memory_suffices() {
    let (config, tensors) = deep();
    let Err(BudgetError::TooSmall { least, weights, cache, working, slots, have }) =
        fit(&config, &tensors, &request(4 * GB))
    else {
        panic!("a plan fits in 4 GB")
    };
    assert_eq!((have, least), (4 * GB, weights + cache + working + slots));
    assert_eq!(fit(&config, &tensors, &request(least)).unwrap().total(), least);
    assert!(matches!(fit(&config, &tensors, &request(least - 1)), Err(BudgetError::TooSmall { .. })));
    // The smallest memory that is fast enough is named, too.
    let slow = BudgetRequest { max_slowdown: Some(0.02), ..request(least) };
    let Err(BudgetError::TooSlow { least: fast_enough, slowdown, limit, .. }) = fit(&config, &tensors, &slow) else {
        panic!("a plan is within 2 %")
    };
    assert!(slowdown > limit && limit == 1.02 && fast_enough > least);
    let fast = fit(&config, &tensors, &BudgetRequest { memory: Some(fast_enough), ..slow }).unwrap();
    assert!(fast.slowdown() <= 1.02 + 1e-6 && fast.total() <= fast_enough, "{}", fast.slowdown());
    let alone = fit(&config, &tensors, &BudgetRequest { memory: None, ..slow }).unwrap();
    assert_eq!(alone.total(), fast_enough);
    // A larger slowdown needs less memory.
    let total = |slowdown| {
        let request = BudgetRequest { memory: None, max_slowdown: Some(slowdown), ..request(None) };
        fit(&config, &tensors, &request).unwrap().total()
    };
    let totals = [0.0, 0.01, 0.05, 0.2, 1.0, 10.0].map(total);
    assert!(totals.windows(2).all(|pair| pair[1] <= pair[0]), "{totals:?}");
    assert_eq!(totals[5], least);
}

#[test]
fn plans_respect_the_limits_of_the_engine() {
    let (plain, tensors) = deep();
    let less = request(fit(&plain, &tensors, &request(80 * GB)).unwrap().total() - 100_000_000);
    assert!(fit(&plain, &tensors, &less).is_ok(), "Huffman codes fit");
    let mut scaled = plain.clone();
    scaled.factors.residual = 0.5;
    let error = fit(&scaled, &tensors, &less).unwrap_err();
    assert_eq!(error.code(), "budget-too-small", "pipelines cannot scale a product");
    let mut large = plain;
    large.head_dim = 256;
    let packed = BudgetRequest { kv_cache: Some(KvCache::Packed), ..less };
    let error = fit(&large, &tensors, &packed).unwrap_err();
    assert_eq!(error.code(), "heads-not-packed");
}

/// A model of two layers, with its tensors.
fn small(intermediate: u32) -> (ModelConfig, Vec<Tensor>) {
    let json = format!(
        r#"{{"model_type": "llama", "vocab_size": 1024, "hidden_size": 512, "intermediate_size": {intermediate},
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 2048}}"#
    );
    let config = ModelConfig::parse(&json, None).unwrap();
    let tensors = tensors(&config);
    (config, tensors)
}

/// Matrices with a side that is not a multiple of 64 are held as BF16 on a device, so coding them saves nothing.
#[test]
fn encodings_without_kernels_are_not_planned() {
    let (config, tensors) = small(2080);
    let (units, _) = units(&config, &tensors, 1).unwrap();
    assert!(units.iter().all(|unit| !unit.encodings.contains(&EncodingId::HUFFMAN)));
}

/// Bytes and microseconds of every possible plan, including what its kernels share. No plan has both kinds of codes.
fn every_plan(units: &[Unit<'_>], rest: u64, contexts: &Contexts<'_>) -> Vec<(u64, f64)> {
    let plans = units.iter().fold(vec![Vec::new()], |plans: Vec<Vec<usize>>, unit| {
        plans.iter().flat_map(|plan| (0..unit.encodings.len()).map(|at| [&plan[..], &[at]].concat())).collect()
    });
    let sum = |plan: &Vec<usize>| {
        let (mut decoded, mut expanded) = (BTreeMap::new(), 0);
        let (mut bytes, mut us) = (rest, 0.0);
        for (unit, at) in units.iter().zip(plan) {
            bytes += unit.choices[*at].bytes;
            us += unit.choices[*at].us;
            match unit.encodings[*at] {
                EncodingId::HUFFMAN => {
                    decoded.extend(unit.tensors.iter().map(|tensor| (tensor.role, slot_bytes(tensor))))
                }
                EncodingId::COMPACT => expanded = unit.expanded_bytes().max(expanded),
                _ => {}
            }
        }
        let coded = !decoded.is_empty();
        bytes += decoded.values().sum::<u64>() * SLOTS + contexts.shared(coded, expanded).bytes;
        (!coded || expanded == 0).then_some((bytes, us))
    };
    plans.iter().filter_map(sum).collect()
}

/// Two layers and all encodings of all units: no plan is better, and the reported numbers are right.
#[test]
fn small_models_equal_brute_force() {
    let (config, mut plain) = small(2048);
    // As large as with hundreds of layers, so that codes save more than slots and workspaces take.
    plain.iter_mut().flat_map(|tensor| &mut tensor.encodings).for_each(|(_, bytes)| *bytes *= 1000);
    // Huffman codes save much in the first layer and little in the second, so an even spread would not fit.
    let mut uneven = plain.clone();
    for tensor in uneven.iter_mut().filter(|tensor| tensor.role.is_mlp()) {
        let packed = tensor.bytes(EncodingId::PACKED).unwrap();
        let less = if tensor.layer == Some(0) { packed / 2 } else { packed / 100 };
        tensor
            .encodings
            .iter_mut()
            .filter(|(encoding, _)| *encoding == EncodingId::HUFFMAN)
            .for_each(|of| of.1 = packed - less);
    }
    let (mut coded_plans, mut compact_plans, mut one_sided_plans) = (0, 0, 0);
    let compact = |tensors: &[Tensor]| {
        let mut tensors = with_compact(tensors);
        let compact = tensors
            .iter_mut()
            .flat_map(|tensor| &mut tensor.encodings)
            .filter(|(encoding, _)| *encoding == EncodingId::COMPACT);
        compact.for_each(|(_, bytes)| *bytes *= 1000);
        tensors
    };
    for tensors in [compact(&plain), uneven] {
        let (units, rest) = units(&config, &tensors, 1).unwrap();
        let options = EngineOptions::default().max_batch(1).context(1024);
        let contexts = Contexts::new(&config, &options, Arch::Sm90a, &units);
        let bare = memory::plan(&config, &options, (0, Shared::default()), u64::MAX).unwrap();
        let fixed = bare.cache + bare.working;
        let sums = every_plan(&units, rest, &contexts);
        let (min_bytes, max_bytes) =
            (sums.iter().map(|sum| sum.0).min().unwrap(), sums.iter().map(|sum| sum.0).max().unwrap());
        let fastest = sums.iter().map(|sum| sum.1).fold(f64::INFINITY, f64::min);
        for step in 0..=10 {
            let memory = fixed + min_bytes + (max_bytes - min_bytes) * step / 10;
            let best = sums.iter().filter(|sum| fixed + sum.0 <= memory).map(|sum| sum.1).fold(f64::INFINITY, f64::min);
            let fit = fit(&config, &tensors, &request(memory)).unwrap();
            assert!((fit.us - best).abs() < 1e-9 && fit.exact, "{memory}: {} instead of {best}", fit.us);
            assert!(fit.total() <= memory && (fit.fastest_us - fastest).abs() < 1e-9);
            let of = |encoding| fit.groups.iter().filter(move |group| group.encoding == encoding);
            let has = |encoding| of(encoding).next().is_some();
            // A plan without codes reserves no memory for them.
            assert_eq!(fit.slots > 0, has(EncodingId::HUFFMAN) || has(EncodingId::COMPACT), "{:?}", fit.groups);
            coded_plans += u32::from(has(EncodingId::HUFFMAN));
            compact_plans += u32::from(has(EncodingId::COMPACT));
            one_sided_plans += u32::from(of(EncodingId::HUFFMAN).any(|group| group.layers == [0]));
        }
        assert!(fit(&config, &tensors, &request(fixed + min_bytes - 1)).is_err());
        for slowdown in [0.0, 0.1, 1.0, 1000.0] {
            let fast = |sum: &&(u64, f64)| sum.1 <= fastest * (1.0 + slowdown) * (1.0 + 1e-9);
            let smallest = sums.iter().filter(fast).map(|sum| sum.0).min().unwrap();
            let fit = fit(&config, &tensors, &BudgetRequest { max_slowdown: Some(slowdown), ..request(None) }).unwrap();
            assert_eq!(fit.total(), fixed + smallest, "{slowdown}");
        }
    }
    assert!(
        coded_plans > 5 && compact_plans > 5 && one_sided_plans > 1,
        "{coded_plans} {compact_plans} {one_sided_plans}"
    );
}

#[test]
fn tied_embeddings_count_as_a_product() {
    let config = Geometry::named("llama-3.2-1b").unwrap().config();
    let fit = fit(&config, &tensors(&config), &request(8 * GB)).unwrap();
    let embed = fit.groups.iter().find(|group| group.name == "embed").unwrap();
    assert!(embed.us > 10.0 && embed.encoding == EncodingId::PACKED);
    assert!(fit.groups.iter().all(|group| group.name != "lm_head"));
}

#[test]
fn impossible_budgets_are_explained() {
    let (config, tensors) = llama();
    let error = |request: BudgetRequest| fit(&config, &tensors, &request).unwrap_err().to_string();
    assert!(error(request(None)).contains("a memory, a maximum slowdown or both"));
    assert!(error(BudgetRequest { batch: 1025, ..request(GB) }).contains("max_batch = 1025"));
    assert!(error(BudgetRequest { context: 0, ..request(GB) }).contains("context = 0"));
    assert!(error(BudgetRequest { context: 200_000, ..request(GB) }).contains("131072"));
    assert!(error(BudgetRequest { max_slowdown: Some(f64::NAN), ..request(GB) }).contains("NaN"));
    assert!(error(request(GB)).contains("the smallest plan needs"));
    let without: Vec<Tensor> = tensors.iter().filter(|tensor| tensor.name != "7.up").cloned().collect();
    let error = fit(&config, &without, &request(80 * GB)).unwrap_err();
    assert_eq!(error, BudgetError::Missing { layer: Some(7), role: Role::Up });
}

/// 64 sequences of 4096 tokens: 34.4 GB in BF16, 26.5 GB packed.
#[test]
fn kv_cache_is_packed_where_that_gives_a_faster_plan() {
    let (config, tensors) = llama();
    let of = |kv_cache, memory: Option<u64>| {
        let slowdown = memory.is_none().then_some(0.0);
        let request = BudgetRequest { kv_cache, batch: 64, context: 4096, max_slowdown: slowdown, ..request(memory) };
        fit(&config, &tensors, &request)
    };
    let (bf16, packed) = (Some(KvCache::Bf16), Some(KvCache::Packed));
    // BF16, if both caches allow the fastest plan.
    let ample = of(None, Some(80 * GB)).unwrap();
    assert_eq!((ample.kv_cache, &ample), (KvCache::Bf16, &of(bf16, Some(80 * GB)).unwrap()));
    assert_eq!((ample.cache, ample.cache_token_bytes), (ample.cache_tokens * 131_072, 131_072));
    let short = of(None, Some(43 * GB)).unwrap();
    assert_eq!((short.kv_cache, &short), (KvCache::Packed, &of(packed, Some(43 * GB)).unwrap()));
    assert!(short.total() <= 43 * GB && short.us == ample.us && of(bf16, Some(43 * GB)).is_err());
    assert!(short.cache_token_bytes < 99_000 && short.cache_tokens == ample.cache_tokens);
    // The smallest memory, and the one that is named if nothing fits.
    let smallest = of(None, None).unwrap();
    assert_eq!((smallest.kv_cache, smallest.total()), (KvCache::Packed, of(packed, None).unwrap().total()));
    assert!(smallest.total() < of(bf16, None).unwrap().total());
    let error = of(None, Some(20 * GB)).unwrap_err();
    assert_eq!(error, of(packed, Some(20 * GB)).unwrap_err());
    // Heads that cannot be packed.
    let mut odd = config.clone();
    odd.head_dim = 8;
    let request = BudgetRequest { kv_cache: None, ..request(80 * GB) };
    assert_eq!(kv_caches(&odd, &request), [KvCache::Bf16]);
}
