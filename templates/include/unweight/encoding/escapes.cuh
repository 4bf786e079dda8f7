// Elements outside the window of the packed encoding (docs/format.md, A.9): exact operands that replace the decoded
// ones.
//
//   head    u32 of a row block: 0 none | 1 << 30 | record | 1 << 31 | index of a list in `escapes`
//   list    count, then count records
//   record  operand 15..0 | lane 20..16 | 4 * step + register 24..21 | half 25
//
// Heads and records come from a file and are not trusted: lane, register and half are masked, and a list never reads
// past `escape_words`.
#pragma once

#include "unweight/encoding/packed.cuh"

namespace uw::packed {

constexpr u32 kListHead = 1u << 31;
constexpr u32 kBlockElements = kBlockRows * kTile;

// Replaces one element. `record` is uniform over the warp; the lane that holds the element rewrites one half of one
// register. Indices are compile-time constants, which keeps the operands in registers: a warp-uniform branch selects
// the step, and a select the register.
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

// Loads the records of one row block, spread over the warp: lane 0 holds the count, lane i record i - 1. Called ahead
// of the operands, so that the latency of a list overlaps with that of the weights. `head` is uniform over the warp and
// not 0.
UW_DEVICE u32 read_records(u32 head, const u32* escapes, u32 escape_words, u32 lane) {
    if ((head & kListHead) == 0) return lane == 0 ? 1 : head;
    const u32 index = head & ~kListHead;
    return index < escape_words && lane < escape_words - index ? ptx::ld_global_nc(escapes + index + lane) : 0;
}

// Applies the records. Those after the warp's first 31 are read from the list one by one, which is rare: a row block
// has 1024 elements.
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
