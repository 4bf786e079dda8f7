//! One launch: `cuLaunchKernelEx` with the plan's block, cluster and shared memory and the problem's grid.
//!
//! Raw on purpose: arguments hold device addresses, so [`LoadedKernel::launch`] is unsafe. [`decoder`](crate::ops::decode),
//! [`matmul`](crate::ops::gemm_recon) and [`encoder`](crate::ops::encode) are what gives it buffers of the right sizes.

use std::{ffi::c_void, ptr};

use cudarc::driver::sys;
use unweight_codegen::{
    abi::{DecodeArgs, EncodeArgs, GemmPackedArgs, GemmReconArgs, RepackArgs},
    plan::{GemmShape, LaunchPlan},
    spec::Op,
};

use crate::{
    device::module::LoadedKernel,
    device::{Call, DeviceError, Stream},
};

/// The argument struct of a kernel family. Sealed: the families are those of `unweight_codegen::abi`.
pub trait KernelArgs: bytemuck::Pod + private::Sealed {
    /// Whether kernels of this operation take it.
    fn fits(op: &Op) -> bool;
}

mod private {
    pub trait Sealed {}
}

macro_rules! kernel_args {
    ($($args:ty => $op:pat),+ $(,)?) => {$(
        impl private::Sealed for $args {}
        impl KernelArgs for $args {
            fn fits(op: &Op) -> bool {
                matches!(op, $op)
            }
        }
    )+};
}

kernel_args!(
    DecodeArgs => Op::Decode(_),
    GemmReconArgs => Op::GemmRecon(_),
    EncodeArgs => Op::Encode(_),
    GemmPackedArgs => Op::GemmMma(_) | Op::GemmWgmma(_),
    RepackArgs => Op::Repack(_),
);

impl LoadedKernel {
    /// Blocks of a launch for this problem.
    ///
    /// # Errors
    /// More than a grid may have.
    pub fn blocks(&self, problem: GemmShape) -> Result<u32, DeviceError> {
        match self.plan().launch.grid.blocks(problem, self.device().info().sms) {
            Some(blocks) => Ok(blocks),
            None => self.refuse(format!(
                "m = {}, n = {}, k = {} needs more than 2^31 - 1 blocks, or has fewer than the {} steps of 64 of k that a cluster \
                 shares; split the matrix or take a smaller cluster",
                problem.m,
                problem.n,
                problem.k,
                self.plan().launch.cluster
            )),
        }
    }

    /// Enqueues the kernel. A problem without work enqueues nothing.
    ///
    /// # Safety
    /// `args` is what the kernel's contract in `abi.cuh` asks for: every address names memory of the stated size that lives until
    /// the kernel is done (and, in a capture, as long as the graph is launched), and nobody else writes what it reads.
    ///
    /// # Errors
    /// Arguments of another family, a stream of another device, a grid that does not fit, or the driver's refusal.
    pub unsafe fn launch<A: KernelArgs>(
        &self,
        stream: &Stream,
        problem: GemmShape,
        args: &A,
    ) -> Result<(), DeviceError> {
        if !A::fits(&self.spec().op) {
            return self.refuse(format!("takes no {}", std::any::type_name::<A>()));
        }
        if stream.device().info().ordinal != self.device().info().ordinal {
            let (own, other) = (self.device().info().ordinal, stream.device().info().ordinal);
            return self.refuse(format!("is loaded on device {own}, the stream is of device {other}"));
        }
        let blocks = self.blocks(problem)?;
        if blocks == 0 {
            return Ok(());
        }
        let LaunchPlan { threads, cluster, pdl, .. } = self.plan().launch;
        // An ignored entry stands where there is nothing to say, so that a launch allocates nothing.
        let attribute = |wanted: bool, id, value| sys::CUlaunchAttribute {
            id: if wanted { id } else { sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_IGNORE },
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
                pdl,
                sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
            ),
        ];
        let config = sys::CUlaunchConfig {
            gridDimX: blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.plan().smem.bytes(),
            hStream: stream.raw(),
            attrs: attributes.as_mut_ptr(),
            // Two.
            numAttrs: attributes.len() as u32,
        };
        self.device().bind()?;
        let mut parameters = [ptr::from_ref(args).cast_mut().cast::<c_void>()];
        // SAFETY: the kernel has one parameter, of `args`' size (checked when it was loaded), which the driver copies during the
        // call; `config` and its attributes live through it. What the addresses mean is the caller's promise.
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
    use unweight_codegen::spec::catalog;

    #[test]
    fn every_variant_takes_exactly_one_argument_struct() {
        for spec in catalog::all() {
            let fits = [
                DecodeArgs::fits(&spec.op),
                GemmReconArgs::fits(&spec.op),
                EncodeArgs::fits(&spec.op),
                GemmPackedArgs::fits(&spec.op),
                RepackArgs::fits(&spec.op),
            ];
            assert_eq!(fits.iter().filter(|fits| **fits).count(), 1, "{spec}");
        }
    }
}
