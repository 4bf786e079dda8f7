//! Linear layers: `Y[m, n] = X[m, k] * W[n, k]^T` on a GPU, whatever form the weights are stored in, at every batch.
//!
//! [`Loader`](crate::layer::loader::Loader) makes them. Everything that a batch can ask for is compiled and allocated
//! by then; [`Linear::enqueue`] only enqueues, so it may be captured into a graph. Shapes that are no multiples of 64
//! take a padded path: two copies beside the product.
//!
//! ```no_run
//! use unweight_codegen::spec::Epilogue;
//! use unweight_format::bundle::Bundle;
//! use unweight_rt::{Device, DeviceMatrix, KernelSet, LoadOptions, Loader, Merge, env::Env, jit::cache::Progress};
//!
//! let device = Device::open(0)?;
//! let (kernels, stream) = (KernelSet::open(&device, Env::process()?), device.stream()?);
//! let bundle = Bundle::open("bundle".as_ref())?;
//! let progress = |kernel: &Progress<'_>| eprintln!("[{}/{}] {}", kernel.done, kernel.total, kernel.artifact.name);
//! let (mut loader, _) = Loader::new(&kernels, &stream, &bundle, LoadOptions::default(), &progress)?;
//! let mlp = loader.merge(&["mlp.gate_proj.weight", "mlp.up_proj.weight"], Merge::SiluMul)?;
//! let down = loader.load("mlp.down_proj.weight")?;
//! let mut lane = loader.lane(&stream)?;
//!
//! let (m, x) = (8, DeviceMatrix::zeroed(&stream, 8, mlp.k())?);
//! let mut activated = DeviceMatrix::zeroed(&stream, m, mlp.n() / 2)?;
//! let mut residual = DeviceMatrix::zeroed(&stream, m, down.n())?;
//! mlp.enqueue(&mut lane, x.view(), activated.view_mut(), Epilogue::SiluMul)?;
//! down.enqueue(&mut lane, activated.view(), residual.view_mut(), Epilogue::StoreAdd)?;
//! lane.synchronize()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//! A lane knows its stream, so a layer cannot be put on another one by mistake, whoever multiplies:
//! ```compile_fail,E0061
//! # use unweight_codegen::spec::Epilogue;
//! # use unweight_rt::{device::{DeviceError, Stream}, layer::linear::Linear, ops::lane::Lane, weight::DeviceMatrix};
//! # fn run(layer: &Linear, other: &Stream, lane: &mut Lane, x: &DeviceMatrix, y: &mut DeviceMatrix) -> Result<(), DeviceError> {
//! layer.enqueue(other, lane, x.view(), y.view_mut(), Epilogue::Store)
//! # }
//! ```

use std::{ops::Range, sync::Arc};

use unweight_codegen::{VariantSpec, plan::GemmShape, spec::Epilogue};
use unweight_format::TileGrid;

use crate::{
    choose::reachable::{Choice, Linears, Wanted, Way, Ways, Weight},
    device::{
        DeviceBuffer, DeviceError, LaneSize, MatrixMut, MatrixRef, Refusal, Stream,
        module::LoadedKernel,
        view::{Place, check_device},
        workspace::Workspace,
    },
    ops::{
        check_product,
        cublas::Cublas,
        gemm_compact::CompactGemm,
        gemm_packed::{self, PackedGemm},
        lane::{Lane, LaneParts},
        repack::Unpacker,
        silu_mul::SiluMul,
        transcode::{Expander, Transcoder},
    },
    weight::{DeviceCompact, DeviceMatrix, DevicePacked, PackedEscapes},
};

/// A linear layer on the device.
#[derive(Debug)]
pub struct Linear {
    n: u32,
    k: u32,
    weights: Weights,
    /// By epilogue, ascending in the largest batch. Empty where cuBLAS multiplies every batch.
    choices: Vec<Choice<Multiply>>,
}

