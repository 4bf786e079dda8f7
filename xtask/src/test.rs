//! `cargo xtask test` runs every test of the workspace, then the Python package's. `cargo xtask test-candle` runs those
//! of `bindings/candle`.

use crate::{
    run::{self, cargo},
    setup, wheel,
};

/// Prepares the environment and runs the tests. Arguments replace `--workspace`, for example to run one test.
pub fn run(arguments: &[String]) -> Result<(), String> {
    let environment = setup::prepare()?;
    let test = |arguments: &[&str]| {
        let mut command = cargo();
        command.arg("test").args(arguments);
        command.envs(environment.variables());
        // A snapshot that differs fails the test instead of writing a file for later review.
        if std::env::var_os("INSTA_UPDATE").is_none() {
            command.env("INSTA_UPDATE", "no");
        }
        run::run(&mut command)
    };
    if !arguments.is_empty() {
        return test(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    }
    // Without naming what to build, cargo would build every example too, though no test runs one; clippy checks them.
    // Doc tests have a command of their own. It builds no crate again, as each has the same features in both.
    test(&["--workspace", "--tests"])?;
    test(&["--workspace", "--doc"])?;
    wheel::test(&environment)
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
