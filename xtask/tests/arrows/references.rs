//! Finds which module refers to which: by `use`, by a path in code, or by a path in a macro's arguments.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use proc_macro2::{Ident, TokenStream, TokenTree};
use syn::{ImplItem, Item, ItemUse, Macro, Path, TraitItem, UseTree, Visibility, spanned::Spanned, visit};

use crate::sources::{Module, impl_attributes, item_attributes, of_tests, trait_attributes};

type ModulePath = Vec<String>;

/// A reference from a module to a name in its own crate.
pub struct Reference {
    pub from: ModulePath,
    /// The target: the module that defines the name, and the name.
    pub to: ModulePath,
    pub file: PathBuf,
    pub line: usize,
}

/// The names of a module that paths can refer to.
#[derive(Default)]
struct Names {
    /// Names imported by `use`, by their local name.
    uses: BTreeMap<String, ModulePath>,
    globs: Vec<ModulePath>,
    defined: BTreeSet<String>,
}

/// The modules of a crate.
pub struct Tree {
    names: BTreeMap<ModulePath, Names>,
    references: Vec<Reference>,
    /// What each module names, with its file.
    visitors: Vec<(ModulePath, PathBuf, Visitor)>,
}

impl Tree {
    pub fn new(modules: &[Module]) -> Self {
        let mut names: BTreeMap<ModulePath, Names> = BTreeMap::new();
        let (mut references, mut visitors) = (Vec::new(), Vec::new());
        let crate_aliases = aliases_of_crate(modules);
        for module in modules {
            // A library and a program have two roots, both with an empty path.
            let module_names = names.entry(module.path.clone()).or_default();
            for item in &module.items {
                module_names.add(item);
            }
            let mut visitor = Visitor { aliases: crate_aliases.clone(), ..Visitor::default() };
            visitor.collect_aliases(&module.items);
            module.items.iter().for_each(|item| visit::Visit::visit_item(&mut visitor, item));
            let of = |(to, line)| Reference { from: module.path.clone(), to, file: module.file.clone(), line };
            references.extend(visitor.found.iter().cloned().map(of));
            visitors.push((module.path.clone(), module.file.clone(), visitor));
        }
        let mut tree = Self { names, references: Vec::new(), visitors };
        let resolve = |reference: Reference| {
            let to = tree.resolve(&reference.from, &reference.to, &mut BTreeSet::new())?;
            Some(Reference { to, ..reference })
        };
        tree.references = references.into_iter().filter_map(resolve).collect();
        tree
    }

    /// Returns the modules that import everything from the root of the crate: what they use of it has no arrow.
    pub fn globs_of_root(&self) -> impl Iterator<Item = &ModulePath> {
        let is_root = |from: &ModulePath, glob: &ModulePath| {
            self.resolve(from, glob, &mut BTreeSet::new()).is_some_and(|place| place.is_empty())
        };
        let modules = self.names.iter().filter(|(path, _)| !path.is_empty());
        modules.filter(move |(path, names)| names.globs.iter().any(|glob| is_root(path, glob))).map(|(path, _)| path)
    }

    /// Returns the paths that a module and its children name, as written and as resolved: in this crate from `crate`
    /// on, otherwise from the name of a crate. That of a glob ends with `*`.
    pub fn named_in(&self, of: &[String]) -> Vec<Reference> {
        let mut all = Vec::new();
        for (from, file, visitor) in self.visitors.iter().filter(|(from, ..)| from.starts_with(of)) {
            for (path, line) in visitor.named() {
                let glob = path.iter().position(|name| name == "*").unwrap_or(path.len());
                let resolved = self.resolve(from, &path[..glob], &mut BTreeSet::new());
                let in_crate = resolved.map(|to| [&["crate".to_owned()], to.as_slice(), &path[glob..]].concat());
                let with = |to| Reference { from: from.clone(), to, file: file.clone(), line };
                all.extend([Some(path), in_crate].into_iter().flatten().map(with));
            }
        }
        all
    }

    /// Returns the child modules of a module.
    pub fn children(&self, of: &[String]) -> BTreeSet<&str> {
        let inside = self.names.keys().filter(|path| path.len() == of.len() + 1 && path.starts_with(of));
        inside.filter_map(|path| path.last()).map(String::as_str).collect()
    }

