//! Reading a bundle: every size and header is checked when it is opened, every section when it is parsed.

use std::{
    collections::{HashMap, HashSet},
    fs::File,
    ops::Range,
    path::{Path, PathBuf},
};

use rayon::prelude::*;

use super::{
    BundleError,
    attached::{self, Attached},
    files::{self, Input},
    part::PartFile,
    pipeline::{Work, batches_from, on_threads},
};
use crate::{
    Digest, FormId, StoredTensor,
    bundle::manifest::{self, FileEntry, Manifest, SOURCE_HEADER, TensorEntry, WeightsFile, section_name},
    glob,
    safetensors::{Dtype, HEADER_MAX, Header, LENGTH_BYTES, TensorInfo},
};

/// An open bundle.
///
/// Opening checks the manifest, the size of every file and the header of every shard. Weights are read, and compared with their digests,
/// when they are asked for.
#[derive(Debug)]
pub struct Bundle {
    dir: PathBuf,
    manifest: Manifest,
    shards: Vec<Shard>,
    /// Tensor name to (shard, tensor) in each file that has it.
    by_name: HashMap<String, Vec<(usize, usize)>>,
    /// Which files are the model's: see [`Bundle::is_of_model`].
    of_model: &'static str,
}

/// A tensor of a bundle.
#[derive(Debug, Clone, Copy)]
pub struct BundleTensor<'a> {
    /// Name of the file it is in.
    pub file: &'a str,
    /// What the manifest says about it.
    pub entry: &'a TensorEntry,
}

/// What the files of a model are called, if any are called so: the first that is there counts.
const MODEL_FILES: [&str; 2] = ["model.safetensors", "model-*-of-*.safetensors"];

impl Bundle {
    /// Opens a bundle.
    ///
    /// # Errors
    /// There is no manifest, it is damaged or newer, or a file of the bundle is missing or has another size or header.
    pub fn open(dir: &Path) -> Result<Self, BundleError> {
        on_threads(None, || {
            let manifest = read_manifest(dir)?;
            manifest.files.iter().try_for_each(|file| check_sizes(dir, file))?;
            Self::with_shards(dir, manifest)
        })
    }

    /// Opens the weights of a bundle: its manifest and its shards, which are checked as [`Bundle::open`] checks them. What lies beside them may
    /// be missing or changed, as in a download of the weights alone or a repository with an edited README; [`Bundle::copied`] and
    /// [`Bundle::write_file`] still refuse such a file.
    ///
    /// # Errors
    /// There is no manifest, it is damaged or newer, or a shard is missing or has another size or header.
    pub fn open_weights(dir: &Path) -> Result<Self, BundleError> {
        on_threads(None, || Self::with_shards(dir, read_manifest(dir)?))
    }

    fn with_shards(dir: &Path, manifest: Manifest) -> Result<Self, BundleError> {
        let shards = manifest
            .files
            .iter()
            .filter_map(FileEntry::weights)
            .map(|file| Shard::open(dir, file.clone()))
            .collect::<Result<Vec<_>, _>>()?;
        let mut by_name: HashMap<String, Vec<(usize, usize)>> = HashMap::new();
        for (s, shard) in shards.iter().enumerate() {
            for (t, tensor) in shard.file.tensors.iter().enumerate() {
                by_name.entry(tensor.name.clone()).or_default().push((s, t));
            }
        }
        let has = |pattern: &&str| shards.iter().any(|shard| glob::matches(pattern, &shard.file.name));
        let of_model = MODEL_FILES.into_iter().find(has).unwrap_or("*");
        Ok(Self { dir: dir.into(), manifest, shards, by_name, of_model })
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The kernels that were attached to the bundle, if there are any: code of whoever attached them.
    ///
    /// # Errors
    /// They cannot be read, or are damaged; no weight is.
    pub fn attached(&self) -> Result<Option<Attached>, BundleError> {
        attached::of_bundle(&self.dir, &self.manifest)
    }

    /// Every tensor, in the order of files and of their data.
    pub fn tensors(&self) -> impl Iterator<Item = BundleTensor<'_>> {
        self.shards
            .iter()
            .flat_map(|shard| shard.file.tensors.iter().map(|entry| BundleTensor { file: &shard.file.name, entry }))
    }

