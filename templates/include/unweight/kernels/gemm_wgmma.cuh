// Register-sourced matmul for large batches: Y[m, n] = X[m, k] * W[n, k]^T, W packed to 12 bits per weight
// (docs/format.md, A.9). The *weight* is the A operand of wgmma and comes from registers, decoded on the way with 9
// integer operations per 8 weights; the batch is the n dimension. An element outside the window is replaced by its
// exact operand before the multiply: what the tensor cores see are the weights times 2^(112 - base), bit for bit, and
// the fp32 sums are multiplied once by GemmPackedArgs::scale.
//
// Config
//   u32  kBatchTile      32..256  rows of X in a tile of Y, the n of wgmma; a multiple of 32
//   u32  kStages         3..      slots of the ring
//   u32  kWarpgroups     1..3     that multiply, 64 output features (a row of tiles of W) each
//   u32  kCluster        1..8     blocks that share the k of a tile of Y: each multiplies a run of its steps, and sums
//                                 and stores a part of its pieces
//   bool kStreamK        cut what does not fill a round of the grid evenly along k; without it a block takes whole
//                        tiles of Y; not with kCluster
//   bool kEscapes        patch operands from escape_heads / escapes; without it the tensor must have none
//   bool kStoreAdd       y += instead of y =, added in fp32 and rounded once
//   bool kSiluMul        y[m, n / 2] = silu(gate) * up, in fp32 and rounded once: of 16 rows of W 8 are the gate's weights
//                        and 8 the up's that belong to them (no kStoreAdd)
//   bool kPdl      programmatic dependent launch: weights are asked for before griddepcontrol.wait, all else is touched
//                  after it
//   bool kDumpOperands   debugging: every A register to the workspace, u32 [tile][row block][step][register][lane]; not
//                        with kStreamK
//
// Launch: kThreads<Config> = 128 * (kWarpgroups + 1) threads, Smem<Config>::kBytes of dynamic shared memory, m >= 1,
// clusters of kCluster blocks along x, and with
//   tiles = ceil(n / (64 * kWarpgroups)) * ceil(m / kBatchTile)
//   grid  = min(tiles, multiprocessors)
//   kStreamK: grid = min(tiles * k / 64, multiprocessors), one block a multiprocessor, all resident at once
//     (a cooperative launch); workspace = 2 * grid * 64 * kWarpgroups * kBatchTile fp32,
//     counters = 2 * grid * kWarpgroups u32 (zero before, zero after). Otherwise neither.
//   kCluster > 1: grid = tiles * kCluster, k >= 64 * kCluster. Clusters of 2 fill 132 multiprocessors, clusters of 4
//     no more than 120 of them: one cluster more is a round more.
//   args.x: box 64 x 32. args.y_map: bf16 [m, n], box 64 (n) x 32 (m), 128-byte swizzle; with kSiluMul
//     bf16 [m, n / 2], box 32 (n / 2) x 32 (m), 64-byte swizzle.
//
// Shared memory = kStages * (kBatchTile * 128 + kWarpgroups * (6144 + E) + 16)
//   + kWarpgroups * (kStoreBuffers * kStoreRows * 128 + 8)
//   where E is 256 with kEscapes, else 0; kStoreRows is 64 if kBatchTile is a multiple of 64 above 64 and there is no
//   cluster, else 32; kStoreBuffers = min(3, max(2, kBatchTile / kStoreRows)).
//   Sections: kX, kW, kStaging, kRecords (with kEscapes), kBarriers. What the blocks of a cluster exchange lies over kX
//   and kW.
//
// Roles: warp 0 loads (an elected lane issues, per step of 64 k, the boxes of X that have rows of the batch and one
// 6144-byte copy of W per warpgroup); warps 1.. find the escapes, one warp for each warpgroup that multiplies, and lay
// their records beside W; warpgroups 1.. decode and multiply. One step of a warpgroup, in quarters of 16 k: wgmma on
// operands decoded before | a quarter of the next step's 3 x 16 bytes a lane, decoded | ... | the next step's records,
// if it has any.
//
// Barriers: full [kStages], 1 arrival and the bytes of X and W, with kEscapes 1 more a warpgroup;
//   empty [kStages], one arrival a warp that multiplies; one a warpgroup for the old Y of kStoreAdd;
//   named barriers 1..3, one a warpgroup, and 4, all that multiply (kCluster).
//   A cluster meets twice: when the sums lie in shared memory, and when they have been read.
// Bound: the tensor cores at kBatchTile = 256 with two warpgroups, decoding's latency and memory below. Figures:
//   docs/records; what was tried: docs/records/2026-11-21/matmul-register-sourced-log.md.
#pragma once

#include "unweight/epilogue/activation.cuh"
#include "unweight/form/escapes.cuh"
#include "unweight/form/packed.cuh"
#include "unweight/mma/descriptor.cuh"
#include "unweight/pipeline/ring.cuh"
#include "unweight/ptx/barrier.cuh"
#include "unweight/ptx/bulk.cuh"
#include "unweight/ptx/control.cuh"
#include "unweight/ptx/fence.cuh"
#include "unweight/ptx/mma.cuh"
#include "unweight/ptx/wgmma.cuh"
#include "unweight/smem/tile.cuh"

