//! Errors as the command line prints them: a code, what failed and where, the causes, and the next step.

use std::{
    error::Error,
    fmt,
    io::{self, IsTerminal, Write},
    path::Path,
};

use super::{
    printable::{one_line, printable},
    signals,
};
#[cfg(feature = "hub")]
use crate::hub::HubError;
use serde::Serialize;
#[cfg(any(feature = "hub", feature = "sign"))]
use unweight::format::bundle::Problem;
use unweight::format::{
    UnknownName,
    bundle::{BundleError, ErrorClass, Remedy, io_code},
};
#[cfg(feature = "dfloat11")]
use unweight::rivals::dfloat11::ConvertError;
#[cfg(feature = "serve")]
use unweight::serve::{CpuError, ServeError};
#[cfg(feature = "text")]
use unweight::text::TextError;
#[cfg(feature = "gpu")]
use unweight::{
    codegen::{CodegenError, plan::Infeasible, spec::ParseNameError},
    engine::{
        AdmissionError, EngineError, OptionError,
        budget::BudgetError,
        raw::pipelines::tune::{JournalError, TuneError},
    },
    model::{BindError, ConfigError, reference::ReferenceError, sampling::OutOfRange},
    rt::{
        self, DeviceError,
        env::EnvError,
        raw::{
            choose::table::TableError,
            jit::{cache::Unusable, cubin::CubinError},
        },
    },
};

/// An error that ends a command.
#[derive(Debug)]
pub struct Failure {
    /// The stable code; docs/reference/errors.md lists all.
    code: &'static str,
    message: String,
    help: Option<String>,
    cause: Option<Box<dyn Error + Send + Sync>>,
    class: Class,
    reported: bool,
}

/// The class of a failure, which decides the exit status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// Data is damaged or does not match: exit status 1.
    Mismatch,
    /// The command could not do its work: exit status 2.
    Failed,
    /// A signal ended the command: exit status 128 plus its number.
    Interrupted,
    /// The reader closed stdout: exit status 0, without a message.
    StdoutClosed,
}

impl Class {
    /// The exit status.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Mismatch => 1,
            Self::Failed => 2,
            Self::Interrupted => 128 + signals::signal().unwrap_or(2),
            Self::StdoutClosed => 0,
        }
    }
}

/// A failure as `--json` prints it.
#[derive(Debug, Serialize)]
pub struct ErrorReport {
    /// `mismatch`, `failed` or `interrupted`.
    pub class: Class,
    /// [Error code](errors.md).
    pub code: &'static str,
    /// What failed, and where.
    pub message: String,
    /// Causes, outermost first.
    pub causes: Vec<String>,
    /// Next step.
    pub help: Option<String>,
}

