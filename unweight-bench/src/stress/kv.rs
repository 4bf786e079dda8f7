//! The packed KV cache under load. Attention over packed pages is checked against BF16 attention; packing, releasing
//! and unpacking pages are checked against the oracle.

use std::{
    cell::RefCell,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use unweight_codegen::{
    VariantSpec,
    kv::PAGE_TOKENS,
    plan::{GemmShape, Plan},
    spec::{AttentionSpec, AttentionStages, KvCache, KvPackSpec, KvPackStage, KvUnpackSpec, Op, catalog},
};
use unweight_format::testing::Random;
use unweight_rt::{
    DeviceBuffer, DeviceError, ExecContext, Graph, MatrixMut,
    raw::{
        device::module::LoadedKernel,
        ops::{
            attention::{Attention, TokenRows},
            kv::{KvLayer, KvShape},
            kv_pack::KvPack,
            kv_packed::PackedKv,
            kv_unpack::KvUnpack,
        },
    },
};

use super::{DIRECT, RUNS, Run, StressRow, Subject, differs};
use crate::{
    attention::{Decode, DeviceProblem, PAD, POISON, Problem},
    data::bytes_of,
    error::BenchError,
    kv::{Cache, DevicePages, Heads, Job, PackedPages, UNWRITTEN, harden, page},
};

/// Returns a seed that differs between runs. Reports of wrong outputs include it.
fn new_seed() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |time| time.as_nanos() as u64)
}

