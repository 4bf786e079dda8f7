//! A lane: one stream, with the memory and the handles that launches on it share.
//!
//! Partial sums, counters, padded activations, the slot of expanded weights, cuBLAS's workspace and the fault words are
//! used by one launch after the other, in stream order. So a lane belongs to one stream for ever, a launch borrows it
//! mutably, and no call takes a lane *and* a stream. Work on two streams takes two lanes:
//! ```compile_fail,E0499
//! # use unweight_codegen::spec::Epilogue;
//! # use unweight_rt::{device::DeviceError, layer::linear::Linear, ops::lane::Lane, weight::DeviceMatrix};
//! # fn two(layer: &Linear, x: &DeviceMatrix, y: &mut [DeviceMatrix; 2], lane: &mut Lane) {
//! let [first, second] = y;
//! std::thread::scope(|scope| {
//!     scope.spawn(|| layer.enqueue(lane, x.view(), first.view_mut(), Epilogue::Store));
//!     scope.spawn(|| layer.enqueue(lane, x.view(), second.view_mut(), Epilogue::Store));
//! });
//! # }
//! ```
//! ```
//! # use unweight_codegen::spec::Epilogue;
//! # use unweight_rt::{device::DeviceError, layer::linear::Linear, ops::lane::Lane, weight::DeviceMatrix};
//! # fn two(layer: &Linear, x: &DeviceMatrix, y: &mut [DeviceMatrix; 2], lanes: &mut [Lane; 2]) {
//! let ([first, second], [one, other]) = (y, lanes);
//! std::thread::scope(|scope| {
//!     scope.spawn(|| layer.enqueue(one, x.view(), first.view_mut(), Epilogue::Store));
//!     scope.spawn(|| layer.enqueue(other, x.view(), second.view_mut(), Epilogue::Store));
//! });
//! # }
//! ```
//! A launch never allocates: where a lane is too small it is refused ([`Refusal::LaneTooSmall`]) before anything is
//! enqueued. [`Lane::reserve`] makes room, outside of captures.

use std::{any::Any, fmt};

use crate::{
    device::{
        DeviceBuffer, DeviceError, LaneSize, LaunchMode, Refusal, RowFault, Stream,
        workspace::{Workspace, length},
    },
    ops::cublas::Cublas,
};

/// One stream with what launches on it share.
pub struct Lane {
    stream: Stream,
    workspace: Workspace,
    padded: Padded,
    /// Weights that are expanded ahead of their product. Who writes it and who reads it are ordinary launches
    /// (cuBLAS's, too), never programmatic dependents: each starts when all that was enqueued before is done, so a
    /// product reads what was written for it, and the next expansion finds the product before it done.
    slot: DeviceBuffer<u8>,
    /// [`FAULT_WORDS`]; each 0, or 1 and what it names.
    faults: DeviceBuffer<u32>,
    cublas: Option<Cublas>,
    /// What was too small. Graphs that were captured with it may still be launched.
    outgrown: Vec<Box<dyn Any + Send + Sync>>,
}

/// A word for the tiles of decoders, and one for each of [`RowFault`].
const FAULT_WORDS: usize = 1 + RowFault::ALL.len();

/// Activations in whole tiles.
#[derive(Debug)]
pub(crate) struct Padded {
    pub(crate) x: DeviceBuffer<u16>,
    pub(crate) y: DeviceBuffer<u16>,
}

/// What a lane has, each to be borrowed by itself.
pub(crate) struct LaneParts<'a> {
    pub(crate) stream: &'a Stream,
    pub(crate) workspace: &'a mut Workspace,
    pub(crate) padded: &'a mut Padded,
    pub(crate) slot: &'a mut DeviceBuffer<u8>,
    pub(crate) cublas: Option<&'a mut Cublas>,
}

impl Padded {
    fn new(stream: &Stream, size: LaneSize) -> Result<Self, DeviceError> {
        Ok(Self {
            x: DeviceBuffer::zeroed(stream, length("padded elements", size.padded_x)?)?,
            y: DeviceBuffer::zeroed(stream, length("padded elements", size.padded_y)?)?,
        })
    }
}

impl Lane {
    /// A lane of this stream.
    ///
    /// # Errors
    /// Not enough memory, or no cuBLAS where `size` asks for it.
    pub fn new(stream: &Stream, size: LaneSize) -> Result<Self, DeviceError> {
        Ok(Self {
            workspace: Workspace::new(stream, size)?,
            padded: Padded::new(stream, size)?,
            slot: DeviceBuffer::zeroed(stream, length("bytes of a slot", size.slot_bytes)?)?,
            faults: DeviceBuffer::zeroed(stream, FAULT_WORDS)?,
            cublas: if size.cublas { Some(Cublas::new(stream)?) } else { None },
            outgrown: Vec::new(),
            stream: stream.clone(),
        })
    }

    /// A lane of what somebody else has: no room for what is padded, and nobody who would report. Allocates nothing on
    /// the device. cuBLAS is placed on this stream.
    pub(crate) fn of_parts(
        stream: Stream,
        workspace: Workspace,
        slot: DeviceBuffer<u8>,
        cublas: Option<Cublas>,
    ) -> Self {
        let device = stream.device();
        let padded = Padded { x: DeviceBuffer::nothing(device), y: DeviceBuffer::nothing(device) };
        let faults = DeviceBuffer::nothing(device);
        Self { workspace, padded, slot, faults, cublas, outgrown: Vec::new(), stream }
    }

