//! Packing, unpacking and releasing pages of a KV cache, compared with the oracle: every head size, pages that are hard
//! to pack, hostile tables, errors.

use unweight_bench::{
    attention::{Decode, DeviceProblem, PAD, Problem},
    kv::{Cache, DevicePages, Heads, Job, PackedPages, page, salt, set_index},
};
use unweight_codegen::{VariantSpec, kv::packed::RECORD_KIND, spec::HeadDim};
use unweight_rt::{
    DeviceBuffer, DeviceError, LaunchError, MatrixMut, RowFault, Stream,
    raw::ops::{
        attention::{Attention, TokenRows},
        kv::{KvLayer, KvShape},
        kv_pack::KvPack,
        kv_packed::{NO_PAGE, PackedKv},
        kv_unpack::KvUnpack,
    },
};

use crate::harness::{Random, context, fresh, gpu, guard_is_intact, poison, refused, stream};

fn named(name: &str) -> VariantSpec {
    format!("uw_sm90a_{name}").parse().unwrap()
}

fn pack(name: &str) -> KvPack {
    KvPack::new(gpu().get(&named(&format!("kv_pack_{name}"))).unwrap()).unwrap()
}

fn unpack(name: &str) -> KvUnpack {
    KvUnpack::new(gpu().get(&named(&format!("kv_unpack_{name}"))).unwrap()).unwrap()
}

fn attention(name: &str) -> Attention {
    Attention::new(gpu().get(&named(&format!("attention_decode_{name}"))).unwrap()).unwrap()
}

fn pages(random: &mut Random, heads: Heads, count: u32) -> Vec<u16> {
    (0..count).flat_map(|_| page(random, heads)).collect()
}

fn numbers(stream: &Stream, values: &[u32]) -> DeviceBuffer<u32> {
    DeviceBuffer::from_host(stream, values).unwrap()
}

/// The BF16 pages of a layer on the device.
struct Source {
    bf16: Vec<u16>,
    device: DeviceBuffer<u16>,
    shape: KvShape,
}

impl Source {
    fn new(stream: &Stream, random: &mut Random, heads: Heads, (layers, count): (u32, u32)) -> Self {
        let bf16 = pages(random, heads, layers * count);
        let device = DeviceBuffer::from_host(stream, &bf16).unwrap();
        Self { bf16, device, shape: heads.shape(count).unwrap() }
    }

    fn layer(&mut self) -> KvLayer<'_> {
        KvLayer::new(&mut self.device, self.shape, 0).unwrap()
    }

    fn job(&self, heads: Heads, (layer, page): (u32, u32), from: u32) -> Job {
        Job::new(heads, (layer, page), heads.page_of(&self.bf16, (layer * self.shape.pages() + from) as usize))
    }
}

/// Returns the fault of a table; panics on any other error.
fn page_fault(result: Result<(), DeviceError>) -> Option<u32> {
    match result {
        Ok(()) => None,
        Err(DeviceError::Row { row, what: RowFault::Page }) => Some(row),
        Err(error) => panic!("{error}"),
    }
}

