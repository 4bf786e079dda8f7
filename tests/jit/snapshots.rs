//! What is generated, as files that a reviewer reads: `tests/snapshots`.
//!
//! ```text
//! <family>.cu          exactly what is compiled, for the first variant of the family in the catalogue; where a template branches,
//! <family>.2.cu ...    also for the first that takes another way through it
//! <family>.plans.txt   a line for each variant: how it is launched, shared memory by section, digest of its text
//! ```
//!
//! So a change of a template is read once, and the table says which variants it changes. The tables of
//! `docs/kernels.md` are generated from the same plans and held the same way. The compiler sees what was reviewed:
//! `nvrtc.rs` renders the same catalogue.
//!
//! `INSTA_UPDATE=always cargo test --test jit snapshots` writes all of them anew; read the diff before you commit it.

use similar::TextDiff;
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};
use unweight_codegen::{
    family::FAMILIES,
    plan::Plan,
    render,
    spec::{
        Arch, CodeLimit, CompressStage, DecodeOutput, EncodeStage, Epilogue, RepackStage, TranscodeStage, Values,
        VariantSpec, VerbatimRows, WeightSource, catalog,
    },
};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// insta's word for it, so that one variable writes inline snapshots and these files alike.
fn writing() -> bool {
    std::env::var("INSTA_UPDATE").is_ok_and(|value| value == "always")
}

/// Writes the file, or says how its text differs from `now`.
fn difference(path: &Path, now: &str) -> Option<String> {
    let kept = fs::read_to_string(path).unwrap_or_default();
    if kept == now {
        return None;
    }
    if writing() {
        fs::write(path, now).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        return None;
    }
    let name = path.strip_prefix(root()).unwrap_or(path).display().to_string();
    let diff = TextDiff::from_lines(kept.as_str(), now);
    Some(diff.unified_diff().context_radius(1).header(&name, "as generated now").to_string())
}

/// Fails with all differences together.
fn none(differences: Vec<String>) {
    let accept = "INSTA_UPDATE=always cargo test --test jit snapshots";
    assert!(differences.is_empty(), "{}\n`{accept}` accepts", differences.join("\n"));
}

fn plan(spec: &VariantSpec) -> Plan {
    Plan::new(spec).expect("the catalogue holds feasible variants")
}

/// The catalogue by family.
fn families() -> impl Iterator<Item = (&'static str, Vec<VariantSpec>)> {
    FAMILIES.iter().map(|family| (family.name, (family.catalogue)(Arch::Sm90a)))
}

/// The lines of a template and of what it includes, as the text around their values; a line that only directs tera has
/// none. Longest text first, so that the first that fits a rendered line is the one that gave it.
fn template_lines(family: &str) -> Vec<Vec<&'static str>> {
    let body = unweight_templates::kernel(&format!("{family}.cu.tera")).expect("a family has a template");
    let included =
        unweight_templates::partials().iter().filter(|(name, _)| body.contains(&format!("include {name:?}")));
    let texts = included.map(|(_, text)| *text).chain([body]);
    let lines = texts.flat_map(|text| text.trim_end().lines()).filter(|line| !line.starts_with("<%"));
    let around = |line: &'static str| line.split("<$").map(|part| part.split_once("$>").map_or(part, |(_, text)| text));
    let mut lines: Vec<Vec<_>> = lines.map(|line| around(line).collect()).collect();
    lines.sort_by_key(|parts| std::cmp::Reverse(parts.concat().len()));
    lines.dedup();
    lines
}

/// Whether the rendered line is that of the template with values in its gaps.
fn comes_from(line: &str, template: &[&str]) -> bool {
    let [first, middle @ .., last] = template else { return [line] == template };
    let Some(mut rest) = line.strip_prefix(first).and_then(|rest| rest.strip_suffix(last)) else { return false };
    middle.iter().all(|part| match rest.split_once(part) {
        Some((_, after)) => {
            rest = after;
            true
        }
        None => false,
    })
}

