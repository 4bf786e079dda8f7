//! Compares the source of kernels with the snapshots in `tests/snapshots`, with insta.
//!
//! ```text
//! <family>.snap.cu       the entry point of the first variant of the family in the catalogue
//! <family>_plans.snap    a line for each variant of each architecture: digest of its translation unit with every
//!                        header, launch, shared memory by section
//! ```
//!
//! A change of a template shows in one source per family. A change of a header shows in the digest of every variant
//! that includes it. The counts in `docs/kernels.md` and the keys in `docs/adding-a-variant.md` are generated from the
//! same catalogue and checked the same way. `nvrtc.rs` compiles the same catalogue, so the compiler sees the reviewed
//! source.
//!
//! `INSTA_UPDATE=always cargo test --test jit snapshots` accepts all changes; read the diff before you commit it.

use similar::TextDiff;
use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};
use unweight_codegen::{
    Source,
    family::FAMILIES,
    plan::Plan,
    render,
    spec::{Arch, Values, VariantSpec, catalog},
};
use unweight_rivals::cuda::kernels as external_kernels;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Sets the directory and the names of insta's files.
pub fn with_settings(check: impl FnOnce()) {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path(root().join("tests/snapshots"));
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings.bind(check);
}

/// Returns whether insta rewrites snapshots, so that one variable controls snapshots and documents.
fn writing() -> bool {
    std::env::var("INSTA_UPDATE").is_ok_and(|value| value == "always")
}

/// Writes the document, or fails with the difference.
fn assert_document(path: &Path, now: &str) {
    let kept = fs::read_to_string(path).unwrap_or_default();
    if kept == now {
        return;
    }
    if writing() {
        fs::write(path, now).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        return;
    }
    let name = path.strip_prefix(root()).unwrap_or(path).display().to_string();
    let diff = TextDiff::from_lines(kept.as_str(), now);
    let diff = diff.unified_diff().context_radius(1).header(&name, "as generated now").to_string();
    panic!("{diff}\n`INSTA_UPDATE=always cargo test --test jit snapshots` accepts the new text");
}

fn plan(spec: &VariantSpec) -> Plan {
    Plan::new(spec).expect("the catalogue holds feasible variants")
}

/// Returns the catalogue of an architecture, by family.
fn families(arch: Arch) -> impl Iterator<Item = (&'static str, Vec<VariantSpec>)> {
    FAMILIES.iter().map(move |family| (family.name, (family.catalogue)(arch)))
}

/// Returns the catalogue of all architectures, by family; Hopper's variants come first.
fn all_families() -> impl Iterator<Item = (&'static str, Vec<VariantSpec>)> {
    let archs = || [Arch::Sm90a].into_iter().chain(Arch::ALL.iter().copied().filter(|arch| *arch != Arch::Sm90a));
    FAMILIES.iter().map(move |family| (family.name, archs().flat_map(family.catalogue).collect()))
}

fn source(spec: &VariantSpec) -> Source {
    render(spec).unwrap_or_else(|error| panic!("{error}"))
}

/// Returns 16 hexadecimal digits that identify everything that affects compilation.
pub fn digest(source: &Source) -> String {
    let mut digest = source.digest().to_string();
    digest.truncate(16);
    digest
}

/// Returns the line of a variant.
fn row(spec: &VariantSpec, source: &Source) -> String {
    let Plan { smem, pipeline, roles, launch, .. } = plan(spec);
    let (threads, blocks_per_sm, cluster) = (launch.threads, launch.blocks_per_sm, launch.cluster);
    let pdl = if launch.pdl { ", pdl" } else { "" };
    let mut row = format!("{} {threads:>9} {blocks_per_sm:>9} {cluster:>7} {:>9} ", digest(source), smem.bytes());
    _ = write!(row, "{spec}: {}{pdl}", launch.grid);
    for role in roles.roles() {
        let registers = role.registers.map(|registers| format!(" of {registers} registers")).unwrap_or_default();
        _ = write!(row, "; {} warps {}{registers}", role.warps, role.name);
    }
    if let Some(ring) = pipeline {
        _ = write!(row, "; {} x {} stages of {} B", ring.rings, ring.stages, ring.stage_bytes);
        _ = write!(row, ", full {} empty {}", ring.full_arrivals, ring.empty_arrivals);
    }
    for (index, section) in smem.sections().iter().enumerate() {
        let comma = if index == 0 { ";" } else { "," };
        _ = write!(row, "{comma} {}@{} {}x{}", section.name, section.offset, section.count, section.bytes_each);
    }
    row + "\n"
}

