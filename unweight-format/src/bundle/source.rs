//! The model to compress. All files are found and all headers checked before anything is written.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    path::{Path, PathBuf},
};

use serde::Deserialize;

use super::{
    BundleError, LargeCopy, Part, Selection, UnmarkedConfig, config,
    files::{self, Input, Stamp},
    names::{self, ATTACHED_NAME},
};
use crate::{
    bundle::manifest::{self, RANK_MAX},
    safetensors::{Header, Ordered, SOURCE_HEADER_MAX, TensorInfo},
};

/// Maximum size of an index in bytes.
const INDEX_MAX: u64 = 100_000_000;

/// Endings of files that usually contain the same weights in another format.
const OTHER_WEIGHT_SUFFIXES: &[&str] = &[
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".ggml",
    ".h5",
    ".msgpack",
    ".onnx",
    ".onnx_data",
    ".npz",
    ".tflite",
    ".ot",
];
/// Size from which such files, and version control directories, are reported.
const SUPERFLUOUS_BYTES: u64 = 1 << 20;
/// Size from which any copied file is reported.
const LARGE_BYTES: u64 = 64 << 20;

/// A checked model directory.
#[derive(Debug)]
pub(crate) struct Source {
    /// All files, sorted by name.
    pub(crate) files: Vec<SourceFile>,
    /// Each `config.json` next to weights that is copied unchanged.
    pub(crate) unmarked_configs: Vec<UnmarkedConfig>,
}

#[derive(Debug)]
pub(crate) struct SourceFile {
    /// Relative name.
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    pub(crate) bytes: u64,
    /// The state of the file when its header was read; later reads must find the same state.
    pub(crate) stamp: Stamp,
    pub(crate) kind: Kind,
}

#[derive(Debug)]
pub(crate) enum Kind {
    Weights {
        header: Header,
        /// The bytes of length and header.
        header_bytes: Vec<u8>,
    },
    Index(Index),
    /// The text of a `config.json` that gets two keys.
    Config(Vec<u8>),
    Copied,
}

#[derive(Debug)]
pub(crate) struct Index {
    pub(crate) metadata: Option<serde_json::Value>,
    /// Maps tensors to files, relative to the index.
    pub(crate) weight_map: BTreeMap<String, String>,
}

impl Source {
    /// Finds and checks the files of a model.
    pub(crate) fn open(root: &Path, selection: &Selection) -> Result<Self, BundleError> {
        let open_error = BundleError::io("open the model directory", root);
        if !root.metadata().map_err(open_error)?.is_dir() {
            return Err(BundleError::NotADirectory { path: root.into() });
        }
        let source = Self::scan(root, selection)?;
        if !source.files.iter().any(|f| matches!(f.kind, Kind::Weights { .. })) {
            return Err(BundleError::NoWeights { path: root.into() });
        }
        let changed = source.files.iter().filter(|file| matches!(file.kind, Kind::Index(_) | Kind::Config(_)));
        let source_names = changed.map(|file| format!("{}{}", file.name, manifest::SOURCE_SUFFIX));
        let bundle_names = [manifest::FILE_NAME, manifest::SIGNATURE_NAME, ATTACHED_NAME].map(str::to_owned);
        let reserved: HashSet<String> = source_names.chain(bundle_names).collect();
        for file in &source.files {
            // Check the file and all directories above it.
            let folders = file.name.match_indices('/').map(|(slash, _)| &file.name[..slash]);
            if let Some(reserved_name) = folders.chain([file.name.as_str()]).find(|name| reserved.contains(*name)) {
                return Err(BundleError::ReservedFile { path: root.join(reserved_name) });
            }
        }
        source.files.iter().try_for_each(|file| match &file.kind {
            Kind::Index(index) => source.check_index(file, index),
            _ => Ok(()),
        })?;
        let sizes = source.files.iter().map(|file| (file.path.as_path(), file.bytes));
        check_sum(sizes)?;
        manifest::check_bytes(source.tensors().map(manifest::min_entry_bytes).sum())?;
        Ok(source)
    }

