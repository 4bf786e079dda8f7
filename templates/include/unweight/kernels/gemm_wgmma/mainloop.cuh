// Decoding and wgmma, by the consumer warpgroups; see unweight/kernels/gemm_wgmma.cuh.
#pragma once

#include "unweight/encoding/escapes.cuh"
#include "unweight/kernels/gemm_wgmma/escapes.cuh"
#include "unweight/mma/descriptor.cuh"
#include "unweight/ptx/mma.cuh"
#include "unweight/ptx/wgmma.cuh"

namespace uw::gemm_wgmma {

template <class Config>
struct Mainloop : Escapes<Config> {
    using Base = Escapes<Config>;
    using Base::args, Base::x_ring, Base::w_ring, Base::cursor, Base::kAccumulators, Base::tile_row, Base::x_slot,
        Base::w_slot, Base::record_slot;
    using Base::Base;

    // What a warp loads of a step before decoding it.
    struct Fetched {
        packed::PackedBlock packed;
        u32 records;       // shared address of its row block's escape records
        u32 count, first;  // number of escapes, and the first record
    };

    // Loads W and the first record of the next step into registers. Waits until they, and without kLateWeights X, have
    // landed unless the caller knows that.
    UW_DEVICE Fetched fetch(const Place& p, bool has_landed = false) {
        if (!has_landed) w_ring.wait_full(cursor);
        const u32 block = w_slot(cursor.slot) + p.warpgroup * packed::kTileBytes + p.warp * packed::kBlockBytes;
        const u32 records = record_slot(cursor.slot, p.warpgroup) + p.warp * kBlockRecordBytes;
        cursor.advance();
        const U32x2 head = Config::kEscapes ? ptx::ld_shared_x2(records) : U32x2{0, 0};
        return {packed::PackedBlock(block, p.lane), records, head.x, head.y};
    }

    // Decodes a step. pin() keeps it after the preceding instructions, which waited for the last wgmma that reads these
    // registers.
    UW_DEVICE static void decode(packed::Operands& operands, Fetched& f) {
#pragma unroll
        for (u32 i = 0; i < 12; ++i) ptx::pin(f.packed.words[i]);
        operands = packed::Operands(f.packed);
    }

    UW_DEVICE void patch(packed::Operands& operands, const Fetched& f, const Segment& s, u32 step,
                         const Place& p) const {
        if (Config::kEscapes && f.count != 0) {
            const u32 count = f.count < packed::kBlockElements ? f.count : packed::kBlockElements;
            u32 record = f.first, i = 1;
#pragma unroll 1
            do {
                packed::patch(operands, record, p.lane);
                if (++i <= kSlotRecords) {
                    record = ptx::ld_shared(f.records + i * 4);
                } else {
                    const u32 index = ptx::ld_shared(f.records + (kSlotRecords + 1) * 4);
                    if (i >= args.escape_words - index) break;
                    record = ptx::ld_global_nc(args.escapes + index + i);
                }
            } while (i <= count);
        }
        if constexpr (Config::kDump) dump(operands, s, step, p);
    }

    // Debugging: stores the A operands to the workspace.
    UW_DEVICE void dump(const packed::Operands& operands, const Segment& s, u32 step, const Place& p) const {
        const u64 tile = u64(tile_row(s, p.warpgroup)) * args.tile_cols + step;
        u32* out =
            reinterpret_cast<u32*>(args.workspace) + (tile * packed::kTileBlocks + p.warp) * (kSteps * 4 * 32) + p.lane;
#pragma unroll
        for (u32 r = 0; r < kSteps * 4; ++r) ptx::st_global(out + r * 32, operands.p[r]);
    }

    // Slots in the order of steps: the one to multiply, and the one to release.
    struct Slots {
        u32 multiply, release;
        UW_DEVICE static void next(u32& slot) { slot = slot + 1 == Config::kStages ? 0 : slot + 1; }
    };

