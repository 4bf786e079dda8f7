// MatVANS (docs/rivals.md): y = clamp(round(scale * W x)), int8, from the rANS streams of W; and the same from W as it
// is. Sums of 32 bits, rounded once to fp32, times `scale` in fp32, to the nearest even.
//
//   rows      a warp takes a row: step t has columns 128 t .. 128 t + 128, lane c four of them from 4 c on
//   stripes   a warp takes 32 rows: step t has columns 4 t .. 4 t + 4, lane c row c
//   lanes     a warp takes a row, of which each lane has words of its own: 16 columns of every 512, from 16 c on
//   dense     a warp takes a row of int8
//
// Config
//   u32 kParts     parts of a whole: 128 for rows and stripes, 256 for lanes, 0 for dense
//   u32 kRing      words of a warp's ring: 256 for rows and stripes, else 0
//
// Grid      four warps a block; a warp a stream, or a row
// Smem      a word for each part (value, first part, parts), and a ring a warp: the words of the stream that are next,
//           word n in place n % 256; those of lanes stay in registers
// Barriers  all of the block (bar_sync) behind the parts; __syncwarp between a warp's words and their reading
// Bound     the chain from state to state: a step takes a look at the words, four at the parts, a product of 64 bits.
//
// Safety    any bytes: words are read from the stream's own stretch, zeros behind it; parts are looked up by 7 or 8
//           bits; a stretch that leaves the words, or has no whole groups, has none. Streams that ran out of words, or
//           have such a stretch, count in `faults`; their sums are of whatever was decoded.
#pragma once

#include "unweight/ptx/barrier.cuh"
#include "unweight/ptx/memory.cuh"

namespace uw {

struct MatvansArgs {
    const u32* words;
    const u32* offsets;
    const u32* parts;
    const u8* dense;
    const u8* x;
    u8* y;
    u32* faults;
    u64 word_count;
    u32 streams;
    u32 rows;
    u32 cols;
    float scale;
};

}  // namespace uw

namespace uw::matvans {

constexpr u32 kWarps = 4, kParts = 128, kGroup = 128, kRing = 256, kFirstWords = 64;

template <class Config>
constexpr u32 kThreads = 32 * kWarps;

template <class Config>
struct Smem {
    static constexpr u32 kTable = 0, kRings = 4 * Config::kParts;
    static constexpr u32 kBytes = kRings + kWarps * Config::kRing * 4;
};

// a.x * b.x + ... + sum, of four int8 each.
UW_DEVICE i32 dot(u32 a, u32 b, i32 sum) {
#ifdef UW_CPU
    for (u32 i = 0; i < 4; ++i) sum += static_cast<signed char>(a >> (8 * i)) * static_cast<signed char>(b >> (8 * i));
    return sum;
#else
    return __dp4a(static_cast<i32>(a), static_cast<i32>(b), sum);
#endif
}

UW_DEVICE u32 rounded(i32 sum, float scale) {
    float value = ptx::mul(static_cast<float>(sum), scale);
    value = value < -128.0f ? -128.0f : value > 127.0f ? 127.0f : value;
    // 1.5 * 2^23: its last bit is worth 1.
    return ptx::bits_from_float(ptx::add(value, 12582912.0f)) & 0xff;
}

// The words of a stream, in order, through a warp's ring.
struct Queue {
    const u32* next;    // the next group of words
    u32 groups;         // groups from there on
    u32 ring;           // shared address
    u32 filled, taken;  // words that entered and left the ring
    U32x4 ahead;        // the next group, if there is one
    u32 lane;

    UW_DEVICE void load() {
        ahead = groups > 0 ? ptx::ld_global_nc_x4(next + 4 * lane) : U32x4{0, 0, 0, 0};
        next += kGroup;
        groups -= groups > 0;
    }
    UW_DEVICE void put(u32 word, u32 place) const {
        ptx::st_shared(ring + ((filled + place * 32 + lane) % kRing) * 4, word);
    }

    // The stream's first group: 64 words, and the coders' states, which it returns.
    UW_DEVICE u64 begin() {
        load();
        const u64 state = static_cast<u64>(ahead.w) << 32 | ahead.z;
        put(ahead.x, 0);
        put(ahead.y, 1);
        filled = kFirstWords;
        load();
        ptx::bar_warp_sync();  // orders the words before their reading by other lanes
        return state;
    }

