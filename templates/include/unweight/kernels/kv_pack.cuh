// Packs pages of the KV cache, bf16 -> packed (docs/kv-cache.md), and returns the units of freed pages to the pool.
//
// Config (the axes of unweight-codegen/src/family/kv_pack.rs)
//   u32         kHeadDim  16 * 1..8  elements of a head
//   KvPackStage kStage    kStep: for each row whose newest token is the last of a page, packs the hot page, in all
//                         layers, to the page in the row's table; kChunk: packs consecutive pages of one layer to those
//                         of a table; kRelease: frees the bf16 units of the pages of a table, in all layers
//   bool        kPdl      programmatic dependent launch: nothing is read before griddepcontrol.wait, which every block
//                         executes (later kernels rely on all preceding kernels)
//
// Launch: kThreads threads, Smem<Config>::kBytes of dynamic shared memory.
//   kStep     any number of blocks, which share the units: rows that filled a page x layers x KV heads x {K, V}
//   kChunk    m * kv_heads * 2 blocks, one unit each
//   kRelease  ceil(m * layers * kv_heads * 2 / kThreads) blocks, one record per thread
//
// Roles of kStep and kChunk: none. A warp takes a tile of 16 tokens of a unit. It copies the tile to shared memory and
// loads it back as tensor core operands (ldmatrix), counts the elements below the windows, and writes its words and its
// slots of the record, or the operands of a bf16 unit. The bytes do not depend on the order of execution; only the
// choice of the unit does.
// Barriers: block barriers after the largest exponents of each tile, after the counts, after the choice of a unit, and
// after the slots of the record are in shared memory; __syncwarp between copying a tile and loading it.
//
// Shared memory of kStep and kChunk = 128 * kHeadDim       tiles
//                                   + 4 * 48               per tile: the largest exponents of 8 steps, and a count
//                                   + 48                   the record
// Bound: device memory, 3.5 bytes per element; a step without full pages reads only the positions.
//
// Safety   for any numbers in the tables: an invalid page or hot page is skipped and reported; an entry of 0xffffffff
//          is skipped. Units come from the pool, whose entries are checked against its size. A table must name a page
//          once: kRelease may return the units of a page twice if two entries name it.
#pragma once

#include "unweight/axes.cuh"
#include "unweight/encoding/kv_packed.cuh"
#include "unweight/kernels/attention/softmax.cuh"
#include "unweight/ptx/barrier.cuh"
#include "unweight/ptx/control.cuh"
#include "unweight/ptx/memory.cuh"
#include "unweight/ptx/mma.cuh"

namespace uw::kv_pack {

constexpr u32 kWarps = kv::kPageTiles;
constexpr u32 kNoPage = ~0u;
constexpr u32 kLost = ~0u;  // returned instead of a unit
template <class Config>
constexpr u32 kThreads = Config::kStage == KvPackStage::kRelease ? 256 : kWarps * 32;

template <class Config>
struct Smem {
    static constexpr bool kUsed = Config::kStage != KvPackStage::kRelease;
    static constexpr u32 kTileBytes = kv::kTileTokens * Config::kHeadDim * 2;
    // Per tile: the largest exponent of each step, the number of escapes, and the unit that was taken.
    static constexpr u32 kCountBytes = 48;
    static constexpr u32 kTiles = 0;
    static constexpr u32 kCounts = kUsed ? kWarps * kTileBytes : 0;
    static constexpr u32 kRecord = kCounts + (kUsed ? kWarps * kCountBytes : 0);
    static constexpr u32 kBytes = kRecord + (kUsed ? 48 : 0);
};

// One unit: K or V of a KV head in a page.
template <class Config>
struct Unit {
    using S = Smem<Config>;
    using P = kv::Packed<Config::kHeadDim>;
    static constexpr u32 kHeadDim = Config::kHeadDim;
    // Indices of a tile's words after the largest exponents of its steps.
    static constexpr u32 kCount = 8, kTaken = 9;
    static constexpr u32 kNoCode = 1u << 31;  // flag of a count: an element has no code

    const KvPackArgs& args;
    const u32 shared, warp, lane;
    u32 quads[P::kSteps][4];

    UW_DEVICE Unit(const KvPackArgs& a, u32 shared_address)
        : args(a), shared(shared_address), warp(ptx::uniform_warp_index()), lane(ptx::laneid()) {}

