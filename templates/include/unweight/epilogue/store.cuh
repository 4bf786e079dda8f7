// Stores the accumulators of one warp (16 rows of a wgmma tile) to a row-major bf16 matrix.
//
// The fragment spreads a row over four lanes; the warp transposes it in its private piece of shared memory into 16-byte
// accesses that cover whole 128-byte lines. Rows at or past `rows` are neither read nor written. Only the calling warp
// takes part.
#pragma once

#include "unweight/ptx/memory.cuh"
#include "unweight/ptx/mma.cuh"

namespace uw::epilogue {

// Shared memory of one warp for kColumns columns, 128-byte aligned.
template <u32 kColumns>
constexpr u32 kStagingBytes = 16 * kColumns * 2;

// staging: [16 rows][kColumns] bf16, 16-byte chunk c of row r at chunk c ^ r%8, so neither stmatrix nor the row-wise
// accesses have bank conflicts. If several rows share 128 bytes, r counts 128-byte lines.
template <u32 kColumns>
UW_DEVICE u32 staging_offset(u32 row, u32 chunk) {
    static_assert(kColumns % 64 == 0 || kColumns == 32 || kColumns == 16,
                  "whole lines of 128 bytes, or whole rows in one");
    constexpr u32 kLineRows = kColumns < 64 ? 64 / kColumns : 1;
    return row * (kColumns * 2) + ((chunk ^ (row / kLineRows % (8 / kLineRows))) * 16);
}

// Calls `visit(staging address, row, chunk)` for every 16-byte chunk below `rows`, consecutive lanes on consecutive
// chunks.
template <u32 kColumns, class Visit>
UW_DEVICE void each_chunk(u32 staging, u32 rows, Visit visit) {
    constexpr u32 kRowChunks = kColumns / 8;
    const u32 lane = ptx::laneid();
#pragma unroll
    for (u32 i = 0; i < kRowChunks / 2; ++i) {
        const u32 piece = i * 32 + lane;
        const u32 row = piece / kRowChunks, chunk = piece % kRowChunks;
        if (row < rows) visit(staging + staging_offset<kColumns>(row, chunk), row, chunk);
    }
}

UW_DEVICE void add_pair(float& low, float& high, u32 pair) {
    low += ptx::float_from_bits(pair << 16);
    high += ptx::float_from_bits(pair & 0xffff0000u);
}

// y: address of the warp's first row and column; row_stride in elements; both are multiples of 16 bytes. rows: how many
// of the warp's 16 rows exist. kAdd: y += accumulators, in fp32, rounded once.
template <bool kAdd, u32 kRegisters>
UW_DEVICE void store_rows(float (&d)[kRegisters], u16* y, u64 row_stride, u32 rows, u32 staging) {
    constexpr u32 kColumns = kRegisters * 2;
    if (rows == 0) return;
    const u32 lane = ptx::laneid();
    // stmatrix: lane l addresses row l%8 (+8 for odd matrices) of the 16-column group's chunk l/16.
    const u32 matrix_row = lane % 8 + (lane / 8 % 2) * 8, matrix_chunk = lane / 16;

    if constexpr (kAdd) {
        each_chunk<kColumns>(staging, rows, [&](u32 address, u32 row, u32 chunk) {
            ptx::st_shared_x4(address, ptx::ld_global_x4(y + row * row_stride + chunk * 8));
        });
        ptx::bar_warp_sync();  // orders the lanes' stores of the old Y before the ldmatrix below
#pragma unroll
        for (u32 group = 0; group < kColumns / 16; ++group) {
            const U32x4 old =
                ptx::ldmatrix_x4(staging + staging_offset<kColumns>(matrix_row, group * 2 + matrix_chunk));
            add_pair(d[group * 8 + 0], d[group * 8 + 1], old.x);
            add_pair(d[group * 8 + 2], d[group * 8 + 3], old.y);
            add_pair(d[group * 8 + 4], d[group * 8 + 5], old.z);
            add_pair(d[group * 8 + 6], d[group * 8 + 7], old.w);
        }
        ptx::bar_warp_sync();  // orders every lane's ldmatrix before the stmatrix over the same bytes
    }
#pragma unroll
    for (u32 group = 0; group < kColumns / 16; ++group) {
        const U32x4 v{ptx::cvt_rn_bf16x2(d[group * 8 + 0], d[group * 8 + 1]),
                      ptx::cvt_rn_bf16x2(d[group * 8 + 2], d[group * 8 + 3]),
                      ptx::cvt_rn_bf16x2(d[group * 8 + 4], d[group * 8 + 5]),
                      ptx::cvt_rn_bf16x2(d[group * 8 + 6], d[group * 8 + 7])};
        ptx::stmatrix_x4(staging + staging_offset<kColumns>(matrix_row, group * 2 + matrix_chunk), v);
    }
    ptx::bar_warp_sync();  // orders the warp's stmatrix before the loads below
    each_chunk<kColumns>(staging, rows, [&](u32 address, u32 row, u32 chunk) {
        ptx::st_global_x4(y + row * row_stride + chunk * 8, ptx::ld_shared_x4(address));
    });
}

}  // namespace uw::epilogue
