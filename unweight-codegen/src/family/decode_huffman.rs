//! Decodes a Huffman tensor to an encoding that a consumer reads (report section 7):
//! `templates/include/unweight/kernels/decode_huffman.cuh`.

use super::{DECODED_EXPONENTS, Edge, Family, VariantSpec, entry::Entry, shared::SmemCopy};
use crate::{
    args::args,
    axes::{Arch, axes, range_axis, set_axis, word_axis},
    block::{BlockPlan, Constraint, LaunchGrid, LaunchPlan, PipelinePlan, RolePlan, SmemPlan, Work, with_axis},
    limits::{Instruction, Instructions},
};
use unweight_format::{EncodingId, Float};

word_axis! {
    /// The output of a decoder of the family `decode_huffman` (report section 7).
    DecodeOutput, "output" {
        /// The weights, `[n, k]`, row-major.
        Full = "full",
        /// u8 `[tiles, 64, 64]`: one exponent byte per element.
        Exponent = "exponent",
        /// u8 `[tiles, 64, 32]`: packed 4-bit palette indices.
        Palette = "palette",
    }
}

word_axis! {
    /// The type of the weights. BF16 comes from a Huffman tensor; the others come from a tensor of encoding
    /// `exponents`, and only with output `full`.
    DecodeElement, "element" {
        /// BF16 elements.
        Bf16 = "bf16",
        /// FP8 with four bits of exponent.
        E4M3 = "e4m3",
        /// FP8 with five bits of exponent.
        E5M2 = "e5m2",
        /// IEEE half.
        F16 = "f16",
        /// IEEE single.
        F32 = "f32",
    }
}

impl DecodeElement {
    /// Returns the element of a float type.
    pub const fn of(float: Float) -> Self {
        match float {
            Float::Bf16 => Self::Bf16,
            Float::E4M3 => Self::E4M3,
            Float::E5M2 => Self::E5M2,
            Float::F16 => Self::F16,
            Float::F32 => Self::F32,
        }
    }

    /// Returns the type of elements.
    pub const fn float(self) -> Float {
        match self {
            Self::Bf16 => Float::Bf16,
            Self::E4M3 => Float::E4M3,
            Self::E5M2 => Float::E5M2,
            Self::F16 => Float::F16,
            Self::F32 => Float::F32,
        }
    }
}

range_axis! {
    /// The longest code that a decoder accepts, in bits: it determines the size of the decode table.
    CodeLimit, "code_limit", 6..=15, "6..=15 (bits)"
}

set_axis! {
    /// Warps of a decoder's block; 0: as many of 32, 16, 8 and 4 as fit the architecture's shared memory.
    DecodeWarps, "warps", [0, 4, 8, 16, 32], "4, 8, 16 or 32, or 0 for as many of these as shared memory holds"
}

impl CodeLimit {
    /// The default of the encoder.
    pub const DEFAULT: Self = Self(7);
}

impl DecodeWarps {
    /// As many warps as fit in shared memory.
    pub const FITTING: Self = Self::ALL[0];
}

axes! {
    /// A decoder of the family `decode_huffman`.
    pub struct DecodeHuffmanSpec {
        /// The output of the decoder.
        output: DecodeOutput "",
        /// Type of the weights.
        element: DecodeElement "_" = Bf16 unnamed,
        /// The longest code accepted; the default of an attribute is the encoder's default.
        code_limit: CodeLimit "_l" = 7,
        /// How the codes are copied to shared memory.
        copy: SmemCopy "_" = Bulk unnamed,
        /// Warps of a block. Shipped variants leave it to the architecture; a number selects the block of another one.
        warps: DecodeWarps "_w" = 0 unnamed,
    }
}

args! {
    /// Arguments of the family `decode_huffman`.
    pub struct DecodeHuffmanArgs {
        /// `[n, k]` u8; read by output `full` only. For types other than BF16: `fraction_bytes`, followed by
        /// `fraction_bits`.
        pub sign_mantissa: u64,
        /// `[encoded_words]` u32.
        pub encoded_exp: u64,
        /// `[tiles, 64]` u8: length of each row in bits, minus 64.
        pub row_lengths: u64,
        /// `[tiles]` of 16 bytes.
        pub tile_metadata: u64,
        /// `[verbatim_rows, 64]` u8.
        pub verbatim_exponents: u64,
        /// `[16]` u8.
        pub palette: u64,
        /// `[16]` u8.
        pub code_lengths: u64,
        /// full: `[n, k]` of the element's type; exponent: u8 `[tiles, 64, 64]`; palette: u8 `[tiles, 64, 32]`.
        pub output: u64,
        /// u32, set to `1 + tile` if the metadata of a tile is out of bounds.
        pub fault: u64,
        /// Words in `encoded_exp`.
        pub encoded_words: u64,
        /// Rows in `verbatim_exponents`.
        pub verbatim_rows: u32,
        /// Output features.
        pub n: u32,
        /// Input features.
        pub k: u32,
        /// `ceil(n / 64)`.
        pub tile_rows: u32,
        /// `ceil(k / 64)`.
        pub tile_cols: u32,
        /// Must be 0.
        pub reserved: u32,
    }
}

