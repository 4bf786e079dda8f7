// Register budgets of roles, and the edges between dependent launches.
#pragma once

#include "unweight/ptx/core.cuh"

#ifndef UW_CPU

namespace uw::ptx {

// By all four warps of a warpgroup. The sum over roles must not exceed what the launch allocated, or `setmaxnreg_inc`
// waits for ever.
template <u32 kRegisters>
UW_DEVICE void setmaxnreg_inc() {
    static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256,
                  "setmaxnreg takes multiples of 8 in 24..256");
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <u32 kRegisters>
UW_DEVICE void setmaxnreg_dec() {
    static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256,
                  "setmaxnreg takes multiples of 8 in 24..256");
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Programmatic dependent launch: wait until every write of the kernels before is visible; let the kernels after start
// their prologue. Both do nothing in an ordinary launch.
UW_DEVICE void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
UW_DEVICE void griddepcontrol_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace uw::ptx

#endif  // UW_CPU
