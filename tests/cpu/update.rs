//! Family `update` in the simulator, against `unweight_format::raw::packed` of the new matrix: equal bytes, no faults
//! on any input, and planted bugs that must be caught.

use crate::harness::{Buffer, CpuKernel, Edit, Run};
use crate::pack::{Case, SPECIAL};
use unweight_codegen::{
    VariantSpec,
    abi::UpdateArgs,
    plan::GemmShape,
    spec::{Arch, UpdateStage, catalog},
};
use unweight_format::raw::packed::Window;
use unweight_format::{Histogram, testing::Random};

/// Row blocks per block of `count` and `lists`.
const GROUP_BLOCKS: usize = 64;

fn build(edits: &[Edit]) -> CpuKernel {
    CpuKernel::all(&catalog::update(Arch::Sm90a).collect::<Vec<_>>(), edits)
}

/// A packed tensor in the memory of a kernel.
struct Tensor {
    n: usize,
    k: usize,
    window: Window,
    packed: Buffer,
    heads: Buffer,
    escapes: Buffer,
    /// Written by `places`.
    first: Buffer,
    /// Bytes of `escapes` that have lists.
    listed: usize,
}

/// New elements: places in the flattened matrix, and values.
type Elements = Vec<(u64, u16)>;

/// What `count` finds.
#[derive(Debug, PartialEq)]
struct Counted {
    histogram: Vec<u32>,
    list_words: u32,
    inexact: Option<usize>,
    digest: u64,
    /// Whether a place is outside of the matrix, and whether places do not ascend.
    faults: [bool; 2],
}

impl Tensor {
    /// Packs a matrix, with memory for the longest lists, and poison after them.
    fn of(case: &Case) -> Self {
        let oracle = case.oracle();
        let mut escapes = oracle.escapes().to_vec();
        let listed = escapes.len();
        escapes.resize(case.n * case.k / 256 * 6 + 64, Buffer::POISON);
        Self {
            n: case.n,
            k: case.k,
            window: oracle.window(),
            packed: Buffer::of(oracle.packed()),
            heads: Buffer::of(oracle.escape_heads()),
            escapes: Buffer::of(&escapes),
            // Zeros: an end that is not written loses updates, while one beyond the updates would be cut to them.
            first: Buffer::zeroed(case.n * case.k / 16 + 4),
            listed,
        }
    }

    fn launch(
        &self,
        kernel: &mut CpuKernel,
        stage: UpdateStage,
        args: UpdateArgs,
        elements: &Elements,
        buffers: &[(&str, &Buffer)],
    ) -> Result<(), String> {
        let index: Vec<u8> = elements.iter().flat_map(|(place, _)| place.to_le_bytes()).collect();
        let values: Vec<u8> = elements.iter().flat_map(|(_, value)| value.to_le_bytes()).collect();
        let (index, values) = (Buffer::of(&index), Buffer::of(&values));
        let args = UpdateArgs {
            packed: self.packed.address(),
            escape_heads: self.heads.address(),
            escapes: self.escapes.address(),
            escape_words: (self.escapes.slice().len() / 4) as u32,
            index: index.address(),
            values: values.address(),
            first: self.first.address(),
            updates: elements.len() as u32,
            base: self.window.base().into(),
            n: self.n as u32,
            k: self.k as u32,
            tile_rows: (self.n / 64) as u32,
            tile_cols: (self.k / 64) as u32,
            ..args
        };
        let mut slices = vec![
            ("packed", self.packed.slice()),
            ("heads", self.heads.slice()),
            ("escapes", self.escapes.slice()),
            ("index", index.slice()),
            ("values", values.slice()),
            ("first", self.first.slice()),
        ];
        slices.extend(buffers.iter().map(|(name, buffer)| (*name, buffer.slice())));
        let run = Run { problem: GemmShape { m: 0, n: args.n, k: args.k }, sms: 2, seed: 3 };
        // SAFETY: the buffers outlive the launch, and the kernel reaches them through checked wrappers only.
        unsafe { kernel.run(&VariantSpec::update(Arch::Sm90a, stage), run, &args, &slices) }
    }

    fn count(&self, kernel: &mut CpuKernel, elements: &Elements) -> Result<Counted, String> {
        let (histogram, list_words, faults) = (Buffer::zeroed(1024), Buffer::zeroed(4), Buffer::zeroed(8));
        let (inexact, digest) = (Buffer::zeroed(8), Buffer::zeroed(8));
        let args = UpdateArgs {
            old_heads: self.heads.address(),
            old_escapes: self.escapes.address(),
            old_escape_words: (self.listed / 4) as u32,
            histogram: histogram.address(),
            list_words: list_words.address(),
            inexact: inexact.address(),
            digest: digest.address(),
            faults: faults.address(),
            ..UpdateArgs::default()
        };
        let buffers = [
            ("histogram", &histogram),
            ("list_words", &list_words),
            ("inexact", &inexact),
            ("digest", &digest),
            ("faults", &faults),
        ];
        self.launch(kernel, UpdateStage::Places, args, elements, &buffers)?;
        self.launch(kernel, UpdateStage::Count, args, elements, &buffers)?;
        let inexact = inexact.u64s()[0];
        Ok(Counted {
            histogram: histogram.u32s(),
            list_words: list_words.u32s()[0],
            inexact: (inexact != 0).then_some(!inexact as usize),
            digest: digest.u64s()[0],
            faults: [0, 1].map(|i| faults.u32s()[i] != 0),
        })
    }

