//! Layers in borrowed memory and on borrowed streams: the bits equal those of layers that the runtime owns, at any
//! batch, in graphs, and on several streams.

use std::{thread, time::Instant};

use crate::harness::{Random, Weights, bf16, gpu, refused, stream};
use unweight_codegen::{
    VariantSpec,
    family::Instruction,
    plan::{GemmShape, Plan},
    spec::{Epilogue, GemmMmaSpec, GemmWgmmaSpec, Op, catalog},
};
use unweight_format::{
    Histogram, Matrix, TileGrid,
    bundle::{self, Bundle, CompressOptions, Profile, Silent},
    raw::packed::{self, ROW_BLOCKS, TILE_BYTES, Window},
};
use unweight_rt::{
    DeviceBuffer, DeviceMatrix, Expand, KernelSet, LaunchError, LayerBuilder, Linear, LoadOptions, Loader, Merge,
    Stream,
    env::Env,
    interop::{Interop, PackedAt, Scratch},
    raw::{
        choose::{
            candidates::PackedUse,
            table::{MeasuredRow, MeasuredTable},
        },
        ops::pack::{PackError, Packer},
    },
};

/// A layer with one launch, and layers that split tiles at some batches.
const SHAPES: [(u32, u32); 3] = [(64, 64), (1024, 4096), (4096, 4096)];
const BATCHES: [u32; 12] = [1, 2, 7, 8, 33, 64, 129, 192, 300, 1024, 2048, 5000];
/// Less than the largest batch, which therefore runs in several parts.
const MAX_BATCH: u32 = 2048;

/// The default, and weights that are expanded for cuBLAS above batch 64, as on architectures without `wgmma`.
const EXPANSIONS: [Expand; 2] = [Expand::Model, Expand::Above(64)];

fn options(expand: Expand) -> LoadOptions {
    LoadOptions::default().max_batch(MAX_BATCH).expand(expand)
}

/// Returns kernels whose dispatch follows this table where it has a row.
fn kernels(table: MeasuredTable) -> KernelSet {
    KernelSet::open(gpu().device(), Env::process().expect("the environment")).with_table(table)
}

fn interop(expand: Expand, table: MeasuredTable) -> Interop {
    Interop::new(kernels(table), options(expand)).unwrap_or_else(|error| panic!("{error}"))
}

/// Returns a catalogued variant that needs a workspace for this problem (stream-K); `None` on architectures without
/// one.
fn stream_k(problem: GemmShape) -> Option<VariantSpec> {
    let info = gpu().device().info();
    let needs_workspace = |spec: &VariantSpec| {
        let is_product = matches!(spec.op, Op::GemmWgmma(op) if !op.dump);
        is_product && Plan::new(spec).is_ok_and(|plan| plan.workspace(problem, info.sms).bytes > 0)
    };
    catalog::on::<GemmWgmmaSpec>(info.arch).find(needs_workspace)
}

/// Returns a table that selects [`stream_k`] for large batches of a shape, whatever table ships for this device. Empty
/// if there is no such variant.
fn stream_k_table((n, k): (u32, u32)) -> MeasuredTable {
    let info = gpu().device().info();
    let pdl = info.arch.has(Instruction::DependentLaunch);
    let row = |m: u32| Some(MeasuredRow { n, k, m, pdl, variant: stream_k(GemmShape { m, n, k })? });
    MeasuredTable { device: info.name.clone(), rows: [129, 192, 300, 1024, 2048].into_iter().filter_map(row).collect() }
}

/// Sections in memory that represents a framework's, filled with ones.
struct Sections {
    packed: DeviceBuffer<u8>,
    heads: DeviceBuffer<u32>,
    escapes: DeviceBuffer<u32>,
}

impl Sections {
    fn new(stream: &Stream, grid: TileGrid) -> Self {
        let words = Packer::escape_words_max(grid);
        let mut sections = Self {
            packed: DeviceBuffer::zeroed(stream, grid.tiles() * TILE_BYTES).unwrap(),
            heads: DeviceBuffer::zeroed(stream, grid.tiles() * ROW_BLOCKS).unwrap(),
            escapes: DeviceBuffer::zeroed(stream, words).unwrap(),
        };
        sections.packed.fill_bytes(stream, 0xff).unwrap();
        sections.heads.fill_bytes(stream, 0xff).unwrap();
        sections.escapes.fill_bytes(stream, 0xff).unwrap();
        stream.synchronize().unwrap();
        sections
    }

