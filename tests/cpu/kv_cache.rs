//! Packing and releasing pages of a KV cache in the simulator: the bytes equal the oracle's, hostile tables, and
//! planted bugs that must be caught.

use unweight_bench::kv::{Cache, Counts, Heads, Job, page, set_index};
use unweight_codegen::{
    VariantSpec,
    abi::KvPackArgs,
    kv::{
        PAGE_TOKENS,
        packed::{KIND_BF16, KIND_LOST, RECORD_HEAD, RECORD_KIND},
    },
    plan::GemmShape,
    spec::{HeadDim, KvPackStage, Op},
};
use unweight_format::testing::Random;

use crate::harness::{Buffer, CpuKernel, Edit, Run, spec};

pub mod attack;

/// A table entry without a page, and the position of a row without a token.
const NONE: u32 = u32::MAX;
/// Gap after each layer's packed pages and records in bytes, and after its bf16 pages in elements.
pub const GAP: usize = 128;
/// Fills bf16 pages that must not be read.
const POISON: u16 = 0x7fc1;

/// Returns a cache with gaps after the pages and records of each layer.
pub fn new_cache(heads: Heads, layers_and_pages: (u32, u32), units_and_free: (u32, u32)) -> Cache {
    Cache::new(heads, layers_and_pages, units_and_free, GAP)
}

/// A launch of `kv_pack`.
#[derive(Clone, Default)]
struct Call {
    /// bf16 pages `[layers][source_pages]`, with [`GAP`] elements after each layer.
    source: Vec<u16>,
    source_pages: u32,
    positions: Vec<u32>,
    table: Vec<u32>,
    table_pages: u32,
    hot_table: Vec<u32>,
    m: u32,
    first: u32,
    /// `step`: maximum number of blocks.
    blocks: u32,
}

struct Done {
    cache: Cache,
    lost: Vec<u32>,
    fault: u32,
}

impl Call {
    /// Returns a page of a layer.
    fn page(&self, heads: Heads, layer: u32, page: u32) -> &[u16] {
        let pitch = self.source_pages as usize * heads.page_elements() + GAP;
        heads.page_of(&self.source[layer as usize * pitch..], page as usize)
    }

    fn run(&self, kernel: &mut CpuKernel, spec: &VariantSpec, cache: &Cache, seed: u64) -> Result<Done, String> {
        let Op::KvPack(op) = spec.op else { panic!("{spec}") };
        let heads = cache.heads;
        let of = |numbers: &[u32]| Buffer::of(bytemuck::cast_slice(numbers));
        let source = Buffer::of(bytemuck::cast_slice(&self.source));
        let (packed, records) = (Buffer::of(&cache.packed), Buffer::of(&cache.records));
        let (unit_pages, free) = (Buffer::of(&cache.unit_pages), of(&cache.free));
        let (positions, table, hot_table) = (of(&self.positions), of(&self.table), of(&self.hot_table));
        let (lost, fault) = (Buffer::zeroed(self.m as usize * 4), Buffer::zeroed(4));
        let args = KvPackArgs {
            source: source.address(),
            packed: packed.address(),
            records: records.address(),
            unit_pages: unit_pages.address(),
            free_units: free.address(),
            positions: positions.address(),
            page_table: table.address(),
            hot_table: hot_table.address(),
            lost: lost.address(),
            fault: fault.address(),
            source_pitch: (self.source_pages as usize * heads.page_elements() + GAP) as u64,
            packed_pitch: cache.packed_pitch() as u64,
            record_pitch: cache.record_pitch() as u64,
            m: self.m,
            layers: cache.layers,
            kv_heads: heads.kv_heads,
            pages: cache.pages,
            source_pages: self.source_pages,
            table_pages: self.table_pages,
            units: cache.units,
            first: self.first,
        };
        let rows = match op.stage {
            KvPackStage::Step => self.blocks,
            KvPackStage::Chunk => self.m * heads.kv_heads * 2,
            KvPackStage::Release => self.m * cache.layers * heads.kv_heads * 2,
        };
        let inputs = [&source, &packed, &records, &unit_pages, &free, &positions, &table, &hot_table, &lost, &fault];
        let buffers = inputs.map(|buffer| ("a buffer", buffer.slice()));
        let run = Run { problem: GemmShape::rows(rows), sms: 132, seed };
        // SAFETY: every buffer above outlives the launch, and the kernel reaches them through checked wrappers only.
        unsafe { kernel.run(spec, run, &args, &buffers)? };
        let cache = Cache {
            packed: packed.slice().to_vec(),
            records: records.slice().to_vec(),
            unit_pages: unit_pages.slice().to_vec(),
            free: free.u32s(),
            ..cache.clone()
        };
        Ok(Done { cache, lost: lost.u32s(), fault: fault.u32s()[0] })
    }
}

