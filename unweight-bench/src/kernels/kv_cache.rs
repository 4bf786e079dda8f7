//! Measures attention over packed KV pages next to BF16 attention, and packing and unpacking of pages. Heads are
//! Llama-3.1-8B's, keys and values are drawn from N(0, 1).
//!
//! ```text
//! pool    BF16 [body][tails], packed [body], hot [tails]; tail i and hot page i are the page that a row is writing
//! copy    rows whose page tables use other pages of the pool than the copy before
//! ```
//! Together, the copies of a problem exceed the L2 cache, as do the weights of other families.

use std::collections::{BTreeMap, BTreeSet};

use unweight_codegen::{
    VariantSpec,
    family::Instruction,
    kv::PAGE_TOKENS,
    plan::{GemmShape, Plan},
    spec::{AttentionSpec, AttentionStages, HeadDim, KvCache, KvPackSpec, KvPackStage, KvUnpackSpec, Op, catalog},
};
use unweight_engine::raw::{decode_variant, options::bucket};
use unweight_rt::{
    ContextSize, DeviceBuffer, DeviceError, ExecContext, KernelSet, MatrixMut, MatrixRef, Stream,
    raw::{
        choose::cost::gpu_model::GpuModel,
        ops::{
            attention::{Attention, AttentionOptions, RotaryTable, TokenRows},
            kv::{KvLayer, KvShape},
            kv_pack::KvPack,
            kv_packed::{DecodeCache, NO_PAGE, PackedKv, PackedShape},
            kv_unpack::KvUnpack,
        },
    },
};

use crate::{
    BenchError,
    data::{halves, normal_bf16},
    kv::Heads,
    timing::{Contender, Row, Timer, Timing},
};

const HEAD_DIM: HeadDim = match HeadDim::new(128) {
    Ok(head_dim) => head_dim,
    Err(_) => panic!("pages of these heads can be packed"),
};
const HEADS: Heads = Heads { head_dim: HEAD_DIM.get(), kv_heads: 8 };
/// Query heads per KV head.
const GROUP: u32 = 4;
const COLUMNS: u32 = HEADS.kv_heads * (GROUP + 2) * HEADS.head_dim;
const OUT_COLUMNS: u32 = HEADS.kv_heads * GROUP * HEADS.head_dim;

/// Batches of sequences, and tokens per sequence.
const CASES: [(u32, u32); 9] =
    [(1, 64), (1, 1024), (8, 1024), (16, 1024), (64, 64), (64, 1024), (128, 1024), (256, 1024), (16, 8192)];

/// Distinct pages of the pool; all other pages repeat them.
const UNIQUE: usize = 64;
/// Maximum number of copies of a problem.
const COPIES_MAX: usize = 1024;
/// A packing step: rows, layers, and how many rows have just filled a page.
const STEP_ROWS: u32 = 64;
const STEP_LAYERS: u32 = 32;
const STEP_FULL: [u32; 3] = [0, 1, 4];
/// Pages per chunk.
const CHUNK: u32 = 32;
/// BF16 units of a pool. Pages drawn from N(0, 1) need none.
const UNITS: u32 = 64;

/// Stride between consecutive pages of a table: a prime larger than all factors of the number of pages.
const STRIDE: u64 = 7919;

pub(super) struct KvBench<'a> {
    pub kernels: &'a KernelSet,
    pub timer: &'a Timer<'a>,
    /// Measure every variant of attention, not only the engine's choice.
    pub all_variants: bool,
}

/// A batch at a context length.
#[derive(Clone, Copy)]
struct Case {
    m: u32,
    context: u32,
    copies: u32,
}

impl Case {
    fn of(timing: &Timing, (m, context): (u32, u32)) -> Self {
        let bytes = m as usize * context.div_ceil(PAGE_TOKENS) as usize * HEADS.page_elements() * 2;
        let copies = timing.rotate_bytes.div_ceil(bytes).clamp(timing.min_copies.max(1), COPIES_MAX);
        // At most the limit above.
        Self { m, context, copies: copies as u32 }
    }

    fn table_pages(self) -> u32 {
        self.context / PAGE_TOKENS
    }

