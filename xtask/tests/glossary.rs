//! Checks that names and comments do not use words that the glossary (CONTRIBUTING.md) retired: no identifier, part of
//! an identifier, path or comment.

use std::{fs, path::PathBuf};

mod workspace;

use workspace::{files, shown};

/// Identifiers that the glossary retired, and paths where they still have another meaning.
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
    // Python docstrings begin sentences with this word.
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
    // The names of an MLP's tensors.
    ("MlpWeights", &["unweight-model", "unweight-engine/src/weights", "xtask/tests/public_api.rs"]),
    ("ResidentArg", &[]),
    ("Lies", &[]),
    ("Lying", &[]),
    ("LyingMlp", &[]),
    ("Lie", &[]),
    ("MlpMode", &[]),
    ("Wanted", &[]),
];

/// Retired options and parts of retired kernel names, which documents must not use, either.
const RETIRED_PARTS: [&str; 5] = ["repack_", "--linears", "--resident ", "--mlp", "--profile resident"];

/// Word sequences that no identifier, comment, document or path contains. `DynForm`, `dyn_form` and "dyn-form" are
/// equal.
const RETIRED_WORDS: [&[&str]; 31] = [
    &["guest"],
    &["preprocess"],
    &["register", "sourced"],
    &["cpu", "prelude"],
    &["repack"],
    &["residency"],
    &["lying"],
    &["dyn", "form"],
    &["form", "id"],
    &["packed", "form"],
    &["compact", "form"],
    &["huffman", "form"],
    &["stored", "form"],
    &["lane", "size"],
    &["lane", "parts"],
    &["outside", "kernel"],
    &["step", "oracle"],
    &["bad", "option"],
    &["mlp", "mode"],
    &["load", "matrix", "x4"],
    &["lower", "registers"],
    &["sync", "block"],
    &["sync", "warp"],
    &["warp", "ballot"],
    &["shuffle", "xor"],
    &["elect", "one"],
    &["smem", "address"],
    &["funnel", "shift", "right"],
    &["funnel", "shift", "left"],
    &["count", "leading", "zeros"],
    &["bit", "reverse"],
];

/// Returns every source file of the repository.
fn sources() -> Vec<PathBuf> {
    let extensions = ["rs", "cuh", "tera", "cpp", "hpp", "py", "pyi", "md", "json", "toml", "svg"];
    files(&["."], &extensions, &["records", "snapshots", "fixtures"])
}

/// Returns the words of a line: runs of letters, digits and `_`.
fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
}

/// Returns the words of a text in lower case: `DynForm::new_id` has four.
fn parts(text: &str) -> Vec<String> {
    let mut parts: Vec<String> = Vec::new();
    let mut last = ' ';
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c.is_ascii_alphanumeric() {
            // `CTARank` is split into CTA and Rank.
            let ends_capitals = last.is_ascii_uppercase() && chars.peek().is_some_and(char::is_ascii_lowercase);
            let begins = !last.is_ascii_alphanumeric()
                || c.is_ascii_uppercase() && (!last.is_ascii_uppercase() || ends_capitals);
            if begins {
                parts.push(String::new());
            }
            parts.last_mut().expect("a word has begun").push(c.to_ascii_lowercase());
        }
        last = c;
    }
    parts
}

/// Returns the retired words of a line or path. Names of records are history.
fn retired(text: &str) -> Vec<String> {
    let text: Vec<&str> = text.split([' ', '(', ')', '`']).filter(|word| !word.contains("records/")).collect();
    let parts = parts(&text.join(" "));
    let has = |words: &&&[&str]| parts.windows(words.len()).any(|window| window == **words);
    RETIRED_WORDS.iter().filter(has).map(|words| words.join(" ")).collect()
}

#[test]
fn retired_words_are_gone() {
    let mut found = Vec::new();
    for path in sources() {
        let shown = shown(&path);
        // The list itself, and a comparison with earlier builds.
        if ["xtask/tests/glossary.rs", "tests/parity/same_bits.py"].contains(&&*shown) {
            continue;
        }
        found.extend(retired(&shown).into_iter().map(|word| format!("{shown}: {word}")));
        let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{shown}: {error}"));
        let lines = text.lines().zip(1..).flat_map(|(line, at)| retired(line).into_iter().map(move |word| (at, word)));
        found.extend(lines.map(|(at, word)| format!("{shown}:{at}: {word}")));
    }
    assert_eq!(found, [""; 0], "retired words; the glossary in CONTRIBUTING.md has their replacements");
}

#[test]
fn planted_words_are_found() {
    for (text, words) in [
        ("let x = GuestStream::new();", "guest"),
        ("fn of_guest(GUEST: u8)", "guest"),
        ("impl DynForm for Raw {}", "dyn form"),
        ("// Register-sourced matmul", "register sourced"),
        ("ptx::sync_block();", "sync block"),
        ("/// The packed form of a weight", "packed form"),
        ("tests/cpu/preprocess.rs", "preprocess"),
        ("shuffleXor", "shuffle xor"),
        ("CUDAGuest", "guest"),
    ] {
        assert_eq!(retired(text), [words], "{text}");
    }
    for text in ["a guesthouse", "docs/records/kernels-preprocess-log.md", "preprocessor", "sync blocks", "platform"] {
        assert_eq!(retired(text), [""; 0], "{text}");
    }
    assert_eq!(parts("HTTPServer x2_CTARank"), ["http", "server", "x2", "cta", "rank"]);
}

#[test]
fn retired_identifiers_are_gone() {
    let mut found = Vec::new();
    for path in sources() {
        let shown = shown(&path);
        // A comparison with builds from before the glossary uses their options.
        if ["xtask/tests/glossary.rs", "tests/parity/same_bits.py"].contains(&&*shown) {
            continue;
        }
        let prose = [".md", ".json", ".toml", ".svg"].iter().any(|end| shown.ends_with(end));
        let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{shown}: {error}"));
        for (number, line) in text.lines().enumerate() {
            // In prose, such a name may be an ordinary word.
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
    assert_eq!(found, [""; 0], "retired words; the glossary in CONTRIBUTING.md has their replacements");
}
