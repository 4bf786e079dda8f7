// DFloat11 (docs/rivals.md): coded exponents, signs and mantissas -> bf16. One launch for a unit, whatever its weights.
//
// Config
//   u32 kThreads   threads of a block, a multiple of 32 up to 1024; the format's own number may be another
//
// A thread decodes the codes that begin in its window of 8 bytes, up to four of them for each look at 12 bits, and
// parks the exponents. A sum over the block says where each window's exponents belong; there they go, one after the
// other. The block then stores 8 elements a thread, 16 bytes each. The package's kernel decodes twice instead: once to
// count. So does this one where parked exponents have no room: where a window has more than 32, which takes codes of
// one bit, or the block's windows more than about 31.8 on average. Each thread then stores its own, one by one.
//
// Grid      what fits the machine: a block takes every so many format blocks, so tables are read once.
// Smem      8192 + 16384 + 4 * warps + 64 * kThreads - 64: codes that begin in 12 bits, their exponents, sums,
//           exponents, those parked. Of 512 threads four blocks fit a multiprocessor, with not a byte to spare.
// Barriers  all of the block (bar_sync): behind the tables, behind the sums of warps, and between the exponents and
//           their reading. Parked words are their thread's alone. No copy engine.
// Bound     device memory: 10.8 bits in and 16 out an element; the arithmetic takes as long.
//
// Safety    any bytes in codes, gaps, positions, luts. A block whose positions are not within the elements, one after
//           the other, is left out; of a block whose codes are not as many as its positions say, only elements between
//           its positions are written. Both count in `faults`. A window has at most 64 codes: each takes a bit at
//           least. `starts` and `symbols` are the host's (unweight-rivals/src/cuda/dfloat11.rs).
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
constexpr u32 kWindowBits = 64, kParkedWords = 8;  // words of exponents that a window may park
constexpr u32 kUnparked = 1 << 20;                 // in sums: a window has more. Blocks have fewer exponents.
constexpr u32 kFirstJump = 240;

template <class Config>
constexpr u32 kThreads = Config::kThreads;

template <class Config>
struct Smem {
    static constexpr u32 kWarps = Config::kThreads / 32;
    static constexpr u32 kStarts = 0, kSymbols = kStarts + 2 * kLookups, kSums = kSymbols + 4 * kLookups;
    static constexpr u32 kExponents = kSums + (4 * kWarps + 15) / 16 * 16;
    // Behind an unaligned front.
    static constexpr u32 kRoom = 4 * kParkedWords * Config::kThreads - 64, kParked = kExponents + kRoom;
    static constexpr u32 kBytes = kParked + 4 * kParkedWords * Config::kThreads;
};

// 96 bits of codes, the next one at the top.
struct Bits {
    u32 a, b, c;

    // By less than 32.
    UW_DEVICE void skip(u32 bits) {
        a = ptx::shf_l_wrap(b, a, bits);
        b = ptx::shf_l_wrap(c, b, bits);
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
        const u32 value = ptx::ld_global_nc_u8(args.luts + row * 256 + (bits >> (24 - 8 * depth) & 0xff));
        if (value < kFirstJump) {
            exponent = value;
            break;
        }
        row = 256 - value;
        if (row >= args.rows) break;
    }
    const u32 length = ptx::ld_global_nc_u8(args.luts + args.rows * 256 + exponent);
    return {exponent, length == 0 ? 1 : length > 32 ? 32 : length};
}

// A thread's part of a block: its bits, and how many of them are the code's before.
struct Window {
    Bits bits;
    u32 at;

    // Without codes where the block has no such window, or the unit no such words.
    UW_DEVICE static Window load(const Dfloat11Args& args, u32 block, u32 within) {
        const u32 window = block * args.windows + within, word = 2 * window;
        if (within >= args.windows || word >= args.code_words) return {{0, 0, 0}, kWindowBits};
        auto load = [&](u32 w) {
            return w < args.code_words ? ptx::prmt(ptx::ld_global_nc(args.codes + w), 0, 0x0123) : 0;
        };
        const u32 bit = 5 * window, byte = bit / 8;
        const u32 high = byte < args.gap_bytes ? ptx::ld_global_nc_u8(args.gaps + byte) : 0;
        const u32 low = byte + 1 < args.gap_bytes ? ptx::ld_global_nc_u8(args.gaps + byte + 1) : 0;
        return {{load(word), load(word + 1), load(word + 2)}, (high << 8 | low) >> (11 - bit % 8) & 31};
    }
};

