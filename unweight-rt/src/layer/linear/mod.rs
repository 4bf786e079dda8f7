//! Linear layers: `Y[m, n] = X[m, k] * W[n, k]^T` on a GPU, for every encoding of the weights and every batch.
//!
//! [`Loader`](crate::layer::loader::Loader) creates layers and compiles every kernel that a batch can need.
//! [`Linear::enqueue`] only enqueues, so it may be captured into a graph. Shapes that are not multiples of 64 use
//! padded copies of the activations, which cost two copies besides the product.

mod bf16;
mod compact;
mod expanded;
mod packed;
mod routes;

use unweight_codegen::{VariantSpec, plan::GemmShape, spec::Epilogue};
use unweight_format::{Placement, TileGrid};

pub use self::{bf16::Bf16Linear, compact::CompactLinear, packed::PackedLinear};
use self::{packed::padding, routes::Routed};
use crate::{
    choose::route::{BatchRoute, Route, RoutePolicy, Weight},
    device::{ContextSize, DeviceError, LaunchError, MatrixMut, MatrixRef},
    exec::ExecContext,
    ops::gemm_packed,
    weight::{DeviceMatrix, DevicePacked},
};

/// A linear layer on the device, `Y[m, n] = X[m, k] * W[n, k]^T`, in one variant per placement of its weights.
///
/// ```no_run
/// use unweight_codegen::spec::Epilogue;
/// use unweight_format::bundle::Bundle;
/// use unweight_rt::{Device, DeviceMatrix, KernelSet, LoadOptions, Loader, Merge, cache::Progress, env::Env};
///
/// let device = Device::open(0)?;
/// let (kernels, stream) = (KernelSet::open(&device, Env::process()?), device.stream()?);
/// let bundle = Bundle::open("bundle".as_ref())?;
/// let progress = |kernel: &Progress<'_>| eprintln!("[{}/{}] {}", kernel.done, kernel.total, kernel.artifact.name);
/// let (mut loader, _) = Loader::new(&kernels, &stream, &bundle, LoadOptions::default(), &progress)?;
/// let names = ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"];
/// let mlp = loader.merge(&names, Merge::SiluMul)?;
/// let down = loader.load("model.layers.0.mlp.down_proj.weight")?;
/// let mut ctx = loader.context(&stream)?;
///
/// let (m, x) = (8, DeviceMatrix::zeroed(&stream, 8, mlp.k())?);
/// let mut activated = DeviceMatrix::zeroed(&stream, m, mlp.n() / 2)?;
/// let mut residual = DeviceMatrix::zeroed(&stream, m, down.n())?;
/// mlp.enqueue(&mut ctx, x.view(), activated.view_mut(), Epilogue::SiluMul)?;
/// down.enqueue(&mut ctx, activated.view(), residual.view_mut(), Epilogue::StoreAdd)?;
/// ctx.synchronize()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
/// An execution context keeps its stream for life, so a launch cannot use its memory on another stream:
/// ```compile_fail,E0061
/// # use unweight_codegen::spec::Epilogue;
/// # use unweight_rt::{DeviceError, DeviceMatrix, ExecContext, Linear, Stream};
/// # type Done = Result<(), DeviceError>;
/// # fn run(layer: &Linear, other: &Stream, ctx: &mut ExecContext, x: &DeviceMatrix, y: &mut DeviceMatrix) -> Done {
/// layer.enqueue(other, ctx, x.view(), y.view_mut(), Epilogue::Store)
/// # }
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub enum Linear {
    /// Packed weights, 12 bits per weight.
    Packed(PackedLinear),
    /// Compact weights, 10.9 bits per weight.
    Compact(CompactLinear),
    /// BF16 weights.
    Bf16(Bf16Linear),
}

impl Linear {
    /// Returns the number of output features; for a gate and an up projection, the sum of both.
    pub fn n(&self) -> u32 {
        match self {
            Self::Packed(layer) => layer.shape()[0],
            Self::Compact(layer) => layer.shape()[0],
            Self::Bf16(layer) => layer.weights().rows(),
        }
    }

    /// Returns the number of input features.
    pub fn k(&self) -> u32 {
        match self {
            Self::Packed(layer) => layer.shape()[1],
            Self::Compact(layer) => layer.shape()[1],
            Self::Bf16(layer) => layer.weights().cols(),
        }
    }