    /// Returns the references between children of a module.
    ///
    /// References to and from the module's own definitions do not count.
    pub fn arrows<'a>(&'a self, of: &'a [String]) -> impl Iterator<Item = (&'a str, &'a str, &'a Reference)> {
        let children = self.children(of);
        self.references.iter().filter_map(move |reference| {
            let child = |place: &'a ModulePath| {
                place.strip_prefix(of)?.first().map(String::as_str).filter(|name| children.contains(name))
            };
            let (from, to) = (child(&reference.from)?, child(&reference.to)?);
            (from != to).then_some((from, to, reference))
        })
    }

    /// Resolves a path in a module to its definition, through re-exports. `None` for a path to another crate.
    fn resolve(
        &self,
        from: &ModulePath,
        path: &[String],
        visited: &mut BTreeSet<(ModulePath, ModulePath)>,
    ) -> Option<ModulePath> {
        // A path that recurs or grows without end would not compile.
        if !visited.insert((from.clone(), path.to_vec())) || visited.len() > 64 {
            return None;
        }
        let Some((first, rest)) = path.split_first() else { return Some(from.clone()) };
        match first.as_str() {
            "crate" => return self.resolve(&Vec::new(), rest, visited),
            "self" => return self.resolve(from, rest, visited),
            "super" => return self.resolve(&from[..from.len().checked_sub(1)?].to_vec(), rest, visited),
            _ => {}
        }
        let path_here = [from.as_slice(), std::slice::from_ref(first)].concat();
        if self.names.contains_key(&path_here) {
            return self.resolve(&path_here, rest, visited);
        }
        let names = self.names.get(from)?;
        if names.defined.contains(first) {
            return Some(path_here);
        }
        // `use quote::quote` refers to another crate: no module here has the first name.
        if let Some(path) = names.uses.get(first).filter(|path| path[0] != *first) {
            return self.resolve(from, &[path.as_slice(), rest].concat(), visited);
        }
        names.globs.iter().find_map(|glob| {
            let place = self.resolve(from, glob, visited)?;
            self.resolve(&place, path, visited)
        })
    }
}

impl Names {
    fn add(&mut self, item: &Item) {
        let name = match item {
            Item::Const(item) => &item.ident,
            Item::Enum(item) => &item.ident,
            Item::Fn(item) => &item.sig.ident,
            Item::Static(item) => &item.ident,
            Item::Struct(item) => &item.ident,
            Item::Trait(item) => &item.ident,
            Item::Type(item) => &item.ident,
            Item::Union(item) => &item.ident,
            Item::Use(item) => return self.import(&item.tree, &[]),
            Item::Macro(item) => {
                // A macro that defines a type has the type's name before the braces, after attributes.
                let idents = item.mac.tokens.clone().into_iter().filter_map(|token| match token {
                    TokenTree::Ident(ident) => Some(ident.to_string()),
                    _ => None,
                });
                self.defined.extend(idents);
                return self.defined.extend(item.ident.as_ref().map(Ident::to_string));
            }
            _ => return,
        };
        self.defined.insert(name.to_string());
    }

    fn import(&mut self, tree: &UseTree, before: &[String]) {
        for (path, name) in leaves(tree, before) {
            match name {
                Some(name) => drop(self.uses.insert(name, path)),
                None => self.globs.push(path),
            }
        }
    }
}

/// Returns the paths of a `use`, each with its local name; `None` for a glob.
fn leaves(tree: &UseTree, before: &[String]) -> Vec<(ModulePath, Option<String>)> {
    let with = |name: &Ident| [before, &[name.to_string()]].concat();
    match tree {
        UseTree::Path(path) => leaves(&path.tree, &with(&path.ident)),
        UseTree::Name(name) if name.ident == "self" => vec![(before.to_vec(), before.last().cloned())],
        UseTree::Name(name) => vec![(with(&name.ident), Some(name.ident.to_string()))],
        UseTree::Rename(name) if name.ident == "self" => vec![(before.to_vec(), Some(name.rename.to_string()))],
        UseTree::Rename(name) => vec![(with(&name.ident), Some(name.rename.to_string()))],
        UseTree::Glob(_) => vec![(before.to_vec(), None)],
        UseTree::Group(group) => group.items.iter().flat_map(|tree| leaves(tree, before)).collect(),
    }
}

/// Returns the names of `extern crate self as NAME`, which every module of the crate may use.
fn aliases_of_crate(modules: &[Module]) -> BTreeMap<String, ModulePath> {
    let of = |item: &Item| match item {
        Item::ExternCrate(item) if item.ident == "self" => {
            item.rename.as_ref().map(|(_, name)| (name.to_string(), vec!["crate".to_owned()]))
        }
        _ => None,
    };
    modules.iter().flat_map(|module| &module.items).filter_map(of).collect()
}

/// Collects paths that may lead into the crate, with their lines. Aliases are resolved; other names stay as written.
#[derive(Default)]
struct Visitor {
    found: Vec<(ModulePath, usize)>,
    /// Paths that begin with another name.
    others: Vec<(ModulePath, usize)>,
    /// Names that `use` imports, including those in functions, with their paths.
    imports: Vec<(String, ModulePath)>,
    /// Aliases of the crate or of an enclosing module, from `use crate as x` and `use super::{self as x}`, with their
    /// targets.
    aliases: BTreeMap<String, ModulePath>,
}

/// Collects aliases, including those in functions, until there are no more.
struct Aliases<'a>(&'a mut BTreeMap<String, ModulePath>);

