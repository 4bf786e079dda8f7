//! Checks the generated part of docs/reference/cli.md against `man --markdown`. `UPDATE_DOCS=1` rewrites that part.

use std::{env, fs, path::Path};

use crate::harness::run;

const BEGIN: &str = "<!-- commands -->\n";
const END: &str = "\n<!-- /commands -->";

#[test]
fn commands_are_those_of_the_program() {
    let home = tempfile::tempdir().unwrap();
    run(home.path(), &["man", "--markdown", "."], 0);
    let now = fs::read_to_string(home.path().join("unweight.md")).unwrap();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference/cli.md");
    let page = fs::read_to_string(&path).unwrap();
    let (head, rest) = page.split_once(BEGIN).unwrap();
    let (listed, tail) = rest.split_once(END).unwrap();
    if env::var_os("UPDATE_DOCS").is_some_and(|value| !value.is_empty()) {
        fs::write(&path, [head, BEGIN, &now, END, tail].concat()).unwrap();
    } else {
        assert_eq!(listed, now, "UPDATE_DOCS=1 cargo test --test cli --features full -- reference");
    }
}
