//! `cargo xtask bench-peers`: measures the codec and its peers in one run of unweight-bench/peers/peers.py.

use std::process::Command;

use crate::{
    run::{self, cargo, root, target_dir},
    setup,
};

/// Installs the peers in `target/peers-venv`, builds our side, and measures.
pub fn run(arguments: &[String]) -> Result<(), String> {
    // Installed without dependencies: ZipNN requires torch (gigabytes), which its path for bytes does not use. See
    // peers.py.
    let python = setup::python(
        &target_dir("peers-venv"),
        &[&["--no-deps", "zipnn==0.5.4"], &["zstandard", "numpy", "safetensors"]],
        "import zipnn_core, zstandard, numpy, safetensors",
    )?;
    run::run(cargo().args(["build", "--release", "--package", "unweight-format", "--example", "codec_speed"]))?;
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), Into::into);
    run::run(
        Command::new(python)
            .current_dir(root())
            .arg("unweight-bench/peers/peers.py")
            .arg("--codec-speed")
            .arg(target.join("release/examples/codec_speed"))
            .args(arguments),
    )
}
