// Log probabilities of the sampled token of each row and of the most likely tokens: log-softmax of the logits at
// temperature 1. unweight-model/src/sampling/adjust.rs is the slow reference: every bit agrees.
//
// Config
//   u32  kThreads  1024
//   bool kPdl      programmatic dependent launch: nothing is read before griddepcontrol.wait
//
// Launch: kBlockThreads threads, Sections::kBytes of dynamic shared memory, one block per row. Rows of logits are
// 16-byte aligned.
//
// Roles: none. Chunks of 8 logits are assigned round-robin to the threads of the block. Each pass reads them again:
// from memory once, then from L1 or L2.
//   largest   the largest key and the lowest token that has it
//   sum       weights exp(logit - largest) in units of 2^-40, truncated: sums of integers do not depend on the order
//   top       one pass per further token: the largest candidate below the previous one
//
// Barriers: one block barrier per exchange between warps.
//
// Shared memory = 2 * kBlockThreads / 32 * 8   the best or the sum of each warp, double-buffered
//
// Safety   for any logits and any sampled id. Entries without a token get the token ~0 and NaN.
// Bound    L2, 2 * vocabulary bytes per row and pass, and the latency of 1 + max(1, tokens) passes.
#pragma once

#include "unweight/kernels/sample.cuh"

namespace uw::logprobs {

constexpr u32 kBlockThreads = 1024;
template <class Config>
constexpr u32 kThreads = Config::kThreads;
constexpr u32 kTopMax = 20;
constexpr u32 kChunk = 8;
constexpr u32 kNan = 0x7fc00000;
constexpr float kUnits = 1099511627776.0f;      // 2^40
constexpr float kUnit = 9.09494701772928e-13f;  // 2^-40

// Offsets of the sections in dynamic shared memory, and their total.
struct Sections {
    static constexpr u32 kWarps = 0;
    static constexpr u32 kBytes = kWarps + 2 * kBlockThreads / 32 * 8;
};
template <class Config>
using Smem = Sections;

template <class Config>
struct Kernel {
    const LogprobsArgs& args;
    const u32 shared, thread, lane, warp, row;
    const u16* logits;
    u32 largest_key = 0;
    float largest = 0;
    u32 turn = 0;

    UW_DEVICE Kernel(const LogprobsArgs& a, u32 shared_address)
        : args(a),
          shared(shared_address),
          thread(ptx::tid()),
          lane(ptx::laneid()),
          warp(ptx::uniform_warp_index()),
          row(ptx::ctaid()),
          logits(a.logits + row * a.pitch) {}

    // Calls visit(token, bits) for each logit of the thread.
    template <class Visit>
    UW_DEVICE void each(Visit visit) const {
        for (u32 first = thread * kChunk; first < args.vocabulary; first += kBlockThreads * kChunk) {
            if (first + kChunk <= args.vocabulary) {
                const U32x4 v = ptx::ld_global_x4(logits + first);
                const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (u32 i = 0; i < kChunk; ++i) visit(first + i, words[i / 2] >> i % 2 * 16 & 0xffff);
            } else {
                for (u32 i = first; i < args.vocabulary; ++i) visit(i, ptx::ld_global_u16(logits + i));
            }
        }
    }

    // Reduces a value over all threads of the block; returns the result in each of them.
    template <class Combine>
    UW_DEVICE u64 block_reduce(u64 value, Combine combine) {
#pragma unroll
        for (u32 distance = 16; distance != 0; distance /= 2) {
            value = combine(value, sample::shfl_sync_bfly(value, distance));
        }
        const u32 warps = shared + Sections::kWarps + turn * (kBlockThreads / 32 * 8);
        turn ^= 1;
        if (lane == 0) ptx::st_shared_x2(warps + warp * 8, sample::split(value));
        ptx::bar_sync();  // orders every warp's value before the loads
        value = sample::join(ptx::ld_shared_x2(warps + lane * 8));
#pragma unroll
        for (u32 distance = 16; distance != 0; distance /= 2) {
            value = combine(value, sample::shfl_sync_bfly(value, distance));
        }
        return value;
    }

    // The most likely token among those below a candidate.
    UW_DEVICE u64 best_below(u64 bound) {
        u64 best = 0;
        each([&](u32 token, u32 bits) {
            const u64 own = sample::candidate(sample::key_of_bf16(bits), token);
            if (own < bound) best = sample::larger(best, own);
        });
        return block_reduce(best, [](u64 a, u64 b) { return sample::larger(a, b); });
    }

    // logit - largest; 0 for equal logits, even infinite ones.
    UW_DEVICE float below_largest(u32 bits) const {
        const float logit = ptx::float_from_bits(bits << 16);
        return sample::key_of_bf16(bits) == largest_key ? 0.0f : ptx::add(logit, -largest);
    }

    UW_DEVICE void write(u32 place, u32 token, u32 logprob) const {
        if (thread == 0) ptx::st_global_x2(args.out + (u64(row) * (1 + kTopMax) + place) * 2, U32x2{token, logprob});
    }

    UW_DEVICE void run() {
        if constexpr (Config::kPdl) ptx::griddepcontrol_wait();
        const u32 wanted = ptx::ld_global(args.wanted + row);
        if (wanted == 0) return;
        const u32 top = wanted - 1 < kTopMax ? wanted - 1 : kTopMax;
        const u32 sampled = ptx::ld_global(args.ids + row);
        u64 best = best_below(~u64(0));
        largest_key = static_cast<u32>(best >> 32);
        if (largest_key == sample::kNanKey) {
            for (u32 place = 0; place <= top; ++place) write(place, ~0u, kNan);
            return;
        }
        largest = ptx::float_from_bits((largest_key & 0x8000 ? largest_key ^ 0x8000 : largest_key ^ 0xffff) << 16);
        u64 sum = 0;
        each([&](u32, u32 bits) {
            sum += static_cast<u64>(ptx::mul(sample::exp_negative(below_largest(bits)), kUnits));
        });
        sum = block_reduce(sum, [](u64 a, u64 b) { return a + b; });
        const float log_sum = sample::ln(ptx::mul(static_cast<float>(sum), kUnit));
        const auto logprob = [&](u32 token) {
            return ptx::bits_from_float(ptx::add(below_largest(ptx::ld_global_u16(logits + token)), -log_sum));
        };
        write(0, sampled, sampled < args.vocabulary ? logprob(sampled) : kNan);
        for (u32 place = 1; place <= top; ++place) {
            const bool is_there = static_cast<u32>(best >> 32) != sample::kNanKey;
            const u32 token = ~static_cast<u32>(best);
            write(place, is_there ? token : ~0u, is_there ? logprob(token) : kNan);
            if (is_there && place < top) best = best_below(best);
        }
    }
};

template <class Config>
UW_DEVICE void run(const LogprobsArgs& args) {
    if constexpr (Config::kPdl) ptx::griddepcontrol_launch_dependents();
    Kernel<Config> kernel(args, ptx::cvta_to_shared(ptx::dynamic_smem()));
    kernel.run();
}

}  // namespace uw::logprobs
