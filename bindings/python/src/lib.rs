//! The extension module `unweight._native`: the Rust part of the Python package `unweight`.
//!
//! The Python part in `python/unweight` wraps it; `_native.pyi` documents it for Python.

mod bundle;
mod decode;
mod dfloat11;
mod error;
mod packed;
mod pool;
mod progress;
mod report;
mod runtime;
mod work;

use pyo3::prelude::*;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    pool::follow_forks(module.py())?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<bundle::Bundle>()?;
    module.add_class::<packed::Packed>()?;
    module.add_class::<runtime::Registration>()?;
    module.add_class::<runtime::Runtime>()?;
    module.add_function(wrap_pyfunction!(runtime::has_kernels, module)?)?;
    module.add_function(wrap_pyfunction!(work::compress, module)?)?;
    module.add_function(wrap_pyfunction!(work::decompress, module)?)?;
    module.add_function(wrap_pyfunction!(work::plan, module)?)?;
    module.add_function(wrap_pyfunction!(work::verify, module)?)?;
    module.add_function(wrap_pyfunction!(packed::pack, module)?)?;
    module.add_function(wrap_pyfunction!(packed::arena_head, module)?)?;
    module.add_function(wrap_pyfunction!(packed::escapes_digest, module)?)?;
    module.add_function(wrap_pyfunction!(packed::unpack, module)?)
}
