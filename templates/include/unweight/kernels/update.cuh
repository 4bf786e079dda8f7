// Replaces elements of a packed tensor in place (docs/format.md A.9), byte-identical to packing the new matrix with the
// same window. n and k are multiples of 64.
//
// One function per stage, all with UpdateArgs; Config has UpdateStage kStage:
//   places -> count -> the host checks window, operands, faults and the words of the lists -> the host copies heads and
//   lists to old_heads and old_escapes -> tiles -> lists -> count without updates, whose digest must be that of the
//   first count
//
// stage    threads  blocks/SM  grid                       dynamic smem  reads + writes, bytes per element
// places   256      4          ceil(row blocks / 64)      0             1 / 16, and 8 per update
// count    256      4          ceil(row blocks / 64)      32768         1.5, and the updates
// tiles    256      4          ceil(row blocks / 8)       0             1.5, and 1.5 per element of a changed row block
// lists    256      4          ceil(row blocks / 64)      64            as lists of pack, 1.5 instead of 2
//
// Bound    device memory.
//
// Roles    a warp takes a row block, as in pack. Updates are in order of places, so those of a row block are 16 ranges,
//          whose ends are in `first`; the lanes load them side by side. A search in the index instead of `first` made
//          an update 1.5 times as slow (docs/records/2026-11-27).
// Barriers count: one before the additions to its counters, one before they are read; lists: as in pack.
// In place tiles reads a row block and writes it in the same warp. lists reads the new containers, and the lists from
//          before the update, over which it applies the updates: both together are the new weights.
//
// Zeroed before: faults (places); histogram, inexact, digest, list_words (count); group_words (tiles).
//
// Safety   for any updates and any `first`: ranges are cut to `updates`, and places reduced to a column of the row
//          block that their range belongs to; a list never reads past `old_escape_words` nor writes past
//          `escape_words`.
#pragma once

#include "unweight/axes.cuh"
#include "unweight/kernels/pack.cuh"
#include "unweight/kernels/unpack.cuh"

namespace uw::update {

using packed::Operands;
using row_block::Place;

constexpr u32 kBlockThreads = 256, kWarps = kBlockThreads / 32;
template <class Config>
constexpr u32 kThreads = kBlockThreads;

constexpr u32 kCountBytes = 256 * 128;  // a counter for each exponent and lane

// Offsets of the sections in dynamic shared memory, and their total.
template <class Config>
struct Smem {
    static constexpr u32 kCounts = 0;  // count
    static constexpr u32 kSums = 0;    // lists
    static constexpr u32 kBytes = Config::kStage == UpdateStage::kCount   ? kCountBytes
                                  : Config::kStage == UpdateStage::kLists ? kWarps * 8
                                                                          : 0;
};

constexpr u32 kCountBlocks = 8;  // row blocks per warp of count
constexpr u32 kCell = 64;        // elements of a row in a tile: places of a cell are consecutive
constexpr u32 kOwnCells = 4;

// ---- weights and updates --------------------------------------------------------------------------------------------

// The lists from before the update, as `unpack` takes them.
struct OldLists {
    const u32* escapes;
    u32 escape_words, base;
};

UW_DEVICE Operands old_weights(const UpdateArgs& args, u32 block, u32 lane) {
    const u8* from = args.packed + static_cast<u64>(block) * packed::kBlockBytes + lane * 16;
    const u32 head = ptx::ld_global(args.old_heads + block);
    u32 words[12];
#pragma unroll
    for (u32 j = 0; j < 3; ++j) {
        const U32x4 v = ptx::ld_global_x4(from + j * packed::kGroupBytes);
        words[4 * j + 0] = v.x;
        words[4 * j + 1] = v.y;
        words[4 * j + 2] = v.z;
        words[4 * j + 3] = v.w;
    }
    Operands weights = packed::weights_of(words, packed::pair_of_exponents(args.base));
    const OldLists lists{args.old_escapes, args.old_escape_words, args.base};
    if (head != 0) unpack::restore_escapes(lists, head, lane, weights);
    return weights;
}

UW_DEVICE u64 place_of(const UpdateArgs& args, u32 update) {
    const U32x2 place = ptx::ld_global_nc_x2(args.index + update);
    return place.x | static_cast<u64>(place.y) << 32;
}

// The updates of a row block. In lanes 0..15: the first one of this row, their number, and their number up to here.
struct Updates {
    u32 first, own, sum, total;
    u64 origin;  // place of the row's first element in the row block

