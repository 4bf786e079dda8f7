//! Output of commands: results on stdout, notes on stderr, and formatting of sizes, times and tables.

use std::{
    fmt::Display,
    io::{self, Write},
};

use serde::Serialize;

use super::{
    failure::Result,
    printable::{one_line, printable},
};

/// What a command prints, and how: its options, and the functions that print.
#[derive(Debug, Clone, Copy)]
pub struct Console {
    /// Print one JSON document on stdout instead of text.
    pub json: bool,
    /// Print only requested output and errors.
    pub quiet: bool,
    /// 1 names files; 2 names tensors.
    pub verbose: u8,
}

#[derive(Serialize)]
struct Envelope<'a, T> {
    command: &'a str,
    unweight_version: &'a str,
    #[serde(flatten)]
    report: &'a T,
}

/// A note with a next step.
pub struct Note {
    /// The note.
    pub text: String,
    /// The next step.
    pub help: String,
}

impl Console {
    /// Prints the result of `command`: a JSON object with the report's keys, or the text that `text` writes.
    pub fn result<T: Serialize>(
        self,
        command: &str,
        report: &T,
        text: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<()> {
        let mut out = io::BufWriter::new(io::stdout().lock());
        if self.json {
            let envelope = Envelope { command, unweight_version: env!("CARGO_PKG_VERSION"), report };
            serde_json::to_writer_pretty(&mut out, &envelope).map_err(io::Error::from)?;
            writeln!(out)?;
        } else {
            let mut plain = Vec::new();
            text(&mut plain)?;
            out.write_all(printable(&String::from_utf8_lossy(&plain)).as_bytes())?;
        }
        out.flush()?;
        Ok(())
    }

    /// Prints a summary, as [`Console::result`] does; `-q` suppresses its text.
    pub fn summary<T: Serialize>(
        self,
        command: &str,
        report: &T,
        text: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<()> {
        if self.quiet && !self.json { Ok(()) } else { self.result(command, report, text) }
    }

    /// Prints a note on stderr.
    pub fn note(self, text: impl Display) {
        if !self.quiet {
            // A closed stderr is not a failure.
            let _ = writeln!(io::stderr(), "{}", one_line(&text.to_string()));
        }
    }

    /// Prints a note on stderr, and its next step on a separate line.
    pub fn note_and_help(self, note: &Note) {
        self.note(&note.text);
        self.note(format_args!("  help: {}", note.help));
    }
}

/// Formats bytes with three digits and a binary unit.
pub fn bytes(count: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    let mut value = count as f64 / 1024.0;
    let mut unit = 0;
    // 1023.5 and up would print as 1024.
    while value >= 1023.5 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = if value < 9.995 {
        2
    } else if value < 99.95 {
        1
    } else {
        0
    };
    format!("{value:.digits$} {}", units[unit])
}

/// Formats seconds.
pub fn seconds(value: f64) -> String {
    if value < 9.995 {
        format!("{value:.2} s")
    } else if value < 120.0 {
        format!("{value:.1} s")
    } else {
        format!("{:.0} min {:02.0} s", (value / 60.0).floor(), value % 60.0)
    }
}

/// Formats a rate of `count` bytes in `seconds`.
pub fn rate(count: u64, seconds: f64) -> String {
    if seconds > 0.0 { format!("{}/s", bytes((count as f64 / seconds) as u64)) } else { "-".to_owned() }
}

/// Formats a number of things, such as `1 file` or `2 files`.
pub fn count(things: impl TryInto<u64>, thing: &str) -> String {
    match things.try_into().unwrap_or(u64::MAX) {
        1 => format!("1 {thing}"),
        things => format!("{things} {thing}s"),
    }
}

/// Formats a shape as `[n, k]`.
pub fn shape(shape: &[usize]) -> String {
    format!("[{}]", shape.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))
}

/// The widest cell that other rows are aligned to, characters.
const WIDTH_MAX: usize = 80;

/// Rows of aligned columns. A column is right-aligned if its heading starts with `>`.
pub struct Table {
    headings: Vec<String>,
    right: Vec<bool>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Creates a table with these headings.
    pub fn new(headings: &[&str]) -> Self {
        Self {
            headings: headings.iter().map(|heading| heading.trim_start_matches('>').to_owned()).collect(),
            right: headings.iter().map(|heading| heading.starts_with('>')).collect(),
            rows: Vec::new(),
        }
    }

    /// Appends a row of as many cells as there are headings.
    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        debug_assert_eq!(N, self.headings.len());
        self.rows.push(cells.map(|cell| one_line(&cell).into_owned()).into());
    }

    /// Writes the table, with two spaces between columns and no trailing spaces.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        // A longer cell extends beyond its column and does not move the other rows.
        let width = |column: usize| {
            let cells = self.rows.iter().chain([&self.headings]).map(|row| row[column].chars().count());
            cells.filter(|&width| width <= WIDTH_MAX).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.headings.len()).map(width).collect();
        for row in [&self.headings].into_iter().chain(&self.rows) {
            let mut line = String::new();
            for ((cell, &width), &right) in row.iter().zip(&widths).zip(&self.right) {
                let cell = if right { format!("{cell:>width$}  ") } else { format!("{cell:<width$}  ") };
                line.push_str(&cell);
            }
            writeln!(out, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_three_digits() {
        let cases = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (10 << 20, "10.0 MiB"),
            (1 << 30, "1.00 GiB"),
            ((1 << 30) - 1, "1.00 GiB"),
            (117_440_512, "112 MiB"),
        ];
        for (count, text) in cases {
            assert_eq!(bytes(count), text);
        }
    }

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(&["name", ">bytes"]);
        table.row(["a".into(), "12".into()]);
        table.row(["longer".into(), "1".into()]);
        let mut out = Vec::new();
        table.write(&mut out).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "name    bytes\na          12\nlonger      1\n");
    }

    #[test]
    fn one_long_cell_widens_only_its_own_row() {
        let long = "x".repeat(300);
        let mut table = Table::new(&["name", ">bytes"]);
        table.row(["a".into(), "12".into()]);
        table.row([long.clone(), "1".into()]);
        let mut out = Vec::new();
        table.write(&mut out).unwrap();
        let expected = format!("name  bytes\na        12\n{long}      1\n");
        assert_eq!(String::from_utf8(out).unwrap(), expected);
    }
}
