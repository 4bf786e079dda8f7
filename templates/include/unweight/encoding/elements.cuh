// Elements of tensors whose exponents are Huffman-coded (docs/format.md A.1 and A.12): where their signs and fractions
// are stored, and how those are joined with exponents.
//
// An element type has
//   kBytes, kFractionBits   of an element
//   kRestBytes, kRestBits   sign and fraction: this many whole bytes of each element, row-major; then, from the next
//                           multiple of 16 bytes on, the bits above them as one dense stream, lowest bit of a byte
//                           first. For BF16 this is `sign_mantissa`, for the others `fraction_bytes` followed by
//                           `fraction_bits`.
//   kWidth                  adjacent elements of a row that a lane joins at once, the first a multiple of kWidth
//   kBatch                  number of such groups that a lane loads before their use: as many as 64 registers hold
//   Rest, load              signs and fractions as loaded from memory; `first` is the first element
//   Table, join             weights from palette indices, four bits each, or from exponent bytes. Indices of 8 and
//                           above need no mux: see mma/reconstruct.cuh.
// Nothing is checked here: the host has checked the sizes, and any bytes are valid weights.
#pragma once

#include "unweight/axes.cuh"
#include "unweight/mma/reconstruct.cuh"
#include "unweight/ptx/memory.cuh"

namespace uw::elements {

using mma::kSigns;

// kWidth weights, as stored.
template <u32 kWords>
struct Words {
    u32 word[kWords];
};

// Addresses of signs and fractions.
struct Fractions {
    const u8* bytes;
    const u8* bits;
};

template <class Element>
UW_DEVICE Fractions fractions(const u8* bytes, u32 n, u32 k) {
    if constexpr (Element::kRestBits == 0) return {bytes, nullptr};
    return {bytes, bytes + ((static_cast<u64>(n) * k * Element::kRestBytes + 15) & ~15ull)};
}

// Sign and fraction of a single element, at any index.
template <class Element>
UW_DEVICE u32 rest_of(const Fractions& from, u64 at) {
    u32 rest = 0;
    if constexpr (Element::kRestBytes != 0) {
#pragma unroll
        for (u32 i = 0; i < Element::kRestBytes; ++i) {
            rest |= ptx::ld_global_nc_u8(from.bytes + at * Element::kRestBytes + i) << 8 * i;
        }
    }
    if constexpr (Element::kRestBits != 0) {
        const u64 bit = at * Element::kRestBits;
        const u8* byte = from.bits + bit / 8;
        const u32 shift = bit % 8;
        u32 bits = ptx::ld_global_nc_u8(byte);
        // The byte after the last one is not read.
        if (shift + Element::kRestBits > 8) bits |= ptx::ld_global_nc_u8(byte + 1) << 8;
        rest |= (bits >> shift & ((1u << Element::kRestBits) - 1)) << 8 * Element::kRestBytes;
    }
    return rest;
}

template <class Element>
UW_DEVICE void store_one(void* output, u64 at, u32 rest, u32 exponent) {
    constexpr u32 kFraction = Element::kFractionBits, kSign = 1u << kFraction;
    const u32 sign = (rest & kSign) << (8 * Element::kBytes - 1 - kFraction);
    const u32 element = sign | exponent << kFraction | (rest & (kSign - 1));
    u8* to = static_cast<u8*>(output) + at * Element::kBytes;
    if constexpr (Element::kBytes == 1) ptx::st_global_u8(to, element);
    if constexpr (Element::kBytes == 2) ptx::st_global_u16(to, element);
    if constexpr (Element::kBytes == 4) ptx::st_global(to, element);
}

struct Bf16 {
    static constexpr u32 kBytes = 2, kFractionBits = 7, kRestBytes = 1, kRestBits = 0, kWidth = 8, kBatch = 8;
    using Rest = U32x2;
    using Table = mma::PaletteTable;

    static UW_DEVICE Rest load(const Fractions& from, u64 first) { return ptx::ld_global_nc_x2(from.bytes + first); }

