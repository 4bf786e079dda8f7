//! The command-line program: the list of commands and their dispatch. Each command has a module of its own.
//!
//! Results go to stdout, everything else to stderr. Exit status: 0 on success; 1 if data does not match or is damaged;
//! 2 if the command failed, wrong usage included; 128 plus the signal number if a signal interrupted it.
//! `docs/reference/json.md` lists the keys of `--json`.

mod absent;
#[cfg(feature = "gpu")]
mod arch;
mod archive;
#[cfg(feature = "gpu")]
mod budget;
#[cfg(feature = "gpu")]
mod cache;
#[cfg(feature = "hub")]
mod card;
pub mod common;
mod completions;
mod compress;
#[cfg(feature = "dfloat11")]
mod convert;
mod decompress;
mod demo;
#[cfg(feature = "gpu")]
mod doctor;
mod extract;
pub mod failure;
#[cfg(all(feature = "gpu", feature = "text"))]
mod generate;
mod hub;
mod inspect;
#[cfg(feature = "gpu")]
mod kernels;
mod man;
mod merge;
pub mod output;
#[cfg(feature = "gpu")]
pub mod pipelines;
mod plan;
pub mod plot;
mod printable;
mod program;
mod progress;
#[cfg(feature = "sign")]
mod prove;
#[cfg(feature = "hub")]
mod push;
mod reference;
mod report;
mod scratch;
mod select;
#[cfg(feature = "serve")]
mod serve;
mod sign;
mod signals;
mod size;
mod source;
#[cfg(all(feature = "gpu", feature = "text"))]
mod text_process;
#[cfg(feature = "gpu")]
pub mod trust;
#[cfg(feature = "gpu")]
mod tune;
mod verify;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use failure::{Failure, Result};
use output::Console;
pub use program::{GlobalOptions, Program, run};
pub use reference::markdown;
pub use select::profile;

/// The environment variable that holds the API key of `serve`.
#[cfg(feature = "gpu")]
const API_KEY: &str = "UNWEIGHT_API_KEY";

/// Stores BF16 language model weights losslessly in about two thirds to three quarters of the space.
#[derive(Parser)]
#[command(name = "unweight", version, propagate_version = true, max_term_width = 120, after_help = absent::commands())]
pub struct Cli {
    #[command(flatten)]
    global: GlobalOptions,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Compress a model directory to a bundle
    Compress(compress::Compress),
    /// Join the parts of `compress --part` into one bundle
    Merge(merge::Merge),
    /// Convert to a DFloat11 directory, or from one to the BF16 model
    #[cfg(feature = "dfloat11")]
    Convert(convert::Convert),
    /// Predict sizes and encodings from headers and samples; writes nothing
    Plan(plan::Plan),
    /// Choose an encoding per tensor so that a model fits in the given GPU memory
    #[cfg(feature = "gpu")]
    Budget(budget::Budget),
    /// Measure the fastest pipelines for MLPs that stay as the bundle stores them
    #[cfg(feature = "gpu")]
    Tune(tune::Tune),
    /// Restore the original files, byte for byte
    Decompress(decompress::Decompress),
    /// Check every byte of a bundle; exit status 0: sound, 1: damaged, 2: could not check
    Verify(verify::Verify),
    /// Show the tensors of a bundle; list or plot their statistics
    Inspect(inspect::Inspect),
    /// Write the original bytes of one tensor or file
    Extract(extract::Extract),
    /// Certify that a bundle has every bit of its source, or check a certificate
    #[cfg(feature = "sign")]
    Prove(prove::Prove),
    /// Verify a bundle and write its model card
    #[cfg(feature = "hub")]
    Card(card::Card),
    /// Upload a bundle to the Hugging Face Hub
    #[cfg(feature = "hub")]
    Push(push::Push),
    /// Generate text with a compressed model, on the GPU
    #[cfg(all(feature = "gpu", feature = "text"))]
    Generate(generate::Generate),
    /// Serve a compressed model over the OpenAI HTTP API, on the GPU
    #[cfg(feature = "serve")]
    Serve(serve::Serve),
    /// Write a small model, compress, verify, decompress and compare it
    Demo(demo::Demo),
    /// List, print, compile and check the GPU kernels
    #[cfg(feature = "gpu")]
    #[command(subcommand)]
    Kernels(kernels::Kernels),
    /// List, verify and prune the cache of compiled kernels
    #[cfg(feature = "gpu")]
    #[command(subcommand)]
    Cache(cache::Cache),
    /// Check drivers and libraries, and report what is unavailable without them
    #[cfg(feature = "gpu")]
    Doctor(doctor::Doctor),
    /// Write the manual pages to a directory
    Man(man::Man),
    /// Print a shell completion script: source <(unweight completions bash)
    Completions(completions::Completions),
}

