// Shared memory, roles and addresses of a block; see unweight/kernels/gemm_wgmma.cuh.
#pragma once

#include "unweight/axes.cuh"
#include "unweight/encoding/packed.cuh"
#include "unweight/kernels/gemm_wgmma/schedule.cuh"
#include "unweight/pipeline/ring.cuh"
#include "unweight/ptx/barrier.cuh"
#include "unweight/smem/tile.cuh"

namespace uw::gemm_wgmma {

using packed::kSteps;
using packed::kTile;

constexpr u32 kWarpgroupThreads = 128;
constexpr u32 kWarpgroupWarps = 4;
constexpr u32 kBoxRows = 32;  // rows of a box of args.y_map

enum class NamedBarrier : u32 {
    kFirstWarpgroup = 1,
    kSecondWarpgroup = 2,
    kThirdWarpgroup = 3,
    kConsumers = 4,
};

// Escapes of a row block in a slot: their count, up to kSlotRecords records, and the index of the list for records that
// do not fit.
constexpr u32 kSlotRecords = 14;
constexpr u32 kBlockRecordBytes = (1 + kSlotRecords + 1) * 4;
constexpr u32 kTileRecordBytes = packed::kTileBlocks * kBlockRecordBytes;

template <class Config>
constexpr u32 kThreads = (Config::kWarpgroups + 1) * kWarpgroupThreads;

// Weights are loaded into registers late, in the step before they are multiplied, and have barriers of their own, so
// that they are refilled while X of their slot is multiplied. Slower for all other blocks
// (docs/records/2026-11-28/gemm_wgmma-rings.csv).
template <class Config>
constexpr bool kLateWeights = Config::kBatchTile == 256 && Config::kWarpgroups == 2;

// Offsets of the sections in dynamic shared memory, and their total.
template <class Config>
struct Smem {
    // A box without rows of the batch is not loaded: TMA takes longer to zero-fill rows than to read them. The multiply
    // uses stale data there, and the sums of those rows are not stored.
    static constexpr u32 kXBoxRows = 32;
    static constexpr u32 kXBoxes = Config::kBatchTile / kXBoxRows;
    static constexpr u32 kXBoxBytes = kXBoxRows * smem::kSwizzleBytes;
    static constexpr u32 kXBytes = kXBoxes * kXBoxBytes;
    static constexpr u32 kWBytes = Config::kWarpgroups * packed::kTileBytes;
    // A warpgroup transposes its part of Y in pieces of kStoreRows batch rows by 64 features.
    static constexpr u32 kStoreRows =
        Config::kBatchTile % 64 == 0 && Config::kBatchTile > 64 && Config::kCluster == 1 ? 64 : 32;
    static constexpr u32 kPieces = Config::kBatchTile / kStoreRows;
    static constexpr u32 kStoreBuffers = kPieces < 2 ? 2 : kPieces > 3 ? 3 : kPieces;
    static constexpr u32 kPieceBytes = kStoreRows * smem::kSwizzleBytes;

    // Sums that the blocks of a cluster exchange, over the drained ring.
    static constexpr u32 kSums = 0;
    static constexpr u32 kSumBytes = kTile * Config::kBatchTile * 4;  // per warpgroup

    static constexpr u32 kX = 0;
    static constexpr u32 kW = kX + Config::kStages * kXBytes;
    static constexpr u32 kStaging = kW + Config::kStages * kWBytes;
    static constexpr u32 kRecords = kStaging + Config::kWarpgroups * kStoreBuffers * kPieceBytes;
    static constexpr u32 kBarriers =
        kRecords + (Config::kEscapes ? Config::kStages * Config::kWarpgroups * kTileRecordBytes : 0);
    // Barriers of W and records: those of X, unless kLateWeights.
    static constexpr u32 kWBarriers =
        kBarriers + (kLateWeights<Config> ? pipeline::Ring<Config::kStages>::kBarrierBytes : 0);
    static constexpr u32 kOldBarriers =
        kWBarriers + pipeline::Ring<Config::kStages>::kBarrierBytes;  // one per warpgroup: the old Y has landed
    static constexpr u32 kBytes = kOldBarriers + Config::kWarpgroups * 8;

    static_assert(kXBytes % smem::kSwizzlePeriodBytes == 0 && kStaging % smem::kSwizzlePeriodBytes == 0,
                  "swizzled tiles are 1024-byte aligned");
    static_assert(Config::kCluster == 1 || kSums + Config::kWarpgroups * kSumBytes <= kStaging,
                  "a cluster's sums fit over the ring");
};

// Position of a consumer thread.
struct Place {
    u32 thread, warp, lane;  // within the warpgroup
    u32 warpgroup;

