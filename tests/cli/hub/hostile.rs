//! Servers that fail or attack.

use std::{fs, path::Path, time::Instant};

use serde_json::{Value, json};

use crate::harness::{error_code, fixture, stderr};

use super::server::{COMMIT, Hub, Reply, git_digest, sha256};

/// Fetches with every answer to a path that contains `part` replaced. Returns the error code and stderr.
fn fetch_with(part: &'static str, change: impl Fn(Reply) -> Reply + Send + 'static) -> (String, String) {
    let hub = Hub::start();
    hub.add("org/tiny", &fixture().join("model"));
    hub.set_hook(move |asked, reply| if asked.path.contains(part) { change(reply) } else { reply });
    let home = tempfile::tempdir().unwrap();
    let output = hub.command(home.path(), &["compress", "org/tiny", "-o", "bundle"]).output().unwrap();
    let text = stderr(&output);
    assert!(matches!(output.status.code(), Some(1 | 2)) && !text.contains("panicked"), "{text}");
    assert!(!home.path().join("bundle").exists() && !home.path().join("hf/hub/models--org--tiny/refs/main").exists());
    // What the cache has is what its name says.
    let blobs = home.path().join("hf/hub/models--org--tiny/blobs");
    for entry in fs::read_dir(blobs).into_iter().flatten() {
        let path = entry.unwrap().path();
        let (name, bytes) = (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(&path).unwrap());
        assert!(name.ends_with(".incomplete") || [sha256(&bytes), git_digest(&bytes)].contains(&name), "{name}");
    }
    assert!(text.contains("org/tiny") && text.contains("\n  help: "), "{text}");
    (error_code(&output), text)
}

#[test]
fn statuses_have_codes_and_next_steps() {
    let list = "/revision/";
    for (status, code, help) in [
        (400, "hub-failed", "HF_ENDPOINT"),
        (401, "hub-access-denied", "HF_TOKEN"),
        (403, "hub-access-denied", "token with access"),
        (404, "hub-repository-not-found", "./org/tiny"),
        (500, "hub-failed", "wait"),
        (503, "hub-failed", "wait"),
    ] {
        let (found, text) = fetch_with(list, move |_| Reply::status(status).header("Retry-After", "0"));
        assert_eq!(found, code, "{status}");
        assert!(text.contains(help) && text.contains(&status.to_string()) | (status == 404), "{status}: {text}");
    }
    let (code, text) = fetch_with("/resolve/", |_| {
        let gated = Reply::status(403).header("X-Error-Code", "GatedRepo");
        gated.header("X-Error-Message", "Access to model is restricted; ask")
    });
    assert_eq!(code, "hub-access-denied");
    assert!(text.contains("accept the terms") && text.contains("org/tiny: ") && text.contains("restricted"), "{text}");
    let (code, text) = fetch_with("config.json", |_| Reply::status(404));
    assert_eq!(code, "hub-file-not-found");
    assert!(text.contains("config.json"), "{text}");
}

#[test]
fn temporary_failures_are_retried() {
    let hub = Hub::start();
    hub.add("org/tiny", &fixture().join("model"));
    let mut number = 0;
    hub.set_hook(move |_, reply| {
        number += 1;
        match number {
            1 => Reply::status(503).header("Retry-After", "0"),
            2 => Reply::status(429).header("Retry-After", "0"),
            3 => Reply { cut: Some(10), ..reply },
            _ => reply,
        }
    });
    let home = tempfile::tempdir().unwrap();
    hub.run(home.path(), &["plan", "org/tiny"], 0);
}

#[test]
fn no_server_and_a_silent_server() {
    let home = tempfile::tempdir().unwrap();
    let hub = Hub::start();
    hub.add("org/tiny", &fixture().join("model"));
    // A port that was free a moment ago.
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut command = hub.command(home.path(), &["plan", "org/tiny"]);
    let output = command.env("HF_ENDPOINT", format!("http://{closed}")).output().unwrap();
    assert_eq!((output.status.code(), error_code(&output).as_str()), (Some(2), "hub-unreachable"));
    assert!(
        stderr(&output).contains("there is no local path org/tiny: check the path and the network"),
        "{}",
        stderr(&output)
    );
    let started = Instant::now();
    let (code, _) = fetch_with("/blob/", |reply| Reply { cut: Some(0), hangs: true, ..reply });
    assert_eq!(code, "hub-transfer-stopped");
    assert!(started.elapsed().as_secs() < 50);
    let output = hub.command(home.path(), &["plan", "org/tiny"]).env("HF_ENDPOINT", "hub").output().unwrap();
    assert_eq!(error_code(&output), "hub-setting-invalid");
}

