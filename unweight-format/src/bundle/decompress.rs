//! Restores the source files of a bundle.
//!
//! Consecutive tensors are decoded into one buffer, which is a piece of the source file. The buffer is compared with
//! the tensors' digests and sent to a writer thread, which returns it. A large tensor is decoded and written in pieces
//! of whole tile rows; it is compared after its last piece, and the output gets its name only if all are right.

use std::{
    collections::{HashMap, HashSet},
    ops::Range,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::Instant,
};

use super::{
    BundleError, DecompressOptions, DecompressReport, FileReport, Progress,
    base::Base,
    files::{self, CHUNK, Contents, Input, check_sizes},
    manifest_file::read_manifest,
    pipeline::{ByteBudget, ReadUnit, batch_bytes_max, join, on_threads, ram_bytes, spawn},
    report::peak_rss_bytes,
    shard::Shard,
    stage::{Replaceable, Stage},
};
use crate::{
    Digest,
    bundle::manifest::{FileEntry, Manifest, WeightsFile},
    failpoint::{failpoint, panic_fault},
};

/// Rebuilds the source files of a bundle, byte for byte.
///
/// Every byte is compared with the digests of the source. The output appears under its name only when it is complete;
/// until then all files are in `<output>.partial`.
///
/// # Errors
/// The bundle is damaged, the output exists or cannot be written, or `progress` requested to stop.
pub fn decompress(
    bundle: &Path,
    output: &Path,
    options: &DecompressOptions,
    progress: &dyn Progress,
) -> Result<DecompressReport, BundleError> {
    on_threads(options.threads, || run(bundle, output, options, progress))
}

fn run(
    bundle: &Path,
    output: &Path,
    options: &DecompressOptions,
    progress: &dyn Progress,
) -> Result<DecompressReport, BundleError> {
    let started = Instant::now();
    let manifest = read_manifest(bundle)?;
    let replaceable = if options.force { Some(files_of_bundle(output, &manifest, progress)?) } else { None };
    let base = Base::of_bundle(bundle, &manifest, options.base.as_deref())?;
    let inputs: Vec<PathBuf> =
        [bundle].into_iter().chain(base.as_deref().map(Base::path)).map(Path::to_path_buf).collect();
    Stage::check(&inputs, output, replaceable.as_ref())?;
    // Check every file before decoding, so that a missing shard is reported at once.
    for file in &manifest.files {
        check_sizes(bundle, file)?;
        if let FileEntry::Weights(file) = file {
            Shard::open(bundle, file.clone())?;
        }
    }
    let stage = Stage::open(&inputs, output, replaceable, options.resume)?;
    stage.report_discarded(progress);
    let job = Job { bundle, options, progress, stage: &stage, base };
    let files = job.run(&manifest)?;
    stage.publish()?;
    Ok(DecompressReport {
        tensors: manifest.files.iter().filter_map(FileEntry::weights).map(|f| f.tensors.len() as u64).sum(),
        bytes: files.iter().map(|f| f.bytes).sum(),
        files,
        stored_bytes: manifest.files.iter().flat_map(FileEntry::stored).map(|(_, bytes)| bytes).sum(),
        seconds: started.elapsed().as_secs_f64(),
        peak_rss_bytes: peak_rss_bytes(),
    })
}

/// The files at `output` that the bundle can restore. Names and sizes do not distinguish models, so the contents of
/// each candidate are compared.
fn files_of_bundle(output: &Path, manifest: &Manifest, progress: &dyn Progress) -> Result<Replaceable, BundleError> {
    let mut stamps = HashMap::new();
    for file in &manifest.files {
        let path = output.join(file.name());
        if !path.symlink_metadata().is_ok_and(|metadata| metadata.is_file() && metadata.len() == file.size()) {
            continue;
        }
        let Ok(input) = Input::open(&path) else { continue };
        let each = |_| if progress.cancelled() { Err(BundleError::Cancelled) } else { Ok(()) };
        match compare_original(&input, file, each) {
            Ok(None) => _ = stamps.insert(file.name().to_owned(), input.stamp()),
            Err(BundleError::Cancelled) => return Err(BundleError::Cancelled),
            // The file differs: it is not replaceable.
            _ => {}
        }
    }
    Ok(Replaceable::Files(stamps))
}

