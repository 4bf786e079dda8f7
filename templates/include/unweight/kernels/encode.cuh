// Encoding family (report section 4): BF16 matrix -> the sections of docs/format.md A.6, byte for byte those of the CPU
// encoder.
//
// One function per stage, all of EncodeArgs, run in this order on one stream:
//   Huffman tensor   stats, table, rows, scan, write
//   palette tensor   stats, table, rows, scan, palette
//
// stage         threads  blocks/SM  grid                       dynamic smem  reads + writes, bytes per element
// stats         512      4          min(tiles, 4 SMs)          32768         2 + 1
// table         256      1          1                          4096          -
// rows          256      4          min(tiles / 8, 4 SMs)      1024          2 + 0.016
// scan          256      1          ceil(tiles / 1024)         1024          16 B a tile, twice
// write         256      4          min(tiles / 8, 4 SMs)      21504         2 + 0.34
// palette       256      4          min(tiles / 8, 4 SMs)      1024          2 + 0.5
// write is bound by integer instructions (17 per element), stats and rows by device memory. Figures: docs/records.
// (tiles / 8 rounded up; 4 SMs = 4 blocks on each multiprocessor; any grid is right except for scan.)
//
// Zeroed before: histogram (stats), scan_state (scan). scan_state: 4 u64 per block of scan.
// totals[3] becomes 1 if the coded words or the verbatim rows exceed the capacities (or 2^32 words); nothing is written
// past them. Matrices are of any shape; k a multiple of 8 takes 16-byte loads in rows, write and palette.
//
// Source   report section 4. Changed: lane-private histogram columns instead of one histogram per block; parallel
//          package-merge
//          instead of a tree (docs/format.md A.4); a tile's words belong to one warp, which assembles them in shared
//          memory, so that the global bitstream needs no atomics; tiles start on words.
#pragma once

#include "unweight/abi.cuh"
#include "unweight/axes.cuh"
#include "unweight/form/huffman/canonical.cuh"
#include "unweight/ptx/barrier.cuh"
#include "unweight/ptx/memory.cuh"

