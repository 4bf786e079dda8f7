//! The kernels that a model runs in addition to its linear layers.

use std::{collections::BTreeSet, sync::Arc};

use unweight_codegen::{
    VariantSpec,
    family::Instruction,
    kv::packed,
    spec::{
        Arch, AttentionStep, EmbedSource, EmbedSpec, GateFunction, HeadDim, KvCache, KvPackSpec, KvPackStage,
        KvUnpackSpec, LogprobsSpec, NormKind, NormSpec, Op, RopeHeadDim, RopeSpec, SampleSpec, ScaleForm, ScaleSpec,
        SiluMulSpec, catalog,
    },
};
use unweight_model::{Activation, ModelConfig, NormKind as ModelNorm, QkNorm, RopePairs};
use unweight_rt::{
    ContextSize, DeviceBuffer, DeviceError, ExecContext, KernelSet, LaunchError, MatrixMut,
    raw::{
        choose::cost::gpu_model::GpuModel,
        device::module::LoadedKernel,
        layer::experts as mixtures,
        ops::{
            attention::{Attention, GROUP_MAX},
            embed::Embed,
            kv_pack::KvPack,
            kv_unpack::KvUnpack,
            logprobs::Logprobs,
            norm::Norm,
            rope::Rope,
            sample::{AdjustedSample, Sample},
            scale::Scale,
            silu_mul::SiluMul,
        },
    },
};

use crate::{
    attention::{self, SplitPlan},
    budget::sizes,
    error::EngineError,
    kv_cache::PackedKernels,
    options::{BUCKETS, EngineOptions},
};

// `budget` may not name a module with launches, so it has a copy of this limit.
const _: () = assert!(sizes::GROUP_MAX == GROUP_MAX, "the budget checks what attention takes");

/// The kernel variants of a model. All use programmatic dependent launch if the architecture supports it, because a
/// step is one chain of launches on one stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variants {
    embed: VariantSpec,
    norm: VariantSpec,
    /// Norms what is added to the residual stream, if the model does.
    norm_add: Option<VariantSpec>,
    /// Scales embeddings and logits, if the model does.
    scale: Option<VariantSpec>,
    /// Scales what is added to the residual stream, and adds biases, if the model does.
    scale_add: Option<VariantSpec>,
    /// Caps logits, if the model has a soft cap.
    cap: Option<VariantSpec>,
    silu_mul: VariantSpec,
    rope: VariantSpec,
    prefill: VariantSpec,
    /// Attention by bucket, in the order of [`BUCKETS`].
    decode: Vec<Decode<VariantSpec>>,
    sample: VariantSpec,
    /// Launched after steps: sampling of rows with adjusted logits, and log probabilities.
    adjusted: VariantSpec,
    logprobs: VariantSpec,
    /// The kernels of experts, for mixture models.
    experts: Vec<VariantSpec>,
    /// The kernels of a packed KV cache: packing for a step, packing for a chunk, release of units, and unpacking.
    packed: Option<[VariantSpec; 4]>,
}

/// Attention of steps of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decode<K> {
    /// The bucket.
    rows: u32,
    /// The variant, or the loaded kernel.
    pub kernel: K,
    /// The number of blocks that split a row and KV head; 1 for a single block or cluster.
    pub splits: u32,
}