/// Positions of rows, query heads per KV head, the window, the number of parts for kernels that split rows, and whether
/// pages contain infinities.
type Case = (&'static [u32], usize, u32, u32, bool);

const EDGES: &[u32] = &[0, 15, 16, 63, 64, 65, 127, 128, PAD, 191, 1000, 1471, 1500];
const CASES: [Case; 5] = [
    (EDGES, 4, 0, 2, false),
    (EDGES, 7, 100, 3, false),
    (EDGES, 1, 1, 1, false),
    (&[3000], 4, 0, 13, false),
    (&[127, 300, 64, 1000, 700, 63], 16, 0, 32, true),
];

/// Returns the variant over BF16 pages that sums in the same order: the same number of warps, and the same cluster.
fn counterpart(spec: &VariantSpec) -> Option<VariantSpec> {
    let Op::Attention(packed) = spec.op else { return None };
    let same = |other: &AttentionSpec| AttentionSpec { stages: packed.stages, pdl: packed.pdl, ..*other };
    let bf16 = AttentionSpec { cache: KvCache::Bf16, ..packed };
    let shipped = catalog::on::<AttentionSpec>(spec.arch).chain(catalog::asynchronous(spec.arch));
    let shipped = shipped.filter(|other| matches!(other.op, Op::Attention(op) if same(&op) == bf16));
    // Variants that do not ship are compiled on demand.
    let other = (1..=AttentionStages::MAX.get()).rev().filter_map(|stages| {
        let op = AttentionSpec { stages: AttentionStages::new(stages).ok()?, ..bf16 };
        Some(VariantSpec::attention(spec.arch, op))
    });
    shipped.chain(other).find(|spec| Plan::new(spec).is_ok())
}

/// Synchronizes a context. Returns a reported row fault as text, and any other error as an error.
fn row_fault(ctx: &RefCell<ExecContext>) -> Result<Option<String>, DeviceError> {
    match ctx.borrow_mut().synchronize() {
        Ok(()) => Ok(None),
        Err(error @ DeviceError::Row { .. }) => Ok(Some(error.to_string())),
        Err(error) => Err(error),
    }
}

impl Run<'_> {
    /// Returns the subjects of an attention kernel over packed pages. The output is A, then the hot pages.
    pub(super) fn packed_attention<'a>(
        &'a self,
        kernel: &Arc<LoadedKernel>,
        spec: AttentionSpec,
    ) -> Result<Vec<Subject<'a>>, BenchError> {
        let name = kernel.spec();
        let Some(bf16) = counterpart(name) else {
            unreachable!("{name}: a test checks that it has a BF16 counterpart")
        };
        let bf16 = Attention::new(self.kernels.get(&bf16)?)?;
        CASES.into_iter().map(|case| self.packed_case(kernel, &bf16, spec, case)).collect()
    }

    fn packed_case<'a>(
        &'a self,
        kernel: &Arc<LoadedKernel>,
        bf16: &Attention,
        spec: AttentionSpec,
        (positions, group, window, parts, infinities): Case,
    ) -> Result<Subject<'a>, BenchError> {
        let (stream, seed) = (self.stream, new_seed());
        let norm = group != 4;
        let case = Decode {
            window,
            bias: window != 0,
            norm,
            seed,
            ..Decode::new(spec.head_dim.get() as usize, group, positions)
        };
        let mut problem = Problem::new(&case);
        harden(&mut problem, seed, infinities);
        let pages = PackedPages::of(&problem);
        let parts = if spec.split { parts } else { 1 };
        let (out, layer) = self.bf16_attention(bf16, &problem, parts)?;
        let has_nan = out.iter().any(|bits| bits & 0x7fff > 0x7f80);
        // Hot pages begin at a multiple of the widest copy.
        let (m, columns) = (positions.len(), case.out_columns());
        let hot_at = (m * columns * 2).next_multiple_of(256);
        let with_hot = |mut bytes: Vec<u8>, hot: &[u16]| {
            bytes.resize(hot_at, 0xff);
            bytes.extend(bytes_of(hot));
            bytes
        };
        let expected = with_hot(bytes_of(&out), &pages.hot_from(&problem, &layer));
        let before = with_hot(vec![0xff; m * columns * 2], &pages.hot);
        let bytes = before.len().next_multiple_of(16);
        let before = DeviceBuffer::from_host(stream, &before.repeat(RUNS as usize))?;

        let attention = Attention::new(kernel.clone())?;
        let on_device = DeviceProblem::new(stream, &problem)?;
        let on_device = on_device.in_parts(&attention, &mut self.ctx.borrow_mut(), parts)?;
        let device_pages = RefCell::new(DevicePages::new(stream, &pages)?);
        let launch = move |at: u64| {
            let device = self.kernels.device();
            let mut pages = device_pages.borrow_mut();
            let shape = pages.hot_shape();
            // SAFETY: hot pages and rows are separate parts of one of the subject's outputs, which lives until the
            // stream is synchronized.
            let (hot, out) = unsafe {
                let hot = KvLayer::from_raw(device, at + hot_at as u64, shape);
                (hot, MatrixMut::from_raw(device, at, m as u32, columns as u32, columns as u64)?)
            };
            on_device.decode_from(&attention, &mut self.ctx.borrow_mut(), pages.with_hot(hot), out)
        };
        let check = move |got: &[u8]| {
            let row_fault = row_fault(&self.ctx).unwrap_or_else(|error| Some(error.to_string()));
            let wrong = (has_nan && !infinities).then(|| "BF16 attention returned NaN".to_owned());
            let wrong = wrong.or(row_fault).or_else(|| differs(got, &expected));
            wrong.map(|wrong| format!("{wrong} (compared with BF16 attention, seed {seed})"))
        };
        let longest = positions.iter().filter(|position| **position != PAD).max().map_or(0, |last| last + 1);
        Ok(Subject {
            name: kernel.spec().to_string(),
            shape: GemmShape { m: m as u32, n: columns as u32, k: longest },
            outputs: DeviceBuffer::zeroed(stream, bytes * RUNS as usize)?,
            bytes,
            before: Some(before),
            launch: Box::new(launch),
            check: Box::new(check),
        })
    }

    /// Computes A and the layer with a kernel over BF16 pages.
    fn bf16_attention(
        &self,
        attention: &Attention,
        problem: &Problem,
        parts: u32,
    ) -> Result<(Vec<u16>, Vec<u16>), BenchError> {
        let (stream, mut ctx) = (self.stream, self.ctx.borrow_mut());
        let (m, columns) = (problem.case.positions.len(), problem.case.out_columns());
        let mut on_device = DeviceProblem::new(stream, problem)?.in_parts(attention, &mut ctx, parts)?;
        let mut out = DeviceBuffer::<u16>::zeroed(stream, m * columns)?;
        out.fill_bytes(stream, 0xff)?;
        let view = MatrixMut::new(&mut out, m as u32, columns as u32, columns as u64)?;
        on_device.decode(attention, &mut ctx, view)?;
        ctx.synchronize()?;
        Ok((out.to_host(stream)?, on_device.layer(stream)?))
    }

    /// Returns the subjects that unpack the pages of a table, in any order, to BF16.
    pub(super) fn kv_unpack<'a>(
        &'a self,
        kernel: &Arc<LoadedKernel>,
        spec: KvUnpackSpec,
    ) -> Result<Vec<Subject<'a>>, BenchError> {
        [(1, 5), (3, 9)]
            .into_iter()
            .map(|(kv_heads, pages)| self.unpack_subject(kernel, spec, kv_heads, pages))
            .collect()
    }

    fn unpack_subject<'a>(
        &'a self,
        kernel: &Arc<LoadedKernel>,
        spec: KvUnpackSpec,
        kv_heads: u32,
        pages: u32,
    ) -> Result<Subject<'a>, BenchError> {
        let (stream, seed) = (self.stream, new_seed());
        let heads = Heads { head_dim: spec.head_dim.get(), kv_heads };
        let random = &mut Random::new(seed);
        let bf16: Vec<u16> = (0..pages).flat_map(|_| page(random, heads)).collect();
        let table: Vec<u32> = (0..pages).rev().chain([pages / 2]).collect();
        let expected: Vec<u8> = table.iter().flat_map(|page| bytes_of(heads.page_of(&bf16, *page as usize))).collect();
        let count = table.len() as u32;
        let shape = heads.shape(count)?;
        let cache = RefCell::new(Cache::of_pages(heads, &bf16, 0).upload(stream)?);
        let (unpack, table) = (KvUnpack::new(kernel.clone())?, DeviceBuffer::from_host(stream, &table)?);
        let launch = move |at: u64| {
            // SAFETY: the address is one of the subject's outputs, which has this size and lives until the stream is
            // synchronized.
            let out = unsafe { KvLayer::from_raw(self.kernels.device(), at, shape) };
            unpack.enqueue(&mut self.ctx.borrow_mut(), cache.borrow_mut().layers(), (&table, count), out)
        };
        let check = move |got: &[u8]| {
            let row_fault = row_fault(&self.ctx).unwrap_or_else(|error| Some(error.to_string()));
            row_fault.or_else(|| differs(got, &expected)).map(|wrong| format!("{wrong} (seed {seed})"))
        };
        let bytes = count as usize * heads.page_elements() * 2;
        Ok(Subject {
            name: kernel.spec().to_string(),
            shape: GemmShape { m: count, n: kv_heads, k: heads.head_dim },
            outputs: DeviceBuffer::zeroed(stream, bytes * RUNS as usize)?,
            bytes,
            before: None,
            launch: Box::new(launch),
            check: Box::new(check),
        })
    }

    /// Runs a stage of packing with enough BF16 units and with too few. A page may get another unit in each launch, so
    /// each launch is compared on the host.
    pub(super) fn kv_pack(&self, kernel: &Arc<LoadedKernel>, spec: KvPackSpec) -> Result<Vec<StressRow>, BenchError> {
        let pack = KvPack::new(kernel.clone())?;
        let heads = Heads { head_dim: spec.head_dim.get(), kv_heads: 2 };
        [false, true].into_iter().map(|scarce| self.pack_row(&pack, &Packing::new(heads, spec.stage, scarce))).collect()
    }

    fn pack_row(&self, pack: &KvPack, problem: &Packing) -> Result<StressRow, BenchError> {
        let stream = self.stream;
        let mut on_device = (0..RUNS).map(|_| problem.upload(stream)).collect::<Result<Vec<_>, _>>()?;
        let rounds = self.options.launches.div_ceil(RUNS).max(2);
        let (mut graph, mut differing, mut wrong): (Option<Graph>, u32, Option<String>) = (None, 0, None);
        for round in 0..rounds {
            on_device.iter_mut().try_for_each(|run| run.reset(stream, &problem.before))?;
            if round % DIRECT == 0 {
                on_device.iter_mut().try_for_each(|run| run.launch(pack, problem, &mut self.ctx.borrow_mut()))?;
            } else {
                if graph.is_none() {
                    graph = Some(stream.capture(|| {
                        on_device.iter_mut().try_for_each(|run| run.launch(pack, problem, &mut self.ctx.borrow_mut()))
                    })?);
                }
                if let Some(graph) = &graph {
                    // SAFETY: everything that the launches use lives until the reads below.
                    unsafe { graph.launch() }?;
                }
            }
            let row_fault = row_fault(&self.ctx)?;
            for run in &mut on_device {
                let error = problem.check(&run.read(stream, &problem.before)?).err().or_else(|| row_fault.clone());
                differing += u32::from(error.is_some());
                wrong = wrong.or(error);
            }
        }
        let Packing { heads, m, seed, scarce, .. } = *problem;
        let units = if scarce { "too few" } else { "enough" };
        Ok(StressRow {
            variant: pack.kernel().spec().to_string(),
            m,
            n: heads.kv_heads,
            k: heads.head_dim,
            launches: rounds * RUNS,
            differing,
            wrong: wrong.map(|wrong| format!("{wrong} ({units} units, seed {seed})")),
        })
    }
}

