//! What `#[unweight_variant]` rejects: for every rule a program that violates it, with the compiler's message. These
//! tests are not in the macro crate, because its tests and all their dependencies would be built a second time.
//!
//! `TRYBUILD=overwrite cargo test -p unweight-codegen --test macro_ui -- --ignored` accepts new messages; read them
//! before you commit them. The crate and its dependencies are built once more, so only `.ci/nightly` runs them.

#[test]
#[ignore = "builds the crate once more: .ci/nightly"]
fn broken_rules_have_their_messages() {
    trybuild::TestCases::new().compile_fail("tests/macro_ui/fail/*.rs");
}

/// Without a `.stderr` file any message of a program would be accepted, and an orphan `.stderr` file checks nothing.
#[test]
fn every_ui_program_has_a_message() {
    let names = |extension: &str| {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/macro_ui/fail");
        let files = std::fs::read_dir(folder).expect("tests/macro_ui/fail is readable");
        let mut names: Vec<_> = files
            .map(|file| file.expect("an entry of tests/macro_ui/fail").path())
            .filter(|path| path.extension().is_some_and(|found| found == extension))
            .filter_map(|path| path.file_stem().map(|stem| stem.to_string_lossy().into_owned()))
            .collect();
        names.sort();
        names
    };
    assert_eq!(names("rs"), names("stderr"));
}
