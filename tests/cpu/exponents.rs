//! Decoders of the encoding `exponents` for FP8, F16 and F32: the original bytes are restored. Planted bugs show that
//! the comparison can fail. `huffman` tests the parts that are shared with BF16 decoders.

use crate::harness::{Buffer, CpuKernel, Edit, Run};
use std::sync::{LazyLock, Mutex, PoisonError};
use unweight_codegen::{
    VariantSpec,
    abi::DecodeHuffmanArgs,
    plan::{GemmShape, Plan},
    spec::{self, Arch, DecodeElement},
};
use unweight_format::{
    CodeLimit, Float, FloatMatrix,
    raw::{ExponentsTensor, Section, oracle},
    testing::{Random, float_weights},
};

const CODED: [Float; 4] = [Float::E4M3, Float::E5M2, Float::F16, Float::F32];
/// Code limits that use tables of pairs, of single codes in many copies, and of half the size.
const LIMITS: [u32; 3] = [7, 9, 15];
/// Copies by the copy engine with 32 warps, and copies by threads with 16 and 8 warps.
const ARCHS: [Arch; 2] = [Arch::Sm90a, Arch::Sm86];

fn spec(arch: Arch, float: Float, limit: u32) -> VariantSpec {
    VariantSpec::decode_elements(arch, DecodeElement::of(float), spec::CodeLimit::new(limit).unwrap())
}

fn kernels(edits: &[Edit]) -> Mutex<CpuKernel> {
    let of = |arch| CODED.iter().flat_map(move |float| LIMITS.map(|limit| spec(arch, *float, limit)));
    let all: Vec<_> = ARCHS.into_iter().flat_map(of).collect();
    Mutex::new(CpuKernel::all(&all, edits))
}

static KERNELS: LazyLock<Mutex<CpuKernel>> = LazyLock::new(|| {
    let warps = |limit| Plan::new(&spec(Arch::Sm86, Float::E4M3, limit)).unwrap().roles.warps();
    assert_eq!(LIMITS.map(warps), [16, 8, 8]);
    kernels(&[])
});

const NO_EXTREMES: u64 = u64::MAX;

struct Case {
    name: &'static str,
    float: Float,
    n: usize,
    k: usize,
    bytes: Vec<u8>,
}

impl Case {
    /// Makes weights of which one in `one_in`, and all of the fifth row, have random bits. Even if every exponent has a
    /// code, as E4M3's sixteen do, such a row is too long to be coded.
    fn new(name: &'static str, float: Float, (n, k): (usize, usize), one_in: u64) -> Self {
        let seed = (n * 10_000 + k) as u64;
        let (mut bytes, mut random) = (float_weights(float, n * k, seed), Random::new(seed ^ 1));
        for (at, element) in bytes.chunks_exact_mut(float.bytes()).enumerate() {
            if random.below(one_in) == 0 || one_in != NO_EXTREMES && at / k == 4 {
                element.copy_from_slice(&(random.bits() as u32).to_le_bytes()[..float.bytes()]);
            }
        }
        Self { name, float, n, k, bytes }
    }

    fn encode(&self, limit: u32) -> ExponentsTensor<Vec<u8>> {
        let matrix = FloatMatrix::new(self.float, &self.bytes, self.n, self.k).unwrap();
        oracle::encode_exponents(matrix, CodeLimit::new(limit).unwrap()).unwrap()
    }
}

/// Returns rows and edges of every kind.
fn cases(float: Float) -> Vec<Case> {
    let mut cases: Vec<_> = [
        ("one element", (1, 1), NO_EXTREMES),
        ("one tile", (64, 64), NO_EXTREMES),
        ("odd edges", (65, 130), 100),
        ("k odd", (33, 77), 30),
        ("k a multiple of 8, not of 16", (200, 104), 500),
        ("k a multiple of 4, not of 8", (70, 68), 200),
        ("one row in the last row of tiles", (129, 192), NO_EXTREMES),
        ("one row", (1, 640), NO_EXTREMES),
        ("one column", (130, 1), NO_EXTREMES),
        ("outliers", (130, 208), 200),
        ("any bits", (70, 144), 1),
        ("any bits, k odd", (67, 131), 1),
    ]
    .into_iter()
    .map(|(name, shape, one_in)| Case::new(name, float, shape, one_in))
    .collect();
    // Every pattern of the highest 16 bits, and zeros of both signs.
    let patterns = |i: u32| i.rotate_left(16).to_le_bytes()[4 - float.bytes()..].to_vec();
    let bytes = (0..1 << 16).flat_map(patterns).collect();
    cases.push(Case { name: "all patterns", float, n: 256, k: 256, bytes });
    let zero = |i: usize| [[0, 0, 0, 0], [0, 0, 0, 0x80]][i % 3 / 2][4 - float.bytes()..].to_vec();
    cases.push(Case { name: "zeros", float, n: 64, k: 72, bytes: (0..64 * 72).flat_map(zero).collect() });
    cases
}

