//! `unweight decompress`.

use std::path::PathBuf;

use clap::Args;
use unweight::format::{
    bundle::{self, BundleError, DecompressOptions, ErrorClass},
    raw::discard_partial,
};

use super::{
    archive,
    common::{Force, Ram, Resume, Threads},
    failure::{Failure, Result},
    output::{self, Output, Table},
    progress::Bar,
    source,
};

/// Arguments of `decompress`.
#[derive(Args)]
pub struct Decompress {
    /// Bundle directory; - reads a tar archive from stdin
    bundle: PathBuf,
    /// Directory for the original files; - writes a tar archive to stdout
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    #[command(flatten)]
    ram: Ram,
    #[command(flatten)]
    threads: Threads,
    #[command(flatten)]
    resume: Resume,
    #[command(flatten)]
    force: Force,
}

impl Decompress {
    /// Runs the command.
    pub fn run(&self, output: Output) -> Result<()> {
        let to_stdout = archive::is_stream(&self.output);
        if to_stdout && (output.json || self.resume.resume || self.force.force) {
            return Err(Failure::new(
                "usage",
                "-o - cannot be combined with --json, --resume or --force",
                "with -o -, the files go to stdout; use -o DIR with these options",
            ));
        }
        // Checked before an archive of several GiB is read.
        if !self.force.force && self.output.symlink_metadata().is_ok() {
            return Err(BundleError::OutputExists { path: self.output.clone() }.into());
        }
        let mut stdout = to_stdout.then(archive::stdout).transpose()?;
        let unpacked = archive::is_stream(&self.bundle)
            .then(|| source::unpacked((!to_stdout).then_some(&self.output), output))
            .transpose()?;
        let bundle = unpacked.as_ref().map_or(&self.bundle, |(_, root)| root);
        let options = DecompressOptions::default()
            .threads(self.threads.threads)
            .ram_bytes(self.ram.ram)
            .resume(self.resume.resume)
            .force(self.force.force);
        let bar = Bar::new(output, "decompressing")?;
        if let Some(stdout) = &mut stdout {
            let (files, bytes) = archive::pack_originals(bundle, stdout, &options, &bar).map_err(Failure::of_stream)?;
            bar.finish();
            output.note(format_args!("{files} files, {}, all digests match", output::bytes(bytes)));
            return Ok(());
        }
        let report = bundle::decompress(bundle, &self.output, &options, &bar).inspect_err(|error| {
            // A damaged archive cannot be resumed. If the partial output cannot be removed, the next run replaces it.
            if unpacked.is_some() && !self.resume.resume && error.class() == ErrorClass::Mismatch {
                let _ = discard_partial(&self.output);
            }
        })?;
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
                "{}: {} files, {}, all digests match, {} ({})",
                self.output.display(),
                report.files.len(),
                output::bytes(report.bytes),
                output::seconds(report.seconds),
                output::rate(report.bytes, report.seconds),
            )
        })
    }
}
