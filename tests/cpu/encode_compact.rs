//! The encoder of the compact encoding in the simulator, against `unweight_format`: equal bytes and equal errors, no
//! writes outside the sections, and planted bugs that must be caught.

use crate::decode_compact::{Case, cases, longest_streams};
use crate::harness::{Buffer, CpuKernel, Edit, Run};
use unweight_codegen::{
    VariantSpec,
    abi::EncodeCompactArgs,
    plan::GemmShape,
    spec::{Arch, EncodeCompactStage},
};
use unweight_format::{
    Histogram, Matrix, TileGrid,
    raw::{
        CompactTensor,
        compact::{Classes, Coding, Uncompact, encode},
        layout::DENSE_TILE_BYTES,
    },
    testing::{Random, Weights},
};

fn variant(stage: EncodeCompactStage) -> VariantSpec {
    VariantSpec::encode_compact(Arch::Sm90a, stage)
}

/// Builds all stages.
fn build(edits: &[Edit]) -> CpuKernel {
    let stages: Vec<_> = EncodeCompactStage::ALL.iter().map(|&stage| variant(stage)).collect();
    CpuKernel::all(&stages, edits)
}

/// A matrix in the memory of a kernel.
struct Source {
    grid: TileGrid,
    weights: Buffer,
    classes: Classes,
}

/// The output of `write`: tiles, escapes, streams, dense.
type Written = [Vec<u8>; 4];

impl Source {
    fn new(bytes: &[u8], (n, k): (usize, usize)) -> Self {
        let grid = TileGrid::new(n, k).unwrap();
        let classes = Classes::of(grid, &Histogram::of(bytes)).unwrap();
        Self { grid, weights: Buffer::of(bytes), classes }
    }

    fn launch(
        &self,
        kernel: &mut CpuKernel,
        stage: EncodeCompactStage,
        args: EncodeCompactArgs,
        buffers: &[(&str, &Buffer)],
    ) -> Result<(), String> {
        let (n, k) = (self.grid.rows() as u32, self.grid.cols() as u32);
        let args = EncodeCompactArgs {
            weights: self.weights.address(),
            base: self.classes.window().base().into(),
            filler: self.classes.filler().into(),
            n,
            k,
            tile_rows: n / 64,
            tile_cols: k / 64,
            ..args
        };
        let mut slices = vec![("weights", self.weights.slice())];
        slices.extend(buffers.iter().map(|(name, buffer)| (*name, buffer.slice())));
        let run = Run { problem: GemmShape { m: 0, n, k }, sms: 2, seed: 5 };
        // SAFETY: the buffers outlive the launch, and the kernel reaches them through checked wrappers only.
        unsafe { kernel.run(&variant(stage), run, &args, &slices) }
    }

    fn coding(&self, kernel: &mut CpuKernel) -> Result<Coding, String> {
        let quads = Buffer::zeroed(4096 * 4);
        let args = EncodeCompactArgs { quads: quads.address(), ..EncodeCompactArgs::default() };
        self.launch(kernel, EncodeCompactStage::Quads, args, &[("quads", &quads)])?;
        let counts: Vec<u64> = quads.u32s().iter().map(|&count| count.into()).collect();
        self.classes.coding(&counts).map_err(|why| why.to_string())
    }

    /// Returns words and escapes of each tile, and whether an element cannot be packed.
    fn sizes(&self, kernel: &mut CpuKernel, table: &Buffer) -> Result<(Vec<u32>, Option<usize>), String> {
        let (sizes, inexact) = (Buffer::new(self.grid.tiles() * 8), Buffer::zeroed(8));
        let args = EncodeCompactArgs {
            table: table.address(),
            sizes: sizes.address(),
            inexact: inexact.address(),
            ..EncodeCompactArgs::default()
        };
        let buffers = [("table", table), ("sizes", &sizes), ("inexact", &inexact)];
        self.launch(kernel, EncodeCompactStage::Sizes, args, &buffers)?;
        let inexact = inexact.u64s()[0];
        Ok((sizes.u32s().to_vec(), (inexact != 0).then_some(!inexact as usize)))
    }

