//! Checks that docs/reference/support.inc shows the registries of the code. `UPDATE_DOCS=1` writes it.

use std::{collections::BTreeMap, fmt::Write, fs, path::Path};

use unweight::{
    codegen::spec::Arch,
    format::{ENCODINGS, Encoding, EncodingId, TileGrid},
    model::Family,
    rt::raw::choose::candidates::has_compact_gemms,
};

use crate::harness::{json, run};

fn table(page: &mut String, title: &str, head: &[&str], rows: &[Vec<String>]) {
    write!(page, "<h2>{title}</h2>\n<table>\n").unwrap();
    let mut row = |tag: &str, cells: &[String]| {
        let cells: String = cells.iter().map(|cell| format!("<{tag}>{cell}</{tag}>")).collect();
        writeln!(page, "<tr>{cells}</tr>").unwrap();
    };
    row("th", &head.iter().map(|cell| (*cell).to_owned()).collect::<Vec<_>>());
    rows.iter().for_each(|cells| row("td", cells));
    page.push_str("</table>\n");
}

fn code(text: impl ToString) -> String {
    format!("<code>{}</code>", text.to_string())
}

fn yes(is: bool) -> String {
    if is { "yes" } else { "no" }.to_owned()
}

#[test]
fn the_support_matrix_is_that_of_the_registries() {
    let mut page = "<!-- Written by tests/cli/support.rs from the registries in the code. -->\n".to_owned();
    let families: Vec<_> = Family::model_types().map(code).collect();
    table(&mut page, "Models that run", &["<code>model_type</code>"], &[vec![families.join(", ")]]);
    let encoding = |encoding: &&dyn Encoding| {
        let floats: Vec<_> = encoding.floats().iter().map(|float| float.name()).collect();
        // Tensors that are not coded, of any type, are raw.
        let types = if encoding.id() == EncodingId::RAW { "any".to_owned() } else { floats.join(", ") };
        let any_shape = encoding.fits(TileGrid::new(3, 65).unwrap()).is_ok();
        let names = encoding.sections().iter().map(|section| section.name()).filter(|name| !name.is_empty());
        let sections: Vec<_> = names.map(code).collect();
        vec![code(encoding.id()), types, yes(any_shape), sections.join(" ")]
    };
    let encodings: Vec<_> = ENCODINGS.iter().map(encoding).collect();
    table(&mut page, "Encodings", &["encoding", "types", "any shape", "sections"], &encodings);
    let mut kernels = Vec::new();
    for arch in Arch::ALL {
        let list = json(&run(Path::new("."), &["kernels", "list", "--arch", arch.compiler_name(), "--json"], 0));
        let mut families: BTreeMap<String, usize> = BTreeMap::new();
        for kernel in list["kernels"].as_array().unwrap() {
            *families.entry(kernel["family"].as_str().unwrap().to_owned()).or_default() += 1;
        }
        let total: usize = families.values().sum();
        let listed: Vec<_> = families.iter().map(|(family, count)| format!("{} {count}", code(family))).collect();
        let compact = yes(has_compact_gemms(*arch));
        kernels.push(vec![code(arch.compiler_name()), total.to_string(), compact, listed.join(", ")]);
    }
    table(&mut page, "GPUs", &["architecture", "kernels", "compact products", "by family"], &kernels);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference/support.inc");
    if std::env::var_os("UPDATE_DOCS").is_some_and(|value| !value.is_empty()) {
        fs::write(&path, &page).unwrap();
    }
    let now = fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(now, page, "UPDATE_DOCS=1 cargo test --workspace --test cli -- support");
}
