//! The journal of a search: one line per measurement, on disk before the next measurement begins.
//!
//! ```text
//! {"tune":1,"key":"9a...","axes":["hard.gate.pipeline","easy.gate.pipeline"],"start":["transcode","..."]}
//! {"phase":"sweep","incumbent":["exponents","..."],"challenger":["transcode","..."],"answer":{"measured":{...}}}
//! ```
//! An incomplete last line, which a killed process leaves, is cut off. Any other malformed line is an error.

use std::{
    collections::HashMap,
    fs::{self, File, Metadata, OpenOptions, TryLockError},
    io::{self, ErrorKind, Read, Seek, SeekFrom, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use unweight_format::bundle::{Holder, io_code};

use super::{
    answer::{Answer, Phase},
    space::{Point, Space},
};

/// The version of the lines.
const VERSION: u32 = 1;
/// The largest journal that is read, in bytes: tens of thousands of measurements. A search has hundreds.
pub const JOURNAL_BYTES_MAX: u64 = 64 << 20;

/// The reason why a journal cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JournalError {
    /// The file cannot be read or written.
    #[error("{}: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// A line is not a line of a journal.
    #[error("{}: line {line}: {reason}; repair the line, or begin with a new file", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The line number, from 1.
        line: usize,
        /// The fault of the line.
        reason: String,
    },
    /// The journal belongs to another subject.
    #[error("{}: the measurements belong to {found}, not to {want}; begin with a new file", .path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// The key in the journal.
        found: String,
        /// The requested key.
        want: String,
    },
    /// The file exceeds [`JOURNAL_BYTES_MAX`].
    #[error("{}: {bytes} bytes exceed the limit of {JOURNAL_BYTES_MAX}; begin with a new file", .path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The size of the file in bytes.
        bytes: u64,
    },
    /// The path does not name a regular file.
    #[error("{}: not a regular file; choose another path", .path.display())]
    NoFile {
        /// The path.
        path: PathBuf,
    },
    /// Another process writes the file.
    #[error("{}: {by} is writing this journal; wait for its end, or choose another file", .path.display())]
    Busy {
        /// The file.
        path: PathBuf,
        /// The process that writes it.
        by: Holder,
    },
}

impl JournalError {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Io { source, .. } => io_code(source),
            Self::Damaged { .. } => "journal-damaged",
            Self::Key { .. } => "journal-of-another-search",
            Self::TooLarge { .. } => "journal-too-large",
            Self::NoFile { .. } => "journal-not-a-file",
            Self::Busy { .. } => "journal-locked",
        }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Head {
    tune: u32,
    key: String,
    axes: Vec<String>,
    start: Vec<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line<N> {
    phase: Phase,
    incumbent: Vec<N>,
    challenger: Vec<N>,
    answer: Answer,
}

/// The measurements, by phase and points.
type Answers = HashMap<(Phase, Point, Point), Answer>;

/// The measurements of one search, in a file.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: Locked,
    start: Point,
    answers: Answers,
}

/// A journal file that is locked and read before the search is set up, so that errors appear early. A claim that is
/// dropped without [`Claim::begin`] removes a file that it created.
#[derive(Debug)]
pub struct Claim {
    /// Declared before the file, so that a created file is removed while it is still locked.
    unused: Unused,
    path: PathBuf,
    file: Locked,
    bytes: Vec<u8>,
}

/// A file whose lock is released explicitly. Closing the file would leave the lock to a child process that is being
/// started, which holds a copy of the file until it executes its program.
#[derive(Debug)]
struct Locked(File);

impl Drop for Locked {
    fn drop(&mut self) {
        // The system releases the lock at the latest when all copies are closed.
        let _ = self.0.unlock();
    }
}

/// A created file that nothing was written to, with its device and inode. It is removed on drop.
#[derive(Debug)]
struct Unused(Option<(PathBuf, FileId)>);

impl Drop for Unused {
    fn drop(&mut self) {
        if let Some((path, id)) = &self.0
            && file_id(path.metadata()) == Some(*id)
        {
            // An empty file that remains is a valid journal, too.
            let _ = fs::remove_file(path);
        }
    }
}

/// The device and inode of a file.
type FileId = (u64, u64);