impl Variants {
    /// Chooses the variants of a model for an engine with these options on a device; `source` tells how the embedding
    /// is held.
    ///
    /// # Errors
    /// [`EngineError::Geometry`] for sizes that no kernel supports; [`EngineError::PackedHeads`] if the KV cache is
    /// packed and heads are too large for it.
    pub fn of(
        config: &ModelConfig,
        gpu: &GpuModel,
        source: EmbedSource,
        options: &EngineOptions,
    ) -> Result<Self, EngineError> {
        sizes::check(config)?;
        let cache = options.chosen_kv_cache();
        if cache == KvCache::Packed && !packed::takes(config.head_dim) {
            return Err(EngineError::PackedHeads { head_dim: config.head_dim });
        }
        let arch = gpu.arch;
        let (largest, pdl) = (options.step_rows(), arch.has(Instruction::DependentLaunch));
        let norm = norm_variant(arch, config, false);
        let norm_add = config.norms_what_is_added().then(|| norm_variant(arch, config, true)).flatten();
        let factors = config.factors;
        let scale = |form, factors: &[f32]| {
            let is_needed = factors.iter().any(|factor| *factor != 1.0);
            is_needed.then(|| VariantSpec::scale(arch, ScaleSpec { form, pdl }))
        };
        let scale_add = match adds_biases(config) {
            true => Some(VariantSpec::scale(arch, ScaleSpec { form: ScaleForm::Add, pdl })),
            false => scale(ScaleForm::Add, &[factors.residual]),
        };
        let scale = scale(ScaleForm::Mul, &[factors.embedding, factors.logits]);
        let cap = ScaleSpec { form: ScaleForm::Cap, pdl };
        let cap = config.soft_caps.logits.map(|_| VariantSpec::scale(arch, cap));
        let gate = match config.act {
            Activation::GeluTanh => GateFunction::Gelu,
            _ => GateFunction::Silu,
        };
        let silu_mul = catalog::on::<SiluMulSpec>(arch)
            .find(|spec| matches!(spec.op, Op::SiluMul(op) if (op.gate, op.pdl) == (gate, pdl)));
        let embed = catalog::on::<EmbedSpec>(arch)
            .find(|spec| matches!(spec.op, Op::Embed(op) if op.pdl == pdl && op.source == source));
        let rope = RopeHeadDim::new(config.head_dim).ok();
        let adjacent = config.rope.pairs == RopePairs::Adjacent;
        let plus_one = attention::norms_heads_plus_one(config);
        let rope = rope.map(|head_dim| VariantSpec::rope(arch, RopeSpec { head_dim, adjacent, plus_one, pdl }));
        let sampler = |adjusted: bool| {
            let samplers = catalog::on::<SampleSpec>(arch)
                .filter(move |spec| matches!(spec.op, Op::Sample(op) if op.pdl == pdl && op.adjusted == adjusted));
            samplers.max_by_key(|spec| match spec.op {
                Op::Sample(op) => op.cluster.get(),
                _ => 0,
            })
        };
        let logprobs =
            catalog::on::<LogprobsSpec>(arch).find(|spec| matches!(spec.op, Op::Logprobs(op) if op.pdl == pdl));
        let sample = sampler(false).zip(sampler(true)).zip(logprobs);
        let wanted = SplitPlan { warps: 4, ..SplitPlan::BLOCK };
        let prefill = attention::variant(arch, (AttentionStep::Prefill, KvCache::Bf16), config.head_dim, wanted)
            .map(|kernel| attention::of_model(kernel, config));
        let tokens = options.context.unwrap_or(config.max_positions).min(config.max_positions);
        let buckets = BUCKETS.into_iter().filter(|bucket| *bucket <= largest);
        let decode = buckets.map(|bucket| {
            let heads = (config.kv_heads, config.head_dim);
            let (kernel, splits) = attention::decode_variant(gpu, cache, heads, bucket, tokens)?;
            Some(Decode { rows: bucket, kernel: attention::of_model(kernel, config), splits })
        });
        let decode: Option<Vec<_>> = decode.collect();
        let all = (embed, norm, silu_mul, rope, prefill, decode, sample);
        let (
            Some(embed),
            Some(norm),
            Some(silu_mul),
            Some(rope),
            Some(prefill),
            Some(decode),
            Some(((sample, adjusted), logprobs)),
        ) = all
        else {
            return Err(sizes::unsupported_head_dim(config).into());
        };
        let mut experts = config.mixture.map_or_else(Vec::new, |_| mixtures::variants(arch));
        if options.resident_experts.is_some() {
            experts.extend(mixtures::offload_variants(arch));
        }
        let packed = (cache == KvCache::Packed).then(|| packed_variants(arch, config.head_dim)).flatten();
        Ok(Self {
            embed,
            norm,
            norm_add,
            scale,
            scale_add,
            cap,
            silu_mul,
            rope,
            prefill,
            decode,
            sample,
            adjusted,
            logprobs,
            experts,
            packed,
        })
    }

