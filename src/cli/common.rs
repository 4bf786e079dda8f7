//! Options that several commands have, so that all of them have the same name, values and help.

use clap::Args;

use super::size;

/// Memory of the CPU codec.
#[derive(Args)]
pub struct Ram {
    /// Memory for tensors being processed, such as 4G; a larger tensor is processed alone [default: 1G]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub ram: Option<u64>,
}

/// Number of threads of the CPU codec.
#[derive(Args)]
pub struct Threads {
    /// Number of threads [default: all processors]
    #[arg(long, value_name = "N", value_parser = threads)]
    pub threads: Option<usize>,
}

/// Whether unfinished output is taken over.
#[derive(Args)]
pub struct Resume {
    /// Resume an interrupted run; starts over if that had other options
    #[arg(long)]
    pub resume: bool,
}

/// Whether existing output is replaced.
#[derive(Args)]
pub struct Force {
    /// Replace an existing output when the new one is complete
    #[arg(long)]
    pub force: bool,
}

/// The GPU of a command.
#[cfg(feature = "gpu")]
#[derive(Args)]
pub struct Gpu {
    /// Index of the GPU
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub device: usize,
}

/// The limit of GPU memory of an engine.
#[cfg(feature = "gpu")]
#[derive(Args)]
pub struct Memory {
    /// GPU memory for weights, KV cache and activations, such as 40G (GiB) [default: nine tenths of free memory]
    #[arg(long, value_name = "SIZE", value_parser = size::memory)]
    pub memory: Option<u64>,
}

/// Parses a thread count.
pub fn threads(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count @ 1..=1024) => Ok(count),
        _ => Err("write a number from 1 to 1024".to_owned()),
    }
}
