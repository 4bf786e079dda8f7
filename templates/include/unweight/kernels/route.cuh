// Routing for mixture of experts: from the logits of a router to a work list for the products, and from their rows to
// one row per token. A pair is a token and a place among its top_k experts, pair = token * top_k + place.
//
// stage    threads  blocks/SM  grid                                  dynamic smem  what
// topk     256      3          ceil(tokens / 8)                      0             logits -> ids and weights of pairs
// topk_sigmoid, topk_sparse_mixer: as topk
// sort     1024     1          1                                     67840         ids -> pairs by expert, items
// combine  128      4          tokens * ceil(columns / 1024)         0             rows of pairs -> rows of tokens
//
// Config: RouteStage kStage; bool kPdl, programmatic dependent launch: all global accesses follow griddepcontrol.wait
//
// topk     A warp takes a token; up to 128 experts have a shorter loop. weight = e^(logit - largest) / sum over all
//          experts, fp32, for the top_k largest logits; among equal logits the lower expert comes first. `normalized`
//          divides by the sum of those weights; `rounded` then rounds to bf16. A NaN counts as less than all numbers.
//          The order of each sum is fixed: a token's ids and weights depend only on its row. Places of shared experts
//          follow, with the ids from `experts` on and weight 1 or, if `gated`, 1 / (1 + e^-logit), rounded likewise.
//          `scale` multiplies all weights.
// topk_sigmoid
//          As topk, but weight = 1 / (1 + e^-logit), and the largest sums of weight and correction bias are chosen.
//          `normalized` divides by the sum of the chosen weights + 1e-20; `routed_scale` then multiplies them.
// topk_sparse_mixer
//          As topk, but weight = 1 / sum of e^(x - logit) over the logits x that are neither chosen before nor far:
//          (logit - x) / max(|x|, logit) > cutoff, which is in `routed_scale`. An expert with logit -inf has weight 0.
// sort     One block, without atomics, so the pairs of an expert keep their order. Each warp counts a range of pairs,
//          32 at a time; thread e sums the counts of expert e over the warps; a scan over experts gives first entries
//          and first items; each warp goes through its range again and places its pairs. An id that is not below
//          `experts` (an expert that this device does not hold) has no entry. All items are full except the last of
//          each expert; after the last one come items without entries, up to items_max.
// combine  y = sum over places of weight * row, in fp32, in order of places, rounded once; `adds` adds the old y after
//          them. Pairs without an expert are skipped, and their rows are not read.
//
// Roles    topk, combine: none. sort: all warps do the same.
// Barriers sort: see the code. A warp's counts are private until the first bar_sync, and again after the second.
// Bound    topk, sort, and combine of few tokens: latency. combine: device memory, 2 * (top_k + 1) bytes per element of
//          y. So lanes load ids and weights of all places together, and then rows of eight places.
// Safety   for any ids. Nothing is written past pairs[tokens * top_k] and items[items_max].
#pragma once

#include "unweight/activation/element.cuh"
#include "unweight/axes.cuh"
#include "unweight/ptx/barrier.cuh"
#include "unweight/ptx/control.cuh"
#include "unweight/ptx/memory.cuh"

