//! Reading of bundles: the base class of `unweight.Bundle`.

use std::path::PathBuf;

use pyo3::{
    exceptions::PyValueError,
    prelude::*,
    types::{PyBytes, PyDict},
};
use unweight_format::bundle::{self, BundleError, TensorHandle};

use crate::{
    dfloat11,
    error::{not_opened, raised},
    packed::at_mut,
    pool::on_pool,
    report::to_python,
};

/// The base class of `unweight.Bundle`. Immutable, so several threads may use it at once.
#[pyclass(frozen, subclass, module = "unweight._native")]
pub struct Bundle {
    bundle: bundle::Bundle,
    path: PathBuf,
    /// The absolute form of `path`, which stays valid when the process changes its directory.
    folder: PathBuf,
}

#[pymethods]
impl Bundle {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        // The path is made absolute because files next to the weights are opened later. An empty path cannot be, and
        // stays an error.
        let folder = std::path::absolute(&path).unwrap_or_else(|_| path.clone());
        let bundle = on_pool(py, || bundle::Bundle::open_weights(&folder))?.map_err(|error| match error {
            BundleError::NotABundle { .. } => dfloat11::not_a_bundle(py, &folder).unwrap_or_else(|| raised(py, &error)),
            error => not_opened(py, &error),
        })?;
        Ok(Self { bundle, path, folder })
    }

    #[getter]
    fn path(&self) -> PathBuf {
        self.path.clone()
    }

    #[getter]
    fn _folder(&self) -> PathBuf {
        self.folder.clone()
    }

    #[getter]
    fn profile(&self) -> String {
        self.bundle.manifest().options.profile.to_string()
    }

    #[getter]
    fn manifest_digest(&self) -> String {
        self.bundle.manifest().manifest_digest.to_string()
    }

    #[getter]
    fn weights_digest(&self) -> String {
        self.bundle.weights_digest().to_string()
    }

    /// Returns one dict per tensor, in the order of files and of the data in each file.
    fn _rows<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        self.bundle.tensors().map(|tensor| row(py, tensor)).collect()
    }

    /// Returns the dict of one tensor.
    #[pyo3(signature = (name, *, file=None))]
    fn _row<'py>(&self, py: Python<'py>, name: &str, file: Option<&str>) -> PyResult<Bound<'py, PyDict>> {
        row(py, self.tensor(py, name, file)?)
    }

    /// Returns whether the model is loaded from this file, and not, say, training checkpoints in a subdirectory.
    fn is_of_model(&self, file: &str) -> bool {
        self.bundle.is_of_model(file)
    }

    /// Returns the report of `unweight inspect --json`.
    fn _inspect<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let manifest = self.bundle.manifest();
        let report = PyDict::new(py);
        report.set_item("creator", &manifest.creator)?;
        report.set_item("format_version", format!("{}.{}", manifest.version.major, manifest.version.minor))?;
        report.set_item("options", to_python(py, &manifest.options)?)?;
        report.set_item("manifest_digest", manifest.manifest_digest.to_string())?;
        report.set_item("tensors", self._rows(py)?)?;
        let sum = |bytes: fn(TensorHandle<'_>) -> u64| self.bundle.tensors().map(bytes).sum::<u64>();
        report.set_item("original_bytes", sum(|tensor| tensor.original_bytes()))?;
        report.set_item("stored_bytes", sum(|tensor| tensor.entry().stored_bytes()))?;
        // Damage to attachments does not damage the weights, so it is left to `verify`.
        let attached = self.bundle.attached().ok().flatten();
        let kernels = attached.as_ref().map_or_else(Vec::new, |attached| attached.kernels().to_vec());
        report.set_item("attached_kernels", to_python(py, &kernels)?)?;
        report.set_item("attached_plan", attached.is_some_and(|attached| attached.plan().is_some()))?;
        Ok(report.into_any())
    }

    /// Returns the original bytes of a tensor, checked against their digest.
    #[pyo3(signature = (name, *, file=None))]
    fn read<'py>(&self, py: Python<'py>, name: &str, file: Option<&str>) -> PyResult<Bound<'py, PyBytes>> {
        let tensor = self.tensor(py, name, file)?;
        let bytes = usize::try_from(tensor.original_bytes())?;
        // Python allocates the bytes, so that a lack of memory raises an exception.
        PyBytes::new_with(py, bytes, |out| decode(py, tensor, out))
    }

    /// Decodes a tensor into the caller's memory, as `read`.
    #[pyo3(signature = (name, address, nbytes, *, file=None))]
    fn decode_into(
        &self,
        py: Python<'_>,
        name: &str,
        address: usize,
        nbytes: usize,
        file: Option<&str>,
    ) -> PyResult<()> {
        let tensor = self.tensor(py, name, file)?;
        let expected = tensor.original_bytes();
        if expected != nbytes as u64 {
            return Err(PyValueError::new_err(format!(
                "tensor '{name}' has {expected} bytes, but the buffer has {nbytes}"
            )));
        }
        if nbytes > 0 && address == 0 {
            return Err(PyValueError::new_err("the buffer's address is 0; pass the address of CPU memory"));
        }
        // SAFETY: the caller promises `nbytes` writable bytes at `address` that nothing else uses (contract in
        // `_native.pyi`).
        decode(py, tensor, unsafe { at_mut(address, nbytes) })
    }

    /// Returns whether a part of a tensor can be read without the rest; otherwise `decode_part_into` reads all.
    #[pyo3(signature = (name, *, file=None))]
    fn reads_parts(&self, py: Python<'_>, name: &str, file: Option<&str>) -> PyResult<bool> {
        let entry = self.tensor(py, name, file)?.entry();
        Ok(entry.sections.iter().any(|section| !section.blocks.is_empty()))
    }

    /// Decodes ranges of rows and columns of a matrix into `memory`, the address and size of a buffer. Returns the
    /// number of stored bytes that were read.
    #[pyo3(signature = (name, rows, cols, memory, *, file=None))]
    fn decode_part_into(
        &self,
        py: Python<'_>,
        name: &str,
        rows: (usize, usize),
        cols: (usize, usize),
        memory: (usize, usize),
        file: Option<&str>,
    ) -> PyResult<u64> {
        let (rows, cols, (address, nbytes)) = (rows.0..rows.1, cols.0..cols.1, memory);
        let tensor = self.tensor(py, name, file)?;
        let part = on_pool(py, || tensor.decode_part(rows, cols))?;
        let part = part.map_err(|error| match error {
            BundleError::PartOfNoMatrix { .. } | BundleError::PartOutside { .. } => {
                PyValueError::new_err(error.to_string())
            }
            error => raised(py, &error),
        })?;
        if part.bytes.len() != nbytes || address == 0 {
            let expected = part.bytes.len();
            let message = format!(
                "the part of tensor '{name}' has {expected} bytes, but the buffer at {address:#x} has {nbytes}"
            );
            return Err(PyValueError::new_err(message));
        }
        // SAFETY: the caller promises `nbytes` writable bytes at `address` that nothing else uses (contract in
        // `_native.pyi`); `part.bytes` has the same size and is local to this function.
        py.detach(|| unsafe { std::ptr::copy_nonoverlapping(part.bytes.as_ptr(), address as *mut u8, nbytes) });
        Ok(part.read_bytes)
    }

    /// Returns the bytes of a file next to the weights, checked against their digest; `None` if the bundle has no such
    /// file. Raises an error above `limit` bytes.
    #[pyo3(signature = (name, *, limit=64 << 20))]
    fn copied<'py>(&self, py: Python<'py>, name: &str, limit: u64) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let bytes = on_pool(py, || self.bundle.copied(name, limit))?.map_err(|error| raised(py, &error))?;
        Ok(bytes.map(|bytes| PyBytes::new(py, &bytes)))
    }
}

