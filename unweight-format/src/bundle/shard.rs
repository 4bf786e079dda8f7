//! A shard of a bundle. Its header must agree with the manifest; its parts are compared with their digests when read.

use std::{
    collections::{HashMap, HashSet},
    fs::File,
    ops::Range,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use super::{
    BundleError,
    blocks::Blocks,
    files::{self, Input, check_sizes},
    manifest::{self, BaseEntry, FileEntry, SOURCE_HEADER, TensorEntry, WeightsFile, section_name},
    pipeline::{ReadUnit, batch_bytes_max, read_units_from},
};
use crate::{
    CodecError, Digest, EncodingId, Float, Section, StoredTensor, TileGrid,
    bits::delta,
    digest::Digester,
    encoding::{
        exponents,
        packed::{self, PackedTensor, Window, slice_lists},
    },
    layout::TILE,
    parallel,
    safetensors::{Dtype, HEADER_MAX, Header, LENGTH_BYTES, TensorInfo},
};

/// Rows and columns of a tensor, returned by [`TensorHandle::decode_part`](super::TensorHandle::decode_part).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TensorPart {
    /// The original little-endian bytes, row by row.
    pub bytes: Vec<u8>,
    /// Stored bytes that were read to decode the part.
    pub read_bytes: u64,
}

/// Reads the tensors of a base.
pub(crate) trait BaseReader: std::fmt::Debug + Send + Sync {
    /// Reads the base's tensor of an entry of the bundle into `out`, and compares it with the entry's digest of it.
    fn read_for(&self, file: &str, entry: &TensorEntry, out: &mut [u8]) -> Result<(), BundleError>;
}

/// An open shard whose header agrees with the manifest.
#[derive(Debug)]
pub(crate) struct Shard {
    pub(crate) file: WeightsFile,
    input: Arc<Input>,
    /// For each tensor, the ranges of its sections, or the one range of a raw tensor.
    ranges: Vec<Vec<Range<u64>>>,
    source_header: Range<u64>,
    base: Option<Arc<dyn BaseReader>>,
    /// The bundle and its base, for the error that the base is missing.
    needs: Option<Box<(PathBuf, BaseEntry)>>,
    /// Large sections of decoded tensors, in whose place those of the next tensor are read: the kernel takes as long to
    /// fill new pages with zeros as a tenth of decoding.
    idle: Mutex<Vec<Vec<u8>>>,
}

/// Bytes from which a section's buffer is used again.
const REUSED_FROM: u64 = 4 << 20;

/// Bytes of the rows that a task copies.
const COPY_BYTES: usize = 1 << 18;

