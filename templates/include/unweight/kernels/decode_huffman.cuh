// Family `decode_huffman` (report section 7): Huffman tensor -> bf16 matrix | exponent bytes | packed palette indices;
// tensor of exponents (docs/format.md A.12) -> its matrix of FP8, F16 or F32.
//
// Config (the axes of unweight-codegen/src/family/decode_huffman.rs)
//   DecodeOutput kOutput     what is written
//   DecodeElement kElement   the type that full output writes (encoding/elements.cuh)
//   u32 kCodeLimit           6..15; a kernel decodes any tensor whose longest code does not exceed its limit
//   SmemCopy kCopy           kBulk: bits are loaded by bulk copies (TMA); kAsync: by cp.async of all lanes, without
//                            mbarriers
//   u32 kWarps               1..32; planned: 32, fewer if shared memory is short
// Launch   threads = 32 * kWarps, grid = min(tiles, SMs) (1 block per SM; any grid is correct), dynamic shared memory =
//          Smem<Config>::kBytes, __launch_bounds__(32 * kWarps, 1).
//
// Roles    warps work independently: each takes tiles at a fixed stride and shares only the table with the others; a
//          last round too short for all warps is distributed in half tiles. A tile's header (16 B metadata, 64 B
//          lengths) is loaded one tile ahead; one warp scan of the lengths gives the first bit of all 64 rows. Then,
//          for each half (32 rows): (1) a bulk copy loads the bits, issued while the previous half was decoded; (2)
//          each lane decodes a row from shared memory (encoding/huffman/reader.cuh) into 16-byte pieces of a staging
//          area; (3) the warp writes the staging area to memory, 16 bytes per lane, in contiguous whole sectors. Full
//          output decodes to palette indices; signs and fractions (for BF16 the sign-mantissa bytes) are loaded before
//          (2) and joined with the exponents in (3): those of all of a lane's elements, but of half of them for F16 and
//          a quarter for F32, whose others follow batch by batch.
// kAsync   one cp.async group per fetch, even if empty: when a half is needed, its group is the second newest.
// Barriers 2 mbarriers per warp, one per half: 1 arrival (the copying lane, with the expected bytes); one phase per
// copy.
//
// Shared memory, in this order (bytes; Smem<Config>):
//   table    Table::kBytes         palette, full: 32768 (L=7), 8192 (L=6); exponent: 65536 (L=7), 16384 (L=6);
//                                  all outputs: 32768 (L=8), 65536 (L=9..15)
//   scratch  1024                  code words and single-symbol entries while the table is built
//   barriers 16 * kWarps           2 mbarriers per warp, if any
//   stage    2656 * kWarps         2 buffers of 1328 = 16 in front + 1312 (32 rows * 319 bits, extended to 16 B at both
//                                  ends)
//   output   palette, full: 1024 * kWarps; exponent: 2048 * kWarps
// If the stream is damaged, a row may be read up to 128 B past its bits, which ends within `output` at the latest (>=
// 1024 B).
//
// Bytes    per element, at 2.75 bits per code: read 0.34 + 0.016 + 0.004 (full: + 1), write palette 0.5, exponent 1,
//          full 2. 14336x4096: palette 50 MB, exponent 80 MB, full 198 MB. Full output of other types: E4M3 (read
//          0.36 + 0.5, write 1) 109 MB, E5M2 102, F16 219, F32 432.
// Bound    palette and exponent: shared memory (a pair lookup of 32 lanes takes 3 to 4 wavefronts); full: device
//          memory. Measurements: docs/records; experiments: docs/records/2026-11-20/kernels-preprocess-log.md.
//
// Safety   for any bytes: a tile whose metadata would leave encoded_exp or verbatim_exponents, or marks a pad row as
//          verbatim, is skipped and *fault = 1 + tile; everything else is static. Wrong codes only give wrong bytes.
// Source   report sections 3.4, 6.2, 7. Changed: tables of two symbols or of one copy per bank, a tile per warp,
//          word-aligned tiles and u8 row lengths (docs/adr/0001-format.md).
#pragma once