namespace uw::gemm_wgmma {

using packed::kSteps;
using packed::kTile;

constexpr u32 kWarpgroupThreads = 128;
constexpr u32 kWarpgroupWarps = 4;
constexpr u32 kBoxRows = 32;  // of args.y_map

// The escapes of a row block in a slot: their number, up to kSlotRecords records, and the index of the list for those
// that do not fit.
constexpr u32 kSlotRecords = 14;
constexpr u32 kBlockRecordBytes = (1 + kSlotRecords + 1) * 4;
constexpr u32 kTileRecordBytes = packed::kTileBlocks * kBlockRecordBytes;

template <class Config>
constexpr u32 kThreads = (Config::kWarpgroups + 1) * kWarpgroupThreads;

// Offsets of the sections in dynamic shared memory, and their sum.
template <class Config>
struct Smem {
    // A box without rows of the batch is not asked for: rows that the copy engine fills with zeros take it longer than
    // those that it reads. What is multiplied there instead are sums of rows that are not stored.
    static constexpr u32 kXBoxRows = 32;
    static constexpr u32 kXBoxes = Config::kBatchTile / kXBoxRows;
    static constexpr u32 kXBoxBytes = kXBoxRows * smem::kSwizzleBytes;
    static constexpr u32 kXBytes = kXBoxes * kXBoxBytes;
    static constexpr u32 kWBytes = Config::kWarpgroups * packed::kTileBytes;
    // A warpgroup turns its part of Y over in pieces of kStoreRows batch rows by 64 features.
    static constexpr u32 kStoreRows = Config::kBatchTile % 64 == 0 && Config::kBatchTile > 64 && Config::kCluster == 1 ? 64 : 32;
    static constexpr u32 kPieces = Config::kBatchTile / kStoreRows;
    static constexpr u32 kStoreBuffers = kPieces < 2 ? 2 : kPieces > 3 ? 3 : kPieces;
    static constexpr u32 kPieceBytes = kStoreRows * smem::kSwizzleBytes;

    // What a cluster exchanges, over the drained ring.
    static constexpr u32 kSums = 0;
    static constexpr u32 kSumBytes = kTile * Config::kBatchTile * 4;  // of a warpgroup

    static constexpr u32 kX = 0;
    static constexpr u32 kW = kX + Config::kStages * kXBytes;
    static constexpr u32 kStaging = kW + Config::kStages * kWBytes;
    static constexpr u32 kRecords = kStaging + Config::kWarpgroups * kStoreBuffers * kPieceBytes;
    static constexpr u32 kBarriers = kRecords + (Config::kEscapes ? Config::kStages * Config::kWarpgroups * kTileRecordBytes : 0);
    static constexpr u32 kOldBarriers = kBarriers + pipeline::Ring<Config::kStages>::kBarrierBytes;  // one a warpgroup: the old Y has landed
    static constexpr u32 kBytes = kOldBarriers + Config::kWarpgroups * 8;

    static_assert(kXBytes % smem::kSwizzlePeriodBytes == 0 && kStaging % smem::kSwizzlePeriodBytes == 0, "swizzled tiles are 1024-byte aligned");
    static_assert(Config::kCluster == 1 || kSums + Config::kWarpgroups * kSumBytes <= kStaging, "a cluster's sums fit over the ring");
};

// A run of k steps of one tile of Y.
struct Segment {
    u32 tile, first, last;  // none: first == last
    UW_DEVICE bool exists() const { return first != last; }
};

// Which segments a block works off, in order. Without kStreamK whole tiles go round the grid.
//
// With kStreamK blocks form teams, one block for each batch tile, that read the same weights at the same time, and rows
// of tiles go round the teams. The last round of rows, if it is not full, and the one before it are laid end to end and
// cut into even shares, one a team: a share begins with the end of a row and ends with the beginning of another, or
// lies inside one. A tile of Y whose k is shared is summed by those blocks for which it is the last of their share,
// each its pieces, so that nobody waits for a block that has more to do; the others leave their sums in the workspace
// and go on.
//
// With kCluster a cluster has one tile, whose k its blocks share evenly, and each sums its pieces. The blocks are the
// teams of that tile.
template <class Config>
struct Schedule {
    u32 batch_tiles;
    u32 steps;               // of one tile
    u32 whole;               // rows dealt whole; without kStreamK tiles
    u32 streamed;            // steps of all other rows
    u32 stride;              // teams; without kStreamK blocks
    u32 team, member;        // in a cluster the rank, and none
    u32 next_whole, at, end;  // the next whole row; what is left of the share

    UW_DEVICE Schedule(const GemmPackedArgs& a, u32 rows, u32 batches)
        : batch_tiles(batches), steps(a.tile_cols), whole(rows * batches), streamed(0), stride(ptx::grid_size()), team(0), member(0), next_whole(ptx::block_index()), at(0), end(0) {
        if constexpr (Config::kStreamK) {
            whole = rows;
            stride = ptx::grid_size() / batches;
            if (stride > rows * steps) stride = rows * steps;
            team = ptx::block_index() / batches;
            member = ptx::block_index() % batches;
            next_whole = team;
            if (team >= stride) {
                next_whole = rows;
            } else if (rows % stride != 0) {
                whole = rows > stride ? rows - rows % stride - stride : 0;
                streamed = (rows - whole) * steps;
                at = share_begin(team);
                end = share_begin(team + 1);
            }
        }
        if constexpr (Config::kCluster > 1) {
            team = ptx::cluster_rank();
            next_whole = ptx::block_index() / Config::kCluster;
        }
    }
    UW_DEVICE u32 share_begin(u32 t) const { return static_cast<u32>(u64(t) * streamed / stride); }

