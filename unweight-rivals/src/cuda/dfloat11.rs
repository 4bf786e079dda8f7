//! Decodes DFloat11 units on a device: `kernels/dfloat11.cuh`.

use unweight_codegen::{ExternalSource, abi::ArgsInfo, args, plan::SmemPlan, spec::Arch};
use unweight_rt::{DeviceBuffer, DeviceError, KernelSet, LaunchError, Stream, raw::device::ExternalKernel};

use super::{Error, HEADERS};
use crate::dfloat11::{Code, Decoder, Unit, WINDOW_BYTES};

/// Threads of a block.
const THREADS: u32 = 512;
const BLOCKS_PER_SM: u32 = 4;
/// Exponents of a window that are buffered in shared memory.
const PARKED: u32 = 32;
/// Bits of a table lookup.
const LOOKUP_BITS: u32 = 12;
const LOOKUPS: usize = 1 << LOOKUP_BITS;
/// The maximum number of codes that one lookup finds.
const CODES: usize = 4;

args! {
    /// Arguments of the kernel that decodes a unit.
    pub struct Dfloat11Args {
        /// u32 `[code_words]`: the bytes of `encoded_exponent`, followed by zeros.
        pub codes: u64,
        /// u8 `[gap_bytes]`.
        pub gaps: u64,
        /// u32 `[blocks + 1]`.
        pub positions: u64,
        /// u8 `[rows + 1, 256]`.
        pub luts: u64,
        /// u8 `[elements]`, 8-byte aligned.
        pub sign_mantissa: u64,
        /// u16 `[4096]`: [`Tables::starts`].
        pub starts: u64,
        /// u32 `[4096]`: [`Tables::symbols`].
        pub symbols: u64,
        /// bf16 `[elements]`, written, 16-byte aligned.
        pub weights: u64,
        /// u32: incremented for each block that does not contain what its positions say.
        pub faults: u64,
        /// Words of `codes`.
        pub code_words: u32,
        /// Bytes of `gaps`.
        pub gap_bytes: u32,
        /// Blocks of the unit.
        pub blocks: u32,
        /// Windows of a block.
        pub windows: u32,
        /// Rows of `luts`, except the last.
        pub rows: u32,
        /// Elements, below 2^31.
        pub elements: u32,
    }
}

/// Returns the decoding kernel for an architecture.
pub fn kernel(arch: Arch) -> ExternalSource {
    let smem = SmemPlan::new()
        .section("starts", LOOKUPS as u32, 2, 16)
        .section("symbols", LOOKUPS as u32, 4, 16)
        .section("sums", THREADS / 32, 4, 16)
        .section("exponents", THREADS - 2, PARKED, 16)
        .section("parked", THREADS, PARKED, 16);
    ExternalSource {
        family: "dfloat11",
        variant: format!("t{THREADS}"),
        arch,
        summary: "DFloat11 unit -> bf16.",
        grid: "what fits the machine",
        function: "run",
        header: "rivals/dfloat11.cuh",
        headers: HEADERS,
        constants: vec![("kThreads", THREADS)],
        args: ArgsInfo::of::<Dfloat11Args>(),
        smem,
        threads: THREADS,
        blocks_per_sm: BLOCKS_PER_SM,
    }
}

/// Lookup tables for the next 12 bits: up to four complete codes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tables {
    /// Bit 15 - i: a code begins after i bits. The lowest four bits: the total length of the codes, 0 if none is
    /// complete.
    pub starts: Vec<u16>,
    /// Exponents of these codes, starting in the lowest byte.
    pub symbols: Vec<u32>,
}

