//! DFloat11's kernel: the weights of the CPU decoder, no faults on random bytes, and planted bugs that must be caught.

use crate::harness::{Buffer, CpuKernel, Edit};
use unweight_codegen::ExternalSource;
use unweight_format::testing::{Random, Weights};
use unweight_rivals::{
    cuda::dfloat11::{Dfloat11Args, Tables, kernel},
    dfloat11::{Code, Unit},
};

fn decoder_source() -> ExternalSource {
    kernel(super::ARCH)
}

fn build(edits: &[Edit]) -> CpuKernel {
    CpuKernel::external(&[decoder_source()], edits)
}

/// A unit in the kernel's format, and its expected output.
struct Case {
    bytes: Vec<u8>,
    unit: Unit,
    tables: Tables,
}

/// The unit's sections in memory.
struct Sections {
    codes: Buffer,
    gaps: Buffer,
    positions: Buffer,
    luts: Buffer,
    sign_mantissa: Buffer,
}

impl Sections {
    fn of(unit: &Unit) -> Self {
        let mut codes = unit.encoded_exponent.clone();
        codes.resize(codes.len().next_multiple_of(4), 0);
        Self {
            codes: Buffer::of(&codes),
            gaps: Buffer::of(&unit.gaps),
            positions: Buffer::of(&unit.output_positions),
            luts: Buffer::of(&unit.luts),
            sign_mantissa: Buffer::of(&unit.sign_mantissa),
        }
    }
}

impl Case {
    fn new(bytes: Vec<u8>, threads: usize) -> Self {
        let unit = Unit::encode(&bytes, threads).unwrap_or_else(|why| panic!("{} bytes: {why}", bytes.len()));
        assert_eq!(unit.decode().unwrap(), bytes);
        let tables = Tables::of(&Code::parse(&unit.luts).unwrap());
        Self { bytes, unit, tables }
    }

    /// Returns the weights and the faults.
    fn run(&self, kernel: &mut CpuKernel, sections: &Sections, grid: u32) -> Result<(Vec<u8>, u32), String> {
        let cast = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>();
        let starts: Vec<u8> = self.tables.starts.iter().flat_map(|entry| entry.to_le_bytes()).collect();
        let (starts, symbols) = (Buffer::of(&starts), Buffer::of(&cast(&self.tables.symbols)));
        let (weights, faults) = (Buffer::new(self.bytes.len()), Buffer::zeroed(4));
        let args = Dfloat11Args {
            codes: sections.codes.address(),
            gaps: sections.gaps.address(),
            positions: sections.positions.address(),
            luts: sections.luts.address(),
            sign_mantissa: sections.sign_mantissa.address(),
            starts: starts.address(),
            symbols: symbols.address(),
            weights: weights.address(),
            faults: faults.address(),
            code_words: (sections.codes.slice().len() / 4) as u32,
            gap_bytes: sections.gaps.slice().len() as u32,
            blocks: (self.unit.output_positions.len() / 4 - 1) as u32,
            windows: self.unit.threads as u32,
            rows: (self.unit.luts.len() / 256 - 1) as u32,
            elements: self.unit.sign_mantissa.len() as u32,
        };
        let buffers = [
            ("codes", sections.codes.slice()),
            ("gaps", sections.gaps.slice()),
            ("positions", sections.positions.slice()),
            ("luts", sections.luts.slice()),
            ("sign_mantissa", sections.sign_mantissa.slice()),
            ("starts", starts.slice()),
            ("symbols", symbols.slice()),
            ("weights", weights.slice()),
            ("faults", faults.slice()),
        ];
        // SAFETY: the buffers outlive the launch, and the kernel reaches them through checked wrappers only.
        unsafe { kernel.run_external(&decoder_source(), (grid, 5), &args, &buffers) }?;
        Ok((weights.slice().to_vec(), faults.u32s()[0]))
    }

    fn check(&self, kernel: &mut CpuKernel) -> Result<(), String> {
        for grid in [1, 3] {
            let (weights, faults) = self.run(kernel, &Sections::of(&self.unit), grid)?;
            let wrong = weights.iter().zip(&self.bytes).position(|(got, expected)| got != expected);
            if wrong.is_some() || faults != 0 {
                let elements = self.unit.sign_mantissa.len();
                return Err(format!("{elements} elements: byte {wrong:?} differs, {faults} faults"));
            }
        }
        Ok(())
    }
}

