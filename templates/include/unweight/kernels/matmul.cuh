// Reconstructive matmul (report, section 8): Y[m, n] = X[m, k] * W[n, k]^T from weights that are stored as sign-mantissa bytes and either exponent
// bytes or palette nibbles. BF16 is put together in shared memory, right before the tensor cores read it.
//
// Config: bool kPaletteSource; u32 kNTiles (1..4), kStages (>= 2), kVerbatimRows (0..64, palette source only); bool kStoreAdd.
// Launch: kThreads = 384 threads, 1 CTA per SM, grid = min(tasks, SMs), Smem<Config>::kBytes of dynamic shared memory.
//         tasks = ceil(m / 128) * n / (64 * kNTiles); n is a multiple of 64 * kNTiles, k of 64, m is any.
//
// Tile: 128 rows of X (two warpgroups of 64) by 64 * kNTiles rows of W, 64 of k per step. Tasks run through m first, so CTAs that work side by side
// share their weights in L2. With m <= 64 (or in a last half-empty tile) the second warpgroup reconstructs but issues no wgmma, and no X is loaded for it.
//
// Roles
//   warp 0          sources of W: per step and n tile one 64x64 box of sign-mantissa (TMA), one bulk copy of 4096 B of exponents or 2048 B of nibbles;
//                   palette: TileMetadata, read 32 / kNTiles steps at a time one batch ahead, and exactly the tile's verbatim rows
//   warp 1          X: one 64x64 box per active warpgroup and step (128-byte swizzle)
//   warps 2, 3      idle (a warpgroup is the unit of setmaxnreg)
//   warps 4..11     reconstruct: warp w owns rows 8w..8w+7 of every 64-row tile, a lane 16 weights; then wgmma m64 n(64*kNTiles) k16, 4 per step
// Registers: launch 384 x 168 = 64512 = 128 x 40 (producer) + 256 x 232 (consumers).
//
// One step t of a consumer, with up to two wgmma groups in flight:
//   join(t) -> B[t%3] | release sources(t) | load sources(t+1) into registers | proxy fence | wait wgmma(t-2) | barrier | release X(t-2) | wgmma(t) on X(t), B[t%3]
// Three B buffers, because join(t+1) starts while wgmma(t) is queued behind wgmma(t-1): with two, the tensor cores would fall idle at each barrier.
//
// Barriers
//   source full   [kStages]    1 arrival (warp 0) + bytes          source empty   [kStages]    8 arrivals: one per consumer warp, once its lanes have joined
//   x full        [kXStages]   1 arrival (warp 1) + bytes          x empty        [kXStages]   1 arrival: consumer thread 0, after the barrier behind wgmma(t)
//   named kConsumers (256)     B[t%3] written by all, wgmma(t-2) over for all; twice more per task around the use of B as staging for the output
//   X has a ring of its own, one slot deeper than the sources: the tensor cores hold X two steps longer than the sources are held.
//
// Shared memory = kXStages * 16384 + 3 * kNTiles * 8192 (B) + kStages * kNTiles * (4096 + 4096 | 2048 + kVerbatimRows * 64 + (kVerbatimRows ? 8 : 0))
//               + 16 * (kStages + kXStages), kXStages = kStages + 1. Every Table 5 variant fits 232448 B at every verbatim budget.
// Global reads per step: kNTiles * (8192 | 6144 + 16 + 64 per verbatim row) + 8192 per active warpgroup (L2 after the first).
//
// Instructions of the step loop per consumer thread, from the SASS (CUDA 13.0.88, sm_90a, store, no verbatim rows; a thread joins 16 * kNTiles weights):
//                    kNTiles = 1     2     4     per tile                                   fixed
//   exponent                 111   139   195     28 = 24 to join + 2 LDS.128 + 2 STS.128    83 (waits, barrier, descriptors, 4 HGMMA)
//   palette                  131   177   269     46 = 42 to join + 2 loads + 2 STS.128      85
//   A verbatim budget adds 4 per tile, and about 50 for a warp whose 8 rows hold a verbatim one. No spills; the producer needs 25 registers.
// Bound, predicted and not yet measured. Shared memory at 128 B per cycle: a step with both warpgroups active moves 80 KB (kNTiles = 4) for wgmma and
// 96 (palette) .. 112 KB (exponents) for copies and joining: 1375 .. 1500 cycles against 1024 of tensor core and 540 .. 700 of integer pipe. With one
// active warpgroup and kNTiles = 2 it is 576 .. 640 cycles, about the time HBM needs for the bytes. The grid has 32 .. 64 CTAs where n = 4096 and
// m <= 128: such shapes want a split along k, which this family does not have.
//
// Sources: report section 8 (roles, sources, variants); ThunderKittens (load-compute-finish). Changed: weights are joined while earlier wgmma run, X has its own
// ring, the palette lookup has no mux (mma/reconstruct.cuh), and tiles are ordered for reuse of W.
#pragma once