/// Which lines of the template a rendered text has: one way through its branches.
fn way(text: &str, template: &[Vec<&str>]) -> BTreeSet<usize> {
    let of = |line| template.iter().position(|known| comes_from(line, known));
    text.lines().map(|line| of(line).unwrap_or_else(|| panic!("no line of the template gives {line:?}"))).collect()
}

/// A line for each variant.
fn plans(specs: &[VariantSpec]) -> String {
    let mut table =
        "# text             threads blocks/SM cluster shared, B variant, grid, roles, ring, shared memory\n".to_owned();
    for spec in specs {
        let text = render(spec).unwrap_or_else(|error| panic!("{error}")).text;
        let digest = blake3::hash(text.as_bytes()).to_hex();
        let Plan { smem, pipeline, roles, launch, .. } = plan(spec);
        let (threads, blocks_per_sm, cluster) = (launch.threads, launch.blocks_per_sm, launch.cluster);
        let pdl = if launch.pdl { ", pdl" } else { "" };
        _ = write!(table, "{} {threads:>9} {blocks_per_sm:>9} {cluster:>7} {:>9} ", &digest[..16], smem.bytes());
        _ = write!(table, "{spec}: {}{pdl}", launch.grid);
        for role in roles.roles() {
            let registers = role.registers.map(|registers| format!(" of {registers} registers")).unwrap_or_default();
            _ = write!(table, "; {} warps {}{registers}", role.warps, role.name);
        }
        if let Some(ring) = pipeline {
            _ = write!(table, "; {} x {} stages of {} B", ring.rings, ring.stages, ring.stage_bytes);
            _ = write!(table, ", full {} empty {}", ring.full_arrivals, ring.empty_arrivals);
        }
        for (index, section) in smem.sections().iter().enumerate() {
            let comma = if index == 0 { ";" } else { "," };
            _ = write!(table, "{comma} {}@{} {}x{}", section.name, section.offset, section.count, section.bytes_each);
        }
        table.push('\n');
    }
    table
}

#[test]
fn generated_sources_match_the_snapshots() {
    let folder = root().join("tests/snapshots");
    let mut files = BTreeMap::new();
    for (family, specs) in families() {
        files.insert(format!("{family}.plans.txt"), plans(&specs));
        let template = template_lines(family);
        let mut ways = BTreeSet::new();
        for spec in &specs {
            let text = render(spec).unwrap_or_else(|error| panic!("{error}")).text;
            if ways.insert(way(&text, &template)) {
                let number = if ways.len() == 1 { String::new() } else { format!(".{}", ways.len()) };
                files.insert(format!("{family}{number}.cu"), text);
            }
        }
        let taken: BTreeSet<_> = ways.into_iter().flatten().collect();
        let dead = (0..template.len()).find(|line| !taken.contains(line));
        assert_eq!(dead.map(|line| &template[line]), None, "{family}: a line of the template that no variant has");
    }
    let mut differences: Vec<_> =
        files.iter().filter_map(|(name, text)| difference(&folder.join(name), text)).collect();
    for entry in fs::read_dir(&folder).expect("tests/snapshots is there") {
        let path = entry.expect("an entry of tests/snapshots").path();
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        match files.contains_key(&name) {
            true => {}
            false if writing() => fs::remove_file(&path).expect("a left-over snapshot can be removed"),
            false => differences.push(format!("tests/snapshots/{name} is of no family")),
        }
    }
    none(differences);
}

/// A plan as text.
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

