// Stores sums to Y through shared memory and TMA; see unweight/kernels/gemm_wgmma.cuh.
#pragma once

#include "unweight/epilogue/activation.cuh"
#include "unweight/kernels/gemm_wgmma/reduce.cuh"
#include "unweight/ptx/bulk.cuh"
#include "unweight/ptx/fence.cuh"

namespace uw::gemm_wgmma {

template <class Config>
struct Epilogue : Reduce<Config> {
    using Base = Reduce<Config>;
    using S = typename Base::S;
    using OutputTile = typename Base::OutputTile;
    using GatedTile = typename Base::GatedTile;
    using Base::args, Base::shared, Base::kAccumulators, Base::kOutputRowBytes, Base::kTileOutputs,
        Base::wanted_tile_row, Base::tile_row, Base::batch_row, Base::sync_warpgroup, Base::reduces;
    using Base::Base;

    UW_DEVICE u32 old_barrier(const Place& p) const { return shared + S::kOldBarriers + p.warpgroup * 8; }

    UW_DEVICE static void add_pair(float& low, float& high, u32 pair) {
        low += ptx::float_from_bits(pair << 16);
        high += ptx::float_from_bits(pair & 0xffff0000u);
    }

    // Returns the bias of features lane / 4 (low half) and lane / 4 + 8 of a warp's fragments; 0 without a bias.
    UW_DEVICE u32 load_bias(const Segment& s, const Place& p) const {
        if constexpr (kStoreAdd<Config>) {
            // A row of tiles past the end is not stored.
            const u16* bias = args.bias + tile_row(s, p.warpgroup) * kTile + p.warp * packed::kBlockRows + p.lane / 4;
            if (args.bias != nullptr) return ptx::ld_global_u16(bias) | ptx::ld_global_u16(bias + 8) << 16;
        }
        return 0;
    }

    // silu(gate) * up, of rows g and g + 8 of a fragment.
    UW_DEVICE float gated(float gate, float up) const { return packed::silu(gate * args.scale) * (up * args.scale); }

    // Stores pieces of kStoreRows batch rows by 64 features (kSiluMul: 32): transposed into shared memory, then stored
    // by TMA, which drops rows past m. Thread 0 issues every store. A buffer is reused after kStoreBuffers pieces:
    // thread 0 arrives at the barrier of the piece before only when the store of that buffer has read it.
    UW_DEVICE void store(float (&sums)[kAccumulators], const Segment& s, const typename Schedule<Config>::Peers& peers,
                         u32 bias, u32& buffer, u32& old_parity, const Place& p) const {
        const u32 wanted = wanted_tile_row(s, p.warpgroup), column = wanted * kTileOutputs, row = batch_row(s);
        if (wanted * kTile >= args.n) return;
        // A fragment is 16 features by 8 batch rows. Order of the transposed matrices: features 0..7 and 8..15 of one
        // fragment, then of the next.
        const u32 matrix_row = p.lane % 8 + p.lane / 16 * 8, matrix_chunk = p.warp * 2 + p.lane / 8 % 2;
#pragma unroll
        for (u32 i = 0; i < S::kPieces; ++i) {
            const u32 first = row + i * S::kStoreRows;
            if (first >= args.m) break;
            if (!reduces(peers, i, p)) continue;
            const u32 staging = shared + S::kStaging + (p.warpgroup * S::kStoreBuffers + buffer) * S::kPieceBytes;
            buffer = buffer + 1 == S::kStoreBuffers ? 0 : buffer + 1;
            const bool adds_old = kStoreAdd<Config> && args.bias == nullptr;
            if (adds_old) {
                // The buffer was last written by all threads, each of which fenced before the barrier that preceded its
                // store, and thread 0 has waited until that store has read it.
                if (p.thread == 0) {
                    ptx::mbarrier_arrive_expect_tx(old_barrier(p), S::kPieceBytes);
#pragma unroll
                    for (u32 r = 0; r < S::kStoreRows; r += kBoxRows) {
                        ptx::tma_load_2d(staging + r * smem::kSwizzleBytes, args.y_map, column, first + r,
                                         old_barrier(p));
                    }
                }
                ptx::mbarrier_wait_parity(old_barrier(p), old_parity);
                old_parity ^= 1;
            }
            if constexpr (kSiluMul<Config>) {
                // 8 features by 32 batch rows: the four matrices of a store are stacked.
#pragma unroll
                for (u32 g = 0; g < S::kStoreRows / 32; ++g) {
                    const float* d = sums + (i * S::kStoreRows / 32 + g) * 16;
                    u32 pairs[4];
#pragma unroll
                    for (u32 j = 0; j < 4; ++j)
                        pairs[j] = ptx::cvt_rn_bf16x2(gated(d[4 * j], d[4 * j + 2]), gated(d[4 * j + 1], d[4 * j + 3]));
                    ptx::stmatrix_x4_trans(staging + GatedTile::offset(g * 32 + p.lane, p.warp),
                                           {pairs[0], pairs[1], pairs[2], pairs[3]});
                }
            } else {
#pragma unroll
                for (u32 g = 0; g < S::kStoreRows / 16; ++g) {
                    const u32 address = staging + OutputTile::offset(g * 16 + matrix_row, matrix_chunk);
                    float* d = sums + (i * S::kStoreRows / 16 + g) * 8;
#pragma unroll
                    for (u32 j = 0; j < 8; ++j) d[j] *= args.scale;
                    if (adds_old) {
                        const U32x4 old = ptx::ldmatrix_x4_trans(address);
                        add_pair(d[0], d[1], old.x);
                        add_pair(d[2], d[3], old.y);
                        add_pair(d[4], d[5], old.z);
                        add_pair(d[6], d[7], old.w);
                    } else if constexpr (kStoreAdd<Config>) {
                        const float low = ptx::float_from_bits(bias << 16);
                        const float high = ptx::float_from_bits(bias & 0xffff0000u);
#pragma unroll
                        for (u32 j = 0; j < 8; ++j) d[j] += j / 2 % 2 == 0 ? low : high;
                    }
                    ptx::stmatrix_x4_trans(address, {ptx::cvt_rn_bf16x2(d[0], d[1]), ptx::cvt_rn_bf16x2(d[2], d[3]),
                                                     ptx::cvt_rn_bf16x2(d[4], d[5]), ptx::cvt_rn_bf16x2(d[6], d[7])});
                }
            }
            ptx::fence_proxy_async_shared();  // with the barrier below: orders the tile before the store that reads it
            if (p.thread == 0) ptx::cp_async_bulk_wait_group_read<S::kStoreBuffers - 2>();
            sync_warpgroup(p);
            if (p.thread == 0) {
#pragma unroll
                for (u32 r = 0; r < S::kStoreRows; r += kBoxRows) {
                    if (first + r < args.m)
                        ptx::tma_store_2d(args.y_map, column, first + r, staging + r * kOutputRowBytes);
                }
                ptx::cp_async_bulk_commit_group();
            }
        }
    }
};

}  // namespace uw::gemm_wgmma