/// A problem of packing or releasing pages.
struct Packing {
    heads: Heads,
    stage: KvPackStage,
    scarce: bool,
    seed: u64,
    before: Cache,
    /// BF16 pages of each layer.
    source: Vec<u16>,
    source_pages: u32,
    positions: Vec<u32>,
    table: Vec<u32>,
    table_pages: u32,
    hot_table: Vec<u32>,
    /// Rows, or table entries.
    m: u32,
    /// Pages to pack, each with the index of the flag that is set if a unit is lost.
    jobs: Vec<(usize, Job)>,
}

/// The page of `source` for the first page of a chunk.
const FIRST: u32 = 2;
const LAYERS: u32 = 3;

impl Packing {
    fn new(heads: Heads, stage: KvPackStage, scarce: bool) -> Self {
        let seed = new_seed();
        let random = &mut Random::new(seed);
        let positions: Vec<u32> = [63, 5, 127, PAD, 62, 63, 64].to_vec();
        let (layers, m, table_pages) = match stage {
            KvPackStage::Step => (LAYERS, positions.len() as u32, 2),
            KvPackStage::Chunk => (1, 6, 1),
            KvPackStage::Release => (LAYERS, 4, 1),
        };
        let source_pages = m + FIRST;
        let pages = m * table_pages;
        let all_units = layers * pages * heads.page_units() as u32;
        let sufficient = Cache::units_for(all_units);
        let free = if scarce { 2 } else { sufficient };
        let units = if stage == KvPackStage::Release { Cache::units_for(2 * sufficient) } else { sufficient };
        let mut before = Cache::new(heads, (layers, pages), (units, free), 0);
        if stage == KvPackStage::Release {
            before.put_random_records(random);
        }
        let source = match stage {
            KvPackStage::Release => vec![POISON; heads.page_elements()],
            _ => (0..layers * source_pages).flat_map(|_| page(random, heads)).collect(),
        };
        let mut table: Vec<u32> = (0..pages).rev().collect();
        if stage != KvPackStage::Step {
            // An entry without a page.
            table[2] = u32::MAX;
        }
        let hot_table = (0..m).map(|row| (row + 3) % source_pages).collect();
        let mut problem = Self {
            heads,
            stage,
            scarce,
            seed,
            before,
            source,
            source_pages,
            positions,
            table,
            table_pages,
            hot_table,
            m,
            jobs: Vec::new(),
        };
        problem.jobs = problem.jobs();
        problem
    }

