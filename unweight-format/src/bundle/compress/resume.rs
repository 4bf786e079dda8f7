//! Resumes an interrupted run: finds what can be taken over from its records and journals.

use std::{collections::BTreeMap, fs::File, path::Path};

use rayon::prelude::*;
use sha2::{Digest as _, Sha256};

use super::{
    Job,
    journal::{JournalHead, Kept, Record, journal_line, journal_lines, stored_parts},
    shard_writer::{ALIGN, Deferred, Part, Pending, ShardWriter},
    tensor::{Stored, encode_tensor},
};
use crate::{
    Digest, Section,
    bundle::{
        BundleError,
        files::{self, Input},
        manifest::{self, TensorEntry, VERSION, WeightsFile, section_name},
        plan::Decision,
        shard::Shard,
        source::{Kind, SourceFile},
    },
    safetensors::TensorInfo,
};

/// What can be taken over from an interrupted run, by file name.
#[derive(Default)]
pub(super) struct Earlier {
    /// Shards that are finished.
    pub(super) finished: BTreeMap<String, WeightsFile>,
    /// Shards with a prefix to keep.
    pub(super) begun: BTreeMap<String, Kept>,
}

impl Job<'_> {
    /// Finds what can be taken over. Reading it takes time, which is reported as progress.
    pub(super) fn earlier(&self, chosen: &[&SourceFile]) -> Result<Earlier, BundleError> {
        let mut earlier = Earlier::default();
        let has_traces = |file: &&SourceFile| {
            let traces = [self.stage.record(&file.name), self.stage.journal(&file.name)];
            matches!(file.kind, Kind::Weights { .. }) && traces.iter().any(|path| path.symlink_metadata().is_ok())
        };
        let read: u64 = chosen.iter().copied().filter(has_traces).map(|file| file.bytes).sum();
        if read > 0 {
            self.progress.start(read);
        }
        for file in chosen {
            self.check_cancelled()?;
            if let Some(entry) = self.resumable(file)? {
                earlier.finished.insert(file.name.clone(), entry);
            } else if let Some(kept) = self.kept(file)? {
                earlier.begun.insert(file.name.clone(), kept);
            }
        }
        let nothing_kept = earlier.finished.is_empty() && earlier.begun.is_empty();
        if nothing_kept && chosen.iter().any(|file| self.has_other_options(file)) {
            self.progress.starts_over("the interrupted run had other options or another version of the program");
        }
        Ok(earlier)
    }

    /// Whether a run with other options or another program version left a record or journal of this file.
    fn has_other_options(&self, file: &SourceFile) -> bool {
        let record = files::read_small(&self.stage.record(&file.name), manifest::BYTES_MAX).ok();
        let record = record.and_then(|bytes| Record::parse(&bytes)).map(|record| record.options);
        let journal = || {
            let bytes = files::read_small(&self.stage.journal(&file.name), manifest::BYTES_MAX).ok()?;
            let head: JournalHead = serde_json::from_slice(journal_lines(&bytes).next()?).ok()?;
            Some(head.options)
        };
        record.or_else(journal).is_some_and(|options| options != self.fingerprint())
    }

    /// The options that determine a shard's bytes, as text.
    pub(super) fn fingerprint(&self) -> String {
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
            // Another path of the same plan does not matter.
            self.planner.without_path(),
            o.sha256,
        )
    }

    /// The entry of a shard that an interrupted run finished, if it has the same source and options and its bytes are
    /// sound.
    ///
    /// The source is read for that, which takes a fraction of the time of encoding: a file's name, size and time do not
    /// identify a model.
    pub(super) fn resumable(&self, file: &SourceFile) -> Result<Option<WeightsFile>, BundleError> {
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
        // Check the shard itself last: it cannot be taken over if a section was damaged since.
        let Ok(shard) = Shard::open(&self.stage.tree(), entry) else { return Ok(None) };
        let sound = shard.source_header().is_ok()
            && (0..shard.file.tensors.len()).into_par_iter().all(|index| shard.is_sound(index));
        Ok(sound.then_some(shard.file))
    }

    pub(super) fn journal_head(&self, file: &SourceFile, header_bytes: &[u8]) -> JournalHead {
        JournalHead {
            options: self.fingerprint(),
            name: file.name.clone(),
            size: file.bytes,
            header_digest: Digest::of(header_bytes),
        }
    }

    /// The prefix of a shard that an interrupted run wrote, up to the first tensor whose source or stored parts do not
    /// have the digests of the journal.
    pub(super) fn kept(&self, file: &SourceFile) -> Result<Option<Kept>, BundleError> {
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

    /// Creates a journal with the kept entries, in place of an older one.
    pub(super) fn begin_journal(
        &self,
        path: &Path,
        head: &JournalHead,
        entries: &[TensorEntry],
    ) -> Result<File, BundleError> {
        let lines: Vec<u8> =
            [journal_line(head)].into_iter().chain(entries.iter().map(journal_line)).flatten().collect();
        let new = self.stage.work().join("journal");
        let mut file = files::create(&new).map_err(self.stage.write_error(&new))?;
        files::append(&mut file, &lines).map_err(self.stage.write_error(&new))?;
        std::fs::rename(&new, path).map_err(self.stage.write_error(path))?;
        Ok(file)
    }

    /// Skips a tensor that an interrupted run has written. Its parts that belong at the shard's end are prepared again.
    pub(super) fn take_over(
        &self,
        writer: &mut ShardWriter<'_>,
        file: &SourceFile,
        (entry, info, decision): (&TensorEntry, &TensorInfo, &Decision),
        input: &Input,
        deferred: &mut Vec<Deferred>,
    ) -> Result<(), BundleError> {
        let (offset, digest) = (info.offset, entry.digest);
        let Some(grid) = entry.grid() else {
            let part = Part::new(info.name.clone(), info.dtype, info.shape.clone(), info.bytes);
            if part.bytes.is_multiple_of(ALIGN) {
                writer.skip_written(part);
            } else {
                deferred.push(Deferred { part, contents: Pending::Raw { offset, digest } });
            }
            return Ok(());
        };
        let mut encoded = None;
        for section in &entry.sections {
            let shape = section.name.shape(grid, section.bytes as usize);
            let name = section_name(&info.name, section.name);
            let part = Part::new(name, section.name.dtype(), shape, section.bytes);
            if part.bytes.is_multiple_of(ALIGN) {
                writer.skip_written(part);
                continue;
            }
            if section.name == Section::SIGN_MANTISSA {
                let contents = Pending::SignMantissa { offset, bytes: info.bytes, digest };
                deferred.push(Deferred { part, contents });
                continue;
            }
            if encoded.is_none() {
                let bytes = input.read(offset, info.bytes)?;
                let result = encode_tensor(&bytes, info.dtype, decision.choice.clone(), self.options, self.encoder);
                encoded = Some(result.map_err(|source| BundleError::Encoder {
                    file: file.name.clone(),
                    tensor: info.name.clone(),
                    source,
                })?);
            }
            let section_bytes = match &encoded {
                Some((_, _, Stored::Coded(tensor))) => tensor.sections().find(|(name, _)| *name == section.name),
                _ => None,
            };
            match section_bytes.filter(|(_, bytes)| Digest::of(bytes) == section.digest) {
                Some((_, bytes)) => deferred.push(Deferred { part, contents: Pending::InMemory(bytes.to_vec()) }),
                None => return Err(input.changed()),
            }
        }
        Ok(())
    }
}

/// Whether an entry describes this tensor, with the same role and layer.
fn is_planned(entry: &TensorEntry, info: &TensorInfo, decision: &Decision) -> bool {
    (&entry.name, entry.dtype, &entry.shape, entry.role, entry.layer)
        == (&info.name, info.dtype, &info.shape, decision.role, decision.layer)
}