    UW_DEVICE Segment next() {
        if (Config::kCluster > 1 && next_whole < whole) {
            const Segment s{next_whole, team * steps / Config::kCluster, (team + 1) * steps / Config::kCluster};
            next_whole = whole;
            return s;
        }
        if (next_whole < whole) {
            const Segment s{Config::kStreamK ? next_whole * batch_tiles + member : next_whole, 0, steps};
            next_whole += stride;
            return s;
        }
        if (Config::kStreamK && at < end) {
            const u32 row = at / steps, first = at - row * steps;
            const u32 left = end - at, last = steps - first < left ? steps : first + left;
            at += last - first;
            return {(whole + row) * batch_tiles + member, first, last};
        }
        return {0, 0, 0};
    }

    // The teams that share a tile of Y: first_team..last_team, of which the first `summing` sum it.
    struct Sharing {
        u32 first_team, last_team, summing;
    };
    UW_DEVICE Sharing sharing(const Segment& s) const {
        if constexpr (Config::kCluster > 1) return {0, Config::kCluster - 1, Config::kCluster};
        if (!Config::kStreamK || (s.first == 0 && s.last == steps)) return {team, team, 1};
        const u32 begin = (s.tile / batch_tiles - whole) * steps;
        Sharing sharing{team, team, 0};
        while (share_begin(sharing.first_team) > begin) --sharing.first_team;
        while (share_begin(sharing.last_team + 1) < begin + steps) ++sharing.last_team;
        sharing.summing = sharing.last_team - sharing.first_team + (share_begin(sharing.last_team + 1) == begin + steps);
        return sharing;
    }
};

template <class Config>
struct Kernel {
    using S = Smem<Config>;
    using Ring = pipeline::Ring<Config::kStages>;
    using OutputTile = smem::Bf16Tile<S::kStoreRows>;
    using GatedTile = smem::Bf16HalfTile<S::kStoreRows>;
    static constexpr u32 kOutputRowBytes = Config::kSiluMul ? GatedTile::kRowBytes : smem::kSwizzleBytes;
    static constexpr u32 kTileOutputs = Config::kSiluMul ? kTile / 2 : kTile;  // features of Y of a row of tiles of W
    static constexpr u32 kAccumulators = Config::kBatchTile / 2;
    static constexpr u32 kTileRows = Config::kWarpgroups * kTile;
    // Of 65536: two warpgroups 128 * (56 + 2 * 224), three 128 * (56 + 3 * 152). One needs no budget: 256 threads may
    // have 255 each.
    static constexpr bool kBudgets = Config::kWarpgroups > 1;
    static constexpr u32 kProducerRegisters = 56;
    static constexpr u32 kConsumerRegisters = Config::kWarpgroups == 2 ? 224 : 152;
    static_assert(Config::kBatchTile % 32 == 0 && Config::kBatchTile >= 32 && Config::kBatchTile <= 256, "the n of wgmma in whole store boxes");
    static_assert(Config::kWarpgroups >= 1 && Config::kWarpgroups <= 3, "registers for up to three warpgroups");
    static_assert(Config::kStages >= 3, "a step multiplies, one is decoded and one is read");
    static_assert(!(Config::kDumpOperands && Config::kStreamK), "both would use the workspace");
    static_assert(Config::kCluster == 1 || !Config::kStreamK, "both share out k");
    static_assert(packed::kBlockRows == 2 * packed::kGateRows, "a row block is rows of a gate and of its up");
    static_assert(!(Config::kSiluMul && Config::kStoreAdd), "a gate and its up overwrite");

    const GemmPackedArgs& args;
    const u32 shared;
    const Ring ring;
    const u32 batch_tiles;
    pipeline::Cursor<Config::kStages> cursor;
    Schedule<Config> schedule;

    UW_DEVICE Kernel(const GemmPackedArgs& a, u32 shared_address)
        : args(a),
          shared(shared_address),
          ring{shared_address + S::kBarriers},
          batch_tiles((a.m + Config::kBatchTile - 1) / Config::kBatchTile),
          schedule(a, (a.n + kTileRows - 1) / kTileRows, batch_tiles) {}

    // Tiles of Y that share weights are neighbours: a round reads each weight once from memory and X from L2.
    UW_DEVICE u32 batch_row(const Segment& s) const { return s.tile % batch_tiles * Config::kBatchTile; }
    // The row of tiles of W that a warpgroup multiplies. Past the end it repeats the last one, and its sums are
    // dropped.
    UW_DEVICE u32 wanted_tile_row(const Segment& s, u32 warpgroup) const { return s.tile / batch_tiles * Config::kWarpgroups + warpgroup; }
    UW_DEVICE u32 tile_row(const Segment& s, u32 warpgroup) const {
        const u32 wanted = wanted_tile_row(s, warpgroup), last = args.n / kTile - 1;
        return wanted < last ? wanted : last;
    }
    UW_DEVICE u32 x_slot(u32 slot) const { return shared + S::kX + slot * S::kXBytes; }
    UW_DEVICE u32 w_slot(u32 slot) const { return shared + S::kW + slot * S::kWBytes; }
    UW_DEVICE u32 record_slot(u32 slot, u32 warpgroup) const { return shared + S::kRecords + (slot * Config::kWarpgroups + warpgroup) * kTileRecordBytes; }

    UW_DEVICE void setup() const {
        ring.init(Config::kEscapes ? 1 + Config::kWarpgroups : 1, Config::kWarpgroups * kWarpgroupWarps);
#pragma unroll
        for (u32 g = 0; g < Config::kWarpgroups; ++g) ptx::mbarrier_init(shared + S::kOldBarriers + g * 8, 1);
        ptx::fence_mbarrier_init();
    }

