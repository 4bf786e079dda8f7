//! The fused FP8 addition: sums of the CPU decoder's values, no faults on random bytes, and planted bugs that must be
//! caught.

use crate::harness::{Buffer, CpuKernel, Edit};
use unweight_format::testing::Random;
use unweight_rivals::{
    cuda::tans::{TansArgs, add, place, plain},
    tans::{Encoded, QWEN3_14B, encode, oracle::is_sum, table},
};

fn build(edits: &[Edit]) -> CpuKernel {
    CpuKernel::external(&[add(super::ARCH), plain(super::ARCH)], edits)
}

/// Returns FP8 bytes with the exponents of real weights, and occasionally a random exponent.
fn vector(bytes: usize, seed: u64, odd: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut exponent = |bits: u64| {
        if random.below(odd) == 0 {
            return bits as u8 & 15;
        }
        let mut left = (bits >> 32) as f32 / 4_294_967_296.0;
        let found = QWEN3_14B.iter().position(|share| {
            left -= share;
            left < 0.0
        });
        found.unwrap_or(13) as u8
    };
    let mut more = Random::new(seed ^ 0x55);
    (0..bytes).map(|_| more.bits()).map(|bits| bits as u8 & 0x87 | exponent(bits) << 3).collect()
}

struct Case {
    bytes: [Vec<u8>; 2],
    coded: [Encoded; 2],
}

/// The sections of both vectors in memory.
struct Parts {
    slabs: [Buffer; 2],
    states: [Buffer; 2],
    partial: [Buffer; 2],
    offsets: [Buffer; 2],
    rest: [Buffer; 2],
}

impl Parts {
    fn of(coded: &[Encoded; 2]) -> Self {
        let each = |part: fn(&Encoded) -> Vec<u8>| [Buffer::of(&part(&coded[0])), Buffer::of(&part(&coded[1]))];
        Self {
            slabs: each(|one| one.slabs.iter().flat_map(|slab| slab.to_le_bytes()).collect()),
            states: each(|one| one.states.iter().flat_map(|state| state.to_le_bytes()).collect()),
            partial: each(|one| one.partial.clone()),
            offsets: each(|one| one.offsets.iter().flat_map(|offset| offset.to_le_bytes()).collect()),
            rest: each(|one| one.rest.clone()),
        }
    }
}

impl Case {
    fn new(bytes: usize, per_stream: usize, odd: u64) -> Self {
        let bytes = [vector(bytes, 1, odd), vector(bytes, 2, odd)];
        let coded = [0, 1].map(|i| encode(&bytes[i], per_stream, &QWEN3_14B).unwrap());
        assert_eq!(coded[1].decode().unwrap(), bytes[1]);
        Self { bytes, coded }
    }

    fn run(&self, kernel: &mut CpuKernel, parts: &Parts) -> Result<(Vec<u8>, u32), String> {
        let entries = table(&self.coded[0].frequencies).unwrap();
        let entries = Buffer::of(&entries.iter().flat_map(|entry| entry.to_le_bytes()).collect::<Vec<_>>());
        let (out, faults) = (Buffer::new(self.bytes[0].len()), Buffer::zeroed(4));
        let args = TansArgs {
            slabs_a: parts.slabs[0].address(),
            slabs_b: parts.slabs[1].address(),
            states_a: parts.states[0].address(),
            states_b: parts.states[1].address(),
            partial_a: parts.partial[0].address(),
            partial_b: parts.partial[1].address(),
            offsets_a: parts.offsets[0].address(),
            offsets_b: parts.offsets[1].address(),
            rest_a: parts.rest[0].address(),
            rest_b: parts.rest[1].address(),
            table: entries.address(),
            out: out.address(),
            faults: faults.address(),
            words_a: (parts.slabs[0].slice().len() / 4) as u32,
            words_b: (parts.slabs[1].slice().len() / 4) as u32,
            streams: self.coded[0].states.len() as u32,
            tiles: (self.coded[0].per_stream / 16) as u32,
        };
        let mut buffers = vec![("table", entries.slice()), ("out", out.slice()), ("faults", faults.slice())];
        for i in 0..2 {
            let parts = [&parts.slabs[i], &parts.states[i], &parts.partial[i], &parts.offsets[i], &parts.rest[i]];
            buffers.extend(["slabs", "states", "partial", "offsets", "rest"].into_iter().zip(parts.map(Buffer::slice)));
        }
        let source = add(super::ARCH);
        // SAFETY: the buffers outlive the launch, and the kernel reaches them through checked wrappers only.
        unsafe { kernel.run_external(&source, (args.streams.div_ceil(source.threads), 7), &args, &buffers) }?;
        Ok((out.slice().to_vec(), faults.u32s()[0]))
    }

