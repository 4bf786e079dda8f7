// Packed GEMM for large batches: Y[m, n] = X[m, k] * W[n, k]^T, W packed to 12 bits per weight (docs/format.md, A.9).
// The *weight* is the A operand of wgmma and comes from registers, decoded on the way with 9 integer operations per 8
// weights; the batch is the n dimension. The exact operand of an element outside the exponent window replaces the
// decoded one before the multiply: the tensor cores see the weights times 2^(112 - base), bit for bit, and the fp32
// sums are multiplied once by GemmPackedArgs::scale.
//
// Config (the axes of unweight-codegen/src/family/gemm_wgmma.rs)
//   u32  kBatchTile      32..256  rows of X in a tile of Y, the n of wgmma; a multiple of 32
//   u32  kWarpgroups     1..3     consumer warpgroups, 64 output features (a row of tiles of W) each
//   u32  kStages         3..      slots of the ring
//   u32  kCluster        1..8     blocks that share the k of a tile of Y: each multiplies a range of its k steps, and
//                                 reduces and stores a share of its pieces
//   bool kStreamK        stream-K for the tiles that do not fill a wave of the grid; without it a block takes whole
//                        tiles of Y; not with kCluster
//   bool kEscapes        patch operands from escape_heads / escapes; without it the tensor must not have any
//   bool kPdl            programmatic dependent launch: weights are loaded before griddepcontrol.wait, everything else
//                        is accessed after it
//   Epilogue kEpilogue   kStore; kStoreAdd: y += or, with args.bias, y = bias +, added in fp32 and rounded once;
//                        kSiluMul: y[m, n / 2] = silu(gate) * up, in fp32 and rounded once: of 16 rows of W, 8 are the
//                        gate's weights and 8 the matching rows of the up projection
//   bool kDump           debugging: every A register to the workspace, u32 [tile][row block][step][register][lane]; not
//                        with kStreamK
//
// Launch: kThreads<Config> = 128 * (kWarpgroups + 1) threads, Smem<Config>::kBytes of dynamic shared memory, m >= 1,
// clusters of kCluster blocks along x, and with
//   tiles = ceil(n / (64 * kWarpgroups)) * ceil(m / kBatchTile)
//   grid  = min(tiles, SMs)
//   kStreamK: grid = min(tiles * k / 64, SMs), one block per SM, all co-resident (a cooperative launch);
//     workspace = 2 * grid * 64 * kWarpgroups * kBatchTile fp32,
//     counters = 2 * grid * kWarpgroups u32 (zero before, zero after). Otherwise neither.
//   kCluster > 1: grid = tiles * kCluster, k >= 64 * kCluster. Clusters of 2 fill 132 SMs, clusters of 4 at most 120 of
//     them: one cluster more takes one wave more.
//   args.x: box 64 x 32. args.y_map: bf16 [m, n], box 64 (n) x 32 (m), 128-byte swizzle; with kSiluMul
//     bf16 [m, n / 2], box 32 (n / 2) x 32 (m), 64-byte swizzle.
//
// Shared memory = kStages * (kBatchTile * 128 + kWarpgroups * (6144 + E) + B)
//   + kWarpgroups * (kStoreBuffers * kStoreRows * 128 + 8)
//   where E is 256 with kEscapes, else 0; B is 32 with kLateWeights, else 16; kStoreRows is 64 if kBatchTile is a
//   multiple of 64 above 64 and there is no cluster, else 32;
//   kStoreBuffers = min(3, max(2, kBatchTile / kStoreRows)).
//   Sections: kX, kW, kStaging, kRecords (with kEscapes), kBarriers. The sums that the blocks of a cluster exchange
//   overlay kX and kW.
//
// Roles
//   warp 0          load: per step of 64 k, an elected lane issues the boxes of X that contain rows of the batch and
//                   one 6144-byte copy of W per warpgroup
//   warps 1..3      escapes: one warp per consumer warpgroup copies its escape records next to W. With kLateWeights,
//                   warp 3 copies W
//   warpgroups 1..  consumers: decode and multiply. One step: wgmma on decoded operands | the next step's 3 x 16 bytes
//                   per lane, decoded | its records, if any | the loads of the step after. With kLateWeights, the next
//                   step is loaded just before it is decoded, and its W released just after
//
// Barriers
//   full [kStages]      1 arrival and the bytes of X and W; with kEscapes 1 more arrival per warpgroup
//   empty [kStages]     1 arrival per consumer warp. With kLateWeights, W and records have a full and an empty of their
//                       own, and full of X takes 1 arrival
//   old [kWarpgroups]   1 arrival and the bytes of the old Y, for kStoreAdd without a bias
//   NamedBarrier        one per warpgroup, and one for all consumers (kCluster)
//   cluster             twice per tile: when the sums are in shared memory, and when they have been read
//
// Files: schedule (tiles and work units), block (shared memory, addresses), load, escapes, mainloop, reduce (stream-K
// fixup, clusters), epilogue, each a layer over the one before; this file starts the roles.
// Bound: tensor cores at kBatchTile = 256 with two warpgroups; decoding latency and memory below. Measurements:
//   docs/records; experiments: docs/records/2026-11-21/matmul-packed-log.md.
#pragma once

