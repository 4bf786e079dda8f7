//! Reference implementations of the activation kernels in double precision, for tests and for `unweight-bench stress`.
//!
//! A kernel computes in fp32, sums in its own order, and uses a square root of about 22 bits. A result near the
//! midpoint of two bf16 values may therefore round to either. [`Span`] is the range of accepted results; it allows no
//! more than this one rounding.

use std::f64::consts::PI;

use unweight_codegen::spec::{GateFunction, NormKind};

/// Returns the value of bf16 bits.
pub fn value(bits: u16) -> f64 {
    f64::from(f32::from_bits(u32::from(bits) << 16))
}

/// Rounds to the nearest bf16, ties to even.
pub fn rounded(x: f64) -> u16 {
    // Round to odd in f32 first, so that the second rounding does not double-round.
    let near = x as f32;
    let bits = match f64::from(near) {
        same if same == x || x.is_nan() => near.to_bits(),
        more if more.abs() > x.abs() => (near.to_bits() - 1) | 1,
        _ => near.to_bits() | 1,
    };
    if x.is_nan() { 0x7fff } else { ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16 }
}

/// The accepted range of a bf16 result, inclusive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    low: f64,
    high: f64,
}

impl Span {
    /// Returns the bf16 results of rounding `x`, which is known up to a relative error.
    pub fn about(x: f64, error: f64) -> Self {
        Self::of(x - x.abs() * error, x + x.abs() * error)
    }

    fn of(a: f64, b: f64) -> Self {
        let (a, b) = (value(rounded(a)), value(rounded(b)));
        Self { low: a.min(b), high: a.max(b) }
    }

    /// Returns the bf16 results of `a * p + b * q` in fp32, for any accepted `a` and `b`.
    fn sum(a: Self, p: f64, b: Self, q: f64) -> Self {
        let both = |a: Self, p: f64| ((a.low * p).min(a.high * p), (a.low * p).max(a.high * p));
        let ((a_low, a_high), (b_low, b_high)) = (both(a, p), both(b, q));
        let error = 2e-7 * (a_low.abs().max(a_high.abs()) + b_low.abs().max(b_high.abs()));
        Self::of(a_low + b_low - error, a_high + b_high + error)
    }

    /// Returns whether the bf16 value is in the range.
    pub fn has(&self, bits: u16) -> bool {
        (self.low..=self.high).contains(&value(bits))
    }
}

/// Describes the first element outside its span.
pub fn outside(got: &[u16], spans: &[Span]) -> Option<String> {
    assert_eq!(got.len(), spans.len());
    let at = got.iter().zip(spans).position(|(got, span)| !span.has(*got))?;
    Some(format!("element {at}: {} instead of {:?}", value(got[at]), spans[at]))
}

/// Relative error of fp32 sums of a few thousand squares and of the approximate square root.
const NORM_ERROR: f64 = 3e-6;

/// Returns RMSNorm of a row: `bf16(gamma * bf16(x * rsqrt(mean(x^2) + eps)))`.
pub fn norm(x: &[u16], gamma: &[u16], eps: f32) -> Vec<Span> {
    let square = x.iter().map(|x| value(*x) * value(*x)).sum::<f64>() / x.len() as f64;
    let scale = (square + f64::from(eps)).sqrt().recip();
    let apply = |(x, gamma): (&u16, &u16)| {
        let inner = Span::about(value(*x) * scale, NORM_ERROR);
        Span::of(inner.low * value(*gamma), inner.high * value(*gamma))
    };
    x.iter().zip(gamma).map(apply).collect()
}

