// Encoding family (report section 4): BF16 matrix -> the sections of docs/format.md A.6, byte-identical to the CPU
// encoder.
//
// One function per stage (Config has EncodeHuffmanStage kStage; encode_huffman/<stage>.cuh), all with
// EncodeHuffmanArgs, run in this order on one stream:
//   Huffman tensor   stats, table, rows, scan, write
//   palette tensor   stats, table, rows, scan, palette
//
// stage         threads  blocks/SM  grid                       dynamic smem  reads + writes, bytes per element
// stats         512      4          min(tiles, 4 SMs)          32768         2 + 1
// table         256      1          1                          4096          -
// rows          256      4          min(tiles / 8, 4 SMs)      1024          2 + 0.016
// scan          256      1          ceil(tiles / 1024)         1024          16 B per tile, twice
// write         256      4          min(tiles / 8, 4 SMs)      21504         2 + 0.34
// palette       256      4          min(tiles / 8, 4 SMs)      1024          2 + 0.5
// write is bound by integer instructions (17 per element), stats and rows by device memory. Measurements: docs/records.
// (tiles / 8 rounded up; 4 SMs = 4 blocks per SM; any grid is correct except for scan.)
//
// Zeroed before: histogram (stats), scan_state (scan). scan_state: 4 u64 per block of scan.
// totals[3] becomes 1 if the coded words or the verbatim rows exceed the capacities (or 2^32 words); nothing is written
// past them. Matrices have any shape; if k is a multiple of 8, rows, write and palette use 16-byte loads.
//
// Source   report section 4. Changed: lane-private histogram columns instead of one histogram per block; parallel
//          package-merge instead of a tree (docs/format.md A.4); one warp owns a tile's words and assembles them in
//          shared memory, so the global bitstream needs no atomics; tiles start on words.
#pragma once

#include "unweight/kernels/encode_huffman/palette.cuh"
#include "unweight/kernels/encode_huffman/rows.cuh"
#include "unweight/kernels/encode_huffman/scan.cuh"
#include "unweight/kernels/encode_huffman/stats.cuh"
#include "unweight/kernels/encode_huffman/table.cuh"
#include "unweight/kernels/encode_huffman/write.cuh"

namespace uw::encode_huffman {

// Runs the stage that Config selects.
template <class Config>
UW_DEVICE void run(const EncodeHuffmanArgs& args) {
    if constexpr (Config::kStage == EncodeHuffmanStage::kStats) {
        stats(args);
    } else if constexpr (Config::kStage == EncodeHuffmanStage::kTable) {
        table(args);
    } else if constexpr (Config::kStage == EncodeHuffmanStage::kRows) {
        rows(args);
    } else if constexpr (Config::kStage == EncodeHuffmanStage::kScan) {
        scan(args);
    } else if constexpr (Config::kStage == EncodeHuffmanStage::kWrite) {
        write(args);
    } else {
        palette(args);
    }
}

}  // namespace uw::encode_huffman