#include "unweight/kernels/gemm_wgmma/epilogue.cuh"

namespace uw::gemm_wgmma {

template <class Config>
struct Kernel : Epilogue<Config> {
    using Base = Epilogue<Config>;
    using S = typename Base::S;
    using Base::args, Base::shared, Base::x_ring, Base::w_ring, Base::schedule, Base::kAccumulators, Base::kBudgets,
        Base::kProducerRegisters, Base::kConsumerRegisters;
    using Base::load, Base::load_weights, Base::load_escapes, Base::multiply, Base::store_partial_tile, Base::fixup,
        Base::reduce_in_cluster, Base::sync_cluster, Base::load_bias, Base::store;
    using Base::Base;

    UW_DEVICE void setup() const {
        constexpr u32 kWArrivals = Config::kEscapes ? 1 + Config::kWarpgroups : 1;
        constexpr u32 kReaders = Config::kWarpgroups * kWarpgroupWarps;
        w_ring.init(kWArrivals, kReaders);
        if constexpr (kLateWeights<Config>) x_ring.init(1, kReaders);
#pragma unroll
        for (u32 g = 0; g < Config::kWarpgroups; ++g) ptx::mbarrier_init(shared + S::kOldBarriers + g * 8, 1);
        ptx::fence_mbarrier_init();
    }

    UW_DEVICE void consume() {
        const Place p;
        u32 buffer = 0, old_parity = 0;
        Segment s = schedule.next();
        if constexpr (Config::kPdl) ptx::griddepcontrol_wait();
        while (s.exists()) {
            float sums[kAccumulators];
#pragma unroll
            for (u32 i = 0; i < kAccumulators; ++i) sums[i] = 0.0f;
            // Arrives during the product; with stream-K, the fixup needs the register.
            u32 bias = Config::kStreamK ? 0 : load_bias(s, p);
            multiply(sums, s, p);
            const typename Schedule<Config>::Peers peers = schedule.peers_of(s);
            const bool is_reducing = schedule.unit - peers.first < peers.reducing;
            if constexpr (Config::kStreamK) {
                const u32 readers = peers.reducing - is_reducing;
                if (readers != 0) store_partial_tile(sums, peers, readers, p);
                if (is_reducing && peers.first != peers.last) fixup(sums, peers, p);
            }
            if constexpr (Config::kCluster > 1) reduce_in_cluster(sums, peers, p);
            if (is_reducing) {
                if constexpr (Config::kStreamK) bias = load_bias(s, p);
                store(sums, s, peers, bias, buffer, old_parity, p);
            }
            s = schedule.next();
        }
        if (p.thread == 0) ptx::cp_async_bulk_wait_group<0>();
        if constexpr (Config::kCluster > 1) {
            ptx::bar_warp_sync();  // reconverges the warp for the cluster barrier
            sync_cluster();        // peers may still be reading this block's sums
        }
    }

    UW_DEVICE void run() {
        const u32 warp = ptx::uniform_warp_index();
        if constexpr (Config::kPdl) ptx::griddepcontrol_launch_dependents();
        if (warp == 0) {
            if (ptx::elect_sync()) setup();
            ptx::bar_warp_sync();  // reconverges the warp for the block barrier
        }
        ptx::bar_sync();
        if (warp < kWarpgroupWarps) {
            if constexpr (kBudgets) ptx::setmaxnreg_dec<kProducerRegisters>();
            if (warp == 0) {
                if (ptx::elect_sync()) load();
            } else if (Config::kEscapes && warp <= Config::kWarpgroups) {
                load_escapes(warp - 1);
            } else if (kLateWeights<Config> && warp == kWarpgroupWarps - 1) {
                if (ptx::elect_sync()) load_weights();
            }
            if constexpr (Config::kCluster > 1) {
                ptx::bar_warp_sync();  // reconverges the warp for the cluster barrier
                sync_cluster();        // matches the one in reduce_in_cluster
                sync_cluster();        // matches the one at the end of consume
            }
        } else {
            if constexpr (kBudgets) ptx::setmaxnreg_inc<kConsumerRegisters>();
            consume();
        }
    }
};

template <class Config>
UW_DEVICE void run(const GemmPackedArgs& args) {
    Kernel<Config> kernel(args, ptx::cvta_to_shared(ptx::dynamic_smem()));
    kernel.run();
}

}  // namespace uw::gemm_wgmma
