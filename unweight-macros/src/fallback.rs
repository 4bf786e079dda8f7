//! What is emitted next to errors.
//!
//! The struct stays, and so does an `impl`: without it every use of the type would be a further error and hide the one
//! that matters.

use proc_macro2::TokenStream;
use quote::quote;
use syn::{Data, DeriveInput, Error, Path, parse2};

/// The item, the errors, and for a struct an `impl` that no program can run, because the errors stop the build.
/// `codegen` is `None` where the attribute does not say legibly where the code generator is.
pub(crate) fn expand(item: &TokenStream, codegen: Option<&Path>, error: &Error) -> TokenStream {
    let errors = error.to_compile_error();
    let implementation = match (parse2::<DeriveInput>(item.clone()), codegen) {
        (Ok(DeriveInput { data: Data::Struct(_), ident: name, generics, .. }), Some(codegen)) => {
            let (generics, arguments, bounds) = generics.split_for_impl();
            quote! {
                #[automatically_derived]
                impl #generics #codegen::Variant for #name #arguments #bounds {
                    type Family = #codegen::spec::SomeFamily;
                    const SPEC: #codegen::spec::VariantSpec = #codegen::spec::VariantSpec::SOME;
                }
            }
        }
        _ => TokenStream::new(),
    };
    quote!(#item #errors #implementation)
}
