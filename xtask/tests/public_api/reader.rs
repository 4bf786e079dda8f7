//! Reads the public items of a crate from its sources.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use proc_macro2::TokenStream;
use quote::ToTokens;
use syn::{Attribute, Fields, ImplItem, Item, TraitItem, Type, UseTree, Visibility, visit_mut::VisitMut};

use super::{
    declaration::{function, generics, text},
    rules::Rules,
    workspace::{files, published, read, root},
};

pub type ModulePath = Vec<String>;

/// A field, variant, method or constant.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Member {
    pub name: String,
    pub kind: MemberKind,
    /// The declaration without the name.
    pub text: String,
    /// The first paragraph of the documentation.
    pub doc: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MemberKind {
    Field,
    Variant,
    Other,
}

/// The definitions of a module, by name.
#[derive(Default)]
pub struct Module {
    /// The declaration of every definition, without its name, and whether it is `pub`.
    items: BTreeMap<String, (String, bool)>,
    /// The first paragraph of the documentation of every definition except modules and macros.
    docs: BTreeMap<String, String>,
    /// Names imported by `use`: the path as written, and whether it is `pub`.
    uses: Vec<(String, ModulePath, bool)>,
    globs: Vec<(ModulePath, bool)>,
}

#[derive(Default)]
pub struct Crate {
    pub modules: BTreeMap<ModulePath, Module>,
    /// Members of types and traits, by the place of the type's definition.
    pub members: BTreeMap<ModulePath, BTreeSet<Member>>,
    /// Members by the path of the type as written in an `impl`, with the module of the `impl`.
    impls: Vec<(ModulePath, ModulePath, Vec<Member>)>,
    /// `macro_rules!` by name: those of the crate, and those that other crates export.
    rules: BTreeMap<String, Rules>,
    /// Macros that the crate exports. They are at its root wherever they are written.
    macros: Vec<String>,
}

fn is_pub(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

fn has(attributes: &[Attribute], name: &str) -> bool {
    attributes.iter().any(|attribute| attribute.path().is_ident(name))
}

/// Returns whether an item is hidden from the documentation or compiled only for tests.
fn is_hidden(attributes: &[Attribute]) -> bool {
    of_tests(attributes) || list_attributes(attributes, "doc").any(|list| list == "hidden")
}

/// Returns whether an item needs a feature for tests.
fn of_tests(attributes: &[Attribute]) -> bool {
    list_attributes(attributes, "cfg").any(|list| ["test", "failpoints", "fake"].iter().any(|word| list.contains(word)))
}

/// Returns the contents of the parentheses of attributes with a name.
fn list_attributes<'a>(attributes: &'a [Attribute], name: &'a str) -> impl Iterator<Item = String> + 'a {
    attributes.iter().filter(move |attribute| attribute.path().is_ident(name)).filter_map(|attribute| match &attribute
        .meta
    {
        syn::Meta::List(list) => Some(list.tokens.to_string()),
        _ => None,
    })
}

/// Returns the first paragraph of the documentation on one line.
fn doc(attributes: &[Attribute]) -> String {
    let lines = attributes.iter().filter(|attribute| attribute.path().is_ident("doc")).filter_map(|attribute| {
        let syn::Meta::NameValue(value) = &attribute.meta else { return None };
        let syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(line), .. }) = &value.value else { return None };
        Some(line.value())
    });
    let text = lines.flat_map(|line| line.lines().map(|line| line.trim().to_owned()).collect::<Vec<_>>());
    // An empty doc comment has no lines, and also ends a paragraph.
    text.skip_while(String::is_empty).take_while(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
}

/// Returns the kind of a struct or an enum, with `non_exhaustive` and its parameters.
fn kind_of(kind: &str, attributes: &[Attribute], parameters: &syn::Generics) -> String {
    let open = if has(attributes, "non_exhaustive") { "non_exhaustive " } else { "" };
    format!("{open}{kind}{}", generics(parameters))
}

/// Returns ` = VALUE` or `: BOUNDS`; empty if there are none.
fn after(sign: &str, tokens: impl ToTokens) -> String {
    let text = text(tokens);
    if text.is_empty() { text } else { format!("{sign}{text}") }
}

