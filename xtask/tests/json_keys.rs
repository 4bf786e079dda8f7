//! Checks that the tables of JSON keys in `docs/reference/json.md` match the types that the command line prints.
//!
//! `UPDATE_DOCS=1 cargo test -p xtask --test json_keys` writes the tables. A table follows `<!-- = FILE::TYPE -->`,
//! which names a type that derives `Serialize`. A row has the key, its JSON type (`#` is an integer, `T[]` an array,
//! `T?` may be `null`) and the doc comment of the field. `TYPE without OTHER` leaves out the keys that OTHER has as
//! well. A type with its own heading is linked; the keys of other types are listed below the field's.

use std::{
    collections::{BTreeMap, HashMap},
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

use syn::{Attribute, Fields, GenericArgument, Generics, Item, PathArguments, Type};

mod workspace;

use workspace::{files, read, root, shown};

/// Rust types and their names in JSON.
const SCALARS: [(&str, &str); 23] = [
    ("bool", "boolean"),
    ("f32", "number"),
    ("f64", "number"),
    ("i64", "integer"),
    ("u8", "integer"),
    ("u16", "integer"),
    ("u32", "integer"),
    ("u64", "integer"),
    ("usize", "integer"),
    ("String", "string"),
    ("str", "string"),
    ("Path", "string"),
    ("PathBuf", "string"),
    // These implement `Serialize` themselves, as a name or digits.
    ("Arch", "string"),
    ("Class", "string"),
    ("Digest", "string"),
    ("EncodingId", "string"),
    ("PipelineVariant", "string"),
    ("Placement", "string"),
    ("Profile", "string"),
    ("Role", "string"),
    ("Scope", "string"),
    ("Value", "object"),
];

/// A field, or a variant with one value, as a JSON key.
struct Key {
    name: String,
    kind: Type,
    /// The keys of its type replace it (`flatten`).
    flat: bool,
    /// Whether the key may be absent.
    optional: bool,
    doc: String,
}

struct Definition {
    generics: Vec<String>,
    keys: Vec<Key>,
}

/// Types that derive `Serialize`, by file and name.
type Types = BTreeMap<(PathBuf, String), Definition>;

fn attribute_text(attributes: &[Attribute], name: &str) -> Vec<String> {
    let of = |attribute: &Attribute| match &attribute.meta {
        syn::Meta::List(list) if attribute.path().is_ident(name) => Some(list.tokens.to_string()),
        _ => None,
    };
    attributes.iter().filter_map(of).collect()
}

fn serializes(attributes: &[Attribute]) -> bool {
    attribute_text(attributes, "derive").iter().any(|text| text.split(',').any(|one| one.trim().ends_with("Serialize")))
}

/// Drops the words that a row repeats: an integer is a number of things, and sizes are in bytes unless the key has a
/// unit.
fn without_type<'a>(doc: &'a str, key: &str) -> &'a str {
    let strip = |text: &'a str, prefix: &str| text.strip_prefix(prefix).unwrap_or(text);
    let doc = strip(strip(doc, "The number of "), "Number of ");
    let units: &[&str] = match key {
        _ if key.ends_with("bytes") => &[" in bytes", ", bytes"],
        _ if key.ends_with("_us") => &[" in microseconds", ", us"],
        "seconds" => &[" in seconds"],
        _ => &[],
    };
    let doc = if key.ends_with("bytes") { strip(strip(doc, "Bytes of "), "Size of ") } else { doc };
    units.iter().find_map(|unit| doc.strip_suffix(unit)).unwrap_or(doc)
}

/// Returns the doc comment on one line, with links to Rust items as code, and escaped bars.
fn doc(attributes: &[Attribute]) -> String {
    let line = |attribute: &Attribute| match &attribute.meta {
        syn::Meta::NameValue(pair) if attribute.path().is_ident("doc") => match &pair.value {
            syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) => Some(text.value().trim().to_owned()),
            _ => None,
        },
        _ => None,
    };
    let text = attributes.iter().filter_map(line).collect::<Vec<_>>().join(" ");
    plain_links(&text).replace('|', "\\|").trim_end_matches('.').to_owned()
}

