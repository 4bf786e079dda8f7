// Stage rows: row lengths, bitmask, words and verbatim rows of each tile; see unweight/kernels/encode_huffman.cuh.
#pragma once

#include "unweight/kernels/encode_huffman/tiles.cuh"

namespace uw::encode_huffman {

template <bool kWide>
UW_DEVICE void rows_of(const EncodeHuffmanArgs& args) {
    constexpr u32 kBatch = kBatchOf<kWide>;
    // Code length of each exponent; outside the palette, a length with which no row can be coded.
    constexpr u32 kNoCode = 512;
    u32 table = ptx::cvta_to_shared(ptx::dynamic_smem());
    u32 thread = ptx::tid(), lane = thread % 32, segment = lane % 8, group = lane / 8;
    u32 own_entry = ptx::ld_global_nc(args.encode_table + thread);
    u32 own_length = own_entry >> 16 & 0xff;
    ptx::st_shared(table + 4 * thread, own_length != 0 ? own_length : kNoCode);
    u32 pad = pad_pair(args);
    ptx::bar_sync();  // orders the table before every warp's lookups

    u32 tiles = args.tile_rows * args.tile_cols, stride = ptx::nctaid() * kTileWarps;
    for (u32 tile = ptx::ctaid() * kTileWarps + thread / 32; tile < tiles; tile += stride) {
        TilePlace p = place(args, tile, lane);
        u32 kept[2] = {0, 0};  // bits of rows 4 * segment + group, and 32 more
#pragma unroll
        for (u32 batch = 0; batch < kSteps / kBatch; ++batch) {
            U32x4 v[kBatch];
#pragma unroll
            for (u32 i = 0; i < kBatch; ++i) v[i] = load_eight<kWide>(args, p, batch * kBatch + i, group, pad);
#pragma unroll
            for (u32 i = 0; i < kBatch; ++i) {
                u32 step = batch * kBatch + i;
                u32 bits = entry_low(table, v[i].x) + entry_high(table, v[i].x) + entry_low(table, v[i].y) +
                           entry_high(table, v[i].y) + entry_low(table, v[i].z) + entry_high(table, v[i].z) +
                           entry_low(table, v[i].w) + entry_high(table, v[i].w);
                bits += ptx::shfl_sync_bfly(bits, 1);
                bits += ptx::shfl_sync_bfly(bits, 2);
                bits += ptx::shfl_sync_bfly(bits, 4);
                kept[step / 8] = segment == step % 8 ? bits : kept[step / 8];
            }
        }
        // Transposes from (row 4s + g in lane 8g + s) to row l in lane l.
        u32 source = lane % 4 * 8 + lane / 4;
        u32 bits[2] = {ptx::shfl_sync_idx(kept[0], source), ptx::shfl_sync_idx(kept[1], source)};
        u32 mask[2], words = 0;
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            bool inside = half * 32 + lane < p.rows, coded = inside && bits[half] <= kRowBitsMax;
            mask[half] = ptx::vote_sync_ballot(inside && !coded);
            ptx::st_global_u8(args.row_lengths + static_cast<u64>(tile) * kTile + half * 32 + lane,
                              coded ? bits[half] - kRowBitsMin : 0);
            words += coded ? bits[half] : 0;
        }
#pragma unroll
        for (u32 delta = 1; delta < 32; delta *= 2) words += ptx::shfl_sync_bfly(words, delta);
        words = (words + 31) / 32;
        if (lane == 0) {
            u32 count = ptx::popc(mask[0]) + ptx::popc(mask[1]);
            ptx::st_global_x4(args.tile_metadata + tile, U32x4{words, count, mask[0], mask[1]});
        }
    }
}

UW_DEVICE void rows(const EncodeHuffmanArgs& args) {
    if (args.k % 8 == 0) {
        rows_of<true>(args);
    } else {
        rows_of<false>(args);
    }
}

}  // namespace uw::encode_huffman
