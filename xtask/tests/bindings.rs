//! The bindings are outside the workspace. These tests check the settings that they cannot inherit.

mod workspace;

use workspace::{read, root};

fn manifest(folder: &str) -> String {
    read(&root().join(folder).join("Cargo.toml"))
}

/// Returns the value of the first line `key = ...` after the line `section`.
fn value<'a>(text: &'a str, section: &str, key: &str) -> &'a str {
    let lines = text.lines().skip_while(|line| *line != section);
    let mut found = lines.filter_map(|line| line.strip_prefix(key)?.strip_prefix(" = "));
    found.next().unwrap_or_else(|| panic!("no {key} in {section}"))
}

const BINDINGS: [&str; 2] = ["bindings/python", "bindings/candle"];

#[test]
fn bindings_have_the_version_of_the_workspace() {
    let workspace = manifest(".");
    for folder in BINDINGS {
        let package = manifest(folder);
        for key in ["version", "edition", "rust-version", "license"] {
            let expected = value(&workspace, "[workspace.package]", key);
            assert_eq!(value(&package, "[package]", key), expected, "{folder}/Cargo.toml: {key}");
        }
    }
}

/// Returns the sections of the development profiles, without comments.
fn profile(text: &str) -> Vec<String> {
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    let mut sections: Vec<String> = Vec::new();
    for line in lines {
        match sections.last_mut() {
            Some(section) if !line.starts_with('[') => section.push_str(line),
            _ => sections.push(line.to_owned()),
        }
    }
    sections.retain(|section| section.starts_with("[profile.dev"));
    sections
}

#[test]
fn bindings_use_the_profile_of_the_workspace() {
    let workspace = profile(&manifest("."));
    assert!(workspace.len() > 2, "{workspace:?}");
    for folder in BINDINGS {
        // Package overrides only of packages that the binding uses: cargo warns about others.
        let sections = profile(&manifest(folder));
        assert_eq!(sections[..3], workspace[..3], "{folder}: a different profile builds all dependencies twice");
        for section in sections {
            assert!(workspace.contains(&section), "{folder}: {section} is not in the profile of the workspace");
        }
    }
}

#[test]
fn the_wheel_names_the_repository_and_its_licences() {
    let project = read(&root().join("bindings/python/pyproject.toml"));
    let repository = value(&manifest("."), "[workspace.package]", "repository").to_owned();
    assert_eq!(value(&project, "[project.urls]", "Repository"), repository);
    let urls = project.split("[project.urls]\n").nth(1).unwrap().lines().take_while(|line| line.contains(" = "));
    let repository = repository.trim_end_matches('"');
    let urls: Vec<&str> = urls.map(|line| line.split(" = ").nth(1).unwrap()).collect();
    assert!(urls.len() > 1 && urls.iter().all(|url| url.starts_with(repository)), "{urls:?}");
    // The names that `cargo xtask wheel` writes.
    let wheel = read(&root().join("xtask/src/wheel.rs"));
    let files: Vec<&str> = value(&project, "[project]", "license-files").split('"').skip(1).step_by(2).collect();
    assert_eq!(files, ["licenses/LICENSE-APACHE", "licenses/LICENSE-MIT", "licenses/THIRD-PARTY.txt"]);
    assert!(wheel.contains(r#"package().join("licenses")"#) && wheel.contains("notices::FILE"));
}
