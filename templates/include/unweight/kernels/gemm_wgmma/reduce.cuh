// Reduction of a tile of Y whose k is split: stream-K fixup through the workspace, or reduction in a cluster; see
// unweight/kernels/gemm_wgmma.cuh.
#pragma once

#include "unweight/kernels/gemm_wgmma/mainloop.cuh"

namespace uw::gemm_wgmma {

template <class Config>
struct Reduce : Mainloop<Config> {
    using Base = Mainloop<Config>;
    using S = typename Base::S;
    using Base::args, Base::shared, Base::batch_tiles, Base::schedule, Base::kAccumulators, Base::sync_warpgroup;
    using Base::Base;

    // Partial tiles in the workspace: [unit][batch tile][which][warpgroup][4 sums][thread] fp32. A block stores at most
    // two: of the tile whose end it has, and of the tile that it reduces with peers. A counter per warpgroup holds the
    // number of peers that have not read the partial tile yet.
    UW_DEVICE u32 partial_index(const typename Schedule<Config>::Peers& peers, u32 unit, const Place& p) const {
        const u32 which = unit - peers.first < peers.reducing;
        return ((unit * batch_tiles + schedule.batch_tile) * 2 + which) * Config::kWarpgroups + p.warpgroup;
    }
    UW_DEVICE float* partial_tile(u32 partial_index, const Place& p) const {
        return args.workspace + u64(partial_index) * (kTile * Config::kBatchTile) + p.thread * 4;
    }

    UW_DEVICE void store_partial_tile(const float (&sums)[kAccumulators], const typename Schedule<Config>::Peers& peers,
                                      u32 readers, const Place& p) const {
        const u32 own = partial_index(peers, schedule.unit, p);
        float* to = partial_tile(own, p);
#pragma unroll
        for (u32 i = 0; i < kAccumulators / 4; ++i) {
            ptx::st_global_x4(to + i * (kWarpgroupThreads * 4),
                              {ptx::bits_from_float(sums[4 * i]), ptx::bits_from_float(sums[4 * i + 1]),
                               ptx::bits_from_float(sums[4 * i + 2]), ptx::bits_from_float(sums[4 * i + 3])});
        }
        sync_warpgroup(p);  // orders every thread's stores before the release
        if (p.thread == 0) ptx::st_release_global(args.counters + own, readers);
    }

    // Whether this block reduces a piece of a shared tile. In a cluster, pieces are assigned round-robin across all
    // warpgroups, so that each block has some even if a warpgroup has few.
    UW_DEVICE bool reduces(const typename Schedule<Config>::Peers& peers, u32 piece, const Place& p) const {
        const u32 index = Config::kCluster > 1 ? p.warpgroup * S::kPieces + piece : piece;
        return index % peers.reducing == schedule.unit - peers.first;
    }

    // In a cluster: stores the pieces that peers reduce in shared memory, [warpgroup][4 sums][thread] fp32, and adds
    // the peers' partial sums to this block's pieces in order of rank: bit-identical in every run.
    UW_DEVICE void reduce_in_cluster(float (&sums)[kAccumulators], const typename Schedule<Config>::Peers& peers,
                                     const Place& p) const {
        constexpr u32 kPieceSums = S::kStoreRows / 2, kPeers = Config::kCluster - 1;
        const u32 own = shared + S::kSums + p.warpgroup * S::kSumBytes + p.thread * 16;
        // Orders every warp's reads of X before the sums that overlay it.
        ptx::bar_sync(NamedBarrier::kConsumers, Config::kWarpgroups * kWarpgroupThreads);
#pragma unroll
        for (u32 piece = 0; piece < S::kPieces; ++piece) {
            if (reduces(peers, piece, p)) continue;
#pragma unroll
            for (u32 i = 0; i < kPieceSums / 4; ++i) {
                const float* d = sums + piece * kPieceSums + 4 * i;
                ptx::st_shared_x4(own + (piece * kPieceSums / 4 + i) * (kWarpgroupThreads * 16),
                                  {ptx::bits_from_float(d[0]), ptx::bits_from_float(d[1]), ptx::bits_from_float(d[2]),
                                   ptx::bits_from_float(d[3])});
            }
        }
        sync_cluster();  // orders every block's stores before its peers' loads
        u32 from[kPeers];
#pragma unroll
        for (u32 j = 0; j < kPeers; ++j) from[j] = ptx::mapa(own, j + (j >= schedule.unit));
#pragma unroll
        for (u32 piece = 0; piece < S::kPieces; ++piece) {
            if (!reduces(peers, piece, p)) continue;
#pragma unroll
            for (u32 i = 0; i < kPieceSums / 4; ++i) {
                U32x4 v[kPeers];
#pragma unroll
                for (u32 j = 0; j < kPeers; ++j)
                    v[j] = ptx::ld_shared_cluster_x4(from[j] + (piece * kPieceSums / 4 + i) * (kWarpgroupThreads * 16));
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
    UW_DEVICE static void sync_cluster() {
        ptx::barrier_cluster_arrive();
        ptx::barrier_cluster_wait();
    }

    // Stream-K: adds the peers' partial tiles to this block's pieces, in order of units: bit-identical in every run.
    UW_DEVICE void fixup(float (&sums)[kAccumulators], const typename Schedule<Config>::Peers& peers,
                         const Place& p) const {
        // One thread per peer polls its flag, so that the latencies overlap.
        const u32 mine = peers.first + p.thread;
        const bool waits = mine <= peers.last && mine != schedule.unit;
        u32* flag = args.counters + partial_index(peers, waits ? mine : schedule.unit, p);
        // Polls by vote, so that the compiler sees converged warps, here and in the loop around.
        while (ptx::vote_sync_ballot(waits && ptx::ld_acquire_global(flag) == 0) != 0) {}
        sync_warpgroup(p);  // orders every thread's acquire before the loads
        constexpr u32 kPieceSums = S::kStoreRows / 2, kFlight = Config::kBatchTile > 192   ? 1
                                                                : Config::kBatchTile > 128 ? 2
                                                                                           : 4;
        const u32 other = peers.first == schedule.unit ? peers.last : peers.first;
#pragma unroll
        for (u32 piece = 0; piece < S::kPieces; ++piece) {
            if (!reduces(peers, piece, p)) continue;
            // Reads kFlight peers at a time to overlap their latencies. A position without a peer reads another peer's
            // partial tile and discards it.
            for (u32 first = peers.first; first <= peers.last; first += kFlight) {
                const float* from[kFlight];
                bool counts[kFlight];
#pragma unroll
                for (u32 j = 0; j < kFlight; ++j) {
                    counts[j] = first + j <= peers.last && first + j != schedule.unit;
                    from[j] = partial_tile(partial_index(peers, counts[j] ? first + j : other, p), p) +
                              piece * (kPieceSums * kWarpgroupThreads);
                }
#pragma unroll
                for (u32 i = 0; i < kPieceSums / 4; ++i) {
                    U32x4 v[kFlight];
#pragma unroll
                    for (u32 j = 0; j < kFlight; ++j) v[j] = ptx::ld_global_x4(from[j] + i * (kWarpgroupThreads * 4));
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
        sync_warpgroup(p);  // orders every thread's loads before the decrement that lets the peer reuse its buffer
        if (waits) ptx::red_add_global(flag, ~0u);
    }
};

}  // namespace uw::gemm_wgmma
