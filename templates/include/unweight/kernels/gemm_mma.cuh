// Packed GEMM for small batches: Y[m, n] = X[m, k] * W[n, k]^T, W packed to 12 bits per weight (docs/format.md, A.9).
// The *weight* is the A operand of mma.m16n8k16. It goes from shared memory to registers to the tensor cores, decoded
// on the way with 9 integer operations per 8 weights. The batch is the n dimension, so a batch of 8 needs no padding.
// The exact operand of an element outside the exponent window replaces the decoded one before the multiply: the tensor
// cores see the weights times 2^(112 - base), bit for bit, and the fp32 sums are multiplied once by
// GemmPackedArgs::scale.
//
// Config (the axes of unweight-codegen/src/family/gemm_mma.rs)
//   u32  kRowBlocks      1..8     16-row blocks of one task: a warp holds their A fragments and accumulators
//   u32  kWarps          1..32    split-K within a block: warp w takes tile columns w, w + kWarps * kCluster, ...
//   u32  kStages         1..      slots of each warp's private ring
//   u32  kBatchTile      8 * 1..8 rows of X per cluster; accumulators take kRowBlocks * kBatchTile / 2 registers
//   u32  kCluster        1,2,4,8  blocks that split k among them; reduced through distributed shared memory
//   bool kEscapes        patch operands from escape_heads / escapes; without it the tensor must not have any
//   SmemCopy kCopy       kBulk: an elected lane issues bulk copies (TMA); kAsync: every lane issues 16-byte cp.async
//                        copies, for architectures without TMA
//   Epilogue kEpilogue   kStore; kStoreAdd: y += or, with args.bias, y = bias +, added in fp32 and rounded once;
//                        kSiluMul: y[m, n / 2] = silu(gate) * up, in fp32 and rounded once: a row block of W has 8 rows
//                        of the gate's weights and the 8 matching rows of the up projection
//   bool kPdl            programmatic dependent launch: weights are loaded before griddepcontrol.wait, X and Y are
//                        touched after it
//   bool kPersistent     a cluster processes several tasks, and its rings continue across them
//   bool kDump           debugging: every A register to the workspace, u32 [tile][row block][step][register][lane]
//   bool kBf16           W is bf16, row-major, and is not decoded: GemmGroupedArgs, no escapes
// Args is GemmPackedArgs, or GemmGroupedArgs, with which a block's batch rows are an item of a list (gemm_grouped.cuh).
//
// Launch: kThreads<Config> = 32 * kWarps threads, Smem<Config>::kBytes of dynamic shared memory, clusters of kCluster
// blocks along x, m >= 1, and
//   grid = groups * ceil(m / kBatchTile) * kCluster. The n / 16 row blocks are distributed over the groups in order;
//   group sizes differ by at most one. Without kPersistent ceil((n / 16) / groups) <= kRowBlocks; with it groups may be
//   any number. Best: as many blocks as fill every SM once (132 or 264 on an H200), with shared memory or registers
//   such that no more fit. With dependent launch, a half-full SM accepts blocks of the next kernel early, and unevenly.
//
// Roles: none. Every warp copies for itself. Per slot, an elected lane issues one box of X (64 of k by kBatchTile,
// 128-byte swizzle, zero-filled past the batch) and the task's row blocks of one tile column, up to four adjacent ones
// per bulk copy (L2 evict_first); with kAsync all lanes copy the same bytes to the same places. Warps exchange nothing
// before the reduction. One step: wait | ldmatrix X | per row block 3 x 16 bytes per lane, decode | refill the slot |
// patch | 4 * kBatchTile / 8 mma.
//
// Barriers: full [kWarps][kStages], 1 arrival + bytes of X and W. A warp refills its own slots, so there is no empty
// barrier: it releases a slot to the async proxy (pipeline::WarpRing::release: a proxy fence by every lane, then
// __syncwarp) before it issues the next copy. kAsync has no mbarriers: a slot is one cp.async group of every lane,
// kStages of which are open; a lane waits for its own group, and __syncwarp extends that to all lanes.
//   Per task there is one block (or cluster) barrier between writing and reading sums; kPersistent: one more before
//   writing; clusters: one more before exit.
//
// Shared memory = kWarps * (align1024(kStages * (kBatchTile * 128 + kRowBlocks * 1536)) + 8 * kStages), for kAsync
//   without the last term, for kBf16 with 2048 instead of 1536,
//   kPersistent: + kWarps * kRowBlocks * kBatchTile * 64.
//   Without kPersistent a warp's sums (fp32 [batch][row]) overlay its own drained ring.
// Global reads per tile column: kRowBlocks * (1536 + 4) + 128 * min(m, kBatchTile) (X: from L2 after the first), and
//   4 * (1 + records) per list.
//
// Bound: device memory, n * k * 1.5 bytes. Measurements: docs/records; experiments:
// docs/records/2026-11-21/matmul-packed-log.md.
#pragma once