/// The result of a command.
pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    /// Creates the failure for an output that exists. With `--resume`, `complete` says what to do if an earlier run
    /// made it.
    pub fn output_exists(output: &Path, resumes: bool, complete: &str) -> Self {
        let failure = Self::from(BundleError::OutputExists { path: output.to_owned() });
        match resumes {
            true => failure.with_help(format!("if an earlier run made it, it is complete: {complete}")),
            false => failure,
        }
    }

    /// Creates a failure with a stable code and the next step.
    pub fn new(code: &'static str, message: impl Into<String>, help: impl Into<String>) -> Self {
        let (message, help) = (message.into(), Some(help.into()));
        Self { code, message, help, cause: None, class: Class::Failed, reported: false }
    }

    /// Converts an I/O error on `what`.
    pub fn io(what: impl fmt::Display) -> impl FnOnce(io::Error) -> Self {
        move |error| Self {
            code: io_code(&error),
            message: what.to_string(),
            help: io_help(&error).map(str::to_owned),
            cause: Some(error.into()),
            class: Class::Failed,
            reported: false,
        }
    }

    /// Converts an error whose message contains the next step.
    pub fn other(error: impl Coded) -> Self {
        Self::from_error(error, Class::Failed)
    }

    /// Converts an error with its remedy as the next step.
    #[cfg(feature = "gpu")]
    pub fn remedied(error: impl Coded, remedy: rt::Remedy) -> Self {
        let Some(help) = runtime_remedy_help(remedy) else { return Self::other(error) };
        // The message stays whole, because the help comes from the remedy.
        Self { message: error.to_string(), help: Some(help.to_owned()), ..Self::other(error) }
    }

    /// Creates a failure for damaged or differing data.
    pub fn mismatch(code: &'static str, message: impl Into<String>, help: impl Into<String>) -> Self {
        Self { class: Class::Mismatch, ..Self::new(code, message, help) }
    }

    /// Creates a failure for work that a signal ended.
    pub fn interrupted(message: impl Into<String>) -> Self {
        Self { class: Class::Interrupted, help: None, ..Self::new("interrupted", message, "") }
    }

    /// Converts the failure of a command that writes an archive or a file to stdout. If the reader closed stdout early,
    /// its output is incomplete.
    pub fn of_stream(self) -> Self {
        match self.class {
            Class::StdoutClosed => {
                let message = "stdout was closed before all bytes were written";
                let help = "discard the incomplete output, and let the reader read to the end";
                Self { cause: self.cause, ..Failure::new("output-closed", message, help) }
            }
            _ => self,
        }
    }

    /// Replaces the help.
    pub fn with_help(self, help: impl Into<String>) -> Self {
        Self { help: Some(help.into()), ..self }
    }

    /// Marks a failure that the command's report on stdout already explains: `--json` prints no second object.
    pub fn reported(self) -> Self {
        Self { reported: true, ..self }
    }

    /// Whether the report already explains the failure; see [`Failure::reported`].
    pub fn is_reported(&self) -> bool {
        self.reported
    }

    /// The class of the failure.
    pub fn class(&self) -> Class {
        self.class
    }

    fn from_error(error: impl Coded, class: Class) -> Self {
        let (message, help) = split_help(error.to_string());
        let source_help = || error.source()?.downcast_ref::<io::Error>().and_then(io_help).map(str::to_owned);
        Self {
            code: error.code(),
            message,
            help: help.or_else(|| code_help(error.code()).map(str::to_owned)).or_else(source_help),
            cause: error.source().map(|cause| Box::new(CauseChain::of(cause)) as _),
            class,
            reported: false,
        }
    }

    /// Returns the error object for `--json`.
    pub fn report(&self) -> ErrorReport {
        ErrorReport {
            class: self.class,
            code: self.code,
            message: self.message.clone(),
            causes: causes(self),
            help: self.help.clone(),
        }
    }
}

/// Splits a message of the libraries, "what failed; next step", into message and help. Lines with details that follow
/// stay in the message.
fn split_help(text: String) -> (String, Option<String>) {
    let (first, details) = text.split_once('\n').unwrap_or((&text, ""));
    match (text.rsplit_once("; "), first.rsplit_once("; ")) {
        (Some((message, help)), _) if !help.contains('\n') => (message.to_owned(), Some(help.to_owned())),
        (_, Some((message, help))) => (format!("{message}\n{details}"), Some(help.to_owned())),
        _ => (text, None),
    }
}

/// Returns the next step after an I/O error, if there is one.
fn io_help(error: &io::Error) -> Option<&'static str> {
    Some(match error.kind() {
        io::ErrorKind::NotFound => "check the path",
        io::ErrorKind::PermissionDenied => "ask the owner for access, or choose another location",
        io::ErrorKind::ReadOnlyFilesystem => "choose a writable location",
        io::ErrorKind::IsADirectory => "give a file",
        io::ErrorKind::NotADirectory => "give a directory",
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "free some space, then run it again",
        io::ErrorKind::FileTooLarge => "raise the limit on file sizes (ulimit -f), or choose another file system",
        _ => return None,
    })
}

