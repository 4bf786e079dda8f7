//! Packed KV pages for tests, benchmarks and `unweight-bench stress`: units in both encodings, and packed KV caches for
//! attention problems.

mod cache;
mod device;

use std::{collections::BTreeSet, ops::Range};

use unweight_codegen::kv::{
    self, KvHalf, PAGE_TOKENS,
    packed::{self, EncodedUnit, KIND_BF16, KIND_LOST, PAGE_TILES, RECORD_ENDS, RECORD_HEAD, RECORD_KIND},
};
use unweight_format::testing::Random;

use crate::attention::{PAD, POISON, Problem};
pub use cache::{Cache, Counts, Job, UNWRITTEN};
pub use device::DevicePages;

/// The heads of a layer. Units are numbered `[page][kv_head][K | V]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Elements per head.
    pub head_dim: u32,
    /// KV heads.
    pub kv_heads: u32,
}

impl Heads {
    /// Returns the number of values per unit.
    pub fn unit_values(self) -> usize {
        (PAGE_TOKENS * self.head_dim) as usize
    }

    /// Returns the number of units per page.
    pub fn page_units(self) -> usize {
        2 * self.kv_heads as usize
    }

    /// Returns the number of values per page.
    pub fn page_elements(self) -> usize {
        self.page_units() * self.unit_values()
    }

    /// Returns page `index` of BF16 pages.
    pub fn page_of(self, pages: &[u16], index: usize) -> &[u16] {
        &pages[index * self.page_elements()..][..self.page_elements()]
    }

    /// Returns the bytes of a packed page.
    pub fn page_bytes(self) -> usize {
        (self.kv_heads * packed::page_head_bytes(self.head_dim)) as usize
    }

    /// Returns the bytes of a record.
    pub fn record_bytes(self) -> usize {
        packed::record_bytes(self.head_dim) as usize
    }

    /// Returns the bytes of the records of a page.
    pub fn page_record_bytes(self) -> usize {
        self.page_units() * self.record_bytes()
    }

    /// Returns the bytes of a bf16 unit.
    pub fn bf16_bytes(self) -> usize {
        packed::unit_bytes(self.head_dim) as usize
    }

    /// Returns the byte offset of the record of a unit.
    pub fn record_at(self, unit: usize) -> usize {
        unit * self.record_bytes()
    }

    /// Returns the byte offset of a tile of a unit in packed pages.
    pub fn tile_at(self, unit: usize, tile: usize) -> usize {
        let (head, half) = (unit / 2, unit % 2);
        (head * PAGE_TILES as usize * 2 + tile * 2 + half) * self.tile_bytes()
    }

    /// Returns the bytes of a tile of K or of V.
    pub fn tile_bytes(self) -> usize {
        packed::tile_bytes(self.head_dim) as usize
    }

    /// Returns a unit of bf16 pages as `[64 tokens][head_dim]`.
    pub fn values(self, pages: &[u16], unit: usize) -> Vec<u16> {
        let stored = &pages[unit * self.unit_values()..][..self.unit_values()];
        self.element_offsets().map(|offset| stored[offset]).collect()
    }

    fn element_offsets(self) -> impl Iterator<Item = usize> {
        let head_dim = self.head_dim;
        (0..PAGE_TOKENS).flat_map(move |t| (0..head_dim).map(move |i| kv::element(head_dim, t, i) as usize))
    }

    /// Encodes a unit of bf16 pages with the oracle.
    pub fn encode(self, pages: &[u16], unit: usize) -> EncodedUnit {
        packed::encode_unit(self.head_dim, half_of(unit), &self.values(pages, unit))
    }

    /// Stores an encoded unit. `index` is the index of its BF16 unit, for a unit that has one.
    pub fn put(self, pages: &mut [u8], records: &mut [u8], unit: usize, encoded: &EncodedUnit, index: u32) {
        let record = &mut records[self.record_at(unit)..][..self.record_bytes()];
        record.copy_from_slice(&encoded.record);
        if encoded.bf16.is_some() {
            set_index(record, index);
            return;
        }
        for (tile, bytes) in encoded.tiles.iter().enumerate() {
            pages[self.tile_at(unit, tile)..][..bytes.len()].copy_from_slice(bytes);
        }
    }

    /// Returns the record of a unit whose values were not stored.
    pub fn lost_record(self) -> Vec<u8> {
        let mut record = vec![0; self.record_bytes()];
        record[RECORD_KIND] = KIND_LOST;
        record
    }
}

