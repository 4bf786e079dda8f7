//! The experts of a mixture: packed weights of all of them, and the launches between a router's choice and rows of
//! tokens.
//!
//! ```text
//! logits --choose--> ids, weights --sort--> pairs by expert, items --gate and up, silu_mul--> [pairs, intermediate]
//!                        |                                      \--down-------------------> [pairs, hidden]
//!                        +--------------------------------------------------------combine--> y [tokens, hidden]
//! ```
//! Routing stays on the device: a launch is the same whatever tokens choose, so all of it may be captured. The grid is
//! for as many items as there may be; blocks past the last leave at once.
//!
//! A token's bits follow from its row, its experts and their weights: not from the batch, nor from the batch tile,
//! since all tiles add up k in one order.

use std::sync::Arc;

use unweight_codegen::{
    VariantSpec,
    abi::{GemmGroupedArgs, RouteArgs},
    family::Instruction,
    plan::GemmShape,
    spec::{Arch, Epilogue, GemmGroupedSpec, RouteSpec, RouteStage},
};

use crate::{
    device::{
        Device, DeviceBuffer, DeviceError, KernelSet, LaneSize, MatrixMut, MatrixRef, Refusal, Stream,
        module::LoadedKernel,
        view::{Place, check_apart, check_device},
    },
    ops::{
        check_activations,
        lane::{Lane, LaneParts},
    },
    weight::{DevicePacked, elements, room, shape},
};

/// Tokens that are worked on at a time: what the scratch is for.
pub(super) const CHUNK_TOKENS: u32 = 4096;
/// Parts of a scratch begin at multiples of this.
const ALIGN: u64 = 256;
/// Columns of a matrix of activations: more than any model has.
const COLUMNS_MAX: u32 = 1 << 24;

/// The sizes of a mixture's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertsShape {
    /// How many there are.
    pub experts: u32,
    /// Columns of a token's row: a multiple of 64.
    pub hidden: u32,
    /// Columns between gate and down: a multiple of 64.
    pub intermediate: u32,
}

/// How a router's logits become weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Experts of a token.
    pub top_k: u32,
    /// A token's weights add up to 1; otherwise they are shares of the softmax over all experts.
    pub normalized: bool,
    /// Weights are rounded to bf16.
    pub rounded: bool,
}

/// What a router has chosen, on the device: `[tokens, top_k]` of each.
#[derive(Clone, Copy, Debug)]
pub struct Routed<'a> {
    /// Experts. What is not below their number is no work: an expert that another device has.
    pub ids: &'a DeviceBuffer<u32>,
    /// What their rows are multiplied by.
    pub weights: &'a DeviceBuffer<f32>,
    /// Experts of a token.
    pub top_k: u32,
}

/// The same by addresses, multiples of 4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoutedAt {
    /// u32 (or i32, of which negative ones are no work).
    pub ids: u64,
    /// f32.
    pub weights: u64,
    /// Experts of a token.
    pub top_k: u32,
}

/// The experts of a mixture, packed.
#[derive(Debug)]
pub struct Experts {
    shape: ExpertsShape,
    gate_up: DevicePacked,
    down: DevicePacked,
    topk: Arc<LoadedKernel>,
    sort: Arc<LoadedKernel>,
    combine: Arc<LoadedKernel>,
    /// By batch tile, growing: the gate and up, and the down.
    products: Vec<(u32, [Arc<LoadedKernel>; 2])>,
}

/// The kernels of [`Experts`] on an architecture.
///
/// ```
/// # use unweight_codegen::spec::Arch;
/// # use unweight_rt::layer::experts::variants;
/// let names: Vec<String> = variants(Arch::Sm90a).iter().map(|spec| spec.to_string()).collect();
/// assert!(names.contains(&"uw_sm90a_gemm_grouped_b8_r4w8p2_pdl_silu_mul".to_owned()));
/// assert_eq!(names.len(), 3 + 2 * 4);
/// ```
pub fn variants(arch: Arch) -> Vec<VariantSpec> {
    let pdl = arch.has(Instruction::DependentLaunch);
    let routes = RouteStage::ALL.iter().map(|stage| VariantSpec::route(arch, RouteSpec { stage: *stage, pdl }));
    let products = GemmGroupedSpec::shapes(arch).iter().flat_map(|shape| {
        [Epilogue::SiluMul, Epilogue::Store]
            .map(|epilogue| VariantSpec::gemm_grouped(arch, GemmGroupedSpec { pdl, epilogue, ..*shape }))
    });
    routes.chain(products).collect()
}