/// An error with a stable code, which docs/reference/errors.md lists.
pub trait Coded: Error + Send + Sync + 'static {
    /// Returns the code.
    fn code(&self) -> &'static str;
}

macro_rules! coded {
    ($($error:ty),+ $(,)?) => {$(
        impl Coded for $error {
            fn code(&self) -> &'static str {
                // The inherent method.
                <$error>::code(self)
            }
        }
    )+};
}

coded!(BundleError, UnknownName);

#[cfg(feature = "dfloat11")]
coded!(ConvertError);

#[cfg(feature = "text")]
coded!(TextError);

#[cfg(feature = "hub")]
coded!(HubError);

#[cfg(feature = "hub")]
impl From<HubError> for Failure {
    fn from(error: HubError) -> Self {
        let class = match error {
            HubError::Contents { .. } => Class::Mismatch,
            HubError::Interrupted { .. } => Class::Interrupted,
            _ => Class::Failed,
        };
        let failure = Self::from_error(error, class);
        // Names and reasons come from the server.
        let help = failure.help.as_deref().map(|help| one_line(help).into_owned());
        Self { message: one_line(&failure.message).into_owned(), help, ..failure }
    }
}

#[cfg(feature = "gpu")]
coded!(
    OptionError,
    BindError,
    CodegenError,
    ConfigError,
    CubinError,
    DeviceError,
    EngineError,
    EnvError,
    BudgetError,
    Infeasible,
    JournalError,
    OutOfRange,
    ParseNameError,
    ReferenceError,
    AdmissionError,
    TableError,
    TuneError,
    Unusable,
    rt::Error,
);

#[cfg(feature = "serve")]
coded!(CpuError);

#[cfg(feature = "serve")]
impl<E: Error + Send + Sync + 'static> Coded for ServeError<E> {
    fn code(&self) -> &'static str {
        Self::code(self)
    }
}

impl Coded for glob::GlobError {
    fn code(&self) -> &'static str {
        io_code(self.error())
    }
}

/// A chain of causes as text, because an error only lends its sources.
#[derive(Debug)]
struct CauseChain {
    text: String,
    next: Option<Box<CauseChain>>,
}

impl CauseChain {
    fn of(error: &dyn Error) -> Self {
        Self { text: error.to_string(), next: error.source().map(|next| Box::new(Self::of(next))) }
    }
}

impl fmt::Display for CauseChain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Error for CauseChain {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.next.as_deref().map(|next| next as _)
    }
}

fn causes(error: &dyn Error) -> Vec<String> {
    let mut texts = Vec::new();
    let mut cause = error.source();
    while let Some(error) = cause {
        texts.push(error.to_string());
        cause = error.source();
    }
    texts
}

impl From<BundleError> for Failure {
    fn from(error: BundleError) -> Self {
        let class = match error.class() {
            ErrorClass::Mismatch => Class::Mismatch,
            ErrorClass::Interrupted => Class::Interrupted,
            _ => Class::Failed,
        };
        if matches!(&error, BundleError::Output { source, .. } if source.kind() == io::ErrorKind::BrokenPipe) {
            return io::Error::from(io::ErrorKind::BrokenPipe).into();
        }
        let help = error.remedy().and_then(bundle_remedy_help).or_else(|| code_help(error.code()));
        let failure = Self::from_error(error, class);
        let help = help.map(Into::into).or(failure.help).map(|help: String| one_line(&help).into_owned());
        // Names in the message come from untrusted files.
        Self { message: one_line(&failure.message).into_owned(), help, ..failure }
    }
}

