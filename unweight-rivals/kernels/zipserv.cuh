// ZipServ's TCA-TBE (docs/rivals.md): to bf16, and to products for small batches. n (`rows`) and k (`cols`) are
// multiples of 64.
//
//   decompress   weights[rows, cols]
//   gemm         y[batch, rows] = x[batch, cols] * W^T by mma.sync, or with `splits` above 1 fp32 sums for `reduce`
//   reduce       y = sum of the splits' sums, in their order
//
// Config
//   u32 kBatchTile  decompress: 0; gemm: rows of x that a block takes, 8 to 128; reduce: 0
//   u32 kStages     2: a block of weights is decoded while the next one comes; reduce: 0
//
// Grid      decompress: what fits the machine, a block takes every so many blocks of 64 x 64;
//           gemm: rows / 64 * splits, each its share of k; reduce: a thread for every element of y
// Roles     four warps, one a strip of 16 rows. A lane decodes a row of a tile of 8 x 8 at a time, 16 bytes.
// Smem      a stage: 8256 for what is coded of a block (signs and mantissas, then what is not of the window), and
//           128 * kBatchTile of x
// Barriers  cp.async groups of every thread, then all of the block, before a stage is read; all of the block (barrier
//           1) before it is filled again
// Bound     instructions, not bytes (docs/rivals.md).
//
// Safety    any bytes: a block is left out if its offsets leave the buffers, are not aligned, or span more than a block
//           can have; a strip, if its starts are not where the bitmaps lead. Both count in `faults`; in a product what
//           is left out is zero. First exponents of up to 249.
#pragma once

#include "unweight/mma/reconstruct.cuh"
#include "unweight/ptx/async.cuh"
#include "unweight/ptx/barrier.cuh"
#include "unweight/ptx/memory.cuh"
#include "unweight/ptx/mma.cuh"

namespace uw {

struct ZipservArgs {
    const u32* map0;
    const u32* map1;
    const u32* map2;
    const u8* sign_mantissa;
    const u16* full;
    const u32* blocks;
    const u32* strips;
    u16* weights;
    const u16* x;
    u16* y;
    float* sums;
    u32* faults;
    u32 high_bytes;
    u32 full_elements;
    u32 first;
    u32 rows;
    u32 cols;
    u32 batch;
    u32 splits;
    u32 reserved;
};

}  // namespace uw

namespace uw::zipserv {

constexpr u32 kBlock = 64, kWarps = 4, kTiles = 64, kStripTiles = kTiles / kWarps, kStripElements = 16 * kBlock;
// Fullest block: one of its elements in the window, padded to 16 bytes, and the others.
constexpr u32 kCodedBytes = 16 + 2 * kBlock * kBlock;
// With room for what a lane reads past its strip's last element.
constexpr u32 kCodedRoom = kCodedBytes + 48;

template <class Config>
constexpr u32 kThreads = 32 * kWarps;

template <class Config>
struct Smem {
    static constexpr u32 kStageBytes = kCodedRoom + Config::kBatchTile * kBlock * 2;
    static constexpr u32 kStages = 0, kBytes = Config::kStages * kStageBytes;
};

// Where a block's parts lie.
struct Extent {
    u32 high, full, high_end, full_end;