#[test]
fn lists_are_checked() {
    let changed = |change: fn(&mut Value)| {
        let (code, text) = fetch_with("/revision/", move |reply| {
            let mut list: Value = serde_json::from_slice(&reply.body).unwrap();
            change(&mut list);
            Reply::json(&list)
        });
        assert_eq!(code, "hub-answer-invalid", "{text}");
    };
    for name in ["../../../../escaped", "/tmp/escaped", "a/../../b", "", "a\u{0}b", "a//b", "c:\\x"] {
        let (code, text) = fetch_with("/revision/", move |reply| {
            let mut list: Value = serde_json::from_slice(&reply.body).unwrap();
            list["siblings"][0]["rfilename"] = name.into();
            Reply::json(&list)
        });
        assert_eq!(code, "hub-answer-invalid", "{name}: {text}");
    }
    changed(|list| list["sha"] = "../../x".into());
    changed(|list| list["sha"] = Value::Null);
    changed(|list| list["siblings"][0]["size"] = json!(-1));
    changed(|list| list["siblings"][0]["blobId"] = "../../../x".into());
    changed(|list| list["siblings"][1] = list["siblings"][0].clone());
    changed(|list| list["siblings"] = json!({}));
    changed(|list| {
        let siblings = list["siblings"].as_array_mut().unwrap();
        siblings.iter_mut().filter(|s| s["lfs"].is_object()).for_each(|s| s["lfs"]["size"] = json!(u64::MAX / 2));
    });
    for body in ["", "[", "null", "{\"sha\":", "<html>"] {
        let (code, _) = fetch_with("/revision/", move |_| Reply { body: body.into(), ..Reply::status(200) });
        assert_eq!(code, "hub-answer-invalid", "{body}");
    }
    let (code, text) = fetch_with("/revision/", |_| Reply { endless: true, ..Reply::status(200) });
    assert_eq!(code, "hub-answer-invalid", "{text}");
    assert!(text.contains("more than"), "{text}");
}

#[test]
fn contents_are_checked() {
    let tampered = |part: &'static str, change: fn(&mut Vec<u8>)| {
        fetch_with(part, move |mut reply| {
            change(&mut reply.body);
            reply
        })
    };
    let (code, text) = tampered("/blob/", |body| body[100] ^= 1);
    assert_eq!(code, "hub-content-mismatch", "{text}");
    assert!(text.contains("SHA-256") && text.contains(".safetensors"), "{text}");
    let (code, text) = tampered("config.json", |body| body[0] ^= 1);
    assert_eq!(code, "hub-content-mismatch", "{text}");
    let (code, text) = tampered("/blob/", |body| body.push(0));
    assert_eq!(code, "hub-content-mismatch", "{text}");
    let (code, _) = tampered("/blob/", |body| body.truncate(10));
    assert!(["hub-transfer-stopped", "hub-answer-invalid"].contains(&code.as_str()), "{code}");
    let (code, text) = fetch_with("/blob/", |_| Reply { endless: true, ..Reply::status(200) });
    assert_eq!(code, "hub-content-mismatch", "{text}");
    let (code, text) =
        fetch_with("/blob/", |reply| Reply { cut: Some(10), ..reply }.header("Content-Range", "bytes 0-9/10"));
    assert!(["hub-answer-invalid", "hub-transfer-stopped"].contains(&code.as_str()), "{text}");
}

#[test]
fn redirects_are_bounded_and_checked() {
    for location in ["/org/tiny/resolve/x", "file:///etc/passwd", "ftp://127.0.0.1/x", "http://me:word@127.0.0.1/", ""]
    {
        let (code, text) = fetch_with("/resolve/", move |_| Reply::status(302).header("Location", location));
        assert!(["hub-answer-invalid", "hub-failed"].contains(&code.as_str()), "{location}: {text}");
    }
}

#[test]
fn missing_sizes_come_from_headers() {
    let hub = Hub::start();
    hub.add("org/tiny", &fixture().join("model"));
    hub.set_hook(|asked, reply| {
        if !asked.path.contains("/revision/") {
            return reply;
        }
        let list: Value = serde_json::from_slice(&reply.body).unwrap();
        let names = list["siblings"].as_array().unwrap().iter().map(|s| json!({ "rfilename": s["rfilename"] }));
        Reply::json(&json!({ "sha": COMMIT, "siblings": names.collect::<Vec<_>>() }))
    });
    let home = tempfile::tempdir().unwrap();
    hub.run(home.path(), &["plan", "org/tiny"], 0);
    assert!(Path::new(&home.path().join(format!("hf/hub/models--org--tiny/snapshots/{COMMIT}"))).exists());
}

/// A link or FIFO in the place of a download is not written through.
#[test]
fn planted_links_are_not_followed() {
    let hub = Hub::start();
    hub.add("org/tiny", &fixture().join("model"));
    let home = tempfile::tempdir().unwrap();
    let shard = fs::read(fixture().join("model/model-00001-of-00002.safetensors")).unwrap();
    let blobs = home.path().join("hf/hub/models--org--tiny/blobs");
    fs::create_dir_all(&blobs).unwrap();
    let victim = home.path().join("victim");
    fs::write(&victim, "mine").unwrap();
    std::os::unix::fs::symlink(&victim, blobs.join(format!("{}.incomplete", sha256(&shard)))).unwrap();
    hub.run(home.path(), &["plan", "org/tiny"], 2);
    assert_eq!(fs::read_to_string(&victim).unwrap(), "mine");
}
