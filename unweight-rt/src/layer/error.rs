//! Errors of loading layers.

use unweight_format::{EncodingId, bundle::BundleError, raw::packed::Unpackable, safetensors::Dtype};

use crate::{
    device::{DeviceError, LaunchError},
    jit::remedy::Remedy,
};

/// Why a layer could not be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The bundle has no such tensor, or is damaged.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// The device, the compiler or the driver failed.
    #[error("{name}: {source}")]
    Device {
        /// The tensor, or the first tensor of a merged layer.
        name: String,
        /// The error of the device.
        #[source]
        source: Box<DeviceError>,
    },
    /// The tensors cannot form a linear layer.
    #[error("{name}: {why}")]
    Unsuitable {
        /// The tensor.
        name: String,
        /// The property that is not supported.
        why: Unsuitable,
    },
}

impl LoadError {
    /// Returns the stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Bundle(error) => error.code(),
            Self::Device { source, .. } => source.code(),
            Self::Unsuitable { why, .. } => why.code(),
        }
    }

    /// Returns the next step, if one action resolves the error.
    pub fn remedy(&self) -> Option<Remedy> {
        match self {
            Self::Device { source, .. } => source.remedy(),
            _ => None,
        }
    }
}

/// A property of tensors that prevents a linear layer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unsuitable {
    /// The tensor is not BF16 or does not have two dimensions.
    #[error("{dtype:?} of shape {shape:?} is not the weight of a linear layer (BF16, two dimensions)")]
    NotAMatrix {
        /// The tensor's type.
        dtype: Dtype,
        /// The tensor's shape.
        shape: Vec<u64>,
    },
    /// The tensor is not BF16 or does not have one dimension.
    #[error("{dtype:?} of shape {shape:?} is not a vector (BF16, one dimension)")]
    NotAVector {
        /// The tensor's type.
        dtype: Dtype,
        /// The tensor's shape.
        shape: Vec<u64>,
    },
    /// The tensor has more rows or columns than kernels can count.
    #[error("{extent} rows or columns exceed the limit of 2^32 - 1; split the tensor")]
    TooLarge {
        /// The number of rows or columns.
        extent: u64,
    },
    /// A merge names no tensors.
    #[error("no tensors were given; pass at least one")]
    Nothing,
    /// The tensors of a merged layer have different numbers of columns.
    #[error("has {cols} columns, but {first} has {first_cols}; merged tensors must have the same number of columns")]
    Columns {
        /// Columns of this tensor.
        cols: u32,
        /// The first tensor.
        first: String,
        /// Columns of the first tensor.
        first_cols: u32,
    },
    /// A merge of a gate and an up projection names a number of tensors other than two.
    #[error("a gate and an up projection are 2 tensors, got {count}; pass one of each")]
    NotAPair {
        /// The number of named tensors.
        count: usize,
    },
    /// A gate and an up projection whose shapes cannot become one layer.
    #[error(
        "a gate [{gate}, {k}] and an up [{up}, {k}] must have the same number of rows, a multiple of 32, and a number \
         of columns that is a multiple of 64; load them as separate layers"
    )]
    Pair {
        /// Rows of the gate.
        gate: u32,
        /// Rows of the up.
        up: u32,
        /// Columns of both.
        k: u32,
    },
    /// A gate and an up projection that cannot be packed. cuBLAS has no epilogue for them.
    #[error("gate and up cannot be packed: {0}; load them as separate layers")]
    GateAndUp(Unpackable),
    /// The weights cannot be packed.
    #[error("cannot be packed: {0}; load it as a BF16 matrix")]
    Unpackable(Unpackable),
    /// The stored tensor does not have the encoding that the manifest states.
    #[error("is not the {encoding} tensor that the manifest states; the bundle is damaged")]
    OtherEncoding {
        /// The encoding in the manifest.
        encoding: EncodingId,
    },
    /// The stored codes are longer than the manifest states.
    #[error("has codes of {bits} bits, but the manifest states at most {limit}; the bundle is damaged")]
    CodeBits {
        /// The length of the longest code in bits.
        bits: u32,
        /// The limit in the manifest in bits.
        limit: u32,
    },
}

/// Adds the tensor's name to a device error.
pub(super) fn in_tensor(name: &str) -> impl Fn(DeviceError) -> LoadError {
    let name = name.to_owned();
    move |source| LoadError::Device { name: name.clone(), source: Box::new(source) }
}

pub(super) fn refused(device: &impl Fn(DeviceError) -> LoadError) -> impl Fn(LaunchError) -> LoadError {
    move |refusal| device(refusal.into())
}

pub(super) fn unsuitable(name: &str, why: Unsuitable) -> LoadError {
    LoadError::Unsuitable { name: name.to_owned(), why }
}

impl Unsuitable {
    /// Returns the stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NotAMatrix { .. } | Self::NotAVector { .. } => "tensor-not-a-layer",
            Self::TooLarge { .. } => "tensor-too-large",
            Self::Nothing | Self::Columns { .. } | Self::NotAPair { .. } | Self::Pair { .. } | Self::GateAndUp(_) => {
                "tensors-not-mergeable"
            }
            Self::Unpackable(why) => why.code(),
            Self::OtherEncoding { .. } | Self::CodeBits { .. } => "manifest-disagrees",
        }
    }
}
