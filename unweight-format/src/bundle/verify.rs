//! Verifies every byte of a bundle.

use std::{collections::HashSet, path::Path, time::Instant};

use sha2::{Digest as _, Sha256};

use super::{
    BundleError, ErrorClass, Problem, Progress, VerifyOptions, VerifyReport, attached,
    base::Base,
    decompress::{check_contents, check_sha256, compare_original},
    files::{self, Input, check_sizes},
    manifest_file::read_manifest_bytes,
    names::{ATTACHED_NAME, CLONE_PREFIX, OF_REPOSITORY, PARTIAL_NAME},
    pipeline::{ReadUnit, on_threads},
    report::peak_rss_bytes,
    shard::Shard,
    sign,
};
use crate::bundle::manifest::{self, FileEntry, Manifest};

/// Verifies every byte of a bundle: the manifest, all sizes and headers, every section, and every decoded tensor. Also
/// checks that no file is missing and no other file exists. With `against`, every source file is compared as well.
///
/// The report contains all problems.
///
/// # Errors
/// The manifest is unreadable ([`ErrorClass::Mismatch`] if it is damaged), a file cannot be read, or `progress`
/// requested to stop.
pub fn verify(bundle: &Path, against: Option<&Path>, progress: &dyn Progress) -> Result<VerifyReport, BundleError> {
    verify_with(bundle, &VerifyOptions::default().against(against.map(Path::to_path_buf)), progress)
}

/// Like [`verify`], with options.
///
/// # Errors
/// The errors of [`verify`], or threads cannot be created.
pub fn verify_with(
    bundle: &Path,
    options: &VerifyOptions,
    progress: &dyn Progress,
) -> Result<VerifyReport, BundleError> {
    on_threads(options.threads, || check(bundle, options, progress))
}

fn check(bundle: &Path, options: &VerifyOptions, progress: &dyn Progress) -> Result<VerifyReport, BundleError> {
    let against = options.against.as_deref();
    let started = Instant::now();
    let key = options.key.as_deref().map(sign::public_key).transpose()?;
    let (manifest, manifest_bytes) = read_manifest_bytes(bundle)?;
    let base = match options.quick {
        true => None,
        false => Base::of_bundle(bundle, &manifest, options.base.as_deref())?,
    };
    let mut report = VerifyReport {
        problems: Vec::new(),
        files: 0,
        tensors: 0,
        stored_bytes: 0,
        original_bytes: 0,
        attached_kernels: 0,
        against_source: against.is_some(),
        quick: options.quick,
        signature: None,
        seconds: 0.0,
        peak_rss_bytes: None,
    };
    if let Some(key) = &key {
        match sign::check(bundle, key, &manifest_bytes, &manifest) {
            Ok(comment) => report.signature = Some(comment),
            Err(error) => note(&mut report, manifest::SIGNATURE_NAME, None, Err(error))?,
        }
    }
    drop(manifest_bytes);
    let total: u64 = manifest.files.iter().map(FileEntry::size).sum();
    progress.start(total.saturating_mul(if against.is_some() { 2 } else { 1 }));
    extra_files(bundle, &manifest, &mut report)?;
    let checked = check_attached(bundle, &manifest, options.quick, progress, &mut report);
    note(&mut report, ATTACHED_NAME, None, checked)?;
    for file in &manifest.files {
        progress.file(file.name());
        report.files += 1;
        let checked = check_sizes(bundle, file).and_then(|()| match file {
            FileEntry::Weights(weights) if options.quick => {
                report.stored_bytes += weights.shard_header_bytes;
                Shard::open(bundle, weights.clone()).map(|_| ())
            }
            _ if options.quick => Ok(()),
            FileEntry::Weights(weights) => Shard::open(bundle, weights.clone())
                .map(|shard| shard.with_base(base.clone()))
                .and_then(|shard| check_shard(&shard, options.ram_bytes, progress, &mut report)),
            FileEntry::Index(changed) | FileEntry::Config(changed) => {
                let stored = &changed.name;
                let got = files::read_through(&bundle.join(stored), false, |_| Ok(()))?;
                if got.digest != changed.stored_digest {
                    return Err(BundleError::Mismatch {
                        file: stored.clone(),
                        tensor: None,
                        what: "contents".into(),
                        offset: 0,
                        expected: changed.stored_digest.to_string(),
                        got: got.digest.to_string(),
                    });
                }
                let source = read_stored(bundle, file, progress)?;
                report.stored_bytes += got.bytes + source;
                Ok(())
            }
            FileEntry::Copied(_) => {
                report.stored_bytes += read_stored(bundle, file, progress)?;
                Ok(())
            }
        });
        note(&mut report, file.name(), None, checked)?;
        if let Some(source) = against {
            let difference = compare(source, file, options.quick, progress)?;
            report.problems.extend(difference.map(|text| Problem::of_source(file.name(), &text)));
        }
    }
    if let Some(source) = against {
        let listed: HashSet<&str> = manifest.files.iter().map(FileEntry::name).collect();
        for (name, _) in files::walk_selected(source, &options.selection)?
            .into_iter()
            .filter(|(name, _)| !listed.contains(name.as_str()))
        {
            let code = "source-file-not-in-bundle";
            let message = format!("{name}: in the source, but not in the bundle");
            report.problems.push(Problem { code, message, ..Problem::of_source(&name, "") });
        }
    }
    report.seconds = started.elapsed().as_secs_f64();
    report.peak_rss_bytes = peak_rss_bytes();
    Ok(report)
}

