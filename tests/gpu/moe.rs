//! The experts of a mixture on the GPU: whole layers against double precision with every kind of routing; the same bits
//! for a token in any batch, in a graph that is replayed with other choices, and in thousands of runs; experts that are
//! fetched into slots; and experts that cannot be packed.
//!
//! Outputs start as NaN and are followed by guard bytes.

use std::collections::BTreeSet;

use crate::harness::{Random, bf16, context, gpu, guard_is_intact, poison, refused, stream, value};
use unweight_codegen::spec::Epilogue;
use unweight_format::{Histogram, Matrix, raw::packed::pack};
use unweight_rt::{
    DeviceBuffer, DeviceMatrix, DevicePacked, ExecContext, KernelSet, LaunchError, LayerBuilder, LoadOptions,
    MatrixMut, Placement, Stream,
    experts::{
        ExpertPart, ExpertTraffic, ExpertWeights, Experts, ExpertsShape, Fetcher, HostEncoding, OffloadedExperts,
        Routed, RouterConfig,
    },
};

/// The weights of all experts, and rows of tokens.
pub struct Case {
    pub shape: ExpertsShape,
    pub gate_up: Vec<u16>,
    pub down: Vec<u16>,
    pub x: Vec<u16>,
}

/// The maximum number of tokens in a test.
const TOKENS: usize = 150;

impl Case {
    /// Makes weights of which one in 700 is outside the window.
    pub fn new(experts: u32, hidden: u32, intermediate: u32, seed: u64) -> Self {
        Self::of(ExpertsShape { experts, hidden, intermediate }, seed, &|_, rng| match rng.below(700) {
            0 => bf16(rng.normal()) & 0x807f | [0, 70, 80, 125][rng.below(4) as usize] << 7,
            _ => bf16(rng.normal() / 16.0),
        })
    }

    /// Makes weights with `weight`, from the share of the product's weights that precede them.
    pub fn of(shape: ExpertsShape, seed: u64, weight: &dyn Fn(f64, &mut Random) -> u16) -> Self {
        let ExpertsShape { hidden, .. } = shape;
        let mut rng = Random::new(seed);
        let mut weights = |[n, k]: [u64; 2]| -> Vec<u16> {
            (0..n * k).map(|at| weight(at as f64 / (n * k) as f64, &mut rng)).collect()
        };
        let (gate_up, down) = (weights(shape.gate_up()), weights(shape.down()));
        let x = (0..TOKENS * hidden as usize).map(|_| bf16(rng.normal())).collect();
        Self { shape, gate_up, down, x }
    }

    /// Uploads the weights, packed if possible.
    fn upload(&self, stream: &Stream) -> [ExpertWeights; 2] {
        let upload = |weights: &[u16], [n, k]: [u64; 2]| -> ExpertWeights {
            let bytes: &[u8] = bytemuck::cast_slice(weights);
            match pack(Matrix::new(bytes, n as usize, k as usize).unwrap(), &Histogram::of(bytes)) {
                Ok(tensor) => {
                    assert!(tensor.escape_count() > 0, "the data has no escapes");
                    DevicePacked::upload(stream, &tensor).unwrap().into()
                }
                Err(_) => DeviceMatrix::from_host(stream, n as u32, k as u32, weights).unwrap().into(),
            }
        };
        [upload(&self.gate_up, self.shape.gate_up()), upload(&self.down, self.shape.down())]
    }

    /// Uploads the weights in BF16.
    fn upload_bf16(&self, stream: &Stream) -> [DeviceMatrix; 2] {
        let upload =
            |weights: &[u16], [n, k]: [u64; 2]| DeviceMatrix::from_host(stream, n as u32, k as u32, weights).unwrap();
        [upload(&self.gate_up, self.shape.gate_up()), upload(&self.down, self.shape.down())]
    }

    /// Returns gates, ups or downs, with the experts concatenated by rows.
    fn part(&self, part: ExpertPart) -> Vec<u16> {
        if part == ExpertPart::Down {
            return self.down.clone();
        }
        let group = Epilogue::GATE_ROWS as usize * self.shape.hidden as usize;
        let groups = self.gate_up.chunks_exact(group);
        groups.skip(usize::from(part == ExpertPart::Up)).step_by(2).flatten().copied().collect()
    }

    /// Writes a part to the device, for builders.
    fn fill(&self, part: ExpertPart, stream: &Stream, mut output: MatrixMut<'_>) {
        let rows = DeviceMatrix::from_host(stream, output.rows(), output.cols(), &self.part(part)).unwrap();
        output.copy_from(stream, rows.view()).unwrap();
        stream.synchronize().unwrap();
    }