/// Shared memory of the reconstructive matmul: one row per ring of Table 5, one column per source and verbatim budget.
fn gemm_recon_table() -> String {
    let sources: Vec<_> = std::iter::once(WeightSource::Exponent)
        .chain(VerbatimRows::ALL.into_iter().map(|verbatim| WeightSource::Palette { verbatim }))
        .collect();
    let mut table = "| ring | exponent |".to_owned();
    for budget in VerbatimRows::ALL {
        _ = write!(table, " palette v{} |", budget.get());
    }
    table += "\n|---|";
    table += &"---:|".repeat(sources.len());
    for (n, stages) in catalog::TABLE_5 {
        _ = write!(table, "\n| n{}p{} |", n.get(), stages.get());
        for source in &sources {
            let spec = VariantSpec::gemm_recon(Arch::Sm90a, *source, n, stages, Epilogue::Store);
            match Plan::new(&spec) {
                Ok(plan) => _ = write!(table, " {} |", plan.smem.bytes()),
                Err(_) => table += " does not fit |",
            }
        }
    }
    table
}

/// Shared memory of the decoders: one row per code limit.
fn decode_table() -> String {
    let mut table = "| code limit |".to_owned();
    for output in DecodeOutput::ALL {
        _ = write!(table, " {} |", output.tag());
    }
    table += "\n|---:|---:|---:|---:|";
    for limit in CodeLimit::all() {
        _ = write!(table, "\n| {} |", limit.get());
        for output in DecodeOutput::ALL {
            let bytes = plan(&VariantSpec::decode(Arch::Sm90a, *output, limit)).smem.bytes();
            _ = write!(table, " {bytes} |");
        }
    }
    table
}

/// A family of stages: one row each.
fn stage_table(stages: impl Iterator<Item = (&'static str, VariantSpec)>) -> String {
    let mut table = "| stage | threads | grid | shared memory, B |\n|---|---:|---|---:|".to_owned();
    for (tag, spec) in stages {
        let plan = plan(&spec);
        let (launch, bytes) = (plan.launch, plan.smem.bytes());
        _ = write!(table, "\n| `{tag}` | {} | {} | {bytes} |", launch.threads, launch.grid);
    }
    table
}

fn encode_table() -> String {
    stage_table(EncodeStage::ALL.iter().map(|stage| (stage.tag(), VariantSpec::encode(Arch::Sm90a, *stage))))
}

fn repack_table() -> String {
    stage_table(RepackStage::ALL.iter().map(|stage| (stage.tag(), VariantSpec::repack(Arch::Sm90a, *stage))))
}

fn transcode_table() -> String {
    stage_table(TranscodeStage::ALL.iter().map(|stage| (stage.tag(), VariantSpec::transcode(Arch::Sm90a, *stage))))
}

fn compress_table() -> String {
    stage_table(CompressStage::ALL.iter().map(|stage| (stage.tag(), VariantSpec::compress(Arch::Sm90a, *stage))))
}

/// The families of activations: one row for each variant.
fn activations_table() -> String {
    let mut table =
        "| variant | threads | blocks per SM | grid | shared memory, B |\n|---|---:|---:|---|---:|".to_owned();
    for family in FAMILIES.iter().filter(|family| family.edges.is_empty()) {
        for spec in (family.catalogue)(Arch::Sm90a) {
            let plan = plan(&spec);
            // Dependent launch changes nothing here.
            if !plan.launch.pdl {
                let (launch, bytes) = (plan.launch, plan.smem.bytes());
                let name = spec.to_string().replace("uw_sm90a_", "");
                let (threads, blocks, grid) = (launch.threads, launch.blocks_per_sm, launch.grid);
                _ = write!(table, "\n| `{name}` | {threads} | {blocks} | {grid} | {bytes} |");
            }
        }
    }
    table
}

/// The shapes of the small-batch family.
fn gemm_mma_table() -> String {
    let mut table = "| batch tile | shape | output features per task | threads | blocks per SM | shared memory, B |\n\
                     |---:|---|---:|---:|---:|---:|"
        .to_owned();
    for shape in catalog::GEMM_MMA {
        let plan = plan(&VariantSpec::gemm_mma(Arch::Sm90a, shape));
        let (batch_tile, row_blocks, warps) = (shape.batch_tile.get(), shape.row_blocks.get(), shape.warps.get());
        let (stages, cluster) = (shape.stages.get(), shape.cluster.get());
        let stream = if shape.persistent { "_persistent" } else { "" };
        let (launch, bytes) = (plan.launch, plan.smem.bytes());
        _ = write!(
            table,
            "\n| {batch_tile} | r{row_blocks}w{warps}p{stages}c{cluster}{stream} | {} | {} | {} | {bytes} |",
            16 * row_blocks,
            launch.threads,
            launch.blocks_per_sm
        );
    }
    table
}

/// The shapes of the large-batch family.
fn gemm_wgmma_table() -> String {
    let mut table =
        "| batch tile | shape | output features | threads | shared memory, B |\n|---:|---|---:|---:|---:|".to_owned();
    for shape in catalog::GEMM_WGMMA {
        let plan = plan(&VariantSpec::gemm_wgmma(Arch::Sm90a, shape));
        let (warpgroups, stages) = (shape.warpgroups.get(), shape.stages.get());
        let cluster = match shape.cluster.get() {
            1 => String::new(),
            cluster => format!("c{cluster}"),
        };
        let stream_k = if shape.stream_k { "_streamk" } else { "" };
        _ = write!(
            table,
            "\n| {} | g{warpgroups}p{stages}{cluster}{stream_k} | {} | {} | {} |",
            shape.batch_tile.get(),
            64 * warpgroups,
            plan.launch.threads,
            plan.smem.bytes()
        );
    }
    table
}

/// Puts text between the marks of a document.
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
    let counts: Vec<_> = families().map(|(family, specs)| format!("{} {family}", specs.len())).collect();
    let counts = format!("{} variants ship: {}.", catalog::all(Arch::Sm90a).len(), counts.join(", "));
    for (mark, text) in [
        ("counts", counts),
        ("gemm_recon", gemm_recon_table()),
        ("gemm_mma", gemm_mma_table()),
        ("gemm_wgmma", gemm_wgmma_table()),
        ("decode", decode_table()),
        ("encode", encode_table()),
        ("repack", repack_table()),
        ("compress", compress_table()),
        ("transcode", transcode_table()),
        ("activations", activations_table()),
    ] {
        put(&mut now, "docs/kernels.md", mark, &text);
    }
    none(difference(&path, &now).into_iter().collect());
}

