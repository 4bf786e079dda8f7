//! Downloads the files of a repository. An interrupted download continues where it stopped.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use unweight_format::bundle::Progress;
use ureq::{
    Body,
    http::{Response, StatusCode, header},
};

use super::{
    HubError, Listing, RemoteFile, Repository,
    cache::Cache,
    client::{Call, Client, Failed},
    digest::Etag,
};

/// Files that are fetched at the same time.
const CONNECTIONS: usize = 4;
/// Bytes that are read at once.
const CHUNK: usize = 256 << 10;
/// Tries without a new byte before a download fails.
const IDLE_TRIES: u32 = 4;
/// Tries of one file, however many bytes each brings.
const TRIES_MAX: u32 = 1000;

/// A repository in the cache.
pub struct Fetched {
    /// Directory of the snapshot.
    pub snapshot: PathBuf,
    /// Bytes that were transferred.
    pub bytes: u64,
}

/// Downloads what the cache lacks of a listing, and returns its snapshot.
///
/// # Errors
/// The server fails, a file arrives with another size or digest, the disk is full, or `progress` asks to stop. What has
/// arrived of a file is kept, and nothing unfinished has its final name.
pub fn fetch(
    client: &Client,
    cache_home: &Path,
    repository: &Repository,
    listing: &Listing,
    progress: &dyn Progress,
) -> Result<Fetched, HubError> {
    let cache = Cache::new(cache_home, repository);
    cache.create()?;
    // One download per blob, because files can have equal contents.
    let blobs: BTreeMap<&str, &RemoteFile> = listing.files.iter().map(|file| (file.etag.as_str(), file)).collect();
    let missing: Vec<&RemoteFile> = blobs.into_values().filter(|file| !is_complete(&cache, file)).collect();
    let total: u64 = missing.iter().map(|file| file.size).sum();
    let begun = |file: &&RemoteFile| cache.blob(&format!("{}.incomplete", file.etag)).metadata().map_or(0, |m| m.len());
    let needed = total.saturating_sub(missing.iter().map(begun).sum());
    if let Some(free) = cache.free_bytes().filter(|&free| free < needed) {
        let (what, path) = (repository.id.clone(), cache_home.into());
        return Err(HubError::NoRoom { what, path, needed, free });
    }
    progress.start(total);
    let job =
        Job { client, cache: &cache, repository, commit: &listing.commit, progress, stop: AtomicBool::new(false) };
    let bytes = job.all(&missing)?;
    for file in &listing.files {
        cache.link(&listing.commit, &file.name, &file.etag)?;
    }
    cache.record(&repository.revision, &listing.commit)?;
    Ok(Fetched { snapshot: cache.snapshot(&listing.commit), bytes })
}

fn is_complete(cache: &Cache, file: &RemoteFile) -> bool {
    cache.blob(&file.etag).metadata().is_ok_and(|metadata| metadata.is_file() && metadata.len() == file.size)
}

/// One download of a repository.
struct Job<'a> {
    client: &'a Client,
    cache: &'a Cache,
    repository: &'a Repository,
    commit: &'a str,
    progress: &'a dyn Progress,
    /// Set by the first connection that fails.
    stop: AtomicBool,
}

/// The beginning of a file.
struct Begun {
    file: File,
    path: PathBuf,
    /// Bytes that have arrived.
    bytes: u64,
    digest: Etag,
}

