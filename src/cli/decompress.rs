//! `unweight decompress`.

use std::path::PathBuf;

use clap::Args;
use unweight::format::{
    bundle::{self, DecompressOptions, ErrorClass},
    raw::discard_partial,
};

use super::{
    archive,
    common::{Base, Force, Ram, Resume, Threads},
    failure::{Failure, Result},
    hub,
    output::{self, Console, Table},
    progress::Bar,
    source,
};

/// Arguments of `decompress`.
#[derive(Args)]
pub struct Decompress {
    /// Bundle directory, or org/name on the Hugging Face Hub; - reads a tar archive from stdin
    bundle: PathBuf,
    /// Directory for the original files; - writes a tar archive to stdout
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    #[command(flatten)]
    base: Base,
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
    pub fn run(&self, console: Console) -> Result<()> {
        let to_stdout = archive::is_stream(&self.output);
        if to_stdout && (console.json || self.resume.is_set || self.force.is_set) {
            return Err(Failure::new(
                "usage",
                "-o - cannot be combined with --json, --resume or --force",
                "with -o -, the files go to stdout; use -o DIR with these options",
            ));
        }
        // Checked before an archive of several GiB is read.
        if !self.force.is_set && self.output.symlink_metadata().is_ok() {
            let complete = "`unweight verify BUNDLE --against DIR` checks it; --force makes it again";
            return Err(Failure::output_exists(&self.output, self.resume.is_set, complete));
        }
        let mut stdout = to_stdout.then(archive::stdout).transpose()?;
        let unpacked = archive::is_stream(&self.bundle)
            .then(|| source::unpacked((!to_stdout).then_some(&self.output), console))
            .transpose()?;
        let bundle = match &unpacked {
            Some((_, root)) => root,
            None => &hub::bundle(&self.bundle, console)?,
        };
        let options = DecompressOptions::default()
            .threads(self.threads.count)
            .ram_bytes(self.ram.bytes)
            .resume(self.resume.is_set)
            .force(self.force.is_set)
            .base(self.base.dir.clone());
        let bar = Bar::new(console, "decompressing")?;
        if let Some(stdout) = &mut stdout {
            let (files, bytes) = archive::pack_originals(bundle, stdout, &options, &bar).map_err(Failure::of_stream)?;
            bar.finish();
            console.note(format_args!("{}, {}, all digests match", output::count(files, "file"), output::bytes(bytes)));
            return Ok(());
        }
        let report = bundle::decompress(bundle, &self.output, &options, &bar).inspect_err(|error| {
            // A damaged archive cannot be resumed. If the partial output cannot be removed, the next run replaces it.
            if unpacked.is_some() && !self.resume.is_set && error.class() == ErrorClass::Mismatch {
                let _ = discard_partial(&self.output);
            }
        })?;
        bar.finish();
        console.summary("decompress", &report, |out| {
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
                "{}: {}, {}, all digests match, {} ({})",
                self.output.display(),
                output::count(report.files.len(), "file"),
                output::bytes(report.bytes),
                output::seconds(report.seconds),
                output::rate(report.bytes, report.seconds),
            )
        })
    }
}
