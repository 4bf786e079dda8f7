// RMSNorm: y[r] = bf16(gamma * bf16(x[s] * rsqrt(mean(x[s]^2) + eps))), s = r, or rows[r] where there is a list.
//
// Config
//   u32  kThreads  a multiple of 32 up to 1024; d is at most kColumnsMax
//   bool kPdl      programmatic dependent launch: gamma is read before griddepcontrol.wait, all else after it
//
// Launch: kThreads threads, Smem<Config>::kBytes of dynamic shared memory, a block a row. d is a multiple of 8; rows
// and gamma are 16-byte aligned.
//
// Roles: none. Thread t holds chunks of 8 columns t, t + kThreads, ... of x and gamma in registers, so x is read once.
// Barriers: the block meets once, between writing the sums of its warps and adding them up.
// Shared memory = kThreads / 32 * 4: fp32 sums of the warps.
//
// Sums     a thread's squares in the order of columns, a warp's by a butterfly, the warps' in their order: a row's bits
//          depend on nothing but the row.
// Safety   an entry of the list that names no row gives zeros and a report; nothing is read for it.
// Bound    device memory, 4 * m * d bytes; of few rows the latency of two loads that follow each other.
#pragma once

#include "unweight/activation/element.cuh"
#include "unweight/ptx/barrier.cuh"
#include "unweight/ptx/control.cuh"
#include "unweight/ptx/memory.cuh"

namespace uw::norm {

constexpr u32 kColumnsMax = 16384;
constexpr u32 kChunk = 8;

template <class Config>
constexpr u32 kThreads = Config::kThreads;

template <class Config>
struct Smem {
    static constexpr u32 kSums = 0;
    static constexpr u32 kBytes = kSums + Config::kThreads / 32 * 4;
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

// The sum over the block, the same bits in every thread.
template <class Config>
UW_DEVICE float block_sum(float sum) {
    const u32 sums = ptx::smem_address(ptx::dynamic_smem()) + Smem<Config>::kSums;
#pragma unroll
    for (u32 distance = 16; distance != 0; distance /= 2) {
        sum = ptx::add(sum, ptx::float_from_bits(ptx::shuffle_xor(ptx::bits_from_float(sum), distance)));
    }
    const u32 thread = ptx::thread_index();
    if (thread % 32 == 0) ptx::st_shared(sums + thread / 32 * 4, ptx::bits_from_float(sum));
    ptx::sync_block();  // every warp's sum is there
    sum = 0;
#pragma unroll
    for (u32 warp = 0; warp < Config::kThreads / 32; ++warp) {
        sum = ptx::add(sum, ptx::float_from_bits(ptx::ld_shared(sums + warp * 4)));
    }
    return sum;
}

template <class Config>
UW_DEVICE void run(const NormArgs& args) {
    constexpr u32 kPieces = kColumnsMax / (Config::kThreads * kChunk);
    static_assert(kPieces * Config::kThreads * kChunk == kColumnsMax, "threads divide the columns");
    const u32 thread = ptx::thread_index(), row = ptx::block_index(), chunks = args.d / kChunk;
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
            for (u32 chunk = thread; chunk < chunks; chunk += Config::kThreads) {
                ptx::st_global_x4(y + chunk * kChunk, {0, 0, 0, 0});
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
#pragma unroll
    for (u32 i = 0; i < kPieces; ++i) {
        if (thread + i * Config::kThreads < chunks) add_squares(sum, x[i]);
    }
    const float factor = activation::norm_scale(block_sum<Config>(sum), args.d, args.eps);
#pragma unroll
    for (u32 i = 0; i < kPieces; ++i) {
        const u32 chunk = thread + i * Config::kThreads;
        if (chunk < chunks) ptx::st_global_x4(y + chunk * kChunk, scale(x[i], gamma[i], factor));
    }
}

}  // namespace uw::norm
