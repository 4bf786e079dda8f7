//! The actions that resolve errors, as values: a library does not know its user's command line.

use crate::jit::toolchain::Library;

/// The action that resolves an error. A program phrases it for its user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Remedy {
    /// Remove the compiled kernels: they belong to another version.
    ClearKernelCache,
    /// Install a library, or set the variable that names its path.
    Install(Library),
    /// Compile the missing kernels on a machine with a compiler, or allow compilation here.
    CompileKernels,
    /// Compare the bundle's digests: the data are damaged.
    VerifyBundle,
    /// Measure the table of fastest variants again on this machine.
    MeasureTable,
}