namespace uw::route {

constexpr u32 kExpertsMax = 512;
constexpr u32 kTopKMax = 32;  // one per lane
constexpr u32 kChunk = 8;     // columns per thread of combine

constexpr u32 kTopkThreads = 256;
constexpr u32 kSortThreads = 1024, kSortWarps = kSortThreads / 32;
constexpr u32 kCombineThreads = 128;
constexpr u32 kRowsAtOnce = 8;  // of combine; divides kTopKMax

// Shared memory of sort: counts u32 [warp][expert], first entries u32 [expert], sums per warp u32 [warp][2].
constexpr u32 kCountPitch = kExpertsMax * 4;
constexpr u32 kFirsts = kSortWarps * kCountPitch;
constexpr u32 kWarpSums = kFirsts + kExpertsMax * 4;

template <class Config>
constexpr u32 kThreads = Config::kStage == RouteStage::kSort      ? kSortThreads
                         : Config::kStage == RouteStage::kCombine ? kCombineThreads
                                                                  : kTopkThreads;

// Offsets of the sections in dynamic shared memory, and their total.
template <class Config>
struct Smem {
    static constexpr u32 kCounts = 0;
    static constexpr u32 kFirsts = route::kFirsts;
    static constexpr u32 kWarpSums = route::kWarpSums;
    static constexpr u32 kBytes = Config::kStage == RouteStage::kSort ? kWarpSums + kSortWarps * 8 : 0;
};

template <bool kPdl>
UW_DEVICE void start() {
    if constexpr (kPdl) {
        ptx::griddepcontrol_launch_dependents();
        ptx::griddepcontrol_wait();
    }
}

// ---- topk ----------------------------------------------------------------------------------------------------------
constexpr u32 kFewExperts = 128;  // up to so many have a loop of their own

// The sigmoid of a bf16 logit; 0 for a NaN.
UW_DEVICE float score_of(const u16* logit) {
    const float x = ptx::float_from_bits(ptx::ld_global_u16(logit) << 16);
    // max(NaN, 0) is 0.
    return ptx::max(ptx::div(1.0f, ptx::add(1.0f, ptx::ex2_approx(x * -1.44269504f))), 0.0f);
}

// A float that is not a NaN, as an integer of the same order; both zeros are one. No float has key 0.
UW_DEVICE u32 key_of(float value) {
    const u32 bits = ptx::bits_from_float(ptx::add(value, 0.0f));
    return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}
UW_DEVICE float value_of(u32 key) { return ptx::float_from_bits(key >> 31 != 0 ? key & 0x7fffffffu : ~key); }

// The sum of all lanes' values, in the same order for every lane.
UW_DEVICE float warp_sum(float value) {
#pragma unroll
    for (u32 distance = 16; distance > 0; distance /= 2) {
        value = ptx::add(value, ptx::float_from_bits(ptx::shfl_sync_bfly(ptx::bits_from_float(value), distance)));
    }
    return value;
}

// The sum of e^(x - logit) over the logits x that the warp's keys have left and that are not far from the logit.
template <u32 kPerLane>
UW_DEVICE float near_sum(const u32 (&keys)[kPerLane], float logit, float cutoff) {
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < kPerLane; ++i) {
        const float x = value_of(keys[i]);
        const float scale = ptx::max(ptx::float_from_bits(ptx::bits_from_float(x) & 0x7fffffffu), logit);
        // 0 / 0 is not far.
        const bool far = ptx::div(ptx::add(logit, -x), scale) > cutoff;
        if (keys[i] != 0 && !far) sum = ptx::add(sum, ptx::ex2_approx((x - logit) * 1.44269504f));
    }
    return warp_sum(sum);
}

