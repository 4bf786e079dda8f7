//! `unweight extract`.

use std::{
    fs::File,
    io::{self, Write},
    path::PathBuf,
};

use clap::Args;
use serde::Serialize;
use unweight::format::{Digest, bundle::Bundle};

use super::{
    failure::{Failure, Result},
    output::{self, Output},
};

/// Arguments of `extract`.
#[derive(Args)]
pub struct Extract {
    /// Directory of the bundle
    bundle: PathBuf,
    /// Name of the tensor
    #[arg(long, value_name = "NAME")]
    tensor: String,
    /// Which source file's, where several have a tensor of this name
    #[arg(long, value_name = "FILE")]
    file: Option<String>,
    /// File for its original bytes, little-endian and row-major; must not exist; - is stdout
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
}

#[derive(Serialize)]
struct Report<'a> {
    tensor: &'a str,
    dtype: String,
    shape: &'a [usize],
    bytes: u64,
    digest: Digest,
}

impl Extract {
    /// Runs it.
    pub fn run(&self, output: Output) -> Result<()> {
        let to_stdout = self.output.as_os_str() == "-";
        if to_stdout && output.json {
            return Err(Failure::new("stdout takes the tensor or JSON", "write the tensor to a file with -o FILE"));
        }
        let bundle = Bundle::open(&self.bundle)?;
        let entry = match &self.file {
            None => bundle.entry(&self.tensor)?,
            Some(file) => bundle.entry_in(file, &self.tensor)?,
        };
        let bytes = match &self.file {
            None => bundle.decode(&self.tensor)?,
            Some(file) => bundle.decode_in(file, &self.tensor)?,
        };
        if to_stdout {
            let mut out = io::stdout().lock();
            out.write_all(&bytes)?;
            return Ok(out.flush()?);
        }
        let write = || -> io::Result<()> {
            let mut file = File::create_new(&self.output)?;
            file.write_all(&bytes)?;
            file.sync_all()
        };
        write().map_err(Failure::io(self.output.display()))?;
        let report = Report {
            tensor: &entry.name,
            dtype: entry.dtype.to_string(),
            shape: &entry.shape,
            bytes: bytes.len() as u64,
            digest: entry.digest,
        };
        output.summary("extract", &report, |out| {
            let (size, shape) = (output::bytes(report.bytes), output::shape(report.shape));
            writeln!(out, "{}: {} {} {shape}, {size}", self.output.display(), report.tensor, report.dtype)
        })
    }
}
