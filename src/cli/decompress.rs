//! `unweight decompress`.

use std::path::PathBuf;

use clap::Args;
use unweight::format::bundle::{self, DecompressOptions};

use super::{
    failure::Result,
    output::{self, Output, Table},
    progress::Bar,
    select, size,
};

/// Arguments of `decompress`.
#[derive(Args)]
pub struct Decompress {
    /// Directory of the bundle
    bundle: PathBuf,
    /// Directory for the original files; must not exist, unless --force
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    /// Memory for tensors in work, such as 4G [default: 1G]; a larger tensor is worked on alone
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    ram: Option<u64>,
    /// Threads [default: all processors]
    #[arg(long, value_name = "N", value_parser = select::threads)]
    threads: Option<usize>,
    /// Go on after an interrupted run
    #[arg(long)]
    resume: bool,
    /// Replace an existing output, once the new one is complete
    #[arg(long)]
    force: bool,
}

impl Decompress {
    /// Runs it.
    pub fn run(&self, output: Output) -> Result<()> {
        let options = DecompressOptions::default()
            .threads(self.threads)
            .ram_bytes(self.ram)
            .resume(self.resume)
            .force(self.force);
        let bar = Bar::new(output, "decompressing")?;
        let report = bundle::decompress(&self.bundle, &self.output, &options, &bar)?;
        bar.finish();
        output.summary("decompress", &report, |out| {
            let mut table = Table::new(&["file", ">bytes", "digest"]);
            for file in &report.files {
                let digest =
                    file.sha256.as_ref().map_or_else(|| file.digest.to_string(), |sha| format!("sha256:{sha}"));
                let resumed = if file.resumed { " (reused)" } else { "" };
                table.row([file.name.clone(), file.bytes.to_string(), format!("{digest}{resumed}")]);
            }
            table.write(out)?;
            writeln!(
                out,
                "{}: {} files, {}, every digest right, {} ({})",
                self.output.display(),
                report.files.len(),
                output::bytes(report.bytes),
                output::seconds(report.seconds),
                output::rate(report.bytes, report.seconds),
            )
        })
    }
}