    // ---- load ------------------------------------------------------------------------------------------------------
    // Where a segment's weights and activations come from.
    struct Sources {
        const u8* w[Config::kWarpgroups];  // in step 0
        u32 row, boxes;                    // of X
    };
    UW_DEVICE Sources sources(const Segment& s) const {
        Sources from;
#pragma unroll
        for (u32 g = 0; g < Config::kWarpgroups; ++g) from.w[g] = args.packed + u64(tile_row(s, g)) * args.tile_cols * packed::kTileBytes;
        from.row = batch_row(s);
        const u32 boxes = (args.m - from.row + S::kXBoxRows - 1) / S::kXBoxRows;
        from.boxes = boxes < S::kXBoxes ? boxes : S::kXBoxes;
        return from;
    }
    UW_DEVICE void load_w(const Sources& from, u32 step, u32 slot, u64 policy) const {
        ptx::mbarrier_arrive_expect_tx(ring.full(slot), from.boxes * S::kXBoxBytes + S::kWBytes);
#pragma unroll
        for (u32 g = 0; g < Config::kWarpgroups; ++g) {
            ptx::bulk_load(w_slot(slot) + g * packed::kTileBytes, from.w[g] + u64(step) * packed::kTileBytes, packed::kTileBytes, ring.full(slot), policy);
        }
    }
    UW_DEVICE void load_x(const Sources& from, u32 step, u32 slot, u64 policy) const {
#pragma unroll
        for (u32 i = 0; i < S::kXBoxes; ++i) {
            if (i < from.boxes) ptx::tensor_load_2d(x_slot(slot) + i * S::kXBoxBytes, args.x, step * kTile, from.row + i * S::kXBoxRows, ring.full(slot), policy);
        }
    }

    // One lane.
    UW_DEVICE void load() {
        ptx::prefetch_tensor_map(args.x);
        const u64 x_policy = ptx::l2_policy(L2::kEvictLast);
        const u64 w_policy = ptx::l2_policy(batch_tiles == 1 ? L2::kEvictFirst : L2::kNormal);
        Segment s = schedule.next();
        if constexpr (Config::kPdl) {
            // Weights do not depend on the kernel before, and come from furthest away: X does and waits.
            const Sources from = sources(s);
            u32 ahead = s.last - s.first;
            ahead = ahead < Config::kStages ? ahead : Config::kStages;
            for (u32 i = 0; i < ahead; ++i) load_w(from, s.first + i, i, w_policy);
            ptx::grid_dependency_wait();
            for (u32 i = 0; i < ahead; ++i) {
                load_x(from, s.first + i, i, x_policy);
                cursor.advance();
            }
            s.first += ahead;
        }
        for (;;) {
            const Sources from = sources(s);
            for (; s.first < s.last; ++s.first) {
                ring.wait_empty(cursor);  // every warp that multiplies has released the slot: its loads of W and its wgmma on X are done
                load_w(from, s.first, cursor.slot, w_policy);
                load_x(from, s.first, cursor.slot, x_policy);
                cursor.advance();
            }
            s = schedule.next();
            if (!s.exists()) break;
        }
    }

    // ---- escapes ---------------------------------------------------------------------------------------------------
    // A warp: brings the records of one warpgroup's tiles next to the weights, ahead of the warps that multiply, for
    // which every load from far away would be a stall of the tensor cores. Lane l holds the heads of step l of 32 and,
    // on their way, of the 32 after.
    UW_DEVICE void scout(u32 warpgroup) {
        const u32 lane = ptx::lane_index();
        for (Segment s = schedule.next(); s.exists(); s = schedule.next()) {
            const u32* row = args.escape_heads + u64(tile_row(s, warpgroup)) * args.tile_cols * packed::kTileBlocks;
            U32x4 heads{0, 0, 0, 0}, next = load_heads(row, s.first + lane, s);
            u32 any = 0;
            for (u32 step = s.first; step < s.last; ++step) {
                const u32 turn = (step - s.first) % 32;
                if (turn == 0) {
                    heads = next;
                    next = load_heads(row, step + 32 + lane, s);
                    any = ptx::warp_ballot((heads.x | heads.y | heads.z | heads.w) != 0);
                    prefetch_list(heads.x);
                    prefetch_list(heads.y);
                    prefetch_list(heads.z);
                    prefetch_list(heads.w);
                }
                ring.wait_empty(cursor);  // the records of this slot have been read
                const u32 to = record_slot(cursor.slot, warpgroup);
                if (any >> turn & 1) {
                    const u32 mine[packed::kTileBlocks] = {ptx::shuffle(heads.x, turn), ptx::shuffle(heads.y, turn), ptx::shuffle(heads.z, turn),
                                                          ptx::shuffle(heads.w, turn)};
                    u32 records[packed::kTileBlocks];
#pragma unroll
                    for (u32 b = 0; b < packed::kTileBlocks; ++b) records[b] = mine[b] == 0 ? 0 : packed::read_records(mine[b], args.escapes, args.escape_words, lane);
#pragma unroll
                    for (u32 b = 0; b < packed::kTileBlocks; ++b) {
                        const u32 word = lane == kSlotRecords + 1 ? mine[b] & ~packed::kListHead : records[b];
                        if (lane <= kSlotRecords + 1) ptx::store_shared(to + b * kBlockRecordBytes + lane * 4, word);
                    }
                } else if (lane < packed::kTileBlocks) {
                    ptx::store_shared(to + lane * kBlockRecordBytes, 0);
                }
                ptx::sync_warp();
                if (lane == 0) ptx::mbarrier_arrive(ring.full(cursor.slot));
                cursor.advance();
            }
        }
    }
    UW_DEVICE static U32x4 load_heads(const u32* row, u32 step, const Segment& s) {
        return step < s.last ? ptx::load_global_nc_x4(row + step * packed::kTileBlocks) : U32x4{0, 0, 0, 0};
    }
    // Lists are rare and far away: have them near when their step comes.
    UW_DEVICE void prefetch_list(u32 head) const {
        const u32 list = head & ~packed::kListHead;
        if (list != head && list < args.escape_words) ptx::prefetch_l2(args.escapes + list);
    }