#include "unweight/axes.cuh"
#include "unweight/epilogue/activation.cuh"
#include "unweight/encoding/escapes.cuh"
#include "unweight/encoding/packed.cuh"
#include "unweight/pipeline/warp_ring.cuh"
#include "unweight/ptx/async.cuh"
#include "unweight/ptx/barrier.cuh"
#include "unweight/ptx/bulk.cuh"
#include "unweight/ptx/control.cuh"
#include "unweight/ptx/fence.cuh"
#include "unweight/ptx/mbarrier.cuh"
#include "unweight/ptx/mma.cuh"
#include "unweight/smem/tile.cuh"

namespace uw::gemm_mma {

using packed::kSteps;
using packed::kTile;

constexpr u32 kBatchFragment = 8;  // the n dimension of m16n8k16

template <class Config>
constexpr u32 kThreads = Config::kWarps * 32;

// Whether a block's batch rows and its share of the weights come from an item of a list.
template <class Args>
constexpr bool kOfItems = false;
template <>
constexpr bool kOfItems<GemmGroupedArgs> = true;

// Bytes of a row block of W in a slot. Rows of bf16 have the layout of X.
template <class Config>
constexpr u32 kBlockBytes = Config::kBf16 ? packed::kBlockRows * smem::kSwizzleBytes : packed::kBlockBytes;

// Offsets of the sections in dynamic shared memory, and their total.
template <class Config>
struct Smem {
    static constexpr u32 kRows = Config::kRowBlocks * packed::kBlockRows;
    static constexpr u32 kXBytes = Config::kBatchTile * smem::kSwizzleBytes;
    static constexpr u32 kWBytes = Config::kRowBlocks * kBlockBytes<Config>;
    static constexpr u32 kStageBytes = kXBytes + kWBytes;
    // One warp's ring: X of all stages, then W of all stages.
    static constexpr u32 kRingBytes = (Config::kStages * kStageBytes + smem::kSwizzlePeriodBytes - 1) /
                                      smem::kSwizzlePeriodBytes * smem::kSwizzlePeriodBytes;
    // One warp's sums, fp32 [batch][row].
    static constexpr u32 kSumBytes = Config::kBatchTile * kRows * 4;
    // kPersistent: rings are being refilled while sums are reduced. Otherwise a warp's sums overlay its drained ring.
    static constexpr u32 kSumPitchBytes = Config::kPersistent ? kSumBytes : kRingBytes;

    static constexpr u32 kRings = 0;
    static constexpr u32 kSums = Config::kPersistent ? Config::kWarps * kRingBytes : 0;
    static constexpr u32 kBarriers = Config::kWarps * (kRingBytes + (Config::kPersistent ? kSumBytes : 0));
    static constexpr u32 kBytes = kBarriers + (kAsync<Config> ? 0 : Config::kWarps * Config::kStages * 8);

    static_assert(kXBytes % smem::kSwizzlePeriodBytes == 0, "swizzled tiles are 1024-byte aligned");
    static_assert(kSumBytes <= kSumPitchBytes, "a warp's sums overlay its ring");
};

template <class Config, class Args = GemmPackedArgs>
struct Kernel {
    using S = Smem<Config>;
    static constexpr bool kItems = kOfItems<Args>;
    static constexpr u32 kFragments = Config::kBatchTile / kBatchFragment;
    static constexpr u32 kKWarps = Config::kWarps * Config::kCluster;  // warps that split a task's k
    static constexpr u32 kNoColumn = ~0u;
    // Row blocks whose mma chains are interleaved. With four or more fragments, a single row block has enough
    // independent chains.
    static constexpr u32 kChains = Config::kRowBlocks > 1 && kFragments < 4 ? 2 : 1;
    static constexpr u32 kHeadBatch = 32;  // tiles whose heads a warp loads at once, one per lane
    static_assert(Config::kBatchTile % kBatchFragment == 0, "a batch tile is made of fragments of 8");
    static_assert(Config::kRowBlocks >= 1 && Config::kRowBlocks <= 8, "a warp keeps the sums of up to 8 row blocks");
    static constexpr u32 kBlockOut =
        kSiluMul<Config> ? packed::kGateRows : packed::kBlockRows;   // rows of Y^T per row block
    static constexpr u32 kOutRows = Config::kRowBlocks * kBlockOut;  // rows of Y^T per task
    static_assert(packed::kBlockRows == 2 * packed::kGateRows, "a row block is rows of a gate and of its up");
    static_assert(!(kSiluMul<Config> && kStoreAdd<Config>), "a gate and its up overwrite");
    static_assert(!kItems || (kAsync<Config> && Config::kCluster == 1 && !Config::kPersistent && !kStoreAdd<Config>),
                  "rows of X that a list names are gathered by threads; an item's row blocks are distributed once");
    static_assert(!Config::kBf16 || (kItems && !Config::kEscapes && !Config::kDump), "bf16 weights are of experts");
    // Rows of X of an item that lane l holds: those of entries l, l + 32, ...
    static constexpr u32 kListed = kItems ? (Config::kBatchTile + 31) / 32 : 1;

