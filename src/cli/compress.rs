//! `unweight compress`.

use std::{env, path::PathBuf};

use clap::{Args, ValueEnum};
use unweight::format::bundle::{self, BundleError, CompressOptions, CpuEncoder, Encoder, Part, VerifyAfter};
#[cfg(feature = "gpu")]
use unweight::rt::{
    KernelSet,
    env::Env,
    raw::{device, ops::bundle_encoder::BundleEncoder},
};

use super::{
    archive,
    common::{Force, Ram, Resume},
    failure::{Failure, Result},
    output::{self, Console, Note},
    progress::Bar,
    report,
    scratch::Scratch,
    select::Select,
    sign,
    source::{self, Source},
};

/// Arguments of `compress`.
#[derive(Args)]
pub struct Compress {
    #[command(flatten)]
    source: Source,
    /// Bundle directory to write; - writes a tar archive to stdout
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    #[command(flatten)]
    select: Select,
    #[command(flatten)]
    ram: Ram,
    #[command(flatten)]
    resume: Resume,
    #[command(flatten)]
    force: Force,
    /// Tensors to decode and compare before the bundle is complete: none, sample or full
    #[arg(long, value_name = "HOW", default_value = "full", value_parser = verify_after)]
    verify: VerifyAfter,
    /// Record the SHA-256 of every source file
    #[arg(long)]
    sha256: bool,
    /// Sign with this minisign secret key; implies --sha256
    #[arg(long, value_name = "KEY")]
    sign: Option<PathBuf>,
    /// File with the password of the key
    #[arg(long, value_name = "FILE", requires = "sign")]
    password_file: Option<PathBuf>,
    /// Compress part I of N; `merge` joins the parts
    #[arg(long, value_name = "I/N", conflicts_with = "sign")]
    part: Option<Part>,
    /// Store differences from this model or bundle where they are smaller
    #[arg(long, value_name = "DIR", conflicts_with = "part")]
    base: Option<PathBuf>,
    /// Processor that encodes; does not change the bundle
    #[arg(long, value_enum, default_value_t = Device::Cpu)]
    device: Device,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Device {
    Cpu,
    /// The first GPU
    Cuda,
}

impl Device {
    fn encoder(self, options: &CompressOptions) -> Result<Box<dyn Encoder>> {
        match self {
            Self::Cpu => Ok(Box::new(CpuEncoder)),
            Self::Cuda => gpu_encoder(options),
        }
    }
}

#[cfg(feature = "gpu")]
fn gpu_encoder(options: &CompressOptions) -> Result<Box<dyn Encoder>> {
    let env = Env::process().map_err(|error| Failure::other(error.clone()))?;
    let device = device::Device::open(0)?;
    let kernels = KernelSet::open(&device, env);
    Ok(Box::new(BundleEncoder::new(&kernels, options.code_limit)?))
}

#[cfg(not(feature = "gpu"))]
fn gpu_encoder(_: &CompressOptions) -> Result<Box<dyn Encoder>> {
    Err(super::absent::option("--device cuda", "gpu"))
}

impl Compress {
    fn output_exists(&self) -> Failure {
        let complete = match self.part {
            None => "`unweight verify` checks it; --force makes it again",
            Some(_) => "merge it with the other parts",
        };
        Failure::output_exists(&self.output, self.resume.is_set, complete)
    }

