// Encodes a BF16 matrix as compact (docs/format.md A.11), byte-identical to the CPU. n and k are multiples of 64.
//
// One function per stage, all with EncodeCompactArgs; Config has EncodeCompactStage kStage:
//   encode_huffman::stats without sign_mantissa -> the host chooses the window -> quads -> the host chooses the code
//   book -> sizes -> the host computes where tiles begin, and reads `inexact` -> write
//
// stage   threads  blocks/SM  grid               dynamic smem         reads + writes, bytes per element
// quads   256      4          ceil(tiles / 16)   4 * 4096             2
// sizes   256      3          ceil(tiles / 8)    4 * 4096             2
// write   256      2          ceil(tiles / 8)    the same + 8 * 1328  2 + 1.35
//
// Bound    quads: additions to the same counter of shared memory, which serialize; otherwise instructions.
//
// Roles    a warp takes row blocks (quads) or a tile. sizes and write look up the same codes, so nothing is kept
//          between them except what the host computes from the sizes. A lane keeps its 32 codes until it knows where
//          its chains begin.
// Barriers quads: one block barrier before the additions, one before the counters are read. Other stages: one, after
// the
//          table is loaded; then warps are independent. One warp writes and reads a slot (__syncwarp).
//
// Zeroed before: quads, inexact. Before write, `tiles` has where each tile begins and the head of its list; the head of
// a single escape is kOneHead without its record, which write adds.
//
// Safety   write trusts `tiles`, which the host computed; words that would exceed a tile's streams or `records`,
//          because the weights differ from those of sizes, are not written.
#pragma once

#include "unweight/axes.cuh"
#include "unweight/encoding/compact.cuh"
#include "unweight/encoding/row_block.cuh"
#include "unweight/encoding/weights.cuh"
#include "unweight/ptx/barrier.cuh"
#include "unweight/ptx/memory.cuh"

namespace uw::encode_compact {

using compact::kLengthBytes, compact::kStreamBytesMax;
using packed::kTileBlocks, packed::Operands;
using row_block::Place;

constexpr u32 kBlockThreads = 256, kWarps = kBlockThreads / 32;
constexpr u32 kQuads = 4096, kQuadBytes = kQuads * 4;
constexpr u32 kSlotBytes = (kStreamBytesMax + 4 + 15) / 16 * 16;  // a code may touch the next word
template <class Config>
constexpr u32 kThreads = kBlockThreads;

// Offsets of the sections in dynamic shared memory, and their total.
template <class Config>
struct Smem {
    static constexpr u32 kQuads = 0;
    static constexpr u32 kSlots = kQuads + kQuadBytes;  // write only
    static constexpr u32 kBytes = Config::kStage == EncodeCompactStage::kWrite ? kSlots + kWarps * kSlotBytes : kSlots;
};

constexpr u32 kCountBlocks = 8;  // row blocks per warp of quads

constexpr u32 kSigns = 0x80008000;
constexpr u32 kOutside = 0x70007000;  // set in (exponent - base) outside of the window of 32 exponents
constexpr u32 kOwn = 0x807F807F;      // sign and mantissa
constexpr u32 kLow = 0x01800180;      // the lower two bits of exponents above the base
constexpr u32 kOneHead = 1u << 30;
constexpr u32 kCodes = 32;  // per lane and tile

// An entry of the code table: that of a quad, or of the quad that is coded instead.
//   31..28  27..24                             23..20  19..10    9..0
//   0       places whose elements are escapes  bits    backward  forward
UW_DEVICE u32 bits_of(u32 entry) { return entry >> 20 & 15; }
UW_DEVICE u32 code_of(u32 entry, bool up) { return (up ? entry : entry >> 10) & 1023; }

// The elements of quad c of a row block that the entry makes escapes.
UW_DEVICE u32 escapes_of(u32 entry, u32 c) { return entry >> 24 << 4 * c; }

// A row block, split: `dense.p` has sign, low bits and mantissa, `classes` the classes at bits 11..9 of each half.
struct Split {
    Operands dense;
    u32 classes[16];
    u32 escapes;  // bit 2 * register + half: outside of the window

