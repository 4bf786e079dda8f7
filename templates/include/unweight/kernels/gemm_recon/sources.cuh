// Shared by both shapes of the reconstructive GEMM: the copies of W's sources to their ring, and the order of the k
// steps.
#pragma once

#include "unweight/axes.cuh"
#include "unweight/mma/descriptor.cuh"
#include "unweight/mma/reconstruct.cuh"
#include "unweight/pipeline/lcf.cuh"
#include "unweight/pipeline/ring.cuh"
#include "unweight/ptx/barrier.cuh"
#include "unweight/ptx/bulk.cuh"
#include "unweight/ptx/wgmma.cuh"
#include "unweight/smem/tile.cuh"

namespace uw::gemm_recon {

template <class Config>
constexpr u32 kThreads = 384;

template <class Config>
constexpr bool kPaletteSource = Config::kSource == WeightSource::kPalette;
constexpr u32 kMinBlocksPerSm = 1;
constexpr u32 kTile = 64;  // rows and columns of a stored tile; the k step
constexpr u32 kConsumerWarpgroups = 2;
constexpr u32 kConsumerThreads = kConsumerWarpgroups * 128;
constexpr u32 kConsumerWarps = kConsumerThreads / 32;
constexpr u32 kBBuffers = 3;

// Sizes in shared memory that do not depend on which operand is on the rows of wgmma.
template <class Config>
struct SourceSizes {
    static constexpr u32 kBoxBytes = kTile * kTile * 2;  // 64 rows of X, or one joined tile of W
    static constexpr u32 kBBytes = Config::kNTiles * kBoxBytes;
    static constexpr u32 kSignTileBytes = kTile * kTile;
    static constexpr u32 kSignSlotBytes = Config::kNTiles * kSignTileBytes;
    static constexpr u32 kExponentTileBytes = kPaletteSource<Config> ? kTile * kTile / 2 : kTile * kTile;
    static constexpr u32 kExponentSlotBytes = Config::kNTiles * kExponentTileBytes;
    static constexpr bool kHasVerbatim = kPaletteSource<Config> && Config::kVerbatimRows > 0;
    static constexpr u32 kVerbatimTileBytes = kHasVerbatim ? Config::kVerbatimRows * kTile : 0;
    static constexpr u32 kVerbatimSlotBytes = Config::kNTiles * kVerbatimTileBytes;
    static constexpr u32 kMaskSlotBytes = kHasVerbatim ? Config::kNTiles * 8 : 0;
};

// The k steps of a task that this block computes: a contiguous share, never empty (the host rejects a shorter k).
template <u32 kSplits>
struct Share {
    const u32 rank = ptx::cluster_ctarank();
    UW_DEVICE u32 first(u32 steps) const { return rank * steps / kSplits; }
    UW_DEVICE u32 count(u32 steps) const { return (rank + 1) * steps / kSplits - first(steps); }
};
template <>
struct Share<1> {
    static constexpr u32 rank = 0;
    UW_DEVICE static u32 first(u32) { return 0; }
    UW_DEVICE static u32 count(u32 steps) { return steps; }
};

// Base of both kernels. S: the offsets, derived from SourceSizes. kSplits: blocks of a cluster that share the k steps
// of a task.
template <class Config, class S, u32 kSplits = 1>
struct SourceRing : Share<kSplits> {
    static constexpr u32 kCluster = kSplits;
    static constexpr u32 kNTiles = Config::kNTiles;
    static constexpr u32 kTaskColumns = kNTiles * kTile;
    static constexpr u32 kMetadataBatch = 32 / kNTiles;  // steps whose metadata a warp loads at once
    static_assert(Config::kStages >= 2, "one stage is read while another is filled");
    static_assert(kNTiles >= 1 && kNTiles <= 4, "wgmma takes up to 256 columns");
    static_assert(Config::kVerbatimRows <= kTile, "a tile has 64 rows");

    const GemmReconArgs& args;
    const u32 shared;
    const pipeline::Ring<Config::kStages> sources;
    pipeline::Cursor<Config::kStages> source_cursor;

    UW_DEVICE SourceRing(const GemmReconArgs& a, u32 shared_address)
        : args(a), shared(shared_address), sources{shared_address + S::kSourceBarriers} {}

    UW_DEVICE void setup_sources() const {
        sources.init(1, kConsumerWarps);
        ptx::prefetch_tensormap(args.x);
        ptx::prefetch_tensormap(args.sign_mantissa);
    }

    UW_DEVICE u32 steps() const { return this->count(args.tile_cols); }

    // Adjacent tasks start at different k steps; otherwise they would all read the same lines of X at the same time, at
    // m = 1 a single line. This fixes the order of each sum, which depends only on the column. `step` may be past the
    // end by less than one round.
    UW_DEVICE u32 rotated(u32 step, u32 column) const {
        const u32 s = step + column / kTaskColumns * 5 % steps();
        return this->first(args.tile_cols) + (s >= steps() ? s - steps() : s);
    }

