//! Fetching: the cache's layout, interruptions, tokens, redirects and revisions.

use std::{
    fs,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use crate::harness::{error_code, fixture, same, stderr};

use super::server::{COMMIT, Hub, Reply, TOKEN, git_digest, sha256};

const SHARD: &str = "model-00001-of-00002.safetensors";

fn hub_of_fixture() -> (Hub, tempfile::TempDir) {
    let hub = Hub::start();
    hub.add("org/tiny", &fixture().join("model"));
    (hub, tempfile::tempdir().unwrap())
}

fn blobs(home: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(home.join("hf/hub/models--org--tiny/blobs")) else { return Vec::new() };
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn fetched_models_have_the_layout_of_the_hub() {
    let (hub, home) = hub_of_fixture();
    hub.state.lock().unwrap().repos.get_mut("org/tiny").unwrap().files.insert("pytorch_model.bin".into(), vec![1; 999]);
    let output = hub.run(home.path(), &["compress", "org/tiny", "-o", "bundle"], 0);
    assert!(stderr(&output).contains(COMMIT), "{}", stderr(&output));
    let cache = home.path().join("hf/hub/models--org--tiny");
    let snapshot = cache.join("snapshots").join(COMMIT);
    same(&fixture().join("model"), &snapshot);
    assert_eq!(fs::read_to_string(cache.join("refs/main")).unwrap(), COMMIT);
    for entry in fs::read_dir(&snapshot).unwrap() {
        let path = entry.unwrap().path();
        let bytes = fs::read(&path).unwrap();
        let large = path.extension().is_some_and(|extension| extension == "safetensors");
        let etag = if large { sha256(&bytes) } else { git_digest(&bytes) };
        assert_eq!(path.read_link().unwrap(), Path::new("../../blobs").join(etag));
    }
    // Later commands need no server; `huggingface_hub` finds the same files.
    let asked = hub.asked();
    assert!(asked.iter().all(|asked| !asked.path.contains("pytorch_model.bin")));
    hub.run(home.path(), &["verify", "bundle", "--against", "org/tiny"], 0);
    hub.run(home.path(), &["plan", &format!("org/tiny@{COMMIT}")], 0);
    assert_eq!(hub.asked().len(), 0);
    hub.run(home.path(), &["decompress", "bundle", "-o", "restored"], 0);
    same(&fixture().join("model"), &home.path().join("restored"));
}

#[test]
fn an_interrupted_download_continues() {
    let (hub, home) = hub_of_fixture();
    let shard = fs::read(fixture().join("model").join(SHARD)).unwrap();
    let (name, half) = (sha256(&shard), shard.len() / 2);
    // Storage breaks off at half of the shard, and then refuses.
    let path = format!("/blob/{name}");
    let wanted = path.clone();
    let mut tries = 0;
    hub.set_hook(move |asked, reply| {
        if !asked.path.starts_with(&wanted) {
            return reply;
        }
        tries += 1;
        if tries == 1 { Reply { cut: Some(half), ..reply } } else { Reply::status(403) }
    });
    let output = hub.run(home.path(), &["compress", "org/tiny", "-o", "bundle"], 2);
    assert_eq!(error_code(&output), "hub-access-denied");
    assert!(stderr(&output).contains(&format!("org/tiny: {SHARD}")), "{}", stderr(&output));
    assert!(!home.path().join("bundle").exists());
    let there = blobs(home.path());
    assert!(there.contains(&format!("{name}.incomplete")) && !there.contains(&name), "{there:?}");
    assert!(!home.path().join("hf/hub/models--org--tiny/refs/main").exists());
    let begun = fs::metadata(home.path().join(format!("hf/hub/models--org--tiny/blobs/{name}.incomplete"))).unwrap();
    assert_eq!(begun.len(), half as u64);
    // The second run asks for the rest only.
    hub.clear_hook();
    hub.asked();
    hub.run(home.path(), &["compress", "org/tiny", "-o", "bundle"], 0);
    let asked = hub.asked();
    let of_shard: Vec<_> = asked.iter().filter(|asked| asked.path.starts_with(&path)).collect();
    assert_eq!(of_shard.iter().map(|asked| asked.first()).collect::<Vec<_>>(), [Some(half)]);
    assert!(blobs(home.path()).iter().all(|blob| !blob.ends_with(".incomplete")));
    hub.run(home.path(), &["verify", "bundle", "--against", "org/tiny"], 0);
}

#[test]
fn a_broken_connection_continues_within_a_run() {
    let (hub, home) = hub_of_fixture();
    // Every transfer ends after 50,000 bytes; some hang instead.
    let mut number = 0;
    hub.set_hook(move |asked, reply| {
        if !asked.to_storage {
            return reply;
        }
        number += 1;
        Reply { cut: Some(50_000), hangs: number == 3, ..reply }
    });
    hub.run(home.path(), &["compress", "org/tiny", "-o", "bundle"], 0);
    let asked = hub.asked();
    assert!(asked.iter().filter(|asked| asked.to_storage).count() > 4);
    hub.run(home.path(), &["verify", "bundle", "--against", "org/tiny"], 0);
}

#[test]
fn a_damaged_beginning_is_fetched_again() {
    let (hub, home) = hub_of_fixture();
    let shard = fs::read(fixture().join("model").join(SHARD)).unwrap();
    let blobs = home.path().join("hf/hub/models--org--tiny/blobs");
    fs::create_dir_all(&blobs).unwrap();
    let incomplete = blobs.join(format!("{}.incomplete", sha256(&shard)));
    for begun in [vec![7; 1000], vec![7; shard.len()], vec![7; shard.len() + 1], shard[..shard.len() - 1].to_vec()] {
        fs::write(&incomplete, &begun).unwrap();
        hub.run(home.path(), &["plan", "org/tiny"], 0);
        assert!(fs::read(blobs.join(sha256(&shard))).unwrap() == shard);
        assert!(!incomplete.exists());
        fs::remove_dir_all(home.path().join("hf/hub/models--org--tiny/snapshots")).unwrap();
        fs::remove_file(blobs.join(sha256(&shard))).unwrap();
    }
    // A server without ranges sends all of it.
    fs::write(&incomplete, &shard[..1000]).unwrap();
    let whole = shard.clone();
    hub.set_hook(move |asked, reply| match asked.first() {
        Some(_) if asked.to_storage => Reply { body: whole.clone(), ..Reply::status(200) },
        _ => reply,
    });
    hub.run(home.path(), &["plan", "org/tiny"], 0);
    assert!(fs::read(blobs.join(sha256(&shard))).unwrap() == shard);
}

/// Returns `command` as the arguments of a shell script, with the same directory and environment.
fn within(shell: &[&str], script: &str, command: &Command) -> Command {
    let mut outer = Command::new(shell[0]);
    outer.args(&shell[1..]).args(["-c", script]).arg(command.get_program()).args(command.get_args());
    outer.current_dir(command.get_current_dir().unwrap());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => outer.env(name, value),
            None => outer.env_remove(name),
        };
    }
    outer
}

