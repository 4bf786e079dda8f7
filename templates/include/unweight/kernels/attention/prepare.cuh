// Preparation of one head for decode attention: norms as Config::kPlusOne selects, and heads of more than two words per
// lane.
#pragma once

#include "unweight/activation/element.cuh"
#include "unweight/kernels/rope.cuh"

namespace uw::attention::decode {

template <class Config>
UW_DEVICE u32 scale_norm(u32 x, u32 gamma, float scale) {
    return Config::kPlusOne ? activation::scale_norm_plus_one(x, gamma, scale)
                            : activation::scale_norm(x, gamma, scale);
}

// Prepares head `head` of a row of QKV by a warp: bias, norm (`gamma`, or null) and rotation. Results go to
// `store(word, value)`.
template <class Config, class Store>
UW_DEVICE void prepare_large(const AttentionArgs& args, u32 row, u32 position, u32 head, const u16* gamma, bool rotate,
                             Store store) {
    using Head = rope::Head<Config>;
    const Head own(args);
    const u64 at = u64(head) * Config::kHeadDim;
    typename Head::Words x = own.load(args.qkv + row * args.qkv_pitch + at), angles;
    if (args.bias != nullptr) own.add_bias(x, args.bias + at);
    // With kSoftcap, `eps` is the factor of the scores, and there are no norms.
    if (!Config::kSoftcap && gamma != nullptr) own.norm(x, own.constants(gamma), args.eps);
    if (rotate) {
        const u64 row_at = u64(position) * (args.rope_dim / 2);
#pragma unroll
        for (u32 i = 0; i < Head::kPieces; ++i) {
            const bool turned = own.pair(i) < own.turned;
            angles.first[i] = turned ? ptx::ld_global_nc(args.cosines + row_at + own.pair(i) * 2) : 0;
            angles.second[i] = turned ? ptx::ld_global_nc(args.sines + row_at + own.pair(i) * 2) : 0;
        }
        own.rotate(x, angles);
    }
    own.each(x, store);
}

}  // namespace uw::attention::decode
