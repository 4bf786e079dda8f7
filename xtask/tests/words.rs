//! Checks the language of documents, help texts, errors, public doc comments, and comments outside of Rust: no
//! unidiomatic phrases, doc comments are sentences, and documents and code have at most 120 columns.
//!
//! Help texts are checked in `docs/reference/cli.md` and `unweight-bench/commands.txt`, which print them. Records are
//! excluded, because they quote what was run.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use proc_macro2::{TokenStream, TokenTree};

mod sources;
mod workspace;

use sources::product_lines;
use workspace::{comment_mark, files, read, root, shown, split_comment, texts};

/// Forbidden phrases, matched as whole words in any case.
const PHRASES: [&str; 25] = [
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
    "of it",
    "are told",
    "were told",
    "be told",
    "go on",
    "as good as none",
    "somebody",
    "everybody",
];

/// Verbs for which "is no matrix" should be "is not a matrix". "There is no" and comparisons such as "no longer" are
/// allowed.
const VERBS: [&str; 4] = ["is", "are", "was", "were"];
const AFTER_NO: [&str; 7] = ["longer", "more", "less", "fewer", "later", "larger", "smaller"];

/// Beginnings of doc comments that define nothing.
const FRAGMENTS: [&str; 8] = ["The same", "Which", "As there", "Where it is", "Where it lies", "Them", "Of it", "And"];

/// Directories of product code.
const SOURCES: [&str; 9] = [
    "src",
    "unweight-format/src",
    "unweight-model/src",
    "unweight-codegen/src",
    "unweight-macros/src",
    "unweight-rt/src",
    "unweight-engine/src",
    "unweight-rivals/src",
    "unweight-bench/src",
];

/// Returns the phrases in a line.
fn phrases(line: &str) -> Vec<&'static str> {
    let words: Vec<String> = line
        .split(|c: char| !c.is_alphanumeric() && c != '_')
        .filter(|word| !word.is_empty())
        .map(str::to_lowercase)
        .collect();
    let mut found: Vec<&str> = Vec::new();
    for (at, window) in words.windows(3).enumerate() {
        let [verb, no, next] = window else { continue };
        let there = at > 0 && words[at - 1] == "there";
        if no == "no" && !there && VERBS.contains(&verb.as_str()) && !AFTER_NO.contains(&next.as_str()) {
            found.push("is no");
        }
        // "some 12 percent" is "about 12 %".
        if verb == "some" && no.starts_with(|c: char| c.is_ascii_digit()) {
            found.push("some NUMBER");
        }
    }
    let line = format!(" {} ", words.join(" "));
    found.extend(PHRASES.into_iter().filter(|phrase| line.contains(&format!(" {phrase} "))));
    found
}

/// Returns the lines with a phrase.
fn found(path: &Path, lines: impl Iterator<Item = (usize, String)>) -> Vec<String> {
    let own = shown(path);
    lines
        .flat_map(|(at, line)| phrases(&line).into_iter().map(move |phrase| (at, phrase)).collect::<Vec<_>>())
        .map(|(at, phrase)| format!("{own}:{at}: {phrase}"))
        .collect()
}

/// Returns every document except records.
fn documents() -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> =
        ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "unweight-bench/commands.txt"]
            .map(|name| root().join(name))
            .into();
    let folders = ["docs", "templates", "tests", "bindings", "unweight-format/fuzz", "unweight-format/tests"];
    all.extend(files(&folders, &["md"], &["records"]));
    assert!(all.len() > 30, "{} documents", all.len());
    all
}

#[test]
fn documents_and_comments_use_plain_words() {
    let all = texts();
    for known in ["README.md", "install.sh", ".ci/run", ".github/workflows/ci.yml", "unweight-bench/src/stress.cu"] {
        assert!(all.iter().any(|(path, _)| shown(path) == known), "{known} is not read");
    }
    let hits: Vec<String> =
        all.iter().flat_map(|(path, text)| found(path, prose(&shown(path), text).into_iter())).collect();
    assert!(hits.is_empty(), "{}", hits.join("\n"));
}

/// Checks doc comments of modules and public items, and texts of errors, outside of test modules.
#[test]
fn public_docs_and_errors_use_plain_words() {
    let all = files(&SOURCES, &["rs"], &[]);
    assert!(all.len() > 200, "{} sources", all.len());
    let hits: Vec<String> = all.iter().flat_map(|path| found(path, public_text_of(path).into_iter())).collect();
    assert!(hits.is_empty(), "{}", hits.join("\n"));
}

/// Returns what a file says, with line numbers from 1: comments of code, and all of anything else. No string of a
/// kernel contains `//`. For Rust, see [`public_text`].
fn prose(shown: &str, text: &str) -> Vec<(usize, String)> {
    if shown.ends_with(".rs") {
        return Vec::new();
    }
    let mark = comment_mark(shown, text);
    let lines = text.lines().map(|line| mark.map_or(line, |mark| split_comment(line, mark).1).to_owned());
    (1..).zip(lines).filter(|(_, line)| !line.is_empty()).collect()
}

