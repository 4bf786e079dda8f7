//! What the GPU tests share: the device, weights of every kind, a small generator.

use std::sync::OnceLock;

use unweight_rt::{
    device::{Device, DeviceBuffer, DeviceError, KernelSet, LaneSize, Refusal, Stream},
    env::Env,
    ops::lane::Lane,
    weight::DeviceMatrix,
};

/// The GPU of this machine. Tests that ask for it are ignored unless they are asked for, and then fail where there is none.
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

/// Behind every output of a test.
pub const GUARD: u8 = 0xa5;

/// A lane for launches that need nothing beside their operands.
pub fn lane(stream: &Stream) -> Lane {
    Lane::new(stream, LaneSize::default()).expect("a lane")
}

/// An output that can be filled, with what lies behind it.
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

/// Fills an output with NaN (all ones) and what lies behind it with the guard.
pub fn poison(stream: &Stream, output: &mut impl Output) {
    output.poison(stream);
}

pub fn guard_is_whole(stream: &Stream, output: &impl Output, what: &str) {
    let written = output.padding(stream).iter().position(|byte| *byte != GUARD);
    assert_eq!(written, None, "{what} wrote past the end of its output");
}

/// Why a result that must be a refusal is one.
pub fn refused<T>(result: Result<T, DeviceError>) -> Refusal {
    match result {
        Ok(_) => panic!("not refused"),
        Err(error) => error.refusal().cloned().unwrap_or_else(|| panic!("not a refusal: {error}")),
    }
}

/// The message of a result that must be an error of the runtime's own, not of the driver.
pub fn refusal<T>(result: Result<T, DeviceError>) -> Option<String> {
    match result {
        Ok(_) => None,
        Err(error @ DeviceError::Driver { .. }) => panic!("the driver failed: {error}"),
        Err(error) => Some(error.to_string()),
    }
}

/// splitmix64: a failure names its seed.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    pub fn uniform(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    pub fn normal(&mut self) -> f64 {
        (-2.0 * self.uniform().max(1e-300).ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weights {
    Normal,
    HeavyTailed,
    AnyBits,
    OneExponent,
    FewExponents,
    /// Rows of rare exponents that are all in the palette: longer than 319 bits where codes may be long.
    LongRows,
    /// Every 16-bit pattern in turn.
    AllPatterns,
}

impl Weights {
    pub const ALL: [Self; 7] = [
        Self::Normal,
        Self::HeavyTailed,
        Self::AnyBits,
        Self::OneExponent,
        Self::FewExponents,
        Self::LongRows,
        Self::AllPatterns,
    ];

    pub fn bytes(self, rows: usize, cols: usize, seed: u64) -> Vec<u8> {
        let mut rng = Rng(seed);
        (0..rows * cols)
            .flat_map(|i| {
                let bits = match self {
                    Self::Normal => bf16(rng.normal() * 0.02),
                    Self::HeavyTailed => bf16(rng.normal() * 0.02 / rng.uniform().max(1e-9).powi(2)),
                    Self::AnyBits => rng.next() as u16,
                    Self::OneExponent => 0x3f00 | (rng.next() as u16 & 0x807f),
                    Self::FewExponents => (rng.next() as u16 & 0x807f) | ((120 + rng.next() as u16 % 3) << 7),
                    Self::LongRows => {
                        let rare = i / cols % 64 == 5;
                        let exponent = if rare { 100 + rng.next() % 16 } else { 100 + rng.next() % 2 };
                        (rng.next() as u16 & 0x807f) | (exponent as u16) << 7
                    }
                    Self::AllPatterns => i as u16,
                };
                bits.to_le_bytes()
            })
            .collect()
    }
}

/// Rounded to nearest even through f32.
pub fn bf16(x: f64) -> u16 {
    let bits = (x as f32).to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

pub fn value(bits: u16) -> f64 {
    f64::from(f32::from_bits(u32::from(bits) << 16))
}

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
