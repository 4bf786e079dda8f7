//! Merges a model that was compressed on several machines: each makes a part, and [`merge`] joins the parts to the
//! bundle that one machine would have made.
//!
//! ```text
//! source --compress, part 1 of 3--> a/  shards 1 and 4, copies --+
//!        --compress, part 2 of 3--> b/  shard 2                  +--merge--> bundle/
//!        --compress, part 3 of 3--> c/  shard 3                --+
//! ```
//! Every machine has the whole source and reads all of its headers. So all machines divide the files in the same way
//! without communication, and `merge`, which reads only the parts, can check that they have the same source.

use std::{
    path::{Path, PathBuf},
    time::Instant,
};

use super::{
    BundleError, CompressReport, MergeOptions, Progress, Trace, VerifyAfter,
    compress::{Checker, SealContext, seal, tensor_reports},
    config,
    decompress::check_contents,
    files::{self, Input, check_size},
    manifest::FileEntry,
    part_file::{FILE_NAME, PartFile, check_agreement},
    pipeline::on_threads,
    report::{coded, encoding_totals, peak_rss_bytes, ratio, saved},
    shard::Shard,
    source::{Kind, index_of},
    stage::{Replaceable, Stage},
};

/// Joins the parts of a model to a bundle, with the same bytes as a single run of `compress`.
///
/// Weights are hard-linked, not copied, where the file system supports it. The parts do not change.
///
/// # Errors
/// A directory is not a part or is damaged; parts have different sources, options or programs; a part is missing or
/// given twice; the output exists or cannot be written; or `progress` requested to stop.
pub fn merge(
    parts: &[PathBuf],
    output: &Path,
    options: &MergeOptions,
    progress: &dyn Progress,
) -> Result<CompressReport, BundleError> {
    let started = Instant::now();
    let trace = Trace::default();
    fn read(dir: &Path) -> Result<(&Path, PartFile), BundleError> {
        if !dir.metadata().map_err(BundleError::io("open the part", dir))?.is_dir() {
            return Err(BundleError::NotADirectory { path: dir.into() });
        }
        let part = PartFile::read(dir)?.ok_or_else(|| BundleError::NotAPart { path: dir.into() })?;
        Ok((dir, part))
    }
    let parts = parts.iter().map(|dir| read(dir)).collect::<Result<Vec<_>, BundleError>>()?;
    let first = check_agreement(&parts)?;
    if options.sign.is_some() {
        let files = parts.iter().flat_map(|(_, part)| &part.files);
        if let Some(file) = files.into_iter().find(|file| file.sha256().is_none()) {
            return Err(BundleError::UnsignableParts { file: file.name().into() });
        }
    }
    let replaceable = options.force.then_some(Replaceable::Bundle);
    let inputs: Vec<PathBuf> = parts.iter().map(|(dir, _)| dir.to_path_buf()).collect();
    Stage::check(&inputs, output, replaceable.as_ref())?;
    // Sorted by name, as in the source.
    let mut entries: Vec<(&Path, FileEntry)> =
        parts.iter().flat_map(|(dir, part)| part.files.iter().map(|file| (*dir, file.clone()))).collect();
    entries.sort_by(|(_, a), (_, b)| a.name().cmp(b.name()));
    for (dir, part) in &parts {
        let part_error = |error| BundleError::Part { path: dir.to_path_buf(), source: Box::new(error) };
        for (name, bytes) in part.stored() {
            check_size(dir, name, bytes).map_err(part_error)?;
        }
        for file in part.files.iter().filter_map(FileEntry::weights) {
            Shard::open(dir, file.clone()).map_err(part_error)?;
        }
    }
    let stage = Stage::open(&inputs, output, replaceable, false)?;
    let sealed = on_threads(options.threads, || {
        let total: u64 = entries.iter().map(|(_, file)| file.size()).sum();
        let tensors = entries.iter().filter_map(|(_, file)| file.weights()).flat_map(|file| &file.tensors);
        let verified = match options.verify {
            VerifyAfter::None => 0,
            _ => tensors.map(|tensor| tensor.original_bytes().unwrap_or(0)).sum(),
        };
        progress.start(total.saturating_add(verified));
        let mut kinds = Vec::with_capacity(entries.len());
        for (dir, file) in &entries {
            stage.check_cancelled(progress)?;
            progress.file(file.name());
            kinds.push(move_file(&stage, dir, file, progress)?);
        }
        let files = entries.into_iter().map(|(_, file)| file).collect();
        let context = SealContext { stage: &stage, sign: options.sign.as_ref(), base: None };
        let sealed = seal(&context, kinds.iter().map(Option::as_ref), files, first.options.clone())?;
        let checker = Checker {
            stage: &stage,
            verify: options.verify,
            base: None,
            ram_bytes: options.ram_bytes,
            progress,
            trace: &trace,
        };
        let verified_tensors = checker.check_finished(&sealed.manifest.files)?;
        Ok((sealed, verified_tensors))
    });
    // Nothing is kept for another run, so an error must not suggest resuming.
    let (sealed, verified_tensors) = sealed.map_err(|error| match error {
        BundleError::Interrupted { .. } => BundleError::Cancelled,
        BundleError::DiskFull { path, source, .. } => BundleError::Io { action: "write the file", path, source },
        other => other,
    })?;
    stage.publish()?;
    let tensors = tensor_reports(&sealed.manifest.files);
    let original_bytes = sealed.manifest.files.iter().map(FileEntry::size).sum();
    Ok(CompressReport {
        encodings: encoding_totals(&tensors),
        coded_tensors: coded(&tensors),
        saved_bytes: saved(original_bytes, sealed.stored_bytes),
        tensors,
        part: None,
        files: sealed.manifest.files.len() as u64,
        large_copies: Vec::new(),
        unmarked_configs: Vec::new(),
        resumed_files: Vec::new(),
        resumed_tensors: 0,
        original_bytes,
        stored_bytes: sealed.stored_bytes,
        ratio: ratio(sealed.stored_bytes, original_bytes),
        verified_tensors,
        base_tensors: 0,
        seconds: started.elapsed().as_secs_f64(),
        stages: trace.stages(),
        peak_rss_bytes: peak_rss_bytes(),
        manifest_digest: sealed.manifest.manifest_digest,
    })
}

