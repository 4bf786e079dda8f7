//! Options that several commands share, so that they have the same names, values and help everywhere.

use std::path::PathBuf;

use clap::Args;

use super::size;

/// The base of a bundle that is stored as differences.
#[derive(Args)]
pub struct Base {
    /// Base of the bundle [default: the directory of its name next to the bundle]
    #[arg(id = "base", long = "base", value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

/// The memory limit of the CPU codec.
#[derive(Args)]
pub struct Ram {
    /// Memory for tensors being processed, such as 4G; a larger tensor is processed alone [default: 1G]
    #[arg(id = "ram", long = "ram", value_name = "SIZE", value_parser = size::parse)]
    pub bytes: Option<u64>,
}

/// The number of threads of the CPU codec.
#[derive(Args)]
pub struct Threads {
    /// Number of threads [default: all processors]
    #[arg(id = "threads", long = "threads", value_name = "N", value_parser = threads)]
    pub count: Option<usize>,
}

/// Whether to continue from unfinished output.
#[derive(Args)]
pub struct Resume {
    /// Resume an interrupted run; start over if its options differ
    #[arg(id = "resume", long = "resume")]
    pub is_set: bool,
}

/// Whether to replace existing output.
#[derive(Args)]
pub struct Force {
    /// Replace an existing output when the new one is complete
    #[arg(id = "force", long = "force")]
    pub is_set: bool,
}

/// The GPU that a command uses.
#[cfg(feature = "gpu")]
#[derive(Args)]
pub struct Gpu {
    /// Index of the GPU
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub device: usize,
}

/// The GPU memory limit of an engine.
#[cfg(feature = "gpu")]
#[derive(Args)]
pub struct Memory {
    /// GPU memory for weights, KV cache and activations, such as 40G (GiB) [default: nine tenths of free memory]
    #[arg(id = "memory", long = "memory", value_name = "SIZE", value_parser = size::memory)]
    pub bytes: Option<u64>,
}

/// Parses a thread count.
pub fn threads(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count @ 1..=1024) => Ok(count),
        _ => Err("write a number from 1 to 1024".to_owned()),
    }
}
