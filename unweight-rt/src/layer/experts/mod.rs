//! The experts of a mixture: their weights, and the launches from a router's logits to rows of tokens.
//!
//! ```text
//! logits --choose--> ids, weights --sort--> pairs by expert, items --gate and up, silu_mul--> [pairs, intermediate]
//!                        |                                      \--down-------------------> [pairs, hidden]
//!                        +--------------------------------------------------------combine--> y [tokens, hidden]
//! ```
//! Routing stays on the device. Launches do not depend on the routing decision, so they may be captured. The grid
//! covers the maximum number of items; blocks past the last item exit at once.
//!
//! A token's result depends bit for bit only on its row, its experts and their weights, not on the batch or the batch
//! tile: all tiles add up k in the same order.

pub mod offload;

use unweight_codegen::{
    VariantSpec,
    abi::RouteArgs,
    spec::{Arch, DecodeCompactStage, Epilogue, GemmGroupedSpec, RouteSpec, RouteStage, catalog},
};
use unweight_format::raw::packed::Unpackable;

pub use crate::ops::route::RouterConfig;
use crate::{
    device::{
        ContextSize, Device, DeviceBuffer, DeviceError, KernelSet, LaunchError, MatrixMut, MatrixRef, Stream,
        view::{MatrixDesc, check_apart, check_device},
    },
    exec::{ExecContext, context::ContextParts, operands::check_activations},
    ops::{
        gemm_grouped::{self, GroupedGemm, Items, Lists, Rows},
        route::{self, Router},
    },
    weight::{ExpertWeights, elements},
};

/// The maximum number of tokens processed at once; determines the size of the scratch.
pub(super) const CHUNK_TOKENS: u32 = 4096;
/// Parts of a scratch begin at multiples of this.
const ALIGN: u64 = 256;
/// The maximum number of columns of an activation matrix; no model has more.
const COLUMNS_MAX: u32 = 1 << 24;

/// The sizes of a mixture's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertsShape {
    /// The number of experts.
    pub experts: u32,
    /// Columns of a token's row; a multiple of 64.
    pub hidden: u32,
    /// Columns between gate and down; a multiple of 64.
    pub intermediate: u32,
}

/// The output of a router on the device: expert ids and weights, `[tokens, top_k]` each.
#[derive(Clone, Copy, Debug)]
pub struct Routed<'a> {
    /// Expert ids. Ids outside `0..experts` are skipped, because those experts are on another device.
    pub ids: &'a DeviceBuffer<u32>,
    /// The weight of each expert's output.
    pub weights: &'a DeviceBuffer<f32>,
    /// Experts per token.
    pub top_k: u32,
}

/// The output of a router as device addresses, which are multiples of 4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoutedAt {
    /// Device address of u32 ids; i32 works too, negative ids are skipped.
    pub ids: u64,
    /// Device address of f32 weights.
    pub weights: u64,
    /// Experts per token.
    pub top_k: u32,
}

/// The experts of a mixture, all on the device: packed, or BF16 where they cannot be packed.
#[derive(Debug)]
pub struct Experts {
    shape: ExpertsShape,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    router: Router,
    /// By ascending batch tile: the product of gate and up, and the product of down.
    products: Vec<(u32, [GroupedGemm; 2])>,
}

/// Returns the kernels of [`Experts`] on an architecture, for packed and BF16 weights.
///
/// ```
/// # use unweight_codegen::spec::Arch;
/// # use unweight_rt::raw::layer::experts::variants;
/// let names: Vec<String> = variants(Arch::Sm90a).iter().map(|spec| spec.to_string()).collect();
/// assert!(names.contains(&"uw_sm90a_gemm_grouped_b8_r3w4p2_pdl_silu_mul".to_owned()));
/// assert_eq!(names.len(), 5 + 2 * 2 * 4);
/// ```
pub fn variants(arch: Arch) -> Vec<VariantSpec> {
    let routes = RouteStage::ALL.iter().map(|stage| route::variant(arch, *stage));
    let shapes = [false, true].into_iter().flat_map(GemmGroupedSpec::shapes);
    let products = shapes.flat_map(|shape| {
        [Epilogue::SiluMul, Epilogue::Store].map(|epilogue| gemm_grouped::variant(arch, *shape, epilogue))
    });
    routes.chain(products).collect()
}

