//! `unweight bench`.

use clap::{Args, Subcommand, ValueEnum};
use unweight::rt::{
    bench::{self, BenchOptions},
    device::Device,
    dispatch::Kernels,
    env::Env,
};

use super::{
    failure::{Failure, Result},
    output::Output,
};

/// Subcommands of `bench`.
#[derive(Subcommand)]
pub enum Bench {
    /// Time the kernels beside cuBLAS on this machine's GPU
    Kernels(KernelsBench),
}

/// Arguments of `bench kernels`. What is left out is as in docs/benchmarks.md.
#[derive(Args)]
pub struct KernelsBench {
    /// Shape of the weights; may be repeated
    #[arg(long, value_name = "N,K", value_parser = shape)]
    shape: Vec<(u32, u32)>,
    /// Batch of the matmuls; may be repeated
    #[arg(long, value_name = "M", value_parser = clap::value_parser!(u32).range(1..=65536))]
    batch: Vec<u32>,
    /// Families to measure; may be repeated [default: all]
    #[arg(long, value_name = "FAMILY")]
    only: Vec<Family>,
    /// Every matmul variant that fits, not only the first choice
    #[arg(long)]
    all_variants: bool,
    /// Rounds that count
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    rounds: Option<u16>,
    /// Number of the GPU
    #[arg(long, value_name = "N", default_value_t = 0)]
    device: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Family {
    Decode,
    Encode,
    Matmul,
}

impl Bench {
    /// As in the JSON.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Kernels(_) => "bench kernels",
        }
    }

    /// Runs it.
    pub fn run(&self, output: Output) -> Result<()> {
        let Self::Kernels(arguments) = self;
        let env = Env::process().map_err(|error| Failure::other(error.clone()))?;
        let device = Device::open(arguments.device).map_err(Failure::other)?;
        let kernels = Kernels::open(&device, env);
        let options = arguments.options();
        let report = bench::bench_kernels(&kernels, &options, &|line| output.note(line)).map_err(Failure::other)?;
        output.result(self.name(), &report, |out| write!(out, "{report}"))
    }
}

impl KernelsBench {
    fn options(&self) -> BenchOptions {
        let mut options = BenchOptions { all_variants: self.all_variants, ..BenchOptions::default() };
        if !self.shape.is_empty() {
            options.shapes.clone_from(&self.shape);
        }
        if !self.batch.is_empty() {
            options.batches.clone_from(&self.batch);
        }
        if !self.only.is_empty() {
            options.decode = self.only.contains(&Family::Decode);
            options.encode = self.only.contains(&Family::Encode);
            options.matmul = self.only.contains(&Family::Matmul);
        }
        if let Some(rounds) = self.rounds {
            options.rounds = rounds.into();
        }
        options
    }
}

fn shape(text: &str) -> std::result::Result<(u32, u32), String> {
    let extent = |text: &str| text.trim().parse().ok().filter(|&extent: &u32| extent > 0);
    let (n, k) = text.split_once(',').ok_or("write it as N,K, such as 14336,4096")?;
    extent(n).zip(extent(k)).ok_or_else(|| format!("'{text}': both extents are numbers above 0"))
}
