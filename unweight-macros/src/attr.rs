//! Parses the arguments of the attribute: `key = value, ...`.

use proc_macro2::TokenStream;
use quote::ToTokens;
use syn::{
    Ident, LitBool, LitInt, Path, Result, Token,
    ext::IdentExt,
    parse::{Parse, ParseStream, Parser},
    punctuated::Punctuated,
};

/// A pair `key = value`.
pub(crate) struct Pair {
    pub key: Ident,
    pub value: Value,
}

/// The value of a pair.
pub(crate) enum Value {
    Int(LitInt),
    Bool(LitBool),
    Path(Path),
}

impl Parse for Pair {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        // `crate` is a keyword, so any word is accepted here and checked by name later.
        let start = input.span();
        let pair = |_| syn::Error::new(start, "expected `key = value`, such as `n = 2`");
        let key = Ident::parse_any(input).map_err(pair)?;
        input.parse::<Token![=]>().map_err(pair)?;
        let value = if input.peek(LitInt) {
            Value::Int(input.parse()?)
        } else if input.peek(LitBool) {
            Value::Bool(input.parse()?)
        } else {
            Value::Path(parse_path(input, &key)?)
        };
        Ok(Self { key, value })
    }
}

fn parse_path(input: ParseStream<'_>, key: &Ident) -> Result<Path> {
    let start = input.span();
    // A value may be a keyword (`copy = async`); the path of a crate may not.
    if key != "crate" && input.fork().call(Path::parse_mod_style).is_err() && input.peek(Ident::peek_any) {
        return Ok(input.call(Ident::parse_any)?.into());
    }
    input
        .call(Path::parse_mod_style)
        .map_err(|_| syn::Error::new(start, format!("`{key}` takes an integer, true or false, a word or a path")))
}

impl ToTokens for Value {
    fn to_tokens(&self, tokens: &mut TokenStream) {
        match self {
            Self::Int(value) => value.to_tokens(tokens),
            Self::Bool(value) => value.to_tokens(tokens),
            Self::Path(value) => value.to_tokens(tokens),
        }
    }
}

/// Parses the pairs, in source order.
pub(crate) fn parse(tokens: TokenStream) -> Result<Vec<Pair>> {
    let pairs = Punctuated::<Pair, Token![,]>::parse_terminated.parse2(tokens)?;
    Ok(pairs.into_iter().collect())
}