    /// All variants, without duplicates.
    pub fn all(&self) -> Vec<VariantSpec> {
        let Self { embed, norm, silu_mul, rope, prefill, decode, sample, adjusted, logprobs, experts, packed, .. } =
            self;
        let optional = [self.norm_add, self.scale, self.scale_add, self.cap].into_iter().flatten();
        let decode = decode.iter().map(|decode| decode.kernel).chain(experts.iter().copied());
        let decode = decode.chain(packed.iter().flatten().copied());
        let always = [*embed, *norm, *silu_mul, *rope, *prefill, *sample, *adjusted, *logprobs];
        let all = always.into_iter().chain(optional).chain(decode);
        all.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// The kernels of a packed KV cache; `None` if the cache is BF16.
    ///
    /// # Errors
    /// As for [`KernelSet::get`].
    pub fn load_packed(&self, kernels: &KernelSet) -> Result<Option<PackedKernels>, DeviceError> {
        let Some([step, chunk, release, unpack]) = &self.packed else { return Ok(None) };
        Ok(Some(PackedKernels {
            step: KvPack::new(kernels.get(step)?)?,
            chunk: KvPack::new(kernels.get(chunk)?)?,
            release: KvPack::new(kernels.get(release)?)?,
            unpack: KvUnpack::new(kernels.get(unpack)?)?,
        }))
    }
}

/// The norm variant for rows of the model's hidden size; with `add`, one that adds to its output.
fn norm_variant(arch: Arch, config: &ModelConfig, add: bool) -> Option<VariantSpec> {
    let pdl = arch.has(Instruction::DependentLaunch);
    let kind = match config.norm {
        ModelNorm::Rms => NormKind::Rms,
        ModelNorm::RmsOnce => NormKind::RmsOnce,
        ModelNorm::RmsPlusOne => NormKind::RmsPlusOne,
        ModelNorm::Layer => NormKind::Layer,
        ModelNorm::LayerBias => NormKind::LayerBias,
        _ => return None,
    };
    let threads_of = |spec: &VariantSpec| match spec.op {
        Op::Norm(op) if (op.kind, op.add, op.pdl) == (kind, add, pdl) => Some(op.threads.get()),
        _ => None,
    };
    // The fewest threads that cover a row with 16 bytes each, or else the most threads that a variant has.
    let rank = |threads: u32| if threads * 8 >= config.hidden { (0, threads) } else { (1, u32::MAX - threads) };
    catalog::on::<NormSpec>(arch)
        .filter(|spec| threads_of(spec).is_some())
        .min_by_key(|spec| threads_of(spec).map(rank))
}

/// Whether biases are added by a kernel of their own. Attention adds those of queries, keys and values, unless norms of
/// all heads together follow them.
fn adds_biases(config: &ModelConfig) -> bool {
    config.bias.o || config.bias.head || config.bias.qkv && config.qk_norm == QkNorm::Whole
}

/// The kernels of a packed KV cache with heads of this size.
fn packed_variants(arch: Arch, head_dim: u32) -> Option<[VariantSpec; 4]> {
    let (head_dim, pdl) = (HeadDim::new(head_dim).ok()?, arch.has(Instruction::DependentLaunch));
    let pack = |stage| VariantSpec::kv_pack(arch, KvPackSpec { stage, head_dim, pdl });
    Some([
        pack(KvPackStage::Step),
        pack(KvPackStage::Chunk),
        pack(KvPackStage::Release),
        VariantSpec::kv_unpack(arch, KvUnpackSpec { head_dim, pdl }),
    ])
}

/// The loaded kernels of a model.
#[derive(Debug)]
pub struct Kernels {
    pub embed: Embed,
    pub norm: Norm,
    pub norm_add: Option<Norm>,
    pub scale: Option<Scale>,
    pub scale_add: Option<Scale>,
    pub cap: Option<Scale>,
    pub silu_mul: SiluMul,
    pub rope: Rope,
    pub prefill: Attention,
    pub sample: Sample,
    pub adjusted: AdjustedSample,
    pub logprobs: Logprobs,
    decode: Vec<Decode<Attention>>,
}

impl Kernels {
    /// Loads the kernels that [`KernelSet::prepare`] prepared, or prepares them now.
    ///
    /// # Errors
    /// As for [`KernelSet::get`].
    pub fn load(kernels: &KernelSet, variants: &Variants) -> Result<Self, DeviceError> {
        let get = |spec: &VariantSpec| -> Result<Arc<LoadedKernel>, DeviceError> { kernels.get(spec) };
        let decode = variants.decode.iter();
        let decode = decode.map(|Decode { rows, kernel, splits }| {
            Ok(Decode { rows: *rows, kernel: Attention::new(get(kernel)?)?, splits: *splits })
        });
        Ok(Self {
            embed: Embed::new(get(&variants.embed)?)?,
            norm: Norm::new(get(&variants.norm)?)?,
            norm_add: variants.norm_add.map(|spec| Norm::new(get(&spec)?)).transpose()?,
            scale: variants.scale.map(|spec| Scale::new(get(&spec)?)).transpose()?,
            scale_add: variants.scale_add.map(|spec| Scale::new(get(&spec)?)).transpose()?,
            cap: variants.cap.map(|spec| Scale::new(get(&spec)?)).transpose()?,
            silu_mul: SiluMul::new(get(&variants.silu_mul)?)?,
            rope: Rope::new(get(&variants.rope)?)?,
            prefill: Attention::new(get(&variants.prefill)?)?,
            sample: Sample::new(get(&variants.sample)?)?,
            adjusted: AdjustedSample::new(get(&variants.adjusted)?)?,
            logprobs: Logprobs::new(get(&variants.logprobs)?)?,
            decode: decode.collect::<Result<_, DeviceError>>()?,
        })
    }

