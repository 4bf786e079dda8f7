// Samples a token for each row of logits: temperature, then top-k, top-p and min-p, then the maximum of logit /
// temperature plus Gumbel noise. unweight-model/src/sampling.rs is the slow reference: every bit agrees.
//
// Config
//   u32  kCluster  1,2,4,8  blocks that share the logits of a row
//   bool kAdjusted          samples from adjusted logits in f32, for the rows with adjustments
//   bool kPdl      programmatic dependent launch: a row's parameters are read before griddepcontrol.wait, everything
//                  else is accessed after it
//
// Launch: kBlockThreads threads, Sections::kBytes of dynamic shared memory, clusters of kCluster blocks along x, one
// cluster per row. Rows of logits are 16-byte aligned.
//
// Roles: none. The chunks of 8 logits of a row are divided into kCluster ranges, one per block, and assigned
// round-robin to its threads. Each pass reads them again: from memory once, then from L1.
//   largest   the largest key and the lowest token that has it; for a greedy row this is the result
//   top-k     two passes over a histogram of counts: by the upper half of the keys, then by the lower half of those in
//             the bin with the k-th largest. Keys of adjusted logits have 32 bits and take four passes
//   top-p     the same with weights instead of counts
//   choice    the largest score among the tokens that remain
// Keys order bf16 logits numerically, so a threshold is a key, and tokens of equal logits are kept or dropped together.
// A weight is exp((logit - largest) / temperature) in units of 2^-31, truncated: sums of integers do not depend on the
// order. Noise is a function of seed, position and token.
//
// Barriers: block barriers around each histogram; one cluster barrier per pass, between publishing sums or a best key
// and reading those of the peers, and one before exit. Published values are double-buffered, so a block does not
// overwrite what a peer is still reading.
//
// Adjusted variants run after an ordinary one, which has advanced the positions, and overwrite its token. Each pass
// computes adjusted logits from logits, token states and the row's mask. Block 0 of the row counts the sampled token.
//
// Shared memory = 2 * kBins * kCopies * 4     counters: low and high words of sums, one copy per lane % kCopies
//               + 2 * kBins * 8               the block's sums by bin, for the cluster
//               + kBins * 8                   the cluster's sums by bin
//               + kBlockThreads / 32 * 8      the best candidate of each warp
//               + 2 * 8                       the block's best candidate, for the cluster
//               + 2 * 8                       the bin of a threshold, and the remaining target within it
//
// Safety   for any parameters and logits, unless all logits are NaN, the result is a token of the vocabulary. A row of
//          NaN gets ~0, which is not a token, and *fault = 1 + row. A row without a token (kPadPosition) writes
//          nothing.
// Bound    L2, 2 * vocabulary bytes per row, and the latency of its passes: 2, plus 2 each for top-k and top-p.
#pragma once

#include "unweight/ptx/barrier.cuh"
#include "unweight/ptx/control.cuh"
#include "unweight/ptx/memory.cuh"

