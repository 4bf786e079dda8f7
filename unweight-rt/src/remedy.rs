//! What to do about an error, as a value: a library does not know its user's command line.

use crate::jit::toolchain::Library;

/// The one thing to do about an error. A program says it in its own words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Remedy {
    /// Remove the compiled kernels: they are of another version.
    ClearKernelCache,
    /// Install a library, or say where it is.
    Install(Library),
    /// Compile the missing kernels where that is possible, or allow it here.
    CompileKernels,
    /// Compare the bundle's digests: its data are damaged.
    VerifyBundle,
    /// Measure the table of fastest variants anew on this machine.
    MeasureTable,
}