/// Returns the pages of layers, with a gap after each layer.
fn pages(random: &mut Random, heads: Heads, layers: u32, count: u32) -> Vec<u16> {
    (0..layers)
        .flat_map(|_| {
            let mut layer: Vec<u16> = (0..count).flat_map(|_| page(random, heads)).collect();
            layer.extend([POISON; GAP]);
            layer
        })
        .collect()
}

fn chunk(random: &mut Random, heads: Heads) -> Call {
    let source_pages = 8;
    Call {
        source: pages(random, heads, 1, source_pages),
        source_pages,
        table: vec![5, 0, NONE, 6, 2, 1],
        m: 6,
        first: 2,
        ..Call::default()
    }
}

/// Returns the pages of a chunk that must be packed.
fn chunk_jobs(call: &Call, cache: &Cache) -> Vec<Job> {
    let entries = (0..).zip(&call.table).filter(|(i, page)| **page < cache.pages && call.first + i < call.source_pages);
    let job = |(i, &page): (u32, &u32)| Job::new(cache.heads, (0, page), call.page(cache.heads, 0, call.first + i));
    entries.map(job).collect()
}

fn chunk_spec(head_dim: u32) -> VariantSpec {
    spec(&format!("kv_pack_chunk_d{head_dim}{}", if head_dim.is_multiple_of(32) { "_pdl" } else { "" }))
}

#[test]
fn chunks_are_packed_as_by_the_oracle() {
    for head_dim in HeadDim::ALL.map(HeadDim::get) {
        let spec = chunk_spec(head_dim);
        let (mut kernel, mut all) = (CpuKernel::of(&spec, &[]), Counts::default());
        for seed in 1..=4 {
            let heads = Heads { head_dim, kv_heads: 1 + seed as u32 % 3 };
            let call = chunk(&mut Random::new(seed * 131 + u64::from(head_dim)), heads);
            let cache = new_cache(heads, (1, 7), (37, 35));
            let done = call.run(&mut kernel, &spec, &cache, seed).unwrap_or_else(|e| panic!("{spec} {seed}: {e}"));
            let counts = cache.check_packed(&done.cache, &chunk_jobs(&call, &cache));
            all += counts.unwrap_or_else(|e| panic!("{spec} {seed}: {e}"));
            assert_eq!((done.fault, done.lost[0]), (0, 0), "{spec} {seed}");
        }
        assert!(all.plain > 5 && all.with_slots > 5 && all.bf16 > 5 && all.lost == 0, "{spec}: {all:?}");
    }
}

