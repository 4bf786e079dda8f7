// GEMM for small batches from the compact encoding: Y[m, n] = X[m, k] * W[n, k]^T, W entropy-coded (docs/format.md,
// A.11). As in kernels/gemm_mma.cuh, the *weight* is the A operand of mma.m16n8k16 and goes from shared memory to
// registers to the tensor cores. The classes of its exponents are decoded from two code chains per lane
// (encoding/compact.cuh). The tensor cores see the weights times 2^(96 - base), bit for bit, with escapes replaced; the
// fp32 sums are multiplied once by GemmCompactArgs::scale.
//
// Config (the axes of unweight-codegen/src/family/gemm_compact.rs)
//   u32  kBatchTile      8,16,32  rows of X per cluster; accumulators take 2 * kBatchTile registers, X one more per row
//   u32  kWarps          1..32    split-K within a block: warp w takes tile columns w, w + kWarps * kCluster, ...; with
//                                 kPersistent, warps take contiguous, nearly equal runs of tiles
//   u32  kStages         1..16    slots of each warp's private ring
//   u32  kCluster        1,2,4,8  blocks that split k among them; reduced through distributed shared memory
//   u32  kTables         1,8,16,32  copies of the code table (encoding/compact.cuh): more copies, fewer bank conflicts
//   bool kPersistent     a cluster processes several rows of tiles instead of one row
//   Epilogue kEpilogue   as in kernels/gemm_mma.cuh
//   bool kPdl            programmatic dependent launch: weights are loaded before griddepcontrol.wait, X and Y are
//                        accessed after it
//
// Launch: kThreads<Config> = 32 * kWarps threads, Smem<Config>::kBytes of dynamic shared memory, clusters of kCluster
// blocks along x, m >= 1, and
//   grid = groups * ceil(m / kBatchTile) * kCluster, groups = n / 64, or with kPersistent any number from
//   n / 64 / (kFlushes * kCluster), rounded up, to n / 64. A task is a row of tiles: a chain spans two row blocks, so
//   smaller pieces cannot be decoded independently. kPersistent: the rows are distributed over the groups in order,
//   with counts that differ by at most one. Their tiles, row by row, are distributed over a cluster's blocks and a
//   block's warps, the remainder going to the first, so all warps of an SM are busy to the end for any number of rows.
//   If a warp passes from one row to the next, it flushes the sums of the first to a buffer of the block, which has one
//   such buffer per row that ends within the block.
//
// Roles: none. Every warp copies for itself. Per slot, an elected lane issues one box of X (64 of k by kBatchTile,
// 128-byte swizzle, zero-filled past the batch), the dense part of a tile, and its streams, widened to whole 16-byte
// units. Stream locations are read for 32 tiles at a time, one per lane. Warps exchange nothing before the reduction.
// One step: wait | ldmatrix X | twice: one row block of each chain | patch | 8 * kBatchTile / 8 mma. At batch tile 8,
// registers hold the whole dense part of a tile: the slot is refilled as soon as it is loaded, and the streams, which
// are read until the end, have one more slot (kEarly). Otherwise the slot is refilled after the last lookups.
//
// Barriers: full [kWarps][kStages], 1 arrival + bytes of X, dense part and streams. A warp refills its own slots, so
// there is no empty barrier: it releases a slot to the async proxy (pipeline::WarpRing::release) before it issues the
// next copy. There is one block barrier after the table is loaded, and one block (or cluster) barrier between writing
// and reading sums; clusters: one more before exit.
//
// Order of sums: a warp adds its tiles by increasing k; then the results are added by block rank and warp index. The
// order depends only on k and the config; with kPersistent on n, k, the config and the number of groups.
//
// Shared memory = kWarps * (align1024(kStages * (kBatchTile * 128 + 5120 + 1232) + kEarly * 1232) + 8 * kStages)
//   + 2048 * kTables (table) + kPersistent * kFlushes * 256 * kBatchTile.
//   A warp's sums (fp32 [batch][row]) overlay its own drained ring.
// Global reads per tile: 5120 + 1380 on average (32 of lengths) + 8, and 128 * min(m, kBatchTile) (X: from L2 after the
//   first); 4 * (1 + records) per list; 2048 per block (L2).
//
// Safety: for any bytes: streams are clamped to `streams`; a slot holds the longest streams and the bytes that are read
// past them (encoding/compact.cuh); a list never reads past `record_words`; and a record changes a register of its
// lane.
//
// Bound: device memory, n * k * 1.35 bytes; shared memory and the decoding instructions are close behind.
#pragma once

