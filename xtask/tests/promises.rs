//! Checks that every test named in docs/promises.md exists.

use std::{collections::BTreeSet, path::Path};

mod workspace;

use workspace::{files, read, root};

/// Returns the module of a file: its name, or for `mod.rs`, `main.rs` and `tests.rs` that of its directory.
fn module(file: &Path) -> &str {
    fn stem(path: &Path) -> &str {
        path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default()
    }
    match (stem(file), file.parent()) {
        ("mod" | "main" | "tests", Some(folder)) => stem(folder),
        (name, _) => name,
    }
}

/// Returns `module::name` of functions with `#[test]` a few lines above them.
fn tests() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for file in files(&["src", "tests", "unweight-format", "unweight-rt"], &["rs"], &[]) {
        let text = read(&file);
        for part in text.split("#[test]").skip(1) {
            let head = part.lines().take(5).find_map(|line| line.trim().strip_prefix("fn "));
            let name = head.and_then(|head| head.split('(').next());
            names.extend(name.map(|name| format!("{}::{name}", module(&file))));
        }
    }
    names
}

#[test]
fn promises_have_tests() {
    let table = read(&root().join("docs/promises.md"));
    let rows: Vec<(&str, &str)> = table
        .lines()
        .filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |")?.rsplit_once(" | "))
        .filter(|(promise, _)| *promise != "promise")
        .collect();
    assert!(rows.len() >= 20, "{} rows", rows.len());
    let existing = tests();
    for (promise, named) in &rows {
        for name in named.split(", ").map(|name| name.trim_matches('`')) {
            assert!(existing.contains(name), "{promise}: test {name} does not exist");
        }
    }
}