#[test]
fn a_full_disk_is_named_before_the_download() {
    let (hub, home) = hub_of_fixture();
    let command = hub.command(home.path(), &["compress", "org/tiny", "-o", "bundle"]);
    fs::create_dir_all(home.path().join("hf")).unwrap();
    let on_disk = |size| {
        let script = format!("mount -t tmpfs -o size={size} none hf && exec \"$0\" \"$@\"");
        within(&["unshare", "--user", "--map-root-user", "--mount", "sh"], &script, &command).output()
    };
    let output = match on_disk("128k") {
        Ok(output) if !matches!(output.status.code(), Some(1 | 32)) => output,
        // `unshare` or `mount` is missing, or users may not make file systems here.
        _ => return,
    };
    assert_eq!((output.status.code(), error_code(&output).as_str()), (Some(2), "disk-full"));
    assert!(stderr(&output).contains("org/tiny: needs ") && stderr(&output).contains("HF_HUB_CACHE"));
    assert!(hub.asked().iter().all(|asked| !asked.to_storage));
    assert!(!home.path().join("bundle").exists());
    assert!(on_disk("64m").unwrap().status.success());
}

#[test]
fn a_disk_that_fills_during_the_download_keeps_what_has_arrived() {
    let (hub, home) = hub_of_fixture();
    let shard = fs::read(fixture().join("model").join(SHARD)).unwrap();
    // As on a full disk, a write fails half-way: at 64 KiB of a shard.
    let command = hub.command(home.path(), &["compress", "org/tiny", "-o", "bundle"]);
    let output = within(&["bash"], "ulimit -f 64; exec \"$0\" \"$@\"", &command).output().unwrap();
    assert_eq!((output.status.code(), error_code(&output).as_str()), (Some(2), "file-size-limit"));
    assert!(stderr(&output).contains(".incomplete: cannot write"), "{}", stderr(&output));
    assert!(!home.path().join("bundle").exists());
    let begun = home.path().join(format!("hf/hub/models--org--tiny/blobs/{}.incomplete", sha256(&shard)));
    let begun = fs::metadata(begun).unwrap().len();
    assert!(begun > 0 && begun <= 64 << 10, "{begun}");
    hub.asked();
    hub.run(home.path(), &["compress", "org/tiny", "-o", "bundle"], 0);
    let path = format!("/blob/{}", sha256(&shard));
    let from: Vec<_> = hub.asked().iter().filter(|asked| asked.path.starts_with(&path)).map(|a| a.first()).collect();
    assert_eq!(from, [Some(begun as usize)]);
    hub.run(home.path(), &["verify", "bundle", "--against", "org/tiny"], 0);
}

