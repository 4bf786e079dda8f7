//! Locates a model: a directory, files, a glob, a name on the Hugging Face Hub, or an archive on stdin.

use std::{
    env, fs,
    path::{Path, PathBuf},
};
#[cfg(not(feature = "dfloat11"))]
use std::{fs::File, io::Read};

use clap::Args;
use unweight::format::bundle::{Bundle, BundleError, Selection};
#[cfg(feature = "dfloat11")]
use unweight::rivals::dfloat11::{self, ConvertError};

use super::{
    archive,
    failure::{Failure, Result},
    hub::{self, Wanted},
    output::Console,
    progress::Bar,
    scratch::Scratch,
};

/// The source argument of a command.
#[derive(Args)]
pub struct Source {
    /// Model directory, .safetensors files, quoted glob, Hugging Face model (org/name or org/name@revision), or - for
    /// a tar archive on stdin
    #[arg(required = true, value_name = "SOURCE")]
    source: Vec<PathBuf>,
}

/// A located model.
pub struct LocatedModel {
    /// The directory that names are relative to.
    pub root: PathBuf,
    /// The selected files in `root`; `None` selects all.
    only: Option<Vec<String>>,
    /// The directory that an archive was unpacked to.
    _scratch: Option<Scratch>,
}

impl LocatedModel {
    /// Restricts a selection to the files that were named.
    pub fn select(&self, selection: Selection) -> Selection {
        selection.only(self.only.clone())
    }
}

/// Prefix of directories that archives are unpacked to.
pub const SCRATCH_PREFIX: &str = ".unweight-scratch-";

impl Source {
    /// Returns the source arguments, quoted for a shell.
    #[cfg(feature = "gpu")]
    pub fn quoted(&self) -> String {
        self.source.iter().map(|source| quoted(source)).collect::<Vec<_>>().join(" ")
    }

    /// Locates the model. An archive is unpacked next to `destination`, which needs the space, or to the temporary
    /// directory.
    pub fn find(&self, destination: Option<&Path>, console: Console) -> Result<LocatedModel> {
        let found = if !self.source.iter().any(|source| archive::is_stream(source)) {
            find(&self.source, console)?
        } else if self.source.len() > 1 {
            return Err(Failure::new("usage", "- (stdin) cannot be combined with other sources", "give - alone"));
        } else {
            let (scratch, root) = unpacked(destination, console)?;
            LocatedModel { root, only: None, _scratch: Some(scratch) }
        };
        if let Ok(bundle) = Bundle::open_without_base(&found.root) {
            drop(bundle);
            return Err(Failure::new(
                "source-is-bundle",
                format!("{}: a bundle, not a model", found.root.display()),
                "restore the model first: unweight decompress BUNDLE -o DIR",
            ));
        }
        if found.only.is_some() { Ok(found) } else { as_bf16(found, destination, console) }
    }
}

/// Quotes a path for a shell.
#[cfg(feature = "gpu")]
pub fn quoted(path: &Path) -> String {
    let path = path.to_string_lossy();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-./@:,+=".contains(c);
    if !path.is_empty() && path.chars().all(is_plain) {
        path.into()
    } else {
        format!("'{}'", path.replace('\'', r"'\''"))
    }
}

/// Decodes a DFloat11 directory; returns any other source unchanged.
fn as_bf16(found: LocatedModel, destination: Option<&Path>, console: Console) -> Result<LocatedModel> {
    if is_dfloat11(&found.root)? { decoded(&found, destination, console) } else { Ok(found) }
}

/// Rejects a DFloat11 directory as the source that a bundle is compared with.
pub fn refuse_dfloat11(found: &LocatedModel) -> Result<()> {
    if is_dfloat11(&found.root)? {
        let what = format!("{}: --against takes no DFloat11 directory", found.root.display());
        return Err(Failure::new("usage", what, "compare with the BF16 model that it was made from"));
    }
    Ok(())
}

#[cfg(feature = "dfloat11")]
fn is_dfloat11(root: &Path) -> Result<bool> {
    Ok(dfloat11::is_model(root)?)
}

#[cfg(not(feature = "dfloat11"))]
fn is_dfloat11(root: &Path) -> Result<bool> {
    const BYTES_MAX: u64 = 16 << 20;
    let mut text = Vec::new();
    // The command itself reports a file that cannot be read.
    let read = File::open(root.join("config.json")).and_then(|file| file.take(BYTES_MAX).read_to_end(&mut text));
    let config = read.ok().and_then(|_| serde_json::from_slice::<serde_json::Value>(&text).ok());
    Ok(config.is_some_and(|config| config.get("dfloat11_config").is_some()))
}

/// Rejects a DFloat11 directory, whose weights would be read as plain bytes.
#[cfg(not(feature = "dfloat11"))]
fn decoded(_: &LocatedModel, _: Option<&Path>, _: Console) -> Result<LocatedModel> {
    Err(super::absent::option("a DFloat11 directory as the source", "dfloat11"))
}

