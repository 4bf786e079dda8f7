// Scales or soft-caps activations, bf16 [m, columns], in fp32 and rounded once: y[r, c] = factor * x[r, c].
//
// Config
//   ScaleForm kForm  kMul: as above; y may alias x. kAdd: y[r, c] += factor * x[r, c]
//                    kCap: y[r, c] = factor * tanh(x[r, c] / factor); y may alias x
//   bool kPdl        programmatic dependent launch: all global accesses follow griddepcontrol.wait
//
// Launch: kBlockThreads threads, no shared memory; one block per kBlockColumns columns of each row, blocks of a row
// adjacent. `columns` is a multiple of 8; rows are 16-byte aligned.
//
// Roles and barriers: none. A thread takes 8 columns.
// Bound    device memory, 4 * m * columns bytes, kAdd: 6.
#pragma once

#include "unweight/activation/element.cuh"
#include "unweight/axes.cuh"
#include "unweight/ptx/control.cuh"
#include "unweight/ptx/memory.cuh"

namespace uw::scale {

constexpr u32 kBlockThreads = 128;
constexpr u32 kChunk = 8;
constexpr u32 kBlockColumns = kBlockThreads * kChunk;

template <class Config>
constexpr u32 kThreads = kBlockThreads;

template <class Config>
struct Smem {
    static constexpr u32 kBytes = 0;
};

// One word of y, from a word of x and the old word of y (kAdd).
template <class Config>
UW_DEVICE u32 scaled(u32 x, u32 y, float factor) {
    using namespace activation;
    if constexpr (Config::kForm == ScaleForm::kAdd) {
        return ptx::cvt_rn_bf16x2(ptx::fma(low_of(x), factor, low_of(y)), ptx::fma(high_of(x), factor, high_of(y)));
    } else if constexpr (Config::kForm == ScaleForm::kCap) {
        return ptx::cvt_rn_bf16x2(ptx::mul(factor, tanh(ptx::div(low_of(x), factor))),
                                  ptx::mul(factor, tanh(ptx::div(high_of(x), factor))));
    } else {
        return ptx::cvt_rn_bf16x2(ptx::mul(low_of(x), factor), ptx::mul(high_of(x), factor));
    }
}

template <class Config>
UW_DEVICE void run(const ScaleArgs& args) {
    if constexpr (Config::kPdl) {
        ptx::griddepcontrol_launch_dependents();
        ptx::griddepcontrol_wait();
    }
    const u32 row = ptx::ctaid() / args.row_blocks, block = ptx::ctaid() - row * args.row_blocks;
    const u32 column = block * kBlockColumns + ptx::tid() * kChunk;
    if (column >= args.columns) return;
    u16* const to = args.y + row * args.y_pitch + column;
    const U32x4 x = ptx::ld_global_x4(args.x + row * args.x_pitch + column);
    U32x4 y{0, 0, 0, 0};
    if constexpr (Config::kForm == ScaleForm::kAdd) y = ptx::ld_global_x4(to);
    ptx::st_global_x4(to, {scaled<Config>(x.x, y.x, args.factor), scaled<Config>(x.y, y.y, args.factor),
                           scaled<Config>(x.z, y.z, args.factor), scaled<Config>(x.w, y.w, args.factor)});
}

}  // namespace uw::scale
