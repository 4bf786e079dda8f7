//! The text process: `generate` and `serve` start this program again to run untrusted tokenizers. See
//! `docs/adr/0021-text-process.md`.

use std::{
    env, io,
    process::{Command, ExitCode},
    sync::{Arc, atomic::AtomicBool},
};

use unweight::text::run_text_process;

use super::API_KEY;

/// The argument that makes this program a text process. It is not a command, because users do not need it.
const ARGUMENT: &str = "text-process";

/// Returns the command that starts a text process. Its environment has no API key.
pub fn command() -> io::Result<Command> {
    // On Linux this link is this program, even if its file was replaced.
    let link = "/proc/self/exe";
    let mut command = if cfg!(target_os = "linux") { Command::new(link) } else { Command::new(env::current_exe()?) };
    command.arg(ARGUMENT);
    command.env_remove(API_KEY);
    Ok(command)
}

/// Runs a text process if the arguments request one.
pub fn run_if_requested() -> Option<ExitCode> {
    let mut arguments = env::args_os().skip(1);
    if arguments.next()? != ARGUMENT || arguments.next().is_some() {
        return None;
    }
    let unused = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP] {
        // A signal to a process group or service ends the parent, which decides when this process ends.
        let _ = signal_hook::flag::register(signal, Arc::clone(&unused));
    }
    Some(run_text_process())
}
