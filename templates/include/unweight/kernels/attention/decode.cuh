// Decode attention: each row of the batch is the newest token of a sequence. Reads QKV as the projection writes it,
// applies bias, norm and rotation (RoPE), stores the new key and value in the row's page, and attends to them.
//
// Config (the axes of unweight-codegen/src/family/attention.rs)
//   u32  kHeadDim        16 * 1..8, or 256 with kBf16  elements of a head
//   u32  kWarps          warps of a block
//   u32  kStages         slots of each warp's private ring, 16 tokens each
//   u32  kCluster        1,2,4,8  blocks that share the tokens of a row and KV head
//   bool kSplit          split KV: args.parts blocks share the tokens and reduce in global memory; kCluster is 1
//   SmemCopy kCopy       kBulk: an elected lane issues bulk copies (TMA); kAsync: every lane issues 16-byte cp.async
//                        copies, without mbarriers
//   KvCache kCache       kBf16: pages as in encoding/kv_page.cuh; kPacked: pages as in encoding/kv_packed.cuh,
//                        except the page that a sequence is writing (its hot page), which is bf16
//   bool kAdjacent       elements 2i and 2i + 1 of a head are rotated together, instead of i and i + rope_dim / 2; in
//                        the tables, angles i and i + rope_dim / 4 are adjacent
//   bool kSoftcap        scores become tanh(score * eps), and `scale` is cap * log2(e); there are no norms
//   bool kPlusOne        norms multiply by (1 + weight), and round once
//   bool kPdl            programmatic dependent launch: tables and the pages of earlier tokens are read before
//                        griddepcontrol.wait; QKV is read, and A and the cache are written, after it
//
// Launch: kThreads<Config> = 32 * kWarps threads, Smem<Config>::kBytes of dynamic shared memory, clusters of kCluster
// blocks along x, grid = m * kv_heads * kCluster, with the KV heads of a row adjacent.
//   kSplit: m * kv_heads * parts blocks. If parts > 1: partials = Smem<Config>::kPartBytes per block, and
//     counters = u32 [m * kv_heads] (zero before the launch, zero after it).
//
// Roles: none. The tiles of 16 tokens of a row are assigned round-robin to the warps of the cluster: warp w of block
// `rank` takes tiles rank * kWarps + w, + kCluster * kWarps, ..., counted from the tile with the first token inside the
// window. An elected lane copies K and V of a tile (16 tokens of a page are contiguous). The warp multiplies them with
// all query heads of the group (rows of m16n8k16, padded to 16) and keeps its own maximum, sum and O. At the end the
// results of all warps are added in order of rank and warp, through distributed shared memory; each block produces its
// share of the row's elements. The order of sums depends only on the row's own tokens, kWarps and kCluster.
//
// kSplit: `rank` is the block's part, and the parts take the place of the cluster's blocks. A part without tiles exits
// at once. If several parts have tiles, each writes its maximum, sum and O to global memory and takes a ticket; the
// block that takes the last ticket adds all parts in order of rank, and reads its own part from memory, too. No block
// waits for another, so they need not be co-resident. The order of summation depends on the row's own tokens, kWarps
// and parts, not on which block was last.
//
// kPacked: the page of the newest token is hot and all earlier pages are packed, so the position alone determines the
// encoding of a tile. A slot holds K and V of a packed tile with the two records of its page, or K or V of a hot tile,
// which takes two consecutive slots. Packed operands go from the slot to registers in fragment order, without ldmatrix.
// They equal the bf16 values that were packed, and tiles have the same order as with kBf16, so the results are
// bit-identical. Exponents outside of a page's window come from its record. K or V with more such exponents than the
// record has slots is stored as a bf16 unit, and its operands are loaded from there instead of the slot.
//
// The warp that owns the last tile overwrites the copied line of the new token with the token's K and V, zeroes the
// values of the lines after it (0 * NaN would be NaN), and stores K and V in the page.
//
// Barriers: full [kWarps][kStages], 1 arrival + bytes of K and V. A warp refills its own slots, so there is no empty
// barrier: it releases a slot to the async proxy (pipeline::WarpRing::release) before it issues the next copy.
//   kAsync: one cp.async group per tile, even if empty; a lane waits for its own group, then __syncwarp.
//   Block: one barrier after the stores of queries, new key and new value, one (of the cluster) between stores and
//   loads of results; clusters: one before exit. kSplit: one after storing the part, one to broadcast if it was last.
//
// Shared memory = kWarps * kStages * slot              rings; a warp's O, fp32 [16][kHeadDim], overlays its own ring.
//                                                      slot: 64 * kHeadDim; kPacked: 48 * kHeadDim and two records,
//                                                      rounded up to 128 bytes, and at least two slots
//               + 32 * kHeadDim                        queries, bf16 [16][kHeadDim], laid out as a tile of a page
//               + 4 * kHeadDim                         the new key and the new value, bf16
//               + kWarps * 128                         maximum and sum of each of 16 rows
//               + kWarps * kStages * 8                 mbarriers, if any
// Global reads per token and KV head: 4 * kHeadDim bytes; kPacked: 3 * kHeadDim, and 6 of the records. kSplit adds, for
// each part of a row and KV head, group * (4 * kHeadDim + 8) bytes that are written and read again.
//
// Safety   for any numbers in the tables: a row whose position is not below max_positions, or is past its page table,
//          counts as a row without a token; tiles whose page number is not below `pages` are skipped; both set
//          *fault = 1 + row. A row without a token (kPadPosition) accesses no page; its A is zeros. kPacked: hot pages,
//          units and kinds of records are checked, too; a slot of a record names an element of its own tile or none.
// Bound: device memory.
#pragma once

