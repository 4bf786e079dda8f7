// Pages of the KV cache of one layer (unweight-rt/src/ops/kv.rs states the same for the host).
//
//   layer  [page][kv_head][K | V][64][head_dim] bf16; a sequence's token t: line t % 64 of page table[t / 64]
//   chunk  8 elements, 16 bytes; chunk c of line t lies at c ^ (t & mask), mask = min(8, largest power of two that
//          divides head_dim / 8) - 1: rows keep their length, and eight lines of one column lie in different banks
#pragma once

#include "unweight/ptx/types.cuh"

namespace uw::kv {

constexpr u32 kPageTokens = 64;
constexpr u32 kPadPosition = 0xffffffff;  // of a row without a token
enum Half : u32 { kKey = 0, kValue = 1 };

// Bits of a line that its chunks are exchanged by.
UW_DEVICE constexpr u32 chunk_mask(u32 head_dim) {
    const u32 chunks = head_dim / 8, power = chunks & (0u - chunks);
    return (power < 8 ? power : 8) - 1;
}

// Element of chunk `chunk` of a line, from the start of its [64][head_dim].
UW_DEVICE constexpr u32 chunk_offset(u32 head_dim, u32 line, u32 chunk) {
    return line * head_dim + (chunk ^ (line & chunk_mask(head_dim))) * 8;
}

// Element of the [64][head_dim] of a page, from the start of the layer.
UW_DEVICE constexpr u64 tile_offset(u32 head_dim, u32 kv_heads, u32 page, u32 kv_head, Half half) {
    return ((static_cast<u64>(page) * kv_heads + kv_head) * 2 + half) * (kPageTokens * head_dim);
}

}  // namespace uw::kv
