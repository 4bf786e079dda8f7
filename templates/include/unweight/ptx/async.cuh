// Asynchronous copies by the threads themselves (cp.async): on every architecture from Ampere on.
//
// Copies belong to the issuing thread's groups (commit, then wait). A thread that has waited sees its own copies only:
// what other threads copied is there once they have waited, too, and all have met. Both addresses are multiples of 16.
// They go through the same unit as ordinary loads and stores of shared memory, so where readers and copiers have met
// (__syncwarp) a copy does not overtake their loads; the copy engine's do (pipeline/ring.cuh).
#pragma once

#include "unweight/ptx/core.cuh"

#ifndef UW_CPU

namespace uw::ptx {

// 16 bytes global -> shared; with `used` false zeros, and `source` is not read. Without a cache policy: of 13.0 and
// 13.1 ptxas may drop the createpolicy and keep what reads it, and a descriptor that was never written is an illegal
// instruction.
UW_DEVICE void cp_async_x4(u32 destination, const void* source, bool used = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(used ? 16u : 0u)
                 : "memory");
}
UW_DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but the newest kPending groups of this thread have landed.
template <u32 kPending>
UW_DEVICE void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace uw::ptx

#endif  // UW_CPU