/// Returns the kernels that move experts to host memory and back, in addition to those of [`variants`].
#[doc(hidden)]
pub fn offload_variants(arch: Arch) -> Vec<VariantSpec> {
    let encode = catalog::packing(arch).chain(catalog::encode_compact(arch));
    encode.chain([VariantSpec::decode_compact(arch, DecodeCompactStage::Packed)]).collect()
}

impl ExpertsShape {
    fn check(self, top_k: u32) -> Result<(), LaunchError> {
        let Self { experts, hidden, intermediate } = self;
        route::check(experts, top_k)?;
        for (extent, value) in [("hidden", hidden), ("intermediate", intermediate)] {
            if value == 0 || !value.is_multiple_of(64) {
                return Err(LaunchError::Multiple { extent, value, of: 64 });
            }
        }
        Ok(())
    }

    /// Checks that the weights have this shape and are on the device of the kernels.
    pub(super) fn check_weights(
        self,
        kernels: &KernelSet,
        gate_up: &ExpertWeights,
        down: &ExpertWeights,
    ) -> Result<(), LaunchError> {
        self.check(1)?;
        for (weights, expected) in [(gate_up, self.gate_up()), (down, self.down())] {
            let have = weights.shape();
            if have != expected {
                return Err(LaunchError::Shape { y: [0, expected[0]], x: [0, expected[1]], w: have });
            }
            check_device("the weights of experts", weights.device().ordinal(), kernels.device().ordinal())?;
        }
        Ok(())
    }

    /// Returns output and input features of the gates and ups of all experts, concatenated by rows.
    pub fn gate_up(self) -> [u64; 2] {
        [u64::from(self.experts) * 2 * u64::from(self.intermediate), self.hidden.into()]
    }

    /// Returns output and input features of the down projections of all experts, concatenated by rows.
    pub fn down(self) -> [u64; 2] {
        [u64::from(self.experts) * u64::from(self.hidden), self.intermediate.into()]
    }

    /// Returns the bytes of scratch for a batch of `tokens`.
    pub fn scratch_bytes(self, tokens: u32, top_k: u32) -> u64 {
        Parts::of(self, tokens.min(CHUNK_TOKENS), top_k).end
    }

    /// Returns the context size for a batch of `tokens`.
    pub fn context_size(self, tokens: u32, top_k: u32) -> ContextSize {
        ContextSize { workspace_bytes: self.scratch_bytes(tokens, top_k), ..ContextSize::default() }
    }
}

/// The layout of a scratch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Parts {
    items: u64,
    gated: u64,
    rows: u64,
    end: u64,
}

impl Parts {
    fn of(shape: ExpertsShape, tokens: u32, top_k: u32) -> Self {
        let pairs = u64::from(tokens) * u64::from(top_k);
        // The smallest batch tile needs the most items.
        let items_max = pairs.min(shape.experts.into()) + pairs / u64::from(SMALLEST_TILE);
        let after = |at: u64, bytes: u64| at.saturating_add(bytes).saturating_add(ALIGN - 1) / ALIGN * ALIGN;
        let items = after(0, pairs * 4);
        let gated = after(items, items_max * 16);
        let rows = after(gated, pairs.saturating_mul(2 * u64::from(shape.intermediate)));
        Self { items, gated, rows, end: after(rows, pairs.saturating_mul(2 * u64::from(shape.hidden))) }
    }
}

const SMALLEST_TILE: u32 = 8;

/// Returns the batch tile for this many pairs: twice the average per expert, so that few experts have a second item,
/// which would read their weights again.
fn tile_for(pairs: u32, experts: u32) -> u32 {
    (2 * pairs.div_ceil(experts)).next_power_of_two().clamp(SMALLEST_TILE, 64)
}

