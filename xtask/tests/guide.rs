//! The guide of the Rust crates (docs/guide/rust.md) shows code that is compiled.

mod workspace;

use workspace::{read, root};

fn text(path: &str) -> String {
    read(&root().join(path))
}

/// Returns the first Rust example of the guide that contains `needle`, without empty lines and indentation.
fn example(needle: &str) -> Vec<String> {
    let guide = text("docs/guide/rust.md");
    let blocks = guide.split("```rust").skip(1).filter_map(|block| block.split("```").next());
    let block = blocks.into_iter().find(|block| block.contains(needle)).expect("an example");
    block.lines().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty()).collect()
}

/// The dependency names this version and features that exist.
#[test]
fn the_documented_dependency_is_this_crate() {
    let (guide, manifest) = (text("docs/guide/rust.md"), text("Cargo.toml"));
    let line = guide.lines().find(|line| line.starts_with("unweight = ")).expect("a dependency");
    let version = line.split('"').nth(1).expect("a version");
    assert!(env!("CARGO_PKG_VERSION").starts_with(&format!("{version}.")), "{line}");
    let features = line.rsplit("features ").next().expect("features in the comment");
    let named: Vec<&str> = features.split('"').skip(1).step_by(2).collect();
    assert!(named.len() == 2 && named.iter().all(|name| manifest.contains(&format!("\n{name} = ["))), "{named:?}");
}

/// The first example equals that of `FirstExample`, which is compiled.
#[test]
fn the_first_documented_example_compiles() {
    let (lines, compiled) = (example(""), text("src/lib.rs"));
    assert!(lines.len() >= 3, "{lines:?}");
    for line in lines {
        assert!(compiled.contains(&format!("/// {line}")), "`FirstExample` has no line {line:?}");
    }
}

/// The guide shows part of the example of `Linear`, which is compiled.
#[test]
fn the_documented_layers_are_those_of_linear() {
    let (lines, compiled) = (example("Loader::new"), text("unweight-rt/src/layer/linear/mod.rs"));
    assert!(lines.len() >= 6, "{lines:?}");
    for line in lines {
        let code = line.split("   //").next().unwrap_or(&line).trim();
        assert!(compiled.contains(&format!("/// {code}")), "the example of `Linear` has no line {code:?}");
    }
}
