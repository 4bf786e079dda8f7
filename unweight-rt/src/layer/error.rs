//! Why a layer could not be loaded.

use unweight_format::{FormId, bundle::BundleError, packed::Unpackable, safetensors::Dtype};

use crate::{
    device::{DeviceError, Refusal},
    remedy::Remedy,
};

/// Why a layer could not be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The bundle does not have the tensor, or it is damaged.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// The device, the compiler or the driver failed.
    #[error("{name}: {source}")]
    Device {
        /// The tensor, or the first of those that become one layer.
        name: String,
        /// What failed.
        #[source]
        source: Box<DeviceError>,
    },
    /// The tensors are no weights of a linear layer, or do not become one.
    #[error("{name}: {why}")]
    Unsuitable {
        /// The tensor.
        name: String,
        /// Why.
        why: Unsuitable,
    },
}

impl LoadError {
    /// What to do about it, where one thing is to be done.
    pub fn remedy(&self) -> Option<Remedy> {
        match self {
            Self::Device { source, .. } => source.remedy(),
            _ => None,
        }
    }
}

/// Why tensors do not become a linear layer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unsuitable {
    /// Not BF16, or not of two dimensions.
    #[error("{dtype:?} of shape {shape:?} is not the weight of a linear layer (BF16, two dimensions)")]
    NotAMatrix {
        /// Its type.
        dtype: Dtype,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// Not BF16, or not of one dimension.
    #[error("{dtype:?} of shape {shape:?} is not a vector (BF16, one dimension)")]
    NotAVector {
        /// Its type.
        dtype: Dtype,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// Extents that kernels cannot count.
    #[error("{extent} rows or columns exceed the kernels' 2^32 - 1; split it")]
    TooLarge {
        /// The extent.
        extent: u64,
    },
    /// Nothing to merge.
    #[error("no tensors were named; a merged layer has one at least")]
    Nothing,
    /// Weights of another input.
    #[error("has {cols} columns, {first} has {first_cols}; they are not of one input")]
    Columns {
        /// Of this tensor.
        cols: u32,
        /// The first tensor.
        first: String,
        /// Of the first tensor.
        first_cols: u32,
    },
    /// A gate and an up are two.
    #[error("a gate and an up are 2 tensors, not {count}")]
    NotAPair {
        /// How many were named.
        count: usize,
    },
    /// A gate and an up of shapes that do not become one layer.
    #[error(
        "a gate [{gate}, {k}] and an up [{up}, {k}] must have the same multiple of 32 rows, and a multiple of 64 columns; load \
         them apart"
    )]
    Pair {
        /// Rows of the gate.
        gate: u32,
        /// Rows of the up.
        up: u32,
        /// Columns of both.
        k: u32,
    },
    /// A gate and an up that cuBLAS would have to multiply, which has no such epilogue.
    #[error("a gate with its up cannot be packed: {0}; load them apart")]
    GateAndUp(Unpackable),
    /// Weights without a packed form.
    #[error("cannot be packed: {0}; load it as a matrix")]
    Unpackable(Unpackable),
    /// Sections of another form than the manifest says.
    #[error("is not the {form} tensor that the manifest says; the bundle is damaged")]
    OtherForm {
        /// By the manifest.
        form: FormId,
    },
    /// Longer codes than the bundle says.
    #[error("has codes of {bits} bits, the manifest says {limit} at most; the bundle is damaged")]
    CodeBits {
        /// The longest code.
        bits: u32,
        /// By the manifest.
        limit: u32,
    },
}

/// What failed on the device, with the tensor that it failed for.
pub(super) fn in_tensor(name: &str) -> impl Fn(DeviceError) -> LoadError {
    let name = name.to_owned();
    move |source| LoadError::Device { name: name.clone(), source: Box::new(source) }
}

pub(super) fn refused(device: &impl Fn(DeviceError) -> LoadError) -> impl Fn(Refusal) -> LoadError {
    move |refusal| device(refusal.into())
}

pub(super) fn unsuitable(name: &str, why: Unsuitable) -> LoadError {
    LoadError::Unsuitable { name: name.to_owned(), why }
}
