//! `cargo xtask test` runs every test of the workspace, then the Python package's. `cargo xtask test-candle` runs those
//! of `bindings/candle`.

use std::{
    collections::VecDeque,
    env,
    ffi::OsString,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Mutex,
    thread,
    time::Instant,
};

use serde_json::Value;

use crate::{
    gpu_pack,
    run::{self, cargo, command_line, output, target_dir},
    setup, wheel,
};

/// The tests that take longest, which start first. Those of the server also wait, for time limits.
const LONGEST: [&str; 5] = ["serve", "cpu", "format", "jit", "cli"];

/// Prepares the environment and runs the tests. Arguments replace `--workspace`, for example to run one test.
pub fn run(arguments: &[String]) -> Result<(), String> {
    let environment = setup::prepare()?;
    let prepare = |command: &mut Command| {
        command.envs(environment.variables());
        // A snapshot that differs fails the test instead of writing a file for later review.
        if env::var_os("INSTA_UPDATE").is_none() {
            command.env("INSTA_UPDATE", "no");
        }
    };
    let cargo_test = || {
        let mut command = cargo();
        prepare(command.arg("test"));
        command
    };
    if !arguments.is_empty() {
        return run::run(cargo_test().args(arguments));
    }
    // Without naming what to build, cargo would build every example too, though no test runs one; clippy checks them.
    // Doc tests have a command of their own. It builds no crate again, as each has the same features in both.
    run_two_at_a_time(binaries(&mut cargo_test())?, &prepare)?;
    run::run(cargo_test().args(["--workspace", "--doc"]))?;
    wheel::test(&environment)
}

/// A test binary.
struct Binary {
    name: String,
    file: PathBuf,
    /// The directory of its package.
    package: PathBuf,
}

/// Builds the tests. Returns their binaries, those of [`LONGEST`] first.
fn binaries(cargo: &mut Command) -> Result<Vec<Binary>, String> {
    let mut binaries = Vec::new();
    for (message, file) in gpu_pack::built_executables(cargo, &["--workspace", "--tests", "--no-run"])? {
        if message["profile"]["test"] == true {
            let text = |value: &Value| value.as_str().map(str::to_owned).ok_or_else(|| format!("cargo said {message}"));
            let package = PathBuf::from(text(&message["manifest_path"])?).with_file_name("");
            binaries.push(Binary { name: text(&message["target"]["name"])?, file, package });
        }
    }
    let place = |binary: &Binary| LONGEST.iter().position(|&name| name == binary.name).unwrap_or(LONGEST.len());
    // Cargo's order is that in which it finished them.
    binaries.sort_by(|a, b| place(a).cmp(&place(b)).then_with(|| (&a.package, &a.name).cmp(&(&b.package, &b.name))));
    Ok(binaries)
}

/// Runs binaries, two at a time, because many of their tests wait or run alone: one process from the first on, the
/// other from the last on. Prints the output of each when it ends, and runs all even if one fails.
fn run_two_at_a_time(binaries: Vec<Binary>, prepare: &(dyn Fn(&mut Command) + Sync)) -> Result<(), String> {
    let left = Mutex::new(VecDeque::from(binaries));
    let failed = Mutex::new(Vec::new());
    let libraries = library_path()?;
    let outputs = target_dir("test-output");
    fs::create_dir_all(&outputs).map_err(|error| format!("{}: {error}", outputs.display()))?;
    let take = |from_the_first: bool| {
        let mut left = left.lock().expect("no thread panics");
        if from_the_first { left.pop_front() } else { left.pop_back() }
    };
    let one = |binary: &Binary| {
        let mut command = Command::new(&binary.file);
        // What cargo set for xtask is not what it sets for a test.
        for (name, _) in env::vars_os() {
            if name.to_str().is_some_and(|name| name.starts_with("CARGO_PKG_") || name == "CARGO_MANIFEST_PATH") {
                command.env_remove(name);
            }
        }
        prepare(&mut command);
        command.current_dir(&binary.package).env("CARGO_MANIFEST_DIR", &binary.package);
        command.env("LD_LIBRARY_PATH", &libraries);
        let output = outputs.join(binary.file.file_name().unwrap_or_default()).with_extension("txt");
        if let Err(error) = run_one(&mut command, &output) {
            eprintln!("{error}");
            failed.lock().expect("no thread panics").push(binary.file.display().to_string());
        }
    };
    thread::scope(|scope| {
        for from_the_first in [true, false] {
            let (take, one) = (&take, &one);
            scope.spawn(move || {
                while let Some(binary) = take(from_the_first) {
                    one(&binary);
                }
            });
        }
    });
    let failed = failed.into_inner().expect("no thread panics");
    if failed.is_empty() { Ok(()) } else { Err(format!("tests failed: {}", failed.join(", "))) }
}

/// Returns the search path of libraries: those of procedural macros' tests, then the caller's.
fn library_path() -> Result<OsString, String> {
    let of_rust = PathBuf::from(output(Command::new("rustc").args(["--print", "target-libdir"]))?);
    let own = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    env::join_paths([of_rust].into_iter().chain(env::split_paths(&own))).map_err(|error| error.to_string())
}

/// Runs a command with its output in a file, so that a process which it leaves behind does not hold it. Prints the
/// output when it ends.
fn run_one(command: &mut Command, output: &Path) -> Result<(), String> {
    let line = command_line(command);
    eprintln!("$ {line} > {}", output.display());
    let began = Instant::now();
    let io = |error: std::io::Error| format!("{}: {error}", output.display());
    let file = File::create(output).map_err(io)?;
    let stderr = file.try_clone().map_err(io)?;
    let status = command.stdin(Stdio::null()).stdout(file).stderr(stderr).status();
    let status = status.map_err(|error| format!("{line}: {error}"))?;
    let text = fs::read(output).map_err(io)?;
    eprint!("{line}: {:.0} s\n{}", began.elapsed().as_secs_f64(), String::from_utf8_lossy(&text));
    if status.success() { Ok(()) } else { Err(format!("`{line}` failed: {status}")) }
}

/// Lints and tests `bindings/candle`, without candle's CUDA backend. With `--if-prepared`, fetches nothing, skips
/// everything if cargo has no candle, and does not lint, because clippy needs another build of candle.
pub fn candle(arguments: &[String]) -> Result<(), String> {
    let candle_command = |task: &str| {
        let mut command = cargo();
        command.args([task, "--locked", "--manifest-path", "bindings/candle/Cargo.toml"]);
        command
    };
    let lints = !run::if_prepared(arguments)?;
    if !lints && !run::succeeds(candle_command("fetch").arg("--offline")) {
        println!("skipped: the tests of bindings/candle; `cargo xtask test-candle` downloads candle for them");
        return Ok(());
    }
    let target = ["--target-dir", "target"];
    if lints {
        run::run(candle_command("clippy").args(target).args(["--all-targets", "--", "-D", "warnings"]))?;
    }
    run::run(candle_command("test").args(target))
}
