//! ZipServ's kernels: the weights and products of the CPU decoder, no faults on random bytes, and planted bugs that
//! must be caught.

use crate::harness::{Buffer, CpuKernel, Edit, bf16};
use unweight_format::testing::{Random, Weights};
use unweight_rivals::{
    cuda::zipserv::{ZipservArgs, decompress, gemm, reduce},
    zipserv::{Encoded, encode},
};

const TILES: [u32; 2] = [8, 32];

fn build(edits: &[Edit], tiles: &[u32]) -> CpuKernel {
    let gemms = tiles.iter().map(|&tile| gemm(super::ARCH, tile)).collect();
    CpuKernel::external(&[vec![decompress(super::ARCH), reduce(super::ARCH)], gemms].concat(), edits)
}

fn words<T: Copy + Into<u64>>(values: &[T]) -> Buffer {
    let bytes: Vec<u8> =
        values.iter().flat_map(|&value| value.into().to_le_bytes()[..size_of::<T>()].to_vec()).collect();
    Buffer::of(&bytes)
}

/// The sections of a matrix in memory.
struct Parts {
    maps: [Buffer; 3],
    sign_mantissa: Buffer,
    full: Buffer,
    blocks: Buffer,
    strips: Buffer,
}

impl Parts {
    fn of(matrix: &Encoded) -> Self {
        Self {
            maps: [0, 1, 2].map(|map| words(&matrix.bitmaps[map])),
            sign_mantissa: Buffer::of(&matrix.sign_mantissa),
            full: words(&matrix.full),
            blocks: words(matrix.blocks.as_flattened()),
            strips: words(matrix.strips.as_flattened()),
        }
    }

    fn args(&self, matrix: &Encoded) -> ZipservArgs {
        ZipservArgs {
            map0: self.maps[0].address(),
            map1: self.maps[1].address(),
            map2: self.maps[2].address(),
            sign_mantissa: self.sign_mantissa.address(),
            full: self.full.address(),
            blocks: self.blocks.address(),
            strips: self.strips.address(),
            high_bytes: self.sign_mantissa.slice().len() as u32,
            full_elements: (self.full.slice().len() / 2) as u32,
            first: matrix.first.into(),
            rows: matrix.rows as u32,
            cols: matrix.cols as u32,
            ..ZipservArgs::default()
        }
    }

    fn buffers(&self) -> Vec<(&str, &[u8])> {
        vec![
            ("map0", self.maps[0].slice()),
            ("map1", self.maps[1].slice()),
            ("map2", self.maps[2].slice()),
            ("sign_mantissa", self.sign_mantissa.slice()),
            ("full", self.full.slice()),
            ("blocks", self.blocks.slice()),
            ("strips", self.strips.slice()),
        ]
    }
}

/// Returns the weights and the faults.
fn weights(kernel: &mut CpuKernel, matrix: &Encoded, parts: &Parts, grid: u32) -> Result<(Vec<u8>, u32), String> {
    let (weights, faults) = (Buffer::new(2 * matrix.rows * matrix.cols), Buffer::zeroed(4));
    let args = ZipservArgs { weights: weights.address(), faults: faults.address(), ..parts.args(matrix) };
    let mut buffers = parts.buffers();
    buffers.extend([("weights", weights.slice()), ("faults", faults.slice())]);
    // SAFETY: the buffers outlive the launch, and the kernel reaches them through checked wrappers only.
    unsafe { kernel.run_external(&decompress(super::ARCH), (grid, 3), &args, &buffers) }?;
    Ok((weights.slice().to_vec(), faults.u32s()[0]))
}

/// Returns the product of `x` and the faults, with k split into `splits` shares.
fn product(
    kernel: &mut CpuKernel,
    matrix: &Encoded,
    parts: &Parts,
    x: &[u16],
    (tile, splits): (u32, u32),
) -> Result<(Vec<u16>, u32), String> {
    let batch = x.len() / matrix.cols;
    let (x, y) = (words(x), Buffer::new(2 * batch * matrix.rows));
    let (sums, faults) = (Buffer::new(4 * splits as usize * batch * matrix.rows), Buffer::zeroed(4));
    let args = ZipservArgs {
        x: x.address(),
        y: y.address(),
        sums: sums.address(),
        faults: faults.address(),
        batch: batch as u32,
        splits,
        ..parts.args(matrix)
    };
    let mut buffers = parts.buffers();
    buffers.extend([("x", x.slice()), ("y", y.slice()), ("sums", sums.slice()), ("faults", faults.slice())]);
    let blocks = (matrix.rows / 64) as u32 * splits;
    // SAFETY: as above.
    unsafe { kernel.run_external(&gemm(super::ARCH, tile), (blocks, 3), &args, &buffers) }?;
    if splits > 1 {
        let blocks = (batch * matrix.rows).div_ceil(128) as u32;
        // SAFETY: as above.
        unsafe { kernel.run_external(&reduce(super::ARCH), (blocks, 4), &args, &buffers) }?;
    }
    Ok((y.u16s(), faults.u32s()[0]))
}

