//! `cargo xtask gpu-pack`: collects in `.gpu/` what a GPU machine without Rust needs.
//!
//! ```text
//! .gpu/bin/unweight      the command line, and unweight-bench
//! .gpu/tests/gpu         the GPU tests
//! .gpu/nvrtc/            libnvrtc and its builtins, with --with-nvrtc
//! .gpu/parity/           comparison of whole models with transformers, training texts; kills of `unweight tune`
//! .gpu/unweight-model/   small models for some tests, at the same path as in the repository
//! .gpu/torch_decode.py   PyTorch's decode step, for comparison with ours
//! .gpu/serve_load.py     latency of the server under load
//! .gpu/run.sh            tests correctness, then times; writes JSON to $OUT
//! ```

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::Value;

use crate::{
    run::{cargo, root, succeeds},
    setup,
};

const RUN_SH: &str = r#"#!/bin/sh
# Runs the GPU tests, compares whole models with transformers, runs the stress test, then the benchmarks. Results go
# to $OUT (default: ./out):
#   gpu.log            the tests; they come first, because figures mean nothing if a test fails
#   doctor.json        drivers and libraries of the machine
#   tune_kills.json, .log  `unweight tune`, killed ten times
#   parity.json, .log  whole models compared with transformers: minutes
#   stress.json        every kernel thousands of times under load: minutes
#   kernels.json       the benchmarks
#   matmul.json, .svg
#   decode.json        steps of whole models, and PyTorch's:
#   torch_decode.json
#   serve_load.json    latency of the server under load
# tune_kills needs Python; parity, torch_decode and serve_load need it with torch (CUDA) and transformers, serve_load
# also with aiohttp ($PYTHON, default: python3). Without them, these are skipped, and the last line says so.
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-$here/out}
mkdir -p "$out"
if [ -z "${UNWEIGHT_NVRTC:-}" ] && [ -d "$here/nvrtc" ]; then
    export UNWEIGHT_NVRTC="$here/nvrtc"
fi
"$here/bin/unweight" doctor --json >"$out/doctor.json"
# One thread: tests share one device, and its memory.
if ! (cd "$here" && ./tests/gpu --include-ignored --test-threads=1) >"$out/gpu.log" 2>&1; then
    tail -n 60 "$out/gpu.log"
    exit 1
fi
tail -n 3 "$out/gpu.log"
python=${PYTHON:-python3}
if command -v "$python" >/dev/null; then
    if ! "$python" "$here/parity/tune_kills.py" --unweight "$here/bin/unweight" --json "$out/tune_kills.json" \
        >"$out/tune_kills.log" 2>&1; then
        tail -n 20 "$out/tune_kills.log"
        exit 1
    fi
    tail -n 1 "$out/tune_kills.log"
fi
torch=yes
if ! "$python" -c 'import sys, torch, transformers; sys.exit(not torch.cuda.is_available())' 2>"$out/python.log"; then
    torch=
fi
if [ -n "$torch" ]; then
    if ! "$python" "$here/parity/hf_parity.py" --unweight "$here/bin/unweight" --texts "$here/parity/texts" \
        --jobs 6 --out "$out" >"$out/parity.log" 2>&1; then
        grep -v '^ok' "$out/parity.log" | tail -n 60
        exit 1
    fi
    tail -n 1 "$out/parity.log"
fi
"$here/bin/unweight-bench" stress --json >"$out/stress.json" || exit 1
"$here/bin/unweight-bench" kernels --json >"$out/kernels.json" || exit 1
"$here/bin/unweight-bench" matmul --json --svg "$out/matmul.svg" >"$out/matmul.json" || exit 1
"$here/bin/unweight-bench" decode --geometry llama-3.1-8b --batch 1,8,16,32,64,128,256 --context 1024 --breakdown \
    --json >"$out/decode.json" || exit 1
if [ -z "$torch" ]; then
    echo "skipped: parity, torch_decode, serve_load; $python lacks torch with CUDA or transformers ($out/python.log)"
    exit 0
fi
"$python" "$here/torch_decode.py" --prefill 2048 --transformers >"$out/torch_decode.json" || exit 1
exec "$python" "$here/serve_load.py" --unweight "$here/bin/unweight" --out "$out/serve_load.json"
"#;

