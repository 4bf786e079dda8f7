// Stage table: palette, code lengths and encode table; see unweight/kernels/encode_huffman.cuh.
#pragma once

#include "unweight/encoding/huffman/canonical.cuh"
#include "unweight/kernels/encode_huffman/block.cuh"

namespace uw::encode_huffman {

// Optimal code lengths under `limit` (package-merge, Larmore and Hirschberg 1990), by one warp. Lane a < m holds the
// weight of leaf a, lightest first; the result is that leaf's length. m >= 2.
//
// A round merges the leaves with the packages of the round before; a leaf precedes a package of the same weight. The
// place of an item is its rank in its own list plus the number of items of the other list that precede it. A round
// stores one bit per place: leaf or package. `scratch`: 256 B merged weights, 128 B flags, 64 B rounds.
UW_DEVICE u32 package_merge(u64 leaf, u32 m, u32 limit, u32 lane, u32 scratch) {
    u32 merged = scratch, flags = scratch + 256, rounds = scratch + 384;
    u64 package = 0;
    u32 packages = 0;
#pragma unroll 1
    for (u32 round = 0; round < limit; ++round) {
        u32 leaf_place = lane, package_place = lane;
#pragma unroll
        for (u32 i = 0; i < 16; ++i) {
            u64 other_leaf = shuffle_u64(leaf, i), other_package = shuffle_u64(package, i);
            leaf_place += i < packages && other_package < leaf;
            package_place += i < m && other_leaf <= package;
        }
        if (lane < m) {
            st_shared_u64(merged + leaf_place * 8, leaf);
            ptx::st_shared(flags + leaf_place * 4, 1);
        }
        if (lane < packages) {
            st_shared_u64(merged + package_place * 8, package);
            ptx::st_shared(flags + package_place * 4, 0);
        }
        ptx::bar_warp_sync();      // orders the merged items and flags before the loads of other lanes
        u32 items = m + packages;  // 31 at most
        u32 is_leaf = ptx::vote_sync_ballot(lane < items && ptx::ld_shared(flags + lane * 4) != 0);
        if (lane == 0) ptx::st_shared(rounds + round * 4, is_leaf);
        packages = items / 2;
        package = lane < packages ? ld_shared_u64(merged + lane * 16) + ld_shared_u64(merged + lane * 16 + 8) : 0;
        ptx::bar_warp_sync();  // orders the loads before the next round's stores, and `rounds` before its loads
    }
    // 2m - 2 items of the last round are chosen; a chosen package represents two items of the round before.
    u32 chosen = 2 * m - 2, length = 0;
    for (u32 round = limit; round-- > 0;) {
        u32 leaves = ptx::popc(ptx::ld_shared(rounds + round * 4) & ((1u << chosen) - 1));
        length += lane < leaves;
        chosen = 2 * (chosen - leaves);
    }
    return length;
}

UW_DEVICE void table(const EncodeHuffmanArgs& args) {
    // counts 1024 B | exponents of the palette 64 B | their counts 64 B | scratch
    u32 smem = ptx::cvta_to_shared(ptx::dynamic_smem());
    u32 counts = smem, exponents = smem + 1024, weights = smem + 1088, scratch = smem + 1152;
    u32 thread = ptx::tid();
    u32 count = ptx::ld_global(args.histogram + thread);
    ptx::st_shared(counts + 4 * thread, count);
    if (thread < 16) {
        ptx::st_shared(exponents + 4 * thread, 0);
        ptx::st_shared(weights + 4 * thread, 0);
    }
    ptx::st_global(args.encode_table + thread, 0);
    ptx::bar_sync();  // orders the counts, and the cleared encode table, before what other threads read and write
    // Most frequent first; among equals, the smaller exponent.
    u32 rank = 0;
    for (u32 i = 0; i < 256; i += 4) {
        U32x4 c = ptx::ld_shared_x4(counts + 4 * i);
        rank += c.x > count || (c.x == count && i < thread);
        rank += c.y > count || (c.y == count && i + 1 < thread);
        rank += c.z > count || (c.z == count && i + 2 < thread);
        rank += c.w > count || (c.w == count && i + 3 < thread);
    }
    if (count > 0 && rank < 16) {
        ptx::st_shared(exponents + 4 * rank, thread);
        ptx::st_shared(weights + 4 * rank, count);
    }
    ptx::bar_sync();  // orders the palette before the first warp's loads
    if (thread >= 32) return;

    u32 lane = thread;
    u32 own_weight = lane < 16 ? ptx::ld_shared(weights + 4 * lane) : 0;
    u32 own_exponent = lane < 16 ? ptx::ld_shared(exponents + 4 * lane) : 0;
    u32 m = ptx::popc(ptx::vote_sync_ballot(own_weight != 0));
    u32 limit = args.code_limit < 15 ? args.code_limit : 15;
    // Leaf a, lightest first, is palette entry m - 1 - a.
    u32 mirrored = lane < m ? m - 1 - lane : lane;
    u32 leaf_weight = ptx::shfl_sync_idx(own_weight, mirrored);
    u32 length = m >= 2 ? package_merge(leaf_weight, m, limit, lane, scratch) : 1;
    length = ptx::shfl_sync_idx(length, mirrored);
    length = lane < m ? length : 0;
    u32 code = canonical_code(length, lane);
    if (lane < 16) {
        ptx::st_global_u8(args.palette + lane, own_exponent);
        ptx::st_global_u8(args.code_lengths + lane, length);
    }
    if (lane < m) ptx::st_global(args.encode_table + own_exponent, code | length << 16 | lane << 24);
}

}  // namespace uw::encode_huffman
