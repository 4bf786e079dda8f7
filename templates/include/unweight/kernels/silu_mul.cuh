// The activation between two linears of an MLP: y[r, c] = bf16(f(gate[r, c]) * up[r, c]), all bf16 [m, columns], in
// fp32 and rounded once. Gate and up are adjacent in rows of one matrix, alternate every 8 columns (`spread` 2: the
// product of interleaved gate and up weights), or are separate matrices.
//
// Config
//   u32  kThreads  a multiple of 32 up to 1024
//   GateFunction kGate  f: kSilu, kGelu (tanh approximation)
//   bool kPdl      programmatic dependent launch: all global accesses follow griddepcontrol.wait
//
// Launch: kThreads threads, no shared memory; one block per kThreads * 8 columns of each row, blocks of a row adjacent.
// `columns` is a multiple of 8; rows are 16-byte aligned.
//
// Roles and barriers: none. A thread takes 8 columns.
// Bound    device memory, 6 * m * columns bytes.
#pragma once

#include "unweight/activation/element.cuh"
#include "unweight/axes.cuh"
#include "unweight/epilogue/activation.cuh"
#include "unweight/ptx/control.cuh"
#include "unweight/ptx/memory.cuh"

namespace uw::silu_mul {

constexpr u32 kChunk = 8;

template <class Config>
constexpr u32 kThreads = Config::kThreads;

template <class Config>
struct Smem {
    static constexpr u32 kBytes = 0;
};

template <class Config>
UW_DEVICE float activate(float gate) {
    return Config::kGate == GateFunction::kGelu ? packed::gelu_tanh(gate) : packed::silu(gate);
}

template <class Config>
UW_DEVICE u32 gated(u32 gate, u32 up) {
    using namespace activation;
    return ptx::cvt_rn_bf16x2(ptx::mul(activate<Config>(low_of(gate)), low_of(up)),
                              ptx::mul(activate<Config>(high_of(gate)), high_of(up)));
}

template <class Config>
UW_DEVICE void run(const SiluMulArgs& args) {
    if constexpr (Config::kPdl) {
        ptx::griddepcontrol_launch_dependents();
        ptx::griddepcontrol_wait();
    }
    const u32 row = ptx::ctaid() / args.row_blocks, block = ptx::ctaid() - row * args.row_blocks;
    const u32 column = (block * Config::kThreads + ptx::tid()) * kChunk;
    if (column >= args.columns) return;
    const u64 at = row * args.x_pitch + static_cast<u64>(column) * args.spread;
    const U32x4 gate = ptx::ld_global_x4(args.gate + at), up = ptx::ld_global_x4(args.up + at);
    const U32x4 y{gated<Config>(gate.x, up.x), gated<Config>(gate.y, up.y), gated<Config>(gate.z, up.z),
                  gated<Config>(gate.w, up.w)};
    ptx::st_global_x4(args.y + row * args.y_pitch + column, y);
}

}  // namespace uw::silu_mul