/// Returns the index of the BF16 unit that a record refers to.
fn index_of(record: &[u8]) -> u32 {
    u32::from_le_bytes(record[RECORD_ENDS..RECORD_HEAD].try_into().expect("four bytes"))
}

/// Sets the index of the BF16 unit that a record refers to.
pub fn set_index(record: &mut [u8], index: u32) {
    record[RECORD_ENDS..RECORD_HEAD].copy_from_slice(&index.to_le_bytes());
}

/// Returns whether a unit holds K or V.
pub fn half_of(unit: usize) -> KvHalf {
    if unit.is_multiple_of(2) { KvHalf::Key } else { KvHalf::Value }
}

/// The number of kinds of unit that [`unit`] makes.
const KINDS: u64 = 11;

/// An exponent: relative to the base of its step, or absolute.
#[derive(Clone, Copy)]
enum Outlier {
    From(i32),
    Exponent(u32),
}

/// Returns a unit of one of [`KINDS`], in the layout of a bf16 page.
fn unit(random: &mut Random, heads: Heads, kind: u64) -> Vec<u16> {
    use Outlier::{Exponent, From};
    let slots = u64::from(packed::slots(heads.head_dim));
    // The base of each step.
    let bases: Vec<u32> = (0..heads.head_dim / 16)
        .map(|step| match kind {
            0 => 112,
            3 | 7 => 0,
            // Subnormals are inside the window of even steps and escapes of odd steps.
            4 => step % 2,
            5 => 240,
            _ => 100 + random.below(25) as u32,
        })
        .collect();
    // The range of exponents above the base that most elements have, the number of outliers, and their exponents.
    let (range, outlier_count, outliers) = match kind {
        0 | 3 => (1, 0, vec![]),
        // As many values below the window as there are slots, and one more.
        1 | 2 => (16, slots + kind - 1, vec![Exponent(0), From(-31), From(-30), From(-12), From(-1)]),
        4 => (16, slots, vec![Exponent(0)]),
        // Infinities and NaN among the largest values, and among other values.
        5 => (16, slots, vec![Exponent(0), From(-31), From(-1)]),
        6 => (16, 3, vec![Exponent(255)]),
        // Any bits.
        7 => (256, 0, vec![]),
        // Channels far above the others.
        8 => (8, slots - 1, vec![From(-1), From(-5)]),
        // The last exponent that has a code, or the one after.
        9 => (16, 2, vec![From(-31 - random.below(2) as i32)]),
        // A step that has its largest exponent once, or not at all.
        _ => (15, 2, vec![From(-1), From(15)]),
    };
    let large = random.below(16) as usize;
    let head_dim = heads.head_dim as usize;
    let mut values: Vec<u16> = (0..heads.unit_values())
        .map(|at| match kind {
            // Near one, with frequency falling as the exponent falls.
            0 => {
                let below = random.bits().trailing_zeros().min(30);
                with_exponent(random, 127 - below)
            }
            3 => random.bits() as u16 & 0x8000,
            _ => {
                let above = if kind == 8 && at % 16 == large { 8 } else { 0 };
                let exponent = bases[at % head_dim / 16] + above + random.below(range) as u32;
                with_exponent(random, exponent)
            }
        })
        .collect();
    let mut positions = BTreeSet::new();
    while (positions.len() as u64) < outlier_count {
        positions.insert(random.below(values.len() as u64) as usize);
    }
    for (at, outlier) in positions.into_iter().zip(outliers.into_iter().cycle()) {
        let exponent = match outlier {
            From(distance) => bases[at % head_dim / 16]
                .checked_add_signed(distance)
                .expect("the base is large enough for the distance"),
            Exponent(exponent) => exponent,
        };
        values[at] = with_exponent(random, exponent);
    }
    let mut unit = vec![0; values.len()];
    heads.element_offsets().zip(values).for_each(|(offset, value)| unit[offset] = value);
    unit
}

/// Returns a page with units of several kinds.
pub fn page(random: &mut Random, heads: Heads) -> Vec<u16> {
    (0..heads.page_units())
        .flat_map(|_| {
            let kind = random.below(KINDS);
            unit(random, heads, kind)
        })
        .collect()
}

/// Returns a random value with this exponent.
pub fn with_exponent(random: &mut Random, exponent: u32) -> u16 {
    random.bits() as u16 & 0x807f | (exponent as u16) << 7
}