/// Returns a variant's content, without its name.
fn variant(variant: &syn::Variant) -> String {
    let named = |field: &syn::Field| match &field.ident {
        Some(name) => format!("{name}: {}", text(&field.ty)),
        None => text(&field.ty),
    };
    let fields: Vec<String> = variant.fields.iter().map(named).collect();
    let fields = fields.join(", ");
    let value = variant.discriminant.as_ref().map(|(_, value)| after(" = ", value)).unwrap_or_default();
    let open = if has(&variant.attrs, "non_exhaustive") { "non_exhaustive " } else { "" };
    let fields = match &variant.fields {
        Fields::Named(_) => format!(" {{ {fields} }}"),
        Fields::Unnamed(_) => format!("({fields})"),
        Fields::Unit => String::new(),
    };
    format!("{open}variant{fields}{value}")
}

impl Crate {
    /// Reads the crate in `directory`.
    ///
    /// `exported` is the result of [`exported`].
    pub fn read(directory: &str, exported: &BTreeMap<String, Rules>) -> Self {
        let source = root().join(directory).join("src");
        let mut read = Self { rules: exported.clone(), ..Self::default() };
        read.rules.extend(rules_of(&format!("{directory}/src"), false));
        read.file(&source.join("lib.rs"), &source, Vec::new());
        read.assign();
        read
    }

    /// Reads one text as if it were the root of a crate.
    pub fn of_text(written: &str) -> Self {
        let mut read = Self::default();
        read.items(&syn::parse_file(written).expect("the text is Rust").items, Path::new(""), Vec::new());
        read.assign();
        read
    }

    /// Assigns the members of `impl` blocks to their types, which may be in modules that are read later, and exported
    /// macros to the root.
    fn assign(&mut self) {
        let root = self.modules.entry(Vec::new()).or_default();
        root.items.extend(self.macros.drain(..).map(|name| (name, ("macro".to_owned(), true))));
        for (module, path, members) in std::mem::take(&mut self.impls) {
            if let Some(definition) = self.resolve(&module, &path, &mut BTreeSet::new()) {
                self.members.entry(definition).or_default().extend(members);
            }
        }
    }

    /// Reads a file. `directory` is where its modules are.
    fn file(&mut self, path: &Path, directory: &Path, module_path: ModulePath) {
        self.items(&parsed(path).items, directory, module_path);
    }

    fn items(&mut self, items: &[Item], directory: &Path, module_path: ModulePath) {
        // A macro of the module itself hides one with the same name elsewhere.
        let mut local_rules = BTreeMap::new();
        add_rules(items, false, &mut local_rules);
        let hidden: Vec<_> =
            local_rules.into_iter().map(|(name, rules)| (name.clone(), self.rules.insert(name, rules))).collect();
        let mut module = Module::default();
        for item in items {
            self.item(item, directory, &module_path, &mut module);
        }
        self.modules.insert(module_path, module);
        self.rules.extend(hidden.into_iter().filter_map(|(name, rules)| Some((name, rules?))));
    }

