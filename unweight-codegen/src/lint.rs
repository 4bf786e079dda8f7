//! Checks a rendered source before a compiler sees it.
//!
//! The rules are about *generation*, so that a mistake in a template is reported as one, with its line: ASCII only, no
//! tabs, no leftovers of the template language, one entry point with the right name, and includes of headers that
//! exist.

pub use crate::error::LintError;
use crate::source::{Include, header, includes};

/// Delimiters of the template language, which CUDA does not use.
const DELIMITERS: [&str; 6] = ["<%", "%>", "<$", "$>", "<#", "#>"];

/// Checks the text of a kernel whose entry point must be named `entry`.
pub fn kernel(entry: &str, text: &str) -> Result<(), LintError> {
    kernel_with(entry, text, &[])
}

/// Like [`kernel`], for a kernel that may include headers of another crate.
pub(crate) fn kernel_with(
    entry: &str,
    text: &str,
    extra_headers: &[(&'static str, &'static str)],
) -> Result<(), LintError> {
    plain_text_with(entry, text, extra_headers)?;
    let entries = text.matches("__global__").count();
    if entries != 1 {
        return Err(LintError::at(entry, 0, format!("{entries} entry points (__global__), expected exactly 1")));
    }
    let symbol = text.split("__global__").nth(1).is_some_and(|after| {
        let head = after.split_once('(').map_or("", |(_, rest)| rest); // after `__launch_bounds__(`
        head.split_once(')')
            .is_some_and(|(_, rest)| rest.trim_start().strip_prefix(entry).is_some_and(|r| r.starts_with('(')))
    });
    if !symbol {
        return Err(LintError::at(entry, 0, format!("the entry point is not named {entry}")));
    }
    if !text.contains("extern \"C\" __global__") {
        return Err(LintError::at(
            entry,
            0,
            "the entry point is not extern \"C\", so its symbol would be mangled".into(),
        ));
    }
    Ok(())
}

/// Checks the text of a header or kernel: characters and includes.
pub fn plain_text(file: &str, text: &str) -> Result<(), LintError> {
    plain_text_with(file, text, &[])
}

/// Like [`plain_text`], for a text that may include headers of another crate.
pub(crate) fn plain_text_with(
    file: &str,
    text: &str,
    extra_headers: &[(&'static str, &'static str)],
) -> Result<(), LintError> {
    if !text.ends_with('\n') {
        return Err(LintError::at(file, text.lines().count(), "no newline at the end".into()));
    }
    for (index, line) in text.lines().enumerate() {
        let line_number = index + 1;
        if let Some(bad) = line.chars().find(|c| !c.is_ascii()) {
            return Err(LintError::at(file, line_number, format!("{bad:?} (U+{:04X}) is not ASCII", u32::from(bad))));
        }
        if let Some(bad) = line.chars().find(char::is_ascii_control) {
            let name =
                if bad == '\t' { "a tab".to_owned() } else { format!("control character {:#04x}", u32::from(bad)) };
            return Err(LintError::at(file, line_number, format!("{name}; indent with spaces")));
        }
        if line.ends_with(' ') {
            return Err(LintError::at(file, line_number, "a space at the end of the line".into()));
        }
        if let Some(delimiter) = DELIMITERS.iter().find(|delimiter| line.contains(**delimiter)) {
            return Err(LintError::at(file, line_number, format!("template delimiter {delimiter} was not resolved")));
        }
    }
    for Include { line, name } in includes(file, text)? {
        if header(&name, extra_headers).is_none() {
            return Err(LintError::at(file, line, format!("#include \"{name}\" is not a header in templates/include")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str =
        "#include \"unweight/abi.cuh\"\nextern \"C\" __global__ void __launch_bounds__(32, 1) uw_x(int a) {}\n";

    #[test]
    fn a_good_kernel_passes() {
        assert_eq!(kernel("uw_x", GOOD), Ok(()));
    }

    #[test]
    fn every_lint_rule_rejects_a_violation() {
        let cases: [(&str, String, usize, &str); 12] = [
            ("tab", GOOD.replace("void ", "void\t"), 2, "a tab"),
            ("carriage return", GOOD.replace(" {}", " {\r}"), 2, "control character 0x0d"),
            ("not ASCII", GOOD.replace("int a", "int \u{e4}"), 2, "U+00E4"),
            ("variable", GOOD.replace("32", "<$ threads $>"), 2, "template delimiter <$"),
            ("block", GOOD.replace("{}", "{ %> }"), 2, "template delimiter %>"),
            ("trailing space", GOOD.replace("{}\n", "{} \n"), 2, "a space at the end"),
            ("last newline", GOOD.trim_end().into(), 2, "no newline"),
            ("unknown header", GOOD.replace("abi.cuh", "none.cuh"), 1, "is not a header"),
            ("system header", GOOD.replace("\"unweight/abi.cuh\"", "<cuda.h>"), 1, "system header"),
            ("other name", GOOD.replace("uw_x(", "uw_xy("), 0, "is not named uw_x"),
            ("two entries", format!("{GOOD}{GOOD}"), 0, "2 entry points"),
            ("mangled", GOOD.replace("extern \"C\" ", ""), 0, "mangled"),
        ];
        for (rule, text, line, what) in cases {
            let error = kernel("uw_x", &text).expect_err(rule);
            assert_eq!(error.line, line, "{rule}: {error}");
            assert!(error.to_string().contains(what), "{rule}: {error}");
        }
    }

    #[test]
    fn the_headers_of_this_build_pass() {
        for (name, text) in unweight_templates::headers() {
            if let Err(error) = plain_text(name, text) {
                panic!("{error}");
            }
        }
    }
}
