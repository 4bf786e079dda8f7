// Typed views of shared memory: an address and the map from (row, 16-byte chunk) to bytes. No storage, no
// synchronization.
//
//   Bf16Tile<R>   R rows of 64 bf16 = 128 bytes, in the 128-byte swizzle that TMA writes and wgmma reads:
//                 chunk c of row r is at r*128 + ((c ^ r%8) * 16). 1024-byte aligned.
//   Bf16HalfTile<R>  R rows of 32 bf16 = 64 bytes, in the 64-byte swizzle that TMA reads: chunk c of row r is at
//                 r*64 + ((c ^ r/2%4) * 16), so that 8 rows of a chunk hit all banks. 512-byte aligned.
//   ByteTile<B>   rows of B bytes, dense.
#pragma once

#include "unweight/ptx/types.cuh"

namespace uw::smem {

constexpr u32 kChunkBytes = 16;
constexpr u32 kSwizzleBytes = 128;
constexpr u32 kSwizzlePeriodBytes = 1024;

template <u32 kRows>
struct Bf16Tile {
    static constexpr u32 kBytes = kRows * kSwizzleBytes;
    u32 address;

    UW_DEVICE static u32 offset(u32 row, u32 chunk) {
        return row * kSwizzleBytes + ((chunk ^ (row % 8)) * kChunkBytes);
    }
    UW_DEVICE u32 chunk(u32 row, u32 chunk) const { return address + offset(row, chunk); }
};

template <u32 kRows>
struct Bf16HalfTile {
    static constexpr u32 kRowBytes = kSwizzleBytes / 2;

    UW_DEVICE static u32 offset(u32 row, u32 chunk) {
        return row * kRowBytes + ((chunk ^ (row / 2 % 4)) * kChunkBytes);
    }
};

template <u32 kRowBytes>
struct ByteTile {
    u32 address;

    UW_DEVICE u32 at(u32 row, u32 byte) const { return address + row * kRowBytes + byte; }
};

}  // namespace uw::smem
