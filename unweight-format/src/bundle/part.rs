//! A model compressed on several machines: each makes a part, and [`merge`] joins the parts to the bundle that one
//! machine would have made.
//!
//! ```text
//! source --compress, part 1 of 3--> a/  shards 1 and 4, copies --+
//!        --compress, part 2 of 3--> b/  shard 2                  +--merge--> bundle/
//!        --compress, part 3 of 3--> c/  shard 3                --+
//! ```
//! Every machine has the whole source, and reads all of its headers: so the parts divide the files in the same way
//! without talking to each other, and `merge`, which needs the parts alone, can tell that they were made of one source.

use std::{
    collections::{BTreeMap, HashSet},
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
    time::Instant,
};

use serde::{Deserialize, Serialize};

use super::{
    BundleError, CompressReport, MergeOptions, Progress, VerifyAfter,
    compress::{Finish, seal, tensor_reports},
    config,
    decompress::check_contents,
    files::{self, Input},
    manifest::{self, FileEntry, Manifest, Options, Version},
    pipeline::on_threads,
    read::check_size,
    report::{coded, peak_rss_bytes, ratio, saved, totals},
    shard::Shard,
    source::{Kind, Source, SourceFile, index_of},
    stage::{Replaceable, Stage},
};
use crate::Digest;

/// What makes a folder a part.
pub const FILE_NAME: &str = "unweight.part.json";
/// Most parts.
pub const PARTS_MAX: u32 = 65536;
/// Of files up to here every part has the digest.
const DIGESTED_MAX: u64 = 16 << 20;

/// One of several parts of a model: `2/5` is the second of five.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Part {
    index: u32,
    of: u32,
}

impl Part {
    /// The `index`-th of `of`, from 1 on; `None` if there is no such part.
    pub fn new(index: u32, of: u32) -> Option<Self> {
        (1..=PARTS_MAX).contains(&of).then_some(Self { index, of }).filter(|part| (1..=part.of).contains(&part.index))
    }

    /// Index of the part, from 1 on.
    pub fn index(self) -> u32 {
        self.index
    }

    /// Number of parts.
    pub fn of(self) -> u32 {
        self.of
    }

    /// Whether it has the files beside the weights.
    pub(crate) fn has_copies(self) -> bool {
        self.index == 1
    }

    /// The names of the files that are this part's. Weights go one by one, the largest first, to the part that has
    /// fewest bytes; all else goes to the first part.
    pub(crate) fn files(self, model: &Source) -> HashSet<String> {
        let mut weights: Vec<&SourceFile> =
            model.files.iter().filter(|file| matches!(file.kind, Kind::Weights { .. })).collect();
        weights.sort_by(|a, b| (b.bytes, &a.name).cmp(&(a.bytes, &b.name)));
        let mut held: BTreeMap<u32, u64> = (1..=self.of).map(|part| (part, 0)).collect();
        let mut own = HashSet::new();
        for file in weights {
            let Some((&part, bytes)) = held.iter_mut().min_by_key(|(part, bytes)| (**bytes, **part)) else { break };
            *bytes += file.bytes;
            if part == self.index {
                own.insert(file.name.clone());
            }
        }
        if self.has_copies() {
            let others = model.files.iter().filter(|file| !matches!(file.kind, Kind::Weights { .. }));
            own.extend(others.map(|file| file.name.clone()));
        }
        own
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index, self.of)
    }
}

impl FromStr for Part {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = text.split_once('/').and_then(|(index, of)| Some((index.parse().ok()?, of.parse().ok()?)));
        let part = numbers.and_then(|(index, of)| Self::new(index, of));
        part.ok_or_else(|| format!("write I/N, such as 2/5: a part I from 1 to N of at most {PARTS_MAX}"))
    }
}

/// A file of the source as every part sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Seen {
    name: String,
    size: u64,
    /// Of weights, of length and header; of another file its contents, unless it is large.
    digest: Option<Digest>,
}

/// `unweight.part.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PartFile {
    format: String,
    version: Version,
    creator: String,
    part: Part,
    /// Everything that decides the bytes of a shard beside the source.
    fingerprint: String,
    options: Options,
    /// All files of the source, by name.
    source: Vec<Seen>,
    /// Those of this part, by name. Of changed files the stored form is not made yet.
    pub(crate) files: Vec<FileEntry>,
}

