// Causal attention for a chunk of one sequence: m tokens from position `start` on. Their keys and values, and those of
// all earlier tokens, are already in the pages; queries come as `rope` writes them.
//
// Config (the axes of unweight-codegen/src/family/attention.rs)
//   u32  kHeadDim        16 * 1..8, or 256  elements of a head
//   u32  kWarps          warps of a block, 16 rows each; a row is a query, that is, a token and a head of the group
//   u32  kStages         slots of the block's ring, a page (64 tokens) each, half a page for heads of 256; at least 2
//   SmemCopy kCopy       kBulk: an elected lane issues bulk copies (TMA); kAsync: all threads issue 16-byte cp.async
//                        copies, without mbarriers
//   bool kSoftcap        scores become tanh(score * eps), and `scale` is cap * log2(e)
//   bool kPdl            programmatic dependent launch: nothing is read before griddepcontrol.wait, not even pages of
//                        earlier tokens, because the preceding kernel may have written them (another chunk)
//
// Launch: kThreads<Config> = 32 * kWarps threads, Smem<Config>::kBytes of dynamic shared memory, grid = ceil(m /
// tokens) * kv_heads, tokens = floor(kWarps * 16 / group). The last tokens of the chunk come first, because they attend
// to the most keys.
//
// Roles: none. A block processes `tokens` tokens with all query heads of one KV head's group, token by token. Warp 0
// copies K and V of a page (contiguous in memory) to the ring. Every warp multiplies each half of a slot with its own
// 16 rows (mma.m16n8k16), keeps their maxima, sums and O, and skips halves that none of its rows attends to. Sums
// follow the order of tokens: the bits of a row depend only on the tokens that it attends to and on where pages begin.
//
// kAsync: all warps copy a page, one cp.async group each, into the slot that every warp left before the block barrier.
//
// Barriers: full [kStages], 1 arrival + bytes of K and V; empty [kStages], one arrival per warp, after __syncwarp
// behind its last load from the slot. Warp 0 requests the next page of a slot halfway through the following page, when
// most warps have left the slot. The first and the last page contain tokens that no row may see: their values are
// zeroed in shared memory (0 * NaN would be NaN), followed by a block barrier.
//
// Shared memory = kStages * (256 * kHeadDim + 16), without the 16 for kAsync; heads of 256: 128 instead of 256.
// Global reads per block: 4 * kHeadDim bytes per token that it attends to, mostly from L2.
//
// Safety   for any numbers in the page table: tokens whose page number is not below `pages` are skipped, and
//          *fault = 1 + the block's first row. The host checks start + m against the table.
// Bound: tensor cores.
#pragma once

#include "unweight/axes.cuh"
#include "unweight/encoding/kv_page.cuh"
#include "unweight/kernels/attention/softmax.cuh"
#include "unweight/pipeline/ring.cuh"
#include "unweight/ptx/async.cuh"
#include "unweight/ptx/barrier.cuh"
#include "unweight/ptx/bulk.cuh"
#include "unweight/ptx/control.cuh"
#include "unweight/ptx/fence.cuh"
#include "unweight/ptx/mbarrier.cuh"
#include "unweight/ptx/memory.cuh"

namespace uw::attention::prefill {

constexpr u32 kStepTokens = 16;  // the k dimension of m16n8k16

template <class Config>
constexpr u32 kThreads = Config::kWarps * 32;

// Offsets of the sections in dynamic shared memory, and their total.
template <class Config>
struct Smem {
    static constexpr u32 kPageSlots = Config::kHeadDim > 128 ? 2 : 1;
    static constexpr u32 kTokens = kv::kPageTokens / kPageSlots;                      // of a slot
    static constexpr u32 kHalfBytes = kv::head_bytes(Config::kHeadDim) / kPageSlots;  // K of a slot, or V
    static constexpr u32 kSlotBytes = 2 * kHalfBytes;

    static constexpr u32 kRing = 0;
    static constexpr u32 kBarriers = Config::kStages * kSlotBytes;
    static constexpr u32 kBytes = kBarriers + (kAsync<Config> ? 0 : pipeline::Ring<Config::kStages>::kBarrierBytes);
};

template <class Config>
struct Kernel {
    using S = Smem<Config>;
    using Cursor = pipeline::Cursor<Config::kStages>;
    static constexpr u32 kHeadDim = Config::kHeadDim;
    static constexpr u32 kChunks = kHeadDim / 8;
    static constexpr u32 kTileTokens = S::kTokens / 2;  // tokens per call of compute()
    static constexpr u32 kStepBytes = kStepTokens * kHeadDim * 2;
    static constexpr u32 kSteps = kHeadDim / 16;
    static constexpr u32 kNoRow = ~0u;
    static_assert(kHeadDim % 16 == 0 && kHeadDim <= 256, "a warp keeps O of 16 rows");
    static_assert(Config::kStages >= 2, "a page is asked for while another is worked on");

