//! `unweight inspect`.

use std::{collections::BTreeSet, io::Write, path::PathBuf};

use clap::{Args, ValueEnum};
use clap_complete::engine::ArgValueCandidates;
use serde::Serialize;
use unweight::format::{
    Histogram,
    bundle::{
        AttachedKernel, Bundle, BundleError, Progress, TensorReport,
        manifest::{BaseEntry, Options},
    },
    raw::glob::matches,
};

use super::{
    completions,
    failure::{Failure, Result},
    hub,
    output::{self, Console},
    plot::{self, Drawing},
    printable::one_line,
    progress::Bar,
    report,
};

/// Arguments of `inspect`.
#[derive(Args)]
pub struct Inspect {
    /// Bundle directory, or org/name on the Hugging Face Hub
    bundle: PathBuf,
    /// Show only matching tensors; * and ? are wildcards; repeatable
    #[arg(long, value_name = "GLOB", add = ArgValueCandidates::new(completions::tensors))]
    tensor: Vec<String>,
    /// Print comma-separated values
    #[arg(long, conflicts_with = "json")]
    csv: bool,
    /// Plot exponents or stored sizes, on the terminal or with --svg
    #[arg(long, value_name = "WHAT")]
    plot: Option<Plot>,
    /// Write the plot to this SVG file
    #[arg(long, value_name = "FILE", requires = "plot")]
    svg: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Plot {
    Exponents,
    Ratio,
}

#[derive(Serialize)]
struct Report<'a> {
    /// Program that wrote the bundle.
    creator: &'a str,
    /// Format version of the bundle.
    format_version: String,
    /// Options of `compress`.
    options: &'a Options,
    /// Name and digest of the base, if some tensors are differences from it.
    #[serde(skip_serializing_if = "Option::is_none")]
    base: Option<&'a BaseEntry>,
    /// Identifies the bundle.
    manifest_digest: String,
    /// Tensors, all or those of `--tensor`.
    tensors: Vec<TensorReport>,
    /// Size of the tensors in the source.
    original_bytes: u64,
    /// Size of the tensors in the bundle.
    stored_bytes: u64,
    /// Kernels that `kernels attach` added.
    attached_kernels: Vec<AttachedKernel>,
    /// Whether a plan of `tune` is attached.
    attached_plan: bool,
    /// Number of weights by BF16 exponent, with `--plot exponents`.
    #[serde(skip_serializing_if = "Option::is_none")]
    exponent_counts: Option<Vec<u64>>,
    /// Entropy of an exponent, bits.
    #[serde(skip_serializing_if = "Option::is_none")]
    exponent_entropy_bits: Option<f64>,
}

impl Inspect {
    /// Runs the command.
    pub fn run(&self, console: Console) -> Result<()> {
        plot::check_can_save(self.svg.as_deref())?;
        let bundle = Bundle::open_without_base(&hub::bundle(&self.bundle, console)?)?;
        let manifest = bundle.manifest();
        let is_selected =
            |name: &str| self.tensor.is_empty() || self.tensor.iter().any(|pattern| matches(pattern, name));
        let tensors: Vec<TensorReport> =
            bundle.tensors().filter(|tensor| is_selected(&tensor.entry().name)).map(|tensor| tensor.report()).collect();
        if tensors.is_empty() && !self.tensor.is_empty() {
            return Err(Failure::new(
                "tensor-not-found",
                format!("{}: no tensor matches {}", self.bundle.display(), self.tensor.join(", ")),
                "`unweight inspect BUNDLE` lists the names",
            ));
        }
        let attached = bundle.attached().unwrap_or_else(|error| {
            console.note(format_args!("{error}"));
            None
        });
        let mut report = Report {
            attached_kernels: attached.as_ref().map_or_else(Vec::new, |attached| attached.kernels().to_vec()),
            attached_plan: attached.is_some_and(|attached| attached.plan().is_some()),
            creator: &manifest.creator,
            format_version: format!("{}.{}", manifest.version.major, manifest.version.minor),
            options: &manifest.options,
            base: manifest.base.as_ref(),
            manifest_digest: manifest.manifest_digest.to_string(),
            original_bytes: tensors.iter().map(|tensor| tensor.original_bytes).sum(),
            stored_bytes: tensors.iter().map(|tensor| tensor.stored_bytes).sum(),
            tensors,
            exponent_counts: None,
            exponent_entropy_bits: None,
        };
        if let Some(plot) = self.plot {
            let histogram = match plot {
                Plot::Exponents => Some(exponents(&bundle, &report.tensors, console)?),
                Plot::Ratio => None,
            };
            if let Some(histogram) = &histogram {
                report.exponent_counts = Some(histogram.counts().to_vec());
                report.exponent_entropy_bits = Some(histogram.entropy_bits());
            }
            if let Some(file) = &self.svg {
                let drawing = histogram.as_ref().map_or(Drawing::Tensors(&report.tensors), Drawing::Exponents);
                plot::save(file, &drawing)?;
                console.note(format_args!("wrote {}", file.display()));
            } else if !console.json && !self.csv {
                let mut drawing = Vec::new();
                match &histogram {
                    Some(histogram) => plot::exponents_text(histogram, &mut drawing)?,
                    None => plot::ratio_text(&report.tensors, &mut drawing)?,
                }
                return console.result("inspect", &report, |out| out.write_all(&drawing));
            }
            // The plot was requested; the table is printed only with --json or --csv.
            if !console.json && !self.csv {
                return Ok(());
            }
        }
        console.result("inspect", &report, |out| if self.csv { csv(&report.tensors, out) } else { report.write(out) })
    }
}

