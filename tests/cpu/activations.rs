//! Activation kernels in the simulator, checked against double precision or against exact bytes: random rows and edges,
//! entries that are out of range, and planted bugs that must be caught.

use unweight_bench::oracle;
use unweight_codegen::{
    VariantSpec,
    abi::{EmbedArgs, NormArgs, RopeArgs, SiluMulArgs},
    kv,
    plan::GemmShape,
    spec::{EmbedSpec, NormKind, NormSpec, Op, SiluMulSpec, catalog},
};
use unweight_format::{
    Histogram, Matrix,
    raw::{PackedTensor, packed::pack},
    testing::Random,
};

use crate::{
    harness::{Buffer, CpuKernel, Edit, spec},
    rows::{GAP, POISON, bytes, launch, random, words, written_rows},
};

// ---- norm ----

struct Norm {
    m: usize,
    d: usize,
    /// Indices of the rows of `x`; without a list, all rows.
    list: Option<Vec<u32>>,
    x: Vec<u16>,
    /// Weights, followed by biases that some kinds do not read.
    gamma: Vec<u16>,
    /// The output before an addition; its gaps are poisoned.
    before: Vec<u16>,
}

const EPS: f32 = 1e-5;

impl Norm {
    fn new(m: usize, d: usize, list: Option<&[u32]>) -> Self {
        let seed = (m * d) as u64;
        let mut x = random(m * (d + GAP), seed);
        // A row of zeros, and a row of small numbers, for which eps matters.
        if m > 2 {
            x[..d].fill(0);
            x[d + GAP..][..d].iter_mut().for_each(|x| *x = *x & 0x807f | 117 << 7);
        }
        let mut before = random(m.max(list.map_or(0, <[u32]>::len)) * (d + GAP), seed + 2);
        before.chunks_exact_mut(d + GAP).for_each(|row| row[d..].fill(POISON));
        Self { m, d, list: list.map(<[u32]>::to_vec), x, gamma: random(2 * d, seed + 1), before }
    }

    /// Rows far from zero, whose variance cannot be computed from their squares.
    fn far(m: usize, d: usize) -> Self {
        let mut norm = Self::new(m, d, None);
        norm.x.iter_mut().for_each(|x| *x = oracle::rounded(60.0 + oracle::value(*x)));
        norm
    }

    fn check(&self, kernel: &mut CpuKernel, spec: &VariantSpec) -> Result<(), String> {
        let (d, pitch) = (self.d, self.d + GAP);
        let m = self.list.as_ref().map_or(self.m, Vec::len);
        let Op::Norm(op) = spec.op else { unreachable!("a norm") };
        let weights = &self.gamma[..op.gamma_elements(d as u32) as usize];
        let (x, gamma) = (Buffer::of(&bytes(&self.x)), Buffer::of(&bytes(weights)));
        let list = self.list.as_deref().map(words);
        let y = if op.add { Buffer::of(&bytes(&self.before[..m * pitch])) } else { Buffer::new(m * pitch * 2) };
        let fault = Buffer::zeroed(4);
        let args = NormArgs {
            x: x.address(),
            gamma: gamma.address(),
            rows: list.as_ref().map_or(0, Buffer::address),
            y: y.address(),
            fault: fault.address(),
            x_pitch: pitch as u64,
            y_pitch: pitch as u64,
            eps: EPS,
            source_rows: self.m as u32,
            d: d as u32,
            reserved: 0,
        };
        let mut buffers = vec![("x", &x), ("gamma", &gamma), ("y", &y), ("fault", &fault)];
        buffers.extend(list.as_ref().map(|list| ("rows", list)));
        launch(kernel, spec, GemmShape::rows(m as u32), &args, &buffers)?;
        let mut reported = 0;
        for (row, y) in written_rows(&y, m, d, pitch)?.chunks_exact(d).enumerate() {
            let source = self.list.as_ref().map_or(row, |list| list[row] as usize);
            if source >= self.m {
                reported = row as u32 + 1;
                let left = if op.add { &self.before[row * pitch..][..d] } else { &vec![0; d] };
                if y != left {
                    return Err(format!("row {row} is neither zero nor unchanged"));
                }
                continue;
            }
            let before = op.add.then(|| &self.before[row * pitch..][..d]);
            let spans = oracle::norm_of(op.kind, &self.x[source * pitch..][..d], weights, EPS, before);
            if let Some(wrong) = oracle::outside(y, &spans) {
                return Err(format!("row {row} of [{m}, {d}], {wrong}"));
            }
        }
        match fault.u32s()[0] {
            fault if fault == reported => Ok(()),
            fault => Err(format!("the fault word is {fault} instead of {reported}")),
        }
    }
}