    // ---- multiply --------------------------------------------------------------------------------------------------
    struct Place {
        u32 thread, warp, lane;  // inside the warpgroup
        u32 warpgroup;

        UW_DEVICE Place() {
            const u32 consumer_warp = ptx::uniform_warp_index() - kWarpgroupWarps;
            lane = ptx::lane_index();
            warp = consumer_warp % kWarpgroupWarps;
            warpgroup = consumer_warp / kWarpgroupWarps;
            thread = warp * 32 + lane;
        }
    };

    // One barrier per warpgroup. The numbers are literals: a barrier chosen at run time makes the compiler serialise
    // wgmma.
    UW_DEVICE static void sync_warpgroup(const Place& p) {
        if (Config::kWarpgroups == 1 || p.warpgroup == 0) {
            ptx::named_barrier_sync(1, kWarpgroupThreads);
        } else if (Config::kWarpgroups == 2 || p.warpgroup == 1) {
            ptx::named_barrier_sync(2, kWarpgroupThreads);
        } else {
            ptx::named_barrier_sync(3, kWarpgroupThreads);
        }
    }

    // What a warp has of a step before it decodes it.
    struct Fetched {
        packed::PackedBlock packed;
        u32 records;    // where its row block's escapes lie
        u32 count, first;  // how many they are, and the first
    };

    // Takes the next step from the ring, as far as registers.
    UW_DEVICE Fetched fetch(const Place& p) {
        ring.wait_full(cursor);
        const u32 block = w_slot(cursor.slot) + p.warpgroup * packed::kTileBytes + p.warp * packed::kBlockBytes;
        const u32 records = record_slot(cursor.slot, p.warpgroup) + p.warp * kBlockRecordBytes;
        cursor.advance();
        const U32x2 head = Config::kEscapes ? ptx::load_shared_x2(records) : U32x2{0, 0};
        return {packed::PackedBlock(block, p.lane), records, head.x, head.y};
    }

    // A quarter of a step. Not before the instructions that stand before it: they waited for the last reader of these
    // registers.
    template <u32 kStep>
    UW_DEVICE static void decode(packed::Operands& operands, Fetched& f) {
#pragma unroll
        for (u32 i = 0; i < 3; ++i) ptx::pin(f.packed.words[3 * kStep + i]);
        operands.template set<kStep>(f.packed);
    }

    UW_DEVICE void patch(packed::Operands& operands, const Fetched& f, const Segment& s, u32 step, const Place& p) const {
        if (Config::kEscapes && f.count != 0) {
            packed::patch(operands, f.first, p.lane);
            const u32 count = f.count < packed::kBlockElements ? f.count : packed::kBlockElements;
#pragma unroll 1
            for (u32 i = 2; i <= count && i <= kSlotRecords; ++i) packed::patch(operands, ptx::load_shared(f.records + i * 4), p.lane);
            if (count > kSlotRecords) {
                const u32 index = ptx::load_shared(f.records + (kSlotRecords + 1) * 4);
#pragma unroll 1
                for (u32 i = kSlotRecords + 1; i <= count && i < args.escape_words - index; ++i) {
                    packed::patch(operands, ptx::load_global_nc(args.escapes + index + i), p.lane);
                }
            }
        }
        if constexpr (Config::kDumpOperands) dump(operands, s, step, p);
    }

    // Debugging: what enters the tensor cores.
    UW_DEVICE void dump(const packed::Operands& operands, const Segment& s, u32 step, const Place& p) const {
        const u64 tile = u64(tile_row(s, p.warpgroup)) * args.tile_cols + step;
        u32* out = reinterpret_cast<u32*>(args.workspace) + (tile * packed::kTileBlocks + p.warp) * (kSteps * 4 * 32) + p.lane;
#pragma unroll
        for (u32 r = 0; r < kSteps * 4; ++r) ptx::store_global(out + r * 32, operands.p[r]);
    }

    // A quarter of a step, in flight when it returns.
    template <u32 kStep>
    UW_DEVICE static void issue(float (&sums)[kAccumulators], const packed::Operands& operands, u64 x) {
        const u32 a[4] = {operands.p[4 * kStep], operands.p[4 * kStep + 1], operands.p[4 * kStep + 2], operands.p[4 * kStep + 3]};
        ptx::wgmma_fence();
        ptx::wgmma(sums, a, x + kStep * mma::kDescriptorStepK16);
        ptx::wgmma_commit_group();
    }

    // Slots of X in the order of steps: the one to multiply, and the one to give back.
    struct Slots {
        u32 multiply, release;
        UW_DEVICE static void next(u32& slot) { slot = slot + 1 == Config::kStages ? 0 : slot + 1; }
    };
    // After the wait for the wgmma that read X of the slot, and after W and records were decoded, that is, after their
    // loads returned. The warp's arrival on `empty` orders all of it before the copies that refill the slot.
    UW_DEVICE void release(Slots& slots, const Place& p) const {
        ptx::sync_warp();
        if (p.lane == 0) ring.release(slots.release);
        Slots::next(slots.release);
    }

