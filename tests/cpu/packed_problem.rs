//! Shared by the simulator tests of the packed matmuls: a problem with escapes, its launch, and its expected results.

use unweight_codegen::{
    VariantSpec,
    abi::GemmPackedArgs,
    plan::{GemmShape, Plan},
    spec::{Epilogue, GemmWgmmaSpec, Op},
};
use unweight_format::{
    Histogram, Matrix,
    raw::{PackedTensor, packed::pack},
    testing::Random,
};

use crate::harness::{Buffer, CpuKernel, MapSpec, Run, bf16};

const TILE: usize = 64;
const GUARD: u16 = 0x7fc1;
const GUARD_ROWS: usize = 2;

/// Weights, inputs, and the contents of Y before the launch.
#[derive(Clone)]
pub struct Problem {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub packed: PackedTensor<Vec<u8>>,
    epilogue: Epilogue,
    weights: Vec<u16>,
    x: Vec<u16>,
    y: Vec<u16>,
    /// The row that is added instead of Y.
    bias: Option<Vec<u16>>,
}

pub struct Outcome {
    pub y: Vec<u16>,
    operands: Vec<u32>,
}

impl Problem {
    /// Makes weights with exponents 108..=123. One in 1000 is outside: a zero, a subnormal, a larger or a smaller
    /// number. The first row block has a run of these: from 24,000 elements on, a list longer than a warp.
    pub fn random(spec: &VariantSpec, (m, n, k): (usize, usize, usize), seed: u64) -> Self {
        let (_, epilogue) = traits(spec);
        let mut random = Random::new(seed);
        let weights: Vec<u16> = (0..n * k)
            .map(|i| {
                let r = random.bits();
                let dense = i / k == 5 && i % k < (n * k / 600).min(40);
                let exponent = if dense || random.below(1000) == 0 {
                    [0, 90, 100, 130][(r >> 32 & 3) as usize]
                } else {
                    108 + (r >> 20 & 15) as u16
                };
                let mantissa = if r >> 50 & 7 == 0 { 0 } else { 0x807f };
                (r as u16 & (mantissa | 0x8000)) | exponent << 7
            })
            .collect();
        let bytes: &[u8] = bytemuck::cast_slice(&weights);
        let matrix = Matrix::new(bytes, n, k).unwrap();
        let packed = pack(matrix, &Histogram::of(matrix.bytes())).unwrap();
        let x = (0..m * k).map(|_| (random.bits() as u16 & 0x807f) | (120 + random.below(8) as u16) << 7).collect();
        let old = |random: &mut Random| (random.bits() as u16 & 0x807f) | 126 << 7;
        let adds = epilogue == Epilogue::StoreAdd;
        let y = (0..m * columns(epilogue, n)).map(|_| if adds { old(&mut random) } else { GUARD }).collect();
        Self { m, n, k, packed, epilogue, weights, x, y, bias: None }
    }

    /// Returns the problem, and for a variant that adds to Y also one with a bias: the first row of Y is added to each
    /// row of the product instead, and Y is poisoned.
    pub fn each_addend(self) -> Vec<Self> {
        let biased = (self.epilogue == Epilogue::StoreAdd).then(|| Self {
            bias: Some(self.y[..self.n].to_vec()),
            y: vec![GUARD; self.y.len()],
            ..self.clone()
        });
        [Some(self), biased].into_iter().flatten().collect()
    }

    /// Returns Y and the workspace after a launch on a device with this many SMs.
    pub fn run(&self, kernel: &mut CpuKernel, spec: &VariantSpec, sms: u32, seed: u64) -> Result<Outcome, String> {
        let words = (self.packed.escapes().len() / 4) as u32;
        self.run_with(kernel, spec, (sms, seed), self.packed.escape_heads(), words)
    }