#[derive(Debug)]
enum Weights {
    Packed(DevicePacked),
    /// Compact, and what the packed form has beside the tiles that are written into the slot.
    Compact(DeviceCompact, PackedEscapes),
    Whole(DeviceMatrix),
}

impl Weights {
    /// Shape and tiling, padding included; `None` of weights that cuBLAS reads as they lie.
    fn grid(&self) -> Option<TileGrid> {
        match self {
            Self::Packed(packed) => Some(packed.grid()),
            Self::Compact(compact, _) => Some(compact.grid()),
            Self::Whole(_) => None,
        }
    }

    /// Rows and columns of that, which fit 32 bits.
    fn padded(&self) -> Option<(u32, u32)> {
        self.grid().map(|grid| (grid.rows() as u32, grid.cols() as u32))
    }

    fn ordinal(&self) -> usize {
        match self {
            Self::Packed(packed) => packed.device().ordinal(),
            Self::Compact(compact, _) => compact.device().ordinal(),
            Self::Whole(whole) => whole.data().device().ordinal(),
        }
    }

    /// The addresses of its sections.
    fn spans(&self) -> impl Iterator<Item = (&'static str, Range<u64>)> {
        // A launch allocates nothing, on the host neither.
        let (packed, compact, whole) = match self {
            Self::Packed(packed) => (Some(packed.spans()), None, None),
            Self::Compact(compact, escapes) => (None, Some((compact.spans(), escapes.spans())), None),
            Self::Whole(whole) => (None, None, Some(("the weights", whole.view().place().span()))),
        };
        let compact = compact.into_iter().flat_map(|(compact, escapes)| compact.into_iter().chain(escapes));
        packed.into_iter().flatten().chain(compact).chain(whole)
    }

    fn bytes(&self) -> u64 {
        match self {
            Self::Packed(packed) => packed.bytes(),
            Self::Compact(compact, escapes) => compact.bytes() + escapes.bytes(),
            Self::Whole(whole) => whole.bytes() as u64,
        }
    }
}

/// How a batch is multiplied.
#[derive(Debug)]
enum Multiply {
    Packed(PackedGemm),
    Compact(CompactGemm),
    /// Packed tiles are written into the lane's slot, then multiplied with.
    Slot(Expander, PackedGemm),
    /// BF16 is written into the lane's slot, then cuBLAS multiplies; a gate and an up are activated behind it.
    Cublas(ToBf16, Option<SiluMul>),
}

/// What writes BF16 into a slot.
#[derive(Debug)]
enum ToBf16 {
    Packed(Unpacker),
    Compact(Transcoder),
}

/// Rows of a product of a gate and an up that lie beside them before they are activated: what a large batch takes at a
/// time.
const PRODUCT_ROWS: u32 = 512;

/// What a product runs on and in.
struct Beside<'a> {
    stream: &'a Stream,
    workspace: &'a mut Workspace,
    slot: &'a mut DeviceBuffer<u8>,
    cublas: Option<&'a mut Cublas>,
    /// Room for products that are not activated yet.
    product: Option<&'a mut DeviceBuffer<u16>>,
}

impl<'a> From<LaneParts<'a>> for Beside<'a> {
    fn from(parts: LaneParts<'a>) -> Self {
        let LaneParts { stream, workspace, padded, slot, cublas } = parts;
        Self { stream, workspace, slot, cublas, product: Some(&mut padded.y) }
    }
}

impl Multiply {
    fn of(way: Way<Arc<LoadedKernel>>, compact: bool) -> Result<Self, DeviceError> {
        Ok(match way {
            Way::Direct(kernel) if compact => Self::Compact(CompactGemm::new(kernel)?),
            Way::Direct(kernel) => Self::Packed(PackedGemm::new(kernel)?),
            Way::Slot { expand, product } => Self::Slot(Expander::new(expand)?, PackedGemm::new(product)?),
            Way::Cublas { expand, activate } => {
                let expand = if compact {
                    ToBf16::Compact(Transcoder::new(expand)?)
                } else {
                    ToBf16::Packed(Unpacker::new(expand)?)
                };
                Self::Cublas(expand, activate.map(SiluMul::new).transpose()?)
            }
        })
    }
}