    // Row blocks of one tile are contiguous, so one copy brings up to four; a task's row blocks span at most kPieces
    // tiles.
    static constexpr u32 kPieces = (Config::kRowBlocks + packed::kTileBlocks - 2) / packed::kTileBlocks + 1;
    struct Pieces {
        const u8* source[kPieces];  // address in tile column 0
        u32 bytes[kPieces];
        u32 slot_bytes;  // bytes per slot, X included
    };

    // Row blocks are distributed in order and evenly, with the remainder to the first clusters, so that every SM
    // streams until the end. Clusters that share weights are adjacent.
    struct Share {
        u32 batch;  // first batch row; of an item: first entry of `pairs`
        u32 first, blocks;
        u32 rows, skipped;  // of an item: its entries, and the row blocks of the experts before its expert

        UW_DEVICE Share(const Args& a, u32 batch_tiles) {
            if constexpr (kItems) {
                // Blocks with the same batch rows are adjacent.
                const u32 all = a.n / packed::kBlockRows, groups = (all + Config::kRowBlocks - 1) / Config::kRowBlocks;
                const u32 index = ptx::ctaid() / groups, group = ptx::ctaid() - index * groups;
                const U32x4 item = item_of(a, index);
                const u32 each = all / groups, more = all - each * groups;
                batch = item.y;
                rows = item.z;
                skipped = item.x * all;
                first = skipped + group * each + (group < more ? group : more);
                blocks = rows == 0 ? 0 : each + (group < more);
                return;
            } else {
                distribute(a, batch_tiles);
            }
        }

        // Expert, first entry and entries of an item.
        UW_DEVICE static U32x4 item_of(const Args& a, u32 index) {
            if (a.is_pairs == 0) return ptx::ld_global_x4(a.items + index * 4);
            const u32 expert = ptx::ld_global(a.items + index);
            return expert < a.experts ? U32x4{expert, index, 1, 0} : U32x4{0, 0, 0, 0};
        }

        UW_DEVICE void distribute(const Args& a, u32 batch_tiles) {
            u32 groups = ptx::nctaid() / Config::kCluster, group = ptx::ctaid() / Config::kCluster;
            batch = 0;
            if (batch_tiles > 1) {
                batch = group % batch_tiles * Config::kBatchTile;
                group /= batch_tiles;
                groups /= batch_tiles;
            }
            const u32 all = a.n / packed::kBlockRows, each = all / groups, more = all - each * groups;
            first = group * each + (group < more ? group : more);
            blocks = each + (group < more);
            rows = skipped = 0;  // not used
        }
    };

    // Escape heads of the warp's next kHeadBatch tiles, one tile per lane.
    struct Heads {
        u32 words[Config::kRowBlocks];
        u32 blocks[Config::kRowBlocks];  // bit l: lane l's tile has an escape in that row block
        u32 tiles;                       // bit l: lane l's tile has an escape in any row block
    };

    const Args& args;
    const u32 shared, warp, lane;
    const u32 ring;
    const pipeline::WarpRing<Config::kStages, kAsync<Config>> slots;
    const u32 k_warp;  // this warp's index among the kKWarps
    const u32 batch_tiles;
    const Share share;  // this cluster's share of the matrix
    const u32 tasks;    // number of tasks of this cluster
    const u32 tiles;    // tile columns times tasks; this warp takes k_warp, k_warp + kKWarps, ...
    const u64 x_policy, w_policy;
    u32 listed[kListed];  // rows of X of an item

    // The next tile to load.
    u32 load_slot = 0, load_index, load_task = 0, load_column;
    Pieces load_pieces;
    // The next tile to compute: its slot, and its index among the cluster's tiles.
    u32 slot = 0, parity = 0, index;