    UW_DEVICE Split(const Operands& weights, u32 base, u32 filler) : escapes(0) {
        const u32 bases = base << 7 | base << 23;
        u32 outside = 0;
#pragma unroll
        for (u32 i = 0; i < 16; ++i) {
            // The sign bit absorbs a borrow from the other half; an exponent outside of the window sets one of the bits
            // 14..12.
            classes[i] = (weights.p[i] | kSigns) - bases;
            outside |= classes[i] & kOutside;
            dense.p[i] = (weights.p[i] & kOwn) | (classes[i] & kLow);
        }
        if (outside == 0) return;
        // Escapes get the filler's class, and lower bits of 0.
#pragma unroll
        for (u32 i = 0; i < 16; ++i) {
            if (classes[i] & kOutside & 0xffff) {
                escapes |= 1u << 2 * i;
                classes[i] = (classes[i] & 0xffff0000) | filler << 9;
                dense.p[i] &= ~(kLow & 0xffff);
            }
            if (classes[i] & kOutside & 0xffff0000) {
                escapes |= 2u << 2 * i;
                classes[i] = (classes[i] & 0xffff) | filler << 25;
                dense.p[i] &= ~(kLow & 0xffff0000);
            }
        }
    }

    // The quad of registers 2c and 2c + 1.
    UW_DEVICE u32 quad(u32 c) const {
        const u32 a = classes[2 * c], b = classes[2 * c + 1];
        return (a >> 9 & 7) | (a >> 22 & 0x38) | (b >> 3 & 0x1c0) | (b >> 16 & 0xe00);
    }
};

UW_DEVICE u32 tile_count(const EncodeCompactArgs& args) { return args.tile_rows * args.tile_cols; }

// ---- quads ----------------------------------------------------------------------------------------------------------

UW_DEVICE void quads(const EncodeCompactArgs& args) {
    const u32 counts = ptx::cvta_to_shared(ptx::dynamic_smem()), thread = ptx::tid(), lane = thread % 32;
#pragma unroll
    for (u32 i = 0; i < kQuads / 4 / kBlockThreads; ++i)
        ptx::st_shared_x4(counts + (i * kBlockThreads + thread) * 16, U32x4{0, 0, 0, 0});
    ptx::bar_sync();  // orders the zeros before the additions of every warp
    const u32 first = (ptx::ctaid() * kWarps + ptx::uniform_warp_index()) * kCountBlocks;
#pragma unroll 1
    for (u32 block = first; block < first + kCountBlocks && block < tile_count(args) * kTileBlocks; ++block) {
        const Split split(row_block::load(args, Place(args, block, lane)), args.base, args.filler);
#pragma unroll
        for (u32 c = 0; c < compact::kBlockQuads; ++c) ptx::red_add_shared(counts + split.quad(c) * 4, 1);
    }
    ptx::bar_sync();  // orders the additions of every warp before the sums are read
#pragma unroll 1
    for (u32 quad = thread; quad < kQuads; quad += kBlockThreads) {
        const u32 count = ptx::ld_shared(counts + quad * 4);
        if (count != 0) ptx::red_add_global(args.quads + quad, count);
    }
}

// ---- sizes and write ------------------------------------------------------------------------------------------------

// Called by the whole block: copies the code table to the beginning of shared memory.
UW_DEVICE void load_table(const EncodeCompactArgs& args, u32 table) {
#pragma unroll
    for (u32 i = 0; i < kQuads / 4 / kBlockThreads; ++i) {
        const u32 at = i * kBlockThreads + ptx::tid();
        ptx::st_shared_x4(table + at * 16, ptx::ld_global_nc_x4(args.table + at * 4));
    }
    ptx::bar_sync();  // orders the table before the lookups of every warp
}

// Inclusive sums over the lanes.
UW_DEVICE u32 sums(u32 v, u32 lane) {
#pragma unroll
    for (u32 delta = 1; delta < 32; delta *= 2) {
        const u32 lower = ptx::shfl_sync_up(v, delta);
        v += lane >= delta ? lower : 0;
    }
    return v;
}

// Bits of a lane's chains, rounded up to a multiple of two.
UW_DEVICE u32 whole_units(u32 bits) { return (bits + 1) & ~1u; }

UW_DEVICE u32 operand_of(const EncodeCompactArgs& args, u32 weight) {
    return packed::times_power_of_two(weight,
                                      static_cast<i32>(compact::kOperandExponent) - static_cast<i32>(args.base));
}

UW_DEVICE void sizes(const EncodeCompactArgs& args) {
    const u32 table = ptx::cvta_to_shared(ptx::dynamic_smem()), lane = ptx::tid() % 32;
    load_table(args, table);
    const u32 tile = ptx::ctaid() * kWarps + ptx::uniform_warp_index();
    if (tile >= tile_count(args)) return;
    u32 bits = 0, escapes = 0;
#pragma unroll 1
    for (u32 block = 0; block < kTileBlocks; ++block) {
        const Place place(args, tile * kTileBlocks + block, lane);
        const Split split(row_block::load(args, place), args.base, args.filler);
        // Only escapes outside of the window: the elements of quads without a code are in the window, so they have
        // operands.
#pragma unroll 1
        for (u32 left = split.escapes; left != 0; left &= left - 1) {
            const u64 at = place.element(args, ptx::find_first_set(left) - 1);
            if (operand_of(args, ptx::ld_global_nc_u16(args.weights + at)) & packed::kInexact)
                ptx::red_max_global_u64(args.inexact, ~at);
        }
        u32 mask = split.escapes;
#pragma unroll
        for (u32 c = 0; c < compact::kBlockQuads; ++c) {
            const u32 entry = ptx::ld_shared(table + split.quad(c) * 4);
            bits += bits_of(entry);
            mask |= escapes_of(entry, c);
        }
        escapes += ptx::popc(mask);
    }
    bits = sums(whole_units(bits), lane);
    escapes = sums(escapes, lane);
    if (lane == 31) ptx::st_global_x2(args.sizes + 2 * tile, U32x2{kLengthBytes / 4 + (bits + 31) / 32, escapes});
}

// Writes the records of a tile.
struct Records {
    const EncodeCompactArgs& args;
    const u32 tile, lane, head;
    const u32 at, room;  // of a list: its first word, and the words from there to the end of `records`
    u32 count;

