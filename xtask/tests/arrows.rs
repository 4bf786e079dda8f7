//! Checks the dependencies in docs/architecture.md: which crates and modules may refer to which.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

#[path = "arrows/drawing.rs"]
mod drawing;
#[path = "arrows/orders.rs"]
mod orders;
#[path = "arrows/references.rs"]
mod references;
mod sources;
mod workspace;

use orders::{CRATES, INNER};
use references::Tree;
use sources::{modules, modules_of, product_lines};
use workspace::{files, read, root, shown};

/// Dependencies that only these crates may use.
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

/// Returns the packages that a manifest depends on for any target, in builds or in build scripts; not those for tests.
fn dependencies_of(manifest: &Path) -> BTreeSet<String> {
    let arguments = ["metadata", "--format-version", "1", "--no-deps", "--offline", "--manifest-path"];
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo).args(arguments).arg(manifest).output().expect("cargo runs");
    assert!(output.status.success(), "{}: {}", manifest.display(), String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON from cargo");
    let packages = metadata["packages"].as_array().expect("packages");
    let package = packages.iter().find(|package| package["manifest_path"].as_str().map(Path::new) == Some(manifest));
    let all = package.and_then(|package| package["dependencies"].as_array()).expect("dependencies");
    let product = all.iter().filter(|dependency| dependency["kind"] != "dev");
    product.map(|dependency| dependency["name"].as_str().expect("a name").to_owned()).collect()
}

/// Returns the [`dependencies_of`] a package of the workspace.
fn dependencies(folder: &str) -> BTreeSet<String> {
    let folder = if folder == "." { root().to_owned() } else { root().join(folder) };
    dependencies_of(&folder.join("Cargo.toml"))
}

#[test]
fn planted_dependencies_are_found_in_every_section() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("planted-dependencies");
    fs::create_dir_all(folder.join("src")).expect("a directory");
    fs::write(folder.join("src/lib.rs"), "").expect("a source");
    let manifest = folder.join("Cargo.toml");
    for (section, is_found) in [
        ("[dependencies]\ntera = \"1\"", true),
        ("[dependencies.tera]\nversion = \"1\"", true),
        ("[dependencies]\nother = { package = \"tera\", version = \"1\" }", true),
        ("[target.'cfg(unix)'.dependencies]\ntera = \"1\"", true),
        ("[target.'cfg(unix)'.build-dependencies]\ntera = \"1\"", true),
        ("[build-dependencies]\ntera = \"1\"", true),
        ("[dev-dependencies]\ntera = \"1\"", false),
    ] {
        let text = format!("[package]\nname = \"planted\"\nedition = \"2024\"\n[workspace]\n{section}\n");
        fs::write(&manifest, text).expect("a manifest");
        assert_eq!(dependencies_of(&manifest).contains("tera"), is_found, "{section}");
    }
}

#[test]
fn crates_depend_only_in_documented_directions() {
    for krate in &CRATES {
        for name in dependencies(krate.folder).iter().filter(|name| name.starts_with("unweight")) {
            assert!(krate.above.contains(&name.as_str()), "{}/Cargo.toml depends on {name}", krate.folder);
        }
    }
}

#[test]
fn dependencies_are_named_only_by_their_owner() {
    let named: BTreeMap<_, _> = CRATES.iter().map(|krate| (krate.folder, dependencies(krate.folder))).collect();
    for (name, owners) in OWNERS {
        for (folder, names) in &named {
            assert_eq!(names.contains(name), owners.contains(folder), "{folder}/Cargo.toml: {name}");
        }
    }
}

/// Returns what is wrong with the modules in `of`: references that do not lead to a lower level, by file and line;
/// modules without a level; levels without a module. `levels` are names separated by spaces, from the bottom up.
fn faults(tree: &Tree, of: &[String], levels: &[&str]) -> Vec<String> {
    let level = |name: &str| levels.iter().position(|names| names.split(' ').any(|listed| listed == name));
    let children = tree.children(of);
    let declared: BTreeSet<&str> = levels.iter().flat_map(|names| names.split(' ')).collect();
    let missing = |name: &&str, what: &str| format!("{name} {what}: update xtask/tests/arrows/orders.rs");
    let mut found: Vec<String> = children.difference(&declared).map(|name| missing(name, "has no level")).collect();
    found.extend(declared.difference(&children).map(|name| missing(name, "has a level but does not exist")));
    if of.is_empty() {
        found.extend(
            tree.globs_of_root().map(|from| format!("{}: import names of the crate, not `*`", from.join("::"))),
        );
    }
    for (from, to, reference) in tree.arrows(of) {
        if let (Some(from_level), Some(to_level)) = (level(from), level(to))
            && to_level >= from_level
        {
            let file = reference.file.strip_prefix(root()).unwrap_or(&reference.file).display();
            found.push(format!("{file}:{}: {from} -> {to} ({})", reference.line, reference.to.join("::")));
        }
    }
    found
}

