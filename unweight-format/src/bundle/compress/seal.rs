//! Completes a bundle whose shards are written: indexes, `config.json`, manifest and signature.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::Arc,
};

use crate::{
    Digest, EncodingId,
    bundle::{
        BundleError, Signer,
        base::Base,
        config,
        manifest::{self, BaseEntry, FileEntry, Manifest, Options, TensorEntry, WeightsFile, section_name},
        source::{Index, Kind},
        stage::Stage,
    },
};

/// What sealing a stage needs besides its files.
pub(crate) struct SealContext<'a> {
    pub(crate) stage: &'a Stage,
    pub(crate) sign: Option<&'a Signer>,
    pub(crate) base: Option<&'a Arc<Base>>,
}

/// The result of completing a stage.
pub(crate) struct Sealed {
    pub(crate) manifest: Manifest,
    pub(crate) stored_bytes: u64,
}

/// Completes a bundle: writes files that depend on all shards, the manifest and its signature. `kinds` are those of the
/// files; only those of changed files are needed.
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
    Ok(Sealed { manifest, stored_bytes: stored + metadata_bytes })
}

impl SealContext<'_> {
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