#include "unweight/epilogue/store.cuh"
#include "unweight/mma/descriptor.cuh"
#include "unweight/mma/reconstruct.cuh"
#include "unweight/pipeline/lcf.cuh"
#include "unweight/pipeline/ring.cuh"
#include "unweight/ptx/bulk.cuh"
#include "unweight/ptx/wgmma.cuh"
#include "unweight/smem/tile.cuh"

namespace uw::matmul {

constexpr u32 kThreads = 384;
constexpr u32 kMinBlocksPerSm = 1;
constexpr u32 kTile = 64;             // rows and columns of a stored tile; the k step
constexpr u32 kConsumerWarpgroups = 2;
constexpr u32 kConsumerThreads = kConsumerWarpgroups * 128;
constexpr u32 kConsumerWarps = kConsumerThreads / 32;
constexpr u32 kTaskRows = kTile * kConsumerWarpgroups;
constexpr u32 kBBuffers = 3;

enum NamedBarrier : u32 {
    kConsumers = 1,  // 0 is sync_block
};

// Offsets of the sections in dynamic shared memory, and their sum.
template <class Config>
struct Smem {
    static constexpr u32 kXStages = Config::kStages + 1;
    static constexpr u32 kXTileBytes = kTile * kTile * 2;
    static constexpr u32 kXSlotBytes = kXTileBytes * kConsumerWarpgroups;
    static constexpr u32 kBBytes = Config::kNTiles * kTile * kTile * 2;
    static constexpr u32 kSignTileBytes = kTile * kTile;
    static constexpr u32 kSignSlotBytes = Config::kNTiles * kSignTileBytes;
    static constexpr u32 kExponentTileBytes = Config::kPaletteSource ? kTile * kTile / 2 : kTile * kTile;
    static constexpr u32 kExponentSlotBytes = Config::kNTiles * kExponentTileBytes;
    static constexpr bool kHasVerbatim = Config::kPaletteSource && Config::kVerbatimRows > 0;
    static constexpr u32 kVerbatimTileBytes = kHasVerbatim ? Config::kVerbatimRows * kTile : 0;
    static constexpr u32 kVerbatimSlotBytes = Config::kNTiles * kVerbatimTileBytes;
    static constexpr u32 kMaskSlotBytes = kHasVerbatim ? Config::kNTiles * 8 : 0;

    static constexpr u32 kX = 0;
    static constexpr u32 kB = kX + kXStages * kXSlotBytes;
    static constexpr u32 kSign = kB + kBBuffers * kBBytes;
    static constexpr u32 kExponent = kSign + Config::kStages * kSignSlotBytes;
    static constexpr u32 kVerbatim = kExponent + Config::kStages * kExponentSlotBytes;
    static constexpr u32 kMask = kVerbatim + Config::kStages * kVerbatimSlotBytes;
    static constexpr u32 kSourceBarriers = kMask + Config::kStages * kMaskSlotBytes;
    static constexpr u32 kXBarriers = kSourceBarriers + pipeline::Ring<Config::kStages>::kBarrierBytes;
    static constexpr u32 kBytes = kXBarriers + pipeline::Ring<kXStages>::kBarrierBytes;

