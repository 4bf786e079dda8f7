// The decoder's lookup table in shared memory: stream bits -> symbols, and the number of bits they take.
//
// The stored code is 16 lengths over a palette (docs/format.md A.4); each block expands it at its start. Every entry is
// terminal and takes at least one bit, whatever the lengths are, so a lookup can neither stall nor leave the table.
//
// Two shapes, chosen by the code limit L:
//   L <= 7   pair table: 2^(2L) entries of two symbols each. A lookup yields exactly two symbols, so the output is
//            static and the dependent chain lookup -> shift -> lookup is half as long. One copy: a warp's accesses have
//            about 3.5-way bank conflicts.
//   L >= 8   one symbol per lookup, 2^L entries in up to 32 interleaved copies, copy = lane % copies. With 32 copies
//            (L <= 9) every lane has its own bank and no lookup conflicts; with 16 copies (L = 10) conflicts are at
//            most 2-way.
//
// Entry: byte 0 = number of bits; bytes 1 (and 2) = value(s). A value is the exponent or, for the palette and full
// outputs, the index (a pair of indices shares byte 1, the first in the low nibble). Entries have 4 bytes, or 2 where
// two suffice and size matters.
#pragma once

#include "unweight/axes.cuh"
#include "unweight/encoding/huffman/canonical.cuh"
#include "unweight/ptx/barrier.cuh"
#include "unweight/ptx/memory.cuh"

namespace uw::decode_huffman {

__device__ constexpr u32 log2_floor(u32 v) { return v <= 1 ? 0 : 1 + log2_floor(v / 2); }

template <DecodeOutput kOutput, u32 kCodeLimit>
struct Table {
    static_assert(kCodeLimit >= 6 && kCodeLimit <= 15, "code limits are 6..15");

    static constexpr bool kPair = kCodeLimit <= 7;
    static constexpr bool kPalette = kOutput != DecodeOutput::kExponent;
    static constexpr u32 kSymbols = kPair ? 2 : 1;  // per lookup
    static constexpr u32 kIndexBits = kSymbols * kCodeLimit;
    static constexpr u32 kEntryBytes = (kPair && kPalette) || kCodeLimit == 15 ? 2 : 4;
    static constexpr u32 kMaxBytes = 65536;
    static constexpr u32 kEntryTableBytes = kEntryBytes << kIndexBits;
    static constexpr u32 kFit = kMaxBytes / kEntryTableBytes;
    static constexpr u32 kCopies = kPair ? 1 : kFit > 32 ? 32 : kFit;
    static constexpr u32 kBytes = kEntryTableBytes * kCopies;

    // The window of stream bits is kept shifted left by kShift, so that masking it gives a byte offset.
    static constexpr u32 kShift = log2_floor(kEntryBytes * kCopies);
    static constexpr u32 kMask = ((1u << kIndexBits) - 1) << kShift;
    static_assert(kShift + 2 * kIndexBits <= 32, "two lookups must fit one 32-bit window");

    // Scratch while building: 16 code words, then for pairs the single-symbol entries.
    static constexpr u32 kScratchBytes = 64 + (kPair ? 4u << kCodeLimit : 0);

    static UW_DEVICE u32 lane_column(u32 lane) { return lane % kCopies * kEntryBytes; }

    // `column` is lane_column; `window` holds the next bits from bit kShift on.
    static UW_DEVICE u32 lookup(u32 table, u32 column, u32 window) {
        u32 address = table + ((window & kMask) | column);
        if constexpr (kEntryBytes == 2) return ptx::ld_shared_u16(address);
        return ptx::ld_shared(address);
    }

    // The stored code as lanes of the first warp hold it: loaded early, expanded by `build`.
    struct Code {
        u32 length;    // of palette entry `lane`
        u32 value;     // of palette entry `lane`
        u32 fallback;  // value of palette entry 0
    };

    static UW_DEVICE Code fetch(const u8* palette, const u8* code_lengths, u32 lane) {
        Code code = {0, lane, 0};
        if (lane < 16) code.length = ptx::ld_global_nc_u8(code_lengths + lane);
        if constexpr (!kPalette) {
            if (lane < 16) code.value = ptx::ld_global_nc_u8(palette + lane);
            code.fallback = ptx::ld_global_nc_u8(palette);
        }
        return code;
    }