// Experts lane, lane + 32, ... of each lane: kPerLane of them.
template <RouteStage kStage, u32 kPerLane>
UW_DEVICE void topk(const RouteArgs& args, u32 token) {
    constexpr bool kSigmoid = kStage == RouteStage::kTopkSigmoid, kSparse = kStage == RouteStage::kTopkSparseMixer;
    const u32 lane = ptx::laneid();
    const float none = ptx::float_from_bits(0xff800000u);  // -inf
    const u16* const logits = args.logits + token * args.logits_pitch;
    [[maybe_unused]] const float* const correction = reinterpret_cast<const float*>(args.products);
    u32 keys[kPerLane];  // 0: no such expert, or chosen before
#pragma unroll
    for (u32 i = 0; i < kPerLane; ++i) {
        keys[i] = 0;
        const u32 expert = i * 32 + lane;
        if (expert < args.experts) {
            // max(NaN, -inf) is -inf.
            float value = ptx::max(ptx::float_from_bits(ptx::ld_global_u16(logits + expert) << 16), none);
            if constexpr (kSigmoid) {
                const float bias = ptx::float_from_bits(ptx::ld_global(correction + expert));
                const bool is_number = (ptx::ld_global_u16(logits + expert) & 0x7fff) <= 0x7f80;
                value = is_number ? ptx::max(ptx::add(score_of(logits + expert), bias), none) : none;
            }
            keys[i] = key_of(value);
        }
    }
    [[maybe_unused]] float offset = 0.0f, sum = 0.0f;
    if constexpr (!kSigmoid && !kSparse) {
        u32 largest = 0;
#pragma unroll
        for (u32 i = 0; i < kPerLane; ++i) largest = keys[i] > largest ? keys[i] : largest;
        largest = ptx::redux_sync_max(largest);
        offset = value_of(largest) == none ? 0.0f : value_of(largest);
#pragma unroll
        for (u32 i = 0; i < kPerLane; ++i) {
            const float value = keys[i] != 0 ? value_of(keys[i]) : none;
            sum = ptx::add(sum, ptx::ex2_approx((value - offset) * 1.44269504f));
        }
        sum = warp_sum(sum);
    }

    // Lane j keeps the expert in place j; the weights of all places are computed together, after the loop.
    u32 id = 0, key = 0;
    float weight = 0.0f;
    for (u32 place = 0; place < args.top_k; ++place) {
        u32 best = 0;
#pragma unroll
        for (u32 i = 0; i < kPerLane; ++i) best = keys[i] > best ? keys[i] : best;
        best = ptx::redux_sync_max(best);
        u32 expert = ~0u;
#pragma unroll
        for (u32 i = kPerLane; i-- > 0;) expert = keys[i] == best ? i * 32 + lane : expert;
        // Of equal logits the lower expert.
        expert = ptx::redux_sync_min(expert);
        if constexpr (kSparse) {
            const float logit = value_of(best);
            const float share = logit == none ? 0.0f : ptx::div(1.0f, near_sum(keys, logit, args.routed_scale));
            if (place == lane) weight = share;
        }
#pragma unroll
        for (u32 i = 0; i < kPerLane; ++i) keys[i] = expert == i * 32 + lane ? 0 : keys[i];
        if (place == lane) {
            id = expert;
            key = best;
        }
    }
    if (lane < args.top_k) {
        if constexpr (kSigmoid) weight = score_of(logits + id);
        if constexpr (!kSigmoid && !kSparse) {
            weight = ptx::div(ptx::ex2_approx((value_of(key) - offset) * 1.44269504f), sum);
        }
    }
    // In order of places.
    float chosen = 0.0f;
    for (u32 place = 0; place < args.top_k; ++place) {
        chosen = ptx::add(chosen, ptx::float_from_bits(ptx::shfl_sync_idx(ptx::bits_from_float(weight), place)));
    }
    const u32 places = args.top_k + args.shared;
    if (lane >= places) return;
    if constexpr (kSigmoid) chosen = ptx::add(chosen, 1e-20f);
    if (args.normalized != 0) weight = ptx::div(weight, chosen);
    if constexpr (kSigmoid) weight = ptx::mul(weight, args.routed_scale);
    if (lane >= args.top_k) {
        id = args.experts + lane - args.top_k;
        weight = 1.0f;
        if (args.gated != 0) {
            const float gate = ptx::float_from_bits(ptx::ld_global_u16(logits + args.experts) << 16);
            weight = ptx::div(1.0f, ptx::add(1.0f, ptx::ex2_approx(gate * -1.44269504f)));
        }
    }
    if (args.rounded != 0) weight = activation::low_of(ptx::cvt_rn_bf16x2(weight, weight));
    weight = ptx::mul(weight, args.scale);
    const u64 pair = u64(token) * places + lane;
    ptx::st_global(args.ids + pair, id);
    ptx::st_global(args.weights + pair, ptx::bits_from_float(weight));
}

template <bool kPdl, RouteStage kStage>
UW_DEVICE void topk(const RouteArgs& args) {
    start<kPdl>();
    const u32 token = ptx::ctaid() * (kTopkThreads / 32) + ptx::uniform_warp_index();
    if (token >= args.tokens) return;
    if (args.experts <= kFewExperts) return topk<kStage, kFewExperts / 32>(args, token);
    topk<kStage, kExpertsMax / 32>(args, token);
}