namespace uw::sample {

constexpr u32 kBlockThreads = 1024;
template <class Config>
constexpr u32 kThreads = kBlockThreads;
constexpr u32 kVocabularyMax = 1 << 20;
constexpr u32 kBins = 256;
constexpr u32 kCopies = 16;
constexpr u32 kChunk = 8;
constexpr u32 kPadPosition = ~0u;
constexpr u32 kNoSlot = ~0u;
// Flags of a token state; the bits below are a count.
constexpr u32 kInPrompt = 0x80000000, kEnds = 0x40000000, kCount = kEnds - 1;
// Key of NaN, below all others; keys of both zeros.
constexpr u32 kNanKey = 0, kZeroKey = 0x8000, kZeroKeyF32 = 0x80000000;
// The adjusted logit of a token that must not be sampled.
constexpr u32 kNan = 0x7fc00000;
// Bounds of the noise.
constexpr float kNoiseMin = -3.125f, kNoiseMax = 22.25f;

// Offsets of the sections in dynamic shared memory, and their total.
struct Sections {
    static constexpr u32 kLow = 0;
    static constexpr u32 kHigh = kLow + kBins * kCopies * 4;
    static constexpr u32 kSums = kHigh + kBins * kCopies * 4;
    static constexpr u32 kMerged = kSums + 2 * kBins * 8;
    static constexpr u32 kWarps = kMerged + kBins * 8;
    static constexpr u32 kBest = kWarps + kBlockThreads / 32 * 8;
    static constexpr u32 kFound = kBest + 2 * 8;
    static constexpr u32 kBytes = kFound + 2 * 8;
};
template <class Config>
using Smem = Sections;

// ---- numbers: bit-identical to the host -----------------------------------------------------------------------------
// An integer that orders bf16 numerically.
UW_DEVICE u32 key_of_bf16(u32 bits) {
    const u32 magnitude = bits & 0x7fff;
    if (magnitude > 0x7f80) return kNanKey;
    if (magnitude == 0) return kZeroKey;
    return bits & 0x8000 ? bits ^ 0xffff : bits | 0x8000;
}

// An integer that orders f32 numerically.
UW_DEVICE u32 key_of_f32(u32 bits) {
    const u32 magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return kNanKey;
    if (magnitude == 0) return kZeroKeyF32;
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

// ln(1 + z) for z in [sqrt(1/2) - 1, sqrt(2) - 1].
UW_DEVICE float log1p_near(float z) {
    float p = -0.0745118633f;
    p = ptx::fma(p, z, 0.128066108f);
    p = ptx::fma(p, z, -0.132660314f);
    p = ptx::fma(p, z, 0.141996503f);
    p = ptx::fma(p, z, -0.166083694f);
    p = ptx::fma(p, z, 0.200009391f);
    p = ptx::fma(p, z, -0.250015795f);
    p = ptx::fma(p, z, 0.333333462f);
    p = ptx::fma(p, z, -0.499999881f);
    p = ptx::fma(p, z, 1.0f);
    return ptx::mul(p, z);
}

// ln(value) for a positive normal number.
UW_DEVICE float ln(float value) {
    constexpr u32 kRootHalf = 0x3f3504f3;  // sqrt(1/2)
    const u32 bits = ptx::bits_from_float(value);
    const i32 exponent = static_cast<i32>(bits - kRootHalf) >> 23;
    const float near = ptx::float_from_bits(bits - (static_cast<u32>(exponent) << 23));
    return ptx::fma(static_cast<float>(exponent), 0.693147182f, log1p_near(ptx::add(near, -1.0f)));
}

// exp(x) for x <= 0; 0 below -87.
UW_DEVICE float exp_negative(float x) {
    if (!(x > -87.0f)) return 0.0f;
    const float power = ptx::mul(x, 1.44269502f);
    const i32 whole = static_cast<i32>(power);  // toward zero
    const float f = ptx::add(power, -static_cast<float>(whole));
    float p = 0.000114919952f;
    p = ptx::fma(p, f, 0.00129163684f);
    p = ptx::fma(p, f, 0.00959703512f);
    p = ptx::fma(p, f, 0.0554992296f);
    p = ptx::fma(p, f, 0.24022609f);
    p = ptx::fma(p, f, 0.693147182f);
    p = ptx::fma(p, f, 1.0f);
    return ptx::mul(p, ptx::float_from_bits(static_cast<u32>(whole + 127) << 23));
}

// Gumbel noise from a random word: -ln(-ln(1 - t)), t = (word | 1) / 2^32. Accurate to all bits both near t = 0, where
// noise is large, and near t = 1.
UW_DEVICE float noise_of(u32 word) {
    constexpr float kUnit = 2.32830644e-10f;  // 2^-32
    const u32 odd = word | 1;
    const float t = ptx::mul(static_cast<float>(odd), kUnit);
    const float wait = t < 0.25f ? log1p_near(-t) : ln(ptx::mul(static_cast<float>(0u - odd), kUnit));
    return -ln(-wait);
}

struct Words {
    u32 w[4];
};

// Philox4x32-10 of the counter (group, position, 0, 0).
UW_DEVICE Words philox(u64 seed, u32 position, u32 group) {
    u32 a = group, b = position, c = 0, d = 0;
    u32 key0 = static_cast<u32>(seed), key1 = static_cast<u32>(seed >> 32);
#pragma unroll
    for (u32 round = 0; round < 10; ++round) {
        const u64 x = u64(0xd2511f53u) * a, y = u64(0xcd9e8d57u) * c;
        a = static_cast<u32>(y >> 32) ^ b ^ key0;
        b = static_cast<u32>(y);
        c = static_cast<u32>(x >> 32) ^ d ^ key1;
        d = static_cast<u32>(x);
        key0 += 0x9e3779b9u;
        key1 += 0xbb67ae85u;
    }
    return {{a, b, c, d}};
}

// An integer that orders floats numerically.
UW_DEVICE u32 order_of(float value) {
    const u32 bits = ptx::bits_from_float(value);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The larger rank wins; among equal ranks the lower token.
UW_DEVICE u64 candidate(u32 rank, u32 token) { return u64(rank) << 32 | u32(~token); }

// ---- exchange ------------------------------------------------------------------------------------------------------
UW_DEVICE u64 join(U32x2 v) { return u64(v.y) << 32 | v.x; }
UW_DEVICE U32x2 split(u64 v) { return {static_cast<u32>(v), static_cast<u32>(v >> 32)}; }
UW_DEVICE u64 shfl_sync_bfly(u64 v, u32 mask) {
    const u32 low = ptx::shfl_sync_bfly(static_cast<u32>(v), mask);
    return u64(ptx::shfl_sync_bfly(static_cast<u32>(v >> 32), mask)) << 32 | low;
}
UW_DEVICE u64 shfl_sync_up(u64 v, u32 delta) {
    const u32 low = ptx::shfl_sync_up(static_cast<u32>(v), delta);
    return u64(ptx::shfl_sync_up(static_cast<u32>(v >> 32), delta)) << 32 | low;
}
UW_DEVICE u64 shfl_sync_idx(u64 v, u32 source) {
    const u32 low = ptx::shfl_sync_idx(static_cast<u32>(v), source);
    return u64(ptx::shfl_sync_idx(static_cast<u32>(v >> 32), source)) << 32 | low;
}
UW_DEVICE u64 larger(u64 a, u64 b) { return a > b ? a : b; }
UW_DEVICE u64 warp_largest(u64 v) {
#pragma unroll
    for (u32 distance = 16; distance != 0; distance /= 2) v = larger(v, shfl_sync_bfly(v, distance));
    return v;
}

template <class Config>
struct Kernel {
    // Words of a chunk: two bf16 logits per word, or one adjusted logit.
    static constexpr u32 kWords = Config::kAdjusted ? kChunk : kChunk / 2;
    static constexpr u32 kKeyBits = Config::kAdjusted ? 32 : 16;
    using Chunk = u32[kWords];

    const SampleArgs& args;
    const u32 shared, thread, lane, warp, row, rank;
    u32 top_k;
    float top_p, min_p, temperature;
    u64 seed;

    const u16* logits;
    u32 first_chunk, last_chunk;  // range of this block

    u32 largest_key;
    float largest, inverse;  // 1 / temperature
    u32 turn = 0;            // which of the two buffers is published next

    // Adjusted variants only.
    TokenState* states = nullptr;
    const u32* mask = nullptr;  // null: any token may be sampled
    float repetition = 1, frequency = 0, presence = 0;
    u32 slot = 0, end_from = 0;
    bool ends_early = false;

    UW_DEVICE Kernel(const SampleArgs& a, u32 shared_address)
        : args(a),
          shared(shared_address),
          thread(ptx::tid()),
          lane(ptx::laneid()),
          warp(ptx::uniform_warp_index()),
          row(ptx::ctaid() / Config::kCluster),
          rank(Config::kCluster > 1 ? ptx::cluster_ctarank() : 0) {
        const U32x2 head = ptx::ld_global_nc_x2(&a.rows[row].seed);
        const U32x2 middle = ptx::ld_global_nc_x2(&a.rows[row].temperature);
        const U32x2 tail = ptx::ld_global_nc_x2(&a.rows[row].top_p);
        seed = join(head);
        temperature = ptx::float_from_bits(middle.x);
        top_k = middle.y;
        top_p = ptx::float_from_bits(tail.x);
        min_p = ptx::float_from_bits(tail.y);
        logits = a.logits + row * a.pitch;
        if constexpr (Config::kAdjusted) {
            const U32x2 first = ptx::ld_global_nc_x2(&a.adjusts[row].slot);
            const U32x2 second = ptx::ld_global_nc_x2(&a.adjusts[row].frequency);
            slot = first.x;
            repetition = ptx::float_from_bits(first.y);
            frequency = ptx::float_from_bits(second.x);
            presence = ptx::float_from_bits(second.y);
            const U32x2 third = ptx::ld_global_nc_x2(&a.adjusts[row].end_from);
            end_from = third.x;
            if (third.y != 0) mask = a.masks + u64(third.y - 1) * ((a.vocabulary + 31) / 32);
            states = a.tokens + u64(slot) * a.token_pitch;
        }
        const u32 chunks = (a.vocabulary + kChunk - 1) / kChunk,
                  share = (chunks + Config::kCluster - 1) / Config::kCluster;
        first_chunk = rank * share;
        last_chunk = min_of(first_chunk + share, chunks);
    }

    UW_DEVICE static u32 min_of(u32 a, u32 b) { return a < b ? a : b; }

    // ---- logits ----------------------------------------------------------------------------------------------------
    // Computes the adjusted logit of a token.
    UW_DEVICE u32 adjusted(u32 bits, u32 bias, u32 marks) const {
        float value = ptx::add(ptx::float_from_bits(bits << 16), ptx::float_from_bits(bias));
        if (marks != 0) {
            const u32 count = marks & kCount;
            if (marks & kInPrompt || count != 0) {
                value = value > 0.0f ? ptx::div(value, repetition) : ptx::mul(value, repetition);
            }
            if (count != 0) {
                value = ptx::add(value, -ptx::mul(frequency, static_cast<float>(count)));
                value = ptx::add(value, -presence);
            }
            if (marks & kEnds && ends_early) return kNan;
        }
        return ptx::bits_from_float(value);
    }

    // Calls visit(first token, words) for each of the thread's chunks; the last one is padded with NaN.
    template <class Visit>
    UW_DEVICE void each_chunk(Visit visit) const {
        for (u32 chunk = first_chunk + thread; chunk < last_chunk; chunk += kBlockThreads) {
            const u32 first = chunk * kChunk;
            Chunk words;
            if constexpr (Config::kAdjusted) {
                load_adjusted(first, words);
            } else {
                load(first, words);
            }
            visit(first, words);
        }
    }
    UW_DEVICE void load(u32 first, Chunk& words) const {
        if (first + kChunk <= args.vocabulary) {
            const U32x4 v = ptx::ld_global_x4(logits + first);
            words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
        } else {
#pragma unroll
            for (u32 i = 0; i < kChunk; ++i) {
                const u32 bits = first + i < args.vocabulary ? ptx::ld_global_u16(logits + first + i) : 0x7fff;
                words[i / 2] = i % 2 ? words[i / 2] | bits << 16 : bits;
            }
        }
    }
    // One bit per token of a chunk: whether it may be sampled.
    UW_DEVICE u32 allowed(u32 first) const {
        return mask == nullptr ? 0xff : ptx::ld_global(mask + first / 32) >> first % 32;
    }
    UW_DEVICE void load_adjusted(u32 first, Chunk& words) const {
        const u32 bits = allowed(first);
        if (first + kChunk <= args.vocabulary) {
            const U32x4 v = ptx::ld_global_x4(logits + first);
            const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (u32 i = 0; i < kChunk; i += 2) {
                const U32x4 state = ptx::ld_global_x4(states + first + i);
                words[i] = adjusted(pairs[i / 2] & 0xffff, state.x, state.y);
                words[i + 1] = adjusted(pairs[i / 2] >> 16, state.z, state.w);
            }
#pragma unroll
            for (u32 i = 0; i < kChunk; ++i) {
                if (!(bits >> i & 1)) words[i] = kNan;
            }
        } else {
#pragma unroll
            for (u32 i = 0; i < kChunk; ++i) {
                words[i] = kNan;
                if (first + i >= args.vocabulary || !(bits >> i & 1)) continue;
                const U32x2 state = ptx::ld_global_x2(states + first + i);
                words[i] = adjusted(ptx::ld_global_u16(logits + first + i), state.x, state.y);
            }
        }
    }
    UW_DEVICE static u32 bits_of(const Chunk& words, u32 i) {
        if constexpr (Config::kAdjusted) {
            return words[i];
        } else {
            return words[i / 2] >> i % 2 * 16 & 0xffff;
        }
    }
    UW_DEVICE static u32 key_of(u32 bits) { return Config::kAdjusted ? key_of_f32(bits) : key_of_bf16(bits); }
    // The logit with this key, which must not be kNanKey.
    UW_DEVICE static float logit_of(u32 key) {
        const u32 wide = key & 0x80000000 ? key ^ 0x80000000 : ~key;
        const u32 narrow = key & 0x8000 ? key ^ 0x8000 : key ^ 0xffff;
        return ptx::float_from_bits(Config::kAdjusted ? wide : narrow << 16);
    }

    // (logit - largest) / temperature, at most 0; 0 for equal logits, even infinite ones.
    UW_DEVICE float scaled(u32 key, u32 bits) const {
        const float logit = ptx::float_from_bits(Config::kAdjusted ? bits : bits << 16);
        return key == largest_key ? 0.0f : ptx::mul(ptx::add(logit, -largest), inverse);
    }
    // exp(scaled) in units of 2^-31.
    UW_DEVICE u32 weight(u32 key, u32 bits) const {
        return static_cast<u32>(ptx::mul(exp_negative(scaled(key, bits)), 2147483648.0f));
    }

    // ---- the cluster -----------------------------------------------------------------------------------------------
    UW_DEVICE void sync_cluster() const {
        if constexpr (Config::kCluster > 1) {
            ptx::barrier_cluster_arrive();
            ptx::barrier_cluster_wait();
        } else {
            ptx::bar_sync();
        }
    }
    UW_DEVICE static u64 load_of(u32 block, u32 address) {
        if constexpr (Config::kCluster == 1) return join(ptx::ld_shared_x2(address));
        return join(ptx::ld_shared_cluster_x2(ptx::mapa(address, block)));
    }
    // Returns the largest value over all threads of the cluster, in each of them.
    UW_DEVICE u64 cluster_largest(u64 value) {
        value = warp_largest(value);
        if (lane == 0) ptx::st_shared_x2(shared + Sections::kWarps + warp * 8, split(value));
        ptx::bar_sync();  // orders every warp's best before the loads of warp 0
        const u32 own = shared + Sections::kBest + turn * 8;
        if (warp == 0) {
            value = warp_largest(join(ptx::ld_shared_x2(shared + Sections::kWarps + lane * 8)));
            if (lane == 0) ptx::st_shared_x2(own, split(value));
        }
        sync_cluster();  // orders every block's best before its peers' loads
        turn ^= 1;
        value = 0;
#pragma unroll
        for (u32 block = 0; block < Config::kCluster; ++block) value = larger(value, load_of(block, own));
        return value;
    }

    // ---- thresholds ------------------------------------------------------------------------------------------------
    // Sums by bin over the cluster's logits. pick(key, bits, bin) returns a token's amount and sets its bin. The first
    // kBins threads store the sums in kMerged of every block.
    template <class Pick>
    UW_DEVICE void histogram(Pick pick) {
        static_assert(kBlockThreads == kBins * 4 && kCopies == 16, "four threads add up the copies of a bin");
#pragma unroll
        for (u32 at = thread * 16; at < 2 * kBins * kCopies * 4; at += kBlockThreads * 16) {
            ptx::st_shared_x4(shared + Sections::kLow + at, U32x4{0, 0, 0, 0});
        }
        ptx::bar_sync();  // orders the zeros before the additions
        const u32 copy = lane % kCopies * 4;
        each_chunk([&](u32, const Chunk& words) {
#pragma unroll
            for (u32 i = 0; i < kChunk; ++i) {
                const u32 bits = bits_of(words, i);
                u32 bin = 0;
                const u32 amount = pick(key_of(bits), bits, bin);
                if (amount == 0) continue;
                const u32 at = shared + bin * (kCopies * 4) + copy;
                const u32 before = ptx::atom_add_shared(at + Sections::kLow, amount);
                if (before + amount < before) ptx::red_add_shared(at + Sections::kHigh, 1);
            }
        });
        ptx::bar_sync();  // orders all additions before the loads
        const U32x4 low = ptx::ld_shared_x4(shared + Sections::kLow + thread * 16);
        const U32x4 high = ptx::ld_shared_x4(shared + Sections::kHigh + thread * 16);
        u64 sum = u64(low.x) + low.y + low.z + low.w;
        sum += (u64(high.x) + high.y + high.z + high.w) << 32;
        sum += shfl_sync_bfly(sum, 1);
        sum += shfl_sync_bfly(sum, 2);
        const u32 sums = shared + Sections::kSums + turn * (kBins * 8);
        if (thread % 4 == 0) ptx::st_shared_x2(sums + thread / 4 * 8, split(sum));
        sync_cluster();  // orders every block's sums before its peers' loads
        turn ^= 1;
        if (thread < kBins) {
            u64 all = 0;
#pragma unroll
            for (u32 block = 0; block < Config::kCluster; ++block) all += load_of(block, sums + thread * 8);
            ptx::st_shared_x2(shared + Sections::kMerged + thread * 8, split(all));
        }
        ptx::bar_sync();  // orders the cluster's sums before the loads in find()
    }

    // Returns the highest bin whose sum, with the bins above it, is at least `target_of(total)`; `target` becomes the
    // part of that amount that remains for the bin. ~0 if there is no such bin.
    template <class Target>
    UW_DEVICE u32 find(Target target_of, u64& target) {
        constexpr u32 kOwn = kBins / 32;
        if (warp == 0) {
            // Lane 0 has the highest bins.
            u64 sums[kOwn], own = 0;
#pragma unroll
            for (u32 i = 0; i < kOwn; ++i) {
                sums[i] = join(ptx::ld_shared_x2(shared + Sections::kMerged + (kBins - 1 - lane * kOwn - i) * 8));
                own += sums[i];
            }
            u64 through = own;
#pragma unroll
            for (u32 distance = 1; distance < 32; distance *= 2) {
                const u64 before = shfl_sync_up(through, distance);
                if (lane >= distance) through += before;
            }
            const u64 total = shfl_sync_idx(through, 31);
            const u64 want = target_of(total);
            u64 above = through - own;
            if (want > total) {
                if (lane == 0) ptx::st_shared_x2(shared + Sections::kFound, U32x2{~0u, 0});
            } else if (above < want && want <= through) {
                u32 bin = kBins - 1 - lane * kOwn;
                bool below = true;
#pragma unroll
                for (u32 i = 0; i < kOwn; ++i) {
                    below = below && above + sums[i] < want;
                    if (below) above += sums[i], --bin;
                }
                ptx::st_shared_x2(shared + Sections::kFound, U32x2{bin, 0});
                ptx::st_shared_x2(shared + Sections::kFound + 8, split(want - above));
            }
        }
        ptx::bar_sync();  // orders the result before the loads of all threads
        target = join(ptx::ld_shared_x2(shared + Sections::kFound + 8));
        return ptx::ld_shared(shared + Sections::kFound);
    }

    // Returns the highest key whose amount, with the keys above it, is at least `target_of(total)`, over keys from
    // `floor` on; `floor` if there is no such key. amount(key, bits) is a token's amount.
    template <class Amount, class Target>
    UW_DEVICE u32 threshold(u32 floor, Amount amount, Target target_of) {
        constexpr u32 kTop = kKeyBits - 8;
        histogram([&](u32 key, u32 bits, u32& bin) {
            bin = key >> kTop;
            return key < floor ? 0 : amount(key, bits);
        });
        u64 target;
        u32 found = find(target_of, target);
        if (found == ~0u) return floor;
#pragma unroll
        for (u32 shift = kTop; shift != 0; shift -= 8) {
            histogram([&](u32 key, u32 bits, u32& bin) {
                bin = (key >> (shift - 8)) % kBins;
                return key < floor || key >> shift != found ? 0 : amount(key, bits);
            });
            const u64 rest = target;
            found = found * kBins + find([&](u64) { return rest; }, target);
        }
        return found;
    }
    // The fraction `top_p` of a sum below 2^52, rounded up, at least 1.
    UW_DEVICE u64 part(u64 total) const {
        const u64 p = static_cast<u64>(ptx::mul(top_p > 0.0f ? top_p : 0.0f, 4294967296.0f));
        const u64 low = (total & 0xffffffff) * p;
        const u64 part = (total >> 32) * p + (low >> 32) + ((low & 0xffffffff) != 0);
        return part == 0 ? 1 : part;
    }

    // ---- entry ------------------------------------------------------------------------------------------------------
    UW_DEVICE u32 choose(u32 position) {
        u64 best = 0;
        each_chunk([&](u32 first, const Chunk& words) {
#pragma unroll
            for (u32 i = 0; i < kChunk; ++i) best = larger(best, candidate(key_of(bits_of(words, i)), first + i));
        });
        best = cluster_largest(best);
        largest_key = static_cast<u32>(best >> 32);
        if (largest_key == kNanKey && thread == 0 && rank == 0) ptx::st_global(args.fault, 1 + row);
        if (largest_key == kNanKey) return ~0u;
        if (!(temperature > 0.0f)) return ~static_cast<u32>(best);

        largest = logit_of(largest_key);
        inverse = ptx::div(1.0f, temperature);
        u32 floor = kNanKey + 1;
        if (top_k != 0) {
            const u64 k = top_k;
            floor = threshold(floor, [](u32, u32) { return 1u; }, [&](u64) { return k; });
        }
        if (top_p < 1.0f) {
            floor = threshold(
                floor, [&](u32 key, u32 bits) { return weight(key, bits); }, [&](u64 total) { return part(total); });
        }
        const float share = min_p > 1.0f ? 1.0f : min_p;

        // The token with the largest logit is always kept, with a score of at least kNoiseMin. A token whose best
        // possible score is below that, or below the thread's best, needs no noise.
        u64 chosen = 0;
        float bar = kNoiseMin;
        each_chunk([&](u32 first, const Chunk& words) {
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                float x[4];
                bool keep[4], any = false;
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    const u32 bits = bits_of(words, half * 4 + i), key = key_of(bits);
                    x[i] = scaled(key, bits);
                    keep[i] = key >= floor && ptx::add(x[i], kNoiseMax) >= bar;
                    if (keep[i] && share > 0.0f) keep[i] = exp_negative(x[i]) >= share;
                    any |= keep[i];
                }
                if (!any) continue;
                const Words random = philox(seed, position, first / 4 + half);
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    if (!keep[i]) continue;
                    const float score = ptx::add(x[i], noise_of(random.w[i]));
                    if (score > bar) bar = score;
                    chosen = larger(chosen, candidate(order_of(score), first + half * 4 + i));
                }
            }
        });
        return ~static_cast<u32>(cluster_largest(chosen));
    }