namespace uw::encode {

constexpr u32 kTile = 64;
constexpr u32 kRowBitsMin = 64;
constexpr u32 kRowBitsMax = 319;

constexpr u32 kStatsThreads = 512, kStatsSmemBytes = 256 * 32 * 4;
constexpr u32 kTableThreads = 256;
constexpr u32 kTileThreads = 256, kTileWarps = kTileThreads / 32;  // rows, write, palette
constexpr u32 kTileBufferWords = 640;  // 64 * 319 bits = 638 words, to 16 bytes
constexpr u32 kScanThreads = 256, kScanTilesPerThread = 4;
constexpr u32 kScanTiles = kScanThreads * kScanTilesPerThread;

template <class Config>
constexpr u32 kThreads = Config::kStage == EncodeStage::kStats ? kStatsThreads : Config::kStage == EncodeStage::kTable ? kTableThreads : Config::kStage == EncodeStage::kScan ? kScanThreads : kTileThreads;

// Offsets of the sections in dynamic shared memory, and their sum.
template <class Config>
struct Smem {
    static constexpr u32 kHistogram = 0;      // stats: u32 [256][lane]
    static constexpr u32 kWork = 0;           // table, scan
    static constexpr u32 kExponentTable = 0;  // rows, write, palette: u32 [256]
    static constexpr u32 kTile = 1024;        // write: the words of each warp's tile
    static constexpr u32 kBytes = Config::kStage == EncodeStage::kStats   ? kStatsSmemBytes
                                  : Config::kStage == EncodeStage::kTable ? 4096
                                  : Config::kStage == EncodeStage::kWrite ? kTile + kTileWarps * kTileBufferWords * 4
                                                                          : 1024;
};

// ---- stats: sign_mantissa (unless that is null), and how often each exponent occurs ---------------------------------

// One increment per element. Counter (exponent, lane) stands at exponent * 128 + lane * 4: each lane has its own bank,
// and only warps of the block meet in a counter. exponent * 128 is what the element's own bits 7..14 say.
UW_DEVICE void count_pair(u32 column, u32 pair) {
    ptx::red_add_shared(column + (pair & 0x7f80), 1);
    ptx::red_add_shared(column + (pair >> 16 & 0x7f80), 1);
}

// Four sign-mantissa bytes of two words.
UW_DEVICE u32 sign_mantissa_of(u32 a, u32 b) { return ptx::bit_select(0x80808080, ptx::prmt(a, b, 0x7531), ptx::prmt(a, b, 0x6420)); }

UW_DEVICE void stats(const EncodeArgs& args) {
    u32 smem = ptx::smem_address(ptx::dynamic_smem());
    u32 thread = ptx::thread_index(), lane = thread % 32;
    for (u32 at = thread * 16; at < kStatsSmemBytes; at += kStatsThreads * 16) ptx::st_shared_x4(smem + at, U32x4{});
    ptx::sync_block();

    // A warp takes chunks of 512 elements: two loads of 16 bytes and two stores of 8 bytes a lane, each warp-wide
    // access contiguous.
    u64 elements = static_cast<u64>(args.n) * args.k, chunks = elements / 512;
    u64 warps = static_cast<u64>(ptx::grid_size()) * (kStatsThreads / 32);
    u64 warp = static_cast<u64>(ptx::block_index()) * (kStatsThreads / 32) + thread / 32;
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
    ptx::sync_block();
    for (u32 exponent = thread; exponent < 256; exponent += kStatsThreads) {
        u32 count = 0;
        // Starting at a different column each, the lanes read different banks.
#pragma unroll 4
        for (u32 i = 0; i < 32; ++i) count += ptx::ld_shared(smem + exponent * 128 + (exponent + i) % 32 * 4);
        if (count != 0) ptx::red_add_global(args.histogram + exponent, count);
    }
}

// ---- table: palette, code lengths, encode table ---------------------------------------------------------------------

UW_DEVICE u64 shuffle_u64(u64 v, u32 lane) {
    return static_cast<u64>(ptx::shuffle(static_cast<u32>(v >> 32), lane)) << 32 | ptx::shuffle(static_cast<u32>(v), lane);
}
UW_DEVICE u64 ld_shared_u64(u32 address) {
    U32x2 v = ptx::ld_shared_x2(address);
    return static_cast<u64>(v.y) << 32 | v.x;
}
UW_DEVICE void st_shared_u64(u32 address, u64 v) {
    ptx::st_shared_x2(address, {static_cast<u32>(v), static_cast<u32>(v >> 32)});
}

// Optimal code lengths under `limit` (package-merge, Larmore and Hirschberg 1990), by one warp. Lane a < m holds the
// weight of leaf a, lightest first; the result is that leaf's length. m >= 2.
//
// A round merges the leaves with the packages of the round before, a leaf going before a package of the same weight;
// the place of an item is its rank in its own list plus how many items of the other list go before it. A round leaves
// behind one bit per place: leaf or package. `scratch`: 256 B merged weights, 128 B flags, 64 B rounds.
UW_DEVICE u32 package_merge(u64 leaf, u32 m, u32 limit, u32 lane, u32 scratch) {
    u32 merged = scratch, flags = scratch + 256, rounds = scratch + 384;
    u64 package = 0;
    u32 packages = 0;
#pragma unroll 1
    for (u32 round = 0; round < limit; ++round) {
        u32 leaf_place = lane, package_place = lane;
#pragma unroll
        for (u32 i = 0; i < 16; ++i) {
            u64 other_leaf = shuffle_u64(leaf, i), other_package = shuffle_u64(package, i);
            leaf_place += i < packages && other_package < leaf;
            package_place += i < m && other_leaf <= package;
        }
        if (lane < m) {
            st_shared_u64(merged + leaf_place * 8, leaf);
            ptx::st_shared(flags + leaf_place * 4, 1);
        }
        if (lane < packages) {
            st_shared_u64(merged + package_place * 8, package);
            ptx::st_shared(flags + package_place * 4, 0);
        }
        ptx::sync_warp();
        u32 items = m + packages;  // 31 at most
        u32 is_leaf = ptx::warp_ballot(lane < items && ptx::ld_shared(flags + lane * 4) != 0);
        if (lane == 0) ptx::st_shared(rounds + round * 4, is_leaf);
        packages = items / 2;
        package = lane < packages ? ld_shared_u64(merged + lane * 16) + ld_shared_u64(merged + lane * 16 + 8) : 0;
        ptx::sync_warp();
    }
    // 2m - 2 items of the last round are chosen; a chosen package stands for two items of the round before.
    u32 chosen = 2 * m - 2, length = 0;
    for (u32 round = limit; round-- > 0;) {
        u32 leaves = ptx::popcount(ptx::ld_shared(rounds + round * 4) & ((1u << chosen) - 1));
        length += lane < leaves;
        chosen = 2 * (chosen - leaves);
    }
    return length;
}

UW_DEVICE void table(const EncodeArgs& args) {
    // counts 1024 B | exponents of the palette 64 B | their counts 64 B | scratch
    u32 smem = ptx::smem_address(ptx::dynamic_smem());
    u32 counts = smem, exponents = smem + 1024, weights = smem + 1088, scratch = smem + 1152;
    u32 thread = ptx::thread_index();
    u32 count = ptx::ld_global(args.histogram + thread);
    ptx::st_shared(counts + 4 * thread, count);
    if (thread < 16) {
        ptx::st_shared(exponents + 4 * thread, 0);
        ptx::st_shared(weights + 4 * thread, 0);
    }
    ptx::st_global(args.encode_table + thread, 0);
    ptx::sync_block();
    // Most frequent first, of equals the smaller exponent.
    u32 rank = 0;
    for (u32 i = 0; i < 256; i += 4) {
        U32x4 c = ptx::ld_shared_x4(counts + 4 * i);
        rank += c.x > count || (c.x == count && i < thread);
        rank += c.y > count || (c.y == count && i + 1 < thread);
        rank += c.z > count || (c.z == count && i + 2 < thread);
        rank += c.w > count || (c.w == count && i + 3 < thread);
    }
    if (count > 0 && rank < 16) {
        ptx::st_shared(exponents + 4 * rank, thread);
        ptx::st_shared(weights + 4 * rank, count);
    }
    ptx::sync_block();
    if (thread >= 32) return;

    u32 lane = thread;
    u32 own_weight = lane < 16 ? ptx::ld_shared(weights + 4 * lane) : 0;
    u32 own_exponent = lane < 16 ? ptx::ld_shared(exponents + 4 * lane) : 0;
    u32 m = ptx::popcount(ptx::warp_ballot(own_weight != 0));
    u32 limit = args.code_limit < 15 ? args.code_limit : 15;
    // Leaf a, lightest first, is palette entry m - 1 - a.
    u32 mirrored = lane < m ? m - 1 - lane : lane;
    u32 leaf_weight = ptx::shuffle(own_weight, mirrored);
    u32 length = m >= 2 ? package_merge(leaf_weight, m, limit, lane, scratch) : 1;
    length = ptx::shuffle(length, mirrored);
    length = lane < m ? length : 0;
    u32 code = canonical_code(length, lane);
    if (lane < 16) {
        ptx::st_global_u8(args.palette + lane, own_exponent);
        ptx::st_global_u8(args.code_lengths + lane, length);
    }
    if (lane < m) ptx::st_global(args.encode_table + own_exponent, code | length << 16 | lane << 24);
}

// ---- what rows, write and palette share: a warp per tile -----------------------------------------------------------
// A step handles 4 rows: lane -> row 4 * step + lane / 8, columns lane % 8 * 8 and the 7 after them.

constexpr u32 kSteps = 16;
// Steps whose loads are in flight together; element-wise loads need the registers themselves.
template <bool kWide>
constexpr u32 kBatchOf = kWide ? 4 : 1;

struct TilePlace {
    u32 rows;           // matrix rows in it
    u32 valid;          // columns that a lane has inside the matrix, 0..8
    const u16* source;  // a lane's first element in step 0
};

UW_DEVICE TilePlace place(const EncodeArgs& args, u32 tile, u32 lane) {
    u32 tile_row = tile / args.tile_cols, row = tile_row * kTile, left = args.n - row;
    u32 column = (tile - tile_row * args.tile_cols) * kTile + lane % 8 * 8;
    u32 inside = column < args.k ? args.k - column : 0;
    return {left < kTile ? left : kTile, inside < 8 ? inside : 8, args.weights + static_cast<u64>(row + lane / 8) * args.k + column};
}

// Eight elements of one row, two a word; pad columns hold the exponent of palette entry 0, as A.5 codes them.
// kWide: k is a multiple of 8, so that eight elements are aligned and wholly inside or outside.
template <bool kWide>
UW_DEVICE U32x4 load_eight(const EncodeArgs& args, const TilePlace& p, u32 step, u32 group, u32 pad) {
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

UW_DEVICE u32 pad_pair(const EncodeArgs& args) {
    u32 exponent = ptx::ld_global_nc_u8(args.palette);
    return exponent << 7 | exponent << 23;
}

// Table entry of the exponent in the low or the high half of a pair. Trained exponents are neighbours, so the lanes of
// a warp read different banks or the same word.
UW_DEVICE u32 entry_low(u32 table, u32 pair) { return ptx::ld_shared(table + (pair >> 5 & 0x3fc)); }
UW_DEVICE u32 entry_high(u32 table, u32 pair) { return ptx::ld_shared(table + (pair >> 21 & 0x3fc)); }

// Exponent bytes of eight elements; pad columns 0.
UW_DEVICE U32x2 exponent_bytes(const TilePlace& p, const U32x4& v) {
    u32 low = ptx::prmt(v.x >> 7, v.y >> 7, 0x6420), high = ptx::prmt(v.z >> 7, v.w >> 7, 0x6420);
    if (p.valid < 4) low &= (1u << p.valid * 8) - 1;
    if (p.valid < 8) high &= p.valid > 4 ? (1u << (p.valid - 4) * 8) - 1 : 0;
    return {low, high};
}

// Bits below row r of the bitmask.
UW_DEVICE u32 rows_before(const TileMetadata& m, u32 row) {
    u32 low = row >= 32 ? ~0u : (1u << row) - 1, high = row >= 32 ? (1u << (row - 32)) - 1 : 0;
    return ptx::popcount(m.verbatim_low & low) + ptx::popcount(m.verbatim_high & high);
}
UW_DEVICE bool is_verbatim(const TileMetadata& m, u32 row) { return (row >= 32 ? m.verbatim_high : m.verbatim_low) >> row % 32 & 1; }

UW_DEVICE TileMetadata load_metadata(const EncodeArgs& args, u32 tile) {
    U32x4 v = ptx::ld_global_x4(args.tile_metadata + tile);
    return {v.x, v.y, v.z, v.w};
}

// False, and the fault is noted, if a tile's verbatim rows do not fit.
UW_DEVICE bool rows_fit(const EncodeArgs& args, const TileMetadata& m, u32 lane) {
    u32 count = ptx::popcount(m.verbatim_low) + ptx::popcount(m.verbatim_high);
    bool fits = static_cast<u64>(m.verbatim_row_offset) + count <= args.capacity_rows;
    if (!fits && lane == 0) ptx::red_max_global_u64(args.totals + 3, 1);
    return fits;
}

UW_DEVICE void store_verbatim(const EncodeArgs& args, const TilePlace& p, const TileMetadata& m, u32 row, u32 segment, const U32x4& v) {
    u64 at = static_cast<u64>(m.verbatim_row_offset) + rows_before(m, row);
    ptx::st_global_x2(args.verbatim_exponents + at * kTile + segment * 8, exponent_bytes(p, v));
}

// ---- rows: row lengths, bitmask, words and verbatim rows of each tile
// ------------------------------------------------

template <bool kWide>
UW_DEVICE void rows_of(const EncodeArgs& args) {
    constexpr u32 kBatch = kBatchOf<kWide>;
    // Length of each exponent's code; outside the palette one that no row survives.
    constexpr u32 kNoCode = 512;
    u32 table = ptx::smem_address(ptx::dynamic_smem());
    u32 thread = ptx::thread_index(), lane = thread % 32, segment = lane % 8, group = lane / 8;
    u32 own_entry = ptx::ld_global_nc(args.encode_table + thread);
    u32 own_length = own_entry >> 16 & 0xff;
    ptx::st_shared(table + 4 * thread, own_length != 0 ? own_length : kNoCode);
    u32 pad = pad_pair(args);
    ptx::sync_block();

    u32 tiles = args.tile_rows * args.tile_cols, stride = ptx::grid_size() * kTileWarps;
    for (u32 tile = ptx::block_index() * kTileWarps + thread / 32; tile < tiles; tile += stride) {
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
                u32 bits = entry_low(table, v[i].x) + entry_high(table, v[i].x) + entry_low(table, v[i].y) + entry_high(table, v[i].y) +
                           entry_low(table, v[i].z) + entry_high(table, v[i].z) + entry_low(table, v[i].w) + entry_high(table, v[i].w);
                bits += ptx::shuffle_xor(bits, 1);
                bits += ptx::shuffle_xor(bits, 2);
                bits += ptx::shuffle_xor(bits, 4);
                kept[step / 8] = segment == step % 8 ? bits : kept[step / 8];
            }
        }
        // From (row 4s + g in lane 8g + s) to row l in lane l.
        u32 source = lane % 4 * 8 + lane / 4;
        u32 bits[2] = {ptx::shuffle(kept[0], source), ptx::shuffle(kept[1], source)};
        u32 mask[2], words = 0;
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            bool inside = half * 32 + lane < p.rows, coded = inside && bits[half] <= kRowBitsMax;
            mask[half] = ptx::warp_ballot(inside && !coded);
            ptx::st_global_u8(args.row_lengths + static_cast<u64>(tile) * kTile + half * 32 + lane, coded ? bits[half] - kRowBitsMin : 0);
            words += coded ? bits[half] : 0;
        }
#pragma unroll
        for (u32 delta = 1; delta < 32; delta *= 2) words += ptx::shuffle_xor(words, delta);
        words = (words + 31) / 32;
        if (lane == 0) {
            u32 count = ptx::popcount(mask[0]) + ptx::popcount(mask[1]);
            ptx::st_global_x4(args.tile_metadata + tile, U32x4{words, count, mask[0], mask[1]});
        }
    }
}

