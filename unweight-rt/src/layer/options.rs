//! Options for loading layers, and how several weights are merged into one layer.

use unweight_format::Placement;

use crate::choose::{
    policy::PackedChooser,
    route::{Expand, RoutePolicy},
};

/// Options for loading layers.
///
/// ```
/// # use unweight_rt::LoadOptions;
/// let options = LoadOptions::default().max_batch(256).pdl(false);
/// assert_eq!((options.max_batch, options.pdl), (256, false));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadOptions {
    /// The maximum number of rows in a launch; 4096 by default. A layer splits larger batches.
    pub max_batch: u32,
    /// Whether to use programmatic dependent launch: a layer prefetches its weights while the previous kernel on the
    /// stream still runs, and waits for that kernel before it accesses activations. Faster when layers follow each
    /// other closely. The previous kernel may be any kernel. On by default.
    pub pdl: bool,
    /// How to hold weights on the device; packed by default. A layer on its own has no pipelines, so
    /// [`Placement::Stored`] and [`Placement::Alternate`] hold it packed.
    pub placement: Placement,
    /// The batches for which weights are expanded to BF16 and multiplied by cuBLAS. By default: on architectures
    /// without `wgmma`, the batches for which the GPU model predicts that this is faster.
    pub expand: Expand,
    /// Whether a gate and an up are merged as [`Merge::SiluMul`] or as [`Merge::Rows`]. This determines which kernels
    /// are prepared before the first layer. On by default.
    pub fused_gate: bool,
}

impl Default for LoadOptions {
    fn default() -> Self {
        let (placement, expand) = (Placement::Packed, Expand::Model);
        Self { max_batch: 4096, pdl: true, placement, expand, fused_gate: true }
    }
}

impl LoadOptions {
    /// Sets the maximum number of rows in a launch.
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

    /// Returns the input of dispatch: these options, a chooser, and the length of the longest Huffman code in bits.
    pub fn wanted(self, chooser: PackedChooser, code_limit: u32) -> RoutePolicy {
        let Self { max_batch, pdl, placement, expand, .. } = self;
        RoutePolicy { placement: placement.linear(), chooser, max_batch, pdl, code_limit, expand }
    }
}

/// How several weights are merged into one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Merge {
    /// Concatenates rows: the outputs are next to each other, as for `q`, `k` and `v`.
    Rows,
    /// Fuses a gate and an up: the output is `silu(X gate^T) * (X up^T)`, computed in fp32 and rounded once. A BF16
    /// layer ([`Placement::Bf16`]) concatenates the rows instead and returns both outputs next to each other, because
    /// cuBLAS has no such epilogue.
    SiluMul,
}
