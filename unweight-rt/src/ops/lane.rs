//! A lane: one stream, with the memory and the handles that launches on it share.
//!
//! Partial sums, counters, padded activations, cuBLAS's workspace and the decoders' fault word are used by one launch after the other, in
//! stream order. So a lane belongs to one stream for ever, a launch borrows it mutably, and no call takes a lane *and* a stream. Work on two
//! streams takes two lanes:
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
//! A launch never allocates: where a lane is too small it is refused ([`Refusal::LaneTooSmall`]) before anything is enqueued.
//! [`Lane::reserve`] makes room, outside of captures.

use std::{any::Any, fmt};

use crate::{
    device::{
        DeviceBuffer, DeviceError, LaneSize, Refusal, Stream,
        workspace::{Workspace, length},
    },
    ops::cublas::Cublas,
};

/// One stream with what launches on it share.
pub struct Lane {
    stream: Stream,
    workspace: Workspace,
    padded: Padded,
    fault: DeviceBuffer<u32>,
    cublas: Option<Cublas>,
    /// What was too small. Graphs that were captured with it may still be launched.
    outgrown: Vec<Box<dyn Any + Send + Sync>>,
}

/// Activations in whole tiles.
#[derive(Debug)]
pub(crate) struct Padded {
    pub(crate) x: DeviceBuffer<u16>,
    pub(crate) y: DeviceBuffer<u16>,
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
            fault: DeviceBuffer::zeroed(stream, 1)?,
            cublas: if size.cublas { Some(Cublas::new(stream)?) } else { None },
            outgrown: Vec::new(),
            stream: stream.clone(),
        })
    }

    /// The stream that all of its work goes to.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// What it has room for.
    pub fn size(&self) -> LaneSize {
        LaneSize {
            padded_x: self.padded.x.len() as u64,
            padded_y: self.padded.y.len() as u64,
            cublas: self.cublas.is_some(),
            ..self.workspace.size()
        }
    }

    /// Makes room for launches of this size. What it had stays allocated as long as the lane, so that graphs that were captured before can
    /// still be launched.
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

    /// Waits for all of the lane's work, and says whether a decoder left a tile out; the report is cleared.
    ///
    /// # Errors
    /// [`DeviceError::Fault`], or what failed on the stream.
    pub fn synchronize(&mut self) -> Result<(), DeviceError> {
        match self.fault.read(&self.stream, 0, 1)?.first() {
            None | Some(0) => Ok(()),
            Some(tile) => {
                self.fault.write(&self.stream, 0, &[0])?;
                Err(DeviceError::Fault { tile: tile - 1 })
            }
        }
    }

    pub(crate) fn parts(&mut self) -> (&Stream, &mut Workspace, &mut Padded) {
        (&self.stream, &mut self.workspace, &mut self.padded)
    }

    /// Where decoders of this lane report.
    pub(crate) fn fault_address(&self) -> u64 {
        self.fault.address()
    }

    /// The partial sums; a debugging variant leaves its operands here.
    #[doc(hidden)]
    pub fn partials(&self) -> &DeviceBuffer<u8> {
        &self.workspace.partials
    }
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lane({:?}, {})", self.stream, self.size())
    }
}
