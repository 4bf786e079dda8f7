//! The speed table of a card, from a report of `unweight-bench decode BUNDLE --json`.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs::File,
    io::{BufReader, Read as _},
    path::Path,
};

use serde::Deserialize;

use crate::cli::{
    failure::{Failure, Result},
    printable::one_line,
};

/// Maximum size of a report, bytes.
const REPORT_MAX: u64 = 16 << 20;

/// The parts of a report that a card repeats.
#[derive(Deserialize)]
pub struct Speed {
    command: String,
    unweight_version: String,
    device: Device,
    manifest_digest: Option<String>,
    options: Options,
    rows: Vec<Row>,
}

#[derive(Deserialize)]
struct Device {
    name: String,
}

#[derive(Deserialize)]
struct Options {
    context: u64,
    resident_experts: Option<u64>,
}

#[derive(Deserialize)]
struct Row {
    batch: u64,
    placement: String,
    kv_cache: String,
    tokens_per_s: f64,
}

impl Row {
    /// Returns the name of the column.
    fn column(&self) -> String {
        let cache = if self.kv_cache == "bf16" { String::new() } else { format!(", KV cache {}", self.kv_cache) };
        one_line(&format!("{}{cache}", self.placement)).into_owned()
    }
}

impl Speed {
    /// Reads a report on the bundle with this digest.
    pub fn read(file: &Path, manifest_digest: &str) -> Result<Self> {
        let open = File::open(file).map_err(Failure::io(file.display()))?;
        let read = serde_json::from_reader(BufReader::new(open.take(REPORT_MAX)));
        let is_decode = |speed: &Self| speed.command == "decode" && !speed.rows.is_empty();
        let is_of_bundle = |speed: &Self| speed.manifest_digest.as_deref() == Some(manifest_digest);
        let why = match read {
            Ok(speed) if is_decode(&speed) && is_of_bundle(&speed) => return Ok(speed),
            Ok(speed) if is_decode(&speed) => "times of another bundle or of random weights".to_owned(),
            Ok(_) => "no times of decode steps".to_owned(),
            Err(error) => error.to_string(),
        };
        let help = "give the output of `unweight-bench decode BUNDLE --json`";
        Err(Failure::new("speed-report-invalid", format!("{}: {why}", file.display()), help))
    }

    /// Returns the section with a row for each number of sequences, and a column for each placement.
    pub fn section(&self) -> String {
        let mut columns: Vec<String> = Vec::new();
        let mut lines: BTreeMap<u64, BTreeMap<usize, f64>> = BTreeMap::new();
        for row in &self.rows {
            let name = row.column();
            let column = columns.iter().position(|column| *column == name).unwrap_or_else(|| {
                columns.push(name);
                columns.len() - 1
            });
            lines.entry(row.batch).or_default().insert(column, row.tokens_per_s);
        }
        let experts = self.options.resident_experts;
        let experts = experts.map(|count| format!(", {count} experts per layer in GPU memory")).unwrap_or_default();
        let mut text = format!(
            "\n## Speed\n\nTokens per second, decoding with {} tokens of context on {}{experts}, Unweight {}.\n\n\
             | sequences |",
            self.options.context,
            one_line(&self.device.name),
            one_line(&self.unweight_version),
        );
        // Writing to a string does not fail.
        columns.iter().for_each(|name| _ = write!(text, " {name} |"));
        _ = writeln!(text, "\n|---:|{}", "---:|".repeat(columns.len()));
        for (batch, rates) in &lines {
            _ = write!(text, "| {batch} |");
            for column in 0..columns.len() {
                let rate = rates.get(&column).map(|rate| format!("{rate:.0}"));
                _ = write!(text, " {} |", rate.unwrap_or_default());
            }
            text.push('\n');
        }
        text
    }
}
