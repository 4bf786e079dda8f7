//! A model to a bundle, tensor by tensor.
//!
//! ```text
//! mapped source --batches--> survey + encode (rayon) --pieces, bounded--> writer: work/shard --fsync, rename--> tree/
//! ```
//! Where the bytes of a shard go: first everything that keeps the next part on a multiple of 16 bytes, in source order; then what
//! does not (raw tensors of odd sizes, and sign_mantissa sections of them), largest element type first; last the
//! source's header. So every section that a kernel or a stock reader wants aligned is, without padding.

use std::{
    collections::{BTreeMap, HashSet},
    fs::{self, File},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::Instant,
};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::{
    BundleError, CompressOptions, CompressReport, CpuEncoder, Encoder, EncoderError, PlanReport, Progress,
    TensorReport, VerifyAfter,
    files::{self, Mapped},
    pipeline::{Gate, batches, on_threads},
    read::Shard,
    report::{peak_rss_bytes, ratio, totals},
    source::{Index, Kind, Source, SourceFile},
    stage::Stage,
};
use crate::{
    Digest, FormId, Matrix, Section, StoredTensor, bf16,
    bundle::manifest::{
        self, CopiedFile, FileEntry, INDEX_SOURCE_SUFFIX, IndexFile, Manifest, Options, SOURCE_HEADER, SectionEntry,
        TensorEntry, VERSION, WeightsFile, section_name,
    },
    form::{FORMS, Sample},
    plan::{self, Choice, Decision, Planner},
    safetensors::{Dtype, HEADER_MAX, Header, TensorInfo, header_to_bytes},
};

/// Every section starts on a multiple of this many bytes, unless what is before it cannot be moved.
const ALIGN: u64 = 16;
/// A tensor is sampled for a prediction in this many pieces of this many bytes.
const SAMPLE_PIECES: usize = 8;
const SAMPLE_BYTES: usize = 128 << 10;

/// Compresses a model directory to a bundle.
///
/// The output appears under its name when it is complete; until then everything is in `<output>.partial`.
///
/// # Errors
/// The source is not a sound model, the output exists or cannot be written, or `progress` asked to stop.
pub fn compress(
    source: &Path,
    output: &Path,
    options: &CompressOptions,
    progress: &dyn Progress,
) -> Result<CompressReport, BundleError> {
    compress_with(source, output, options, &CpuEncoder, progress)
}

/// [`compress`] with another encoder.
///
/// # Errors
/// As [`compress`], or the encoder failed.
pub fn compress_with(
    source: &Path,
    output: &Path,
    options: &CompressOptions,
    encoder: &dyn Encoder,
    progress: &dyn Progress,
) -> Result<CompressReport, BundleError> {
    let started = Instant::now();
    let planner = Planner::new(options)?;
    Stage::check(source, output, options.force)?;
    let model = Source::open(source)?;
    planner.check_rules(tensor_names(&model))?;
    let stage = Stage::open(source, output, options.force, options.resume)?;
    let job = Job { options, planner: &planner, stage: &stage, encoder, progress };
    let result = on_threads(options.threads, || job.run(&model));
    let (manifest, resumed_files, stored_bytes, verified_tensors) = result?;
    stage.finish()?;
    let tensors = tensor_reports(&manifest);
    let original_bytes = model.files.iter().map(|f| f.bytes).sum();
    Ok(CompressReport {
        forms: totals(&tensors),
        tensors,
        files: model.files.len() as u64,
        resumed_files,
        original_bytes,
        stored_bytes,
        ratio: ratio(stored_bytes, original_bytes),
        verified_tensors,
        seconds: started.elapsed().as_secs_f64(),
        peak_rss_bytes: peak_rss_bytes(),
        manifest_digest: manifest.manifest_digest,
    })
}

/// Predicts what [`compress`] would do, from the headers and samples of the weights.
///
/// # Errors
/// The source is not a sound model, or the plan file cannot be followed.
pub fn plan(source: &Path, options: &CompressOptions) -> Result<PlanReport, BundleError> {
    let started = Instant::now();
    let planner = Planner::new(options)?;
    let model = Source::open(source)?;
    planner.check_rules(tensor_names(&model))?;
    let (tensors, stored_bytes) = on_threads(options.threads, || predict(&model, &planner, options))?;
    let original_bytes = model.files.iter().map(|f| f.bytes).sum();
    Ok(PlanReport {
        forms: totals(&tensors),
        tensors,
        files: model.files.len() as u64,
        original_bytes,
        stored_bytes,
        ratio: ratio(stored_bytes, original_bytes),
        seconds: started.elapsed().as_secs_f64(),
    })
}