/// Returns elements with exponents that `of` maps from random numbers.
fn exponents(count: usize, seed: u64, mut of: impl FnMut(u64) -> u16) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut element = || {
        let bits = random.bits();
        (bits as u16 & 0x807f | of(bits >> 16) << 7).to_le_bytes()
    };
    (0..count).flat_map(|_| element()).collect()
}

/// Makes blocks whose exponents just fit together, or are a byte or seven too many, starting at several places of a
/// line of eight.
///
/// Three exponents have codes of two bits, one has three and one has four. A block of 4096 bytes thus has 16384 codes,
/// less half of the bits that rare codes use beyond two. Both rare exponents are equally frequent; otherwise all zeros
/// would be the end's code.
fn full_blocks() -> Case {
    const CAPACITY: usize = 32 * 512 - 64;
    let mut random = Random::new(12);
    let (mut all, mut positions, mut rare) = (Vec::new(), vec![0], [0, 0]);
    // Elements of a block, and its start in a line of eight.
    for (count, begins) in
        [(16_383, 0), (CAPACITY - 7, 7), (CAPACITY, 0), (16_383, 0), (CAPACITY - 6, 7), (16_382, 1), (CAPACITY, 7)]
    {
        assert_eq!(positions.last().unwrap() % 8, begins, "{count}");
        let (mut beyond, mut turn) = (2 * (16_384 - count), 0);
        for i in 0..count {
            turn = if i % 3 == 0 { random.below(3) as usize } else { turn };
            let exponent = match i {
                // Elements that do not fit would overwrite the first one.
                0 => 117,
                _ if i == count - 1 => 119,
                _ if i % 50 == 25 && beyond > 0 => {
                    let long = usize::from(rare[1] <= rare[0] && beyond > 1);
                    rare[long] += 1;
                    beyond -= long + 1;
                    126 - long as u16
                }
                _ => 117 + ((i + turn) % 3) as u16,
            };
            all.extend((exponent << 7 | random.bits() as u16 & 0x807f).to_le_bytes());
        }
        positions.push(positions.last().unwrap() + count);
    }
    let case = Case::new(all, 512);
    let got = Buffer::of(&case.unit.output_positions).u32s();
    assert!(got.iter().map(|&position| position as usize).eq(positions), "{got:?}");
    case
}

/// Makes a unit whose last window has codes: the bits of its gap end with the section.
fn full_to_the_end(threads: usize) -> Case {
    let ends = |case: &Case| {
        let last = case.unit.encoded_exponent.len() - 1;
        last / 8 % threads == threads - 1
    };
    (300..).map(|count| Case::new(Weights::TRAINED.bytes(count, 3), threads)).find(ends).unwrap()
}

/// Returns units with codes of one bit and of more than twelve, windows with few and with 64 codes, blocks whose
/// windows have at most 32 but which do not fit together, blocks with other numbers of threads, a nearly empty last
/// block and a full one.
fn cases() -> Vec<Case> {
    let trained = |count: usize, threads| Case::new(Weights::TRAINED.bytes(count, count as u64), threads);
    // Each exponent is half as frequent as the one before: codes of 1 to 30 bits.
    let skewed = |count| exponents(count, 9, |bits| 130 - (bits.trailing_zeros() as u16).min(28));
    // Nearly all exponents are equal.
    let one = exponents(70_001, 4, |bits| if bits % 3001 == 0 { 90 + (bits >> 20) as u16 % 60 } else { 120 });
    vec![
        trained(300, 512),
        trained(30_011, 512),
        trained(9_000, 256),
        trained(30_000, 1024),
        trained(2_000, 37),
        Case::new(skewed(200_000), 512),
        Case::new(one, 512),
        // Three frequent exponents and rare others: codes of two bits, 32 per window.
        Case::new(
            exponents(60_000, 5, |bits| 117 + if bits % 1009 < 2 { 9 } else { 0 } + (bits >> 20) as u16 % 3),
            512,
        ),
        full_blocks(),
        full_to_the_end(8),
        // All exponents are equally frequent: codes of eight bits.
        Case::new(exponents(13_000, 6, |bits| (bits % 239) as u16), 512),
    ]
}

#[test]
fn units_round_trip() {
    let mut kernel = build(&[]);
    let (mut long, mut full) = (0, false);
    for case in cases() {
        case.check(&mut kernel).unwrap();
        let lengths = &case.unit.luts[case.unit.luts.len() - 256..];
        long = long.max(lengths.iter().copied().max().unwrap());
        full |= lengths.contains(&1);
    }
    assert!(long > 12 && full, "the data has no long codes, or none of one bit: {long}");
}