/// Makes more tiles than a block has warps, so that warps reuse their buffers.
fn many_tiles(float: Float, k: usize) -> Case {
    Case::new("many tiles", float, (300, k), 300)
}

/// The sections of a tensor as a decoder reads them, for tests that corrupt them.
struct Sections {
    float: Float,
    n: usize,
    k: usize,
    sections: Vec<(Section, Vec<u8>)>,
    fractions: Vec<u8>,
}

const CODE: [Section; 6] = [
    Section::PALETTE,
    Section::CODE_LENGTHS,
    Section::TILE_METADATA,
    Section::ROW_LENGTHS,
    Section::VERBATIM_EXPONENTS,
    Section::ENCODED_EXP,
];

impl Sections {
    fn of(tensor: &ExponentsTensor<Vec<u8>>) -> Self {
        let (grid, float) = (tensor.grid(), tensor.float());
        let sections = CODE.map(|section| (section, tensor.section(section).unwrap().into_owned())).into();
        let fractions = [tensor.fraction_bytes(), tensor.fraction_bits()].concat();
        Self { float, n: grid.rows(), k: grid.cols(), sections, fractions }
    }

    fn get(&mut self, section: Section) -> &mut Vec<u8> {
        &mut self.sections.iter_mut().find(|(s, _)| *s == section).unwrap().1
    }

    /// Returns the output bytes and the fault word.
    fn decode(
        &self,
        kernels: &Mutex<CpuKernel>,
        arch: Arch,
        limit: u32,
        (sms, seed): (u32, u64),
    ) -> Result<(Vec<u8>, u32), String> {
        let (n, k) = (self.n as u32, self.k as u32);
        let sections = self.sections.iter().map(|(section, bytes)| (section.name(), Buffer::of(bytes)));
        let mut buffers: Vec<(&str, Buffer)> = sections.collect();
        buffers.push(("fractions", Buffer::of(&self.fractions)));
        buffers.push(("output", Buffer::new(self.n * self.k * self.float.bytes())));
        buffers.push(("fault", Buffer::zeroed(4)));
        let find = |name: &str| &buffers.iter().find(|(n, _)| *n == name).unwrap().1;
        let address = |section: Section| find(section.name()).address();
        let args = DecodeHuffmanArgs {
            sign_mantissa: find("fractions").address(),
            encoded_exp: address(Section::ENCODED_EXP),
            row_lengths: address(Section::ROW_LENGTHS),
            tile_metadata: address(Section::TILE_METADATA),
            verbatim_exponents: address(Section::VERBATIM_EXPONENTS),
            palette: address(Section::PALETTE),
            code_lengths: address(Section::CODE_LENGTHS),
            output: find("output").address(),
            fault: find("fault").address(),
            encoded_words: find("encoded_exp").slice().len() as u64 / 4,
            verbatim_rows: (find("verbatim_exponents").slice().len() / 64) as u32,
            n,
            k,
            tile_rows: n.div_ceil(64),
            tile_cols: k.div_ceil(64),
            reserved: 0,
        };
        let run = Run { problem: GemmShape { m: 0, n, k }, sms, seed };
        let registered: Vec<_> = buffers.iter().map(|(name, buffer)| (*name, buffer.slice())).collect();
        let mut kernels = kernels.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the buffers outlive the launch, and the kernel reaches them through checked wrappers only.
        unsafe { kernels.run(&spec(arch, self.float, limit), run, &args, &registered)? };
        Ok((find("output").slice().to_vec(), find("fault").u32s()[0]))
    }
}

#[track_caller]
fn assert_case(case: &Case, limit: u32, arch: Arch, (got, fault): (Vec<u8>, u32)) {
    let what = format!("{:?} {} L={limit} {arch:?}", case.float, case.name);
    assert_eq!((fault, got.len()), (0, case.bytes.len()), "{what}");
    if let Some(at) = (0..got.len()).find(|&i| got[i] != case.bytes[i]) {
        let wrong = (0..got.len()).filter(|&i| got[i] != case.bytes[i]).count();
        panic!(
            "{what}: byte {at} is {:#x} instead of {:#x} ({wrong} of {} differ)",
            got[at],
            case.bytes[at],
            got.len()
        );
    }
}