impl Shard {
    /// Opens a shard of a bundle. Tensors that are differences from a base cannot be decoded without it
    /// ([`Shard::with_base`]).
    pub(crate) fn open(dir: &Path, file: WeightsFile) -> Result<Self, BundleError> {
        check_sizes(dir, &FileEntry::Weights(file.clone()))?;
        let path: PathBuf = dir.join(&file.name);
        let input = Arc::new(Input::open(&path)?);
        if input.stamp().bytes != file.shard_size {
            let (expected, got) = (file.shard_size, input.stamp().bytes);
            return Err(BundleError::FileSize { file: file.name, expected, got });
        }
        let mismatch = |what: String, offset, expected: String, got: String| BundleError::Mismatch {
            file: file.name.clone(),
            tensor: None,
            what: what.into(),
            offset,
            expected,
            got,
        };
        if file.shard_header_bytes > file.shard_size {
            let got = file.shard_size.to_string();
            return Err(mismatch("header".into(), 0, format!("{} bytes", file.shard_header_bytes), got));
        }
        let limit = HEADER_MAX + LENGTH_BYTES;
        if file.shard_header_bytes > limit {
            return Err(BundleError::TooLarge { path, limit, got: file.shard_header_bytes });
        }
        let header_bytes = input.read(0, file.shard_header_bytes)?;
        let digest = Digest::of(&header_bytes);
        if digest != file.shard_header_digest {
            return Err(mismatch("header".into(), 0, file.shard_header_digest.to_string(), digest.to_string()));
        }
        let header = Header::parse(&header_bytes, file.shard_size, HEADER_MAX)
            .map_err(|source| BundleError::Header { path: file.name.clone().into(), source })?;
        let stored: HashMap<&str, &TensorInfo> = header.tensors.iter().map(|t| (t.name.as_str(), t)).collect();
        let mut offsets = HashSet::new();
        let mut locate = |name: &str, dtype: Dtype, shape: &[usize], bytes: u64| match stored.get(name) {
            Some(t) if t.dtype == dtype && t.shape == shape && t.bytes == bytes => {
                offsets.insert(t.offset);
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
        let ranges = file
            .tensors
            .iter()
            .map(|tensor| {
                let Some(grid) = tensor.grid().filter(|_| tensor.encoding != EncodingId::RAW) else {
                    // The manifest was checked, so the size is known.
                    let bytes = tensor.original_bytes().unwrap_or(0);
                    return Ok(vec![locate(&tensor.name, tensor.dtype, &tensor.shape, bytes)?]);
                };
                let section = |section: &manifest::SectionEntry| {
                    let shape = section.name.shape(grid, section.bytes as usize);
                    locate(&section_name(&tensor.name, section.name), section.name.dtype(), &shape, section.bytes)
                };
                tensor.sections.iter().map(section).collect()
            })
            .collect::<Result<Vec<Vec<_>>, BundleError>>()?;
        let source_header = locate(SOURCE_HEADER, Dtype::U8, &[file.header_bytes as usize], file.header_bytes)?;
        let expected = ranges.iter().map(Vec::len).sum::<usize>() + 1;
        if stored.len() != expected {
            let got = format!("{} entries", stored.len());
            return Err(mismatch("header".into(), 0, format!("{expected} entries"), got));
        }
        Ok(Self { input, ranges, source_header, file, base: None, needs: None, idle: Mutex::default() })
    }

    /// Tensors that are written to a shard without a header yet, at these ranges. Only these can be read.
    pub(crate) fn of_written(
        name: &str,
        input: Arc<Input>,
        tensors: Vec<TensorEntry>,
        ranges: Vec<Vec<Range<u64>>>,
    ) -> Self {
        let unknown = Digest::of(b"");
        let file = WeightsFile {
            name: name.into(),
            size: 0,
            digest: unknown,
            sha256: None,
            header_bytes: 0,
            header_digest: unknown,
            shard_size: 0,
            shard_header_bytes: 0,
            shard_header_digest: unknown,
            tensors,
        };
        Self { file, input, ranges, source_header: 0..0, base: None, needs: None, idle: Mutex::default() }
    }

    /// Where a tensor is in the shard: its sections, or the one range of a raw tensor.
    pub(crate) fn ranges(&self, tensor: usize) -> &[Range<u64>] {
        &self.ranges[tensor]
    }

    /// The shard, with the base of its bundle.
    pub(crate) fn with_base<B: BaseReader + 'static>(self, base: Option<Arc<B>>) -> Self {
        Self { base: base.map(|base| base as Arc<dyn BaseReader>), ..self }
    }

    /// The shard of a bundle that is open without its base.
    pub(crate) fn without_base(self, bundle: &Path, base: &BaseEntry) -> Self {
        Self { needs: Some(Box::new((bundle.into(), base.clone()))), ..self }
    }

    /// Bytes that decoding holds per byte of a tensor: stored and decoded, and those of the base.
    pub(crate) fn held_per_byte(&self) -> u64 {
        if self.base.is_some() { 3 } else { 2 }
    }

    /// Length and header of the source file, compared with their digest.
    pub(crate) fn source_header(&self) -> Result<Vec<u8>, BundleError> {
        self.part(self.source_header.clone(), self.file.header_digest, None, || format!("'{SOURCE_HEADER}'"))
    }

    /// See [`Input::pass_attributes`].
    pub(crate) fn pass_attributes(&self, to: &File) {
        self.input.pass_attributes(to);
    }

    pub(crate) fn original_bytes(&self, tensor: usize) -> u64 {
        self.file.tensors[tensor].original_bytes().unwrap_or(0)
    }

    /// Divides the tensors into portions that fit in memory.
    pub(crate) fn read_units(&self, ram_bytes: Option<u64>) -> Vec<ReadUnit> {
        self.read_units_from(0, batch_bytes_max(ram_bytes))
    }

    /// Like [`Shard::read_units`], for the tensors from index `first` on, in batches of at most `batch_bytes`.
    pub(crate) fn read_units_from(&self, first: usize, batch_bytes: u64) -> Vec<ReadUnit> {
        let tensors = self.file.tensors.iter();
        read_units_from(
            first,
            tensors.map(|t| (t.original_bytes().unwrap_or(0), t.encoding == EncodingId::RAW)),
            batch_bytes,
        )
    }

    pub(crate) fn buffer(&self, bytes: u64) -> Result<Vec<u8>, BundleError> {
        files::buffer(bytes, Path::new(&self.file.name))
    }

    /// Makes sure that a buffer that is used again has at least this size.
    pub(crate) fn grow(&self, buffer: &mut Vec<u8>, bytes: u64) -> Result<(), BundleError> {
        if (buffer.len() as u64) < bytes {
            // Drop the old buffer first: both together could exceed the memory limit.
            drop(std::mem::take(buffer));
            *buffer = self.buffer(bytes)?;
        }
        Ok(())
    }

    /// Reads a tensor as it is stored, for a reader that decodes it itself: without a base.
    pub(crate) fn stored(&self, index: usize) -> Result<StoredTensor<Vec<u8>>, BundleError> {
        let entry = &self.file.tensors[index];
        if entry.base.is_some() { Err(self.needs_base(entry)) } else { self.tensor(index) }
    }

    /// Reads a tensor. Every section is compared with its digest and validated.
    fn tensor(&self, index: usize) -> Result<StoredTensor<Vec<u8>>, BundleError> {
        let entry = &self.file.tensors[index];
        // The manifest was checked: raw tensors, and only these, have no rows and columns.
        let Some(grid) = entry.grid() else {
            let range = self.ranges[index][0].clone();
            let what = || format!("tensor '{}'", entry.name);
            return self.part(range, entry.digest, Some(&entry.name), what).map(StoredTensor::raw);
        };
        let sections = entry.sections.iter().zip(&self.ranges[index]).map(|(section, range)| {
            let what = || format!("tensor '{}', section {}", entry.name, section.name.name());
            self.part(range.clone(), section.digest, Some(&entry.name), what)
        });
        let sections = sections.collect::<Result<Vec<_>, _>>()?;
        let stored =
            StoredTensor::new(entry.encoding, grid, sections).map_err(|source| self.codec_error(index, source))?;
        // An encoding of several types records the type, which must be the tensor's.
        match stored.section(Section::FLOAT_FORMAT) {
            Some(format) if Float::of(entry.dtype).is_none_or(|float| format != exponents::format_of(float)) => {
                let reason = "it is not that of the tensor's type";
                let section = Section::FLOAT_FORMAT.name();
                Err(self.codec_error(index, CodecError::Code { section, reason }))
            }
            _ => Ok(stored),
        }
    }

    pub(crate) fn codec_error(&self, index: usize, source: CodecError) -> BundleError {
        BundleError::Codec {
            file: self.file.name.clone(),
            tensor: self.file.tensors[index].name.clone(),
            offset: self.ranges[index].iter().map(|range| range.start).min().unwrap_or(0),
            source,
        }
    }

    /// Whether every stored section matches its digest.
    pub(crate) fn is_sound(&self, index: usize) -> bool {
        let entry = &self.file.tensors[index];
        let digests = entry.sections.iter().map(|section| section.digest).chain([entry.digest]);
        self.ranges[index].iter().zip(digests).all(|(range, expected)| {
            let got = self.input.stream(range.start, range.end - range.start, |_| Ok(()));
            got.is_ok_and(|got| got == expected)
        })
    }

    /// Decodes a tensor into `out`. Every stored section and the result are compared with their digests; with `blocks`,
    /// also the blocks, which only matter for reading parts.
    pub(crate) fn decode(&self, index: usize, out: &mut [u8], blocks: bool) -> Result<(), BundleError> {
        let (entry, offset) = (&self.file.tensors[index], self.ranges[index][0].start);
        if entry.encoding == EncodingId::RAW {
            let got = self.input.read_digested(offset, out)?;
            return self.compare(got, entry.digest, offset, Some(&entry.name), || format!("tensor '{}'", entry.name));
        }
        let stored = self.tensor(index)?;
        if blocks {
            self.check_blocks(index, &stored)?;
        }
        stored.decode(out).map_err(|source| self.codec_error(index, source))?;
        self.reuse(stored);
        self.add_base(entry, out)?;
        self.compare_decoded(index, Digest::of(out))
    }

    /// Compares the digest of a decoded tensor.
    fn compare_decoded(&self, index: usize, got: Digest) -> Result<(), BundleError> {
        let (entry, offset) = (&self.file.tensors[index], self.ranges[index][0].start);
        // All sections match the manifest: if the result does not, the manifest was forged.
        self.compare(got, entry.digest, offset, Some(&entry.name), || format!("tensor '{}', decoded", entry.name))
    }

    /// Replaces differences from the base by the tensor, if it is stored so.
    fn add_base(&self, entry: &TensorEntry, out: &mut [u8]) -> Result<(), BundleError> {
        // The manifest was checked: whatever has a base is a matrix of floats.
        let Some((_, float)) = entry.base.zip(Float::of(entry.dtype)) else { return Ok(()) };
        let base = self.base.as_ref().ok_or_else(|| self.needs_base(entry))?;
        let mut bytes = self.buffer(out.len() as u64)?;
        base.read_for(&self.file.name, entry, &mut bytes)?;
        delta::add(float, out, &bytes);
        Ok(())
    }

    /// The error that a tensor cannot be decoded without its base.
    fn needs_base(&self, entry: &TensorEntry) -> BundleError {
        match self.needs.as_deref() {
            Some((bundle, base)) => base.needed_by(bundle),
            None => BundleError::NeedsBase {
                path: (&self.file.name).into(),
                name: entry.name.clone(),
                digest: entry.base.unwrap_or(entry.digest),
            },
        }
    }

    fn check_blocks(&self, index: usize, stored: &StoredTensor<Vec<u8>>) -> Result<(), BundleError> {
        let Some((blocks, digests)) = stored.grid().and_then(|grid| self.blocks(index, grid)) else { return Ok(()) };
        let got = blocks.digests(stored.section(Section::PACKED).unwrap_or_default());
        let wrong = got.iter().zip(digests).position(|(got, expected)| got != expected);
        wrong.map_or(Ok(()), |block| {
            // The section matches the manifest: if a block does not, the manifest was forged.
            let name = &self.file.tensors[index].name;
            let what = || format!("tensor '{name}', block {block}");
            let at = self.ranges[index].last().map_or(0, |range| range.start);
            self.compare(got[block], digests[block], at, Some(name), what)
        })
    }

    /// See [`TensorHandle::decode_part`](super::TensorHandle::decode_part).
    pub(crate) fn decode_part(
        &self,
        index: usize,
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Result<TensorPart, BundleError> {
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
        // Packed matrices are divided between tiles.
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
        // The tensor is in memory, so its size fits usize.
        let element = element as usize;
        let col_bytes = (cols.start - first.1) * element..(cols.end - first.1) * element;
        if col_bytes.len() == width * element && decoded.len() == rows.len() * col_bytes.len() {
            return Ok(TensorPart { bytes: decoded, read_bytes });
        }
        let mut bytes = self.buffer((rows.len() * col_bytes.len()) as u64)?;
        let from = &decoded[(rows.start - first.0) * width * element..];
        let rows_at_once = (COPY_BYTES / col_bytes.len()).max(1);
        parallel::for_each_chunk(&mut bytes, rows_at_once * col_bytes.len(), &|piece, out| {
            let rows = from[piece * rows_at_once * width * element..].chunks_exact(width * element);
            for (out, row) in out.chunks_exact_mut(col_bytes.len()).zip(rows) {
                out.copy_from_slice(&row[col_bytes.clone()]);
            }
        });
        Ok(TensorPart { bytes, read_bytes })
    }

    /// The blocks of a packed tensor and their digests; `None` if it has none.
    fn blocks(&self, index: usize, grid: TileGrid) -> Option<(Blocks, &[Digest])> {
        let mut sections = self.file.tensors[index].sections.iter();
        let digests = &sections.find(|section| section.name == Section::PACKED)?.blocks;
        // The manifest was checked: it contains all block digests.
        Blocks::of(grid).map(|blocks| (blocks, &digests[..]))
    }

    /// Reads rows and columns, in whole tiles, of a packed tensor. Also returns the number of stored bytes read.
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
            let mut pairs = entry.sections.iter().zip(&self.ranges[index]);
            pairs.find(|(section, _)| section.name == name).expect("the manifest was checked: its encoding has it")
        };
        // Window, heads and lists are small, so they are read and compared as a whole.
        let small = |name: Section| {
            let (section, range) = find(name);
            self.part(range.clone(), section.digest, Some(&entry.name), || what(name))
        };
        let codec = |source| self.codec_error(index, source);
        let window = small(Section::PACKED_WINDOW)?;
        let stored = window.as_slice().try_into().expect("the manifest was checked: its size is that of a window");
        let window = Window::from_stored(stored).map_err(codec)?;
        let (heads, escapes) = (small(Section::ESCAPE_HEADS)?, small(Section::ESCAPES)?);
        let (grid, sliced_heads, sliced_escapes) =
            slice_lists(blocks.grid(), &heads, &escapes, rows, cols).map_err(codec)?;
        let (_, range) = find(Section::PACKED);
        let bands = blocks.bands(rows, cols);
        let tiles: Vec<Vec<u8>> = parallel::try_map(bands.rows(), |row| {
            let mut read = self.buffer(bands.bytes_of(row) as u64)?;
            let mut rest = &mut read[..];
            for run in bands.runs(row) {
                let (piece, tail) = std::mem::take(&mut rest).split_at_mut(run.bytes);
                self.input.read_at(range.start + run.offset, piece)?;
                rest = tail;
            }
            if let Some((block, got)) = bands.first_mismatch(row, &read, digests) {
                let at = range.start + bands.runs(row).first().map_or(0, |run| run.offset);
                let what = || format!("{}, block {block}", what(Section::PACKED));
                self.compare(got, digests[block], at, Some(&entry.name), what)?;
            }
            Ok(bands.tiles(row, &read, rows, cols).concat())
        })?;
        let small_bytes =
            [Section::PACKED_WINDOW, Section::ESCAPE_HEADS, Section::ESCAPES].map(|name| find(name).0.bytes);
        let read_bytes = small_bytes.iter().sum::<u64>() + bands.bytes();
        let part =
            PackedTensor::from_parts(grid, window, tiles.concat(), sliced_heads, sliced_escapes).map_err(codec)?;
        Ok((part, read_bytes))
    }