    /// Runs with other heads, and with only the first words of the lists.
    fn run_with(
        &self,
        kernel: &mut CpuKernel,
        spec: &VariantSpec,
        (sms, seed): (u32, u64),
        heads: &[u8],
        escape_words: u32,
    ) -> Result<Outcome, String> {
        let problem = GemmShape { m: self.m as u32, n: self.n as u32, k: self.k as u32 };
        let needs = Plan::new(spec).unwrap().workspace(problem, sms);
        let packed = Buffer::of(self.packed.packed());
        let heads = Buffer::of(heads);
        let escapes = Buffer::of(&self.packed.escapes()[..escape_words as usize * 4]);
        let x = Buffer::of(bytemuck::cast_slice(&self.x));
        let mut y = self.y.clone();
        y.extend(std::iter::repeat_n(GUARD, GUARD_ROWS * self.n));
        let stored = self.y.len();
        let y = Buffer::of(bytemuck::cast_slice(&y));
        let workspace = Buffer::new(needs.bytes as usize);
        let counters = Buffer::zeroed(needs.counters as usize * 4);
        let bias = self.bias.as_ref().map(|bias| Buffer::of(bytemuck::cast_slice(bias)));
        let map = |kernel: &mut CpuKernel, data, columns: usize, (box_columns, box_rows): (u32, u32)| {
            kernel.tensor_map(&MapSpec {
                data,
                element_bytes: 2,
                columns: columns as u64,
                rows: self.m as u64,
                box_columns,
                box_rows,
                swizzle_bytes: 2 * box_columns,
            })
        };
        let (x_box_rows, epilogue) = traits(spec);
        let y_box = if epilogue == Epilogue::SiluMul { (32, 32) } else { (64, 32) };
        let args = GemmPackedArgs {
            x: map(kernel, x.slice(), self.k, (64, x_box_rows)),
            y_map: map(kernel, &y.slice()[..stored * 2], columns(epilogue, self.n), y_box),
            packed: packed.address(),
            escape_heads: heads.address(),
            escapes: escapes.address(),
            y: y.address(),
            workspace: workspace.address(),
            counters: counters.address(),
            scale: self.packed.window().scale(),
            escape_words,
            m: problem.m,
            n: problem.n,
            k: problem.k,
            tile_cols: (self.k / TILE) as u32,
            x_data: x.address(),
            x_row_bytes: 2 * self.k as u64,
            bias: bias.as_ref().map_or(0, Buffer::address),
            reserved: [0; 8],
        };
        let mut buffers = vec![
            ("x", x.slice()),
            ("packed", packed.slice()),
            ("escape_heads", heads.slice()),
            ("escapes", escapes.slice()),
            ("workspace", workspace.slice()),
            ("counters", counters.slice()),
            ("y", &y.slice()[..stored * 2]),
        ];
        buffers.extend(bias.iter().map(|bias| ("bias", bias.slice())));
        // SAFETY: every buffer above outlives the launch, and the kernel reaches them through checked wrappers only.
        unsafe { kernel.run(spec, Run { problem, sms, seed }, &args, &buffers)? };
        assert!(counters.slice().iter().all(|&byte| byte == 0), "counters are not zero after the launch");
        let mut result = y.u16s();
        assert!(result[stored..].iter().all(|&v| v == GUARD), "rows past m were written");
        result.truncate(stored);
        Ok(Outcome { y: result, operands: workspace.u32s() })
    }

    /// Runs with random heads and truncated lists: nothing out of bounds is read.
    pub fn survives_hostile_escapes(&self, kernel: &mut CpuKernel, spec: &VariantSpec, sms: u32) {
        let stored = (self.packed.escapes().len() / 4) as u32;
        let mut random = Random::new(77);
        for words in [0, 1, 2, stored / 2, stored] {
            let heads: Vec<u8> = (0..self.packed.escape_heads().len() / 4)
                .flat_map(|_| {
                    let r = random.bits();
                    let index = if r >> 60 & 1 == 0 { (r >> 8) as u32 } else { (r >> 8) as u32 % (stored + 2) };
                    (index | (r as u32 & 1) << 31).to_le_bytes()
                })
                .collect();
            self.run_with(kernel, spec, (sms, 1), &heads, words).unwrap();
        }
    }

    /// Counts elements further from the float64 result than bf16 rounding and fp32 accumulation explain.
    pub fn mismatches(&self, outcome: &Outcome) -> usize {
        let rows = self.bias.as_ref().map(|bias| bias.repeat(self.m));
        let before = rows.as_ref().unwrap_or(&self.y);
        mismatches(&outcome.y, before, &self.x, &self.weights, self.k, self.epilogue)
    }