impl Experts {
    /// Creates experts from their weights. Gate and up are `[experts * 2 * intermediate, hidden]`
    /// ([`ExpertsShape::gate_up`]), experts concatenated by rows; [`Epilogue::GATE_ROWS`] rows of a gate alternate with
    /// as many rows of its up. Down is `[experts * hidden, intermediate]`.
    ///
    /// # Errors
    /// Sizes that no kernel supports, weights of another shape or device, or a kernel that cannot be compiled or
    /// loaded.
    pub fn new(
        kernels: &KernelSet,
        sizes: ExpertsShape,
        gate_up: impl Into<ExpertWeights>,
        down: impl Into<ExpertWeights>,
    ) -> Result<Self, DeviceError> {
        let (gate_up, down) = (gate_up.into(), down.into());
        sizes.check_weights(kernels, &gate_up, &down)?;
        let arch = kernels.device().info().arch;
        kernels.prepare(&variants(arch), &|_| {})?;
        let mut products = Vec::new();
        let shapes = |weights: &ExpertWeights| GemmGroupedSpec::shapes(weights.is_bf16());
        // Both lists have the same batch tiles in the same order.
        for (upper, lower) in shapes(&gate_up).iter().zip(shapes(&down)) {
            let product = |shape: &GemmGroupedSpec, epilogue| GroupedGemm::of(kernels, *shape, epilogue);
            let pair = [product(upper, Epilogue::SiluMul)?, product(lower, Epilogue::Store)?];
            products.push((upper.batch_tile.get(), pair));
        }
        Ok(Self { shape: sizes, gate_up, down, router: Router::of(kernels)?, products })
    }

    /// Returns the sizes of the experts.
    pub fn shape(&self) -> ExpertsShape {
        self.shape
    }

    /// Returns the device that holds the weights.
    pub fn device(&self) -> &Device {
        self.gate_up.device()
    }

    /// Returns the weights of gate and up, and of down.
    pub(super) fn weights(&self) -> [&ExpertWeights; 2] {
        [&self.gate_up, &self.down]
    }

    /// Sets every byte of the weights except lists of escapes.
    pub(super) fn fill(&mut self, stream: &Stream, byte: u8) -> Result<(), DeviceError> {
        self.gate_up.fill(stream, byte)?;
        self.down.fill(stream, byte)
    }

    /// Returns the size of the weights, and of a correction bias, on the device in bytes.
    pub fn bytes(&self) -> u64 {
        self.gate_up.bytes() + self.down.bytes() + self.router.bytes()
    }

    /// Returns why gate and up, and down, are BF16; `None` if they are packed, or if BF16 was requested.
    pub fn unpackable(&self) -> [Option<Unpackable>; 2] {
        self.weights().map(ExpertWeights::unpackable)
    }

    /// Returns the context size that [`Experts::enqueue`] needs.
    pub fn context_size(&self, tokens: u32, top_k: u32) -> ContextSize {
        self.shape.context_size(tokens, top_k)
    }

    /// Enqueues the routing decision: the `top_k` largest of each row of `logits`, of equal logits the lower expert
    /// first, and shared experts ([`RouterConfig::shared`]), which are the last of all.
    ///
    /// # Errors
    /// Operands of other sizes, or a driver error.
    pub fn choose(
        &self,
        stream: &Stream,
        logits: MatrixRef<'_>,
        choice: RouterConfig,
        ids: &mut DeviceBuffer<u32>,
        weights: &mut DeviceBuffer<f32>,
    ) -> Result<(), DeviceError> {
        self.router.choose(stream, logits, self.shape.experts, choice, (ids, weights))
    }

    /// Sets the correction bias of the router, an element per expert without shared ones. Scores are then the sigmoids
    /// of logits instead of shares of the softmax, and [`Experts::choose`] takes the experts with the largest sums of
    /// score and bias.
    #[doc(hidden)]
    pub fn set_correction(&mut self, bias: DeviceBuffer<f32>) {
        self.router.set_correction(bias);
    }

