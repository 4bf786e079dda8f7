// Shared by the stages rows, write and palette, which use one warp per tile; see unweight/kernels/encode_huffman.cuh.
#pragma once

#include "unweight/kernels/encode_huffman/block.cuh"

namespace uw::encode_huffman {

// A step handles 4 rows: lane -> row 4 * step + lane / 8, columns lane % 8 * 8 and the 7 after them.

constexpr u32 kSteps = 16;
// Steps whose loads are in flight together; element-wise loads need the registers themselves.
template <bool kWide>
constexpr u32 kBatchOf = kWide ? 4 : 1;

struct TilePlace {
    u32 rows;           // rows of the matrix in the tile
    u32 valid;          // number of a lane's columns inside the matrix, 0..8
    const u16* source;  // the lane's first element in step 0
};

UW_DEVICE TilePlace place(const EncodeHuffmanArgs& args, u32 tile, u32 lane) {
    u32 tile_row = tile / args.tile_cols, row = tile_row * kTile, left = args.n - row;
    u32 column = (tile - tile_row * args.tile_cols) * kTile + lane % 8 * 8;
    u32 inside = column < args.k ? args.k - column : 0;
    return {left < kTile ? left : kTile, inside < 8 ? inside : 8,
            args.weights + static_cast<u64>(row + lane / 8) * args.k + column};
}

// Eight elements of one row, two per word; pad columns hold the exponent of palette entry 0, as A.5 codes them.
// kWide: k is a multiple of 8, so that eight elements are aligned and wholly inside or outside.
template <bool kWide>
UW_DEVICE U32x4 load_eight(const EncodeHuffmanArgs& args, const TilePlace& p, u32 step, u32 group, u32 pad) {
    U32x4 v = {pad, pad, pad, pad};
    if (step * 4 + group >= p.rows) return v;
    const u16* source = p.source + static_cast<u64>(step * 4) * args.k;
    if constexpr (kWide) {
        if (p.valid != 0) v = ptx::ld_global_nc_x4(source);
    } else {
        u32 words[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            u32 low = 2 * i < p.valid ? ptx::ld_global_nc_u16(source + 2 * i) : pad & 0xffff;
            u32 high = 2 * i + 1 < p.valid ? ptx::ld_global_nc_u16(source + 2 * i + 1) : pad >> 16;
            words[i] = low | high << 16;
        }
        v = {words[0], words[1], words[2], words[3]};
    }
    return v;
}

UW_DEVICE u32 pad_pair(const EncodeHuffmanArgs& args) {
    u32 exponent = ptx::ld_global_nc_u8(args.palette);
    return exponent << 7 | exponent << 23;
}

// Table entry of the exponent in the low or the high half of a pair. Exponents of trained weights are close together,
// so the lanes of a warp read different banks or the same word.
UW_DEVICE u32 entry_low(u32 table, u32 pair) { return ptx::ld_shared(table + (pair >> 5 & 0x3fc)); }
UW_DEVICE u32 entry_high(u32 table, u32 pair) { return ptx::ld_shared(table + (pair >> 21 & 0x3fc)); }

// Exponent bytes of eight elements; pad columns 0.
UW_DEVICE U32x2 exponent_bytes(const TilePlace& p, const U32x4& v) {
    u32 low = ptx::prmt(v.x >> 7, v.y >> 7, 0x6420), high = ptx::prmt(v.z >> 7, v.w >> 7, 0x6420);
    if (p.valid < 4) low &= (1u << p.valid * 8) - 1;
    if (p.valid < 8) high &= p.valid > 4 ? (1u << (p.valid - 4) * 8) - 1 : 0;
    return {low, high};
}

// Number of verbatim rows before row r.
UW_DEVICE u32 rows_before(const TileMetadata& m, u32 row) {
    u32 low = row >= 32 ? ~0u : (1u << row) - 1, high = row >= 32 ? (1u << (row - 32)) - 1 : 0;
    return ptx::popc(m.verbatim_low & low) + ptx::popc(m.verbatim_high & high);
}
UW_DEVICE bool is_verbatim(const TileMetadata& m, u32 row) {
    return (row >= 32 ? m.verbatim_high : m.verbatim_low) >> row % 32 & 1;
}

UW_DEVICE TileMetadata load_metadata(const EncodeHuffmanArgs& args, u32 tile) {
    U32x4 v = ptx::ld_global_x4(args.tile_metadata + tile);
    return {v.x, v.y, v.z, v.w};
}

// Returns false and records the fault if a tile's verbatim rows do not fit.
UW_DEVICE bool rows_fit(const EncodeHuffmanArgs& args, const TileMetadata& m, u32 lane) {
    u32 count = ptx::popc(m.verbatim_low) + ptx::popc(m.verbatim_high);
    bool fits = static_cast<u64>(m.verbatim_row_offset) + count <= args.capacity_rows;
    if (!fits && lane == 0) ptx::red_max_global_u64(args.totals + 3, 1);
    return fits;
}

UW_DEVICE void store_verbatim(const EncodeHuffmanArgs& args, const TilePlace& p, const TileMetadata& m, u32 row,
                              u32 segment, const U32x4& v) {
    u64 at = static_cast<u64>(m.verbatim_row_offset) + rows_before(m, row);
    ptx::st_global_x2(args.verbatim_exponents + at * kTile + segment * 8, exponent_bytes(p, v));
}

}  // namespace uw::encode_huffman
