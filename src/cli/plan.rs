//! `unweight plan`.

use std::path::PathBuf;

use clap::Args;
use unweight::format::bundle;

use super::{
    failure::Result,
    output::Output,
    select::{self, Select},
};

/// Arguments of `plan`.
#[derive(Args)]
pub struct Plan {
    /// Directory of the model
    source: PathBuf,
    #[command(flatten)]
    select: Select,
}

impl Plan {
    /// Runs it.
    pub fn run(&self, output: Output) -> Result<()> {
        let report = bundle::plan(&self.source, &self.select.options())?;
        if let Some(remark) = select::nothing_coded(&report.tensors) {
            output.note(remark);
        }
        output.result("plan", &report, |out| {
            select::tensors(&report.tensors).write(out)?;
            writeln!(out)?;
            select::totals(&report.forms, report.original_bytes, report.stored_bytes).write(out)?;
            writeln!(out, "sizes are predicted from samples")
        })
    }
}