/// Whatever is wrong with a file, the kernel stays inside its buffers and counts blocks that cannot be right.
#[test]
fn any_bytes_stay_in_bounds() {
    let mut kernel = build(&[]);
    let mut random = Random::new(77);
    // Includes more windows per block than threads.
    let cases = [512, 1024].map(|threads| Case::new(Weights::TRAINED.bytes(40_000, 8), threads));
    for turn in 0..24 {
        let case = &cases[turn / 12];
        let mut sections = Sections::of(&case.unit);
        let mut noise = |buffer: &Buffer| Buffer::of(&random.bytes(buffer.slice().len()));
        match turn % 6 {
            0 => sections.codes = noise(&sections.codes),
            1 => sections.gaps = noise(&sections.gaps),
            2 => sections.positions = noise(&sections.positions),
            3 => {
                let fill = if turn / 6 % 2 == 0 { 0xff } else { 0 };
                sections.codes = Buffer::filled(sections.codes.slice().len(), fill);
                sections.luts = noise(&sections.luts);
            }
            4 => sections.gaps = Buffer::of(&case.unit.gaps[..3]),
            _ => {
                sections.positions = Buffer::filled(sections.positions.slice().len(), 0xff);
                sections.luts = Buffer::filled(sections.luts.slice().len(), 0xff);
                sections.codes = noise(&sections.codes);
            }
        }
        let (_, faults) = case.run(&mut kernel, &sections, 2).unwrap();
        assert!(faults > 0 || turn % 6 == 3, "turn {turn}: the damage was not counted as a fault");
    }
    // Positions that are ordered and within the elements, but differ from those of the codes.
    let case = &cases[0];
    let mut positions = case.unit.output_positions.clone();
    positions[4] ^= 1;
    let sections = Sections { positions: Buffer::of(&positions), ..Sections::of(&case.unit) };
    assert_eq!(case.run(&mut kernel, &sections, 2).unwrap().1, 2);
}

#[test]
#[ignore = "compiles each kernel for each bug: .ci/nightly"]
fn planted_bugs_are_caught() {
    let header = "rivals/dfloat11.cuh";
    let cases = cases();
    for (from, to) in [
        ("(behind > 4 ? behind : 4)", "4"),
        ("bits.skip(used / 2);\n", "\n"),
        ("before = full ? last : before;", ""),
        ("const u32 over = ptx::shf_l_wrap(symbols, 0, bits), old", "const u32 over = 0, old"),
        ("if (full && to < end)", "if (full)"),
        ("parked.flush();", ""),
        ("store_bytes(to, words[0], (4 - shift) & 3);", ""),
        ("(j > 0 || shift == 0)", "true"),
        ("ptx::shfl_sync_idx(sums - of_lane, warp) + sum", "sum"),
        ("kUnparked | count : count", "count : count"),
        ("(at & 7) + total > S::kRoom", "total >= kUnparked"),
        ("(at & 7) + total > S::kRoom", "total > S::kRoom"),
        ("(at & 7) + total > S::kRoom", "(at & 7) + total > S::kRoom + 1"),
        ("byte + 1 < args.gap_bytes", "byte < args.gap_bytes"),
        ("ptx::bar_sync();  // orders the tables before the lookups\n", "\n"),
        ("ptx::bar_sync();  // orders the reading of the sums before the next ones\n", "\n"),
        ("at + before % kUnparked", "at + before"),
        ("count > 0 && at < end", "count > 0"),
        ("first >= begin && first + 8 <= end", "first + 8 <= end"),
        ("if (first + i < begin || first + i >= end) continue;", "if (first + i >= end) continue;"),
        ("(rest << 8 & 0x80008000u)", "(rest << 8 & 0x00008000u)"),
        (">> (11 - bit % 8) & 31", ">> (11 - bit % 8) & 3"),
        ("ptx::bar_sync();  // orders the sums before their reading\n", "\n"),
        ("ptx::bar_sync();  // orders the exponents before they are read, and the sums before the next ones", ""),
    ] {
        let mut kernel = build(&[Edit { header, from, to }]);
        let caught = cases.iter().any(|case| case.check(&mut kernel).is_err());
        assert!(caught, "the planted bug was not caught: `{to}` for `{from}`");
    }
}