    // Returns the descriptor of X of the step to multiply. With kLateWeights, waits until X has landed: fetch waited
    // for W only, and left the cursor one step further.
    UW_DEVICE u64 x_descriptor(const Slots& slots) const {
        if constexpr (kLateWeights<Config>) x_ring.wait_full({slots.multiply, cursor.parity ^ (cursor.slot == 0)});
        return mma::k_major_descriptor(x_slot(slots.multiply));
    }

    // Issues the wgmma of a step as one group, which is in flight on return.
    UW_DEVICE static void issue(float (&sums)[kAccumulators], const packed::Operands& operands, u64 x) {
        ptx::wgmma_fence();
#pragma unroll
        for (u32 q = 0; q < kSteps; ++q) {
            const u32 a[4] = {operands.p[4 * q], operands.p[4 * q + 1], operands.p[4 * q + 2], operands.p[4 * q + 3]};
            ptx::wgmma(sums, a, x + q * mma::kDescriptorStepK16);
        }
        ptx::wgmma_commit_group();
    }

    // Called after the wait for the wgmma that read X of the slot and, without kLateWeights, after the slot's W and
    // records were loaded. The warp's arrival on `empty` of x_ring orders all of them before the copies that refill the
    // slot, also the load of the record past the last, which nothing waits for. `exists` is a predicate of the arrival:
    // a branch would lengthen every step.
    UW_DEVICE void release(Slots& slots, bool exists, const Place& p) const {
        ptx::bar_warp_sync();  // orders every lane's loads before the arrival
        if (p.lane == 0 && exists) x_ring.release(slots.release);
        Slots::next(slots.release);
    }
    // With kLateWeights: called after W and records of the step to multiply next were loaded. The warp's arrival on
    // `empty` of w_ring orders these loads before the copies that refill them.
    UW_DEVICE void release_weights(const Slots& slots, const Place& p) const {
        ptx::bar_warp_sync();  // orders every lane's loads before the arrival
        if (p.lane == 0) w_ring.release(slots.multiply);
    }

    // Multiplies a step, and meanwhile decodes the next. Loads the one after or, with kLateWeights, the next.
    UW_DEVICE void overlap(float (&sums)[kAccumulators], const packed::Operands& operands, packed::Operands& following,
                           Fetched& f, Slots& slots, const Segment& s, u32 step, const Place& p) {
        issue(sums, operands, x_descriptor(slots));
        Slots::next(slots.multiply);
        const bool has_landed = w_ring.is_full(cursor);
        ptx::wgmma_wait_group<1>();  // the previous step, whose registers and slot are free now
        release(slots, step != s.first, p);
        if constexpr (kLateWeights<Config>) f = fetch(p, has_landed);
        decode(following, f);
        patch(following, f, s, step + 1, p);
        if constexpr (kLateWeights<Config>) {
            release_weights(slots, p);
        } else if (step + 2 < s.last) {
            f = fetch(p, has_landed);
        }
    }

    UW_DEVICE void multiply_last(float (&sums)[kAccumulators], const packed::Operands& operands, Slots& slots,
                                 const Segment& s, const Place& p) {
        issue(sums, operands, x_descriptor(slots));
        ptx::wgmma_wait_group<0>();
        release(slots, s.last - s.first > 1, p);
        release(slots, true, p);
    }

    UW_DEVICE void multiply(float (&sums)[kAccumulators], const Segment& s, const Place& p) {
        packed::Operands even, odd;
        u32 step = s.first;
        // The slot before the first is not released.
        Slots slots{cursor.slot, (cursor.slot == 0 ? Config::kStages : cursor.slot) - 1};
        Fetched f = fetch(p);
        even = packed::Operands(f.packed);
        patch(even, f, s, step, p);
        if constexpr (kLateWeights<Config>) {
            release_weights(slots, p);
        } else if (step + 1 < s.last) {
            f = fetch(p);
        }
        for (;;) {
            if (step + 1 == s.last) return multiply_last(sums, even, slots, s, p);
            overlap(sums, even, odd, f, slots, s, step, p);
            ++step;
            if (step + 1 == s.last) return multiply_last(sums, odd, slots, s, p);
            overlap(sums, odd, even, f, slots, s, step, p);
            ++step;
        }
    }
};

}  // namespace uw::gemm_wgmma