    static UW_DEVICE Words<4> join(const Table& table, const Rest& rest, u64, u32 indices) {
        const u32 flipped = indices ^ 0x88888888u;
        Words<4> v;
        table.join(rest.x, indices, flipped, v.word[0], v.word[1]);
        table.join(rest.y, indices >> 16, flipped >> 16, v.word[2], v.word[3]);
        return v;
    }
    static UW_DEVICE Words<4> join(const Rest& rest, u64, U32x2 exponents) {
        Words<4> v;
        mma::join_exponents(rest.x, exponents.x, v.word[0], v.word[1]);
        mma::join_exponents(rest.y, exponents.y, v.word[2], v.word[3]);
        return v;
    }
};

// A palette of exponents of 4 or 5 bits, each at its position in the highest byte of its element. The sign bit there is
// 0, so two lookups (lower and upper half of the palette) combine with an OR, without a mux.
template <u32 kExponentBits>
struct ShortPalette {
    static constexpr u32 kShift = 7 - kExponentBits;
    static constexpr u32 kMask = 0x01010101u * (((1u << kExponentBits) - 1) << kShift);

    u32 low[2];
    u32 high[2];

    // palette: 16 bytes as four words.
    UW_DEVICE explicit ShortPalette(U32x4 palette)
        : low{place(palette.x), place(palette.y)}, high{place(palette.z), place(palette.w)} {}

    // Larger exponents, which occur only in a palette or a damaged row, lose their upper bits.
    static UW_DEVICE u32 place(u32 exponents) { return exponents << kShift & kMask; }

    // Looks up the four low nibbles of `indices`.
    UW_DEVICE u32 four(u32 indices) const {
        return ptx::prmt(low[0], low[1], indices) | ptx::prmt(high[0], high[1], indices ^ 0x8888u);
    }
};

struct E4m3 {
    static constexpr u32 kBytes = 1, kFractionBits = 3, kRestBytes = 0, kRestBits = 4, kWidth = 16, kBatch = 4;
    using Rest = U32x2;  // two elements per byte, the earlier one in the low nibble
    using Table = ShortPalette<4>;

    static UW_DEVICE Rest load(const Fractions& from, u64 first) { return ptx::ld_global_nc_x2(from.bits + first / 2); }

    static UW_DEVICE Words<4> join(const Table& table, const Rest& rest, u64, U32x2 indices) {
        Words<4> v;
        placed(rest.x, table.four(indices.x), table.four(indices.x >> 16), v.word[0], v.word[1]);
        placed(rest.y, table.four(indices.y), table.four(indices.y >> 16), v.word[2], v.word[3]);
        return v;
    }
    static UW_DEVICE Words<4> join(const Rest& rest, u64, U32x4 exponents) {
        Words<4> v;
        placed(rest.x, Table::place(exponents.x), Table::place(exponents.y), v.word[0], v.word[1]);
        placed(rest.y, Table::place(exponents.z), Table::place(exponents.w), v.word[2], v.word[3]);
        return v;
    }

private:
    static UW_DEVICE void placed(u32 rest, u32 exponents, u32 later_exponents, u32& first, u32& second) {
        constexpr u32 kFractions = 0x07070707u;
        const u32 even = (rest << 4 & kSigns) | (rest & kFractions), odd = (rest & kSigns) | (rest >> 4 & kFractions);
        first = exponents | ptx::prmt(even, odd, 0x5140);
        second = later_exponents | ptx::prmt(even, odd, 0x7362);
    }
};

// Sign and fraction bits of eight elements, three bits each: three bytes at any byte offset.
struct ThreeBits {
    u32 low, high;  // the word that contains the first byte, and the next word if it contains the last

    static UW_DEVICE u64 byte(u64 first) { return first / 8 * 3; }

    static UW_DEVICE ThreeBits load(const u8* bits, u64 first) {
        const u64 at = byte(first);
        const u8* word = bits + (at & ~3ull);
        // The bytes after the last group may be another section, or unmapped.
        return {ptx::ld_global_nc(word), (at & 3) > 1 ? ptx::ld_global_nc(word + 4) : 0};
    }

    // The highest bytes of eight E5M2 or F16 elements, whose exponents are already in place.
    UW_DEVICE Words<2> join(u64 first, u32 exponents, u32 later_exponents) const {
        const u32 bits = ptx::shf_r_wrap(low, high, 8 * (static_cast<u32>(byte(first)) & 3));
        return {{exponents | four(bits), later_exponents | four(bits >> 12)}};
    }

private:
    // Signs and fractions of four elements, at their positions in bytes.
    static UW_DEVICE u32 four(u32 bits) {
        const u32 pairs = (bits & 0x3f) | (bits << 10 & 0x3f0000);
        const u32 each = (pairs & 0x00070007u) | (pairs << 5 & 0x07000700u);
        return (each & 0x03030303u) | (each << 5 & kSigns);
    }
};

struct E5m2 {
    static constexpr u32 kBytes = 1, kFractionBits = 2, kRestBytes = 0, kRestBits = 3, kWidth = 8, kBatch = 8;
    using Rest = ThreeBits;
    using Table = ShortPalette<5>;

