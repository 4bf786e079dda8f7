//! Generates the output for an invalid attribute.
//!
//! The struct and an `impl` are emitted next to the errors. Without them, every use of the type would be a further
//! error and hide the one that matters.

use proc_macro2::TokenStream;
use quote::quote;
use syn::{Data, DeriveInput, Error, Path, parse2};

/// Returns the item, the errors and, for a struct, a placeholder `impl`, which never runs because the errors stop the
/// build. `codegen` is `None` if the path of the code generator could not be parsed.
pub(crate) fn expand(item: &TokenStream, codegen: Option<&Path>, error: &Error) -> TokenStream {
    let errors = error.to_compile_error();
    let implementation = match (parse2::<DeriveInput>(item.clone()), codegen) {
        (Ok(DeriveInput { data: Data::Struct(_), ident: name, generics, .. }), Some(codegen)) => {
            let (generics, arguments, bounds) = generics.split_for_impl();
            quote! {
                #[automatically_derived]
                impl #generics #codegen::Variant for #name #arguments #bounds {
                    type Family = #codegen::spec::PlaceholderFamily;
                    const SPEC: #codegen::spec::VariantSpec = #codegen::spec::VariantSpec::PLACEHOLDER;
                }
            }
        }
        _ => TokenStream::new(),
    };
    quote!(#item #errors #implementation)
}
