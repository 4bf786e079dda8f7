//! Compresses a model to a bundle, tensor by tensor.
//!
//! ```text
//! predict       headers and samples --> sizes, for `plan` and `compare`
//! mod           the job: other files, then shards
//! shards        several shards at once: source, read --units--> encode (rayon) --tensors, bounded--> writers
//! encode        the tensors of a unit; tensor: one of them
//! write         a writer thread: work/shard --fsync, rename--> tree/
//! shard_writer  order and alignment of a shard's bytes
//! check         verification of what is written, meanwhile
//! run           what these threads share
//! journal       records and journals, which a run leaves for a later one
//! resume        finds what can be taken over from an interrupted run
//! seal          indexes, config.json, manifest, signature
//! ```

mod check;
mod encode;
pub(crate) mod journal;
mod predict;
mod resume;
mod run;
mod seal;
mod shard_writer;
mod shards;
mod tensor;
mod unit;
mod write;

use std::{
    collections::{BTreeSet, HashSet},
    path::Path,
    sync::Arc,
    time::Instant,
};

pub(crate) use check::Checker;
use predict::predict_setting;
pub use predict::{compare, plan};
use resume::Resumable;
pub(crate) use seal::{SealContext, Sealed, seal};
use sha2::{Digest as _, Sha256};
use unit::ShardPlan;

use super::{
    BundleError, CompressOptions, CompressReport, CpuEncoder, Encoder, Progress, TensorReport, Trace, VerifyAfter,
    base::Base,
    files::{Contents, Input},
    manifest::{self, ChangedFile, CopiedFile, FileEntry, Options, SOURCE_SUFFIX},
    part::Part,
    part_file::{self, PartFile},
    pipeline::on_threads,
    plan::{Decision, EncodingChoice, Planner},
    report::{bits_per_element, coded, encoding_totals, peak_rss_bytes, ratio, saved},
    source::{Kind, Source, SourceFile},
    stage::{Replaceable, Stage},
};
use crate::{Digest, safetensors::TensorInfo};

/// Compresses a model directory to a bundle.
///
/// The output appears under its name only when it is complete; until then all files are in `<output>.partial`.
///
/// # Errors
/// The source is not a valid model, the output exists or cannot be written, or `progress` requested to stop.
pub fn compress(
    source: &Path,
    output: &Path,
    options: &CompressOptions,
    progress: &dyn Progress,
) -> Result<CompressReport, BundleError> {
    compress_with(source, output, options, &CpuEncoder, progress)
}

/// Like [`compress`], with another encoder.
///
/// # Errors
/// The errors of [`compress`], or the encoder failed.
pub fn compress_with(
    source: &Path,
    output: &Path,
    options: &CompressOptions,
    encoder: &dyn Encoder,
    progress: &dyn Progress,
) -> Result<CompressReport, BundleError> {
    let started = Instant::now();
    // A signature of digests that can be forged would prove nothing, so add SHA-256.
    let options = &options.clone().sha256(options.sha256 || options.sign.is_some());
    let planner = Planner::new(options)?;
    let replaceable = options.force.then_some(Replaceable::Bundle);
    let base = options.base.as_deref().filter(|_| options.part.is_none());
    let base = base.map(|base| on_threads(options.threads, || Base::open(base))).transpose()?;
    let mut inputs = options.selection.inputs(source);
    inputs.extend(options.base.clone());
    Stage::check(&inputs, output, replaceable.as_ref())?;
    let model = Source::open(source, &options.selection)?;
    planner.check_rules(tensor_names(&model))?;
    let part_files = options.part.map(|part| part.files(&model));
    let is_chosen = |file: &&SourceFile| part_files.as_ref().is_none_or(|part_files| part_files.contains(&file.name));
    let files: Vec<&SourceFile> = model.files.iter().filter(is_chosen).collect();
    let has_copies = options.part.is_none_or(Part::has_copies);
    if options.part.is_some()
        && let Some(conflict) = model.files.iter().find(|file| file.name == part_file::FILE_NAME)
    {
        return Err(BundleError::ReservedFile { path: conflict.path.clone() });
    }
    let stage = Stage::open(&inputs, output, replaceable, options.resume)?;
    stage.report_discarded(progress);
    let trace = Trace::default();
    let job = Job { options, planner: &planner, stage: &stage, encoder, base: base.as_ref(), progress, trace: &trace };
    let result = on_threads(options.threads, || job.run(&model, &files));
    let Outcome { files: entries, digest, resumed_files, resumed_tensors, stored_bytes, verified_tensors } = result?;
    stage.publish()?;
    let tensors = tensor_reports(&entries);
    let original_bytes = files.iter().map(|f| f.bytes).sum();
    Ok(CompressReport {
        part: options.part.map(|part| part.to_string()),
        encodings: encoding_totals(&tensors),
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
        base_tensors: manifest::base_digests(&entries).count() as u64,
        seconds: started.elapsed().as_secs_f64(),
        stages: trace.stages().into_iter().chain(encoder.stages()).collect(),
        peak_rss_bytes: peak_rss_bytes(),
        manifest_digest: digest,
    })
}

