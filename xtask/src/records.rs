//! `cargo xtask records`: the tables of docs/records as a page of the book, `docs/records/tables.inc`.
//!
//! Every CSV file of at most [`ROWS_MAX`] rows becomes a table, and every `rows` list of a JSON file that names its
//! device. Longer files are listed with their sizes. `xtask/tests/records.rs` checks that the page is current.

use std::{
    collections::BTreeSet,
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;

/// The page, below the root of the repository.
pub const PAGE: &str = "docs/records/tables.inc";
/// Maximum rows of a table.
const ROWS_MAX: usize = 24;
/// Maximum columns of a table.
const COLUMNS_MAX: usize = 12;

/// A table of texts.
struct Table {
    caption: String,
    columns: Vec<String>,
    rows: Vec<Vec<String>>,
}

/// Returns the page for the records below `root`.
pub fn page(root: &Path) -> Result<String, String> {
    let mut out = String::from("<!-- Written by `cargo xtask records` from the files next to it. -->\n");
    let mut days = entries(&root.join("docs/records"))?;
    days.retain(|day| day.is_dir());
    // Writing to a string does not fail.
    for day in days.iter().rev() {
        let date = name(day);
        _ = writeln!(out, "<h2 id=\"{date}\">{date}</h2>");
        let mut listed = Vec::new();
        for file in entries(day)? {
            let kind = file.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
            if !["csv", "json"].contains(&kind) {
                continue;
            }
            let text = fs::read_to_string(&file).map_err(|error| format!("{}: {error}", file.display()))?;
            let tables = match kind {
                "csv" => vec![csv(&text)],
                _ => {
                    let value = serde_json::from_str(&text).map_err(|error| format!("{}: {error}", file.display()))?;
                    let mut tables = Vec::new();
                    collect(&value, "", &mut tables);
                    tables
                }
            };
            let link = format!("<a href=\"{date}/{0}\">{0}</a>", name(&file));
            let short = tables.iter().filter(|table| fits(table)).count();
            if short == 0 {
                listed.push(format!("{link} ({} kB)", text.len().div_ceil(1000)));
            }
            for table in tables.iter().filter(|table| fits(table)) {
                write_table(&mut out, &link, table);
            }
        }
        if !listed.is_empty() {
            _ = writeln!(out, "<p>Longer files: {}.</p>", listed.join(", "));
        }
    }
    Ok(out)
}

/// Writes the page.
pub fn run_task(root: &Path) -> Result<(), String> {
    let path = root.join(PAGE);
    fs::write(&path, page(root)?).map_err(|error| format!("{}: {error}", path.display()))?;
    println!("{}", path.display());
    Ok(())
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let io = |error: std::io::Error| format!("{}: {error}", folder.display());
    let entries = fs::read_dir(folder).map_err(io)?.map(|entry| entry.map(|entry| entry.path()));
    let mut paths = entries.collect::<Result<Vec<_>, _>>().map_err(io)?;
    paths.sort();
    Ok(paths)
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn fits(table: &Table) -> bool {
    (1..=ROWS_MAX).contains(&table.rows.len()) && (1..=COLUMNS_MAX).contains(&table.columns.len())
}

/// Parses comma-separated values, with quotes around values that contain commas.
fn csv(text: &str) -> Table {
    let mut lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).map(fields);
    let columns = lines.next().unwrap_or_default();
    Table { caption: String::new(), columns, rows: lines.collect() }
}

fn fields(line: &str) -> Vec<String> {
    let (mut fields, mut field, mut quoted) = (Vec::new(), String::new(), false);
    for c in line.chars() {
        match c {
            '"' => quoted = !quoted,
            ',' if !quoted => fields.push(std::mem::take(&mut field)),
            c => field.push(c),
        }
    }
    fields.push(field);
    fields
}

/// Finds objects with a device and rows.
fn collect(value: &Value, of: &str, tables: &mut Vec<Table>) {
    let Value::Object(object) = value else { return };
    let device = &value["device"];
    let device = device["name"].as_str().or(device.as_str());
    match (device, value["rows"].as_array()) {
        (Some(device), Some(rows)) => {
            let command = value["command"].as_str().unwrap_or_default();
            let parts = [of, command, device].into_iter().filter(|part| !part.is_empty());
            let caption = parts.collect::<Vec<_>>().join(", ");
            let mut columns: Vec<String> = Vec::new();
            let mut seen = BTreeSet::new();
            for (key, value) in rows.iter().filter_map(Value::as_object).flatten() {
                if !value.is_object() && !value.is_array() && !value.is_null() && seen.insert(key) {
                    columns.push(key.clone());
                }
            }
            let rows = rows.iter().map(|row| columns.iter().map(|column| cell(&row[column])).collect()).collect();
            tables.push(Table { caption, columns, rows });
        }
        _ => object.iter().for_each(|(key, value)| collect(value, key, tables)),
    }
}

/// Returns a value as text; fractions with four digits.
fn cell(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Number(number) if number.is_f64() => {
            let number = number.as_f64().unwrap_or_default();
            let digits = if number == 0.0 { 0 } else { 3 - number.abs().log10().floor() as i32 };
            format!("{number:.*}", digits.clamp(0, 12) as usize)
        }
        other => other.to_string(),
    }
}

fn write_table(out: &mut String, link: &str, table: &Table) {
    let caption = if table.caption.is_empty() { String::new() } else { format!(": {}", escaped(&table.caption)) };
    _ = writeln!(out, "<h3>{link}{caption}</h3>\n<table>");
    let mut row = |tag: &str, cells: &[String]| {
        let cells: Vec<_> = cells.iter().map(|cell| format!("<{tag}>{}</{tag}>", escaped(cell))).collect();
        _ = writeln!(out, "<tr>{}</tr>", cells.concat());
    };
    row("th", &table.columns);
    table.rows.iter().for_each(|cells| row("td", cells));
    *out += "</table>\n";
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
