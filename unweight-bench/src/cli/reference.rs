//! Checks the generated part of docs/reference/bench.md against the program. `UPDATE_DOCS=1` rewrites that part.

use std::{env, fs, path::Path};

use clap::CommandFactory;

use super::Cli;

const BEGIN: &str = "<!-- commands -->\n";
const END: &str = "\n<!-- /commands -->";

#[test]
fn commands_are_those_of_the_program() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference");
    let path = folder.join("bench.md");
    let now = unweight::cli::markdown(Cli::command(), &fs::read_to_string(folder.join("cli.md")).unwrap());
    let page = fs::read_to_string(&path).unwrap();
    let (head, rest) = page.split_once(BEGIN).unwrap();
    let (listed, tail) = rest.split_once(END).unwrap();
    if env::var_os("UPDATE_DOCS").is_some_and(|value| !value.is_empty()) {
        fs::write(&path, [head, BEGIN, &now, END, tail].concat()).unwrap();
    } else {
        assert_eq!(listed, now, "UPDATE_DOCS=1 cargo test -p unweight-bench -- reference");
    }
}
