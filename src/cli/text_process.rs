//! The text process: this program again, for `generate` and `serve`. `docs/adr/0021-text-process.md`.

use std::{
    env, io,
    process::{Command, ExitCode},
    sync::{Arc, atomic::AtomicBool},
};

use unweight::text::run_text_process;

use super::API_KEY;

/// The argument that makes this program a text process. It is no command: users have no use for it.
const ARGUMENT: &str = "text-process";

/// What starts a text process. The environment keeps no API key.
pub fn command() -> io::Result<Command> {
    // Where there is such a link, it is this program even if its file was replaced.
    let link = "/proc/self/exe";
    let mut command = if cfg!(target_os = "linux") { Command::new(link) } else { Command::new(env::current_exe()?) };
    command.arg(ARGUMENT);
    command.env_remove(API_KEY);
    Ok(command)
}

/// Runs a text process, if the arguments ask for one.
pub fn answer() -> Option<ExitCode> {
    let mut arguments = env::args_os().skip(1);
    if arguments.next()? != ARGUMENT || arguments.next().is_some() {
        return None;
    }
    let unused = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP] {
        // A signal to a whole group or service ends the program, which decides when this process ends.
        let _ = signal_hook::flag::register(signal, Arc::clone(&unused));
    }
    Some(run_text_process())
}
