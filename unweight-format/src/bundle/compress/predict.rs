//! Predicts the size of a bundle from headers and samples, for [`plan()`] and [`compare`].

use std::{path::Path, time::Instant};

use super::{report, tensor_names};
use crate::{
    CodeLimit, Digest, EncodingId, Float, Section,
    bundle::{
        BundleError, CompareReport, CompareRow, CompressOptions, PlanReport, TensorReport, config,
        files::Input,
        pipeline::on_threads,
        plan::{self, Planner, saves_enough},
        report::{by_role, coded, encoding_totals, ratio, saved},
        source::{Kind, Source, SourceFile},
    },
    encoding::Sample,
    parallel,
    safetensors::TensorInfo,
};

/// Number and size of the pieces of a tensor that are sampled for a prediction.
const SAMPLE_PIECES: u64 = 8;
const SAMPLE_BYTES: u64 = 128 << 10;

/// Predicts the result of [`compress`](super::compress) from the headers and samples of the weights.
///
/// # Errors
/// The source is not a valid model, or the plan file is invalid.
pub fn plan(source: &Path, options: &CompressOptions) -> Result<PlanReport, BundleError> {
    let started = Instant::now();
    let planner = Planner::new(options)?;
    let model = Source::open(source, &options.selection)?;
    planner.check_rules(tensor_names(&model))?;
    let files: Vec<&SourceFile> = model.files.iter().collect();
    let (tensors, stored_bytes) = on_threads(options.threads, || predict_setting(&files, &planner, options))?;
    let original_bytes = model.files.iter().map(|f| f.bytes).sum();
    Ok(PlanReport {
        encodings: encoding_totals(&tensors),
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

/// Predicts sizes like [`plan()`], summed by role, for several sets of options at once; the samples are read only once.
/// Files and threads are those of the first set.
///
/// # Errors
/// The errors of [`plan()`].
pub fn compare(source: &Path, options: &[CompressOptions]) -> Result<CompareReport, BundleError> {
    let started = Instant::now();
    let planners = options.iter().map(Planner::new).collect::<Result<Vec<_>, _>>()?;
    let (selection, threads) =
        options.first().map_or_else(Default::default, |first| (first.selection.clone(), first.threads));
    let model = Source::open(source, &selection)?;
    planners.iter().try_for_each(|planner| planner.check_rules(tensor_names(&model)))?;
    let settings: Vec<_> = planners.iter().zip(options.iter().map(|options| options.code_limit)).collect();
    let files: Vec<&SourceFile> = model.files.iter().collect();
    let predicted = on_threads(threads, || predict(&files, &settings))?;
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

/// Whether the code limit affects a tensor's size.
fn is_limited(tensor: &TensorReport) -> bool {
    tensor.encoding.encoding().sections().contains(&Section::CODE_LENGTHS)
}

/// Reports of all tensors, and the size of all files in bytes.
pub(super) type Predicted = (Vec<TensorReport>, u64);

/// Predicts sizes for one way to encode the files.
pub(super) fn predict_setting(
    files: &[&SourceFile],
    planner: &Planner,
    options: &CompressOptions,
) -> Result<Predicted, BundleError> {
    Ok(predict(files, &[(planner, options.code_limit)])?.pop().unwrap_or_default())
}

/// Predicts sizes for each way to encode the files.
fn predict(files: &[&SourceFile], settings: &[(&Planner, CodeLimit)]) -> Result<Vec<Predicted>, BundleError> {
    let mut predicted = vec![Predicted::default(); settings.len()];
    let mut index_bytes = 0;
    for file in files {
        let Kind::Weights { header, .. } = &file.kind else {
            let bytes = match &file.kind {
                Kind::Index(_) => {
                    index_bytes += file.bytes;
                    2 * file.bytes
                }
                Kind::Config(text) => file.bytes + config::with_keys(text, Digest::leaf(&[])).len() as u64,
                _ => file.bytes,
            };
            predicted.iter_mut().for_each(|(_, stored_bytes)| *stored_bytes += bytes);
            continue;
        };
        let input = Input::open_same(&file.path, &file.stamp)?;
        let predicted_tensors =
            parallel::try_map(&header.tensors, |info| predict_tensor(&file.name, info, &input, settings))?;
        for reports in predicted_tensors {
            for ((tensors, stored_bytes), report) in predicted.iter_mut().zip(reports) {
                *stored_bytes += report.stored_bytes;
                tensors.push(report);
            }
        }
        // A copy of the source's header, and the shard's header. Without its sections, the latter is about one and a
        // half times the source's; the factor was fitted like the constants below.
        let header_bytes = header.data_offset + header.data_offset * 3 / 2;
        predicted.iter_mut().for_each(|(_, stored_bytes)| *stored_bytes += header_bytes);
    }
    for (tensors, stored_bytes) in &mut predicted {
        *stored_bytes += metadata_bytes(tensors, index_bytes);
    }
    Ok(predicted)
}

/// Bytes of a tensor in the manifest, and of a section in the manifest and in a shard's header. Fitted to bundles of
/// the demo model in all profiles.
const TENSOR_METADATA_BYTES: u64 = 275;
const SECTION_METADATA_BYTES: u64 = 152;

/// Bytes that describe the tensors in the manifest, in the headers of shards, and in the index, which has an entry per
/// section. `index_bytes` is the size of the source's index.
fn metadata_bytes(tensors: &[TensorReport], index_bytes: u64) -> u64 {
    let count = tensors.len() as u64;
    let sections = |tensor: &TensorReport| match tensor.encoding {
        EncodingId::RAW => 0,
        coded => coded.encoding().sections().len() as u64,
    };
    let sections: u64 = tensors.iter().map(sections).sum();
    let entry_bytes = index_bytes / count.max(1);
    count * TENSOR_METADATA_BYTES + sections * (SECTION_METADATA_BYTES + entry_bytes)
}

fn predict_tensor(
    file: &str,
    info: &TensorInfo,
    input: &Input,
    settings: &[(&Planner, CodeLimit)],
) -> Result<Vec<TensorReport>, BundleError> {
    let mut samples = Samples { info, input, pieces: None, by_limit: Vec::new() };
    let mut reports = Vec::with_capacity(settings.len());
    for &(planner, limit) in settings {
        let decision = planner.decide(&info.name, info.dtype, &info.shape);
        let Some(float) = Float::of(info.dtype).filter(|_| decision.choice.grid().is_some()) else {
            reports.push(report(file, info, &decision, &decision.choice, info.bytes));
            continue;
        };
        reports.push(match plan::predict(decision.choice.clone(), samples.get(float, limit)?) {
            (choice, Some(bytes)) if saves_enough(choice.encoding(), bytes, info.bytes) => {
                report(file, info, &decision, &choice, bytes)
            }
            (choice, Some(_)) => report(file, info, &decision, &choice.not_smaller(), info.bytes),
            (choice, None) => report(file, info, &decision, &choice, info.bytes),
        });
    }
    Ok(reports)
}

/// The samples of a tensor: one per code limit, of pieces that are read when first needed.
struct Samples<'a> {
    info: &'a TensorInfo,
    input: &'a Input,
    pieces: Option<Vec<Vec<u8>>>,
    by_limit: Vec<(CodeLimit, Sample)>,
}

impl Samples<'_> {
    fn get(&mut self, float: Float, limit: CodeLimit) -> Result<&Sample, BundleError> {
        if let Some(index) = self.by_limit.iter().position(|(sample_limit, _)| *sample_limit == limit) {
            return Ok(&self.by_limit[index].1);
        }
        let read = match self.pieces.take() {
            Some(read) => read,
            None => {
                let read = |(at, bytes)| self.input.read(self.info.offset + at, bytes);
                pieces(self.info.bytes).into_iter().map(read).collect::<Result<_, _>>()?
            }
        };
        let read = self.pieces.insert(read);
        let pieces: Vec<&[u8]> = read.iter().map(Vec::as_slice).collect();
        let index = self.by_limit.len();
        self.by_limit.push((limit, Sample::of(float, &pieces, limit)));
        Ok(&self.by_limit[index].1)
    }
}

/// Pieces (offset, bytes) spread evenly over a tensor, each starting on a multiple of 64 BF16 elements; a small tensor
/// is one piece.
fn pieces(bytes: u64) -> Vec<(u64, u64)> {
    if bytes <= SAMPLE_PIECES * SAMPLE_BYTES {
        return vec![(0, bytes)];
    }
    let step = (bytes - SAMPLE_BYTES) / (SAMPLE_PIECES - 1) / 128 * 128;
    (0..SAMPLE_PIECES).map(|i| (i * step, SAMPLE_BYTES)).collect()
}
