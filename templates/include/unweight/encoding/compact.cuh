// The compact encoding (docs/format.md, A.11) as a stream of A operands. Exponent classes come from two code chains per
// lane, everything else from a dense part; both are in the order of mma.m16n8k16.
//
//   streams of a tile  32 bytes of lengths, one per lane, in units of 2 bits; then the lanes' bits. A lane's chain of
//                      row blocks 0 and 1 runs up from its first bit, that of row blocks 2 and 3 down from its last.
//   table              the meaning of the next 9 bits of a chain, u32:
//
//     31..28  27..25    24..22    21..14  13..9          8..6     5..4  3..0
//     0011    a, high   b, high   0       11 | a, low    b, low   0     bits of the code
//
//                      a and b are the two registers of a quad, low and high their halves. The class of a is at its
//                      position in the operand, below the constant exponent 96 << 7; that of b is three bits lower.
//   dense              8 registers (two steps) in 5 words: P0..P4 have a word each; bits 14..9 of their halves hold
//                      P5..P7
//   head               u32 of a tile: 0 none | 1 << 30 | record | 1 << 31 | index of a list: count, then the records
//   record             operand 15..0 | lane 20..16 | 4 * step + register 24..21 | half 25 | row block 27..26
//
// An operand has exponent 96 + 4 * class + low; the sum is multiplied by 2^(base - 96) once.
//
// Safety: for any contents of the streams, a lookup is one of 512 entries. A chain advances by at most 72 bits before
// its second row block, from where its lane begins or ends, which is clamped to the longest streams of a tile. A row
// block reads four words from there, so nothing outside of a slot is read.
#pragma once

#include "unweight/encoding/escapes.cuh"
#include "unweight/encoding/packed.cuh"

namespace uw::compact {

using packed::kBlockRows, packed::kTile, packed::kTileBlocks, packed::Operands;

constexpr u32 kDenseTileBytes = 5120;
constexpr u32 kDenseWords = 40;  // per lane
constexpr u32 kBlockWords = 10;  // per lane and row block
constexpr u32 kBlockQuads = 8;   // quads per lane and row block
constexpr u32 kLengthBytes = 32;
constexpr u32 kCodeBitsMax = 9;
constexpr u32 kTileBitsMax = 1024 * kCodeBitsMax;
constexpr u32 kStreamBytesMax = kLengthBytes + kTileBitsMax / 8;
constexpr u32 kTableEntries = 1 << kCodeBitsMax, kTableBytes = kTableEntries * 4;
constexpr u32 kOperandExponent = 96;
constexpr u32 kTileRecordsMax = kTile * kTile;

// Size of a slot for the streams of a tile: they begin at any word and are copied in 16-byte units, and a chain that
// does not end within its lane reads four words starting up to 9 bytes past the last one. Downward chains read at most
// 24 bytes before a lane's bits, which are among the lengths.
constexpr u32 kPastBytes = kBlockQuads * kCodeBitsMax / 8 + 16;
constexpr u32 kSlotBytes = 1232;
constexpr u32 kCopyWordsMax = (12 + kStreamBytesMax + 15) / 16 * 4;
static_assert(kCopyWordsMax * 4 <= kSlotBytes, "what is copied");
static_assert(12 + kStreamBytesMax + kPastBytes <= kSlotBytes && kSlotBytes % 16 == 0,
              "the longest streams, and what is read past them");

// Location of a tile's streams, in words of the section, and its escape head.
struct Tile {
    u32 first;  // a multiple of 4
    u32 words;  // length from there, in whole 16-byte units
    u32 skip;   // words before the streams
    u32 head;

    // `tiles`: u32 [tiles + 1, 2]. Ranges are clamped to the section.
    UW_DEVICE Tile(const u32* tiles, u64 tile, u32 stream_words) {
        const U32x2 own = ptx::ld_global_nc_x2(tiles + 2 * tile);
        const u32 next = ptx::ld_global_nc(tiles + 2 * tile + 2);
        const u32 begin = own.x < stream_words ? own.x : stream_words,
                  limit = next < stream_words ? next : stream_words;
        first = begin & ~3u;
        skip = begin & 3;
        words = limit > first ? (limit - first + 3) & ~3u : 0;
        words = words < kCopyWordsMax ? words : kCopyWordsMax;
        head = own.y;
    }
};

// A lane's two chains, as bit addresses in shared memory. One runs up, one down.
struct Chains {
    u32 up, down;

    // `streams`: shared address of the tile's lengths.
    UW_DEVICE Chains(u32 streams, u32 lane) {
        const u32 bits = 2 * ptx::ld_shared_u8(streams + lane);
        u32 end = bits;
#pragma unroll
        for (u32 delta = 1; delta < 32; delta *= 2) {
            const u32 lower = ptx::shfl_sync_up(end, delta);
            end += lane >= delta ? lower : 0;
        }
        end = end < kTileBitsMax ? end : kTileBitsMax;
        const u32 base = (streams + kLengthBytes) * 8;
        up = base + (end > bits ? end - bits : 0);
        down = base + end;
    }
};

// The lookup table of a lane. With kCopies = 1 all lanes share a table. With more, entry i of copy c is word i *
// kCopies + c, so lanes of different copies never have bank conflicts: with 32 copies there are none.
template <u32 kCopies>
struct Table {
    static_assert(kCopies == 1 || kCopies == 8 || kCopies == 16 || kCopies == 32, "copies have banks of their own");
    static constexpr u32 kBytes = kTableBytes * kCopies;
    u32 own;  // shared address of this lane's first entry

    UW_DEVICE Table(u32 shared, u32 lane) : own(shared + lane % kCopies * 4) {}
    // Looks up the low bits of a window.
    UW_DEVICE u32 look(u32 window) const {
        return ptx::ld_shared(own + (window & (kTableEntries - 1)) * (4 * kCopies));
    }

