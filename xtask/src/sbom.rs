//! The CycloneDX SBOMs of a release.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::{Value, json};

use crate::{
    run::{self, cargo, git, read, root, run, target_dir},
    rustc,
};

/// The version of cargo-cyclonedx, which writes the SBOMs.
pub const CYCLONEDX: &str = "0.5.9";

/// Something that is built, and what its SBOM describes.
pub struct Artifact {
    manifest: &'static str,
    package: &'static str,
    /// The name of the file that cargo-cyclonedx writes.
    file: &'static str,
}

/// The command.
pub const COMMAND: Artifact = Artifact { manifest: "Cargo.toml", package: "unweight", file: "unweight_bin.cdx.json" };
/// The extension of the Python package.
pub const EXTENSION: Artifact =
    Artifact { manifest: "bindings/python/Cargo.toml", package: "unweight-python", file: "_native_cdylib.cdx.json" };

/// A package's name and version.
type Package = (String, String);

/// Returns the path of cargo-cyclonedx. Installs it in `target/tools` unless this machine has the right version.
pub fn cyclonedx() -> Result<PathBuf, String> {
    let has_version = |program: &Path| {
        let output = Command::new(program).args(["cyclonedx", "--version"]).output();
        output.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).trim().ends_with(CYCLONEDX))
    };
    let (host, installed) = (PathBuf::from("cargo-cyclonedx"), target_dir("tools/bin/cargo-cyclonedx"));
    if let Some(program) = [host, installed.clone()].into_iter().find(|program| has_version(program)) {
        return Ok(program);
    }
    let arguments = ["install", "--locked", "--quiet", "cargo-cyclonedx", "--version", CYCLONEDX, "--root"];
    run(cargo().args(arguments).arg(target_dir("tools")))?;
    Ok(installed)
}

