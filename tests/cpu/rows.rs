//! Helpers of tests whose kernels read and write rows of activations: random rows with gaps, launches, and checks of
//! the gaps.

use crate::harness::{Buffer, CpuKernel, Run};
use unweight_bench::oracle;
use unweight_codegen::{VariantSpec, abi::KernelArgs, plan::GemmShape};
use unweight_format::testing::Random;

/// Fills an output before the launch; rows must still be surrounded by this value after the launch.
pub const POISON: u16 = 0xa5a5;
/// Gap between rows, elements.
pub const GAP: usize = 16;

/// Returns the little-endian bytes of bf16 values.
pub fn bytes(halves: &[u16]) -> Vec<u8> {
    halves.iter().flat_map(|half| half.to_le_bytes()).collect()
}

/// Returns a buffer of little-endian words.
pub fn words(words: &[u32]) -> Buffer {
    Buffer::of(&words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>())
}

/// Returns bf16 values around 1 with both signs.
pub fn random(count: usize, seed: u64) -> Vec<u16> {
    let mut random = Random::new(seed);
    (0..count).map(|_| oracle::rounded(random.normal())).collect()
}

/// Runs a kernel over these buffers.
pub fn launch<A: KernelArgs>(
    kernel: &mut CpuKernel,
    spec: &VariantSpec,
    problem: GemmShape,
    args: &A,
    buffers: &[(&str, &Buffer)],
) -> Result<(), String> {
    let slices: Vec<_> = buffers.iter().map(|(name, buffer)| (*name, buffer.slice())).collect();
    // SAFETY: the buffers outlive the launch, and the kernel reaches them through checked wrappers only.
    unsafe { kernel.run(spec, Run { problem, sms: 2, seed: 11 }, args, &slices) }
}

/// Returns the rows of a matrix with gaps. Fails if a gap was written.
pub fn written_rows(y: &Buffer, m: usize, columns: usize, pitch: usize) -> Result<Vec<u16>, String> {
    let y = y.u16s();
    let mut rows = Vec::new();
    for row in 0..m {
        let (row_values, gap) = y[row * pitch..][..pitch].split_at(columns);
        rows.extend_from_slice(row_values);
        if gap.iter().any(|half| *half != POISON) {
            return Err(format!("the gap after row {row} was written"));
        }
    }
    Ok(rows)
}