fn file_id(metadata: io::Result<Metadata>) -> Option<FileId> {
    metadata.ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

impl Claim {
    /// Locks the file at `path` and creates it if it does not exist.
    ///
    /// # Errors
    /// [`JournalError`] if the path is not a regular file, cannot be opened, is too large, is written by another
    /// process, or does not begin with a journal's head.
    pub fn new(path: &Path) -> Result<Self, JournalError> {
        let io = |source| JournalError::Io { path: path.to_owned(), source };
        loop {
            // Opening a pipe would wait for its other end.
            if path.metadata().is_ok_and(|metadata| !metadata.is_file()) {
                return Err(JournalError::NoFile { path: path.to_owned() });
            }
            let mut options = OpenOptions::new();
            options.read(true).write(true);
            let (file, fresh) = match options.open(path) {
                Err(error) if error.kind() == ErrorKind::NotFound => match options.create_new(true).open(path) {
                    // A link to a missing file; otherwise another process was faster.
                    Err(error) if error.kind() == ErrorKind::AlreadyExists && path.is_symlink() => {
                        return Err(JournalError::NoFile { path: path.to_owned() });
                    }
                    Err(error) if error.kind() == ErrorKind::AlreadyExists => continue,
                    file => (file.map_err(io)?, true),
                },
                file => (file.map_err(io)?, false),
            };
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    return Err(JournalError::Busy { path: path.to_owned(), by: Holder::of(&file) });
                }
                Err(TryLockError::Error(source)) => return Err(io(source)),
            }
            let file = Locked(file);
            let id = file_id(file.0.metadata());
            if id != file_id(path.metadata()) {
                // Another claim removed this file. The next file of this name has its own lock.
                continue;
            }
            let unused = Unused(id.filter(|_| fresh).map(|id| (path.to_owned(), id)));
            let mut bytes = Vec::new();
            (&file.0).take(JOURNAL_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(io)?;
            if bytes.len() as u64 > JOURNAL_BYTES_MAX {
                let bytes = file.0.metadata().map_or(JOURNAL_BYTES_MAX + 1, |metadata| metadata.len());
                return Err(JournalError::TooLarge { path: path.to_owned(), bytes });
            }
            let claim = Self { unused, path: path.to_owned(), file, bytes };
            if claim.complete_len() > 0 {
                claim.head()?;
            }
            return Ok(claim);
        }
    }

    /// Checks that the file is empty or a journal of this key.
    ///
    /// # Errors
    /// [`JournalError::Key`] for a journal of another key, [`JournalError::Damaged`] for anything else.
    pub fn check(&self, key: &str) -> Result<(), JournalError> {
        if self.complete_len() > 0 {
            let head = self.head()?;
            if head.key != key {
                let (found, want) = (head.key.chars().take(64).collect(), key.to_owned());
                return Err(JournalError::Key { path: self.path.clone(), found, want });
            }
            return Ok(());
        }
        // Compares only the known part of a head; [`Claim::begin`] compares the rest.
        let head = Head { tune: VERSION, key: key.to_owned(), axes: Vec::new(), start: Vec::new() };
        let text = serde_json::to_string(&head).unwrap_or_default();
        let prefix = text.split("[]").next().unwrap_or_default();
        self.check_prefix(prefix.as_bytes(), self.bytes.len().min(prefix.len()))
    }

    /// Begins or resumes the journal of a search for `key` in `space` from `start` on. A resumed search begins at
    /// [`Journal::start`].
    ///
    /// # Errors
    /// [`JournalError`] if the file belongs to another search, is damaged or cannot be written.
    pub fn begin(mut self, key: &str, space: &Space, start: &Point) -> Result<Journal, JournalError> {
        self.check(key)?;
        let complete_len = self.complete_len();
        let axes = space.axes().iter().map(|axis| axis.coordinate.to_string()).collect();
        let names = space.names(start).into_iter().map(str::to_owned).collect();
        let head = Head { tune: VERSION, key: key.to_owned(), axes, start: names };
        if complete_len == 0 {
            self.check_prefix(&serde_json::to_vec(&head).unwrap_or_default(), self.bytes.len())?;
        }
        let (begun, answers) = read(&self.path, &self.bytes[..complete_len], &head.axes, space)?;
        let path = self.path.clone();
        let io = |source| JournalError::Io { path: path.clone(), source };
        // A measurement that a kill cut off is measured again.
        self.file.0.set_len(complete_len as u64).map_err(io)?;
        self.file.0.seek(SeekFrom::Start(complete_len as u64)).map_err(io)?;
        self.unused.0 = None;
        let start = begun.unwrap_or_else(|| start.clone());
        let mut journal = Journal { path: self.path, file: self.file, start, answers };
        if complete_len == 0 {
            journal.write(&head)?;
            // Also syncs the directory, which contains the name of a new file.
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
            File::open(folder).and_then(|folder| folder.sync_all()).map_err(io)?;
        }
        Ok(journal)
    }

    /// The number of bytes of whole lines.
    fn complete_len(&self) -> usize {
        self.bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1)
    }

    /// Checks that a file without a whole line is a prefix of `head`: only such a file may be overwritten.
    fn check_prefix(&self, head: &[u8], length: usize) -> Result<(), JournalError> {
        if head.starts_with(&self.bytes[..length]) {
            return Ok(());
        }
        let reason = "neither a journal nor the beginning of this one".to_owned();
        Err(JournalError::Damaged { path: self.path.clone(), line: 1, reason })
    }

    /// Parses the first of the whole lines.
    fn head(&self) -> Result<Head, JournalError> {
        let damaged = |reason| JournalError::Damaged { path: self.path.clone(), line: 1, reason };
        let line = self.bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
        let head: Head = serde_json::from_slice(line).map_err(|error| damaged(error.to_string()))?;
        if head.tune != VERSION {
            return Err(damaged(format!(
                "the journal has version {}; this program writes version {VERSION}",
                head.tune
            )));
        }
        Ok(head)
    }
}

