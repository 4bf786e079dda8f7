//! Reads a bundle. Sizes and headers are checked when it is opened, sections when they are read.

use std::{
    collections::{HashMap, HashSet},
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    BundleError, TensorHandle,
    attached::{self, Attached},
    base::Base,
    config,
    files::{self, check_size, check_sizes},
    manifest::{self, FileEntry, Manifest},
    manifest_file::read_manifest,
    pipeline::on_threads,
    shard::Shard,
};
use crate::{Digest, glob};

/// An open bundle.
///
/// Opening checks the manifest, the size of every file and the header of every shard. Weights are read, and compared
/// with their digests, on request.
#[derive(Debug)]
pub struct Bundle {
    dir: PathBuf,
    manifest: Manifest,
    shards: Vec<Shard>,
    /// Maps a tensor's name to the (shard, tensor) indices of every file that contains it.
    by_name: HashMap<String, Vec<(usize, usize)>>,
    /// Pattern of the files that the model is loaded from; see [`Bundle::is_of_model`].
    of_model: &'static str,
}

/// Patterns of the names of a model's files; the first one with a match applies.
const MODEL_FILES: [&str; 2] = ["model.safetensors", "model-*-of-*.safetensors"];

impl Bundle {
    /// Opens a bundle.
    ///
    /// # Errors
    /// The manifest is missing, damaged or newer, or a file of the bundle is missing or has another size or header; or
    /// the bundle has a base ([`Bundle::open_with_base`]).
    pub fn open(dir: &Path) -> Result<Self, BundleError> {
        Self::open_checked(dir, |manifest| match &manifest.base {
            None => Ok(None),
            Some(base) => Err(base.needed_by(dir)),
        })
    }

    /// Opens a bundle together with its base, if it has one: the model or bundle at `base`, or else the one next to the
    /// bundle that has the recorded name.
    ///
    /// # Errors
    /// The errors of [`Bundle::open`], or the base is missing or another one.
    pub fn open_with_base(dir: &Path, base: Option<&Path>) -> Result<Self, BundleError> {
        Self::open_checked(dir, |manifest| Base::of_bundle(dir, manifest, base))
    }

    /// Opens a bundle without its base, to describe it. Tensors that are stored as differences cannot be decoded.
    ///
    /// # Errors
    /// As [`Bundle::open`].
    pub fn open_without_base(dir: &Path) -> Result<Self, BundleError> {
        Self::open_checked(dir, |_| Ok(None))
    }

    fn open_checked(
        dir: &Path,
        base: impl FnOnce(&Manifest) -> Result<Option<Arc<Base>>, BundleError> + Send,
    ) -> Result<Self, BundleError> {
        on_threads(None, || {
            let manifest = read_manifest(dir)?;
            manifest.files.iter().try_for_each(|file| check_sizes(dir, file))?;
            let base = base(&manifest)?;
            Self::with_shards(dir, manifest, base)
        })
    }

    /// Opens the weights of a bundle: its manifest and its shards, which are checked as in [`Bundle::open`]. Other
    /// files may be missing or changed, as in a download of only the weights or a repository with an edited README;
    /// [`Bundle::copied`] and [`Bundle::write_file`] still refuse such a file. However, a `config.json` in a directory
    /// with weights must not name those of another bundle.
    ///
    /// # Errors
    /// The manifest is missing, damaged or newer; a shard is missing or has another size or header; or a `config.json`
    /// belongs to another bundle.
    pub fn open_weights(dir: &Path) -> Result<Self, BundleError> {
        on_threads(None, || {
            let manifest = read_manifest(dir)?;
            if let Some(base) = &manifest.base {
                return Err(base.needed_by(dir));
            }
            let bundle = Self::with_shards(dir, manifest, None)?;
            let files = bundle.manifest.files.iter().filter_map(FileEntry::weights);
            let folders: HashSet<_> =
                files.filter_map(|file| dir.join(&file.name).parent().map(Path::to_owned)).collect();
            let weights = bundle.weights_digest();
            folders.iter().try_for_each(|folder| config::check_names(&folder.join(config::FILE_NAME), weights))?;
            Ok(bundle)
        })
    }

