//! Output of every command: data on stdout, notes on stderr, documented JSON keys.

use std::{
    fs,
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

use crate::harness::{copy, damaged, documented, fixture, json, one_matrix, run, stderr, stdout, unweight};

/// A command ends even if its stdin stays open and empty: no command asks a question.
#[test]
fn no_command_waits_for_input() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    for arguments in [
        &["compress", "model", "-o", "bundle"][..],
        &["compress", "model", "-o", "bundle"],
        &["compress", "model", "-o", "bundle", "--force"],
        &["verify", "bundle"],
        &["decompress", "bundle", "-o", "model"],
        &["cache", "clear"],
        &["demo", "--size", "1M"],
    ] {
        // A pipe that stays open and empty.
        let mut child = Command::new(assert_cmd::cargo::cargo_bin!("unweight"))
            .args(arguments)
            .current_dir(&home)
            .env("UNWEIGHT_CACHE_DIR", home.path().join("cache"))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let open = child.stdin.take();
        let start = Instant::now();
        while child.try_wait().unwrap().is_none() {
            assert!(start.elapsed().as_secs() < 60, "{arguments:?} waits");
            std::thread::sleep(Duration::from_millis(20));
        }
        drop(open);
    }
}

#[test]
fn quiet_and_verbose() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    let output = run(home.path(), &["compress", "model", "-o", "quiet", "-q"], 0);
    assert_eq!((stdout(&output).as_str(), stderr(&output).as_str()), ("", ""));
    // `--quiet` does not suppress requested output.
    assert!(!stdout(&run(home.path(), &["inspect", "quiet", "-q"], 0)).is_empty());
    assert!(!stdout(&run(home.path(), &["verify", "quiet", "-q", "--json"], 0)).is_empty());
    let output = run(home.path(), &["compress", "model", "-o", "loud", "-vv"], 0);
    assert!(stderr(&output).contains("model-00001-of-00002.safetensors"), "{}", stderr(&output));
    assert!(stderr(&output).contains("model.layers.1.mlp.gate_proj.weight"), "{}", stderr(&output));
    run(home.path(), &["compress", "model", "-o", "both", "-q", "-v"], 2);
}

#[test]
fn no_colour_without_a_terminal() {
    let home = tempfile::tempdir().unwrap();
    for no_color in [None, Some("1")] {
        for arguments in [&["verify", "nowhere"][..], &["--nonsense"], &["--help"]] {
            let mut command = unweight(arguments);
            command.current_dir(&home);
            no_color.map(|value| command.env("NO_COLOR", value));
            let output = command.output().unwrap();
            let text = [output.stdout, output.stderr].concat();
            assert!(!text.is_empty() && !text.contains(&0x1b), "{arguments:?}");
        }
    }
}

#[test]
fn closed_stdout_is_not_an_error() {
    let mut child = unweight(&["kernels", "list", "--arch", "sm_90a"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{:?}", output.status);
    assert_eq!(stderr(&output), "");
}

#[test]
fn escapes_control_characters_in_names() {
    let home = tempfile::tempdir().unwrap();
    fs::create_dir(home.path().join("model")).unwrap();
    one_matrix(&home.path().join("model/a.safetensors"), "evil\x1b[2J\x07\0\u{9b}31m\u{202e}.mlp.up_proj.weight");
    // A line break in a name must not forge a line of output.
    one_matrix(&home.path().join("model/b.safetensors"), "x\nall is sound\ny.mlp.up_proj.weight");
    let commands: [(&[&str], i32); 6] = [
        (&["plan", "model", "-vv"], 0),
        (&["compress", "model", "-o", "bundle", "-vv"], 0),
        (&["inspect", "bundle"], 0),
        (&["verify", "bundle", "-vv"], 0),
        (&["decompress", "bundle", "-o", "back", "-vv"], 0),
        (&["inspect", "bundle", "--tensor", "\x1b]0;x\x07"], 2),
    ];
    let check = |output: &Output, what: &str| {
        let text = stdout(output) + &stderr(output);
        let harmful = |c: char| c.is_control() && !matches!(c, '\n' | '\t') || c == '\u{202e}';
        assert!(!text.contains(harmful), "{what}: {text:?}");
        assert!(!text.lines().any(|line| line.starts_with("all is sound")), "{what}: {text:?}");
        text
    };
    for (arguments, status) in commands {
        check(&run(home.path(), arguments, status), &format!("{arguments:?}"));
    }
    assert!(check(&run(home.path(), &["inspect", "bundle"], 0), "inspect").contains("evil\\u{1b}[2J"));
    // Names in errors are escaped, too.
    for shard in ["bundle/a.safetensors", "bundle/b.safetensors"] {
        let shard = home.path().join(shard);
        let mut bytes = fs::read(&shard).unwrap();
        let at = bytes.len() - 3000;
        bytes[at] ^= 1;
        fs::write(&shard, bytes).unwrap();
    }
    check(&run(home.path(), &["verify", "bundle"], 1), "verify");
    check(&run(home.path(), &["decompress", "bundle", "-o", "again"], 1), "decompress");
}

#[test]
fn json_keys_match_the_documentation() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    let cases: [(&str, &[&str]); 14] = [
        ("plan", &["model"]),
        ("plan --compare", &["model"]),
        ("compress", &["model", "-o", "bundle"]),
        ("verify", &["bundle"]),
        ("inspect", &["bundle"]),
        ("extract", &["bundle", "--tensor", "model.norm.weight", "-o", "norm.bin"]),
        ("extract --file", &["model-00001-of-00002.safetensors", "bundle", "-o", "shard.bin"]),
        ("decompress", &["bundle", "-o", "restored"]),
        ("demo", &["--size", "1M"]),
        ("doctor", &[]),
        ("kernels list", &[]),
        ("kernels emit", &["uw_sm90a_encode_huffman_stats"]),
        ("cache dir", &[]),
        ("cache clear", &[]),
    ];
    for (command, arguments) in cases {
        let mut all: Vec<_> = command.split(' ').collect();
        all.extend(arguments);
        all.push("--json");
        let output =
            unweight(&all).current_dir(&home).env("UNWEIGHT_CACHE_DIR", home.path().join("cache")).output().unwrap();
        assert!(output.status.success(), "{command}: {}", stderr(&output));
        documented(command, &json(&output));
    }
    // A library that a variable names, and that is not there, is shown with the variable.
    let nowhere = [("UNWEIGHT_NVRTC", "/nowhere"), ("UNWEIGHT_CUBLAS", "/nowhere")];
    let output = unweight(&["doctor"]).envs(nowhere).output().unwrap();
    assert!(stdout(&output).contains("     tried UNWEIGHT_NVRTC=/nowhere: no libnvrtc.so* found\n"), "{output:?}");
    assert!(stdout(&output).contains(", the BF16 baseline and `--placement bf16`\n"), "{output:?}");
    // Lists that are empty for an intact bundle.
    let broken = tempfile::tempdir().unwrap();
    damaged(broken.path());
    documented("verify", &json(&run(broken.path(), &["verify", "bundle", "--json"], 1)));
}