/// `format` of every part.
const FORMAT: &str = "unweight-part";

impl PartFile {
    /// What the part of a model has made.
    pub(crate) fn new(
        part: Part,
        fingerprint: String,
        options: Options,
        model: &Source,
        files: Vec<FileEntry>,
    ) -> Result<Self, BundleError> {
        let seen = |file: &SourceFile| {
            let digest = match &file.kind {
                Kind::Weights { header_bytes, .. } => Some(Digest::of(header_bytes)),
                _ if file.bytes <= DIGESTED_MAX => {
                    let input = Input::open_same(&file.path, &file.stamp)?;
                    Some(Digest::of(&input.read(0, file.bytes)?))
                }
                _ => None,
            };
            Ok(Seen { name: file.name.clone(), size: file.bytes, digest })
        };
        Ok(Self {
            format: FORMAT.into(),
            version: manifest::VERSION,
            creator: manifest::CREATOR.into(),
            part,
            fingerprint,
            options,
            source: model.files.iter().map(seen).collect::<Result<_, BundleError>>()?,
            files,
        })
    }

    /// The digest of the JSON text, then that text.
    pub(crate) fn to_bytes(&self) -> (Digest, Vec<u8>) {
        let json = serde_json::to_vec(self).expect("a part is strings, numbers and lists");
        let digest = Digest::of(&json);
        (digest, [digest.to_string().as_bytes(), b"\n", &json].concat())
    }

    /// Reads and checks that of a folder; `None` if the folder has none.
    pub(crate) fn read(dir: &Path) -> Result<Option<Self>, BundleError> {
        let path = dir.join(FILE_NAME);
        if path.symlink_metadata().is_err() {
            return Ok(None);
        }
        let fail = |reason: String| BundleError::Manifest { path: path.clone(), reason };
        let bytes = files::read_small(&path, manifest::BYTES_MAX)?;
        let (digest, json) = bytes.split_at_checked(33).ok_or_else(|| fail("it is cut off".into()))?;
        if digest != format!("{}\n", Digest::of(json)).as_bytes() {
            return Err(fail("its digest is not that of its bytes; make the part again".into()));
        }
        let part: Self = serde_json::from_slice(json).map_err(|error| fail(error.to_string()))?;
        if part.format != FORMAT {
            return Err(fail(format!("its format is '{}', not '{FORMAT}'", part.format.escape_default())));
        }
        if Part::new(part.part.index, part.part.of).is_none() {
            return Err(fail(format!("there is no part {}", part.part)));
        }
        Manifest::new(part.options.clone(), part.files.clone()).check().map_err(fail)?;
        Ok(Some(part))
    }

    /// Which part it is.
    pub(crate) fn part(&self) -> Part {
        self.part
    }

    /// Names and bytes of the files that lie in the part's folder.
    pub(crate) fn stored(&self) -> Vec<(String, u64)> {
        self.files
            .iter()
            .flat_map(|file| match file.original() {
                Some(original) => vec![(original, file.size())],
                None => file.stored(),
            })
            .collect()
    }
}

