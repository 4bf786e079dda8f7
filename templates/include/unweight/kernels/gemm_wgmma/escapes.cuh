// Copies escape records to the ring, one warp per consumer warpgroup; see unweight/kernels/gemm_wgmma.cuh.
#pragma once

#include "unweight/encoding/escapes.cuh"
#include "unweight/kernels/gemm_wgmma/load.cuh"
#include "unweight/ptx/memory.cuh"

namespace uw::gemm_wgmma {

template <class Config>
struct Escapes : Load<Config> {
    using Base = Load<Config>;
    using Base::args, Base::w_ring, Base::cursor, Base::schedule, Base::tile_row, Base::record_slot;
    using Base::Base;

    // Called by one warp per consumer warpgroup. Copies the escape records of its tiles next to the weights, ahead of
    // the consumers, which would stall on loads from device memory. Lane l holds the heads of step l of 32 and, in
    // flight, of the next 32.
    UW_DEVICE void load_escapes(u32 warpgroup) {
        const u32 lane = ptx::laneid();
        for (Segment s = schedule.next(); s.exists(); s = schedule.next()) {
            const u32* row = args.escape_heads + u64(tile_row(s, warpgroup)) * args.tile_cols * packed::kTileBlocks;
            U32x4 heads{0, 0, 0, 0}, next = load_heads(row, s.first + lane, s);
            u32 any = 0;
            for (u32 step = s.first; step < s.last; ++step) {
                const u32 holder = (step - s.first) % 32;
                if (holder == 0) {
                    heads = next;
                    next = load_heads(row, step + 32 + lane, s);
                    any = ptx::vote_sync_ballot((heads.x | heads.y | heads.z | heads.w) != 0);
                    prefetch_list(heads.x);
                    prefetch_list(heads.y);
                    prefetch_list(heads.z);
                    prefetch_list(heads.w);
                }
                w_ring.wait_empty(cursor);  // the records of this slot have been read
                const u32 to = record_slot(cursor.slot, warpgroup);
                if (any >> holder & 1) {
                    const u32 mine[packed::kTileBlocks] = {
                        ptx::shfl_sync_idx(heads.x, holder), ptx::shfl_sync_idx(heads.y, holder),
                        ptx::shfl_sync_idx(heads.z, holder), ptx::shfl_sync_idx(heads.w, holder)};
                    u32 records[packed::kTileBlocks];
#pragma unroll
                    for (u32 b = 0; b < packed::kTileBlocks; ++b)
                        records[b] =
                            mine[b] == 0 ? 0 : packed::read_records(mine[b], args.escapes, args.escape_words, lane);
#pragma unroll
                    for (u32 b = 0; b < packed::kTileBlocks; ++b) {
                        const u32 word = lane == kSlotRecords + 1 ? mine[b] & ~packed::kListHead : records[b];
                        if (lane <= kSlotRecords + 1) ptx::st_shared(to + b * kBlockRecordBytes + lane * 4, word);
                    }
                } else if (lane < packed::kTileBlocks) {
                    ptx::st_shared(to + lane * kBlockRecordBytes, 0);
                }
                ptx::bar_warp_sync();  // orders the lanes' stores before the arrival that publishes them
                if (lane == 0) ptx::mbarrier_arrive(w_ring.full(cursor.slot));
                cursor.advance();
            }
        }
    }
    UW_DEVICE static U32x4 load_heads(const u32* row, u32 step, const Segment& s) {
        return step < s.last ? ptx::ld_global_nc_x4(row + step * packed::kTileBlocks) : U32x4{0, 0, 0, 0};
    }
    // Escape lists are rare: prefetch them into L2 before their step is reached.
    UW_DEVICE void prefetch_list(u32 head) const {
        const u32 list = head & ~packed::kListHead;
        if (list != head && list < args.escape_words) ptx::prefetch_global_l2(args.escapes + list);
    }
};

}  // namespace uw::gemm_wgmma
