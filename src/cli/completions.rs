//! `unweight completions`.

use std::io::Write;

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use super::{Cli, failure::Result, output::Output};

/// Arguments of `completions`.
#[derive(Args)]
pub struct Completions {
    /// The shell
    shell: Shell,
}

impl Completions {
    /// Runs it. A script is a script: `--json` does not change it.
    pub fn run(&self, _: Output) -> Result<()> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "unweight", &mut script);
        std::io::stdout().lock().write_all(&script)?;
        Ok(())
    }
}
