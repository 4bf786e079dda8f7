//! Compares argument structs between host and device: every field has the same name, offset and size in the family's
//! Rust file and in the header.
//!
//! The rendered sources assert `sizeof` only, which does not detect two swapped fields of the same size. This test
//! does.

use std::collections::BTreeSet;
use unweight_codegen::family::FAMILIES;

/// (name, offset, bytes) of each field, in order.
type Layout = Vec<(String, usize, usize)>;

/// Returns the struct `name` of the headers, with the layout of C++ on a 64-bit system.
fn device(name: &str) -> (Layout, usize) {
    let head = format!("struct {name} {{\n");
    let mut bodies = unweight_templates::headers().iter().filter_map(|(_, text)| Some(text.split_once(&head)?.1));
    let body = bodies.next().unwrap_or_else(|| panic!("no header has a {head}"));
    let body = body.split_once("\n};").expect("the struct ends").0;
    let (mut layout, mut end, mut align_all) = (Layout::new(), 0usize, 1);
    for line in body.lines() {
        let declaration = line.split_once(';').expect("one field per line").0.trim();
        let (kind, field) = declaration.rsplit_once(' ').expect("a type and a name");
        let (bytes, align) = match kind {
            pointer if pointer.ends_with('*') => (8, 8),
            "u64" => (8, 8),
            "u32" | "float" => (4, 4),
            "TensorMap" => (128, 64),
            other => panic!("{name}.{field}: type {other} is not known to this test"),
        };
        // `reserved[14]` is an array.
        let (field, count) = match field.split_once('[') {
            Some((field, count)) => (field, count.trim_end_matches(']').parse().expect("a number of elements")),
            None => (field, 1),
        };
        let bytes = bytes * count;
        let offset = end.next_multiple_of(align);
        layout.push((field.to_owned(), offset, bytes));
        end = offset + bytes;
        align_all = align_all.max(align);
    }
    (layout, end.next_multiple_of(align_all))
}

#[test]
fn host_and_device_agree_on_every_field() {
    for args in FAMILIES.iter().map(|family| family.args) {
        let host = args.fields.iter().map(|field| (field.name.to_owned(), field.offset, field.bytes)).collect();
        assert_eq!((host, args.bytes), device(args.name), "{}", args.name);
    }
}

/// A struct that is not the argument of any family is dead code.
#[test]
fn every_struct_of_the_headers_is_one_of_a_family() {
    let taken: BTreeSet<_> = FAMILIES.iter().map(|family| family.args.name).collect();
    let lines = unweight_templates::headers().iter().flat_map(|(_, text)| text.lines());
    let names = lines.filter_map(|line| line.strip_prefix("struct ")?.strip_suffix("Args {"));
    let declared: BTreeSet<_> = names.map(|name| format!("{name}Args")).collect();
    assert_eq!(declared, taken.into_iter().map(str::to_owned).collect());
}
