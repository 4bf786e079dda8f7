//! The families `decode_huffman` and `encode_huffman` in the simulator, compared byte for byte with `unweight_format`'s
//! oracle. Planted bugs show that the comparison can fail.
//!
//! Needs g++ (C++17); nothing else.

use crate::harness::{Buffer, CpuKernel, Edit, Run};
use std::sync::{LazyLock, Mutex, PoisonError};
use unweight_codegen::{
    VariantSpec,
    abi::{DecodeHuffmanArgs, EncodeHuffmanArgs},
    plan::{GemmShape, Plan},
    spec::{
        self, Arch, DecodeElement, DecodeHuffmanSpec, DecodeOutput, DecodeWarps, EncodeHuffmanSpec, EncodeHuffmanStage,
        Op, SmemCopy, catalog,
    },
};
use unweight_format::{
    CodeLimit, EncodingId, Matrix,
    raw::{HuffmanTensor, Section, bf16, oracle},
    testing::{Random, Weights},
};

/// Kernels that several tests share. Launches of one library are serialized.
type Shared = LazyLock<Mutex<CpuKernel>>;

// ---- inputs --------------------------------------------------------------------------------------------------------

struct Case {
    name: &'static str,
    n: usize,
    k: usize,
    bytes: Vec<u8>,
}

impl Case {
    fn new(name: &'static str, n: usize, k: usize, element: impl FnMut(usize) -> u16) -> Self {
        Self { name, n, k, bytes: (0..n * k).map(element).flat_map(u16::to_le_bytes).collect() }
    }

    fn matrix(&self) -> Matrix<'_> {
        Matrix::new(&self.bytes, self.n, self.k).unwrap()
    }

    fn encode(&self, limit: u32) -> HuffmanTensor<Vec<u8>> {
        oracle::encode_huffman(self.matrix(), CodeLimit::new(limit).unwrap()).unwrap()
    }
}

/// Returns rows and edges of every kind.
fn cases() -> Vec<Case> {
    let mut random = Random::new(7);
    let mut weights = Weights::TRAINED.iter(7);
    let mut weight = || weights.next().unwrap();
    let mut cases = vec![Case::new("one element", 1, 1, |_| 0xbf81)];
    for (name, n, k) in [
        ("one tile", 64, 64),
        ("odd edges", 65, 130),
        ("k odd", 33, 77),
        ("k a multiple of 8", 200, 96),
        ("k a multiple of 4", 70, 68),
        ("tiles", 128, 192),
        ("one row", 1, 640),
        ("one column", 130, 1),
    ] {
        cases.push(Case::new(name, n, k, |_| weight()));
    }
    // About one element in 200 has a random exponent: many verbatim rows, most of them isolated.
    cases.push(Case::new("outliers", 130, 200, |_| {
        if random.bits().is_multiple_of(200) { random.bits() as u16 } else { weight() }
    }));
    cases.push(Case::new("outliers, k odd", 66, 131, |_| {
        if random.bits().is_multiple_of(50) { random.bits() as u16 } else { weight() }
    }));
    // Only rows that are too long: 3 * 64 elements of the rarest exponent each, which is in the palette but has 6 bits
    // or more.
    cases.push(Case::new("rows above 319 bits", 128, 192, |i| {
        let exponent = if (i / 192) % 40 == 3 { 115 } else { 120 + (random.bits().trailing_zeros() as u16).min(7) };
        exponent << 7 | random.bits() as u16 & 0x807f
    }));
    cases.push(Case::new("one exponent", 70, 72, |_| 0x3f80 | random.bits() as u16 & 0x807f));
    cases.push(Case::new("two exponents", 64, 130, |i| 0x3f80 + (((i as u16 % 3) / 2) << 7)));
    // Every bit pattern: all rows are verbatim.
    cases.push(Case::new("all patterns", 256, 256, |i| i as u16));
    // Every bit pattern, sorted by exponent, so that 16 exponents fill rows of their own.
    cases.push(Case::new("all patterns in order", 256, 256, |i| (i as u16).rotate_right(9)));
    let special = [0x0000u16, 0x8000, 0x7f80, 0xff80, 0x7fc1, 0xffff, 0x0001, 0x807f, 0x7f81];
    cases.push(Case::new("zeros, infinities, NaNs, subnormals", 100, 136, |_| {
        if random.bits().is_multiple_of(3) { special[random.bits() as usize % special.len()] } else { weight() }
    }));
    cases
}

// ---- decode --------------------------------------------------------------------------------------------------------

