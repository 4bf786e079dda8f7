// Joins BF16 from its parts: the byte `sign_mantissa` (sign | 7 bits of mantissa) and the exponent e of a weight.
//   high byte = sign   | e >> 1        low byte = (e & 1) << 7 | mantissa
// Both are bitwise selects of whole words; interleaving the bytes of the two words of four weights then gives two words
// of two weights each.
//
//   exponent bytes    6 integer operations per 4 weights (1.5 each): two shifts, two selects, two interleaves
//   palette nibbles   9 per 4 plus 3 per 8 (2.625 each), for any palette; see PaletteTable
#pragma once

#include "unweight/ptx/core.cuh"

namespace uw::mma {

constexpr u32 kSigns = 0x80808080u;
constexpr u32 kMantissas = 0x7f7f7f7fu;

// Sixteen weights of one row, in order.
struct Bf16x16 {
    U32x4 low, high;
};

UW_DEVICE void interleave(u32 high_bytes, u32 low_bytes, u32& first, u32& second) {
    first = ptx::prmt(low_bytes, high_bytes, 0x5140);
    second = ptx::prmt(low_bytes, high_bytes, 0x7362);
}

UW_DEVICE void join_exponents(u32 sign_mantissa, u32 exponents, u32& first, u32& second) {
    // The shifts leak a bit across bytes only where the select takes the other operand.
    const u32 high = ptx::bit_select(kSigns, sign_mantissa, exponents >> 1);
    const u32 low = ptx::bit_select(kMantissas, sign_mantissa, exponents << 7);
    interleave(high, low, first, second);
}

UW_DEVICE Bf16x16 join_exponents(U32x4 sign_mantissa, U32x4 exponents) {
    Bf16x16 r;
    join_exponents(sign_mantissa.x, exponents.x, r.low.x, r.low.y);
    join_exponents(sign_mantissa.y, exponents.y, r.low.z, r.low.w);
    join_exponents(sign_mantissa.z, exponents.z, r.high.x, r.high.y);
    join_exponents(sign_mantissa.w, exponents.w, r.high.z, r.high.w);
    return r;
}

// The palette as three prmt tables. A selector nibble i < 8 selects byte i of a table; i >= 8 selects the replicated
// sign of byte i-8.
//   upper_low   e[i] >> 1, i = 0..7     top bit 0, so an index >= 8 gives 0x00
//   upper_high  e[i+8] >> 1             looked up with index ^ 8; the two lookups are ORed
//   lowest      bit 6 = e[i] & 1, bit 7 = e[i+8] & 1: either way bit 6 of the result is the exponent's lowest bit
// One lookup per table, no mux, any palette. (Two lookups of whole exponents and a mux would need a mask per nibble:
// one more operation per 4 weights.)
struct PaletteTable {
    u32 upper_low[2];
    u32 upper_high[2];
    u32 lowest[2];

    // palette: 16 bytes as four words.
    UW_DEVICE explicit PaletteTable(U32x4 palette) {
        upper_low[0] = palette.x >> 1 & kMantissas;
        upper_low[1] = palette.y >> 1 & kMantissas;
        upper_high[0] = palette.z >> 1 & kMantissas;
        upper_high[1] = palette.w >> 1 & kMantissas;
        lowest[0] = (palette.x << 6 & 0x40404040u) | (palette.z << 7 & kSigns);
        lowest[1] = (palette.y << 6 & 0x40404040u) | (palette.w << 7 & kSigns);
    }

    // Four weights whose indices are the low four nibbles of `indices` (and of `flipped` = indices ^ 0x8888).
    UW_DEVICE void join(u32 sign_mantissa, u32 indices, u32 flipped, u32& first, u32& second) const {
        const u32 upper = ptx::prmt(upper_low[0], upper_low[1], indices) | (sign_mantissa & kSigns);
        const u32 high = upper | ptx::prmt(upper_high[0], upper_high[1], flipped);
        const u32 low = ptx::bit_select(kMantissas, sign_mantissa, ptx::prmt(lowest[0], lowest[1], indices) << 1);
        interleave(high, low, first, second);
    }

    UW_DEVICE Bf16x16 join(U32x4 sign_mantissa, U32x2 indices) const {
        Bf16x16 r;
        const u32 fx = indices.x ^ 0x88888888u, fy = indices.y ^ 0x88888888u;
        join(sign_mantissa.x, indices.x, fx, r.low.x, r.low.y);
        join(sign_mantissa.y, indices.x >> 16, fx >> 16, r.low.z, r.low.w);
        join(sign_mantissa.z, indices.y, fy, r.high.x, r.high.y);
        join(sign_mantissa.w, indices.y >> 16, fy >> 16, r.high.z, r.high.w);
        return r;
    }
};

}  // namespace uw::mma
