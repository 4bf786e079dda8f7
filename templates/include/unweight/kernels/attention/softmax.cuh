// Online softmax and fragment loads, shared by both attention kernels: a warp has 16 rows of queries, for mma.m16n8k16.
// Lane = 4g + t holds rows g and g + 8, and columns 2t and 2t + 1 of each 8 columns.
#pragma once

#include "unweight/activation/element.cuh"
#include "unweight/encoding/kv_page.cuh"
#include "unweight/ptx/core.cuh"
#include "unweight/ptx/memory.cuh"
#include "unweight/ptx/mma.cuh"

namespace uw::attention {

constexpr u32 kRows = 16;  // the m dimension of m16n8k16
constexpr u32 kKey = 0, kValue = 1;
constexpr u32 kPadPosition = ~0u;  // marks a row without a token

// The score of a masked token.
UW_DEVICE float left_out() { return ptx::float_from_bits(0xff800000u); }  // -infinity

UW_DEVICE float shfl_sync_bfly(float value, u32 mask) {
    return ptx::float_from_bits(ptx::shfl_sync_bfly(ptx::bits_from_float(value), mask));
}

// Soft cap: replaces each score by tanh(score * factor). The remaining multiplication by the cap is part of `scale`.
template <u32 kColumns>
UW_DEVICE void cap_scores(float (&scores)[kColumns][4], float factor) {
#pragma unroll
    for (u32 c = 0; c < kColumns; ++c) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) scores[c][i] = activation::tanh(ptx::mul(scores[c][i], factor));
    }
}

// Elements 2 * pair and 2 * pair + 1 of a head, not yet divided by the sum of weights; `top` is the maximum score.
struct Total {
    float top, sum, low, high;
};
// 1 / sum; 0 for a row without weights.
UW_DEVICE float inverse(float sum) { return sum == 0.0f ? 0.0f : ptx::div(1.0f, sum); }

UW_DEVICE void store_floats(u32 address, float low, float high) {
    ptx::st_shared_x2(address, U32x2{ptx::bits_from_float(low), ptx::bits_from_float(high)});
}

// Addresses that one lane passes to ldmatrix, for tiles of whole groups of 8 rows in the layout of a page. The lane
// takes row `row`, and the even or odd chunk (`odd`) of each pair.
template <u32 kHeadDim>
struct Lines {
    static constexpr u32 kShift = kv::line_shift(kHeadDim), kMask = (1u << kShift) - 1;
    u32 line, place;

    UW_DEVICE Lines(u32 row, u32 odd)
        : line(row / kv::kGroupTokens * (kv::kGroupTokens * kHeadDim * 2) + (row % kv::kGroupTokens << kShift) * 16),
          place((odd ^ row % kv::kGroupTokens >> (3 - kShift)) * 16) {}
    // Address of chunk 2 * pair + odd of the row.
    UW_DEVICE u32 at(u32 tile, u32 pair) const {
        const u32 atom = (2 * pair) >> kShift, inside = (2 * pair & kMask) * 16;
        return tile + line + (atom * kv::kGroupTokens << kShift) * 16 + (place ^ inside);
    }
};

// Online softmax of 16 rows: o = sum(p * v), sum = sum(p), p = 2^((score - max) * scale) rounded to bf16.
template <u32 kHeadDim>
struct Rows {
    static constexpr u32 kFragments = kHeadDim / 8;
    float o[kFragments][4];
    float max[2], sum[2];  // sum: over this lane's columns only