/// Returns the expected output, from the oracle.
fn expected(output: DecodeOutput, case: &Case, tensor: &HuffmanTensor<Vec<u8>>, limit: u32) -> Vec<u8> {
    match output {
        DecodeOutput::Full => case.bytes.clone(),
        DecodeOutput::Palette => {
            oracle::encode_palette(case.matrix(), CodeLimit::new(limit).unwrap()).unwrap().palette_index().to_vec()
        }
        DecodeOutput::Exponent => {
            let grid = tensor.grid();
            let mut out = vec![0; grid.tiles() * 4096];
            for (i, byte) in out.iter_mut().enumerate() {
                let (tile, row, column) = (i / 4096, i / 64 % 64, i % 64);
                let (tile_row, tile_col) = (tile / grid.tile_cols(), tile % grid.tile_cols());
                let inside = column < grid.cols() - tile_col * 64;
                *byte = if row >= grid.rows() - tile_row * 64 {
                    0
                } else if inside {
                    bf16::exponent(case.matrix().get(tile_row * 64 + row, tile_col * 64 + column))
                } else if tensor.metadata(tile).bitmask() >> row & 1 == 1 {
                    0
                } else {
                    tensor.code().palette().exponents()[0]
                };
            }
            out
        }
    }
}

/// Decoders of an architecture with one kind of copy. Other architectures than Hopper have fewer warps per block, so
/// that a block fits in their shared memory.
struct Decoders {
    arch: Arch,
    copy: SmemCopy,
    outputs: &'static [DecodeOutput],
    limits: &'static [u32],
    kernels: Mutex<CpuKernel>,
}

impl Decoders {
    fn spec(arch: Arch, copy: SmemCopy, output: DecodeOutput, limit: u32) -> VariantSpec {
        let (code_limit, warps) = (spec::CodeLimit::new(limit).unwrap(), DecodeWarps::FITTING);
        let element = DecodeElement::Bf16;
        VariantSpec { arch, op: Op::DecodeHuffman(DecodeHuffmanSpec { output, element, code_limit, copy, warps }) }
    }

    fn of(arch: Arch, copy: SmemCopy, outputs: &'static [DecodeOutput], limits: &'static [u32]) -> Self {
        let of_output = |output| limits.iter().map(move |limit| Self::spec(arch, copy, output, *limit));
        let all: Vec<_> = outputs.iter().copied().flat_map(of_output).collect();
        Self { arch, copy, outputs, limits, kernels: Mutex::new(CpuKernel::all(&all, &[])) }
    }

    /// Returns the decoders that ship for an architecture with less shared memory.
    fn shipped(arch: Arch, limits: &'static [u32]) -> Self {
        Self::of(arch, SmemCopy::of(arch), &[DecodeOutput::Full, DecodeOutput::Palette], limits)
    }

    fn has(&self, output: DecodeOutput, limit: u32) -> bool {
        self.outputs.contains(&output) && self.limits.contains(&limit)
    }
}

const LIMITS: &[u32] = &[6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

static BULK: LazyLock<Decoders> =
    LazyLock::new(|| Decoders::of(Arch::Sm90a, SmemCopy::Bulk, DecodeOutput::ALL, LIMITS));
static ASYNC: LazyLock<Decoders> =
    LazyLock::new(|| Decoders::of(Arch::Sm90a, SmemCopy::Async, DecodeOutput::ALL, LIMITS));

fn both() -> [&'static Decoders; 2] {
    [&BULK, &ASYNC]
}

/// Decoders with fewer than 32 warps: 16 and 8 for copies by threads, 16 for the larger tables on architectures with
/// more shared memory, and 16 and 8 for the copy engine.
static SMALL: LazyLock<[Decoders; 3]> = LazyLock::new(|| {
    let small = [
        Decoders::shipped(Arch::Sm86, &[6, 7, 8, 9, 12, 15]),
        Decoders::shipped(Arch::Sm80, &[9, 15]),
        Decoders::shipped(Arch::Sm120a, &[7, 9]),
    ];
    for decoders in &small {
        for limit in decoders.limits {
            let spec = Decoders::spec(decoders.arch, decoders.copy, DecodeOutput::Full, *limit);
            let warps = Plan::new(&spec).unwrap().roles.warps();
            assert_eq!(warps, if *limit <= 8 || decoders.arch == Arch::Sm80 { 16 } else { 8 }, "{spec}");
        }
    }
    small
});

fn all_decoders() -> impl Iterator<Item = &'static Decoders> {
    both().into_iter().chain(SMALL.iter())
}

/// The sections of a tensor as a decoder reads them, for tests that corrupt them.
struct Sections {
    n: u32,
    k: u32,
    sections: Vec<(Section, Vec<u8>)>,
}

