//! A compiled kernel in a device's context.
//!
//! [`LoadedKernel`] is an artifact that the driver has loaded. Its plan is checked once against the numbers of compiler
//! and driver, so that a launch only checks its problem.

use std::fmt;

use cudarc::{
    driver::{CudaFunction, sys::CUfunction_attribute_enum as Attribute},
    nvrtc::Ptx,
};
use unweight_codegen::{
    VariantSpec,
    plan::Plan,
    spec::{Arch, Op},
};

use crate::{
    device::{Call, Device, DeviceError, LaunchError},
    jit::cache::Artifact,
};

/// A kernel that can be launched on its device.
///
/// It stays loaded, together with its context, for the life of the process, even if this value is dropped. So running
/// launches and graphs do not need a `LoadedKernel` to stay alive. Loading again uses memory (the size of the cubin)
/// again, so share kernels through a [`KernelSet`](crate::device::KernelSet).
pub struct LoadedKernel {
    device: Device,
    plan: Plan,
    registers: u32,
    resident_blocks: u32,
    /// Leaked together with its module: dropping a module unloads its code at once, even under a running kernel.
    function: &'static CudaFunction,
}

impl LoadedKernel {
    /// Loads an artifact of `spec`. Takes about 0.1 ms.
    ///
    /// # Errors
    /// The artifact belongs to another variant or disagrees with the plan, or the driver rejects it.
    pub fn load(device: &Device, spec: &VariantSpec, artifact: &Artifact) -> Result<Self, DeviceError> {
        let plan = Plan::new(spec).map_err(unweight_codegen::CodegenError::from)?;
        let expected = ExpectedArtifact {
            name: &spec.name(),
            arch: spec.arch,
            args_bytes: spec.op.info().args.bytes,
            smem_bytes: plan.smem.bytes(),
            smem_bytes_max: smem_bytes_max(&plan),
            threads: plan.launch.threads,
        };
        let Function { function, registers, resident_blocks } = expected.load(device, artifact)?;
        Ok(Self { device: device.clone(), plan, registers, resident_blocks, function })
    }

    /// Returns the kernel variant.
    pub fn spec(&self) -> &VariantSpec {
        &self.plan.spec
    }

    /// Returns the launch plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Returns the device on which the kernel is loaded.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the registers per thread.
    pub fn registers(&self) -> u32 {
        self.registers
    }

    /// Returns the number of blocks that are resident on the whole device at once, for kernels without clusters.
    pub fn resident_blocks(&self) -> u32 {
        self.resident_blocks
    }

    pub(crate) fn function(&self) -> &CudaFunction {
        self.function
    }

    /// Returns an error that names this kernel.
    pub(crate) fn refuse<T>(&self, refusal: LaunchError) -> Result<T, DeviceError> {
        Err(DeviceError::Kernel { kernel: self.spec().to_string(), refusal })
    }
}

/// Returns the maximum dynamic shared memory in bytes of any launch: for a `gemm_mma` with dependent launch, at least
/// so much that a multiprocessor has no room for two blocks.
pub(crate) fn smem_bytes_max(plan: &Plan) -> u32 {
    const ALIGN: u32 = 128;
    if !plan.launch.pdl || !matches!(plan.spec.op, Op::GemmMma(_)) {
        return plan.smem.bytes();
    }
    let limits = plan.spec.arch.limits();
    let half = limits.smem_bytes_per_sm / 2 - limits.smem_reserved_bytes_per_block;
    plan.smem.bytes().max((half + 1).next_multiple_of(ALIGN))
}

/// The properties that an artifact must have.
pub(crate) struct ExpectedArtifact<'a> {
    /// The symbol of the kernel.
    pub name: &'a str,
    pub arch: Arch,
    pub args_bytes: usize,
    /// Dynamic shared memory in bytes: what the kernel uses, and the maximum of any launch.
    pub smem_bytes: u32,
    pub smem_bytes_max: u32,
    pub threads: u32,
}

/// A kernel that the driver has loaded. Leaked together with its module: dropping a module unloads its code at once,
/// even under a running kernel.
pub(crate) struct Function {
    pub function: &'static CudaFunction,
    pub registers: u32,
    pub resident_blocks: u32,
}

impl ExpectedArtifact<'_> {
    /// Loads an artifact after checking these properties.
    pub fn load(&self, device: &Device, artifact: &Artifact) -> Result<Function, DeviceError> {
        let refuse = |refusal| Err(DeviceError::Kernel { kernel: self.name.to_owned(), refusal });
        if artifact.name != self.name {
            return refuse(LaunchError::Artifact { found: artifact.name.clone(), wanted: self.name.to_owned() });
        }
        if device.info().arch != self.arch {
            let arch = |arch: Arch| format!("for {}", arch.compiler_name());
            return refuse(LaunchError::Artifact { found: arch(self.arch), wanted: arch(device.info().arch) });
        }
        let (takes, passes) = (artifact.resources.param_bytes.into(), self.args_bytes as u64);
        if takes != passes {
            return refuse(LaunchError::ArgumentBytes { takes, passes });
        }
        let smem_bytes = u64::from(self.smem_bytes_max) + artifact.resources.static_smem_bytes;
        let limit = device.info().smem_bytes_per_block.into();
        if smem_bytes > limit {
            return refuse(LaunchError::SharedMemory { need: smem_bytes, limit });
        }
        // The driver accepts a pointer without a length: `cubin::read` checked the ELF tables when the artifact was
        // compiled or found.
        let module = device.context().load_module(Ptx::from_binary(artifact.cubin.to_vec())).call("loading a cubin")?;
        let function = module.load_function(self.name).call("finding a kernel in its cubin")?;
        let runs = function.max_threads_per_block().call("reading a kernel's attribute")?.unsigned_abs();
        if runs < self.threads {
            return refuse(LaunchError::Threads { planned: self.threads, runs });
        }
        let registers = function.num_regs().call("reading a kernel's attribute")?.unsigned_abs();
        if smem_bytes > u64::from(self.arch.limits().smem_bytes_without_opt_in) {
            function
                .set_attribute(
                    Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    // At most the device's limit, which is an i32.
                    self.smem_bytes_max.cast_signed(),
                )
                .call("raising the shared memory limit of a kernel")?;
        }
        // After the line above: the shared memory limit of a block affects occupancy.
        let per_sm = function
            .occupancy_max_active_blocks_per_multiprocessor(self.threads, self.smem_bytes as usize, None)
            .call("querying the resident blocks per multiprocessor")?;
        let resident_blocks = per_sm.saturating_mul(device.info().sms);
        // The errors above return before any launch, so the module may be dropped there.
        Ok(Function { function: Box::leak(Box::new(function)), registers, resident_blocks })
    }
}

impl fmt::Debug for LoadedKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LoadedKernel({})", self.spec())
    }
}