struct Case {
    bytes: Vec<u8>,
    matrix: Encoded,
}

impl Case {
    fn new(rows: usize, cols: usize, bytes: Vec<u8>) -> Self {
        let matrix = encode(&bytes, rows, cols).unwrap();
        assert_eq!(matrix.decode().unwrap(), bytes);
        Self { bytes, matrix }
    }

    /// Makes weights of which one in `every` is another pattern.
    fn with(rows: usize, cols: usize, every: u64) -> Self {
        let mut random = Random::new(every);
        let mut bytes = Weights::TRAINED.bytes(rows * cols, every);
        for element in bytes.chunks_exact_mut(2) {
            if random.below(every) == 0 {
                element.copy_from_slice(&(random.bits() as u16).to_le_bytes());
            }
        }
        Self::new(rows, cols, bytes)
    }

    fn check(&self, kernel: &mut CpuKernel) -> Result<(), String> {
        let (rows, cols, parts) = (self.matrix.rows, self.matrix.cols, Parts::of(&self.matrix));
        for grid in [1, 3] {
            let (got, faults) = weights(kernel, &self.matrix, &parts, grid)?;
            let wrong = got.iter().zip(&self.bytes).position(|(got, expected)| got != expected);
            if wrong.is_some() || faults != 0 {
                return Err(format!("{rows}x{cols}: byte {wrong:?} differs, {faults} faults"));
            }
        }
        Ok(())
    }

    /// Checks products against sums in f64, for weights whose product is finite.
    fn check_product(&self, kernel: &mut CpuKernel, (batch, tile, splits): (usize, u32, u32)) -> Result<(), String> {
        let (rows, cols) = (self.matrix.rows, self.matrix.cols);
        let x: Vec<u16> = Weights::TRAINED
            .bytes(batch * cols, 99)
            .chunks_exact(2)
            .map(|element| u16::from_le_bytes([element[0], element[1]]))
            .collect();
        let (y, faults) = product(kernel, &self.matrix, &Parts::of(&self.matrix), &x, (tile, splits))?;
        let weight = |row: usize, col: usize| {
            let at = 2 * (row * cols + col);
            bf16(u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]]))
        };
        for m in 0..batch {
            for row in 0..rows {
                let terms = || (0..cols).map(|col| bf16(x[m * cols + col]) * weight(row, col));
                let (expected, scale) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
                let got = bf16(y[m * rows + row]);
                if (got - expected).is_nan() || (got - expected).abs() > expected.abs() / 200.0 + scale * 1e-5 {
                    return Err(format!(
                        "{rows}x{cols} batch {batch} splits {splits}: y[{m}, {row}] = {got}, {expected}"
                    ));
                }
            }
        }
        if faults == 0 { Ok(()) } else { Err(format!("{faults} faults")) }
    }
}

/// Returns cases with windows at both ends of the exponents, nothing or everything outside the window, and odd
/// patterns.
fn cases() -> Vec<Case> {
    let exponents = |count: usize, of: &mut dyn FnMut(u64) -> u16| -> Vec<u8> {
        let mut random = Random::new(count as u64);
        let mut element = || {
            let bits = random.bits();
            (bits as u16 & 0x807f | of(bits >> 16) << 7).to_le_bytes()
        };
        (0..count).flat_map(|_| element()).collect()
    };
    vec![
        Case::with(64, 64, 40),
        Case::with(192, 128, 300),
        // The window begins at 0, and half of all pairs have an element outside.
        Case::new(64, 128, exponents(64 * 128, &mut |bits| if bits % 3 == 0 { 200 } else { 0 })),
        Case::new(64, 64, exponents(64 * 64, &mut |bits| 249 + (bits % 7) as u16)),
        // All elements inside the window; and blocks with one such element.
        Case::new(64, 64, exponents(64 * 64, &mut |_| 120)),
        Case::new(64, 128, exponents(64 * 128, &mut |bits| (bits % 256) as u16)),
        {
            let mut first = 0;
            let mut of = |bits: u64| {
                first += 1;
                if first <= 4096 {
                    100
                } else if bits.is_multiple_of(4096) {
                    101
                } else {
                    200 + (bits % 40) as u16
                }
            };
            Case::new(64, 128, exponents(64 * 128, &mut of))
        },
    ]
}

#[test]
fn matrices_round_trip() {
    let mut kernel = build(&[], &[]);
    for case in cases() {
        case.check(&mut kernel).unwrap();
    }
}