    /// Runs `write` with tiles of these sizes.
    fn write(&self, kernel: &mut CpuKernel, table: &Buffer, sizes: &[u32]) -> Result<Written, String> {
        let (mut tiles, mut words, mut listed) = (Vec::new(), 0, 0);
        for size in sizes.chunks_exact(2) {
            let head = match size[1] {
                0 => 0,
                1 => 1 << 30,
                _ => 1 << 31 | listed,
            };
            tiles.extend([words, head]);
            words += size[0];
            listed += if size[1] > 1 { 1 + size[1] } else { 0 };
        }
        tiles.extend([words, 0]);
        tiles.resize(tiles.len().next_multiple_of(4), 0);
        let bytes: Vec<u8> = tiles.iter().flat_map(|word| word.to_le_bytes()).collect();
        let tiles = Buffer::of(&bytes);
        let streams = Buffer::zeroed((words as usize * 4).next_multiple_of(16));
        let records = Buffer::zeroed((listed as usize * 4).next_multiple_of(16));
        let dense = Buffer::new(self.grid.tiles() * DENSE_TILE_BYTES);
        let args = EncodeCompactArgs {
            table: table.address(),
            tiles: tiles.address(),
            streams: streams.address(),
            records: records.address(),
            dense: dense.address(),
            record_words: listed,
            ..EncodeCompactArgs::default()
        };
        let buffers =
            [("table", table), ("tiles", &tiles), ("streams", &streams), ("records", &records), ("dense", &dense)];
        self.launch(kernel, EncodeCompactStage::Write, args, &buffers)?;
        Ok([&tiles, &records, &streams, &dense].map(|buffer| buffer.slice().to_vec()))
    }
}

fn table_of(coding: &Coding) -> Buffer {
    let bytes: Vec<u8> = coding.kernel_table().iter().flat_map(|entry| entry.to_le_bytes()).collect();
    Buffer::of(&bytes)
}

/// Checks all stages against the oracle.
fn check(kernel: &mut CpuKernel, bytes: &[u8], oracle: &CompactTensor<Vec<u8>>) -> Result<(), String> {
    let shape = (oracle.grid().rows(), oracle.grid().cols());
    let source = Source::new(bytes, shape);
    let coding = source.coding(kernel)?;
    if coding.book() != oracle.book() || source.classes.window() != oracle.window() {
        return Err(format!("{shape:?}: wrong codebook or window"));
    }
    let table = table_of(&coding);
    let (sizes, inexact) = source.sizes(kernel, &table)?;
    if let Some(at) = inexact {
        return Err(format!("{shape:?}: the kernel reported no operand for element {at}"));
    }
    let written = source.write(kernel, &table, &sizes)?;
    let expected = [oracle.tiles(), oracle.escapes(), oracle.streams(), oracle.dense()];
    for ((what, got), expected) in ["tiles", "escapes", "streams", "dense"].into_iter().zip(&written).zip(expected) {
        if got.len() != expected.len() {
            return Err(format!("{shape:?}: {what} has {} bytes instead of {}", got.len(), expected.len()));
        }
        if let Some(at) = got.iter().zip(expected).position(|(a, b)| a != b) {
            return Err(format!("{shape:?}: {what} differs at byte {at}"));
        }
    }
    Ok(())
}

/// Makes a matrix with more distinct quads than a codebook holds. Some of their elements become escapes although they
/// are inside the window.
fn many_quads() -> Case {
    let (n, k) = (64, 64 * 64);
    let bytes: Vec<u8> = (0..n * k)
        .flat_map(|i| {
            let (row, column) = (i / k, i % k);
            // Elements of a quad: rows g and g + 8, columns 2t and 2t + 1.
            let (tile, part) = (column / 64, row % 16 / 8 * 2 + column % 2);
            let quad = row / 16 * 256 + row % 8 * 32 + column % 64 / 2;
            let classes = if quad % 146 == 7 { 5 * (tile * 7 + quad / 146) + 1 } else { 0 };
            let class = classes >> (3 * part) & 7;
            ((108 + 4 * class as u16 + i as u16 % 4) << 7 | i as u16 & 0x807f).to_le_bytes()
        })
        .collect();
    let case = Case::new(n, k, bytes);
    assert!(case.tensor.escape_count() > 100, "{}", case.tensor.escape_count());
    case
}

fn all_cases() -> Vec<Case> {
    let mut cases = cases();
    cases.extend([longest_streams(), many_quads()]);
    // Zeros, from which subtracting the base borrows. The other half of their registers has numbers whose mantissa
    // would propagate the borrow.
    let mut bytes = Weights::TRAINED.bytes(64 * 192, 17);
    for pair in bytes.chunks_exact_mut(4).step_by(300) {
        pair[..2].fill(0);
        pair[2] &= 0x80;
    }
    cases.push(Case::new(64, 192, bytes));
    cases
}

#[test]
fn kernel_bytes_equal_the_cpu_encoder() {
    let mut kernel = build(&[]);
    for case in all_cases() {
        check(&mut kernel, &case.bytes, &case.tensor).unwrap();
    }
}