/// Returns the [`public_text`] of the product code of a file.
fn public_text_of(path: &Path) -> Vec<(usize, String)> {
    public_text(&product_lines(&read(path)).unwrap_or_else(|error| panic!("{}: {error}", shown(path))))
}

/// Returns the doc comment lines of modules and public items, and the lines of `#[error]`, with line numbers from 1.
fn public_text(lines: &[String]) -> Vec<(usize, String)> {
    let (mut text, mut pending, mut in_error) = (Vec::new(), Vec::new(), false);
    for (line, at) in lines.iter().zip(1..) {
        let trimmed = line.trim_start();
        if trimmed.starts_with("//!") {
            text.push((at, trimmed.to_owned()));
        } else if trimmed.starts_with("///") {
            pending.push((at, trimmed.to_owned()));
        } else if in_error || trimmed.starts_with("#[error(") {
            text.push((at, trimmed.to_owned()));
            in_error = !trimmed.ends_with(")]");
        } else if !trimmed.starts_with("#[") {
            // A variant has no `pub`.
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

/// Finds doc comments of public items that are little more than one of [`FRAGMENTS`].
fn fragments(text: &[(usize, String)]) -> Vec<usize> {
    let doc = |line: &str| line.strip_prefix("///").map(|doc| doc.trim().to_owned());
    let starts = text.iter().enumerate().filter(|(index, (at, line))| {
        let before = index.checked_sub(1).map(|before| &text[before]);
        let continues = before.is_some_and(|(above, line)| above + 1 == *at && doc(line).is_some());
        doc(line).is_some() && !continues
    });
    let is_fragment = |line: &str| {
        let words: Vec<&str> = line.trim_end_matches('.').split(' ').collect();
        FRAGMENTS.iter().any(|start| {
            let start: Vec<&str> = start.split(' ').collect();
            words.starts_with(&start) && words.len() <= start.len() + 2
        })
    };
    starts.filter(|(_, (_, line))| doc(line).is_some_and(|line| is_fragment(&line))).map(|(_, (at, _))| *at).collect()
}

#[test]
fn public_docs_are_sentences() {
    let all = files(&SOURCES, &["rs"], &[]);
    let hits: Vec<String> = all
        .iter()
        .flat_map(|path| {
            fragments(&public_text_of(path)).into_iter().map(|at| format!("{}:{at}", shown(path))).collect::<Vec<_>>()
        })
        .collect();
    assert!(hits.is_empty(), "these doc comments do not define their item in a sentence: {}", hits.join("\n"));
}

/// Maximum line length, characters.
const COLUMNS: usize = 120;

/// Returns the numbers of too long lines of a document. Tables, code, links and generated lines are exempt.
fn long_lines(text: &str) -> Vec<usize> {
    let (mut long, mut in_code, mut after_marker) = (Vec::new(), false, false);
    for (at, line) in text.lines().enumerate() {
        let trimmed = line.trim_start();
        in_code ^= trimmed.starts_with("```");
        let is_free =
            in_code || after_marker || trimmed.starts_with('|') || line.contains("](") || line.contains("://");
        if line.chars().count() > COLUMNS && !is_free {
            long.push(at + 1);
        }
        after_marker = line.starts_with("<!-- ") && line.ends_with(" -->");
    }
    long
}

#[test]
fn documents_have_120_columns() {
    let hits: Vec<String> = documents()
        .iter()
        .flat_map(|path| {
            let own = shown(path);
            long_lines(&read(path)).into_iter().map(move |at| format!("{own}:{at}")).collect::<Vec<_>>()
        })
        .collect();
    assert!(hits.is_empty(), "lines longer than {COLUMNS} columns: {}", hits.join("\n"));
}

/// Returns the numbers of too long lines of a source. Comments are treated as a document. Lines with a string literal,
/// which rustfmt does not break, are exempt.
fn long_code(source: &str) -> Vec<usize> {
    let comment = |line: &str| {
        let line = line.trim_start();
        ["///", "//!", "//"].into_iter().find_map(|mark| line.strip_prefix(mark)).map(str::to_owned)
    };
    let tokens: TokenStream = source.parse().unwrap_or_default();
    let mut strings = BTreeSet::new();
    string_lines(tokens, &mut strings);
    let comments: Vec<String> = source.lines().map(|line| comment(line).unwrap_or_default()).collect();
    let mut in_code = false;
    let mut long = Vec::new();
    for (at, line) in source.lines().enumerate() {
        let text = comments[at].trim_start();
        in_code = if comment(line).is_some() { in_code ^ text.starts_with("```") } else { false };
        let is_free = match comment(line) {
            Some(_) => in_code || text.starts_with('|') || line.contains("://"),
            None => strings.contains(&(at + 1)),
        };
        if line.chars().count() > COLUMNS && !is_free {
            long.push(at + 1);
        }
    }
    long
}

/// Collects the lines of string literals. Doc comments are string attributes and do not count.
fn string_lines(tokens: TokenStream, lines: &mut BTreeSet<usize>) {
    for token in tokens {
        match token {
            TokenTree::Group(group) => string_lines(group.stream(), lines),
            TokenTree::Literal(literal) if literal.to_string().contains('"') => {
                lines.extend(literal.span().start().line..=literal.span().end().line);
            }
            _ => {}
        }
    }
}

#[test]
fn code_has_120_columns() {
    let mut all = files(&SOURCES, &["rs"], &[]);
    let others = ["tests", "examples", "xtask", "unweight-format/tests", "unweight-format/fuzz"];
    all.extend(files(&others, &["rs"], &[]));
    assert!(all.len() > 300, "{} sources", all.len());
    let hits: Vec<String> = all
        .iter()
        .flat_map(|path| {
            let own = shown(path);
            long_code(&read(path)).into_iter().map(move |at| format!("{own}:{at}")).collect::<Vec<_>>()
        })
        .collect();
    assert!(hits.is_empty(), "lines longer than {COLUMNS} columns: {}", hits.join("\n"));
}

#[test]
fn kernels_have_120_columns() {
    let all = files(
        &["templates", "tests/simulator", "unweight-rivals", "unweight-bench"],
        &["cu", "cuh", "hpp", "cpp", "tera"],
        &[],
    );
    assert!(all.len() > 60, "{} sources", all.len());
    let hits: Vec<String> = all
        .iter()
        .flat_map(|path| {
            let own = shown(path);
            let long =
                |(at, line): (usize, &str)| (line.chars().count() > COLUMNS).then(|| format!("{own}:{}", at + 1));
            read(path).lines().enumerate().filter_map(long).collect::<Vec<_>>()
        })
        .collect();
    assert!(hits.is_empty(), "lines longer than {COLUMNS} columns; run clang-format -i: {}", hits.join("\n"));
}

#[test]
fn planted_long_lines_are_found() {
    let long = "word ".repeat(30);
    assert_eq!(long_lines(&format!("{long}\n| {long} |\n```\n{long}\n```\n[a](b) {long}\n{long}")), [1, 7]);
    let source = format!(
        "// {long}\nconst A: &str = \"{long}\";\n//! ```text\n//! {long}\n//! ```\nlet x = {};\n/// {long}\n",
        "1 + ".repeat(30) + "1"
    );
    assert_eq!(long_code(&source), [1, 6, 7]);
}

#[test]
fn planted_fragments_are_found() {
    let found = |text: &str| fragments(&public_text(&text.lines().map(str::to_owned).collect::<Vec<_>>()));
    assert_eq!(found("/// The same.\npub a: u8,\n/// Which.\n/// More.\npub fn f() {}\n"), [1, 3]);
    assert_eq!(found("/// The same bytes as the library function writes.\npub fn f() {}\n"), [0; 0]);
    // A continuation line does not count.
    assert_eq!(found("/// A list of\n/// them.\npub fn f() {}\n"), [0; 0]);
}

#[test]
fn planted_phrases_are_found() {
    assert_eq!(phrases("It lies, Beside the other."), ["lies", "beside"]);
    assert_eq!(phrases("families, besides"), [""; 0]);
    assert_eq!(phrases("It is no matrix"), ["is no"]);
    assert_eq!(phrases("there is no matrix, and it is no longer one; some more"), [""; 0]);
    assert_eq!(phrases("some 12 percent of it"), ["some NUMBER", "of it"]);
    for (shown, text, said) in [
        ("a/b.cu", "u32 a;  // of it\nint b;\n", " of it"),
        ("a/b.hpp", "// of it\nint b;\n", " of it"),
        ("install.sh", "[ $# = 1 ] # of it\n", " of it"),
        (".ci/run", "nobody=1 # of it\n", " of it"),
        ("a/b.py", "nobody = 1 # of it\n", " of it"),
        ("tests/bin", "#!of it\n", "!of it"),
        (".github/workflows/ci.yml", "# of it\n", "# of it"),
        ("docs/a.inc", "of it\n", "of it"),
        ("a.txt", "of it\n", "of it"),
    ] {
        assert_eq!(prose(shown, text), [(1, said.to_owned())], "{shown}");
    }
    let lines = |text: &str| {
        let text = public_text(&product_lines(text).expect("Rust"));
        text.into_iter().map(|(at, _)| at).collect::<Vec<_>>()
    };
    assert_eq!(lines("//! module\n/// item\npub fn f() {}\n/// private\nfn g() {}\n"), [1, 2]);
    assert_eq!(
        lines("enum E {\n    #[error(\n        \"x\"\n    )]\n    X,\n}\n#[cfg(test)]\n/// y\npub fn f() {}\n"),
        [2, 3, 4]
    );
    assert_eq!(lines("#[cfg(test)]\nmod tests;\n/// y\npub fn f() {}\n"), [3], "product code below tests");
}