#[cfg(feature = "dfloat11")]
impl From<ConvertError> for Failure {
    fn from(error: ConvertError) -> Self {
        let class = match error {
            // `convert` never replaces output.
            ConvertError::Bundle(error @ BundleError::OutputExists { .. }) => {
                return Self { help: Some("choose another name".into()), ..error.into() };
            }
            ConvertError::Bundle(error) => return error.into(),
            _ if error.class() == ErrorClass::Mismatch => Class::Mismatch,
            _ => Class::Failed,
        };
        let failure = Self::from_error(error, class);
        // Names in the message come from untrusted files.
        let help = failure.help.as_deref().map(|help| one_line(help).into_owned());
        Self { message: one_line(&failure.message).into_owned(), help, ..failure }
    }
}

/// Fails if there is a problem with a bundle, or with its source.
#[cfg(any(feature = "hub", feature = "sign"))]
pub fn refuse(problem: Option<&Problem>, help: &str) -> Result<()> {
    let Some(problem) = problem else { return Ok(()) };
    let code = if problem.in_source { "source-differs" } else { "bundle-damaged" };
    Err(Failure::mismatch(code, one_line(&problem.message), help))
}

/// Returns the next step after errors whose message has none.
fn code_help(code: &str) -> Option<&'static str> {
    Some(match code {
        "tensor-not-found" => "`unweight inspect BUNDLE` lists the tensors of a bundle",
        "tensor-name-reserved" => "a bundle cannot be compressed again: decompress it first",
        "bundle-file-missing" | "bundle-file-size-mismatch" | "manifest-invalid" => {
            "download the bundle again, or compress the model again"
        }
        "safetensors-header-too-large" => {
            "give a safetensors file; if this one is a Git LFS pointer, run `git lfs pull`"
        }
        code if code.starts_with("safetensors-") => "download the file again, or write it again",
        "index-invalid" => "download the file again",
        "unknown-dtype" => "update unweight, or convert the tensor",
        "dfloat11-config-invalid" => "give a DFloat11 directory; `unweight decompress` restores a bundle",
        "option-out-of-range" | "sampling-option-out-of-range" => "`--help` lists the ranges",
        "file-size-limit" => {
            "raise the limit on file sizes (ulimit -f) or choose another file system; \
             --resume continues an interrupted run"
        }
        _ => return None,
    })
}

/// Returns the next step for a remedy, in terms of the command line.
fn bundle_remedy_help(remedy: Remedy) -> Option<&'static str> {
    Some(match remedy {
        Remedy::Overwrite => "choose another name, or replace it with --force",
        Remedy::Resume => "run again with --resume to continue",
        Remedy::ResumeMaking => "run the command that wrote it again with --resume",
        Remedy::FreeAndRepeat => "free some space, then run it again",
        Remedy::FreeAndResume => "free some space, then run again with --resume",
        Remedy::CpuEncoder => "run again with --device cpu",
        Remedy::PassBase => {
            "pass it with --base DIR; commands without that option need the model: unweight decompress BUNDLE -o MODEL \
             --base DIR"
        }
        Remedy::FewerThreads => "lower --threads, or raise the limit on processes (ulimit -u)",
        _ => return None,
    })
}

/// Converts an error of writing to stdout.
impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        let class = if error.kind() == io::ErrorKind::BrokenPipe { Class::StdoutClosed } else { Class::Failed };
        Self {
            code: io_code(&error),
            message: "cannot write to stdout".to_owned(),
            help: None,
            cause: Some(error.into()),
            class,
            reported: false,
        }
    }
}

/// Converts errors of the runtime, whose remedies `runtime_remedy_help` turns into commands.
#[cfg(feature = "gpu")]
macro_rules! from_runtime {
    ($($error:ty),+ $(,)?) => {$(
        impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                match error.remedy() {
                    Some(remedy) => Self::remedied(error, remedy),
                    None => Self::other(error),
                }
            }
        }
    )+};
}

#[cfg(feature = "gpu")]
from_runtime!(EngineError, rt::Error, DeviceError);

