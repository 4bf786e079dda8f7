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

/// Lints and tests `bindings/candle`, without candle's CUDA backend.
pub fn candle() -> Result<(), String> {
    let run = |task: &str, arguments: &[&str]| {
        let mut command = cargo();
        command.args([task, "--locked", "--manifest-path", "bindings/candle/Cargo.toml", "--target-dir", "target"]);
        run::run(command.args(arguments))
    };
    run("clippy", &["--all-targets", "--", "-D", "warnings"])?;
    run("test", &[])
}
