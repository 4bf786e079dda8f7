//! `compress --part` and `merge`.

use std::fs;

use crate::harness::{copy, documented, fails, fixture, json, run, same, stderr, stdout};

/// Parts from several machines merge to the bundle that one machine makes.
#[test]
fn parts_give_the_same_bundle() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    run(home.path(), &["compress", "model", "-o", "whole", "--sha256"], 0);
    for part in ["1/3", "2/3", "3/3"] {
        let folder = format!("parts/{}", &part[..1]);
        let arguments = ["compress", "model", "-o", &folder, "--part", part, "--sha256", "--json"];
        let report = json(&run(home.path(), &arguments, 0));
        assert_eq!(report["part"], part);
        documented("compress", &report);
    }
    // There are only two shards for three parts.
    let output = run(home.path(), &["compress", "model", "-o", "empty", "--part", "3/3", "-q"], 0);
    assert_eq!(stderr(&output), "");
    fs::remove_dir_all(home.path().join("empty")).unwrap();
    let text = stderr(&run(home.path(), &["compress", "model", "-o", "empty", "--part", "3/3"], 0));
    assert!(text.contains("part 3/3 has no weights: a file is never split"), "{text}");
    assert!(!text.contains("nothing was compressed"), "{text}");

    let arguments = ["merge", "parts/3", "parts/1", "parts/2", "-o", "bundle", "--json"];
    documented("merge", &json(&run(home.path(), &arguments, 0)));
    same(&home.path().join("whole"), &home.path().join("bundle"));
    let text = fails(home.path(), &["merge", "parts/1", "parts/2", "-o", "other"], 2, "part-missing");
    assert!(text.contains("3/3"), "{text}");
    let text = fails(home.path(), &["verify", "parts/2"], 2, "bundle-not-merged");
    assert!(text.contains("2/3"), "{text}");
    fails(home.path(), &["merge", "parts/1", "parts/2", "parts/3", "-o", "bundle"], 2, "output-exists");
    let again = ["merge", "parts/1", "parts/2", "parts/3", "-o", "bundle", "--force", "--verify", "none"];
    assert!(stdout(&run(home.path(), &again, 0)).contains("of 3 parts"));
    for (wrong, expected) in [
        (&["--part", "4/3"][..], "expected I/N, such as 2/5"),
        (&["--part", "1/2", "--sign", "key"], "cannot be used with"),
    ] {
        let text = stderr(&run(home.path(), &[&["compress", "model", "-o", "x"], wrong].concat(), 2));
        assert!(text.contains(expected), "{text}");
    }
    fails(home.path(), &["compress", "model", "-o", "-", "--part", "1/2"], 2, "usage");
}