    /// All tensors of all files.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &TensorInfo> + Clone {
        self.files.iter().flat_map(|file| match &file.kind {
            Kind::Weights { header, .. } => header.tensors.as_slice(),
            _ => &[],
        })
    }

    fn scan(root: &Path, selection: &Selection) -> Result<Self, BundleError> {
        let files = files::walk_selected(root, selection)?
            .into_iter()
            .map(|(name, path)| {
                let input = Input::open(&path)?;
                let kind = if names::is_weights(&name) {
                    read_header(&path, &input)?
                } else if names::is_index(&name) {
                    Kind::Index(read_index(&path, &input)?)
                } else {
                    Kind::Copied
                };
                let stamp = input.stamp();
                Ok(SourceFile { name, path, bytes: stamp.bytes, stamp, kind })
            })
            .collect::<Result<Vec<_>, BundleError>>()?;
        let mut source = Self { files, unmarked_configs: Vec::new() };
        source.find_configs()?;
        Ok(source)
    }

    /// Finds each `config.json` next to weights.
    fn find_configs(&mut self) -> Result<(), BundleError> {
        let folder = |name: &str| name.rfind('/').map_or(0, |slash| slash + 1);
        let weights = self.files.iter().filter(|file| matches!(file.kind, Kind::Weights { .. }));
        let folders: HashSet<String> = weights.map(|file| file.name[..folder(&file.name)].to_owned()).collect();
        let is_next_to_weights = |name: &str| config::is_config(name) && folders.contains(&name[..folder(name)]);
        for file in self.files.iter_mut().filter(|file| is_next_to_weights(&file.name)) {
            let text = match config::check_bytes(file.bytes) {
                Ok(()) => Input::open_same(&file.path, &file.stamp)?.read(0, file.bytes)?,
                Err(reason) => {
                    self.unmarked_configs.push(UnmarkedConfig { name: file.name.clone(), reason });
                    continue;
                }
            };
            match config::check(&text) {
                Ok(()) => file.kind = Kind::Config(text),
                Err(reason) => self.unmarked_configs.push(UnmarkedConfig { name: file.name.clone(), reason }),
            }
        }
        Ok(())
    }

    /// Copied files that are unusually large, largest first. The directory of a version control system counts as one
    /// file.
    pub(crate) fn large_copies(&self) -> Vec<LargeCopy> {
        let mut copies: BTreeMap<&str, u64> = BTreeMap::new();
        for file in self.files.iter().filter(|file| matches!(file.kind, Kind::Copied)) {
            *copies.entry(history(&file.name).unwrap_or(&file.name)).or_default() += file.bytes;
        }
        let is_large = |name: &str, bytes: u64| {
            let lower = name.to_ascii_lowercase();
            let superfluous = history(name).is_some() || OTHER_WEIGHT_SUFFIXES.iter().any(|end| lower.ends_with(end));
            bytes >= if superfluous { SUPERFLUOUS_BYTES } else { LARGE_BYTES }
        };
        let large = copies.into_iter().filter(|&(name, bytes)| is_large(name, bytes));
        let mut large: Vec<_> = large.map(|(name, bytes)| LargeCopy { name: name.into(), bytes }).collect();
        large.sort_by_key(|copy| std::cmp::Reverse(copy.bytes));
        large
    }

    fn check_index(&self, file: &SourceFile, index: &Index) -> Result<(), BundleError> {
        let fail = |reason: String| Err(BundleError::IndexDisagrees { path: file.path.clone(), reason });
        let dir = file.name.rfind('/').map_or("", |slash| &file.name[..=slash]);
        let shards: HashMap<&str, &Header> = self
            .files
            .iter()
            .filter_map(|f| match &f.kind {
                Kind::Weights { header, .. } => Some((f.name.strip_prefix(dir)?, header)),
                _ => None,
            })
            .collect();
        let names: HashMap<&str, HashSet<&str>> = index
            .weight_map
            .values()
            .map(String::as_str)
            .collect::<HashSet<_>>()
            .into_iter()
            .filter_map(|shard| Some((shard, shards.get(shard)?.tensors.iter().map(|t| t.name.as_str()).collect())))
            .collect();
        for (tensor, shard) in &index.weight_map {
            match names.get(shard.as_str()) {
                None => return fail(format!("the shard '{shard}' of tensor '{tensor}' is missing")),
                Some(names) if !names.contains(tensor.as_str()) => {
                    return fail(format!("tensor '{tensor}' is listed in '{shard}', which does not contain it"));
                }
                Some(_) => {}
            }
        }
        let mut ordered: Vec<_> = names.iter().collect();
        ordered.sort_by_key(|(shard, _)| **shard);
        for (shard, names) in ordered {
            let mut unlisted: Vec<_> =
                names.iter().filter(|name| index.weight_map.get(**name).is_none_or(|listed| listed != shard)).collect();
            unlisted.sort();
            if let Some(tensor) = unlisted.first() {
                return fail(format!("tensor '{tensor}' is in '{shard}', but not listed there"));
            }
        }
        // A stray shard of the same family: `x-00003-of-00002` next to an index of `x-0000?-of-00002`.
        let families: HashSet<(&str, &str)> = names.keys().filter_map(|shard| family(shard)).collect();
        let mut stray: Vec<_> = shards
            .keys()
            .filter(|shard| !names.contains_key(**shard) && family(shard).is_some_and(|f| families.contains(&f)))
            .collect();
        stray.sort();
        match stray.first() {
            None => Ok(()),
            Some(shard) => {
                fail(format!("the shard '{shard}' has the name of a shard of this index, but is not listed"))
            }
        }
    }
}

