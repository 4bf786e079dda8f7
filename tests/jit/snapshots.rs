//! The source and the plan of every catalogued variant, as snapshots that a reviewer reads.
//!
//! `tests/snapshots/<variant>.cu.snap` is exactly what is compiled, `<variant>.plan.snap` is how it is launched. The tables of
//! `docs/kernels.md` are generated from the same plans and held the same way.
//!
//! `INSTA_UPDATE=always cargo test --test kernel_snapshots` writes all of them anew (or `cargo insta review`, one by one); read the diff
//! before you commit it. A snapshot without a variant fails the test, as a pending one does.

use std::{collections::BTreeSet, fmt::Write as _, fs, path::PathBuf};
use unweight_codegen::{
    plan::Plan,
    render,
    spec::{
        Arch, CodeLimit, DecodeOutput, EncodeStage, Epilogue, RepackStage, VariantSpec, VerbatimRows, WeightSource,
        catalog,
    },
};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn writing() -> bool {
    std::env::var("INSTA_UPDATE").is_ok_and(|value| value == "always")
}

fn plan(spec: &VariantSpec) -> Plan {
    Plan::new(spec).expect("the catalogue holds feasible variants")
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
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path(&folder);
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    let mut names = BTreeSet::new();
    settings.bind(|| {
        for spec in catalog::all() {
            let source = render(&spec).unwrap_or_else(|error| panic!("{error}"));
            for (kind, text) in [("cu", source.text), ("plan", plan(&spec).to_string())] {
                let name = format!("{spec}.{kind}");
                insta::assert_snapshot!(name.as_str(), text);
                names.insert(format!("{name}.snap"));
            }
        }
    });
    for entry in fs::read_dir(&folder).expect("tests/snapshots is there") {
        let path = entry.expect("an entry of tests/snapshots").path();
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        if !names.contains(&name) {
            assert!(writing(), "{name}: pending, or of no variant in the catalogue; INSTA_UPDATE=always removes it");
            fs::remove_file(&path).expect("a left-over snapshot can be removed");
        }
    }
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

#[test]
fn the_document_shows_the_catalogue() {
    let path = root().join("docs/kernels.md");
    let kept = fs::read_to_string(&path).expect("docs/kernels.md is there");
    let mut now = kept.clone();
    let count = |family: &str| catalog::all().iter().filter(|spec| spec.op.family() == family).count();
    let families = ["matmul", "gemm_mma", "gemm_wgmma", "decode", "encode", "packed"];
    let counts = families.map(|family| format!("{} {family}", count(family))).join(", ");
    let counts = format!("{} variants ship: {counts}.", catalog::all().len());
    for (mark, text) in [
        ("counts", counts),
        ("matmul", matmul_table()),
        ("gemm_mma", gemm_mma_table()),
        ("gemm_wgmma", gemm_wgmma_table()),
        ("decode", decode_table()),
        ("encode", encode_table()),
        ("packed", repack_table()),
    ] {
        let (begin, end) = (format!("<!-- {mark}: generated -->\n"), format!("<!-- {mark}: end -->"));
        let from = now.find(&begin).unwrap_or_else(|| panic!("docs/kernels.md lacks {begin:?}")) + begin.len();
        let to = from + now[from..].find(&end).unwrap_or_else(|| panic!("docs/kernels.md lacks {end:?}"));
        now.replace_range(from..to, &format!("{text}\n"));
    }
    if writing() {
        fs::write(&path, now).expect("docs/kernels.md can be written");
    } else {
        assert!(kept == now, "docs/kernels.md, {}\nINSTA_UPDATE=always accepts", difference(&kept, &now));
    }
}