#include "unweight/abi.cuh"
#include "unweight/axes.cuh"
#include "unweight/encoding/elements.cuh"
#include "unweight/encoding/huffman/reader.cuh"
#include "unweight/pipeline/ring.cuh"
#include "unweight/ptx/async.cuh"
#include "unweight/ptx/bulk.cuh"
#include "unweight/ptx/fence.cuh"
#include "unweight/ptx/mbarrier.cuh"

namespace uw::decode_huffman {

constexpr u32 kTile = 64;
constexpr u32 kRows = 32;        // rows of a half tile, one per lane
constexpr u32 kRowBitsMin = 64;  // bias of row_lengths
constexpr u32 kStageFront = 16;  // the window starts up to 7 bits before the first code
constexpr u32 kStageBits =
    1312;  // 32 * 319 bits = 319 words; + 1 (begins inside a word) + 3 + 3 (16-byte ends), to 16 B
constexpr u32 kStageBytes = kStageFront + kStageBits;
constexpr u32 kStages = 2;             // one per half
constexpr u32 kScratchPalette = 1008;  // offset in `scratch` of full's 16 palette entries

template <class Config>
struct Smem {
    using Table = uw::decode_huffman::Table<Config::kOutput, Config::kCodeLimit>;
    static constexpr u32 kRowBytes = Table::kPalette ? 32 : 64;
    static constexpr u32 kTable = 0;
    static constexpr u32 kScratch = kTable + Table::kBytes;
    static constexpr u32 kBarriers = kScratch + 1024;
    static constexpr u32 kStage = kBarriers + (kAsync<Config> ? 0 : 8 * kStages * Config::kWarps);
    static constexpr u32 kOutput = kStage + kStages * kStageBytes * Config::kWarps;
    static constexpr u32 kBytes = kOutput + kRows * kRowBytes * Config::kWarps;
    static_assert(Table::kScratchBytes <= kScratchPalette, "scratch");
    static_assert(Config::kWarps >= 1 && Config::kWarps <= 32, "1..32 warps");
    static_assert(kStage % 16 == 0 && kOutput % 16 == 0, "16-byte sections");
};

template <class Config>
constexpr u32 kThreads = 32 * Config::kWarps;

// What must be known of a tile before its bits can be fetched; loaded one tile ahead.
struct Header {
    TileMetadata metadata;
    u32 length[2];  // row_lengths of rows `lane` and `lane + 32`
};

// The work of a warp in one round.
struct Work {
    u32 tile;
    u32 halves;  // bit h: this warp decodes half h
};

// A last round that would use at most half of the warps is distributed in half tiles.
UW_DEVICE Work work(u32 round_begin, u32 warp, u32 tiles, u32 warps) {
    u32 left = tiles > round_begin ? tiles - round_begin : 0;
    if (2 * left > warps) return {round_begin + warp, warp < left ? 3u : 0u};
    return {round_begin + warp / 2, warp < 2 * left ? 1u << (warp & 1) : 0u};
}

// A tile that passed the checks.
struct Tile {
    TileMetadata metadata;
    u32 index;
    u32 halves;  // halves to decode; 0: none, or the tile failed a check
    u32 rows;    // matrix rows in it, 1..64
    u32 begins;  // first bit, from the tile's start, of rows `lane` (low half) and `lane + 32` (high half)
    u32 bits;    // of rows 0..31 (low half) and 32..63 (high half); 20416 at most in all
};

UW_DEVICE Header load_header(const DecodeHuffmanArgs& args, const Work& w, u32 lane) {
    Header h = {};
    if (w.halves != 0) {
        U32x4 m = ptx::ld_global_nc_x4(args.tile_metadata + w.tile);
        h.metadata = {m.x, m.y, m.z, m.w};
        const u8* lengths = args.row_lengths + static_cast<u64>(w.tile) * kTile + lane;
        h.length[0] = ptx::ld_global_nc_u8(lengths);
        h.length[1] = ptx::ld_global_nc_u8(lengths + 32);
    }
    return h;
}

// The lowest `count` bits.
UW_DEVICE u32 low_bits(u32 count) { return count >= 32 ? ~0u : (1u << count) - 1; }

// Checks a tile and finds each row's first bit.
UW_DEVICE Tile prepare(const DecodeHuffmanArgs& args, const Header& h, const Work& w, u32 lane) {
    Tile t = {};
    if (w.halves == 0) return t;
    t.index = w.tile;
    t.halves = w.halves;
    t.metadata = h.metadata;
    // Only the last tile row can be short; comparing saves a division per tile.
    bool last_row = w.tile >= (args.tile_rows - 1) * args.tile_cols;
    t.rows = last_row ? args.n - (args.tile_rows - 1) * kTile : kTile;
    u32 inside_low = low_bits(t.rows), inside_high = t.rows > 32 ? low_bits(t.rows - 32) : 0;

    // Both halves in one scan: 64 * 319 fits in 16 bits.
    u32 low = (inside_low & ~h.metadata.verbatim_low) >> lane & 1 ? h.length[0] + kRowBitsMin : 0;
    u32 high = (inside_high & ~h.metadata.verbatim_high) >> lane & 1 ? h.length[1] + kRowBitsMin : 0;
    u32 own = low | high << 16;
    u32 sum = own;
#pragma unroll
    for (u32 delta = 1; delta < 32; delta *= 2) {
        u32 below = ptx::shfl_sync_up(sum, delta);
        sum += lane >= delta ? below : 0;
    }
    t.bits = ptx::shfl_sync_idx(sum, 31);
    t.begins = sum - own + (t.bits << 16);

    u32 words = ((t.bits & 0xffff) + (t.bits >> 16) + 31) / 32;
    // Bulk copies move groups of 4 words, and the section is padded to that (A.6).
    u64 end = (static_cast<u64>(h.metadata.start_word) + words + 3) & ~3ull;
    u64 verbatim_end = static_cast<u64>(h.metadata.verbatim_row_offset) + ptx::popc(h.metadata.verbatim_low) +
                       ptx::popc(h.metadata.verbatim_high);
    u32 pad_verbatim = (h.metadata.verbatim_low & ~inside_low) | (h.metadata.verbatim_high & ~inside_high);
    bool valid = (words == 0 || end <= args.encoded_words) && verbatim_end <= args.verbatim_rows && pad_verbatim == 0;
    if (!valid) {
        t.halves = 0;
        if (lane == 0) ptx::st_global(args.fault, 1 + w.tile);
    }
    return t;
}

// Bits of a half, and of the halves before it.
UW_DEVICE u32 half_bits(const Tile& t, u32 half) { return half ? t.bits >> 16 : t.bits & 0xffff; }
UW_DEVICE u32 half_begin(const Tile& t, u32 half) { return half ? t.bits & 0xffff : 0; }

// Issues the copy of a half's bits, if it has any.
template <bool kAsync>
UW_DEVICE void fetch(const DecodeHuffmanArgs& args, const Tile& t, u32 half, u32 lane, u32 stage, u32 barrier) {
    u32 bits = half_bits(t, half), begin = half_begin(t, half);
    if ((t.halves >> half & 1) != 0 && bits != 0) {
        u64 first = t.metadata.start_word + static_cast<u64>(begin / 32);
        u32 skew = first & 3;
        u32 words = (begin % 32 + bits + 31) / 32;
        u32 bytes = (skew + words + 3) / 4 * 16, to = stage + kStageFront;
        const u32* from = args.encoded_exp + (first - skew);
        if constexpr (kAsync) {
            for (u32 at = lane * 16; at < bytes; at += 32 * 16) ptx::cp_async_x4(to + at, from + at / 4);
        } else if (ptx::elect_sync()) {
            ptx::mbarrier_arrive_expect_tx(barrier, bytes);
            ptx::cp_async_bulk_load(to, from, bytes, barrier);
        }
    }
    // An empty group is committed, too: cp_async_wait_group counts groups.
    if constexpr (kAsync) ptx::cp_async_commit_group();
}

// First bit of this lane's row of a half, relative to the stage buffer.
UW_DEVICE u32 stage_bit(const Tile& t, u32 half) {
    u32 begin = half_begin(t, half);
    u32 skew = (t.metadata.start_word + begin / 32) & 3;
    u32 row = half ? t.begins >> 16 : t.begins & 0xffff;
    return kStageFront * 8 + skew * 32 + row - (begin & ~31u);
}

// Staging: 16-byte piece c of row r is at slot c ^ swizzle, so that the 8 lanes of a store phase hit 8 bank groups.
template <u32 kRowBytes>
UW_DEVICE u32 piece(u32 row, u32 c) {
    if constexpr (kRowBytes == 64) return row * 64 + ((c ^ (row >> 1 & 3)) << 4);
    return row * 32 + ((c ^ (row >> 2 & 1)) << 4);
}

// Full output: a lane's share of a half tile is kCount cells of kWidth elements, in rows lane / kLanes + kStep i.
template <u32 kWidth>
struct Cells {
    static constexpr u32 kLanes = kTile / kWidth;  // lanes that share a row
    static constexpr u32 kStep = 32 / kLanes;      // rows that a warp processes at once
    static constexpr u32 kCount = kRows / kStep;