fn tensor_names(model: &Source) -> impl Iterator<Item = &str> + Clone {
    let tensors = model.files.iter().flat_map(|file| match &file.kind {
        Kind::Weights { header, .. } => header.tensors.as_slice(),
        _ => &[],
    });
    tensors.map(|t| t.name.as_str())
}

fn report(file: &str, info: &TensorInfo, decision: &Decision, choice: &Choice, stored_bytes: u64) -> TensorReport {
    let elements = info.elements();
    TensorReport {
        file: file.into(),
        name: info.name.clone(),
        role: decision.role,
        layer: decision.layer,
        dtype: info.dtype.to_string(),
        shape: info.shape.clone(),
        form: choice.form(),
        reason: choice.reason(),
        elements,
        original_bytes: info.bytes,
        stored_bytes,
        bits_per_element: bits_per_element(stored_bytes, elements),
    }
}

fn bits_per_element(bytes: u64, elements: u64) -> f64 {
    if elements == 0 { 0.0 } else { bytes as f64 * 8.0 / elements as f64 }
}

/// What a bundle's tensors are, for reports.
pub(crate) fn tensor_reports(manifest: &Manifest) -> Vec<TensorReport> {
    let files = manifest.files.iter().filter_map(FileEntry::weights);
    files
        .flat_map(|file| {
            file.tensors.iter().map(|t| {
                let elements = t.shape.iter().map(|&d| d as u64).product();
                TensorReport {
                    file: file.name.clone(),
                    name: t.name.clone(),
                    role: t.role,
                    layer: t.layer,
                    dtype: t.dtype.to_string(),
                    shape: t.shape.clone(),
                    form: t.form,
                    reason: t.reason.clone(),
                    elements,
                    original_bytes: t.original_bytes().unwrap_or(0),
                    stored_bytes: t.stored_bytes(),
                    bits_per_element: bits_per_element(t.stored_bytes(), elements),
                }
            })
        })
        .collect()
}

fn predict(
    model: &Source,
    planner: &Planner,
    options: &CompressOptions,
) -> Result<(Vec<TensorReport>, u64), BundleError> {
    let (mut reports, mut stored_bytes) = (Vec::new(), 0);
    for file in &model.files {
        let Kind::Weights { header, .. } = &file.kind else {
            stored_bytes += if matches!(file.kind, Kind::Index(_)) { 4 * file.bytes } else { file.bytes };
            continue;
        };
        let map = Mapped::open(&file.path, file.bytes)?;
        let tensors: Vec<TensorReport> = header
            .tensors
            .par_iter()
            .map(|info| {
                let decision = planner.decide(&info.name, info.dtype, &info.shape);
                if decision.choice.grid().is_none() {
                    return report(&file.name, info, &decision, &decision.choice, info.bytes);
                }
                let sample = Sample::of(&pieces(map.slice(info.offset, info.bytes)), options.code_limit);
                match plan::predict(decision.choice.clone(), &sample) {
                    (choice, Some(bytes)) if bytes < info.bytes => report(&file.name, info, &decision, &choice, bytes),
                    (choice, Some(_)) => report(&file.name, info, &decision, &choice.not_smaller(), info.bytes),
                    (choice, None) => report(&file.name, info, &decision, &choice, info.bytes),
                }
            })
            .collect();
        map.release(0..file.bytes);
        // Shard header and manifest name every section once each, about 1.5 KB a tensor with its digests.
        let coded = tensors.iter().filter(|t| t.form != FormId::RAW).count() as u64;
        stored_bytes += 2 * header.data_offset + 1500 * coded;
        stored_bytes += tensors.iter().map(|t| t.stored_bytes).sum::<u64>();
        reports.extend(tensors);
    }
    Ok((reports, stored_bytes))
}

