//! A Hub on loopback: an endpoint, and storage on a second port, to which it redirects for large files.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    process::{Command, Output},
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use serde_json::{Value, json};
use sha2::Digest;

use crate::harness::{stderr, unweight};

/// A request that the server received.
#[derive(Debug, Clone)]
pub struct Asked {
    pub method: String,
    /// Path and query.
    pub path: String,
    /// Names in lower case.
    pub headers: HashMap<String, String>,
    pub body: Vec<u8>,
    /// Whether it went to the storage port.
    pub to_storage: bool,
}

impl Asked {
    /// The first byte of the requested range.
    pub fn first(&self) -> Option<usize> {
        self.headers.get("range")?.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()
    }
}

/// An answer, and how it goes wrong.
#[derive(Debug, Clone, Default)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// Close the connection after this many bytes of the body.
    pub cut: Option<usize>,
    /// Keep the connection open without sending the rest.
    pub hangs: bool,
    /// Send bytes until the client closes, without a length.
    pub endless: bool,
}

impl Reply {
    pub fn status(status: u16) -> Self {
        Self { status, ..Self::default() }
    }

    pub fn json(value: &Value) -> Self {
        Self { body: value.to_string().into_bytes(), ..Self::status(200) }
    }

    pub fn header(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }
}

/// Changes the answers.
pub type Hook = Box<dyn FnMut(&Asked, Reply) -> Reply + Send>;

/// A repository.
#[derive(Default, Clone)]
pub struct Repo {
    pub commit: String,
    pub files: BTreeMap<String, Vec<u8>>,
    pub private: bool,
    /// Branches and tags besides `main`, all of the same commit.
    pub branches: BTreeSet<String>,
}

impl Repo {
    fn has(&self, revision: &str) -> bool {
        revision == "main" || revision == self.commit || self.branches.contains(revision)
    }
}

#[derive(Default)]
pub struct State {
    pub repos: BTreeMap<String, Repo>,
    /// Large files by SHA-256.
    pub objects: HashMap<String, Vec<u8>>,
    pub asked: Vec<Asked>,
    pub hook: Option<Hook>,
    /// Bytes per part of a multipart upload; `None` uploads files whole.
    pub part_bytes: Option<usize>,
    parts: HashMap<(String, usize), Vec<u8>>,
    endpoint: String,
    storage: String,
}

/// A running server. Its threads end with the process.
pub struct Hub {
    pub state: Arc<Mutex<State>>,
    pub endpoint: String,
}

/// The token of the owner.
pub const TOKEN: &str = "hf_loopback_secret";
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

pub fn sha256(bytes: &[u8]) -> String {
    sha2::Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn git_digest(bytes: &[u8]) -> String {
    let digest = sha1::Sha1::new().chain_update(format!("blob {}\0", bytes.len())).chain_update(bytes).finalize();
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Whether the Hub keeps a file in large-file storage.
pub fn is_large(name: &str) -> bool {
    name.ends_with(".safetensors") || name.ends_with(".kernels")
}

impl Hub {
    pub fn start() -> Self {
        let listen = || TcpListener::bind("127.0.0.1:0").unwrap();
        let (hub, storage) = (listen(), listen());
        let url = |listener: &TcpListener| format!("http://{}", listener.local_addr().unwrap());
        let (endpoint, storage_url) = (url(&hub), url(&storage));
        let state = State { endpoint: endpoint.clone(), storage: storage_url.clone(), ..State::default() };
        let state = Arc::new(Mutex::new(state));
        for (listener, to_storage) in [(hub, false), (storage, true)] {
            let state = Arc::clone(&state);
            thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let state = Arc::clone(&state);
                    // A client that hangs up is part of the tests.
                    thread::spawn(move || _ = answer(&stream, &state, to_storage));
                }
            });
        }
        Self { state, endpoint }
    }

    /// Adds a repository with the files of a directory.
    pub fn add(&self, id: &str, dir: &Path) {
        let files = fs::read_dir(dir).unwrap().map(|entry| {
            let entry = entry.unwrap();
            (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())
        });
        let repo = Repo { commit: COMMIT.into(), files: files.collect(), ..Repo::default() };
        self.state.lock().unwrap().repos.insert(id.into(), repo);
    }

    pub fn set_hook(&self, hook: impl FnMut(&Asked, Reply) -> Reply + Send + 'static) {
        self.state.lock().unwrap().hook = Some(Box::new(hook));
    }

    pub fn clear_hook(&self) {
        self.state.lock().unwrap().hook = None;
    }

    /// Returns the requests since the last call.
    pub fn asked(&self) -> Vec<Asked> {
        std::mem::take(&mut self.state.lock().unwrap().asked)
    }

    /// Returns the command with this server as the Hub and the cache in `home/hf`.
    pub fn command(&self, home: &Path, arguments: &[&str]) -> Command {
        let mut command = unweight(arguments);
        for variable in [
            "HF_HUB_CACHE",
            "HUGGINGFACE_HUB_CACHE",
            "HF_TOKEN",
            "HF_TOKEN_PATH",
            "http_proxy",
            "HTTP_PROXY",
            "all_proxy",
            "ALL_PROXY",
        ] {
            command.env_remove(variable);
        }
        command.current_dir(home).env("HF_HOME", home.join("hf")).env("HF_ENDPOINT", &self.endpoint);
        command.env_remove("HF_HUB_OFFLINE").env("HF_HUB_DOWNLOAD_TIMEOUT", "2");
        command
    }

    pub fn run(&self, home: &Path, arguments: &[&str], status: i32) -> Output {
        let output = self.command(home, arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(status), "{arguments:?} {}", stderr(&output));
        output
    }
}