#include "unweight/axes.cuh"
#include "unweight/epilogue/activation.cuh"
#include "unweight/encoding/compact.cuh"
#include "unweight/pipeline/warp_ring.cuh"
#include "unweight/ptx/barrier.cuh"
#include "unweight/ptx/bulk.cuh"
#include "unweight/ptx/control.cuh"
#include "unweight/ptx/fence.cuh"
#include "unweight/ptx/mbarrier.cuh"
#include "unweight/ptx/mma.cuh"
#include "unweight/smem/tile.cuh"

namespace uw::gemm_compact {

using compact::Chains, compact::Tile;
using packed::kSteps, packed::kTile, packed::kTileBlocks, packed::Operands;

constexpr u32 kBatchFragment = 8;        // the n dimension of m16n8k16
constexpr u32 kPairs = kTileBlocks / 2;  // row blocks per chain; one of each chain is decoded at a time
constexpr u32 kFlushes = 4;              // kPersistent: at most this many rows of tiles per block of a cluster

template <class Config>
constexpr u32 kThreads = Config::kWarps * 32;

// Whether a slot is refilled before its tile is decoded, which takes 40 registers for the dense part.
template <class Config>
constexpr bool kEarly = Config::kBatchTile == kBatchFragment;

// Offsets of the sections in dynamic shared memory, and their total.
template <class Config>
struct Smem {
    static constexpr u32 kXBytes = Config::kBatchTile * smem::kSwizzleBytes;
    static constexpr u32 kStageBytes = kXBytes + compact::kDenseTileBytes + compact::kSlotBytes;
    // Stream slots: one more than stages if a slot is refilled while the streams of its tile are still being read.
    static constexpr u32 kStreamSlots = Config::kStages + (kEarly<Config> ? 1 : 0);
    // One warp's ring: X of all stages, then the dense parts, then the streams.
    static constexpr u32 kUsedBytes =
        Config::kStages * (kXBytes + compact::kDenseTileBytes) + kStreamSlots * compact::kSlotBytes;
    static constexpr u32 kRingBytes =
        (kUsedBytes + smem::kSwizzlePeriodBytes - 1) / smem::kSwizzlePeriodBytes * smem::kSwizzlePeriodBytes;
    // One warp's sums, fp32 [batch][row].
    static constexpr u32 kSumBytes = Config::kBatchTile * kTile * 4;

    static constexpr u32 kRings = 0;
    static constexpr u32 kTable = Config::kWarps * kRingBytes;
    // kPersistent: flushed sums of rows that end within the block, from warps that continue with the next row.
    static constexpr u32 kFlushed = kTable + compact::Table<Config::kTables>::kBytes;
    static constexpr u32 kBarriers = kFlushed + (Config::kPersistent ? kFlushes * kSumBytes : 0);
    static constexpr u32 kBytes = kBarriers + Config::kWarps * Config::kStages * 8;