    UW_DEVICE Updates(const UpdateArgs& args, const Place& place) {
        const u32 lane = place.lane, row = place.row - lane / 4 + lane % packed::kBlockRows;
        origin = static_cast<u64>(row) * args.k + place.column;
        const u32 bound = ptx::ld_global(args.first + origin / kCell + lane / packed::kBlockRows);
        first = bound < args.updates ? bound : args.updates;
        const u32 end = ptx::shfl_sync_idx(first, lane % packed::kBlockRows + packed::kBlockRows);
        const u32 found = end > first ? end - first : 0;
        // More than a row has are places that do not ascend.
        own = lane >= packed::kBlockRows ? 0 : found < packed::kTile ? found : packed::kTile;
        sum = own;
#pragma unroll
        for (u32 delta = 1; delta < packed::kBlockRows; delta *= 2) {
            const u32 lower = ptx::shfl_sync_up(sum, delta);
            sum += lane >= delta ? lower : 0;
        }
        total = ptx::shfl_sync_idx(sum, packed::kBlockRows - 1);
    }

    // The record (encoding/escapes.cuh) of update `i` of the row block, with its weight; called by all lanes.
    UW_DEVICE u32 record(const UpdateArgs& args, u32 i) const {
        u32 row = 0;
#pragma unroll
        for (u32 r = 0; r + 1 < packed::kBlockRows; ++r) row += ptx::shfl_sync_idx(sum, r) <= i ? 1 : 0;
        const u32 before = ptx::shfl_sync_idx(sum - own, row), at = ptx::shfl_sync_idx(first, row) + i - before;
        const u32 low = ptx::shfl_sync_idx(static_cast<u32>(origin), row);
        if (i >= total) return 0;
        const u32 column = static_cast<u32>(place_of(args, at)) - low & packed::kTile - 1;
        const u32 pair = column % packed::kStepColumns;
        const u32 lane = row % 8 * 4 + pair % 8 / 2, place = column / packed::kStepColumns * 4 + pair / 8 * 2 + row / 8;
        return ptx::ld_global_nc_u16(args.values + at) | lane << 16 | place << 21 | pair % 2 << 25;
    }