    /// Returns the number of full pages of all copies, before the pages that rows are writing.
    fn body(self) -> u32 {
        self.tails() * (self.table_pages() - 1)
    }

    /// Returns the number of rows of all copies.
    fn tails(self) -> u32 {
        self.copies * self.m
    }

    /// Returns the page table of a copy. `last` maps a row to the page that it is writing.
    fn table(self, copy: u32, last: impl Fn(u32) -> u32) -> Vec<u32> {
        let before = self.table_pages() - 1;
        let entry = |row: u32, i: u32| {
            let place = u64::from(row * before + i) * STRIDE % u64::from(self.body().max(1));
            // `place` is less than the number of pages.
            place as u32
        };
        let rows = copy * self.m..(copy + 1) * self.m;
        rows.flat_map(|row| (0..before).map(move |i| entry(row, i)).chain([last(row)])).collect()
    }
}

/// The pages of one layer in all encodings.
struct Pool {
    unique: Vec<u16>,
    body: u32,
    bf16: DeviceBuffer<u16>,
    bf16_shape: KvShape,
    packed: PackedKv,
    hot: DeviceBuffer<u16>,
    hot_shape: KvShape,
}

/// Fills pages by repeating the pages of `unique`.
fn fill(
    stream: &Stream,
    buffer: &mut DeviceBuffer<u16>,
    first: usize,
    count: usize,
    unique: &[u16],
) -> Result<(), DeviceError> {
    let page = HEADS.page_elements();
    (0..count).step_by(UNIQUE).try_for_each(|at| {
        let some = &unique[..(count - at).min(UNIQUE) * page];
        buffer.write(stream, (first + at) * page, some)
    })
}

fn pages_of(stream: &Stream, count: u32, layers: u32) -> Result<(DeviceBuffer<u16>, KvShape), DeviceError> {
    let shape = HEADS.shape(count)?;
    Ok((DeviceBuffer::zeroed(stream, count as usize * layers as usize * HEADS.page_elements())?, shape))
}

/// Returns the bytes that packing or unpacking a page reads and writes.
fn page_traffic() -> usize {
    HEADS.page_elements() * 2 + HEADS.page_bytes() + HEADS.page_record_bytes()
}

/// Encodes a page with the oracle. Returns the packed page and its records.
fn oracle(page: &[u16]) -> (Vec<u8>, Vec<u8>) {
    let (mut bytes, mut records) = (vec![0; HEADS.page_bytes()], vec![0; HEADS.page_record_bytes()]);
    for unit in 0..HEADS.page_units() {
        HEADS.put(&mut bytes, &mut records, unit, &HEADS.encode(page, unit), 0);
    }
    (bytes, records)
}

/// Returns whether page `page`, counted over all layers' pages, equals the oracle's encoding.
fn is_packed(
    stream: &Stream,
    cache: &mut PackedKv,
    page: usize,
    expected: &(Vec<u8>, Vec<u8>),
) -> Result<bool, DeviceError> {
    let bytes = cache.packed_mut().read(stream, page * HEADS.page_bytes(), HEADS.page_bytes())?;
    let records = cache.records_mut().read(stream, page * HEADS.page_record_bytes(), HEADS.page_record_bytes())?;
    Ok((bytes, records) == *expected)
}

