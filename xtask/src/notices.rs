//! `THIRD-PARTY.txt` in archives and wheels: the crates that are compiled in, and the texts of their licences.

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs, io,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

use crate::run::{self, cargo, root};

/// The file's name.
pub const FILE: &str = "THIRD-PARTY.txt";
/// How names of files with licences begin, in upper case.
const NAMES: [&str; 6] = ["COPYING", "COPYRIGHT", "LICENCE", "LICENSE", "NOTICE", "UNLICENSE"];
/// What is compiled in besides crates.
const LIBRARIES: &str = "\
The Rust standard library is compiled in: Copyright (c) The Rust Project Contributors, MIT OR Apache-2.0.
Builds for musl contain musl libc: Copyright (c) 2005-2020 Rich Felker, et al., MIT.
Macros, build scripts and what only they need run at build time and are not listed here; the SBOMs (*.cdx.json) list
them, too.
";

/// A crate from a registry.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Crate {
    name: String,
    version: String,
    license: String,
    directory: PathBuf,
}

/// Returns the file's text for the command and the Python extension, which depends on the lock files alone.
pub fn text() -> Result<String, String> {
    let target = format!("{}-unknown-linux-gnu", env::consts::ARCH);
    let mut crates = BTreeSet::new();
    for (manifest, package, features) in [
        ("Cargo.toml", "unweight", &["--features", "full"][..]),
        ("bindings/python/Cargo.toml", "unweight-python", &[]),
    ] {
        let mut command = cargo();
        command.args(["metadata", "--format-version", "1", "--locked", "--filter-platform", &target]).args(features);
        let json = run::output(command.arg("--manifest-path").arg(root().join(manifest)))?;
        let metadata = serde_json::from_str(&json).map_err(|error| format!("cargo metadata: {error}"))?;
        crates.extend(compiled_in(&metadata, package).ok_or_else(|| format!("cargo metadata has no {package}"))?);
    }
    render(&crates.into_iter().collect::<Vec<_>>(), &licences_of_rust()?)
}

/// Returns the crates that a package needs to run, without those of this repository.
fn compiled_in(metadata: &Value, package: &str) -> Option<BTreeSet<Crate>> {
    let packages: BTreeMap<&str, &Value> = metadata["packages"]
        .as_array()?
        .iter()
        .filter_map(|package| Some((package["id"].as_str()?, package)))
        .collect();
    let nodes = metadata["resolve"]["nodes"].as_array()?;
    let nodes: BTreeMap<&str, &Value> = nodes.iter().filter_map(|node| Some((node["id"].as_str()?, node))).collect();
    let is_root = |(_, value): &(&&str, &&Value)| value["name"] == package && value["source"].is_null();
    let mut open = vec![*packages.iter().find(is_root)?.0];
    let (mut seen, mut found) = (BTreeSet::new(), BTreeSet::new());
    while let Some(id) = open.pop() {
        let package = packages.get(id)?;
        // Macros run at build time.
        let is_macro = package["targets"][0]["kind"][0] == "proc-macro";
        if !seen.insert(id) || is_macro {
            continue;
        }
        if !package["source"].is_null() {
            let text = |key: &str| package[key].as_str().unwrap_or("see below").to_owned();
            let directory = Path::new(package["manifest_path"].as_str()?).parent()?.to_owned();
            found.insert(Crate { name: text("name"), version: text("version"), license: text("license"), directory });
        }
        for dependency in nodes.get(id)?["deps"].as_array()? {
            let kinds = dependency["dep_kinds"].as_array()?;
            // The others are for builds and tests.
            if kinds.iter().any(|kind| kind["kind"].is_null()) {
                open.push(dependency["pkg"].as_str()?);
            }
        }
    }
    Some(found)
}

/// Returns the texts of MIT and Apache-2.0 that come with the compiler.
fn licences_of_rust() -> Result<Vec<String>, String> {
    let home = PathBuf::from(run::output(Command::new("rustc").args(["--print", "sysroot"]))?);
    let read = |name: &str| {
        let path = home.join("share/doc/rust/licenses").join(name);
        fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))
    };
    ["MIT.txt", "Apache-2.0.txt"].into_iter().map(read).collect()
}

/// Returns the texts of the licences in a crate's directory.
fn licences(directory: &Path) -> io::Result<Vec<String>> {
    let (mut open, mut paths) = (vec![directory.to_owned()], Vec::new());
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().to_uppercase();
            if folder == directory && !NAMES.iter().any(|start| name.starts_with(start)) {
                continue;
            }
            if entry.file_type()?.is_dir() {
                open.push(entry.path());
            } else {
                paths.push(entry.path());
            }
        }
    }
    paths.sort();
    let text =
        |path: PathBuf| Ok(String::from_utf8_lossy(&fs::read(path)?).replace("\r\n", "\n").trim_end().to_owned());
    paths.into_iter().map(text).collect()
}