struct Job<'a> {
    bundle: &'a Path,
    options: &'a DecompressOptions,
    progress: &'a dyn Progress,
    stage: &'a Stage,
    base: Option<Arc<Base>>,
}

impl Job<'_> {
    fn run(&self, manifest: &Manifest) -> Result<Vec<FileReport>, BundleError> {
        let resumed = if self.options.resume { self.finished(manifest)? } else { HashSet::new() };
        let unfinished = || manifest.files.iter().filter(|f| !resumed.contains(f.name()));
        // The sound part of these bytes is determined when the file is continued.
        let begun = |file: &FileEntry| match file {
            FileEntry::Weights(file) if self.options.resume => {
                self.stage.growing(&file.name).metadata().map_or(0, |metadata| metadata.len().min(file.size))
            }
            _ => 0,
        };
        let growing: HashMap<&str, u64> = unfinished().map(|f| (f.name(), begun(f))).filter(|(_, b)| *b > 0).collect();
        self.stage.keep_only(&resumed, &growing.keys().map(|name| (*name).to_owned()).collect())?;
        let total: u64 = manifest.files.iter().map(FileEntry::size).sum();
        let left = unfinished().map(FileEntry::size).sum::<u64>();
        self.stage.reserve(left - growing.values().sum::<u64>())?;
        self.progress.start(total);
        manifest
            .files
            .iter()
            .map(|file| {
                self.check_cancelled()?;
                self.progress.file(file.name());
                let resumed = resumed.contains(file.name());
                let resumed_bytes = if resumed {
                    self.progress.advance(file.size());
                    file.size()
                } else {
                    self.rebuild(file)?
                };
                Ok(FileReport {
                    name: file.name().into(),
                    bytes: file.size(),
                    digest: file.digest(),
                    sha256: file.sha256().map(Into::into),
                    resumed,
                    resumed_bytes,
                })
            })
            .collect()
    }

    fn check_cancelled(&self) -> Result<(), BundleError> {
        self.stage.check_cancelled(self.progress)
    }

    /// The names of the files that an interrupted run has completed; their contents are compared with their digests.
    fn finished(&self, manifest: &Manifest) -> Result<HashSet<String>, BundleError> {
        let path = |file: &FileEntry| self.stage.tree().join(file.name());
        let is_there = |file: &&FileEntry| path(file).metadata().is_ok_and(|metadata| metadata.len() == file.size());
        let candidates: Vec<&FileEntry> = manifest.files.iter().filter(is_there).collect();
        if candidates.is_empty() {
            return Ok(HashSet::new());
        }
        // Reading the candidates has its own progress.
        self.progress.start(candidates.iter().map(|file| file.size()).sum());
        let mut finished = HashSet::new();
        for file in candidates {
            let each = |bytes| {
                self.progress.advance(bytes);
                self.check_cancelled()
            };
            let compared = Input::open(&path(file)).and_then(|input| compare_original(&input, file, each));
            // A file that cannot be read is rebuilt.
            self.check_cancelled()?;
            if matches!(compared, Ok(None)) {
                finished.insert(file.name().to_owned());
            }
        }
        Ok(finished)
    }

    /// Returns the number of bytes that an interrupted run had rebuilt.
    fn rebuild(&self, file: &FileEntry) -> Result<u64, BundleError> {
        match file {
            FileEntry::Weights(weights) => self.weights(weights),
            FileEntry::Index(_) | FileEntry::Config(_) | FileEntry::Copied(_) => {
                self.copy(file, &files::original(self.bundle, file)).map(|()| 0)
            }
        }
    }

    /// The number of tensors and bytes of an unfinished file that an interrupted run has rebuilt, up to the first
    /// tensor with a wrong digest.
    fn begun(&self, path: &Path, file: &WeightsFile) -> Result<Option<(usize, u64)>, BundleError> {
        if !self.options.resume || path.symlink_metadata().is_err() {
            return Ok(None);
        }
        let input = Input::open(path)?;
        let is = |at: u64, bytes: u64, expected: Digest| {
            let fits = at.checked_add(bytes).is_some_and(|end| end <= input.stamp().bytes);
            fits && input.stream(at, bytes, |_| self.check_cancelled()).is_ok_and(|digest| digest == expected)
        };
        let (mut tensors, mut at) = (0, file.header_bytes);
        if !is(0, file.header_bytes, file.header_digest) {
            return Ok(Some((0, 0)));
        }
        for tensor in &file.tensors {
            let bytes = tensor.original_bytes().unwrap_or(0);
            if !is(at, bytes, tensor.digest) {
                break;
            }
            (tensors, at) = (tensors + 1, at + bytes);
        }
        self.check_cancelled()?;
        Ok(Some((tensors, at)))
    }

    fn copy(&self, file: &FileEntry, stored: &str) -> Result<(), BundleError> {
        let advance = |bytes| {
            self.progress.advance(bytes);
            self.check_cancelled()
        };
        let from = Input::open(&self.bundle.join(stored))?;
        let check = |got: &Contents| check_contents(file, stored, got);
        self.stage.copy(&from, file.name(), file.sha256().is_some(), advance, check).map(|_| ())
    }

    /// Rebuilds one safetensors file.
    fn weights(&self, file: &WeightsFile) -> Result<u64, BundleError> {
        let shard = Shard::open(self.bundle, file.clone())?.with_base(self.base.clone());
        let header = shard.source_header()?;
        let work = self.stage.growing(&file.name);
        let begun = self.begun(&work, file)?;
        let (first, begun_bytes) = begun.unwrap_or_default();
        let target = match begun {
            Some((_, bytes)) => files::reopen(&work, bytes),
            None => files::create(&work),
        };
        let target = target.map_err(self.stage.write_error(&work))?;
        // The header's bytes are counted at the end.
        self.progress.advance(begun_bytes.saturating_sub(file.header_bytes));
        let write = |bytes: &[u8], at: u64| {
            files::write_at(&target, bytes, at).map_err(self.stage.write_error(&work))?;
            self.stage.count_written(bytes.len() as u64);
            Ok(())
        };
        write(&header, 0)?;
        self.decode_rest(&shard, first, begun_bytes.max(file.header_bytes), write)?;
        shard.pass_attributes(&target);
        target.sync_all().map_err(self.stage.write_error(&work))?;
        if let Some(expected) = &file.sha256 {
            check_sha256(file, expected, files::sha256(&work)?)?;
        }
        self.progress.advance(file.header_bytes);
        self.stage.accept(&work, &file.name)?;
        Ok(begun_bytes)
    }

    /// Decodes the tensors from index `first` on, and passes their bytes to `write` with their offset in the file,
    /// starting at `at`.
    fn decode_rest(
        &self,
        shard: &Shard,
        first: usize,
        at: u64,
        write: impl Fn(&[u8], u64) -> Result<(), BundleError> + Sync,
    ) -> Result<(), BundleError> {
        let budget = ByteBudget::new(ram_bytes(self.options.ram_bytes));
        let failed = AtomicBool::new(false);
        let (sender, receiver) = mpsc::channel::<Decoded>();
        let remaining = shard.read_units_from(first, bytes_of_batches(self.options.ram_bytes));
        // Two buffers, one for decoding while the other is written: new pages for each batch would cost more than
        // decoding. A batch of more than half of the limit gets its own buffer.
        let pooled_max = (budget.limit() / 2).max(CHUNK as u64);
        let sizes = remaining.iter().map(|unit| match unit {
            ReadUnit::Batch(batch) => batch_bytes(shard, batch),
            ReadUnit::Pieces(_) => CHUNK as u64,
        });
        let largest = sizes.clone().max().unwrap_or(0);
        let pooled = sizes.filter(|&bytes| bytes <= pooled_max).max().unwrap_or(0);
        // Larger tensors are decoded in pieces, where their encoding can.
        let pooled = pooled.max(piece_bytes().min(pooled_max).min(largest));
        let (recycle, free) = mpsc::channel::<Vec<u8>>();
        for _ in 0..2 {
            // The receiver still exists.
            _ = recycle.send(shard.buffer(pooled)?);
        }
        thread::scope(|scope| {
            let (budget, failed, write) = (&budget, &failed, &write);
            let writer = spawn(scope, move || {
                let _releases_all = budget.release_all_on_drop();
                let mut result = Ok(());
                for Decoded { buffer, bytes, at } in receiver {
                    panic_fault("writer");
                    if result.is_ok() {
                        result = write(&buffer[..bytes], at);
                        failpoint("part-written");
                        failed.store(result.is_err(), Ordering::Relaxed);
                    }
                    if buffer.len() as u64 == pooled {
                        // The decoding thread drops the receiver when it needs no more buffers.
                        _ = recycle.send(buffer);
                    }
                    budget.release(bytes as u64);
                }
                result
            })?;
            let decoded = self.decode_all(shard, remaining, at, Buffers { free, pooled, sender, budget, failed });
            let written = join(writer);
            decoded?;
            written
        })
    }

    /// Decodes batch by batch, until all is done or the writer has failed.
    fn decode_all(
        &self,
        shard: &Shard,
        remaining: Vec<ReadUnit>,
        mut at: u64,
        buffers: Buffers<'_>,
    ) -> Result<(), BundleError> {
        let Buffers { ref free, pooled, ref sender, budget, failed } = buffers;
        for unit in remaining {
            self.check_cancelled()?;
            if failed.load(Ordering::Relaxed) {
                break;
            }
            let batch = match unit {
                ReadUnit::Batch(batch) => batch,
                ReadUnit::Pieces(index) => {
                    self.progress.tensor(&shard.file.tensors[index].name);
                    shard.stream(index, |piece| {
                        self.check_cancelled()?;
                        budget.acquire(piece.len() as u64);
                        // Both ends live as long as the writer, which returns every buffer.
                        let mut buffer = free.recv().unwrap_or_else(|_| vec![0; piece.len()]);
                        buffer[..piece.len()].copy_from_slice(piece);
                        _ = sender.send(Decoded { buffer, bytes: piece.len(), at });
                        at += piece.len() as u64;
                        self.progress.advance(piece.len() as u64);
                        Ok(())
                    })?;
                    continue;
                }
            };
            let bytes = batch_bytes(shard, &batch);
            let held = bytes.saturating_mul(shard.held_per_byte());
            budget.acquire(held);
            if batch.len() == 1 && self.decode_in_pieces(shard, batch.start, &mut at, &buffers)? {
                // The writer releases the decoded bytes.
                budget.release(held.saturating_sub(bytes));
                continue;
            }
            let buffer = if bytes <= pooled { free.recv().ok() } else { Some(own_buffer(shard, bytes)?) };
            let Some(mut buffer) = buffer else { break };
            let results = shard.decode_batch(batch, &mut buffer[..bytes as usize], false, |entry| {
                self.progress.tensor(&entry.name);
            });
            // The decoded bytes remain until they are written.
            budget.release(held.saturating_sub(bytes));
            results.into_iter().collect::<Result<(), _>>()?;
            self.progress.advance(bytes);
            if sender.send(Decoded { buffer, bytes: bytes as usize, at }).is_err() {
                break;
            }
            at += bytes;
        }
        Ok(())
    }

    /// Decodes a large tensor piece by piece: a piece is digested and written while it is in the caches, and the writer
    /// has something to do from the first one on. `false` if it must be decoded as a whole.
    fn decode_in_pieces(
        &self,
        shard: &Shard,
        index: usize,
        at: &mut u64,
        buffers: &Buffers<'_>,
    ) -> Result<bool, BundleError> {
        let next = || {
            let failed = buffers.failed.load(Ordering::Relaxed);
            if failed { None } else { buffers.free.recv().ok() }
        };
        self.progress.tensor(&shard.file.tensors[index].name);
        shard.decode_in_pieces(index, piece_bytes().min(buffers.pooled), next, |buffer, bytes| {
            self.check_cancelled()?;
            // The writer lives until the sender is dropped.
            _ = buffers.sender.send(Decoded { buffer, bytes, at: *at });
            *at += bytes as u64;
            self.progress.advance(bytes as u64);
            Ok(())
        })
    }
}

