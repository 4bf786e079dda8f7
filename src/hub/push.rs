//! Uploads files to a repository in one commit: large ones to large-file storage, the others within the commit.
//!
//! Storage keeps what an interrupted push has uploaded, and the commit comes last: a repetition sends the rest, and
//! readers see all of a push or nothing.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::Deserialize;
use serde_json::{Value, json};
use unweight_format::bundle::Progress;
use ureq::http::header;

use super::{
    HubError, Listing, Repository,
    client::{Call, Client, Content, Failed},
    digest::Etag,
    url::{encode, join},
};

/// Maximum size of an answer, bytes.
const ANSWER_MAX: u64 = 16 << 20;
/// Files per request before the commit.
const FILES_PER_REQUEST: usize = 100;
/// Bytes at the start of a file by which the Hub tells text from data.
const SAMPLE: usize = 512;
/// Maximum size of all files within a commit, bytes.
const COMMIT_MAX: u64 = 256 << 20;
/// Maximum number of parts of a file.
const PARTS_MAX: u64 = 10_000;
/// The next step without a token.
const MAY_WRITE: &str = "pushing needs a token that may write: set HF_TOKEN, or run `hf auth login`";
/// The branch of a new repository.
const MAIN: &str = "main";
/// Bytes that are read at once.
const CHUNK: usize = 1 << 20;

/// A file to upload.
#[derive(Debug, Clone)]
pub struct LocalFile {
    /// Relative path in the repository.
    pub name: String,
    /// The file.
    pub path: PathBuf,
}

/// How to push.
#[derive(Debug, Clone, Default)]
pub struct PushOptions {
    /// Whether a repository that does not exist becomes private.
    pub private: bool,
    /// Subject of the commit.
    pub message: String,
}

/// What a push did.
#[derive(Debug, Clone)]
pub struct Pushed {
    /// The commit; that of the repository if it had all files.
    pub commit: String,
    /// Bytes that were uploaded to large-file storage.
    pub uploaded_bytes: u64,
    /// Files that the repository had.
    pub unchanged: u64,
    /// Whether the repository was created.
    pub created: bool,
}

/// A file with its digests.
struct Hashed<'a> {
    file: &'a LocalFile,
    size: u64,
    sha256: String,
    git: String,
}

#[derive(Deserialize)]
struct Preupload {
    files: Vec<Mode>,
}

#[derive(Deserialize)]
struct Mode {
    path: String,
    #[serde(rename = "uploadMode")]
    mode: String,
}

#[derive(Deserialize)]
struct Batch {
    objects: Vec<Object>,
}

#[derive(Deserialize)]
struct Object {
    oid: String,
    actions: Option<Actions>,
    error: Option<ObjectError>,
}

#[derive(Deserialize)]
struct ObjectError {
    message: String,
}

#[derive(Deserialize)]
struct Actions {
    upload: Option<Action>,
    verify: Option<Action>,
}

#[derive(Deserialize)]
struct Action {
    href: String,
    #[serde(default)]
    header: BTreeMap<String, Value>,
}

#[derive(Deserialize)]
struct Committed {
    #[serde(rename = "commitOid")]
    commit: String,
}

/// Uploads files to a branch of a repository, and creates the repository if it does not exist.
///
/// # Errors
/// A file cannot be read or changes, the server fails or refuses, or `progress` asks to stop.
pub fn push(
    client: &Client,
    repository: &Repository,
    files: &[LocalFile],
    options: &PushOptions,
    progress: &dyn Progress,
) -> Result<Pushed, HubError> {
    let push = Push { client, repository, progress };
    let total = files.iter().map(|file| size_of(&file.path)).sum::<Result<u64, _>>()?;
    progress.start(total);
    let hashed = files.iter().map(|file| push.hash(file)).collect::<Result<Vec<_>, _>>()?;
    let (existing, created) = push.open(options.private)?;
    let has = |file: &&Hashed<'_>| {
        existing.etags.get(file.file.name.as_str()).is_some_and(|etag| *etag == file.sha256 || *etag == file.git)
    };
    let (unchanged, changed): (Vec<_>, Vec<_>) = hashed.iter().partition(has);
    let unchanged = unchanged.len() as u64;
    if changed.is_empty() {
        return Ok(Pushed { commit: existing.commit, uploaded_bytes: 0, unchanged, created });
    }
    let large = push.large(&changed)?;
    let (large, small): (Vec<&Hashed>, Vec<&Hashed>) =
        changed.into_iter().partition(|file| large.contains(&file.file.name));
    progress.start(large.iter().map(|file| file.size).sum());
    let uploaded_bytes = push.upload_all(&large)?;
    let commit = push.commit(&large, &small, &options.message)?;
    Ok(Pushed { commit, uploaded_bytes, unchanged, created })
}