    fn item(&mut self, item: &Item, directory: &Path, module_path: &ModulePath, module: &mut Module) {
        let mut define = |name: &syn::Ident, text: String, visibility: &Visibility, attributes: &[Attribute]| {
            if !is_hidden(attributes) {
                module.items.insert(name.to_string(), (text, is_pub(visibility)));
                module.docs.insert(name.to_string(), doc(attributes));
            }
        };
        let path_of = |name: &syn::Ident| [module_path.as_slice(), &[name.to_string()]].concat();
        match item {
            Item::Struct(item) => {
                define(&item.ident, kind_of("struct", &item.attrs, &item.generics), &item.vis, &item.attrs);
                let members = self.fields(&item.fields);
                self.members.entry(path_of(&item.ident)).or_default().extend(members);
            }
            Item::Enum(item) => {
                define(&item.ident, kind_of("enum", &item.attrs, &item.generics), &item.vis, &item.attrs);
                let shown = item.variants.iter().filter(|variant| !is_hidden(&variant.attrs));
                let members = shown.map(|shown| Member {
                    name: shown.ident.to_string(),
                    kind: MemberKind::Variant,
                    text: variant(shown),
                    doc: doc(&shown.attrs),
                });
                self.members.entry(path_of(&item.ident)).or_default().extend(members);
            }
            Item::Union(item) => define(&item.ident, "union".to_owned(), &item.vis, &item.attrs),
            Item::Type(item) => {
                let declared = format!("type{}{}", generics(&item.generics), after(" = ", &item.ty));
                define(&item.ident, declared, &item.vis, &item.attrs);
            }
            Item::Fn(item) => define(&item.sig.ident, function(&item.sig), &item.vis, &item.attrs),
            Item::Const(item) => define(&item.ident, format!("const {}", text(&item.ty)), &item.vis, &item.attrs),
            Item::Static(item) => define(&item.ident, format!("static {}", text(&item.ty)), &item.vis, &item.attrs),
            Item::Trait(item) => {
                let safety = if item.unsafety.is_some() { "unsafe " } else { "" };
                let above = after(": ", &item.supertraits);
                let declared = format!("{safety}trait{}{above}", generics(&item.generics));
                define(&item.ident, declared, &item.vis, &item.attrs);
                let members = item.items.iter().filter_map(trait_member);
                self.members.entry(path_of(&item.ident)).or_default().extend(members);
            }
            Item::Mod(item) if !of_tests(&item.attrs) => {
                let name = item.ident.to_string();
                // The contents of a hidden module may have another, public path.
                let public = is_pub(&item.vis) && !is_hidden(&item.attrs);
                module.items.insert(name.clone(), ("mod".to_owned(), public));
                let inner = [module_path.as_slice(), std::slice::from_ref(&name)].concat();
                match &item.content {
                    Some((_, items)) => self.items(items, &directory.join(&name), inner),
                    None => {
                        let flat = directory.join(format!("{name}.rs"));
                        let path: PathBuf = if flat.is_file() { flat } else { directory.join(&name).join("mod.rs") };
                        self.file(&path, &directory.join(&name), inner);
                    }
                }
            }
            Item::Use(item) if !is_hidden(&item.attrs) => {
                imports(&item.tree, Vec::new(), is_pub(&item.vis), module);
            }
            Item::Impl(item) if item.trait_.is_none() && !is_hidden(&item.attrs) => self.inherent(item, module_path),
            Item::Macro(item) if item.ident.is_some() => {
                let exported = has(&item.attrs, "macro_export") && !is_hidden(&item.attrs);
                self.macros.extend(item.ident.as_ref().filter(|_| exported).map(ToString::to_string));
            }
            Item::Macro(item) if !is_hidden(&item.attrs) => {
                let Some(written) = self.expand(&item.mac) else { return };
                let file: syn::File = syn::parse2(written).expect("the macro expands to items");
                file.items.iter().for_each(|item| self.item(item, directory, module_path, module));
            }
            _ => {}
        }
    }

    /// Expands a macro of this workspace; `None` for a macro of another crate.
    fn expand(&self, call: &syn::Macro) -> Option<TokenStream> {
        let name = call.path.segments.last()?.ident.to_string();
        let written = self.rules.get(&name)?.expand(&call.tokens);
        Some(written.unwrap_or_else(|| panic!("no rule of {name}! matches {}", call.tokens)))
    }

    fn fields(&self, fields: &Fields) -> Vec<Member> {
        let public = fields.iter().zip(0u32..).filter(|(field, _)| is_pub(&field.vis) && !is_hidden(&field.attrs));
        let member = |(field, at): (&syn::Field, u32)| {
            let mut of = field.ty.clone();
            Expander(self).visit_type_mut(&mut of);
            let name = field.ident.as_ref().map_or_else(|| at.to_string(), ToString::to_string);
            let doc = doc(&field.attrs);
            Member { name, kind: MemberKind::Field, text: format!("field {}", text(of)), doc }
        };
        public.map(member).collect()
    }

    fn inherent(&mut self, item: &syn::ItemImpl, module_path: &ModulePath) {
        let Type::Path(path) = &*item.self_ty else { return };
        // Bounds of the block are bounds of its methods. So is the type, if it is one instance of a generic type.
        let bounded = item.generics.where_clause.is_some()
            || item.generics.type_params().next().is_some()
            || item.generics.const_params().next().is_some();
        let given = path.path.segments.iter().any(|segment| !segment.arguments.is_none());
        let of = if bounded || given && item.generics.params.is_empty() {
            format!(", of {}{}", text(&item.self_ty), generics_of_impl(&item.generics))
        } else {
            String::new()
        };
        let path: ModulePath = path.path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        let members = item.items.iter().filter_map(|member| {
            let (name, text, attributes) = match member {
                ImplItem::Fn(member) if is_pub(&member.vis) && !is_hidden(&member.attrs) => {
                    (&member.sig.ident, function(&member.sig), &member.attrs)
                }
                ImplItem::Const(member) if is_pub(&member.vis) && !is_hidden(&member.attrs) => {
                    (&member.ident, format!("const {}", text(&member.ty)), &member.attrs)
                }
                _ => return None,
            };
            let doc = doc(attributes);
            Some(Member { name: name.to_string(), kind: MemberKind::Other, text: text + &of, doc })
        });
        self.impls.push((module_path.clone(), path, members.collect()));
    }