    pub fn load(&self, kernels: &KernelSet, stream: &Stream) -> Experts {
        let [gate_up, down] = self.upload(stream);
        Experts::new(kernels, self.shape, gate_up, down).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Offloads the experts to host memory, with `slots` uninitialized slots on the device; compact if possible, or
    /// packed.
    pub fn offload_as(&self, is_compact: bool, kernels: &KernelSet, stream: &Stream, slots: u32) -> OffloadedExperts {
        let mut builder = LayerBuilder::new(kernels, stream, LoadOptions::default()).unwrap();
        assert!(builder.set_compact_experts(is_compact), "compact is the default");
        let mut experts = builder
            .offloaded_experts("experts", self.shape, slots, &mut |part, stream, output| {
                self.fill(part, stream, output);
                Ok(())
            })
            .unwrap_or_else(|error| panic!("{error}"));
        experts.poison(stream, 0xa5).unwrap();
        experts
    }

    /// Offloads the experts, which must be compact.
    fn offload(&self, kernels: &KernelSet, stream: &Stream, slots: u32) -> OffloadedExperts {
        let experts = self.offload_as(true, kernels, stream, slots);
        assert_eq!(experts.host_encodings(), [HostEncoding::Compact; 2]);
        assert_eq!(experts.host_compact_bytes(), experts.host_bytes());
        experts
    }

    /// Returns an expert's output for a token and the bound of its rounding error; the intermediate row is rounded to
    /// bf16.
    fn expert(&self, expert: u32, token: usize) -> Vec<(f64, f64)> {
        let (hidden, inner) = (self.shape.hidden as usize, self.shape.intermediate as usize);
        let x: Vec<f64> = self.x[token * hidden..][..hidden].iter().map(|bits| value(*bits)).collect();
        let gate_rows = Epilogue::GATE_ROWS as usize;
        // The product with a row, and the sum of the magnitudes of its terms.
        let dot = |row: usize| {
            let w = &self.gate_up[(expert as usize * 2 * inner + row) * hidden..][..hidden];
            let terms = x.iter().zip(w).map(|(x, w)| x * value(*w));
            terms.fold((0.0, 0.0), |(sum, size): (f64, f64), term| (sum + term, size + term.abs()))
        };
        // Elements of the intermediate row, and the error of sums in f32.
        let gated: Vec<(f64, f64)> = (0..inner)
            .map(|column| {
                let row = column / gate_rows * 2 * gate_rows + column % gate_rows;
                let ((gate, gate_size), (up, up_size)) = (dot(row), dot(row + gate_rows));
                let error = (gate_size * up.abs() * 1.1 + up_size * gate.abs()) * 1e-6;
                (value(bf16(gate / (1.0 + (-gate).exp()) * up)), error)
            })
            .collect();
        (0..hidden)
            .map(|row| {
                let w = &self.down[(expert as usize * hidden + row) * inner..][..inner];
                let terms = gated.iter().zip(w).map(|((x, error), w)| (x * value(*w), error * value(*w).abs()));
                // An intermediate element may round the other way; the row of the pair is rounded once more.
                let (sum, squares, error) = terms.fold((0.0, 0.0, 0.0), |(sum, squares, errors), (term, error)| {
                    (sum + term, squares + term * term, errors + error)
                });
                let (sum, squares, error): (f64, f64, f64) = (sum, squares, error);
                (sum, squares.sqrt() / 64.0 + sum.abs() / 200.0 + error)
            })
            .collect()
    }
}

/// The choices of each token, on host and device.
pub struct Routing {
    top_k: u32,
    ids: Vec<u32>,
    weights: Vec<f32>,
}

impl Routing {
    /// Chooses distinct experts for each token; one in nine is not on this device.
    fn random(rng: &mut Random, tokens: usize, experts: u32, top_k: u32) -> Self {
        let mut ids = Vec::new();
        for _ in 0..tokens {
            let mut distinct: Vec<u32> = Vec::new();
            while distinct.len() < top_k as usize {
                let id = rng.below(experts.into()) as u32;
                if !distinct.contains(&id) {
                    distinct.push(id);
                }
            }
            ids.extend(distinct.into_iter().map(|id| if rng.below(9) == 0 { u32::MAX - id } else { id }));
        }
        let weights = ids.iter().map(|_| (1 + rng.below(1000)) as f32 / 1000.0).collect();
        Self { top_k, ids, weights }
    }

    /// Routes all tokens to one expert.
    pub fn single(tokens: usize, expert: u32) -> Self {
        Self { top_k: 1, ids: vec![expert; tokens], weights: vec![0.75; tokens] }
    }

    fn tokens(&self) -> usize {
        self.ids.len() / self.top_k as usize
    }

