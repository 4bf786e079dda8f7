//! What a compiler is given, what it returns, and how a failure is reported.
//!
//! [`Compiler`] is a trait so that the cache and everything around it can be tested where there is no compiler
//! (`FakeCompiler`, feature `fake`). [`NvrtcCompiler`] is the one that makes kernels.

use std::fmt;
use std::path::PathBuf;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};
use unweight_codegen::{ExternalSource, Source, VariantSpec, spec::Arch};

use crate::env::Env;
use crate::jit::cubin::{self, KernelResources};
use crate::jit::error::Error;
use crate::jit::nvrtc::{Nvrtc, NvrtcError};
use crate::jit::toolchain::{MissingLibrary, OldNvrtc};

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
    pub fn render(spec: &VariantSpec) -> Result<CompileRequest, Error> {
        Ok(CompileRequest::of(unweight_codegen::render(spec)?, spec.arch))
    }

    /// The request for a kernel from another crate.
    pub fn external(kernel: &ExternalSource) -> Result<CompileRequest, Error> {
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

/// Which compiler made an artifact. Two compilers with equal identities give equal bytes for equal requests.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CompilerId {
    /// `nvrtc`.
    pub name: String,
    /// Its version, `major.minor`.
    pub version: String,
    /// What tells builds of one version apart; may be empty.
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

/// What a compiler returns.
#[derive(Clone, Debug, PartialEq)]
pub struct Compiled {
    /// The binary for one architecture.
    pub cubin: Vec<u8>,
    /// What the compiler said, warnings included. Often empty.
    pub log: String,
    /// What the kernel needs of a multiprocessor.
    pub resources: KernelResources,
}

/// Turns sources into cubins.
pub trait Compiler: Send + Sync {
    /// The compiler's name and version. An error if this machine has no compiler.
    fn identity(&self) -> Result<CompilerId, Error>;

    /// Compiles one kernel. Called from several threads at a time.
    fn compile(&self, request: &CompileRequest) -> Result<Compiled, Error>;
}

/// NVRTC, looked for at the first use.
#[derive(Debug)]
pub struct NvrtcCompiler {
    env: Env,
    nvrtc: OnceLock<Result<Nvrtc, MissingLibrary>>,
}

impl NvrtcCompiler {
    /// Remembers where to look; loads nothing yet.
    pub fn new(env: &Env) -> NvrtcCompiler {
        NvrtcCompiler { env: env.clone(), nvrtc: OnceLock::new() }
    }

    /// The library, loaded on the first call.
    pub fn nvrtc(&self) -> Result<&Nvrtc, Error> {
        self.nvrtc.get_or_init(|| Nvrtc::find(&self.env)).as_ref().map_err(|missing| missing.clone().into())
    }
}

impl Compiler for NvrtcCompiler {
    fn identity(&self) -> Result<CompilerId, Error> {
        let nvrtc = self.nvrtc()?;
        Ok(CompilerId {
            name: "nvrtc".to_owned(),
            version: nvrtc.version().to_string(),
            build: nvrtc.build().to_owned(),
        })
    }

    fn compile(&self, request: &CompileRequest) -> Result<Compiled, Error> {
        let nvrtc = self.nvrtc()?;
        // Its own words for an architecture that it does not know name no next step.
        if let Some(arch) = Arch::of_compiler_name(&request.arch) {
            OldNvrtc::check(arch, nvrtc.version(), &nvrtc.found().path)?;
        }
        let output = nvrtc
            .compile(&file_name(request), &request.source, &request.headers, &request.canonical_options())
            .map_err(|error| CompileFailure::new(request, self.identity().ok(), error))?;
        let bad_cubin = |source| Error::Cubin { name: request.name.clone(), source };
        let info = cubin::read(&output.cubin).map_err(bad_cubin)?;
        let kernel = info.kernel(&request.name).map_err(bad_cubin)?;
        Ok(Compiled { resources: kernel.resources.clone(), cubin: output.cubin, log: output.log })
    }
}

fn file_name(request: &CompileRequest) -> String {
    format!("{}.cu", request.name)
}

/// A source that the compiler refused, with everything that is needed to see why.
#[derive(Debug, thiserror::Error)]
pub struct CompileFailure {
    /// The kernel.
    pub name: String,
    /// The compiler, if known.
    pub compiler: Option<CompilerId>,
    /// What failed.
    pub error: NvrtcError,
    /// The source around each failing line, at most [`CompileFailure::EXCERPTS`] of them.
    pub excerpts: Vec<Excerpt>,
    /// The folder where source, headers, options and log were kept, if they could be.
    pub kept: Option<PathBuf>,
}

/// Some lines of a source around one that the compiler complains about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excerpt {
    /// Name of the source or header.
    pub file: String,
    /// The line, from 1.
    pub line: usize,
    /// The compiler's message.
    pub message: String,
    /// The line and two on either side: number and text.
    pub lines: Vec<(usize, String)>,
}

impl CompileFailure {
    /// The stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        "kernel-compile-failed"
    }

    /// How many failing places are shown. The first is nearly always the cause of the others.
    pub const EXCERPTS: usize = 3;

    pub(crate) fn new(request: &CompileRequest, compiler: Option<CompilerId>, error: NvrtcError) -> CompileFailure {
        let excerpts = excerpts(request, error.log());
        CompileFailure { name: request.name.clone(), compiler, error, excerpts, kept: None }
    }

    /// The compiler's whole log.
    pub fn log(&self) -> &str {
        self.error.log()
    }
}

