//! The execution context of launches: one stream, with the memory and handles that its launches share.
//!
//! Launches use partial sums, counters, padded activations, the slot for expanded weights, cuBLAS's workspace and the
//! fault words one after another, in stream order. Therefore a context keeps its stream for life, a launch borrows the
//! context mutably, and no call accepts both a context and a stream. Work on two streams needs two contexts:
//! ```compile_fail,E0499
//! # use unweight_codegen::spec::Epilogue;
//! # use unweight_rt::{DeviceError, DeviceMatrix, ExecContext, Linear};
//! # fn two(layer: &Linear, x: &DeviceMatrix, y: &mut [DeviceMatrix; 2], context: &mut ExecContext) {
//! let [first, second] = y;
//! std::thread::scope(|scope| {
//!     scope.spawn(|| layer.enqueue(context, x.view(), first.view_mut(), Epilogue::Store));
//!     scope.spawn(|| layer.enqueue(context, x.view(), second.view_mut(), Epilogue::Store));
//! });
//! # }
//! ```
//! ```
//! # use unweight_codegen::spec::Epilogue;
//! # use unweight_rt::{DeviceError, DeviceMatrix, ExecContext, Linear};
//! # fn two(layer: &Linear, x: &DeviceMatrix, y: &mut [DeviceMatrix; 2], contexts: &mut [ExecContext; 2]) {
//! let ([first, second], [one, other]) = (y, contexts);
//! std::thread::scope(|scope| {
//!     scope.spawn(|| layer.enqueue(one, x.view(), first.view_mut(), Epilogue::Store));
//!     scope.spawn(|| layer.enqueue(other, x.view(), second.view_mut(), Epilogue::Store));
//! });
//! # }
//! ```
//! A launch never allocates. A launch that needs a larger context fails with [`LaunchError::ContextTooSmall`] before
//! anything is enqueued. [`ExecContext::reserve`] allocates; it cannot run during a capture.

use std::{any::Any, fmt};

use crate::{
    device::{ContextSize, DeviceBuffer, DeviceError, LaunchError, LaunchMode, RowFault, Stream, buffer::length},
    exec::{cublas::Cublas, workspace::Workspace},
};

/// One stream with the memory and handles that its launches share.
pub struct ExecContext {
    stream: Stream,
    workspace: Workspace,
    padded: Padded,
    /// Weights that are expanded before they are multiplied. All launches that write or read the slot, including
    /// cuBLAS's, are ordinary launches and not programmatic dependents: each starts after all earlier work is done. So
    /// a product reads its own weights, and the next expansion overwrites them only after that product.
    slot: DeviceBuffer<u8>,
    /// [`FAULT_WORDS`] words; each is 0, or 1 + the index of a tile or row.
    faults: DeviceBuffer<u32>,
    cublas: Option<Cublas>,
    /// Memory that `reserve` replaced. Graphs captured with it may still be launched.
    replaced: Vec<Box<dyn Any + Send + Sync>>,
}

/// One word for the decoders' tiles, and one per [`RowFault`].
const FAULT_WORDS: usize = 1 + RowFault::ALL.len();

/// Activations padded to whole tiles.
#[derive(Debug)]
pub(crate) struct Padded {
    pub(crate) x: DeviceBuffer<u16>,
    pub(crate) y: DeviceBuffer<u16>,
}

/// The parts of an execution context as separate borrows.
pub(crate) struct ContextParts<'a> {
    pub(crate) stream: &'a Stream,
    pub(crate) workspace: &'a mut Workspace,
    pub(crate) padded: &'a mut Padded,
    pub(crate) slot: &'a mut DeviceBuffer<u8>,
    pub(crate) cublas: Option<&'a mut Cublas>,
}

impl Padded {
    fn new(stream: &Stream, size: ContextSize) -> Result<Self, DeviceError> {
        Ok(Self {
            x: DeviceBuffer::zeroed(stream, length("padded elements", size.padded_x)?)?,
            y: DeviceBuffer::zeroed(stream, length("padded elements", size.padded_y)?)?,
        })
    }
}

impl ExecContext {
    /// Creates an execution context on `stream` with memory for launches of `size`.
    ///
    /// # Errors
    /// Too little memory, or cuBLAS is missing and `size` needs it.
    pub fn new(stream: &Stream, size: ContextSize) -> Result<Self, DeviceError> {
        Ok(Self {
            workspace: Workspace::new(stream, size)?,
            padded: Padded::new(stream, size)?,
            slot: DeviceBuffer::zeroed(stream, length("bytes of a slot", size.slot_bytes)?)?,
            faults: DeviceBuffer::zeroed(stream, FAULT_WORDS)?,
            cublas: if size.cublas { Some(Cublas::new(stream)?) } else { None },
            replaced: Vec::new(),
            stream: stream.clone(),
        })
    }