    // Multiplies a step, decodes the next and reads the one after, quarter by quarter, so that the tensor cores always
    // have work queued. Quarters of a warpgroup multiply in order: when the wait after quarter i leaves four in flight,
    // quarter i of the step before has read its operands, whose registers take the next step's.
    UW_DEVICE void overlap(float (&sums)[kAccumulators], const packed::Operands& operands, packed::Operands& following, Fetched& f, Slots& slots, const Segment& s, u32 step,
                           const Place& p) {
        const u64 x = mma::k_major_descriptor(x_slot(slots.multiply));
        Slots::next(slots.multiply);
        issue<0>(sums, operands, x);
        ptx::wgmma_wait_group<kSteps>();
        decode<0>(following, f);
        issue<1>(sums, operands, x);
        ptx::wgmma_wait_group<2>();  // all of the step before
        if (step != s.first) release(slots, p);
        decode<1>(following, f);
        issue<2>(sums, operands, x);
        decode<2>(following, f);
        issue<3>(sums, operands, x);
        decode<3>(following, f);
        patch(following, f, s, step + 1, p);
        if (step + 2 < s.last) f = fetch(p);
    }

    UW_DEVICE void multiply_last(float (&sums)[kAccumulators], const packed::Operands& operands, Slots& slots, const Segment& s, const Place& p) {
        const u64 x = mma::k_major_descriptor(x_slot(slots.multiply));
        issue<0>(sums, operands, x);
        issue<1>(sums, operands, x);
        issue<2>(sums, operands, x);
        issue<3>(sums, operands, x);
        ptx::wgmma_wait_group<0>();
        if (s.last - s.first > 1) release(slots, p);
        release(slots, p);
    }

    UW_DEVICE void multiply(float (&sums)[kAccumulators], const Segment& s, const Place& p) {
        packed::Operands even, odd;
        u32 step = s.first;
        Slots slots{cursor.slot, cursor.slot};
        Fetched f = fetch(p);
        even = packed::Operands(f.packed);
        patch(even, f, s, step, p);
        if (step + 1 < s.last) f = fetch(p);
        for (;;) {
            if (step + 1 == s.last) return multiply_last(sums, even, slots, s, p);
            overlap(sums, even, odd, f, slots, s, step, p);
            ++step;
            if (step + 1 == s.last) return multiply_last(sums, odd, slots, s, p);
            overlap(sums, odd, even, f, slots, s, step, p);
            ++step;
        }
    }

    // ---- partial sums ----------------------------------------------------------------------------------------------
    // What a block gives, once of the tile whose end it has and once of the tile that it sums with others:
    // [team][member][which][warpgroup][4 sums][thread] fp32, and for each warpgroup how many blocks have still to read
    // it.
    UW_DEVICE u32 giver(const typename Schedule<Config>::Sharing& sharing, u32 team, const Place& p) const {
        const u32 which = team - sharing.first_team < sharing.summing;
        return ((team * batch_tiles + schedule.member) * 2 + which) * Config::kWarpgroups + p.warpgroup;
    }
    UW_DEVICE float* given(u32 giver, const Place& p) const { return args.workspace + u64(giver) * (kTile * Config::kBatchTile) + p.thread * 4; }

    UW_DEVICE void give(const float (&sums)[kAccumulators], const typename Schedule<Config>::Sharing& sharing, u32 readers, const Place& p) const {
        const u32 own = giver(sharing, schedule.team, p);
        float* to = given(own, p);
#pragma unroll
        for (u32 i = 0; i < kAccumulators / 4; ++i) {
            ptx::store_global_x4(to + i * (kWarpgroupThreads * 4), {ptx::bits_from_float(sums[4 * i]), ptx::bits_from_float(sums[4 * i + 1]),
                                                                    ptx::bits_from_float(sums[4 * i + 2]), ptx::bits_from_float(sums[4 * i + 3])});
        }
        sync_warpgroup(p);
        if (p.thread == 0) ptx::store_release_global(args.counters + own, readers);
    }

    // The pieces of a shared tile that this block sums: in a cluster in turn through all warpgroups, so that each block
    // has some even where a warpgroup has few.
    UW_DEVICE bool is_summed_here(const typename Schedule<Config>::Sharing& sharing, u32 piece, const Place& p) const {
        const u32 turn = Config::kCluster > 1 ? p.warpgroup * S::kPieces + piece : piece;
        return turn % sharing.summing == schedule.team - sharing.first_team;
    }

    // In a cluster: leaves what others sum in shared memory, [warpgroup][4 sums][thread] fp32, and adds to this block's
    // pieces what the others left, in the order of their ranks: the same bits in every run.
    UW_DEVICE void exchange(float (&sums)[kAccumulators], const typename Schedule<Config>::Sharing& sharing, const Place& p) const {
        constexpr u32 kPieceSums = S::kStoreRows / 2, kPeers = Config::kCluster - 1;
        const u32 own = shared + S::kSums + p.warpgroup * S::kSumBytes + p.thread * 16;
        ptx::named_barrier_sync(4, Config::kWarpgroups * kWarpgroupThreads);  // all have read X
#pragma unroll
        for (u32 piece = 0; piece < S::kPieces; ++piece) {
            if (is_summed_here(sharing, piece, p)) continue;
#pragma unroll
            for (u32 i = 0; i < kPieceSums / 4; ++i) {
                const float* d = sums + piece * kPieceSums + 4 * i;
                ptx::store_shared_x4(own + (piece * kPieceSums / 4 + i) * (kWarpgroupThreads * 16),
                                     {ptx::bits_from_float(d[0]), ptx::bits_from_float(d[1]), ptx::bits_from_float(d[2]), ptx::bits_from_float(d[3])});
            }
        }
        meet();
        u32 from[kPeers];
#pragma unroll
        for (u32 j = 0; j < kPeers; ++j) from[j] = ptx::map_shared_rank(own, j + (j >= schedule.team));
#pragma unroll
        for (u32 piece = 0; piece < S::kPieces; ++piece) {
            if (!is_summed_here(sharing, piece, p)) continue;
#pragma unroll
            for (u32 i = 0; i < kPieceSums / 4; ++i) {
                U32x4 v[kPeers];
#pragma unroll
                for (u32 j = 0; j < kPeers; ++j) v[j] = ptx::load_cluster_x4(from[j] + (piece * kPieceSums / 4 + i) * (kWarpgroupThreads * 16));
                float* d = sums + piece * kPieceSums + 4 * i;
#pragma unroll
                for (u32 j = 0; j < kPeers; ++j) {
                    d[0] += ptx::float_from_bits(v[j].x);
                    d[1] += ptx::float_from_bits(v[j].y);
                    d[2] += ptx::float_from_bits(v[j].z);
                    d[3] += ptx::float_from_bits(v[j].w);
                }
            }
        }
    }
    UW_DEVICE static void meet() {
        ptx::cluster_arrive();
        ptx::cluster_wait();
    }

