// A packed page of the KV cache: 64 tokens of one layer at 12 bits per element, with a record for K and for V of each
// KV head (docs/kv-cache.md). unweight-codegen/src/kv/packed.rs has the same sizes and the slow encoder and decoder.
//
//   pages     [page][kv_head][tile 0..4][K | V][24 * head_dim bytes]; a tile is 16 tokens
//   records   [page][kv_head][K | V][kRecordBytes]
//   units     [unit][tile 0..4][step][lane][P0..P3]: bf16 operands of K or V with too many escapes for its record
//
// The operand of a tile is in fragment order: for each step of 16 elements a lane has 3 words, which hold the quad
// P0..P3 of B operands for the tensor cores, with P3 in bits 14..11 of the others (encoding/packed.cuh). K: {P0, P1} is
// the operand of tokens 0-7 and {P2, P3} that of tokens 8-15, for QK^T. V: {P0, P1} is the operand of elements 0-7 and
// {P2, P3} that of elements 8-15 of the step, for PV.
//
// Exponents are not rebased: an element is sign, base + nibble, mantissa, with one base per step, that is, per 16
// channels of the unit. Elements with exponents below the window have nibble 0 and a slot in the record: element and
// exponent. An operand thus equals the bf16 that was packed, bit for bit, including zeros, subnormals, infinities and
// NaN.
#pragma once

#include "unweight/encoding/kv_page.cuh"
#include "unweight/ptx/core.cuh"
#include "unweight/ptx/memory.cuh"

namespace uw::kv {

constexpr u32 kTileTokens = 16;
constexpr u32 kPageTiles = kPageTokens / kTileTokens;

// Kinds of records.
constexpr u32 kPackedUnit = 0, kBf16Unit = 1, kLostUnit = 2;

constexpr u32 kBelow = 31;       // number of codes for exponents below the window
constexpr u32 kZeroCode = 31;    // the code of exponent 0
constexpr u32 kWindow = 16;      // exponents
constexpr u32 kRecordHead = 16;  // bytes before the slots

// Loads from shared memory, by address, and from global memory.
UW_DEVICE U32x4 load_x4(u32 shared) { return ptx::ld_shared_x4(shared); }
UW_DEVICE U32x4 load_x4(const u8* global) { return ptx::ld_global_x4(global); }
UW_DEVICE U32x2 load_x2(u32 shared) { return ptx::ld_shared_x2(shared); }
UW_DEVICE U32x2 load_x2(const u8* global) { return ptx::ld_global_x2(global); }
UW_DEVICE u32 load_x1(u32 shared) { return ptx::ld_shared(shared); }
UW_DEVICE u32 load_x1(const u8* global) { return ptx::ld_global(global); }

template <u32 kHeadDim>
struct Packed {
    static constexpr u32 kSteps = kHeadDim / 16;
    static constexpr u32 kWords = 3 * kSteps;            // per lane, for K or V of a tile
    static constexpr u32 kOperandBytes = 24 * kHeadDim;  // of K or V of a tile
    static constexpr u32 kTileBytes = 2 * kOperandBytes;
    static constexpr u32 kHeadBytes = kPageTiles * kTileBytes;  // of K and V of one KV head in a page
    static constexpr u32 kRecordBytes = kHeadDim <= 80 ? 32 : 48;
    static constexpr u32 kSlots = (kRecordBytes - kRecordHead) / 2;
    static constexpr u32 kUnitTileBytes = 32 * kHeadDim;
    static constexpr u32 kUnitBytes = kPageTiles * kUnitTileBytes;

    // A lane's words in groups of 16 bytes; the rest in one group of 8, of 4, or both.
    static constexpr u32 kGroups = kWords / 4, kRest = kWords % 4;
    static constexpr u32 kPair = kGroups * 512, kLast = kPair + (kRest >= 2 ? 256 : 0);

    // Index of the pair of records of a KV head in a page.
    UW_DEVICE static u64 head(u32 kv_heads, u32 page, u32 kv_head) { return u64(page) * kv_heads + kv_head; }