    /// Runs `tiles` and `lists` as a host does, after `places` unless there is garbage in its place. `listed` is the
    /// number of bytes of the new lists.
    fn write(
        &mut self,
        kernel: &mut CpuKernel,
        elements: &Elements,
        (listed, has_places): (usize, bool),
    ) -> Result<(), String> {
        let faults = Buffer::zeroed(8);
        let groups = (self.n / 64 * (self.k / 64) * 4).div_ceil(GROUP_BLOCKS);
        let (group_words, inexact) = (Buffer::zeroed(groups * 4), Buffer::zeroed(8));
        let (old_heads, old_escapes) = (Buffer::of(self.heads.slice()), Buffer::of(self.escapes.slice()));
        let args = UpdateArgs {
            old_heads: old_heads.address(),
            old_escapes: old_escapes.address(),
            old_escape_words: (self.listed / 4) as u32,
            group_words: group_words.address(),
            faults: faults.address(),
            inexact: inexact.address(),
            ..UpdateArgs::default()
        };
        let buffers = [
            ("old_heads", &old_heads),
            ("old_escapes", &old_escapes),
            ("group_words", &group_words),
            ("inexact", &inexact),
        ];
        if has_places {
            self.launch(kernel, UpdateStage::Places, args, elements, &[("faults", &faults)])?;
        }
        self.launch(kernel, UpdateStage::Tiles, args, elements, &buffers)?;
        self.launch(kernel, UpdateStage::Lists, args, elements, &buffers)?;
        self.listed = listed;
        Ok(())
    }

    /// Applies an update to a case and to its packed tensor, and compares all bytes with those of the new matrix.
    fn check(&mut self, kernel: &mut CpuKernel, case: &mut Case, elements: &Elements) -> Result<(), String> {
        let counted = self.count(kernel, elements)?;
        for &(place, value) in elements {
            case.bytes[place as usize * 2..][..2].copy_from_slice(&value.to_le_bytes());
        }
        let (expected, histogram) = (case.oracle(), Histogram::of(&case.bytes));
        assert_eq!(expected.window(), self.window, "the window must stay");
        let words = expected.escapes().len() / 4;
        let same = |what: &str, is_same: bool| if is_same { Ok(()) } else { Err(format!("{what} differs")) };
        same("histogram", (0..=255u8).all(|i| u64::from(counted.histogram[usize::from(i)]) == histogram.count(i)))?;
        same("list_words", counted.list_words as usize == words)?;
        same("inexact or faults", counted.inexact.is_none() && counted.faults == [false; 2])?;
        let listed = counted.list_words as usize * 4;
        self.write(kernel, elements, (listed, true))?;
        same("packed", self.packed.slice() == expected.packed())?;
        same("escape_heads", self.heads.slice() == expected.escape_heads())?;
        same("escapes", self.escapes.slice()[..listed] == *expected.escapes())?;
        let after = self.count(kernel, &Vec::new())?;
        same("the digest", after.digest == counted.digest && after.histogram == counted.histogram)
    }
}

/// Places that ascend, about one in `every`.
fn places(case: &Case, every: u64, random: &mut Random) -> Vec<u64> {
    (0..(case.n * case.k) as u64).filter(|_| random.below(every) == 0).collect()
}

/// Updates of a case, one after another: values inside of the window, of every kind outside of it, and escapes that
/// vanish.
fn updates(case: &Case, seed: u64) -> Vec<Elements> {
    let mut random = Random::new(seed);
    let mut updates = Vec::new();
    for (every, odd) in [(100, 0), (1000, 2), (40, 3), (7, 40), (1, 300), (5000, 1)] {
        let elements = places(case, every, &mut random).into_iter().map(|place| {
            let r = random.bits();
            let is_odd = odd != 0 && random.below(odd) == 0;
            let inside = (r as u16 & 0x807f) | (108 + (r >> 20 & 15) as u16) << 7;
            (place, if is_odd { SPECIAL[(r >> 40) as usize % SPECIAL.len()] } else { inside })
        });
        updates.push(elements.collect());
    }
    // The first and the last element alone, and none.
    let last = (case.n * case.k - 1) as u64;
    updates.extend([vec![(0, 0x8000)], vec![(0, 0x3f80), (last, 0x7fc1)], vec![(last, 0xbf80)], Vec::new()]);
    updates
}

fn cases() -> Vec<Case> {
    vec![
        Case::with(64, 64, 1, &[]),
        Case::with(192, 128, 900, &SPECIAL),
        // A list that is longer than a warp.
        Case::with(128, 320, 500, &SPECIAL),
        // Several groups of lists, the last one not full.
        Case::with(64, 64 * 67, 400, &SPECIAL[..4]),
    ]
}

