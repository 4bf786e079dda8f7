// Thread identity, warp exchange and bit operations: one wrapper per instruction.
#pragma once

#include "unweight/ptx/types.cuh"

#ifndef UW_CPU

namespace uw::ptx {

UW_DEVICE u32 tid() { return threadIdx.x; }
UW_DEVICE u32 ctaid() { return blockIdx.x; }
UW_DEVICE u32 nctaid() { return gridDim.x; }
UW_DEVICE u32 laneid() {
    u32 lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// Warp index within the block, through a shuffle, so that the compiler knows it to be warp-uniform and omits divergence
// handling for branches on it.
UW_DEVICE u32 uniform_warp_index() { return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); }

// True in exactly one lane of a converged warp.
UW_DEVICE bool elect_sync() {
#if __CUDA_ARCH__ < 900
    return threadIdx.x % 32 == 0;  // blocks have one dimension
#else
    u32 chosen;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(chosen));
    return chosen != 0;
#endif
}

UW_DEVICE void bar_warp_sync() { __syncwarp(); }
UW_DEVICE u32 shfl_sync_idx(u32 value, u32 source_lane) { return __shfl_sync(0xffffffffu, value, source_lane); }
UW_DEVICE u32 shfl_sync_bfly(u32 value, u32 lane_mask) { return __shfl_xor_sync(0xffffffffu, value, lane_mask); }
// Lane l receives lane l - delta; lanes below delta keep their own value.
UW_DEVICE u32 shfl_sync_up(u32 value, u32 delta) { return __shfl_up_sync(0xffffffffu, value, delta); }
UW_DEVICE u32 vote_sync_ballot(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }
UW_DEVICE u32 match_any_sync(u32 value) { return __match_any_sync(0xffffffffu, value); }
// The largest, and the smallest, value of the warp's lanes.
UW_DEVICE u32 redux_sync_max(u32 value) { return __reduce_max_sync(0xffffffffu, value); }
UW_DEVICE u32 redux_sync_min(u32 value) { return __reduce_min_sync(0xffffffffu, value); }

UW_DEVICE u32 popc(u32 value) { return __popc(value); }
UW_DEVICE u32 clz(u32 value) { return __clz(value); }
UW_DEVICE u32 find_first_set(u32 value) { return __ffs(value); }
UW_DEVICE u32 brev(u32 value) { return __brev(value); }

// prmt.b32 in its default mode: output byte i is byte `selector nibble i & 7` of {b, a}; with bit 3 of the nibble set
// it is that byte's sign, replicated. __byte_perm masks the selector to 3 bits and so cannot express the second half.
UW_DEVICE u32 prmt(u32 a, u32 b, u32 selector) {
    u32 d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
    return d;
}

// Bitwise function of three words; kTable is indexed by (a << 2 | b << 1 | c).
template <u32 kTable>
UW_DEVICE u32 lop3(u32 a, u32 b, u32 c) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(kTable));
    return d;
}

// (high:low >> (shift & 31)), low word; and (high:low << (shift & 31)), high word.
UW_DEVICE u32 shf_r_wrap(u32 low, u32 high, u32 shift) { return __funnelshift_r(low, high, shift); }
UW_DEVICE u32 shf_l_wrap(u32 low, u32 high, u32 shift) { return __funnelshift_l(low, high, shift); }

// {high, low} rounded to nearest even, low in the lower half.
UW_DEVICE u32 cvt_rn_bf16x2(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
// 2^value, about 22 bits; subnormal results are 0.
UW_DEVICE float ex2_approx(float value) {
    float d;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(value));
    return d;
}
// 1 / value, about 23 bits; subnormal arguments and results are 0.
UW_DEVICE float rcp_approx(float value) {
    float d;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(value));
    return d;
}
// The larger one; NaN only if both are NaN.
UW_DEVICE float max(float a, float b) {
    float d;
    asm("max.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}
// 1 / sqrt(value), about 22 bits.
UW_DEVICE float rsqrt_approx(float value) {
    float d;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(d) : "f"(value));
    return d;
}
// Rounded to nearest even, and never contracted: the compiler may turn a product and a sum into an fma, but not these.
UW_DEVICE float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
UW_DEVICE float mul(float a, float b) { return __fmul_rn(a, b); }
UW_DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
UW_DEVICE float div(float a, float b) { return __fdiv_rn(a, b); }
UW_DEVICE float float_from_bits(u32 bits) { return __uint_as_float(bits); }
UW_DEVICE u32 bits_from_float(float value) { return __float_as_uint(value); }

// No instruction at run time. Computations from `value` that follow stay after this point, even across other
// instructions that the compiler could otherwise reorder.
UW_DEVICE void pin(u32& value) { asm volatile("" : "+r"(value)); }
UW_DEVICE void pin(float& value) { asm volatile("" : "+f"(value)); }

// Stops the kernel with an error.
UW_DEVICE void trap() { asm volatile("trap;"); }

}  // namespace uw::ptx

#endif  // UW_CPU

namespace uw::ptx {

// mask ? a : b, bit by bit.
UW_DEVICE u32 bit_select(u32 mask, u32 a, u32 b) { return lop3<0xCA>(mask, a, b); }

}  // namespace uw::ptx
