// Embedding lookup: y[r] = table[ids[r]], the table bf16 [vocabulary, d] or packed (docs/format.md, A.9).
//
// Config (the axes of unweight-codegen/src/family/embed.rs)
//   EmbedSource kSource  kBf16, or kPacked, with which a model whose last linear shares the table needs no bf16 copy
//   bool kPdl            programmatic dependent launch: all global accesses follow griddepcontrol.wait, because the
//                        preceding kernel chooses the ids
//
// Launch: kBlockThreads threads, no shared memory, one block per row. d is a multiple of 8, for a packed table at most
// 64 * tile_cols; rows are 16-byte aligned.
//
// Roles and barriers: none. bf16: a thread copies 16 bytes at a time. Packed: a row is in four lanes of each of its row
// blocks, 4 x 16 bytes in each of 3 places, so a quad takes a tile column of 64 columns and patches only the escapes of
// these lanes.
//
// Safety   an id that is not a row gives zeros and is reported. Heads and lists may hold anything: a list is not read
//          past `escape_words`, nor past 1024 records.
// Bound    device memory; bytes per row: 4 * d, packed 5 * d and 4 per 64 columns.
#pragma once

#include "unweight/axes.cuh"
#include "unweight/encoding/weights.cuh"
#include "unweight/ptx/control.cuh"
#include "unweight/ptx/memory.cuh"

namespace uw::embed {

constexpr u32 kBlockThreads = 256;
template <class Config>
constexpr u32 kThreads = kBlockThreads;

template <class Config>
struct Smem {
    static constexpr u32 kBytes = 0;
};
constexpr u32 kChunk = 8;

UW_DEVICE void copy_row(const EmbedArgs& args, u32 id, u16* y) {
    const u16* const from = args.table + id * args.table_pitch;
    for (u32 column = ptx::tid() * kChunk; column < args.d; column += kBlockThreads * kChunk) {
        ptx::st_global_x4(y + column, ptx::ld_global_nc_x4(from + column));
    }
}

// Replaces the escapes of one lane.
UW_DEVICE void replace_escapes(const EmbedArgs& args, u32 head, u32 lane, packed::Operands& weights) {
    if ((head & packed::kListHead) == 0) {
        packed::patch(weights, packed::record_of_weight(head, args.base), lane);
        return;
    }
    const u32 index = head & ~packed::kListHead;
    if (index >= args.escape_words) return;
    const u32 words = args.escape_words - index, listed = ptx::ld_global_nc(args.escapes + index);
    const u32 count = listed < packed::kBlockElements ? listed : packed::kBlockElements;
#pragma unroll 1
    for (u32 i = 1; i <= count && i < words; ++i) {
        const u32 record = ptx::ld_global_nc(args.escapes + index + i);
        packed::patch(weights, packed::record_of_weight(record, args.base), lane);
    }
}

UW_DEVICE void unpack_row(const EmbedArgs& args, u32 id, u16* y) {
    const u32 part = ptx::tid() % 4, row = id % packed::kBlockRows;
    // In a row block, lane 4g + t holds rows g and g + 8.
    const u32 lane = row % 8 * 4 + part;
    const bool upper = row >= 8;
    const u32 bases = packed::pair_of_exponents(args.base);
    for (u32 column = ptx::tid() / 4; column < args.tile_cols; column += kBlockThreads / 4) {
        const u32 tile = id / packed::kTile * args.tile_cols + column;
        const u32 block = tile * packed::kTileBlocks + id % packed::kTile / packed::kBlockRows;
        const u32 head = ptx::ld_global_nc(args.escape_heads + block);
        const u8* const from = args.packed + static_cast<u64>(block) * packed::kBlockBytes + lane * 16;
        u32 words[12];
#pragma unroll
        for (u32 j = 0; j < 3; ++j) {
            const U32x4 v = ptx::ld_global_nc_x4(from + j * packed::kGroupBytes);
            words[4 * j + 0] = v.x;
            words[4 * j + 1] = v.y;
            words[4 * j + 2] = v.z;
            words[4 * j + 3] = v.w;
        }
        packed::Operands weights = packed::weights_of(words, bases);
        if (head != 0) replace_escapes(args, head, lane, weights);
#pragma unroll
        for (u32 i = 0; i < 2 * packed::kSteps; ++i) {
            // Pair i of a lane: one register is of row g, the next one of row g + 8.
            const u32 at = column * packed::kTile + i * 8 + part * 2;
            if (at < args.d) ptx::st_global(y + at, upper ? weights.p[2 * i + 1] : weights.p[2 * i]);
        }
    }
}

template <class Config>
UW_DEVICE void run(const EmbedArgs& args) {
    if constexpr (Config::kPdl) {
        ptx::griddepcontrol_launch_dependents();
        ptx::griddepcontrol_wait();
    }
    const u32 row = ptx::ctaid(), id = ptx::ld_global(args.ids + row);
    u16* const y = args.y + row * args.y_pitch;
    if (id >= args.vocabulary) {
        for (u32 column = ptx::tid() * kChunk; column < args.d; column += kBlockThreads * kChunk) {
            ptx::st_global_x4(y + column, {0, 0, 0, 0});
        }
        if (ptx::tid() == 0) ptx::st_global(args.fault, row + 1);
        return;
    }
    if constexpr (Config::kSource == EmbedSource::kPacked) {
        unpack_row(args, id, y);
    } else {
        copy_row(args, id, y);
    }
}

}  // namespace uw::embed
