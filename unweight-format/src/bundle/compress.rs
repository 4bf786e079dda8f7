//! A model to a bundle, tensor by tensor.
//!
//! ```text
//! source, read --batches--> survey + encode (rayon) --pieces, bounded--> writer: work/shard --fsync, rename--> tree/
//! ```
//! Where the bytes of a shard go: first everything that keeps the next part on a multiple of 16 bytes, in source order; then what
//! does not (raw tensors of odd sizes, and sign_mantissa sections of them), largest element type first; last the
//! source's header. So every section that a kernel or a stock reader wants aligned is, without padding.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashSet},
    fs::File,
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
use sha2::{Digest as _, Sha256};

use super::{
    BundleError, CompareReport, CompareRow, CompressOptions, CompressReport, CpuEncoder, Encoder, EncoderError,
    PlanReport, Progress, Signer, TensorReport, VerifyAfter,
    blocks::Blocks,
    config,
    files::{self, Contents, Input},
    part::{self, Part as ModelPart, PartFile},
    pipeline::{Gate, Work, batches_from, join, on_threads, spawn},
    read::Shard,
    report::{by_role, coded, peak_rss_bytes, ratio, saved, totals},
    source::{Index, Kind, Source, SourceFile},
    stage::{Replaceable, Stage},
};
use crate::{
    CodeLimit, Digest, Float, FloatMatrix, FormId, Section, StoredTensor, bf16,
    bundle::manifest::{
        self, ChangedFile, CopiedFile, FileEntry, Manifest, Options, SOURCE_HEADER, SOURCE_SUFFIX, SectionEntry,
        TensorEntry, VERSION, WeightsFile, section_name,
    },
    failpoint::failpoint,
    form::{FORMS, Sample},
    plan::{self, Choice, Decision, Planner},
    safetensors::{self, Dtype, HEADER_MAX, Header, TensorInfo, header_to_bytes},
};

/// Every section starts on a multiple of this many bytes, unless what is before it cannot be moved.
const ALIGN: u64 = 16;
/// A tensor is sampled for a prediction in this many pieces of this many bytes.
const SAMPLE_PIECES: u64 = 8;
const SAMPLE_BYTES: u64 = 128 << 10;

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
    // A signature of digests that can be forged would prove nothing.
    let options = &options.clone().sha256(options.sha256 || options.sign.is_some());
    let planner = Planner::new(options)?;
    let replaceable = options.force.then_some(Replaceable::Bundle);
    let inputs = options.selection.inputs(source);
    Stage::check(&inputs, output, replaceable.as_ref())?;
    let model = Source::open(source, &options.selection)?;
    planner.check_rules(tensor_names(&model))?;
    let own = options.part.map(|part| part.files(&model));
    let chosen = |file: &&SourceFile| own.as_ref().is_none_or(|own| own.contains(&file.name));
    let files: Vec<&SourceFile> = model.files.iter().filter(chosen).collect();
    let has_copies = options.part.is_none_or(ModelPart::has_copies);
    if options.part.is_some()
        && let Some(taken) = model.files.iter().find(|file| file.name == part::FILE_NAME)
    {
        return Err(BundleError::ReservedFile { path: taken.path.clone() });
    }
    let stage = Stage::open(&inputs, output, replaceable, options.resume)?;
    let job = Job { options, planner: &planner, stage: &stage, encoder, progress };
    let result = on_threads(options.threads, || job.run(&model, &files));
    let Made { files: made, digest, resumed_files, resumed_tensors, stored_bytes, verified_tensors } = result?;
    stage.finish()?;
    let tensors = tensor_reports(&made);
    let original_bytes = files.iter().map(|f| f.bytes).sum();
    Ok(CompressReport {
        part: options.part.map(|part| part.to_string()),
        forms: totals(&tensors),
        coded_tensors: coded(&tensors),
        saved_bytes: saved(original_bytes, stored_bytes),
        tensors,
        files: files.len() as u64,
        large_copies: if has_copies { model.large_copies() } else { Vec::new() },
        unmarked_configs: if has_copies { model.unmarked_configs.clone() } else { Vec::new() },
        resumed_files,
        resumed_tensors,
        original_bytes,
        stored_bytes,
        ratio: ratio(stored_bytes, original_bytes),
        verified_tensors,
        seconds: started.elapsed().as_secs_f64(),
        peak_rss_bytes: peak_rss_bytes(),
        manifest_digest: digest,
    })
}

/// Predicts what [`compress`] would do, from the headers and samples of the weights.
///
/// # Errors
/// The source is not a sound model, or the plan file cannot be followed.
pub fn plan(source: &Path, options: &CompressOptions) -> Result<PlanReport, BundleError> {
    let started = Instant::now();
    let planner = Planner::new(options)?;
    let model = Source::open(source, &options.selection)?;
    planner.check_rules(tensor_names(&model))?;
    let files: Vec<&SourceFile> = model.files.iter().collect();
    let (tensors, stored_bytes) = on_threads(options.threads, || predict_one(&files, &planner, options))?;
    let original_bytes = model.files.iter().map(|f| f.bytes).sum();
    Ok(PlanReport {
        forms: totals(&tensors),
        coded_tensors: coded(&tensors),
        saved_bytes: saved(original_bytes, stored_bytes),
        tensors,
        files: model.files.len() as u64,
        large_copies: model.large_copies(),
        unmarked_configs: model.unmarked_configs,
        original_bytes,
        stored_bytes,
        ratio: ratio(stored_bytes, original_bytes),
        seconds: started.elapsed().as_secs_f64(),
    })
}

/// What [`plan()`] predicts, summed by role, for several options at once: the samples are read once. The files selected and the threads
/// are those of the first.
///
/// # Errors
/// As [`plan()`].
pub fn compare(source: &Path, options: &[CompressOptions]) -> Result<CompareReport, BundleError> {
    let started = Instant::now();
    let planners = options.iter().map(Planner::new).collect::<Result<Vec<_>, _>>()?;
    let (selection, threads) =
        options.first().map_or_else(Default::default, |first| (first.selection.clone(), first.threads));
    let model = Source::open(source, &selection)?;
    planners.iter().try_for_each(|planner| planner.check_rules(tensor_names(&model)))?;
    let ways: Vec<_> = planners.iter().zip(options.iter().map(|options| options.code_limit)).collect();
    let files: Vec<&SourceFile> = model.files.iter().collect();
    let predicted = on_threads(threads, || predict(&files, &ways))?;
    let original_bytes = model.files.iter().map(|f| f.bytes).sum();
    let rows = options.iter().zip(predicted).map(|(options, (tensors, stored_bytes))| CompareRow {
        profile: options.profile,
        scope: options.scope,
        code_limit: tensors.iter().any(is_limited).then(|| options.code_limit.bits()),
        roles: by_role(&tensors),
        stored_bytes,
        saved_bytes: saved(original_bytes, stored_bytes),
        ratio: ratio(stored_bytes, original_bytes),
    });
    Ok(CompareReport {
        rows: rows.collect(),
        files: model.files.len() as u64,
        original_bytes,
        seconds: started.elapsed().as_secs_f64(),
    })
}