#[test]
#[ignore = "needs a GPU"]
fn chunks_are_packed_as_by_the_oracle_and_restored() {
    const COUNT: u32 = 9;
    let stream = stream(gpu());
    for head_dim in HeadDim::ALL.map(HeadDim::get) {
        for pdl in ["", "_pdl"] {
            let seed = fresh();
            let what = format!("d{head_dim}{pdl}, seed {seed}");
            let (heads, random) = (Heads { head_dim, kv_heads: 3 }, &mut Random::new(seed));
            let mut source = Source::new(&stream, random, heads, (1, COUNT + 2));
            let before = Cache::new(heads, (1, COUNT), (61, 61), 0);
            let mut device = before.upload(&stream).unwrap();
            let table: Vec<u32> = (0..COUNT).rev().collect();
            let (on_device, mut lost) = (numbers(&stream, &table), numbers(&stream, &[0]));
            let mut ctx = context(&stream);
            let chunk = pack(&format!("chunk_d{head_dim}{pdl}"));
            // All pages in two launches; the second one begins inside the table.
            for (at, count) in [(0, 4), (4, COUNT - 4)] {
                let tables = (&on_device, at, count);
                chunk.chunk(&mut ctx, (source.layer(), 2 + at), device.layers(), tables, &mut lost).unwrap();
            }
            ctx.synchronize().unwrap();
            let after = before.read_from(&stream, &mut device).unwrap();
            let jobs: Vec<Job> = (0..).zip(&table).map(|(i, &page)| source.job(heads, (0, page), 2 + i)).collect();
            let counts = before.check_packed(&after, &jobs).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert!(counts.bf16 > 0 && counts.with_slots > 0 && counts.plain > 0, "{what}: {counts:?}");
            assert_eq!(lost.to_host(&stream).unwrap(), [0], "{what}");

            let mut out = DeviceBuffer::<u16>::zeroed(&stream, COUNT as usize * heads.page_elements()).unwrap();
            poison(&stream, &mut out);
            let layer = KvLayer::new(&mut out, heads.shape(COUNT).unwrap(), 0).unwrap();
            let kernel = unpack(&format!("d{head_dim}{pdl}"));
            kernel.enqueue(&mut ctx, device.layers(), (&on_device, COUNT), layer).unwrap();
            ctx.synchronize().unwrap();
            guard_is_intact(&stream, &out, &what);
            assert!(out.to_host(&stream).unwrap() == source.bf16[2 * heads.page_elements()..], "{what}: other bits");
        }
    }
}

/// Positions of the rows of a step.
const POSITIONS: [u32; 7] = [63, 5, 127, PAD, 62, 63, 64];
const TABLE_PAGES: u32 = 2;
const ROWS: u32 = POSITIONS.len() as u32;
/// Rows whose newest token fills a page.
const FULL: [u32; 3] = [0, 2, 5];

/// The pages that a step packs, and their source.
struct Step {
    hot: Source,
    hot_table: Vec<u32>,
    table: Vec<u32>,
}

impl Step {
    fn new(stream: &Stream, random: &mut Random, heads: Heads, layers: u32) -> Self {
        let hot = Source::new(stream, random, heads, (layers, ROWS + 1));
        let hot_table = (0..ROWS).map(|row| (row + 3) % (ROWS + 1)).collect();
        Self { hot, hot_table, table: (0..TABLE_PAGES * ROWS).rev().collect() }
    }

    fn jobs(&self, heads: Heads, layers: u32) -> Vec<(usize, Job)> {
        let of = |row: u32| {
            let page = self.table[(row * TABLE_PAGES + POSITIONS[row as usize] / 64) as usize];
            (0..layers).map(move |layer| (row, (layer, page)))
        };
        let job = |(row, to): (u32, (u32, u32))| (row as usize, self.hot.job(heads, to, self.hot_table[row as usize]));
        FULL.into_iter().flat_map(of).map(job).collect()
    }

    /// Runs the step. Returns the lost rows and the reported fault.
    fn run(&mut self, stream: &Stream, kernel: &KvPack, cache: &mut PackedKv) -> (Vec<u32>, Option<u32>) {
        let mut ctx = context(stream);
        let [positions, table, hot_table] =
            [&POSITIONS[..], &self.table, &self.hot_table].map(|values| numbers(stream, values));
        let mut lost = numbers(stream, &[0; ROWS as usize]);
        let rows = TokenRows { positions: &positions, page_table: &table, table_pages: TABLE_PAGES };
        kernel.step(&mut ctx, (self.hot.layer(), &hot_table), cache.layers(), rows, ROWS, &mut lost).unwrap();
        let fault = page_fault(ctx.synchronize());
        (lost.to_host(stream).unwrap(), fault)
    }
}

