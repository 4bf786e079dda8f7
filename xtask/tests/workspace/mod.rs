//! Reads the files of the workspace for tests.
#![allow(dead_code, reason = "each test uses only some of these")]

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

/// Returns the workspace root.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace")
}

pub fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns a path relative to the root, for messages.
pub fn shown(path: &Path) -> String {
    path.strip_prefix(root()).expect("below the root").display().to_string()
}

/// Returns the sorted files below directories of the root whose names end with one of `extensions`. Skips hidden
/// directories, `target`, and directories with one of the names `skipped`.
pub fn files(folders: &[&str], extensions: &[&str], skipped: &[&str]) -> Vec<PathBuf> {
    let (mut open, mut found): (Vec<PathBuf>, _) =
        (folders.iter().map(|folder| root().join(folder)).collect(), Vec::new());
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
            let path = entry.expect("an entry").path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if path.is_dir() {
                if !name.starts_with('.') && name != "target" && !skipped.contains(&&*name) {
                    open.push(path);
                }
            } else if path.extension().is_some_and(|found| extensions.iter().any(|extension| found == *extension)) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// Returns the manifests of published packages, by directory.
pub fn published() -> BTreeMap<String, String> {
    let manifest = |folder: &str| read(&root().join(folder).join("Cargo.toml"));
    let workspace = manifest(".");
    let members = workspace.split("\nmembers = [").nth(1).and_then(|rest| rest.split(']').next()).expect("members");
    let folders = members.split('"').skip(1).step_by(2).chain(["."]);
    let manifests = folders.map(|folder| (folder.to_owned(), manifest(folder)));
    manifests.filter(|(_, manifest)| !manifest.contains("\npublish = false")).collect()
}
