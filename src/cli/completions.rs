//! `unweight completions`, and what a shell asks when somebody presses the tab key.

use std::{env, io::Write, path::Path};

use clap::{Args, CommandFactory};
use clap_complete::{
    Shell,
    engine::CompletionCandidate,
    env::{CompleteEnv, Shells},
};
use unweight::{
    codegen::spec::{Arch, catalog},
    format::bundle::{Bundle, Profile, Scope, manifest::FILE_NAME},
};

use super::{
    Cli,
    failure::{Failure, Result},
    output::Output,
};

/// A shell that asks for completions sets this.
const VARIABLE: &str = "_UNWEIGHT_COMPLETE";

/// Arguments of `completions`.
#[derive(Args)]
pub struct Completions {
    /// The shell
    shell: Shell,
}

impl Completions {
    /// Runs it. A script is a script: `--json` does not change it.
    pub fn run(&self, _: Output) -> Result<()> {
        let shells = Shells::builtins();
        let name = self.shell.to_string();
        let shell = shells.completer(&name);
        let shell = shell.ok_or_else(|| Failure::new(format!("no completions for {name}"), "use another shell"))?;
        let mut script = Vec::new();
        shell.write_registration(VARIABLE, "unweight", "unweight", "unweight", &mut script)?;
        std::io::stdout().lock().write_all(&script)?;
        Ok(())
    }
}

/// Answers a shell, if one asks. True if that was all there is to do.
pub fn answer() -> std::result::Result<bool, clap::Error> {
    let environment = CompleteEnv::with_factory(Cli::command).var(VARIABLE);
    environment.try_complete(env::args_os(), env::current_dir().ok().as_deref())
}

/// What `--profile` takes.
pub fn profiles() -> Vec<CompletionCandidate> {
    Profile::ALL.iter().map(|profile| CompletionCandidate::new(profile.name())).collect()
}

/// What `--scope` takes.
pub fn scopes() -> Vec<CompletionCandidate> {
    Scope::ALL.iter().map(|scope| CompletionCandidate::new(scope.name())).collect()
}

/// Kernels that ship.
pub fn kernels() -> Vec<CompletionCandidate> {
    catalog::all(Arch::Sm90a).iter().map(|spec| CompletionCandidate::new(spec.name().to_string())).collect()
}

/// Tensors of the bundle on the command line.
pub fn tensors() -> Vec<CompletionCandidate> {
    let Some(bundle) = bundle() else { return Vec::new() };
    bundle.tensors().filter_map(|tensor| candidate(&tensor.entry.name)).collect()
}

/// Files that this bundle was made of.
pub fn files() -> Vec<CompletionCandidate> {
    let Some(bundle) = bundle() else { return Vec::new() };
    bundle.manifest().files.iter().filter_map(|file| candidate(file.name())).collect()
}

/// A name out of a bundle, if a shell takes it as it is. Shells insert candidates unquoted: any other name could be a
/// command, or control the terminal.
fn candidate(name: &str) -> Option<CompletionCandidate> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._/@+:-".contains(&byte);
    let harmless = name.bytes().all(plain) && !name.starts_with('-');
    harmless.then(|| CompletionCandidate::new(name))
}

/// The first word of the line that is completed that is a bundle.
fn bundle() -> Option<Bundle> {
    let words = env::args_os().skip_while(|word| word != "--");
    let mut bundles = words.filter(|word| Path::new(word).join(FILE_NAME).is_file());
    Bundle::open(Path::new(&bundles.next()?)).ok()
}
