//! tar archives on stdin and stdout.

use std::{
    fs,
    path::Path,
    process::{Command, Output, Stdio},
};

use crate::harness::{damaged, error_code, fixture, json, same, stderr, unweight};

/// Runs a command with `input` on stdin.
fn piped(folder: &Path, arguments: &[&str], input: &[u8], status: i32) -> Output {
    use std::io::Write;
    let mut command = unweight(arguments);
    command.current_dir(folder).env("TMPDIR", folder.join("tmp"));
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let output = std::thread::scope(|scope| {
        // The command may stop reading before the end.
        scope.spawn(move || drop(stdin.write_all(input)));
        child.wait_with_output().unwrap()
    });
    assert_eq!(output.status.code(), Some(status), "{arguments:?} {}", stderr(&output));
    output
}

fn tar(folder: &Path, arguments: &[&str]) -> Vec<u8> {
    let output = Command::new("tar").args(arguments).current_dir(folder).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    output.stdout
}

#[test]
fn models_and_bundles_go_through_pipes() {
    let home = tempfile::tempdir().unwrap();
    fs::create_dir(home.path().join("tmp")).unwrap();
    let model = fixture().join("model");
    // An archive of a directory's contents, and one of the directory.
    let plain = tar(&model, &["-c", "."]);
    let folder = tar(fixture(), &["-c", "model"]);
    piped(home.path(), &["compress", "-", "-o", "sub/bundle"], &plain, 0);
    same(&fixture().join("bundle"), &home.path().join("sub/bundle"));
    assert_eq!(fs::read_dir(home.path().join("sub")).unwrap().count(), 1, "nothing is left beside it");
    let packed = piped(home.path(), &["compress", "-", "-o", "-"], &folder, 0).stdout;
    assert!(packed.len() < plain.len() * 8 / 10);
    // The standard tool can extract it.
    fs::write(home.path().join("packed.tar"), &packed).unwrap();
    fs::create_dir(home.path().join("by-tar")).unwrap();
    tar(&home.path().join("by-tar"), &["-x", "-f", "../packed.tar"]);
    same(&fixture().join("bundle"), &home.path().join("by-tar"));
    piped(home.path(), &["decompress", "-", "-o", "restored"], &packed, 0);
    same(&model, &home.path().join("restored"));
    let original = piped(home.path(), &["decompress", "-", "-o", "-"], &packed, 0).stdout;
    fs::write(home.path().join("original.tar"), &original).unwrap();
    fs::create_dir(home.path().join("again")).unwrap();
    tar(&home.path().join("again"), &["-x", "-f", "../original.tar"]);
    same(&model, &home.path().join("again"));
    // Input may also be a directory.
    let bundle = fixture().join("bundle");
    let from_folder = piped(home.path(), &["decompress", bundle.to_str().unwrap(), "-o", "-"], b"", 0).stdout;
    assert!(from_folder == original, "times and modes of the files, too");
    let files = fs::read_dir(&model).unwrap().count();
    assert_eq!(json(&piped(home.path(), &["plan", "-", "--json"], &folder, 0))["files"], files);
    // Truncated, damaged and non-archive input leave no files.
    let before = fs::read_dir(home.path()).unwrap().count();
    for cut in [0, 100, 512, packed.len() / 2, packed.len() - 1024] {
        piped(home.path(), &["decompress", "-", "-o", "out"], &packed[..cut], 2);
    }
    let mut damaged = packed.clone();
    let at = damaged.len() / 2;
    damaged[at] ^= 1;
    piped(home.path(), &["decompress", "-", "-o", "out"], &damaged, 1);
    let begun = piped(home.path(), &["decompress", "-", "-o", "-"], &damaged, 1);
    assert!(begun.stdout.len() < original.len(), "no mark of an end");
    let output = piped(home.path(), &["compress", "-", "-o", "out"], b"no archive", 2);
    assert_eq!(error_code(&output), "archive-invalid");
    for option in ["--json", "--resume", "--force"] {
        piped(home.path(), &["compress", "-", "-o", "-", option], &plain, 2);
        piped(home.path(), &["decompress", "-", "-o", "-", option], &packed, 2);
    }
    // An existing output is detected before input is read.
    piped(home.path(), &["compress", "-", "-o", "restored"], b"no archive", 2);
    assert_eq!(fs::read_dir(home.path()).unwrap().count(), before, "nothing is left of the damaged archives");
    assert_eq!(fs::read_dir(home.path().join("tmp")).unwrap().count(), 0);
}