    UW_DEVICE void run() {
        if constexpr (Config::kPdl) ptx::griddepcontrol_wait();
        const u32 position = ptx::ld_global(args.positions + row);
        // Uniform over a cluster, because its blocks share the row.
        if (position == kPadPosition) return;
        if constexpr (Config::kAdjusted) {
            if (slot == kNoSlot) return;
            ends_early = position < end_from;
            const u32 id = choose(position - 1);
            // The cluster barriers in choose() follow all loads of the token states.
            if (thread == 0 && rank == 0) {
                ptx::st_global(args.ids + row, id);
                if (id != ~0u) ptx::st_global(&states[id].marks, ptx::ld_global(&states[id].marks) + 1);
            }
        } else {
            const u32 id = choose(position);
            // The cluster barriers in choose() follow all loads of the position.
            if (thread == 0 && rank == 0) {
                ptx::st_global(args.ids + row, id);
                ptx::st_global(args.positions + row, position + 1);
            }
        }
        // Peers may still be reading this block's best.
        if constexpr (Config::kCluster > 1) sync_cluster();
    }
};

template <class Config>
UW_DEVICE void run(const SampleArgs& args) {
    if constexpr (Config::kPdl) ptx::griddepcontrol_launch_dependents();
    Kernel<Config> kernel(args, ptx::cvta_to_shared(ptx::dynamic_smem()));
    kernel.run();
}

}  // namespace uw::sample
