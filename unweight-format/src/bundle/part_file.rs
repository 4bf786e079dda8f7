//! The file `unweight.part`, which makes a directory a part of a bundle.

use std::{collections::BTreeMap, path::Path};

use serde::{Deserialize, Serialize};

use super::{
    BundleError, Part,
    files::{self, Input},
    manifest::{self, FileEntry, Manifest, Options, Version},
    source::{Kind, Source, SourceFile},
};
use crate::Digest;

/// The name of the file that marks a directory as a part of `compress --part`.
pub const FILE_NAME: &str = "unweight.part";
/// Maximum size of a copied file whose digest every part contains.
const DIGESTED_BYTES_MAX: u64 = 16 << 20;

/// A file of the source, as every part records it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct SourceEntry {
    name: String,
    size: u64,
    /// For weights, of length and header; for other files, of the contents, unless they are large.
    digest: Option<Digest>,
}

/// The contents of `unweight.part`: a line with the digest of the rest, then a JSON object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PartFile {
    format: String,
    version: Version,
    creator: String,
    part: Part,
    /// Everything other than the source that determines the bytes of a shard.
    fingerprint: String,
    pub(super) options: Options,
    /// All files of the source, sorted by name.
    source: Vec<SourceEntry>,
    /// The files of this part, sorted by name. The stored contents of changed files are not made yet.
    pub(crate) files: Vec<FileEntry>,
}

/// The value of `format` in every part.
const FORMAT: &str = "unweight-part";

impl PartFile {
    /// Describes a finished part of a model.
    pub(crate) fn new(
        part: Part,
        fingerprint: String,
        options: Options,
        model: &Source,
        files: Vec<FileEntry>,
    ) -> Result<Self, BundleError> {
        let entry = |file: &SourceFile| {
            let digest = match &file.kind {
                Kind::Weights { header_bytes, .. } => Some(Digest::of(header_bytes)),
                _ if file.bytes <= DIGESTED_BYTES_MAX => {
                    let input = Input::open_same(&file.path, &file.stamp)?;
                    Some(Digest::of(&input.read(0, file.bytes)?))
                }
                _ => None,
            };
            Ok(SourceEntry { name: file.name.clone(), size: file.bytes, digest })
        };
        Ok(Self {
            format: FORMAT.into(),
            version: manifest::VERSION,
            creator: manifest::CREATOR.into(),
            part,
            fingerprint,
            options,
            source: model.files.iter().map(entry).collect::<Result<_, BundleError>>()?,
            files,
        })
    }

    /// Returns the digest of the JSON text, and the file's contents.
    pub(crate) fn to_bytes(&self) -> (Digest, Vec<u8>) {
        let json = serde_json::to_vec(self).expect("a part is strings, numbers and lists");
        let digest = Digest::of(&json);
        (digest, [digest.to_string().as_bytes(), b"\n", &json].concat())
    }

    /// Reads and checks the file of a directory; `None` if there is none.
    pub(crate) fn read(dir: &Path) -> Result<Option<Self>, BundleError> {
        let path = dir.join(FILE_NAME);
        if path.symlink_metadata().is_err() {
            return Ok(None);
        }
        let fail = |reason: String| BundleError::Manifest { path: path.clone(), reason };
        let bytes = files::read_small(&path, manifest::BYTES_MAX)?;
        let (digest, json) = bytes.split_at_checked(33).ok_or_else(|| fail("the file is truncated".into()))?;
        if digest != format!("{}\n", Digest::of(json)).as_bytes() {
            return Err(fail("its digest does not match its contents; make the part again".into()));
        }
        let part: Self = serde_json::from_slice(json).map_err(|error| fail(error.to_string()))?;
        if part.format != FORMAT {
            return Err(fail(format!("its format is '{}', not '{FORMAT}'", part.format.escape_default())));
        }
        if Part::new(part.part.index, part.part.of).is_none() {
            return Err(fail(format!("part {} does not exist", part.part)));
        }
        Manifest::new(part.options.clone(), None, part.files.clone()).check().map_err(fail)?;
        Ok(Some(part))
    }

    /// The part that the file describes.
    pub(crate) fn part(&self) -> Part {
        self.part
    }

    /// Names and sizes in bytes of the files in the part's directory.
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

/// Checks that these are all parts of one model, each once. Returns one of them.
pub(super) fn check_agreement<'a>(parts: &'a [(&Path, PartFile)]) -> Result<&'a PartFile, BundleError> {
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
    // Every file of the source must be in exactly one part, as all parts recorded it.
    let mut remaining: BTreeMap<&str, &SourceEntry> =
        first.source.iter().map(|entry| (entry.name.as_str(), entry)).collect();
    for (dir, part) in parts {
        for file in &part.files {
            let matches = remaining.remove(file.name()).is_some_and(|entry| {
                let digest = file.weights().map_or_else(|| file.digest(), |weights| weights.header_digest);
                entry.size == file.size() && entry.digest.is_none_or(|entry| entry == digest)
            });
            if !matches {
                let reason =
                    format!("file '{}' does not match the source that the parts list", file.name().escape_default());
                return Err(BundleError::Manifest { path: dir.join(FILE_NAME), reason });
            }
        }
    }
    match remaining.keys().next() {
        None => Ok(first),
        Some(name) => Err(BundleError::Manifest {
            path: first_dir.join(FILE_NAME),
            reason: format!("no part contains the file '{}'", name.escape_default()),
        }),
    }
}