fn answer(mut stream: &TcpStream, state: &Mutex<State>, to_storage: bool) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let mut words = line.split_whitespace().map(str::to_owned);
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let mut headers = HashMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        headers.insert(name.to_lowercase(), value.to_owned());
    }
    let length = headers.get("content-length").map_or(0, |length: &String| length.parse().unwrap());
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let asked = Asked { method, path, headers, body, to_storage };
    let reply = {
        let mut state = state.lock().unwrap();
        state.asked.push(asked.clone());
        let reply = state.reply(&asked);
        let mut hook = state.hook.take();
        let reply = hook.as_mut().map_or_else(|| reply.clone(), |hook| hook(&asked, reply.clone()));
        state.hook = hook;
        reply
    };
    let mut head = format!("HTTP/1.1 {} X\r\nConnection: close\r\n", reply.status);
    for (name, value) in &reply.headers {
        head += &format!("{name}: {value}\r\n");
    }
    if !reply.endless && !reply.headers.iter().any(|(name, _)| name == "Content-Length") {
        head += &format!("Content-Length: {}\r\n", reply.body.len());
    }
    stream.write_all((head + "\r\n").as_bytes())?;
    if asked.method == "HEAD" {
        return Ok(());
    }
    stream.write_all(&reply.body[..reply.cut.unwrap_or(usize::MAX).min(reply.body.len())])?;
    if reply.endless {
        loop {
            // Fails when the client has left.
            stream.write_all(&[b'x'; 65536])?;
        }
    }
    if reply.hangs {
        thread::sleep(Duration::from_secs(60));
    }
    Ok(())
}

