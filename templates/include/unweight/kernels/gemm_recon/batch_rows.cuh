// Reconstructive GEMM with the batch on the rows of wgmma; see unweight/kernels/gemm_recon.cuh.
#pragma once

#include "unweight/epilogue/store.cuh"
#include "unweight/kernels/gemm_recon/sources.cuh"

namespace uw::gemm_recon::batch_rows {

constexpr u32 kTaskRows = kTile * kConsumerWarpgroups;

enum class NamedBarrier : u32 {
    kConsumers = 1,
};

// Offsets of the sections in dynamic shared memory, and their total.
template <class Config>
struct Smem : SourceSizes<Config> {
    using Sizes = SourceSizes<Config>;
    static constexpr u32 kXStages = Config::kStages + 1;
    static constexpr u32 kXTileBytes = kTile * kTile * 2;
    static constexpr u32 kXSlotBytes = kXTileBytes * kConsumerWarpgroups;

    static constexpr u32 kX = 0;
    static constexpr u32 kB = kX + kXStages * kXSlotBytes;
    static constexpr u32 kSign = kB + kBBuffers * Sizes::kBBytes;
    static constexpr u32 kExponent = kSign + Config::kStages * Sizes::kSignSlotBytes;
    static constexpr u32 kVerbatim = kExponent + Config::kStages * Sizes::kExponentSlotBytes;
    static constexpr u32 kMask = kVerbatim + Config::kStages * Sizes::kVerbatimSlotBytes;
    static constexpr u32 kSourceBarriers = kMask + Config::kStages * Sizes::kMaskSlotBytes;
    static constexpr u32 kXBarriers = kSourceBarriers + pipeline::Ring<Config::kStages>::kBarrierBytes;
    static constexpr u32 kBytes = kXBarriers + pipeline::Ring<kXStages>::kBarrierBytes;

    static_assert(kB % smem::kSwizzlePeriodBytes == 0 && kXSlotBytes % smem::kSwizzlePeriodBytes == 0,
                  "swizzled tiles are 1024-byte aligned");
    static_assert(kConsumerWarps * epilogue::kStagingBytes<Config::kNTiles * kTile> <= kBBuffers * Sizes::kBBytes,
                  "the output is staged in B");
};

template <class Config, u32 kSplits = 1>
struct Kernel : SourceRing<Config, Smem<Config>, kSplits> {
    using Args = GemmReconArgs;
    using S = Smem<Config>;
    using Base = SourceRing<Config, S, kSplits>;
    static constexpr u32 kProducerRegisters = 40;
    static constexpr u32 kConsumerRegisters = 232;
    static constexpr u32 kAccumulators = Base::kTaskColumns / 2;
    static constexpr u32 kPieceSums = kAccumulators / kSplits;  // per thread: sums that one block of a cluster reduces
    static constexpr u32 kPieceColumns = Base::kTaskColumns / kSplits;
    static constexpr u32 kVectorBytes = kConsumerThreads * 16;  // four sums per thread
    static_assert(kSplits == 1 || kPieceColumns % 16 == 0, "the output is stored in groups of 16 columns");
    static_assert((kSplits - 1) * (kPieceSums / 4) * kVectorBytes <= S::kB, "what a cluster exchanges overlays X");
    using Base::args, Base::shared, Base::rank, Base::sources, Base::source_cursor, Base::kNTiles, Base::kTaskColumns,
        Base::steps, Base::rotated;

    const pipeline::Ring<S::kXStages> activations;
    pipeline::Cursor<S::kXStages> x_cursor;

    // Consumers only.
    float accumulators[kAccumulators];
    u32 b_buffer = 0;

    UW_DEVICE Kernel(const Args& a, u32 shared_address)
        : Base(a, shared_address), activations{shared_address + S::kXBarriers} {}

    UW_DEVICE void setup() const {
        Base::setup_sources();
        activations.init(1, 1);
    }

    UW_DEVICE u32 m_tasks() const { return (args.m + kTaskRows - 1) / kTaskRows; }
    UW_DEVICE u32 tasks() const { return m_tasks() * (args.n / kTaskColumns); }
    UW_DEVICE u32 first_row(u32 task) const { return task % m_tasks() * kTaskRows; }
    UW_DEVICE u32 first_column(u32 task) const { return task / m_tasks() * kTaskColumns; }

