//! The arrows of docs/architecture.md: who may name whom.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Every package of the repository that is published, by folder, and what of the workspace it may depend on.
const CRATES: [(&str, &[&str]); 10] = [
    ("unweight-format", &[]),
    ("unweight-model", &["unweight-format"]),
    ("templates", &[]),
    ("unweight-macros", &[]),
    ("unweight-codegen", &["unweight-format", "unweight-macros", "unweight-templates"]),
    ("unweight-rt", &["unweight-format", "unweight-codegen"]),
    ("unweight-engine", &["unweight-format", "unweight-model", "unweight-codegen", "unweight-rt"]),
    ("unweight-rivals", &["unweight-format", "unweight-codegen", "unweight-rt"]),
    (
        "unweight-bench",
        &[
            "unweight",
            "unweight-format",
            "unweight-model",
            "unweight-codegen",
            "unweight-rt",
            "unweight-engine",
            "unweight-rivals",
        ],
    ),
    (
        ".",
        &[
            "unweight-format",
            "unweight-model",
            "unweight-codegen",
            "unweight-macros",
            "unweight-rt",
            "unweight-engine",
            "unweight-rivals",
        ],
    ),
];

/// Who alone may name a dependency.
const OWNERS: [(&str, &[&str]); 8] = [
    ("tera", &["unweight-codegen"]),
    ("syn", &["unweight-macros"]),
    ("cudarc", &["unweight-rt"]),
    ("clap", &[".", "unweight-bench"]),
    ("indicatif", &["."]),
    ("plotters", &["."]),
    ("axum", &["."]),
    ("tokio", &["."]),
];

/// Names under `[dependencies]`.
fn dependencies(folder: &str) -> Vec<String> {
    let text = read(&root().join(folder).join("Cargo.toml"));
    let section = text.split("\n[dependencies]\n").nth(1).unwrap_or_default();
    let lines = section.lines().take_while(|line| !line.starts_with('['));
    let names = lines.filter_map(|line| line.split(['.', ' ', '=']).next()).filter(|name| !name.is_empty());
    names.filter(|name| !name.starts_with('#')).map(str::to_owned).collect()
}

#[test]
fn crates_depend_only_in_documented_directions() {
    for (folder, allowed) in CRATES {
        for name in dependencies(folder).iter().filter(|name| name.starts_with("unweight")) {
            assert!(allowed.contains(&name.as_str()), "{folder}/Cargo.toml depends on {name}");
        }
    }
}

#[test]
fn dependencies_are_named_only_by_their_owner() {
    let named: BTreeMap<_, _> = CRATES.map(|(folder, _)| (folder, dependencies(folder))).into();
    for (name, owners) in OWNERS {
        for (folder, names) in &named {
            assert_eq!(names.iter().any(|n| n == name), owners.contains(folder), "{folder}/Cargo.toml: {name}");
        }
    }
}

/// (file, line number, line) of all Rust below a folder, without comments and without test modules, which stand at the
/// end.
fn code(folder: &str) -> Vec<(PathBuf, usize, String)> {
    let (mut folders, mut lines) = (vec![root().join(folder)], Vec::new());
    assert!(folders[0].is_dir(), "{folder} is gone: renew this test");
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder of sources") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = read(&path);
                let own = text.lines().take_while(|line| *line != "#[cfg(test)]").enumerate();
                let own = own.filter(|(_, line)| !line.trim_start().starts_with("//"));
                lines.extend(own.map(|(index, line)| (path.clone(), index + 1, line.to_owned())));
            }
        }
    }
    lines
}

/// Lines that hold one of the words.
fn found(folder: &str, words: &[&str]) -> Vec<String> {
    let hits = code(folder).into_iter().filter(|(.., line)| words.iter().any(|word| line.contains(word)));
    hits.map(|(path, number, line)| format!("{}:{number}: {}", path.display(), line.trim())).collect()
}

/// Compiling and choosing must run where there is no device.
#[test]
fn the_runtime_compiles_and_chooses_without_a_device() {
    for (room, never) in [
        ("unweight-rt/src/jit", &["crate::device", "crate::choose", "crate::weight", "crate::ops", "crate::layer"][..]),
        ("unweight-rt/src/choose", &["crate::device", "crate::exec", "crate::ops", "crate::layer"]),
        ("unweight-rt/src/device", &["crate::exec", "crate::ops", "crate::layer", "crate::weight"]),
        ("unweight-rt/src/weight", &["crate::exec", "crate::ops", "crate::layer"]),
        ("unweight-rt/src/exec", &["crate::ops", "crate::layer", "crate::weight"]),
        ("unweight-rt/src/ops", &["crate::layer"]),
    ] {
        assert_eq!(found(room, never), [""; 0], "{room}");
    }
}

/// Which matmul takes what is decided once for a device, or a table that was measured would reach some layers and
/// others not.
#[test]
fn layers_take_the_chooser_from_the_kernel_set() {
    for room in ["unweight-rt/src/layer", "unweight-engine/src", "bindings/python/src", "bindings/candle/src"] {
        assert_eq!(
            found(room, &["PackedChooser::of", "PackedChooser::model", "PackedChooser::h200"]),
            [""; 0],
            "{room}"
        );
    }
}

/// What a step is, and what of it is best, is decided where there is no device.
#[test]
fn the_engine_plans_steps_without_a_device() {
    let never = ["unweight_rt", "crate::engine", "crate::forward", "crate::kernels", "crate::weights"];
    for room in ["unweight-engine/src/pipelines/step_graph", "unweight-engine/src/pipelines/tune"] {
        assert_eq!(found(room, &never), [""; 0], "{room}");
    }
    let device = ["unweight_rt::raw::device", "unweight_rt::raw::ops", "unweight_rt::raw::layer"];
    assert_eq!(found("unweight-engine/src/budget", &[&device[..], &never[1..]].concat()), [""; 0]);
}

/// A family knows plans and specs; how text is made of them is for `render` alone.
#[test]
fn only_render_names_the_template_engine() {
    let files: Vec<_> = found("unweight-codegen/src", &["tera::", "use tera"]);
    assert!(!files.is_empty() && files.iter().all(|line| line.contains("render.rs")), "{files:?}");
}

/// A library's error carries a typed remedy; what to type is the binary's to say.
#[test]
fn libraries_do_not_mention_cli_options() {
    let words = ["--force", "--resume", "--json", "--threads", "--ram", "--scope", "--profile", "--sha256", "--plan"];
    let words: Vec<_> =
        words.into_iter().chain(["exit status", "exit code", "unweight cache", "unweight kernels"]).collect();
    for (folder, _) in CRATES.iter().filter(|(folder, _)| *folder != ".") {
        let own_program = |hit: &String| hit.contains("unweight-bench/src/cli/");
        let hits: Vec<_> =
            found(&format!("{folder}/src"), &words).into_iter().filter(|hit| !own_program(hit)).collect();
        assert_eq!(hits, [""; 0], "{folder}");
    }
}
