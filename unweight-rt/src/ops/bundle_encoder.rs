//! The GPU encoder of bundles: encodes each tensor with the kernels of its encoding, with the same bytes as the CPU.

use std::{
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::Duration,
};

use unweight_format::{
    CodeLimit, Digest, EncodingId, FloatMatrix, Matrix, NotEncodable, StoredTensor,
    bundle::{CpuEncoder, Encoder, EncoderBuffer, EncoderError, EncoderMemory, SectionBytes},
    raw::{StageTime, Trace, compact},
};

use crate::{
    device::{Device, DeviceError, KernelSet, pinned_pool::HostMemory},
    ops::{
        encode_compact::{EncodeCompact, EncodeCompactError},
        encode_huffman::{EncodeWorkspace, GpuEncoder},
        pack::{PackError, Packer},
    },
};

/// The GPU encoder for [`bundle::compress_with`](unweight_format::bundle::compress_with): computes digests on the CPU
/// and the rest on the GPU. It processes a few tensors at a time, so that one is copied while another is encoded.
#[derive(Debug)]
pub struct BundleEncoder {
    encoder: GpuEncoder,
    compressor: EncodeCompact,
    idle: Mutex<Vec<Slot>>,
    slot_returned: Condvar,
    device: Device,
    memory: Mutex<Memory>,
    trace: Arc<Trace>,
}

/// The pinned memory of a run.
#[derive(Debug)]
enum Memory {
    /// Bytes for tensors and for sections, not allocated yet; `None` if they would be few.
    Reserved(Option<[usize; 2]>),
    /// Allocated; `None` if it could not be pinned.
    Allocated(Option<Arc<HostMemory>>),
}

/// A stream with the memory for encoding one tensor.
#[derive(Debug)]
struct Slot {
    packer: Packer,
    workspace: EncodeWorkspace,
}

/// The number of tensors on the device at once: one is uploaded, one encoded, one downloaded. Each needs three times
/// its size in BF16.
const IN_FLIGHT: usize = 3;

impl BundleEncoder {
    /// Compiles or finds the encoder's kernels.
    ///
    /// # Errors
    /// The device or the compiler is missing, or failed.
    pub fn new(kernels: &KernelSet, limit: CodeLimit) -> Result<Self, DeviceError> {
        let trace: Arc<Trace> = Arc::default();
        let slot = || {
            let stream = kernels.device().stream()?;
            let workspace = EncodeWorkspace::traced(&stream, trace.clone());
            Ok(Slot { packer: Packer::new(&stream, kernels)?, workspace })
        };
        let idle = (0..IN_FLIGHT).map(|_| slot()).collect::<Result<_, DeviceError>>()?;
        let (encoder, compressor) = (GpuEncoder::new(kernels, limit)?, EncodeCompact::of(kernels)?);
        Ok(Self {
            encoder,
            compressor,
            idle: Mutex::new(idle),
            slot_returned: Condvar::new(),
            device: kernels.device().clone(),
            memory: Mutex::new(Memory::Reserved(None)),
            trace,
        })
    }

    /// Returns the run's pinned memory, which is allocated for the first tensor that fits. `bytes` are those of a
    /// tensor to read; `None` if one is encoded, for which nothing is allocated.
    fn host_memory(&self, bytes: Option<usize>) -> Option<Arc<HostMemory>> {
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        if let Memory::Reserved(Some([tensors, sections])) = *memory
            && bytes.is_some_and(|bytes| (HostMemory::BYTES_MIN..=tensors).contains(&bytes))
        {
            // Without pinned memory, tensors and sections are in other memory.
            let allocate = || HostMemory::new(&self.device, tensors, sections).ok();
            let allocated = self.trace.time("pin memory", (tensors + sections) as u64, allocate);
            *memory = Memory::Allocated(allocated.map(Arc::new));
        }
        match &*memory {
            Memory::Allocated(memory) => memory.clone(),
            Memory::Reserved(_) => None,
        }
    }

