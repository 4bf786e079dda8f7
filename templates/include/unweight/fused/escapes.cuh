// Elements outside the window of the packed form (docs/format.md, A.9): exact operands that replace what the container decoded to.
//
//   head    u32 of a row block: 0 none | 1 << 30 | record | 1 << 31 | index of a list in `escapes`
//   list    count, then count records
//   record  operand 15..0 | lane 20..16 | 4 * step + register 24..21 | half 25
//
// Heads and records come from a file: lane, register and half are masked, and a list never reads past `escape_words`.
#pragma once

#include "unweight/fused/packed.cuh"

namespace uw::fused {

constexpr u32 kListHead = 1u << 31;
constexpr u32 kBlockElements = kBlockRows * kTile;

// Every lane sees the same record; the lane that holds the element rewrites one half of one register. Selects, not an index, keep the operands in registers.
UW_DEVICE void patch(Operands& operands, u32 record, u32 lane) {
    const u32 target = (record >> 16 & 31) == lane ? record >> 21 & 15 : 16;
    const u32 selector = record >> 25 & 1 ? 0x5410 : 0x3254;  // {value, old.low} or {old.high, value}
#pragma unroll
    for (u32 r = 0; r < kSteps * 4; ++r) {
        const u32 patched = ptx::prmt(operands.p[r], record, selector);
        operands.p[r] = target == r ? patched : operands.p[r];
    }
}

// The words of a list that may be read: count is held to the elements of a row block and to the section's end.
UW_DEVICE u32 list_records(const u32* escapes, u32 escape_words, u32 index) {
    if (index >= escape_words) return 0;
    u32 count = ptx::load_global_nc(escapes + index);
    const u32 left = escape_words - index - 1;
    count = count < left ? count : left;
    return count < kBlockElements ? count : kBlockElements;
}

// By a converged warp; `head` is the same in all lanes.
UW_DEVICE void patch_escapes(Operands& operands, u32 head, const u32* escapes, u32 escape_words, u32 lane) {
    if (head == 0) return;
    if ((head & kListHead) == 0) {
        patch(operands, head, lane);
        return;
    }
    const u32 index = head & ~kListHead;
    const u32 count = list_records(escapes, escape_words, index);
    for (u32 first = 0; first < count; first += 32) {
        const u32 left = count - first;
        const u32 mine = lane < left ? ptx::load_global_nc(escapes + index + 1 + first + lane) : 0;
        const u32 batch = left < 32 ? left : 32;
        for (u32 i = 0; i < batch; ++i) patch(operands, ptx::shuffle(mine, i), lane);
    }
}

}  // namespace uw::fused