fn norms() -> Vec<Norm> {
    vec![
        Norm::new(4, 72, None),
        Norm::new(1, 8, None),
        Norm::far(3, 264),
        Norm::new(3, 4096, None),
        Norm::new(2, 16384, None),
        Norm::new(5, 2056, Some(&[4, 0, 4])),
        // The last entry is the one reported, because the simulator runs rows in order.
        Norm::new(3, 136, Some(&[2, 3, 1, u32::MAX])),
    ]
}

#[test]
fn norms_match_double_precision() {
    let mut specs: Vec<_> = catalog::of::<NormSpec>().collect();
    specs.extend(["norm_t1024_pdl", "norm_t1024_layer_add_pdl", "norm_t1024_layer_bias_add_pdl"].map(spec));
    let mut kernel = CpuKernel::all(&specs, &[]);
    for spec in specs {
        for case in norms() {
            case.check(&mut kernel, &spec).unwrap_or_else(|wrong| panic!("{spec}: {wrong}"));
        }
    }
}

/// A norm in place, as models run the norms of all heads together.
#[test]
fn norms_in_place_match_those_apart() {
    let (m, d, pitch) = (3usize, 2056usize, 2056 + GAP);
    let mut x = random(m * pitch, 5);
    x.chunks_exact_mut(pitch).for_each(|row| row[d..].fill(POISON));
    let both = random(2 * d, 6);
    for name in ["norm_t256_pdl", "norm_t256_rms_once_pdl", "norm_t512_layer", "norm_t256_layer_bias"] {
        let spec = spec(name);
        let Op::Norm(op) = spec.op else { unreachable!("a norm") };
        let gamma = &both[..op.gamma_elements(d as u32) as usize];
        let (y, gamma_at, fault) = (Buffer::of(&bytes(&x)), Buffer::of(&bytes(gamma)), Buffer::zeroed(4));
        let args = NormArgs {
            x: y.address(),
            gamma: gamma_at.address(),
            rows: 0,
            y: y.address(),
            fault: fault.address(),
            x_pitch: pitch as u64,
            y_pitch: pitch as u64,
            eps: EPS,
            source_rows: m as u32,
            d: d as u32,
            reserved: 0,
        };
        let buffers = [("y", &y), ("gamma", &gamma_at), ("fault", &fault)];
        launch(&mut CpuKernel::of(&spec, &[]), &spec, GemmShape::rows(m as u32), &args, &buffers).unwrap();
        let of = |row: &[u16]| oracle::norm_of(op.kind, &row[..d], gamma, EPS, None);
        let spans: Vec<_> = x.chunks_exact(pitch).flat_map(of).collect();
        assert_eq!(oracle::outside(&written_rows(&y, m, d, pitch).unwrap(), &spans), None, "{name}");
    }
}

#[test]
fn planted_bugs_of_other_norms_are_caught() {
    let header = "unweight/kernels/norm.cuh";
    for (name, from, to) in [
        ("norm_t256_layer_pdl", "add_elements(middle, x[i].w);", ""),
        ("norm_t256_layer_pdl", "add_centred(sum, x[i].z, middle);", "add_centred(sum, x[i].z, 0);"),
        ("norm_t256_layer_pdl", "block_sum<Config>(sum, Smem<Config>::kSquares)", "block_sum<Config>(sum, 0)"),
        ("norm_t256_layer_pdl", "high = ptx::add(high, -middle);", ""),
        ("norm_t256_layer_pdl", "static_cast<float>(args.d)", "static_cast<float>(chunks)"),
        ("norm_t256_layer_bias_pdl", "args.gamma + args.d + chunk * kChunk", "args.gamma + chunk * kChunk"),
        ("norm_t256_layer_bias_pdl", "high = ptx::add(high, high_of(beta));", ""),
        ("norm_t256_layer_bias_add_pdl", "low = ptx::add(low, low_of(beta));", "low = low_of(beta);"),
        (
            "norm_t256_layer_bias_pdl",
            "Config::kKind == NormKind::kLayer || kBiased<Config>",
            "kBiased<Config> && false",
        ),
        ("norm_t256_layer_bias_pdl", "gamma[i].z, beta.z,", "gamma[i].z, beta.w,"),
        ("norm_t256_rms_once_pdl", "Config::kKind == NormKind::kRms)", "true)"),
        ("norm_t256_rms_plus_one_pdl", "ptx::add(1.0f, high_of(gamma))", "high_of(gamma)"),
        ("norm_t256_rms_once_pdl", "high = ptx::mul(high, high_of(gamma));", "high = ptx::mul(high, low_of(gamma));"),
        ("norm_t256_add_pdl", "low = ptx::add(low_of(y), low);", "low = ptx::add(low_of(x), low);"),
        ("norm_t256_add_pdl", "before = ptx::ld_global_x4(y + chunk * kChunk);", ";"),
        ("norm_t256_add_pdl", "if constexpr (!Config::kAdd) {", "{"),
        (
            "norm_t256_rms_once_add_pdl",
            "normed<Config>(x[i].y, gamma[i].y, beta.y, before.y,",
            "normed<Config>(x[i].y, gamma[i].y, beta.y, 0,",
        ),
    ] {
        let spec = spec(name);
        let mut kernel = CpuKernel::of(&spec, &[Edit { header, from, to }]);
        let caught = norms().iter().any(|case| case.check(&mut kernel, &spec).is_err());
        assert!(caught, "{name}: the planted bug was not caught: `{to}` for `{from}`");
    }
}

