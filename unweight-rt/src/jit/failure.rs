//! The report of a source that does not compile.

use std::{fmt, path::PathBuf};

use crate::jit::{
    nvrtc::NvrtcError,
    request::{CompileRequest, CompilerId},
};

/// A source that the compiler rejected, with all data to find the cause.
#[derive(Debug, thiserror::Error)]
pub struct CompileFailure {
    /// The name of the kernel.
    pub name: String,
    /// The compiler, if known.
    pub compiler: Option<CompilerId>,
    /// The error of NVRTC.
    pub error: NvrtcError,
    /// The source around each failing line, at most [`CompileFailure::EXCERPTS`] excerpts.
    pub excerpts: Vec<Excerpt>,
    /// The directory that contains source, headers, options and log, if it could be written.
    pub kept: Option<PathBuf>,
}

/// Lines of a source around a line that the compiler reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excerpt {
    /// The name of the source or header.
    pub file: String,
    /// The line number, from 1.
    pub line: usize,
    /// The compiler's message.
    pub message: String,
    /// The line and two lines on either side: number and text.
    pub lines: Vec<(usize, String)>,
}

impl CompileFailure {
    /// Returns the stable code of this error; docs/reference/errors.md lists all.
    pub fn code(&self) -> &'static str {
        "kernel-compile-failed"
    }

    /// The maximum number of excerpts. The first error is nearly always the cause of the others.
    pub const EXCERPTS: usize = 3;

    pub(crate) fn new(request: &CompileRequest, compiler: Option<CompilerId>, error: NvrtcError) -> Self {
        let excerpts = excerpts(request, error.log());
        Self { name: request.name.clone(), compiler, error, excerpts, kept: None }
    }

    /// Returns the compiler's whole log.
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
        // Without a position in a source, the log is the only information.
        if self.excerpts.is_empty() && !self.log().is_empty() {
            write!(f, "\n{}", self.log().trim_end())?;
        }
        match &self.kept {
            Some(folder) => write!(f, "\nsource, headers, options and full log: {}", folder.display()),
            None => write!(f, "\n(source and log could not be saved; the cache directory is not writable or not used)"),
        }
    }
}

/// Returns excerpts at the positions that a log reports as errors: `file(line): error...: message`.
fn excerpts(request: &CompileRequest, log: &str) -> Vec<Excerpt> {
    let source_name = request.file_name();
    log.lines()
        .filter_map(|text| {
            let (location, message) = text.split_once("): ")?;
            if !(message.starts_with("error") || message.starts_with("catastrophic error")) {
                return None;
            }
            let (file, line) = location.rsplit_once('(')?;
            let line: usize = line.parse().ok().filter(|line| *line > 0)?;
            let body = if file == source_name {
                &request.source
            } else {
                &request.headers.iter().find(|(name, _)| name == file)?.1
            };
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