    static UW_DEVICE Rest load(const Fractions& from, u64 first) { return ThreeBits::load(from.bits, first); }

    static UW_DEVICE Words<2> join(const Table& table, const Rest& rest, u64 first, u32 indices) {
        return rest.join(first, table.four(indices), table.four(indices >> 16));
    }
    static UW_DEVICE Words<2> join(const Rest& rest, u64 first, U32x2 exponents) {
        return rest.join(first, Table::place(exponents.x), Table::place(exponents.y));
    }
};

// The highest byte of an F16 has the layout of an E5M2.
struct F16 {
    static constexpr u32 kBytes = 2, kFractionBits = 10, kRestBytes = 1, kRestBits = 3, kWidth = 8, kBatch = 4;
    struct Rest {
        U32x2 bytes;
        ThreeBits bits;
    };
    using Table = ShortPalette<5>;

    static UW_DEVICE Rest load(const Fractions& from, u64 first) {
        return {ptx::ld_global_nc_x2(from.bytes + first), ThreeBits::load(from.bits, first)};
    }

    static UW_DEVICE Words<4> join(const Table& table, const Rest& rest, u64 first, u32 indices) {
        return with_lower(rest, rest.bits.join(first, table.four(indices), table.four(indices >> 16)));
    }
    static UW_DEVICE Words<4> join(const Rest& rest, u64 first, U32x2 exponents) {
        return with_lower(rest, rest.bits.join(first, Table::place(exponents.x), Table::place(exponents.y)));
    }

private:
    static UW_DEVICE Words<4> with_lower(const Rest& rest, const Words<2>& upper) {
        Words<4> v;
        mma::interleave(upper.word[0], rest.bytes.x, v.word[0], v.word[1]);
        mma::interleave(upper.word[1], rest.bytes.y, v.word[2], v.word[3]);
        return v;
    }
};

// The upper half of an F32 has the layout of a BF16, whose sign and fraction are the highest of three bytes.
struct F32 {
    static constexpr u32 kBytes = 4, kFractionBits = 23, kRestBytes = 3, kRestBits = 0, kWidth = 4, kBatch = 4;
    struct Rest {
        u32 word[3];
    };
    using Table = mma::PaletteTable;

    static UW_DEVICE Rest load(const Fractions& from, u64 first) {
        const u8* at = from.bytes + first * 3;
        return {{ptx::ld_global_nc(at), ptx::ld_global_nc(at + 4), ptx::ld_global_nc(at + 8)}};
    }

    static UW_DEVICE Words<4> join(const Table& table, const Rest& rest, u64, u32 indices) {
        u32 first, second;
        table.join(highest(rest), indices, indices ^ 0x8888u, first, second);
        return with_lower(rest, first, second);
    }
    static UW_DEVICE Words<4> join(const Rest& rest, u64, u32 exponents) {
        u32 first, second;
        mma::join_exponents(highest(rest), exponents, first, second);
        return with_lower(rest, first, second);
    }

private:
    // Bytes 2, 5, 8 and 11.
    static UW_DEVICE u32 highest(const Rest& rest) {
        return ptx::prmt(ptx::prmt(rest.word[0], rest.word[1], 0x0052), rest.word[2], 0x7410);
    }
    // Adds the lower halves: bytes 0 and 1, 3 and 4, 6 and 7, 9 and 10.
    static UW_DEVICE Words<4> with_lower(const Rest& rest, u32 first, u32 second) {
        const u32 across = ptx::shf_r_wrap(rest.word[0], rest.word[1], 24);
        return {{ptx::prmt(rest.word[0], first, 0x5410), ptx::prmt(across, first, 0x7610),
                 ptx::prmt(rest.word[1], second, 0x5432), ptx::prmt(rest.word[2], second, 0x7621)}};
    }
};

// Maps an axis value to its element type.
template <DecodeElement>
struct Of;
template <>
struct Of<DecodeElement::kBf16> {
    using Type = Bf16;
};
template <>
struct Of<DecodeElement::kE4m3> {
    using Type = E4m3;
};
template <>
struct Of<DecodeElement::kE5m2> {
    using Type = E5m2;
};
template <>
struct Of<DecodeElement::kF16> {
    using Type = F16;
};
template <>
struct Of<DecodeElement::kF32> {
    using Type = F32;
};

}  // namespace uw::elements
