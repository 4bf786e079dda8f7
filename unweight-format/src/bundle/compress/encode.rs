//! Encodes the tensors of a file.

use std::ops::Range;

use sha2::Sha256;

use super::{
    Job,
    tensor::{Encoded, Stored, encode_tensor},
    unit::{LoadedUnit, ShardPlan},
};
use crate::{
    Digest, EncodingId, Float, FloatMatrix, Histogram, NotEncodable, Section, StoredTensor, Survey,
    bits::delta,
    bundle::{
        BundleError,
        base::Base,
        blocks::Blocks,
        files::{self, Input},
        manifest::{SectionEntry, TensorEntry},
        pipeline::ReadUnit,
        plan::{Decision, EncodingChoice},
        source::SourceFile,
    },
    parallel,
    safetensors::TensorInfo,
};

impl Job<'_> {
    /// Encodes the tensors of a unit. A tensor in pieces is added to the hash of the file, if there is one.
    pub(super) fn encode_unit<'s>(
        &self,
        plan: &'s ShardPlan<'_>,
        loaded: &LoadedUnit<'_>,
        sha: Option<&mut Sha256>,
    ) -> Result<Vec<Encoded<'s>>, BundleError> {
        match loaded.unit.clone() {
            ReadUnit::Batch(range) => self.encode_batch(plan, range, loaded.tensors()),
            ReadUnit::Pieces(at) => {
                let (info, decision) = (&plan.header.tensors[at], &plan.layout.decisions[at]);
                Ok(vec![self.stream_raw_tensor(&loaded.input, info, decision, sha)?])
            }
        }
    }

    /// Encodes consecutive tensors in parallel.
    fn encode_batch<'s>(
        &self,
        plan: &'s ShardPlan<'_>,
        range: Range<usize>,
        bytes: &[u8],
    ) -> Result<Vec<Encoded<'s>>, BundleError> {
        let infos = &plan.header.tensors[range.clone()];
        let first = infos.first().map_or(0, |info| info.offset);
        parallel::try_map(infos.iter().zip(&plan.layout.decisions[range]), |(info, decision)| {
            let at = (info.offset - first) as usize;
            self.encode(plan.file, &bytes[at..at + info.bytes as usize], info, decision)
        })
    }

    /// Prepares a large raw tensor: its digest is computed now, its bytes are read again when it is written.
    fn stream_raw_tensor<'a>(
        &self,
        input: &Input,
        info: &'a TensorInfo,
        decision: &Decision,
        sha: Option<&mut Sha256>,
    ) -> Result<Encoded<'a>, BundleError> {
        self.progress.tensor(&info.name);
        let digest = self.hash_tensor(input, info, sha)?;
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
        let encode = || encode_tensor(bytes, info.dtype, decision.choice.clone(), self.options, self.encoder);
        let (digest, choice, stored) = self
            .trace
            .time("encode", info.bytes, encode)
            .map_err(|source| BundleError::Encoder { file: file.name.clone(), tensor: info.name.clone(), source })?;
        let (choice, stored, base) = self.or_delta(&file.name, bytes, (info, decision), (choice, stored))?;
        let (grid, coded): (_, Vec<(Section, &[u8])>) = match &stored {
            Stored::Coded(tensor) => (tensor.grid(), tensor.sections().collect()),
            _ => (None, Vec::new()),
        };
        let section_bytes = coded.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        let digests = || {
            parallel::map(coded, |(name, bytes)| {
                let blocks = grid.filter(|_| name == Section::PACKED).and_then(Blocks::of);
                let blocks = blocks.map_or_else(Vec::new, |blocks| blocks.digests(bytes));
                SectionEntry { name, bytes: bytes.len() as u64, digest: Digest::of(bytes), blocks }
            })
        };
        let sections: Vec<SectionEntry> = self.trace.time("digest", section_bytes, digests);
        let held_bytes = stored.held_bytes(info.bytes);
        let entry = TensorEntry { base, ..entry(info, decision, &choice, digest, sections) };
        self.progress.advance(info.bytes);
        Ok(Encoded { info, entry, stored, held_bytes })
    }

    /// Bytes held per byte of a tensor: the source and its encoding, which is not larger; with a base, also the
    /// differences and their encoding.
    pub(super) fn held_per_byte(&self) -> u64 {
        if self.base.is_some() { 4 } else { 2 }
    }

    /// Stores a tensor as differences from the base's tensor if that is smaller than `own`. Returns the digest of the
    /// base's tensor in that case.
    fn or_delta(
        &self,
        file: &str,
        bytes: &[u8],
        (info, decision): (&TensorInfo, &Decision),
        own: (EncodingChoice, Stored),
    ) -> Result<(EncodingChoice, Stored, Option<Digest>), BundleError> {
        let find = |base: &Base| base.find(file, &info.name, info.dtype, &info.shape);
        let (choice, stored) = own;
        // What is raw by request, by type or by shape stays raw.
        let floats = Float::of(info.dtype).zip(decision.choice.grid());
        let Some(((float, grid), (base, found))) = floats.zip(self.base.and_then(|base| Some((base, find(base)?))))
        else {
            return Ok((choice, stored, None));
        };
        let mut differences = files::buffer(info.bytes, base.path())?;
        let digest = base.read(found, &mut differences)?;
        delta::subtract(float, bytes, &mut differences);
        let survey = Survey { histogram: Histogram::default(), digest };
        let delta = FloatMatrix::new(float, &differences, grid.rows(), grid.cols())
            .map_err(NotEncodable::from)
            .and_then(|matrix| StoredTensor::encode(EncodingId::PLANES, matrix, &survey, self.options.code_limit));
        let own_bytes = match &stored {
            Stored::Coded(tensor) => tensor.stored_bytes(),
            _ => info.bytes,
        };
        match delta {
            Ok(tensor) if tensor.stored_bytes() < own_bytes => {
                Ok((EncodingChoice::of(EncodingId::PLANES, grid), Stored::Coded(tensor.into()), Some(digest)))
            }
            _ => Ok((choice, stored, None)),
        }
    }
}

fn entry(
    info: &TensorInfo,
    decision: &Decision,
    choice: &EncodingChoice,
    digest: Digest,
    sections: Vec<SectionEntry>,
) -> TensorEntry {
    TensorEntry {
        name: info.name.clone(),
        dtype: info.dtype,
        shape: info.shape.clone(),
        role: decision.role,
        layer: decision.layer,
        encoding: choice.encoding(),
        reason: choice.reason(),
        rows: choice.grid().map(|grid| grid.rows()),
        cols: choice.grid().map(|grid| grid.cols()),
        digest,
        base: None,
        sections,
    }
}