impl Sections {
    fn of(tensor: &HuffmanTensor<Vec<u8>>) -> Self {
        let sections = EncodingId::HUFFMAN
            .encoding()
            .sections()
            .iter()
            .map(|&s| (s, tensor.section(s).unwrap().into_owned()))
            .collect();
        Self { n: tensor.grid().rows() as u32, k: tensor.grid().cols() as u32, sections }
    }

    fn get(&mut self, section: Section) -> &mut Vec<u8> {
        &mut self.sections.iter_mut().find(|(s, _)| *s == section).unwrap().1
    }

    /// Returns the output bytes and the fault word.
    fn decode(
        &self,
        decoders: &Decoders,
        output: DecodeOutput,
        limit: u32,
        sms: u32,
        seed: u64,
    ) -> Result<(Vec<u8>, u32), String> {
        let (tile_rows, tile_cols) = (self.n.div_ceil(64), self.k.div_ceil(64));
        let out_bytes = match output {
            DecodeOutput::Full => self.n as usize * self.k as usize * 2,
            DecodeOutput::Exponent => (tile_rows * tile_cols) as usize * 4096,
            DecodeOutput::Palette => (tile_rows * tile_cols) as usize * 2048,
        };
        let mut buffers: Vec<(&str, Buffer)> = self.sections.iter().map(|(s, b)| (s.name(), Buffer::of(b))).collect();
        buffers.push(("output", Buffer::new(out_bytes)));
        buffers.push(("fault", Buffer::zeroed(4)));
        let find = |name: &str| &buffers.iter().find(|(n, _)| *n == name).unwrap().1;
        let section = |s: Section| find(s.name());
        let args = DecodeHuffmanArgs {
            sign_mantissa: section(Section::SIGN_MANTISSA).address(),
            encoded_exp: section(Section::ENCODED_EXP).address(),
            row_lengths: section(Section::ROW_LENGTHS).address(),
            tile_metadata: section(Section::TILE_METADATA).address(),
            verbatim_exponents: section(Section::VERBATIM_EXPONENTS).address(),
            palette: section(Section::PALETTE).address(),
            code_lengths: section(Section::CODE_LENGTHS).address(),
            output: find("output").address(),
            fault: find("fault").address(),
            encoded_words: section(Section::ENCODED_EXP).slice().len() as u64 / 4,
            verbatim_rows: (section(Section::VERBATIM_EXPONENTS).slice().len() / 64) as u32,
            n: self.n,
            k: self.k,
            tile_rows,
            tile_cols,
            reserved: 0,
        };
        let run = Run { problem: GemmShape { m: 0, n: self.n, k: self.k }, sms, seed };
        let registered: Vec<_> = buffers.iter().map(|(name, buffer)| (*name, buffer.slice())).collect();
        let mut kernels = decoders.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        let spec = Decoders::spec(decoders.arch, decoders.copy, output, limit);
        // SAFETY: the buffers outlive the launch, and the kernel reaches them through checked wrappers only.
        unsafe { kernels.run(&spec, run, &args, &registered)? };
        Ok((find("output").slice().to_vec(), find("fault").u32s()[0]))
    }
}

#[track_caller]
fn assert_bytes(context: &str, got: &[u8], expected: &[u8]) {
    assert_eq!(got.len(), expected.len(), "{context}: wrong size");
    if let Some(at) = (0..got.len()).find(|&i| got[i] != expected[i]) {
        let wrong = (0..got.len()).filter(|&i| got[i] != expected[i]).count();
        panic!(
            "{context}: byte {at} is {:#x} instead of {:#x} ({wrong} of {} differ)",
            got[at],
            expected[at],
            got.len()
        );
    }
}

#[test]
fn decoders_agree_with_the_oracle_at_the_default_limit() {
    for case in cases() {
        let tensor = case.encode(7);
        for output in DecodeOutput::ALL.iter().copied() {
            let right = expected(output, &case, &tensor, 7);
            let small = SMALL.iter().filter(|small| small.has(output, 7)).map(|small| (2, 4, small));
            for (sms, seed, decoders) in [(1, 1, &*BULK), (3, 2, &BULK), (2, 3, &ASYNC)].into_iter().chain(small) {
                let (out, fault) = Sections::of(&tensor)
                    .decode(decoders, output, 7, sms, seed)
                    .unwrap_or_else(|e| panic!("{}: {e}", case.name));
                assert_eq!(fault, 0, "{}", case.name);
                assert_bytes(&format!("{} {output:?}", case.name), &out, &right);
            }
        }
    }
}

