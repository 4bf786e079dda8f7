//! Expands `macro_rules!` of this workspace, so that their definitions are listed as if they were written out.
//!
//! Supports only what the macros here use: fragments that [`syn`] parses, repetitions and nested groups. Hygiene is not
//! needed, because function bodies are not listed.

use std::collections::BTreeMap;

use proc_macro2::{Delimiter, Group, Ident, TokenStream, TokenTree};
use quote::ToTokens;
use syn::{
    Result,
    parse::{ParseStream, Parser, discouraged::Speculative},
};

/// The rules of a macro: for each, its patterns and its output.
#[derive(Clone)]
pub struct Rules(Vec<(Vec<Pattern>, TokenStream)>);

#[derive(Clone)]
enum Pattern {
    Token(TokenTree),
    Group(Delimiter, Vec<Pattern>),
    /// The name and the kind of a fragment.
    Fragment(String, String),
    Repeat(Repeat, Vec<Pattern>),
}

#[derive(Clone)]
struct Repeat {
    separator: Option<TokenTree>,
    once: bool,
}

#[derive(Clone)]
enum Bound {
    One(TokenStream),
    /// One value per repetition.
    Many(Vec<Bound>),
}

type Bindings = BTreeMap<String, Bound>;

impl Rules {
    /// Parses the tokens in `macro_rules! name { ... }`.
    pub fn new(tokens: TokenStream) -> Self {
        let mut groups = tokens.into_iter().filter_map(|token| match token {
            TokenTree::Group(group) => Some(group.stream()),
            _ => None,
        });
        let mut rules = Vec::new();
        while let (Some(pattern), Some(output)) = (groups.next(), groups.next()) {
            rules.push((patterns(pattern), output));
        }
        Self(rules)
    }

    /// Expands the macro for these tokens; `None` if no rule matches.
    pub fn expand(&self, tokens: &TokenStream) -> Option<TokenStream> {
        self.0.iter().find_map(|(patterns, output)| {
            let mut bindings = Bindings::new();
            let match_patterns = |input: ParseStream| match_patterns(patterns, input, &mut bindings);
            match_patterns.parse2(tokens.clone()).ok()?;
            Some(write(output.clone(), &bindings))
        })
    }
}

fn is(token: Option<&TokenTree>, sign: char) -> bool {
    matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == sign)
}

/// Returns how often a group repeats, from the tokens after `$( ... )`, and the number of these tokens.
fn repeat(tokens: &[TokenTree]) -> (Repeat, usize) {
    let sign = |at: usize| ['*', '+', '?'].into_iter().find(|sign| is(tokens.get(at), *sign));
    match sign(0) {
        Some(sign) => (Repeat { separator: None, once: sign == '?' }, 1),
        None => (Repeat { separator: tokens.first().cloned(), once: false }, 2),
    }
}

fn patterns(tokens: TokenStream) -> Vec<Pattern> {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let (mut found, mut at) = (Vec::new(), 0);
    while let Some(token) = tokens.get(at) {
        at += 1;
        let next = tokens.get(at);
        found.push(match (token, next) {
            (dollar, Some(TokenTree::Ident(name))) if is(Some(dollar), '$') && is(tokens.get(at + 1), ':') => {
                let kind = tokens[at + 2].to_string();
                at += 3;
                Pattern::Fragment(name.to_string(), kind)
            }
            (dollar, Some(TokenTree::Group(group))) if is(Some(dollar), '$') => {
                let (repeat, length) = repeat(&tokens[at + 1..]);
                at += 1 + length;
                Pattern::Repeat(repeat, patterns(group.stream()))
            }
            (TokenTree::Group(group), _) => Pattern::Group(group.delimiter(), patterns(group.stream())),
            (token, _) => Pattern::Token(token.clone()),
        });
    }
    found
}

/// Matches the patterns against the input and consumes it.
fn match_patterns(patterns: &[Pattern], input: ParseStream, bindings: &mut Bindings) -> Result<()> {
    for pattern in patterns {
        match pattern {
            Pattern::Token(token) => {
                if input.parse::<TokenTree>()?.to_string() != token.to_string() {
                    return Err(input.error("expected another token"));
                }
            }
            Pattern::Group(delimiter, inner) => match input.parse()? {
                TokenTree::Group(group) if group.delimiter() == *delimiter => {
                    let match_patterns = |input: ParseStream| match_patterns(inner, input, bindings);
                    match_patterns.parse2(group.stream())?;
                }
                _ => return Err(input.error("expected another group")),
            },
            Pattern::Fragment(name, kind) => {
                let tokens = fragment(kind, input)?;
                bindings.insert(name.clone(), Bound::One(tokens));
            }
            Pattern::Repeat(repeat, inner) => {
                let lists = repetitions(repeat, inner, input);
                bindings.extend(lists.into_iter().map(|(name, values)| (name, Bound::Many(values))));
            }
        }
    }
    Ok(())
}

/// Matches a group as often as possible. Every name in the group gets a list, which may be empty.
fn repetitions(repeat: &Repeat, inner: &[Pattern], input: ParseStream) -> BTreeMap<String, Vec<Bound>> {
    let mut all: BTreeMap<String, Vec<Bound>> = names(inner).into_iter().map(|name| (name, Vec::new())).collect();
    let mut rounds = 0;
    while !input.is_empty() && (rounds == 0 || !repeat.once) {
        let (fork, mut bindings) = (input.fork(), Bindings::new());
        if let Some(separator) = repeat.separator.as_ref().filter(|_| rounds > 0) {
            let is_separator = fork.parse::<TokenTree>().is_ok_and(|token| token.to_string() == separator.to_string());
            if !is_separator {
                break;
            }
        }
        if match_patterns(inner, &fork, &mut bindings).is_err() {
            break;
        }
        input.advance_to(&fork);
        rounds += 1;
        for (name, value) in bindings {
            all.entry(name).or_default().push(value);
        }
    }
    all
}

