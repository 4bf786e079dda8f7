//! `man`: manual pages.

use std::fs;

use crate::harness::{documented, json, run};

#[test]
fn writes_a_page_for_every_command() {
    let home = tempfile::tempdir().unwrap();
    let report = json(&run(home.path(), &["man", "deep/man1", "--json"], 0));
    documented("man", &report);
    let pages: Vec<&str> = report["pages"].as_array().unwrap().iter().map(|page| page.as_str().unwrap()).collect();
    for page in ["unweight.1", "unweight-compress.1", "unweight-kernels-compile.1", "unweight-cache-prune.1"] {
        assert!(pages.contains(&page), "{page} in {pages:?}");
    }
    for page in &pages {
        let text = fs::read_to_string(home.path().join("deep/man1").join(page)).unwrap();
        assert!(text.contains(".TH ") && text.contains(".SH SYNOPSIS"), "{page}");
    }
    let text = fs::read_to_string(home.path().join("deep/man1/unweight-compress.1")).unwrap();
    assert!(text.contains("\\-\\-code\\-limit") && text.contains("Replace an existing output"), "{text}");
    let (_, synopsis) = text.split_once(".SH SYNOPSIS\n").unwrap();
    let synopsis = synopsis.lines().next().unwrap();
    assert_eq!(synopsis, r"unweight compress [OPTIONS] \-\-output <DIR> <SOURCE>...");
    // Existing pages are overwritten.
    run(home.path(), &["man", "deep/man1"], 0);
    fs::write(home.path().join("file"), "").unwrap();
    run(home.path(), &["man", "file"], 2);
}