    // The next words to the lanes that want one, in their order.
    UW_DEVICE u32 take(bool wants) {
        const u32 all = ptx::vote_sync_ballot(wants);
        // As the words left may be fewer than those wanted, of which there are 32 at most.
        if (filled - taken < 32) {
            ptx::bar_warp_sync();  // orders the reading of what is overwritten, a ring ago, before the writing
            put(ahead.x, 0);
            put(ahead.y, 1);
            put(ahead.z, 2);
            put(ahead.w, 3);
            filled += kGroup;
            load();
            ptx::bar_warp_sync();  // orders the words before their reading by other lanes
        }
        const u32 before = ptx::popc(all & ((1u << lane) - 1));
        const u32 word = wants ? ptx::ld_shared(ring + ((taken + before) % kRing) * 4) : 0;
        taken += ptx::popc(all);
        return word;
    }
};

// The four values that a state stands for, and the state after them.
UW_DEVICE u32 decode_quad(u64& state, u32 table) {
    const u32 low = static_cast<u32>(state);
    u32 part[4], entry[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        part[i] = low >> (7 * i) & (kParts - 1);
        entry[i] = ptx::ld_shared(table + 4 * part[i]);
    }
    u32 product = 1, rest = 0;
#pragma unroll
    for (u32 i = 4; i-- > 0;) {
        const u32 count = entry[i] >> 16 & 0xff, first = entry[i] >> 8 & 0xff;
        rest = rest * count + (part[i] - first);
        product *= count;
    }
    state = (state >> 28) * product + rest;
    return ptx::prmt(ptx::prmt(entry[0], entry[1], 0x0040), ptx::prmt(entry[2], entry[3], 0x0040), 0x5410);
}

// A stream's queue; one whose stretch is not sane is empty.
UW_DEVICE Queue open(const MatvansArgs& args, u32 stream, u32 ring, u32 lane, bool& sane) {
    const u64 begin = static_cast<u64>(ptx::ld_global_nc(args.offsets + stream)) * 4;
    const u64 next = stream + 1 < args.streams ? static_cast<u64>(ptx::ld_global_nc(args.offsets + stream + 1)) * 4
                                               : args.word_count;
    sane = begin < next && next <= args.word_count && (next - begin) % kGroup == 0 && (begin & 3) == 0;
    return {args.words + (sane ? begin : 0),
            sane ? static_cast<u32>((next - begin) / kGroup) : 0,
            ring,
            0,
            0,
            {0, 0, 0, 0},
            lane};
}

// Stream of this warp, or `streams` if it has none; the block's parts are in shared memory.
template <class Config>
UW_DEVICE u32 prepare(const MatvansArgs& args, u32 smem) {
    using S = Smem<Config>;
    static_assert(Config::kParts % kThreads<Config> == 0, "a thread copies whole parts");
#pragma unroll
    for (u32 part = ptx::tid(); part < Config::kParts; part += kThreads<Config>)
        ptx::st_shared(smem + S::kTable + 4 * part, ptx::ld_global_nc(args.parts + part));
    ptx::bar_sync();  // orders the parts before the lookups of every warp
    return ptx::ctaid() * kWarps + ptx::uniform_warp_index();
}

UW_DEVICE void finish(const MatvansArgs& args, const Queue& queue, u32 words, bool sane) {
    if (queue.lane == 0 && (!sane || queue.taken > words)) ptx::red_add_global(args.faults, 1);
}

UW_DEVICE i32 sum_of_warp(i32 sum) {
    u32 all = static_cast<u32>(sum);
#pragma unroll
    for (u32 mask = 16; mask > 0; mask /= 2) all += ptx::shfl_sync_bfly(all, mask);
    return static_cast<i32>(all);
}

template <class Config>
UW_DEVICE void rows(const MatvansArgs& args) {
    const u32 smem = ptx::cvta_to_shared(ptx::dynamic_smem()), lane = ptx::tid() % 32;
    const u32 stream = prepare<Config>(args, smem), warp = ptx::uniform_warp_index();
    if (stream >= args.streams) return;
    bool sane;
    Queue queue = open(args, stream, smem + Smem<Config>::kRings + warp * kRing * 4, lane, sane);
    const u32 words = sane ? queue.groups * kGroup - kFirstWords : 0;
    u64 state = queue.begin();
    i32 sum = 0;
    for (u32 step = 0; step < args.cols / kGroup; ++step) {
        const u32 x = ptx::ld_global_nc(args.x + (step * 32 + lane) * 4);
        const bool wants = state >> 32 == 0;
        const u32 word = queue.take(wants);
        if (wants) state = state << 32 | word;
        sum = dot(decode_quad(state, smem), x, sum);
    }
    sum = sum_of_warp(sum);
    if (lane == 0) ptx::st_global_u8(args.y + stream, rounded(sum, args.scale));
    finish(args, queue, words, sane);
}

template <class Config>
UW_DEVICE void stripes(const MatvansArgs& args) {
    const u32 smem = ptx::cvta_to_shared(ptx::dynamic_smem()), lane = ptx::tid() % 32;
    const u32 stream = prepare<Config>(args, smem), warp = ptx::uniform_warp_index();
    if (stream >= args.streams) return;
    bool sane;
    Queue queue = open(args, stream, smem + Smem<Config>::kRings + warp * kRing * 4, lane, sane);
    const u32 words = sane ? queue.groups * kGroup - kFirstWords : 0;
    u64 state = queue.begin();
    i32 sum = 0;
    for (u32 step = 0; step < args.cols / 4; ++step) {
        const u32 x = ptx::ld_global_nc(args.x + step * 4);
        const bool wants = state >> 32 == 0;
        const u32 word = queue.take(wants);
        if (wants) state = state << 32 | word;
        sum = dot(decode_quad(state, smem), x, sum);
    }
    ptx::st_global_u8(args.y + stream * 32 + lane, rounded(sum, args.scale));
    finish(args, queue, words, sane);
}

// A lane's own words, in order: 8 in registers, and its next 8.
struct LaneQueue {
    const u32* next;  // this lane's next 4 words of 32 bits, a group of all lanes apart
    u32 groups;       // groups from there on
    u32 left, taken;  // words of 16 bits in `low` and `high`, and out of them
    u64 low, high;
    U32x4 ahead;

