// Row blocks of a bf16 matrix [n, k] as the 16 registers of a tile's A operands (encoding/packed.cuh).
//
// Lane 4g + t moves 16 bytes of rows g and g + 8 at columns 8t and 32 + 8t, which are whole sectors; a 4 x 4 transpose
// within the quad then moves each word to its lane. `Args` has weights, k and tile_cols.
#pragma once

#include "unweight/encoding/packed.cuh"
#include "unweight/ptx/memory.cuh"

namespace uw::row_block {

using packed::Operands;

// Number of row blocks of the matrix; `Args` also has tile_rows.
template <class Args>
UW_DEVICE u32 count(const Args& args) {
    return args.tile_rows * args.tile_cols * packed::kTileBlocks;
}

// Position of a row block in the matrix; lane 4g + t takes rows `row` = g and g + 8.
struct Place {
    u32 row, column, lane;

    template <class Args>
    UW_DEVICE Place(const Args& args, u32 block, u32 lane_) : lane(lane_) {
        const u32 tile = block / packed::kTileBlocks, tile_row = tile / args.tile_cols;
        row = tile_row * packed::kTile + block % packed::kTileBlocks * packed::kBlockRows + lane / 4;
        column = (tile - tile_row * args.tile_cols) * packed::kTile;
    }

    // Piece i of a lane: 8 adjacent elements of a row, as they are moved.
    template <class Args>
    UW_DEVICE u16* piece(const Args& args, u32 i) const {
        return args.weights + static_cast<u64>(row + i % 2 * 8) * args.k + column + i / 2 * 32 + lane % 4 * 8;
    }

    // Element 2 * register + half of a lane, in the order of the operands.
    template <class Args>
    UW_DEVICE u64 element(const Args& args, u32 e) const {
        return static_cast<u64>(row + e / 2 % 2 * 8) * args.k + column + e / 8 * 16 + e / 4 % 2 * 8 + lane % 4 * 2 +
               e % 2;
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
            const u32 other = ptx::shfl_sync_bfly(upper ? v[i] : v[j], distance);
            v[i] = upper ? other : v[i];
            v[j] = upper ? v[j] : other;
        }
    }
}

// Register (encoding/packed.cuh) of word j of the i-th pieces of a quad.
UW_DEVICE constexpr u32 register_of(u32 i, u32 j) { return 4 * (i / 2 * 2 + j / 2) + 2 * (j % 2) + i % 2; }

template <class Args>
UW_DEVICE Operands load(const Args& args, const Place& place) {
    U32x4 pieces[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) pieces[i] = ptx::ld_global_nc_x4(place.piece(args, i));
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

template <class Args>
UW_DEVICE void store(const Args& args, const Place& place, const Operands& weights) {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        u32 v[4];
#pragma unroll
        for (u32 j = 0; j < 4; ++j) v[j] = weights.p[register_of(i, j)];
        transpose(v, place.lane);
        ptx::st_global_x4(place.piece(args, i), U32x4{v[0], v[1], v[2], v[3]});
    }
}

}  // namespace uw::row_block