/// The pages of an attention problem with a packed KV cache. The page of each row's newest token is hot, and the pages
/// before are packed.
#[derive(Clone, Debug)]
pub struct PackedPages {
    /// The heads of the layer.
    pub heads: Heads,
    /// Packed pages.
    pub packed: Vec<u8>,
    /// Records of all units.
    pub records: Vec<u8>,
    /// BF16 units.
    pub unit_pages: Vec<u8>,
    /// The number of BF16 units.
    pub units: u32,
    /// Hot pages.
    pub hot: Vec<u16>,
    /// The number of hot pages.
    pub hot_pages: u32,
    /// u32 `[m]`: the hot page of each row.
    pub hot_table: Vec<u32>,
    /// The problem's page table without the pages of newest tokens and the pages after them.
    pub table: Vec<u32>,
}

impl PackedPages {
    /// Fills unused pages and records. No encoder writes such a record.
    const UNUSED: u8 = 0xee;
    const SPARE: u32 = 2;

    /// Packs the full pages of a problem with the oracle.
    pub fn of(problem: &Problem) -> Self {
        let heads = Heads { head_dim: problem.case.head_dim as u32, kv_heads: problem.case.kv_heads as u32 };
        let pages = problem.pages as usize;
        let hot_pages = problem.case.positions.len() as u32 + Self::SPARE;
        // A row without a token has no hot page.
        let hot_of = |(row, &position): (usize, &u32)| if position == PAD { PAD } else { hot_pages - 1 - row as u32 };
        let hot_table = problem.case.positions.iter().enumerate().map(hot_of).collect();
        let mut result = Self {
            heads,
            packed: vec![Self::UNUSED; pages * heads.page_bytes()],
            records: vec![Self::UNUSED; pages * heads.page_record_bytes()],
            unit_pages: Vec::new(),
            units: 0,
            hot: Vec::new(),
            hot_pages,
            hot_table,
            table: vec![u32::MAX; problem.table.len()],
        };
        result.hot = result.hot_from(problem, &problem.layer);
        for (row, page) in full_pages(problem) {
            result.table[row * problem.table_pages + page] = problem.table[row * problem.table_pages + page];
            let page = problem.table[row * problem.table_pages + page] as usize;
            for unit in page * heads.page_units()..(page + 1) * heads.page_units() {
                let encoded = heads.encode(&problem.layer, unit);
                heads.put(&mut result.packed, &mut result.records, unit, &encoded, result.units);
                if let Some(bytes) = encoded.bf16 {
                    result.unit_pages.extend(bytes);
                    result.units += 1;
                }
            }
        }
        result.reverse_units();
        result
    }

    /// Returns the hot pages of a layer's rows. All other hot pages are NaN.
    pub fn hot_from(&self, problem: &Problem, layer: &[u16]) -> Vec<u16> {
        let elements = self.heads.page_elements();
        let mut hot = vec![POISON; self.hot_pages as usize * elements];
        for (to, from) in self.hot_offsets(problem) {
            hot[to..][..elements].copy_from_slice(&layer[from..][..elements]);
        }
        hot
    }

    /// Returns the element offset of each row's hot page among the hot pages and in the layer.
    fn hot_offsets(&self, problem: &Problem) -> Vec<(usize, usize)> {
        let elements = self.heads.page_elements();
        let rows = problem.case.positions.iter().enumerate().filter(|(_, position)| **position != PAD);
        let offsets = rows.map(|(row, position)| {
            let page = problem.table[row * problem.table_pages + (position / PAGE_TOKENS) as usize];
            (self.hot_table[row] as usize * elements, page as usize * elements)
        });
        offsets.collect()
    }

    /// Reverses the order of BF16 units and puts a unit of NaN in front.
    fn reverse_units(&mut self) {
        let bytes = self.heads.bf16_bytes();
        let poison = POISON.to_le_bytes().repeat(bytes / 2);
        let reversed = std::iter::once(&poison[..]).chain(self.unit_pages.chunks(bytes).rev());
        let reversed = reversed.flatten().copied().collect();
        for record in
            self.records.chunks_mut(self.heads.record_bytes()).filter(|record| record[RECORD_KIND] == KIND_BF16)
        {
            set_index(record, self.units - index_of(record));
        }
        (self.unit_pages, self.units) = (reversed, self.units + 1);
    }