#include "unweight/activation/element.cuh"
#include "unweight/axes.cuh"
#include "unweight/encoding/kv_packed.cuh"
#include "unweight/encoding/kv_page.cuh"
#include "unweight/kernels/attention/prepare.cuh"
#include "unweight/kernels/attention/softmax.cuh"
#include "unweight/pipeline/warp_ring.cuh"
#include "unweight/ptx/async.cuh"
#include "unweight/ptx/barrier.cuh"
#include "unweight/ptx/bulk.cuh"
#include "unweight/ptx/control.cuh"
#include "unweight/ptx/fence.cuh"
#include "unweight/ptx/mbarrier.cuh"
#include "unweight/ptx/memory.cuh"

namespace uw::attention::decode {

using kv::kPageTiles;
using kv::kTileTokens;

constexpr u32 kPartsAtOnce = 8;  // partial results whose loads are in flight together

template <class Config>
constexpr u32 kThreads = Config::kWarps * 32;
template <class Config>
constexpr bool kPacked = Config::kCache == KvCache::kPacked;

// Offsets of the sections in dynamic shared memory, and their total.
template <class Config>
struct Smem {
    static constexpr u32 kTileBytes = kTileTokens * Config::kHeadDim * 2;  // of K, or of V
    static constexpr u32 kRecordBytes = kv::Packed<Config::kHeadDim>::kRecordBytes;
    static constexpr u32 kPackedBytes = kv::Packed<Config::kHeadDim>::kTileBytes + 2 * kRecordBytes;
    static constexpr u32 kSlotBytes = kPacked<Config> ? (kPackedBytes + 127) / 128 * 128 : 2 * kTileBytes;
    static constexpr u32 kRingBytes = Config::kStages * kSlotBytes;
    static constexpr u32 kSumBytes = kRows * Config::kHeadDim * 4;
    static constexpr u32 kStateBytes = kRows * 8;

    static constexpr u32 kRings = 0;
    static constexpr u32 kQueries = Config::kWarps * kRingBytes;
    static constexpr u32 kFresh = kQueries + kRows * Config::kHeadDim * 2;
    static constexpr u32 kStates = kFresh + 2 * Config::kHeadDim * 2;
    static constexpr u32 kBarriers = kStates + Config::kWarps * kStateBytes;
    static constexpr u32 kBytes = kBarriers + (kAsync<Config> ? 0 : Config::kWarps * Config::kStages * 8);

    static_assert(kTileBytes % 512 == 0, "a warp copies 512 bytes at a time");
    static_assert(kSumBytes <= kRingBytes, "a warp's sums overlay its ring");

    // One block's record in `partials`: maximum and sum of each of 16 heads, then their O, fp32.
    static constexpr u32 kPartBytes = kStateBytes + kSumBytes;
};

template <class Config>
struct Kernel {
    using S = Smem<Config>;
    static constexpr u32 kHeadDim = Config::kHeadDim;
    static constexpr u32 kChunks = kHeadDim / 8;
    static constexpr u32 kSummedWarps = Config::kWarps * Config::kCluster;  // warps that add up in shared memory
    static constexpr u32 kPairs = kHeadDim / 2;                             // words of one row of a head
    using P = kv::Packed<kHeadDim>;
    // Large heads need the registers for O and V; with packed tiles, queries in registers would halve the warps.
    static constexpr bool kQueriesInSmem = kPacked<Config> || kHeadDim > 128;
    static_assert(kHeadDim % 16 == 0 && (kHeadDim <= 128 || !kPacked<Config>), "a packed element has 11 bits");
    static_assert(!Config::kSplit || Config::kCluster == 1, "a row is shared through memory, or by a cluster");

    const AttentionArgs& args;
    const u32 shared, warp, lane, rank;
    const u32 ring;
    const pipeline::WarpRing<Config::kStages, kAsync<Config>> slots;
    const u32 row, kv_head;
    const u32 position;
    const bool active;
    const u32 first_token;  // first token inside the window
    const u32 first_tile, last_tile;
    const u32 tile_warp;  // this warp's index among the row_warps()
    const u32 tiles;      // tiles of this warp
    const u32 live;       // kSplit: number of (leading) parts that have a tile; 1 for a row without a token
    const u32 hot_tile;   // kPacked: the first tile of the hot page; otherwise 0, and no tile is packed
    const u64 policy;

    // The next tile to load, an index among the warp's; the pages of 32 of its tiles, one per lane, and of the next 32.
    u32 load_slot = 0, load_index = 0, pages, next_pages;
    u32 load_half = kKey;  // K or V of a hot tile
    // Bit s: slot s has an invalid page number. The page of the newest token.
    u32 refused = 0, newest_page = ~0u;
    // The next slot to compute.
    u32 slot = 0, parity = 0;

    Rows<kHeadDim> rows;

