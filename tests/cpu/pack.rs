//! Families `pack` and `unpack` in the simulator, against `unweight_format::raw::packed`: equal bytes, no faults on
//! random bytes, and planted bugs that must be caught.

use crate::harness::{Buffer, CpuKernel, Edit, Run, spec};
use unweight_codegen::{
    VariantSpec,
    abi::{EncodeHuffmanArgs, PackArgs},
    plan::GemmShape,
    spec::{Arch, PackStage},
};
use unweight_format::raw::{
    PackedTensor,
    packed::{TILE_BYTES, Unpackable, Window, pack},
};
use unweight_format::{Histogram, Matrix, testing::Random};

/// Row blocks per block of `lists`.
const GROUP_BLOCKS: usize = 64;

const TILES: VariantSpec = VariantSpec::pack(Arch::Sm90a, PackStage::Tiles);
const LISTS: VariantSpec = VariantSpec::pack(Arch::Sm90a, PackStage::Lists);
const UNPACK: VariantSpec = VariantSpec::unpack(Arch::Sm90a);

/// Builds both stages of `pack`, and `unpack`.
fn build(edits: &[Edit]) -> CpuKernel {
    CpuKernel::all(&[TILES, LISTS, UNPACK], edits)
}

fn launch(kernel: &mut CpuKernel, spec: VariantSpec, args: &PackArgs, buffers: &[(&str, &[u8])]) -> Result<(), String> {
    let run = Run { problem: GemmShape { m: 0, n: args.n, k: args.k }, sms: 2, seed: 7 };
    // SAFETY: the buffers outlive the launch, and the kernel reaches them through checked wrappers only.
    unsafe { kernel.run(&spec, run, args, buffers) }
}

/// A matrix.
pub struct Case {
    pub n: usize,
    pub k: usize,
    pub bytes: Vec<u8>,
}

/// The output of the stages.
struct Outcome {
    packed: Vec<u8>,
    heads: Vec<u8>,
    escapes: Vec<u8>,
    /// Index in the matrix.
    inexact: Option<usize>,
}

impl Case {
    pub fn new(n: usize, k: usize, element: impl FnMut(usize) -> u16) -> Self {
        Self { n, k, bytes: (0..n * k).map(element).flat_map(u16::to_le_bytes).collect() }
    }

    /// Makes weights with exponents 108..=123 and every `every`-th element from `odd`. Row 21 has a run of these, so
    /// that a list is longer than a warp.
    pub fn with(n: usize, k: usize, every: u64, odd: &[u16]) -> Self {
        let mut random = Random::new(n as u64 * 31 + every);
        let run = if odd.is_empty() { 0 } else { (n * k / 1000).min(40) };
        Self::new(n, k, |i| {
            let r = random.bits();
            if i / k == 21 && i % k < run || !odd.is_empty() && random.below(every) == 0 {
                odd[(r >> 40) as usize % odd.len()]
            } else {
                (r as u16 & 0x807f) | (108 + (r >> 20 & 15) as u16) << 7
            }
        })
    }

