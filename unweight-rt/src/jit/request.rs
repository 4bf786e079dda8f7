//! The input of a compiler, and the identity of a compiler.

use std::fmt;

use serde::{Deserialize, Serialize};
use unweight_codegen::{CodegenError, ExternalSource, Source, VariantSpec, spec::Arch};

/// A kernel to compile: one entry point, and all headers that it can include.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CompileRequest {
    /// Canonical name of the variant: symbol, cache directory and log line. ASCII letters, digits, `_`; at most 160
    /// bytes.
    pub name: String,
    /// The CUDA source.
    pub source: String,
    /// Pairs of a name, as in `#include "name"`, and a text.
    pub headers: Vec<(String, String)>,
    /// Compiler options in addition to those of [`CompileRequest::canonical_options`].
    pub options: Vec<String>,
    /// Real architecture, such as `sm_90a`.
    pub arch: String,
}

impl CompileRequest {
    /// Creates the request for a variant: its rendered source with all headers that it includes.
    pub fn render(spec: &VariantSpec) -> Result<Self, CodegenError> {
        Ok(CompileRequest::of(unweight_codegen::render(spec)?, spec.arch))
    }

    /// Creates the request for a kernel from another crate.
    pub fn external(kernel: &ExternalSource) -> Result<Self, CodegenError> {
        Ok(CompileRequest::of(kernel.render()?, kernel.arch))
    }

    fn of(source: Source, arch: Arch) -> Self {
        let to_owned = |text: &&str| (*text).to_owned();
        Self {
            name: source.name,
            source: source.text,
            headers: source.headers.iter().map(|(name, text)| (to_owned(name), to_owned(text))).collect(),
            options: source.options,
            arch: arch.compiler_name().to_owned(),
        }
    }

    /// Returns every option that can change the compiler's output, in order.
    ///
    /// A spill is a warning in the log, not an error: a newer compiler that spills a little still runs models. Tests
    /// reject spills.
    pub fn canonical_options(&self) -> Vec<String> {
        let mut options = vec![
            format!("--gpu-architecture={}", self.arch),
            "--std=c++17".to_owned(),
            "--ptxas-options=--warn-on-spills".to_owned(),
        ];
        for option in &self.options {
            if !options.contains(option) {
                options.push(option.clone());
            }
        }
        options
    }

    /// Returns the file name of the source for the compiler.
    pub(crate) fn file_name(&self) -> String {
        format!("{}.cu", self.name)
    }

    /// Returns the name if it is valid as a symbol and a directory; else why it is not.
    pub(crate) fn checked_name(&self) -> Result<&str, String> {
        let fits = !self.name.is_empty()
            && self.name.len() <= 160
            && self.name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        if fits {
            Ok(&self.name)
        } else {
            Err(format!("kernel name {:?}: expected 1 to 160 of A-Z, a-z, 0-9 and _ (it names a directory)", self.name))
        }
    }
}

/// The identity of a compiler. Compilers with equal identities produce equal bytes for equal requests.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CompilerId {
    /// The name of the compiler, `nvrtc`.
    pub name: String,
    /// The compiler's version, `major.minor`.
    pub version: String,
    /// Distinguishes builds of one version; may be empty.
    pub build: String,
}

impl fmt::Display for CompilerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.name, self.version)?;
        if !self.build.is_empty() {
            write!(f, "-{}", self.build)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> CompileRequest {
        CompileRequest {
            name: "uw_k".to_owned(),
            source: "one\ntwo\nthree\nfour\nfive\n".to_owned(),
            headers: vec![("unweight/h.cuh".to_owned(), "h1\nh2\n".to_owned())],
            options: vec!["--std=c++17".to_owned(), "-DX=1".to_owned()],
            arch: "sm_90a".to_owned(),
        }
    }

    #[test]
    fn options_are_canonical() {
        assert_eq!(
            request().canonical_options(),
            ["--gpu-architecture=sm_90a", "--std=c++17", "--ptxas-options=--warn-on-spills", "-DX=1"]
        );
    }

    #[test]
    fn names_that_would_leave_the_folder_are_refused() {
        for name in ["", "a/b", "..", "a b", "a.b", &"x".repeat(161)] {
            let request = CompileRequest { name: name.to_owned(), ..request() };
            assert!(request.checked_name().is_err(), "{name}");
        }
        assert_eq!(request().checked_name(), Ok("uw_k"));
    }
}