impl Multiply {
    /// The kernel of the product; `None` if cuBLAS has it.
    fn kernel(&self) -> Option<&LoadedKernel> {
        match self {
            Self::Packed(gemm) | Self::Slot(_, gemm) => Some(gemm.kernel()),
            Self::Compact(gemm) => Some(gemm.kernel()),
            Self::Cublas(..) => None,
        }
    }

    /// What a batch needs of a lane, beside room for what is padded.
    fn lane_size(&self, m: u32, weights: &Weights) -> LaneSize {
        let Some(grid) = weights.grid() else { return LaneSize::default() };
        match self {
            Self::Packed(gemm) => gemm.lane_size_of(m, grid),
            Self::Compact(_) => LaneSize::default(),
            Self::Slot(_, gemm) => slot_size(grid).max(gemm.lane_size_of(m, grid)),
            Self::Cublas(_, activate) => cublas_size(m, grid, activate.is_some()),
        }
    }

    /// Everything that can be refused at these operands, without enqueuing anything.
    fn check(&self, lane: &Beside<'_>, (x, y): (&Place, &Place), weights: &Weights) -> Result<(), DeviceError> {
        let slot = &*lane.slot;
        let have = LaneSize {
            slot_bytes: slot.len() as u64,
            padded_y: lane.product.as_ref().map_or(0, |product| product.len() as u64),
            cublas: lane.cublas.is_some(),
            ..lane.workspace.size()
        };
        match (self, weights) {
            (Self::Packed(gemm), Weights::Packed(packed)) => gemm.check(have, x, packed, y),
            (Self::Compact(gemm), Weights::Compact(compact, _)) => gemm.check(x, compact, y),
            (Self::Slot(expander, gemm), Weights::Compact(compact, escapes)) => {
                have.check(self.lane_size(x.rows, weights))?;
                expander.check(compact, slot)?;
                // SAFETY: gone when this returns; nothing is enqueued.
                gemm.check(have, x, &unsafe { escapes.over(slot) }?, y)
            }
            (Self::Cublas(_, activate), Weights::Packed(_) | Weights::Compact(..)) => {
                let shape = weights.grid().map(crate::weight::shape).unwrap_or_default();
                let columns = if activate.is_some() { shape[0] / 2 } else { shape[0] };
                check_product(weights.ordinal(), x, shape, columns, y, weights.spans())?;
                // As of every other batch of the layer, though cuBLAS takes any.
                x.check_rows_aligned("x")?;
                y.check_rows_aligned("y")?;
                check_device("the lane", lane.stream.device().ordinal(), weights.ordinal())?;
                have.check(self.lane_size(x.rows, weights))?;
                Ok(())
            }
            _ => Err(other_form().into()),
        }
    }