impl VariantSpec {
    /// Returns a decoder to BF16, which uses the copy engine if the architecture has one.
    pub const fn decode_huffman(arch: Arch, output: DecodeOutput, code_limit: CodeLimit) -> Self {
        let (copy, warps) = (SmemCopy::of(arch), DecodeWarps::FITTING);
        let element = DecodeElement::Bf16;
        Self { arch, op: super::Op::DecodeHuffman(DecodeHuffmanSpec { output, element, code_limit, copy, warps }) }
    }

    /// Returns a decoder to weights of any type, which uses the copy engine if the architecture has one.
    pub const fn decode_elements(arch: Arch, element: DecodeElement, code_limit: CodeLimit) -> Self {
        let (output, copy, warps) = (DecodeOutput::Full, SmemCopy::of(arch), DecodeWarps::FITTING);
        Self { arch, op: super::Op::DecodeHuffman(DecodeHuffmanSpec { output, element, code_limit, copy, warps }) }
    }
}

/// One block fills an SM, so the table is built and stored once per SM.
const BLOCKS_PER_SM: u32 = 1;
const WARPS_MAX: u32 = 32;
const WARPS_MIN: u32 = 4;
/// Buffers of a warp for the codes of a tile: one per half.
const STAGES: u32 = 2;
/// 16 B in front, and 32 rows of at most 319 bits, extended to 16 B boundaries at both ends.
const STAGE_BYTES: u32 = 16 + 1312;
const MBARRIER_BYTES: u32 = 8;
/// Code words and single-symbol entries while the table is built.
const SCRATCH_BYTES: u32 = 1024;
/// The table is repeated up to this size, so that lanes read from different banks.
const TABLE_BYTES_MAX: u32 = 65_536;
const TABLE_COPIES_MAX: u32 = 32;
/// A half tile, one row per lane, is staged before it is written.
const ROWS_PER_HALF: u32 = 32;

/// Returns the bytes of the lookup table. Codes of up to 7 bits: one table of pairs, indexed by two codes. Longer
/// codes: single symbols, in several copies.
const fn table_bytes(output: DecodeOutput, limit: CodeLimit) -> u32 {
    let bits = limit.get();
    if bits <= 7 {
        return (if matches!(output, DecodeOutput::Exponent) { 4 } else { 2 }) << (2 * bits);
    }
    let one = (if bits == 15 { 2 } else { 4 }) << bits;
    let fit = TABLE_BYTES_MAX / one;
    one * if fit < TABLE_COPIES_MAX { fit } else { TABLE_COPIES_MAX }
}

impl DecodeHuffmanSpec {
    pub(crate) const fn instructions(&self) -> Instructions {
        Instructions::NONE.with(self.copy.instruction())
    }

    /// Returns the shared memory of a block with `warps` warps.
    const fn smem(&self, warps: u32) -> SmemPlan {
        // `full` also decodes to indices: this halves its table and staging area, and 32 warps fit in registers.
        let row_bytes = if matches!(self.output, DecodeOutput::Exponent) { 64 } else { 32 };
        SmemPlan::new()
            .section("table", 1, table_bytes(self.output, self.code_limit), 16)
            .section("scratch", 1, SCRATCH_BYTES, 16)
            .section("barriers", STAGES * warps, self.barrier_bytes(), 8)
            .section("stage", STAGES * warps, STAGE_BYTES, 16)
            .section("output", warps, ROWS_PER_HALF * row_bytes, 16)
    }

    /// Returns the bytes of a buffer's mbarrier, which only the copy engine needs. Threads wait for their own copies.
    const fn barrier_bytes(&self) -> u32 {
        if matches!(self.copy, SmemCopy::Bulk) { MBARRIER_BYTES } else { 0 }
    }

