//! Checks that the public items of published crates match `docs/api/<crate>.txt` and stay within agreed limits.
//!
//! `UPDATE_DOCS=1 cargo test -p xtask --test public_api` writes the listings; review the difference before committing
//! it.
//!
//! **Measure.** An item is a module, type, trait, function, constant, static or macro that a path of public modules and
//! re-exports leads to, an inherent method or associated constant of such a type, or a method of such a trait. Every
//! item counts once, by its shortest path. Other paths are listed as `path = own path`. Re-exported items of other
//! crates are listed as `path = their path` and count there. Public fields of structs are counted separately. Variants
//! are listed but not counted. Implementations of traits are not listed. Items that are `#[doc(hidden)]` or need a
//! feature for tests are left out.
//!
//! **Declarations.** Each line is `path: declaration` without the name: types of fields, contents of variants,
//! signatures of functions, bounds. Types are written as in the source. Definitions by macros of the workspace are
//! listed in expanded form.
//!
//! **`raw`.** The module `raw` of a crate is public for benchmarks, tests and experts, and is not stable: any release
//! may change it. Items below it are listed and counted separately, with their own limit. An item with a path outside
//! `raw` counts outside.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
    fs,
    sync::OnceLock,
};

#[path = "public_api/declaration.rs"]
mod declaration;
#[path = "public_api/reader.rs"]
mod reader;
#[path = "public_api/rules.rs"]
mod rules;
mod workspace;

use reader::{Crate, MemberKind, ModulePath, exported};
use workspace::{published, root};

/// A published crate and its limits.
struct Limits {
    name: &'static str,
    /// The directory, relative to the root.
    folder: &'static str,
    /// Items outside `raw`.
    items: usize,
    /// Items and fields outside `raw`.
    items_and_fields: usize,
    /// Items and fields below `raw`.
    raw: usize,
}

/// The limits of format, rt and engine are deliberate. The others are the present counts, rounded up, to show growth.
const CRATES: [Limits; 10] = [
    limits("unweight", ".", [60, 80, 0]),
    limits("unweight-format", "unweight-format", [300, 510, 337]),
    limits("unweight-rt", "unweight-rt", [300, 376, 785]),
    limits("unweight-engine", "unweight-engine", [150, 170, 300]),
    limits("unweight-model", "unweight-model", [115, 225, 0]),
    limits("unweight-codegen", "unweight-codegen", [515, 1065, 0]),
    limits("unweight-macros", "unweight-macros", [2, 2, 0]),
    limits("unweight-templates", "templates", [4, 4, 0]),
    limits("unweight-rivals", "unweight-rivals", [160, 285, 0]),
    limits("unweight-bench", "unweight-bench", [193, 386, 0]),
];

const fn limits(name: &'static str, folder: &'static str, [items, items_and_fields, raw]: [usize; 3]) -> Limits {
    Limits { name, folder, items, items_and_fields, raw }
}

/// Returns the listing of each of [`CRATES`] and the items without a definition, read once for all tests.
fn listings() -> &'static [(String, Counts, BTreeSet<String>)] {
    static LISTINGS: OnceLock<Vec<(String, Counts, BTreeSet<String>)>> = OnceLock::new();
    LISTINGS.get_or_init(|| {
        let exported = exported();
        let of_crate = |limits: &Limits| {
            let read = Crate::read(limits.folder, &exported);
            let (text, counts) = listing(limits.name, &read);
            (text, counts, undefined(limits.name, &read))
        };
        CRATES.iter().map(of_crate).collect()
    })
}

/// Counts of a crate's items, outside `raw` and below it.
#[derive(Default)]
struct Counts {
    items: [usize; 2],
    fields: [usize; 2],
}