    // Address of the operands of a tile of a bf16 unit.
    template <class Byte>
    UW_DEVICE static Byte* unit_tile(Byte* unit_pages, u32 unit, u32 tile) {
        return unit_pages + u64(unit) * kUnitBytes + tile * kUnitTileBytes;
    }
    // Loads the quad of a step from there.
    UW_DEVICE static void unit_quad(u32 (&p)[4], const u8* tile, u32 step, u32 lane) {
        const U32x4 v = ptx::ld_global_x4(tile + step * 512 + lane * 16);
        p[0] = v.x;
        p[1] = v.y;
        p[2] = v.z;
        p[3] = v.w;
    }

    // Loads a lane's words, from shared or global memory.
    template <class Address>
    UW_DEVICE static void load(u32 (&words)[kWords], Address operand, u32 lane) {
#pragma unroll
        for (u32 j = 0; j < kGroups; ++j) {
            const U32x4 v = load_x4(operand + j * 512 + lane * 16);
            words[4 * j] = v.x;
            words[4 * j + 1] = v.y;
            words[4 * j + 2] = v.z;
            words[4 * j + 3] = v.w;
        }
        if constexpr (kRest >= 2) {
            const U32x2 v = load_x2(operand + kPair + lane * 8);
            words[4 * kGroups] = v.x;
            words[4 * kGroups + 1] = v.y;
        }
        if constexpr (kRest % 2 == 1) words[kWords - 1] = load_x1(operand + kLast + lane * 4);
    }
    UW_DEVICE static void store_global(u8* operand, const u32 (&words)[kWords], u32 lane) {
#pragma unroll
        for (u32 j = 0; j < kGroups; ++j) {
            const U32x4 v{words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3]};
            ptx::st_global_x4(operand + j * 512 + lane * 16, v);
        }
        if constexpr (kRest >= 2) {
            ptx::st_global_x2(operand + kPair + lane * 8, U32x2{words[4 * kGroups], words[4 * kGroups + 1]});
        }
        if constexpr (kRest % 2 == 1) ptx::st_global(operand + kLast + lane * 4, words[kWords - 1]);
    }

    // Decodes the quad of a step; `base`: Record::pair of the step. 13 integer operations for 8 elements, plus one for
    // the base.
    template <class Words>
    UW_DEVICE static void quad(u32 (&p)[4], const Words& words, u32 step, u32 base) {
        constexpr u32 kOwn = 0x87FF87FFu;  // sign, nibble, mantissa
        const u32 w0 = words[3 * step], w1 = words[3 * step + 1], w2 = words[3 * step + 2];
        p[0] = (w0 & kOwn) + base;
        p[1] = (w1 & kOwn) + base;
        p[2] = (w2 & kOwn) + base;
        u32 last = (w0 >> 4) & 0x07800780u;
        last |= (w1 >> 8) & 0x00780078u;
        last |= ptx::shf_l_wrap(w2, w2, 4) & 0x80078007u;
        p[3] = last + base;
    }
    // Packs a quad, whose halves are sign, nibble and mantissa, into three words.
    UW_DEVICE static void words_of(u32 (&words)[kWords], u32 step, const u32 (&f)[4]) {
        words[3 * step] = f[0] | ((f[3] << 4) & 0x78007800u);
        words[3 * step + 1] = f[1] | ((f[3] << 8) & 0x78007800u);
        words[3 * step + 2] = f[2] | (ptx::shf_r_wrap(f[3], f[3], 4) & 0x78007800u);
    }
};

// The first 16 bytes of a record.
struct Record {
    u32 bases[2];  // of steps 0-3 and 4-7, a byte each
    u32 word, ends;

    UW_DEVICE static Record of(U32x4 v) { return {{v.x, v.y}, v.z, v.w}; }
    UW_DEVICE static Record shared(u32 address) { return of(ptx::ld_shared_x4(address)); }
    UW_DEVICE static Record global(const u8* p) { return of(ptx::ld_global_x4(p)); }