    /// Resolves a path of a module: returns the module that defines the last name, or that is the last name.
    fn resolve(
        &self,
        from: &ModulePath,
        path: &[String],
        visited: &mut BTreeSet<(ModulePath, ModulePath)>,
    ) -> Option<ModulePath> {
        if !visited.insert((from.clone(), path.to_vec())) {
            return None;
        }
        let (first, rest) = path.split_first()?;
        match first.as_str() {
            "crate" if rest.is_empty() => return Some(Vec::new()),
            "crate" => return self.resolve(&Vec::new(), rest, visited),
            "self" if rest.is_empty() => return Some(from.clone()),
            "self" => return self.resolve(from, rest, visited),
            "super" => return self.resolve(&from[..from.len().checked_sub(1)?].to_vec(), rest, visited),
            _ => {}
        }
        let module = self.modules.get(from)?;
        let path_here = [from.as_slice(), std::slice::from_ref(first)].concat();
        let mut targets = Vec::new();
        if module.items.contains_key(first) {
            targets.push(path_here);
        }
        for (name, path, _) in &module.uses {
            if name == first {
                targets.extend(self.resolve(from, path, visited));
            }
        }
        for (path, _) in &module.globs {
            if let Some(target) = self.resolve(from, path, visited) {
                targets.extend(self.resolve(&target, std::slice::from_ref(first), visited));
            }
        }
        if rest.is_empty() {
            return targets.into_iter().next();
        }
        targets
            .into_iter()
            .filter(|target| self.modules.contains_key(target))
            .find_map(|target| self.resolve(&target, rest, visited))
    }

    /// Returns every public path with the definition that it leads to.
    pub fn paths(&self) -> Vec<(ModulePath, ModulePath)> {
        let mut found = Vec::new();
        self.paths_of(&Vec::new(), &Vec::new(), &mut Vec::new(), &mut found);
        found
    }

    fn paths_of(
        &self,
        public: &ModulePath,
        module: &ModulePath,
        open: &mut Vec<ModulePath>,
        found: &mut Vec<(ModulePath, ModulePath)>,
    ) {
        if open.contains(module) {
            return;
        }
        open.push(module.clone());
        let definitions = &self.modules[module];
        let mut reached: Vec<(String, ModulePath)> = Vec::new();
        for (name, (_, public)) in &definitions.items {
            if *public {
                reached.push((name.clone(), [module.as_slice(), std::slice::from_ref(name)].concat()));
            }
        }
        for (name, path, _) in definitions.uses.iter().filter(|(.., public)| *public) {
            if let Some(target) = self.resolve(module, path, &mut BTreeSet::new()) {
                reached.push((name.clone(), target));
            } else if path[0].starts_with("unweight") {
                reached.push((name.clone(), path.clone()));
            }
        }
        for (path, _) in definitions.globs.iter().filter(|(_, public)| *public) {
            let Some(of) = self.resolve(module, path, &mut BTreeSet::new()) else { continue };
            self.paths_of(public, &of, open, found);
        }
        for (name, target) in reached {
            let path = [public.as_slice(), &[name]].concat();
            found.push((path.clone(), target.clone()));
            if self.modules.contains_key(&target) {
                self.paths_of(&path, &target, open, found);
            }
        }
        open.pop();
    }

    /// Returns the first paragraph of a definition's documentation; `None` for modules, macros and items of other
    /// crates.
    pub fn doc(&self, definition: &ModulePath) -> Option<&str> {
        let (name, module) = definition.split_last()?;
        self.modules.get(module)?.docs.get(name).map(String::as_str)
    }