/// A buffer for a tensor that is larger than those of the pool.
fn own_buffer(shard: &Shard, bytes: u64) -> Result<Vec<u8>, BundleError> {
    shard.free_idle();
    shard.buffer(bytes)
}

/// Maximum bytes of a batch of small tensors: fewer per thread than in other programs, as the writer waits for the
/// first batch, and what is in the caches is written faster.
fn bytes_of_batches(ram_bytes: Option<u64>) -> u64 {
    (4 * piece_bytes()).min(batch_bytes_max(ram_bytes))
}

/// Bytes of the pieces of a large tensor: enough tile rows for all threads, and few enough bytes for the caches they
/// share.
fn piece_bytes() -> u64 {
    (PIECE_BYTES_PER_THREAD * rayon::current_num_threads() as u64).min(PIECE_BYTES_MAX)
}

/// Bytes of a piece per thread: four tile rows of 4096 BF16 elements.
const PIECE_BYTES_PER_THREAD: u64 = 2 << 20;
/// Maximum bytes of a piece.
const PIECE_BYTES_MAX: u64 = 64 << 20;

/// Decoded bytes on their way to the writer.
struct Decoded {
    buffer: Vec<u8>,
    /// The number of bytes used, at the start of `buffer`.
    bytes: usize,
    /// Their offset in the file.
    at: u64,
}