    /// Its cuBLAS, for another lane.
    pub(crate) fn into_cublas(self) -> Option<Cublas> {
        self.cublas
    }

    /// The stream that all of its work goes to.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// How its kernels are launched from now on; cuBLAS's are not concerned.
    pub fn set_mode(&mut self, mode: LaunchMode) {
        self.stream.set_mode(mode);
    }

    /// What it has room for.
    pub fn size(&self) -> LaneSize {
        LaneSize {
            padded_x: self.padded.x.len() as u64,
            padded_y: self.padded.y.len() as u64,
            slot_bytes: self.slot.len() as u64,
            cublas: self.cublas.is_some(),
            ..self.workspace.size()
        }
    }

    /// Makes room for launches of this size. What it had stays allocated as long as the lane, so that graphs that were
    /// captured before can still be launched.
    ///
    /// # Errors
    /// The stream is captured, not enough memory, or no cuBLAS.
    pub fn reserve(&mut self, size: LaneSize) -> Result<(), DeviceError> {
        let (have, want) = (self.size(), self.size().max(size));
        if want == have {
            return Ok(());
        }
        if self.stream.is_capturing()? {
            return Err(Refusal::Capturing.into());
        }
        if (want.workspace_bytes, want.counters) != (have.workspace_bytes, have.counters) {
            let workspace = Workspace::new(&self.stream, want)?;
            self.outgrown.push(Box::new(std::mem::replace(&mut self.workspace, workspace)));
        }
        if (want.padded_x, want.padded_y) != (have.padded_x, have.padded_y) {
            let padded = Padded::new(&self.stream, want)?;
            self.outgrown.push(Box::new(std::mem::replace(&mut self.padded, padded)));
        }
        if want.slot_bytes != have.slot_bytes {
            let slot = DeviceBuffer::zeroed(&self.stream, length("bytes of a slot", want.slot_bytes)?)?;
            self.outgrown.push(Box::new(std::mem::replace(&mut self.slot, slot)));
        }
        if want.cublas && self.cublas.is_none() {
            self.cublas = Some(Cublas::new(&self.stream)?);
        }
        Ok(())
    }

    /// The lane's cuBLAS.
    ///
    /// # Errors
    /// [`Refusal::LaneTooSmall`] if it was not made with one.
    pub fn cublas(&mut self) -> Result<&mut Cublas, Refusal> {
        let have = self.size();
        self.cublas
            .as_mut()
            .ok_or(Refusal::LaneTooSmall { need: LaneSize { cublas: true, ..LaneSize::default() }, have })
    }

    /// Waits for all of the lane's work, and says whether a kernel left something out: a decoder a tile, another a row
    /// of its batch. The report is cleared; of several kinds, the first in the order of the errors below is told.
    ///
    /// # Errors
    /// [`DeviceError::Fault`], [`DeviceError::Row`], or what failed on the stream.
    pub fn synchronize(&mut self) -> Result<(), DeviceError> {
        let words = self.faults.read(&self.stream, 0, FAULT_WORDS)?;
        let Some(fault) = fault_of(&words) else { return Ok(()) };
        self.faults.write(&self.stream, 0, &[0; FAULT_WORDS])?;
        Err(fault)
    }

    pub(crate) fn parts(&mut self) -> LaneParts<'_> {
        let Self { stream, workspace, padded, slot, cublas, .. } = self;
        LaneParts { stream, workspace, padded, slot, cublas: cublas.as_mut() }
    }

    /// Where decoders of this lane report.
    pub(crate) fn fault_address(&self) -> u64 {
        self.faults.address()
    }

    /// Where kernels of this lane report such a row: a u32, 1 and the row. For kernels of one's own.
    pub fn row_fault_address(&self, what: RowFault) -> u64 {
        // In the order of `RowFault::ALL`, behind the decoders' word.
        self.faults.address() + (1 + what as u64) * 4
    }

    /// The partial sums; a debugging variant leaves its operands here.
    #[doc(hidden)]
    pub fn partials(&self) -> &DeviceBuffer<u8> {
        &self.workspace.partials
    }
}

/// What the fault words of a lane say.
fn fault_of(words: &[u32]) -> Option<DeviceError> {
    let place = words.iter().position(|word| *word != 0)?;
    let value = words[place] - 1;
    Some(match place.checked_sub(1) {
        None => DeviceError::Fault { tile: value },
        Some(row) => DeviceError::Row { row: value, what: RowFault::ALL[row] },
    })
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lane({:?}, {})", self.stream, self.size())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_fault_has_its_own_word() {
        assert!(fault_of(&[0; FAULT_WORDS]).is_none());
        assert!(matches!(fault_of(&[8, 0, 0, 3, 0]), Some(DeviceError::Fault { tile: 7 })));
        for (index, what) in RowFault::ALL.into_iter().enumerate() {
            assert_eq!(what as usize, index, "the order of addresses");
            let mut words = [0; FAULT_WORDS];
            words[1 + index] = 6;
            let fault = fault_of(&words);
            assert!(matches!(fault, Some(DeviceError::Row { row: 5, what: found }) if found == what), "{fault:?}");
        }
    }
}