/// Pieces spread evenly over a tensor, each on a multiple of 64 elements; all of a small one.
fn pieces(bytes: &[u8]) -> Vec<&[u8]> {
    if bytes.len() <= SAMPLE_PIECES * SAMPLE_BYTES {
        return vec![bytes];
    }
    let step = (bytes.len() - SAMPLE_BYTES) / (SAMPLE_PIECES - 1) / 128 * 128;
    (0..SAMPLE_PIECES).map(|i| &bytes[i * step..][..SAMPLE_BYTES]).collect()
}

struct Job<'a> {
    options: &'a CompressOptions,
    planner: &'a Planner,
    stage: &'a Stage,
    encoder: &'a dyn Encoder,
    progress: &'a dyn Progress,
}

/// What is kept of a finished shard until the bundle is complete.
#[derive(Serialize, Deserialize)]
struct Record {
    /// Everything that decides the shard's bytes beside the source.
    options: String,
    source_bytes: u64,
    source_modified_ns: u128,
    file: WeightsFile,
}

/// A shard that is written but may not be on the disk yet.
struct Written {
    file: File,
    work: PathBuf,
    record: Record,
}

impl Job<'_> {
    /// Fills the stage. Returns the manifest, the files taken over, the bundle's bytes and the tensors verified.
    fn run(&self, model: &Source) -> Result<(Manifest, Vec<String>, u64, u64), BundleError> {
        let total: u64 = model.files.iter().map(|f| f.bytes).sum();
        let mut resumed = BTreeMap::new();
        if self.options.resume {
            for file in &model.files {
                if let Some(entry) = self.resumable(file) {
                    resumed.insert(file.name.clone(), entry);
                }
            }
        }
        let taken_over: u64 = model.files.iter().filter(|f| resumed.contains_key(&f.name)).map(|f| f.bytes).sum();
        // A bundle is not larger than its source but for headers; predict in earnest only when that may not fit.
        let worst = total - taken_over;
        if self.stage.free_bytes().is_some_and(|free| free < worst + worst / 16 + (64 << 20)) {
            let (_, predicted) = predict(model, self.planner, self.options)?;
            self.stage.reserve(predicted.saturating_sub(taken_over))?;
        } else {
            self.stage.reserve(worst)?;
        }
        let keep: HashSet<String> = resumed.keys().cloned().collect();
        self.stage.keep_only(&keep)?;

        self.progress.start(total);
        let mut files = thread::scope(|scope| {
            let mut files = Vec::with_capacity(model.files.len());
            // A shard is settled while the next one is encoded: waiting for the disk costs no encoding time.
            let mut settling: Option<thread::ScopedJoinHandle<'_, Result<(), BundleError>>> = None;
            for file in &model.files {
                self.check_cancelled()?;
                self.progress.file(&file.name);
                files.push(match &file.kind {
                    Kind::Weights { header, header_bytes } => FileEntry::Weights(match resumed.remove(&file.name) {
                        Some(entry) => {
                            self.progress.advance(file.bytes);
                            entry
                        }
                        None => {
                            let shard = self.weights(file, header, header_bytes)?;
                            let entry = shard.record.file.clone();
                            settling.take().map_or(Ok(()), join)?;
                            settling = Some(scope.spawn(move || self.settle(shard)));
                            entry
                        }
                    }),
                    Kind::Index(_) => {
                        let contents = self.stage.copy(
                            &file.path,
                            &format!("{}{INDEX_SOURCE_SUFFIX}", file.name),
                            self.options.sha256,
                            |bytes| {
                                self.progress.advance(bytes);
                                self.check_cancelled()
                            },
                        )?;
                        // Its stored form is written when the stored names of all shards are known.
                        FileEntry::Index(IndexFile {
                            name: file.name.clone(),
                            size: contents.bytes,
                            digest: contents.digest,
                            sha256: contents.sha256,
                            stored_size: 0,
                            stored_digest: contents.digest,
                        })
                    }
                    Kind::Copied => {
                        let contents = self.stage.copy(&file.path, &file.name, self.options.sha256, |bytes| {
                            self.progress.advance(bytes);
                            self.check_cancelled()
                        })?;
                        FileEntry::Copied(CopiedFile {
                            name: file.name.clone(),
                            size: contents.bytes,
                            digest: contents.digest,
                            sha256: contents.sha256,
                        })
                    }
                });
            }
            settling.map_or(Ok(()), join)?;
            Ok::<_, BundleError>(files)
        })?;
        let resumed_files: Vec<String> =
            keep.into_iter().collect::<std::collections::BTreeSet<_>>().into_iter().collect();
        self.indexes(model, &mut files)?;
        let tensors = files.iter().filter_map(FileEntry::weights).flat_map(|file| &file.tensors);
        let layers = plan::layers(tensors.map(|t| (t.role, t.layer, t.form)));
        let options = Options {
            profile: self.options.profile,
            scope: self.options.scope,
            code_limit: self.options.code_limit.bits(),
        };
        let mut manifest = Manifest::new(options, files, layers);
        let bytes = manifest.seal();
        self.stage.put(manifest::FILE_NAME, &bytes)?;
        let stored = manifest.files.iter().flat_map(FileEntry::stored).map(|(_, bytes)| bytes).sum::<u64>();
        let verified = self.verify(&manifest)?;
        Ok((manifest, resumed_files, stored + bytes.len() as u64, verified))
    }

    fn check_cancelled(&self) -> Result<(), BundleError> {
        if self.progress.cancelled() { Err(self.stage.interrupted()) } else { Ok(()) }
    }

    /// The options that a shard depends on, as text.
    fn fingerprint(&self) -> String {
        let o = self.options;
        format!(
            "{} {} {}.{} {} {} {} {:?} {}",
            manifest::FORMAT,
            env!("CARGO_PKG_VERSION"),
            VERSION.major,
            VERSION.minor,
            o.profile,
            o.scope,
            o.code_limit.bits(),
            self.planner,
            o.sha256,
        )
    }

    fn record_path(&self, name: &str) -> PathBuf {
        self.stage.records().join(format!("{}.json", Digest::of(name.as_bytes())))
    }

    /// The entry of a shard that an interrupted run finished, if options and source are the same and its bytes are sound.
    fn resumable(&self, file: &SourceFile) -> Option<WeightsFile> {
        let Kind::Weights { header_bytes, .. } = &file.kind else { return None };
        let record: Record = serde_json::from_slice(&fs::read(self.record_path(&file.name)).ok()?).ok()?;
        let same = record.options == self.fingerprint()
            && record.file.name == file.name
            && (record.source_bytes, record.source_modified_ns) == (file.bytes, file.modified_ns)
            && record.file.header_digest == Digest::of(header_bytes);
        if !same {
            return None;
        }
        let shard = Shard::open(&self.stage.tree(), record.file).ok()?;
        shard.source_header().ok()?;
        for index in 0..shard.file.tensors.len() {
            shard.check_sections(index).ok()?;
            shard.release(index..index + 1);
        }
        Some(shard.file)
    }

    /// Compresses one safetensors file; what is written has yet to be settled.
    fn weights(&self, file: &SourceFile, header: &Header, header_bytes: &[u8]) -> Result<Written, BundleError> {
        let map = Mapped::open(&file.path, file.bytes)?;
        let decisions: Vec<Decision> =
            header.tensors.iter().map(|t| self.planner.decide(&t.name, t.dtype, &t.shape)).collect();
        let mut metadata: BTreeMap<String, String> = header.metadata.iter().cloned().collect();
        for (key, value) in [("format", manifest::FORMAT.to_string()), ("unweight_version", VERSION.to_string())] {
            if let Some(theirs) = metadata.insert(key.into(), value) {
                metadata.insert(format!("unweight.source.{key}"), theirs);
            }
        }
        let reserved = header_bound(&metadata, header, &decisions, file.bytes, header_bytes.len() as u64);
        if reserved > HEADER_MAX {
            return Err(BundleError::HeaderTooLarge { file: file.name.clone(), got: reserved, limit: HEADER_MAX });
        }
        let work = self.stage.work().join(format!("shard-{}", Digest::of(file.name.as_bytes())));
        let mut target = Target {
            file: File::create(&work).map_err(self.stage.write_error(&work))?,
            path: &work,
            stage: self.stage,
            at: reserved,
            parts: Vec::new(),
        };

        let (gate, failed) = (Gate::new(self.options.ram_bytes), AtomicBool::new(false));
        let (sender, receiver) = mpsc::channel::<Encoded<'_>>();
        let mut entries = Vec::with_capacity(header.tensors.len());
        let (entries, deferred, sha256) = thread::scope(|scope| {
            let sha256 = self.options.sha256.then(|| scope.spawn(|| files::sha256(&file.path)));
            let (gate, map, target, failed) = (&gate, &map, &mut target, &failed);
            let writer = scope.spawn(move || {
                let (mut result, mut deferred) = (Ok(()), Vec::new());
                // After a failure the rest is taken in all the same, so that nobody waits at the gate for ever.
                for encoded in receiver {
                    if result.is_ok() {
                        result = target.put(&encoded, &mut deferred);
                        failed.store(result.is_err(), Ordering::Relaxed);
                    }
                    let held = encoded.held_bytes;
                    map.release(encoded.info.offset..encoded.info.offset + encoded.info.bytes);
                    drop(encoded);
                    gate.leave(held);
                }
                result.map(|()| deferred)
            });
            let mut encode_all = || {
                for batch in batches(header.tensors.iter().map(|t| t.bytes), self.options.ram_bytes) {
                    self.check_cancelled()?;
                    if failed.load(Ordering::Relaxed) {
                        break;
                    }
                    let infos = &header.tensors[batch.clone()];
                    // The source and its encoded form, which is no larger.
                    let cost = infos.iter().map(|t| 2 * t.bytes).sum::<u64>();
                    gate.enter(cost);
                    let encoded: Vec<Encoded<'_>> = infos
                        .par_iter()
                        .zip(&decisions[batch])
                        .map(|(info, decision)| self.encode(file, map.slice(info.offset, info.bytes), info, decision))
                        .collect::<Result<_, _>>()?;
                    let held: u64 = encoded.iter().map(|e| e.held_bytes).sum();
                    gate.leave(cost.saturating_sub(held));
                    for encoded in encoded {
                        entries.push(encoded.entry.clone());
                        if sender.send(encoded).is_err() {
                            break;
                        }
                    }
                }
                Ok(())
            };
            let encoded = encode_all();
            drop(sender);
            let deferred = join(writer);
            encoded?;
            let sha256 = sha256.map(join).transpose()?;
            Ok::<_, BundleError>((entries, deferred?, sha256))
        })?;
        target.put_deferred(deferred, &map, header)?;
        target.write(header_bytes)?;
        target.parts.push(Part::new(
            SOURCE_HEADER.into(),
            Dtype::U8,
            vec![header_bytes.len()],
            header_bytes.len() as u64,
        ));
        let shard_header = target.finish(&metadata, reserved)?;
        let (shard_size, target) = (target.at, target.file);
        map.check_unchanged()?;

        let header_digest = Digest::of(header_bytes);
        let entry = WeightsFile {
            name: file.name.clone(),
            size: file.bytes,
            digest: WeightsFile::digest_of(header_digest, &entries),
            sha256,
            header_bytes: header_bytes.len() as u64,
            header_digest,
            shard_size,
            shard_header_bytes: shard_header.len() as u64,
            shard_header_digest: Digest::of(&shard_header),
            tensors: entries,
        };
        let record = Record {
            options: self.fingerprint(),
            source_bytes: file.bytes,
            source_modified_ns: file.modified_ns,
            file: entry,
        };
        self.progress.advance(header_bytes.len() as u64);
        Ok(Written { file: target, work, record })
    }

    /// Waits until a shard is on the disk, gives it its name, and notes that for a later run.
    fn settle(&self, shard: Written) -> Result<(), BundleError> {
        shard.file.sync_all().map_err(self.stage.write_error(&shard.work))?;
        self.stage.accept(&shard.work, &shard.record.file.name)?;
        let path = self.record_path(&shard.record.file.name);
        let json = serde_json::to_vec(&shard.record).expect("a record is strings, numbers and lists");
        files::write_durably(&path, &json).map_err(self.stage.write_error(&path))
    }

    fn encode<'a>(
        &self,
        file: &SourceFile,
        bytes: &'a [u8],
        info: &'a TensorInfo,
        decision: &Decision,
    ) -> Result<Encoded<'a>, BundleError> {
        self.progress.tensor(&info.name);
        let (digest, choice, stored) = encode_tensor(bytes, decision.choice.clone(), self.options, self.encoder)
            .map_err(|source| BundleError::Encoder { file: file.name.clone(), tensor: info.name.clone(), source })?;
        let coded: Vec<(Section, &[u8])> = match &stored {
            Stored::Raw(_) => Vec::new(),
            Stored::Coded(tensor) => tensor.sections().collect(),
        };
        let sections: Vec<SectionEntry> = coded
            .into_par_iter()
            .map(|(name, bytes)| SectionEntry { name, bytes: bytes.len() as u64, digest: Digest::of(bytes) })
            .collect();
        let held_bytes = if sections.is_empty() { info.bytes } else { sections.iter().map(|s| s.bytes).sum::<u64>() };
        let entry = TensorEntry {
            name: info.name.clone(),
            dtype: info.dtype,
            shape: info.shape.clone(),
            role: decision.role,
            layer: decision.layer,
            form: choice.form(),
            reason: choice.reason(),
            rows: choice.grid().map(|grid| grid.rows()),
            cols: choice.grid().map(|grid| grid.cols()),
            digest,
            sections,
        };
        self.progress.advance(info.bytes);
        Ok(Encoded { info, entry, stored, held_bytes })
    }

    /// Writes the indexes for the stored names.
    fn indexes(&self, model: &Source, files: &mut [FileEntry]) -> Result<(), BundleError> {
        let shards: BTreeMap<String, WeightsFile> =
            files.iter().filter_map(FileEntry::weights).map(|file| (file.name.clone(), file.clone())).collect();
        for (file, entry) in model.files.iter().zip(files) {
            if let (Kind::Index(index), FileEntry::Index(entry)) = (&file.kind, entry) {
                let bytes = stored_index(index, &file.name, &shards);
                self.stage.put(&file.name, &bytes)?;
                (entry.stored_size, entry.stored_digest) = (bytes.len() as u64, Digest::of(&bytes));
            }
        }
        Ok(())
    }

    /// Decodes again what `VerifyAfter` asks for. Returns how many tensors that were.
    fn verify(&self, manifest: &Manifest) -> Result<u64, BundleError> {
        if self.options.verify == VerifyAfter::None {
            return Ok(0);
        }
        let mut verified = 0;
        for file in manifest.files.iter().filter_map(FileEntry::weights) {
            let shard = Shard::open(&self.stage.tree(), file.clone())?;
            shard.source_header()?;
            let all = self.options.verify == VerifyAfter::Full;
            let sample = sampled(file);
            for index in (0..file.tensors.len()).filter(|index| all || sample.contains(index)) {
                self.check_cancelled()?;
                let mut out = crate::bits::zeroed(shard.original_bytes(index) as usize);
                shard.decode(index, &mut out)?;
                shard.release(index..index + 1);
                verified += 1;
            }
        }
        Ok(verified)
    }
}