    static_assert(kXBytes % smem::kSwizzlePeriodBytes == 0, "swizzled tiles are 1024-byte aligned");
    static_assert(compact::kSlotBytes % 16 == 0 && compact::kDenseTileBytes % 16 == 0,
                  "bulk copies are 16-byte aligned");
    static_assert(kSumBytes <= kRingBytes, "a warp's sums overlay its ring");
};

template <class Config>
struct Kernel {
    using S = Smem<Config>;
    static constexpr u32 kFragments = Config::kBatchTile / kBatchFragment;
    static constexpr u32 kKWarps = Config::kWarps * Config::kCluster;  // warps that split a task's k
    static constexpr u32 kStep = Config::kPersistent ? 1 : kKWarps;    // from one tile of a warp to its next
    static constexpr u32 kNoColumn = ~0u;
    static constexpr u32 kPlaces = 32;  // tiles whose locations a warp loads at once, one per lane
    static constexpr u32 kBlockOut =
        kSiluMul<Config> ? packed::kGateRows : packed::kBlockRows;  // rows of Y^T per row block
    static constexpr u32 kOutRows = kTileBlocks * kBlockOut;        // rows of Y^T per task
    static_assert(Config::kBatchTile % kBatchFragment == 0, "a batch tile is made of fragments of 8");
    static_assert(Config::kStages <= kPlaces,
                  "places of one load reach from the slot that is worked on to the one that is filled");
    static_assert(kOutRows % (2 * Config::kCluster) == 0, "blocks of a cluster store as many pairs of rows");
    static_assert(packed::kBlockRows == 2 * packed::kGateRows, "a row block is rows of a gate and of its up");
    static_assert(!(kSiluMul<Config> && kStoreAdd<Config>), "a gate and its up overwrite");

    const GemmCompactArgs& args;
    const u32 shared, warp, lane;
    const u32 ring;
    const pipeline::WarpRing<Config::kStages, false> slots;
    const compact::Table<Config::kTables> table;
    const u32 rank;    // rank of the block in its cluster
    const u32 k_warp;  // this warp's index among the kKWarps
    const u32 batch_tiles, group;
    const u32 batch,
        tile_row;     // this cluster's first batch row and row of tiles. Clusters that share weights are adjacent
    const u32 tiles;  // tiles of the cluster, in whole rows
    const u64 first_tile;
    const u64 x_policy, w_policy;
    const u32 end;  // end of this warp's tiles; tiles of the cluster are numbered row by row

    // The next tile to load. Lane `turn` has the location of tile `turn` of 32 of the warp's tiles: `ahead` for those
    // that are loaded, `now` for those that are computed, which are the same or the preceding 32.
    u32 load_slot = 0, load_stream = 0, load_turn = 0, load_at, load_column;
    // The next tile to compute.
    u32 slot = 0, stream = 0, parity = 0, turn = 0, at;
    Tile ahead, now;

    float sums[kTileBlocks][kFragments][4];

    UW_DEVICE Kernel(const GemmCompactArgs& a, u32 shared_address)
        : args(a),
          shared(shared_address),
          warp(ptx::uniform_warp_index()),
          lane(ptx::laneid()),
          ring(shared_address + S::kRings + warp * S::kRingBytes),
          slots{shared_address + S::kBarriers + warp * Config::kStages * 8},
          table(shared_address + S::kTable, lane),
          rank(Config::kCluster > 1 ? ptx::cluster_ctarank() : 0),
          k_warp(rank * Config::kWarps + warp),
          batch_tiles((a.m + Config::kBatchTile - 1) / Config::kBatchTile),
          group(ptx::ctaid() / Config::kCluster),
          batch(group % batch_tiles * Config::kBatchTile),
          tile_row(first_row(group / batch_tiles)),
          tiles((first_row(group / batch_tiles + 1) - tile_row) * a.tile_cols),
          first_tile(static_cast<u64>(tile_row) * a.tile_cols),
          x_policy(ptx::createpolicy_l2(L2::kEvictLast)),
          w_policy(ptx::createpolicy_l2(batch_tiles == 1 ? L2::kEvictFirst : L2::kNormal)),
          end(Config::kPersistent ? first_of(k_warp + 1) : tiles),
          load_at(Config::kPersistent ? first_of(k_warp) : k_warp),
          load_column(Config::kPersistent ? load_at % a.tile_cols : k_warp),
          at(load_at),
          ahead(places(load_at)),
          now(ahead) {}

