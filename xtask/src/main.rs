//! Project tasks, run as `cargo xtask <task>`.

mod dist;
mod gpu_pack;
mod kernel_digests;
mod lint;
mod peers;
mod release;
mod run;
mod rustc;
mod setup;
mod test;
mod wheel;

use std::process::ExitCode;

const HELP: &str = "\
project tasks

usage: cargo xtask <task>

  test [ARGS]         prepare what the tests need, then run every test; ARGS go to `cargo test` instead of --workspace
  setup               only prepare: Python with safetensors and numpy, the NVRTC wheel, g++
  test-wheel          the part of `test` that is Python: build the wheel, install it where nothing else is, test it
  test-python         the wheel with torch and transformers on the CPU: fetches 5 GB, unless UNWEIGHT_TORCH_PYTHON has them
  test-vllm           the wheel with vLLM on the CPU, many minutes: fetches 6 GB, unless UNWEIGHT_VLLM_PYTHON has it
  test-candle         bindings/candle on the CPU: builds candle, minutes
                        --if-prepared (of these three)  fetch nothing, and leave out what is not there and what is slow
  wheel               build the Python package with the command in it: target/wheels
                        --manylinux2014  for any Linux since glibc 2.17, linked by zig (from PyPI)
  lint                shellcheck, hadolint, yamllint and zizmor (from PyPI) on scripts, Containerfile and workflows
  dist                build the files of a release, the same bytes in any folder: target/artifacts
                        --target T     x86_64-unknown-linux-gnu (default) or -musl (CPU commands only); may be repeated
                        --out DIR      write them to this folder
                        --sign KEY     sign SHA256SUMS with a minisign key; --password-file FILE has its password
                        --allow-dirty  also if files differ from the commit
  test-release        install.sh in clean Debians (debootstrap, root) and the wheel in each Python: minutes
                        --files DIR    files of `dist` (default: target/artifacts)
                        --suite NAME   also in this system of debootstrap, such as noble
  gpu-pack            gather stripped binaries and run.sh in .gpu/ for a GPU machine without Rust
                        --with-nvrtc  put libnvrtc beside them
  bench-peers [MODEL] measure the codec beside ZipNN and zstd on a Gaussian tensor and on MODEL's BF16 matrices
                        --rounds N    measurements of each, at least 7 (default 7)
  kernel-digests      print a digest of the machine code of every kernel; needs NVRTC, takes about ten minutes
                        --all-archs    also a kernel of each family for every other architecture
                        --only PART    only kernels with this part in their names
                        --sample N     every Nth kernel only
                        --compare BEFORE AFTER [--renames FILE]  compare two lists; a line of FILE: OLD NEW (parts of names)
  help                this text
";

fn main() -> ExitCode {
    if let Some(root) = std::env::var_os(rustc::ROOT) {
        let arguments: Vec<_> = std::env::args_os().skip(1).collect();
        return match rustc::run(&root, &arguments) {
            Ok(status) => ExitCode::from(u8::try_from(status).unwrap_or(1)),
            Err(message) => {
                eprintln!("xtask: {message}");
                ExitCode::FAILURE
            }
        };
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (task, rest) = match arguments.split_first() {
        Some((task, rest)) => (task.as_str(), rest),
        None => ("help", &[][..]),
    };
    let result = match task {
        "test" => test::run(rest),
        "setup" => run::no_arguments(rest).and_then(|()| setup::prepare()).map(|environment| {
            for (name, value) in environment.variables() {
                println!("export {name}={}", value.display());
            }
        }),
        "test-wheel" => run::no_arguments(rest).and_then(|()| setup::prepare()).and_then(|found| wheel::test(&found)),
        "test-python" => wheel::test_python(rest),
        "test-vllm" => wheel::test_vllm(rest),
        "test-candle" => test::candle(rest),
        "wheel" => wheel::run_task(rest),
        "lint" => lint::run_task(rest),
        "dist" => dist::run_task(rest),
        "test-release" => release::run_task(rest),
        "gpu-pack" => gpu_pack::run(rest),
        "bench-peers" => peers::run(rest),
        "kernel-digests" => kernel_digests::run(rest),
        "help" | "-h" | "--help" => {
            print!("{HELP}");
            Ok(())
        }
        other => Err(format!("no task '{other}'; see `cargo xtask help`")),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("xtask: {message}");
            ExitCode::FAILURE
        }
    }
}
