//! `unweight merge`.

use std::path::PathBuf;

use clap::Args;
use unweight::format::bundle::{self, MergeOptions, VerifyAfter};

use super::{
    common::{Force, Ram, Threads},
    compress::verify_after,
    failure::Result,
    output::{self, Console},
    progress::Bar,
    report, sign,
};

/// Arguments of `merge`.
#[derive(Args)]
pub struct Merge {
    /// Directories of all parts that `compress --part` wrote
    #[arg(required = true)]
    parts: Vec<PathBuf>,
    /// Bundle directory to write
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    #[command(flatten)]
    ram: Ram,
    #[command(flatten)]
    threads: Threads,
    #[command(flatten)]
    force: Force,
    /// Tensors to decode and compare before the bundle is complete: none, sample or full
    #[arg(long, value_name = "HOW", default_value = "full", value_parser = verify_after)]
    verify: VerifyAfter,
    /// Sign with this minisign secret key; needs parts made with --sha256
    #[arg(long, value_name = "KEY")]
    sign: Option<PathBuf>,
    /// File with the password of the key
    #[arg(long, value_name = "FILE", requires = "sign")]
    password_file: Option<PathBuf>,
}

impl Merge {
    /// Runs the command.
    pub fn run(&self, console: Console) -> Result<()> {
        let signer = self.sign.as_deref().map(|key| sign::signer(key, self.password_file.as_deref())).transpose()?;
        let options = MergeOptions::default()
            .threads(self.threads.count)
            .ram_bytes(self.ram.bytes)
            .force(self.force.is_set)
            .verify(self.verify)
            .sign(signer);
        let bar = Bar::new(console, "merging")?;
        let report = bundle::merge(&self.parts, &self.output, &options, &bar)?;
        bar.finish();
        console.summary("merge", &report, |out| {
            report::totals(&report.encodings, report.original_bytes, report.stored_bytes).write(out)?;
            writeln!(
                out,
                "{}: {} of {}, {} ({}), {} checked again",
                self.output.display(),
                output::count(report.files, "file"),
                output::count(self.parts.len(), "part"),
                output::seconds(report.seconds),
                output::rate(report.original_bytes, report.seconds),
                output::count(report.verified_tensors, "tensor"),
            )
        })
    }
}