    fn at(&self, escape_words: usize) -> PackedAt {
        PackedAt {
            packed: self.packed.address(),
            escape_heads: self.heads.address(),
            escapes: self.escapes.address(),
            escape_words,
        }
    }
}

/// A layer in borrowed memory with that memory, and the same layer owned by the runtime.
struct Case {
    shape: (u32, u32),
    interop: Interop,
    layer: Linear,
    owned: Linear,
    _sections: Sections,
}

impl Case {
    /// Makes a case whose large batches need scratch memory: for stream-K if the architecture has it, and for expanded
    /// weights.
    fn with_scratch(stream: &Stream, expand: Expand) -> Self {
        let shape = SHAPES[2];
        Self::new(stream, shape, Weights::TRAINED, expand, stream_k_table(shape))
    }

    /// Returns whether some batch of [`Case::with_scratch`] needs scratch memory.
    fn has_scratch(expand: Expand) -> bool {
        expand != Expand::Model || !stream_k_table(SHAPES[2]).rows.is_empty()
    }

    fn new(stream: &Stream, shape: (u32, u32), kind: Weights, expand: Expand, table: MeasuredTable) -> Self {
        let (n, k) = shape;
        let set = kernels(table.clone());
        let interop = interop(expand, table);
        let bytes = kind.bytes((n * k) as usize, 7);
        let matrix = Matrix::new(&bytes, n as usize, k as usize).unwrap();
        let weights = DeviceMatrix::upload(stream, matrix).unwrap();
        let sections = Sections::new(stream, matrix.grid());
        let to = sections.at(sections.escapes.len());
        // SAFETY: the buffers have these sizes, and nothing else uses them at the same time.
        let (window, words) = unsafe { interop.pack_at(weights.data().address(), shape, to) }
            .unwrap_or_else(|error| panic!("{shape:?}: {error}"));
        let expected = packed::pack(matrix, &Histogram::of(&bytes)).unwrap();
        assert_eq!(window, expected.window());
        assert_eq!(sections.packed.to_host(stream).unwrap(), expected.packed());
        let bytes_of = |words: Vec<u32>| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
        assert_eq!(bytes_of(sections.heads.to_host(stream).unwrap()), expected.escape_heads());
        assert_eq!(bytes_of(sections.escapes.read(stream, 0, words).unwrap()), expected.escapes());

        // SAFETY: the sections are dropped after the layer.
        let layer = unsafe { interop.layer(shape, window, sections.at(words)) }.unwrap();
        let back = DeviceMatrix::zeroed(stream, n, k).unwrap();
        // SAFETY: the buffer has this shape.
        unsafe { interop.unpack_at(&layer, back.data().address()) }.unwrap();
        assert_eq!(back.to_host(stream).unwrap(), weights.to_host(stream).unwrap(), "unpacking restores the weights");

        let mut builder = LayerBuilder::new(&set, stream, options(expand)).unwrap();
        let owned = builder.layer("owned", &[weights.view()], Merge::Rows).unwrap();
        Self { shape, interop, layer, owned, _sections: sections }
    }

    fn x(&self, stream: &Stream, m: u32) -> DeviceMatrix {
        let mut random = Random::new(m.into());
        let values: Vec<u16> = (0..m * self.shape.1).map(|_| bf16(random.normal())).collect();
        DeviceMatrix::from_host(stream, m, self.shape.1, &values).unwrap()
    }

    /// Returns the output of the runtime's own layer.
    fn expected(&self, stream: &Stream, x: &DeviceMatrix, before: u8, epilogue: Epilogue) -> Vec<u16> {
        let mut ctx = unweight_rt::ExecContext::new(stream, self.owned.context_size()).unwrap();
        let mut y = DeviceMatrix::zeroed(stream, x.rows(), self.shape.0).unwrap();
        y.fill_bytes(stream, before).unwrap();
        self.owned.enqueue(&mut ctx, x.view(), y.view_mut(), epilogue).unwrap();
        y.to_host(stream).unwrap()
    }

