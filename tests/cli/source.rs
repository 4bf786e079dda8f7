//! Locations of a model; no command changes the model.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::harness::{copy, error_code, fails, fixture, json, run, same, stderr, unweight};

/// No command changes a byte, a mode or a time of the model, or adds a file next to it.
#[test]
fn no_command_changes_the_source() {
    use std::os::unix::fs::MetadataExt;
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    fn state(folder: &Path, found: &mut Vec<(PathBuf, u64, u32, i64, i64, u64)>) {
        let metadata = fs::metadata(folder).unwrap();
        let stamp = (metadata.mode(), metadata.mtime(), metadata.mtime_nsec(), metadata.ino());
        found.push((folder.to_owned(), metadata.len(), stamp.0, stamp.1, stamp.2, stamp.3));
        if metadata.is_dir() {
            let mut names: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
            names.sort();
            names.iter().for_each(|name| state(name, found));
        }
    }
    let look = || {
        let mut found = Vec::new();
        state(&home.path().join("model"), &mut found);
        found
    };
    let before = look();
    for (arguments, status) in [
        (&["plan", "model", "--compare"][..], 0),
        (&["compress", "model", "-o", "bundle", "--sha256"], 0),
        (&["compress", "model", "-o", "bundle", "--force"], 0),
        (&["compress", "model", "-o", "model", "--force"], 2),
        (&["compress", "model", "-o", "model/inside"], 2),
        (&["verify", "bundle", "--against", "model"], 0),
        (&["inspect", "bundle"], 0),
        (&["decompress", "bundle", "-o", "model"], 2),
        (&["decompress", "bundle", "-o", "back"], 0),
    ] {
        run(home.path(), arguments, status);
        assert_eq!(look(), before, "{arguments:?}");
    }
    same(&home.path().join("model"), &fixture().join("model"));
}

#[test]
fn accepts_files_and_patterns() {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    let [first, second] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let files = |bundle: &str| -> Vec<String> {
        run(home.path(), &["decompress", bundle, "-o", &format!("{bundle}.back")], 0);
        let mut names: Vec<String> = Vec::new();
        for entry in fs::read_dir(home.path().join(format!("{bundle}.back"))).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let original = fs::read(home.path().join("model").join(&name)).unwrap();
            assert!(fs::read(home.path().join(format!("{bundle}.back")).join(&name)).unwrap() == original, "{name}");
            names.push(name);
        }
        names.sort();
        names
    };
    let path = |name: &str| format!("model/{name}");
    // A single file as source; its directory may contain the output.
    run(home.path(), &["compress", &path(first), "-o", "model/one"], 0);
    fs::rename(home.path().join("model/one"), home.path().join("one")).unwrap();
    assert_eq!(files("one"), [first]);
    run(home.path(), &["compress", &path(second), &path(first), &path("config.json"), "-o", "list"], 0);
    assert_eq!(files("list"), ["config.json", first, second]);
    run(home.path(), &["compress", "model/*.safetensors*", "-o", "pattern"], 0);
    assert_eq!(files("pattern"), [first, second, "model.safetensors.index.json"]);
    run(home.path(), &["verify", "one", "--against", &path(first)], 0);
    run(home.path(), &["verify", "one", "--against", &path(second)], 1);
    assert_eq!(json(&run(home.path(), &["plan", &path(first), "--json"], 0))["files"], 1);
    let mistakes: [(&[&str], &str); 7] = [
        (&["model/*.gguf"], "pattern-without-match"),
        (&["model", "model/config.json"], "usage"),
        (&["model/config.json"], "no-weights"),
        (&["model/model.safetensors.index.json", &path(first)], "index-disagrees"),
        (&["a/b/c"], "source-not-found"),
        (&[&path(first), "nothing.safetensors"], "source-not-found"),
        (&["-", "model"], "usage"),
    ];
    for (sources, code) in mistakes {
        fails(home.path(), &[&["compress", "-o", "out"], sources].concat(), 2, code);
        assert!(!home.path().join("out").exists() && !home.path().join("out.partial").exists());
    }
    // The output must not replace a source.
    fails(home.path(), &["compress", &path(first), "-o", "model", "--force"], 2, "output-overlaps-source");
    same(&fixture().join("model"), &home.path().join("model"));
}

#[test]
fn finds_models_in_the_hugging_face_cache() {
    let home = tempfile::tempdir().unwrap();
    let model = home.path().join("hub/models--org--tiny");
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let (blobs, snapshot) = (model.join("blobs"), model.join("snapshots").join(commit));
    copy(&fixture().join("model"), &blobs);
    fs::create_dir_all(&snapshot).unwrap();
    for entry in fs::read_dir(&blobs).unwrap() {
        let name = entry.unwrap().file_name();
        std::os::unix::fs::symlink(Path::new("../../blobs").join(&name), snapshot.join(&name)).unwrap();
    }
    fs::create_dir_all(model.join("refs")).unwrap();
    fs::write(model.join("refs/main"), commit).unwrap();
    let with = |arguments: &[&str], status: i32| {
        let mut command = unweight(arguments);
        for variable in ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"] {
            command.env_remove(variable);
        }
        let output =
            command.current_dir(&home).env("HF_HOME", home.path()).env("HF_HUB_OFFLINE", "1").output().unwrap();
        assert_eq!(output.status.code(), Some(status), "{arguments:?} {}", stderr(&output));
        output
    };
    with(&["compress", "org/tiny", "-o", "bundle"], 0);
    with(&["verify", "bundle", "--against", &format!("org/tiny@{commit}")], 0);
    with(&["decompress", "bundle", "-o", "restored"], 0);
    same(&fixture().join("model"), &home.path().join("restored"));
    let output = with(&["plan", "org/other"], 2);
    let text = stderr(&output);
    assert_eq!(error_code(&output), "source-not-found");
    assert!(text.contains("hub/models--org--other") && text.contains("hf download org/other"), "{text}");
    let output = with(&["plan", "org/tiny@v2"], 2);
    let text = stderr(&output);
    assert_eq!(error_code(&output), "hub-revision-not-found");
    assert!(text.contains("'v2'") && text.contains("refs/v2") && text.contains(commit), "{text}");
    // A reference outside the repository's directory is not followed.
    fs::write(model.join("refs/main"), "../../..").unwrap();
    with(&["plan", "org/tiny"], 2);
    // An incomplete download is rejected like any incomplete model.
    fs::write(model.join("refs/main"), commit).unwrap();
    fs::remove_file(snapshot.join("model-00002-of-00002.safetensors")).unwrap();
    assert_eq!(error_code(&with(&["plan", "org/tiny"], 2)), "index-disagrees");
}
