// Copies weights and activations to the ring, by one lane, with kLateWeights by one lane each; see
// unweight/kernels/gemm_wgmma.cuh.
#pragma once

#include "unweight/kernels/gemm_wgmma/block.cuh"
#include "unweight/ptx/bulk.cuh"
#include "unweight/ptx/control.cuh"

namespace uw::gemm_wgmma {

template <class Config>
struct Load : Block<Config> {
    using Base = Block<Config>;
    using S = typename Base::S;
    using Base::args, Base::x_ring, Base::w_ring, Base::batch_tiles, Base::cursor, Base::schedule, Base::tile_row,
        Base::batch_row, Base::x_slot, Base::w_slot;
    using Base::Base;

    // Source addresses of a segment's weights and activations.
    struct Sources {
        const u8* w[Config::kWarpgroups];  // address in step 0
        u32 row, boxes;                    // first row of X, and boxes of X
    };
    UW_DEVICE Sources sources(const Segment& s) const {
        Sources from;
#pragma unroll
        for (u32 g = 0; g < Config::kWarpgroups; ++g)
            from.w[g] = args.packed + u64(tile_row(s, g)) * args.tile_cols * packed::kTileBytes;
        from.row = batch_row(s);
        const u32 boxes = (args.m - from.row + S::kXBoxRows - 1) / S::kXBoxRows;
        from.boxes = boxes < S::kXBoxes ? boxes : S::kXBoxes;
        return from;
    }
    UW_DEVICE void load_w(const Sources& from, u32 step, u32 slot, u64 policy) const {
        const u32 x_bytes = kLateWeights<Config> ? 0 : from.boxes * S::kXBoxBytes;
        ptx::mbarrier_arrive_expect_tx(w_ring.full(slot), x_bytes + S::kWBytes);
#pragma unroll
        for (u32 g = 0; g < Config::kWarpgroups; ++g) {
            ptx::cp_async_bulk_load(w_slot(slot) + g * packed::kTileBytes, from.w[g] + u64(step) * packed::kTileBytes,
                                    packed::kTileBytes, w_ring.full(slot), policy);
        }
    }
    UW_DEVICE void load_x(const Sources& from, u32 step, u32 slot, u64 policy) const {
        if constexpr (kLateWeights<Config>)
            ptx::mbarrier_arrive_expect_tx(x_ring.full(slot), from.boxes * S::kXBoxBytes);
#pragma unroll
        for (u32 i = 0; i < S::kXBoxes; ++i) {
            if (i < from.boxes)
                ptx::tma_load_2d(x_slot(slot) + i * S::kXBoxBytes, args.x, step * kTile, from.row + i * S::kXBoxRows,
                                 x_ring.full(slot), policy);
        }
    }

    UW_DEVICE u64 weights_policy() const {
        return ptx::createpolicy_l2(batch_tiles == 1 ? L2::kEvictFirst : L2::kNormal);
    }

    // The producer loop of X, and without kLateWeights of W; called by one lane.
    UW_DEVICE void load() {
        ptx::prefetch_tensormap(args.x);
        const u64 x_policy = ptx::createpolicy_l2(L2::kEvictLast), w_policy = weights_policy();
        Segment s = schedule.next();
        if constexpr (Config::kPdl && kLateWeights<Config>) {
            ptx::griddepcontrol_wait();
        } else if constexpr (Config::kPdl) {
            // Weights do not depend on the preceding kernel and have the longest latency. X depends on it and waits.
            const Sources from = sources(s);
            u32 ahead = s.last - s.first;
            ahead = ahead < Config::kStages ? ahead : Config::kStages;
            for (u32 i = 0; i < ahead; ++i) load_w(from, s.first + i, i, w_policy);
            ptx::griddepcontrol_wait();
            for (u32 i = 0; i < ahead; ++i) {
                load_x(from, s.first + i, i, x_policy);
                cursor.advance();
            }
            s.first += ahead;
        }
        for (;;) {
            const Sources from = sources(s);
            for (; s.first < s.last; ++s.first) {
                // All consumer warps have released the slot: their wgmma on X are done, and without kLateWeights their
                // loads of W.
                x_ring.wait_empty(cursor);
                if constexpr (!kLateWeights<Config>) load_w(from, s.first, cursor.slot, w_policy);
                load_x(from, s.first, cursor.slot, x_policy);
                cursor.advance();
            }
            s = schedule.next();
            if (!s.exists()) break;
        }
    }

    // The producer loop of W with kLateWeights; called by one lane. W does not depend on the preceding kernel.
    UW_DEVICE void load_weights() {
        const u64 policy = weights_policy();
        for (Segment s = schedule.next(); s.exists(); s = schedule.next()) {
            const Sources from = sources(s);
            for (; s.first < s.last; ++s.first) {
                w_ring.wait_empty(cursor);  // all consumer warps have released W: their loads are done
                load_w(from, s.first, cursor.slot, policy);
                cursor.advance();
            }
        }
    }
};

}  // namespace uw::gemm_wgmma