    fn check(&self, kernel: &mut CpuKernel) -> Result<(), String> {
        let (out, faults) = self.run(kernel, &Parts::of(&self.coded))?;
        let (per_stream, streams) = (self.coded[0].per_stream, self.coded[0].states.len());
        let [a, b] = &self.bytes;
        let wrong = (0..a.len()).find(|&i| !is_sum(out[place(i, per_stream, streams)], a[i], b[i]));
        match (wrong, faults) {
            (None, 0) => Ok(()),
            _ => Err(format!("{} bytes, {per_stream} per stream: {wrong:?} differs, {faults} faults", a.len())),
        }
    }
}

fn cases() -> Vec<Case> {
    vec![Case::new(64, 16, 1), Case::new(48 * 300, 48, 50), Case::new(512 * 9, 512, 1000), Case::new(1024, 1024, 3)]
}

#[test]
fn sums_match_the_bytes() {
    let mut kernel = build(&[]);
    for case in cases() {
        case.check(&mut kernel).unwrap();
    }
    // Every pair of bytes, uncoded.
    let a: Vec<u8> = (0..=0xffff_u32).map(|i| (i >> 8) as u8).collect();
    let b: Vec<u8> = (0..=0xffff_u32).map(|i| i as u8).collect();
    let (first, second, out) = (Buffer::of(&a), Buffer::of(&b), Buffer::new(a.len()));
    let (rest_a, rest_b, to) = (first.address(), second.address(), out.address());
    let args = TansArgs { rest_a, rest_b, out: to, tiles: (a.len() / 16) as u32, ..TansArgs::default() };
    let buffers = [("a", first.slice()), ("b", second.slice()), ("out", out.slice())];
    let source = plain(super::ARCH);
    // SAFETY: as above.
    unsafe { kernel.run_external(&source, (args.tiles.div_ceil(source.threads), 7), &args, &buffers) }.unwrap();
    let wrong = (0..a.len()).find(|&i| !is_sum(out.slice()[i], a[i], b[i]));
    assert_eq!(wrong.map(|i| (a[i], b[i], out.slice()[i])), None);
}

#[test]
fn any_bytes_stay_in_bounds() {
    let mut kernel = build(&[]);
    let case = Case::new(48 * 300, 48, 50);
    let mut random = Random::new(31);
    for turn in 0..8 {
        let mut parts = Parts::of(&case.coded);
        let part = match turn % 4 {
            0 => &mut parts.slabs,
            1 => &mut parts.states,
            2 => &mut parts.partial,
            _ => &mut parts.offsets,
        };
        part[turn / 4] = Buffer::of(&random.bytes(part[turn / 4].slice().len()));
        let (_, faults) = case.run(&mut kernel, &parts).unwrap();
        // Other bits may decode to other bytes; a stream with other states occasionally has too few bits.
        assert!(faults > 0 || turn % 4 == 0 || turn % 4 == 2, "turn {turn}: the damage was not counted as a fault");
    }
}

#[test]
#[ignore = "compiles each kernel for each bug: .ci/nightly"]
fn planted_bugs_are_caught() {
    let header = "rivals/tans.cuh";
    let cases = cases();
    for (from, to) in [
        ("used = (32 - valid) & 31;", "used = 0;"),
        ("window >> 1 >> (31 - count)", "window >> (31 - count)"),
        ("slab -= kBlockStreams;", "slab -= 1;"),
        ("ptx::bar_sync();  // orders the table before the lookups of every warp\n", "\n"),
        ("((entry >> 16) | value) & (kStates - 1)", "(entry >> 16) & (kStates - 1)"),
        ("(first >> 4) | (first & 15) << 8", "(first & 15) | (first >> 4) << 8"),
        ("(rest & 0xf000) << 12;", "(rest & 0xf000) << 8;"),
        ("if (used >= 32) {", "if (used > 32) {"),
        ("static_cast<u64>(tile) * args.streams + stream;", "static_cast<u64>(stream) * args.tiles + tile;"),
        ("(spread & 0x08080808u) << 4", "(spread & 0x08080808u) << 3"),
    ] {
        let mut kernel = build(&[Edit { header, from, to }]);
        let caught = cases.iter().any(|case| case.check(&mut kernel).is_err());
        assert!(caught, "the planted bug was not caught: `{to}` for `{from}`");
    }
}