    fn jobs(&self) -> Vec<(usize, Job)> {
        let job = |layer: u32, page: u32, from: u32| {
            let bf16 = self.heads.page_of(&self.source, (layer * self.source_pages + from) as usize);
            Job::new(self.heads, (layer, page), bf16)
        };
        let entries = 0..self.m as usize;
        match self.stage {
            KvPackStage::Step => entries
                .filter(|row| self.positions[*row] != PAD && self.positions[*row] % PAGE_TOKENS == PAGE_TOKENS - 1)
                .flat_map(|row| {
                    let entry = (self.positions[row] / PAGE_TOKENS) as usize;
                    let page = self.table[row * self.table_pages as usize + entry];
                    (0..self.before.layers).map(move |layer| (row, job(layer, page, self.hot_table[row])))
                })
                .collect(),
            KvPackStage::Chunk => entries
                .filter(|entry| self.table[*entry] != u32::MAX)
                .map(|entry| (0, job(0, self.table[entry], FIRST + entry as u32)))
                .collect(),
            KvPackStage::Release => Vec::new(),
        }
    }

    fn upload(&self, stream: &unweight_rt::Stream) -> Result<OnDevice, DeviceError> {
        let upload = |values: &[u32]| DeviceBuffer::from_host(stream, values);
        let source_pages = if self.stage == KvPackStage::Release { 1 } else { self.source_pages };
        Ok(OnDevice {
            cache: self.before.upload(stream)?,
            source: DeviceBuffer::from_host(stream, &self.source)?,
            source_shape: self.heads.shape(source_pages)?,
            positions: upload(&self.positions)?,
            table: upload(&self.table)?,
            hot_table: upload(&self.hot_table)?,
            lost: DeviceBuffer::zeroed(stream, self.m as usize)?,
        })
    }