/// If a reader closes the pipe early, its file is incomplete, so the exit status must show a failure.
#[test]
fn closed_pipe_fails() {
    use std::io::Read;
    let shard = crate::harness::shards(&fixture().join("model"))[0].clone();
    let shard = shard.file_name().unwrap().to_str().unwrap();
    let cases: [&[&str]; 4] = [
        &["compress", "model", "-o", "-"],
        &["decompress", "bundle", "-o", "-"],
        &["extract", "bundle", "-o", "-", "--file", shard],
        &["extract", "bundle", "-o", "-", "--tensor", "lm_head.weight"],
    ];
    for arguments in cases {
        let mut command = unweight(arguments);
        let mut child = command.current_dir(fixture()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut head = [0; 1000];
        let mut stdout = child.stdout.take().unwrap();
        stdout.read_exact(&mut head).unwrap();
        drop(stdout);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert_eq!(error_code(&output), "output-closed", "{arguments:?}");
    }
}

/// A run from an archive cannot be resumed with another archive, so it leaves no files.
#[test]
fn damaged_archive_leaves_no_partial_output() {
    let home = tempfile::tempdir().unwrap();
    fs::create_dir(home.path().join("tmp")).unwrap();
    damaged(home.path());
    let archive = tar(home.path(), &["-c", "bundle"]);
    let output = piped(home.path(), &["decompress", "-", "-o", "out"], &archive, 1);
    assert_eq!(error_code(&output), "bundle-content-mismatch");
    assert!(!home.path().join("out.partial").exists() && !home.path().join("out").exists());
    // A run from a directory keeps finished files for --resume.
    assert_eq!(unweight(&["decompress", "bundle", "-o", "out"]).current_dir(&home).status().unwrap().code(), Some(1));
    assert!(home.path().join("out.partial").is_dir());
}

/// Errors name the archive and its entry, never the scratch directory.
#[test]
fn refused_archives_are_named() {
    let home = tempfile::tempdir().unwrap();
    fs::create_dir(home.path().join("tmp")).unwrap();
    let header = |name: &str, kind: u8, contents: &[u8]| {
        let mut header = tar::Header::new_ustar();
        header.set_path(name).unwrap();
        header.set_entry_type(tar::EntryType::new(kind));
        header.set_size(contents.len() as u64);
        header.set_mode(0o644);
        header.set_cksum();
        let mut entry = [header.as_bytes().as_slice(), contents].concat();
        entry.resize(entry.len().next_multiple_of(512), 0);
        entry
    };
    let end = [0; 1024];
    let nested = [header("a", b'0', b"abc"), header("a/b", b'0', b"abc")].concat();
    let huge = [header("attributes", b'x', b"31 size=1180591620717411303424\n"), header("big", b'0', b"abc")].concat();
    let long =
        [header("attributes", b'x', format!("312 path={}\n", "n".repeat(302)).as_bytes()), header("a", b'0', b"")];
    let cases = [
        (b"\x1f\x8b\x08\0\0\0\0\0".to_vec(), "gzip data", "gzip -dc"),
        (b"\x28\xb5\x2f\xfd\0\0\0\0".to_vec(), "zstd data", "zstd -dc"),
        (vec![0xc3; 600], "archive on stdin: not a tar archive", "uncompressed tar archive"),
        ([&nested[..], &end].concat(), "'a/b': another entry", "plain files"),
        ([&huge[..], &end].concat(), "'big': its size or another", "plain files"),
        ([&long.concat()[..], &end].concat(), "its name is too long", "plain files"),
    ];
    for (archive, why, help) in cases {
        let output = piped(home.path(), &["compress", "-", "-o", "out"], &archive, 2);
        assert_eq!(error_code(&output), "archive-invalid", "{why}");
        let text = stderr(&output);
        assert!(text.contains("archive on stdin") && text.contains(why) && text.contains(help), "{why}: {text}");
        assert!(!text.contains("scratch"), "{text}");
    }
}
