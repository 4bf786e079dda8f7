// Conversions of the packed form (docs/format.md A.9): BF16 matrix -> packed tensor, byte for byte that of the CPU, and
// back. n and k are multiples of 64.
//
// One function per stage, all of RepackArgs:
//   to pack   encode::stats without sign_mantissa -> the host chooses the window -> pack -> the host reads `inexact`
//             and sums group_words: the words
//             of `escapes` -> lists (none needed if that sum is 0)
//   back      unpack
//
// stage    threads  blocks/SM  grid                       dynamic smem  reads + writes, bytes per element
// pack     256      4          ceil(row blocks / 8)       0             2 + 1.5
// lists    256      4          ceil(row blocks / 64)      64            4 per row block twice; 2048 + 12 * records of a
//                                                                       row block with a list
// unpack   256      4          ceil(row blocks / 8)       0             1.5 + 2
//
// Bound    device memory. What else was tried: docs/adr/0005-preprocess-log.md.
//
// Zeroed before pack: inexact, group_words. Between pack and lists a head with a list holds 1 << 31 | number of
// records; lists turns the number into the index, so it runs once. The sums of 64 row blocks are kept apart while
// packing, and a block of lists adds up those before its own: no block waits.
//
// Roles    a warp takes a row block: lane 4g + t moves 16 bytes of rows g and g + 8 at columns 8t and 32 + 8t, whole
//          sectors, and four words change lanes within
//          the quad (transpose), which leaves the fragments of the A operand in 16 registers. No shared memory, no
//          barriers but in lists.
// Escapes  their common absence costs a ballot. pack only counts them and checks their operands, a lone one goes into
// the head; lists reads its row blocks again.
//
// Safety   unpack takes any bytes: a list never reads past `escape_words`, all else is static. lists never writes past
//          it.
#pragma once

#include "unweight/form/escapes.cuh"
#include "unweight/form/packed.cuh"
#include "unweight/form/weights.cuh"
#include "unweight/ptx/barrier.cuh"
#include "unweight/ptx/memory.cuh"

namespace uw::repack {

using packed::kFree, packed::kInexact, packed::kOperandExponent, packed::Operands, packed::pair_of_exponents;

constexpr u32 kThreads = 256, kWarps = kThreads / 32;
constexpr u32 kPackThreads = kThreads, kPackSmemBytes = 0;
constexpr u32 kListsThreads = kThreads, kListsSmemBytes = kWarps * 8;
constexpr u32 kUnpackThreads = kThreads, kUnpackSmemBytes = 0;
constexpr u32 kListBlocks = 8;  // row blocks of a warp of lists: few, since one list after the other is written
constexpr u32 kGroupBlocks = kWarps * kListBlocks;

constexpr u32 kSigns = 0x80008000;
constexpr u32 kLowNibble = 0x0780;
constexpr u32 kOneHead = 1u << 30;

// ---- row blocks in registers
// -----------------------------------------------------------------------------------------

UW_DEVICE u32 row_blocks(const RepackArgs& args) { return args.tile_rows * args.tile_cols * packed::kTileBlocks; }

// Where a row block begins in the matrix, lane 4g + t taking rows `row` = g and g + 8.
struct Place {
    u32 row, column, lane;

    UW_DEVICE Place(const RepackArgs& args, u32 block, u32 lane_) : lane(lane_) {
        const u32 tile = block / packed::kTileBlocks, tile_row = tile / args.tile_cols;
        row = tile_row * packed::kTile + block % packed::kTileBlocks * packed::kBlockRows + lane / 4;
        column = (tile - tile_row * args.tile_cols) * packed::kTile;
    }

    // Piece i of a lane: 8 neighbours in a row, as they move.
    UW_DEVICE u16* piece(const RepackArgs& args, u32 i) const {
        return args.weights + static_cast<u64>(row + i % 2 * 8) * args.k + column + i / 2 * 32 + lane % 4 * 8;
    }