    /// Returns a slot for exclusive use. Until one is idle, this thread executes other tasks of its pool, such as the
    /// verification of written tensors. None of them waits for this thread, which has no slot yet.
    fn slot(&self) -> SlotGuard<'_> {
        /// How long a thread without tasks waits before it looks for some again.
        const PAUSE: Duration = Duration::from_millis(1);
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let slot = idle().pop();
            if slot.is_some() {
                return SlotGuard { encoder: self, slot };
            }
            if matches!(rayon::yield_now(), Some(rayon::Yield::Executed)) {
                continue;
            }
            let (waited, _) = self
                .slot_returned
                .wait_timeout_while(idle(), PAUSE, |idle| idle.is_empty())
                .unwrap_or_else(PoisonError::into_inner);
            drop(waited);
        }
    }

    /// Encodes on the device. Nothing in here may use rayon: a thread that waits inside rayon may start to encode
    /// another tensor, which would wait for this one's slot.
    fn encode_on_device(
        &self,
        matrix: Matrix<'_>,
        encoding: EncodingId,
        limit: CodeLimit,
        memory: Option<&HostMemory>,
    ) -> Result<StoredTensor<SectionBytes>, EncoderError> {
        let bytes = matrix.bytes().len() as u64;
        // Includes the tasks that are executed meanwhile.
        let mut guard = self.trace.time("wait for a stream", bytes, || self.slot());
        let Slot { packer, workspace } = guard.slot.as_mut().expect("the slot is present until the guard is dropped");
        match encoding {
            EncodingId::HUFFMAN => self.encoder.encode_pinned(workspace, matrix, memory).map_err(failed),
            EncodingId::PALETTE => self.encoder.encode_palette_pinned(workspace, matrix, memory).map_err(failed),
            EncodingId::PACKED => {
                let mut packed = || -> Result<_, PackError> {
                    let weights = workspace.matrix(matrix, memory)?;
                    let packed = self.trace.time("kernels", bytes, || packer.pack(weights.view()))?;
                    Ok(self.trace.time("download", bytes, || packed.download_to(memory, workspace.copier()))?)
                };
                match packed() {
                    Ok(tensor) => Ok(tensor),
                    Err(PackError::Unpackable(why)) => Err(why.into()),
                    Err(PackError::Device(error)) => Err(failed(error)),
                }
            }
            EncodingId::COMPACT => {
                let mut encoded = || -> Result<_, EncodeCompactError> {
                    let weights = workspace.matrix(matrix, memory)?;
                    let encode = || self.compressor.encode(packer, weights.view());
                    let encoded = self.trace.time("kernels", bytes, encode)?;
                    let download = || encoded.download_to(memory, workspace.copier());
                    let tensor = self.trace.time("download", bytes, download)?;
                    compact::worth_it(matrix.grid(), &encoded.histogram, limit, tensor.stored_bytes())?;
                    Ok(tensor)
                };
                match encoded() {
                    Ok(tensor) => Ok(tensor),
                    Err(EncodeCompactError::Uncompact(why)) => Err(NotEncodable::from(why).into()),
                    Err(EncodeCompactError::Device(error)) => Err(failed(error)),
                }
            }
            _ => Err(EncoderError::Failed("an encoding without a kernel is the CPU's".into())),
        }
    }
}

fn failed(error: DeviceError) -> EncoderError {
    EncoderError::Failed(Box::new(error))
}

/// A slot that is returned when the tensor is done. After a panic its stream is still usable, and its memory is written
/// before it is read.
struct SlotGuard<'a> {
    encoder: &'a BundleEncoder,
    /// `None` only during drop.
    slot: Option<Slot>,
}

impl Drop for SlotGuard<'_> {
    fn drop(&mut self) {
        self.encoder.idle.lock().unwrap_or_else(PoisonError::into_inner).extend(self.slot.take());
        self.encoder.slot_returned.notify_one();
    }
}