#[test]
fn planted_bugs_of_norms_are_caught() {
    let (kernel_header, shared) = ("unweight/kernels/norm.cuh", "unweight/activation/element.cuh");
    for (header, from, to) in [
        (kernel_header, "sum = activation::add_squares(sum, x.w);", ""),
        (kernel_header, "source >= args.source_rows", "source > args.source_rows"),
        (kernel_header, "ptx::st_global(args.fault, row + 1)", "ptx::st_global(args.fault, row)"),
        (kernel_header, "args.x + source * args.x_pitch", "args.x + row * args.x_pitch"),
        (kernel_header, "args.y + row * args.y_pitch", "args.y + row * u64(args.d)"),
        (kernel_header, "distance = 16;", "distance = 8;"),
        (kernel_header, "warp < Config::kThreads / 32; ++warp", "warp + 1 < Config::kThreads / 32; ++warp"),
        (kernel_header, "ptx::bar_sync();", ""),
        (
            shared,
            "ptx::add(ptx::div(sum_of_squares, static_cast<float>(count)), eps)",
            "ptx::div(sum_of_squares, static_cast<float>(count))",
        ),
        (
            shared,
            "const u32 y = ptx::cvt_rn_bf16x2(ptx::mul(low_of(x), scale), ptx::mul(high_of(x), scale));\n    \
             return ptx::cvt_rn_bf16x2(ptx::mul(low_of(y), low_of(gamma)), ptx::mul(high_of(y), high_of(gamma)));",
            "return ptx::cvt_rn_bf16x2(low_of(x) * scale * low_of(gamma), high_of(x) * scale * high_of(gamma));",
        ),
        (shared, "ptx::mul(high_of(y), high_of(gamma))", "ptx::mul(high_of(y), low_of(gamma))"),
    ] {
        let spec = spec("norm_t256_pdl");
        let Some(edit) = Edit::planted(header, from, to) else { continue };
        let mut kernel = CpuKernel::of(&spec, &[edit]);
        let caught = norms().iter().any(|case| case.check(&mut kernel, &spec).is_err());
        assert!(caught, "the planted bug was not caught: `{to}` for `{from}`");
    }
}

// ---- silu_mul ----

/// Layout of gate and up: side by side in one matrix, one matrix after the other, or interleaved by 8 columns.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Pair {
    Beside,
    Apart,
    Turns,
}

fn check_silu_mul(
    kernel: &mut CpuKernel,
    spec: &VariantSpec,
    (m, n): (usize, usize),
    pair: Pair,
) -> Result<(), String> {
    let (x_pitch, y_pitch) = (2 * n + GAP, n + GAP);
    let mut x = random(m * x_pitch, (m + n) as u64);
    // Gates far to both sides, and zero.
    for (gate, value) in x.iter_mut().zip([20.0, -20.0, 90.0, -90.0, -300.0, 0.0, -0.0, 1e30]) {
        *gate = oracle::rounded(value);
    }
    // In this layout, every row belongs to a gate or to an up.
    let of =
        |from: usize| -> Vec<u16> { x.chunks_exact(x_pitch).flat_map(|row| &row[from..from + n]).copied().collect() };
    let turns = |row: &[u16]| -> Vec<u16> {
        let ((gate, up), gap) = (row[..2 * n].split_at(n), &row[2 * n..]);
        let both = gate.chunks(8).zip(up.chunks(8)).flat_map(|(gate, up)| [gate, up].concat());
        both.chain(gap.iter().copied()).collect()
    };
    let laid = match pair {
        Pair::Beside => x.clone(),
        Pair::Apart => [of(0), of(n)].concat(),
        Pair::Turns => x.chunks_exact(x_pitch).flat_map(turns).collect(),
    };
    let (source, y) = (Buffer::of(&bytes(&laid)), Buffer::new(m * y_pitch * 2));
    let (pitch, up, spread) = match pair {
        Pair::Beside => (x_pitch, n, 1),
        Pair::Apart => (n, m * n, 1),
        Pair::Turns => (x_pitch, 8, 2),
    };
    let Op::SiluMul(op) = spec.op else { unreachable!("a silu_mul") };
    let (row_blocks, function) = ((n as u32).div_ceil(op.block_columns()), op.gate);
    let args = SiluMulArgs {
        gate: source.address(),
        up: source.address() + 2 * up as u64,
        y: y.address(),
        x_pitch: pitch as u64,
        y_pitch: y_pitch as u64,
        columns: n as u32,
        row_blocks,
        spread,
        reserved: 0,
    };
    let problem = GemmShape { m: m as u32, n: n as u32, k: 0 };
    launch(kernel, spec, problem, &args, &[("x", &source), ("y", &y)])?;
    let activated = |row: &[u16]| {
        let (gate, up) = row[..2 * n].split_at(n);
        gate.iter().zip(up).map(|(gate, up)| oracle::gated(function, *gate, *up)).collect::<Vec<_>>()
    };
    let spans: Vec<_> = x.chunks_exact(x_pitch).flat_map(activated).collect();
    oracle::outside(&written_rows(&y, m, n, y_pitch)?, &spans)
        .map_or(Ok(()), |wrong| Err(format!("[{m}, {n}] {pair:?}: {wrong}")))
}

