// Register budgets of roles, and programmatic dependent launch.
#pragma once

#include "unweight/ptx/core.cuh"

#ifndef UW_CPU

namespace uw::ptx {

// Called by all four warps of a warpgroup. The sum over roles must not exceed the registers of the launch, or
// `setmaxnreg_inc` deadlocks.
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

// Programmatic dependent launch: waits until all writes of preceding kernels are visible; lets following kernels start
// their prologue. Neither has an effect in an ordinary launch.
UW_DEVICE void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
UW_DEVICE void griddepcontrol_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace uw::ptx

#endif  // UW_CPU