UW_DEVICE void rows(const EncodeArgs& args) {
    if (args.k % 8 == 0) {
        rows_of<true>(args);
    } else {
        rows_of<false>(args);
    }
}

// ---- scan: word and row counts of the tiles -> offsets
// ---------------------------------------------------------------
//
// One pass: a block publishes the sums of its tiles and adds up those of all blocks before it, a block per thread. It
// takes a ticket, so that those it waits for already run. Its 4 words of scan_state:
//                         [0] its sums: words (24 bits) | verbatim rows << 24 | most rows of a tile << 44 | 1 << 63
//                         [1] of block 0: the ticket counter
// The word carries its own flag. (Running totals that blocks hand on, as in Merrill and Garland 2016, make a chain of
// round trips to L2.)

UW_DEVICE void scan(const EncodeArgs& args) {
    u32 smem = ptx::smem_address(ptx::dynamic_smem());  // 8 warps x {words, rows, most}, then the ticket
    u32 shared_ticket = smem + 256;
    u32 thread = ptx::thread_index(), lane = thread % 32, warp = thread / 32;
    if (thread == 0) ptx::st_shared(shared_ticket, static_cast<u32>(ptx::atom_add_global_u64(args.scan_state + 1, 1)));
    ptx::sync_block();
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
        u32 w = ptx::shuffle_up(words_sum, delta), r = ptx::shuffle_up(rows_sum, delta), x = ptx::shuffle_xor(most, delta);
        words_sum += lane >= delta ? w : 0;
        rows_sum += lane >= delta ? r : 0;
        most = x > most ? x : most;
    }
    if (lane == 31) ptx::st_shared_x4(smem + warp * 16, U32x4{words_sum, rows_sum, most, 0});
    ptx::sync_block();
    u32 words_before = words_sum - words, rows_before = rows_sum - rows, block_words = 0, block_rows = 0, block_most = 0;
    for (u32 i = 0; i < kScanThreads / 32; ++i) {
        U32x4 t = ptx::ld_shared_x4(smem + i * 16);
        words_before += i < warp ? t.x : 0;
        rows_before += i < warp ? t.y : 0;
        block_words += t.x;
        block_rows += t.y;
        block_most = t.z > block_most ? t.z : block_most;
    }
    if (thread == 0) {
        ptx::st_release_global_u64(args.scan_state + static_cast<u64>(block) * 4,
                                      block_words | static_cast<u64>(block_rows) << 24 | static_cast<u64>(block_most) << 44 | 1ull << 63);
    }
    u64 words_total = 0, rows_total = 0;
    u32 most_total = 0;
