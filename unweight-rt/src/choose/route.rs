//! The route of a weight: its conversion steps through the graph of encodings and the kernels for each range of
//! batches, as a pure function of the manifest.
//!
//! ```text
//! bundle --weights()--> Weight --conversion()--> steps --RoutePolicy::decoder, packing, gemms--> KernelSource
//!                          +------reachable()------> the kernels of all weights: compiled in parallel before loading
//! ```

use unweight_codegen::{
    VariantSpec,
    family::Instruction,
    plan::GemmShape,
    spec::{Arch, DecodeCompactStage, DecodeOutput, Epilogue, GateFunction, Op, SiluMulSpec, catalog},
};
use unweight_format::{EncodingId, Placement, TileGrid, raw::packed};

use super::{
    candidates::{COMPACT_BATCH, PackedUse, has_compact_gemms},
    cost::gpu_model::{bf16_us, cublas_us, expand_us, mma_floor_us, predicted_us},
    graph::{Edge, Node, Step, decode_compact, decoder, paths},
    policy::PackedChooser,
};

/// A weight that becomes a layer, alone or merged with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Weight {
    /// Output features.
    pub n: u32,
    /// Input features.
    pub k: u32,
    /// The node at which the weight enters the graph.
    pub node: Node,
    /// Whether the weight is a merged gate and up.
    pub gated: bool,
}

impl Weight {
    /// Returns a weight with a stored encoding.
    pub fn stored(n: u32, k: u32, encoding: EncodingId) -> Self {
        Self { n, k, node: Node::of(encoding), gated: false }
    }

    /// Returns several weights merged along their rows: BF16, whatever their encodings.
    pub fn merged(n: u32, k: u32, gated: bool) -> Self {
        Self { n, k, node: Node::Bf16, gated }
    }

    /// States whether all merged weights are compact, so that the result may stay compact.
    #[must_use]
    pub fn all_compact(self, compact: bool) -> Self {
        if compact { Self { node: Node::Compact, ..self } } else { self }
    }

    /// Returns whether kernels can read it without padding.
    pub(super) fn is_tiled(&self) -> bool {
        self.n.is_multiple_of(64) && self.k.is_multiple_of(64)
    }

    /// Returns `(n, k)` padded to whole tiles. `None` if that exceeds 32 bits.
    pub fn padded(&self) -> Option<(u32, u32)> {
        Some((self.n.checked_next_multiple_of(64)?, self.k.checked_next_multiple_of(64)?))
    }

    /// Returns the epilogues that the layer is loaded for.
    pub fn epilogues(&self) -> &'static [Epilogue] {
        if self.gated { &[Epilogue::SiluMul] } else { &[Epilogue::Store, Epilogue::StoreAdd] }
    }

    /// Returns whether the packed encoding may have escapes, before the data are read: a stored packed tensor may have
    /// none, other encodings are assumed to have some.
    pub(crate) fn escapes(&self) -> &'static [bool] {
        if self.node == Node::Packed { &[true, false] } else { &[true] }
    }

    /// Returns whether a step is possible: GPU decoders need whole tiles; other shapes are decoded and padded on the
    /// host.
    fn supports(&self, edge: &Edge) -> bool {
        match edge.step {
            Step::Decode(_) | Step::DecodeCompact => self.is_tiled(),
            _ => true,
        }
    }

    /// Returns the steps by which a loader converts the weight: the shortest path through the packed encoding.
    pub fn conversion(&self) -> Vec<Edge> {
        let routes = paths(self.node).into_iter().filter(|path| path.iter().all(|edge| self.supports(edge)));
        routes
            .into_iter()
            .find(|path| path.last().is_some_and(|edge| edge.step == Step::GemmPacked))
            .unwrap_or_default()
    }
}

/// The largest batch tile of `gemm_mma`: above it, a batch reads the weights more than once.
pub(super) const GEMM_MMA_BATCH: u32 = 64;

/// How a batch is multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route<K> {
    /// One kernel reads the weights in their encoding.
    Direct(K),
    /// One kernel writes packed tiles into the slot, and another multiplies them.
    ExpandToPacked {
        /// The kernel from compact to packed tiles.
        expand: K,
        /// The product; an ordinary launch, because it reads the previous kernel's output.
        product: K,
    },
    /// One kernel writes BF16 into the slot, and cuBLAS multiplies it.
    ExpandToBf16 {
        /// The kernel from packed or compact to BF16.
        expand: K,
        /// The activation of the product, for a gate and an up.
        activate: Option<K>,
    },
}