/// Moves a file of a part to the output. Returns the kind of a file that the bundle stores with other contents.
fn move_file(
    stage: &Stage,
    dir: &Path,
    file: &FileEntry,
    progress: &dyn Progress,
) -> Result<Option<Kind>, BundleError> {
    let advance = |bytes| {
        progress.advance(bytes);
        stage.check_cancelled(progress)
    };
    let part_error = |error| BundleError::Part { path: dir.to_path_buf(), source: Box::new(error) };
    let Some(original) = file.original() else {
        stage.link(&dir.join(file.name()), file.name(), advance)?;
        return Ok(None);
    };
    let from = Input::open(&dir.join(&original))?;
    stage.copy(&from, &original, file.sha256().is_some(), advance, |got| {
        check_contents(file, &original, got).map_err(part_error)
    })?;
    if file.changed().is_none() {
        return Ok(None);
    }
    // Its digest was checked while copying.
    let text = files::read_small(&stage.tree().join(&original), file.size())?;
    let fail = |reason: String| BundleError::Manifest { path: dir.join(FILE_NAME), reason };
    Ok(match file {
        FileEntry::Index(_) => Some(Kind::Index(index_of(&dir.join(original), &text)?)),
        FileEntry::Config(_) => {
            let name = file.name().escape_default();
            let kind = config::check(&text).map(|()| Kind::Config(text));
            Some(kind.map_err(|reason| fail(format!("'{name}' cannot be marked as a bundle's: {reason}")))?)
        }
        FileEntry::Weights(_) | FileEntry::Copied(_) => None,
    })
}