#pragma unroll 1
    for (u32 other = thread; other < block; other += kScanThreads) {
        u64 own = 0;
        do {
            own = ptx::ld_acquire_global_u64(args.scan_state + static_cast<u64>(other) * 4);
        } while (own == 0);
        words_total += own & 0xffffff;
        rows_total += own >> 24 & 0xfffff;
        u32 other_most = static_cast<u32>(own >> 44) & 0x7f;
        most_total = other_most > most_total ? other_most : most_total;
    }
#pragma unroll
    for (u32 delta = 1; delta < 32; delta *= 2) {
        words_total += shuffle_u64(words_total, lane ^ delta);
        rows_total += shuffle_u64(rows_total, lane ^ delta);
        u32 x = ptx::shuffle_xor(most_total, delta);
        most_total = x > most_total ? x : most_total;
    }
    u32 before = smem + 512;  // 8 warps x {words, rows, most}
    if (lane == 0) {
        st_shared_u64(before + warp * 24, words_total);
        st_shared_u64(before + warp * 24 + 8, rows_total);
        st_shared_u64(before + warp * 24 + 16, most_total);
    }
    ptx::sync_block();
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

// ---- write: bitstream and verbatim rows
// ------------------------------------------------------------------------------

// ORs `bits` (up to 64 of them) into a zeroed bitstream in shared memory. Neighbouring lanes share words, hence
// atomics.
UW_DEVICE void put(u32 stream, u32 position, u64 bits) {
    u32 low = static_cast<u32>(bits), high = static_cast<u32>(bits >> 32), shift = position % 32;
    u32 address = stream + position / 32 * 4;
    u32 middle = ptx::funnel_shift_left(low, high, shift), last = ptx::funnel_shift_left(high, 0, shift);
    ptx::red_or_shared(address, low << shift);
    if (middle != 0) ptx::red_or_shared(address + 4, middle);
    if (last != 0) ptx::red_or_shared(address + 8, last);
}

