//! Reads the files of the workspace for tests.
#![allow(dead_code, reason = "each test uses only some of these")]

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
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

/// Returns the text files of the repository, new ones included, with their texts. Skips records, snapshots and lock
/// files, which are written by programs, and what is not UTF-8.
pub fn texts() -> Vec<(PathBuf, String)> {
    let arguments = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"];
    let output = Command::new("git").current_dir(root()).args(arguments).output().expect("git runs");
    assert!(output.status.success(), "git ls-files: {}", String::from_utf8_lossy(&output.stderr));
    let names = String::from_utf8(output.stdout).expect("paths are UTF-8");
    let written = ["docs/records/", "tests/snapshots/", "unweight-format/fuzz/seeds/"];
    let is_read =
        |name: &&str| !name.is_empty() && !name.ends_with(".lock") && !written.iter().any(|w| name.starts_with(w));
    let texts = names.split('\0').filter(is_read).filter_map(|name| {
        let path = root().join(name);
        // git also lists what was deleted since the last commit.
        let text = String::from_utf8(fs::read(&path).ok()?).ok()?;
        Some((path, text))
    });
    texts.collect()
}

/// Returns what begins a comment in a file, if the file is code.
pub fn comment_mark(shown: &str, text: &str) -> Option<&'static str> {
    let name = shown.rsplit('/').next().unwrap_or(shown);
    match name.rsplit_once('.').map_or("", |(_, extension)| extension) {
        "rs" | "cu" | "cuh" | "hpp" | "cpp" | "tera" => Some("//"),
        "py" | "pyi" | "sh" | "toml" | "gitignore" | "clang-format" => Some("#"),
        "" if text.starts_with("#!") || name == "Containerfile" || shown.starts_with(".ci/") => Some("#"),
        _ => None,
    }
}

/// Returns a line of code before a comment, and the comment. A `#` within a word, as in `$#`, begins none.
pub fn split_comment<'a>(line: &'a str, mark: &str) -> (&'a str, &'a str) {
    let begins = |at: &usize| mark != "#" || line[..*at].chars().last().is_none_or(char::is_whitespace);
    let start = line.match_indices(mark).map(|(at, _)| at).find(begins);
    start.map_or((line, ""), |at| (&line[..at], &line[at + mark.len()..]))
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
