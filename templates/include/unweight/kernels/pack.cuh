// Packs a BF16 matrix (docs/format.md A.9), byte-identical to the CPU. n and k are multiples of 64.
//
// One function per stage, all with PackArgs; Config has PackStage kStage:
//   encode_huffman::stats without sign_mantissa -> the host chooses the window -> tiles -> the host reads `inexact` and
//   sums group_words, which gives the words of `escapes` -> lists (not needed if that sum is 0)
//
// stage    threads  blocks/SM  grid                       dynamic smem  reads + writes, bytes per element
// tiles    256      4          ceil(row blocks / 8)       0             2 + 1.5
// lists    256      4          ceil(row blocks / 64)      64            4 per row block twice; 2048 + 12 * records of a
//                                                                       row block with a list
//
// Bound    device memory. Experiments: docs/records/2026-11-20/kernels-preprocess-log.md.
//
// Zeroed before tiles: inexact, group_words. Between tiles and lists, a head with a list holds 1 << 31 | number of
// records; lists replaces the number by the index, so it must run only once. tiles keeps a sum per 64 row blocks, and
// each block of lists adds up the sums of preceding blocks, so no block waits for another.
//
// Roles    a warp takes a row block, the fragments of the A operand in 16 registers (encoding/row_block.cuh). No shared
//          memory and no barriers, except in lists.
// Escapes  are usually absent, which costs one ballot. tiles only counts them and checks their operands; a single
// escape goes into the head; lists reads its row blocks again.
//
// Safety   lists never writes past `escape_words`; everything else is static.
#pragma once

#include "unweight/axes.cuh"
#include "unweight/encoding/escapes.cuh"
#include "unweight/encoding/packed.cuh"
#include "unweight/encoding/row_block.cuh"
#include "unweight/encoding/weights.cuh"
#include "unweight/ptx/barrier.cuh"
#include "unweight/ptx/memory.cuh"

