//! Layers out of bundles: a loader that makes them, and what they are when they are loaded.

pub mod build;
pub mod guest;
pub mod linear;
pub mod loader;

use crate::{choose::model::Machine, device::DeviceInfo};

impl From<&DeviceInfo> for Machine {
    fn from(info: &DeviceInfo) -> Self {
        let DeviceInfo { arch, sms, clock_mhz, memory_mb_per_s, .. } = *info;
        // A driver that does not say gets the figures of a usual device.
        let usual = Self::usual(arch);
        let or = |said: f64, usual: f64| if said > 0.0 { said } else { usual };
        let memory = or(memory_mb_per_s as f64, usual.memory);
        let clock_mhz = or(f64::from(clock_mhz), usual.clock_mhz);
        Self { arch, sms, memory, clock_mhz, tensor: Self::tensor_rate(arch, &info.name) }
    }
}
