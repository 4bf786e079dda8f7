//! The frame around the commands of a program: common options, help, errors and exit status.

use std::{io::Write, process::ExitCode};

use clap::{
    ArgAction, Args, Parser,
    error::{ContextKind, ContextValue},
};

use super::{
    failure::{self, Class, ErrorReport, Failure},
    output::Console,
    signals,
};

/// Heading of the options that all commands have.
pub const GLOBAL_OPTIONS: &str = "Global options";

/// The options that all commands have.
#[derive(Args)]
pub struct GlobalOptions {
    /// Print the result as JSON
    #[arg(long, global = true, help_heading = GLOBAL_OPTIONS)]
    json: bool,
    /// Print only requested output and errors
    #[arg(short, long, global = true, conflicts_with = "verbose", help_heading = GLOBAL_OPTIONS)]
    quiet: bool,
    /// Print details, such as each file, to stderr; twice: each tensor
    #[arg(short, long, global = true, action = ArgAction::Count, help_heading = GLOBAL_OPTIONS)]
    verbose: u8,
}

impl GlobalOptions {
    /// Returns how to print.
    pub fn console(&self) -> Console {
        Console { json: self.json, quiet: self.quiet, verbose: self.verbose }
    }
}

/// A command line program.
pub trait Program: Parser {
    /// Returns how to print.
    fn console(&self) -> Console;

    /// The name of the command in the JSON output.
    fn command(&self) -> &'static str;

    /// Runs the command.
    fn run(&self, console: Console) -> failure::Result<()>;

    /// Returns a failure for an unknown command if there is more to say than its name.
    fn unknown(_command: &str) -> Option<Failure> {
        None
    }
}

/// Parses the arguments and runs the command. `answer` runs first; if it returns true, the program ends.
pub fn run<P: Program>(answer: impl FnOnce() -> Result<bool, clap::Error>) -> ExitCode {
    crate::format::raw::keep_freed_memory();
    signals::survive_file_limit();
    match answer() {
        Ok(true) => return ExitCode::SUCCESS,
        Ok(false) => {}
        Err(error) => return usage(&error),
    }
    let program = match P::try_parse() {
        Ok(program) => program,
        Err(error) => {
            let command = match error.get(ContextKind::InvalidSubcommand) {
                Some(ContextValue::String(command)) => command.as_str(),
                _ => return usage(&error),
            };
            return P::unknown(command)
                .map_or_else(|| usage(&error), |failure| failed(&failure, command, asks_for_json()));
        }
    };
    let console = program.console();
    match program.run(console) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failed(&failure, program.command(), console.json),
    }
}

/// Prints why a command failed: on stderr, and as a JSON object if `--json` is set and the command printed none.
fn failed(failure: &Failure, command: &str, json: bool) -> ExitCode {
    let class = failure.class();
    if class != Class::StdoutClosed {
        failure.print();
        if json && !failure.is_reported() {
            print(Some(command), &failure.report());
        }
    }
    ExitCode::from(class.exit_code())
}

/// Prints help or a usage error, as a JSON object, too, if `--json` is set.
fn usage(error: &clap::Error) -> ExitCode {
    // stdout or stderr may be closed; the exit status still reports the error.
    let _ = error.print();
    if error.use_stderr() && asks_for_json() {
        let text = error.render().to_string();
        let (message, help) = text.split_once("\n\n").unwrap_or((&text, ""));
        let message = message.trim_start_matches("error: ").trim_end();
        let help = Some(help.trim_end().to_owned()).filter(|help| !help.is_empty());
        let report = ErrorReport { help, ..Failure::new("usage", message, "").report() };
        print(std::env::args().skip(1).find(|argument| !argument.starts_with('-')).as_deref(), &report);
    }
    ExitCode::from(if error.use_stderr() { Class::Failed.exit_code() } else { 0 })
}

/// Whether the arguments contain `--json`, for arguments that could not be parsed.
fn asks_for_json() -> bool {
    std::env::args_os().any(|argument| argument == "--json")
}

fn print(command: Option<&str>, error: &ErrorReport) {
    let document =
        serde_json::json!({ "command": command, "unweight_version": env!("CARGO_PKG_VERSION"), "error": error });
    let _ = writeln!(std::io::stdout(), "{document:#}");
}