    /// Checks that the workspace contains the oracle's operands after a dump, including those from lists.
    pub fn assert_operands(&self, outcome: &Outcome) {
        for tile in 0..self.packed.grid().tiles() {
            for (i, registers) in self.packed.operands(tile).iter().enumerate() {
                let (block, step, lane) = (i / 128, i / 32 % 4, i % 32);
                for (register, &expected) in registers.iter().enumerate() {
                    let got = outcome.operands[((tile * 4 + block) * 16 + step * 4 + register) * 32 + lane];
                    assert_eq!(got, expected, "tile {tile} block {block} step {step} lane {lane} register {register}");
                }
            }
        }
        let lists = self.packed.escape_heads().chunks_exact(4).filter(|head| head[3] >> 7 == 1).count();
        assert!(lists > 3, "the data has too few lists: {lists}");
    }
}

/// Returns the batch rows of a box of X, and the epilogue.
fn traits(spec: &VariantSpec) -> (u32, Epilogue) {
    match spec.op {
        Op::GemmMma(op) => (op.batch_tile.get(), op.epilogue),
        Op::GemmWgmma(op) => (GemmWgmmaSpec::X_BOX_ROWS, op.epilogue),
        _ => panic!("{spec} does not read packed weights"),
    }
}

/// Counts elements of `y` further from the float64 result than bf16 rounding and fp32 accumulation explain. `before` is
/// the contents of Y before an addition.
pub fn mismatches(y: &[u16], before: &[u16], x: &[u16], weights: &[u16], k: usize, epilogue: Epilogue) -> usize {
    let x: Vec<f64> = x.iter().map(|&b| bf16(b)).collect();
    let w: Vec<f64> = weights.iter().map(|&b| bf16(b)).collect();
    // The product of a batch row and a row of W, and the sum of the magnitudes of its terms.
    let product = |row: usize, column: usize| dot(&x[row * k..][..k], &w[column * k..][..k]);
    let columns = columns(epilogue, w.len() / k);
    let wrong = |(at, &got): (usize, &u16)| {
        let (row, column) = (at / columns, at % columns);
        let (sum, slack) = match epilogue {
            Epilogue::Store => {
                let (sum, magnitude) = product(row, column);
                (sum, magnitude * 1e-6)
            }
            Epilogue::StoreAdd => {
                let ((sum, magnitude), old) = (product(row, column), bf16(before[at]));
                (sum + old, (magnitude + old.abs()) * 1e-6)
            }
            // The slope of silu is at most 1.1.
            Epilogue::SiluMul => {
                let turn = Epilogue::GATE_ROWS as usize;
                let gate_row = column / turn * 2 * turn + column % turn;
                let ((gate, gate_size), (up, up_size)) = (product(row, gate_row), product(row, gate_row + turn));
                let sum = gate / (1.0 + (-gate).exp()) * up;
                (sum, (gate_size * up.abs() * 1.1 + up_size * gate.abs()) * 1e-6 + sum.abs() * 1e-5)
            }
        };
        let error = (bf16(got) - sum).abs();
        error.is_nan() || error > sum.abs() / 256.0 + slack
    };
    y.iter().enumerate().filter(|element| wrong(*element)).count()
}

/// Returns the dot product, summed in order, and the sum of the magnitudes of its terms.
///
/// A plain loop: tests are not optimised, and iterators take longer there.
pub fn dot(a: &[f64], b: &[f64]) -> (f64, f64) {
    assert_eq!(a.len(), b.len());
    let (mut sum, mut magnitude, mut i) = (0.0, 0.0, 0);
    while i < a.len() {
        let term = a[i] * b[i];
        sum += term;
        magnitude += if term < 0.0 { -term } else { term };
        i += 1;
    }
    (sum, magnitude)
}

/// Returns the number of columns of Y.
pub fn columns(epilogue: Epilogue, n: usize) -> usize {
    if epilogue == Epilogue::SiluMul { n / 2 } else { n }
}
