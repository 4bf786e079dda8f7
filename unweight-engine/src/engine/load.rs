//! Loads an engine from a bundle or with random weights.

use std::collections::{BTreeSet, HashSet, VecDeque};

use unweight_codegen::{VariantSpec, kv::packed, spec::EmbedSource};
#[cfg(feature = "pipelines")]
use unweight_format::bundle::Profile;
use unweight_format::{EncodingId, bundle::Bundle};
use unweight_model::{Activation, LayerWeights, ModelConfig, ModelWeights};
use unweight_rt::{
    ContextSize, ExecContext, KernelSet, LayerBuilder, LoadOptions, Loader, Placement, Stream,
    cache::Progress,
    experts::{Fetcher, OffloadedExperts},
    raw::choose::{candidates::has_compact_gemms, cost::gpu_model::GpuModel},
};

use super::{
    Engine, STEPS_AHEAD_MAX, StepShape, Stepper,
    draft_model::{DraftModel, DraftPlan},
};
use crate::{
    error::{EngineError, NoMemory},
    forward::Forward,
    kernels::{Kernels, Variants},
    kv_cache::KvStore,
    memory::{self, Memory, Products, Shared, experts_shape},
    options::{BUCKETS, EngineOptions, KvCache, OptionError, bucket, runs_pipelines},
    schedule::{Limits, Schedule, Speculation},
    weights::{ModelSource, Random, Weights, chain_mlp},
};
#[cfg(feature = "pipelines")]
use crate::{
    pipelines::{
        Pipelines, tuned,
        weights::{StoredMlps, kernels as stored_kernels},
    },
    weights::dense,
};

/// Progress of loading a model.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum LoadProgress<'a> {
    /// A kernel was compiled or found in the cache.
    Kernel(&'a Progress<'a>),
    /// The weights of a layer were copied to the device.
    Layers {
        /// The number of layers on the device.
        done: usize,
        /// The number of layers of the model.
        total: usize,
    },
}

/// What the random weights of [`Engine::random_stored`] imitate.
#[cfg(feature = "pipelines")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RandomStored {
    /// The profile of a bundle with such MLPs; `None` for BF16.
    pub profile: Option<Profile>,
    /// The placement of the linear layers outside of MLPs, packed by default. The report uses BF16.
    pub linears: Placement,
}