/// The layout of a slot into which a compact tensor is expanded, in bytes: `tiles | heads | inexact | words of the
/// groups`.
#[derive(Clone, Copy, Debug)]
pub struct SlotPlan {
    /// The offset of the heads, which no kernel reads.
    pub heads: u64,
    /// The offset of the index of an element without an exact operand.
    pub inexact: u64,
    /// The offset of the words for the sums of the lists.
    pub group_words: u64,
    /// The size of the slot.
    pub bytes: u64,
}

impl SlotPlan {
    /// The number of tiles whose lists are summed together: 64 row blocks.
    pub(crate) const GROUP_TILES: usize = 16;

    /// Returns the layout for a tensor with this grid.
    pub fn of(grid: TileGrid) -> Self {
        let tiles = grid.tiles() as u64;
        // With fewer than 2^31 tiles, no sum exceeds 64 bits.
        let heads = tiles * packed::TILE_BYTES as u64;
        let inexact = heads + tiles * packed::ROW_BLOCKS as u64 * 4;
        let group_words = inexact + 8;
        Self { heads, inexact, group_words, bytes: group_words + tiles.div_ceil(Self::GROUP_TILES as u64) * 4 }
    }
}

/// The routes of a layer, grouped by epilogue and ascending in the largest batch.
pub type Routes<K> = Vec<BatchRoute<Route<K>>>;

impl<K> Route<K> {
    /// Returns the kernels of the route, in launch order.
    pub fn kernels(&self) -> impl Iterator<Item = &K> {
        let (first, second) = match self {
            Self::Direct(kernel) => (kernel, None),
            Self::ExpandToPacked { expand, product } => (expand, Some(product)),
            Self::ExpandToBf16 { expand, activate } => (expand, activate.as_ref()),
        };
        [first].into_iter().chain(second)
    }

    /// Replaces each kernel by the next item of `next`, in the order of [`Route::kernels`]. `None` if there are too
    /// few.
    fn with<L>(&self, next: &mut impl Iterator<Item = L>) -> Option<Route<L>> {
        Some(match self {
            Self::Direct(_) => Route::Direct(next.next()?),
            Self::ExpandToPacked { .. } => Route::ExpandToPacked { expand: next.next()?, product: next.next()? },
            Self::ExpandToBf16 { activate, .. } => Route::ExpandToBf16 {
                expand: next.next()?,
                activate: match activate {
                    Some(_) => Some(next.next()?),
                    None => None,
                },
            },
        })
    }
}

/// The use and the device for which routes are chosen.
#[derive(Clone, Debug)]
pub struct RoutePolicy {
    /// The placement of the weights: BF16, packed or compact.
    pub placement: Placement,
    /// The chooser of matmuls.
    pub chooser: PackedChooser,
    /// The maximum batch.
    pub max_batch: u32,
    /// Whether to use programmatic dependent launch.
    pub pdl: bool,
    /// The longest code of Huffman tensors in bits.
    pub code_limit: u32,
    /// The batches that cuBLAS multiplies from weights expanded to BF16.
    pub expand: Expand,
}

/// The batches that cuBLAS multiplies from weights that a kernel first expands to BF16 in a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Expand {
    /// Batches above 64 on architectures without `wgmma`, if the GPU model predicts less time than for several batch
    /// tiles of `gemm_mma`, each of which reads the weights again.
    #[default]
    Model,
    /// Batches above this one, on every architecture. For tests.
    Above(u32),
    /// No batch: layers do not need cuBLAS.
    Never,
}

/// A route for batches up to `last`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchRoute<K> {
    /// The epilogue of the product.
    pub epilogue: Epilogue,
    /// The largest batch of this route.
    pub last: u32,
    /// The kernel or kernels of the route.
    pub kernel: K,
}

/// A source of kernels for a loader: the kernels of a device, or a list of the requested variants.
pub trait KernelSource {
    /// The type of a kernel: a variant or a loaded kernel.
    type Kernel;
    /// The error if a kernel is not available.
    type Error;