/// The version control directory that contains a file.
fn history(name: &str) -> Option<&str> {
    let mut end = 0;
    for part in name.split('/') {
        end += part.len();
        if matches!(part, ".git" | ".hg" | ".svn") {
            return Some(&name[..end]);
        }
        end += 1;
    }
    None
}

/// The family of a shard: (`model`, `00002`) for `model-00001-of-00002.safetensors`.
fn family(name: &str) -> Option<(&str, &str)> {
    let (rest, total) = name.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
    let (prefix, number) = rest.rsplit_once('-')?;
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    (digits(total) && digits(number)).then_some((prefix, total))
}

/// Fails unless the sum of all sizes is below 2^63, so that later sums cannot overflow.
fn check_sum<'a>(sizes: impl Iterator<Item = (&'a Path, u64)>) -> Result<(), BundleError> {
    let mut sum = 0u64;
    for (path, bytes) in sizes {
        sum = sum.checked_add(bytes).filter(|&sum| sum <= i64::MAX as u64).ok_or_else(|| BundleError::Unstorable {
            path: path.into(),
            reason: "the sizes up to this file sum to more than 2^63 bytes; leave the file out",
        })?;
    }
    Ok(())
}

fn read_header(path: &Path, input: &Input) -> Result<Kind, BundleError> {
    let (header, header_bytes) = Header::read(input.reader(), input.stamp().bytes, SOURCE_HEADER_MAX)
        .map_err(BundleError::io("read the header", path))?
        .map_err(|source| BundleError::Header { path: path.into(), source })?;
    if let Some(tensor) = header.tensors.iter().find(|t| t.shape.len() > RANK_MAX) {
        let (tensor, got) = (tensor.name.clone(), tensor.shape.len());
        return Err(BundleError::Rank { path: path.into(), tensor, got, limit: RANK_MAX });
    }
    match header.tensors.iter().find(|t| manifest::is_reserved(&t.name)) {
        None => Ok(Kind::Weights { header, header_bytes }),
        Some(tensor) => Err(BundleError::ReservedTensor { path: path.into(), tensor: tensor.name.clone() }),
    }
}

fn read_index(path: &Path, input: &Input) -> Result<Index, BundleError> {
    let got = input.stamp().bytes;
    if got > INDEX_MAX {
        return Err(BundleError::TooLarge { path: path.into(), limit: INDEX_MAX, got });
    }
    index_of(path, &input.read(0, got)?)
}

/// Parses an index. Errors contain `path`.
pub(crate) fn index_of(path: &Path, bytes: &[u8]) -> Result<Index, BundleError> {
    #[derive(Deserialize)]
    struct Stored {
        metadata: Option<serde_json::Value>,
        weight_map: Ordered<String>,
    }
    let fail = |reason| BundleError::Index { path: path.into(), reason };
    let stored: Stored = serde_json::from_slice(bytes).map_err(|error| fail(error.to_string()))?;
    if let Some((tensor, shard)) = stored.weight_map.0.iter().find(|(_, shard)| manifest::check_name(shard).is_err()) {
        return Err(fail(format!(
            "tensor '{tensor}' is listed in '{}', which is not a plain file name",
            shard.escape_default()
        )));
    }
    Ok(Index { metadata: stored.metadata, weight_map: stored.weight_map.0.into_iter().collect() })
}

impl Part {
    /// The names of this part's files. Weights are assigned in descending size to the part with the fewest bytes; all
    /// other files belong to the first part.
    pub(crate) fn files(self, model: &Source) -> HashSet<String> {
        let mut weights: Vec<&SourceFile> =
            model.files.iter().filter(|file| matches!(file.kind, Kind::Weights { .. })).collect();
        weights.sort_by(|a, b| (b.bytes, &a.name).cmp(&(a.bytes, &b.name)));
        let mut bytes_by_part: BTreeMap<u32, u64> = (1..=self.of).map(|part| (part, 0)).collect();
        let mut names = HashSet::new();
        for file in weights {
            let Some((&part, bytes)) = bytes_by_part.iter_mut().min_by_key(|(part, bytes)| (**bytes, **part)) else {
                break;
            };
            *bytes += file.bytes;
            if part == self.index {
                names.insert(file.name.clone());
            }
        }
        if self.has_copies() {
            let others = model.files.iter().filter(|file| !matches!(file.kind, Kind::Weights { .. }));
            names.extend(others.map(|file| file.name.clone()));
        }
        names
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_sums_that_overflow_are_rejected() {
        let max = i64::MAX as u64;
        let sum = |sizes: &[u64]| check_sum(sizes.iter().map(|&bytes| (Path::new("a"), bytes)));
        assert!(sum(&[]).is_ok() && sum(&[max]).is_ok() && sum(&[max - 1, 1]).is_ok());
        for sizes in [&[max, 1][..], &[max, max, max], &[u64::MAX]] {
            assert!(matches!(sum(sizes), Err(BundleError::Unstorable { .. })), "{sizes:?}");
        }
    }
}
