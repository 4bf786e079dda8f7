//! Packs thousands of units of hostile values; the bytes must equal the oracle's. `KV_ATTACK_ROUNDS` sets the rounds.

use super::*;

/// Zeros, subnormals, the smallest and largest numbers, infinities, quiet and signalling NaN.
const SPECIAL: [u16; 18] = [
    0x0000, 0x8000, 0x0001, 0x8001, 0x007f, 0x807f, 0x0080, 0x8080, 0x7f00, 0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7f81,
    0xff81, 0x7fbf, 0x7fc0, 0xffff,
];

fn of<T: Copy>(random: &mut Random, all: &[T]) -> T {
    all[random.below(all.len() as u64) as usize]
}

fn value(random: &mut Random, exponent: u32) -> u16 {
    random.bits() as u16 & 0x807f | (exponent as u16) << 7
}

pub fn rounds(default: u64) -> u64 {
    std::env::var("KV_ATTACK_ROUNDS").ok().and_then(|count| count.parse().ok()).unwrap_or(default)
}

/// Returns the values of a unit, `[64][head_dim]`. With `extreme`, they may include infinities and NaN.
pub fn hostile(random: &mut Random, head_dim: u32, extreme: bool) -> Vec<u16> {
    let count = (PAGE_TOKENS * head_dim) as usize;
    match random.below(8) {
        0 if extreme => return (0..count).map(|_| of(random, &SPECIAL)).collect(),
        1 if extreme => return (0..count).map(|_| random.bits() as u16).collect(),
        2 if extreme => return (0..count).map(|_| value(random, 255)).collect(),
        3 => return (0..count).map(|_| value(random, 0)).collect(),
        _ => (),
    }
    let bases: Vec<u32> = (0..head_dim / 16)
        .map(|_| match (extreme, random.below(3)) {
            (true, 0) => of(random, &[0, 1, 30, 31, 32, 239, 240]),
            (true, _) => random.below(241) as u32,
            (false, _) => 100 + random.below(20) as u32,
        })
        .collect();
    let mut values: Vec<u16> = (0..count)
        .map(|at| {
            let above = if at < head_dim as usize { 15 } else { random.below(16) as u32 };
            value(random, bases[at % head_dim as usize / 16] + above)
        })
        .collect();
    let slots = if head_dim <= 80 { 8 } else { 16 };
    let escapes = of(random, &[0, 1, slots - 1, slots, slots, slots + 1]);
    let (pattern, tile, column) = (random.below(4), random.below(4), random.below(head_dim.into()));
    let mut escape_positions = std::collections::BTreeSet::new();
    for _ in 0..500 {
        if escape_positions.len() as u64 == escapes {
            break;
        }
        let (token, index) = match pattern {
            0 => (tile * 16 + random.below(16), random.below(head_dim.into())),
            1 => (random.below(64), column),
            2 => (tile * 16 + of(random, &[3, 11]), column / 16 * 16 + of(random, &[2, 3, 10, 11])),
            _ => (random.below(64), random.below(head_dim.into())),
        };
        let base = bases[index as usize / 16];
        let at = token as usize * head_dim as usize + index as usize;
        if base > 0 && escape_positions.insert(at) {
            let below = of(random, &[1, 2, 15, 16, 30, 31, base]);
            values[at] = value(random, base.saturating_sub(below));
        }
    }
    values
}

/// Returns a page of such units in the layout of bf16 pages.
pub fn hostile_page(random: &mut Random, heads: Heads) -> Vec<u16> {
    let mut page = vec![0; heads.page_elements()];
    for unit in page.chunks_mut(heads.unit_values()) {
        let values = hostile(random, heads.head_dim, true);
        for (token, index) in (0..PAGE_TOKENS).flat_map(|t| (0..heads.head_dim).map(move |i| (t, i))) {
            let at = unweight_codegen::kv::element(heads.head_dim, token, index) as usize;
            unit[at] = values[(token * heads.head_dim + index) as usize];
        }
    }
    page
}

#[test]
fn hostile_pages_are_packed_as_by_the_oracle() {
    let mut all = Counts::default();
    for head_dim in HeadDim::ALL.map(HeadDim::get) {
        let chunk_spec = chunk_spec(head_dim);
        let step_spec = match head_dim {
            16 | 32 | 128 => Some(spec(&format!("kv_pack_step_d{head_dim}"))),
            _ => None,
        };
        let specs: Vec<VariantSpec> = std::iter::once(chunk_spec).chain(step_spec).collect();
        let mut kernel = CpuKernel::all(&specs, &[]);
        for seed in 0..rounds(6) {
            let random = &mut Random::new(seed * 977 + u64::from(head_dim));
            let heads = Heads { head_dim, kv_heads: 1 + random.below(3) as u32 };
            let free = of(random, &[37, 37, 20, 3, 0]);
            let source: Vec<u16> = (0..8).flat_map(|_| hostile_page(random, heads)).chain([POISON; GAP]).collect();
            let call = Call { source, ..chunk(&mut Random::new(1), Heads { head_dim: 16, kv_heads: 1 }) };
            let cache = new_cache(heads, (1, 7), (37, free));
            let done =
                call.run(&mut kernel, &chunk_spec, &cache, seed).unwrap_or_else(|e| panic!("{head_dim} {seed}: {e}"));
            let jobs = chunk_jobs(&call, &cache);
            let counts = cache.check_packed(&done.cache, &jobs).unwrap_or_else(|e| panic!("{head_dim} {seed}: {e}"));
            assert_eq!((done.lost[0] != 0, done.fault), (counts.lost > 0, 0));
            all += counts;
            let Some(step_spec) = step_spec else { continue };
            let positions: Vec<u32> = (0..5).map(|_| of(random, &[63, 127, 191, 62, 64, NONE, 0])).collect();
            let mut call = step(&mut Random::new(1), Heads { head_dim: 16, kv_heads: 1 }, 2, &positions);
            call.blocks = 1 + random.below(40) as u32;
            call.source = (0..2)
                .flat_map(|_| {
                    let mut layer: Vec<u16> =
                        (0..call.source_pages).flat_map(|_| hostile_page(random, heads)).collect();
                    layer.extend([POISON; GAP]);
                    layer
                })
                .collect();
            let cache = new_cache(heads, (2, 15), (101, of(random, &[101, 7, 0])));
            let done =
                call.run(&mut kernel, &step_spec, &cache, seed).unwrap_or_else(|e| panic!("{head_dim} {seed}: {e}"));
            let counts = cache.check_packed(&done.cache, &step_jobs(&call, &cache));
            all += counts.unwrap_or_else(|e| panic!("{step_spec} {seed}: {e}"));
        }
    }
    eprintln!("{all:?}");
    assert!(all.plain > 20 && all.with_slots > 100 && all.bf16 > 100 && all.lost > 50, "{all:?}");
}
