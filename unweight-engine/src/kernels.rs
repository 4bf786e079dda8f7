//! Which kernels a model runs beside its linears.

use std::{collections::BTreeSet, sync::Arc};

use unweight_codegen::{
    VariantSpec,
    family::{Instruction, norm::COLUMNS_MAX, sample::VOCABULARY_MAX},
    spec::{
        Arch, AttentionSpec, AttentionStep, EmbedSource, EmbedSpec, NormSpec, Op, RopeHeadDim, RopeSpec, SampleSpec,
        SiluMulSpec, catalog,
    },
};
use unweight_model::ModelConfig;
use unweight_rt::{
    DeviceError, KernelSet,
    device::module::LoadedKernel,
    ops::{
        attention::{Attention, GROUP_MAX},
        embed::Embed,
        norm::Norm,
        rope::Rope,
        sample::Sample,
        silu_mul::SiluMul,
    },
};

use crate::{
    error::EngineError,
    options::{BUCKETS, bucket},
};

/// Variants of a model. All are programmatic dependents where the architecture has such: what a step launches is one
/// chain on one stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variants {
    embed: VariantSpec,
    norm: VariantSpec,
    silu_mul: VariantSpec,
    rope: VariantSpec,
    prefill: VariantSpec,
    /// By bucket, in the order of [`BUCKETS`].
    decode: Vec<(u32, VariantSpec)>,
    sample: VariantSpec,
}

impl Variants {
    /// Of a model whose embedding lies as `source` says, for batches up to `max_batch`.
    ///
    /// # Errors
    /// [`EngineError::Geometry`]: sizes that no kernel takes.
    pub fn of(config: &ModelConfig, arch: Arch, source: EmbedSource, max_batch: u32) -> Result<Self, EngineError> {
        check(config)?;
        let (largest, pdl) = (bucket(max_batch), arch.has(Instruction::DependentLaunch));
        let norm = catalog::on::<NormSpec>(arch)
            .filter(|spec| matches!(spec.op, Op::Norm(op) if op.pdl == pdl))
            .min_by_key(|spec| {
                match spec.op {
                    // Sixteen bytes a thread, or else as many threads as there are.
                    Op::Norm(op) if op.threads.get() * 8 >= config.hidden => (0, op.threads.get()),
                    Op::Norm(op) => (1, u32::MAX - op.threads.get()),
                    _ => (2, 0),
                }
            });
        let silu_mul =
            catalog::on::<SiluMulSpec>(arch).find(|spec| matches!(spec.op, Op::SiluMul(op) if op.pdl == pdl));
        let embed = catalog::on::<EmbedSpec>(arch)
            .find(|spec| matches!(spec.op, Op::Embed(op) if op.pdl == pdl && op.source == source));
        let rope = RopeHeadDim::new(config.head_dim).ok();
        let rope = rope.map(|head_dim| VariantSpec::rope(arch, RopeSpec { head_dim, pdl }));
        let sample = catalog::on::<SampleSpec>(arch)
            .filter(|spec| matches!(spec.op, Op::Sample(op) if op.pdl == pdl))
            .max_by_key(|spec| match spec.op {
                Op::Sample(op) => op.cluster.get(),
                _ => 0,
            });
        let prefill = attention(arch, AttentionStep::Prefill, config.head_dim, 4, 1);
        let buckets = BUCKETS.into_iter().filter(|bucket| *bucket <= largest);
        let decode = buckets.map(|bucket| {
            // A pair of a row and a KV head is a block's work, or a cluster's.
            let (warps, cluster) = shape(bucket * config.kv_heads);
            Some((bucket, attention(arch, AttentionStep::Decode, config.head_dim, warps, cluster)?))
        });
        let decode: Option<Vec<_>> = decode.collect();
        let all = (embed, norm, silu_mul, rope, prefill, decode, sample);
        let (Some(embed), Some(norm), Some(silu_mul), Some(rope), Some(prefill), Some(decode), Some(sample)) = all
        else {
            return Err(head_dim(config));
        };
        Ok(Self { embed, norm, silu_mul, rope, prefill, decode, sample })
    }

