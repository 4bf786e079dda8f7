// GEMM for small batches from exponent bytes or palette indices as they are stored: Y[m, n] = X[m, k] * W[n, k]^T. It
// reads the operands of gemm_recon, and joins in registers what gemm_recon joins in shared memory: the *weight* is the
// A operand of mma.m16n8k16, the batch its n dimension, so a batch of 8 needs no padding.
//
// Order of k. A sum over k may take k in any order that W and X share. Lane 4g+t owns columns 16t..16t+15 of a tile: in
// step s, columns 16t+4s..16t+4s+3 are its pairs (2t, 2t+1) and (2t+8, 2t+9) of the instruction. So a lane reads 16
// bytes of sign-mantissa and 16 exponents (8 bytes of indices) of rows g and g+8 with one load each, and 32 bytes of a
// row of X with two; mma::join_exponents or mma::PaletteTable gives the operands without a shuffle.
//   bank conflicts: none. Loads of W are dense: lane l reads bytes 16l.. (8l..) of eight rows. Of X, a quarter warp
//   reads chunks 2t (then 2t+1) of rows g and g+1, which the 128-byte swizzle puts at 2t^g and 2t^(g+1): of both
//   parities, eight different ones.
//
// Config (the axes of unweight-codegen/src/family/gemm_join.rs)
//   JoinSource kSource     kExponent, or kPalette with any number of verbatim rows per tile
//   u32 kBatchTile         8, 16, 32 or 64 rows of X per cluster
//   u32 kRowBlocks         1..8     16-row blocks of a task: a warp holds their sums
//   u32 kWarps             1..32    split-K within a block: warp w takes tile columns w, w + kWarps * kCluster, ...
//   u32 kStages            1..      slots of each warp's private ring
//   u32 kCluster           1,2,4,8  blocks that split k among them; reduced through distributed shared memory
//   Epilogue kEpilogue     kStore or kStoreAdd
//
// Launch: kThreads<Config> = 32 * kWarps threads, Smem<Config>::kBytes of dynamic shared memory, clusters of kCluster
// blocks along x, m >= 1, grid = ceil(n / 16 / kRowBlocks) * ceil(m / kBatchTile) * kCluster. n is a multiple of 64, k
// of 64 and at least 64 * kCluster. Boxes of GemmReconArgs::x have kBatchTile rows, those of sign_mantissa
// 16 * kRowBlocks: a box per row block would be small for the copy engine.
//
// Roles: none. Every warp copies for itself. Per slot, an elected lane issues a box of X (128-byte swizzle, zeros past
// the batch), a box of sign-mantissa (zeros past n), and one bulk copy of exponents for each tile that the task spans.
// One step: wait | load X | per row block load W | refill the slot | join | replace verbatim rows | 4 * kBatchTile / 8
// mma.
// A lane holds the metadata of one of the warp's next 32 tiles. Verbatim rows are rare (one in two hundred) and are
// read from global memory, prefetched into L2.
//
// Barriers: full [kWarps][kStages], 1 arrival + bytes. A warp releases its own slots to the copy engine before it
// refills them (pipeline::WarpRing::release). One block (or cluster) barrier between writing and reading sums, and for
// clusters one more before exit.
//
// Order of sums: tile columns of a warp, then warps, then blocks of a cluster, whatever m, n and the grid are.
//
// Shared memory = kWarps * (align1024(kStages * (kBatchTile * 128 + kRowBlocks * (1024 + 1024 | 512))) + 8 * kStages).
//   A warp's sums (fp32 [batch][row]) overlay its own drained ring.
// Global reads per tile column: kRowBlocks * (2048 | 1536) + 128 * min(m, kBatchTile) (X: from L2 after the first), and
//   16 per tile and 64 per verbatim row.
//
// Bound: device memory, n * k * 2 bytes (exponents) or 1.5 (palette). Integer operations per weight: 1.5, or 2.625.
#pragma once

#include "unweight/axes.cuh"
#include "unweight/mma/reconstruct.cuh"
#include "unweight/pipeline/warp_ring.cuh"
#include "unweight/ptx/barrier.cuh"
#include "unweight/ptx/bulk.cuh"
#include "unweight/ptx/control.cuh"
#include "unweight/ptx/fence.cuh"
#include "unweight/ptx/mbarrier.cuh"
#include "unweight/ptx/memory.cuh"
#include "unweight/ptx/mma.cuh"
#include "unweight/smem/tile.cuh"

