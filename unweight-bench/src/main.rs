//! The `unweight-bench` command.

mod cli;

fn main() -> std::process::ExitCode {
    unweight::cli::run::<cli::Cli>(|| Ok(false))
}
