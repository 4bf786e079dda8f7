//! The family `decode_huffman`: decodes a Huffman tensor to the encoding that a consumer reads (report section 7), and
//! an exponents tensor to its weights.
//!
//! ```text
//! DeviceHuffman --full-----> bf16 [n, k]              --> cuBLAS
//!               --exponent-> u8 [tiles, 64, 64]       --> matmul, exponent source
//!               --palette--> u8 [tiles, 64, 32]       --> matmul, palette source
//! DeviceExponents --elements--> FP8, F16 or F32 [n, k], as bytes
//! ```
//! A decoder only enqueues. Tiles whose metadata point outside their sections are skipped and reported by
//! [`ExecContext::synchronize`](crate::exec::ExecContext::synchronize).

use std::sync::Arc;

use unweight_codegen::{
    abi::DecodeHuffmanArgs,
    plan::GemmShape,
    spec::{DecodeElement, DecodeHuffmanSpec, DecodeOutput, Op},
};
use unweight_format::TileGrid;

use crate::{
    device::{
        DeviceBuffer, DeviceError, LaunchError, MatrixMut,
        module::LoadedKernel,
        view::{check_apart, check_device},
    },
    exec::ExecContext,
    weight::{self, DeviceCoded, DeviceExponents, DeviceHuffman},
};

/// A decoder kernel.
#[derive(Clone, Debug)]
pub struct Decoder {
    kernel: Arc<LoadedKernel>,
    spec: DecodeHuffmanSpec,
}

impl Decoder {
    /// Wraps a kernel of the family `decode_huffman`.
    ///
    /// # Errors
    /// The kernel belongs to another family.
    pub fn new(kernel: Arc<LoadedKernel>) -> Result<Self, DeviceError> {
        let Op::DecodeHuffman(spec) = kernel.spec().op else {
            return kernel.refuse(LaunchError::Family { wanted: "a decoder" });
        };
        Ok(Self { kernel, spec })
    }

    /// Returns the loaded kernel.
    pub fn kernel(&self) -> &LoadedKernel {
        &self.kernel
    }

    /// Enqueues decoding to the weights, contiguous bf16 `[n, k]`.
    ///
    /// # Errors
    /// An output of another shape or pitch, codes that are too long, another device, or a driver error.
    pub fn full(
        &self,
        ctx: &mut ExecContext,
        tensor: &DeviceHuffman,
        output: MatrixMut<'_>,
    ) -> Result<(), DeviceError> {
        let (desc, expected) = (output.desc(), weight::shape(tensor.grid()));
        let check = || {
            if desc.shape() != expected {
                return Err(LaunchError::Output { output: desc.shape(), tensor: expected });
            }
            desc.check_dense("the output")?;
            desc.check_aligned("the output")?;
            desc.check_device("the output", self.kernel.device().ordinal())?;
            check_apart(("the output", desc.span()), tensor.spans())
        };
        check().or_else(|refusal| self.kernel.refuse(refusal))?;
        self.enqueue_huffman(ctx, DecodeOutput::Full, tensor, desc.address)
    }

    /// Enqueues decoding of weights of types other than BF16 to contiguous row-major `[n, k]`: the little-endian bytes
    /// that were encoded.
    ///
    /// # Errors
    /// A kernel for another type, an output of another size, codes that are too long, another device, or a driver
    /// error.
    pub fn elements(
        &self,
        ctx: &mut ExecContext,
        tensor: &DeviceExponents,
        output: &mut DeviceBuffer<u8>,
    ) -> Result<(), DeviceError> {
        let ordinal = self.kernel.device().ordinal();
        weight::elements("the output", output.len(), tensor.decoded_bytes())
            .and_then(|()| check_device("the output", output.device().ordinal(), ordinal))
            .and_then(|()| check_device("the tensor", tensor.device().ordinal(), ordinal))
            .and_then(|()| check_apart(("the output", output.span()), tensor.spans()))
            .or_else(|refusal| self.kernel.refuse(refusal))?;
        let what = (DecodeOutput::Full, DecodeElement::of(tensor.float()));
        self.enqueue(ctx, what, (&tensor.coded, tensor.fractions.address()), output.address())
    }