    fn upload(&self, stream: &Stream) -> (DeviceBuffer<u32>, DeviceBuffer<f32>) {
        (DeviceBuffer::from_host(stream, &self.ids).unwrap(), DeviceBuffer::from_host(stream, &self.weights).unwrap())
    }
}

fn context_for(experts: &Experts, stream: &Stream, tokens: u32, top_k: u32) -> ExecContext {
    let mut ctx = context(stream);
    ctx.reserve(experts.context_size(tokens, top_k)).unwrap();
    ctx
}

/// Runs the rows of tokens `first..`, as many as were routed.
fn run(
    case: &Case,
    experts: &Experts,
    stream: &Stream,
    routing: &Routing,
    first: usize,
    before: Option<&[u16]>,
) -> Vec<u16> {
    let (tokens, hidden) = (routing.tokens(), case.shape.hidden as usize);
    let x = &case.x[first * hidden..(first + tokens) * hidden];
    let x = DeviceMatrix::from_host(stream, tokens as u32, case.shape.hidden, x).unwrap();
    let mut y = DeviceMatrix::zeroed(stream, tokens as u32, case.shape.hidden).unwrap();
    poison(stream, &mut y);
    if let Some(before) = before {
        y.write(stream, 0, before).unwrap();
    }
    let (ids, weights) = routing.upload(stream);
    let mut ctx = context_for(experts, stream, tokens as u32, routing.top_k);
    let routed = Routed { ids: &ids, weights: &weights, top_k: routing.top_k };
    experts.enqueue(&mut ctx, x.view(), routed, y.view_mut(), before.is_some()).unwrap();
    let rows = y.to_host(stream).unwrap();
    guard_is_intact(stream, &y, "experts");
    rows
}

fn check(case: &Case, routing: &Routing, y: &[u16], before: Option<&[u16]>, what: &str) {
    let (hidden, top_k) = (case.shape.hidden as usize, routing.top_k as usize);
    for token in 0..routing.tokens() {
        let old = |column: usize| before.map_or(0.0, |before| value(before[token * hidden + column]));
        let mut sums: Vec<(f64, f64)> = (0..hidden).map(|column| (old(column), old(column).abs() * 1e-6)).collect();
        for pair in token * top_k..(token + 1) * top_k {
            let (id, weight) = (routing.ids[pair], f64::from(routing.weights[pair]));
            if id < case.shape.experts {
                let row = case.expert(id, token);
                sums.iter_mut().zip(row).for_each(|(sum, (term, slack))| {
                    *sum = (sum.0 + weight * term, sum.1 + weight * slack);
                });
            }
        }
        for (column, (sum, slack)) in sums.into_iter().enumerate() {
            let got = value(y[token * hidden + column]);
            let right = match () {
                () if sum.is_nan() => got.is_nan(),
                () if sum.is_infinite() => got == sum,
                () => (got - sum).abs() <= sum.abs() / 200.0 + slack,
            };
            assert!(right, "{what}: [{token}, {column}] is {got} instead of {sum} (+- {slack})");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn experts_of_every_token_at_every_kind_of_routing() {
    let kernels = gpu();
    let stream = stream(kernels);
    let mut rng = Random::new(4);
    for case in [Case::new(8, 192, 64, 1), Case::new(60, 64, 320, 2), Case::new(128, 128, 128, 3)] {
        let experts = case.load(kernels, &stream);
        // Around the edges of batch tiles, few experts with work, and more pairs than one item of the largest tile
        // holds.
        for top_k in [1, 2, 4, 8] {
            for tokens in [1, 3, 17, 64, TOKENS] {
                let routing = Routing::random(&mut rng, tokens, case.shape.experts, top_k);
                let what = format!("{:?}, {tokens} tokens, {top_k} each", case.shape);
                let y = run(&case, &experts, &stream, &routing, 0, None);
                check(&case, &routing, &y, None, &what);
                assert!(y == run(&case, &experts, &stream, &routing, 0, None), "{what}: two runs differ");
            }
        }
        for tokens in [7, 8, 9, 63, 64, 65, 129] {
            let routing = Routing::single(tokens, case.shape.experts - 1);
            let before: Vec<u16> = (0..tokens * case.shape.hidden as usize).map(|_| bf16(rng.normal())).collect();
            let y = run(&case, &experts, &stream, &routing, 0, Some(&before));
            check(&case, &routing, &y, Some(&before), &format!("{:?}, {tokens} tokens, one expert", case.shape));
        }
        let no_experts = Routing { top_k: 2, ids: vec![u32::MAX; 10], weights: vec![f32::NAN; 10] };
        let y = run(&case, &experts, &stream, &no_experts, 0, None);
        assert!(y.iter().all(|bits| *bits == 0), "the output of tokens without an expert is not zero");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn bits_of_a_token_do_not_depend_on_the_batch() {
    let kernels = gpu();
    let stream = stream(kernels);
    // Odd numbers of tiles along k of both products.
    let case = Case::new(8, 576, 448, 9);
    let (experts, hidden) = (case.load(kernels, &stream), case.shape.hidden as usize);
    let all = Routing::random(&mut Random::new(5), TOKENS, 8, 2);
    let expected = run(&case, &experts, &stream, &all, 0, None);
    // Fewer tokens use smaller batch tiles: 8, 16, 32, 64.
    for tokens in [1, 3, 20, 40, 80] {
        for first in [0, 11, TOKENS - tokens] {
            let pairs = first * 2..(first + tokens) * 2;
            let part = Routing { top_k: 2, ids: all.ids[pairs.clone()].to_vec(), weights: all.weights[pairs].to_vec() };
            let y = run(&case, &experts, &stream, &part, first, None);
            assert!(
                y == expected[first * hidden..][..tokens * hidden],
                "{tokens} tokens from token {first} have other bits"
            );
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn graph_uses_the_routing_at_replay() {
    let kernels = gpu();
    let stream = stream(kernels);
    let case = Case::new(60, 320, 192, 12);
    let experts = case.load(kernels, &stream);
    let (tokens, top_k, hidden) = (33, 4, case.shape.hidden as usize);
    let mut rng = Random::new(6);
    let routings: Vec<Routing> = (0..5).map(|_| Routing::random(&mut rng, tokens, 60, top_k)).collect();
    let expected: Vec<Vec<u16>> =
        routings.iter().map(|routing| run(&case, &experts, &stream, routing, 0, None)).collect();

    let x = DeviceMatrix::from_host(&stream, tokens as u32, 320, &case.x[..tokens * hidden]).unwrap();
    let mut y = DeviceMatrix::zeroed(&stream, tokens as u32, 320).unwrap();
    let (mut ids, mut weights) = routings[0].upload(&stream);
    let mut ctx = context_for(&experts, &stream, tokens as u32, top_k);
    let graph = {
        let routed = Routed { ids: &ids, weights: &weights, top_k };
        stream.capture(|| experts.enqueue(&mut ctx, x.view(), routed, y.view_mut(), false)).unwrap()
    };
    for round in 0..3000 {
        let at = round % routings.len();
        if round < 20 {
            poison(&stream, &mut y);
        }
        ids.write(&stream, 0, &routings[at].ids).unwrap();
        weights.write(&stream, 0, &routings[at].weights).unwrap();
        // SAFETY: everything that the graph uses lives until the end of this test.
        unsafe { graph.launch() }.unwrap();
        if round < 20 || round % 50 == 0 {
            assert!(y.to_host(&stream).unwrap() == expected[at], "round {round} differs");
        }
    }
    assert!(y.to_host(&stream).unwrap() == expected[2999 % routings.len()]);
    guard_is_intact(&stream, &y, "a graph of experts");
}

/// Runs [`run`] with offloaded experts.
pub fn run_offloaded(
    case: &Case,
    (experts, fetcher): (&OffloadedExperts, &mut Fetcher),
    stream: &Stream,
    routing: &Routing,
    before: Option<&[u16]>,
) -> Vec<u16> {
    let (tokens, hidden) = (routing.tokens(), case.shape.hidden as usize);
    let x = DeviceMatrix::from_host(stream, tokens as u32, case.shape.hidden, &case.x[..tokens * hidden]).unwrap();
    let mut y = DeviceMatrix::zeroed(stream, tokens as u32, case.shape.hidden).unwrap();
    poison(stream, &mut y);
    if let Some(before) = before {
        y.write(stream, 0, before).unwrap();
    }
    let (ids, weights) = routing.upload(stream);
    let mut ctx = context(stream);
    ctx.reserve(experts.context_size(tokens as u32, routing.top_k)).unwrap();
    let routed = Routed { ids: &ids, weights: &weights, top_k: routing.top_k };
    experts.enqueue(&mut ctx, fetcher, x.view(), routed, y.view_mut(), before.is_some()).unwrap();
    let rows = y.to_host(stream).unwrap();
    guard_is_intact(stream, &y, "offloaded experts");
    rows
}

/// Any number of slots works: one for every expert, almost as many, two, or a single slot.
#[test]
#[ignore = "needs a GPU"]
fn offloaded_experts_give_the_same_bits() {
    let kernels = gpu();
    let stream = stream(kernels);
    let mut rng = Random::new(14);
    for case in [Case::new(8, 192, 64, 21), Case::new(60, 64, 320, 22), Case::new(128, 128, 128, 23)] {
        let (on_device, shape) = (case.load(kernels, &stream), case.shape);
        for slots in [1, 2, 3, shape.experts / 2, shape.experts - 1, shape.experts] {
            let experts = case.offload(kernels, &stream, slots);
            let mut fetcher = Fetcher::new(&stream, shape, TOKENS as u32, 8).unwrap();
            assert_eq!(experts.slots(), slots);
            assert!(experts.host_bytes() > experts.bytes() || slots + 1 >= shape.experts, "{slots} of {shape:?}");
            let mut requested = 0;
            for (tokens, top_k) in [(1, 2), (3, 8), (64, 2), (TOKENS, 4), (1, 1), (17, 8), (TOKENS, 8), (1, 8)] {
                let routing = Routing::random(&mut rng, tokens, shape.experts, top_k);
                let before: Vec<u16> = (0..tokens * shape.hidden as usize).map(|_| bf16(rng.normal())).collect();
                let before = (tokens % 2 == 0).then_some(&before[..]);
                let what = format!("{shape:?}, {slots} slots, {tokens} tokens, {top_k} each");
                let expected = run(&case, &on_device, &stream, &routing, 0, before);
                for again in 0..2 {
                    let y = run_offloaded(&case, (&experts, &mut fetcher), &stream, &routing, before);
                    assert!(y == expected, "{what}, time {again}: other bits");
                    let chosen: BTreeSet<u32> = routing.ids.iter().copied().filter(|id| *id < shape.experts).collect();
                    requested += chosen.len() as u64;
                }
                let ExpertTraffic { hits, misses, bytes, stalls, stalled_us, .. } = fetcher.traffic().unwrap();
                assert_eq!(hits + misses, requested, "{what}");
                assert_fetched(&experts, misses, bytes);
                assert!(stalls <= misses && (stalls > 0) == (stalled_us > 0.0), "{what}: {stalls}, {stalled_us} us");
            }
            let no_experts = Routing { top_k: 2, ids: vec![u32::MAX; 10], weights: vec![f32::NAN; 10] };
            let y = run_offloaded(&case, (&experts, &mut fetcher), &stream, &no_experts, None);
            assert!(y.iter().all(|bits| *bits == 0), "the output of tokens without an expert is not zero");
        }
    }
}

/// Checks the bytes of this number of fetches: those of the smallest to the largest expert each.
pub fn assert_fetched(experts: &OffloadedExperts, fetches: u64, bytes: u64) {
    let each: Vec<u64> = (0..experts.shape().experts).map(|expert| experts.fetch_bytes(expert)).collect();
    let [least, most] = [each.iter().min().unwrap(), each.iter().max().unwrap()];
    assert!((fetches * least..=fetches * most).contains(&bytes), "{fetches} fetches of {least} to {most}: {bytes}");
    let all: u64 = each.iter().sum();
    assert!(all <= experts.host_bytes() && experts.host_bytes() < all + 1024 * each.len() as u64, "pieces are aligned");
}

/// Calls without a pause, which wait only for their own products and copies, so slots are overwritten all the time.
#[test]
#[ignore = "needs a GPU"]
fn repeated_expert_fetches_keep_every_row_correct() {
    let kernels = gpu();
    let stream = stream(kernels);
    // Copies take about as long as products.
    let case = Case::new(24, 576, 448, 31);
    let all = case.load(kernels, &stream);
    let mut rng = Random::new(15);
    let routings: Vec<Routing> = [(1, 2), (5, 4), (40, 4), (1, 8), (TOKENS, 2), (2, 2), (16, 8), (TOKENS, 8)]
        .map(|(tokens, top_k)| Routing::random(&mut rng, tokens, 24, top_k))
        .into();
    let expected: Vec<Vec<u16>> = routings.iter().map(|routing| run(&case, &all, &stream, routing, 0, None)).collect();
    for (is_compact, slots) in [(true, 2), (true, 5), (true, 16), (false, 5)] {
        let experts = case.offload_as(is_compact, kernels, &stream, slots);
        let mut fetcher = Fetcher::new(&stream, case.shape, TOKENS as u32, 8).unwrap();
        let mut ctx = context(&stream);
        ctx.reserve(experts.context_size(TOKENS as u32, 8)).unwrap();
        let x = DeviceMatrix::from_host(&stream, TOKENS as u32, 576, &case.x).unwrap();
        let mut operands: Vec<_> = routings
            .iter()
            .map(|routing| {
                let y = DeviceMatrix::zeroed(&stream, routing.tokens() as u32, 576).unwrap();
                (routing, routing.upload(&stream), y)
            })
            .collect();
        for round in 0..400 {
            for (routing, (ids, weights), y) in &mut operands {
                poison(&stream, y);
                let tokens = routing.tokens() as u32;
                let x = x.view().part(0..tokens, 0..576).unwrap();
                let routed = Routed { ids, weights, top_k: routing.top_k };
                experts.enqueue(&mut ctx, &mut fetcher, x, routed, y.view_mut(), false).unwrap();
            }
            if round < 20 || round % 20 == 0 {
                for ((.., y), expected) in operands.iter().zip(&expected) {
                    assert!(y.to_host(&stream).unwrap() == *expected, "{slots} slots, round {round}");
                }
            }
        }
        let traffic = fetcher.traffic().unwrap();
        println!("{slots} slots: {traffic}");
        assert!(traffic.misses > 400 && (slots == 2 || traffic.hits > 400), "{traffic}");
        for ((.., y), expected) in operands.iter().zip(&expected) {
            assert!(y.to_host(&stream).unwrap() == *expected, "{slots} slots, at the end");
            guard_is_intact(&stream, y, "fetched experts");
        }
    }
}

/// Prefetched experts change no bits: with right guesses, and with wrong ones, which end after a while. Every expert of
/// a batch may be missing, and slots may be fewer than the experts of one token.
#[test]
#[ignore = "needs a GPU"]
fn prefetched_experts_give_the_same_bits() {
    let kernels = gpu();
    let stream = stream(kernels);
    let case = Case::new(32, 192, 128, 41);
    let all = case.load(kernels, &stream);
    let mut rng = Random::new(42);
    for slots in [1, 3, 12, 31] {
        for right in [true, false] {
            // Two layers with the same weights, as a model has several.
            let layers = [0, 1].map(|_| case.offload(kernels, &stream, slots));
            let mut fetcher = Fetcher::new(&stream, case.shape, TOKENS as u32, 4).unwrap();
            let mut ctx = context(&stream);
            ctx.reserve(layers[0].context_size(64, 4)).unwrap();
            let mut skipped = 0;
            for step in 0..150 {
                let tokens = if right { [1, 1, 3, 40][step % 4] } else { [1, 1, 3, 2][step % 4] };
                let routing = Routing::random(&mut rng, tokens, 32, 4);
                let expected = run(&case, &all, &stream, &routing, 0, None);
                let (ids, weights) = routing.upload(&stream);
                let logits = guess(&stream, &routing, right);
                let x = DeviceMatrix::from_host(&stream, tokens as u32, 192, &case.x[..tokens * 192]).unwrap();
                for layer in 0..2 {
                    let mut y = DeviceMatrix::zeroed(&stream, tokens as u32, 192).unwrap();
                    poison(&stream, &mut y);
                    fetcher.begin(&stream, &ids, tokens as u32, 4).unwrap();
                    // Nothing follows the last layer.
                    let predicts = layer == 0 && fetcher.predicts(tokens as u32);
                    if predicts {
                        let choice = RouterConfig { top_k: 4, normalized: true, ..RouterConfig::default() };
                        layers[1].predict(&stream, logits.view(), choice, &mut fetcher).unwrap();
                    }
                    skipped += u32::from(layer == 0 && !predicts);
                    let routed = Routed { ids: &ids, weights: &weights, top_k: 4 };
                    layers[layer].enqueue(&mut ctx, &mut fetcher, x.view(), routed, y.view_mut(), false).unwrap();
                    layers[1].prefetch(&mut fetcher).unwrap();
                    let same = y.to_host(&stream).unwrap() == expected;
                    assert!(same, "{slots} slots, right {right}, step {step}, layer {layer}: other bits");
                }
            }
            let traffic = fetcher.traffic().unwrap();
            println!("{slots} slots, right {right}: {traffic}, {skipped} skipped");
            // Two layers with the same weights.
            assert_fetched(&layers[0], traffic.misses + traffic.prefetched, traffic.bytes);
            assert!(traffic.prefetched > 0, "{traffic}");
            match right {
                // Tokens with an id that is not an expert have a wrong guess.
                true => assert!(traffic.prefetch_hits > traffic.prefetched / 2, "{traffic}"),
                false => assert!(traffic.prefetch_hits == 0 && (skipped > 90 || slots > 12), "{traffic}, {skipped}"),
            }
        }
    }
}

/// Logits of a router that choose the experts of the first tokens of a routing, or experts that no token has.
fn guess(stream: &Stream, routing: &Routing, right: bool) -> DeviceMatrix {
    let tokens = routing.tokens();
    let mut logits = vec![bf16(-1.0); tokens * 32];
    for (token, ids) in routing.ids.chunks(routing.top_k as usize).enumerate() {
        for id in (0..32u32).filter(|id| match right {
            true => ids.contains(id),
            false => !routing.ids.contains(id),
        }) {
            logits[token * 32 + id as usize] = bf16(1.0);
        }
    }
    DeviceMatrix::from_host(stream, tokens as u32, 32, &logits).unwrap()
}

#[test]
#[ignore = "needs a GPU"]
fn invalid_expert_fetches_are_rejected() {
    let kernels = gpu();
    let stream = stream(kernels);
    let case = Case::new(8, 128, 64, 3);
    let experts = case.offload(kernels, &stream, 3);
    let mut fetcher = Fetcher::new(&stream, case.shape, 2, 2).unwrap();
    let x = DeviceMatrix::from_host(&stream, 4, 128, &case.x[..4 * 128]).unwrap();
    let mut y = DeviceMatrix::zeroed(&stream, 4, 128).unwrap();
    let routing = Routing::random(&mut Random::new(1), 4, 8, 2);
    let (ids, weights) = routing.upload(&stream);
    let routed = Routed { ids: &ids, weights: &weights, top_k: 2 };
    let mut ctx = context(&stream);
    let too_small = refused(experts.enqueue(&mut ctx, &mut fetcher, x.view(), routed, y.view_mut(), false));
    assert!(matches!(too_small, LaunchError::ContextTooSmall { .. }), "{too_small}");
    ctx.reserve(experts.context_size(4, 2)).unwrap();
    let too_few = refused(experts.enqueue(&mut ctx, &mut fetcher, x.view(), routed, y.view_mut(), false));
    assert!(matches!(too_few, LaunchError::Room { .. }), "{too_few}");
    let mut fetcher = Fetcher::new(&stream, case.shape, 4, 2).unwrap();
    let captured = stream.capture(|| experts.enqueue(&mut ctx, &mut fetcher, x.view(), routed, y.view_mut(), false));
    assert!(matches!(refused(captured.map(|_| ())), LaunchError::Fetching));
    // The error does not affect the next call.
    let expected = run(&case, &case.load(kernels, &stream), &stream, &routing, 0, None);
    assert!(run_offloaded(&case, (&experts, &mut fetcher), &stream, &routing, None) == expected);
}

/// Experts that cannot be packed, with a name for each.
fn hostile() -> Vec<(&'static str, Case)> {
    let shape = ExpertsShape { experts: 8, hidden: 192, intermediate: 128 };
    let of = |seed: u64, weight: &dyn Fn(f64, &mut Random) -> u16| Case::of(shape, seed, weight);
    let usual = |rng: &mut Random| bf16(rng.normal() / 16.0);
    let bits = |rng: &mut Random| rng.below(1 << 16) as u16;
    vec![
        ("two experts of zeros", of(41, &|at, rng| if (0.25..0.5).contains(&at) { 0 } else { usual(rng) })),
        ("heavy tails", of(42, &|_, rng| bits(rng) & 0x807f | (60 + rng.below(70) as u16) << 7)),
        ("1 % zeros", of(43, &|_, rng| if rng.below(100) == 0 { 0x8000 } else { usual(rng) })),
        (
            "one Inf and 1 % subnormals",
            of(44, &|at, rng| match rng.below(100) {
                _ if at == 0.5 => 0x7f80,
                0 => bits(rng) & 0x807f,
                _ => usual(rng),
            }),
        ),
        // Almost every result is NaN.
        ("random bits", of(45, &|_, rng| bits(rng))),
    ]
}

/// The builder packs on the GPU, and keeps what it cannot pack; all slots of host memory give the same bits.
#[test]
#[ignore = "needs a GPU"]
fn experts_that_cannot_be_packed_run_as_bf16() {
    let kernels = gpu();
    let stream = stream(kernels);
    let mut rng = Random::new(46);
    for (name, case) in hostile() {
        let shape = case.shape;
        let mut builder = LayerBuilder::new(kernels, &stream, LoadOptions::default()).unwrap();
        let mut fill = |part, stream: &Stream, output: MatrixMut<'_>| {
            case.fill(part, stream, output);
            Ok(())
        };
        let experts = builder.experts(name, shape, &mut fill).unwrap();
        assert!(experts.unpackable().iter().all(Option::is_some), "{name}: {:?}", experts.unpackable());
        assert_eq!(
            experts.bytes(),
            2 * (shape.gate_up().iter().product::<u64>() + shape.down().iter().product::<u64>())
        );
        let offloaded = [1, 3].map(|slots| {
            let mut offloaded = builder.offloaded_experts(name, shape, slots, &mut fill).unwrap();
            assert_eq!(offloaded.unpackable(), experts.unpackable());
            assert_eq!(offloaded.host_bytes(), experts.bytes());
            offloaded.poison(&stream, 0xa5).unwrap();
            offloaded
        });
        let mut fetcher = Fetcher::new(&stream, shape, TOKENS as u32, 2).unwrap();
        for tokens in [1, 3, 17, 64, TOKENS] {
            let routing = Routing::random(&mut rng, tokens, shape.experts, 2);
            let what = format!("{name}, {tokens} tokens");
            let y = run(&case, &experts, &stream, &routing, 0, None);
            check(&case, &routing, &y, None, &what);
            for offloaded in &offloaded {
                let fetched = run_offloaded(&case, (offloaded, &mut fetcher), &stream, &routing, None);
                assert!(fetched == y, "{what}: other bits from {} slots", offloaded.slots());
            }
            if tokens == 17 {
                for again in 0..200 {
                    assert!(run(&case, &experts, &stream, &routing, 0, None) == y, "{what}: run {again} differs");
                }
            }
        }
    }
}

/// One product may be packed and the other BF16. Packed or BF16, the bits are the same.
#[test]
#[ignore = "needs a GPU"]
fn packed_and_bf16_experts_give_the_same_bits() {
    let kernels = gpu();
    let stream = stream(kernels);
    let case = Case::new(60, 320, 192, 51);
    let packed = case.load(kernels, &stream);
    assert_eq!(packed.unpackable(), [None, None]);
    let experts = |gate_up: ExpertWeights, down: ExpertWeights| {
        Experts::new(kernels, case.shape, gate_up, down).unwrap_or_else(|error| panic!("{error}"))
    };
    let ([gate_up, down], [bf16_gate_up, bf16_down]) = (case.upload(&stream), case.upload_bf16(&stream));
    let mixed = [experts(gate_up, bf16_down.into()), experts(bf16_gate_up.into(), down)];
    let mut builder = LayerBuilder::new(kernels, &stream, LoadOptions::default().placement(Placement::Bf16)).unwrap();
    let whole = builder.experts("experts", case.shape, &mut |part, stream, output| {
        case.fill(part, stream, output);
        Ok(())
    });
    let whole = whole.unwrap();
    assert_eq!(whole.unpackable(), [None, None], "BF16 was requested");
    assert!(whole.bytes() > packed.bytes() * 5 / 4);
    let mut rng = Random::new(52);
    for (tokens, top_k) in [(1, 4), (9, 2), (64, 8), (TOKENS, 4)] {
        let routing = Routing::random(&mut rng, tokens, 60, top_k);
        let expected = run(&case, &packed, &stream, &routing, 0, None);
        for (at, experts) in mixed.iter().chain([&whole]).enumerate() {
            let y = run(&case, experts, &stream, &routing, 0, None);
            assert!(y == expected, "{tokens} tokens, {top_k} each: experts {at} give other bits");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn mismatched_operands_are_rejected() {
    let kernels = gpu();
    let stream = stream(kernels);
    let case = Case::new(8, 128, 64, 3);
    let experts = case.load(kernels, &stream);
    let x = DeviceMatrix::from_host(&stream, 4, 128, &case.x[..4 * 128]).unwrap();
    let mut y = DeviceMatrix::zeroed(&stream, 4, 128).unwrap();
    let mut narrow = DeviceMatrix::zeroed(&stream, 4, 64).unwrap();
    let (ids, weights) = Routing::random(&mut Random::new(1), 4, 8, 2).upload(&stream);
    let routed = Routed { ids: &ids, weights: &weights, top_k: 2 };
    let too_small = refused(experts.enqueue(&mut context(&stream), x.view(), routed, y.view_mut(), false));
    assert!(matches!(too_small, LaunchError::ContextTooSmall { .. }), "{too_small}");
    let mut ctx = context_for(&experts, &stream, 4, 8);
    let shape = refused(experts.enqueue(&mut ctx, x.view(), routed, narrow.view_mut(), false));
    assert!(matches!(shape, LaunchError::Shape { .. }), "{shape}");
    let too_few = refused(experts.enqueue(&mut ctx, x.view(), Routed { top_k: 3, ..routed }, y.view_mut(), false));
    assert!(matches!(too_few, LaunchError::Elements { .. }), "{too_few}");
    let bytes: &[u8] = bytemuck::cast_slice(&case.down);
    let other = pack(Matrix::new(bytes, 8 * 128, 64).unwrap(), &Histogram::of(bytes)).unwrap();
    let upload = || DevicePacked::upload(&stream, &other).unwrap();
    assert!(matches!(refused(Experts::new(kernels, case.shape, upload(), upload())), LaunchError::Shape { .. }));
}