    /// Returns the record of a unit.
    pub fn record(&mut self, unit: usize) -> &mut [u8] {
        let (at, bytes) = (self.heads.record_at(unit), self.heads.record_bytes());
        &mut self.records[at..][..bytes]
    }

    /// Counts the units of used pages: packed without slots, packed with slots, bf16.
    pub fn kinds(&self) -> [usize; 3] {
        let mut kinds = [0; 3];
        for record in
            self.records.chunks(self.heads.record_bytes()).filter(|record| record[RECORD_KIND] != Self::UNUSED)
        {
            kinds[if record[RECORD_KIND] == KIND_BF16 { 2 } else { usize::from(record[RECORD_ENDS + 3] != 0) }] += 1;
        }
        kinds
    }
}

/// Returns the row and the table index of each packed page with a token that the row sees.
pub fn full_pages(problem: &Problem) -> Vec<(usize, usize)> {
    let rows = problem.case.positions.iter().enumerate().filter(|(_, position)| **position != PAD);
    let of_row = |(row, position): (usize, &u32)| {
        let first = problem.case.first_token(*position) / PAGE_TOKENS;
        (first..position / PAGE_TOKENS).map(move |page| (row, page as usize))
    };
    rows.flat_map(of_row).collect()
}

/// Puts values outside the windows into full pages: a few into some units, and more than a record has slots for into
/// others. Only changes queries and tokens that the row sees.
pub fn salt(problem: &mut Problem, seed: u64) {
    let random = &mut Random::new(seed ^ 0x5a17);
    let (head_dim, slots) = (problem.case.head_dim, u64::from(packed::slots(problem.case.head_dim as u32)));
    clear_queries(problem);
    for (row, page) in full_pages(problem) {
        let position = problem.case.positions[row];
        let first = problem.case.first_token(position).max(page as u32 * PAGE_TOKENS);
        let tokens = first..(page as u32 + 1) * PAGE_TOKENS;
        for head in 0..2 * problem.case.kv_heads {
            let bases: Option<Vec<u32>> =
                (random.below(2) == 0).then(|| (0..head_dim / 16).map(|_| 118 + random.below(8) as u32).collect());
            if let Some(bases) = &bases {
                spread(problem, random, (row, head), tokens.clone(), bases);
            }
            let count = match random.below(5) {
                0 => 0,
                1 => 3 * slots,
                _ => 1 + random.below(slots - 4),
            };
            let mut last = (tokens.end, 0);
            for _ in 0..count {
                let random_token = first + random.below(u64::from(tokens.end - first)) as u32;
                // A lane has two escapes if both are in the same channel, in tokens of one tile that are 8 apart.
                let pair = tokens.contains(&(last.0 ^ 8)) && random.below(4) == 0;
                last = if pair { (last.0 ^ 8, last.1) } else { (random_token, random.below(head_dim as u64) as usize) };
                let (token, index) = last;
                let exponents = match &bases {
                    Some(bases) => [0, 1, 1, 2, 31].map(|below| below_base(bases[index / 16], below)),
                    None => [0, 92, 99, 107, 130],
                };
                let exponent = exponents[random.below(5) as usize];
                let at = problem.element(row, token, head, index);
                problem.layer[at] = with_exponent(random, exponent);
            }
        }
    }
}

/// Returns the exponent `below` the base; 0 stands for exponent 0.
fn below_base(base: u32, below: u32) -> u32 {
    if below == 0 { 0 } else { base - below }
}

/// Gives each step a base through its first channel. The other channels have the smallest exponents of the window, so
/// an escape among them is about as large as they are and contributes to sums.
fn spread(problem: &mut Problem, random: &mut Random, (row, head): (usize, usize), tokens: Range<u32>, bases: &[u32]) {
    for (token, index) in tokens.flat_map(|token| (0..16 * bases.len()).map(move |index| (token, index))) {
        let above = if index % 16 == 0 { 15 } else { random.below(2) as u32 };
        let at = problem.element(row, token, head, index);
        problem.layer[at] = with_exponent(random, bases[index / 16] + above);
    }
}

/// Sets queries to 0 where [`spread`] makes keys large, also after rotation, so that scores depend on the other
/// channels.
fn clear_queries(problem: &mut Problem) {
    let (columns, queries, head_dim) = (problem.case.columns(), problem.case.out_columns(), problem.case.head_dim);
    let rows = problem.qkv.chunks_mut(columns).chain(problem.bias.chunks_mut(columns));
    for query in rows.flat_map(|row| row[..queries].chunks_mut(head_dim)) {
        query.iter_mut().step_by(8).for_each(|value| *value = 0);
    }
}