#[test]
fn a_signal_keeps_what_has_arrived() {
    let (hub, home) = hub_of_fixture();
    hub.set_hook(|asked, reply| match asked.to_storage {
        true => Reply { cut: Some(1000), hangs: true, ..reply },
        false => reply,
    });
    let mut command = hub.command(home.path(), &["compress", "org/tiny", "-o", "bundle"]);
    let mut child = command.stderr(std::process::Stdio::null()).spawn().unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    while !blobs(home.path()).iter().any(|blob| blob.ends_with(".incomplete")) && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(20));
    }
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    hub.clear_hook();
    hub.run(home.path(), &["compress", "org/tiny", "-o", "bundle"], 0);
}

#[test]
fn the_token_stays_with_the_endpoint() {
    let (hub, home) = hub_of_fixture();
    hub.state.lock().unwrap().repos.get_mut("org/tiny").unwrap().private = true;
    let output = hub.run(home.path(), &["compress", "org/tiny", "-o", "bundle"], 2);
    assert_eq!(error_code(&output), "hub-repository-not-found");
    assert!(stderr(&output).contains("org/tiny") && stderr(&output).contains("HF_TOKEN"), "{}", stderr(&output));
    let mut command = hub.command(home.path(), &["compress", "org/tiny", "-o", "bundle", "-vv"]);
    let output = command.env("HF_TOKEN", TOKEN).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(!stderr(&output).contains(TOKEN));
    let asked = hub.asked();
    let (storage, hub_itself): (Vec<_>, Vec<_>) = asked.iter().partition(|asked| asked.to_storage);
    assert!(!storage.is_empty() && storage.iter().all(|asked| !asked.headers.contains_key("authorization")));
    let with_token = hub_itself.iter().filter(|asked| asked.headers.contains_key("authorization")).count();
    // All but that of the first run.
    assert_eq!(with_token, hub_itself.len() - 1);
    // A token from the file that `hf auth login` writes.
    fs::remove_dir_all(home.path().join("hf/hub")).unwrap();
    fs::write(home.path().join("hf/token"), format!("{TOKEN}\n")).unwrap();
    hub.run(home.path(), &["plan", "org/tiny"], 0);
    // A renamed repository: the redirect stays on the server and keeps the token.
    fs::remove_dir_all(home.path().join("hf/hub")).unwrap();
    hub.set_hook(|asked, reply| match asked.path.strip_prefix("/api/models/org/old/") {
        Some(rest) => Reply::status(307).header("Location", format!("/api/models/org/tiny/{rest}")),
        None => match asked.path.strip_prefix("/org/old/") {
            Some(rest) => Reply::status(307).header("Location", format!("/org/tiny/{rest}")),
            None => reply,
        },
    });
    hub.run(home.path(), &["plan", "org/old"], 0);
}

#[test]
fn revisions_and_offline() {
    let (hub, home) = hub_of_fixture();
    let output = hub.run(home.path(), &["plan", "org/tiny@v2"], 2);
    assert_eq!(error_code(&output), "hub-revision-not-found");
    assert!(stderr(&output).contains("'v2'"), "{}", stderr(&output));
    let offline = |arguments: &[&str]| hub.command(home.path(), arguments).env("HF_HUB_OFFLINE", "1").output().unwrap();
    hub.asked();
    let output = offline(&["plan", "org/tiny"]);
    assert_eq!((output.status.code(), error_code(&output).as_str()), (Some(2), "source-not-found"));
    assert!(stderr(&output).contains("HF_HUB_OFFLINE"), "{}", stderr(&output));
    assert!(hub.asked().is_empty());
    // A commit has no ref.
    hub.run(home.path(), &["plan", &format!("org/tiny@{COMMIT}")], 0);
    assert_eq!(fs::read_dir(home.path().join("hf/hub/models--org--tiny/refs")).unwrap().count(), 0);
    assert!(offline(&["plan", &format!("org/tiny@{COMMIT}")]).status.success());
    // A snapshot with a missing shard is completed; names without an organization are never fetched.
    hub.run(home.path(), &["plan", "org/tiny"], 0);
    let shard = home.path().join(format!("hf/hub/models--org--tiny/snapshots/{COMMIT}/{SHARD}"));
    fs::remove_file(&shard).unwrap();
    assert_eq!(error_code(&offline(&["plan", "org/tiny"])), "index-disagrees");
    hub.run(home.path(), &["plan", "org/tiny"], 0);
    assert!(shard.exists());
    hub.asked();
    assert_eq!(error_code(&hub.run(home.path(), &["plan", "tiny"], 2)), "source-not-found");
    assert!(hub.asked().is_empty());
}