    static_assert(kB % smem::kSwizzlePeriodBytes == 0 && kXSlotBytes % smem::kSwizzlePeriodBytes == 0, "swizzled tiles are 1024-byte aligned");
    static_assert(kConsumerWarps * epilogue::kStagingBytes<Config::kNTiles * kTile> <= kBBuffers * kBBytes, "the output is staged in B");
};

template <class Config>
struct Kernel {
    using Args = MatmulArgs;
    using S = Smem<Config>;
    static constexpr u32 kProducerRegisters = 40;
    static constexpr u32 kConsumerRegisters = 232;
    static constexpr u32 kNTiles = Config::kNTiles;
    static constexpr u32 kTaskColumns = kNTiles * kTile;
    static constexpr u32 kAccumulators = kTaskColumns / 2;
    static constexpr u32 kMetadataBatch = 32 / kNTiles;  // steps whose metadata one load of a warp brings
    static_assert(Config::kStages >= 2, "one stage is read while another is filled");
    static_assert(kNTiles >= 1 && kNTiles <= 4, "wgmma takes up to 256 columns");
    static_assert(Config::kVerbatimRows <= kTile, "a tile has 64 rows");

    const Args& args;
    const u32 shared;
    const pipeline::Ring<Config::kStages> sources;
    const pipeline::Ring<S::kXStages> activations;
    pipeline::Cursor<Config::kStages> source_cursor;
    pipeline::Cursor<S::kXStages> x_cursor;

    // Consumers only.
    float accumulators[kAccumulators];
    u32 b_buffer = 0;

    UW_DEVICE Kernel(const Args& a, u32 shared_address)
        : args(a), shared(shared_address), sources{shared_address + S::kSourceBarriers}, activations{shared_address + S::kXBarriers} {}

    UW_DEVICE void setup() const {
        sources.init(1, kConsumerWarps);
        activations.init(1, 1);
        ptx::prefetch_tensor_map(args.x);
        ptx::prefetch_tensor_map(args.sign_mantissa);
    }

    UW_DEVICE u32 m_tasks() const { return (args.m + kTaskRows - 1) / kTaskRows; }
    UW_DEVICE u32 tasks() const { return m_tasks() * (args.n / kTaskColumns); }
    UW_DEVICE u32 steps() const { return args.tile_cols; }
    UW_DEVICE u32 first_row(u32 task) const { return task % m_tasks() * kTaskRows; }
    UW_DEVICE u32 first_column(u32 task) const { return task / m_tasks() * kTaskColumns; }

    // ---- load ------------------------------------------------------------------------------------------------------
    UW_DEVICE void load(u32 task, u32 warp) {
        if (warp == 0) load_sources(first_column(task));
        if (warp == 1) load_activations(first_row(task));
    }

    UW_DEVICE void load_activations(u32 row) {
        const bool leader = ptx::elect_one();
        const u64 policy = ptx::l2_policy(L2::kEvictLast);
        const bool both = row + kTile < args.m;
        const u32 bytes = both ? 2 * S::kXTileBytes : S::kXTileBytes;
        for (u32 step = 0; step < steps(); ++step) {
            activations.wait_empty(x_cursor);
            if (leader) {
                const u32 barrier = activations.full(x_cursor.slot);
                const u32 slot = shared + S::kX + x_cursor.slot * S::kXSlotBytes;
                ptx::mbarrier_arrive_expect_tx(barrier, bytes);
                ptx::tensor_load_2d(slot, args.x, step * kTile, row, barrier, policy);
                if (both) ptx::tensor_load_2d(slot + S::kXTileBytes, args.x, step * kTile, row + kTile, barrier, policy);
            }
            ptx::sync_warp();
            x_cursor.advance();
        }
    }

    // The part of a TileMetadata that the matmul needs.
    struct Verbatim {
        u32 offset, low, high;
    };