    // Element 2 * register + half of a lane, as the operand has them.
    UW_DEVICE u64 element(const RepackArgs& args, u32 e) const {
        return static_cast<u64>(row + e / 2 % 2 * 8) * args.k + column + e / 8 * 16 + e / 4 % 2 * 8 + lane % 4 * 2 + e % 2;
    }
};

// Word j of lane t of a quad becomes word t of lane j.
UW_DEVICE void transpose(u32 (&v)[4], u32 lane) {
#pragma unroll
    for (u32 distance = 1; distance < 4; distance *= 2) {
        const bool upper = lane & distance;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            if (i & distance) continue;
            const u32 j = i + distance;
            const u32 other = ptx::shuffle_xor(upper ? v[i] : v[j], distance);
            v[i] = upper ? other : v[i];
            v[j] = upper ? v[j] : other;
        }
    }
}

// Register (see form/packed.cuh) of word j of a quad's four i-th pieces.
UW_DEVICE constexpr u32 register_of(u32 i, u32 j) { return 4 * (i / 2 * 2 + j / 2) + 2 * (j % 2) + i % 2; }

UW_DEVICE Operands load_block(const RepackArgs& args, const Place& place) {
    U32x4 pieces[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) pieces[i] = ptx::load_global_nc_x4(place.piece(args, i));
    Operands weights;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        u32 v[4] = {pieces[i].x, pieces[i].y, pieces[i].z, pieces[i].w};
        transpose(v, place.lane);
#pragma unroll
        for (u32 j = 0; j < 4; ++j) weights.p[register_of(i, j)] = v[j];
    }
    return weights;
}

UW_DEVICE void store_block(const RepackArgs& args, const Place& place, const Operands& weights) {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        u32 v[4];
#pragma unroll
        for (u32 j = 0; j < 4; ++j) v[j] = weights.p[register_of(i, j)];
        transpose(v, place.lane);
        ptx::store_global_x4(place.piece(args, i), U32x4{v[0], v[1], v[2], v[3]});
    }
}

// ---- elements
// --------------------------------------------------------------------------------------------------------

// Both halves with base subtracted from the exponent. Bits 14..11 of a half become 0 if it is in the window, and else
// do not: a borrow, kept from the other half by bit 15, leaves at least 2^15 - (239 << 7).
UW_DEVICE u32 contain(u32 pair, u32 bases) { return ptx::bit_select(kSigns, pair, (pair | kSigns) - bases); }

UW_DEVICE Operands contain(Operands weights, u32 bases) {
#pragma unroll
    for (u32 i = 0; i < 16; ++i) weights.p[i] = contain(weights.p[i], bases);
    return weights;
}

// Bit 2 * register + half: that element is an escape.
UW_DEVICE u32 escape_mask(const Operands& container) {
    u32 mask = 0;
#pragma unroll
    for (u32 i = 0; i < 16; ++i) {
        mask |= (container.p[i] & kFree & 0xffff) != 0 ? 1u << 2 * i : 0;
        mask |= (container.p[i] & kFree >> 16 << 16) != 0 ? 2u << 2 * i : 0;
    }
    return mask;
}

// Of a record, all but the operand.
UW_DEVICE u32 place_of(u32 element, u32 lane) { return lane << 16 | element / 2 << 21 | element % 2 << 25; }

UW_DEVICE u32 operand_of(const RepackArgs& args, u32 weight) {
    return packed::times_power_of_two(weight, static_cast<i32>(kOperandExponent) - static_cast<i32>(args.base));
}

// ---- pack: containers, heads, words of the lists
// ---------------------------------------------------------------------

UW_DEVICE u32 warp_sum(u32 v) {
#pragma unroll
    for (u32 delta = 1; delta < 32; delta *= 2) v += ptx::shuffle_xor(v, delta);
    return v;
}