    /// Whether a model is loaded from this file. Of the files `model.safetensors`, else `model-*-of-*.safetensors`, else all, as
    /// transformers chooses: some models bring their weights once more (`consolidated.safetensors`).
    pub fn is_of_model(&self, file: &str) -> bool {
        glob::matches(self.of_model, file)
    }

    /// A tensor in its stored form: every section has its digest, and its offsets may be trusted (invariants 1-3).
    ///
    /// # Errors
    /// No file has it, several of the model's have it ([`Bundle::tensor_in`] tells them apart), it cannot be read, or its sections are damaged.
    pub fn tensor(&self, name: &str) -> Result<StoredTensor<Vec<u8>>, BundleError> {
        let (shard, tensor) = self.find(name)?;
        on_threads(None, || self.shards[shard].tensor(tensor))
    }

    /// A tensor of one file.
    ///
    /// # Errors
    /// The file does not have it, or as [`Bundle::tensor`].
    pub fn tensor_in(&self, file: &str, name: &str) -> Result<StoredTensor<Vec<u8>>, BundleError> {
        let (shard, tensor) = self.find_in(file, name)?;
        on_threads(None, || self.shards[shard].tensor(tensor))
    }

    /// What the manifest says about a tensor.
    ///
    /// # Errors
    /// No file has it, or several have it.
    pub fn entry(&self, name: &str) -> Result<&TensorEntry, BundleError> {
        let (shard, tensor) = self.find(name)?;
        Ok(&self.shards[shard].file.tensors[tensor])
    }

    /// As [`Bundle::entry`], of one file.
    ///
    /// # Errors
    /// The file does not have it.
    pub fn entry_in(&self, file: &str, name: &str) -> Result<&TensorEntry, BundleError> {
        let (shard, tensor) = self.find_in(file, name)?;
        Ok(&self.shards[shard].file.tensors[tensor])
    }

    /// The original little-endian bytes of a tensor, compared with their digest.
    ///
    /// # Errors
    /// As [`Bundle::tensor`], or the weights are damaged.
    pub fn decode(&self, name: &str) -> Result<Vec<u8>, BundleError> {
        self.decode_at(self.find(name)?)
    }

    /// As [`Bundle::decode`], of one file.
    ///
    /// # Errors
    /// As [`Bundle::tensor_in`], or the weights are damaged.
    pub fn decode_in(&self, file: &str, name: &str) -> Result<Vec<u8>, BundleError> {
        self.decode_at(self.find_in(file, name)?)
    }

    /// The bytes of a file beside the weights (`config.json`, `tokenizer.json`) as the source had it, compared with their digest; `None` if the
    /// bundle has none of this name. Indexes are not among them: they belong to the weights.
    ///
    /// # Errors
    /// It is larger than `limit` bytes, missing, cannot be read, or is damaged.
    pub fn copied(&self, file: &str, limit: u64) -> Result<Option<Vec<u8>>, BundleError> {
        let kept = |entry: &&FileEntry| matches!(entry, FileEntry::Copied(_) | FileEntry::Config(_));
        let Some(entry) = self.manifest.files.iter().filter(kept).find(|entry| entry.name() == file) else {
            return Ok(None);
        };
        let stored = entry.original().unwrap_or_default();
        check_size(&self.dir, stored.clone(), entry.size())?;
        let bytes = files::read_small(&self.dir.join(&stored), limit)?;
        let digest = Digest::of(&bytes);
        if digest == entry.digest() {
            return Ok(Some(bytes));
        }
        Err(BundleError::Mismatch {
            file: stored,
            what: "contents".into(),
            offset: 0,
            expected: entry.digest().to_string(),
            got: digest.to_string(),
        })
    }

    fn decode_at(&self, (shard, tensor): (usize, usize)) -> Result<Vec<u8>, BundleError> {
        let shard = &self.shards[shard];
        on_threads(None, || {
            let mut out = shard.buffer(shard.original_bytes(tensor))?;
            shard.decode(tensor, &mut out)?;
            Ok(out)
        })
    }