    // The first row of tiles of a group of clusters.
    UW_DEVICE u32 first_row(u32 g) const {
        if constexpr (!Config::kPersistent) return g;
        const u32 rows = args.n / kTile, groups = ptx::nctaid() / Config::kCluster / batch_tiles;
        return rows / groups * g + (g < rows % groups ? g : rows % groups);
    }
    // Distributes `count` items over `parts` in order, with the remainder to the first parts. Returns the first item of
    // a part, and the part of an item.
    UW_DEVICE static u32 first_of_part(u32 count, u32 parts, u32 part) {
        return count / parts * part + (part < count % parts ? part : count % parts);
    }
    UW_DEVICE static u32 part_of(u32 count, u32 parts, u32 thing) {
        const u32 each = count / parts, more = count % parts, ahead_of = more * (each + 1);
        return thing < ahead_of ? thing / (each + 1) : more + (thing - ahead_of) / each;
    }
    // kPersistent: the first tile of a block and of a warp, and the warp of a tile. Tiles are distributed over blocks
    // first: with at most kFlushes * kCluster rows, a block has at most as many tiles as kFlushes rows have, so at most
    // kFlushes rows end within it.
    UW_DEVICE u32 first_of_block(u32 by) const { return first_of_part(tiles, Config::kCluster, by); }
    UW_DEVICE u32 first_of(u32 w) const {
        const u32 by = w / Config::kWarps, first = first_of_block(by);
        return first + first_of_part(first_of_block(by + 1) - first, Config::kWarps, w % Config::kWarps);
    }
    UW_DEVICE u32 warp_of(u32 tile) const {
        const u32 by = part_of(tiles, Config::kCluster, tile), first = first_of_block(by);
        return by * Config::kWarps + part_of(first_of_block(by + 1) - first, Config::kWarps, tile - first);
    }

    UW_DEVICE u32 x_slot(u32 s) const { return ring + s * S::kXBytes; }
    UW_DEVICE u32 dense_slot(u32 s) const { return ring + Config::kStages * S::kXBytes + s * compact::kDenseTileBytes; }
    UW_DEVICE u32 stream_slot(u32 s) const { return dense_slot(Config::kStages) + s * compact::kSlotBytes; }

    // ---- load ------------------------------------------------------------------------------------------------------
    // Locations of the warp's tiles from `from` on, one per lane. Past the cluster's last tile, a lane takes the last
    // one.
    UW_DEVICE Tile places(u32 from) const {
        const u32 mine = from + lane * kStep;
        return Tile(args.tiles, first_tile + (mine < tiles ? mine : tiles - 1), args.stream_words);
    }
    // Escape lists are rare: prefetch them into L2 before their tile is reached.
    UW_DEVICE void prefetch_lists() const {
        const u32 list = ahead.head & ~packed::kListHead;
        if (list != ahead.head && list < args.record_words) ptx::prefetch_global_l2(args.records + list);
    }

    // The loads of one slot; called by one lane.
    UW_DEVICE void load_x(u32 s, u32 from) const {
        ptx::tma_load_2d(x_slot(s), args.x, from * kTile, batch, slots.full(s), x_policy);
    }
    UW_DEVICE void load_dense(u32 s, u32 tile) const {
        ptx::cp_async_bulk_load(dense_slot(s), args.dense + (first_tile + tile) * compact::kDenseTileBytes,
                                compact::kDenseTileBytes, slots.full(s), w_policy);
    }
    UW_DEVICE void load_streams(u32 s, u32 to, u32 first, u32 words) const {
        if (words != 0)
            ptx::cp_async_bulk_load(stream_slot(to), args.streams + first, words * 4, slots.full(s), w_policy);
    }

