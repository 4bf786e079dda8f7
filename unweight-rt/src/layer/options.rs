//! What layers are loaded for, and how several weights become one layer.

use unweight_format::Placement;

use crate::choose::{
    policy::PackedChooser,
    route::{Expand, RoutePolicy},
};

/// The options that layers are loaded with.
///
/// ```
/// # use unweight_rt::LoadOptions;
/// let options = LoadOptions::default().max_batch(256).pdl(false);
/// assert_eq!((options.max_batch, options.pdl), (256, false));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadOptions {
    /// The largest batch of a launch, rows; 4096 by default. A layer splits larger batches.
    pub max_batch: u32,
    /// Programmatic dependent launch: a layer prefetches its weights while the kernel before it on the stream still
    /// runs, and waits for that kernel before it accesses activations. Faster where layers follow each other closely.
    /// Any kernel may come before. On by default.
    pub pdl: bool,
    /// How weights are held on the device; packed by default. A layer on its own has no pipelines, so
    /// [`Placement::Stored`] and [`Placement::Alternate`] hold it packed.
    pub placement: Placement,
    /// Batches that cuBLAS multiplies from weights expanded to BF16; by default those for which the model of the GPU
    /// predicts less time, on architectures without `wgmma`.
    pub expand: Expand,
    /// Whether a gate and an up are merged as [`Merge::SiluMul`], else as [`Merge::Rows`]: which kernels are made ready
    /// before the first layer. On by default.
    pub fused_gate: bool,
}

impl Default for LoadOptions {
    fn default() -> Self {
        let (placement, expand) = (Placement::Packed, Expand::Model);
        Self { max_batch: 4096, pdl: true, placement, expand, fused_gate: true }
    }
}

impl LoadOptions {
    /// Sets the largest batch, rows.
    #[must_use]
    pub fn max_batch(self, max_batch: u32) -> Self {
        Self { max_batch, ..self }
    }

    /// Sets programmatic dependent launch.
    #[must_use]
    pub fn pdl(self, pdl: bool) -> Self {
        Self { pdl, ..self }
    }

    /// Sets how weights are held on the device.
    #[must_use]
    pub fn placement(self, placement: Placement) -> Self {
        Self { placement, ..self }
    }

    /// Sets which batches are expanded to BF16 and multiplied by cuBLAS.
    #[must_use]
    pub fn expand(self, expand: Expand) -> Self {
        Self { expand, ..self }
    }

    /// Sets how a gate and an up are merged.
    #[must_use]
    pub fn fused_gate(self, fused_gate: bool) -> Self {
        Self { fused_gate, ..self }
    }

    /// The input of dispatch: these options, a chooser, and the longest Huffman code in bits.
    pub fn wanted(self, chooser: PackedChooser, code_limit: u32) -> RoutePolicy {
        let Self { max_batch, pdl, placement, expand, .. } = self;
        RoutePolicy { placement: placement.linear(), chooser, max_batch, pdl, code_limit, expand }
    }
}

/// The way in which several weights become one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Merge {
    /// Rows are concatenated: the outputs are next to each other, as for `q`, `k` and `v`.
    Rows,
    /// A gate and an up: the output is `silu(X gate^T) * (X up^T)`, computed in fp32 and rounded once. A BF16 layer
    /// ([`Placement::Bf16`]) concatenates the rows instead and gives both outputs next to each other, because cuBLAS
    /// has no such epilogue.
    SiluMul,
}