const SILU_MULS: [(usize, usize); 5] = [(1, 8), (3, 72), (2, 1024), (5, 1032), (1, 3000)];

#[test]
fn activations_match_double_precision() {
    let mut specs: Vec<_> = catalog::of::<SiluMulSpec>().collect();
    specs.push(spec("silu_mul_t256_pdl"));
    let mut kernel = CpuKernel::all(&specs, &[]);
    for spec in specs {
        for (m, n) in SILU_MULS {
            for pair in [Pair::Beside, Pair::Apart, Pair::Turns] {
                check_silu_mul(&mut kernel, &spec, (m, n), pair).unwrap_or_else(|wrong| panic!("{spec}: {wrong}"));
            }
        }
    }
}

#[test]
fn planted_bugs_of_activations_are_caught() {
    let header = "unweight/kernels/silu_mul.cuh";
    for (from, to) in [
        ("args.up + at", "args.up + at + 8"),
        ("static_cast<u64>(column) * args.spread", "static_cast<u64>(column)"),
        (
            "ptx::mul(activate<Config>(low_of(gate)), low_of(up))",
            "ptx::mul(activate<Config>(low_of(up)), low_of(gate))",
        ),
        ("activate<Config>(high_of(gate)), high_of(up)", "activate<Config>(high_of(gate)), low_of(up)"),
        ("== GateFunction::kGelu ?", "!= GateFunction::kGelu ?"),
        ("ptx::ctaid() / args.row_blocks", "ptx::ctaid() % args.row_blocks"),
        ("if (column >= args.columns) return;", ""),
        ("gated<Config>(gate.w, up.w)", "gated<Config>(gate.w, up.z)"),
        ("args.y + row * args.y_pitch", "args.y + row * args.x_pitch"),
    ] {
        let spec = spec("silu_mul_t128");
        let Some(edit) = Edit::planted(header, from, to) else { continue };
        let mut kernel = CpuKernel::of(&spec, &[edit]);
        let pair = if from.contains("spread") { Pair::Turns } else { Pair::Beside };
        let caught = SILU_MULS.iter().any(|shape| check_silu_mul(&mut kernel, &spec, *shape, pair).is_err());
        assert!(caught, "the planted bug was not caught: `{to}` for `{from}`");
    }
}

// ---- embed ----

/// A table `[n, k]` whose rows have single escapes and lists of escapes longer than a warp.
struct Table {
    n: usize,
    k: usize,
    bytes: Vec<u8>,
    packed: PackedTensor<Vec<u8>>,
}

impl Table {
    fn new(n: usize, k: usize) -> Self {
        let mut random = Random::new((n * k) as u64);
        let special = [0u16, 0x8000, 0x0001, 0x807f, 0x7f80, 0xff80, 0x7fc1, 0x0080, 0x7d7f];
        let bytes: Vec<u8> = (0..n * k)
            .flat_map(|i| {
                let r = random.bits();
                let dense = i / k == 21 && i % k < (n * k / 1000).min(40);
                let weight = if dense || random.below(400) == 0 {
                    special[(r >> 40) as usize % special.len()]
                } else {
                    (r as u16 & 0x807f) | (108 + (r >> 20 & 15) as u16) << 7
                };
                weight.to_le_bytes()
            })
            .collect();
        let packed = pack(Matrix::new(&bytes, n, k).unwrap(), &Histogram::of(&bytes)).unwrap();
        Self { n, k, bytes, packed }
    }

