//! `cargo xtask test` runs every test of the workspace, then the Python package's. `cargo xtask test-candle` runs those
//! of `bindings/candle`.

use std::{
    collections::VecDeque,
    env,
    ffi::{OsStr, OsString},
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

/// Prepares the environment and runs the tests. With arguments, runs only `cargo test` with them: of the packages that
/// they name, or else of the workspace, so that a filter reaches all packages.
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
        return run::run(cargo_test().args(with_packages(arguments)));
    }
    // Without naming what to build, cargo would build every example too, though no test runs one; clippy checks them.
    // Doc tests have a command of their own. It builds no crate again, as each has the same features in both.
    let mut build = cargo();
    prepare(&mut build);
    run_two_at_a_time(binaries(&mut build)?, &prepare)?;
    run::run(cargo_test().args(["--workspace", "--doc"]))?;
    wheel::test(&environment)
}

/// Returns the arguments of `cargo test`, with `--workspace` unless they name packages.
fn with_packages(arguments: &[String]) -> Vec<String> {
    let of_cargo = arguments.iter().take_while(|argument| *argument != "--");
    let is_package = |argument: &String| {
        let long = ["--package", "--workspace", "--all", "--manifest-path"];
        let name = argument.split('=').next().unwrap_or_default();
        long.contains(&name) || argument.starts_with("-p")
    };
    let names_packages = of_cargo.into_iter().any(is_package);
    let workspace = (!names_packages).then(|| "--workspace".to_owned());
    workspace.into_iter().chain(arguments.iter().cloned()).collect()
}

/// A test binary.
struct Binary {
    name: String,
    file: PathBuf,
    /// The kind of its target: `test`, `lib`, `bin`.
    kind: String,
    /// The name of its package.
    package: String,
    /// The directory of its package.
    folder: PathBuf,
}

impl Binary {
    /// Returns the binary that a message of cargo names.
    fn new(message: &Value, file: PathBuf) -> Result<Self, String> {
        let text = |value: &Value| value.as_str().map(str::to_owned).ok_or_else(|| format!("cargo said {message}"));
        let manifest = PathBuf::from(text(&message["manifest_path"])?);
        let folder = manifest.parent().ok_or_else(|| format!("cargo said {message}"))?.to_owned();
        // `path+file:///FOLDER#NAME@VERSION`, or `path+file:///FOLDER/NAME#VERSION`.
        let id = text(&message["package_id"])?;
        let (place, version) = id.rsplit_once('#').ok_or_else(|| format!("cargo said {message}"))?;
        let package = match version.split_once('@') {
            Some((name, _)) => name,
            None => place.rsplit('/').next().unwrap_or_default(),
        };
        let (name, kind) = (text(&message["target"]["name"])?, text(&message["target"]["kind"][0])?);
        Ok(Self { name, file, kind, package: package.to_owned(), folder })
    }

    /// Returns the command that runs only this.
    fn command(&self) -> String {
        match self.kind.as_str() {
            "test" | "bin" | "example" | "bench" => {
                format!("cargo xtask test -p {} --{} {}", self.package, self.kind, self.name)
            }
            _ => format!("cargo xtask test -p {} --lib", self.package),
        }
    }
}

/// Builds the tests. Returns their binaries, those of [`LONGEST`] first.
fn binaries(cargo: &mut Command) -> Result<Vec<Binary>, String> {
    let mut binaries = Vec::new();
    for (message, file) in gpu_pack::built_executables(cargo, &["test", "--workspace", "--tests", "--no-run"])? {
        if message["profile"]["test"] == true {
            binaries.push(Binary::new(&message, file)?);
        }
    }
    let place = |binary: &Binary| LONGEST.iter().position(|&name| name == binary.name).unwrap_or(LONGEST.len());
    // Cargo's order is that in which it finished them.
    binaries.sort_by(|a, b| place(a).cmp(&place(b)).then_with(|| (&a.folder, &a.name).cmp(&(&b.folder, &b.name))));
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
        command.current_dir(&binary.folder).env("CARGO_MANIFEST_DIR", &binary.folder);
        command.env("LD_LIBRARY_PATH", &libraries);
        let output = outputs.join(binary.file.file_name().unwrap_or_default()).with_extension("txt");
        if let Err(error) = run_one(&mut command, &output) {
            eprintln!("{error}");
            failed.lock().expect("no thread panics").push(binary.command());
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
    if failed.is_empty() { Ok(()) } else { Err(format!("tests failed:\n{}", failed.join("\n"))) }
}

/// Returns the search path of libraries: those of procedural macros' tests, then the caller's.
fn library_path() -> Result<OsString, String> {
    let of_rust = PathBuf::from(output(Command::new("rustc").args(["--print", "target-libdir"]))?);
    let own = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    joined(of_rust, &own)
}

/// Returns a search path with one more directory in front. An empty part would mean the current directory.
fn joined(first: PathBuf, rest: &OsStr) -> Result<OsString, String> {
    let rest = env::split_paths(rest).filter(|part| !part.as_os_str().is_empty());
    env::join_paths([first].into_iter().chain(rest)).map_err(|error| error.to_string())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_path_has_no_empty_part() {
        for (own, expected) in [("", "/rust"), (":", "/rust"), (":/a::/b:", "/rust:/a:/b"), ("/a", "/rust:/a")] {
            assert_eq!(joined("/rust".into(), own.as_ref()), Ok(expected.into()), "{own}");
        }
    }

    #[test]
    fn filters_reach_all_packages() {
        let with = |arguments: &str| {
            let arguments: Vec<String> = arguments.split(' ').map(str::to_owned).collect();
            with_packages(&arguments).join(" ")
        };
        for filter in ["name", "--test cpu name", "--release -- --package", "name -- -p"] {
            assert_eq!(with(filter), format!("--workspace {filter}"));
        }
        for packages in
            ["-p unweight-format", "-punweight", "--package unweight", "--package=unweight", "--workspace x", "a -p b"]
        {
            assert_eq!(with(packages), packages);
        }
    }

    #[test]
    fn a_failed_binary_is_named_by_the_command_that_runs_it() {
        let of = |id: &str, kind: &str| {
            let message = serde_json::json!({
                "manifest_path": "/a/unweight-rt/Cargo.toml",
                "package_id": id,
                "target": { "name": "t", "kind": [kind] },
            });
            let binary = Binary::new(&message, "/a/target/t-0123".into()).expect("a message");
            assert_eq!(binary.folder.as_os_str(), "/a/unweight-rt", "no `/` at the end");
            binary.command()
        };
        let named = "path+file:///a/unweight-rt#other@0.1.0";
        assert_eq!(of(named, "test"), "cargo xtask test -p other --test t");
        assert_eq!(of(named, "bin"), "cargo xtask test -p other --bin t");
        assert_eq!(of("path+file:///a/unweight-rt#0.1.0", "lib"), "cargo xtask test -p unweight-rt --lib");
        assert_eq!(of("path+file:///a/unweight-rt#0.1.0", "proc-macro"), "cargo xtask test -p unweight-rt --lib");
    }
}
