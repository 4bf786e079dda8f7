//! The Python package lies outside of the workspace: what it cannot inherit is held here.

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

#[test]
fn the_package_is_of_the_workspace_s_version() {
    let (workspace, package) = (manifest("."), manifest("bindings/python"));
    for key in ["version", "edition", "rust-version", "license"] {
        let expected = value(&workspace, "[workspace.package]", key);
        assert_eq!(value(&package, "[package]", key), expected, "bindings/python/Cargo.toml: {key}");
    }
}

#[test]
fn the_package_is_built_as_the_tests_are() {
    let (workspace, package) = (manifest("."), manifest("bindings/python"));
    let tests = value(&workspace, "[profile.test]", "opt-level");
    let own = value(&package, "[profile.dev]", "opt-level");
    assert_eq!(own, tests, "its dependencies would be built a second time");
}
