//! MatVANS's products: exactly those of the matrix, no faults on random bytes, and planted bugs that must be caught.

use crate::harness::{Buffer, CpuKernel, Edit};
use unweight_codegen::ExternalSource;
use unweight_format::testing::Random;
use unweight_rivals::{
    cuda::matvans::{MatvansArgs, dense, lanes, parts, round, rows, stripes},
    matvans::{Encoded, Layout, encode},
};

const SCALE: f32 = 0.003;

fn build(edits: &[Edit]) -> CpuKernel {
    CpuKernel::external(&[rows(super::ARCH), stripes(super::ARCH), lanes(super::ARCH), dense(super::ARCH)], edits)
}

fn words(values: &[u32]) -> Buffer {
    Buffer::of(&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>())
}

fn bytes(values: &[i8]) -> Vec<u8> {
    values.iter().map(|&value| value as u8).collect()
}

struct Case {
    values: Vec<i8>,
    matrix: Encoded,
    x: Vec<i8>,
}

impl Case {
    /// Makes values around 0; a smaller `narrow` gives a wider distribution.
    fn new((rows, cols): (usize, usize), layout: Layout, narrow: u32, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut value = || {
            let bits = random.bits();
            let size = (bits & 0xffff).leading_zeros() - 48;
            let value = (bits >> 16) as i32 % (120 >> (size.min(6) + narrow.min(3))).max(2);
            (if bits >> 60 & 1 == 1 { -value } else { value }) as i8 / 2 * 2
        };
        let values: Vec<i8> = (0..rows * cols).map(|_| value()).collect();
        let x = (0..cols).map(|_| random.bits() as i8).collect();
        let matrix = encode(&values, rows, cols, layout).unwrap();
        assert_eq!(matrix.decode().unwrap(), values);
        Self { values, matrix, x }
    }

    fn expected(&self) -> Vec<i8> {
        let product = |row: &[i8]| row.iter().zip(&self.x).map(|(w, x)| i32::from(*w) * i32::from(*x)).sum();
        self.values.chunks(self.matrix.cols).map(|row| round(product(row), SCALE)).collect()
    }

    fn run(
        &self,
        kernel: &mut CpuKernel,
        source: &ExternalSource,
        offsets: &[u32],
        data: &[u32],
        table: &[u32],
    ) -> Result<(Vec<u8>, u32), String> {
        let (matrix_words, offsets, table, raw) =
            (words(data), words(offsets), words(table), Buffer::of(&bytes(&self.values)));
        let (x, y, faults) = (Buffer::of(&bytes(&self.x)), Buffer::new(self.matrix.rows), Buffer::zeroed(4));
        let streams = self.matrix.offsets.len() as u32;
        let args = MatvansArgs {
            words: matrix_words.address(),
            offsets: offsets.address(),
            parts: table.address(),
            dense: raw.address(),
            x: x.address(),
            y: y.address(),
            faults: faults.address(),
            word_count: data.len() as u64,
            streams,
            rows: self.matrix.rows as u32,
            cols: self.matrix.cols as u32,
            scale: SCALE,
        };
        let buffers = [
            ("words", matrix_words.slice()),
            ("offsets", offsets.slice()),
            ("parts", table.slice()),
            ("dense", raw.slice()),
            ("x", x.slice()),
            ("y", y.slice()),
            ("faults", faults.slice()),
        ];
        let warps = if source.function == "dense" { args.rows } else { streams };
        // SAFETY: the buffers outlive the launch, and the kernel reaches them through checked wrappers only.
        unsafe { kernel.run_external(source, (warps.div_ceil(4), 7), &args, &buffers) }?;
        Ok((y.slice().to_vec(), faults.u32s()[0]))
    }

    fn layout_source(&self) -> ExternalSource {
        match self.matrix.layout {
            Layout::Rows => rows(super::ARCH),
            Layout::Stripes => stripes(super::ARCH),
            Layout::Lanes => lanes(super::ARCH),
        }
    }

    fn check(&self, kernel: &mut CpuKernel) -> Result<(), String> {
        let expected = bytes(&self.expected());
        let table = parts(&self.matrix.tables);
        for source in [self.layout_source(), dense(super::ARCH)] {
            if source.function == "dense" && !self.matrix.cols.is_multiple_of(16) {
                continue;
            }
            let (y, faults) = self.run(kernel, &source, &self.matrix.offsets, &self.matrix.words, &table)?;
            if y != expected || faults != 0 {
                let wrong = y.iter().zip(&expected).position(|(got, expected)| got != expected);
                return Err(format!("{source}: element {wrong:?} differs, {faults} faults"));
            }
        }
        Ok(())
    }
}

