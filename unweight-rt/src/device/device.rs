//! A device and its context.

use std::{fmt, sync::Arc};

use cudarc::driver::{CudaContext, result, sys::CUdevice_attribute_enum as Attribute};
use serde::Serialize;
use unweight_codegen::spec::Arch;

use crate::{
    choose::cost::gpu_model::GpuModel,
    device::{Call, DeviceError},
    jit::{
        process,
        toolchain::{Library, Version},
    },
};

/// Properties of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceInfo {
    /// CUDA device ordinal, from 0.
    pub ordinal: usize,
    /// Device name, such as `NVIDIA H200`.
    pub name: String,
    /// Architecture of the kernels for this device.
    #[serde(serialize_with = "arch_name")]
    pub arch: Arch,
    /// The number of multiprocessors.
    pub sms: u32,
    /// Maximum SM clock in MHz.
    pub clock_mhz: u32,
    /// Theoretical memory bandwidth in MB/s (10^6).
    pub memory_mb_per_s: u64,
    /// Size of the L2 cache in bytes.
    pub l2_bytes: u64,
    /// Maximum shared memory of a block in bytes.
    pub smem_bytes_per_block: u32,
    /// Size of the device memory in bytes.
    pub memory_bytes: u64,
    /// CUDA version that the driver supports.
    pub driver: String,
}

fn arch_name<S: serde::Serializer>(arch: &Arch, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(arch.compiler_name())
}

impl From<&DeviceInfo> for GpuModel {
    fn from(info: &DeviceInfo) -> Self {
        let DeviceInfo { arch, sms, clock_mhz, memory_mb_per_s, .. } = *info;
        // Values that the driver does not report default to those of a typical device.
        let typical = Self::usual(arch);
        let reported_or = |reported: f64, typical: f64| if reported > 0.0 { reported } else { typical };
        let memory = reported_or(memory_mb_per_s as f64, typical.memory);
        let clock_mhz = reported_or(f64::from(clock_mhz), typical.clock_mhz);
        Self { arch, sms, memory, clock_mhz, tensor: Self::tensor_rate(arch, &info.name) }
    }
}

/// A GPU with its primary CUDA context. Clones are cheap and share the context.
#[derive(Clone)]
pub struct Device(Arc<Shared>);

struct Shared {
    context: Arc<CudaContext>,
    info: DeviceInfo,
    /// Whether the driver has `cuStreamGetCaptureInfo_v3`.
    has_capture_info_v3: bool,
}

impl Device {
    /// Returns the number of CUDA devices of the machine.
    ///
    /// # Errors
    /// The driver cannot be used.
    pub fn count() -> Result<usize, DeviceError> {
        process::require(Library::Driver)?;
        result::init().call("initialising the driver")?;
        Ok(CudaContext::device_count().call("counting devices")?.unsigned_abs() as usize)
    }

    /// Returns the architecture of a device without opening it.
    ///
    /// # Errors
    /// As [`Device::open`].
    pub fn arch_of(ordinal: usize) -> Result<Arch, DeviceError> {
        let count = Self::count()?;
        if ordinal >= count {
            return Err(DeviceError::Ordinal { ordinal, count });
        }
        // Below the number of devices, which is an int.
        let device = result::device::get(ordinal as i32).call("getting the device handle")?;
        let attribute = |which| {
            // SAFETY: the driver has just returned this device.
            unsafe { result::device::get_attribute(device, which) }.call("reading the compute capability")
        };
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        Arch::of_capability(major, minor).map_or_else(
            || {
                let name = result::device::get_name(device).call("reading the device's name")?;
                Err(DeviceError::Arch { name, major, minor })
            },
            Ok,
        )
    }