    // Lane j * kMetadataBatch + i holds the metadata of n tile j at step `step + i`; other lanes, and steps past the end, hold none.
    UW_DEVICE Verbatim load_metadata(u32 tile_row, u32 step, u32 lane) const {
        Verbatim v{0, 0, 0};
        const u32 j = lane / kMetadataBatch, i = lane % kMetadataBatch;
        if (j < kNTiles && step + i < steps()) {
            const U32x4 word = ptx::load_global_nc_x4(args.tile_metadata + (u64(tile_row + j) * args.tile_cols + step + i));
            v = {word.y, word.z, word.w};
        }
        return v;
    }

    UW_DEVICE void load_sources(u32 column) {
        const u32 lane = ptx::lane_index();
        const bool leader = ptx::elect_one();
        // Weights that no other task reads should not push out what others do.
        const u64 policy = ptx::l2_policy(m_tasks() == 1 ? L2::kEvictFirst : L2::kNormal);
        const u32 tile_row = column / kTile;
        [[maybe_unused]] Verbatim now{0, 0, 0}, next{0, 0, 0};
        if constexpr (S::kHasVerbatim) next = load_metadata(tile_row, 0, lane);
        [[maybe_unused]] u32 in_batch = kMetadataBatch;
        for (u32 step = 0; step < steps(); ++step) {
            sources.wait_empty(source_cursor);
            const u32 slot = source_cursor.slot;
            const u32 barrier = sources.full(slot);
            if (leader) {
                // The phase cannot end before the arrival below.
                ptx::mbarrier_expect_tx(barrier, S::kSignSlotBytes + S::kExponentSlotBytes);
                const u32 sign = shared + S::kSign + slot * S::kSignSlotBytes;
                const u32 exponent = shared + S::kExponent + slot * S::kExponentSlotBytes;
#pragma unroll
                for (u32 j = 0; j < kNTiles; ++j) {
                    ptx::tensor_load_2d(sign + j * S::kSignTileBytes, args.sign_mantissa, step * kTile, column + j * kTile, barrier, policy);
                    const u64 tile = u64(tile_row + j) * args.tile_cols + step;
                    ptx::bulk_load(exponent + j * S::kExponentTileBytes, args.exponents + tile * S::kExponentTileBytes,
                                   S::kExponentTileBytes, barrier, policy);
                }
            }
            ptx::sync_warp();
            if constexpr (S::kHasVerbatim) {
                if (in_batch == kMetadataBatch) {
                    in_batch = 0;
                    now = next;
                    next = load_metadata(tile_row, step + kMetadataBatch, lane);
                }
                if (lane % kMetadataBatch == in_batch && lane / kMetadataBatch < kNTiles) load_verbatim(now, lane / kMetadataBatch, slot);
                ++in_batch;
                ptx::sync_warp();
            }
            if (leader) ptx::mbarrier_arrive(barrier);
            source_cursor.advance();
        }
    }

    // One lane: the mask and the rows of n tile j. Neither buffer nor store is overrun, whatever the metadata says.
    UW_DEVICE void load_verbatim(const Verbatim& v, u32 j, u32 slot) const {
        const u32 mask = shared + S::kMask + slot * S::kMaskSlotBytes + j * 8;
        ptx::store_shared_x2(mask, {v.low, v.high});
        u32 rows = ptx::popcount(v.low) + ptx::popcount(v.high);
        if (rows == 0) return;
        rows = rows < Config::kVerbatimRows ? rows : Config::kVerbatimRows;
        const u32 stored = v.offset < args.verbatim_rows ? args.verbatim_rows - v.offset : 0;
        rows = rows < stored ? rows : stored;
        if (rows == 0) return;
        const u32 barrier = sources.full(slot);
        ptx::mbarrier_expect_tx(barrier, rows * kTile);
        ptx::bulk_load(shared + S::kVerbatim + slot * S::kVerbatimSlotBytes + j * S::kVerbatimTileBytes,
                       args.verbatim_exponents + u64(v.offset) * kTile, rows * kTile, barrier);
    }