    /// Returns the routing kernels.
    pub(super) fn router(&self) -> &Router {
        &self.router
    }

    /// Enqueues the experts of each row of `x`: `y[token] = sum of weight * expert(x[token])`, summed in fp32 in the
    /// order of the token's top-k places and rounded once; with `adds`, added to the contents of `y`.
    ///
    /// # Errors
    /// Operands whose shapes do not match, that overlap or are on another device; an execution context that is too
    /// small; or a driver error.
    pub fn enqueue(
        &self,
        ctx: &mut ExecContext,
        x: MatrixRef<'_>,
        routed: Routed<'_>,
        y: MatrixMut<'_>,
        adds: bool,
    ) -> Result<(), DeviceError> {
        let at = routed.check(x.rows(), self.device())?;
        ctx.size().check(self.context_size(x.rows(), routed.top_k))?;
        let ContextParts { stream, workspace, .. } = ctx.parts();
        let scratch = (workspace.partials.address(), workspace.partials.len() as u64);
        // SAFETY: ids and weights have this many elements, and the context's memory is used in stream order.
        unsafe { self.enqueue_at(stream, x, at, y, scratch, adds) }
    }

    /// # Safety
    /// `routed` names `x.rows() * top_k` ids and weights on this device that live until the work is done. `scratch` is
    /// an address, a multiple of 16, and a size in bytes of allocated memory that nothing else uses until then.
    pub(crate) unsafe fn enqueue_at(
        &self,
        stream: &Stream,
        x: MatrixRef<'_>,
        routed: RoutedAt,
        y: MatrixMut<'_>,
        scratch: (u64, u64),
        adds: bool,
    ) -> Result<(), DeviceError> {
        let (x, y) = (x.desc(), y.desc());
        self.check_operands(self.shape, (x, y), routed.top_k, scratch)?;
        for run in Run::all(self.shape, (x, y), routed, scratch.0, adds) {
            let Run { tile, route, .. } = run;
            let experts = self.shape.experts;
            // SAFETY: shapes, places and the scratch's size were checked above, the parts do not overlap, and the items
            // have `tokens * top_k` pairs and `experts` experts at most. Each kernel starts to read when the previous
            // one is done. Dropping a weight waits for the kernel.
            unsafe {
                let items = if route.tokens == 1 {
                    // Its experts are different, so sorting would not bring pairs together.
                    Items::Pairs { ids: route.ids, count: run.pairs(), experts }
                } else {
                    let count = RouteSpec::items_max(run.pairs(), experts, tile);
                    self.router.sort(stream, &RouteArgs { item_rows: tile, items_max: count, ..route })?;
                    Items::Lists(Lists { pairs: route.pairs, items: route.items, count })
                };
                self.multiply(stream, &run, items)?;
                self.router.combine(stream, &run.route)?;
            }
        }
        Ok(())
    }

    /// Checks that the operands match experts of this shape, do not overlap and are on this device.
    pub(super) fn check_operands(
        &self,
        shape: ExpertsShape,
        (x, y): (&MatrixDesc, &MatrixDesc),
        top_k: u32,
        scratch: (u64, u64),
    ) -> Result<(), DeviceError> {
        let ordinal = self.device().ordinal();
        let check = || {
            shape.check(top_k)?;
            if x.shape() != y.shape() || x.cols != shape.hidden {
                return Err(LaunchError::Shape { y: y.shape(), x: x.shape(), w: shape.down() });
            }
            check_activations("x", x, COLUMNS_MAX)?;
            check_activations("y", y, COLUMNS_MAX)?;
            x.check_device("x", ordinal)?;
            y.check_device("y", ordinal)?;
            let need = shape.scratch_bytes(x.rows, top_k);
            if scratch.1 < need {
                return Err(LaunchError::Room { buffer: "bytes of scratch", need, have: scratch.1 });
            }
            if !scratch.0.is_multiple_of(16) {
                return Err(LaunchError::Alignment { operand: "the scratch", address: scratch.0, bytes: 16 });
            }
            let used = scratch.0..scratch.0.saturating_add(need);
            check_apart(("y", y.span()), [("x", x.span()), ("the scratch", used.clone())])?;
            check_apart(("the scratch", used), [("x", x.span())])
        };
        check().or_else(|refusal| self.router.refuse(refusal))
    }

