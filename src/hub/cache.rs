//! The cache of `huggingface_hub` for one repository.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::{OpenOptionsExt, symlink},
    path::{Path, PathBuf},
};

use rustix::fs::{FlockOperation, OFlags, flock, statvfs};

use super::{HubError, Repository, digest::is_etag};

/// Directories of a repository in the cache.
pub(super) struct Cache {
    /// Directory of all repositories.
    home: PathBuf,
    folder: String,
}

impl Cache {
    pub(super) fn new(home: &Path, repository: &Repository) -> Self {
        Self { home: home.into(), folder: format!("models--{}", repository.id.replace('/', "--")) }
    }

    fn root(&self) -> PathBuf {
        self.home.join(&self.folder)
    }

    pub(super) fn blob(&self, etag: &str) -> PathBuf {
        self.root().join("blobs").join(etag)
    }

    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.root().join("snapshots").join(commit)
    }

    /// Creates the directories.
    pub(super) fn create(&self) -> Result<(), HubError> {
        let locks = self.home.join(".locks").join(&self.folder);
        for directory in [self.root().join("blobs"), self.root().join("refs"), self.root().join("snapshots"), locks] {
            create_dir(&directory)?;
        }
        Ok(())
    }

    /// Returns the free bytes of the file system, if it tells them.
    pub(super) fn free_bytes(&self) -> Option<u64> {
        let space = statvfs(self.root()).ok()?;
        space.f_bavail.checked_mul(space.f_frsize)
    }

    /// Locks a blob against other downloads, `huggingface_hub`'s included. Calls `wait` while another one has it.
    pub(super) fn lock(&self, etag: &str, wait: impl Fn() -> Result<(), HubError>) -> Result<File, HubError> {
        let path = self.home.join(".locks").join(&self.folder).join(format!("{etag}.lock"));
        let file = open(&path).map_err(HubError::file("open the lock", &path))?;
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(file),
                Err(rustix::io::Errno::WOULDBLOCK) => wait()?,
                // A file system without locks: a second download at the same time fails its check.
                Err(_) => return Ok(file),
            }
        }
    }

    /// Opens the beginning of a blob.
    pub(super) fn incomplete(&self, etag: &str) -> Result<(File, PathBuf), HubError> {
        let path = self.root().join("blobs").join(format!("{etag}.incomplete"));
        let file = open(&path).map_err(HubError::file("open the download", &path))?;
        Ok((file, path))
    }

    /// Links a file of a snapshot to its blob.
    pub(super) fn link(&self, commit: &str, name: &str, etag: &str) -> Result<(), HubError> {
        let path = self.snapshot(commit).join(name);
        create_dir(path.parent().unwrap_or(&path))?;
        let depth = name.matches('/').count() + 2;
        let target = Path::new(&"../".repeat(depth)).join("blobs").join(etag);
        match symlink(&target, &path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                if path.read_link().is_ok_and(|existing| existing == target) {
                    return Ok(());
                }
                fs::remove_file(&path).and_then(|()| symlink(&target, &path))
            }
            other => other,
        }
        .map_err(HubError::file("link the file", &path))
    }

    /// Records the commit of a branch or tag. The cache cannot record both `a` and `a/b`: the second one recorded stays
    /// without a ref, so each run asks the Hub for it.
    pub(super) fn record(&self, revision: &str, commit: &str) -> Result<(), HubError> {
        if is_etag(revision) {
            return Ok(());
        }
        let refs = self.root().join("refs");
        let path = refs.join(revision);
        let folder = path.parent().unwrap_or(&path);
        let is_taken = folder.ancestors().take_while(|parent| *parent != refs).any(Path::is_file) || path.is_dir();
        if is_taken {
            return Ok(());
        }
        create_dir(folder)?;
        let write = || {
            let mut file = tempfile::NamedTempFile::new_in(folder)?;
            file.write_all(commit.as_bytes())?;
            file.persist(&path).map_err(io::Error::from).map(|_| ())
        };
        write().map_err(HubError::file("record the revision", &path))
    }
}

fn create_dir(path: &Path) -> Result<(), HubError> {
    fs::create_dir_all(path).map_err(HubError::file("create the directory", path))
}

/// Opens a regular file to read and write; creates it. A link is an error, and a FIFO does not block.
fn open(path: &Path) -> io::Result<File> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let file = File::options().read(true).write(true).create(true).truncate(false).custom_flags(flags).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("not a regular file")) }
}