// Writes the head of a row block with escapes, and makes their nibbles 0.
UW_DEVICE void pack_escapes(const RepackArgs& args, const Place& place, u32 block, Operands& container) {
    const u32 mask = escape_mask(container);
#pragma unroll
    for (u32 i = 0; i < 16; ++i) {
        container.p[i] &= ~((mask >> 2 * i & 1) * kLowNibble | (mask >> (2 * i + 1) & 1) * (kLowNibble << 16));
    }
    // Weights are read again: an index would push the registers to memory. All of them, since each may turn out to have
    // no operand.
    u32 record = 0;
#pragma unroll 1
    for (u32 left = mask; left != 0; left &= left - 1) {
        const u32 element = ptx::find_first_set(left) - 1;
        const u64 at = place.element(args, element);
        const u32 operand = operand_of(args, ptx::load_global_nc_u16(args.weights + at));
        if (operand & kInexact) ptx::reduce_max_global_u64(args.inexact, ~at);
        record = (operand & 0xffff) | place_of(element, place.lane);
    }
    const u32 own = ptx::popcount(mask), count = warp_sum(own);
    if (count == 1) {
        if (own == 1) ptx::store_global(args.escape_heads + block, kOneHead | record);
    } else if (place.lane == 0) {
        ptx::store_global(args.escape_heads + block, packed::kListHead | count);
        ptx::reduce_add_global(args.group_words + block / kGroupBlocks, 1 + count);
    }
}

UW_DEVICE void pack(const RepackArgs& args) {
    const u32 lane = ptx::thread_index() % 32, block = ptx::block_index() * kWarps + ptx::uniform_warp_index();
    const u32 bases = pair_of_exponents(args.base);
    if (block >= row_blocks(args)) return;
    const Place place(args, block, lane);
    Operands container = contain(load_block(args, place), bases);
    u32 outside = 0;
#pragma unroll
    for (u32 i = 0; i < 16; ++i) outside |= container.p[i] & kFree;
    if (ptx::warp_ballot(outside != 0) != 0) {
        pack_escapes(args, place, block, container);
    } else if (lane == 0) {
        ptx::store_global(args.escape_heads + block, 0);
    }
    u32 words[12];
#pragma unroll
    for (u32 s = 0; s < packed::kSteps; ++s) {
        const u32* p = container.p + 4 * s;
        words[3 * s + 0] = ptx::bit_select(kFree, p[3] << 4, p[0]);
        words[3 * s + 1] = ptx::bit_select(kFree, p[3] << 8, p[1]);
        words[3 * s + 2] = ptx::bit_select(kFree, ptx::funnel_shift_right(p[3], p[3], 4), p[2]);
    }
    u8* to = args.packed + static_cast<u64>(block) * packed::kBlockBytes + lane * 16;
#pragma unroll
    for (u32 j = 0; j < 3; ++j) {
        ptx::store_global_x4(to + j * packed::kGroupBytes, U32x4{words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3]});
    }
}

// ---- lists: indices of the lists, and their records
// ------------------------------------------------------------------

// First the places with weights for operands, in order of step, register, lane, half; then the operands, all lanes at
// work.
UW_DEVICE void write_list(const RepackArgs& args, const Place& place, u32 at) {
    const Operands weights = load_block(args, place);
    const u32 mask = escape_mask(contain(weights, pair_of_exponents(args.base))), below = (1u << place.lane) - 1;
    u32* const list = args.escapes + at;
    const u32 room = at < args.escape_words ? args.escape_words - at : 0;
    u32 next = 1;
#pragma unroll
    for (u32 i = 0; i < 16; ++i) {
        const bool low = mask >> 2 * i & 1, high = mask >> 2 * i & 2;
        const u32 lows = ptx::warp_ballot(low), highs = ptx::warp_ballot(high);
        const u32 own = next + ptx::popcount(lows & below) + ptx::popcount(highs & below);
        if (low && own < room) ptx::store_global(list + own, (weights.p[i] & 0xffff) | place_of(2 * i, place.lane));
        if (high && own + low < room) ptx::store_global(list + own + low, weights.p[i] >> 16 | place_of(2 * i + 1, place.lane));
        next += ptx::popcount(lows) + ptx::popcount(highs);
    }
    ptx::sync_warp();
    for (u32 i = 1 + place.lane; i < next && i < room; i += 32) {
        const u32 record = ptx::load_global(list + i);
        ptx::store_global(list + i, (record & ~0xffffu) | (operand_of(args, record & 0xffff) & 0xffff));
    }
    if (place.lane == 0 && room != 0) ptx::store_global(list, next - 1);
}

