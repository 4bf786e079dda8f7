//! Launches a kernel: `cuLaunchKernelEx` with the plan's block, cluster and shared memory and the problem's grid.
//!
//! Arguments contain device addresses, so [`LoadedKernel::launch`] is unsafe. The module of each kernel family checks
//! the operands before it calls this.
//!
//! Kernels whose blocks wait for each other ([`LaunchPlan::co_resident`], stream-K) are launched cooperatively. The
//! driver then rejects a grid that does not fit the device, and keeps all its blocks resident regardless of other
//! streams (docs/adr/0009-stream-k.md).

use std::{ffi::c_void, ptr};

use cudarc::driver::sys;
use unweight_codegen::{
    abi::KernelArgs,
    plan::{GemmShape, LaunchPlan, Plan},
};

use crate::device::{
    Call, DeviceError, LaunchError, LaunchMode, Stream,
    module::{LoadedKernel, smem_bytes_max},
};

/// Returns whether a launch must be cooperative because its blocks wait for each other. `resident` is the number of
/// blocks that fit the device at once.
///
/// # Errors
/// [`LaunchError::CooperativeGrid`] if not all fit: the resident blocks would wait forever.
pub(crate) fn cooperative(plan: &Plan, problem: GemmShape, blocks: u32, resident: u32) -> Result<bool, LaunchError> {
    if !plan.launch.blocks_wait(problem, blocks) {
        return Ok(false);
    }
    if blocks > resident { Err(LaunchError::CooperativeGrid { blocks, resident }) } else { Ok(true) }
}

/// Returns the number of blocks of a launch for this problem on a device with `sms` multiprocessors.
///
/// # Errors
/// [`LaunchError::Grid`] if that exceeds the maximum of a grid.
pub(crate) fn blocks(plan: &Plan, problem: GemmShape, sms: u32) -> Result<u32, LaunchError> {
    plan.launch.grid.blocks(problem, sms).ok_or(LaunchError::Grid { problem, cluster: plan.launch.cluster })
}

/// Returns the dynamic shared memory in bytes of a launch of `blocks` blocks on `sms` multiprocessors.
///
/// Without this, a multiprocessor that is done early with the previous kernel would take two blocks of a `gemm_mma`
/// that has at most one for each multiprocessor, and others would have none: the products of a layer took 7 % longer
/// with 16 rows and 12 % with 32 (docs/records/2026-11-29/layer-orders.csv). A block therefore takes more than half of
/// the shared memory. `gemm_join` and `gemm_compact` gain nothing from it (one-block.csv there).
fn smem_bytes(plan: &Plan, blocks: u32, sms: u32) -> u32 {
    if blocks > sms { plan.smem.bytes() } else { smem_bytes_max(plan) }
}

impl LoadedKernel {
    /// Returns the number of blocks of a launch for this problem.
    ///
    /// # Errors
    /// The number exceeds the maximum of a grid.
    pub fn blocks(&self, problem: GemmShape) -> Result<u32, DeviceError> {
        blocks(self.plan(), problem, self.device().info().sms).or_else(|refusal| self.refuse(refusal))
    }

    /// Checks grid and resident blocks of this problem before anything is enqueued.
    ///
    /// # Errors
    /// [`LaunchError::Grid`], [`LaunchError::CooperativeGrid`].
    pub(crate) fn check_grid(&self, problem: GemmShape) -> Result<(), LaunchError> {
        let blocks = blocks(self.plan(), problem, self.device().info().sms)?;
        cooperative(self.plan(), problem, blocks, self.resident_blocks()).map(drop)
    }

