//! The layout of a page of the KV cache, as in `templates/include/unweight/encoding/kv_page.cuh`.
//!
//! ```text
//! cache     bf16 [layer][page][kv_head][K | V][64 tokens * head_dim]
//! K or V    [64 / 8 groups][head_dim / 8 / chunks atoms][8 lines][chunks] of 16 bytes; line = token % 8
//! chunks    8 if head_dim is a multiple of 64, otherwise 4, 2 or 1: what divides the chunks of a token
//! ```
//!
//! Chunk `c` of a line is at `c ^ line * chunks / 8`, the swizzle of the copy engine and of the tensor cores.
//!
//! [`packed`] holds the 12-bit encoding of a full page.

pub mod packed;

/// Tokens of a page.
pub const PAGE_TOKENS: u32 = 64;

/// Tokens of a group. A group is contiguous, so a tile of whole groups is one range of memory.
pub const GROUP_TOKENS: u32 = 8;

/// Elements of a chunk: 16 bytes, the unit of the swizzle.
pub const CHUNK_ELEMENTS: u32 = 8;

/// The key or the value of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvHalf {
    /// Keys, which queries are compared with.
    Key,
    /// Values, whose weighted sum is the result.
    Value,
}

/// Elements of K and V of one page: `[kv_heads][K | V][64][head_dim]`, in a layer.
///
/// `None` if it does not fit a `u64`.
pub const fn page_elements(kv_heads: u32, head_dim: u32) -> Option<u64> {
    (kv_heads as u64 * 2 * PAGE_TOKENS as u64).checked_mul(head_dim as u64)
}

/// Returns the index, in a page's K (or V) of one KV head, of element `index` (`0..head_dim`) of a token (`0..64`).
///
/// `head_dim` is a multiple of 8.
///
/// ```
/// # use unweight_codegen::kv::element;
/// // The second chunk of token 1: in its line of 64 elements, swapped with the first.
/// assert_eq!(element(128, 1, 8), 64);
/// // The second half of head_dim is another atom of 8 x 64.
/// assert_eq!(element(128, 0, 64), 512);
/// ```
pub const fn element(head_dim: u32, token: u32, index: u32) -> u32 {
    let chunk = index / CHUNK_ELEMENTS;
    let shift = match head_dim % 64 {
        0 => 3,
        32 => 2,
        16 | 48 => 1,
        _ => 0,
    };
    let line = token % GROUP_TOKENS;
    let (atom, position) = (chunk >> shift, (chunk & ((1 << shift) - 1)) ^ (line >> (3 - shift)));
    let group = token / GROUP_TOKENS * GROUP_TOKENS * head_dim;
    group + ((((atom * GROUP_TOKENS + line) << shift) | position) * CHUNK_ELEMENTS) + index % CHUNK_ELEMENTS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_of_a_page_has_one_place() {
        for head_dim in (8..=256).step_by(8) {
            let mut used = vec![false; (PAGE_TOKENS * head_dim) as usize];
            for token in 0..PAGE_TOKENS {
                for index in 0..head_dim {
                    let at = element(head_dim, token, index);
                    assert!(!std::mem::replace(&mut used[at as usize], true), "{head_dim}: {token}, {index} at {at}");
                    // Groups are contiguous.
                    assert_eq!(at / (GROUP_TOKENS * head_dim), token / GROUP_TOKENS);
                }
            }
        }
    }

    /// The eight lines of one 8 x 8 matrix of a fragment are in eight different groups of four banks.
    #[test]
    fn matrices_are_read_without_bank_conflicts() {
        for head_dim in (8..=256).step_by(8) {
            for chunk in 0..head_dim / CHUNK_ELEMENTS {
                let banks = (0..8).fold(0, |banks, line| {
                    let byte = element(head_dim, line, chunk * CHUNK_ELEMENTS) * 2;
                    banks | 1 << (byte / 16 % 8)
                });
                assert_eq!(banks, 255_u32, "{head_dim}: chunk {chunk}");
            }
        }
    }
}
