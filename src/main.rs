//! The `unweight` command.

fn main() -> std::process::ExitCode {
    unweight::cli::main()
}