    /// Opens a device with its primary context, which it shares with other CUDA code of the process.
    ///
    /// # Errors
    /// No driver, no such device, or an architecture without kernels.
    pub fn open(ordinal: usize) -> Result<Self, DeviceError> {
        let count = Self::count()?;
        if ordinal >= count {
            return Err(DeviceError::Ordinal { ordinal, count });
        }
        let driver = process::require(Library::Driver)?.version;
        let context = CudaContext::new(ordinal).call("creating a context")?;
        let attribute = |attribute| context.attribute(attribute).call("reading a device attribute");
        let count_of = |which| attribute(which).map(i32::unsigned_abs);
        let name = context.name().call("reading the device's name")?;
        let (major, minor) = context.compute_capability().call("reading the compute capability")?;
        let Some(arch) = Arch::of_capability(major, minor) else {
            return Err(DeviceError::Arch { name, major, minor });
        };
        let info = DeviceInfo {
            ordinal,
            name,
            arch,
            sms: count_of(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            clock_mhz: count_of(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)? / 1000,
            memory_mb_per_s: {
                let khz = count_of(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)?;
                let bits = count_of(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)?;
                u64::from(khz) * u64::from(bits / 8) * 2 / 1000
            },
            l2_bytes: count_of(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?.into(),
            smem_bytes_per_block: count_of(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            memory_bytes: context.total_mem().call("reading the device's memory")? as u64,
            driver: driver.to_string(),
        };
        let has_capture_info_v3 = driver >= Version { major: 12, minor: 3 };
        Ok(Self(Arc::new(Shared { context, info, has_capture_info_v3 })))
    }

    /// Returns the properties of the GPU.
    pub fn info(&self) -> &DeviceInfo {
        &self.0.info
    }

    /// Returns whether the driver can identify captures.
    pub(crate) fn has_capture_info_v3(&self) -> bool {
        self.0.has_capture_info_v3
    }

    /// Returns the CUDA device ordinal, from 0.
    pub fn ordinal(&self) -> usize {
        self.info().ordinal
    }

    /// Waits for all work on the device.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        self.context().synchronize().call("waiting for the device")
    }

    /// Returns free and total memory in bytes.
    pub fn memory(&self) -> Result<(usize, usize), DeviceError> {
        self.context().mem_get_info().call("reading the free memory")
    }

    pub(crate) fn context(&self) -> &Arc<CudaContext> {
        &self.0.context
    }

    pub(crate) fn bind(&self) -> Result<(), DeviceError> {
        self.context().bind_to_thread().call("binding the context")
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.info().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The model that dispatch uses without a device matches what the driver reports for an H200.
    #[test]
    fn h200_model_matches_its_driver() {
        let record = include_str!("../../../docs/records/2026-11-22/decode-compact.json");
        let record: serde_json::Value = serde_json::from_str(record).unwrap();
        let field = |key: &str| record["device"][key].as_u64().unwrap();
        let info = DeviceInfo {
            ordinal: 0,
            name: record["device"]["name"].as_str().unwrap().to_owned(),
            arch: Arch::of_compiler_name(record["device"]["arch"].as_str().unwrap()).unwrap(),
            sms: field("sms") as u32,
            clock_mhz: field("clock_mhz") as u32,
            memory_mb_per_s: field("memory_mb_per_s"),
            l2_bytes: field("l2_bytes"),
            smem_bytes_per_block: field("smem_bytes_per_block") as u32,
            memory_bytes: field("memory_bytes"),
            driver: String::new(),
        };
        assert_eq!(GpuModel::from(&info), GpuModel::H200);
    }

    #[test]
    fn missing_driver_is_explained() {
        // On machines with a GPU, this tests the other arm.
        match Device::open(0) {
            Ok(device) => assert!(device.info().sms > 0),
            Err(DeviceError::Toolchain(error)) => assert!(error.to_string().contains("libcuda"), "{error}"),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
        let opened = Device::open(0).map(|device| device.info().arch);
        match (Device::arch_of(0), opened) {
            (Ok(arch), opened) => assert!(opened.is_ok_and(|opened| opened == arch)),
            (Err(why), opened) => assert!(opened.is_err_and(|opened| opened.to_string() == why.to_string())),
        }
    }
}