/// Whether a code limit says something about a tensor.
fn is_limited(tensor: &TensorReport) -> bool {
    tensor.form.form().sections().contains(&Section::CODE_LENGTHS)
}

fn tensor_names(model: &Source) -> impl Iterator<Item = &str> + Clone {
    model.tensors().map(|t| t.name.as_str())
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
pub(crate) fn tensor_reports(files: &[FileEntry]) -> Vec<TensorReport> {
    let files = files.iter().filter_map(FileEntry::weights);
    files
        .flat_map(|file| {
            file.tensors.iter().map(|t| {
                let elements = safetensors::elements(&t.shape);
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

/// Reports of all tensors, and the bytes of all files.
type Predicted = (Vec<TensorReport>, u64);

fn predict_one(files: &[&SourceFile], planner: &Planner, options: &CompressOptions) -> Result<Predicted, BundleError> {
    Ok(predict(files, &[(planner, options.code_limit)])?.pop().unwrap_or_default())
}

/// For each way to encode files of a model.
fn predict(files: &[&SourceFile], ways: &[(&Planner, CodeLimit)]) -> Result<Vec<Predicted>, BundleError> {
    let mut predicted = vec![Predicted::default(); ways.len()];
    for file in files {
        let Kind::Weights { header, .. } = &file.kind else {
            let bytes = match &file.kind {
                Kind::Index(_) => 4 * file.bytes,
                Kind::Config(text) => file.bytes + config::with_keys(text, Digest::leaf(&[])).len() as u64,
                _ => file.bytes,
            };
            predicted.iter_mut().for_each(|(_, stored_bytes)| *stored_bytes += bytes);
            continue;
        };
        let input = Input::open_same(&file.path, &file.stamp)?;
        let tensors = header.tensors.par_iter().map(|info| predict_tensor(&file.name, info, &input, ways));
        for reports in tensors.collect::<Result<Vec<_>, BundleError>>()? {
            for ((tensors, stored_bytes), report) in predicted.iter_mut().zip(reports) {
                // Shard header and manifest name every section once each, about 1.5 KB a tensor with its digests.
                *stored_bytes += report.stored_bytes + if report.form == FormId::RAW { 0 } else { 1500 };
                tensors.push(report);
            }
        }
        predicted.iter_mut().for_each(|(_, stored_bytes)| *stored_bytes += 2 * header.data_offset);
    }
    Ok(predicted)
}

fn predict_tensor(
    file: &str,
    info: &TensorInfo,
    input: &Input,
    ways: &[(&Planner, CodeLimit)],
) -> Result<Vec<TensorReport>, BundleError> {
    // Read when the first way asks for them; one sample for each limit.
    let mut read: Option<Vec<Vec<u8>>> = None;
    let mut samples: Vec<(CodeLimit, Sample)> = Vec::new();
    let mut reports = Vec::with_capacity(ways.len());
    for &(planner, limit) in ways {
        let decision = planner.decide(&info.name, info.dtype, &info.shape);
        let Some(float) = Float::of(info.dtype).filter(|_| decision.choice.grid().is_some()) else {
            reports.push(report(file, info, &decision, &decision.choice, info.bytes));
            continue;
        };
        if !samples.iter().any(|(of, _)| *of == limit) {
            if read.is_none() {
                let pieces = pieces(info.bytes).into_iter().map(|(at, bytes)| input.read(info.offset + at, bytes));
                read = Some(pieces.collect::<Result<_, _>>()?);
            }
            let pieces: Vec<&[u8]> = read.iter().flatten().map(Vec::as_slice).collect();
            samples.push((limit, Sample::of_float(float, &pieces, limit)));
        }
        let sample = samples.iter().find(|(of, _)| *of == limit).map(|(_, sample)| sample);
        let predicted = sample.map(|sample| plan::predict(decision.choice.clone(), sample));
        reports.push(match predicted {
            Some((choice, Some(bytes))) if is_worth_it(choice.form(), bytes, info.bytes) => {
                report(file, info, &decision, &choice, bytes)
            }
            Some((choice, Some(_))) => report(file, info, &decision, &choice.not_smaller(), info.bytes),
            Some((choice, None)) => report(file, info, &decision, &choice, info.bytes),
            None => report(file, info, &decision, &decision.choice, info.bytes),
        });
    }
    Ok(reports)
}

/// Whether so many bytes are few enough for a tensor that has `original` of them.
fn is_worth_it(form: FormId, bytes: u64, original: u64) -> bool {
    bytes.saturating_add(form.form().least_saved()) <= original
}

/// Pieces (offset, bytes) spread evenly over a tensor, each on a multiple of 64 elements; all of a small one.
fn pieces(bytes: u64) -> Vec<(u64, u64)> {
    if bytes <= SAMPLE_PIECES * SAMPLE_BYTES {
        return vec![(0, bytes)];
    }
    let step = (bytes - SAMPLE_BYTES) / (SAMPLE_PIECES - 1) / 128 * 128;
    (0..SAMPLE_PIECES).map(|i| (i * step, SAMPLE_BYTES)).collect()
}

struct Job<'a> {
    options: &'a CompressOptions,
    planner: &'a Planner,
    stage: &'a Stage,
    encoder: &'a dyn Encoder,
    progress: &'a dyn Progress,
}

/// What is kept of a finished shard until the bundle is complete. It names no time and no path of the source: a later run compares the source's
/// bytes with the digests.
#[derive(Serialize, Deserialize)]
pub(crate) struct Record {
    /// Everything that decides the shard's bytes beside the source.
    options: String,
    file: WeightsFile,
}

impl Record {
    /// The digest of the JSON text, then that text.
    fn to_bytes(&self) -> Vec<u8> {
        let json = serde_json::to_vec(self).expect("a record is strings, numbers and lists");
        [Digest::of(&json).to_string().as_bytes(), b"\n", &json].concat()
    }

    /// `None` for anything that [`Record::to_bytes`] did not write, or a damaged one: the shard is then made again.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let (digest, json) = bytes.split_at_checked(33)?;
        let (digest, end) = digest.split_at(32);
        if end != b"\n" || Digest::of(json).to_string().as_bytes() != digest {
            return None;
        }
        let record: Self = serde_json::from_slice(json).ok()?;
        manifest::check_weights(&record.file).ok()?;
        Some(record)
    }
}

/// What a journal begins with: it is of this very source file, as far as its header tells, and of these options.
#[derive(PartialEq, Serialize, Deserialize)]
struct JournalHead {
    options: String,
    name: String,
    size: u64,
    header_digest: Digest,
}

/// A line of a journal: the digest of the JSON text, then that text.
fn journal_line(value: &impl Serialize) -> Vec<u8> {
    let json = serde_json::to_vec(value).expect("a line is strings, numbers and lists");
    [Digest::of(&json).to_string().as_bytes(), b" ", &json, b"\n"].concat()
}

/// The lines of a journal up to the first that is not whole.
fn journal_lines(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    bytes.split(|byte| *byte == b'\n').map_while(|line| {
        let (digest, json) = line.split_at_checked(33)?;
        (digest[32] == b' ' && Digest::of(json).to_string().as_bytes() == &digest[..32]).then_some(json)
    })
}

/// The beginning of a shard that an interrupted run wrote, as far as it is sound and of this source.
struct Kept {
    entries: Vec<TensorEntry>,
    /// Of the source, up to here.
    sha: Option<Sha256>,
    /// Bytes of the tensors in the source.
    source_bytes: u64,
}

/// What a shard will look like, as far as its source's header tells.
struct Layout {
    decisions: Vec<Decision>,
    metadata: BTreeMap<String, String>,
    /// Bytes for the header.
    reserved: u64,
}

/// What [`Job::run`] has made.
struct Made {
    files: Vec<FileEntry>,
    /// Of the manifest, or of the part.
    digest: Digest,
    resumed_files: Vec<String>,
    resumed_tensors: u64,
    stored_bytes: u64,
    verified_tensors: u64,
}

/// A shard that is written but may not be on the disk yet.
struct Written {
    file: File,
    work: PathBuf,
    journal: PathBuf,
    record: Record,
}

impl Job<'_> {
    /// Fills the stage with what becomes of these files of the model.
    fn run(&self, model: &Source, chosen: &[&SourceFile]) -> Result<Made, BundleError> {
        let total: u64 = chosen.iter().map(|f| f.bytes).sum();
        let (mut resumed, mut begun) = (BTreeMap::new(), BTreeMap::new());
        if self.options.resume {
            // Reading what may be taken over is work of its own.
            let left = |file: &&SourceFile| {
                let left = [self.stage.record(&file.name), self.stage.journal(&file.name)];
                matches!(file.kind, Kind::Weights { .. }) && left.iter().any(|path| path.symlink_metadata().is_ok())
            };
            let read: u64 = chosen.iter().copied().filter(left).map(|file| file.bytes).sum();
            if read > 0 {
                self.progress.start(read);
            }
            for file in chosen {
                self.check_cancelled()?;
                if let Some(entry) = self.resumable(file)? {
                    resumed.insert(file.name.clone(), entry);
                } else if let Some(kept) = self.kept(file)? {
                    begun.insert(file.name.clone(), kept);
                }
            }
        }
        let finished: u64 = chosen.iter().filter(|f| resumed.contains_key(&f.name)).map(|f| f.bytes).sum();
        let taken_over = finished + begun.values().map(|kept| kept.source_bytes).sum::<u64>();
        let resumed_tensors = begun.values().map(|kept| kept.entries.len() as u64).sum();
        // A bundle is not larger than its source but for headers; predict in earnest only when that may not fit.
        let worst = total - taken_over;
        if self.stage.free_bytes().is_some_and(|free| free < worst + worst / 16 + (64 << 20)) {
            let (_, predicted) = predict_one(chosen, self.planner, self.options)?;
            self.stage.reserve(predicted.saturating_sub(taken_over))?;
        } else {
            self.stage.reserve(worst)?;
        }
        let keep: HashSet<String> = resumed.keys().cloned().collect();
        self.stage.keep_only(&keep, &begun.keys().cloned().collect())?;

        // What is decoded again is work, too.
        let verified = if self.options.verify == VerifyAfter::None { 0 } else { tensor_bytes(chosen) };
        self.progress.start(total.saturating_add(verified));
        let files = thread::scope(|scope| {
            let mut files = Vec::with_capacity(chosen.len());
            // A shard is settled while the next one is encoded: waiting for the disk costs no encoding time.
            let mut settling: Option<thread::ScopedJoinHandle<'_, Result<(), BundleError>>> = None;
            for file in chosen {
                self.check_cancelled()?;
                self.progress.file(&file.name);
                files.push(match &file.kind {
                    Kind::Weights { header, header_bytes } => FileEntry::Weights(match resumed.remove(&file.name) {
                        Some(entry) => {
                            self.progress.advance(file.bytes);
                            entry
                        }
                        None => {
                            let shard = self.weights(file, header, header_bytes, begun.remove(&file.name))?;
                            let entry = shard.record.file.clone();
                            settling.take().map_or(Ok(()), join)?;
                            settling = Some(spawn(scope, move || self.settle(shard))?);
                            entry
                        }
                    }),
                    Kind::Index(_) => FileEntry::Index(self.copy_changed(file)?),
                    Kind::Config(_) => FileEntry::Config(self.copy_changed(file)?),
                    Kind::Copied => {
                        let contents = self.copy(file, &file.name)?;
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
        let options = Options {
            profile: self.options.profile,
            scope: self.options.scope,
            code_limit: self.options.code_limit.bits(),
        };
        let finish = Finish {
            stage: self.stage,
            verify: self.options.verify,
            ram_bytes: self.options.ram_bytes,
            sign: self.options.sign.as_ref(),
            progress: self.progress,
        };
        let Some(part) = self.options.part else {
            let kinds = chosen.iter().map(|file| Some(&file.kind));
            let Sealed { manifest, stored_bytes, verified_tensors } = seal(&finish, kinds, files, options)?;
            let (files, digest) = (manifest.files, manifest.manifest_digest);
            return Ok(Made { files, digest, resumed_files, resumed_tensors, stored_bytes, verified_tensors });
        };
        let part = PartFile::new(part, self.fingerprint(), options, model, files)?;
        let (digest, bytes) = part.to_bytes();
        manifest::check_bytes(bytes.len() as u64)?;
        self.stage.put(part::FILE_NAME, &bytes)?;
        let stored_bytes = bytes.len() as u64 + part.stored().iter().map(|(_, bytes)| bytes).sum::<u64>();
        let verified_tensors = finish.verify(&part.files)?;
        Ok(Made { files: part.files, digest, resumed_files, resumed_tensors, stored_bytes, verified_tensors })
    }

    fn check_cancelled(&self) -> Result<(), BundleError> {
        if self.progress.cancelled() { Err(self.stage.interrupted()) } else { Ok(()) }
    }

    /// Copies a file that is no weights.
    fn copy(&self, file: &SourceFile, name: &str) -> Result<Contents, BundleError> {
        let advance = |bytes| {
            self.progress.advance(bytes);
            self.check_cancelled()
        };
        self.stage.copy(&Input::open_same(&file.path, &file.stamp)?, name, self.options.sha256, advance, |_| Ok(()))
    }

    /// Keeps a file as it is beside its stored form, which is written when all shards are known.
    fn copy_changed(&self, file: &SourceFile) -> Result<ChangedFile, BundleError> {
        let contents = self.copy(file, &format!("{}{SOURCE_SUFFIX}", file.name))?;
        if let Kind::Config(text) = &file.kind
            && Digest::of(text) != contents.digest
        {
            return Err(BundleError::SourceChanged { path: file.path.clone(), change: "it was written to" });
        }
        Ok(ChangedFile {
            name: file.name.clone(),
            size: contents.bytes,
            digest: contents.digest,
            sha256: contents.sha256,
            stored_size: 0,
            stored_digest: contents.digest,
        })
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
            // The same plan may lie elsewhere.
            self.planner.without_path(),
            o.sha256,
        )
    }

    /// The entry of a shard that an interrupted run finished, if it is of this very source and these options, and its bytes are sound.
    ///
    /// The source is read for that, which takes a fraction of encoding it: name, size and time of a file do not tell one model from another.
    fn resumable(&self, file: &SourceFile) -> Result<Option<WeightsFile>, BundleError> {
        let Kind::Weights { header, header_bytes } = &file.kind else { return Ok(None) };
        let Ok(bytes) = files::read_small(&self.stage.record(&file.name), manifest::BYTES_MAX) else { return Ok(None) };
        let Some(Record { options, file: entry }) = Record::parse(&bytes) else { return Ok(None) };
        let planned = |(t, info): (&TensorEntry, &TensorInfo)| {
            is_planned(t, info, &self.planner.decide(&info.name, info.dtype, &info.shape))
        };
        let same = options == self.fingerprint()
            && (&entry.name, entry.size, entry.sha256.is_some()) == (&file.name, file.bytes, self.options.sha256)
            && entry.header_digest == Digest::of(header_bytes)
            && entry.tensors.len() == header.tensors.len()
            && entry.tensors.iter().zip(&header.tensors).all(planned);
        if !same {
            return Ok(None);
        }
        let input = Input::open_same(&file.path, &file.stamp)?;
        let mut sha = entry.sha256.is_some().then(Sha256::new);
        if let Some(sha) = &mut sha {
            sha.update(header_bytes);
        }
        self.progress.advance(header_bytes.len() as u64);
        for (t, info) in entry.tensors.iter().zip(&header.tensors) {
            let digest = input.stream(info.offset, info.bytes, |piece| {
                if let Some(sha) = &mut sha {
                    sha.update(piece);
                }
                self.progress.advance(piece.len() as u64);
                self.check_cancelled()
            })?;
            if digest != t.digest {
                return Ok(None);
            }
        }
        input.check_unchanged()?;
        if sha.map(files::hex) != entry.sha256 {
            return Ok(None);
        }
        // Last, the shard itself: a section that was damaged since makes it worthless.
        let Ok(shard) = Shard::open(&self.stage.tree(), entry) else { return Ok(None) };
        let sound = shard.source_header().is_ok()
            && (0..shard.file.tensors.len()).into_par_iter().all(|index| shard.is_sound(index));
        Ok(sound.then_some(shard.file))
    }

    fn journal_head(&self, file: &SourceFile, header_bytes: &[u8]) -> JournalHead {
        JournalHead {
            options: self.fingerprint(),
            name: file.name.clone(),
            size: file.bytes,
            header_digest: Digest::of(header_bytes),
        }
    }

    /// The beginning of a shard that an interrupted run wrote: up to the first tensor whose source or whose stored parts have not the
    /// digests of the journal.
    fn kept(&self, file: &SourceFile) -> Result<Option<Kept>, BundleError> {
        let Kind::Weights { header, header_bytes } = &file.kind else { return Ok(None) };
        let Ok(journal) = files::read_small(&self.stage.journal(&file.name), manifest::BYTES_MAX) else {
            return Ok(None);
        };
        let Ok(written) = Input::open(&self.stage.growing(&file.name)) else { return Ok(None) };
        let mut lines = journal_lines(&journal);
        let head = lines.next().and_then(|json| serde_json::from_slice::<JournalHead>(json).ok());
        if head.is_none_or(|head| head != self.journal_head(file, header_bytes)) {
            return Ok(None);
        }
        let layout = self.layout(file, header, header_bytes)?;
        let input = Input::open_same(&file.path, &file.stamp)?;
        let mut sha = self.options.sha256.then(Sha256::new);
        if let Some(sha) = &mut sha {
            sha.update(header_bytes);
        }
        self.progress.advance(header_bytes.len() as u64);
        let mut kept = Kept { entries: Vec::new(), sha, source_bytes: 0 };
        let mut at = layout.reserved;
        for ((json, info), decision) in lines.zip(&header.tensors).zip(&layout.decisions) {
            self.check_cancelled()?;
            let entry = serde_json::from_slice::<TensorEntry>(json).ok();
            let sound = |entry: &TensorEntry| is_planned(entry, info, decision) && entry.contradiction().is_none();
            let Some(entry) = entry.filter(sound) else { break };
            let is_written = stored_parts(&entry, info).filter(|(bytes, _)| bytes.is_multiple_of(ALIGN)).all(|part| {
                let (from, (bytes, digest)) = (at, part);
                at += bytes;
                at <= written.stamp().bytes && written.stream(from, bytes, |_| Ok(())).is_ok_and(|got| got == digest)
            });
            if !is_written {
                break;
            }
            let mut sha = kept.sha.clone();
            let digest = input.stream(info.offset, info.bytes, |piece| {
                if let Some(sha) = &mut sha {
                    sha.update(piece);
                }
                self.progress.advance(piece.len() as u64);
                self.check_cancelled()
            })?;
            if digest != entry.digest {
                break;
            }
            kept.sha = sha;
            kept.source_bytes += info.bytes;
            kept.entries.push(entry);
        }
        input.check_unchanged()?;
        Ok(Some(kept))
    }

    /// Forms, metadata and the place for the header of a shard.
    fn layout(&self, file: &SourceFile, header: &Header, header_bytes: &[u8]) -> Result<Layout, BundleError> {
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
        Ok(Layout { decisions, metadata, reserved })
    }

    /// Compresses one safetensors file, or the rest of it; what is written has yet to be settled.
    fn weights(
        &self,
        file: &SourceFile,
        header: &Header,
        header_bytes: &[u8],
        kept: Option<Kept>,
    ) -> Result<Written, BundleError> {
        let input = Input::open_same(&file.path, &file.stamp)?;
        let Layout { decisions, metadata, reserved } = self.layout(file, header, header_bytes)?;
        let (work, journal) = (self.stage.growing(&file.name), self.stage.journal(&file.name));
        let is_new = kept.is_none();
        // One hash over what is encoded, in the order of the file: it cannot be of other bytes.
        let kept = kept.unwrap_or_else(|| {
            let sha = self.options.sha256.then(|| Sha256::new_with_prefix(header_bytes));
            Kept { entries: Vec::new(), sha, source_bytes: 0 }
        });
        let Kept { mut entries, mut sha, source_bytes } = kept;
        let stored: u64 = entries
            .iter()
            .zip(&header.tensors)
            .flat_map(|(entry, info)| stored_parts(entry, info))
            .fold(reserved, |sum, (bytes, _)| sum + if bytes.is_multiple_of(ALIGN) { bytes } else { 0 });
        let shard = if is_new { files::create(&work) } else { files::reopen(&work, stored) };
        let shard = shard.map_err(self.stage.write_error(&work))?;
        let mut target = Target {
            file: shard,
            path: &work,
            stage: self.stage,
            at: reserved,
            parts: Vec::new(),
            journal: self.begin_journal(&journal, &self.journal_head(file, header_bytes), &entries)?,
        };
        let mut begun = Vec::new();
        for ((entry, info), decision) in entries.iter().zip(&header.tensors).zip(&decisions) {
            self.take_over(&mut target, file, (entry, info, decision), &input, &mut begun)?;
        }
        self.progress.advance(source_bytes);

        let gate = Gate::new(self.options.ram_bytes);
        let failed = AtomicBool::new(false);
        let (sender, receiver) = mpsc::channel::<Encoded<'_>>();
        let tensors = header.tensors.iter().zip(&decisions);
        let tensors = tensors.map(|(t, d)| (t.bytes, d.choice.grid().is_none()));
        let all = batches_from(entries.len(), tensors, self.options.ram_bytes);
        let deferred = thread::scope(|scope| {
            let (gate, input, target, failed) = (&gate, &input, &mut target, &failed);
            let writer = spawn(scope, move || {
                let (mut result, mut deferred) = (Ok(()), begun);
                // After a failure the rest is taken in all the same, so that nobody waits at the gate for ever.
                for encoded in receiver {
                    if result.is_ok() {
                        result = target.put(&encoded, &mut deferred, input).and_then(|()| {
                            failpoint("part-written");
                            target.note(&encoded.entry)
                        });
                        failed.store(result.is_err(), Ordering::Relaxed);
                    }
                    let held = encoded.held_bytes;
                    drop(encoded);
                    gate.leave(held);
                }
                result.map(|()| deferred)
            })?;
            // The next batch is read while this one is encoded. Two buffers take turns.
            let (give_back, free) = mpsc::channel::<Vec<u8>>();
            for _ in 0..2 {
                // The other end is at hand.
                _ = give_back.send(Vec::new());
            }
            let (read, batches) = mpsc::sync_channel::<Result<(Work, u64, Vec<u8>), BundleError>>(0);
            let reader = spawn(scope, move || {
                for work in all {
                    let bytes = match &work {
                        Work::Batch(batch) => header.tensors[batch.clone()].iter().map(|t| t.bytes).sum::<u64>(),
                        Work::Pieces(_) => 0,
                    };
                    // The source and its encoded form, which is no larger.
                    gate.enter(bytes.saturating_mul(2));
                    let Ok(mut buffer) = free.recv() else { break };
                    let filled = match &work {
                        Work::Batch(batch) => fill(&mut buffer, input, &header.tensors[batch.start], bytes, &file.path),
                        Work::Pieces(_) => Ok(()),
                    };
                    if read.send(filled.map(|()| (work, bytes, buffer))).is_err() {
                        break;
                    }
                }
            })?;
            let encode_all = || {
                for batch in batches {
                    let (work, bytes, buffer) = batch?;
                    self.check_cancelled()?;
                    if failed.load(Ordering::Relaxed) {
                        break;
                    }
                    let encoded = match work {
                        Work::Pieces(index) => {
                            let (info, decision) = (&header.tensors[index], &decisions[index]);
                            vec![self.pieces(input, info, decision, sha.as_mut())?]
                        }
                        Work::Batch(batch) => {
                            let infos = &header.tensors[batch.clone()];
                            let first = infos[0].offset;
                            let encode = || {
                                infos
                                    .par_iter()
                                    .zip(&decisions[batch])
                                    .map(|(info, decision)| {
                                        let at = (info.offset - first) as usize;
                                        self.encode(file, &buffer[at..at + info.bytes as usize], info, decision)
                                    })
                                    .collect::<Result<Vec<_>, _>>()
                            };
                            let hash = || sha.as_mut().map(|sha| sha.update(&buffer[..bytes as usize]));
                            rayon::join(encode, hash).0?
                        }
                    };
                    // The reader may have gone: there was nothing left to read.
                    _ = give_back.send(buffer);
                    let held: u64 = encoded.iter().map(|e| e.held_bytes).sum();
                    gate.leave(bytes.saturating_mul(2).saturating_sub(held));
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
            // A reader that waits at the gate or for a buffer goes on, and finds that nobody listens.
            drop(sender);
            let deferred = join(writer);
            gate.open();
            drop(give_back);
            join(reader);
            encoded?;
            deferred
        })?;
        let sha256 = sha.map(files::hex);
        target.put_deferred(deferred, &input)?;
        target.write(header_bytes)?;
        target.parts.push(Part::new(
            SOURCE_HEADER.into(),
            Dtype::U8,
            vec![header_bytes.len()],
            header_bytes.len() as u64,
        ));
        let shard_header = target.finish(&metadata, reserved)?;
        let (shard_size, target) = (target.at, target.file);
        input.check_unchanged()?;
        input.pass_attributes(&target);

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
        let record = Record { options: self.fingerprint(), file: entry };
        self.progress.advance(header_bytes.len() as u64);
        Ok(Written { file: target, work, journal, record })
    }

    /// Waits until a shard is on the disk, gives it its name, and notes that for a later run.
    fn settle(&self, shard: Written) -> Result<(), BundleError> {
        shard.file.sync_all().map_err(self.stage.write_error(&shard.work))?;
        self.stage.accept(&shard.work, &shard.record.file.name)?;
        self.stage.put_record(&shard.record.file.name, &shard.record.to_bytes())?;
        std::fs::remove_file(&shard.journal).map_err(BundleError::io("remove the file", &shard.journal))
    }

    /// A journal with what is kept, in place of an older one.
    fn begin_journal(&self, path: &Path, head: &JournalHead, entries: &[TensorEntry]) -> Result<File, BundleError> {
        let lines: Vec<u8> =
            [journal_line(head)].into_iter().chain(entries.iter().map(journal_line)).flatten().collect();
        let new = self.stage.work().join("journal");
        let mut file = files::create(&new).map_err(self.stage.write_error(&new))?;
        files::append(&mut file, &lines).map_err(self.stage.write_error(&new))?;
        std::fs::rename(&new, path).map_err(self.stage.write_error(path))?;
        Ok(file)
    }

    /// Goes past a tensor that an interrupted run has written. What waits for the end of the shard is got ready again.
    fn take_over(
        &self,
        target: &mut Target<'_>,
        file: &SourceFile,
        (entry, info, decision): (&TensorEntry, &TensorInfo, &Decision),
        input: &Input,
        deferred: &mut Vec<Deferred>,
    ) -> Result<(), BundleError> {
        let (offset, digest) = (info.offset, entry.digest);
        let Some(grid) = entry.grid() else {
            let part = Part::new(info.name.clone(), info.dtype, info.shape.clone(), info.bytes);
            if part.bytes.is_multiple_of(ALIGN) {
                target.pass(part);
            } else {
                deferred.push(Deferred { part, contents: Pending::Raw { offset, digest } });
            }
            return Ok(());
        };
        let mut again = None;
        for section in &entry.sections {
            let shape = section.name.shape(grid, section.bytes as usize);
            let name = section_name(&info.name, section.name);
            let part = Part::new(name, section.name.dtype(), shape, section.bytes);
            if part.bytes.is_multiple_of(ALIGN) {
                target.pass(part);
                continue;
            }
            if section.name == Section::SIGN_MANTISSA {
                let contents = Pending::SignMantissa { offset, bytes: info.bytes, digest };
                deferred.push(Deferred { part, contents });
                continue;
            }
            if again.is_none() {
                let bytes = input.read(offset, info.bytes)?;
                let made = encode_tensor(&bytes, info.dtype, decision.choice.clone(), self.options, self.encoder);
                again = Some(made.map_err(|source| BundleError::Encoder {
                    file: file.name.clone(),
                    tensor: info.name.clone(),
                    source,
                })?);
            }
            let made = match &again {
                Some((_, _, Stored::Coded(tensor))) => tensor.sections().find(|(name, _)| *name == section.name),
                _ => None,
            };
            match made.filter(|(_, bytes)| Digest::of(bytes) == section.digest) {
                Some((_, bytes)) => deferred.push(Deferred { part, contents: Pending::Held(bytes.to_vec()) }),
                None => return Err(input.changed()),
            }
        }
        Ok(())
    }

    /// A large raw tensor: its digest now, its bytes when it is written.
    fn pieces<'a>(
        &self,
        input: &Input,
        info: &'a TensorInfo,
        decision: &Decision,
        mut sha: Option<&mut Sha256>,
    ) -> Result<Encoded<'a>, BundleError> {
        self.progress.tensor(&info.name);
        let digest = input.stream(info.offset, info.bytes, |piece| {
            if let Some(sha) = &mut sha {
                sha.update(piece);
            }
            self.progress.advance(piece.len() as u64);
            self.check_cancelled()
        })?;
        let entry = entry(info, decision, &decision.choice, digest, Vec::new());
        Ok(Encoded { info, entry, stored: Stored::Later, held_bytes: 0 })
    }

    fn encode<'a>(
        &self,
        file: &SourceFile,
        bytes: &[u8],
        info: &'a TensorInfo,
        decision: &Decision,
    ) -> Result<Encoded<'a>, BundleError> {
        self.progress.tensor(&info.name);
        let (digest, choice, stored) =
            encode_tensor(bytes, info.dtype, decision.choice.clone(), self.options, self.encoder).map_err(
                |source| BundleError::Encoder { file: file.name.clone(), tensor: info.name.clone(), source },
            )?;
        let (grid, coded): (_, Vec<(Section, &[u8])>) = match &stored {
            Stored::Coded(tensor) => (tensor.grid(), tensor.sections().collect()),
            _ => (None, Vec::new()),
        };
        let sections: Vec<SectionEntry> = coded
            .into_par_iter()
            .map(|(name, bytes)| {
                let blocks = grid.filter(|_| name == Section::PACKED).and_then(Blocks::of);
                let blocks = blocks.map_or_else(Vec::new, |blocks| blocks.digests(bytes));
                SectionEntry { name, bytes: bytes.len() as u64, digest: Digest::of(bytes), blocks }
            })
            .collect();
        let held_bytes = if sections.is_empty() { info.bytes } else { sections.iter().map(|s| s.bytes).sum::<u64>() };
        let entry = entry(info, decision, &choice, digest, sections);
        self.progress.advance(info.bytes);
        Ok(Encoded { info, entry, stored, held_bytes })
    }
}

/// What is left to do when the files of a bundle are in the stage.
pub(crate) struct Finish<'a> {
    pub(crate) stage: &'a Stage,
    pub(crate) verify: VerifyAfter,
    pub(crate) ram_bytes: Option<u64>,
    pub(crate) sign: Option<&'a Signer>,
    pub(crate) progress: &'a dyn Progress,
}

/// A complete stage.
pub(crate) struct Sealed {
    pub(crate) manifest: Manifest,
    pub(crate) stored_bytes: u64,
    pub(crate) verified_tensors: u64,
}

/// Completes a bundle: what depends on all shards, the manifest, its signature, and the proof that all can be decoded. `kinds` are those of the files; only
/// those of changed files are needed.
pub(crate) fn seal<'a>(
    finish: &Finish<'_>,
    kinds: impl Iterator<Item = Option<&'a Kind>>,
    mut files: Vec<FileEntry>,
    options: Options,
) -> Result<Sealed, BundleError> {
    finish.changed(kinds, &mut files)?;
    let tensors = files.iter().filter_map(FileEntry::weights).flat_map(|file| &file.tensors);
    let layers = plan::layers(tensors.map(|t| (t.role, t.layer, t.form)));
    let mut manifest = Manifest::new(options, files, layers);
    let bytes = manifest.seal();
    manifest::check_bytes(bytes.len() as u64)?;
    // As a reader will have it: what it would refuse is never published.
    let manifest = Manifest::parse(&bytes, Path::new(manifest::FILE_NAME))?;
    finish.stage.put(manifest::FILE_NAME, &bytes)?;
    let mut own_bytes = bytes.len() as u64;
    if let Some(signer) = finish.sign {
        let signature = signer.sign(&bytes)?;
        finish.stage.put(manifest::SIGNATURE_NAME, signature.as_bytes())?;
        own_bytes += signature.len() as u64;
    }
    let stored = manifest.files.iter().flat_map(FileEntry::stored).map(|(_, bytes)| bytes).sum::<u64>();
    let verified_tensors = finish.verify(&manifest.files)?;
    Ok(Sealed { manifest, stored_bytes: stored + own_bytes, verified_tensors })
}

impl Finish<'_> {
    fn check_cancelled(&self) -> Result<(), BundleError> {
        if self.progress.cancelled() { Err(self.stage.interrupted()) } else { Ok(()) }
    }

    /// Writes what depends on the shards: indexes of the stored names, and each `config.json`.
    fn changed<'a>(
        &self,
        kinds: impl Iterator<Item = Option<&'a Kind>>,
        files: &mut [FileEntry],
    ) -> Result<(), BundleError> {
        let shards: BTreeMap<String, WeightsFile> =
            files.iter().filter_map(FileEntry::weights).map(|file| (file.name.clone(), file.clone())).collect();
        let weights = manifest::weights_digest(files);
        for (kind, entry) in kinds.zip(files) {
            let (bytes, entry) = match (kind, entry) {
                (Some(Kind::Index(index)), FileEntry::Index(entry)) => {
                    (stored_index(index, &entry.name, &shards), entry)
                }
                (Some(Kind::Config(text)), FileEntry::Config(entry)) => (config::with_keys(text, weights), entry),
                _ => continue,
            };
            self.stage.put(&entry.name, &bytes)?;
            (entry.stored_size, entry.stored_digest) = (bytes.len() as u64, Digest::of(&bytes));
        }
        Ok(())
    }

    /// Decodes again what `VerifyAfter` asks for. Returns how many tensors that were.
    fn verify(&self, files: &[FileEntry]) -> Result<u64, BundleError> {
        if self.verify == VerifyAfter::None {
            return Ok(0);
        }
        let mut verified = 0;
        for file in files.iter().filter_map(FileEntry::weights) {
            let shard = Shard::open(&self.stage.tree(), file.clone())?;
            shard.source_header()?;
            let all = self.verify == VerifyAfter::Full;
            let sample = sampled(file);
            let chosen = |index: &usize| all || sample.contains(index);
            for work in shard.work(self.ram_bytes) {
                self.check_cancelled()?;
                let batch = match work {
                    Work::Pieces(index) if chosen(&index) => {
                        shard.stream(index, |piece| {
                            self.progress.advance(piece.len() as u64);
                            self.check_cancelled()
                        })?;
                        verified += 1;
                        continue;
                    }
                    Work::Pieces(index) => {
                        self.progress.advance(shard.original_bytes(index));
                        continue;
                    }
                    Work::Batch(batch) => batch,
                };
                let bytes: u64 = batch.clone().map(|index| shard.original_bytes(index)).sum();
                let chosen: Vec<usize> = batch.filter(chosen).collect();
                chosen.par_iter().try_for_each(|&index| {
                    shard.decode(index, &mut shard.buffer(shard.original_bytes(index))?, true)
                })?;
                verified += chosen.len() as u64;
                self.progress.advance(bytes);
            }
        }
        Ok(verified)
    }
}

/// Bytes of all tensors of these files.
fn tensor_bytes(files: &[&SourceFile]) -> u64 {
    let headers = files.iter().filter_map(|file| match &file.kind {
        Kind::Weights { header, .. } => Some(header),
        _ => None,
    });
    headers.flat_map(|header| &header.tensors).map(|tensor| tensor.bytes).sum()
}

/// Reads consecutive tensors, `bytes` in all, to the start of a buffer.
fn fill(buffer: &mut Vec<u8>, input: &Input, first: &TensorInfo, bytes: u64, path: &Path) -> Result<(), BundleError> {
    if (buffer.len() as u64) < bytes {
        // The old one first: both would be more than the bound allows.
        drop(std::mem::take(buffer));
        *buffer = files::buffer(bytes, path)?;
    }
    input.read_at(first.offset, &mut buffer[..bytes as usize])
}

fn entry(
    info: &TensorInfo,
    decision: &Decision,
    choice: &Choice,
    digest: Digest,
    sections: Vec<SectionEntry>,
) -> TensorEntry {
    TensorEntry {
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
    }
}

/// Whether an entry is of this tensor, and what it is for was decided the same.
fn is_planned(entry: &TensorEntry, info: &TensorInfo, decision: &Decision) -> bool {
    (&entry.name, entry.dtype, &entry.shape, entry.role, entry.layer)
        == (&info.name, info.dtype, &info.shape, decision.role, decision.layer)
}

/// Bytes and digests of the parts that a tensor is stored in, in stored order.
fn stored_parts<'a>(entry: &'a TensorEntry, info: &TensorInfo) -> impl Iterator<Item = (u64, Digest)> + 'a {
    let raw = (entry.form == FormId::RAW).then_some((info.bytes, entry.digest));
    raw.into_iter().chain(entry.sections.iter().map(|section| (section.bytes, section.digest)))
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
enum Stored {
    Raw(Vec<u8>),
    /// Raw, and too large to be held: it is read again when it is written, and compared with its digest.
    Later,
    Coded(StoredTensor<Vec<u8>>),
}

/// A tensor on its way to the writer.
struct Encoded<'a> {
    info: &'a TensorInfo,
    entry: TensorEntry,
    stored: Stored,
    held_bytes: u64,
}