#[test]
fn decoders_agree_with_the_oracle_at_every_limit() {
    for case in cases().iter().filter(|c| ["odd edges", "outliers", "one exponent", "tiles"].contains(&c.name)) {
        for &limit in LIMITS {
            let tensor = case.encode(limit);
            for output in DecodeOutput::ALL.iter().copied() {
                let right = expected(output, case, &tensor, limit);
                for decoders in all_decoders().filter(|decoders| decoders.has(output, limit)) {
                    let (out, fault) = Sections::of(&tensor).decode(decoders, output, limit, 2, limit.into()).unwrap();
                    assert_eq!(fault, 0);
                    let arch = decoders.arch;
                    assert_bytes(&format!("{} {output:?} L={limit} {arch:?}", case.name), &out, &right);
                }
            }
        }
    }
}

#[test]
fn a_kernel_of_a_larger_limit_decodes_a_shorter_code() {
    let case = &cases()[2];
    let tensor = case.encode(6);
    for limit in [7, 9, 15] {
        let (out, _) = Sections::of(&tensor).decode(&BULK, DecodeOutput::Full, limit, 1, 5).unwrap();
        assert_bytes(&format!("6 in {limit}"), &out, &case.bytes);
    }
}

/// Makes more tiles than a block has warps, so that warps reuse their buffers.
fn many_tiles() -> Case {
    let mut random = Random::new(11);
    let mut weights = Weights::TRAINED.iter(11);
    Case::new("many tiles", 300, 768, |_| {
        let weight = weights.next().unwrap();
        if random.bits().is_multiple_of(300) { random.bits() as u16 } else { weight }
    })
}

#[test]
fn more_tiles_than_warps_are_decoded() {
    let case = many_tiles();
    for (output, limit) in
        [(DecodeOutput::Full, 7), (DecodeOutput::Full, 9), (DecodeOutput::Palette, 7), (DecodeOutput::Exponent, 8)]
    {
        let tensor = case.encode(limit);
        for decoders in all_decoders().filter(|decoders| decoders.has(output, limit)) {
            let (out, fault) = Sections::of(&tensor).decode(decoders, output, limit, 1, 3).unwrap();
            assert_eq!(fault, 0);
            assert_bytes(&format!("{output:?}"), &out, &expected(output, &case, &tensor, limit));
        }
    }
}

#[test]
fn tampered_metadata_is_reported_as_a_fault() {
    let case = &cases().into_iter().find(|c| c.name == "outliers").unwrap();
    let tensor = case.encode(7);
    let tile = 5;
    let field = |s: &mut Sections, index: usize, value: u32| {
        s.get(Section::TILE_METADATA)[tile * 16 + index * 4..][..4].copy_from_slice(&value.to_le_bytes());
    };
    let last_row_tile = 2 * tensor.grid().tile_cols(); // rows 128 and 129 of 130
    type Tamper<'a> = Box<dyn Fn(&mut Sections) + 'a>;
    let tampers: Vec<(&str, usize, Tamper<'_>)> = vec![
        ("start_word past the end", tile, Box::new(|s| field(s, 0, 1 << 20))),
        ("start_word near 2^32", tile, Box::new(|s| field(s, 0, u32::MAX))),
        ("verbatim_row_offset past the end", tile, Box::new(|s| field(s, 1, 1 << 20))),
        ("verbatim_row_offset near 2^32", tile, Box::new(|s| field(s, 1, u32::MAX))),
        (
            "a verbatim pad row",
            last_row_tile,
            Box::new(|s| {
                s.get(Section::TILE_METADATA)[last_row_tile * 16 + 12..][..4].copy_from_slice(&1u32.to_le_bytes())
            }),
        ),
        (
            "words missing at the end",
            tensor.grid().tiles() - 1,
            Box::new(|s| {
                let words = s.get(Section::ENCODED_EXP);
                words.truncate(words.len() - 16);
            }),
        ),
        (
            "verbatim rows missing at the end",
            tensor.grid().tiles() - 1,
            Box::new(|s| {
                // The last tile with a verbatim row is not necessarily the last tile, so remove all verbatim rows.
                s.get(Section::VERBATIM_EXPONENTS).clear();
            }),
        ),
    ];
    for (name, faulty, tamper) in tampers {
        let combinations =
            DecodeOutput::ALL.iter().flat_map(|output| all_decoders().map(|decoders| (*output, decoders)));
        for (output, decoders) in combinations.filter(|(output, decoders)| decoders.has(*output, 7)) {
            let mut sections = Sections::of(&tensor);
            tamper(&mut sections);
            let (out, fault) =
                sections.decode(decoders, output, 7, 1, 9).unwrap_or_else(|e| panic!("{name} {output:?}: {e}"));
            if name == "verbatim rows missing at the end" {
                assert_ne!(fault, 0, "{name}");
                continue;
            }
            assert_eq!(fault, 1 + faulty as u32, "{name} {output:?}");
            // The tile is skipped, and the others are complete.
            let right = expected(output, case, &tensor, 7);
            if output != DecodeOutput::Full {
                let bytes = right.len() / tensor.grid().tiles();
                for t in 0..tensor.grid().tiles() {
                    let (got, expected_tile) = (&out[t * bytes..][..bytes], &right[t * bytes..][..bytes]);
                    if t == faulty {
                        assert!(got.iter().all(|&b| b == Buffer::POISON), "{name}: tile {t} was written");
                    } else {
                        assert_bytes(name, got, expected_tile);
                    }
                }
            }
        }
    }
}

