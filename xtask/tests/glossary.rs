//! Retired words of the glossary (CONTRIBUTING.md) are names of nothing.

use std::{fs, path::PathBuf};

mod workspace;

use workspace::{files, shown};

/// Identifiers that the glossary retired, and where they still mean something else.
const RETIRED: [(&str, &[&str]); 40] = [
    ("FormId", &[]),
    ("FORMS", &[]),
    ("DynForm", &[]),
    ("Lane", &[]),
    ("LaneSize", &[]),
    ("LaneParts", &[]),
    ("LaneTooSmall", &[]),
    ("Guest", &[]),
    ("Outside", &[]),
    ("OutsideKernel", &[]),
    ("Refusal", &[]),
    // Docstrings of Python begin a sentence with it.
    ("Refused", &["bindings/python/python"]),
    ("Unfit", &[]),
    ("BadOption", &[]),
    ("Machine", &[]),
    ("Way", &[]),
    ("Ways", &[]),
    ("StepOracle", &[]),
    ("EncodeSpec", &[]),
    ("DecodeSpec", &[]),
    ("CompressSpec", &[]),
    ("TranscodeSpec", &[]),
    ("FitError", &[]),
    ("RepackSpec", &[]),
    ("RepackStage", &[]),
    ("RepackArgs", &[]),
    ("load_matrix_x4", &[]),
    ("bulk_load", &[]),
    ("Linears", &[]),
    ("Residency", &[]),
    ("Resident", &[]),
    ("Choice", &[]),
    // Names of an MLP's tensors.
    ("MlpWeights", &["unweight-model", "unweight-engine/src/weights", "xtask/tests/public_api.rs"]),
    ("ResidentArg", &[]),
    ("Lies", &[]),
    ("Lying", &[]),
    ("LyingMlp", &[]),
    ("Lie", &[]),
    ("MlpMode", &[]),
    ("Wanted", &[]),
];

/// Parts of retired names of kernels, and retired options, also in documents.
const RETIRED_PARTS: [&str; 5] = ["repack_", "--linears", "--resident ", "--mlp", "--profile resident"];

/// Every source file of the repository.
fn sources() -> Vec<PathBuf> {
    let extensions = ["rs", "cuh", "tera", "cpp", "hpp", "py", "pyi", "md", "json", "toml", "svg"];
    files(&["."], &extensions, &["records", "snapshots", "fixtures"])
}

/// The words of a line: runs of letters, digits and `_`.
fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
}

#[test]
fn retired_identifiers_are_gone() {
    let mut found = Vec::new();
    for path in sources() {
        let shown = shown(&path);
        // A comparison with builds from before the glossary names their options.
        if ["xtask/tests/glossary.rs", "tests/parity/same_bits.py"].contains(&&*shown) {
            continue;
        }
        let prose = [".md", ".json", ".toml", ".svg"].iter().any(|end| shown.ends_with(end));
        let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{shown}: {error}"));
        for (number, line) in text.lines().enumerate() {
            // A name in prose may be an ordinary word.
            let code = line.split("//").next().unwrap_or_default();
            let code = if shown.ends_with(".py") || shown.ends_with(".pyi") {
                line.split('#').next().unwrap_or_default()
            } else {
                code
            };
            let retired =
                words(if prose { "" } else { code }).filter_map(|word| RETIRED.iter().find(|(name, _)| *name == word));
            for (name, allowed) in retired {
                if !allowed.iter().any(|place| shown.starts_with(place)) {
                    found.push(format!("{shown}:{}: {name}", number + 1));
                }
            }
            let whole = if prose { line } else { code };
            let parts = RETIRED_PARTS.iter().filter(|part| whole.contains(**part));
            found.extend(parts.map(|part| format!("{shown}:{}: {part}", number + 1)));
        }
    }
    assert_eq!(found, [""; 0], "CONTRIBUTING.md has the words that took their place");
}
