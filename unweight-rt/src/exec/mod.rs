//! Execution contexts: one stream, with the memory and handles that its launches share.
//!
//! ```text
//! context     the stream with all of the below        workspace   partial sums and counters
//! cublas      a cuBLAS handle on the stream           operands    the checks that operations share
//! ```

pub mod context;
pub mod cublas;
pub(crate) mod operands;
pub(crate) mod workspace;

pub use self::context::ExecContext;