    UW_DEVICE Kernel(const AttentionArgs& a, u32 shared_address)
        : args(a),
          shared(shared_address),
          warp(ptx::uniform_warp_index()),
          lane(ptx::laneid()),
          rank(Config::kSplit         ? ptx::ctaid() % a.parts
               : Config::kCluster > 1 ? ptx::cluster_ctarank()
                                      : 0),
          ring(shared_address + S::kRings + warp * S::kRingBytes),
          slots{shared_address + S::kBarriers + warp * Config::kStages * 8},
          row(ptx::ctaid() / sharers(a) / a.kv_heads),
          kv_head(ptx::ctaid() / sharers(a) % a.kv_heads),
          position(ptx::ld_global(a.positions + row)),
          active(position < a.max_positions && position / kv::kPageTokens < a.table_pages),
          first_token(a.window != 0 && active && position >= a.window ? position - a.window + 1 : 0),
          first_tile(first_token / kTileTokens),
          last_tile(position / kTileTokens),
          tile_warp(rank * Config::kWarps + warp),
          tiles(active ? (last_tile - first_tile + row_warps() - tile_warp) / row_warps() : 0),
          live(!Config::kSplit || !active ? 1
                                          : least(a.parts, (last_tile - first_tile + Config::kWarps) / Config::kWarps)),
          hot_tile(kPacked<Config> ? position / kv::kPageTokens * kPageTiles : 0),
          policy(ptx::createpolicy_l2(L2::kEvictFirst)),
          // Loaded together with the position, as if first_tile were 0; run() reloads them if it is not.
          pages(load_page((tile_warp + lane * row_warps()) / kPageTiles)) {}

    UW_DEVICE static u32 least(u32 a, u32 b) { return a < b ? a : b; }
    // Blocks that share a row and KV head, and their warps, to which its tiles are assigned round-robin.
    UW_DEVICE static u32 sharers(const AttentionArgs& a) { return Config::kSplit ? a.parts : Config::kCluster; }
    UW_DEVICE u32 row_warps() const { return Config::kWarps * sharers(args); }
    UW_DEVICE u32 tile_of(u32 index) const { return first_tile + tile_warp + index * row_warps(); }
    UW_DEVICE u32 key_slot(u32 s) const { return ring + s * S::kSlotBytes; }
    UW_DEVICE u32 value_slot(u32 s) const { return key_slot(s) + S::kTileBytes; }
    UW_DEVICE u32 query_chunk(u32 head, u32 chunk) const {
        return shared + S::kQueries + kv::chunk_offset(kHeadDim, head, chunk);
    }
    // K or V of the KV head in a bf16 page.
    UW_DEVICE u16* head_of(u32 page, u32 half) const {
        u16* pages_of = kPacked<Config> ? args.hot : args.layer;
        return pages_of + kv::head_element(kHeadDim, args.kv_heads, page, kv_head, half);
    }
    UW_DEVICE void report() const {
        if (ptx::elect_sync()) ptx::st_global(args.fault, 1 + row);
    }

    // ---- load ------------------------------------------------------------------------------------------------------
    // An entry of the row's page table; past the end, the last entry.
    UW_DEVICE u32 load_page(u32 entry) const {
        const u32 last = args.table_pages - 1;
        return ptx::ld_global(args.page_table + u64(row) * args.table_pages + (entry < last ? entry : last));
    }
    // The pages of 32 of the warp's tiles from `index` on, one per lane.
    UW_DEVICE u32 load_pages(u32 index) const {
        return index < tiles ? load_page(tile_of(index + lane) / kPageTiles) : ~0u;
    }
    // Called by a converged warp that has released the slot.
    UW_DEVICE void load_next() {
        if (load_index < tiles) load_tile();
        // An empty group is committed, too: cp_async_wait_group counts groups.
        if constexpr (kAsync<Config>) ptx::cp_async_commit_group();
    }
    UW_DEVICE void load_tile() {
        if (load_index != 0 && load_index % 32 == 0) {
            pages = next_pages;
            next_pages = load_pages(load_index + 32);
        }
        const u32 tile = tile_of(load_index);
        if constexpr (kPacked<Config>) {
            load_packed(tile);
            load_slot = load_slot + 1 == Config::kStages ? 0 : load_slot + 1;
            return;
        }
        const u32 page = ptx::shfl_sync_idx(pages, load_index % 32);
        const bool refuse = page >= args.pages;
        refused = (refused & ~(1u << load_slot)) | u32(refuse) << load_slot;
        if (tile == last_tile) newest_page = page;
        const u64 inside = u64(tile % kPageTiles) * (kTileTokens * kHeadDim);
        if (refuse) {
            report();
            // Complete the slot's phase without a copy.
            if (!kAsync<Config> && ptx::elect_sync()) ptx::mbarrier_arrive(slots.full(load_slot));
        } else if constexpr (kAsync<Config>) {
            const u16 *keys = head_of(page, kKey) + inside, *values = head_of(page, kValue) + inside;
#pragma unroll
            for (u32 at = lane * 16; at < S::kTileBytes; at += 512) {
                ptx::cp_async_x4(key_slot(load_slot) + at, keys + at / 2);
                ptx::cp_async_x4(value_slot(load_slot) + at, values + at / 2);
            }
        } else if (ptx::elect_sync()) {
            const u32 barrier = slots.full(load_slot);
            ptx::mbarrier_arrive_expect_tx(barrier, S::kSlotBytes);
            ptx::cp_async_bulk_load(key_slot(load_slot), head_of(page, kKey) + inside, S::kTileBytes, barrier, policy);
            ptx::cp_async_bulk_load(value_slot(load_slot), head_of(page, kValue) + inside, S::kTileBytes, barrier,
                                    policy);
        }
        load_slot = load_slot + 1 == Config::kStages ? 0 : load_slot + 1;
        ++load_index;
    }
    // kPacked: loads a packed tile, or K or V of a hot tile.
    UW_DEVICE void load_packed(u32 tile) {
        const bool hot = tile >= hot_tile;
        const u32 page = hot ? newest_page : ptx::shfl_sync_idx(pages, load_index % 32);
        const bool refuse = page >= (hot ? args.hot_pages : args.pages);
        refused = (refused & ~(1u << load_slot)) | u32(refuse) << load_slot;
        const u32 slot_address = key_slot(load_slot);
        if (refuse) {
            report();
            // Complete the slot's phase without a copy.
            if (!kAsync<Config> && ptx::elect_sync()) ptx::mbarrier_arrive(slots.full(load_slot));
        } else if (hot) {
            const u16* from = head_of(page, load_half) + u64(tile % kPageTiles) * (kTileTokens * kHeadDim);
            if constexpr (kAsync<Config>) {
                copy(slot_address, from, S::kTileBytes);
            } else if (ptx::elect_sync()) {
                const u32 barrier = slots.full(load_slot);
                ptx::mbarrier_arrive_expect_tx(barrier, S::kTileBytes);
                ptx::cp_async_bulk_load(slot_address, from, S::kTileBytes, barrier, policy);
            }
        } else {
            const u64 head = P::head(args.kv_heads, page, kv_head);
            const u8* layer = reinterpret_cast<const u8*>(args.layer);
            const u8* from = layer + head * P::kHeadBytes + tile % kPageTiles * P::kTileBytes;
            const u8* records = args.records + head * (2 * P::kRecordBytes);
            if constexpr (kAsync<Config>) {
                copy(slot_address, from, P::kTileBytes);
                copy(slot_address + P::kTileBytes, records, 2 * P::kRecordBytes);
            } else if (ptx::elect_sync()) {
                const u32 barrier = slots.full(load_slot);
                ptx::mbarrier_arrive_expect_tx(barrier, S::kPackedBytes);
                ptx::cp_async_bulk_load(slot_address, from, P::kTileBytes, barrier, policy);
                // No eviction hint: all tiles of a page read its records.
                ptx::cp_async_bulk_load(slot_address + P::kTileBytes, records, 2 * P::kRecordBytes, barrier);
            }
        }
        if (hot && load_half == kKey) {
            load_half = kValue;
        } else {
            load_half = kKey;
            ++load_index;
        }
    }
    // Copies a contiguous range, all lanes together.
    UW_DEVICE void copy(u32 to, const void* from, u32 bytes) const {
        const u8* source = static_cast<const u8*>(from);
        for (u32 at = lane * 16; at < bytes; at += 512) ptx::cp_async_x4(to + at, source + at);
    }
    UW_DEVICE void next_slot() {
        slot = slot + 1 == Config::kStages ? 0 : slot + 1;
        parity ^= slot == 0;
    }