impl Report<'_> {
    fn write(&self, out: &mut dyn Write) -> std::io::Result<()> {
        let Options { profile, scope, code_limit, .. } = self.options;
        writeln!(
            out,
            "format {}, by {}, profile {profile}, scope {scope}, codes up to {code_limit} bits, manifest {}\n",
            self.format_version,
            one_line(self.creator),
            self.manifest_digest
        )?;
        if let Some(base) = self.base {
            writeln!(out, "`planes` are differences from {}, digest {}\n", one_line(&base.name), base.digest)?;
        }
        report::tensors(&self.tensors).write(out)?;
        let totals = format!(
            "\n{}: {}",
            output::count(self.tensors.len(), "tensor"),
            report::percent(self.stored_bytes, self.original_bytes)
        );
        writeln!(out, "{totals} of {}", output::bytes(self.original_bytes))?;
        if self.attached_plan {
            writeln!(out, "a plan of `tune` is attached")?;
        }
        let kernels = &self.attached_kernels;
        if kernels.is_empty() {
            return Ok(());
        }
        let list = |of: fn(&AttachedKernel) -> String| {
            kernels.iter().map(of).collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>().join(", ")
        };
        writeln!(
            out,
            "{} kernels are attached for {}, by {}, {}",
            kernels.len(),
            list(|kernel| kernel.arch.clone()),
            list(|kernel| format!("{} {}", kernel.compiler.name, kernel.compiler.version)),
            output::bytes(kernels.iter().map(|kernel| kernel.bytes).sum()),
        )
    }
}

/// Returns the exponent histogram of the BF16 tensors among `tensors`.
fn exponents(bundle: &Bundle, tensors: &[TensorReport], console: Console) -> Result<Histogram> {
    let tensors: Vec<_> = tensors.iter().filter(|tensor| tensor.dtype == "BF16").collect();
    let bar = Bar::new(console, "reading")?;
    bar.start(tensors.iter().map(|tensor| tensor.original_bytes).sum());
    let mut sum = Histogram::default();
    for tensor in tensors {
        if bar.cancelled() {
            return Err(BundleError::Cancelled.into());
        }
        bar.tensor(&tensor.name);
        let histogram = Histogram::of(&bundle.tensor_in(&tensor.file, &tensor.name)?.decode()?);
        sum.merge(&histogram);
        bar.advance(tensor.original_bytes);
    }
    Ok(sum)
}

fn csv(tensors: &[TensorReport], out: &mut dyn Write) -> std::io::Result<()> {
    writeln!(
        out,
        "file,name,role,layer,dtype,shape,encoding,reason,elements,original_bytes,stored_bytes,bits_per_element"
    )?;
    for tensor in tensors {
        let shape: Vec<_> = tensor.shape.iter().map(ToString::to_string).collect();
        let cells = [
            tensor.file.clone(),
            tensor.name.clone(),
            tensor.role.to_string(),
            tensor.layer.map_or_else(String::new, |layer| layer.to_string()),
            tensor.dtype.clone(),
            shape.join("x"),
            tensor.encoding.to_string(),
            tensor.reason.clone().unwrap_or_default(),
            tensor.elements.to_string(),
            tensor.original_bytes.to_string(),
            tensor.stored_bytes.to_string(),
            format!("{:.6}", tensor.bits_per_element),
        ];
        writeln!(out, "{}", cells.map(|cell| quoted(&cell)).join(","))?;
    }
    Ok(())
}

/// Quotes a cell as RFC 4180 specifies.
fn quoted(cell: &str) -> String {
    if cell.contains([',', '"', '\n', '\r']) { format!("\"{}\"", cell.replace('"', "\"\"")) } else { cell.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::quoted;

    #[test]
    fn cells_are_quoted_where_they_must_be() {
        assert_eq!(quoted("plain"), "plain");
        assert_eq!(quoted("a,\"b\""), "\"a,\"\"b\"\"\"");
    }
}