/// Returns the next step for a remedy, in terms of the command line; `None` if the error's message contains it.
#[cfg(feature = "gpu")]
fn runtime_remedy_help(remedy: rt::Remedy) -> Option<&'static str> {
    Some(match remedy {
        rt::Remedy::ClearKernelCache => "`unweight cache clear` removes the kernels of another version",
        rt::Remedy::CompileKernels => {
            "run `unweight kernels compile` on a machine with NVRTC, and copy the cache or attach the kernels"
        }
        rt::Remedy::VerifyBundle => "`unweight verify` finds the damaged tensor",
        rt::Remedy::MeasureTable => "`unweight-bench matmul --save-table FILE` measures a table",
        _ => return None,
    })
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for Failure {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.cause.as_deref().map(|cause| cause as _)
    }
}

/// The maximum number of lines of a message on a terminal.
const LINES_MAX: usize = 10;

/// Cuts a message to [`LINES_MAX`] lines; `--json` has all.
fn shortened(message: &str) -> String {
    let lines: Vec<&str> = message.lines().collect();
    match lines.len().checked_sub(LINES_MAX) {
        // A single extra line is as short as the note about it.
        Some(more @ 2..) => format!("{}\n  and {more} more lines; --json has all", lines[..LINES_MAX].join("\n")),
        _ => message.to_owned(),
    }
}

impl Failure {
    /// Prints `error[code]:`, `cause:` and `help:` lines on stderr.
    pub fn print(&self) {
        let colour = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        // stderr may be closed; the exit status still reports the failure.
        let _ = io::stderr().write_all(self.text(colour).as_bytes());
    }

    /// Returns what [`Failure::print`] prints.
    pub(super) fn text(&self, colour: bool) -> String {
        let (on, off) = if colour { ("\x1b[1;31m", "\x1b[0m") } else { ("", "") };
        let mut text = format!("{on}error[{}]:{off} {}\n", self.code, printable(&shortened(&self.message)));
        let lines = causes(self).into_iter().map(|cause| ("cause", cause));
        for (what, line) in lines.chain(self.help.clone().map(|help| ("help", help))) {
            text += &format!("  {what}: {}\n", printable(&line));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_list_is_shortened_before_the_help() {
        let message = |lines: usize| (0..lines).map(|line| line.to_string()).collect::<Vec<_>>().join("\n");
        let text = Failure::new("usage", message(50), "do this").text(false);
        assert!(text.ends_with("\n9\n  and 40 more lines; --json has all\n  help: do this\n"), "{text}");
        assert!(Failure::new("usage", message(11), "do this").text(false).contains("\n10\n  help"));
        assert_eq!(Failure::new("usage", message(50), "").report().message, message(50));
    }

    #[test]
    fn the_last_part_of_a_message_is_the_help() {
        for (text, message, help) in [
            ("a; b", "a", Some("b")),
            ("a; b; c", "a; b", Some("c")),
            ("a (b; c); d\n  tried e: f\n  tried g: h", "a (b; c)\n  tried e: f\n  tried g: h", Some("d")),
            ("a:\n- b\n- c; d", "a:\n- b\n- c", Some("d")),
            ("a:\n- b; c\n- d", "a:\n- b; c\n- d", None),
        ] {
            assert_eq!(split_help(text.to_owned()), (message.to_owned(), help.map(str::to_owned)), "{text}");
        }
    }

    #[test]
    fn a_failure_is_printed_with_its_cause_and_its_help() {
        let failure = Failure::io("some/file")(io::ErrorKind::NotFound.into());
        let expected = "error[path-not-found]: some/file\n  cause: entity not found\n  help: check the path\n";
        assert_eq!(failure.text(false), expected);
        assert!(failure.text(true).starts_with("\x1b[1;31merror[path-not-found]:\x1b[0m some/file\n"));
        assert_eq!(Failure::interrupted("\x1b[2J").text(false), "error[interrupted]: \\u{1b}[2J\n");
    }
}
