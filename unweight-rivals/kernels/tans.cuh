// Pair-coded FP8 (docs/rivals.md): out = a + b for two coded vectors, E4M3, and the same for two that are not coded.
// Sums are exact in fp32 and rounded once, to nearest even; overflow saturates to the largest number, and NaN
// propagates.
//
//   add    out[tile][stream][16] from two coded vectors with the same table
//   plain  out[count] from two plain ones
//
// Config
//   u32 kCoded     1 for add, 0 for plain
//   u32 kThreads   of a block, a multiple of 128
//
// Grid      add: a block for every kThreads streams; plain: for every 16 * kThreads bytes
// Roles     a thread decodes a stream of each vector, a tile of 16 bytes of both at a time
// Smem      add: 16384, the table: symbol | bits << 8 | next state without them << 16
// Barriers  all of the block (bar_sync) behind the table
// Bound     device memory, if the streams' chains (a look at the table for two bytes) overlap well
//
// Safety    any bytes: slabs are read between their block's offsets, if those are in order and within the slabs; zeros
//           elsewhere. States are held to the table's 4096. A stream that has run out of bits counts in `faults`; the
//           rest of its output is zeros.
#pragma once

#include "unweight/ptx/barrier.cuh"
#include "unweight/ptx/memory.cuh"

namespace uw {

struct TansArgs {
    const u32* slabs_a;
    const u32* slabs_b;
    const u16* states_a;
    const u16* states_b;
    const u8* partial_a;
    const u8* partial_b;
    const u32* offsets_a;
    const u32* offsets_b;
    const u8* rest_a;
    const u8* rest_b;
    const u32* table;
    u8* out;
    u32* faults;
    u32 words_a;
    u32 words_b;
    u32 streams;
    u32 tiles;
};

}  // namespace uw

namespace uw::tans {

constexpr u32 kStates = 4096, kBlockStreams = 128;

template <class Config>
constexpr u32 kThreads = Config::kThreads;

template <class Config>
struct Smem {
    static constexpr u32 kTable = 0;
    static constexpr u32 kBytes = Config::kCoded ? 4 * kStates : 0;
};

#ifdef UW_CPU
inline float value_of(u32 byte) {
    const u32 exponent = byte >> 3 & 15, mantissa = byte & 7;
    if (exponent == 15 && mantissa == 7) return ptx::float_from_bits(0x7fc00000u);
    const float size =
        exponent == 0 ? mantissa * 0x1p-9f : ptx::float_from_bits((exponent + 120) << 23 | mantissa << 20);
    return byte & 0x80 ? -size : size;
}
inline u32 byte_of(float value) {
    const u32 sign = ptx::bits_from_float(value) >> 24 & 0x80;
    if (value != value) return sign | 0x7f;
    const float size = value < 0 ? -value : value;
    u32 best = 0;
    // The nearest, and of two the even one.
    for (u32 byte = 1; byte < 0x7f; ++byte) {
        const float now = size - value_of(byte), before = size - value_of(best);
        const float a = now < 0 ? -now : now, b = before < 0 ? -before : before;
        if (a < b || (a == b && byte % 2 == 0)) best = byte;
    }
    return sign | best;
}
// The sums of two bytes each, low and high.
inline u32 add_two(u32 a, u32 b) {
    return byte_of(value_of(a & 0xff) + value_of(b & 0xff)) | byte_of(value_of(a >> 8 & 0xff) + value_of(b >> 8 & 0xff))
                                                                  << 8;
}
#else
// The sums of two bytes each, low and high. From compute capability 8.9 on.
UW_DEVICE u32 add_two(u32 a, u32 b) {
    u32 sum;
    asm("{\n"
        ".reg .b16 a8, b8, a0, a1, b0, b1, s8;\n"
        ".reg .b32 a16, b16;\n"
        ".reg .f32 x0, x1, y0, y1;\n"
        "cvt.u16.u32 a8, %1;\n"
        "cvt.u16.u32 b8, %2;\n"
        "cvt.rn.f16x2.e4m3x2 a16, a8;\n"
        "cvt.rn.f16x2.e4m3x2 b16, b8;\n"
        "mov.b32 {a0, a1}, a16;\n"
        "mov.b32 {b0, b1}, b16;\n"
        "cvt.f32.f16 x0, a0;\n"
        "cvt.f32.f16 x1, a1;\n"
        "cvt.f32.f16 y0, b0;\n"
        "cvt.f32.f16 y1, b1;\n"
        "add.rn.f32 x0, x0, y0;\n"
        "add.rn.f32 x1, x1, y1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 s8, x1, x0;\n"
        "cvt.u32.u16 %0, s8;\n"
        "}\n"
        : "=r"(sum)
        : "r"(a), "r"(b));
    return sum;
}
#endif

UW_DEVICE u32 add_four(u32 a, u32 b) { return add_two(a & 0xffff, b & 0xffff) | add_two(a >> 16, b >> 16) << 16; }

// A stream, read from its last bit on.
struct Reader {
    const u32* slab;  // of this stream, the next one to be asked for
    u32 left;         // slabs from there down
    u32 high, low;    // the bits that are next, at the top from `used` on
    u32 used;
    u32 state;
    u32 bits;  // bits that the stream has left; below 0 of what it never had
    bool ran_out;