impl Job<'_> {
    /// Fetches files on several connections. Returns the bytes that were transferred.
    fn all(&self, files: &[&RemoteFile]) -> Result<u64, HubError> {
        let next = AtomicUsize::new(0);
        let (bytes, failure) = (Mutex::new(0u64), Mutex::new(None));
        let work = || {
            while let Some(file) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
                if self.stop.load(Ordering::Relaxed) {
                    break;
                }
                match self.one(file) {
                    Ok(new) => *bytes.lock().unwrap_or_else(PoisonError::into_inner) += new,
                    Err(error) => {
                        // The others stop because of this one: the first error is the cause.
                        failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                        self.stop.store(true, Ordering::Relaxed);
                        break;
                    }
                }
            }
        };
        thread::scope(|scope| {
            for _ in 1..CONNECTIONS.min(files.len()) {
                // Without more threads this one fetches all files.
                let _ = thread::Builder::new().name("hub".into()).spawn_scoped(scope, work);
            }
            work();
        });
        match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok(bytes.into_inner().unwrap_or_else(PoisonError::into_inner)),
        }
    }

    fn what(&self, file: &RemoteFile) -> String {
        format!("{}: {}", self.repository.id, file.name)
    }

    fn check_cancelled(&self, file: &RemoteFile) -> Result<(), HubError> {
        if self.stop.load(Ordering::Relaxed) || self.progress.cancelled() {
            return Err(HubError::Interrupted { what: self.what(file) });
        }
        Ok(())
    }

    /// Fetches a file. Returns the bytes that were transferred.
    fn one(&self, file: &RemoteFile) -> Result<u64, HubError> {
        self.progress.file(&file.name);
        let _lock = self.cache.lock(&file.etag, || {
            thread::sleep(Duration::from_millis(100));
            self.check_cancelled(file)
        })?;
        if is_complete(self.cache, file) {
            self.progress.advance(file.size);
            return Ok(0);
        }
        let mut begun = self.begin(file)?;
        let mut new = self.rest(file, &mut begun)?;
        let mut difference = self.finish(file, begun)?;
        if new < file.size && difference.is_some() {
            // The beginning was damaged, perhaps by a crash: fetch all of it.
            self.progress.starts_over(&format!("{}: the beginning was damaged", file.name));
            let mut begun = self.begin(file)?;
            new += self.rest(file, &mut begun)?;
            difference = self.finish(file, begun)?;
        }
        difference.map_or(Ok(new), Err)
    }

    /// Opens what has arrived of a file, and reads it for its digest.
    fn begin(&self, file: &RemoteFile) -> Result<Begun, HubError> {
        let (mut opened, path) = self.cache.incomplete(&file.etag)?;
        let io = || HubError::file("read the download", &path);
        if opened.metadata().map_err(io())?.len() > file.size {
            opened.set_len(0).map_err(io())?;
        }
        let (mut digest, mut bytes) = (Etag::like(&file.etag, file.size), 0);
        let mut chunk = vec![0; CHUNK];
        loop {
            self.check_cancelled(file)?;
            match opened.read(&mut chunk).map_err(io())? {
                0 => break,
                read => {
                    digest.update(&chunk[..read]);
                    bytes += read as u64;
                }
            }
        }
        self.progress.advance(bytes);
        Ok(Begun { file: opened, path, bytes, digest })
    }

    /// Fetches the bytes that are missing, in as many tries as that takes.
    fn rest(&self, file: &RemoteFile, begun: &mut Begun) -> Result<u64, HubError> {
        let (mut transferred, mut idle) = (0, 0);
        for _ in 0..TRIES_MAX {
            if begun.bytes == file.size {
                return Ok(transferred);
            }
            let before = begun.bytes;
            let tried = self.attempt(file, begun, &mut transferred);
            idle = if begun.bytes > before { 0 } else { idle + 1 };
            match tried {
                Ok(()) => {}
                Err(Failed { error, retry: None }) => return Err(error),
                Err(Failed { error, .. }) if idle >= IDLE_TRIES => return Err(error),
                // New bytes: the connection broke, but the server answers.
                Err(_) if idle == 0 => {}
                Err(Failed { retry: Some(asked), .. }) => self.client.pause(&self.what(file), idle, asked)?,
            }
        }
        let source = Box::new(io::Error::other(format!("{TRIES_MAX} tries")));
        Err(HubError::Stopped { what: self.what(file), at: begun.bytes, size: file.size, source })
    }

    /// Sends one request for the missing bytes, and appends what arrives.
    fn attempt(&self, file: &RemoteFile, begun: &mut Begun, transferred: &mut u64) -> Result<(), Failed> {
        self.check_cancelled(file)?;
        let what = self.what(file);
        let range = Some(begun.bytes).filter(|&bytes| bytes > 0);
        let call = Call { range, ..Call::get(self.client.url(&self.repository.resolve(self.commit, &file.name))) };
        let response = self.client.send(&what, &call)?;
        if begun.bytes > 0 && !self.continues(file, begun, &response)? {
            self.restart(file, begun)?;
            if response.status() == StatusCode::RANGE_NOT_SATISFIABLE {
                let source = Box::new(io::Error::other("the server has no such range"));
                let error = HubError::Stopped { what, at: 0, size: file.size, source };
                return Err(Failed { error, retry: Some(None) });
            }
        }
        let mut reader = response.into_body().into_reader();
        let mut chunk = vec![0; CHUNK];
        loop {
            self.check_cancelled(file)?;
            let stopped = |source: io::Error, at| {
                let error = HubError::Stopped { what: what.clone(), at, size: file.size, source: source.into() };
                Failed { error, retry: Some(None) }
            };
            let read = match reader.read(&mut chunk) {
                Ok(0) if begun.bytes < file.size => {
                    return Err(stopped(io::ErrorKind::UnexpectedEof.into(), begun.bytes));
                }
                Ok(0) => return Ok(()),
                Ok(read) => read,
                Err(error) => return Err(stopped(error, begun.bytes)),
            };
            if begun.bytes + read as u64 > file.size {
                self.restart(file, begun)?;
                let (expected, got) = (file.size.to_string(), format!("more than {}", file.size));
                return Err(HubError::Contents { what, kind: "the size", expected, got }.into());
            }
            begun.file.write_all(&chunk[..read]).map_err(HubError::file("write the download", &begun.path))?;
            begun.digest.update(&chunk[..read]);
            begun.bytes += read as u64;
            *transferred += read as u64;
            self.progress.advance(read as u64);
            if begun.bytes == file.size && has_end(&mut reader) {
                return Ok(());
            }
        }
    }

    /// Whether the answer starts at the first missing byte.
    fn continues(&self, file: &RemoteFile, begun: &Begun, response: &Response<Body>) -> Result<bool, HubError> {
        if response.status() != StatusCode::PARTIAL_CONTENT {
            return Ok(false);
        }
        let range = response.headers().get(header::CONTENT_RANGE).and_then(|value| value.to_str().ok());
        let first = range.and_then(|range| range.strip_prefix("bytes ")?.split('-').next()?.trim().parse().ok());
        if first == Some(begun.bytes) {
            return Ok(true);
        }
        let reason = format!("byte {} was requested, but the answer has the range {range:?}", begun.bytes);
        Err(self.client.invalid(&self.what(file), reason))
    }

    /// Drops what has arrived.
    fn restart(&self, file: &RemoteFile, begun: &mut Begun) -> Result<(), HubError> {
        let emptied = begun.file.set_len(0).and_then(|()| begun.file.seek(SeekFrom::Start(0)));
        emptied.map_err(HubError::file("write the download", &begun.path))?;
        (begun.bytes, begun.digest) = (0, Etag::like(&file.etag, file.size));
        Ok(())
    }

    /// Gives a complete file its name. Returns the difference if its digest is another, and removes it.
    fn finish(&self, file: &RemoteFile, begun: Begun) -> Result<Option<HubError>, HubError> {
        let (kind, got) = (begun.digest.kind(), begun.digest.finish());
        if got != file.etag {
            fs::remove_file(&begun.path).map_err(HubError::file("remove the download", &begun.path))?;
            let (what, expected) = (self.what(file), file.etag.clone());
            return Ok(Some(HubError::Contents { what, kind, expected, got }));
        }
        let blob = self.cache.blob(&file.etag);
        let named = begun.file.sync_all().and_then(|()| fs::rename(&begun.path, &blob));
        named.map_err(HubError::file("write the download", &begun.path))?;
        Ok(None)
    }
}

/// Whether a body has no further byte. Its last byte has been read, so an error is as good as the end.
fn has_end(reader: &mut impl Read) -> bool {
    !matches!(reader.read(&mut [0]), Ok(1..))
}