/// Returns the levels of the modules of every crate and of [`INNER`], by directory.
fn declared() -> Vec<(String, Vec<String>, Vec<&'static str>)> {
    let crates =
        CRATES.iter().map(|krate| (krate.source(), Vec::new(), krate.levels.iter().map(|(names, _)| *names).collect()));
    let inner = INNER.iter().map(|(folder, levels)| {
        let (source, path) = folder.split_once("/src/").map_or_else(
            || ("src".to_owned(), folder.strip_prefix("src/").expect("a directory of sources")),
            |(source, path)| (format!("{source}/src"), path),
        );
        (source, path.split('/').map(str::to_owned).collect(), levels.split(" < ").collect())
    });
    crates.chain(inner).collect()
}

#[test]
fn modules_name_only_modules_of_lower_levels() {
    let mut trees: BTreeMap<String, Tree> = BTreeMap::new();
    let mut wrong = Vec::new();
    for (source, path, levels) in declared() {
        let tree = trees.entry(source.clone()).or_insert_with(|| Tree::new(&modules(&source)));
        let folder = [std::slice::from_ref(&source), path.as_slice()].concat().join("/");
        wrong.extend(faults(tree, &path, &levels).into_iter().map(|text| format!("{folder}: {text}")));
    }
    let text = wrong.join("\n");
    assert!(
        wrong.is_empty(),
        "a module may only refer to modules of lower levels: move the target to a lower module\n{text}"
    );
}

/// docs/architecture.md contains the declared orders between two comments.
#[test]
fn the_document_draws_the_declared_orders() {
    const BEGIN: &str = "<!-- Written by `UPDATE_DOCS=1 cargo test -p xtask --test arrows`. -->\n";
    const END: &str = "<!-- End of what is written. -->\n";
    let path = root().join("docs/architecture.md");
    let text = read(&path);
    let (before, rest) = text.split_once(BEGIN).expect("the document has the first comment");
    let (_, after) = rest.split_once(END).expect("the document has the second comment");
    let section = drawing::section(&OWNERS);
    assert!(section.lines().all(|line| line.len() <= 120), "{section}");
    let updated = [before, BEGIN, &section, END, after].concat();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, &updated).expect("the document");
        return;
    }
    assert!(text == updated, "docs/architecture.md is outdated; run UPDATE_DOCS=1 cargo test -p xtask --test arrows");
}

/// A planted crate has backward references in every spelling; references in tests do not count.
#[test]
fn planted_cycles_are_found() {
    let arrows = |text: &str| -> Vec<String> {
        let tree = Tree::new(&modules_of(text));
        faults(&tree, &[], &["low", "high"])
    };
    let with = |low: &str, high: &str| arrows(&format!("mod low {{ {low} }}\nmod high {{ {high} pub struct X; }}"));
    assert_eq!(with("pub struct Y;", "use crate::low::Y; fn f() { super::low::Y; crate::low::Y; }"), [""; 0]);
    for low in [
        "use crate::high::X;",
        "use super::high::X;",
        "use crate::{high::{self, X as Y}};",
        "use crate::high::*;",
        "fn f(_: crate::high::X) {}",
        "fn f() { super::high::X; }",
        "fn f() { println!(\"{}\", crate::high::X); }",
        "make! { x: crate::high::X }",
        "mod inner { fn f() { use super::super::high::X; } }",
        "struct S; impl S { fn f() -> Option<crate::high::X> { None } }",
        "use crate as root; fn f(_: root::high::X) {}",
        "use crate as root; use root::high::X;",
        "use crate::{self as root}; fn f() { root::high::X; }",
        "use super::{self as above}; use above as root; fn f() { println!(\"{}\", root::high::X); }",
        "fn f() { use crate as root; root::high::X; }",
        "mod inner { use super::super as root; fn f(_: root::high::X) {} }",
    ] {
        let found = with(low, "use crate::low;");
        assert!(!found.is_empty(), "{low}");
        assert!(found.iter().all(|fault| fault.starts_with("planted.rs:1: low -> high (high")), "{low}: {found:?}");
    }
    let own_name = "extern crate self as own; mod low { fn f(_: own::high::X) {} } mod high { pub struct X; }";
    assert_eq!(arrows(own_name), ["planted.rs:1: low -> high (high::X)"], "the crate under its own name");
    let hidden = "pub use high::X; mod low { use crate::X; } mod high { pub struct X; }";
    assert_eq!(arrows(hidden), ["planted.rs:1: low -> high (high::X)"], "a re-export hides no arrow");
    for glob in
        ["use crate::*;", "use super::*;", "use crate as root; use root::*;", "mod inner { use super::super::*; }"]
    {
        let found = with(&format!("{glob} fn f(_: X) {{}}"), "");
        assert!(found.iter().any(|fault| fault.starts_with("low") && fault.ends_with("not `*`")), "{glob}: {found:?}");
    }
    assert_eq!(with("mod inner { use super::*; } #[cfg(test)] mod tests { use crate::*; }", ""), [""; 0]);
    let restricted = "pub(super) struct Y; pub(in crate::high) struct Z;";
    assert_eq!(with(restricted, ""), [""; 0], "a visibility is no arrow");
    for test in ["#[cfg(test)] mod tests { use crate::high::X; }", "#[cfg(test)] use crate::high::X;"] {
        assert_eq!(with(test, ""), [""; 0], "{test}");
    }
    assert_eq!(arrows("mod low {} mod high {} mod new {}"), ["new has no level: update xtask/tests/arrows/orders.rs"]);
}