    float sums[Config::kRowBlocks][kFragments][4];

    UW_DEVICE Kernel(const Args& a, u32 shared_address)
        : args(a),
          shared(shared_address),
          warp(ptx::uniform_warp_index()),
          lane(ptx::laneid()),
          ring(shared_address + S::kRings + warp * S::kRingBytes),
          slots{shared_address + S::kBarriers + warp * Config::kStages * 8},
          k_warp(Config::kCluster > 1 ? ptx::cluster_ctarank() * Config::kWarps + warp : warp),
          batch_tiles(batch_tiles_of(a)),
          share(a, batch_tiles),
          tasks(Config::kPersistent ? (share.blocks + Config::kRowBlocks - 1) / Config::kRowBlocks : share.blocks != 0),
          tiles(tasks * a.tile_cols),
          x_policy(ptx::createpolicy_l2(L2::kEvictLast)),
          w_policy(ptx::createpolicy_l2(batch_tiles == 1 ? L2::kEvictFirst : L2::kNormal)),
          load_index(k_warp),
          load_column(k_warp),
          index(k_warp) {
        if (tiles != 0) set_load_task(0);
        if constexpr (Config::kPersistent) wrap_load();
        if constexpr (kItems) {
#pragma unroll
            for (u32 i = 0; i < kListed; ++i) {
                const u32 entry = i * 32 + lane;
                listed[i] = entry < share.rows ? pair_of(entry) / a.pairs_per_row : 0;
            }
        }
    }

    UW_DEVICE static u32 batch_tiles_of(const Args& a) {
        if constexpr (kItems) return 1;
        else return (a.m + Config::kBatchTile - 1) / Config::kBatchTile;
    }

    UW_DEVICE u32 x_slot(u32 s) const { return ring + s * S::kXBytes; }
    UW_DEVICE u32 w_slot(u32 s) const { return ring + Config::kStages * S::kXBytes + s * S::kWBytes; }

    // ---- work ------------------------------------------------------------------------------------------------------
    UW_DEVICE u32 task_first(u32 task) const {
        // Without kPersistent a cluster has at most one task: `task` is 0, or 1 for its end.
        return share.first + (Config::kPersistent ? task * share.blocks / tasks : task * share.blocks);
    }
    UW_DEVICE u32 task_blocks(u32 task) const { return task_first(task + 1) - task_first(task); }

    // ---- load ------------------------------------------------------------------------------------------------------
    UW_DEVICE void set_load_task(u32 task) {
        load_task = task;
        u32 block = task_first(task), left = task_blocks(task);
        if constexpr (Config::kBf16) {
            load_pieces.source[0] = args.packed + u64(block) * packed::kBlockRows * w_row_bytes();
            load_pieces.bytes[0] = left * kBlockBytes<Config>;
            return;
        }
        load_pieces.slot_bytes = S::kXBytes + left * packed::kBlockBytes;
#pragma unroll
        for (u32 i = 0; i < kPieces; ++i) {
            const u32 inside = block % packed::kTileBlocks, whole = packed::kTileBlocks - inside;
            const u32 here = left < whole ? left : whole;
            load_pieces.source[i] = args.packed +
                                    u64(block / packed::kTileBlocks) * args.tile_cols * packed::kTileBytes +
                                    inside * packed::kBlockBytes;
            load_pieces.bytes[i] = here * packed::kBlockBytes;
            block += here;
            left -= here;
        }
    }
    // Whether this lane issues copies: every lane its share, or one lane all of them.
    UW_DEVICE static bool issues() { return kAsync<Config> || ptx::elect_sync(); }

