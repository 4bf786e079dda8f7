//! `unweight plan`.

use std::io::{self, Write};

use clap::Args;
use unweight::format::{
    Role,
    bundle::{self, CompareReport},
};

use super::{
    failure::Result,
    output::{self, Console, Table},
    report,
    select::Select,
    source::Source,
};

/// Arguments of `plan`.
#[derive(Args)]
pub struct Plan {
    #[command(flatten)]
    source: Source,
    #[command(flatten)]
    select: Select,
    /// Compare all profiles and code limits, with sums by role
    #[arg(long, conflicts_with_all = ["profile", "code_limit"])]
    compare: bool,
}

impl Plan {
    /// Runs the command.
    pub fn run(&self, console: Console) -> Result<()> {
        let model = self.source.find(None, console)?;
        if self.compare {
            let report = bundle::compare(&model.root, &self.select.all_options(&model))?;
            return console.result("plan", &report, |out| write_comparison(&report, out));
        }
        let report = bundle::plan(&model.root, &self.select.options_for(&model))?;
        let notes = [
            report::nothing_compressed(&report.tensors, "would be"),
            report::large_copies(&report.large_copies),
            report::unmarked_configs(&report.unmarked_configs),
        ];
        notes.into_iter().flatten().for_each(|note| console.note_and_help(&note));
        console.result("plan", &report, |out| {
            report::tensors(&report.tensors).write(out)?;
            writeln!(out)?;
            report::totals(&report.encodings, report.original_bytes, report.stored_bytes).write(out)?;
            writeln!(out, "sizes are predicted from samples")
        })
    }
}

/// Writes a line per profile and range of code limits, with the stored bytes of each kind of weights.
fn write_comparison(report: &CompareReport, out: &mut dyn Write) -> io::Result<()> {
    let is_embedding = |role| matches!(role, Role::Embedding | Role::LmHead);
    let groups: [&dyn Fn(Role) -> bool; 4] = [&is_embedding, &Role::is_attention, &Role::is_mlp, &|role| {
        !(is_embedding(role) || role.is_attention() || role.is_mlp())
    }];
    let headings =
        ["profile", "scope", ">code limit", ">embeddings", ">attention", ">mlp", ">other", ">all files", ">ratio"];
    let mut table = Table::new(&headings);
    let sums = |row: &bundle::CompareRow, of: fn(&bundle::RoleTotal) -> u64| {
        groups.map(|within| output::bytes(row.roles.iter().filter(|total| within(total.role)).map(of).sum()))
    };
    if let Some(row) = report.rows.first() {
        let [a, b, c, d] = sums(row, |total| total.original_bytes);
        let (all, none) = (output::bytes(report.original_bytes), String::new);
        table.row(["(source)".to_owned(), none(), none(), a, b, c, d, all, none()]);
    }
    let shown = |row: &bundle::CompareRow| {
        let [a, b, c, d] = sums(row, |total| total.stored_bytes);
        let ratio = report::percent(row.stored_bytes, report.original_bytes);
        (row.profile.to_string(), row.scope.to_string(), [a, b, c, d, output::bytes(row.stored_bytes), ratio])
    };
    // Limits with the same sizes share a row.
    for rows in report.rows.chunk_by(|one, next| shown(one) == shown(next)) {
        let bits = |row: &bundle::CompareRow| row.code_limit.map_or_else(|| "-".to_owned(), |bits| bits.to_string());
        let limits = match rows {
            [first, .., last] => format!("{}-{}", bits(first), bits(last)),
            _ => rows.first().map(bits).unwrap_or_default(),
        };
        if let Some((profile, scope, [a, b, c, d, all, ratio])) = rows.first().map(shown) {
            table.row([profile, scope, limits, a, b, c, d, all, ratio]);
        }
    }
    table.write(out)?;
    writeln!(out, "sizes are predicted from samples")
}
