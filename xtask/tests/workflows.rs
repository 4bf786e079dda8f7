//! Checks that tasks of xtask and scripts of `.ci` exist that workflows, scripts and documents call, and that
//! workflows pin what they run.

use std::{collections::BTreeSet, fs, path::PathBuf};

mod workspace;

use workspace::{files, read, root, shown};

/// Returns the tasks that `main` runs.
fn tasks() -> BTreeSet<String> {
    let main = read(&root().join("xtask/src/main.rs"));
    let arms = main.split("match task {").nth(1).and_then(|rest| rest.split("other =>").next()).expect("the tasks");
    let names = arms.lines().filter_map(|line| line.trim().strip_prefix('"')?.split('"').next());
    names.map(str::to_owned).collect()
}

/// Returns the words that follow `before` in a text.
fn words_after<'a>(text: &'a str, before: &str) -> Vec<&'a str> {
    let end = |rest: &'a str| rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '-')).unwrap_or(rest.len());
    text.split(before).skip(1).map(|rest| &rest[..end(rest)]).filter(|word| !word.is_empty()).collect()
}

fn workflows() -> Vec<PathBuf> {
    let folder = root().join(".github/workflows");
    fs::read_dir(folder).expect("workflows").map(|entry| entry.expect("a workflow").path()).collect()
}

fn faults(text: &str, tasks: &BTreeSet<String>) -> Vec<String> {
    let unknown = ["cargo xtask ", "cargo +1.95.0 xtask ", "debug/xtask\" "].into_iter();
    let unknown = unknown.flat_map(|before| words_after(text, before));
    let mut found: Vec<String> =
        unknown.filter(|task| !tasks.contains(*task)).map(|task| format!("task {task} does not exist")).collect();
    let scripts = words_after(text, ".ci/").into_iter().filter(|script| !root().join(".ci").join(script).is_file());
    found.extend(scripts.map(|script| format!(".ci/{script} does not exist")));
    found
}

#[test]
fn tasks_and_scripts_exist() {
    let tasks = tasks();
    assert!(tasks.contains("dist") && tasks.len() > 10, "{tasks:?}");
    let mut all = files(&["docs", "bindings", "examples"], &["md"], &["records"]);
    all.extend(["README.md", "CONTRIBUTING.md", "Containerfile", "install.sh"].map(|name| root().join(name)));
    all.extend(["nightly", "publish", "release", "run"].map(|name| root().join(".ci").join(name)));
    all.extend(workflows());
    let found = all
        .iter()
        .flat_map(|path| faults(&read(path), &tasks).into_iter().map(move |fault| format!("{}: {fault}", shown(path))));
    assert_eq!(found.collect::<Vec<_>>(), [""; 0]);
    let planted = "run: cargo xtask dits\nrun: .ci/rnu\nrun: cargo xtask dist";
    assert_eq!(faults(planted, &tasks), ["task dits does not exist", ".ci/rnu does not exist"]);
}

/// The only actions, which pass files between jobs of different rights, at the commits of 4.6.2 and 4.3.0.
const ACTIONS: [&str; 2] = [
    "actions/upload-artifact@ea165f8d65b6e75b540449e92b4886f43607fa02",
    "actions/download-artifact@d3f86a106a0bac45b974a628896c90dbdf5c8093",
];

/// Returns the jobs of a workflow: their names and their text.
fn jobs(text: &str) -> Vec<(&str, &str)> {
    let is_name = |line: &str| line.starts_with("  ") && !line.starts_with("   ") && line.ends_with(':');
    let jobs = text.split_once("\njobs:\n").expect("jobs").1;
    let mut starts: Vec<usize> = jobs.match_indices("  ").map(|(at, _)| at).collect();
    starts.retain(|&at| (at == 0 || jobs[..at].ends_with('\n')) && jobs[at..].lines().next().is_some_and(is_name));
    let ends = starts.iter().skip(1).copied().chain([jobs.len()]);
    starts.iter().zip(ends).map(|(&at, end)| (jobs[at..end].lines().next().unwrap().trim(), &jobs[at..end])).collect()
}

