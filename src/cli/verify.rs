//! `unweight verify`.

use std::path::PathBuf;

use clap::Args;
use unweight::format::bundle::{self, ATTACHED_NAME, Problem, Selection, VerifyOptions, manifest::SIGNATURE_NAME};

use super::{
    archive,
    common::{Base, Ram, Threads},
    failure::{Failure, Result},
    hub,
    output::{self, Console},
    printable::one_line,
    progress::Bar,
    sign, source,
};

/// Arguments of `verify`.
#[derive(Args)]
pub struct Verify {
    /// Bundle directory, or org/name on the Hugging Face Hub
    bundle: PathBuf,
    /// Also compare with the source: a directory, file, quoted glob or Hugging Face model
    #[arg(long, value_name = "SOURCE")]
    against: Option<PathBuf>,
    /// Also check the signature with this minisign public key or key file
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// Names that `compress --skip` left out; repeatable
    #[arg(long, value_name = "GLOB", requires = "against")]
    skip: Vec<String>,
    /// Check only the manifest and names, sizes and headers of files, not the weights
    #[arg(long)]
    quick: bool,
    #[command(flatten)]
    base: Base,
    #[command(flatten)]
    ram: Ram,
    #[command(flatten)]
    threads: Threads,
}

impl Verify {
    /// Runs the command.
    pub fn run(&self, console: Console) -> Result<()> {
        if self.against.as_deref().is_some_and(archive::is_stream) {
            return Err(Failure::new("usage", "--against takes no archive", "unpack it, and give the directory"));
        }
        let dir = hub::bundle(&self.bundle, console)?;
        let against =
            self.against.as_ref().map(|source| source::find(std::slice::from_ref(source), console)).transpose()?;
        against.as_ref().map_or(Ok(()), source::refuse_dfloat11)?;
        let selection = Selection::default().skip(self.skip.clone());
        let bar = Bar::new(console, "verifying")?;
        let options = VerifyOptions::default()
            .selection(against.as_ref().map_or(selection.clone(), |found| found.select(selection)))
            .against(against.as_ref().map(|found| found.root.clone()))
            .quick(self.quick)
            .key(self.key.as_deref().map(sign::public_key).transpose()?)
            .base(self.base.dir.clone())
            .ram_bytes(self.ram.bytes)
            .threads(self.threads.count);
        let report = bundle::verify_with(&dir, &options, &bar)?;
        bar.finish();
        let only_source = report.problems.iter().all(|problem| problem.in_source);
        console.summary("verify", &report, |out| {
            for problem in &report.problems {
                writeln!(out, "{}", one_line(&problem.message))?;
            }
            writeln!(
                out,
                "{}: {}, {}, {} in {} ({}): {}",
                self.bundle.display(),
                output::count(report.files, "file"),
                output::count(report.tensors, "tensor"),
                output::bytes(report.stored_bytes),
                output::seconds(report.seconds),
                output::rate(report.original_bytes, report.seconds),
                match report.problems.len() {
                    0 if report.signature.is_some() && !report.quick => "sound, and signed with this key".to_owned(),
                    0 if report.quick => "names, sizes and headers match; weights were not read".to_owned(),
                    0 => "sound".to_owned(),
                    problems if only_source => {
                        format!("sound; the source differs: {}", output::count(problems, "problem"))
                    }
                    problems => output::count(problems, "problem"),
                },
            )
        })?;
        match report.problems.len() {
            0 => Ok(()),
            problems if only_source => Err(Failure::mismatch(
                "source-differs",
                format!(
                    "{}: sound, but its source differs: {}",
                    self.bundle.display(),
                    output::count(problems, "problem")
                ),
                "give --against the model that the bundle was made from; --skip leaves out other files",
            )
            .reported()),
            problems => {
                let message = format!("{}: {}", self.bundle.display(), output::count(problems, "problem"));
                let help = next_step(&report.problems, self.quick);
                let failure = if is_unsigned(&report.problems) {
                    Failure::mismatch("signature-invalid", message, help)
                } else {
                    Failure::mismatch("bundle-damaged", message, help)
                };
                Err(failure.reported())
            }
        }
    }
}

/// Returns whether nothing but the signature is wrong.
fn is_unsigned(problems: &[Problem]) -> bool {
    problems.iter().all(|problem| problem.file == SIGNATURE_NAME)
}

/// Returns the next step for the problems of a bundle.
fn next_step(problems: &[Problem], is_quick: bool) -> &'static str {
    let all = |of: fn(&Problem) -> bool| problems.iter().filter(|problem| !problem.in_source).all(of);
    if is_quick && all(|problem| problem.is_extra) {
        "move the extra files named above, or finish the run that left them; `unweight verify` without --quick checks the \
         weights"
    } else if all(|problem| problem.is_extra) {
        "the files of the bundle are undamaged: move the extra files named above, or finish the run that left them"
    } else if all(|problem| problem.is_extra || problem.file == ATTACHED_NAME) {
        "the files of the bundle are undamaged: `unweight kernels detach` removes the attached kernels"
    } else if all(|problem| problem.is_extra || problem.file == SIGNATURE_NAME) {
        "the bytes are undamaged, but their publisher is not proven: check --key, or fetch unweight.json and \
         unweight.json.minisig again"
    } else {
        "fetch the files named above again, or make the bundle again from its source"
    }
}
