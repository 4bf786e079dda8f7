// Stage scan: turns the word and row counts of the tiles into offsets; see unweight/kernels/encode_huffman.cuh.
#pragma once

#include "unweight/kernels/encode_huffman/block.cuh"

namespace uw::encode_huffman {

// One pass: a block publishes the sums of its tiles and adds up those of all preceding blocks, one block per thread.
// Blocks are numbered by tickets, so those that a block waits for are already running. Its 4 words of scan_state:
//                         [0] its sums: words (24 bits) | verbatim rows << 24 | most rows of a tile << 44 | 1 << 63
//                         [1] of block 0: the ticket counter
// Word 0 contains its own flag. (Decoupled look-back, as in Merrill and Garland 2016, would make a chain of round trips
// to L2.)

UW_DEVICE void scan(const EncodeHuffmanArgs& args) {
    u32 smem = ptx::cvta_to_shared(ptx::dynamic_smem());  // 8 warps x {words, rows, most}, then the ticket
    u32 shared_ticket = smem + 256;
    u32 thread = ptx::tid(), lane = thread % 32, warp = thread / 32;
    if (thread == 0) ptx::st_shared(shared_ticket, static_cast<u32>(ptx::atom_add_global_u64(args.scan_state + 1, 1)));
    ptx::bar_sync();  // orders the ticket before every thread's load
    u32 block = ptx::ld_shared(shared_ticket);
    u32 tiles = args.tile_rows * args.tile_cols, blocks = (tiles + kScanTiles - 1) / kScanTiles;
    if (block >= blocks) return;

    u32 first = block * kScanTiles + thread * kScanTilesPerThread;
    U32x4 m[kScanTilesPerThread];
    u32 words = 0, rows = 0, most = 0;
#pragma unroll
    for (u32 i = 0; i < kScanTilesPerThread; ++i) {
        m[i] = {};
        if (first + i < tiles) m[i] = ptx::ld_global_x4(args.tile_metadata + first + i);
        words += m[i].x;
        rows += m[i].y;
        most = m[i].y > most ? m[i].y : most;
    }
    u32 words_sum = words, rows_sum = rows;
#pragma unroll
    for (u32 delta = 1; delta < 32; delta *= 2) {
        u32 w = ptx::shfl_sync_up(words_sum, delta), r = ptx::shfl_sync_up(rows_sum, delta),
            x = ptx::shfl_sync_bfly(most, delta);
        words_sum += lane >= delta ? w : 0;
        rows_sum += lane >= delta ? r : 0;
        most = x > most ? x : most;
    }
    if (lane == 31) ptx::st_shared_x4(smem + warp * 16, U32x4{words_sum, rows_sum, most, 0});
    ptx::bar_sync();  // orders the warps' sums before every thread's loads
    u32 words_before = words_sum - words, rows_before = rows_sum - rows, block_words = 0, block_rows = 0,
        block_most = 0;
    for (u32 i = 0; i < kScanThreads / 32; ++i) {
        U32x4 t = ptx::ld_shared_x4(smem + i * 16);
        words_before += i < warp ? t.x : 0;
        rows_before += i < warp ? t.y : 0;
        block_words += t.x;
        block_rows += t.y;
        block_most = t.z > block_most ? t.z : block_most;
    }
    if (thread == 0) {
        ptx::st_release_global_u64(
            args.scan_state + static_cast<u64>(block) * 4,
            block_words | static_cast<u64>(block_rows) << 24 | static_cast<u64>(block_most) << 44 | 1ull << 63);
    }
    u64 words_total = 0, rows_total = 0;
    u32 most_total = 0;
#pragma unroll 1
    for (u32 other = thread; other < block; other += kScanThreads) {
        u64 own = 0;
        do { own = ptx::ld_acquire_global_u64(args.scan_state + static_cast<u64>(other) * 4); } while (own == 0);
        words_total += own & 0xffffff;
        rows_total += own >> 24 & 0xfffff;
        u32 other_most = static_cast<u32>(own >> 44) & 0x7f;
        most_total = other_most > most_total ? other_most : most_total;
    }
#pragma unroll
    for (u32 delta = 1; delta < 32; delta *= 2) {
        words_total += shuffle_u64(words_total, lane ^ delta);
        rows_total += shuffle_u64(rows_total, lane ^ delta);
        u32 x = ptx::shfl_sync_bfly(most_total, delta);
        most_total = x > most_total ? x : most_total;
    }
    u32 before = smem + 512;  // 8 warps x {words, rows, most}
    if (lane == 0) {
        st_shared_u64(before + warp * 24, words_total);
        st_shared_u64(before + warp * 24 + 8, rows_total);
        st_shared_u64(before + warp * 24 + 16, most_total);
    }
    ptx::bar_sync();  // orders the warps' sums before every thread's loads
    words_total = rows_total = 0;
    for (u32 i = 0; i < kScanThreads / 32; ++i) {
        words_total += ld_shared_u64(before + i * 24);
        rows_total += ld_shared_u64(before + i * 24 + 8);
        u32 x = static_cast<u32>(ld_shared_u64(before + i * 24 + 16));
        block_most = x > block_most ? x : block_most;
    }
    if (thread == 0 && block == blocks - 1) {
        u64 all_words = words_total + block_words, all_rows = rows_total + block_rows;
        args.totals[0] = all_words;
        args.totals[1] = all_rows;
        args.totals[2] = block_most;
        args.totals[3] = all_words > args.capacity_words || all_words > 1ull << 32 || all_rows > args.capacity_rows;
    }
    u32 word = static_cast<u32>(words_total) + words_before;
    u32 row = static_cast<u32>(rows_total) + rows_before;
#pragma unroll
    for (u32 i = 0; i < kScanTilesPerThread; ++i) {
        if (first + i < tiles) ptx::st_global_x4(args.tile_metadata + first + i, U32x4{word, row, m[i].z, m[i].w});
        word += m[i].x;
        row += m[i].y;
    }
}

}  // namespace uw::encode_huffman
