//! The base of a bundle: another model, from whose tensors some tensors of the bundle are stored as differences
//! (`docs/format.md` B.11).

use std::{
    collections::HashMap,
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    BundleError, Selection,
    files::Input,
    manifest::{self, BaseEntry, FileEntry, Manifest, TensorEntry},
    manifest_file::read_manifest,
    shard::{BaseReader, Shard},
    source::{Kind, Source},
};
use crate::{
    Digest,
    safetensors::{Dtype, TensorInfo},
};

/// An open base: a bundle, or a directory with safetensors files.
pub(crate) struct Base {
    path: PathBuf,
    model: Model,
    /// Files and indices of the tensors of each name.
    by_name: HashMap<String, Vec<(usize, usize)>>,
}

enum Model {
    /// Digest of the manifest, and the shards.
    Bundle(Digest, Vec<Shard>),
    /// Name, contents and tensors of each file with weights.
    Files(Vec<(String, Input, Vec<TensorInfo>)>),
}

/// A tensor of a base.
#[derive(Clone, Copy)]
pub(crate) struct BaseTensor(usize, usize);

impl fmt::Debug for Base {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Base").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Base {
    /// Opens a base.
    ///
    /// # Errors
    /// It is neither a model nor a bundle, or it is a bundle that itself has a base.
    pub(crate) fn open(path: &Path) -> Result<Arc<Self>, BundleError> {
        let model = if path.join(manifest::FILE_NAME).exists() {
            let manifest = read_manifest(path)?;
            if let Some(BaseEntry { name, digest }) = manifest.base {
                return Err(BundleError::BaseHasBase { path: path.into(), name, digest });
            }
            let files = manifest.files.iter().filter_map(FileEntry::weights);
            let shards = files.map(|file| Shard::open(path, file.clone())).collect::<Result<_, _>>()?;
            Model::Bundle(manifest.manifest_digest, shards)
        } else {
            let source = Source::open(path, &Selection::default())?;
            let files = source.files.into_iter().filter_map(|file| match file.kind {
                Kind::Weights { header, .. } => Some((file.name, file.path, file.stamp, header.tensors)),
                _ => None,
            });
            let open = |(name, path, stamp, tensors): (_, PathBuf, _, _)| {
                Ok((name, Input::open_same(&path, &stamp)?, tensors))
            };
            Model::Files(files.map(open).collect::<Result<_, BundleError>>()?)
        };
        let mut by_name: HashMap<String, Vec<(usize, usize)>> = HashMap::new();
        let mut add = |file: usize, names: &mut dyn Iterator<Item = &str>| {
            names.enumerate().for_each(|(index, name)| by_name.entry(name.into()).or_default().push((file, index)));
        };
        match &model {
            Model::Bundle(_, shards) => shards.iter().enumerate().for_each(|(file, shard)| {
                add(file, &mut shard.file.tensors.iter().map(|tensor| tensor.name.as_str()));
            }),
            Model::Files(files) => files.iter().enumerate().for_each(|(file, (_, _, tensors))| {
                add(file, &mut tensors.iter().map(|tensor| tensor.name.as_str()));
            }),
        }
        Ok(Arc::new(Self { path: path.into(), model, by_name }))
    }

    /// The base of a bundle: at the path given, or else next to the bundle under the recorded name. `None` if the
    /// bundle has no base.
    ///
    /// # Errors
    /// It is not there, cannot be opened, or is not the base.
    pub(crate) fn of_bundle(
        bundle: &Path,
        manifest: &Manifest,
        given: Option<&Path>,
    ) -> Result<Option<Arc<Self>>, BundleError> {
        let Some(entry) = &manifest.base else { return Ok(None) };
        let next_to = || {
            let path = bundle.canonicalize().ok()?.parent()?.join(&entry.name);
            path.is_dir().then_some(path)
        };
        let path = given.map(Path::to_owned).or_else(next_to).ok_or_else(|| entry.needed_by(bundle))?;
        let base = Self::open(&path)?;
        base.check(manifest.files.iter())?;
        Ok(Some(base))
    }

    /// The last part of the base's path, by which a bundle records it.
    pub(crate) fn name(&self) -> String {
        let path = self.path.canonicalize().unwrap_or_else(|_| self.path.clone());
        let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        // A name that a manifest cannot have.
        if manifest::check_name(&name).is_ok() { name } else { "base".into() }
    }