    UW_DEVICE u32 base(u32 step) const { return bases[step / 4] >> (step % 4 * 8) & 255; }
    // The base in both halves of a word.
    UW_DEVICE u32 pair(u32 step) const { return base(step) * 0x00800080u; }
    UW_DEVICE u32 kind() const { return word & 255; }
    UW_DEVICE u32 unit() const { return ends; }
    // The slots of a tile are begin(tile)..end(tile), where end is clamped to `limit`.
    UW_DEVICE u32 begin(u32 tile) const { return tile == 0 ? 0 : ends >> (8 * tile - 8) & 255; }
    UW_DEVICE u32 end(u32 tile, u32 limit) const {
        const u32 end = ends >> (8 * tile) & 255;
        return end < limit ? end : limit;
    }
    // One byte per tile, which is 0 if the tile has no slots.
    UW_DEVICE u32 changes() const { return ends ^ ends << 8; }
    // The base of the step that a slot names, which may be past the steps of the head.
    UW_DEVICE u32 base_of(u32 slot) const {
        return ((slot & 1024) == 0 ? bases[0] : bases[1]) >> (slot >> 5 & 24) & 255;
    }
    UW_DEVICE u32 exponent(u32 slot) const {
        const u32 code = slot >> 11;
        return code == kZeroCode ? 0 : (base_of(slot) - kBelow + code) & 255;
    }
};

// Sets the exponent of a slot in a quad, if the slot's element is in this step and lane.
UW_DEVICE void patch(u32 (&p)[4], u32 slot, u32 step, u32 lane, const Record& record) {
    const u32 element = slot & 2047;
    if (element >> 3 != step * 32 + lane) return;
    const u32 shift = (element & 1) * 16, own = element >> 1 & 3;
    const u32 keep = ~(0x7F80u << shift), bits = record.exponent(slot) << (7 + shift);
    if (own == 0) p[0] = (p[0] & keep) | bits;
    if (own == 1) p[1] = (p[1] & keep) | bits;
    if (own == 2) p[2] = (p[2] & keep) | bits;
    if (own == 3) p[3] = (p[3] & keep) | bits;
}

// Zeroes the values of a tile's tokens before `token` in a quad: tokens 2t and 2t + 1, and those 8 later.
UW_DEVICE void clear_values_before(u32 (&v)[4], u32 token, u32 lane) {
#pragma unroll
    for (u32 r = 0; r < 4; ++r) {
        const u32 own = lane % 4 * 2 + r % 2 * 8;
        if (own < token) v[r] &= 0xffff0000u;
        if (own + 1 < token) v[r] = 0;
    }
}

// Escapes of a tile's K, or V. `steps`: the steps that have an escape, uniform over the warp. Per lane: the element of
// its escape, and the amount to add to its register.
struct Escapes {
    u32 steps = 0, element = ~0u, delta = 0;

    // Called by a warp. `slots`: shared address of the record's slots. Sets `clash` if a lane has several escapes.
    template <u32 kSlots>
    UW_DEVICE static Escapes of(const Record& record, u32 slots, u32 tile, u32 lane, bool& clash) {
        const u32 begin = record.begin(tile), end = record.end(tile, kSlots);
        // One slot per lane, loaded in parallel.
        const u32 listed = ptx::ld_shared_u16(slots + (lane < kSlots ? lane : 0) * 2);
        Escapes escapes;
        u32 own = 0;
#pragma unroll 1
        for (u32 i = begin; i < end; ++i) {
            const u32 slot = ptx::shfl_sync_idx(listed, i), element = slot & 2047;
            escapes.steps |= 1u << (element >> 8);
            if ((element >> 3 & 31) != lane) continue;
            clash |= escapes.element != ~0u;
            escapes.element = element;
            own = slot;
        }
        if (escapes.element != ~0u) {
            escapes.delta = record.exponent(own) - record.base_of(own) << (7 + (own & 1) * 16);
        }
        return escapes;
    }
    // Applies the escape to the quad of a step, which was decoded with the step's base.
    UW_DEVICE void apply(u32 (&p)[4], u32 step) const {
        if ((steps >> step & 1) == 0) return;
        const u32 own = (element >> 8 & 255) == step ? element >> 1 & 3 : 4;
#pragma unroll
        for (u32 r = 0; r < 4; ++r) p[r] += own == r ? delta : 0;
    }
};

}  // namespace uw::kv