/// Digest and stored form of a tensor: the form chosen, what takes its place if it does not fit, or raw if it would not shrink.
fn encode_tensor(
    bytes: &[u8],
    dtype: Dtype,
    mut choice: Choice,
    options: &CompressOptions,
    encoder: &dyn Encoder,
) -> Result<(Digest, Choice, Stored), EncoderError> {
    while let Some((float, grid)) = Float::of(dtype).zip(choice.grid()) {
        let matrix = FloatMatrix::new(float, bytes, grid.rows(), grid.cols())?;
        match encoder.encode(matrix, choice.form(), options.code_limit) {
            Ok((digest, tensor)) if is_worth_it(choice.form(), tensor.stored_bytes(), bytes.len() as u64) => {
                return Ok((digest, choice, Stored::Coded(tensor)));
            }
            Ok((digest, _)) => return Ok((digest, choice.not_smaller(), Stored::Raw(bytes.to_vec()))),
            Err(EncoderError::Unfit(why)) => choice = choice.unfit(why),
            Err(error) => return Err(error),
        }
    }
    Ok((Digest::of(bytes), choice, Stored::Raw(bytes.to_vec())))
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
    contents: Pending,
}

/// Where the bytes of a part come from that is written later.
enum Pending {
    /// From the source, from `offset` on: a raw tensor with this digest.
    Raw { offset: u64, digest: Digest },
    /// From the source: the sign_mantissa of the `bytes` bytes from `offset` on, which have this digest. Half of a large tensor would be much to hold.
    SignMantissa { offset: u64, bytes: u64, digest: Digest },
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
    /// What has been written, for a run that goes on with it.
    journal: File,
}

