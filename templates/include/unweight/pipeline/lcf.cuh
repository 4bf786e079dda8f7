// Load-compute-finish skeleton of a persistent, warp-specialized kernel, after ThunderKittens' template of that name.
//
//   warpgroup 0     producer   kernel.load(task, warp)                      few registers; each of the four warps has
//                                                                           its own job, or none
//   warpgroups 1..  consumers  kernel.compute(task), kernel.finish(task)    many registers
//
// A kernel provides
//   Args, kConsumerWarpgroups, kProducerRegisters, kConsumerRegisters
//   kCluster                       blocks of a cluster, which process one task together
//   Kernel(args, shared address)   computes addresses only; called by every thread
//   setup()                        mbarrier initialization and descriptor prefetch; called by one thread
//   tasks()                        number of tasks; cluster c takes c, c + clusters of the grid, ...
//   load(task, warp), compute(task), finish(task)
// The skeleton owns role assignment, register budgets, the start-up order and the task loop. It knows nothing about
// rings: a kernel's cursors are members of the kernel object, of which every thread has a copy.
#pragma once

#include "unweight/ptx/barrier.cuh"
#include "unweight/ptx/control.cuh"
#include "unweight/ptx/fence.cuh"
#include "unweight/ptx/memory.cuh"

namespace uw::pipeline {

constexpr u32 kWarpgroupThreads = 128;
constexpr u32 kWarpgroupWarps = 4;

template <class Kernel>
UW_DEVICE void run(const typename Kernel::Args& args) {
    const u32 warp = ptx::uniform_warp_index();
    Kernel kernel(args, ptx::cvta_to_shared(ptx::dynamic_smem()));
    if (warp == 0) {
        if (ptx::elect_sync()) {
            kernel.setup();
            ptx::fence_mbarrier_init();
        }
        ptx::bar_warp_sync();  // reconverges the warp for the block barrier
    }
    ptx::bar_sync();
    // Everything above may overlap the preceding kernel; everything below may read its results.
    ptx::griddepcontrol_wait();

    const u32 tasks = kernel.tasks();
    const u32 first = ptx::ctaid() / Kernel::kCluster, stride = ptx::nctaid() / Kernel::kCluster;
    if (warp < kWarpgroupWarps) {
        ptx::setmaxnreg_dec<Kernel::kProducerRegisters>();
        for (u32 task = first; task < tasks; task += stride) kernel.load(task, warp);
        // The next kernel may start its prologue; it waits for the end of this grid before it reads results.
        ptx::griddepcontrol_launch_dependents();
    } else {
        ptx::setmaxnreg_inc<Kernel::kConsumerRegisters>();
        for (u32 task = first; task < tasks; task += stride) {
            kernel.compute(task);
            kernel.finish(task);
        }
    }
}

}  // namespace uw::pipeline
