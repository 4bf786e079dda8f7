//! Errors: codes, JSON, and messages that name the argument and the next step.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::harness::{copy, error_code, fails, fixture, json, keys, run, stderr, stdout, table};

#[test]
fn failures_are_json() {
    let home = tempfile::tempdir().unwrap();
    let report = json(&run(home.path(), &["verify", "nowhere", "--json"], 2));
    assert_eq!(report["command"], "verify");
    let mut found = BTreeSet::new();
    keys(&report["error"], "", &mut found);
    assert_eq!(found, table("error").into_keys().collect());
    assert_eq!((&report["error"]["class"], &report["error"]["code"]), (&"failed".into(), &"path-not-found".into()));
}

#[test]
fn wrong_usage_is_json() {
    let home = tempfile::tempdir().unwrap();
    for arguments in [&["verify", "--json"][..], &["--json", "verify", "b", "--nonsense"]] {
        let output = run(home.path(), arguments, 2);
        let report = json(&output);
        assert_eq!((&report["command"], &report["error"]["class"]), (&"verify".into(), &"failed".into()));
        assert_eq!(report["error"]["code"], "usage");
        assert!(!report["error"]["message"].as_str().unwrap().is_empty(), "{report}");
        assert!(stderr(&output).starts_with("error: "));
    }
    assert_eq!(stdout(&run(home.path(), &["verify"], 2)), "");
}

#[test]
fn missing_gpu_names_the_driver_library() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    if unweight_rt::Device::open(0).is_ok() {
        run(home.path(), &["compress", "model", "-o", "out", "--device", "cuda"], 0);
        return;
    }
    let text = fails(home.path(), &["compress", "model", "-o", "out", "--device", "cuda"], 2, "library-missing");
    assert!(text.contains("libcuda"), "{text}");
    assert!(text.contains("\n  help: install the NVIDIA driver"), "{text}");
    assert!(!home.path().join("out").exists() && !home.path().join("out.partial").exists());
}

#[test]
fn name_the_argument_and_the_next_step() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    fs::create_dir(home.path().join("empty")).unwrap();
    fs::create_dir(home.path().join("exists")).unwrap();
    fs::create_dir(home.path().join("short")).unwrap();
    copy(&fixture().join("bundle"), &home.path().join("bundle"));
    fs::write(home.path().join("short/model.safetensors"), [9, 0, 0, 0, 0, 0, 0, 0, b'{', b'}']).unwrap();
    fs::write(home.path().join("rules.json"), "{").unwrap();
    fs::write(home.path().join("pytorch_model.bin"), "PK").unwrap();
    fs::create_dir(home.path().join("pointer")).unwrap();
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n";
    fs::write(home.path().join("pointer/model.safetensors"), pointer).unwrap();
    let cases: [(&[&str], &str, &[&str]); 15] = [
        (&["compress", "nowhere", "-o", "out"], "source-not-found", &["nowhere"]),
        (
            &["compress", "empty", "-o", "out"],
            "no-weights",
            &["empty", "no *.safetensors", "help: pass a model with .safetensors files (convert .bin or .gguf weights"],
        ),
        (
            &["compress", "pytorch_model.bin", "-o", "out"],
            "no-weights",
            &["pytorch_model.bin", "help: pass a model with .safetensors files (convert .bin or .gguf weights first)"],
        ),
        (
            &["compress", "pointer", "-o", "out"],
            "safetensors-header-too-large",
            &["pointer/model.safetensors", "help: give a safetensors file; if this one is a Git LFS pointer, run `git"],
        ),
        (&["compress", "model", "-o", "exists"], "output-exists", &["exists", "--force"]),
        (&["compress", "model", "-o", "model/inside"], "output-overlaps-source", &["model", "elsewhere"]),
        (&["compress", "model", "-o", "bundle/inside"], "output-overlaps-source", &["inside the bundle", "elsewhere"]),
        (
            &["compress", "short", "-o", "out"],
            "safetensors-header-truncated",
            &["short/model.safetensors", "cause: ", "help: download the file again"],
        ),
        (&["compress", "model", "-o", "out", "--plan", "rules.json"], "plan-file-invalid", &["rules.json"]),
        (&["compress", "model", "-o", "out", "--ram", "lots"], "usage", &["lots", "4G"]),
        (&["compress", "model", "-o", "out", "--code-limit", "16"], "usage", &["code limit 16 is not from 6 to 15"]),
        (&["compress", "model", "-o", "out", "--profile", "zip"], "usage", &["zip", "distribution"]),
        (&["compress", "model"], "usage", &["--output"]),
        (&["verify", "model"], "not-a-bundle", &["model", "not a bundle"]),
        (&["decompress", "empty", "-o", "out"], "not-a-bundle", &["empty", "not a bundle"]),
    ];
    for (arguments, code, words) in cases {
        let output = run(home.path(), arguments, 2);
        assert_eq!(stdout(&output), "", "{arguments:?}");
        let text = stderr(&output);
        let report = json(&run(home.path(), &[arguments, &["--json"]].concat(), 2));
        assert_eq!(report["error"]["code"], code, "{arguments:?}");
        words.iter().for_each(|word| assert!(text.contains(word), "{arguments:?} should mention {word}: {text}"));
        assert!(!home.path().join("out").exists());
    }
}

