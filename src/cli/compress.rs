//! `unweight compress`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use unweight::{
    format::bundle::{self, CompressOptions, CpuEncoder, Encoder, VerifyAfter},
    rt::{device, device::KernelSet, env::Env, ops::encode::BundleEncoder},
};

use super::{
    failure::{Failure, Result},
    output::{self, Output},
    progress::Bar,
    select::{self, Select},
    size,
};

/// Arguments of `compress`.
#[derive(Args)]
pub struct Compress {
    /// Directory of the model: *.safetensors and whatever lies beside them
    source: PathBuf,
    /// Directory of the bundle; must not exist, unless --force
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    #[command(flatten)]
    select: Select,
    /// Memory for tensors in work, such as 4G [default: 1G]; a larger tensor is worked on alone
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    ram: Option<u64>,
    /// Go on after an interrupted run with the same options
    #[arg(long)]
    resume: bool,
    /// Replace an existing output, once the new one is complete
    #[arg(long)]
    force: bool,
    /// What to decode again before the bundle gets its name: none, sample or full
    #[arg(long, value_name = "HOW", default_value = "full", value_parser = verify_after)]
    verify: VerifyAfter,
    /// Also record the SHA-256 of every source file
    #[arg(long)]
    sha256: bool,
    /// Who codes the tensors; the bundle is the same
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
        Ok(match self {
            Self::Cpu => Box::new(CpuEncoder),
            Self::Cuda => {
                let env = Env::process().map_err(|error| Failure::other(error.clone()))?;
                let device = device::Device::open(0)?;
                let kernels = KernelSet::open(&device, env);
                Box::new(BundleEncoder::new(&kernels, options.code_limit)?)
            }
        })
    }
}

impl Compress {
    /// Runs it.
    pub fn run(&self, output: Output) -> Result<()> {
        let options = self
            .select
            .options()
            .ram_bytes(self.ram)
            .resume(self.resume)
            .force(self.force)
            .verify(self.verify)
            .sha256(self.sha256);
        let encoder = self.device.encoder(&options)?;
        let bar = Bar::new(output, "compressing")?;
        let report = bundle::compress_with(&self.source, &self.output, &options, encoder.as_ref(), &bar)?;
        bar.finish();
        if !report.resumed_files.is_empty() {
            output.note(format_args!("reused from the interrupted run: {}", report.resumed_files.join(", ")));
        }
        for remark in [select::nothing_coded(&report.tensors), select::large_copies(&report.large_copies)] {
            remark.into_iter().for_each(|remark| output.note(remark));
        }
        output.summary("compress", &report, |out| {
            select::totals(&report.forms, report.original_bytes, report.stored_bytes).write(out)?;
            writeln!(
                out,
                "{}: {} files, {} ({}), {} tensors checked again",
                self.output.display(),
                report.files,
                output::seconds(report.seconds),
                output::rate(report.original_bytes, report.seconds),
                report.verified_tensors,
            )
        })
    }
}

fn verify_after(text: &str) -> std::result::Result<VerifyAfter, String> {
    text.parse().map_err(|error: bundle::UnknownName| error.to_string())
}
