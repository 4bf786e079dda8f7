//! A packed KV cache on the host: the reference for packing and releasing pages.

use std::{borrow::Borrow, collections::BTreeSet};

use unweight_codegen::kv::packed::{
    EncodedUnit, KIND_BF16, KIND_LOST, KIND_PACKED, RECORD_ENDS, RECORD_HEAD, RECORD_KIND,
};
use unweight_format::testing::Random;

use super::{Heads, index_of, set_index};

/// Fills bytes that were not written yet.
pub const UNWRITTEN: u8 = 0xa5;

/// Packed pages of several layers on the host, with the pool of BF16 units.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cache {
    /// The heads of a layer.
    pub heads: Heads,
    /// The number of layers.
    pub layers: u32,
    /// Pages per layer.
    pub pages: u32,
    /// BF16 units of all layers.
    pub units: u32,
    /// Gap after each layer's packed pages and records, bytes.
    pub gap: usize,
    /// Packed pages of all layers.
    pub packed: Vec<u8>,
    /// Records of all layers.
    pub records: Vec<u8>,
    /// BF16 units.
    pub unit_pages: Vec<u8>,
    /// The number of free units, then their indices.
    pub free: Vec<u32>,
}

impl Cache {
    /// Returns a cache with nothing written and `free` free units.
    ///
    /// # Panics
    /// If the number of units is a multiple of 5.
    pub fn new(heads: Heads, (layers, pages): (u32, u32), (units, free): (u32, u32), gap: usize) -> Self {
        let unwritten = |bytes: usize| vec![UNWRITTEN; bytes];
        let mut cache = Self {
            heads,
            layers,
            pages,
            units,
            gap,
            packed: Vec::new(),
            records: Vec::new(),
            unit_pages: unwritten(units as usize * heads.bf16_bytes()),
            // 5 and the number of units have no common factor.
            free: std::iter::once(free).chain((0..units).map(|i| (i * 5 + 2) % units)).collect(),
        };
        assert!(!units.is_multiple_of(5) || units == 0);
        cache.packed = unwritten(layers as usize * cache.packed_pitch());
        cache.records = unwritten(layers as usize * cache.record_pitch());
        cache
    }

    /// Returns the number of units of a cache that needs `needed`. [`Cache::new`] accepts no multiple of 5.
    pub fn units_for(needed: u32) -> u32 {
        needed + u32::from(needed.is_multiple_of(5))
    }

    /// Packs one layer of BF16 pages with the oracle. The pool has the units that they need and at least one more; none
    /// is free.
    pub fn of_pages(heads: Heads, bf16: &[u16], gap: usize) -> Self {
        let count = bf16.len() / heads.page_elements();
        let encoded: Vec<_> = (0..count * heads.page_units()).map(|unit| heads.encode(bf16, unit)).collect();
        let needed = encoded.iter().filter(|unit| unit.bf16.is_some()).count() as u32;
        // The first unit is one that no record refers to.
        let units = Self::units_for(needed + 1);
        let mut cache = Self::new(heads, (1, count as u32), (units, 0), gap);
        let mut index = units;
        for (unit, encoded) in encoded.iter().enumerate() {
            index -= u32::from(encoded.bf16.is_some());
            heads.put(&mut cache.packed, &mut cache.records, unit, encoded, index);
            if let Some(values) = &encoded.bf16 {
                cache.unit_pages[index as usize * values.len()..][..values.len()].copy_from_slice(values);
            }
        }
        cache
    }

    /// Replaces all records by random ones of any kind. BF16 records refer to units that are not free, each to a
    /// different one.
    ///
    /// # Panics
    /// If too few units are in use.
    pub fn put_random_records(&mut self, random: &mut Random) {
        let heads = self.heads;
        let mut used = self.free[1 + self.free[0] as usize..].to_vec();
        let (pitch, bytes) = (self.record_pitch(), heads.record_bytes());
        for layer in 0..self.layers as usize {
            for unit in 0..self.pages as usize * heads.page_units() {
                let record = &mut self.records[layer * pitch + heads.record_at(unit)..][..bytes];
                record.fill(0);
                record[RECORD_KIND] = random.below(3) as u8;
                match record[RECORD_KIND] {
                    KIND_BF16 => set_index(record, used.pop().expect("a used unit is left")),
                    KIND_PACKED => record.iter_mut().skip(RECORD_HEAD).for_each(|byte| *byte = 7),
                    _ => (),
                }
            }
        }
    }

    /// Returns the distance between layers of packed pages, bytes.
    pub fn packed_pitch(&self) -> usize {
        self.pages as usize * self.heads.page_bytes() + self.gap
    }

    /// Returns the distance between layers of records, bytes.
    pub fn record_pitch(&self) -> usize {
        self.pages as usize * self.heads.page_record_bytes() + self.gap
    }

    /// Returns the record of a unit of a layer.
    pub fn record(&self, layer: u32, unit: usize) -> &[u8] {
        let at = layer as usize * self.record_pitch() + self.heads.record_at(unit);
        &self.records[at..][..self.heads.record_bytes()]
    }

    /// Returns the indices of the free units.
    pub fn free_units(&self) -> BTreeSet<u32> {
        self.free[1..=self.free[0] as usize].iter().copied().collect()
    }