    /// Runs the command.
    pub fn run(&self, console: Console) -> Result<()> {
        let to_stdout = archive::is_stream(&self.output);
        if to_stdout && (console.json || self.resume.is_set || self.force.is_set || self.part.is_some()) {
            return Err(Failure::new(
                "usage",
                "-o - cannot be combined with --json, --resume, --force or --part",
                "with -o -, the bundle goes to stdout; use -o DIR with these options",
            ));
        }
        let signer = self.sign.as_deref().map(|key| sign::signer(key, self.password_file.as_deref())).transpose()?;
        // Checked before an archive of several GiB is read.
        if !self.force.is_set && self.output.symlink_metadata().is_ok() {
            return Err(self.output_exists());
        }
        // Fails before any work if stdout cannot receive the bundle.
        let mut stdout = to_stdout.then(archive::stdout).transpose()?;
        let scratch_near = (!to_stdout).then_some(self.output.as_path());
        let model = self.source.find(scratch_near, console)?;
        let scratch = to_stdout.then(|| Scratch::new(&env::temp_dir(), source::SCRATCH_PREFIX)).transpose();
        let scratch = scratch.map_err(Failure::io(env::temp_dir().display()))?;
        let bundle = scratch.as_ref().map_or_else(|| self.output.clone(), |scratch| scratch.path().join("bundle"));
        let options = self
            .select
            .options_for(&model)
            .ram_bytes(self.ram.bytes)
            .resume(self.resume.is_set)
            .force(self.force.is_set)
            .verify(self.verify)
            .sha256(self.sha256)
            .sign(signer)
            .part(self.part)
            .base(self.base.clone());
        let encoder = self.device.encoder(&options)?;
        let bar = Bar::new(console, "compressing")?;
        let compressed = bundle::compress_with(&model.root, &bundle, &options, encoder.as_ref(), &bar);
        let report = compressed.map_err(|error: BundleError| -> Failure {
            match error {
                // Finished files are removed with the scratch directory.
                BundleError::Interrupted { .. } if to_stdout => BundleError::Cancelled.into(),
                error @ (BundleError::NoRoom { .. } | BundleError::DiskFull { .. }) if to_stdout => {
                    let help = "the bundle is first written to the temporary directory: free some space, or set TMPDIR";
                    Failure::from(error).with_help(help)
                }
                other => other.into(),
            }
        })?;
        bar.finish();
        if !report.resumed_files.is_empty() {
            console.note(format_args!("reused from the interrupted run: {}", report.resumed_files.join(", ")));
        }
        if report.resumed_tensors > 0 {
            let tensors = report.resumed_tensors;
            console.note(format_args!(
                "reused from an unfinished file of the interrupted run: {}",
                output::count(tensors, "tensor")
            ));
        }
        // A part without weights has nothing to compress.
        let empty = report.part.is_some() && report.tensors.is_empty();
        if let Some(part) = report.part.as_ref().filter(|_| empty) {
            console.note_and_help(&Note {
                text: format!("note: part {part} has no weights: a file is never split, and the model has fewer"),
                help: "merge it with the other parts, or compress the model in fewer parts".to_owned(),
            });
        }
        let notes = [
            report::nothing_compressed(&report.tensors, "was"),
            report::large_copies(&report.large_copies),
            report::unmarked_configs(&report.unmarked_configs),
        ];
        notes.into_iter().flatten().for_each(|note| console.note_and_help(&note));
        if let Some(stdout) = &mut stdout {
            archive::pack_bundle(&bundle, stdout).map_err(Failure::of_stream)?;
            console.note(format_args!(
                "{}, {} of {}",
                output::count(report.files, "file"),
                output::bytes(report.stored_bytes),
                output::bytes(report.original_bytes)
            ));
            return Ok(());
        }
        console.summary("compress", &report, |out| {
            report::totals(&report.encodings, report.original_bytes, report.stored_bytes).write(out)?;
            writeln!(
                out,
                "{}: {}, {} ({}), {} checked again",
                self.output.display(),
                output::count(report.files, "file"),
                output::seconds(report.seconds),
                output::rate(report.original_bytes, report.seconds),
                output::count(report.verified_tensors, "tensor"),
            )?;
            match (&self.base, report.base_tensors) {
                (Some(base), tensors) => {
                    let tensors = output::count(tensors, "tensor");
                    writeln!(out, "{tensors} stored as differences from {}", base.display())
                }
                (None, _) => Ok(()),
            }
        })
    }
}

pub fn verify_after(text: &str) -> std::result::Result<VerifyAfter, String> {
    text.parse().map_err(|error: unweight::format::UnknownName| error.to_string())
}
