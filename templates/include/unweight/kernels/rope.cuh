// Prepares QKV for the attention of a chunk of one sequence: bf16 [m, (heads + 2 * kv_heads) * head_dim], tokens at
// positions start, start + 1, ... Q heads get bias, norm and rotation, in place. K heads get the same and V heads their
// bias; both are stored in the sequence's pages of the KV cache. Each step rounds to bf16 once.
//
// Config
//   u32  kHeadDim  a multiple of 16 up to 256
//   bool kAdjacent elements 2i and 2i + 1 are rotated together, instead of i and i + rope_dim / 2
//   bool kPlusOne  norms multiply by (1 + weight), and round once
//   bool kPdl      programmatic dependent launch: tables, norms and the page are read before griddepcontrol.wait, QKV
//                  after it
//
// Launch: kThreads threads, no shared memory, one block per token. Rows of QKV are 16-byte aligned.
//   rope_dim is a multiple of 4 up to kHeadDim: elements i and i + rope_dim / 2 are rotated together, and elements from
//   rope_dim on are unchanged; 0: all are. cosines and sines: [positions, rope_dim / 2]; kAdjacent: angles i and
//   i + rope_dim / 4 are adjacent.
//
// Roles: none. Warp w takes heads w, w + kWarps, ... of its token; what all heads share (angles, norms) is read once.
// Lane l has pairs l, l + 32, ... of words; the two words of a rotated pair are rotated together.
// Barriers: none; a warp sums its squares by butterfly, bit-identical in any batch.
//
// Safety   a page number outside the cache is not used: K and V of the token are dropped and reported.
// Bound    device memory, 4 * m * (heads + 2 * kv_heads) * head_dim bytes.
#pragma once

#include "unweight/activation/element.cuh"
#include "unweight/encoding/kv_page.cuh"
#include "unweight/ptx/control.cuh"
#include "unweight/ptx/memory.cuh"

namespace uw::rope {

constexpr u32 kWarps = 8;
template <class Config>
constexpr u32 kThreads = kWarps * 32;

template <class Config>
struct Smem {
    static constexpr u32 kBytes = 0;
};

// One head, processed by a warp; decode attention also uses it for single tokens (attention/decode.cuh).
template <class Config>
struct Head {
    static constexpr u32 kPairs = Config::kHeadDim / 4;       // pairs of words per head
    static constexpr u32 kPieces = (kPairs + 31) / 32;        // pairs of words per lane
    static constexpr u32 kWholeWords = Config::kHeadDim / 2;  // words per head

    // The words of one lane.
    struct Words {
        u32 first[kPieces], second[kPieces];
    };

    u32 lane, turned;  // `turned`: number of rotated pairs

    template <class Args>
    UW_DEVICE Head(const Args& args) : lane(ptx::tid() % 32), turned(args.rope_dim / 4) {}

    UW_DEVICE u32 pair(u32 piece) const { return lane + piece * 32; }
    UW_DEVICE bool has(u32 piece) const { return pair(piece) < kPairs; }
    // Words of a pair: half of rope_dim apart in a rotated pair; the other pairs take the first and the second half of
    // the rest.
    UW_DEVICE u32 first(u32 piece) const { return pair(piece) < turned ? pair(piece) : pair(piece) + turned; }
    UW_DEVICE u32 second(u32 piece) const { return pair(piece) < turned ? pair(piece) + turned : pair(piece) + kPairs; }

    // Loads values that are constant during a step.
    UW_DEVICE Words constants(const u16* from) const {
        Words words;
#pragma unroll
        for (u32 i = 0; i < kPieces; ++i) {
            words.first[i] = has(i) ? ptx::ld_global_nc(from + first(i) * 2) : 0;
            words.second[i] = has(i) ? ptx::ld_global_nc(from + second(i) * 2) : 0;
        }
        return words;
    }
    // Loads results of the preceding kernel; 0 past the end of the head.
    UW_DEVICE Words load(const u16* from) const {
        Words words;
#pragma unroll
        for (u32 i = 0; i < kPieces; ++i) {
            words.first[i] = has(i) ? ptx::ld_global(from + first(i) * 2) : 0;
            words.second[i] = has(i) ? ptx::ld_global(from + second(i) * 2) : 0;
        }
        return words;
    }