impl ExpertsShape {
    fn check(self, top_k: u32) -> Result<(), Refusal> {
        let Self { experts, hidden, intermediate } = self;
        if !(1..=RouteSpec::EXPERTS_MAX).contains(&experts) || !(1..=RouteSpec::TOP_K_MAX).contains(&top_k) {
            return Err(Refusal::Experts { experts, top_k });
        }
        for (extent, value) in [("hidden", hidden), ("intermediate", intermediate)] {
            if value == 0 || !value.is_multiple_of(64) {
                return Err(Refusal::Multiple { extent, value, of: 64 });
            }
        }
        Ok(())
    }

    /// That weights are of this shape, on the device of the kernels.
    pub(super) fn check_weights(
        self,
        kernels: &KernelSet,
        gate_up: &DevicePacked,
        down: &DevicePacked,
    ) -> Result<(), Refusal> {
        self.check(1)?;
        for (weights, wanted) in [(gate_up, self.gate_up()), (down, self.down())] {
            let have = shape(weights.grid());
            if have != wanted {
                return Err(Refusal::Shape { y: [0, wanted[0]], x: [0, wanted[1]], w: have });
            }
            check_device("the weights of experts", weights.device().ordinal(), kernels.device().ordinal())?;
        }
        Ok(())
    }

    /// Output and input features of the gate and up of all experts, one below the other.
    pub fn gate_up(self) -> [u64; 2] {
        [u64::from(self.experts) * 2 * u64::from(self.intermediate), self.hidden.into()]
    }

    /// The same of the down.
    pub fn down(self) -> [u64; 2] {
        [u64::from(self.experts) * u64::from(self.hidden), self.intermediate.into()]
    }

    /// Bytes beside the operands that tokens need.
    pub fn scratch_bytes(self, tokens: u32, top_k: u32) -> u64 {
        Parts::of(self, tokens.min(CHUNK_TOKENS), top_k).end
    }

    /// What a lane needs for them.
    pub fn lane_size(self, tokens: u32, top_k: u32) -> LaneSize {
        LaneSize { workspace_bytes: self.scratch_bytes(tokens, top_k), ..LaneSize::default() }
    }
}

/// What lies where in a scratch.
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
        // Of the smallest batch tile there are most.
        let items_max = pairs.min(shape.experts.into()) + pairs / u64::from(SMALLEST_TILE);
        let after = |at: u64, bytes: u64| at.saturating_add(bytes).saturating_add(ALIGN - 1) / ALIGN * ALIGN;
        let items = after(0, pairs * 4);
        let gated = after(items, items_max * 16);
        let rows = after(gated, pairs.saturating_mul(2 * u64::from(shape.intermediate)));
        Self { items, gated, rows, end: after(rows, pairs.saturating_mul(2 * u64::from(shape.hidden))) }
    }
}

const SMALLEST_TILE: u32 = 8;

/// The batch tile for so many pairs: twice what an expert has when they are spread evenly, so that few experts have a
/// second item, which reads its weights again.
fn tile_for(pairs: u32, experts: u32) -> u32 {
    (2 * pairs.div_ceil(experts)).next_power_of_two().clamp(SMALLEST_TILE, 64)
}

impl Experts {
    /// Experts of packed weights: those of gate and up one expert below the other, `[experts * 2 * intermediate,
    /// hidden]` ([`ExpertsShape::gate_up`]), in which [`Epilogue::GATE_ROWS`] rows of a gate and as many of its up take
    /// turns; those of the down likewise, `[experts * hidden, intermediate]`.
    ///
    /// # Errors
    /// Sizes that no kernel takes, weights of another shape or device, or a kernel that cannot be made.
    pub fn new(
        kernels: &KernelSet,
        sizes: ExpertsShape,
        gate_up: DevicePacked,
        down: DevicePacked,
    ) -> Result<Self, DeviceError> {
        sizes.check_weights(kernels, &gate_up, &down)?;
        let arch = kernels.device().info().arch;
        kernels.prepare(&variants(arch), &|_| {})?;
        let pdl = arch.has(Instruction::DependentLaunch);
        let route = |stage| kernels.get(&VariantSpec::route(arch, RouteSpec { stage, pdl }));
        let mut products = Vec::new();
        for shape in GemmGroupedSpec::shapes(arch) {
            let product =
                |epilogue| kernels.get(&VariantSpec::gemm_grouped(arch, GemmGroupedSpec { pdl, epilogue, ..*shape }));
            products.push((shape.batch_tile.get(), [product(Epilogue::SiluMul)?, product(Epilogue::Store)?]));
        }
        Ok(Self {
            shape: sizes,
            gate_up,
            down,
            topk: route(RouteStage::Topk)?,
            sort: route(RouteStage::Sort)?,
            combine: route(RouteStage::Combine)?,
            products,
        })
    }

