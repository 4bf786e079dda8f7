// Norms: y[r] = norm(x[s]), s = r, or rows[r] if a list is given.
//
// Config
//   u32  kThreads   a multiple of 32 up to 1024; d is at most kColumnsMax
//   NormKind kKind  kRms      bf16(gamma * bf16(x * rsqrt(mean(x^2) + eps)))
//                   kRmsOnce  bf16(gamma * (x * rsqrt(mean(x^2) + eps)))
//                   kRmsPlusOne  bf16((1 + gamma) * (x * rsqrt(mean(x^2) + eps)))
//                   kLayer    bf16(gamma * (c * rsqrt(mean(c^2) + eps))), c = x - mean(x)
//             kLayerBias  as kLayer, plus beta before the rounding; beta [d] follows gamma
//   bool kAdd       y[r] += norm(x[s]), added before the last rounding
//   bool kPdl       programmatic dependent launch: gamma is read before griddepcontrol.wait, everything else is
//                   accessed after it
//
// Launch: kThreads threads, Smem<Config>::kBytes of dynamic shared memory, one block per row. d is a multiple of 8;
// rows and gamma are 16-byte aligned.
//
// Roles: none. Thread t holds chunks of 8 columns t, t + kThreads, ... of x and gamma in registers, so x is read once.
// beta is read last: a third row would not fit.
// y may alias x: a thread writes only elements that no other thread reads.
// Barriers: one block barrier between writing the sums of the warps and adding them; kLayer and kLayerBias: two.
// Shared memory = kThreads / 32 * 4: fp32 sums of the warps; with a mean twice that, for x and for the squares.
//
// Sums     a thread's squares in order of columns, a warp's by butterfly, the warps' in order: a row's bits depend only
//          on the row.
// Safety   an entry of the list that is not a row gives zeros (kAdd: y unchanged) and is reported; nothing is read for
//          it.
// Bound    device memory, 4 * m * d bytes, kAdd: 6 * m * d; for few rows the latency of two dependent loads.
#pragma once

#include "unweight/activation/element.cuh"
#include "unweight/axes.cuh"
#include "unweight/ptx/barrier.cuh"
#include "unweight/ptx/control.cuh"
#include "unweight/ptx/memory.cuh"

