//! Shared by the GPU tests: the device, contexts, guards around outputs.

use std::{
    sync::OnceLock,
    time::{SystemTime, UNIX_EPOCH},
};

pub use unweight_format::testing::{Random, Weights};
use unweight_format::{
    raw::{TileMetadata, huffman::CodedExponents},
    testing::{self, demo_model::DemoOptions},
};
use unweight_rt::{
    ContextSize, Device, DeviceBuffer, DeviceError, DeviceMatrix, ExecContext, KernelSet, LaunchError, Stream,
    env::Env, raw::weight::CodedSections,
};

/// Returns the GPU of this machine. Tests that use it are ignored by default; if they are run without a GPU, they fail.
pub fn gpu() -> &'static KernelSet {
    static GPU: OnceLock<KernelSet> = OnceLock::new();
    GPU.get_or_init(|| {
        let device = Device::open(0).unwrap_or_else(|error| panic!("this test needs a GPU: {error}"));
        KernelSet::open(&device, Env::process().expect("the environment"))
    })
}

pub fn stream(kernels: &KernelSet) -> Stream {
    kernels.device().stream().expect("a stream")
}

/// Sections of coded exponents, for tests that corrupt them.
#[derive(Clone)]
pub struct OwnedCoded {
    pub encoded_exp: Vec<u8>,
    pub row_lengths: Vec<u8>,
    pub tile_metadata: Vec<u8>,
    pub verbatim_exponents: Vec<u8>,
    pub palette: [u8; 16],
    pub code_lengths: [u8; 16],
}

impl OwnedCoded {
    pub fn of(exponents: &CodedExponents<Vec<u8>>) -> Self {
        Self {
            encoded_exp: exponents.encoded_exp().to_vec(),
            row_lengths: exponents.row_lengths().to_vec(),
            tile_metadata: exponents.tile_metadata().to_vec(),
            verbatim_exponents: exponents.verbatim_exponents().to_vec(),
            palette: exponents.code().palette().stored(),
            code_lengths: exponents.code().lengths(),
        }
    }

    pub fn view(&self) -> CodedSections<'_> {
        CodedSections {
            encoded_exp: &self.encoded_exp,
            row_lengths: &self.row_lengths,
            tile_metadata: &self.tile_metadata,
            verbatim_exponents: &self.verbatim_exponents,
            palette: self.palette,
            code_lengths: self.code_lengths,
        }
    }

    pub fn metadata(&mut self, tile: usize, change: impl Fn(&mut TileMetadata)) {
        let mut record = TileMetadata::read(&self.tile_metadata, tile);
        change(&mut record);
        self.tile_metadata[tile * TileMetadata::BYTES..][..TileMetadata::BYTES].copy_from_slice(&record.to_bytes());
    }
}

/// Guard bytes after every output of a test.
pub const GUARD: u8 = 0xa5;

/// Returns an execution context for launches that need no workspace.
pub fn context(stream: &Stream) -> ExecContext {
    ExecContext::new(stream, ContextSize::default()).expect("an execution context")
}

/// An output that can be filled, together with the guard after it.
pub trait Output {
    fn poison(&mut self, stream: &Stream);
    fn padding(&self, stream: &Stream) -> Vec<u8>;
}

impl<T: bytemuck::Pod> Output for DeviceBuffer<T> {
    fn poison(&mut self, stream: &Stream) {
        self.fill_bytes(stream, 0xff).expect("poison");
        self.fill_padding(stream, GUARD).expect("guard");
    }

    fn padding(&self, stream: &Stream) -> Vec<u8> {
        DeviceBuffer::padding(self, stream).expect("guard")
    }
}

impl Output for DeviceMatrix {
    fn poison(&mut self, stream: &Stream) {
        self.fill_bytes(stream, 0xff).expect("poison");
        self.fill_padding(stream, GUARD).expect("guard");
    }

    fn padding(&self, stream: &Stream) -> Vec<u8> {
        self.data().padding(stream).expect("guard")
    }
}

/// Fills an output with NaN (all ones), and the bytes after it with the guard.
pub fn poison(stream: &Stream, output: &mut impl Output) {
    output.poison(stream);
}

pub fn guard_is_intact(stream: &Stream, output: &impl Output, what: &str) {
    let written = output.padding(stream).iter().position(|byte| *byte != GUARD);
    assert_eq!(written, None, "{what} wrote past the end of its output");
}

/// Returns a seed that differs in every run. A failure prints it.
pub fn fresh() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64
}

/// Returns the error of a launch that must be rejected.
pub fn refused<T>(result: Result<T, DeviceError>) -> LaunchError {
    match result {
        Ok(_) => panic!("the call succeeded, but must be refused"),
        Err(error) => error.launch_error().cloned().unwrap_or_else(|| panic!("not a refusal: {error}")),
    }
}

/// Returns the message of an error that must come from the runtime, not from the driver.
pub fn launch_error<T>(result: Result<T, DeviceError>) -> Option<String> {
    match result {
        Ok(_) => None,
        Err(error @ DeviceError::Driver { .. }) => panic!("the driver failed: {error}"),
        Err(error) => Some(error.to_string()),
    }
}

/// Rounds to the nearest bf16, ties to even, through f32.
pub fn bf16(x: f64) -> u16 {
    testing::bf16(x as f32)
}

pub fn value(bits: u16) -> f64 {
    f64::from(f32::from_bits(u32::from(bits) << 16))
}

/// Checks that each element differs from its exact value by at most one rounding plus its slack.
pub fn close(got: &[u16], exact: impl Iterator<Item = (f64, f64)>, what: &str) {
    for (at, (got, (sum, slack))) in got.iter().zip(exact).enumerate() {
        let error = (value(*got) - sum).abs();
        assert!(error <= sum.abs() / 256.0 + slack, "{what}: element {at} is {}, not {sum}", value(*got));
    }
}

/// A small model whose matrices consist of whole tiles.
pub const WHOLE_TILES: DemoOptions = DemoOptions {
    layers: 3,
    hidden: 256,
    intermediate: 512,
    heads: 4,
    kv_heads: 2,
    vocab: 1024,
    experts: 0,
    shards: 1,
    seed: 5,
};

/// Shapes with every kind of edge: single elements, columns, rows; remainders around 32 and 64; odd `k`.
pub const SHAPES: [(usize, usize); 16] = [
    (1, 1),
    (1, 64),
    (64, 1),
    (64, 64),
    (63, 65),
    (65, 63),
    (65, 130),
    (31, 33),
    (129, 7),
    (200, 96),
    (128, 192),
    (256, 256),
    (1, 4097),
    (4097, 1),
    (320, 1030),
    (768, 512),
];

/// Returns the root mean square.
pub fn rms(values: impl Iterator<Item = f32>) -> f64 {
    let (sum, count) = values.fold((0.0, 0), |(sum, count), value| (sum + f64::from(value).powi(2), count + 1));
    (sum / f64::from(count.max(1))).sqrt()
}

/// Returns the RMS of the difference over the RMS of the truth.
pub fn error(got: &[half::bf16], truth: &[f32]) -> f64 {
    assert_eq!(got.len(), truth.len());
    rms(got.iter().zip(truth).map(|(got, truth)| got.to_f32() - truth)) / rms(truth.iter().copied())
}
