//! `unweight verify`.

use std::path::PathBuf;

use clap::Args;
use unweight::format::bundle;

use super::{
    failure::{Failure, Result},
    output::{self, Output},
    progress::Bar,
};

/// Arguments of `verify`.
#[derive(Args)]
pub struct Verify {
    /// Directory of the bundle
    bundle: PathBuf,
    /// Also compare with the files that the bundle was made from
    #[arg(long, value_name = "DIR")]
    against: Option<PathBuf>,
}

impl Verify {
    /// Runs it.
    pub fn run(&self, output: Output) -> Result<()> {
        let bar = Bar::new(output, "verifying")?;
        let report = bundle::verify(&self.bundle, self.against.as_deref(), &bar)?;
        bar.finish();
        output.summary("verify", &report, |out| {
            for problem in &report.problems {
                writeln!(out, "{}", problem.message)?;
            }
            writeln!(
                out,
                "{}: {} files, {} tensors, {} in {} ({}): {}",
                self.bundle.display(),
                report.files,
                report.tensors,
                output::bytes(report.stored_bytes),
                output::seconds(report.seconds),
                output::rate(report.original_bytes, report.seconds),
                if report.is_ok() { "sound".to_owned() } else { count(report.problems.len()) },
            )
        })?;
        match report.problems.len() {
            0 => Ok(()),
            problems => Err(Failure::mismatch(
                format!("{}: {}", self.bundle.display(), count(problems)),
                "fetch the files named above again, or make the bundle again from its source",
            )
            .reported()),
        }
    }
}

fn count(problems: usize) -> String {
    if problems == 1 { "1 problem".to_owned() } else { format!("{problems} problems") }
}