impl Engine {
    /// Loads the model of a bundle to the device of `kernels`, and compiles the kernels that the cache lacks.
    /// `progress` receives every kernel and layer.
    ///
    /// # Errors
    /// [`EngineError::Config`], [`EngineError::Bind`] and [`EngineError::Geometry`] for a model that the engine does
    /// not support; [`EngineError::Memory`] and [`EngineError::HostMemory`] if it does not fit; [`EngineError::Option`]
    /// for an option out of range; [`EngineError::Load`] and [`EngineError::Device`] for failures of tensors, kernels
    /// and the device.
    pub fn load(
        kernels: &KernelSet,
        bundle: &Bundle,
        options: EngineOptions,
        progress: &(dyn Fn(&LoadProgress<'_>) + Sync),
    ) -> Result<Self, EngineError> {
        load(kernels, (bundle, None), options, progress)
    }

    /// Like [`Engine::load`], with a smaller model of the same vocabulary that drafts tokens
    /// ([`EngineOptions::speculate`]). It samples like the sequence that it drafts for, takes a part of
    /// [`EngineOptions::memory`], and drafts up to its own context.
    ///
    /// # Errors
    /// As for [`Engine::load`]; [`EngineError::Draft`] if the draft model cannot be loaded,
    /// [`EngineError::DraftVocabulary`] and [`EngineError::DraftMixture`] if it cannot draft for the other,
    /// [`EngineError::Option`] if [`EngineOptions::speculate`] is 0.
    pub fn load_with_draft(
        kernels: &KernelSet,
        bundle: &Bundle,
        draft: &Bundle,
        options: EngineOptions,
        progress: &(dyn Fn(&LoadProgress<'_>) + Sync),
    ) -> Result<Self, EngineError> {
        load(kernels, (bundle, Some(draft)), options, progress)
    }

    /// Loads a model of this configuration with random weights, for measurements, and a draft model of the
    /// configuration `draft`, if there is one.
    ///
    /// # Errors
    /// As for [`Engine::load_with_draft`].
    pub fn random(
        kernels: &KernelSet,
        config: ModelConfig,
        draft: Option<ModelConfig>,
        options: EngineOptions,
        progress: &(dyn Fn(&LoadProgress<'_>) + Sync),
    ) -> Result<Self, EngineError> {
        random(kernels, (config, draft), options, &|_, _| {}, progress)
    }

    /// Like [`Engine::random`], with the MLP weights in the encodings of `stored` if the placement is
    /// [`Placement::Stored`] or [`Placement::Alternate`].
    ///
    /// # Errors
    /// As for [`Engine::load`].
    #[cfg(feature = "pipelines")]
    pub fn random_stored(
        kernels: &KernelSet,
        config: ModelConfig,
        options: EngineOptions,
        stored: RandomStored,
        progress: &(dyn Fn(&LoadProgress<'_>) + Sync),
    ) -> Result<Self, EngineError> {
        let has_pipelines = options.placement.unwrap_or_default().has_pipelines();
        let imitate = |source: &mut Random<'_>, names: &ModelWeights| {
            if let Some(profile) = stored.profile {
                source.imitate(names, profile);
            }
            if has_pipelines {
                source.builder().set_placement(stored.linears);
            }
        };
        random(kernels, (config, None), options, &imitate, progress)
    }

    /// Returns the kernels that the model of a bundle needs on any of these devices, without duplicates and without
    /// those of its linear layers, which [`loader::reachable`](unweight_rt::raw::layer::loader::reachable) lists. With
    /// [`Placement::Stored`] and [`Placement::Alternate`], the tensors of MLPs are read. If the options name no KV
    /// cache, the kernels of both are included.
    ///
    /// # Errors
    /// As for [`Engine::load`], for the configuration and the tensors.
    pub fn kernels(
        bundle: &Bundle,
        options: &EngineOptions,
        gpu_models: &[GpuModel],
    ) -> Result<Vec<VariantSpec>, EngineError> {
        let config = ModelConfig::of_bundle(bundle)?;
        let names = ModelWeights::of_bundle(&config, bundle)?;
        // An embedding that cannot be packed stays BF16; whether it can is known only from its weights.
        let placement = options.placement.unwrap_or_default();
        let sources: &[EmbedSource] = match placement {
            Placement::Bf16 => &[EmbedSource::Bf16],
            _ => &[EmbedSource::Bf16, EmbedSource::Packed],
        };
        let mut all = BTreeSet::new();
        let caches = match &options.kv_cache {
            Some(kv_cache) => std::slice::from_ref(kv_cache),
            None if packed::takes(config.head_dim) => KvCache::ALL,
            None => &[KvCache::Bf16],
        };
        for kv_cache in caches {
            let options = options.clone().kv_cache(*kv_cache);
            for gpu_model in gpu_models {
                for source in sources {
                    all.extend(Variants::of(&config, gpu_model, *source, &options)?.all());
                }
            }
        }
        if placement.has_pipelines() {
            check_pipelines(&config, placement)?;
            all.extend(pipeline_kernels(bundle, (&config, &names), placement, gpu_models)?);
        }
        Ok(all.into_iter().collect())
    }
}

/// Loads the model of a bundle, and a draft model.
fn load(
    kernels: &KernelSet,
    (bundle, draft): (&Bundle, Option<&Bundle>),
    options: EngineOptions,
    progress: &(dyn Fn(&LoadProgress<'_>) + Sync),
) -> Result<Engine, EngineError> {
    let config = ModelConfig::of_bundle(bundle)?;
    let names = ModelWeights::of_bundle(&config, bundle)?;
    let draft = match draft {
        Some(draft) => {
            let draft_config = ModelConfig::of_bundle(draft).map_err(|error| draft_error(error.into()))?;
            let names = ModelWeights::of_bundle(&draft_config, draft).map_err(|error| draft_error(error.into()))?;
            Some((draft, DraftPlan::new((draft_config, names), &config, &options)?))
        }
        None => None,
    };
    let compiled = |kernel: &Progress<'_>| progress(&LoadProgress::Kernel(kernel));
    let draft_plan = draft.as_ref().map(|(_, plan)| plan);
    let stored = WeightBytes::of(&config, &names, bundle);
    let mut plan = LoadPlan::new(kernels, &config, options, stored, draft_plan, &compiled)?;
    if let Some((draft, DraftPlan { config, names, options })) = draft {
        let stored = WeightBytes::of(&config, &names, draft);
        let draft_plan = plan.for_draft(kernels, &config, options, stored, &compiled);
        plan.set_draft(draft_plan.and_then(|plan| plan.load(kernels, draft, (config, &names), progress)))?;
    }
    plan.load(kernels, bundle, (config, &names), progress)
}

/// Loads random weights, also of a draft model; `imitate` may set the encodings of the others.
fn random(
    kernels: &KernelSet,
    (config, draft): (ModelConfig, Option<ModelConfig>),
    options: EngineOptions,
    imitate: &dyn Fn(&mut Random<'_>, &ModelWeights),
    progress: &(dyn Fn(&LoadProgress<'_>) + Sync),
) -> Result<Engine, EngineError> {
    let compiled = |kernel: &Progress<'_>| progress(&LoadProgress::Kernel(kernel));
    let draft = match draft {
        Some(draft) => {
            let names = ModelWeights::named(&draft);
            Some(DraftPlan::new((draft, names), &config, &options)?)
        }
        None => None,
    };
    let mut plan = LoadPlan::new(kernels, &config, options, WeightBytes::random(&config), draft.as_ref(), &compiled)?;
    if let Some(DraftPlan { config, options, .. }) = draft {
        let draft_plan = plan.for_draft(kernels, &config, options, WeightBytes::random(&config), &compiled);
        plan.set_draft(draft_plan.and_then(|plan| plan.load_random(kernels, config, &|_, _| {}, progress)))?;
    }
    plan.load_random(kernels, config, imitate, progress)
}

/// Returns the error of loading a draft model.
fn draft_error(error: EngineError) -> EngineError {
    EngineError::Draft(error.into())
}

/// How the embedding is held if its values can be packed. A tied embedding is padded like the head; an untied one is
/// not.
fn embed_source(config: &ModelConfig, placement: Placement) -> EmbedSource {
    let whole = config.tied || config.vocab.is_multiple_of(64) && config.hidden.is_multiple_of(64);
    if whole && placement != Placement::Bf16 { EmbedSource::Packed } else { EmbedSource::Bf16 }
}

/// Returns the error of a model that does not fit next to a draft model of `draft` bytes; 0 without one.
fn no_memory(draft: u64) -> impl Fn(NoMemory) -> EngineError {
    move |error| if draft > 0 { EngineError::MemoryWithDraft { draft, error } } else { error.into() }
}

fn check_pipelines(config: &ModelConfig, placement: Placement) -> Result<(), EngineError> {
    if placement.has_pipelines() && config.mixture.is_some() {
        return Err(EngineError::StoredExperts(placement));
    }
    if !placement.has_pipelines() || runs_pipelines(config) {
        return Ok(());
    }
    Err(EngineError::StoredFamily { placement, family: config.family })
}

/// What is known before the weights are loaded.
struct LoadPlan {
    options: EngineOptions,
    stream: Stream,
    /// Bytes of device memory that may be used, without `draft_bytes`.
    have: u64,
    /// Bytes of device memory that a draft model may use.
    draft_bytes: u64,
    draft_model: Option<DraftModel>,
}

/// The bytes of a model's weights, packed and with its compact tensors kept compact.
#[derive(Clone, Copy, Debug)]
struct WeightBytes {
    /// Bytes with every tensor packed that can be.
    packed: u64,
    /// Bytes with compact tensors kept compact; `None` if no tensor is compact.
    compact: Option<u64>,
}

impl WeightBytes {
    fn of(config: &ModelConfig, names: &ModelWeights, bundle: &Bundle) -> Self {
        let packed = config.weight_bytes(Placement::Packed);
        let mut saved = 0u64;
        let tied = names.embed == names.lm_head;
        let experts: HashSet<&str> = names.layers.iter().flat_map(|layer| layer.mlp.expert_tensors()).collect();
        for tensor in bundle.tensors().filter(|tensor| tensor.encoding() == EncodingId::COMPACT) {
            let name = &tensor.entry().name;
            // Experts, and tensors that ids are looked up in, are packed.
            if experts.contains(name.as_str()) || *name == names.embed || tied && *name == names.lm_head {
                continue;
            }
            let elements = tensor.entry().shape.iter().map(|extent| *extent as u64).product::<u64>();
            saved = saved.saturating_add((elements / 2 * 3).saturating_sub(tensor.entry().stored_bytes()));
        }
        let compact = (saved > 0).then(|| packed.saturating_sub(saved));
        Self { packed, compact }
    }

    /// Subtracts the experts without room on the device, where experts are packed in both cases.
    fn without(self, options: &EngineOptions, config: &ModelConfig) -> Self {
        let offloaded = offloaded_bytes(options, config, Placement::Packed);
        let without_offloaded = |bytes: u64| bytes.saturating_sub(offloaded);
        Self { packed: without_offloaded(self.packed), compact: self.compact.map(without_offloaded) }
    }

    /// The bytes of random weights.
    fn random(config: &ModelConfig) -> Self {
        let of = |placement| config.weight_bytes(placement);
        Self { packed: of(Placement::Packed), compact: Some(of(Placement::Compact)) }
    }
}

/// Adapts the options to the model's experts. Nothing is offloaded if the device may hold all of them. A step that
/// waits for the host cannot be recorded as a graph.
fn offloading(options: EngineOptions, config: &ModelConfig) -> Result<EngineOptions, EngineError> {
    let Some(resident) = options.resident_experts else { return Ok(options) };
    let mixture = config.mixture.ok_or(EngineError::NoExperts(resident))?;
    if resident >= mixture.all_experts() {
        return Ok(EngineOptions { resident_experts: None, ..options });
    }
    let all = u64::from(mixture.all_experts()) * u64::from(config.mixture_layers());
    let in_host_memory = match options.placement {
        Some(Placement::Bf16) => Placement::Bf16,
        _ if options.compact_experts => Placement::Compact,
        _ => Placement::Packed,
    };
    // An estimate. Each layer is checked again before it is loaded.
    memory::check_host(all.saturating_mul(config.expert_bytes(in_host_memory)))?;
    Ok(options.graphs(false))
}

/// Bytes that a step of 1 row reads of `weights` bytes: of the experts, it reads the chosen ones.
fn read_bytes(config: &ModelConfig, weights: u64) -> u64 {
    let others = config.mixture.map_or(0, |mixture| mixture.experts.saturating_sub(mixture.top_k));
    let others = u64::from(others) * u64::from(config.mixture_layers());
    weights.saturating_sub(others.saturating_mul(config.expert_bytes(Placement::Packed)))
}

/// Bytes that the experts without room on the device would take there.
fn offloaded_bytes(options: &EngineOptions, config: &ModelConfig, placement: Placement) -> u64 {
    let (Some(resident), Some(mixture)) = (options.resident_experts, config.mixture) else { return 0 };
    let others = u64::from(mixture.all_experts().saturating_sub(resident)) * u64::from(config.mixture_layers());
    others.saturating_mul(config.expert_bytes(placement))
}

impl LoadPlan {
    fn new(
        kernels: &KernelSet,
        config: &ModelConfig,
        options: EngineOptions,
        stored: WeightBytes,
        draft: Option<&DraftPlan>,
        progress: &(dyn Fn(&Progress<'_>) + Sync),
    ) -> Result<Self, EngineError> {
        options.check()?;
        if let Some(placement) = options.placement.filter(|placement| placement.has_pipelines())
            && cfg!(not(feature = "pipelines"))
        {
            return Err(EngineError::NoPipelines(placement));
        }
        if let Some(context) = options.context.filter(|context| *context > config.max_positions) {
            let range = "at most the model's max_position_embeddings";
            return Err(OptionError { name: "context", value: context.into(), range }.into());
        }
        options.placement.map_or(Ok(()), |placement| check_pipelines(config, placement))?;
        let device = kernels.device();
        let (free, _) = device.memory()?;
        let have = options.memory.unwrap_or(memory::usual_share(free as u64)).min(free as u64);
        let arch = device.info().arch;
        let mut draft_bytes = draft.map_or(0, |draft| draft.fixed_bytes(kernels.chooser()));
        let mut have = have.saturating_sub(draft_bytes);
        let options = offloading(options, config)?;
        let stored = stored.without(&options, config);
        let options = options.settled(config, (stored.packed, stored.compact), has_compact_gemms(arch), have);
        let placement = options.placement.unwrap_or_default();
        // Fails before minutes are spent on weights that do not fit. Stored weights may be smaller than packed ones.
        let weight_bytes = match (placement, stored.compact) {
            (Placement::Stored | Placement::Alternate, _) => 0,
            (Placement::Bf16, _) => {
                config.weight_bytes(Placement::Bf16).saturating_sub(offloaded_bytes(&options, config, Placement::Bf16))
            }
            (Placement::Compact, Some(compact)) => compact,
            _ => stored.packed,
        };
        let plan = |draft_bytes, have| {
            memory::plan(config, &options, (weight_bytes, Shared::default()), have).map_err(no_memory(draft_bytes))
        };
        let memory = plan(draft_bytes, have)?;
        if let Some(draft) = draft {
            let cache_bytes = draft.cache_bytes(&memory, options.context, have);
            (draft_bytes, have) = (draft_bytes + cache_bytes, have.saturating_sub(cache_bytes));
            plan(draft_bytes, have)?;
        }
        let source = embed_source(config, placement);
        let variants = Variants::of(config, &device.info().into(), source, &options)?;
        kernels.prepare(&variants.all(), progress)?;
        Ok(Self { stream: device.stream()?, options, have, draft_bytes, draft_model: None })
    }

    /// Plans a draft model in the memory kept for it. It runs on the same stream, so that kernels of both models never
    /// run at the same time.
    fn for_draft(
        &self,
        kernels: &KernelSet,
        config: &ModelConfig,
        options: EngineOptions,
        stored: WeightBytes,
        progress: &(dyn Fn(&Progress<'_>) + Sync),
    ) -> Result<Self, EngineError> {
        let plan = Self::new(kernels, config, options.memory(self.draft_bytes), stored, None, progress)?;
        Ok(Self { stream: self.stream.clone(), ..plan })
    }

    fn set_draft(&mut self, loaded: Result<Engine, EngineError>) -> Result<(), EngineError> {
        self.draft_model = Some(DraftModel::new(loaded.map_err(draft_error)?));
        Ok(())
    }

    /// Loads the model of a bundle.
    fn load(
        self,
        kernels: &KernelSet,
        bundle: &Bundle,
        (config, names): (ModelConfig, &ModelWeights),
        progress: &(dyn Fn(&LoadProgress<'_>) + Sync),
    ) -> Result<Engine, EngineError> {
        let compiled = |kernel: &Progress<'_>| progress(&LoadProgress::Kernel(kernel));
        let (mut source, _) = Loader::new(kernels, &self.stream, bundle, self.load_options(&config), &compiled)?;
        source.builder().set_compact_experts(self.options.compact_experts);
        let weights = self.weights(kernels, &mut source, &config, names, progress)?;
        let ctx = source.context(&self.stream)?;
        // Frees the buffers in which layers were merged, before the cache takes the remaining memory.
        drop(source);
        let model = bundle.manifest().manifest_digest.to_string();
        self.finish(kernels, config, weights, ctx, &model, &compiled)
    }

    /// Loads random weights, after `imitate` set their encodings.
    fn load_random(
        self,
        kernels: &KernelSet,
        config: ModelConfig,
        imitate: &dyn Fn(&mut Random<'_>, &ModelWeights),
        progress: &(dyn Fn(&LoadProgress<'_>) + Sync),
    ) -> Result<Engine, EngineError> {
        let compiled = |kernel: &Progress<'_>| progress(&LoadProgress::Kernel(kernel));
        let names = ModelWeights::named(&config);
        let builder = LayerBuilder::new(kernels, &self.stream, self.load_options(&config))?;
        let shapes = config.linears().into_iter().chain(config.dense_linears().into_iter().flatten());
        let shapes = shapes.chain([[config.vocab, config.hidden]]);
        let largest = shapes.map(|[n, k]| u64::from(n) * u64::from(k)).max().unwrap_or(0);
        let mut source = Random::new(builder, largest)?;
        imitate(&mut source, &names);
        source.builder().set_compact_experts(self.options.compact_experts);
        let weights = self.weights(kernels, &mut source, &config, &names, progress)?;
        let ctx = source.builder().context(&self.stream)?;
        drop(source);
        self.finish(kernels, config, weights, ctx, "random", &compiled)
    }

    fn load_options(&self, config: &ModelConfig) -> LoadOptions {
        memory::load_options(&self.options).fused_gate(config.act == Activation::Silu)
    }

    fn weights<S: ModelSource>(
        &self,
        #[cfg_attr(not(feature = "pipelines"), expect(unused_variables))] kernels: &KernelSet,
        source: &mut S,
        config: &ModelConfig,
        names: &ModelWeights,
        progress: &(dyn Fn(&LoadProgress<'_>) + Sync),
    ) -> Result<Weights, EngineError> {
        let total = names.layers.len();
        let report_layers = |done| progress(&LoadProgress::Layers { done, total });
        let experts = self.options.resident_experts;
        match self.options.placement.unwrap_or_default() {
            #[cfg(feature = "pipelines")]
            placement if placement.has_pipelines() => {
                let mut stored = StoredMlps::new(kernels, &self.stream, placement)?;
                let mut mlp = |source: &mut S, layer: &LayerWeights| stored.load(source, config, layer);
                Weights::load(source, config, names, &mut mlp, &report_layers)
            }
            #[cfg(not(feature = "pipelines"))]
            placement if placement.has_pipelines() => Err(EngineError::NoPipelines(placement)),
            _ => {
                let mut mlp = |source: &mut S, layer: &LayerWeights| chain_mlp(source, config, experts, layer);
                Weights::load(source, config, names, &mut mlp, &report_layers)
            }
        }
    }

    fn finish(
        self,
        kernels: &KernelSet,
        config: ModelConfig,
        weights: Weights,
        mut ctx: ExecContext,
        model: &str,
        progress: &(dyn Fn(&Progress<'_>) + Sync),
    ) -> Result<Engine, EngineError> {
        let Self { options, stream, have, draft_model, draft_bytes } = self;
        let products = if options.placement.unwrap_or_default().has_pipelines() {
            Products::Stored
        } else if weights.layers.iter().all(|layer| layer.mlp.gate_up().is_none_or(|(_, gated)| gated)) {
            Products::Activated
        } else {
            Products::SeparateActivation
        };
        let buckets: Vec<u32> = BUCKETS.into_iter().filter(|rows| *rows <= options.step_rows()).collect();
        if let Some(mixture) = config.mixture {
            let experts = weights.layers.iter().filter_map(|layer| layer.mlp.mixture());
            let rows = memory::rows(&options);
            let size = experts.map(|(_, experts)| experts.context_size(rows, mixture.places()));
            ctx.reserve(size.fold(ContextSize::default(), ContextSize::max))?;
        }
        if products == Products::Stored {
            ctx.reserve(ContextSize::default().with_cublas())?;
        }
        let slot = ctx.size().slot_bytes;
        let mut shared = ctx.size().bytes() + products.bytes(config.dense_intermediate(), memory::rows(&options));
        let (mut stepper, stepper_bytes) =
            stepper(kernels, &stream, &weights, (&options, &buckets), (model, progress))?;
        shared += stepper_bytes;
        if let (Some(_), Some(shape), Some(mixture)) =
            (options.resident_experts, experts_shape(&config), config.mixture)
        {
            shared += Fetcher::bytes(shape, memory::rows(&options), mixture.places()) + OffloadedExperts::link_bytes();
        }
        let shared = Shared { bytes: shared, expansion_bytes: slot };
        let memory =
            memory::plan(&config, &options, (weights.bytes(), shared), have).map_err(no_memory(draft_bytes))?;
        let memory = Memory {
            host: weights.offloaded().map(OffloadedExperts::host_bytes).sum(),
            host_compact: weights.offloaded().map(OffloadedExperts::host_compact_bytes).sum(),
            draft: draft_model.as_ref().map_or(0, DraftModel::bytes),
            ..memory
        };
        let source = if weights.embed_is_packed() { EmbedSource::Packed } else { EmbedSource::Bf16 };
        let variants = Variants::of(&config, &kernels.device().info().into(), source, &options)?;
        let engine_kernels = Kernels::load(kernels, &variants)?;
        // These bytes are counted with the activations.
        ctx.reserve(engine_kernels.context_size(config.kv_heads)?)?;
        let packed = variants.load_packed(kernels)?;
        let cache = KvStore::new(&stream, &config, &memory, options.step_rows(), packed)?;
        let mut forward = Forward::new(ctx, (engine_kernels, cache), &config, &options, &memory, products)?;
        let mut graphs = Vec::new();
        if options.graphs {
            let rows_max = bucket(options.verified_rows());
            let verified = buckets.iter().copied().filter(|rows| (2..=rows_max).contains(rows));
            let verified = verified.map(|rows| StepShape { rows, verifies: true });
            let plain = buckets.iter().map(|rows| StepShape::plain(*rows));
            for shape in plain.chain(verified) {
                // Drivers load kernels lazily at their first launch, which a capture does not allow.
                forward.set_rows(&[], shape.rows)?;
                stepper.enqueue_step(&mut forward, &weights, shape)?;
                stream.synchronize()?;
                let recorded = stream.capture(|| stepper.enqueue_step(&mut forward, &weights, shape));
                graphs.push((shape, recorded?));
            }
        }
        // More than 2^32 tokens make no difference.
        let weight_tokens = u32::try_from(memory.weights / memory.token.max(1)).unwrap_or(u32::MAX);
        let speculation = Speculation::of(&options, config.mixture.is_some(), weight_tokens);
        let limits = Limits {
            max_batch: options.max_batch,
            context: memory.context,
            vocab: config.vocab,
            steps_ahead_max: STEPS_AHEAD_MAX,
            waiting_max: options.waiting,
            kv_cache: memory.kv_cache,
            chunk: forward.chunk_rows(),
            mixes: options.mixes(),
            shares_prefixes: options.prefix_cache,
            adjusted_max: memory::adjusted_rows(&options),
            speculation: match &draft_model {
                Some(model) => model.speculate(speculation, read_bytes(&config, memory.weights), config.layers),
                None => speculation,
            },
        };
        let schedule = Schedule::new(limits, memory.pages);
        Ok(Engine {
            // All units are free.
            last_free_units: (memory.kv_cache == KvCache::Packed).then_some(memory.units),
            config,
            options,
            memory,
            schedule,
            in_flight: VecDeque::new(),
            pending_events: Vec::new(),
            spare: Vec::new(),
            spare_logprobs: Vec::new(),
            graphs,
            forward,
            stepper,
            weights,
            draft_model,
            failed: false,
        })
    }
}

/// Returns how the engine enqueues steps of `buckets` and chunks, and the additional bytes of that.
#[cfg(feature = "pipelines")]
fn stepper(
    kernels: &KernelSet,
    stream: &Stream,
    weights: &Weights,
    (options, buckets): (&EngineOptions, &[u32]),
    (model, progress): (&str, &(dyn Fn(&Progress<'_>) + Sync)),
) -> Result<(Stepper, u64), EngineError> {
    let placement = options.placement.unwrap_or_default();
    if !placement.has_pipelines() {
        return Ok((Stepper::Chain, 0));
    }
    let device = kernels.device().info();
    let setting_of = |batch| options.plan.setting(batch, &tuned::key(model, placement, batch, device)).cloned();
    let pipelines = Pipelines::new(kernels, stream, weights, (buckets, options.chunk), &setting_of, progress)?;
    let bytes = pipelines.bytes();
    Ok((Stepper::Pipelines(pipelines.into()), bytes))
}

/// Returns how the engine enqueues steps, and the bytes that this needs in addition.
#[cfg(not(feature = "pipelines"))]
fn stepper(
    _: &KernelSet,
    _: &Stream,
    _: &Weights,
    _: (&EngineOptions, &[u32]),
    _: (&str, &(dyn Fn(&Progress<'_>) + Sync)),
) -> Result<(Stepper, u64), EngineError> {
    Ok((Stepper::Chain, 0))
}

/// Returns the kernels of MLPs that are loaded in their stored encodings.
#[cfg(feature = "pipelines")]
fn pipeline_kernels(
    bundle: &Bundle,
    (config, names): (&ModelConfig, &ModelWeights),
    placement: Placement,
    gpu_models: &[GpuModel],
) -> Result<Vec<VariantSpec>, EngineError> {
    let mlps = names.layers.iter().map(|layer| dense(placement, layer)).collect::<Result<Vec<_>, _>>()?;
    let archs: BTreeSet<_> = gpu_models.iter().map(|gpu_model| gpu_model.arch).collect();
    let each = archs.into_iter().map(|arch| stored_kernels(bundle, config, mlps.iter().copied(), placement, arch));
    Ok(each.collect::<Result<Vec<_>, _>>()?.concat())
}

/// Fails: this build has no kernels of pipelines.
#[cfg(not(feature = "pipelines"))]
fn pipeline_kernels(
    _: &Bundle,
    _: (&ModelConfig, &ModelWeights),
    placement: Placement,
    _: &[GpuModel],
) -> Result<Vec<VariantSpec>, EngineError> {
    Err(EngineError::NoPipelines(placement))
}