    // kBf16: bytes from one row of W to the next.
    UW_DEVICE u64 w_row_bytes() const { return u64(args.k) * 2; }
    // kBf16: copies the rows of the task's row blocks in one tile column, eight lanes per row, in the swizzle of X. Not
    // unrolled: the compiler would keep the address of every row in registers.
    UW_DEVICE void load_w_rows() const {
        using Tile = smem::Bf16Tile<S::kRows>;
        const u32 row = lane / 8, chunk = lane % 8;
        const u8* from = load_pieces.source[0] + u64(load_column) * (kTile * 2) + row * w_row_bytes() + chunk * 16;
        const u32 upper = w_slot(load_slot) + Tile::offset(row, chunk);
        const u32 lower = w_slot(load_slot) + Tile::offset(row + 4, chunk);
#pragma unroll 1
        for (u32 at = 0; at < load_pieces.bytes[0]; at += 8 * smem::kSwizzleBytes) {
            ptx::cp_async_x4(upper + at, from);
            ptx::cp_async_x4(lower + at, from + 4 * w_row_bytes());
            from += 8 * w_row_bytes();
        }
    }
    // Called by the lanes that issue: copies the task's row blocks of one tile column.
    UW_DEVICE void load_w() const {
        if constexpr (Config::kBf16) return load_w_rows();
        u32 to = w_slot(load_slot);
#pragma unroll
        for (u32 i = 0; i < kPieces; ++i) {
            if (i > 0 && load_pieces.bytes[i] == 0) break;
            if constexpr (kAsync<Config>) {
                const u8* from = load_pieces.source[i] + u64(load_column) * packed::kTileBytes + lane * 16;
                const u32 first = to + lane * 16;
#pragma unroll
                for (u32 at = 0; at < packed::kTileBytes; at += 32 * 16) {
                    if (at < load_pieces.bytes[i]) ptx::cp_async_x4(first + at, from + at);
                }
                to += load_pieces.bytes[i];
                continue;
            }
            ptx::cp_async_bulk_load(to, load_pieces.source[i] + u64(load_column) * packed::kTileBytes,
                                    load_pieces.bytes[i], slots.full(load_slot), w_policy);
            to += load_pieces.bytes[i];
        }
    }
    UW_DEVICE bool is_inside(u32 r) const {
        if constexpr (kItems) return r < share.rows;
        else return share.batch + r < args.m;
    }
    // The row of X for batch row r. `row` is r of lane 0, uniform over the warp.
    UW_DEVICE u64 x_row(u32 row, u32 r, bool inside) const {
        if constexpr (kItems) return ptx::shfl_sync_idx(listed[row / 32], r % 32);
        else return share.batch + (inside ? r : 0);
    }
    UW_DEVICE void load_x(u32 s, u32 column) const {
        if constexpr (kAsync<Config>) {
            // Eight lanes per row, in the swizzle that TMA would write.
            const u32 chunk = lane % 8;
#pragma unroll
            for (u32 row = 0; row < Config::kBatchTile; row += 4) {
                const u32 r = row + lane / 8;
                const bool inside = is_inside(r);
                const u8* from =
                    args.x_data + x_row(row, r, inside) * args.x_row_bytes + column * (kTile * 2) + chunk * 16;
                ptx::cp_async_x4(x_slot(s) + smem::Bf16Tile<Config::kBatchTile>::offset(r, chunk), from, inside);
            }
        } else {
            ptx::tma_load_2d(x_slot(s), args.x, column * kTile, share.batch, slots.full(s), x_policy);
        }
    }

    UW_DEVICE void wrap_load() {
        while (load_column >= args.tile_cols && load_index < tiles) {
            load_column -= args.tile_cols;
            set_load_task(load_task + 1);
        }
    }
    UW_DEVICE void advance_load() {
        load_slot = load_slot + 1 == Config::kStages ? 0 : load_slot + 1;
        load_index += kKWarps;
        load_column += kKWarps;
        if constexpr (Config::kPersistent) wrap_load();
    }
    // Called by a converged warp after all lanes have finished reading the slot.
    UW_DEVICE void load_next() {
        if (load_index < tiles) {
            if (issues()) {
                if constexpr (!kAsync<Config>)
                    ptx::mbarrier_arrive_expect_tx(slots.full(load_slot), load_pieces.slot_bytes);
                load_x(load_slot, load_column);
                load_w();
            }
            advance_load();
        }
        // An empty group is committed, too: cp_async_wait_group counts groups.
        if constexpr (kAsync<Config>) ptx::cp_async_commit_group();
    }

    // Fills the ring. Weights come first: they do not depend on the preceding kernel, and their latency is the longest.
    // X depends on it and waits.
    UW_DEVICE void start(Heads& heads) {
        slots.init();
        if constexpr (Config::kPdl && !kItems) ptx::griddepcontrol_launch_dependents();
        u32 columns[Config::kStages];
#pragma unroll
        for (u32 s = 0; s < Config::kStages; ++s) {
            columns[s] = kNoColumn;
            if (load_index < tiles) {
                columns[s] = load_column;
                if (issues()) {
                    if constexpr (!kAsync<Config>)
                        ptx::mbarrier_arrive_expect_tx(slots.full(s), load_pieces.slot_bytes);
                    load_w();
                }
                advance_load();
            }
        }
        if constexpr (!kAsync<Config>) {
            if (ptx::elect_sync()) ptx::prefetch_tensormap(args.x);
        }
        if constexpr (Config::kEscapes) load_heads(heads);
        if constexpr (Config::kPdl && !kItems) ptx::griddepcontrol_wait();
#pragma unroll
        for (u32 s = 0; s < Config::kStages; ++s) {
            if (columns[s] != kNoColumn) {
                if (issues()) load_x(s, columns[s]);
            }
            // The first group also contains the weights of all slots, which were requested before X.
            if constexpr (kAsync<Config>) ptx::cp_async_commit_group();
        }
    }