/// Includes free lists with invalid unit numbers.
#[test]
fn units_are_lost_when_none_is_free() {
    let spec = spec("kv_pack_chunk_d32");
    let mut kernel = CpuKernel::of(&spec, &[]);
    let heads = Heads { head_dim: 32, kv_heads: 2 };
    let call = chunk(&mut Random::new(5), heads);
    for (units, free, seed) in [(0, 0, 1), (8, 0, 2), (8, 1, 3), (8, 3, 4), (8, 3, 5)] {
        let cache = new_cache(heads, (1, 7), (units, free));
        let done = call.run(&mut kernel, &spec, &cache, seed).unwrap();
        let counts = cache.check_packed(&done.cache, &chunk_jobs(&call, &cache)).unwrap();
        assert!(counts.bf16 == free as usize && counts.lost > 0, "{counts:?}");
        assert_eq!((done.lost[0], done.fault), (1, 0), "{units} units, {free} free");
    }
    for (count, entry) in [(9, 0), (u32::MAX, 0), (1 << 31, 0), (8, 8), (8, u32::MAX)] {
        let mut cache = new_cache(heads, (1, 7), (8, 8));
        if count == 8 {
            cache.free[1..].fill(entry);
        }
        cache.free[0] = count;
        let done = call.run(&mut kernel, &spec, &cache, 6).unwrap();
        assert!(done.lost[0] == 1 && done.cache.unit_pages == cache.unit_pages, "{count}, {entry}");
        assert_eq!(done.cache.free[1..], cache.free[1..]);
    }
}

#[test]
fn hostile_pages_of_a_chunk_are_reported() {
    let spec = spec("kv_pack_chunk_d32");
    let mut kernel = CpuKernel::of(&spec, &[]);
    let heads = Heads { head_dim: 32, kv_heads: 2 };
    for (entry, page) in [(0, 7), (1, 1 << 31), (3, u32::MAX - 1)] {
        let mut call = chunk(&mut Random::new(6), heads);
        call.table[entry] = page;
        let cache = new_cache(heads, (1, 7), (37, 37));
        let done = call.run(&mut kernel, &spec, &cache, 1).unwrap();
        assert_eq!(done.fault, 1 + entry as u32);
        cache.check_packed(&done.cache, &chunk_jobs(&call, &cache)).unwrap();
    }
    // The last page would be after the end of the source.
    let mut call = chunk(&mut Random::new(7), heads);
    call.first = 3;
    let cache = new_cache(heads, (1, 7), (37, 37));
    let done = call.run(&mut kernel, &spec, &cache, 1).unwrap();
    assert_eq!(done.fault, 6);
    cache.check_packed(&done.cache, &chunk_jobs(&call, &cache)).unwrap();
}

/// Makes a batch with a position per row and pages in random order.
fn step(random: &mut Random, heads: Heads, layers: u32, positions: &[u32]) -> Call {
    let m = positions.len() as u32;
    Call {
        source: pages(random, heads, layers, m + 1),
        source_pages: m + 1,
        positions: positions.to_vec(),
        table: (0..3 * m).rev().collect(),
        table_pages: 3,
        hot_table: (0..m).map(|row| (row + 2) % (m + 1)).collect(),
        m,
        ..Call::default()
    }
}

fn step_jobs(call: &Call, cache: &Cache) -> Vec<Job> {
    let mut jobs = Vec::new();
    for (row, &position) in call.positions.iter().enumerate() {
        if position % PAGE_TOKENS != PAGE_TOKENS - 1 || position / PAGE_TOKENS >= call.table_pages {
            continue;
        }
        let page = call.table[row * call.table_pages as usize + (position / PAGE_TOKENS) as usize];
        let hot = call.hot_table[row];
        if page < cache.pages && hot < call.source_pages {
            let job = |layer| Job::new(cache.heads, (layer, page), call.page(cache.heads, layer, hot));
            jobs.extend((0..cache.layers).map(job));
        }
    }
    jobs
}