    // ---- the new token ----------------------------------------------------------------------------------------------
    // One head of the projection's row, processed by a warp: each lane has two words, which are rotated together.
    // `gamma`: weights of its norm, or null. Results go to `store(word, value)`.
    template <class Store>
    UW_DEVICE void prepare(u32 head, const u16* gamma, bool rotate, u32 cosines, u32 sines, Store store) const {
        if constexpr (kHeadDim > 128) return prepare_large<Config>(args, row, position, head, gamma, rotate, store);
        const u32 half = args.rope_dim / 4;  // words of half of the rotated elements
        const bool turned = lane < half, mine = lane < kPairs / 2;
        const u32 first = turned ? lane : lane * 2, second = turned ? lane + half : lane * 2 + 1;
        u32 x = 0, y = 0;
        if (mine) {
            const u64 at = u64(head) * kHeadDim;
            const u16* from = args.qkv + row * args.qkv_pitch + at;
            x = ptx::ld_global(from + 2 * first);
            y = ptx::ld_global(from + 2 * second);
            if (args.bias != nullptr) {
                x = activation::add_bias(x, ptx::ld_global(args.bias + at + 2 * first));
                y = activation::add_bias(y, ptx::ld_global(args.bias + at + 2 * second));
            }
        }
        // With kSoftcap, `eps` is the factor of the scores, and there are no norms.
        if (!Config::kSoftcap && gamma != nullptr) {
            float sum = activation::add_squares(activation::add_squares(0.0f, x), y);
#pragma unroll
            for (u32 step = 16; step != 0; step /= 2) sum = ptx::add(sum, shfl_sync_bfly(sum, step));
            const float scale = activation::norm_scale(sum, kHeadDim, args.eps);
            if (mine) {
                x = scale_norm<Config>(x, ptx::ld_global(gamma + 2 * first), scale);
                y = scale_norm<Config>(y, ptx::ld_global(gamma + 2 * second), scale);
            }
        }
        if (rotate && turned) {
            if constexpr (Config::kAdjacent) {
                activation::rotate_adjacent(x, y, cosines, sines);
            } else {
                activation::rotate(x, y, cosines, sines);
            }
        }
        if (mine) {
            store(first, x);
            store(second, y);
        }
    }
    // Queries of the group; in the block that owns the newest tile also the new key and value.
    UW_DEVICE void prepare_heads(u32 cosines, u32 sines) const {
        const u32 heads = args.kv_heads * args.group;
        const bool newest = (last_tile - first_tile) % row_warps() / Config::kWarps == rank;
        for (u32 unit = warp; unit < args.group + 2 * newest; unit += Config::kWarps) {
            if (unit < args.group) {
                const auto store = [&](u32 word, u32 value) {
                    ptx::st_shared(query_chunk(unit, word / 4) + word % 4 * 4, value);
                };
                prepare(kv_head * args.group + unit, args.q_norm, true, cosines, sines, store);
            } else {
                const u32 half = unit - args.group, head = heads + half * args.kv_heads + kv_head;
                const u16* gamma = half == kKey ? args.k_norm : nullptr;
                const auto store = [&](u32 word, u32 value) {
                    ptx::st_shared(shared + S::kFresh + half * (kHeadDim * 2) + word * 4, value);
                };
                prepare(head, gamma, half == kKey, cosines, sines, store);
            }
        }
    }
    // Called by the warp that owns the newest tile, after its copy has landed: writes K or V into the copy and into the
    // page.
    UW_DEVICE void append(u32 half, u32 copy_address) const {
        const u32 line = position % kTileTokens;
        for (u32 chunk = lane; chunk < kChunks; chunk += 32) {
            const U32x4 v = ptx::ld_shared_x4(shared + S::kFresh + (half * kChunks + chunk) * 16);
            ptx::st_shared_x4(copy_address + kv::chunk_offset(kHeadDim, line, chunk), v);
            u16* page = head_of(newest_page, half);
            ptx::st_global_x4(page + kv::chunk_offset(kHeadDim, position % kv::kPageTokens, chunk) / 2, v);
        }
    }

