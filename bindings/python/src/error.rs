//! Converts errors of `unweight-format` to the exceptions of `unweight.errors`.

use std::{error::Error, path::Path};

use pyo3::{
    exceptions::PyRuntimeError,
    prelude::*,
    types::{PyDict, PyType},
};
use unweight_format::bundle::{BundleError, ErrorClass, Remedy};

/// The attributes of an exception next to its message.
#[derive(Default)]
struct Location {
    file: Option<String>,
    tensor: Option<String>,
    offset: Option<u64>,
    errno: Option<i32>,
}

/// Returns the exception for an error; its message includes the causes and the remedy.
pub fn raised(py: Python<'_>, error: &BundleError) -> PyErr {
    with_hint(py, error, error.remedy().and_then(hint))
}

/// Returns the exception for a bundle that `Bundle` cannot open, as [`raised`]. `Bundle` takes no base.
pub fn not_opened(py: Python<'_>, error: &BundleError) -> PyErr {
    match error.remedy() {
        Some(Remedy::PassBase) => {
            with_hint(py, error, Some("restore the model first: decompress(BUNDLE, MODEL, base=DIR)"))
        }
        _ => raised(py, error),
    }
}

fn with_hint(py: Python<'_>, error: &BundleError, hint: Option<&str>) -> PyErr {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        message.push_str(": ");
        message.push_str(&error.to_string());
        cause = error.source();
    }
    if let Some(next) = hint {
        message.push_str("; ");
        message.push_str(next);
    }
    new(py, class(error), &message, &location(error)).unwrap_or_else(|error| error)
}

/// Returns an exception of the class `class` of `unweight.errors`, with a message and no attributes.
pub fn plain(py: Python<'_>, class: &str, message: &str) -> PyErr {
    new(py, class, message, &Location::default()).unwrap_or_else(|error| error)
}

fn new(py: Python<'_>, class: &str, message: &str, location: &Location) -> PyResult<PyErr> {
    let class = py.import("unweight.errors")?.getattr(class)?.cast_into::<PyType>().map_err(PyErr::from)?;
    let keywords = PyDict::new(py);
    keywords.set_item("file", &location.file)?;
    keywords.set_item("tensor", &location.tensor)?;
    keywords.set_item("offset", location.offset)?;
    let exception = class.call((message,), Some(&keywords))?;
    if let Some(errno) = location.errno {
        exception.setattr("errno", errno)?;
    }
    Ok(PyErr::from_value(exception))
}

/// The name of the exception's class. Callers distinguish errors by what they would do about them.
fn class(error: &BundleError) -> &'static str {
    match error {
        BundleError::NotABundle { .. } | BundleError::Unfinished { .. } => "NotABundleError",
        BundleError::NewerVersion { .. } => "NewerVersionError",
        BundleError::OldVersion { .. } => "OldVersionError",
        BundleError::OutputExists { .. } | BundleError::NotReplaceable { .. } | BundleError::OtherOutput { .. } => {
            "OutputExistsError"
        }
        BundleError::UnknownTensor { .. } | BundleError::AmbiguousTensor { .. } | BundleError::UnknownFile { .. } => {
            "UnknownNameError"
        }
        BundleError::Io { .. }
        | BundleError::NoRoom { .. }
        | BundleError::DiskFull { .. }
        | BundleError::Output { .. }
        | BundleError::SetAside { .. }
        | BundleError::Read { .. } => "StorageError",
        BundleError::NotADirectory { .. }
        | BundleError::NoWeights { .. }
        | BundleError::Unstorable { .. }
        | BundleError::Header { .. }
        | BundleError::Index { .. }
        | BundleError::IndexDisagrees { .. }
        | BundleError::ReservedTensor { .. }
        | BundleError::ReservedFile { .. }
        | BundleError::NameTaken { .. }
        | BundleError::SourceChanged { .. }
        | BundleError::Rank { .. }
        | BundleError::ManifestTooLarge { .. }
        | BundleError::TooLarge { .. } => "ModelError",
        other => match other.class() {
            ErrorClass::Mismatch => "DamagedError",
            ErrorClass::Interrupted => "CancelledError",
            _ => "UnweightError",
        },
    }
}

