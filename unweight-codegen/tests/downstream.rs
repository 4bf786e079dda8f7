//! Uses the attribute in downstream crates: each depends on one crate of ours, and sets no path unless it renames that
//! crate.
//!
//! Cargo builds them in a directory of their own, as users do. They share the target directory of the workspace, so a
//! warm run takes a second or two; the first takes a minute, so only `.ci/nightly` runs them.

use std::{fs, path::Path, process::Command};

/// (package, its one dependency, its program)
const CRATES: [(&str, &str, &str); 3] = [
    (
        "facade",
        r#"unweight = { path = "ROOT", default-features = false, features = ["gpu"] }"#,
        "use unweight::{codegen::{Variant, spec::Op}, unweight_variant};
         #[unweight_variant(n = 2, stages = 4)]
         struct Gate;
         const _: () = assert!(matches!(Gate::SPEC.op, Op::GemmRecon(_)));
         fn main() {}",
    ),
    (
        "generator",
        r#"unweight-codegen = { path = "ROOT/unweight-codegen" }"#,
        "use unweight_codegen::{Variant, spec::Op, unweight_variant};
         #[unweight_variant(op = decode_huffman, output = full)]
         struct Decoder;
         const _: () = assert!(matches!(Decoder::SPEC.op, Op::DecodeHuffman(_)));
         fn main() {}",
    ),
    (
        "renamed",
        r#"uw = { package = "unweight", path = "ROOT", default-features = false, features = ["gpu"] }"#,
        "use uw::{codegen::{Variant, spec::Op}, unweight_variant};
         #[unweight_variant(op = pack, stage = tiles, crate = ::uw::codegen)]
         struct Pack;
         const _: () = assert!(matches!(Pack::SPEC.op, Op::Pack(_)));
         fn main() {}",
    ),
];

#[test]
#[ignore = "builds the crates for three sets of features: .ci/nightly"]
fn downstream_crates_build() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("the target directory");
    let home = tempfile::tempdir().expect("a temporary directory");
    let write = |path: &str, text: &str| {
        let path = home.path().join(path);
        fs::create_dir_all(path.parent().expect("a directory")).expect("a directory in the temporary one");
        fs::write(path, text).expect("a file in the temporary directory");
    };
    // The profile of the workspace, so that its artifacts are reused, and its lock file, so that cargo resolves
    // nothing.
    let workspace = fs::read_to_string(root.join("Cargo.toml")).expect("the workspace's manifest");
    let profile = workspace.split_once("[profile.dev]").expect("a profile for development").1;
    write("Cargo.toml", &format!("[workspace]\nresolver = \"3\"\nmembers = [\"*\"]\n[profile.dev]{profile}"));
    write("Cargo.lock", &fs::read_to_string(root.join("Cargo.lock")).expect("the lock file"));
    for (name, dependency, program) in CRATES {
        let dependency = dependency.replace("ROOT", &root.display().to_string());
        let package = format!("[package]\nname = \"outside-{name}\"\nedition = \"2024\"\n");
        write(&format!("{name}/Cargo.toml"), &format!("{package}[dependencies]\n{dependency}\n"));
        write(&format!("{name}/src/main.rs"), program);
    }
    // One at a time: together they would share features, and so hide a feature that a crate must enable itself.
    for (name, ..) in CRATES {
        let output = Command::new(env!("CARGO"))
            .args(["check", "--offline", "--quiet", "--package", &format!("outside-{name}"), "--target-dir"])
            .arg(target)
            .current_dir(home.path())
            .output()
            .expect("cargo runs");
        assert!(output.status.success(), "{name}:\n{}", String::from_utf8_lossy(&output.stderr));
    }
}