#[test]
fn steps_pack_the_pages_that_rows_have_filled() {
    let many: Vec<u32> = (0..70).map(|row| [63, 5, 127, NONE, 62, 191, 64][row % 7]).collect();
    let few = [63, NONE, 62, 127, 64, 191, 63];
    for (name, layers, positions) in
        [("d32_pdl", 3, &few[..]), ("d128", 2, &few[..4]), ("d16", 1, &many), ("d32_pdl", 2, &[1, NONE, 62])]
    {
        let spec = spec(&format!("kv_pack_step_{name}"));
        let Op::KvPack(op) = spec.op else { panic!("{spec}") };
        let mut kernel = CpuKernel::of(&spec, &[]);
        let heads = Heads { head_dim: op.head_dim.get(), kv_heads: 2 };
        let mut call = step(&mut Random::new(u64::from(layers)), heads, layers, positions);
        let cache = new_cache(heads, (layers, 3 * call.m), (101, 101));
        for (blocks, seed) in [(1, 1), (3, 2), (3, 3), (500, 4)] {
            call.blocks = blocks;
            let done = call.run(&mut kernel, &spec, &cache, seed).unwrap_or_else(|e| panic!("{spec} {blocks}: {e}"));
            let counts = cache.check_packed(&done.cache, &step_jobs(&call, &cache));
            let counts = counts.unwrap_or_else(|e| panic!("{spec} {blocks}: {e}"));
            assert_eq!((done.fault, done.lost.iter().max()), (0, Some(&0)), "{spec}");
            assert!(positions.len() == 3 || counts.bf16 > 0, "{counts:?}");
        }
    }
}

#[test]
fn hostile_tables_of_a_step_are_reported() {
    let spec = spec("kv_pack_step_d32_pdl");
    let mut kernel = CpuKernel::of(&spec, &[]);
    let heads = Heads { head_dim: 32, kv_heads: 1 };
    let cache = new_cache(heads, (2, 12), (37, 37));
    let right = Call { blocks: 3, ..step(&mut Random::new(3), heads, 2, &[63, 127, 63, 191]) };
    let mut run = |change: &dyn Fn(&mut Call), fault: u32| {
        let mut call = right.clone();
        change(&mut call);
        let done = call.run(&mut kernel, &spec, &cache, 1).unwrap();
        cache.check_packed(&done.cache, &step_jobs(&call, &cache)).unwrap();
        assert_eq!(done.fault, fault);
    };
    run(&|_| (), 0);
    run(&|call| call.table[4] = 12, 2);
    run(&|call| call.table[4] = u32::MAX - 1, 2);
    run(&|call| call.table[4] = NONE, 0);
    run(&|call| call.hot_table[2] = call.source_pages, 3);
    run(&|call| call.hot_table[2] = u32::MAX, 3);
    // Positions after the end of the table, also for the last row.
    run(&|call| call.positions = vec![63, 255, 127, u32::MAX - 64], 0);
    // Rows whose units are all lost report the loss.
    let none = new_cache(heads, (2, 12), (3, 0));
    let done = right.run(&mut kernel, &spec, &none, 2).unwrap();
    let counts = none.check_packed(&done.cache, &step_jobs(&right, &none)).unwrap();
    let lost = |row: u32| {
        let page = right.table[(row * 3 + right.positions[row as usize] / PAGE_TOKENS) as usize] as usize;
        let of = |layer| (0..2).any(|unit| done.cache.record(layer, page * 2 + unit)[RECORD_KIND] == KIND_LOST);
        u32::from((0..2).any(of))
    };
    assert_eq!(done.lost, (0..4).map(lost).collect::<Vec<_>>());
    assert!(counts.lost > 0);
}

/// Makes a cache with records of all kinds. Each refers to a different unit in use.
fn released(heads: Heads) -> Cache {
    let mut cache = new_cache(heads, (3, 5), (61, 20));
    cache.put_random_records(&mut Random::new(9));
    cache
}

fn check_release(kernel: &mut CpuKernel, spec: &VariantSpec, cache: &Cache, table: &[u32], fault: bool) -> Cache {
    try_release(kernel, spec, cache, table, fault).unwrap_or_else(|error| panic!("{table:?}: {error}"))
}

fn try_release(
    kernel: &mut CpuKernel,
    spec: &VariantSpec,
    cache: &Cache,
    table: &[u32],
    fault: bool,
) -> Result<Cache, String> {
    let call = Call { table: table.to_vec(), m: table.len() as u32, ..Call::default() };
    let done = call.run(kernel, spec, cache, 1)?;
    cache.check_released(&done.cache, table)?;
    if (done.fault != 0) == fault { Ok(done.cache) } else { Err(format!("fault {}", done.fault)) }
}