impl Command {
    /// The name of the command in the JSON output.
    fn name(&self) -> &'static str {
        match self {
            Self::Compress(_) => "compress",
            Self::Merge(_) => "merge",
            #[cfg(feature = "dfloat11")]
            Self::Convert(_) => "convert",
            Self::Plan(_) => "plan",
            #[cfg(feature = "gpu")]
            Self::Budget(_) => "budget",
            #[cfg(feature = "gpu")]
            Self::Tune(_) => "tune",
            Self::Decompress(_) => "decompress",
            Self::Verify(_) => "verify",
            Self::Inspect(_) => "inspect",
            Self::Extract(_) => "extract",
            #[cfg(feature = "sign")]
            Self::Prove(_) => "prove",
            #[cfg(feature = "hub")]
            Self::Card(_) => "card",
            #[cfg(feature = "hub")]
            Self::Push(_) => "push",
            #[cfg(all(feature = "gpu", feature = "text"))]
            Self::Generate(_) => "generate",
            #[cfg(feature = "serve")]
            Self::Serve(_) => "serve",
            Self::Demo(_) => "demo",
            #[cfg(feature = "gpu")]
            Self::Kernels(command) => command.name(),
            #[cfg(feature = "gpu")]
            Self::Cache(command) => command.name(),
            #[cfg(feature = "gpu")]
            Self::Doctor(_) => "doctor",
            Self::Man(_) => "man",
            Self::Completions(_) => "completions",
        }
    }

    fn run(&self, console: Console) -> Result<()> {
        match self {
            Self::Compress(command) => command.run(console),
            Self::Merge(command) => command.run(console),
            #[cfg(feature = "dfloat11")]
            Self::Convert(command) => command.run(console),
            Self::Plan(command) => command.run(console),
            #[cfg(feature = "gpu")]
            Self::Budget(command) => command.run(console),
            #[cfg(feature = "gpu")]
            Self::Tune(command) => command.run(console),
            Self::Decompress(command) => command.run(console),
            Self::Verify(command) => command.run(console),
            Self::Inspect(command) => command.run(console),
            Self::Extract(command) => command.run(console),
            #[cfg(feature = "sign")]
            Self::Prove(command) => command.run(console),
            #[cfg(feature = "hub")]
            Self::Card(command) => command.run(console),
            #[cfg(feature = "hub")]
            Self::Push(command) => command.run(console),
            #[cfg(all(feature = "gpu", feature = "text"))]
            Self::Generate(command) => command.run(console),
            #[cfg(feature = "serve")]
            Self::Serve(command) => command.run(console),
            Self::Demo(command) => command.run(console),
            #[cfg(feature = "gpu")]
            Self::Kernels(command) => command.run(console),
            #[cfg(feature = "gpu")]
            Self::Cache(command) => command.run(console),
            #[cfg(feature = "gpu")]
            Self::Doctor(command) => command.run(console),
            Self::Man(command) => command.run(console),
            Self::Completions(command) => command.run(console),
        }
    }
}

impl Program for Cli {
    fn console(&self) -> Console {
        self.global.console()
    }

    fn command(&self) -> &'static str {
        self.command.name()
    }

    fn run(&self, console: Console) -> Result<()> {
        self.command.run(console)
    }

    fn unknown(command: &str) -> Option<Failure> {
        absent::command(command)
    }
}

/// Runs the `unweight` command.
pub fn main() -> ExitCode {
    #[cfg(all(feature = "gpu", feature = "text"))]
    if let Some(code) = text_process::run_if_requested() {
        return code;
    }
    run::<Cli>(completions::complete_if_requested)
}
