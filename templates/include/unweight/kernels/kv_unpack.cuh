// Unpacks pages of the KV cache to bf16 pages (docs/kv-cache.md): those pages of one layer and sequence that a later
// chunk of its prompt attends to.
//
// Config
//   u32  kHeadDim  16 * 1..8  elements of a head
//   bool kPdl      programmatic dependent launch: nothing is read before griddepcontrol.wait
//
// Launch: kThreads threads, Smem<Config>::kBytes of dynamic shared memory, m * kv_heads * 2 blocks, one for K and one
// for V of each KV head and page.
//
// Roles: none. A warp takes a tile of 16 tokens: it writes the operands to shared memory in the layout of a bf16 page,
// and stores them from there, 16 bytes per lane. Barriers: __syncwarp between the two.
//
// Shared memory = 128 * kHeadDim
// Bound: device memory, 3.5 bytes per element.
//
// Safety   for any bytes: an invalid page or unit, or a kind of record that no encoder writes, is skipped and
//          reported; a lost unit is skipped. A slot names an element of its own tile or none.
#pragma once

#include "unweight/axes.cuh"
#include "unweight/encoding/kv_packed.cuh"
#include "unweight/ptx/control.cuh"
#include "unweight/ptx/memory.cuh"

namespace uw::kv_unpack {

constexpr u32 kWarps = kv::kPageTiles;
template <class Config>
constexpr u32 kThreads = kWarps * 32;

template <class Config>
struct Smem {
    static constexpr u32 kTileBytes = kv::kTileTokens * Config::kHeadDim * 2;
    static constexpr u32 kTiles = 0;
    static constexpr u32 kBytes = kWarps * kTileBytes;
};

// Stores the operands of a step at their places in a bf16 tile; lane = 4g + t.
template <u32 kHeadDim>
UW_DEVICE void store_keys(u32 tile, const u32 (&p)[4], u32 step, u32 lane) {
#pragma unroll
    for (u32 r = 0; r < 4; ++r) {
        const u32 token = lane / 4 + r / 2 * 8;
        ptx::st_shared(tile + kv::chunk_offset(kHeadDim, token, 2 * step + r % 2) + lane % 4 * 4, p[r]);
    }
}
template <u32 kHeadDim>
UW_DEVICE void store_values(u32 tile, const u32 (&p)[4], u32 step, u32 lane) {
#pragma unroll
    for (u32 r = 0; r < 4; ++r) {
        const u32 token = lane % 4 * 2 + r % 2 * 8, chunk = 2 * step + r / 2, inside = lane / 4 * 2;
        ptx::st_shared_u16(tile + kv::chunk_offset(kHeadDim, token, chunk) + inside, p[r]);
        ptx::st_shared_u16(tile + kv::chunk_offset(kHeadDim, token + 1, chunk) + inside, p[r] >> 16);
    }
}

template <class Config>
UW_DEVICE void run(const KvUnpackArgs& args) {
    using P = kv::Packed<Config::kHeadDim>;
    using S = Smem<Config>;
    if constexpr (Config::kPdl) {
        ptx::griddepcontrol_launch_dependents();
        ptx::griddepcontrol_wait();
    }
    const u32 lane = ptx::laneid(), inside = ptx::uniform_warp_index();
    const u32 pair = ptx::ctaid() / 2, half = ptx::ctaid() % 2;
    const u32 place = pair / args.kv_heads, kv_head = pair % args.kv_heads;
    const u32 page = ptx::ld_global(args.page_table + place);
    if (page >= args.pages) {
        if (inside == 0 && lane == 0) ptx::st_global(args.fault, 1 + place);
        return;
    }
    const u64 head = P::head(args.kv_heads, page, kv_head);
    const u8* at = args.records + (2 * head + half) * P::kRecordBytes;
    const kv::Record record = kv::Record::global(at);
    const bool plain = record.kind() == kv::kPackedUnit;
    if (!plain && (record.kind() != kv::kBf16Unit || record.unit() >= args.units)) {
        if (record.kind() != kv::kLostUnit && inside == 0 && lane == 0) ptx::st_global(args.fault, 1 + place);
        return;
    }
    const u32 tile = ptx::cvta_to_shared(ptx::dynamic_smem()) + S::kTiles + inside * S::kTileBytes;
    u32 words[P::kWords];
    if (plain) {
        const u8* tile_of = args.packed + head * P::kHeadBytes + inside * P::kTileBytes;
        P::load(words, tile_of + half * P::kOperandBytes, lane);
    }
    const u32 end = record.end(inside, P::kSlots);
#pragma unroll
    for (u32 s = 0; s < P::kSteps; ++s) {
        u32 p[4];
        if (plain) {
            P::quad(p, words, s, record.pair(s));
#pragma unroll 1
            for (u32 i = record.begin(inside); i < end; ++i) {
                kv::patch(p, ptx::ld_global_u16(at + kv::kRecordHead + i * 2), s, lane, record);
            }
        } else {
            P::unit_quad(p, P::unit_tile(args.unit_pages, record.unit(), inside), s, lane);
        }
        if (half == 0) {
            store_keys<Config::kHeadDim>(tile, p, s, lane);
        } else {
            store_values<Config::kHeadDim>(tile, p, s, lane);
        }
    }
    ptx::bar_warp_sync();  // orders every lane's stores before the warp's loads
    u16* out = args.out + kv::head_element(Config::kHeadDim, args.kv_heads, place, kv_head, half) +
               inside * (kv::kTileTokens * Config::kHeadDim);
    for (u32 byte = lane * 16; byte < S::kTileBytes; byte += 512) {
        ptx::st_global_x4(out + byte / 2, ptx::ld_shared_x4(tile + byte));
    }
}

}  // namespace uw::kv_unpack