    UW_DEVICE void advance_load() {
        load_slot = load_slot + 1 == Config::kStages ? 0 : load_slot + 1;
        load_stream = load_stream + 1 == S::kStreamSlots ? 0 : load_stream + 1;
        load_at += kStep;
        load_column += kStep;
        if (Config::kPersistent && load_column == args.tile_cols) load_column = 0;
        ++load_turn;
    }
    // Called by a converged warp that has released the slot to the async proxy.
    UW_DEVICE void load_next() {
        if (load_at >= end) return;
        if (load_turn == kPlaces) {
            ahead = places(load_at);
            prefetch_lists();
            load_turn = 0;
        }
        const u32 first = ptx::shfl_sync_idx(ahead.first, load_turn),
                  words = ptx::shfl_sync_idx(ahead.words, load_turn);
        if (ptx::elect_sync()) {
            ptx::mbarrier_arrive_expect_tx(slots.full(load_slot), S::kXBytes + compact::kDenseTileBytes + words * 4);
            load_x(load_slot, load_column);
            load_dense(load_slot, load_at);
            load_streams(load_slot, load_stream, first, words);
        }
        advance_load();
    }

    // Fills the ring. First the dense parts, which need no stream location; last X, which depends on the preceding
    // kernel. Each slot gets its one arrival after all of its bytes are expected.
    UW_DEVICE void start() {
        slots.init();
        if constexpr (Config::kPdl) ptx::griddepcontrol_launch_dependents();
        u32 columns[Config::kStages];
#pragma unroll
        for (u32 s = 0; s < Config::kStages; ++s) {
            columns[s] = kNoColumn;
            if (load_at >= end) continue;
            columns[s] = load_column;
            if (ptx::elect_sync()) {
                ptx::mbarrier_expect_tx(slots.full(s), compact::kDenseTileBytes);
                load_dense(s, load_at);
            }
            advance_load();
        }
#pragma unroll
        for (u32 s = 0; s < Config::kStages; ++s) {
            const u32 first = ptx::shfl_sync_idx(ahead.first, s), words = ptx::shfl_sync_idx(ahead.words, s);
            if (columns[s] == kNoColumn || !ptx::elect_sync()) continue;
            ptx::mbarrier_arrive_expect_tx(slots.full(s), S::kXBytes + words * 4);
            load_streams(s, s, first, words);
        }
        if (ptx::elect_sync()) ptx::prefetch_tensormap(args.x);
        prefetch_lists();
        copy_table();
        if constexpr (Config::kPdl) ptx::griddepcontrol_wait();
#pragma unroll
        for (u32 s = 0; s < Config::kStages; ++s) {
            if (columns[s] != kNoColumn && ptx::elect_sync()) load_x(s, columns[s]);
        }
    }

    // Called by the whole block.
    UW_DEVICE void copy_table() const {
        compact::Table<Config::kTables>::copy(shared + S::kTable, args.table, ptx::tid(), kThreads<Config>);
        ptx::bar_sync();  // orders the table before the lookups of every warp
    }

    // ---- compute ---------------------------------------------------------------------------------------------------
    UW_DEVICE void load_x_fragments(u32 (&x)[kFragments][kSteps][2]) const {
#pragma unroll
        for (u32 f = 0; f < kFragments; ++f) {
#pragma unroll
            for (u32 half = 0; half < kSteps / 2; ++half) {
                const u32 row = f * kBatchFragment + lane % 8, chunk = half * 4 + lane / 8;
                const U32x4 v = ptx::ldmatrix_x4(x_slot(slot) + smem::Bf16Tile<Config::kBatchTile>::offset(row, chunk));
                x[f][2 * half][0] = v.x;
                x[f][2 * half][1] = v.y;
                x[f][2 * half + 1][0] = v.z;
                x[f][2 * half + 1][1] = v.w;
            }
        }
    }