    // ---- compute ---------------------------------------------------------------------------------------------------
    UW_DEVICE void load_heads(Heads& heads) const {
        const u32 mine = index + lane * kKWarps;
        const u32 task = Config::kPersistent ? mine / args.tile_cols : 0, column = mine - task * args.tile_cols;
        const u32 first = mine < tiles ? task_first(task) : 0, count = mine < tiles ? task_blocks(task) : 0;
#pragma unroll
        for (u32 b = 0; b < Config::kRowBlocks; ++b) {
            const u32 block = first + b;
            const u64 tile = u64(block / packed::kTileBlocks) * args.tile_cols + column;
            heads.words[b] =
                b < count
                    ? ptx::ld_global_nc(args.escape_heads + tile * packed::kTileBlocks + block % packed::kTileBlocks)
                    : 0;
        }
    }
    // Separate from load_heads, so that its loads overlap with other work. Prefetches escape lists, which are rare,
    // into L2 before their tile is reached.
    UW_DEVICE void digest_heads(Heads& heads) const {
        u32 any = 0;
#pragma unroll
        for (u32 b = 0; b < Config::kRowBlocks; ++b) {
            heads.blocks[b] = ptx::vote_sync_ballot(heads.words[b] != 0);
            any |= heads.blocks[b];
            const u32 list = heads.words[b] & ~packed::kListHead;
            if (list != heads.words[b] && list < args.escape_words) ptx::prefetch_global_l2(args.escapes + list);
        }
        heads.tiles = any;
    }

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

