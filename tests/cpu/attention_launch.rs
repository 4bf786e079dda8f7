//! Launches of decode attention in the simulator, over bf16 pages and over packed pages.

use unweight_bench::{attention::Problem, kv::PackedPages};
use unweight_codegen::{
    VariantSpec,
    abi::AttentionArgs,
    plan::{GemmShape, Plan},
    spec::Op,
};

use crate::harness::{Buffer, CpuKernel, Run};

/// Gap after each row of QKV and of A, elements.
pub const GAP: usize = 8;

pub struct Outcome {
    pub out: Vec<u16>,
    /// The bf16 pages; with a packed cache, the hot pages.
    pub layer: Vec<u16>,
    pub fault: u32,
}

/// The KV cache of a launch.
struct Cache<'a> {
    /// The bf16 pages.
    pages: Buffer,
    table: Buffer,
    hot_table: Buffer,
    /// Packed pages, records, and bf16 units.
    packed: [Buffer; 3],
    from: Option<&'a PackedPages>,
}

impl<'a> Cache<'a> {
    fn new(problem: &Problem, from: Option<&'a PackedPages>) -> Self {
        let (pages, table) = from.map_or((&problem.layer, &problem.table), |from| (&from.hot, &from.table));
        let packed = from.map(|from| [&from.packed[..], &from.records, &from.unit_pages]).unwrap_or_default();
        Self {
            pages: Buffer::of(bytemuck::cast_slice(pages)),
            table: Buffer::of(bytemuck::cast_slice(table)),
            hot_table: Buffer::of(bytemuck::cast_slice(from.map_or(&[][..], |from| &from.hot_table))),
            packed: packed.map(Buffer::of),
            from,
        }
    }

    fn args(&self) -> AttentionArgs {
        let args = AttentionArgs { page_table: self.table.address(), ..AttentionArgs::default() };
        let Some(from) = self.from else { return AttentionArgs { layer: self.pages.address(), ..args } };
        let [layer, records, unit_pages] = self.packed.each_ref().map(Buffer::address);
        AttentionArgs {
            layer,
            records,
            unit_pages,
            units: from.units,
            hot: self.pages.address(),
            hot_table: self.hot_table.address(),
            hot_pages: from.hot_pages,
            ..args
        }
    }