    // ---- compute ---------------------------------------------------------------------------------------------------
    // Zeroes the values of tokens outside the row's range: their weight is 0, but 0 * NaN is NaN.
    UW_DEVICE void clear_values(u32 first, u32 copy_address) const {
        for (u32 unit = lane; unit < kTileTokens * kChunks; unit += 32) {
            const u32 line = unit / kChunks, token = first + line;
            if (token < first_token || token > position) {
                const u32 at = kv::chunk_offset(kHeadDim, line, unit % kChunks);
                ptx::st_shared_x4(copy_address + at, U32x4{0, 0, 0, 0});
            }
        }
    }
    // Masks the scores of tokens outside the row's range.
    UW_DEVICE void mask_scores(float (&scores)[2][4], u32 first) const {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            const u32 token = first + i / 4 * 8 + lane % 4 * 2 + i % 2;
            if (token < first_token || token > position) scores[i / 4][i % 4] = left_out();
        }
    }
    // A bf16 tile: K and V in one slot, or with kPacked in two consecutive slots.
    UW_DEVICE void compute(u32 tile, const u32 (&q)[kHeadDim / 16][4]) {
        slots.wait(slot, parity);
        const u32 first = tile * kTileTokens;
        const bool edge = first < first_token || tile == last_tile;
        if (edge) {
            if (tile == last_tile) append(kKey, key_slot(slot));
            if constexpr (!kPacked<Config>) edge_values(tile, value_slot(slot));
            ptx::bar_warp_sync();  // orders every lane's stores to the slot before the warp's ldmatrix
        }
        float scores[2][4] = {};
        const Lines<kHeadDim> keys(lane % 8 + lane / 16 * 8, lane / 8 % 2);
        if constexpr (kQueriesInSmem) {
#pragma unroll
            for (u32 s = 0; s < kHeadDim / 16; ++s) {
                const U32x4 k = ptx::ldmatrix_x4(keys.at(key_slot(slot), s));
                const u32 operands[4] = {k.x, k.y, k.z, k.w};
                add_scores(scores, s, operands);
            }
        } else {
            score<kHeadDim>(scores[0], scores[1], q, keys, key_slot(slot));
        }
        if constexpr (Config::kSoftcap) cap_scores(scores, args.eps);
        if (edge) mask_scores(scores, first);
        u32 values_address = value_slot(slot);
        if constexpr (kPacked<Config>) {
            slots.release();
            load_next();
            next_slot();
            slots.wait(slot, parity);
            values_address = key_slot(slot);
            if (edge) {
                edge_values(tile, values_address);
                ptx::bar_warp_sync();  // orders every lane's stores to the slot before the warp's ldmatrix
            }
        }
        // V of tokens 0-7 and 8-15, by pairs of 8 elements: all loads are issued before the refill.
        const Lines<kHeadDim> values(lane % 16, lane / 16);
        U32x4 v[kHeadDim / 16];
#pragma unroll
        for (u32 s = 0; s < kHeadDim / 16; ++s) v[s] = ptx::ldmatrix_x4_trans(values.at(values_address, s));
        // Nothing has used the values yet, so the loads may still be in flight; release() fences them.
        slots.release();
        load_next();
        u32 p[1][4];
        rows.weigh(scores, args.scale, p);
#pragma unroll
        for (u32 s = 0; s < kHeadDim / 16; ++s) add_values(s, p[0], v[s].x, v[s].y, v[s].z, v[s].w);
    }
    UW_DEVICE void edge_values(u32 tile, u32 copy_address) const {
        if (tile == last_tile) append(kValue, copy_address);
        clear_values(tile * kTileTokens, copy_address);
    }
    // P * V of one step: operands of elements 0-7, then of elements 8-15, each of tokens 0-7 and 8-15.
    UW_DEVICE void add_values(u32 step, const u32 (&p)[4], u32 a, u32 b, u32 c, u32 d) {
        const u32 even[2] = {a, b}, odd[2] = {c, d};
        ptx::mma_m16n8k16(rows.o[2 * step], p, even);
        ptx::mma_m16n8k16(rows.o[2 * step + 1], p, odd);
    }