    UW_DEVICE Records(const EncodeCompactArgs& a, u32 tile_, u32 lane_)
        : args(a),
          tile(tile_),
          lane(lane_),
          head(ptx::ld_global(a.tiles + 2 * tile_ + 1)),
          at(head & ~packed::kListHead),
          room(head & packed::kListHead && at < a.record_words ? a.record_words - at : 0),
          count(0) {}

    UW_DEVICE void put(u32 place, u32 element, u32 lane_bits, u32 weight) {
        const u32 record = (operand_of(args, weight) & 0xffff) | lane_bits | element / 2 << 21 | element % 2 << 25;
        if (head == kOneHead) ptx::st_global(args.tiles + 2 * tile + 1, kOneHead | record);
        if (1 + place < room) ptx::st_global(args.records + at + 1 + place, record);
    }

    // The escapes of a row block, in order of register, lane, half.
    UW_DEVICE void block(const Operands& weights, u32 mask, u32 block) {
        if (ptx::vote_sync_ballot(mask != 0) == 0) return;
        const u32 below = (1u << lane) - 1, lane_bits = lane << 16 | block << 26;
#pragma unroll
        for (u32 i = 0; i < 16; ++i) {
            const bool low = mask >> 2 * i & 1, high = mask >> 2 * i & 2;
            const u32 lows = ptx::vote_sync_ballot(low), highs = ptx::vote_sync_ballot(high);
            const u32 own = count + ptx::popc(lows & below) + ptx::popc(highs & below);
            if (low) put(own, 2 * i, lane_bits, weights.p[i] & 0xffff);
            if (high) put(own + low, 2 * i + 1, lane_bits, weights.p[i] >> 16);
            count += ptx::popc(lows) + ptx::popc(highs);
        }
    }