/// Adds damage of the bundle to the report. Returns errors that prevent the verification.
fn note(
    report: &mut VerifyReport,
    file: &str,
    tensor: Option<&str>,
    result: Result<(), BundleError>,
) -> Result<(), BundleError> {
    match result {
        Err(error) if error.class() == ErrorClass::Mismatch || matches!(error, BundleError::Header { .. }) => {
            report.problems.push(Problem::new(&error, file, tensor));
            Ok(())
        }
        other => other,
    }
}

/// Reads the bundle's copy of a file other than weights.
fn read_stored(bundle: &Path, file: &FileEntry, progress: &dyn Progress) -> Result<u64, BundleError> {
    let stored = files::original(bundle, file);
    let got = files::read_through(&bundle.join(&stored), file.sha256().is_some(), |chunk| {
        progress.advance(chunk.len() as u64);
        check_cancelled(progress)
    })?;
    check_contents(file, &stored, &got)?;
    Ok(got.bytes)
}

fn check_cancelled(progress: &dyn Progress) -> Result<(), BundleError> {
    if progress.cancelled() { Err(BundleError::Cancelled) } else { Ok(()) }
}

fn extra_files(bundle: &Path, manifest: &Manifest, report: &mut VerifyReport) -> Result<(), BundleError> {
    let mut listed: HashSet<String> = manifest.files.iter().flat_map(FileEntry::stored).map(|(name, _)| name).collect();
    listed.extend(OF_REPOSITORY.map(str::to_owned));
    listed.extend(manifest.files.iter().map(|file| files::original(bundle, file)));
    for (file, path) in files::walk(bundle)? {
        if [manifest::FILE_NAME, manifest::SIGNATURE_NAME].contains(&file.as_str()) {
            report.stored_bytes +=
                path.metadata().map_err(BundleError::io("read the metadata of the file", &path))?.len();
        } else if !listed.contains(&file) && file != ATTACHED_NAME && !file.starts_with(CLONE_PREFIX) {
            let error = match file.as_str() {
                PARTIAL_NAME => BundleError::HalfAttached { file: file.clone() },
                _ => BundleError::ExtraFile { file: file.clone() },
            };
            report.problems.push(Problem { is_extra: true, ..Problem::new(&error, &file, None) });
        }
    }
    Ok(())
}