    UW_DEVICE u32 high_bytes() const { return high_end - high; }
    UW_DEVICE u32 full_elements() const { return full_end - full; }
    // Whether it can be copied as it says.
    UW_DEVICE bool is_sane(const ZipservArgs& args) const {
        return high <= high_end && high_end <= args.high_bytes && full <= full_end && full_end <= args.full_elements &&
               ((high | high_end) & 15) == 0 && ((full | full_end) & 7) == 0 && high_bytes() <= kBlock * kBlock &&
               full_elements() <= kBlock * kBlock && high_bytes() + 2 * full_elements() <= kCodedBytes;
    }
};

UW_DEVICE Extent load_extent(const ZipservArgs& args, u32 block) {
    const U32x2 begin = ptx::ld_global_nc_x2(args.blocks + 2 * block),
                end = ptx::ld_global_nc_x2(args.blocks + 2 * block + 2);
    return {begin.x, begin.y, end.x, end.y};
}

// Starts the copy of a block's coded bytes to a stage; what cannot be right is left out.
UW_DEVICE void copy_coded(const ZipservArgs& args, const Extent& extent, u32 stage) {
    if (!extent.is_sane(args)) return;
    const u32 thread = ptx::tid(), chunks = extent.high_bytes() / 16, fulls = extent.full_elements() / 8;
    for (u32 i = thread; i < chunks; i += 32 * kWarps) {
        ptx::cp_async_x4(stage + 16 * i, args.sign_mantissa + extent.high + 16 * i);
    }
    for (u32 i = thread; i < fulls; i += 32 * kWarps) {
        ptx::cp_async_x4(stage + extent.high_bytes() + 16 * i, args.full + extent.full + 8 * i);
    }
}

// A strip as it comes from memory: of lane l the words of its l-th half tile, and where the strip and the next one
// begin.
struct Words {
    u32 map0, map1, map2;
    U32x2 begin, end;
};

UW_DEVICE Words load_words(const ZipservArgs& args, u32 block, u32 strip, u32 lane) {
    const u64 at = (static_cast<u64>(block) * kTiles + strip * kStripTiles) * 2 + lane;
    const u32* begin = args.strips + (static_cast<u64>(block) * kWarps + strip) * 2;
    const U32x2 own = ptx::ld_global_nc_x2(begin);
    return {ptx::ld_global_nc(args.map0 + at), ptx::ld_global_nc(args.map1 + at), ptx::ld_global_nc(args.map2 + at),
            own, strip + 1 < kWarps ? ptx::ld_global_nc_x2(begin + 2) : U32x2{0, 0}};
}

// A strip that can be decoded.
struct Strip {
    u32 map0, map1, map2;
    u32 before;      // elements of the window before this lane's half tile
    u32 high, full;  // shared addresses of its first ones
    bool is_sane;    // the same in the whole warp
};

UW_DEVICE Strip make_strip(const ZipservArgs& args, const Words& words, const Extent& extent, u32 strip, u32 stage,
                           u32 lane) {
    const u32 own = ptx::popc(words.map0 | words.map1 | words.map2);
    u32 sum = own;
#pragma unroll
    for (u32 delta = 1; delta < 32; delta *= 2) {
        const u32 other = ptx::shfl_sync_up(sum, delta);
        if (lane >= delta) sum += other;
    }
    const u32 total = ptx::shfl_sync_idx(sum, 31);
    // The last strip ends where the block does, but for padding. A start beyond the block fails here, too: no sum is
    // above 2^32, as both are held to the block's extent first.
    bool sane = extent.is_sane(args) && words.begin.x <= extent.high_bytes() && words.begin.y <= extent.full_elements();
    u32 high_end = words.begin.x + total, full_end = words.begin.y + (kStripElements - total);
    if (strip + 1 == kWarps) {
        sane = sane && (high_end + 15) / 16 * 16 == extent.high_bytes() &&
               (full_end + 7) / 8 * 8 == extent.full_elements();
    } else {
        sane = sane && high_end == words.end.x && full_end == words.end.y;
        sane = sane && high_end <= extent.high_bytes() && full_end <= extent.full_elements();
    }
    if (strip == 0) sane = sane && (words.begin.x | words.begin.y) == 0;
    return {words.map0,
            words.map1,
            words.map2,
            sum - own,
            stage + words.begin.x,
            stage + extent.high_bytes() + 2 * words.begin.y,
            sane};
}

// Bit i of four to byte i. The copies of a bit that the product makes meet no other.
UW_DEVICE u32 spread_bytes(u32 bits) { return (bits & 15) * 0x204081u & 0x01010101u; }

// Four exponents from four codes, `any` of them of the window; others become `first`. Bytes neither carry nor borrow.
UW_DEVICE u32 four_exponents(u32 m0, u32 m1, u32 m2, u32 any, u32 first) {
    return (spread_bytes(m0) | spread_bytes(m1) << 1 | spread_bytes(m2) << 2) + first * 0x01010101u - spread_bytes(any);
}

// This lane's eight elements: a row of a tile of 8 x 8.
UW_DEVICE U32x4 decode_row(const Strip& strip, u32 first, u32 tile, u32 row) {
    const u32 half = 2 * tile + row / 4, shift = 8 * (row % 4);
    const u32 m0 = ptx::shfl_sync_idx(strip.map0, half), m1 = ptx::shfl_sync_idx(strip.map1, half),
              m2 = ptx::shfl_sync_idx(strip.map2, half);
    const u32 any = m0 | m1 | m2, index = ptx::shfl_sync_idx(strip.before, half) + ptx::popc(any & ((1u << shift) - 1));
    const u32 c0 = m0 >> shift, c1 = m1 >> shift, c2 = m2 >> shift, own = any >> shift;
    u64 exponents = static_cast<u64>(four_exponents(c0 >> 4, c1 >> 4, c2 >> 4, own >> 4, first)) << 32 |
                    four_exponents(c0, c1, c2, own, first);
    // Eight bytes from any byte of the window on, as if the window had all eight.
    const u32 from = strip.high + index, word = from & ~3u, turn = 8 * (from & 3), middle = ptx::ld_shared(word + 4);
    u64 rest = static_cast<u64>(ptx::shf_r_wrap(middle, ptx::ld_shared(word + 8), turn)) << 32 |
               ptx::shf_r_wrap(ptx::ld_shared(word), middle, turn);
    // What is not makes room for itself. Elements outside of the window that lie before this row come first.
    u32 others = strip.full + 2 * (32 * half + shift - index);
#pragma unroll 1
    for (u32 missing = ~own & 0xff; missing != 0; missing &= missing - 1) {
        const u32 at = 8 * ptx::popc((missing & -missing) - 1), element = ptx::ld_shared_u16(others);
        const u64 before = (1ull << at) - 1;
        rest =
            (rest & before) | (rest & ~before) << 8 | static_cast<u64>((element >> 8 & 0x80) | (element & 0x7f)) << at;
        exponents ^= static_cast<u64>((element >> 7 & 0xff) ^ first) << at;
        others += 2;
    }
    U32x4 weights;
    mma::join_exponents(static_cast<u32>(rest), static_cast<u32>(exponents), weights.x, weights.y);
    mma::join_exponents(static_cast<u32>(rest >> 32), static_cast<u32>(exponents >> 32), weights.z, weights.w);
    return weights;
}

UW_DEVICE void count_fault(const ZipservArgs& args, u32 lane) {
    if (lane == 0) ptx::red_add_global(args.faults, 1);
}

// All copies but those of the newest group have landed, of every thread.
UW_DEVICE void wait_for_stage() {
    ptx::cp_async_wait_group<1>();
    ptx::bar_sync();  // with the wait: orders every thread's copies before their reading by all
}

enum class NamedBarrier : u32 {
    kWarps = 1,
};

// Every warp has read a stage.
UW_DEVICE void release_stage() {
    ptx::bar_sync(NamedBarrier::kWarps, 32 * kWarps);  // orders the reading before the next copies to the stage
}

template <class Config>
UW_DEVICE void decompress(const ZipservArgs& args) {
    using S = Smem<Config>;
    const u32 smem = ptx::cvta_to_shared(ptx::dynamic_smem()), lane = ptx::tid() % 32, warp = ptx::uniform_warp_index();
    const u32 across = args.cols / kBlock, blocks = args.rows / kBlock * across, step = ptx::nctaid();
    const u32 last = blocks - 1;
    u32 block = ptx::ctaid(), stage = smem;
    if (block >= blocks) return;
    // One block ahead of the decoding the bytes, two ahead where they lie; behind the last block that is read again.
    auto within = [&](u32 b) { return b < blocks ? b : last; };
    Extent extent = load_extent(args, block), next = load_extent(args, within(block + step));
    Words words = load_words(args, block, warp, lane);
    copy_coded(args, extent, stage);
    ptx::cp_async_commit_group();
    for (; block < blocks; block += step) {
        const u32 other = smem + (stage == smem ? S::kStageBytes : 0);
        if (block + step < blocks) copy_coded(args, next, other);
        ptx::cp_async_commit_group();
        const Extent after = load_extent(args, within(block + 2 * step));
        const Words following = load_words(args, within(block + step), warp, lane);
        wait_for_stage();
        const Strip strip = make_strip(args, words, extent, warp, stage, lane);
        if (strip.is_sane) {
            // A lane has 8 neighbours in a row, eight lanes the 128 bytes of a row of the block.
            const u32 top = block / across * kBlock + warp * 16 + lane / 8,
                      left = block % across * kBlock + lane % 8 * 8;
            u16* to = args.weights + static_cast<u64>(top) * args.cols + left;
#pragma unroll 2
            for (u32 i = 0; i < 4; ++i) {
                // Rows of the strip's tiles: two tiles one above the other, eight of these pairs side by side.
                const u32 tile = lane % 8 * 2 + i / 2, row = i % 2 * 4 + lane / 8;
                ptx::st_global_cs_x4(to + static_cast<u64>(4 * i) * args.cols,
                                     decode_row(strip, args.first, tile, row));
            }
        } else {
            count_fault(args, lane);
        }
        release_stage();
        stage = other;
        extent = next;
        next = after;
        words = following;
    }
}

// Where 16 bytes of a row of x lie. Eight lanes read four neighbours of two rows, which so lie in eight groups of
// banks.
UW_DEVICE u32 x_place(u32 row, u32 chunk) { return row * 128 + (chunk ^ (row & 1) << 2) * 16; }

// Starts the copy of x[0..kBatchTile, 64 columns from `column` on], zeros behind the batch.
template <class Config>
UW_DEVICE void copy_x(const ZipservArgs& args, u32 column, u32 stage) {
    for (u32 i = ptx::tid(); i < Config::kBatchTile * 8; i += 32 * kWarps) {
        const u32 row = i / 8, chunk = i % 8;
        const bool used = row < args.batch;
        const u16* from = args.x + static_cast<u64>(used ? row : 0) * args.cols + column + chunk * 8;
        ptx::cp_async_x4(stage + kCodedRoom + x_place(row, chunk), from, used);
    }
}

template <class Config>
UW_DEVICE void gemm(const ZipservArgs& args) {
    using S = Smem<Config>;
    constexpr u32 kColumns = Config::kBatchTile / 8;
    const u32 smem = ptx::cvta_to_shared(ptx::dynamic_smem()), lane = ptx::tid() % 32, warp = ptx::uniform_warp_index();
    const u32 across = args.cols / kBlock, row_block = ptx::ctaid() / args.splits, split = ptx::ctaid() % args.splits;
    // Shares of k differ by a block at most; `across` is below 2^25, splits below 2^7.
    const u32 first = across * split / args.splits, end = across * (split + 1) / args.splits, base = row_block * across;
    float sums[kColumns][4] = {};
    if (first < end) {
        auto within = [&](u32 b) { return b < end ? b : end - 1; };
        u32 stage = smem;
        Extent extent = load_extent(args, base + first), next = load_extent(args, base + within(first + 1));
        Words words = load_words(args, base + first, warp, lane);
        copy_coded(args, extent, stage);
        copy_x<Config>(args, first * kBlock, stage);
        ptx::cp_async_commit_group();
        for (u32 at = first; at < end; ++at) {
            const u32 other = smem + (stage == smem ? S::kStageBytes : 0);
            if (at + 1 < end) {
                copy_coded(args, next, other);
                copy_x<Config>(args, (at + 1) * kBlock, other);
            }
            ptx::cp_async_commit_group();
            const Extent after = load_extent(args, base + within(at + 2));
            const Words following = load_words(args, base + within(at + 1), warp, lane);
            wait_for_stage();
            const Strip strip = make_strip(args, words, extent, warp, stage, lane);
            if (strip.is_sane) {
#pragma unroll
                for (u32 side = 0; side < 2; ++side) {
                    // Lane 4 g + t has columns 8 t .. 8 t + 8 of 32, of rows g and g + 8. mma takes two and two of
                    // them per 16: which ones does not matter, as long as x has the same.
                    const u32 chunk = side * 4 + lane % 4;
                    const U32x4 top = decode_row(strip, args.first, 2 * chunk, lane / 4);
                    const U32x4 bottom = decode_row(strip, args.first, 2 * chunk + 1, lane / 4);
                    const u32 weights[2][4] = {{top.x, bottom.x, top.y, bottom.y}, {top.z, bottom.z, top.w, bottom.w}};
#pragma unroll
                    for (u32 c = 0; c < kColumns; ++c) {
                        const U32x4 x = ptx::ld_shared_x4(stage + kCodedRoom + x_place(c * 8 + lane / 4, chunk));
                        const u32 low[2] = {x.x, x.y}, high[2] = {x.z, x.w};
                        ptx::mma_m16n8k16(sums[c], weights[0], low);
                        ptx::mma_m16n8k16(sums[c], weights[1], high);
                    }
                }
            } else {
                count_fault(args, lane);
            }
            release_stage();
            stage = other;
            extent = next;
            next = after;
            words = following;
        }
    }
    // Lane 4 g + t has rows g and g + 8 of the strip, batch rows 2 t and 2 t + 1 of each eight.
    const u32 row = row_block * kBlock + warp * 16 + lane / 4;
#pragma unroll
    for (u32 c = 0; c < kColumns; ++c) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const u32 batch = c * 8 + lane % 4 * 2 + i % 2;
            if (batch >= args.batch) continue;
            const u64 at = static_cast<u64>(batch) * args.rows + row + i / 2 * 8;
            if (args.splits == 1) {
                ptx::st_global_u16(args.y + at, ptx::cvt_rn_bf16x2(sums[c][i], 0.0f) & 0xffff);
            } else {
                float* to = args.sums + static_cast<u64>(split) * args.batch * args.rows + at;
                ptx::st_global(to, ptx::bits_from_float(sums[c][i]));
            }
        }
    }
}

template <class Config>
UW_DEVICE void reduce(const ZipservArgs& args) {
    const u64 count = static_cast<u64>(args.batch) * args.rows;
    const u64 at = static_cast<u64>(ptx::ctaid()) * kThreads<Config> + ptx::tid();
    if (at >= count) return;
    float sum = 0.0f;
    for (u32 split = 0; split < args.splits; ++split) {
        sum = ptx::add(sum, ptx::float_from_bits(ptx::ld_global(args.sums + split * count + at)));
    }
    ptx::st_global_u16(args.y + at, ptx::cvt_rn_bf16x2(sum, 0.0f) & 0xffff);
}

}  // namespace uw::zipserv