/// Whichever thread cannot be started, the error says so.
#[test]
fn process_limit_is_reported() {
    use std::os::unix::process::CommandExt;
    let home = tempfile::tempdir().unwrap();
    for part in ["model", "bundle"] {
        copy(&fixture().join(part), &home.path().join(part));
    }
    let mut program = PathBuf::from(assert_cmd::cargo::cargo_bin!("unweight"));
    // The limit does not apply to root, so run as an otherwise unused user, whose processes are only ours.
    let user = rustix::process::geteuid().is_root().then(|| 20_000 + std::process::id() % 40_000);
    if let Some(user) = user {
        fs::copy(&program, home.path().join("unweight")).unwrap();
        program = home.path().join("unweight");
        assert!(Command::new("chown").args(["-R", &user.to_string()]).arg(home.path()).status().unwrap().success());
    }
    let commands: [&[&str]; 5] = [
        &["demo", "--size", "1M"],
        &["plan", "model"],
        &["compress", "model", "-o", "out"],
        &["verify", "bundle"],
        &["decompress", "bundle", "-o", "back"],
    ];
    for arguments in commands {
        for most in 1..=3 {
            let mut command = Command::new("bash");
            command.args(["-c", &format!("ulimit -u {most}; exec \"$0\" \"$@\"")]).arg(&program).args(arguments);
            command.current_dir(&home).env("TMPDIR", home.path());
            if let Some(user) = user {
                command.uid(user).gid(user);
            }
            let output = command.output().unwrap();
            let said = stderr(&output);
            match output.status.code() {
                Some(0) if most > 1 => {}
                Some(2) => assert_eq!(error_code(&output), "threads-unavailable", "{arguments:?}: {said}"),
                other => panic!("{arguments:?} with {most}: {other:?}, {said}"),
            }
            for made in ["out", "back"] {
                drop(fs::remove_dir_all(home.path().join(made)));
            }
        }
    }
}

/// Collects every `.rs` file below a directory.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Returns the string literals of a text.
fn literals(text: &str) -> impl Iterator<Item = &str> {
    text.split('"').skip(1).step_by(2)
}

/// Returns the error codes in a source: those of `fn code` and `fn io_code`, first arguments of the command line's own
/// failures, and codes that a report or `usage` writes itself.
fn codes_of(text: &str) -> Vec<&str> {
    let mut codes = Vec::new();
    for head in ["fn code(&self) -> &'static str {", "fn io_code(error: &io::Error) -> &'static str {"] {
        for rest in text.split(head).skip(1) {
            let body = rest.split_once("\n    }\n").map_or(rest, |(body, _)| body);
            let body = body.split_once("\n}\n").map_or(body, |(body, _)| body);
            let mut own: Vec<&str> = literals(body).collect();
            codes.append(&mut own.clone());
            let count = own.len();
            own.sort_unstable();
            own.dedup();
            assert_eq!(own.len(), count, "a code is in two arms of one match: {body}");
        }
    }
    for head in ["Failure::new(", "Failure::mismatch(", "Self::new(\"interrupted\"", "\"code\": ", "let code = "] {
        let at = if head.ends_with('"') { head.find('"').unwrap() } else { head.len() };
        for (found, _) in text.match_indices(head) {
            let argument = text[found + at..].trim_start();
            codes.extend(argument.strip_prefix('"').and_then(|rest| rest.split('"').next()));
        }
    }
    codes
}

#[test]
fn every_code_is_documented_and_means_one_thing() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for entry in fs::read_dir(root).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name == "src" {
            sources(&path, &mut files);
        } else if name.starts_with("unweight-") && path.join("src").is_dir() {
            sources(&path.join("src"), &mut files);
        }
    }
    let texts: Vec<String> = files.iter().map(|file| fs::read_to_string(file).unwrap()).collect();
    let used: BTreeSet<&str> = texts.iter().flat_map(|text| codes_of(text)).collect();
    assert!(used.len() > 150, "{used:?}");

    let (_, section) = include_str!("../../docs/reference/errors.md").split_once("\n| code ").unwrap();
    let rows: Vec<(&str, &str)> =
        section.lines().filter_map(|line| line.strip_prefix("| `")?.strip_suffix(" |")?.split_once("` | ")).collect();
    let documented: BTreeSet<&str> = rows.iter().map(|(code, _)| *code).collect();
    let meanings: BTreeSet<&str> = rows.iter().map(|(_, meaning)| *meaning).collect();
    assert_eq!((documented.len(), meanings.len()), (rows.len(), rows.len()), "each code and each meaning once");
    let listed: Vec<&str> = documented.difference(&used).copied().collect();
    let missing: Vec<&str> = used.difference(&documented).copied().collect();
    assert!(listed.is_empty() && missing.is_empty(), "documented, not used: {listed:?}; not documented: {missing:?}");
    for code in used {
        let words: Vec<&str> = code.split('-').collect();
        let plain =
            |word: &&str| !word.is_empty() && word.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
        assert!(words.iter().all(plain), "{code}");
    }
}