    /// Enqueues the product.
    fn enqueue(
        &self,
        lane: Beside<'_>,
        x: MatrixRef<'_>,
        weights: &Weights,
        y: MatrixMut<'_>,
        add: bool,
    ) -> Result<(), DeviceError> {
        match (self, weights) {
            (Self::Packed(gemm), Weights::Packed(packed)) => gemm.enqueue_in(lane.stream, lane.workspace, x, packed, y),
            (Self::Compact(gemm), Weights::Compact(compact, _)) => gemm.enqueue(lane.stream, x, compact, y),
            (Self::Slot(expander, gemm), Weights::Compact(compact, escapes)) => {
                // Before anything is enqueued; `x` and `y` cannot lie in the slot, which the lane alone has.
                self.check(&lane, (x.place(), y.place()), weights)?;
                if x.rows() == 0 {
                    return Ok(());
                }
                let Beside { stream, workspace, slot, .. } = lane;
                // An ordinary launch: the product that read the slot last is done when it starts.
                expander.enqueue(stream, compact, escapes.window(), slot)?;
                // SAFETY: gone when this returns. The layer and the lane outlive what they are given: dropping a buffer
                // waits.
                let packed = unsafe { escapes.over(slot) }?;
                // An ordinary launch, too: it starts when the tiles are there.
                gemm.enqueue_in(stream, workspace, x, &packed, y)
            }
            (Self::Cublas(expand, activate), weights) => {
                self.check(&lane, (x.place(), y.place()), weights)?;
                let need = LaneSize { cublas: true, ..LaneSize::default() };
                let none = Refusal::LaneTooSmall { need, have: LaneSize::default() };
                let (Some((n, k)), Some(cublas)) = (weights.padded(), lane.cublas) else { return Err(none.into()) };
                let (stream, slot, m) = (lane.stream, lane.slot, x.rows());
                if m == 0 {
                    return Ok(());
                }
                // SAFETY: the slot, which the lane alone has, is as large (checked), and is used by this stream alone.
                let whole = unsafe { MatrixMut::from_raw(slot.device(), slot.address(), n, k, k.into()) }?;
                // An ordinary launch: the product that read the slot last is done when it starts.
                match (expand, weights) {
                    (ToBf16::Packed(unpacker), Weights::Packed(packed)) => unpacker.enqueue(stream, packed, whole)?,
                    (ToBf16::Compact(transcoder), Weights::Compact(compact, _)) => {
                        transcoder.full(stream, compact, whole)?;
                    }
                    _ => return Err(other_form().into()),
                }
                // SAFETY: as above. cuBLAS's launches are ordinary ones: they start when the weights are there.
                let whole = unsafe { MatrixRef::from_raw(slot.device(), slot.address(), n, k, k.into()) }?;
                let (Some(activate), Some(product)) = (activate, lane.product) else {
                    return cublas.matmul(x, whole, y, add);
                };
                let mut y = y;
                for rows in turns(m, PRODUCT_ROWS) {
                    let count = rows.end - rows.start;
                    cublas.matmul(x.part(rows.clone(), 0..k)?, whole, front(product, count, n, n)?, false)?;
                    let beside = MatrixRef::new(product, count, n, n.into())?;
                    activate.enqueue_turns(stream, beside, y.part(rows, 0..n / 2)?)?;
                }
                Ok(())
            }
            _ => Err(other_form().into()),
        }
    }
}

/// Kernels as what multiplies, of compact weights or of packed ones.
fn multiply(ways: Ways<Arc<LoadedKernel>>, compact: bool) -> Result<Vec<Choice<Multiply>>, DeviceError> {
    let of = |Choice { epilogue, last, kernel }| Ok(Choice { epilogue, last, kernel: Multiply::of(kernel, compact)? });
    ways.into_iter().map(of).collect()
}

/// A layer is made with kernels for its weights, so nobody meets it.
fn other_form() -> Refusal {
    Refusal::Family { wanted: "a matmul that reads the layer's weights" }
}

/// Of the kernels of a layer, by epilogue and ascending in the largest batch, the one for this batch, and how many rows
/// it takes at a time: all of them, or as many as the layer was loaded for.
fn choose<T>(choices: &[T], of: impl Fn(&T) -> (Epilogue, u32), m: u32, asked: Epilogue) -> Result<(&T, u32), Refusal> {
    let mut largest = None;
    for choice in choices {
        let (epilogue, last) = of(choice);
        if epilogue == asked {
            if m <= last {
                return Ok((choice, m));
            }
            largest = Some((choice, last));
        }
    }
    match (largest, choices.first()) {
        (Some(largest), _) => Ok(largest),
        (None, Some(first)) => Err(Refusal::Epilogue { asked, loaded: of(first).0 }),
        (None, None) => Err(Refusal::Epilogue { asked, loaded: Epilogue::Store }),
    }
}

