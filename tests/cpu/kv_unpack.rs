//! Unpacking pages of a KV cache in the simulator: the original values, hostile tables and records, and planted bugs
//! that must be caught.

use unweight_bench::kv::{Cache, Heads, page, set_index};
use unweight_codegen::{
    VariantSpec,
    abi::KvUnpackArgs,
    kv::packed::{KIND_BF16, KIND_LOST, KIND_PACKED, RECORD_ENDS, RECORD_HEAD, RECORD_KIND},
    plan::GemmShape,
    spec::HeadDim,
};
use unweight_format::testing::Random;

use crate::{
    harness::{Buffer, CpuKernel, Edit, Run, spec},
    kv_cache::GAP,
};

mod attack;

const PAGES: &str = "unweight/encoding/kv_packed.cuh";

/// Packs the pages of one layer with the oracle. The pool contains all needed units.
fn packed_pages(heads: Heads, count: u32, seed: u64) -> (Cache, Vec<u16>) {
    let random = &mut Random::new(seed);
    let bf16: Vec<u16> = (0..count).flat_map(|_| page(random, heads)).collect();
    let cache = Cache::of_pages(heads, &bf16, GAP);
    (cache, bf16)
}

fn unpack(
    kernel: &mut CpuKernel,
    spec: &VariantSpec,
    cache: &Cache,
    table: &[u32],
    seed: u64,
) -> Result<(Vec<u16>, u32), String> {
    let (packed, records, units) =
        (Buffer::of(&cache.packed), Buffer::of(&cache.records), Buffer::of(&cache.unit_pages));
    let pages = Buffer::of(bytemuck::cast_slice(table));
    let (out, fault) = (Buffer::new(table.len() * cache.heads.page_elements() * 2), Buffer::zeroed(4));
    let args = KvUnpackArgs {
        packed: packed.address(),
        records: records.address(),
        unit_pages: units.address(),
        page_table: pages.address(),
        out: out.address(),
        fault: fault.address(),
        m: table.len() as u32,
        kv_heads: cache.heads.kv_heads,
        pages: cache.pages,
        units: cache.units,
    };
    // Exclude the gaps after pages and records.
    let used = |buffer: &'_ Buffer| buffer.slice().len() - GAP;
    let buffers = [
        ("packed", &packed.slice()[..used(&packed)]),
        ("records", &records.slice()[..used(&records)]),
        ("units", units.slice()),
        ("page_table", pages.slice()),
        ("out", out.slice()),
        ("fault", fault.slice()),
    ];
    let run = Run { problem: GemmShape::rows(table.len() as u32 * cache.heads.kv_heads * 2), sms: 132, seed };
    // SAFETY: every buffer above outlives the launch, and the kernel reaches them through checked wrappers only.
    unsafe { kernel.run(spec, run, &args, &buffers)? };
    Ok((out.u16s(), fault.u32s()[0]))
}

/// Returns the pages of a table, one after the other.
fn pages_of(bf16: &[u16], heads: Heads, table: &[u32]) -> Vec<u16> {
    table.iter().flat_map(|page| heads.page_of(bf16, *page as usize)).copied().collect()
}

#[test]
fn unpacked_pages_are_those_that_were_packed() {
    for head_dim in HeadDim::ALL.map(HeadDim::get) {
        let spec = spec(&format!("kv_unpack_d{head_dim}{}", if head_dim.is_multiple_of(32) { "" } else { "_pdl" }));
        let mut kernel = CpuKernel::of(&spec, &[]);
        for seed in 1..=3 {
            let heads = Heads { head_dim, kv_heads: 1 + seed as u32 % 2 };
            let (cache, bf16) = packed_pages(heads, 6, seed + u64::from(head_dim));
            let table = [4, 0, 5, 5, 2];
            let (out, fault) = unpack(&mut kernel, &spec, &cache, &table, seed).unwrap();
            assert!(out == pages_of(&bf16, heads, &table), "{spec} {seed}");
            assert_eq!(fault, 0);
        }
    }
}