    /// Returns scratch memory for a batch, filled with ones, because its contents do not matter.
    fn scratch(&self, stream: &Stream, m: u32, epilogue: Epilogue) -> DeviceBuffer<u8> {
        let bytes = self.interop.scratch_bytes(&self.layer, m, epilogue).unwrap();
        let mut scratch = DeviceBuffer::zeroed(stream, bytes as usize).unwrap();
        scratch.fill_bytes(stream, 0xff).unwrap();
        scratch
    }

    fn enqueue(&self, stream: &Stream, x: &DeviceMatrix, y: &DeviceMatrix, scratch: &DeviceBuffer<u8>, to: Epilogue) {
        let operands = (x.data().address(), x.rows(), y.data().address());
        let scratch = Scratch { address: scratch.address(), bytes: scratch.len() as u64 };
        // SAFETY: the buffers have these shapes, are on this device, and live until the callers have synchronized.
        unsafe { self.interop.enqueue(&self.layer, stream.handle(), operands, scratch, to) }
            .unwrap_or_else(|error| panic!("{:?} at {}: {error}", self.shape, x.rows()));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn borrowed_layers_equal_owned_layers() {
    let stream = stream(gpu());
    let kinds = [Weights::TRAINED, Weights::TRAINED, Weights::FewExponents];
    let cases = EXPANSIONS.into_iter().flat_map(|expand| SHAPES.into_iter().zip(kinds).map(move |case| (case, expand)));
    for ((shape, kind), expand) in cases {
        let case = Case::new(&stream, shape, kind, expand, MeasuredTable::default());
        for m in BATCHES {
            let scratch_bytes = case.interop.scratch_bytes(&case.layer, m, Epilogue::Store).unwrap();
            let weights = u64::from(shape.0) * u64::from(shape.1) * 2 + (32 << 20);
            assert_eq!(
                scratch_bytes >= weights,
                expand != Expand::Model && m > 64,
                "{shape:?} m = {m}: {scratch_bytes} B"
            );
            let x = case.x(&stream, m);
            // 0x3c3c is a number that is small compared with the sums.
            for (epilogue, before) in [(Epilogue::Store, 0xff), (Epilogue::StoreAdd, 0x3c)] {
                let expected = case.expected(&stream, &x, before, epilogue);
                let mut y = DeviceMatrix::zeroed(&stream, m, shape.0).unwrap();
                let scratch = case.scratch(&stream, m, epilogue);
                for round in 0..3 {
                    y.fill_bytes(&stream, before).unwrap();
                    case.enqueue(&stream, &x, &y, &scratch, epilogue);
                    assert!(y.to_host(&stream).unwrap() == expected, "{shape:?} m = {m} {epilogue:?}, turn {round}");
                }
            }
        }
    }
}

/// A bias gives the bits of a Y that contains it in each row.
#[test]
#[ignore = "needs a GPU"]
fn a_bias_equals_rows_of_it() {
    let stream = stream(gpu());
    for (shape, expand) in EXPANSIONS.into_iter().flat_map(|expand| SHAPES.map(|shape| (shape, expand))) {
        let case = Case::new(&stream, shape, Weights::TRAINED, expand, MeasuredTable::default());
        let mut random = Random::new(11);
        let bias: Vec<u16> = (0..shape.0).map(|_| bf16(random.normal())).collect();
        let bias = DeviceMatrix::from_host(&stream, 1, shape.0, &bias).unwrap();
        for m in BATCHES {
            let is_direct = expand == Expand::Model || m <= 64;
            assert_eq!(case.interop.takes_bias(&case.layer, m), is_direct, "{shape:?} m = {m} {expand:?}");
            if !is_direct {
                continue;
            }
            let x = case.x(&stream, m);
            let mut ctx = unweight_rt::ExecContext::new(&stream, case.owned.context_size()).unwrap();
            let rows = bias.to_host(&stream).unwrap().repeat(m as usize);
            let mut expected = DeviceMatrix::from_host(&stream, m, shape.0, &rows).unwrap();
            case.owned.enqueue(&mut ctx, x.view(), expected.view_mut(), Epilogue::StoreAdd).unwrap();
            let expected = expected.to_host(&stream).unwrap();
            let mut y = DeviceMatrix::zeroed(&stream, m, shape.0).unwrap();
            let scratch = case.scratch(&stream, m, Epilogue::StoreAdd);
            for round in 0..3 {
                y.fill_bytes(&stream, 0xff).unwrap();
                let rows = (x.data().address(), m, y.data().address());
                let at = Scratch { address: scratch.address(), bytes: scratch.len() as u64 };
                // SAFETY: the buffers have these shapes, are on this device, and live until `to_host` has waited.
                let enqueued = unsafe {
                    let bias = bias.data().address();
                    case.interop.enqueue_with_bias(&case.layer, stream.handle(), rows, at, bias)
                };
                enqueued.unwrap_or_else(|error| panic!("{shape:?} m = {m}: {error}"));
                assert!(y.to_host(&stream).unwrap() == expected, "{shape:?} m = {m}, round {round}");
            }
        }
    }
}

/// A measured table applies to layers of bundles, of matrices and of borrowed memory.
#[test]
#[ignore = "needs a GPU"]
fn measured_table_is_used_by_every_layer() {
    let stream = stream(gpu());
    let (info, (n, k)) = (gpu().device().info(), SHAPES[1]);
    // 64 rows for a batch of one: no cost model selects this.
    let unusual = |spec: &VariantSpec| matches!(spec.op, Op::GemmMma(op) if op.batch_tile.get() == 64 && !op.dump);
    let variant = catalog::on::<GemmMmaSpec>(info.arch).find(unusual).unwrap();
    let pdl = info.arch.has(Instruction::DependentLaunch);
    let rows = vec![MeasuredRow { n, k, m: 1, pdl, variant }];
    let kernels = || kernels(MeasuredTable { device: info.name.clone(), rows: rows.clone() });
    let packed_use = PackedUse { escapes: true, pdl, epilogue: Epilogue::Store };
    let (expected, set) = (packed_use.of(variant), kernels());

    let bytes = Weights::TRAINED.bytes((n * k) as usize, 7);
    let matrix = Matrix::new(&bytes, n as usize, k as usize).unwrap();
    let weights = DeviceMatrix::upload(&stream, matrix).unwrap();
    let mut builder = LayerBuilder::new(&set, &stream, options(Expand::Model)).unwrap();
    let built = builder.layer("owned", &[weights.view()], Merge::Rows).unwrap();
    assert_eq!(built.variant(1, Epilogue::Store), expected);
    assert_ne!(built.variant(2, Epilogue::Store), expected, "the table has no row for this batch");

    let interop = Interop::new(kernels(), options(Expand::Model)).unwrap();
    let sections = Sections::new(&stream, matrix.grid());
    let to = sections.at(sections.escapes.len());
    // SAFETY: the buffers have these sizes, and nothing else uses them at the same time.
    let (window, words) = unsafe { interop.pack_at(weights.data().address(), (n, k), to) }.unwrap();
    // SAFETY: the sections are dropped after the layer.
    let layer = unsafe { interop.layer((n, k), window, sections.at(words)) }.unwrap();
    assert_eq!(layer.variant(1, Epilogue::Store), expected);

    let home = tempfile::tempdir().unwrap();
    let header = format!(r#"{{"w":{{"dtype":"BF16","shape":[{n},{k}],"data_offsets":[0,{}]}}}}"#, bytes.len());
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &bytes].concat();
    std::fs::create_dir(home.path().join("model")).unwrap();
    std::fs::write(home.path().join("model/model.safetensors"), file).unwrap();
    let folder = home.path().join("bundle");
    let compress = CompressOptions::new(Profile::Packed);
    bundle::compress(&home.path().join("model"), &folder, &compress, &Silent).unwrap();
    let bundle = Bundle::open(&folder).unwrap();
    let (mut loader, _) = Loader::new(&set, &stream, &bundle, options(Expand::Model), &|_| {}).unwrap();
    assert_eq!(loader.load("w").unwrap().variant(1, Epilogue::Store), expected);
}

#[test]
#[ignore = "needs a GPU"]
fn graphs_run_concurrently_with_each_other_and_a_stream() {
    let stream = stream(gpu());
    for expand in EXPANSIONS {
        check_concurrent_graphs(&stream, &Case::with_scratch(&stream, expand), Case::has_scratch(expand));
    }
}

fn check_concurrent_graphs(stream: &Stream, case: &Case, has_scratch: bool) {
    let mut with_scratch = 0;
    for m in [1, 64, 192, 300, 1024, 5000] {
        let x = case.x(stream, m);
        let expected = case.expected(stream, &x, 0xff, Epilogue::Store);
        let mut runs = Vec::new();
        for _ in 0..2 {
            let graph_stream = gpu().device().stream().unwrap();
            let y = DeviceMatrix::zeroed(stream, m, case.shape.0).unwrap();
            let scratch = case.scratch(stream, m, Epilogue::Store);
            stream.synchronize().unwrap();
            let graph = graph_stream.capture(|| {
                case.enqueue(&graph_stream, &x, &y, &scratch, Epilogue::Store);
                Ok(())
            });
            runs.push((graph.unwrap(), y, scratch));
        }
        with_scratch += usize::from(!runs[0].2.is_empty());
        let eager = DeviceMatrix::zeroed(stream, m, case.shape.0).unwrap();
        let scratch = case.scratch(stream, m, Epilogue::Store);
        stream.synchronize().unwrap();
        for _ in 0..50 {
            for (graph, _, _) in &runs {
                // SAFETY: the graph has its own stream and memory, and is waited for below.
                unsafe { graph.launch() }.unwrap();
            }
            case.enqueue(stream, &x, &eager, &scratch, Epilogue::Store);
        }
        gpu().device().synchronize().unwrap();
        for (index, y) in runs.iter().map(|run| &run.1).chain([&eager]).enumerate() {
            assert!(y.to_host(stream).unwrap() == expected, "m = {m}, {index}");
        }
    }
    assert_eq!(with_scratch > 0, has_scratch);
}

/// The launches of one capture, in sequence and on a second stream, and two captures of one stream.
#[test]
#[ignore = "needs a GPU"]
fn concurrent_launches_of_a_graph_share_no_counters() {
    let stream = stream(gpu());
    let case = Case::with_scratch(&stream, Expand::Model);
    for m in [192, 300, 1024] {
        let bytes = case.interop.scratch_bytes(&case.layer, m, Epilogue::Store).unwrap();
        assert_eq!(bytes > 0, Case::has_scratch(Expand::Model), "m = {m}");
        let x = case.x(&stream, m);
        let expected = case.expected(&stream, &x, 0xff, Epilogue::Store);
        let (first, second) = (gpu().device().stream().unwrap(), gpu().device().stream().unwrap());
        let mut runs = Vec::new();
        for _ in 0..2 {
            let outputs: Vec<_> = (0..6)
                .map(|_| {
                    let y = DeviceMatrix::zeroed(&stream, m, case.shape.0).unwrap();
                    (y, case.scratch(&stream, m, Epilogue::Store))
                })
                .collect();
            stream.synchronize().unwrap();
            let graph = first.capture(|| {
                second.wait_for(&first)?;
                for (index, (y, scratch)) in outputs.iter().enumerate() {
                    case.enqueue(if index % 2 == 0 { &first } else { &second }, &x, y, scratch, Epilogue::Store);
                }
                first.wait_for(&second)
            });
            runs.push((graph.unwrap(), outputs));
        }
        for round in 0..200 {
            for (graph, outputs) in &mut runs {
                if round % 50 == 0 {
                    for (y, _) in outputs.iter_mut() {
                        y.fill_bytes(&stream, 0xff).unwrap();
                    }
                    stream.synchronize().unwrap();
                }
                // SAFETY: each graph has its own memory, runs in order on its stream, and is waited for below.
                unsafe { graph.launch() }.unwrap();
            }
            if round % 50 == 49 {
                gpu().device().synchronize().unwrap();
                for (index, (y, _)) in runs.iter().flat_map(|run| &run.1).enumerate() {
                    assert!(y.to_host(&stream).unwrap() == expected, "m = {m}, turn {round}, output {index}");
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn threads_with_own_streams_do_not_interfere() {
    let stream = stream(gpu());
    for expand in EXPANSIONS {
        check_concurrent_threads(&Case::with_scratch(&stream, expand));
    }
}

fn check_concurrent_threads(case: &Case) {
    let start = Instant::now();
    thread::scope(|scope| {
        for m in [1, 8, 129, 300, 1024, 2048] {
            scope.spawn(move || {
                let stream = gpu().device().stream().unwrap();
                let x = case.x(&stream, m);
                let expected = case.expected(&stream, &x, 0xff, Epilogue::Store);
                let mut y = DeviceMatrix::zeroed(&stream, m, case.shape.0).unwrap();
                let scratch = case.scratch(&stream, m, Epilogue::Store);
                for _ in 0..100 {
                    y.fill_bytes(&stream, 0xff).unwrap();
                    case.enqueue(&stream, &x, &y, &scratch, Epilogue::Store);
                    assert!(y.to_host(&stream).unwrap() == expected, "m = {m}");
                }
            });
        }
    });
    assert!(start.elapsed().as_secs() < 120);
}

#[test]
#[ignore = "needs a GPU"]
fn too_small_scratch_and_bad_operands_are_rejected() {
    let stream = stream(gpu());
    for expand in EXPANSIONS.into_iter().filter(|expand| Case::has_scratch(*expand)) {
        check_refusals(&stream, &Case::with_scratch(&stream, expand));
    }
}

fn check_refusals(stream: &Stream, case: &Case) {
    let m = BATCHES.into_iter().find(|m| case.interop.scratch_bytes(&case.layer, *m, Epilogue::Store).unwrap() > 0);
    let m = m.expect("some batch needs scratch memory");
    let (x, y) = (case.x(stream, m), DeviceMatrix::zeroed(stream, m, case.shape.0).unwrap());
    let scratch = case.scratch(stream, m, Epilogue::Store);
    let (need, have) = (scratch.len() as u64, scratch.len() as u64 - 1);
    let enqueue = |(x, m, y), scratch, epilogue| {
        // SAFETY: a rejected call accesses nothing.
        refused(unsafe { case.interop.enqueue(&case.layer, stream.handle(), (x, m, y), scratch, epilogue) })
    };
    let (x, y) = (x.data().address(), y.data().address());
    let small_scratch = Scratch { address: scratch.address(), bytes: have };
    let too_small = LaunchError::Room { buffer: "bytes of scratch", need, have };
    assert_eq!(enqueue((x, m, y), small_scratch, Epilogue::Store), too_small);
    let whole = Scratch { address: scratch.address(), bytes: need };
    assert!(matches!(enqueue((x + 2, m, y), whole, Epilogue::Store), LaunchError::Alignment { operand: "x", .. }));
    assert!(matches!(enqueue((x, m, x), whole, Epilogue::Store), LaunchError::Overlap { .. }));
    assert!(matches!(enqueue((x, m, y), whole, Epilogue::SiluMul), LaunchError::Epilogue { .. }));
    let unaligned = Scratch { address: scratch.address() + 16, bytes: need };
    assert!(matches!(enqueue((x, m, y), unaligned, Epilogue::Store), LaunchError::Alignment { .. }));

    let bytes = Weights::HeavyTails.bytes(128 * 192, 5);
    let weights = DeviceMatrix::upload(stream, Matrix::new(&bytes, 128, 192).unwrap()).unwrap();
    let sections = Sections::new(stream, TileGrid::new(128, 192).unwrap());
    let address = weights.data().address();
    // SAFETY: the buffers have these sizes.
    let result = unsafe { case.interop.pack_at(address, (128, 192), sections.at(sections.escapes.len())) };
    assert!(matches!(result, Err(PackError::Unpackable(_))));
    // SAFETY: the call fails before any access.
    let result = unsafe { case.interop.pack_at(address, (128, 192), sections.at(1)) };
    let Err(PackError::Device(error)) = result else { panic!("{result:?}") };
    assert!(matches!(error.launch_error(), Some(LaunchError::Room { .. })), "{error}");
    // SAFETY: the call fails before any access.
    let result = unsafe { case.interop.layer((100, 192), Window::new(100).unwrap(), sections.at(0)) };
    assert!(matches!(refused(result), LaunchError::Multiple { .. } | LaunchError::Elements { .. }));
}