    // ---- compute ---------------------------------------------------------------------------------------------------
    // What a lane joins in one step: 16 weights of each n tile.
    struct Staged {
        U32x4 sign_mantissa[kNTiles];
        U32x4 exponents[Config::kPaletteSource ? 1 : kNTiles];
        U32x2 indices[Config::kPaletteSource ? kNTiles : 1];
        u32 verbatim[S::kHasVerbatim ? kNTiles : 1];  // bit r: row 8 * warp + r of the tile is verbatim
    };

    struct Place {
        u32 thread, warp, lane, warpgroup;
        u32 b_first, b_second;  // where the lane's two chunks go in a tile of B

        UW_DEVICE Place() {
            const u32 consumer_warp = ptx::uniform_warp_index() - pipeline::kWarpgroupWarps;
            lane = ptx::lane_index();
            warp = consumer_warp;
            thread = consumer_warp * 32 + lane;
            warpgroup = consumer_warp / pipeline::kWarpgroupWarps;
            // Lane l joins bytes 16*(l%4).. of row 8*warp + l/4: eight lanes store to two rows of opposite swizzle parity, so no banks collide.
            b_first = smem::Bf16Tile<kTile>::offset(warp * 8 + lane / 4, lane % 4 * 2);
            b_second = smem::Bf16Tile<kTile>::offset(warp * 8 + lane / 4, lane % 4 * 2 + 1);
        }
    };

    UW_DEVICE void fetch(Staged& s, const Place& p) const {
        sources.wait_full(source_cursor);
        const u32 slot = source_cursor.slot;
        const u32 sign = shared + S::kSign + slot * S::kSignSlotBytes + p.thread * 16;
        const u32 exponent = shared + S::kExponent + slot * S::kExponentSlotBytes + p.thread * (S::kExponentTileBytes / kConsumerThreads);
#pragma unroll
        for (u32 j = 0; j < kNTiles; ++j) {
            s.sign_mantissa[j] = ptx::load_shared_x4(sign + j * S::kSignTileBytes);
            if constexpr (Config::kPaletteSource) {
                s.indices[j] = ptx::load_shared_x2(exponent + j * S::kExponentTileBytes);
            } else {
                s.exponents[j] = ptx::load_shared_x4(exponent + j * S::kExponentTileBytes);
            }
            if constexpr (S::kHasVerbatim) s.verbatim[j] = ptx::load_shared_u8(shared + S::kMask + slot * S::kMaskSlotBytes + j * 8 + p.warp);
        }
    }

    UW_DEVICE void put(u32 tile, const Place& p, const mma::Bf16x16& w) const {
        ptx::store_shared_x4(tile + p.b_first, w.low);
        ptx::store_shared_x4(tile + p.b_second, w.high);
    }

    // Rewrites this lane's chunk if its row is verbatim. Rare: one 64-element row in two hundred.
    UW_DEVICE void patch_verbatim(const Staged& s, u32 j, u32 tile, const Place& p) const {
        if ((s.verbatim[j] >> (p.lane / 4) & 1) == 0) return;
        const u32 slot = source_cursor.slot;
        const U32x2 mask = ptx::load_shared_x2(shared + S::kMask + slot * S::kMaskSlotBytes + j * 8);
        const u32 row = p.warp * 8 + p.lane / 4;
        const u32 below = (1u << (row % 32)) - 1;
        const u32 index = row < 32 ? ptx::popcount(mask.x & below) : ptx::popcount(mask.x) + ptx::popcount(mask.y & below);
        if (index >= Config::kVerbatimRows) return;
        const u32 exponents = shared + S::kVerbatim + slot * S::kVerbatimSlotBytes + j * S::kVerbatimTileBytes + index * kTile + p.lane % 4 * 16;
        put(tile, p, mma::join_exponents(s.sign_mantissa[j], ptx::load_shared_x4(exponents)));
    }

    UW_DEVICE void join(const Staged& s, const mma::PaletteTable& palette, u32 b, const Place& p) const {
#pragma unroll
        for (u32 j = 0; j < kNTiles; ++j) {
            const u32 tile = b + j * (S::kBBytes / kNTiles);
            if constexpr (Config::kPaletteSource) {
                put(tile, p, palette.join(s.sign_mantissa[j], s.indices[j]));
                if constexpr (S::kHasVerbatim) {
                    if (s.verbatim[j] != 0) patch_verbatim(s, j, tile, p);
                }
            } else {
                put(tile, p, mma::join_exponents(s.sign_mantissa[j], s.exponents[j]));
            }
        }
    }