// Codes of a pair of elements, 30 bits at most, and their length.
UW_DEVICE u32 join_pair(u32 table, u32 pair, u32& length) {
    u32 a = entry_low(table, pair), b = entry_high(table, pair);
    u32 length_a = a >> 16;
    length = length_a + (b >> 16);
    return (a & 0xffff) | (b & 0xffff) << length_a;
}

// Codes of eight elements, at most 120 bits, in two pieces of at most 60.
struct Codes {
    u64 left, right;
    u32 left_length, length;  // of `left`; of both
};

UW_DEVICE Codes codes_of(u32 table, const U32x4& v) {
    u32 length[4];
    u32 pairs[4] = {join_pair(table, v.x, length[0]), join_pair(table, v.y, length[1]), join_pair(table, v.z, length[2]),
                    join_pair(table, v.w, length[3])};
    u32 left = length[0] + length[1];
    return {pairs[0] | static_cast<u64>(pairs[1]) << length[0], pairs[2] | static_cast<u64>(pairs[3]) << length[2], left,
            left + length[2] + length[3]};
}

// The same for codes of at most 7 bits: four fit a word. Words fill from the top, so that a funnel shift both makes
// room and appends, and nothing needs a mask; the shift takes the count's low five bits.
constexpr u32 kShortCode = 7;