    fn matrix(&self) -> Matrix<'_> {
        Matrix::new(&self.bytes, self.n, self.k).unwrap()
    }

    pub fn oracle(&self) -> PackedTensor<Vec<u8>> {
        pack(self.matrix(), &Histogram::of(&self.bytes)).unwrap()
    }

    /// Returns whether the matrix can be packed.
    pub fn packs(&self) -> bool {
        pack(self.matrix(), &Histogram::of(&self.bytes)).is_ok()
    }

    fn tiles(&self) -> usize {
        self.n / 64 * (self.k / 64)
    }

    fn args(&self, window: Window) -> PackArgs {
        PackArgs {
            base: window.base().into(),
            n: self.n as u32,
            k: self.k as u32,
            tile_rows: (self.n / 64) as u32,
            tile_cols: (self.k / 64) as u32,
            ..PackArgs::default()
        }
    }

    /// Runs both stages of `pack` as a host does. `short` is the number of words missing for the lists.
    fn pack(&self, kernel: &mut CpuKernel, window: Window, short: usize) -> Result<Outcome, String> {
        let weights = Buffer::of(&self.bytes);
        let packed = Buffer::new(self.tiles() * TILE_BYTES);
        let heads = Buffer::new(self.tiles() * 16);
        let groups = (self.tiles() * 4).div_ceil(GROUP_BLOCKS);
        let group_words = Buffer::zeroed(groups * 4);
        let inexact = Buffer::zeroed(8);
        let mut args = PackArgs {
            weights: weights.address(),
            packed: packed.address(),
            escape_heads: heads.address(),
            group_words: group_words.address(),
            inexact: inexact.address(),
            ..self.args(window)
        };
        let mut buffers = vec![
            ("weights", weights.slice()),
            ("packed", packed.slice()),
            ("heads", heads.slice()),
            ("group_words", group_words.slice()),
            ("inexact", inexact.slice()),
        ];
        launch(kernel, TILES, &args, &buffers)?;
        let words = group_words.u32s().iter().sum::<u32>() as usize;
        let escapes = Buffer::new((words - short) * 4);
        args.escapes = escapes.address();
        args.escape_words = (words - short) as u32;
        buffers.push(("escapes", escapes.slice()));
        launch(kernel, LISTS, &args, &buffers)?;
        let inexact = inexact.u64s()[0];
        Ok(Outcome {
            packed: packed.slice().to_vec(),
            heads: heads.slice().to_vec(),
            escapes: escapes.slice().to_vec(),
            inexact: (inexact != 0).then_some(!inexact as usize),
        })
    }

    fn unpack(
        &self,
        kernel: &mut CpuKernel,
        window: Window,
        packed: &[u8],
        heads: &[u8],
        escapes: &[u8],
    ) -> Result<Vec<u8>, String> {
        let weights = Buffer::new(self.bytes.len());
        let [packed, heads, escapes] = [packed, heads, escapes].map(Buffer::of);
        let args = PackArgs {
            weights: weights.address(),
            packed: packed.address(),
            escape_heads: heads.address(),
            escapes: escapes.address(),
            escape_words: (escapes.slice().len() / 4) as u32,
            ..self.args(window)
        };
        let buffers = [
            ("weights", weights.slice()),
            ("packed", packed.slice()),
            ("heads", heads.slice()),
            ("escapes", escapes.slice()),
        ];
        launch(kernel, UNPACK, &args, &buffers)?;
        Ok(weights.slice().to_vec())
    }

    /// Checks both directions against the oracle.
    fn check(&self, kernel: &mut CpuKernel) -> Result<PackedTensor<Vec<u8>>, String> {
        let oracle = self.oracle();
        let same = |what: &str, got: &[u8], expected: &[u8]| match got.iter().zip(expected).position(|(a, b)| a != b) {
            _ if got.len() != expected.len() => {
                Err(format!("{}x{}: {what} has {} bytes instead of {}", self.n, self.k, got.len(), expected.len()))
            }
            Some(at) => Err(format!("{}x{}: {what} differs at byte {at}", self.n, self.k)),
            None => Ok(()),
        };
        let got = self.pack(kernel, oracle.window(), 0)?;
        if let Some(at) = got.inexact {
            return Err(format!("{}x{}: the kernel reported no operand for element {at}", self.n, self.k));
        }
        same("packed", &got.packed, oracle.packed())?;
        same("escape_heads", &got.heads, oracle.escape_heads())?;
        same("escapes", &got.escapes, oracle.escapes())?;
        let back = self.unpack(kernel, oracle.window(), &got.packed, &got.heads, &got.escapes)?;
        same("weights", &back, &self.bytes)?;
        Ok(oracle)
    }
}

/// Zeros, subnormals, infinities, NaNs with payloads, the smallest normal, a very large number, and neighbors of the
/// window.
pub const SPECIAL: [u16; 16] = [
    0x0000, 0x8000, 0x0001, 0x807f, 0x0040, 0x7f80, 0xff80, 0x7fc1, 0xffff, 0x7f81, 0x0080, 0x7d7f, 0x35ff, 0xb580,
    0x3e00, 0xbe7f,
];

