// cp.async: asynchronous copies by the threads themselves, available from Ampere on.
//
// Copies belong to the issuing thread's groups (commit, then wait). A thread that has waited sees only its own copies;
// those of other threads are visible after they have waited, too, and all have met at a barrier. Both addresses are
// multiples of 16. cp.async uses the generic proxy, so after readers and copiers have met (__syncwarp) a copy does not
// overtake their loads; bulk copies can (pipeline/ring.cuh).
#pragma once

#include "unweight/ptx/core.cuh"

#ifndef UW_CPU

namespace uw::ptx {

// Copies 16 bytes, global -> shared. If `used` is false it writes zeros, and `source` is not read. No cache policy:
// ptxas 13.0 and 13.1 may drop the createpolicy but keep its use, and a policy that was never written is an illegal
// instruction.
UW_DEVICE void cp_async_x4(u32 destination, const void* source, bool used = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(used ? 16u : 0u)
                 : "memory");
}
UW_DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all but the newest kPending groups of this thread have landed.
template <u32 kPending>
UW_DEVICE void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace uw::ptx

#endif  // UW_CPU