struct ShortCodes {
    u32 high, low;  // the last `length` bits of high:low
    u32 length;     // 8..56
};

UW_DEVICE u32 join_four(u32 table, u32 first, u32 second, u32& length) {
    u32 e[4] = {entry_low(table, first), entry_high(table, first), entry_low(table, second), entry_high(table, second)};
    u32 word = 0;
    length = 0;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        // Bits of the entry above the code fall off: the count is the code's length.
        u32 count = e[i] >> 16;
        word = ptx::funnel_shift_right(word, e[i], count);
        length += count;
    }
    return word;
}

UW_DEVICE ShortCodes short_codes_of(u32 table, const U32x4& v) {
    u32 left_length, right_length;
    u32 left = join_four(table, v.x, v.y, left_length), right = join_four(table, v.z, v.w, right_length);
    // right >> (32 - right_length), and the like of left: also where no element has a code.
    u32 aligned = ptx::funnel_shift_left(right, 0, right_length), rest = ptx::funnel_shift_right(0, left, right_length);
    return {ptx::funnel_shift_right(left, aligned, right_length), rest, left_length + right_length};
}

template <bool kShort>
struct CodesOf {
    using Type = Codes;
};
template <>
struct CodesOf<true> {
    using Type = ShortCodes;
};

// ORs the codes into a zeroed bitstream, before bit `end`.
UW_DEVICE void put_before(u32 stream, u32 end, const ShortCodes& c) {
    u32 address = stream + end / 32 * 4;
    u32 last = ptx::funnel_shift_left(c.high, 0, end), middle = ptx::funnel_shift_left(c.low, c.high, end), first = c.low << end % 32;
    if (last != 0) ptx::red_or_shared(address, last);
    if (middle != 0) ptx::red_or_shared(address - 4, middle);
    if (first != 0) ptx::red_or_shared(address - 8, first);
}