fn join<T>(handle: thread::ScopedJoinHandle<'_, T>) -> T {
    handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// First and last, the largest of each form, and every sixteenth.
fn sampled(file: &WeightsFile) -> HashSet<usize> {
    let mut chosen: HashSet<usize> = (0..file.tensors.len()).step_by(16).collect();
    chosen.extend(file.tensors.len().checked_sub(1));
    for form in FORMS {
        let of_this = file.tensors.iter().enumerate().filter(|(_, t)| t.form == form.id());
        chosen.extend(of_this.max_by_key(|(_, t)| t.original_bytes()).map(|(index, _)| index));
    }
    chosen
}

/// A tensor as it will be stored.
enum Stored<'a> {
    Raw(&'a [u8]),
    Coded(StoredTensor<Vec<u8>>),
}

/// A tensor on its way to the writer.
struct Encoded<'a> {
    info: &'a TensorInfo,
    entry: TensorEntry,
    stored: Stored<'a>,
    held_bytes: u64,
}

/// Digest and stored form of a tensor: the form chosen, what takes its place if it does not fit, or raw if it would not shrink.
fn encode_tensor<'a>(
    bytes: &'a [u8],
    mut choice: Choice,
    options: &CompressOptions,
    encoder: &dyn Encoder,
) -> Result<(Digest, Choice, Stored<'a>), EncoderError> {
    while let Some(grid) = choice.grid() {
        let matrix = Matrix::new(bytes, grid.rows(), grid.cols())?;
        match encoder.encode(matrix, choice.form(), options.code_limit) {
            Ok((digest, tensor)) if tensor.stored_bytes() < bytes.len() as u64 => {
                return Ok((digest, choice, Stored::Coded(tensor)));
            }
            Ok((digest, _)) => return Ok((digest, choice.not_smaller(), Stored::Raw(bytes))),
            Err(EncoderError::Unfit(why)) => choice = choice.unfit(why),
            Err(error) => return Err(error),
        }
    }
    Ok((Digest::of(bytes), choice, Stored::Raw(bytes)))
}