/// Joins the parts of a model to a bundle: the very bytes that one run of `compress` gives.
///
/// Weights are not copied where the file system can give a file a second name; the parts stay as they are.
///
/// # Errors
/// A folder is not a part or is damaged; parts have different sources, options or programs; a part is missing or given
/// twice; the output exists or cannot be written; or `progress` asked to stop.
pub fn merge(
    parts: &[PathBuf],
    output: &Path,
    options: &MergeOptions,
    progress: &dyn Progress,
) -> Result<CompressReport, BundleError> {
    let started = Instant::now();
    fn read(dir: &Path) -> Result<(&Path, PartFile), BundleError> {
        if !dir.metadata().map_err(BundleError::io("open the part", dir))?.is_dir() {
            return Err(BundleError::NotADirectory { path: dir.into() });
        }
        let part = PartFile::read(dir)?.ok_or_else(|| BundleError::NotAPart { path: dir.into() })?;
        Ok((dir, part))
    }
    let parts = parts.iter().map(|dir| read(dir)).collect::<Result<Vec<_>, BundleError>>()?;
    let first = agreeing(&parts)?;
    if options.sign.is_some() {
        let files = parts.iter().flat_map(|(_, part)| &part.files);
        if let Some(file) = files.into_iter().find(|file| file.sha256().is_none()) {
            return Err(BundleError::UnsignableParts { file: file.name().into() });
        }
    }
    let replaceable = options.force.then_some(Replaceable::Bundle);
    let inputs: Vec<PathBuf> = parts.iter().map(|(dir, _)| dir.to_path_buf()).collect();
    Stage::check(&inputs, output, replaceable.as_ref())?;
    // Sorted by name, as the source is.
    let mut entries: Vec<(&Path, FileEntry)> =
        parts.iter().flat_map(|(dir, part)| part.files.iter().map(|file| (*dir, file.clone()))).collect();
    entries.sort_by(|(_, a), (_, b)| a.name().cmp(b.name()));
    for (dir, part) in &parts {
        let here = |error| BundleError::Part { path: dir.to_path_buf(), source: Box::new(error) };
        for (name, bytes) in part.stored() {
            check_size(dir, name, bytes).map_err(here)?;
        }
        for file in part.files.iter().filter_map(FileEntry::weights) {
            Shard::open(dir, file.clone()).map_err(here)?;
        }
    }
    let stage = Stage::open(&inputs, output, replaceable, false)?;
    let made = on_threads(options.threads, || {
        let total: u64 = entries.iter().map(|(_, file)| file.size()).sum();
        let tensors = entries.iter().filter_map(|(_, file)| file.weights()).flat_map(|file| &file.tensors);
        let verified = match options.verify {
            VerifyAfter::None => 0,
            _ => tensors.map(|tensor| tensor.original_bytes().unwrap_or(0)).sum(),
        };
        progress.start(total.saturating_add(verified));
        let mut kinds = Vec::with_capacity(entries.len());
        for (dir, file) in &entries {
            if progress.cancelled() {
                return Err(stage.interrupted());
            }
            progress.file(file.name());
            kinds.push(take(&stage, dir, file, progress)?);
        }
        let files = entries.into_iter().map(|(_, file)| file).collect();
        let finish = Finish {
            stage: &stage,
            verify: options.verify,
            ram_bytes: options.ram_bytes,
            sign: options.sign.as_ref(),
            progress,
        };
        seal(&finish, kinds.iter().map(Option::as_ref), files, first.options.clone())
    });
    // Nothing is kept for another run, so an error must not suggest to resume.
    let made = made.map_err(|error| match error {
        BundleError::Interrupted { .. } => BundleError::Cancelled,
        BundleError::DiskFull { path, source, .. } => BundleError::Io { action: "write the file", path, source },
        other => other,
    })?;
    stage.finish()?;
    let tensors = tensor_reports(&made.manifest.files);
    let original_bytes = made.manifest.files.iter().map(FileEntry::size).sum();
    Ok(CompressReport {
        encodings: totals(&tensors),
        coded_tensors: coded(&tensors),
        saved_bytes: saved(original_bytes, made.stored_bytes),
        tensors,
        part: None,
        files: made.manifest.files.len() as u64,
        large_copies: Vec::new(),
        unmarked_configs: Vec::new(),
        resumed_files: Vec::new(),
        resumed_tensors: 0,
        original_bytes,
        stored_bytes: made.stored_bytes,
        ratio: ratio(made.stored_bytes, original_bytes),
        verified_tensors: made.verified_tensors,
        seconds: started.elapsed().as_secs_f64(),
        peak_rss_bytes: peak_rss_bytes(),
        manifest_digest: made.manifest.manifest_digest,
    })
}