/// Returns a line for each variant.
fn plans(specs: &[VariantSpec]) -> String {
    let mut table =
        "# sources          threads blocks/SM cluster shared, B variant, grid, roles, ring, shared memory\n".to_owned();
    for spec in specs {
        table += &row(spec, &source(spec));
    }
    table
}

#[test]
fn generated_sources_match_the_snapshots() {
    with_settings(|| {
        for (family, specs) in all_families() {
            insta::assert_snapshot!(format!("{family}_plans"), plans(&specs));
            let text = specs.first().map(source).expect("a family ships a variant").text;
            insta::assert_binary_snapshot!(&format!("{family}.cu"), text.into_bytes());
        }
    });
}

/// insta does not notice a file that no assertion uses any more.
#[test]
fn every_snapshot_is_of_a_family() {
    let external: BTreeSet<_> = external_kernels(Arch::Sm90a).iter().map(|kernel| kernel.family).collect();
    let names: BTreeSet<_> = FAMILIES.iter().map(|family| family.name).chain(external).collect();
    let expected: BTreeSet<String> = names
        .iter()
        .flat_map(|name| [format!("{name}.snap"), format!("{name}.snap.cu"), format!("{name}_plans.snap")])
        .collect();
    for entry in fs::read_dir(root().join("tests/snapshots")).expect("tests/snapshots is there") {
        let name = entry.expect("an entry of tests/snapshots").file_name().to_string_lossy().into_owned();
        // What insta writes for review, which git ignores.
        if name.ends_with(".snap.new") {
            continue;
        }
        assert!(expected.contains(&name), "tests/snapshots/{name} belongs to no family; delete it");
    }
}

/// A family's saved plans, and its variants with their sources.
type Family = (String, Vec<(VariantSpec, Source)>);

fn kept_families() -> Vec<Family> {
    let kept = |(family, specs): (&str, Vec<VariantSpec>)| {
        let path = root().join(format!("tests/snapshots/{family}_plans.snap"));
        let kept = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        (kept, specs.into_iter().map(|spec| (spec, source(&spec))).collect())
    };
    families(Arch::Sm90a).map(kept).collect()
}

/// Returns the snapshot rows that change if one header changes.
fn rows_changed_by(header: &str, families: &[Family]) -> BTreeSet<String> {
    let mut changed = BTreeSet::new();
    for (kept, specs) in families {
        for (spec, source) in specs {
            let mut edited = source.clone();
            if let Some((_, text)) = edited.headers.iter_mut().find(|(name, _)| *name == header) {
                let first = text.lines().next().expect("a header has a line");
                *text = String::leak(text.replacen(first, &format!("{first} "), 1));
            }
            if !kept.contains(&row(spec, &edited)) {
                changed.insert(spec.to_string());
            }
        }
    }
    changed
}

/// An edit of one line of a header fails the snapshots of exactly the variants that include it.
#[test]
fn an_edited_header_fails_the_snapshots_of_its_variants() {
    if writing() {
        return; // The snapshots are being rewritten by the test next to this one.
    }
    let of_families = |names: &[&str]| -> BTreeSet<String> {
        let chosen = families(Arch::Sm90a).filter(|(family, _)| names.contains(family));
        chosen.flat_map(|(_, specs)| specs).map(|spec| spec.to_string()).collect()
    };
    let families = kept_families();
    let rows_changed_by = |header| rows_changed_by(header, &families);
    assert_eq!(rows_changed_by("unweight/kernels/norm.cuh"), of_families(&["norm"]));
    assert_eq!(rows_changed_by("unweight/pipeline/lcf.cuh"), of_families(&["gemm_recon"]));
    assert_eq!(rows_changed_by("unweight/kernels/gemm_mma.cuh"), of_families(&["gemm_mma", "gemm_grouped"]));
    let every: Vec<_> = FAMILIES.iter().map(|family| family.name).collect();
    assert_eq!(rows_changed_by("unweight/ptx/core.cuh"), of_families(&every));
    assert_eq!(rows_changed_by("unweight/none.cuh"), BTreeSet::new());
}