    // ---- load ------------------------------------------------------------------------------------------------------
    UW_DEVICE void load(u32 task, u32 warp) {
        if (warp == 0) Base::load_sources(first_column(task), m_tasks() == 1);
        if (warp == 1) load_activations(first_row(task), first_column(task));
        if constexpr (kSplits > 1) {
            // Matches the consumers' cluster barriers. After the second one X is free: its sums have been read.
            ptx::bar_warp_sync();  // reconverges the warp for the cluster barrier
            sync_cluster();
            sync_cluster();
        }
    }

    UW_DEVICE void load_activations(u32 row, u32 column) {
        const bool leader = ptx::elect_sync();
        const u64 policy = ptx::createpolicy_l2(L2::kEvictLast);
        const bool both = row + kTile < args.m;
        const u32 bytes = both ? 2 * S::kXTileBytes : S::kXTileBytes;
        for (u32 step = 0; step < steps(); ++step) {
            activations.wait_empty(x_cursor);
            if (leader) {
                const u32 barrier = activations.full(x_cursor.slot);
                const u32 slot = shared + S::kX + x_cursor.slot * S::kXSlotBytes;
                ptx::mbarrier_arrive_expect_tx(barrier, bytes);
                ptx::tma_load_2d(slot, args.x, rotated(step, column) * kTile, row, barrier, policy);
                if (both)
                    ptx::tma_load_2d(slot + S::kXTileBytes, args.x, rotated(step, column) * kTile, row + kTile, barrier,
                                     policy);
            }
            ptx::bar_warp_sync();  // reconverges the warp; the slot's mbarriers order shared memory
            x_cursor.advance();
        }
    }

    // ---- compute ---------------------------------------------------------------------------------------------------
    // What a lane joins in one step: 16 weights of each of kNTiles tiles.
    struct Staged {
        U32x4 sign_mantissa[kNTiles];
        U32x4 exponents[kPaletteSource<Config> ? 1 : kNTiles];
        U32x2 indices[kPaletteSource<Config> ? kNTiles : 1];
        u32 verbatim[S::kHasVerbatim ? kNTiles : 1];  // bit r: row 8 * warp + r of the tile is verbatim
    };

    struct Place {
        u32 thread, warp, lane, warpgroup;
        u32 b_first, b_second;  // offsets of the lane's two chunks in a tile of B

        UW_DEVICE Place() {
            const u32 consumer_warp = ptx::uniform_warp_index() - pipeline::kWarpgroupWarps;
            lane = ptx::laneid();
            warp = consumer_warp;
            thread = consumer_warp * 32 + lane;
            warpgroup = consumer_warp / pipeline::kWarpgroupWarps;
            // Lane l joins bytes 16*(l%4).. of row 8*warp + l/4: eight lanes store to two rows of opposite swizzle
            // parity, so no banks collide.
            b_first = smem::Bf16Tile<kTile>::offset(warp * 8 + lane / 4, lane % 4 * 2);
            b_second = smem::Bf16Tile<kTile>::offset(warp * 8 + lane / 4, lane % 4 * 2 + 1);
        }
    };

    UW_DEVICE void fetch(Staged& s, const Place& p) const {
        sources.wait_full(source_cursor);
        const u32 slot = source_cursor.slot;
        const u32 sign = shared + S::kSign + slot * S::kSignSlotBytes + p.thread * 16;
        const u32 exponent = shared + S::kExponent + slot * S::kExponentSlotBytes +
                             p.thread * (S::kExponentTileBytes / kConsumerThreads);
#pragma unroll
        for (u32 j = 0; j < kNTiles; ++j) {
            s.sign_mantissa[j] = ptx::ld_shared_x4(sign + j * S::kSignTileBytes);
            if constexpr (kPaletteSource<Config>) {
                s.indices[j] = ptx::ld_shared_x2(exponent + j * S::kExponentTileBytes);
            } else {
                s.exponents[j] = ptx::ld_shared_x4(exponent + j * S::kExponentTileBytes);
            }
            if constexpr (S::kHasVerbatim)
                s.verbatim[j] = ptx::ld_shared_u8(shared + S::kMask + slot * S::kMaskSlotBytes + j * 8 + p.warp);
        }
    }

