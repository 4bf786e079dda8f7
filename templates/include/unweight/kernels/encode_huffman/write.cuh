// Stage write: bitstream and verbatim rows; see unweight/kernels/encode_huffman.cuh.
#pragma once

#include "unweight/kernels/encode_huffman/tiles.cuh"

namespace uw::encode_huffman {

// ORs up to 64 `bits` into a zeroed bitstream in shared memory. Adjacent lanes share words, so this uses atomics.
UW_DEVICE void put(u32 stream, u32 position, u64 bits) {
    u32 low = static_cast<u32>(bits), high = static_cast<u32>(bits >> 32), shift = position % 32;
    u32 address = stream + position / 32 * 4;
    u32 middle = ptx::shf_l_wrap(low, high, shift), last = ptx::shf_l_wrap(high, 0, shift);
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

// Codes of eight elements, at most 120 bits, in two pieces of at most 60 bits.
struct Codes {
    u64 left, right;
    u32 left_length, length;  // of `left`; of both
};

UW_DEVICE Codes codes_of(u32 table, const U32x4& v) {
    u32 length[4];
    u32 pairs[4] = {join_pair(table, v.x, length[0]), join_pair(table, v.y, length[1]),
                    join_pair(table, v.z, length[2]), join_pair(table, v.w, length[3])};
    u32 left = length[0] + length[1];
    return {pairs[0] | static_cast<u64>(pairs[1]) << length[0], pairs[2] | static_cast<u64>(pairs[3]) << length[2],
            left, left + length[2] + length[3]};
}

// The same for codes of at most 7 bits: four fit in a word. Words fill from the top, so one funnel shift both makes
// room and appends, without masks; the shift amount is the count's low five bits.
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
        // Bits of the entry above the code are shifted out: the count is the code's length.
        u32 count = e[i] >> 16;
        word = ptx::shf_r_wrap(word, e[i], count);
        length += count;
    }
    return word;
}

UW_DEVICE ShortCodes short_codes_of(u32 table, const U32x4& v) {
    u32 left_length, right_length;
    u32 left = join_four(table, v.x, v.y, left_length), right = join_four(table, v.z, v.w, right_length);
    // right >> (32 - right_length), and likewise left; correct even if no element has a code.
    u32 aligned = ptx::shf_l_wrap(right, 0, right_length), rest = ptx::shf_r_wrap(0, left, right_length);
    return {ptx::shf_r_wrap(left, aligned, right_length), rest, left_length + right_length};
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
    u32 last = ptx::shf_l_wrap(c.high, 0, end), middle = ptx::shf_l_wrap(c.low, c.high, end), first = c.low << end % 32;
    if (last != 0) ptx::red_or_shared(address, last);
    if (middle != 0) ptx::red_or_shared(address - 4, middle);
    if (first != 0) ptx::red_or_shared(address - 8, first);
}

