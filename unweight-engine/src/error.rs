//! What fails.

use unweight_model::{BindError, ConfigError};
use unweight_rt::{DeviceError, LaunchError, LoadError, Placement, Remedy};

use crate::{
    memory::{NoHostMemory, NoMemory},
    options::OptionError,
    schedule::AdmissionError,
};

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
    #[error("the engine was not loaded with pipelines; load the model with Placement::Stored or Placement::Alternate")]
    NotStored,
    /// Pipelines were asked for, and this build has none.
    #[error("placement = {0} needs the cargo feature `pipelines`, which this build does not have; leave it out")]
    NoPipelines(Placement),
    /// Experts are always packed.
    #[error(
        "placement = {0} was asked for, and the MLPs of this model are experts, which run from packed weights alone: nothing \
         is decoded beside them; leave it out, and the model runs"
    )]
    StoredExperts(Placement),
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
    /// The stable code of this error; docs/reference/errors.md lists all.
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
