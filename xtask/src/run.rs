//! Runs commands, and locates directories.

use std::{
    env,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// Returns the workspace root.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the directory of xtask has a parent")
}

/// Returns the directory of a prepared environment. It is under the workspace even if `CARGO_TARGET_DIR` is elsewhere,
/// because tests expect it here.
pub fn target_dir(name: &str) -> PathBuf {
    root().join("target").join(name)
}

/// Returns the directory of data that is too large to fetch for every checkout: in the user's cache, or else as
/// [`target_dir`].
pub fn cache_dir(name: &str) -> PathBuf {
    let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = cache.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache")));
    cache.map_or_else(|| target_dir(name), |cache| cache.join("unweight-xtask").join(name))
}

/// Returns a command for the cargo that runs this program.
pub fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    command
}

/// Prints and runs a command. Fails unless the command succeeds.
pub fn run(command: &mut Command) -> Result<(), String> {
    eprintln!("$ {}", command_line(command));
    let status = command.status().map_err(|error| format!("{}: {error}", command_line(command)))?;
    if status.success() { Ok(()) } else { Err(format!("`{}` failed: {status}", command_line(command))) }
}

/// Returns the command's stdout. Fails unless the command succeeds.
pub fn output(command: &mut Command) -> Result<String, String> {
    let output =
        command.stderr(Stdio::inherit()).output().map_err(|error| format!("{}: {error}", command_line(command)))?;
    if !output.status.success() {
        return Err(format!("`{}` failed: {}", command_line(command), output.status));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
}

/// Returns whether the command starts and succeeds. Hides its output.
pub fn succeeds(command: &mut Command) -> bool {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|s| s.success())
}

/// Returns git's output in this repository.
pub fn git(arguments: &[&str]) -> Result<String, String> {
    if !succeeds(Command::new("git").current_dir(root()).args(["rev-parse", "HEAD"])) {
        return Err("this is not a git repository with a commit; build a release from a checkout".to_owned());
    }
    output(Command::new("git").current_dir(root()).args(arguments))
}

/// Reads a file.
pub fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// Fails if there are arguments.
pub fn no_arguments(arguments: &[String]) -> Result<(), String> {
    match arguments.first() {
        None => Ok(()),
        Some(argument) => Err(format!("unexpected argument '{argument}'; see `cargo xtask help`")),
    }
}

/// Returns whether the only argument is `--if-prepared`, which skips whatever would have to be fetched.
pub fn if_prepared(arguments: &[String]) -> Result<bool, String> {
    match arguments {
        [flag] if flag == "--if-prepared" => Ok(true),
        _ => no_arguments(arguments).map(|()| false),
    }
}

/// Returns the command as one line of text.
pub fn command_line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}
