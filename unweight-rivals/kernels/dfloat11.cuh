// DFloat11 (docs/rivals.md): coded exponents, signs and mantissas -> bf16. One launch for a unit, whatever its weights.
//
// Config
//   u32 kThreads   threads of a block, a multiple of 32 up to 1024; the format's own number may be another
//
// A thread decodes the codes that begin in its window of 8 bytes, up to four of them for each look at 12 bits, and parks
// the exponents. A sum over the block says where each window's exponents belong; there they go, one after the other. The
// block then stores 8 elements a thread, 16 bytes each. The package's kernel decodes twice instead: once to count.
//
// Grid      what fits the machine: a block takes every so many format blocks, so tables are read once.
// Smem      8192 + 16384 + 4 * warps + 64 * kThreads + 16: codes that begin in 12 bits, their exponents, sums, exponents
// Barriers  all of the block (sync_block): behind the tables, behind the sums of warps, between the exponents and their
//           reading, and before the next ones overwrite them. No copy engine.
// Bound     device memory: 10.8 bits in and 16 out an element; the arithmetic takes as long.
//
// Safety    any bytes in codes, gaps, positions, luts. A block whose positions are not within the elements, one after the
//           other, is left out; of a block whose codes are not as many as its positions say, only elements between its
//           positions are written. Both count in `faults`. A window has at most 64 codes: each takes a bit at least.
//           `starts` and `symbols` are the host's (unweight-rivals/src/cuda/dfloat11.rs).
#pragma once

#include "unweight/ptx/barrier.cuh"
#include "unweight/ptx/memory.cuh"

namespace uw {

struct Dfloat11Args {
    const u32* codes;
    const u8* gaps;
    const u32* positions;
    const u8* luts;
    const u8* sign_mantissa;
    const u16* starts;
    const u32* symbols;
    u16* weights;
    u32* faults;
    u32 code_words;
    u32 gap_bytes;
    u32 blocks;
    u32 windows;
    u32 rows;
    u32 elements;
};

}  // namespace uw

namespace uw::dfloat11 {

constexpr u32 kLookupBits = 12, kLookups = 1 << kLookupBits;
constexpr u32 kWindowBits = 64, kWindowWords = 16;  // words of exponents that a window can have
constexpr u32 kFirstJump = 240;

template <class Config>
struct Smem {
    static constexpr u32 kThreads = Config::kThreads, kWarps = kThreads / 32;
    static constexpr u32 kStarts = 0, kSymbols = kStarts + 2 * kLookups, kSums = kSymbols + 4 * kLookups;
    static constexpr u32 kExponents = kSums + (4 * kWarps + 15) / 16 * 16;
    // An unaligned front, and all windows full.
    static constexpr u32 kBytes = kExponents + kWindowBits * kThreads + 16;
};

// 96 bits of codes, the next one at the top.
struct Bits {
    u32 a, b, c;