    const AttentionArgs& args;
    const u32 shared, warp, lane;
    const pipeline::Ring<Config::kStages> ring;
    const u64 policy;
    const u32 kv_head;
    const u32 first_row, rows;          // the block's tokens, as rows of the chunk
    const u32 first_token, last_token;  // attended to by any row of the block
    const u32 first_slot, slots;
    const bool any_row;              // whether this warp has a row
    const u32 all_first, warp_last;  // first token that all rows of the warp see, last token that any of them sees
    const u32 warp_first, all_last;  // first token that any row sees, last token that all of them see
    u32 row[2];                      // tokens of this lane's two rows, as rows of the chunk
    Cursor load, use;
    u32 loaded = 0;
    Rows<kHeadDim> state;

    UW_DEVICE u32 first_of(u32 position) const {
        return args.window != 0 && position >= args.window ? position - args.window + 1 : 0;
    }
    UW_DEVICE Kernel(const AttentionArgs& a, u32 shared_address)
        : args(a),
          shared(shared_address),
          warp(ptx::uniform_warp_index()),
          lane(ptx::laneid()),
          ring{shared_address + S::kBarriers},
          policy(ptx::createpolicy_l2(L2::kEvictLast)),
          kv_head(ptx::ctaid() % a.kv_heads),
          first_row((ptx::nctaid() - 1 - ptx::ctaid()) / a.kv_heads * (Config::kWarps * kRows / a.group)),
          rows(a.m - first_row < Config::kWarps * kRows / a.group ? a.m - first_row : Config::kWarps * kRows / a.group),
          first_token(first_of(a.start + first_row)),
          last_token(a.start + first_row + rows - 1),
          first_slot(first_token / S::kTokens),
          slots(last_token / S::kTokens - first_slot + 1),
          any_row(warp * kRows / a.group < rows),
          all_first(first_of(last_of_warp())),
          warp_last(last_of_warp()),
          warp_first(first_of(first_of_warp())),
          all_last(first_of_warp()) {}

    // Positions of the first and the last token of the warp's rows.
    UW_DEVICE u32 first_of_warp() const { return args.start + first_row + warp * kRows / args.group; }
    UW_DEVICE u32 last_of_warp() const {
        const u32 token = (warp * kRows + kRows - 1) / args.group;
        return args.start + first_row + (token < rows ? token : rows - 1);
    }

    UW_DEVICE u32 key_slot(u32 slot) const { return shared + S::kRing + slot * S::kSlotBytes; }
    UW_DEVICE u32 value_slot(u32 slot) const { return key_slot(slot) + S::kHalfBytes; }