    // ---- packed tiles ----------------------------------------------------------------------------------------------
    UW_DEVICE kv::Record record_of(u32 half) const {
        return kv::Record::shared(key_slot(slot) + P::kTileBytes + half * P::kRecordBytes);
    }
    // Shared address of a record's escape slots.
    UW_DEVICE u32 slots_of(u32 half) const {
        return key_slot(slot) + P::kTileBytes + half * P::kRecordBytes + kv::kRecordHead;
    }
    // Whether the operands of a record's unit can be read. A kind that no encoder writes is reported.
    UW_DEVICE bool readable(const kv::Record& record) const {
        if (record.kind() == kv::kPackedUnit) return true;
        if (record.kind() == kv::kBf16Unit && record.unit() < args.units) return true;
        // The host discards the tokens of a row that lost a unit.
        if (record.kind() != kv::kLostUnit) report();
        return false;
    }
    // The operands of a step, for any valid record: a bf16 unit, or a packed tile with any number of escapes.
    UW_DEVICE void special_quad(u32 (&p)[4], const u32 (&words)[P::kWords], u32 step, const kv::Record& record,
                                u32 half, u32 tile) const {
        if (record.kind() == kv::kBf16Unit) {
            return P::unit_quad(p, P::unit_tile(args.unit_pages, record.unit(), tile), step, lane);
        }
        P::quad(p, words, step, record.pair(step));
        const u32 at = slots_of(half), end = record.end(tile, P::kSlots);
#pragma unroll 1
        for (u32 i = record.begin(tile); i < end; ++i) {
            kv::patch(p, ptx::ld_shared_u16(at + i * 2), step, lane, record);
        }
    }
    UW_DEVICE void compute_packed(u32 tile) {
        slots.wait(slot, parity);
        const kv::Record key = record_of(kKey), value = record_of(kValue);
        const u32 first = tile * kTileTokens, inside = tile % kPageTiles;
        if (first < first_token || ((key.word | value.word) & 255) != kv::kPackedUnit) {
            return compute_special(first, inside, key, value);
        }
        if (((key.changes() | value.changes()) >> (8 * inside) & 255) == 0) {
            return attend_packed<false>(key, value, {}, {});
        }
        bool clash = false;
        const auto keys = kv::Escapes::of<P::kSlots>(key, slots_of(kKey), inside, lane, clash);
        const auto values = kv::Escapes::of<P::kSlots>(value, slots_of(kValue), inside, lane, clash);
        if (ptx::vote_sync_ballot(clash) != 0) return compute_special(first, inside, key, value);
        attend_packed<true>(key, value, keys, values);
    }
    // A tile in which every lane has at most one escape in K, and one in V.
    template <bool kEscapes>
    UW_DEVICE void attend_packed(const kv::Record& key, const kv::Record& value, const kv::Escapes& key_escapes,
                                 const kv::Escapes& value_escapes) {
        u32 keys[P::kWords], values[P::kWords], p[1][4];
        P::load(keys, key_slot(slot), lane);
        P::load(values, key_slot(slot) + P::kOperandBytes, lane);
        float scores[2][4] = {};
#pragma unroll
        for (u32 s = 0; s < P::kSteps; ++s) {
            u32 k[4];
            P::quad(k, keys, s, key.pair(s));
            if constexpr (kEscapes) key_escapes.apply(k, s);
            add_scores(scores, s, k);
        }
        // All words have been requested, and those of K have arrived; the loads of V may still be in flight.
        slots.release();
        load_next();
        if constexpr (Config::kSoftcap) cap_scores(scores, args.eps);
        rows.weigh(scores, args.scale, p);
#pragma unroll
        for (u32 s = 0; s < P::kSteps; ++s) {
            u32 v[4];
            P::quad(v, values, s, value.pair(s));
            if constexpr (kEscapes) value_escapes.apply(v, s);
            add_values(s, p[0], v[0], v[1], v[2], v[3]);
        }
    }
    // The rare case: a tile with a bf16 unit, with tokens before the window, or with several escapes in one lane.
    UW_DEVICE void compute_special(u32 first, u32 inside, const kv::Record& key, const kv::Record& value) {
        if (!readable(key) || !readable(value)) {
            slots.release();
            load_next();
            return;
        }
        const bool edge = first < first_token;
        u32 words[P::kWords], p[1][4];
        P::load(words, key_slot(slot), lane);
        float scores[2][4] = {};
#pragma unroll
        for (u32 s = 0; s < P::kSteps; ++s) {
            u32 k[4];
            special_quad(k, words, s, key, kKey, inside);
            add_scores(scores, s, k);
        }
        if constexpr (Config::kSoftcap) cap_scores(scores, args.eps);
        if (edge) mask_scores(scores, first);
        P::load(words, key_slot(slot) + P::kOperandBytes, lane);
        rows.weigh(scores, args.scale, p);
#pragma unroll
        for (u32 s = 0; s < P::kSteps; ++s) {
            u32 v[4];
            special_quad(v, words, s, value, kValue, inside);
            if (edge) kv::clear_values_before(v, first_token - first, lane);
            add_values(s, p[0], v[0], v[1], v[2], v[3]);
        }
        slots.release();
        load_next();
    }
    // queries * K of one step. The queries are reloaded each time; in registers they would halve the number of warps.
    UW_DEVICE void add_scores(float (&scores)[2][4], u32 step, const u32 (&k)[4]) const {
        const U32x4 v = ptx::ldmatrix_x4(Lines<kHeadDim>(lane % 16, lane / 16).at(shared + S::kQueries, step));
        const u32 q[4] = {v.x, v.y, v.z, v.w}, low[2] = {k[0], k[1]}, high[2] = {k[2], k[3]};
        ptx::mma_m16n8k16(scores[0], q, low);
        ptx::mma_m16n8k16(scores[1], q, high);
    }
    // ---- reduction --------------------------------------------------------------------------------------------------
    // Byte offset of words 2 * pair and 2 * pair + 1 of a row in a warp's O. Rows are rotated against each other so
    // that the stores of a fragment are free of bank conflicts.
    UW_DEVICE static u32 sum_offset(u32 r, u32 pair) { return r * (kHeadDim * 4) + (pair + r % 4 * 4) % kPairs * 8; }