// kShort: no code is longer than kShortCode.
template <bool kWide, bool kShort>
UW_DEVICE void write_of(const EncodeArgs& args) {
    constexpr u32 kBatch = kBatchOf<kWide>;
    u32 table = ptx::smem_address(ptx::dynamic_smem());
    u32 thread = ptx::thread_index(), lane = thread % 32, warp = thread / 32, segment = lane % 8, group = lane / 8;
    u32 stream = table + 1024 + warp * kTileBufferWords * 4;
    using Coded = typename CodesOf<kShort>::Type;
    constexpr u32 kTogether = kBatch < 2 ? 1 : 2;
    // Without the palette index: code | length << 16.
    ptx::st_shared(table + 4 * thread, ptx::ld_global_nc(args.encode_table + thread) & 0xffffff);
    u32 pad = pad_pair(args);
    ptx::sync_block();

    u32 tiles = args.tile_rows * args.tile_cols, stride = ptx::grid_size() * kTileWarps;
    for (u32 tile = ptx::block_index() * kTileWarps + warp; tile < tiles; tile += stride) {
        TilePlace p = place(args, tile, lane);
        TileMetadata m = load_metadata(args, tile);
        const u8* lengths = args.row_lengths + static_cast<u64>(tile) * kTile + lane;
        // Rows `lane` and `lane + 32` in one scan, as the decoder does.
        u32 low = lane < p.rows && !is_verbatim(m, lane) ? ptx::ld_global_nc_u8(lengths) + kRowBitsMin : 0;
        u32 high = lane + 32 < p.rows && !is_verbatim(m, lane + 32) ? ptx::ld_global_nc_u8(lengths + 32) + kRowBitsMin : 0;
        u32 own = low | high << 16, sum = own;
#pragma unroll
        for (u32 delta = 1; delta < 32; delta *= 2) {
            u32 below = ptx::shuffle_up(sum, delta);
            sum += lane >= delta ? below : 0;
        }
        u32 total = ptx::shuffle(sum, 31), begins = sum - own + (total << 16);
        u32 words = ((total & 0xffff) + (total >> 16) + 31) / 32;
        bool words_ok = static_cast<u64>(m.start_word) + words <= args.capacity_words;
        if (!words_ok && lane == 0) ptx::red_max_global_u64(args.totals + 3, 1);

        for (u32 at = lane * 4; at < words; at += 128) ptx::st_shared_x4(stream + at * 4, U32x4{});
        ptx::sync_warp();
#pragma unroll 1
        for (u32 batch = 0; batch < kSteps / kBatch; ++batch) {
            U32x4 v[kBatch];
#pragma unroll
            for (u32 i = 0; i < kBatch; ++i) v[i] = load_eight<kWide>(args, p, batch * kBatch + i, group, pad);
#pragma unroll
            for (u32 i = 0; i < kBatch; i += kTogether) {
                Coded codes[kTogether];
                u32 before = 0;
#pragma unroll
                for (u32 j = 0; j < kTogether; ++j) {
                    if constexpr (kShort) {
                        codes[j] = short_codes_of(table, v[i + j]);
                    } else {
                        codes[j] = codes_of(table, v[i + j]);
                    }
                    before |= codes[j].length << 16 * j;
                }
                // Inclusive scan over the 8 lanes of a row, two rows in one word.
#pragma unroll
                for (u32 delta = 1; delta < 8; delta *= 2) {
                    u32 below = ptx::shuffle_up(before, delta);
                    before += segment >= delta ? below : 0;
                }
#pragma unroll
                for (u32 j = 0; j < kTogether; ++j) {
                    u32 row = (batch * kBatch + i + j) * 4 + group;
                    u32 begin = ptx::shuffle(begins, row % 32);
                    begin = row >= 32 ? begin >> 16 : begin & 0xffff;
                    u32 end = begin + (before >> 16 * j & 0xffff);
                    if (row >= p.rows) {
                        // A pad row has no bits.
                    } else if (is_verbatim(m, row)) {
                        // Rare: the record is read again rather than kept in registers.
                        TileMetadata again = load_metadata(args, tile);
                        if (rows_fit(args, again, segment)) store_verbatim(args, p, again, row, segment, v[i + j]);
                    } else if constexpr (kShort) {
                        put_before(stream, end, codes[j]);
                    } else if (codes[j].length <= 64) {
                        put(stream, end - codes[j].length, codes[j].left | (codes[j].left_length < 64 ? codes[j].right << codes[j].left_length : 0));
                    } else {
                        put(stream, end - codes[j].length, codes[j].left);
                        put(stream, end - codes[j].length + codes[j].left_length, codes[j].right);
                    }
                }
            }
        }
        ptx::sync_warp();
        if (words_ok) {
            u32* out = args.encoded_exp + load_metadata(args, tile).start_word;
            for (u32 at = lane; at < words; at += 32) ptx::st_global(out + at, ptx::ld_shared(stream + at * 4));
            // The section ends on 16 bytes (docs/format.md A.6).
            u32 pads = 0 - (m.start_word + words) & 3;
            if (tile == tiles - 1 && lane < pads && m.start_word + static_cast<u64>(words) + lane < args.capacity_words) {
                ptx::st_global(out + words + lane, 0);
            }
        }
        ptx::sync_warp();
    }
}

