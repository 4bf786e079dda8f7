//! What was measured, a line each, on disk before the next measurement begins.
//!
//! ```text
//! {"tune":1,"key":"9a...","axes":["hard.gate.path","easy.gate.variant"],"start":["transcode","..."]}
//! {"phase":"sweep","incumbent":["exponents","..."],"challenger":["transcode","..."],"answer":{"measured":{...}}}
//! ```
//! A kill leaves a last line that is not whole: it is cut off. Anything else that is no such line is damage, and
//! refused.

use std::{
    collections::HashMap,
    fs::{File, OpenOptions, TryLockError},
    io::{Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::{
    search::{Answer, Phase},
    space::{Point, Space},
};

/// Version of the lines.
const VERSION: u32 = 1;

/// Why a journal cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JournalError {
    /// The file.
    #[error("{}: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A line that is none of a journal.
    #[error("{}: line {line}: {reason}; mend the line, or begin with a new file", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// Measurements of something else.
    #[error("{}: these measurements are of {found} and not of {want}; begin with a new file", .path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// Its key.
        found: String,
        /// The key asked for.
        want: String,
    },
    /// Somebody else writes it.
    #[error("{}: another process writes this journal; let it end, or choose another file", .path.display())]
    Busy {
        /// The file.
        path: PathBuf,
    },
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

/// What was measured of two points.
type Answers = HashMap<(Phase, Point, Point), Answer>;

/// The measurements of one search.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    start: Point,
    answers: Answers,
}

impl Journal {
    /// Opens a journal, or begins one, for the measurements of `key` in `space` from `start` on. A search that goes on
    /// begins at [`Journal::start`].
    ///
    /// # Errors
    /// [`JournalError`].
    pub fn open(path: &Path, key: &str, space: &Space, start: &Point) -> Result<Self, JournalError> {
        let io = |source| JournalError::Io { path: path.to_owned(), source };
        let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).map_err(io)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(JournalError::Busy { path: path.to_owned() }),
            Err(TryLockError::Error(source)) => return Err(io(source)),
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(io)?;
        // What a kill cut off is measured again.
        let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
        let axes = space.axes().iter().map(|axis| axis.coordinate.to_string()).collect();
        let head = Head {
            tune: VERSION,
            key: key.to_owned(),
            axes,
            start: space.names(start).into_iter().map(str::to_owned).collect(),
        };
        // Of a file without a line the beginning of a head alone is ours to write over.
        if whole == 0 && !serde_json::to_vec(&head).is_ok_and(|head| head.starts_with(&bytes)) {
            let reason = "neither a journal nor the beginning of this one".to_owned();
            return Err(JournalError::Damaged { path: path.to_owned(), line: 1, reason });
        }
        bytes.truncate(whole);
        let (begun, answers) = read(path, &bytes, key, space)?;
        let start = begun.unwrap_or_else(|| start.clone());
        file.set_len(whole as u64).map_err(io)?;
        file.seek(SeekFrom::Start(whole as u64)).map_err(io)?;
        let mut journal = Self { path: path.to_owned(), file, start, answers };
        if whole == 0 {
            journal.write(&head)?;
            // The name of a new file is in its folder.
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
            File::open(folder).and_then(|folder| folder.sync_all()).map_err(io)?;
        }
        Ok(journal)
    }

    /// Where the search began whose journal this is: what was found may have been saved since, and be where another
    /// one would begin.
    pub fn start(&self) -> &Point {
        &self.start
    }

    /// Measurements that it has.
    pub fn len(&self) -> usize {
        self.answers.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.answers.is_empty()
    }

    /// What was measured of two points.
    pub fn answer(&self, phase: Phase, incumbent: &Point, challenger: &Point) -> Option<&Answer> {
        self.answers.get(&(phase, incumbent.clone(), challenger.clone()))
    }

    /// Adds a measurement: it is on disk when this returns. The answer as it will be read again, whose times may differ
    /// in their last bit.
    ///
    /// # Errors
    /// The file cannot be written.
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
        let again = serde_json::to_vec(&line.answer).and_then(|text| serde_json::from_slice::<Answer>(&text));
        let answer = again.map_err(|error| JournalError::Io { path: self.path.clone(), source: error.into() })?;
        self.answers.insert((phase, incumbent.clone(), challenger.clone()), answer.clone());
        Ok(answer)
    }

    fn write(&mut self, line: &impl Serialize) -> Result<(), JournalError> {
        let mut write = || {
            let mut text = serde_json::to_vec(line)?;
            text.push(b'\n');
            self.file.write_all(&text)?;
            self.file.sync_data()
        };
        write().map_err(|source| JournalError::Io { path: self.path.clone(), source })
    }
}

/// The start and all measurements of whole lines.
fn read(path: &Path, bytes: &[u8], key: &str, space: &Space) -> Result<(Option<Point>, Answers), JournalError> {
    let damaged = |line: usize, reason: String| JournalError::Damaged { path: path.to_owned(), line, reason };
    let (mut start, mut answers) = (None, HashMap::new());
    let place =
        |number: usize, names: &[String]| space.point(names).map_err(|error| damaged(number, error.to_string()));
    let lines = bytes.split_inclusive(|byte| *byte == b'\n').map(|line| &line[..line.len() - 1]);
    for (number, line) in (1..).zip(lines) {
        if number == 1 {
            let head: Head = serde_json::from_slice(line).map_err(|error| damaged(1, error.to_string()))?;
            if head.tune != VERSION {
                return Err(damaged(1, format!("version {} of the lines; this program writes {VERSION}", head.tune)));
            }
            if head.key != key {
                let (found, want) = (head.key.chars().take(64).collect(), key.to_owned());
                return Err(JournalError::Key { path: path.to_owned(), found, want });
            }
            let axes: Vec<String> = space.axes().iter().map(|axis| axis.coordinate.to_string()).collect();
            if head.axes != axes {
                return Err(damaged(1, "other coordinates than are searched now".to_owned()));
            }
            start = Some(place(1, &head.start)?);
            continue;
        }
        let line: Line<String> = serde_json::from_slice(line).map_err(|error| damaged(number, error.to_string()))?;
        let at = (line.phase, place(number, &line.incumbent)?, place(number, &line.challenger)?);
        if answers.insert(at, line.answer).is_some() {
            return Err(damaged(number, "the same points a second time".to_owned()));
        }
    }
    Ok((start, answers))
}