    UW_DEVICE void apply(const UpdateArgs& args, u32 lane, Operands& weights) const {
#pragma unroll 1
        for (u32 start = 0; start < total; start += 32) {
            const u32 records = record(args, start + lane), count = total - start < 32 ? total - start : 32;
#pragma unroll 1
            for (u32 i = 0; i < count; ++i) packed::patch(weights, ptx::shfl_sync_idx(records, i), lane);
        }
    }
};

// Element 2 * register + half of a lane. A select instead of an index keeps the weights in registers.
UW_DEVICE u32 element_of(const Operands& weights, u32 element) {
    u32 pair = 0;
#pragma unroll
    for (u32 i = 0; i < 16; ++i) pair = element / 2 == i ? weights.p[i] : pair;
    return element % 2 ? pair >> 16 : pair & 0xffff;
}

// ---- places: ranges of updates, faults ------------------------------------------------------------------------------

// Sets `first` of each cell after the cell of update i - 1, up to that of update i; i = updates ends the last range.
// Reports places that do not ascend, or are outside of the matrix.
UW_DEVICE void places(const UpdateArgs& args) {
    const u64 cells = static_cast<u64>(args.n) * args.k / kCell;
    const u32 lane = ptx::tid() % 32, threads = ptx::nctaid() * kBlockThreads;
    bool is_outside = false, is_unordered = false;
#pragma unroll 1
    for (u64 start = ptx::ctaid() * kBlockThreads + ptx::tid() - lane; start <= args.updates; start += threads) {
        const u32 i = static_cast<u32>(start) + lane;
        u64 from = 0, end = 0;  // cells
        if (i <= args.updates) {
            const u64 before = i == 0 ? 0 : place_of(args, i - 1), place = i == args.updates ? 0 : place_of(args, i);
            from = i == 0 ? 0 : before / kCell + 1;
            end = i == args.updates ? cells + 1 : place / kCell + 1;
            is_outside |= i != args.updates && place / kCell >= cells;
            is_unordered |= i != 0 && i != args.updates && before >= place;
        }
        end = end < cells + 1 ? end : cells + 1;
        const u32 count = from < end ? static_cast<u32>(end - from) : 0, first = static_cast<u32>(from);
        // Long ranges are written by the whole warp.
        for (u32 j = 0; j < (count <= kOwnCells ? count : 0); ++j) ptx::st_global(args.first + first + j, i);
#pragma unroll 1
        for (u32 left = ptx::vote_sync_ballot(count > kOwnCells); left != 0; left &= left - 1) {
            const u32 owner = ptx::find_first_set(left) - 1;
            const u32 other = ptx::shfl_sync_idx(first, owner), number = ptx::shfl_sync_idx(count, owner);
            for (u32 j = lane; j < number; j += 32)
                ptx::st_global(args.first + other + j, static_cast<u32>(start) + owner);
        }
    }
    if (is_outside) ptx::st_global(args.faults, 1);
    if (is_unordered) ptx::st_global(args.faults + 1, 1);
}

// ---- count: exponents, words of the lists, digest, faults -----------------------------------------------------------

UW_DEVICE u64 warp_sum(u64 v) {
#pragma unroll
    for (u32 delta = 1; delta < 32; delta *= 2) {
        const u32 low = ptx::shfl_sync_bfly(static_cast<u32>(v), delta);
        v += low | static_cast<u64>(ptx::shfl_sync_bfly(static_cast<u32>(v >> 32), delta)) << 32;
    }
    return v;
}

// The share of a lane's 32 weights in the digest of the matrix. A change of one lane always changes the sum, because
// all factors are odd.
UW_DEVICE u64 digest_of(const Operands& weights, u32 block, u32 lane) {
    u32 sum = lane;
#pragma unroll
    for (u32 i = 0; i < 16; ++i) sum = sum * 0x9e3779b1u + weights.p[i];
    return (sum ^ sum >> 15) * ((2 * (static_cast<u64>(block) * 32 + lane) + 1) * 0x9e3779b97f4a7c15ull);
}

// Adds the words of a row block's list, and checks the operands of its escapes.
UW_DEVICE void count_escapes(const UpdateArgs& args, const Place& place, const Operands& weights) {
    const u32 mask = pack::escape_mask(pack::contain(weights, packed::pair_of_exponents(args.base)));
    if (ptx::vote_sync_ballot(mask != 0) == 0) return;
#if __CUDA_ARCH__ < 900
    // With any index, NVRTC copies the weights to local memory on these architectures.
#pragma unroll
    for (u32 element = 0; element < 32; ++element) {
        const u32 weight = element % 2 ? weights.p[element / 2] >> 16 : weights.p[element / 2] & 0xffff;
        if (mask >> element & 1 && pack::operand_of(args, weight) & packed::kInexact)
            ptx::red_max_global_u64(args.inexact, ~place.element(args, element));
    }
#else
#pragma unroll 1
    for (u32 left = mask; left != 0; left &= left - 1) {
        const u32 element = ptx::find_first_set(left) - 1;
        if (pack::operand_of(args, element_of(weights, element)) & packed::kInexact)
            ptx::red_max_global_u64(args.inexact, ~place.element(args, element));
    }
#endif
    const u32 count = pack::warp_sum(ptx::popc(mask));
    if (count > 1 && place.lane == 0) ptx::red_add_global(args.list_words, 1 + count);
}

UW_DEVICE void count(const UpdateArgs& args) {
    const u32 counts = ptx::cvta_to_shared(ptx::dynamic_smem()), thread = ptx::tid(), lane = thread % 32;
    const bool has_counts = args.histogram != nullptr;
    if (has_counts) {
        for (u32 at = thread * 16; at < kCountBytes; at += kBlockThreads * 16) ptx::st_shared_x4(counts + at, U32x4{});
        ptx::bar_sync();  // orders the zeros before the additions of every warp
    }
    // Counter (exponent, lane) is at exponent * 128 + lane * 4, as in encode_huffman/stats.cuh.
    const u32 column = counts + lane * 4;
    const u32 first = (ptx::ctaid() * kWarps + ptx::uniform_warp_index()) * kCountBlocks;
    u64 digest = 0;
#pragma unroll 1
    for (u32 block = first; block < first + kCountBlocks && block < row_block::count(args); ++block) {
        const Place place(args, block, lane);
        Operands weights = old_weights(args, block, lane);
        if (args.updates != 0) Updates(args, place).apply(args, lane, weights);
        digest += digest_of(weights, block, lane);
        if (!has_counts) continue;
#pragma unroll
        for (u32 i = 0; i < 16; ++i) {
            ptx::red_add_shared(column + (weights.p[i] & 0x7f80), 1);
            ptx::red_add_shared(column + (weights.p[i] >> 16 & 0x7f80), 1);
        }
        count_escapes(args, place, weights);
    }
    digest = warp_sum(digest);
    if (lane == 0) ptx::atom_add_global_u64(args.digest, digest);
    if (!has_counts) return;
    ptx::bar_sync();  // orders the additions of every warp before the sums over lanes
    u32 sum = 0;
    // Lanes start at different columns to read different banks.
#pragma unroll 4
    for (u32 i = 0; i < 32; ++i) sum += ptx::ld_shared(counts + thread * 128 + (thread + i) % 32 * 4);
    if (sum != 0) ptx::red_add_global(args.histogram + thread, sum);
}

// ---- tiles and lists ------------------------------------------------------------------------------------------------

UW_DEVICE void tiles(const UpdateArgs& args) {
    const u32 lane = ptx::tid() % 32, block = ptx::ctaid() * kWarps + ptx::uniform_warp_index();
    if (block >= row_block::count(args)) return;
    const Place place(args, block, lane);
    const Updates updates(args, place);
    // Other heads than those of lists stay.
    if (updates.total == 0 && (ptx::ld_global(args.old_heads + block) & packed::kListHead) == 0) return;
    Operands weights = old_weights(args, block, lane);
    updates.apply(args, lane, weights);
    Operands container = pack::contain(weights, packed::pair_of_exponents(args.base));
    pack::store_head(args, place, block, container, [&](u32 element) { return element_of(weights, element); });
    if (updates.total != 0) pack::store_container(args, place, block, container);
}

UW_DEVICE void lists(const UpdateArgs& args) {
    pack::lists(args, ptx::cvta_to_shared(ptx::dynamic_smem()), [&](const Place& place, u32 block) {
        Operands weights = old_weights(args, block, place.lane);
        Updates(args, place).apply(args, place.lane, weights);
        return weights;
    });
}

// ---- entry
template <class Config>
UW_DEVICE void run(const UpdateArgs& args) {
    if constexpr (Config::kStage == UpdateStage::kPlaces) {
        places(args);
    } else if constexpr (Config::kStage == UpdateStage::kCount) {
        count(args);
    } else if constexpr (Config::kStage == UpdateStage::kTiles) {
        tiles(args);
    } else {
        lists(args);
    }
}

}  // namespace uw::update
