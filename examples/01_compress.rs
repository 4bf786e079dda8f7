//! Compresses a model to a bundle, verifies it and restores the model, on the CPU.
//!
//! ```text
//! cargo run --release --example 01_compress                   a small demo model, in a temporary directory
//! cargo run --release --example 01_compress -- MODEL BUNDLE   a directory with safetensors files
//! ```

use std::{error::Error, path::Path};

use unweight::format::{
    bundle::{self, CompressOptions, DecompressOptions, Silent},
    testing::demo_model::{self, DemoOptions},
};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let home = tempfile::tempdir()?;
    match arguments.as_slice() {
        [] => {
            let model = home.path().join("model");
            let small =
                DemoOptions { layers: 2, hidden: 256, intermediate: 768, vocab: 1024, ..DemoOptions::default() };
            demo_model::write(&model, &small)?;
            run(&model, &home.path().join("bundle"), &home.path().join("restored"))
        }
        [model, bundle] => run(model.as_ref(), bundle.as_ref(), &home.path().join("restored")),
        _ => Err("usage: 01_compress [MODEL BUNDLE]".into()),
    }
}

fn run(model: &Path, folder: &Path, restored: &Path) -> Result<(), Box<dyn Error>> {
    let report = bundle::compress(model, folder, &CompressOptions::default(), &Silent)?;
    println!("{}: {:.1} % of the original", folder.display(), report.ratio * 100.0);

    // Checks every digest, and compares every tensor with the model bit by bit.
    let verified = bundle::verify(folder, Some(model), &Silent)?;
    if !verified.is_ok() {
        return Err("the bundle differs from the model".into());
    }
    println!("verified: every tensor decodes to the model's bits");

    bundle::decompress(folder, restored, &DecompressOptions::default(), &Silent)?;
    println!("decompressed: the model's files are back");
    Ok(())
}
