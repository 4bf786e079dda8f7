//! Phrases that no native speaker would use are in no document, help text, error message or public doc comment.
//!
//! Help texts are checked where `docs/reference/{cli,bench}.md` print them. Records are left out: they
//! quote what was run.

use std::{
    fs,
    path::{Path, PathBuf},
};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Each is searched as whole words, whatever the case.
const PHRASES: [&str; 17] = [
    "lies",
    "lie as",
    "beside",
    "is not to be had",
    "has to be had",
    "nobody",
    "whoever",
    "is told",
    "was told",
    "goes on",
    "anew",
    "for want of",
    "in no time",
    "as good as nothing",
    "what is not promised",
    "in turns",
    "the twin",
];

/// Files with this extension below a folder.
fn files(folder: &Path, extension: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
        let path = entry.expect("an entry").path();
        if path.is_dir() && !path.ends_with("records") && !path.ends_with("target") {
            files(&path, extension, found);
        } else if path.extension().is_some_and(|own| own == extension) {
            found.push(path);
        }
    }
}

/// The phrases in a line.
fn phrases(line: &str) -> Vec<&'static str> {
    let words: Vec<String> =
        line.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty()).map(str::to_lowercase).collect();
    let line = format!(" {} ", words.join(" "));
    PHRASES.into_iter().filter(|phrase| line.contains(&format!(" {phrase} "))).collect()
}

/// Lines of the text with a phrase.
fn found(path: &Path, lines: impl Iterator<Item = (usize, String)>) -> Vec<String> {
    let own = path.strip_prefix(root()).unwrap_or(path).display().to_string();
    lines
        .flat_map(|(at, line)| phrases(&line).into_iter().map(move |phrase| (at, phrase)).collect::<Vec<_>>())
        .map(|(at, phrase)| format!("{own}:{at}: {phrase}"))
        .collect()
}

/// Every document outside of the records.
fn documents() -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"].map(|name| root().join(name)).into();
    for folder in ["docs", "templates", "tests", "bindings", "unweight-format/fuzz", "unweight-format/tests"] {
        files(&root().join(folder), "md", &mut all);
    }
    assert!(all.len() > 30, "{} documents", all.len());
    all
}

/// Line numbers, from 1, of lines outside of tables that are wider than 120 columns.
fn wide(text: &str) -> Vec<usize> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.starts_with('|') && line.chars().count() > 120);
    lines.map(|(at, _)| at + 1).collect()
}

#[test]
fn documents_are_120_columns_wide() {
    let mut all = documents();
    for entry in fs::read_dir(root().join("docs/records")).expect("the records") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            files(&path, "md", &mut all);
        }
    }
    let hits: Vec<String> = all
        .iter()
        .flat_map(|path| wide(&read(path)).into_iter().map(move |at| format!("{}:{at}", path.display())))
        .collect();
    assert!(hits.is_empty(), "wrap at 120 columns:\n{}", hits.join("\n"));
    let planted = format!("{}\n| {} |\n{}\n", "a".repeat(120), "b".repeat(120), "c".repeat(121));
    assert_eq!(wide(&planted), [3]);
}

#[test]
fn documents_use_plain_words() {
    let hits: Vec<String> = documents()
        .iter()
        .flat_map(|path| {
            found(path, read(path).lines().map(str::to_owned).enumerate().map(|(at, line)| (at + 1, line)))
        })
        .collect();
    assert!(hits.is_empty(), "{}", hits.join("\n"));
}

/// Doc comments of modules and of public items, and the texts of errors, outside of test modules.
#[test]
fn public_docs_and_errors_use_plain_words() {
    let mut all = Vec::new();
    for folder in [
        "src",
        "unweight-format/src",
        "unweight-model/src",
        "unweight-codegen/src",
        "unweight-macros/src",
        "unweight-rt/src",
        "unweight-engine/src",
        "unweight-rivals/src",
        "unweight-bench/src",
    ] {
        files(&root().join(folder), "rs", &mut all);
    }
    assert!(all.len() > 200, "{} sources", all.len());
    let hits: Vec<String> = all.iter().flat_map(|path| found(path, public_text(&read(path)).into_iter())).collect();
    assert!(hits.is_empty(), "{}", hits.join("\n"));
}

/// Line numbers, from 1, and lines of doc comments of modules and public items, and of `#[error]`.
fn public_text(source: &str) -> Vec<(usize, String)> {
    let (mut text, mut pending, mut in_error) = (Vec::new(), Vec::new(), false);
    for (at, line) in source.lines().take_while(|line| *line != "#[cfg(test)]").enumerate() {
        let (at, trimmed) = (at + 1, line.trim_start());
        if trimmed.starts_with("//!") {
            text.push((at, trimmed.to_owned()));
        } else if trimmed.starts_with("///") {
            pending.push((at, trimmed.to_owned()));
        } else if in_error || trimmed.starts_with("#[error(") {
            text.push((at, trimmed.to_owned()));
            in_error = !trimmed.ends_with(")]");
        } else if !trimmed.starts_with("#[") {
            // A variant has no `pub` of its own.
            let public = trimmed.starts_with("pub ") || line.starts_with("    ") && is_variant(trimmed);
            if public {
                text.append(&mut pending);
            }
            pending.clear();
        }
    }
    text
}

fn is_variant(line: &str) -> bool {
    let name = line.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
    let rest = &line[name.len()..];
    name.starts_with(char::is_uppercase) && [",", "(", " {", " ="].iter().any(|next| rest.starts_with(next))
}

#[test]
fn planted_phrases_are_found() {
    assert_eq!(phrases("It lies, Beside the other."), ["lies", "beside"]);
    assert_eq!(phrases("families, besides"), [""; 0]);
    let lines = |text: &str| public_text(text).into_iter().map(|(at, _)| at).collect::<Vec<_>>();
    assert_eq!(lines("//! module\n/// item\npub fn f() {}\n/// private\nfn g() {}\n"), [1, 2]);
    assert_eq!(lines("#[error(\n    \"x\"\n)]\nX,\n#[cfg(test)]\n/// y\npub fn f() {}\n"), [1, 2, 3]);
}