#[test]
fn units_of_released_pages_are_free_once() {
    let spec = spec("kv_pack_release_d32");
    let mut kernel = CpuKernel::of(&spec, &[]);
    for kv_heads in [1, 3] {
        let cache = released(Heads { head_dim: 32, kv_heads });
        let once = check_release(&mut kernel, &spec, &cache, &[3, NONE, 1], false);
        assert!(once.free[0] > cache.free[0]);
        // Release the same page again, and another one.
        let twice = check_release(&mut kernel, &spec, &once, &[1, 3], false);
        assert!(twice.free == once.free && twice.records == once.records);
        check_release(&mut kernel, &spec, &twice, &[0, 1, 2, 3, 4], false);
    }
}

#[test]
fn hostile_releases_are_reported() {
    let spec = spec("kv_pack_release_d32");
    let mut kernel = CpuKernel::of(&spec, &[]);
    let heads = Heads { head_dim: 32, kv_heads: 2 };
    for page in [5, 6, 1 << 31, u32::MAX - 1] {
        check_release(&mut kernel, &spec, &released(heads), &[3, page, 1], true);
    }
    // Unit numbers outside the pool.
    for number in [61, 1 << 31, u32::MAX] {
        let mut cache = released(heads);
        let record = &mut cache.records[heads.record_at(3 * heads.page_units())..][..RECORD_HEAD];
        record[RECORD_KIND] = KIND_BF16;
        set_index(record, number);
        check_release(&mut kernel, &spec, &cache, &[3, 1], true);
    }
    // A free list that is full, or claims to be longer: nothing is written after its end.
    for count in [61, 62, u32::MAX - 30] {
        let mut cache = released(heads);
        cache.free[0] = count;
        let call = Call { table: vec![0, 1, 2, 3, 4], m: 5, ..Call::default() };
        let done = call.run(&mut kernel, &spec, &cache, 1).unwrap();
        assert_eq!(done.cache.free[1..], cache.free[1..]);
    }
}

const PACK: &str = "unweight/kernels/kv_pack.cuh";
const PAGES: &str = "unweight/encoding/kv_packed.cuh";

