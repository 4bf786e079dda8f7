//! Errors of loading and running a model.

use unweight_model::{BindError, ConfigError, Family};
use unweight_rt::{DeviceError, LaunchError, LoadError, Placement, Remedy};

use crate::{options::OptionError, request::AdmissionError};

/// The errors of [`Engine`](crate::Engine).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// An option is out of range.
    #[error(transparent)]
    Option(#[from] OptionError),
    /// `config.json` is damaged or requests an unsupported feature.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The tensors do not match the configuration.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The kernels do not support a size of the model.
    #[error(transparent)]
    Geometry(#[from] UnsupportedSize),
    /// The device memory is too small for the weights, the working memory and the KV cache of one sequence.
    #[error(transparent)]
    Memory(#[from] NoMemory),
    /// The device memory is too small for the model next to its draft model.
    #[error("{error}, or use a smaller draft model (this one takes {draft} bytes)")]
    MemoryWithDraft {
        /// Bytes of the draft model.
        draft: u64,
        /// The memory that the model needs, and what the draft model leaves.
        error: NoMemory,
    },
    /// The host memory is too small for the experts.
    #[error(transparent)]
    HostMemory(#[from] NoHostMemory),
    /// A tensor cannot be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A request cannot run. Running sequences are not affected.
    #[error(transparent)]
    AdmissionError(#[from] AdmissionError),
    /// The call needs pipelines, and the engine was loaded without them.
    #[error("the engine was not loaded with pipelines; load the model with Placement::Stored or Placement::Alternate")]
    NotStored,
    /// The options request pipelines, and this build lacks the feature `pipelines`.
    #[error(
        "placement = {0} needs the cargo feature `pipelines`, which this build does not have; rebuild with it, or do \
         not set the placement"
    )]
    NoPipelines(Placement),
    /// The options request a placement that experts do not support: experts run from packed or BF16 weights only.
    #[error(
        "placement = {0} is not available: the MLPs of this model are experts, which run only from packed or BF16 \
         weights; do not set the placement"
    )]
    StoredExperts(Placement),
    /// The options request a placement that the model's family does not support: pipelines need an MLP of three
    /// projections whose product is added to the residual stream unchanged.
    #[error(
        "placement = {placement} is not available for models of family {family}, whose MLPs pipelines cannot run; do \
         not set the placement"
    )]
    StoredFamily {
        /// The placement.
        placement: Placement,
        /// The family.
        family: Family,
    },
    /// The options request a packed KV cache, and pages with heads of this size cannot be packed.
    #[error("kv_cache = packed supports heads of up to 128 elements, this model has heads of {head_dim}; use bf16")]
    PackedHeads {
        /// The number of elements of a head.
        head_dim: u32,
    },
    /// [`EngineOptions::resident_experts`](crate::EngineOptions::resident_experts) is set, and the model has no
    /// experts.
    #[error("resident_experts = {0} is set, but the model has no experts; do not set it")]
    NoExperts(u32),
    /// The vocabularies of draft model and target have different sizes, so token ids have different meanings.
    #[error(
        "the draft model has {draft} tokens and the model {target}; use a draft model with the vocabulary of the model"
    )]
    DraftVocabulary {
        /// The vocabulary size of the draft model.
        draft: u32,
        /// The vocabulary size of the target.
        target: u32,
    },
    /// The draft model is a mixture of experts.
    #[error(
        "the draft model is a mixture of {experts} experts, whose steps take too long for drafts; use a dense model"
    )]
    DraftMixture {
        /// The number of experts of a layer.
        experts: u32,
    },
    /// The draft model cannot be loaded.
    #[error("draft model: {0}")]
    Draft(Box<EngineError>),
    /// A pipeline setting cannot run on this device. The source is `raw::pipelines::GraphError` in
    /// builds with the feature `pipelines`.
    #[error("{0}; tune the bundle again, or load it without its plan")]
    Setting(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The device failed. All sequences are lost, and the engine cannot be used any more.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The device failed in an earlier call.
    #[error("the device failed in an earlier step; load the model again")]
    Failed,
}

impl From<LaunchError> for EngineError {
    fn from(error: LaunchError) -> Self {
        Self::Device(error.into())
    }
}

impl EngineError {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Option(error) => error.code(),
            Self::Config(error) => error.code(),
            Self::Bind(error) => error.code(),
            Self::Geometry(error) => error.code(),
            Self::Memory(error) | Self::MemoryWithDraft { error, .. } => error.code(),
            Self::HostMemory(error) => error.code(),
            Self::Load(error) => error.code(),
            Self::AdmissionError(error) => error.code(),
            Self::NotStored => "mlp-not-stored",
            Self::StoredExperts(_) => "experts-without-pipelines",
            Self::StoredFamily { .. } => "family-without-pipelines",
            Self::PackedHeads { .. } => "heads-not-packed",
            Self::NoExperts(_) => "model-without-experts",
            Self::NoPipelines(_) => "built-without-pipelines",
            Self::DraftVocabulary { .. } => "draft-vocabulary-differs",
            Self::DraftMixture { .. } => "draft-not-dense",
            Self::Draft(error) => error.code(),
            Self::Setting(_) => "pipeline-invalid",
            Self::Device(error) => error.code(),
            Self::Failed => "engine-failed",
        }
    }

    /// The remedy, if there is a single one.
    pub fn remedy(&self) -> Option<Remedy> {
        match self {
            Self::Load(error) => error.remedy(),
            Self::Device(error) => error.remedy(),
            Self::Draft(error) => error.remedy(),
            _ => None,
        }
    }
}

/// The kernels do not support a size of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key} = {value} in config.json: the kernels support only {takes}; use another model")]
#[non_exhaustive]
pub struct UnsupportedSize {
    /// The key in `config.json`; of experts, whose keys differ between families, what it means.
    pub key: &'static str,
    /// The value of the key.
    pub value: u32,
    /// The supported values.
    pub takes: &'static str,
}

impl UnsupportedSize {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        "unsupported-geometry"
    }
}

/// The device memory is too small for the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the engine needs {need} bytes (weights {weights}, working memory {working}, and a KV cache of {cache} for \
     {context} tokens), but {have} may be used; shorten the context, or free device memory{}",
    if *.mixture { ", or hold fewer experts on the device (resident_experts)" } else { "" }
)]
#[non_exhaustive]
pub struct NoMemory {
    /// Bytes of the smallest configuration that runs.
    pub need: u64,
    /// Bytes that may be used.
    pub have: u64,
    /// Bytes of the weights.
    pub weights: u64,
    /// Bytes of the working memory.
    pub working: u64,
    /// Bytes of the KV cache of one sequence.
    pub cache: u64,
    /// The number of tokens of that sequence.
    pub context: u32,
    /// Whether the model is a mixture of experts.
    pub(crate) mixture: bool,
}

impl NoMemory {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        "engine-memory-insufficient"
    }
}

/// The host memory is too small for the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the experts need {need} bytes of host memory, but {have} are available; free host memory, or do not set \
     resident_experts if all experts fit on the device"
)]
#[non_exhaustive]
pub struct NoHostMemory {
    /// Bytes of the experts of all layers, or of the layer that is loaded next.
    pub need: u64,
    /// Bytes of host memory that are available.
    pub have: u64,
}

impl NoHostMemory {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        "host-memory-insufficient"
    }
}