/// Replaces [`name`](path) of a Rust item by `name`.
fn plain_links(text: &str) -> String {
    let (mut plain, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once("[`") {
        plain.push_str(before);
        let Some((name, after)) = after.split_once("`]") else {
            plain.push_str("[`");
            rest = after;
            continue;
        };
        write!(plain, "`{name}`").expect("writing to a string cannot fail");
        rest = match after.strip_prefix('(').and_then(|link| link.split_once(')')) {
            Some((_, after)) => after,
            None => after,
        };
    }
    plain + rest
}

fn names(generics: &Generics) -> Vec<String> {
    generics.type_params().map(|parameter| parameter.ident.to_string()).collect()
}

/// Parses `serde(...)` of a field: its JSON name, and whether it is flattened and optional. `None` if it is skipped.
fn serde_attributes(attributes: &[Attribute], field: String) -> Option<(String, bool, bool)> {
    let (mut name, mut flat, mut optional) = (field, false, false);
    for text in attribute_text(attributes, "serde") {
        for part in text.split(',').map(str::trim) {
            match part.split_once('=').map_or((part, ""), |(key, value)| (key.trim(), value.trim().trim_matches('"'))) {
                ("skip" | "skip_serializing", _) => return None,
                ("rename", new) => new.clone_into(&mut name),
                ("flatten", _) => flat = true,
                ("skip_serializing_if", _) => optional = true,
                _ => {}
            }
        }
    }
    Some((name, flat, optional))
}

fn snake(name: &str) -> String {
    let mut snake = String::new();
    for letter in name.chars() {
        if letter.is_uppercase() && !snake.is_empty() {
            snake.push('_');
        }
        snake.extend(letter.to_lowercase());
    }
    snake
}

/// Returns the keys of a type; `None` if the type is not an object with known keys.
fn definition(item: &Item) -> Option<(String, Definition)> {
    match item {
        Item::Struct(item) if serializes(&item.attrs) => {
            let Fields::Named(fields) = &item.fields else { return None };
            let keys = fields.named.iter().filter_map(|field| {
                let ident = field.ident.as_ref()?.to_string();
                let (name, flat, optional) = serde_attributes(&field.attrs, ident)?;
                Some(Key { name, kind: field.ty.clone(), flat, optional, doc: doc(&field.attrs) })
            });
            Some((item.ident.to_string(), Definition { generics: names(&item.generics), keys: keys.collect() }))
        }
        // `{"variant": value}`: exactly one of the keys.
        Item::Enum(item) if serializes(&item.attrs) => {
            let keys = item.variants.iter().map(|variant| match &variant.fields {
                Fields::Unnamed(fields) if fields.unnamed.len() == 1 => Some(Key {
                    name: snake(&variant.ident.to_string()),
                    kind: fields.unnamed[0].ty.clone(),
                    flat: false,
                    optional: true,
                    doc: doc(&variant.attrs),
                }),
                _ => None,
            });
            let keys = keys.collect::<Option<Vec<_>>>()?;
            Some((item.ident.to_string(), Definition { generics: names(&item.generics), keys }))
        }
        _ => None,
    }
}

fn types() -> Types {
    let folders = ["src", "unweight-format/src", "unweight-rt/src", "unweight-engine/src", "unweight-rivals/src"];
    files(&folders, &["rs"], &[]).iter().flat_map(|file| types_of(&shown(file), &read(file))).collect()
}

/// Parses the types of a text as the file `name`.
fn types_of(name: &str, text: &str) -> Types {
    let parsed = syn::parse_file(text).unwrap_or_else(|error| panic!("{name}: {error}"));
    parsed.items.iter().filter_map(definition).map(|(kind, found)| ((name.into(), kind), found)).collect()
}

/// Types, and the headings of types that have one.
struct Page {
    types: Types,
    headings: HashMap<(PathBuf, String), String>,
}

impl Page {
    /// Finds the definition of a type that `file` refers to: the file's own, or the only other one.
    fn find(&self, file: &Path, name: &str) -> Option<((PathBuf, String), &Definition)> {
        let local = (file.to_path_buf(), name.to_owned());
        if let Some(found) = self.types.get(&local) {
            return Some((local, found));
        }
        let mut others = self.types.iter().filter(|((_, other), _)| other == name);
        let (at, found) = others.next()?;
        assert!(others.next().is_none(), "{}: {name} is defined more than once", file.display());
        Some((at.clone(), found))
    }

    /// Adds rows for a type's keys below `prefix`.
    fn rows(&self, file: &Path, kind: &Type, prefix: &str, rows: &mut Vec<[String; 3]>) {
        let (name, arguments) = named(kind);
        let ((file, _), found) = self
            .find(file, &name)
            .unwrap_or_else(|| panic!("{}: no definition of {name} with known keys", file.display()));
        let given: HashMap<&str, &Type> = found.generics.iter().map(String::as_str).zip(&arguments).collect();
        for key in &found.keys {
            let kind = given.get(named(&key.kind).0.as_str()).map_or_else(|| key.kind.clone(), |kind| (*kind).clone());
            let kind = with_arguments(kind, &given);
            if key.flat {
                self.rows(&file, &kind, prefix, rows);
            } else {
                self.row(&file, key, &kind, prefix, rows);
            }
        }
    }

    fn row(&self, file: &Path, key: &Key, kind: &Type, prefix: &str, rows: &mut Vec<[String; 3]>) {
        assert!(!key.doc.is_empty(), "{}: `{}` has no doc comment", file.display(), key.name);
        let Shape { inner, list, null } = shape(kind);
        let (name, _) = named(&inner);
        let path = format!("{prefix}{}", key.name);
        let mut doc = without_type(&key.doc, &key.name).to_owned();
        let scalar = SCALARS.iter().find(|(rust, _)| *rust == name).map(|(_, json)| *json);
        let target = if scalar.is_none() { self.find(file, &name).map(|(at, _)| at) } else { None };
        let heading = target.as_ref().and_then(|at| self.headings.get(at));
        let json_type = match (scalar, heading) {
            (Some(json), _) => json.to_owned(),
            (None, Some(heading)) => format!("[{heading}](#{})", heading.replace(' ', "-").replace("--", "")),
            (None, None) => "object".to_owned(),
        };
        let mut json = json_type;
        json += if list { "[]" } else { "" };
        json += if null { "?" } else { "" };
        json += if key.optional { ", optional" } else { "" };
        let path = if list && scalar.is_none() { format!("{path}[]") } else { path };
        if doc.starts_with(char::is_lowercase) {
            doc = doc[..1].to_uppercase() + &doc[1..];
        }
        rows.push([format!("`{path}`"), json, doc]);
        if scalar.is_none() && heading.is_none() {
            self.rows(file, &inner, &format!("{path}."), rows);
        }
    }
}

/// The content of a field: a value, several values, or an optional value.
struct Shape {
    inner: Type,
    list: bool,
    null: bool,
}

fn shape(kind: &Type) -> Shape {
    let one = |inner: &Type| Shape { inner: inner.clone(), list: false, null: false };
    match kind {
        Type::Reference(reference) => shape(&reference.elem),
        Type::Slice(slice) => Shape { list: true, ..shape(&slice.elem) },
        Type::Array(array) => Shape { list: true, ..shape(&array.elem) },
        _ => match (named(kind).0.as_str(), named(kind).1.first()) {
            ("Vec", Some(inner)) => Shape { list: true, ..shape(inner) },
            ("Option", Some(inner)) => Shape { null: true, ..shape(inner) },
            ("Box", Some(inner)) => shape(inner),
            _ => one(kind),
        },
    }
}

/// Returns the last name of a type's path, and its type arguments.
fn named(kind: &Type) -> (String, Vec<Type>) {
    let Type::Path(path) = kind else { return (String::new(), Vec::new()) };
    let Some(last) = path.path.segments.last() else { return (String::new(), Vec::new()) };
    let arguments = match &last.arguments {
        PathArguments::AngleBracketed(list) => list.args.iter().filter_map(|argument| match argument {
            GenericArgument::Type(kind) => Some(kind.clone()),
            _ => None,
        }),
        _ => return (last.ident.to_string(), Vec::new()),
    };
    (last.ident.to_string(), arguments.collect())
}

/// Substitutes the type parameters of a definition.
fn with_arguments(mut kind: Type, given: &HashMap<&str, &Type>) -> Type {
    if let Type::Path(path) = &mut kind
        && let Some(PathArguments::AngleBracketed(list)) = path.path.segments.last_mut().map(|last| &mut last.arguments)
    {
        for argument in &mut list.args {
            if let GenericArgument::Type(inner) = argument
                && let Some(replacement) = given.get(named(inner).0.as_str())
            {
                *inner = (*replacement).clone();
            }
        }
    }
    kind
}

/// Parses a marker: the file, the type, and the type of the same file whose keys are left out.
fn marker(line: &str) -> Option<(PathBuf, Type, Option<Type>)> {
    let (file, kinds) = line.strip_prefix("<!-- = ")?.strip_suffix(" -->")?.split_once("::")?;
    let parsed = |kind| syn::parse_str(kind).unwrap_or_else(|error| panic!("{line}: {error}"));
    let (kind, without) = kinds.split_once(" without ").map_or((kinds, None), |(kind, other)| (kind, Some(other)));
    Some((file.into(), parsed(kind), without.map(parsed)))
}

/// Returns the page with the tables of these types.
fn generated(text: &str, types: Types) -> String {
    let mut headings = HashMap::new();
    let mut heading = "";
    for line in text.lines() {
        heading = line.strip_prefix("### ").unwrap_or(heading);
        if let Some((file, kind, _)) = marker(line) {
            headings.insert((file, named(&kind).0), heading.to_owned());
        }
    }
    let page = Page { types, headings };
    let (mut out, mut lines) = (String::new(), text.lines().peekable());
    while let Some(line) = lines.next() {
        writeln!(out, "{line}").expect("writing to a string cannot fail");
        let Some((file, kind, without)) = marker(line) else { continue };
        while lines.next_if(|line| line.is_empty() || line.starts_with('|')).is_some() {}
        let mut rows = Vec::new();
        page.rows(&file, &kind, "", &mut rows);
        if let Some(without) = without {
            let mut others = Vec::new();
            page.rows(&file, &without, "", &mut others);
            rows.retain(|[key, ..]| !others.iter().any(|[other, ..]| other == key));
        }
        out += "\n| | | |\n|---|---|---|\n";
        for [key, json, doc] in rows {
            writeln!(out, "| {key} | {json} | {doc} |").expect("writing to a string cannot fail");
        }
        out += if lines.peek().is_some() { "\n" } else { "" };
    }
    out
}

#[test]
fn tables_are_those_of_the_types() {
    let path = root().join("docs/reference/json.md");
    let text = read(&path);
    let generated = generated(&text, types());
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, generated).expect("docs/reference/json.md");
    } else {
        let hint = "run UPDATE_DOCS=1 cargo test -p xtask --test json_keys";
        let differs = text.lines().zip(generated.lines()).find(|(page, types)| page != types);
        assert!(text == generated, "docs/reference/json.md is outdated, first at {differs:?}; {hint}");
    }
}