    /// Its sizes.
    pub fn shape(&self) -> ExpertsShape {
        self.shape
    }

    /// The device.
    pub fn device(&self) -> &Device {
        self.gate_up.device()
    }

    /// Gate and up, and down.
    pub(super) fn weights(&self) -> [&DevicePacked; 2] {
        [&self.gate_up, &self.down]
    }

    /// Overwrites tiles and heads.
    pub(super) fn fill(&mut self, stream: &Stream, byte: u8) -> Result<(), DeviceError> {
        self.gate_up.fill(stream, byte)?;
        self.down.fill(stream, byte)
    }

    /// Bytes of its weights on the device.
    pub fn bytes(&self) -> u64 {
        self.gate_up.bytes() + self.down.bytes()
    }

    /// What [`Experts::enqueue`] needs of a lane.
    pub fn lane_size(&self, tokens: u32, top_k: u32) -> LaneSize {
        self.shape.lane_size(tokens, top_k)
    }

    /// Enqueues a router's choice: of each row of `logits` the `top_k` largest, of equal ones the lower expert first.
    ///
    /// # Errors
    /// Operands of other sizes, or the driver's refusal.
    pub fn choose(
        &self,
        stream: &Stream,
        logits: MatrixRef<'_>,
        choice: Choice,
        ids: &mut DeviceBuffer<u32>,
        weights: &mut DeviceBuffer<f32>,
    ) -> Result<(), DeviceError> {
        self.choose_of(self.shape, stream, logits, choice, ids, weights)
    }

    /// The same among experts of another number.
    pub(super) fn choose_of(
        &self,
        shape: ExpertsShape,
        stream: &Stream,
        logits: MatrixRef<'_>,
        choice: Choice,
        ids: &mut DeviceBuffer<u32>,
        weights: &mut DeviceBuffer<f32>,
    ) -> Result<(), DeviceError> {
        let (place, own) = (logits.place(), self.device().ordinal());
        let check = || {
            shape.check(choice.top_k)?;
            if place.cols != shape.experts || choice.top_k > shape.experts {
                return Err(Refusal::Experts { experts: place.cols, top_k: choice.top_k });
            }
            place.check_device("logits", own)?;
            let pairs = place.rows as usize * choice.top_k as usize;
            room("ids", ids.len(), pairs)?;
            room("weights of experts", weights.len(), pairs)
        };
        check().or_else(|refusal| self.topk.refuse(refusal))?;
        let args = RouteArgs {
            logits: place.address,
            ids: ids.address(),
            weights: weights.address(),
            logits_pitch: place.pitch,
            tokens: place.rows,
            experts: shape.experts,
            top_k: choice.top_k,
            normalized: choice.normalized.into(),
            rounded: choice.rounded.into(),
            ..RouteArgs::default()
        };
        // SAFETY: sizes were held against each other above; dropping a buffer waits for the kernel.
        unsafe { self.topk.launch(stream, GemmShape::rows(place.rows), &args) }
    }

    /// Enqueues the experts of each row of `x`: `y[token] = sum of weight * expert(x[token])`, in fp32 over the places
    /// of a token in their order, rounded once; with `adds` on top of what `y` holds.
    ///
    /// # Errors
    /// Operands that do not agree, overlap, or lie on another device; a lane that is too small; or the driver's
    /// refusal.
    pub fn enqueue(
        &self,
        lane: &mut Lane,
        x: MatrixRef<'_>,
        routed: Routed<'_>,
        y: MatrixMut<'_>,
        adds: bool,
    ) -> Result<(), DeviceError> {
        let at = routed.check(x.rows(), self.device())?;
        lane.size().check(self.lane_size(x.rows(), routed.top_k))?;
        let LaneParts { stream, workspace, .. } = lane.parts();
        let scratch = (workspace.partials.address(), workspace.partials.len() as u64);
        // SAFETY: ids and weights have so many elements, and the lane's memory is used in stream order.
        unsafe { self.enqueue_at(stream, x, at, y, scratch, adds) }
    }