    /// Returns the kernels of these variants, prepared together.
    ///
    /// # Errors
    /// A kernel cannot be compiled or loaded.
    fn take(&self, specs: &[VariantSpec]) -> Result<Vec<Self::Kernel>, Self::Error>;
}

impl RoutePolicy {
    /// Returns the decoder of whole matrices, for tensors up to the code limit.
    pub fn decoder(&self) -> Option<VariantSpec> {
        decoder(self.chooser.arch(), DecodeOutput::Full, self.code_limit)
    }

    /// Returns the kernel that expands compact tensors to BF16.
    pub fn decode_compact(&self) -> VariantSpec {
        decode_compact(self.chooser.arch())
    }

    /// Returns whether a layer of this weight stays compact.
    pub fn stays_compact(&self, weight: &Weight) -> bool {
        let is_compact = self.placement == Placement::Compact;
        is_compact && weight.node == Node::Compact && weight.is_tiled() && has_compact_gemms(self.chooser.arch())
    }

    /// Returns the routes of a layer that stays compact for every batch, grouped by epilogue and ascending in the
    /// batch. Empty if no kernel supports the shape.
    ///
    /// Above [`COMPACT_BATCH`], the product uses a kernel of the same shape as the packed layer, so its results have
    /// the same bits.
    pub fn compact_routes(&self, weight: &Weight) -> Routes<VariantSpec> {
        let (n, k) = (weight.n, weight.k);
        let small = self.max_batch.min(COMPACT_BATCH);
        let of = |&epilogue: &Epilogue| {
            let packed_use = PackedUse { escapes: true, pdl: self.pdl, epilogue };
            let direct = self.chooser.compact_choices(n, k, small, packed_use).into_iter();
            let direct = direct.map(move |(last, kernel)| BatchRoute { epilogue, last, kernel: Route::Direct(kernel) });
            let above = if self.max_batch > small {
                self.chooser.choices(n, k, self.max_batch, packed_use)
            } else {
                Vec::new()
            };
            let above: Vec<_> = above.into_iter().filter(|(last, _)| *last > small).collect();
            direct.chain(self.expanded(weight, epilogue, (small, true), &above, |kernel| {
                let product = ordinary(kernel)?;
                Some(Route::ExpandToPacked { expand: expander(self.chooser.arch()), product })
            }))
        };
        weight.epilogues().iter().flat_map(of).collect()
    }

    /// Returns the routes of a packed layer for every batch, grouped by epilogue and ascending in the batch. Empty if
    /// no kernel supports the shape.
    pub fn packed_routes(&self, weight: &Weight, escapes: bool) -> Routes<VariantSpec> {
        let choices = self.gemms(weight, escapes);
        let of = |&epilogue: &Epilogue| {
            let of_epilogue = choices.iter().filter(|choice| choice.epilogue == epilogue);
            let ranges: Vec<_> = of_epilogue.map(|choice| (choice.last, choice.kernel)).collect();
            self.expanded(weight, epilogue, (0, false), &ranges, |kernel| Some(Route::Direct(kernel)))
        };
        weight.epilogues().iter().flat_map(of).collect()
    }

    /// Turns ranges of batches above `first`, each with a kernel that multiplies packed tiles, into routes, and
    /// replaces batches that cuBLAS multiplies.
    fn expanded(
        &self,
        weight: &Weight,
        epilogue: Epilogue,
        (first, compact): (u32, bool),
        ranges: &[(u32, VariantSpec)],
        route: impl Fn(VariantSpec) -> Option<Route<VariantSpec>>,
    ) -> Routes<VariantSpec> {
        let mut routes: Routes<VariantSpec> = Vec::new();
        let mut from = first;
        for &(last, kernel) in ranges {
            // The choice changes only at these batches, as for the kernels.
            let ends = (from / 8 * 8 + 8..last).step_by(8).chain([last]);
            for m in ends {
                let use_cublas = self.prefers_cublas(weight, m, kernel, compact);
                let chosen = if use_cublas { self.by_cublas(epilogue, compact) } else { route(kernel) };
                let Some(chosen) = chosen else { continue };
                match routes.last_mut() {
                    Some(same) if same.kernel == chosen => same.last = m,
                    _ => routes.push(BatchRoute { epilogue, last: m, kernel: chosen }),
                }
            }
            from = last;
        }
        routes
    }