pub(super) fn tensor_names(model: &Source) -> impl Iterator<Item = &str> + Clone {
    model.tensors().map(|t| t.name.as_str())
}

pub(super) fn report(
    file: &str,
    info: &TensorInfo,
    decision: &Decision,
    choice: &EncodingChoice,
    stored_bytes: u64,
) -> TensorReport {
    let elements = info.elements();
    TensorReport {
        file: file.into(),
        name: info.name.clone(),
        role: decision.role,
        layer: decision.layer,
        dtype: info.dtype.to_string(),
        shape: info.shape.clone(),
        encoding: choice.encoding(),
        reason: choice.reason(),
        elements,
        original_bytes: info.bytes,
        stored_bytes,
        bits_per_element: bits_per_element(stored_bytes, elements),
    }
}

/// Reports of all tensors of a bundle.
pub(crate) fn tensor_reports(files: &[FileEntry]) -> Vec<TensorReport> {
    let files = files.iter().filter_map(FileEntry::weights);
    files.flat_map(|file| file.tensors.iter().map(|tensor| TensorReport::of(&file.name, tensor))).collect()
}

struct Job<'a> {
    options: &'a CompressOptions,
    planner: &'a Planner,
    stage: &'a Stage,
    encoder: &'a dyn Encoder,
    base: Option<&'a Arc<Base>>,
    progress: &'a dyn Progress,
    trace: &'a Trace,
}

/// The result of [`Job::run`].
struct Outcome {
    files: Vec<FileEntry>,
    /// Digest of the manifest or of the part file.
    digest: Digest,
    resumed_files: Vec<String>,
    resumed_tensors: u64,
    stored_bytes: u64,
    verified_tensors: u64,
}