#[test]
fn hostile_packed_pages_lead_nowhere() {
    let spec = spec("kv_unpack_d48_pdl");
    let mut kernel = CpuKernel::of(&spec, &[]);
    let heads = Heads { head_dim: 48, kv_heads: 2 };
    let (right, bf16) = packed_pages(heads, 4, 8);
    let whole = pages_of(&bf16, heads, &[1, 2]);
    let untouched = u16::from_ne_bytes([Buffer::POISON; 2]);
    let unit = 4 + 3;
    let mut run = |change: &dyn Fn(&mut [u8]), table: &[u32]| {
        let mut cache = right.clone();
        change(&mut cache.records[heads.record_at(unit)..][..heads.record_bytes()]);
        let (mut out, fault) = unpack(&mut kernel, &spec, &cache, table, 1).unwrap();
        // The changed unit, and the others.
        let changed = out[3 * heads.unit_values()..][..heads.unit_values()].to_vec();
        out[3 * heads.unit_values()..][..heads.unit_values()]
            .copy_from_slice(&whole[3 * heads.unit_values()..][..changed.len()]);
        (out, changed, fault)
    };
    let check_left_out = |(out, changed, fault): (Vec<u16>, Vec<u16>, u32), reported: u32| {
        assert!(out == whole && changed.iter().all(|v| *v == untouched), "{reported}");
        assert_eq!(fault, reported);
    };
    for kind in 3..=255 {
        check_left_out(run(&|record| record[RECORD_KIND] = kind, &[1, 2]), 1);
    }
    for number in [101, 1 << 31, u32::MAX] {
        let change = |record: &mut [u8]| {
            record[RECORD_KIND] = KIND_BF16;
            set_index(record, number);
        };
        check_left_out(run(&change, &[1, 2]), 1);
    }
    check_left_out(run(&|record| record[RECORD_KIND] = KIND_LOST, &[1, 2]), 0);
    // Random bases, counts and slots of a packed unit change its own values only.
    for seed in 0..40 {
        let bytes = Random::new(seed).bytes(heads.record_bytes());
        let change = |record: &mut [u8]| {
            record.copy_from_slice(&bytes);
            record[RECORD_KIND] = KIND_PACKED;
            if seed % 2 == 0 {
                record[RECORD_ENDS..RECORD_HEAD].copy_from_slice(&[seed as u8, 255, 3, 255]);
            }
        };
        let (out, _, fault) = run(&change, &[1, 2]);
        assert!(out == whole && fault == 0, "{seed}");
    }
    for page in [4, 1 << 31, u32::MAX] {
        let (out, fault) = unpack(&mut kernel, &spec, &right, &[1, page, 2], 1).unwrap();
        let elements = heads.page_elements();
        assert!(out[..elements] == whole[..elements] && out[2 * elements..] == whole[elements..]);
        assert!(out[elements..2 * elements].iter().all(|v| *v == untouched));
        assert_eq!(fault, 2);
    }
}

#[test]
fn planted_bugs_of_unpacking_are_caught() {
    let kernel_header = "unweight/kernels/kv_unpack.cuh";
    let plants = [
        (kernel_header, "ptx::bar_warp_sync();", ""),
        (kernel_header, "token = lane / 4 + r / 2 * 8", "token = lane / 4 + r % 2 * 8"),
        (kernel_header, "chunk = 2 * step + r / 2, inside", "chunk = 2 * step + r % 2, inside"),
        (PAGES, "ends >> (8 * tile - 8) & 255", "ends >> (8 * tile) & 255"),
        (PAGES, "return end < limit ? end : limit;", "return end;"),
        (PAGES, "ptx::shf_l_wrap(w2, w2, 4)", "(w2 << 4)"),
        (PAGES, "code == kZeroCode ? 0 : ", ""),
        (PAGES, "(base_of(slot) - kBelow + code) & 255", "(base_of(slot) - kWindow + code) & 255"),
        // Bases: of another step, of step 0 only, of steps 0-3 only.
        (kernel_header, "record.pair(s)", "record.pair(0)"),
        (PAGES, "bases[step / 4] >>", "bases[0] >>"),
        (PAGES, "(slot & 1024) == 0 ? bases[0] : bases[1]", "bases[0]"),
        (PAGES, "slot >> 5 & 24", "slot >> 5 & 8"),
        (PAGES, "if (element >> 3 != step * 32 + lane) return;", "if (element >> 3 != lane) return;"),
    ];
    // Five steps: the bases fill two words of a record.
    let spec = spec("kv_unpack_d80_pdl");
    let heads = Heads { head_dim: 80, kv_heads: 2 };
    let (cache, bf16) = packed_pages(heads, 6, 3);
    let mut hostile = cache.clone();
    hostile
        .records
        .chunks_mut(heads.record_bytes())
        .filter(|record| record[RECORD_KIND] == KIND_PACKED)
        .for_each(|record| record[RECORD_ENDS + 3] = 255);
    let table = [5, 0, 3, 1];
    let run = |edits: &[Edit]| {
        let mut kernel = CpuKernel::of(&spec, edits);
        (1..=4).any(|seed| {
            let out = unpack(&mut kernel, &spec, &cache, &table, seed);
            // All slots of the last page, and the bytes after them.
            let last = unpack(&mut kernel, &spec, &hostile, &table, seed);
            out.is_err() || last.is_err() || out.is_ok_and(|(out, _)| out != pages_of(&bf16, heads, &table))
        })
    };
    assert!(!run(&[]));
    for (header, from, to) in plants {
        let Some(edit) = Edit::planted(header, from, to) else { continue };
        assert!(run(&[edit]), "the planted bug was not caught: `{to}` for `{from}`");
    }
}