#[test]
fn weights_of_every_type_and_shape_round_trip() {
    for float in CODED {
        for case in cases(float) {
            let tensor = case.encode(7);
            for (arch, launch) in [(Arch::Sm90a, (1, 1)), (Arch::Sm90a, (3, 2)), (Arch::Sm86, (2, 3))] {
                let got = Sections::of(&tensor).decode(&KERNELS, arch, 7, launch);
                assert_case(&case, 7, arch, got.unwrap_or_else(|error| panic!("{float:?} {}: {error}", case.name)));
            }
        }
    }
}

#[test]
fn long_codes_wrap_the_ring_buffers() {
    for float in CODED {
        // Elements written in the lanes' own order, and one by one.
        for case in [many_tiles(float, 768), many_tiles(float, 129)] {
            for (encoded, limit) in [(7, 7), (9, 9), (15, 15), (6, 15)] {
                for arch in ARCHS {
                    let got = Sections::of(&case.encode(encoded)).decode(&KERNELS, arch, limit, (1, limit.into()));
                    assert_case(&case, limit, arch, got.unwrap());
                }
            }
        }
    }
}

#[test]
fn tampered_metadata_is_reported_as_a_fault() {
    for float in CODED {
        let case = Case::new("outliers", float, (130, 200), 200);
        let tensor = case.encode(7);
        let (tile, tile_cols) = (5, tensor.grid().tile_cols());
        let field = |sections: &mut Sections, index: usize, value: u32| {
            let at = tile * 16 + index * 4;
            sections.get(Section::TILE_METADATA)[at..at + 4].copy_from_slice(&value.to_le_bytes());
        };
        for (index, value) in [(0, 1 << 20), (0, u32::MAX), (1, 1 << 20), (1, u32::MAX)] {
            for arch in ARCHS {
                let mut sections = Sections::of(&tensor);
                field(&mut sections, index, value);
                let (got, fault) = sections.decode(&KERNELS, arch, 7, (1, 9)).unwrap();
                assert_eq!(fault, 1 + tile as u32, "{float:?}: field {index} = {value}");
                // The tile is skipped, and the others are complete.
                for (at, (got, expected)) in
                    got.chunks_exact(float.bytes()).zip(case.bytes.chunks_exact(float.bytes())).enumerate()
                {
                    let of = at / case.k / 64 * tile_cols + at % case.k / 64;
                    let poison = [Buffer::POISON; 4];
                    assert_eq!(got, if of == tile { &poison[..float.bytes()] } else { expected }, "element {at}");
                }
            }
        }
    }
}

#[test]
fn hostile_bytes_neither_crash_nor_hang() {
    // The simulator checks bounds of every buffer, so success means that no access was outside.
    let mut random = Random::new(23);
    for float in CODED {
        for (case, limit) in [(Case::new("", float, (130, 200), 200), 7), (Case::new("", float, (70, 131), 50), 15)] {
            let tensor = case.encode(limit);
            for round in 0..6u64 {
                let mut sections = Sections::of(&tensor);
                for section in CODE.into_iter().filter(|section| *section != Section::VERBATIM_EXPONENTS) {
                    let bytes = sections.get(section);
                    let flips = if round % 3 == 0 { bytes.len() } else { 3 };
                    for _ in 0..flips {
                        let at = random.below(bytes.len() as u64) as usize;
                        bytes[at] = random.bits() as u8;
                    }
                }
                sections.get(Section::VERBATIM_EXPONENTS).fill(random.bits() as u8);
                let arch = ARCHS[round as usize % 2];
                let outcome = sections.decode(&KERNELS, arch, limit, (1, round));
                outcome.unwrap_or_else(|error| panic!("{float:?} L={limit} round {round} {arch:?}: {error}"));
            }
        }
    }
}