    /// Passes a raw tensor to `each` in pieces, and compares it with its digest at the end.
    pub(crate) fn stream(
        &self,
        index: usize,
        each: impl FnMut(&[u8]) -> Result<(), BundleError>,
    ) -> Result<(), BundleError> {
        let (entry, range) = (&self.file.tensors[index], &self.ranges[index][0]);
        let got = self.input.stream(range.start, range.end - range.start, each)?;
        self.compare(got, entry.digest, range.start, Some(&entry.name), || format!("tensor '{}'", entry.name))
    }

    /// Reads a part of the shard, which belongs to `tensor` if there is one, and compares it with its digest.
    fn part(
        &self,
        range: Range<u64>,
        expected: Digest,
        tensor: Option<&str>,
        what: impl Fn() -> String,
    ) -> Result<Vec<u8>, BundleError> {
        let mut bytes = self.section_buffer(range.end - range.start)?;
        let got = self.input.read_digested(range.start, &mut bytes)?;
        self.compare(got, expected, range.start, tensor, what)?;
        Ok(bytes)
    }

    /// A buffer for a section: of a decoded tensor, if there is one of about this size.
    fn section_buffer(&self, bytes: u64) -> Result<Vec<u8>, BundleError> {
        if bytes < REUSED_FROM {
            return self.buffer(bytes);
        }
        // Sections of equal tensors differ by some bytes.
        let slack = bytes / 16;
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |buffer: &Vec<u8>| (bytes..=bytes + 2 * slack).contains(&(buffer.capacity() as u64));
        if let Some(at) = idle.iter().position(fits) {
            let mut buffer = idle.swap_remove(at);
            buffer.resize(bytes as usize, 0);
            return Ok(buffer);
        }
        // Old and new buffers together could exceed the memory limit.
        idle.clear();
        drop(idle);
        let mut buffer = self.buffer(bytes + slack)?;
        buffer.truncate(bytes as usize);
        Ok(buffer)
    }