    UW_DEVICE u32 fetch() {
        if (left == 0) return 0;
        --left;
        const u32 word = ptx::ld_global_nc(slab);
        slab -= kBlockStreams;
        return word;
    }
    UW_DEVICE void open(const u32* slabs, u32 words, const u16* states, const u8* partial, const u32* offsets,
                        u32 stream) {
        const u32 block = stream / kBlockStreams, begin = ptx::ld_global_nc(offsets + block) / 4;
        const u32 end = ptx::ld_global_nc(offsets + block + 1) / 4;
        const bool sane = begin <= end && end <= words;
        left = sane ? (end - begin) / kBlockStreams : 0;
        slab = slabs + (left > 0 ? begin + (left - 1) * kBlockStreams + stream % kBlockStreams : 0);
        const u32 valid = ptx::ld_global_nc_u8(partial + stream) & 31;
        used = (32 - valid) & 31;
        bits = left * 32 - (left > 0 ? used : 0);
        state = ptx::ld_global_nc_u16(states + stream);
        ran_out = !sane || state < kStates || state >= 2 * kStates;
        state &= kStates - 1;
        high = fetch();
        low = fetch();
    }
    // The next two exponents: the first one in the upper four bits.
    UW_DEVICE u32 next(u32 table) {
        const u32 entry = ptx::ld_shared(table + 4 * state), count = entry >> 8 & 0xff;
        const u32 window = ptx::shf_l_wrap(low, high, used);
        // Up to 12 bits; a shift by 32 of none.
        const u32 value = window >> 1 >> (31 - count);
        ran_out = ran_out || count > bits;
        bits -= count;
        used += count;
        if (used >= 32) {
            used -= 32;
            high = low;
            low = fetch();
        }
        state = ((entry >> 16) | value) & (kStates - 1);
        return entry & 0xff;
    }
};

// Two pairs of exponents with their signs and mantissas, four nibbles: four bytes.
UW_DEVICE u32 compose(u32 first, u32 second, u32 rest) {
    // One exponent a byte, and one sign and mantissa a byte, in the order of the elements.
    const u32 exponents = (first >> 4) | (first & 15) << 8 | (second >> 4) << 16 | (second & 15) << 24;
    const u32 spread = (rest & 15) | (rest & 0xf0) << 4 | (rest & 0xf00) << 8 | (rest & 0xf000) << 12;
    return exponents << 3 | (spread & 0x07070707u) | (spread & 0x08080808u) << 4;
}

template <class Config>
UW_DEVICE void add(const TansArgs& args) {
    constexpr u32 kThreads = Config::kThreads;
    const u32 smem = ptx::cvta_to_shared(ptx::dynamic_smem()), thread = ptx::tid();
    for (u32 i = thread; i < kStates / 4; i += kThreads) {
        ptx::st_shared_x4(smem + 16 * i, ptx::ld_global_nc_x4(args.table + 4 * i));
    }
    ptx::bar_sync();  // orders the table before the lookups of every warp
    const u32 stream = ptx::ctaid() * kThreads + thread;
    if (stream >= args.streams) return;
    Reader a, b;
    a.open(args.slabs_a, args.words_a, args.states_a, args.partial_a, args.offsets_a, stream);
    b.open(args.slabs_b, args.words_b, args.states_b, args.partial_b, args.offsets_b, stream);
    for (u32 tile = 0; tile < args.tiles; ++tile) {
        const u64 at = static_cast<u64>(tile) * args.streams + stream;
        const U32x2 rest_a = ptx::ld_global_nc_x2(args.rest_a + 8 * at),
                    rest_b = ptx::ld_global_nc_x2(args.rest_b + 8 * at);
        u32 sums[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const u32 a0 = a.next(smem), b0 = b.next(smem), a1 = a.next(smem), b1 = b.next(smem);
            const u32 own_a = (i < 2 ? rest_a.x : rest_a.y) >> (i % 2 * 16),
                      own_b = (i < 2 ? rest_b.x : rest_b.y) >> (i % 2 * 16);
            sums[i] = add_four(compose(a0, a1, own_a), compose(b0, b1, own_b));
        }
        ptx::st_global_x4(args.out + 16 * at, {sums[0], sums[1], sums[2], sums[3]});
    }
    if (a.ran_out || b.ran_out) ptx::red_add_global(args.faults, 1);
}

// `rest_a` and `rest_b` are the vectors, `tiles` their 16 bytes.
template <class Config>
UW_DEVICE void plain(const TansArgs& args) {
    const u64 tile = static_cast<u64>(ptx::ctaid()) * kThreads<Config> + ptx::tid();
    if (tile >= args.tiles) return;
    const U32x4 a = ptx::ld_global_nc_x4(args.rest_a + 16 * tile), b = ptx::ld_global_nc_x4(args.rest_b + 16 * tile);
    ptx::st_global_x4(args.out + 16 * tile,
                      {add_four(a.x, b.x), add_four(a.y, b.y), add_four(a.z, b.z), add_four(a.w, b.w)});
}

}  // namespace uw::tans
