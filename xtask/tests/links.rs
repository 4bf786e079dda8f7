//! Checks links between the documents: each leads to an existing file and heading, those of the book to its own files.
//! The book contains every page.

use std::{collections::BTreeSet, fs};

mod workspace;

use workspace::{files, root};

/// Returns the anchor of a heading: lower case, spaces as hyphens, no other punctuation.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

fn anchors(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    headings.map(|line| anchor(line.trim_start_matches('#'))).collect()
}

/// Returns the targets of `[text](target)` outside of code blocks.
fn links(text: &str) -> Vec<String> {
    let (mut outside, mut found) = (true, Vec::new());
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            outside = !outside;
        } else if outside {
            let targets = line.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
            found.extend(targets.map(|(target, _)| target.to_owned()));
        }
    }
    found
}

/// Finds paths such as `docs/records/2026-11-22/stress.csv` and `records/...` anywhere in a document.
fn records(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for rest in text.split("records/").skip(1) {
        let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || "-_./".contains(c))).unwrap_or(rest.len());
        let path = rest[..end].trim_end_matches(['.', '/', '-']);
        if path.starts_with("20") {
            found.push(path.to_owned());
        }
    }
    found
}

#[test]
fn links_lead_to_files_and_headings() {
    let files = files(&["."], &["md"], &[]);
    assert!(files.len() > 20, "{files:?}");
    let mut broken = Vec::new();
    for file in &files {
        let text = fs::read_to_string(file).expect("a document");
        let folder = file.parent().expect("a directory");
        for link in links(&text).iter().filter(|link| !link.contains("://") && !link.starts_with("mailto:")) {
            let (path, heading) = link.split_once('#').map_or((link.as_str(), None), |(path, of)| (path, Some(of)));
            let target = if path.is_empty() { file.clone() } else { folder.join(path) };
            let leads = target.exists()
                && heading.is_none_or(|heading| {
                    fs::read_to_string(&target).is_ok_and(|text| anchors(&text).contains(heading))
                });
            if !leads {
                broken.push(format!("{}: ({link})", file.display()));
            }
        }
        for record in records(&text) {
            if !root().join("docs/records").join(&record).exists() {
                broken.push(format!("{}: records/{record}", file.display()));
            }
        }
    }
    assert_eq!(broken, [""; 0]);
}

#[test]
fn every_page_is_in_the_book() {
    let docs = root().join("docs");
    let pages = files(&["docs"], &["md"], &[]);
    let names = pages.iter().map(|page| page.strip_prefix(&docs).expect("a page").to_string_lossy().into_owned());
    let listed = links(&fs::read_to_string(docs.join("SUMMARY.md")).expect("the summary"));
    let unique: BTreeSet<&str> = listed.iter().map(String::as_str).collect();
    assert_eq!(unique.len(), listed.len(), "docs/SUMMARY.md lists a page twice");
    let missing: Vec<String> = names.filter(|name| name != "SUMMARY.md" && !unique.contains(name.as_str())).collect();
    assert_eq!(missing, [""; 0], "docs/SUMMARY.md does not list these pages");
}

/// The published book has no other files of the repository.
#[test]
fn links_of_the_book_stay_in_the_book() {
    let docs = root().join("docs").canonicalize().expect("the documentation");
    let mut leaving = Vec::new();
    for page in files(&["docs"], &["md"], &[]) {
        let folder = page.parent().expect("a directory");
        for link in links(&fs::read_to_string(&page).expect("a page")).iter().filter(|link| !link.contains("://")) {
            let path = link.split('#').next().unwrap_or_default();
            if folder.join(path).canonicalize().is_ok_and(|target| !target.starts_with(&docs)) {
                leaving.push(format!("{}: ({link})", page.display()));
            }
        }
    }
    assert_eq!(leaving, [""; 0]);
}

#[test]
fn links_headings_and_records_are_found() {
    let text = "# A heading: of `two`\nsee [one](a.md#x) and [two](b.md)\n```\n[no](c.md)\n```\n";
    assert_eq!(links(text), ["a.md#x", "b.md"]);
    assert_eq!(anchors(text).into_iter().collect::<Vec<_>>(), ["a-heading-of-two"]);
    assert_eq!(
        records("docs/records/2026-11-22/stress.csv, records/2026-11-23."),
        ["2026-11-22/stress.csv", "2026-11-23"]
    );
}