    /// All of them, each once.
    pub fn all(&self) -> Vec<VariantSpec> {
        let Self { embed, norm, silu_mul, rope, prefill, decode, sample } = self;
        let decode = decode.iter().map(|(_, spec)| *spec);
        let all = [*embed, *norm, *silu_mul, *rope, *prefill, *sample].into_iter().chain(decode);
        all.collect::<BTreeSet<_>>().into_iter().collect()
    }
}

/// Warps of a block and blocks of a cluster for so many pairs of a row and a KV head: what was fastest within a whole
/// step on an H200 with 132 multiprocessors (docs/records/h200-2026-11-22).
fn shape(pairs: u32) -> (u32, u32) {
    match pairs {
        0..24 => (4, 8),
        24..96 => (8, 2),
        _ => (8, 1),
    }
}

/// The shipped attention for heads of this size that is nearest to so many warps and blocks: those of sizes that few
/// models have come with clusters of one.
fn attention(arch: Arch, step: AttentionStep, head_dim: u32, warps: u32, cluster: u32) -> Option<VariantSpec> {
    let pdl = arch.has(Instruction::DependentLaunch);
    let of = |spec: &VariantSpec| match spec.op {
        Op::Attention(op) if op.step == step && op.head_dim.get() == head_dim && op.pdl == pdl => Some(op),
        _ => None,
    };
    let rank = |op: AttentionSpec| (op.warps.get() * op.cluster.get()).abs_diff(warps * cluster);
    let far = |op: AttentionSpec| (rank(op), op.warps.get().abs_diff(warps));
    catalog::on::<AttentionSpec>(arch).filter(|spec| of(spec).is_some()).min_by_key(|spec| of(spec).map(far))
}

fn head_dim(config: &ModelConfig) -> EngineError {
    EngineError::Geometry { key: "head_dim", value: config.head_dim, takes: "multiples of 16 up to 128" }
}

/// Refuses sizes that no kernel takes.
fn check(config: &ModelConfig) -> Result<(), EngineError> {
    let check = |key, value, ok, takes| if ok { Ok(()) } else { Err(EngineError::Geometry { key, value, takes }) };
    let ModelConfig { hidden, intermediate, heads, kv_heads, .. } = *config;
    let whole = hidden.is_multiple_of(8) && hidden <= COLUMNS_MAX;
    check("hidden_size", hidden, whole, "multiples of 8 up to 16384")?;
    check("vocab_size", config.vocab, config.vocab <= VOCABULARY_MAX, "up to 1048576")?;
    check("intermediate_size", intermediate, intermediate.is_multiple_of(8), "multiples of 8")?;
    check("num_attention_heads", heads, heads / kv_heads.max(1) <= GROUP_MAX, "16 for each KV head at most")?;
    let turned = config.rope.dim.is_multiple_of(4) && config.rope.dim <= config.head_dim;
    if turned && config.head_dim.is_multiple_of(16) { Ok(()) } else { Err(head_dim(config)) }
}

/// The kernels, loaded.
#[derive(Debug)]
pub struct Kernels {
    pub embed: Embed,
    pub norm: Norm,
    pub silu_mul: SiluMul,
    pub rope: Rope,
    pub prefill: Attention,
    pub sample: Sample,
    decode: Vec<(u32, Attention)>,
}