    // The part of a TileMetadata that the kernel needs.
    struct Verbatim {
        u32 offset, low, high;
    };

    // Lane j * kMetadataBatch + i holds the metadata of tile j at step `step + i`; other lanes, and steps past the end,
    // hold none.
    UW_DEVICE Verbatim load_metadata(u32 tile_row, u32 step, u32 lane) const {
        Verbatim v{0, 0, 0};
        const u32 j = lane / kMetadataBatch, i = lane % kMetadataBatch;
        if (j < kNTiles && step + i < steps()) {
            const U32x4 word = ptx::ld_global_nc_x4(
                args.tile_metadata + (u64(tile_row + j) * args.tile_cols + rotated(step + i, tile_row * kTile)));
            v = {word.y, word.z, word.w};
        }
        return v;
    }

    UW_DEVICE void load_sources(u32 column, bool once) {
        const u32 lane = ptx::laneid();
        const bool leader = ptx::elect_sync();
        // Weights that no other task reads should not evict those that others read.
        const u64 policy = ptx::createpolicy_l2(once ? L2::kEvictFirst : L2::kNormal);
        const u32 tile_row = column / kTile;
        [[maybe_unused]] Verbatim now{0, 0, 0}, next{0, 0, 0};
        if constexpr (S::kHasVerbatim) next = load_metadata(tile_row, 0, lane);
        [[maybe_unused]] u32 in_batch = kMetadataBatch;
        for (u32 step = 0; step < steps(); ++step) {
            sources.wait_empty(source_cursor);  // each consumer warp arrives after it has joined its loads
            const u32 slot = source_cursor.slot;
            const u32 barrier = sources.full(slot), k_step = rotated(step, column);
            if (leader) {
                // The phase cannot complete before the arrival below.
                ptx::mbarrier_expect_tx(barrier, S::kSignSlotBytes + S::kExponentSlotBytes);
                const u32 sign = shared + S::kSign + slot * S::kSignSlotBytes;
                const u32 exponent = shared + S::kExponent + slot * S::kExponentSlotBytes;
#pragma unroll
                for (u32 j = 0; j < kNTiles; ++j) {
                    ptx::tma_load_2d(sign + j * S::kSignTileBytes, args.sign_mantissa, k_step * kTile,
                                     column + j * kTile, barrier, policy);
                    const u64 tile = u64(tile_row + j) * args.tile_cols + k_step;
                    ptx::cp_async_bulk_load(exponent + j * S::kExponentTileBytes,
                                            args.exponents + tile * S::kExponentTileBytes, S::kExponentTileBytes,
                                            barrier, policy);
                }
            }
            ptx::bar_warp_sync();  // reconverges the warp; the slot's mbarriers order shared memory
            if constexpr (S::kHasVerbatim) {
                if (in_batch == kMetadataBatch) {
                    in_batch = 0;
                    now = next;
                    next = load_metadata(tile_row, step + kMetadataBatch, lane);
                }
                if (lane % kMetadataBatch == in_batch && lane / kMetadataBatch < kNTiles)
                    load_verbatim(now, lane / kMetadataBatch, slot);
                ++in_batch;
                ptx::bar_warp_sync();  // orders the lanes' stores and expected bytes before the arrival below
            }
            if (leader) ptx::mbarrier_arrive(barrier);
            source_cursor.advance();
        }
    }

    // One lane: loads the mask and rows of tile j. Counts are clamped to the slot and to the section for any metadata.
    UW_DEVICE void load_verbatim(const Verbatim& v, u32 j, u32 slot) const {
        const u32 mask = shared + S::kMask + slot * S::kMaskSlotBytes + j * 8;
        ptx::st_shared_x2(mask, {v.low, v.high});
        u32 rows = ptx::popc(v.low) + ptx::popc(v.high);
        if (rows == 0) return;
        rows = rows < Config::kVerbatimRows ? rows : Config::kVerbatimRows;
        const u32 stored = v.offset < args.verbatim_rows ? args.verbatim_rows - v.offset : 0;
        rows = rows < stored ? rows : stored;
        if (rows == 0) return;
        const u32 barrier = sources.full(slot);
        ptx::mbarrier_expect_tx(barrier, rows * kTile);
        ptx::cp_async_bulk_load(shared + S::kVerbatim + slot * S::kVerbatimSlotBytes + j * S::kVerbatimTileBytes,
                                args.verbatim_exponents + u64(v.offset) * kTile, rows * kTile, barrier);
    }

    // The index of `row` among a tile's verbatim rows; its bit must be set.
    UW_DEVICE static u32 verbatim_index(U32x2 mask, u32 row) {
        const u32 below = (1u << (row % 32)) - 1;
        return row < 32 ? ptx::popc(mask.x & below) : ptx::popc(mask.x) + ptx::popc(mask.y & below);
    }
};

}  // namespace uw::gemm_recon