/// Returns the numbers and texts of the lines of product code that contain one of the words. Comments do not count.
fn with_words(text: &str, words: &[&str]) -> Result<Vec<(usize, String)>, syn::Error> {
    // Parsing takes time, and few files contain a word.
    if !words.iter().any(|word| text.contains(word)) {
        return Ok(Vec::new());
    }
    let code = product_lines(text)?.into_iter().zip(1..).filter(|(line, _)| !line.trim_start().starts_with("//"));
    let hits = code.filter(|(line, _)| words.iter().any(|word| line.contains(word)));
    Ok(hits.map(|(line, number)| (number, line.trim().to_owned())).collect())
}

/// Returns the lines of all Rust below a directory that contain one of the words.
fn found(folder: &str, words: &[&str]) -> Vec<String> {
    let of_file = |path: PathBuf| {
        let shown = shown(&path);
        let hits = with_words(&read(&path), words).unwrap_or_else(|error| panic!("{shown}: {error}"));
        hits.into_iter().map(move |(number, line)| format!("{shown}:{number}: {line}"))
    };
    files(&[folder], &["rs"], &[]).into_iter().flat_map(of_file).collect()
}

#[test]
fn planted_words_are_found_below_test_modules() {
    let found = |text: &str| with_words(text, &["tera::"]).expect("Rust");
    let hit = [(3, "use tera::Tera;".to_owned())];
    for test in
        ["#[cfg(test)]\nmod tests;", "#[cfg(test)]\nmod tests { use tera::Tera; }", "#[test]\nfn f() { tera::f(); }"]
    {
        assert_eq!(found(&format!("{test}\nuse tera::Tera;\n")), hit, "{test}");
    }
    assert_eq!(found("#[cfg(test)] use tera::X; use tera::Y;"), [(1, "use tera::Y;".to_owned())]);
    assert_eq!(found("impl S {\n    #[cfg(test)]\n    fn f() {\n        tera::f();\n    }\n}\n// tera::f\n"), []);
}

/// Dispatch is decided once per device. Otherwise a measured table would apply to some layers and not to others.
#[test]
fn layers_take_the_chooser_from_the_kernel_set() {
    for folder in ["unweight-rt/src/layer", "unweight-engine/src", "bindings/python/src", "bindings/candle/src"] {
        assert_eq!(
            found(folder, &["PackedChooser::of", "PackedChooser::model", "PackedChooser::h200"]),
            [""; 0],
            "{folder}"
        );
    }
}

