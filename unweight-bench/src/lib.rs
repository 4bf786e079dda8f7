//! Measures kernels and whole decode steps next to cuBLAS in the same run.
//!
//! The measurements follow four rules:
//! - **Weights come from memory.** Each launch of a graph uses the next of several copies of the weights: at least
//!   [`Timing::min_copies`] copies, with [`Timing::rotate_bytes`] bytes in all. The L2 cache (50-60 MB) therefore never
//!   holds the next copy.
//! - **Contenders are interleaved.** A round launches every contender's graph once. Above batch 256 the GPU is
//!   power-limited, so a contender that ran first on a cool GPU would look better.
//! - **The device never waits for the host.** All graphs of a round are enqueued behind a launch that is not measured.
//! - **Outputs are checked first.** Before timing, outputs are filled with NaN, computed and compared with cuBLAS's.
//!
//! A graph node costs about 0.9 us on an H200 for every contender. The reported times include this cost.

pub mod attention;
mod data;
mod decode;
mod error;
mod kernels;
pub mod kv;
mod matmul;
mod options;
pub mod oracle;
mod rivals;
mod speculate;
mod stress;
mod tables;
mod timing;
mod tuned;

pub use data::{halves, normal_bf16, relative_error};
pub use decode::{DecodeModel, DecodeOptions, DecodeReport, EngineRow, PartRow, StepRow, bench_decode};
pub use error::BenchError;
pub use kernels::{BenchOptions, bench_kernels};
pub use matmul::{LLAMA_8B_LAYER, MatmulOptions, bench_matmul};
pub use rivals::{RivalsOptions, bench_rivals};
pub use speculate::{SpeculateReport, bench_speculate};
pub use stress::{Plant, StressOptions, StressReport, StressRow, stress};
pub use tables::{BATCHES, Figure, Tables, bench_encoders, bench_tables};
pub use timing::{Report, Row, Timing};
pub use tuned::TunedRow;
