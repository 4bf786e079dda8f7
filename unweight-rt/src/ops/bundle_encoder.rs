//! The GPU encoder of bundles: encodes each tensor with the kernels of its encoding, with the same bytes as the CPU.

use std::{
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::Duration,
};

use unweight_format::{
    CodeLimit, Digest, EncodingId, FloatMatrix, Matrix, NotEncodable, StoredTensor,
    bundle::{CpuEncoder, Encoder, EncoderError},
    raw::{PackedTensor, StageTime, Trace, compact},
};

use crate::{
    device::{DeviceError, KernelSet},
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
    trace: Arc<Trace>,
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
        Ok(Self { encoder, compressor, idle: Mutex::new(idle), slot_returned: Condvar::new(), trace })
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
    ) -> Result<StoredTensor<Vec<u8>>, EncoderError> {
        let bytes = matrix.bytes().len() as u64;
        // Includes the tasks that are executed meanwhile.
        let mut guard = self.trace.time("wait for a stream", bytes, || self.slot());
        let Slot { packer, workspace } = guard.slot.as_mut().expect("the slot is present until the guard is dropped");
        match encoding {
            EncodingId::HUFFMAN => Ok(self.encoder.encode_in(workspace, matrix).map_err(failed)?.into()),
            EncodingId::PALETTE => Ok(self.encoder.encode_palette_in(workspace, matrix).map_err(failed)?.into()),
            EncodingId::PACKED => {
                let mut packed = || -> Result<PackedTensor<Vec<u8>>, PackError> {
                    let weights = workspace.matrix(matrix)?;
                    let packed = self.trace.time("kernels", bytes, || packer.pack(weights.view()))?;
                    Ok(self.trace.time("download", bytes, || packed.download_by(workspace.copier()))?)
                };
                match packed() {
                    Ok(tensor) => Ok(tensor.into()),
                    Err(PackError::Unpackable(why)) => Err(why.into()),
                    Err(PackError::Device(error)) => Err(failed(error)),
                }
            }
            EncodingId::COMPACT => {
                let mut encoded = || -> Result<_, EncodeCompactError> {
                    let weights = workspace.matrix(matrix)?;
                    let encode = || self.compressor.encode(packer, weights.view());
                    let encoded = self.trace.time("kernels", bytes, encode)?;
                    let download = || encoded.download_by(workspace.copier());
                    let tensor = self.trace.time("download", bytes, download)?;
                    compact::worth_it(matrix.grid(), &encoded.histogram, limit, tensor.stored_bytes())?;
                    Ok(tensor)
                };
                match encoded() {
                    Ok(tensor) => Ok(tensor.into()),
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

impl Encoder for BundleEncoder {
    fn encode(
        &self,
        matrix: FloatMatrix<'_>,
        encoding: EncodingId,
        limit: CodeLimit,
    ) -> Result<(Digest, StoredTensor<Vec<u8>>), EncoderError> {
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
            return CpuEncoder.encode(matrix, encoding, limit);
        }
        let bits = matrix.bf16().map_err(NotEncodable::from)?;
        let bytes = matrix.bytes();
        // Other threads compute the digest while this one waits for the device.
        let (tensor, digest) = rayon::join(
            || self.encode_on_device(bits, encoding, limit),
            || self.trace.time("digest tensor", bytes.len() as u64, || Digest::of(bytes)),
        );
        Ok((digest, tensor?))
    }

    fn stages(&self) -> Vec<StageTime> {
        self.trace.stages()
    }
}