    // By less than 32.
    UW_DEVICE void skip(u32 bits) {
        a = ptx::funnel_shift_left(b, a, bits);
        b = ptx::funnel_shift_left(c, b, bits);
        c <<= bits;
    }
};

// An exponent by the file's own tables, and the bits of its code: 1 to 32.
struct Found {
    u32 exponent, bits;
};

UW_DEVICE Found walk(const Dfloat11Args& args, u32 bits) {
    u32 row = 0, exponent = 0;
#pragma unroll 1
    for (u32 depth = 0; depth < 4; ++depth) {
        const u32 value = ptx::load_global_nc_u8(args.luts + row * 256 + (bits >> (24 - 8 * depth) & 0xff));
        if (value < kFirstJump) {
            exponent = value;
            break;
        }
        row = 256 - value;
        if (row >= args.rows) break;
    }
    const u32 length = ptx::load_global_nc_u8(args.luts + args.rows * 256 + exponent);
    return {exponent, length == 0 ? 1 : length > 32 ? 32 : length};
}

// The last exponents that a window parked: how many in all, and the last eight bytes of them.
struct Parked {
    u32 count, before, last;
};

// Decodes a window from its first code on; exponents go to every `stride`-th byte address from `to` on, by words.
UW_DEVICE Parked decode(const Dfloat11Args& args, Bits bits, u32 at, u32 smem_starts, u32 smem_symbols, u32 to, u32 stride) {
    Parked parked{0, 0, 0};
    u32 filled = 0;  // bits of `parked.last`
    bits.skip(at);
    while (at < kWindowBits) {
        const u32 next = bits.a >> (32 - kLookupBits);
        const u32 entry = ptx::load_shared_u16(smem_starts + 2 * next);
        u32 used = entry >> kLookupBits, symbols, count;
        if (used > 0) {
            symbols = ptx::load_shared(smem_symbols + 4 * next);
            // Codes that begin behind the window are the next thread's.
            const u32 room = kWindowBits - at;
            const u32 own = room < kLookupBits ? (1u << room) - 1 : kLookups - 1;
            count = ptx::popcount(entry & own);
        } else {
            const Found found = walk(args, bits.a);
            symbols = found.exponent;
            count = 1;
            used = found.bits;
            // Twice, as a shift is by less than 32.
            bits.skip(used / 2);
            at += used / 2;
            used -= used / 2;
        }
        bits.skip(used);
        at += used;
        parked.last |= symbols << filled;
        const u32 over = ptx::funnel_shift_left(symbols, 0, filled);
        filled += 8 * count;
        if (filled >= 32) {
            ptx::store_shared(to, parked.last);
            to += stride;
            parked.before = parked.last;
            parked.last = over;
            filled -= 32;
            parked.count += 4;
        }
    }
    if (filled > 0) ptx::store_shared(to, parked.last);
    parked.count += filled / 8;
    return parked;
}

// Bytes from `value`, lowest first.
UW_DEVICE void store_bytes(u32 to, u32 value, u32 count) {
#pragma unroll
    for (u32 i = 0; i < 3; ++i) {
        if (i < count) ptx::store_shared_u8(to + i, value >> (8 * i));
    }
}

// Two elements: signs and mantissas in bytes 0 and 2 of `rest`, exponents likewise.
UW_DEVICE u32 join(u32 rest, u32 exponents) {
    return (rest << 8 & 0x80008000u) | exponents << 7 | (rest & 0x007f007fu);
}

// Elements 0, 1 or 2, 3 of four bytes each.
UW_DEVICE u32 join_low(u32 rest, u32 exponents) { return join(ptx::prmt(rest, 0, 0x4140), ptx::prmt(exponents, 0, 0x4140)); }
UW_DEVICE u32 join_high(u32 rest, u32 exponents) { return join(ptx::prmt(rest, 0, 0x4342), ptx::prmt(exponents, 0, 0x4342)); }

// Stores elements [begin, end), whose exponents lie from `exponents` on: byte i is that of element begin / 8 * 8 + i.
template <u32 kThreads>
UW_DEVICE void store(const Dfloat11Args& args, u32 begin, u32 end, u32 exponents) {
    const u32 front = begin & ~7u;
    for (u32 first = front + 8 * ptx::thread_index(); first < end; first += 8 * kThreads) {
        const u32 from = exponents + (first - front);
        if (first >= begin && first + 8 <= end) {
            const U32x2 rest = ptx::load_global_nc_x2(args.sign_mantissa + first), own = ptx::load_shared_x2(from);
            const U32x4 weights{join_low(rest.x, own.x), join_high(rest.x, own.x), join_low(rest.y, own.y), join_high(rest.y, own.y)};
            ptx::store_global_cs_x4(args.weights + first, weights);
        } else {
#pragma unroll 1
            for (u32 i = 0; i < 8; ++i) {
                if (first + i < begin || first + i >= end) continue;
                const u32 rest = ptx::load_global_nc_u8(args.sign_mantissa + first + i);
                ptx::store_global_u16(args.weights + first + i, join(rest, ptx::load_shared_u8(from + i)) & 0xffff);
            }
        }
    }
}

template <class Config>
UW_DEVICE void run(const Dfloat11Args& args) {
    using S = Smem<Config>;
    constexpr u32 kThreads = S::kThreads, kWarps = S::kWarps;
    const u32 smem = ptx::smem_address(ptx::dynamic_smem()), thread = ptx::thread_index(), lane = thread % 32;
    const u32 warp = ptx::uniform_warp_index();
    for (u32 i = thread; i < kLookups / 8; i += kThreads) {
        ptx::store_shared_x4(smem + S::kStarts + 16 * i, ptx::load_global_nc_x4(args.starts + 8 * i));
    }
    for (u32 i = thread; i < kLookups / 4; i += kThreads) {
        ptx::store_shared_x4(smem + S::kSymbols + 16 * i, ptx::load_global_nc_x4(args.symbols + 4 * i));
    }
    ptx::sync_block();  // orders the tables before the lookups
    const u32 park = smem + S::kExponents + 4 * thread;
    for (u32 block = ptx::block_index(); block < args.blocks; block += ptx::grid_size()) {
        const u32 begin = ptx::load_global_nc(args.positions + block), end = ptx::load_global_nc(args.positions + block + 1);
        if (begin > end || end > args.elements) {
            if (thread == 0) ptx::reduce_add_global(args.faults, 1);
            continue;
        }
        // What is read last is asked for first.
        if (begin + 128 * thread < end) ptx::prefetch_l2(args.sign_mantissa + begin + 128 * thread);
        u32 at = begin, found = 0;
        for (u32 first = 0; first < args.windows; first += kThreads) {
            const u32 within = first + thread, window = block * args.windows + within, word = 2 * window;
            Parked parked{0, 0, 0};
            if (within < args.windows && word < args.code_words) {
                auto load = [&](u32 w) { return w < args.code_words ? ptx::prmt(ptx::load_global_nc(args.codes + w), 0, 0x0123) : 0; };
                const Bits bits{load(word), load(word + 1), load(word + 2)};
                const u32 bit = 5 * window, byte = bit / 8;
                const u32 high = byte < args.gap_bytes ? ptx::load_global_nc_u8(args.gaps + byte) : 0;
                const u32 low = byte + 1 < args.gap_bytes ? ptx::load_global_nc_u8(args.gaps + byte + 1) : 0;
                const u32 gap = (high << 8 | low) >> (11 - bit % 8) & 31;
                parked = decode(args, bits, gap, smem + S::kStarts, smem + S::kSymbols, park, 4 * kThreads);
            }
            // Words that this thread has parked itself, before others take their places.
            u32 words[kWindowWords];
#pragma unroll
            for (u32 j = 0; j < kWindowWords; ++j) words[j] = 4 * j < parked.count ? ptx::load_shared(park + 4 * kThreads * j) : 0;
            u32 sum = parked.count;
#pragma unroll
            for (u32 delta = 1; delta < 32; delta *= 2) {
                const u32 other = ptx::shuffle_up(sum, delta);
                if (lane >= delta) sum += other;
            }
            if (lane == 31) ptx::store_shared(smem + S::kSums + 4 * warp, sum);
            ptx::sync_block();  // orders the sums before their reading, and every thread's reading before the writing below
            const u32 of_lane = lane < kWarps ? ptx::load_shared(smem + S::kSums + 4 * lane) : 0;
            u32 sums = of_lane;
#pragma unroll
            for (u32 delta = 1; delta < 32; delta *= 2) {
                const u32 other = ptx::shuffle_up(sums, delta);
                if (lane >= delta) sums += other;
            }
            const u32 total = ptx::shuffle(sums, 31), before = ptx::shuffle(sums - of_lane, warp) + sum - parked.count;
            // Exponents of this window to where they belong, at any byte: whole words, and what is left of them at both
            // ends.
            const u32 to = smem + S::kExponents + (at & 7) + before, shift = to & 3, aligned = to - shift;
            const u32 reach = shift + parked.count;
            if (parked.count >= 4) {
                store_bytes(to, words[0], (4 - shift) & 3);
#pragma unroll
                for (u32 j = 0; j < kWindowWords; ++j) {
                    if (4 * j + 4 <= reach && (j > 0 || shift == 0)) {
                        ptx::store_shared(aligned + 4 * j, ptx::funnel_shift_left(j > 0 ? words[j - 1] : 0, words[j], 8 * shift));
                    }
                }
                const u32 four = ptx::funnel_shift_right(parked.before, parked.last, 8 * (parked.count & 3));
                const u32 rest = reach & 3;
                store_bytes(aligned + (reach & ~3u), ptx::funnel_shift_left(four, 0, 8 * rest), rest);
            } else {
                store_bytes(to, words[0], parked.count);
            }
            ptx::sync_block();  // orders the exponents before their reading by others, and the sums before the next ones
            const u32 taken = total < end - at ? total : end - at;
            store<kThreads>(args, at, at + taken, smem + S::kExponents);
            at += taken;
            found += total;
            ptx::sync_block();  // orders the reading before the next windows' exponents
        }
        // The last block's codes end in bits that look like some.
        const bool wrong = found < end - begin || (found > end - begin && block + 1 < args.blocks);
        if (wrong && thread == 0) ptx::reduce_add_global(args.faults, 1);
    }
}

}  // namespace uw::dfloat11
