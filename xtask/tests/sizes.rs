//! Limits the sizes of files, functions and parameter lists.

use syn::{Block, ImplItem, Item, Signature, TraitItem, spanned::Spanned, visit};

mod sources;
mod workspace;

use sources::{impl_attributes, item_attributes, modules, of_tests, trait_attributes};
use workspace::{files, read, shown};

/// Maximum lines of product code in a file, and lines of a kernel header.
const FILE_LINES: usize = 800;
/// Maximum lines between the braces of a function.
const BODY_LINES: usize = 100;
/// Maximum number of parameters, including `self`.
const PARAMETERS: usize = 7;

/// Directories of product code.
const SOURCES: [&str; 13] = [
    "unweight-format/src",
    "unweight-model/src",
    "templates/src",
    "unweight-macros/src",
    "unweight-codegen/src",
    "unweight-rt/src",
    "unweight-engine/src",
    "unweight-rivals/src",
    "unweight-bench/src",
    "src",
    "xtask/src",
    "bindings/candle/src",
    "bindings/python/src",
];

/// Finds functions that are too large, and counts lines that only tests compile.
#[derive(Default)]
struct Visitor {
    test_lines: usize,
    found: Vec<String>,
}

impl Visitor {
    fn function(&mut self, signature: &Signature, body: Option<&Block>) {
        let (name, line) = (&signature.ident, signature.span().start().line);
        let parameters = signature.inputs.len();
        if parameters > PARAMETERS {
            self.found.push(format!("{line}: {name} has {parameters} parameters, more than {PARAMETERS}"));
        }
        // The lines of the braces do not count.
        let lines = body.map_or(0, |body| lines(body).saturating_sub(2));
        if lines > BODY_LINES {
            self.found.push(format!("{line}: {name} has {lines} lines, more than {BODY_LINES}"));
        }
    }
}

/// Returns the number of lines that a piece of source spans.
fn lines(of: &impl Spanned) -> usize {
    let span = of.span();
    span.end().line - span.start().line + 1
}

impl<'ast> visit::Visit<'ast> for Visitor {
    fn visit_item(&mut self, item: &'ast Item) {
        match item {
            _ if of_tests(item_attributes(item)) => self.test_lines += lines(item),
            Item::Fn(function) => {
                self.function(&function.sig, Some(&function.block));
                visit::visit_item(self, item);
            }
            _ => visit::visit_item(self, item),
        }
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        match item {
            _ if of_tests(impl_attributes(item)) => self.test_lines += lines(item),
            ImplItem::Fn(function) => {
                self.function(&function.sig, Some(&function.block));
                visit::visit_impl_item(self, item);
            }
            _ => visit::visit_impl_item(self, item),
        }
    }

    fn visit_trait_item(&mut self, item: &'ast TraitItem) {
        match item {
            _ if of_tests(trait_attributes(item)) => self.test_lines += lines(item),
            TraitItem::Fn(function) => {
                self.function(&function.sig, function.default.as_ref());
                visit::visit_trait_item(self, item);
            }
            _ => visit::visit_trait_item(self, item),
        }
    }
}

/// Returns what is too large in a Rust source, each with its line.
fn faults(text: &str) -> Result<Vec<String>, syn::Error> {
    let mut visitor = Visitor::default();
    visit::Visit::visit_file(&mut visitor, &syn::parse_file(text)?);
    let product_lines = text.lines().count() - visitor.test_lines;
    if product_lines > FILE_LINES {
        visitor
            .found
            .push(format!("{FILE_LINES}: the file has {product_lines} lines of product code, more than {FILE_LINES}"));
    }
    Ok(visitor.found)
}

#[test]
fn files_functions_and_parameter_lists_are_short() {
    let mut found = Vec::new();
    for source in SOURCES {
        let mut files: Vec<_> = modules(source).into_iter().map(|module| module.file).collect();
        files.sort();
        files.dedup();
        for file in files {
            let shown = shown(&file);
            let faults = faults(&read(&file)).unwrap_or_else(|error| panic!("{shown}: {error}"));
            found.extend(faults.into_iter().map(|fault| format!("{shown}:{fault}")));
        }
    }
    assert!(found.is_empty(), "too large; split these:\n{}", found.join("\n"));
}

#[test]
fn kernel_headers_and_python_modules_are_short() {
    let folders = ["templates", "unweight-rivals/kernels", "bindings/python/python"];
    let lines = files(&folders, &["cuh", "py"], &[]).into_iter().map(|path| {
        let lines = read(&path).lines().count();
        (path, lines)
    });
    let long = lines.filter(|(_, lines)| *lines > FILE_LINES);
    let found: Vec<String> =
        long.map(|(path, lines)| format!("{}: {lines} lines, more than {FILE_LINES}", shown(&path))).collect();
    assert!(found.is_empty(), "too large; split these:\n{}", found.join("\n"));
}

#[test]
fn what_is_too_large_is_found() {
    let body = |lines: usize| format!("{{\n{}}}", "f();\n".repeat(lines));
    let found = |text: &str| faults(text).expect("Rust");
    assert_eq!(found(&format!("fn f() {}", body(BODY_LINES))), [""; 0]);
    let long = format!("1: f has {} lines, more than {BODY_LINES}", BODY_LINES + 1);
    assert_eq!(found(&format!("fn f() {}", body(BODY_LINES + 1))), [long.as_str()]);
    for method in ["impl S { fn f(&self)", "trait T { fn f(&self)", "mod m { fn f()"] {
        assert_eq!(found(&format!("{method} {} }}", body(BODY_LINES + 1))), [long.as_str()], "{method}");
    }
    assert_eq!(found("impl S { fn f(self, a: A, b: A, c: A, d: A, e: A, f: A) {} }"), [""; 0]);
    let many = format!("1: f has 8 parameters, more than {PARAMETERS}");
    assert_eq!(found("impl S { fn f(self, a: A, b: A, c: A, d: A, e: A, f: A, g: A) {} }"), [many]);
    let structs = "struct A;\n".repeat(FILE_LINES);
    assert_eq!(found(&structs), [""; 0]);
    assert_eq!(found(&format!("{structs}struct B;\n")).len(), 1);
    let tests = format!("{structs}#[cfg(test)]\nmod tests {{\nfn f() {}\n}}\n", body(2 * BODY_LINES));
    assert_eq!(found(&tests), [""; 0], "tests may be long");
}