    pub(crate) const fn plan(&self, arch: Arch) -> Result<BlockPlan, Constraint> {
        if !matches!((self.output, self.element), (DecodeOutput::Full, _) | (_, DecodeElement::Bf16)) {
            let what = "only output = full supports an element other than bf16; use output = full or element = bf16";
            return Err(Constraint::Conflict { what });
        }
        let limit_bytes = arch.limits().smem_bytes_per_block;
        // As many as fit in shared memory; on Hopper all of them.
        let mut fitting = WARPS_MAX;
        while fitting > WARPS_MIN && self.smem(fitting).bytes() > limit_bytes {
            fitting /= 2;
        }
        let warps = if self.warps.get() == 0 { fitting } else { self.warps.get() };
        let (smem, stage_bytes) = (self.smem(warps), warps * (STAGE_BYTES + self.barrier_bytes()));
        if smem.bytes() > limit_bytes {
            return Err(Constraint::SharedMemory {
                fixed_bytes: smem.bytes() - STAGES * stage_bytes,
                stages: STAGES,
                stage_bytes,
                limit_bytes,
                fitting_stages: None,
                fitting_other: with_axis(
                    "warps",
                    if self.smem(fitting).bytes() <= limit_bytes { Some(fitting) } else { None },
                ),
            });
        }
        Ok(BlockPlan {
            smem,
            // A ring belongs to one warp, which needs no barrier for empty stages.
            pipeline: Some(PipelinePlan {
                rings: warps,
                stages: STAGES,
                stage_bytes: STAGE_BYTES,
                full_arrivals: (self.barrier_bytes() != 0) as u32,
                empty_arrivals: 0,
            }),
            roles: RolePlan::one("decode", warps),
            launch: LaunchPlan::ordinary(
                warps * arch.limits().warp_threads,
                BLOCKS_PER_SM,
                LaunchGrid::Persistent { work: Work::WeightTiles, per_block: 1, blocks_per_sm: BLOCKS_PER_SM },
            ),
        })
    }
}

impl Family for DecodeHuffmanSpec {
    type Args = DecodeHuffmanArgs;
    const AXES: &'static [crate::axes::Axis] = Self::AXES;
    const EDGES: &'static [Edge] = &[
        Edge { from: EncodingId::HUFFMAN, to: EncodingId::RAW },
        Edge { from: EncodingId::HUFFMAN, to: DECODED_EXPONENTS },
        Edge { from: EncodingId::HUFFMAN, to: EncodingId::PALETTE },
        Edge { from: EncodingId::EXPONENTS, to: EncodingId::RAW },
    ];

    fn edges(&self) -> &'static [Edge] {
        let index = if matches!(self.element, DecodeElement::Bf16) { self.output as usize } else { 3 };
        &Self::EDGES[index..=index]
    }

    fn summary(&self, _: &BlockPlan) -> String {
        let written = match self.output {
            DecodeOutput::Full if self.element != DecodeElement::Bf16 => {
                let (element, bits) = (self.element.tag(), self.code_limit.get());
                return format!(
                    "Tensor of exponents with codes of at most {bits} bits -> {element} [n, k], row-major."
                );
            }
            DecodeOutput::Full => "bf16 [n, k], row-major",
            DecodeOutput::Exponent => "u8 exponents [tiles, 64, 64]",
            DecodeOutput::Palette => "packed 4-bit palette indices [tiles, 64, 32]",
        };
        format!("Huffman tensor with codes of at most {} bits -> {written}.", self.code_limit.get())
    }

    fn entry(&self, plan: &BlockPlan) -> Entry {
        // The axis is 0 if the architecture's shared memory decides.
        Entry::new().number("kWarps", plan.roles.warps())
    }

    /// Exponents only where a kernel reads them: the reconstructive matmul, which needs `wgmma`. Types other than BF16
    /// have decoders for the encoder's default code limit, and for the longest.
    fn catalogue(arch: Arch) -> impl Iterator<Item = VariantSpec> {
        let of_type = move |element: &DecodeElement| {
            [CodeLimit::DEFAULT, CodeLimit::MAX].map(|limit| VariantSpec::decode_elements(arch, *element, limit))
        };
        let others = DecodeElement::ALL.iter().filter(|element| **element != DecodeElement::Bf16).flat_map(of_type);
        let read = move |output: &&DecodeOutput| **output != DecodeOutput::Exponent || arch.has(Instruction::Wgmma);
        DecodeOutput::ALL
            .iter()
            .filter(read)
            .flat_map(move |output| {
                CodeLimit::all().map(move |limit| VariantSpec::decode_huffman(arch, *output, limit))
            })
            .chain(others)
    }
}
