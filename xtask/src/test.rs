//! `cargo xtask test`: every test of the workspace, then those of the Python package. `cargo xtask test-candle`: those
//! of `bindings/candle`.

use crate::{
    run::{self, cargo},
    setup, wheel,
};

/// Prepares and tests. Arguments replace `--workspace --all-targets`, for one test at a time in the prepared
/// environment.
pub fn run(arguments: &[String]) -> Result<(), String> {
    let environment = setup::prepare()?;
    let test = |arguments: &[&str]| {
        let mut command = cargo();
        command.arg("test").args(arguments);
        command.envs(environment.variables());
        // A snapshot that differs is a failure, not a file to be reviewed later.
        if std::env::var_os("INSTA_UPDATE").is_none() {
            command.env("INSTA_UPDATE", "no");
        }
        run::run(&mut command)
    };
    if !arguments.is_empty() {
        return test(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    }
    test(&["--workspace", "--all-targets"])?;
    // --all-targets leaves these out.
    test(&["--workspace", "--doc"])?;
    wheel::test(&environment)
}

/// Lints and tests `bindings/candle`, without candle's CUDA backend. With `--if-prepared` nothing is fetched: where
/// cargo has no candle, it says so and does nothing; and it only tests, as to lint asks for another build of candle.
pub fn candle(arguments: &[String]) -> Result<(), String> {
    let of_candle = |task: &str| {
        let mut command = cargo();
        command.args([task, "--locked", "--manifest-path", "bindings/candle/Cargo.toml"]);
        command
    };
    let lints = !run::if_prepared(arguments)?;
    if !lints && !run::succeeds(of_candle("fetch").arg("--offline")) {
        println!("left out: the tests of bindings/candle (cargo xtask test-candle fetches candle for them)");
        return Ok(());
    }
    let target = ["--target-dir", "target"];
    if lints {
        run::run(of_candle("clippy").args(target).args(["--all-targets", "--", "-D", "warnings"]))?;
    }
    run::run(of_candle("test").args(target))
}
