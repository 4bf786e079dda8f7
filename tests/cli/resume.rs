//! Interruption: `--resume`, signals, full disks.

use std::{
    fs,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use unweight::format::testing::demo_model::{self, DemoOptions};

use crate::harness::{copy, error_code, fails, fixture, json, run, same, shards, stderr, tiny, unweight};

#[test]
fn continues_an_interrupted_run() {
    let home = tempfile::tempdir().unwrap();
    // Large enough to be interrupted, with many files so that some are finished.
    let options = DemoOptions {
        layers: 12,
        hidden: 1024,
        intermediate: 2816,
        heads: 16,
        kv_heads: 4,
        vocab: 4096,
        shards: 24,
        ..tiny()
    };
    demo_model::write(&home.path().join("model"), &options).unwrap();
    run(home.path(), &["compress", "model", "-o", "expected", "--threads", "1"], 0);
    let mut interrupted = false;
    // On a loaded machine, a run may finish before the signal arrives; the next attempt sends it earlier.
    for finished_files in [6, 2, 1] {
        let arguments = ["compress", "model", "-o", "bundle", "--threads", "1", "--verify", "none"];
        let child =
            unweight(&arguments).current_dir(&home).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let finished = home.path().join("bundle.partial/tree");
        let start = Instant::now();
        let done = || if finished.is_dir() { shards(&finished).len() } else { 0 };
        while done() < finished_files
            && !home.path().join("bundle").exists()
            && start.elapsed() < Duration::from_secs(60)
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        let pid = rustix::process::Pid::from_child(&child);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::INT);
        let output = child.wait_with_output().unwrap();
        if output.status.success() {
            fs::remove_dir_all(home.path().join("bundle")).unwrap();
            continue;
        }
        assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
        assert!(stderr(&output).contains("--resume"), "{}", stderr(&output));
        assert!(!home.path().join("bundle").exists(), "nothing half-written under the final name");
        // Commands that read the bundle or the partial bundle report that it is unfinished.
        for path in ["bundle", "bundle.partial"] {
            let text = fails(home.path(), &["verify", path], 2, "bundle-unfinished");
            assert!(text.contains("bundle.partial") && text.contains("--resume"), "{text}");
        }
        interrupted = true;
        break;
    }
    assert!(interrupted, "no run could be interrupted");
    let report = json(&run(home.path(), &["compress", "model", "-o", "bundle", "--resume", "--json"], 0));
    assert!(!report["resumed_files"].as_array().unwrap().is_empty());
    same(&home.path().join("expected"), &home.path().join("bundle"));
    assert!(!home.path().join("bundle.partial").exists());
}

/// `--resume` after a run that finished says so.
#[test]
fn a_finished_run_is_complete() {
    let home = tempfile::tempdir().unwrap();
    let [model, bundle] = ["model", "bundle"].map(|name| fixture().join(name).to_str().unwrap().to_owned());
    let text = fails(home.path(), &["compress", &model, "-o", &bundle, "--resume"], 2, "output-exists");
    assert!(text.contains("it is complete: `unweight verify` checks it; --force makes it again"), "{text}");
    let part = ["compress", &model, "-o", &bundle, "--resume", "--part", "1/2"];
    let text = fails(home.path(), &part, 2, "output-exists");
    assert!(text.ends_with("it is complete: merge it with the other parts\n"), "{text}");
    let text = fails(home.path(), &["decompress", &bundle, "-o", &model, "--resume"], 2, "output-exists");
    assert!(text.contains("`unweight verify BUNDLE --against DIR` checks it; --force makes it again"), "{text}");
}

#[test]
fn file_size_limit_is_named() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    // In KiB; the model's shards are larger.
    let output = Command::new("bash")
        .args(["-c", "ulimit -f 64; exec \"$0\" compress model -o bundle"])
        .arg(assert_cmd::cargo::cargo_bin!("unweight"))
        .current_dir(&home)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2), "{:?} {}", output.status, stderr(&output));
    assert_eq!(error_code(&output), "file-size-limit");
    assert!(stderr(&output).contains("ulimit -f") && stderr(&output).contains("--resume"), "{}", stderr(&output));
    run(home.path(), &["compress", "model", "-o", "bundle", "--resume"], 0);
}

#[test]
fn other_options_start_over_with_a_note() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    for (name, options, starts_over) in [("same", &[][..], false), ("other", &["--sha256"][..], true)] {
        let output = Command::new("bash")
            .args(["-c", "ulimit -f 64; exec \"$0\" compress model -o \"$1\""])
            .args([assert_cmd::cargo::cargo_bin!("unweight").as_os_str(), name.as_ref()])
            .current_dir(&home)
            .output()
            .unwrap();
        assert_eq!(error_code(&output), "file-size-limit");
        let resumed = run(home.path(), &[&["compress", "model", "-o", name, "--resume"], options].concat(), 0);
        let said = stderr(&resumed).contains("starting over: the interrupted run had other options");
        assert_eq!(said, starts_over, "{}", stderr(&resumed));
    }
}

#[test]
fn each_signal_has_its_exit_status() {
    use rustix::process::Signal;
    let home = tempfile::tempdir().unwrap();
    let model = DemoOptions {
        layers: 12,
        hidden: 512,
        intermediate: 1408,
        heads: 8,
        kv_heads: 2,
        vocab: 4096,
        shards: 24,
        ..tiny()
    };
    demo_model::write(&home.path().join("model"), &model).unwrap();
    for (signal, status) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        // On a loaded machine, a run may finish before the signal arrives.
        let stopped = (0..20).any(|attempt| {
            let _ = fs::remove_dir_all(home.path().join("out"));
            let _ = fs::remove_dir_all(home.path().join("out.partial"));
            let child = unweight(&["compress", "model", "-o", "out", "--threads", "1", "--json"])
                .current_dir(&home)
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            while !home.path().join("out.partial/work").exists() && !home.path().join("out").exists() {
                std::thread::sleep(Duration::from_micros(200));
            }
            std::thread::sleep(Duration::from_millis(attempt));
            rustix::process::kill_process(rustix::process::Pid::from_child(&child), signal).unwrap();
            let output = child.wait_with_output().unwrap();
            if output.status.success() {
                return false;
            }
            assert_eq!(output.status.code(), Some(status), "{}", stderr(&output));
            let error = &json(&output)["error"];
            assert_eq!((&error["class"], &error["code"]), (&"interrupted".into(), &"interrupted".into()));
            true
        });
        assert!(stopped, "{signal:?}");
    }
}
