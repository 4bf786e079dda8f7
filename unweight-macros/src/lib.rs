//! The attribute `#[unweight_variant(...)]`, which declares a kernel variant as a type.
//!
//! ```text
//! #[unweight_variant(op = gemm_mma, batch_tile = 8, row_blocks = 3, warps = 8, stages = 2)]
//! struct GateUp;
//! ```
//!
//! The struct then implements `unweight_codegen::Variant`. Its spec is a constant that is checked at compile time. Its
//! family is a type, from which `unweight_rt` derives the launcher of the kernel. `unweight_codegen` has examples that
//! run, and the tests: tests in a macro crate would build their dependencies a second time, for the host.
//!
//! ```text
//! attr     tokens of the attribute -> key = value pairs, with spans
//! valid    pairs + item -> variant, or errors on the user's own tokens
//! expand   variant -> impl Variant, with const assertions
//! fallback what is emitted next to errors, so that they do not multiply
//! ```
//!
//! The attribute checks only syntax. `unweight-codegen` alone defines which keys, values and combinations exist: the
//! expansion calls its `const fn`s and shows their messages at the token or the attribute.

mod attr;
mod expand;
mod fallback;
mod valid;

use proc_macro::TokenStream;
use proc_macro2::TokenStream as TokenStream2;
use syn::{Path, parse_quote};

/// Declares a kernel variant by implementing `Variant` for a unit struct.
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
/// `op` names the kernel family, by default `gemm_recon`. `arch` names the architecture, by default `sm90a`. `crate` is
/// the path of the code generator. The other keys are the axes of the family; `docs/adding-a-variant.md` lists them
/// with their values and defaults.
///
/// The default of `crate` depends on the attribute's crate: `::unweight::codegen` for `unweight::unweight_variant`.
/// Only a crate that renames its dependency needs it: `crate = ::renamed::codegen`.
///
/// The struct then provides:
///
/// | item | what it is |
/// |---|---|
/// | `GateUp::SPEC` | the `VariantSpec`, a constant of the trait `unweight::codegen::Variant` |
/// | `<GateUp as Variant>::Family` | the typed spec of its family, here `GemmMmaSpec` |
/// | `GateUp::load(&kernels)?` | the launcher of its op, here `PackedGemm`, by the trait `unweight_rt::LoadVariant` |
/// | `kernels.register::<GateUp>()?` | dispatch then chooses among the shipped variants and this one |
///
/// Every mistake is a compile error on the token that breaks the rule: an unknown `op`, key or word (the message lists
/// the known ones), a number outside its axis (with the limits), a key that is repeated or belongs to another op or
/// value. A missing key and an infeasible variant are errors on the attribute; the latter names the sum, the limit and
/// what would fit.
#[proc_macro_attribute]
pub fn unweight_variant(attribute: TokenStream, item: TokenStream) -> TokenStream {
    variant(attribute.into(), item.into(), parse_quote!(::unweight_codegen))
}

/// [`macro@unweight_variant`] as the facade `unweight` exports it, for crates that depend only on `unweight`.
///
/// An attribute cannot know through which crate it was reached. Reading the user's `Cargo.toml` would cost every user a
/// TOML parser, and fail in workspaces, tests and examples that inherit. So each crate exports its own attribute.
#[proc_macro_attribute]
pub fn facade_unweight_variant(attribute: TokenStream, item: TokenStream) -> TokenStream {
    variant(attribute.into(), item.into(), parse_quote!(::unweight::codegen))
}

/// Expands an attribute. `codegen` is the default path of the code generator.
fn variant(attribute: TokenStream2, item: TokenStream2, codegen: Path) -> TokenStream {
    let expanded = match attr::parse(attribute) {
        Ok(pairs) => {
            let codegen_path = valid::crate_path(&pairs, &codegen).ok();
            match valid::check(pairs, &item, &codegen) {
                Ok(variant) => expand::expand(&item, &variant),
                Err(error) => fallback::expand(&item, codegen_path.as_ref(), &error),
            }
        }
        Err(error) => fallback::expand(&item, None, &error),
    };
    expanded.into()
}
