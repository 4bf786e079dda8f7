//! Checks that names and comments do not use words that the glossary (CONTRIBUTING.md) retired: no identifier, part of
//! an identifier, path or comment.

mod workspace;

use workspace::{comment_mark, shown, split_comment, texts};

/// Identifiers that the glossary retired, their replacements, and paths where they still have another meaning.
const RETIRED: [(&str, &str, &[&str]); 25] = [
    ("FormId", "EncodingId", &[]),
    ("Lane", "ExecContext", &[]),
    ("Refusal", "LaunchError", &[]),
    // Python docstrings begin sentences with this word.
    ("Refused", "LaunchError or AdmissionError", &["bindings/python/python"]),
    ("Unfit", "LaunchError", &[]),
    ("EncodeSpec", "EncodeHuffmanSpec or EncodeCompactSpec", &[]),
    ("DecodeSpec", "DecodeHuffmanSpec or DecodeCompactSpec", &[]),
    ("CompressSpec", "EncodeCompactSpec", &[]),
    ("FitError", "BudgetError", &[]),
    ("bulk_load", "cp_async_bulk_load", &[]),
    ("Linears", "Placement", &[]),
    ("Resident", "Placement", &[]),
    ("ResidentArg", "PlacementArg", &[]),
    // The names of an MLP's tensors.
    (
        "MlpWeights",
        "Placement",
        &[
            "unweight-model",
            "unweight-engine/src/weights",
            "docs/api/unweight-model.txt",
            "tests/gpu/mixtures.rs",
            "xtask/tests/public_api.rs",
        ],
    ),
    ("LyingMlp", "Placement", &[]),
    ("MlpMode", "Pipeline", &[]),
    ("Lie", "Placement", &[]),
    ("Way", "Route or Pipeline", &[]),
    // What a command line names.
    ("Wanted", "Route", &["src/cli"]),
    ("Giver", "the role of a warp or a block", &[]),
    ("Taker", "the role of a warp or a block", &[]),
    ("Scout", "the role of a warp or a block", &[]),
    // Configurations, texts and damaged bundles.
    (
        "Rejected",
        "LaunchError",
        &["src/text/compiled.rs", "unweight-model/src/config", "unweight-format/examples", "tests/serve/memory.rs"],
    ),
    ("BadOption", "LaunchError", &[]),
    ("Machine", "GpuModel or simulator", &[]),
];

/// Retired options, which documents must not use, either, and their replacements.
const RETIRED_OPTIONS: [(&str, &str); 5] = [
    ("--linears", "--placement"),
    ("--resident ", "--placement"),
    ("--mlp", "--placement"),
    ("--profile resident", "--profile packed"),
    ("--shard", "--part"),
];

/// Word sequences that no identifier, comment, document or path contains, and their replacements. `DynForm`,
/// `dyn_form` and "dyn-form" are equal.
const RETIRED_WORDS: [(&[&str], &str); 21] = [
    (&["guest"], "interop"),
    (&["register", "sourced"], "packed"),
    (&["repack"], "pack or unpack"),
    (&["residency"], "placement"),
    (&["dyn", "form"], "encoding"),
    (&["form", "id"], "encoding id"),
    (&["packed", "form"], "packed encoding"),
    (&["compact", "form"], "compact encoding"),
    (&["huffman", "form"], "Huffman encoding"),
    (&["stored", "form"], "encoding"),
    (&["lane", "size"], "context size"),
    (&["outside", "kernel"], "external kernel"),
    (&["step", "oracle"], "objective"),
    (&["mlp", "mode"], "pipeline"),
    // Wrappers of PTX instructions have the names of the instructions.
    (&["load", "matrix", "x4"], "ldmatrix_x4"),
    (&["lower", "registers"], "setmaxnreg_dec"),
    (&["sync", "block"], "bar_sync"),
    (&["sync", "warp"], "bar_warp_sync"),
    (&["warp", "ballot"], "vote_sync_ballot"),
    (&["shuffle", "xor"], "shfl_sync_bfly"),
    (&["elect", "one"], "elect_sync"),
];