    /// Looks up rows `ids` of the first `d` columns; the first `vocabulary` rows are valid ids.
    fn check(
        &self,
        kernel: &mut CpuKernel,
        spec: &VariantSpec,
        (ids, d, vocabulary): (&[u32], usize, usize),
    ) -> Result<(), String> {
        let pitch = d + GAP;
        let (table, list) = (Buffer::of(&self.bytes), words(ids));
        let (packed, heads, escapes) = (
            Buffer::of(self.packed.packed()),
            Buffer::of(self.packed.escape_heads()),
            Buffer::of(self.packed.escapes()),
        );
        let (y, fault) = (Buffer::new(ids.len() * pitch * 2), Buffer::zeroed(4));
        let args = EmbedArgs {
            ids: list.address(),
            table: table.address(),
            packed: packed.address(),
            escape_heads: heads.address(),
            escapes: escapes.address(),
            y: y.address(),
            fault: fault.address(),
            table_pitch: self.k as u64,
            y_pitch: pitch as u64,
            vocabulary: vocabulary as u32,
            d: d as u32,
            tile_cols: (self.k / 64) as u32,
            escape_words: (self.packed.escapes().len() / 4) as u32,
            base: self.packed.window().base().into(),
            reserved: 0,
        };
        let buffers = [
            ("ids", &list),
            ("table", &table),
            ("packed", &packed),
            ("heads", &heads),
            ("escapes", &escapes),
            ("y", &y),
            ("fault", &fault),
        ];
        launch(kernel, spec, GemmShape::rows(ids.len() as u32), &args, &buffers)?;
        let mut reported = 0;
        for (row, y) in written_rows(&y, ids.len(), d, pitch)?.chunks_exact(d).enumerate() {
            let id = ids[row] as usize;
            let expected = if id < vocabulary {
                self.bytes[id * self.k * 2..][..d * 2].to_vec()
            } else {
                reported = row as u32 + 1;
                vec![0; d * 2]
            };
            if let Some(at) = bytes(y).iter().zip(&expected).position(|(got, want)| got != want) {
                return Err(format!("row {row}, id {id}: byte {at} differs"));
            }
        }
        match fault.u32s()[0] {
            fault if fault == reported => Ok(()),
            fault => Err(format!("the fault word is {fault} instead of {reported}")),
        }
    }

    /// Looks up every id, an invalid id, and of a padded table only the valid rows.
    fn check_all(&self, kernel: &mut CpuKernel, spec: &VariantSpec) -> Result<(), String> {
        let mut ids: Vec<u32> = (0..self.n as u32).rev().collect();
        self.check(kernel, spec, (&ids, self.k, self.n))?;
        ids.truncate(40);
        ids.extend([self.n as u32, 3, 3]);
        self.check(kernel, spec, (&ids, self.k - 56, self.n - 5))?;
        self.check(kernel, spec, (&[u32::MAX], self.k, self.n))
    }
}

fn tables() -> [Table; 2] {
    [Table::new(128, 192), Table::new(64, 64 * 70)]
}

#[test]
fn embedding_rows_are_copied() {
    let specs: Vec<_> = catalog::of::<EmbedSpec>().collect();
    let mut kernel = CpuKernel::all(&specs, &[]);
    let tables = tables();
    let listed =
        tables.iter().flat_map(|table| table.packed.escape_heads().chunks_exact(4)).filter(|head| head[3] >> 7 == 1);
    assert!(listed.count() > 20, "the tables have too few lists");
    for spec in specs {
        for table in &tables {
            table.check_all(&mut kernel, &spec).unwrap_or_else(|wrong| panic!("{spec}: {wrong}"));
        }
    }
}

#[test]
fn any_bytes_of_a_packed_table_stay_in_bounds() {
    let spec = spec("embed_packed");
    let mut kernel = CpuKernel::of(&spec, &[]);
    let mut random = Random::new(5);
    let mut noise = |bytes: usize| Buffer::of(&random.bytes(bytes));
    let (tiles, ids) = (4, words(&(0..128).collect::<Vec<_>>()));
    for escape_words in [0u32, 1, 70] {
        let (packed, escapes) = (noise(tiles * 6144), noise(escape_words as usize * 4));
        // Lists whose index is near the section's end, on both sides.
        let heads: Vec<u32> =
            noise(tiles * 16).u32s().iter().map(|head| (1 << 31) | ((head >> 4) % (escape_words + 2))).collect();
        let (heads, y, fault) = (words(&heads), Buffer::new(128 * 128 * 2), Buffer::zeroed(4));
        let args = EmbedArgs {
            ids: ids.address(),
            packed: packed.address(),
            escape_heads: heads.address(),
            escapes: escapes.address(),
            y: y.address(),
            fault: fault.address(),
            y_pitch: 128,
            vocabulary: 128,
            d: 128,
            tile_cols: 2,
            escape_words,
            base: 112,
            ..EmbedArgs::default()
        };
        let buffers = [
            ("ids", &ids),
            ("packed", &packed),
            ("heads", &heads),
            ("escapes", &escapes),
            ("y", &y),
            ("fault", &fault),
        ];
        launch(&mut kernel, &spec, GemmShape::rows(128), &args, &buffers).unwrap();
    }
}