#[test]
fn hostile_bytes_neither_crash_nor_hang() {
    // The simulator checks bounds of every buffer, so success means that no access was outside.
    let case = &cases().into_iter().find(|c| c.name == "outliers").unwrap();
    let mut random = Random::new(23);
    for limit in [6, 7, 9, 15] {
        let tensor = case.encode(limit);
        for round in 0..12u64 {
            let mut sections = Sections::of(&tensor);
            for section in [
                Section::ENCODED_EXP,
                Section::ROW_LENGTHS,
                Section::TILE_METADATA,
                Section::PALETTE,
                Section::CODE_LENGTHS,
            ] {
                let bytes = sections.get(section);
                let flips = if round % 3 == 0 { bytes.len() } else { 3 };
                for _ in 0..flips {
                    let at = random.bits() as usize % bytes.len();
                    bytes[at] = random.bits() as u8;
                }
            }
            for output in DecodeOutput::ALL.iter().copied() {
                let small = SMALL.iter().filter(|small| small.has(output, limit));
                for decoders in small.chain([both()[round as usize % 2]]) {
                    sections
                        .decode(decoders, output, limit, 1, round)
                        .unwrap_or_else(|e| panic!("L={limit} round {round} {output:?} {:?}: {e}", decoders.arch));
                }
            }
        }
    }
}

#[test]
fn planted_bugs_in_the_decoder_are_caught() {
    let case = &many_tiles();
    let tensor = case.encode(7);
    const DECODE: &str = "unweight/kernels/decode_huffman.cuh";
    const READER: &str = "unweight/encoding/huffman/reader.cuh";
    const TABLES: &str = "unweight/encoding/huffman/tables.cuh";
    let bulk: [(&str, (&str, &str, &str)); 10] = [
        ("refills while loads are in flight", (DECODE, "pipeline::release_to_copy_engine();", "ptx::bar_warp_sync();")),
        (
            "expects too few bytes",
            (DECODE, "mbarrier_arrive_expect_tx(barrier, bytes)", "mbarrier_arrive_expect_tx(barrier, bytes - 16)"),
        ),
        ("wrong phase", (DECODE, "parity ^= 1u << half;", "")),
        ("does not wait", (DECODE, "ptx::mbarrier_wait_parity(barrier, parity >> half & 1);", "")),
        ("copies one group short", (DECODE, "(skew + words + 3) / 4 * 16", "(skew + words) / 4 * 16")),
        ("wrong verbatim row", (DECODE, "ptx::popc(mask & low_bits(row))", "ptx::popc(mask & low_bits(row + 1))")),
        ("half 1 starts at bit 0", (DECODE, "t.begins = sum - own + (t.bits << 16)", "t.begins = sum - own")),
        ("next word too early", (READER, "(moved ^ position) & 32", "(moved ^ position) & 16")),
        ("window not prepared for the table", (READER, "position = bit - Table::kShift", "position = bit")),
        (
            "second symbol of a pair one bit late",
            (TABLES, ">> (first[j] & 0xff) & kMaskOne", ">> 1 >> (first[j] & 0xff) & kMaskOne"),
        ),
    ];
    let copied: [(&str, (&str, &str, &str)); 5] = [
        ("does not wait for its copies", (DECODE, "ptx::cp_async_wait_group<kStages - 1>();", "")),
        (
            "does not wait for others' copies",
            (DECODE, "<kStages - 1>();\n            ptx::bar_warp_sync();", "<kStages - 1>();"),
        ),
        ("waits for one group too few", (DECODE, "cp_async_wait_group<kStages - 1>", "cp_async_wait_group<kStages>")),
        ("leaves bytes out", (DECODE, "at += 32 * 16", "at += 64 * 16")),
        ("a fetch without a group", (DECODE, "if constexpr (kAsync) ptx::cp_async_commit_group();", "")),
    ];
    let bulk = bulk.into_iter().map(|bug| (SmemCopy::Bulk, bug));
    for (copy, (name, (header, from, to))) in bulk.chain(copied.into_iter().map(|bug| (SmemCopy::Async, bug))) {
        let output = DecodeOutput::Exponent;
        let arch = Arch::Sm90a;
        let Some(edit) = Edit::planted(header, from, to) else { continue };
        let kernels = Mutex::new(CpuKernel::of(&Decoders::spec(arch, copy, output, 7), &[edit]));
        let kernels = Decoders { arch, copy, outputs: DecodeOutput::ALL, limits: &[7], kernels };
        // Late copies complete at random points, so a race shows with one of a few seeds.
        let caught = (0..4).any(|seed| match Sections::of(&tensor).decode(&kernels, output, 7, 1, seed) {
            Err(_) => true,
            Ok((out, fault)) => fault != 0 || out != expected(output, case, &tensor, 7),
        });
        assert!(caught, "the planted bug was not caught: {name}");
    }
}

