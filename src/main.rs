//! The `unweight` command.

mod cli;

fn main() -> std::process::ExitCode {
    unweight::format::raw::keep_freed_memory();
    cli::main()
}
