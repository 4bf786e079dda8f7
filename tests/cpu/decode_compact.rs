//! The conversions of the compact encoding in the simulator, against `unweight_format`: equal bytes, no faults on
//! random bytes, and planted bugs that must be caught.

use crate::compact_sections::Sections;
use crate::harness::{Buffer, CpuKernel, Edit, Run};
use unweight_codegen::{
    VariantSpec,
    abi::DecodeCompactArgs,
    plan::GemmShape,
    spec::{Arch, DecodeCompactStage},
};
use unweight_format::{
    Histogram, Matrix,
    raw::{
        CompactTensor, PackedTensor,
        compact::encode,
        packed::{TILE_BYTES, pack},
    },
    testing::{Random, Weights},
};

/// Row blocks per block of `lists`.
const GROUP_BLOCKS: usize = 64;

pub fn variant(stage: DecodeCompactStage) -> VariantSpec {
    VariantSpec::decode_compact(Arch::Sm90a, stage)
}

/// Builds all stages.
fn build(edits: &[Edit]) -> CpuKernel {
    let stages: Vec<_> = DecodeCompactStage::ALL.iter().map(|&stage| variant(stage)).collect();
    CpuKernel::all(&stages, edits)
}

/// A matrix and its encodings by the CPU.
pub struct Case {
    pub bytes: Vec<u8>,
    pub tensor: CompactTensor<Vec<u8>>,
}

impl Sections {
    fn args(&self, tensor: &CompactTensor<Vec<u8>>, base: u8) -> DecodeCompactArgs {
        let (n, k) = (tensor.grid().rows() as u32, tensor.grid().cols() as u32);
        DecodeCompactArgs {
            dense: self.dense.address(),
            tiles: self.tiles.address(),
            streams: self.streams.address(),
            records: self.records.address(),
            table: self.table.address(),
            stream_words: (self.streams.slice().len() / 4) as u32,
            record_words: (self.records.slice().len() / 4) as u32,
            class_base: tensor.window().base().into(),
            base: base.into(),
            n,
            k,
            tile_rows: n / 64,
            tile_cols: k / 64,
            ..DecodeCompactArgs::default()
        }
    }

    fn buffers(&self) -> Vec<(&str, &[u8])> {
        vec![
            ("dense", self.dense.slice()),
            ("tiles", self.tiles.slice()),
            ("streams", self.streams.slice()),
            ("records", self.records.slice()),
            ("table", self.table.slice()),
        ]
    }
}

fn launch(
    kernel: &mut CpuKernel,
    stage: DecodeCompactStage,
    args: &DecodeCompactArgs,
    buffers: &[(&str, &[u8])],
) -> Result<(), String> {
    let run = Run { problem: GemmShape { m: 0, n: args.n, k: args.k }, sms: 2, seed: 3 };
    // SAFETY: the buffers outlive the launch, and the kernel reaches them through checked wrappers only.
    unsafe { kernel.run(&variant(stage), run, args, buffers) }
}

fn full(kernel: &mut CpuKernel, tensor: &CompactTensor<Vec<u8>>, sections: &Sections) -> Result<Vec<u8>, String> {
    let weights = Buffer::new(tensor.grid().elements() * 2);
    let args = DecodeCompactArgs { weights: weights.address(), ..sections.args(tensor, 1) };
    let mut buffers = sections.buffers();
    buffers.push(("weights", weights.slice()));
    launch(kernel, DecodeCompactStage::Full, &args, &buffers)?;
    Ok(weights.slice().to_vec())
}

/// Runs `packed` and `lists` as a host does. Returns tiles, heads, lists, and whether an element cannot be packed.
fn packed(
    kernel: &mut CpuKernel,
    tensor: &CompactTensor<Vec<u8>>,
    sections: &Sections,
    base: u8,
) -> Result<([Vec<u8>; 3], bool), String> {
    let tiles = tensor.grid().tiles();
    let container = Buffer::new(tiles * TILE_BYTES);
    let heads = Buffer::new(tiles * 16);
    let group_words = Buffer::zeroed((tiles * 4).div_ceil(GROUP_BLOCKS) * 4);
    let inexact = Buffer::zeroed(8);
    let mut args = DecodeCompactArgs {
        packed: container.address(),
        escape_heads: heads.address(),
        group_words: group_words.address(),
        inexact: inexact.address(),
        ..sections.args(tensor, base)
    };
    let mut buffers = sections.buffers();
    buffers.extend([
        ("packed", container.slice()),
        ("heads", heads.slice()),
        ("group_words", group_words.slice()),
        ("inexact", inexact.slice()),
    ]);
    launch(kernel, DecodeCompactStage::Packed, &args, &buffers)?;
    let words = group_words.u32s().iter().sum::<u32>() as usize;
    let escapes = Buffer::new(words * 4);
    args.escapes = escapes.address();
    args.escape_words = words as u32;
    buffers.push(("escapes", escapes.slice()));
    launch(kernel, DecodeCompactStage::Lists, &args, &buffers)?;
    let sections = [&container, &heads, &escapes].map(|buffer| buffer.slice().to_vec());
    Ok((sections, inexact.u64s()[0] != 0))
}

