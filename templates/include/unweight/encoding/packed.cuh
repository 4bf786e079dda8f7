// The packed encoding (docs/format.md, A.9) as a stream of A operands: 12 bytes decode to 8 bf16 with 9 integer
// operations.
//
//   tile 64x64 = 6144 B = 4 row blocks of 1536 B; a row block = 3 groups of 512 B; lane l owns 16 bytes of each group,
//   12 words in all. Step s (16 columns) is words 3s, 3s+1, 3s+2. P0..P2 have a word each; P3 is stored in bits 14..11
//   of their halves, which they do not use:
//
//     half    15    14..11       10..7    6..0
//             sign  P3's piece   nibble   mantissa
//     w0: P3 bits 10..7 (nibble)         w1: P3 bits 6..3         w2: P3 bits 15 and 2..0, rotated
//
// An operand has exponent 112 + nibble; the kernel multiplies the fp32 sum by 2^(base - 112) once.
#pragma once

#include "unweight/ptx/core.cuh"
#include "unweight/ptx/memory.cuh"

namespace uw::packed {

constexpr u32 kTile = 64;
constexpr u32 kStepColumns = 16;
constexpr u32 kSteps = kTile / kStepColumns;
constexpr u32 kBlockRows = 16;
constexpr u32 kBlockBytes = 1536;
constexpr u32 kTileBlocks = kTile / kBlockRows;
constexpr u32 kTileBytes = kTileBlocks * kBlockBytes;
constexpr u32 kGroupBytes = 512;  // one 16-byte group of every lane

// The A operand of one m16n8k16: {(g, 2t), (g+8, 2t), (g, 2t+8), (g+8, 2t+8)}, pairs along k.
struct Operand {
    u32 p[4];
};

// One lane's share of a row block.
struct PackedBlock {
    u32 words[12];

    // `block`: shared address of the row block.
    UW_DEVICE PackedBlock(u32 block, u32 lane) {
#pragma unroll
        for (u32 j = 0; j < 3; ++j) {
            const U32x4 v = ptx::ld_shared_x4(block + j * kGroupBytes + lane * 16);
            words[4 * j + 0] = v.x;
            words[4 * j + 1] = v.y;
            words[4 * j + 2] = v.z;
            words[4 * j + 3] = v.w;
        }
    }

    // The operand of step kStep: 3 LOP3 for P0..P2, 3 shifts and 3 LOP3 for P3.
    template <u32 kStep>
    UW_DEVICE Operand operand() const {
        constexpr u32 kOwn = 0x87FF87FFu;       // sign, nibble, mantissa
        constexpr u32 kExponent = 0x38003800u;  // 112 << 7
        const u32 w0 = words[3 * kStep], w1 = words[3 * kStep + 1], w2 = words[3 * kStep + 2];
        Operand a;
        a.p[0] = and_or(w0, kOwn, kExponent);
        a.p[1] = and_or(w1, kOwn, kExponent);
        a.p[2] = and_or(w2, kOwn, kExponent);
        a.p[3] = and_or(w0 >> 4, 0x07800780u, kExponent);
        a.p[3] |= (w1 >> 8) & 0x00780078u;
        a.p[3] |= ptx::shf_l_wrap(w2, w2, 4) & 0x80078007u;
        return a;
    }

private:
    // (a & b) | c as an explicit LOP3. From the expression, the compiler makes two instructions, because LOP3 takes one
    // immediate and this has two constants; a tile would cost 64 more instructions.
    UW_DEVICE static u32 and_or(u32 a, u32 b, u32 c) { return ptx::lop3<0xEA>(a, b, c); }
};

// The four operands of a row block of one tile.
struct Operands {
    u32 p[kSteps * 4];

    Operands() = default;
    UW_DEVICE explicit Operands(const PackedBlock& packed) {
        set<0>(packed);
        set<1>(packed);
        set<2>(packed);
        set<3>(packed);
    }

    // Decodes one of the four.
    template <u32 kStep>
    UW_DEVICE void set(const PackedBlock& packed) {
        const Operand a = packed.operand<kStep>();
#pragma unroll
        for (u32 r = 0; r < 4; ++r) p[4 * kStep + r] = a.p[r];
    }
};

}  // namespace uw::packed
