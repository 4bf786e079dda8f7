//! `unweight convert`.

use std::{path::PathBuf, time::Instant};

use clap::{Args, ValueEnum};
use serde::Serialize;
use unweight::rivals::dfloat11::{self, ConvertOptions};

use super::{
    common::Resume,
    failure::Result,
    output::{self, Console},
    progress::Bar,
    source,
};

/// Arguments of `convert`.
#[derive(Args)]
pub struct Convert {
    /// Model directory or Hugging Face model; with --to dfloat11 also a bundle
    source: PathBuf,
    /// Directory to write; must not exist
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    /// Target format
    #[arg(long, value_enum)]
    to: Format,
    #[command(flatten)]
    resume: Resume,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Directory that the dfloat11 package loads
    Dfloat11,
    /// BF16 model restored from a DFloat11 directory
    Bf16,
}

/// The report of a conversion, with the keys that both directions share.
#[derive(Serialize)]
struct Converted<T> {
    /// `dfloat11` or `bf16`.
    to: &'static str,
    #[serde(flatten)]
    report: T,
    /// Duration.
    seconds: f64,
}

impl Convert {
    /// Runs the command.
    pub fn run(&self, console: Console) -> Result<()> {
        let root = source::find(std::slice::from_ref(&self.source), console)?.root;
        let bar = Bar::new(console, "converting")?;
        let started = Instant::now();
        let seconds = || started.elapsed().as_secs_f64();
        match self.to {
            Format::Dfloat11 => {
                let options = ConvertOptions::default().resume(self.resume.is_set);
                let report = dfloat11::convert(&root, &self.output, options, &bar)?;
                bar.finish();
                for kept in &report.kept {
                    console.note(format_args!("note: {} stays BF16: {}", kept.unit, kept.reason));
                }
                let converted = Converted { to: "dfloat11", report, seconds: seconds() };
                console.summary("convert", &converted, |out| {
                    let report = &converted.report;
                    writeln!(
                        out,
                        "{}: {} in {}, {} of {} ({}, {})",
                        self.output.display(),
                        output::count(report.weights, "weight"),
                        output::count(report.units, "unit"),
                        output::bytes(report.bytes),
                        output::bytes(report.source_bytes),
                        output::seconds(converted.seconds),
                        output::rate(report.source_bytes, converted.seconds),
                    )
                })
            }
            Format::Bf16 => {
                let report = dfloat11::restore(&root, &self.output, self.resume.is_set, &bar)?;
                bar.finish();
                let converted = Converted { to: "bf16", report, seconds: seconds() };
                console.summary("convert", &converted, |out| {
                    let report = &converted.report;
                    writeln!(
                        out,
                        "{}: {} of {}, {} from {} ({}, {})",
                        self.output.display(),
                        output::count(report.weights, "weight"),
                        output::count(report.units, "unit"),
                        output::bytes(report.bytes),
                        output::bytes(report.source_bytes),
                        output::seconds(converted.seconds),
                        output::rate(report.bytes, converted.seconds),
                    )
                })
            }
        }
    }
}
