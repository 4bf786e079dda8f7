// Stage stats: writes sign_mantissa (unless it is null) and counts each exponent; see
// unweight/kernels/encode_huffman.cuh.
#pragma once

#include "unweight/kernels/encode_huffman/block.cuh"

namespace uw::encode_huffman {

// One increment per element. Counter (exponent, lane) is at exponent * 128 + lane * 4: each lane has its own bank, and
// only different warps of the block contend for a counter. exponent * 128 is the element's bits 7..14.
UW_DEVICE void count_pair(u32 column, u32 pair) {
    ptx::red_add_shared(column + (pair & 0x7f80), 1);
    ptx::red_add_shared(column + (pair >> 16 & 0x7f80), 1);
}

// Four sign-mantissa bytes of two words.
UW_DEVICE u32 sign_mantissa_of(u32 a, u32 b) {
    return ptx::bit_select(0x80808080, ptx::prmt(a, b, 0x7531), ptx::prmt(a, b, 0x6420));
}

UW_DEVICE void stats(const EncodeHuffmanArgs& args) {
    u32 smem = ptx::cvta_to_shared(ptx::dynamic_smem());
    u32 thread = ptx::tid(), lane = thread % 32;
    for (u32 at = thread * 16; at < kStatsSmemBytes; at += kStatsThreads * 16) ptx::st_shared_x4(smem + at, U32x4{});
    ptx::bar_sync();  // orders the cleared counters before every warp's additions

    // A warp takes chunks of 512 elements: two 16-byte loads and two 8-byte stores per lane, each warp-wide access
    // contiguous.
    u64 elements = static_cast<u64>(args.n) * args.k, chunks = elements / 512;
    u64 warps = static_cast<u64>(ptx::nctaid()) * (kStatsThreads / 32);
    u64 warp = static_cast<u64>(ptx::ctaid()) * (kStatsThreads / 32) + thread / 32;
    u32 column = smem + lane * 4;
#pragma unroll 1
    for (u64 chunk = warp; chunk < chunks; chunk += warps) {
        u64 at = chunk * 512 + lane * 8;
        U32x4 a = ptx::ld_global_nc_x4(args.weights + at), b = ptx::ld_global_nc_x4(args.weights + at + 256);
        if (args.sign_mantissa != nullptr) {
            ptx::st_global_x2(args.sign_mantissa + at, {sign_mantissa_of(a.x, a.y), sign_mantissa_of(a.z, a.w)});
            ptx::st_global_x2(args.sign_mantissa + at + 256, {sign_mantissa_of(b.x, b.y), sign_mantissa_of(b.z, b.w)});
        }
        count_pair(column, a.x);
        count_pair(column, a.y);
        count_pair(column, a.z);
        count_pair(column, a.w);
        count_pair(column, b.x);
        count_pair(column, b.y);
        count_pair(column, b.z);
        count_pair(column, b.w);
    }
#pragma unroll 1
    for (u64 i = chunks * 512 + warp * 32 + lane; i < elements; i += warps * 32) {
        u32 x = ptx::ld_global_nc_u16(args.weights + i);
        if (args.sign_mantissa != nullptr) ptx::st_global_u8(args.sign_mantissa + i, (x >> 8 & 0x80) | (x & 0x7f));
        ptx::red_add_shared(column + (x & 0x7f80), 1);
    }
    ptx::bar_sync();  // orders every warp's additions before the sums over columns
    for (u32 exponent = thread; exponent < 256; exponent += kStatsThreads) {
        u32 count = 0;
        // Lanes start at different columns to read different banks.
#pragma unroll 4
        for (u32 i = 0; i < 32; ++i) count += ptx::ld_shared(smem + exponent * 128 + (exponent + i) % 32 * 4);
        if (count != 0) ptx::red_add_global(args.histogram + exponent, count);
    }
}

}  // namespace uw::encode_huffman