    // kBf16: multiplies a tile by halves of its columns, so that few fragments are in registers. The four 8x8 matrices
    // of a step of W are the registers of its operand: rows 0-7 and 8-15 of the first chunk, then of the second.
    UW_DEVICE void compute_rows() {
        slots.wait(slot, parity);
#pragma unroll
        for (u32 half = 0; half < kSteps / 2; ++half) {
            u32 x[kFragments][2][2];
#pragma unroll
            for (u32 f = 0; f < kFragments; ++f) {
                const u32 row = f * kBatchFragment + lane % 8, chunk = half * 4 + lane / 8;
                const U32x4 v = ptx::ldmatrix_x4(x_slot(slot) + smem::Bf16Tile<Config::kBatchTile>::offset(row, chunk));
                x[f][0][0] = v.x;
                x[f][0][1] = v.y;
                x[f][1][0] = v.z;
                x[f][1][1] = v.w;
            }
#pragma unroll
            for (u32 b = 0; b < Config::kRowBlocks; ++b) {
#pragma unroll
                for (u32 s = 0; s < 2; ++s) {
                    const u32 row = b * packed::kBlockRows + lane % 16, chunk = 2 * (2 * half + s) + lane / 16;
                    const U32x4 v = ptx::ldmatrix_x4(w_slot(slot) + smem::Bf16Tile<S::kRows>::offset(row, chunk));
                    const u32 a[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (u32 f = 0; f < kFragments; ++f) ptx::mma_m16n8k16(sums[b][f], a, x[f][s]);
                }
            }
        }
        slots.release();
        load_next();
    }

    // `turn`: index of the tile in `heads`. Two instantiations keep the common one free of branches among its operands.
    // A task with fewer than kRowBlocks row blocks multiplies stale data of the slot and discards the sums: a branch
    // would cost every task more than the multiply costs this one.
    template <bool kPatch>
    UW_DEVICE void compute_tile(const Heads& heads, u32 turn, u32 task) {
        u32 records[Config::kRowBlocks];
        if constexpr (kPatch) {
#pragma unroll
            for (u32 b = 0; b < Config::kRowBlocks; ++b) {
                if (heads.blocks[b] >> turn & 1) {
                    records[b] = packed::read_records(ptx::shfl_sync_idx(heads.words[b], turn), args.escapes,
                                                      args.escape_words, lane);
                }
            }
        }
        slots.wait(slot, parity);
        u32 x[kFragments][kSteps][2];
        load_x_fragments(x);
#pragma unroll
        for (u32 first = 0; first < Config::kRowBlocks; first += kChains) {
            packed::Operands operands[kChains];
#pragma unroll
            for (u32 c = 0; c < kChains; ++c) {
                if (first + c >= Config::kRowBlocks) break;
                operands[c] =
                    packed::Operands(packed::PackedBlock(w_slot(slot) + (first + c) * packed::kBlockBytes, lane));
            }
            if (first + kChains >= Config::kRowBlocks) {
                // The slot's loads have been issued, but nothing has used their values yet, so they may still be in
                // flight.
                slots.release();
                load_next();
            }
            if constexpr (kPatch) {
#pragma unroll
                for (u32 c = 0; c < kChains; ++c) {
                    if (first + c >= Config::kRowBlocks || (heads.blocks[first + c] >> turn & 1) == 0) continue;
                    const u32 head = ptx::shfl_sync_idx(heads.words[first + c], turn);
                    packed::apply_records(operands[c], records[first + c], head, args.escapes, args.escape_words, lane);
                }
            }
            if constexpr (Config::kDump) {
#pragma unroll
                for (u32 c = 0; c < kChains; ++c) {
                    if (first + c < task_blocks(task)) dump(operands[c], task_first(task) + first + c);
                }
            }
#pragma unroll
            for (u32 s = 0; s < kSteps; ++s) {
#pragma unroll
                for (u32 c = 0; c < kChains; ++c) {
                    if (first + c >= Config::kRowBlocks) break;
                    const u32(&p)[kSteps * 4] = operands[c].p;
                    const u32 a[4] = {p[4 * s], p[4 * s + 1], p[4 * s + 2], p[4 * s + 3]};
#pragma unroll
                    for (u32 f = 0; f < kFragments; ++f) ptx::mma_m16n8k16(sums[first + c][f], a, x[f][s]);
                }
            }
        }
    }

    UW_DEVICE void compute(const Heads& heads, u32 turn, u32 task) {
        if constexpr (Config::kBf16) {
            compute_rows();
        } else if (Config::kEscapes && (heads.tiles >> turn & 1)) {
            compute_tile<Config::kEscapes>(heads, turn, task);
        } else {
            compute_tile<false>(heads, turn, task);
        }
        slot = slot + 1 == Config::kStages ? 0 : slot + 1;
        parity ^= slot == 0;
    }

    // Debugging: stores the A operands to the workspace, u32 [tile][row block][step][register][lane].
    UW_DEVICE void dump(const packed::Operands& operands, u32 block) const {
        const u64 tile = u64(block / packed::kTileBlocks) * args.tile_cols + index % args.tile_cols;
        u32* out = reinterpret_cast<u32*>(args.workspace) +
                   (tile * packed::kTileBlocks + block % packed::kTileBlocks) * (kSteps * 4 * 32) + lane;
#pragma unroll
        for (u32 r = 0; r < kSteps * 4; ++r) ptx::st_global(out + r * 32, operands.p[r]);
    }

    // ---- reduce ----------------------------------------------------------------------------------------------------
    // Byte offset of (batch b, row r) in a warp's sums. Bits 3 and 4 of the word index are flipped so that a fragment's
    // (2t, g) stores hit 32 banks.
    UW_DEVICE static u32 sum_offset(u32 b, u32 r) { return ((b * S::kRows + r) ^ (b / 2 % 4 * 8)) * 4; }

    UW_DEVICE void sync_cluster() const {
        if constexpr (Config::kCluster > 1) {
            ptx::barrier_cluster_arrive();
            ptx::barrier_cluster_wait();
        } else {
            ptx::bar_sync();
        }
    }

    UW_DEVICE u32 valid_rows() const {
        if constexpr (kItems) {
            return share.rows;
        } else {
            const u32 left = args.m - share.batch;
            return left < Config::kBatchTile ? left : Config::kBatchTile;
        }
    }
    UW_DEVICE void reduce(u32 task) {
        const u32 valid = valid_rows();
        if constexpr (Config::kPersistent) sync_cluster();  // orders loads of the previous sums before stores
        const u32 own = shared + S::kSums + warp * S::kSumPitchBytes;
        const u32 g = lane / 4, t = lane % 4;
#pragma unroll
        for (u32 f = 0; f < kFragments; ++f) {
            if (f * kBatchFragment >= valid) break;
#pragma unroll
            for (u32 b = 0; b < Config::kRowBlocks; ++b) {
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    ptx::st_shared(
                        own + sum_offset(f * kBatchFragment + 2 * t + i % 2, b * packed::kBlockRows + g + i / 2 * 8),
                        ptx::bits_from_float(sums[b][f][i]));
                }
            }
        }
        sync_cluster();  // orders every warp's sums before the loads of its block and of its peers
        // Block `rank` of the cluster owns its share of the rows of Y^T, the last block possibly fewer. An item of the
        // loop is two rows for one batch row.
        constexpr u32 kPairs = (kOutRows + 2 * Config::kCluster - 1) / (2 * Config::kCluster), kShare = 2 * kPairs;
        const u32 rank = Config::kCluster > 1 ? ptx::cluster_ctarank() : 0;
        const u32 rows = task_blocks(task) * kBlockOut;
        const u32 first_row = (task_first(task) - (kItems ? share.skipped : 0)) * kBlockOut;
        for (u32 unit = warp * 32 + lane; unit < valid * kPairs; unit += kThreads<Config>) {
            const u32 b = unit / kPairs, r = rank * kShare + unit % kPairs * 2;
            if (r >= rows) continue;
            float low, high;
            if constexpr (kSiluMul<Config>) {
                const u32 gate = r / kBlockOut * packed::kBlockRows + r % kBlockOut;
                float up_low, up_high;
                total(b, gate, low, high);
                total(b, gate + packed::kGateRows, up_low, up_high);
                low = packed::silu(low) * up_low;
                high = packed::silu(high) * up_high;
            } else {
                total(b, r, low, high);
            }
            u16* y = static_cast<u16*>(args.y) + y_row(b) * (args.n / packed::kBlockRows * kBlockOut) + first_row + r;
            if constexpr (kStoreAdd<Config>) {
                const u32 old = ptx::ld_global(args.bias != nullptr ? args.bias + first_row + r : y);
                low += ptx::float_from_bits(old << 16);
                high += ptx::float_from_bits(old & 0xffff0000u);
            }
            ptx::st_global(y, ptx::cvt_rn_bf16x2(low, high));
        }
    }
    // The pair of an entry of an item.
    UW_DEVICE u32 pair_of(u32 entry) const {
        const u32 at = share.batch + entry;
        return args.is_pairs != 0 ? at : ptx::ld_global(args.pairs + at);
    }
    // The row of Y for batch row b.
    UW_DEVICE u64 y_row(u32 b) const {
        if constexpr (kItems) return pair_of(b);
        else return share.batch + b;
    }
    // The scaled total over all warps of the cluster for batch row b, rows r and r + 1 of the task.
    UW_DEVICE void total(u32 b, u32 r, float& low, float& high) const {
        const u32 offset = shared + S::kSums + sum_offset(b, r);
        low = high = 0.0f;
        // With kSiluMul, gate and up are loaded together: the loads of more than 16 warps would not fit in registers.
        constexpr u32 kAtOnce = kSiluMul<Config> && kKWarps > 16 ? 1 : Config::kCluster;
#pragma unroll kAtOnce
        for (u32 c = 0; c < Config::kCluster; ++c) {
            const u32 address = Config::kCluster > 1 ? ptx::mapa(offset, c) : offset;
#pragma unroll
            for (u32 w = 0; w < Config::kWarps; ++w) {
                const u32 from = address + w * S::kSumPitchBytes;
                const U32x2 v = Config::kCluster > 1 ? ptx::ld_shared_cluster_x2(from) : ptx::ld_shared_x2(from);
                low += ptx::float_from_bits(v.x);
                high += ptx::float_from_bits(v.y);
            }
        }
        low *= args.scale;
        high *= args.scale;
    }

