//! Options and report of a stress run.

use std::fmt;

use serde::Serialize;
use unweight_codegen::{
    VariantSpec,
    plan::Plan,
    spec::{Arch, catalog},
};
use unweight_rt::DeviceInfo;

use crate::options::options;

/// A fault planted in the kernels on purpose, to verify that the run detects faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Plant {
    /// A warp refills its slot without a fence while its loads may still be in flight.
    UnfencedRefill,
}

options! {
    /// Options of [`stress`](crate::stress()).
    StressOptions {
        /// Launches of each variant on each problem.
        launches: u32 = 2000,
        /// Only variants whose name contains one of these strings; empty selects all.
        only: Vec<String> = Vec::new(),
        /// Keep memory and shared memory busy from another stream.
        load: bool = true,
        /// Only the variants that do not use the copy engine ([`catalog::asynchronous`]).
        asynchronous: bool = false,
        /// The fault to plant.
        plant: Option<Plant> = None,
    }
}

impl StressOptions {
    /// Returns the selected variants of an architecture.
    pub(super) fn variants(&self, arch: Arch) -> Vec<VariantSpec> {
        let all = if self.asynchronous { catalog::asynchronous(arch).collect() } else { catalog::all(arch) };
        let planned = all.into_iter().filter(|spec| Plan::new(spec).is_ok());
        planned.filter(|spec| self.selects(spec.name().as_str())).collect()
    }

    pub(super) fn selects(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|part| name.contains(part.as_str()))
    }
}

/// The result of a stress run.
#[derive(Clone, Debug, Serialize)]
pub struct StressReport {
    /// The GPU that was tested.
    pub device: DeviceInfo,
    /// The options of the run.
    pub options: StressOptions,
    /// Total launches.
    pub launches: u64,
    /// Launches whose output differs from the first launch's.
    pub differing: u64,
    /// Problems whose first output was wrong.
    pub wrong: u64,
    /// Duration in seconds.
    pub seconds: f64,
    /// One row per variant and problem.
    pub rows: Vec<StressRow>,
}

/// The result of one variant on one problem.
#[derive(Clone, Debug, Serialize)]
pub struct StressRow {
    /// Name of the variant, or of the encoder.
    pub variant: String,
    /// Batch rows; 0 without a batch.
    pub m: u32,
    /// Output features.
    pub n: u32,
    /// Input features.
    pub k: u32,
    /// The number of launches.
    pub launches: u32,
    /// Launches whose output differs from the first launch's.
    pub differing: u32,
    /// What is wrong with the first output.
    pub wrong: Option<String>,
}

impl StressReport {
    /// Returns whether every launch of every variant gave the right bits.
    pub fn is_clean(&self) -> bool {
        self.differing == 0 && self.wrong == 0
    }
}

impl StressRow {
    /// Returns whether every launch gave the right bits.
    pub fn is_clean(&self) -> bool {
        self.differing == 0 && self.wrong.is_none()
    }
}

impl fmt::Display for StressRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { variant, m, n, k, launches, differing, wrong } = self;
        write!(f, "{variant}  m = {m}, n = {n}, k = {k}: {differing} of {launches} launches differ")?;
        match wrong {
            Some(wrong) => write!(f, "; the first is wrong: {wrong}"),
            None => Ok(()),
        }
    }
}

/// Prints a line for each row that is not clean, then the totals.
impl fmt::Display for StressReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for row in self.rows.iter().filter(|row| !row.is_clean()) {
            writeln!(f, "{row}")?;
        }
        let variants: std::collections::BTreeSet<&str> = self.rows.iter().map(|row| row.variant.as_str()).collect();
        let (device, problems, launches) = (&self.device.name, self.rows.len(), self.launches);
        writeln!(
            f,
            "{device}: {} variants, {problems} problems, {launches} launches in {:.0} s: {} differ, {} first outputs wrong",
            variants.len(),
            self.seconds,
            self.differing,
            self.wrong
        )
    }
}