/// The first row and the one after the last of every turn.
fn turns(m: u32, rows: u32) -> impl Iterator<Item = Range<u32>> {
    // A kernel takes a row at least; no rows are one turn without any.
    let step = rows.max(1);
    (0..m.div_ceil(step).max(1)).map(move |turn| turn * step..m.min(turn.saturating_add(1).saturating_mul(step)))
}

impl Linear {
    /// Weights for cuBLAS.
    pub(crate) fn whole(weights: DeviceMatrix) -> Self {
        Self { n: weights.rows(), k: weights.cols(), weights: Weights::Whole(weights), choices: Vec::new() }
    }

    /// Packed weights whose first `n` rows and `k` columns count.
    ///
    /// # Errors
    /// A kernel of another family.
    pub(crate) fn packed(
        (n, k): (u32, u32),
        packed: DevicePacked,
        ways: Ways<Arc<LoadedKernel>>,
    ) -> Result<Self, DeviceError> {
        let choices = multiply(ways, false)?;
        Ok(Self { n, k, weights: Weights::Packed(packed), choices })
    }

    /// Compact weights, with what their packed form has beside its tiles.
    ///
    /// # Errors
    /// A kernel of another family.
    pub(crate) fn compact(
        compact: DeviceCompact,
        escapes: PackedEscapes,
        ways: Ways<Arc<LoadedKernel>>,
    ) -> Result<Self, DeviceError> {
        let choices = multiply(ways, true)?;
        let grid = compact.grid();
        // A grid's dimensions fit 32 bits.
        let (n, k) = (grid.rows() as u32, grid.cols() as u32);
        Ok(Self { n, k, weights: Weights::Compact(compact, escapes), choices })
    }

    /// Output features; of a gate and an up, both.
    pub fn n(&self) -> u32 {
        self.n
    }

    /// Input features.
    pub fn k(&self) -> u32 {
        self.k
    }

    /// Bytes of the weights on the device.
    pub fn bytes(&self) -> u64 {
        self.weights.bytes()
    }

    /// Whether the weights are packed.
    pub fn is_packed(&self) -> bool {
        matches!(self.weights, Weights::Packed(_))
    }

    /// Whether the weights are compact.
    pub fn is_compact(&self) -> bool {
        matches!(self.weights, Weights::Compact(..))
    }

    /// The packed weights, if they are: whole tiles, of which the first `n` rows and `k` columns count. What an
    /// embedding shares with its head.
    pub fn packed_weights(&self) -> Option<&DevicePacked> {
        match &self.weights {
            Weights::Packed(packed) => Some(packed),
            Weights::Compact(..) | Weights::Whole(_) => None,
        }
    }

    /// The weights as BF16 `[n, k]`, if they are.
    pub fn bf16_weights(&self) -> Option<&DeviceMatrix> {
        match &self.weights {
            Weights::Packed(_) | Weights::Compact(..) => None,
            Weights::Whole(whole) => Some(whole),
        }
    }

    /// The variant of the product for a batch, or for the first turns of one that takes several; `None` where cuBLAS
    /// takes it, or nothing does.
    pub fn variant(&self, m: u32, epilogue: Epilogue) -> Option<VariantSpec> {
        let (choice, _) = self.choose(m, epilogue).ok()?;
        Some(*choice.kernel.kernel()?.spec())
    }

    /// What its largest batch needs of a lane.
    pub fn lane_size(&self) -> LaneSize {
        if let Weights::Whole(_) = self.weights {
            return LaneSize { cublas: true, ..LaneSize::default() };
        }
        // The largest batch of a range needs most.
        let of = |choice: &Choice<Multiply>| self.turn_size(choice, choice.last);
        self.choices.iter().map(of).fold(LaneSize::default(), LaneSize::max)
    }

