//! The libraries of this process.

use std::sync::OnceLock;

use crate::{
    env::Env,
    jit::{
        error::Error,
        toolchain::{Found, Library, MissingLibrary, find},
    },
};

/// Runs [`find`](crate::jit::toolchain::find) once with the process's own environment, and remembers the result.
///
/// Call it before anything in cudarc that belongs to `library`.
pub fn require(library: Library) -> Result<&'static Found, Error> {
    static FOUND: [OnceLock<Result<Found, MissingLibrary>>; Library::ALL.len()] =
        [const { OnceLock::new() }; Library::ALL.len()];
    let env = Env::process()?;
    FOUND[library as usize].get_or_init(|| find(library, env)).as_ref().map_err(|error| error.clone().into())
}
