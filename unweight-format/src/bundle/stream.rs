//! Writes the original bytes of a file, in order, to a stream.

use std::{io::Write, path::Path};

use sha2::{Digest as _, Sha256};

use super::{
    Bundle, BundleError, DecompressOptions, FileReport, Progress,
    decompress::{check_contents, check_sha256},
    files::{self, check_size},
    pipeline::{ReadUnit, on_threads},
    shard::Shard,
};
use crate::bundle::manifest::{FileEntry, WeightsFile};

impl Bundle {
    /// Writes the original bytes of a file of the source to `out`, in order.
    ///
    /// For weights, every stored section is compared with its digest before its decoded bytes are written. Digests of
    /// copied files and of large raw tensors, and the SHA-256, are only compared at the end. So the bytes are correct
    /// only if the result is `Ok`.
    ///
    /// # Errors
    /// The source contained no such file, the bundle is damaged, `out` fails, or `progress` requested to stop.
    pub fn write_file(
        &self,
        name: &str,
        out: &mut (dyn Write + Send),
        options: &DecompressOptions,
        progress: &dyn Progress,
    ) -> Result<FileReport, BundleError> {
        let file = self.manifest().files.iter().find(|file| file.name() == name);
        let file = file.ok_or_else(|| BundleError::UnknownFile { name: name.into() })?;
        progress.file(name);
        let mut out = Out { out, file: name, progress };
        on_threads(options.threads, || match file {
            FileEntry::Weights(weights) => {
                let shard = self.shards().iter().find(|shard| shard.file.name == name);
                // Opening the bundle opens all shards, so this does not fail.
                let shard = shard.ok_or_else(|| BundleError::UnknownFile { name: name.into() })?;
                write_weights(shard, weights, options.ram_bytes, &mut out)
            }
            FileEntry::Index(_) | FileEntry::Config(_) | FileEntry::Copied(_) => {
                write_copy(self.dir(), file, files::original(self.dir(), file), &mut out)
            }
        })?;
        Ok(FileReport {
            name: name.into(),
            bytes: file.size(),
            digest: file.digest(),
            sha256: file.sha256().map(Into::into),
            resumed: false,
            resumed_bytes: 0,
        })
    }
}

/// The stream, with the file's name for errors.
struct Out<'a> {
    out: &'a mut (dyn Write + Send),
    file: &'a str,
    progress: &'a dyn Progress,
}

impl Out<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<(), BundleError> {
        if self.progress.cancelled() {
            return Err(BundleError::Cancelled);
        }
        self.out.write_all(bytes).map_err(|source| BundleError::Output { file: self.file.into(), source })?;
        self.progress.advance(bytes.len() as u64);
        Ok(())
    }
}

fn write_copy(dir: &Path, file: &FileEntry, stored: String, out: &mut Out<'_>) -> Result<(), BundleError> {
    check_size(dir, stored.clone(), file.size())?;
    let got = files::read_through(&dir.join(&stored), file.sha256().is_some(), |chunk| out.write(chunk))?;
    check_contents(file, &stored, &got)
}

fn write_weights(
    shard: &Shard,
    file: &WeightsFile,
    ram_bytes: Option<u64>,
    out: &mut Out<'_>,
) -> Result<(), BundleError> {
    let mut sha = file.sha256.is_some().then(Sha256::new);
    let mut put = |bytes: &[u8], out: &mut Out<'_>| {
        if let Some(sha) = &mut sha {
            sha.update(bytes);
        }
        out.write(bytes)
    };
    put(&shard.source_header()?, out)?;
    let mut buffer = Vec::new();
    for unit in shard.read_units(ram_bytes) {
        let batch = match unit {
            ReadUnit::Pieces(index) => {
                out.progress.tensor(&file.tensors[index].name);
                shard.stream(index, |piece| put(piece, out))?;
                continue;
            }
            ReadUnit::Batch(batch) => batch,
        };
        let bytes: u64 = batch.clone().map(|index| shard.original_bytes(index)).sum();
        shard.grow(&mut buffer, bytes)?;
        let progress = out.progress;
        let decoded =
            shard.decode_batch(batch, &mut buffer[..bytes as usize], false, |entry| progress.tensor(&entry.name));
        decoded.into_iter().collect::<Result<(), _>>()?;
        put(&buffer[..bytes as usize], out)?;
    }
    match (sha, &file.sha256) {
        (Some(sha), Some(expected)) => check_sha256(file, expected, files::hex(sha)),
        _ => Ok(()),
    }
}
