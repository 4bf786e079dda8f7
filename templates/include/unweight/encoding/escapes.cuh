// Elements outside the window of the packed encoding (docs/format.md, A.9): exact operands that replace what the
// container decoded to.
//
//   head    u32 of a row block: 0 none | 1 << 30 | record | 1 << 31 | index of a list in `escapes`
//   list    count, then count records
//   record  operand 15..0 | lane 20..16 | 4 * step + register 24..21 | half 25
//
// Heads and records come from a file: lane, register and half are masked, and a list never reads past `escape_words`.
#pragma once

#include "unweight/encoding/packed.cuh"

namespace uw::packed {

constexpr u32 kListHead = 1u << 31;
constexpr u32 kBlockElements = kBlockRows * kTile;

// `record` is the same in all lanes; the lane that holds the element rewrites one half of one register. Compile-time
// indices keep the operands in registers: a branch that the warp takes together finds the step, a select the register.
UW_DEVICE void patch(Operands& operands, u32 record, u32 lane) {
    const u32 step = record >> 23 & 3;
    const u32 target = (record >> 16 & 31) == lane ? record >> 21 & 3 : 4;
    const u32 selector = record >> 25 & 1 ? 0x5410 : 0x3254;  // {value, old.low} or {old.high, value}
#pragma unroll
    for (u32 s = 0; s < kSteps; ++s) {
        if (s != step) continue;
#pragma unroll
        for (u32 r = 0; r < 4; ++r) {
            u32& operand = operands.p[4 * s + r];
            const u32 patched = ptx::prmt(operand, record, selector);
            operand = target == r ? patched : operand;
        }
    }
}

// The records of one row block, spread over the warp: lane 0 holds the count, lane i record i - 1. Read ahead of the
// operands, so that a list, which is far away, comes while the weights do. `head` is the same in all lanes and not 0.
UW_DEVICE u32 read_records(u32 head, const u32* escapes, u32 escape_words, u32 lane) {
    if ((head & kListHead) == 0) return lane == 0 ? 1 : head;
    const u32 index = head & ~kListHead;
    return index < escape_words && lane < escape_words - index ? ptx::ld_global_nc(escapes + index + lane) : 0;
}

// Past the warp's 31 records the list is read again, one by one: a row block of 1024 elements seldom has so many.
UW_DEVICE void apply_records(Operands& operands, u32 records, u32 head, const u32* escapes, u32 escape_words,
                             u32 lane) {
    u32 count = ptx::shfl_sync_idx(records, 0);
    count = count < kBlockElements ? count : kBlockElements;
    for (u32 i = 1; i <= count && i < 32; ++i) patch(operands, ptx::shfl_sync_idx(records, i), lane);
    if (count < 32) return;
    const u32 index = head & ~kListHead;
    for (u32 i = 32; i <= count && i < escape_words - index; ++i)
        patch(operands, ptx::ld_global_nc(escapes + index + i), lane);
}

}  // namespace uw::packed
