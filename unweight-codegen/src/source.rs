//! A rendered kernel with everything that its compilation needs.

use crate::error::LintError;
use std::collections::BTreeMap;
use unweight_format::Digest;

/// A translation unit: equal specs have equal bytes on every machine.
///
/// It depends on no path and no clock: `text`, `headers` and `options` alone determine the compiled code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The variant's canonical name, which is also the entry point.
    pub name: String,
    /// The rendered `.cu`.
    pub text: String,
    /// `(name, text)` of every header that `text` includes, directly or not, sorted by name. Names are those of the
    /// `#include` lines.
    pub headers: Vec<(&'static str, &'static str)>,
    /// Compiler options that the meaning of the text depends on, in canonical order. Options for diagnostics are up to
    /// the compiler.
    pub options: Vec<String>,
}

impl Source {
    /// Returns a digest of everything that determines the compiled code: the text, every included header, and the
    /// options.
    ///
    /// ```
    /// # use unweight_codegen::render;
    /// let mut source = render(&"uw_sm90a_norm_t256".parse()?)?;
    /// let before = source.digest();
    /// source.headers[0].1 = "// another text";
    /// assert_ne!(source.digest(), before);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn digest(&self) -> Digest {
        let texts = [self.name.as_str(), self.text.as_str()].into_iter();
        let headers = self.headers.iter().flat_map(|(name, text)| [*name, *text]);
        digest_of(texts.chain(headers).chain(self.options.iter().map(String::as_str)))
    }
}

/// Digests each part after its length, so that different lists never have the same bytes.
pub(crate) fn digest_of<'a>(parts: impl Iterator<Item = &'a str>) -> Digest {
    let mut all = Vec::new();
    for part in parts {
        all.extend_from_slice(&(part.len() as u64).to_le_bytes());
        all.extend_from_slice(part.as_bytes());
    }
    Digest::of(&all)
}

/// An `#include "name"` line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Include {
    /// Line number, counted from 1.
    pub line: usize,
    /// The text between the quotes.
    pub name: String,
}

/// Returns the includes of a text. A system header is an error, because NVRTC runs without an include path.
///
/// Skips lines that are compiled only with `UW_CPU`: a host compiler sees them when it runs the kernels on a CPU.
pub(crate) fn includes(file: &str, text: &str) -> Result<Vec<Include>, LintError> {
    let mut found = Vec::new();
    // One entry per open conditional: (is it about UW_CPU, does it hide its lines from the device compiler).
    let mut open: Vec<(bool, bool)> = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let Some(directive) = line.trim_start().strip_prefix('#').map(str::trim_start) else { continue };
        let (word, rest) = directive.split_once(char::is_whitespace).unwrap_or((directive, ""));
        let rest = rest.split("//").next().unwrap_or("").trim();
        match word {
            "ifdef" => open.push((rest == "UW_CPU", rest == "UW_CPU")),
            "ifndef" => open.push((rest == "UW_CPU", false)),
            "if" => open.push((false, false)),
            "else" => {
                if let Some((true, is_hidden)) = open.last_mut() {
                    *is_hidden = !*is_hidden;
                }
            }
            "endif" => {
                open.pop();
            }
            "include" if !open.iter().any(|(_, is_hidden)| *is_hidden) => {
                let name = rest.strip_prefix('"').and_then(|quoted| quoted.split_once('"'));
                let Some((name, _)) = name else {
                    return Err(LintError::at(
                        file,
                        index + 1,
                        format!("#include {rest}: a system header; kernels include \"unweight/...\" only"),
                    ));
                };
                found.push(Include { line: index + 1, name: name.to_owned() });
            }
            _ => {}
        }
    }
    Ok(found)
}

/// Returns the header with this name, from this crate or from `extra_headers`.
pub(crate) fn header(
    name: &str,
    extra_headers: &[(&'static str, &'static str)],
) -> Option<(&'static str, &'static str)> {
    let headers = unweight_templates::headers();
    let found = headers.binary_search_by_key(&name, |(header, _)| header).ok().map(|index| headers[index]);
    found.or_else(|| extra_headers.iter().find(|(header, _)| *header == name).copied())
}

/// Returns the headers that `text` includes, directly or not, sorted by name; `extra_headers` belong to another crate.
pub(crate) fn closure(
    file: &str,
    text: &str,
    extra_headers: &[(&'static str, &'static str)],
) -> Result<Vec<(&'static str, &'static str)>, LintError> {
    let mut found_headers: BTreeMap<&'static str, &'static str> = BTreeMap::new();
    let mut open: Vec<(String, Include)> =
        includes(file, text)?.into_iter().map(|include| (file.to_owned(), include)).collect();
    while let Some((file, Include { line, name })) = open.pop() {
        let Some((name, text)) = header(&name, extra_headers) else {
            return Err(LintError::at(
                &file,
                line,
                format!("#include \"{name}\" is not a header in templates/include"),
            ));
        };
        if found_headers.insert(name, text).is_none() {
            open.extend(includes(name, text)?.into_iter().map(|include| (name.to_owned(), include)));
        }
    }
    Ok(found_headers.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn includes_are_read_as_a_preprocessor_would() {
        let text = "#include \"a.cuh\"\n  #  include \"b.cuh\"  // why\n// #include \"no.cuh\"\n#ifdef UW_CPU\n#include <vector>\n#else\n#include \"c.cuh\"\n#endif\n#if 1\n#include \"d.cuh\"\n#endif\n#ifndef UW_CPU\n#else\n#include <map>\n#endif\n";
        let found: Vec<_> = includes("x", text).unwrap().into_iter().map(|i| (i.line, i.name)).collect();
        assert_eq!(found, [(1, "a.cuh".into()), (2, "b.cuh".into()), (7, "c.cuh".into()), (10, "d.cuh".into())]);
        assert!(includes("x", "#include <vector>\n").unwrap_err().to_string().contains("system header"));
    }

    #[test]
    fn include_closure_is_sorted_and_complete() {
        let (name, _) = unweight_templates::headers()[0];
        let found_headers = closure("x", &format!("#include \"{name}\"\n"), &[]).unwrap();
        assert!(found_headers.iter().any(|(header, _)| *header == name));
        assert!(found_headers.windows(2).all(|pair| pair[0].0 < pair[1].0));
        let missing = closure("x", "\n#include \"unweight/none.cuh\"\n", &[]).unwrap_err();
        assert_eq!((missing.file.as_str(), missing.line), ("x", 2));
    }
}