    fn find_in(&self, file: &str, name: &str) -> Result<(usize, usize), BundleError> {
        let places = self.by_name.get(name).map_or(&[][..], Vec::as_slice);
        let place = places.iter().find(|(shard, _)| self.shards[*shard].file.name == file).copied();
        place.ok_or_else(|| BundleError::UnknownTensor { name: format!("{file}: {name}") })
    }

    fn find(&self, name: &str) -> Result<(usize, usize), BundleError> {
        match self.by_name.get(name).map(Vec::as_slice) {
            None | Some([]) => Err(BundleError::UnknownTensor { name: name.into() }),
            Some(&[place]) => Ok(place),
            Some(places) => {
                let file = |place: &(usize, usize)| &self.shards[place.0].file.name;
                let of_model: Vec<_> = places.iter().filter(|place| self.is_of_model(file(place))).collect();
                match of_model[..] {
                    [&place] => Ok(place),
                    _ => {
                        let files = places.iter().map(|place| file(place).clone()).collect();
                        Err(BundleError::AmbiguousTensor { name: name.into(), files })
                    }
                }
            }
        }
    }
}

/// Reads and checks `unweight.json`.
pub(crate) fn read_manifest(dir: &Path) -> Result<Manifest, BundleError> {
    Ok(read_manifest_bytes(dir)?.0)
}

/// As [`read_manifest`], with the bytes that were parsed.
pub(crate) fn read_manifest_bytes(dir: &Path) -> Result<(Manifest, Vec<u8>), BundleError> {
    if !dir.metadata().map_err(BundleError::io("open the bundle", dir))?.is_dir() {
        return Err(BundleError::NotADirectory { path: dir.into() });
    }
    let path = dir.join(manifest::FILE_NAME);
    if !path.exists() {
        return Err(match PartFile::read(dir)? {
            Some(part) => BundleError::NotMerged { path: dir.into(), part: part.part() },
            None => BundleError::NotABundle { path: dir.into() },
        });
    }
    let bytes = files::read_small(&path, manifest::BYTES_MAX)?;
    let manifest = Manifest::parse(&bytes, Path::new(manifest::FILE_NAME))?;
    Ok((manifest, bytes))
}

/// Checks that the stored files of an entry are there with the sizes that the manifest says.
pub(crate) fn check_sizes(dir: &Path, entry: &FileEntry) -> Result<(), BundleError> {
    entry.stored().into_iter().try_for_each(|(file, expected)| check_size(dir, file, expected))
}

/// Checks that a file of the bundle is there with the size that the manifest says.
pub(crate) fn check_size(dir: &Path, file: String, expected: u64) -> Result<(), BundleError> {
    match dir.join(&file).metadata() {
        Ok(metadata) if !metadata.is_file() || metadata.len() != expected => {
            Err(BundleError::FileSize { file, expected, got: metadata.len() })
        }
        Ok(_) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Err(BundleError::MissingFile { file }),
        Err(source) => Err(BundleError::Io { action: "look at the file", path: dir.join(file), source }),
    }
}

/// An open shard whose header agrees with the manifest.
#[derive(Debug)]
pub(crate) struct Shard {
    pub(crate) file: WeightsFile,
    input: Input,
    /// Per tensor: where its sections are, or the one range of a raw tensor.
    places: Vec<Vec<Range<u64>>>,
    source_header: Range<u64>,
}

