//! Resumes an interrupted run: finds what can be taken over from its records and journals.

use std::{collections::BTreeMap, fs::File, path::Path};

use super::{
    Job,
    journal::{JournalHead, Record, ShardState, journal_line, journal_texts, stored_contents},
    shard_writer::{Pending, Place, ShardEntry, ShardWriter, place},
    tensor::{Stored, encode_tensor},
};
use crate::{
    Digest,
    bundle::{
        BundleError,
        files::{self, Input},
        manifest::{self, SectionEntry, TensorEntry, VERSION, WeightsFile},
        plan::Decision,
        shard::Shard,
        source::{Kind, SourceFile},
    },
    parallel,
    safetensors::TensorInfo,
};

/// What can be taken over from an interrupted run, by file name.
#[derive(Default)]
pub(super) struct Resumable {
    /// Shards that are finished.
    pub(super) finished: BTreeMap<String, WeightsFile>,
    /// Shards with a prefix to keep.
    pub(super) unfinished: BTreeMap<String, ShardState>,
}

impl Job<'_> {
    /// Finds what can be taken over. Reading it takes time, which is reported as progress.
    pub(super) fn find_resumable(&self, chosen: &[&SourceFile]) -> Result<Resumable, BundleError> {
        let mut found = Resumable::default();
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
            if let Some(entry) = self.check_record(file)? {
                found.finished.insert(file.name.clone(), entry);
            } else if let Some(state) = self.check_journal(file)? {
                found.unfinished.insert(file.name.clone(), state);
            }
        }
        let nothing_found = found.finished.is_empty() && found.unfinished.is_empty();
        if nothing_found && chosen.iter().any(|file| self.has_other_options(file)) {
            self.progress.starts_over("the interrupted run had other options or another version of the program");
        }
        Ok(found)
    }

    /// Whether a run with other options or another program version left a record or journal of this file.
    fn has_other_options(&self, file: &SourceFile) -> bool {
        let record = files::read_small(&self.stage.record(&file.name), manifest::BYTES_MAX).ok();
        let record = record.and_then(|bytes| Record::parse(&bytes)).map(|record| record.options);
        let journal = || {
            let bytes = files::read_small(&self.stage.journal(&file.name), manifest::BYTES_MAX).ok()?;
            let head: JournalHead = serde_json::from_slice(journal_texts(&bytes).next()?).ok()?;
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
        ) + &self.base.map_or_else(String::new, |base| format!(" base {}", base.identity()))
    }

    /// The entry of a shard that an interrupted run finished, if it has the same source and options and its bytes are
    /// sound.
    ///
    /// The source is read for that, which takes a fraction of the time of encoding: a file's name, size and time do not
    /// identify a model.
    fn check_record(&self, file: &SourceFile) -> Result<Option<WeightsFile>, BundleError> {
        let Kind::Weights { header, header_bytes } = &file.kind else { return Ok(None) };
        let Ok(bytes) = files::read_small(&self.stage.record(&file.name), manifest::BYTES_MAX) else { return Ok(None) };
        let Some(Record { options, file: entry }) = Record::parse(&bytes) else { return Ok(None) };
        let planned = |(t, info): (&TensorEntry, &TensorInfo)| {
            matches_plan(t, info, &self.planner.decide(&info.name, info.dtype, &info.shape))
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
        let ShardState { mut sha, .. } = ShardState::new(header_bytes, entry.sha256.is_some());
        self.progress.advance(header_bytes.len() as u64);
        for (t, info) in entry.tensors.iter().zip(&header.tensors) {
            if self.hash_tensor(&input, info, sha.as_mut())? != t.digest {
                return Ok(None);
            }
        }
        input.check_unchanged()?;
        if sha.map(files::hex) != entry.sha256 {
            return Ok(None);
        }
        // Check the shard itself last: it cannot be taken over if a section was damaged since.
        let Ok(shard) = Shard::open(&self.stage.tree(), entry) else { return Ok(None) };
        let check = |index| if shard.is_sound(index) { Ok(()) } else { Err(()) };
        let sound = shard.source_header().is_ok() && parallel::try_map(0..shard.file.tensors.len(), check).is_ok();
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

    /// The prefix of a shard that an interrupted run wrote, up to the first tensor whose bytes in the source or in the
    /// shard do not have the digests of the journal.
    fn check_journal(&self, file: &SourceFile) -> Result<Option<ShardState>, BundleError> {
        let Kind::Weights { header, header_bytes } = &file.kind else { return Ok(None) };
        let Ok(journal) = files::read_small(&self.stage.journal(&file.name), manifest::BYTES_MAX) else {
            return Ok(None);
        };
        let Ok(written) = Input::open(&self.stage.growing(&file.name)) else { return Ok(None) };
        let mut texts = journal_texts(&journal);
        let head = texts.next().and_then(|json| serde_json::from_slice::<JournalHead>(json).ok());
        if head.is_none_or(|head| head != self.journal_head(file, header_bytes)) {
            return Ok(None);
        }
        let layout = self.layout(file, header, header_bytes)?;
        let input = Input::open_same(&file.path, &file.stamp)?;
        self.progress.advance(header_bytes.len() as u64);
        let mut state = ShardState::new(header_bytes, self.options.sha256);
        let mut at = layout.reserved;
        for ((json, info), decision) in texts.zip(&header.tensors).zip(&layout.decisions) {
            self.check_cancelled()?;
            let entry = serde_json::from_slice::<TensorEntry>(json).ok();
            let sound = |entry: &TensorEntry| matches_plan(entry, info, decision) && entry.contradiction().is_none();
            let Some(entry) = entry.filter(sound) else { break };
            let is_in_order = |&(bytes, _): &(u64, Digest)| place(bytes) == Place::InOrder;
            let is_written = stored_contents(&entry, info).filter(is_in_order).all(|(bytes, digest)| {
                let from = at;
                at += bytes;
                at <= written.stamp().bytes && written.stream(from, bytes, |_| Ok(())).is_ok_and(|got| got == digest)
            });
            if !is_written {
                break;
            }
            let mut sha = state.sha.clone();
            if self.hash_tensor(&input, info, sha.as_mut())? != entry.digest {
                break;
            }
            state.sha = sha;
            state.resumed_bytes += info.bytes;
            state.entries.push(entry);
        }
        input.check_unchanged()?;
        Ok(Some(state))
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

    /// Skips a tensor that an interrupted run has written, except for its entries at the shard's end.
    pub(super) fn take_over(
        &self,
        writer: &mut ShardWriter<'_>,
        file: &SourceFile,
        (entry, info, decision): (&TensorEntry, &TensorInfo, &Decision),
        input: &Input,
    ) -> Result<(), BundleError> {
        let skip = |bytes| {
            move |writer: &mut ShardWriter<'_>| {
                writer.skip(bytes);
                Ok(())
            }
        };
        let Some(grid) = entry.grid() else {
            let contents = || Ok(Pending::Raw { offset: info.offset, digest: entry.digest });
            return writer.add(ShardEntry::raw(info), skip(info.bytes), contents);
        };
        let mut encoded = None;
        for section in &entry.sections {
            let contents = || match Pending::from_source(section.name, info, entry.digest) {
                Some(contents) => Ok(contents),
                None => self.encode_again(&mut encoded, section, file, (info, decision), input),
            };
            writer.add(ShardEntry::section(info, section.name, grid, section.bytes), skip(section.bytes), contents)?;
        }
        Ok(())
    }

    /// Encodes a tensor, unless `encoded` contains it, for a section that an interrupted run has not written.
    fn encode_again(
        &self,
        encoded: &mut Option<Stored>,
        section: &SectionEntry,
        file: &SourceFile,
        (info, decision): (&TensorInfo, &Decision),
        input: &Input,
    ) -> Result<Pending, BundleError> {
        let stored = match encoded.take() {
            Some(stored) => stored,
            None => {
                let bytes = input.read(info.offset, info.bytes)?;
                let result = encode_tensor(&bytes, info.dtype, decision.choice.clone(), self.options, self.encoder);
                let (file, tensor) = (file.name.clone(), info.name.clone());
                result.map_err(|source| BundleError::Encoder { file, tensor, source })?.2
            }
        };
        let Stored::Coded(tensor) = encoded.insert(stored) else { return Err(input.changed()) };
        let found = tensor.sections().find(|(name, _)| *name == section.name).map(|(_, bytes)| bytes);
        let sound = found.filter(|bytes| Digest::of(bytes) == section.digest);
        sound.map(|bytes| Pending::InMemory(bytes.to_vec())).ok_or_else(|| input.changed())
    }
}

/// Whether an entry describes this tensor, with the same role and layer.
fn matches_plan(entry: &TensorEntry, info: &TensorInfo, decision: &Decision) -> bool {
    (&entry.name, entry.dtype, &entry.shape, entry.role, entry.layer)
        == (&info.name, info.dtype, &info.shape, decision.role, decision.layer)
}