    /// Enqueues the kernel. A problem without work enqueues nothing.
    ///
    /// # Safety
    /// `args` fulfills the kernel's contract in `abi.cuh`: every address names memory of the stated size that lives
    /// until the kernel is done (in a capture, as long as the graph is launched), and nothing else writes what it
    /// reads.
    ///
    /// # Errors
    /// Arguments of another family, a stream of another device, a grid that does not fit, or a driver error.
    pub unsafe fn launch<A: KernelArgs>(
        &self,
        stream: &Stream,
        problem: GemmShape,
        args: &A,
    ) -> Result<(), DeviceError> {
        if !self.spec().op.takes::<A>() {
            return self.refuse(LaunchError::Arguments { given: A::NAME });
        }
        let (own, other) = (self.device().ordinal(), stream.device().ordinal());
        if own != other {
            return self.refuse(LaunchError::OtherDevice { operand: "the stream", own, other });
        }
        // With fewer multiprocessors, a grid has fewer blocks and needs no larger workspace, so the checks for the
        // whole device remain valid.
        let LaunchMode { sms, serialized } = stream.mode();
        let all = self.device().info().sms;
        let sms = sms.map_or(all, |sms| sms.clamp(1, all));
        let blocks = blocks(self.plan(), problem, sms).or_else(|refusal| self.refuse(refusal))?;
        if blocks == 0 {
            return Ok(());
        }
        let cooperative = cooperative(self.plan(), problem, blocks, self.resident_blocks())
            .or_else(|refusal| self.refuse(refusal))?;
        let LaunchPlan { threads, cluster, pdl, .. } = self.plan().launch;
        // Unused attributes are set to IGNORE in a fixed-size array, so that a launch allocates nothing.
        let attribute = |is_used: bool, id, value| sys::CUlaunchAttribute {
            id: if is_used { id } else { sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_IGNORE },
            pad: [0; 4],
            value,
        };
        let mut attributes = [
            attribute(
                cluster > 1,
                sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
                sys::CUlaunchAttributeValue {
                    clusterDim: sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: cluster, y: 1, z: 1 },
                },
            ),
            attribute(
                pdl && !serialized,
                sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
            ),
            attribute(
                cooperative,
                sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
                sys::CUlaunchAttributeValue { cooperative: 1 },
            ),
        ];
        let config = sys::CUlaunchConfig {
            gridDimX: blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: smem_bytes(self.plan(), blocks, sms),
            hStream: stream.raw(),
            attrs: attributes.as_mut_ptr(),
            // There are three attributes, so the cast is exact.
            numAttrs: attributes.len() as u32,
        };
        self.device().bind()?;
        let mut parameters = [ptr::from_ref(args).cast_mut().cast::<c_void>()];
        // SAFETY: the kernel has one parameter of `args`' size (checked when it was loaded), which the driver copies
        // during the call; `config` and its attributes outlive the call. The caller promises that the addresses are
        // valid.
        unsafe {
            sys::cuLaunchKernelEx(&config, self.function().cu_function(), parameters.as_mut_ptr(), ptr::null_mut())
        }
        .result()
        .call("launching a kernel")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use unweight_codegen::spec::{Arch, Op, catalog};

    #[test]
    fn no_multiprocessor_takes_two_blocks_of_a_small_grid() {
        let limits = Arch::Sm90a.limits();
        let mut raised = 0;
        for spec in catalog::all(Arch::Sm90a) {
            let plan = Plan::new(&spec).unwrap();
            let (own, small) = (plan.smem.bytes(), smem_bytes(&plan, 132, 132));
            assert_eq!(smem_bytes(&plan, 133, 132), own, "{spec}");
            assert!(small <= limits.smem_bytes_per_block, "{spec}");
            if matches!(spec.op, Op::GemmMma(_)) && plan.launch.pdl {
                let two_blocks = 2 * (small + limits.smem_reserved_bytes_per_block);
                assert!(two_blocks > limits.smem_bytes_per_sm, "{spec}: {small} bytes");
                raised += usize::from(small > own);
            } else {
                assert_eq!(small, own, "{spec}");
            }
        }
        assert!(raised > 10, "{raised}");
    }

    /// Kernels whose blocks wait for each other are launched cooperatively or not at all.
    #[test]
    fn waiting_blocks_must_be_co_resident() {
        let mut cooperative_launches = 0;
        for spec in catalog::all(Arch::Sm90a) {
            let plan = Plan::new(&spec).unwrap();
            for m in [1, 64, 129, 1000, 4096] {
                for (n, k) in [(64, 64), (1024, 4096), (4096, 4096), (28672, 8192)] {
                    let problem = GemmShape { m, n, k };
                    let Ok(blocks) = blocks(&plan, problem, 132) else { continue };
                    match cooperative(&plan, problem, blocks, 132) {
                        Ok(true) => {
                            cooperative_launches += 1;
                            assert!(plan.launch.co_resident && blocks <= 132, "{spec} {problem:?}");
                            let too_few = cooperative(&plan, problem, blocks, blocks - 1);
                            assert_eq!(
                                too_few,
                                Err(LaunchError::CooperativeGrid { blocks, resident: blocks - 1 }),
                                "{spec}"
                            );
                        }
                        Ok(false) => assert!(!plan.launch.blocks_wait(problem, blocks), "{spec} {problem:?}"),
                        Err(refusal) => panic!("{spec} {problem:?}: {refusal}"),
                    }
                }
            }
        }
        assert!(cooperative_launches > 100, "{cooperative_launches}");
    }
}