UW_DEVICE void lists(const RepackArgs& args) {
    const u32 smem = ptx::smem_address(ptx::dynamic_smem());  // 8 warps x {words of its row blocks, words before the group}
    const u32 thread = ptx::thread_index(), lane = thread % 32, warp = ptx::uniform_warp_index(), group = ptx::block_index();
    const u32 first = group * kGroupBlocks + warp * kListBlocks, block = first + lane;  // of the first lanes
    if (ptx::load_global(args.group_words + group) == 0) return;

    u32 before = 0;
#pragma unroll 1
    for (u32 other = thread; other < group; other += kThreads) before += ptx::load_global(args.group_words + other);
    const u32 head = lane < kListBlocks && block < row_blocks(args) ? ptx::load_global(args.escape_heads + block) : 0;
    const u32 words = head & packed::kListHead ? (head & ~packed::kListHead) + 1 : 0;
    u32 sum = words;
#pragma unroll
    for (u32 delta = 1; delta < 32; delta *= 2) {
        const u32 lower = ptx::shuffle_up(sum, delta);
        sum += lane >= delta ? lower : 0;
    }
    before = warp_sum(before);
    if (lane == 31) ptx::store_shared_x2(smem + warp * 8, {sum, before});
    ptx::sync_block();
    u32 at = sum - words;
    for (u32 i = 0; i < kWarps; ++i) {
        const U32x2 other = ptx::load_shared_x2(smem + i * 8);
        at += (i < warp ? other.x : 0) + other.y;
    }
    if (words != 0) ptx::store_global(args.escape_heads + block, packed::kListHead | at);
    for (u32 left = ptx::warp_ballot(words != 0); left != 0; left &= left - 1) {
        const u32 owner = ptx::find_first_set(left) - 1;
        write_list(args, Place(args, first + owner, lane), ptx::shuffle(at, owner));
    }
}

// ---- unpack
// ----------------------------------------------------------------------------------------------------------

// Replaces a row block's escapes by their weights.
UW_DEVICE void unpack_escapes(const RepackArgs& args, u32 head, u32 lane, Operands& weights) {
    const u32 records = packed::read_records(head, args.escapes, args.escape_words, lane);
    const u32 index = head & ~packed::kListHead, listed = ptx::shuffle(records, 0);
    const u32 count = listed < packed::kBlockElements ? listed : packed::kBlockElements;
#pragma unroll 1
    for (u32 i = 1; i <= count; ++i) {
        u32 record = ptx::shuffle(records, i % 32);
        if (i >= 32) {
            if (i >= args.escape_words - index) return;
            record = ptx::load_global_nc(args.escapes + index + i);
        }
        packed::patch(weights, packed::record_of_weight(record, args.base), lane);
    }
}

UW_DEVICE void unpack(const RepackArgs& args) {
    const u32 lane = ptx::thread_index() % 32, block = ptx::block_index() * kWarps + ptx::uniform_warp_index();
    const u32 bases = pair_of_exponents(args.base);
    if (block >= row_blocks(args)) return;
    const u8* from = args.packed + static_cast<u64>(block) * packed::kBlockBytes + lane * 16;
    const u32 head = ptx::load_global_nc(args.escape_heads + block);
    u32 words[12];
#pragma unroll
    for (u32 j = 0; j < 3; ++j) {
        const U32x4 v = ptx::load_global_nc_x4(from + j * packed::kGroupBytes);
        words[4 * j + 0] = v.x;
        words[4 * j + 1] = v.y;
        words[4 * j + 2] = v.z;
        words[4 * j + 3] = v.w;
    }
    Operands weights = packed::weights_of(words, bases);
    if (head != 0) unpack_escapes(args, head, lane, weights);
    store_block(args, Place(args, block, lane), weights);
}

}  // namespace uw::repack