/// The files that a repository has.
#[derive(Default)]
struct Existing {
    commit: String,
    etags: HashMap<String, String>,
}

impl From<Listing> for Existing {
    fn from(listing: Listing) -> Self {
        let etags = listing.files.into_iter().map(|file| (file.name, file.etag)).collect();
        Self { commit: listing.commit, etags }
    }
}

struct Push<'a> {
    client: &'a Client,
    repository: &'a Repository,
    progress: &'a dyn Progress,
}

impl Push<'_> {
    fn what(&self, name: &str) -> String {
        format!("{}: {name}", self.repository.id)
    }

    fn check_cancelled(&self, name: &str) -> Result<(), HubError> {
        if self.progress.cancelled() { Err(HubError::Interrupted { what: self.what(name) }) } else { Ok(()) }
    }

    /// Computes both digests of a file, because the server decides which one counts.
    fn hash<'f>(&self, file: &'f LocalFile) -> Result<Hashed<'f>, HubError> {
        let mut opened = File::open(&file.path).map_err(HubError::file("open the file", &file.path))?;
        let size = size_of(&file.path)?;
        let (mut sha, mut git) = (Etag::large(), Etag::git(size));
        let (mut chunk, mut bytes) = (vec![0; CHUNK], 0);
        loop {
            self.check_cancelled(&file.name)?;
            let read = opened.read(&mut chunk).map_err(HubError::file("read the file", &file.path))?;
            if read == 0 {
                break;
            }
            bytes += read as u64;
            sha.update(&chunk[..read]);
            git.update(&chunk[..read]);
            self.progress.advance(read as u64);
        }
        if bytes != size {
            return Err(changed(&file.path));
        }
        Ok(Hashed { file, size, sha256: sha.finish(), git: git.finish() })
    }

    /// Lists the repository, or creates it and the branch.
    fn open(&self, private: bool) -> Result<(Existing, bool), HubError> {
        let repository = self.repository;
        let is_new = match repository.list_all(self.client) {
            Ok(listing) => return Ok((listing.into(), false)),
            Err(HubError::NoRepository { what, host, help }) if !self.client.has_token() => {
                let help = if self.client.withholds_token() { help } else { MAY_WRITE };
                return Err(HubError::Denied { what, host, status: 401, reason: String::new(), help });
            }
            Err(HubError::NoRepository { host, .. }) if !repository.is_branch() => {
                let (what, revision) = (repository.id.clone(), repository.revision.clone());
                return Err(HubError::NoRevision { what, host, revision });
            }
            Err(HubError::NoRepository { .. }) => true,
            Err(HubError::NoRevision { .. }) if repository.is_branch() && self.client.has_token() => false,
            Err(error) => return Err(error),
        };
        let create = |path: &str, body: Value| {
            self.post(&repository.id, path, &body.to_string(), "application/json", |_| Ok(()))
        };
        if is_new {
            let (organization, name) = repository.id.split_once('/').unwrap_or_default();
            let body = json!({ "type": "model", "name": name, "organization": organization, "private": private });
            create("/api/repos/create", body)?;
        }
        if is_new && repository.revision == MAIN {
            return Ok((Existing::default(), true));
        }
        create(&repository.api(&format!("branch/{}", encode(&repository.revision))), json!({}))?;
        Ok((repository.list_all(self.client)?.into(), is_new))
    }

    fn post<T>(
        &self,
        what: &str,
        path: &str,
        body: &str,
        kind: &str,
        read: impl Fn(ureq::http::Response<ureq::Body>) -> Result<T, Failed>,
    ) -> Result<T, HubError> {
        let headers = [("content-type", kind), ("accept", accept(kind))];
        self.client
            .with_retries(what, || {
                let call = Call {
                    method: "POST",
                    headers: &headers,
                    body: Some(Content::Bytes(body.as_bytes())),
                    ..Call::get(self.client.url(path))
                };
                read(self.client.send(what, &call)?)
            })
            .map_err(|error| self.repository.with_revision(error))
    }

    /// Returns the names of the files that go to large-file storage.
    fn large(&self, files: &[&Hashed<'_>]) -> Result<HashSet<String>, HubError> {
        let (id, mut large) = (&self.repository.id, HashSet::new());
        let path = self.repository.api(&format!("preupload/{}", encode(&self.repository.revision)));
        for files in files.chunks(FILES_PER_REQUEST) {
            let listed = files.iter().map(|file| {
                let sample = STANDARD.encode(sample(&file.file.path)?);
                Ok(json!({ "path": file.file.name, "size": file.size, "sample": sample }))
            });
            let body = json!({ "files": listed.collect::<Result<Vec<_>, HubError>>()? }).to_string();
            let modes: Preupload =
                self.post(id, &path, &body, "application/json", |r| self.client.read_json(id, r, ANSWER_MAX))?;
            for file in files {
                let mode = modes.files.iter().find(|mode| mode.path == file.file.name).map(|mode| mode.mode.as_str());
                match mode {
                    Some("lfs") => _ = large.insert(file.file.name.clone()),
                    Some("regular") => {}
                    _ => return Err(self.client.invalid(&self.what(&file.file.name), "no way to upload it".into())),
                }
            }
        }
        Ok(large)
    }

    /// Uploads what large-file storage lacks. Returns the bytes.
    fn upload_all(&self, files: &[&Hashed<'_>]) -> Result<u64, HubError> {
        let (id, mut uploaded) = (&self.repository.id, 0);
        let path = format!("/{id}.git/info/lfs/objects/batch");
        for files in files.chunks(FILES_PER_REQUEST) {
            let objects: Vec<_> = files.iter().map(|file| json!({ "oid": file.sha256, "size": file.size })).collect();
            let body = json!({
                "operation": "upload",
                "transfers": ["basic", "multipart"],
                "hash_algo": "sha256",
                "objects": objects,
            });
            let batch: Batch = self.post(id, &path, &body.to_string(), "application/vnd.git-lfs+json", |response| {
                self.client.read_json(id, response, ANSWER_MAX)
            })?;
            for file in files {
                let what = self.what(&file.file.name);
                let Some(object) = batch.objects.iter().find(|object| object.oid == file.sha256) else {
                    return Err(self.client.invalid(&what, "storage does not answer for it".into()));
                };
                if let Some(error) = &object.error {
                    return Err(self.client.invalid(&what, format!("storage refuses it: {}", error.message)));
                }
                // Without an action storage has the file.
                match object.actions.as_ref().and_then(|actions| Some((actions.upload.as_ref()?, &actions.verify))) {
                    None => self.progress.advance(file.size),
                    Some((upload, verify)) => {
                        self.progress.file(&file.file.name);
                        self.upload(file, upload)?;
                        uploaded += file.size;
                        if let Some(verify) = verify {
                            self.verify(file, verify)?;
                        }
                    }
                }
            }
        }
        Ok(uploaded)
    }

    fn upload(&self, file: &Hashed<'_>, action: &Action) -> Result<(), HubError> {
        let what = self.what(&file.file.name);
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let Some(part_bytes) = action.header.get("chunk_size") else {
            let headers: Vec<_> = action.header.iter().map(|(name, value)| (name.clone(), text(value))).collect();
            return self.put(file, &action.href, 0..file.size, &headers).map(|_| ());
        };
        let invalid = |reason: &str| self.client.invalid(&what, reason.to_owned());
        let part_bytes: u64 =
            text(part_bytes).parse().ok().filter(|&bytes| bytes > 0).ok_or_else(|| invalid("no size of parts"))?;
        let parts = file.size.div_ceil(part_bytes);
        let mut urls = BTreeMap::new();
        for (number, url) in &action.header {
            if let (Ok(number), Some(url)) = (number.parse::<u64>(), url.as_str()) {
                urls.insert(number, url);
            }
        }
        if parts > PARTS_MAX || !urls.keys().copied().eq(1..=parts) {
            return Err(invalid(&format!("{} addresses for {parts} parts", urls.len())));
        }
        let mut sent = Vec::new();
        for (number, url) in urls {
            let first = (number - 1) * part_bytes;
            let etag = self.put(file, url, first..file.size.min(first + part_bytes), &[])?;
            sent.push(json!({ "partNumber": number, "etag": etag }));
        }
        let body = json!({ "oid": file.sha256, "parts": sent }).to_string();
        self.post_to(&what, &action.href, &body)
    }

    /// Sends a range of a file. Returns the etag of the answer.
    fn put(
        &self,
        file: &Hashed<'_>,
        href: &str,
        range: std::ops::Range<u64>,
        headers: &[(String, String)],
    ) -> Result<String, HubError> {
        let what = self.what(&file.file.name);
        let path = &file.file.path;
        let headers: Vec<_> = headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let url = join(&self.client.url(""), href);
        let url = url.ok_or_else(|| self.client.invalid(&what, "no usable address of storage".into()))?;
        let etag = self.client.with_retries(&what, || {
            self.check_cancelled(&file.file.name)?;
            let mut opened = File::open(path).map_err(HubError::file("open the file", path))?;
            opened.seek(SeekFrom::Start(range.start)).map_err(HubError::file("read the file", path))?;
            let bytes = range.end - range.start;
            let reader = Sent { file: opened.take(bytes), progress: self.progress };
            let call = Call {
                method: "PUT",
                headers: &headers,
                body: Some(Content::Reader(std::cell::RefCell::new(Box::new(reader)), bytes)),
                ..Call::get(url.clone())
            };
            let sent = self.client.send(&what, &call);
            self.check_cancelled(&file.file.name)?;
            let sent = sent?;
            let etag = sent.headers().get(header::ETAG).and_then(|value| value.to_str().ok());
            Ok(etag.unwrap_or_default().to_owned())
        })?;
        self.progress.advance(range.end - range.start);
        Ok(etag)
    }

    /// Asks storage to confirm a file.
    fn verify(&self, file: &Hashed<'_>, action: &Action) -> Result<(), HubError> {
        let body = json!({ "oid": file.sha256, "size": file.size }).to_string();
        self.post_to(&self.what(&file.file.name), &action.href, &body)
    }

    fn post_to(&self, what: &str, href: &str, body: &str) -> Result<(), HubError> {
        let url = join(&self.client.url(""), href);
        let url = url.ok_or_else(|| self.client.invalid(what, "no usable address of storage".into()))?;
        let kind = "application/vnd.git-lfs+json";
        self.client.with_retries(what, || {
            let headers = [("content-type", kind), ("accept", kind)];
            let body = Some(Content::Bytes(body.as_bytes()));
            let call = Call { method: "POST", headers: &headers, body, ..Call::get(url.clone()) };
            self.client.send(what, &call).map(|_| ())
        })
    }

    /// Makes the commit: all files become visible at once.
    fn commit(&self, large: &[&Hashed<'_>], small: &[&Hashed<'_>], message: &str) -> Result<String, HubError> {
        let id = &self.repository.id;
        let bytes: u64 = small.iter().map(|file| file.size).sum();
        if bytes > COMMIT_MAX {
            let reason = format!("{bytes} bytes of files outside of large-file storage, limit {COMMIT_MAX}");
            return Err(self.client.invalid(id, reason));
        }
        let mut body = json!({ "key": "header", "value": { "summary": message, "description": "" } }).to_string();
        for file in small {
            let bytes = fs::read(&file.file.path).map_err(HubError::file("read the file", &file.file.path))?;
            let mut git = Etag::git(bytes.len() as u64);
            git.update(&bytes);
            if git.finish() != file.git {
                return Err(changed(&file.file.path));
            }
            let content = STANDARD.encode(&bytes);
            let value = json!({ "path": file.file.name, "encoding": "base64", "content": content });
            body += &format!("\n{}", json!({ "key": "file", "value": value }));
        }
        for file in large {
            let value = json!({ "path": file.file.name, "algo": "sha256", "oid": file.sha256, "size": file.size });
            body += &format!("\n{}", json!({ "key": "lfsFile", "value": value }));
        }
        let path = self.repository.api(&format!("commit/{}", encode(&self.repository.revision)));
        self.check_cancelled("commit")?;
        let committed: Committed =
            self.post(id, &path, &body, "application/x-ndjson", |r| self.client.read_json(id, r, ANSWER_MAX))?;
        Ok(committed.commit)
    }
}

/// A file on its way; ends when the work is cancelled.
struct Sent<'a> {
    file: io::Take<File>,
    progress: &'a dyn Progress,
}

impl Read for Sent<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.progress.cancelled() {
            return Err(io::Error::other("interrupted"));
        }
        self.file.read(out)
    }
}

fn accept(kind: &str) -> &str {
    if kind.contains("lfs") { kind } else { "application/json" }
}

fn size_of(path: &Path) -> Result<u64, HubError> {
    Ok(fs::metadata(path).map_err(HubError::file("read the metadata of the file", path))?.len())
}

fn sample(path: &Path) -> Result<Vec<u8>, HubError> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(SAMPLE as u64).read_to_end(&mut bytes));
    read.map_err(HubError::file("read the file", path)).map(|_| bytes)
}

fn changed(path: &Path) -> HubError {
    let source = io::Error::other("it was written to while it was read");
    HubError::File { path: path.into(), action: "push the file", source }
}
