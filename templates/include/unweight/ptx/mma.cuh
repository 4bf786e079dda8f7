// Warp-level matrix instructions and their fragment loads.
#pragma once

#include "unweight/ptx/core.cuh"

#ifndef UW_CPU

namespace uw::ptx {

// d[16,8] += a[16,16] * b[16,8], bf16 operands, fp32 accumulation. Lane = 4g+t.
// a: {(g, 2t), (g+8, 2t), (g, 2t+8), (g+8, 2t+8)} pairs along k; b: {(2t, g), (2t+8, g)} pairs along k; d: (g, 2t), (g,
// 2t+1), (g+8, 2t), (g+8, 2t+1).
UW_DEVICE void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Loads four 8x8 matrices of 16-bit elements. Lane l gives the address of row l%8 of matrix l/8 and receives element
// pair (l/4, 2*(l%4)) of each.
UW_DEVICE U32x4 ldmatrix_x4(u32 row_address) {
    U32x4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(row_address)
                 : "memory");
    return v;
}
UW_DEVICE U32x4 ldmatrix_x4_trans(u32 row_address) {
    U32x4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(row_address)
                 : "memory");
    return v;
}
UW_DEVICE void stmatrix_x4(u32 row_address, U32x4 v) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(v.x),
                 "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
UW_DEVICE void stmatrix_x4_trans(u32 row_address, U32x4 v) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(v.x),
                 "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

}  // namespace uw::ptx

#endif  // UW_CPU