/// A part of a shard as its header names it.
struct Part {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: u64,
}

impl Part {
    fn new(name: String, dtype: Dtype, shape: Vec<usize>, bytes: u64) -> Self {
        Self { name, dtype, shape, bytes }
    }
}

/// A part that waits for the end of the shard because it would misalign what follows.
struct Deferred {
    part: Part,
    contents: Contents,
}

/// Where the bytes of a part come from that is written later.
enum Contents {
    /// From the source: a raw tensor.
    Raw { offset: u64 },
    /// From the source: `bytes` bytes whose sign_mantissa is meant. Half of a large tensor would be much to hold.
    SignMantissa { offset: u64, bytes: u64 },
    /// Small sections of other kinds, held.
    Held(Vec<u8>),
}

/// The shard being written.
struct Target<'a> {
    file: File,
    path: &'a Path,
    stage: &'a Stage,
    /// Where the next byte goes.
    at: u64,
    parts: Vec<Part>,
}

impl Target<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<(), BundleError> {
        self.file.write_all_at(bytes, self.at).map_err(self.stage.write_error(self.path))?;
        self.at += bytes.len() as u64;
        self.stage.wrote(bytes.len() as u64);
        Ok(())
    }

    fn put(&mut self, encoded: &Encoded<'_>, deferred: &mut Vec<Deferred>) -> Result<(), BundleError> {
        let info = encoded.info;
        let mut place = |target: &mut Self, part: Part, bytes: &[u8], contents: &dyn Fn() -> Contents| {
            if !part.bytes.is_multiple_of(ALIGN) {
                deferred.push(Deferred { part, contents: contents() });
                return Ok(());
            }
            target.parts.push(part);
            target.write(bytes)
        };
        let (offset, source_bytes) = (info.offset, info.bytes);
        let (tensor, grid) = match (&encoded.stored, encoded.entry.grid()) {
            (Stored::Coded(tensor), Some(grid)) => (tensor, grid),
            (Stored::Raw(bytes), _) => {
                let part = Part::new(info.name.clone(), info.dtype, info.shape.clone(), info.bytes);
                return place(self, part, bytes, &|| Contents::Raw { offset });
            }
            (Stored::Coded(_), None) => return Ok(()),
        };
        for (section, bytes) in tensor.sections() {
            let shape = section.shape(grid, bytes.len());
            let part = Part::new(section_name(&info.name, section), section.dtype(), shape, bytes.len() as u64);
            place(self, part, bytes, &|| match section {
                Section::SIGN_MANTISSA => Contents::SignMantissa { offset, bytes: source_bytes },
                _ => Contents::Held(bytes.to_vec()),
            })?;
        }
        Ok(())
    }

    /// Writes what waited, largest elements first, so that each keeps its own alignment.
    fn put_deferred(&mut self, mut deferred: Vec<Deferred>, map: &Mapped, header: &Header) -> Result<(), BundleError> {
        const CHUNK: usize = 4 << 20;
        deferred.sort_by_key(|d| std::cmp::Reverse(d.part.dtype.bits()));
        for item in deferred {
            let (offset, bytes, split) = match item.contents {
                Contents::Held(bytes) => {
                    self.write(&bytes)?;
                    self.parts.push(item.part);
                    continue;
                }
                Contents::Raw { offset } => (offset, item.part.bytes, false),
                Contents::SignMantissa { offset, bytes } => (offset, bytes, true),
            };
            debug_assert!(offset >= header.data_offset);
            for chunk in map.slice(offset, bytes).chunks(CHUNK) {
                if split {
                    let split = |e: &[u8]| bf16::sign_mantissa(u16::from_le_bytes([e[0], e[1]]));
                    self.write(&chunk.chunks_exact(2).map(split).collect::<Vec<u8>>())?;
                } else {
                    self.write(chunk)?;
                }
            }
            map.release(offset..offset + bytes);
            self.parts.push(item.part);
        }
        Ok(())
    }

    /// Writes the header before the data.
    fn finish(&mut self, metadata: &BTreeMap<String, String>, reserved: u64) -> Result<Vec<u8>, BundleError> {
        let mut begin = 0;
        let entries = self.parts.iter().map(|part| {
            let offsets = [begin, begin + part.bytes];
            begin = offsets[1];
            (part.name.as_str(), part.dtype, part.shape.as_slice(), offsets)
        });
        let header = header_to_bytes(metadata, entries, reserved);
        assert_eq!(header.len() as u64, reserved, "the reserved header bounds the real one");
        self.file.write_all_at(&header, 0).map_err(self.stage.write_error(self.path))?;
        Ok(header)
    }
}

