//! Checks that manifests of published crates have the fields that the registry and docs.rs show.

mod workspace;

use workspace::published;

/// Returns the value of `key = ` in `[package]`.
fn value<'a>(manifest: &'a str, key: &str) -> Option<&'a str> {
    let package = manifest.split("[package]\n").nth(1)?;
    let mut lines = package.lines().take_while(|line| !line.starts_with('['));
    lines.find_map(|line| line.strip_prefix(key)?.strip_prefix(" = "))
}

/// Returns what is wrong with a manifest.
fn faults(manifest: &str) -> Vec<&'static str> {
    let name = value(manifest, "name").unwrap_or_default().trim_matches('"');
    let list = |key| value(manifest, key).unwrap_or_default().split('"').skip(1).step_by(2).collect::<Vec<_>>();
    let (keywords, categories) = (list("keywords"), list("categories"));
    let description = value(manifest, "description").unwrap_or_default().trim_matches('"');
    let documented = value(manifest, "documentation") == Some(&*format!("\"https://docs.rs/{name}\""));
    let builds = manifest
        .split("\n[package.metadata.docs.rs]\n")
        .nth(1)
        .and_then(|rest| rest.lines().find(|line| !line.starts_with('#')));
    let inherited = ["license", "repository", "rust-version"].iter().all(|key| {
        let inherited = format!("\n{key}.workspace = true\n");
        manifest.contains(&inherited)
    });
    [
        ("description: a sentence without a period at its end", !description.is_empty() && !description.ends_with('.')),
        ("keywords: 1 to 5", (1..=5).contains(&keywords.len())),
        ("keywords: at most 20 characters each", keywords.iter().all(|word| word.len() <= 20)),
        ("categories: 1 to 5", (1..=5).contains(&categories.len())),
        ("documentation: https://docs.rs/NAME", documented),
        ("package.metadata.docs.rs: the features to document", builds.is_some_and(|line| line.contains("features"))),
        ("license, repository and rust-version: those of the workspace", inherited),
    ]
    .into_iter()
    .filter_map(|(fault, holds)| (!holds).then_some(fault))
    .collect()
}

#[test]
fn published_crates_have_what_the_registry_shows() {
    let published = published();
    assert!(published.len() >= 10, "{:?}", published.keys());
    for (folder, manifest) in &published {
        assert_eq!(faults(manifest), [""; 0], "{folder}/Cargo.toml");
    }
}

#[test]
fn incomplete_manifests_are_found() {
    let sound = published().remove(".").expect("the facade");
    for (key, fault) in [
        ("keywords", "keywords: 1 to 5"),
        ("categories", "categories: 1 to 5"),
        ("documentation", "documentation: https://docs.rs/NAME"),
    ] {
        let line = format!("{key} = {}\n", value(&sound, key).expect(key));
        assert_eq!(faults(&sound.replacen(&line, "", 1)), [fault]);
    }
    let undocumented = sound.replacen("[package.metadata.docs.rs]", "[package.metadata.other]", 1);
    assert_eq!(faults(&undocumented), ["package.metadata.docs.rs: the features to document"]);
    assert_eq!(faults(&sound.replacen("\"bf16\"", "\"a-keyword-of-too-many-characters\"", 1)).len(), 1);
}
