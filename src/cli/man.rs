//! `unweight man`.

use std::{fs, path::PathBuf};

use clap::{Args, CommandFactory};
use serde::Serialize;

use super::{
    Cli,
    failure::{Failure, Result},
    output::Output,
};

/// Arguments of `man`.
#[derive(Args)]
pub struct Man {
    /// Directory to write the pages to, such as ~/.local/share/man/man1; replaces existing pages
    dir: PathBuf,
}

#[derive(Serialize)]
struct Report {
    pages: Vec<String>,
}

impl Man {
    /// Runs it.
    pub fn run(&self, output: Output) -> Result<()> {
        let failed = || Failure::io(self.dir.display());
        fs::create_dir_all(&self.dir).map_err(failed())?;
        let mut root = Cli::command().disable_help_subcommand(true);
        root.build();
        let mut pages = Vec::new();
        let mut open = vec![root];
        while let Some(command) = open.pop() {
            open.extend(command.get_subcommands().filter(|command| !command.is_hide_set()).cloned());
            let page = clap_mangen::Man::new(command);
            page.generate_to(&self.dir).map_err(failed())?;
            pages.push(page.get_filename());
        }
        pages.sort();
        let report = Report { pages };
        output.summary("man", &report, |out| writeln!(out, "{}: {} pages", self.dir.display(), report.pages.len()))
    }
}