impl Shard {
    pub(crate) fn open(dir: &Path, file: WeightsFile) -> Result<Self, BundleError> {
        check_sizes(dir, &FileEntry::Weights(file.clone()))?;
        let path: PathBuf = dir.join(&file.name);
        let input = Input::open(&path)?;
        if input.stamp().bytes != file.shard_size {
            let (expected, got) = (file.shard_size, input.stamp().bytes);
            return Err(BundleError::FileSize { file: file.name, expected, got });
        }
        let mismatch = |what: String, offset, expected: String, got: String| BundleError::Mismatch {
            file: file.name.clone(),
            what,
            offset,
            expected,
            got,
        };
        if file.shard_header_bytes > file.shard_size {
            let got = file.shard_size.to_string();
            return Err(mismatch("header".into(), 0, format!("{} bytes", file.shard_header_bytes), got));
        }
        let most = HEADER_MAX + LENGTH_BYTES;
        if file.shard_header_bytes > most {
            return Err(BundleError::TooLarge { path, limit: most, got: file.shard_header_bytes });
        }
        let header_bytes = input.read(0, file.shard_header_bytes)?;
        let digest = Digest::of(&header_bytes);
        if digest != file.shard_header_digest {
            return Err(mismatch("header".into(), 0, file.shard_header_digest.to_string(), digest.to_string()));
        }
        let header = Header::parse(&header_bytes, file.shard_size, HEADER_MAX)
            .map_err(|source| BundleError::Header { path: file.name.clone().into(), source })?;
        let stored: HashMap<&str, &TensorInfo> = header.tensors.iter().map(|t| (t.name.as_str(), t)).collect();
        let mut seen = HashSet::new();
        let mut place = |name: &str, dtype: Dtype, shape: &[usize], bytes: u64| match stored.get(name) {
            Some(t) if t.dtype == dtype && t.shape == shape && t.bytes == bytes => {
                seen.insert(t.offset);
                Ok(t.offset..t.offset + t.bytes)
            }
            Some(t) => Err(mismatch(
                format!("'{name}'"),
                t.offset,
                format!("{dtype} {shape:?}, {bytes} bytes"),
                format!("{} {:?}, {} bytes", t.dtype, t.shape, t.bytes),
            )),
            None => Err(mismatch(format!("'{name}'"), 0, "an entry in the header".into(), "none".into())),
        };
        let places = file
            .tensors
            .iter()
            .map(|tensor| {
                let Some(grid) = tensor.grid().filter(|_| tensor.form != FormId::RAW) else {
                    // The manifest was checked: its bytes can be counted.
                    let bytes = tensor.original_bytes().unwrap_or(0);
                    return Ok(vec![place(&tensor.name, tensor.dtype, &tensor.shape, bytes)?]);
                };
                let section = |section: &manifest::SectionEntry| {
                    let shape = section.name.shape(grid, section.bytes as usize);
                    place(&section_name(&tensor.name, section.name), section.name.dtype(), &shape, section.bytes)
                };
                tensor.sections.iter().map(section).collect()
            })
            .collect::<Result<Vec<Vec<_>>, BundleError>>()?;
        let source_header = place(SOURCE_HEADER, Dtype::U8, &[file.header_bytes as usize], file.header_bytes)?;
        let expected = places.iter().map(Vec::len).sum::<usize>() + 1;
        if stored.len() != expected {
            let got = format!("{} entries", stored.len());
            return Err(mismatch("header".into(), 0, format!("{expected} entries"), got));
        }
        Ok(Self { input, places, source_header, file })
    }

    /// Length and header of the source file, checked.
    pub(crate) fn source_header(&self) -> Result<Vec<u8>, BundleError> {
        self.part(self.source_header.clone(), self.file.header_digest, || format!("'{SOURCE_HEADER}'"))
    }

    /// See [`Input::pass_attributes`].
    pub(crate) fn pass_attributes(&self, to: &File) {
        self.input.pass_attributes(to);
    }

    pub(crate) fn original_bytes(&self, tensor: usize) -> u64 {
        self.file.tensors[tensor].original_bytes().unwrap_or(0)
    }

    /// The tensors, in portions that fit in memory.
    pub(crate) fn work(&self, ram_bytes: Option<u64>) -> Vec<Work> {
        self.work_from(0, ram_bytes)
    }

    /// As [`Shard::work`], from a tensor on.
    pub(crate) fn work_from(&self, first: usize, ram_bytes: Option<u64>) -> Vec<Work> {
        let tensors = self.file.tensors.iter();
        batches_from(first, tensors.map(|t| (t.original_bytes().unwrap_or(0), t.form == FormId::RAW)), ram_bytes)
    }

    pub(crate) fn buffer(&self, bytes: u64) -> Result<Vec<u8>, BundleError> {
        files::buffer(bytes, Path::new(&self.file.name))
    }

