//! How a crate uses Unweight's kernels: declare variants, load a bundle, compile, launch, compare.
//!
//! ```text
//! cargo run --release -p unweight-downstream [BUNDLE]
//! ```
//! Without a bundle it makes a small one. Needs a Hopper GPU and libnvrtc; says what is missing otherwise.

use std::{error::Error, path::Path, process::ExitCode};

use unweight::{
    codegen::Variant,
    format::{
        bundle::{self, Bundle, CompressOptions, Profile, Silent},
        raw::HuffmanTensor,
        testing::demo_model::{self, DemoOptions},
    },
    rt::{
        Device, DeviceBuffer, DeviceMatrix, KernelSet, Lane, LaneSize,
        env::Env,
        raw::{
            ops::{
                decode::{Decoder, output_bytes},
                gemm_recon::Matmul,
            },
            weight::DeviceHuffman,
        },
    },
    unweight_variant,
};

/// Huffman bits to palette indices, for codes of up to 7 bits (the default of `unweight compress`).
#[unweight_variant(op = decode, output = palette, code_limit = 7)]
struct Transcode;

/// 128 output features per block, a ring of four stages, room for 16 verbatim rows in each tile.
#[unweight_variant(n = 2, stages = 4, verbatim = 16)]
struct Project;

/// The runtime's, the format's and the file system's errors alike.
type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Batch rows.
const M: usize = 17;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let made = tempfile::tempdir()?;
    let folder = match std::env::args_os().nth(1) {
        Some(folder) => folder.into(),
        None => demo_bundle(made.path())?,
    };
    let bundle = Bundle::open(&folder)?;
    let (name, tensor) = first_that_fits(&bundle)?;
    let (n, k) = (tensor.grid().rows(), tensor.grid().cols());
    println!("{name}: [{n}, {k}], {:.2} bits per weight", tensor.coded_bytes() as f64 * 8.0 / (n * k) as f64);

    // Compile, or take from the cache, exactly what was declared.
    let device = Device::open(0)?;
    let kernels = KernelSet::open(&device, Env::process()?);
    let prepared = kernels.prepare(&[Transcode::SPEC, Project::SPEC], &|progress| {
        println!("  {} in {:.0} ms", progress.artifact.name, progress.artifact.elapsed.as_secs_f64() * 1e3);
    })?;
    println!("{} kernels, {} compiled, {:?}", prepared.loaded, prepared.compiled, prepared.elapsed);

    let stream = device.stream()?;
    let weights = DeviceHuffman::upload(&stream, &tensor)?;
    // Any finite numbers: 1.0 to 1.99, with both signs.
    let x: Vec<u16> = (0..M * k).map(|i| 0x3f80 | (i * 37 % 128) as u16 | ((i % 3 == 0) as u16) << 15).collect();
    let on_device = DeviceMatrix::from_host(&stream, M as u32, k as u32, &x)?;
    let mut y = DeviceMatrix::zeroed(&stream, M as u32, n as u32)?;

    // Transcode, then multiply: the weights never exist as BF16 in device memory.
    let mut lane = Lane::new(&stream, LaneSize::default())?;
    let transcode = Decoder::new(kernels.get(&Transcode::SPEC)?)?;
    let mut indices =
        DeviceBuffer::zeroed(&stream, output_bytes(tensor.grid(), unweight::codegen::spec::DecodeOutput::Palette))?;
    transcode.palette(&mut lane, &weights, &mut indices)?;
    let project = Matmul::new(kernels.get(&Project::SPEC)?)?;
    project.palette(&mut lane, on_device.view(), weights.as_palette(&indices), y.view_mut())?;
    // Waits, and says whether the decoder met metadata that lead out of their sections.
    lane.synchronize()?;

    // Compare with the product in double precision.
    let w: Vec<u16> =
        bundle.tensor(&name)?.decode()?.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect();
    let value = |bits: u16| f64::from(f32::from_bits(u32::from(bits) << 16));
    let (mut difference, mut norm) = (0.0, 0.0);
    for (at, got) in y.to_host(&stream)?.into_iter().enumerate() {
        let (x, w) = (&x[at / n * k..][..k], &w[at % n * k..][..k]);
        let want: f64 = x.iter().zip(w).map(|(x, w)| value(*x) * value(*w)).sum();
        difference += (value(got) - want).powi(2);
        norm += want * want;
    }
    let error = f64::sqrt(difference / norm);
    println!("relative error to double precision: {error:.2e}");
    if error < 1e-2 { Ok(()) } else { Err(format!("relative error {error:.2e} is above 1e-2").into()) }
}

/// A small model, compressed with the distribution profile: every eligible tensor is Huffman-coded.
fn demo_bundle(home: &Path) -> Result<std::path::PathBuf> {
    let (model, folder) = (home.join("model"), home.join("bundle"));
    let small = DemoOptions { layers: 2, hidden: 512, intermediate: 1536, vocab: 1024, ..DemoOptions::default() };
    demo_model::write(&model, &small)?;
    bundle::compress(&model, &folder, &CompressOptions::new(Profile::Distribution), &Silent)?;
    Ok(folder)
}

/// The first tensor that the declared variants can take.
fn first_that_fits(bundle: &Bundle) -> Result<(String, HuffmanTensor<Vec<u8>>)> {
    for stored in bundle.tensors() {
        if let Some(tensor) = HuffmanTensor::of(stored.stored()?) {
            let (n, k) = (tensor.grid().rows(), tensor.grid().cols());
            let fits = n.is_multiple_of(128) && k.is_multiple_of(64);
            if fits && tensor.code().max_length() <= 7 && tensor.max_verbatim_rows() <= 16 {
                return Ok((stored.name().to_owned(), tensor));
            }
        }
    }
    Err("the bundle has no Huffman tensor that the declared variants take; declare others".into())
}