/// The decoding thread's ends of the channels and state that it shares with the writer.
struct Buffers<'a> {
    /// Buffers that the writer returned.
    free: mpsc::Receiver<Vec<u8>>,
    /// Size of these buffers.
    pooled: u64,
    sender: mpsc::Sender<Decoded>,
    budget: &'a ByteBudget,
    /// Set by the writer after a failed write.
    failed: &'a AtomicBool,
}

/// The original size of these tensors in bytes.
fn batch_bytes(shard: &Shard, batch: &Range<usize>) -> u64 {
    batch.clone().map(|index| shard.original_bytes(index)).sum()
}

/// Compares the SHA-256 of a rebuilt file with the manifest's.
pub(crate) fn check_sha256(file: &WeightsFile, expected: &str, got: String) -> Result<(), BundleError> {
    if got == expected {
        return Ok(());
    }
    Err(BundleError::Mismatch {
        file: file.name.clone(),
        tensor: None,
        what: "SHA-256 of the rebuilt file".into(),
        offset: 0,
        expected: expected.into(),
        got,
    })
}

/// Compares the contents of a stored file with the manifest.
pub(crate) fn check_contents(file: &FileEntry, stored: &str, got: &Contents) -> Result<(), BundleError> {
    let fail = |what: &str, expected: String, got: String| {
        let (file, what) = (stored.into(), what.into());
        Err(BundleError::Mismatch { file, tensor: None, what, offset: 0, expected, got })
    };
    if got.bytes != file.size() {
        return Err(BundleError::FileSize { file: stored.into(), expected: file.size(), got: got.bytes });
    }
    if got.digest != file.digest() {
        return fail("contents", file.digest().to_string(), got.digest.to_string());
    }
    match (file.sha256(), &got.sha256) {
        (Some(expected), Some(got)) if expected != got => fail("SHA-256", expected.into(), got.clone()),
        _ => Ok(()),
    }
}