    UW_DEVICE void load() {
        ahead = groups > 0 ? ptx::ld_global_nc_x4(next) : U32x4{0, 0, 0, 0};
        next += kGroup;
        groups -= groups > 0;
    }
    UW_DEVICE u32 take() {
        if (left == 0) {
            low = static_cast<u64>(ahead.y) << 32 | ahead.x;
            high = static_cast<u64>(ahead.w) << 32 | ahead.z;
            left = 8;
            load();
        }
        const u32 word = static_cast<u32>(low) & 0xffff;
        low = low >> 16 | high << 48;
        high >>= 16;
        --left;
        ++taken;
        return word;
    }
};

template <class Config>
UW_DEVICE void lanes(const MatvansArgs& args) {
    const u32 smem = ptx::cvta_to_shared(ptx::dynamic_smem()), lane = ptx::tid() % 32;
    const u32 stream = prepare<Config>(args, smem);
    if (stream >= args.streams) return;
    bool sane;
    const Queue whole = open(args, stream, 0, lane, sane);
    LaneQueue queue{whole.next + 4 * lane, whole.groups, 0, 0, 0, 0, {0, 0, 0, 0}};
    queue.load();
    u32 state = queue.take() << 16;
    state |= queue.take();
    i32 sum = 0;
    for (u32 at = 16 * lane; at < args.cols; at += 512) {
        const U32x4 x = ptx::ld_global_nc_x4(args.x + at);
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            u32 values = 0;
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                if (state >> 16 == 0) state = state << 16 | queue.take();
                const u32 part = state & (Config::kParts - 1), entry = ptx::ld_shared(smem + 4 * part);
                state = (state >> 8) * (entry >> 16 & 0xff) + part - (entry >> 8 & 0xff);
                values |= (entry & 0xff) << (8 * j);
            }
            sum = dot(values, i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w, sum);
        }
    }
    sum = sum_of_warp(sum);
    const bool faulty = ptx::vote_sync_ballot(!sane || queue.taken > 8 * whole.groups) != 0;
    if (lane == 0) {
        ptx::st_global_u8(args.y + stream, rounded(sum, args.scale));
        if (faulty) ptx::red_add_global(args.faults, 1);
    }
}

template <class Config>
UW_DEVICE void dense(const MatvansArgs& args) {
    const u32 row = ptx::ctaid() * kWarps + ptx::uniform_warp_index(), lane = ptx::tid() % 32;
    if (row >= args.rows) return;
    const u8* own = args.dense + static_cast<u64>(row) * args.cols;
    i32 sum = 0;
#pragma unroll 8
    for (u32 at = 16 * lane; at < args.cols; at += 512) {
        const U32x4 w = ptx::ld_global_nc_x4(own + at), x = ptx::ld_global_nc_x4(args.x + at);
        sum = dot(w.w, x.w, dot(w.z, x.z, dot(w.y, x.y, dot(w.x, x.x, sum))));
    }
    sum = sum_of_warp(sum);
    if (lane == 0) ptx::st_global_u8(args.y + row, rounded(sum, args.scale));
}

}  // namespace uw::matvans
