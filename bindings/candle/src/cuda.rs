//! Packed weights on a GPU, in candle's memory and on candle's stream. Compiled, but not yet tested on a GPU.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use candle_core::{
    CudaDevice, CudaStorage, Device, Storage, Tensor,
    backend::BackendStorage,
    bail,
    cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut},
    op::BackpropOp,
};
use half::bf16;
use unweight_codegen::spec::Epilogue;
use unweight_format::raw::PackedTensor;
use unweight_rt::{
    Device as Gpu, KernelSet, Linear, LoadOptions,
    env::Env,
    interop::{Interop, PackedAt, Scratch},
};

use crate::Error;

/// Alignment of sections in bytes, and the number of readable bytes that kernels need after each.
const ALIGN: usize = 256;
/// The maximum batch of a launch; larger batches need several.
const MAX_BATCH: u32 = 4096;

/// Kernels and counters of each GPU, by ordinal; never freed.
static INTEROPS: Mutex<BTreeMap<usize, Arc<Interop>>> = Mutex::new(BTreeMap::new());

fn runtime(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::Runtime(Box::new(error))
}

fn interop(ordinal: usize) -> Result<Arc<Interop>, Error> {
    let mut interops = INTEROPS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(interop) = interops.get(&ordinal) {
        return Ok(interop.clone());
    }
    let gpu = Gpu::open(ordinal).map_err(runtime)?;
    let kernels = KernelSet::open(&gpu, Env::process().map_err(runtime)?);
    let interop = Interop::new(kernels, LoadOptions::default().max_batch(MAX_BATCH)).map_err(runtime)?;
    let interop = Arc::new(interop);
    interops.insert(ordinal, interop.clone());
    Ok(interop)
}

/// A layer's weights on a GPU.
pub struct GpuWeight {
    /// Declared before `_memory`, so that it is dropped first.
    linear: Linear,
    interop: Arc<Interop>,
    device: CudaDevice,
    /// `packed | escape heads | escapes`, each at a multiple of [`ALIGN`] and followed by at least [`ALIGN`] bytes.
    _memory: CudaSlice<u8>,
}

impl GpuWeight {
    pub fn new(packed: &PackedTensor<Vec<u8>>, device: &CudaDevice) -> Result<Self, Error> {
        let stream = device.cuda_stream();
        let interop = interop(stream.context().ordinal())?;
        let sections = [packed.packed(), packed.escape_heads(), packed.escapes()];
        let mut bytes = Vec::new();
        let at = sections.map(|section| {
            let at = bytes.len();
            bytes.extend_from_slice(section);
            bytes.resize((bytes.len() + ALIGN).next_multiple_of(ALIGN), 0);
            at as u64
        });
        let memory = stream.clone_htod(&bytes).map_err(candle_core::Error::wrap)?;
        // The runtime may read it on another stream.
        stream.synchronize().map_err(candle_core::Error::wrap)?;
        let address = memory.device_ptr(&stream).0;
        let at = PackedAt {
            packed: address + at[0],
            escape_heads: address + at[1],
            escapes: address + at[2],
            escape_words: packed.escapes().len() / 4,
        };
        let shape = (packed.grid().rows() as u32, packed.grid().cols() as u32);
        // SAFETY: the sections belong to a checked tensor of this shape, each with its padding. `memory` outlives the
        // layer, and is freed in the order of candle's stream, the only stream that the layer runs on.
        let linear = unsafe { interop.layer(shape, packed.window(), at) }.map_err(runtime)?;
        Ok(Self { linear, interop, device: device.clone(), _memory: memory })
    }

    pub fn unpacked(&self, shape: (usize, usize)) -> Result<Tensor, Error> {
        let stream = self.device.cuda_stream();
        // SAFETY: `unpack_at` writes all of it before anything reads it.
        let mut out = unsafe { self.device.alloc::<bf16>(shape.0 * shape.1) }?;
        stream.synchronize().map_err(candle_core::Error::wrap)?;
        let address = out.device_ptr_mut(&stream).0;
        // SAFETY: `out` has as many BF16 as the layer, on this device, and nothing else uses it.
        unsafe { self.interop.unpack_at(&self.linear, address) }.map_err(runtime)?;
        let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(out, self.device.clone()));
        let tensor = Tensor::from_storage(storage, shape, BackpropOp::none(), false);
        debug_assert!(matches!(tensor.device(), Device::Cuda(_)));
        Ok(tensor)
    }

    /// Multiplies `rows` contiguous rows of the input, from element `start` on, by the weight.
    pub fn product(&self, storage: &CudaStorage, rows: usize, start: usize) -> candle_core::Result<CudaStorage> {
        let device = storage.device();
        let (n, k) = (self.linear.n() as usize, self.linear.k() as usize);
        let stream = device.cuda_stream();
        if stream.context().ordinal() != self.interop.kernels().device().ordinal() {
            bail!("unweight: the weight is on another GPU than the input");
        }
        if device.id() != self.device.id() {
            // It has another stream: the weight's memory would not be freed in the order of this launch.
            bail!("unweight: the input and the weight belong to two CudaDevices; use clones of one for both");
        }
        let Ok(m) = u32::try_from(rows) else {
            bail!("unweight: the input has {rows} rows, above the limit of 2^32 - 1; split it")
        };
        // SAFETY: the product writes all of it before anything reads it.
        let mut y = unsafe { device.alloc::<bf16>(rows * n) }?;
        if rows == 0 {
            return Ok(CudaStorage::wrap_cuda_slice(y, device.clone()));
        }
        let x = storage.as_cuda_slice::<bf16>()?.slice(start..start + rows * k);
        // Kernels read 16 bytes at a time.
        let aligned = match x.device_ptr(&stream).0.is_multiple_of(16) {
            true => None,
            false => Some(stream.clone_dtod(&x).map_err(candle_core::Error::wrap)?),
        };
        let bytes = self.interop.scratch_bytes(&self.linear, m, Epilogue::Store).map_err(candle_core::Error::wrap)?;
        // SAFETY: the kernels do not depend on the initial contents of the scratch.
        let mut scratch = unsafe { device.alloc::<u8>(bytes.max(1) as usize) }?;
        {
            let (x_at, _x) = match &aligned {
                Some(aligned) => aligned.device_ptr(&stream),
                None => x.device_ptr(&stream),
            };
            let (y_at, _y) = y.device_ptr_mut(&stream);
            let (scratch_at, _scratch) = scratch.device_ptr_mut(&stream);
            let scratch = Scratch { address: scratch_at, bytes };
            // SAFETY: candle's stream belongs to this device's primary context. x, y and the scratch have these sizes,
            // do not overlap, and are freed in the order of this stream.
            unsafe {
                self.interop.enqueue(&self.linear, stream.cu_stream().cast(), (x_at, m, y_at), scratch, Epilogue::Store)
            }
            .map_err(candle_core::Error::wrap)?;
        }
        Ok(CudaStorage::wrap_cuda_slice(y, device.clone()))
    }
}