    // ---- entry ------------------------------------------------------------------------------------------------------
    UW_DEVICE void run() {
        Heads heads;
        start(heads);
        u32 turn = 0;
        for (u32 task = 0; task < tasks; ++task) {
#pragma unroll
            for (u32 b = 0; b < Config::kRowBlocks; ++b) {
#pragma unroll
                for (u32 f = 0; f < kFragments; ++f) {
#pragma unroll
                    for (u32 j = 0; j < 4; ++j) sums[b][f][j] = 0.0f;
                }
            }
            for (const u32 end = (task + 1) * args.tile_cols; index < end; index += kKWarps) {
                if constexpr (Config::kEscapes) {
                    if (turn == kHeadBatch) {
                        load_heads(heads);
                        turn = 0;
                    }
                    if (turn == 0) digest_heads(heads);
                }
                compute(heads, turn, task);
                ++turn;
            }
            reduce(task);
        }
        // Peers may still be reading this block's sums.
        if constexpr (Config::kCluster > 1) sync_cluster();
    }
};

template <class Config>
UW_DEVICE void run(const GemmPackedArgs& args) {
    Kernel<Config> kernel(args, ptx::cvta_to_shared(ptx::dynamic_smem()));
    kernel.run();
}

}  // namespace uw::gemm_mma