    UW_DEVICE void store_sums() {
        rows.finish();
        const u32 g = lane / 4, t = lane % 4;
        const u32 states = shared + S::kStates + warp * S::kStateBytes;
#pragma unroll
        for (u32 r = 0; r < 2; ++r) {
            const u32 head = g + 8 * r;
            if (head >= args.group) break;
            if (t == 0) store_floats(states + head * 8, rows.max[r], rows.sum[r]);
            if (tiles == 0) continue;
            // O overlays the ring: its copies have landed and were waited for, and only this warp reads it.
#pragma unroll
            for (u32 f = 0; f < Rows<kHeadDim>::kFragments; ++f) {
                store_floats(ring + sum_offset(head, f * 4 + t), rows.o[f][2 * r], rows.o[f][2 * r + 1]);
            }
        }
    }
    // Loads two words of warp w of the cluster. `address` is that of warp 0 in block 0.
    UW_DEVICE static U32x2 load_of(u32 w, u32 address, u32 pitch) {
        address += w % Config::kWarps * pitch;
        if constexpr (Config::kCluster == 1) return ptx::ld_shared_x2(address);
        return ptx::ld_shared_cluster_x2(ptx::mapa(address, w / Config::kWarps));
    }
    UW_DEVICE U32x2 load_state(u32 w, u32 head) const {
        return load_of(w, shared + S::kStates + head * 8, S::kStateBytes);
    }
    // The total over all warps of the block, or cluster, in order.
    UW_DEVICE Total total(u32 head, u32 pair) const {
        float top = left_out(), factors[kSummedWarps];
#pragma unroll
        for (u32 w = 0; w < kSummedWarps; ++w) {
            const U32x2 state = load_state(w, head);
            factors[w] = ptx::float_from_bits(state.x);
            top = ptx::max(top, factors[w]);
        }
        const float shift = top == left_out() ? 0.0f : top * args.scale;
        float low = 0.0f, high = 0.0f, sum = 0.0f;
#pragma unroll
        for (u32 w = 0; w < kSummedWarps; ++w) {
            const U32x2 state = load_state(w, head);
            // A warp without tokens has stored no O.
            if (state.y == 0) continue;
            const float factor = ptx::ex2_approx(factors[w] * args.scale - shift);
            const U32x2 o = load_of(w, shared + S::kRings + sum_offset(head, pair), S::kRingBytes);
            sum += factor * ptx::float_from_bits(state.y);
            low += factor * ptx::float_from_bits(o.x);
            high += factor * ptx::float_from_bits(o.y);
        }
        return {top, sum, low, high};
    }
    UW_DEVICE u32 divided(Total t) const {
        const float factor = inverse(t.sum);
        return ptx::cvt_rn_bf16x2(t.low * factor, t.high * factor);
    }
    UW_DEVICE void sync_cluster() const {
        if constexpr (Config::kCluster > 1) {
            ptx::barrier_cluster_arrive();
            ptx::barrier_cluster_wait();
        } else {
            ptx::bar_sync();
        }
    }

    // ---- parts (kSplit) ---------------------------------------------------------------------------------------------
    // The record of a part in global memory: for each head its maximum and sum, then O.
    UW_DEVICE u8* part(u32 of) const { return args.partials + u64(ptx::ctaid() - rank + of) * S::kPartBytes; }
    UW_DEVICE u8* part_state(u32 of, u32 head) const { return part(of) + head * 8; }
    UW_DEVICE u8* part_sums(u32 of, u32 head) const { return part(of) + S::kStateBytes + head * (kHeadDim * 4); }