    /// What a batch needs of a lane, in all of its turns.
    ///
    /// # Errors
    /// [`Refusal::Epilogue`]: it was not loaded for that.
    pub fn lane_size_at(&self, m: u32, epilogue: Epilogue) -> Result<LaneSize, Refusal> {
        if let Weights::Whole(_) = self.weights {
            return Ok(self.lane_size());
        }
        let (_, rows) = self.choose(m, epilogue)?;
        let mut need = LaneSize::default();
        for rows in [rows, m % rows.max(1)].into_iter().filter(|rows| *rows > 0) {
            let (choice, _) = self.choose(rows, epilogue)?;
            need = need.max(self.turn_size(choice, rows));
        }
        Ok(need)
    }

    /// What takes a batch, and how many rows at a time.
    fn choose(&self, m: u32, epilogue: Epilogue) -> Result<(&Choice<Multiply>, u32), Refusal> {
        choose(&self.choices, |choice| (choice.epilogue, choice.last), m, epilogue)
    }

    /// What rows that are multiplied at once need of a lane.
    fn turn_size(&self, choice: &Choice<Multiply>, rows: u32) -> LaneSize {
        choice.kernel.lane_size(rows, &self.weights).max(self.padding(rows))
    }

    /// Of a padded layer, room for `m` padded rows of input and output.
    fn padding(&self, m: u32) -> LaneSize {
        let own = (self.n, self.k);
        padding(own, self.weights.padded().unwrap_or(own), m)
    }

    /// Enqueues the product on the lane's stream. A batch above the one that was loaded for takes several turns of that
    /// many rows. `y` `[m, n]` is overwritten, or added to ([`Epilogue::StoreAdd`]); of a packed or compact gate and up
    /// only [`Epilogue::SiluMul`] can be had, with `y` `[m, n / 2]`. Rows of packed and compact layers begin at
    /// multiples of 16 bytes; those of `y` follow each other without a gap, unless the layer is padded or cuBLAS's.
    ///
    /// # Errors
    /// Everything is checked before anything is enqueued: shapes, pitches, alignment, overlap, devices, and the lane's
    /// size ([`Loader::lane`](crate::layer::loader::Loader::lane), [`Lane::reserve`]). Then the driver's refusal.
    pub fn enqueue(
        &self,
        lane: &mut Lane,
        x: MatrixRef<'_>,
        y: MatrixMut<'_>,
        epilogue: Epilogue,
    ) -> Result<(), DeviceError> {
        if let Weights::Whole(whole) = &self.weights {
            let add = match epilogue {
                Epilogue::Store => false,
                Epilogue::StoreAdd => true,
                asked => return Err(Refusal::Epilogue { asked, loaded: Epilogue::Store }.into()),
            };
            return lane.cublas()?.matmul(x, whole.view(), y, add);
        }
        let m = x.rows();
        let (choice, rows) = self.choose(m, epilogue)?;
        if rows == m {
            return self.enqueue_turn(lane, x, y, choice);
        }
        let columns = if epilogue == Epilogue::SiluMul { self.n / 2 } else { self.n };
        let operands = [u64::from(self.n), self.k.into()];
        check_product(self.weights.ordinal(), x.place(), operands, columns.into(), y.place(), self.weights.spans())?;
        // Turns begin as the whole does: rows are a multiple of 16 bytes apart. The last may be another kernel's.
        for rows in [rows, m % rows] {
            let (choice, _) = self.choose(rows, epilogue)?;
            lane.size().check(self.turn_size(choice, rows))?;
        }
        let mut y = y;
        for turn in turns(m, rows) {
            let (choice, _) = self.choose(turn.end - turn.start, epilogue)?;
            let part = y.part(turn.clone(), 0..columns)?;
            self.enqueue_turn(lane, x.part(turn, 0..self.k)?, part, choice)?;
        }
        Ok(())
    }