    // Copies the table from device memory. All `threads` threads of the block call it, then a block barrier.
    UW_DEVICE static void copy(u32 shared, const u32* table, u32 thread, u32 threads) {
        for (u32 at = thread * 4; at < kTableEntries * kCopies; at += threads * 4) {
            if constexpr (kCopies == 1) {
                ptx::st_shared_x4(shared + at * 4, ptx::ld_global_nc_x4(table + at));
            } else {
                const u32 entry = ptx::ld_global_nc(table + at / kCopies);
                ptx::st_shared_x4(shared + at * 4, {entry, entry, entry, entry});
            }
        }
    }
};

// The entries of a chain's next row block: eight codes of up to 9 bits, which four words hold at any bit offset below
// 32.
template <bool kUp, class Table>
UW_DEVICE void next_block(u32& at, const Table& table, u32 (&entries)[kBlockQuads]) {
    static_assert(kBlockQuads == 8 && kBlockQuads * kCodeBitsMax <= 96 && 3 * kCodeBitsMax < 32,
                  "three windows of three codes in 96 bits");
    const u32 from = kUp ? at : at - 96;
    const u32 word = from >> 3 & ~3u;
    u32 w[4], bits[3];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) w[i] = ptx::ld_shared(word + 4 * i);
#pragma unroll
    for (u32 i = 0; i < 3; ++i) {
        const u32 j = kUp ? i : 2 - i;
        bits[i] = ptx::shf_r_wrap(w[j], w[j + 1], from);
        if (!kUp) bits[i] = ptx::brev(bits[i]);
    }
    u32 used = 0;
#pragma unroll
    for (u32 first = 0; first < kBlockQuads; first += 3) {
        u32 window = bits[0], sum = 0;
#pragma unroll
        for (u32 i = first; i < first + 3 && i < kBlockQuads; ++i) {
            const u32 entry = table.look(window);
            entries[i] = entry;
            window = ptx::shf_r_wrap(window, 0, entry);  // SHF uses the low five bits of the entry, its length
            sum += entry;
        }
        // The sum of three lengths is at most 27, so the low five bits of `sum` are exact.
        bits[0] = ptx::shf_r_wrap(bits[0], bits[1], sum);
        bits[1] = ptx::shf_r_wrap(bits[1], bits[2], sum);
        used += sum & 31;
    }
    at = kUp ? at + used : at - used;
}

// (a & b) | c as an explicit LOP3 (encoding/packed.cuh).
UW_DEVICE u32 and_or(u32 a, u32 b, u32 c) { return ptx::lop3<0xEA>(a, b, c); }

// Decodes eight operands, registers 0..7 of `p`, from five dense words and the entries of their four quads.
UW_DEVICE void dense_unit(const u32* w, const u32* e, u32* p) {
    constexpr u32 kOwn = 0x81FF81FFu;     // sign, low, mantissa
    constexpr u32 kTurned = 0x801F801Fu;  // of a carried register: sign and mantissa 4..0
    constexpr u32 kMiddle = 0x01E001E0u;  // low and mantissa 6..5
    constexpr u32 kClass = 0x0E000E00u, kExponent = 0x30003000u;
    p[0] = ptx::bit_select(kOwn, w[0], e[0]);
    p[1] = and_or(w[1], kOwn, kExponent) | (e[0] << 3 & kClass);
    p[2] = ptx::bit_select(kOwn, w[2], e[1]);
    p[3] = and_or(w[3], kOwn, kExponent) | (e[1] << 3 & kClass);
    p[4] = ptx::bit_select(kOwn, w[4], e[2]);
    p[5] = and_or(ptx::shf_r_wrap(w[0], w[0], 10), kTurned, kExponent);
    p[5] = and_or(w[1] >> 6, kMiddle, p[5]) | (e[2] << 3 & kClass);
    p[6] = and_or(e[3], kClass | kExponent, ptx::shf_r_wrap(w[2], w[2], 10) & kTurned);
    p[6] = and_or(w[1] >> 2, 0x01800180u, and_or(w[3] >> 4, 0x00600060u, p[6]));
    p[7] = and_or(ptx::shf_r_wrap(w[4], w[4], 10), kTurned, kExponent);
    p[7] = and_or(w[3] >> 6, kMiddle, p[7]) | (e[3] << 3 & kClass);
}

// Decodes the operands of a chain's next row block, without its escapes. `words`: its dense words.
template <bool kUp, class Table>
UW_DEVICE void decode_block(Operands& operands, const u32* words, u32& at, const Table& table) {
    u32 entries[kBlockQuads];
    next_block<kUp>(at, table, entries);
    dense_unit(words, entries, operands.p);
    dense_unit(words + kBlockWords / 2, entries + kBlockQuads / 2, operands.p + 8);
}

// Calls `replace(record)` for each escape of a tile, uniformly over the warp. `head` is not 0.
template <class Replace>
UW_DEVICE void for_escapes(u32 head, const u32* escapes, u32 escape_words, Replace replace) {
    if ((head & packed::kListHead) == 0) return replace(head);
    const u32 index = head & ~packed::kListHead;
    if (index >= escape_words) return;
    u32 count = ptx::ld_global_nc(escapes + index);
    const u32 room = escape_words - index - 1;
    count = count < kTileRecordsMax ? count : kTileRecordsMax;
    count = count < room ? count : room;
#pragma unroll 1
    for (u32 i = 1; i <= count; ++i) replace(ptx::ld_global_nc(escapes + index + i));
}

// The row block that a record belongs to.
UW_DEVICE u32 block_of(u32 record) { return record >> 26 & 3; }

}  // namespace uw::compact
