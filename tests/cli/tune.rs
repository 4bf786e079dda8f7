//! `tune`: arguments, journals, saved plans. tests/gpu tests the measurements.

use std::fs;

use unweight::format::bundle::{Bundle, PLAN_BYTES_MAX};

use crate::harness::{attach_plan, copy, fails, fixture, run, stderr, stdout};

/// The arguments that `tune` rejects before it opens a GPU, and its error without a GPU.
#[test]
fn rejects_bad_arguments_before_loading() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    for profile in ["packed", "inference"] {
        run(home.path(), &["compress", "model", "-o", profile, "--profile", profile, "--quiet"], 0);
    }
    let text = fails(home.path(), &["tune", "packed"], 2, "nothing-to-tune");
    assert!(text.contains("--profile inference"), "{text}");
    for (wrong, allowed) in
        [(["--batch", "3"], "1, 8, 16"), (["--placement", "packed"], "neither stored nor alternate")]
    {
        let text = stderr(&run(home.path(), &[&["tune", "inference"], &wrong[..]].concat(), 2));
        assert!(text.contains(allowed), "{text}");
    }
    let help = stdout(&run(home.path(), &["tune", "--help"], 0));
    assert!(help.contains("[default: 1,64,256,512,1024]"), "{help}");
    fails(home.path(), &["tune", "nowhere"], 2, "path-not-found");
    let text = fails(home.path(), &["tune", "inference", "--context", "8188"], 2, "context-above-model-limit");
    assert!(text.contains("8187"), "{text}");
    // An invalid plan is reported and kept, before a GPU is opened.
    let dir = home.path().join("inference");
    attach_plan(&dir, "{\"version\": 1}");
    let generate = ["generate", "inference", "--tokens", "1", "--placement", "stored", "--device", "99"];
    let output = run(home.path(), &generate, 2);
    assert!(stderr(&output).contains("not used: the tuned plan has version 1, "), "{}", stderr(&output));
    assert!(!stderr(&output).contains("trust-attached"), "a plan needs no trust: {}", stderr(&output));
    run(home.path(), &["verify", "inference", "--against", "model"], 0);
    // An output that cannot be written is reported before anything is loaded, and leaves no files.
    let before: Vec<_> = fs::read_dir(home.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    fs::write(home.path().join("text"), "mine").unwrap();
    fs::create_dir(home.path().join("directory.1")).unwrap();
    for (wrong, code) in [
        (["--journal", "absent/journal"], "path-not-found"),
        (["--journal", "text/journal"], "not-a-directory"),
        (["--journal", "directory"], "journal-not-a-file"),
        (["--svg", "absent/plot.svg"], "path-not-found"),
        (["--svg", "text"], "output-not-replaceable"),
        (["--svg", "model"], "output-not-replaceable"),
    ] {
        fails(home.path(), &[&["tune", "inference", "--save"], &wrong[..]].concat(), 2, code);
    }
    // The same holds for files that are not journals, and for journals that another process writes.
    let second = home.path().join("journal.64");
    fs::write(&second, "mine\n").unwrap();
    let journals = ["tune", "inference", "--journal", "journal", "--batch", "1,64"];
    let text = fails(home.path(), &journals, 2, "journal-damaged");
    assert!(text.contains("journal.64: line 1: "), "{text}");
    assert_eq!(fs::read_to_string(&second).unwrap(), "mine\n");
    fs::write(&second, "").unwrap();
    let held = fs::File::open(&second).unwrap();
    held.lock().unwrap();
    fails(home.path(), &journals, 2, "journal-locked");
    drop(held);
    fs::remove_file(&second).unwrap();
    let attached = dir.join("unweight.kernels");
    fs::write(&attached, "damaged").unwrap();
    let text = fails(home.path(), &["tune", "inference", "--save"], 1, "attached-invalid");
    assert!(text.contains("byte 7"), "{text}");
    fs::remove_file(&attached).unwrap();
    // Neither the plan of a newer version nor a full plan is replaced.
    let full = format!("{{\"version\": 2, \"settings\": []}}{}", " ".repeat(PLAN_BYTES_MAX - 8192));
    for (plan, code) in [("{\"version\": 3}", "tuned-plan-version"), (&full, "tuned-plan-full")] {
        attach_plan(&dir, plan);
        let text = fails(home.path(), &["tune", "inference", "--save"], 2, code);
        assert!(text.contains("kernels detach"), "{text}");
        assert_eq!(Bundle::open(&dir).unwrap().attached().unwrap().unwrap().plan(), Some(plan));
        run(home.path(), &["kernels", "detach", "inference"], 0);
    }
    fs::remove_file(home.path().join("text")).unwrap();
    fs::remove_dir(home.path().join("directory.1")).unwrap();
    let after: Vec<_> = fs::read_dir(home.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(before.len(), after.len(), "{after:?}");
    // With a GPU, `tests/gpu/pipelines.rs` tests the rest.
    if unweight_rt::Device::open(0).is_err() {
        fails(home.path(), &["tune", "inference"], 2, "library-missing");
    }
}