namespace uw::gemm_join {

constexpr u32 kTile = 64;  // rows and columns of a stored tile
constexpr u32 kBlockRows = 16;
constexpr u32 kTileBlocks = kTile / kBlockRows;
constexpr u32 kSteps = kTile / 16;
constexpr u32 kBatchFragment = 8;  // the n dimension of m16n8k16
constexpr u32 kLaneColumns = 16;   // columns of a tile that a lane owns

template <class Config>
constexpr u32 kThreads = Config::kWarps * 32;
template <class Config>
constexpr bool kPaletteSource = Config::kSource == JoinSource::kPalette;

// Offsets of the sections in dynamic shared memory, and their total.
template <class Config>
struct Smem {
    static constexpr u32 kRows = Config::kRowBlocks * kBlockRows;
    static constexpr u32 kSignBlockBytes = kBlockRows * kTile;
    static constexpr u32 kExponentBlockBytes = kPaletteSource<Config> ? kSignBlockBytes / 2 : kSignBlockBytes;
    static constexpr u32 kXBytes = Config::kBatchTile * smem::kSwizzleBytes;
    static constexpr u32 kSignBytes = Config::kRowBlocks * kSignBlockBytes;
    static constexpr u32 kExponentBytes = Config::kRowBlocks * kExponentBlockBytes;
    // One warp's ring: X of all stages, then sign-mantissa of all stages, then exponents of all stages.
    static constexpr u32 kRingSign = Config::kStages * kXBytes;
    static constexpr u32 kRingExponent = kRingSign + Config::kStages * kSignBytes;
    static constexpr u32 kRingBytes =
        (kRingExponent + Config::kStages * kExponentBytes + smem::kSwizzlePeriodBytes - 1) / smem::kSwizzlePeriodBytes *
        smem::kSwizzlePeriodBytes;
    static constexpr u32 kSumBytes = Config::kBatchTile * kRows * 4;

    static constexpr u32 kRings = 0;
    static constexpr u32 kSums = 0;
    static constexpr u32 kBarriers = Config::kWarps * kRingBytes;
    static constexpr u32 kBytes = kBarriers + Config::kWarps * Config::kStages * 8;

    static_assert(kXBytes % smem::kSwizzlePeriodBytes == 0, "swizzled tiles are 1024-byte aligned");
    static_assert(kSumBytes <= kRingBytes, "a warp's sums overlay its ring");
};

// The A operands of a row block in one tile column, [step][register].
struct Operands {
    u32 p[kSteps * 4];

    // Sets the weights of row g (kHalf = 0) or g + 8 (1) that a lane owns.
    template <u32 kHalf>
    UW_DEVICE void set(const mma::Bf16x16& w) {
        p[0 + kHalf] = w.low.x;
        p[2 + kHalf] = w.low.y;
        p[4 + kHalf] = w.low.z;
        p[6 + kHalf] = w.low.w;
        p[8 + kHalf] = w.high.x;
        p[10 + kHalf] = w.high.y;
        p[12 + kHalf] = w.high.z;
        p[14 + kHalf] = w.high.w;
    }
};

template <class Config>
struct Kernel {
    using S = Smem<Config>;
    static constexpr bool kPalette = kPaletteSource<Config>;
    static constexpr u32 kFragments = Config::kBatchTile / kBatchFragment;
    static constexpr u32 kKWarps = Config::kWarps * Config::kCluster;  // warps that split a task's k
    // Row blocks whose mma chains are interleaved. With four or more fragments, a single row block has enough
    // independent chains.
    static constexpr u32 kChains = Config::kRowBlocks > 1 && kFragments < 4 ? 2 : 1;
    static constexpr u32 kMetadataBatch = 32;  // tiles whose metadata a warp loads at once, one per lane
    // Tiles that a task's row blocks span at most: tasks of 1, 2, 4 and 8 are aligned.
    static constexpr bool kAligned = kTileBlocks % Config::kRowBlocks == 0 || Config::kRowBlocks % kTileBlocks == 0;
    static constexpr u32 kPieces =
        (Config::kRowBlocks + (kAligned ? kTileBlocks - 1 : 2 * kTileBlocks - 2)) / kTileBlocks;
    static_assert(Config::kBatchTile % kBatchFragment == 0, "a batch tile is made of fragments of 8");
    static_assert(Config::kRowBlocks >= 1 && Config::kRowBlocks <= 8, "a warp keeps the sums of up to 8 row blocks");
    static_assert(!kSiluMul<Config>, "a gate and its up are products of their own");