#[test]
#[ignore = "needs a GPU"]
fn steps_pack_full_pages_of_all_layers() {
    const LAYERS: u32 = 4;
    let stream = stream(gpu());
    for head_dim in HeadDim::ALL.map(HeadDim::get) {
        for (pdl, free) in [("", 101), ("_pdl", 101), ("_pdl", 2), ("", 0)] {
            let seed = fresh();
            let what = format!("d{head_dim}{pdl}, {free} units, seed {seed}");
            let heads = Heads { head_dim, kv_heads: 2 };
            let mut step = Step::new(&stream, &mut Random::new(seed), heads, LAYERS);
            let before = Cache::new(heads, (LAYERS, TABLE_PAGES * ROWS), (101, free), 0);
            let mut device = before.upload(&stream).unwrap();
            let kernel = pack(&format!("step_d{head_dim}{pdl}"));
            let (lost, fault) = step.run(&stream, &kernel, &mut device);
            let after = before.read_from(&stream, &mut device).unwrap();
            let jobs = step.jobs(heads, LAYERS);
            let all: Vec<&Job> = jobs.iter().map(|(_, job)| job).collect();
            let counts = before.check_packed(&after, &all).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_eq!(fault, None, "{what}");
            let mut expected = vec![0; ROWS as usize];
            jobs.iter().filter(|(_, job)| job.is_lost(&after)).for_each(|(row, _)| expected[*row] = 1);
            assert_eq!(lost, expected, "{what}");
            match free {
                101 => assert!(counts.bf16 > 0 && counts.lost == 0, "{what}: {counts:?}"),
                _ => assert!(counts.bf16 == free as usize && counts.lost > 0, "{what}: {counts:?}"),
            }
            release(&stream, heads, &after, &mut device, &what);
        }
    }
}

/// Releases the pages of a step: all units are free afterwards.
fn release(stream: &Stream, heads: Heads, before: &Cache, device: &mut PackedKv, what: &str) {
    let kernel = pack(&format!("release_d{}", heads.head_dim));
    let table: Vec<u32> = (0..TABLE_PAGES * ROWS).filter(|page| *page != 4).chain([NO_PAGE]).collect();
    let mut ctx = context(stream);
    // Pages that were never packed have records that no encoder writes; these are skipped.
    kernel.release(&mut ctx, device.layers(), &numbers(stream, &table), table.len() as u32).unwrap();
    ctx.synchronize().unwrap_or_else(|error| panic!("{what}: {error}"));
    let after = before.read_from(stream, device).unwrap();
    before.check_released(&after, &table).unwrap_or_else(|error| panic!("{what}: {error}"));
    let free = device.free_units(stream).unwrap();
    assert!(free >= before.free[0], "{what}");
}

