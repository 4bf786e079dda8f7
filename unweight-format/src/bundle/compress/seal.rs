//! Completes a bundle whose shards are written: indexes, `config.json`, manifest, signature, and verification.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    path::Path,
    sync::Arc,
};

use crate::{
    Digest, EncodingId,
    bundle::{
        BundleError, Progress, Signer, Trace, VerifyAfter,
        base::Base,
        config,
        manifest::{self, BaseEntry, FileEntry, Manifest, Options, TensorEntry, WeightsFile, section_name},
        pipeline::ReadUnit,
        shard::Shard,
        source::{Index, Kind},
        stage::Stage,
    },
    encoding::ENCODINGS,
};

/// What sealing a stage needs besides its files.
pub(crate) struct SealContext<'a> {
    pub(crate) stage: &'a Stage,
    pub(crate) verify: VerifyAfter,
    pub(crate) ram_bytes: Option<u64>,
    pub(crate) sign: Option<&'a Signer>,
    pub(crate) base: Option<&'a Arc<Base>>,
    pub(crate) progress: &'a dyn Progress,
    pub(crate) trace: &'a Trace,
}

/// The result of completing a stage.
pub(crate) struct Sealed {
    pub(crate) manifest: Manifest,
    pub(crate) stored_bytes: u64,
    pub(crate) verified_tensors: u64,
}

/// Completes a bundle: writes files that depend on all shards, the manifest and its signature, and verifies that all
/// tensors can be decoded. `kinds` are those of the files; only those of changed files are needed.
pub(crate) fn seal<'a>(
    context: &SealContext<'_>,
    kinds: impl Iterator<Item = Option<&'a Kind>>,
    mut files: Vec<FileEntry>,
    options: Options,
) -> Result<Sealed, BundleError> {
    context.write_dependent_files(kinds, &mut files)?;
    let base = context.base.and_then(|base| BaseEntry::of(base.name(), &files));
    let mut manifest = Manifest::new(options, base, files);
    let bytes = manifest.set_digest();
    manifest::check_bytes(bytes.len() as u64)?;
    // Parse the manifest like a reader, so that none is published that a reader would refuse.
    let manifest = Manifest::parse(&bytes, Path::new(manifest::FILE_NAME))?;
    context.stage.put(manifest::FILE_NAME, &bytes)?;
    let mut metadata_bytes = bytes.len() as u64;
    if let Some(signer) = context.sign {
        let signature = signer.sign(&bytes)?;
        context.stage.put(manifest::SIGNATURE_NAME, signature.as_bytes())?;
        metadata_bytes += signature.len() as u64;
    }
    let stored = manifest.files.iter().flat_map(FileEntry::stored).map(|(_, bytes)| bytes).sum::<u64>();
    let verified_tensors = context.verify(&manifest.files)?;
    Ok(Sealed { manifest, stored_bytes: stored + metadata_bytes, verified_tensors })
}

impl SealContext<'_> {
    fn check_cancelled(&self) -> Result<(), BundleError> {
        if self.progress.cancelled() { Err(self.stage.interrupted()) } else { Ok(()) }
    }

    /// Writes the files that depend on the shards: indexes of the stored names, and each `config.json`.
    fn write_dependent_files<'a>(
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

    /// Decodes the tensors that `VerifyAfter` selects, and returns their number.
    pub(super) fn verify(&self, files: &[FileEntry]) -> Result<u64, BundleError> {
        if self.verify == VerifyAfter::None {
            return Ok(0);
        }
        let mut verified = 0;
        // Kept from batch to batch: fresh pages would take a good part of the time of decoding.
        let mut buffer = Vec::new();
        for file in files.iter().filter_map(FileEntry::weights) {
            let shard = Shard::open(&self.stage.tree(), file.clone())?.with_base(self.base.cloned());
            shard.source_header()?;
            let all = self.verify == VerifyAfter::Full;
            let sample = sampled(file);
            let chosen = |index: &usize| all || sample.contains(index);
            for unit in shard.read_units(self.ram_bytes) {
                self.check_cancelled()?;
                let batch = match unit {
                    ReadUnit::Pieces(index) if chosen(&index) => {
                        shard.stream(index, |piece| {
                            self.progress.advance(piece.len() as u64);
                            self.check_cancelled()
                        })?;
                        verified += 1;
                        continue;
                    }
                    ReadUnit::Pieces(index) => {
                        self.progress.advance(shard.original_bytes(index));
                        continue;
                    }
                    ReadUnit::Batch(batch) => batch,
                };
                let bytes = |indices: &[usize]| indices.iter().map(|&index| shard.original_bytes(index)).sum::<u64>();
                let all: Vec<usize> = batch.collect();
                let chosen: Vec<usize> = all.iter().copied().filter(chosen).collect();
                shard.grow(&mut buffer, bytes(&chosen))?;
                let decode = || shard.decode_batch(chosen.iter().copied(), &mut buffer, true, |_| ());
                let decoded = self.trace.time("verify", bytes(&chosen), decode);
                decoded.into_iter().collect::<Result<(), _>>()?;
                verified += chosen.len() as u64;
                self.progress.advance(bytes(&all));
            }
        }
        Ok(verified)
    }
}

/// The first and last tensor, the largest of each encoding, and every sixteenth.
fn sampled(file: &WeightsFile) -> HashSet<usize> {
    let mut chosen: HashSet<usize> = (0..file.tensors.len()).step_by(16).collect();
    chosen.extend(file.tensors.len().checked_sub(1));
    for encoding in ENCODINGS {
        let encoded = file.tensors.iter().enumerate().filter(|(_, t)| t.encoding == encoding.id());
        chosen.extend(encoded.max_by_key(|(_, t)| t.original_bytes()).map(|(index, _)| index));
    }
    chosen
}

/// The index of the stored names, with the source's metadata and the stored size.
fn stored_index(index: &Index, name: &str, shards: &BTreeMap<String, WeightsFile>) -> Vec<u8> {
    let dir = name.rfind('/').map_or("", |slash| &name[..=slash]);
    let listed: BTreeSet<&str> = index.weight_map.values().map(String::as_str).collect();
    let (mut weight_map, mut total) = (BTreeMap::new(), 0u64);
    for shard in listed {
        // The source was checked: every shard of an index exists.
        let Some(file) = shards.get(&format!("{dir}{shard}")) else { continue };
        total += file.shard_size - file.shard_header_bytes;
        weight_map.extend(file.tensors.iter().flat_map(stored_names).map(|name| (name, shard)));
    }
    let mut metadata = index.metadata.clone().unwrap_or_else(|| serde_json::json!({}));
    if let Some(metadata) = metadata.as_object_mut() {
        metadata.insert("total_size".into(), total.into());
    }
    let mut value = serde_json::json!({ "metadata": metadata, "weight_map": weight_map });
    // Sort, so that the bytes do not depend on whether another crate enables insertion order of maps.
    value.sort_all_objects();
    let mut bytes = serde_json::to_vec_pretty(&value).expect("an index is strings, numbers and maps");
    bytes.push(b'\n');
    bytes
}

fn stored_names(tensor: &TensorEntry) -> Vec<String> {
    match tensor.encoding {
        EncodingId::RAW => vec![tensor.name.clone()],
        _ => tensor.sections.iter().map(|s| section_name(&tensor.name, s.name)).collect(),
    }
}