// ---- sort ----------------------------------------------------------------------------------------------------------
// 32 pairs of a range: the expert of each, the lanes with the same expert, and how many of those precede this lane.
struct Step {
    u32 expert, peers, before;
    bool counts, leads;

    UW_DEVICE Step(const RouteArgs& args, u32 at, u32 end, u32 lane) {
        expert = at + lane < end ? ptx::ld_global(args.ids + at + lane) : ~0u;
        counts = expert < args.experts;
        peers = ptx::match_any_sync(expert);
        before = ptx::popc(peers & ((1u << lane) - 1));
        leads = counts && before == 0;
    }
};

template <bool kPdl>
UW_DEVICE void sort(const RouteArgs& args) {
    start<kPdl>();
    const u32 shared = ptx::cvta_to_shared(ptx::dynamic_smem());
    const u32 thread = ptx::tid(), warp = ptx::uniform_warp_index(), lane = ptx::laneid();
    const u32 counts = shared + warp * kCountPitch, firsts = shared + kFirsts, warp_sums = shared + kWarpSums;
    // The range of each warp, a whole number of steps.
    const u32 pairs = args.tokens * args.top_k, run = (pairs + kSortThreads - 1) / kSortThreads * 32;
    const u32 begin = warp * run < pairs ? warp * run : pairs, end = pairs - begin < run ? pairs : begin + run;

    const u32 used_warps = run == 0 ? 0 : (pairs + run - 1) / run;  // the others have no pairs

    for (u32 e = lane; e < args.experts && warp < used_warps; e += 32) ptx::st_shared(counts + e * 4, 0);
    ptx::bar_warp_sync();  // orders the zeros of all lanes before any lane counts
    for (u32 at = begin; at < end; at += 32) {
        const Step step(args, at, end, lane);
        if (step.leads) {
            const u32 address = counts + step.expert * 4;
            ptx::st_shared(address, ptx::ld_shared(address) + ptx::popc(step.peers));
        }
        // Orders this step's counts before another lane counts the same expert in the next step.
        ptx::bar_warp_sync();
    }
    ptx::bar_sync();  // orders the counts of all warps before a thread sums those of an expert

    // Thread e: number of pairs of expert e. Each warp's count is replaced by the number of pairs in the ranges before.
    u32 total = 0;
    if (thread < args.experts) {
        for (u32 w = 0; w < used_warps; ++w) {
            const u32 address = shared + w * kCountPitch + thread * 4, count = ptx::ld_shared(address);
            ptx::st_shared(address, total);
            total += count;
        }
    }
    const u32 items = (total + args.item_rows - 1) / args.item_rows;
    u32 entries_to = total, items_to = items;  // inclusive sums over the warp's experts, later over all experts
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2) {
        const u32 entries_before = ptx::shfl_sync_up(entries_to, distance);
        const u32 items_before = ptx::shfl_sync_up(items_to, distance);
        if (lane >= distance) {
            entries_to += entries_before;
            items_to += items_before;
        }
    }
    if (lane == 31) ptx::st_shared_x2(warp_sums + warp * 8, U32x2{entries_to, items_to});
    ptx::bar_sync();  // orders the sums of all warps before they are added up
    u32 all_items = 0;