impl Tables {
    /// Builds the tables of a code.
    pub fn of(code: &Code) -> Self {
        // A single code by its first bits: length and exponent.
        let mut single = vec![(0u32, 0u32); LOOKUPS];
        for exponent in 0..=255u8 {
            let word = code.word(exponent);
            let bits = u32::from(word.bits);
            if (1..=LOOKUP_BITS).contains(&bits) {
                let first = (word.value as usize) << (LOOKUP_BITS - bits);
                single[first..first + (1 << (LOOKUP_BITS - bits))].fill((bits, exponent.into()));
            }
        }
        let entry = |index: usize| {
            let (mut at, mut starts, mut symbols) = (0, 0u16, 0u32);
            for place in 0..CODES {
                let (bits, exponent) = single[index << at & (LOOKUPS - 1)];
                if bits == 0 || at + bits > LOOKUP_BITS {
                    break;
                }
                starts |= 1 << (15 - at);
                symbols |= exponent << (8 * place);
                at += bits;
                if at == LOOKUP_BITS {
                    break;
                }
            }
            (starts | at as u16, symbols)
        };
        let (starts, symbols) = (0..LOOKUPS).map(entry).unzip();
        Self { starts, symbols }
    }
}

/// A unit on a device, in the layout of its file, with the tables of its code.
#[derive(Debug)]
pub struct DeviceUnit {
    codes: DeviceBuffer<u32>,
    gaps: DeviceBuffer<u8>,
    positions: DeviceBuffer<u32>,
    luts: DeviceBuffer<u8>,
    sign_mantissa: DeviceBuffer<u8>,
    starts: DeviceBuffer<u16>,
    symbols: DeviceBuffer<u32>,
    windows: u32,
    stored_bytes: u64,
}

impl DeviceUnit {
    /// Copies a unit to the device after checking its small sections.
    ///
    /// # Errors
    /// The sections do not match, or the device has too little memory. Damaged codes are found by the kernel.
    pub fn upload(stream: &Stream, unit: &Unit) -> Result<Self, Error> {
        Decoder::new(&unit.sections())?;
        Ok(Self::upload_any(stream, unit, &Tables::of(&Code::parse(&unit.luts)?))?)
    }

    /// Copies any bytes, with tables of any code, to test how the kernel handles them.
    #[doc(hidden)]
    pub fn upload_any(stream: &Stream, unit: &Unit, tables: &Tables) -> Result<Self, DeviceError> {
        let word = |bytes: &[u8]| {
            bytes.iter().enumerate().fold(0, |word, (place, &byte)| word | u32::from(byte) << (8 * place))
        };
        let codes: Vec<u32> = unit.encoded_exponent.chunks(4).map(word).collect();
        let mut positions: Vec<u32> = unit.output_positions.chunks(4).map(word).collect();
        let blocks = unit.encoded_exponent.len().div_ceil(WINDOW_BYTES * unit.threads.max(1));
        // The last entry may be missing if no code begins in the last block.
        positions.resize(blocks + 1, unit.sign_mantissa.len() as u32);
        let stored_bytes =
            [&unit.luts, &unit.encoded_exponent, &unit.sign_mantissa, &unit.output_positions, &unit.gaps]
                .iter()
                .map(|section| section.len() as u64)
                .sum();
        Ok(Self {
            codes: DeviceBuffer::from_host(stream, &codes)?,
            gaps: DeviceBuffer::from_host(stream, &unit.gaps)?,
            positions: DeviceBuffer::from_host(stream, &positions)?,
            luts: DeviceBuffer::from_host(stream, &unit.luts)?,
            sign_mantissa: DeviceBuffer::from_host(stream, &unit.sign_mantissa)?,
            starts: DeviceBuffer::from_host(stream, &tables.starts)?,
            symbols: DeviceBuffer::from_host(stream, &tables.symbols)?,
            windows: unit.threads as u32,
            stored_bytes,
        })
    }

    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.sign_mantissa.len()
    }

    /// Returns the bytes of the unit's sections.
    pub fn bytes(&self) -> u64 {
        self.stored_bytes
    }

    fn args(&self) -> Dfloat11Args {
        Dfloat11Args {
            codes: self.codes.address(),
            gaps: self.gaps.address(),
            positions: self.positions.address(),
            luts: self.luts.address(),
            sign_mantissa: self.sign_mantissa.address(),
            starts: self.starts.address(),
            symbols: self.symbols.address(),
            // Sections are below 2^31 bytes.
            code_words: self.codes.len() as u32,
            gap_bytes: self.gaps.len() as u32,
            blocks: (self.positions.len() - 1) as u32,
            windows: self.windows,
            rows: (self.luts.len() / 256).saturating_sub(1) as u32,
            elements: self.sign_mantissa.len() as u32,
            ..Dfloat11Args::default()
        }
    }
}