    /// Returns the attention of a step of `rows` rows; `None` above the largest bucket.
    pub fn decode_attention(&self, rows: u32) -> Option<&Decode<Attention>> {
        self.decode.iter().find(|decode| decode.rows >= rows)
    }

    /// Scales activations in place, unless the factor is 1.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails.
    pub fn scale(&self, ctx: &mut ExecContext, y: MatrixMut<'_>, factor: f32) -> Result<(), DeviceError> {
        match &self.scale {
            _ if factor == 1.0 => Ok(()),
            Some(scale) => scale.enqueue_in_place(ctx, y, factor),
            None => Err(LaunchError::Family { wanted: "a factor of activations" }.into()),
        }
    }

    /// Adds a bias times a factor to every row, if there is one.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails.
    pub fn add_bias(
        &self,
        ctx: &mut ExecContext,
        bias: Option<&DeviceBuffer<u16>>,
        factor: f32,
        y: MatrixMut<'_>,
    ) -> Result<(), DeviceError> {
        match (bias, &self.scale_add) {
            (None, _) => Ok(()),
            (Some(bias), Some(kernel)) => kernel.enqueue_row(ctx, bias, factor, y),
            (Some(_), None) => Err(LaunchError::Family { wanted: "a sum with a bias" }.into()),
        }
    }

    /// Caps logits in place, if they have a soft cap.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver fails.
    pub fn cap(&self, ctx: &mut ExecContext, y: MatrixMut<'_>, cap: Option<f32>) -> Result<(), DeviceError> {
        match (cap, &self.cap) {
            (None, _) => Ok(()),
            (Some(cap), Some(kernel)) => kernel.enqueue_in_place(ctx, y, cap),
            (Some(_), None) => Err(LaunchError::Family { wanted: "a soft cap of logits" }.into()),
        }
    }

    /// The execution context that the kernels need, at most [`attention::split_workspace_bytes`].
    ///
    /// # Errors
    /// [`DeviceError`] if a grid would have too many blocks.
    pub fn context_size(&self, kv_heads: u32) -> Result<ContextSize, DeviceError> {
        let mut each =
            self.decode.iter().map(|decode| decode.kernel.context_size(decode.rows, kv_heads, decode.splits));
        each.try_fold(ContextSize::default(), |all, size| Ok(all.max(size?)))
    }
}

#[cfg(test)]
mod tests {
    use unweight_codegen::plan::{GemmShape, Plan};
    use unweight_model::Geometry;
    use unweight_rt::raw::ops::attention::PARTS_MAX;

    use super::*;
    use crate::attention::{SMS_MAX, split_workspace_bytes};

    fn options(max_batch: u32) -> EngineOptions {
        EngineOptions::default().max_batch(max_batch)
    }

    #[test]
    fn every_known_model_has_its_kernels() {
        for geometry in Geometry::ALL {
            for max_batch in [1, 16, 256] {
                let config = geometry.config();
                let of = |options: &EngineOptions| {
                    Variants::of(&config, &GpuModel::H200, EmbedSource::Bf16, options).unwrap()
                };
                let packed = of(&options(max_batch).kv_cache(KvCache::Packed)).all();
                let cache_kernels = packed.iter().map(|spec| spec.name());
                let cache_kernels =
                    cache_kernels.filter(|name| name.contains("_packed") || name.contains("_kv_")).count();
                // Attention of steps, three packing kernels and an unpacking kernel.
                assert!(cache_kernels > 4, "{packed:?}");
                let variants = of(&options(max_batch));
                let decode: Vec<u32> = variants.decode.iter().map(|decode| decode.rows).collect();
                let expected: Vec<u32> =
                    BUCKETS.into_iter().filter(|rows| *rows <= options(max_batch).step_rows()).collect();
                assert_eq!(decode, expected);
                let all = variants.all();
                assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len(), "no duplicates");
                assert!(variants.all().iter().all(|spec| spec.name().contains("_pdl")), "{:?}", variants.all());
            }
        }
    }