#[test]
fn a_table_follows_serde() {
    let source = "
        #[derive(Serialize)]
        struct Report<'a, T> {
            /// The [`Vec`](std::vec::Vec) of rows.
            rows: Vec<Row>,
            /// a | b
            #[serde(rename = \"other\")]
            own: Option<&'a str>,
            #[serde(skip)]
            hidden: u8,
            #[serde(flatten)]
            more: T,
            /// Left out.
            #[serde(skip_serializing_if = \"Option::is_none\")]
            counts: Option<Vec<u64>>,
        }
        #[derive(Serialize)]
        struct Row {
            /// Is it.
            is: bool,
        }
        #[derive(Debug, serde::Serialize)]
        enum More {
            /// One.
            FirstOne(Row),
            /// Two.
            Second(String),
        }
        struct NotWritten { a: u8 }
    ";
    let page = "### report\n<!-- = a.rs::Report<More> -->\n\n| old |\n\nafter\n";
    let expected = "### report\n<!-- = a.rs::Report<More> -->\n
| | | |
|---|---|---|
| `rows[]` | object[] | The `Vec` of rows |
| `rows[].is` | boolean | Is it |
| `other` | string? | A \\| b |
| `first_one` | object, optional | One |
| `first_one.is` | boolean | Is it |
| `second` | string, optional | Two |
| `counts` | integer[]?, optional | Left out |

after
";
    assert_eq!(generated(page, types_of("a.rs", source)), expected);
    let page = "<!-- = a.rs::Report<More> without More -->\n";
    let without = generated(page, types_of("a.rs", source));
    assert!(without.contains("| `rows[]` |") && !without.contains("`second`"), "{without}");
}