/// Decodes units, with one launch each.
#[derive(Debug)]
pub struct UnitDecoder {
    kernel: ExternalKernel,
    faults: DeviceBuffer<u32>,
}

impl UnitDecoder {
    /// Compiles the kernel, or loads it from the cache.
    ///
    /// # Errors
    /// The device or the compiler is unavailable or failed.
    pub fn of(stream: &Stream, kernels: &KernelSet) -> Result<Self, DeviceError> {
        let kernel = ExternalKernel::of(kernels, kernel(kernels.device().info().arch))?;
        Ok(Self { kernel, faults: DeviceBuffer::zeroed(stream, 1)? })
    }

    /// Enqueues the decoding of all weights of a unit, concatenated.
    ///
    /// # Errors
    /// `weights` has another number of elements, or a buffer is on another device.
    pub fn decode(
        &self,
        stream: &Stream,
        unit: &DeviceUnit,
        weights: &mut DeviceBuffer<u16>,
    ) -> Result<(), DeviceError> {
        let (got, expected) = (weights.len() as u64, unit.elements() as u64);
        if got != expected {
            return self.kernel.refuse(LaunchError::Elements { buffer: "the weights", got, expected });
        }
        let own = self.kernel.device().ordinal();
        for (operand, other) in [("the weights", weights.device()), ("the unit", unit.codes.device())] {
            if other.ordinal() != own {
                return self.kernel.refuse(LaunchError::OtherDevice { operand, own, other: other.ordinal() });
            }
        }
        let args = Dfloat11Args { weights: weights.address(), faults: self.faults.address(), ..unit.args() };
        // SAFETY: each section is passed with the count that bounds it, and `weights` has as many elements as the unit.
        // Dropping a buffer waits for the kernel.
        unsafe { self.kernel.launch(stream, self.kernel.resident_blocks().min(args.blocks), &args) }
    }

    /// Returns how many blocks of all units so far did not contain what their positions say. Waits for the stream.
    ///
    /// # Errors
    /// The driver failed.
    pub fn faults(&self, stream: &Stream) -> Result<u32, DeviceError> {
        Ok(self.faults.to_host(stream)?.first().copied().unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use unweight_format::{
        Histogram,
        testing::{Random, Weights},
    };

    use super::*;

    /// Every lookup of 12 bits returns the same codes as decoding them one by one.
    #[test]
    fn tables_hold_the_codes_that_their_bits_begin_with() {
        let mut random = Random::new(3);
        for weights in Weights::ALL {
            let bytes = weights.bytes(1 << 14, random.bits());
            let Ok(code) = Code::of(&Histogram::of(&bytes)) else { continue };
            let tables = Tables::of(&code);
            let mut longest = 0;
            for index in 0..LOOKUPS as u32 {
                let (starts, symbols) = (tables.starts[index as usize], tables.symbols[index as usize]);
                let mut at = 0;
                for place in 0..CODES {
                    let found = (0..240u8).find(|&exponent| {
                        let word = code.word(exponent);
                        let (bits, left) = (u32::from(word.bits), LOOKUP_BITS - at);
                        bits > 0 && bits <= left && (index & ((1 << left) - 1)) >> (left - bits) == word.value
                    });
                    let Some(found) = found else { break };
                    assert_eq!(starts >> (15 - at) & 1, 1, "{weights:?} {index:#x}");
                    assert_eq!((symbols >> (8 * place)) as u8, found);
                    at += u32::from(code.word(found).bits);
                    longest = longest.max(place);
                }
                assert_eq!(u32::from(starts % 16), at, "{weights:?} {index:#x}");
                assert_eq!(
                    (u32::from(starts) & 0xfff0) << at & 0xffff,
                    0,
                    "{weights:?} {index:#x}: nothing begins behind"
                );
            }
            assert!(longest > 0);
        }
    }
}