impl KvBench<'_> {
    /// Returns the rows of all measurements.
    pub fn measure(&self, progress: &dyn Fn(&str)) -> Result<Vec<Row>, BenchError> {
        let cases = CASES.map(|case| Case::of(self.timer.timing, case));
        let mut pool = self.pool(&cases, progress)?;
        let mut rows = Vec::new();
        for case in cases {
            rows.extend(self.attention(&mut pool, case, progress)?);
        }
        rows.extend(self.chunk(&mut pool, progress)?);
        rows.extend(self.unpack(&mut pool, progress)?);
        let unique = std::mem::take(&mut pool.unique);
        // Free memory for the layers of a step.
        drop(pool);
        rows.extend(self.step(&unique, progress)?);
        Ok(rows)
    }

    fn pack(&self, stage: KvPackStage) -> Result<KvPack, BenchError> {
        let arch = self.kernels.device().info().arch;
        let spec = KvPackSpec { stage, head_dim: HEAD_DIM, pdl: arch.has(Instruction::DependentLaunch) };
        Ok(KvPack::new(self.kernels.get(&VariantSpec::kv_pack(arch, spec))?)?)
    }

    fn pool(&self, cases: &[Case], progress: &dyn Fn(&str)) -> Result<Pool, BenchError> {
        let stream = self.timer.stream;
        let body = cases.iter().map(|case| case.body()).max().unwrap_or(0).max(CHUNK);
        let tails = cases.iter().map(|case| case.tails()).max().unwrap_or(1);
        progress(&format!("{body} KV pages from N(0, 1), and {tails} that rows are writing"));
        let unique = halves(&normal_bf16(UNIQUE * HEADS.page_elements(), 1.0, 3));
        let (mut bf16, bf16_shape) = pages_of(stream, body + tails, 1)?;
        let (mut hot, hot_shape) = pages_of(stream, tails, 1)?;
        fill(stream, &mut bf16, 0, body as usize, &unique)?;
        fill(stream, &mut bf16, body as usize, tails as usize, &unique)?;
        fill(stream, &mut hot, 0, tails as usize, &unique)?;
        let mut packed = PackedKv::new(stream, PackedShape::new(HEADS.shape(body)?, 1, UNITS)?)?;
        let table = DeviceBuffer::from_host(stream, &(0..body).collect::<Vec<_>>())?;
        let mut lost = DeviceBuffer::<u32>::zeroed(stream, 1)?;
        let mut ctx = ExecContext::new(stream, ContextSize::default())?;
        let source = KvLayer::new(&mut bf16, bf16_shape, 0)?;
        self.pack(KvPackStage::Chunk)?.chunk(&mut ctx, (source, 0), packed.layers(), (&table, 0, body), &mut lost)?;
        ctx.synchronize()?;
        let last = HEADS.page_of(&unique, (body as usize - 1) % UNIQUE);
        let right = is_packed(stream, &mut packed, body as usize - 1, &oracle(last))?;
        if !right || lost.read(stream, 0, 1)? != [0] || packed.free_units(stream)? != UNITS {
            return Err(BenchError::WrongBits { kernel: "kv_pack_chunk" });
        }
        Ok(Pool { unique, body, bf16, bf16_shape, packed, hot, hot_shape })
    }

    /// Measures attention of the newest tokens with the variants that an engine selects at this batch.
    fn attention(&self, pool: &mut Pool, case: Case, progress: &dyn Fn(&str)) -> Result<Vec<Row>, BenchError> {
        let (stream, Case { m, context, copies, .. }) = (self.timer.stream, case);
        let problem = GemmShape { m, n: OUT_COLUMNS, k: context };
        let inputs = Inputs::new(stream, case, pool.body)?;
        let mut ctx = ExecContext::new(stream, ContextSize::default())?;
        let (mut contenders, mut first) = (Vec::new(), BTreeMap::new());
        let mut kernels = Vec::new();
        for cache in [KvCache::Bf16, KvCache::Packed] {
            let (chosen, parts) = self.kernel(cache, case)?;
            let others = if self.all_variants { others(&chosen) } else { Vec::new() };
            for (nth, spec) in std::iter::once(chosen).chain(others).enumerate() {
                kernels.push((cache, Attention::new(self.kernels.get(&spec)?)?, parts, nth == 0));
            }
        }
        // Reserve before the first capture: graphs hold the addresses of the context's buffers.
        for (_, attention, parts, _) in &kernels {
            ctx.reserve(attention.context_size(m, HEADS.kv_heads, *parts)?)?;
        }
        for (cache, attention, parts, dispatched) in kernels {
            let mut out = DeviceBuffer::<u16>::zeroed(stream, m as usize * OUT_COLUMNS as usize)?;
            let mut run = |copy: usize, out: &mut DeviceBuffer<u16>| {
                let (keys, page_table) = match cache {
                    KvCache::Bf16 => (KvLayer::new(&mut pool.bf16, pool.bf16_shape, 0)?.into(), &inputs.tables[copy]),
                    KvCache::Packed => {
                        let hot = KvLayer::new(&mut pool.hot, pool.hot_shape, 0)?;
                        let hot_table = &inputs.hot_tables[copy];
                        let pages = pool.packed.layers();
                        (DecodeCache::Packed { pages, hot, hot_table }, &inputs.packed_tables[copy])
                    }
                };
                let rows = TokenRows { positions: &inputs.positions, page_table, table_pages: case.table_pages() };
                let qkv = MatrixRef::new(&inputs.qkv, m, COLUMNS, COLUMNS.into())?;
                let half = HEADS.head_dim / 2;
                let table = |angles| MatrixRef::new(angles, context, half, half.into());
                let rotary = RotaryTable { cosines: table(&inputs.cosines)?, sines: table(&inputs.sines)? };
                let options = AttentionOptions::new(rotary).parts(parts);
                let out = MatrixMut::new(out, m, OUT_COLUMNS, OUT_COLUMNS.into())?;
                attention.decode(&mut ctx, qkv, keys, rows, options, out)
            };
            let mut outs = Vec::new();
            for copy in 0..copies as usize {
                out.fill_bytes(stream, 0xff)?;
                run(copy, &mut out)?;
                if [0, copies as usize / 2, copies as usize - 1].contains(&copy) {
                    outs.push(out.to_host(stream)?);
                }
            }
            let no_number = outs.iter().flatten().any(|bits| bits & 0x7fff > 0x7f80);
            // Warps and blocks decide the order of sums.
            let sums = match attention.kernel().spec().op {
                Op::Attention(op) => (op.warps.get(), op.cluster.get()),
                _ => (0, 0),
            };
            if no_number || first.entry(sums).or_insert_with(|| outs.clone()) != &outs {
                return Err(BenchError::WrongBits { kernel: "attention over packed KV pages" });
            }
            let (graph, launches) = self.timer.record(problem, copies as usize, |copy| run(copy, &mut out))?;
            ctx.synchronize()?;
            let name = attention.kernel().spec().to_string();
            let name = if parts > 1 { format!("{name} x{parts}") } else { name };
            let bytes = case.bytes(cache);
            contenders.push((out, Contender { name, graph, launches, bytes, error: None, dispatched }));
        }
        let (outs, contenders): (Vec<_>, Vec<_>) = contenders.into_iter().unzip();
        let mut rows = self.timer.measure("attention", contenders, copies as usize, problem, progress)?;
        if let Some(bf16) = rows.first().map(|row| row.median_us) {
            rows.iter_mut().for_each(|row| row.speedup_over_bf16 = Some(bf16 / row.median_us));
        }
        for row in rows.iter().skip(1) {
            let ratio = row.speedup_over_bf16.unwrap_or(f64::NAN);
            progress(&format!("{m} x {context}: packed {ratio:.2}x BF16, {:.2} TB/s", row.gb_per_s / 1e3));
        }
        // The graphs use the context and the buffers, so both must live until here.
        drop((ctx, inputs, outs));
        Ok(rows)
    }

    /// Returns the variant that an engine selects for a batch, and its number of parts.
    fn kernel(&self, cache: KvCache, Case { m, context, .. }: Case) -> Result<(VariantSpec, u32), BenchError> {
        let info = self.kernels.device().info();
        let heads = (HEADS.kv_heads, HEADS.head_dim);
        let variant = decode_variant(&GpuModel::from(info), cache, heads, bucket(m), context);
        variant.ok_or(BenchError::NoVariant(GemmShape { m, n: OUT_COLUMNS, k: context }))
    }

    /// Measures packing of the pages of a chunk, of one layer.
    fn chunk(&self, pool: &mut Pool, progress: &dyn Fn(&str)) -> Result<Vec<Row>, BenchError> {
        let stream = self.timer.stream;
        let (copies, bytes) = self.chunks(pool.body);
        let table = DeviceBuffer::from_host(stream, &(0..pool.body).collect::<Vec<_>>())?;
        let mut lost = DeviceBuffer::<u32>::zeroed(stream, 1)?;
        let mut ctx = ExecContext::new(stream, ContextSize::default())?;
        let pack = self.pack(KvPackStage::Chunk)?;
        let problem = GemmShape { m: CHUNK, n: HEADS.kv_heads, k: HEADS.head_dim };
        pool.packed.packed_mut().fill_bytes(stream, 0xff)?;
        pool.packed.records_mut().fill_bytes(stream, 0xff)?;
        let mut run = |copy: usize| {
            let first = copy as u32 * CHUNK;
            let source = KvLayer::new(&mut pool.bf16, pool.bf16_shape, 0)?;
            pack.chunk(&mut ctx, (source, first), pool.packed.layers(), (&table, first, CHUNK), &mut lost)
        };
        (0..copies).try_for_each(&mut run)?;
        let (graph, launches) = self.timer.record(problem, copies, run)?;
        ctx.synchronize()?;
        let last = copies * CHUNK as usize - 1;
        let page = HEADS.page_of(&pool.unique, last % UNIQUE);
        if !is_packed(stream, &mut pool.packed, last, &oracle(page))? {
            return Err(BenchError::WrongBits { kernel: "kv_pack_chunk" });
        }
        let name = pack.kernel().spec().to_string();
        let contenders = vec![Contender { name, graph, launches, bytes, error: None, dispatched: true }];
        let rows = self.timer.measure("kv_pack", contenders, copies, problem, progress);
        // The graphs use the context and the buffers, so both must live until here.
        drop((ctx, table, lost));
        rows
    }

    /// Returns the number of copies of a chunk, and the bytes that one copy reads and writes.
    fn chunks(&self, body: u32) -> (usize, u64) {
        let bytes = CHUNK as usize * page_traffic();
        (self.timer.copies(bytes).min((body / CHUNK) as usize), bytes as u64)
    }

    /// Measures unpacking of the pages of a chunk to BF16.
    fn unpack(&self, pool: &mut Pool, progress: &dyn Fn(&str)) -> Result<Vec<Row>, BenchError> {
        let stream = self.timer.stream;
        let (copies, bytes) = self.chunks(pool.body);
        let arch = self.kernels.device().info().arch;
        let spec = KvUnpackSpec { head_dim: HEAD_DIM, pdl: arch.has(Instruction::DependentLaunch) };
        let unpack = KvUnpack::new(self.kernels.get(&VariantSpec::kv_unpack(arch, spec))?)?;
        let problem = GemmShape { m: CHUNK, n: HEADS.kv_heads, k: HEADS.head_dim };
        let tables = self.timer.each(copies, |copy| {
            let first = copy as u32 * CHUNK;
            DeviceBuffer::from_host(stream, &(first..first + CHUNK).collect::<Vec<_>>())
        })?;
        let mut outs = self.timer.each(copies, |_| pages_of(stream, CHUNK, 1))?;
        let mut ctx = ExecContext::new(stream, ContextSize::default())?;
        let mut run = |copy: usize| {
            let (out, shape) = &mut outs[copy];
            unpack.enqueue(&mut ctx, pool.packed.layers(), (&tables[copy], CHUNK), KvLayer::new(out, *shape, 0)?)
        };
        (0..copies).try_for_each(&mut run)?;
        let (graph, launches) = self.timer.record(problem, copies, run)?;
        ctx.synchronize()?;
        let first = (copies - 1) * CHUNK as usize % UNIQUE * HEADS.page_elements();
        if outs[copies - 1].0.to_host(stream)? != pool.unique[first..][..CHUNK as usize * HEADS.page_elements()] {
            return Err(BenchError::WrongBits { kernel: "kv_unpack" });
        }
        let name = unpack.kernel().spec().to_string();
        let contenders = vec![Contender { name, graph, launches, bytes, error: None, dispatched: true }];
        let rows = self.timer.measure("kv_unpack", contenders, copies, problem, progress);
        // The graphs use the context and the buffers, so both must live until here.
        drop((ctx, tables, outs));
        rows
    }

    /// Measures a step's packing of all layers for several numbers of rows that have filled a page.
    fn step(&self, unique: &[u16], progress: &dyn Fn(&str)) -> Result<Vec<Row>, BenchError> {
        let stream = self.timer.stream;
        let (mut hot, hot_shape) = pages_of(stream, STEP_ROWS, STEP_LAYERS)?;
        fill(stream, &mut hot, 0, (STEP_ROWS * STEP_LAYERS) as usize, unique)?;
        let mut cache = PackedKv::new(stream, PackedShape::new(HEADS.shape(STEP_ROWS)?, STEP_LAYERS, UNITS)?)?;
        let identity = DeviceBuffer::from_host(stream, &(0..STEP_ROWS).collect::<Vec<_>>())?;
        let mut lost = DeviceBuffer::<u32>::zeroed(stream, STEP_ROWS as usize)?;
        let mut ctx = ExecContext::new(stream, ContextSize::default())?;
        let pack = self.pack(KvPackStage::Step)?;
        let mut rows = Vec::new();
        for full in STEP_FULL {
            // Each copy fills the pages of other rows.
            let copies = STEP_ROWS.checked_div(full).unwrap_or(2) as usize;
            let positions = self.timer.each(copies, |copy| {
                let own = |row: u32| if row.checked_div(full) == Some(copy as u32) { PAGE_TOKENS - 1 } else { 1 };
                DeviceBuffer::from_host(stream, &(0..STEP_ROWS).map(own).collect::<Vec<_>>())
            })?;
            let problem = GemmShape { m: STEP_ROWS, n: STEP_LAYERS, k: full };
            cache.packed_mut().fill_bytes(stream, 0xff)?;
            cache.records_mut().fill_bytes(stream, 0xff)?;
            let mut run = |copy: usize| {
                let source = (KvLayer::new(&mut hot, hot_shape, 0)?, &identity);
                let tokens = TokenRows { positions: &positions[copy], page_table: &identity, table_pages: 1 };
                pack.step(&mut ctx, source, cache.layers(), tokens, STEP_ROWS, &mut lost)
            };
            (0..copies).try_for_each(&mut run)?;
            let (graph, launches) = self.timer.record(problem, copies, run)?;
            ctx.synchronize()?;
            // A page in the middle of the last layer.
            let row = STEP_ROWS as usize / 2;
            let expected = match full {
                0 => (vec![0xff; HEADS.page_bytes()], vec![0xff; HEADS.page_record_bytes()]),
                _ => oracle(HEADS.page_of(unique, row % UNIQUE)),
            };
            let page = (STEP_ROWS * (STEP_LAYERS - 1)) as usize + row;
            if !is_packed(stream, &mut cache, page, &expected)? || cache.free_units(stream)? != UNITS {
                return Err(BenchError::WrongBits { kernel: "kv_pack_step" });
            }
            let bytes = u64::from(STEP_ROWS) * 4 + u64::from(full * STEP_LAYERS) * page_traffic() as u64;
            let name = format!("{}, {full} full rows", pack.kernel().spec());
            let contenders = vec![Contender { name, graph, launches, bytes, error: None, dispatched: true }];
            rows.extend(self.timer.measure("kv_pack", contenders, copies, problem, progress)?);
        }
        // The graphs use the context and the buffers, so both must live until here.
        drop((ctx, hot, cache, identity, lost));
        Ok(rows)
    }
}