    /// Returns the products with the batch tile of a run: of gate and up, and of down.
    fn products(&self, run: &Run) -> Result<&[GroupedGemm; 2], DeviceError> {
        match self.products.iter().find(|(rows, _)| *rows == run.tile) {
            Some((_, products)) => Ok(products),
            None => self.router.refuse(LaunchError::Family { wanted: "a grouped matmul with this batch tile" }),
        }
    }

    /// Enqueues both products of items.
    ///
    /// # Safety
    /// The operands of the run were checked, and the items have its pairs and experts of these weights; all memory
    /// stays allocated until the work is done.
    unsafe fn multiply(&self, stream: &Stream, run: &Run, items: Items) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        unsafe {
            self.multiply_gate_up(stream, run, items)?;
            self.multiply_down(stream, run, items)
        }
    }

    /// Enqueues the product of gate and up of items, with its activation.
    ///
    /// # Safety
    /// As for [`Experts::multiply`].
    pub(super) unsafe fn multiply_gate_up(&self, stream: &Stream, run: &Run, items: Items) -> Result<(), DeviceError> {
        let ExpertsShape { hidden, intermediate, .. } = self.shape;
        let (x, x_row_bytes) = run.x;
        let rows = Rows { x, x_row_bytes, y: run.gated, pairs_per_row: run.route.top_k };
        // SAFETY: the caller's promise.
        unsafe { self.products(run)?[0].launch(stream, &self.gate_up, [2 * intermediate, hidden], items, rows) }
    }

    /// Enqueues the product of down of items, after [`Experts::multiply_gate_up`].
    ///
    /// # Safety
    /// As for [`Experts::multiply`].
    pub(super) unsafe fn multiply_down(&self, stream: &Stream, run: &Run, items: Items) -> Result<(), DeviceError> {
        let ExpertsShape { hidden, intermediate, .. } = self.shape;
        let x_row_bytes = 2 * u64::from(intermediate);
        let rows = Rows { x: run.gated, x_row_bytes, y: run.route.products, pairs_per_row: 1 };
        // SAFETY: the caller's promise.
        unsafe { self.products(run)?[1].launch(stream, &self.down, [hidden, intermediate], items, rows) }
    }
}

/// The work for one chunk of tokens.
pub(super) struct Run {
    /// The batch tile of the products.
    pub(super) tile: u32,
    /// The first token.
    pub(super) first: u32,
    /// Address of the rows of tokens, and their pitch in bytes.
    x: (u64, u64),
    /// Address of the rows between the two products.
    gated: u64,
    /// The arguments of routing, except the sizes of the lists.
    pub(super) route: RouteArgs,
}

impl Run {
    /// Splits the tokens of checked operands into runs of [`CHUNK_TOKENS`].
    pub(super) fn all<'a>(
        shape: ExpertsShape,
        (x, y): (&'a MatrixDesc, &'a MatrixDesc),
        routed: RoutedAt,
        scratch: u64,
        adds: bool,
    ) -> impl Iterator<Item = Self> + use<'a> {
        let ExpertsShape { experts, hidden, .. } = shape;
        let RoutedAt { ids, weights, top_k } = routed;
        (0..x.rows).step_by(CHUNK_TOKENS as usize).map(move |first| {
            let tokens = (x.rows - first).min(CHUNK_TOKENS);
            let parts = Parts::of(shape, tokens, top_k);
            let row = |pitch: u64| u64::from(first) * pitch * 2;
            let offset = u64::from(top_k) * 4 * u64::from(first);
            let route = RouteArgs {
                ids: ids + offset,
                weights: weights + offset,
                pairs: scratch,
                items: scratch + parts.items,
                products: scratch + parts.rows,
                y: y.address + row(y.pitch),
                y_pitch: y.pitch,
                tokens,
                experts,
                top_k,
                columns: hidden,
                row_blocks: hidden.div_ceil(RouteSpec::BLOCK_COLUMNS),
                adds: adds.into(),
                ..RouteArgs::default()
            };
            let (tile, gated) = (tile_for(tokens * top_k, experts), scratch + parts.gated);
            Self { tile, first, x: (x.address + row(x.pitch), 2 * x.pitch), gated, route }
        })
    }

    /// Returns the number of pairs of tokens and top-k places.
    pub(super) fn pairs(&self) -> u32 {
        self.route.tokens * self.route.top_k
    }
}

