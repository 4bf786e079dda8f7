//! What fails.

use unweight_model::{BindError, ConfigError};
use unweight_rt::{DeviceError, LaunchError, LoadError, Remedy};

use crate::{options::OptionError, schedule::AdmissionError};

/// What an engine could not do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// An option out of range.
    #[error(transparent)]
    Option(#[from] OptionError),
    /// The model's configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The model's tensors.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// A model that the kernels do not run.
    #[error("{key} = {value} in config.json: the kernels take {takes}; this model cannot run here")]
    Geometry {
        /// The key.
        key: &'static str,
        /// Its value.
        value: u32,
        /// What it may be.
        takes: &'static str,
    },
    /// The weights leave no room.
    #[error(transparent)]
    Memory(#[from] NoMemory),
    /// The host has no room for experts.
    #[error(transparent)]
    HostMemory(#[from] NoHostMemory),
    /// A tensor could not be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A request that cannot run. The others go on.
    #[error(transparent)]
    AdmissionError(#[from] AdmissionError),
    /// Pipelines were asked for, and the model was loaded without them.
    #[error("the engine was not loaded with pipelines; load the model with MlpWeights::Stored or Alternate")]
    NotStored,
    /// Pipelines were asked for, and this build has none.
    #[error("mlp = {0} needs the cargo feature `pipelines`, which this build does not have; leave it out")]
    NoPipelines(&'static str),
    /// Experts run from packed weights alone.
    #[error(
        "mlp = {0} was asked for, and the MLPs of this model are experts, which run from packed weights alone: nothing \
         is decoded beside them; leave it out, and the model runs"
    )]
    StoredExperts(&'static str),
    /// Experts were to be offloaded where there are none.
    #[error("resident_experts = {0} was asked for, and the model has no experts; leave it out")]
    NoExperts(u32),
    /// A setting of pipelines that cannot run on this device. The source is the pipelines' `GraphError`.
    #[error("{0}; tune the bundle again, or load it without its plan")]
    Setting(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The device. What ran is lost, and the engine runs nothing more.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The device failed before.
    #[error("the device failed in an earlier step; load the model again")]
    Failed,
}

impl From<LaunchError> for EngineError {
    fn from(refusal: LaunchError) -> Self {
        Self::Device(refusal.into())
    }
}

impl EngineError {
    /// The stable code of this error; docs/cli.md lists all.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Option(error) => error.code(),
            Self::Config(error) => error.code(),
            Self::Bind(error) => error.code(),
            Self::Geometry { .. } => "unsupported-geometry",
            Self::Memory(error) => error.code(),
            Self::HostMemory(error) => error.code(),
            Self::Load(error) => error.code(),
            Self::AdmissionError(error) => error.code(),
            Self::NotStored => "mlp-not-stored",
            Self::StoredExperts(_) => "experts-run-packed-only",
            Self::NoExperts(_) => "model-without-experts",
            Self::NoPipelines(_) => "built-without-pipelines",
            Self::Setting(_) => "pipeline-invalid",
            Self::Device(error) => error.code(),
            Self::Failed => "engine-failed",
        }
    }

    /// What to do about it, where it is one thing.
    pub fn remedy(&self) -> Option<Remedy> {
        match self {
            Self::Load(error) => error.remedy(),
            Self::Device(error) => error.remedy(),
            _ => None,
        }
    }
}

/// The weights leave no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{need} bytes are needed (weights {weights}, working memory {working}, and a KV cache of {cache} for {context} tokens) and {have} \
     may be used; shorten the context, or free memory of the device"
)]
pub struct NoMemory {
    /// Bytes of the least that runs.
    pub need: u64,
    /// Bytes that may be used.
    pub have: u64,
    /// Bytes of the weights.
    pub weights: u64,
    /// Bytes of the working memory.
    pub working: u64,
    /// Bytes of the cache of one sequence.
    pub cache: u64,
    /// Tokens of that sequence.
    pub context: u32,
}

impl NoMemory {
    /// The stable code of this error; docs/cli.md lists all.
    pub fn code(&self) -> &'static str {
        "engine-memory-insufficient"
    }
}

/// The host has no room for experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{need} bytes of host memory are needed for the experts and {have} are there; free memory of the host, or leave \
     resident_experts out where the device has room for all experts"
)]
pub struct NoHostMemory {
    /// Bytes of all packed experts.
    pub need: u64,
    /// Bytes that the host has left.
    pub have: u64,
}

impl NoHostMemory {
    /// The stable code of this error; docs/cli.md lists all.
    pub fn code(&self) -> &'static str {
        "host-memory-insufficient"
    }
}