/// Returns every text file of the repository as a path and its text, except the list itself, and a comparison with
/// builds from before the glossary, which uses their options.
fn sources() -> Vec<(String, String)> {
    let all: Vec<_> = texts().into_iter().map(|(path, text)| (shown(&path), text)).collect();
    for known in ["install.sh", ".ci/run", ".github/workflows/ci.yml", "unweight-bench/src/stress.cu"] {
        assert!(all.iter().any(|(shown, _)| shown == known), "{known} is not read");
    }
    let is_checked =
        |shown: &String| !["xtask/tests/glossary.rs", "tests/parity/same_bits.py"].contains(&shown.as_str());
    all.into_iter().filter(|(shown, _)| is_checked(shown)).collect()
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

/// Returns the retired words of a line or path, and their replacements. Names of records are history.
fn retired(text: &str) -> Vec<(String, &'static str)> {
    let text: Vec<&str> = text.split([' ', '(', ')', '`']).filter(|word| !word.contains("records/")).collect();
    let parts = parts(&text.join(" "));
    let has = |words: &[&str]| parts.windows(words.len()).any(|window| window == words);
    let found = RETIRED_WORDS.iter().filter(|(words, _)| has(words));
    found.map(|(words, replacement)| (words.join(" "), *replacement)).collect()
}

#[test]
fn retired_words_are_gone() {
    let mut found = Vec::new();
    for (shown, text) in sources() {
        // The path, as line 0, and the lines.
        for (line, at) in [&*shown].into_iter().chain(text.lines()).zip(0..) {
            let retired = retired(line).into_iter();
            found.extend(retired.map(|(words, replacement)| format!("{shown}:{at}: {words}; use {replacement}")));
        }
    }
    assert_eq!(found, [""; 0], "retired words");
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
        ("tests/cpu/repack.rs", "repack"),
        ("shuffleXor", "shuffle xor"),
        ("CUDAGuest", "guest"),
    ] {
        let found: Vec<String> = retired(text).into_iter().map(|(words, _)| words).collect();
        assert_eq!(found, [words], "{text}");
    }
    for text in ["a guesthouse", "docs/records/kernels-repack-log.md", "repacked", "sync blocks", "platform"] {
        assert_eq!(retired(text), [], "{text}");
    }
    assert_eq!(parts("HTTPServer x2_CTARank"), ["http", "server", "x2", "cta", "rank"]);
}

/// Returns the retired identifiers and options of a file.
fn retired_names(shown: &str, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    // A listing of Rust, or what the compiler says.
    let is_listing = shown.starts_with("docs/api/") || shown.ends_with(".stderr");
    // In prose, such a name may be an ordinary word.
    let mark = comment_mark(shown, text).filter(|_| !shown.ends_with(".toml"));
    for (line, number) in text.lines().zip(1..) {
        let code = mark.map_or(line, |mark| split_comment(line, mark).0);
        let names = words(if mark.is_some() || is_listing { code } else { "" });
        let retired = names.filter_map(|word| RETIRED.iter().find(|(name, ..)| *name == word));
        for (name, replacement, allowed) in retired {
            if !allowed.iter().any(|place| shown.starts_with(place)) {
                found.push(format!("{shown}:{number}: {name}; use {replacement}"));
            }
        }
        let options = RETIRED_OPTIONS.iter().filter(|(option, _)| code.contains(option));
        found.extend(options.map(|(option, new)| format!("{shown}:{number}: {option}; use {new}")));
    }
    found
}

#[test]
fn retired_identifiers_are_gone() {
    let found: Vec<String> = sources().iter().flat_map(|(shown, text)| retired_names(shown, text)).collect();
    assert_eq!(found, [""; 0], "retired identifiers and options");
}

#[test]
fn planted_identifiers_are_found() {
    let found = |shown: &str, text: &str| retired_names(shown, text).len();
    for (shown, text) in [
        ("src/a.rs", "struct Refusal; // Lane"),
        ("unweight-bench/src/stress.cu", "struct Lane {};"),
        ("docs/api/unweight.txt", "pub struct Refusal"),
        ("tests/ui/a.stderr", "expected `Refusal`"),
        ("install.sh", "unweight run --mlp packed # --mlp"),
        (".ci/run", "unweight run --mlp packed"),
        (".github/workflows/ci.yml", "run: unweight run --mlp packed"),
        ("docs/a.md", "Way: `--mlp`"),
        ("docs/reference/support.inc", "`--mlp`"),
    ] {
        assert_eq!(found(shown, text), 1, "{shown}: {text}");
    }
    for (shown, text) in
        [("docs/a.md", "Way"), ("install.sh", "# Way"), ("Containerfile", "# --mlp"), ("a.rs", "// Way")]
    {
        assert_eq!(found(shown, text), 0, "{shown}: {text}");
    }
    assert_eq!(split_comment("[ $# -eq 1 ] # one", "#"), ("[ $# -eq 1 ] ", " one"));
}