    u64 first;  // element of cell 0
    u32 rows;   // cell i is inside if row + kStep * i is below this
    u32 row;    // lane / kLanes
    UW_DEVICE bool inside(u32 i) const { return row + kStep * i < rows; }
    // The first element of cell i.
    UW_DEVICE u64 element(const DecodeHuffmanArgs& args, u32 i) const {
        return first + static_cast<u64>(kStep * i) * args.k;
    }
};

template <u32 kWidth>
UW_DEVICE Cells<kWidth> cells(const DecodeHuffmanArgs& args, const Tile& t, u32 half, u32 tile_row, u32 lane) {
    constexpr u32 kLanes = Cells<kWidth>::kLanes;
    u32 column = (t.index - tile_row * args.tile_cols) * kTile + lane % kLanes * kWidth;
    u32 row = lane / kLanes, left = t.rows > half * kRows ? t.rows - half * kRows : 0;
    return {static_cast<u64>(tile_row * kTile + half * kRows + row) * args.k + column, column < args.k ? left : 0, row};
}

// Loads signs and fractions of the cells from `begin` on.
template <class Element>
UW_DEVICE void load_batch(const DecodeHuffmanArgs& args, const Cells<Element::kWidth>& part, u32 begin,
                          typename Element::Rest (&batch)[Element::kBatch]) {
    const elements::Fractions from = elements::fractions<Element>(args.sign_mantissa, args.n, args.k);
#pragma unroll
    for (u32 i = 0; i < Element::kBatch; ++i) {
        batch[i] = {};
        if (part.inside(begin + i)) batch[i] = Element::load(from, part.element(args, begin + i));
    }
}

// The exponents of a verbatim row of a half.
UW_DEVICE const u8* verbatim_row(const DecodeHuffmanArgs& args, const Tile& t, u32 half, u32 row) {
    u32 mask = half ? t.metadata.verbatim_high : t.metadata.verbatim_low;
    u32 before = ptx::popc(mask & low_bits(row)) + (half ? ptx::popc(t.metadata.verbatim_low) : 0);
    return args.verbatim_exponents + (static_cast<u64>(t.metadata.verbatim_row_offset) + before) * kTile;
}

// Writes a half tile whose rows start at any element: one element per lane.
template <class Element, u32 kRowBytes>
UW_DEVICE void write_narrow(const DecodeHuffmanArgs& args, const Tile& t, u32 half, u32 tile_row, u32 output,
                            u32 lane) {
    u32 tile_col = t.index - tile_row * args.tile_cols;
    u32 mask = half ? t.metadata.verbatim_high : t.metadata.verbatim_low;
#pragma unroll 1
    for (u32 i = 0; i < kRows * 2; ++i) {
        u32 row = i / 2, column = i % 2 * 32 + lane;
        if (half * kRows + row >= t.rows || tile_col * kTile + column >= args.k) continue;
        u64 at = static_cast<u64>(tile_row * kTile + half * kRows + row) * args.k + tile_col * kTile + column;
        const u8* exponent = verbatim_row(args, t, half, row) + column;
        if ((mask >> row & 1) == 0) {
            u32 pair = ptx::ld_shared_u8(output + piece<kRowBytes>(row, column / 32) + column % 32 / 2);
            exponent = args.palette + (pair >> column % 2 * 4 & 15);
        }
        u32 e = ptx::ld_global_nc_u8(exponent);
        u32 rest = elements::rest_of<Element>(elements::fractions<Element>(args.sign_mantissa, args.n, args.k), at);
        elements::store_one<Element>(args.output, at, rest, e);
    }
}

// Loads the palette indices of a cell, four bits each.
template <u32 kWidth>
UW_DEVICE auto load_indices(u32 address) {
    if constexpr (kWidth == 16) {
        return ptx::ld_shared_x2(address);
    } else if constexpr (kWidth == 8) {
        return ptx::ld_shared(address);
    } else {
        return ptx::ld_shared_u16(address);
    }
}

// Writes a half tile, up to 16 bytes per lane, from its indices and from the signs and fractions in `batch`, whose
// loads for the first cells are in flight.
template <class Element, u32 kRowBytes>
UW_DEVICE void write_wide(const DecodeHuffmanArgs& args, const Tile& t, u32 half, u32 tile_row, u32 output,
                          typename Element::Rest (&batch)[Element::kBatch], u32 palette, u32 lane) {
    using Part = Cells<Element::kWidth>;
    // Recomputed rather than kept: registers are short while a row is decoded.
    Part part = cells<Element::kWidth>(args, t, half, tile_row, lane);
    u32 mask = half ? t.metadata.verbatim_high : t.metadata.verbatim_low;
    typename Element::Table table(ptx::ld_shared_x4(palette));
    // A piece has 32 columns, two per byte. The swizzle repeats every 8 rows and changes every 4: kStep divides 4, or
    // is 8.
    constexpr u32 kLanes = 32 / Element::kWidth;  // lanes that share a piece
    u32 column = lane % Part::kLanes / kLanes, place = lane % kLanes * (Element::kWidth / 2);
    u32 from[2] = {output + piece<kRowBytes>(part.row, column) + place,
                   output + piece<kRowBytes>(part.row + 4, column) + place};
#pragma unroll
    for (u32 begin = 0; begin < Part::kCount; begin += Element::kBatch) {
        if (begin != 0) load_batch<Element>(args, part, begin, batch);
#pragma unroll
        for (u32 j = 0; j < Element::kBatch; ++j) {
            u32 i = begin + j, row = part.row + Part::kStep * i;
            u32 address = from[Part::kStep * i / 4 % 2] + (Part::kStep * i / 8 * 8 + Part::kStep * i % 4) * kRowBytes;
            const auto indices = load_indices<Element::kWidth>(address);
            auto v = Element::join(table, batch[j], part.element(args, i), indices);
            if (part.inside(i)) {
                if (mask >> row & 1) {
                    const u8* e = verbatim_row(args, t, half, row) + lane % Part::kLanes * Element::kWidth;
                    if constexpr (Element::kWidth == 16) {
                        v = Element::join(batch[j], part.element(args, i), ptx::ld_global_nc_x4(e));
                    } else if constexpr (Element::kWidth == 8) {
                        v = Element::join(batch[j], part.element(args, i), ptx::ld_global_nc_x2(e));
                    } else {
                        v = Element::join(batch[j], part.element(args, i), ptx::ld_global_nc(e));
                    }
                }
                u8* to = static_cast<u8*>(args.output) + part.element(args, i) * Element::kBytes;
                if constexpr (sizeof(v) == 16) {
                    ptx::st_global_x4(to, {v.word[0], v.word[1], v.word[2], v.word[3]});
                } else {
                    ptx::st_global_x2(to, {v.word[0], v.word[1]});
                }
            }
        }
    }
}

// Decodes a half tile whose bits are in `stage`, or in flight to it, and writes the result.
template <class Config, class Element>
UW_DEVICE void decode_half(const DecodeHuffmanArgs& args, const Tile& t, u32 half, u32 lane, u32 table, u32 palette,
                           u32 stage, u32 output, u32 barrier, u32& parity) {
    using Layout = Smem<Config>;
    using Table = typename Layout::Table;
    constexpr u32 kRowBytes = Layout::kRowBytes;
    constexpr u32 kPieces = kRowBytes / 16;

    u32 tile_row = 0;
    bool wide = false;
    [[maybe_unused]] typename Element::Rest batch[Element::kBatch];
    if constexpr (Config::kOutput == DecodeOutput::kFull) {
        tile_row = t.index / args.tile_cols;
        wide = args.k % Element::kWidth == 0;
        // In flight while the row is decoded.
        if (wide) load_batch<Element>(args, cells<Element::kWidth>(args, t, half, tile_row, lane), 0, batch);
    }

    if (half_bits(t, half) != 0) {
        if constexpr (kAsync<Config>) {
            // Each lane waits for its own copies of this half, then all meet; copies of the other half may be in
            // flight.
            ptx::cp_async_wait_group<kStages - 1>();
            ptx::bar_warp_sync();  // orders the copies of every lane before the warp's loads
        } else {
            ptx::mbarrier_wait_parity(barrier, parity >> half & 1);
            parity ^= 1u << half;
        }
        Reader<Table> reader;
        reader.open(stage, stage_bit(t, half), table, lane);
#pragma unroll 1
        for (u32 c = 0; c < kPieces; ++c) {
            U32x4 bytes = reader.sixteen_bytes();
            ptx::st_shared_x4(output + piece<kRowBytes>(lane, c), bytes);
        }
    }
    u32 mask = half ? t.metadata.verbatim_high : t.metadata.verbatim_low;
    bool verbatim = mask >> lane & 1, pad = half * kRows + lane >= t.rows;
    if (verbatim && !Table::kPalette) {
        const u8* source = verbatim_row(args, t, half, lane);
#pragma unroll
        for (u32 c = 0; c < kPieces; ++c)
            ptx::st_shared_x4(output + piece<kRowBytes>(lane, c), ptx::ld_global_nc_x4(source + 16 * c));
    } else if (verbatim || pad) {
#pragma unroll
        for (u32 c = 0; c < kPieces; ++c) ptx::st_shared_x4(output + piece<kRowBytes>(lane, c), U32x4{});
    }
    ptx::bar_warp_sync();  // orders the lanes' stores of rows before the loads of the whole warp

    if constexpr (Config::kOutput == DecodeOutput::kFull) {
        if (wide) {
            write_wide<Element, kRowBytes>(args, t, half, tile_row, output, batch, palette, lane);
        } else {
            write_narrow<Element, kRowBytes>(args, t, half, tile_row, output, lane);
        }
    } else {
        // The swizzle is the same 32 pieces later: one address each, and constant steps.
        u8* out =
            static_cast<u8*>(args.output) + (static_cast<u64>(t.index) * kTile + half * kRows) * kRowBytes + lane * 16;
        u32 from = output + piece<kRowBytes>(lane / kPieces, lane % kPieces);
#pragma unroll
        for (u32 i = 0; i < kPieces; ++i) ptx::st_global_x4(out + 512 * i, ptx::ld_shared_x4(from + 512 * i));
    }
    // The warp is about to overwrite the staging area, and the next copy the stage buffer.
    if constexpr (kAsync<Config>) {
        // The loads of the stage buffer precede the __syncwarp before the output is written, so copies that any lane
        // issues later follow them (ptx/async.cuh).
        ptx::bar_warp_sync();  // orders the loads of the staging area before its next stores
    } else {
        pipeline::release_to_copy_engine();
    }
}

template <class Config>
UW_DEVICE void run(const DecodeHuffmanArgs& args) {
    using Element = typename elements::Of<Config::kElement>::Type;
    using Layout = Smem<Config>;
    using Table = typename Layout::Table;

    u32 smem = ptx::cvta_to_shared(ptx::dynamic_smem());
    u32 thread = ptx::tid(), lane = thread % 32, warp = ptx::uniform_warp_index();
    u32 table = smem + Layout::kTable;
    u32 stage = smem + Layout::kStage + warp * kStages * kStageBytes;
    u32 output = smem + Layout::kOutput + warp * kRows * Layout::kRowBytes;
    u32 barriers = smem + Layout::kBarriers + warp * kStages * 8;
    u32 palette = smem + Layout::kScratch + kScratchPalette;

    u32 tiles = args.tile_rows * args.tile_cols, warps = ptx::nctaid() * Config::kWarps;
    // Adjacent tiles go to different blocks: the last, partial round then spreads over all SMs.
    u32 own = warp * ptx::nctaid() + ptx::ctaid(), round = 0;
    typename Table::Code code = Table::fetch(args.palette, args.code_lengths, lane);
    Work now = work(round, own, tiles, warps);
    Header header = load_header(args, now, lane);

    if (!kAsync<Config> && lane == 0) {
        for (u32 i = 0; i < kStages; ++i) ptx::mbarrier_init(barriers + 8 * i, 1);
        ptx::fence_mbarrier_init();
        // Makes the initialization visible to the async proxy, which updates the barriers.
        ptx::fence_proxy_async_shared();
    }
    if (Config::kOutput == DecodeOutput::kFull && thread == 0)
        ptx::st_shared_x4(palette, ptx::ld_global_nc_x4(args.palette));
    ptx::bar_warp_sync();  // orders the initialization of the mbarriers before the waits of other lanes

    Tile tile = prepare(args, header, now, lane);
    for (u32 half = 0; half < kStages; ++half) {
        fetch<kAsync<Config>>(args, tile, half, lane, stage + half * kStageBytes, barriers + 8 * half);
    }
    Work later = work(warps, own, tiles, warps);
    header = load_header(args, later, lane);

    Table::build(table, smem + Layout::kScratch, code, thread, kThreads<Config>);
    ptx::bar_sync();  // orders the table and the palette before every warp's lookups

    u32 parity = 0;  // bit h: phase of buffer h
#pragma unroll 1
    for (; round < tiles; round += warps) {
        Tile next = {};
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            u32 buffer = stage + half * kStageBytes, barrier = barriers + 8 * half;
            if (tile.halves >> half & 1) {
                decode_half<Config, Element>(args, tile, half, lane, table, palette, buffer, output, barrier, parity);
            }
            if (half == 0) {
                next = prepare(args, header, later, lane);
                later = work(round + 2 * warps, own, tiles, warps);
                header = load_header(args, later, lane);
            }
            fetch<kAsync<Config>>(args, next, half, lane, buffer, barrier);
        }
        tile = next;
    }
}

}  // namespace uw::decode_huffman
