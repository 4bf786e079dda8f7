// mbarrier objects: 8 bytes of shared memory that count arrivals and bytes in flight.
//
// A phase completes when all expected arrivals and all expected bytes have arrived. `wait_parity(b, p)` returns once
// the phase of parity p has completed. A new barrier is in phase 0, so a consumer starts with p = 0, and a producer
// that waits for an empty slot starts with p = 1, which returns at once.
#pragma once

#include "unweight/ptx/core.cuh"

#ifndef UW_CPU

namespace uw::ptx {

UW_DEVICE void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
UW_DEVICE void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives on the barrier of another block of the cluster (an address from mapa).
UW_DEVICE void mbarrier_arrive_cluster(u32 barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// One arrival that also expects `bytes` more bytes in this phase.
UW_DEVICE void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Expects bytes without arriving.
UW_DEVICE void mbarrier_expect_tx(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// May suspend the thread for a while; true once the phase of that parity has completed.
UW_DEVICE bool mbarrier_try_wait_parity(u32 barrier, u32 parity) {
    u32 done;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done != 0;
}
// try_wait with acquire at cluster scope, for barriers that other blocks arrive on.
UW_DEVICE bool mbarrier_try_wait_parity_cluster(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}
// Returns whether the phase has completed, without waiting.
UW_DEVICE bool mbarrier_test_wait_parity(u32 barrier, u32 parity) {
    u32 done;
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done != 0;
}

UW_DEVICE void mbarrier_wait_parity(u32 barrier, u32 parity) {
    while (!mbarrier_try_wait_parity(barrier, parity)) {}
}
UW_DEVICE void mbarrier_wait_parity_cluster(u32 barrier, u32 parity) {
    while (!mbarrier_try_wait_parity_cluster(barrier, parity)) {}
}

}  // namespace uw::ptx

#endif  // UW_CPU