namespace uw::norm {

constexpr u32 kColumnsMax = 16384;
constexpr u32 kChunk = 8;

template <class Config>
constexpr u32 kThreads = Config::kThreads;

template <class Config>
constexpr bool kBiased = Config::kKind == NormKind::kLayerBias;

template <class Config>
constexpr bool kCentred = Config::kKind == NormKind::kLayer || kBiased<Config>;

template <class Config>
struct Smem {
    static constexpr u32 kSums = 0;
    static constexpr u32 kSquares = kSums + (kCentred<Config> ? Config::kThreads / 32 * 4 : 0);
    static constexpr u32 kBytes = kSquares + Config::kThreads / 32 * 4;
};

UW_DEVICE void add_squares(float& sum, U32x4 x) {
    sum = activation::add_squares(sum, x.x);
    sum = activation::add_squares(sum, x.y);
    sum = activation::add_squares(sum, x.z);
    sum = activation::add_squares(sum, x.w);
}

UW_DEVICE U32x4 scale(U32x4 x, U32x4 gamma, float factor) {
    return {activation::scale_norm(x.x, gamma.x, factor), activation::scale_norm(x.y, gamma.y, factor),
            activation::scale_norm(x.z, gamma.z, factor), activation::scale_norm(x.w, gamma.w, factor)};
}

// The sum over the block, bit-identical in every thread; each sum has its own `section` of shared memory.
template <class Config>
UW_DEVICE float block_sum(float sum, u32 section) {
    const u32 sums = ptx::cvta_to_shared(ptx::dynamic_smem()) + section;
#pragma unroll
    for (u32 distance = 16; distance != 0; distance /= 2) {
        sum = ptx::add(sum, ptx::float_from_bits(ptx::shfl_sync_bfly(ptx::bits_from_float(sum), distance)));
    }
    const u32 thread = ptx::tid();
    if (thread % 32 == 0) ptx::st_shared(sums + thread / 32 * 4, ptx::bits_from_float(sum));
    ptx::bar_sync();  // orders every warp's sum before the loads
    sum = 0;
#pragma unroll
    for (u32 warp = 0; warp < Config::kThreads / 32; ++warp) {
        sum = ptx::add(sum, ptx::float_from_bits(ptx::ld_shared(sums + warp * 4)));
    }
    return sum;
}

UW_DEVICE void add_elements(float& sum, u32 x) {
    sum = ptx::add(sum, activation::low_of(x));
    sum = ptx::add(sum, activation::high_of(x));
}
UW_DEVICE void add_centred(float& sum, u32 x, float middle) {
    const float low = ptx::add(activation::low_of(x), -middle);
    const float high = ptx::add(activation::high_of(x), -middle);
    sum = ptx::fma(high, high, ptx::fma(low, low, sum));
}

// One word of y, from words of x, gamma and beta (kLayerBias) and from the old word of y (kAdd).
template <class Config>
UW_DEVICE u32 normed(u32 x, u32 gamma, [[maybe_unused]] u32 beta, u32 y, float middle, float factor) {
    using namespace activation;
    float low = low_of(x), high = high_of(x);
    if constexpr (kCentred<Config>) {
        low = ptx::add(low, -middle);
        high = ptx::add(high, -middle);
    }
    low = ptx::mul(low, factor);
    high = ptx::mul(high, factor);
    if constexpr (Config::kKind == NormKind::kRms) {
        const u32 rounded = ptx::cvt_rn_bf16x2(low, high);
        low = low_of(rounded);
        high = high_of(rounded);
    }
    if constexpr (Config::kKind == NormKind::kRmsPlusOne) {
        low = ptx::mul(low, ptx::add(1.0f, low_of(gamma)));
        high = ptx::mul(high, ptx::add(1.0f, high_of(gamma)));
    } else {
        low = ptx::mul(low, low_of(gamma));
        high = ptx::mul(high, high_of(gamma));
    }
    if constexpr (kBiased<Config>) {
        low = ptx::add(low, low_of(beta));
        high = ptx::add(high, high_of(beta));
    }
    if constexpr (Config::kAdd) {
        low = ptx::add(low_of(y), low);
        high = ptx::add(high_of(y), high);
    }
    return ptx::cvt_rn_bf16x2(low, high);
}

template <class Config>
UW_DEVICE void run(const NormArgs& args) {
    constexpr u32 kPieces = kColumnsMax / (Config::kThreads * kChunk);
    static_assert(kPieces * Config::kThreads * kChunk == kColumnsMax, "threads divide the columns");
    const u32 thread = ptx::tid(), row = ptx::ctaid(), chunks = args.d / kChunk;
    if constexpr (Config::kPdl) ptx::griddepcontrol_launch_dependents();

    U32x4 gamma[kPieces], x[kPieces];
#pragma unroll
    for (u32 i = 0; i < kPieces; ++i) {
        const u32 chunk = thread + i * Config::kThreads;
        if (chunk < chunks) gamma[i] = ptx::ld_global_nc_x4(args.gamma + chunk * kChunk);
    }
    if constexpr (Config::kPdl) ptx::griddepcontrol_wait();

    u32 source = row;
    u16* const y = args.y + row * args.y_pitch;
    if (args.rows != nullptr) {
        source = ptx::ld_global(args.rows + row);
        if (source >= args.source_rows) {
            if constexpr (!Config::kAdd) {
                for (u32 chunk = thread; chunk < chunks; chunk += Config::kThreads) {
                    ptx::st_global_x4(y + chunk * kChunk, {0, 0, 0, 0});
                }
            }
            if (thread == 0) ptx::st_global(args.fault, row + 1);
            return;
        }
    }
    const u16* const from = args.x + source * args.x_pitch;
    float sum = 0;
#pragma unroll
    for (u32 i = 0; i < kPieces; ++i) {
        const u32 chunk = thread + i * Config::kThreads;
        if (chunk < chunks) x[i] = ptx::ld_global_x4(from + chunk * kChunk);
    }
    float middle = 0;
    if constexpr (kCentred<Config>) {
#pragma unroll
        for (u32 i = 0; i < kPieces; ++i) {
            if (thread + i * Config::kThreads >= chunks) continue;
            add_elements(middle, x[i].x);
            add_elements(middle, x[i].y);
            add_elements(middle, x[i].z);
            add_elements(middle, x[i].w);
        }
        middle = ptx::div(block_sum<Config>(middle, Smem<Config>::kSums), static_cast<float>(args.d));
#pragma unroll
        for (u32 i = 0; i < kPieces; ++i) {
            if (thread + i * Config::kThreads >= chunks) continue;
            add_centred(sum, x[i].x, middle);
            add_centred(sum, x[i].y, middle);
            add_centred(sum, x[i].z, middle);
            add_centred(sum, x[i].w, middle);
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < kPieces; ++i) {
            if (thread + i * Config::kThreads < chunks) add_squares(sum, x[i]);
        }
    }
    const float factor = activation::norm_scale(block_sum<Config>(sum, Smem<Config>::kSquares), args.d, args.eps);
#pragma unroll
    for (u32 i = 0; i < kPieces; ++i) {
        const u32 chunk = thread + i * Config::kThreads;
        if (chunk >= chunks) continue;
        if constexpr (Config::kKind == NormKind::kRms && !Config::kAdd) {
            ptx::st_global_x4(y + chunk * kChunk, scale(x[i], gamma[i], factor));
        } else {
            U32x4 before{0, 0, 0, 0}, beta{0, 0, 0, 0};
            if constexpr (kBiased<Config>) beta = ptx::ld_global_nc_x4(args.gamma + args.d + chunk * kChunk);
            if constexpr (Config::kAdd) before = ptx::ld_global_x4(y + chunk * kChunk);
            const U32x4 after{normed<Config>(x[i].x, gamma[i].x, beta.x, before.x, middle, factor),
                              normed<Config>(x[i].y, gamma[i].y, beta.y, before.y, middle, factor),
                              normed<Config>(x[i].z, gamma[i].z, beta.z, before.z, middle, factor),
                              normed<Config>(x[i].w, gamma[i].w, beta.w, before.w, middle, factor)};
            ptx::st_global_x4(y + chunk * kChunk, after);
        }
    }
}

}  // namespace uw::norm
