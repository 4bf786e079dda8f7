//! The slow reference of the encoder and decoder: DFloat11 as documented, bit by bit.

use unweight_format::{Histogram, raw::bf16};

use super::{Code, FIRST_JUMP, NotEncodable, Unit, WINDOW_BYTES};

/// Decodes the weights of a unit from its codes and tables alone; `None` if these are invalid.
pub fn decode(unit: &Unit) -> Option<Vec<u8>> {
    let bit = |at: usize| unit.encoded_exponent.get(at / 8).is_some_and(|byte| byte >> (7 - at % 8) & 1 == 1);
    let byte = |at: usize| (0..8).fold(0usize, |byte, i| byte << 1 | usize::from(bit(at + i)));
    let rows = (unit.luts.len() / 256).checked_sub(1)?;
    let (mut at, mut out) = (0, Vec::new());
    for &sign_mantissa in &unit.sign_mantissa {
        let (mut row, mut exponent) = (0, FIRST_JUMP);
        for depth in 0..4 {
            exponent = *unit.luts.get(row * 256 + byte(at + 8 * depth))?;
            if exponent < FIRST_JUMP {
                break;
            }
            row = 256 - usize::from(exponent);
            if row >= rows {
                return None;
            }
        }
        let length = usize::from(*unit.luts.get(rows * 256 + usize::from(exponent))?);
        if exponent >= FIRST_JUMP || length == 0 {
            return None;
        }
        at += length;
        out.extend(bf16::join(sign_mantissa, exponent).to_le_bytes());
    }
    (at.div_ceil(8) == unit.encoded_exponent.len()).then_some(out)
}

/// Encodes weights as a unit.
///
/// # Errors
/// As [`Unit::encode`].
pub fn encode(weights: &[u8], threads: usize) -> Result<Unit, NotEncodable> {
    let elements: Vec<u16> = weights.chunks_exact(2).map(|e| u16::from_le_bytes([e[0], e[1]])).collect();
    let code = Code::of(&Histogram::of(weights))?;
    let (window_bits, block_bits) = (8 * WINDOW_BYTES, 8 * WINDOW_BYTES * threads);
    let (mut bits, mut gaps, mut positions) = (Vec::new(), Vec::new(), Vec::new());
    let append = |bits: &mut Vec<bool>, word: super::Codeword| {
        bits.extend((0..word.bits).rev().map(|i| word.value >> i & 1 == 1));
    };
    // The end code is encoded, too, if the last byte is incomplete.
    for index in 0..=elements.len() {
        if index == elements.len() && bits.len().is_multiple_of(8) {
            break;
        }
        if bits.len() >= window_bits * gaps.len() {
            gaps.push(bits.len() % window_bits);
        }
        if bits.len() >= block_bits * positions.len() {
            positions.push(index as u32);
        }
        match elements.get(index) {
            Some(&element) => append(&mut bits, code.word(bf16::exponent(element))),
            None => {
                let whole = bits.len().next_multiple_of(8);
                append(&mut bits, code.end().unwrap_or_default());
                bits.resize(whole, false);
            }
        }
    }
    let bytes = |bits: &[bool]| -> Vec<u8> {
        let byte = |bits: &[bool]| bits.iter().enumerate().fold(0, |byte, (i, &bit)| byte | u8::from(bit) << (7 - i));
        bits.chunks(8).map(byte).collect()
    };
    let encoded_exponent = bytes(&bits);
    let blocks = encoded_exponent.len().div_ceil(WINDOW_BYTES * threads);
    positions.resize(blocks, elements.len() as u32);
    positions.push(elements.len() as u32);
    gaps.resize(blocks * threads, 0);
    let gap_bits: Vec<bool> = gaps.iter().flat_map(|gap| (0..5).rev().map(move |i| gap >> i & 1 == 1)).collect();
    Ok(Unit {
        luts: code.luts()?,
        encoded_exponent,
        sign_mantissa: elements.iter().map(|&element| bf16::sign_mantissa(element)).collect(),
        output_positions: positions.iter().flat_map(|position| position.to_le_bytes()).collect(),
        gaps: bytes(&gap_bits),
        threads,
    })
}