    /// Creates an execution context from borrowed memory, without padded activations and fault words. Allocates nothing
    /// on the device. cuBLAS must already be placed on this stream.
    pub(crate) fn of_parts(
        stream: Stream,
        workspace: Workspace,
        slot: DeviceBuffer<u8>,
        cublas: Option<Cublas>,
    ) -> Self {
        let device = stream.device();
        let padded = Padded { x: DeviceBuffer::empty(device), y: DeviceBuffer::empty(device) };
        let faults = DeviceBuffer::empty(device);
        Self { workspace, padded, slot, faults, cublas, replaced: Vec::new(), stream }
    }

    /// Returns the cuBLAS handle, so that another context can use it.
    pub(crate) fn into_cublas(self) -> Option<Cublas> {
        self.cublas
    }

    /// Returns the stream that runs all work of this context.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Sets how kernels are launched from now on; does not affect cuBLAS.
    pub fn set_mode(&mut self, mode: LaunchMode) {
        self.stream.set_mode(mode);
    }

    /// Returns the size of the context's memory.
    pub fn size(&self) -> ContextSize {
        ContextSize {
            padded_x: self.padded.x.len() as u64,
            padded_y: self.padded.y.len() as u64,
            slot_bytes: self.slot.len() as u64,
            cublas: self.cublas.is_some(),
            ..self.workspace.size()
        }
    }

    /// Grows the context to fit launches of this size. Replaced memory stays allocated as long as the context, so that
    /// graphs captured earlier can still be launched.
    ///
    /// # Errors
    /// [`LaunchError::Capturing`] if the stream is being captured, too little memory, or no cuBLAS.
    pub fn reserve(&mut self, size: ContextSize) -> Result<(), DeviceError> {
        let (have, target) = (self.size(), self.size().max(size));
        if target == have {
            return Ok(());
        }
        if self.stream.is_capturing()? {
            return Err(LaunchError::Capturing.into());
        }
        if (target.workspace_bytes, target.counters) != (have.workspace_bytes, have.counters) {
            let workspace = Workspace::new(&self.stream, target)?;
            self.replaced.push(Box::new(std::mem::replace(&mut self.workspace, workspace)));
        }
        if (target.padded_x, target.padded_y) != (have.padded_x, have.padded_y) {
            let padded = Padded::new(&self.stream, target)?;
            self.replaced.push(Box::new(std::mem::replace(&mut self.padded, padded)));
        }
        if target.slot_bytes != have.slot_bytes {
            let slot = DeviceBuffer::zeroed(&self.stream, length("bytes of a slot", target.slot_bytes)?)?;
            self.replaced.push(Box::new(std::mem::replace(&mut self.slot, slot)));
        }
        if target.cublas && self.cublas.is_none() {
            self.cublas = Some(Cublas::new(&self.stream)?);
        }
        Ok(())
    }

    /// Returns the cuBLAS handle.
    ///
    /// # Errors
    /// [`LaunchError::ContextTooSmall`] if the context was created without cuBLAS.
    pub fn cublas(&mut self) -> Result<&mut Cublas, LaunchError> {
        let have = self.size();
        self.cublas
            .as_mut()
            .ok_or(LaunchError::ContextTooSmall { need: ContextSize { cublas: true, ..ContextSize::default() }, have })
    }

    /// Waits for all work of the context and reports whether a kernel skipped something: a decoder skips a tile, other
    /// kernels skip a row of their batch. Clears the report. Of several faults, returns the first in the order of the
    /// errors below.
    ///
    /// # Errors
    /// [`DeviceError::Fault`], [`DeviceError::Row`], or an error of earlier work on the stream.
    pub fn synchronize(&mut self) -> Result<(), DeviceError> {
        let words = self.faults.read(&self.stream, 0, FAULT_WORDS)?;
        let Some(fault) = fault_of(&words) else { return Ok(()) };
        self.faults.write(&self.stream, 0, &[0; FAULT_WORDS])?;
        Err(fault)
    }

    pub(crate) fn parts(&mut self) -> ContextParts<'_> {
        let Self { stream, workspace, padded, slot, cublas, .. } = self;
        ContextParts { stream, workspace, padded, slot, cublas: cublas.as_mut() }
    }

    /// Returns the device address of the decoders' fault word.
    pub(crate) fn fault_address(&self) -> u64 {
        self.faults.address()
    }

    /// Returns the device address of the u32 where kernels report a faulty row as 1 + its index. For external kernels.
    pub fn row_fault_address(&self, what: RowFault) -> u64 {
        // In the order of `RowFault::ALL`, after the decoders' word.
        self.faults.address() + (1 + what as u64) * 4
    }

    /// Returns the partial sums. A debugging variant writes its operands there.
    #[doc(hidden)]
    pub fn partials(&self) -> &DeviceBuffer<u8> {
        &self.workspace.partials
    }
}

/// Returns the first fault in an execution context's fault words.
fn fault_of(words: &[u32]) -> Option<DeviceError> {
    let index = words.iter().position(|word| *word != 0)?;
    let value = words[index] - 1;
    Some(match index.checked_sub(1) {
        None => DeviceError::Fault { tile: value },
        Some(kind) => DeviceError::Row { row: value, what: RowFault::ALL[kind] },
    })
}

impl fmt::Debug for ExecContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ExecContext({:?}, {})", self.stream, self.size())
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