/// Returns the other variants that compute the same attention: every catalogued number of warps and blocks, with every
/// number of stages that fits.
fn others(chosen: &VariantSpec) -> Vec<VariantSpec> {
    let Op::Attention(own) = chosen.op else { return Vec::new() };
    let shapes: BTreeSet<_> = catalog::on::<AttentionSpec>(chosen.arch)
        .filter_map(|spec| match spec.op {
            Op::Attention(op)
                if op == (AttentionSpec { warps: op.warps, cluster: op.cluster, stages: op.stages, ..own }) =>
            {
                Some((op.warps, op.cluster))
            }
            _ => None,
        })
        .collect();
    let stages = || (1..=AttentionStages::MAX.get()).filter_map(|stages| AttentionStages::new(stages).ok());
    let specs = shapes.into_iter().flat_map(|(warps, cluster)| {
        stages().map(move |stages| VariantSpec::attention(chosen.arch, AttentionSpec { warps, cluster, stages, ..own }))
    });
    specs.filter(|spec| spec != chosen && Plan::new(spec).is_ok()).collect()
}

impl Case {
    /// Returns the bytes that attention must read and write: keys and values, QKV and A.
    fn bytes(self, cache: KvCache) -> u64 {
        let hot = HEADS.page_elements() as u64 * 2;
        let page = match cache {
            KvCache::Bf16 => hot,
            KvCache::Packed => PackedShape::page_bytes(HEADS.kv_heads, HEADS.head_dim),
        };
        u64::from(self.m) * (u64::from(self.table_pages() - 1) * page + hot + u64::from(COLUMNS + OUT_COLUMNS) * 2)
    }
}

