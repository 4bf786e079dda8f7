//! Formats declarations on one line: `fn(&self, name: &str) -> Result<u8, Error>`.

use proc_macro2::{Delimiter, Spacing, TokenStream, TokenTree};
use quote::ToTokens;
use syn::{FnArg, Generics, Pat, ReceiverKind, Signature};

/// Returns the text of a type, bounds or generics, independent of line breaks and trailing commas.
pub fn text(tokens: impl ToTokens) -> String {
    let mut out = String::new();
    write(tokens.into_token_stream(), &mut out);
    out
}

/// Returns a function without its name: names and types of parameters, without attributes and patterns.
pub fn function(signature: &Signature) -> String {
    let mut own = signature.clone();
    for input in &mut own.inputs {
        match input {
            FnArg::Receiver(own) => {
                own.attrs.clear();
                if !matches!(own.kind, ReceiverKind::Reference(..)) {
                    own.mutability = None;
                }
            }
            FnArg::Typed(argument) => {
                argument.attrs.clear();
                *argument.pat = match &*argument.pat {
                    Pat::Ident(pattern) => {
                        let name = &pattern.ident;
                        syn::parse_quote!(#name)
                    }
                    _ => syn::parse_quote!(_),
                };
            }
        }
    }
    let name = format!("fn {}", own.ident);
    text(own).replacen(&name, "fn", 1).trim_end_matches(',').to_owned()
}

/// Returns the parameters of a type or trait with all bounds: `<'a, T: Copy> where T: Debug`; empty if it has none.
pub fn generics(generics: &Generics) -> String {
    let mut without_clause = generics.clone();
    let clause = without_clause.where_clause.take().map(|clause| format!(" {}", text(clause).trim_end_matches(',')));
    text(without_clause) + &clause.unwrap_or_default()
}

fn write(tokens: TokenStream, out: &mut String) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let (mut joint, mut after) = (false, None::<String>);
    for (at, token) in tokens.iter().enumerate() {
        let mut word = match token {
            TokenTree::Group(group) => return_group(group.delimiter(), group.stream()),
            token => token.to_string(),
        };
        // An operator of two characters is one word.
        if let (TokenTree::Punct(punct), Some(TokenTree::Punct(next))) = (token, tokens.get(at + 1))
            && punct.spacing() == Spacing::Joint
            && ["::", "->", "..", "=="].contains(&&*format!("{}{}", punct.as_char(), next.as_char()))
        {
            word.push(next.as_char());
        }
        if std::mem::take(&mut joint) {
            continue;
        }
        joint = matches!(token, TokenTree::Punct(_)) && word.len() == 2;
        if word == ">" && out.ends_with(',') {
            out.pop();
        }
        if let Some(after) = &after
            && spaced(after, &word)
        {
            out.push(' ');
        }
        out.push_str(&word);
        after = Some(word);
    }
}

fn return_group(delimiter: Delimiter, inner: TokenStream) -> String {
    let tokens: Vec<TokenTree> = inner.clone().into_iter().collect();
    let commas = tokens.iter().filter(|token| token.to_string() == ",").count();
    let mut text = String::new();
    write(inner, &mut text);
    // `(T,)` is a tuple, and `(T)` is not.
    if text.ends_with(',') && (commas > 1 || delimiter != Delimiter::Parenthesis) {
        text.pop();
    }
    match delimiter {
        Delimiter::Parenthesis => format!("({text})"),
        Delimiter::Bracket => format!("[{text}]"),
        Delimiter::Brace => format!("{{ {text} }}"),
        Delimiter::None => text,
    }
}

/// Returns whether a space separates two words.
fn spaced(before: &str, word: &str) -> bool {
    let is_name = |text: &str| text.ends_with(|c: char| c.is_alphanumeric() || c == '_');
    if word == ">" {
        return false;
    }
    if matches!(before, "," | ":" | ";" | "->" | "=" | "+" | "==") {
        return true;
    }
    if matches!(before, "::" | "<" | "&" | "?" | "!" | "'" | "#" | "*" | ".." | "." | "-") {
        return false;
    }
    match word {
        "," | ":" | ";" | "::" | "." | ".." | "?" | "!" => false,
        "<" => !is_name(before) && before != ">",
        "->" | "=" | "+" | "==" | "{" | "*" | "'" | "#" | "-" => true,
        // Names of functions and traits: `fn name(...)`, `Fn(...)`, `fn name<T>(...)`.
        _ if word.starts_with('(') => !(before == ">" || is_name(before) && !is_keyword(before)),
        _ => true,
    }
}

fn is_keyword(word: &str) -> bool {
    matches!(word, "mut" | "const" | "dyn" | "impl" | "as" | "where" | "in")
}

#[test]
fn declarations_have_one_text_however_they_are_written() {
    let of = |written: &str| function(&syn::parse_str::<syn::ItemFn>(&format!("{written} {{}}")).expect("Rust").sig);
    let same = |written: &str, expected: &str| assert_eq!(of(written), expected, "{written}");
    same("fn f()", "fn()");
    same("pub const fn f(mut self, #[a] mut n: u32) -> Self", "const fn(self, n: u32) -> Self");
    same("fn f(&mut self, (a, b): (u8, u8),\n c: &'a [u8; 4],)", "fn(&mut self, _: (u8, u8), c: &'a [u8; 4])");
    same(
        "unsafe fn f<'a, T: Copy + 'a, const N: usize,>(x: impl Fn(&T) -> u8 + Send) -> Option<(T,)> where T: ?Sized,",
        "unsafe fn<'a, T: Copy + 'a, const N: usize>(x: impl Fn(&T) -> u8 + Send) -> Option<(T,)> where T: ?Sized",
    );
    same("fn f(p: *const u8, q: &mut dyn std::io::Read)", "fn(p: *const u8, q: &mut dyn std::io::Read)");
    same("fn f() -> Result<Vec<Box<dyn A>>, <T as B>::E>", "fn() -> Result<Vec<Box<dyn A>>, <T as B>::E>");
    same(
        "fn f() -> impl Iterator<Item = (u8, &'static str),> + '_",
        "fn() -> impl Iterator<Item = (u8, &'static str)> + '_",
    );
    same("fn f(g: &dyn for<'x> Fn(&'x u8) -> bool) -> !", "fn(g: &dyn for<'x> Fn(&'x u8) -> bool) -> !");
    let item: syn::ItemStruct = syn::parse_str("struct S<'a, T = u8> where T: Copy, { x: &'a T }").expect("Rust");
    assert_eq!(generics(&item.generics), "<'a, T = u8> where T: Copy");
}
