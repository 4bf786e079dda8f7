//! The public items of published crates are those that `docs/api/<crate>.txt` lists, and no more than agreed.
//!
//! `UPDATE_DOCS=1 cargo test -p xtask --test public_api` writes the listings; review the difference before committing
//! it.
//!
//! **Measure.** An item is a module, type, trait, function, constant, static or macro that a path of public modules and
//! re-exports leads to, an inherent method or associated constant of such a type, or a method of such a trait. Every
//! item counts once, by its shortest path; other paths to it are listed as `path = own path`, and items of other crates
//! that a crate re-exports as `path = their path`, which counts there. Public fields of structs are counted by
//! themselves. Variants are listed and not counted. Implementations of traits are not listed. What is `#[doc(hidden)]`
//! or needs a feature for tests is left out.
//!
//! **`raw`.** The module `raw` of a crate is public for benchmarks, tests and experts, and promises nothing: any release
//! may change it. Items below it are listed and counted by themselves, without a limit. An item with a path outside
//! `raw` counts outside.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use syn::{Attribute, ImplItem, Item, TraitItem, Type, UseTree, Visibility};

/// The limits of a crate, outside `raw`.
struct Limits {
    name: &'static str,
    items: usize,
    items_and_fields: usize,
}

const CRATES: [Limits; 5] = [
    Limits { name: "unweight-format", items: 300, items_and_fields: usize::MAX },
    Limits { name: "unweight-rt", items: 300, items_and_fields: 350 },
    Limits { name: "unweight-engine", items: 150, items_and_fields: 150 },
    Limits { name: "unweight-model", items: usize::MAX, items_and_fields: usize::MAX },
    Limits { name: "unweight-macros", items: usize::MAX, items_and_fields: usize::MAX },
];

/// Macros of the crates that define types: the name comes first (after attributes), fields or variants in braces.
/// With them, what they define beside the type.
const DEFINERS: [(&str, Defined); 2] = [
    ("named", Defined { kind: "enum", always: &[("const", "ALL"), ("fn", "name")], setters: false }),
    ("options", Defined { kind: "struct", always: &[], setters: true }),
];

struct Defined {
    kind: &'static str,
    always: &'static [(&'static str, &'static str)],
    /// Each field has a method of its name.
    setters: bool,
}

type Place = Vec<String>;