/// Compares a source or rebuilt file with the manifest and returns the first difference, if any. `each` receives the
/// size of every piece read.
pub(crate) fn compare_original(
    input: &Input,
    file: &FileEntry,
    mut each: impl FnMut(u64) -> Result<(), BundleError>,
) -> Result<Option<BundleError>, BundleError> {
    let FileEntry::Weights(file) = file else {
        let got = files::read_input(input, file.sha256().is_some(), |piece| each(piece.len() as u64))?;
        input.check_unchanged()?;
        return Ok(check_contents(file, file.name(), &got).err());
    };
    let bytes = input.stamp().bytes;
    if bytes != file.size {
        return Ok(Some(BundleError::FileSize { file: file.name.clone(), expected: file.size, got: bytes }));
    }
    let mut at = 0;
    let header = (None, file.header_bytes, file.header_digest);
    let tensors = file.tensors.iter().map(|t| (Some(&t.name), t.original_bytes().unwrap_or(0), t.digest));
    for (tensor, bytes, expected) in std::iter::once(header).chain(tensors) {
        let got = input.stream(at, bytes, |piece| each(piece.len() as u64))?;
        if got != expected {
            return Ok(Some(BundleError::Mismatch {
                file: file.name.clone(),
                tensor: tensor.map(|name| name.as_str().into()),
                what: tensor.map_or_else(|| "header".into(), |name| format!("tensor '{name}'").into()),
                offset: at,
                expected: expected.to_string(),
                got: got.to_string(),
            }));
        }
        at += bytes;
    }
    Ok(None)
}
