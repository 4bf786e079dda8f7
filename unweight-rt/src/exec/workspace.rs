//! Partial sums and counters that the launches of one stream share.

use crate::device::{ContextSize, DeviceBuffer, DeviceError, Stream, buffer::length};

/// Partial sums and counters. Every launch leaves the counters at zero for the next launch on the same stream.
#[derive(Debug)]
pub(crate) struct Workspace {
    pub(crate) partials: DeviceBuffer<u8>,
    pub(crate) counters: DeviceBuffer<u32>,
}

impl Workspace {
    pub(crate) fn new(stream: &Stream, size: ContextSize) -> Result<Self, DeviceError> {
        Ok(Self {
            partials: DeviceBuffer::zeroed(stream, length("bytes of a workspace", size.workspace_bytes)?)?,
            counters: DeviceBuffer::zeroed(stream, length("counters of a workspace", size.counters)?)?,
        })
    }

    pub(crate) fn size(&self) -> ContextSize {
        ContextSize {
            workspace_bytes: self.partials.len() as u64,
            counters: self.counters.len() as u64,
            ..ContextSize::default()
        }
    }
}
