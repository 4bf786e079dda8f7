//! The bindings lie outside of the workspace: what they cannot inherit is held here.

use std::{fs, path::Path};

fn manifest(folder: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").join(folder).join("Cargo.toml");
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The first line `key = ...` after the line `section`.
fn value<'a>(text: &'a str, section: &str, key: &str) -> &'a str {
    let lines = text.lines().skip_while(|line| *line != section);
    let mut found = lines.filter_map(|line| line.strip_prefix(key)?.strip_prefix(" = "));
    found.next().unwrap_or_else(|| panic!("no {key} in {section}"))
}

const BINDINGS: [&str; 2] = ["bindings/python", "bindings/candle"];

#[test]
fn the_bindings_are_of_the_workspace_s_version() {
    let workspace = manifest(".");
    for folder in BINDINGS {
        let package = manifest(folder);
        for key in ["version", "edition", "rust-version", "license"] {
            let expected = value(&workspace, "[workspace.package]", key);
            assert_eq!(value(&package, "[package]", key), expected, "{folder}/Cargo.toml: {key}");
        }
    }
}

/// Not candle's bindings: they are built without optimisation (their manifest says why).
#[test]
fn the_python_bindings_are_built_as_the_tests_are() {
    let workspace = manifest(".");
    let tests = value(&workspace, "[profile.test]", "opt-level");
    let own = manifest("bindings/python");
    assert_eq!(value(&own, "[profile.dev]", "opt-level"), tests, "its dependencies would be built a second time");
}