    // Adds, in order, what the other teams gave to this block's pieces: the same bits in every run.
    UW_DEVICE void take(float (&sums)[kAccumulators], const typename Schedule<Config>::Sharing& sharing, const Place& p) const {
        // A thread per team: their latencies overlap.
        const u32 mine = sharing.first_team + p.thread;
        const bool waits = mine <= sharing.last_team && mine != schedule.team;
        u32* flag = args.counters + giver(sharing, waits ? mine : schedule.team, p);
        // By vote, so that warps stay whole in the eyes of the compiler, here and in the loop around.
        while (ptx::warp_ballot(waits && ptx::load_acquire_global(flag) == 0) != 0) {
        }
        sync_warpgroup(p);
        constexpr u32 kPieceSums = S::kStoreRows / 2, kFlight = Config::kBatchTile > 192 ? 1 : Config::kBatchTile > 128 ? 2 : 4;
        const u32 other = sharing.first_team == schedule.team ? sharing.last_team : sharing.first_team;
#pragma unroll
        for (u32 piece = 0; piece < S::kPieces; ++piece) {
            if (!is_summed_here(sharing, piece, p)) continue;
            // Some teams at a time, for their latencies to overlap; a place that no other team takes reads the first's
            // and drops it.
            for (u32 first = sharing.first_team; first <= sharing.last_team; first += kFlight) {
                const float* from[kFlight];
                bool counts[kFlight];
#pragma unroll
                for (u32 j = 0; j < kFlight; ++j) {
                    counts[j] = first + j <= sharing.last_team && first + j != schedule.team;
                    from[j] = given(giver(sharing, counts[j] ? first + j : other, p), p) + piece * (kPieceSums * kWarpgroupThreads);
                }
#pragma unroll
                for (u32 i = 0; i < kPieceSums / 4; ++i) {
                    U32x4 v[kFlight];
#pragma unroll
                    for (u32 j = 0; j < kFlight; ++j) v[j] = ptx::load_global_x4(from[j] + i * (kWarpgroupThreads * 4));
                    float* d = sums + piece * kPieceSums + 4 * i;
#pragma unroll
                    for (u32 j = 0; j < kFlight; ++j) {
                        d[0] += counts[j] ? ptx::float_from_bits(v[j].x) : 0.0f;
                        d[1] += counts[j] ? ptx::float_from_bits(v[j].y) : 0.0f;
                        d[2] += counts[j] ? ptx::float_from_bits(v[j].z) : 0.0f;
                        d[3] += counts[j] ? ptx::float_from_bits(v[j].w) : 0.0f;
                    }
                }
            }
        }
        sync_warpgroup(p);
        if (waits) ptx::reduce_add_global(flag, ~0u);
    }

    // ---- store -----------------------------------------------------------------------------------------------------
    UW_DEVICE u32 old_barrier(const Place& p) const { return shared + S::kOldBarriers + p.warpgroup * 8; }

    UW_DEVICE static void add_pair(float& low, float& high, u32 pair) {
        low += ptx::float_from_bits(pair << 16);
        high += ptx::float_from_bits(pair & 0xffff0000u);
    }

    // Of rows g and g + 8 of a fragment, a gate and its up.
    UW_DEVICE float gated(float gate, float up) const { return packed::silu(gate * args.scale) * (up * args.scale); }