    // Dense words of row blocks `pair` and `pair + 2`, or of all. A row block may end within a 16-byte group; such
    // groups are loaded with the first pair.
    template <u32 kPair, bool kAll>
    UW_DEVICE void load_dense_words(u32 (&words)[compact::kDenseWords]) const {
        constexpr u32 kGroups = compact::kDenseWords / 4, kHalf = kGroups / 2, kFirst = kHalf / 2 + 1;
#pragma unroll
        for (u32 c = 0; c < kGroups; ++c) {
            if (!kAll && (c % kHalf < kFirst) != (kPair == 0)) continue;
            const U32x4 v = ptx::ld_shared_x4(dense_slot(slot) + c * packed::kGroupBytes + lane * 16);
            words[4 * c + 0] = v.x;
            words[4 * c + 1] = v.y;
            words[4 * c + 2] = v.z;
            words[4 * c + 3] = v.w;
        }
    }

    // Replaces escapes in the operands of row blocks `pair` and `pair + 2`. `records`: packed::read_records.
    UW_DEVICE void patch(Operands (&operands)[2], u32 pair, u32 head, u32 records) const {
        const auto replace = [&](u32 record) {
            const u32 block = compact::block_of(record);
            if (block % kPairs != pair) return;
            if (block < kPairs) {
                packed::patch(operands[0], record, lane);
            } else {
                packed::patch(operands[1], record, lane);
            }
        };
        u32 count = ptx::shfl_sync_idx(records, 0);
        count = count < compact::kTileRecordsMax ? count : compact::kTileRecordsMax;
#pragma unroll 1
        for (u32 i = 1; i <= count && i < 32; ++i) replace(ptx::shfl_sync_idx(records, i));
        if (count < 32) return;
        // Records after the warp's first 31 are read from the list one by one.
        const u32 index = head & ~packed::kListHead;
#pragma unroll 1
        for (u32 i = 32; i <= count && i < args.record_words - index; ++i)
            replace(ptx::ld_global_nc(args.records + index + i));
    }

    // Refills the slot after the warp's last loads from it (X, dense words; streams of this tile or, with kEarly, of
    // the tile before). Every lane fences its own loads; __syncwarp orders them before the lane that issues the copies.
    UW_DEVICE void refill() {
        slots.release();
        load_next();
    }

    template <u32 kPair>
    UW_DEVICE void compute_pair(const u32 (&x)[kFragments][kSteps][2], u32 (&words)[compact::kDenseWords],
                                Chains& chains, u32 head, u32 records) {
        Operands operands[2];
        if constexpr (!kEarly<Config>) load_dense_words<kPair, false>(words);
        compact::decode_block<true>(operands[0], words + kPair * compact::kBlockWords, chains.up, table);
        compact::decode_block<false>(operands[1], words + (kPair + kPairs) * compact::kBlockWords, chains.down, table);
        if constexpr (!kEarly<Config> && kPair + 1 == kPairs) refill();
        if (head != 0) patch(operands, kPair, head, records);
#pragma unroll
        for (u32 s = 0; s < kSteps; ++s) {
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
                const u32(&p)[kSteps * 4] = operands[i].p;
                const u32 a[4] = {p[4 * s], p[4 * s + 1], p[4 * s + 2], p[4 * s + 3]};
#pragma unroll
                for (u32 f = 0; f < kFragments; ++f) ptx::mma_m16n8k16(sums[kPair + i * kPairs][f], a, x[f][s]);
            }
        }
    }

    UW_DEVICE void compute() {
        if (turn == kPlaces) {
            now = ahead;
            turn = 0;
        }
        const u32 head = ptx::shfl_sync_idx(now.head, turn), skip = ptx::shfl_sync_idx(now.skip, turn);
        u32 records = 0;
        if (head != 0) records = packed::read_records(head, args.records, args.record_words, lane);
        slots.wait(slot, parity);
        u32 x[kFragments][kSteps][2];
        load_x_fragments(x);
        u32 words[compact::kDenseWords];
        if constexpr (kEarly<Config>) {
            load_dense_words<0, true>(words);
            refill();
        }
        Chains chains(stream_slot(stream) + skip * 4, lane);
        compute_pair<0>(x, words, chains, head, records);
        compute_pair<1>(x, words, chains, head, records);
        static_assert(kPairs == 2, "two pairs of row blocks");
        slot = slot + 1 == Config::kStages ? 0 : slot + 1;
        stream = stream + 1 == S::kStreamSlots ? 0 : stream + 1;
        parity ^= slot == 0;
        ++turn;
    }

