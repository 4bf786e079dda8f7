//! Commands and options that need a feature which this build lacks.

use super::failure::Failure;

/// Commands that need more than feature `cli`: name, group, whether this build has it, and the required features.
const COMMANDS: [(&str, &str, bool, &str); 11] = [
    ("cache", "GPU commands", cfg!(feature = "gpu"), "gpu"),
    ("card", "commands for the Hub", cfg!(feature = "hub"), "hub"),
    ("convert", "commands for DFloat11", cfg!(feature = "dfloat11"), "dfloat11"),
    ("doctor", "GPU commands", cfg!(feature = "gpu"), "gpu"),
    ("budget", "GPU commands", cfg!(feature = "gpu"), "gpu"),
    ("generate", "text generation", cfg!(all(feature = "gpu", feature = "text")), "gpu,text"),
    ("kernels", "GPU commands", cfg!(feature = "gpu"), "gpu"),
    ("prove", "certificates", cfg!(feature = "sign"), "sign"),
    ("push", "commands for the Hub", cfg!(feature = "hub"), "hub"),
    ("serve", "HTTP server", cfg!(feature = "serve"), "serve"),
    ("tune", "GPU commands", cfg!(feature = "gpu"), "gpu"),
];

/// Returns why a command is unknown, if a build with other features has it.
pub fn command(name: &str) -> Option<Failure> {
    let (_, what, _, features) =
        COMMANDS.into_iter().find(|(command, _, available, _)| *command == name && !available)?;
    Some(without(&format!("this build has no {what} (`unweight {name}`)"), features))
}

/// Returns the note for `--help` on commands that this build lacks.
pub fn commands() -> String {
    let names: Vec<_> = COMMANDS.into_iter().filter(|(.., available, _)| !available).map(|(name, ..)| name).collect();
    if names.is_empty() {
        return String::new();
    }
    format!("Not in this build: {}. Install with --features full for all commands.", names.join(", "))
}

/// Returns the failure for an option whose feature this build lacks.
pub fn option(option: &str, feature: &str) -> Failure {
    without(&format!("this build does not support {option}"), feature)
}

fn without(message: &str, features: &str) -> Failure {
    Failure::new("feature-missing", message, format!("install with --features full, or --features {features}"))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::cli::Cli;

    #[test]
    fn each_command_is_here_or_named_with_its_feature() {
        let names: Vec<String> =
            Cli::command().get_subcommands().map(|command| command.get_name().to_owned()).collect();
        for (name, _, available, features) in COMMANDS {
            assert_eq!(names.iter().any(|found| found == name), available, "{name}");
            match command(name) {
                None => assert!(available, "{name}"),
                Some(failure) => {
                    let text = failure.text(false);
                    assert!(text.contains(name) && text.contains(&format!("--features {features}")), "{text}");
                    assert!(commands().contains(name), "{name}");
                }
            }
        }
        assert!(command("demo").is_none() && command("no-such-command").is_none());
    }
}