/// Returns the listing of a crate, and its counts.
fn listing(name: &str, read: &Crate) -> (String, Counts) {
    let mut found = read.paths();
    // The shortest path of an item outside `raw` is its own path; the others are listed as aliases.
    found.sort_by_key(|(path, _)| (path[0] == "raw", path.len(), path.clone()));
    let mut first: BTreeMap<&ModulePath, &ModulePath> = BTreeMap::new();
    let (mut lines, mut counts) = (BTreeSet::new(), Counts::default());
    let start = name.replace('-', "_");
    for (path, definition) in &found {
        let own_path = format!("{start}::{}", path.join("::"));
        let Some(declaration) = read.declaration(definition) else {
            lines.insert(format!("{own_path} = {}", definition.join("::")));
            continue;
        };
        if let Some(other) = first.get(definition) {
            if *other != path {
                lines.insert(format!("{own_path} = {start}::{}", other.join("::")));
            }
            continue;
        }
        first.insert(definition, path);
        let in_raw = usize::from(path[0] == "raw");
        counts.items[in_raw] += usize::from(lines.insert(format!("{own_path}: {declaration}")));
        for member in read.members.get(definition).into_iter().flatten() {
            let count = usize::from(lines.insert(format!("{own_path}::{}: {}", member.name, member.text)));
            match member.kind {
                MemberKind::Variant => {}
                MemberKind::Field => counts.fields[in_raw] += count,
                MemberKind::Other => counts.items[in_raw] += count,
            }
        }
    }
    let mut text = format!(
        "# {name}: {} public items and {} fields; below raw, which promises nothing, {} and {}.\n\
         # xtask/tests/public_api.rs explains the counts, and UPDATE_DOCS=1 cargo test -p xtask --test public_api writes\n\
         # this file.\n",
        counts.items[0], counts.fields[0], counts.items[1], counts.fields[1]
    );
    lines.iter().for_each(|line| writeln!(text, "{line}").expect("writing to a string cannot fail"));
    (text, counts)
}