    fn with_shards(dir: &Path, manifest: Manifest, base: Option<Arc<Base>>) -> Result<Self, BundleError> {
        let with_base = |shard: Shard| match &manifest.base {
            Some(entry) if base.is_none() => shard.without_base(dir, entry),
            _ => shard.with_base(base.clone()),
        };
        let shards = manifest
            .files
            .iter()
            .filter_map(FileEntry::weights)
            .map(|file| Shard::open(dir, file.clone()).map(with_base))
            .collect::<Result<Vec<_>, _>>()?;
        let mut by_name: HashMap<String, Vec<(usize, usize)>> = HashMap::new();
        for (s, shard) in shards.iter().enumerate() {
            for (t, tensor) in shard.file.tensors.iter().enumerate() {
                by_name.entry(tensor.name.clone()).or_default().push((s, t));
            }
        }
        let of_model = model_files(shards.iter().map(|shard| shard.file.name.as_str()));
        Ok(Self { dir: dir.into(), manifest, shards, by_name, of_model })
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// Returns the manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The digest of all weights, by which `config.json` names the bundle (`docs/format.md` B.9).
    pub fn weights_digest(&self) -> Digest {
        manifest::weights_digest(&self.manifest.files)
    }

    /// The attached kernels, if any. They are code, and no signature covers them.
    ///
    /// # Errors
    /// The kernels cannot be read or are damaged. Weights are not affected.
    pub fn attached(&self) -> Result<Option<Attached>, BundleError> {
        attached::of_bundle(&self.dir, &self.manifest)
    }

    /// All tensors, in the order of files and of their data.
    pub fn tensors(&self) -> impl Iterator<Item = TensorHandle<'_>> {
        let of_shard = |shard| move |index| TensorHandle::new(shard, index);
        self.shards.iter().flat_map(move |shard| (0..shard.file.tensors.len()).map(of_shard(shard)))
    }

    /// Whether a model is loaded from this file, that is, [`model_files`] matches it.
    pub fn is_of_model(&self, file: &str) -> bool {
        glob::matches(self.of_model, file)
    }

    /// Finds a tensor by its name, without reading it.
    ///
    /// # Errors
    /// No file contains the tensor, or several files of the model do; [`Bundle::tensor_in`] distinguishes them.
    pub fn tensor(&self, name: &str) -> Result<TensorHandle<'_>, BundleError> {
        match self.by_name.get(name).map(Vec::as_slice) {
            None | Some([]) => Err(BundleError::UnknownTensor { name: name.into() }),
            Some(&[location]) => Ok(self.handle(location)),
            Some(locations) => {
                let file = |location: &(usize, usize)| &self.shards[location.0].file.name;
                let of_model: Vec<_> = locations.iter().filter(|location| self.is_of_model(file(location))).collect();
                match of_model[..] {
                    [&location] => Ok(self.handle(location)),
                    _ => {
                        let files = locations.iter().map(|location| file(location).clone()).collect();
                        Err(BundleError::AmbiguousTensor { name: name.into(), files })
                    }
                }
            }
        }
    }

    /// Finds a tensor of one file of the source.
    ///
    /// # Errors
    /// The file does not contain the tensor.
    pub fn tensor_in(&self, file: &str, name: &str) -> Result<TensorHandle<'_>, BundleError> {
        let locations = self.by_name.get(name).map_or(&[][..], Vec::as_slice);
        let location = locations.iter().find(|(shard, _)| self.shards[*shard].file.name == file);
        location
            .map(|&location| self.handle(location))
            .ok_or_else(|| BundleError::UnknownTensor { name: format!("{file}: {name}") })
    }

    fn handle(&self, (shard, tensor): (usize, usize)) -> TensorHandle<'_> {
        TensorHandle::new(&self.shards[shard], tensor)
    }

    /// The source's bytes of a copied file (`config.json`, `tokenizer.json`), compared with their digest; `None` if
    /// there is no such file. Indexes are not included: they belong to the weights.
    ///
    /// # Errors
    /// The file is larger than `limit` bytes, missing, unreadable or damaged.
    pub fn copied(&self, file: &str, limit: u64) -> Result<Option<Vec<u8>>, BundleError> {
        let is_copy = |entry: &&FileEntry| matches!(entry, FileEntry::Copied(_) | FileEntry::Config(_));
        let Some(entry) = self.manifest.files.iter().filter(is_copy).find(|entry| entry.name() == file) else {
            return Ok(None);
        };
        let stored = files::original(&self.dir, entry);
        check_size(&self.dir, stored.clone(), entry.size())?;
        let bytes = files::read_small(&self.dir.join(&stored), limit)?;
        let digest = Digest::of(&bytes);
        if digest == entry.digest() {
            return Ok(Some(bytes));
        }
        Err(BundleError::Mismatch {
            file: stored,
            tensor: None,
            what: "contents".into(),
            offset: 0,
            expected: entry.digest().to_string(),
            got: digest.to_string(),
        })
    }
}

/// The pattern of the files that a model is loaded from: `model.safetensors` if it exists, else
/// `model-*-of-*.safetensors`, else all files, as in transformers. Some models contain their weights twice
/// (`consolidated.safetensors`).
///
/// ```
/// use unweight_format::{bundle::model_files, raw::glob::matches};
/// let files = ["consolidated.safetensors", "model-00001-of-00001.safetensors"];
/// assert_eq!(files.map(|file| matches(model_files(files.into_iter()), file)), [false, true]);
/// ```
pub fn model_files<'a>(files: impl Iterator<Item = &'a str> + Clone) -> &'static str {
    let has = |pattern: &&str| files.clone().any(|file| glob::matches(pattern, file));
    MODEL_FILES.into_iter().find(has).unwrap_or("*")
}
