// Elements of activations, in fp32 between two roundings to bf16. Kernels that compute the same values share these
// functions. Products and sums are explicit instructions, so that the compiler cannot contract them differently in two
// kernels.
#pragma once

#include "unweight/ptx/core.cuh"

namespace uw::activation {

// The two bf16 of a word, exactly.
UW_DEVICE float low_of(u32 pair) { return ptx::float_from_bits(pair << 16); }
UW_DEVICE float high_of(u32 pair) { return ptx::float_from_bits(pair & 0xffff0000u); }

// x + bias, for two words of bf16, each element rounded.
UW_DEVICE u32 add_bias(u32 x, u32 bias) {
    return ptx::cvt_rn_bf16x2(ptx::add(low_of(x), low_of(bias)), ptx::add(high_of(x), high_of(bias)));
}

// bf16(gamma * bf16(x * scale)), scale = rsqrt(mean(x^2) + eps): rounds before multiplying by the weight, as in the
// training of models.
UW_DEVICE u32 scale_norm(u32 x, u32 gamma, float scale) {
    const u32 y = ptx::cvt_rn_bf16x2(ptx::mul(low_of(x), scale), ptx::mul(high_of(x), scale));
    return ptx::cvt_rn_bf16x2(ptx::mul(low_of(y), low_of(gamma)), ptx::mul(high_of(y), high_of(gamma)));
}

// bf16((1 + gamma) * (x * scale)): the weight is the difference of the factor from one; rounds once.
UW_DEVICE u32 scale_norm_plus_one(u32 x, u32 gamma, float scale) {
    return ptx::cvt_rn_bf16x2(ptx::mul(ptx::mul(low_of(x), scale), ptx::add(1.0f, low_of(gamma))),
                              ptx::mul(ptx::mul(high_of(x), scale), ptx::add(1.0f, high_of(gamma))));
}

// tanh(x) = 1 - 2 / (1 + e^2x). Its absolute error is a few 2^-24.
UW_DEVICE float tanh(float x) {
    return ptx::add(1.0f, -ptx::div(2.0f, ptx::add(1.0f, ptx::ex2_approx(ptx::mul(x, 2.88539008f)))));
}

// sum + the squares of a word, lower element first.
UW_DEVICE float add_squares(float sum, u32 x) {
    return ptx::fma(high_of(x), high_of(x), ptx::fma(low_of(x), low_of(x), sum));
}

// The scale of a norm over `count` elements.
UW_DEVICE float norm_scale(float sum_of_squares, u32 count, float eps) {
    return ptx::rsqrt_approx(ptx::add(ptx::div(sum_of_squares, static_cast<float>(count)), eps));
}

// Rotates elements i and i + rope_dim / 2 of a head, one pair of each per word, by their angles; rounds once.
UW_DEVICE void rotate(u32& first, u32& second, u32 cosines, u32 sines) {
    const float a0 = low_of(first), a1 = high_of(first), b0 = low_of(second), b1 = high_of(second);
    const float c0 = low_of(cosines), c1 = high_of(cosines), s0 = low_of(sines), s1 = high_of(sines);
    first = ptx::cvt_rn_bf16x2(ptx::fma(a0, c0, -ptx::mul(b0, s0)), ptx::fma(a1, c1, -ptx::mul(b1, s1)));
    second = ptx::cvt_rn_bf16x2(ptx::fma(b0, c0, ptx::mul(a0, s0)), ptx::fma(b1, c1, ptx::mul(a1, s1)));
}

// Rotates elements 2i and 2i + 1 of a head, one pair per word, by their angle; rounds once. `first` takes the lower
// angle, `second` the upper one.
UW_DEVICE void rotate_adjacent(u32& first, u32& second, u32 cosines, u32 sines) {
    const float a0 = low_of(first), a1 = high_of(first), b0 = low_of(second), b1 = high_of(second);
    const float c0 = low_of(cosines), c1 = high_of(cosines), s0 = low_of(sines), s1 = high_of(sines);
    first = ptx::cvt_rn_bf16x2(ptx::fma(a0, c0, -ptx::mul(a1, s0)), ptx::fma(a1, c0, ptx::mul(a0, s0)));
    second = ptx::cvt_rn_bf16x2(ptx::fma(b0, c1, -ptx::mul(b1, s1)), ptx::fma(b1, c1, ptx::mul(b0, s1)));
}

}  // namespace uw::activation
