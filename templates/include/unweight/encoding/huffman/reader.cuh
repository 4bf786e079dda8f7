// The bit reader of one row, which produces 64 symbols at a time.
//
// A lane owns a row. Two 32-bit words of its stream stay in registers; one funnel shift gives a window that is long
// enough for two lookups, so the words advance at most once per two lookups. No branch depends on the validity of the
// data: a damaged stream gives wrong symbols at the same speed, and reads at most 64 * 15 bits past the row's start.
#pragma once

#include "unweight/encoding/huffman/tables.cuh"

namespace uw::decode_huffman {

template <class Table>
struct Reader {
    u32 low, high;  // two consecutive words of the stream
    u32 position;   // bit of `low` at which the window starts, mod 32; higher bits are undefined
    u32 next;       // shared address of the word after `high`
    u32 table;
    u32 column;

    // `bit`: position of the row's first code, counted from shared address `stage`; at least 32.
    UW_DEVICE void open(u32 stage, u32 bit, u32 table_address, u32 lane) {
        table = table_address;
        column = Table::lane_column(lane);
        position = bit - Table::kShift;
        next = stage + position / 32 * 4;
        low = ptx::ld_shared(next);
        high = ptx::ld_shared(next + 4);
        next += 8;
    }

    // Two lookups.
    UW_DEVICE void two(u32& first, u32& second) {
        u32 window = ptx::shf_r_wrap(low, high, position);
        first = Table::lookup(table, column, window);
        // The shift amount is the entry's low five bits.
        second = Table::lookup(table, column, ptx::shf_r_wrap(window, 0, first));
        // The two counts (at most 30 together) stay below bit 6; the values above them do not interfere.
        u32 moved = position + first + second;
        if ((moved ^ position) & 32) {
            low = high;
            high = ptx::ld_shared(next);
            next += 4;
        }
        position = moved;
    }

    // The next 8 palette indices, the first in the lowest nibble.
    UW_DEVICE u32 eight_indices() {
        u32 pair[4];
        if constexpr (Table::kPair) {
            two(pair[0], pair[1]);
            two(pair[2], pair[3]);
        } else {
            for (u32 i = 0; i < 4; ++i) {
                u32 a, b;
                two(a, b);
                pair[i] = a + (b << 4);  // counts are at most 15, so 15 + 15 * 16 fits in byte 0
            }
        }
        return ptx::prmt(ptx::prmt(pair[0], pair[1], 0x0051), ptx::prmt(pair[2], pair[3], 0x0051), 0x5410);
    }

    // The next 4 exponents, the first in the lowest byte.
    UW_DEVICE u32 four_exponents() {
        u32 a, b, c, d;
        two(a, b);
        if constexpr (Table::kPair) return ptx::prmt(a, b, 0x6521);
        two(c, d);
        return ptx::prmt(ptx::prmt(a, b, 0x0051), ptx::prmt(c, d, 0x0051), 0x5410);
    }

    // The next 16 bytes of output.
    UW_DEVICE U32x4 sixteen_bytes() {
        U32x4 v;
        if constexpr (Table::kPalette) {
            v.x = eight_indices();
            v.y = eight_indices();
            v.z = eight_indices();
            v.w = eight_indices();
        } else {
            v.x = four_exponents();
            v.y = four_exponents();
            v.z = four_exponents();
            v.w = four_exponents();
        }
        return v;
    }
};

}  // namespace uw::decode_huffman
