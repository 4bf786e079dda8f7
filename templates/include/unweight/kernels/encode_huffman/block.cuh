// Threads and shared memory of each stage; see unweight/kernels/encode_huffman.cuh.
#pragma once

#include "unweight/abi.cuh"
#include "unweight/axes.cuh"
#include "unweight/ptx/barrier.cuh"
#include "unweight/ptx/memory.cuh"

namespace uw::encode_huffman {

constexpr u32 kTile = 64;
constexpr u32 kRowBitsMin = 64;
constexpr u32 kRowBitsMax = 319;

constexpr u32 kStatsThreads = 512, kStatsSmemBytes = 256 * 32 * 4;
constexpr u32 kTableThreads = 256;
constexpr u32 kTileThreads = 256, kTileWarps = kTileThreads / 32;  // rows, write, palette
constexpr u32 kTileBufferWords = 640;                              // 64 * 319 bits = 638 words, to 16 bytes
constexpr u32 kScanThreads = 256, kScanTilesPerThread = 4;
constexpr u32 kScanTiles = kScanThreads * kScanTilesPerThread;

template <class Config>
constexpr u32 kThreads = Config::kStage == EncodeHuffmanStage::kStats   ? kStatsThreads
                         : Config::kStage == EncodeHuffmanStage::kTable ? kTableThreads
                         : Config::kStage == EncodeHuffmanStage::kScan  ? kScanThreads
                                                                        : kTileThreads;

// Offsets of the sections in dynamic shared memory, and their total.
template <class Config>
struct Smem {
    static constexpr u32 kHistogram = 0;      // stats: u32 [256][lane]
    static constexpr u32 kWork = 0;           // table, scan
    static constexpr u32 kExponentTable = 0;  // rows, write, palette: u32 [256]
    static constexpr u32 kTile = 1024;        // write: the words of each warp's tile
    static constexpr u32 kBytes = Config::kStage == EncodeHuffmanStage::kStats   ? kStatsSmemBytes
                                  : Config::kStage == EncodeHuffmanStage::kTable ? 4096
                                  : Config::kStage == EncodeHuffmanStage::kWrite
                                      ? kTile + kTileWarps * kTileBufferWords * 4
                                      : 1024;
};

UW_DEVICE u64 shuffle_u64(u64 v, u32 lane) {
    return static_cast<u64>(ptx::shfl_sync_idx(static_cast<u32>(v >> 32), lane)) << 32 |
           ptx::shfl_sync_idx(static_cast<u32>(v), lane);
}
UW_DEVICE u64 ld_shared_u64(u32 address) {
    U32x2 v = ptx::ld_shared_x2(address);
    return static_cast<u64>(v.y) << 32 | v.x;
}
UW_DEVICE void st_shared_u64(u32 address, u64 v) {
    ptx::st_shared_x2(address, {static_cast<u32>(v), static_cast<u32>(v >> 32)});
}

}  // namespace uw::encode_huffman