fn cases() -> Vec<Case> {
    vec![
        Case::new((7, 128), Layout::Rows, 0, 1),
        Case::new((5, 2048), Layout::Rows, 1, 2),
        Case::new((3, 4096), Layout::Rows, 3, 3),
        Case::new((32, 4), Layout::Stripes, 0, 4),
        Case::new((160, 516), Layout::Stripes, 0, 5),
        Case::new((64, 1024), Layout::Stripes, 2, 6),
        Case::new((3, 512), Layout::Lanes, 0, 7),
        Case::new((5, 4096), Layout::Lanes, 3, 8),
    ]
}

#[test]
fn products_are_exact() {
    let mut kernel = build(&[]);
    for case in cases() {
        case.check(&mut kernel).unwrap();
    }
}

#[test]
fn any_bytes_stay_in_bounds() {
    let mut kernel = build(&[]);
    let mut random = Random::new(6);
    for case in [
        Case::new((9, 1024), Layout::Rows, 0, 8),
        Case::new((64, 256), Layout::Stripes, 0, 9),
        Case::new((5, 512), Layout::Lanes, 0, 10),
    ] {
        let (source, matrix) = (case.layout_source(), &case.matrix);
        let table = parts(&matrix.tables);
        let noise = |random: &mut Random, count: usize| (0..count).map(|_| random.bits() as u32).collect::<Vec<_>>();
        for _ in 0..4 {
            let data = noise(&mut random, matrix.words.len());
            case.run(&mut kernel, &source, &matrix.offsets, &data, &table).unwrap();
            let offsets = noise(&mut random, matrix.offsets.len());
            let (_, faults) = case.run(&mut kernel, &source, &offsets, &matrix.words, &table).unwrap();
            assert!(faults > 0);
            let any = noise(&mut random, table.len());
            case.run(&mut kernel, &source, &matrix.offsets, &matrix.words, &any).unwrap();
        }
        // States that need a word in every step.
        let (_, faults) = case
            .run(&mut kernel, &source, &matrix.offsets, &vec![0; matrix.words.len()], &vec![0; table.len()])
            .unwrap();
        let begins = matrix.offsets.iter().map(|&offset| 4 * offset as usize).chain([matrix.words.len()]);
        let begins: Vec<usize> = begins.collect();
        let values_per_stream = matrix.rows * matrix.cols / matrix.offsets.len();
        let too_short = |words: usize| match matrix.layout {
            Layout::Rows | Layout::Stripes => words - 64 < values_per_stream / 4,
            // Words of 16 bits, two of which are the state.
            Layout::Lanes => 2 * words - 64 < values_per_stream,
        };
        let short = begins.windows(2).filter(|stream| too_short(stream[1] - stream[0])).count();
        assert!(faults as usize == short && short > 0, "{faults} faults, {short} streams are too short");
    }
}

#[test]
#[ignore = "compiles each kernel for each bug: .ci/nightly"]
fn planted_bugs_are_caught() {
    let header = "rivals/matvans.cuh";
    let cases = cases();
    for (from, to) in [
        ("filled = kFirstWords;", "filled = kGroup;"),
        ("if (filled - taken < 32) {", "if (filled - taken < 16) {"),
        ("(taken + before) % kRing", "(taken + before) % kGroup"),
        ("rest = rest * count + (part[i] - first);", "rest = rest * count + part[i];"),
        ("(state >> 28) * product", "static_cast<u32>(state >> 28) * product"),
        ("ptx::prmt(entry[2], entry[3], 0x0040), 0x5410)", "ptx::prmt(entry[3], entry[2], 0x0040), 0x5410)"),
        ("ptx::st_global_u8(args.y + stream * 32 + lane,", "ptx::st_global_u8(args.y + stream * 32 + (lane ^ 1),"),
        ("state << 16 | queue.take()", "state << 16 | 1"),
        ("ptx::bar_sync();  // orders the parts before the lookups of every warp\n", "\n"),
        // The queue's other two barriers are next to a ballot, where lanes meet in the simulator; on a GPU, a ballot
        // orders nothing.
        ("ptx::bar_warp_sync();  // orders the words before their reading by other lanes\n        }", "}"),
        ("low = low >> 16 | high << 48;", "low >>= 16;"),
        ("whole.next + 4 * lane", "whole.next + 4 * (lane ^ 1)"),
        ("i == 2 ? x.z : x.w", "i == 2 ? x.w : x.z"),
        (
            "next += kGroup;\n        groups -= groups > 0;\n    }\n    UW_DEVICE u32 take()",
            "next += 4;\n        groups -= groups > 0;\n    }\n    UW_DEVICE u32 take()",
        ),
        ("value < -128.0f ? -128.0f :", ""),
        ("i32 sum_of_warp(i32 sum) {\n", "i32 sum_of_warp(i32 sum) {\n    return sum;\n"),
        (
            "const u32 before = ptx::popc(all & ((1u << lane) - 1));",
            "const u32 before = ptx::popc(all & (1u << lane));",
        ),
    ] {
        let mut kernel = build(&[Edit { header, from, to }]);
        let caught = cases.iter().any(|case| case.check(&mut kernel).is_err());
        assert!(caught, "the planted bug was not caught: `{to}` for `{from}`");
    }
}