impl Kernels {
    /// Takes what [`KernelSet::prepare`] made ready, or makes it now.
    ///
    /// # Errors
    /// As for [`KernelSet::get`].
    pub fn load(kernels: &KernelSet, variants: &Variants) -> Result<Self, DeviceError> {
        let get = |spec: &VariantSpec| -> Result<Arc<LoadedKernel>, DeviceError> { kernels.get(spec) };
        let decode = variants.decode.iter();
        let decode = decode.map(|(bucket, spec)| Ok((*bucket, Attention::new(get(spec)?)?)));
        Ok(Self {
            embed: Embed::new(get(&variants.embed)?)?,
            norm: Norm::new(get(&variants.norm)?)?,
            silu_mul: SiluMul::new(get(&variants.silu_mul)?)?,
            rope: Rope::new(get(&variants.rope)?)?,
            prefill: Attention::new(get(&variants.prefill)?)?,
            sample: Sample::new(get(&variants.sample)?)?,
            decode: decode.collect::<Result<_, DeviceError>>()?,
        })
    }

    /// Attention of the newest tokens of so many rows; `None` above the largest bucket.
    pub fn decode(&self, rows: u32) -> Option<&Attention> {
        self.decode.iter().find(|(bucket, _)| *bucket >= rows).map(|(_, attention)| attention)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use unweight_codegen::plan::Plan;
    use unweight_model::Geometry;

    #[test]
    fn every_known_model_has_its_kernels() {
        for geometry in Geometry::ALL {
            for max_batch in [1, 16, 256] {
                let variants = Variants::of(&geometry.config(), Arch::Sm90a, EmbedSource::Bf16, max_batch).unwrap();
                let decode: Vec<u32> = variants.decode.iter().map(|(bucket, _)| *bucket).collect();
                let expected: Vec<u32> = BUCKETS.into_iter().filter(|rows| *rows <= bucket(max_batch)).collect();
                assert_eq!(decode, expected);
                let all = variants.all();
                assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len(), "each once");
                assert!(variants.all().iter().all(|spec| spec.name().ends_with("_pdl")), "{:?}", variants.all());
            }
        }
    }

    #[test]
    fn every_architecture_has_the_kernels_of_a_model() {
        for arch in Arch::ALL.iter().copied() {
            for geometry in Geometry::ALL {
                for source in [EmbedSource::Bf16, EmbedSource::Packed] {
                    let variants = Variants::of(&geometry.config(), arch, source, 256).unwrap();
                    assert!(variants.all().iter().all(|spec| spec.arch == arch && Plan::new(spec).is_ok()), "{arch:?}");
                }
            }
        }
    }

    #[test]
    fn small_batches_share_a_sequence_among_blocks() {
        let config = Geometry::named("llama-3.1-8b").unwrap().config();
        let variants = Variants::of(&config, Arch::Sm90a, EmbedSource::Packed, 256).unwrap();
        let shapes = variants.decode.iter().map(|(bucket, spec)| match spec.op {
            Op::Attention(op) => (*bucket, op.warps.get(), op.stages.get(), op.cluster.get()),
            _ => panic!("{spec:?}"),
        });
        let shapes: Vec<_> = shapes.collect();
        assert_eq!(shapes[..4], [(1, 4, 2, 8), (8, 8, 1, 2), (16, 8, 2, 1), (32, 8, 2, 1)]);
    }

    #[test]
    fn sizes_that_no_kernel_takes_are_named() {
        let config = Geometry::named("llama-3.1-8b").unwrap().config();
        let key = |change: &dyn Fn(&mut ModelConfig)| {
            let mut config = config.clone();
            change(&mut config);
            match Variants::of(&config, Arch::Sm90a, EmbedSource::Bf16, 8) {
                Err(EngineError::Geometry { key, .. }) => Some(key),
                _ => None,
            }
        };
        assert_eq!(key(&|_| ()), None);
        assert_eq!(key(&|config| config.hidden = 4100), Some("hidden_size"));
        assert_eq!(key(&|config| config.intermediate = 4), Some("intermediate_size"));
        assert_eq!(key(&|config| config.head_dim = 256), Some("head_dim"));
        assert_eq!(key(&|config| (config.heads, config.kv_heads) = (40, 2)), Some("num_attention_heads"));
    }
}