#[test]
fn planted_bugs_are_caught() {
    const DECODE: &str = "unweight/kernels/decode_huffman.cuh";
    const ELEMENTS: &str = "unweight/encoding/elements.cuh";
    // Rows of `ODD` are not groups of eight; rows of `WIDE` are groups of sixteen. Two other shapes end exactly at the
    // end of their sections, which are padded to 16 bytes.
    const ODD: (usize, usize) = (67, 129);
    const WIDE: (usize, usize) = (67, 208);
    /// A name, an element type and a shape that expose the bug, and `(header, from, to)`.
    type Bug = (&'static str, Float, (usize, usize), (&'static str, &'static str, &'static str));
    let bugs: [Bug; 19] = [
        (
            "fraction bits at the end of fraction bytes",
            Float::F16,
            ODD,
            (ELEMENTS, "kRestBytes + 15) & ~15ull", "kRestBytes)"),
        ),
        (
            "a single element's bits in one byte",
            Float::E5M2,
            ODD,
            (ELEMENTS, "if (shift + Element::kRestBits > 8) bits |=", "if (false) bits |="),
        ),
        ("reads a byte after the end", Float::E4M3, (32, 131), (ELEMENTS, "shift + Element::kRestBits > 8", "true")),
        (
            "nibbles swapped",
            Float::E4M3,
            WIDE,
            (ELEMENTS, "exponents | ptx::prmt(even, odd, 0x5140)", "exponents | ptx::prmt(odd, even, 0x5140)"),
        ),
        (
            "the last eight use the indices of the first eight",
            Float::E4M3,
            WIDE,
            (ELEMENTS, "table.four(indices.y)", "table.four(indices.x)"),
        ),
        (
            "half of the exponents of a verbatim row",
            Float::E4M3,
            WIDE,
            (ELEMENTS, "Table::place(exponents.z)", "Table::place(exponents.x)"),
        ),
        ("looks at a word that is not there", Float::E5M2, (64, 200), (ELEMENTS, "(at & 3) > 1 ?", "true ?")),
        ("one word for three bytes", Float::E5M2, WIDE, (ELEMENTS, "(at & 3) > 1 ?", "(at & 3) > 2 ?")),
        ("begins at a word", Float::F16, WIDE, (ELEMENTS, "8 * (static_cast<u32>(byte(first)) & 3)", "0")),
        (
            "the last four use the bits of the first four",
            Float::E5M2,
            WIDE,
            (ELEMENTS, "four(bits >> 12)", "four(bits >> 8)"),
        ),
        ("three bits leak", Float::F16, WIDE, (ELEMENTS, "(each & 0x03030303u)", "(each & 0x07070707u)")),
        (
            "lower bytes of the first four",
            Float::F16,
            WIDE,
            (ELEMENTS, "mma::interleave(upper.word[1], rest.bytes.y", "mma::interleave(upper.word[1], rest.bytes.x"),
        ),
        (
            "a fraction across words",
            Float::F32,
            WIDE,
            (
                ELEMENTS,
                "ptx::shf_r_wrap(rest.word[0], rest.word[1], 24)",
                "ptx::shf_r_wrap(rest.word[0], rest.word[1], 16)",
            ),
        ),
        ("the third of three bytes", Float::F32, WIDE, (ELEMENTS, "rest.word[1], 0x0052)", "rest.word[1], 0x0042)")),
        (
            "exponents at the wrong position",
            Float::E4M3,
            WIDE,
            (ELEMENTS, "exponents << kShift & kMask", "exponents << 2 & kMask"),
        ),
        ("index 8 and above", Float::F16, WIDE, (ELEMENTS, "indices ^ 0x8888u)", "indices)")),
        (
            "the next batch is not loaded",
            Float::F32,
            WIDE,
            (DECODE, "if (begin != 0) load_batch<Element>(args, part, begin, batch);", ""),
        ),
        ("rows of another swizzle", Float::F32, WIDE, (DECODE, "Part::kStep * i / 4 % 2", "Part::kStep * i / 2 % 2")),
        (
            "wrong verbatim columns",
            Float::E5M2,
            WIDE,
            (DECODE, "+ lane % Part::kLanes * Element::kWidth;", "+ lane % Part::kLanes;"),
        ),
    ];
    for (name, float, shape, (header, from, to)) in bugs {
        // Verbatim rows among coded rows.
        let case = Case::new(name, float, shape, 60);
        let tensor = case.encode(7);
        let spec = spec(Arch::Sm90a, float, 7);
        let Some(edit) = Edit::planted(header, from, to) else { continue };
        let kernel = Mutex::new(CpuKernel::of(&spec, &[edit]));
        let outcome = Sections::of(&tensor).decode(&kernel, Arch::Sm90a, 7, (1, 1));
        let caught = outcome.map_or(true, |(got, fault)| fault != 0 || got != case.bytes);
        assert!(caught, "the planted bug was not caught: {name}");
    }
}