impl Job<'_> {
    /// Compresses these files of the model into the stage.
    fn run(&self, model: &Source, chosen: &[&SourceFile]) -> Result<Outcome, BundleError> {
        let total: u64 = chosen.iter().map(|f| f.bytes).sum();
        let earlier = if self.options.resume { self.find_resumable(chosen)? } else { Resumable::default() };
        let resumed_files: BTreeSet<String> = earlier.finished.keys().cloned().collect();
        let resumed_tensors = earlier.unfinished.values().map(|state| state.entries.len() as u64).sum();
        self.reserve(chosen, &earlier)?;
        let keep: HashSet<String> = resumed_files.iter().cloned().collect();
        self.stage.keep_only(&keep, &earlier.unfinished.keys().cloned().collect())?;

        // Verification counts as work.
        let verified = if self.options.verify == VerifyAfter::None { 0 } else { tensor_bytes(chosen) };
        self.progress.start(total.saturating_add(verified));
        let (files, verified_tensors) = self.compress_files(chosen, earlier)?;
        let options = Options {
            profile: self.options.profile,
            scope: self.options.scope,
            code_limit: self.options.code_limit.bits(),
        };
        let context = SealContext { stage: self.stage, sign: self.options.sign.as_ref(), base: self.base };
        let (files, digest, stored_bytes) = match self.options.part {
            None => {
                let kinds = chosen.iter().map(|file| Some(&file.kind));
                let Sealed { manifest, stored_bytes } = seal(&context, kinds, files, options)?;
                (manifest.files, manifest.manifest_digest, stored_bytes)
            }
            Some(part) => {
                let part = PartFile::new(part, self.fingerprint(), options, model, files)?;
                let (digest, bytes) = part.to_bytes();
                manifest::check_bytes(bytes.len() as u64)?;
                self.stage.put(part_file::FILE_NAME, &bytes)?;
                let stored_bytes = bytes.len() as u64 + part.stored().iter().map(|(_, bytes)| bytes).sum::<u64>();
                (part.files, digest, stored_bytes)
            }
        };
        let resumed_files = resumed_files.into_iter().collect();
        Ok(Outcome { files, digest, resumed_files, resumed_tensors, stored_bytes, verified_tensors })
    }

    /// Reserves disk space for the bytes still to be written.
    fn reserve(&self, chosen: &[&SourceFile], earlier: &Resumable) -> Result<(), BundleError> {
        let total: u64 = chosen.iter().map(|f| f.bytes).sum();
        let finished: u64 = chosen.iter().filter(|f| earlier.finished.contains_key(&f.name)).map(|f| f.bytes).sum();
        let taken_over = finished + earlier.unfinished.values().map(|state| state.resumed_bytes).sum::<u64>();
        // Except for headers, a bundle is not larger than its source; predict its size only if that may not fit.
        let max_bytes = total - taken_over;
        if self.stage.free_bytes().is_some_and(|free| free < max_bytes + max_bytes / 16 + (64 << 20)) {
            let (_, predicted) = predict_setting(chosen, self.planner, self.options)?;
            return self.stage.reserve(predicted.saturating_sub(taken_over));
        }
        self.stage.reserve(max_bytes)
    }

    /// Copies the files next to the weights, then compresses or takes over the weights. Returns the entries of all in
    /// order, and the number of verified tensors.
    fn compress_files(
        &self,
        chosen: &[&SourceFile],
        mut earlier: Resumable,
    ) -> Result<(Vec<FileEntry>, u64), BundleError> {
        let (mut plans, mut resumed, mut finished) = (Vec::new(), Vec::new(), Vec::new());
        for &file in chosen {
            let Kind::Weights { header, header_bytes } = &file.kind else { continue };
            if let Some(entry) = earlier.finished.remove(&file.name) {
                self.progress.file(&file.name);
                self.progress.advance(file.bytes);
                finished.push(entry);
            } else {
                plans.push(ShardPlan { file, header, header_bytes, layout: self.layout(file, header, header_bytes)? });
                resumed.push(earlier.unfinished.remove(&file.name));
            }
        }
        let mut entries = Vec::with_capacity(chosen.len());
        for &file in chosen.iter().filter(|file| !matches!(file.kind, Kind::Weights { .. })) {
            self.check_cancelled()?;
            self.progress.file(&file.name);
            entries.push(match &file.kind {
                Kind::Index(_) => FileEntry::Index(self.copy_changed(file)?),
                Kind::Config(_) => FileEntry::Config(self.copy_changed(file)?),
                Kind::Copied | Kind::Weights { .. } => {
                    let Contents { bytes: size, digest, sha256 } = self.copy(file, &file.name)?;
                    FileEntry::Copied(CopiedFile { name: file.name.clone(), size, digest, sha256 })
                }
            });
        }
        let (made, verified_tensors) = self.compress_shards(&plans, resumed, &finished)?;
        entries.extend(finished.into_iter().chain(made).map(FileEntry::Weights));
        // The order of the source.
        entries.sort_by(|a, b| a.name().cmp(b.name()));
        Ok((entries, verified_tensors))
    }

    fn checker(&self) -> Checker<'_> {
        Checker {
            stage: self.stage,
            verify: self.options.verify,
            base: self.base,
            ram_bytes: self.options.ram_bytes,
            progress: self.progress,
            trace: self.trace,
        }
    }

    fn check_cancelled(&self) -> Result<(), BundleError> {
        self.stage.check_cancelled(self.progress)
    }

    /// Reports progress; fails if it requested to stop.
    fn advance(&self, bytes: u64) -> Result<(), BundleError> {
        self.progress.advance(bytes);
        self.check_cancelled()
    }

    /// Reads a tensor in pieces. Returns its digest, and adds its bytes to the hash of the file.
    fn hash_tensor(
        &self,
        input: &Input,
        info: &TensorInfo,
        mut sha: Option<&mut Sha256>,
    ) -> Result<Digest, BundleError> {
        input.stream(info.offset, info.bytes, |piece| {
            if let Some(sha) = &mut sha {
                sha.update(piece);
            }
            self.advance(piece.len() as u64)
        })
    }

    /// Copies a file other than weights.
    fn copy(&self, file: &SourceFile, name: &str) -> Result<Contents, BundleError> {
        let advance = |bytes| self.advance(bytes);
        self.stage.copy(&Input::open_same(&file.path, &file.stamp)?, name, self.options.sha256, advance, |_| Ok(()))
    }

    /// Copies a file to `<name>.source`. The bundle's version of it is written when all shards are known.
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
}

/// Bytes of all tensors of these files together.
fn tensor_bytes(files: &[&SourceFile]) -> u64 {
    let headers = files.iter().filter_map(|file| match &file.kind {
        Kind::Weights { header, .. } => Some(header),
        _ => None,
    });
    headers.flat_map(|header| &header.tensors).map(|tensor| tensor.bytes).sum()
}
