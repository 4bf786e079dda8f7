//! Writes the section of docs/architecture.md with the declared orders.

use std::fmt::Write;

use crate::orders::CRATES;

/// Line width, columns.
const WIDTH: usize = 120;

/// Returns the section without the comments around it. `owners` are dependencies and the only directories that may use
/// them.
pub fn section(owners: &[(&str, &[&str])]) -> String {
    let mut out = String::new();
    crates(&mut out, owners);
    modules(&mut out);
    out
}

/// Writes a line with cells at these columns. The last cell wraps if it is too long.
fn line(out: &mut String, columns: &[usize], cells: &[&str]) {
    let (last, first) = cells.split_last().expect("a cell");
    let at = *columns.last().expect("a column");
    let mut text = String::new();
    for (cell, column) in first.iter().zip(columns) {
        write!(text, "{:column$}{cell}", "", column = column.saturating_sub(text.len()))
            .expect("writing to a string cannot fail");
    }
    for word in last.split(' ') {
        if text.len() + 1 + word.len() > WIDTH {
            writeln!(out, "{}", text.trim_end()).expect("writing to a string cannot fail");
            text.clear();
        }
        let gap = if text.len() <= at { at - text.len() } else { 1 };
        write!(text, "{:gap$}{word}", "").expect("writing to a string cannot fail");
    }
    writeln!(out, "{}", text.trim_end()).expect("writing to a string cannot fail");
}

fn crates(out: &mut String, owners: &[(&str, &[&str])]) {
    *out += "## Crates\nA crate may depend on those of its third column, which stand higher in the list.\n```\n";
    for krate in &CRATES {
        let above: Vec<&str> = krate.above.iter().map(|name| name.trim_start_matches("unweight-")).collect();
        line(out, &[0, 21, 70], &[krate.name, krate.holds, &above.join(" ")]);
    }
    *out += "```\n";
    let name = |folder: &&str| CRATES.iter().find(|krate| krate.folder == *folder).expect("a crate").name;
    let owned = owners.iter().map(|(dependency, folders)| {
        format!("{dependency} ({})", folders.iter().map(name).collect::<Vec<_>>().join(" and "))
    });
    let text = format!("Dependencies that no other crate names: {}.", owned.collect::<Vec<_>>().join(", "));
    line(out, &[0], &[&text]);
}

fn modules(out: &mut String) {
    *out += "\n## Modules\n";
    *out += "A module may name those that stand higher in the list of its crate, and none of its own line.\n```\n";
    for krate in CRATES.iter().filter(|krate| !krate.levels.is_empty()) {
        let mut folder = krate.source();
        for (names, holds) in krate.levels {
            line(out, &[0, 21, 59], &[&folder, names, holds]);
            folder.clear();
        }
    }
    *out += "```\n";
}