/// Lists the crates, then each text once with the crates that it is of.
fn render(crates: &[Crate], of_rust: &[String]) -> Result<String, String> {
    let mut texts: Vec<(String, Vec<String>)> = Vec::new();
    let mut add = |text: &str, of: &str| match texts.iter_mut().find(|(known, _)| known == text) {
        Some((_, names)) => {
            if !names.iter().any(|name| name == of) {
                names.push(of.to_owned());
            }
        }
        None => texts.push((text.to_owned(), vec![of.to_owned()])),
    };
    let mut list = String::new();
    for package in crates {
        let name = format!("{} {}", package.name, package.version);
        let found =
            licences(&package.directory).map_err(|error| format!("{}: {error}", package.directory.display()))?;
        list += &format!("{name}: {}{}\n", package.license, if found.is_empty() { " (without a text)" } else { "" });
        found.iter().for_each(|text| add(text, &name));
    }
    of_rust.iter().for_each(|text| add(text.trim_end(), "the Rust standard library, and licences without a text"));
    let mut out = format!("Software of others in Unweight\n\n{LIBRARIES}\n{list}");
    for (text, names) in texts {
        out += &format!("\n{}\n{}\n\n{text}\n", "-".repeat(80), names.join(", "));
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setup;

    #[test]
    fn notices_have_every_crate_that_runs_and_each_text_once() {
        let home = env::temp_dir().join(format!("unweight-notices-{}", std::process::id()));
        setup::remove(&home).unwrap();
        let put = |name: &str, text: &str| {
            let path = home.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for (name, text) in [
            ("a/LICENSE-MIT", "mit of a\r\n"),
            ("a/LICENSES/BSD", "shared"),
            ("a/src/LICENSE", "of a part"),
            ("b/license.md", "shared\n"),
            ("none/README", ""),
            ("build/LICENSE", "of a build script"),
            ("macro/LICENSE", "of a macro"),
        ] {
            put(name, text);
        }
        let package = |name: &str| {
            let is_ours = name == "ours" || name == "root";
            let kind = if name == "macro" { "proc-macro" } else { "lib" };
            serde_json::json!({"id": name, "name": name, "version": "1.0.0", "license": "MIT",
                "source": if is_ours { Value::Null } else { "registry".into() },
                "manifest_path": home.join(name).join("Cargo.toml"), "targets": [{"kind": [kind]}]})
        };
        let names = ["root", "ours", "a", "b", "none", "build", "macro", "unused"];
        let deps = |kind: Value, names: &[&str]| -> Vec<Value> {
            names.iter().map(|name| serde_json::json!({"pkg": name, "dep_kinds": [{"kind": kind}]})).collect()
        };
        let node = |name: &str| {
            let deps = match name {
                "root" => [deps(Value::Null, &["ours", "b"]), deps("build".into(), &["build"])].concat(),
                "ours" => deps(Value::Null, &["none", "a", "macro"]),
                _ => deps("dev".into(), &["unused"]),
            };
            serde_json::json!({"id": name, "deps": deps})
        };
        let metadata = |names: &[&str]| {
            let packages: Vec<Value> = names.iter().map(|name| package(name)).collect();
            let nodes: Vec<Value> = names.iter().map(|name| node(name)).collect();
            serde_json::json!({"packages": packages, "resolve": {"nodes": nodes}})
        };
        let render_of = |names: &[&str]| {
            let crates = compiled_in(&metadata(names), "root").unwrap();
            render(&crates.into_iter().collect::<Vec<_>>(), &["of Rust".to_owned()]).unwrap()
        };
        let text = render_of(&names);
        let line = "-".repeat(80);
        let expected = format!(
            "a 1.0.0: MIT\nb 1.0.0: MIT\nnone 1.0.0: MIT (without a text)\n\n{line}\na 1.0.0\n\nmit of a\n\n{line}\n\
             a 1.0.0, b 1.0.0\n\nshared\n\n{line}\nthe Rust standard library, and licences without a text\n\nof Rust\n"
        );
        assert!(text.ends_with(&expected), "{text}");
        let mut backwards = names;
        backwards.reverse();
        assert_eq!(text, render_of(&backwards));
        fs::remove_dir_all(&home).unwrap();
    }

    /// Crates under licences that ask for their text are in the lock files.
    #[test]
    fn notices_of_this_workspace_have_the_texts() {
        let text = text().unwrap();
        for part in ["\nserde_json ", "\npyo3 ", "\nclap ", "Permission is hereby granted", "Apache License"] {
            assert!(text.contains(part), "no '{part}'");
        }
        assert!(!text.contains("proptest") && !text.contains("\ninsta "), "dependencies of tests are not compiled in");
        let home = cargo().get_current_dir().unwrap().display().to_string();
        assert!(!text.contains(&home), "names a directory of this machine");
        assert_eq!(text, super::text().unwrap());
        // Everything that is distributed with the command.
        let container = fs::read_to_string(root().join("Containerfile")).unwrap();
        assert!(container.contains(&format!(" /unpacked/{FILE} ")), "Containerfile does not copy {FILE}");
    }
}