    fn buffers(&self) -> [(&'static str, &[u8]); 6] {
        let [layer, records, units] = self.packed.each_ref().map(Buffer::slice);
        let (pages, table, hot_table) = (self.pages.slice(), self.table.slice(), self.hot_table.slice());
        [
            ("bf16 pages", pages),
            ("page_table", table),
            ("hot_table", hot_table),
            ("packed pages", layer),
            ("records", records),
            ("units", units),
        ]
    }

    /// Checks that attention wrote only bf16 pages.
    fn check_unwritten(&self) -> Result<(), String> {
        let Some(from) = self.from else { return Ok(()) };
        let before = [&from.packed[..], &from.records, &from.unit_pages];
        match self.packed.iter().zip(before).all(|(now, before)| now.slice() == before) {
            true => Ok(()),
            false => Err("packed pages, records or units were changed".to_owned()),
        }
    }
}

/// Runs in 3 parts, if the kernel supports parts.
pub fn launch(problem: &Problem, kernel: &mut CpuKernel, spec: &VariantSpec, seed: u64) -> Result<Outcome, String> {
    launch_on(problem, None, kernel, spec, seed, parts_of(spec))
}

/// Returns the number of parts that [`launch`] uses.
pub fn parts_of(spec: &VariantSpec) -> u32 {
    let Op::Attention(op) = spec.op else { panic!("{spec}") };
    if op.split { 3 } else { 1 }
}

/// Runs over the problem's bf16 pages, or over packed pages. With several parts, runs twice, the second time on what
/// the first launch left.
pub fn launch_on(
    problem: &Problem,
    packed: Option<&PackedPages>,
    kernel: &mut CpuKernel,
    spec: &VariantSpec,
    seed: u64,
    parts: u32,
) -> Result<Outcome, String> {
    let case = &problem.case;
    let (m, columns, out_columns) = (case.positions.len(), case.columns(), case.out_columns());
    let of = |values: &[u16]| Buffer::of(bytemuck::cast_slice(values));
    let padded: Vec<u16> =
        problem.qkv.chunks(columns).flat_map(|row| row.iter().copied().chain([0x7fc1; GAP])).collect();
    let (qkv, bias, cache) = (of(&padded), of(&problem.bias), Cache::new(problem, packed));
    let [cosines, sines] = problem.tables().each_ref().map(|table| of(table));
    let norms = problem.norms.each_ref().map(|norm| of(norm));
    let positions = Buffer::of(bytemuck::cast_slice(&case.positions));
    let out = Buffer::new(m * (out_columns + GAP) * 2);
    let fault = Buffer::zeroed(4);
    let optional = |buffer: &Buffer| if buffer.slice().is_empty() { 0 } else { buffer.address() };
    let shape = GemmShape::rows((m * case.kv_heads) as u32 * parts);
    let needs = Plan::new(spec).unwrap().workspace(shape, 132);
    let (partials, counters) = match parts {
        1 => (Buffer::new(0), Buffer::new(0)),
        _ => (Buffer::new(needs.bytes as usize), Buffer::zeroed(needs.counters as usize * 4)),
    };
    let (scale, eps) = problem.scales();
    let args = AttentionArgs {
        qkv: qkv.address(),
        out: out.address(),
        positions: positions.address(),
        cosines: cosines.address(),
        sines: sines.address(),
        bias: optional(&bias),
        q_norm: optional(&norms[0]),
        k_norm: optional(&norms[1]),
        fault: fault.address(),
        partials: optional(&partials),
        counters: optional(&counters),
        qkv_pitch: (columns + GAP) as u64,
        out_pitch: (out_columns + GAP) as u64,
        m: m as u32,
        kv_heads: case.kv_heads as u32,
        group: case.group as u32,
        pages: problem.pages,
        table_pages: problem.table_pages as u32,
        max_positions: problem.max_positions,
        window: case.window,
        rope_dim: case.rope_dim as u32,
        scale,
        eps,
        parts,
        ..cache.args()
    };
    let inputs = [&qkv, &positions, &cosines, &sines, &bias, &norms[0], &norms[1]];
    let mut buffers: Vec<_> = inputs.into_iter().map(|buffer| ("an input", buffer.slice())).collect();
    buffers.extend([("out", out.slice()), ("fault", fault.slice())]);
    buffers.extend([("partials", partials.slice()), ("counters", counters.slice())]);
    buffers.extend(cache.buffers());
    for seed in [seed, seed + 1000].into_iter().take(if parts > 1 { 2 } else { 1 }) {
        // SAFETY: every buffer above outlives the launch, and the kernel reaches them through checked wrappers only.
        unsafe { kernel.run(spec, Run { problem: shape, sms: 132, seed }, &args, &buffers)? };
        if counters.slice().iter().any(|&byte| byte != 0) {
            return Err("counters are not zero after the launch".to_owned());
        }
    }
    cache.check_unwritten()?;
    Ok(Outcome { out: rows_of(&out, out_columns), layer: cache.pages.u16s(), fault: fault.u32s()[0] })
}

/// Returns A without the gaps after its rows, which must be unchanged.
pub fn rows_of(out: &Buffer, out_columns: usize) -> Vec<u16> {
    let untouched = u16::from_ne_bytes([Buffer::POISON; 2]);
    let rows = out.u16s();
    let rows = rows.chunks(out_columns + GAP).flat_map(|row| {
        assert!(row[out_columns..].iter().all(|&v| v == untouched), "the gap after a row was written");
        row[..out_columns].to_vec()
    });
    rows.collect()
}