    UW_DEVICE Place() {
        const u32 consumer_warp = ptx::uniform_warp_index() - kWarpgroupWarps;
        lane = ptx::laneid();
        warp = consumer_warp % kWarpgroupWarps;
        warpgroup = consumer_warp / kWarpgroupWarps;
        thread = warp * 32 + lane;
    }
};

// State that every role needs. The layers above (Load, Escapes, Mainloop, Reduce, Epilogue) add functions and no state.
template <class Config>
struct Block {
    using S = Smem<Config>;
    using Ring = pipeline::Ring<Config::kStages>;
    using OutputTile = smem::Bf16Tile<S::kStoreRows>;
    using GatedTile = smem::Bf16HalfTile<S::kStoreRows>;
    static constexpr u32 kOutputRowBytes = kSiluMul<Config> ? GatedTile::kRowBytes : smem::kSwizzleBytes;
    static constexpr u32 kTileOutputs = kSiluMul<Config> ? kTile / 2 : kTile;  // features of Y per row of tiles of W
    static constexpr u32 kAccumulators = Config::kBatchTile / 2;
    static constexpr u32 kTileRows = Config::kWarpgroups * kTile;
    // Register budget out of 65536: two warpgroups 128 * (56 + 2 * 224), three 128 * (56 + 3 * 152). One warpgroup
    // needs no setmaxnreg: 256 threads may have 255 registers each.
    static constexpr bool kBudgets = Config::kWarpgroups > 1;
    static constexpr u32 kProducerRegisters = 56;
    static constexpr u32 kConsumerRegisters = Config::kWarpgroups == 2 ? 224 : 152;
    static_assert(Config::kBatchTile % 32 == 0 && Config::kBatchTile >= 32 && Config::kBatchTile <= 256,
                  "the n of wgmma in whole store boxes");
    static_assert(Config::kWarpgroups >= 1 && Config::kWarpgroups <= 3, "registers for up to three warpgroups");
    static_assert(Config::kStages >= 3, "a step multiplies, one is decoded and one is read");
    static_assert(!(Config::kDump && Config::kStreamK), "both would use the workspace");
    static_assert(Config::kCluster == 1 || !Config::kStreamK, "both share out k");
    static_assert(packed::kBlockRows == 2 * packed::kGateRows, "a row block is rows of a gate and of its up");
    static_assert(!(kSiluMul<Config> && kStoreAdd<Config>), "a gate and its up overwrite");

    const GemmPackedArgs& args;
    const u32 shared;
    const Ring x_ring, w_ring;  // the same barriers, unless kLateWeights
    const u32 batch_tiles;
    pipeline::Cursor<Config::kStages> cursor;
    Schedule<Config> schedule;

    UW_DEVICE Block(const GemmPackedArgs& a, u32 shared_address)
        : args(a),
          shared(shared_address),
          x_ring{shared_address + S::kBarriers},
          w_ring{shared_address + S::kWBarriers},
          batch_tiles((a.m + Config::kBatchTile - 1) / Config::kBatchTile),
          schedule(a, (a.n + kTileRows - 1) / kTileRows, batch_tiles) {}

    // Tiles of Y that share weights are adjacent: a wave reads each weight once from memory, and X from L2.
    UW_DEVICE u32 batch_row(const Segment& s) const { return s.tile % batch_tiles * Config::kBatchTile; }
    // The row of tiles of W that a warpgroup multiplies. Past the end it repeats the last row and discards its sums.
    UW_DEVICE u32 wanted_tile_row(const Segment& s, u32 warpgroup) const {
        return s.tile / batch_tiles * Config::kWarpgroups + warpgroup;
    }
    UW_DEVICE u32 tile_row(const Segment& s, u32 warpgroup) const {
        const u32 wanted = wanted_tile_row(s, warpgroup), last = args.n / kTile - 1;
        return wanted < last ? wanted : last;
    }
    UW_DEVICE u32 x_slot(u32 slot) const { return shared + S::kX + slot * S::kXBytes; }
    UW_DEVICE u32 w_slot(u32 slot) const { return shared + S::kW + slot * S::kWBytes; }
    UW_DEVICE u32 record_slot(u32 slot, u32 warpgroup) const {
        return shared + S::kRecords + (slot * Config::kWarpgroups + warpgroup) * kTileRecordBytes;
    }

    // One named barrier per warpgroup, each with a literal id in its own branch: an id chosen at run time makes the
    // compiler serialize wgmma.
    UW_DEVICE static void sync_warpgroup(const Place& p) {
        if (Config::kWarpgroups == 1 || p.warpgroup == 0) {
            ptx::bar_sync(NamedBarrier::kFirstWarpgroup, kWarpgroupThreads);
        } else if (Config::kWarpgroups == 2 || p.warpgroup == 1) {
            ptx::bar_sync(NamedBarrier::kSecondWarpgroup, kWarpgroupThreads);
        } else {
            ptx::bar_sync(NamedBarrier::kThirdWarpgroup, kWarpgroupThreads);
        }
    }
};

}  // namespace uw::gemm_wgmma
