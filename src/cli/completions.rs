//! `unweight completions`, and the completion candidates that a shell requests at run time.

#[cfg(feature = "gpu")]
use std::ffi::OsStr;
use std::{env, ffi::OsString, io::Write, path::Path};

use clap::{Args, CommandFactory};
use clap_complete::{
    Shell,
    engine::CompletionCandidate,
    env::{CompleteEnv, Shells},
};
#[cfg(feature = "gpu")]
use unweight::codegen::spec::{Arch, catalog};
use unweight::format::bundle::{Bundle, Profile, Scope, manifest::FILE_NAME};

#[cfg(feature = "gpu")]
use super::arch::{arch_in, local_arch};
use super::{
    Cli,
    failure::{Failure, Result},
    output::Console,
};

/// The environment variable that a shell sets to request completions.
const VARIABLE: &str = "_UNWEIGHT_COMPLETE";

/// Arguments of `completions`.
#[derive(Args)]
pub struct Completions {
    /// Shell to complete for
    shell: Shell,
}

impl Completions {
    /// Prints the script. `--json` does not change it.
    pub fn run(&self, _: Console) -> Result<()> {
        let shells = Shells::builtins();
        let name = self.shell.to_string();
        let shell = shells.completer(&name);
        let shell = shell.ok_or_else(|| {
            Failure::new("shell-unsupported", format!("no completions for {name}"), "use another shell")
        })?;
        let mut script = Vec::new();
        shell.write_registration(VARIABLE, "unweight", "unweight", "unweight", &mut script)?;
        std::io::stdout().lock().write_all(&script)?;
        Ok(())
    }
}

/// Answers a completion request of a shell. Returns true if there was one, and the process can exit.
pub fn complete_if_requested() -> std::result::Result<bool, clap::Error> {
    let environment = CompleteEnv::with_factory(Cli::command).var(VARIABLE);
    environment.try_complete(env::args_os(), env::current_dir().ok().as_deref())
}

/// Returns the values of `--profile`.
pub fn profiles() -> Vec<CompletionCandidate> {
    Profile::ALL.iter().map(|profile| CompletionCandidate::new(profile.name())).collect()
}

/// Returns the values of `--scope`.
pub fn scopes() -> Vec<CompletionCandidate> {
    Scope::ALL.iter().map(|scope| CompletionCandidate::new(scope.name())).collect()
}

/// Returns the shipped kernels of one architecture: the one that this word names, else `--arch`, else this machine's
/// GPU.
#[cfg(feature = "gpu")]
pub fn kernels(word: &OsStr) -> Vec<CompletionCandidate> {
    let word = word.to_string_lossy();
    let line: Vec<String> = line().map(|word| word.to_string_lossy().into_owned()).collect();
    let option = line.iter().enumerate().find_map(|(at, word)| match word.strip_prefix("--arch")? {
        "" => Arch::of_compiler_name(line.get(at + 1)?),
        value => Arch::of_compiler_name(value.strip_prefix('=')?),
    });
    let arch = arch_in(&word).or(option).or_else(local_arch).unwrap_or(Arch::Sm90a);
    let names = catalog::all(arch).into_iter().map(|spec| spec.name().to_string());
    names.filter(|name| name.starts_with(&*word)).map(CompletionCandidate::new).collect()
}

/// Returns the tensors of the bundle on the command line.
pub fn tensors() -> Vec<CompletionCandidate> {
    let Some(bundle) = bundle() else { return Vec::new() };
    bundle.tensors().filter_map(|tensor| candidate(&tensor.entry().name)).collect()
}

/// Returns the source files of the bundle on the command line.
pub fn files() -> Vec<CompletionCandidate> {
    let Some(bundle) = bundle() else { return Vec::new() };
    bundle.manifest().files.iter().filter_map(|file| candidate(file.name())).collect()
}

/// Returns a candidate if a shell can insert the name unquoted. Shells do not quote candidates, so any other name could
/// be a command or control the terminal.
fn candidate(name: &str) -> Option<CompletionCandidate> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._/@+:-".contains(&byte);
    let is_safe = name.bytes().all(is_plain) && !name.starts_with('-');
    is_safe.then(|| CompletionCandidate::new(name))
}

/// Returns the words of the command line that is being completed.
fn line() -> impl Iterator<Item = OsString> {
    env::args_os().skip_while(|word| word != "--")
}

/// Opens the first bundle that the command line names.
fn bundle() -> Option<Bundle> {
    let mut bundles = line().filter(|word| Path::new(word).join(FILE_NAME).is_file());
    Bundle::open_without_base(Path::new(&bundles.next()?)).ok()
}