/// Bytes that the shard's header can need at most: every coded tensor with all its sections, every number as long as it can be.
fn header_bound(
    metadata: &BTreeMap<String, String>,
    header: &Header,
    decisions: &[Decision],
    file_bytes: u64,
    header_bytes: u64,
) -> u64 {
    // A coded tensor is smaller than its source and the header's copy as large as the original, so no offset is above this.
    let most = file_bytes;
    let mut parts = Vec::new();
    for (info, decision) in header.tensors.iter().zip(decisions) {
        let raw = || (info.name.clone(), info.dtype, info.shape.clone());
        let Some(grid) = decision.choice.grid() else {
            parts.push(raw());
            continue;
        };
        // Of the form and of what may take its place, whichever a header names at greater length.
        let named = |form: FormId| -> Vec<(String, Dtype, Vec<usize>)> {
            let sections = form.form().sections().iter().map(|&section| {
                let bytes = section.fixed_bytes(grid).unwrap_or(info.bytes as usize);
                (section_name(&info.name, section), section.dtype(), section.shape(grid, bytes))
            });
            sections.collect()
        };
        let chain = std::iter::successors(Some(decision.choice.form()), |form| Some(form.form().fallback()));
        let coded = chain.take_while(|form| *form != FormId::RAW).map(named);
        parts.extend(coded.max_by_key(|parts| header_bytes_of(&BTreeMap::new(), parts, most)).unwrap_or_default());
        // Raw takes the place of every form, and a shape of many dimensions may be longer than the names of all sections.
        if info.shape.len() > 8 {
            parts.push(raw());
        }
    }
    parts.push((SOURCE_HEADER.into(), Dtype::U8, vec![header_bytes as usize]));
    header_bytes_of(metadata, &parts, most)
}