    // ---- load ------------------------------------------------------------------------------------------------------
    // The page of the block's slot `index`.
    UW_DEVICE u32 page_of(u32 index) const {
        if constexpr (S::kPageSlots == 1) return ptx::ld_global(args.page_table + first_slot + index);
        return ptx::ld_global(args.page_table + (first_slot + index) / S::kPageSlots);
    }
    // K of slot `index` in its page.
    UW_DEVICE const u16* keys_of(u32 page, u32 index) const {
        return args.layer + kv::head_element(kHeadDim, args.kv_heads, page, kv_head, kKey) +
               (first_slot + index) % S::kPageSlots * (S::kHalfBytes / 2);
    }
    // Element offset from there of byte `at` of a slot: V of a KV head follows K in a page, and in a slot.
    UW_DEVICE static u32 element_of(u32 at) {
        if constexpr (S::kPageSlots == 1) return at / 2;
        return at / S::kHalfBytes * (kv::kPageTokens * kHeadDim) + at % S::kHalfBytes / 2;
    }
    // kAsync, all warps: copies the next page into the slot that every warp has left.
    UW_DEVICE void copy_next() {
        if (loaded < slots) {
            const u32 page = page_of(loaded);
            if (page < args.pages) {
                const u16* from = keys_of(page, loaded);
#pragma unroll 4
                for (u32 at = (warp * 32 + lane) * 16; at < S::kSlotBytes; at += kThreads<Config> * 16) {
                    ptx::cp_async_x4(key_slot(load.slot) + at, from + element_of(at));
                }
            } else if (warp == 0 && ptx::elect_sync()) {
                ptx::st_global(args.fault, 1 + first_row);
            }
            load.advance();
            ++loaded;
        }
        // An empty group is committed, too: cp_async_wait_group counts groups.
        ptx::cp_async_commit_group();
    }
    // Afterwards the next page is visible to all warps, and all warps have left the page before.
    UW_DEVICE void wait_full() const {
        if constexpr (kAsync<Config>) {
            // Waits for this thread's copies; the barrier adds those of all threads, and loads of the page before.
            ptx::cp_async_wait_group<Config::kStages - 2>();
            ptx::bar_sync();
        } else {
            ring.wait_full(use);
        }
    }
    // Warp 0: copies the next page into the slot that every warp has left.
    UW_DEVICE void load_next() {
        if (loaded == slots) return;
        const u32 page = page_of(loaded);
        if (ptx::elect_sync()) {
            ring.wait_empty(load);
            const u32 barrier = ring.full(load.slot);
            if (page < args.pages) {
                const u16* from = keys_of(page, loaded);
                constexpr u32 kRun = S::kPageSlots == 1 ? S::kSlotBytes : S::kHalfBytes;
                ptx::mbarrier_arrive_expect_tx(barrier, S::kSlotBytes);
#pragma unroll
                for (u32 at = 0; at < S::kSlotBytes; at += kRun) {
                    ptx::cp_async_bulk_load(key_slot(load.slot) + at, from + element_of(at), kRun, barrier, policy);
                }
            } else {
                // Complete the slot's phase without a copy.
                ptx::mbarrier_arrive(barrier);
                ptx::st_global(args.fault, 1 + first_row);
            }
        }
        ptx::bar_warp_sync();  // reconverges the warp; the slot's mbarriers order shared memory
        load.advance();
        ++loaded;
    }

    // ---- queries ---------------------------------------------------------------------------------------------------
    // Loads the queries from global memory as A operands: each lane has words of two rows.
    UW_DEVICE void load_rows(u32 (&q)[kSteps][4]) {
#pragma unroll
        for (u32 r = 0; r < 2; ++r) {
            const u32 of = warp * kRows + lane / 4 + 8 * r, token = of / args.group;
            const bool mine = token < rows;
            row[r] = mine ? first_row + token : kNoRow;
            const u16* from = args.qkv + (mine ? row[r] * args.qkv_pitch : 0) + head(r) * kHeadDim + lane % 4 * 2;
#pragma unroll
            for (u32 s = 0; s < kSteps; ++s) {
                q[s][r] = mine ? ptx::ld_global(from + s * 16) : 0;
                q[s][r + 2] = mine ? ptx::ld_global(from + s * 16 + 8) : 0;
            }
        }
    }
    // The query head of one of the lane's rows.
    UW_DEVICE u64 head(u32 r) const { return kv_head * args.group + (warp * kRows + lane / 4 + 8 * r) % args.group; }

