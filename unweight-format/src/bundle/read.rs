//! Reading a bundle: every size and header is checked when it is opened, every section when it is parsed.

use std::{
    collections::{HashMap, HashSet},
    fs::File,
    io,
    ops::Range,
    path::{Path, PathBuf},
};

use rayon::prelude::*;

use super::{
    BundleError,
    attached::{self, Attached},
    blocks::Blocks,
    config,
    files::{self, Input},
    part::PartFile,
    pipeline::{Work, batches_from, on_threads},
    stage,
};
use crate::{
    CodecError, Digest, Float, FormId, Section, StoredTensor, TileGrid,
    bundle::manifest::{self, FileEntry, Manifest, SOURCE_HEADER, TensorEntry, WeightsFile, section_name},
    form::{
        exponents,
        packed::{self, PackedTensor, Window, slice_lists},
    },
    glob,
    layout::TILE,
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

/// A part of a tensor: see [`Bundle::decode_part`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorPart {
    /// The original little-endian bytes, row by row.
    pub bytes: Vec<u8>,
    /// Stored bytes that were read for it.
    pub read_bytes: u64,
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
    /// [`Bundle::write_file`] still refuse such a file. But a `config.json` beside weights must not name those of another bundle.
    ///
    /// # Errors
    /// There is no manifest, it is damaged or newer, a shard is missing or has another size or header, or a `config.json` is of another
    /// bundle.
    pub fn open_weights(dir: &Path) -> Result<Self, BundleError> {
        on_threads(None, || {
            let bundle = Self::with_shards(dir, read_manifest(dir)?)?;
            let files = bundle.manifest.files.iter().filter_map(FileEntry::weights);
            let folders: HashSet<_> =
                files.filter_map(|file| dir.join(&file.name).parent().map(Path::to_owned)).collect();
            let weights = bundle.weights_digest();
            folders.iter().try_for_each(|folder| config::check_names(&folder.join(config::FILE_NAME), weights))?;
            Ok(bundle)
        })
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
        let of_model = model_files(shards.iter().map(|shard| shard.file.name.as_str()));
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

    /// What `config.json` calls the bundle by: a digest of its weights' digests (docs/format.md B.9).
    pub fn weights_digest(&self) -> Digest {
        manifest::weights_digest(&self.manifest.files)
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

    /// Whether a model is loaded from this file: whether [`model_files`] matches it.
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

    /// As [`Bundle::decode`], into memory of the caller's, of just its bytes. What is there after an error means
    /// nothing.
    ///
    /// # Errors
    /// As [`Bundle::decode`], or the tensor has another number of bytes.
    pub fn decode_into(&self, name: &str, out: &mut [u8]) -> Result<(), BundleError> {
        self.decode_at_into(self.find(name)?, out)
    }

    /// As [`Bundle::decode_into`], of one file.
    ///
    /// # Errors
    /// As [`Bundle::decode_into`], or the file does not have it.
    pub fn decode_in_into(&self, file: &str, name: &str, out: &mut [u8]) -> Result<(), BundleError> {
        self.decode_at_into(self.find_in(file, name)?, out)
    }

    /// Rows and columns of a matrix, as a rank of several takes them. Of a packed tensor whose blocks have digests
    /// (bundles of format 1.3 on, matrices of more than 512 x 512) only the blocks that they lie in are read and decoded;
    /// of every other tensor, all.
    ///
    /// What is read is compared with its digests, as ever. A part has none of its own to be compared with when it is
    /// decoded: `verify` does that for the whole.
    ///
    /// # Errors
    /// As [`Bundle::decode`], or the tensor is no matrix, or a range is empty or reaches past it.
    pub fn decode_part(&self, name: &str, rows: Range<usize>, cols: Range<usize>) -> Result<TensorPart, BundleError> {
        self.part_at(self.find(name)?, rows, cols)
    }

    /// As [`Bundle::decode_part`], of one file.
    ///
    /// # Errors
    /// As [`Bundle::decode_part`], or the file does not have it.
    pub fn decode_part_in(
        &self,
        file: &str,
        name: &str,
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Result<TensorPart, BundleError> {
        self.part_at(self.find_in(file, name)?, rows, cols)
    }

    fn part_at(
        &self,
        (shard, tensor): (usize, usize),
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Result<TensorPart, BundleError> {
        on_threads(None, || self.shards[shard].decode_part(tensor, rows, cols))
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
        let mut out = self.shards[shard].buffer(self.shards[shard].original_bytes(tensor))?;
        self.decode_at_into((shard, tensor), &mut out)?;
        Ok(out)
    }

    fn decode_at_into(&self, (shard, tensor): (usize, usize), out: &mut [u8]) -> Result<(), BundleError> {
        let shard = &self.shards[shard];
        let (expected, got) = (shard.original_bytes(tensor), out.len());
        if expected != got as u64 {
            return Err(shard.codec_error(tensor, CodecError::TensorBytes { expected, got }));
        }
        on_threads(None, || shard.decode(tensor, out, false))
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

/// A pattern of the files that a model is loaded from: of these `model.safetensors`, else `model-*-of-*.safetensors`,
/// else all, as transformers chooses. Some models bring their weights once more (`consolidated.safetensors`).
///
/// ```
/// use unweight_format::{bundle::model_files, glob::matches};
/// let files = ["consolidated.safetensors", "model-00001-of-00001.safetensors"];
/// assert_eq!(files.map(|file| matches(model_files(files.into_iter()), file)), [false, true]);
/// ```
pub fn model_files<'a>(files: impl Iterator<Item = &'a str> + Clone) -> &'static str {
    let has = |pattern: &&str| files.clone().any(|file| glob::matches(pattern, file));
    MODEL_FILES.into_iter().find(has).unwrap_or("*")
}

/// Reads and checks `unweight.json`.
pub(crate) fn read_manifest(dir: &Path) -> Result<Manifest, BundleError> {
    Ok(read_manifest_bytes(dir)?.0)
}

/// As [`read_manifest`], with the bytes that were parsed.
pub(crate) fn read_manifest_bytes(dir: &Path) -> Result<(Manifest, Vec<u8>), BundleError> {
    match dir.metadata() {
        Ok(metadata) if metadata.is_dir() => {}
        Ok(_) => return Err(BundleError::NotADirectory { path: dir.into() }),
        Err(error) => {
            return Err(match stage::partial_of(dir).filter(|partial| stage::is_begun(partial)) {
                Some(partial) if error.kind() == io::ErrorKind::NotFound => {
                    BundleError::Unfinished { path: dir.into(), partial }
                }
                _ => BundleError::io("open the bundle", dir)(error),
            });
        }
    }
    let path = dir.join(manifest::FILE_NAME);
    if !path.exists() {
        return Err(match PartFile::read(dir)? {
            Some(part) => BundleError::NotMerged { path: dir.into(), part: part.part() },
            None => match stage::output_of(dir).filter(|_| stage::is_begun(dir)) {
                Some(path) => BundleError::Unfinished { path, partial: dir.into() },
                None => BundleError::NotABundle { path: dir.into() },
            },
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
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(BundleError::MissingFile { file }),
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
        let stored = StoredTensor::new(entry.form, grid, sections).map_err(|source| self.codec_error(index, source))?;
        // A form of several types says which one it is of; it has to be the tensor's.
        match stored.section(Section::FLOAT_FORMAT) {
            Some(format) if Float::of(entry.dtype).is_none_or(|float| format != exponents::format_of(float)) => {
                let reason = "it is not that of the tensor's type";
                let section = Section::FLOAT_FORMAT.name();
                Err(self.codec_error(index, CodecError::Code { section, reason }))
            }
            _ => Ok(stored),
        }
    }

    fn codec_error(&self, index: usize, source: CodecError) -> BundleError {
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

    /// Decodes a tensor into `out`: every stored section is compared with its digest, and so is what comes out; `blocks`:
    /// and so are blocks, which only matter where a part is read.
    pub(crate) fn decode(&self, index: usize, out: &mut [u8], blocks: bool) -> Result<(), BundleError> {
        let (entry, place) = (&self.file.tensors[index], self.places[index][0].start);
        if entry.form == FormId::RAW {
            self.input.read_at_together(place, out)?;
            return self.compare(Digest::of(out), entry.digest, place, || format!("tensor '{}'", entry.name));
        }
        let stored = self.tensor(index)?;
        if blocks {
            self.check_blocks(index, &stored)?;
        }
        stored.decode(out).map_err(|source| self.codec_error(index, source))?;
        // Its sections are those of the manifest: if this differs, the manifest was made up.
        self.compare(Digest::of(out), entry.digest, place, || format!("tensor '{}', decoded", entry.name))
    }

    fn check_blocks(&self, index: usize, stored: &StoredTensor<Vec<u8>>) -> Result<(), BundleError> {
        let Some((blocks, digests)) = stored.grid().and_then(|grid| self.blocks(index, grid)) else { return Ok(()) };
        let got = blocks.digests(stored.section(Section::PACKED).unwrap_or_default());
        let wrong = got.iter().zip(digests).position(|(got, expected)| got != expected);
        wrong.map_or(Ok(()), |block| {
            // The section is sound: if this differs, the manifest was made up.
            let what = || format!("tensor '{}', block {block}", self.file.tensors[index].name);
            self.compare(got[block], digests[block], self.places[index].last().map_or(0, |place| place.start), what)
        })
    }

    /// See [`Bundle::decode_part`].
    fn decode_part(&self, index: usize, rows: Range<usize>, cols: Range<usize>) -> Result<TensorPart, BundleError> {
        let entry = &self.file.tensors[index];
        let (file, tensor) = (|| self.file.name.clone(), || entry.name.clone());
        let whole_bytes = entry.original_bytes().unwrap_or(0);
        let element =
            |elements: u64| (elements > 0 && whole_bytes.is_multiple_of(elements)).then(|| whole_bytes / elements);
        let matrix = match entry.shape[..] {
            [all_rows, all_cols] => element(all_rows as u64 * all_cols as u64).map(|bytes| (all_rows, all_cols, bytes)),
            _ => None,
        };
        let Some((all_rows, all_cols, element)) = matrix else {
            return Err(BundleError::PartOfNoMatrix { file: file(), tensor: tensor(), shape: entry.shape.clone() });
        };
        for (axis, range, of) in [("rows", &rows, all_rows), ("columns", &cols, all_cols)] {
            let &Range { start, end } = range;
            if start >= end || end > of {
                return Err(BundleError::PartOutside { file: file(), tensor: tensor(), axis, start, end, of });
            }
        }
        // What is packed is cut between tiles.
        let tiles = |range: &Range<usize>| range.start / TILE * TILE..range.end.next_multiple_of(TILE);
        let (tile_rows, tile_cols) = (tiles(&rows), tiles(&cols));
        let grid = entry.grid().filter(|grid| (grid.rows(), grid.cols()) == (all_rows, all_cols));
        let (decoded, read_bytes, first, width) = match grid.and_then(|grid| self.blocks(index, grid)) {
            Some((blocks, digests)) => {
                let (part, read_bytes) = self.packed_part(index, blocks, digests, &tile_rows, &tile_cols)?;
                let mut out = self.buffer(part.grid().elements() as u64 * 2)?;
                packed::decode_into(&part, &mut out).map_err(|source| self.codec_error(index, source))?;
                (out, read_bytes, (tile_rows.start, tile_cols.start), tile_cols.len())
            }
            None => {
                let mut out = self.buffer(whole_bytes)?;
                self.decode(index, &mut out, false)?;
                (out, entry.stored_bytes(), (0, 0), all_cols)
            }
        };
        // Of what is in memory: its elements can be counted.
        let element = element as usize;
        let cut = (cols.start - first.1) * element..(cols.end - first.1) * element;
        if cut.len() == width * element && decoded.len() == rows.len() * cut.len() {
            return Ok(TensorPart { bytes: decoded, read_bytes });
        }
        let mut bytes = self.buffer((rows.len() * cut.len()) as u64)?;
        let from = &decoded[(rows.start - first.0) * width * element..];
        let pairs = bytes.par_chunks_exact_mut(cut.len()).zip(from.par_chunks_exact(width * element));
        pairs.for_each(|(out, row)| out.copy_from_slice(&row[cut.clone()]));
        Ok(TensorPart { bytes, read_bytes })
    }

    /// The blocks of a packed tensor that have digests, and those.
    fn blocks(&self, index: usize, grid: TileGrid) -> Option<(Blocks, &[Digest])> {
        let mut sections = self.file.tensors[index].sections.iter();
        let digests = &sections.find(|section| section.name == Section::PACKED)?.blocks;
        // The manifest was checked: it has all of them, or none.
        Blocks::of(grid).filter(|_| !digests.is_empty()).map(|blocks| (blocks, &digests[..]))
    }

    /// Rows and columns, in whole tiles, of a packed tensor, and how many stored bytes were read for them.
    fn packed_part(
        &self,
        index: usize,
        blocks: Blocks,
        digests: &[Digest],
        rows: &Range<usize>,
        cols: &Range<usize>,
    ) -> Result<(PackedTensor<Vec<u8>>, u64), BundleError> {
        let entry = &self.file.tensors[index];
        let what = |section: Section| format!("tensor '{}', section {}", entry.name, section.name());
        let find = |name: Section| {
            let mut pairs = entry.sections.iter().zip(&self.places[index]);
            pairs.find(|(section, _)| section.name == name).expect("the manifest was checked: its form has it")
        };
        // Window, heads and lists are small: they are read and compared whole.
        let small = |name: Section| {
            let (section, place) = find(name);
            self.part(place.clone(), section.digest, || what(name))
        };
        let codec = |source| self.codec_error(index, source);
        let window = small(Section::PACKED_WINDOW)?;
        let stored = window.as_slice().try_into().expect("the manifest was checked: its size is that of a window");
        let window = Window::from_stored(stored).map_err(codec)?;
        let (heads, escapes) = (small(Section::ESCAPE_HEADS)?, small(Section::ESCAPES)?);
        let (grid, own_heads, own_escapes) = slice_lists(blocks.grid(), &heads, &escapes, rows, cols).map_err(codec)?;
        let (_, place) = find(Section::PACKED);
        let bands = blocks.bands(rows, cols);
        let tiles: Vec<Vec<u8>> = bands
            .rows()
            .into_par_iter()
            .map(|row| {
                let mut read = self.buffer(bands.bytes_of(row) as u64)?;
                let mut rest = &mut read[..];
                for run in bands.runs(row) {
                    let (piece, tail) = std::mem::take(&mut rest).split_at_mut(run.bytes);
                    self.input.read_at(place.start + run.offset, piece)?;
                    rest = tail;
                }
                if let Some((block, got)) = bands.wrong(row, &read, digests) {
                    let at = place.start + bands.runs(row).first().map_or(0, |run| run.offset);
                    self.compare(got, digests[block], at, || format!("{}, block {block}", what(Section::PACKED)))?;
                }
                Ok(bands.tiles(row, &read, rows, cols).concat())
            })
            .collect::<Result<_, BundleError>>()?;
        let small_bytes =
            [Section::PACKED_WINDOW, Section::ESCAPE_HEADS, Section::ESCAPES].map(|name| find(name).0.bytes);
        let read_bytes = small_bytes.iter().sum::<u64>() + bands.bytes();
        let part = PackedTensor::from_parts(grid, window, tiles.concat(), own_heads, own_escapes).map_err(codec)?;
        Ok((part, read_bytes))
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

    /// Decodes consecutive tensors into one buffer, which is then a piece of the source file; `blocks` as [`Shard::decode`].
    pub(crate) fn decode_batch(
        &self,
        tensors: Range<usize>,
        out: &mut [u8],
        blocks: bool,
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
                self.decode(index, piece, blocks)
            })
            .collect()
    }
}
