//! `compress`, `plan`, `decompress` and `verify`.
//!
//! `_work.py` passes their options as dicts with the field names of the structs here.

use std::{fmt::Display, path::PathBuf, str::FromStr};

use pyo3::{exceptions::PyValueError, prelude::*};
use unweight_format::{
    CodeLimit,
    bundle::{self, CompressOptions, DecompressOptions, Profile, Scope, Selection, VerifyAfter, VerifyOptions},
};

use crate::{
    dfloat11::{Source, refuse_as_original},
    pool::processors,
    progress::run_with_progress,
    report::to_python,
};

/// The options that `compress` and `plan` share.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct SharedOptions {
    profile: String,
    scope: Option<String>,
    code_limit: Option<u32>,
    include: Vec<String>,
    exclude: Vec<String>,
    skip: Vec<String>,
    plan_file: Option<PathBuf>,
    threads: Option<usize>,
}

/// The other options of `compress`.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Compress {
    ram_bytes: Option<u64>,
    resume: bool,
    force: bool,
    verify: String,
    sha256: bool,
    base: Option<PathBuf>,
}

/// The options of `decompress`.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Decompress {
    threads: Option<usize>,
    ram_bytes: Option<u64>,
    resume: bool,
    force: bool,
    base: Option<PathBuf>,
}

/// The options of `verify`.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Verify {
    against: Option<PathBuf>,
    skip: Vec<String>,
    quick: bool,
    threads: Option<usize>,
    ram_bytes: Option<u64>,
    key: Option<String>,
    base: Option<PathBuf>,
}

/// Parses the name of an enum's value; the error lists the valid names.
fn named<T: FromStr<Err: Display>>(name: &str) -> PyResult<T> {
    name.parse().map_err(|error: T::Err| PyValueError::new_err(error.to_string()))
}

/// The maximum of `threads`, more than any machine has. Starting threads cannot be cancelled, so a limit is needed.
const THREADS_MAX: usize = 1024;

fn threads(threads: Option<usize>) -> PyResult<Option<usize>> {
    match threads {
        Some(0) => Err(PyValueError::new_err("threads is 0; give 1 or more, or None for all processors")),
        Some(more) if more > THREADS_MAX => {
            let message = format!("threads is {more}; give {THREADS_MAX} or fewer, or None for all processors");
            Err(PyValueError::new_err(message))
        }
        // A count makes the call start its own threads. A forked child does not have the threads of a shared pool.
        other => Ok(Some(other.unwrap_or_else(processors))),
    }
}

impl SharedOptions {
    fn options(self) -> PyResult<CompressOptions> {
        let mut options = CompressOptions::new(named::<Profile>(&self.profile)?);
        if let Some(scope) = &self.scope {
            options = options.scope(named::<Scope>(scope)?);
        }
        if let Some(bits) = self.code_limit {
            let limit = CodeLimit::new(bits).map_err(|error| PyValueError::new_err(error.to_string()))?;
            options = options.code_limit(limit);
        }
        Ok(options
            .include(self.include)
            .exclude(self.exclude)
            .selection(Selection::default().skip(self.skip))
            .plan_file(self.plan_file)
            .threads(threads(self.threads)?))
    }
}

/// See `unweight.compress`.
#[pyfunction]
pub fn compress<'py>(
    py: Python<'py>,
    source: PathBuf,
    output: PathBuf,
    shared: SharedOptions,
    more: Compress,
    progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let options = shared
        .options()?
        .ram_bytes(more.ram_bytes)
        .resume(more.resume)
        .force(more.force)
        .verify(named::<VerifyAfter>(&more.verify)?)
        .sha256(more.sha256)
        .base(more.base);
    let source = Source::find(py, source, Some(&output), progress.as_ref())?;
    let report = run_with_progress(py, progress.as_ref(), |progress| {
        bundle::compress(source.path(), &output, &options, progress)
    })?;
    to_python(py, &report)
}

/// See `unweight.plan`.
#[pyfunction]
pub fn plan<'py>(py: Python<'py>, source: PathBuf, shared: SharedOptions) -> PyResult<Bound<'py, PyAny>> {
    let options = shared.options()?;
    let source = Source::find(py, source, None, None)?;
    let report = run_with_progress(py, None, |_| bundle::plan(source.path(), &options))?;
    to_python(py, &report)
}

/// See `unweight.decompress`.
#[pyfunction]
pub fn decompress<'py>(
    py: Python<'py>,
    path: PathBuf,
    output: PathBuf,
    more: Decompress,
    progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let options = DecompressOptions::default()
        .threads(threads(more.threads)?)
        .ram_bytes(more.ram_bytes)
        .resume(more.resume)
        .force(more.force)
        .base(more.base);
    let report =
        run_with_progress(py, progress.as_ref(), |progress| bundle::decompress(&path, &output, &options, progress))?;
    to_python(py, &report)
}

/// See `unweight.verify`.
#[pyfunction]
pub fn verify<'py>(
    py: Python<'py>,
    path: PathBuf,
    more: Verify,
    progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    if let Some(folder) = &more.against {
        refuse_as_original(py, folder)?;
    }
    let options = VerifyOptions::default()
        .against(more.against)
        .selection(Selection::default().skip(more.skip))
        .quick(more.quick)
        .threads(threads(more.threads)?)
        .ram_bytes(more.ram_bytes)
        .key(more.key)
        .base(more.base);
    let report = run_with_progress(py, progress.as_ref(), |progress| bundle::verify_with(&path, &options, progress))?;
    to_python(py, &report)
}