    /// Returns whether cuBLAS multiplies a batch instead of this kernel.
    fn prefers_cublas(&self, weight: &Weight, m: u32, kernel: VariantSpec, compact: bool) -> bool {
        let (arch, gpu) = (self.chooser.arch(), self.chooser.gpu_model());
        let Some((n, k)) = weight.padded() else { return false };
        match self.expand {
            Expand::Never => false,
            Expand::Above(batch) => m > batch,
            Expand::Model if arch.has(Instruction::Wgmma) || m <= GEMM_MMA_BATCH => false,
            Expand::Model => {
                let problem = GemmShape { m, n, k };
                // A product from the slot is an ordinary launch.
                let kernel = if compact { ordinary(kernel) } else { Some(kernel) };
                let us = kernel.and_then(|kernel| predicted_us(&kernel, problem, gpu));
                let Some(us) = us else { return false };
                let kernel_us = us.max(mma_floor_us(gpu, problem)) + if compact { expand_us(gpu, n, k) } else { 0.0 };
                bf16_us(gpu, n, k, compact) + cublas_us(gpu, problem) < kernel_us
            }
        }
    }

    /// Returns the route of expansion to BF16 and cuBLAS. `None` if the architecture has no kernel for the activation.
    pub(super) fn by_cublas(&self, epilogue: Epilogue, compact: bool) -> Option<Route<VariantSpec>> {
        let arch = self.chooser.arch();
        let expand = if compact { decode_compact(arch) } else { VariantSpec::unpack(arch) };
        // After cuBLAS, an early start gains nothing.
        let of = |spec: &VariantSpec| matches!(spec.op, Op::SiluMul(op) if !op.pdl && op.gate == GateFunction::Silu);
        let activate = match epilogue {
            Epilogue::SiluMul => Some(catalog::on::<SiluMulSpec>(arch).find(of)?),
            Epilogue::Store | Epilogue::StoreAdd => None,
        };
        Some(Route::ExpandToBf16 { expand, activate })
    }

    /// Returns the routes with kernels from a source, prepared together.
    ///
    /// # Errors
    /// An error of the source.
    pub fn take_routes<S: KernelSource>(
        source: &S,
        routes: &[BatchRoute<Route<VariantSpec>>],
    ) -> Result<Routes<S::Kernel>, S::Error> {
        let specs: Vec<VariantSpec> = routes.iter().flat_map(|choice| choice.kernel.kernels().copied()).collect();
        let mut kernels = source.take(&specs)?.into_iter();
        let with = |BatchRoute { epilogue, last, kernel }: &BatchRoute<Route<VariantSpec>>| {
            Some(BatchRoute { epilogue: *epilogue, last: *last, kernel: kernel.with(&mut kernels)? })
        };
        // A source returns as many kernels as were requested.
        Ok(routes.iter().map_while(with).collect())
    }

    /// Returns the matmuls of every batch, grouped by epilogue and ascending in the batch. Empty if none supports the
    /// shape.
    pub fn gemms(&self, weight: &Weight, escapes: bool) -> Vec<BatchRoute<VariantSpec>> {
        let Some((n, k)) = weight.padded() else { return Vec::new() };
        let of = |&epilogue: &Epilogue| {
            let packed_use = PackedUse { escapes, pdl: self.pdl, epilogue };
            let ranges = self.chooser.choices(n, k, self.max_batch, packed_use);
            ranges.into_iter().map(move |(last, kernel)| BatchRoute { epilogue, last, kernel })
        };
        weight.epilogues().iter().flat_map(of).collect()
    }
}

/// Returns a packed matmul without programmatic dependent launch.
fn ordinary(spec: VariantSpec) -> Option<VariantSpec> {
    let (escapes, epilogue) = match spec.op {
        Op::GemmMma(op) => (op.escapes, op.epilogue),
        Op::GemmWgmma(op) => (op.escapes, op.epilogue),
        _ => return None,
    };
    PackedUse { escapes, pdl: false, epilogue }.of(spec)
}

/// Returns the kernel that writes packed tiles of compact weights into a slot.
pub(super) fn expander(arch: Arch) -> VariantSpec {
    VariantSpec::decode_compact(arch, DecodeCompactStage::Packed)
}