    UW_DEVICE void finish() const {
        if (lane == 0 && room != 0) ptx::st_global(args.records + at, count);
    }
};

// The five words of eight registers (encoding/compact.cuh).
UW_DEVICE void dense_words(const u32* p, u32* words) {
    constexpr u32 kTurned = 0x801F801Fu;
    u32 turned[3];
#pragma unroll
    for (u32 i = 0; i < 3; ++i) {
        const u32 v = p[5 + i] & kTurned;
        turned[i] = ptx::shf_l_wrap(v, v, 10);
    }
    words[0] = p[0] | turned[0];
    words[1] = p[1] | (p[5] & 0x01e001e0u) << 6 | (p[6] & 0x01800180u) << 2;
    words[2] = p[2] | turned[1];
    words[3] = p[3] | (p[6] & 0x00600060u) << 4 | (p[7] & 0x01e001e0u) << 6;
    words[4] = p[4] | turned[2];
}

UW_DEVICE void store_dense(const EncodeCompactArgs& args, u32 tile, u32 block, u32 lane, const Operands& dense) {
    u32 words[compact::kBlockWords];
    dense_words(dense.p, words);
    dense_words(dense.p + 8, words + 5);
    u8* to = args.dense + static_cast<u64>(tile) * compact::kDenseTileBytes + lane * 16;
#pragma unroll
    for (u32 j = 0; j < compact::kBlockWords; j += 2) {
        const u32 q = block * compact::kBlockWords + j;
        ptx::st_global_x2(to + q / 4 * packed::kGroupBytes + q % 4 * 4, U32x2{words[j], words[j + 1]});
    }
}

// ORs a code's bits into a zeroed slot, starting at bit `at`.
UW_DEVICE void put_bits(u32 slot, u32 at, u32 code, u32 bits) {
    const u32 word = slot + (at >> 3 & ~3u), shift = at & 31;
    ptx::red_or_shared(word, code << shift);
    if (shift + bits > 32) ptx::red_or_shared(word + 4, code >> (32 - shift));
}

UW_DEVICE void write(const EncodeCompactArgs& args) {
    const u32 table = ptx::cvta_to_shared(ptx::dynamic_smem()), lane = ptx::tid() % 32,
              warp = ptx::uniform_warp_index();
    const u32 slot = table + kQuadBytes + warp * kSlotBytes;
    load_table(args, table);
    const u32 tile = ptx::ctaid() * kWarps + warp;
    if (tile >= tile_count(args)) return;
    for (u32 at = lane * 16; at < kSlotBytes; at += 32 * 16) ptx::st_shared_x4(slot + at, U32x4{0, 0, 0, 0});

    Records records(args, tile, lane);
    u32 codes[kCodes], bits = 0;  // code in bits 0..15, number of bits from bit 16 on
#pragma unroll
    for (u32 block = 0; block < kTileBlocks; ++block) {
        const Operands weights = row_block::load(args, Place(args, tile * kTileBlocks + block, lane));
        const Split split(weights, args.base, args.filler);
        u32 mask = split.escapes;
#pragma unroll
        for (u32 c = 0; c < compact::kBlockQuads; ++c) {
            const u32 entry = ptx::ld_shared(table + split.quad(c) * 4);
            codes[block * compact::kBlockQuads + c] = code_of(entry, block < kTileBlocks / 2) | bits_of(entry) << 16;
            bits += bits_of(entry);
            mask |= escapes_of(entry, c);
        }
        store_dense(args, tile, block, lane, split.dense);
        records.block(weights, mask, block);
    }
    records.finish();

    const u32 own = whole_units(bits), end = 8 * kLengthBytes + sums(own, lane);
    ptx::bar_warp_sync();  // orders the slot's zeros before the bits of every lane
    ptx::st_shared_u8(slot + lane, own / 2);
    u32 up = end - own, down = end;
#pragma unroll
    for (u32 i = 0; i < kCodes / 2; ++i) {
        const u32 forward = codes[i], backward = codes[kCodes / 2 + i];
        put_bits(slot, up, forward & 0xffff, forward >> 16);
        up += forward >> 16;
        down -= backward >> 16;
        put_bits(slot, down, backward & 0xffff, backward >> 16);
    }
    ptx::bar_warp_sync();  // orders the bits of every lane before the copy
    const u32 first = ptx::ld_global(args.tiles + 2 * tile), last = ptx::ld_global(args.tiles + 2 * tile + 2);
    const u32 words = (ptx::shfl_sync_idx(end, 31) + 31) / 32;
    for (u32 at = lane; at < words && first + at < last; at += 32)
        ptx::st_global(args.streams + first + at, ptx::ld_shared(slot + at * 4));
}

// ---- entry
template <class Config>
UW_DEVICE void run(const EncodeCompactArgs& args) {
    if constexpr (Config::kStage == EncodeCompactStage::kQuads) {
        quads(args);
    } else if constexpr (Config::kStage == EncodeCompactStage::kSizes) {
        sizes(args);
    } else {
        write(args);
    }
}

}  // namespace uw::encode_compact
