//! `#[unweight_variant(...)]`: a kernel variant declared as a type.
//!
//! ```
//! use unweight_codegen::Variant;
//! use unweight_macros::unweight_variant;
//!
//! /// Two tiles of W per block, four stages; palette source with room for 8 verbatim rows, plain store.
//! #[unweight_variant(n = 2, stages = 4)]
//! struct GateProjection;
//!
//! #[unweight_variant(op = decode, output = full, code_limit = 7)]
//! struct FullDecode;
//!
//! assert_eq!(GateProjection::SPEC.to_string(), "uw_sm90a_matmul_palette_n2p4_v8_store");
//! assert_eq!(FullDecode::SPEC.to_string(), "uw_sm90a_decode_full_l7");
//! ```
//!
//! The struct then implements `unweight_codegen::Variant`: its spec is a constant, checked where it is written.
//!
//! ```text
//! attr   tokens of the attribute -> key = value pairs, with spans
//! valid  pairs + item -> ast, or errors on the user's own tokens
//! ast    one declared variant
//! expand ast -> impl Variant, with const assertions
//! fallback what is emitted beside errors, so that they do not multiply
//! ```
//!
//! The macro judges syntax. What a number may be, and which combinations exist, is known to `unweight-codegen` alone: the
//! expansion calls its `const fn`s and shows their message at the token or the attribute.

mod ast;
mod attr;
mod expand;
mod fallback;
mod valid;

use proc_macro::TokenStream;
use proc_macro2::TokenStream as TokenStream2;

/// Implements `Variant` for a unit struct.
///
/// | key | operations | values | default |
/// |---|---|---|---|
/// | `op` | all | `matmul`, `decode`, `encode` | `matmul` |
/// | `n` | matmul | 1..=4 tiles of 64 output features | |
/// | `stages` | matmul | 2..=8 | |
/// | `source` | matmul | `palette`, `exponent` | `palette` |
/// | `verbatim` | matmul, palette source | 0, 4, 8, 16, 32, 64 rows per tile | 8 |
/// | `epilogue` | matmul | `store`, `store_add` | `store` |
/// | `output` | decode | `full`, `exponent`, `palette` | |
/// | `code_limit` | decode | 6..=15 bits | 7 |
/// | `stage` | encode | `stats`, `table`, `decode_table`, `rows`, `scan`, `write`, `palette` | |
/// | `arch` | all | `sm90a` | `sm90a` |
/// | `crate` | all | path of the code generator | `::unweight_codegen` |
///
/// Users of the facade write `crate = ::unweight::codegen`. A spec that cannot exist is a compile error that names the sum,
/// the limit and what would fit.
#[proc_macro_attribute]
pub fn unweight_variant(attribute: TokenStream, item: TokenStream) -> TokenStream {
    let item = TokenStream2::from(item);
    let expanded = match attr::parse(attribute.into()) {
        Ok(pairs) => match valid::check(&pairs, &item) {
            Ok(variant) => expand::expand(&item, &variant),
            Err(error) => fallback::expand(&item, valid::crate_path(&pairs).ok().as_ref(), &error),
        },
        Err(error) => fallback::expand(&item, None, &error),
    };
    expanded.into()
}