fn cases() -> Vec<Case> {
    let mut cases = vec![
        Case::with(64, 64, 1, &[]),
        Case::with(192, 128, 900, &SPECIAL),
        Case::with(64, 320, 500, &SPECIAL),
        Case::with(128, 192, 700, &[0, 0x8000]),
        // Several groups of lists, the last one not full.
        Case::with(64, 64 * 67, 400, &SPECIAL[..4]),
    ];
    // Windows at both ends of the exponents. Below 17 an operand of Inf stays Inf, a subnormal becomes normal.
    for base in [1u16, 2, 9, 112, 113, 120, 238, 239] {
        let mut random = Random::new(u64::from(base));
        cases.push(Case::new(64, 128, |i| match i % 600 {
            77 => [0u16, 0x8000, 0x7f80, 0xffc3][i / 600 % 4],
            // Scaling by up to 2^-8 loses at most seven bits, so an even significand survives.
            400 if base <= 120 => (base + 16) << 7,
            _ => (random.bits() as u16 & 0x807f) | (base + (random.below(16) as u16)) << 7,
        }));
    }
    cases
}

#[test]
fn packing_and_unpacking_equal_the_cpu() {
    let mut kernel = build(&[]);
    let (mut alone, mut lists, mut longest) = (0, 0, 0);
    for case in cases() {
        let oracle = case.check(&mut kernel).unwrap();
        for head in oracle.escape_heads().chunks_exact(4) {
            let head = u32::from_le_bytes(head.try_into().unwrap());
            if head >> 31 == 1 {
                let at = (head & !(1 << 31)) as usize * 4;
                longest = longest.max(u32::from_le_bytes(oracle.escapes()[at..at + 4].try_into().unwrap()));
            }
            lists += head >> 31;
            alone += head >> 30 & 1;
        }
    }
    assert!(alone > 30 && lists > 30 && longest > 32, "the data has too few escapes: {alone}, {lists}, {longest}");
}

#[test]
fn an_element_without_exact_operand_is_named() {
    let mut kernel = build(&[]);
    // In a window above 112, the smallest subnormals lose bits. 200 * 64 of the first row block comes late in the
    // tile's order.
    for (places, base) in [(vec![70], 113u16), (vec![9000, 8191, 8256], 128), (vec![64 * 20 + 3, 5], 239)] {
        let case = Case::new(64, 192, |i| if places.contains(&i) { 1 } else { (base + i as u16 % 16) << 7 });
        let window = Window::new(base as u8).unwrap();
        let got = case.pack(&mut kernel, window, 0).unwrap();
        assert_eq!(got.inexact, places.iter().min().copied());
        let oracle = pack(case.matrix(), &Histogram::of(&case.bytes));
        assert!(matches!(oracle, Err(Unpackable::Operand { .. })), "{oracle:?}");
    }
    // Above: a large exponent overflows in a window below 112.
    let case = Case::new(64, 64, |i| if i == 4095 { 200 << 7 } else { (20 + i as u16 % 16) << 7 });
    assert_eq!(case.pack(&mut kernel, Window::new(20).unwrap(), 0).unwrap().inexact, Some(4095));
    assert!(pack(case.matrix(), &Histogram::of(&case.bytes)).is_err());
}

#[test]
fn lists_stay_within_their_words() {
    let mut kernel = build(&[]);
    let case = Case::with(64, 320, 500, &SPECIAL);
    let oracle = case.oracle();
    let words = oracle.escapes().len() / 4;
    for short in [1, words / 2, words] {
        let got = case.pack(&mut kernel, oracle.window(), short).unwrap();
        assert_eq!(got.escapes, oracle.escapes()[..(words - short) * 4]);
        assert_eq!(got.heads, oracle.escape_heads());
    }
}

#[test]
fn unpacking_any_bytes_stays_in_bounds() {
    let mut kernel = build(&[]);
    let case = Case::with(128, 128, 500, &SPECIAL);
    let oracle = case.oracle();
    let mut random = Random::new(77);
    let mut noise = |bytes: usize| random.bytes(bytes);
    let stored = oracle.escapes().len() / 4;
    for words in [0, 1, 2, 70, stored] {
        let (packed, escapes) = (noise(oracle.packed().len()), noise(words * 4));
        // Half of the indices are near the section, so that both sides of the bound are tested.
        let heads: Vec<u8> = noise(oracle.escape_heads().len())
            .chunks_exact(4)
            .flat_map(|head| {
                let head = u32::from_le_bytes(head.try_into().unwrap());
                let index = if head & 2 == 0 { head >> 1 } else { (head >> 4) % (words as u32 + 2) };
                (index | head << 31).to_le_bytes()
            })
            .collect();
        for base in [1, 112, 239] {
            case.unpack(&mut kernel, Window::new(base).unwrap(), &packed, &heads, &escapes).unwrap();
        }
    }
    // Counts that promise more elements than a row block has.
    let escapes: Vec<u8> = (0..2000u32).flat_map(|i| (if i == 0 { u32::MAX } else { i << 16 }).to_le_bytes()).collect();
    let heads: Vec<u8> = std::iter::repeat_n((1u32 << 31).to_le_bytes(), case.tiles() * 4).flatten().collect();
    case.unpack(&mut kernel, oracle.window(), oracle.packed(), &heads, &escapes).unwrap();
}