fn names(patterns: &[Pattern]) -> Vec<String> {
    let of = |pattern: &Pattern| match pattern {
        Pattern::Token(_) => Vec::new(),
        Pattern::Group(_, inner) | Pattern::Repeat(_, inner) => names(inner),
        Pattern::Fragment(name, _) => vec![name.clone()],
    };
    patterns.iter().flat_map(of).collect()
}

fn fragment(kind: &str, input: ParseStream) -> Result<TokenStream> {
    Ok(match kind {
        "ident" => input.call(syn::ext::IdentExt::parse_any).map(|ident: Ident| ident.into_token_stream())?,
        "ty" => input.parse::<syn::Type>()?.into_token_stream(),
        "expr" => input.parse::<syn::Expr>()?.into_token_stream(),
        "literal" => input.parse::<syn::Lit>()?.into_token_stream(),
        "meta" => input.parse::<syn::Meta>()?.into_token_stream(),
        "path" => input.parse::<syn::Path>()?.into_token_stream(),
        "vis" => input.parse::<syn::Visibility>()?.into_token_stream(),
        "block" => input.parse::<syn::Block>()?.into_token_stream(),
        "lifetime" => input.parse::<syn::Lifetime>()?.into_token_stream(),
        "pat" => syn::Pat::parse_multi(input)?.into_token_stream(),
        "item" => input.parse::<syn::Item>()?.into_token_stream(),
        "tt" => input.parse::<TokenTree>()?.into_token_stream(),
        other => panic!("fragment kind {other} is not supported; add it to this match"),
    })
}

fn write(tokens: TokenStream, bindings: &Bindings) -> TokenStream {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let (mut out, mut at) = (TokenStream::new(), 0);
    while let Some(token) = tokens.get(at) {
        at += 1;
        match (token, tokens.get(at)) {
            // `$crate` becomes `crate`, because a listing covers one crate.
            (dollar, Some(TokenTree::Ident(name))) if is(Some(dollar), '$') => {
                at += 1;
                match bindings.get(&name.to_string()) {
                    Some(Bound::One(value)) => out.extend(value.clone()),
                    Some(Bound::Many(_)) => panic!("${name} repeats, but is used without a repetition"),
                    None => out.extend([TokenTree::Ident(name.clone())]),
                }
            }
            (dollar, Some(TokenTree::Group(group))) if is(Some(dollar), '$') => {
                let (repeat, length) = repeat(&tokens[at + 1..]);
                at += 1 + length;
                for (round, one) in rounds(group.stream(), bindings).iter().enumerate() {
                    out.extend(repeat.separator.clone().filter(|_| round > 0));
                    out.extend(write(group.stream(), one));
                }
            }
            (TokenTree::Group(group), _) => {
                out.extend([TokenTree::Group(Group::new(group.delimiter(), write(group.stream(), bindings)))]);
            }
            (token, _) => out.extend([token.clone()]),
        }
    }
    out
}

/// Returns the bindings of each repetition of a group.
fn rounds(group: TokenStream, bindings: &Bindings) -> Vec<Bindings> {
    let used = idents(group);
    let many = bindings.iter().filter_map(|(name, bound)| match bound {
        Bound::Many(values) if used.contains(name) => Some((name, values)),
        _ => None,
    });
    let many: Vec<_> = many.collect();
    let count = many.iter().map(|(_, values)| values.len()).max().unwrap_or(0);
    let of = |round: usize| {
        let own = many.iter().filter_map(|(name, values)| Some(((*name).clone(), values.get(round)?.clone())));
        bindings.clone().into_iter().chain(own).collect()
    };
    (0..count).map(of).collect()
}

fn idents(tokens: TokenStream) -> Vec<String> {
    let of = |token| match token {
        TokenTree::Ident(ident) => vec![ident.to_string()],
        TokenTree::Group(group) => idents(group.stream()),
        _ => Vec::new(),
    };
    tokens.into_iter().flat_map(of).collect()
}

#[test]
fn rules_are_expanded_as_the_compiler_does() {
    let expand = |rules: &str, tokens: &str| {
        let rules = Rules::new(rules.parse().expect("rules"));
        rules.expand(&tokens.parse().expect("tokens")).map(|tokens| tokens.to_string().replace(' ', ""))
    };
    let text = |tokens: &str| Some(tokens.replace([' ', '\n'], ""));
    let fields = "($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty $(= $value:tt)?),* $(,)? }) => {
        $(#[$doc])* pub struct $name { $(pub $field: $type),* }
        impl $name { $(pub fn $field(&self) { $($value;)? })* fn f(_: $crate::X) {} }
    };";
    assert_eq!(
        expand(fields, "#[a] #[b(c)] S { x: Vec<u8> = 3, y: [u8; 2], }"),
        text(
            "#[a] #[b(c)] pub struct S { pub x: Vec<u8>, pub y: [u8; 2] }
             impl S { pub fn x(&self) { 3; } pub fn y(&self) { } fn f(_: crate::X) {} }"
        )
    );
    assert_eq!(expand(fields, "S { }"), text("pub struct S { } impl S { fn f(_: crate::X) {} }"));
    let words = "(@type flag) => { bool }; (@type $axis:ident) => { $axis };";
    assert_eq!(expand(words, "@type flag"), text("bool"));
    assert_eq!(expand(words, "@type Stages"), text("Stages"));
    assert_eq!(expand(words, "@other Stages"), None);
}
