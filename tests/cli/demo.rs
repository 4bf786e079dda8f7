//! `demo`: the whole round trip and its temporary files.

use std::{
    fs,
    process::Stdio,
    time::{Duration, Instant},
};

use crate::harness::{error_code, fails, run, same, stdout, unweight};

#[test]
fn restores_identical_files() {
    let home = tempfile::tempdir().unwrap();
    let output = run(home.path(), &["demo", "--size", "2M", "--dir", "kept"], 0);
    assert!(stdout(&output).contains("identical, byte for byte"), "{}", stdout(&output));
    same(&home.path().join("kept/model"), &home.path().join("kept/restored"));
    fails(home.path(), &["demo", "--size", "2M", "--dir", "kept"], 2, "directory-not-empty");
}

#[test]
fn checks_free_space_and_removes_files_of_killed_runs() {
    let home = tempfile::tempdir().unwrap();
    let demo = |size: &str| {
        let mut command = unweight(&["demo", "--size", size]);
        command.env("TMPDIR", home.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let output = demo("900T").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(error_code(&output), "disk-full");
    let left = || fs::read_dir(home.path()).unwrap().count();
    assert_eq!(left(), 0, "nothing is written before");
    let mut child = demo("256M").spawn().unwrap();
    let start = Instant::now();
    while left() == 0 && start.elapsed() < Duration::from_secs(30) {
        std::thread::sleep(Duration::from_millis(1));
    }
    // Wait until it holds its lock.
    std::thread::sleep(Duration::from_millis(50));
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(left(), 1, "what a kill leaves");
    assert!(demo("1M").status().unwrap().success());
    assert_eq!(left(), 0, "the next demo removes it");
}
