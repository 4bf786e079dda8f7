//! DFloat11 directories as sources of `compress` and `plan`: decoded to BF16 in a temporary directory first, as the
//! command line does.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU32, Ordering},
};

use pyo3::prelude::*;
use unweight_format::bundle::BundleError;
use unweight_rivals::dfloat11::{self, ConvertError};

use crate::{
    error::{plain, raised},
    progress::run_with_progress,
};

/// A model to compress.
pub struct Source {
    path: PathBuf,
    /// The directory to remove afterwards, if the model was decoded.
    scratch: Option<PathBuf>,
}

impl Source {
    /// Returns `source`, or the BF16 model decoded from it, next to `output` or else in the temporary directory.
    pub fn find(
        py: Python<'_>,
        source: PathBuf,
        output: Option<&Path>,
        progress: Option<&Py<PyAny>>,
    ) -> PyResult<Self> {
        let mut found = Self { path: source, scratch: None };
        if !py.detach(|| dfloat11::is_model(&found.path)).map_err(|error| converting(py, &error))? {
            return Ok(found);
        }
        let home = match output {
            Some(output) => {
                let absolute = std::path::absolute(output)?;
                absolute.parent().unwrap_or(&absolute).to_path_buf()
            }
            None => env::temp_dir(),
        };
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!(".unweight-dfloat11-{}-{}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let scratch = home.join(name);
        fs::create_dir_all(&home)?;
        fs::create_dir(&scratch)?;
        found.scratch = Some(scratch.clone());
        let decoded = scratch.join("bf16");
        run_with_progress(py, progress, |progress| match dfloat11::restore(&found.path, &decoded, false, progress) {
            // A cancelled conversion keeps nothing, because the scratch directory is removed.
            Err(ConvertError::Bundle(BundleError::Interrupted { .. })) => Err(BundleError::Cancelled),
            Err(ConvertError::Bundle(error)) => Err(error),
            other => Ok(other),
        })?
        .map_err(|error| converting(py, &error))?;
        found.path = decoded;
        Ok(found)
    }

    /// The directory of the model.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        if let Some(scratch) = &self.scratch {
            // A failure leaves a directory with a recognizable name; a destructor cannot report it.
            let _ = fs::remove_dir_all(scratch);
        }
    }
}

/// Returns the error for a directory that is a DFloat11 model and not a bundle; `None` if it is not one.
pub fn not_a_bundle(py: Python<'_>, folder: &Path) -> Option<PyErr> {
    let is_model = py.detach(|| dfloat11::is_model(folder)).unwrap_or(true);
    let message = || {
        format!(
            "{}: a DFloat11 model, not a bundle; compress it with unweight.compress, which reads DFloat11",
            folder.display()
        )
    };
    is_model.then(|| plain(py, "NotABundleError", &message()))
}

/// Returns an error if the directory that a bundle is compared with is a DFloat11 model.
pub fn refuse_as_original(py: Python<'_>, folder: &Path) -> PyResult<()> {
    if !py.detach(|| dfloat11::is_model(folder)).unwrap_or(false) {
        return Ok(());
    }
    let folder = folder.display();
    let message = format!("{folder}: a DFloat11 model; compare with the BF16 model that it was made from");
    Err(plain(py, "ModelError", &message))
}

fn converting(py: Python<'_>, error: &ConvertError) -> PyErr {
    match error {
        ConvertError::Bundle(error) => raised(py, error),
        error => plain(py, "ModelError", &error.to_string()),
    }
}