#[test]
fn planted_bugs_of_packing_are_caught() {
    let plants = [
        // Each barrier of the block and of a warp.
        (PACK, "lane * 4, 0);\n        ptx::bar_sync();", "lane * 4, 0);"),
        (PACK, "below | flag);\n        ptx::bar_sync();", "below | flag);"),
        (PACK, "take());\n            ptx::bar_sync();", "take());"),
        (PACK, "ptx::bar_sync();\n        if (warp == 0 && lane <", "if (warp == 0 && lane <"),
        // The choice of bases.
        (PACK, "u32 all = kv::kWindow - 1;", "u32 all = 0;"),
        (PACK, "record.bases[s / 4] |=", "record.bases[0] |="),
        (PACK, "larger(low(quads[s][r]), high(quads[s][r]))", "low(quads[s][r])"),
        (PACK, "larger(top[s], ptx::shfl_sync_bfly(top[s], step))", "top[s]"),
        (
            PACK,
            "all = larger(all, ptx::ld_shared(counts(tile, s)))",
            "all = larger(all, ptx::ld_shared(counts(warp, s)))",
        ),
        (
            PACK,
            "const u32 base = record.base(s);\n            u32 own[4]",
            "const u32 base = record.base(0);\n            u32 own[4]",
        ),
        // The packing itself.
        (PACK, "below += u32(a < base) + u32(b < base);", "below += u32(a < base);"),
        (PACK, "a + kv::kBelow < base", "a + kv::kBelow <= base"),
        (PACK, "a != 0 && a + kv::kBelow", "a + kv::kBelow"),
        (PACK, "ptx::vote_sync_ballot(none) != 0 ? kNoCode : 0", "0"),
        (PACK, "all <= P::kSlots", "all < P::kSlots"),
        // Places and codes of slots.
        (PACK, "if (tile == warp) place = all;", "if (tile + 1 == warp) place = all;"),
        (PACK, "chosen.ends |= (all & 255) << (8 * tile);", "chosen.ends |= (place & 255) << (8 * tile);"),
        (PACK, "exponent == 0 ? kv::kZeroCode : exponent", "exponent"),
        (PACK, "shared + S::kRecord + kv::kRecordHead", "shared + S::kRecord + kv::kRecordHead - 8"),
        (PACK, "place += all;", ""),
        (PACK, "warp * P::kTileBytes + half * P::kOperandBytes", "(2 * warp + half) * P::kOperandBytes + half"),
        (PACK, "value ? lane / 16 : lane / 8 % 2", "lane / 16"),
        // BF16 units.
        (PACK, "if (free == 0 || free > args.units)", "if (free > args.units)"),
        (PACK, "ptx::red_add_global(args.free_units, 1);", ""),
        (PACK, "args.free_units + free)", "args.free_units + free - 1)"),
        (PACK, "next -= each;", ""),
        (PAGES, "kLast = kPair + (kRest >= 2 ? 256 : 0)", "kLast = kPair"),
        (PAGES, "shf_r_wrap(f[3], f[3], 4)", "shf_r_wrap(f[3], f[3], 3)"),
    ];
    // One step of 3 words, and 7 steps of 21.
    let specs = [spec("kv_pack_step_d16"), spec("kv_pack_chunk_d112_pdl")];
    let (heads, large) = (Heads { head_dim: 16, kv_heads: 2 }, Heads { head_dim: 112, kv_heads: 2 });
    let step = Call { blocks: 3, ..step(&mut Random::new(4), heads, 3, &[63, NONE, 62, 127, 64, 191, 63]) };
    let few = chunk(&mut Random::new(5), large);
    let run = |edits: &[Edit]| {
        let mut kernel = CpuKernel::all(&specs, edits);
        (1..=6).find_map(|seed| {
            let cache = new_cache(heads, (3, 21), (101, 101));
            let done = step.run(&mut kernel, &specs[0], &cache, seed);
            let check = done.and_then(|done| cache.check_packed(&done.cache, &step_jobs(&step, &cache)));
            let scarce = new_cache(large, (1, 7), (8, 2));
            let done = few.run(&mut kernel, &specs[1], &scarce, seed);
            let lost = done.and_then(|done| scarce.check_packed(&done.cache, &chunk_jobs(&few, &scarce)));
            check.and(lost).err()
        })
    };
    assert_eq!(run(&[]), None);
    let planted = plants.iter().filter_map(|(header, from, to)| Edit::planted(header, from, to));
    let missed: Vec<_> = planted.filter(|edit| run(std::slice::from_ref(edit)).is_none()).map(|edit| edit.to).collect();
    assert!(missed.is_empty(), "planted bugs that were not caught: {missed:#?}");
}

#[test]
fn planted_bugs_of_releasing_are_caught() {
    let plants = [
        ("ptx::st_global_x2(record + 8, U32x2{kv::kLostUnit, 0});", ""),
        ("if (old.kind() != kv::kBf16Unit) return;", "if (old.kind() == kv::kLostUnit) return;"),
        ("args.free_units + 1 + free", "args.free_units + free"),
        ("layer = inside / (args.kv_heads * 2)", "layer = 0"),
    ];
    let spec = spec("kv_pack_release_d32");
    let run = |edits: &[Edit]| {
        let mut kernel = CpuKernel::of(&spec, edits);
        let cache = released(Heads { head_dim: 32, kv_heads: 2 });
        let once = try_release(&mut kernel, &spec, &cache, &[3, 1], false);
        once.and_then(|once| try_release(&mut kernel, &spec, &once, &[1, 2], false)).err()
    };
    assert_eq!(run(&[]), None);
    for (from, to) in plants {
        let Some(edit) = Edit::planted(PACK, from, to) else { continue };
        assert!(run(&[edit]).is_some(), "the planted bug was not caught: `{to}` for `{from}`");
    }
}