    UW_DEVICE void add_bias(Words& x, const u16* bias) const {
        const Words b = constants(bias);
#pragma unroll
        for (u32 i = 0; i < kPieces; ++i) {
            x.first[i] = activation::add_bias(x.first[i], b.first[i]);
            x.second[i] = activation::add_bias(x.second[i], b.second[i]);
        }
    }
    UW_DEVICE void norm(Words& x, const Words& gamma, float eps) const {
        float sum = 0;
#pragma unroll
        for (u32 i = 0; i < kPieces; ++i) {
            sum = activation::add_squares(activation::add_squares(sum, x.first[i]), x.second[i]);
        }
#pragma unroll
        for (u32 distance = 16; distance != 0; distance /= 2) {
            sum = ptx::add(sum, ptx::float_from_bits(ptx::shfl_sync_bfly(ptx::bits_from_float(sum), distance)));
        }
        const float scale = activation::norm_scale(sum, Config::kHeadDim, eps);
#pragma unroll
        for (u32 i = 0; i < kPieces; ++i) {
            if constexpr (Config::kPlusOne) {
                x.first[i] = activation::scale_norm_plus_one(x.first[i], gamma.first[i], scale);
                x.second[i] = activation::scale_norm_plus_one(x.second[i], gamma.second[i], scale);
            } else {
                x.first[i] = activation::scale_norm(x.first[i], gamma.first[i], scale);
                x.second[i] = activation::scale_norm(x.second[i], gamma.second[i], scale);
            }
        }
    }
    // angles: cosines in `first`, sines in `second`.
    UW_DEVICE void rotate(Words& x, const Words& angles) const {
#pragma unroll
        for (u32 i = 0; i < kPieces; ++i) {
            if (pair(i) >= turned) continue;
            if constexpr (Config::kAdjacent) {
                activation::rotate_adjacent(x.first[i], x.second[i], angles.first[i], angles.second[i]);
            } else {
                activation::rotate(x.first[i], x.second[i], angles.first[i], angles.second[i]);
            }
        }
    }

    UW_DEVICE void store(u16* to, const Words& x) const {
#pragma unroll
        for (u32 i = 0; i < kPieces; ++i) {
            if (!has(i)) continue;
            ptx::st_global(to + first(i) * 2, x.first[i]);
            ptx::st_global(to + second(i) * 2, x.second[i]);
        }
    }
    // Passes all words to `store(word, value)`.
    template <class Store>
    UW_DEVICE void each(const Words& x, Store store) const {
#pragma unroll
        for (u32 i = 0; i < kPieces; ++i) {
            if (!has(i)) continue;
            store(first(i), x.first[i]);
            store(second(i), x.second[i]);
        }
    }
    // Stores to a token of K or V of one head in a page.
    UW_DEVICE void store_page(u16* tile, u32 token, const Words& x) const {
        auto place = [&](u32 word) {
            return reinterpret_cast<u8*>(tile) + kv::chunk_offset(Config::kHeadDim, token, word / 4) + word % 4 * 4;
        };
#pragma unroll
        for (u32 i = 0; i < kPieces; ++i) {
            if (!has(i)) continue;
            ptx::st_global(place(first(i)), x.first[i]);
            ptx::st_global(place(second(i)), x.second[i]);
        }
    }
};

template <class Config>
UW_DEVICE void run(const RopeArgs& args) {
    using Words = typename Head<Config>::Words;
    if constexpr (Config::kPdl) ptx::griddepcontrol_launch_dependents();
    const Head<Config> own(args);
    const u32 row = ptx::ctaid(), position = args.start + row, warp = ptx::uniform_warp_index();

    Words angles;
    const u64 at = static_cast<u64>(position) * (args.rope_dim / 2);
#pragma unroll
    for (u32 i = 0; i < Head<Config>::kPieces; ++i) {
        const bool turned = own.pair(i) < own.turned;
        angles.first[i] = turned ? ptx::ld_global_nc(args.cosines + at + own.pair(i) * 2) : 0;
        angles.second[i] = turned ? ptx::ld_global_nc(args.sines + at + own.pair(i) * 2) : 0;
    }
    Words q_gamma{}, k_gamma{};
    if (args.q_norm != nullptr) q_gamma = own.constants(args.q_norm);
    if (args.k_norm != nullptr) k_gamma = own.constants(args.k_norm);
    const u32 page = ptx::ld_global_nc(args.pages + position / kv::kPageTokens), token = position % kv::kPageTokens;
    const bool paged = page < args.cache_pages;
    if constexpr (Config::kPdl) ptx::griddepcontrol_wait();

    if (!paged && ptx::tid() == 0) ptx::st_global(args.fault, row + 1);
    const u32 keys = args.heads + args.kv_heads;
    for (u32 head = warp; head < keys + args.kv_heads; head += kWarps) {
        u16* const at_head = args.qkv + row * args.pitch + head * Config::kHeadDim;
        Words x = own.load(at_head);
        if (args.bias != nullptr) own.add_bias(x, args.bias + head * Config::kHeadDim);
        if (head < args.heads) {
            if (args.q_norm != nullptr) own.norm(x, q_gamma, args.eps);
            own.rotate(x, angles);
            own.store(at_head, x);
            continue;
        }
        const bool value = head >= keys;
        if (!value) {
            if (args.k_norm != nullptr) own.norm(x, k_gamma, args.eps);
            own.rotate(x, angles);
        }
        const u32 kv_head = head - (value ? keys : args.heads);
        u16* const tile = args.cache + kv::head_element(Config::kHeadDim, args.kv_heads, page, kv_head, value);
        if (paged) own.store_page(tile, token, x);
    }
}

}  // namespace uw::rope