impl Target<'_> {
    /// Goes past a part that is written.
    fn pass(&mut self, part: Part) {
        self.at += part.bytes;
        self.parts.push(part);
    }

    /// Notes that a tensor is written.
    fn note(&mut self, entry: &TensorEntry) -> Result<(), BundleError> {
        files::append(&mut self.journal, &journal_line(entry)).map_err(self.stage.write_error(self.path))?;
        failpoint("journalled");
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), BundleError> {
        files::write_at(&self.file, bytes, self.at).map_err(self.stage.write_error(self.path))?;
        self.at += bytes.len() as u64;
        self.stage.wrote(bytes.len() as u64);
        Ok(())
    }

    fn put(&mut self, encoded: &Encoded<'_>, deferred: &mut Vec<Deferred>, input: &Input) -> Result<(), BundleError> {
        let (info, digest, offset) = (encoded.info, encoded.entry.digest, encoded.info.offset);
        let (tensor, grid) = match (&encoded.stored, encoded.entry.grid()) {
            (Stored::Coded(tensor), Some(grid)) => (tensor, grid),
            (stored, _) => {
                let part = Part::new(info.name.clone(), info.dtype, info.shape.clone(), info.bytes);
                match stored {
                    _ if !part.bytes.is_multiple_of(ALIGN) => {
                        deferred.push(Deferred { part, contents: Pending::Raw { offset, digest } });
                        return Ok(());
                    }
                    Stored::Raw(bytes) => self.write(bytes)?,
                    _ => self.write_again(input, offset, info.bytes, digest, |piece| Cow::Borrowed(piece))?,
                }
                self.parts.push(part);
                return Ok(());
            }
        };
        for (section, bytes) in tensor.sections() {
            let shape = section.shape(grid, bytes.len());
            let part = Part::new(section_name(&info.name, section), section.dtype(), shape, bytes.len() as u64);
            if part.bytes.is_multiple_of(ALIGN) {
                self.write(bytes)?;
                self.parts.push(part);
            } else {
                let contents = match section {
                    Section::SIGN_MANTISSA => Pending::SignMantissa { offset, bytes: info.bytes, digest },
                    _ => Pending::Held(bytes.to_vec()),
                };
                deferred.push(Deferred { part, contents });
            }
        }
        Ok(())
    }

    /// Writes what waited, largest elements first, so that each keeps its own alignment.
    fn put_deferred(&mut self, mut deferred: Vec<Deferred>, input: &Input) -> Result<(), BundleError> {
        deferred.sort_by_key(|d| std::cmp::Reverse(d.part.dtype.bits()));
        for item in deferred {
            match item.contents {
                Pending::Held(bytes) => self.write(&bytes)?,
                Pending::Raw { offset, digest } => {
                    self.write_again(input, offset, item.part.bytes, digest, |piece| Cow::Borrowed(piece))?;
                }
                Pending::SignMantissa { offset, bytes, digest } => {
                    let split = |e: &[u8]| bf16::sign_mantissa(u16::from_le_bytes([e[0], e[1]]));
                    // A piece is an even number of bytes, as the tensor is.
                    self.write_again(input, offset, bytes, digest, |piece| {
                        Cow::Owned(piece.chunks_exact(2).map(split).collect())
                    })?;
                }
            }
            self.parts.push(item.part);
        }
        Ok(())
    }

    /// Writes what becomes of bytes of the source that were read before: they must still be the same.
    fn write_again(
        &mut self,
        input: &Input,
        offset: u64,
        bytes: u64,
        expected: Digest,
        form: impl Fn(&[u8]) -> Cow<'_, [u8]>,
    ) -> Result<(), BundleError> {
        let got = input.stream(offset, bytes, |piece| self.write(&form(piece)))?;
        if got == expected { Ok(()) } else { Err(input.changed()) }
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
        files::write_at(&self.file, &header, 0).map_err(self.stage.write_error(self.path))?;
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