#[test]
#[ignore = "needs a GPU"]
fn hostile_tables_of_packing_are_reported() {
    let stream = stream(gpu());
    let heads = Heads { head_dim: 64, kv_heads: 2 };
    let before = Cache::new(heads, (2, TABLE_PAGES * ROWS), (61, 61), 0);
    let kernel = pack("step_d64_pdl");
    let right = || Step::new(&stream, &mut Random::new(3), heads, 2);
    for (entry, page, fault) in [
        (0, before.pages, Some(0)),
        (2 * TABLE_PAGES + 1, 1 << 31, Some(2)),
        (5 * TABLE_PAGES, u32::MAX - 1, Some(5)),
        (5 * TABLE_PAGES, NO_PAGE, None),
    ] {
        let mut step = right();
        let jobs = step.jobs(heads, 2);
        step.table[entry as usize] = page;
        let mut device = before.upload(&stream).unwrap();
        assert_eq!(step.run(&stream, &kernel, &mut device).1, fault, "entry {entry}: {page}");
        let after = before.read_from(&stream, &mut device).unwrap();
        let left: Vec<&Job> =
            jobs.iter().filter(|(row, _)| *row as u32 != entry / TABLE_PAGES).map(|(_, job)| job).collect();
        before.check_packed(&after, &left).unwrap_or_else(|error| panic!("entry {entry}: {error}"));
    }
    let mut step = right();
    step.hot_table[2] = ROWS + 1;
    let mut device = before.upload(&stream).unwrap();
    assert_eq!(step.run(&stream, &kernel, &mut device).1, Some(2), "the fault of a missing hot page");

    let (mut ctx, mut lost) = (context(&stream), numbers(&stream, &[0]));
    let mut source = Source::new(&stream, &mut Random::new(4), heads, (1, 4));
    let (chunk, release) = (pack("chunk_d64_pdl"), pack("release_d64_pdl"));
    let one = Cache::new(heads, (1, 5), (61, 61), 0);
    let mut device = one.upload(&stream).unwrap();
    for (table, first, fault) in
        [([5, 1], 0, Some(0)), ([0, 1 << 31], 0, Some(1)), ([0, 1], 3, Some(1)), ([0, 1], 2, None)]
    {
        let tables = numbers(&stream, &table);
        chunk.chunk(&mut ctx, (source.layer(), first), device.layers(), (&tables, 0, 2), &mut lost).unwrap();
        assert_eq!(page_fault(ctx.synchronize()), fault, "{table:?} from {first}");
    }
    for (table, fault) in [([0, 5], Some(1)), ([u32::MAX - 1, 1], Some(0)), ([NO_PAGE, 1], None)] {
        release.release(&mut ctx, device.layers(), &numbers(&stream, &table), 2).unwrap();
        assert_eq!(page_fault(ctx.synchronize()), fault, "{table:?}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn hostile_caches_of_unpacking_are_reported() {
    let stream = stream(gpu());
    let heads = Heads { head_dim: 48, kv_heads: 2 };
    let bf16 = pages(&mut Random::new(fresh()), heads, 4);
    let right = Cache::of_pages(heads, &bf16, 0);
    let kernel = unpack("d48_pdl");
    let run = |table: &[u32], records: &[u8]| {
        let (mut ctx, mut device) = (context(&stream), right.upload(&stream).unwrap());
        device.records_mut().write(&stream, 0, records).unwrap();
        let mut out = DeviceBuffer::<u16>::zeroed(&stream, table.len() * heads.page_elements()).unwrap();
        poison(&stream, &mut out);
        let layer = KvLayer::new(&mut out, heads.shape(table.len() as u32).unwrap(), 0).unwrap();
        let count = table.len() as u32;
        kernel.enqueue(&mut ctx, device.layers(), (&numbers(&stream, table), count), layer).unwrap();
        let fault = page_fault(ctx.synchronize());
        guard_is_intact(&stream, &out, "unpacking");
        (fault, out.to_host(&stream).unwrap())
    };
    let elements = heads.page_elements();
    for page in [4, 1 << 31, u32::MAX] {
        let (fault, out) = run(&[0, page, 2], &right.records);
        assert_eq!(fault, Some(1), "page {page}");
        assert!(out[..elements] == bf16[..elements], "the page before");
        assert!(out[elements..2 * elements].iter().all(|value| *value == 0xffff), "the output of a missing page");
        assert!(out[2 * elements..] == bf16[2 * elements..3 * elements], "the page after");
    }
    // A kind that no encoder writes, and a unit outside the pool.
    for (kind, index) in [(3, 0), (255, 0), (1, right.units), (1, u32::MAX)] {
        let mut records = right.records.clone();
        let record = &mut records[heads.record_at(heads.page_units() + 1)..];
        record[RECORD_KIND] = kind;
        set_index(record, index);
        assert_eq!(run(&[0, 1], &records).0, Some(1), "kind {kind}, unit {index}");
    }
    // A lost unit is skipped without an error.
    let mut records = right.records.clone();
    let at = heads.record_at(heads.page_units());
    records[at..at + heads.record_bytes()].copy_from_slice(&heads.lost_record());
    let (fault, out) = run(&[1], &records);
    assert!(fault.is_none() && out[..heads.unit_values()].iter().all(|value| *value == 0xffff));
    assert!(out[heads.unit_values()..] == bf16[elements + heads.unit_values()..2 * elements]);
}

/// Makes a problem with its pages in both encodings.
fn both_caches(stream: &Stream, case: &Decode) -> (Problem, PackedPages, DeviceProblem, DevicePages) {
    let mut problem = Problem::new(case);
    salt(&mut problem, case.seed);
    let pages = PackedPages::of(&problem);
    let on_device = DeviceProblem::new(stream, &problem).unwrap();
    let device_pages = DevicePages::new(stream, &pages).unwrap();
    (problem, pages, on_device, device_pages)
}

#[test]
#[ignore = "needs a GPU"]
fn attention_reports_pages_that_a_packed_cache_does_not_have() {
    let stream = stream(gpu());
    for name in ["d128_w4p2c1", "d64_w4p4c2"] {
        let head_dim = if name.starts_with("d128") { 128 } else { 64 };
        let spec = packed_like(name);
        let attention = Attention::new(gpu().get(&spec).unwrap()).unwrap();
        let case = Decode { seed: fresh(), ..Decode::new(head_dim, 4, &[100, 300, 200]) };
        let columns = case.out_columns();
        let run = |damage: &dyn Fn(&Problem, &PackedPages, &mut DevicePages)| {
            let (problem, pages, on_device, mut device_pages) = both_caches(&stream, &case);
            damage(&problem, &pages, &mut device_pages);
            let mut ctx = context(&stream);
            let mut out = DeviceBuffer::<u16>::zeroed(&stream, 3 * columns).unwrap();
            poison(&stream, &mut out);
            let view = MatrixMut::new(&mut out, 3, columns as u32, columns as u64).unwrap();
            on_device.decode_from(&attention, &mut ctx, device_pages.cache().unwrap(), view).unwrap();
            (page_fault(ctx.synchronize()), out.to_host(&stream).unwrap())
        };
        let (fault, right) = run(&|_, _, _| ());
        assert_eq!(fault, None, "{spec}");
        for page in [1 << 20, 1 << 31, u32::MAX] {
            for entry in 0..4 {
                let (fault, out) = run(&|problem, _, pages| {
                    pages.tables()[0].write(&stream, problem.table_pages + entry, &[page]).unwrap();
                });
                assert_eq!(fault, Some(1), "{spec}: entry {entry}, page {page}");
                assert!(out[..columns] == right[..columns] && out[2 * columns..] == right[2 * columns..]);
            }
            let (fault, out) = run(&|_, _, pages| pages.tables()[1].write(&stream, 1, &[page]).unwrap());
            assert_eq!(fault, Some(1), "{spec}: hot page {page}");
            assert!(out[..columns] == right[..columns] && out[2 * columns..] == right[2 * columns..]);
        }
        // A record of a kind that no encoder writes.
        let (fault, _) = run(&|problem, packed, pages| {
            let unit = problem.table[problem.table_pages] as usize * packed.heads.page_units();
            pages.records().write(&stream, packed.heads.record_at(unit) + RECORD_KIND, &[9]).unwrap();
        });
        assert_eq!(fault, Some(1), "{spec}");
    }
}

/// Returns the same shape over packed pages.
fn packed_like(name: &str) -> VariantSpec {
    named(&format!("attention_decode_{name}_packed"))
}

#[test]
#[ignore = "needs a GPU"]
fn attention_refuses_the_other_cache() {
    let stream = stream(gpu());
    let mut ctx = context(&stream);
    let [bf16, packed] = ["d64_w4p4c1", "d64_w4p4c1_packed"].map(attention);
    let case = Decode::new(64, 4, &[70, 200]);
    let columns = case.out_columns() as u32;
    let (_, pages, mut on_device, mut device_pages) = both_caches(&stream, &case);
    let mut out = DeviceBuffer::<u16>::zeroed(&stream, 2 * columns as usize).unwrap();
    let caches = ["a packed KV cache", "a BF16 KV cache"];
    let [takes, got] = caches;
    assert_eq!(
        refused(on_device.decode(&packed, &mut ctx, view(&mut out, columns))),
        LaunchError::Source { takes, got }
    );
    let [got, takes] = caches;
    let result = on_device.decode_from(&bf16, &mut ctx, device_pages.cache().unwrap(), view(&mut out, columns));
    assert_eq!(refused(result), LaunchError::Source { takes, got });

    // Heads of another size, another number of heads, and a short table of hot pages.
    let large = attention("d128_w4p2c1_packed");
    let result = on_device.decode_from(&large, &mut ctx, device_pages.cache().unwrap(), view(&mut out, columns));
    assert_eq!(refused(result), LaunchError::HeadDimOf { takes: 128, cache: 64 });
    let one = Heads { head_dim: 64, kv_heads: 1 };
    let mut hot = DeviceBuffer::<u16>::zeroed(&stream, one.page_elements()).unwrap();
    let hot = KvLayer::new(&mut hot, one.shape(1).unwrap(), 0).unwrap();
    let result = on_device.decode_from(&packed, &mut ctx, device_pages.with_hot(hot), view(&mut out, columns));
    assert_eq!(refused(result), LaunchError::KvHeads { packed: [2, 64], bf16: [1, 64] });
    let short = PackedPages { hot_table: vec![0], ..pages };
    let mut device_pages = DevicePages::new(&stream, &short).unwrap();
    let result = on_device.decode_from(&packed, &mut ctx, device_pages.cache().unwrap(), view(&mut out, columns));
    assert_eq!(refused(result), LaunchError::Elements { buffer: "the table of hot pages", got: 1, expected: 2 });
}

fn view(out: &mut DeviceBuffer<u16>, columns: u32) -> MatrixMut<'_> {
    MatrixMut::new(out, 2, columns, columns.into()).unwrap()
}

#[test]
#[ignore = "needs a GPU"]
fn packing_refuses_operands_that_do_not_agree() {
    let stream = stream(gpu());
    let mut ctx = context(&stream);
    let heads = Heads { head_dim: 32, kv_heads: 2 };
    let mut cache = Cache::new(heads, (3, 4), (7, 7), 0).upload(&stream).unwrap();
    let (step, chunk, release) = (pack("step_d32"), pack("chunk_d32"), pack("release_d32"));
    let table = numbers(&stream, &[0, 1]);
    let mut lost = numbers(&stream, &[0, 0]);
    let short = |buffer, got, expected| LaunchError::Elements { buffer, got, expected };
    let source = |heads: Heads, layers: u32| Source::new(&stream, &mut Random::new(1), heads, (layers, 2));
    let (mut three, mut two) = (source(heads, 3), source(heads, 2));
    let mut other_heads = source(Heads { kv_heads: 1, ..heads }, 3);
    let long = numbers(&stream, &[63; 9]);
    let rows = |positions, page_table| TokenRows { positions, page_table, table_pages: 2 };
    let mut of_step = |kernel: &KvPack, hot: &mut Source, hot_table, rows, m, lost: &mut DeviceBuffer<u32>| {
        refused(kernel.step(&mut ctx, (hot.layer(), hot_table), cache.layers(), rows, m, lost))
    };
    let asked = of_step(&chunk, &mut three, &table, rows(&table, &long), 2, &mut lost);
    assert_eq!(asked, LaunchError::Step { takes: "chunk", asked: "step" });
    let refusal = of_step(&pack("step_d64"), &mut three, &table, rows(&table, &long), 2, &mut lost);
    assert_eq!(refusal, LaunchError::HeadDimOf { takes: 64, cache: 32 });
    let refusal = of_step(&step, &mut other_heads, &table, rows(&table, &long), 2, &mut lost);
    assert_eq!(refusal, LaunchError::KvHeads { packed: [2, 32], bf16: [1, 32] });
    // Hot pages of two layers for a cache of three.
    let elements = 2 * heads.page_elements() as u64;
    let refusal = of_step(&step, &mut two, &table, rows(&table, &long), 2, &mut lost);
    assert_eq!(refusal, LaunchError::Range { at: 0, len: 3 * elements, have: 2 * elements });
    let refusal = of_step(&step, &mut three, &table, rows(&table, &long), 3, &mut lost);
    assert_eq!(refusal, short("the positions", 2, 3));
    let refusal = of_step(&step, &mut three, &table, rows(&long, &table), 2, &mut lost);
    assert_eq!(refusal, short("the page table", 2, 4));
    let refusal = of_step(&step, &mut three, &table, rows(&long, &long), 3, &mut lost);
    assert_eq!(refusal, short("the table of hot pages", 2, 3));
    let refusal = of_step(&step, &mut three, &long, rows(&long, &long), 3, &mut lost);
    assert_eq!(refusal, short("the list of lost rows", 2, 3));

    assert_eq!(refused(cache.layer(3).map_err(DeviceError::from)), LaunchError::Range { at: 3, len: 1, have: 3 });
    let mut of_chunk = |kernel: &KvPack, source: &mut Source, tables, lost: &mut DeviceBuffer<u32>| {
        refused(kernel.chunk(&mut ctx, (source.layer(), 0), cache.layer(1).unwrap(), tables, lost))
    };
    let asked = of_chunk(&release, &mut three, (&table, 0, 1), &mut lost);
    assert_eq!(asked, LaunchError::Step { takes: "release", asked: "chunk" });
    assert_eq!(of_chunk(&chunk, &mut three, (&table, 1, 2), &mut lost), short("the page table", 2, 3));
    let refusal = of_chunk(&chunk, &mut other_heads, (&table, 0, 1), &mut lost);
    assert_eq!(refusal, LaunchError::KvHeads { packed: [2, 32], bf16: [1, 32] });
    let mut none = numbers(&stream, &[]);
    assert_eq!(of_chunk(&chunk, &mut three, (&table, 0, 1), &mut none), short("the list of lost rows", 0, 1));

    let asked = refused(step.release(&mut ctx, cache.layers(), &table, 1));
    assert_eq!(asked, LaunchError::Step { takes: "step", asked: "release" });
    assert_eq!(refused(release.release(&mut ctx, cache.layers(), &table, 3)), short("the page table", 2, 3));
}

#[test]
#[ignore = "needs a GPU"]
fn unpacking_refuses_operands_that_do_not_agree() {
    let stream = stream(gpu());
    let mut ctx = context(&stream);
    let heads = Heads { head_dim: 32, kv_heads: 2 };
    let mut cache = Cache::new(heads, (1, 4), (7, 0), 0).upload(&stream).unwrap();
    let table = numbers(&stream, &[0, 1, 2]);
    let mut run = |kernel: &KvUnpack, heads: Heads, count| {
        let mut out = DeviceBuffer::<u16>::zeroed(&stream, 2 * heads.page_elements()).unwrap();
        let layer = KvLayer::new(&mut out, heads.shape(2).unwrap(), 0).unwrap();
        refused(kernel.enqueue(&mut ctx, cache.layers(), (&table, count), layer))
    };
    let kernel = unpack("d32");
    let short = |buffer, got, expected| LaunchError::Elements { buffer, got, expected };
    assert_eq!(run(&kernel, heads, 4), short("the page table", 3, 4));
    assert_eq!(run(&kernel, heads, 3), short("the BF16 pages", 2, 3));
    let other = LaunchError::KvHeads { packed: [2, 32], bf16: [3, 32] };
    assert_eq!(run(&kernel, Heads { kv_heads: 3, ..heads }, 1), other);
    assert_eq!(run(&unpack("d48"), heads, 1), LaunchError::HeadDimOf { takes: 48, cache: 32 });
    let pack_kernel = gpu().get(&named("kv_pack_step_d32")).unwrap();
    let family = refused(KvUnpack::new(pack_kernel));
    assert_eq!(family, LaunchError::Family { wanted: "a kv_unpack kernel" });
    let unpack_kernel = gpu().get(&named("kv_unpack_d32")).unwrap();
    let family = refused(KvPack::new(unpack_kernel));
    assert_eq!(family, LaunchError::Family { wanted: "a kv_pack kernel" });
}