/// Returns the norm, of any kind, of a row, added to the row `before` if given. A bias follows the weights in `gamma`.
pub fn norm_of(kind: NormKind, x: &[u16], gamma: &[u16], eps: f32, before: Option<&[u16]>) -> Vec<Span> {
    let count = x.len() as f64;
    let middle = match kind {
        NormKind::Layer | NormKind::LayerBias => x.iter().map(|x| value(*x)).sum::<f64>() / count,
        NormKind::Rms | NormKind::RmsOnce | NormKind::RmsPlusOne => 0.0,
    };
    let square = x.iter().map(|x| (value(*x) - middle).powi(2)).sum::<f64>() / count;
    let scale = (square + f64::from(eps)).sqrt().recip();
    let apply = |(i, (of, weight)): (usize, (&u16, &u16))| {
        // The absolute error of the difference is relative to both operands, not to the difference.
        let lost = NORM_ERROR * scale * middle.abs();
        let inner = (value(*of) - middle) * scale;
        let (low, high) = match kind {
            NormKind::Rms => {
                let inner = Span::about(inner, NORM_ERROR);
                (inner.low, inner.high)
            }
            NormKind::RmsOnce | NormKind::Layer | NormKind::RmsPlusOne | NormKind::LayerBias => {
                let error = inner.abs() * NORM_ERROR + lost;
                (inner - error, inner + error)
            }
        };
        let before = before.map_or(0.0, |before| value(before[i]));
        let beta = if kind == NormKind::LayerBias { value(gamma[x.len() + i]) } else { 0.0 };
        // The kernel adds in fp32, too; the bias first.
        let error = if beta == 0.0 { 0.0 } else { 2e-7 * (beta.abs() + before.abs()) };
        let more = Span { low: beta + before - error, high: beta + before + error };
        let added = if kind == NormKind::RmsPlusOne { 1.0 } else { 0.0 };
        let factor = f64::from((added + value(*weight)) as f32);
        Span::sum(Span { low, high }, factor, more, 1.0)
    };
    x.iter().zip(gamma).enumerate().map(apply).collect()
}

/// Returns the activated gate times `up`.
pub fn gated(function: GateFunction, gate: u16, up: u16) -> Span {
    let (gate, up) = (value(gate), value(up));
    // Both functions are gate / (1 + e^exponent). fp32 knows this as precisely as the exponent.
    let (exponent, error) = match function {
        GateFunction::Silu => (-gate, 1e-6),
        GateFunction::Gelu => (-2.0 * (2.0 / PI).sqrt() * (gate + 0.044715 * gate.powi(3)), 2e-5),
    };
    let span = Span::about(gate / (1.0 + exponent.exp()) * up, error);
    // e^88 overflows fp32, and its reciprocal is zero.
    if exponent > 87.0 { Span { low: span.low.min(0.0), high: span.high.max(0.0) } } else { span }
}

/// Returns `cap * tanh(x / cap)`.
pub fn capped(x: u16, cap: f32) -> Span {
    let cap = f64::from(cap);
    let y = cap * (value(x) / cap).tanh();
    // The fp32 tanh has an absolute error of a few units in the last place of 1.
    Span::of(y - cap * 1e-6, y + cap * 1e-6)
}

/// The rotation of a head: cosines and sines, one per rotated pair.
pub type Angles<'a> = (&'a [u16], &'a [u16]);

/// Returns the elements of rotated pair `i`: `half` apart, or adjacent.
pub fn pair_of(adjacent: bool, half: usize, i: usize) -> (usize, usize) {
    if adjacent { (2 * i, 2 * i + 1) } else { (i, i + half) }
}

/// Returns a table of angles in the layout that a kernel for adjacent pairs reads: the lower and the upper half of each
/// row of `half` interleaved.
pub fn adjacent_table(table: &[u16], half: usize) -> Vec<u16> {
    let of = |at: usize| table[at / half * half + at % half / 2 + at % 2 * (half / 2)];
    (0..table.len()).map(of).collect()
}