// ---- encode --------------------------------------------------------------------------------------------------------

fn encoders(edits: &[Edit]) -> Mutex<CpuKernel> {
    let all: Vec<_> = catalog::of::<EncodeHuffmanSpec>().collect();
    Mutex::new(CpuKernel::all(&all, edits))
}

static ENCODERS: Shared = LazyLock::new(|| encoders(&[]));

struct Encoded {
    buffers: Vec<(&'static str, Buffer)>,
}

impl Encoded {
    fn get(&self, name: &str) -> &Buffer {
        &self.buffers.iter().find(|(n, _)| *n == name).unwrap().1
    }
}

/// Runs stages as a host does. Capacities: `None` means large enough.
fn encode(
    kernels: &Mutex<CpuKernel>,
    case: &Case,
    limit: u32,
    stages: &[EncodeHuffmanStage],
    capacity: Option<(u64, u32)>,
) -> Result<Encoded, String> {
    let (n, k) = (case.n as u32, case.k as u32);
    let (tile_rows, tile_cols) = (n.div_ceil(64), k.div_ceil(64));
    let tiles = (tile_rows * tile_cols) as usize;
    let scan_blocks = tiles.div_ceil(1024);
    let (capacity_words, capacity_rows) = capacity.unwrap_or((tiles as u64 * 640, tiles as u32 * 64));
    let buffers = vec![
        ("weights", Buffer::of(&case.bytes)),
        ("sign_mantissa", Buffer::new(case.n * case.k)),
        ("histogram", Buffer::zeroed(1024)),
        ("palette", Buffer::new(16)),
        ("code_lengths", Buffer::new(16)),
        ("encode_table", Buffer::new(1024)),
        ("row_lengths", Buffer::new(tiles * 64)),
        ("tile_metadata", Buffer::new(tiles * 16)),
        ("encoded_exp", Buffer::new(capacity_words as usize * 4)),
        ("verbatim_exponents", Buffer::new(capacity_rows as usize * 64)),
        ("palette_index", Buffer::new(tiles * 2048)),
        ("totals", Buffer::new(32)),
        ("scan_state", Buffer::zeroed(scan_blocks * 32)),
    ];
    let at = |name: &str| buffers.iter().find(|(n, _)| *n == name).unwrap().1.address();
    let args = EncodeHuffmanArgs {
        weights: at("weights"),
        sign_mantissa: at("sign_mantissa"),
        histogram: at("histogram"),
        palette: at("palette"),
        code_lengths: at("code_lengths"),
        encode_table: at("encode_table"),
        reserved: 0,
        row_lengths: at("row_lengths"),
        tile_metadata: at("tile_metadata"),
        encoded_exp: at("encoded_exp"),
        verbatim_exponents: at("verbatim_exponents"),
        palette_index: at("palette_index"),
        totals: at("totals"),
        scan_state: at("scan_state"),
        capacity_words,
        capacity_rows,
        code_limit: limit,
        n,
        k,
        tile_rows,
        tile_cols,
    };
    let registered: Vec<_> = buffers.iter().map(|(name, buffer)| (*name, buffer.slice())).collect();
    let mut kernels = kernels.lock().unwrap_or_else(PoisonError::into_inner);
    for &stage in stages {
        let run = Run { problem: GemmShape { m: 0, n, k }, sms: 2, seed: 1 };
        let spec = VariantSpec::encode_huffman(Arch::Sm90a, stage);
        // SAFETY: the buffers outlive the launch, and the kernel reaches them through checked wrappers only.
        unsafe { kernels.run(&spec, run, &args, &registered) }.map_err(|e| format!("{spec}: {e}"))?;
    }
    drop(registered);
    Ok(Encoded { buffers })
}

const HUFFMAN: [EncodeHuffmanStage; 5] = {
    use EncodeHuffmanStage::{Rows, Scan, Stats, Table, Write};
    [Stats, Table, Rows, Scan, Write]
};
const PALETTE: [EncodeHuffmanStage; 5] = {
    use EncodeHuffmanStage::{Palette, Rows, Scan, Stats, Table};
    [Stats, Table, Rows, Scan, Palette]
};

fn check_huffman(case: &Case, limit: u32, encoded: &Encoded) -> Result<(), String> {
    let tensor = case.encode(limit);
    let totals = encoded.get("totals").u64s();
    let same = |name: &str, got: &[u8], expected: &[u8]| {
        if got == expected { Ok(()) } else { Err(format!("{} L={limit}: {name} differs", case.name)) }
    };
    if totals[3] != 0 {
        return Err("fault".into());
    }
    same("sign_mantissa", encoded.get("sign_mantissa").slice(), tensor.sign_mantissa())?;
    same("palette", encoded.get("palette").slice(), &tensor.code().palette().stored())?;
    same("code_lengths", encoded.get("code_lengths").slice(), &tensor.code().lengths())?;
    same("row_lengths", encoded.get("row_lengths").slice(), tensor.row_lengths())?;
    same("tile_metadata", encoded.get("tile_metadata").slice(), tensor.tile_metadata())?;
    let words = (totals[0] as usize).next_multiple_of(4) * 4;
    same("encoded_exp", &encoded.get("encoded_exp").slice()[..words], tensor.encoded_exp())?;
    same(
        "verbatim_exponents",
        &encoded.get("verbatim_exponents").slice()[..totals[1] as usize * 64],
        tensor.verbatim_exponents(),
    )?;
    same("maximum", &(totals[2] as u32).to_le_bytes(), &tensor.max_verbatim_rows().to_le_bytes())?;
    for (exponent, (&entry, (code, length))) in
        encoded.get("encode_table").u32s().iter().zip(tensor.code().encode_table()).enumerate()
    {
        let index = tensor.code().palette().index()[exponent].unwrap_or(0);
        let expected = u32::from(code) | u32::from(length) << 16 | u32::from(index) << 24;
        same("encode_table", &entry.to_le_bytes(), &expected.to_le_bytes())?;
    }
    Ok(())
}

#[test]
fn the_encoder_writes_the_oracles_bytes() {
    for case in cases() {
        for limit in [6, 7, 15] {
            let encoded =
                encode(&ENCODERS, &case, limit, &HUFFMAN, None).unwrap_or_else(|e| panic!("{}: {e}", case.name));
            check_huffman(&case, limit, &encoded).unwrap();
        }
    }
}

#[test]
fn palette_packing_writes_the_oracles_bytes() {
    for case in cases() {
        let encoded = encode(&ENCODERS, &case, 7, &PALETTE, None).unwrap_or_else(|e| panic!("{}: {e}", case.name));
        let tensor = oracle::encode_palette(case.matrix(), CodeLimit::DEFAULT).unwrap();
        let rows = encoded.get("totals").u64s()[1] as usize;
        assert_bytes(case.name, encoded.get("palette_index").slice(), tensor.palette_index());
        assert_bytes(case.name, encoded.get("tile_metadata").slice(), tensor.tile_metadata());
        assert_bytes(case.name, &encoded.get("verbatim_exponents").slice()[..rows * 64], tensor.verbatim_exponents());
        assert_bytes(case.name, encoded.get("palette").slice(), &tensor.palette());
    }
}

#[test]
fn codes_equal_the_cpu_for_many_histograms() {
    let mut random = Random::new(31);
    for round in 0..18u64 {
        // 1 to 40 exponents of very different or nearly equal weights, including ties.
        let exponents = 1 + random.bits() as u16 % 40;
        let spread = 1 + round % 6;
        let case = Case::new("histogram", 8, 256, |_| {
            let e = (0..spread).map(|_| random.bits() as u16 % exponents).min().unwrap();
            (e * 3) << 7 | random.bits() as u16 & 0x807f
        });
        for limit in [6, 9, 15] {
            let encoded = encode(&ENCODERS, &case, limit, &HUFFMAN, None).unwrap();
            check_huffman(&case, limit, &encoded).unwrap_or_else(|e| panic!("round {round}: {e}"));
        }
    }
}

#[test]
fn scan_looks_back_over_several_blocks() {
    // 1100 tiles of one row each need two blocks of `scan`.
    let mut random = Random::new(41);
    let mut weights = Weights::TRAINED.iter(41);
    let case = Case::new("wide", 2, 64 * 1100, |_| {
        let weight = weights.next().unwrap();
        if random.bits().is_multiple_of(500) { random.bits() as u16 } else { weight }
    });
    let encoded = encode(&ENCODERS, &case, 7, &HUFFMAN, None).unwrap();
    check_huffman(&case, 7, &encoded).unwrap();
}

#[test]
fn too_small_capacity_is_a_fault_without_overrun() {
    let case = &cases().into_iter().find(|c| c.name == "outliers").unwrap();
    let tensor = case.encode(7);
    let (words, rows) = ((tensor.encoded_exp().len() / 4) as u64, (tensor.verbatim_exponents().len() / 64) as u32);
    for capacity in [(words - 8, rows), (words, rows - 1), (0, 0)] {
        let encoded = encode(&ENCODERS, case, 7, &HUFFMAN, Some(capacity)).unwrap();
        assert_eq!(encoded.get("totals").u64s()[3], 1, "{capacity:?}");
        let encoded = encode(&ENCODERS, case, 7, &PALETTE, Some((words, capacity.1))).unwrap();
        assert_eq!(encoded.get("totals").u64s()[3], u64::from(capacity.1 < rows), "{capacity:?}");
    }
    let encoded = encode(&ENCODERS, case, 7, &HUFFMAN, Some((words, rows))).unwrap();
    check_huffman(case, 7, &encoded).unwrap();
}

#[test]
fn planted_bugs_in_the_encoder_are_caught() {
    let bugs: [(&str, (&str, &str, &str)); 10] = [
        (
            "ties to the larger exponent",
            (
                "unweight/kernels/encode_huffman/table.cuh",
                "(c.x == count && i < thread)",
                "(c.x == count && i > thread)",
            ),
        ),
        (
            "package before an equal leaf",
            (
                "unweight/kernels/encode_huffman/table.cuh",
                "i < packages && other_package < leaf",
                "i < packages && other_package <= leaf",
            ),
        ),
        (
            "pad columns verbatim",
            ("unweight/kernels/encode_huffman/tiles.cuh", "if (p.valid < 4) low", "if (p.valid < 0) low"),
        ),
        (
            "rows of 320 bits coded",
            ("unweight/kernels/encode_huffman/block.cuh", "kRowBitsMax = 319", "kRowBitsMax = 640"),
        ),
        (
            "third word of a code dropped",
            ("unweight/kernels/encode_huffman/write.cuh", "if (last != 0) ptx::red_or_shared(address + 8, last);", ""),
        ),
        (
            "third word of a short code dropped",
            (
                "unweight/kernels/encode_huffman/write.cuh",
                "if (first != 0) ptx::red_or_shared(address - 8, first);",
                "",
            ),
        ),
        (
            "section not padded",
            ("unweight/kernels/encode_huffman/write.cuh", "ptx::st_global(out + words + lane, 0);", ""),
        ),
        (
            "verbatim row order",
            (
                "unweight/kernels/encode_huffman/tiles.cuh",
                "low = row >= 32 ? ~0u : (1u << row) - 1",
                "low = row >= 32 ? ~0u : (2u << row) - 1",
            ),
        ),
        (
            "look-back omits rows",
            ("unweight/kernels/encode_huffman/scan.cuh", "rows_total += own >> 24 & 0xfffff;", ""),
        ),
        (
            "tile buffer not cleared",
            (
                "unweight/kernels/encode_huffman/write.cuh",
                "for (u32 at = lane * 4; at < words; at += 128) ptx::st_shared_x4(stream + at * 4, U32x4{});",
                "",
            ),
        ),
    ];
    let mut random = Random::new(41);
    let mut all = cases();
    let mut weights = Weights::TRAINED.iter(41);
    all.push(Case::new("wide", 2, 64 * 1100, |_| {
        let weight = weights.next().unwrap();
        if random.bits().is_multiple_of(500) { random.bits() as u16 } else { weight }
    }));
    // Counts for which a leaf and a package have equal weights.
    all.push(Case::new("equal weights", 7, 64, |i| ((i % 7) as u16) << 7));
    for (name, (header, from, to)) in bugs {
        let Some(edit) = Edit::planted(header, from, to) else { continue };
        let kernels = encoders(&[edit]);
        // Codes of up to 7 bits have a separate code path.
        let caught = [15, 7].iter().any(|&limit| {
            all.iter().any(|case| match encode(&kernels, case, limit, &HUFFMAN, None) {
                Err(_) => true,
                Ok(encoded) => check_huffman(case, limit, &encoded).is_err(),
            })
        });
        assert!(caught, "the planted bug was not caught: {name}");
    }
}