    /// Returns the size of the weights on the device in bytes.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Packed(layer) => layer.weights().bytes(),
            Self::Compact(layer) => layer.bytes(),
            Self::Bf16(layer) => layer.weights().bytes() as u64,
        }
    }

    /// Returns whether the weights are packed.
    pub fn is_packed(&self) -> bool {
        matches!(self, Self::Packed(_))
    }

    /// Returns whether the weights are compact.
    pub fn is_compact(&self) -> bool {
        matches!(self, Self::Compact(_))
    }

    /// Returns the weights of a packed layer, in whole tiles. An embedding may share them with its head.
    pub fn packed_weights(&self) -> Option<&DevicePacked> {
        match self {
            Self::Packed(layer) => Some(layer.weights()),
            Self::Compact(_) | Self::Bf16(_) => None,
        }
    }

    /// Returns the weights `[n, k]` of a BF16 layer.
    pub fn bf16_weights(&self) -> Option<&DeviceMatrix> {
        match self {
            Self::Bf16(layer) => Some(layer.weights()),
            Self::Packed(_) | Self::Compact(_) => None,
        }
    }

    /// Returns the kernel variant of the product at batch `m`, or of the first part of a split batch. `None` if cuBLAS
    /// multiplies, or if the layer was not loaded for the epilogue.
    pub fn variant(&self, m: u32, epilogue: Epilogue) -> Option<VariantSpec> {
        match self {
            Self::Packed(layer) => layer.variant(m, epilogue),
            Self::Compact(layer) => layer.variant(m, epilogue),
            Self::Bf16(_) => None,
        }
    }

    /// Returns the context size that the layer needs for every batch.
    pub fn context_size(&self) -> ContextSize {
        match self {
            Self::Packed(layer) => layer.context_size(),
            Self::Compact(layer) => layer.context_size(),
            Self::Bf16(layer) => layer.context_size(),
        }
    }

    /// Returns the context size that the layer needs for a batch of `m` rows.
    ///
    /// # Errors
    /// [`LaunchError::Epilogue`]: the layer was not loaded for this epilogue.
    pub(crate) fn context_size_at(&self, m: u32, epilogue: Epilogue) -> Result<ContextSize, LaunchError> {
        match self {
            Self::Packed(layer) => layer.context_size_at(m, epilogue),
            Self::Compact(layer) => layer.context_size_at(m, epilogue),
            Self::Bf16(layer) => Ok(layer.context_size()),
        }
    }

    /// Enqueues the product on the context's stream. A batch larger than the layer was loaded for is split. `x` is `[m,
    /// k]`, `y` is `[m, n]`, both BF16; `y` is overwritten, or added to ([`Epilogue::StoreAdd`]). A packed or compact
    /// gate and up accept only [`Epilogue::SiluMul`], with `y` `[m, n / 2]`. Rows of packed and compact layers begin at
    /// multiples of 16 bytes; rows of `y` are contiguous, unless the layer is padded or BF16.
    ///
    /// # Errors
    /// Shapes, pitches, alignment, overlap, devices and the context's size
    /// ([`Loader::context`](crate::layer::loader::Loader::context), [`ExecContext::reserve`]) are checked before
    /// anything is enqueued. Afterwards, a driver error.
    pub fn enqueue(
        &self,
        ctx: &mut ExecContext,
        x: MatrixRef<'_>,
        y: MatrixMut<'_>,
        epilogue: Epilogue,
    ) -> Result<(), DeviceError> {
        match self {
            Self::Packed(layer) => layer.enqueue(ctx, x, y, epilogue),
            Self::Compact(layer) => layer.enqueue(ctx, x, y, epilogue),
            Self::Bf16(layer) => layer.enqueue(ctx, x, y, epilogue),
        }
    }
}

/// Returns the [`Linear::context_size`] that a weight's layer will have, without a device. Covers the routes with and
/// without escapes if both are possible, and assumes that every weight to be packed can be packed.
pub fn context_size_of(weight: &Weight, policy: &RoutePolicy) -> ContextSize {
    let tiles = weight.padded().map(|(n, k)| TileGrid::new(n as usize, k as usize));
    let tiles = tiles.filter(|_| policy.placement != Placement::Bf16);
    let Some(Ok(grid)) = tiles else { return ContextSize::default().with_cublas() };
    let compact = policy.stays_compact(weight);
    let routes = match compact {
        true => policy.compact_routes(weight),
        false => weight.escapes().iter().flat_map(|escapes| policy.packed_routes(weight, *escapes)).collect(),
    };
    let sms = policy.chooser.gpu_model().sms;
    let (n, k) = weight.padded().unwrap_or_default();
    let of = |choice: &BatchRoute<Route<VariantSpec>>| {
        let m = choice.last;
        // A chosen variant has a plan.
        let packed = |spec| gemm_packed::context_size(spec, GemmShape { m, n, k }, sms).unwrap_or_default();
        let size = match &choice.kernel {
            Route::Direct(_) if compact => ContextSize::default(),
            Route::Direct(spec) => packed(spec),
            Route::ExpandToPacked { product, .. } => compact::slot_size(grid).max(packed(product)),
            Route::ExpandToBf16 { activate, .. } => expanded::size(m, grid, activate.is_some()),
        };
        size.max(padding((weight.n, weight.k), (n, k), m))
    };
    routes.iter().map(of).fold(ContextSize::default(), ContextSize::max)
}