/// Applies bias, norm and rotation to a head, as given, and rounds after each step. Rotated pairs are `half` apart or
/// adjacent.
pub fn head(
    x: &[u16],
    bias: Option<&[u16]>,
    gamma: Option<(NormKind, &[u16], f32)>,
    angles: Option<Angles<'_>>,
    adjacent: bool,
) -> Vec<Span> {
    let mut x = x.to_vec();
    if let Some(bias) = bias {
        // The kernel adds in fp32, too.
        x.iter_mut().zip(bias).for_each(|(x, bias)| *x = rounded(f64::from(value(*x) as f32 + value(*bias) as f32)));
    }
    let mut spans = match gamma {
        Some((NormKind::Rms, gamma, eps)) => norm(&x, gamma, eps),
        Some((kind, gamma, eps)) => norm_of(kind, &x, gamma, eps, None),
        None => x.iter().map(|x| Span::about(value(*x), 0.0)).collect(),
    };
    if let Some((cosines, sines)) = angles {
        let half = cosines.len();
        for i in 0..half {
            let (first, second) = pair_of(adjacent, half, i);
            let (a, b, cosine, sine) = (spans[first], spans[second], value(cosines[i]), value(sines[i]));
            spans[first] = Span::sum(a, cosine, b, -sine);
            spans[second] = Span::sum(b, cosine, a, sine);
        }
    }
    spans
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_to_the_nearest_and_to_even() {
        for bits in [0u16, 1, 0x0080, 0x3f80, 0x3f81, 0x7f7f, 0x8000, 0xbf80] {
            assert_eq!(rounded(value(bits)), bits);
        }
        let (one, next) = (value(0x3f80), value(0x3f81));
        let middle = f64::midpoint(one, next);
        assert_eq!((rounded(middle), rounded(f64::midpoint(next, value(0x3f82)))), (0x3f80, 0x3f82));
        // Closer to the midpoint than fp32 can represent.
        assert_eq!((rounded(middle * (1.0 + 1e-15)), rounded(middle * (1.0 - 1e-15))), (0x3f81, 0x3f80));
        assert_eq!((rounded(f64::INFINITY), rounded(1e300), rounded(f64::NAN)), (0x7f80, 0x7f80, 0x7fff));
    }

    #[test]
    fn one_bf16_or_two_adjacent_ones() {
        assert!(Span::about(1.0, 1e-6).has(0x3f80) && !Span::about(1.0, 1e-6).has(0x3f81));
        let between = Span::about(f64::midpoint(value(0x3f80), value(0x3f81)), 1e-6);
        assert!(between.has(0x3f80) && between.has(0x3f81) && !between.has(0x3f82) && !between.has(0xffff));
        assert!(Span::about(0.0, 1e-6).has(0x8000), "zeros are one number");
        let wrong = outside(&[0x3f80, 0x3f82], &[between, between]).unwrap();
        assert!(wrong.starts_with("element 1"), "{wrong}");
    }

    #[test]
    fn a_norm_has_unit_length() {
        let (x, gamma) = ([0x4000u16; 8], [0x3f80u16; 8]);
        assert_eq!(outside(&[0x3f80; 8], &norm(&x, &gamma, 1e-6)), None);
        assert_eq!(outside(&[0; 8], &norm(&[0; 8], &gamma, 1e-6)), None);
        // A quarter turn maps the first half to the second.
        let turned = head(&[0x3f80, 0x4000], None, None, Some((&[0], &[0x3f80])), false);
        assert_eq!(outside(&[0xc000, 0x3f80], &turned), None);
        // 1, 2, 3, 4: the first pair stays, the second turns by a quarter.
        let x = [0x3f80, 0x4000, 0x4040, 0x4080];
        let turned = head(&x, None, None, Some((&[0x3f80, 0], &[0, 0x3f80])), true);
        assert_eq!(outside(&[0x3f80, 0x4000, 0xc080, 0x4040], &turned), None);
        // 3 and 1 are 1 and -1 around their mean; then 2 is added.
        let layer = norm_of(NormKind::Layer, &[0x4040, 0x3f80], &[0x3f80; 2], 1e-9, Some(&[0x4000; 2]));
        assert_eq!(outside(&[0x4040, 0x3f80], &layer), None);
        assert!(gated(GateFunction::Silu, 0, 0x3f80).has(0));
        assert!(gated(GateFunction::Silu, 0x4120, 0x4000).has(rounded(19.999)));
        // GELU of 1 and of -2 in the tanh approximation.
        assert!(gated(GateFunction::Gelu, 0x3f80, 0x3f80).has(rounded(0.841192)));
        assert!(gated(GateFunction::Gelu, 0xc000, 0x3f80).has(rounded(-0.045402)));
        assert!(capped(0x4120, 10.0).has(rounded(7.615942)) && !capped(0x4120, 10.0).has(0x4120));
        let biased = [0x3f80, 0x3f80, 0x4040, 0xbf80];
        let biased = norm_of(NormKind::LayerBias, &[0x4040, 0x3f80], &biased, 1e-9, Some(&[0x4000; 2]));
        // 1 and -1, with a bias of 3 and -1, added to 2.
        assert!(biased[0].has(rounded(6.0)) && biased[1].has(0) && !biased[0].has(rounded(3.0)));
        let plus_one = norm_of(NormKind::RmsPlusOne, &[0x4000; 2], &[0x3f80; 2], 1e-9, None);
        assert_eq!(outside(&[0x4000; 2], &plus_one), None);
    }
}
