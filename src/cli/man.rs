//! `unweight man`.

use std::{fs, io, path::PathBuf};

use clap::{Args, CommandFactory};
use serde::Serialize;

use super::{
    Cli,
    failure::{Failure, Result},
    output::Console,
    reference::markdown,
};

/// Arguments of `man`.
#[derive(Args)]
pub struct Man {
    /// Directory for the pages, such as ~/.local/share/man/man1; replaces existing pages
    dir: PathBuf,
    /// Write one page about all commands, as Markdown
    #[arg(long, hide = true)]
    markdown: bool,
}

#[derive(Serialize)]
struct Report {
    /// Names of the files written.
    pages: Vec<String>,
}

impl Man {
    /// Runs the command.
    pub fn run(&self, console: Console) -> Result<()> {
        fs::create_dir_all(&self.dir).map_err(Failure::io(self.dir.display()))?;
        let pages = if self.markdown { self.write_markdown() } else { self.write_manual() };
        let report = Report { pages: pages.map_err(Failure::io(self.dir.display()))? };
        console.summary("man", &report, |out| writeln!(out, "{}: {} pages", self.dir.display(), report.pages.len()))
    }

    fn write_manual(&self) -> io::Result<Vec<String>> {
        let mut root = Cli::command().disable_help_subcommand(true);
        root.build();
        let mut pages = Vec::new();
        let mut open = vec![root];
        while let Some(command) = open.pop() {
            open.extend(command.get_subcommands().filter(|command| !command.is_hide_set()).cloned());
            let usage = synopsis(&command);
            let page = clap_mangen::Man::new(command);
            let mut text = Vec::new();
            page.render(&mut text)?;
            let text = with_synopsis(&String::from_utf8_lossy(&text), &usage);
            fs::write(self.dir.join(page.get_filename()), text)?;
            pages.push(page.get_filename());
        }
        pages.sort();
        Ok(pages)
    }

    fn write_markdown(&self) -> io::Result<Vec<String>> {
        let name = "unweight.md";
        fs::write(self.dir.join(name), markdown(Cli::command(), ""))?;
        Ok(vec![name.to_owned()])
    }
}

/// Returns the usage of a command as roff, options with their values.
fn synopsis(command: &clap::Command) -> String {
    let usage = command.clone().render_usage().to_string();
    let usage = usage.strip_prefix("Usage: ").unwrap_or(&usage).trim_end().replace('\\', "\\e").replace('-', "\\-");
    usage.lines().map(str::trim_start).collect::<Vec<_>>().join("\n.br\n")
}

/// Replaces the generated synopsis of the page, which lacks the values of options.
fn with_synopsis(page: &str, usage: &str) -> String {
    const HEADING: &str = ".SH SYNOPSIS\n";
    let Some((before, rest)) = page.split_once(HEADING) else { return page.to_owned() };
    let after = rest.find(".SH ").map_or("", |at| &rest[at..]);
    format!("{before}{HEADING}{usage}\n{after}")
}
