//! Linear layers: `Y[m, n] = X[m, k] * W[n, k]^T` on a GPU, whatever form the weights are stored in, at every batch.
//!
//! [`Loader`](crate::layer::loader::Loader) makes them. Everything that a batch can ask for is compiled and allocated by then;
//! [`Linear::enqueue`] only enqueues, so it may be captured into a graph. Shapes that are no multiples of 64 take a padded path: two copies beside
//! the product.
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

use std::ops::Range;

use unweight_codegen::{VariantSpec, spec::Epilogue};

use crate::{
    choose::reachable::Choice,
    device::{
        DeviceError, LaneSize, MatrixMut, MatrixRef, Refusal,
        view::{Place, check_device},
    },
    ops::{check_product, gemm_packed::PackedGemm, lane::Lane},
    weight::{DeviceMatrix, DevicePacked},
};

/// A linear layer on the device.
#[derive(Debug)]
pub struct Linear {
    n: u32,
    k: u32,
    weights: Weights,
}

#[derive(Debug)]
enum Weights {
    Packed {
        packed: DevicePacked,
        /// By epilogue, ascending in the largest batch. Never empty.
        choices: Vec<Choice<PackedGemm>>,
    },
    Whole(DeviceMatrix),
}

/// Of the kernels of a layer, by epilogue and ascending in the largest batch, the one for this batch, and how many rows it takes at a time: all of
/// them, or as many as the layer was loaded for.
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
        Self { n: weights.rows(), k: weights.cols(), weights: Weights::Whole(weights) }
    }

    /// Packed weights whose first `n` rows and `k` columns count.
    pub(crate) fn packed((n, k): (u32, u32), packed: DevicePacked, choices: Vec<Choice<PackedGemm>>) -> Self {
        Self { n, k, weights: Weights::Packed { packed, choices } }
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
        match &self.weights {
            Weights::Packed { packed, .. } => packed.bytes(),
            Weights::Whole(whole) => whole.bytes() as u64,
        }
    }

    /// Whether the weights are packed; otherwise they are BF16, for cuBLAS.
    pub fn is_packed(&self) -> bool {
        matches!(self.weights, Weights::Packed { .. })
    }

    /// The packed weights, if they are: whole tiles, of which the first `n` rows and `k` columns count. What an embedding shares with its head.
    pub fn packed_weights(&self) -> Option<&DevicePacked> {
        match &self.weights {
            Weights::Packed { packed, .. } => Some(packed),
            Weights::Whole(_) => None,
        }
    }

    /// The weights as BF16 `[n, k]`, if they are.
    pub fn bf16_weights(&self) -> Option<&DeviceMatrix> {
        match &self.weights {
            Weights::Packed { .. } => None,
            Weights::Whole(whole) => Some(whole),
        }
    }

    /// The variant for a batch, or for the first turns of one that takes several; `None` where cuBLAS takes it, or nothing does.
    pub fn variant(&self, m: u32, epilogue: Epilogue) -> Option<VariantSpec> {
        match &self.weights {
            Weights::Packed { choices, .. } => {
                let (choice, _) = choose(choices, |choice| (choice.epilogue, choice.last), m, epilogue).ok()?;
                Some(*choice.kernel.kernel().spec())
            }
            Weights::Whole(_) => None,
        }
    }

    /// What its largest batch needs of a lane.
    pub fn lane_size(&self) -> LaneSize {
        match &self.weights {
            Weights::Whole(_) => LaneSize { cublas: true, ..LaneSize::default() },
            Weights::Packed { packed, choices } => choices
                .iter()
                // The largest batch of a range needs most.
                .map(|choice| choice.kernel.lane_size(choice.last, packed).max(self.padding(packed, choice.last)))
                .fold(LaneSize::default(), LaneSize::max),
        }
    }

    /// What a batch needs of a lane, in all of its turns.
    ///
    /// # Errors
    /// [`Refusal::Epilogue`]: it was not loaded for that.
    pub fn lane_size_at(&self, m: u32, epilogue: Epilogue) -> Result<LaneSize, Refusal> {
        let Weights::Packed { packed, choices } = &self.weights else { return Ok(self.lane_size()) };
        let (_, rows) = choose(choices, |choice| (choice.epilogue, choice.last), m, epilogue)?;
        let mut need = LaneSize::default();
        for rows in [rows, m % rows.max(1)].into_iter().filter(|rows| *rows > 0) {
            let (choice, _) = choose(choices, |choice| (choice.epilogue, choice.last), rows, epilogue)?;
            need = need.max(choice.kernel.lane_size(rows, packed)).max(self.padding(packed, rows));
        }
        Ok(need)
    }

    /// Of a padded layer, room for `m` padded rows of input and output.
    fn padding(&self, packed: &DevicePacked, m: u32) -> LaneSize {
        padding((self.n, self.k), (packed.grid().rows() as u32, packed.grid().cols() as u32), m)
    }

    /// Enqueues the product on the lane's stream. A batch above the one that was loaded for takes several turns of that many rows. `y` `[m, n]` is overwritten, or added to ([`Epilogue::StoreAdd`]); of a packed gate and up
    /// only [`Epilogue::SiluMul`] can be had, with `y` `[m, n / 2]`. Rows of packed layers begin at multiples of 16 bytes; those of `y` follow each other
    /// without a gap, unless the layer is padded or cuBLAS's.
    ///
    /// # Errors
    /// Everything is checked before anything is enqueued: shapes, pitches, alignment, overlap, devices, and the lane's size ([`Loader::lane`](crate::layer::loader::Loader::lane), [`Lane::reserve`]). Then the driver's refusal.
    pub fn enqueue(
        &self,
        lane: &mut Lane,
        x: MatrixRef<'_>,
        y: MatrixMut<'_>,
        epilogue: Epilogue,
    ) -> Result<(), DeviceError> {
        let (packed, choices) = match &self.weights {
            Weights::Whole(whole) => {
                let add = match epilogue {
                    Epilogue::Store => false,
                    Epilogue::StoreAdd => true,
                    asked => return Err(Refusal::Epilogue { asked, loaded: Epilogue::Store }.into()),
                };
                return lane.cublas()?.matmul(x, whole.view(), y, add);
            }
            Weights::Packed { packed, choices } => (packed, choices),
        };
        let m = x.rows();
        let (_, rows) = choose(choices, |choice| (choice.epilogue, choice.last), m, epilogue)?;
        if rows == m {
            return self.enqueue_turn(lane, x, y, epilogue, packed, choices);
        }
        let columns = if epilogue == Epilogue::SiluMul { self.n / 2 } else { self.n };
        let operands = [u64::from(self.n), self.k.into()];
        check_product(packed.device().ordinal(), x.place(), operands, columns.into(), y.place(), packed.spans())?;
        // Turns begin as the whole does: rows are a multiple of 16 bytes apart. The last may be another kernel's.
        for rows in [rows, m % rows] {
            let (choice, _) = choose(choices, |choice| (choice.epilogue, choice.last), rows, epilogue)?;
            lane.size().check(choice.kernel.lane_size(rows, packed).max(self.padding(packed, rows)))?;
        }
        let mut y = y;
        for turn in turns(m, rows) {
            let part = y.part(turn.clone(), 0..columns)?;
            self.enqueue_turn(lane, x.part(turn, 0..self.k)?, part, epilogue, packed, choices)?;
        }
        Ok(())
    }

    /// Enqueues a batch that one kernel takes.
    fn enqueue_turn(
        &self,
        lane: &mut Lane,
        x: MatrixRef<'_>,
        y: MatrixMut<'_>,
        epilogue: Epilogue,
        packed: &DevicePacked,
        choices: &[Choice<PackedGemm>],
    ) -> Result<(), DeviceError> {
        let m = x.rows();
        let (choice, _) = choose(choices, |choice| (choice.epilogue, choice.last), m, epilogue)?;
        let padding = self.padding(packed, m);
        if padding == LaneSize::default() {
            return choice.kernel.enqueue(lane, x, packed, y);
        }
        let own = packed.device().ordinal();
        let operands = [u64::from(self.n), self.k.into()];
        check_product(own, x.place(), operands, self.n.into(), y.place(), packed.spans())?;
        check_device("the lane", lane.stream().device().ordinal(), own)?;
        lane.size().check(padding)?;
        if m == 0 {
            return Ok(());
        }
        // A grid's dimensions fit 32 bits.
        let (padded_n, padded_k) = (packed.grid().rows() as u32, packed.grid().cols() as u32);
        let (stream, workspace, padded) = lane.parts();
        let padded_x = Place::of(&padded.x, m, padded_k)?;
        let padded_y = Place::of(&padded.y, m, padded_n)?;
        choice.kernel.check(workspace.size(), &padded_x, packed, &padded_y)?;

        // Columns past k must be zeros: they are multiplied with what pads the weights. Below the elements that the lane has.
        padded.x.fill_front(stream, m as usize * padded_k as usize, 0)?;
        front(&mut padded.x, m, self.k, padded_k)?.copy_from(stream, x)?;
        if epilogue == Epilogue::StoreAdd {
            front(&mut padded.y, m, self.n, padded_n)?.copy_from(stream, y.as_ref())?;
        }
        choice.kernel.enqueue_in(
            stream,
            workspace,
            MatrixRef::new(&padded.x, m, padded_k, padded_k.into())?,
            packed,
            front(&mut padded.y, m, padded_n, padded_n)?,
        )?;
        let mut y = y;
        y.copy_from(stream, MatrixRef::new(&padded.y, m, self.n, padded_n.into())?)
    }
}

fn front(
    buffer: &mut crate::device::DeviceBuffer<u16>,
    rows: u32,
    cols: u32,
    pitch: u32,
) -> Result<MatrixMut<'_>, Refusal> {
    MatrixMut::new(buffer, rows, cols, pitch.into())
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
    fn an_epilogue_that_was_not_loaded_for_is_refused_and_a_large_batch_takes_turns() {
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
    fn turns_cover_each_row_once() {
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
    fn a_padded_layer_needs_whole_tiles_of_rows() {
        assert_eq!(padding((192, 128), (192, 128), 300), LaneSize::default());
        let need = padding((100, 72), (128, 128), 300);
        assert_eq!(need, LaneSize { padded_x: 300 * 128, padded_y: 300 * 128, ..LaneSize::default() });
        // A lane of another loader, with less.
        let have = LaneSize { workspace_bytes: 1 << 20, counters: 1 << 10, padded_x: 299 * 128, ..need };
        assert_eq!(have.check(need), Err(Refusal::LaneTooSmall { need, have }));
        assert_eq!(padding((1, 1), (u32::MAX, u32::MAX), u32::MAX).padded_x, u64::from(u32::MAX).pow(2));
    }
}