/// Bytes of a header with these parts, all at offset `most`.
fn header_bytes_of(metadata: &BTreeMap<String, String>, parts: &[(String, Dtype, Vec<usize>)], most: u64) -> u64 {
    let entries = parts.iter().map(|(name, dtype, shape)| (name.as_str(), *dtype, shape.as_slice(), [most, most]));
    header_to_bytes(metadata, entries, 0).len() as u64
}

/// The index of the stored names: the source's metadata with the stored size.
fn stored_index(index: &Index, name: &str, shards: &BTreeMap<String, WeightsFile>) -> Vec<u8> {
    let dir = name.rfind('/').map_or("", |slash| &name[..=slash]);
    let listed: std::collections::BTreeSet<&str> = index.weight_map.values().map(String::as_str).collect();
    let (mut weight_map, mut total) = (BTreeMap::new(), 0u64);
    for shard in listed {
        // Every shard of an index was checked to be there.
        let Some(file) = shards.get(&format!("{dir}{shard}")) else { continue };
        total += file.shard_size - file.shard_header_bytes;
        weight_map.extend(file.tensors.iter().flat_map(stored_names).map(|name| (name, shard)));
    }
    let mut metadata = index.metadata.clone().unwrap_or_else(|| serde_json::json!({}));
    if let Some(metadata) = metadata.as_object_mut() {
        metadata.insert("total_size".into(), total.into());
    }
    let value = serde_json::json!({ "metadata": metadata, "weight_map": weight_map });
    let mut bytes = serde_json::to_vec_pretty(&value).expect("an index is strings, numbers and maps");
    bytes.push(b'\n');
    bytes
}

fn stored_names(tensor: &TensorEntry) -> Vec<String> {
    match tensor.form {
        FormId::RAW => vec![tensor.name.clone()],
        _ => tensor.sections.iter().map(|s| section_name(&tensor.name, s.name)).collect(),
    }
}