impl Bundle {
    /// Returns a tensor by its name, and its file if several files have the name.
    pub fn tensor(&self, py: Python<'_>, name: &str, file: Option<&str>) -> PyResult<TensorHandle<'_>> {
        let tensor = match file {
            Some(file) => self.bundle.tensor_in(file, name),
            None => self.bundle.tensor(name),
        };
        tensor.map_err(|error| raised(py, &error))
    }
}

fn decode(py: Python<'_>, tensor: TensorHandle<'_>, out: &mut [u8]) -> PyResult<()> {
    on_pool(py, || tensor.decode_into(out))?.map_err(|error| raised(py, &error))
}

/// Returns a tensor's dict, with the keys of the command line's reports.
fn row<'py>(py: Python<'py>, tensor: TensorHandle<'_>) -> PyResult<Bound<'py, PyDict>> {
    let entry = tensor.entry();
    let elements: u64 = entry.shape.iter().map(|&extent| extent as u64).product();
    let stored = entry.stored_bytes();
    let row = PyDict::new(py);
    row.set_item("file", tensor.file())?;
    row.set_item("name", &entry.name)?;
    row.set_item("role", entry.role.to_string())?;
    row.set_item("layer", entry.layer)?;
    row.set_item("dtype", entry.dtype.to_string())?;
    row.set_item("shape", &entry.shape)?;
    row.set_item("encoding", entry.encoding.to_string())?;
    row.set_item("reason", &entry.reason)?;
    row.set_item("elements", elements)?;
    // Never 0 by overflow: opening the bundle has checked the shapes.
    row.set_item("original_bytes", entry.original_bytes().unwrap_or(0))?;
    row.set_item("stored_bytes", stored)?;
    row.set_item("bits_per_element", if elements == 0 { 0.0 } else { stored as f64 * 8.0 / elements as f64 })?;
    Ok(row)
}