    /// Enqueues a batch that one kernel takes.
    fn enqueue_turn(
        &self,
        lane: &mut Lane,
        x: MatrixRef<'_>,
        y: MatrixMut<'_>,
        choice: &Choice<Multiply>,
    ) -> Result<(), DeviceError> {
        let m = x.rows();
        let add = choice.epilogue == Epilogue::StoreAdd;
        let padding = self.padding(m);
        let (Some((padded_n, padded_k)), true) = (self.weights.padded(), padding != LaneSize::default()) else {
            return choice.kernel.enqueue(lane.parts().into(), x, &self.weights, y, add);
        };
        let own = self.weights.ordinal();
        let operands = [u64::from(self.n), self.k.into()];
        check_product(own, x.place(), operands, self.n.into(), y.place(), self.weights.spans())?;
        check_device("the lane", lane.stream().device().ordinal(), own)?;
        lane.size().check(padding)?;
        if m == 0 {
            return Ok(());
        }
        let LaneParts { stream, workspace, padded, slot, cublas } = lane.parts();
        let padded_x = Place::of(&padded.x, m, padded_k)?;
        let padded_y = Place::of(&padded.y, m, padded_n)?;
        // What is padded is no gate and up: nothing is activated.
        let beside = Beside { stream, workspace, slot, cublas, product: None };
        choice.kernel.check(&beside, (&padded_x, &padded_y), &self.weights)?;

        // Columns past k must be zeros: they are multiplied with what pads the weights. Below the elements that the
        // lane has.
        padded.x.fill_front(stream, m as usize * padded_k as usize, 0)?;
        front(&mut padded.x, m, self.k, padded_k)?.copy_from(stream, x)?;
        if add {
            front(&mut padded.y, m, self.n, padded_n)?.copy_from(stream, y.as_ref())?;
        }
        choice.kernel.enqueue(
            beside,
            MatrixRef::new(&padded.x, m, padded_k, padded_k.into())?,
            &self.weights,
            front(&mut padded.y, m, padded_n, padded_n)?,
            add,
        )?;
        let mut y = y;
        y.copy_from(stream, MatrixRef::new(&padded.y, m, self.n, padded_n.into())?)
    }
}

fn front(buffer: &mut DeviceBuffer<u16>, rows: u32, cols: u32, pitch: u32) -> Result<MatrixMut<'_>, Refusal> {
    MatrixMut::new(buffer, rows, cols, pitch.into())
}

/// What [`Linear::lane_size`] says of the layer that such a weight becomes, before there is a device: with escapes and
/// without, where nobody has looked, and all that is wanted packed taken to be so.
pub fn lane_size_of(weight: &Weight, wanted: &Wanted) -> LaneSize {
    let tiles = weight.padded().map(|(n, k)| TileGrid::new(n as usize, k as usize));
    let (Some(Ok(grid)), Linears::Packed) = (tiles, wanted.linears) else { return LaneSize::default().with_cublas() };
    let compact = wanted.stays_compact(weight);
    let ways = match compact {
        true => wanted.compact_ways(weight),
        false => weight.escapes().iter().flat_map(|escapes| wanted.packed_ways(weight, *escapes)).collect(),
    };
    let sms = wanted.chooser.machine().sms;
    let (n, k) = weight.padded().unwrap_or_default();
    let of = |choice: &Choice<Way<VariantSpec>>| {
        let m = choice.last;
        // What was chosen has a plan.
        let packed = |spec| gemm_packed::lane_size(spec, GemmShape { m, n, k }, sms).unwrap_or_default();
        let size = match &choice.kernel {
            Way::Direct(_) if compact => LaneSize::default(),
            Way::Direct(spec) => packed(spec),
            Way::Slot { product, .. } => slot_size(grid).max(packed(product)),
            Way::Cublas { activate, .. } => cublas_size(m, grid, activate.is_some()),
        };
        size.max(padding((weight.n, weight.k), (n, k), m))
    };
    ways.iter().map(of).fold(LaneSize::default(), LaneSize::max)
}

/// Of weights that are expanded to packed tiles.
fn slot_size(grid: TileGrid) -> LaneSize {
    LaneSize { slot_bytes: Expander::slot_bytes(grid), ..LaneSize::default() }
}