/// The keys of the attribute: one row for each axis of each family.
fn key_table() -> String {
    let mut table = "| op | key | values | default |\n|---|---|---|---|".to_owned();
    for family in FAMILIES {
        for (index, axis) in family.axes.iter().enumerate() {
            let op = if index == 0 { family.name } else { "" };
            let words = |words: &[&str]| words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ");
            let mut values = match axis.values {
                Values::Words(all) => words(all),
                Values::Flag => words(&["true", "false"]),
                Values::Range(..) | Values::Set(_) => axis.allowed.to_owned(),
            };
            if let Some(only) = axis.only {
                let of = family.axes[only.axis];
                let Values::Words(words) = of.values else { panic!("{}: depends on a number", axis.key) };
                _ = write!(values, "; with `{} = {}`", of.key, words[only.value as usize]);
            }
            let default = axis.default.map(|value| match axis.values {
                Values::Words(words) => format!("`{}`", words[value as usize]),
                Values::Flag => format!("`{}`", value != 0),
                Values::Range(..) | Values::Set(_) => value.to_string(),
            });
            _ = write!(table, "\n| {op} | `{}` | {values} | {} |", axis.key, default.unwrap_or_default());
        }
    }
    table
}

#[test]
fn documentation_lists_the_attribute_keys() {
    let path = root().join("docs/adding-a-variant.md");
    let mut now = fs::read_to_string(&path).expect("docs/adding-a-variant.md is there");
    put(&mut now, "docs/adding-a-variant.md", "keys", &key_table());
    none(difference(&path, &now).into_iter().collect());
}
