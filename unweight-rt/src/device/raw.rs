//! Foreign kernels: compiled and cached like the built-in ones, without a spec or a plan.

use std::{ffi::c_void, ptr};

use cudarc::{driver::CudaFunction, driver::sys, nvrtc::Ptx};

use crate::{
    device::{Call, Device, DeviceError, Stream},
    jit::cache::Artifact,
};

/// A kernel known only by its symbol.
#[derive(Debug)]
pub struct RawKernel {
    device: Device,
    /// Keeps the module loaded.
    function: CudaFunction,
}

impl RawKernel {
    /// Loads the kernel after which the artifact is named.
    ///
    /// # Errors
    /// The driver rejects the kernel.
    pub fn load(device: &Device, artifact: &Artifact) -> Result<Self, DeviceError> {
        let module = device.context().load_module(Ptx::from_binary(artifact.cubin.to_vec())).call("loading a cubin")?;
        let function = module.load_function(&artifact.name).call("finding a kernel in its cubin")?;
        Ok(Self { device: device.clone(), function })
    }

    /// Enqueues `blocks` blocks of `threads` threads with `smem_bytes` of dynamic shared memory (at most 48 KiB).
    ///
    /// # Safety
    /// `arguments` point to values of the kernel's parameters, in order, and memory that they refer to lives until the
    /// kernel is done.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        (blocks, threads): (u32, u32),
        smem_bytes: u32,
        arguments: &mut [*mut c_void],
    ) -> Result<(), DeviceError> {
        self.device.bind()?;
        let function = self.function.cu_function();
        // SAFETY: the caller's promise; the driver copies the arguments during the call.
        unsafe {
            sys::cuLaunchKernel(
                function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                smem_bytes,
                stream.raw(),
                arguments.as_mut_ptr(),
                ptr::null_mut(),
            )
        }
        .result()
        .call("launching a kernel")
    }
}
