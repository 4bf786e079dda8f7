//! `unweight extract`.

use std::{io::Write, path::PathBuf};

use clap::Args;
use clap_complete::engine::ArgValueCandidates;
use serde::Serialize;
use unweight::format::{
    Digest,
    bundle::{Bundle, BundleError, DecompressOptions, Progress},
};

use super::{
    archive,
    common::{Base, Ram, Threads},
    completions,
    failure::{Failure, Result},
    hub,
    output::{self, Console},
    progress::Bar,
    scratch,
};

/// Arguments of `extract`.
#[derive(Args)]
#[command(group = clap::ArgGroup::new("what").required(true).multiple(true).args(["tensor", "file"]))]
pub struct Extract {
    /// Bundle directory, or org/name on the Hugging Face Hub
    bundle: PathBuf,
    /// Tensor to extract
    #[arg(long, value_name = "NAME", conflicts_with_all = ["ram", "threads"],
          add = ArgValueCandidates::new(completions::tensors))]
    tensor: Option<String>,
    /// Source file to extract, or with --tensor the file that holds the tensor
    #[arg(long, value_name = "FILE", add = ArgValueCandidates::new(completions::files))]
    file: Option<String>,
    /// File to write; - is stdout. Tensors are little-endian, row-major
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    #[command(flatten)]
    base: Base,
    #[command(flatten)]
    ram: Ram,
    #[command(flatten)]
    threads: Threads,
}

#[derive(Serialize)]
struct TensorJson<'a> {
    /// Name of the tensor.
    tensor: &'a str,
    /// Data type, as in safetensors.
    dtype: String,
    /// Shape of the tensor.
    shape: &'a [usize],
    /// Bytes written.
    bytes: u64,
    /// Digest of the bytes.
    digest: Digest,
}

#[derive(Serialize)]
struct FileJson<'a> {
    /// Name of the file.
    file: &'a str,
    /// Bytes written.
    bytes: u64,
    /// XXH3-128 digest of the file, verified.
    digest: Digest,
    /// SHA-256 of the file, verified.
    sha256: Option<String>,
}

impl Extract {
    /// Runs the command.
    pub fn run(&self, console: Console) -> Result<()> {
        let to_stdout = archive::is_stream(&self.output);
        if to_stdout && console.json {
            return Err(Failure::new(
                "usage",
                "-o - cannot be combined with --json",
                "write the bytes to a file with -o FILE",
            ));
        }
        let bundle = Bundle::open_with_base(&hub::bundle(&self.bundle, console)?, self.base.dir.as_deref())?;
        match (&self.tensor, &self.file) {
            (Some(tensor), file) => self.tensor(&bundle, tensor, file.as_deref(), console),
            // clap requires one of both arguments.
            (None, file) => self.file(&bundle, file.as_deref().unwrap_or_default(), console),
        }
    }

    fn tensor(&self, bundle: &Bundle, tensor: &str, file: Option<&str>, console: Console) -> Result<()> {
        // From here on a signal stops the work between two pieces, and unfinished output is removed.
        let bar = Bar::new(console, "extracting")?;
        let tensor = match file {
            None => bundle.tensor(tensor)?,
            Some(file) => bundle.tensor_in(file, tensor)?,
        };
        let bytes = tensor.decode()?;
        bar.start(bytes.len() as u64);
        let write = |out: &mut (dyn Write + Send)| {
            for piece in bytes.chunks(4 << 20) {
                if bar.cancelled() {
                    return Err(BundleError::Cancelled.into());
                }
                out.write_all(piece).map_err(|error| match archive::is_stream(&self.output) {
                    true => error.into(),
                    false => Failure::io(self.output.display())(error),
                })?;
                bar.advance(piece.len() as u64);
            }
            Ok(())
        };
        let Some(()) = self.write(write)? else { return Ok(()) };
        bar.finish();
        let report = TensorJson {
            tensor: tensor.name(),
            dtype: tensor.dtype().to_string(),
            shape: tensor.shape(),
            bytes: bytes.len() as u64,
            digest: tensor.entry().digest,
        };
        console.summary("extract", &report, |out| {
            let (size, shape) = (output::bytes(report.bytes), output::shape(report.shape));
            writeln!(out, "{}: {} {} {shape}, {size}", self.output.display(), report.tensor, report.dtype)
        })
    }

    fn file(&self, bundle: &Bundle, name: &str, console: Console) -> Result<()> {
        let bar = Bar::new(console, "extracting")?;
        bar.start(bundle.manifest().files.iter().find(|file| file.name() == name).map_or(0, |file| file.size()));
        let options = DecompressOptions::default().ram_bytes(self.ram.bytes).threads(self.threads.count);
        let Some(file) = self.write(|out| Ok(bundle.write_file(name, out, &options, &bar)?))? else { return Ok(()) };
        bar.finish();
        let report = FileJson { file: name, bytes: file.bytes, digest: file.digest, sha256: file.sha256 };
        console.summary("extract", &report, |out| {
            writeln!(out, "{}: {}, {}, digest matches", self.output.display(), report.file, output::bytes(report.bytes))
        })
    }

    /// Writes to stdout and returns `None`, or to a new file that gets its name when it is complete.
    fn write<T>(&self, bytes: impl FnOnce(&mut (dyn Write + Send)) -> Result<T>) -> Result<Option<T>> {
        if archive::is_stream(&self.output) {
            bytes(&mut archive::stdout()?).map_err(Failure::of_stream)?;
            return Ok(None);
        }
        let failed = || Failure::io(self.output.display());
        if self.output.symlink_metadata().is_ok() {
            let message = format!("{}: already exists", self.output.display());
            return Err(Failure::new("output-exists", message, "choose another name"));
        }
        let folder = scratch::folder_of(&self.output);
        if !folder.is_dir() {
            let message = format!("{}: no such directory", folder.display());
            return Err(Failure::new("path-not-found", message, "create it, or choose another directory"));
        }
        let mut file = scratch::unfinished(&self.output).map_err(failed())?;
        let done = bytes(file.as_file_mut())?;
        file.as_file().sync_all().map_err(failed())?;
        file.persist_noclobber(&self.output).map_err(|error| failed()(error.error))?;
        Ok(Some(done))
    }
}
