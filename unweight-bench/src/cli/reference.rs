//! Checks that `commands.txt` has the help texts of the program, for reviews and for the lint of words. `UPDATE_DOCS=1`
//! rewrites it.

use std::{env, fs, path::Path};

use clap::CommandFactory;

use super::Cli;

#[test]
fn commands_are_those_of_the_program() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = package.join("commands.txt");
    let reference = fs::read_to_string(package.join("../docs/reference/cli.md")).unwrap();
    let now = format!("{}\n", unweight::cli::markdown(Cli::command(), &reference).trim());
    if env::var_os("UPDATE_DOCS").is_some_and(|value| !value.is_empty()) {
        fs::write(&path, now).unwrap();
    } else {
        assert_eq!(fs::read_to_string(path).unwrap(), now, "UPDATE_DOCS=1 cargo test -p unweight-bench -- reference");
    }
}

/// Help shows lists of defaults as they are written on the command line.
#[test]
fn default_batches_are_split() {
    for (name, batches) in [("speculate", &[1, 2, 4, 8][..]), ("report", &unweight_bench::BATCHES)] {
        let matches = Cli::command().try_get_matches_from(["unweight-bench", name]).unwrap();
        let found = matches.subcommand().unwrap().1.get_many::<u32>("batch").unwrap();
        assert_eq!(found.copied().collect::<Vec<_>>(), batches, "{name}");
        let shown = batches.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let help = Cli::command().find_subcommand_mut(name).unwrap().render_help().to_string();
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(help.contains(&format!("[default: {shown}]")), "{help}");
    }
}