namespace uw::pack {

using packed::kFree, packed::kInexact, packed::kOperandExponent, packed::Operands, packed::pair_of_exponents;
using row_block::Place;

constexpr u32 kBlockThreads = 256, kWarps = kBlockThreads / 32;
template <class Config>
constexpr u32 kThreads = kBlockThreads;

// Offsets of the sections in dynamic shared memory, and their total.
template <class Config>
struct Smem {
    static constexpr u32 kSums = 0;
    static constexpr u32 kBytes = Config::kStage == PackStage::kLists ? kWarps * 8 : 0;
};

constexpr u32 kListBlocks = 8;  // row blocks per warp of lists: few, because lists are written one after another
constexpr u32 kGroupBlocks = kWarps * kListBlocks;

constexpr u32 kSigns = 0x80008000;
constexpr u32 kLowNibble = 0x0780;
constexpr u32 kOneHead = 1u << 30;

// ---- elements -------------------------------------------------------------------------------------------------------

// Subtracts the base from the exponents of both halves. Bits 14..11 of a half become 0 if and only if the exponent is
// in the window: a borrow, which bit 15 keeps from the other half, leaves at least 2^15 - (239 << 7).
UW_DEVICE u32 contain(u32 pair, u32 bases) { return ptx::bit_select(kSigns, pair, (pair | kSigns) - bases); }

UW_DEVICE Operands contain(Operands weights, u32 bases) {
#pragma unroll
    for (u32 i = 0; i < 16; ++i) weights.p[i] = contain(weights.p[i], bases);
    return weights;
}

// Bit 2 * register + half is set if that element is an escape.
UW_DEVICE u32 escape_mask(const Operands& container) {
    u32 mask = 0;
#pragma unroll
    for (u32 i = 0; i < 16; ++i) {
        mask |= (container.p[i] & kFree & 0xffff) != 0 ? 1u << 2 * i : 0;
        mask |= (container.p[i] & kFree >> 16 << 16) != 0 ? 2u << 2 * i : 0;
    }
    return mask;
}

// All of a record except its operand.
UW_DEVICE u32 place_of(u32 element, u32 lane) { return lane << 16 | element / 2 << 21 | element % 2 << 25; }

template <class Args>
UW_DEVICE u32 operand_of(const Args& args, u32 weight) {
    return packed::times_power_of_two(weight, static_cast<i32>(kOperandExponent) - static_cast<i32>(args.base));
}

// ---- tiles: containers, heads, words of the lists -------------------------------------------------------------------

UW_DEVICE u32 warp_sum(u32 v) {
#pragma unroll
    for (u32 delta = 1; delta < 32; delta *= 2) v += ptx::shfl_sync_bfly(v, delta);
    return v;
}

// Writes the head of a row block and clears the nibbles of its escapes. `weight_of(element)` returns element 2 *
// register + half of this lane.
template <class Args, class WeightOf>
UW_DEVICE void store_head(const Args& args, const Place& place, u32 block, Operands& container, WeightOf weight_of) {
    u32 outside = 0;
#pragma unroll
    for (u32 i = 0; i < 16; ++i) outside |= container.p[i] & kFree;
    if (ptx::vote_sync_ballot(outside != 0) == 0) {
        if (place.lane == 0) ptx::st_global(args.escape_heads + block, 0);
        return;
    }
    const u32 mask = escape_mask(container);
#pragma unroll
    for (u32 i = 0; i < 16; ++i) {
        container.p[i] &= ~((mask >> 2 * i & 1) * kLowNibble | (mask >> (2 * i + 1) & 1) * (kLowNibble << 16));
    }
    // Checks all escapes, because each may lack an operand.
    u32 record = 0;
#pragma unroll 1
    for (u32 left = mask; left != 0; left &= left - 1) {
        const u32 element = ptx::find_first_set(left) - 1;
        const u64 at = place.element(args, element);
        const u32 operand = operand_of(args, weight_of(element));
        if (operand & kInexact) ptx::red_max_global_u64(args.inexact, ~at);
        record = (operand & 0xffff) | place_of(element, place.lane);
    }
    const u32 own = ptx::popc(mask), count = warp_sum(own);
    if (count == 1) {
        if (own == 1) ptx::st_global(args.escape_heads + block, kOneHead | record);
    } else if (place.lane == 0) {
        ptx::st_global(args.escape_heads + block, packed::kListHead | count);
        ptx::red_add_global(args.group_words + block / kGroupBlocks, 1 + count);
    }
}

template <class Args>
UW_DEVICE void store_container(const Args& args, const Place& place, u32 block, const Operands& container) {
    u32 words[12];
#pragma unroll
    for (u32 s = 0; s < packed::kSteps; ++s) {
        const u32* p = container.p + 4 * s;
        words[3 * s + 0] = ptx::bit_select(kFree, p[3] << 4, p[0]);
        words[3 * s + 1] = ptx::bit_select(kFree, p[3] << 8, p[1]);
        words[3 * s + 2] = ptx::bit_select(kFree, ptx::shf_r_wrap(p[3], p[3], 4), p[2]);
    }
    u8* to = args.packed + static_cast<u64>(block) * packed::kBlockBytes + place.lane * 16;
#pragma unroll
    for (u32 j = 0; j < 3; ++j) {
        ptx::st_global_x4(to + j * packed::kGroupBytes,
                          U32x4{words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3]});
    }
}

UW_DEVICE void tiles(const PackArgs& args) {
    const u32 lane = ptx::tid() % 32, block = ptx::ctaid() * kWarps + ptx::uniform_warp_index();
    if (block >= row_block::count(args)) return;
    const Place place(args, block, lane);
    Operands container = contain(row_block::load(args, place), pair_of_exponents(args.base));
    // Weights of escapes are reloaded: an index would move the registers to local memory.
    store_head(args, place, block, container,
               [&](u32 element) { return ptx::ld_global_nc_u16(args.weights + place.element(args, element)); });
    store_container(args, place, block, container);
}

// ---- lists: indices of the lists, and their records -----------------------------------------------------------------