    // Clusters with the same weights are adjacent. The last task may have fewer row blocks.
    struct Share {
        u32 batch;  // first batch row
        u32 first, blocks;

        UW_DEVICE Share(const GemmReconArgs& a, u32 batch_tiles) {
            const u32 cluster = ptx::ctaid() / Config::kCluster, task = cluster / batch_tiles;
            batch = (cluster - task * batch_tiles) * Config::kBatchTile;
            first = task * Config::kRowBlocks;
            const u32 left = a.n / kBlockRows - first;
            blocks = left < Config::kRowBlocks ? left : Config::kRowBlocks;
        }
    };

    // A lane's share of a row block: rows g and g + 8.
    struct Staged {
        U32x4 sign_mantissa[2];
        U32x4 exponents[kPalette ? 1 : 2];
        U32x2 indices[kPalette ? 2 : 1];
    };

    // The part of a TileMetadata that the kernel needs.
    struct Verbatim {
        u32 offset, low, high;
    };
    // Of the warp's next kMetadataBatch tile columns, one per lane.
    struct Metadata {
        Verbatim tiles[kPalette ? kPieces : 1];
        u32 any;  // bit l: a tile of lane l has verbatim rows
    };

    const GemmReconArgs& args;
    const u32 shared, warp, lane;
    const u32 ring;
    const pipeline::WarpRing<Config::kStages, false> slots;
    const u32 batch_tiles;
    const Share share;
    const u64 x_policy, w_policy;

    u32 load_slot = 0, load_column;
    u32 slot = 0, parity = 0, column;

    float sums[Config::kRowBlocks][kFragments][4];

    UW_DEVICE Kernel(const GemmReconArgs& a, u32 shared_address)
        : args(a),
          shared(shared_address),
          warp(ptx::uniform_warp_index()),
          lane(ptx::laneid()),
          ring(shared_address + S::kRings + warp * S::kRingBytes),
          slots{shared_address + S::kBarriers + warp * Config::kStages * 8},
          batch_tiles((a.m + Config::kBatchTile - 1) / Config::kBatchTile),
          share(a, batch_tiles),
          x_policy(ptx::createpolicy_l2(L2::kEvictLast)),
          w_policy(ptx::createpolicy_l2(batch_tiles == 1 ? L2::kEvictFirst : L2::kNormal)) {
        column = load_column = Config::kCluster > 1 ? ptx::cluster_ctarank() * Config::kWarps + warp : warp;
    }

    UW_DEVICE u32 x_slot(u32 s) const { return ring + s * S::kXBytes; }
    UW_DEVICE u32 sign_slot(u32 s) const { return ring + S::kRingSign + s * S::kSignBytes; }
    UW_DEVICE u32 exponent_slot(u32 s) const { return ring + S::kRingExponent + s * S::kExponentBytes; }

    // ---- load ------------------------------------------------------------------------------------------------------
    // Called by one lane.
    UW_DEVICE void load_column_of_w(u32 barrier) const {
        ptx::tma_load_2d(sign_slot(load_slot), args.sign_mantissa, load_column * kTile, share.first * kBlockRows,
                         barrier, w_policy);
        // The exponents of row blocks of one tile are contiguous.
        u32 block = share.first, left = share.blocks, to = exponent_slot(load_slot);
#pragma unroll
        for (u32 i = 0; i < kPieces; ++i) {
            if (left == 0) break;
            const u32 inside = block % kTileBlocks, whole = kTileBlocks - inside, here = left < whole ? left : whole;
            const u64 tile = u64(block / kTileBlocks) * args.tile_cols + load_column;
            const u32 bytes = here * S::kExponentBlockBytes;
            ptx::cp_async_bulk_load(to, args.exponents + (tile * kTileBlocks + inside) * S::kExponentBlockBytes, bytes,
                                    barrier, w_policy);
            to += bytes;
            block += here;
            left -= here;
        }
    }

