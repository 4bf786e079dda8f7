// Decodes a compact tensor (docs/format.md A.11) to bf16 weights, row-major, or to a packed tensor (A.9),
// byte-identical to the CPU. n and k are multiples of 64.
//
// One function per stage, all with DecodeCompactArgs; Config has DecodeCompactStage kStage:
//   weights                 full
//   a packed tensor         packed -> the host sums group_words, which gives the words of `escapes` -> lists (not
//   needed if
//                           that sum is 0); the host has chosen the window of 16 exponents
//
// stage    threads  blocks/SM  grid              dynamic smem           reads + writes, bytes per element
// full     256      3          ceil(tiles / 8)   2048 + 8 * 1232        1.35 + 2
// packed   256      3          ceil(tiles / 8)   the same               1.35 + 1.5
// lists    256      3          ceil(tiles / 16)  the same + 64          1.35 per tile with a list; 4 per row block
//
// Bound    device memory for full and packed.
//
// Roles    a warp takes a tile: its dense part goes to registers, its streams to the warp's slot; four row blocks are
//          decoded, two from each chain, and stored one by one. The table is copied once per block.
// Barriers one block barrier after the table is loaded; then warps are independent. One warp writes and reads a slot
//          (__syncwarp). No bulk copies.
//
// Zeroed before packed: inexact, group_words. Heads and lists as in kernels/pack.cuh.
//
// Safety   for any bytes: streams are clamped to `streams`, a slot holds the longest streams and the bytes that are
//          read past them (encoding/compact.cuh), a list never reads past `record_words` nor writes past
//          `escape_words`.
#pragma once

#include "unweight/axes.cuh"
#include "unweight/encoding/compact.cuh"
#include "unweight/encoding/row_block.cuh"
#include "unweight/kernels/pack.cuh"

namespace uw::decode_compact {

using compact::Chains, compact::Tile;
using packed::kTileBlocks, packed::Operands;
using row_block::Place;

constexpr u32 kBlockThreads = 256, kWarps = kBlockThreads / 32;
constexpr u32 kSlots = compact::kTableBytes, kSums = kSlots + kWarps * compact::kSlotBytes;
template <class Config>
constexpr u32 kThreads = kBlockThreads;

// Offsets of the sections in dynamic shared memory, and their total.
template <class Config>
struct Smem {
    static constexpr u32 kTable = 0;
    static constexpr u32 kSlots = decode_compact::kSlots;
    static constexpr u32 kSums = decode_compact::kSums;  // lists only
    static constexpr u32 kBytes = Config::kStage == DecodeCompactStage::kLists ? kSums + kWarps * 8 : kSums;
};

// The state of a warp.
struct Warp {
    const DecodeCompactArgs& args;
    const u32 shared, lane, warp, slot;
    const compact::Table<1> table;

    UW_DEVICE explicit Warp(const DecodeCompactArgs& a)
        : args(a),
          shared(ptx::cvta_to_shared(ptx::dynamic_smem())),
          lane(ptx::tid() % 32),
          warp(ptx::uniform_warp_index()),
          slot(shared + kSlots + warp * compact::kSlotBytes),
          table(shared, lane) {}

    // This thread's 8 bytes of the table.
    UW_DEVICE U32x2 load_table() const {
        static_assert(kBlockThreads * 8 == compact::kTableBytes, "each thread copies 8 bytes");
        return ptx::ld_global_nc_x2(args.table + ptx::tid() * 2);
    }
    // Called by the whole block.
    UW_DEVICE void store_table(U32x2 entries) const {
        ptx::st_shared_x2(shared + ptx::tid() * 8, entries);
        ptx::bar_sync();  // orders the table before the lookups of every warp
    }

    // Copies a tile's streams to the slot, after the warp has read the previous contents.
    UW_DEVICE void load_streams(const Tile& tile) const {
        ptx::bar_warp_sync();  // orders every lane's loads of the previous tile before the stores below
        for (u32 at = lane * 4; at < tile.words; at += 32 * 4) {
            ptx::st_shared_x4(slot + at * 4, ptx::ld_global_nc_x4(args.streams + tile.first + at));
        }
        ptx::bar_warp_sync();  // orders the lanes' stores before the loads of the chains
    }
    UW_DEVICE Chains chains(const Tile& tile) const { return Chains(slot + tile.skip * 4, lane); }