    // Called once by the whole block. Returns true in the block that takes the last ticket; all parts of the row and KV
    // head are in memory by then.
    UW_DEVICE bool leave_part() const {
        for (u32 unit = warp * 32 + lane; unit < args.group * kPairs; unit += kThreads<Config>) {
            const u32 head = unit / kPairs, pair = unit % kPairs;
            const Total t = total(head, pair);
            const U32x2 sums{ptx::bits_from_float(t.low), ptx::bits_from_float(t.high)};
            const U32x2 state{ptx::bits_from_float(t.top), ptx::bits_from_float(t.sum)};
            ptx::st_global_x2(part_sums(rank, head) + pair * 8, sums);
            if (pair == 0) ptx::st_global_x2(part_state(rank, head), state);
        }
        // Orders the stores of the part before its ticket, and loads of states before the flag that overwrites them.
        ptx::bar_sync();
        if (warp == 0 && ptx::elect_sync()) {
            u32* counter = args.counters + ptx::ctaid() / args.parts;
            ptx::fence_acq_rel_gpu();  // releases the part together with the ticket
            const bool last = ptx::atom_add_global(counter, 1) == live - 1;
            ptx::fence_acq_rel_gpu();  // acquires the parts of all earlier tickets
            // No ticket follows this one; the next launch starts at 0.
            if (last) ptx::st_global(counter, 0);
            ptx::st_shared(shared + S::kStates, last);
        }
        // Makes what one thread has acquired visible to all threads, and orders the flag before their loads.
        ptx::bar_sync();
        return ptx::ld_shared(shared + S::kStates) != 0;
    }
    // Each thread adds four elements of a head over all parts, in order of rank.
    UW_DEVICE void add_parts(u16* out) const {
        constexpr u32 kQuads = kHeadDim / 4;
        for (u32 unit = warp * 32 + lane; unit < args.group * kQuads; unit += kThreads<Config>) {
            const u32 head = unit / kQuads, quad = unit % kQuads;
            float top = left_out(), sum = 0.0f, o[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            for (u32 first = 0; first < live; first += kPartsAtOnce) {
                U32x2 states[kPartsAtOnce];
                U32x4 sums[kPartsAtOnce];
#pragma unroll
                for (u32 i = 0; i < kPartsAtOnce; ++i) {
                    const u32 of = least(first + i, live - 1);  // loads past the last part are discarded
                    states[i] = ptx::ld_global_x2(part_state(of, head));
                    sums[i] = ptx::ld_global_x4(part_sums(of, head) + quad * 16);
                }
                const float before = top;
#pragma unroll
                for (u32 i = 0; i < kPartsAtOnce; ++i) top = ptx::max(top, ptx::float_from_bits(states[i].x));
                const float shift = top == left_out() ? 0.0f : top * args.scale;
                const float moved = sum == 0.0f ? 0.0f : ptx::ex2_approx(before * args.scale - shift);
                sum *= moved;
#pragma unroll
                for (u32 j = 0; j < 4; ++j) o[j] *= moved;
#pragma unroll
                for (u32 i = 0; i < kPartsAtOnce; ++i) {
                    // A part whose pages were all invalid has no weight.
                    if (first + i >= live || states[i].y == 0) continue;
                    const float factor = ptx::ex2_approx(ptx::float_from_bits(states[i].x) * args.scale - shift);
                    sum += factor * ptx::float_from_bits(states[i].y);
                    o[0] += factor * ptx::float_from_bits(sums[i].x);
                    o[1] += factor * ptx::float_from_bits(sums[i].y);
                    o[2] += factor * ptx::float_from_bits(sums[i].z);
                    o[3] += factor * ptx::float_from_bits(sums[i].w);
                }
            }
            const float factor = inverse(sum);
            const u32 low = ptx::cvt_rn_bf16x2(o[0] * factor, o[1] * factor);
            ptx::st_global_x2(out + 4 * unit, {low, ptx::cvt_rn_bf16x2(o[2] * factor, o[3] * factor)});
        }
    }

    // ---- entry ------------------------------------------------------------------------------------------------------
    UW_DEVICE void run() {
        // A part without tiles may return before griddepcontrol_wait: part 0 always waits, so dependents cannot start
        // before the previous kernel has ended.
        if (Config::kSplit && rank >= live) return;
        slots.init();
        // Every row reads it, even one without a token: the table has an entry for each row.
        if constexpr (kPacked<Config>) newest_page = ptx::ld_global(args.hot_table + row);
        if (first_tile != 0) pages = load_pages(0);
        next_pages = load_pages(32);
#pragma unroll
        for (u32 s = 0; s < Config::kStages; ++s) load_next();
        u32 cosines = 0, sines = 0;
        if (active && lane < args.rope_dim / 4) {
            const u64 at = u64(position) * (args.rope_dim / 2) + 2 * lane;
            cosines = ptx::ld_global(args.cosines + at);
            sines = ptx::ld_global(args.sines + at);
        }
        // Zero the rows of the fragment that have no head.
        for (u32 unit = args.group * kChunks + warp * 32 + lane; unit < kRows * kChunks; unit += kThreads<Config>) {
            ptx::st_shared_x4(query_chunk(unit / kChunks, unit % kChunks), U32x4{0, 0, 0, 0});
        }
        if constexpr (Config::kPdl) ptx::griddepcontrol_wait();

        const u32 units = args.group * kPairs, share = (units + Config::kCluster - 1) / Config::kCluster;
        const u32 own = Config::kSplit ? 0 : rank * share, end = least(own + share, units);
        const u32 begin = own + warp * 32 + lane;
        u16* out = args.out + row * args.out_pitch + u64(kv_head) * args.group * kHeadDim;
        // Uniform over a cluster, because its blocks share the row.
        if (!active) {
            if (warp == 0 && rank == 0 && position != kPadPosition) report();
            for (u32 unit = begin; unit < end; unit += kThreads<Config>) ptx::st_global(out + 2 * unit, 0);
            return;
        }
        prepare_heads(cosines, sines);
        ptx::bar_sync();  // orders the stores of queries, new key and new value before the loads of other warps
        rows.clear();
        if (tiles != 0) {
            u32 q[kHeadDim / 16][4];
            if constexpr (!kQueriesInSmem) load_queries<kHeadDim>(q, shared + S::kQueries, lane);
            for (u32 index = 0; index < tiles; ++index) {
                const u32 tile = tile_of(index);
                const bool packed = kPacked<Config> && tile < hot_tile;
                if (refused >> slot & 1) {
                    load_next();
                    if (kPacked<Config> && !packed) {
                        // The other half is invalid, too.
                        next_slot();
                        load_next();
                    }
                } else if (packed) {
                    if constexpr (kPacked<Config>) compute_packed(tile);
                } else {
                    compute(tile, q);
                }
                next_slot();
            }
        }
        store_sums();
        sync_cluster();  // orders the stores of results before the loads of other warps
        if constexpr (Config::kSplit) {
            if (live > 1) {
                if (leave_part()) add_parts(out);
                return;
            }
        }
        for (u32 unit = begin; unit < end; unit += kThreads<Config>) {
            ptx::st_global(out + 2 * unit, divided(total(unit / kPairs, unit % kPairs)));
        }
        // Peers may still be reading this block's results.
        if constexpr (Config::kCluster > 1) sync_cluster();
    }
};

template <class Config>
UW_DEVICE void run(const AttentionArgs& args) {
    if constexpr (Config::kPdl) ptx::griddepcontrol_launch_dependents();
    Kernel<Config> kernel(args, ptx::cvta_to_shared(ptx::dynamic_smem()));
    kernel.run();
}

}  // namespace uw::attention::decode