/// Puts values that are hard to store into full pages: those of [`salt`], then in rotation several escapes in one lane,
/// zeros and subnormals, and infinities if requested. Only changes tokens that the row sees.
pub fn harden(problem: &mut Problem, seed: u64, infinities: bool) {
    salt(problem, seed);
    let random = &mut Random::new(seed ^ 0x4a2d);
    for (index, (row, page)) in full_pages(problem).into_iter().enumerate().filter(|(index, _)| index % 4 != 0) {
        let first = problem.case.first_token(problem.case.positions[row]);
        let tokens = page as u32 * PAGE_TOKENS..(page as u32 + 1) * PAGE_TOKENS;
        let head_dim = problem.case.head_dim;
        for head in 0..2 * problem.case.kv_heads {
            for (token, i) in
                tokens.clone().filter(|token| *token >= first).flat_map(|t| (0..head_dim).map(move |i| (t, i)))
            {
                let exponent = match index % 4 {
                    2 => u32::from(head % 2 == 1) * random.below(15) as u32,
                    _ => 116 + random.below(11) as u32,
                };
                let value = with_exponent(random, exponent);
                let at = problem.element(row, token, head, i);
                problem.layer[at] = if index % 4 == 2 && head % 4 == 0 { value & 0x8000 } else { value };
            }
            let mut put = |token: u32, i: u32, value: u16| {
                if token >= first {
                    let at = problem.element(row, token, head, i as usize);
                    problem.layer[at] = value;
                }
            };
            match index % 4 {
                // The eight values that a lane holds for one step of one tile.
                1 => {
                    let (tile, lane) = (random.below(u64::from(PAGE_TILES)) as u32, random.below(32) as u32);
                    let step = random.below(head_dim as u64 / 16) as u32;
                    for (register, high) in (0..4).flat_map(|register| [(register, false), (register, true)]) {
                        let (token, i) = packed::place(half_of(head), step, lane, register, high);
                        let exponent = [0, 100, 108, 109][random.below(4) as usize];
                        put(tokens.start + tile * packed::TILE_TOKENS + token, i, with_exponent(random, exponent));
                    }
                }
                3 if infinities => {
                    let (token, i) =
                        (random.below(u64::from(PAGE_TOKENS)) as u32, random.below(head_dim as u64) as u32);
                    put(tokens.start + token, i, 0x7f80);
                }
                _ => (),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use unweight_codegen::spec::HeadDim;

    use super::*;
    use crate::attention::Decode;

    #[test]
    fn hard_problems_have_all_kinds_of_units() {
        for head_dim in HeadDim::ALL.map(HeadDim::get) {
            let case = Decode { kv_heads: 4, ..Decode::new(head_dim as usize, 4, &[1000, 700, PAD, 15]) };
            let mut problem = Problem::new(&case);
            harden(&mut problem, 3, false);
            let pages = PackedPages::of(&problem);
            assert!(pages.kinds().iter().all(|kind| *kind > 5), "{head_dim}: {:?}", pages.kinds());
            let infinite = |problem: &Problem| problem.layer.iter().filter(|bits| **bits & 0x7fff == 0x7f80).count();
            assert_eq!(infinite(&problem), 0);
            harden(&mut problem, 3, true);
            assert!(infinite(&problem) > 5, "{head_dim}");
        }
    }

    #[test]
    fn eight_escapes_of_a_lane_are_in_a_record() {
        let mut problem = Problem::new(&Decode::new(64, 4, &[300]));
        harden(&mut problem, 5, false);
        let pages = PackedPages::of(&problem);
        let (_, page) = full_pages(&problem)[1];
        let unit = problem.table[page] as usize * pages.heads.page_units();
        let record = &pages.records[pages.heads.record_at(unit)..];
        assert_eq!(
            (record[RECORD_KIND], record[RECORD_ENDS + 3]),
            (packed::KIND_PACKED, 8),
            "kind and number of escapes"
        );
        let lanes: BTreeSet<u16> = record[RECORD_HEAD..][..16]
            .chunks(2)
            .map(|slot| (u16::from_le_bytes([slot[0], slot[1]]) & 0x7ff) / 8)
            .collect();
        assert_eq!(lanes.len(), 1, "step and lane of the escapes");
    }
}