    // Pieces of kStoreRows batch rows by 64 features (kSiluMul: 32): transposed into shared memory and stored by the copy engine,
    // which drops rows past m. Thread 0 starts every store. A buffer is written again after kStoreBuffers pieces, and
    // thread 0 passes the barrier of the piece before only when its store has read it.
    UW_DEVICE void store(float (&sums)[kAccumulators], const Segment& s, const typename Schedule<Config>::Sharing& sharing, u32& buffer, u32& old_parity, const Place& p) const {
        const u32 wanted = wanted_tile_row(s, p.warpgroup), column = wanted * kTileOutputs, row = batch_row(s);
        if (wanted * kTile >= args.n) return;
        // A fragment is 16 features by 8 rows of the batch. Transposed matrices: features 0..7 and 8..15 of one
        // fragment, then of the next.
        const u32 matrix_row = p.lane % 8 + p.lane / 16 * 8, matrix_chunk = p.warp * 2 + p.lane / 8 % 2;
#pragma unroll
        for (u32 i = 0; i < S::kPieces; ++i) {
            const u32 first = row + i * S::kStoreRows;
            if (first >= args.m) break;
            if (!is_summed_here(sharing, i, p)) continue;
            const u32 staging = shared + S::kStaging + (p.warpgroup * S::kStoreBuffers + buffer) * S::kPieceBytes;
            buffer = buffer + 1 == S::kStoreBuffers ? 0 : buffer + 1;
            if constexpr (Config::kStoreAdd) {
                // The buffer was last written by all threads, each of which fenced before the barrier that led to its
                // store, and thread 0 has waited for that store to have read it.
                if (p.thread == 0) {
                    ptx::mbarrier_arrive_expect_tx(old_barrier(p), S::kPieceBytes);
#pragma unroll
                    for (u32 r = 0; r < S::kStoreRows; r += kBoxRows) {
                        ptx::tensor_load_2d(staging + r * smem::kSwizzleBytes, args.y_map, column, first + r, old_barrier(p));
                    }
                }
                ptx::mbarrier_wait_parity(old_barrier(p), old_parity);
                old_parity ^= 1;
            }
            if constexpr (Config::kSiluMul) {
                // 8 features by 32 rows of the batch: the four matrices of a store lie under each other.
#pragma unroll
                for (u32 g = 0; g < S::kStoreRows / 32; ++g) {
                    const float* d = sums + (i * S::kStoreRows / 32 + g) * 16;
                    u32 pairs[4];
#pragma unroll
                    for (u32 j = 0; j < 4; ++j) pairs[j] = ptx::pack_bf16x2(gated(d[4 * j], d[4 * j + 2]), gated(d[4 * j + 1], d[4 * j + 3]));
                    ptx::store_matrix_transposed_x4(staging + GatedTile::offset(g * 32 + p.lane, p.warp), {pairs[0], pairs[1], pairs[2], pairs[3]});
                }
            } else {
#pragma unroll
                for (u32 g = 0; g < S::kStoreRows / 16; ++g) {
                    const u32 address = staging + OutputTile::offset(g * 16 + matrix_row, matrix_chunk);
                    float* d = sums + (i * S::kStoreRows / 16 + g) * 8;
#pragma unroll
                    for (u32 j = 0; j < 8; ++j) d[j] *= args.scale;
                    if constexpr (Config::kStoreAdd) {
                        const U32x4 old = ptx::load_matrix_transposed_x4(address);
                        add_pair(d[0], d[1], old.x);
                        add_pair(d[2], d[3], old.y);
                        add_pair(d[4], d[5], old.z);
                        add_pair(d[6], d[7], old.w);
                    }
                    ptx::store_matrix_transposed_x4(address, {ptx::pack_bf16x2(d[0], d[1]), ptx::pack_bf16x2(d[2], d[3]), ptx::pack_bf16x2(d[4], d[5]),
                                                              ptx::pack_bf16x2(d[6], d[7])});
                }
            }
            ptx::fence_proxy_async_shared();
            if (p.thread == 0) ptx::bulk_wait_group_read<S::kStoreBuffers - 2>();
            sync_warpgroup(p);
            if (p.thread == 0) {
#pragma unroll
                for (u32 r = 0; r < S::kStoreRows; r += kBoxRows) {
                    if (first + r < args.m) ptx::tensor_store_2d(args.y_map, column, first + r, staging + r * kOutputRowBytes);
                }
                ptx::bulk_commit_group();
            }
        }
    }

    UW_DEVICE void consume() {
        const Place p;
        u32 buffer = 0, old_parity = 0;
        Segment s = schedule.next();
        if constexpr (Config::kPdl) ptx::grid_dependency_wait();
        while (s.exists()) {
            float sums[kAccumulators];
#pragma unroll
            for (u32 i = 0; i < kAccumulators; ++i) sums[i] = 0.0f;
            multiply(sums, s, p);
            const typename Schedule<Config>::Sharing sharing = schedule.sharing(s);
            const bool sums_up = schedule.team - sharing.first_team < sharing.summing;
            if constexpr (Config::kStreamK) {
                const u32 readers = sharing.summing - sums_up;
                if (readers != 0) give(sums, sharing, readers, p);
                if (sums_up && sharing.first_team != sharing.last_team) take(sums, sharing, p);
            }
            if constexpr (Config::kCluster > 1) exchange(sums, sharing, p);
            if (sums_up) store(sums, s, sharing, buffer, old_parity, p);
            s = schedule.next();
        }
        if (p.thread == 0) ptx::bulk_wait_group<0>();
        if constexpr (Config::kCluster > 1) {
            ptx::sync_warp();
            meet();  // peers may still be reading this block's sums
        }
    }

    UW_DEVICE void run() {
        const u32 warp = ptx::uniform_warp_index();
        if constexpr (Config::kPdl) ptx::grid_launch_dependents();
        if (warp == 0) {
            if (ptx::elect_one()) setup();
            ptx::sync_warp();
        }
        ptx::sync_block();
        if (warp < kWarpgroupWarps) {
            if constexpr (kBudgets) ptx::lower_registers<kProducerRegisters>();
            if (warp == 0) {
                if (ptx::elect_one()) load();
            } else if (Config::kEscapes && warp <= Config::kWarpgroups) {
                scout(warp - 1);
            }
            if constexpr (Config::kCluster > 1) {
                ptx::sync_warp();
                meet();
                meet();  // as often as the warps that multiply
            }
        } else {
            if constexpr (kBudgets) ptx::raise_registers<kConsumerRegisters>();
            consume();
        }
    }
};

template <class Config>
UW_DEVICE void run(const GemmPackedArgs& args) {
    Kernel<Config> kernel(args, ptx::smem_address(ptx::dynamic_smem()));
    kernel.run();
}

}  // namespace uw::gemm_wgmma
