//! Generates the `impl Variant`. Checks that only `unweight-codegen` can make become const assertions.

use crate::{
    attr::{Pair, Value},
    valid::Variant,
};
use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, quote, quote_spanned};
use syn::{Ident, LitInt, spanned::Spanned};

/// Returns the item and its `impl Variant`:
///
/// ```text
/// const PAIRS           what the user wrote
/// const _ per pair      fails on the user's own token
/// const _               fails on the attribute: a key is missing, or the variant cannot exist
/// impl Variant          the family as a type, and the spec
/// ```
pub(crate) fn expand(item: &TokenStream, variant: &Variant) -> TokenStream {
    let Variant { codegen, name, pairs } = variant;
    let module = quote!(#codegen::spec::pairs);
    let entries = pairs.iter().map(|pair| entry(&module, pair));
    let checks = pairs.iter().enumerate().map(|(index, Pair { key, value })| {
        let on_key = refuse(key.span());
        let on_value = refuse(value.span());
        quote! {
            const _: () = match #module::check(PAIRS, #index) {
                ::core::result::Result::Ok(()) => (),
                ::core::result::Result::Err(#module::Blame::Key(message)) => #on_key,
                ::core::result::Result::Err(#module::Blame::Value(message)) => #on_value,
            };
        }
    });
    let on_all = refuse(Span::call_site());
    quote! {
        #item

        const _: () = {
            const PAIRS: &[#module::Pair] = &[#(#entries),*];
            #(#checks)*
            const _: () = match #module::check_all(PAIRS) {
                ::core::result::Result::Ok(()) => (),
                ::core::result::Result::Err(message) => #on_all,
            };

            #[automatically_derived]
            impl #codegen::Variant for #name {
                type Family =
                    <#codegen::family::FamilyAt<{ #module::place(PAIRS) }> as #codegen::family::ListedFamily>::Family;
                const SPEC: #codegen::spec::VariantSpec = #module::spec(PAIRS);
            }
        };
    }
}

/// Returns a pair as a constant. Words and paths become text, so that messages can quote them.
fn entry(module: &TokenStream, Pair { key, value }: &Pair) -> TokenStream {
    let key = key.to_string();
    let value = match value {
        Value::Int(number) => {
            // Without the suffix of the literal, because `2usize` would be a type error in the expansion.
            let number = LitInt::new(number.base10_digits(), number.span());
            quote!(Number(#number))
        }
        Value::Bool(value) => quote!(Switch(#value)),
        Value::Path(path) => {
            let text = path.to_token_stream().to_string().replace(' ', "");
            quote!(Word(#text))
        }
    };
    quote!(#module::Pair { key: #key, value: #module::PairValue::#value })
}

/// Returns code that reports `message` as a compile error at a span.
fn refuse(span: Span) -> TokenStream {
    // The identifier resolves at the call site, where the pattern binds it, although the error is shown at `span`: that
    // token may come from a `macro_rules!`.
    let message = Ident::new("message", Span::call_site());
    quote_spanned!(span=> ::core::panic!("{}", #message.as_str()))
}