impl BundleEncoder {
    /// Encodes a matrix of any encoding, with pinned memory from `memory`.
    fn encode_with(
        &self,
        matrix: FloatMatrix<'_>,
        encoding: EncodingId,
        limit: CodeLimit,
        memory: Option<&HostMemory>,
    ) -> Result<(Digest, StoredTensor<SectionBytes>), EncoderError> {
        encoding.encoding().fits(matrix.grid())?;
        if limit != self.encoder.limit() {
            let reason = format!(
                "the encoder was created for code limit {}, but {} was requested",
                self.encoder.limit().bits(),
                limit.bits()
            );
            return Err(EncoderError::Failed(reason.into()));
        }
        // The CPU handles encodings without a kernel.
        if !matches!(encoding, EncodingId::HUFFMAN | EncodingId::PALETTE | EncodingId::PACKED | EncodingId::COMPACT) {
            return CpuEncoder.encode(matrix, encoding, limit).map(|(digest, tensor)| (digest, tensor.into()));
        }
        let bits = matrix.bf16().map_err(NotEncodable::from)?;
        let bytes = matrix.bytes();
        // Other threads compute the digest while this one waits for the device.
        let (tensor, digest) = rayon::join(
            || self.encode_on_device(bits, encoding, limit, memory),
            || self.trace.time("digest tensor", bytes.len() as u64, || Digest::of(bytes)),
        );
        Ok((digest, tensor?))
    }
}

impl Encoder for BundleEncoder {
    fn encode(
        &self,
        matrix: FloatMatrix<'_>,
        encoding: EncodingId,
        limit: CodeLimit,
    ) -> Result<(Digest, StoredTensor<Vec<u8>>), EncoderError> {
        self.encode_with(matrix, encoding, limit, None).map(|(digest, tensor)| (digest, tensor.into()))
    }

    fn stages(&self) -> Vec<StageTime> {
        self.trace.stages()
    }

    fn memory(&self) -> Option<&dyn EncoderMemory> {
        Some(self)
    }
}

/// Shares of a run's memory, in 24ths: by default, a tensor of Llama-3.1-8B's MLPs fits in the first, and the sections
/// of two in the second.
const SHARES: [u64; 2] = [4, 5];
/// Less memory is not worth pinning.
const PINNED_MIN: u64 = 16 << 20;

/// Divides a run's memory. Returns the bytes for tensors and for sections, each not more than `tensor_bytes`; `None` if
/// they are few.
fn shares(ram_bytes: u64, tensor_bytes: u64) -> Option<[usize; 2]> {
    let [tensors, sections] = SHARES.map(|share| (ram_bytes / 24 * share).min(tensor_bytes));
    (tensors >= PINNED_MIN).then_some([tensors as usize, sections as usize])
}

impl EncoderMemory for BundleEncoder {
    fn reserve(&self, ram_bytes: u64, tensor_bytes: u64) -> u64 {
        let reserved = shares(ram_bytes, tensor_bytes);
        *self.memory.lock().unwrap_or_else(PoisonError::into_inner) = Memory::Reserved(reserved);
        reserved.map_or(0, |shares| shares.iter().sum::<usize>() as u64)
    }

    fn buffer(&self, bytes: usize) -> Option<EncoderBuffer> {
        let buffer = self.host_memory(Some(bytes))?.tensor(bytes)?;
        Some(Box::new(buffer))
    }

    fn encode_here(
        &self,
        matrix: FloatMatrix<'_>,
        encoding: EncodingId,
        limit: CodeLimit,
    ) -> Result<(Digest, StoredTensor<SectionBytes>), EncoderError> {
        self.encode_with(matrix, encoding, limit, self.host_memory(None).as_deref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinned_memory_is_a_part_of_the_run_s_memory() {
        let [tensors, sections] = shares(768 << 20, 16 << 30).unwrap();
        // A tensor of 14336 x 4096, and two times its sections of 10.9 bits per weight.
        assert!(tensors >= 14336 * 4096 * 2 && sections >= 2 * (14336 * 4096 * 109 / 80), "{tensors} {sections}");
        for ram_bytes in [0, 1, 64 << 20, 95 << 20] {
            assert_eq!(shares(ram_bytes, u64::MAX), None);
        }
        assert_eq!(shares(u64::MAX, 15 << 20), None);
        assert_eq!(shares(1 << 40, 100 << 20), Some([100 << 20; 2]));
        for ram_bytes in [96 << 20, (96 << 20) + 23, 4 << 30, u64::MAX / 2] {
            let sum: usize = shares(ram_bytes, u64::MAX).unwrap().iter().sum();
            assert!(sum as u64 <= ram_bytes / 24 * 9, "{ram_bytes}");
        }
    }
}