    UW_DEVICE void clear() {
#pragma unroll
        for (u32 f = 0; f < kFragments; ++f) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) o[f][i] = 0.0f;
        }
        max[0] = max[1] = left_out();
        sum[0] = sum[1] = 0.0f;
    }

    // Turns scores of 8 * kColumns tokens into operands of the product with V, and rescales earlier sums to the new
    // maximum. A row may have no tokens in this tile, or none at all.
    template <u32 kColumns>
    UW_DEVICE void weigh(const float (&scores)[kColumns][4], float scale, u32 (&p)[kColumns / 2][4]) {
        float shift[2], factor[2];
        bool moved = false;
#pragma unroll
        for (u32 r = 0; r < 2; ++r) {
            float top = ptx::max(scores[0][2 * r], scores[0][2 * r + 1]);
#pragma unroll
            for (u32 c = 1; c < kColumns; ++c) {
                top = ptx::max(top, ptx::max(scores[c][2 * r], scores[c][2 * r + 1]));
            }
            top = ptx::max(top, shfl_sync_bfly(top, 1));
            top = ptx::max(top, shfl_sync_bfly(top, 2));
            top = ptx::max(top, max[r]);
            // A row without tokens so far has no maximum: subtract nothing.
            shift[r] = top == left_out() ? 0.0f : top * scale;
            factor[r] = ptx::ex2_approx(max[r] * scale - shift[r]);
            moved |= top != max[r];
            max[r] = top;
        }
        // Most tiles change no maximum. The factor of a row whose maximum stays is exactly 1, so its bits do not depend
        // on other rows.
        if (ptx::vote_sync_ballot(moved) != 0) {
#pragma unroll
            for (u32 r = 0; r < 2; ++r) {
                sum[r] *= factor[r];
#pragma unroll
                for (u32 f = 0; f < kFragments; ++f) {
                    o[f][2 * r] *= factor[r];
                    o[f][2 * r + 1] *= factor[r];
                }
            }
        }
#pragma unroll
        for (u32 c = 0; c < kColumns; ++c) {
#pragma unroll
            for (u32 r = 0; r < 2; ++r) {
                const u32 pair = ptx::cvt_rn_bf16x2(ptx::ex2_approx(scores[c][2 * r] * scale - shift[r]),
                                                    ptx::ex2_approx(scores[c][2 * r + 1] * scale - shift[r]));
                p[c / 2][c % 2 * 2 + r] = pair;
                // The divisor sums the rounded weights, which multiply V.
                sum[r] += activation::low_of(pair) + activation::high_of(pair);
            }
        }
    }

    // Reduces the sums over all columns of the row, in every lane that holds it.
    UW_DEVICE void finish() {
#pragma unroll
        for (u32 r = 0; r < 2; ++r) {
            sum[r] += shfl_sync_bfly(sum[r], 1);
            sum[r] += shfl_sync_bfly(sum[r], 2);
        }
    }
};

// Loads the queries as A operands: 16 rows, for each step of 16 elements of a head.
template <u32 kHeadDim>
UW_DEVICE void load_queries(u32 (&q)[kHeadDim / 16][4], u32 tile, u32 lane) {
    const Lines<kHeadDim> lines(lane % 16, lane / 16);
#pragma unroll
    for (u32 s = 0; s < kHeadDim / 16; ++s) {
        const U32x4 v = ptx::ldmatrix_x4(lines.at(tile, s));
        q[s][0] = v.x;
        q[s][1] = v.y;
        q[s][2] = v.z;
        q[s][3] = v.w;
    }
}

// queries * K of a tile's first 8 tokens and of the next 8. `lines`: row lane % 8 + lane / 16 * 8, odd lane / 8 % 2.
template <u32 kHeadDim>
UW_DEVICE void score(float (&low)[4], float (&high)[4], const u32 (&q)[kHeadDim / 16][4], const Lines<kHeadDim>& lines,
                     u32 tile) {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) low[i] = high[i] = 0.0f;
#pragma unroll
    for (u32 s = 0; s < kHeadDim / 16; ++s) {
        const U32x4 k = ptx::ldmatrix_x4(lines.at(tile, s));
        const u32 first[2] = {k.x, k.y}, second[2] = {k.z, k.w};
        ptx::mma_m16n8k16(low, q[s], first);
        ptx::mma_m16n8k16(high, q[s], second);
    }
}

}  // namespace uw::attention
