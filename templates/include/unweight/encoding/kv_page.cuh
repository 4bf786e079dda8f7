// A page of the KV cache: kPageTokens tokens of one layer, bf16 [kv_head][K | V][tokens in groups of 8, below].
//
// The tokens of K (or V) are stored in consecutive groups of 8. A group has head_dim / (8 * chunks) consecutive atoms.
// An atom is 8 lines of `chunks` 16-byte chunks, line = token % 8. `chunks` is 8 if head_dim is a multiple of 64,
// otherwise 4, 2 or 1: the largest of these that divides the number of chunks of a token. Chunk c of a line is stored
// at c ^ (token % 8) * chunks / 8.
//
// Therefore any range of whole groups is one contiguous bulk copy, ldmatrix reads 8 x 8 matrices of 16-bit elements
// from a tile without bank conflicts, and an atom is a wgmma operand in the 128-, 64- or 32-byte swizzle (as stored for
// K, transposed for V) if the tile is suitably aligned. unweight-codegen/src/kv/mod.rs computes the same layout.
#pragma once

#include "unweight/ptx/types.cuh"

namespace uw::kv {

constexpr u32 kPageTokens = 64;
constexpr u32 kGroupTokens = 8;
constexpr u32 kChunkBytes = 16;
constexpr u32 kChunkElements = 8;

// log2 of the chunks of a line.
constexpr UW_DEVICE u32 line_shift(u32 head_dim) {
    return head_dim % 64 == 0 ? 3 : head_dim % 32 == 0 ? 2 : head_dim % 16 == 0 ? 1 : 0;
}

// Bytes of K, or of V, of one KV head in one page.
constexpr UW_DEVICE u32 head_bytes(u32 head_dim) { return kPageTokens * head_dim * 2; }

// Byte offset of a chunk (0 .. head_dim / 8) of a token (0 .. kPageTokens) from the start of K or V of one KV head. It
// is the same in a tile of whole groups in shared memory.
constexpr UW_DEVICE u32 chunk_offset(u32 head_dim, u32 token, u32 chunk) {
    const u32 shift = line_shift(head_dim), line = token % kGroupTokens;
    const u32 atom = chunk >> shift, place = (chunk & ((1u << shift) - 1)) ^ (line >> (3 - shift));
    return token / kGroupTokens * (kGroupTokens * head_dim * 2) +
           ((atom * kGroupTokens + line) << shift | place) * kChunkBytes;
}

// Elements from the start of a layer's cache to K (value = 0) or V (value = 1) of one KV head in one page.
UW_DEVICE u64 head_element(u32 head_dim, u32 kv_heads, u32 page, u32 kv_head, u32 value) {
    return ((u64(page) * kv_heads + kv_head) * 2 + value) * (kPageTokens * head_dim);
}

}  // namespace uw::kv
