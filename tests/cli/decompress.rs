//! `decompress` restores every file byte for byte.

use crate::harness::{copy, fixture, run, same, stderr, stdout};

#[test]
fn restores_every_byte() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    let output = run(home.path(), &["compress", "model", "-o", "bundle", "--verify", "full", "--sha256"], 0);
    assert!(stdout(&output).contains("huffman"), "{}", stdout(&output));
    assert_eq!(stderr(&output), "", "no terminal, no progress");
    run(home.path(), &["verify", "bundle", "--against", "model"], 0);
    let output = run(home.path(), &["decompress", "bundle", "-o", "restored"], 0);
    assert!(stdout(&output).contains("sha256:"));
    same(&home.path().join("model"), &home.path().join("restored"));
}