fn location(error: &BundleError) -> Location {
    let of = |path: &Path| Some(path.display().to_string());
    let none = Location::default;
    match error {
        BundleError::Io { path, source, .. } => Location { file: of(path), errno: source.raw_os_error(), ..none() },
        BundleError::DiskFull { path, source, .. } => {
            Location { file: of(path), errno: source.raw_os_error(), ..none() }
        }
        BundleError::Read { path, offset, source } => {
            Location { file: of(path), offset: Some(*offset), errno: source.raw_os_error(), ..none() }
        }
        BundleError::Output { file, source } => {
            Location { file: Some(file.clone()), errno: source.raw_os_error(), ..none() }
        }
        BundleError::ReservedTensor { path, tensor } | BundleError::Rank { path, tensor, .. } => {
            Location { file: of(path), tensor: Some(tensor.clone()), ..none() }
        }
        BundleError::NoRoom { path, .. }
        | BundleError::NotADirectory { path }
        | BundleError::NoWeights { path }
        | BundleError::OutputExists { path }
        | BundleError::ForeignPartial { path, .. }
        | BundleError::NotReplaceable { path, .. }
        | BundleError::OtherOutput { path, .. }
        | BundleError::Locked { path, .. }
        | BundleError::NameTaken { path }
        | BundleError::Unstorable { path, .. }
        | BundleError::Header { path, .. }
        | BundleError::Index { path, .. }
        | BundleError::IndexDisagrees { path, .. }
        | BundleError::ReservedFile { path }
        | BundleError::SourceChanged { path, .. }
        | BundleError::TooLarge { path, .. }
        | BundleError::Memory { path, .. }
        | BundleError::PlanFile { path, .. }
        | BundleError::NotABundle { path }
        | BundleError::Unfinished { path, .. }
        | BundleError::NewerVersion { path, .. }
        | BundleError::OldVersion { path, .. }
        | BundleError::OtherConfig { path, .. }
        | BundleError::Manifest { path, .. }
        | BundleError::Interrupted { partial: path } => Location { file: of(path), ..none() },
        BundleError::SetAside { old, source, .. } => Location { file: of(old), errno: source.raw_os_error(), ..none() },
        BundleError::OutputOverlaps { output, .. } => Location { file: of(output), ..none() },
        BundleError::Encoder { file, tensor, .. } => {
            Location { file: Some(file.clone()), tensor: Some(tensor.clone()), ..none() }
        }
        BundleError::Codec { file, tensor, offset, .. } => {
            Location { file: Some(file.clone()), tensor: Some(tensor.clone()), offset: Some(*offset), errno: None }
        }
        BundleError::Mismatch { file, tensor, offset, .. } => Location {
            file: Some(file.clone()),
            tensor: tensor.as_deref().map(Into::into),
            offset: Some(*offset),
            errno: None,
        },
        BundleError::HeaderTooLarge { file, .. }
        | BundleError::Unproven { file }
        | BundleError::FileSize { file, .. }
        | BundleError::MissingFile { file }
        | BundleError::ExtraFile { file }
        | BundleError::HalfAttached { file } => Location { file: Some(file.clone()), ..none() },
        BundleError::UnknownTensor { name } | BundleError::AmbiguousTensor { name, .. } => {
            Location { tensor: Some(name.clone()), ..none() }
        }
        BundleError::UnknownFile { name } => Location { file: Some(name.clone()), ..none() },
        _ => none(),
    }
}

/// A remedy in terms of this package's arguments; `None` for one that does not apply in Python.
fn hint(remedy: Remedy) -> Option<&'static str> {
    Some(match remedy {
        Remedy::Overwrite => "choose another name, or replace it with force=True",
        Remedy::Resume => "call again with resume=True to continue",
        Remedy::ResumeMaking => "repeat the call that was making it with resume=True to continue",
        Remedy::FreeAndResume => "free some space, then call again with resume=True",
        Remedy::PassBase => "pass base=DIR",
        Remedy::FewerThreads => "pass a smaller threads=, or allow more processes (ulimit -u)",
        _ => return None,
    })
}

/// The exception for a failure to start threads. To get this error, threads are started by those functions of `std` and
/// `rayon` that do not panic.
pub fn no_threads(py: Python<'_>, error: &dyn Error) -> PyErr {
    plain(py, "UnweightError", &format!("cannot start threads: {error}; allow more processes (ulimit -u)"))
}

/// The exception for a worker that panicked, which is a bug.
pub fn panicked() -> PyErr {
    PyRuntimeError::new_err("unweight panicked; this is a bug, please report it")
}