    // Called by a converged warp after all lanes have finished reading the slot.
    UW_DEVICE void load_next() {
        if (load_column >= args.tile_cols) return;
        if (ptx::elect_sync()) {
            const u32 barrier = slots.full(load_slot);
            ptx::mbarrier_arrive_expect_tx(barrier, S::kXBytes + S::kSignBytes + share.blocks * S::kExponentBlockBytes);
            ptx::tma_load_2d(x_slot(load_slot), args.x, load_column * kTile, share.batch, barrier, x_policy);
            load_column_of_w(barrier);
        }
        load_slot = load_slot + 1 == Config::kStages ? 0 : load_slot + 1;
        load_column += kKWarps;
    }

    UW_DEVICE void start() {
        slots.init();
#pragma unroll
        for (u32 s = 0; s < Config::kStages; ++s) load_next();
    }

    // ---- verbatim rows ---------------------------------------------------------------------------------------------
    UW_DEVICE void load_metadata(Metadata& metadata) const {
        const u32 mine = column + lane * kKWarps, first_tile = share.first / kTileBlocks;
        u32 has_rows = 0;
#pragma unroll
        for (u32 i = 0; i < kPieces; ++i) {
            Verbatim& v = metadata.tiles[i];
            v = {0, 0, 0};
            if (mine < args.tile_cols && (first_tile + i) * kTileBlocks < share.first + share.blocks) {
                const U32x4 word =
                    ptx::ld_global_nc_x4(args.tile_metadata + (u64(first_tile + i) * args.tile_cols + mine));
                v = {word.y, word.z, word.w};
            }
        }
#pragma unroll
        for (u32 i = 0; i < kPieces; ++i) {
            const Verbatim& v = metadata.tiles[i];
            has_rows |= v.low | v.high;
            if ((v.low | v.high) != 0 && v.offset < args.verbatim_rows)
                ptx::prefetch_global_l2(args.verbatim_exponents + u64(v.offset) * kTile);
        }
        metadata.any = ptx::vote_sync_ballot(has_rows != 0);
    }

    // The metadata of the tile of row block `place`, counted from the task's first tile, from the lane of the column.
    // Shuffled before it is selected: the compiler would index the tiles in local memory.
    UW_DEVICE static Verbatim verbatim_of(const Metadata& metadata, u32 turn, u32 place) {
        Verbatim found{0, 0, 0};
#pragma unroll
        for (u32 i = 0; i < kPieces; ++i) {
            const Verbatim& v = metadata.tiles[i];
            const Verbatim shuffled{ptx::shfl_sync_idx(v.offset, turn), ptx::shfl_sync_idx(v.low, turn),
                                    ptx::shfl_sync_idx(v.high, turn)};
            if (place / kTileBlocks == i) found = shuffled;
        }
        return found;
    }

    // Replaces the operands of verbatim rows. Indices are clamped to the section for any metadata.
    UW_DEVICE void replace(Operands& operands, const Staged& s, const Metadata& metadata, u32 turn, u32 b) const {
        const u32 place = share.first % kTileBlocks + b;
        const Verbatim v = verbatim_of(metadata, turn, place);
        const bool upper = place % kTileBlocks >= 2, odd = place % 2 != 0;
        const u32 word = upper ? v.high : v.low;
        const u32 bits = (odd ? word >> kBlockRows : word) & 0xffffu;
        if (bits == 0) return;
        const u32 before = (upper ? ptx::popc(v.low) : 0) + (odd ? ptx::popc(word & 0xffffu) : 0);
        const u32 stored = v.offset < args.verbatim_rows ? args.verbatim_rows - v.offset : 0;
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 row = lane / 4 + half * 8;
            const u32 index = before + ptx::popc(bits & ((1u << row) - 1));
            if ((bits >> row & 1) == 0 || index >= stored) continue;
            const u8* from = args.verbatim_exponents + (u64(v.offset) + index) * kTile + lane % 4 * kLaneColumns;
            const mma::Bf16x16 w = mma::join_exponents(s.sign_mantissa[half], ptx::ld_global_nc_x4(from));
            if (half == 0) operands.template set<0>(w);
            else operands.template set<1>(w);
        }
    }