    /// Checks the result of a launch against the oracle.
    fn check(&self, (after, lost): &(Cache, Vec<u32>)) -> Result<(), String> {
        if self.stage == KvPackStage::Release {
            return self.before.check_released(after, &self.table);
        }
        let jobs: Vec<&Job> = self.jobs.iter().map(|(_, job)| job).collect();
        self.before.check_packed(after, &jobs)?;
        let mut expected = vec![0; self.m as usize];
        self.jobs.iter().filter(|(_, job)| job.is_lost(after)).for_each(|(row, _)| expected[*row] = 1);
        if *lost == expected { Ok(()) } else { Err(format!("lost rows {lost:?} instead of {expected:?}")) }
    }
}

/// The buffers that a packing launch reads and writes.
struct OnDevice {
    cache: PackedKv,
    source: DeviceBuffer<u16>,
    source_shape: KvShape,
    positions: DeviceBuffer<u32>,
    table: DeviceBuffer<u32>,
    hot_table: DeviceBuffer<u32>,
    lost: DeviceBuffer<u32>,
}

impl OnDevice {
    fn reset(&mut self, stream: &unweight_rt::Stream, before: &Cache) -> Result<(), DeviceError> {
        self.cache.packed_mut().fill_bytes(stream, UNWRITTEN)?;
        self.cache.units_mut().fill_bytes(stream, UNWRITTEN)?;
        self.cache.records_mut().write(stream, 0, &before.records)?;
        self.cache.free_mut().write(stream, 0, &before.free)?;
        self.lost.fill_bytes(stream, 0)
    }

    fn launch(&mut self, pack: &KvPack, problem: &Packing, ctx: &mut ExecContext) -> Result<(), DeviceError> {
        let source = KvLayer::new(&mut self.source, self.source_shape, 0)?;
        let cache = self.cache.layers();
        match problem.stage {
            KvPackStage::Step => {
                let (positions, page_table) = (&self.positions, &self.table);
                let rows = TokenRows { positions, page_table, table_pages: problem.table_pages };
                pack.step(ctx, (source, &self.hot_table), cache, rows, problem.m, &mut self.lost)
            }
            KvPackStage::Chunk => pack.chunk(ctx, (source, FIRST), cache, (&self.table, 0, problem.m), &mut self.lost),
            KvPackStage::Release => pack.release(ctx, cache, &self.table, problem.m),
        }
    }

    fn read(&mut self, stream: &unweight_rt::Stream, like: &Cache) -> Result<(Cache, Vec<u32>), DeviceError> {
        Ok((like.read_from(stream, &mut self.cache)?, self.lost.to_host(stream)?))
    }
}

#[cfg(test)]
mod tests {
    use unweight_codegen::spec::{Arch, HeadDim};

    use super::*;

    #[test]
    fn every_packed_variant_has_a_counterpart_over_bf16_pages() {
        for arch in Arch::ALL {
            let all = catalog::on::<AttentionSpec>(*arch).chain(catalog::asynchronous(*arch));
            let packed = |spec: &VariantSpec| matches!(spec.op, Op::Attention(op) if op.cache == KvCache::Packed);
            let mut count = 0;
            for spec in all.filter(packed) {
                let other = counterpart(&spec).unwrap_or_else(|| panic!("{spec} has no counterpart"));
                let order = |spec: &VariantSpec| match spec.op {
                    Op::Attention(op) => (op.head_dim, op.warps, op.cluster, op.split, op.copy),
                    _ => panic!("{spec}"),
                };
                assert_eq!(order(&spec), order(&other));
                assert!(!packed(&other), "{spec}: {other}");
                count += 1;
            }
            assert!(count >= HeadDim::ALL.len(), "{arch:?}");
        }
    }

    #[test]
    fn problems_of_packing_have_units_of_all_kinds() {
        for stage in [KvPackStage::Step, KvPackStage::Chunk] {
            let problem = Packing::new(Heads { head_dim: 32, kv_heads: 2 }, stage, false);
            assert!(problem.jobs.len() >= 5);
            assert!(
                problem.check(&(problem.before.clone(), vec![0; problem.m as usize])).is_err(),
                "an unchanged cache passed the check of packing"
            );
        }
        let problem = Packing::new(Heads { head_dim: 32, kv_heads: 2 }, KvPackStage::Release, true);
        let mut after = problem.before.clone();
        assert!(problem.check(&(after.clone(), vec![])).is_err(), "an unchanged cache passed the check of releasing");
        let units = after.release(&problem.table);
        assert!(!units.is_empty());
        for unit in units {
            after.free[0] += 1;
            let last = after.free[0] as usize;
            after.free[last] = unit;
        }
        assert_eq!(problem.check(&(after, vec![])), Ok(()));
    }
}
