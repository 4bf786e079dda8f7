//! Parses the product code of a crate: the modules that its root files declare, without code that only tests compile.
#![allow(dead_code, reason = "each test uses only some of these")]

use std::path::{Path, PathBuf};

use proc_macro2::{LineColumn, Span};
use syn::{Attribute, ImplItem, Item, Meta, TraitItem, spanned::Spanned, visit};

use super::workspace::{read, root};

/// A module in a file or in braces.
pub struct Module {
    /// Names from the crate's root to the module; empty for the root.
    pub path: Vec<String>,
    pub file: PathBuf,
    /// All items except modules and items that only tests compile.
    pub items: Vec<Item>,
}

/// Returns all modules below a directory of sources: of its library, its program, or both.
pub fn modules(directory: &str) -> Vec<Module> {
    let source = root().join(directory);
    let mut found = Vec::new();
    for file in ["lib.rs", "main.rs"].map(|name| source.join(name)) {
        if file.is_file() {
            file_modules(&file, &source, Vec::new(), &mut found);
        }
    }
    assert!(!found.is_empty(), "{directory} has neither lib.rs nor main.rs");
    found
}

/// Returns the modules of one text, as if it were the root of a crate.
pub fn modules_of(text: &str) -> Vec<Module> {
    let (file, mut found) = (Path::new("planted.rs"), Vec::new());
    let items = syn::parse_file(text).expect("Rust").items;
    item_modules(items, file, Path::new(""), Vec::new(), &mut found);
    found
}

fn file_modules(file: &Path, directory: &Path, path: Vec<String>, found: &mut Vec<Module>) {
    let parsed = syn::parse_file(&read(file)).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    item_modules(parsed.items, file, directory, path, found);
}

/// Collects modules. `directory` contains the files of the modules that the items declare.
fn item_modules(items: Vec<Item>, file: &Path, directory: &Path, path: Vec<String>, found: &mut Vec<Module>) {
    let mut own_items = Vec::new();
    for item in items.into_iter().filter(|item| !of_tests(item_attributes(item))) {
        let Item::Mod(module) = item else {
            own_items.push(item);
            continue;
        };
        let name = module.ident.to_string();
        let (inner, deeper) = ([path.as_slice(), std::slice::from_ref(&name)].concat(), directory.join(&name));
        match module.content {
            Some((_, items)) => item_modules(items, file, &deeper, inner, found),
            None => {
                let flat = directory.join(format!("{name}.rs"));
                let file = if flat.is_file() { flat } else { deeper.join("mod.rs") };
                file_modules(&file, &deeper, inner, found);
            }
        }
    }
    found.push(Module { path, file: file.to_owned(), items: own_items });
}

/// Returns whether these attributes restrict an item to tests.
pub fn of_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let Meta::List(list) = &attribute.meta else { return attribute.path().is_ident("test") };
        let condition = list.tokens.to_string();
        let words: Vec<&str> = condition.split(|c: char| !c.is_ascii_alphanumeric()).collect();
        attribute.path().is_ident("cfg")
            && (condition == "test" || words[0] == "all" && words.contains(&"test") && !words.contains(&"not"))
    })
}

/// Collects the spans of items that only tests compile.
#[derive(Default)]
struct TestItems(Vec<Span>);

impl<'ast> visit::Visit<'ast> for TestItems {
    fn visit_item(&mut self, item: &'ast Item) {
        if of_tests(item_attributes(item)) {
            self.0.push(item.span());
        } else {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        if of_tests(impl_attributes(item)) {
            self.0.push(item.span());
        } else {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_trait_item(&mut self, item: &'ast TraitItem) {
        if of_tests(trait_attributes(item)) {
            self.0.push(item.span());
        } else {
            visit::visit_trait_item(self, item);
        }
    }
}

/// Returns the lines of a Rust source without the items that only tests compile. Every line keeps its place: what is
/// cut leaves an empty line.
pub fn product_lines(source: &str) -> Result<Vec<String>, syn::Error> {
    let mut items = TestItems::default();
    visit::Visit::visit_file(&mut items, &syn::parse_file(source)?);
    let ranges: Vec<(LineColumn, LineColumn)> = items.0.iter().map(|span| (span.start(), span.end())).collect();
    let lines = source.lines().zip(1..).map(|(text, line)| {
        let here: Vec<_> = ranges.iter().filter(|(start, end)| (start.line..=end.line).contains(&line)).collect();
        if here.is_empty() {
            return text.to_owned();
        }
        let is_product = |column| {
            let at = LineColumn { line, column };
            !here.iter().any(|(start, end)| *start <= at && at < *end)
        };
        let kept = text.chars().enumerate().filter(|(column, _)| is_product(*column));
        kept.map(|(_, c)| c).collect()
    });
    Ok(lines.collect())
}

pub fn item_attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

pub fn impl_attributes(item: &ImplItem) -> &[Attribute] {
    match item {
        ImplItem::Const(item) => &item.attrs,
        ImplItem::Fn(item) => &item.attrs,
        ImplItem::Type(item) => &item.attrs,
        ImplItem::Macro(item) => &item.attrs,
        _ => &[],
    }
}

pub fn trait_attributes(item: &TraitItem) -> &[Attribute] {
    match item {
        TraitItem::Const(item) => &item.attrs,
        TraitItem::Fn(item) => &item.attrs,
        TraitItem::Type(item) => &item.attrs,
        TraitItem::Macro(item) => &item.attrs,
        _ => &[],
    }
}