#[test]
fn listings_are_those_of_the_sources() {
    let mut wrong = Vec::new();
    for (Limits { name, items, items_and_fields, raw, .. }, (text, counts, _)) in CRATES.iter().zip(listings()) {
        let path = root().join(format!("docs/api/{name}.txt"));
        if std::env::var_os("UPDATE_DOCS").is_some() {
            fs::create_dir_all(path.parent().expect("a directory")).expect("a directory for listings");
            fs::write(&path, text).expect("a listing");
        }
        let (items_now, all) = (counts.items[0], counts.items[0] + counts.fields[0]);
        let below = counts.items[1] + counts.fields[1];
        if items_now > *items || all > *items_and_fields || below > *raw {
            wrong.push(format!(
                "{name} has {items_now} public items (limit {items}), {all} with fields (limit {items_and_fields}), {below} \
                 below raw (limit {raw}): make some private"
            ));
        }
        let listed = fs::read_to_string(&path).unwrap_or_default();
        let (old, new): (BTreeSet<&str>, BTreeSet<&str>) = (listed.lines().collect(), text.lines().collect());
        let (removed, added): (Vec<_>, Vec<_>) = (old.difference(&new).collect(), new.difference(&old).collect());
        if listed != *text {
            let path = path.display();
            wrong.push(format!("{path} is outdated; run UPDATE_DOCS=1 cargo test -p xtask --test public_api and review the difference\n\
                 removed: {removed:#?}\nadded: {added:#?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Enums that callers may match without a wildcard, and why.
const EXHAUSTIVE: [&str; 28] = [
    // K or V, and the three kinds of records of a packed KV page: the format has no others.
    "unweight_codegen::kv::KvHalf",
    "unweight_codegen::kv::packed::Record",
    // The runtime and the tests handle every value of an axis, and every kernel family.
    "unweight_codegen::family::Epilogue",
    "unweight_codegen::family::Op",
    "unweight_codegen::family::SmemCopy",
    "unweight_codegen::spec::Arch",
    "unweight_codegen::spec::AttentionStep",
    "unweight_codegen::spec::DecodeCompactStage",
    "unweight_codegen::spec::DecodeElement",
    "unweight_codegen::spec::DecodeOutput",
    "unweight_codegen::spec::EmbedSource",
    "unweight_codegen::spec::EncodeCompactStage",
    "unweight_codegen::spec::EncodeHuffmanStage",
    "unweight_codegen::spec::GateFunction",
    "unweight_codegen::spec::JoinSource",
    "unweight_codegen::spec::KvCache",
    "unweight_codegen::spec::KvPackStage",
    "unweight_codegen::spec::NormKind",
    "unweight_codegen::spec::PackStage",
    "unweight_codegen::spec::UpdateStage",
    "unweight_codegen::spec::RouteStage",
    "unweight_codegen::spec::ScaleForm",
    "unweight_codegen::spec::WeightSource",
    // The attribute's expansion matches these.
    "unweight_codegen::spec::pairs::Blame",
    "unweight_codegen::spec::pairs::PairValue",
    // Kernels decode every element type.
    "unweight_format::Float",
    // An engine loads every arrangement of experts.
    "unweight_model::ExpertWeights",
    // The format has these two layouts.
    "unweight_rivals::matvans::Layout",
];

/// Outside `raw`, new variants and options break no caller, except for [`EXHAUSTIVE`].
#[test]
fn enums_and_options_may_grow() {
    let mut exhaustive = BTreeSet::from(EXHAUSTIVE);
    let mut closed = Vec::new();
    for (text, ..) in listings() {
        for (path, declaration) in text.lines().filter_map(|line| line.split_once(": ")) {
            let name = path.rsplit("::").next().unwrap_or_default();
            let is_options = ["Options", "Request", "Params"].iter().any(|end| name.ends_with(end));
            let grows = declaration.starts_with("enum") || is_options && declaration.starts_with("struct");
            if grows && !path.contains("::raw::") && !exhaustive.remove(path) {
                closed.push(path.to_owned());
            }
        }
    }
    assert_eq!(closed, [""; 0], "make these #[non_exhaustive], or add them to EXHAUSTIVE with a reason");
    assert!(
        exhaustive.is_empty(),
        "remove these from EXHAUSTIVE: they do not exist, or are #[non_exhaustive]: {exhaustive:?}"
    );
}

/// Words that begin a fragment: a comment that does not define its item.
const FRAGMENTS: [&str; 20] = [
    "and", "as", "at", "by", "for", "from", "in", "its", "of", "on", "one", "see", "that", "their", "them", "these",
    "what", "where", "which", "with",
];

/// Returns whether the first paragraph of a doc comment defines nothing: a single word, a fragment, or a remark.
fn is_fragment(doc: &str) -> bool {
    let words = doc.split(' ').map(|word| word.trim_end_matches(['.', ',', ':', ';']).to_lowercase());
    let words: Vec<String> = words.filter(|word| !["", "a", "an", "the"].contains(&word.as_str())).collect();
    let begins = words.first().is_some_and(|word| FRAGMENTS.contains(&word.as_str()));
    words.len() < if begins { 6 } else { 2 }
}

/// Returns the paths of items whose doc comments define nothing.
fn undefined(name: &str, read: &Crate) -> BTreeSet<String> {
    let start = name.replace('-', "_");
    let mut found = BTreeSet::new();
    for (path, definition) in read.paths().iter() {
        let own_path = format!("{start}::{}", path.join("::"));
        let item = read.doc(definition).map(|doc| (own_path.clone(), doc));
        let members = read.members.get(definition).into_iter().flatten();
        let members = members.map(|member| (format!("{own_path}::{}", member.name), member.doc.as_str()));
        let fragments = item.into_iter().chain(members).filter(|(_, doc)| is_fragment(doc));
        found.extend(fragments.map(|(path, doc)| format!("{path}: {doc:?}")));
    }
    found
}

#[test]
fn public_items_are_defined() {
    let found: Vec<&str> = listings().iter().flat_map(|(.., found)| found).map(String::as_str).collect();
    assert!(
        found.is_empty(),
        "{} doc comments do not define their item in a sentence:\n{}",
        found.len(),
        found.join("\n")
    );
}

#[test]
fn planted_fragments_are_found() {
    for doc in ["", "Rows.", "The kernel.", "Which one.", "Of the norms.", "See [`S::new`].", "What a stream is of."] {
        assert!(is_fragment(doc), "{doc}");
    }
    for doc in
        ["The number of rows.", "Must be 0.", "Each of the rows.", "In a merged layer, the first of its tensors."]
    {
        assert!(!is_fragment(doc), "{doc}");
    }
    let read = Crate::of_text(
        "/// A matrix.
         pub struct S { /// Rows.
             pub at: u8, /// Own.
             own: u8 }
         impl S { /// Makes a matrix.
             pub fn new() {} pub fn bare() {} }
         pub mod raw { pub fn f() {} }",
    );
    let found: Vec<String> = undefined("own", &read).into_iter().collect();
    assert_eq!(found, ["own::S: \"A matrix.\"", "own::S::at: \"Rows.\"", "own::S::bare: \"\"", "own::raw::f: \"\""]);
}

/// Every published package has a listing.
#[test]
fn every_published_crate_is_listed() {
    let published = published();
    let published: BTreeSet<&str> = published.keys().map(String::as_str).collect();
    assert_eq!(CRATES.iter().map(|limits| limits.folder).collect::<BTreeSet<_>>(), published);
}

#[test]
fn the_reader_finds_what_is_public_and_nothing_else() {
    let read = Crate::of_text(
        "
        mod a { pub mod b { pub struct S { pub at: u8, own: u8 } impl S { pub fn new() -> Self { S } fn own() {} }
                            pub struct Lost; }
                mod c { impl super::b::S { pub fn elsewhere() {} } struct S; impl S { pub fn of_another() {} } }
                pub fn f() {} pub(crate) fn g() {} pub enum E { V { of_a_variant: u8 } } }
        pub mod raw { pub use super::a::b; }
        pub use a::{E, b::S as T, f};
        pub use unweight_other::Theirs;
        #[cfg(test)] pub fn only_tests() {}
        #[doc(hidden)] pub mod hidden { pub struct Unlisted; pub struct Shown; } pub use hidden::Shown;
        mod m { #[macro_export] macro_rules! shown { () => {} } macro_rules! own { () => {} } }
        macro_rules! options { ($(#[$d:meta])* $name:ident { $($field:ident: $of:ty,)+ }) => {
            $(#[$d])* #[non_exhaustive] pub struct $name { $(pub $field: $of),+ }
            impl $name { $(pub fn $field(self, $field: $of) -> Self { self })+ }
        }; }
        options! { /// Doc.
            #[derive(Default)] O { x: std::option::Option<u8>, y: u8, } }
    ",
    );
    let (text, counts) = listing("own", &read);
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let expected = [
        "own::E: enum",
        "own::E::V: variant { of_a_variant: u8 }",
        "own::O: non_exhaustive struct",
        "own::O::x: field std::option::Option<u8>",
        "own::O::x: fn(self, x: std::option::Option<u8>) -> Self",
        "own::O::y: field u8",
        "own::O::y: fn(self, y: u8) -> Self",
        "own::Shown: struct",
        "own::T: struct",
        "own::T::at: field u8",
        "own::T::elsewhere: fn()",
        "own::T::new: fn() -> Self",
        "own::Theirs = unweight_other::Theirs",
        "own::f: fn()",
        "own::raw: mod",
        "own::raw::b: mod",
        "own::raw::b::Lost: struct",
        "own::raw::b::S = own::T",
        "own::shown: macro",
    ];
    assert_eq!(lines, expected);
    assert_eq!((counts.items, counts.fields), ([10, 3], [3, 0]), "raw itself counts below raw");
}

/// A listing shows these kinds of declarations.
#[test]
fn declarations_show_types_bounds_and_contents() {
    let read = Crate::of_text(
        "
        pub struct P<'a, T: Copy>(pub &'a T, u8);
        impl<'a, T: Copy + Ord> P<'a, T> { pub const fn least(&self) -> T { x } pub const N: usize = 3; }
        impl P<'_, u8> { pub fn byte(&self) -> u8 { 0 } }
        #[non_exhaustive] pub enum E { A = 1, B(u8, Vec<u8>), #[doc(hidden)] C }
        pub unsafe trait T<X>: Send + Sync { type Out: Copy; const K: u8 = 1; fn must(&self); fn may(&self) {} }
        pub type R<T> = Result<T, E>;
        pub static S: &[u8] = &[];
        pub const C: [u8; 2] = [0; 2];
    ",
    );
    let (text, _) = listing("own", &read);
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let expected = [
        "own::C: const [u8; 2]",
        "own::E: non_exhaustive enum",
        "own::E::A: variant = 1",
        "own::E::B: variant(u8, Vec<u8>)",
        "own::P: struct<'a, T: Copy>",
        "own::P::0: field &'a T",
        "own::P::N: const usize, of P<'a, T> where T: Copy + Ord",
        "own::P::byte: fn(&self) -> u8, of P<'_, u8>",
        "own::P::least: const fn(&self) -> T, of P<'a, T> where T: Copy + Ord",
        "own::R: type<T> = Result<T, E>",
        "own::S: static &[u8]",
        "own::T: unsafe trait<X>: Send + Sync",
        "own::T::K: provided const u8",
        "own::T::Out: type: Copy",
        "own::T::may: provided fn(&self)",
        "own::T::must: fn(&self)",
    ];
    assert_eq!(lines, expected);
}