    // ---- compute ---------------------------------------------------------------------------------------------------
    // Lane 4g+t: row g of each fragment, columns 16t..16t+15.
    UW_DEVICE void load_x_fragments(u32 (&x)[kFragments][kSteps][2]) const {
#pragma unroll
        for (u32 f = 0; f < kFragments; ++f) {
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const u32 row = f * kBatchFragment + lane / 4, chunk = lane % 4 * 2 + half;
                const U32x4 v =
                    ptx::ld_shared_x4(x_slot(slot) + smem::Bf16Tile<Config::kBatchTile>::offset(row, chunk));
                x[f][2 * half][0] = v.x;
                x[f][2 * half][1] = v.y;
                x[f][2 * half + 1][0] = v.z;
                x[f][2 * half + 1][1] = v.w;
            }
        }
    }

    UW_DEVICE Staged fetch(u32 b) const {
        Staged s;
        const u32 sign = sign_slot(slot) + b * S::kSignBlockBytes + lane * kLaneColumns;
        const u32 exponent =
            exponent_slot(slot) + b * S::kExponentBlockBytes + lane * (kPalette ? kLaneColumns / 2 : kLaneColumns);
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            s.sign_mantissa[half] = ptx::ld_shared_x4(sign + half * (S::kSignBlockBytes / 2));
            if constexpr (kPalette) {
                s.indices[half] = ptx::ld_shared_x2(exponent + half * (S::kExponentBlockBytes / 2));
            } else {
                s.exponents[half] = ptx::ld_shared_x4(exponent + half * (S::kExponentBlockBytes / 2));
            }
        }
        return s;
    }

    UW_DEVICE static Operands join(const Staged& s, const mma::PaletteTable& palette) {
        Operands operands;
        if constexpr (kPalette) {
            operands.template set<0>(palette.join(s.sign_mantissa[0], s.indices[0]));
            operands.template set<1>(palette.join(s.sign_mantissa[1], s.indices[1]));
        } else {
            operands.template set<0>(mma::join_exponents(s.sign_mantissa[0], s.exponents[0]));
            operands.template set<1>(mma::join_exponents(s.sign_mantissa[1], s.exponents[1]));
        }
        return operands;
    }

    // `turn`: index of the tile column in `metadata`. Two instantiations keep the common one free of branches among its
    // operands. A task with fewer than kRowBlocks row blocks multiplies stale data of the slot and discards the sums: a
    // branch would cost every task more than the multiply costs this one.
    template <bool kVerbatim>
    UW_DEVICE void compute_tile(const mma::PaletteTable& palette, const Metadata& metadata, u32 turn) {
        slots.wait(slot, parity);
        u32 x[kFragments][kSteps][2];
        load_x_fragments(x);
#pragma unroll
        for (u32 first = 0; first < Config::kRowBlocks; first += kChains) {
            Staged staged[kChains];
#pragma unroll
            for (u32 c = 0; c < kChains; ++c) {
                if (first + c < Config::kRowBlocks) staged[c] = fetch(first + c);
            }
            if (first + kChains >= Config::kRowBlocks) {
                // The slot's loads have been issued, but nothing has used their values yet, so they may still be in
                // flight.
                slots.release();
                load_next();
            }
            Operands operands[kChains];
#pragma unroll
            for (u32 c = 0; c < kChains; ++c) {
                if (first + c >= Config::kRowBlocks) break;
                operands[c] = join(staged[c], palette);
                if constexpr (kVerbatim) {
                    if (first + c < share.blocks) replace(operands[c], staged[c], metadata, turn, first + c);
                }
            }
#pragma unroll
            for (u32 s = 0; s < kSteps; ++s) {
#pragma unroll
                for (u32 c = 0; c < kChains; ++c) {
                    if (first + c >= Config::kRowBlocks) break;
                    const u32(&p)[kSteps * 4] = operands[c].p;
                    const u32 a[4] = {p[4 * s], p[4 * s + 1], p[4 * s + 2], p[4 * s + 3]};
#pragma unroll
                    for (u32 f = 0; f < kFragments; ++f) ptx::mma_m16n8k16(sums[first + c][f], a, x[f][s]);
                }
            }
        }
        slot = slot + 1 == Config::kStages ? 0 : slot + 1;
        parity ^= slot == 0;
    }

    UW_DEVICE void compute() {
        const mma::PaletteTable palette(kPalette ? ptx::ld_global_nc_x4(args.palette) : U32x4{0, 0, 0, 0});
        Metadata metadata;
        u32 turn = kMetadataBatch;
        for (; column < args.tile_cols; column += kKWarps) {
            if constexpr (kPalette) {
                if (turn == kMetadataBatch) {
                    load_metadata(metadata);
                    turn = 0;
                }
                if (metadata.any >> turn & 1) {
                    compute_tile<true>(palette, metadata, turn);
                } else {
                    compute_tile<false>(palette, metadata, turn);
                }
                ++turn;
            } else {
                compute_tile<false>(palette, metadata, turn);
            }
        }
    }

    // ---- reduce ----------------------------------------------------------------------------------------------------
    // Byte offset of (batch b, row r) in a warp's sums. Bits 3 and 4 of the word index are flipped so that a fragment's
    // (2t, g) stores hit 32 banks.
    UW_DEVICE static u32 sum_offset(u32 b, u32 r) { return ((b * S::kRows + r) ^ (b / 2 % 4 * 8)) * 4; }

    UW_DEVICE static void sync_cluster() {
        if constexpr (Config::kCluster > 1) {
            ptx::barrier_cluster_arrive();
            ptx::barrier_cluster_wait();
        } else {
            ptx::bar_sync();
        }
    }

    UW_DEVICE void store_sums(u32 valid) const {
        const u32 g = lane / 4, t = lane % 4;
#pragma unroll
        for (u32 f = 0; f < kFragments; ++f) {
            if (f * kBatchFragment >= valid) break;
#pragma unroll
            for (u32 b = 0; b < Config::kRowBlocks; ++b) {
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    const u32 row = b * kBlockRows + g + i / 2 * 8;
                    ptx::st_shared(ring + sum_offset(f * kBatchFragment + 2 * t + i % 2, row),
                                   ptx::bits_from_float(sums[b][f][i]));
                }
            }
        }
    }

    UW_DEVICE void reduce() const {
        const u32 left = args.m - share.batch;
        const u32 valid = left < Config::kBatchTile ? left : Config::kBatchTile;
        store_sums(valid);
        sync_cluster();  // orders every warp's sums before the loads of its block and of its peers
        // Block `rank` of the cluster stores its share of the rows of Y^T, the last block possibly fewer. A unit of the
        // loop is two rows for one batch row.
        constexpr u32 kUnits = (S::kRows + 2 * Config::kCluster - 1) / (2 * Config::kCluster);
        const u32 rank = Config::kCluster > 1 ? ptx::cluster_ctarank() : 0;
        for (u32 unit = ptx::tid(); unit < valid * kUnits; unit += kThreads<Config>) {
            const u32 b = unit / kUnits, r = (rank * kUnits + unit % kUnits) * 2;
            if (r >= share.blocks * kBlockRows) continue;
            float low, high;
            total(b, r, low, high);
            u16* y = static_cast<u16*>(args.y) + u64(share.batch + b) * args.n + share.first * kBlockRows + r;
            if constexpr (kStoreAdd<Config>) {
                const u32 old = ptx::ld_global(y);
                low += ptx::float_from_bits(old << 16);
                high += ptx::float_from_bits(old & 0xffff0000u);
            }
            ptx::st_global(y, ptx::cvt_rn_bf16x2(low, high));
        }
    }

    // The total over all warps of the cluster for batch row b, rows r and r + 1 of the task.
    UW_DEVICE void total(u32 b, u32 r, float& low, float& high) const {
        const u32 offset = shared + S::kSums + sum_offset(b, r);
        low = high = 0.0f;
#pragma unroll
        for (u32 c = 0; c < Config::kCluster; ++c) {
            const u32 address = Config::kCluster > 1 ? ptx::mapa(offset, c) : offset;
#pragma unroll
            for (u32 w = 0; w < Config::kWarps; ++w) {
                const u32 from = address + w * S::kRingBytes;
                const U32x2 v = Config::kCluster > 1 ? ptx::ld_shared_cluster_x2(from) : ptx::ld_shared_x2(from);
                low += ptx::float_from_bits(v.x);
                high += ptx::float_from_bits(v.y);
            }
        }
    }

    // ---- entry ------------------------------------------------------------------------------------------------------
    UW_DEVICE void run() {
#pragma unroll
        for (u32 b = 0; b < Config::kRowBlocks; ++b) {
#pragma unroll
            for (u32 f = 0; f < kFragments; ++f) {
#pragma unroll
                for (u32 j = 0; j < 4; ++j) sums[b][f][j] = 0.0f;
            }
        }
        start();
        compute();
        reduce();
        // Peers may still be reading this block's sums.
        if constexpr (Config::kCluster > 1) sync_cluster();
    }
};

template <class Config>
UW_DEVICE void run(const GemmReconArgs& args) {
    Kernel<Config> kernel(args, ptx::cvta_to_shared(ptx::dynamic_smem()));
    kernel.run();
}

}  // namespace uw::gemm_join