    UW_DEVICE u32 b_address() const { return shared + S::kB + b_buffer * S::kBBytes; }

    // kActive: whether this warpgroup has rows of X in the task. Two bodies instead of a branch around wgmma, which would cost a serialised pipeline.
    template <bool kActive>
    UW_DEVICE void compute_steps(const Place& p) {
        const mma::PaletteTable palette(Config::kPaletteSource ? ptx::load_global_nc_x4(args.palette) : U32x4{0, 0, 0, 0});
        const u32 last_steps = steps();
        u32 released = x_cursor.slot;
        Staged staged;
        fetch(staged, p);
        for (u32 step = 0; step < last_steps; ++step) {
            const u32 b = b_address();
            join(staged, palette, b, p);
            ptx::sync_warp();
            if (p.lane == 0) sources.release(source_cursor.slot);
            source_cursor.advance();
            // Before the fence, which waits for every outstanding access of the thread: loads and stores then drain together.
            if (step + 1 < last_steps) fetch(staged, p);
            ptx::fence_proxy_async_shared();
            if constexpr (kActive) ptx::wgmma_wait_group<1>();
            ptx::named_barrier_sync(kConsumers, kConsumerThreads);
            if (step >= 2) {
                if (p.thread == 0) activations.release(released);
                released = released + 1 == S::kXStages ? 0 : released + 1;
            }
            if constexpr (kActive) {
                activations.wait_full(x_cursor);
                const u32 x = shared + S::kX + x_cursor.slot * S::kXSlotBytes + p.warpgroup * S::kXTileBytes;
                const u64 a_descriptor = mma::k_major_descriptor(x), b_descriptor = mma::k_major_descriptor(b);
                ptx::wgmma_fence();
#pragma unroll
                for (u32 k16 = 0; k16 < kTile / 16; ++k16) {
                    ptx::wgmma(accumulators, a_descriptor + k16 * mma::kDescriptorStepK16, b_descriptor + k16 * mma::kDescriptorStepK16);
                }
                ptx::wgmma_commit_group();
            }
            x_cursor.advance();
            b_buffer = b_buffer + 1 == kBBuffers ? 0 : b_buffer + 1;
        }
        if constexpr (kActive) ptx::wgmma_wait_group<0>();
        ptx::named_barrier_sync(kConsumers, kConsumerThreads);
        if (p.thread == 0) {
            for (u32 left = last_steps < 2 ? last_steps : 2; left > 0; --left) {
                activations.release(released);
                released = released + 1 == S::kXStages ? 0 : released + 1;
            }
        }
    }

    UW_DEVICE void compute(u32 task) {
        const Place p;
#pragma unroll
        for (u32 i = 0; i < kAccumulators; ++i) accumulators[i] = 0.0f;
        if (first_row(task) + p.warpgroup * kTile < args.m) {
            compute_steps<true>(p);
        } else {
            compute_steps<false>(p);
        }
    }

    // ---- finish ----------------------------------------------------------------------------------------------------
    UW_DEVICE void finish(u32 task) {
        const Place p;
        const u32 row = first_row(task) + p.warp * 16;
        const u32 left = row < args.m ? args.m - row : 0;
        u16* y = static_cast<u16*>(args.y) + u64(row) * args.n + first_column(task);
        epilogue::store_rows<Config::kStoreAdd>(accumulators, y, args.n, left < 16 ? left : 16,
                                                shared + S::kB + p.warp * epilogue::kStagingBytes<kTaskColumns>);
        // The next task's weights go where the output was staged.
        ptx::named_barrier_sync(kConsumers, kConsumerThreads);
    }
};

template <class Config>
UW_DEVICE void run(const MatmulArgs& args) {
    pipeline::run<Kernel<Config>>(args);
}

}  // namespace uw::matmul
