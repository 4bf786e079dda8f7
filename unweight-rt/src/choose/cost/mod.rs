//! The time of a product by path, for planning before anything is measured: formulas fitted to measurements of one H200
//! (docs/benchmarks.md).
//!
//! Times are those of a single product, without overlap of decoders with other work. Between the measured shapes, and
//! for other machines, they are estimates; a tuner measures.

use unweight_codegen::{
    plan::GemmShape,
    spec::{DecodeOutput, Epilogue},
};

pub(super) mod constants;
pub mod gpu_model;

use self::gpu_model::{GpuModel, candidates, compact_candidates, expand_us};
use super::{
    candidates::{COMPACT_BATCH, PackedUse, Registered},
    recon::JOIN_BATCH,
};

/// Multiprocessors of an H200 (SXM).
const SMS: u32 = GpuModel::H200.sms;
/// Overhead of a launch, us.
const LAUNCH_US: f64 = 4.0;
/// Bytes of weights that cuBLAS reads per us.
const CUBLAS_MEMORY: f64 = 4.55e6;
/// Floating-point operations of cuBLAS per us, on a warm card.
const CUBLAS_FLOP: f64 = 7.0e8;
/// Weights that a grouped product reads per us: as many as the packed matmul at batch 1.
const GROUPED: f64 = 3.5e6;
/// BF16 weights that a grouped product reads per us: as many bytes as cuBLAS (not measured).
const GROUPED_BF16: f64 = CUBLAS_MEMORY / 2.0;
/// Weights decoded to BF16 per us, limited by the writes.
const FULL_DECODE: f64 = 0.94e6;
/// Weights decoded to exponents per us.
const EXPONENT_DECODE: f64 = 1.98e6;
/// The reconstructive matmul: us per k, with one and with two column tiles per block. Excludes splits of k, for which
/// concurrent decoders leave no room (docs/kernels.md).
const RECON_K: (f64, f64) = (4.7e-3, 10.3e-3);
/// Up to this batch, the reconstructive matmul takes as long as at batch 1.
const RECON_BATCH: u32 = 64;

/// Returns the microseconds of cuBLAS on BF16.
pub fn cublas_us(problem: GemmShape) -> f64 {
    let GemmShape { m, n, k } = problem;
    let weights = f64::from(n) * f64::from(k);
    LAUNCH_US + (2.0 * weights / CUBLAS_MEMORY).max(2.0 * weights * f64::from(m) / CUBLAS_FLOP)
}

/// Returns the microseconds of the packed matmul that the model predicts to be fastest, with programmatic dependent
/// launch. Sides are padded to multiples of 64. `None` if there is nothing to compute.
pub fn packed_us(problem: GemmShape) -> Option<f64> {
    let padded = |extent: u32| extent.checked_next_multiple_of(64);
    let problem = GemmShape { n: padded(problem.n)?, k: padded(problem.k)?, ..problem };
    let packed_use = PackedUse { escapes: true, pdl: true, epilogue: Epilogue::Store };
    candidates(&GpuModel::H200, &Registered::default(), problem, packed_use).first().map(|(_, us)| *us)
}

/// Returns the microseconds of a product from compact weights: directly up to batch 32, above that including their
/// expansion. `None` if a side is not a multiple of 64, or if there is nothing to compute.
///
/// ```
/// use unweight_codegen::plan::GemmShape;
/// use unweight_rt::raw::choose::cost::{compact_us, packed_us};
/// let at = |m| GemmShape { m, n: 14336, k: 4096 };
/// let slowdown = |m| compact_us(at(m)).unwrap() / packed_us(at(m)).unwrap();
/// assert!((1.0..1.4).contains(&slowdown(1)) && (1.5..5.0).contains(&slowdown(64)) && slowdown(2048) < 1.4);
/// ```
pub fn compact_us(problem: GemmShape) -> Option<f64> {
    let GemmShape { m, n, k } = problem;
    if !n.is_multiple_of(64) || !k.is_multiple_of(64) {
        return None;
    }
    let packed_use = |pdl| PackedUse { escapes: true, pdl, epilogue: Epilogue::Store };
    if m <= COMPACT_BATCH {
        return compact_candidates(&GpuModel::H200, &Registered::default(), problem, packed_use(true))
            .first()
            .map(|(_, us)| *us);
    }
    // Both are ordinary launches.
    let product = candidates(&GpuModel::H200, &Registered::default(), problem, packed_use(false)).first()?.1;
    Some(expand_us(&GpuModel::H200, n, k) + product)
}