impl Case {
    pub fn new(n: usize, k: usize, bytes: Vec<u8>) -> Self {
        let tensor = encode(Matrix::new(&bytes, n, k).unwrap(), &Histogram::of(&bytes)).unwrap();
        Self { bytes, tensor }
    }

    /// Makes trained weights with every `every`-th element from `odd`. Row 37 has a run of these, so that a list is
    /// long.
    fn with(n: usize, k: usize, every: u64, odd: &[u16]) -> Self {
        let mut random = Random::new(n as u64 * 31 + every);
        let mut bytes = Weights::TRAINED.bytes(n * k, every);
        let run = if odd.is_empty() { 0 } else { n * k / 800 };
        for (i, element) in bytes.chunks_exact_mut(2).enumerate() {
            if !odd.is_empty() && (i / k == 37 && i % k < run.min(40) || random.below(every) == 0) {
                element.copy_from_slice(&odd[random.below(odd.len() as u64) as usize].to_le_bytes());
            }
        }
        Self::new(n, k, bytes)
    }

    fn oracle(&self) -> PackedTensor<Vec<u8>> {
        let (n, k) = (self.tensor.grid().rows(), self.tensor.grid().cols());
        pack(Matrix::new(&self.bytes, n, k).unwrap(), &Histogram::of(&self.bytes)).unwrap()
    }

    /// Checks both conversions against the oracle.
    fn check(&self, kernel: &mut CpuKernel) -> Result<(), String> {
        let shape = (self.tensor.grid().rows(), self.tensor.grid().cols());
        let same = |what: &str, got: &[u8], expected: &[u8]| match got.iter().zip(expected).position(|(a, b)| a != b) {
            _ if got.len() != expected.len() => {
                Err(format!("{shape:?}: {what} has {} bytes instead of {}", got.len(), expected.len()))
            }
            Some(at) => Err(format!("{shape:?}: {what} differs at byte {at}")),
            None => Ok(()),
        };
        let sections = Sections::of(&self.tensor);
        same("weights", &full(kernel, &self.tensor, &sections)?, &self.bytes)?;
        let oracle = self.oracle();
        let ([container, heads, escapes], inexact) = packed(kernel, &self.tensor, &sections, oracle.window().base())?;
        if inexact {
            return Err(format!("{shape:?}: the kernel reported an element without an operand"));
        }
        same("packed", &container, oracle.packed())?;
        same("escape_heads", &heads, oracle.escape_heads())?;
        same("escapes", &escapes, oracle.escapes())
    }
}

/// Zeros, infinities, NaNs with payloads, subnormals, the smallest normal, and numbers in the window of 32 but not of
/// 16.
pub const SPECIAL: [u16; 11] = [0x0000, 0x8000, 0x7f80, 0xff80, 0x7fc1, 0xffff, 0x0001, 0x807f, 0x0080, 0x3081, 0xb17e];

/// Every kind of escape and of code.
pub fn cases() -> Vec<Case> {
    let mut random = Random::new(5);
    let mut exponents = |exponent: &mut dyn FnMut(u64) -> u16| -> Vec<u8> {
        (0..64 * 128)
            .flat_map(|_| {
                let bits = random.bits();
                (bits as u16 & 0x807f | exponent(bits >> 16) << 7).to_le_bytes()
            })
            .collect()
    };
    // The longest codes: a codebook whose rarest quads have nine bits; and codes of one bit.
    let skewed = exponents(&mut |bits| 118 - (bits.trailing_zeros() as u16).min(14));
    let one = exponents(&mut |_| 125);
    // Equally frequent classes give few codes and many escapes, so use only two classes and all their quads.
    let two = exponents(&mut |bits| 116 + 7 * (bits & 1) as u16);
    vec![
        Case::with(64, 64, 1, &[]),
        Case::with(192, 128, 900, &SPECIAL),
        Case::with(64, 320, 500, &SPECIAL),
        // Several groups of lists, the last one not full, and blocks with warps without a tile.
        Case::with(64, 64 * 19, 600, &SPECIAL[..6]),
        Case::new(64, 128, skewed),
        Case::new(128, 64, one),
        Case::new(64, 128, two),
    ]
}

/// Makes tiles of one quad with rare other codes (0 to 19), which shift the start of the next tile; and tiles of 1024
/// codes with the maximum length of 9 bits.
pub fn longest_streams() -> Case {
    let (n, k) = (64, 64 * 40);
    // Elements of a quad: rows g and g + 8, columns 2t and 2t + 1.
    let bytes: Vec<u8> = (0..n * k)
        .flat_map(|i| {
            let (row, column) = (i / k, i % k);
            let (tile, part) = (column / 64, row % 16 / 8 * 2 + column % 2);
            let quad = row / 16 * 256 + row % 8 * 32 + column % 64 / 2;
            let rare = if tile % 2 == 0 { quad < tile / 2 } else { tile % 8 == 7 };
            // 256 quads other than the common quad, which has class 0 four times.
            let class = if rare { (quad % 256 + 1) >> (3 * part) & 7 } else { 0 };
            ((108 + 4 * class as u16) << 7 | i as u16 & 0x7f).to_le_bytes()
        })
        .collect();
    Case::new(n, k, bytes)
}