    #[test]
    fn every_architecture_has_the_kernels_of_a_model() {
        for arch in Arch::ALL.iter().copied() {
            for geometry in Geometry::ALL {
                for source in [EmbedSource::Bf16, EmbedSource::Packed] {
                    let gpu = GpuModel::usual(arch);
                    let variants = Variants::of(&geometry.config(), &gpu, source, &options(256)).unwrap();
                    assert!(variants.all().iter().all(|spec| spec.arch == arch && Plan::new(spec).is_ok()), "{arch:?}");
                }
            }
        }
    }

    /// A family has the kernels of its features, and no others.
    #[test]
    fn families_have_kernels_of_their_features() {
        let with = |family: &str, more: &str, arch: Arch| {
            let json = format!(
                r#"{{"model_type": "{family}", "vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024,
                "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
                "embedding_multiplier": 12, "residual_multiplier": 0.22, "eos_token_id": 2, "bos_token_id": 1{more}}}"#
            );
            let config = ModelConfig::parse(&json, None).unwrap();
            let variants = Variants::of(&config, &GpuModel::usual(arch), EmbedSource::Packed, &options(8)).unwrap();
            let all = variants.all();
            assert!(all.iter().all(|spec| spec.arch == arch && Plan::new(spec).is_ok()), "{family}: {all:?}");
            all.iter().map(|spec| spec.to_string()).collect::<Vec<_>>().join(" ")
        };
        let names = |family: &str, arch: Arch| with(family, "", arch);
        for arch in Arch::ALL.iter().copied() {
            let llama = names("llama", arch);
            for family in ["phi3", "smollm3", "qwen3"] {
                assert_eq!(names(family, arch), llama, "{family}");
            }
            let has = |family: &str, parts: &[&str]| {
                let names = names(family, arch);
                let all = ["rms_once", "layer", "norm_t256_add", "once_add", "adjacent", "scale_mul", "scale_add"];
                let gemma = ["rms_plus_one", "rope_d128_plus_one", "softcap", "scale_cap", "gelu"];
                for part in all.into_iter().chain(gemma) {
                    assert_eq!(names.contains(part), parts.contains(&part), "{family} {part}: {names}");
                }
            };
            has("llama", &[]);
            has("phimoe", &["layer"]);
            assert!(names("phimoe", arch).contains("layer_bias") && !names("cohere", arch).contains("layer_bias"));
            for (family, more, adds) in [
                ("llama", r#", "attention_bias": true"#, true),
                ("phimoe", r#", "lm_head_bias": true"#, true),
                ("olmo2", r#", "attention_bias": true"#, true),
                ("glm4", r#", "attention_bias": true"#, false),
            ] {
                assert_eq!(with(family, more, arch).contains("scale_add"), adds, "{family}{more}");
            }
            has("granite", &["scale_mul", "scale_add"]);
            has("olmo2", &["rms_once", "once_add"]);
            has("glm4", &["norm_t256_add", "adjacent"]);
            has("cohere", &["layer", "adjacent", "scale_mul"]);
            has("gemma2", &["rms_plus_one", "softcap", "scale_cap", "gelu", "scale_mul"]);
            has("gemma3_text", &["rms_plus_one", "rope_d128_plus_one", "gelu", "scale_mul"]);
            let gemma3 = names("gemma3_text", arch);
            let mut decode = gemma3.split(' ').filter(|name| name.contains("attention_decode"));
            assert!(decode.all(|name| name.contains("plus_one")), "{gemma3}");
        }
    }

    /// Sums have the same order with both caches: the same warps, clusters and splits.
    #[test]
    fn both_caches_have_the_same_order_of_sums() {
        use unweight_codegen::spec::HeadDim;
        let mut cases = 0;
        for arch in Arch::ALL.iter().copied() {
            for sms in [20, 84, 132, 170] {
                let gpu = GpuModel { sms, ..GpuModel::usual(arch) };
                for head_dim in HeadDim::ALL.map(HeadDim::get) {
                    for (rows, kv_heads) in
                        BUCKETS.into_iter().flat_map(|rows| [1, 2, 8, 32].map(|heads| (rows, heads)))
                    {
                        for tokens in [64, 1000, 131_072] {
                            let order = |cache| {
                                let heads = (kv_heads, head_dim);
                                let (spec, splits) = attention::decode_variant(&gpu, cache, heads, rows, tokens)?;
                                match spec.op {
                                    Op::Attention(op) => Some((op.warps, op.cluster, op.split, splits)),
                                    _ => None,
                                }
                            };
                            let (bf16, packed) = (order(KvCache::Bf16), order(KvCache::Packed));
                            assert!(
                                bf16 == packed,
                                "{arch:?}, {sms}, {head_dim}, {rows} x {kv_heads}: {bf16:?}, {packed:?}"
                            );
                            cases += usize::from(bf16.is_some());
                        }
                    }
                }
            }
        }
        assert!(cases > 10_000, "{cases}");
    }

    /// Heads of 256 have kernels on every architecture, but only a BF16 cache.
    #[test]
    fn large_heads_have_only_a_bf16_cache() {
        let mut config = Geometry::named("llama-3.1-8b").unwrap().config();
        config.head_dim = 256;
        for arch in Arch::ALL.iter().copied() {
            let of =
                |options: &EngineOptions| Variants::of(&config, &GpuModel::usual(arch), EmbedSource::Bf16, options);
            for max_batch in [1, 16, 256] {
                let all = of(&options(max_batch)).unwrap().all();
                assert!(all.iter().all(|spec| Plan::new(spec).is_ok()), "{all:?}");
                assert!(all.iter().any(|spec| spec.to_string().contains("attention_prefill_d256")), "{all:?}");
            }
            let error = of(&options(1).kv_cache(KvCache::Packed)).unwrap_err();
            assert_eq!(
                error.to_string(),
                "kv_cache = packed supports heads of up to 128 elements, this model has heads of 256; use bf16"
            );
        }
    }

    #[test]
    fn small_batches_split_a_sequence_over_blocks() {
        let config = Geometry::named("llama-3.1-8b").unwrap().config();
        let variants = Variants::of(&config, &GpuModel::H200, EmbedSource::Packed, &options(256)).unwrap();
        let shapes = variants.decode.iter().map(|decode| match decode.kernel.op {
            Op::Attention(op) => (decode.rows, op.warps.get(), op.stages.get(), op.cluster.get(), decode.splits),
            _ => panic!("{decode:?}"),
        });
        let shapes: Vec<_> = shapes.collect();
        let expected = [(1, 4, 3, 8, 1), (8, 8, 2, 2, 1), (16, 8, 2, 1, 1), (32, 8, 2, 1, 1), (64, 4, 3, 1, 1)];
        assert_eq!(shapes[..5], expected);
    }

    /// The shape and the splits of attention, by bucket.
    fn shapes(model: &str, gpu: &GpuModel, options: &EngineOptions) -> Vec<(u32, String, u32)> {
        let config = Geometry::named(model).unwrap().config();
        let variants = Variants::of(&config, gpu, EmbedSource::Packed, options).unwrap();
        let shape = |decode: &Decode<VariantSpec>| {
            let name = decode.kernel.to_string();
            let shape = name.split_once("attention_decode_").expect("attention").1.to_owned();
            (decode.rows, shape, decode.splits)
        };
        variants.decode.iter().map(shape).collect()
    }

    #[test]
    fn attention_splits_of_five_gpus() {
        let shapes = |model, arch| {
            let all = shapes(model, &GpuModel::usual(arch), &options(32));
            all.into_iter().map(|(rows, shape, splits)| format!("{rows} {shape} x{splits}")).collect::<Vec<_>>()
        };
        let split = "d128_w4p2c1_split_async";
        let of = |splits: [u32; 4]| {
            [1, 8, 16, 32].into_iter().zip(splits).map(|(rows, splits)| format!("{rows} {split} x{splits}"))
        };
        // A100, RTX 3090, RTX 4090: 108, 82 and 128 multiprocessors for 8 KV heads, then 4.
        assert!(shapes("llama-3.1-8b", Arch::Sm80).into_iter().eq(of([13, 1, 1, 1])));
        assert!(shapes("llama-3.1-8b", Arch::Sm86).into_iter().eq(of([10, 1, 1, 1])));
        assert!(shapes("llama-3.1-8b", Arch::Sm89).into_iter().eq(of([16, 2, 1, 1])));
        assert!(shapes("qwen2.5-7b", Arch::Sm80).into_iter().eq(of([27, 3, 1, 1])));
        assert!(shapes("qwen2.5-7b", Arch::Sm89).into_iter().eq(of([32, 4, 2, 1])));
        // H200 and RTX 5090 have clusters; the RTX 5090 has 170 multiprocessors, and room for blocks of four warps
        // only.
        let h200 = ["1 d128_w4p3c8_pdl x1", "8 d128_w8p2c2_pdl x1", "16 d128_w8p2c1_pdl x1", "32 d128_w8p2c1_pdl x1"];
        assert_eq!(shapes("llama-3.1-8b", Arch::Sm90a), h200);
        let blackwell =
            ["1 d128_w4p2c8_pdl x1", "8 d128_w4p2c4_pdl x1", "16 d128_w4p2c2_pdl x1", "32 d128_w4p2c2_pdl x1"];
        assert_eq!(shapes("llama-3.1-8b", Arch::Sm120a), blackwell);
    }

    /// A step at batch 1 keeps a GPU without clusters busy, whatever its size, and no grid needs more workspace than
    /// was counted.
    #[test]
    fn attention_splits_fill_the_gpu_and_fit_their_workspace() {
        let config = Geometry::named("llama-3.1-8b").unwrap().config();
        for arch in Arch::ALL.iter().copied().filter(|arch| !arch.has(Instruction::Cluster)) {
            for sms in [1, 7, 20, 46, 58, 82, 84, 108, 128, 142, 192, 1000] {
                let gpu = GpuModel { sms, ..GpuModel::usual(arch) };
                for (rows, shape, splits) in shapes("llama-3.1-8b", &gpu, &options(256)) {
                    let (pairs, sms_used) = (rows * config.kv_heads, sms.min(SMS_MAX));
                    assert!(
                        (1..=PARTS_MAX).contains(&splits) && (splits == 1 || splits * pairs <= sms_used),
                        "{sms} {shape}"
                    );
                    let idle = sms_used.saturating_sub(splits * pairs);
                    assert!(idle < pairs || splits == PARTS_MAX, "{sms} {shape} x{splits}: {idle} are idle");
                    if splits > 1 {
                        let spec: VariantSpec = format!("uw_{}_attention_decode_{shape}", arch.tag()).parse().unwrap();
                        let plan = Plan::new(&spec).unwrap();
                        let need = ContextSize::from(plan.workspace(GemmShape::rows(splits * pairs), sms)).bytes();
                        assert!(need > 0 && need <= split_workspace_bytes(&config), "{sms} {shape}");
                    }
                }
            }
        }
    }

    #[test]
    fn short_contexts_have_no_empty_splits() {
        let splits = |context| {
            let options = options(1).context(context);
            shapes("llama-3.1-8b", &GpuModel::usual(Arch::Sm89), &options)[0].2
        };
        assert_eq!([1, 64, 65, 200, 1024, 131_072].map(splits), [1, 1, 2, 4, 16, 16]);
    }

    #[test]
    fn unsupported_sizes_are_named() {
        let config = Geometry::named("llama-3.1-8b").unwrap().config();
        let key = |change: &dyn Fn(&mut ModelConfig)| {
            let mut config = config.clone();
            change(&mut config);
            match Variants::of(&config, &GpuModel::H200, EmbedSource::Bf16, &options(8)) {
                Err(EngineError::Geometry(size)) => Some(size.key),
                _ => None,
            }
        };
        assert_eq!(key(&|_| ()), None);
        assert_eq!(key(&|config| config.hidden = 4100), Some("hidden_size"));
        assert_eq!(key(&|config| config.intermediate = 4), Some("intermediate_size"));
        assert_eq!(key(&|config| config.head_dim = 256), None);
        assert_eq!(key(&|config| config.head_dim = 192), Some("head_dim"));
        assert_eq!(key(&|config| (config.heads, config.kv_heads) = (40, 2)), Some("num_attention_heads"));
    }
}