/// Returns the microseconds of the products of a mixture's experts from packed weights, or from `bf16` ones. `problem`
/// is the shape of one expert and the number of all tokens, each of which chooses `top_k` of `experts`. Unchosen
/// experts are not read; choices are assumed to be uniform.
///
/// ```
/// use unweight_codegen::plan::GemmShape;
/// use unweight_rt::raw::choose::cost::experts_us;
/// let of = |m, bf16| experts_us(GemmShape { m, n: 1536, k: 2048 }, (128, 8), bf16);
/// let at = |m| of(m, false);
/// assert!(at(8) < 8.0 * at(1) && at(64) > 2.0 * at(8), "more tokens, more experts");
/// assert!(at(4096) - at(1024) < 1.0, "until all are read");
/// assert!(of(64, true) > 1.3 * at(64));
/// ```
pub fn experts_us(problem: GemmShape, (experts, top_k): (u32, u32), bf16: bool) -> f64 {
    let GemmShape { m, n, k } = problem;
    let experts = f64::from(experts);
    let unchosen = (1.0 - f64::from(top_k) / experts).max(0.0).powf(f64::from(m));
    let rate = if bf16 { GROUPED_BF16 } else { GROUPED };
    LAUNCH_US + experts * (1.0 - unchosen) * f64::from(n) * f64::from(k) / rate
}

/// Returns the microseconds of decoding a Huffman-coded weight and multiplying with it, and the decoder's output:
/// exponents for a matmul of `choose::recon` or BF16 for cuBLAS, whichever is faster.
///
/// ```
/// use unweight_codegen::{plan::GemmShape, spec::DecodeOutput};
/// use unweight_rt::raw::choose::cost::huffman_us;
/// let at = |m| huffman_us(GemmShape { m, n: 14336, k: 4096 });
/// assert_eq!(at(1).1, DecodeOutput::Exponent);
/// assert!((57.0..69.0).contains(&at(1).0), "33.6 + 29.3 us were measured");
/// assert_eq!(at(1024).1, DecodeOutput::Full);
/// ```
pub fn huffman_us(problem: GemmShape) -> (f64, DecodeOutput) {
    let GemmShape { m, n, k } = problem;
    let weights = f64::from(n) * f64::from(k);
    let full = LAUNCH_US + weights / FULL_DECODE + cublas_us(problem);
    if m > RECON_BATCH || !n.is_multiple_of(64) || !k.is_multiple_of(64) {
        return (full, DecodeOutput::Full);
    }
    let product = if m <= JOIN_BATCH {
        // `gemm_join` reads as many bytes as cuBLAS.
        cublas_us(problem)
    } else if n <= 64 * SMS {
        RECON_K.0 * f64::from(k)
    } else {
        f64::from(n.div_ceil(128).div_ceil(SMS)) * RECON_K.1 * f64::from(k)
    };
    let exponents = LAUNCH_US + weights / EXPONENT_DECODE + 1.0 + product;
    if exponents < full { (exponents, DecodeOutput::Exponent) } else { (full, DecodeOutput::Full) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Measured times in us; the formulas are within a fifth.
    #[test]
    fn cost_formulas_match_the_measurements() {
        for (n, k, m, cublas, packed) in [
            (14336, 4096, 1, 31.7, 20.5),
            (14336, 4096, 64, 32.0, 23.5),
            (14336, 4096, 256, 45.7, 51.4),
            (14336, 4096, 1024, 172.6, 187.1),
            (28672, 4096, 1, 59.3, 40.5),
            (4096, 14336, 1, 30.9, 20.6),
            (4096, 4096, 1, 12.4, 7.1),
            (6144, 4096, 256, 21.0, 25.6),
            (128_256, 4096, 1, 238.1, 171.9),
            (128_256, 4096, 256, 439.7, 436.1),
            (8192, 28672, 1024, 689.0, 691.5),
        ] {
            let problem = GemmShape { m, n, k };
            for (predicted, measured) in [(cublas_us(problem), cublas), (packed_us(problem).unwrap(), packed)] {
                let ratio: f64 = predicted / measured;
                assert!(
                    (0.8..1.25).contains(&ratio),
                    "{n}x{k} at {m}: predicted {predicted:.1} us, measured {measured}"
                );
            }
        }
        for (n, k, m, measured, output) in [
            (14336, 4096, 1, 33.6 + 29.3, DecodeOutput::Exponent),
            (4096, 4096, 1, 13.6 + 10.4, DecodeOutput::Exponent),
            (4096, 14336, 1, 33.6 + 28.9, DecodeOutput::Exponent),
            (4096, 14336, 64, 67.7 + 34.2, DecodeOutput::Full),
            (14336, 4096, 512, 66.6 + 91.8, DecodeOutput::Full),
        ] {
            let (us, to) = huffman_us(GemmShape { m, n, k });
            assert!(
                (us / measured - 1.0_f64).abs() < 0.15 && to == output,
                "{n}x{k} at {m}: predicted {us:.1} us, measured {measured}"
            );
        }
    }

    #[test]
    fn odd_shapes_are_padded_and_empty_ones_have_no_time() {
        let odd = GemmShape { m: 1, n: 100, k: 4000 };
        assert_eq!(packed_us(odd), packed_us(GemmShape { m: 1, n: 128, k: 4032 }));
        assert_eq!(packed_us(GemmShape { m: 0, n: 64, k: 64 }), None);
        assert_eq!((compact_us(odd), compact_us(GemmShape { m: 0, n: 64, k: 64 })), (None, None));
        assert_eq!(huffman_us(odd).1, DecodeOutput::Full);
    }
}
