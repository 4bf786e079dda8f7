//! Times of kernels, next to cuBLAS in the same run.
//!
//! What makes a number mean something here:
//! - **Weights come from memory.** Each launch of a graph walks through copies of the weights, at least
//!   [`Timing::min_copies`] of them and [`Timing::rotate_bytes`] in all, so the second-level cache (50-60 MB) never
//!   holds the next one.
//! - **Contenders take turns.** A round launches every contender's graph once; above batch 256 the card is
//!   power-limited, and the contender that ran first and cool would look better.
//! - **The device never waits for the host.** All of a round is enqueued behind a launch that is not measured.
//! - **What was measured was right.** Outputs are filled with NaN, computed, and held against cuBLAS before the clock
//!   starts.
//!
//! A graph node costs about 0.9 us on an H200, for every contender alike; it is part of the times.

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
pub use tables::{BATCHES, Figure, Tables, bench_tables};
pub use timing::{Report, Row, Timing};
pub use tuned::TunedRow;