/// Of weights that cuBLAS multiplies with, and whose products may be activated.
fn cublas_size(m: u32, grid: TileGrid, activates: bool) -> LaneSize {
    // A grid's elements and rows fit.
    let product = if activates { u64::from(m.min(PRODUCT_ROWS)) * grid.rows() as u64 } else { 0 };
    LaneSize { slot_bytes: 2 * grid.elements() as u64, padded_y: product, cublas: true, ..LaneSize::default() }
}

/// Room for `m` rows of a layer `(n, k)` whose weights are padded; nothing where they are not.
fn padding(layer: (u32, u32), padded: (u32, u32), m: u32) -> LaneSize {
    if layer == padded {
        return LaneSize::default();
    }
    let (m, (n, k)) = (u64::from(m), padded);
    // Below 2^64: products of two 32-bit numbers.
    LaneSize { padded_x: m * u64::from(k), padded_y: m * u64::from(n), ..LaneSize::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unloaded_epilogue_is_rejected_and_large_batches_are_split() {
        let choices = [(Epilogue::Store, 8), (Epilogue::Store, 64), (Epilogue::StoreAdd, 64)];
        let chosen = |m, asked| choose(&choices, |choice| *choice, m, asked).map(|(choice, rows)| (*choice, rows));
        assert_eq!(chosen(0, Epilogue::Store), Ok(((Epilogue::Store, 8), 0)));
        assert_eq!(chosen(1, Epilogue::Store), Ok(((Epilogue::Store, 8), 1)));
        assert_eq!(chosen(8, Epilogue::Store), Ok(((Epilogue::Store, 8), 8)));
        assert_eq!(chosen(9, Epilogue::Store), Ok(((Epilogue::Store, 64), 9)));
        assert_eq!(chosen(9, Epilogue::StoreAdd), Ok(((Epilogue::StoreAdd, 64), 9)));
        assert_eq!(chosen(65, Epilogue::StoreAdd), Ok(((Epilogue::StoreAdd, 64), 64)));
        assert_eq!(chosen(u32::MAX, Epilogue::Store), Ok(((Epilogue::Store, 64), 64)));
        let wrong = Refusal::Epilogue { asked: Epilogue::SiluMul, loaded: Epilogue::Store };
        assert_eq!(chosen(1, Epilogue::SiluMul), Err(wrong));
    }

    #[test]
    fn batch_splits_cover_each_row_once() {
        for (m, rows) in [(5, 4), (8, 4), (9, 4), (20_000, 4096), (1, 1), (3, 1), (u32::MAX, 1 << 31), (u32::MAX, 4096)]
        {
            let mut next = 0;
            for turn in turns(m, rows) {
                assert_eq!(turn.start, next, "{m} in {rows}");
                assert!((1..=rows).contains(&(turn.end - turn.start)), "{m} in {rows}: {turn:?}");
                assert!(turn.end == m || turn.len() == rows as usize, "only the last is shorter");
                next = turn.end;
            }
            assert_eq!(next, m);
        }
    }

    /// Copies of a padded layer are held against the lane before they are made.
    #[test]
    fn padded_layers_have_whole_row_tiles() {
        assert_eq!(padding((192, 128), (192, 128), 300), LaneSize::default());
        let need = padding((100, 72), (128, 128), 300);
        assert_eq!(need, LaneSize { padded_x: 300 * 128, padded_y: 300 * 128, ..LaneSize::default() });
        // A lane of another loader, with less.
        let have = LaneSize { workspace_bytes: 1 << 20, counters: 1 << 10, padded_x: 299 * 128, ..need };
        assert_eq!(have.check(need), Err(Refusal::LaneTooSmall { need, have }));
        assert_eq!(padding((1, 1), (u32::MAX, u32::MAX), u32::MAX).padded_x, u64::from(u32::MAX).pow(2));
    }
}