// kShort: no code is longer than kShortCode.
template <bool kWide, bool kShort>
UW_DEVICE void write_of(const EncodeHuffmanArgs& args) {
    constexpr u32 kBatch = kBatchOf<kWide>;
    u32 table = ptx::cvta_to_shared(ptx::dynamic_smem());
    u32 thread = ptx::tid(), lane = thread % 32, warp = thread / 32, segment = lane % 8, group = lane / 8;
    u32 stream = table + 1024 + warp * kTileBufferWords * 4;
    using Coded = typename CodesOf<kShort>::Type;
    constexpr u32 kTogether = kBatch < 2 ? 1 : 2;
    // Without the palette index: code | length << 16.
    ptx::st_shared(table + 4 * thread, ptx::ld_global_nc(args.encode_table + thread) & 0xffffff);
    u32 pad = pad_pair(args);
    ptx::bar_sync();  // orders the table before every warp's lookups

    u32 tiles = args.tile_rows * args.tile_cols, stride = ptx::nctaid() * kTileWarps;
    for (u32 tile = ptx::ctaid() * kTileWarps + warp; tile < tiles; tile += stride) {
        TilePlace p = place(args, tile, lane);
        TileMetadata m = load_metadata(args, tile);
        const u8* lengths = args.row_lengths + static_cast<u64>(tile) * kTile + lane;
        // Rows `lane` and `lane + 32` in one scan, as in the decoder.
        u32 low = lane < p.rows && !is_verbatim(m, lane) ? ptx::ld_global_nc_u8(lengths) + kRowBitsMin : 0;
        u32 high =
            lane + 32 < p.rows && !is_verbatim(m, lane + 32) ? ptx::ld_global_nc_u8(lengths + 32) + kRowBitsMin : 0;
        u32 own = low | high << 16, sum = own;
#pragma unroll
        for (u32 delta = 1; delta < 32; delta *= 2) {
            u32 below = ptx::shfl_sync_up(sum, delta);
            sum += lane >= delta ? below : 0;
        }
        u32 total = ptx::shfl_sync_idx(sum, 31), begins = sum - own + (total << 16);
        u32 words = ((total & 0xffff) + (total >> 16) + 31) / 32;
        bool words_ok = static_cast<u64>(m.start_word) + words <= args.capacity_words;
        if (!words_ok && lane == 0) ptx::red_max_global_u64(args.totals + 3, 1);

        for (u32 at = lane * 4; at < words; at += 128) ptx::st_shared_x4(stream + at * 4, U32x4{});
        ptx::bar_warp_sync();  // orders the zeros before the bits that any lane adds
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
                    u32 below = ptx::shfl_sync_up(before, delta);
                    before += segment >= delta ? below : 0;
                }
#pragma unroll
                for (u32 j = 0; j < kTogether; ++j) {
                    u32 row = (batch * kBatch + i + j) * 4 + group;
                    u32 begin = ptx::shfl_sync_idx(begins, row % 32);
                    begin = row >= 32 ? begin >> 16 : begin & 0xffff;
                    u32 end = begin + (before >> 16 * j & 0xffff);
                    if (row >= p.rows) {
                        // A pad row has no bits.
                    } else if (is_verbatim(m, row)) {
                        // Rare: the record is reloaded rather than kept in registers.
                        TileMetadata again = load_metadata(args, tile);
                        if (rows_fit(args, again, segment)) store_verbatim(args, p, again, row, segment, v[i + j]);
                    } else if constexpr (kShort) {
                        put_before(stream, end, codes[j]);
                    } else if (codes[j].length <= 64) {
                        put(stream, end - codes[j].length,
                            codes[j].left | (codes[j].left_length < 64 ? codes[j].right << codes[j].left_length : 0));
                    } else {
                        put(stream, end - codes[j].length, codes[j].left);
                        put(stream, end - codes[j].length + codes[j].left_length, codes[j].right);
                    }
                }
            }
        }
        ptx::bar_warp_sync();  // orders the bits of every lane before the copy
        if (words_ok) {
            u32* out = args.encoded_exp + load_metadata(args, tile).start_word;
            for (u32 at = lane; at < words; at += 32) ptx::st_global(out + at, ptx::ld_shared(stream + at * 4));
            // The section is padded to 16 bytes (docs/format.md A.6).
            u32 pads = 0 - (m.start_word + words) & 3;
            if (tile == tiles - 1 && lane < pads &&
                m.start_word + static_cast<u64>(words) + lane < args.capacity_words) {
                ptx::st_global(out + words + lane, 0);
            }
        }
        ptx::bar_warp_sync();  // orders the copy's loads before the zeros of the next tile
    }
}

UW_DEVICE void write(const EncodeHuffmanArgs& args) {
    bool wide = args.k % 8 == 0, is_short = args.code_limit <= kShortCode;
    if (wide && is_short) {
        write_of<true, true>(args);
    } else if (wide) {
        write_of<true, false>(args);
    } else {
        write_of<false, false>(args);
    }
}

}  // namespace uw::encode_huffman