/// Returns the SBOM of an artifact that is built with these options (features and target), without the path of this
/// workspace.
pub fn generate(cyclonedx: &Path, artifact: &Artifact, options: &[&str], epoch: &str) -> Result<Value, String> {
    let manifest = root().join(artifact.manifest);
    let mut command = Command::new(cyclonedx);
    command.current_dir(root()).arg("cyclonedx").arg("--manifest-path").arg(&manifest).args(options);
    command.args(["--format", "json", "--describe", "binaries", "--spec-version", "1.5", "-qq"]);
    run(command.env("SOURCE_DATE_EPOCH", epoch))?;
    // cargo-cyclonedx writes a file next to the manifest of each package.
    let mut found = None;
    let written = ["--exclude=*_bin.cdx.json", "--exclude=*_cdylib.cdx.json"];
    let files = [&["ls-files", "--others", "--ignored"][..], &written, &["--", ":!target"]].concat();
    let files = git(&files)?;
    for file in files.lines().map(|file| root().join(file)) {
        if file.file_name().is_some_and(|name| name == artifact.file) {
            found = Some(read(&file)?);
        }
        fs::remove_file(&file).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    let text = found.ok_or_else(|| format!("cargo-cyclonedx wrote no {}", artifact.file))?;
    let text = text.replace(&format!("file://{}", root().display()), &format!("file://{}", rustc::ROOT_NAME));
    let mut sbom = serde_json::from_str(&text).map_err(|error| format!("{}: {error}", artifact.file))?;
    // It also lists what other packages and features of the workspace need.
    keep(&mut sbom, &built(&manifest, artifact.package, options)?).map_err(|error| {
        format!("{}: {error}; compare it with `cargo tree --package {}`", artifact.file, artifact.package)
    })?;
    Ok(sbom)
}

/// Returns the text of an SBOM.
pub fn text(sbom: &Value) -> String {
    format!("{sbom:#}\n")
}

/// Returns what a build of a package with these options compiles.
fn built(manifest: &Path, package: &str, options: &[&str]) -> Result<BTreeSet<Package>, String> {
    let mut command = cargo();
    command.args(["tree", "--locked", "--edges", "normal,build", "--prefix", "none", "--format", "{p}"]);
    command.arg("--manifest-path").arg(manifest).args(["--package", package]).args(options);
    run::output(&mut command)?.lines().map(package_of).collect()
}

/// Returns the package in a line of `cargo tree`, such as `serde v1.0.0 (*)`.
fn package_of(line: &str) -> Result<Package, String> {
    let mut words = line.split(' ');
    let version = |word: &str| word.strip_prefix('v').map(str::to_owned);
    match (words.next(), words.next().and_then(version)) {
        (Some(name), Some(version)) => Ok((name.to_owned(), version)),
        _ => Err(format!("cargo tree printed '{line}', which names no package")),
    }
}

/// Removes every component that is not in `built`, and what depends on it. Fails if a package of `built` is missing.
fn keep(sbom: &mut Value, built: &BTreeSet<Package>) -> Result<(), String> {
    let described = reference(&sbom["metadata"]["component"], "bom-ref")?;
    let mut missing = built.clone();
    let mut kept = BTreeSet::new();
    for component in array(sbom, "components")? {
        let package = (reference(component, "name")?, reference(component, "version")?);
        if built.contains(&package) {
            missing.remove(&package);
            kept.insert(reference(component, "bom-ref")?);
        }
    }
    // The described artifact is not in the list of components.
    missing.retain(|(name, version)| !described.ends_with(&format!("#{name}@{version}")));
    if let Some((name, version)) = missing.first() {
        return Err(format!("no component {name} {version}"));
    }
    let has = |value: &Value| value.as_str().is_some_and(|reference| kept.contains(reference));
    array(sbom, "components")?.retain(|component| has(&component["bom-ref"]));
    let dependencies = array(sbom, "dependencies")?;
    dependencies.retain(|of| has(&of["ref"]) || of["ref"] == *described);
    for of in dependencies {
        if let Some(needed) = of.get_mut("dependsOn").and_then(Value::as_array_mut) {
            needed.retain(has);
        }
    }
    Ok(())
}

/// Returns the SBOM of a wheel: that of its extension, with the command that the wheel has, too.
pub fn merge(mut extension: Value, command: &Value) -> Result<Value, String> {
    let (described, added) = (&extension["metadata"]["component"], &command["metadata"]["component"]);
    let (described, command_reference) = (reference(described, "bom-ref")?, reference(added, "bom-ref")?);
    let mut more = command.clone();
    let components = array(&mut extension, "components")?;
    for component in array(&mut more, "components")?.iter().chain([added]) {
        if !components.iter().any(|known| known["bom-ref"] == component["bom-ref"]) {
            components.push(component.clone());
        }
    }
    components.sort_by_cached_key(|component| component["bom-ref"].to_string());
    let dependencies = array(&mut extension, "dependencies")?;
    let of_wheel = json!({"ref": described, "dependsOn": [command_reference]});
    for of in array(&mut more, "dependencies")?.iter().chain([&of_wheel]) {
        let Some(known) = dependencies.iter_mut().find(|known| known["ref"] == of["ref"]) else {
            dependencies.push(of.clone());
            continue;
        };
        let both = [&known["dependsOn"], &of["dependsOn"]].into_iter().filter_map(Value::as_array).flatten();
        let both: BTreeSet<&str> = both.filter_map(Value::as_str).collect();
        if !both.is_empty() {
            known["dependsOn"] = json!(both);
        }
    }
    dependencies.sort_by_cached_key(|of| of["ref"].to_string());
    Ok(extension)
}

fn array<'a>(value: &'a mut Value, key: &str) -> Result<&'a mut Vec<Value>, String> {
    value.get_mut(key).and_then(Value::as_array_mut).ok_or_else(|| format!("the SBOM has no {key}"))
}