impl State {
    /// The answer of a server without faults.
    fn reply(&mut self, asked: &Asked) -> Reply {
        let path = asked.path.split('?').next().unwrap().to_owned();
        let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
        if asked.to_storage {
            return self.of_storage(asked, &parts);
        }
        let owner = asked.headers.get("authorization").is_some_and(|value| *value == format!("Bearer {TOKEN}"));
        let missing = |code: &str, status| Reply::status(status).header("X-Error-Code", code);
        match (asked.method.as_str(), &parts[..]) {
            ("POST", ["api", "repos", "create"]) if owner => {
                let wanted: Value = serde_json::from_slice(&asked.body).unwrap();
                let id = format!("{}/{}", wanted["organization"].as_str().unwrap(), wanted["name"].as_str().unwrap());
                if self.repos.contains_key(&id) {
                    return Reply::status(409);
                }
                let private = wanted["private"].as_bool().unwrap();
                // The Hub adds this file to each new repository.
                let files = [(".gitattributes".to_owned(), b"*.safetensors filter=lfs\n".to_vec())].into();
                self.repos.insert(id, Repo { commit: COMMIT.into(), files, private, ..Repo::default() });
                Reply::json(&json!({}))
            }
            ("GET", ["api", "models", org, name, "revision", revision]) => {
                let Some(repo) = self.repos.get(&format!("{org}/{name}")).filter(|repo| owner || !repo.private) else {
                    return missing("RepoNotFound", 401);
                };
                if !repo.has(&decoded(revision)) {
                    return missing("RevisionNotFound", 404);
                }
                let siblings: Vec<_> = repo.files.iter().map(|(name, bytes)| sibling(name, bytes)).collect();
                Reply::json(&json!({ "id": format!("{org}/{name}"), "sha": repo.commit, "siblings": siblings }))
            }
            ("GET" | "HEAD", [org, name, "resolve", _, file @ ..]) => {
                let repo = self.repos.get(&format!("{org}/{name}")).filter(|repo| owner || !repo.private);
                let file = file.join("/").replace("%20", " ");
                match repo.and_then(|repo| repo.files.get(&file)) {
                    None => missing("EntryNotFound", 404),
                    Some(bytes) if is_large(&file) => {
                        let location = format!("{}/blob/{}?signature=1", self.storage, sha256(bytes));
                        self.objects.insert(sha256(bytes), bytes.clone());
                        Reply::status(302)
                            .header("Location", location)
                            .header("X-Linked-Size", bytes.len().to_string())
                            .header("X-Linked-Etag", format!("\"{}\"", sha256(bytes)))
                    }
                    Some(bytes) => ranged(asked, bytes).header("ETag", format!("\"{}\"", git_digest(bytes))),
                }
            }
            ("POST", ["api", "models", org, name, "branch", branch]) if owner => {
                let new = self.repos.get_mut(&format!("{org}/{name}")).unwrap().branches.insert(decoded(branch));
                Reply::status(if new { 200 } else { 409 })
            }
            ("POST", ["api", "models", org, name, "preupload" | "commit", revision])
                if owner && !self.repos[&format!("{org}/{name}")].has(&decoded(revision)) =>
            {
                missing("RevisionNotFound", 404)
            }
            ("POST", ["api", "models", _, _, "preupload", _]) if owner => {
                let wanted: Value = serde_json::from_slice(&asked.body).unwrap();
                let files: Vec<_> = wanted["files"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|file| {
                        let mode = if is_large(file["path"].as_str().unwrap()) { "lfs" } else { "regular" };
                        json!({ "path": file["path"], "uploadMode": mode, "shouldIgnore": false })
                    })
                    .collect();
                Reply::json(&json!({ "files": files }))
            }
            ("POST", [_, _, "info", "lfs", "objects", "batch"]) if owner => self.batch(asked),
            ("POST", ["verify"]) if owner => {
                let wanted: Value = serde_json::from_slice(&asked.body).unwrap();
                let object = self.objects.get(wanted["oid"].as_str().unwrap());
                let same = object.is_some_and(|bytes| bytes.len() as u64 == wanted["size"].as_u64().unwrap());
                Reply::status(if same { 200 } else { 404 })
            }
            ("POST", ["complete", oid]) if owner => self.complete(asked, oid),
            ("POST", ["api", "models", org, name, "commit", _]) if owner => {
                self.commit(asked, &format!("{org}/{name}"))
            }
            ("POST", _) => Reply::status(401),
            _ => Reply::status(404),
        }
    }

    fn of_storage(&mut self, asked: &Asked, parts: &[&str]) -> Reply {
        match (asked.method.as_str(), parts) {
            ("GET", ["blob", sha]) => self.objects.get(*sha).map_or(Reply::status(404), |bytes| ranged(asked, bytes)),
            ("PUT", ["put", sha]) => {
                assert_eq!(*sha, sha256(&asked.body), "storage received other bytes");
                self.objects.insert((*sha).to_owned(), asked.body.clone());
                Reply::status(200)
            }
            ("PUT", ["part", sha, number]) => {
                self.parts.insert(((*sha).to_owned(), number.parse().unwrap()), asked.body.clone());
                Reply::status(200).header("ETag", format!("\"part-{number}\""))
            }
            _ => Reply::status(404),
        }
    }