    /// Keeps the large sections of a decoded tensor for the next one.
    fn reuse(&self, stored: StoredTensor<Vec<u8>>) {
        let large = stored.into_sections().into_iter().filter(|section| section.capacity() as u64 >= REUSED_FROM);
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).extend(large);
    }

    /// Frees the buffers that are kept for the next tensor.
    pub(crate) fn free_idle(&self) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Decodes a large tensor in pieces of whole tile rows, of at most `most_bytes` each: reads and validates its
    /// sections, then passes the pieces to `each` in order, in buffers of `next`. The digest is compared after the last
    /// piece. `false` if the tensor cannot be decoded so; then nothing was passed.
    pub(crate) fn decode_in_pieces(
        &self,
        index: usize,
        most_bytes: u64,
        mut next: impl FnMut() -> Option<Vec<u8>>,
        mut each: impl FnMut(Vec<u8>, usize) -> Result<(), BundleError>,
    ) -> Result<bool, BundleError> {
        let (entry, bytes) = (&self.file.tensors[index], self.original_bytes(index));
        let divisible = entry.base.is_none() && entry.encoding.encoding().tile_rows().is_some();
        let Some(grid) = entry.grid().filter(|_| divisible) else { return Ok(false) };
        let tile_row_bytes = bytes / grid.rows() as u64 * TILE as u64;
        let tile_rows = most_bytes / tile_row_bytes;
        if tile_rows == 0 || bytes <= 2 * tile_rows * tile_row_bytes {
            return Ok(false);
        }
        let stored = self.tensor(index)?;
        let failed = |source| self.codec_error(index, source);
        let Some(decode) = stored.tile_rows().map_err(failed)? else { return Ok(false) };
        let (mut digester, mut done) = (Digester::default(), 0);
        for first in (0..grid.tile_rows()).step_by(tile_rows as usize) {
            let piece_bytes = (bytes - done).min(tile_rows * tile_row_bytes) as usize;
            let Some(mut buffer) = next() else { return Ok(true) };
            decode(first, &mut buffer[..piece_bytes]).map_err(failed)?;
            digester.update_together(&buffer[..piece_bytes]);
            each(buffer, piece_bytes)?;
            done += piece_bytes as u64;
        }
        drop(decode);
        self.reuse(stored);
        self.compare_decoded(index, digester.finish()).map(|()| true)
    }

    fn compare(
        &self,
        got: Digest,
        expected: Digest,
        offset: u64,
        tensor: Option<&str>,
        what: impl Fn() -> String,
    ) -> Result<(), BundleError> {
        if got == expected {
            return Ok(());
        }
        Err(BundleError::Mismatch {
            file: self.file.name.clone(),
            tensor: tensor.map(Into::into),
            what: what().into(),
            offset,
            expected: expected.to_string(),
            got: got.to_string(),
        })
    }

    /// Decodes tensors one after the other into the start of a buffer, which is then a piece of the source file if they
    /// are consecutive. `blocks` is as in [`Shard::decode`].
    pub(crate) fn decode_batch(
        &self,
        tensors: impl Iterator<Item = usize>,
        out: &mut [u8],
        blocks: bool,
        each: impl Fn(&TensorEntry) + Sync,
    ) -> Vec<Result<(), BundleError>> {
        let mut rest = out;
        let pieces = tensors.map(|index| {
            let (piece, tail) = std::mem::take(&mut rest).split_at_mut(self.original_bytes(index) as usize);
            rest = tail;
            (index, piece)
        });
        parallel::map(pieces, |(index, piece)| {
            each(&self.file.tensors[index]);
            self.decode(index, piece, blocks)
        })
    }
}