    /// # Safety
    /// `routed` names `x.rows() * top_k` ids and weights on this device that live until the work is done, and `scratch`
    /// an address, a multiple of 16, and bytes that are there and that nobody else uses until then.
    pub(crate) unsafe fn enqueue_at(
        &self,
        stream: &Stream,
        x: MatrixRef<'_>,
        routed: RoutedAt,
        y: MatrixMut<'_>,
        scratch: (u64, u64),
        adds: bool,
    ) -> Result<(), DeviceError> {
        let (x, y) = (x.place(), y.place());
        self.check_operands(self.shape, (x, y), routed.top_k, scratch)?;
        for run in Run::all(self.shape, (x, y), routed, scratch.0, adds) {
            let Run { tile, route, .. } = run;
            let items_max = RouteSpec::items_max(run.pairs(), self.shape.experts, tile);
            let route = RouteArgs { item_rows: tile, items_max, ..route };
            let lists = Lists { pairs: route.pairs, items: route.items, count: items_max };
            // SAFETY: shapes, places and the scratch's size were held against each other above, the parts are apart
            // from each other, and the lists name what `sort` has found within `tokens * top_k` pairs and `experts`
            // experts. Each kernel starts to read when the one before is done. Dropping a weight waits for the kernel.
            unsafe {
                self.sort.launch(stream, GemmShape::rows(1), &route)?;
                self.multiply(stream, &run, lists)?;
                self.combine(stream, &run)?;
            }
        }
        Ok(())
    }

    /// That operands of experts of this shape agree, and lie apart on this device.
    pub(super) fn check_operands(
        &self,
        shape: ExpertsShape,
        (x, y): (&Place, &Place),
        top_k: u32,
        scratch: (u64, u64),
    ) -> Result<(), DeviceError> {
        let own = self.device().ordinal();
        let check = || {
            shape.check(top_k)?;
            if x.shape() != y.shape() || x.cols != shape.hidden {
                return Err(Refusal::Shape { y: y.shape(), x: x.shape(), w: shape.down() });
            }
            check_activations("x", x, COLUMNS_MAX)?;
            check_activations("y", y, COLUMNS_MAX)?;
            x.check_device("x", own)?;
            y.check_device("y", own)?;
            let need = shape.scratch_bytes(x.rows, top_k);
            if scratch.1 < need {
                return Err(Refusal::Room { buffer: "bytes of scratch", need, have: scratch.1 });
            }
            if !scratch.0.is_multiple_of(16) {
                return Err(Refusal::Alignment { operand: "the scratch", address: scratch.0, bytes: 16 });
            }
            let used = scratch.0..scratch.0.saturating_add(need);
            check_apart(("y", y.span()), [("x", x.span()), ("the scratch", used.clone())])?;
            check_apart(("the scratch", used), [("x", x.span())])
        };
        check().or_else(|refusal| self.sort.refuse(refusal))
    }

    /// Enqueues both products of the items of a list.
    ///
    /// # Safety
    /// The operands of the run were checked, and the lists name pairs of it and experts of these weights; all of it is
    /// there until the work is done.
    pub(super) unsafe fn multiply(&self, stream: &Stream, run: &Run, lists: Lists) -> Result<(), DeviceError> {
        let ExpertsShape { hidden, intermediate, .. } = self.shape;
        let Some((_, [gate_up, down])) = self.products.iter().find(|(rows, _)| *rows == run.tile) else {
            return self.sort.refuse(Refusal::Family { wanted: "a grouped product of this batch tile" });
        };
        let product = |w: &DevicePacked, (x, x_row_bytes), y, [n, k]: [u32; 2], pairs_per_row| GemmGroupedArgs {
            packed: w.packed().address(),
            escape_heads: w.escape_heads().address(),
            escapes: w.escapes().address(),
            y,
            x_data: x,
            x_row_bytes,
            pairs: lists.pairs,
            items: lists.items,
            scale: w.window().scale(),
            // Below 2^32: checked when the tensor was made.
            escape_words: w.escapes().len() as u32,
            n,
            k,
            tile_cols: k / 64,
            pairs_per_row,
        };
        let (wide, narrow) = ([2 * intermediate, hidden], [hidden, intermediate]);
        let first = product(&self.gate_up, run.x, run.gated, wide, run.route.top_k);
        let second = product(&self.down, (run.gated, 2 * u64::from(intermediate)), run.route.products, narrow, 1);
        let of_items = |[n, k]: [u32; 2]| GemmShape { m: lists.count, n, k };
        // SAFETY: the caller's promise.
        unsafe {
            gate_up.launch(stream, of_items(wide), &first)?;
            down.launch(stream, of_items(narrow), &second)
        }
    }