fn reference(value: &Value, key: &str) -> Result<String, String> {
    value[key].as_str().map(str::to_owned).ok_or_else(|| format!("a component of the SBOM has no {key}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the SBOM of a package, whose components and edges are given.
    fn sbom(described: &str, components: &[&str], edges: &[(&str, &[&str])]) -> Value {
        let component = |name: &&str| json!({"bom-ref": format!("#{name}@1.0.0"), "name": name, "version": "1.0.0"});
        let references = |names: &[&str]| names.iter().map(|name| format!("#{name}@1.0.0")).collect::<Vec<_>>();
        let edge = |(of, needs): &(&str, &[&str])| match needs.is_empty() {
            true => json!({"ref": format!("#{of}@1.0.0")}),
            false => json!({"ref": format!("#{of}@1.0.0"), "dependsOn": references(needs)}),
        };
        json!({
            "metadata": {"component": component(&described)},
            "components": components.iter().map(component).collect::<Vec<_>>(),
            "dependencies": edges.iter().map(edge).collect::<Vec<_>>(),
        })
    }

    fn packages(names: &[&str]) -> BTreeSet<Package> {
        names.iter().map(|name| (name.to_string(), "1.0.0".to_owned())).collect()
    }

    #[test]
    fn only_what_is_built_is_listed() {
        let edges: [(&str, &[&str]); 4] =
            [("us", &["b", "server"]), ("a", &[]), ("b", &["a", "server"]), ("server", &["a"])];
        let mut found = sbom("us", &["b", "a", "server"], &edges);
        keep(&mut found, &packages(&["us", "a", "b"])).unwrap();
        let edges: [(&str, &[&str]); 3] = [("us", &["b"]), ("a", &[]), ("b", &["a"])];
        assert_eq!(found, sbom("us", &["b", "a"], &edges));
        assert_eq!(keep(&mut found, &packages(&["us", "a", "c"])).unwrap_err(), "no component c 1.0.0");
        let other = BTreeSet::from([("a".to_owned(), "2.0.0".to_owned())]);
        assert_eq!(keep(&mut found, &other).unwrap_err(), "no component a 2.0.0");
    }

    #[test]
    fn a_wheel_lists_its_command() {
        let extension = sbom("wheel", &["shared", "pyo3"], &[("wheel", &["shared", "pyo3"]), ("shared", &["pyo3"])]);
        let command =
            sbom("command", &["shared", "clap"], &[("command", &["shared"]), ("shared", &["clap"]), ("clap", &[])]);
        let expected = sbom(
            "wheel",
            &["clap", "command", "pyo3", "shared"],
            &[
                ("clap", &[]),
                ("command", &["shared"]),
                ("shared", &["clap", "pyo3"]),
                ("wheel", &["command", "pyo3", "shared"]),
            ],
        );
        assert_eq!(merge(extension, &command).unwrap(), expected);
        assert!(merge(json!({}), &command).is_err());
    }

    #[test]
    fn lines_of_cargo_tree_name_packages() {
        for line in ["serde v1.0.0", "serde v1.0.0 (*)", "serde v1.0.0 (proc-macro)", "serde v1.0.0 (/work/serde)"] {
            assert_eq!(package_of(line).unwrap(), ("serde".to_owned(), "1.0.0".to_owned()));
        }
        assert!(package_of("").is_err() && package_of("[build-dependencies]").is_err());
    }

    /// The static build has no server, but macros and what build scripts need.
    #[test]
    fn builds_with_fewer_features_need_fewer_packages() {
        let of = |options: &[&str]| built(&root().join(COMMAND.manifest), COMMAND.package, options).unwrap();
        let all = of(&["--features", "full"]);
        let few = of(&["--no-default-features", "--features", crate::dist::MUSL_FEATURES]);
        assert!(few.is_subset(&all) && few.len() + 50 < all.len(), "{} of {}", few.len(), all.len());
        let has = |packages: &BTreeSet<Package>, name: &str| packages.iter().any(|(known, _)| known == name);
        for name in ["tokio", "axum", "tokenizers"] {
            assert!(has(&all, name) && !has(&few, name), "{name}");
        }
        assert!(has(&few, "serde_derive") && has(&few, "unweight-format"));
        let extension = built(&root().join(EXTENSION.manifest), EXTENSION.package, &[]).unwrap();
        assert!(has(&extension, "pyo3") && !has(&extension, "axum"));
    }
}