/// A plan printed as text.
#[test]
fn plan_text_matches_the_snapshot() {
    let spec: VariantSpec = "uw_sm90a_gemm_wgmma_b128_g2p6c2_esc_pdl_store".parse().expect("a name");
    insta::assert_snapshot!(plan(&spec), @r"
    uw_sm90a_gemm_wgmma_b128_g2p6c2_esc_pdl_store
    launch   384 threads, at least 1 per SM, clusters of 2, pdl
    grid     a cluster of 2 for each of the 128 x 128 tiles of Y
    role     load and find escapes: 4 warps, 56 registers
    role     decode and multiply: 8 warps, 224 registers
    pipeline 1 x 6 stages of 29184 B; full: 3 arrivals and the bytes; empty: 8 arrivals
    shared memory
      x                    at      0   6 x  16384 =  98304 B
      w                    at  98304   6 x  12288 =  73728 B
      staging              at 172032   6 x   4096 =  24576 B
      records              at 196608   6 x    512 =   3072 B
      barriers             at 199680   6 x     16 =     96 B
      old_barriers         at 199776   2 x      8 =     16 B
      sum                                        = 199792 B
    ");
}

/// Wraps text to 120 columns.
fn wrapped(text: &str) -> String {
    let mut lines = String::new();
    let mut width = 0;
    for word in text.split(' ') {
        let separator = match width {
            0 => "",
            _ if width + 1 + word.len() > 120 => "\n",
            _ => " ",
        };
        width = if separator == " " { width + 1 + word.len() } else { word.len() };
        lines.extend([separator, word]);
    }
    lines
}

/// Replaces the text between the markers of a document.
fn put(document: &mut String, name: &str, mark: &str, text: &str) {
    let (begin, end) = (format!("<!-- {mark}: generated -->\n"), format!("<!-- {mark}: end -->"));
    let from = document.find(&begin).unwrap_or_else(|| panic!("{name} lacks {begin:?}")) + begin.len();
    let to = from + document[from..].find(&end).unwrap_or_else(|| panic!("{name} lacks {end:?}"));
    document.replace_range(from..to, &format!("{text}\n"));
}

#[test]
fn documentation_lists_the_catalogue() {
    let path = root().join("docs/kernels.md");
    let mut now = fs::read_to_string(&path).expect("docs/kernels.md is there");
    let counts: Vec<_> = families(Arch::Sm90a).map(|(family, specs)| format!("{} {family}", specs.len())).collect();
    let counts =
        wrapped(&format!("For `sm_90a`, {} variants ship: {}.", catalog::all(Arch::Sm90a).len(), counts.join(", ")));
    put(&mut now, "docs/kernels.md", "counts", &counts);
    assert_document(&path, &now);
}

/// Returns the table of the attribute's keys: one row for each axis of each family.
fn key_table() -> String {
    let mut table = "| op | key | values | default |\n|---|---|---|---|".to_owned();
    let mut explained = BTreeSet::new();
    let words = |words: &[&str]| words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ");
    for family in FAMILIES {
        // By key, values and default; flags with equal defaults share a row.
        let mut rows: Vec<(String, String, String)> = Vec::new();
        for axis in family.axes {
            let mut values = match axis.values {
                Values::Words(all) => words(all),
                Values::Flag => "bool".to_owned(),
                _ => axis.allowed.to_owned(),
            };
            if let Some(only) = axis.only {
                let of = family.axes[only.axis];
                let Values::Words(words) = of.values else { panic!("{}: depends on a number", axis.key) };
                _ = write!(values, "; with `{} = {}`", of.key, words[only.value as usize]);
            }
            // The first two columns name family and key. Several families may share an axis.
            for name in FAMILIES.iter().map(|family| family.name) {
                let (of, key) = (format!(" of op {name}"), axis.key);
                let short = values.replace(&format!(" ({key}{of})"), "").replace(&format!("({key}{of}: "), "(");
                values = short.replace(&of, "");
            }
            // The meaning of values is explained only once.
            if !explained.insert(values.clone()) {
                values = values.split(" (").next().unwrap_or_default().to_owned();
            }
            let default = axis.default.map(|value| match axis.values {
                Values::Words(words) => format!("`{}`", words[value as usize]),
                Values::Flag => format!("`{}`", value != 0),
                _ => value.to_string(),
            });
            let (key, default) = (format!("`{}`", axis.key), default.unwrap_or_default());
            let is_flag = matches!(axis.values, Values::Flag);
            match rows.iter_mut().find(|(_, of, listed)| is_flag && *of == values && *listed == default) {
                Some((keys, ..)) => *keys += &format!(", {key}"),
                None => rows.push((key, values, default)),
            }
        }
        if rows.is_empty() {
            rows.push(("none".to_owned(), String::new(), String::new()));
        }
        for (index, (keys, values, default)) in rows.iter().enumerate() {
            let op = if index == 0 { family.name } else { "" };
            _ = write!(table, "\n| {op} | {keys} | {values} | {default} |");
        }
    }
    table
}

#[test]
fn documentation_lists_the_attribute_keys() {
    let path = root().join("docs/adding-a-variant.md");
    let mut now = fs::read_to_string(&path).expect("docs/adding-a-variant.md is there");
    put(&mut now, "docs/adding-a-variant.md", "keys", &key_table());
    assert_document(&path, &now);
}