// First writes records with weights instead of operands, in order of step, register, lane, half; then replaces them by
// operands, with all lanes active.
template <class Args>
UW_DEVICE void write_list(const Args& args, const Place& place, const Operands& weights, u32 at) {
    const u32 mask = escape_mask(contain(weights, pair_of_exponents(args.base))), below = (1u << place.lane) - 1;
    u32* const list = args.escapes + at;
    const u32 room = at < args.escape_words ? args.escape_words - at : 0;
    u32 next = 1;
#pragma unroll
    for (u32 i = 0; i < 16; ++i) {
        const bool low = mask >> 2 * i & 1, high = mask >> 2 * i & 2;
        const u32 lows = ptx::vote_sync_ballot(low), highs = ptx::vote_sync_ballot(high);
        const u32 own = next + ptx::popc(lows & below) + ptx::popc(highs & below);
        if (low && own < room) ptx::st_global(list + own, (weights.p[i] & 0xffff) | place_of(2 * i, place.lane));
        if (high && own + low < room)
            ptx::st_global(list + own + low, weights.p[i] >> 16 | place_of(2 * i + 1, place.lane));
        next += ptx::popc(lows) + ptx::popc(highs);
    }
    ptx::bar_warp_sync();  // orders the lanes' stores of weights to the list, in global memory, before the loads below
    for (u32 i = 1 + place.lane; i < next && i < room; i += 32) {
        const u32 record = ptx::ld_global(list + i);
        ptx::st_global(list + i, (record & ~0xffffu) | (operand_of(args, record & 0xffff) & 0xffff));
    }
    if (place.lane == 0 && room != 0) ptx::st_global(list, next - 1);
}

// `smem`: shared address of 8 warps x {words of its row blocks, words before the group}. `weights_of(place, block)`
// reloads a row block.
template <class Args, class WeightsOf>
UW_DEVICE void lists(const Args& args, u32 smem, WeightsOf weights_of) {
    const u32 thread = ptx::tid(), lane = thread % 32, warp = ptx::uniform_warp_index(), group = ptx::ctaid();
    const u32 first = group * kGroupBlocks + warp * kListBlocks, block = first + lane;  // in the first lanes
    if (ptx::ld_global(args.group_words + group) == 0) return;

    u32 before = 0;
#pragma unroll 1
    for (u32 other = thread; other < group; other += kBlockThreads) before += ptx::ld_global(args.group_words + other);
    const u32 head =
        lane < kListBlocks && block < row_block::count(args) ? ptx::ld_global(args.escape_heads + block) : 0;
    const u32 words = head & packed::kListHead ? (head & ~packed::kListHead) + 1 : 0;
    u32 sum = words;
#pragma unroll
    for (u32 delta = 1; delta < 32; delta *= 2) {
        const u32 lower = ptx::shfl_sync_up(sum, delta);
        sum += lane >= delta ? lower : 0;
    }
    before = warp_sum(before);
    if (lane == 31) ptx::st_shared_x2(smem + warp * 8, {sum, before});
    ptx::bar_sync();  // orders the warps' sums before every warp's loads
    u32 at = sum - words;
    for (u32 i = 0; i < kWarps; ++i) {
        const U32x2 other = ptx::ld_shared_x2(smem + i * 8);
        at += (i < warp ? other.x : 0) + other.y;
    }
    if (words != 0) ptx::st_global(args.escape_heads + block, packed::kListHead | at);
    for (u32 left = ptx::vote_sync_ballot(words != 0); left != 0; left &= left - 1) {
        const u32 owner = ptx::find_first_set(left) - 1;
        const Place place(args, first + owner, lane);
        write_list(args, place, weights_of(place, first + owner), ptx::shfl_sync_idx(at, owner));
    }
}

UW_DEVICE void lists(const PackArgs& args) {
    lists(args, ptx::cvta_to_shared(ptx::dynamic_smem()),
          [&](const Place& place, u32) { return row_block::load(args, place); });
}

// ---- entry
template <class Config>
UW_DEVICE void run(const PackArgs& args) {
    if constexpr (Config::kStage == PackStage::kTiles) {
        tiles(args);
    } else {
        lists(args);
    }
}

}  // namespace uw::pack