/// Decodes a DFloat11 directory to a BF16 model, in a directory next to `destination` or in the temporary one.
#[cfg(feature = "dfloat11")]
fn decoded(found: &LocatedModel, destination: Option<&Path>, console: Console) -> Result<LocatedModel> {
    let home = scratch_home(destination)?;
    let scratch = Scratch::new(&home, SCRATCH_PREFIX).map_err(Failure::io(home.display()))?;
    let root = scratch.path().join("bf16");
    let bar = Bar::new(console, "decoding DFloat11")?;
    let report = dfloat11::restore(&found.root, &root, false, &bar).map_err(|error| match error {
        // Finished files are removed with the scratch directory.
        ConvertError::Bundle(BundleError::Interrupted { .. }) => BundleError::Cancelled.into(),
        other => Failure::from(other),
    })?;
    bar.finish();
    console.note(format_args!(
        "a DFloat11 model: {} of {}, decoded to {} of BF16 first",
        super::output::count(report.weights, "weight"),
        super::output::count(report.units, "unit"),
        super::output::bytes(report.bytes)
    ));
    Ok(LocatedModel { root, only: None, _scratch: Some(scratch) })
}

/// Unpacks the archive on stdin to a directory next to `destination` or in the temporary one.
pub fn unpacked(destination: Option<&Path>, console: Console) -> Result<(Scratch, PathBuf)> {
    let home = scratch_home(destination)?;
    let scratch = Scratch::new(&home, SCRATCH_PREFIX).map_err(Failure::io(home.display()))?;
    // The bar handles signals only; the size of the input is unknown.
    let bar = Bar::new(console, "reading stdin")?;
    let root = archive::unpack_stdin(&scratch.path().join("in"), &bar)?;
    Ok((scratch, root))
}

fn scratch_home(destination: Option<&Path>) -> Result<PathBuf> {
    let Some(destination) = destination else { return Ok(env::temp_dir()) };
    let absolute = std::path::absolute(destination).map_err(Failure::io(destination.display()))?;
    let home = absolute.parent().unwrap_or(&absolute).to_path_buf();
    fs::create_dir_all(&home).map_err(Failure::io(home.display()))?;
    Ok(home)
}

/// Locates a model by the names on the command line.
pub fn find(names: &[PathBuf], console: Console) -> Result<LocatedModel> {
    let mut paths = Vec::new();
    for name in names {
        if name.exists() {
            paths.push(name.clone());
        } else if let Some(found) = expand(name)? {
            paths.extend(found);
        } else {
            paths.push(hub::locate(name, Wanted::Model, console)?);
        }
    }
    if let [only] = &paths[..]
        && only.is_dir()
    {
        return Ok(LocatedModel { root: only.clone(), only: None, _scratch: None });
    }
    if let Some(folder) = paths.iter().find(|path| path.is_dir()) {
        let message = format!("{}: a directory among several sources", folder.display());
        return Err(Failure::new("usage", message, "give one directory alone, or files"));
    }
    if !paths.iter().any(|path| path.extension().is_some_and(|extension| extension == "safetensors")) {
        let shown: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
        let message = format!("{}: no .safetensors file", shown.join(", "));
        return Err(Failure::new(
            "no-weights",
            message,
            "pass a model with .safetensors files (convert .bin or .gguf weights first)",
        ));
    }
    let absolute = |path: &PathBuf| std::path::absolute(path).map_err(Failure::io(path.display()));
    let paths = paths.iter().map(absolute).collect::<Result<Vec<_>>>()?;
    let root = common_folder(&paths);
    let relative = |path: &PathBuf| {
        let name = path.strip_prefix(&root).ok().and_then(Path::to_str).map(str::to_owned);
        name.ok_or_else(|| BundleError::Unstorable { path: path.clone(), reason: "its name is not UTF-8" }.into())
    };
    let only = paths.iter().map(relative).collect::<Result<Vec<_>>>()?;
    Ok(LocatedModel { root, only: Some(only), _scratch: None })
}

/// Returns the deepest directory that contains all files.
fn common_folder(paths: &[PathBuf]) -> PathBuf {
    let folder = |path: &PathBuf| path.parent().unwrap_or(path).to_path_buf();
    let mut common = paths.first().map(folder).unwrap_or_default();
    while !paths.iter().all(|path| path.starts_with(&common)) {
        common = folder(&common);
    }
    common
}

/// Expands a glob; `None` if the name is not one.
fn expand(name: &Path) -> Result<Option<Vec<PathBuf>>> {
    let Some(pattern) = name.to_str().filter(|text| text.contains(['*', '?', '['])) else { return Ok(None) };
    let found = glob::glob(pattern).map_err(|error| {
        Failure::new(
            "pattern-invalid",
            format!("{pattern}: not a pattern: {error}"),
            "*, ? and [abc] are wildcards; ** matches any number of directories",
        )
    })?;
    let found = found.collect::<std::result::Result<Vec<_>, _>>().map_err(Failure::other)?;
    if found.is_empty() {
        return Err(Failure::new(
            "pattern-without-match",
            format!("{pattern}: no file matches"),
            "check the names with ls, and quote the pattern",
        ));
    }
    Ok(Some(found))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_folder_of_sources() {
        let common = |paths: &[&str]| common_folder(&paths.iter().map(PathBuf::from).collect::<Vec<_>>());
        assert_eq!(common(&["/m/a.safetensors"]), Path::new("/m"));
        assert_eq!(common(&["/m/a", "/m/sub/b"]), Path::new("/m"));
        assert_eq!(common(&["/m/sub/b", "/mn/a"]), Path::new("/"));
    }
}
