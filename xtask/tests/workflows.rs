//! Checks that tasks of xtask and scripts of `.ci` exist that workflows, scripts and documents call. Workflows use no
//! third-party actions, so nothing needs to be pinned.

use std::{collections::BTreeSet, fs, path::PathBuf};

mod workspace;

use workspace::{files, read, root, shown};

/// Returns the tasks that `main` runs.
fn tasks() -> BTreeSet<String> {
    let main = read(&root().join("xtask/src/main.rs"));
    let arms = main.split("match task {").nth(1).and_then(|rest| rest.split("other =>").next()).expect("the tasks");
    let names = arms.lines().filter_map(|line| line.trim().strip_prefix('"')?.split('"').next());
    names.map(str::to_owned).collect()
}

/// Returns the words that follow `before` in a text.
fn words_after<'a>(text: &'a str, before: &str) -> Vec<&'a str> {
    let end = |rest: &'a str| rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '-')).unwrap_or(rest.len());
    text.split(before).skip(1).map(|rest| &rest[..end(rest)]).filter(|word| !word.is_empty()).collect()
}

fn workflows() -> Vec<PathBuf> {
    let folder = root().join(".github/workflows");
    fs::read_dir(folder).expect("workflows").map(|entry| entry.expect("a workflow").path()).collect()
}

fn faults(text: &str, tasks: &BTreeSet<String>) -> Vec<String> {
    let unknown = ["cargo xtask ", "cargo +1.95.0 xtask ", "debug/xtask\" "].into_iter();
    let unknown = unknown.flat_map(|before| words_after(text, before));
    let mut found: Vec<String> =
        unknown.filter(|task| !tasks.contains(*task)).map(|task| format!("task {task} does not exist")).collect();
    let scripts = words_after(text, ".ci/").into_iter().filter(|script| !root().join(".ci").join(script).is_file());
    found.extend(scripts.map(|script| format!(".ci/{script} does not exist")));
    found
}

#[test]
fn tasks_and_scripts_exist() {
    let tasks = tasks();
    assert!(tasks.contains("dist") && tasks.len() > 10, "{tasks:?}");
    let mut all = files(&["docs", "bindings", "examples"], &["md"], &["records"]);
    all.extend(["README.md", "CONTRIBUTING.md", "Containerfile", "install.sh"].map(|name| root().join(name)));
    all.extend(["nightly", "release", "run"].map(|name| root().join(".ci").join(name)));
    all.extend(workflows());
    let found = all
        .iter()
        .flat_map(|path| faults(&read(path), &tasks).into_iter().map(move |fault| format!("{}: {fault}", shown(path))));
    assert_eq!(found.collect::<Vec<_>>(), [""; 0]);
    let planted = "run: cargo xtask dits\nrun: .ci/rnu\nrun: cargo xtask dist";
    assert_eq!(faults(planted, &tasks), ["task dits does not exist", ".ci/rnu does not exist"]);
}

#[test]
fn workflows_use_no_actions_and_the_compiler_of_a_release() {
    assert!(workflows().len() >= 2);
    let script = read(&root().join(".ci/release"));
    let compiler = script.split("RUSTUP_TOOLCHAIN=").nth(1).and_then(|rest| rest.split(' ').next()).expect("a version");
    for path in workflows() {
        let text = read(&path);
        let uses = text.lines().filter(|line| line.trim_start_matches([' ', '-']).starts_with("uses:"));
        assert_eq!(uses.collect::<Vec<_>>(), [""; 0], "{}", shown(&path));
        for version in text.split("toolchain install ").skip(1).filter_map(|rest| rest.split(' ').next()) {
            assert!(["stable", compiler].contains(&version), "{}: Rust {version}", shown(&path));
        }
        for version in text.split("cargo +").skip(1).filter_map(|rest| rest.split(' ').next()) {
            assert_eq!(version, compiler, "{}", shown(&path));
        }
    }
}
