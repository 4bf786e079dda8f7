// Unpacks a packed tensor (docs/format.md A.9) to a BF16 matrix. n and k are multiples of 64. One kernel with PackArgs;
// Config is empty.
//
// threads  blocks/SM  grid                  dynamic smem  reads + writes, bytes per element
// 256      4          ceil(row blocks / 8)  0             1.5 + 2
//
// Bound    device memory.
//
// Roles    a warp takes a row block, the fragments of the A operand in 16 registers (encoding/row_block.cuh). No shared
//          memory, no barriers.
//
// Safety   for any bytes: a list never reads past `escape_words`; everything else is static.
#pragma once

#include "unweight/encoding/escapes.cuh"
#include "unweight/encoding/packed.cuh"
#include "unweight/encoding/row_block.cuh"
#include "unweight/encoding/weights.cuh"
#include "unweight/ptx/memory.cuh"

namespace uw::unpack {

using packed::Operands;

constexpr u32 kBlockThreads = 256, kWarps = kBlockThreads / 32;
template <class Config>
constexpr u32 kThreads = kBlockThreads;

template <class Config>
struct Smem {
    static constexpr u32 kBytes = 0;
};

// Replaces a row block's escapes by their weights. `Args` has escapes, escape_words and base.
template <class Args>
UW_DEVICE void restore_escapes(const Args& args, u32 head, u32 lane, Operands& weights) {
    const u32 records = packed::read_records(head, args.escapes, args.escape_words, lane);
    const u32 index = head & ~packed::kListHead, listed = ptx::shfl_sync_idx(records, 0);
    const u32 count = listed < packed::kBlockElements ? listed : packed::kBlockElements;
#pragma unroll 1
    for (u32 i = 1; i <= count; ++i) {
        u32 record = ptx::shfl_sync_idx(records, i % 32);
        if (i >= 32) {
            if (i >= args.escape_words - index) return;
            record = ptx::ld_global_nc(args.escapes + index + i);
        }
        packed::patch(weights, packed::record_of_weight(record, args.base), lane);
    }
}

template <class Config>
UW_DEVICE void run(const PackArgs& args) {
    const u32 lane = ptx::tid() % 32, block = ptx::ctaid() * kWarps + ptx::uniform_warp_index();
    const u32 bases = packed::pair_of_exponents(args.base);
    if (block >= row_block::count(args)) return;
    const u8* from = args.packed + static_cast<u64>(block) * packed::kBlockBytes + lane * 16;
    const u32 head = ptx::ld_global_nc(args.escape_heads + block);
    u32 words[12];
#pragma unroll
    for (u32 j = 0; j < 3; ++j) {
        const U32x4 v = ptx::ld_global_nc_x4(from + j * packed::kGroupBytes);
        words[4 * j + 0] = v.x;
        words[4 * j + 1] = v.y;
        words[4 * j + 2] = v.z;
        words[4 * j + 3] = v.w;
    }
    Operands weights = packed::weights_of(words, bases);
    if (head != 0) restore_escapes(args, head, lane, weights);
    row_block::store(args, row_block::Place(args, block, lane), weights);
}

}  // namespace uw::unpack