/// Checks the attached kernels, if any.
fn check_attached(
    bundle: &Path,
    manifest: &Manifest,
    quick: bool,
    progress: &dyn Progress,
    report: &mut VerifyReport,
) -> Result<(), BundleError> {
    let Some(attached) = attached::of_bundle(bundle, manifest)? else { return Ok(()) };
    progress.file(ATTACHED_NAME);
    report.stored_bytes += attached.bytes();
    for kernel in attached.kernels() {
        check_cancelled(progress)?;
        report.attached_kernels += 1;
        if !quick {
            note(report, ATTACHED_NAME, None, attached.read(kernel).map(|_| ()))?;
        }
    }
    Ok(())
}

fn check_shard(
    shard: &Shard,
    ram_bytes: Option<u64>,
    progress: &dyn Progress,
    report: &mut VerifyReport,
) -> Result<(), BundleError> {
    let file = &shard.file;
    report.stored_bytes += file.shard_size;
    let header = shard.source_header();
    // The SHA-256 that decompression would compare at the end, of header and tensors if all are sound.
    let mut sha = file.sha256.is_some().then(Sha256::new);
    let found = report.problems.len();
    if let (Ok(header), Some(sha)) = (&header, &mut sha) {
        sha.update(header);
    }
    note(report, &file.name, None, header.map(|_| ()))?;
    let mut buffer = Vec::new();
    for unit in shard.read_units(ram_bytes) {
        check_cancelled(progress)?;
        let batch = match unit {
            ReadUnit::Pieces(index) => {
                let entry = &file.tensors[index];
                progress.tensor(&entry.name);
                let checked = shard.stream(index, |piece| {
                    if let Some(sha) = &mut sha {
                        sha.update(piece);
                    }
                    progress.advance(piece.len() as u64);
                    check_cancelled(progress)
                });
                note(report, &file.name, Some(&entry.name), checked)?;
                report.tensors += 1;
                report.original_bytes += shard.original_bytes(index);
                continue;
            }
            ReadUnit::Batch(batch) => batch,
        };
        let bytes: u64 = batch.clone().map(|index| shard.original_bytes(index)).sum();
        shard.grow(&mut buffer, bytes)?;
        let decoded = shard.decode_batch(batch.clone(), &mut buffer[..bytes as usize], true, |entry| {
            progress.tensor(&entry.name);
        });
        if let Some(sha) = &mut sha {
            sha.update(&buffer[..bytes as usize]);
        }
        for (index, decoded) in batch.zip(decoded) {
            note(report, &file.name, Some(&file.tensors[index].name), decoded)?;
            report.tensors += 1;
        }
        report.original_bytes += bytes;
        progress.advance(bytes);
    }
    progress.advance(file.header_bytes);
    match (sha, &file.sha256) {
        (Some(sha), Some(expected)) if report.problems.len() == found => {
            note(report, &file.name, None, check_sha256(file, expected, files::hex(sha)))
        }
        _ => Ok(()),
    }
}

/// Returns how the source's file differs from the one that the bundle was made from; `None` if it does not.
fn compare(
    source: &Path,
    file: &FileEntry,
    quick: bool,
    progress: &dyn Progress,
) -> Result<Option<String>, BundleError> {
    let path = source.join(file.name());
    let size = |got: u64| format!("the bundle was made from {} bytes, but the source has {got}", file.size());
    if !path.exists() {
        return Ok(Some("the source has no such file".into()));
    }
    check_cancelled(progress)?;
    if quick {
        let got = path.metadata().map_err(BundleError::io("read the metadata of the file", &path))?.len();
        progress.advance(file.size());
        return Ok((got != file.size()).then(|| size(got)));
    }
    let problem = compare_original(&Input::open(&path)?, file, |bytes| {
        progress.advance(bytes);
        check_cancelled(progress)
    })?;
    Ok(problem.map(|problem| match problem {
        BundleError::FileSize { got, .. } => size(got),
        BundleError::Mismatch { what, offset, expected, got, .. } => {
            format!("{what} at byte {offset}: digest {expected} in the bundle, {got} in the source")
        }
        other => other.to_string(),
    }))
}
