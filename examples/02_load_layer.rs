//! Loads a layer of a bundle to the GPU, multiplies with it, and compares the result with the CPU.
//!
//! ```text
//! cargo run --release --features full --example 02_load_layer                    a small demo model
//! cargo run --release --features full --example 02_load_layer -- BUNDLE TENSOR   a tensor [n, k] of a bundle
//! ```
//! Needs an NVIDIA GPU with its driver, and libnvrtc on the first run.

use std::{error::Error, path::Path};

use unweight::{
    codegen::spec::Epilogue,
    format::{
        bundle::{self, Bundle, CompressOptions, Silent},
        testing::demo_model::{self, DemoOptions},
    },
    rt::{Device, DeviceMatrix, KernelSet, LoadOptions, Loader, env::Env},
};

/// The batch size.
const M: u32 = 4;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let home = tempfile::tempdir()?;
    match arguments.as_slice() {
        [] => {
            let (model, folder) = (home.path().join("model"), home.path().join("bundle"));
            let small =
                DemoOptions { layers: 1, hidden: 512, intermediate: 1536, vocab: 1024, ..DemoOptions::default() };
            demo_model::write(&model, &small)?;
            bundle::compress(&model, &folder, &CompressOptions::default(), &Silent)?;
            run(&folder, "model.layers.0.mlp.down_proj.weight")
        }
        [folder, tensor] => run(folder.as_ref(), tensor),
        _ => Err("usage: 02_load_layer [BUNDLE TENSOR]".into()),
    }
}

fn run(folder: &Path, tensor: &str) -> Result<(), Box<dyn Error>> {
    let bundle = Bundle::open(folder)?;
    let device = Device::open(0)?;
    let (kernels, stream) = (KernelSet::open(&device, Env::process()?), device.stream()?);
    // The first run compiles the kernels; later runs load them from the cache.
    let (mut loader, prepared) = Loader::new(&kernels, &stream, &bundle, LoadOptions::default(), &|_| {})?;
    println!("{} kernels, {} compiled, in {:?}", prepared.loaded, prepared.compiled, prepared.elapsed);
    let layer = loader.load(tensor)?;
    let (n, k) = (layer.n() as usize, layer.k() as usize);

    // Any finite numbers: 1.0 to 1.99, with either sign.
    let x: Vec<u16> =
        (0..M as usize * k).map(|i| 0x3f80 | (i * 37 % 128) as u16 | ((i % 3 == 0) as u16) << 15).collect();
    let on_device = DeviceMatrix::from_host(&stream, M, layer.k(), &x)?;
    let mut y = DeviceMatrix::zeroed(&stream, M, layer.n())?;
    let mut ctx = loader.context(&stream)?;
    layer.enqueue(&mut ctx, on_device.view(), y.view_mut(), Epilogue::Store)?;
    ctx.synchronize()?;

    // Computes the product in double precision from the original bits.
    let w = bundle.tensor(tensor)?.decode()?;
    let value = |bits: u16| f64::from(f32::from_bits(u32::from(bits) << 16));
    let w: Vec<f64> = w.chunks_exact(2).map(|pair| value(u16::from_le_bytes([pair[0], pair[1]]))).collect();
    let (mut difference, mut norm) = (0.0, 0.0);
    for (at, got) in y.to_host(&stream)?.into_iter().enumerate() {
        let (x, w) = (&x[at / n * k..][..k], &w[at % n * k..][..k]);
        let want: f64 = x.iter().zip(w).map(|(x, w)| value(*x) * w).sum();
        difference += (value(got) - want).powi(2);
        norm += want * want;
    }
    let error = f64::sqrt(difference / norm);
    println!("{tensor} [{n}, {k}]: relative error to double precision {error:.2e}");
    if error < 1e-2 { Ok(()) } else { Err(format!("relative error {error:.2e} exceeds 1e-2").into()) }
}
