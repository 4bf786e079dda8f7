//! Generates load on another stream while variants run.

use std::{
    ffi::c_void,
    sync::atomic::{AtomicBool, Ordering},
    time::Instant,
};

use unweight_rt::{DeviceBuffer, Stream, raw::device::raw::RawKernel};

use super::Run;
use crate::error::BenchError;

/// The load on another stream.
pub(super) struct Load {
    kernel: RawKernel,
    stream: Stream,
    memory: DeviceBuffer<u8>,
    blocks: u32,
}

impl Load {
    /// More than the L2 cache holds.
    const BYTES: usize = 256 << 20;
    /// Shared memory that even the largest block leaves free on an SM, so that the load queues accesses in front of its
    /// own.
    const SHARED_BYTES: u32 = 1024;
    const ROUNDS: u32 = 128;

    pub(super) fn new(run: &Run<'_>) -> Result<Self, BenchError> {
        let stream = run.kernels.device().stream()?;
        Ok(Self {
            kernel: run.raw("uw_stress_load", "UW_LOAD")?,
            memory: DeviceBuffer::zeroed(&stream, Self::BYTES)?,
            blocks: run.kernels.device().info().sms,
            stream,
        })
    }

    /// Until `stop`, alternates between streaming device memory and queueing at shared memory, then pauses for as long.
    /// Some races show only under load, others only without.
    pub(super) fn keep_busy(&self, stop: &AtomicBool) -> Result<(), BenchError> {
        while !stop.load(Ordering::Relaxed) {
            for i in 0..32u32 {
                let shared = if i % 2 == 0 { 0 } else { Self::SHARED_BYTES };
                let (mut memory, mut pieces) = (self.memory.address(), Self::BYTES as u64 / 16);
                let (mut rounds, mut shared_words) = (Self::ROUNDS, shared / 4);
                let mut arguments = [
                    (&raw mut memory).cast::<c_void>(),
                    (&raw mut pieces).cast(),
                    (&raw mut rounds).cast(),
                    (&raw mut shared_words).cast(),
                ];
                // SAFETY: the kernel stays within `pieces` of memory and `shared_words` of shared memory; the memory
                // lives through the wait below.
                unsafe { self.kernel.launch(&self.stream, (self.blocks, 256), shared, &mut arguments) }?;
            }
            let start = Instant::now();
            self.stream.synchronize()?;
            std::thread::sleep(start.elapsed());
        }
        Ok(())
    }
}
