//! The command line: arguments, and where each command lives.
//!
//! Data goes to stdout, everything else to stderr. Exit status: 0 done, 1 data is not what it should be, 2 the work
//! could not be done (wrong usage included), 128 and the number of the signal that interrupted. `docs/cli.md` lists the
//! keys of `--json`.

mod archive;
mod bench;
mod cache;
mod completions;
mod compress;
mod convert;
mod decompress;
mod demo;
mod doctor;
mod extract;
mod failure;
mod fit;
mod generate;
mod inspect;
mod kernels;
mod man;
mod merge;
mod output;
mod pipelines;
mod plan;
mod plot;
mod progress;
mod scratch;
mod select;
mod serve;
mod sign;
mod size;
mod source;
mod trust;
mod tune;
mod verify;

use std::{io::Write, process::ExitCode};

use clap::{ArgAction, Parser, Subcommand};

use failure::{Class, Result};
use output::Output;

/// Stores BF16 language model weights losslessly in about two thirds of the space.
#[derive(Parser)]
#[command(name = "unweight", version, propagate_version = true, max_term_width = 120)]
pub struct Cli {
    /// Print one JSON object on stdout (docs/cli.md lists the keys)
    #[arg(long, global = true, help_heading = "Everywhere")]
    json: bool,
    /// Print only what was asked for, and errors
    #[arg(short, long, global = true, conflicts_with = "verbose", help_heading = "Everywhere")]
    quiet: bool,
    /// Name each file on stderr; twice: each tensor
    #[arg(short, long, global = true, action = ArgAction::Count, help_heading = "Everywhere")]
    verbose: u8,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Compress a model directory to a bundle
    Compress(compress::Compress),
    /// Join the parts that compress --shard made to one bundle
    Merge(merge::Merge),
    /// Make a DFloat11 directory of a model or a bundle, or the BF16 model that one was made of
    Convert(convert::Convert),
    /// Predict what compress would do, from headers and samples
    Plan(plan::Plan),
    /// Find which tensors to store how, so that a model fits a memory
    Fit(fit::Fit),
    /// Find the fastest way to run a bundle's MLPs as they are stored, on the GPU
    Tune(tune::Tune),
    /// Rebuild the original files, byte for byte
    Decompress(decompress::Decompress),
    /// Check every byte of a bundle: exit 0 sound, 1 damaged, 2 could not check
    Verify(verify::Verify),
    /// Show a bundle tensor by tensor; draw or list its statistics
    Inspect(inspect::Inspect),
    /// Write the original bytes of one tensor
    Extract(extract::Extract),
    /// Continue a text with a compressed model, on the GPU
    Generate(generate::Generate),
    /// Answer OpenAI's API with a compressed model, on the GPU
    Serve(serve::Serve),
    /// Make a small model, compress it, verify, decompress and compare
    Demo(demo::Demo),
    /// List, print, compile and check the GPU kernels
    #[command(subcommand)]
    Kernels(kernels::Kernels),
    /// Measure on this machine
    #[command(subcommand)]
    Bench(bench::Bench),
    /// Look after the cache of compiled kernels
    #[command(subcommand)]
    Cache(cache::Cache),
    /// Show what this machine has, and what each lack disables
    Doctor(doctor::Doctor),
    /// Write the manual pages to a directory
    Man(man::Man),
    /// Print a completion script for a shell: source <(unweight completions bash)
    Completions(completions::Completions),
}

impl Command {
    /// As in the JSON.
    fn name(&self) -> &'static str {
        match self {
            Self::Compress(_) => "compress",
            Self::Merge(_) => "merge",
            Self::Convert(_) => "convert",
            Self::Plan(_) => "plan",
            Self::Fit(_) => "fit",
            Self::Tune(_) => "tune",
            Self::Decompress(_) => "decompress",
            Self::Verify(_) => "verify",
            Self::Inspect(_) => "inspect",
            Self::Extract(_) => "extract",
            Self::Generate(_) => "generate",
            Self::Serve(_) => "serve",
            Self::Demo(_) => "demo",
            Self::Kernels(command) => command.name(),
            Self::Bench(command) => command.name(),
            Self::Cache(command) => command.name(),
            Self::Doctor(_) => "doctor",
            Self::Man(_) => "man",
            Self::Completions(_) => "completions",
        }
    }

    fn run(&self, output: Output) -> Result<()> {
        match self {
            Self::Compress(command) => command.run(output),
            Self::Merge(command) => command.run(output),
            Self::Convert(command) => command.run(output),
            Self::Plan(command) => command.run(output),
            Self::Fit(command) => command.run(output),
            Self::Tune(command) => command.run(output),
            Self::Decompress(command) => command.run(output),
            Self::Verify(command) => command.run(output),
            Self::Inspect(command) => command.run(output),
            Self::Extract(command) => command.run(output),
            Self::Generate(command) => command.run(output),
            Self::Serve(command) => command.run(output),
            Self::Demo(command) => command.run(output),
            Self::Kernels(command) => command.run(output),
            Self::Bench(command) => command.run(output),
            Self::Cache(command) => command.run(output),
            Self::Doctor(command) => command.run(output),
            Self::Man(command) => command.run(output),
            Self::Completions(command) => command.run(output),
        }
    }
}

/// Prints help, or what is wrong with the arguments; as a JSON object where one was asked for.
fn usage(error: &clap::Error) -> ExitCode {
    // stdout or stderr may be closed; the exit status still tells.
    let _ = error.print();
    if error.use_stderr() && std::env::args_os().any(|argument| argument == "--json") {
        let text = error.render().to_string();
        let (message, help) = text.split_once("\n\n").unwrap_or((&text, ""));
        let document = serde_json::json!({
            "command": std::env::args().skip(1).find(|argument| !argument.starts_with('-')),
            "unweight_version": env!("CARGO_PKG_VERSION"),
            "error": {
                "class": Class::Failed,
                "message": message.trim_start_matches("error: ").trim_end(),
                "causes": [],
                "help": Some(help.trim_end()).filter(|help| !help.is_empty()),
            },
        });
        let _ = writeln!(std::io::stdout(), "{document:#}");
    }
    ExitCode::from(if error.use_stderr() { Class::Failed.exit_code() } else { 0 })
}

/// Parses the arguments and runs the command.
pub fn main() -> ExitCode {
    failure::install_handler();
    progress::survive_file_limit();
    match completions::answer() {
        Ok(true) => return ExitCode::SUCCESS,
        Ok(false) => {}
        Err(error) => return usage(&error),
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    let output = Output { json: cli.json, quiet: cli.quiet, verbose: cli.verbose };
    let Err(failure) = cli.command.run(output) else { return ExitCode::SUCCESS };
    let class = failure.class();
    if class != Class::Gone {
        let (report, reported) = (failure.to_json(), failure.is_reported());
        // stderr may be closed; the exit status still tells.
        let _ = writeln!(std::io::stderr(), "{:?}", miette::Report::new(failure));
        if output.json && !reported {
            let document = serde_json::json!({
                "command": cli.command.name(),
                "unweight_version": env!("CARGO_PKG_VERSION"),
                "error": report,
            });
            let _ = writeln!(std::io::stdout(), "{document:#}");
        }
    }
    ExitCode::from(class.exit_code())
}