#[test]
fn bundles_and_models_are_told_apart_before_the_download() {
    let (hub, home) = hub_of_fixture();
    hub.add("org/bundle", &fixture().join("bundle"));
    let downloads = || hub.asked().iter().filter(|asked| asked.path.contains("/resolve/")).count();
    let output = hub.run(home.path(), &["compress", "org/bundle", "-o", "out"], 2);
    assert_eq!((error_code(&output).as_str(), downloads()), ("source-is-bundle", 0));
    let output = hub.run(home.path(), &["verify", "org/tiny"], 2);
    assert_eq!((error_code(&output).as_str(), downloads()), ("not-a-bundle", 0));
    assert!(stderr(&output).contains("unweight compress org/tiny"), "{}", stderr(&output));
    hub.state.lock().unwrap().repos.get_mut("org/tiny").unwrap().files.retain(|name, _| name == "config.json");
    let output = hub.run(home.path(), &["plan", "org/tiny"], 2);
    assert_eq!((error_code(&output).as_str(), downloads()), ("no-weights", 0));
    hub.run(home.path(), &["verify", "org/bundle"], 0);
    let snapshot = home.path().join(format!("hf/hub/models--org--bundle/snapshots/{COMMIT}"));
    same(&fixture().join("bundle"), &snapshot);
    hub.asked();
    hub.run(home.path(), &["inspect", "org/bundle"], 0);
    hub.run(home.path(), &["decompress", "org/bundle", "-o", "restored"], 0);
    same(&fixture().join("model"), &home.path().join("restored"));
    // Without a GPU, loading fails at the driver.
    #[cfg(feature = "serve")]
    {
        let output = hub.command(home.path(), &["generate", "org/bundle", "--tokens", "1", "--json"]).output().unwrap();
        if output.status.code() != Some(0) {
            assert_eq!(crate::harness::json(&output)["error"]["code"], "library-missing");
        }
    }
    assert!(hub.asked().is_empty());
}

/// Puts some files of a directory into the cache, as `hf download --include` does.
fn cached_part(home: &Path, id: &str, from: &Path, is_wanted: impl Fn(&str) -> bool) -> std::path::PathBuf {
    let cache = home.join("hf/hub").join(format!("models--{}", id.replace('/', "--")));
    let snapshot = cache.join("snapshots").join(COMMIT);
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(cache.join("refs")).unwrap();
    fs::write(cache.join("refs/main"), COMMIT).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if is_wanted(&name) {
            fs::copy(from.join(&name), snapshot.join(&name)).unwrap();
        }
    }
    snapshot
}

#[test]
fn a_partly_cached_bundle_is_completed() {
    let (hub, home) = hub_of_fixture();
    hub.add("org/bundle", &fixture().join("bundle"));
    let snapshot = cached_part(home.path(), "org/bundle", &fixture().join("bundle"), |name| name == "unweight.json");
    hub.run(home.path(), &["verify", "org/bundle"], 0);
    same(&fixture().join("bundle"), &snapshot);
    hub.asked();
    // Each file counts, not only weights.
    for name in ["tokenizer.json", "config.json.source", SHARD] {
        if snapshot.join(name).exists() {
            fs::remove_file(snapshot.join(name)).unwrap();
            hub.run(home.path(), &["decompress", "org/bundle", "-o", &format!("restored-{name}")], 0);
            same(&fixture().join("model"), &home.path().join(format!("restored-{name}")));
            assert!(!hub.asked().is_empty(), "{name}");
        }
    }
    hub.run(home.path(), &["verify", "org/bundle"], 0);
    assert!(hub.asked().is_empty());
}

