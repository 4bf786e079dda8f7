//! The source and the plan of every catalogued variant, as files that a reviewer reads and a compiler takes.
//!
//! `tests/snapshots/<variant>.cu` is exactly what is compiled (`-I templates/include`), `<variant>.plan` is how it is launched. The tables of
//! `docs/kernels.md` are generated from the same plans and held the same way.
//!
//! `UNWEIGHT_SNAPSHOTS=write cargo test --test kernel_snapshots` writes all of them anew; read the diff before you commit it.
//! Files with their real extensions, compared here, do what a snapshot library would, and leave nothing pending or unreferenced.

use std::{collections::BTreeMap, fmt::Write as _, fs, path::PathBuf};
use unweight_codegen::{
    plan::Plan,
    render,
    spec::{Arch, CodeLimit, DecodeOutput, EncodeStage, Epilogue, VariantSpec, VerbatimRows, WeightSource, catalog},
};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn writing() -> bool {
    std::env::var("UNWEIGHT_SNAPSHOTS").is_ok_and(|value| value == "write")
}

fn plan(spec: &VariantSpec) -> Plan {
    Plan::new(spec).expect("the catalogue holds feasible variants")
}

/// File name -> contents, for the whole catalogue.
fn expected() -> BTreeMap<String, String> {
    let mut files = BTreeMap::new();
    for spec in catalog::all() {
        let source = render(&spec).unwrap_or_else(|error| panic!("{error}"));
        files.insert(format!("{spec}.cu"), source.text);
        files.insert(format!("{spec}.plan"), plan(&spec).to_string());
    }
    files
}

/// The first line in which two texts differ.
fn difference(kept: &str, now: &str) -> String {
    let line = kept.lines().zip(now.lines()).take_while(|(kept, now)| kept == now).count();
    let show = |text: &str| text.lines().nth(line).unwrap_or("(end)").to_owned();
    format!("line {}:\n  kept: {}\n  now:  {}", line + 1, show(kept), show(now))
}

#[test]
fn every_variant_renders_as_its_snapshot_and_no_snapshot_is_left_over() {
    let folder = root().join("tests/snapshots");
    let expected = expected();
    if writing() {
        fs::remove_dir_all(&folder).ok();
        fs::create_dir_all(&folder).expect("tests/snapshots can be made");
        for (name, text) in &expected {
            fs::write(folder.join(name), text).expect("a snapshot can be written");
        }
        return;
    }
    let mut kept = BTreeMap::new();
    for entry in fs::read_dir(&folder).expect("tests/snapshots is there") {
        let path = entry.expect("an entry of tests/snapshots").path();
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        kept.insert(name, fs::read_to_string(&path).expect("a snapshot is text"));
    }
    let mut report = String::new();
    for (name, now) in &expected {
        match kept.remove(name) {
            None => _ = writeln!(report, "{name}: no snapshot"),
            Some(kept) if kept != *now => _ = writeln!(report, "{name}, {}", difference(&kept, now)),
            Some(_) => {}
        }
    }
    for name in kept.keys() {
        _ = writeln!(report, "{name}: no such variant in the catalogue");
    }
    assert!(
        report.is_empty(),
        "\n{report}\nUNWEIGHT_SNAPSHOTS=write cargo test --test kernel_snapshots accepts what is rendered now\n"
    );
}

/// Shared memory of the matmul family: one row per ring of Table 5, one column per source and verbatim budget.
fn matmul_table() -> String {
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
            let spec = VariantSpec::matmul(Arch::Sm90a, *source, n, stages, Epilogue::Store);
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

fn encode_table() -> String {
    let mut table = "| stage | threads | grid | shared memory, B |\n|---|---:|---|---:|".to_owned();
    for stage in EncodeStage::ALL {
        let plan = plan(&VariantSpec::encode(Arch::Sm90a, *stage));
        let (launch, bytes) = (plan.launch, plan.smem.bytes());
        _ = write!(table, "\n| `{}` | {} | {} | {bytes} |", stage.tag(), launch.threads, launch.grid);
    }
    table
}

#[test]
fn the_document_shows_the_catalogue() {
    let path = root().join("docs/kernels.md");
    let kept = fs::read_to_string(&path).expect("docs/kernels.md is there");
    let mut now = kept.clone();
    let count = |family: &str| catalog::all().iter().filter(|spec| spec.name().contains(family)).count();
    let counts = format!(
        "{} variants ship: {} matmul, {} decode, {} encode.",
        catalog::all().len(),
        count("_matmul_"),
        count("sm90a_decode_"),
        count("_encode_")
    );
    for (mark, text) in
        [("counts", counts), ("matmul", matmul_table()), ("decode", decode_table()), ("encode", encode_table())]
    {
        let (begin, end) = (format!("<!-- {mark}: generated -->\n"), format!("<!-- {mark}: end -->"));
        let from = now.find(&begin).unwrap_or_else(|| panic!("docs/kernels.md lacks {begin:?}")) + begin.len();
        let to = from + now[from..].find(&end).unwrap_or_else(|| panic!("docs/kernels.md lacks {end:?}"));
        now.replace_range(from..to, &format!("{text}\n"));
    }
    if writing() {
        fs::write(&path, now).expect("docs/kernels.md can be written");
    } else {
        assert!(kept == now, "docs/kernels.md, {}\nUNWEIGHT_SNAPSHOTS=write accepts", difference(&kept, &now));
    }
}