    /// What distinguishes the base from others, for a run that is resumed: digest of the manifest, or names and states
    /// of the files.
    pub(crate) fn identity(&self) -> String {
        match &self.model {
            Model::Bundle(digest, _) => digest.to_string(),
            Model::Files(files) => {
                let states: Vec<_> = files.iter().map(|(name, input, _)| (name, input.stamp())).collect();
                Digest::of(format!("{states:?}").as_bytes()).to_string()
            }
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Finds the base's tensor for one of this name in this file: the one in the file of the same name, or the only
    /// one. `None` if it has another type or shape.
    pub(crate) fn find(&self, file: &str, name: &str, dtype: Dtype, shape: &[usize]) -> Option<BaseTensor> {
        let all = self.by_name.get(name)?;
        let in_file = all.iter().find(|(index, _)| self.file_name(*index) == file);
        let &(file, index) = match (in_file, &all[..]) {
            (Some(found), _) | (None, [found]) => found,
            _ => return None,
        };
        let (found_dtype, found_shape) = match &self.model {
            Model::Bundle(_, shards) => {
                let tensor = &shards[file].file.tensors[index];
                (tensor.dtype, &tensor.shape)
            }
            Model::Files(files) => {
                let tensor = &files[file].2[index];
                (tensor.dtype, &tensor.shape)
            }
        };
        (found_dtype == dtype && found_shape == shape).then_some(BaseTensor(file, index))
    }

    fn file_name(&self, file: usize) -> &str {
        match &self.model {
            Model::Bundle(_, shards) => &shards[file].file.name,
            Model::Files(files) => &files[file].0,
        }
    }

    /// Reads a tensor into `out`, which has its size, and returns its digest.
    pub(crate) fn read(&self, BaseTensor(file, index): BaseTensor, out: &mut [u8]) -> Result<Digest, BundleError> {
        match &self.model {
            Model::Bundle(_, shards) => {
                shards[file].decode(index, out, false)?;
                Ok(shards[file].file.tensors[index].digest)
            }
            Model::Files(files) => {
                let (_, input, tensors) = &files[file];
                input.read_at_together(tensors[index].offset, out)?;
                Ok(Digest::of(out))
            }
        }
    }

    /// Checks that all tensors are there, and if the base is a bundle, that they have the right digests.
    fn check<'a>(&self, files: impl Iterator<Item = &'a FileEntry>) -> Result<(), BundleError> {
        let tensors = files.filter_map(FileEntry::weights).flat_map(|file| file.tensors.iter().map(move |t| (file, t)));
        for (file, entry) in tensors {
            let Some(expected) = entry.base else { continue };
            let Some(BaseTensor(at, index)) = self.find(&file.name, &entry.name, entry.dtype, &entry.shape) else {
                return Err(self.wrong(entry, expected, "missing, or of another type or shape".into()));
            };
            if let Model::Bundle(_, shards) = &self.model {
                let got = shards[at].file.tensors[index].digest;
                if got != expected {
                    return Err(self.wrong(entry, expected, got.to_string()));
                }
            }
        }
        Ok(())
    }

    fn wrong(&self, entry: &TensorEntry, expected: Digest, got: String) -> BundleError {
        BundleError::WrongBase { path: self.path.clone(), tensor: entry.name.clone(), expected, got }
    }
}

impl BaseReader for Base {
    fn read_for(&self, file: &str, entry: &TensorEntry, out: &mut [u8]) -> Result<(), BundleError> {
        let Some(expected) = entry.base else { return Ok(()) };
        let found = self.find(file, &entry.name, entry.dtype, &entry.shape);
        let found = found.ok_or_else(|| self.wrong(entry, expected, "missing, or of another type or shape".into()))?;
        let got = self.read(found, out)?;
        if got == expected { Ok(()) } else { Err(self.wrong(entry, expected, got.to_string())) }
    }
}

impl BaseEntry {
    /// The entry of a manifest with these files; `None` if no tensor is stored as differences.
    pub(crate) fn of(name: String, files: &[FileEntry]) -> Option<Self> {
        let digests = manifest::base_digests(files).map(|digest| digest.to_string()).collect::<String>();
        (!digests.is_empty()).then(|| Self { name, digest: Digest::of(digests.as_bytes()) })
    }

    /// The error that this base was not given.
    pub(crate) fn needed_by(&self, bundle: &Path) -> BundleError {
        BundleError::NeedsBase { path: bundle.into(), name: self.name.clone(), digest: self.digest }
    }
}
