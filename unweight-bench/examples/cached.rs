//! Measures the products of `unweight-bench matmul` with weights that stay in the L2 cache: the time of unpacking and
//! multiplying without the limit of memory bandwidth (docs/adr/0017-fp8-product.md). Needs a GPU.
//!
//! ```sh
//! cargo run --release -p unweight-bench --example cached > matmul-cached.md
//! ```

use std::error::Error;

use unweight_bench::{MatmulOptions, Timing, bench_matmul};
use unweight_rt::{Device, KernelSet, env::Env};

fn main() -> Result<(), Box<dyn Error>> {
    let kernels = KernelSet::open(&Device::open(0)?, Env::process()?);
    // Packed sizes are 25 and 38 MB, one copy each. An H200's L2 cache has 50 MB.
    let options =
        MatmulOptions::default().shapes(vec![(4096, 4096), (6144, 4096)]).batches(vec![1, 8]).layer(false).pdl(false);
    let timing = Timing::default().min_copies(1).rotate_bytes(0);
    println!("{}", bench_matmul(&kernels, &options, &timing, &|line| eprintln!("{line}"))?);
    Ok(())
}