    /// Returns the declaration of a definition, without its name; `None` for a definition in another crate.
    pub fn declaration(&self, definition: &ModulePath) -> Option<&str> {
        let Some((name, module)) = definition.split_last() else { return Some("mod") };
        self.modules.get(module)?.items.get(name).map(|(text, _)| text.as_str())
    }
}

/// Expands macros in types.
struct Expander<'a>(&'a Crate);

impl VisitMut for Expander<'_> {
    fn visit_type_mut(&mut self, of: &mut Type) {
        if let Type::Macro(call) = of
            && let Some(written) = self.0.expand(&call.mac)
        {
            *of = syn::parse2(written).expect("the macro expands to a type");
        }
        syn::visit_mut::visit_type_mut(self, of);
    }
}

/// Returns the bounds of an `impl` block, after its type.
fn generics_of_impl(generics: &syn::Generics) -> String {
    let bounds: Vec<String> = generics
        .params
        .iter()
        .filter(|parameter| match parameter {
            syn::GenericParam::Type(parameter) => !parameter.bounds.is_empty(),
            syn::GenericParam::Lifetime(parameter) => !parameter.bounds.is_empty(),
            syn::GenericParam::Const(_) => false,
        })
        .map(text)
        .chain(generics.where_clause.iter().flat_map(|clause| clause.predicates.iter().map(text)))
        .collect();
    if bounds.is_empty() { String::new() } else { format!(" where {}", bounds.join(", ")) }
}

/// Returns a member of a trait. Methods with a default body are `provided`: an implementation may omit them.
fn trait_member(member: &TraitItem) -> Option<Member> {
    let (name, attributes, text) = match member {
        TraitItem::Fn(member) => {
            let provided = if member.default.is_some() { "provided " } else { "" };
            (&member.sig.ident, &member.attrs, format!("{provided}{}", function(&member.sig)))
        }
        TraitItem::Const(member) => {
            let provided = if member.default.is_some() { "provided " } else { "" };
            (&member.ident, &member.attrs, format!("{provided}const {}", text(&member.ty)))
        }
        TraitItem::Type(member) => (&member.ident, &member.attrs, format!("type{}", after(": ", &member.bounds))),
        _ => return None,
    };
    let (kind, doc) = (MemberKind::Other, doc(attributes));
    (!is_hidden(attributes)).then(|| Member { name: name.to_string(), kind, text, doc })
}

fn parsed(path: &Path) -> syn::File {
    syn::parse_file(&read(path)).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns the macros that published crates export.
pub fn exported() -> BTreeMap<String, Rules> {
    published().keys().flat_map(|directory| rules_of(&format!("{directory}/src"), true)).collect()
}

/// Returns the `macro_rules!` of all files in a directory.
fn rules_of(directory: &str, exported: bool) -> BTreeMap<String, Rules> {
    let mut found = BTreeMap::new();
    for path in files(&[directory], &["rs"], &[]) {
        if read(&path).contains(if exported { "#[macro_export]" } else { "macro_rules!" }) {
            add_rules(&parsed(&path).items, exported, &mut found);
        }
    }
    found
}

fn add_rules(items: &[Item], exported: bool, found: &mut BTreeMap<String, Rules>) {
    for item in items {
        if let Item::Macro(item) = item
            && let Some(name) = &item.ident
            && (!exported || has(&item.attrs, "macro_export"))
        {
            found.insert(name.to_string(), Rules::new(item.mac.tokens.clone()));
        }
    }
}

fn imports(tree: &UseTree, prefix: ModulePath, public: bool, module: &mut Module) {
    let with = |name: &syn::Ident| [prefix.as_slice(), &[name.to_string()]].concat();
    match tree {
        UseTree::Path(path) => imports(&path.tree, with(&path.ident), public, module),
        UseTree::Name(name) if name.ident == "self" => {
            let last = prefix.last().expect("self follows a path").clone();
            module.uses.push((last, prefix.clone(), public));
        }
        UseTree::Name(name) => module.uses.push((name.ident.to_string(), with(&name.ident), public)),
        UseTree::Rename(name) => module.uses.push((name.rename.to_string(), with(&name.ident), public)),
        UseTree::Glob(_) => module.globs.push((prefix.clone(), public)),
        UseTree::Group(group) => group.items.iter().for_each(|tree| imports(tree, prefix.clone(), public, module)),
    }
}