/// Builds the programs and collects all files.
pub fn run(arguments: &[String]) -> Result<(), String> {
    let with_nvrtc = match arguments {
        [] => false,
        [only] if only == "--with-nvrtc" => true,
        [other, ..] => return Err(format!("unexpected argument '{other}'; see `cargo xtask help`")),
    };
    let pack = root().join(".gpu");
    let io = |path: &Path| {
        let path = path.to_owned();
        move |error: std::io::Error| format!("{}: {error}", path.display())
    };
    match fs::remove_dir_all(&pack) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(io(&pack)(error)),
        _ => {}
    }
    for folder in ["bin", "tests"] {
        fs::create_dir_all(pack.join(folder)).map_err(io(&pack))?;
    }
    let build = ["build", "--profile", "dist", "--package", "unweight", "--package", "unweight-bench"];
    let binaries = executables(&[&build[..], &["--features", "unweight/full", "--bins"]].concat())?;
    let arguments = ["test", "--profile", "dist", "--no-run", "--package", "unweight", "--test", "gpu"];
    // Building a test also builds the binary, which is in the pack already.
    let tests: Vec<_> = executables(&arguments)?.into_iter().filter(|(name, _)| name == "gpu").collect();
    for (folder, files) in [("bin", &binaries), ("tests", &tests)] {
        for (name, path) in files {
            let target = pack.join(folder).join(name);
            fs::copy(path, &target).map_err(io(path))?;
            strip(&target);
        }
    }
    if with_nvrtc {
        let library = setup::prepare()?.nvrtc;
        let from = library.parent().ok_or("the path of libnvrtc has no directory")?;
        let to = pack.join("nvrtc");
        fs::create_dir_all(&to).map_err(io(&to))?;
        for entry in fs::read_dir(from).map_err(io(from))? {
            let path = entry.map_err(io(from))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            // The wheel also contains `.alt` libraries, which nothing here loads.
            if name.starts_with("libnvrtc") && !name.contains(".alt.") {
                fs::copy(&path, to.join(&name)).map_err(io(&path))?;
            }
        }
    }
    let sources = root();
    let parity = pack.join("parity");
    copy_all(&sources.join("tests/parity"), "py", &parity)?;
    copy_all(&sources.join("docs"), "md", &parity.join("texts"))?;
    let fixtures = Path::new("unweight-model/tests/fixtures");
    for entry in fs::read_dir(sources.join(fixtures)).map_err(io(fixtures))? {
        let model = entry.map_err(io(fixtures))?;
        if model.path().is_dir() {
            for extension in ["json", "safetensors"] {
                copy_all(&model.path(), extension, &pack.join(fixtures).join(model.file_name()))?;
            }
        }
    }
    for (file, target) in [
        ("README.md", parity.join("texts")),
        ("unweight-bench/peers/torch_decode.py", pack.clone()),
        ("unweight-bench/peers/serve_load.py", pack.clone()),
    ] {
        let from = sources.join(file);
        let name = from.file_name().ok_or("a source has no name")?;
        fs::copy(&from, target.join(name)).map_err(io(&from))?;
    }
    let script = pack.join("run.sh");
    fs::write(&script, RUN_SH)
        .and_then(|()| fs::set_permissions(&script, fs::Permissions::from_mode(0o755)))
        .map_err(io(&script))?;
    println!("{}: copy it to the GPU machine and run `OUT=results ./run.sh` there", pack.display());
    Ok(())
}

/// Copies the files of a directory with this extension to another directory, and creates that directory.
fn copy_all(from: &Path, extension: &str, to: &Path) -> Result<(), String> {
    let with_path = |path: &Path, error: std::io::Error| format!("{}: {error}", path.display());
    fs::create_dir_all(to).map_err(|error| with_path(to, error))?;
    for entry in fs::read_dir(from).map_err(|error| with_path(from, error))? {
        let entry = entry.map_err(|error| with_path(from, error))?;
        let path = entry.path();
        if path.extension().is_some_and(|found| found == extension) {
            fs::copy(&path, to.join(entry.file_name())).map_err(|error| with_path(&path, error))?;
        }
    }
    Ok(())
}

/// Strips debug information. If a file cannot be stripped, prints a message and keeps it.
pub fn strip(file: &Path) {
    if !succeeds(Command::new("strip").arg(file)) {
        eprintln!("{}: not stripped, because `strip` failed; the file is larger than necessary", file.display());
    }
}

/// Runs cargo and returns (target name, file) of each executable that it made.
fn executables(arguments: &[&str]) -> Result<Vec<(String, PathBuf)>, String> {
    let target_name = |message: &Value| Some(message.get("target")?.get("name")?.as_str()?.to_owned());
    Ok(built_executables(&mut cargo(), arguments)?
        .into_iter()
        .filter_map(|(message, file)| Some((target_name(&message)?, file)))
        .collect())
}

/// Runs this cargo and returns the `unweight` command that it built or found up to date.
pub fn command(cargo: &mut Command, arguments: &[&str]) -> Result<PathBuf, String> {
    let is_command = |message: &Value| {
        let target = &message["target"];
        target["name"] == "unweight"
            && target["kind"] == serde_json::json!(["bin"])
            && message["profile"]["test"] == false
    };
    let mut found = built_executables(cargo, arguments)?.into_iter().filter(|(message, _)| is_command(message));
    let (_, file) = found.next().ok_or_else(|| format!("`cargo {}` built no unweight", arguments.join(" ")))?;
    Ok(file)
}

/// Runs cargo and returns its message and the file of each executable that it made.
pub fn built_executables(command: &mut Command, arguments: &[&str]) -> Result<Vec<(Value, PathBuf)>, String> {
    command.args(arguments).arg("--message-format=json-render-diagnostics").stdout(Stdio::piped());
    eprintln!("$ cargo {}", arguments.join(" "));
    let output = command.stderr(Stdio::inherit()).output().map_err(|error| format!("cargo: {error}"))?;
    if !output.status.success() {
        return Err(format!("`cargo {}` failed: {}", arguments.join(" "), output.status));
    }
    let messages = String::from_utf8_lossy(&output.stdout);
    Ok(messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter_map(|message| {
            let file = PathBuf::from(message.get("executable")?.as_str()?);
            Some((message, file))
        })
        .collect())
}