#[test]
fn products_match_the_weights() {
    let mut kernel = build(&[], &TILES);
    // No infinities or NaN.
    let case = Case::new(128, 256, Weights::TRAINED.bytes(128 * 256, 5));
    for how in [(1, 8, 1), (8, 8, 3), (5, 8, 2), (17, 32, 1), (32, 32, 4)] {
        case.check_product(&mut kernel, how).unwrap();
    }
}

#[test]
fn any_bytes_stay_in_bounds() {
    let mut kernel = build(&[], &TILES[..1]);
    let case = Case::with(128, 128, 30);
    let x = vec![0x3f80; 3 * 128];
    let mut random = Random::new(78);
    for turn in 0..10 {
        let mut parts = Parts::of(&case.matrix);
        let mut noise = |buffer: &Buffer| Buffer::of(&random.bytes(buffer.slice().len()));
        match turn % 5 {
            0 => parts.maps[1] = noise(&parts.maps[1]),
            1 => parts.blocks = noise(&parts.blocks),
            2 => parts.strips = noise(&parts.strips),
            3 => parts.maps = [0, 1, 2].map(|_| Buffer::zeroed(parts.maps[0].slice().len())),
            _ => {
                parts.strips = Buffer::filled(parts.strips.slice().len(), 0xff);
                parts.maps = [0, 1, 2].map(|_| Buffer::filled(parts.maps[0].slice().len(), 0xff));
            }
        }
        let (_, faults) = weights(&mut kernel, &case.matrix, &parts, 2).unwrap();
        let (_, of_product) = product(&mut kernel, &case.matrix, &parts, &x, (8, 2)).unwrap();
        assert!(faults > 0 && of_product == faults, "turn {turn}: {faults} and {of_product} faults");
    }
    // Offsets that are ordered but unaligned, or that belong to a larger block.
    for offsets in [[8, 0], [16, 4], [0, 4104]] {
        let mut matrix = case.matrix.clone();
        let [high, full] = matrix.blocks[1];
        matrix.blocks[1] = [high - offsets[0], full + offsets[1]];
        let (_, faults) = weights(&mut kernel, &matrix, &Parts::of(&matrix), 1).unwrap();
        assert!(faults > 0, "{offsets:?}");
    }
}

#[test]
#[ignore = "compiles each kernel for each bug: .ci/nightly"]
fn planted_bugs_are_caught() {
    let header = "rivals/zipserv.cuh";
    let (cases, of_product) = (cases(), Case::new(128, 256, Weights::TRAINED.bytes(128 * 256, 5)));
    for (from, to) in [
        ("const u32 tile = lane % 8 * 2 + i / 2,", "const u32 tile = lane % 8 + i / 2 * 8,"),
        ("* 0x204081u", "* 0x104081u"),
        (" - spread_bytes(any);", " - 0x1010101u;"),
        ("const u32 half = 2 * tile + row / 4,", "const u32 half = 2 * tile,"),
        ("(rest & ~before) << 8 |", "(rest & ~before) |"),
        ("missing &= missing - 1)", "missing = 0)"),
        ("((element >> 7 & 0xff) ^ first) << at", "(element >> 7 & 0xff) << at"),
        ("        others += 2;\n", ""),
        ("const u32 low[2] = {x.x, x.y}", "const u32 low[2] = {x.y, x.x}"),
        ("{{top.x, bottom.x, top.y, bottom.y}", "{{top.x, top.y, bottom.x, bottom.y}"),
        (
            "decode_row(strip, args.first, 2 * chunk + 1, lane / 4)",
            "decode_row(strip, args.first, 2 * chunk, lane / 4)",
        ),
        ("kCodedRoom + x_place(row, chunk), from", "kCodedRoom + row * 128 + chunk * 16, from"),
        ("end = across * (split + 1) / args.splits,", "end = across * (split + 1) / args.splits - (split > 0),"),
        ("ptx::ld_global(args.sums + split * count + at)", "ptx::ld_global(args.sums + at)"),
        ("lane % 4 * 2 + i % 2;", "lane % 4 * 2 + i / 2;"),
        ("ptx::cp_async_wait_group<1>();", ""),
        ("ptx::bar_sync();  // with the wait: orders every thread's copies before their reading by all", ""),
        (
            "ptx::bar_sync(NamedBarrier::kWarps, 32 * kWarps);  // orders the reading before the next copies to the stage",
            "",
        ),
    ] {
        let mut kernel = build(&[Edit { header, from, to }], &TILES[..1]);
        let caught = cases.iter().any(|case| case.check(&mut kernel).is_err())
            || of_product.check_product(&mut kernel, (8, 8, 3)).is_err();
        assert!(caught, "the planted bug was not caught: `{to}` for `{from}`");
    }
}
