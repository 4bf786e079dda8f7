// Decodes the packed encoding (docs/format.md, A.9) back to the original bf16 weights, bit for bit.
#pragma once

#include "unweight/encoding/escapes.cuh"
#include "unweight/encoding/packed.cuh"

namespace uw::packed {

constexpr u32 kFree = 0x78007800;      // bits of a container word that hold P3
constexpr u32 kOperandExponent = 112;  // exponent of an operand with nibble 0
constexpr u32 kInexact = 1u << 16;     // flag above the 16 bits of a value

// The lowest exponent of the window, in both halves of a word.
UW_DEVICE u32 pair_of_exponents(u32 exponent) { return exponent << 7 | exponent << 23; }

// Decodes the 12 words of a lane to weights, without its escapes.
UW_DEVICE Operands weights_of(const u32 (&words)[12], u32 bases) {
    Operands weights;
#pragma unroll
    for (u32 s = 0; s < kSteps; ++s) {
        const u32 w0 = words[3 * s], w1 = words[3 * s + 1], w2 = words[3 * s + 2];
        u32* p = weights.p + 4 * s;
        p[0] = (w0 & ~kFree) + bases;
        p[1] = (w1 & ~kFree) + bases;
        p[2] = (w2 & ~kFree) + bases;
        p[3] = ((w0 & kFree) >> 4 | (w1 & kFree) >> 8 | ptx::shf_l_wrap(w2 & kFree, w2 & kFree, 4)) + bases;
    }
    return weights;
}

// value * 2^shift in bf16, or kInexact; zeros, Inf and NaN are unchanged.
UW_DEVICE u32 times_power_of_two(u32 value, i32 shift) {
    const u32 sign = value & 0x8000, exponent = value >> 7 & 0xff, mantissa = value & 0x7f;
    if (exponent == 0xff || (value & 0x7fff) == 0) return value;
    // value = significand * 2^(place - 134), the leading one at bit 7.
    u32 significand = exponent == 0 ? mantissa : mantissa | 0x80;
    const u32 zeros = ptx::clz(significand) - 24;
    const i32 place = static_cast<i32>(exponent == 0 ? 1 : exponent) - static_cast<i32>(zeros) + shift;
    significand <<= zeros;
    if (place > 254) return kInexact;
    if (place >= 1) return sign | static_cast<u32>(place) << 7 | (significand & 0x7f);
    const u32 lost = static_cast<u32>(1 - place);
    if (lost > 7 || (significand & ((1u << lost) - 1)) != 0) return kInexact;
    return sign | significand >> lost;
}

// The weight that an escape's operand encodes.
UW_DEVICE u32 weight_of(u32 operand, u32 base) {
    return times_power_of_two(operand, static_cast<i32>(base) - static_cast<i32>(kOperandExponent)) & 0xffff;
}

// A record (encoding/escapes.cuh) whose operand is replaced by its weight, for `patch` on weights.
UW_DEVICE u32 record_of_weight(u32 record, u32 base) { return (record & ~0xffffu) | weight_of(record & 0xffff, base); }

}  // namespace uw::packed