/// The inputs of all copies of a case in addition to keys and values.
struct Inputs {
    qkv: DeviceBuffer<u16>,
    cosines: DeviceBuffer<u16>,
    sines: DeviceBuffer<u16>,
    positions: DeviceBuffer<u32>,
    /// Page tables by copy: of BF16 pages, packed pages, and hot pages.
    tables: Vec<DeviceBuffer<u32>>,
    packed_tables: Vec<DeviceBuffer<u32>>,
    hot_tables: Vec<DeviceBuffer<u32>>,
}

impl Inputs {
    fn new(stream: &Stream, case: Case, body: u32) -> Result<Self, DeviceError> {
        let normal =
            |count: u32, seed: u64| DeviceBuffer::from_host(stream, &halves(&normal_bf16(count as usize, 0.7, seed)));
        let each = |of: &dyn Fn(u32) -> Vec<u32>| {
            (0..case.copies).map(|copy| DeviceBuffer::from_host(stream, &of(copy))).collect::<Result<Vec<_>, _>>()
        };
        let angles = case.context * (HEADS.head_dim / 2);
        Ok(Self {
            qkv: normal(case.m * COLUMNS, 4)?,
            cosines: normal(angles, 5)?,
            sines: normal(angles, 6)?,
            positions: DeviceBuffer::from_host(stream, &vec![case.context - 1; case.m as usize])?,
            tables: each(&|copy| case.table(copy, |row| body + row))?,
            packed_tables: each(&|copy| case.table(copy, |_| NO_PAGE))?,
            hot_tables: each(&|copy| (copy * case.m..(copy + 1) * case.m).collect())?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Copies of a case share no page, and together exceed the L2 cache.
    #[test]
    fn copies_of_a_case_are_apart() {
        let timing = Timing::default();
        for (m, context) in CASES {
            let case = Case::of(&timing, (m, context));
            let all: Vec<u32> = (0..case.copies).flat_map(|copy| case.table(copy, |_| NO_PAGE)).collect();
            let pages: BTreeSet<u32> = all.iter().copied().filter(|page| *page != NO_PAGE).collect();
            assert_eq!(pages.len() as u32, case.body(), "{m} x {context}");
            assert!(pages.iter().all(|page| *page < case.body()));
            assert_eq!(all.len() as u32, case.tails() * case.table_pages());
            let bytes = u64::from(case.copies) * case.bytes(KvCache::Packed);
            assert!(bytes > 200_000_000, "{m} x {context}: {bytes}");
        }
    }

    #[test]
    fn packed_pages_are_fewer_bytes() {
        let case = Case { m: 2, context: 1024, copies: 1 };
        let io = u64::from(COLUMNS + OUT_COLUMNS) * 4;
        assert_eq!(case.bytes(KvCache::Bf16), 2 * 1024 * 8 * 128 * 2 * 2 + io);
        assert_eq!(case.bytes(KvCache::Packed), 2 * (15 * 197_376 + 262_144) + io);
        let one = Case { m: 2, context: 64, copies: 1 };
        assert_eq!(one.bytes(KvCache::Packed), one.bytes(KvCache::Bf16), "all in hot pages");
    }
}