    /// A tensor whose every section has its digest and may be trusted.
    pub(crate) fn tensor(&self, index: usize) -> Result<StoredTensor<Vec<u8>>, BundleError> {
        let entry = &self.file.tensors[index];
        // The manifest was checked: a raw tensor, and no other, has no rows and columns.
        let Some(grid) = entry.grid() else {
            let place = self.places[index][0].clone();
            return self.part(place, entry.digest, || format!("tensor '{}'", entry.name)).map(StoredTensor::raw);
        };
        let sections = entry.sections.iter().zip(&self.places[index]).map(|(section, place)| {
            let what = || format!("tensor '{}', section {}", entry.name, section.name.name());
            self.part(place.clone(), section.digest, what)
        });
        let sections = sections.collect::<Result<Vec<_>, _>>()?;
        StoredTensor::new(entry.form, grid, sections).map_err(|source| self.codec_error(index, source))
    }

    fn codec_error(&self, index: usize, source: crate::CodecError) -> BundleError {
        BundleError::Codec {
            file: self.file.name.clone(),
            tensor: self.file.tensors[index].name.clone(),
            offset: self.places[index].iter().map(|place| place.start).min().unwrap_or(0),
            source,
        }
    }

    /// Whether every stored section has its digest.
    pub(crate) fn is_sound(&self, index: usize) -> bool {
        let entry = &self.file.tensors[index];
        let digests = entry.sections.iter().map(|section| section.digest).chain([entry.digest]);
        self.places[index].iter().zip(digests).all(|(place, expected)| {
            let got = self.input.stream(place.start, place.end - place.start, |_| Ok(()));
            got.is_ok_and(|got| got == expected)
        })
    }

    /// Decodes a tensor into `out`: every stored section is compared with its digest, and so is what comes out.
    pub(crate) fn decode(&self, index: usize, out: &mut [u8]) -> Result<(), BundleError> {
        let (entry, place) = (&self.file.tensors[index], self.places[index][0].start);
        if entry.form == FormId::RAW {
            self.input.read_at_together(place, out)?;
            return self.compare(Digest::of(out), entry.digest, place, || format!("tensor '{}'", entry.name));
        }
        self.tensor(index)?.decode(out).map_err(|source| self.codec_error(index, source))?;
        // Its sections are those of the manifest: if this differs, the manifest was made up.
        self.compare(Digest::of(out), entry.digest, place, || format!("tensor '{}', decoded", entry.name))
    }

    /// Hands a raw tensor on in pieces, and compares it with its digest at the end.
    pub(crate) fn stream(
        &self,
        index: usize,
        each: impl FnMut(&[u8]) -> Result<(), BundleError>,
    ) -> Result<(), BundleError> {
        let (entry, place) = (&self.file.tensors[index], &self.places[index][0]);
        let got = self.input.stream(place.start, place.end - place.start, each)?;
        self.compare(got, entry.digest, place.start, || format!("tensor '{}'", entry.name))
    }

    /// The bytes of a part of the shard, compared with their digest.
    fn part(&self, place: Range<u64>, expected: Digest, what: impl Fn() -> String) -> Result<Vec<u8>, BundleError> {
        let mut bytes = self.buffer(place.end - place.start)?;
        self.input.read_at_together(place.start, &mut bytes)?;
        self.compare(Digest::of(&bytes), expected, place.start, what)?;
        Ok(bytes)
    }

    fn compare(
        &self,
        got: Digest,
        expected: Digest,
        offset: u64,
        what: impl Fn() -> String,
    ) -> Result<(), BundleError> {
        if got == expected {
            return Ok(());
        }
        Err(BundleError::Mismatch {
            file: self.file.name.clone(),
            what: what(),
            offset,
            expected: expected.to_string(),
            got: got.to_string(),
        })
    }

    /// Decodes consecutive tensors into one buffer, which is then a piece of the source file.
    pub(crate) fn decode_batch(
        &self,
        tensors: Range<usize>,
        out: &mut [u8],
        each: impl Fn(&TensorEntry) + Sync,
    ) -> Vec<Result<(), BundleError>> {
        let mut rest = out;
        let pieces: Vec<(usize, &mut [u8])> = tensors
            .map(|index| {
                let (piece, tail) = std::mem::take(&mut rest).split_at_mut(self.original_bytes(index) as usize);
                rest = tail;
                (index, piece)
            })
            .collect();
        pieces
            .into_par_iter()
            .map(|(index, piece)| {
                each(&self.file.tensors[index]);
                self.decode(index, piece)
            })
            .collect()
    }
}
