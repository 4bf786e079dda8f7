//! What layers are loaded for, and how several weights become one layer.

use crate::choose::{
    model::PackedChooser,
    reachable::{Expand, Linears, Resident, Wanted},
};

/// What layers are loaded for.
///
/// ```
/// # use unweight_rt::LoadOptions;
/// let options = LoadOptions::default().max_batch(256).pdl(false);
/// assert_eq!((options.max_batch, options.pdl), (256, false));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadOptions {
    /// The largest batch of a launch, 4096 by default; a layer takes more in turns.
    pub max_batch: u32,
    /// Programmatic dependent launch: a layer asks for its weights while the kernel before it on the stream still runs,
    /// and waits for that one before it touches activations. Faster where layers follow each other closely; any kernel
    /// may come before. On by default.
    pub pdl: bool,
    /// What the weights lie as; packed by default.
    pub linears: Linears,
    /// What compact tensors lie as; packed by default.
    pub resident: Resident,
    /// Which batches are multiplied by cuBLAS from weights that are expanded ahead of it; by default what the model of
    /// the machine says, on architectures without `wgmma`.
    pub expand: Expand,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self { max_batch: 4096, pdl: true, linears: Linears::Packed, resident: Resident::Fast, expand: Expand::Model }
    }
}

impl LoadOptions {
    /// The largest batch.
    #[must_use]
    pub fn max_batch(self, max_batch: u32) -> Self {
        Self { max_batch, ..self }
    }

    /// Programmatic dependent launch.
    #[must_use]
    pub fn pdl(self, pdl: bool) -> Self {
        Self { pdl, ..self }
    }

    /// What the weights lie as.
    #[must_use]
    pub fn linears(self, linears: Linears) -> Self {
        Self { linears, ..self }
    }

    /// What compact tensors lie as.
    #[must_use]
    pub fn resident(self, resident: Resident) -> Self {
        Self { resident, ..self }
    }

    /// Which batches are multiplied by cuBLAS from weights that are expanded ahead of it.
    #[must_use]
    pub fn expand(self, expand: Expand) -> Self {
        Self { expand, ..self }
    }

    /// The same for whoever chooses, and Huffman codes of up to so many bits.
    pub fn wanted(self, chooser: PackedChooser, code_limit: u32) -> Wanted {
        let Self { max_batch, pdl, linears, resident, expand } = self;
        Wanted { linears, resident, chooser, max_batch, pdl, code_limit, expand }
    }
}

/// How several weights become one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Merge {
    /// One under the other: the outputs lie side by side (`q`, `k`, `v`).
    Rows,
    /// A gate and an up: the output is `silu(X gate^T) * (X up^T)`, computed in fp32 and rounded once. As BF16
    /// ([`Linears::Bf16`]) they lie one under the other, and the output has both side by side: cuBLAS has no such
    /// epilogue.
    SiluMul,
}