// Decodes a window from its first code on: `take(exponents, count)` for 1 to 4 codes at a time.
template <class Take>
UW_DEVICE void decode(const Dfloat11Args& args, const Window& window, u32 smem_starts, u32 smem_symbols, Take& take) {
    Bits bits = window.bits;
    u32 at = window.at;
    bits.skip(at & 31);
    while (at < kWindowBits) {
        const u32 next = bits.a >> (32 - kLookupBits);
        // Both are asked for before either is waited for.
        const u32 entry = ptx::ld_shared_u16(smem_starts + 2 * next);
        u32 symbols = ptx::ld_shared(smem_symbols + 4 * next), used = entry % 16;
        // Codes that begin behind the window are the next thread's: those of the last bits that a look sees.
        const i32 behind = static_cast<i32>(at + kLookupBits - kWindowBits) + 4;
        u32 count = ptx::popc(entry >> (behind > 4 ? behind : 4));
        if (used == 0) {
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
        take(symbols, count);
    }
}

// Exponents of a window in words of shared memory, `stride` bytes apart. What has no place is counted only.
struct Parked {
    u32 to, stride, end;
    u32 bits, before, last;  // bits of all; the last eight bytes

    UW_DEVICE void operator()(u32 symbols, u32 count) {
        // These shifts are by `bits % 32`.
        last |= ptx::shf_l_wrap(0, symbols, bits);
        const u32 over = ptx::shf_l_wrap(symbols, 0, bits), old = bits;
        bits += 8 * count;
        const bool full = ((old ^ bits) & 32) != 0;
        if (full && to < end) ptx::st_shared(to, last);
        to += full ? stride : 0;
        before = full ? last : before;
        last = full ? over : last;
    }

    // What is left.
    UW_DEVICE void flush() const {
        if (bits % 32 > 0 && to < end) ptx::st_shared(to, last);
    }
};

// Two elements: signs and mantissas in bytes 0 and 2 of `rest`, exponents likewise.
UW_DEVICE u32 join(u32 rest, u32 exponents) {
    return (rest << 8 & 0x80008000u) | exponents << 7 | (rest & 0x007f007fu);
}

// Elements of a window, stored one by one.
struct Stored {
    const Dfloat11Args& args;
    u32 at, end;

    UW_DEVICE void operator()(u32 symbols, u32 count) {
#pragma unroll 1
        for (; count > 0 && at < end; --count, ++at, symbols >>= 8) {
            ptx::st_global_u16(args.weights + at, join(ptx::ld_global_nc_u8(args.sign_mantissa + at), symbols & 0xff));
        }
    }
};

// Bytes from `value`, lowest first.
UW_DEVICE void store_bytes(u32 to, u32 value, u32 count) {
#pragma unroll
    for (u32 i = 0; i < 3; ++i) {
        if (i < count) ptx::st_shared_u8(to + i, value >> (8 * i));
    }
}

// Elements 0, 1 or 2, 3 of four bytes each.
UW_DEVICE u32 join_low(u32 rest, u32 exponents) {
    return join(ptx::prmt(rest, 0, 0x4140), ptx::prmt(exponents, 0, 0x4140));
}
UW_DEVICE u32 join_high(u32 rest, u32 exponents) {
    return join(ptx::prmt(rest, 0, 0x4342), ptx::prmt(exponents, 0, 0x4342));
}

// The exponents that a window parked to where they belong, at any byte: whole words, and what is left of them at both
// ends.
UW_DEVICE void place(u32 to, u32 park, u32 stride, const Parked& parked) {
    const u32 count = parked.bits / 8, shift = to & 3, aligned = to - shift, reach = shift + count;
    u32 words[kParkedWords];
#pragma unroll
    for (u32 j = 0; j < kParkedWords; ++j) words[j] = 4 * j < count ? ptx::ld_shared(park + stride * j) : 0;
    if (count < 4) return store_bytes(to, words[0], count);
    store_bytes(to, words[0], (4 - shift) & 3);
#pragma unroll
    for (u32 j = 0; j < kParkedWords; ++j) {
        if (4 * j + 4 <= reach && (j > 0 || shift == 0)) {
            ptx::st_shared(aligned + 4 * j, ptx::shf_l_wrap(j > 0 ? words[j - 1] : 0, words[j], 8 * shift));
        }
    }
    const u32 four = ptx::shf_r_wrap(parked.before, parked.last, 8 * (count & 3)), rest = reach & 3;
    store_bytes(aligned + (reach & ~3u), ptx::shf_l_wrap(four, 0, 8 * rest), rest);
}

// Stores elements [begin, end), whose exponents lie from `exponents` on: byte i is that of element begin / 8 * 8 + i.
template <u32 kThreads>
UW_DEVICE void store(const Dfloat11Args& args, u32 thread, u32 begin, u32 end, u32 exponents) {
    const u32 front = begin & ~7u;
    for (u32 first = front + 8 * thread; first < end; first += 8 * kThreads) {
        const u32 from = exponents + (first - front);
        if (first >= begin && first + 8 <= end) {
            const U32x2 rest = ptx::ld_global_nc_x2(args.sign_mantissa + first), own = ptx::ld_shared_x2(from);
            const U32x4 weights{join_low(rest.x, own.x), join_high(rest.x, own.x), join_low(rest.y, own.y),
                                join_high(rest.y, own.y)};
            ptx::st_global_cs_x4(args.weights + first, weights);
        } else {
#pragma unroll 1
            for (u32 i = 0; i < 8; ++i) {
                if (first + i < begin || first + i >= end) continue;
                const u32 rest = ptx::ld_global_nc_u8(args.sign_mantissa + first + i);
                ptx::st_global_u16(args.weights + first + i, join(rest, ptx::ld_shared_u8(from + i)) & 0xffff);
            }
        }
    }
}

template <class Config>
UW_DEVICE void run(const Dfloat11Args& args) {
    using S = Smem<Config>;
    constexpr u32 kThreads = Config::kThreads, kWarps = S::kWarps;
    const u32 smem = ptx::cvta_to_shared(ptx::dynamic_smem());
    u32 thread = ptx::tid();
    ptx::pin(thread);  // read once: ptxas reads the special register at each use otherwise, and waits for it
    const u32 lane = thread % 32;
    const u32 warp = ptx::uniform_warp_index();
    for (u32 i = thread; i < kLookups / 8; i += kThreads) {
        ptx::st_shared_x4(smem + S::kStarts + 16 * i, ptx::ld_global_nc_x4(args.starts + 8 * i));
    }
    for (u32 i = thread; i < kLookups / 4; i += kThreads) {
        ptx::st_shared_x4(smem + S::kSymbols + 16 * i, ptx::ld_global_nc_x4(args.symbols + 4 * i));
    }
    ptx::bar_sync();  // orders the tables before the lookups
    const u32 park = smem + S::kParked + 4 * thread;
    for (u32 block = ptx::ctaid(); block < args.blocks; block += ptx::nctaid()) {
        const u32 begin = ptx::ld_global_nc(args.positions + block),
                  end = ptx::ld_global_nc(args.positions + block + 1);
        if (begin > end || end > args.elements) {
            if (thread == 0) ptx::red_add_global(args.faults, 1);
            continue;
        }
        // What is read last is asked for first, and what the next block begins with.
        if (begin + 128 * thread < end) ptx::prefetch_global_l2(args.sign_mantissa + begin + 128 * thread);
        if (const u32 next = block + ptx::nctaid(); warp == 0 && next < args.blocks) {
            const u32 word = 2 * next * args.windows + 32 * lane, byte = 5 * next * args.windows / 8 + 128 * lane;
            if (word < args.code_words) ptx::prefetch_global_l2(args.codes + word);
            if (lane < 3 && byte < args.gap_bytes) ptx::prefetch_global_l2(args.gaps + byte);
        }
        u32 at = begin, found = 0;
        for (u32 first = 0; first < args.windows; first += kThreads) {
            const u32 within = first + thread;
            Parked parked{park, 4 * kThreads, smem + S::kBytes, 0, 0, 0};
            decode(args, Window::load(args, block, within), smem + S::kStarts, smem + S::kSymbols, parked);
            parked.flush();
            const u32 count = parked.bits / 8;
            u32 sum = count > 4 * kParkedWords ? kUnparked | count : count;
#pragma unroll
            for (u32 delta = 1; delta < 32; delta *= 2) {
                const u32 other = ptx::shfl_sync_up(sum, delta);
                if (lane >= delta) sum += other;
            }
            if (lane == 31) ptx::st_shared(smem + S::kSums + 4 * warp, sum);
            ptx::bar_sync();  // orders the sums before their reading
            const u32 of_lane = lane < kWarps ? ptx::ld_shared(smem + S::kSums + 4 * lane) : 0;
            u32 sums = of_lane;
#pragma unroll
            for (u32 delta = 1; delta < kWarps; delta *= 2) {
                const u32 other = ptx::shfl_sync_up(sums, delta);
                if (lane >= delta) sums += other;
            }
            const u32 total = ptx::shfl_sync_idx(sums, kWarps - 1),
                      before = ptx::shfl_sync_idx(sums - of_lane, warp) + sum - count;
            const u32 all = total % kUnparked, taken = all < end - at ? all : end - at;
            if ((at & 7) + total > S::kRoom) {
                // Once more, as not all are parked, or there is no room to put them together.
                Stored stored{args, at + before % kUnparked, at + taken};
                decode(args, Window::load(args, block, within), smem + S::kStarts, smem + S::kSymbols, stored);
                ptx::bar_sync();  // orders the reading of the sums before the next ones
            } else {
                place(smem + S::kExponents + (at & 7) + before, park, 4 * kThreads, parked);
                ptx::bar_sync();  // orders the exponents before they are read, and the sums before the next ones
                store<kThreads>(args, thread, at, at + taken, smem + S::kExponents);
                // The barrier behind the next sums orders this reading before the next windows' exponents.
            }
            at += taken;
            found += all;
        }
        // The last block's codes end in bits that look like some.
        const bool wrong = found < end - begin || (found > end - begin && block + 1 < args.blocks);
        if (wrong && thread == 0) ptx::red_add_global(args.faults, 1);
    }
}

}  // namespace uw::dfloat11
