//! `cargo xtask bench-peers`: measures the codec and its peers in one run: in memory with
//! unweight-bench/peers/peers.py, file to file with unweight-bench/peers/files.py.

use std::{path::PathBuf, process::Command};

use crate::{
    run::{self, cargo, root, target_dir},
    setup,
};

/// Installs the peers in `target/peers-venv`, builds our side, and measures. With `--files` first, file to file.
pub fn run(arguments: &[String]) -> Result<(), String> {
    // Installed without dependencies: ZipNN requires torch (gigabytes), which its path for bytes does not use. See
    // peers.py.
    let python = setup::python(
        &target_dir("peers-venv"),
        &[&["--no-deps", "zipnn==0.5.4"], &["zstandard", "numpy", "safetensors"]],
        "import zipnn_core, zstandard, numpy, safetensors",
    )?;
    let (script, ours, arguments) = match arguments.split_first() {
        Some((first, rest)) if first == "--files" => {
            run::run(cargo().args(["build", "--release", "--bin", "unweight"]))?;
            ("files.py", ["--unweight", "release/unweight"], rest)
        }
        _ => {
            run::run(cargo().args(["build", "--release", "--package", "unweight-format", "--example", "codec_speed"]))?;
            ("peers.py", ["--codec-speed", "release/examples/codec_speed"], arguments)
        }
    };
    let [option, program] = ours;
    let target: PathBuf = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), Into::into);
    run::run(
        Command::new(python)
            .current_dir(root())
            .arg(format!("unweight-bench/peers/{script}"))
            .arg(option)
            .arg(target.join(program))
            .args(arguments),
    )
}
