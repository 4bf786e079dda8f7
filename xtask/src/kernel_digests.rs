//! `cargo xtask kernel-digests`: prints a line per kernel with a digest of its machine code, or compares two such
//! lists.
//!
//! `unweight-rivals/examples/kernel_digests.rs` prints the list, because it depends on every crate with kernels.

use std::{collections::BTreeMap, fs};

use crate::run::{self, cargo};

/// Maps a kernel's name to the rest of its line.
type List = BTreeMap<String, String>;

/// Prints a list, or compares two lists: `--compare BEFORE AFTER [--renames FILE]`.
pub fn run(arguments: &[String]) -> Result<(), String> {
    match arguments {
        [flag, before, after] if flag == "--compare" => compare(before, after, None),
        [flag, before, after, renames, table] if flag == "--compare" && renames == "--renames" => {
            compare(before, after, Some(table))
        }
        [flag, ..] if flag == "--compare" => Err("usage: --compare BEFORE AFTER [--renames FILE]".to_owned()),
        _ => run::run(
            cargo()
                .args(["run", "--quiet", "--package", "unweight-rivals", "--features", "gpu"])
                .args(["--example", "kernel_digests", "--"])
                .args(arguments),
        ),
    }
}

fn compare(before: &str, after: &str, renames: Option<&str>) -> Result<(), String> {
    let read = |path: &str| fs::read_to_string(path).map_err(|error| format!("{path}: {error}"));
    let renames =
        renames.map_or(Ok(Vec::new()), |path| parse_renames(&read(path)?).map_err(|what| format!("{path}: {what}")))?;
    let before = list(&read(before)?, &renames).map_err(|what| format!("{before}: {what}"))?;
    let after = list(&read(after)?, &[]).map_err(|what| format!("{after}: {what}"))?;
    let found = differences(&before, &after);
    if found.is_empty() {
        println!("{} kernels, all identical", before.len());
        return Ok(());
    }
    found.iter().for_each(|line| println!("{line}"));
    Err(format!("{} of {} kernels differ", found.len(), before.len()))
}

/// Parses lines of `OLD NEW`: a part of a name before, and its replacement. `#` begins a comment.
fn parse_renames(text: &str) -> Result<Vec<(String, String)>, String> {
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    let pairs =
        lines.filter(|line| !line.is_empty()).map(|line| match line.split_whitespace().collect::<Vec<_>>()[..] {
            [old, new] => Ok((old.to_owned(), new.to_owned())),
            _ => Err(format!("{line:?} is not two words, OLD and NEW")),
        });
    pairs.collect()
}

/// Parses a list, keyed by name and architecture. The first matching rename applies, so longer names must come first.
fn list(text: &str, renames: &[(String, String)]) -> Result<List, String> {
    let mut kernels = List::new();
    for line in text.lines().filter(|line| !line.is_empty()) {
        let mut words = line.splitn(3, ' ');
        let (Some(name), Some(arch), Some(rest)) = (words.next(), words.next(), words.next()) else {
            return Err(format!("{line:?} is not a kernel, an architecture and its figures"));
        };
        let rename = renames.iter().find(|(old, _)| name.contains(old.as_str()));
        let name = rename.map_or_else(|| name.to_owned(), |(old, new)| name.replacen(old.as_str(), new, 1));
        if kernels.insert(format!("{name} {arch}"), rest.to_owned()).is_some() {
            return Err(format!("{name} {arch} is listed twice"));
        }
    }
    Ok(kernels)
}

/// Returns a line for every kernel that is in only one list or has different values.
fn differences(before: &List, after: &List) -> Vec<String> {
    let mut lines = Vec::new();
    for (name, old) in before {
        match after.get(name) {
            None => lines.push(format!("{name}: only before")),
            Some(new) if new != old => lines.push(format!("{name}:\n  before {old}\n  after  {new}")),
            Some(_) => {}
        }
    }
    lines.extend(after.keys().filter(|name| !before.contains_key(*name)).map(|name| format!("{name}: only after")));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = "uw_sm90a_old_l7 sm_90a sha256=01 registers=64\nuw_sm90a_norm sm_90a sha256=02 registers=32\n";

    #[test]
    fn names_may_change_and_code_may_not() {
        let renames = parse_renames("# families\nsm90a_old_ sm90a_new_  # longest first\n").unwrap();
        let before = list(BEFORE, &renames).unwrap();
        let renamed = BEFORE.replace("old_l7", "new_l7");
        assert_eq!(differences(&before, &list(&renamed, &[]).unwrap()), [""; 0]);
        let changed = list(&renamed.replace("sha256=02", "sha256=03"), &[]).unwrap();
        assert!(differences(&before, &changed)[0].starts_with("uw_sm90a_norm sm_90a:\n"));
        let without_renames = differences(&list(BEFORE, &[]).unwrap(), &list(&renamed, &[]).unwrap());
        assert_eq!(without_renames, ["uw_sm90a_old_l7 sm_90a: only before", "uw_sm90a_new_l7 sm_90a: only after"]);
    }

    #[test]
    fn a_damaged_list_is_refused() {
        assert!(list("uw_sm90a_norm sm_90a\n", &[]).unwrap_err().contains("is not a kernel"));
        assert!(list(&BEFORE.repeat(2), &[]).unwrap_err().contains("listed twice"));
        assert!(parse_renames("one\n").unwrap_err().contains("not two words"));
    }
}
