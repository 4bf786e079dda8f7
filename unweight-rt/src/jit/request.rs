//! What a compiler is given, and what tells compilers apart.

use std::fmt;

use serde::{Deserialize, Serialize};
use unweight_codegen::{CodegenError, ExternalSource, Source, VariantSpec, spec::Arch};

/// A kernel to compile: one entry point, and every header that it can include.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CompileRequest {
    /// Canonical name of the variant: symbol, cache folder and log line. ASCII letters, digits, `_`; at most 160 bytes.
    pub name: String,
    /// The CUDA source.
    pub source: String,
    /// Name as in `#include "name"`, and text.
    pub headers: Vec<(String, String)>,
    /// Compiler options beyond those of [`CompileRequest::canonical_options`].
    pub options: Vec<String>,
    /// Real architecture, such as `sm_90a`.
    pub arch: String,
}

impl CompileRequest {
    /// The request for a variant: its rendered source, with every header that it reaches.
    pub fn render(spec: &VariantSpec) -> Result<CompileRequest, CodegenError> {
        Ok(CompileRequest::of(unweight_codegen::render(spec)?, spec.arch))
    }

    /// The request for a kernel from another crate.
    pub fn external(kernel: &ExternalSource) -> Result<CompileRequest, CodegenError> {
        Ok(CompileRequest::of(kernel.render()?, kernel.arch))
    }

    fn of(source: Source, arch: Arch) -> CompileRequest {
        let own = |text: &&str| (*text).to_owned();
        CompileRequest {
            name: source.name,
            source: source.text,
            headers: source.headers.iter().map(|(name, text)| (own(name), own(text))).collect(),
            options: source.options,
            arch: arch.compiler_name().to_owned(),
        }
    }

    /// Every option that reaches the compiler and can change its output, in order.
    ///
    /// A spill is a warning in the log, not an error: a newer compiler that spills a little still runs models. The
    /// tests refuse spills.
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

    /// What the compiler calls the source.
    pub(crate) fn file_name(&self) -> String {
        format!("{}.cu", self.name)
    }

    /// The name as it stands, if it can be a symbol and a folder; else what is wrong with it.
    pub(crate) fn checked_name(&self) -> Result<&str, String> {
        let fits = !self.name.is_empty()
            && self.name.len() <= 160
            && self.name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        if fits {
            Ok(&self.name)
        } else {
            Err(format!("kernel name {:?}: expected 1 to 160 of A-Z, a-z, 0-9 and _ (it becomes a folder)", self.name))
        }
    }
}

/// The identity of a compiler. Two compilers with equal identities give equal bytes for equal requests.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CompilerId {
    /// The name of the compiler, `nvrtc`.
    pub name: String,
    /// Version of the compiler, `major.minor`.
    pub version: String,
    /// Identifies builds of one version; may be empty.
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
