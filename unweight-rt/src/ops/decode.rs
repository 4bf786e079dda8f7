//! The preprocess family: a Huffman tensor to the form that a consumer reads (report section 7).
//!
//! ```text
//! DeviceHuffman --full-----> bf16 [n, k]              --> cuBLAS
//!               --exponent-> u8 [tiles, 64, 64]       --> matmul, exponent source
//!               --palette--> u8 [tiles, 64, 32]       --> matmul, palette source
//! ```
//! A decoder only enqueues. Tiles whose metadata lead out of their sections are left out and reported by [`Decoder::check`].

use std::sync::Arc;

use unweight_codegen::{
    abi::DecodeArgs,
    plan::GemmShape,
    spec::{DecodeOutput, DecodeSpec, Op},
};
use unweight_format::TileGrid;

use crate::{
    device::module::LoadedKernel,
    device::{DeviceBuffer, DeviceError, Stream},
    weight::{DeviceHuffman, DeviceMatrix},
};

/// A decoder kernel with its fault word.
#[derive(Debug)]
pub struct Decoder {
    kernel: Arc<LoadedKernel>,
    spec: DecodeSpec,
    fault: DeviceBuffer<u32>,
}

impl Decoder {
    /// Wraps a kernel of the preprocess family.
    pub fn new(stream: &Stream, kernel: Arc<LoadedKernel>) -> Result<Self, DeviceError> {
        let Op::Decode(spec) = kernel.spec().op else {
            return kernel.refuse("is not a decoder".to_owned());
        };
        Ok(Self { fault: DeviceBuffer::zeroed(stream, 1)?, kernel, spec })
    }

    /// The kernel.
    pub fn kernel(&self) -> &LoadedKernel {
        &self.kernel
    }

    /// Enqueues the decoding of the weights themselves, `[n, k]` bf16.
    pub fn full(&self, stream: &Stream, tensor: &DeviceHuffman, output: &mut DeviceMatrix) -> Result<(), DeviceError> {
        let grid = tensor.grid();
        if (output.rows() as usize, output.cols() as usize) != (grid.rows(), grid.cols()) {
            return self.kernel.refuse(format!(
                "output [{}, {}] for a tensor [{}, {}]",
                output.rows(),
                output.cols(),
                grid.rows(),
                grid.cols()
            ));
        }
        self.full_into(stream, tensor, output.data_mut())
    }

    /// As [`Decoder::full`], to the front of a buffer.
    pub fn full_into(
        &self,
        stream: &Stream,
        tensor: &DeviceHuffman,
        output: &mut DeviceBuffer<u16>,
    ) -> Result<(), DeviceError> {
        let (room, needed) = (output.len(), tensor.grid().elements());
        if room < needed {
            return self.kernel.refuse(format!("output of {room} elements, the tensor has {needed}"));
        }
        self.enqueue(stream, DecodeOutput::Full, tensor, output.address())
    }

    /// Enqueues the decoding of exponents, u8 `[tiles, 64, 64]`. What it leaves in pad columns and rows is not specified.
    pub fn exponent(
        &self,
        stream: &Stream,
        tensor: &DeviceHuffman,
        output: &mut DeviceBuffer<u8>,
    ) -> Result<(), DeviceError> {
        self.check_output(tensor.grid(), DecodeOutput::Exponent, output.len())?;
        self.enqueue(stream, DecodeOutput::Exponent, tensor, output.address())
    }

    /// Enqueues the transcoding to packed palette indices, u8 `[tiles, 64, 32]`.
    pub fn palette(
        &self,
        stream: &Stream,
        tensor: &DeviceHuffman,
        output: &mut DeviceBuffer<u8>,
    ) -> Result<(), DeviceError> {
        self.check_output(tensor.grid(), DecodeOutput::Palette, output.len())?;
        self.enqueue(stream, DecodeOutput::Palette, tensor, output.address())
    }

    /// Waits for the stream and says whether any decoder run before left a tile out; clears the report.
    pub fn check(&mut self, stream: &Stream) -> Result<(), DeviceError> {
        let fault = self.fault.read(stream, 0, 1)?;
        match fault.first() {
            None | Some(0) => Ok(()),
            Some(tile) => {
                self.fault.write(stream, 0, &[0])?;
                Err(DeviceError::Fault { name: self.kernel.spec().to_string(), tile: tile - 1 })
            }
        }
    }

    fn check_output(&self, grid: TileGrid, output: DecodeOutput, bytes: usize) -> Result<(), DeviceError> {
        let expected = output_bytes(grid, output);
        if bytes == expected {
            Ok(())
        } else {
            self.kernel.refuse(format!("output of {bytes} B, the tensor needs {expected}"))
        }
    }

    fn enqueue(
        &self,
        stream: &Stream,
        output: DecodeOutput,
        tensor: &DeviceHuffman,
        address: u64,
    ) -> Result<(), DeviceError> {
        if self.spec.output != output {
            return self.kernel.refuse(format!("does not write {}", output.tag()));
        }
        if tensor.code_bits() > self.spec.code_limit.get() {
            return self.kernel.refuse(format!(
                "decodes codes of up to {} bits, the tensor has {}",
                self.spec.code_limit.get(),
                tensor.code_bits()
            ));
        }
        let args = args(tensor, address, self.fault.address());
        let problem = GemmShape { m: 0, n: args.n, k: args.k };
        // SAFETY: the sections have the sizes that the grid asks for, or are bounded by the counts beside them; `output` was
        // checked by the callers. Dropping a buffer waits for the kernel.
        unsafe { self.kernel.launch(stream, problem, &args) }
    }
}

/// Bytes that a decoder writes.
pub fn output_bytes(grid: TileGrid, output: DecodeOutput) -> usize {
    match output {
        DecodeOutput::Full => grid.elements() * 2,
        DecodeOutput::Exponent => grid.tiles() * 64 * 64,
        DecodeOutput::Palette => grid.tiles() * 64 * 32,
    }
}

fn args(tensor: &DeviceHuffman, output: u64, fault: u64) -> DecodeArgs {
    let grid = tensor.grid();
    DecodeArgs {
        sign_mantissa: tensor.sign_mantissa.address(),
        encoded_exp: tensor.encoded_exp.address(),
        row_lengths: tensor.row_lengths.address(),
        tile_metadata: tensor.tile_metadata.address(),
        verbatim_exponents: tensor.verbatim_exponents.address(),
        palette: tensor.palette.address(),
        code_lengths: tensor.code_lengths.address(),
        output,
        // Tiles are dealt out by number: no counter to be cleared before each launch.
        work_counter: 0,
        fault,
        encoded_words: tensor.encoded_exp.len() as u64,
        // Counts below 2^32: checked when the tensor was uploaded.
        verbatim_rows: (tensor.verbatim_exponents.len() / 64) as u32,
        n: grid.rows() as u32,
        k: grid.cols() as u32,
        tile_rows: grid.tile_rows() as u32,
        tile_cols: grid.tile_cols() as u32,
        reserved: 0,
    }
}