#[test]
fn stats_count_without_sign_mantissa() {
    let spec = spec("encode_huffman_stats");
    let mut kernel = CpuKernel::of(&spec, &[]);
    let case = Case::with(64, 192, 500, &SPECIAL);
    let weights = Buffer::of(&case.bytes);
    let histogram = Buffer::zeroed(1024);
    let args = EncodeHuffmanArgs {
        weights: weights.address(),
        histogram: histogram.address(),
        n: case.n as u32,
        k: case.k as u32,
        ..EncodeHuffmanArgs::default()
    };
    let run = Run { problem: GemmShape { m: 0, n: args.n, k: args.k }, sms: 2, seed: 1 };
    let buffers = [("weights", weights.slice()), ("histogram", histogram.slice())];
    // SAFETY: both buffers outlive the launch, and the kernel reaches them through checked wrappers only.
    unsafe { kernel.run(&spec, run, &args, &buffers) }.unwrap();
    let expected = Histogram::of(&case.bytes);
    for (exponent, &count) in histogram.u32s().iter().enumerate() {
        assert_eq!(u64::from(count), expected.count(exponent as u8), "exponent {exponent}");
    }
}

#[test]
fn planted_bugs_are_caught() {
    let (pack_header, unpack_header) = ("unweight/kernels/pack.cuh", "unweight/kernels/unpack.cuh");
    let shared = "unweight/encoding/weights.cuh";
    let rows = "unweight/encoding/row_block.cuh";
    for (header, from, to) in [
        (
            rows,
            "ptx::shfl_sync_bfly(upper ? v[i] : v[j], distance)",
            "ptx::shfl_sync_bfly(upper ? v[j] : v[i], distance)",
        ),
        (
            rows,
            "return 4 * (i / 2 * 2 + j / 2) + 2 * (j % 2) + i % 2;",
            "return 4 * (i / 2 * 2 + j / 2) + j % 2 + i % 2 * 2;",
        ),
        (pack_header, "(pair | kSigns) - bases", "pair - bases"),
        (
            pack_header,
            "(container.p[i] & kFree >> 16 << 16) != 0 ? 2u",
            "(container.p[i] & kFree >> 16 << 16) != 0 ? 1u",
        ),
        (shared, "exponent == 0 ? 1 : exponent", "exponent"),
        (shared, "if (exponent == 0xff || (value & 0x7fff) == 0)", "if ((value & 0x7fff) == 0)"),
        (shared, "(significand & ((1u << lost) - 1)) != 0", "false"),
        (pack_header, "container.p[i] &= ~(", "container.p[i] &= ~0u + 0 * ("),
        (
            pack_header,
            "ptx::red_add_global(args.group_words + block / kGroupBlocks",
            "ptx::red_add_global(args.group_words",
        ),
        (pack_header, "ptx::popc(highs & below);", "ptx::popc(highs);"),
        (pack_header, "list + own + low, weights", "list + own, weights"),
        (pack_header, "at += (i < warp ? other.x : 0) + other.y;", "at += i < warp ? other.x : 0;"),
        (unpack_header, "if (i >= 32) {", "if (false) {"),
        (pack_header, "ptx::red_max_global_u64(args.inexact, ~at)", "ptx::red_max_global_u64(args.inexact, at)"),
    ] {
        let Some(edit) = Edit::planted(header, from, to) else { continue };
        let mut kernel = build(&[edit]);
        let caught = cases().iter().any(|case| case.check(&mut kernel).is_err()) || {
            // Odd subnormals and halves of them lose one bit.
            let case = Case::new(64, 64, |i| if i == 70 || i == 700 { 3 } else { (113 + i as u16 % 16) << 7 });
            !matches!(case.pack(&mut kernel, Window::new(113).unwrap(), 0), Ok(got) if got.inexact == Some(70))
        };
        assert!(caught, "the planted bug was not caught: `{to}` for `{from}`");
    }
}
