//! Decoding of a bundle's tensors on a GPU: the stored sections are read and checked on the CPU, copied, and decoded
//! there, into memory that torch owns.

use unweight_codegen::{VariantSpec, spec::DecodeOutput};
use unweight_format::{
    EncodingId, TileGrid,
    bundle::{BundleError, TensorHandle},
    raw::{CompactTensor, ExponentsTensor, HuffmanTensor, PackedTensor},
};
use unweight_rt::{
    ContextSize, Device, DeviceBuffer, DeviceError, DevicePacked, ExecContext, KernelSet, LaunchError, MatrixMut,
    raw::{
        choose::graph,
        ops::{decode_compact::CompactDecoder, decode_huffman::Decoder, unpack::Unpacker},
        weight::{DeviceCompact, DeviceExponents, DeviceHuffman},
    },
};

/// Why a tensor was not decoded on a GPU.
pub enum Failure {
    /// The bundle cannot be read, or is damaged.
    Bundle(BundleError),
    /// The GPU or its kernels failed.
    Device(DeviceError),
}

impl From<BundleError> for Failure {
    fn from(error: BundleError) -> Self {
        Self::Bundle(error)
    }
}

impl From<DeviceError> for Failure {
    fn from(error: DeviceError) -> Self {
        Self::Device(error)
    }
}

impl From<LaunchError> for Failure {
    fn from(error: LaunchError) -> Self {
        Self::Device(error.into())
    }
}

/// Decodes a tensor to `output`, the address of its original bytes. Returns false, without writing, for an encoding
/// without a decoder for GPUs. Waits for the decoder.
///
/// # Safety
/// `output` is a multiple of 256, and the tensor's original bytes and 256 more are allocated there on the device of the
/// kernels. Work of other streams on them is done before the call, and nothing else uses them during the call.
pub unsafe fn decode(kernels: &KernelSet, tensor: TensorHandle<'_>, output: u64) -> Result<bool, Failure> {
    let encoding = tensor.encoding();
    if ![EncodingId::EXPONENTS, EncodingId::HUFFMAN, EncodingId::PACKED, EncodingId::COMPACT].contains(&encoding) {
        return Ok(false);
    }
    let (device, stored) = (kernels.device(), tensor.stored()?);
    let arch = device.info().arch;
    let stream = device.stream()?;
    // The last name of each uploaded tensor is in the scope of its launch: dropping a buffer waits for the kernel.
    if encoding == EncodingId::EXPONENTS {
        let Some(tensor) = ExponentsTensor::of(stored) else { return Ok(false) };
        let bits = tensor.exponents().code().max_length();
        let Some(spec) = graph::element_decoder(arch, tensor.float(), bits) else { return Ok(false) };
        let (decoder, tensor) = (decoder(kernels, &spec)?, DeviceExponents::upload(&stream, &tensor)?);
        // SAFETY: the caller's promise; the tensor's bytes are its elements.
        let mut output = unsafe { DeviceBuffer::borrow(device, output, tensor.decoded_bytes()) }?;
        let mut ctx = ExecContext::new(&stream, ContextSize::default())?;
        decoder.elements(&mut ctx, &tensor, &mut output)?;
        ctx.synchronize()?;
    } else if encoding == EncodingId::HUFFMAN {
        let Some(tensor) = HuffmanTensor::of(stored) else { return Ok(false) };
        let spec = graph::decoder(arch, DecodeOutput::Full, tensor.code().max_length());
        let Some(spec) = spec else { return Ok(false) };
        let (decoder, tensor) = (decoder(kernels, &spec)?, DeviceHuffman::upload(&stream, &tensor)?);
        let mut ctx = ExecContext::new(&stream, ContextSize::default())?;
        // SAFETY: the caller's promise.
        decoder.full(&mut ctx, &tensor, unsafe { matrix(device, tensor.grid(), output) }?)?;
        ctx.synchronize()?;
    } else if encoding == EncodingId::PACKED {
        let Some(tensor) = PackedTensor::of(stored) else { return Ok(false) };
        let unpacker = Unpacker::new(kernels.get(&VariantSpec::unpack(arch))?)?;
        let tensor = DevicePacked::upload(&stream, &tensor)?;
        // SAFETY: the caller's promise.
        unpacker.enqueue(&stream, &tensor, unsafe { matrix(device, tensor.grid(), output) }?)?;
        stream.synchronize()?;
    } else {
        let Some(tensor) = CompactTensor::of(stored) else { return Ok(false) };
        let (decoder, tensor) = (CompactDecoder::of(kernels)?, DeviceCompact::upload(&stream, &tensor)?);
        // SAFETY: the caller's promise.
        decoder.full(&stream, &tensor, unsafe { matrix(device, tensor.grid(), output) }?)?;
        stream.synchronize()?;
    }
    Ok(true)
}

fn decoder(kernels: &KernelSet, spec: &VariantSpec) -> Result<Decoder, DeviceError> {
    Decoder::new(kernels.get(spec)?)
}

/// Returns the output as a matrix of BF16.
///
/// # Safety
/// As for [`decode`].
unsafe fn matrix(device: &Device, grid: TileGrid, output: u64) -> Result<MatrixMut<'_>, LaunchError> {
    let too_large =
        |extent: usize| LaunchError::TooLarge { what: "rows or columns", value: extent as u64, limit: u32::MAX.into() };
    let [rows, cols] = [grid.rows(), grid.cols()];
    let rows = u32::try_from(rows).map_err(|_| too_large(rows))?;
    let cols = u32::try_from(cols).map_err(|_| too_large(cols))?;
    // SAFETY: the caller's promise.
    unsafe { MatrixMut::from_raw(device, output, rows, cols, cols.into()) }
}
