//! External kernels: kernels of other crates, compiled, cached, loaded and launched like the built-in ones.

use std::{ffi::c_void, fmt, ptr, sync::Arc};

use cudarc::driver::{CudaFunction, sys};
use unweight_codegen::{ExternalSource, abi::KernelArgs};

use crate::{
    device::{
        Call, Device, DeviceError, KernelSet, LaunchError, Stream,
        module::{ExpectedArtifact, Function},
    },
    jit::{cache::CacheState, compiler::CompileRequest},
};

/// A loaded external kernel. It stays loaded for the life of the process; clones share it.
#[derive(Clone)]
pub struct ExternalKernel {
    device: Device,
    kernel: Arc<ExternalSource>,
    registers: u32,
    resident_blocks: u32,
    function: &'static CudaFunction,
}

impl ExternalKernel {
    /// Compiles the kernel or finds it in the cache, and loads it. Keep the result: loading again uses memory again.
    ///
    /// # Errors
    /// The compiler is missing or rejects the source, or the artifact does not match the kernel's declaration.
    pub fn of(kernels: &KernelSet, kernel: ExternalSource) -> Result<Self, DeviceError> {
        let request = CompileRequest::external(&kernel)?;
        let name = kernel.name();
        let expected = ExpectedArtifact {
            name: &name,
            arch: kernel.arch,
            args_bytes: kernel.args.bytes,
            smem_bytes: kernel.smem.bytes(),
            smem_bytes_max: kernel.smem.bytes(),
            threads: kernel.threads,
        };
        let artifact = kernels.cache().get(&request)?;
        let loaded = match expected.load(kernels.device(), &artifact) {
            // Attached for another driver, or damaged.
            Err(_) if artifact.state == CacheState::Attached => {
                let compiled = kernels.cache().compile_without_attached(&[request], 1, &|_| {})?.swap_remove(0);
                expected.load(kernels.device(), &compiled)
            }
            loaded => loaded,
        };
        let Function { function, registers, resident_blocks } = loaded?;
        Ok(Self { device: kernels.device().clone(), kernel: Arc::new(kernel), registers, resident_blocks, function })
    }

    /// Returns the source and the launch plan of the kernel.
    pub fn kernel(&self) -> &ExternalSource {
        &self.kernel
    }

    /// Returns the device on which the kernel is loaded.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the registers per thread.
    pub fn registers(&self) -> u32 {
        self.registers
    }

    /// Returns the number of blocks that are resident on the whole device at once.
    pub fn resident_blocks(&self) -> u32 {
        self.resident_blocks
    }

    /// Returns an error that names this kernel.
    ///
    /// # Errors
    /// Always.
    pub fn refuse<T>(&self, refusal: LaunchError) -> Result<T, DeviceError> {
        Err(DeviceError::Kernel { kernel: self.kernel.name(), refusal })
    }

    /// Enqueues `blocks` blocks; 0 blocks enqueue nothing.
    ///
    /// # Safety
    /// `args` fulfills the kernel's contract in its header: every address names memory of the stated size that lives
    /// until the kernel is done (in a capture, as long as the graph is launched), and nothing else writes what it
    /// reads. No block waits for another.
    ///
    /// # Errors
    /// Arguments of another kernel, a stream of another device, a grid larger than any device supports, or a driver
    /// error.
    pub unsafe fn launch<A: KernelArgs>(&self, stream: &Stream, blocks: u32, args: &A) -> Result<(), DeviceError> {
        if !self.kernel.takes::<A>() {
            return self.refuse(LaunchError::Arguments { given: A::NAME });
        }
        let (own, other) = (self.device.ordinal(), stream.device().ordinal());
        if own != other {
            return self.refuse(LaunchError::OtherDevice { operand: "the stream", own, other });
        }
        if blocks > i32::MAX as u32 {
            let (value, limit) = (blocks.into(), i32::MAX as u64);
            return self.refuse(LaunchError::TooLarge { what: "blocks", value, limit });
        }
        if blocks == 0 {
            return Ok(());
        }
        let config = sys::CUlaunchConfig {
            gridDimX: blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: self.kernel.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.kernel.smem.bytes(),
            hStream: stream.raw(),
            attrs: ptr::null_mut(),
            numAttrs: 0,
        };
        self.device.bind()?;
        let mut parameters = [ptr::from_ref(args).cast_mut().cast::<c_void>()];
        // SAFETY: the kernel has one parameter of `args`' size (checked when it was loaded), which the driver copies
        // during the call; `config` outlives the call. The caller promises that the addresses are valid.
        unsafe { sys::cuLaunchKernelEx(&config, self.function.cu_function(), parameters.as_mut_ptr(), ptr::null_mut()) }
            .result()
            .call("launching a kernel")
    }
}

impl fmt::Debug for ExternalKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ExternalKernel({})", self.kernel)
    }
}