/// Runs all updates of all cases.
fn check_all(kernel: &mut CpuKernel) -> Result<(), String> {
    for mut case in cases() {
        let mut tensor = Tensor::of(&case);
        for elements in updates(&case, case.k as u64) {
            // Too many escapes for the matrix to be packed are the host's to refuse.
            let mut next = Case { n: case.n, k: case.k, bytes: case.bytes.clone() };
            for &(place, value) in &elements {
                next.bytes[place as usize * 2..][..2].copy_from_slice(&value.to_le_bytes());
            }
            if next.packs() {
                tensor.check(kernel, &mut case, &elements).map_err(|why| format!("{}x{}: {why}", case.n, case.k))?;
            }
        }
    }
    Ok(())
}

#[test]
fn updated_tensors_equal_those_packed_anew() {
    check_all(&mut build(&[])).unwrap();
}

#[test]
fn places_that_are_outside_or_do_not_ascend_are_reported() {
    let mut kernel = build(&[]);
    let case = Case::with(128, 128, 500, &SPECIAL);
    let tensor = Tensor::of(&case);
    let size = (case.n * case.k) as u64;
    for (places, faults) in [
        (vec![3, 4, size - 1], [false, false]),
        (vec![3, 3], [false, true]),
        (vec![9, 4, 20], [false, true]),
        (vec![5, size], [true, false]),
        (vec![u64::MAX, 0], [true, true]),
        // -1 as i64.
        (vec![7, u64::MAX], [true, false]),
    ] {
        let elements = places.iter().map(|&place| (place, 0x3f80)).collect();
        assert_eq!(tensor.count(&mut kernel, &elements).unwrap().faults, faults, "{places:?}");
    }
}

#[test]
fn a_value_without_exact_operand_is_named() {
    let mut kernel = build(&[]);
    let case = Case::new(64, 192, |i| (128 + i as u16 % 16) << 7);
    let tensor = Tensor::of(&case);
    let elements = vec![(70, 0x4000), (8190, 1), (9000, 3)];
    assert_eq!(tensor.count(&mut kernel, &elements).unwrap().inexact, Some(8190));
    assert_eq!(tensor.count(&mut kernel, &elements[..1].to_vec()).unwrap().inexact, None);
}

/// Any places, heads and lists: nothing is read or written outside of the sections.
#[test]
fn any_updates_of_any_bytes_stay_in_bounds() {
    let mut kernel = build(&[]);
    let mut random = Random::new(11);
    let case = Case::with(128, 128, 500, &SPECIAL);
    for round in 0..4 {
        let mut tensor = Tensor::of(&case);
        if round % 2 == 1 {
            tensor.packed = Buffer::of(&random.bytes(tensor.packed.slice().len()));
            tensor.heads = Buffer::of(&random.bytes(tensor.heads.slice().len()));
        }
        let size = (case.n * case.k) as u64;
        let elements: Elements = (0..500)
            .map(|_| (if round < 2 { random.below(size + 9) } else { random.bits() }, random.bits() as u16))
            .collect();
        tensor.count(&mut kernel, &elements).unwrap();
        tensor.first = Buffer::of(&random.bytes(tensor.first.slice().len()));
        tensor.write(&mut kernel, &elements, (0, round % 2 == 0)).unwrap();
    }
}

#[test]
fn planted_bugs_are_caught() {
    let header = "unweight/kernels/update.cuh";
    for (from, to) in [
        ("const u32 pair = column % packed::kStepColumns;", "const u32 pair = column % 8;"),
        ("row % 8 * 4 + pair % 8 / 2", "row % 8 * 4 + pair % 4 / 2"),
        ("pair / 8 * 2 + row / 8;", "pair / 8 * 2;"),
        ("shfl_sync_idx(sum, r) <= i ? 1 : 0", "shfl_sync_idx(sum, r) < i ? 1 : 0"),
        ("if (updates.total != 0) pack::store_container", "if (updates.total > 1) pack::store_container"),
        ("& packed::kListHead) == 0) return;", "& packed::kListHead) != 2) return;"),
        ("ptx::red_add_global(args.list_words, 1 + count)", "ptx::red_add_global(args.list_words, count)"),
        ("return element % 2 ? pair >> 16 : pair & 0xffff;", "return pair & 0xffff;"),
        ("from = i == 0 ? 0 : before / kCell + 1;", "from = i == 0 ? 0 : before / kCell + 2;"),
        ("for (u32 j = lane; j < number; j += 32)", "for (u32 j = lane; j < number; j += 33)"),
        ("i == args.updates ? cells + 1 : place", "i == args.updates ? cells : place"),
    ] {
        let Some(edit) = Edit::planted(header, from, to) else { continue };
        assert!(check_all(&mut build(&[edit])).is_err(), "the planted bug was not caught: `{to}` for `{from}`");
    }
}