    /// Enqueues decoding to exponents, u8 `[tiles, 64, 64]`. The contents of padding columns and rows are unspecified.
    ///
    /// # Errors
    /// As for [`Decoder::full`].
    pub fn exponent(
        &self,
        ctx: &mut ExecContext,
        tensor: &DeviceHuffman,
        output: &mut DeviceBuffer<u8>,
    ) -> Result<(), DeviceError> {
        self.enqueue_bytes(ctx, DecodeOutput::Exponent, tensor, output)
    }

    /// Enqueues transcoding to packed palette indices, u8 `[tiles, 64, 32]`.
    ///
    /// # Errors
    /// As for [`Decoder::full`].
    pub fn palette(
        &self,
        ctx: &mut ExecContext,
        tensor: &DeviceHuffman,
        output: &mut DeviceBuffer<u8>,
    ) -> Result<(), DeviceError> {
        self.enqueue_bytes(ctx, DecodeOutput::Palette, tensor, output)
    }

    fn enqueue_bytes(
        &self,
        ctx: &mut ExecContext,
        what: DecodeOutput,
        tensor: &DeviceHuffman,
        output: &mut DeviceBuffer<u8>,
    ) -> Result<(), DeviceError> {
        weight::elements("the output", output.len(), output_bytes(tensor.grid(), what))
            .and_then(|()| check_device("the output", output.device().ordinal(), self.kernel.device().ordinal()))
            .or_else(|refusal| self.kernel.refuse(refusal))?;
        self.enqueue_huffman(ctx, what, tensor, output.address())
    }

    fn enqueue_huffman(
        &self,
        ctx: &mut ExecContext,
        output_kind: DecodeOutput,
        tensor: &DeviceHuffman,
        address: u64,
    ) -> Result<(), DeviceError> {
        let ordinal = self.kernel.device().ordinal();
        check_device("the tensor", tensor.device().ordinal(), ordinal)
            .or_else(|refusal| self.kernel.refuse(refusal))?;
        let source = (&tensor.coded, tensor.sign_mantissa.address());
        self.enqueue(ctx, (output_kind, DecodeElement::Bf16), source, address)
    }

    /// Enqueues the kernel. The last pair is the coded exponents, and the address of signs and fractions.
    fn enqueue(
        &self,
        ctx: &mut ExecContext,
        (output_kind, element): (DecodeOutput, DecodeElement),
        (coded, fractions): (&DeviceCoded, u64),
        address: u64,
    ) -> Result<(), DeviceError> {
        let (writes, limit) = (self.spec.output, self.spec.code_limit.get());
        if writes != output_kind {
            return self.kernel.refuse(LaunchError::Decodes { writes, asked: output_kind });
        }
        if self.spec.element != element {
            return self.kernel.refuse(LaunchError::DecodesElement { writes: self.spec.element, tensor: element });
        }
        if coded.code_bits > limit {
            return self.kernel.refuse(LaunchError::CodeBits { limit, bits: coded.code_bits });
        }
        let args = args(coded, fractions, address, ctx.fault_address());
        let problem = GemmShape { m: 0, n: args.n, k: args.k };
        // SAFETY: the sections have the sizes that grid and type require, or are bounded by their counts; the callers
        // checked `output`; the context's fault word lives as long as the context, on whose stream this runs (`launch`
        // rejects a context of another device). Dropping a buffer waits for the kernel.
        unsafe { self.kernel.launch(ctx.stream(), problem, &args) }
    }
}

/// Returns the bytes that a decoder of BF16 writes.
pub fn output_bytes(grid: TileGrid, output: DecodeOutput) -> usize {
    match output {
        DecodeOutput::Full => grid.elements() * 2,
        DecodeOutput::Exponent => grid.tiles() * 64 * 64,
        DecodeOutput::Palette => grid.tiles() * 64 * 32,
    }
}

fn args(tensor: &DeviceCoded, sign_mantissa: u64, output: u64, fault: u64) -> DecodeHuffmanArgs {
    let grid = tensor.grid;
    DecodeHuffmanArgs {
        sign_mantissa,
        encoded_exp: tensor.encoded_exp.address(),
        row_lengths: tensor.row_lengths.address(),
        tile_metadata: tensor.tile_metadata.address(),
        verbatim_exponents: tensor.verbatim_exponents.address(),
        palette: tensor.palette.address(),
        code_lengths: tensor.code_lengths.address(),
        output,
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
