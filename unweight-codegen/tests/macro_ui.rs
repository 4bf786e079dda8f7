//! `#[unweight_variant]` as a user sees it: every rule has a program that breaks it, with the compiler's words beside
//! it. Here and not beside the attribute: tests of a crate of macros are built for the machine that builds, and with
//! them a second time everything that they use.
//!
//! `TRYBUILD=overwrite cargo test -p unweight-codegen --test macro_ui` accepts new messages; read them before you
//! commit them.

#[test]
fn ui_programs_compile_or_fail_as_expected() {
    let cases = trybuild::TestCases::new();
    cases.pass("tests/macro_ui/pass/*.rs");
    cases.compile_fail("tests/macro_ui/fail/*.rs");
}

/// A program without its `.stderr` would be accepted by whatever it prints, and an orphan `.stderr` checks nothing.
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