#[test]
fn planted_bugs_of_embeddings_are_caught() {
    let header = "unweight/kernels/embed.cuh";
    for (name, from, to) in [
        ("embed_bf16", "id * args.table_pitch", "id * u64(args.d)"),
        ("embed_bf16", "id >= args.vocabulary", "id > args.vocabulary"),
        ("embed_bf16", "ptx::st_global(args.fault, row + 1)", "ptx::st_global(args.fault, id)"),
        (
            "embed_bf16",
            "column += kBlockThreads * kChunk) {\n        ptx::st_global_x4(y + column, ptx::ld",
            "column += args.d) {\n        ptx::st_global_x4(y + column, ptx::ld",
        ),
        ("embed_packed", "row % 8 * 4 + part", "row % 4 * 4 + part"),
        ("embed_packed", "row >= 8;", "row > 8;"),
        ("embed_packed", "if (at < args.d) ", ""),
        ("embed_packed", "id % packed::kTile / packed::kBlockRows", "id % packed::kTile / packed::kTile"),
        ("embed_packed", "if (head != 0) replace_escapes", "if (false) replace_escapes"),
        ("embed_packed", "if ((head & packed::kListHead) == 0) {", "if (true) {"),
        (
            "embed_packed",
            "for (u32 i = 1; i <= count && i < words; ++i)",
            "for (u32 i = 1; i < count && i < words; ++i)",
        ),
        (
            "embed_packed",
            "packed::patch(weights, packed::record_of_weight(record, args.base), lane);",
            "packed::patch(weights, record, lane);",
        ),
        (
            "embed_packed",
            "upper ? weights.p[2 * i + 1] : weights.p[2 * i]",
            "upper ? weights.p[2 * i] : weights.p[2 * i + 1]",
        ),
        ("embed_packed", "i * 8 + part * 2", "i * 8 + part"),
    ] {
        let spec = spec(name);
        let Some(edit) = Edit::planted(header, from, to) else { continue };
        let mut kernel = CpuKernel::of(&spec, &[edit]);
        let caught = tables().iter().any(|table| table.check_all(&mut kernel, &spec).is_err());
        assert!(caught, "the planted bug was not caught: `{to}` for `{from}`");
    }
}

// ---- rope ----

struct Rope {
    m: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    rope_dim: usize,
    start: usize,
    bias: bool,
    norms: bool,
    /// Pages of the sequence. A page that the cache does not have is skipped.
    pages: Vec<u32>,
}

/// Number of pages in the cache.
const PAGES: usize = 4;