/// Returns the names of a module and its children that are `never` or in it, by file and line. A glob over an ancestor
/// counts, because it may import them.
fn named(tree: &Tree, of: &[String], never: &[&str]) -> Vec<String> {
    let never: Vec<Vec<&str>> = never.iter().map(|path| path.split("::").collect()).collect();
    let mut found = BTreeSet::new();
    for reference in tree.named_in(of) {
        let is_never = match reference.to.split_last() {
            Some((last, module)) if last == "*" => {
                never.iter().any(|path| module.iter().zip(path).all(|(name, never)| name == never))
            }
            _ => never.iter().any(|path| {
                path.len() <= reference.to.len() && path.iter().zip(&reference.to).all(|(never, name)| name == never)
            }),
        };
        if is_never {
            let file = reference.file.strip_prefix(root()).unwrap_or(&reference.file).display();
            found.insert(format!("{file}:{}: {}", reference.line, reference.to.join("::")));
        }
    }
    found.into_iter().collect()
}

/// The planning of steps does not depend on a device.
#[test]
fn the_engine_plans_steps_without_a_device() {
    let tree = Tree::new(&modules("unweight-engine/src"));
    let never = ["unweight_rt", "crate::engine", "crate::forward", "crate::kernels", "crate::weights"];
    let device = ["unweight_rt::raw::device", "unweight_rt::raw::ops", "unweight_rt::raw::layer"];
    let device = [&device[..], &never[1..]].concat();
    for (module, never) in
        [("pipelines::step_graph", &never[..]), ("pipelines::tune", &never[..]), ("budget", &device[..])]
    {
        let of: Vec<String> = module.split("::").map(str::to_owned).collect();
        assert!(!tree.named_in(&of).is_empty(), "{module} names nothing");
        assert_eq!(named(&tree, &of, never), [""; 0], "{module}");
    }
}

/// Every spelling of a forbidden name is found, and names that are allowed are not.
#[test]
fn planted_names_of_a_device_are_found() {
    let found = |text: &str| {
        let tree =
            Tree::new(&modules_of(&format!("mod kernels {{ pub fn f() {{}} }} mod a {{}} mod pure {{ {text} }}")));
        named(&tree, &["pure".to_owned()], &["crate::kernels", "unweight_rt::raw::ops"])
    };
    for text in [
        "use crate::{a, kernels, b};",
        "use crate::{a::{self, X}, kernels::{f as g}};",
        "use super::{a, kernels};",
        "use crate as root; fn f() { root::kernels::f(); }",
        "use crate::*;",
        "mod inner { use super::super::*; }",
        "fn f() { println!(\"{}\", crate::kernels::f()); }",
        "#[cfg(test)] mod tests; use crate::{a, kernels};",
        "use unweight_rt::{ContextSize, raw::{choose::cost, ops::attention}};",
        "use unweight_rt::raw; fn f() { raw::ops::f(); }",
        "fn f() { use unweight_rt::raw as r; r::ops::f(); }",
        "use unweight_rt::raw; use raw as r; fn f(_: r::ops::X) {}",
        "use unweight_rt::raw::*;",
        "fn f() { unweight_rt::raw::ops::f(); }",
        "fn f() { println!(\"{}\", ::unweight_rt::raw::ops::f()); }",
    ] {
        assert!(!found(text).is_empty(), "{text}");
    }
    for text in [
        "use crate::{a, kernels_of, b};",
        "use unweight_rt::{ContextSize, raw::choose::*}; fn f() { kernels::f(); }",
        "#[cfg(test)] mod tests { use crate::{a, kernels}; }",
        "mod inner { use super::*; }",
    ] {
        assert_eq!(found(text), [""; 0], "{text}");
    }
}

/// A family defines plans and specs. Only `render` turns them into source text.
#[test]
fn only_render_names_the_template_engine() {
    let files: Vec<_> = found("unweight-codegen/src", &["tera::", "use tera"]);
    assert!(!files.is_empty() && files.iter().all(|line| line.contains("render.rs")), "{files:?}");
}

/// A library's error has a typed remedy. Only the binary translates remedies to options.
#[test]
fn libraries_do_not_mention_cli_options() {
    let words = ["--force", "--resume", "--json", "--threads", "--ram", "--scope", "--profile", "--sha256", "--plan"];
    let words: Vec<_> =
        words.into_iter().chain(["exit status", "exit code", "unweight cache", "unweight kernels"]).collect();
    for folder in CRATES.iter().map(|krate| krate.folder).filter(|folder| !matches!(*folder, "." | "xtask")) {
        let own_program = |hit: &String| hit.contains("unweight-bench/src/cli/");
        let hits: Vec<_> =
            found(&format!("{folder}/src"), &words).into_iter().filter(|hit| !own_program(hit)).collect();
        assert_eq!(hits, [""; 0], "{folder}");
    }
}