    UW_DEVICE void put(u32 tile, const Place& p, const mma::Bf16x16& w) const {
        ptx::st_shared_x4(tile + p.b_first, w.low);
        ptx::st_shared_x4(tile + p.b_second, w.high);
    }

    // Rewrites this lane's chunk if its row is verbatim. Rare: one 64-element row in two hundred.
    UW_DEVICE void patch_verbatim(const Staged& s, u32 j, u32 tile, const Place& p) const {
        if ((s.verbatim[j] >> (p.lane / 4) & 1) == 0) return;
        const u32 slot = source_cursor.slot;
        const U32x2 mask = ptx::ld_shared_x2(shared + S::kMask + slot * S::kMaskSlotBytes + j * 8);
        const u32 row = p.warp * 8 + p.lane / 4;
        const u32 index = Base::verbatim_index(mask, row);
        if (index >= Config::kVerbatimRows) return;
        const u32 exponents = shared + S::kVerbatim + slot * S::kVerbatimSlotBytes + j * S::kVerbatimTileBytes +
                              index * kTile + p.lane % 4 * 16;
        put(tile, p, mma::join_exponents(s.sign_mantissa[j], ptx::ld_shared_x4(exponents)));
    }

    UW_DEVICE void join(const Staged& s, const mma::PaletteTable& palette, u32 b, const Place& p) const {
#pragma unroll
        for (u32 j = 0; j < kNTiles; ++j) {
            const u32 tile = b + j * (S::kBBytes / kNTiles);
            if constexpr (kPaletteSource<Config>) {
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

    // kActive: whether this warpgroup has rows of X in the task. Two instantiations instead of a branch around wgmma,
    // which would make the compiler serialize it.
    template <bool kActive>
    UW_DEVICE void compute_steps(const Place& p) {
        const mma::PaletteTable palette(kPaletteSource<Config> ? ptx::ld_global_nc_x4(args.palette)
                                                               : U32x4{0, 0, 0, 0});
        const u32 last_steps = steps();
        u32 released = x_cursor.slot;
        Staged staged;
        fetch(staged, p);
        for (u32 step = 0; step < last_steps; ++step) {
            const u32 b = b_address();
            join(staged, palette, b, p);
            ptx::bar_warp_sync();  // orders the lanes' loads of the slot before the arrival that releases it
            if (p.lane == 0) sources.release(source_cursor.slot);
            source_cursor.advance();
            // Before the fence, which waits for every outstanding access of the thread: loads and stores then drain
            // together.
            if (step + 1 < last_steps) fetch(staged, p);
            ptx::fence_proxy_async_shared();
            if constexpr (kActive) ptx::wgmma_wait_group<1>();
            // Orders the fenced stores to B before the wgmma that reads them.
            ptx::bar_sync(NamedBarrier::kConsumers, kConsumerThreads);
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
                    ptx::wgmma(accumulators, a_descriptor + k16 * mma::kDescriptorStepK16,
                               b_descriptor + k16 * mma::kDescriptorStepK16);
                }
                ptx::wgmma_commit_group();
            }
            x_cursor.advance();
            b_buffer = b_buffer + 1 == kBBuffers ? 0 : b_buffer + 1;
        }
        if constexpr (kActive) ptx::wgmma_wait_group<0>();
        // Orders every warpgroup's wgmma before the release of X.
        ptx::bar_sync(NamedBarrier::kConsumers, kConsumerThreads);
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

    // ---- partial sums -----------------------------------------------------------------------------------------------
    UW_DEVICE static void sync_cluster() {
        ptx::barrier_cluster_arrive();
        ptx::barrier_cluster_wait();
    }

    // Block r of a cluster reduces and stores columns r * kPieceColumns.. of the task, that is, registers r *
    // kPieceSums.. of every thread. It writes the peers' pieces over X, [peers in order][4 sums][thread] fp32, and adds
    // the peers' sums to its own piece in order of rank: bit-identical in every run. Warps without rows take part only
    // in the barriers. Ends with the arrival at the second cluster barrier, which signals that all sums have been read.
    UW_DEVICE void exchange(float (&own)[kPieceSums], bool has_rows, const Place& p) {
        constexpr u32 kVectors = kPieceSums / 4, kPeers = kSplits - 1;
        const u32 sums = shared + S::kX + p.thread * 16;
        // Keeps the reads below in place: ptxas serializes all wgmma if one moves between them (C7514).
#pragma unroll
        for (u32 i = 0; i < kAccumulators; ++i) ptx::pin(accumulators[i]);
#pragma unroll
        for (u32 piece = 0; piece < kSplits; ++piece) {
            const float* d = accumulators + piece * kPieceSums;
            if (piece == rank) {
#pragma unroll
                for (u32 i = 0; i < kPieceSums; ++i) own[i] = d[i];
            } else if (has_rows) {
                // X is free: in the barrier after the last step, both warpgroups' wgmma have read it.
#pragma unroll
                for (u32 i = 0; i < kVectors; ++i) {
                    ptx::st_shared_x4(sums + ((piece - (piece > rank)) * kVectors + i) * kVectorBytes,
                                      {ptx::bits_from_float(d[4 * i]), ptx::bits_from_float(d[4 * i + 1]),
                                       ptx::bits_from_float(d[4 * i + 2]), ptx::bits_from_float(d[4 * i + 3])});
                }
            }
        }
        // Reconverges the warp for the cluster barrier, which orders the sums of all blocks before their loads.
        ptx::bar_warp_sync();
        sync_cluster();
        if (has_rows) {
            U32x4 v[kPeers][kVectors];
#pragma unroll
            for (u32 j = 0; j < kPeers; ++j) {
                const u32 peer = j + (j >= rank);
                const u32 from = ptx::mapa(sums + (rank - (rank > peer)) * kVectors * kVectorBytes, peer);
#pragma unroll
                for (u32 i = 0; i < kVectors; ++i) v[j][i] = ptx::ld_shared_cluster_x4(from + i * kVectorBytes);
            }
#pragma unroll
            for (u32 j = 0; j < kPeers; ++j) {
#pragma unroll
                for (u32 i = 0; i < kVectors; ++i) {
                    own[4 * i + 0] += ptx::float_from_bits(v[j][i].x);
                    own[4 * i + 1] += ptx::float_from_bits(v[j][i].y);
                    own[4 * i + 2] += ptx::float_from_bits(v[j][i].z);
                    own[4 * i + 3] += ptx::float_from_bits(v[j][i].w);
                }
            }
        }
        // After the second cluster barrier, warp 1 refills X by TMA, here and in the blocks that were read.
        ptx::fence_proxy_async();
        ptx::bar_warp_sync();  // reconverges the warp for the cluster barrier, which orders the fenced loads
        ptx::barrier_cluster_arrive();
    }

    // ---- finish ----------------------------------------------------------------------------------------------------
    UW_DEVICE void finish(u32 task) {
        const Place p;
        const u32 row = first_row(task) + p.warp * 16;
        const u32 left = row < args.m ? args.m - row : 0;
        u16* y = static_cast<u16*>(args.y) + u64(row) * args.n + first_column(task);
        if constexpr (kSplits == 1) {
            epilogue::store_rows<kStoreAdd<Config>>(accumulators, y, args.n, left < 16 ? left : 16,
                                                    shared + S::kB + p.warp * epilogue::kStagingBytes<kTaskColumns>);
        } else {
            float own[kPieceSums];
            exchange(own, left > 0, p);
            epilogue::store_rows<kStoreAdd<Config>>(own, y + rank * kPieceColumns, args.n, left < 16 ? left : 16,
                                                    shared + S::kB + p.warp * epilogue::kStagingBytes<kPieceColumns>);
            ptx::bar_warp_sync();         // reconverges the warp for the cluster barrier
            ptx::barrier_cluster_wait();  // the second barrier: peers have read this block's sums
        }
        // The next task's weights overwrite the staged output.
        ptx::bar_sync(NamedBarrier::kConsumers, kConsumerThreads);
    }
};

}  // namespace uw::gemm_recon::batch_rows
