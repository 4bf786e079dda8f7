//! Scaling of activations in the simulator: the nearest bf16 of every element, and planted bugs that must be caught.

use unweight_bench::oracle;
use unweight_codegen::{
    VariantSpec,
    abi::ScaleArgs,
    plan::GemmShape,
    spec::{Op, ScaleForm, ScaleSpec, catalog},
};

use crate::{
    harness::{Buffer, CpuKernel, Edit, spec},
    rows::{GAP, POISON, bytes, launch, random, written_rows},
};

const FACTOR: f32 = 0.22;

fn check_scale(
    kernel: &mut CpuKernel,
    spec: &VariantSpec,
    (m, n): (usize, usize),
    in_place: bool,
) -> Result<(), String> {
    let (x_pitch, y_pitch) = if in_place { (n + GAP, n + GAP) } else { (n + 2 * GAP, n + GAP) };
    let (mut x, mut before) = (random(m * x_pitch, (m + n) as u64), random(m * y_pitch, (m * n) as u64));
    x.chunks_exact_mut(x_pitch).for_each(|row| row[n..].fill(POISON));
    before.chunks_exact_mut(y_pitch).for_each(|row| row[n..].fill(POISON));
    let Op::Scale(op) = spec.op else { unreachable!("a factor") };
    let source = Buffer::of(&bytes(&x));
    let apart = Buffer::of(&bytes(&before));
    let y = if in_place { &source } else { &apart };
    let args = ScaleArgs {
        x: source.address(),
        y: y.address(),
        x_pitch: x_pitch as u64,
        y_pitch: y_pitch as u64,
        columns: n as u32,
        row_blocks: (n as u32).div_ceil(ScaleSpec::BLOCK_COLUMNS),
        factor: FACTOR,
        reserved: 0,
    };
    let problem = GemmShape { m: m as u32, n: n as u32, k: 0 };
    launch(kernel, spec, problem, &args, &[("x", &source), ("y", &apart)])?;
    let got = written_rows(y, m, n, y_pitch)?;
    let of = |(row, column): (usize, usize)| {
        let product = f64::from(FACTOR) * oracle::value(x[row * x_pitch + column]);
        let exact = match op.form {
            ScaleForm::Mul => product,
            ScaleForm::Add => product + oracle::value(before[row * y_pitch + column]),
            ScaleForm::Cap => return oracle::capped(x[row * x_pitch + column], FACTOR),
        };
        // One exact rounding to fp32, and one to bf16.
        oracle::Span::about(f64::from(exact as f32), 0.0)
    };
    let spans: Vec<_> = (0..m).flat_map(|row| (0..n).map(move |column| (row, column))).map(of).collect();
    oracle::outside(&got, &spans).map_or(Ok(()), |wrong| Err(format!("[{m}, {n}], {wrong}")))
}

const SCALES: [(usize, usize); 4] = [(1, 8), (3, 72), (2, 1024), (5, 2056)];

#[test]
fn factors_match_double_precision() {
    let specs: Vec<_> = catalog::of::<ScaleSpec>().collect();
    let mut kernel = CpuKernel::all(&specs, &[]);
    for spec in specs {
        let Op::Scale(op) = spec.op else { unreachable!("a factor") };
        for shape in SCALES {
            for in_place in [false, true].into_iter().filter(|in_place| !in_place || op.form != ScaleForm::Add) {
                let result = check_scale(&mut kernel, &spec, shape, in_place);
                result.unwrap_or_else(|wrong| panic!("{spec}: {wrong}"));
            }
        }
    }
}

/// A bias of every row: the kernel that adds, with a pitch of 0.
#[test]
fn one_row_is_added_to_all() {
    for name in ["scale_add", "scale_add_pdl"] {
        let spec = spec(name);
        let mut kernel = CpuKernel::of(&spec, &[]);
        for (m, n) in SCALES {
            let (row, before) = (random(n, 7), random(m * (n + GAP), 8));
            let (source, y) = (Buffer::of(&bytes(&row)), Buffer::of(&bytes(&before)));
            let args = ScaleArgs {
                x: source.address(),
                y: y.address(),
                x_pitch: 0,
                y_pitch: (n + GAP) as u64,
                columns: n as u32,
                row_blocks: (n as u32).div_ceil(ScaleSpec::BLOCK_COLUMNS),
                factor: 1.0,
                reserved: 0,
            };
            let problem = GemmShape { m: m as u32, n: n as u32, k: 0 };
            launch(&mut kernel, &spec, problem, &args, &[("x", &source), ("y", &y)]).unwrap();
            for (at, (got, before)) in y.u16s().into_iter().zip(before).enumerate() {
                let added = row.get(at % (n + GAP)).map_or(0.0, |x| oracle::value(*x));
                let exact = f64::from((oracle::value(before) + added) as f32);
                assert!(oracle::Span::about(exact, 0.0).has(got), "{name} [{m}, {n}], element {at}");
            }
        }
    }
}

#[test]
fn planted_bugs_of_factors_are_caught() {
    let header = "unweight/kernels/scale.cuh";
    for (name, from, to) in [
        ("scale_mul", "ptx::mul(high_of(x), factor)", "high_of(x)"),
        ("scale_mul", "if (column >= args.columns) return;", ""),
        ("scale_mul", "ptx::ctaid() / args.row_blocks", "ptx::ctaid() % args.row_blocks"),
        ("scale_mul", "args.x + row * args.x_pitch", "args.x + row * args.y_pitch"),
        ("scale_add_pdl", "y = ptx::ld_global_x4(to);", ""),
        ("scale_add_pdl", "scaled<Config>(x.w, y.w, args.factor)", "scaled<Config>(x.w, y.z, args.factor)"),
        ("scale_add_pdl", "ptx::fma(low_of(x), factor, low_of(y))", "ptx::fma(low_of(y), factor, low_of(x))"),
        ("scale_cap", "tanh(ptx::div(high_of(x), factor))", "tanh(high_of(x))"),
        ("scale_cap_pdl", "ptx::mul(factor, tanh(ptx::div(low_of(x), factor)))", "tanh(ptx::div(low_of(x), factor))"),
    ] {
        let spec = spec(name);
        let mut kernel = CpuKernel::of(&spec, &[Edit { header, from, to }]);
        let caught = SCALES.iter().any(|shape| check_scale(&mut kernel, &spec, *shape, false).is_err());
        assert!(caught, "{name}: the planted bug was not caught: `{to}` for `{from}`");
    }
}