#[test]
fn a_model_without_its_config_is_completed_or_reported() {
    let (hub, home) = hub_of_fixture();
    let weights = |name: &str| name.contains(".safetensors");
    let snapshot = cached_part(home.path(), "org/tiny", &fixture().join("model"), weights);
    let note = "cached snapshot of org/tiny lacks config.json or the tokenizer";
    // Without the Hub, the weights are used; the command says what is missing.
    for (variable, value) in [("HF_HUB_OFFLINE", "1"), ("HF_ENDPOINT", "http://127.0.0.1:9")] {
        let output = hub.command(home.path(), &["plan", "org/tiny"]).env(variable, value).output().unwrap();
        assert!(output.status.success() && stderr(&output).contains(note), "{variable}: {}", stderr(&output));
    }
    let output = hub.run(home.path(), &["compress", "org/tiny", "-o", "bundle"], 0);
    assert!(!stderr(&output).contains(note), "{}", stderr(&output));
    same(&fixture().join("model"), &snapshot);
    hub.run(home.path(), &["decompress", "bundle", "-o", "restored"], 0);
    same(&fixture().join("model"), &home.path().join("restored"));
    // A repository that has none: the weights are not fetched again.
    hub.state.lock().unwrap().repos.get_mut("org/tiny").unwrap().files.remove("config.json");
    fs::remove_file(snapshot.join("config.json")).unwrap();
    hub.asked();
    let output = hub.run(home.path(), &["plan", "org/tiny"], 0);
    assert!(!stderr(&output).contains(note), "{}", stderr(&output));
    assert!(hub.asked().iter().all(|asked| !asked.to_storage));
}

/// As `AutoModel.from_pretrained` leaves it; and without an index, which would name the missing shard.
#[test]
fn a_model_without_its_tokenizer_or_a_shard_is_completed() {
    let (hub, home) = hub_of_fixture();
    let model = |name: &str| name.contains(".safetensors") || name == "config.json";
    let snapshot = cached_part(home.path(), "org/tiny", &fixture().join("model"), model);
    hub.run(home.path(), &["plan", "org/tiny"], 0);
    same(&fixture().join("model"), &snapshot);
    for name in [SHARD, "model.safetensors.index.json"] {
        fs::remove_file(snapshot.join(name)).unwrap();
    }
    hub.run(home.path(), &["plan", "org/tiny"], 0);
    same(&fixture().join("model"), &snapshot);
    hub.asked();
    hub.run(home.path(), &["plan", "org/tiny"], 0);
    assert!(hub.asked().is_empty());
}

/// The server does not speak TLS, to which it redirects.
#[test]
fn a_redirect_to_https_is_followed() {
    let (hub, home) = hub_of_fixture();
    let endpoint = hub.endpoint.replace("http:", "https:");
    hub.set_hook(move |asked, _| Reply::status(302).header("Location", format!("{endpoint}{}", asked.path)));
    let output = hub.run(home.path(), &["plan", "org/tiny"], 2);
    assert_eq!(error_code(&output), "hub-unreachable", "{}", stderr(&output));
}

#[test]
fn a_withheld_token_is_explained() {
    let (mut hub, home) = hub_of_fixture();
    hub.state.lock().unwrap().repos.get_mut("org/tiny").unwrap().private = true;
    // Another name of this machine, which is not known to be within it.
    hub.endpoint = hub.endpoint.replace("127.0.0.1", "0.0.0.0");
    let bundle = fixture().join("bundle");
    for (arguments, code) in [
        (&["compress", "org/tiny", "-o", "bundle"][..], "hub-repository-not-found"),
        (&["push", bundle.to_str().unwrap(), "org/tiny"], "hub-access-denied"),
    ] {
        let output = hub.command(home.path(), arguments).env("HF_TOKEN", TOKEN).output().unwrap();
        assert_eq!((output.status.code(), error_code(&output).as_str()), (Some(2), code));
        let text = stderr(&output);
        assert!(text.contains("not sent unencrypted") && text.contains("https address"), "{text}");
        assert!(!text.contains("set HF_TOKEN"), "{text}");
    }
    let asked = hub.asked();
    assert!(asked.len() > 1 && asked.iter().all(|asked| !asked.headers.contains_key("authorization")));
}

#[test]
fn revisions_with_unusual_names() {
    let names = ["refs", "refs/pr/1", "v1.0+x", "a--b"];
    for order in [[0, 1, 2, 3], [3, 2, 1, 0]] {
        let (hub, home) = hub_of_fixture();
        let branches = names.map(str::to_owned).into();
        hub.state.lock().unwrap().repos.get_mut("org/tiny").unwrap().branches = branches;
        for index in order.into_iter().chain(order) {
            hub.run(home.path(), &["plan", &format!("org/tiny@{}", names[index])], 0);
        }
        hub.asked();
        for name in [names[2], names[3], names[order.into_iter().find(|&index| index < 2).unwrap()]] {
            hub.run(home.path(), &["plan", &format!("org/tiny@{name}")], 0);
        }
        assert!(hub.asked().is_empty());
    }
}