    // ---- compute ---------------------------------------------------------------------------------------------------
    // All warps: zeroes the values of tokens that no row of the block sees.
    UW_DEVICE void clear_values(u32 first) const {
        for (u32 unit = warp * 32 + lane; unit < S::kTokens * kChunks; unit += kThreads<Config>) {
            const u32 token = unit / kChunks;
            if (first + token < first_token || first + token > last_token) {
                const u32 at = kv::chunk_offset(kHeadDim, token, unit % kChunks);
                ptx::st_shared_x4(value_slot(use.slot) + at, U32x4{0, 0, 0, 0});
            }
        }
        if constexpr (!kAsync<Config>)
            ptx::fence_proxy_async_shared();  // orders the stores before the copy that refills the slot
        ptx::bar_sync();                      // and before the loads of other warps
    }
    // Processes half a slot. Its first token is `first` of the sequence and `inside` of the slot.
    UW_DEVICE void compute(u32 first, u32 inside, const u32 (&q)[kSteps][4]) {
        if (first > warp_last || first + kTileTokens <= warp_first) return;
        constexpr u32 kColumns = kTileTokens / 8;
        const u32 keys = key_slot(use.slot) + inside * kHeadDim * 2, values = keys + S::kHalfBytes;
        float scores[kColumns][4];
        const Lines<kHeadDim> key_lines(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
        for (u32 step = 0; step < kTileTokens / kStepTokens; ++step) {
            score<kHeadDim>(scores[2 * step], scores[2 * step + 1], q, key_lines, keys + step * kStepBytes);
        }
        if constexpr (Config::kSoftcap) cap_scores(scores, args.eps);
        if (first < all_first || first + kTileTokens - 1 > all_last) {
#pragma unroll
            for (u32 r = 0; r < 2; ++r) {
                // A row without a query is never stored, so its mask does not matter.
                const u32 position = args.start + row[r], from = first_of(position);
#pragma unroll
                for (u32 i = 0; i < kColumns * 2; ++i) {
                    const u32 token = first + i / 2 * 8 + lane % 4 * 2 + i % 2;
                    if (token < from || token > position) scores[i / 2][i % 2 + 2 * r] = left_out();
                }
            }
        }
        u32 p[kColumns / 2][4];
        state.weigh(scores, args.scale, p);
        const Lines<kHeadDim> value_lines(lane % 16, lane / 16);
#pragma unroll
        for (u32 step = 0; step < kTileTokens / kStepTokens; ++step) {
#pragma unroll
            for (u32 s = 0; s < kSteps; ++s) {
                const U32x4 v = ptx::ldmatrix_x4_trans(value_lines.at(values + step * kStepBytes, s));
                const u32 even[2] = {v.x, v.y}, odd[2] = {v.z, v.w};
                ptx::mma_m16n8k16(state.o[2 * s], p[step], even);
                ptx::mma_m16n8k16(state.o[2 * s + 1], p[step], odd);
            }
        }
    }
    UW_DEVICE void store() {
        state.finish();
#pragma unroll
        for (u32 r = 0; r < 2; ++r) {
            if (row[r] == kNoRow) continue;
            const float inverse = state.sum[r] == 0.0f ? 0.0f : ptx::div(1.0f, state.sum[r]);
            u16* out = args.out + row[r] * args.out_pitch + head(r) * kHeadDim + lane % 4 * 2;
#pragma unroll
            for (u32 f = 0; f < Rows<kHeadDim>::kFragments; ++f) {
                const float low = state.o[f][2 * r] * inverse, high = state.o[f][2 * r + 1] * inverse;
                ptx::st_global(out + 8 * f, ptx::cvt_rn_bf16x2(low, high));
            }
        }
    }

    // ---- entry ------------------------------------------------------------------------------------------------------
    UW_DEVICE void run() {
        if constexpr (!kAsync<Config>) {
            if (warp == 0) {
                if (ptx::elect_sync()) {
                    ring.init(1, Config::kWarps);
                    ptx::fence_mbarrier_init();
                }
                ptx::bar_warp_sync();  // reconverges the warp for the block barrier
            }
            ptx::bar_sync();  // orders the initialization of the mbarriers before any wait
        }
        if constexpr (Config::kPdl) ptx::griddepcontrol_wait();
        if constexpr (kAsync<Config>) {
#pragma unroll
            for (u32 s = 0; s < Config::kStages - 1; ++s) copy_next();
        } else if (warp == 0) {
#pragma unroll
            for (u32 s = 0; s < Config::kStages; ++s) load_next();
        }
        u32 q[kSteps][4];
        load_rows(q);
        state.clear();
        for (u32 index = 0; index < slots; ++index) {
            const u32 first = (first_slot + index) * S::kTokens;
            const bool there = page_of(index) < args.pages;
            wait_full();
            if constexpr (kAsync<Config>) copy_next();
            if (there && (first < first_token || first + S::kTokens - 1 > last_token)) clear_values(first);
            if (there && any_row) compute(first, 0, q);
            // Refill the slot of the page before: few warps, if any, still read it.
            if (!kAsync<Config> && warp == 0 && index != 0) load_next();
            if (there && any_row) compute(first + kTileTokens, kTileTokens, q);
            if constexpr (!kAsync<Config>) {
                ptx::bar_warp_sync();  // orders every lane's loads before the warp's arrival
                if (ptx::elect_sync()) ring.release(use.slot);
            }
            use.advance();
        }
        store();
    }
};

template <class Config>
UW_DEVICE void run(const AttentionArgs& args) {
    if constexpr (Config::kPdl) ptx::griddepcontrol_launch_dependents();
    Kernel<Config> kernel(args, ptx::cvta_to_shared(ptx::dynamic_smem()));
    kernel.run();
}

}  // namespace uw::attention::prefill
