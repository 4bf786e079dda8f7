//! Unpacks pages of hostile values; every bit must be restored.

use super::*;
use crate::kv_cache::attack::{hostile_page, rounds};

#[test]
fn hostile_pages_are_unpacked_bit_for_bit() {
    for head_dim in HeadDim::ALL.map(HeadDim::get) {
        let spec = spec(&format!("kv_unpack_d{head_dim}"));
        let mut kernel = CpuKernel::of(&spec, &[]);
        for seed in 0..rounds(6) {
            let random = &mut Random::new(seed * 31 + u64::from(head_dim));
            let heads = Heads { head_dim, kv_heads: 1 + random.below(3) as u32 };
            let bf16: Vec<u16> = (0..6).flat_map(|_| hostile_page(random, heads)).collect();
            let cache = Cache::of_pages(heads, &bf16, GAP);
            let table: Vec<u32> = (0..7).map(|_| random.below(6) as u32).collect();
            let (out, fault) = unpack(&mut kernel, &spec, &cache, &table, seed).unwrap();
            assert!(out == pages_of(&bf16, heads, &table), "{spec} {seed}");
            assert_eq!(fault, 0);
        }
    }
}

/// Records, tiles and tables of random bytes cause no access outside the buffers.
#[test]
fn caches_of_any_bytes_lead_nowhere() {
    for head_dim in [16, 80, 128] {
        let spec = spec(&format!("kv_unpack_d{head_dim}"));
        let mut kernel = CpuKernel::of(&spec, &[]);
        let heads = Heads { head_dim, kv_heads: 2 };
        let (right, _) = packed_pages(heads, 4, 8);
        for seed in 0..rounds(20) {
            let random = &mut Random::new(seed + 5);
            let mut cache = right.clone();
            let len = cache.records.len();
            cache.records = random.bytes(len);
            for record in cache.records.chunks_mut(heads.record_bytes()) {
                if random.below(8) > 0 && record.len() > RECORD_KIND {
                    record[RECORD_KIND] = random.below(3) as u8;
                }
                if random.below(2) == 0 && record.len() >= RECORD_HEAD {
                    set_index(record, random.below(2 * u64::from(right.units)) as u32);
                }
            }
            let table: Vec<u32> = (0..5).map(|_| [0, 1, 2, 3, 4, u32::MAX][random.below(6) as usize]).collect();
            unpack(&mut kernel, &spec, &cache, &table, seed).unwrap_or_else(|error| panic!("{spec} {seed}: {error}"));
        }
    }
}
