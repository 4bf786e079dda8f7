// Stage palette: packed indices and verbatim rows; see unweight/kernels/encode_huffman.cuh.
#pragma once

#include "unweight/kernels/encode_huffman/tiles.cuh"

namespace uw::encode_huffman {

// Also sets start_word to 0 (docs/format.md A.7), so a metadata array is valid for one encoding only.
template <bool kWide>
UW_DEVICE void palette_of(const EncodeHuffmanArgs& args) {
    constexpr u32 kBatch = kBatchOf<kWide>;
    u32 table = ptx::cvta_to_shared(ptx::dynamic_smem());
    u32 thread = ptx::tid(), lane = thread % 32, segment = lane % 8, group = lane / 8;
    ptx::st_shared(table + 4 * thread, ptx::ld_global_nc(args.encode_table + thread) >> 24);
    u32 pad = pad_pair(args);
    ptx::bar_sync();  // orders the table before every warp's lookups

    u32 tiles = args.tile_rows * args.tile_cols, stride = ptx::nctaid() * kTileWarps;
    for (u32 tile = ptx::ctaid() * kTileWarps + thread / 32; tile < tiles; tile += stride) {
        TilePlace p = place(args, tile, lane);
        TileMetadata m = load_metadata(args, tile);
        bool rows_ok = rows_fit(args, m, lane);
        u8* out = args.palette_index + static_cast<u64>(tile) * kTile * 32;
#pragma unroll 1
        for (u32 batch = 0; batch < kSteps / kBatch; ++batch) {
            U32x4 v[kBatch];
#pragma unroll
            for (u32 i = 0; i < kBatch; ++i) v[i] = load_eight<kWide>(args, p, batch * kBatch + i, group, pad);
#pragma unroll
            for (u32 i = 0; i < kBatch; ++i) {
                u32 row = (batch * kBatch + i) * 4 + group;
                u32 packed = entry_low(table, v[i].x) | entry_high(table, v[i].x) << 4 | entry_low(table, v[i].y) << 8 |
                             entry_high(table, v[i].y) << 12 | entry_low(table, v[i].z) << 16 |
                             entry_high(table, v[i].z) << 20 | entry_low(table, v[i].w) << 24 |
                             entry_high(table, v[i].w) << 28;
                bool verbatim = is_verbatim(m, row);
                if (verbatim && rows_ok) store_verbatim(args, p, m, row, segment, v[i]);
                ptx::st_global(out + row * 32 + segment * 4, verbatim || row >= p.rows ? 0 : packed);
            }
        }
        ptx::bar_warp_sync();  // orders the loads of the record, in global memory, before the store below
        if (lane == 0) ptx::st_global(args.tile_metadata + tile, 0);
    }
}

UW_DEVICE void palette(const EncodeHuffmanArgs& args) {
    if (args.k % 8 == 0) {
        palette_of<true>(args);
    } else {
        palette_of<false>(args);
    }
}

}  // namespace uw::encode_huffman