#[test]
fn an_element_without_exact_operand_is_named() {
    let mut kernel = build(&[]);
    // In a window above 96, the smallest subnormals lose bits. 20 * 64 comes late in the tile's order.
    for (positions, base) in [(vec![70], 97u16), (vec![9000, 8191, 8256], 128), (vec![64 * 20 + 3, 5], 220)] {
        let bytes: Vec<u8> = (0..64 * 192)
            .flat_map(|i| (if positions.contains(&i) { 1 } else { (base + i as u16 % 32) << 7 }).to_le_bytes())
            .collect();
        let source = Source::new(&bytes, (64, 192));
        let table = table_of(&source.coding(&mut kernel).unwrap());
        let at = positions.iter().min().copied().unwrap();
        assert_eq!(source.sizes(&mut kernel, &table).unwrap().1, Some(at));
        let oracle = encode(Matrix::new(&bytes, 64, 192).unwrap(), &Histogram::of(&bytes));
        assert_eq!(oracle.err(), Some(Uncompact::Operand { row: at / 192, col: at % 192 }));
    }
}

/// Weights that changed after their sizes were computed cause no writes outside the sections.
#[test]
fn weights_that_change_stay_in_bounds() {
    let mut kernel = build(&[]);
    let shape = (64, 256);
    let dull = Source::new(&Weights::TRAINED.bytes(64 * 256, 3), shape);
    let table = table_of(&dull.coding(&mut kernel).unwrap());
    let (sizes, _) = dull.sizes(&mut kernel, &table).unwrap();
    // One escape instead of hundreds, a list where there is none, and no words at all.
    let fewer: Vec<u32> = sizes.chunks_exact(2).flat_map(|size| [size[0] / 2, 2]).collect();
    let none = vec![0; sizes.len()];
    let wild = Source { weights: Buffer::of(&Random::new(9).bytes(64 * 256 * 2)), ..dull };
    for sizes in [sizes, fewer, none] {
        wild.write(&mut kernel, &table, &sizes).unwrap();
    }
}

#[test]
fn planted_bugs_are_caught() {
    let header = "unweight/kernels/encode_compact.cuh";
    for (header, from, to) in [
        (header, "(weights.p[i] | kSigns) - bases", "weights.p[i] - bases"),
        (header, "escapes |= 2u << 2 * i;", "escapes |= 1u << 2 * i;"),
        (header, "dense.p[i] &= ~(kLow & 0xffff0000);", ""),
        (header, "| filler << 25;", "| filler << 9;"),
        (header, "(b >> 3 & 0x1c0)", "(b >> 3 & 0x1c1)"),
        (header, "code_of(entry, block < kTileBlocks / 2)", "code_of(entry, true)"),
        (header, "return (bits + 1) & ~1u;", "return bits;"),
        (header, "if (shift + bits > 32) ptx::red_or_shared(word + 4, code >> (32 - shift));", ""),
        (header, "return entry >> 24 << 4 * c;", "return 0;"),
        (header, "(p[6] & 0x00600060u) << 4", "(p[6] & 0x00400040u) << 4"),
        (header, "put(own + low, 2 * i + 1,", "put(own, 2 * i + 1,"),
        (header, "block << 26;", "0;"),
        (header, "own / 2);", "own);"),
        (header, "at < words && first + at < last;", "at < words;"),
        (header, "if (1 + place < room)", "if (head & packed::kListHead)"),
        (header, "~at);", "at);"),
    ] {
        let Some(edit) = Edit::planted(header, from, to) else { continue };
        let mut kernel = build(&[edit]);
        let caught = all_cases().iter().any(|case| check(&mut kernel, &case.bytes, &case.tensor).is_err())
            || changed_weights_are_caught(&mut kernel);
        assert!(caught, "the planted bug was not caught: `{to}` for `{from}`");
    }
}

/// Returns whether the checks of the two tests above fail.
fn changed_weights_are_caught(kernel: &mut CpuKernel) -> bool {
    let source = Source::new(&Weights::TRAINED.bytes(64 * 256, 3), (64, 256));
    let Ok(coding) = source.coding(kernel) else { return true };
    let table = table_of(&coding);
    let wild = Source { weights: Buffer::of(&Random::new(9).bytes(64 * 256 * 2)), ..source };
    if wild.write(kernel, &table, &[0, 2].repeat(4)).is_err() {
        return true;
    }
    let bytes: Vec<u8> =
        (0..64 * 64).flat_map(|i| (if i == 70 { 1 } else { (130 + i as u16 % 32) << 7 }).to_le_bytes()).collect();
    let source = Source::new(&bytes, (64, 64));
    source.coding(kernel).map_or(true, |coding| !matches!(source.sizes(kernel, &table_of(&coding)), Ok((_, Some(70)))))
}