/// Checks that these are all the parts of one model, each once. Returns one of them.
fn agreeing<'a>(parts: &'a [(&Path, PartFile)]) -> Result<&'a PartFile, BundleError> {
    let Some((first_dir, first)) = parts.first() else { return Err(BundleError::NoParts) };
    let mut by_index: BTreeMap<u32, &Path> = BTreeMap::new();
    for (dir, part) in parts {
        let differ = |what: &'static str| BundleError::PartsDiffer {
            path: dir.to_path_buf(),
            other: first_dir.to_path_buf(),
            what,
        };
        if (part.version, &part.creator) != (first.version, &first.creator) {
            return Err(differ("another program or version"));
        }
        if part.part.of != first.part.of {
            return Err(differ("another number of parts"));
        }
        if (&part.fingerprint, &part.options) != (&first.fingerprint, &first.options) {
            return Err(differ("other options"));
        }
        if part.source != first.source {
            return Err(differ("another source"));
        }
        if let Some(other) = by_index.insert(part.part.index, dir) {
            let (path, other) = (dir.to_path_buf(), other.to_path_buf());
            return Err(BundleError::PartTwice { part: part.part, path, other });
        }
    }
    if (&first.creator, first.version) != (&manifest::CREATOR.to_owned(), manifest::VERSION) {
        return Err(BundleError::PartCreator { path: first_dir.to_path_buf(), creator: first.creator.clone() });
    }
    let of = first.part.of;
    if let Some(index) = (1..=of).find(|index| !by_index.contains_key(index)) {
        return Err(BundleError::PartMissing { part: Part { index, of } });
    }
    // Every file of the source in one part, as all of them saw it.
    let mut left: BTreeMap<&str, &Seen> = first.source.iter().map(|seen| (seen.name.as_str(), seen)).collect();
    for (dir, part) in parts {
        for file in &part.files {
            let known = left.remove(file.name()).is_some_and(|seen| {
                let digest = file.weights().map_or_else(|| file.digest(), |weights| weights.header_digest);
                seen.size == file.size() && seen.digest.is_none_or(|seen| seen == digest)
            });
            if !known {
                let reason = format!("file '{}' is not as all parts saw it", file.name().escape_default());
                return Err(BundleError::Manifest { path: dir.join(FILE_NAME), reason });
            }
        }
    }
    match left.keys().next() {
        None => Ok(first),
        Some(name) => Err(BundleError::Manifest {
            path: first_dir.join(FILE_NAME),
            reason: format!("no part has the file '{}'", name.escape_default()),
        }),
    }
}

/// Takes a file of a part over. Of one that the bundle has in another form, returns what it is made of.
fn take(stage: &Stage, dir: &Path, file: &FileEntry, progress: &dyn Progress) -> Result<Option<Kind>, BundleError> {
    let advance = |bytes| {
        progress.advance(bytes);
        if progress.cancelled() { Err(stage.interrupted()) } else { Ok(()) }
    };
    let here = |error| BundleError::Part { path: dir.to_path_buf(), source: Box::new(error) };
    let Some(original) = file.original() else {
        stage.link(&dir.join(file.name()), file.name(), advance)?;
        return Ok(None);
    };
    let from = Input::open(&dir.join(&original))?;
    stage.copy(&from, &original, file.sha256().is_some(), advance, |got| {
        check_contents(file, &original, got).map_err(here)
    })?;
    if file.changed().is_none() {
        return Ok(None);
    }
    // It was checked to have its digest.
    let text = files::read_small(&stage.tree().join(&original), file.size())?;
    let fail = |reason: String| BundleError::Manifest { path: dir.join(FILE_NAME), reason };
    Ok(match file {
        FileEntry::Index(_) => Some(Kind::Index(index_of(&dir.join(original), &text)?)),
        FileEntry::Config(_) => {
            let kept = config::check(&text).map(|()| Kind::Config(text));
            Some(kept.map_err(|reason| fail(format!("'{}' gets no keys: {reason}", file.name().escape_default())))?)
        }
        FileEntry::Weights(_) | FileEntry::Copied(_) => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_written_as_fractions() {
        for (text, part) in [("1/1", Part { index: 1, of: 1 }), ("65536/65536", Part { index: 65536, of: 65536 })] {
            assert_eq!(text.parse(), Ok(part));
            assert_eq!(part.to_string(), text);
        }
        for text in ["", "1", "0/3", "4/3", "1/0", "1/65537", "-1/3", "1/3/5", "a/b", "1 / 3", "5000000000/5000000000"]
        {
            assert!(text.parse::<Part>().unwrap_err().starts_with("write I/N"), "{text}");
        }
    }
}