    /// Enqueues the sums of each token's rows.
    ///
    /// # Safety
    /// The operands of the run were checked, and are there until the work is done.
    pub(super) unsafe fn combine(&self, stream: &Stream, run: &Run) -> Result<(), DeviceError> {
        let problem = GemmShape { m: run.route.tokens, n: run.route.columns, k: 0 };
        // SAFETY: the caller's promise.
        unsafe { self.combine.launch(stream, problem, &run.route) }
    }
}

/// Work for some tokens at a time.
pub(super) struct Run {
    /// The batch tile of the products.
    pub(super) tile: u32,
    /// The first token.
    pub(super) first: u32,
    /// The rows of tokens, and the bytes from one to the next.
    x: (u64, u64),
    /// The rows between the two products.
    gated: u64,
    /// What routing needs but for the lists' sizes.
    pub(super) route: RouteArgs,
}

/// Lists of pairs, by addresses.
#[derive(Clone, Copy)]
pub(super) struct Lists {
    pub(super) pairs: u64,
    pub(super) items: u64,
    /// Items.
    pub(super) count: u32,
}

impl Run {
    /// All tokens, [`CHUNK_TOKENS`] at a time, of operands that were checked.
    pub(super) fn all<'a>(
        shape: ExpertsShape,
        (x, y): (&'a Place, &'a Place),
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
            let place = u64::from(top_k) * 4 * u64::from(first);
            let route = RouteArgs {
                ids: ids + place,
                weights: weights + place,
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

    /// Tokens and places.
    pub(super) fn pairs(&self) -> u32 {
        self.route.tokens * self.route.top_k
    }
}

impl Routed<'_> {
    /// The addresses of choices for so many tokens.
    pub(super) fn check(self, tokens: u32, device: &Device) -> Result<RoutedAt, Refusal> {
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
        assert_eq!(QWEN3.scratch_bytes(100_000, 8), QWEN3.scratch_bytes(CHUNK_TOKENS, 8), "longer batches take turns");
    }

    #[test]
    fn batch_tiles_grow_with_what_an_expert_has() {
        let tiles = |experts, pairs: [u32; 6]| pairs.map(|pairs| tile_for(pairs, experts));
        assert_eq!(tiles(128, [8, 512, 513, 1024, 2048, 32768]), [8, 8, 16, 16, 32, 64]);
        assert_eq!(tiles(8, [2, 32, 64, 128, 256, 8192]), [8, 8, 16, 32, 64, 64]);
    }

    #[test]
    fn sizes_that_no_kernel_takes_are_refused() {
        assert_eq!(QWEN3.check(8), Ok(()));
        assert_eq!(QWEN3.check(33), Err(Refusal::Experts { experts: 128, top_k: 33 }));
        let of = |experts, hidden, intermediate| ExpertsShape { experts, hidden, intermediate }.check(1);
        assert_eq!(of(0, 64, 64), Err(Refusal::Experts { experts: 0, top_k: 1 }));
        assert_eq!(of(513, 64, 64), Err(Refusal::Experts { experts: 513, top_k: 1 }));
        assert_eq!(of(8, 64, 96), Err(Refusal::Multiple { extent: "intermediate", value: 96, of: 64 }));
    }

    #[test]
    fn every_architecture_has_the_kernels() {
        for &arch in Arch::ALL {
            for spec in variants(arch) {
                assert!(unweight_codegen::plan::Plan::new(&spec).is_ok(), "{spec}");
            }
        }
    }
}