#if __CUDA_ARCH__ >= 1000
#pragma unroll 4  // unrolled by 32, it spills there
#endif
    for (u32 w = 0; w < kSortWarps; ++w) {
        const U32x2 sums = ptx::ld_shared_x2(warp_sums + w * 8);
        if (w < warp) {
            entries_to += sums.x;
            items_to += sums.y;
        }
        all_items += sums.y;
    }
    const u32 first = entries_to - total, first_item = items_to - items;
    if (thread < args.experts) ptx::st_shared(firsts + thread * 4, first);
    for (u32 i = 0; i < items && first_item + i < args.items_max; ++i) {
        const u32 done = i * args.item_rows, more = total - done;
        const U32x4 item{thread, first + done, more < args.item_rows ? more : args.item_rows, 0};
        ptx::st_global_x4(args.items + u64(first_item + i) * 4, item);
    }
    for (u32 i = all_items + thread; i < args.items_max; i += kSortThreads) {
        ptx::st_global_x4(args.items + u64(i) * 4, U32x4{0, 0, 0, 0});
    }
    ptx::bar_sync();  // orders first entries and start positions before warps place their pairs

    for (u32 at = begin; at < end; at += 32) {
        const Step step(args, at, end, lane);
        const u32 address = counts + step.expert * 4;
        u32 place = 0;
        if (step.counts) {
            place = ptx::ld_shared(address);
            ptx::st_global(args.pairs + ptx::ld_shared(firsts + step.expert * 4) + place + step.before, at + lane);
        }
        ptx::bar_warp_sync();  // orders all lanes' loads of their positions before a leader advances them
        if (step.leads) ptx::st_shared(address, place + ptx::popc(step.peers));
        ptx::bar_warp_sync();  // orders the advance before the loads of the next step
    }
}

// ---- combine -------------------------------------------------------------------------------------------------------
UW_DEVICE void add_product(float (&sums)[kChunk], float weight, U32x4 row) {
    const u32 words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        sums[2 * i] = ptx::fma(weight, activation::low_of(words[i]), sums[2 * i]);
        sums[2 * i + 1] = ptx::fma(weight, activation::high_of(words[i]), sums[2 * i + 1]);
    }
}

template <bool kPdl>
UW_DEVICE void combine(const RouteArgs& args) {
    start<kPdl>();
    const u32 token = ptx::ctaid() / args.row_blocks, block = ptx::ctaid() - token * args.row_blocks;
    const u32 column = (block * kCombineThreads + ptx::tid()) * kChunk;
    const bool is_inside = column < args.columns;
    // Lane j loads what belongs to place j; the rows of kRowsAtOnce places are then loaded together.
    const u32 lane = ptx::laneid();
    const u64 first = u64(token) * args.top_k;
    const u64 pair = first + (lane < args.top_k ? lane : 0);
    const u32 id = ptx::ld_global(args.ids + pair), weights = ptx::ld_global(args.weights + pair);
    const u32 present = ptx::vote_sync_ballot(lane < args.top_k && id < args.experts);
    u16* const y = args.y + token * args.y_pitch + column;
    const U32x4 old = args.adds != 0 && is_inside ? ptx::ld_global_x4(y) : U32x4{0, 0, 0, 0};
    float sums[kChunk] = {};
    for (u32 place = 0; place < args.top_k; place += kRowsAtOnce) {
        U32x4 rows[kRowsAtOnce];
#pragma unroll
        for (u32 i = 0; i < kRowsAtOnce; ++i) {
            const bool loads = is_inside && (present >> (place + i) & 1) != 0;
            const u16* const row = args.products + (first + place + i) * args.columns + column;
            rows[i] = loads ? ptx::ld_global_x4(row) : U32x4{0, 0, 0, 0};
        }
#pragma unroll
        for (u32 i = 0; i < kRowsAtOnce; ++i) {
            const float weight = ptx::float_from_bits(ptx::shfl_sync_idx(weights, place + i));
            if ((present >> (place + i) & 1) != 0) add_product(sums, weight, rows[i]);
        }
    }
    if (!is_inside) return;
    if (args.adds != 0) add_product(sums, 1.0f, old);
    ptx::st_global_x4(y, U32x4{ptx::cvt_rn_bf16x2(sums[0], sums[1]), ptx::cvt_rn_bf16x2(sums[2], sums[3]),
                               ptx::cvt_rn_bf16x2(sums[4], sums[5]), ptx::cvt_rn_bf16x2(sums[6], sums[7])});
}

// ---- entry
template <class Config>
UW_DEVICE void run(const RouteArgs& args) {
    if constexpr (kThreads<Config> == kTopkThreads) {
        topk<Config::kPdl, Config::kStage>(args);
    } else if constexpr (Config::kStage == RouteStage::kSort) {
        sort<Config::kPdl>(args);
    } else {
        combine<Config::kPdl>(args);
    }
}

}  // namespace uw::route