    fn batch(&self, asked: &Asked) -> Reply {
        let wanted: Value = serde_json::from_slice(&asked.body).unwrap();
        let objects: Vec<_> = wanted["objects"]
            .as_array()
            .unwrap()
            .iter()
            .map(|object| {
                let (oid, size) = (object["oid"].as_str().unwrap(), object["size"].as_u64().unwrap() as usize);
                if self.objects.contains_key(oid) {
                    return json!({ "oid": oid, "size": size });
                }
                let upload = match self.part_bytes {
                    None => json!({ "href": format!("{}/put/{oid}", self.storage), "header": { "X-Signed": "yes" } }),
                    Some(bytes) => {
                        let mut header = serde_json::Map::new();
                        header.insert("chunk_size".into(), bytes.to_string().into());
                        for number in 1..=size.div_ceil(bytes) {
                            header
                                .insert(format!("{number:05}"), format!("{}/part/{oid}/{number}", self.storage).into());
                        }
                        json!({ "href": format!("{}/complete/{oid}", self.endpoint), "header": header })
                    }
                };
                let verify = json!({ "href": format!("{}/verify", self.endpoint) });
                json!({ "oid": oid, "size": size, "actions": { "upload": upload, "verify": verify } })
            })
            .collect();
        let transfer = if self.part_bytes.is_some() { "multipart" } else { "basic" };
        Reply::json(&json!({ "transfer": transfer, "objects": objects }))
    }

    fn complete(&mut self, asked: &Asked, oid: &str) -> Reply {
        let wanted: Value = serde_json::from_slice(&asked.body).unwrap();
        let mut bytes = Vec::new();
        for (number, part) in (1..).zip(wanted["parts"].as_array().unwrap()) {
            assert_eq!(part["partNumber"], number);
            assert_eq!(part["etag"], format!("\"part-{number}\""));
            bytes.extend(self.parts.remove(&(oid.to_owned(), number)).unwrap());
        }
        assert_eq!(sha256(&bytes), oid, "the parts are not the file");
        self.objects.insert(oid.to_owned(), bytes);
        Reply::status(200)
    }

    fn commit(&mut self, asked: &Asked, id: &str) -> Reply {
        use base64::Engine;
        let text = std::str::from_utf8(&asked.body).unwrap();
        let mut files = self.repos[id].files.clone();
        for line in text.lines() {
            let line: Value = serde_json::from_str(line).unwrap();
            let value = &line["value"];
            let path = value["path"].as_str().unwrap_or_default().to_owned();
            match line["key"].as_str().unwrap() {
                "header" => assert!(!value["summary"].as_str().unwrap().is_empty()),
                "file" => {
                    assert_eq!(value["encoding"], "base64");
                    let bytes = base64::engine::general_purpose::STANDARD.decode(value["content"].as_str().unwrap());
                    files.insert(path, bytes.unwrap());
                }
                "lfsFile" => {
                    let Some(bytes) = self.objects.get(value["oid"].as_str().unwrap()) else {
                        return Reply::status(400);
                    };
                    assert_eq!(value["size"], bytes.len());
                    files.insert(path, bytes.clone());
                }
                other => panic!("unknown operation {other}"),
            }
        }
        let commit = git_digest(text.as_bytes());
        let repo = self.repos.get_mut(id).unwrap();
        (repo.files, repo.commit) = (files, commit.clone());
        Reply::json(&json!({ "commitOid": commit, "commitUrl": format!("{}/{id}/commit/{commit}", self.endpoint) }))
    }
}

/// Decodes the characters of revisions that URLs encode.
fn decoded(part: &str) -> String {
    part.replace("%2F", "/").replace("%2B", "+")
}

fn sibling(name: &str, bytes: &[u8]) -> Value {
    // The digest in git of a large file is that of its pointer.
    let mut entry = json!({ "rfilename": name, "size": bytes.len(), "blobId": git_digest(bytes) });
    if is_large(name) {
        entry["lfs"] = json!({ "sha256": sha256(bytes), "size": bytes.len(), "pointerSize": 134 });
        entry["blobId"] = git_digest(b"pointer").into();
    }
    entry
}

fn ranged(asked: &Asked, bytes: &[u8]) -> Reply {
    match asked.first() {
        None => Reply { body: bytes.to_vec(), ..Reply::status(200) },
        Some(first) if first >= bytes.len() => Reply::status(416),
        Some(first) => Reply { body: bytes[first..].to_vec(), ..Reply::status(206) }
            .header("Content-Range", format!("bytes {first}-{}/{}", bytes.len() - 1, bytes.len())),
    }
}
