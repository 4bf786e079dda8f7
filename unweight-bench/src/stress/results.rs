//! Checks outputs.

use unweight_codegen::{plan::GemmShape, spec::Epilogue};

use super::weights::value;
use crate::data::halves;

/// Describes the first element whose error exceeds one rounding plus fp32 accumulation. Tensor cores truncate what they
/// add, so the tolerated error grows with k.
pub(super) fn mismatch(
    y: &[u8],
    GemmShape { n, k, .. }: GemmShape,
    epilogue: Epilogue,
    exact: &[(f64, f64)],
    old: &[u8],
) -> Option<String> {
    let (n, share) = (n as usize, 1e-6 + 1e-9 * f64::from(k));
    let columns = if epilogue == Epilogue::SiluMul { n / 2 } else { n };
    let old = |at: usize| value(u16::from_le_bytes([old[2 * at], old[2 * at + 1]]));
    halves(y).iter().enumerate().find_map(|(at, got)| {
        let (row, column) = (at / columns, at % columns);
        let (sum, slack) = match epilogue {
            Epilogue::Store => (exact[at].0, exact[at].1 * share),
            Epilogue::StoreAdd => (exact[at].0 + old(at), (exact[at].1 + old(at).abs()) * share),
            // Rows of gate and up are interleaved. The slope of silu is at most 1.1.
            Epilogue::SiluMul => {
                let gate_rows = Epilogue::GATE_ROWS as usize;
                let gate_at = row * n + column / gate_rows * 2 * gate_rows + column % gate_rows;
                let ((gate, gate_size), (up, up_size)) = (exact[gate_at], exact[gate_at + gate_rows]);
                let sum = gate / (1.0 + (-gate).exp()) * up;
                (sum, (gate_size * up.abs() * 1.1 + up_size * gate.abs()) * share + sum.abs() * 1e-5)
            }
        };
        let error = (value(*got) - sum).abs();
        (error.is_nan() || error > sum.abs() / 256.0 + slack)
            .then(|| format!("row {row}, column {column}: {} instead of {sum}", value(*got)))
    })
}

pub(super) fn differs(got: &[u8], expected: &[u8]) -> Option<String> {
    let at = expected.iter().zip(got).position(|(expected, got)| expected != got)?;
    Some(format!("byte {at} is {:#04x}; the CPU returned {:#04x}", got[at], expected[at]))
}