/// Kind and name of a field, variant, method or constant.
type Member = (&'static str, String);

/// What a module says, by name.
#[derive(Default)]
struct Module {
    /// Kind of everything that it defines, and whether that is `pub`.
    items: BTreeMap<String, (&'static str, bool)>,
    /// Names that `use` brings in: the path, as it is written, and whether it is `pub`.
    uses: Vec<(String, Place, bool)>,
    globs: Vec<(Place, bool)>,
}

#[derive(Default)]
struct Crate {
    modules: BTreeMap<Place, Module>,
    /// Members of types and traits, by where the type is defined.
    members: BTreeMap<Place, BTreeSet<Member>>,
    /// Members by the path of the type as an `impl` writes it, with the module of that `impl`.
    impls: Vec<(Place, Place, Vec<Member>)>,
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace")
}

fn is_pub(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

/// Whether tests alone see it, or nobody should.
fn is_hidden(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let text = match &attribute.meta {
            syn::Meta::List(list) => list.tokens.to_string(),
            _ => String::new(),
        };
        attribute.path().is_ident("cfg") && ["test", "failpoints", "fake"].iter().any(|word| text.contains(word))
            || attribute.path().is_ident("doc") && text == "hidden"
    })
}

/// The kind of a struct or an enum, with what its attributes say of later versions.
fn kind_of(kind: &'static str, attributes: &[Attribute]) -> &'static str {
    match (kind, attributes.iter().any(|attribute| attribute.path().is_ident("non_exhaustive"))) {
        ("struct", true) => "non_exhaustive struct",
        ("enum", true) => "non_exhaustive enum",
        _ => kind,
    }
}

impl Crate {
    fn read(name: &str) -> Self {
        let mut read = Self::default();
        let source = root().join(name).join("src");
        read.file(&source.join("lib.rs"), &source, Vec::new());
        read.assign();
        read
    }

    /// Gives what `impl` blocks define to their types, which may be defined in modules that are read later.
    fn assign(&mut self) {
        for (module, path, members) in std::mem::take(&mut self.impls) {
            if let Some(definition) = self.resolve(&module, &path, &mut BTreeSet::new()) {
                self.members.entry(definition).or_default().extend(members);
            }
        }
    }

    /// `folder` is where the modules of the file are.
    fn file(&mut self, path: &Path, folder: &Path, place: Place) {
        let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let file = syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        self.items(&file.items, folder, place);
    }

    fn items(&mut self, items: &[Item], folder: &Path, place: Place) {
        let mut module = Module::default();
        for item in items {
            let mut define = |name: &syn::Ident, kind, visibility: &Visibility, attributes: &[Attribute]| {
                if !is_hidden(attributes) {
                    module.items.insert(name.to_string(), (kind, is_pub(visibility)));
                }
            };
            let own = |name: &syn::Ident| [place.as_slice(), &[name.to_string()]].concat();
            match item {
                Item::Struct(item) => {
                    define(&item.ident, kind_of("struct", &item.attrs), &item.vis, &item.attrs);
                    let public = item
                        .fields
                        .iter()
                        .zip(0..)
                        .filter(|(field, _): &(&syn::Field, u32)| is_pub(&field.vis) && !is_hidden(&field.attrs));
                    let name = |(field, at): (&syn::Field, u32)| match &field.ident {
                        Some(name) => ("field", name.to_string()),
                        None => ("field", at.to_string()),
                    };
                    self.members.entry(own(&item.ident)).or_default().extend(public.map(name));
                }
                Item::Enum(item) => {
                    define(&item.ident, kind_of("enum", &item.attrs), &item.vis, &item.attrs);
                    let shown = item.variants.iter().filter(|variant| !is_hidden(&variant.attrs));
                    let names = shown.map(|variant| ("variant", variant.ident.to_string()));
                    self.members.entry(own(&item.ident)).or_default().extend(names);
                }
                Item::Union(item) => define(&item.ident, "union", &item.vis, &item.attrs),
                Item::Type(item) => define(&item.ident, "type", &item.vis, &item.attrs),
                Item::Fn(item) => define(&item.sig.ident, "fn", &item.vis, &item.attrs),
                Item::Const(item) => define(&item.ident, "const", &item.vis, &item.attrs),
                Item::Static(item) => define(&item.ident, "static", &item.vis, &item.attrs),
                Item::Trait(item) => {
                    define(&item.ident, "trait", &item.vis, &item.attrs);
                    let members = self.members.entry(own(&item.ident)).or_default();
                    members.extend(item.items.iter().filter_map(|member| match member {
                        TraitItem::Fn(member) => Some(("fn", member.sig.ident.to_string())),
                        TraitItem::Const(member) => Some(("const", member.ident.to_string())),
                        TraitItem::Type(member) => Some(("type", member.ident.to_string())),
                        _ => None,
                    }));
                }
                Item::Mod(item) if !is_hidden(&item.attrs) => {
                    define(&item.ident, "mod", &item.vis, &[]);
                    let name = item.ident.to_string();
                    let inner = [place.as_slice(), std::slice::from_ref(&name)].concat();
                    match &item.content {
                        Some((_, items)) => self.items(items, &folder.join(&name), inner),
                        None => {
                            let flat = folder.join(format!("{name}.rs"));
                            let path: PathBuf = if flat.is_file() { flat } else { folder.join(&name).join("mod.rs") };
                            self.file(&path, &folder.join(&name), inner);
                        }
                    }
                }
                Item::Use(item) if !is_hidden(&item.attrs) => {
                    imports(&item.tree, Vec::new(), is_pub(&item.vis), &mut module);
                }
                Item::Impl(item) if item.trait_.is_none() && !is_hidden(&item.attrs) => {
                    self.inherent(item, &place);
                }
                Item::Macro(item) => {
                    if let Some(name) = item.mac.path.get_ident().filter(|_| item.ident.is_none()) {
                        self.defined(&name.to_string(), item.mac.tokens.clone(), (&place, &mut module));
                    } else if let Some(name) = &item.ident
                        && item.attrs.iter().any(|attribute| attribute.path().is_ident("macro_export"))
                    {
                        module.items.insert(name.to_string(), ("macro", true));
                    }
                }
                _ => {}
            }
        }
        self.modules.insert(place, module);
    }

    fn inherent(&mut self, item: &syn::ItemImpl, place: &Place) {
        let Type::Path(path) = &*item.self_ty else { return };
        let path: Place = path.path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        let members = item.items.iter().filter_map(|member| match member {
            ImplItem::Fn(member) if is_pub(&member.vis) && !is_hidden(&member.attrs) => {
                Some(("fn", member.sig.ident.to_string()))
            }
            ImplItem::Const(member) if is_pub(&member.vis) && !is_hidden(&member.attrs) => {
                Some(("const", member.ident.to_string()))
            }
            _ => None,
        });
        self.impls.push((place.clone(), path, members.collect()));
    }

    /// What a macro of [`DEFINERS`] defines.
    fn defined(&mut self, name: &str, tokens: TokenStream, (place, module): (&Place, &mut Module)) {
        let Some((_, defined)) = DEFINERS.iter().find(|(definer, _)| *definer == name) else { return };
        let mut idents = Vec::new();
        for token in tokens {
            match token {
                TokenTree::Ident(ident) => idents.push(ident.to_string()),
                TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => {
                    let Some(ident) = idents.first() else { return };
                    module.items.insert(ident.clone(), (defined.kind, true));
                    let own = [place.as_slice(), std::slice::from_ref(ident)].concat();
                    let members = self.members.entry(own).or_default();
                    members.extend(defined.always.iter().map(|(kind, name)| (*kind, (*name).to_owned())));
                    if defined.setters {
                        members.extend(fields(group.stream()).into_iter().map(|field| ("fn", field)));
                    }
                    return;
                }
                _ => {}
            }
        }
    }

    /// Where a path of a module leads: the module that defines the last name, or that is the last name.
    fn resolve(&self, from: &Place, path: &[String], seen: &mut BTreeSet<(Place, Place)>) -> Option<Place> {
        if !seen.insert((from.clone(), path.to_vec())) {
            return None;
        }
        let (first, rest) = path.split_first()?;
        match first.as_str() {
            "crate" if rest.is_empty() => return Some(Vec::new()),
            "crate" => return self.resolve(&Vec::new(), rest, seen),
            "self" if rest.is_empty() => return Some(from.clone()),
            "self" => return self.resolve(from, rest, seen),
            "super" => return self.resolve(&from[..from.len().checked_sub(1)?].to_vec(), rest, seen),
            _ => {}
        }
        let module = self.modules.get(from)?;
        let own = [from.as_slice(), std::slice::from_ref(first)].concat();
        let mut targets = Vec::new();
        if module.items.contains_key(first) {
            targets.push(own);
        }
        for (name, path, _) in &module.uses {
            if name == first {
                targets.extend(self.resolve(from, path, seen));
            }
        }
        for (path, _) in &module.globs {
            if let Some(of) = self.resolve(from, path, seen) {
                targets.extend(self.resolve(&of, std::slice::from_ref(first), seen));
            }
        }
        if rest.is_empty() {
            return targets.into_iter().next();
        }
        targets
            .into_iter()
            .filter(|target| self.modules.contains_key(target))
            .find_map(|of| self.resolve(&of, rest, seen))
    }

    /// Every public path and the definition that it leads to.
    fn paths(&self, public: &Place, module: &Place, open: &mut Vec<Place>, found: &mut Vec<(Place, Place)>) {
        if open.contains(module) {
            return;
        }
        open.push(module.clone());
        let own = &self.modules[module];
        let mut reached: Vec<(String, Place)> = Vec::new();
        for (name, (_, public)) in &own.items {
            if *public {
                reached.push((name.clone(), [module.as_slice(), std::slice::from_ref(name)].concat()));
            }
        }
        for (name, path, _) in own.uses.iter().filter(|(.., public)| *public) {
            if let Some(target) = self.resolve(module, path, &mut BTreeSet::new()) {
                reached.push((name.clone(), target));
            } else if path[0].starts_with("unweight") {
                reached.push((name.clone(), path.clone()));
            }
        }
        for (path, _) in own.globs.iter().filter(|(_, public)| *public) {
            let Some(of) = self.resolve(module, path, &mut BTreeSet::new()) else { continue };
            self.paths(public, &of, open, found);
        }
        for (name, target) in reached {
            let path = [public.as_slice(), &[name]].concat();
            found.push((path.clone(), target.clone()));
            if self.modules.contains_key(&target) {
                self.paths(&path, &target, open, found);
            }
        }
        open.pop();
    }

    /// What a definition is; `None` for one of another crate.
    fn kind(&self, definition: &Place) -> Option<&'static str> {
        let Some((name, module)) = definition.split_last() else { return Some("mod") };
        self.modules.get(module)?.items.get(name).map(|(kind, _)| *kind)
    }
}

fn fields(body: TokenStream) -> Vec<String> {
    let tokens: Vec<TokenTree> = body.into_iter().collect();
    let is = |at: usize, sign| matches!(&tokens.get(at), Some(TokenTree::Punct(punct)) if punct.as_char() == sign);
    let starts = |at: usize| at == 0 || is(at - 1, ',') || matches!(&tokens[at - 1], TokenTree::Group(_));
    let named = tokens.iter().enumerate().filter(|(at, _)| starts(*at) && is(at + 1, ':') && !is(at + 2, ':'));
    named
        .filter_map(|(_, token)| if let TokenTree::Ident(ident) = token { Some(ident.to_string()) } else { None })
        .collect()
}

fn imports(tree: &UseTree, prefix: Place, public: bool, module: &mut Module) {
    let with = |name: &syn::Ident| [prefix.as_slice(), &[name.to_string()]].concat();
    match tree {
        UseTree::Path(path) => imports(&path.tree, with(&path.ident), public, module),
        UseTree::Name(name) if name.ident == "self" => {
            let last = prefix.last().expect("a path before self").clone();
            module.uses.push((last, prefix.clone(), public));
        }
        UseTree::Name(name) => module.uses.push((name.ident.to_string(), with(&name.ident), public)),
        UseTree::Rename(name) => module.uses.push((name.rename.to_string(), with(&name.ident), public)),
        UseTree::Glob(_) => module.globs.push((prefix.clone(), public)),
        UseTree::Group(group) => group.items.iter().for_each(|tree| imports(tree, prefix.clone(), public, module)),
    }
}

/// What a crate has outside `raw`.
struct Counts {
    items: usize,
    fields: usize,
}

/// The listing of a crate, and its counts.
fn listing(name: &str) -> (String, Counts) {
    let read = Crate::read(name);
    let mut found = Vec::new();
    read.paths(&Vec::new(), &Vec::new(), &mut Vec::new(), &mut found);
    // The shortest path of an item outside `raw` is its own; the others only name it.
    found.sort_by_key(|(path, _)| (path[0] == "raw", path.len(), path.clone()));
    let mut first: BTreeMap<&Place, &Place> = BTreeMap::new();
    let (mut lines, mut items, mut fields) = (BTreeSet::new(), [0usize; 2], [0usize; 2]);
    let start = name.replace('-', "_");
    for (path, definition) in &found {
        let text = format!("{start}::{}", path.join("::"));
        let Some(kind) = read.kind(definition) else {
            lines.insert(format!("{text} = {}", definition.join("::")));
            continue;
        };
        if let Some(own) = first.get(definition) {
            if *own != path {
                lines.insert(format!("{text} = {start}::{}", own.join("::")));
            }
            continue;
        }
        first.insert(definition, path);
        let of_raw = usize::from(path[0] == "raw");
        items[of_raw] += usize::from(lines.insert(format!("{text}: {kind}")));
        for (kind, member) in read.members.get(definition).into_iter().flatten() {
            let new = usize::from(lines.insert(format!("{text}::{member}: {kind}")));
            match *kind {
                "variant" => {}
                "field" => fields[of_raw] += new,
                _ => items[of_raw] += new,
            }
        }
    }
    let mut text = format!(
        "# {name}: {} public items and {} fields; below raw, which promises nothing, {} and {}.\n\
         # xtask/tests/public_api.rs explains the counts, and UPDATE_DOCS=1 cargo test -p xtask --test public_api writes\n\
         # this file.\n",
        items[0], fields[0], items[1], fields[1]
    );
    lines.iter().for_each(|line| writeln!(text, "{line}").expect("a string"));
    (text, Counts { items: items[0], fields: fields[0] })
}

#[test]
fn listings_are_those_of_the_sources() {
    for Limits { name, items, items_and_fields } in CRATES {
        let (text, counts) = listing(name);
        let path = root().join(format!("docs/api/{name}.txt"));
        if std::env::var_os("UPDATE_DOCS").is_some() {
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder for listings");
            fs::write(&path, &text).expect("a listing");
        }
        let (own, all) = (counts.items, counts.items + counts.fields);
        assert!(
            own <= items && all <= items_and_fields,
            "{name} has {own} public items (limit {items}), {all} with fields (limit {items_and_fields}): make some \
             private, or move them to raw"
        );
        let listed = fs::read_to_string(&path).unwrap_or_default();
        let (old, new): (BTreeSet<&str>, BTreeSet<&str>) = (listed.lines().collect(), text.lines().collect());
        let (gone, added): (Vec<_>, Vec<_>) = (old.difference(&new).collect(), new.difference(&old).collect());
        assert!(
            listed == text,
            "{} differs; UPDATE_DOCS=1 writes it\ngone: {gone:#?}\nnew: {added:#?}",
            path.display()
        );
    }
}

#[test]
fn the_reader_finds_what_is_public_and_nothing_else() {
    let mut read = Crate::default();
    let text = "
        mod a { pub mod b { pub struct S { pub at: u8, own: u8 } impl S { pub fn new() -> Self { S } fn own() {} }
                            pub struct Lost; }
                mod c { impl super::b::S { pub fn elsewhere() {} } struct S; impl S { pub fn of_another() {} } }
                pub fn f() {} pub(crate) fn g() {} pub enum E { V { of_a_variant: u8 } } }
        pub mod raw { pub use super::a::b; }
        pub use a::{E, b::S as T, f};
        pub use unweight_other::Theirs;
        #[cfg(test)] pub fn only_tests() {}
        options! { /// Doc.
            #[derive(Default)] O { /// Field.
                x: std::option::Option<u8>, y: u8, } }
    ";
    read.items(&syn::parse_file(text).expect("Rust").items, Path::new(""), Vec::new());
    read.assign();
    let mut found = Vec::new();
    read.paths(&Vec::new(), &Vec::new(), &mut Vec::new(), &mut found);
    let paths: BTreeSet<String> = found.iter().map(|(path, _)| path.join("::")).collect();
    let expected = ["E", "O", "T", "Theirs", "f", "raw", "raw::b", "raw::b::Lost", "raw::b::S"];
    assert_eq!(paths.into_iter().collect::<Vec<_>>(), expected);
    let members = |of: &[&str]| {
        let of: Place = of.iter().map(|name| (*name).to_owned()).collect();
        read.members[&of].iter().map(|(_, name)| name.as_str()).collect::<Vec<_>>()
    };
    assert_eq!(members(&["a", "b", "S"]), ["at", "elsewhere", "new"]);
    assert_eq!((members(&["O"]), members(&["a", "E"])), (vec!["x", "y"], vec!["V"]));
}