    // Expands the code. Called by all threads of the block; a block barrier must precede the first lookup.
    static UW_DEVICE void build(u32 table, u32 scratch, const Code& code, u32 thread, u32 threads) {
        // 1. Code words. An unused entry fills no slot, nor does a length beyond the limit of this kernel (which the
        // host rejects).
        if (thread < 32) {
            u32 word = canonical_code(code.length, thread);
            bool usable = code.length >= 1 && code.length <= kCodeLimit;
            if (thread < 16)
                ptx::st_shared(scratch + 4 * thread, usable ? code.length | code.value << 8 | word << 16 : 0);
        }
        ptx::bar_sync();
        // 2. Single-symbol entries. Slots that no code reaches (a palette of one entry leaves half of them) yield entry
        // 0.
        u32 fallback = 1 | code.fallback << 8;
        if constexpr (kPair) {
            build_pairs(table, scratch, fallback, thread, threads);
        } else {
            build_singles(table, scratch, fallback, thread, threads);
        }
    }

private:
    static constexpr u32 kSlots = kCopies << kCodeLimit;

    // Slots are few, so each slot searches for its code.
    static UW_DEVICE void build_pairs(u32 table, u32 scratch, u32 fallback, u32 thread, u32 threads) {
        u32 singles = scratch + 64;
        constexpr u32 kMaskOne = (1u << kCodeLimit) - 1;
#pragma unroll 1
        for (u32 slot = thread; slot <= kMaskOne; slot += threads) {
            u32 found = fallback;
#pragma unroll
            for (u32 i = 0; i < 16; i += 4) {
                U32x4 e = ptx::ld_shared_x4(scratch + 4 * i);
                found = match(e.x, slot, match(e.y, slot, match(e.z, slot, match(e.w, slot, found))));
            }
            ptx::st_shared(singles + 4 * slot, found);
        }
        ptx::bar_sync();
        // Four at a time, to overlap their loads.
        constexpr u32 kEntries = 1u << kIndexBits, kBatch = 4;
#pragma unroll 1
        for (u32 base = thread; base < kEntries; base += kBatch * threads) {
            u32 first[kBatch], second[kBatch];
#pragma unroll
            for (u32 j = 0; j < kBatch; ++j) first[j] = ptx::ld_shared(singles + 4 * ((base + j * threads) & kMaskOne));
#pragma unroll
            for (u32 j = 0; j < kBatch; ++j) {
                second[j] = ptx::ld_shared(singles + 4 * ((base + j * threads) >> (first[j] & 0xff) & kMaskOne));
            }
#pragma unroll
            for (u32 j = 0; j < kBatch; ++j) {
                u32 index = base + j * threads, length = (first[j] & 0xff) + (second[j] & 0xff);
                u32 a = first[j] >> 8, b = second[j] >> 8;
                if (index >= kEntries) continue;
                if constexpr (kEntryBytes == 2) {
                    ptx::st_shared_u16(table + 2 * index, length | (a | b << 4) << 8);
                } else {
                    ptx::st_shared(table + 4 * index, length | a << 8 | b << 16);
                }
            }
        }
    }

    // `found`, unless `slot` begins with the code of `entry`.
    static UW_DEVICE u32 match(u32 entry, u32 slot, u32 found) {
        u32 length = entry & 0xff;
        return length != 0 && (slot & ((1u << length) - 1)) == entry >> 16 ? entry & 0xffff : found;
    }

    static UW_DEVICE void build_singles(u32 table, u32 scratch, u32 fallback, u32 thread, u32 threads) {
#pragma unroll 1
        for (u32 slot = thread; slot < kSlots; slot += threads) store_entry(table, slot, fallback);
        ptx::bar_sync();
#pragma unroll 1
        for (u32 i = 0; i < 16; ++i) {
            u32 entry = ptx::ld_shared(scratch + 4 * i);
            u32 length = entry & 0xff;
            if (length == 0) continue;
#pragma unroll 1
            for (u32 slot = thread; slot < kSlots >> length; slot += threads) {
                // Slots are numbered by (rest of the index, copy); the code is in the bits below the rest.
                u32 rest = slot / kCopies, copy = slot % kCopies;
                store_entry(table, (entry >> 16 | rest << length) * kCopies + copy, entry & 0xffff);
            }
        }
    }

    static UW_DEVICE void store_entry(u32 table, u32 slot, u32 entry) {
        if constexpr (kEntryBytes == 4) {
            ptx::st_shared(table + 4 * slot, entry);
        } else {
            ptx::st_shared_u16(table + 2 * slot, entry);
        }
    }
};

}  // namespace uw::decode_huffman
