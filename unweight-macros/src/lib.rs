//! `#[unweight_variant(...)]`: a kernel variant declared as a type.
//!
//! ```text
//! #[unweight_variant(op = gemm_mma, batch_tile = 8, row_blocks = 3, warps = 8, stages = 2)]
//! struct GateUp;
//! ```
//!
//! The struct then implements `unweight_codegen::Variant`: its spec is a constant, checked where it is written, and its
//! family is a type, from which `unweight_rt` knows what launches the kernel. The crate `unweight_codegen` has examples
//! that run, and the tests: those of a crate of macros are built for the machine that builds, and everything that they
//! use with them a second time.
//!
//! ```text
//! attr     tokens of the attribute -> key = value pairs, with spans
//! valid    pairs + item -> variant, or errors on the user's own tokens
//! expand   variant -> impl Variant, with const assertions
//! fallback what is emitted next to errors, so that they do not multiply
//! ```
//!
//! The attribute judges syntax and knows no family. Which keys there are, what a value may be, and which combinations
//! exist, is known to `unweight-codegen` alone: the expansion calls its `const fn`s and shows their message at the
//! token or the attribute.

mod attr;
mod expand;
mod fallback;
mod valid;

use proc_macro::TokenStream;
use proc_macro2::TokenStream as TokenStream2;
use syn::{Path, parse_quote};

/// Declares a kernel variant: implements `Variant` for a unit struct.
///
/// ```text
/// #[unweight_variant(op = gemm_mma, batch_tile = 8, row_blocks = 3, warps = 8, stages = 2)]
/// struct GateUp;
/// ```
///
/// The item is a struct without fields and without generic parameters. Its visibility, documentation and other
/// attributes stay. The attribute is a list of `key = value`, each key at most once, in any order. A value is an
/// integer up to `u32::MAX`, `true` or `false`, or a word.
///
/// `op` names the kernel family, `gemm_recon` if it is left out; `arch` the architecture, `sm90a`; `crate` where the
/// code generator is. The other keys are the axes of the family, listed with their values and defaults in
/// `docs/adding-a-variant.md`.
///
/// The default of `crate` is where the attribute comes from: `::unweight::codegen` for `unweight::unweight_variant`.
/// Only a crate that renames its dependency says it: `crate = ::renamed::codegen`.
///
/// What the struct then has:
///
/// | item | what it is |
/// |---|---|
/// | `GateUp::SPEC` | the `VariantSpec`, a constant |
/// | `<GateUp as Variant>::Family` | the typed spec of its family, here `GemmMmaSpec` |
/// | `GateUp::load(&kernels)?` | the launcher of its op, here `PackedGemm`, by the trait `unweight_rt::LoadVariant` |
/// | `kernels.register::<GateUp>()?` | dispatch then chooses among the shipped variants and this one |
///
/// Everything wrong is a compile error on the token that breaks the rule: an unknown `op`, key or word (the message
/// lists those that exist), a number outside its axis (with the limits), a key that comes twice or belongs to another
/// op or value. A missing key and a variant that cannot exist are errors on the attribute; the latter names the sum,
/// the limit and what would fit.
#[proc_macro_attribute]
pub fn unweight_variant(attribute: TokenStream, item: TokenStream) -> TokenStream {
    variant(attribute.into(), item.into(), parse_quote!(::unweight_codegen))
}

/// [`macro@unweight_variant`] as the facade `unweight` exports it, for crates that depend on nothing else.
///
/// An attribute cannot learn through which crate it was reached, and reading the user's `Cargo.toml` would cost every
/// user a TOML parser and fail in workspaces, tests and examples that inherit. So each way in has its own attribute.
#[proc_macro_attribute]
pub fn facade_unweight_variant(attribute: TokenStream, item: TokenStream) -> TokenStream {
    variant(attribute.into(), item.into(), parse_quote!(::unweight::codegen))
}

/// The expansion, with the path of the code generator for an attribute that does not say it.
fn variant(attribute: TokenStream2, item: TokenStream2, codegen: Path) -> TokenStream {
    let expanded = match attr::parse(attribute) {
        Ok(pairs) => {
            let place = valid::crate_path(&pairs, &codegen).ok();
            match valid::check(pairs, &item, &codegen) {
                Ok(variant) => expand::expand(&item, &variant),
                Err(error) => fallback::expand(&item, place.as_ref(), &error),
            }
        }
        Err(error) => fallback::expand(&item, None, &error),
    };
    expanded.into()
}
