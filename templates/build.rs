//! Lists the files of this package for `src/lib.rs`, so that a new header or template needs no list to be edited.
//!
//! Every file is embedded with `include_str!`, sorted by name: the same tree gives the same list on every machine.

use std::{
    env,
    fmt::Write as _,
    fs,
    io::{Error, Result},
    path::{Path, PathBuf},
};

/// (constant, directory, extension, documentation)
const LISTS: [(&str, &str, &str, &str); 2] = [
    ("HEADERS", "include", "cuh", "Headers by the path that `#include` names."),
    ("KERNELS", "kernels", "cu.tera", "Kernel templates by file name."),
];

fn main() -> Result<()> {
    let root =
        PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").ok_or_else(|| Error::other("CARGO_MANIFEST_DIR is not set"))?);
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or_else(|| Error::other("OUT_DIR is not set"))?);
    let mut text = String::new();
    for (constant, directory, extension, doc) in LISTS {
        println!("cargo:rerun-if-changed={directory}");
        let base = root.join(directory);
        let mut files = Vec::new();
        collect(&base, extension, &mut files)?;
        let mut named: Vec<(String, PathBuf)> = files.into_iter().map(|path| (name_of(&base, &path), path)).collect();
        named.sort();
        let _ = writeln!(text, "/// {doc}\nstatic {constant}: &[(&str, &str)] = &[");
        for (name, path) in named {
            let _ = writeln!(text, "    ({name:?}, include_str!({:?})),", path.display().to_string());
        }
        text.push_str("];\n");
    }
    fs::write(out.join("embedded.rs"), text)
}

/// Every file under `directory` that ends in `.extension`.
fn collect(directory: &Path, extension: &str, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            // A directory must be watched by itself: a file that is added to it does not change its parent.
            println!("cargo:rerun-if-changed={}", path.display());
            collect(&path, extension, files)?;
        } else if path.to_str().is_some_and(|name| name.ends_with(&format!(".{extension}"))) {
            files.push(path);
        }
    }
    Ok(())
}

/// The path below `base` with forward slashes on every system.
fn name_of(base: &Path, path: &Path) -> String {
    let below = path.strip_prefix(base).unwrap_or(path);
    below.components().map(|part| part.as_os_str().to_string_lossy()).collect::<Vec<_>>().join("/")
}