    /// Checks the result of packing against the cache before and the oracle's encoding of the pages.
    ///
    /// # Errors
    /// Describes what is wrong.
    pub fn check_packed<J: Borrow<Job>>(&self, after: &Self, jobs: &[J]) -> Result<Counts, String> {
        let before = self;
        let heads = before.heads;
        let (mut expected, mut counts, mut allocated) = (before.clone(), Counts::default(), BTreeSet::new());
        for Job { layer, page, units } in jobs.iter().map(J::borrow) {
            for ((index_in_page, encoded), unit) in units.iter().enumerate().zip(*page as usize * heads.page_units()..)
            {
                let record = after.record(*layer, unit);
                let index = index_of(record);
                let packed_at = *layer as usize * before.packed_pitch();
                let record_at = *layer as usize * before.record_pitch();
                let (pages, records) = (&mut expected.packed[packed_at..], &mut expected.records[record_at..]);
                match (&encoded.bf16, record[RECORD_KIND]) {
                    (Some(_), KIND_LOST) => {
                        records[heads.record_at(unit)..][..record.len()].copy_from_slice(&heads.lost_record());
                        counts.lost += 1;
                        continue;
                    }
                    (Some(values), _) => {
                        if index >= before.units || !allocated.insert(index) {
                            return Err(format!(
                                "layer {layer}, page {page}, unit {index_in_page}: invalid BF16 unit {index}"
                            ));
                        }
                        let at = index as usize * heads.bf16_bytes();
                        expected.unit_pages[at..][..values.len()].copy_from_slice(values);
                        counts.bf16 += 1;
                    }
                    (None, _) if encoded.record[RECORD_ENDS + 3] != 0 => counts.with_slots += 1,
                    (None, _) => counts.plain += 1,
                }
                heads.put(pages, records, unit, encoded, index);
                let tile = heads.tile_at(unit, 0);
                if record != expected.record(*layer, unit) {
                    return Err(format!(
                        "layer {layer}, page {page}, unit {index_in_page}: record {record:?}, not {:?}",
                        encoded.record
                    ));
                }
                let tiles = &after.packed[packed_at + tile..];
                if encoded.bf16.is_none() && tiles[..heads.tile_bytes()] != encoded.tiles[0] {
                    return Err(format!("layer {layer}, page {page}, unit {index_in_page}: the first tile differs"));
                }
            }
        }
        expected.free[0] -= allocated.len() as u32;
        let expected_units = &before.free[expected.free[0] as usize + 1..=before.free[0] as usize];
        let comparisons = [
            (expected.packed == after.packed, "packed pages"),
            (expected.records == after.records, "records"),
            (expected.unit_pages == after.unit_pages, "bf16 units"),
            (expected.free == after.free, "free units"),
            (expected_units.iter().copied().collect::<BTreeSet<_>>() == allocated, "units that were allocated"),
        ];
        match comparisons.iter().find(|(same, _)| !same) {
            Some((_, what)) => Err(format!("{what} differ")),
            None => Ok(counts),
        }
    }

    /// Releases the units of the pages of a table, as the kernel does. Returns the newly free units.
    pub fn release(&mut self, table: &[u32]) -> BTreeSet<u32> {
        let (pitch, bytes, heads) = (self.record_pitch(), self.heads.record_bytes(), self.heads);
        let mut units = BTreeSet::new();
        for page in table.iter().filter(|page| **page < self.pages) {
            for at in (0..self.layers as usize).flat_map(|layer| {
                (0..heads.page_units())
                    .map(move |of| layer * pitch + (*page as usize * heads.page_units() + of) * bytes)
            }) {
                let record = &mut self.records[at..][..RECORD_HEAD];
                if record[RECORD_KIND] == KIND_BF16 {
                    let unit = index_of(record);
                    units.extend((unit < self.units).then_some(unit));
                    record.fill(0);
                    record[RECORD_KIND] = KIND_LOST;
                }
            }
        }
        units
    }

    /// Checks the result of a release against the cache before.
    ///
    /// # Errors
    /// Describes what is wrong.
    pub fn check_released(&self, after: &Self, table: &[u32]) -> Result<(), String> {
        let mut expected = self.clone();
        let units = expected.release(table);
        let count = self.free[0] as usize + units.len();
        if after.free[0] as usize != count {
            return Err(format!("{} units are free instead of {count}", after.free[0]));
        }
        let free: BTreeSet<u32> = self.free_units().union(&units).copied().collect();
        let comparisons = [
            (after.packed == self.packed && after.unit_pages == self.unit_pages, "pages were changed"),
            (after.records == expected.records, "records differ"),
            (after.free_units() == free, "free units differ"),
            (after.free[1 + count..] == self.free[1 + count..], "the free list was changed after its end"),
        ];
        match comparisons.iter().find(|(same, _)| !same) {
            Some((_, what)) => Err((*what).to_owned()),
            None => Ok(()),
        }
    }
}

/// A page to be packed.
#[derive(Clone, Debug)]
pub struct Job {
    layer: u32,
    page: u32,
    /// The oracle's encoding of the page's units.
    units: Vec<EncodedUnit>,
}

impl Job {
    /// Makes a job that packs a BF16 page to this page of this layer.
    pub fn new(heads: Heads, (layer, page): (u32, u32), bf16: &[u16]) -> Self {
        Self { layer, page, units: (0..heads.page_units()).map(|unit| heads.encode(bf16, unit)).collect() }
    }

    /// Returns whether a unit of the page is lost in a cache.
    pub fn is_lost(&self, cache: &Cache) -> bool {
        let first = self.page as usize * cache.heads.page_units();
        (first..first + self.units.len()).any(|unit| cache.record(self.layer, unit)[RECORD_KIND] == KIND_LOST)
    }
}

/// Counts units by result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Units packed without an escape.
    pub plain: usize,
    /// Units packed with escapes.
    pub with_slots: usize,
    /// Units stored as BF16.
    pub bf16: usize,
    /// Units lost because no BF16 unit was free.
    pub lost: usize,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.plain += other.plain;
        self.with_slots += other.with_slots;
        self.bf16 += other.bf16;
        self.lost += other.lost;
    }
}