    // Turns operands into weights: replaces the constant of their exponents by the window's base, and patches escapes.
    UW_DEVICE void to_weights(Operands& operands, const Tile& tile, u32 block) const {
        const u32 shift = (args.class_base - compact::kOperandExponent) << 7, both = shift + (shift << 16);
#pragma unroll
        for (u32 i = 0; i < 16; ++i) operands.p[i] += both;
        if (tile.head == 0) return;
        const i32 back = static_cast<i32>(args.class_base) - static_cast<i32>(compact::kOperandExponent);
        compact::for_escapes(tile.head, args.records, args.record_words, [&](u32 record) {
            if (compact::block_of(record) != block) return;
            const u32 weight = packed::times_power_of_two(record & 0xffff, back) & 0xffff;
            packed::patch(operands, (record & ~0xffffu) | weight, lane);
        });
    }
};

// Calls `store(weights, row block of the tensor)` for every row block of the warp's tile.
template <class Store>
UW_DEVICE void for_row_blocks(const Warp& own, Store store) {
    const DecodeCompactArgs& args = own.args;
    const u32 tile = ptx::ctaid() * kWarps + own.warp, tiles = args.tile_rows * args.tile_cols;
    // All loads are issued at once: the table, the locations of the streams, the streams, the dense part. A warp
    // without a tile reads the last one, because it takes part in the block barrier.
    const U32x2 table = own.load_table();
    const u32 source = tile < tiles ? tile : tiles - 1;
    const Tile place(args.tiles, source, args.stream_words);
    u32 words[compact::kDenseWords];
    const u8* dense = args.dense + static_cast<u64>(source) * compact::kDenseTileBytes + own.lane * 16;
#pragma unroll
    for (u32 c = 0; c < compact::kDenseWords / 4; ++c) {
        const U32x4 v = ptx::ld_global_nc_x4(dense + c * packed::kGroupBytes);
        words[4 * c + 0] = v.x;
        words[4 * c + 1] = v.y;
        words[4 * c + 2] = v.z;
        words[4 * c + 3] = v.w;
    }
    own.load_streams(place);
    own.store_table(table);
    if (tile >= tiles) return;
    Chains chains = own.chains(place);
#pragma unroll
    for (u32 i = 0; i < kTileBlocks / 2; ++i) {
        Operands weights;
        compact::decode_block<true>(weights, words + i * compact::kBlockWords, chains.up, own.table);
        own.to_weights(weights, place, i);
        store(weights, tile * kTileBlocks + i);
        const u32 second = i + kTileBlocks / 2;
        compact::decode_block<false>(weights, words + second * compact::kBlockWords, chains.down, own.table);
        own.to_weights(weights, place, second);
        store(weights, tile * kTileBlocks + second);
    }
}

UW_DEVICE void full(const DecodeCompactArgs& args) {
    const Warp own(args);
    for_row_blocks(own, [&](const Operands& weights, u32 block) {
        row_block::store(args, Place(args, block, own.lane), weights);
    });
}

// Half `element % 2` of register `element / 2`, by selects: an index would move the registers to local memory.
UW_DEVICE u32 element_of(const Operands& weights, u32 element) {
    u32 pair = 0;
#pragma unroll
    for (u32 i = 0; i < 16; ++i) pair = element / 2 == i ? weights.p[i] : pair;
    return element % 2 ? pair >> 16 : pair & 0xffff;
}

UW_DEVICE void packed(const DecodeCompactArgs& args) {
    const Warp own(args);
    for_row_blocks(own, [&](const Operands& weights, u32 block) {
        const Place place(args, block, own.lane);
        Operands container = pack::contain(weights, packed::pair_of_exponents(args.base));
        pack::store_head(args, place, block, container, [&](u32 element) { return element_of(weights, element); });
        pack::store_container(args, place, block, container);
    });
}

// Decodes one row block of a tile, following its chain from the start.
UW_DEVICE Operands decode_again(const Warp& own, u32 block) {
    const DecodeCompactArgs& args = own.args;
    const u32 tile = block / kTileBlocks, within = block % kTileBlocks;
    const Tile place(args.tiles, tile, args.stream_words);
    own.load_streams(place);
    Chains chains = own.chains(place);
    Operands weights;
#pragma unroll 1
    for (u32 i = within & ~1u; i <= within; ++i) {
        u32 words[compact::kBlockWords];
#pragma unroll
        for (u32 j = 0; j < compact::kBlockWords; ++j) {
            const u32 q = i * compact::kBlockWords + j;
            const u8* dense = args.dense + static_cast<u64>(tile) * compact::kDenseTileBytes;
            words[j] = ptx::ld_global_nc(dense + q / 4 * packed::kGroupBytes + own.lane * 16 + q % 4 * 4);
        }
        if (within < kTileBlocks / 2) {
            compact::decode_block<true>(weights, words, chains.up, own.table);
        } else {
            compact::decode_block<false>(weights, words, chains.down, own.table);
        }
    }
    own.to_weights(weights, place, within);
    return weights;
}

UW_DEVICE void lists(const DecodeCompactArgs& args) {
    const Warp own(args);
    own.store_table(own.load_table());
    pack::lists(args, own.shared + kSums, [&](const Place&, u32 block) { return decode_again(own, block); });
}

// ---- entry
template <class Config>
UW_DEVICE void run(const DecodeCompactArgs& args) {
    if constexpr (Config::kStage == DecodeCompactStage::kFull) {
        full(args);
    } else if constexpr (Config::kStage == DecodeCompactStage::kPacked) {
        packed(args);
    } else {
        lists(args);
    }
}

}  // namespace uw::decode_compact