/// The copy of a tile ends where its streams end, also for the longest streams that begin at the last word of 16 bytes.
#[test]
fn the_longest_streams_are_copied_to_their_end() {
    let case = longest_streams();
    let furthest = (0..case.tensor.grid().tiles()).any(|tile| {
        let begin = u32::from_le_bytes(case.tensor.tiles()[tile * 8..][..4].try_into().unwrap());
        begin % 4 == 3 && case.tensor.stream(tile).len() == 1184
    });
    assert!(furthest, "the data has no such tile");
    let weights = full(&mut build(&[]), &case.tensor, &Sections::of(&case.tensor)).unwrap();
    assert_eq!(weights.iter().zip(&case.bytes).position(|(got, weight)| got != weight), None);
}

#[test]
fn both_conversions_equal_the_cpu() {
    let mut kernel = build(&[]);
    let (mut alone, mut lists) = (0, 0);
    for case in cases() {
        case.check(&mut kernel).unwrap();
        for head in case.tensor.tiles().chunks_exact(8).map(|tile| tile[7] >> 6) {
            alone += u32::from(head == 1);
            lists += u32::from(head >= 2);
        }
    }
    assert!(alone > 0 && lists > 20, "the data has too few escapes: {alone}, {lists}");
}

#[test]
fn any_bytes_stay_in_bounds() {
    let mut kernel = build(&[]);
    let case = Case::with(64, 192, 400, &SPECIAL);
    let mut random = Random::new(78);
    for turn in 0..12 {
        let mut sections = Sections::of(&case.tensor);
        let mut noise = |buffer: &Buffer| Buffer::of(&random.bytes(buffer.slice().len()));
        // Random streams only, so that the tiles lead to them; random starts and heads only; random everything.
        if turn % 3 != 1 {
            sections.streams = noise(&sections.streams);
        }
        if turn % 3 != 0 {
            sections.tiles = noise(&sections.tiles);
        }
        if turn % 3 == 2 {
            sections.dense = noise(&sections.dense);
            sections.records = noise(&sections.records);
        }
        full(&mut kernel, &case.tensor, &sections).unwrap();
        packed(&mut kernel, &case.tensor, &sections, 1 + (turn * 20) as u8).unwrap();
    }
    // A list that promises more elements than a tile has, and lanes of maximum length at the end of shared memory.
    let case = Case::with(64, 512, 400, &SPECIAL);
    let mut sections = Sections::of(&case.tensor);
    sections.streams = Buffer::filled(sections.streams.slice().len(), 0xff);
    sections.records = Buffer::filled(sections.records.slice().len(), 0xff);
    full(&mut kernel, &case.tensor, &sections).unwrap();
}

#[test]
fn planted_bugs_are_caught() {
    let (encoding, kernel_header) = ("unweight/encoding/compact.cuh", "unweight/kernels/decode_compact.cuh");
    for (header, from, to) in [
        (encoding, "at = kUp ? at + used : at - used;", "at = at + used;"),
        (encoding, "if (!kUp) bits[i] = ptx::brev(bits[i]);", ""),
        (encoding, "used += sum & 31;", "used += sum & 15;"),
        (encoding, "first += 3) {", "first += 4) {"),
        (encoding, "i < first + 3 &&", "i < first + 4 &&"),
        (encoding, "up = base + (end > bits ? end - bits : 0);", "up = base + end;"),
        (encoding, "skip = begin & 3;", "skip = 0;"),
        (encoding, "end = end < kTileBitsMax ? end : kTileBitsMax;", ""),
        (encoding, "and_or(w[1] >> 2, 0x01800180u,", "and_or(w[1] >> 2, 0x01000100u,"),
        (
            encoding,
            "p[7] = and_or(w[3] >> 6, kMiddle, p[7]) | (e[3] << 3 & kClass);",
            "p[7] = and_or(w[3] >> 6, kMiddle, p[7]);",
        ),
        (encoding, "return record >> 26 & 3;", "return record >> 26 & 1;"),
        (kernel_header, "shift + (shift << 16)", "shift & 0xffff | shift << 16"),
        (kernel_header, "i = within & ~1u; i <= within", "i = within; i <= within"),
        (kernel_header, "return element % 2 ? pair >> 16 : pair & 0xffff;", "return pair & 0xffff;"),
    ] {
        let Some(edit) = Edit::planted(header, from, to) else { continue };
        let mut kernel = build(&[edit]);
        let caught = cases().iter().any(|case| case.check(&mut kernel).is_err()) || {
            // Lengths whose sum exceeds a tile's maximum; the last slot ends at the end of shared memory.
            let case = Case::with(64, 512, 1, &[]);
            let mut sections = Sections::of(&case.tensor);
            sections.streams = Buffer::filled(sections.streams.slice().len(), 0xff);
            full(&mut kernel, &case.tensor, &sections).is_err()
        };
        assert!(caught, "the planted bug was not caught: `{to}` for `{from}`");
    }
}
