//! Declares a custom kernel variant, registers it, and checks that dispatch chooses it.
//!
//! ```text
//! cargo run --release -p unweight-own-variant
//! ```
//! Choosing needs no GPU. On a Hopper GPU with libnvrtc, the variant is also compiled, used by a layer and compared
//! with the CPU.

use std::{error::Error, process::ExitCode};

use unweight::{
    codegen::{
        Variant,
        plan::GemmShape,
        spec::{Arch, Epilogue},
    },
    format::testing::Weights,
    rt::{
        Device, DeviceMatrix, KernelSet, LayerBuilder, LoadOptions, LoadVariant, Merge,
        env::Env,
        raw::choose::{candidates::PackedUse, policy::PackedChooser},
    },
    unweight_variant,
};

/// A variant for batches of up to 16: 16 warps with one block of 16 output features each, and four stages. It does not
/// ship.
#[unweight_variant(op = gemm_mma, batch_tile = 16, row_blocks = 1, warps = 16, stages = 4)]
struct Square;

/// A problem for which the cost model of an H200 ranks the variant first.
const PROBLEM: GemmShape = GemmShape { m: 16, n: 2048, k: 2048 };
/// The requirements of a layer with default options.
const USE: PackedUse = PackedUse { escapes: true, pdl: true, epilogue: Epilogue::Store };

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    println!("declared   {}", Square::SPEC);
    let mut h200 = PackedChooser::usual(Arch::Sm90a);
    show("H200, shipped", &h200)?;
    h200.register(Square::SPEC)?;
    let chosen = show("registered", &h200)?;
    if !chosen.contains("b16_r1w16p4c1") {
        return Err(format!("dispatch chose {chosen} instead of the registered variant").into());
    }
    match Device::open(0) {
        Ok(device) => multiply(&device),
        Err(error) => {
            println!("no GPU, so nothing is multiplied: {error}");
            Ok(())
        }
    }
}

/// Prints and returns the variant that dispatch chooses for the problem, with its modelled time.
fn show(what: &str, chooser: &PackedChooser) -> Result<String, Box<dyn Error>> {
    let GemmShape { m, n, k } = PROBLEM;
    let chosen = chooser.choose(PROBLEM, USE).ok_or("no variant supports the shape")?;
    let us = chooser.candidates(PROBLEM, USE).into_iter().find_map(|(spec, us)| (spec == chosen).then_some(us));
    let us = us.map_or_else(String::new, |us| format!(", {us:.2} us by the model"));
    println!("{what}: [{n}, {k}] at batch {m}: {chosen}{us}");
    Ok(chosen.to_string())
}

/// Multiplies with a layer on the GPU, with the variant that dispatch chooses there.
fn multiply(device: &Device) -> Result<(), Box<dyn Error>> {
    let GemmShape { m, n, k } = PROBLEM;
    let mut kernels = KernelSet::open(device, Env::process()?);
    // Register before the first layer is loaded, because a layer chooses its kernels then.
    kernels.register::<Square>()?;
    show(&device.info().name, kernels.chooser())?;

    let stream = device.stream()?;
    let weights = Weights::TRAINED.bytes(n as usize * k as usize, 1);
    let w: Vec<u16> = weights.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect();
    let mut builder = LayerBuilder::new(&kernels, &stream, LoadOptions::default().max_batch(m))?;
    let on_device = DeviceMatrix::from_host(&stream, n, k, &w)?;
    let layer = builder.layer("square", &[on_device.view()], Merge::Rows)?;
    let variant = layer.variant(m, Epilogue::Store).ok_or("the layer is not packed")?;
    println!("the layer multiplies batch {m} by {variant}");

    // Any finite numbers: 1.0 to 1.99, with either sign.
    let x: Vec<u16> = (0..m * k).map(|i| 0x3f80 | (i * 37 % 128) as u16 | ((i % 3 == 0) as u16) << 15).collect();
    let x_on_device = DeviceMatrix::from_host(&stream, m, k, &x)?;
    let mut y = DeviceMatrix::zeroed(&stream, m, n)?;
    let mut ctx = builder.context(&stream)?;
    layer.enqueue(&mut ctx, x_on_device.view(), y.view_mut(), Epilogue::Store)?;
    ctx.synchronize()?;
    compare("the layer", &x, &w, &y.to_host(&stream)?)?;

    // The same kernel without a layer: `LoadVariant` knows that a `PackedGemm` launches `gemm_mma`.
    let matmul = Square::load(&kernels)?;
    let packed = builder.pack("square", on_device.view())?;
    ctx.reserve(matmul.context_size(m, &packed))?;
    matmul.enqueue(&mut ctx, x_on_device.view(), &packed, y.view_mut())?;
    ctx.synchronize()?;
    compare("the launcher", &x, &w, &y.to_host(&stream)?)
}

/// Prints the relative error against the product in double precision; fails above 1e-2.
fn compare(what: &str, x: &[u16], w: &[u16], y: &[u16]) -> Result<(), Box<dyn Error>> {
    let (n, k) = (PROBLEM.n as usize, PROBLEM.k as usize);
    let value = |bits: u16| f64::from(f32::from_bits(u32::from(bits) << 16));
    let (mut difference, mut norm) = (0.0, 0.0);
    for (at, got) in y.iter().enumerate() {
        let (x, w) = (&x[at / n * k..][..k], &w[at % n * k..][..k]);
        let want: f64 = x.iter().zip(w).map(|(x, w)| value(*x) * value(*w)).sum();
        difference += (value(*got) - want).powi(2);
        norm += want * want;
    }
    let error = f64::sqrt(difference / norm);
    println!("{what}: relative error to double precision {error:.2e}");
    if error < 1e-2 { Ok(()) } else { Err(format!("relative error {error:.2e} exceeds 1e-2").into()) }
}