impl Rope {
    fn columns(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    fn check(&self, kernel: &mut CpuKernel, spec: &VariantSpec) -> Result<(), String> {
        let Self { m, heads, kv_heads, head_dim, rope_dim, start, .. } = *self;
        let (columns, pitch, half) = (self.columns(), self.columns() + GAP, rope_dim / 2);
        let mut x = vec![POISON; m * pitch];
        for (row, x) in x.chunks_exact_mut(pitch).enumerate() {
            x[..columns].copy_from_slice(&random(columns, (row + columns) as u64));
        }
        let (bias, q_norm, k_norm) = (random(columns, 1), random(head_dim, 2), random(head_dim, 3));
        let angle =
            |at: usize, of: fn(f64) -> f64| oracle::rounded(of((at / half) as f64 * 0.8f64.powi((at % half) as i32)));
        let table = |of| (0..(start + m) * half).map(|at| angle(at, of)).collect::<Vec<u16>>();
        let (cosines, sines) = (table(f64::cos), table(f64::sin));
        let Op::Rope(op) = spec.op else { unreachable!("a rotation") };
        let kind = if op.plus_one { NormKind::RmsPlusOne } else { NormKind::Rms };
        let laid = |table: &Vec<u16>| if op.adjacent { oracle::adjacent_table(table, half) } else { table.clone() };
        let layer = PAGES * kv_heads * 2 * 64 * head_dim;
        let on_host = |halves: &[u16]| Buffer::of(&bytes(halves));
        let (qkv, cache, fault) = (on_host(&x), Buffer::new(layer * 2), Buffer::zeroed(4));
        let (bias_at, q_at, k_at) = (on_host(&bias), on_host(&q_norm), on_host(&k_norm));
        let (cosines_at, sines_at) = (on_host(&laid(&cosines)), on_host(&laid(&sines)));
        let pages = words(&self.pages);
        let address = |is_used: bool, buffer: &Buffer| if is_used { buffer.address() } else { 0 };
        let args = RopeArgs {
            qkv: qkv.address(),
            bias: address(self.bias, &bias_at),
            q_norm: address(self.norms, &q_at),
            k_norm: address(self.norms, &k_at),
            cosines: cosines_at.address(),
            sines: sines_at.address(),
            cache: cache.address(),
            pages: pages.address(),
            fault: fault.address(),
            pitch: pitch as u64,
            eps: EPS,
            start: start as u32,
            heads: heads as u32,
            kv_heads: kv_heads as u32,
            rope_dim: rope_dim as u32,
            cache_pages: PAGES as u32,
        };
        let buffers = [
            ("qkv", &qkv),
            ("bias", &bias_at),
            ("q_norm", &q_at),
            ("k_norm", &k_at),
            ("cosines", &cosines_at),
            ("sines", &sines_at),
            ("cache", &cache),
            ("pages", &pages),
            ("fault", &fault),
        ];
        launch(kernel, spec, GemmShape::rows(m as u32), &args, &buffers)?;
        let got = written_rows(&qkv, m, columns, pitch)?;
        let cache = cache.u16s();
        let (mut written, mut reported) = (0, 0);
        for row in 0..m {
            let position = start + row;
            let angles = (&cosines[position * half..][..half], &sines[position * half..][..half]);
            let page = self.pages[position / 64] as usize;
            if page >= PAGES {
                reported = row as u32 + 1;
            }
            for head in 0..heads + 2 * kv_heads {
                let (is_query, is_value) = (head < heads, head >= heads + kv_heads);
                let gamma = if is_query { &q_norm } else { &k_norm };
                let spans = oracle::head(
                    &x[row * pitch + head * head_dim..][..head_dim],
                    self.bias.then(|| &bias[head * head_dim..][..head_dim]),
                    (self.norms && !is_value).then_some((kind, gamma.as_slice(), EPS)),
                    (!is_value).then_some(angles),
                    op.adjacent,
                );
                let in_place = &got[row * columns + head * head_dim..][..head_dim];
                let found = if is_query {
                    in_place.to_vec()
                } else {
                    if in_place != &x[row * pitch + head * head_dim..][..head_dim] {
                        return Err(format!("row {row}, head {head} of K or V was changed"));
                    }
                    if page >= PAGES {
                        continue;
                    }
                    let kv_head = (head - heads) % kv_heads;
                    let tile = ((page * kv_heads + kv_head) * 2 + usize::from(is_value)) * 64 * head_dim;
                    written += head_dim;
                    let at = |i| tile + kv::element(head_dim as u32, position as u32 % 64, i as u32) as usize;
                    (0..head_dim).map(|i| cache[at(i)]).collect()
                };
                if let Some(wrong) = oracle::outside(&found, &spans) {
                    return Err(format!("row {row}, head {head}, {wrong}"));
                }
            }
        }
        // No element of the inputs has the poison's bits.
        let whole = cache.iter().filter(|half| **half != POISON).count();
        if whole != written {
            return Err(format!("{whole} elements of the cache were written instead of {written}"));
        }
        match fault.u32s()[0] {
            fault if fault == reported => Ok(()),
            fault => Err(format!("the fault word is {fault} instead of {reported}")),
        }
    }
}

fn ropes(head_dim: usize) -> Vec<Rope> {
    let case = |m, heads, kv_heads, rope_dim, start, (bias, norms), pages: &[u32]| Rope {
        m,
        heads,
        kv_heads,
        head_dim,
        rope_dim,
        start,
        bias,
        norms,
        pages: pages.to_vec(),
    };
    vec![
        case(3, 4, 2, head_dim, 0, (false, false), &[2]),
        // Across the end of a page, with more heads than warps.
        case(5, 7, 3, head_dim, 62, (true, true), &[1, 3]),
        case(2, 1, 1, head_dim / 2, 130, (true, false), &[9, 9, 0]),
        case(2, 9, 1, head_dim - 12, 7, (false, true), &[3]),
        // The second page does not exist.
        case(4, 2, 1, head_dim, 62, (false, true), &[0, 4]),
        case(1, 2, 2, head_dim, 63, (true, true), &[u32::MAX]),
        // No element is rotated.
        case(2, 3, 1, 0, 5, (false, true), &[1]),
    ]
}

#[test]
fn rotations_match_double_precision() {
    let names = ["rope_d64", "rope_d128_pdl", "rope_d16", "rope_d48_pdl", "rope_d96", "rope_d256"].into_iter().chain([
        "rope_d64_adjacent_pdl",
        "rope_d128_adjacent",
        "rope_d48_adjacent_pdl",
        "rope_d64_plus_one_pdl",
        "rope_d256_plus_one",
    ]);
    let specs: Vec<_> = names.map(spec).collect();
    let mut kernel = CpuKernel::all(&specs, &[]);
    for spec in specs {
        let Op::Rope(op) = spec.op else { unreachable!("a rotation") };
        for case in ropes(op.head_dim.get() as usize) {
            case.check(&mut kernel, &spec).unwrap_or_else(|wrong| panic!("{spec}: {wrong}"));
        }
    }
}

#[test]
fn planted_bugs_of_rotations_are_caught() {
    let (kernel_header, shared) = ("unweight/kernels/rope.cuh", "unweight/activation/element.cuh");
    for (header, from, to) in [
        (kernel_header, "pair(piece) + turned : pair(piece) + kPairs;", "pair(piece) + kPairs : pair(piece) + kPairs;"),
        (kernel_header, "pair(piece) : pair(piece) + turned; }", "pair(piece) : pair(piece); }"),
        (kernel_header, "if (pair(i) >= turned) continue;", ""),
        (kernel_header, "position = args.start + row", "position = row"),
        (kernel_header, "args.pages + position / kv::kPageTokens", "args.pages + row / kv::kPageTokens"),
        (kernel_header, "token = position % kv::kPageTokens", "token = row % kv::kPageTokens"),
        (kernel_header, "page < args.cache_pages", "page <= args.cache_pages"),
        (kernel_header, "if (paged) own.store_page", "own.store_page"),
        (kernel_header, "ptx::st_global(args.fault, row + 1)", "ptx::st_global(args.fault, page)"),
        (kernel_header, "args.bias + head * Config::kHeadDim", "args.bias"),
        (kernel_header, "own.norm(x, q_gamma, args.eps)", "own.norm(x, k_gamma, args.eps)"),
        (kernel_header, "distance != 0;", "distance != 1;"),
        (kernel_header, "const bool value = head >= keys;", "const bool value = head > keys;"),
        (kernel_header, "args.qkv + row * args.pitch", "args.qkv + row * u64(keys + args.kv_heads) * Config::kHeadDim"),
        (kernel_header, "word % 4 * 4", "word % 4 * 2"),
        (kernel_header, "page, kv_head, value)", "page, kv_head, !value)"),
        (kernel_header, "args.kv_heads, page, kv_head", "args.heads, page, kv_head"),
        (shared, "ptx::fma(a0, c0, -ptx::mul(b0, s0))", "ptx::fma(a0, c0, ptx::mul(b0, s0))"),
        (shared, "ptx::fma(b1, c1, ptx::mul(a1, s1))", "ptx::fma(b1, c1, ptx::mul(a1, s0))"),
        (shared, "ptx::add(high_of(x), high_of(bias))", "high_of(x)"),
    ] {
        let spec = spec("rope_d48_pdl");
        let Some(edit) = Edit::planted(header, from, to) else { continue };
        let mut kernel = CpuKernel::of(&spec, &[edit]);
        let caught = ropes(48).iter().any(|case| case.check(&mut kernel, &spec).is_err());
        assert!(caught, "the planted bug was not caught: `{to}` for `{from}`");
    }
}

#[test]
fn planted_bugs_of_adjacent_rotations_are_caught() {
    let header = "unweight/activation/element.cuh";
    for (from, to) in [
        ("ptx::fma(a0, c0, -ptx::mul(a1, s0))", "ptx::fma(a0, c0, ptx::mul(a1, s0))"),
        ("ptx::fma(a1, c0, ptx::mul(a0, s0))", "ptx::fma(a1, c1, ptx::mul(a0, s0))"),
        ("ptx::fma(b0, c1, -ptx::mul(b1, s1))", "ptx::fma(b0, c1, -ptx::mul(a1, s1))"),
        ("ptx::fma(b1, c1, ptx::mul(b0, s1))", "ptx::fma(b1, c0, ptx::mul(b0, s0))"),
    ] {
        let spec = spec("rope_d48_adjacent_pdl");
        let mut kernel = CpuKernel::of(&spec, &[Edit { header, from, to }]);
        let caught = ropes(48).iter().any(|case| case.check(&mut kernel, &spec).is_err());
        assert!(caught, "the planted bug was not caught: `{to}` for `{from}`");
    }
}