    UW_DEVICE u32 counts(u32 tile, u32 place) const { return shared + S::kCounts + tile * S::kCountBytes + place * 4; }
    UW_DEVICE static u32 low(u32 pair) { return pair >> 7 & 255; }
    UW_DEVICE static u32 high(u32 pair) { return pair >> 23 & 255; }

    // Loads the warp's tile as operands.
    UW_DEVICE void load(const u16* page, u32 half) {
        const u32 tile = shared + S::kTiles + warp * S::kTileBytes;
        const u16* from = page + warp * (kv::kTileTokens * kHeadDim);
        for (u32 at = lane * 16; at < S::kTileBytes; at += 512) {
            ptx::st_shared_x4(tile + at, ptx::ld_global_x4(from + at / 2));
        }
        ptx::bar_warp_sync();  // orders every lane's stores before the warp's ldmatrix
        const bool value = half == attention::kValue;
        const u32 row = value ? lane % 16 : lane % 8 + lane / 16 * 8;
        const attention::Lines<kHeadDim> lines(row, value ? lane / 16 : lane / 8 % 2);
#pragma unroll
        for (u32 s = 0; s < P::kSteps; ++s) {
            const U32x4 v = value ? ptx::ldmatrix_x4_trans(lines.at(tile, s)) : ptx::ldmatrix_x4(lines.at(tile, s));
            quads[s][0] = v.x;
            quads[s][1] = v.y;
            quads[s][2] = v.z;
            quads[s][3] = v.w;
        }
    }
    // Called by the block: chooses the bases of the steps and returns them in a record, whose other fields are zero.
    UW_DEVICE kv::Record choose_bases() const {
        u32 top[P::kSteps];
#pragma unroll
        for (u32 s = 0; s < P::kSteps; ++s) {
            top[s] = 0;
#pragma unroll
            for (u32 r = 0; r < 4; ++r) top[s] = larger(top[s], larger(low(quads[s][r]), high(quads[s][r])));
#pragma unroll
            for (u32 step = 16; step != 0; step /= 2) top[s] = larger(top[s], ptx::shfl_sync_bfly(top[s], step));
        }
        ptx::bar_sync();  // orders the loads of the previous unit before these stores
#pragma unroll
        for (u32 s = 0; s < P::kSteps; ++s) {
            if (lane == 0) ptx::st_shared(counts(warp, s), top[s]);
        }
        if (warp == 0 && lane < P::kRecordBytes / 4) ptx::st_shared(shared + S::kRecord + lane * 4, 0);
        ptx::bar_sync();  // orders the largest exponents of all tiles before the loads
        kv::Record record{{0, 0}, kv::kPackedUnit, 0};
#pragma unroll
        for (u32 s = 0; s < P::kSteps; ++s) {
            u32 all = kv::kWindow - 1;
#pragma unroll
            for (u32 tile = 0; tile < kWarps; ++tile) all = larger(all, ptx::ld_shared(counts(tile, s)));
            record.bases[s / 4] |= all - (kv::kWindow - 1) << (s % 4 * 8);
        }
        return record;
    }
    UW_DEVICE static u32 larger(u32 a, u32 b) { return a > b ? a : b; }
    // Called by the block: counts the elements of each tile that are below their windows.
    UW_DEVICE void count(const kv::Record& record) const {
        u32 below = 0;
        bool none = false;
#pragma unroll
        for (u32 s = 0; s < P::kSteps; ++s) {
            const u32 base = record.base(s);
#pragma unroll
            for (u32 r = 0; r < 4; ++r) {
                u32 pair = quads[s][r];
                ptx::pin(pair);  // otherwise the exponents of all elements stay in registers since choose_bases
                const u32 a = low(pair), b = high(pair);
                below += u32(a < base) + u32(b < base);
                none |= (a != 0 && a + kv::kBelow < base) || (b != 0 && b + kv::kBelow < base);
            }
        }
#pragma unroll
        for (u32 step = 16; step != 0; step /= 2) below += ptx::shfl_sync_bfly(below, step);
        const u32 flag = ptx::vote_sync_ballot(none) != 0 ? kNoCode : 0;
        if (lane == 0) ptx::st_shared(counts(warp, kCount), below | flag);
        ptx::bar_sync();  // orders the counts of all tiles before the loads
    }
    UW_DEVICE static u32 code_of(u32 exponent, u32 base) {
        return exponent == 0 ? kv::kZeroCode : exponent + kv::kBelow - base;
    }
    // Writes the warp's words, and its slots of the record from `place` on.
    UW_DEVICE void write(u8* operand, const kv::Record& record, u32 place) const {
        u32 words[P::kWords];
#pragma unroll
        for (u32 s = 0; s < P::kSteps; ++s) {
            const u32 base = record.base(s);
            u32 own[4], outside = 0;
#pragma unroll
            for (u32 r = 0; r < 4; ++r) {
                const u32 x = quads[s][r], a = low(x) - base, b = high(x) - base;
                const bool first = a < kv::kWindow, second = b < kv::kWindow;
                own[r] = (x & 0x807f807fu) | (first ? a << 7 : 0) | (second ? b << 23 : 0);
                outside |= u32(!first) << (2 * r) | u32(!second) << (2 * r + 1);
            }
            P::words_of(words, s, own);
            if (ptx::vote_sync_ballot(outside != 0) == 0) continue;
            const u32 listed = ptx::popc(outside);
            u32 before = listed;
#pragma unroll
            for (u32 distance = 1; distance < 32; distance *= 2) {
                const u32 below = ptx::shfl_sync_up(before, distance);
                before += lane >= distance ? below : 0;
            }
            const u32 all = ptx::shfl_sync_idx(before, 31);
            u32 at = place + before - listed;
#pragma unroll 1
            for (; outside != 0; outside &= outside - 1) {
                const u32 i = ptx::find_first_set(outside) - 1;
                const u32 pair = i < 2 ? quads[s][0] : i < 4 ? quads[s][1] : i < 6 ? quads[s][2] : quads[s][3];
                const u32 slot = (s * 32 + lane) * 8 + i | code_of(i % 2 == 0 ? low(pair) : high(pair), base) << 11;
                ptx::st_shared_u16(shared + S::kRecord + kv::kRecordHead + at * 2, slot);
                ++at;
            }
            place += all;
        }
        P::store_global(operand, words, lane);
    }
    // Takes a unit from the pool; called by one thread.
    UW_DEVICE u32 take() const {
        const u32 free = ptx::atom_add_global(args.free_units, ~0u);
        // The counter is below zero while others try to take from an empty pool.
        if (free == 0 || free > args.units) {
            ptx::red_add_global(args.free_units, 1);
            return kLost;
        }
        const u32 unit = ptx::ld_global(args.free_units + free);
        return unit < args.units ? unit : kLost;
    }
    UW_DEVICE void run(const u16* page, u32 half, u8* operands, u8* record, u32* lost) {
        load(page, half);
        kv::Record chosen = choose_bases();
        count(chosen);
        u32 all = 0, flags = 0, place = 0;
#pragma unroll
        for (u32 tile = 0; tile < kWarps; ++tile) {
            const u32 own = ptx::ld_shared(counts(tile, kCount));
            flags |= own;
            if (tile == warp) place = all;
            all += own & ~kNoCode;
            chosen.ends |= (all & 255) << (8 * tile);
        }
        if ((flags & kNoCode) == 0 && all <= P::kSlots) {
            write(operands + warp * P::kTileBytes + half * P::kOperandBytes, chosen, place);
        } else {
            const u32 taken = counts(0, kTaken);
            if (warp == 0 && lane == 0) ptx::st_shared(taken, take());
            ptx::bar_sync();  // orders the unit before the loads
            const u32 unit = ptx::ld_shared(taken);
            chosen = {{0, 0}, unit == kLost ? kv::kLostUnit : kv::kBf16Unit, unit == kLost ? 0 : unit};
            if (unit == kLost) {
                if (warp == 0 && lane == 0) ptx::st_global(lost, 1);
            } else {
                u8* to = P::unit_tile(args.unit_pages, unit, warp);
#pragma unroll
                for (u32 s = 0; s < P::kSteps; ++s) {
                    const U32x4 v{quads[s][0], quads[s][1], quads[s][2], quads[s][3]};
                    ptx::st_global_x4(to + s * 512 + lane * 16, v);
                }
            }
        }
        if (warp == 0 && lane == 0) {
            ptx::st_shared_x4(shared + S::kRecord, U32x4{chosen.bases[0], chosen.bases[1], chosen.word, chosen.ends});
        }
        // Orders every warp's slots before the loads.
        ptx::bar_sync();
        if (warp == 0 && lane < P::kRecordBytes / 4) {
            ptx::st_global(record + lane * 4, ptx::ld_shared(shared + S::kRecord + lane * 4));
        }
    }
    // Packs K or V of a KV head from a bf16 page.
    UW_DEVICE void run(u32 layer, u32 from, u32 page, u32 kv_head, u32 half, u32* lost) {
        const u16* source = args.source + layer * args.source_pitch;
        const u64 head = P::head(args.kv_heads, page, kv_head);
        run(source + kv::head_element(kHeadDim, args.kv_heads, from, kv_head, half), half,
            args.packed + layer * args.packed_pitch + head * P::kHeadBytes,
            args.records + layer * args.record_pitch + (2 * head + half) * P::kRecordBytes, lost);
    }
};

UW_DEVICE void report(const KvPackArgs& args, u32 row) { ptx::st_global(args.fault, 1 + row); }

template <class Config>
UW_DEVICE void run_step(const KvPackArgs& args) {
    const u32 each = args.layers * args.kv_heads * 2, blocks = ptx::nctaid(), lane = ptx::laneid();
    // The first unit of the row that this block takes.
    u32 next = ptx::ctaid();
    for (u32 first = 0; first < args.m; first += 32) {
        const u32 own = first + lane;
        const u32 position = own < args.m ? ptx::ld_global(args.positions + own) : attention::kPadPosition;
        const bool is_last = position % kv::kPageTokens == kv::kPageTokens - 1;
        u32 full = ptx::vote_sync_ballot(is_last && position / kv::kPageTokens < args.table_pages);
        while (full != 0) {
            const u32 of = ptx::find_first_set(full) - 1, row = first + of;
            full &= full - 1;
            const u32 entry = ptx::shfl_sync_idx(position, of) / kv::kPageTokens;
            const u32 page = ptx::ld_global(args.page_table + u64(row) * args.table_pages + entry);
            const u32 hot = ptx::ld_global(args.hot_table + row);
            if (page != kNoPage && (page >= args.pages || hot >= args.source_pages)) report(args, row);
            const bool there = page < args.pages && hot < args.source_pages;
#pragma unroll 1
            for (; next < each; next += blocks) {
                if (!there) continue;
                const u32 pair = next / 2;
                Unit<Config> unit(args, ptx::cvta_to_shared(ptx::dynamic_smem()));
                unit.run(pair / args.kv_heads, hot, page, pair % args.kv_heads, next % 2, args.lost + row);
            }
            next -= each;
        }
    }
}

template <class Config>
UW_DEVICE void run_chunk(const KvPackArgs& args) {
    const u32 pair = ptx::ctaid() / 2, half = ptx::ctaid() % 2;
    const u32 place = pair / args.kv_heads, kv_head = pair % args.kv_heads;
    const u32 page = ptx::ld_global(args.page_table + place);
    if (page >= args.pages || args.first + place >= args.source_pages) {
        if (page != kNoPage) report(args, place);
        return;
    }
    Unit<Config> unit(args, ptx::cvta_to_shared(ptx::dynamic_smem()));
    unit.run(0, args.first + place, page, kv_head, half, args.lost);
}

template <class Config>
UW_DEVICE void run_release(const KvPackArgs& args) {
    using P = kv::Packed<Config::kHeadDim>;
    const u64 own = u64(ptx::ctaid()) * kThreads<Config> + ptx::tid();
    const u64 each = u64(args.kv_heads) * 2 * args.layers;
    const u64 place = own / each;
    if (place >= args.m) return;
    const u32 inside = own % each, layer = inside / (args.kv_heads * 2), head = inside % (args.kv_heads * 2);
    const u32 page = ptx::ld_global(args.page_table + place);
    if (page >= args.pages) {
        if (page != kNoPage) report(args, place);
        return;
    }
    u8* record = args.records + layer * args.record_pitch + (u64(page) * args.kv_heads * 2 + head) * P::kRecordBytes;
    const kv::Record old = kv::Record::global(record);
    if (old.kind() != kv::kBf16Unit) return;
    ptx::st_global_x2(record + 8, U32x2{kv::kLostUnit, 0});
    if (old.unit() >= args.units) return report(args, place);
    const u32 free = ptx::atom_add_global(args.free_units, 1);
    if (free < args.units) ptx::st_global(args.free_units + 1 + free, old.unit());
}

template <class Config>
UW_DEVICE void run(const KvPackArgs& args) {
    if constexpr (Config::kPdl) {
        ptx::griddepcontrol_launch_dependents();
        ptx::griddepcontrol_wait();
    }
    if constexpr (Config::kStage == KvPackStage::kStep) {
        run_step<Config>(args);
    } else if constexpr (Config::kStage == KvPackStage::kChunk) {
        run_chunk<Config>(args);
    } else {
        run_release<Config>(args);
    }
}

}  // namespace uw::kv_pack