impl fmt::Display for CompileFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel {}: ", self.name)?;
        if let Some(compiler) = &self.compiler {
            write!(f, "{compiler}: ")?;
        }
        write!(f, "{}", self.error)?;
        for excerpt in &self.excerpts {
            write!(f, "\n{}:{}: {}", excerpt.file, excerpt.line, excerpt.message)?;
            for (number, text) in &excerpt.lines {
                let mark = if *number == excerpt.line { '>' } else { ' ' };
                write!(f, "\n{mark}{number:>5} | {text}")?;
            }
        }
        // Without a place in a source, the log itself is all there is to show.
        if self.excerpts.is_empty() && !self.log().is_empty() {
            write!(f, "\n{}", self.log().trim_end())?;
        }
        match &self.kept {
            Some(folder) => write!(f, "\nsource, headers, options and full log: {}", folder.display()),
            None => write!(f, "\n(source and log could not be kept; the cache folder is not writable or not used)"),
        }
    }
}

/// The places that a log names as errors: `file(line): error...: message`.
fn excerpts(request: &CompileRequest, log: &str) -> Vec<Excerpt> {
    let own = file_name(request);
    log.lines()
        .filter_map(|text| {
            let (place, message) = text.split_once("): ")?;
            if !(message.starts_with("error") || message.starts_with("catastrophic error")) {
                return None;
            }
            let (file, line) = place.rsplit_once('(')?;
            let line: usize = line.parse().ok().filter(|line| *line > 0)?;
            let body =
                if file == own { &request.source } else { &request.headers.iter().find(|(name, _)| name == file)?.1 };
            let first = line.saturating_sub(2).max(1);
            let lines = body
                .lines()
                .enumerate()
                .skip(first - 1)
                .take(line + 3 - first)
                .map(|(index, text)| (index + 1, text.to_owned()))
                .collect();
            Some(Excerpt { file: file.to_owned(), line, message: message.to_owned(), lines })
        })
        .take(CompileFailure::EXCERPTS)
        .collect()
}

#[cfg(any(test, feature = "fake"))]
pub use fake::FakeCompiler;

#[cfg(any(test, feature = "fake"))]
mod fake {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;

    /// A compiler that makes no kernels: bytes that depend on the request alone, and a count of the calls.
    ///
    /// For tests of the cache. What it returns is not a cubin and no driver would load it.
    #[derive(Debug)]
    pub struct FakeCompiler {
        version: String,
        delay: Duration,
        calls: AtomicUsize,
    }

    impl Default for FakeCompiler {
        fn default() -> Self {
            FakeCompiler::new("1.0", Duration::ZERO)
        }
    }

    impl FakeCompiler {
        /// One that claims this version and takes `delay` for each compile.
        pub fn new(version: &str, delay: Duration) -> FakeCompiler {
            FakeCompiler { version: version.to_owned(), delay, calls: AtomicUsize::new(0) }
        }

        /// How many times it was asked to compile.
        pub fn calls(&self) -> usize {
            self.calls.load(Ordering::SeqCst)
        }

        /// The bytes that it returns for `request`: 4096 or a few more.
        pub fn output(request: &CompileRequest) -> Vec<u8> {
            let mut bytes = format!("not a cubin: {}\n{}", request.name, request.source).into_bytes();
            bytes.resize(bytes.len().max(4096), b'.');
            bytes
        }
    }

    impl Compiler for FakeCompiler {
        fn identity(&self) -> Result<CompilerId, Error> {
            Ok(CompilerId { name: "fake".to_owned(), version: self.version.clone(), build: String::new() })
        }

        fn compile(&self, request: &CompileRequest) -> Result<Compiled, Error> {
            self.calls.fetch_add(1, Ordering::SeqCst);
            std::thread::sleep(self.delay);
            // So that failing compiles can be tested as well.
            if request.source.contains("#error") {
                let log = format!("{}.cu(1): error: #error directive\n", request.name);
                return Err(
                    CompileFailure::new(request, self.identity().ok(), NvrtcError::InvalidSource { log }).into()
                );
            }
            Ok(Compiled {
                cubin: FakeCompiler::output(request),
                log: String::new(),
                resources: KernelResources { registers: 32, ..KernelResources::default() },
            })
        }
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

    #[test]
    fn a_failure_shows_the_source_at_the_line_in_source_and_header() {
        let log = "uw_k.cu(3): error: identifier \"x\" is undefined\n  three\n  ^\n\n\
                   unweight/h.cuh(1): catastrophic error: no\n\
                   uw_k.cu(2): warning #177-D: unused\n\
                   elsewhere.h(1): error: not ours\n\
                   uw_k.cu(99): error: past the end\n2 errors detected";
        let failure = CompileFailure::new(&request(), None, NvrtcError::InvalidSource { log: log.to_owned() });
        assert_eq!(failure.excerpts.len(), 3);
        let text = failure.to_string();
        assert!(text.contains("uw_k.cu:3: error: identifier \"x\" is undefined"), "{text}");
        assert!(text.contains("     2 | two\n>    3 | three\n     4 | four"), "{text}");
        assert!(text.contains(">    1 | h1\n     2 | h2"), "{text}");
        assert!(!text.contains("177-D"), "{text}");
        assert_eq!(failure.log(), log);
    }

    #[test]
    fn log_without_locations_is_shown_in_full() {
        let log = "ptxas fatal: something".to_owned();
        let failure = CompileFailure::new(&request(), None, NvrtcError::InvalidSource { log });
        assert!(failure.to_string().contains("ptxas fatal: something"));
    }
}