/// What a job that may write must not do: install the newest version of something that it then runs.
fn unpinned(job: &str) -> Vec<&str> {
    let installs =
        job.lines().map(str::trim).filter(|line| line.contains("cargo install ") || line.contains("pip install "));
    installs
        .filter(|line| {
            let packages = line.split("install ").nth(1).unwrap_or_default().split(' ');
            let mut packages = packages.filter(|word| !word.is_empty() && !word.starts_with('-'));
            !packages.all(|package| package.contains("==") || package.contains('@'))
        })
        .collect()
}

#[test]
fn workflows_use_pinned_tools_and_the_compiler_of_a_release() {
    assert!(workflows().len() >= 2);
    let script = read(&root().join(".ci/release"));
    let compiler = script.split("RUSTUP_TOOLCHAIN=").nth(1).and_then(|rest| rest.split(' ').next()).expect("a version");
    assert!(read(&root().join(".ci/publish")).contains(&format!("RUSTUP_TOOLCHAIN={compiler}\n")), "Rust {compiler}");
    for path in workflows() {
        let text = read(&path);
        let uses = text.lines().filter_map(|line| line.trim_start_matches([' ', '-']).strip_prefix("uses: "));
        for action in uses.filter_map(|action| action.split(' ').next()) {
            assert!(ACTIONS.contains(&action), "{}: {action}", shown(&path));
        }
        for version in text.split("toolchain install ").skip(1).filter_map(|rest| rest.split(' ').next()) {
            assert!(["stable", compiler].contains(&version), "{}: Rust {version}", shown(&path));
        }
        for version in text.split("cargo +").skip(1).filter_map(|rest| rest.split(' ').next()) {
            assert_eq!(version, compiler, "{}", shown(&path));
        }
        assert_eq!(unpinned(&text), [""; 0], "{}", shown(&path));
        // A private repository, as in a rehearsal, asks for the token; git gets it from gh, in this step alone.
        for step in text.split("- name: Check out\n").skip(1) {
            let step = step.split("- name: ").next().unwrap_or_default();
            assert!(step.contains("GH_TOKEN: ${{ github.token }}") && step.contains("gh auth setup-git"), "{step}");
        }
        // Both are needed to test the files of a release in clean systems.
        assert_eq!(text.contains(" debootstrap "), text.contains(" qemu-user-static "), "{}", shown(&path));
    }
    assert_eq!(unpinned("run: cargo install --locked a@1 b\npip install c==2"), ["run: cargo install --locked a@1 b"]);
}

/// Jobs that compile can write nothing, and those that write compile nothing and give their token to single steps.
#[test]
fn jobs_of_a_release_have_few_rights() {
    let text = read(&root().join(".github/workflows/release.yml"));
    let jobs = jobs(&text);
    let names: Vec<&str> = jobs.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, ["build:", "attest:", "draft:", "publish:", "book:", "pages:"]);
    for (name, job) in jobs {
        let writes = job.contains(": write");
        assert_eq!(job.contains(".ci/release"), name == "build:", "{name}");
        let compiles = ["cargo install", "cargo +", ".ci/release", "mdbook build"];
        assert_eq!(writes, !compiles.iter().any(|command| job.contains(command)), "{name}");
        assert!(!job.contains("\n    env:"), "{name} has variables for all its steps");
        let has_both = job.contains("contents: write") && job.contains("id-token: write");
        assert_eq!(has_both, name == "publish:", "{name}");
    }
    let publish = read(&root().join(".ci/publish"));
    let mut commands =
        publish.lines().filter(|line| ["cargo publish ", "cargo package "].iter().any(|of| line.contains(of)));
    assert!(commands.all(|line| line.contains("--no-verify")), ".ci/publish compiles packages");
    let at = |part: &str| text.find(part).unwrap_or_else(|| panic!("no '{part}'"));
    // What is easier to repeat comes last.
    assert!(at(".ci/publish crates") < at("uv publish") && at("uv publish") < at(".ci/publish compare"));
}