UW_DEVICE void write(const EncodeArgs& args) {
    bool wide = args.k % 8 == 0, is_short = args.code_limit <= kShortCode;
    if (wide && is_short) {
        write_of<true, true>(args);
    } else if (wide) {
        write_of<true, false>(args);
    } else {
        write_of<false, false>(args);
    }
}

// ---- palette: packed indices and verbatim rows
// -----------------------------------------------------------------------

// Also sets start_word to 0 (docs/format.md A.7), so a metadata array serves one form.
template <bool kWide>
UW_DEVICE void palette_of(const EncodeArgs& args) {
    constexpr u32 kBatch = kBatchOf<kWide>;
    u32 table = ptx::smem_address(ptx::dynamic_smem());
    u32 thread = ptx::thread_index(), lane = thread % 32, segment = lane % 8, group = lane / 8;
    ptx::st_shared(table + 4 * thread, ptx::ld_global_nc(args.encode_table + thread) >> 24);
    u32 pad = pad_pair(args);
    ptx::sync_block();

    u32 tiles = args.tile_rows * args.tile_cols, stride = ptx::grid_size() * kTileWarps;
    for (u32 tile = ptx::block_index() * kTileWarps + thread / 32; tile < tiles; tile += stride) {
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
                             entry_high(table, v[i].y) << 12 | entry_low(table, v[i].z) << 16 | entry_high(table, v[i].z) << 20 |
                             entry_low(table, v[i].w) << 24 | entry_high(table, v[i].w) << 28;
                bool verbatim = is_verbatim(m, row);
                if (verbatim && rows_ok) store_verbatim(args, p, m, row, segment, v[i]);
                ptx::st_global(out + row * 32 + segment * 4, verbatim || row >= p.rows ? 0 : packed);
            }
        }
        // All lanes have read the record.
        ptx::sync_warp();
        if (lane == 0) ptx::st_global(args.tile_metadata + tile, 0);
    }
}

UW_DEVICE void palette(const EncodeArgs& args) {
    if (args.k % 8 == 0) {
        palette_of<true>(args);
    } else {
        palette_of<false>(args);
    }
}

// ---- the stage that Config names
template <class Config>
UW_DEVICE void run(const EncodeArgs& args) {
    if constexpr (Config::kStage == EncodeStage::kStats) {
        stats(args);
    } else if constexpr (Config::kStage == EncodeStage::kTable) {
        table(args);
    } else if constexpr (Config::kStage == EncodeStage::kRows) {
        rows(args);
    } else if constexpr (Config::kStage == EncodeStage::kScan) {
        scan(args);
    } else if constexpr (Config::kStage == EncodeStage::kWrite) {
        write(args);
    } else {
        palette(args);
    }
}

}  // namespace uw::encode