impl Routed<'_> {
    /// Returns the device addresses of the routing decision for this many tokens.
    pub(super) fn check(self, tokens: u32, device: &Device) -> Result<RoutedAt, LaunchError> {
        let Routed { ids, weights, top_k } = self;
        let pairs = tokens as usize * top_k as usize;
        elements("ids", ids.len().min(pairs), pairs)?;
        elements("weights of experts", weights.len().min(pairs), pairs)?;
        check_device("ids", ids.device().ordinal(), device.ordinal())?;
        check_device("weights of experts", weights.device().ordinal(), device.ordinal())?;
        Ok(RoutedAt { ids: ids.address(), weights: weights.address(), top_k })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QWEN3: ExpertsShape = ExpertsShape { experts: 128, hidden: 2048, intermediate: 768 };

    #[test]
    fn scratch_parts_do_not_overlap_and_are_large_enough() {
        for (tokens, top_k) in [(1, 8), (3, 2), (64, 8), (4096, 8)] {
            let (parts, pairs) = (Parts::of(QWEN3, tokens, top_k), u64::from(tokens * top_k));
            assert!(parts.items >= pairs * 4);
            for tile in [8, 16, 32, 64] {
                let items = RouteSpec::items_max(tokens * top_k, QWEN3.experts, tile);
                assert!(parts.gated - parts.items >= u64::from(items) * 16, "{tokens} tokens, tile {tile}");
            }
            assert!(parts.rows - parts.gated >= pairs * 768 * 2 && parts.end - parts.rows >= pairs * 2048 * 2);
            assert!([parts.items, parts.gated, parts.rows, parts.end].iter().all(|at| at.is_multiple_of(ALIGN)));
        }
        assert_eq!(QWEN3.scratch_bytes(100_000, 8), QWEN3.scratch_bytes(CHUNK_TOKENS, 8), "longer batches are split");
    }

    #[test]
    fn batch_tiles_grow_with_what_an_expert_has() {
        let tiles = |experts, pairs: [u32; 6]| pairs.map(|pairs| tile_for(pairs, experts));
        assert_eq!(tiles(128, [8, 512, 513, 1024, 2048, 32768]), [8, 8, 16, 16, 32, 64]);
        assert_eq!(tiles(8, [2, 32, 64, 128, 256, 8192]), [8, 8, 16, 32, 64, 64]);
    }

    #[test]
    fn unsupported_sizes_are_rejected() {
        assert_eq!(QWEN3.check(8), Ok(()));
        assert_eq!(QWEN3.check(33), Err(LaunchError::Experts { experts: 128, top_k: 33 }));
        let of = |experts, hidden, intermediate| ExpertsShape { experts, hidden, intermediate }.check(1);
        assert_eq!(of(0, 64, 64), Err(LaunchError::Experts { experts: 0, top_k: 1 }));
        assert_eq!(of(513, 64, 64), Err(LaunchError::Experts { experts: 513, top_k: 1 }));
        assert_eq!(of(8, 64, 96), Err(LaunchError::Multiple { extent: "intermediate", value: 96, of: 64 }));
    }

    #[test]
    fn every_architecture_has_the_kernels() {
        for &arch in Arch::ALL {
            for spec in variants(arch).into_iter().chain(offload_variants(arch)) {
                assert!(unweight_codegen::plan::Plan::new(&spec).is_ok(), "{spec}");
            }
        }
    }
}
