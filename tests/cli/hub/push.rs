//! Pushing: a bundle goes to the Hub and comes back with the same digests.

use std::{fs, path::Path};

use serde_json::Value;

use crate::harness::{copy, documented, error_code, fixture, json, run, same, shards, stderr};

use super::server::{COMMIT, Hub, Reply, TOKEN};

fn push(hub: &Hub, home: &Path, arguments: &[&str], status: i32) -> std::process::Output {
    let output = hub.command(home, &[&["push"], arguments].concat()).env("HF_TOKEN", TOKEN).output().unwrap();
    assert_eq!(output.status.code(), Some(status), "{arguments:?} {}", stderr(&output));
    output
}

/// A model with a card of its own, and its bundle.
fn home_with_bundle() -> tempfile::TempDir {
    let home = tempfile::tempdir().unwrap();
    copy(&fixture().join("model"), &home.path().join("model"));
    fs::write(home.path().join("model/README.md"), "---\nlicense: mit\n---\n# Tiny\n").unwrap();
    run(home.path(), &["compress", "model", "-o", "bundle", "--profile", "packed"], 0);
    home
}

#[test]
fn a_pushed_bundle_comes_back_with_equal_digests() {
    let (hub, home) = (Hub::start(), home_with_bundle());
    run(home.path(), &["card", "bundle", "--base-model", "org/tiny", "--repository", "me/tiny"], 0);
    fs::write(home.path().join("bundle/notes.txt"), "not of the bundle").unwrap();
    let output = push(&hub, home.path(), &["bundle", "me/tiny", "--private", "--json"], 0);
    assert!(stderr(&output).contains("notes.txt"), "{}", stderr(&output));
    let report = json(&output);
    documented("push", &report);
    assert_eq!((&report["created"], &report["unchanged_files"]), (&Value::from(true), &Value::from(0)));
    let of_shards: u64 = shards(&home.path().join("bundle")).iter().map(|s| s.metadata().unwrap().len()).sum();
    assert_eq!(report["uploaded_bytes"], of_shards);
    {
        let state = hub.state.lock().unwrap();
        let repo = &state.repos["me/tiny"];
        assert!(repo.private && report["commit"] == repo.commit.as_str());
        assert!(!repo.files.contains_key("notes.txt") && repo.files.contains_key("README.md.source"));
        // Storage gets no token, and what it signed.
        for asked in state.asked.iter().filter(|asked| asked.to_storage) {
            assert!(!asked.headers.contains_key("authorization") && asked.headers["x-signed"] == "yes");
        }
    }
    // A machine that has nothing of it.
    let other = tempfile::tempdir().unwrap();
    let command = |arguments: &[&str]| hub.command(other.path(), arguments).env("HF_TOKEN", TOKEN).output().unwrap();
    let output = command(&["verify", "me/tiny"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let commit = report["commit"].as_str().unwrap();
    let snapshot = other.path().join(format!("hf/hub/models--me--tiny/snapshots/{commit}"));
    let snapshot = snapshot.to_str().unwrap();
    run(other.path(), &["verify", snapshot], 0);
    run(other.path(), &["decompress", snapshot, "-o", "restored"], 0);
    same(&home.path().join("model"), &other.path().join("restored"));
    // Again: nothing is sent.
    hub.asked();
    let report = json(&push(&hub, home.path(), &["bundle", "me/tiny", "--json"], 0));
    assert_eq!((&report["uploaded_bytes"], &report["created"]), (&Value::from(0), &Value::from(false)));
    assert_eq!(report["unchanged_files"], report["files"]);
    assert_eq!(report["commit"], commit);
    assert!(hub.asked().iter().all(|asked| asked.method == "GET"));
}

#[test]
fn an_interrupted_push_is_repeated() {
    let (hub, home) = (Hub::start(), home_with_bundle());
    hub.state.lock().unwrap().part_bytes = Some(100_000);
    // The first file arrives; then storage fails.
    let mut completed = 0;
    hub.set_hook(move |asked, reply| {
        completed += usize::from(asked.path.starts_with("/complete/"));
        if completed >= 1 && asked.path.starts_with("/part/") { Reply::status(403) } else { reply }
    });
    let output = push(&hub, home.path(), &["bundle", "me/tiny"], 2);
    assert_eq!(error_code(&output), "hub-access-denied");
    assert!(stderr(&output).contains("me/tiny: ") && stderr(&output).contains(".safetensors"), "{}", stderr(&output));
    // No commit: readers see nothing of it.
    assert_eq!(hub.state.lock().unwrap().repos["me/tiny"].files.len(), 1);
    assert_eq!(hub.state.lock().unwrap().objects.len(), 1);
    hub.clear_hook();
    let report = json(&push(&hub, home.path(), &["bundle", "me/tiny", "--json"], 0));
    let shards = shards(&home.path().join("bundle"));
    let all: u64 = shards.iter().map(|shard| shard.metadata().unwrap().len()).sum();
    assert!(report["uploaded_bytes"].as_u64().unwrap() < all);
    let state = hub.state.lock().unwrap();
    for shard in &shards {
        let name = shard.file_name().unwrap().to_str().unwrap();
        assert!(state.repos["me/tiny"].files[name] == fs::read(shard).unwrap(), "{name}");
    }
}

#[test]
fn pushes_that_cannot_succeed_send_nothing() {
    let (hub, home) = (Hub::start(), home_with_bundle());
    // Without a token.
    let output = hub.run(home.path(), &["push", "bundle", "me/tiny"], 2);
    assert_eq!(error_code(&output), "hub-access-denied");
    assert!(stderr(&output).contains("HF_TOKEN"), "{}", stderr(&output));
    hub.asked();
    for (arguments, status, code) in [
        (&["bundle", "tiny"][..], 2, "usage"),
        (&["bundle", "../x/y"], 2, "usage"),
        (&["model", "me/tiny"], 2, "not-a-bundle"),
        (&["bundle", "me/tiny", "--message", " "], 2, "usage"),
    ] {
        assert_eq!(error_code(&push(&hub, home.path(), arguments, status)), code, "{arguments:?}");
    }
    let shard = shards(&home.path().join("bundle"))[0].clone();
    let mut bytes = fs::read(&shard).unwrap();
    let at = bytes.len() - 100;
    bytes[at] ^= 4;
    fs::write(&shard, &bytes).unwrap();
    let output = push(&hub, home.path(), &["bundle", "me/tiny"], 1);
    assert_eq!(error_code(&output), "bundle-damaged");
    let output = hub.command(home.path(), &["push", "bundle", "me/tiny"]).env("HF_HUB_OFFLINE", "1").output().unwrap();
    assert_eq!(error_code(&output), "hub-setting-invalid");
    assert!(hub.asked().is_empty());
}

#[test]
fn unusable_answers_are_errors() {
    let home = home_with_bundle();
    for (part, body, code) in [
        ("/preupload/", "{\"files\": []}", "hub-answer-invalid"),
        ("/preupload/", "[", "hub-answer-invalid"),
        ("/objects/batch", "{\"objects\": []}", "hub-answer-invalid"),
        ("/commit/", "{}", "hub-answer-invalid"),
    ] {
        let hub = Hub::start();
        hub.add("me/tiny", &home.path().join("model"));
        hub.set_hook(move |asked, reply| match asked.path.contains(part) {
            true => Reply { body: body.into(), ..Reply::status(200) },
            false => reply,
        });
        let output = push(&hub, home.path(), &["bundle", "me/tiny"], 2);
        assert_eq!(error_code(&output), code, "{part}");
        let is_unchanged = hub.state.lock().unwrap().repos["me/tiny"].commit == COMMIT;
        assert!(is_unchanged || part == "/commit/", "{part}");
    }
    // Addresses and sizes that storage sends are checked.
    for change in [
        |object: &mut Value| object["actions"]["upload"]["href"] = "file:///etc/passwd".into(),
        |object: &mut Value| object["actions"]["upload"]["header"] = serde_json::json!({ "chunk_size": "0" }),
        |object: &mut Value| {
            object["actions"]["upload"]["header"] = serde_json::json!({ "chunk_size": "1", "00001": "x" })
        },
        |object: &mut Value| object["error"] = serde_json::json!({ "code": 422, "message": "no" }),
    ] {
        let hub = Hub::start();
        hub.add("me/tiny", &home.path().join("model"));
        hub.set_hook(move |asked, reply| {
            if !asked.path.contains("/objects/batch") {
                return reply;
            }
            let mut batch: Value = serde_json::from_slice(&reply.body).unwrap();
            batch["objects"].as_array_mut().unwrap().iter_mut().for_each(change);
            Reply::json(&batch)
        });
        let output = push(&hub, home.path(), &["bundle", "me/tiny"], 2);
        assert_eq!(error_code(&output), "hub-answer-invalid");
    }
}

#[test]
fn a_missing_branch_is_created() {
    let (hub, home) = (Hub::start(), home_with_bundle());
    let branches = |id: &str| hub.state.lock().unwrap().repos[id].branches.iter().cloned().collect::<Vec<_>>();
    let report = json(&push(&hub, home.path(), &["bundle", "me/new@dev", "--json"], 0));
    assert_eq!((&report["created"], &report["unchanged_files"]), (&Value::from(true), &Value::from(0)));
    assert_eq!(branches("me/new"), ["dev"]);
    assert!(hub.asked().iter().any(|asked| asked.path == "/api/models/me/new/commit/dev"));
    // Another branch of a repository that has all files.
    let report = json(&push(&hub, home.path(), &["bundle", "me/new@v1.0+x", "--json"], 0));
    assert_eq!((&report["created"], &report["unchanged_files"]), (&Value::from(false), &report["files"]));
    assert_eq!(branches("me/new"), ["dev", "v1.0+x"]);
    // What cannot be a new branch is refused before anything is created.
    hub.asked();
    for repository in ["me/other@refs/pr/1", "me/new@refs/pr/1", &format!("me/other@{}", "1".repeat(40))] {
        let output = push(&hub, home.path(), &["bundle", repository], 2);
        assert_eq!(error_code(&output), "hub-revision-not-found", "{repository}");
        let revision = repository.split_once('@').unwrap().1;
        assert!(stderr(&output).contains(&format!("'{revision}'")), "{}", stderr(&output));
    }
    assert!(hub.asked().iter().all(|asked| asked.method == "GET"));
    assert!(!hub.state.lock().unwrap().repos.contains_key("me/other"));
    // A branch that disappears during a push is named.
    hub.set_hook(|asked, reply| match asked.path.contains("/preupload/") {
        true => Reply::status(404).header("X-Error-Code", "RevisionNotFound"),
        false => reply,
    });
    let output = push(&hub, home.path(), &["bundle", "me/third@dev", "--quick"], 2);
    assert!(stderr(&output).contains("no such revision 'dev'"), "{}", stderr(&output));
}