impl Journal {
    /// Opens or begins a journal: [`Claim::new`] and [`Claim::begin`].
    ///
    /// # Errors
    /// [`JournalError`] if the file belongs to another search, is damaged or cannot be written.
    pub fn open(path: &Path, key: &str, space: &Space, start: &Point) -> Result<Self, JournalError> {
        Claim::new(path)?.begin(key, space, start)
    }

    /// The point at which the search began. It may differ from the start of a new search, which may begin at the saved
    /// result of this one.
    pub fn start(&self) -> &Point {
        &self.start
    }

    /// The number of measurements.
    pub fn len(&self) -> usize {
        self.answers.len()
    }

    /// Whether there are no measurements.
    pub fn is_empty(&self) -> bool {
        self.answers.is_empty()
    }

    /// The measurement of two points in a phase, if the journal has it.
    pub fn answer(&self, phase: Phase, incumbent: &Point, challenger: &Point) -> Option<&Answer> {
        self.answers.get(&(phase, incumbent.clone(), challenger.clone()))
    }

    /// Appends a measurement and flushes it to disk. Returns the answer as a later read parses it; its times may differ
    /// in the last bit.
    ///
    /// # Errors
    /// [`JournalError::Io`] if the file cannot be written.
    pub fn append(
        &mut self,
        space: &Space,
        phase: Phase,
        incumbent: &Point,
        challenger: &Point,
        answer: Answer,
    ) -> Result<Answer, JournalError> {
        let line = Line { phase, incumbent: space.names(incumbent), challenger: space.names(challenger), answer };
        self.write(&line)?;
        let parsed = serde_json::to_vec(&line.answer).and_then(|text| serde_json::from_slice::<Answer>(&text));
        let answer = parsed.map_err(|error| JournalError::Io { path: self.path.clone(), source: error.into() })?;
        self.answers.insert((phase, incumbent.clone(), challenger.clone()), answer.clone());
        Ok(answer)
    }

    fn write(&mut self, line: &impl Serialize) -> Result<(), JournalError> {
        let mut write = || {
            let mut text = serde_json::to_vec(line)?;
            text.push(b'\n');
            self.file.0.write_all(&text)?;
            self.file.0.sync_data()
        };
        write().map_err(|source| JournalError::Io { path: self.path.clone(), source })
    }
}

/// Parses the start and all measurements of whole lines, of which the first is a checked head.
fn read(path: &Path, bytes: &[u8], axes: &[String], space: &Space) -> Result<(Option<Point>, Answers), JournalError> {
    let damaged = |line: usize, reason: String| JournalError::Damaged { path: path.to_owned(), line, reason };
    let (mut start, mut answers) = (None, HashMap::new());
    let point =
        |number: usize, names: &[String]| space.point(names).map_err(|error| damaged(number, error.to_string()));
    let lines = bytes.split_inclusive(|byte| *byte == b'\n').map(|line| &line[..line.len() - 1]);
    for (number, line) in (1..).zip(lines) {
        if number == 1 {
            let head: Head = serde_json::from_slice(line).map_err(|error| damaged(1, error.to_string()))?;
            if head.axes != axes {
                return Err(damaged(1, "its coordinates differ from those of this search".to_owned()));
            }
            start = Some(point(1, &head.start)?);
            continue;
        }
        let line: Line<String> = serde_json::from_slice(line).map_err(|error| damaged(number, error.to_string()))?;
        let at = (line.phase, point(number, &line.incumbent)?, point(number, &line.challenger)?);
        if answers.insert(at, line.answer).is_some() {
            return Err(damaged(number, "the same points are measured a second time".to_owned()));
        }
    }
    Ok((start, answers))
}
