//! `unweight man`.

use std::{fs, io, path::PathBuf};

use clap::{Args, CommandFactory};
use serde::Serialize;

use super::{
    Cli,
    failure::{Failure, Result},
    output::Output,
    reference::markdown,
};

/// Arguments of `man`.
#[derive(Args)]
pub struct Man {
    /// Directory to write the pages to, such as ~/.local/share/man/man1; replaces existing pages
    dir: PathBuf,
    /// Write one page about all commands, as Markdown
    #[arg(long, hide = true)]
    markdown: bool,
}

#[derive(Serialize)]
struct Report {
    pages: Vec<String>,
}

impl Man {
    /// Runs it.
    pub fn run(&self, output: Output) -> Result<()> {
        fs::create_dir_all(&self.dir).map_err(Failure::io(self.dir.display()))?;
        let pages = if self.markdown { self.write_markdown() } else { self.write_manual() };
        let report = Report { pages: pages.map_err(Failure::io(self.dir.display()))? };
        output.summary("man", &report, |out| writeln!(out, "{}: {} pages", self.dir.display(), report.pages.len()))
    }

    fn write_manual(&self) -> io::Result<Vec<String>> {
        let mut root = Cli::command().disable_help_subcommand(true);
        root.build();
        let mut pages = Vec::new();
        let mut open = vec![root];
        while let Some(command) = open.pop() {
            open.extend(command.get_subcommands().filter(|command| !command.is_hide_set()).cloned());
            let page = clap_mangen::Man::new(command);
            page.generate_to(&self.dir)?;
            pages.push(page.get_filename());
        }
        pages.sort();
        Ok(pages)
    }

    fn write_markdown(&self) -> io::Result<Vec<String>> {
        let name = "unweight.md";
        fs::write(self.dir.join(name), markdown(Cli::command()))?;
        Ok(vec![name.to_owned()])
    }
}
