//! Checks that `commands.txt` has the help texts of the program, for reviews and for the lint of words. `UPDATE_DOCS=1`
//! rewrites it.

use std::{env, fs, path::Path};

use clap::CommandFactory;

use super::Cli;

#[test]
fn commands_are_those_of_the_program() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = package.join("commands.txt");
    let reference = fs::read_to_string(package.join("../docs/reference/cli.md")).unwrap();
    let now = format!("{}\n", unweight::cli::markdown(Cli::command(), &reference).trim());
    if env::var_os("UPDATE_DOCS").is_some_and(|value| !value.is_empty()) {
        fs::write(&path, now).unwrap();
    } else {
        assert_eq!(fs::read_to_string(path).unwrap(), now, "UPDATE_DOCS=1 cargo test -p unweight-bench -- reference");
    }
}