impl<'ast> visit::Visit<'ast> for Aliases<'_> {
    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        for (path, name) in leaves(&item.tree, &[]) {
            let path = expand_alias(path, self.0);
            if let Some(name) = name.filter(|name| path.last() != Some(name))
                && path.iter().all(|name| matches!(name.as_str(), "crate" | "super" | "self"))
            {
                self.0.insert(name, path);
            }
        }
    }
}

/// Replaces an alias at the start of a path.
fn expand_alias(path: ModulePath, aliases: &BTreeMap<String, ModulePath>) -> ModulePath {
    match path.split_first() {
        Some((first, rest)) if aliases.contains_key(first) => [&aliases[first], rest].concat(),
        _ => path,
    }
}

impl Visitor {
    fn collect_aliases(&mut self, items: &[Item]) {
        let mut count = usize::MAX;
        while count != self.aliases.len() {
            count = self.aliases.len();
            items.iter().for_each(|item| visit::Visit::visit_item(&mut Aliases(&mut self.aliases), item));
        }
    }

    /// Returns whether a path with this first name stays in the crate.
    fn is_start(&self, ident: &Ident) -> bool {
        ident == "crate" || ident == "super" || ident == "self" || self.aliases.contains_key(&ident.to_string())
    }

    /// Collects paths in the arguments of a macro, which are not parsed.
    fn tokens(&mut self, tokens: TokenStream) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let is_colon = |at: usize| matches!(tokens.get(at), Some(TokenTree::Punct(p)) if p.as_char() == ':');
        let ident = |at: usize| match tokens.get(at) {
            Some(TokenTree::Ident(ident)) => Some(ident),
            _ => None,
        };
        // After `a::` or `a<B>::`; not after `a: ` or `::`.
        let continues = |at: usize| {
            let before = at.checked_sub(3).filter(|_| is_colon(at - 1) && is_colon(at - 2));
            before.is_some_and(|before| match &tokens[before] {
                TokenTree::Ident(_) => true,
                TokenTree::Punct(punct) => punct.as_char() == '>',
                _ => false,
            })
        };
        for (at, token) in tokens.iter().enumerate() {
            match token {
                TokenTree::Group(group) => self.tokens(group.stream()),
                TokenTree::Ident(first) if !continues(at) => {
                    let (mut path, mut at) = (vec![first.to_string()], at + 1);
                    while let (true, true, Some(next)) = (is_colon(at), is_colon(at + 1), ident(at + 2)) {
                        path.push(next.to_string());
                        at += 3;
                    }
                    self.add_code(path, first, first.span().start().line);
                }
                _ => {}
            }
        }
    }

    fn add(&mut self, path: ModulePath, line: usize) {
        if path.len() > 1 {
            self.found.push((expand_alias(path, &self.aliases), line));
        }
    }

    /// Adds a path in code.
    fn add_code(&mut self, path: ModulePath, first: &Ident, line: usize) {
        if self.is_start(first) {
            self.add(path, line);
        } else if path.len() > 1 {
            self.others.push((path, line));
        }
    }

    /// Returns all paths, those of globs with `*` at the end. For one that begins with an imported name, also returns
    /// it with the path of the import.
    fn named(&self) -> BTreeSet<(ModulePath, usize)> {
        let (mut open, mut named) = ([self.found.as_slice(), self.others.as_slice()].concat(), BTreeSet::new());
        while let Some((path, line)) = open.pop() {
            // A path that grows without end would not compile.
            if path.len() > 64 || !named.insert((path.clone(), line)) {
                continue;
            }
            let imports = self.imports.iter().filter(|(name, import)| *name == path[0] && import[0] != *name);
            open.extend(imports.map(|(_, import)| ([import, &path[1..]].concat(), line)));
        }
        named
    }
}

impl<'ast> visit::Visit<'ast> for Visitor {
    fn visit_item(&mut self, item: &'ast Item) {
        if !of_tests(item_attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        if !of_tests(impl_attributes(item)) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_trait_item(&mut self, item: &'ast TraitItem) {
        if !of_tests(trait_attributes(item)) {
            visit::visit_trait_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        let line = item.tree.span().start().line;
        for (path, name) in leaves(&item.tree, &[]) {
            match name {
                Some(name) => self.imports.push((name, path.clone())),
                None => self.others.push(([path.as_slice(), &["*".to_owned()]].concat(), line)),
            }
            self.add(path, line);
        }
    }

    fn visit_path(&mut self, path: &'ast Path) {
        if let Some(first) = path.segments.first() {
            let names = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
            self.add_code(names, &first.ident, first.ident.span().start().line);
        }
        visit::visit_path(self, path);
    }

    /// A visibility such as `pub(super)` is not a reference.
    fn visit_visibility(&mut self, _: &'ast Visibility) {}

    fn visit_macro(&mut self, called: &'ast Macro) {
        self.visit_path(&called.path);
        self.tokens(called.tokens.clone());
    }
}
