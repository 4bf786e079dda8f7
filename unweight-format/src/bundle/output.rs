//! An output directory that is not a bundle but is written like one: it appears under its name only when it is
//! complete.

use std::{
    collections::HashSet,
    fs::File,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use serde::{Deserialize, Serialize};

use super::{
    BundleError, Progress,
    files::{self, Input},
    stage::Stage,
};
use crate::Digest;

/// An output directory that is written in `<output>.partial` (`docs/adr/0007-staging-protocol.md`).
#[derive(Debug)]
pub struct OutputDir {
    stage: Stage,
    /// Files written or taken over by this run.
    made: Mutex<HashSet<String>>,
}

/// The record of a finished file, kept until the output is complete.
#[derive(Serialize, Deserialize)]
struct Record {
    key: Digest,
    digest: Digest,
}

impl OutputDir {
    /// Prepares to make `output` from `inputs`. With `resume`, finished files of an interrupted run can be taken over.
    ///
    /// # Errors
    /// The output exists, overlaps an input or cannot be written, or another process is writing it.
    pub fn open(inputs: &[PathBuf], output: &Path, resume: bool) -> Result<Self, BundleError> {
        let stage = Stage::open(inputs, output, None, resume)?;
        let there = files::walk(&stage.tree())?.into_iter().map(|(name, _)| name).collect();
        stage.keep_only(&there, &HashSet::new())?;
        Ok(Self { stage, made: Mutex::default() })
    }

    /// Fails early if this number of bytes does not fit on the disk.
    ///
    /// # Errors
    /// The bytes do not fit.
    pub fn reserve(&self, bytes: u64) -> Result<(), BundleError> {
        self.stage.reserve(bytes)
    }

    /// Takes over a finished file of an interrupted run, if the key is the same and its bytes have not changed. The key
    /// must be a digest of everything that determines the bytes.
    pub fn take_over(&self, name: &str, key: Digest) -> bool {
        let record = files::read_small(&self.stage.record(name), 4096).ok();
        let record = record.and_then(|bytes| serde_json::from_slice::<Record>(&bytes).ok());
        let Some(record) = record.filter(|record| record.key == key) else { return false };
        let contents = files::read_through(&self.stage.tree().join(name), false, |_| Ok(()));
        let same = contents.is_ok_and(|contents| contents.digest == record.digest);
        if same {
            self.note(name);
        }
        same
    }

    /// Creates a file.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn create(&self, name: &str) -> Result<OutputFile<'_>, BundleError> {
        let work = self.stage.growing(name);
        let file = files::create(&work).map_err(self.stage.write_error(&work))?;
        Ok(OutputFile { output: self, name: name.into(), work, file })
    }

    /// Writes a small file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn put(&self, name: &str, bytes: &[u8]) -> Result<(), BundleError> {
        self.stage.put(name, bytes)?;
        self.note(name);
        Ok(())
    }

    /// Copies a file with its mode and modification time.
    ///
    /// # Errors
    /// The file cannot be read or written, it changes, or `progress` requested to stop.
    pub fn copy(&self, from: &Path, name: &str, progress: &dyn Progress) -> Result<(), BundleError> {
        let advance = |bytes| {
            progress.advance(bytes);
            self.check(progress)
        };
        self.stage.copy(&Input::open(from)?, name, false, advance, |_| Ok(()))?;
        self.note(name);
        Ok(())
    }

    /// Fails if `progress` requested to stop.
    ///
    /// # Errors
    /// [`BundleError::Interrupted`].
    pub fn check(&self, progress: &dyn Progress) -> Result<(), BundleError> {
        self.stage.check_cancelled(progress)
    }

    /// Gives the complete output its name.
    ///
    /// # Errors
    /// The output cannot be renamed, or its name has been taken since.
    pub fn finish(self) -> Result<(), BundleError> {
        let made = self.made.into_inner().unwrap_or_else(PoisonError::into_inner);
        self.stage.keep_only(&made, &HashSet::new())?;
        self.stage.publish()
    }

    fn note(&self, name: &str) {
        self.made.lock().unwrap_or_else(PoisonError::into_inner).insert(name.into());
    }
}

/// A file of an [`OutputDir`] that is being written.
#[derive(Debug)]
pub struct OutputFile<'a> {
    output: &'a OutputDir,
    name: String,
    work: PathBuf,
    file: File,
}

impl OutputFile<'_> {
    /// Writes bytes at an offset.
    ///
    /// # Errors
    /// The bytes cannot be written.
    pub fn write_at(&self, bytes: &[u8], at: u64) -> Result<(), BundleError> {
        let stage = &self.output.stage;
        files::write_at(&self.file, bytes, at).map_err(stage.write_error(&self.work))?;
        stage.count_written(bytes.len() as u64);
        Ok(())
    }

    /// Syncs the file to disk and gives it its name. With a key, a later run can [take it over](OutputDir::take_over).
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn finish(self, key: Option<Digest>) -> Result<(), BundleError> {
        let stage = &self.output.stage;
        self.file.sync_all().map_err(stage.write_error(&self.work))?;
        let digest = match key {
            Some(_) => Some(files::read_through(&self.work, false, |_| Ok(()))?.digest),
            None => None,
        };
        stage.accept(&self.work, &self.name)?;
        if let (Some(key), Some(digest)) = (key, digest) {
            let record = serde_json::to_vec(&Record { key, digest }).expect("a record is two strings");
            stage.put_record(&self.name, &record)?;
        }
        self.output.note(&self.name);
        Ok(())
    }
}

/// Lists all files below `root` with relative names with `/`, sorted. Symbolic links are followed.
///
/// # Errors
/// A directory cannot be listed, or contains something that is neither a file nor a directory.
pub fn walk(root: &Path) -> Result<Vec<(String, PathBuf)>, BundleError> {
    files::walk(root)
}