    // ---- reduce ----------------------------------------------------------------------------------------------------
    // Byte offset of (batch b, row r) in a warp's sums. Bits 3 and 4 of the word index are flipped so that a fragment's
    // (2t, g) stores hit 32 banks.
    UW_DEVICE static u32 sum_offset(u32 b, u32 r) { return ((b * kTile + r) ^ (b / 2 % 4 * 8)) * 4; }

    UW_DEVICE void sync_cluster() const {
        if constexpr (Config::kCluster > 1) {
            ptx::barrier_cluster_arrive();
            ptx::barrier_cluster_wait();
        } else {
            ptx::bar_sync();
        }
    }

    // Stores to a warp's ring, or to the flush buffer of a row.
    UW_DEVICE void store_sums(u32 to, u32 valid) const {
        const u32 g = lane / 4, t = lane % 4;
#pragma unroll
        for (u32 f = 0; f < kFragments; ++f) {
            if (f * kBatchFragment >= valid) break;
#pragma unroll
            for (u32 b = 0; b < kTileBlocks; ++b) {
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    const u32 row = b * packed::kBlockRows + g + i / 2 * 8;
                    ptx::st_shared(to + sum_offset(f * kBatchFragment + 2 * t + i % 2, row),
                                   ptx::bits_from_float(sums[b][f][i]));
                }
            }
        }
    }
    UW_DEVICE void clear_sums() {
#pragma unroll
        for (u32 b = 0; b < kTileBlocks; ++b) {
#pragma unroll
            for (u32 f = 0; f < kFragments; ++f) {
#pragma unroll
                for (u32 j = 0; j < 4; ++j) sums[b][f][j] = 0.0f;
            }
        }
    }
    // kPersistent: the flush buffer for row `row` of the cluster in block `by`: the sums of the warp that ends the row
    // and continues with the next.
    UW_DEVICE u32 flushed(u32 row, u32 by) const {
        return shared + S::kFlushed + (row - first_of_block(by) / args.tile_cols) * S::kSumBytes;
    }

    UW_DEVICE void reduce(u32 valid) {
        store_sums(ring, valid);
        sync_cluster();  // orders the sums of all warps, flushed ones included, before they are read
        // An item of the loops is two rows of Y^T for one batch row.
        if constexpr (Config::kPersistent) {
            constexpr u32 kUnits = kOutRows / 2;
            const u32 rows = tiles / args.tile_cols;
            for (u32 unit = rank * kThreads<Config> + ptx::tid(); unit < rows * valid * kUnits;
                 unit += Config::kCluster * kThreads<Config>) {
                const u32 line = unit / kUnits;
                store(line / valid, line % valid, unit % kUnits * 2);
            }
        } else {
            // Block `rank` of the cluster stores its share of the rows.
            constexpr u32 kUnits = kOutRows / (2 * Config::kCluster);
            for (u32 unit = ptx::tid(); unit < valid * kUnits; unit += kThreads<Config>) {
                store(0, unit / kUnits, (rank * kUnits + unit % kUnits) * 2);
            }
        }
    }
    // Stores rows r and r + 1 of Y^T, in a row of tiles of the cluster, for batch row b.
    UW_DEVICE void store(u32 row, u32 b, u32 r) const {
        float low, high;
        if constexpr (kSiluMul<Config>) {
            const u32 gate = r / kBlockOut * packed::kBlockRows + r % kBlockOut;
            float up_low, up_high;
            total(row, b, gate, low, high);
            total(row, b, gate + packed::kGateRows, up_low, up_high);
            low = packed::silu(low) * up_low;
            high = packed::silu(high) * up_high;
        } else {
            total(row, b, r, low, high);
        }
        u16* y = args.y + static_cast<u64>(batch + b) * (args.n / packed::kBlockRows * kBlockOut) +
                 static_cast<u64>(tile_row + row) * kOutRows + r;
        if constexpr (kStoreAdd<Config>) {
            const u32 old = ptx::ld_global(y);
            low += ptx::float_from_bits(old << 16);
            high += ptx::float_from_bits(old & 0xffff0000u);
        }
        ptx::st_global(y, ptx::cvt_rn_bf16x2(low, high));
    }
    UW_DEVICE static void add(u32 from, float& low, float& high) {
        const U32x2 v = Config::kCluster > 1 ? ptx::ld_shared_cluster_x2(from) : ptx::ld_shared_x2(from);
        low += ptx::float_from_bits(v.x);
        high += ptx::float_from_bits(v.y);
    }
    // kPersistent: the scaled total over the warps that had tiles of the row. The last of them may have continued with
    // the next row; its sums are then in the flush buffer.
    UW_DEVICE void total_of_persistent(u32 row, u32 b, u32 r, float& low, float& high) const {
        const u32 behind = (row + 1) * args.tile_cols, last = warp_of(behind - 1), offset = sum_offset(b, r);
        const auto of_block = [](u32 address, u32 by) {
            return Config::kCluster > 1 ? ptx::mapa(address, by) : address;
        };
        const auto own = [&](u32 w) {
            return of_block(shared + S::kRings + w % Config::kWarps * S::kRingBytes + offset, w / Config::kWarps);
        };
        low = high = 0.0f;
#pragma unroll 4
        for (u32 w = warp_of(row * args.tile_cols); w < last; ++w) add(own(w), low, high);
        const u32 by = last / Config::kWarps;
        add(first_of(last + 1) > behind ? of_block(flushed(row, by) + offset, by) : own(last), low, high);
        low *= args.scale;
        high *= args.scale;
    }
    // The scaled total over all warps of the cluster for batch row b, rows r and r + 1 of a row of tiles.
    UW_DEVICE void total(u32 row, u32 b, u32 r, float& low, float& high) const {
        if constexpr (Config::kPersistent) return total_of_persistent(row, b, r, low, high);
        const u32 offset = shared + S::kRings + sum_offset(b, r);
        low = high = 0.0f;
        // With kSiluMul, gate and up are loaded together: the loads of more than 16 warps would not fit in registers.
        constexpr u32 kAtOnce = kSiluMul<Config> && kKWarps > 16 ? 1 : Config::kCluster;
#pragma unroll kAtOnce
        for (u32 c = 0; c < Config::kCluster; ++c) {
            const u32 address = Config::kCluster > 1 ? ptx::mapa(offset, c) : offset;
#pragma unroll
            for (u32 w = 0; w < Config::kWarps; ++w) { add(address + w * S::kRingBytes, low, high); }
        }
        low *= args.scale;
        high *= args.scale;
    }

    // ---- entry ------------------------------------------------------------------------------------------------------
    UW_DEVICE void run() {
        const u32 left = args.m - batch;
        const u32 valid = left < Config::kBatchTile ? left : Config::kBatchTile;
        start();
        clear_sums();
        if constexpr (Config::kPersistent) {
            for (u32 row = at / args.tile_cols; at < end; ++row) {
                const u32 behind = (row + 1) * args.tile_cols, until = behind < end ? behind : end;
                for (; at < until; ++at) compute();
                if (at == end) break;
                store_sums(flushed(row, rank), valid);
                clear_sums();
            }
        } else {
            for (; at < end; at += kStep) compute();
        }
        reduce(valid);
        // Peers may still be reading this block's sums.
        if constexpr (Config::kCluster > 1) sync_cluster();
    }
};

template <class Config>
UW_DEVICE void run(const GemmCompactArgs& args) {
    Kernel<Config> kernel(args, ptx::cvta_to_shared(ptx::dynamic_smem()));
    kernel.run();
}

}  // namespace uw::gemm_compact
